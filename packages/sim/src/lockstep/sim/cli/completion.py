"""`lockstep completion`: the completion of a shell, by click's protocol for bash, zsh and fish.

The script of a shell calls `lockstep` with `_LOCKSTEP_COMPLETE` set, and `lockstep.core.command` passes such a call to
this command. Only the subcommand that the line names is imported.
"""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from lockstep.core.command import COMPLETE, GROUP, summary_of

PROGRAM = "lockstep"
SHELLS = {
    "bash": 'eval "$(lockstep completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(lockstep completion zsh)" in ~/.zshrc, below compinit',
    "fish": "lockstep completion fish | source in ~/.config/fish/config.fish",
}
FILES = ("workload", "workloads", "calibration", "tokenizer", "api_keys", "journal")
"""Options without a path's type whose value is a file or a folder."""


class Commands(click.Group):
    """All subcommands of the installed packages, imported when a line names them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands."""
        return sorted({entry.name for entry in entry_points(group=GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand with completed values; None if there is none, or if it is no click command."""
        found: Any = next((entry.load() for entry in entry_points(group=GROUP) if entry.name == cmd_name), None)
        if not isinstance(found, click.Command):
            return None
        _complete_values(found)
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the subcommands that begin with a text, without importing one."""
        entries: dict[str, EntryPoint] = {entry.name: entry for entry in entry_points(group=GROUP)}
        return [
            CompletionItem(name, help=summary_of(entry))
            for name, entry in sorted(entries.items())
            if name.startswith(incomplete)
        ]


def _complete_values(command: click.Command) -> None:
    """Give options of a command, and of its subcommands, the completion of their values."""
    for one in getattr(command, "commands", {}).values():
        _complete_values(one)
    for param in command.params:
        if isinstance(param.type, click.types.StringParamType) and param.name is not None:
            param._custom_shell_complete = _values_of(param.name)  # what `shell_complete=` of a new option sets


def _values_of(name: str) -> Any:
    """Return the completion of an option by its name: names of the catalogue or policies, and files; None: neither."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        head, comma, last = incomplete.rpartition(",")
        found = [CompletionItem(f"{head}{comma}{value}") for value in known(name) if value.startswith(last.lower())]
        wants_file = name in ("model", "gpu", "gpus", "draft_model", *FILES)
        return [*found, *([CompletionItem(incomplete, type="file")] if wants_file and not found else [])]

    return complete if name in (*NAMED, *FILES) else None


NAMED = ("model", "draft_model", "gpu", "gpus", "engine", "router", "schedule_policy", "profile")
"""Options whose values have names that a completion can list."""


def known(name: str) -> tuple[str, ...]:
    """Return the names that an option may have as its value; empty for files."""
    from lockstep.core.cluster.router import ROUTER_POLICIES
    from lockstep.core.contract.config import SCHEDULE_POLICIES
    from lockstep.core.contract.profiles import PROFILES
    from lockstep.sim.catalogue import engine_names, gpu_names, model_names

    if name in ("model", "draft_model"):
        return model_names()
    if name in ("gpu", "gpus"):
        return tuple(name.lower() for name in gpu_names())
    return {
        "engine": engine_names(),
        "router": tuple(ROUTER_POLICIES),
        "schedule_policy": tuple(SCHEDULE_POLICIES),
        "profile": tuple(PROFILES),
    }.get(name, ())


@click.command(context_settings={"max_content_width": 120})
@click.argument("shell", type=click.Choice(sorted(SHELLS)), required=False)
def completion(shell: str | None) -> None:
    """Print the script by which bash, zsh or fish completes commands, options and their values.

    \b
    eval "$(lockstep completion bash)"
    """
    if (instruction := os.environ.get(COMPLETE)) is not None:
        raise SystemExit(shell_complete(Commands(), {}, PROGRAM, COMPLETE, instruction))
    if shell is None:
        lines = [f"{name}: {how}" for name, how in SHELLS.items()]
        raise click.UsageError("SHELL is missing\nhint: " + "; ".join(lines))
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(Commands(), {}, PROGRAM, COMPLETE).source())
