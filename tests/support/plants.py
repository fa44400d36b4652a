"""Deliberate bugs, planted behind a switch, that prove the detectors work. Never imported by the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lockstep.core.commands import Step
from lockstep.core.engine import Engine, Lease
from lockstep.core.radix import RadixCache, RadixNode
from lockstep.core.requests import Request


@contextmanager
def _replaced(owner: type, name: str, bug: Callable[..., object]) -> Iterator[None]:
    """`owner.name` calls bug(original, ...) instead."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: bug(original, *args, **options))
    try:
        yield
    finally:
        setattr(owner, name, original)


def double_free() -> AbstractContextManager[None]:
    """Releasing the row of a retracted request gives one of its pages back twice."""

    def bug(release: Callable[..., None], engine: Engine, lease: Lease, step: Step) -> None:
        pages = engine.table.pages[lease.row, lease.protected_pages : lease.protected_pages + 1].copy()
        has_private = -(-lease.computed // engine.config.page_size) > lease.protected_pages
        release(engine, lease, step)
        if has_private and not lease.publish and engine.pool.free_count < engine.pool.total:
            engine.pool.free(pages)

    return _replaced(Engine, "release", bug)


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

    def bug(leave: Callable[..., None], engine: Engine, request: Request, step: Step, *, publish: bool) -> None:
        leave(engine, request, step, publish=publish)
        while engine.leases:
            engine.release(engine.leases.pop(), step)

    return _replaced(Engine, "_leave", bug)


PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "double_free": double_free,
    "lock_leak": lock_leak,
    "early_free": early_free,
}
