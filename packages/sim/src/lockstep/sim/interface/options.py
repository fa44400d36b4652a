"""Keywords parsed by the parser of a command, so that values and messages are those of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import click

from lockstep.core.contract.errors import ConfigError


@runtime_checkable
class AsOptions(Protocol):
    """An object that options of a command can stand for."""

    def as_options(self) -> dict[str, Any]: ...


def parsed(command: click.Command, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a command from keywords, parsed by the command itself. Raises ConfigError.

    An opened workload stands for its sources and the options that it was opened with.
    """
    opened = options.get("workload")
    if isinstance(opened, AsOptions):
        options = opened.as_options() | {key: value for key, value in options.items() if key != "workload"}
    params = {name: param for param in command.params for name in _names(param)}
    words: list[str] = []
    arguments: list[str] = []
    for key, value in options.items():
        param = params.get(key)
        if param is None:
            raise ConfigError(f"`{key}` is no option of {name}{nearest(key, params)}")
        if value is None:
            continue
        if isinstance(param, click.Argument):
            arguments += _values(value)
        else:
            words += _words(param, key, value)
    with config_errors():
        return dict(command.make_context(name, [*words, "--", *arguments]).params)


def _names(param: click.Parameter) -> Iterator[str]:
    """Yield the keywords of a parameter: its name in Python, and that of its flag."""
    if param.name is not None:
        yield param.name
    if isinstance(param, click.Option):
        yield param.opts[0].lstrip("-").replace("-", "_")


def _words(param: click.Parameter, key: str, value: Any) -> list[str]:
    """Return the words of a command line that set an option. Raises ConfigError for a value of the wrong kind."""
    flag = param.opts[0]
    if isinstance(param, click.Option) and param.is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"`{key}` must be True or False, got `{value!r}`")
        if value or param.secondary_opts:
            return [flag if value else param.secondary_opts[0]]
        return []
    if not param.multiple and not isinstance(value, str) and isinstance(value, Iterable):
        if isinstance(param.type, click.types.StringParamType) and key != "workload":
            return [f"{flag}={','.join(_values(value))}"]  # gpus=["h100", "h200"], as in a file of options
        raise ConfigError(f"`{key}` takes one value, got `{value!r}`")
    return [f"{flag}={one}" for one in _values(value)]


def _values(value: Any) -> list[str]:
    """Return the texts of one value or of several; a mapping is `NAME=VALUE` texts."""
    if isinstance(value, Mapping):
        return [f"{key}={','.join(_values(one))}" for key, one in value.items()]
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [text_of(value)]
    return [text_of(one) for one in value]


def text_of(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known names that are most like `name`; empty if none is."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"\nhint: {', '.join(close)}" if close else ""


@contextmanager
def config_errors() -> Iterator[None]:
    """Convert errors of click about the options into ConfigError."""
    try:
        yield
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from error
