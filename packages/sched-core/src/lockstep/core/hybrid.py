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

**States.** A row writes its own slot only. It starts from zeros or as a copy of a checkpoint, which is locked until the
batch with the copy is collected, and is never written again: copy-on-write. A batch that passes a multiple of
`checkpoint_tokens` leaves a copy of the state there behind; it is the row's until its page is published, and the page's
from then on. A row keeps the newest of its decodes only.

**Eviction.** Each pool by itself, what was let go of longest ago first, and of one row the beginning before the end.
Full pages that are evicted take their companions along.

**Admission** asks all pools at once (`lacks_state`, `WindowPool.room`); nothing is taken before all have said yes.
Source: SGLang's hybrid radix cache (tombstones, ratios of the pools, checkpoints every 256 tokens); docs/hybrid.md.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.core.commands import NO_ROWS, BatchPlan, HybridChanges, Step
from lockstep.core.config import HybridMemory, SchedConfig
from lockstep.core.delivery import step_numbers
from lockstep.core.events import BatchId, CompanionsEvicted
from lockstep.core.pages import PagePool
from lockstep.core.requests import ONE, Cohort, Int32s, Request, RequestState, RequestTable
from lockstep.core.retraction import members_growing

if TYPE_CHECKING:
    from lockstep.core.admission import PrefillBudget
    from lockstep.core.batching import InFlight
    from lockstep.core.engine import Engine
    from lockstep.core.radix import Match, RadixCache

