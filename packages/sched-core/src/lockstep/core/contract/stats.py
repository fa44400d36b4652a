"""How an engine stands and what it has done so far, and whether it still gets anywhere.

`Engine.stats` is computed on demand. What cannot be read off the state then is counted in `Counts`, which folds decided
events: in a steady decode nothing is decided and nothing is counted.

    watched = watch(watched, engine.stats(), now_us)        after any event, or once a second
    health = 200 if healthy(watched, now_us, stalled_us) else 503
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from lockstep.core.contract.events import (
    Decided,
    PagesEvicted,
    RequestAdmitted,
    RequestFinished,
    RequestRejected,
    RequestRetracted,
)


class Counts(msgspec.Struct):
    """Totals since the engine began."""

    admitted: int = 0
    cached_tokens: int = 0  # found in the radix cache at admissions, those after a retraction included
    new_tokens: int = 0  # still to be computed at admissions
    retractions: int = 0
    pages_evicted: int = 0
    finished: dict[str, int] = msgspec.field(default_factory=dict)  # by reason
    rejected: dict[str, int] = msgspec.field(default_factory=dict)  # by reason

    def fold(self, decided: Iterable[Decided]) -> None:
        """Count what one step decided."""
        for event in decided:
            if type(event) is RequestAdmitted:
                self.admitted += 1
                self.cached_tokens += event.cached_tokens
                self.new_tokens += event.new_tokens
            elif type(event) is RequestFinished:
                self.finished[event.reason] = self.finished.get(event.reason, 0) + 1
            elif type(event) is PagesEvicted:
                self.pages_evicted += event.pages
            elif type(event) is RequestRetracted:
                self.retractions += 1
            elif type(event) is RequestRejected:
                self.rejected[event.reason] = self.rejected.get(event.reason, 0) + 1


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at one moment. Pages of the radix cache are held by requests, by sessions only, or by nobody."""

    time_us: int
    waiting: int  # in the line
    held: int  # accepted, and not in the line yet
    prefilling: int  # with a prompt that is not launched to its end
    running: int  # past that, their last token not delivered
    in_flight: int  # batches
    pages: int
    pages_free: int
    pages_cached: int  # held by nobody: they can be had at once
    pages_session_held: int
    token_usage: float  # share of the pool that cannot be had at once
    cache_hit_ratio: float  # of the tokens of all admissions, found in the radix cache
    new_token_ratio: float
    sessions: int
    paused: bool
    draining: bool
    weights_version: int
    memory_released: tuple[str, ...]
    idle: bool  # nothing waits, runs or is in flight
    progress: int  # rises with every launch, result, admission, retraction and end
    launches: int
    decode_launches: int
    tokens_discarded: int
    counts: Counts


# ------------------------------------------------------------------------------------------------------------- watchdog


class Watched(NamedTuple):
    """What a watchdog remembers between two looks."""

    progress: int
    moved_us: int  # when the engine was last seen to have moved, or to have nothing to do


def watch(before: Watched | None, now: Stats, now_us: int) -> Watched:
    """Look at an engine: it is well when it moved since the last look, rests, or was told to stand still."""
    at_rest = now.idle or now.paused or bool(now.memory_released)
    if before is None or at_rest or now.progress != before.progress:
        return Watched(now.progress, now_us)
    return before


def healthy(watched: Watched, now_us: int, stalled_us: int) -> bool:
    """Whether the engine moved within the last `stalled_us`. It counts batches, so a long prompt in chunks is well."""
    return now_us - watched.moved_us <= stalled_us
