"""`lockstep generate`: prompts in, answers out, through the whole engine. Argument parsing, JSONL and the progress bar.

A line of input is an object with `prompt` (text or token ids) or `messages` (a conversation), optionally an `id` chosen
by the client, and fields of Params, which override the options of the command line.

    {"id": "a", "prompt": "Returns the", "max_new_tokens": 20}
    {"messages": [{"role": "user", "content": "What does len do?"}], "temperature": 0.7, "seed": 3}
    {"prompt": "def ", "temperature": 0.7, "n": 3}
    {"prompt": "It is", "grammar": ["regex", "true|false"]}

A line of output answers the line of input with the same number. If that line requests several answers with `n`, they
are in `answers`. The output of an invalid line has `error`. Other lines are not affected, but the exit status is then
1.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.records import JournalError
from lockstep.host.adapters import named_folders
from lockstep.host.errors import EngineStopped
from lockstep.host.grammars import Kind
from lockstep.host.options import Option, options_of, take, with_flags
from lockstep.runtime.engine_config import EngineConfig
from lockstep.runtime.errors import DeviceLost
from lockstep.runtime.llm import LLM, LlmStats
from lockstep.runtime.outputs import PendingRequest, RequestOutput
from lockstep.runtime.params import Params
from lockstep.runtime.sources import find_model


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


ENGINE_FLAGS = {
    name: replace(field, option=replace(field.option, flag="--batch-timeout")) if name == "batch_timeout_s" else field
    for name, field in options_of(EngineConfig).items()
    if name not in ("cuda_graphs", "grammar_backend")
}
"""Options of the engine that the command has, by name."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `lockstep generate` besides those of the engine."""

    prompts: Annotated[tuple[str, ...], Option("A prompt, instead of INPUT; may be repeated.", flag="--prompt")] = ()
    chat: Annotated[bool, Option("Format each --prompt as a user's message by the model's chat template.")] = False
    out: Annotated[Path | None, Option("The file for the answers, as JSONL.", short="-o", default="stdout")] = None
    model: Annotated[
        Path | None,
        Option("A Hugging Face folder, a GGUF file, or smollm2, which is fetched.", default="the demo model"),
    ] = None
    no_cuda_graphs: Annotated[bool, Option("Launch the kernels of every decode one by one.")] = False
    max_new_tokens: Annotated[int, Option("Most output tokens of an answer.")] = Params.max_new_tokens
    temperature: Annotated[float, Option("0 is greedy.")] = Params.temperature
    top_p: Annotated[float, Option("Share of the probability from which tokens are drawn.")] = Params.top_p
    top_k: Annotated[int, Option("Number of likeliest tokens from which tokens are drawn; 0: all.")] = Params.top_k
    stop: Annotated[tuple[str, ...], Option("A text that ends an answer; may be repeated.")] = ()
    ignore_eos: Annotated[bool, Option("Continue after the model's end tokens.")] = False
    lora: Annotated[tuple[str, ...], Option("A LoRA adapter; lines of INPUT may name it.", metavar="NAME=PATH")] = ()
    adapter: Annotated[str, Option("The adapter of prompts without their own.", metavar="NAME")] = ""
    settings: Annotated[tuple[str, ...], Option("A setting of the scheduler.", flag="--set", metavar="NAME=VALUE")] = ()
    profile: Annotated[Path | None, Option("Write traces of CPU and GPU to this folder.", metavar="DIR")] = None
    profile_start_step: Annotated[int, Option("Launches before the first that is recorded.")] = 0
    profile_steps: Annotated[int, Option("Launches to record; 0: all that follow.")] = 10
    profile_activity: Annotated[
        tuple[str, ...], Option("A processor to record; may be repeated.", default="all", choices=("cpu", "gpu"))
    ] = ()
    profile_shapes: Annotated[bool, Option("Record the shapes of the operators' inputs. Slower.")] = False
    profile_stacks: Annotated[bool, Option("Record the Python lines that called the operators. Much slower.")] = False
    profile_by_stage: Annotated[bool, Option("Write extends and decodes to separate files.")] = False
    show_token_ids: Annotated[bool, Option("Add the token ids to the answers.")] = False
    quiet: Annotated[bool, Option("Show no log, summary or progress bar.")] = False
    verbose: Annotated[bool, Option("Show the log for a single --prompt, too: backend, memory, time to start.")] = False

    @property
    def prints(self) -> bool:
        """Return whether the answer to a single prompt is printed as text while it is generated."""
        return len(self.prompts) == 1 and self.out is None

    def params(self) -> Params:
        """Return the parameters of requests that set none themselves."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "stop", "ignore_eos", "adapter")
        return Params(**{name: getattr(self, name) for name in names})

    def profile_options(self) -> dict[str, Any]:
        """Return the options of `LLM.start_profile`."""
        return {
            "start_step": self.profile_start_step,
            "steps": self.profile_steps or None,
            "activities": self.profile_activity,
            "record_shapes": self.profile_shapes,
            "with_stack": self.profile_stacks,
            "by_stage": self.profile_by_stage,
        }


@click.command("generate", context_settings={"show_default": True})
@click.argument("source", required=False, type=click.File("rb"), metavar="[INPUT.jsonl]")
@with_flags(click.option, options_of(GenerateOptions).values(), choice=click.Choice)
@with_flags(click.option, ENGINE_FLAGS.values(), keep_absent=True)
def generate(source: IO[bytes] | None, **options: Any) -> int:
    """Answer prompts with a model in this process, from a JSONL file or from --prompt.

    With one --prompt and no --out the answer is printed as text, while it is generated. Otherwise answers are JSON, one
    object per line, in the order of the input.
    """
    given = take(GenerateOptions, options)
    if (source is None) == (not given.prompts):
        raise click.UsageError("give either INPUT.jsonl (- for stdin) or --prompt")
    if given.quiet and given.verbose:
        raise click.UsageError("give either --quiet or --verbose")
    if given.out is not None:
        _check_out(given.out, source)
    engine = {name: value for name, value in options.items() if value not in (None, ())}
    click.get_current_context().with_resource(_logged(given.quiet or (given.prints and not given.verbose)))
    try:
        config = EngineConfig(lora=named_folders(given.lora), cuda_graphs="off" if given.no_cuda_graphs else "auto")
        model = None if given.model is None else find_model(given.model, _say(given.quiet))
        llm = LLM(model, config, **engine, **_sched(given.settings))
        with llm, ExitStack() as at_end:
            if given.profile is not None:
                llm.start_profile(given.profile, **given.profile_options())
                at_end.callback(_end_profile, llm)
            if given.prints:
                return _print(llm, given.prompts[0], given.chat, given.params())
            lines = _given(given.prompts, given.chat) if source is None else source
            if given.out is None:
                return _answer(llm, lines, sys.stdout, given)
            with given.out.open("w", encoding="utf-8") as file:
                return _answer(llm, lines, file, given)
    except (EngineStopped, DeviceLost, JournalError) as error:
        click.echo(f"lockstep generate: {error}", err=True)
        return 1


def _say(quiet: bool) -> Callable[[str], None]:
    """Return what shows a line about the model: to stderr, also where the log is not shown."""
    return (lambda line: None) if quiet else (lambda line: click.echo(line, err=True))


def _check_out(out: Path, source: IO[bytes] | None) -> None:
    """Raise ConfigError, before a model is loaded, if `out` cannot be written or is the input file."""
    if not out.parent.is_dir():
        raise ConfigError(f"`--out` {out}: there is no folder {out.parent}\nhint: make it first")
    if out.is_dir():
        raise ConfigError(f"`--out` {out} is a folder\nhint: name a file in it")
    try:
        same = source is not None and out.exists() and os.path.samestat(out.stat(), os.fstat(source.fileno()))
    except io.UnsupportedOperation:  # input that is not a file
        same = False
    if same:
        raise ConfigError(f"`--out` {out} is the input, which would be lost\nhint: name another file")


@contextmanager
def _logged(quiet: bool) -> Iterator[None]:
    """Send the runtime's log to stderr: chosen backend, memory, start-up time."""
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
    """Print one answer as text while it is generated. Returns the exit status."""
    request = llm.chat_prompt([{"role": "user", "content": prompt}]) if chat else prompt
    answer = None
    for piece in llm.stream(request, params):
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
    """Print the paths of the traces, or why there are none."""
    try:
        files = llm.stop_profile()
    except (ConfigError, EngineStopped) as error:
        click.echo(f"lockstep generate: {error}", err=True)
        return
    line = f"profile: {', '.join(map(str, files))}" if files else "profile: no launch was recorded"
    click.echo(line, err=True)