NONE = -1  # no window page, no slot
EVICT_AHEAD_SHARE = 256  # as for full pages: of the pool, at least one such part at once


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
        self.row_pages_max = settings.row_pages_max(config.page_size, config.overlap_depth)
        self.depth = config.overlap_depth
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

    # ---- what there is

    @property
    def available(self) -> int:
        """Window pages that can be had now."""
        return self.pool.free_count + self.evictable

    def first_seen(self, pages: Int32s | int) -> Any:
        """The first page index that a token right behind so many pages sees."""
        return np.maximum(np.asarray(pages, np.int32) * self.page_size - self.behind, 0) // self.page_size

    def usable(self, path: Int32s) -> NDArray[np.bool_]:
        """By page of a path: whether the window in front of its end is there. [pages of the path]"""
        number = np.arange(path.size, dtype=np.int32)
        lost = np.maximum.accumulate(np.where(self.window_of[path] >= 0, NONE, number))
        seen: NDArray[np.bool_] = lost < self.first_seen(number + ONE)
        return seen

    def locked_by_match(self, path: Int32s) -> int:
        """Evictable companions that starting behind a path would lock."""
        tail = path[int(self.first_seen(path.size)) :]
        return int(np.count_nonzero(self.locks[tail] == 0))

    # ---- hold

    def take_row(self, row: int, path: Int32s) -> None:
        """A row starts behind these pages."""
        first = int(self.first_seen(path.size))
        self.first[row], self.shared[row] = first, path.size
        tail = path[first:]
        self.evictable -= int(np.count_nonzero(self.locks[tail] == 0))
        self.locks[tail] += ONE

    def open(self, pages: Int32s, step: Step) -> None:
        """These full pages are a row's from now on: give each its companion. The caller saw that there are so many."""
        missing = pages.size - self.pool.free_count
        if missing > 0:
            self._evict(max(missing, self.pool.total // EVICT_AHEAD_SHARE), step)
        companions = self.pool.alloc(pages.size)
        self.window_of[pages] = companions
        self.locks[pages] = ONE
        self.mapped.append((pages, companions))

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

    def slides_by_growth(self, cohort: Cohort, positions: Int32s, busy: list[Int32s]) -> tuple[Int32s, Int32s]:
        """Of a cohort's members that open a page next: their rows, and the page indices below which each is done.

        `busy`: rows of prompts in flight, which may read further back than decodes do; they are left out.
        """
        growing = members_growing(positions, np.array(self.page_size - 1, np.int32))
        rows, boundary = cohort.rows.take(growing), (positions.take(growing) - np.int32(self.depth)) // self.page_size
        for extending in busy:
            idle = ~np.isin(rows, extending)
            rows, boundary = rows[idle], boundary[idle]
        return rows, self.first_seen(np.maximum(boundary, 0))

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
        heals = (self.window_of[theirs] < 0) & (self.window_of[mine] >= 0)
        if heals.any():
            source, target = mine[heals], theirs[heals]
            companions = self.window_of[source]
            self.window_of[target], self.window_of[source] = companions, NONE
            self.locks[target], self.locks[source] = self.locks[source], 0
            self.used[target] = self.used[source]
            self.mapped.append((target, companions))
        locks = theirs[held & ~heals]
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
        step.decided.append(CompanionsEvicted(step.time_us, "window", count))

    # ---- what rows will want

    def to_come(self, engine: Engine, kept: Int32s = NO_ROWS) -> int:
        """Pages that are not for newcomers: what `reserve` leaves to the cohort, its next decode at least."""
        cohort, positions = engine.cohort, engine.positions
        if not cohort.size:
            return 0
        next_ones = max(self.lacking(engine, kept) + self.available, 0)
        now, last = -(-positions // self.page_size), -(-(cohort.limits - ONE) // self.page_size)
        if self.config.reserve == "on_demand":
            return next_ones
        left = (cohort.limits - positions) * np.where(cohort.ignores_eos, 1.0, engine.ratio.value)
        most = np.minimum(np.ceil(left / self.page_size).astype(np.int32), last - now)
        return max(next_ones, int(np.clip(self.row_pages_max - (now - self.first[cohort.rows]), 0, most).sum()))

    def unpromised(self, engine: Engine) -> int:
        """Pages that nobody who is active holds or may still open: what reserve `full` has left.

        A page that several hold counts for each of them, since each may slide past it while the others stay.
        """
        cohort, page_size = engine.cohort, self.page_size
        now = -(-engine.positions // page_size)
        first = self.first[cohort.rows]
        left_to_open = np.minimum(self.row_pages_max - (now - first), -(-(cohort.limits - ONE) // page_size) - now)
        charged = int((now - first).sum() + np.maximum(left_to_open, 0).sum())
        ranges = [self.table.pages[row, i:j] for row, i, j in zip(cohort.rows, first, now, strict=True)]
        for request in engine.requests.values():
            if request.row >= 0 and not request.decodes:
                start, stop = int(self.first[request.row]), -(-request.computed // page_size)
                charged += stop - start
                if request.state is RequestState.RUNNING:
                    charged += self.promised(request, request.computed, start)
                ranges.append(self.table.pages[request.row, start:stop])
        held = np.unique(np.concatenate((NO_ROWS, *ranges))).size
        locked = self.pool.total - self.available
        return self.pool.total - charged - (locked - held)

    def promised(self, request: Request, stop: int, first: int) -> int:
        """Pages that a request still opens as it decodes, once its prompt is computed to `stop`, from `first` on."""
        if self.config.reserve == "on_demand":
            return 0
        now = -(-stop // self.page_size)
        return max(min(self.row_pages_max - (now - first), -(-request.reach // self.page_size) - now), 0)

    def room(self, engine: Engine, request: Request, start: int, take: int, path: Int32s, budget: PrefillBudget) -> int:
        """Tokens that a request may take from `start` on, at most `take`, beside what others will want.

        `path`: the cached pages in front of it, if it has no row yet.
        """
        if self.config.reserve == "full":
            tail = path.size - int(self.first_seen(path.size))
            next_ones = max(self.lacking(engine, path) + self.available, 0)
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

    def lacking(self, engine: Engine, kept: Int32s = NO_ROWS) -> int:
        """Pages that the cohort's next decode opens, and lets go of none for, beyond those that can be had now.

        `kept`: full pages whose companions somebody is about to lock, so that letting go of them frees none.
        """
        growing = members_growing(engine.positions, engine.page_mask).size
        if not growing:
            return -self.available
        rows, keep = self.slides_by_growth(engine.cohort, engine.positions, extending_rows(engine.in_flight))
        pages, counts = np.unique(self.out_of_sight(rows, keep)[0], return_counts=True)
        freed = (self.locks[pages] == counts) & ~np.isin(pages, kept)
        return growing - int(np.count_nonzero(freed)) - self.available

    def returning(self, engine: Engine) -> int:
        """Pages that come back by themselves once everything in flight is delivered. An underestimate."""
        memory, found = engine.memory, 0
        leaving = [(lease.row, lease.computed) for lease in memory.leases]
        for batch in engine.in_flight:
            leaving += [(request.row, request.computed) for request in batch.ending_requests()]
            for i, request in batch.alive():
                if i < batch.plan.extend_rows:
                    keep = self.first_seen(int(batch.plan.stops[i]) // self.page_size)
                    found += self._held_alone(request.row, int(keep))
        for row, computed in leaving:
            found += self._held_alone(row, -(-computed // self.page_size))
        return found + sum(int(np.count_nonzero(self.window_of[pages] >= 0)) for _, pages in memory.fenced_pages)

    def _held_alone(self, row: int, stop: int) -> int:
        return int(np.count_nonzero(self.locks[self.table.pages[row, self.first[row] : stop]] == 1))


class StatePool:
    """Slots of recurrent state: one for each row, and checkpoints, each the companion of a cached full page."""

    def __init__(
        self, config: SchedConfig, settings: HybridMemory, table: RequestTable, in_flight: deque[InFlight]
    ) -> None:
        self.every = settings.checkpoint_tokens
        self.page_size = config.page_size
        self.caches = config.radix_cache
        self.table = table
        self.in_flight = in_flight
        self.pool = PagePool(settings.state_slots)
        self.slot_of: Int32s = np.full(config.rows_max, NONE, np.int32)  # by row
        self.checkpoint_of: Int32s = np.full(config.pages, NONE, np.int32)  # by full page
        self.page_of: Int32s = np.full(settings.state_slots, NONE, np.int32)  # by slot: whose checkpoint it is
        self.locks: Int32s = np.zeros(settings.state_slots, np.int32)  # by slot: rows that start as a copy of it
        self.used = np.zeros(settings.state_slots, np.int64)  # by slot: when it was last attached or copied
        self.clock = 0
        self.reading: dict[int, int] = {}  # by row: the checkpoint that it starts as a copy of, until it is copied
        self.left: dict[int, list[tuple[int, int, BatchId]]] = {}  # by row: checkpoints that no page has yet
        self.starts: list[tuple[int, int, int]] = []  # row, slot, and what it is a copy of, for the next plan

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
        if not self.pool.free_count and not self.idle.size:
            owner, spare = self._spare()[0]
            self.left[owner].remove(spare)
            self.pool.free(np.array([spare[1]], np.int32))
        slot = self._alloc(step)
        self.slot_of[row] = slot
        self.starts.append((row, slot, source))

    def _alloc(self, step: Step) -> int:
        """A slot; the checkpoint not used longest makes room. The caller saw that there is one."""
        if not self.pool.free_count:
            idle = self.idle
            oldest = int(idle[self.used[idle].argmin()])
            self._discard(np.array([oldest], np.int32))
            step.decided.append(CompanionsEvicted(step.time_us, "state", 1))
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
        passing = (boundaries > plan.starts).nonzero()[0].tolist()
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

    def copied(self, row: int) -> None:
        """The batch with which a row starts is collected."""
        source = self.reading.pop(row, NONE)
        if source >= 0:
            self.locks[source] -= 1

    def publish(self, row: int, pages: Int32s) -> None:
        """The first pages of a row are cached, and what computed them is collected: its checkpoints there are theirs.

        `pages`: those of the radix cache.
        """
        kept = self.left.get(row)
        if not kept:
            return
        self.left[row] = [one for one in kept if one[0] > pages.size]
        for boundary, slot, _ in kept:
            if boundary <= pages.size:
                page = int(pages[boundary - 1])
                if self.checkpoint_of[page] >= 0:
                    self.pool.free(np.array([slot], np.int32))
                    slot = int(self.checkpoint_of[page])
                else:
                    self.checkpoint_of[page], self.page_of[slot] = slot, page
                self._touch(slot)

    def let_go(self, row: int) -> None:
        """Nothing in flight uses a row any more: its slots are free."""
        self.copied(row)
        slots = [int(self.slot_of[row]), *(slot for _, slot, _ in self.left.pop(row, []))]
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

    def __init__(
        self, config: SchedConfig, settings: HybridMemory, table: RequestTable, in_flight: deque[InFlight]
    ) -> None:
        self.page_size = config.page_size
        self.window = WindowPool(config, settings, table) if settings.window_tokens else None
        self.states = StatePool(config, settings, table, in_flight) if settings.state_slots else None
        self.table = table
        self.in_flight = in_flight

    # ------------------------------------------------------------------------------------------------------- admission

    def continued(self, radix: RadixCache, match: Match, tokens: bytes) -> Match:
        """As much of a match as all kinds can go on from."""
        if match.node is None:
            return match
        path = radix.pages_of(match.node)[: match.pages]
        usable = np.ones(path.size, np.bool_)
        if self.window is not None:
            usable = self.window.usable(path)
        if self.states is not None:
            usable &= self.states.checkpoint_of[path] >= 0
        ends = usable.nonzero()[0]
        pages = int(ends[-1]) + 1 if ends.size else 0
        return match if pages == match.pages else radix.match(match.namespace, tokens, pages)

    def lacks_state(self, path: Int32s) -> bool:
        """Whether there is no slot for a newcomer behind these cached pages."""
        return self.states is not None and self.states.available(path) < 1

    @property
    def window_tokens_available(self) -> int:
        """Positions that window pages can be had for now."""
        return self.window.available * self.page_size if self.window is not None else 0

    def decode_needs(self, engine: Engine) -> tuple[int, int, int]:
        """Window pages that the cohort's next decode wants, those that can be had, and those that are coming back."""
        if self.window is None:
            return 0, 0, 0
        available = self.window.available
        return self.window.lacking(engine) + available, available, self.window.returning(engine)

    def decode_lacks(self, engine: Engine) -> int:
        """Pages without which the cohort does not decode, beyond those that can be had."""
        return self.window.lacking(engine) if self.window is not None else 0

    def short_for_decode(self, engine: Engine) -> bool:
        """Let go of what the cohort does not see any more; then, whether its next decode lacks a page."""
        if self.window is None:
            return False
        busy = extending_rows(self.in_flight)
        self.window.slide(*self.window.slides_by_growth(engine.cohort, engine.positions, busy))
        return members_growing(engine.positions, engine.page_mask).size > self.window.available

    # ---------------------------------------------------------------------------------------------------------- memory

    def take_row(self, row: int, path: Int32s, step: Step) -> None:
        """A row starts behind these cached pages."""
        if self.window is not None:
            self.window.take_row(row, path)
        if self.states is not None:
            self.states.take_row(row, path, step)

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

    def collected(self, batch: InFlight) -> None:
        """A batch is delivered and what it computed is published: rows let go of what only it had to read."""
        plan = batch.plan
        rows, stops = plan.rows[: plan.extend_rows], plan.stops[: plan.extend_rows]
        holders = list(zip(batch.requests, rows.tolist(), strict=False))
        if self.states is not None:
            for _, row in holders:
                self.states.copied(row)
            for request, row in holders:
                if request.row == row and row not in batch.dead:
                    self.states.publish(row, self.table.pages[row, : request.protected_pages])
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

    def heal(self, mine: Int32s, theirs: Int32s) -> None:
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
        pages = companions = rows = slots = sources = NO_ROWS
        index: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        if self.window is not None and self.window.mapped:
            pages = np.concatenate([pages for pages, _ in self.window.mapped])
            companions = np.concatenate([companions for _, companions in self.window.mapped])
            self.window.mapped = []
        if self.states is not None:
            if self.states.starts:
                rows, slots, sources = np.array(self.states.starts, np.int32).T.copy()
                self.states.starts = []
            index, positions, kept = self.states.leave_checkpoints(plan, oldest, step)
        if not pages.size and not rows.size and not index:
            return None
        checkpoints = [np.array(column, np.int32) for column in (index, positions, kept)]
        return HybridChanges(pages, companions, rows, slots, sources, *checkpoints)

    def open_in_run(self, cohort: Cohort, positions: Int32s, pages: Int32s, step: Step) -> None:
        """As a decode does: let go of what its members do not see any more; `pages` are theirs from now on."""
        if self.window is not None and pages.size:
            self.window.slide(*self.window.slides_by_growth(cohort, positions, []))
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
            image["window"] = {
                "pool": window.pool.dump(),
                "clock": window.clock,
                "evictable": window.evictable,
                "mapped": [(pages.tobytes(), companions.tobytes()) for pages, companions in window.mapped],
                **{name: getattr(window, name).tobytes() for name in WINDOW_COLUMNS},
            }
        if (states := self.states) is not None:
            image["states"] = {
                "pool": states.pool.dump(),
                "clock": states.clock,
                "reading": list(states.reading.items()),
                "left": list(states.left.items()),
                "starts": states.starts,
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
            for name in WINDOW_COLUMNS:
                setattr(window, name, np.frombuffer(of[name], getattr(window, name).dtype).copy())
        if (states := self.states) is not None:
            of, states.table = image["states"], table
            states.pool, states.clock, states.reading = PagePool.load(of["pool"]), of["clock"], dict(of["reading"])
            states.left = {row: [tuple(one) for one in kept] for row, kept in of["left"]}
            states.starts = [tuple(start) for start in of["starts"]]
            for name in STATE_COLUMNS:
                setattr(states, name, np.frombuffer(of[name], getattr(states, name).dtype).copy())


WINDOW_COLUMNS = ("window_of", "locks", "used", "first", "shared")
STATE_COLUMNS = ("slot_of", "checkpoint_of", "page_of", "locks", "used")
Kind = Literal["window", "state"]


def extending_rows(in_flight: deque[InFlight]) -> list[Int32s]:
    """Rows of prompts in flight, by batch."""
    return [batch.plan.rows[: batch.plan.extend_rows] for batch in in_flight if batch.plan.extend_rows]
