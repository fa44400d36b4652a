"""Rows and KV pages of one engine: their owners, and when they are freed.

A page has exactly one owner at any moment:

    the free list of the pool | the radix cache | a row, private to its request | a deferred free (`deferred`)
    | a load from a tier below, until the load has ended (`tiers`) | a transfer from another engine

The window block and the state block of a page move with the page (`hybrid`).

This module decides nothing. The planners and the features decide which request takes or leaves a row and which KV is
published; this module stores the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from lockstep.core.contract.checks import same
from lockstep.core.contract.commands import NO_ROWS, PageDeltas, RowTaken, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import BatchId, PagesEvicted, RequestId
from lockstep.core.kv.adapters import Adapters, NoAdapters, adapters_of
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.deferred import NO_BATCH, DeferredFree, DeferredFreeImage, Lent
from lockstep.core.kv.device_memory import DeviceMemory, Pending
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.no_tiers import tiers_of
from lockstep.core.kv.pages import PagePool
from lockstep.core.kv.radix import Match
from lockstep.core.kv.radix_kinds import radix_cache_of
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.extras import with_extras
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import NO_ROW, Int32s, Request, RequestTable


class Rewrite(NamedTuple):
    """Entries of a row's page table that changed outside a launch. The next plan carries them to the device."""

    row: int
    first: int  # page index
    pages: Int32s


class Returning(NamedTuple):
    """What becomes available beside what is available now."""

    pages: int
    matched: int  # of these, pages of the match in question
    places: int  # requests that end with a batch in flight
    rows: int
    launches: int  # decodes of each request that may be launched before all of it is available


class MemoryPart(Struct):
    """Rows, pages, radix cache, adapters and tiers in a snapshot."""

    pool: dict[str, Any]
    radix: dict[str, Any] | None
    rows: int
    free_rows: list[int]
    pages_width: int
    outputs_width: int
    deferred_frees: list[DeferredFreeImage]
    deferred_pages: list[tuple[int, bytes]]
    rewrites: list[tuple[int, int, bytes]]
    pending: list[tuple[int, int, int]]
    weights_version: int
    adapters: dict[str, Any] | None = None
    tiers: dict[str, Any] | UnsetType = UNSET
    hybrid: dict[str, Any] | UnsetType = UNSET
    spare: bytes | UnsetType = UNSET  # int32 by row: pages kept for its next positions


