"""The `lockstep` command. Installed packages contribute its subcommands; only the requested one is imported.

A package contributes a subcommand with an entry point in the group `lockstep.commands`. The entry point names a click
command, or any callable that takes a list of arguments and returns an exit status or None. This file needs neither
click nor any of the packages: it finds the entry point, imports it, and passes on the rest of the command line.

Exit status: that of the subcommand; 1 when the subcommand cannot be imported; 2 for an invalid command line or an
invalid setting; 130 after Ctrl-C; 141 when the reader of stdout closed the pipe. A shell reports SIGINT as 130 and
SIGPIPE as 141.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.contract.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "lockstep.commands"
COMPLETE = "_LOCKSTEP_COMPLETE"
"""Set by the completion of a shell: the call lists completions instead of running a command."""

ABOUT = "Lockstep: LLM serving whose scheduler is a deterministic function of a journal."

EXIT_CANNOT_LOAD = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `lockstep` command line and return its exit status. `argv` excludes the program's name."""
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # a broken pipe can be handled here; at interpreter shutdown it could not
        return status
    except ConfigError as error:
        return _fail(f"ConfigError: {error}", EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _send_stdout_nowhere()
        return EXIT_BROKEN_PIPE


def _dispatch(argv: list[str]) -> int:
    if COMPLETE in os.environ:
        return _run_named("completion", [])
    match argv:
        case [] | ["-h" | "--help" | "help", *_]:
            print(_help())
            return 0
        case ["-V" | "--version", *_]:
            print(_versions())
            return 0
        case [option, *_] if option.startswith("-"):
            return _fail(f"lockstep: no option `{option}` before the command\n{_hint_help()}", EXIT_USAGE)
        case [name, *rest]:
            return _run_named(name, rest)
    raise AssertionError(argv)


def _run_named(name: str, argv: list[str]) -> int:
    entries = [entry for entry in _entries() if entry.name == name]
    if not entries:
        return _fail(_unknown(name), EXIT_USAGE)
    if len(entries) > 1:
        providers = " and ".join(_provider(entry) for entry in entries)
        return _fail(f"lockstep: `{name}` is provided by {providers}\nhint: uninstall one of them", EXIT_USAGE)
    (entry,) = entries
    try:
        target = entry.load()
    except Exception as error:
        return _fail(
            f"lockstep: `{name}` from {_provider(entry)} cannot be loaded: {type(error).__name__}: {error}\n"
            f"hint: `python -c 'import {entry.module}'` shows where it fails",
            EXIT_CANNOT_LOAD,
        )
    return _call(target, name, argv)


def _call(target: Any, name: str, argv: list[str]) -> int:
    """Run a click command or a plain callable, and return its exit status instead of exiting the interpreter."""
    try:
        if hasattr(target, "make_context"):
            result = _invoke_click(target, name, argv)
        elif callable(target):
            result = target(argv)
        else:
            return _fail(f"lockstep: `{name}` is of type {type(target).__name__}, not a command", EXIT_CANNOT_LOAD)
    except SystemExit as error:
        # rich exits with 1 after a broken pipe. The original exception is still in the chain.
        for cause in _causes(error):
            if isinstance(cause, KeyboardInterrupt | BrokenPipeError):
                raise cause from None
        if isinstance(error.code, str):
            return _fail(error.code, 1)
        return error.code or 0
    return result if type(result) is int else 0


def _invoke_click(command: Any, name: str, argv: list[str]) -> object:
    """Run a click command like click's own `main`, but let Ctrl-C and a broken pipe propagate as exceptions."""
    click: Any = sys.modules["click"]  # imported by the command's module; the core does not depend on click
    try:
        with command.make_context(f"lockstep {name}", argv) as context:
            return command.invoke(context)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return _fail("Aborted!", 1)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _entries() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # local: it takes long to import, and `main` handles Ctrl-C

    return sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, _provider(entry)))


def _provider(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed distribution"


def _help() -> str:
    rows = [(entry.name, summary_of(entry), entry.dist.name if entry.dist else "") for entry in _entries()]
    name_width = max((len(name) for name, _, _ in rows), default=0)
    summary_width = max((len(summary) for _, summary, _ in rows), default=0)
    lines = ["usage: lockstep COMMAND [OPTIONS]", "", ABOUT, ""]
    if rows:
        lines.append("commands:")
        for name, summary, package in rows:
            lines.append(f"  {name:{name_width}}  {summary:{summary_width}}  {package}".rstrip())
    else:
        lines.append("No commands are installed: lockstep-sim and lockstep-tools contain the first ones.")
    lines += ["", "`lockstep COMMAND --help` explains one command; `lockstep --version` lists the installed packages."]
    return "\n".join(lines)


def summary_of(entry: EntryPoint) -> str:
    """Return the first line of a command's docstring, read from its source so that no command is imported.

    A command is imported only if its source has no docstring (help passed as an argument) or is not available.
    """
    source = _source_of(entry.module)
    if source is not None:
        with contextlib.suppress(SyntaxError, ValueError, OSError):
            for node in ast.parse(source.read_bytes()).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == entry.attr:
                    docstring = ast.get_docstring(node)
                    if docstring:
                        return docstring.splitlines()[0]
    try:
        target = entry.load()
    except Exception:
        return "(cannot be loaded; run it to see why)"
    texts = (getattr(target, attribute, None) for attribute in ("short_help", "help", "__doc__"))
    return str(next(filter(None, texts), "")).strip().partition("\n")[0]


def _source_of(module: str) -> Path | None:
    """Return the file of `module` without importing its parent packages; None if it is not a plain file."""
    top, *rest = module.split(".")
    from importlib.util import find_spec

    loaded = sys.modules.get(top)  # its path may have more folders than its own, see packages/lockstep
    spec = None if loaded is not None else find_spec(top)
    folders = spec.submodule_search_locations if spec else getattr(loaded, "__path__", None)
    for folder in folders or []:
        base = Path(folder, *rest)
        for candidate in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _versions() -> str:
    from importlib.metadata import distributions

    named = [(dist.name or "", dist.version) for dist in distributions()]
    versions = {name: version for name, version in named if name == "lockstep" or name.startswith("lockstep-")}
    width = max(map(len, versions), default=0)
    return "\n".join(f"{name:{width}}  {version}" for name, version in sorted(versions.items()))


def _unknown(name: str) -> str:
    from difflib import get_close_matches  # the import takes 6 ms, which only a typo should cost

    near = get_close_matches(name, [entry.name for entry in _entries()])
    message = f"lockstep: no command `{name}`"
    if near:
        message += "; did you mean " + " or ".join(f"`{match}`" for match in near) + "?"
    return f"{message}\n{_hint_help()}"


def _hint_help() -> str:
    return "hint: `lockstep --help` lists the commands of the installed packages"


def _fail(message: str, status: int) -> int:
    print(message, file=sys.stderr)
    return status


def _send_stdout_nowhere() -> None:
    """Redirect stdout to the null device, so that flushing buffered output at shutdown cannot fail again."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: stdout is not a file, for example captured by a test
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
