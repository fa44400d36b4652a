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
from typing import TYPE_CHECKING, Any, Literal

import click

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cli.errors import refusals
from lockstep.sim.cli.progress import terminal_bar

if TYPE_CHECKING:
    from lockstep.sim.scenario.scenario import Scenario
    from lockstep.tools.bench_run import BenchRun
    from lockstep.tools.live import Asking, Sender

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@click.group()
def bench() -> None:
    """Measure a running server."""


@bench.command(context_settings={"show_default": True, "max_content_width": 120})
@click.option("--to", "url", required=True, metavar="URL", help="the server, such as http://127.0.0.1:8000")
@click.option("--model", help="name to ask for  [default: the first that the server offers]")
@click.option(
    "--workload",
    "workloads",
    required=True,
    multiple=True,
    metavar="PATH|gen:...",
    help="a trace, a fitted model, or a generator: docs/workloads.md; several, as [TENANT=]WORKLOAD[@RATE], are mixed",
)
@click.option("--rate", type=click.FLOAT, help="requests per second: stretches a trace  [default: as recorded]")
@click.option("--rate-scale", default=1.0, help="multiplies the rate: 2 halves every gap")
@click.option("--time-window", metavar="FROM..TO", help="keep what arrives then, in recorded time: 10m..1h")
@click.option("--concurrency", type=click.INT, help="closed loop: so many sessions at a time, whatever the clock says")
@click.option("--limit", type=click.INT, help="keep the first so many requests")
@click.option("--warm-up", default=0, help="the first so many requests are sent and not measured")
@click.option("--skip-bad-rows", is_flag=True, help="leave out rows that cannot be right")
@click.option("--seed", default=7, help="of whatever is drawn")
@click.option("--slo", "slos", multiple=True, metavar="SLO", help="a bound, such as ttft_p99=500ms; for goodput")
@click.option(
    "--prompts",
    type=click.Choice(["auto", "ids", "words"]),
    default="auto",
    help="token ids, exactly as long as in the workload, or words; auto: ids where the vocabulary is known",
)
@click.option("--vocab", type=click.INT, help="tokens of the model, for ids  [default: what the server says]")
@click.option("--chat", is_flag=True, help="ask /v1/chat/completions, each prompt as one message of words")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    help="ask for answers exactly as long as in the workload (vLLM, SGLang and lockstep know the field; OpenAI not)",
)
@click.option("--body", metavar="JSON", help="fields for every request, such as '{\"top_p\": 0.9}'")
@click.option("--timeout", "timeout_s", default=600.0, help="seconds that one answer may take")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="write a run folder")
@click.option("--overwrite", is_flag=True, help="replace the run in DIR")
@click.option("--json", "as_json", is_flag=True, help="print metrics.json instead of tables")
def serve(
    url: str,
    model: str | None,
    workloads: tuple[str, ...],
    slos: tuple[str, ...],
    prompts: Literal["auto", "ids", "words"],
    vocab: int | None,
    chat: bool,
    ignore_eos: bool,
    body: str | None,
    timeout_s: float,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send a workload to an OpenAI-compatible server and measure the answers.

    Workload, load and figures mean what they mean to `lockstep simulate`, so that `lockstep compare` can hold the run
    folders of both side by side. A key goes in OPENAI_API_KEY. Ctrl-C stops sending and reports what there was. Exit
    status: 0; 1 if no request was answered; 130 after Ctrl-C.

    \b
    lockstep bench serve --to http://127.0.0.1:8000 --workload conversation_trace.jsonl.gz --time-window 0..300
    lockstep bench serve --to http://127.0.0.1:8000 --workload gen:n=200,rate=5 --slo ttft_p99=500ms --out runs/real
    lockstep bench serve --to http://127.0.0.1:8000 --workload gen:n=500 --concurrency 16
    """
    with refusals():
        from lockstep.sim.metrics.slo import Slo
        from lockstep.sim.run.load import arrivals_of_load, check_load, check_measured, check_seed, open_load
        from lockstep.sim.run.run_folder import prepare_folder, workload_line
        from lockstep.sim.scenario.scenario import Scenario
        from lockstep.sim.workload.mix import mix_of
        from lockstep.tools.bench_run import measure, write_run
        from lockstep.tools.http_stream import HttpError, ServerAddress
        from lockstep.tools.live import Sender, check_timeout

        check_timeout(timeout_s)
        target = ServerAddress.parse(url)
        scenario = Scenario(
            model=model or "", gpu="", workload=mix_of(workloads), slos=tuple(map(Slo.parse, slos)), **options
        )
        check_seed(scenario.seed)
        check_load(scenario)
        extra = _fields(body)
        if out is not None:
            prepare_folder(out, overwrite=overwrite)
        workload = open_load(scenario)
        check_measured(scenario, workload)
        try:
            server = asyncio.run(_ask_about(target, url, model))
            asking = _asking(server, prompts, vocab, chat=chat, ignore_eos=ignore_eos, fields=extra)
            arrivals = arrivals_of_load(scenario, workload.turns, server.prompt_tokens_max)
            closed = scenario.concurrency is not None
            click.echo(
                f"seed {scenario.seed}, {server.model} at {url}; {workload_line(workload, closed=closed)}", err=True
            )
            with _progress(arrivals.expected) as tick:
                sender = Sender(target, arrivals, workload.turns, server.model, asking, timeout_s, tick)
                interrupted = asyncio.run(sender.run())
        except (OSError, HttpError) as error:
            raise _unreachable(url, error) from error
        run = measure(
            sender,
            scenario,
            workload,
            url=url,
            interrupted=interrupted,
            command=_command(url, scenario, prompts, vocab, chat=chat, ignore_eos=ignore_eos, body=body),
        )
        if out is not None:
            write_run(out, run)
    _show(run, out, as_json)
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


def _asking(
    server: _Server,
    prompts: Literal["auto", "ids", "words"],
    vocab: int | None,
    *,
    chat: bool,
    ignore_eos: bool,
    fields: dict[str, Any],
) -> Asking:
    from lockstep.tools.live import WORDS, Asking, TokenIdPrompts

    vocabulary = server.vocabulary if vocab is None else vocab
    if chat and prompts == "ids":
        raise ConfigError("`--prompts` ids cannot be messages of a chat\nhint: leave out --chat, or give words")
    if prompts == "ids" and vocabulary is None:
        raise ConfigError(
            "`--prompts` ids needs the size of the vocabulary, and the server does not report it\nhint: --vocab"
        )
    if vocab is not None and (chat or prompts == "words"):
        raise ConfigError(f"`--vocab` {vocab} is for prompts of token ids\nhint: leave it out")
    ids = prompts != "words" and vocabulary is not None and not chat
    form = TokenIdPrompts(vocabulary) if ids and vocabulary is not None else WORDS
    return Asking(form, chat=chat, ignore_eos=ignore_eos, fields=fields)


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


def _command(
    url: str,
    scenario: Scenario,
    prompts: str,
    vocab: int | None,
    *,
    chat: bool,
    ignore_eos: bool,
    body: str | None,
) -> str:
    """Return the command line that repeats this run."""
    from lockstep.host.options import number_word, option_of

    words = ["lockstep", "bench", "serve", "--to", url, "--workload", scenario.workload]
    if scenario.model:
        words += ["--model", scenario.model]
    for name in ("rate", "rate_scale", "time_window", "concurrency", "warm_up", "limit", "seed"):
        value = getattr(scenario, name)
        if name == "seed" or value != getattr(type(scenario), name):
            words += [option_of(name), number_word(value) if isinstance(value, float) else str(value)]
    words += ["--skip-bad-rows"] * scenario.skip_bad_rows
    words += [word for slo in scenario.slos for word in ("--slo", str(slo))]
    words += ["--prompts", prompts] if prompts != "auto" else []
    words += ["--vocab", str(vocab)] if vocab is not None else []
    words += ["--chat"] * chat + ["--no-ignore-eos"] * (not ignore_eos)
    words += ["--body", body] if body is not None else []
    return shlex.join(words)


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
