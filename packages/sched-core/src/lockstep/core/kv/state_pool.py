"""Slots of recurrent state: slots that rows compute in, and checkpoints, the state blocks of pages (hybrid.py)."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.checks import fail, misowned, same
from lockstep.core.contract.commands import BatchPlan, Step
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.events import BatchId, BlocksEvicted, RequestId
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.operations import Operations
from lockstep.core.kv.pages import PagePool
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import Int32s, RequestTable

NONE = -1  # no slot
AS_IT_IS = -2  # source of a slot that is neither zeroed nor copied to
NEWEST: BatchId = 2**63 - 1  # later than every batch
NEVER = 2**31 - 1  # page count of a checkpoint that is never published


class StatePool:
    """The state slots of one engine: slots of rows, and checkpoints of rows and of cached full pages."""

    def __init__(
        self, config: SchedConfig, settings: HybridMemory, table: RequestTable, in_flight: deque[InFlight]
    ) -> None:
        self.every = settings.checkpoint_tokens
        self.page_size = config.page_size
        self.caches = config.radix_cache
        self.by_row = config.states_per_row  # slots of each row
        self.table = table
        self.in_flight = in_flight
        self.pool = PagePool(settings.state_slots)
        self.slot_of: Int32s = np.full(config.rows_max, NONE, np.int32)  # by row: its first slot
        self.behind_drafts: dict[int, list[int]] = {}  # by row: its other slots, for the states behind drafts
        self.checkpoint_of: Int32s = np.full(config.pages, NONE, np.int32)  # by full page
        self.page_of: Int32s = np.full(settings.state_slots, NONE, np.int32)  # by slot: the page of its checkpoint
        self.locks: Int32s = np.zeros(settings.state_slots, np.int32)  # by slot: rows that start from a copy of it
        self.used = np.zeros(settings.state_slots, np.int64)  # by slot: time of the last attach or copy
        self.clock = 0
        self.reading: dict[int, int] = {}  # by row: the checkpoint that it starts from, until it is copied
        self.unpublished: dict[int, list[tuple[int, int, BatchId]]] = {}  # by row: its checkpoints
        self.starts: list[tuple[int, int, int]] = []  # row, slot and source of its first state, for the next plan
        self.unwritten: dict[int, BatchId] = {}  # by checkpoint of a page: the batch in flight that writes it
        self.incoming: dict[RequestId, list[int]] = {}  # slots of transfers, by request, until it has a row
        self.owed: set[int] = set()  # rows with a received state that is no checkpoint: they leave one at a page's end

    @property
    def idle(self) -> NDArray[np.intp]:
        """Slots of page checkpoints that are not locked: they can be evicted."""
        idle: NDArray[np.bool_] = (self.page_of >= 0) & (self.locks == 0)
        return idle.nonzero()[0]

    def available(self, path: Int32s) -> int:
        """Return the slots that a request behind these cached pages could take now."""
        source = int(self.checkpoint_of[path[-1]]) if path.size else NONE
        idle_source = source >= 0 and not self.locks[source]
        return self.pool.free_count + self.idle.size - idle_source + sum(1 for _ in self._spare())

    def _spare(self) -> list[tuple[int, tuple[int, int, BatchId]]]:
        """Return the checkpoints of rows that no batch in flight writes and the next plan does not copy, each with its
        row."""
        oldest = self.in_flight[0].plan.batch_id if self.in_flight else None
        copied = {source for _, _, source in self.starts}
        return [
            (row, one)
            for row, kept in self.unpublished.items()
            for one in kept
            if (oldest is None or one[2] < oldest) and one[1] not in copied
        ]

    def take_row(self, row: int, path: Int32s, step: Step) -> None:
        """Allocate the slots of a row that starts behind these pages, from a copy of the state there or from zeros."""
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
        """Allocate the slots of a request whose state will be received; the state is written to the first slot."""
        self.incoming[request_id] = [self.alloc_for_row(step) for _ in range(self.by_row)]

    def adopt_row(self, row: int, request_id: RequestId, prompt_tokens: int, batch_id: BatchId, step: Step) -> None:
        """Move the slots of a request whose state was received to its row.

        The state behind a prompt that ends with a page becomes a checkpoint of that page, and the row computes in a
        copy of it. Without a slot for the copy, or behind any other prompt, the row computes in the received slot and
        leaves its first checkpoint at the next end of a page.

        Args:
            batch_id: the next batch, which copies the state.
        """
        received, *others = self.incoming.pop(request_id)
        slot = received
        if self.caches and prompt_tokens % self.page_size == 0 and (self.pool.free_count or self.idle.size):
            slot = self._alloc(step)
            self.unpublished[row] = [(prompt_tokens // self.page_size, received, batch_id)]
        elif self.caches:
            self.owed.add(row)
        self.slot_of[row] = slot
        self.starts.append((row, slot, received))
        if others:
            self.behind_drafts[row] = others
            self.starts += [(row, other, AS_IT_IS) for other in others]

    def received(self, request_id: RequestId) -> None:
        """Free the slots of an ended transfer that no row has adopted."""
        self.pool.free(np.array(self.incoming.pop(request_id, ()), np.int32))

    def alloc_for_row(self, step: Step) -> int:
        """Allocate a slot for a row. Checkpoints of rows are freed for it only if no page checkpoint can be evicted."""
        if not self.pool.free_count and not self.idle.size:
            owner, spare = self._spare()[0]
            self.unpublished[owner].remove(spare)
            self.pool.free(np.array([spare[1]], np.int32))
        return self._alloc(step)

    def _alloc(self, step: Step) -> int:
        """Allocate a slot, evicting the least recently used page checkpoint. The caller checks `available`."""
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
        """Allocate slots for the checkpoints that the rows of a plan write.

        A row writes one at the last multiple of `checkpoint_tokens` that it passes, as long as slots are available.
        A row with a received state that is no checkpoint writes its first one at the next end of a page.

        Args:
            oldest: the first batch that is not collected.
        Returns: indices of the rows in the plan, positions of their checkpoints, and slots.
        """
        boundaries = plan.stops // self.every * self.every
        if plan.speculation is not None:  # the first multiple that a row may pass is the likeliest
            boundaries[plan.extend_rows :] = (plan.starts[plan.extend_rows :] // self.every + 1) * self.every
        if self.owed:
            owing = np.isin(plan.rows, sorted(self.owed))
            boundaries[owing] = (plan.starts[owing] // self.page_size + 1) * self.page_size
        passing = ((boundaries > plan.starts) & (boundaries <= plan.stops)).nonzero()[0].tolist()
        index: list[int] = []
        slots: list[int] = []
        for i in passing if self.caches else ():
            row = int(plan.rows[i])
            if i >= plan.extend_rows:  # only the newest checkpoint of decodes is kept
                self._forget_decodes(row, oldest)
            if not self.pool.free_count and not self.idle.size:
                break
            slot = self._alloc(step)
            self.unpublished.setdefault(row, []).append((int(boundaries[i]) // self.page_size, slot, plan.batch_id))
            if plan.speculation is None or i < plan.extend_rows:
                self.owed.discard(row)  # otherwise the result shows whether the row has passed the position
            index.append(i)
            slots.append(slot)
        return index, [int(boundaries[i]) for i in index], slots

    def _forget_decodes(self, row: int, oldest: BatchId) -> None:
        """Free the checkpoints of a row that no batch in flight writes. Those of its prompt belong to pages by now."""
        kept = self.unpublished.get(row, [])
        done = [one for one in kept if one[2] < oldest]
        self.unpublished[row] = [one for one in kept if one not in done]
        self.pool.free(np.array([slot for _, slot, _ in done], np.int32))

    def verified(self, batch: InFlight) -> None:
        """Keep the checkpoints that rows have passed in a delivered verifying batch, and free the others."""
        steps = batch.steps
        assert steps is not None
        verifying = batch.plan.sample_rows >= batch.plan.extend_rows
        columns = batch.samplers.rows[verifying], batch.sampled_at[verifying], steps[verifying]
        for row, first, count in zip(*(column.tolist() for column in columns), strict=True):
            passed = range(first, first + count)  # positions that the states cover
            kept = self.unpublished.get(row, [])
            own = [one for one in kept if one[2] == batch.plan.batch_id]
            wrong = [one for one in own if one[0] * self.page_size not in passed]
            if len(wrong) < len(own):
                self.owed.discard(row)
            if wrong:
                self.unpublished[row] = [one for one in kept if one not in wrong]
                self.pool.free(np.array([slot for _, slot, _ in wrong], np.int32))

    def attach(self, page: int, slot: int) -> None:
        """Attach a loaded checkpoint to its cached page. It is freed if the page has another one by now."""
        if self.checkpoint_of[page] >= 0:
            self.pool.free(np.array([slot], np.int32))
            return
        self.checkpoint_of[page], self.page_of[slot] = slot, page
        self._touch(slot)

    def copied(self, row: int) -> None:
        """Unlock the checkpoint that a row has started from: the batch with the copy is collected."""
        source = self.reading.pop(row, NONE)
        if source >= 0:
            self.locks[source] -= 1

    def publish(self, row: int, pages: Int32s, collected: BatchId = NEWEST) -> None:
        """Move checkpoints of a row to its first pages, which are cached.

        Args:
            pages: these pages in the radix cache.
            collected: only checkpoints of batches up to this one are moved.
        """
        kept = self.unpublished.get(row)
        if not kept:
            return
        moved = [one for one in kept if one[0] <= pages.size and one[2] <= collected]
        self.unpublished[row] = [one for one in kept if one not in moved]
        for boundary, slot, _ in moved:
            page = int(pages[boundary - 1])
            if self.checkpoint_of[page] >= 0:
                self.pool.free(np.array([slot], np.int32))
                slot = int(self.checkpoint_of[page])
            else:
                self.checkpoint_of[page], self.page_of[slot] = slot, page
            self._touch(slot)

    def share(self, row: int, pages: Int32s, already: int) -> None:
        """Move checkpoints of a row to its first pages, which are cached while the batches that compute them are in
        flight.

        Only pages that were not cached `already` get one, since they are hidden again if their batch fails.
        """
        kept = self.unpublished.get(row, [])
        shared = [one for one in kept if already < one[0] <= pages.size]
        if shared:
            self.unpublished[row] = [one for one in kept if one not in shared]
        for boundary, slot, batch_id in shared:
            page = int(pages[boundary - 1])
            self.checkpoint_of[page], self.page_of[slot] = slot, page
            self._touch(slot)
            if batch_id >= self.in_flight[0].plan.batch_id:  # otherwise it is written already
                self.locks[slot] += 1
                self.unwritten[slot] = batch_id

    def written(self, batch_id: BatchId) -> None:
        """Unlock the checkpoints that a delivered or failed batch has written."""
        for slot in [slot for slot, writer in self.unwritten.items() if writer == batch_id]:
            self.locks[slot] -= 1
            del self.unwritten[slot]

    def failed(self, batch_id: BatchId, rows: list[int]) -> None:
        """Exclude checkpoints of these rows that a failed batch, or a batch behind it, has written from publication."""
        self.written(batch_id)
        for row in rows:
            if row in self.unpublished:
                self.unpublished[row] = [
                    (NEVER, slot, left_by) if left_by >= batch_id else (boundary, slot, left_by)
                    for boundary, slot, left_by in self.unpublished[row]
                ]

    def free_row(self, row: int) -> None:
        """Free the slots and checkpoints of a row that nothing in flight uses."""
        self.copied(row)
        slots = [int(self.slot_of[row]), *self.behind_drafts.pop(row, ())]
        slots += [slot for _, slot, _ in self.unpublished.pop(row, [])]
        self.slot_of[row] = NONE
        self.owed.discard(row)
        self.pool.free(np.array(slots, np.int32))

    def drop(self, pages: Int32s) -> None:
        """Free the checkpoints of full pages that are freed."""
        slots = self.checkpoint_of[pages]
        slots = slots[slots >= 0]
        if slots.size:
            self._discard(slots)

    # ---- snapshot and invariants

    def dump(self) -> dict[str, Any]:
        """Return the state in builtins."""
        return {
            "pool": self.pool.dump(),
            "clock": self.clock,
            "reading": list(self.reading.items()),
            "left": list(self.unpublished.items()),
            **({"behind_drafts": list(self.behind_drafts.items())} if self.by_row > 1 else {}),
            "starts": self.starts,
            **({"coming": list(self.incoming.items())} if self.incoming else {}),
            **({"unwritten": list(self.unwritten.items())} if self.unwritten else {}),
            **({"owed": sorted(self.owed)} if self.owed else {}),
            **{name: getattr(self, name).tobytes() for name in COLUMNS},
        }

    def load(self, state: dict[str, Any], table: RequestTable) -> None:
        """Take over the state that `dump` returned, with the restored request table."""
        self.table = table
        self.pool, self.clock, self.reading = PagePool.load(state["pool"]), state["clock"], dict(state["reading"])
        self.unpublished = {row: [tuple(one) for one in kept] for row, kept in state["left"]}
        self.starts = [tuple(start) for start in state["starts"]]
        self.incoming = {one: list(slots) for one, slots in state.get("coming", ())}
        self.behind_drafts = {row: list(slots) for row, slots in state.get("behind_drafts", ())}
        self.unwritten = dict(state.get("unwritten", ()))
        self.owed = set(state.get("owed", ()))
        for name in COLUMNS:
            setattr(self, name, np.frombuffer(state[name], getattr(self, name).dtype).copy())

    def check(self, facts: Facts, holders: list[tuple[str, int, int]], operations: Operations) -> None:
        """S1, S3, S9: a slot is free, of a row, or a checkpoint of a row or of one cached page; a copy locks it.

        Args:
            holders: name, row and computed positions of each row that is not free.
        """
        checkpoints = (self.page_of >= 0).nonzero()[0]
        moves = list(operations.values())
        loads = [moved for one in moves if one.kind == "load" for moved in one.blocks if moved.kind == "state"]
        owners = {
            "on their way": [slot for one in loads for slot in one.device.tolist()],
            "free": self.pool.free_ids().tolist(),
            "checkpoints": checkpoints.tolist(),
            **{name: [int(self.slot_of[row]), *self.behind_drafts.get(row, ())] for name, row, _ in holders},
            **{f"left by row {row}": [slot for _, slot, _ in kept] for row, kept in self.unpublished.items()},
            **{f"the transfer of r{request_id}": slots for request_id, slots in self.incoming.items()},
        }
        if sorted(chain.from_iterable(owners.values())) != list(range(self.pool.total)):
            misowned("S1 slots of state", self.pool.total, owners)
        pages = self.page_of[checkpoints]
        if not facts.is_cached[pages].all() or (self.checkpoint_of[pages] != checkpoints).any():
            fail(f"S3: checkpoints {checkpoints.tolist()} are of pages {pages.tolist()}, not all cached or not theirs")
        same("S3 pages with a checkpoint", int((self.checkpoint_of >= 0).sum()), checkpoints.size)
        taken = {row: name for name, row, _ in holders}
        if strays := [row for row in (*self.reading, *self.unpublished, *sorted(self.owed)) if row not in taken]:
            fail(f"S1: rows {strays} read, left or owe checkpoints, but have no holder")
        moving = [slot for one in moves for slot in one.slots_locked.tolist()]
        locked = np.array([*self.reading.values(), *self.unwritten, *moving], np.intp)
        locks = np.bincount(locked, minlength=self.pool.total)
        writers = {batch.plan.batch_id for batch in facts.in_flight}
        if orphans := [slot for slot, batch_id in self.unwritten.items() if batch_id not in writers]:
            fail(f"S9: checkpoints {orphans} are being written by batches that are not in flight")
        if (locks != self.locks).any() or (self.page_of[locks > 0] < 0).any():
            fail(f"S9: slots are locked {self.locks.tolist()}, they are being copied {locks.tolist()}")


COLUMNS = ("slot_of", "checkpoint_of", "page_of", "locks", "used")  # arrays of a snapshot
