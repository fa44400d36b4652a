"""Declarations of decided events: the text of each type, its tallies, and the fields that the digest omits.

`declares` registers the text function of a type, with tallies and informative fields as keywords. The digest
(`digest.py`), the text form (`render.py`), an engine's `Counts` and the totals of a simulation's metrics are derived
from this registry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from lockstep.core.contract.text import RequestNames

Event = TypeVar("Event", bound=msgspec.Struct)
Text = Callable[[Event, RequestNames], str]


class Tally(NamedTuple):
    """A total to which every event of a type adds."""

    name: str
    amount: str = ""  # the field that is added; empty: 1 for each event
    by: str = ""  # the field that divides the total into parts; empty: there are no parts


class Declaration(NamedTuple):
    """The declaration of one type of decided event, for digest, text form and counters."""

    text: Callable[[Any, RequestNames], str]
    informative: int  # number of last fields that are informative only, so that the digest omits them
    tallies: tuple[Tally, ...]


DECLARATIONS: dict[type[msgspec.Struct], Declaration] = {}
"""The declaration of each type of decided event, in the order of their definitions."""


def declares(
    type_: type[Event], *, informative: tuple[str, ...] = (), tallies: tuple[Tally, ...] = ()
) -> Callable[[Text[Event]], Text[Event]]:
    """Return a decorator that registers a function as the text of events of `type_`, with their declaration.

    Args:
        informative: the last fields of the type, in order, that only explain the decision. The digest omits them,
            since the digests of earlier steps cover the state from which they follow.
        tallies: the totals to which these events add.
    Raises: TypeError if `informative` or a tally names another field.
    """
    fields = type_.__struct_fields__
    if fields[len(fields) - len(informative) :] != informative:
        raise TypeError(f"the last fields of {type_.__name__} are not {informative}")
    for tally in tallies:
        for name in filter(None, (tally.amount, tally.by)):
            if name not in fields:
                raise TypeError(f"{type_.__name__} has no field `{name}`, which tally `{tally.name}` needs")

    def register(text: Text[Event]) -> Text[Event]:
        DECLARATIONS[type_] = Declaration(text, len(informative), tallies)
        return text

    return register


class Tallies:
    """Totals of decided events by the name of their tally, whole and in parts: those of `names`, and no others."""

    def __init__(self, *names: str) -> None:
        self._parts: dict[str, Counter[str]] = {name: Counter() for name in names}
        self._targets: dict[type, tuple[tuple[Counter[str], str, str], ...]] = {}  # of the types counted so far

    def fold(self, decided: Iterable[msgspec.Struct]) -> None:
        """Count the decided events of one step."""
        for event in decided:
            targets = self._targets.get(type(event))
            if targets is None:
                targets = self._targets[type(event)] = self._targets_of(type(event))
            for parts, amount, by in targets:
                parts[getattr(event, by) if by else ""] += getattr(event, amount) if amount else 1

    def _targets_of(self, type_: type[msgspec.Struct]) -> tuple[tuple[Counter[str], str, str], ...]:
        """Return the parts of each counted tally of a type, with the fields that are added and that divide it."""
        return tuple(
            (self._parts[name], amount, by) for name, amount, by in DECLARATIONS[type_].tallies if name in self._parts
        )

    def total(self, name: str) -> int:
        """Return one total; 0 if no event has added to it. Raises KeyError for a tally that is not counted."""
        return sum(self._parts[name].values())

    def parts(self, name: str) -> dict[str, int]:
        """Return the parts of a total, in the order of their keys. Raises KeyError for a tally that is not counted."""
        return dict(sorted(self._parts[name].items()))

    def put(self, name: str, parts: Mapping[str, int]) -> None:
        """Replace a total by parts from another counter; parts of 0 are omitted."""
        counter = self._parts[name]
        counter.clear()
        counter.update({key: number for key, number in parts.items() if number})
