"""Deliberate bugs, planted behind a switch, that prove the detectors work. Never imported by the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lockstep.core import grammars
from lockstep.core.batching import InFlight
from lockstep.core.commands import SampleBatch, Step
from lockstep.core.memory import Lease, Memory
from lockstep.core.radix import RadixCache, RadixNode
from lockstep.core.requests import Int32s, Request


@contextmanager
def _replaced(owner: object, name: str, bug: Callable[..., object]) -> Iterator[None]:
    """`owner.name` calls bug(original, ...) instead."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: bug(original, *args, **options))
    try:
        yield
    finally:
        setattr(owner, name, original)


def double_free() -> AbstractContextManager[None]:
    """Releasing the row of a retracted request gives one of its pages back twice."""

    def bug(release: Callable[..., None], memory: Memory, lease: Lease, step: Step) -> None:
        pages = memory.table.pages[lease.row, lease.protected_pages : lease.protected_pages + 1].copy()
        has_private = -(-lease.computed // memory.config.page_size) > lease.protected_pages
        release(memory, lease, step)
        if has_private and not lease.publish and memory.pool.free_count < memory.pool.total:
            memory.pool.free(pages)

    return _replaced(Memory, "release", bug)


def lock_leak() -> AbstractContextManager[None]:
    """Every fifth unlock of the radix cache is forgotten."""
    calls = 0

    def bug(unlock: Callable[..., None], radix: RadixCache, node: RadixNode) -> None:
        nonlocal calls
        calls += 1
        if calls % 5:
            unlock(radix, node)

    return _replaced(RadixCache, "unlock", bug)


def early_free() -> AbstractContextManager[None]:
    """Leaving a row ignores work in flight: its pages are free while a launched batch still writes them."""

    def bug(leave: Callable[..., None], memory: Memory, request: Request, step: Step, *, publish: bool) -> None:
        leave(memory, request, step, publish=publish)
        while memory.leases:
            memory.release(memory.leases.pop(), step)

    return _replaced(Memory, "leave", bug)


def dead_matcher() -> AbstractContextManager[None]:
    """Sampling a deferred batch moves the matchers of rows whose request has left, too."""

    def bug(sample: Callable[..., SampleBatch], batch: InFlight, outputs: Int32s) -> SampleBatch:
        dead, batch.dead = batch.dead, []
        try:
            return sample(batch, outputs)
        finally:
            batch.dead = dead

    return _replaced(grammars, "_sample", bug)


PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "double_free": double_free,
    "lock_leak": lock_leak,
    "early_free": early_free,
    "dead_matcher": dead_matcher,
}
