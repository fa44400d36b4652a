"""A radix cache in which every tenant keeps a guaranteed part of the pages; the rest is by use.

    pages   | 0 ......... guarantee x pages .......... | the rest, by use of all tenants |
            | tenant a | tenant b | tenant c |                           equal parts of the tenants with cached pages

Plain LRU lets one tenant evict the prefixes of all others by sending prompts that occur once. Here the oldest leaf of
the tenants above their part is evicted. If none of these has an evictable page, because running requests hold the rest
of the pool, the tenant with most cached pages gives back. So a tenant whose prefixes fit into its part keeps them
whatever other tenants send, and parts shrink alike where there is no room for them. With one tenant this is plain LRU.

A tenant's pages are those of its namespaces, of every adapter, salt and version of the weights; locked pages count. The
namespace contains the tenant, see `cache_namespace`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.errors import InvariantError
from lockstep.core.kv.radix import Inserted, RadixCache
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.validation import tenant_of

Entry = tuple[int, int, RadixNode]


class SharedRadixCache(RadixCache):
    """A radix cache with parts of tenants. The queue of leaves is one for each tenant.

    Args:
        guaranteed_pages: pages of all guaranteed parts together.
    Attributes:
        pages_by: cached pages by tenant, of those with any.
    """

    __slots__ = ("evicted_of", "guaranteed_pages", "pages_by", "queues")

    def __init__(self, page_tokens: int, capacity_pages: int | None, guaranteed_pages: int) -> None:
        super().__init__(page_tokens, capacity_pages)
        self.guaranteed_pages = guaranteed_pages
        self.pages_by: Counter[str] = Counter()
        self.queues: dict[str, list[Entry]] = {}
        self.evicted_of: tuple[tuple[str, int], ...] = ()

    @property
    def part_pages(self) -> int:
        """The guaranteed pages of each tenant."""
        return self.guaranteed_pages // max(1, len(self.pages_by))

    def insert(
        self, namespace: str, tokens: bytes, pages: NDArray[np.int32], behind: RadixNode | None = None
    ) -> Inserted:
        """Insert tokens with their KV, see `RadixCache.insert`."""
        before = self.total_pages
        inserted = super().insert(namespace, tokens, pages, behind)
        if self.total_pages > before:
            self.pages_by[tenant_of(namespace)] += self.total_pages - before
        return inserted

    def evict(self, count: int, *, by_age: bool = False) -> NDArray[np.int32]:
        """Take out `count` evictable pages, first of tenants above their part, each time of the oldest leaf.

        Args:
            by_age: whether the parts do not count, as when the KV of replaced weights is evicted.
        Returns: see `RadixCache.evict`.
        """
        short = wanted = min(max(count, 0), self.evictable_pages)
        taken: list[NDArray[np.int32]] = []
        reported, evicted = None, Counter[str]()
        while short:
            leaf, most = self._next(by_age)
            if self.on_evict is not None and reported is not leaf:
                self.on_evict(leaf)
                reported = leaf
            size = min(short, len(leaf.pages), most)
            short -= size
            tenant = tenant_of(leaf.namespace)
            self.pages_by[tenant] -= size
            evicted[tenant] += size
            if not self.pages_by[tenant]:
                del self.pages_by[tenant]
            if keep := len(leaf.pages) - size:
                taken.append(self._shortened(leaf, keep))
            else:
                heappop(self.queues[tenant])
                taken.append(leaf.pages)
                self._remove(leaf)
        self.evicted_of = tuple(sorted(evicted.items()))
        if not wanted:
            return np.empty(0, dtype=np.int32)
        self.total_pages -= wanted
        self.epoch += 1
        return np.concatenate([pages[::-1] for pages in taken])

    # mechanism: cache-guarantee (decided)
    def _next(self, by_age: bool) -> tuple[RadixNode, int]:
        """Return the leaf that is evicted next, at the top of its queue, and the most pages to take of it."""
        tops = [(tenant, leaf) for tenant in list(self.queues) if (leaf := self._top(tenant)) is not None]
        part = self.part_pages
        above = tops if by_age else [(tenant, leaf) for tenant, leaf in tops if self.pages_by[tenant] > part]
        if above:
            tenant, leaf = min(above, key=lambda one: (one[1].tick, one[1].number))
            return leaf, len(leaf.pages) if by_age else self.pages_by[tenant] - part
        tops.sort(key=lambda one: (-self.pages_by[one[0]], one[1].tick, one[1].number))
        leaf, most = tops[0][1], self.pages_by[tops[0][0]]
        return leaf, max(1, most - self.pages_by[tops[1][0]]) if len(tops) > 1 else len(leaf.pages)

    def _top(self, tenant: str) -> RadixNode | None:
        """Return the oldest evictable leaf of a tenant; None without one. Outdated entries above it are settled."""
        queue = self.queues[tenant]
        while queue:
            tick, _, leaf = queue[0]
            if leaf.children or leaf.lock_count:
                heappop(queue)
                leaf.queued = False
            elif leaf.tick != tick:
                heapreplace(queue, (leaf.tick, leaf.number, leaf))
            else:
                return leaf
        del self.queues[tenant]
        return None

    def _settle(self, node: RadixNode) -> None:
        if node.children or node.lock_count:
            return
        if node.parent is None:
            del self._roots[node.namespace]
            node.version += 1
        elif not node.queued:
            heappush(self.queues.setdefault(tenant_of(node.namespace), []), (node.tick, node.number, node))
            node.queued = True

    def _entries(self) -> list[Entry]:
        return [entry for queue in self.queues.values() for entry in queue]

    def dump(self) -> dict[str, Any] | None:
        """Return the state in builtins, see `RadixCache.dump`."""
        state = super().dump()
        assert state is not None
        return {**state, "guaranteed_pages": self.guaranteed_pages}

    @classmethod
    def empty(cls, state: dict[str, Any]) -> SharedRadixCache:
        """Return an empty cache with the sizes of a state."""
        return cls(state["page_tokens"], state["capacity_pages"], state["guaranteed_pages"])

    @classmethod
    def load(cls, state: dict[str, Any]) -> RadixCache:
        """Return the cache that `dump` described, see `RadixCache.load`."""
        cache = super().load(state)
        assert isinstance(cache, SharedRadixCache)
        cache._recount()
        return cache

    def _recount(self) -> None:
        for node in self.nodes():
            if len(node.pages):
                self.pages_by[tenant_of(node.namespace)] += len(node.pages)

    def check(self, handles: Iterable[RadixNode] | None = None, nodes: list[RadixNode] | None = None) -> None:
        """Recompute everything that is kept incrementally, see `RadixCache.check`. Raises: InvariantError."""
        super().check(handles, nodes)
        counted: Counter[str] = Counter()
        for node in self.nodes():
            counted[tenant_of(node.namespace)] += len(node.pages)
        counted = +counted
        if counted != self.pages_by:
            raise InvariantError(f"S9: pages by tenant are {dict(self.pages_by)}; recount {dict(counted)}")
        for tenant, queue in self.queues.items():
            for _, _, node in queue:
                if tenant_of(node.namespace) != tenant:
                    raise InvariantError(f"S11: {node} of {node.namespace!r} is in the queue of {tenant!r}")
