"""`lockstep bench serve`: load a server, and measure it like a simulation. Argument parsing and printing only.

Arrivals are those of a simulation with the same options (`sim/run/load.py: arrivals_of_load`). The sender of `lockstep
replay --to` (live.py) sends them, and bench_run.py measures the answers.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import changed_words, options_of, take, with_flags
from lockstep.sim.cli.errors import refusals
from lockstep.sim.cli.progress import terminal_bar
from lockstep.sim.scenario.scenario import Scenario, names_where
from lockstep.tools.sender_options import BenchOptions

if TYPE_CHECKING:
    from lockstep.tools.bench_run import BenchRun
    from lockstep.tools.live import Asking, Sender

WORKLOAD = options_of(Scenario)["workload"]
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@click.group()
def bench() -> None:
    """Measure a running server."""


@bench.command(context_settings={"show_default": True, "max_content_width": 120})
@with_flags(click.option, options_of(BenchOptions).values(), choice=click.Choice)
@click.option(
    WORKLOAD.flag,
    "workloads",
    required=True,
    multiple=True,
    metavar=WORKLOAD.option.metavar,
    help=WORKLOAD.option.help,
)
@with_flags(click.option, [options_of(Scenario)[name] for name in names_where("sent")])
def serve(workloads: tuple[str, ...], slos: tuple[str, ...], **options: Any) -> None:
    """Send a workload to an OpenAI-compatible server and measure the answers.

    Workload, load and figures mean what they mean to `lockstep simulate`, so that `lockstep compare` can hold the run
    folders of both side by side. A key goes in OPENAI_API_KEY. Ctrl-C stops sending and reports what there was. Exit
    status: 0; 1 if no request was answered; 130 after Ctrl-C.

    \b
    lockstep bench serve --to http://127.0.0.1:8000 --workload conversation_trace.jsonl.gz --time-window 0..300
    lockstep bench serve --to http://127.0.0.1:8000 --workload gen:n=200,rate=5 --slo ttft_p99=500ms --out runs/real
    lockstep bench serve --to http://127.0.0.1:8000 --workload gen:n=500 --concurrency 16
    """
    given = take(BenchOptions, options)
    out = given.out
    with refusals():
        from lockstep.sim.metrics.slo import Slo
        from lockstep.sim.run.load import arrivals_of_load, check_load, check_measured, check_seed, open_load
        from lockstep.sim.run.run_folder import prepare_folder, workload_line
        from lockstep.sim.workload.mix import mix_of
        from lockstep.tools.bench_run import measure, write_run
        from lockstep.tools.http_stream import HttpError, ServerAddress
        from lockstep.tools.live import Sender, check_timeout

        check_timeout(given.timeout_s)
        target = ServerAddress.parse(given.url)
        scenario = Scenario(
            model=given.model or "", gpu="", workload=mix_of(workloads), slos=tuple(map(Slo.parse, slos)), **options
        )
        for slo in scenario.slos:
            if slo.metric == "call":
                raise ConfigError(
                    f"`slo` {slo}: requests are sent one after the other, so those of a call do not arrive together\n"
                    "hint: --slo e2e_p99=1s"
                )
        check_seed(scenario.seed)
        check_load(scenario)
        extra = _fields(given.body)
        if out is not None:
            prepare_folder(out, overwrite=given.overwrite)
        workload = open_load(scenario)
        check_measured(scenario, workload)
        try:
            server = asyncio.run(_ask_about(target, given.url, given.model))
            asking = _asking(server, given, extra)
            arrivals = arrivals_of_load(scenario, workload.turns, server.prompt_tokens_max)
            closed = scenario.concurrency is not None
            click.echo(
                f"seed {scenario.seed}, {server.model} at {given.url}; {workload_line(workload, closed=closed)}",
                err=True,
            )
            with _progress(arrivals.expected) as tick:
                sender = Sender(target, arrivals, workload.turns, server.model, asking, given.timeout_s, tick)
                interrupted = asyncio.run(sender.run())
        except (OSError, HttpError) as error:
            raise _unreachable(given.url, error) from error
        run = measure(
            sender,
            scenario,
            workload,
            url=given.url,
            interrupted=interrupted,
            command=_command(given, scenario),
        )
        if out is not None:
            write_run(out, run)
    _show(run, out, given.as_json)
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)
    if not run.answered:
        sys.exit(EXIT_FAILED)


class _Server:
    """The server's description of its model."""

    def __init__(self, model: str, vocabulary: int | None, context_tokens_max: int | None) -> None:
        from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX

        self.model, self.vocabulary = model, vocabulary
        self.prompt_tokens_max = LENGTH_TOKENS_MAX if context_tokens_max is None else context_tokens_max - 1


