"""The command `lockstep serve`: parses and checks its arguments, then starts the launcher or prints the dry run."""

from __future__ import annotations

import logging
import os
import shlex
from errno import EACCES, ENOTDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import click
import msgspec

from lockstep.api.observability.logs import start_log
from lockstep.api.settings import ServeSettings, read_settings, sched_values, settings_toml
from lockstep.core.contract.errors import ConfigError
from lockstep.host.adapters import named_folders
from lockstep.host.options import options_of, with_flags

log = logging.getLogger("lockstep.serve")

TENANTS_NAMED = 8
DEFAULTS = ServeSettings()


@click.command("serve")
@click.argument("file", required=False, metavar="[FILE.toml]", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="The same as FILE.toml.")
@with_flags(click.option, options_of(ServeSettings).values(), keep_absent=True, choice=click.Choice)
@click.option(
    "--lora",
    multiple=True,
    metavar="NAME=PATH",
    help="LoRA adapter NAME from a PEFT folder; requests select it by name.",
)
@click.option("--set", "scheduler", multiple=True, metavar="NAME=VALUE", help="A setting of the scheduler.")
@click.option(
    "--save", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.toml", help="Write the settings to a file."
)
@click.option("--dry-run", is_flag=True, help="Print settings, memory and processes of the server without starting it.")
def serve(
    file: Path | None, config: Path | None, scheduler: tuple[str, ...], save: Path | None, dry_run: bool, **given: Any
) -> int:
    """Serve a model over HTTP, for clients of OpenAI's API.

    Without arguments it serves the small demo model on the CPU, at http://127.0.0.1:8000. Ctrl-C shuts
    the server down in order, with exit status 130; SIGTERM does the same with exit status 0. Settings may be in a TOML
    file by the names of their flags; those of the command line win. Limits of requests are set in its table [limits].

    \b
    lockstep serve --emulate qwen3-8b@h200 --save mine.toml --dry-run
    lockstep serve serve.toml --port 8001
    """
    options = {name: value for name, value in given.items() if value not in (None, ())}
    if scheduler:
        options["set"] = sched_values(scheduler)
    if lora := options.get("lora"):
        options["lora"] = named_folders(lora)
    if file is not None and config is not None:
        raise ConfigError(f"`config` is {config}, and {file} is given too\nhint: leave one of them out")
    settings = read_settings(config if file is None else file, options)
    if save is not None:
        try:
            save.write_text(settings_toml(settings), encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError(f"`save`: {save} cannot be written: {error.strerror or error}") from None
    if dry_run:
        if (ranks := settings.attention_dp_of(0)) > 1:
            raise ConfigError(
                f"`dry_run` builds one engine, and `attention_dp` is {ranks}: ranks need each other\n"
                "hint: leave out --dry-run, or --attention-dp and --rank-schedulers"
            )
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
    """Check everything that can be checked before processes are started. Raises ConfigError."""
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
                "`admission` has shares of %s, but the tenants of %s are %s; "
                "these shares apply once there is a key of such a tenant",
                *(_named(unknown), settings.api_keys, _named(sorted(keys.tenants))),
            )
    if settings.otlp_endpoint is not None:
        check_endpoint(settings.otlp_endpoint)


def try_folders(settings: ServeSettings, *, make: bool) -> None:
    """Check that the folders of journal, usage, profiles and storage are writable. Raises ConfigError.

    Args:
        make: create missing folders; for a server that is about to run.
    """
    for name in ("journal", "usage_dir", "profile_dir", "storage"):
        given = getattr(settings, name)
        if given is None or "://" in given:
            continue
        path = Path(given)
        try:
            if make:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            nearest = next(one for one in (path, *path.absolute().parents) if one.exists())
            if not nearest.is_dir():
                raise NotADirectoryError(ENOTDIR, f"{nearest} is not a folder")
            if nearest == path:
                with TemporaryFile(dir=path):
                    pass
            elif not os.access(nearest, os.W_OK | os.X_OK):
                raise PermissionError(EACCES, os.strerror(EACCES))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"`{name}`: {given} cannot be written to: {why}\nhint: choose another folder") from error


def describe(settings: ServeSettings) -> str:
    """Return the text of a dry run: settings, memory, processes. Builds an engine, unstarted. Raises ConfigError."""
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
        f"chats      tool calls are read as {calls}, thoughts as {thoughts}",
        f"context    {info.request_tokens_max:,} tokens, prompt and output together",
        *([f"weights    {unit.weights}"] if unit.weights else []),
        f"memory{' of each engine' * (settings.engines > 1)}\n  {indented}",
        f"listens    {settings.host}:{settings.port}"
        + (f", and {settings.admin_socket} for operators" if settings.admin_socket else ""),
        f"keys       {settings.api_keys or 'none: any client that can connect may use the server'}",
        f"processes  {_engines(settings)}, {_count(settings.api_workers, 'API worker')}",
        *([f"router     {settings.router}"] if settings.engines > 1 else []),
        *([f"admission  {settings.admission}"] if settings.admission is not None else []),
        f"journal    {settings.journal or ('private, for recovery' if settings.restarts else 'none')}",
        f"changed    {shlex.join(f'{name}={value}' for name, value in changed.items()) or 'nothing'}",
        "scheduler",
        *(f"  {name} = {value}" for name, value in info.settings.items()),
    ]
    return os.linesep.join(lines)


def _named(tenants: list[str]) -> str:
    """Return the first TENANTS_NAMED names as text, with the number of the rest."""
    shown = ", ".join(f"`{one}`" for one in tenants[:TENANTS_NAMED])
    return shown + (f" and {len(tenants) - TENANTS_NAMED} more" if len(tenants) > TENANTS_NAMED else "")


def _engines(settings: ServeSettings) -> str:
    """Return the number of engines as text, by role."""
    if not settings.hands_over:
        return _count(settings.dp, "engine") + _of_ranks(settings.attention_dp)
    prefill_ranks, decode_ranks = settings.attention_dp_of(0), settings.attention_dp_of(settings.engines - 1)
    prefills = _count(settings.prefill_engines, "prefill engine") + _of_ranks(prefill_ranks)
    return f"{prefills}, " + _count(settings.decode_engines, "decode engine") + _of_ranks(decode_ranks)


def _of_ranks(ranks: int) -> str:
    return f" of {_count(ranks, 'data-parallel rank')}" if ranks > 1 else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _devices(settings: ServeSettings, first: str) -> str:
    """Return the devices of all engines as text. `first` is that of engine 0: `2 x cuda:0`, `1 x h200, emulated`."""
    if settings.engines == 1:
        return first
    head, _, index = first.rpartition("cuda:")
    if not index.isdecimal() or (head and not first.startswith(f"{settings.gpus_of(0)} x ")):
        return f"{first}, {settings.engines} times"
    sizes = [settings.gpus_of(engine) for engine in range(settings.engines)]
    firsts = [int(index) + sum(sizes[:engine]) for engine in range(settings.engines)]
    spans = [f"cuda:{at}" if tp == 1 else f"cuda:{at}-{at + tp - 1}" for at, tp in zip(firsts, sizes, strict=True)]
    return ", ".join(spans)
