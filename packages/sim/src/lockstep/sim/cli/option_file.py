"""Options in a TOML file: `lockstep plan question.toml` takes them beside those of the command line, which win.

    model = "qwen3-8b"
    gpus = "h100,h200"
    workload = "usage.csv"
    slo = ["ttft_p99=500ms", "tpot_p99=40ms"]
    rate = 40
    [search]
    tp = [1, 2]

Keys are flags without their dashes, or the names of docs/options.md. Every key and value is checked with its line by
the declaration of the option itself. `--save FILE` writes what was asked, from file and command line together.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from lockstep.sim.cli.help_groups import with_help_all, write_options

TABLES = ("search", "price")
"""Repeated options of NAME=VALUE that may be tables, `[search]` with `tp = [1, 2, 4]`."""

FILE, SAVE = "option_file", "save_options"


def with_option_file(command: Any) -> Any:
    """Add the argument FILE.toml and the option `--save`; the command's class must be FileCommand."""
    argument = click.argument(FILE, required=False, metavar="[FILE.toml]", expose_value=False)
    save = click.option(
        "--save", SAVE, expose_value=False, metavar="FILE.toml", help="write the given options to a file, and go on"
    )
    return argument(save(with_help_all(command)))


class FileCommand(click.Command):
    """A command whose options may also come from a TOML file, and whose help is in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(self, ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        asked: dict[str, Any] = {}
        if isinstance(path := given.get(FILE), str):
            asked = read_options(self, ctx, Path(path))
            ctx.default_map = asked
        rest = super().parse_args(ctx, args)
        if isinstance(path := given.get(SAVE), str):
            names = {one.name for one in self.params if isinstance(one, click.Option)} - {SAVE, "help_all"}
            written = {name: value for name, value in given.items() if name in names and _is_value(value)}
            _save(self, Path(path), asked | written)
        return rest


def read_options(command: click.Command, ctx: click.Context, path: Path) -> dict[str, Any]:
    """Return the options of a file by their names. Raises UsageError with file, line, key and what would be right."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise click.UsageError(f"{path} cannot be read: {why}\nhint: options begin with --") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = 'such as model = "qwen3-8b", texts in quotes'
        if path.suffix != ".toml":
            hint = f"a file of options is TOML; requests are given as --workload {path}"
        raise click.UsageError(f"{path}: {error}\nhint: {hint}") from None
    options = _options(command)
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = options.get(key.replace("_", "-")) or options.get(key)
        if name is None:
            close = difflib.get_close_matches(key.replace("_", "-"), options, n=1)
            hint = f"did you mean `{close[0]}`?" if close else "keys are options without dashes: --help lists them"
            _refuse(path, text, key, f"is no option of {ctx.command_path}", hint)
        if name in found:
            _refuse(path, text, key, "is given twice", "leave one of them out")
        found[name] = _checked(command, ctx, name, value, (path, text, key))
    return found


def _options(command: click.Command) -> dict[str, str]:
    """Return the names of the options by their flags without dashes, and by the names themselves."""
    flags: dict[str, str] = {}
    for one in command.params:
        if isinstance(one, click.Option) and one.name is not None and one.name not in (SAVE, "help_all"):
            flags |= {flag.removeprefix("--"): one.name for flag in one.opts if flag.startswith("--")}
            flags.setdefault(one.name.replace("_", "-"), one.name)
    return flags


def _checked(command: click.Command, ctx: click.Context, name: str, value: Any, where: tuple[Path, str, str]) -> Any:
    """Return a value as the option takes it, checked by the option's own type."""
    option = next(one for one in command.params if one.name == name)
    assert isinstance(option, click.Option)
    if isinstance(value, dict):
        if where[2].replace("_", "-") not in TABLES:
            _refuse(*where, "is a table", f"only {' and '.join(TABLES)} may be tables")
        value = [f"{key}={_joined(one)}" for key, one in value.items()]
    if option.is_flag and not isinstance(value, bool):
        _refuse(*where, f"must be true or false, got `{value}`", f"{where[2]} = true")
    if option.multiple and not isinstance(value, list):
        value = [value]
    if isinstance(value, list) and not option.multiple:
        value = _joined(value)
    if not option.is_flag:
        value = [_word(one) for one in value] if isinstance(value, list) else _word(value)
    try:
        option.type_cast_value(ctx, value)
    except click.BadParameter as error:
        _refuse(*where, f"cannot be `{value}`: {error.message}", f"`{ctx.command_path} --help` explains the option")
    return value


def _joined(value: Any) -> str:
    return ",".join(map(_word, value)) if isinstance(value, list) else _word(value)


def _word(value: Any) -> str:
    """Return a TOML value as the word of a command line."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _refuse(path: Path, text: str, key: str, problem: str, hint: str) -> NoReturn:
    pattern = re.compile(rf"\s*\[?\"?{re.escape(key)}\"?\s*[\]=]")
    line = next((number for number, one in enumerate(text.split("\n"), 1) if pattern.match(one)), 1)
    raise click.UsageError(f"{path}, line {line}: `{key}` {problem}\nhint: {hint}")


def _is_value(value: Any) -> bool:
    return isinstance(value, str | bool) or (isinstance(value, Sequence) and len(value) > 0)


def _save(command: click.Command, path: Path, asked: Mapping[str, Any]) -> None:
    """Write options to a file that `read_options` reads back."""
    flags = {
        one.name: next(flag for flag in one.opts if flag.startswith("--"))[2:]
        for one in command.params
        if isinstance(one, click.Option)
    }
    lines = [f"# {command.name or 'options'} of lockstep"]
    lines += [f"{flags[name]} = {json.dumps(value, ensure_ascii=False)}" for name, value in asked.items()]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    except OSError as error:
        raise click.UsageError(f"--save {path} cannot be written: {error.strerror}") from None
