"""Rows and KV pages of one engine: their holders, and when they come back.

The holder of a page, at any moment exactly one of:

    the pool's free list | the radix cache | a row, private to its request | a fence, until work in flight is done
    | a load from a tier below, until it has ended (`tiers`)

What layers without full attention keep beside a page goes where the page goes (`hybrid`).

**Deferred frees.** A launched plan may read and write the rows and pages it names until its result is delivered. A
request that leaves a row while such a plan is in flight leaves a `DeferredFree` behind: row, pages and lock stay taken
until the last plan that names the row has been collected. A plan's row whose request has left is *dead* in it: its
results are dropped.

Nothing here chooses: the engine decides which request takes or leaves a row and what is published; this file keeps the
books.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from lockstep.core.contract.commands import NO_ROWS, PageDeltas, RowTaken, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import BatchId, PagesEvicted, RequestId
from lockstep.core.kv.adapters import Adapters, NoAdapters
from lockstep.core.kv.hybrid import hybrid_of
from lockstep.core.kv.no_tiers import tiers_of
from lockstep.core.kv.pages import PagePool
from lockstep.core.kv.radix import Match, NoRadixCache, RadixCache, RadixNode
from lockstep.core.kv.resource import Resource, overrides
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.extras import with_extras
from lockstep.core.requests.table import NO_ROW, VERSION_MARK, Int32s, Request, RequestTable

NO_BATCH: BatchId = -1
EVICT_AHEAD_SHARE = 256  # evict at least pages // this at once, so that not every decode of a full cache evicts


class DeferredFree(NamedTuple):
    """What a request left behind in flight: its row, its pages and its lock, until batch `free_after` is collected."""

    free_after: BatchId
    row: int
    namespace: str
    tokens: bytes  # int32 ids it came to the row with
    prompt_tokens: int
    handle: RadixNode | None
    protected_pages: int
    computed: int  # positions whose KV is launched
    publish: bool  # keep the computed KV in the radix cache ...
    known: int | None = None  # ... of so many positions only; None: all that is computed


class Rewrite(NamedTuple):
    """Entries of a row's page table that changed outside a launch; the next plan tells the device."""

    row: int
    first: int  # page index
    pages: Int32s


class Back(NamedTuple):
    """What comes back to the engine beside what can be had now."""

    pages: int
    matched: int  # of these, pages of a match that was asked about
    places: int  # requests that end with a batch in flight
    rows: int
    launches: int  # decodes of each that may be launched before it has all come back


class Pending(NamedTuple):
    """KV that was shared when its batch was launched: what lies beyond the first `pages` of the path to `node`."""

    batch_id: BatchId
    node: RadixNode
    pages: int


class Lent(NamedTuple):
    """A row whose pages are read from elsewhere, and pages that were its own until the radix cache had better ones."""

    request_id: RequestId
    pages: list[Int32s]


