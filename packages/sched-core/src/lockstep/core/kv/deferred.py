"""Deferred frees: rows and pages that stay taken while launched batches or a transfer may still use them.

A launched plan may read and write the rows and pages that it names until its result is delivered. A request that leaves
a row while such a plan is in flight leaves a `DeferredFree`: row, pages and lock stay taken until the last plan that
names the row is collected. A row of a plan is *dead* once its request has left the row: its results are dropped.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from lockstep.core.contract.checks import fail
from lockstep.core.contract.events import BatchId, RequestId
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import GONE, Int32s, RequestTable

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


class DeferredFreeImage(Struct, forbid_unknown_fields=True, rename={"free_after": "fence"}):
    """A deferred free in a snapshot, with the tokens and pages of its row."""

    free_after: int
    row: int
    namespace: str
    tokens: bytes
    prompt_tokens: int
    handle: int | None
    protected_pages: int
    computed: int
    publish: bool
    row_pages: bytes
    row_outputs: bytes
    known: int | None = None


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

    def check_at_rest(self) -> None:
        """L9: nothing is deferred or lent."""
        for name in self.__slots__:
            if value := getattr(self, name):
                fail(f"L9: `{name}` is not empty at rest: {value}")

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

    def row_images(self, table: RequestTable, in_flight: Iterable[InFlight]) -> list[DeferredFreeImage]:
        """Return the deferred rows as a snapshot stores them."""
        images = []
        for deferred in self.rows:
            on_the_way = sum(batch.tokens_of(deferred.row) for batch in in_flight)
            outputs = max(deferred.computed - deferred.prompt_tokens, 0)  # no more of them will be inserted
            outputs = min(outputs, max(outputs + 1 - on_the_way, 0))
            pages = table.row_image(deferred.row, table.held_pages(deferred.row, deferred.computed), outputs)
            values = deferred._asdict()
            values["handle"] = deferred.handle.number if deferred.handle is not None else None
            images.append(DeferredFreeImage(**values, row_pages=pages[0], row_outputs=pages[1]))
        return images

    def page_images(self) -> list[tuple[BatchId, bytes]]:
        """Return the deferred pages as a snapshot stores them."""
        return [(free_after, pages.tobytes()) for free_after, pages in self.pages]

    def load(
        self,
        rows: list[DeferredFreeImage],
        pages: list[tuple[BatchId, bytes]],
        table: RequestTable,
        nodes: Mapping[int, RadixNode],
    ) -> None:
        """Take over what `row_images` and `page_images` returned, and restore the rows in the request table."""
        for image in rows:
            table.load_row(image.row, GONE, image.row_pages, image.row_outputs)
            values = {name: getattr(image, name) for name in DeferredFree._fields}
            values["handle"] = nodes[image.handle] if image.handle is not None else None
            self.rows.append(DeferredFree(**values))
        self.pages = [(free_after, np.frombuffer(ids, np.int32)) for free_after, ids in pages]

    def lent_images(self) -> list[tuple[int, RequestId, list[bytes]]]:
        """Return the rows that transfers read as a snapshot stores them."""
        return [(row, one.request_id, [pages.tobytes() for pages in one.pages]) for row, one in self.lent.items()]

    def load_lent(self, images: Iterable[tuple[int, RequestId, list[bytes]]]) -> None:
        """Take over what `lent_images` returned."""
        for row, request_id, replaced in images:
            self.lent[row] = Lent(request_id, [np.frombuffer(pages, np.int32) for pages in replaced])
