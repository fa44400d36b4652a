"""Statistics of one engine: its state at one moment, and totals of what it has decided since it began."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from lockstep.core.contract.declarations import DECLARATIONS, Tally


class Counts(msgspec.Struct):
    """Totals since the engine began: the tallies of decided events that have a field of the same name here.

    A dict holds a tally by the values of a field of the event; any other field holds the sum.
    """

    admitted: int = 0
    cached_tokens: int = 0  # tokens found in the radix cache at admissions, also those after a retraction
    new_tokens: int = 0  # tokens still to be computed at admissions
    retractions: int = 0
    pages_evicted: int = 0
    finished: dict[str, int] = msgspec.field(default_factory=dict)  # by reason
    rejected: dict[str, int] = msgspec.field(default_factory=dict)  # by reason

    def fold(self, decided: Iterable[msgspec.Struct]) -> None:
        """Count the decided events of one step."""
        for event in decided:
            tallies = _COUNTED.get(type(event))
            for name, added, by in tallies if tallies is not None else _counted(type(event)):
                amount = getattr(event, added) if added else 1
                if by:
                    parts, key = getattr(self, name), getattr(event, by)
                    parts[key] = parts.get(key, 0) + amount
                elif amount:
                    setattr(self, name, getattr(self, name) + amount)


_COUNTED: dict[type, tuple[Tally, ...]] = {}  # the tallies with a field in `Counts`, by type of event


def _counted(type_: type) -> tuple[Tally, ...]:
    totals = {name: getattr(Counts(), name) for name in Counts.__struct_fields__}
    found = tuple(
        tally if type(totals[tally.name]) is dict else tally._replace(by="")
        for tally in DECLARATIONS[type_].tallies
        if tally.name in totals
    )
    _COUNTED[type_] = found
    return found


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one engine at one moment, and its totals so far.

    Pages of the radix cache are held by requests, held by sessions only, or unreferenced.
    """

    time_us: int
    waiting: int  # requests in the waiting queue
    held: int  # accepted requests with an open prerequisite, not in the waiting queue yet
    prefilling: int  # requests with a prompt that is not completely launched
    running: int  # requests with a launched prompt whose last token is not delivered
    in_flight: int  # batches
    pages: int
    pages_free: int
    pages_cached: int  # unreferenced pages of the radix cache, which are available at once
    pages_session_held: int
    token_usage: float  # share of the pool that is not available at once
    cache_hit_ratio: float  # share of the tokens of all admissions that were found in the radix cache
    new_token_ratio: float
    sessions: int
    paused: bool
    draining: bool
    weights_version: int
    memory_released: tuple[str, ...]
    idle: bool  # no request waits or runs, and no batch is in flight: no progress is expected
    progress: int  # rises with every launch, result, admission, retraction and end
    launches: int
    decode_launches: int
    tokens_discarded: int
    counts: Counts
