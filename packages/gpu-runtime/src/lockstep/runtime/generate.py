"""`lockstep generate`: prompts in, answers out, through the whole engine. Argument parsing, JSONL and the progress bar.

A line of input is an object: `prompt` (text or token ids) or `messages` (a conversation), an `id` of the client's own
if it likes, and fields of Params, which go before the options of the command line.

    {"id": "a", "prompt": "Returns the", "max_new_tokens": 20}
    {"messages": [{"role": "user", "content": "What does len do?"}], "temperature": 0.7, "seed": 3}
    {"prompt": "def ", "temperature": 0.7, "n": 3}
    {"prompt": "It is", "grammar": ["regex", "true|false"]}

A line of output answers the line of input with the same number; where that asks for several answers, with `n`, they are
in `answers`. A line that is wrong is answered with `error`, and the
others go on; the exit status is then 1.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.records import JournalError
from lockstep.host.adapters import named_folders
from lockstep.host.engine_options import Numerics
from lockstep.host.errors import EngineStopped
from lockstep.host.grammars import Kind
from lockstep.runtime.errors import DeviceLost
from lockstep.runtime.llm import LLM, LlmStats
from lockstep.runtime.outputs import PendingRequest, RequestOutput
from lockstep.runtime.params import Params
from lockstep.runtime.profiler import Activity
from lockstep.runtime.ranks import TIMEOUT_S
from lockstep.runtime.watchdog import TIMEOUT_S as BATCH_TIMEOUT_S


class InputLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of input."""

    id: Any = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    n: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    logit_processors: dict[str, dict[str, Any]] | None = None
    adapter: str | None = None
    grammar: tuple[Kind, str] | None = None


FROM_LINE = [name for name in InputLine.__struct_fields__ if name in Params.__dataclass_fields__]


@click.command("generate")
@click.argument("source", required=False, type=click.File("rb"), metavar="[INPUT.jsonl]")
@click.option("--prompt", "prompts", multiple=True, help="A prompt, instead of INPUT; may be given again.")
@click.option("--chat", is_flag=True, help="Each --prompt is what a user says, put into the model's chat template.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="Where the answers go, as JSONL; default: stdout.",
)
@click.option("--model", type=click.Path(path_type=Path), help="A Hugging Face folder; default: the demo model.")
@click.option("--draft-model", type=click.Path(path_type=Path), help="A small model whose guesses are verified.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--dtype", default="auto", show_default=True, help="auto, bfloat16, float16, float32")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="auto, fp8_e4m3")
@click.option(
    "--fp8-activations", default="auto", show_default=True, help="auto, on, off: round what meets fp8 weights, too"
)
@click.option("--attention-backend", default="auto", show_default=True, help="auto, flashinfer, triton, reference")
@click.option("--numerics", type=click.Choice(["fast", "invariant"]), default="fast", show_default=True)
@click.option("--tp", default=1, show_default=True, help="GPUs that share one copy of the model (tensor parallelism).")
@click.option(
    "--batch-timeout",
    type=float,
    default=BATCH_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="An engine whose oldest batch does not come back for so long has failed; 0: never. With --tp: --rank-timeout.",
)
@click.option("--rank-timeout", type=float, default=TIMEOUT_S, show_default=True, metavar="SECONDS", help="With --tp.")
@click.option("--mem-fraction", type=float, default=0.9, show_default=True, help="Of a GPU's memory, all together.")
@click.option("--no-cuda-graphs", is_flag=True, help="Launch the kernels of every decode one by one.")
@click.option("--cuda-graph-max-batch", type=int, metavar="ROWS", help="Of the largest graph; default: as many as run.")
@click.option("--max-new-tokens", type=int, default=Params.max_new_tokens, show_default=True)
@click.option("--temperature", type=float, default=Params.temperature, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=Params.top_p, show_default=True)
@click.option("--top-k", type=int, default=Params.top_k, show_default=True, help="0: all tokens.")
@click.option("--stop", multiple=True, help="A text at which an answer ends; may be given again.")
@click.option("--ignore-eos", is_flag=True, help="Go on behind the model's end tokens.")
@click.option("--seed", type=int, default=0, show_default=True, help="For requests without one of their own.")
@click.option("--journal", type=click.Path(path_type=Path), metavar="DIR", help="Record all facts and decisions there.")
@click.option("--lora", multiple=True, metavar="NAME=PATH", help="A LoRA adapter; lines of INPUT may name it.")
@click.option("--adapter", default="", metavar="NAME", help="The adapter of prompts that name none.")
@click.option(
    "--logit-processor",
    "logit_processors",
    multiple=True,
    metavar="NAME",
    help="Of an installed package; lines of INPUT may then ask for it. May be given again.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the scheduler.")
