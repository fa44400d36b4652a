"""`lockstep serve`: argument parsing, and what would run."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable
from errno import EACCES, ENOTDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import click
import msgspec

from lockstep.api.observability.logs import start_log
from lockstep.api.settings import ServeSettings, read_settings, sched_values
from lockstep.core.cluster.router import ROUTER_POLICIES
from lockstep.core.contract.errors import ConfigError
from lockstep.host.adapters import named_folders

log = logging.getLogger("lockstep.serve")

TENANTS_NAMED = 8
DEFAULTS = ServeSettings()
Command = TypeVar("Command", bound=Callable[..., Any])


def _option(name: str, kind: Any, about: str, *, flag: str = "", **more: Any) -> Callable[[Command], Command]:
    """An option whose default is that of the settings, so that a file's value is not hidden by it."""
    default = getattr(DEFAULTS, name)
    shown = f"  [default: {default}]" if default not in (None, (), {}, False) else ""
    flag = flag or "--" + name.replace("_", "-")
    return click.option(flag, name, type=kind, default=None, help=about + shown, **more)


@click.command("serve")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="A TOML file with these settings.")
@_option("model", click.Path(), "A Hugging Face folder; without it and --emulate, the demo model.", metavar="DIR")
@_option("emulate", str, "Serve a cost model in real time; no torch, no weights.", metavar="MODEL@GPU")
@_option("served_model_name", str, "What clients call the model; may be given again.", multiple=True)
@_option("tokenizer", click.Path(), "A folder with tokenizer.json, if not that of the model.", metavar="DIR")
@_option("host", str, "Address to listen on. Beyond loopback it needs --api-keys.")
@_option("port", int, "Port to listen on; 0 takes a free one.")
@_option("allowed_hosts", str, "A name that a proxy calls it by, without keys.", multiple=True, flag="--allowed-host")
@_option("api_workers", int, "Processes that speak HTTP.")
@_option("api_keys", click.Path(), "A TOML file of keys and the tenants that they stand for.", metavar="FILE")
@_option("usage_dir", click.Path(), "Where to keep what tenants used, beyond the server's end.", metavar="DIR")
@_option("admin_socket", click.Path(), "A Unix socket for an operator's routes; without it there are none.")
@_option("strict", bool, "Refuse unknown fields.", is_flag=True)
@_option("stored_responses", int, "Answers of /v1/responses that a tenant can have again; 0: none.")
@_option("metrics_compat", click.Choice(["vllm", "sglang"]), "Figures under their names, too.", multiple=True)
@_option("journal", click.Path(), "Record every fact and decision there.", metavar="DIR")
@_option("journal_content", click.Choice(["full", "digests"]), "Digests of what is said cannot be gone on from.")
@_option("journal_bytes", int, "The oldest part of it expires beyond so many.")
@_option("journal_age_s", float, "What is older expires.")
@_option("durability", click.Choice(["none", "interval", "group", "every"]), "When it is on disk: docs/journal.md.")
@_option("snapshot_s", float, "Between two snapshots, from which an engine is picked up.")
@_option(
    "restarts",
    int,
    "Of the engine within --restart-window-s; 0: when it ends, so does the server; of several, the last.",
)
@_option("restart_window_s", float, "In which so many restarts are too many.")
@_option("batch_timeout_s", float, "An engine that gets nothing done for so long is restarted; 0: never.")
@_option("seed", int, "Of requests without one of their own.")
@_option("device", str, "auto, cpu, cuda, cuda:1, ...")
@_option("dtype", str, "auto, bfloat16, float16, float32")
@_option("kv_cache_dtype", click.Choice(["auto", "fp8_e4m3"]), "Of KV; auto: that of the model.")
@_option(
    "fp8_activations",
    click.Choice(["auto", "on", "off"]),
    "Round what meets fp8 weights to fp8; auto: as the checkpoint says, where the GPU can.",
)
@_option("attention_backend", str, "auto, flashinfer, triton, reference")
@_option("numerics", click.Choice(["fast", "invariant"]), "Whether a batch may change what its requests get.")
@_option("mem_fraction", float, "Of a GPU's memory, all together.")
@_option("tp", int, "GPUs, or on the CPU processes, that the model is split over.")
@_option("dp", int, "Engines behind a router, each with a journal and, on GPUs, --tp of its own.")
@_option("router", click.Choice(ROUTER_POLICIES), "Which engine takes a request: docs/routing.md.")
@_option("router_load_bound", float, "prefix_affinity: an engine's load over the mean, at most.")
@_option("router_load_floor", int, "prefix_affinity: open requests up to which no engine counts as loaded.")
@_option("router_block_tokens", int, "prefix_affinity: prompts are compared in blocks of so many tokens.")
@_option("router_sessions_max", int, "Sessions that the router remembers.")
@_option("admission", str, "Requests wait at the router: open=64,share.a=2; docs/routing.md.", metavar="SPEC")
@_option("cuda_graphs", click.Choice(["auto", "on", "off", "eager"]), "Whether decodes replay CUDA graphs.")
@_option("cuda_graph_max_batch", int, "Rows of the largest graph.")
@_option("draft_model", str, "Folder of a small model whose guesses are verified.", metavar="DIR")
@_option("random_weights", int, "Small random weights; only config.json is read.", metavar="SEED")
@_option(
    "logit_processors",
    str,
    "Of an installed package: requests may ask for it.",
    multiple=True,
    flag="--logit-processor",
)
@_option(
    "lora", str, "A LoRA adapter, a folder as PEFT writes it; requests name it.", multiple=True, metavar="NAME=PATH"
)
@_option("max_lora_rank", int, "Of adapters; on the device each has room for it.")
@_option("grammar_backend", click.Choice(["auto", "llguidance", "xgrammar", "none"]), "What keeps answers to grammars.")
@_option("grammar_compile_s", float, "CPU time that one grammar may take to compile.")
@_option("grammar_compile_mb", int, "Memory that it may take to do so.")
@_option("profile_dir", click.Path(), "Where an operator's traces of CPU and GPU go.", metavar="DIR")
@_option("profile", str, "Emulated: family of scheduler settings: lockstep, sglang, vllm.")
@_option("calibration", str, "Predict batches by it: /metrics says how far off. Emulated: time them.")
@_option("speed", float, "Emulated: times faster than real.")
@_option("answer_tokens", int, "Emulated: mean length of an answer that ends by itself; 0: none does.")
@_option("answers", click.Path(), "Emulated: what it says, and to what: docs/serving.md.", metavar="FILE")
@_option("tool_call_parser", str, "How the model writes calls: hermes, mistral, ...; auto: as its template.")
@_option("reasoning_parser", str, "How it writes thoughts: qwen3, deepseek_r1, ...; auto: as its template.")
@_option("slow_reader_s", float, "A stream that takes nothing for so long is cancelled.")
@_option("stalled_s", float, "An engine that does nothing for so long, with work to do, is not well.")
@_option("shutdown_s", float, "Answers get so long to end when the server is to stop.")
@_option("log_level", click.Choice(["debug", "info", "warning", "error"]), "How much to log.")
@_option("log_format", click.Choice(["text", "json"]), "Lines for people, or an object each.")
@_option("otlp_endpoint", str, "Where OpenTelemetry spans of requests go: http://HOST:4318/v1/traces.", metavar="URL")
@click.option("--set", "scheduler", multiple=True, metavar="NAME=VALUE", help="A setting of the scheduler.")
@click.option("--dry-run", is_flag=True, help="Print what would run, and end.")
def serve(config: Path | None, scheduler: tuple[str, ...], dry_run: bool, **given: Any) -> int:
    """Serve a model over HTTP, for clients of OpenAI's API.

    Without arguments it serves the small demo model on the CPU, at http://127.0.0.1:8000. Ctrl-C ends it in order, with
    exit status 130; SIGTERM does with 0. Limits of requests are set in the file of --config, under [limits].
    """
    options = {name: value for name, value in given.items() if value not in (None, ())}
    if scheduler:
        options["set"] = sched_values(scheduler)
    if lora := options.get("lora"):
        options["lora"] = named_folders(lora)
    settings = read_settings(config, options)
    if dry_run:
        click.echo(describe(settings))
        return 0
    from lockstep.api.processes.launch import Launcher

    start_log(settings.log_level, "serve", settings.log_format)
    check(settings)
    try_folders(settings, make=True)
    launcher = Launcher(settings)
    url = launcher.url
    log.info("starting: %s answers 503 until it is ready", url)
    return launcher.run(ready=lambda: click.echo(f"serving at {url}"))


