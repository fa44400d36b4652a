"""Pages of sliding-window layers: each one is the window block of a full page (hybrid.py has the theory)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.checks import all_ids, fail, misowned, same
from lockstep.core.contract.commands import NO_ROWS, Step
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.events import BlocksEvicted, RequestId
from lockstep.core.kv.deferred import DeferredFrees
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.operations import Operations
from lockstep.core.kv.pages import PagePool
from lockstep.core.kv.running_view import EngineView, RunningProjection, RunningView, of_all_microbatches
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.budget import PrefillBudget
from lockstep.core.requests.delivery import step_numbers
from lockstep.core.requests.retraction import members_growing, pages_ahead
from lockstep.core.requests.table import ONE, Int32s, Request, RequestState, RequestTable, RunningBatch

NONE = -1  # no window page
EVICT_AHEAD_SHARE = 256  # evict at least 1/256 of the pool at once, as for full pages


class IncomingWindows(NamedTuple):
    """Window pages of a request without a row, whose KV will be received."""

    first: int  # index of the first page whose block it locks
    shared: int  # cached pages in front of the allocated ones
    pages: Int32s  # full pages from `first` on, whose blocks it locks
    promised: int  # blocks that it opens as it decodes, see `WindowPool.promised`
    last: int  # the most pages it will have

    def image(self) -> tuple[int, int, bytes, int, int]:
        """Return the values as a snapshot stores them."""
        return self.first, self.shared, self.pages.tobytes(), self.promised, self.last


class WindowPool:
    """The window pages of one engine."""

    def __init__(
        self,
        config: SchedConfig,
        settings: HybridMemory,
        table: RequestTable,
        in_flight: deque[InFlight],
        deferred: DeferredFrees,
        operations: Operations,
    ) -> None:
        self.config = config
        self.page_size = config.page_size
        self.behind = settings.window_tokens - 1  # positions before a token that the token reads
        self.row_pages_max = settings.row_pages_max(config.page_size, config.positions_ahead)
        self.depth = config.overlap_depth
        self.steps = config.decode_steps_per_launch
        self.by_one = config.positions_per_decode == 1
        self.behind_prompts = config.overlap_depth * config.positions_per_decode  # positions beyond a prompt in flight
        self.table = table
        self.in_flight = in_flight
        self.deferred = deferred
        self.operations = operations
        self.pool = PagePool(settings.window_pages)
        self.window_of: Int32s = np.full(config.pages, NONE, np.int32)  # by full page
        self.locks: Int32s = np.zeros(config.pages, np.int32)  # by full page: rows that may still read its block
        self.used = np.zeros(config.pages, np.int64)  # by full page: time of the last unlock of its block
        self.clock = 0
        self.evictable = 0  # blocks that are not locked
        self.first: Int32s = np.zeros(config.rows_max, np.int32)  # by row: the first page index it locks
        self.shared: Int32s = np.zeros(config.rows_max, np.int32)  # by row: its protected pages
        self.mapped: list[tuple[Int32s, Int32s]] = []  # full pages and their new blocks, for the next plan
        self.incoming: dict[RequestId, IncomingWindows] = {}  # of transfers, until the request has a row
        self.quarantined: dict[RequestId, Int32s] = {}  # of abandoned transfers: pages whose blocks may be written

    # ---- queries

    @property
    def available(self) -> int:
        """Window pages that can be allocated now: free ones and evictable ones."""
        return self.pool.free_count + self.evictable

    def first_seen(self, pages: Int32s | int) -> Any:
        """Return the first page index that a token right behind `pages` pages reads."""
        return np.maximum(np.asarray(pages, np.int32) * self.page_size - self.behind, 0) // self.page_size

    def usable(self, there: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return for each page of a path whether the whole window in front of its end exists, bool [pages].

        `there`: whether the block of each page exists.
        """
        number = np.arange(there.size, dtype=np.int32)
        lost = np.maximum.accumulate(np.where(there, NONE, number))
        seen: NDArray[np.bool_] = lost < self.first_seen(number + ONE)
        return seen

    def unbroken(self, request: Request, path: Int32s) -> int:
        """Return the leading pages of a path that have all windows which a request behind the whole prompt reads."""
        first = self._first_to_come(request)
        lost = (self.window_of[path[first:]] < 0).nonzero()[0]
        return first + int(lost[0]) if lost.size else path.size

    def locked_by_match(self, path: Int32s) -> int:
        """Return the number of evictable blocks that a request behind this path would lock."""
        tail = path[int(self.first_seen(path.size)) :]
        return int(np.count_nonzero(self.locks[tail] == 0))

    # ---- locks and blocks

    def take_row(self, row: int, path: Int32s) -> None:
        """Lock the windows of a row that starts behind these pages."""
        first = int(self.first_seen(path.size))
        self.first[row], self.shared[row] = first, path.size
        self.lock(path[first:])

    def lock(self, pages: Int32s) -> None:
        """Lock the blocks of these full pages for one reader, until `unlock`. No page occurs twice."""
        self.evictable -= int(np.count_nonzero(self.locks[pages] == 0))
        self.locks[pages] += ONE

    def take(self, count: int, step: Step) -> Int32s:
        """Allocate blocks that belong to no page yet. The caller checks `available`. Returns: int32 [count]"""
        missing = count - self.pool.free_count
        if missing > 0:
            self._evict(max(missing, self.pool.total // EVICT_AHEAD_SHARE), step)
        return self.pool.alloc(count)

    def attach(self, pages: Int32s, blocks: Int32s) -> None:
        """Attach loaded blocks to their cached pages. A block is freed if its page has another one by now."""
        lacks = self.window_of[pages] < 0
        self.pool.free(blocks[~lacks])
        pages, blocks = pages[lacks], blocks[lacks]
        if pages.size:
            self.window_of[pages] = blocks
            self.used[pages] = self.clock + np.arange(pages.size)
            self.clock += pages.size
            self.evictable += int(np.count_nonzero(self.locks[pages] == 0))
            self.mapped.append((pages, blocks))

    def open(self, pages: Int32s, step: Step) -> None:
        """Allocate and lock a block for each full page that a row has opened. The caller checks `available`."""
        blocks = self.take(pages.size, step)
        self.window_of[pages] = blocks
        self.locks[pages] = ONE
        self.mapped.append((pages, blocks))

    def pages_below(self, rows: Int32s, keep: Int32s) -> tuple[Int32s, Int32s, Int32s]:
        """Return the full pages that rows lock below the page indices `keep`, with their rows and indices. int32 [n]"""
        counts = np.maximum(keep - self.first[rows], 0)
        if not counts.any():
            return NO_ROWS, NO_ROWS, NO_ROWS
        of, at = rows.repeat(counts), self.first[rows].repeat(counts) + step_numbers(counts)
        return self.table.pages[of, at], of, at

    def slide(self, rows: Int32s, keep: Int32s) -> None:
        """Unlock the blocks of rows below the page indices `keep`. No batch in flight may read them."""
        pages, of, at = self.pages_below(rows, keep)
        if not pages.size:
            return
        self.first[rows] = np.maximum(self.first[rows], keep)
        self.unlock(pages)
        own = pages[at >= self.shared[of]]
        if own.size:
            self.drop(own)

    def slides_by_growth(
        self, running_batch: RunningBatch, positions: Int32s, busy: list[Int32s]
    ) -> tuple[Int32s, Int32s]:
        """Return the rows of members that open a page next, and the page indices below which each may unlock.

        `busy`: rows of prompts in flight, which may read lower positions than decodes do; they are left out.
        """
        growing = members_growing(positions, np.array(self.page_size - 1, np.int32))
        rows, boundary = (
            running_batch.rows.take(growing),
            (positions.take(growing) - np.int32(self.depth)) // self.page_size,
        )
        for extending in busy:
            idle = ~np.isin(rows, extending)
            rows, boundary = rows[idle], boundary[idle]
        return rows, self.first_seen(np.maximum(boundary, 0))

    def slides(self, running: RunningView) -> tuple[Int32s, Int32s]:
        """Return the rows that may unlock before the next decode, and the page indices below which each may unlock.

        If a launch moves rows by several positions, or by an unknown number, the batches in flight determine the index.
        """
        running_batch = running.running_batch
        if self.by_one:
            return self.slides_by_growth(running_batch, running.positions, extending_rows(running.in_flight))
        stands = np.zeros(self.table.pages.shape[0], np.int32)
        stands[running_batch.rows] = running.positions
        for batch in reversed(tuple(running.in_flight)):
            stands[batch.plan.rows] = batch.starts
        return running_batch.rows, self.first_seen(stands[running_batch.rows] // self.page_size)

    def opening(self, running: RunningView) -> int:
        """Return the pages that the next launch opens, of one decode or of `decode_steps_per_launch` decodes."""
        if self.by_one:
            return members_growing(running.positions, running.page_mask).size
        return pages_ahead(running.running_batch, running.positions, self.page_size, self.steps)

    def unlock(self, pages: Int32s) -> None:
        """Release one lock on the block of a full page for each time that the page is named."""
        np.subtract.at(self.locks, pages, 1)
        self.used[pages] = self.clock + np.arange(pages.size)
        self.clock += pages.size
        free = np.unique(pages[self.locks[pages] == 0])
        self.evictable += int(np.count_nonzero(self.window_of[free] >= 0))

    def hand_over(self, own: Int32s, cached: Int32s, held: NDArray[np.bool_]) -> None:
        """Let a row read the cached pages `cached` instead of its own pages `own`. int32 [n] both.

        A hole of the radix cache is filled with the block of the row. A block that stays with a page of `own` stays
        locked until that page is freed: batches in flight may read it. `held`: pages whose blocks the row locks.
        """
        fills = (self.window_of[cached] < 0) & (self.window_of[own] >= 0)
        if fills.any():
            source, target = own[fills], cached[fills]
            blocks = self.window_of[source]
            self.window_of[target], self.window_of[source] = blocks, NONE
            self.locks[target], self.locks[source] = self.locks[source], 0
            self.used[target] = self.used[source]
            self.mapped.append((target, blocks))
        locks = cached[held & ~fills]
        self.evictable -= int(np.count_nonzero(self.locks[locks] == 0))
        self.locks[locks] += ONE

    def drop(self, pages: Int32s) -> None:
        """Free the blocks of full pages that have no reader."""
        with_one = pages[self.window_of[pages] >= 0]
        if with_one.size:
            self.evictable -= int(np.count_nonzero(self.locks[with_one] == 0))
            self.locks[with_one] = 0
            self.pool.free(self.window_of[with_one])
            self.window_of[with_one] = NONE

    def _evict(self, count: int, step: Step) -> None:
        """Evict the least recently unlocked blocks, which leaves holes."""
        candidates = ((self.window_of >= 0) & (self.locks == 0)).nonzero()[0]
        count = min(count, candidates.size)
        if count < candidates.size:
            candidates = candidates[np.argpartition(self.used[candidates], count - 1)[:count]]
        oldest = candidates[np.argsort(self.used[candidates])]
        self.drop(oldest.astype(np.int32))
        step.decided.append(BlocksEvicted(step.time_us, "window", count))

    # ---- transfers from and to other engines

    def receive(self, request: Request, path: Int32s, pages: Int32s, stop: int, step: Step) -> None:
        """Lock and open the windows of a request whose KV will be received in `pages`, behind the cached `path`.

        `stop`: positions up to which `pages` reach.
        """
        first = self._first_to_come(request)
        tail, given = path[first:], pages[max(first - path.size, 0) :]
        self.evictable -= int(np.count_nonzero(self.locks[tail] == 0))
        self.locks[tail] += ONE
        if given.size:
            self.open(given, step)
        promised, last = self.promised(request, stop, first), -(-request.reach // self.page_size)
        self.incoming[request.request_id] = IncomingWindows(
            first, path.size, np.concatenate((tail, given)), promised, last
        )

    def adopt_row(self, row: int, request_id: RequestId) -> None:
        """Move the locks of a request whose KV was received to its row."""
        self.first[row], self.shared[row] = self.incoming.pop(request_id)[:2]

    def quarantine(self, request_id: RequestId) -> None:
        """Unlock the cached pages of an abandoned transfer. Its own pages may still be written and stay locked."""
        coming = self.incoming.pop(request_id, None)
        if coming is not None:
            cached = max(coming.shared - coming.first, 0)
            self.unlock(coming.pages[:cached])
            self.quarantined[request_id] = coming.pages[cached:]

    def has_room_to_receive(
        self, engine: EngineView, request: Request, path: Int32s, stop: int, reserved: int | None
    ) -> bool:
        """Whether windows are available for a request whose KV will be received, beside running and incoming requests.

        Each of these may open the pages of `reserved` tokens, or, under reserve `full`, all pages it will ever open.
        `reserved`: None if no other request runs.
        """
        first, now = self._first_to_come(request), -(-stop // self.page_size)
        wanted = now - max(first, path.size) + int(np.count_nonzero(self.locks[path[first:]] == 0))
        running = of_all_microbatches(engine)
        next_ones = self.opened_next(running, path)
        if self.config.reserve == "full":  # which also counts the pages of abandoned transfers
            own = now - first + self.promised(request, stop, first)
            return own <= self.unreserved_pages(running) and wanted <= self.available - next_ones
        if reserved is None or wanted > self.available:
            return wanted <= self.available
        running_batch, positions, most = running.running_batch, running.positions, -(-reserved // self.page_size)
        standing = [(now, first, -(-request.reach // self.page_size))]
        standing += [(one.first + one.pages.size, one.first, one.last) for one in self.incoming.values()]
        now_of, first_of, last_of = np.array(standing, np.int32).T
        now_of = np.concatenate((now_of, -(-positions // self.page_size)))
        first_of = np.concatenate((first_of, self.first[running_batch.rows]))
        last_of = np.concatenate((last_of, -(-(running_batch.limits - ONE) // self.page_size)))
        to_open = np.minimum(self.row_pages_max - (now_of - first_of), last_of - now_of)
        return wanted + max(int(np.clip(to_open, 0, most).sum()), next_ones) <= self.available

    def _first_to_come(self, request: Request) -> int:
        """Return the first page index with a window that a request behind its whole prompt reads."""
        return int(self.first_seen(request.prompt_tokens // self.page_size))

    def of_last_window(self, request: Request, start: int, pages: Int32s) -> Int32s:
        """Return the blocks of the pages of a prompt, from page index `start` on, that its first decode may read."""
        return self.window_of[pages[max(self._first_to_come(request) - start, 0) :]]

    # ---- the reserve

    def to_come(self, engine: RunningView, kept: Int32s = NO_ROWS) -> int:
        """Return the window pages that `reserve` leaves to the running batch: at least those of its next decode."""
        running_batch, positions = engine.running_batch, engine.positions
        if not running_batch.size:
            return 0
        next_ones = self.opened_next(engine, kept)
        now, last = -(-positions // self.page_size), -(-(running_batch.limits - ONE) // self.page_size)
        if self.config.reserve == "on_demand":
            return next_ones
        left = (running_batch.limits - positions) * np.where(running_batch.ignores_eos, 1.0, engine.ratio.value)
        most = np.minimum(np.ceil(left / self.page_size).astype(np.int32), last - now)
        return max(next_ones, int(np.clip(self.row_pages_max - (now - self.first[running_batch.rows]), 0, most).sum()))

    def unreserved_pages(self, engine: RunningView) -> int:
        """Return the window pages that no active request locks or may still open: the rest of reserve `full`.

        A page that several requests lock counts for each of them, since each may unlock it at another time.
        """
        running_batch, page_size = engine.running_batch, self.page_size
        now = -(-engine.positions // page_size)
        first = self.first[running_batch.rows]
        most = self.row_pages_max - (now - first)
        until = np.zeros(self.table.pages.shape[0], np.int32)
        for batch in engine.in_flight:  # a decoding row unlocks nothing before its prompt is delivered
            prompts = batch.plan.rows[: batch.plan.extend_rows]
            until[prompts] = batch.plan.stops[: batch.plan.extend_rows] + self.behind_prompts
        most = np.maximum(most, -(-until[running_batch.rows] // page_size) - now)
        left_to_open = np.minimum(most, -(-(running_batch.limits - ONE) // page_size) - now)
        charged = int((now - first).sum() + np.maximum(left_to_open, 0).sum())
        ranges = [self.table.pages[row, i:j] for row, i, j in zip(running_batch.rows, first, now, strict=True)]
        for request in engine.requests.values():
            if request.row >= 0 and not request.decodes:
                start, stop = int(self.first[request.row]), -(-request.computed // page_size)
                charged += stop - start
                if request.state is RequestState.RUNNING:
                    charged += self.promised(request, request.computed, start)
                ranges.append(self.table.pages[request.row, start:stop])
        for coming in self.incoming.values():
            charged += coming.pages.size + coming.promised
            ranges.append(coming.pages)
        held = np.unique(np.concatenate((NO_ROWS, *ranges))).size
        locked = self.pool.total - self.available
        return self.pool.total - charged - (locked - held)

    def left_for_newcomers(self, engine: RunningView) -> int:
        """Free window pages left after reserving what running requests will need."""
        if self.config.reserve == "full":
            return min(self.unreserved_pages(engine), self.available)
        return self.available - self.to_come(engine)

    def promised(self, request: Request, stop: int, first: int) -> int:
        """Return the pages that a request still opens as it decodes. Its prompt is computed up to position `stop`.

        `first`: index of the first page that it locks.
        """
        if self.config.reserve == "on_demand":
            return 0
        now = -(-stop // self.page_size)
        most = self.row_pages_max - (now - first)
        most = max(most, -(-(stop + self.behind_prompts) // self.page_size) - now)
        return max(min(most, -(-request.reach // self.page_size) - now), 0)

    def room(
        self, engine: RunningView, request: Request, start: int, take: int, path: Int32s, budget: PrefillBudget
    ) -> int:
        """Return how many of `take` tokens a request may compute from position `start` on, beside the reserve.

        `path`: the cached pages in front of the request, if it has no row yet.
        """
        if self.config.reserve == "full":
            tail = path.size - int(self.first_seen(path.size))
            next_ones = self.opened_next(engine, path)
            left = min(self.unreserved_pages(engine) - tail, self.available - next_ones - self.locked_by_match(path))
        else:
            newcomers = sum(
                self.promised(one, one.computed, int(self.first[one.row]))
                for one in budget.newcomers
                if one is not request and one.row >= 0
            )
            left = self.available - self.to_come(engine, path) - newcomers - self.locked_by_match(path)
        stop = start + take
        first = int(self.first[request.row]) if request.row >= 0 else int(self.first_seen(path.size))
        if stop == len(request.tokens) // 4:
            own = self.promised(request, stop, first)
            if -(-stop // self.page_size) - -(-start // self.page_size) + own <= left:
                return take
            take -= 1  # without its last token, the end of the prompt, fewer pages are needed
        return min(take, max(left, 0) * self.page_size + -start % self.page_size)

    def opened_next(self, engine: RunningView, kept: Int32s = NO_ROWS) -> int:
        """Return the pages that the next decode of each microbatch opens beyond those that it unlocks."""
        apart = engine.apart if isinstance(engine, RunningProjection) else ()
        return sum([max(self.lacking(one, kept) + self.available, 0) for one in apart or (engine,)])

    def lacking(self, engine: RunningView, kept: Int32s = NO_ROWS) -> int:
        """Return the pages that the next decode of the running batch opens, less those that it unlocks and those that
        are available.

        `kept`: full pages with blocks that are about to be locked, so that unlocking them frees nothing.
        """
        opening = self.opening(engine)
        if not opening:
            return -self.available
        pages, counts = np.unique(self.pages_below(*self.slides(engine))[0], return_counts=True)
        freed = (self.locks[pages] == counts) & ~np.isin(pages, kept)
        return opening - int(np.count_nonzero(freed)) - self.available

    def once_delivered(self, leaving: list[tuple[int, int]], opening: int) -> WindowPool:
        """Return a copy of the pool, for `room`, as it is once all in flight is delivered and some rows are freed.

        Args:
            leaving: the rows that are freed, each with its computed positions.
            opening: pages that the other rows open by then.
        """
        later = copy(self)
        later.locks, later.first = self.locks.copy(), self.first.copy()
        for batch in self.in_flight:
            for i, request in batch.alive():
                row, keep = request.row, int(self.first_seen(int(batch.plan.stops[i]) // self.page_size))
                if i < batch.plan.extend_rows and keep > later.first[row]:
                    later.locks[self.table.pages[row, later.first[row] : keep]] -= ONE
                    later.first[row] = keep
        for row, computed in leaving:
            later.locks[self.table.pages[row, later.first[row] : -(-computed // self.page_size)]] -= ONE
        for _, pages in self.deferred.pages:
            later.locks[pages] = 0
        came = (self.window_of >= 0) & (self.locks > 0) & (later.locks == 0)
        later.evictable += int(np.count_nonzero(came)) - opening
        return later

    def returning(self) -> int:
        """Return the pages that become available once all in flight is delivered and all operations between tiers have
        ended. An underestimate."""
        found, locks = 0, self.locks
        if self.operations:
            moving = self.operations.window_locks(self.config.pages)
            locks = self.locks - moving
            found = int(np.count_nonzero((moving > 0) & (locks == 0))) + self.operations.windows_loading
        until = {  # by row: the page index up to which it unlocks
            row: -(-computed // self.page_size) for row, computed in self.deferred.leaving()
        }
        for batch in self.in_flight:  # the last of several chunks of a prompt determines the index
            for i, request in batch.alive():
                if i < batch.plan.extend_rows:
                    until[request.row] = int(self.first_seen(int(batch.plan.stops[i]) // self.page_size))
        for batch in self.in_flight:
            until |= {one.row: -(-one.computed // self.page_size) for one in batch.ending_requests()}
        found += sum(self._locked_alone(row, stop, locks) for row, stop in until.items())
        return found + sum(int(np.count_nonzero(self.window_of[pages] >= 0)) for _, pages in self.deferred.pages)

    def _locked_alone(self, row: int, stop: int, locks: Int32s) -> int:
        return int(np.count_nonzero(locks[self.table.pages[row, self.first[row] : stop]] == 1))

    # ---- snapshot and invariants

    def dump(self) -> dict[str, Any]:
        """Return the state in builtins."""
        return {
            "pool": self.pool.dump(),
            "clock": self.clock,
            "evictable": self.evictable,
            "mapped": [(pages.tobytes(), blocks.tobytes()) for pages, blocks in self.mapped],
            **({"coming": [(one, *of.image()) for one, of in self.incoming.items()]} if self.incoming else {}),
            **(
                {"quarantined": [(one, pages.tobytes()) for one, pages in self.quarantined.items()]}
                if self.quarantined
                else {}
            ),
            **{name: getattr(self, name).tobytes() for name in COLUMNS},
        }

    def load(self, state: dict[str, Any], table: RequestTable) -> None:
        """Take over the state that `dump` returned, with the restored request table."""
        self.table = table
        self.pool, self.clock, self.evictable = PagePool.load(state["pool"]), state["clock"], state["evictable"]
        self.mapped = [(np.frombuffer(a, np.int32), np.frombuffer(b, np.int32)) for a, b in state["mapped"]]
        self.incoming = {
            one: IncomingWindows(first, shared, np.frombuffer(pages, np.int32), *more)
            for one, first, shared, pages, *more in state.get("coming", ())
        }
        self.quarantined = {one: np.frombuffer(pages, np.int32) for one, pages in state.get("quarantined", ())}
        for name in COLUMNS:
            setattr(self, name, np.frombuffer(state[name], getattr(self, name).dtype).copy())

    def check(self, facts: Facts, holders: list[tuple[str, int, int]]) -> None:
        """S1, S5, S9, S24: a window page is free or belongs to one full page in use; what may be read is locked.

        Args:
            holders: name, row and computed positions of each row that is not free.
        """
        page_size = self.page_size
        with_block = (self.window_of >= 0).nonzero()[0]
        moves = list(self.operations.values())
        loads = [moved for one in moves if one.kind == "load" for moved in one.blocks if moved.kind == "window"]
        taken = self.window_of[with_block]
        ids = np.sort(np.concatenate((self.pool.free_ids(), taken, *(one.device for one in loads))))
        if ids.tobytes() != all_ids(self.pool.total):
            blocks = {f"page {page}": [int(self.window_of[page])] for page in with_block.tolist()}
            misowned("S1 window pages", self.pool.total, {"free": self.pool.free_ids().tolist(), **blocks})
        locks = np.zeros(facts.config.pages, np.int32)
        for name, row, computed in holders:
            first = int(self.first[row])
            held = self.table.pages[row, first : -(-computed // page_size)]
            np.add.at(locks, held, 1)
            if (lost := held[self.window_of[held] < 0]).size:
                fail(f"S5: {name} may read the window of pages {lost.tolist()}, which was freed")
            starts = [int(batch.starts[batch.plan.rows == row][0]) for batch in self.in_flight if batch.names(row)]
            reads = max(min([*starts[:1], computed]) - self.behind, 0) // page_size
            if first > min(reads, int(self.first_seen(computed // page_size))):
                fail(f"S5: {name} freed windows below page {first}; it has computed {computed}, {starts} are in flight")
        for request_id, coming in self.incoming.items():
            np.add.at(locks, coming.pages, 1)
            if (lost := coming.pages[self.window_of[coming.pages] < 0]).size:
                fail(f"S5: r{request_id} is to read the window of pages {lost.tolist()}, which was freed")
        for pages in self.quarantined.values():
            np.add.at(locks, pages, 1)
        moving = self.operations.window_locks(locks.size)
        for one in moves:
            if (lost := one.windows_locked[self.window_of[one.windows_locked] < 0]).size:
                fail(f"S5: {one.kind} {one.number} needs the window of pages {lost.tolist()}, which was freed")
        held_by_moves = int(np.count_nonzero((moving > 0) & (locks == 0)))
        locks += moving
        deferred = np.concatenate([NO_ROWS, *(pages for _, pages in self.deferred.pages)])
        locks[deferred] = self.locks[deferred]
        if locks.tobytes() != self.locks.tobytes():
            wrong = (locks != self.locks).nonzero()[0].tolist()
            fail(
                f"S9: locks of windows of pages {wrong} are {self.locks[wrong].tolist()}, held {locks[wrong].tolist()}"
            )
        unlocked = (self.window_of >= 0) & (self.locks == 0)
        if (stray := (unlocked & ~facts.is_cached).nonzero()[0]).size:
            fail(f"S1: pages {stray.tolist()} have windows, but are neither held nor cached")
        coming_back = int(np.count_nonzero(self.window_of[deferred] >= 0))
        coming_back += held_by_moves + sum(one.index.size for one in loads)
        if facts.config.reserve == "full" and (left := self.unreserved_pages(facts.running) + coming_back) < 0:
            fail(f"S24: window pages held and reserved exceed the pool by {-left}")
        same("S9 evictable window pages", self.evictable, int(np.count_nonzero(unlocked)))


COLUMNS = ("window_of", "locks", "used", "first", "shared")  # arrays of a snapshot


def extending_rows(in_flight: Iterable[InFlight]) -> list[Int32s]:
    """Return the rows of prompts in flight, by batch."""
    return [batch.plan.rows[: batch.plan.extend_rows] for batch in in_flight if batch.plan.extend_rows]
