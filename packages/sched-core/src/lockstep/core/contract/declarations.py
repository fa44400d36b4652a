"""What is declared once beside each type of decided event: its text, its tallies, and what the digest leaves out.

`declares` registers the text function of a type, with the rest as keywords. From the registry derive the digest
(`digest.py`), the text form (`render.py`), an engine's `Counts` and the totals of a simulation's metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from lockstep.core.contract.text import RequestNames

Event = TypeVar("Event", bound=msgspec.Struct)
Text = Callable[[Event, RequestNames], str]


class Tally(NamedTuple):
    """A total to which every event of a type adds."""

    name: str
    amount: str = ""  # the field that is added; empty: 1 for each event
    by: str = ""  # the field by which parts of the total are kept apart; empty: there are no parts


class Declaration(NamedTuple):
    """What digest, text form and counters need of one type of decided event."""

    text: Callable[[Any, RequestNames], str]
    informative: int  # how many of the last fields only inform, and are not covered by the digest
    tallies: tuple[Tally, ...]


DECLARATIONS: dict[type[msgspec.Struct], Declaration] = {}
"""By type of decided event, in the order of their definitions."""


def declares(
    type_: type[Event], *, informative: tuple[str, ...] = (), tallies: tuple[Tally, ...] = ()
) -> Callable[[Text[Event]], Text[Event]]:
    """Register the function below as the text of events of `type_`, with the rest of their declaration.

    Args:
        informative: the last fields of the type, in order, that only tell why; the rest of the chain covers them.
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
    """Totals of decided events by the name of their tally, whole and in parts."""

    def __init__(self) -> None:
        self._parts: dict[str, Counter[str]] = {}

    def fold(self, event: msgspec.Struct) -> None:
        """Count one decided event."""
        for name, amount, by in DECLARATIONS[type(event)].tallies:
            parts = self._parts.get(name)
            if parts is None:
                parts = self._parts[name] = Counter()
            parts[getattr(event, by) if by else ""] += getattr(event, amount) if amount else 1

    def total(self, name: str) -> int:
        """One total; 0 where no event has added to it."""
        return sum(self._parts.get(name, {}).values())

    def parts(self, name: str) -> dict[str, int]:
        """The parts of a total, in the order of their keys."""
        return dict(sorted(self._parts.get(name, {}).items()))

    def put(self, name: str, parts: Mapping[str, int]) -> None:
        """Replace a total by parts that were counted elsewhere; parts of 0 are left out."""
        self._parts[name] = Counter({key: number for key, number in parts.items() if number})