def check(settings: ServeSettings) -> None:
    """Find out what can be found out before processes are started. Raises ConfigError."""
    from lockstep.api.endpoints.keys import read_keys
    from lockstep.api.engines import check_journal, check_names
    from lockstep.api.observability.spans import check_endpoint

    check_names(settings)
    check_journal(settings)
    if settings.api_keys is not None:
        keys = read_keys(Path(settings.api_keys))
        admission = settings.admission_config()
        if unknown := sorted(set(() if admission is None else admission.tenant_weights) - keys.tenants):
            log.warning(
                "`admission` has shares of %s, and no key of %s is such a tenant's: those are of %s; "
                "they count once there is one",
                *(_named(unknown), settings.api_keys, _named(sorted(keys.tenants))),
            )
    if settings.otlp_endpoint is not None:
        check_endpoint(settings.otlp_endpoint)


def try_folders(settings: ServeSettings, *, make: bool) -> None:
    """Find out whether folders that will be written to can be. Raises ConfigError.

    Args:
        make: make them, as is only fit for what then runs.
    """
    for name in ("journal", "usage_dir", "profile_dir"):
        given = getattr(settings, name)
        if given is None:
            continue
        path = Path(given)
        try:
            if make:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            there = next(one for one in (path, *path.absolute().parents) if one.exists())
            if not there.is_dir():
                raise NotADirectoryError(ENOTDIR, f"{there} is no folder")
            if there == path:
                with TemporaryFile(dir=path):
                    pass
            elif not os.access(there, os.W_OK | os.X_OK):
                raise PermissionError(EACCES, os.strerror(EACCES))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"`{name}`: {given} cannot be written to: {why}\nhint: choose another folder") from error


