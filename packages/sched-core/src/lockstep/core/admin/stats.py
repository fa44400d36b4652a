"""A watchdog over the statistics of an engine: whether it still makes progress.

watched = watch(watched, engine.stats(), now_us)        after any event, or once a second
health = 200 if healthy(watched, now_us, stalled_us) else 503
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.core.contract.stats import Stats


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
