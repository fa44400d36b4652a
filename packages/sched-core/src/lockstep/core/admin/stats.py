"""A watchdog over the statistics of an engine: whether it still makes progress.

watched = watch(watched, engine.stats(), now_us)        after any event, or once a second
health = 200 if healthy(watched, now_us, stalled_us) else 503
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.core.contract.stats import Stats


class Watched(NamedTuple):
    """The state that a watchdog keeps between two calls of `watch`."""

    progress: int  # Stats.progress at that time
    moved_us: int  # time of the last call at which the engine had moved or was at rest


def watch(before: Watched | None, now: Stats, now_us: int) -> Watched:
    """Return the new watchdog state of an engine with statistics `now`.

    An engine is at rest if it is idle, paused, or has released memory. `moved_us` becomes `now_us` if the engine is at
    rest or has made progress since `before`.
    """
    at_rest = now.idle or now.paused or bool(now.memory_released)
    if before is None or at_rest or now.progress != before.progress:
        return Watched(now.progress, now_us)
    return before


def healthy(watched: Watched, now_us: int, stalled_us: int) -> bool:
    """Return whether the engine moved or rested within the last `stalled_us`. Each chunk of a prompt is progress."""
    return now_us - watched.moved_us <= stalled_us