class Memory:
    """The rows, the page pool and the radix cache of one engine, and what waits to come back to them."""

    def __init__(self, config: SchedConfig, in_flight: deque[InFlight]) -> None:
        """`in_flight` is the engine's own queue, oldest first: the fences are read off it."""
        self.config = config
        self.in_flight = in_flight
        self.table = RequestTable(config.rows_max, config.page_size)
        self.pool = PagePool(config.pages)
        self.radix = RadixCache(config.page_size, config.radix_capacity_pages) if config.radix_cache else NoRadixCache()
        beside = config.base_beside_loras is True
        self.adapters = Adapters(config.max_loras, base_counts=not beside) if config.max_loras else NoAdapters()
        self.deferred_frees: list[DeferredFree] = []
        self.deferred_pages: list[tuple[BatchId, Int32s]] = []  # duplicates given up while a batch still reads them
        self.rewrites: list[Rewrite] = []
        self.rows_taken: list[RowTaken] = []
        self.pending: list[Pending] = []  # KV in the radix cache that a batch in flight is still to compute
        self.lent: dict[int, Lent] = {}  # by row: what a transfer reads; the row stays taken until it is over
        self.weights_version = 0
        self.tiers = tiers_of(self)
        self.hybrid = hybrid_of(config, self.table, in_flight)
        self.pool = self.hybrid.pool_of(self.pool)
        self._takes: tuple[Callable[[int, Request], None], ...] = ()  # of resources that go with a row
        self._releases: tuple[Callable[[int], None], ...] = ()
        self._voids: tuple[Callable[[], None], ...] = ()

    def serve(self, resources: tuple[Resource, ...]) -> None:
        """From now on these are taken and released with rows, in this order, and void when the device's memory is."""
        self._takes = tuple(one.take for one in resources if overrides(one, "take"))
        self._releases = tuple(one.release for one in resources if overrides(one, "release"))
        self._voids = tuple(one.void for one in resources if overrides(one, "void"))

    # ------------------------------------------------------------------------------------------------- what can be had

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free ones, and cached ones that no lock holds."""
        return self.pool.free_count + self.radix.evictable_pages

    def all_below(self, share: float) -> bool:
        """Whether less than this share of each pool is in use."""
        total = self.config.pages
        return total - self.available_pages < share * total and self.hybrid.all_below(share)

    def match(self, request: Request) -> Match:
        """The cached prefix of a waiting request, as far as it may use it."""
        most = request.cacheable_tokens // self.config.page_size
        found = self.radix.match(request.namespace, request.tokens, most)
        return self.hybrid.continued(self.radix, found, request.tokens)

    def match_to_receive(self, request: Request) -> Match:
        """The part of a prompt that need not come, of a request whose KV is computed by another engine.

        Pages that a batch in flight is still to compute do not count: if that batch failed, they would never be sent.
        """
        if not (self.pending or self.hybrid.present):
            return self.match(request)
        found = self.radix.match(request.namespace, request.tokens, request.cacheable_tokens // self.config.page_size)
        path = self.computed_of(self.path_of(found))
        pages = self.hybrid.pages_to_receive_behind(path, request)
        return found if pages == found.pages else self.radix.match(request.namespace, request.tokens, pages)

    def computed_of(self, path: Int32s) -> Int32s:
        """Cached pages from a prompt's first on, up to the first that a batch in flight is still to compute."""
        for pending in self.pending:
            awaited = np.isin(path, self.radix.pages_of(pending.node)[pending.pages :])
            if awaited.any():
                path = path[: int(awaited.argmax())]
        return path

    def path_of(self, match: Match | None) -> Int32s:
        """The pages of a match, int32 [pages]."""
        if match is None or match.node is None:
            return NO_ROWS
        return self.radix.pages_of(match.node)[: match.pages]

    def keyed(self, namespace: str) -> str:
        """The namespace for KV of the weights there are now, whatever version it was for."""
        if VERSION_MARK not in namespace and not self.weights_version:
            return namespace
        plain, _, _ = namespace.partition(VERSION_MARK)
        return f"{plain}{VERSION_MARK}{self.weights_version}" if self.weights_version else plain

    def is_stale(self, namespace: str) -> bool:
        """Whether it is for KV of weights that were replaced: such KV is not shared."""
        return namespace != self.keyed(namespace)

    def returning_pages(self) -> int:
        """Pages that come back by themselves once everything in flight is delivered. An underestimate."""
        deferred = sum(pages.size for _, pages in self.deferred_pages)
        deferred_frees = [deferred for deferred in self.deferred_frees if deferred.row not in self.lent]
        deferred_rows = sum(
            self._freed_by(deferred.computed, deferred.protected_pages, deferred.handle) for deferred in deferred_frees
        )
        ending = 0
        for batch in self.in_flight:
            for request in batch.ending_requests():
                ending += self._freed_by(request.computed, request.protected_pages, request.handle)
        return deferred + deferred_rows + ending + self.tiers.returning_pages()

    def back_once_delivered(self, leaving: list[tuple[Request, int]], match: Match | None) -> Back:
        """What comes back once everything in flight is delivered and these requests, each with the positions it
        stands at, have left. Exact for the tree as it is: what several hold is freed when the last of them lets go.
        """
        holders = [(deferred.computed, deferred.protected_pages, deferred.handle) for deferred in self.deferred_frees]
        deferred_batches = [deferred.free_after for deferred in self.deferred_frees] + [
            free_after for free_after, _ in self.deferred_pages
        ]
        for batch in self.in_flight:
            for request in batch.ending_requests():
                holders.append((request.computed, request.protected_pages, request.handle))
                deferred_batches.append(batch.plan.batch_id)
        places = len(holders) - len(self.deferred_frees)
        for request, position in leaving:
            holders.append((position, request.protected_pages, request.handle))
        pages = sum(deferred.size for _, deferred in self.deferred_pages)
        pages += sum(-(-computed // self.config.page_size) - protected for computed, protected, _ in holders)

        released: dict[int, int] = {}  # by number of a node: locks that are given back
        for _, _, handle in holders:
            while handle is not None:
                released[handle.number] = released.get(handle.number, 0) + 1
                if released[handle.number] == handle.lock_count:
                    pages += len(handle.pages)
                handle = handle.parent
        matched = 0
        node, mine = (match.node, match.edge_pages) if match is not None else (None, 0)
        while node is not None:
            if node.lock_count and released.get(node.number) == node.lock_count:
                matched += mine
            node = node.parent
            mine = len(node.pages) if node is not None else 0

        last = max(deferred_batches, default=NO_BATCH)
        launches = sum(bool(leaving) or batch.plan.batch_id <= last for batch in self.in_flight)
        launches = min(launches, self.config.overlap_depth + 1)  # that many are of other microbatches
        return Back(pages, matched, places, len(holders), launches)

    def _freed_by(self, computed: int, protected_pages: int, handle: RadixNode | None) -> int:
        """Pages available once a row of `computed` positions is released: its own, and those only it locks."""
        return -(-computed // self.config.page_size) - protected_pages + pages_only_held_by(handle)

    # ---------------------------------------------------------------------------------------------------- take and grow

    def alloc(self, pages: int, reason: Literal["admission", "decode"], step: Step) -> Int32s:
        """Take pages, evicting from the radix cache what the free list lacks. The caller checked `available_pages`."""
        missing = pages - self.pool.free_count
        if missing > 0 and self.radix.evictable_pages:
            evicted = self._evicted(max(missing, self.config.pages // EVICT_AHEAD_SHARE), step)
            self.pool.free(evicted)
            step.decided.append(PagesEvicted(step.time_us, evicted.size, reason))
        return self.pool.alloc(pages)

    def take_row(self, request: Request, match: Match | None, step: Step) -> int:
        """Give the request a row whose leading pages are the matched ones, locked. Returns the row."""
        row = self._row_taken(request)
        if match is not None:
            self.tiers.used(match)
            handle = request.handle = self.radix.hold(match)
            request.protected_pages = match.pages
            if handle is not None and match.pages:
                pages = self.radix.pages_of(handle)
                self.table.pages[row, : match.pages] = pages
                self.rewrites.append(Rewrite(row, 0, pages))
        request.computed = request.protected_pages * self.config.page_size
        self.hybrid.take_row(row, request.protected_pages, step)
        return row

    def reach(self, request: Request, stop: int, step: Step) -> None:
        """Give the request pages for its positions up to `stop`."""
        page_size = self.config.page_size
        first, last = -(-request.computed // page_size), -(-stop // page_size)
        self.table.reserve(last, 0)
        if last > first:
            pages = self.alloc(last - first, "admission", step)
            self.table.pages[request.row, first:last] = pages
            self.rewrites.append(Rewrite(request.row, first, pages))
            self.hybrid.open(pages, step)

    def open_pages(self, rows: Int32s, index: Int32s, step: Step) -> PageDeltas:
        """One more page for each of these rows, at these places of their tables. int32 [n] both."""
        pages = self.alloc(rows.size, "decode", step)
        self.table.write_pages(rows, index, pages)
        self.hybrid.open(pages, step)
        return PageDeltas(pages, NO_ROWS, rows, index)

    def changes(self, deltas: PageDeltas) -> tuple[tuple[RowTaken, ...], PageDeltas]:
        """What changed about rows since the plan before: rows taken, and all changes of tables, `deltas` last."""
        if self.rewrites:
            deltas = _merged(self.rewrites, deltas)
            self.rewrites = []
        taken: tuple[RowTaken, ...] = ()
        if self.rows_taken:
            taken = tuple(self.rows_taken)
            self.rows_taken = []
        return taken, deltas

    # -------------------------------------------------------------------------------------------------------- give back

    def leave(self, request: Request, step: Step, *, publish: bool, known: int | None = None) -> None:
        """Take a request off its row. What work in flight still uses stays behind as a DeferredFree."""
        row, free_after = request.row, NO_BATCH
        for batch in self.in_flight:
            if row not in batch.dead and batch.names(row):
                batch.dead.append(row)
                free_after = batch.plan.batch_id
        if self.rewrites:
            self.rewrites = [rewrite for rewrite in self.rewrites if rewrite.row != row]
        deferred = DeferredFree(
            free_after,
            row,
            request.namespace,
            request.tokens,
            request.prompt_tokens,
            request.handle,
            request.protected_pages,
            request.computed,
            publish,
            known,
        )
        request.row = NO_ROW
        request.handle = None
        request.protected_pages = 0
        request.computed = 0
        request.epoch += 1
        if free_after == NO_BATCH and row not in self.lent:
            self.release(deferred, step)
        else:
            self.deferred_frees.append(deferred)

    def release_deferred(self, batch_id: BatchId, step: Step) -> bool:
        """Batch `batch_id` is collected: give back what waited for it. Returns whether a row came free."""
        done = [
            deferred
            for deferred in self.deferred_frees
            if deferred.free_after <= batch_id and deferred.row not in self.lent
        ]
        for deferred in done:
            self.deferred_frees.remove(deferred)
            self.release(deferred, step)
        for free_after, pages in self.deferred_pages:
            if free_after <= batch_id:
                self.pool.free(pages)
        self.deferred_pages = [entry for entry in self.deferred_pages if entry[0] > batch_id]
        return bool(done)

    def release(self, deferred: DeferredFree, step: Step) -> None:
        """Nothing in flight uses the row any more: its pages go to the radix cache or back to the pool."""
        page_size = self.config.page_size
        row, kept = deferred.row, deferred.protected_pages
        held = self.table.held_pages(row, deferred.computed)
        pages = self.table.pages[row]
        whole = (deferred.computed if deferred.known is None else deferred.known) // page_size
        published = None
        self.hybrid.let_go(row, held)
        if deferred.publish and self.radix.present and whole > kept and not self.is_stale(deferred.namespace):
            tokens = self.table.first_tokens(row, deferred.tokens, deferred.prompt_tokens, whole * page_size)
            inserted = self.radix.insert(deferred.namespace, tokens, pages[:whole], behind=deferred.handle)
            already, published = inserted.already, inserted.node
            if already > kept:
                cached = self.radix.pages_of(published)[kept:already]
                self.hybrid.fill(pages[kept:already], cached)
                self.pool.free(pages[kept:already].copy())
                pages[kept:already] = cached
            kept = whole
        self.hybrid.left(row, pages[:kept])
        if published is not None:
            self.tiers.back_up(published, kept, step)
        if deferred.handle is not None:
            self.let_go(deferred.handle, deferred.namespace, step)
        if held > kept:
            self.pool.free(pages[kept:held].copy())
        self.trim(step)
        self.table.spare[row] = 0
        self.table.free_row(row)
        for release in self._releases:
            release(row)

    def let_go(self, handle: RadixNode, namespace: str, step: Step) -> None:
        """Unlock a path. KV of weights that were replaced is evicted as soon as no lock holds it."""
        cached = self.radix.evictable_pages
        self.radix.unlock(handle)
        if self.is_stale(namespace) and self.radix.evictable_pages > cached:
            self._evict(self.radix.evictable_pages - cached, "weights", step)

    # ------------------------------------------------------------------------------------------- to and from elsewhere

    def _row_taken(self, request: Request) -> int:
        """A row for the request, with what the executor needs of it. Returns the row."""
        row = self.table.take_row(request)
        taken = RowTaken(row, request.request_id, request.epoch, request.sampling, grammar=request.grammar)
        if request.extras is not None:
            taken = with_extras(taken, request.extras)
        self.rows_taken.append(self.adapters.described(taken, request.adapter))
        for take in self._takes:
            take(row, request)
        return row

    def adopt_row(self, request: Request, handle: RadixNode | None, pages: Int32s, computed: int) -> int:
        """Give the request a row whose first `computed` positions are the path of `handle`, its own from now on, and
        `pages`. Returns the row."""
        row = self._row_taken(request)
        if handle is not None:
            request.handle = handle
            request.protected_pages = handle.stop
            pages = np.concatenate((self.radix.pages_of(handle), pages))
        self.table.reserve(pages.size, 0)
        self.table.pages[row, : pages.size] = pages
        self.rewrites.append(Rewrite(row, 0, pages))
        request.computed = computed
        self.hybrid.adopt_row(row, request.request_id)
        return row

    def lend(self, row: int, request_id: RequestId) -> None:
        """From now on a transfer reads pages of the row: none of them is freed before it is over."""
        self.lent[row] = Lent(request_id, [])

    def take_back(self, request_id: RequestId, pages: Int32s, step: Step) -> None:
        """A transfer is over: free `pages`, and what a row that it read has given up since."""
        self.hybrid.received(request_id)
        if pages.size:
            self.pool.free(pages)
        for row in [row for row, lent in self.lent.items() if lent.request_id == request_id]:
            for given_up in self.lent.pop(row).pages:
                self._free_behind(row, given_up)
            in_flight = self.in_flight[0].plan.batch_id if self.in_flight else None
            for deferred in [one for one in self.deferred_frees if one.row == row]:
                if in_flight is None or deferred.free_after < in_flight:
                    self.deferred_frees.remove(deferred)
                    self.release(deferred, step)

    def void(self, step: Step) -> None:
        """The device's memory is gone: nothing fences anything, and nothing is cached."""
        for deferred in self.deferred_frees:
            self.release(deferred, step)
        self.deferred_frees = []
        for _, pages in self.deferred_pages:
            self.pool.free(pages)
        self.deferred_pages = []
        self.rewrites = []
        self.pending = []
        self.hybrid.void()
        for void in self._voids:
            void()
        self.pool.free(self.radix.reset())

    # ------------------------------------------------------------------------------------------------------------ share

    def publish(self, request: Request, computed: int, step: Step, writer: BatchId | None = None) -> None:
        """Share a prompt's KV: insert its whole pages; where the tree had them already, use the tree's.

        It is complete, unless `writer` names the batch in flight that computes it: then only batches launched behind
        that one may read it, which all of them are, and it is void if that one fails.
        """
        radix, row = self.radix, request.row
        pages = computed // self.config.page_size
        if not radix.present or pages <= request.protected_pages or self.is_stale(request.namespace):
            return
        mine = self.table.pages[row, :pages]
        tokens = request.tokens[: 4 * pages * self.config.page_size]
        if writer is not None and self.hybrid.present:
            known = self.path_of(radix.match(request.namespace, tokens, pages))
            if not self.hybrid.may_share(mine[request.protected_pages : known.size], known[request.protected_pages :]):
                return  # once it is computed
        keeps = self.config.keeps_duplicates or row in self.lent
        if keeps and radix.match(request.namespace, tokens, pages).pages > request.protected_pages:
            return  # it would hold its own pages, which are read from elsewhere, and the tree's: shared when it leaves
        inserted = radix.insert(request.namespace, tokens, mine, behind=request.handle)
        node, already = inserted.node, inserted.already
        if already > request.protected_pages:
            twice = slice(request.protected_pages, already)
            duplicates = mine[twice].copy()
            mine[twice] = radix.pages_of(node)[twice]
            self.hybrid.replaced(row, duplicates, mine[twice], request.protected_pages)
            self.rewrites.append(Rewrite(row, request.protected_pages, mine[twice].copy()))
            self._free_behind(row, duplicates)
        if request.handle is not None:
            radix.move_down(request.handle, node)
        else:
            radix.lock_node(node)
        if writer is not None and already < pages:
            self.pending += [Pending(batch_id, node, already) for batch_id in self._writers(request)]
        request.handle = node
        request.protected_pages = pages
        self.hybrid.published(row, pages)
        if writer is not None:
            self.hybrid.share(row, mine, already)
        self.trim(step)

    def _writers(self, request: Request) -> list[BatchId]:
        """Batches in flight on which depends what a request has beyond its protected pages.

        Those that compute it: all chunks of one page, too. Of a hybrid model every chunk of the request: each begins
        with the state and the windows that the one before it leaves, though its pages may be cached already.
        """
        known = 0 if self.hybrid.present else self.config.page_size * request.protected_pages
        found: list[BatchId] = []
        for batch in self.in_flight:
            stops = batch.plan.stops[batch.plan.rows == request.row]
            if stops.size and stops[0] > known:
                found.append(batch.plan.batch_id)
        return found

    def computed(self, batch_id: BatchId) -> None:
        """A batch is collected: what it was to compute is there."""
        self.pending = [pending for pending in self.pending if pending.batch_id != batch_id]

    def invalidate_pending(self, batch_id: BatchId) -> list[int]:
        """A batch failed: no match may find what it was to compute. Numbers of the radix nodes that this concerns."""
        invalidated: list[int] = []
        for pending in self.pending:
            if pending.batch_id == batch_id:
                invalidated += [node.number for node in self.radix.invalidate(pending.node, pending.pages)]
        self.computed(batch_id)
        self.deferred_frees = [
            deferred._replace(publish=False)
            if deferred.handle is not None and deferred.handle.number in invalidated
            else deferred
            for deferred in self.deferred_frees
        ]
        return invalidated

    def empty_cache(self, reason: Literal["flush", "release", "weights"], step: Step) -> None:
        """Evict from the radix cache all that no lock holds."""
        if self.radix.evictable_pages:
            self._evict(self.radix.evictable_pages, reason, step)
        if reason != "release":
            self.tiers.empty()

    def change_weights(self, version: int, step: Step) -> None:
        """From now on KV is of these weights. What older ones left goes, or goes with its holder.

        Nothing is in flight. Locked KV of older weights was used before everything that is cached from here on, so once
        unlocked it is the first to be evicted: evicting as many pages as an unlock sets free takes exactly those.
        """
        self.weights_version = version
        self.empty_cache("weights", step)
        self.radix.epoch += 1  # equal tokens match something else now

    def lock_node(self, node: RadixNode) -> None:
        """Hold the path down to a node of the radix cache."""
        self.radix.lock_node(node)

    def unlock(self, node: RadixNode) -> None:
        """Give a path back that `lock_node` or the radix cache's `lock` held."""
        self.radix.unlock(node)

    def _evicted(self, pages: int, step: Step) -> Int32s:
        """Evict from the radix cache to make room, as its `evict`; a tier below may keep what goes."""
        return self.tiers.evict(pages, step)

    def _evict(self, pages: int, reason: Literal["flush", "release", "weights"], step: Step) -> None:
        evicted = self.radix.evict(pages)
        self.tiers.forget(evicted)
        self.pool.free(evicted)
        step.decided.append(PagesEvicted(step.time_us, pages, reason))

    def _free_behind(self, row: int, pages: Int32s) -> None:
        """Free pages of a row once the last plan in flight that may read them is collected."""
        if row in self.lent:
            self.lent[row].pages.append(pages)
            return
        deferred_batches = [batch.plan.batch_id for batch in self.in_flight if batch.names(row)]
        if deferred_batches:
            self.deferred_pages.append((deferred_batches[-1], pages))
        else:
            self.pool.free(pages)

    def trim(self, step: Step) -> None:
        """Hold the radix cache to its cap."""
        if self.radix.capacity_pages is not None:
            trimmed = self._evicted(self.radix.total_pages - self.radix.capacity_pages, step)
            if trimmed.size:
                self.pool.free(trimmed)
                step.decided.append(PagesEvicted(step.time_us, trimmed.size, "capacity"))


def pages_only_held_by(handle: RadixNode | None) -> int:
    """Cached pages that no other handle locks: unlocking this handle makes them evictable."""
    pages = 0
    while handle is not None and handle.lock_count == 1:
        pages += len(handle.pages)
        handle = handle.parent
    return pages


def _merged(rewrites: list[Rewrite], opened: PageDeltas) -> PageDeltas:
    """Rewrites in the order they were made, then the pages that decodes open."""
    runs = np.array([number for row, first, pages in rewrites for number in (row, first, pages.size)], np.int32)
    pages = [rewrite.pages for rewrite in rewrites]
    if opened.pages.size:
        pages.append(opened.pages)
    return PageDeltas(
        pages[0] if len(pages) == 1 else np.concatenate(pages), runs, opened.opened_rows, opened.opened_index
    )
