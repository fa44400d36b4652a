"""The slots of each row, as a fold over plans: a row's own slot, those behind its drafts, and checkpoints.

Plans give rows their slots (`HybridChanges`), in launch order. Slots are known on the CPU, with one exception: a row
that verified drafts has its state in the slot behind the last right one, which only the device has (`stands_in`).

    slots[row]      own | behind draft 1 | behind draft 2 ...
    stands_in[row]  0 after every pass without drafts; the number of right drafts after a verification
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.commands import BatchPlan, HybridChanges
from lockstep.runtime.errors import PlanError
from lockstep.runtime.states.pool import StateTensors
from lockstep.runtime.states.view import StateGroup, StateView
from lockstep.runtime.tables import ForwardPass, PassTensors

Int64s = NDArray[np.int64]
Upload = Callable[[NDArray[np.int64]], Tensor]

ZEROS, AS_IT_IS, NONE = -1, -2, -1
NO_CHANGES = HybridChanges()


@dataclass(frozen=True, slots=True)
class PlannedStates:
    """What one plan does with states.

    Args:
        slots: int64 [rows of the engine, slots of a row], as of this plan; NONE: the row has none.
        cleared: int64 [n], slots that are filled with zeros before the batch.
        sources, targets: int64 [n], slots that are copied before the batch.
        kept: by row: the number of positions behind which its state is kept, and the slot.
        drafted: by row: drafts that it verifies, without forced tokens; rows without any are left out.
        forced: rows with forced tokens, whose positions are known.
    """

    slots: Int64s
    rows: Int64s
    cleared: Int64s
    sources: Int64s
    targets: Int64s
    kept: dict[int, tuple[int, int]]
    drafted: dict[int, int]
    forced: frozenset[int] = frozenset()

    def written(self) -> Int64s:
        """Return the slots that the batch writes."""
        own = [self.slots[row, : 1 + self.drafted.get(row, 0)] for row in self.rows.tolist()]
        kept = np.array([slot for _, slot in self.kept.values()], np.int64)
        return np.concatenate([*own, kept, self.cleared, self.targets])


class RowSlots:
    """The slots of all rows of an engine.

    Args:
        rows: rows of the engine, `SchedConfig.rows_max`.
        by_row: slots of a row, `SchedConfig.states_per_row`.
    """

    def __init__(self, pool: StateTensors, rows: int, by_row: int, device: torch.device) -> None:
        self.pool, self.by_row = pool, by_row
        self.slots: Int64s = np.full((rows, by_row), NONE, np.int64)  # as of the newest plan that was launched
        self.stands_in: Tensor | None = None
        if by_row > 1:
            self.stands_in = torch.zeros(rows + 1, dtype=torch.int64, device=device)

    # -------------------------------------------------------------------------------------------- at launch, on the CPU

    def take_in(self, plan: BatchPlan) -> PlannedStates:
        """Record the slots that a plan gives to rows. Raises PlanError for slots that do not exist, and rows without
        one."""
        changes = plan.hybrid or NO_CHANGES
        name = f"batch {plan.batch_id}"
        given = np.concatenate((changes.state_slots, changes.checkpoint_slots, changes.state_sources))
        if given.size and (int(given.max()) >= self.pool.slots or int(given.min()) < AS_IT_IS):
            raise PlanError(f"{name} names slots of states outside 0 to {self.pool.slots - 1}: {given.tolist()}")
        cleared, sources, targets = [], [], []
        counts: dict[int, int] = {}
        for row, slot, source in zip(
            changes.state_rows.tolist(), changes.state_slots.tolist(), changes.state_sources.tolist(), strict=True
        ):
            number = counts.get(row, 0) if source == AS_IT_IS else 0
            if number >= self.by_row:
                raise PlanError(f"{name} gives row {row} more than {self.by_row} slots of states")
            self.slots[row, number], counts[row] = slot, number + 1
            if source == ZEROS:
                cleared.append(slot)
            elif source not in (AS_IT_IS, slot):  # the slot itself: a transfer has written it
                sources.append(source)
                targets.append(slot)
        rows = plan.rows.astype(np.int64)
        if (self.slots[rows, 0] == NONE).any():
            lacking = rows[self.slots[rows, 0] == NONE].tolist()
            raise PlanError(f"{name} runs rows {lacking}, which have no slot of states")
        kept = {
            int(rows[index]): (position, slot)
            for index, position, slot in zip(
                changes.checkpoint_index.tolist(),
                changes.checkpoint_positions.tolist(),
                changes.checkpoint_slots.tolist(),
                strict=True,
            )
        }
        drafted: dict[int, int] = {}
        forced: frozenset[int] = frozenset()
        if plan.speculation is not None:
            decoding = rows[plan.extend_rows :]
            of_rows = zip(decoding.tolist(), plan.speculation.drafted().tolist(), strict=True)
            drafted = {row: count for row, count in of_rows if count}
            if plan.speculation.forced_lengths.size:
                forced = frozenset(decoding[plan.speculation.forced_lengths > 0].tolist())
        if any(count >= self.by_row for count in drafted.values()):
            raise PlanError(f"{name} verifies {max(drafted.values())} drafts of a row with {self.by_row} slots")
        return PlannedStates(
            slots=self.slots.copy(),
            rows=rows,
            cleared=np.array(cleared, np.int64),
            sources=np.array(sources, np.int64),
            targets=np.array(targets, np.int64),
            kept=kept,
            drafted=drafted,
            forced=forced,
        )

    # ------------------------------------------------------------------------------------------------- on the device

    def fold(self, planned: PlannedStates, upload: Upload) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """Clear and copy the states of rows that were taken. Called once per plan, in launch order.

        Returns: the cleared slots, and sources and targets of copies; None where there are none.
        """
        cleared: Tensor | None = None
        copied: tuple[Tensor, Tensor] | None = None
        if planned.cleared.size:
            cleared = upload(planned.cleared)
            self.pool.clear(cleared)
        if planned.sources.size:
            copied = upload(planned.sources), upload(planned.targets)
            self.pool.copy(*copied)
        return cleared, copied

    def restart(self, rows: Int64s, upload: Upload) -> None:
        """Let rows that were taken stand in their own slot."""
        if self.stands_in is not None and rows.size:
            self.stands_in.index_fill_(0, upload(rows), 0)

    def view(self, planned: PlannedStates, one: ForwardPass, tensors: PassTensors, upload: Upload) -> StateView:
        """Return the states of a pass. Called right before it, in launch order."""
        rows = one.rows.astype(np.int64)
        own = planned.slots[rows, 0]
        begins = upload(own)
        if self.stands_in is not None:
            at = upload(rows)
            all_of = upload(planned.slots[rows])
            begins = all_of.gather(1, self.stands_in.index_select(0, at)[:, None])[:, 0]
            self.stands_in.index_fill_(0, at, 0)
        counts = (one.stops - one.starts).astype(np.int64)
        if one.verifying is None and (counts == 1).all() and one.starts.all():
            writes = begins if self.stands_in is None else upload(own)
            return StateView(self.pool, begins, [_single(planned, one, begins, writes, upload)])
        segments = _segments(planned, one, counts)
        groups = [_group(some, key, begins, upload) for key, some in sorted(segments.items())]
        copies = self._checkpoints(planned, one, tensors, upload) if one.verifying is not None else None
        return StateView(self.pool, begins, groups, copies)

    def verified(self, planned: PlannedStates, rows_host: Int64s, accepted: Tensor, upload: Upload) -> None:
        """Let rows that verified drafts stand behind the last right one.

        Args:
            rows_host: rows, by sampler of the pass; accepted: int64 [samplers], accepted samples of each.
        """
        places = np.array([i for i, row in enumerate(rows_host.tolist()) if row in planned.drafted], np.int64)
        if places.size and self.stands_in is not None:
            right = accepted.index_select(0, upload(places)).to(torch.int64) - 1
            self.stands_in.index_copy_(0, upload(rows_host[places]), right)

    def _checkpoints(
        self, planned: PlannedStates, one: ForwardPass, tensors: PassTensors, upload: Upload
    ) -> tuple[Tensor, Tensor] | None:
        """Return the copies of states to checkpoints behind the pass, for rows whose position is on the device only.

        Of a row that does not pass the position any state is copied, and the scheduler drops it.
        """
        verifying, there = one.verifying, tensors.verifying
        assert verifying is not None
        assert there is not None
        found = [
            (i, *planned.kept[row])
            for i, row in enumerate(verifying.rows.tolist())
            if row in planned.kept and row not in planned.forced
        ]
        if not found:
            return None
        index, positions, slots = (np.array(column, np.int64) for column in zip(*found, strict=True))
        kept_rows = verifying.rows[index].astype(np.int64)
        most = np.array([planned.drafted.get(row, 0) for row in kept_rows.tolist()], np.int64)
        number = upload(positions) - 1 - there.stands.index_select(0, upload(index))
        number = torch.minimum(number.clamp(min=0), upload(most))
        sources = upload(planned.slots[kept_rows]).gather(1, number[:, None])[:, 0]
        return sources, upload(slots)


@dataclass(frozen=True, slots=True)
class _Segment:
    """New tokens of a row up to the next state that is stored."""

    row: int  # index in the pass
    first: int  # new token of the pass
    read: int  # slot; NONE: where the row begins
    write: int
    kept: int = NONE  # a second slot


GroupKey = tuple[int, int, bool]
"""Number of a segment in its row, its length, and whether it begins a request."""


def _segments(planned: PlannedStates, one: ForwardPass, counts: Int64s) -> dict[GroupKey, list[_Segment]]:
    """Return the segments of a pass by what is computed together."""
    found: dict[GroupKey, list[_Segment]] = {}
    indptr = one.indptr.tolist()
    open_ones = set() if one.verifying is None else set(one.verifying.rows.tolist()) - planned.forced
    for i, (row, count) in enumerate(zip(one.rows.tolist(), counts.tolist(), strict=True)):
        own, first = planned.slots[row].tolist(), indptr[i]
        if row in planned.drafted:
            for number in range(count):
                read = NONE if number == 0 else own[number - 1]
                found.setdefault((number, 1, False), []).append(_Segment(i, first + number, read, own[number]))
            continue
        position, slot = (NONE, NONE) if row in open_ones else planned.kept.get(row, (NONE, NONE))
        start = int(one.starts[i])
        before = position - start
        if not 0 < before <= count:
            found.setdefault((0, count, not start), []).append(_Segment(i, first, NONE, own[0]))
            continue
        found.setdefault((0, before, not start), []).append(_Segment(i, first, NONE, own[0], slot))
        if before < count:
            found.setdefault((1, count - before, False), []).append(_Segment(i, first + before, own[0], own[0]))
    return found


def _group(some: list[_Segment], key: GroupKey, begins: Tensor, upload: Upload) -> StateGroup:
    number, length, fresh = key
    firsts = np.array([one.first for one in some], np.int64)
    tokens = (firsts[:, None] + np.arange(length, dtype=np.int64)).reshape(-1)
    if number:
        reads = upload(np.array([one.read for one in some], np.int64))
    else:
        reads = begins.index_select(0, upload(np.array([one.row for one in some], np.int64)))
    writes = upload(np.array([one.write for one in some], np.int64))
    kept = np.array([place for place, one in enumerate(some) if one.kept != NONE], np.int64)
    if not kept.size:
        return StateGroup(length, upload(tokens), reads, writes, fresh)
    slots = np.array([one.kept for one in some if one.kept != NONE], np.int64)
    return StateGroup(length, upload(tokens), reads, writes, fresh, upload(kept), upload(slots))


def _single(planned: PlannedStates, one: ForwardPass, begins: Tensor, writes: Tensor, upload: Upload) -> StateGroup:
    """Return the group of a pass in which every row computes one token."""
    if not planned.kept:
        return StateGroup(1, None, begins, writes)
    stops = one.stops.tolist()
    found = [
        (i, planned.kept[row][1])
        for i, row in enumerate(one.rows.tolist())
        if row in planned.kept and planned.kept[row][0] == stops[i]
    ]
    if not found:
        return StateGroup(1, None, begins, writes)
    kept, slots = (np.array(column, np.int64) for column in zip(*found, strict=True))
    return StateGroup(1, None, begins, writes, kept=upload(kept), kept_in=upload(slots))