def _answer(llm: LLM, lines: Iterable[bytes], out: IO[str], given: GenerateOptions) -> int:
    """Write the answer of every line, in order. All requests are sent first, so that the engine can batch them."""
    sent: list[PendingRequest | str] = []
    records: list[dict[str, Any]] = []
    for number, raw in enumerate(lines, 1):
        if raw.strip():
            line, error = _read(raw)
            records.append({"line": number} | ({"id": line.id} if line is not None and line.id is not None else {}))
            sent.append(error if line is None else _send(llm, line, given.params()))
    wrong = output_tokens = 0
    with _progress(len(sent), given.quiet) as advance:
        for one, record in zip(sent, records, strict=True):
            if isinstance(one, str):
                record["error"] = one
            else:
                answer = llm.wait(one)
                output_tokens += sum(len(sample.token_ids) for sample in (answer, *answer.others))
                record.update(_answer_fields(answer, given.show_token_ids))
            wrong += "error" in record
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            out.flush()
            advance()
    if wrong:
        click.echo(f"lockstep generate: {wrong} of {len(sent)} lines have an `error` in the output", err=True)
    if not given.quiet:
        click.echo(_summary(llm.stats(), len(sent) - wrong, output_tokens), err=True)
    return 1 if wrong else 0


def _summary(stats: LlmStats, answers: int, output_tokens: int) -> str:
    """Return a line with the amount of output, the speed and the idle time of the device."""
    work_s = stats.device.work_us / 1e6
    done = f"{answers:,} answers, {output_tokens:,} output tokens in {stats.batches:,} batches"
    if not work_s or stats.device.bubble_share is None:
        return done
    speed = f"{work_s:,.2f} s, {output_tokens / work_s:,.0f} tokens/s"
    return f"{done} and {speed}; bubbles: the device was idle {stats.device.bubble_share:.1%} of that time"


