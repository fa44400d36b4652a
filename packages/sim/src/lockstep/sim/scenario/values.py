"""Types of command-line values: times with a unit, and words that stand for a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # older releases of click cannot subscript it


class NoneWord:
    """The value of the word `none` on a command line. None itself means that the option was not given."""


NONE = NoneWord()


class OrWord(ParamType):
    """A value, or a word that stands for a fixed value."""

    def __init__(self, kind: ParamType, **words: Any) -> None:
        self.kind = kind
        self.words = words
        self.name = "|".join([kind.name, *words])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.lower() in self.words:
            return self.words[value.lower()]
        return self.kind.convert(value, param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name.upper()


class DurationType(ParamType):
    """A time with its unit, converted to whole microseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from lockstep.sim.workload.lengths import parse_duration_us

        try:
            return parse_duration_us(str(value))
        except ValueError as error:
            self.fail(f"{error}, got `{value}`", param, ctx)


KINDS = {"_us": DurationType()}
"""Types of values, by the suffix of an option's name."""
