"""Memory of models whose layers differ: sliding windows and recurrent state, beside the pages of full attention.

    full attention     a page for every page of positions           `Memory`: pool, radix cache, rows
    sliding window     a page for those that a window still sees    `WindowPool`
    linear attention   one slot of state for each row, and          `StatePool`
                       checkpoints at the ends of cached pages

**One owner, and its companions.** Rows, leases and the radix cache own pages of full attention, as ever. A window page
and a checkpoint belong to one such page and to nobody else: `window_of[page]`, `checkpoint_of[page]`. So they are
shared, split, moved and given back with it, and the radix cache knows nothing of them. What a page has lost, or never
had, is a *tombstone*: its tokens are known, but no match may end where it would have to be read.

**A match** ends at the last page boundary from which all kinds can go on: the window's pages in front of it are there,
and so is the state right behind it. The rest of the prefix is computed again, and heals the tombstones on its way.

**Windows.** A row holds (`locks`) the window pages that its next tokens may see: from `first[row]` on. What falls out
is let go of once no batch in flight can read it: of a prompt when its batch is collected, of a decode when it opens its
next page. What the radix cache owns stays, evictable; what is the row's own is free at once. Let go of is everything
below the window of the last page boundary behind, never more, so that whoever ends can be gone on from. A row that
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
back, and the slots of the row to come (`coming`); the row takes them over. What the writer may still write when nobody
waits any more is in quarantine with the full pages. A prefill engine sends what its row holds, which is pinned.

**Admission** asks all pools at once (`lacks_state`, `WindowPool.room`); nothing is taken before all have said yes.
Source: SGLang's hybrid radix cache (tombstones, ratios of the pools, checkpoints every 256 tokens); docs/hybrid.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.core.contract.commands import NO_ROWS, BatchPlan, HybridChanges, HybridTransfer, Step
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.events import BatchId, BlocksEvicted, RequestId
from lockstep.core.kv.block_tiers import Kind
from lockstep.core.kv.pages import PagePool
from lockstep.core.requests.delivery import step_numbers
from lockstep.core.requests.microbatches import Microbatches
from lockstep.core.requests.retraction import members_growing, pages_ahead
from lockstep.core.requests.table import ONE, Int32s, Request, RequestState, RequestTable, RunningBatch

if TYPE_CHECKING:
    from lockstep.core.kv.memory import Memory
    from lockstep.core.kv.radix import Match, RadixCache
    from lockstep.core.requests.batching import InFlight
    from lockstep.core.requests.budget import NewTokenRatio, PrefillBudget

NONE = -1  # no window page, no slot
AS_IT_IS = -2  # the source of a slot to which nothing is done
NEWEST: BatchId = 2**63 - 1  # every batch
NEVER = 2**31 - 1  # pages that nobody has: the place of a checkpoint that no page may get
EVICT_AHEAD_SHARE = 256  # as for full pages: of the pool, at least one such part at once


class Runners(Protocol):
    """Who is active and where each stands: an engine with one running batch as it is, or who else is to be asked of."""

    @property
    def running_batch(self) -> RunningBatch: ...
    @property
    def positions(self) -> Int32s: ...
    @property
    def page_mask(self) -> Int32s: ...
    @property
    def requests(self) -> Mapping[RequestId, Request]: ...
    @property
    def in_flight(self) -> Iterable[InFlight]: ...
    @property
    def ratio(self) -> NewTokenRatio: ...


class Stand(NamedTuple):
    """Who decodes and where each stands, other than an engine has it now: see `everybody`, `Hybrid.would_start`."""

    running_batch: RunningBatch
    positions: Int32s
    page_mask: Int32s
    requests: Mapping[RequestId, Request]
    in_flight: Iterable[InFlight]
    ratio: NewTokenRatio
    apart: tuple[Runners, ...] = ()  # the same by microbatch, where there are several: each decodes in its turn


class EngineView(Runners, Protocol):
    """What hybrid pools read of the engine beside that: its settings, its memory and its microbatches."""

    @property
    def config(self) -> SchedConfig: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def microbatches(self) -> Microbatches: ...
    @property
    def everybody(self) -> tuple[RunningBatch, Int32s]: ...


def everybody(engine: EngineView) -> Runners:
    """Those that decode, of all microbatches where there are several: what is left to one is not promised to others."""
    if not engine.microbatches.several:
        return engine
    running_batch, positions = engine.everybody
    stand = Stand(running_batch, positions, engine.page_mask, engine.requests, engine.in_flight, engine.ratio)
    return _by_microbatch(engine, stand)


def _by_microbatch(engine: EngineView, stand: Stand) -> Stand:
    if not engine.microbatches.several:
        return stand
    number_of = engine.microbatches.members
    numbers = np.array([number_of[one.request_id] for one in stand.running_batch.requests], np.int32)
    members = [(numbers == number).nonzero()[0] for number in np.unique(numbers)]
    parts = [
        stand._replace(running_batch=stand.running_batch.only(some), positions=stand.positions[some])
        for some in members
    ]
    return stand._replace(apart=tuple(parts))


class Coming(NamedTuple):
    """Window pages of a request that has no row yet, since its KV is computed elsewhere."""

    first: int  # page index of the first that it locks
    shared: int  # pages in front of those it was given, which the radix cache has
    pages: Int32s  # full pages from `first` on, whose companions it locks
    promised: int  # companions that it opens as it decodes, as `WindowPool.promised` says
    last: int  # pages it ever has


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


class WindowPool:
    """The pages of sliding layers, each the companion of a full page."""

    def __init__(self, config: SchedConfig, settings: HybridMemory, table: RequestTable) -> None:
        self.config = config
        self.page_size = config.page_size
        self.behind = settings.window_tokens - 1  # positions before a token that it sees
        self.row_pages_max = settings.row_pages_max(config.page_size, config.positions_ahead)
        self.depth = config.overlap_depth
        self.steps = config.decode_steps_per_launch
        self.by_one = config.positions_per_decode == 1
        self.behind_prompts = config.overlap_depth * config.positions_per_decode  # while the batch of one is in flight
        self.table = table
        self.pool = PagePool(settings.window_pages)
        self.window_of: Int32s = np.full(config.pages, NONE, np.int32)  # by full page
        self.locks: Int32s = np.zeros(config.pages, np.int32)  # by full page: rows that may still read its companion
        self.used = np.zeros(config.pages, np.int64)  # by full page: when its companion was last let go of
        self.clock = 0
        self.evictable = 0  # companions that nobody locks
        self.first: Int32s = np.zeros(config.rows_max, np.int32)  # by row: the first page index it locks
        self.shared: Int32s = np.zeros(config.rows_max, np.int32)  # by row: its protected pages
        self.mapped: list[tuple[Int32s, Int32s]] = []  # full pages and their new companions, for the next plan
        self.coming: dict[RequestId, Coming] = {}  # of transfers, until the request has a row
        self.quarantined: dict[RequestId, Int32s] = {}  # of transfers given up: pages whose companions may be written

    # ---- what there is

    @property
    def available(self) -> int:
        """Window pages that can be had now."""
        return self.pool.free_count + self.evictable

    def first_seen(self, pages: Int32s | int) -> Any:
        """The first page index that a token right behind so many pages sees."""
        return np.maximum(np.asarray(pages, np.int32) * self.page_size - self.behind, 0) // self.page_size

    def usable(self, there: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """By page of a path: whether the window in front of its end is there, where each page's companion is or not."""
        number = np.arange(there.size, dtype=np.int32)
        lost = np.maximum.accumulate(np.where(there, NONE, number))
        seen: NDArray[np.bool_] = lost < self.first_seen(number + ONE)
        return seen

    def unbroken(self, request: Request, path: Int32s) -> int:
        """Pages of a path whose windows are there as far as who begins behind the whole prompt reads them."""
        first = self._first_to_come(request)
        lost = (self.window_of[path[first:]] < 0).nonzero()[0]
        return first + int(lost[0]) if lost.size else path.size

    def locked_by_match(self, path: Int32s) -> int:
        """Evictable companions that starting behind a path would lock."""
        tail = path[int(self.first_seen(path.size)) :]
        return int(np.count_nonzero(self.locks[tail] == 0))

    # ---- hold

    def take_row(self, row: int, path: Int32s) -> None:
        """A row starts behind these pages."""
        first = int(self.first_seen(path.size))
        self.first[row], self.shared[row] = first, path.size
        self.lock(path[first:])

    def lock(self, pages: Int32s) -> None:
        """Somebody reads the companions of these full pages, each named once, until `unlock`."""
        self.evictable -= int(np.count_nonzero(self.locks[pages] == 0))
        self.locks[pages] += ONE

    def take(self, count: int, step: Step) -> Int32s:
        """So many companions, of no page yet. The caller saw that there are."""
        missing = count - self.pool.free_count
        if missing > 0:
            self._evict(max(missing, self.pool.total // EVICT_AHEAD_SHARE), step)
        return self.pool.alloc(count)

    def attach(self, pages: Int32s, blocks: Int32s) -> None:
        """These companions were loaded for cached pages: they are theirs, unless a page has one by now."""
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
        """These full pages are a row's from now on: give each its companion. The caller saw that there are so many."""
        blocks = self.take(pages.size, step)
        self.window_of[pages] = blocks
        self.locks[pages] = ONE
        self.mapped.append((pages, blocks))

    def out_of_sight(self, rows: Int32s, keep: Int32s) -> tuple[Int32s, Int32s, Int32s]:
        """What rows hold below the page indices `keep`: full pages, and of each its row and index. int32 [n] all."""
        counts = np.maximum(keep - self.first[rows], 0)
        if not counts.any():
            return NO_ROWS, NO_ROWS, NO_ROWS
        of, at = rows.repeat(counts), self.first[rows].repeat(counts) + step_numbers(counts)
        return self.table.pages[of, at], of, at

    def slide(self, rows: Int32s, keep: Int32s) -> None:
        """Rows see nothing below the page indices `keep` any more, and nor does what is in flight of them."""
        pages, of, at = self.out_of_sight(rows, keep)
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
        """Of a cohort's members that open a page next: their rows, and the page indices below which each is done.

        `busy`: rows of prompts in flight, which may read further back than decodes do; they are left out.
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

    def slides(self, runners: Runners) -> tuple[Int32s, Int32s]:
        """Before the cohort's next decode: rows that may let go, and the page indices below which each is done.

        Where a launch moves rows by several positions, or by how many is open, they go by what is in flight.
        """
        running_batch = runners.running_batch
        if self.by_one:
            return self.slides_by_growth(running_batch, runners.positions, extending_rows(runners.in_flight))
        stands = np.zeros(self.table.pages.shape[0], np.int32)
        stands[running_batch.rows] = runners.positions
        for batch in reversed(tuple(runners.in_flight)):
            stands[batch.plan.rows] = batch.starts
        return running_batch.rows, self.first_seen(stands[running_batch.rows] // self.page_size)

    def opening(self, runners: Runners) -> int:
        """Pages without which the cohort does not decode: of one token each, or of as many decodes as a launch has."""
        if self.steps == 1 and self.by_one:
            return members_growing(runners.positions, runners.page_mask).size
        return pages_ahead(runners.running_batch, runners.positions, self.page_size, self.steps)

    def unlock(self, pages: Int32s) -> None:
        """Rows let go of these full pages' companions, one lock for each time a page is named."""
        np.subtract.at(self.locks, pages, 1)
        self.used[pages] = self.clock + np.arange(pages.size)
        self.clock += pages.size
        free = np.unique(pages[self.locks[pages] == 0])
        self.evictable += int(np.count_nonzero(self.window_of[free] >= 0))

    def hand_over(self, mine: Int32s, theirs: Int32s, held: NDArray[np.bool_]) -> None:
        """A row reads `theirs` from now on, which the radix cache has, instead of its own pages `mine`. int32 [n] both.

        Where the radix cache has a tombstone, it gets the row's companion. `held`: of which the row locks companions.
        What stays with `mine` stays locked until that page comes back: batches in flight may read it.
        """
        fills = (self.window_of[theirs] < 0) & (self.window_of[mine] >= 0)
        if fills.any():
            source, target = mine[fills], theirs[fills]
            blocks = self.window_of[source]
            self.window_of[target], self.window_of[source] = blocks, NONE
            self.locks[target], self.locks[source] = self.locks[source], 0
            self.used[target] = self.used[source]
            self.mapped.append((target, blocks))
        locks = theirs[held & ~fills]
        self.evictable -= int(np.count_nonzero(self.locks[locks] == 0))
        self.locks[locks] += ONE

    def drop(self, pages: Int32s) -> None:
        """Nobody reads these full pages any more: their companions are free."""
        with_one = pages[self.window_of[pages] >= 0]
        if with_one.size:
            self.evictable -= int(np.count_nonzero(self.locks[with_one] == 0))
            self.locks[with_one] = 0
            self.pool.free(self.window_of[with_one])
            self.window_of[with_one] = NONE

    def _evict(self, count: int, step: Step) -> None:
        """Make tombstones of the companions that were let go of longest ago."""
        candidates = ((self.window_of >= 0) & (self.locks == 0)).nonzero()[0]
        count = min(count, candidates.size)
        if count < candidates.size:
            candidates = candidates[np.argpartition(self.used[candidates], count - 1)[:count]]
        oldest = candidates[np.argsort(self.used[candidates])]
        self.drop(oldest.astype(np.int32))
        step.decided.append(BlocksEvicted(step.time_us, "window", count))

    # ---- from and to another engine

    def receive(self, request: Request, path: Int32s, pages: Int32s, stop: int, step: Step) -> None:
        """A request whose KV will come is given `pages` behind the cached `path`, for positions up to `stop`."""
        first = self._first_to_come(request)
        tail, given = path[first:], pages[max(first - path.size, 0) :]
        self.evictable -= int(np.count_nonzero(self.locks[tail] == 0))
        self.locks[tail] += ONE
        if given.size:
            self.open(given, step)
        promised, last = self.promised(request, stop, first), -(-request.reach // self.page_size)
        self.coming[request.request_id] = Coming(first, path.size, np.concatenate((tail, given)), promised, last)

    def adopt_row(self, row: int, request_id: RequestId) -> None:
        """All has come, and the request takes this row: what it locks is the row's."""
        self.first[row], self.shared[row] = self.coming.pop(request_id)[:2]

    def quarantine(self, request_id: RequestId) -> None:
        """Nobody waits for it any more: what was cached is let go of, what it was given may be written yet."""
        coming = self.coming.pop(request_id, None)
        if coming is not None:
            cached = max(coming.shared - coming.first, 0)
            self.unlock(coming.pages[:cached])
            self.quarantined[request_id] = coming.pages[cached:]

    def has_room_to_receive(
        self, engine: EngineView, request: Request, path: Int32s, stop: int, reserved: int | None
    ) -> bool:
        """Whether there are windows for a request whose KV will come, and for those before it.

        Each may open as many pages as `reserved` tokens need, or, under reserve `full`, all it ever does.
        `reserved`: None for who has the engine for itself.
        """
        first, now = self._first_to_come(request), -(-stop // self.page_size)
        wanted = now - max(first, path.size) + int(np.count_nonzero(self.locks[path[first:]] == 0))
        runners = everybody(engine)
        next_ones = self.opened_next(runners, path)
        if self.config.reserve == "full":  # beside what writers of transfers given up still keep, too
            own = now - first + self.promised(request, stop, first)
            return own <= self.unpromised(runners) and wanted <= self.available - next_ones
        if reserved is None or wanted > self.available:
            return wanted <= self.available
        running_batch, positions, most = runners.running_batch, runners.positions, -(-reserved // self.page_size)
        standing = [(now, first, -(-request.reach // self.page_size))]
        standing += [(one.first + one.pages.size, one.first, one.last) for one in self.coming.values()]
        now_of, first_of, last_of = np.array(standing, np.int32).T
        now_of = np.concatenate((now_of, -(-positions // self.page_size)))
        first_of = np.concatenate((first_of, self.first[running_batch.rows]))
        last_of = np.concatenate((last_of, -(-(running_batch.limits - ONE) // self.page_size)))
        to_open = np.minimum(self.row_pages_max - (now_of - first_of), last_of - now_of)
        return wanted + max(int(np.clip(to_open, 0, most).sum()), next_ones) <= self.available

    def _first_to_come(self, request: Request) -> int:
        """The first page index whose window a request needs that begins behind its whole prompt."""
        return int(self.first_seen(request.prompt_tokens // self.page_size))

    def of_last_window(self, request: Request, start: int, pages: Int32s) -> Int32s:
        """Companions of those of a prompt's pages, from page index `start` on, that its first decode may see."""
        return self.window_of[pages[max(self._first_to_come(request) - start, 0) :]]

    # ---- what rows will want

    def to_come(self, engine: Runners, kept: Int32s = NO_ROWS) -> int:
        """Pages that are not for newcomers: what `reserve` leaves to the cohort, its next decode at least."""
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

    def unpromised(self, engine: Runners) -> int:
        """Pages that nobody who is active holds or may still open: what reserve `full` has left.

        A page that several hold counts for each of them, since each may slide past it while the others stay.
        """
        running_batch, page_size = engine.running_batch, self.page_size
        now = -(-engine.positions // page_size)
        first = self.first[running_batch.rows]
        most = self.row_pages_max - (now - first)
        until = np.zeros(self.table.pages.shape[0], np.int32)
        for batch in engine.in_flight:  # who decodes behind its prompt lets go of nothing before that is delivered
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
        for coming in self.coming.values():
            charged += coming.pages.size + coming.promised
            ranges.append(coming.pages)
        held = np.unique(np.concatenate((NO_ROWS, *ranges))).size
        locked = self.pool.total - self.available
        return self.pool.total - charged - (locked - held)

    def left_for_newcomers(self, engine: Runners) -> int:
        """Pages beside what those who run will want."""
        if self.config.reserve == "full":
            return min(self.unpromised(engine), self.available)
        return self.available - self.to_come(engine)

    def promised(self, request: Request, stop: int, first: int) -> int:
        """Pages that a request still opens as it decodes, once its prompt is computed to `stop`, from `first` on."""
        if self.config.reserve == "on_demand":
            return 0
        now = -(-stop // self.page_size)
        most = self.row_pages_max - (now - first)
        most = max(most, -(-(stop + self.behind_prompts) // self.page_size) - now)
        return max(min(most, -(-request.reach // self.page_size) - now), 0)

    def room(
        self, engine: Runners, request: Request, start: int, take: int, path: Int32s, budget: PrefillBudget
    ) -> int:
        """Tokens that a request may take from `start` on, at most `take`, beside what others will want.

        `path`: the cached pages in front of it, if it has no row yet.
        """
        if self.config.reserve == "full":
            tail = path.size - int(self.first_seen(path.size))
            next_ones = self.opened_next(engine, path)
            left = min(self.unpromised(engine) - tail, self.available - next_ones - self.locked_by_match(path))
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
            take -= 1  # all but its end, which wants more
        return min(take, max(left, 0) * self.page_size + -start % self.page_size)

    def opened_next(self, engine: Runners, kept: Int32s = NO_ROWS) -> int:
        """Pages that next decodes open, and let go of none for; what a microbatch lets go of comes in its own turn."""
        apart = engine.apart if isinstance(engine, Stand) else ()
        return sum([max(self.lacking(one, kept) + self.available, 0) for one in apart or (engine,)])

    def lacking(self, engine: Runners, kept: Int32s = NO_ROWS) -> int:
        """Pages that the cohort's next decode opens, and lets go of none for, beyond those that can be had now.

        `kept`: full pages whose companions somebody is about to lock, so that letting go of them frees none.
        """
        opening = self.opening(engine)
        if not opening:
            return -self.available
        pages, counts = np.unique(self.out_of_sight(*self.slides(engine))[0], return_counts=True)
        freed = (self.locks[pages] == counts) & ~np.isin(pages, kept)
        return opening - int(np.count_nonzero(freed)) - self.available

    def once_delivered(self, leaving: list[tuple[int, int]], memory: Memory, opening: int) -> WindowPool:
        """These windows once everything in flight is delivered and the rows `leaving` are given back, each with the
        positions it stands at; the others have opened so many pages by then. A copy, to ask `room` of.
        """
        later = copy(self)
        later.locks, later.first = self.locks.copy(), self.first.copy()
        for batch in memory.in_flight:
            for i, request in batch.alive():
                row, keep = request.row, int(self.first_seen(int(batch.plan.stops[i]) // self.page_size))
                if i < batch.plan.extend_rows and keep > later.first[row]:
                    later.locks[self.table.pages[row, later.first[row] : keep]] -= ONE
                    later.first[row] = keep
        for row, computed in leaving:
            later.locks[self.table.pages[row, later.first[row] : -(-computed // self.page_size)]] -= ONE
        for _, pages in memory.deferred_pages:
            later.locks[pages] = 0
        came = (self.window_of >= 0) & (self.locks > 0) & (later.locks == 0)
        later.evictable += int(np.count_nonzero(came)) - opening
        return later

    def returning(self, engine: EngineView) -> int:
        """Pages that come back by themselves once everything in flight is delivered, and what moves between tiers has
        moved. An underestimate."""
        memory, found, locks = engine.memory, 0, self.locks
        if memory.tiers.operations:
            moving = memory.tiers.window_locks()
            locks = self.locks - moving
            found = int(np.count_nonzero((moving > 0) & (locks == 0))) + memory.tiers.windows_loading
        until = {  # by row: below this page
            deferred.row: -(-deferred.computed // self.page_size)
            for deferred in memory.deferred_frees
            if deferred.row not in memory.lent
        }
        for batch in engine.in_flight:  # of several chunks of a prompt the last one says it
            for i, request in batch.alive():
                if i < batch.plan.extend_rows:
                    until[request.row] = int(self.first_seen(int(batch.plan.stops[i]) // self.page_size))
        for batch in engine.in_flight:
            until |= {one.row: -(-one.computed // self.page_size) for one in batch.ending_requests()}
        found += sum(self._held_alone(row, stop, locks) for row, stop in until.items())
        return found + sum(int(np.count_nonzero(self.window_of[pages] >= 0)) for _, pages in memory.deferred_pages)

    def _held_alone(self, row: int, stop: int, locks: Int32s) -> int:
        return int(np.count_nonzero(locks[self.table.pages[row, self.first[row] : stop]] == 1))


class StatePool:
    """Slots of recurrent state: one for each row, and checkpoints, each the companion of a cached full page."""

    def __init__(
        self, config: SchedConfig, settings: HybridMemory, table: RequestTable, in_flight: deque[InFlight]
    ) -> None:
        self.every = settings.checkpoint_tokens
        self.page_size = config.page_size
        self.caches = config.radix_cache
        self.by_row = config.states_per_row  # slots that a row computes in
        self.table = table
        self.in_flight = in_flight
        self.pool = PagePool(settings.state_slots)
        self.slot_of: Int32s = np.full(config.rows_max, NONE, np.int32)  # by row: the first it computes in
        self.behind_drafts: dict[int, list[int]] = {}  # by row: the others, for the states behind drafts
        self.checkpoint_of: Int32s = np.full(config.pages, NONE, np.int32)  # by full page
        self.page_of: Int32s = np.full(settings.state_slots, NONE, np.int32)  # by slot: whose checkpoint it is
        self.locks: Int32s = np.zeros(settings.state_slots, np.int32)  # by slot: rows that start as a copy of it
        self.used = np.zeros(settings.state_slots, np.int64)  # by slot: when it was last attached or copied
        self.clock = 0
        self.reading: dict[int, int] = {}  # by row: the checkpoint that it starts as a copy of, until it is copied
        self.left: dict[int, list[tuple[int, int, BatchId]]] = {}  # by row: checkpoints that no page has yet
        self.starts: list[tuple[int, int, int]] = []  # row, slot, and what it is a copy of, for the next plan
        self.unwritten: dict[int, BatchId] = {}  # by checkpoint of a page: the batch in flight that writes it
        self.coming: dict[RequestId, list[int]] = {}  # slots of transfers, until their requests have rows, or they end

    @property
    def idle(self) -> NDArray[np.intp]:
        """Slots of checkpoints that nobody is copying."""
        idle: NDArray[np.bool_] = (self.page_of >= 0) & (self.locks == 0)
        return idle.nonzero()[0]

    def available(self, path: Int32s) -> int:
        """Slots that a newcomer behind these cached pages can have now."""
        source = int(self.checkpoint_of[path[-1]]) if path.size else NONE
        mine = source >= 0 and not self.locks[source]
        return self.pool.free_count + self.idle.size - mine + sum(1 for _ in self._spare())

    def _spare(self) -> list[tuple[int, tuple[int, int, BatchId]]]:
        """Checkpoints of rows that no batch in flight writes."""
        oldest = self.in_flight[0].plan.batch_id if self.in_flight else None
        return [(row, one) for row, kept in self.left.items() for one in kept if oldest is None or one[2] < oldest]

    def take_row(self, row: int, path: Int32s, step: Step) -> None:
        """A row starts behind these pages: as a copy of the state there, or from zeros."""
        source = int(self.checkpoint_of[path[-1]]) if path.size else NONE
        if source >= 0:
            self.locks[source] += 1
            self.reading[row] = source
            self._touch(source)
        slot, *others = [self.alloc_for_row(step) for _ in range(self.by_row)]
        self.slot_of[row] = slot
        self.starts.append((row, slot, source))
        if others:
            self.behind_drafts[row] = others
            self.starts += [(row, other, AS_IT_IS) for other in others]

    def receive(self, request_id: RequestId, step: Step) -> None:
        """A request whose state will come is given all the slots of its row; the state goes to the first."""
        self.coming[request_id] = [self.alloc_for_row(step) for _ in range(self.by_row)]

    def adopt_row(self, row: int, request_id: RequestId) -> None:
        """Its state has come, and the request takes this row: it goes on from there."""
        slot, *others = self.coming.pop(request_id)
        self.slot_of[row] = slot
        self.starts.append((row, slot, slot))
        if others:
            self.behind_drafts[row] = others
            self.starts += [(row, other, AS_IT_IS) for other in others]

    def received(self, request_id: RequestId) -> None:
        """A transfer has ended: what no row has adopted is free."""
        self.pool.free(np.array(self.coming.pop(request_id, ()), np.int32))

    def alloc_for_row(self, step: Step) -> int:
        """A slot; rows yield the checkpoints that no page has yet, last of all."""
        if not self.pool.free_count and not self.idle.size:
            owner, spare = self._spare()[0]
            self.left[owner].remove(spare)
            self.pool.free(np.array([spare[1]], np.int32))
        return self._alloc(step)

    def _alloc(self, step: Step) -> int:
        """A slot; the checkpoint not used longest makes room. The caller saw that there is one."""
        if not self.pool.free_count:
            idle = self.idle
            oldest = int(idle[self.used[idle].argmin()])
            self._discard(np.array([oldest], np.int32))
            step.decided.append(BlocksEvicted(step.time_us, "state", 1))
        return int(self.pool.alloc(1)[0])

    def _discard(self, slots: Int32s) -> None:
        self.checkpoint_of[self.page_of[slots]] = NONE
        self.page_of[slots] = NONE
        self.pool.free(slots)

    def _touch(self, slot: int) -> None:
        self.used[slot] = self.clock
        self.clock += 1

    def leave_checkpoints(self, plan: BatchPlan, oldest: BatchId, step: Step) -> tuple[list[int], list[int], list[int]]:
        """Which rows of a plan leave a checkpoint behind: positions in the plan, where they stand then, slots.

        At the last multiple of `checkpoint_tokens` that a row passes, as long as there are slots for it.
        `oldest`: the first batch that is not collected.
        """
        boundaries = plan.stops // self.every * self.every
        if plan.speculation is not None:  # the first that a row may pass is the likeliest
            boundaries[plan.extend_rows :] = (plan.starts[plan.extend_rows :] // self.every + 1) * self.every
        passing = ((boundaries > plan.starts) & (boundaries <= plan.stops)).nonzero()[0].tolist()
        index: list[int] = []
        slots: list[int] = []
        for i in passing if self.caches else ():
            row = int(plan.rows[i])
            if i >= plan.extend_rows:  # of decodes the newest is enough
                self._forget_decodes(row, oldest)
            if not self.pool.free_count and not self.idle.size:
                break
            slot = self._alloc(step)
            self.left.setdefault(row, []).append((int(boundaries[i]) // self.page_size, slot, plan.batch_id))
            index.append(i)
            slots.append(slot)
        return index, [int(boundaries[i]) for i in index], slots

    def _forget_decodes(self, row: int, oldest: BatchId) -> None:
        """Free a row's checkpoints that no batch in flight writes: those of its prompt are a page's by now."""
        kept = self.left.get(row, [])
        done = [one for one in kept if one[2] < oldest]
        self.left[row] = [one for one in kept if one not in done]
        self.pool.free(np.array([slot for _, slot, _ in done], np.int32))

    def verified(self, batch: InFlight) -> None:
        """A verifying batch is delivered: rows have the checkpoints that they passed, and no others."""
        steps = batch.steps
        assert steps is not None
        verifying = batch.plan.sample_rows >= batch.plan.extend_rows
        columns = batch.samplers.rows[verifying], batch.sampled_at[verifying], steps[verifying]
        for row, first, count in zip(*(column.tolist() for column in columns), strict=True):
            passed = range(first, first + count)  # states behind so many positions
            kept = self.left.get(row, [])
            wrong = [one for one in kept if one[2] == batch.plan.batch_id and one[0] * self.page_size not in passed]
            if wrong:
                self.left[row] = [one for one in kept if one not in wrong]
                self.pool.free(np.array([slot for _, slot, _ in wrong], np.int32))

    def attach(self, page: int, slot: int) -> None:
        """A checkpoint was loaded for a cached page: it is its, unless that has one by now."""
        if self.checkpoint_of[page] >= 0:
            self.pool.free(np.array([slot], np.int32))
            return
        self.checkpoint_of[page], self.page_of[slot] = slot, page
        self._touch(slot)

    def copied(self, row: int) -> None:
        """The batch with which a row starts is collected."""
        source = self.reading.pop(row, NONE)
        if source >= 0:
            self.locks[source] -= 1

    def publish(self, row: int, pages: Int32s, collected: BatchId = NEWEST) -> None:
        """The first pages of a row are cached: the checkpoints that batches up to `collected` left there are theirs.

        `pages`: those of the radix cache.
        """
        kept = self.left.get(row)
        if not kept:
            return
        theirs = [one for one in kept if one[0] <= pages.size and one[2] <= collected]
        self.left[row] = [one for one in kept if one not in theirs]
        for boundary, slot, _ in theirs:
            page = int(pages[boundary - 1])
            if self.checkpoint_of[page] >= 0:
                self.pool.free(np.array([slot], np.int32))
                slot = int(self.checkpoint_of[page])
            else:
                self.checkpoint_of[page], self.page_of[slot] = slot, page
            self._touch(slot)

    def share(self, row: int, pages: Int32s, already: int) -> None:
        """The first pages of a row are cached, but what computes them is in flight: so are the checkpoints there.

        Only of pages that were not cached `already`: what is cached with them is hidden again if their batch fails.
        """
        kept = self.left.get(row, [])
        shared = [one for one in kept if already < one[0] <= pages.size]
        if shared:
            self.left[row] = [one for one in kept if one not in shared]
        for boundary, slot, batch_id in shared:
            page = int(pages[boundary - 1])
            self.checkpoint_of[page], self.page_of[slot] = slot, page
            self._touch(slot)
            if batch_id >= self.in_flight[0].plan.batch_id:  # otherwise it is there, and is shared late
                self.locks[slot] += 1
                self.unwritten[slot] = batch_id

    def written(self, batch_id: BatchId) -> None:
        """A batch is delivered, or failed: it writes no checkpoint any more."""
        for slot in [slot for slot, writer in self.unwritten.items() if writer == batch_id]:
            self.locks[slot] -= 1
            del self.unwritten[slot]

    def failed(self, batch_id: BatchId, rows: list[int]) -> None:
        """What these rows leave behind with a batch that failed, and with those behind it, is the state of nothing."""
        self.written(batch_id)
        for row in rows:
            if row in self.left:
                self.left[row] = [
                    (NEVER, slot, left_by) if left_by >= batch_id else (boundary, slot, left_by)
                    for boundary, slot, left_by in self.left[row]
                ]

    def let_go(self, row: int) -> None:
        """Nothing in flight uses a row any more: its slots are free."""
        self.copied(row)
        slots = [int(self.slot_of[row]), *self.behind_drafts.pop(row, ())]
        slots += [slot for _, slot, _ in self.left.pop(row, [])]
        self.slot_of[row] = NONE
        self.pool.free(np.array(slots, np.int32))

    def drop(self, pages: Int32s) -> None:
        """These full pages are nobody's any more: their checkpoints are free."""
        slots = self.checkpoint_of[pages]
        slots = slots[slots >= 0]
        if slots.size:
            self._discard(slots)


class Hybrid:
    """What a model has beside full attention, of one engine. Built by its `Memory`."""

    present: ClassVar[bool] = True  # False: all layers have full attention

    def __init__(
        self, config: SchedConfig, settings: HybridMemory, table: RequestTable, in_flight: deque[InFlight]
    ) -> None:
        self.page_size = config.page_size
        self.by_one = config.positions_per_decode == 1  # each launch moves who decodes by one position
        self.window = WindowPool(config, settings, table) if settings.window_tokens else None
        self.states = StatePool(config, settings, table, in_flight) if settings.state_slots else None
        self.table = table
        self.in_flight = in_flight

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

    def full(self, runners: Runners) -> bool:
        """Whether nobody new could start, whoever it is: no slot, or no window page beside what others will want."""
        return self.lacks_state(NO_ROWS) or (self.window is not None and self.window.left_for_newcomers(runners) <= 0)

    def all_below(self, share: float) -> bool:
        """Whether less than this share of each pool is held by somebody."""
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

        `path`: cached pages that need not come. `reserved`: tokens left to each that runs or will; None if nobody does.
        """
        if self.lacks_state(NO_ROWS):
            return False
        return self.window is None or self.window.has_room_to_receive(engine, request, path, stop, reserved)

    def lacks_state(self, path: Int32s) -> bool:
        """Whether there is no slot for a newcomer behind these cached pages."""
        return self.states is not None and self.states.available(path) < self.states.by_row

    def would_start(
        self,
        engine: EngineView,
        request: Request,
        span: tuple[int, int],
        path: Int32s,
        budget: PrefillBudget,
        leaving: list[int],
        then: Int32s,
    ) -> int:
        """Tokens that a newcomer or a split prompt may take, of the `span` from where on and how many, once everything
        in flight is delivered and these of all who decode have left; 0 if it would have no slot.

        `path`: the cached pages in front of it, if it has no row yet. `then`: where those that stay will be.
        """
        (running_batch, positions), memory = engine.everybody, engine.memory
        gone = [
            (deferred.row, deferred.computed) for deferred in memory.deferred_frees if deferred.row not in memory.lent
        ]
        ending = [request for batch in self.in_flight for request in batch.ending_requests()]
        gone += [(one.row, one.computed) for one in ending]
        gone += [(running_batch.requests[i].row, int(positions[i])) for i in leaving]
        if self.states is not None and request.row < 0:
            rows = len(memory.table.holders) - len(memory.table.free_rows) - len(gone)
            taken = int(path.size > 0 and self.states.checkpoint_of[path[-1]] >= 0)
            taken += sum(len(slots) for slots in self.states.coming.values())
            taken += memory.tiers.slots_moving
            if self.states.pool.total - rows * self.states.by_row - taken < self.states.by_row:
                return 0
        if self.window is None:
            return span[1]
        stay = np.ones(running_batch.size, np.bool_)
        stay[leaving] = False
        staying, now = running_batch.only(stay.nonzero()[0]), positions[stay]
        opening = 0
        if engine.config.reserve == "on_demand":  # elsewhere the reserve has their pages
            held = -(-now // self.page_size)
            most = np.maximum(self.window.row_pages_max - (held - self.window.first[staying.rows]), 0)
            opening = int(np.minimum(-(-then // self.page_size) - held, most).sum())
        left = {one.request_id for one in ending}
        others = {number: one for number, one in engine.requests.items() if one.row >= 0 and number not in left}
        later = _by_microbatch(engine, Stand(staying, now, engine.page_mask, others, (), engine.ratio))
        window = self.window.once_delivered(gone, memory, opening)
        return window.room(later, request, *span, path, budget)

    def pages_for_drafts(self, pages: int) -> int:
        """Pages that decodes may open, of so many full ones that can be had."""
        return pages if self.window is None else min(pages, self.window.available)

    @property
    def window_tokens_available(self) -> int:
        """Positions that window pages can be had for now."""
        return self.window.available * self.page_size if self.window is not None else 0

    def decode_needs(self, engine: EngineView) -> tuple[int, int, int]:
        """Window pages that the cohort's next decode wants, those that can be had, and those that are coming back."""
        if self.window is None:
            return 0, 0, 0
        available = self.window.available
        return self.window.lacking(engine) + available, available, self.window.returning(engine)

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
        """Of a path with these companions, the first page whose companion counts for who goes on from its end."""
        if kind == "window":
            return self.seen_from(kind, blocks.size)
        there = (blocks >= 0).nonzero()[0]
        return int(there[-1]) if there.size else blocks.size

    def seen_from(self, kind: Kind, pages: int) -> int:
        """The first page whose companion somebody needs who goes on behind so many; all up to the last are needed."""
        if kind == "window" and self.window is not None:
            return int(self.window.first_seen(pages))
        return pages - 1

    def seen(self, kind: Kind) -> int:
        """Of how many pages up to where somebody goes on companions are needed, at most."""
        return -(-self.window.behind // self.window.page_size) if kind == "window" and self.window is not None else 1

    def goes_on(self, kind: Kind, there: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """By page of a path: whether this kind can go on behind it, where each page's companion is `there` or not."""
        return self.window.usable(there) if kind == "window" and self.window is not None else there

    def has_room(self, kind: Kind, coming: int, there: int, engine: EngineView) -> bool:
        """Whether so many can be loaded, beside so many that are held meanwhile, and leave room for who waits."""
        if kind == "window" and self.window is not None:
            return self.window.left_for_newcomers(everybody(engine)) > coming + there
        assert self.states is not None
        return self.states.available(NO_ROWS) >= self.states.by_row + coming + there

    def room_for(self, kind: Kind, count: int, step: Step) -> Int32s:
        """Window pages, or slots, for what is loaded: nobody's, until it has arrived. The caller saw that there are."""
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
        """They were not, or nobody could find them."""
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
            slot = self.states.coming[request.request_id][0]
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
        """Nobody waits for what a transfer brings any more: it may still be written, until it is over."""
        if self.window is not None:
            self.window.quarantine(request_id)

    def received(self, request_id: RequestId) -> None:
        """A transfer is over: nobody writes what it was given. The caller frees the full pages, windows with them."""
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

    def let_go(self, row: int, held: int) -> None:
        """Nothing in flight uses a row of `held` pages any more, which are freed or published next."""
        if self.window is not None:
            self.window.unlock(self.table.pages[row, self.window.first[row] : held])

    def left(self, row: int, cached: Int32s) -> None:
        """A row is given back, its first pages cached as these."""
        if self.states is not None:
            self.states.publish(row, cached)
            self.states.let_go(row)

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
        """The state in builtins."""
        image: dict[str, Any] = {}
        if (window := self.window) is not None:
            parked = window.quarantined
            image["window"] = {
                "pool": window.pool.dump(),
                "clock": window.clock,
                "evictable": window.evictable,
                "mapped": [(pages.tobytes(), blocks.tobytes()) for pages, blocks in window.mapped],
                **({"coming": [(one, *_told(of)) for one, of in window.coming.items()]} if window.coming else {}),
                **({"quarantined": [(one, of.tobytes()) for one, of in parked.items()]} if parked else {}),
                **{name: getattr(window, name).tobytes() for name in WINDOW_COLUMNS},
            }
        if (states := self.states) is not None:
            image["states"] = {
                "pool": states.pool.dump(),
                "clock": states.clock,
                "reading": list(states.reading.items()),
                "left": list(states.left.items()),
                **({"behind_drafts": list(states.behind_drafts.items())} if states.by_row > 1 else {}),
                "starts": states.starts,
                **({"coming": list(states.coming.items())} if states.coming else {}),
                **({"unwritten": list(states.unwritten.items())} if states.unwritten else {}),
                **{name: getattr(states, name).tobytes() for name in STATE_COLUMNS},
            }
        return image

    def load(self, image: dict[str, Any], table: RequestTable) -> None:
        """Become what `dump` described, of the rows of this table."""
        self.table = table
        if (window := self.window) is not None:
            of, window.table = image["window"], table
            window.pool, window.clock, window.evictable = PagePool.load(of["pool"]), of["clock"], of["evictable"]
            window.mapped = [(np.frombuffer(a, np.int32), np.frombuffer(b, np.int32)) for a, b in of["mapped"]]
            window.coming = {
                one: Coming(first, shared, np.frombuffer(pages, np.int32), *more)
                for one, first, shared, pages, *more in of.get("coming", ())
            }
            window.quarantined = {one: np.frombuffer(pages, np.int32) for one, pages in of.get("quarantined", ())}
            for name in WINDOW_COLUMNS:
                setattr(window, name, np.frombuffer(of[name], getattr(window, name).dtype).copy())
        if (states := self.states) is not None:
            of, states.table = image["states"], table
            states.pool, states.clock, states.reading = PagePool.load(of["pool"]), of["clock"], dict(of["reading"])
            states.left = {row: [tuple(one) for one in kept] for row, kept in of["left"]}
            states.starts = [tuple(start) for start in of["starts"]]
            states.coming = {one: list(slots) for one, slots in of.get("coming", ())}
            states.behind_drafts = {row: list(slots) for row, slots in of.get("behind_drafts", ())}
            states.unwritten = dict(of.get("unwritten", ()))
            for name in STATE_COLUMNS:
                setattr(states, name, np.frombuffer(of[name], getattr(states, name).dtype).copy())


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

    def would_start(
        self,
        engine: EngineView,
        request: Request,
        span: tuple[int, int],
        path: Int32s,
        budget: PrefillBudget,
        leaving: list[int],
        then: Int32s,
    ) -> int:
        """All tokens of the span."""
        return span[1]

    def to_receive(self, request: Request, pages: Int32s) -> HybridTransfer | None:
        """None: pages are all that comes."""
        return None

    def collected(self, batch: InFlight) -> None:
        """Nothing is held beside pages."""

    def completed_in_run(self, plan: BatchPlan, oldest: BatchId, step: Step) -> BatchPlan:
        """The plan as it is."""
        return plan

    def completed(self, plan: BatchPlan, step: Step) -> BatchPlan:
        """The plan as it is."""
        return plan


def hybrid_of(config: SchedConfig, table: RequestTable, in_flight: deque[InFlight]) -> Hybrid:
    """The memory beside full attention that these settings have."""
    if config.hybrid is UNSET:
        return FullAttention(config, table, in_flight)
    return Hybrid(config, config.hybrid, table, in_flight)


WINDOW_COLUMNS = ("window_of", "locks", "used", "first", "shared")
STATE_COLUMNS = ("slot_of", "checkpoint_of", "page_of", "locks", "used")


def _told(coming: Coming) -> tuple[int, int, bytes, int, int]:
    """As a snapshot has it."""
    return coming.first, coming.shared, coming.pages.tobytes(), coming.promised, coming.last


def extending_rows(in_flight: Iterable[InFlight]) -> list[Int32s]:
    """Rows of prompts in flight, by batch."""
    return [batch.plan.rows[: batch.plan.extend_rows] for batch in in_flight if batch.plan.extend_rows]