@click.option("--random-weights", type=int, metavar="SEED", help="Small random weights; only config.json is read.")
@click.option("--profile", type=click.Path(path_type=Path), metavar="DIR", help="Write traces of CPU and GPU there.")
@click.option(
    "--profile-start-step", type=int, default=0, show_default=True, help="Launches before the first recorded."
)
@click.option("--profile-steps", type=int, default=10, show_default=True, help="Launches recorded; 0: all that follow.")
@click.option(
    "--profile-activity", multiple=True, type=click.Choice(["cpu", "gpu"]), help="May be given again; default: all."
)
@click.option("--profile-shapes", is_flag=True, help="With the shapes of what operators are given. Slower.")
@click.option("--profile-stacks", is_flag=True, help="With the Python lines that called them. Much slower.")
@click.option("--profile-by-stage", is_flag=True, help="Extends and decodes in files of their own.")
@click.option(
    "--warm-up/--no-warm-up", default=None, help="Compile kernels before the first request; default: on a GPU."
)
@click.option("--debug", is_flag=True, help="Check every plan, and every KV slot before it is read. Slow.")
@click.option("--show-token-ids", is_flag=True, help="Answers have their token ids as well.")
@click.option("--quiet", is_flag=True, help="No log, summary and progress bar.")
@click.option("--verbose", is_flag=True, help="The log with a single --prompt, too: backend, memory, time to start.")
def generate(
    source: IO[bytes] | None,
    prompts: tuple[str, ...],
    chat: bool,
    out: Path | None,
    model: Path | None,
    device: str,
    dtype: str,
    kv_cache_dtype: str,
    fp8_activations: Any,
    attention_backend: str,
    numerics: Numerics,
    tp: int,
    batch_timeout: float,
    rank_timeout: float,
    mem_fraction: float,
    no_cuda_graphs: bool,
    cuda_graph_max_batch: int | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    seed: int,
    journal: Path | None,
    lora: tuple[str, ...],
    adapter: str,
    logit_processors: tuple[str, ...],
    settings: tuple[str, ...],
    random_weights: int | None,
    draft_model: Path | None,
    profile: Path | None,
    profile_start_step: int,
    profile_steps: int,
    profile_activity: tuple[Activity, ...],
    profile_shapes: bool,
    profile_stacks: bool,
    profile_by_stage: bool,
    warm_up: bool | None,
    debug: bool,
    show_token_ids: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Answer prompts with a model in this process, from a JSONL file or from --prompt.

    With one --prompt and no --out the answer is printed as text, while it is made. Else answers are JSON, one object
    per line, in the order of the input.
    """
    if (source is None) == (not prompts):
        raise click.UsageError("give either INPUT.jsonl (- for stdin) or --prompt")
    if quiet and verbose:
        raise click.UsageError("give either --quiet or --verbose")
    if out is not None:
        _check_out(out, source)
    params = Params(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop,
        ignore_eos=ignore_eos,
        adapter=adapter,
    )
    click.get_current_context().with_resource(_logged(quiet or (len(prompts) == 1 and out is None and not verbose)))
    try:
        llm = LLM(
            model,
            device=device,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            fp8_activations=fp8_activations,
            attention_backend=attention_backend,
            numerics=numerics,
            tensor_parallel=tp,
            batch_timeout_s=batch_timeout,
            rank_timeout_s=rank_timeout,
            mem_fraction=mem_fraction,
            cuda_graphs="off" if no_cuda_graphs else "auto",
            cuda_graph_max_batch=cuda_graph_max_batch,
            random_weights_seed=random_weights,
            draft_model=draft_model,
            seed=seed,
            journal=journal,
            adapters=named_folders(lora),
            logit_processors=logit_processors,
            warm_up=warm_up,
            debug=debug,
            **_sched(settings),
        )
        with llm, ExitStack() as at_end:
            if profile is not None:
                llm.start_profile(
                    profile,
                    start_step=profile_start_step,
                    steps=profile_steps or None,
                    activities=profile_activity,
                    record_shapes=profile_shapes,
                    with_stack=profile_stacks,
                    by_stage=profile_by_stage,
                )
                at_end.callback(_end_profile, llm)
            if len(prompts) == 1 and out is None:
                return _print(llm, prompts[0], chat, params)
            lines = _given(prompts, chat) if source is None else source
            if out is None:
                return _answer(llm, lines, sys.stdout, params, show_token_ids, quiet)
            with out.open("w", encoding="utf-8") as file:
                return _answer(llm, lines, file, params, show_token_ids, quiet)
    except (EngineStopped, DeviceLost, JournalError) as error:
        click.echo(f"lockstep generate: {error}", err=True)
        return 1


def _check_out(out: Path, source: IO[bytes] | None) -> None:
    """Raise ConfigError, before a model is loaded, for a file that cannot be written, or that is being read."""
    if not out.parent.is_dir():
        raise ConfigError(f"`--out` {out}: there is no folder {out.parent}\nhint: make it first")
    if out.is_dir():
        raise ConfigError(f"`--out` {out} is a folder\nhint: name a file in it")
    try:
        same = source is not None and out.exists() and os.path.samestat(out.stat(), os.fstat(source.fileno()))
    except io.UnsupportedOperation:  # input that is no file
        same = False
    if same:
        raise ConfigError(f"`--out` {out} is the input, which would be lost\nhint: name another file")


@contextmanager
def _logged(quiet: bool) -> Iterator[None]:
    """What the runtime logs goes to stderr: which backend was chosen, what takes memory, how long a start took."""
    handler, logger = logging.StreamHandler(), logging.getLogger("lockstep.runtime")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _print(llm: LLM, prompt: str, chat: bool, params: Params) -> int:
    """One answer, as text, while it is made."""
    said = llm.chat_prompt([{"role": "user", "content": prompt}]) if chat else prompt
    answer = None
    for piece in llm.stream(said, params):
        click.echo(piece.text, nl=False)
        answer = piece.answer
    assert answer is not None
    if answer.error and not answer.token_ids:
        raise ConfigError(answer.error)
    click.echo()
    if answer.error:
        click.echo(f"lockstep generate: {answer.error}", err=True)
    return 1 if answer.error else 0


def _end_profile(llm: LLM) -> None:
    """Say where the traces are, or why there are none."""
    try:
        files = llm.stop_profile()
    except (ConfigError, EngineStopped) as error:
        click.echo(f"lockstep generate: {error}", err=True)
        return
    said = f"profile: {', '.join(map(str, files))}" if files else "profile: no launch came to be recorded"
    click.echo(said, err=True)


def _answer(llm: LLM, lines: Iterable[bytes], out: IO[str], params: Params, show_token_ids: bool, quiet: bool) -> int:
    """Every line's answer, in order. All are sent first, so that the engine has something to choose from."""
    asked: list[PendingRequest | str] = []
    names: list[dict[str, Any]] = []
    for number, raw in enumerate(lines, 1):
        if raw.strip():
            line, error = _read(raw)
            names.append({"line": number} | ({"id": line.id} if line is not None and line.id is not None else {}))
            asked.append(error if line is None else _ask(llm, line, params))
    wrong = output_tokens = 0
    with _progress(len(asked), quiet) as advance:
        for one, said in zip(asked, names, strict=True):
            if isinstance(one, str):
                said["error"] = one
            else:
                answer = llm.wait(one)
                output_tokens += sum(len(sample.token_ids) for sample in (answer, *answer.others))
                said.update(_spoken(answer, show_token_ids))
            wrong += "error" in said
            out.write(json.dumps(said, ensure_ascii=False) + "\n")
            out.flush()
            advance()
    if wrong:
        click.echo(f"lockstep generate: {wrong} of {len(asked)} lines have an `error` in the output", err=True)
    if not quiet:
        click.echo(_summary(llm.stats(), len(asked) - wrong, output_tokens), err=True)
    return 1 if wrong else 0


def _summary(stats: LlmStats, answers: int, output_tokens: int) -> str:
    """What was done, how fast, and whether the device had to wait."""
    work_s = stats.device.work_us / 1e6
    said = f"{answers:,} answers, {output_tokens:,} output tokens in {stats.batches:,} batches"
    if not work_s or stats.device.bubble_share is None:
        return said
    speed = f"{work_s:,.2f} s, {output_tokens / work_s:,.0f} tokens/s"
    return f"{said} and {speed}; bubbles: the device was idle {stats.device.bubble_share:.1%} of that time"


def _read(raw: bytes) -> tuple[InputLine | None, str]:
    """A line of input, or what is wrong with it."""
    try:
        line = msgspec.json.decode(raw, type=InputLine)
    except msgspec.ValidationError as error:
        return None, str(error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"this line is no JSON object: {error}"
    if (line.prompt is None) == (line.messages is None):
        return None, "give either `prompt` or `messages`"
    return line, ""


def _ask(llm: LLM, line: InputLine, params: Params) -> PendingRequest | str:
    """Send a line's request, or say what is wrong with it."""
    given = {name: value for name in FROM_LINE if (value := getattr(line, name)) is not None}
    if isinstance(line.stop, str):
        given["stop"] = [line.stop]
    try:
        prompt = llm.chat_prompt(line.messages) if line.messages is not None else line.prompt
        assert prompt is not None
        return llm.ask(prompt, replace(params, **given))
    except ConfigError as error:
        return str(error)


def _spoken(answer: RequestOutput, show_token_ids: bool) -> dict[str, Any]:
    """What came of a prompt as JSON. Of several answers, where one failed, `error` of the line says so as well."""
    if not answer.others:
        return _spoken_alone(answer, show_token_ids)
    said = [_spoken_alone(one, show_token_ids) for one in (answer, *answer.others)]
    errors = [one["error"] for one in said if "error" in one]
    return {"answers": said} | ({"error": errors[0]} if errors else {})


def _spoken_alone(answer: RequestOutput, show_token_ids: bool) -> dict[str, Any]:
    """An answer as JSON."""
    if answer.error:
        return {"error": answer.error}
    said: dict[str, Any] = {"text": answer.text} if answer.text is not None else {}
    if show_token_ids or answer.text is None:
        said["token_ids"] = answer.token_ids
    said |= {
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(answer.prompt_token_ids),
        "output_tokens": len(answer.token_ids),
        "cached_tokens": answer.cached_tokens,
    }
    for name in ("logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"):
        if value := getattr(answer, name):
            said[name] = value
    return said


def _given(prompts: tuple[str, ...], chat: bool) -> list[bytes]:
    """Prompts of the command line as lines of input."""
    said = [{"messages": [{"role": "user", "content": one}]} if chat else {"prompt": one} for one in prompts]
    return [json.dumps(one).encode() for one in said]


def _sched(settings: tuple[str, ...]) -> dict[str, Any]:
    """--set NAME=VALUE: numbers and true, false, null as JSON says them, everything else is text."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise click.UsageError(f"--set needs NAME=VALUE, got `{setting}`")
        try:
            read = json.loads(value)
            found[name] = tuple(read) if isinstance(read, list) else read
        except ValueError:
            found[name] = value
    return found


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda: bar.advance(task)
