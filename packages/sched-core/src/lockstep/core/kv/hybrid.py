"""Memory of models whose layers differ: sliding windows and recurrent state, beside the pages of full attention.

    full attention     a page for every page of positions           `Memory`: pool, radix cache, rows
    sliding window     a window page for pages that a window reads  `WindowPool`
    linear attention   one slot of state for each row, and          `StatePool`
                       checkpoints at the ends of cached pages

**One owner, and its blocks.** Rows, deferred frees and the radix cache own full pages, the pages of full attention. A
window block and a state block (a checkpoint) belong to exactly one full page: `window_of[page]`, `checkpoint_of[page]`.
They are shared, split, moved and freed with that page, and the radix cache does not handle them. A page without its
block is a *hole*: its tokens are cached, but no match may end where the block would have to be read.

**A match** ends at the last page boundary from which layers of every kind can continue: the window blocks in front of
the boundary exist, and so does the state at it. The rest of the prefix is computed again, which fills the holes.

**Windows.** A row locks the window blocks that its next tokens may read, from page index `first[row]` on. Blocks below
are unlocked once no batch in flight can read them: those of a prompt when its batch is collected, those of a decode
when the row opens its next page. An unlocked block of a cached page is evictable; an unlocked block of a private page
is free at once. Only blocks below the window of the last page boundary are unlocked, so that another request can
continue from an ended one. A decoding row locks at most `row_pages_max` blocks.

**Several positions at once** (drafts, forced tokens, several decodes in a launch). A row locks windows from the lowest
position at which its oldest batch in flight may start to the highest at which the newest one may stop. With a result,
pages beyond the new end are freed with their windows (`speculation.settle`). The states behind the newest token and
behind each draft are written to slots of the row (`behind_drafts`), so no state has to be restored: the next pass
starts from the slot behind the last accepted token. A row owns a checkpoint of a position that it may not pass only
once a result shows that it has passed it (`verified`).

**Sharing before it is computed.** With `same_step_sharing` the pages of a prompt are cached while its batch is in
flight. So are its checkpoints, locked by the batch (`unwritten`). What was cached before is not changed until the batch
is collected. A chunk begins with the state that the chunk before it leaves, so if a chunk fails, everything that later
chunks shared is hidden as well.

**States.** A row writes its own slots only. It starts from zeros or from a copy of a checkpoint. The checkpoint is
locked until the batch with the copy is collected, and is never written again: copy-on-write. A batch that passes a
multiple of `checkpoint_tokens` leaves a copy of the state at that position. The row owns it until its page is
published; then the page owns it. Of its decodes a row keeps the newest checkpoint only.

**Eviction.** Each pool evicts by itself, least recently unlocked blocks first, and of one row the beginning before the
end. An evicted full page takes its blocks along.

**Transfers** (disaggregation.py). A decode engine reserves the windows of the last page boundary of the prompt and the
slots of the future row (`incoming`); the row takes them over. The received state becomes a checkpoint at the end of its
page, see `StatePool.adopt_row`. Blocks that may still be written after the request has
ended are in quarantine with their full pages. A prefill engine sends the blocks of its row, which stay locked.

**Admission** checks all pools before anything is taken (`lacks_state`, `WindowPool.room`).
Source: SGLang's hybrid radix cache (tombstones, ratios of the pools, checkpoints every 256 tokens); docs/hybrid.md.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.core.contract.checks import same
from lockstep.core.contract.commands import NO_ROWS, BatchPlan, HybridChanges, HybridTransfer, Step
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.events import BatchId, RequestId
from lockstep.core.kv.deferred import DeferredFrees
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.operations import Kind, Operations
from lockstep.core.kv.pages import PagePool
from lockstep.core.kv.radix import Match, RadixCache
from lockstep.core.kv.running_view import EngineView, RunningProjection, RunningView, by_microbatch, of_all_microbatches
from lockstep.core.kv.state_pool import StatePool
from lockstep.core.kv.window_pool import WindowPool
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.budget import PrefillBudget
from lockstep.core.requests.microbatches import ENDLESS
from lockstep.core.requests.table import ONE, Int32s, Request, RequestTable, RunningBatch

NONE = -1  # no window page, no slot


class FullPages(PagePool):
    """The pool of full pages. A page that is freed frees its blocks."""

    __slots__ = ("hybrid",)

    def __init__(self, pool: PagePool, hybrid: Hybrid) -> None:
        super().__init__(pool.total)
        self._stack, self.free_count = pool._stack, pool.free_count
        self.hybrid = hybrid

    def free(self, pages: NDArray[np.int32]) -> None:
        """Free pages and their blocks, see `PagePool.free`."""
        self.hybrid.drop(pages)
        super().free(pages)


class Hybrid:
    """Window and state blocks of one engine, for a model with layers without full attention."""

    present: ClassVar[bool] = True  # False: all layers have full attention

    def __init__(
        self,
        config: SchedConfig,
        settings: HybridMemory,
        table: RequestTable,
        in_flight: deque[InFlight],
        deferred: DeferredFrees,
        operations: Operations,
    ) -> None:
        self.page_size = config.page_size
        self.by_one = config.positions_per_decode == 1  # each launch moves a decoding request by one position
        self.window = (
            WindowPool(config, settings, table, in_flight, deferred, operations) if settings.window_tokens else None
        )
        self.states = StatePool(config, settings, table, in_flight) if settings.state_slots else None
        self.table = table
        self.in_flight = in_flight
        self.deferred = deferred
        self.operations = operations

    def pool_of(self, pool: PagePool) -> PagePool:
        """Return the pool of full pages, in which a page that is freed frees its blocks."""
        return FullPages(pool, self)

    # ------------------------------------------------------------------------------------------------------- admission

    # mechanism: sliding-windows (decided)
    def continued(self, radix: RadixCache, match: Match, tokens: bytes) -> Match:
        """Return the longest part of a match from which layers of every kind can continue."""
        if match.node is None:
            return match
        path = radix.pages_of(match.node)[: match.pages]
        usable = np.ones(path.size, np.bool_)
        if self.window is not None:
            usable = self.window.usable(self.window.window_of[path] >= 0)
        if self.states is not None:
            usable &= self.states.checkpoint_of[path] >= 0
        ends = usable.nonzero()[0]
        pages = int(ends[-1]) + 1 if ends.size else 0
        return match if pages == match.pages else radix.match(match.namespace, tokens, pages)

    def full(self, running: RunningView) -> bool:
        """Whether no waiting request could start: no state slot, or no window page beside the reserve, is available."""
        return self.lacks_state(NO_ROWS) or (self.window is not None and self.window.left_for_newcomers(running) <= 0)

    @property
    def rows_available(self) -> int:
        """Rows for which state slots are available; ENDLESS without recurrent state."""
        return ENDLESS if self.states is None else self.states.available(NO_ROWS) // self.states.by_row

    def all_below(self, share: float) -> bool:
        """Whether less than this share of each pool is in use."""
        pools = []
        if self.window is not None:
            pools.append((self.window.available, self.window.pool.total))
        if self.states is not None:
            pools.append((self.states.available(NO_ROWS), self.states.pool.total))
        return all(total - available < share * total for available, total in pools)

    def pages_to_receive_behind(self, path: Int32s, request: Request) -> int:
        """Return how many cached pages of a prompt need not be received, if another engine computes it.

        A row that begins behind the whole prompt reads windows of its last pages only, and its state is received. Holes
        before these pages may stay.
        """
        return path.size if self.window is None else self.window.unbroken(request, path)

    def has_room_to_receive(
        self, engine: EngineView, request: Request, path: Int32s, stop: int, reserved: int | None
    ) -> bool:
        """Whether blocks are available for a request whose KV will be received, up to one decode at position `stop`.

        Args:
            path: cached pages that need not be received.
            reserved: tokens that are reserved for each running or incoming request; None if there is none.
        """
        if self.lacks_state(NO_ROWS):
            return False
        return self.window is None or self.window.has_room_to_receive(engine, request, path, stop, reserved)

    def lacks_state(self, path: Int32s) -> bool:
        """Whether no state slot is available for a request that starts behind these cached pages."""
        return self.states is not None and self.states.available(path) < self.states.by_row

    def window_room(
        self, engine: EngineView, request: Request, start: int, take: int, path: Int32s, budget: PrefillBudget
    ) -> int:
        """Return how many of `take` tokens, from position `start` on, sliding windows have pages for, see
        `WindowPool.room`."""
        if self.window is None:
            return take
        return self.window.room(of_all_microbatches(engine), request, start, take, path, budget)

    def would_lack_state(self, engine: EngineView, path: Int32s, leaving: list[int]) -> bool:
        """Whether no state slot would be available behind the cached pages `path`, once all in flight is delivered and
        some decoding requests have left. `leaving`: their indices into all decoding requests.
        """
        states = self.states
        assert states is not None
        gone, _ = self._gone(engine, leaving)
        rows = len(self.table.holders) - len(self.table.free_rows) - len(gone)
        taken = int(path.size > 0 and states.checkpoint_of[path[-1]] >= 0)
        taken += sum(len(slots) for slots in states.incoming.values())
        taken += self.operations.slots_moving
        return states.pool.total - rows * states.by_row - taken < states.by_row

    def would_have_room(
        self,
        engine: EngineView,
        request: Request,
        start: int,
        take: int,
        path: Int32s,
        budget: PrefillBudget,
        leaving: list[int],
        then: Int32s,
    ) -> int:
        """Return what `window_room` would return once all in flight is delivered and some decoding requests have left.

        Args:
            leaving: indices of these into all decoding requests.
            then: positions of the other decoding requests by that time.
        """
        window = self.window
        assert window is not None
        gone, ending = self._gone(engine, leaving)
        running_batch, positions = engine.all_running
        stay = np.ones(running_batch.size, np.bool_)
        stay[leaving] = False
        staying, now = running_batch.only(stay.nonzero()[0]), positions[stay]
        opening = 0
        if engine.config.reserve == "on_demand":  # other policies reserve these pages
            held = -(-now // self.page_size)
            most = np.maximum(window.row_pages_max - (held - window.first[staying.rows]), 0)
            opening = int(np.minimum(-(-then // self.page_size) - held, most).sum())
        ended = {one.request_id for one in ending}
        others = {number: one for number, one in engine.requests.items() if one.row >= 0 and number not in ended}
        projection = RunningProjection(staying, now, engine.page_mask, others, (), engine.ratio)
        later = window.once_delivered(gone, opening)
        return later.room(by_microbatch(engine, projection), request, start, take, path, budget)

    def _gone(self, engine: EngineView, leaving: list[int]) -> tuple[list[tuple[int, int]], list[Request]]:
        """Return the rows that are free once all in flight is delivered and these decoding requests have left, each
        with its computed positions; and the requests that end with a batch in flight.
        """
        running_batch, positions = engine.all_running
        ending = [request for batch in self.in_flight for request in batch.ending_requests()]
        gone = self.deferred.leaving() + [(one.row, one.computed) for one in ending]
        gone += [(running_batch.requests[i].row, int(positions[i])) for i in leaving]
        return gone, ending

    def pages_for_drafts(self, pages: int) -> int:
        """Return how many of `pages` available full pages decodes may open, given the available window pages."""
        return pages if self.window is None else min(pages, self.window.available)

    @property
    def window_tokens_available(self) -> int:
        """Positions for which window pages are available now."""
        assert self.window is not None
        return self.window.available * self.page_size

    def decode_needs(self, engine: EngineView) -> tuple[int, int, int]:
        """Return three counts of window pages: needed by the next decode of the running batch, available now, and
        available later without a decision."""
        if self.window is None:
            return 0, 0, 0
        available = self.window.available
        return self.window.lacking(engine) + available, available, self.window.returning()

    def decode_lacks(self, engine: EngineView) -> int:
        """Return the window pages that the next decode of the running batch needs beyond the available ones."""
        return self.window.lacking(engine) if self.window is not None else 0

    def short_for_decode(self, engine: EngineView) -> bool:
        """Unlock windows that the running batch no longer reads. Returns whether its next decode lacks a page."""
        if self.window is None:
            return False
        self.window.slide(*self.window.slides(engine))
        return self.window.opening(engine) > self.window.available

    # ------------------------------------------------------------------------------------------- tiers below the device

    def blocks_of(self, kind: Kind, pages: Int32s) -> Int32s:
        """Return the window page or the checkpoint of each full page; NONE where a page has none. int32 [pages]"""
        if kind == "window":
            assert self.window is not None
            return self.window.window_of[pages]
        assert self.states is not None
        return self.states.checkpoint_of[pages]

    def needed_from(self, kind: Kind, blocks: Int32s) -> int:
        """Return the first page index with a block that a request needs to continue from the end of a path."""
        if kind == "window":
            return self.seen_from(kind, blocks.size)
        there = (blocks >= 0).nonzero()[0]
        return int(there[-1]) if there.size else blocks.size

    def seen_from(self, kind: Kind, pages: int) -> int:
        """Return the first page index with a block that a request needs to continue behind `pages` pages.

        The blocks from there to the last page are needed.
        """
        if kind == "window" and self.window is not None:
            return int(self.window.first_seen(pages))
        return pages - 1

    def seen(self, kind: Kind) -> int:
        """Return the most pages in front of an end whose blocks a request needs to continue from that end."""
        return -(-self.window.behind // self.window.page_size) if kind == "window" and self.window is not None else 1

    def can_continue(self, kind: Kind, there: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return for each page of a path whether layers of this kind can continue behind it, bool [pages].

        `there`: whether the block of each page exists.
        """
        return self.window.usable(there) if kind == "window" and self.window is not None else there

    def has_room(self, kind: Kind, coming: int, there: int, engine: EngineView) -> bool:
        """Whether `coming` blocks can be loaded and `there` blocks locked meanwhile, with room left for waiting
        requests."""
        if kind == "window" and self.window is not None:
            return self.window.left_for_newcomers(of_all_microbatches(engine)) > coming + there
        assert self.states is not None
        return self.states.available(NO_ROWS) >= self.states.by_row + coming + there

    def room_for(self, kind: Kind, count: int, step: Step) -> Int32s:
        """Allocate window pages or slots for a load; the load owns them. The caller checks that they are available."""
        if kind == "window" and self.window is not None:
            return self.window.take(count, step)
        assert self.states is not None
        return np.array([self.states.alloc_for_row(step) for _ in range(count)], np.int32)

    def lock_moving(self, window_pages_of: Int32s, slots: Int32s) -> None:
        """Lock the windows of these full pages, and these checkpoints, for an operation between tiers."""
        if self.window is not None:
            self.window.lock(window_pages_of)
        if self.states is not None:
            self.states.locks[slots] += 1

    def unlock_moved(self, window_pages_of: Int32s, slots: Int32s) -> None:
        """Unlock what `lock_moving` locked: the operation has ended."""
        if self.window is not None and window_pages_of.size:
            self.window.unlock(window_pages_of)
        if self.states is not None:
            self.states.locks[slots] -= 1

    def arrived(self, kind: Kind, pages: Int32s, blocks: Int32s) -> None:
        """Attach loaded blocks to these cached pages."""
        if kind == "window" and self.window is not None:
            self.window.attach(pages, blocks)
            return
        assert self.states is not None
        for page, slot in zip(pages.tolist(), blocks.tolist(), strict=True):
            self.states.attach(page, slot)

    def lost(self, kind: Kind, blocks: Int32s) -> None:
        """Free blocks that were not loaded, or that no match could find."""
        pools = {"window": self.window, "state": self.states}
        pool = pools[kind]
        assert pool is not None
        pool.pool.free(blocks)

    # ---------------------------------------------------------------------------------------------------------- memory

    def take_row(self, row: int, cached: int, step: Step) -> None:
        """Lock and allocate the blocks of a row that starts behind its first `cached` pages."""
        path = self.table.pages[row, :cached].copy()
        if self.window is not None:
            self.window.take_row(row, path)
        if self.states is not None:
            self.states.take_row(row, path, step)

    def receive(self, request: Request, path: Int32s, pages: Int32s, stop: int, step: Step) -> None:
        """Allocate the blocks of a request whose KV will be received in `pages`, up to and with its first decode."""
        if self.window is not None:
            self.window.receive(request, path, pages, stop, step)
        if self.states is not None:
            self.states.receive(request.request_id, step)

    def to_receive(self, request: Request, pages: Int32s) -> HybridTransfer | None:
        """Return the blocks that a transfer writes. `pages`: the full pages that it writes, the last of the prompt.

        None: the model has full attention only.
        """
        windows, slot = NO_ROWS, NONE
        if self.window is not None:
            first = -(-request.prompt_tokens // self.page_size) - pages.size
            windows = self.window.of_last_window(request, first, pages)
        if self.states is not None:
            slot = self.states.incoming[request.request_id][0]
        return HybridTransfer(windows, slot)

    def to_send(self, request: Request, start: int, pages: Int32s, *, last: bool) -> HybridTransfer | None:
        """Return the blocks to send with the part of a prompt that begins at position `start` and lies in `pages`.

        These are the windows that its first decode may read, and with the last part the state. None: no blocks.
        """
        windows, slot = NO_ROWS, NONE
        if self.window is not None:
            windows = self.window.of_last_window(request, start // self.page_size, pages)
        if self.states is not None and last:
            slot = int(self.states.slot_of[request.row])
        return HybridTransfer(windows, slot) if windows.size or slot != NONE else None

    def adopt_row(self, row: int, request: Request, batch_id: BatchId, step: Step) -> None:
        """Move the blocks of a request whose KV was received to its row. `batch_id`: the next batch."""
        if self.window is not None:
            self.window.adopt_row(row, request.request_id)
        if self.states is not None:
            self.states.adopt_row(row, request.request_id, request.prompt_tokens, batch_id, step)

    def quarantine(self, request_id: RequestId) -> None:
        """Keep the blocks of an abandoned transfer, which may still be written, until the transfer has ended."""
        if self.window is not None:
            self.window.quarantine(request_id)

    def received(self, request_id: RequestId) -> None:
        """End a transfer: free its slots. The caller frees its full pages, and the windows with them."""
        if self.window is not None:
            self.window.quarantined.pop(request_id, None)
        if self.states is not None:
            self.states.received(request_id)

    def open(self, pages: Int32s, step: Step) -> None:
        """Allocate and lock the window blocks of full pages that a row has opened."""
        if self.window is not None and pages.size:
            self.window.open(pages, step)

    def replaced(self, row: int, own: Int32s, cached: Int32s, start: int) -> None:
        """Let a row read the pages `cached` of the radix cache from page index `start` on, instead of its `own`."""
        if self.window is not None:
            held = np.arange(start, start + own.size) >= self.window.first[row]
            self.window.hand_over(own, cached, held)

    def published(self, row: int, pages: int) -> None:
        """Note that the first `pages` of a row are cached."""
        if self.window is not None:
            self.window.shared[row] = pages

    def may_share(self, own: Int32s, cached: Int32s) -> bool:
        """Whether a row may read the pages `cached` instead of its `own`, which a batch in flight still writes.

        False where that would fill a hole: if the batch failed, the cached page would have a window that was never
        computed.
        """
        window = self.window
        return window is None or not ((window.window_of[cached] < 0) & (window.window_of[own] >= 0)).any()

    def share(self, row: int, pages: Int32s, already: int) -> None:
        """Share the checkpoints of the first pages of a row, which are cached while batches in flight compute them.

        `already`: how many of these pages were cached before.
        """
        if self.states is not None:
            self.states.share(row, pages, already)

    def verified(self, batch: InFlight) -> None:
        """Take in the positions of rows from the result of a verifying batch."""
        if self.states is not None:
            self.states.verified(batch)

    def failed(self, batch: InFlight) -> None:
        """Discard the checkpoints that a failed batch should have written."""
        if self.states is not None:
            self.states.failed(batch.plan.batch_id, batch.plan.rows.tolist())

    def collected(self, batch: InFlight) -> None:
        """Publish the checkpoints of a delivered batch, and unlock the windows that only this batch had to read."""
        plan = batch.plan
        rows, stops = plan.rows[: plan.extend_rows], plan.stops[: plan.extend_rows]
        holders = list(zip(batch.requests, rows.tolist(), strict=False))
        if self.states is not None:
            self.states.written(plan.batch_id)
            for _, row in holders:
                self.states.copied(row)
            for request, row in holders:
                if request.row == row and row not in batch.dead:
                    self.states.publish(row, self.table.pages[row, : request.protected_pages], plan.batch_id)
        if self.window is not None:
            here = np.array([request.row == row and row not in batch.dead for request, row in holders], np.bool_)
            self.window.slide(rows[here], self.window.first_seen(stops[here] // self.page_size))

    def unlock_windows(self, row: int, pages: int) -> None:
        """Unlock the windows of a row of `pages` pages, which nothing in flight uses and which are freed next."""
        if self.window is not None:
            self.window.unlock(self.table.pages[row, self.window.first[row] : pages])

    def free_states(self, row: int, cached: Int32s) -> None:
        """Free the slots of a row. `cached`: its first pages, which own its checkpoints from now on."""
        if self.states is not None:
            self.states.publish(row, cached)
            self.states.free_row(row)

    def fill(self, own: Int32s, cached: Int32s) -> None:
        """Fill holes of the pages `cached` with the windows of the equal pages `own` of a row that is freed."""
        if self.window is not None:
            self.window.hand_over(own, cached, np.zeros(own.size, np.bool_))

    def drop(self, pages: Int32s) -> None:
        """Free the blocks of full pages that are freed."""
        if self.window is not None:
            self.window.drop(pages)
        if self.states is not None:
            self.states.drop(pages)

    def void(self) -> None:
        """Drop what the next plan would have carried, and all pending writes: the memory of the device is lost.

        No row waits for its first state: it is taken in the step that plans its first batch.
        """
        if self.window is not None:
            self.window.mapped = []
        if self.states is not None:
            for batch_id in list(self.states.unwritten.values()):
                self.states.written(batch_id)

    # ----------------------------------------------------------------------------------------------------------- plans

    def completed(self, plan: BatchPlan, step: Step) -> BatchPlan:
        """Return the plan with the block changes before it, and the checkpoints that it writes."""
        oldest = self.in_flight[0].plan.batch_id if self.in_flight else plan.batch_id
        return self.completed_in_run(plan, oldest, step)

    def completed_in_run(self, plan: BatchPlan, oldest: BatchId, step: Step) -> BatchPlan:
        """Return what `completed` returns. `oldest`: the first batch that is not collected."""
        changes = self.changes(plan, oldest, step)
        return plan if changes is None else replace(plan, hybrid=changes)

    def changes(self, plan: BatchPlan, oldest: BatchId, step: Step) -> HybridChanges | None:
        """Return the block changes that this plan carries to the device; None: no change."""
        pages = blocks = rows = slots = sources = NO_ROWS
        index: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        if self.window is not None and self.window.mapped:
            pages = np.concatenate([pages for pages, _ in self.window.mapped])
            blocks = np.concatenate([blocks for _, blocks in self.window.mapped])
            self.window.mapped = []
        if self.states is not None:
            if self.states.starts:
                rows, slots, sources = np.array(self.states.starts, np.int32).T.copy()
                self.states.starts = []
            index, positions, kept = self.states.leave_checkpoints(plan, oldest, step)
        if not pages.size and not rows.size and not index:
            return None
        checkpoints = [np.array(column, np.int32) for column in (index, positions, kept)]
        return HybridChanges(pages, blocks, rows, slots, sources, *checkpoints)

    def open_in_run(self, running_batch: RunningBatch, positions: Int32s, pages: Int32s, step: Step) -> None:
        """Unlock windows that the members do not read any more, and open `pages`, as a decode outside a run does."""
        if self.window is not None and pages.size:
            self.window.slide(*self.window.slides_by_growth(running_batch, positions, []))
            self.window.open(pages, step)

    def decodes_without_evicting(self, positions: Int32s, growing: int) -> bool:
        """Whether the free lists have all window pages and slots that the next decode takes."""
        if self.window is not None and growing > self.window.pool.free_count:
            return False
        states = self.states
        if states is None:
            return True
        passing = int(np.count_nonzero((positions + ONE) % states.every == 0))
        return passing + len(states.owed) <= states.pool.free_count

    # -------------------------------------------------------------------------------------------------------- snapshot

    def dump(self) -> dict[str, Any]:
        """Return the state in builtins."""
        image: dict[str, Any] = {}
        if self.window is not None:
            image["window"] = self.window.dump()
        if self.states is not None:
            image["states"] = self.states.dump()
        return image

    def load(self, image: dict[str, Any], table: RequestTable) -> None:
        """Take over the state that `dump` returned, with the restored request table."""
        self.table = table
        if self.window is not None:
            self.window.load(image["window"], table)
        if self.states is not None:
            self.states.load(image["states"], table)

    # ------------------------------------------------------------------------------------------------------ invariants

    def check(self, facts: Facts) -> None:
        """S1, S3, S5, S9, S24 of the pools beside full attention."""
        holders = [
            (request.name, request.row, computed)
            for request, computed in zip(facts.holders, facts.computed, strict=True)
        ]
        holders += [(f"the deferred free of row {one.row}", one.row, one.computed) for one in self.deferred.rows]
        if self.window is not None:
            self.window.check(facts, holders)
        if self.states is not None:
            self.states.check(facts, holders, self.operations)

    def check_at_rest(self) -> None:
        """L9: no window page is locked, and every state slot is free or a checkpoint."""
        if self.window is not None:
            same("L9 locked window pages", int(self.window.locks.sum()), 0)
        if self.states is not None:
            states = self.states
            same("L9 slots of state", states.pool.free_count + int((states.page_of >= 0).sum()), states.pool.total)


class FullAttention(Hybrid):
    """Memory of a model whose layers all have full attention: there are no blocks, and nothing to do."""

    present = False

    def __init__(self, table: RequestTable) -> None:
        self.by_one = True  # no window limits a stretch of decodes
        self.window = None
        self.states = None
        self.table = table

    def pool_of(self, pool: PagePool) -> PagePool:
        """Return the pool itself: its pages have no blocks."""
        return pool

    def continued(self, radix: RadixCache, match: Match, tokens: bytes) -> Match:
        """Return the match itself: a request can continue from any page boundary."""
        return match

    def take_row(self, row: int, cached: int, step: Step) -> None:
        """Do nothing: a row has no blocks."""

    def to_receive(self, request: Request, pages: Int32s) -> HybridTransfer | None:
        """Return None: a transfer writes full pages only."""
        return None

    def collected(self, batch: InFlight) -> None:
        """Do nothing: a row has no blocks."""

    def load(self, image: dict[str, Any], table: RequestTable) -> None:
        """Take over the restored request table."""
        self.table = table

    def check(self, facts: Facts) -> None:
        """Check nothing: there are no blocks."""

    def completed_in_run(self, plan: BatchPlan, oldest: BatchId, step: Step) -> BatchPlan:
        """Return the plan itself."""
        return plan

    def completed(self, plan: BatchPlan, step: Step) -> BatchPlan:
        """Return the plan itself."""
        return plan


def hybrid_of(
    config: SchedConfig,
    table: RequestTable,
    in_flight: deque[InFlight],
    deferred: DeferredFrees,
    operations: Operations,
) -> Hybrid:
    """Return the memory for window and state blocks that the settings name."""
    if config.hybrid is UNSET:
        return FullAttention(table)
    return Hybrid(config, config.hybrid, table, in_flight, deferred, operations)