def _read(raw: bytes) -> tuple[InputLine | None, str]:
    """Parse a line of input; return it, or None and the error."""
    try:
        line = msgspec.json.decode(raw, type=InputLine)
    except msgspec.ValidationError as error:
        return None, str(error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"this line is no JSON object: {error}"
    if (line.prompt is None) == (line.messages is None):
        return None, "give either `prompt` or `messages`"
    return line, ""


def _send(llm: LLM, line: InputLine, params: Params) -> PendingRequest | str:
    """Send the request of a line; return its handle, or the error."""
    given = {name: value for name in FROM_LINE if (value := getattr(line, name)) is not None}
    if isinstance(line.stop, str):
        given["stop"] = [line.stop]
    try:
        prompt = llm.chat_prompt(line.messages) if line.messages is not None else line.prompt
        assert prompt is not None
        return llm.ask(prompt, replace(params, **given))
    except ConfigError as error:
        return str(error)


def _answer_fields(answer: RequestOutput, show_token_ids: bool) -> dict[str, Any]:
    """Return the answer of a line as JSON. If one of several answers failed, `error` of the line repeats its error."""
    if not answer.others:
        return _sample_fields(answer, show_token_ids)
    samples = [_sample_fields(one, show_token_ids) for one in (answer, *answer.others)]
    errors = [one["error"] for one in samples if "error" in one]
    return {"answers": samples} | ({"error": errors[0]} if errors else {})


def _sample_fields(answer: RequestOutput, show_token_ids: bool) -> dict[str, Any]:
    """Return one answer as JSON."""
    if answer.error:
        return {"error": answer.error}
    found: dict[str, Any] = {"text": answer.text} if answer.text is not None else {}
    if show_token_ids or answer.text is None:
        found["token_ids"] = answer.token_ids
    found |= {
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(answer.prompt_token_ids),
        "output_tokens": len(answer.token_ids),
        "cached_tokens": answer.cached_tokens,
    }
    for name in ("logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"):
        if value := getattr(answer, name):
            found[name] = value
    return found


def _given(prompts: tuple[str, ...], chat: bool) -> list[bytes]:
    """Return the prompts of the command line as lines of input."""
    lines = [{"messages": [{"role": "user", "content": one}]} if chat else {"prompt": one} for one in prompts]
    return [json.dumps(one).encode() for one in lines]


def _sched(settings: tuple[str, ...]) -> dict[str, Any]:
    """Parse the values of --set NAME=VALUE: numbers, true, false and null as in JSON, everything else as text."""
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
    """Show a progress bar on stderr if that is a terminal; yields a function that advances it."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda: bar.advance(task)