def describe(settings: ServeSettings) -> str:
    """What would run: the settings, the engine, its memory, the processes. The engine is built, and not started."""
    from lockstep.api.engines import build_engine, formats_of, text_of

    check(settings)
    try_folders(settings, make=False)
    calls, thoughts = formats_of(settings, text_of(settings)).names()
    unit = build_engine(msgspec.structs.replace(settings, journal=None))
    info = unit.info
    unit.close()
    changed = {
        name: value
        for name, value in msgspec.to_builtins(settings).items()
        if value != msgspec.to_builtins(DEFAULTS)[name]
    }
    model, where = (settings.served_model_name or (info.model,))[0], _devices(settings, info.device)
    indented = unit.memory.replace("\n", "\n  ")
    lines = [
        f"model      {model} ({info.kind}) on {where}",
        f"chats      calls of tools are read as {calls}, thoughts as {thoughts}",
        f"context    {info.request_tokens_max:,} tokens, prompt and output together",
        *([f"weights    {unit.weights}"] if unit.weights else []),
        f"memory{' of each engine' * (settings.dp > 1)}\n  {indented}",
        f"listens    {settings.host}:{settings.port}"
        + (f", and {settings.admin_socket} for an operator" if settings.admin_socket else ""),
        f"keys       {settings.api_keys or 'none: whoever reaches it may use it'}",
        f"processes  {_count(settings.dp, 'engine')}, {_count(settings.api_workers, 'API worker')}",
        *([f"router     {settings.router}"] if settings.dp > 1 else []),
        *([f"admission  {settings.admission}"] if settings.admission is not None else []),
        f"journal    {settings.journal or ('private, for recovery' if settings.restarts else 'none')}",
        f"given      {shlex.join(f'{name}={value}' for name, value in changed.items()) or 'nothing'}",
        "scheduler",
        *(f"  {name} = {value}" for name, value in info.settings.items()),
    ]
    return os.linesep.join(lines)


def _named(tenants: list[str]) -> str:
    """The first few."""
    shown = ", ".join(f"`{one}`" for one in tenants[:TENANTS_NAMED])
    return shown + (f" and {len(tenants) - TENANTS_NAMED} more" if len(tenants) > TENANTS_NAMED else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _devices(settings: ServeSettings, first: str) -> str:
    """Where all engines run, given where the first does, such as `cuda:0`, `2 x cuda:0` or `1 x h200, emulated`."""
    if settings.dp == 1:
        return first
    head, _, index = first.rpartition("cuda:")
    if not index.isdecimal() or (head and not first.startswith(f"{settings.tp} x ")):
        return f"{first}, {settings.dp} times"
    firsts = [int(index) + settings.tp * engine for engine in range(settings.dp)]
    spans = [f"cuda:{at}" if settings.tp == 1 else f"cuda:{at}-{at + settings.tp - 1}" for at in firsts]
    return ", ".join(spans)
