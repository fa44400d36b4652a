"""Components: the parts of a scheduler that store, restore and check themselves.

A snapshot is the parts of all components (`Component.part`) and of the scheduler itself, laid out by
`scheduler/image.py`. A restored engine loads them in the order of `SchedulerState.components`. After any event
`invariants.check` gathers `Facts` once and passes them to `Component.check` of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from msgspec import Struct

from lockstep.core.contract.checks import fail
from lockstep.core.contract.events import RequestId
from lockstep.core.kv.facts import Facts
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import Int32s, Request


class Restored(NamedTuple):
    """What a restored engine has before its other components are loaded."""

    requests: Mapping[RequestId, Request]
    blocked: Mapping[RequestId, Request]  # with prerequisites: not in the waiting queue yet
    nodes: dict[int, RadixNode]  # of the radix cache of the device, by number; added by `Memory.load`


class NoPart(Struct, forbid_unknown_fields=True):
    """The part of a component that has nothing to store."""


class Component:
    """A part of the scheduler with state of its own. Subclasses override what they need; the rest does nothing."""

    PART: ClassVar[type[Struct]] = NoPart
    """The fields of a snapshot that the component owns."""

    EMPTY_AT_REST: ClassVar[tuple[str, ...]] = ()
    """Attributes that are empty while no request is live and nothing is in flight."""

    def part(self) -> Struct:
        """Return the state, as an instance of PART."""
        return NoPart()

    def load(self, part: Any, restored: Restored) -> None:
        """Take over the state that `part` returned. Called once, on a component that has just been built."""

    def blocked_requests(self) -> list[RequestId]:
        """Return the requests that the component keeps out of the waiting queue, once for each prerequisite."""
        return []

    def handles(self) -> list[RadixNode]:
        """Return the locks on the radix cache that the component holds, a node once for each lock."""
        return []

    def owned_pages(self) -> Iterator[tuple[str, Int32s]]:
        """Yield the pages of the device that the component owns, int32 [pages], each with a name for messages."""
        yield from ()

    def due_times(self) -> Iterator[tuple[int, str]]:
        """Yield the times in us at which the component must act by itself, each with its reason: `check_wake`.

        Raises: InvariantError for a wait that the settings limit and that has no due time.
        """
        yield from ()

    def check_state(self, facts: Facts) -> None:
        """Raise InvariantError for the first equation of the component that does not hold."""

    def check_at_rest(self) -> None:
        """Raise InvariantError if something is left while no request is live and nothing is in flight."""
        for name in self.EMPTY_AT_REST:
            if value := getattr(self, name):
                fail(f"L9: `{name}` is not empty at rest: {value}")
