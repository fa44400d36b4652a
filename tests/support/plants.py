"""Deliberate bugs, planted behind a switch, that prove the detectors work. Never imported by the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.core.commands import Step
from lockstep.core.engine import Engine, Lease
from lockstep.core.radix import RadixCache, RadixNode
from lockstep.core.requests import Request


@contextmanager
def double_free() -> Iterator[None]:
    """Releasing a row gives one of its pages back twice."""
    release = Engine.release

    def buggy(self: Engine, lease: Lease, step: Step) -> None:
        pages = self.table.pages[lease.row, lease.protected_pages : lease.protected_pages + 1].copy()
        has_private = -(-lease.computed // self.config.page_size) > lease.protected_pages
        release(self, lease, step)
        if has_private and not lease.publish and self.pool.free_count < self.pool.total:
            self.pool.free(pages)

    Engine.release = buggy  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.release = release  # type: ignore[method-assign]


@contextmanager
def lock_leak() -> Iterator[None]:
    """Every fifth unlock of the radix cache is forgotten."""
    unlock = RadixCache.unlock
    calls = 0

    def buggy(self: RadixCache, node: RadixNode) -> None:
        nonlocal calls
        calls += 1
        if calls % 5:
            unlock(self, node)

    RadixCache.unlock = buggy  # type: ignore[method-assign]
    try:
        yield
    finally:
        RadixCache.unlock = unlock  # type: ignore[method-assign]


@contextmanager
def early_free() -> Iterator[None]:
    """Leaving a row ignores work in flight: its pages are free while a launched batch still writes them."""
    leave = Engine._leave

    def buggy(self: Engine, request: Request, step: Step, *, publish: bool) -> None:
        leave(self, request, step, publish=publish)
        while self.leases:
            self.release(self.leases.pop(), step)

    Engine._leave = buggy  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine._leave = leave  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], object]] = {
    "double_free": double_free,
    "lock_leak": lock_leak,
    "early_free": early_free,
}