class Memory(DeviceMemory, Component):
    """Rows and pages of one engine, with the adapters of the rows and the tiers below the device."""

    PART = MemoryPart
    EMPTY_AT_REST = ("rewrites", "rows_taken", "pending")

    def __init__(self, config: SchedConfig, in_flight: deque[InFlight]) -> None:
        super().__init__(config, in_flight)
        beside = config.base_beside_loras is True
        self.adapters = Adapters(config.max_loras, base_counts=not beside) if config.max_loras else NoAdapters()
        self.rewrites: list[Rewrite] = []
        self.rows_taken: list[RowTaken] = []
        self.tiers = tiers_of(config, self)
        self._takes: tuple[Callable[[int, Request], None], ...] = ()  # hooks of resources that belong to a row
        self._releases: tuple[Callable[[int], None], ...] = ()
        self._voids: tuple[Callable[[], None], ...] = ()

    def serve(
        self,
        takes: tuple[Callable[[int, Request], None], ...],
        releases: tuple[Callable[[int], None], ...],
        voids: tuple[Callable[[], None], ...],
    ) -> None:
        """Set the hooks of resources: called when a row is taken, when it is free, and when the device is void."""
        self._takes, self._releases, self._voids = takes, releases, voids

    # ------------------------------------------------------------------------------------------------------ available

    def returning_pages(self) -> int:
        """Return the pages that become available once everything in flight is delivered. An underestimate."""
        deferred = sum(pages.size for _, pages in self.deferred.pages)
        deferred_frees = [deferred for deferred in self.deferred.rows if deferred.row not in self.deferred.lent]
        deferred_rows = sum(
            self._freed_by(deferred.computed, deferred.protected_pages, deferred.handle) for deferred in deferred_frees
        )
        ending = 0
        for batch in self.in_flight:
            for request in batch.ending_requests():
                ending += self._freed_by(request.computed, request.protected_pages, request.handle)
        return deferred + deferred_rows + ending + self.operations.returning_pages()

    def returning_once_delivered(self, leaving: list[tuple[Request, int]], match: Match) -> Returning:
        """Return what becomes available once everything in flight is delivered and some requests have left.

        Exact for the present radix cache: a page that several requests lock is available once all of them unlock it.

        Args:
            leaving: the requests that leave, each with its computed positions.
            match: the cached prefix of the request that is to start.
        """
        holders = [(deferred.computed, deferred.protected_pages, deferred.handle) for deferred in self.deferred.rows]
        deferred_batches = [deferred.free_after for deferred in self.deferred.rows] + [
            free_after for free_after, _ in self.deferred.pages
        ]
        for batch in self.in_flight:
            for request in batch.ending_requests():
                holders.append((request.computed, request.protected_pages, request.handle))
                deferred_batches.append(batch.plan.batch_id)
        places = len(holders) - len(self.deferred.rows)
        for request, position in leaving:
            holders.append((position, request.protected_pages, request.handle))
        pages = sum(deferred.size for _, deferred in self.deferred.pages)
        pages += sum(-(-computed // self.config.page_size) - protected for computed, protected, _ in holders)

        released: dict[int, int] = {}  # by number of a node: locks that are released
        for _, _, handle in holders:
            while handle is not None:
                released[handle.number] = released.get(handle.number, 0) + 1
                if released[handle.number] == handle.lock_count:
                    pages += len(handle.pages)
                handle = handle.parent
        matched = 0
        node, own = match.node, match.edge_pages
        while node is not None:
            if node.lock_count and released.get(node.number) == node.lock_count:
                matched += own
            node = node.parent
            own = len(node.pages) if node is not None else 0

        last = max(deferred_batches, default=NO_BATCH)
        launches = sum(bool(leaving) or batch.plan.batch_id <= last for batch in self.in_flight)
        launches = min(launches, self.config.overlap_depth + 1)  # more batches are of other microbatches
        return Returning(pages, matched, places, len(holders), launches)

    def _freed_by(self, computed: int, protected_pages: int, handle: RadixNode | None) -> int:
        """Return the pages that the release of a row makes available: its own, and the pages that only it locks."""
        return -(-computed // self.config.page_size) - protected_pages + pages_only_held_by(handle)

    # ------------------------------------------------------------------------------------------------- take and extend

    def take_row(self, request: Request, match: Match | None, step: Step) -> int:
        """Give the request a row whose leading pages are the matched ones, locked. Returns the row."""
        row = self._row_taken(request)
        if match is not None:
            if self.tiers.present:
                self.tiers.used(match)
            handle = request.handle = self.radix.hold(match)
            request.protected_pages = match.pages
            if handle is not None and match.pages:
                pages = self.radix.pages_of(handle)
                self.table.reserve(match.pages, 0)  # storage may have more than any request here has computed
                self.table.pages[row, : match.pages] = pages
                self.rewrites.append(Rewrite(row, 0, pages))
        request.computed = request.protected_pages * self.config.page_size
        if self.hybrid.present:
            self.hybrid.take_row(row, request.protected_pages, step)
        return row

    def reach(self, request: Request, stop: int, step: Step) -> None:
        """Allocate the pages for the positions of a request up to `stop`."""
        page_size = self.config.page_size
        first, last = -(-request.computed // page_size), -(-stop // page_size)
        self.table.reserve(last, 0)
        if last > first:
            pages = self.alloc(last - first, "admission", step)
            self.table.pages[request.row, first:last] = pages
            self.rewrites.append(Rewrite(request.row, first, pages))
            if self.hybrid.present:
                self.hybrid.open(pages, step)

    def open_pages(self, rows: Int32s, index: Int32s, step: Step) -> PageDeltas:
        """Allocate one more page for each of these rows, at these indices of their page tables. int32 [n] both."""
        pages = self.alloc(rows.size, "decode", step)
        self.table.write_pages(rows, index, pages)
        self.hybrid.open(pages, step)
        return PageDeltas(pages, NO_ROWS, rows, index)

    def changes(self, deltas: PageDeltas, rows: list[int] | None = None) -> tuple[tuple[RowTaken, ...], PageDeltas]:
        """Return what changed since the last plan: rows taken, and all changes of page tables, `deltas` last.

        Args:
            rows: those of the plan, where other rows are on another stream: their changes wait for a plan of theirs.
        """
        if self.rewrites:
            rewrites = self.rewrites if rows is None else [one for one in self.rewrites if one.row in rows]
            self.rewrites = [] if rows is None else [one for one in self.rewrites if one.row not in rows]
            if rewrites:
                deltas = _merged(rewrites, deltas)
        taken: tuple[RowTaken, ...] = ()
        if self.rows_taken:
            taken = tuple(self.rows_taken)
            self.rows_taken = []
        return taken, deltas

    # ---------------------------------------------------------------------------------------------------------- release

    def leave(self, request: Request, step: Step, *, publish: bool, known: int | None = None) -> None:
        """Take a request off its row. If work in flight still uses the row, it is freed later, as a DeferredFree."""
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
        if free_after == NO_BATCH and row not in self.deferred.lent:
            self.release(deferred, step)
        else:
            self.deferred.rows.append(deferred)

    def release_deferred(self, step: Step) -> bool:
        """Free the rows and pages for which no batch in flight is left. Returns whether any were freed."""
        flying = [batch.plan.batch_id for batch in self.in_flight]
        done = [
            deferred
            for deferred in self.deferred.rows
            if deferred.free_after not in flying and deferred.row not in self.deferred.lent
        ]
        for deferred in done:
            self.deferred.rows.remove(deferred)
            self.release(deferred, step)
        pages_before = len(self.deferred.pages)
        for free_after, pages in self.deferred.pages:
            if free_after not in flying:
                self.pool.free(pages)
        self.deferred.pages = [entry for entry in self.deferred.pages if entry[0] in flying]
        return bool(done) or len(self.deferred.pages) < pages_before

    def release(self, deferred: DeferredFree, step: Step) -> None:
        """Free a row that nothing in flight uses. Its pages go to the radix cache or to the pool."""
        page_size = self.config.page_size
        row, kept = deferred.row, deferred.protected_pages
        held = self.table.held_pages(row, deferred.computed)
        pages = self.table.pages[row]
        whole = (deferred.computed if deferred.known is None else deferred.known) // page_size
        published = None
        hybrid = self.hybrid
        if hybrid.present:
            hybrid.unlock_windows(row, held)
        if deferred.publish and self.radix.present and whole > kept and not self.is_stale(deferred.namespace):
            tokens = self.table.first_tokens(row, deferred.tokens, deferred.prompt_tokens, whole * page_size)
            inserted = self.radix.insert(deferred.namespace, tokens, pages[:whole], behind=deferred.handle)
            already, published = inserted.already, inserted.node
            if already > kept:
                cached = self.radix.pages_of(published)[kept:already]
                hybrid.fill(pages[kept:already], cached)
                self.pool.free(pages[kept:already].copy())
                pages[kept:already] = cached
            kept = whole
        if hybrid.present:
            hybrid.free_states(row, pages[:kept])
        if published is not None and self.tiers.present:
            self.tiers.back_up(published, kept, step)
        if deferred.handle is not None:
            self.unlock_path(deferred.handle, deferred.namespace, step)
        if held > kept:
            self.pool.free(pages[kept:held].copy())
        self.trim(step)
        self.table.spare[row] = 0
        self.table.free_row(row)
        for release in self._releases:
            release(row)

    def unlock_path(self, handle: RadixNode, namespace: str, step: Step) -> None:
        """Unlock a path. KV of replaced weights is evicted as soon as it has no lock."""
        cached = self.radix.evictable_pages
        self.radix.unlock(handle)
        if self.is_stale(namespace) and self.radix.evictable_pages > cached:
            self._evict(self.radix.evictable_pages - cached, "weights", step)

    # -------------------------------------------------------------------------------------- to and from other engines

    def _row_taken(self, request: Request) -> int:
        """Take a row for the request, and note it for the next plan. Returns the row."""
        row = self.table.take_row(request)
        taken = RowTaken(row, request.request_id, request.epoch, request.sampling, grammar=request.grammar)
        if request.extras is not None:
            taken = with_extras(taken, request.extras)
        if self.adapters.present:
            taken = self.adapters.described(taken, request.adapter)
        self.rows_taken.append(taken)
        for take in self._takes:
            take(row, request)
        return row

    def adopt_row(
        self, request: Request, handle: RadixNode | None, pages: Int32s, computed: int, batch_id: BatchId, step: Step
    ) -> int:
        """Give the request a row with KV that was received. Returns the row.

        Its first `computed` positions are the path of `handle` and `pages`. The request owns both from now on.
        `batch_id`: the next batch.
        """
        row = self._row_taken(request)
        if handle is not None:
            request.handle = handle
            request.protected_pages = handle.stop
            pages = np.concatenate((self.radix.pages_of(handle), pages))
        self.table.reserve(pages.size, 0)
        self.table.pages[row, : pages.size] = pages
        self.rewrites.append(Rewrite(row, 0, pages))
        request.computed = computed
        self.hybrid.adopt_row(row, request, batch_id, step)
        return row

    def lend(self, row: int, request_id: RequestId) -> None:
        """Keep all pages of a row until the transfer that reads them has ended."""
        self.deferred.lent[row] = Lent(request_id, [])

    def end_lending(self, request_id: RequestId, pages: Int32s, step: Step) -> None:
        """End a transfer: free `pages`, and the pages that a row which it read has replaced meanwhile."""
        self.hybrid.received(request_id)
        if pages.size:
            self.pool.free(pages)
        for row in [row for row, lent in self.deferred.lent.items() if lent.request_id == request_id]:
            for given_up in self.deferred.lent.pop(row).pages:
                self._free_behind(row, given_up)
            in_flight = self.in_flight[0].plan.batch_id if self.in_flight else None
            for deferred in [one for one in self.deferred.rows if one.row == row]:
                if in_flight is None or deferred.free_after < in_flight:
                    self.deferred.rows.remove(deferred)
                    self.release(deferred, step)

    def void(self, step: Step) -> None:
        """Free everything: the memory of the device is lost, with all KV and all batches in flight."""
        for deferred in self.deferred.rows:
            self.release(deferred, step)
        self.deferred.rows = []
        for _, pages in self.deferred.pages:
            self.pool.free(pages)
        self.deferred.pages = []
        self.pending = []
        self.hybrid.void()
        for void in self._voids:
            void()
        self.pool.free(self.radix.reset())

    # ------------------------------------------------------------------------------------------------------------ share

    def publish(self, request: Request, computed: int, step: Step, writer: BatchId | None = None) -> bool:
        """Share the KV of a prompt: insert its whole pages, and use the pages that the tree already has.

        The KV is complete, unless `writer` names the batch in flight that computes it. Then only batches behind it may
        read the KV, which is true of every later launch, and the KV is void if that batch fails.

        Returns: whether pages of its own came free at once, because the tree has them already.
        """
        radix, row = self.radix, request.row
        pages = computed // self.config.page_size
        if not radix.present or pages <= request.protected_pages or self.is_stale(request.namespace):
            return False
        own = self.table.pages[row, :pages]
        tokens = request.tokens[: 4 * pages * self.config.page_size]
        if writer is not None and self.hybrid.present:
            known = self.path_of(radix.match(request.namespace, tokens, pages))
            if not self.hybrid.may_share(own[request.protected_pages : known.size], known[request.protected_pages :]):
                return False  # it is published once it is computed
        keeps = self.config.keeps_duplicates or row in self.deferred.lent
        if keeps and radix.match(request.namespace, tokens, pages).pages > request.protected_pages:
            return False  # its own pages stay in use, so both copies would be kept; it is published when it leaves
        inserted = radix.insert(request.namespace, tokens, own, behind=request.handle)
        node, already, freed = inserted.node, inserted.already, False
        if already > request.protected_pages:
            twice = slice(request.protected_pages, already)
            duplicates = own[twice].copy()
            own[twice] = radix.pages_of(node)[twice]
            self.hybrid.replaced(row, duplicates, own[twice], request.protected_pages)
            self.rewrites.append(Rewrite(row, request.protected_pages, own[twice].copy()))
            freed = self._free_behind(row, duplicates)
        assert request.handle is not None  # a row with a radix cache locks a path, if only a root
        radix.move_down(request.handle, node)
        if writer is not None and already < pages:
            self.pending += [Pending(batch_id, node, already) for batch_id in self._writers(request)]
        request.handle = node
        request.protected_pages = pages
        self.hybrid.published(row, pages)
        if writer is not None:
            self.hybrid.share(row, own, already)
        self.trim(step)
        return freed

    def _writers(self, request: Request) -> list[BatchId]:
        """Return the batches in flight that compute KV of a request.

        Every chunk counts, also one whose pages were cached already: if its batch fails, the KV of the chunks behind it
        is not valid either. In a hybrid model each chunk begins with the state that the chunk before it leaves.
        """
        return [batch.plan.batch_id for batch in self.in_flight if batch.names(request.row)]

    def computed(self, batch_id: BatchId) -> None:
        """Mark the KV of a collected batch as computed."""
        self.pending = [pending for pending in self.pending if pending.batch_id != batch_id]

    def invalidate_pending(self, batch_id: BatchId) -> list[int]:
        """Hide KV that a failed batch should have computed from matches. Returns the numbers of the hidden nodes."""
        invalidated: list[int] = []
        for pending in self.pending:
            if pending.batch_id == batch_id:
                invalidated += [node.number for node in self.radix.invalidate(pending.node, pending.pages)]
        self.computed(batch_id)
        self.deferred.withhold(nodes=invalidated)
        return invalidated

    def empty_cache(self, reason: Literal["flush", "release", "weights"], step: Step) -> None:
        """Evict all pages without a lock from the radix cache."""
        if self.radix.evictable_pages:
            self._evict(self.radix.evictable_pages, reason, step)
        if reason != "release":
            self.tiers.empty()

    def change_weights(self, version: int, step: Step) -> None:
        """Change the version of the weights, and evict the KV of older weights now, or once its last lock is released.

        Nothing is in flight. Locked KV of older weights was used before everything that is cached later, so once
        unlocked it is the first to be evicted. Evicting as many pages as an unlock makes evictable takes exactly those.
        """
        self.weights_version = version
        self.empty_cache("weights", step)
        self.radix.epoch += 1  # equal tokens have other matches now

    def evict(self, pages: int, step: Step) -> Int32s:
        """Evict from the radix cache to make room, see `RadixCache.evict`. A tier below may copy the evicted pages."""
        return self.tiers.evict(pages, step)

    def _evict(self, pages: int, reason: Literal["flush", "release", "weights"], step: Step) -> None:
        evicted = self.radix.evict(pages, by_age=True)
        self.tiers.forget(evicted)
        self.pool.free(evicted)
        step.decided.append(PagesEvicted(step.time_us, pages, reason, self.radix.evicted_of))

    def _free_behind(self, row: int, pages: Int32s) -> bool:
        """Free pages of a row once no batch in flight may read them. Returns whether they are free already."""
        if row in self.deferred.lent:
            self.deferred.lent[row].pages.append(pages)
            return False
        deferred_batches = [batch.plan.batch_id for batch in self.in_flight if batch.names(row)]
        if deferred_batches:
            self.deferred.pages.append((deferred_batches[-1], pages))
            return False
        self.pool.free(pages)
        return True

    # ------------------------------------------------------------------------------------- snapshot and invariants

    def part(self) -> MemoryPart:
        """Return the state for a snapshot."""
        table, deferred = self.table, self.deferred
        return MemoryPart(
            pool=self.pool.dump(),
            radix=self.radix.dump(),
            rows=len(table.holders),
            free_rows=list(table.free_rows),
            pages_width=table.pages.shape[1],
            outputs_width=table.outputs.shape[1],
            deferred_frees=deferred.row_images(table, self.in_flight),
            deferred_pages=deferred.page_images(),
            rewrites=[(rewrite.row, rewrite.first, rewrite.pages.tobytes()) for rewrite in self.rewrites],
            pending=[(pending.batch_id, pending.node.number, pending.pages) for pending in self.pending],
            weights_version=self.weights_version,
            adapters=self.adapters.dump(),
            tiers=self.tiers.dump() or UNSET,
            hybrid=self.hybrid.dump() or UNSET,
            spare=table.spare.tobytes() if self.config.keeps_draft_pages else UNSET,
        )

    def load(self, part: MemoryPart, restored: Restored) -> None:
        """Take over the state that `part` returned. Adds the nodes of the radix cache to `restored`."""
        self.pool = PagePool.load(part.pool)
        self.radix = radix_cache_of(part.radix)
        restored.nodes.update((node.number, node) for node in self.radix.walk())
        self.adapters = adapters_of(part.adapters)
        self.table = RequestTable(self.config.rows_max, self.config.page_size)
        self.table.resize(part.rows, part.pages_width, part.outputs_width)
        self.table.free_rows = part.free_rows
        if part.spare is not UNSET:
            self.table.spare = np.frombuffer(part.spare, np.int32).copy()
        self.deferred.load(part.deferred_frees, part.deferred_pages, self.table, restored.nodes)
        self.rewrites = [Rewrite(row, first, np.frombuffer(pages, np.int32)) for row, first, pages in part.rewrites]
        self.pending = [Pending(batch_id, restored.nodes[number], pages) for batch_id, number, pages in part.pending]
        self.weights_version = part.weights_version
        if part.tiers is not UNSET:
            self.tiers.load(part.tiers, restored.nodes)
        self.hybrid.load(part.hybrid or {}, self.table)
        self.pool = self.hybrid.pool_of(self.pool)

    def handles(self) -> list[RadixNode]:
        """Return the locks of deferred frees, and of operations on cached pages of the device."""
        handles = [deferred.handle for deferred in self.deferred.rows if deferred.handle is not None]
        moves = self.operations.values()
        return handles + [one.device_handle for one in moves if one.device_handle is not None]

    def owned_pages(self) -> Iterator[tuple[str, Int32s]]:
        """Yield the pages of deferred frees and of loads."""
        table = self.table
        for one in self.deferred.rows:
            held = table.held_pages(one.row, one.computed)
            yield f"deferred free of row {one.row}", table.pages[one.row, one.protected_pages : held]
        for i, (free_after, pages) in enumerate(self.deferred.pages):
            yield f"deferred pages {i} of batch {free_after}", pages
        replaced = [(row, pages) for row, lent in self.deferred.lent.items() for pages in lent.pages]
        for i, (row, pages) in enumerate(replaced):
            yield f"given up by row {row}, number {i}", pages
        for move in self.operations.values():
            if move.kind == "load":
                yield f"load {move.number}", move.device_pages

    def due_times(self) -> Iterator[tuple[int, str]]:
        """Yield the ends of waits for tiers."""
        yield from self.tiers.due_times()

    def check_state(self, facts: Facts) -> None:
        """Check adapters, tiers, and the pools beside full attention; see their checks."""
        self.adapters.check(facts, [deferred.row for deferred in self.deferred.rows])
        self.tiers.check(facts)
        self.hybrid.check(facts)

    def check_at_rest(self) -> None:
        """L9: rows, pages and locks are back. Sessions and moves of tiers may still lock cached pages."""
        cached = self.radix.total_pages + self.operations.loading_pages
        same("L9 free pages and cached pages", self.pool.free_count + cached, self.config.pages)
        same("L9 free rows", len(self.table.free_rows), len(self.table.holders))
        super().check_at_rest()
        self.deferred.check_at_rest()
        if not self.operations.device_busy:
            self.hybrid.check_at_rest()


def pages_only_held_by(handle: RadixNode | None) -> int:
    """Return the number of cached pages that only this handle locks. Unlocking it makes them evictable."""
    pages = 0
    while handle is not None and handle.lock_count == 1:
        pages += len(handle.pages)
        handle = handle.parent
    return pages


def _merged(rewrites: list[Rewrite], opened: PageDeltas) -> PageDeltas:
    """Return rewrites in the order in which they were made, then the pages that decodes open."""
    runs: list[int] = []
    pages: list[Int32s] = []
    for row, first, written in rewrites:
        runs += (row, first, written.size)
        pages.append(written)
    if opened.pages.size:
        pages.append(opened.pages)
    return PageDeltas(
        pages[0] if len(pages) == 1 else np.concatenate(pages),
        np.array(runs, np.int32),
        opened.opened_rows,
        opened.opened_index,
    )