async def _ask_about(target: Any, url: str, model: str | None) -> _Server:
    """Request the models of a server and check that it has `model`. Raises ConfigError, OSError, HttpError."""
    from lockstep.tools.live import client_of

    client = client_of(target)
    try:
        status, listed = await _get(client, "/v1/models")
        if status in (401, 403):
            raise ConfigError(f"`{url}` requires a key (status {status})\nhint: set OPENAI_API_KEY")
        models = [one for one in listed.get("data") or () if isinstance(one, dict) and isinstance(one.get("id"), str)]
        names = [one["id"] for one in models]
        if status != 200 or not names:
            raise ConfigError(
                f"`{url}` is not an OpenAI-compatible server: /v1/models has status {status} and lists no models\n"
                "hint: give the part of the URL in front of /v1"
            )
        if model is not None and model not in names:
            raise ConfigError(f"`--model` {model} is not served at {url}\nhint: it has {', '.join(names)}")
        found = next(one for one in models if model in (None, one["id"]))
        status, info = await _get(client, "/get_model_info")  # a route of lockstep; other servers may not have it
        about = info if status == 200 else {}
        context = found.get("max_model_len") or about.get("max_model_len")
        return _Server(found["id"], _whole(about.get("vocab_size")), _whole(context))
    finally:
        client.close()


async def _get(client: Any, path: str) -> tuple[int, dict[str, Any]]:
    async with client.request("GET", path, b"") as response:
        text = b"".join([piece async for piece in response.pieces()])
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    return response.status, content if isinstance(content, dict) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _asking(server: _Server, given: BenchOptions, fields: dict[str, Any]) -> Asking:
    from lockstep.tools.live import WORDS, Asking, TokenIdPrompts

    vocabulary = server.vocabulary if given.vocab is None else given.vocab
    if given.chat and given.prompts == "ids":
        raise ConfigError("`--prompts` ids cannot be messages of a chat\nhint: leave out --chat, or give words")
    if given.prompts == "ids" and vocabulary is None:
        raise ConfigError(
            "`--prompts` ids needs the size of the vocabulary, and the server does not report it\nhint: --vocab"
        )
    if given.vocab is not None and (given.chat or given.prompts == "words"):
        raise ConfigError(f"`--vocab` {given.vocab} is for prompts of token ids\nhint: leave it out")
    ids = given.prompts != "words" and vocabulary is not None and not given.chat
    form = TokenIdPrompts(vocabulary) if ids and vocabulary is not None else WORDS
    return Asking(form, chat=given.chat, ignore_eos=given.ignore_eos, fields=fields)


def _fields(body: str | None) -> dict[str, Any]:
    try:
        found = json.loads(body or "{}")
    except ValueError as error:
        raise ConfigError(f"`--body` is not JSON: {error}\nhint: such as '{{\"top_p\": 0.9}}'") from error
    if not isinstance(found, dict):
        raise ConfigError(f"`--body` must be an object of fields, got `{body}`")
    return found


def _unreachable(url: str, error: Exception) -> ConfigError:
    why = str(error) or type(error).__name__
    return ConfigError(f"`{url}` cannot be reached: {why}\nhint: is the server up, and is this its port?")


def _command(given: BenchOptions, scenario: Scenario) -> str:
    """Return the command line that repeats this run, without the options of its output."""
    of_engine = [name for name in options_of(Scenario) if name not in ("workload", *names_where("sent"))]
    words = changed_words(given, leave_out=("timeout_s", "out", "overwrite", "as_json"))
    words += changed_words(scenario, always=("seed",), leave_out=of_engine)
    return shlex.join(["lockstep", "bench", "serve", *words])


@contextmanager
def _progress(requests: int) -> Iterator[Callable[[Sender], None] | None]:
    """Yield a callback for a progress bar on stderr; None if that is not a terminal."""
    with terminal_bar() as bar:
        if bar is None:
            yield None
            return
        task = bar.add_task("requests ended", total=requests)

        def tick(sender: Sender) -> None:
            open_requests = len(sender.sent) - sender.ended
            bar.update(task, completed=sender.ended, description=f"{open_requests:,} open, ended")

        yield tick


def _show(run: BenchRun, out: Path | None, as_json: bool) -> None:
    from lockstep.tools.bench_run import report_lines, tables

    if as_json:
        click.echo(json.dumps(run.metrics, indent=2, allow_nan=False, ensure_ascii=False))
    else:
        from rich.console import Console

        console = Console()
        for table in tables(run):
            console.print(table)
        for line in report_lines(run):
            click.echo(line)
    if out is not None:
        written = ", ".join(path.name for path in sorted(out.iterdir()))
        click.echo(f"{out} has {written}", err=True)
