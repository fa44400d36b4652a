"""Deferred frees: rows and pages that stay taken while launched batches or a transfer may still use them.

A launched plan may read and write the rows and pages that it names until its result is delivered. A request that leaves
a row while such a plan is in flight leaves a `DeferredFree`: row, pages and lock stay taken until the last plan that
names the row is collected. A row of a plan is *dead* once its request has left the row: its results are dropped.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from lockstep.core.contract.events import BatchId, RequestId
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import Int32s

NO_BATCH: BatchId = -1


class DeferredFree(NamedTuple):
    """Row, pages and lock of a request that left its row, taken until batch `free_after` is collected."""

    free_after: BatchId
    row: int
    namespace: str
    tokens: bytes  # int32 ids that the request had when it took the row
    prompt_tokens: int
    handle: RadixNode | None
    protected_pages: int
    computed: int  # positions with launched KV
    publish: bool  # insert the computed KV into the radix cache
    known: int | None = None  # positions to insert; None: all computed ones


class Lent(NamedTuple):
    """A row with pages that a transfer reads, and the pages that the row replaced by cached ones meanwhile."""

    request_id: RequestId
    pages: list[Int32s]


class DeferredFrees:
    """All rows and pages of an engine that are freed later."""

    __slots__ = ("lent", "pages", "rows")

    def __init__(self) -> None:
        self.rows: list[DeferredFree] = []
        self.pages: list[tuple[BatchId, Int32s]] = []  # duplicates, free after this batch is collected
        self.lent: dict[int, Lent] = {}  # by row; such a row stays taken until its transfer has ended

    def withhold(self, rows: Container[int] = (), nodes: Container[int] = ()) -> None:
        """Insert no KV of these rows, nor of rows that lock these radix nodes by number, into the radix cache."""
        self.rows = [
            deferred._replace(publish=False)
            if deferred.row in rows or (deferred.handle is not None and deferred.handle.number in nodes)
            else deferred
            for deferred in self.rows
        ]

    def leaving(self) -> list[tuple[int, int]]:
        """Return the deferred rows that no transfer reads, each with its computed positions."""
        return [(deferred.row, deferred.computed) for deferred in self.rows if deferred.row not in self.lent]
