"""Memory of models whose layers differ: sliding windows and recurrent state, beside the pages of full attention.

    full attention     a page for every page of positions           `Memory`: pool, radix cache, rows
    sliding window     a page for those that a window still sees    `WindowPool`
    linear attention   one slot of state for each row, and          `StatePool`
                       checkpoints at the ends of cached pages

**One owner, and its companions.** Rows, leases and the radix cache own pages of full attention, as ever. A window page
and a checkpoint belong to exactly one such page: `window_of[page]`, `checkpoint_of[page]`. So they are
shared, split, moved and given back with it, and the radix cache does not deal with them. What a page has lost, or never
had, is a *tombstone*: its tokens are known, but no match may end where it would have to be read.

**A match** ends at the last page boundary from which all kinds can go on: the window's pages in front of it are there,
and so is the state right behind it. The rest of the prefix is computed again, and heals the tombstones on its way.

**Windows.** A row holds (`locks`) the window pages that its next tokens may see: from `first[row]` on. What falls out
is let go of once no batch in flight can read it: of a prompt when its batch is collected, of a decode when it opens its
next page. What the radix cache owns stays, evictable; what is the row's own is free at once. Let go of is everything
below the window of the last page boundary behind, never more, so that an ended request can be gone on from. A row that
decodes holds `row_pages_max` at most.

**Several positions at once** (drafts, forced tokens, several decodes in a launch). A row holds windows from where the
oldest batch in flight of it starts at the least, to where the newest stops at the most: with a result pages behind that
come back with their windows (`speculation.settle`). Its states behind the newest token and each draft go to slots of
its own (`behind_drafts`), so that nothing has to be taken back: the next pass begins with the one behind the last token
that was right. A checkpoint of a position that it may not pass is its only if the result says that it did (`verified`).

**Sharing before it is computed.** With `same_step_sharing` a prompt's pages are cached while its batch is in flight,
and so are its checkpoints, locked by the batch (`unwritten`). What was cached before stays as it is until then. A chunk
begins with what the one before it leaves, so where one fails, what those behind it shared is hidden as well.

**States.** A row writes its own slots only. It starts from zeros or as a copy of a checkpoint, which is locked until
the batch with the copy is collected, and is never written again: copy-on-write. A batch that passes a multiple of
`checkpoint_tokens` leaves a copy of the state there behind; it is the row's until its page is published, and the page's
from then on. A row keeps the newest of its decodes only.

**Eviction.** Each pool by itself, what was let go of longest ago first, and of one row the beginning before the end.
Full pages that are evicted take their companions along.

**Another engine** (disaggregation.py). A decode engine gives a writer windows from the page boundary behind the prompt
back, and the slots of the row to come (`coming`); the row takes them over. What the writer may still write when no
request waits any more is in quarantine with the full pages. A prefill engine sends what its row holds, which is pinned.

**Admission** checks all pools at once (`lacks_state`, `WindowPool.room`); nothing is taken before all suffice.
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
from lockstep.core.requests.table import ONE, Int32s, Request, RequestTable, RunningBatch

NONE = -1  # no window page, no slot


class FullPages(PagePool):
    """The pool of full pages: one that comes back gives its companions back."""

    __slots__ = ("hybrid",)

    def __init__(self, pool: PagePool, hybrid: Hybrid) -> None:
        super().__init__(pool.total)
        self._stack, self.free_count = pool._stack, pool.free_count
        self.hybrid = hybrid

    def free(self, pages: NDArray[np.int32]) -> None:
        """As `PagePool.free`."""
        self.hybrid.drop(pages)
        super().free(pages)


class Hybrid:
    """What a model has beside full attention, of one engine. Built by its `Memory`."""

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
        """The pool of full pages, such that a page that comes back gives its blocks back."""
        return FullPages(pool, self)

    # ------------------------------------------------------------------------------------------------------- admission

    def continued(self, radix: RadixCache, match: Match, tokens: bytes) -> Match:
        """As much of a match as all kinds can go on from."""
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
        """Whether no new request could start: no slot, or no window page beside what others will need."""
        return self.lacks_state(NO_ROWS) or (self.window is not None and self.window.left_for_newcomers(running) <= 0)

    def all_below(self, share: float) -> bool:
        """Whether less than this share of each pool is in use."""
        pools = []
        if self.window is not None:
            pools.append((self.window.available, self.window.pool.total))
        if self.states is not None:
            pools.append((self.states.available(NO_ROWS), self.states.pool.total))
        return all(total - available < share * total for available, total in pools)

    def pages_to_receive_behind(self, path: Int32s, request: Request) -> int:
        """How many of a prompt's cached pages need not come, if it is computed elsewhere.

        A row that begins behind the whole prompt reads windows of its last pages only, and its state comes along: what
        is a tombstone before that may stay one.
        """
        return path.size if self.window is None else self.window.unbroken(request, path)

    def has_room_to_receive(
        self, engine: EngineView, request: Request, path: Int32s, stop: int, reserved: int | None
    ) -> bool:
        """Whether a request whose KV will come may be given what it needs beside full pages to decode once, at `stop`.

        `path`: cached pages that need not come. `reserved`: tokens left to each that runs or will; None if none does.
        """
        if self.lacks_state(NO_ROWS):
            return False
        return self.window is None or self.window.has_room_to_receive(engine, request, path, stop, reserved)

    def lacks_state(self, path: Int32s) -> bool:
        """Whether there is no slot for a newcomer behind these cached pages."""
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
        if states is None:
            return False
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
        if window is None:
            return take
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
        """Pages that decodes may open, of so many full ones that can be had."""
        return pages if self.window is None else min(pages, self.window.available)

    @property
    def window_tokens_available(self) -> int:
        """Positions that window pages can be had for now."""
        return self.window.available * self.page_size if self.window is not None else 0

    def decode_needs(self, engine: EngineView) -> tuple[int, int, int]:
        """Window pages that the next decode of the running batch needs, those available, and those that are coming
        back."""
        if self.window is None:
            return 0, 0, 0
        available = self.window.available
        return self.window.lacking(engine) + available, available, self.window.returning()

    def decode_lacks(self, engine: EngineView) -> int:
        """Pages without which the cohort does not decode, beyond those that can be had."""
        return self.window.lacking(engine) if self.window is not None else 0

    def short_for_decode(self, engine: EngineView) -> bool:
        """Let go of what the cohort does not see any more; then, whether its next decode lacks a page."""
        if self.window is None:
            return False
        self.window.slide(*self.window.slides(engine))
        return self.window.opening(engine) > self.window.available

    # ------------------------------------------------------------------------------------------- tiers below the device

    def blocks_of(self, kind: Kind, pages: Int32s) -> Int32s:
        """By full page its window page, or checkpoint; NONE where it has none."""
        if kind == "window":
            assert self.window is not None
            return self.window.window_of[pages]
        assert self.states is not None
        return self.states.checkpoint_of[pages]

    def written(self, kind: Kind, pages: Int32s) -> Int32s:
        """The same of pages that are computed; NONE where a batch in flight is still to write the checkpoint."""
        blocks = self.blocks_of(kind, pages)
        if kind == "state" and self.states is not None and self.states.unwritten:
            blocks[np.isin(blocks, list(self.states.unwritten))] = NONE
        return blocks

    def needed_from(self, kind: Kind, blocks: Int32s) -> int:
        """Of a path with these blocks, the first page with a block that is needed to go on from its end."""
        if kind == "window":
            return self.seen_from(kind, blocks.size)
        there = (blocks >= 0).nonzero()[0]
        return int(there[-1]) if there.size else blocks.size

    def seen_from(self, kind: Kind, pages: int) -> int:
        """The first page with a block that is needed to go on behind so many pages; all up to the last are needed."""
        if kind == "window" and self.window is not None:
            return int(self.window.first_seen(pages))
        return pages - 1

    def seen(self, kind: Kind) -> int:
        """The number of pages up to an end for which blocks are needed to go on from it, at most."""
        return -(-self.window.behind // self.window.page_size) if kind == "window" and self.window is not None else 1

    def goes_on(self, kind: Kind, there: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """By page of a path: whether this kind can go on behind it, where each page's companion is `there` or not."""
        return self.window.usable(there) if kind == "window" and self.window is not None else there

    def has_room(self, kind: Kind, coming: int, there: int, engine: EngineView) -> bool:
        """Whether so many can be loaded, beside so many that are held meanwhile, and leave room for waiting
        requests."""
        if kind == "window" and self.window is not None:
            return self.window.left_for_newcomers(of_all_microbatches(engine)) > coming + there
        assert self.states is not None
        return self.states.available(NO_ROWS) >= self.states.by_row + coming + there

    def room_for(self, kind: Kind, count: int, step: Step) -> Int32s:
        """Window pages, or slots, for a load: without an owner until it has arrived. The caller saw that there are."""
        if kind == "window" and self.window is not None:
            return self.window.take(count, step)
        assert self.states is not None
        return np.array([self.states.alloc_for_row(step) for _ in range(count)], np.int32)

    def lock_moving(self, window_pages_of: Int32s, slots: Int32s) -> None:
        """A move between tiers counts on the windows of these full pages, and on these checkpoints."""
        if self.window is not None:
            self.window.lock(window_pages_of)
        if self.states is not None:
            self.states.locks[slots] += 1

    def unlock_moved(self, window_pages_of: Int32s, slots: Int32s) -> None:
        """It has ended."""
        if self.window is not None and window_pages_of.size:
            self.window.unlock(window_pages_of)
        if self.states is not None:
            self.states.locks[slots] -= 1

    def arrived(self, kind: Kind, pages: Int32s, blocks: Int32s) -> None:
        """Companions of these cached pages were loaded."""
        if kind == "window" and self.window is not None:
            self.window.attach(pages, blocks)
            return
        assert self.states is not None
        for page, slot in zip(pages.tolist(), blocks.tolist(), strict=True):
            self.states.attach(page, slot)

    def lost(self, kind: Kind, blocks: Int32s) -> None:
        """They were not loaded, or no match could find them."""
        pools = {"window": self.window, "state": self.states}
        pool = pools[kind]
        assert pool is not None
        pool.pool.free(blocks)

    # ---------------------------------------------------------------------------------------------------------- memory

    def take_row(self, row: int, cached: int, step: Step) -> None:
        """A row starts behind its first `cached` pages, which the radix cache has."""
        path = self.table.pages[row, :cached].copy()
        if self.window is not None:
            self.window.take_row(row, path)
        if self.states is not None:
            self.states.take_row(row, path, step)

    def receive(self, request: Request, path: Int32s, pages: Int32s, stop: int, step: Step) -> None:
        """A request whose KV will come is given what it needs beside `pages`, up to and with its first decode."""
        if self.window is not None:
            self.window.receive(request, path, pages, stop, step)
        if self.states is not None:
            self.states.receive(request.request_id, step)

    def to_receive(self, request: Request, pages: Int32s) -> HybridTransfer | None:
        """Where that goes; `pages`: those that will be written, the last of them with the end of the prompt.

        None: the model has nothing beside pages.
        """
        windows, slot = NO_ROWS, NONE
        if self.window is not None:
            first = -(-request.prompt_tokens // self.page_size) - pages.size
            windows = self.window.of_last_window(request, first, pages)
        if self.states is not None:
            slot = self.states.incoming[request.request_id][0]
        return HybridTransfer(windows, slot)

    def to_send(self, request: Request, start: int, pages: Int32s, *, last: bool) -> HybridTransfer | None:
        """What goes with a part of a prompt, from position `start` on, in these pages: windows that its first decode
        may see, and with the last part the state. None: nothing.
        """
        windows, slot = NO_ROWS, NONE
        if self.window is not None:
            windows = self.window.of_last_window(request, start // self.page_size, pages)
        if self.states is not None and last:
            slot = int(self.states.slot_of[request.row])
        return HybridTransfer(windows, slot) if windows.size or slot != NONE else None

    def adopt_row(self, row: int, request_id: RequestId) -> None:
        """A request whose KV has come takes this row."""
        if self.window is not None:
            self.window.adopt_row(row, request_id)
        if self.states is not None:
            self.states.adopt_row(row, request_id)

    def quarantine(self, request_id: RequestId) -> None:
        """No request waits for what a transfer brings any more: it may still be written, until the transfer is over."""
        if self.window is not None:
            self.window.quarantine(request_id)

    def received(self, request_id: RequestId) -> None:
        """A transfer is over: what it was given is not written any more. The caller frees the full pages, windows with
        them."""
        if self.window is not None:
            self.window.quarantined.pop(request_id, None)
        if self.states is not None:
            self.states.received(request_id)

    def open(self, pages: Int32s, step: Step) -> None:
        """These full pages are a row's from now on."""
        if self.window is not None and pages.size:
            self.window.open(pages, step)

    def replaced(self, row: int, mine: Int32s, theirs: Int32s, start: int) -> None:
        """From page index `start` on, a row reads `theirs`, which were cached already, instead of what was `mine`."""
        if self.window is not None:
            held = np.arange(start, start + mine.size) >= self.window.first[row]
            self.window.hand_over(mine, theirs, held)

    def published(self, row: int, pages: int) -> None:
        """A row's first `pages` are cached."""
        if self.window is not None:
            self.window.shared[row] = pages

    def may_share(self, mine: Int32s, theirs: Int32s) -> bool:
        """Whether a row may read `theirs`, which are cached, instead of `mine`, which a batch in flight still writes.

        Not where that would heal a tombstone: were the batch to fail, what is cached would have the window of nothing.
        """
        window = self.window
        return window is None or not ((window.window_of[theirs] < 0) & (window.window_of[mine] >= 0)).any()

    def share(self, row: int, pages: Int32s, already: int) -> None:
        """A row's first pages are cached, `already` of them before, while batches in flight still compute them."""
        if self.states is not None:
            self.states.share(row, pages, already)

    def verified(self, batch: InFlight) -> None:
        """The result of a verifying batch says where its rows stand."""
        if self.states is not None:
            self.states.verified(batch)

    def failed(self, batch: InFlight) -> None:
        """A batch failed: what it was to leave behind is not there."""
        if self.states is not None:
            self.states.failed(batch.plan.batch_id, batch.plan.rows.tolist())

    def collected(self, batch: InFlight) -> None:
        """A batch is delivered and what it computed is published: rows let go of what only it had to read."""
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
        """Nothing in flight uses a row of `held` pages any more, which are freed or published next."""
        if self.window is not None:
            self.window.unlock(self.table.pages[row, self.window.first[row] : pages])

    def free_states(self, row: int, cached: Int32s) -> None:
        """A row is given back, its first pages cached as these."""
        if self.states is not None:
            self.states.publish(row, cached)
            self.states.free_row(row)

    def fill(self, mine: Int32s, theirs: Int32s) -> None:
        """Pages of a row that is given back are in the radix cache already: give those what they have lost."""
        if self.window is not None:
            self.window.hand_over(mine, theirs, np.zeros(mine.size, np.bool_))

    def drop(self, pages: Int32s) -> None:
        """Full pages come back to their pool."""
        if self.window is not None:
            self.window.drop(pages)
        if self.states is not None:
            self.states.drop(pages)

    def void(self) -> None:
        """The device's memory is gone, and what its next batch would have been told."""
        if self.window is not None:
            self.window.mapped = []
        if self.states is not None:
            self.states.starts = []
            for batch_id in list(self.states.unwritten.values()):
                self.states.written(batch_id)

    # ----------------------------------------------------------------------------------------------------------- plans

    def completed(self, plan: BatchPlan, step: Step) -> BatchPlan:
        """The plan with what changes before it, and the checkpoints that it leaves."""
        oldest = self.in_flight[0].plan.batch_id if self.in_flight else plan.batch_id
        return self.completed_in_run(plan, oldest, step)

    def completed_in_run(self, plan: BatchPlan, oldest: BatchId, step: Step) -> BatchPlan:
        """The same, where `oldest` is the first batch that is not collected."""
        changes = self.changes(plan, oldest, step)
        return plan if changes is None else replace(plan, hybrid=changes)

    def changes(self, plan: BatchPlan, oldest: BatchId, step: Step) -> HybridChanges | None:
        """What changes for the device with this plan; None: nothing."""
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
        """As a decode does: let go of what its members do not see any more; `pages` are theirs from now on."""
        if self.window is not None and pages.size:
            self.window.slide(*self.window.slides_by_growth(running_batch, positions, []))
            self.window.open(pages, step)

    def decodes_without_evicting(self, positions: Int32s, growing: int) -> bool:
        """Whether the next decode finds what it opens and leaves behind on the free lists."""
        if self.window is not None and growing > self.window.pool.free_count:
            return False
        states = self.states
        if states is None:
            return True
        return int(np.count_nonzero((positions + ONE) % states.every == 0)) <= states.pool.free_count

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
        holders += [(f"the lease of row {one.row}", one.row, one.computed) for one in self.deferred.rows]
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
    """Memory of a model whose layers all have full attention: neither window pages nor states, and nothing to do."""

    present = False

    def __init__(self, config: SchedConfig, table: RequestTable, in_flight: deque[InFlight]) -> None:
        self.page_size = config.page_size
        self.by_one = True  # of windows, which there are none of
        self.window = None
        self.states = None
        self.table = table
        self.in_flight = in_flight

    def pool_of(self, pool: PagePool) -> PagePool:
        """The pool: its pages have no blocks."""
        return pool

    def continued(self, radix: RadixCache, match: Match, tokens: bytes) -> Match:
        """The match: a request can go on from any page boundary."""
        return match

    def take_row(self, row: int, cached: int, step: Step) -> None:
        """A row has nothing beside its pages."""

    def to_receive(self, request: Request, pages: Int32s) -> HybridTransfer | None:
        """None: pages are all that comes."""
        return None

    def collected(self, batch: InFlight) -> None:
        """Nothing is held beside pages."""

    def load(self, image: dict[str, Any], table: RequestTable) -> None:
        """Take over the restored request table."""
        self.table = table

    def check(self, facts: Facts) -> None:
        """There is nothing beside pages."""

    def completed_in_run(self, plan: BatchPlan, oldest: BatchId, step: Step) -> BatchPlan:
        """The plan as it is."""
        return plan

    def completed(self, plan: BatchPlan, step: Step) -> BatchPlan:
        """The plan as it is."""
        return plan


def hybrid_of(
    config: SchedConfig,
    table: RequestTable,
    in_flight: deque[InFlight],
    deferred: DeferredFrees,
    operations: Operations,
) -> Hybrid:
    """The memory beside full attention that these settings have."""
    if config.hybrid is UNSET:
        return FullAttention(config, table, in_flight)
    return Hybrid(config, config.hybrid, table, in_flight, deferred, operations)
