"""Pages of the device: the pool, the radix cache over it, and the blocks of layers without full attention.

`Memory` extends this with rows, adapters and the tiers below the device. The tiers move pages of the device, so they
use this part and not `Memory`.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

import numpy as np

from lockstep.core.contract.commands import NO_ROWS, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import BatchId, PagesEvicted
from lockstep.core.kv.deferred import DeferredFrees
from lockstep.core.kv.hybrid import hybrid_of
from lockstep.core.kv.operations import Operations
from lockstep.core.kv.pages import PagePool
from lockstep.core.kv.radix import Match
from lockstep.core.kv.radix_kinds import new_radix_cache
from lockstep.core.requests import rules
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import VERSION_MARK, Int32s, Request, RequestTable


class Pending(NamedTuple):
    """KV that was shared when its batch was launched: the path to `node` beyond its first `pages`."""

    batch_id: BatchId
    node: RadixNode
    pages: int


class DeviceMemory:
    """The page pool, the radix cache and the page table of one engine."""

    def __init__(self, config: SchedConfig, in_flight: deque[InFlight]) -> None:
        """`in_flight`: the batches in flight, oldest first; owned by the scheduler and read here."""
        self.config = config
        self.in_flight = in_flight
        self.table = RequestTable(config.rows_max, config.page_size)
        self.radix = new_radix_cache(config)
        self.deferred = DeferredFrees()
        self.operations = Operations()  # between the device and the tiers below it
        self.pending: list[Pending] = []  # KV in the radix cache that a batch in flight computes
        self.weights_version = 0
        self.hybrid = hybrid_of(config, self.table, in_flight, self.deferred, self.operations)
        self.pool = self.hybrid.pool_of(PagePool(config.pages))

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated now: free ones, and cached ones without a lock."""
        return self.pool.free_count + self.radix.evictable_pages

    def all_below(self, share: float) -> bool:
        """Whether less than this share of each pool is in use."""
        total = self.config.pages
        return total - self.available_pages < share * total and self.hybrid.all_below(share)

    def match(self, request: Request) -> Match:
        """Return the cached prefix of a waiting request, as far as the request may use it."""
        most = request.cacheable_tokens // self.config.page_size
        found = self.radix.match(request.namespace, request.tokens, most)
        return self.hybrid.continued(self.radix, found, request.tokens) if self.hybrid.present else found

    def match_to_receive(self, request: Request) -> Match:
        """Return the cached prefix that need not be received, for a request whose KV another engine computes.

        Pages that a batch in flight computes do not count: if that batch failed, they would never be sent.
        """
        if not (self.pending or self.hybrid.present):
            return self.match(request)
        found = self.radix.match(request.namespace, request.tokens, request.cacheable_tokens // self.config.page_size)
        path = self.computed_of(self.path_of(found))
        pages = self.hybrid.pages_to_receive_behind(path, request)
        return found if pages == found.pages else self.radix.match(request.namespace, request.tokens, pages)

    def computed_of(self, path: Int32s) -> Int32s:
        """Return the leading pages of a path up to the first one that a batch in flight computes, int32."""
        for pending in self.pending:
            awaited = np.isin(path, self.radix.pages_of(pending.node)[pending.pages :])
            if awaited.any():
                path = path[: int(awaited.argmax())]
        return path

    def path_of(self, match: Match | None) -> Int32s:
        """Return the pages of a match, int32 [pages]."""
        if match is None or match.node is None:
            return NO_ROWS
        return self.radix.pages_of(match.node)[: match.pages]

    def keyed(self, namespace: str) -> str:
        """Return the namespace for KV of the present weights, whatever version `namespace` is for."""
        if VERSION_MARK not in namespace and not self.weights_version:
            return namespace
        plain, _, _ = namespace.partition(VERSION_MARK)
        return f"{plain}{VERSION_MARK}{self.weights_version}" if self.weights_version else plain

    def is_stale(self, namespace: str) -> bool:
        """Whether a namespace is for KV of replaced weights. Such KV is not shared."""
        return namespace != self.keyed(namespace)

    def alloc(self, pages: int, reason: Literal["admission", "decode"], step: Step) -> Int32s:
        """Allocate pages; evict what the free list lacks from the radix cache. The caller checks `available_pages`."""
        missing = pages - self.pool.free_count
        if missing > 0 and self.radix.evictable_pages:
            evicted = self.evict(rules.pages_to_evict(missing, self.config.pages), step)
            self.pool.free(evicted)
            step.decided.append(PagesEvicted(step.time_us, evicted.size, reason, self.radix.evicted_of))
        return self.pool.alloc(pages)

    def evict(self, pages: int, step: Step) -> Int32s:
        """Evict from the radix cache to make room, see `RadixCache.evict`. A subclass may copy the pages first."""
        return self.radix.evict(pages)

    def trim(self, step: Step) -> None:
        """Evict the pages of the radix cache beyond its capacity."""
        if self.radix.capacity_pages is not None:
            trimmed = self.evict(self.radix.total_pages - self.radix.capacity_pages, step)
            if trimmed.size:
                self.pool.free(trimmed)
                step.decided.append(PagesEvicted(step.time_us, trimmed.size, "capacity", self.radix.evicted_of))

    def lock_node(self, node: RadixNode) -> None:
        """Lock the path to a node of the radix cache."""
        self.radix.lock_node(node)

    def unlock(self, node: RadixNode) -> None:
        """Unlock a path that `lock_node`, or `lock` of the radix cache, has locked."""
        self.radix.unlock(node)
