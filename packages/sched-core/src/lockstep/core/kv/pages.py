"""The page pool: which KV pages are free.

Every page of the device is always in exactly one of these places; only `alloc` and `free` move it:

    free        in this pool, in a stack: the page freed last is allocated first
    allocated   owned by a request, by the radix cache, or by work in flight (the owner keeps the page number)

The pool stores page numbers and no owners, so it cannot detect a wrong free by itself. Invariants are checked from
outside, by identity: the free pages and the pages of all owners are disjoint and together [0:total). The order of the
stack is part of the state: equal histories allocate equal pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.errors import LockstepError

# stack | ........ | 4 | 5 | 6 | 7 |      alloc(2) -> [4, 5]      free([4, 5]) puts them back as they were
#        0 ...... top ............ total         free_count = total - top


class PoolExhausted(LockstepError, RuntimeError):
    """More pages were requested than are free. The pool is unchanged."""


class PagePool:
    """A stack of free page ids. A new pool of n pages allocates 0, 1, 2, ... n - 1."""

    __slots__ = ("_stack", "free_count", "total")

    def __init__(self, pages: int) -> None:
        """Own pages 0..pages-1, all free."""
        self._stack: NDArray[np.int32] = np.arange(pages, dtype=np.int32)
        self.total = pages
        self.free_count = pages

    def alloc(self, count: int) -> NDArray[np.int32]:
        """Take `count` pages.

        Returns: int32 [count], an array owned by the caller.
        Raises: PoolExhausted if fewer are free; nothing is taken then. ValueError if `count` is negative.
        """
        rest = self.free_count - count
        if rest < 0:
            raise PoolExhausted(f"{count} pages were requested, {self.free_count} of {self.total} are free")
        if count < 0:
            raise ValueError(f"`count` must not be negative, got {count}")
        self.free_count = rest
        top = self.total - rest
        return self._stack[top - count : top].copy()

    def free(self, pages: NDArray[np.int32]) -> None:
        """Free pages, int32 [n]. The next alloc of n pages returns them in the same order.

        Raises: ValueError if more pages would be free than exist, which is the sign of a double free.
        """
        count = len(pages)
        top = self.total - self.free_count - count
        if top < 0:
            raise ValueError(f"freeing {count} pages with {self.free_count} of {self.total} free already")
        self._stack[top : top + count] = pages
        self.free_count += count

    def free_ids(self) -> NDArray[np.int32]:
        """Return a copy of the free page ids, int32 [free_count], the next one to be allocated first."""
        return self._stack[self.total - self.free_count :].copy()

    def dump(self) -> dict[str, Any]:
        """Return the state in builtins, the next page to be allocated last. A loaded pool allocates the same pages."""
        return {"total": self.total, "free": self.free_ids()[::-1].tobytes()}

    @classmethod
    def load(cls, state: dict[str, Any]) -> PagePool:
        """Return the pool that `dump` described."""
        pool = cls(state["total"])
        free = np.frombuffer(state["free"], dtype=np.int32)
        pool._stack[pool.total - len(free) :] = free[::-1]
        pool.free_count = len(free)
        return pool
