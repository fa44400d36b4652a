"""Shapes of batch plans, from which cost models compute the time of a batch: tokens, pairs, adapters, state copies."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from lockstep.core.contract.commands import (
    BatchPlan,
    Int32s,
)
from lockstep.core.features.two_batch import divided
from lockstep.core.kv.adapters import NO_SLOT
from lockstep.sim.cost import BatchShape


def adapters_of(plan: BatchPlan, slots: Int32s) -> tuple[int, int]:
    """Return the new tokens of a plan that run on adapters, and the number of distinct adapters.

    A plan of several steps counts the tokens of one step.
    Args:
        slots: int32 [rows], adapter slot of each row; NO_SLOT: no adapter.
    """
    on = slots >= 0
    if not on.any():
        return 0, 0
    counts = np.ones(len(slots), np.int64)
    extending = plan.extend_rows
    counts[:extending] = plan.stops[:extending] - plan.starts[:extending]
    if plan.speculation is not None:
        counts[extending:] += plan.speculation.draft_lengths
    if plan.blocks is not None:
        counts = (plan.stops - plan.starts).astype(np.int64)
    return int(counts[on].sum()), len(np.unique(slots[on]))


class RowAdapters:
    """Adapter slots by row, read from the plans that took the rows; for hosts that compute costs while they run."""

    def __init__(self) -> None:
        self._slots = np.full(1, NO_SLOT, np.int32)  # by row; grows with the highest row that was taken

    def take_rows(self, plan: BatchPlan) -> None:
        """Store the adapter slots of the rows that a plan takes. Call it for every plan, in the order of launches."""
        for taken in plan.rows_taken:
            if taken.row >= len(self._slots):
                more = np.full(2 * taken.row + 1 - len(self._slots), NO_SLOT, np.int32)
                self._slots = np.concatenate((self._slots, more))
            self._slots[taken.row] = taken.adapter_slot

    def on(self, plan: BatchPlan, shape: BatchShape) -> BatchShape:
        """Return `shape` with the plan's tokens on adapters and its number of distinct adapters."""
        tokens, adapters = adapters_of(plan, self._slots[plan.rows])
        return replace(shape, adapter_tokens=tokens, adapters=adapters) if tokens else shape


def state_copies(plan: BatchPlan) -> float:
    """Return the number of recurrent states that are copied with a plan: initial states of rows, and checkpoints.

    A state received by a transfer is not copied. A draft counts as half a copy: a state is written after it, none is
    read.
    """
    copies, changes = 0.0, plan.hybrid
    if changes is not None:
        copied = (changes.state_sources >= 0) & (changes.state_sources != changes.state_slots)
        copies += int(np.count_nonzero(copied)) + len(changes.checkpoint_slots)
    if plan.speculation is not None:
        copies += int(plan.speculation.drafted().sum()) / 2.0
    return copies


def halves_of(plan: BatchPlan, slots: Int32s | None = None) -> tuple[BatchShape, BatchShape]:
    """Return the shapes of the two halves of a plan that is split.

    Args:
        slots: int32 [rows], adapter slot of each row; None: no row is on an adapter.
    """
    assert plan.halves is not None
    first, second = divided(plan)
    shapes = []
    for half, own in ((first, slice(len(first.rows))), (second, slice(plan.halves.rows, None))):
        shape = extend_shape_of(half)
        if slots is not None:
            tokens, adapters = adapters_of(half, slots[own])
            shape = replace(shape, adapter_tokens=tokens, adapters=adapters)
        shapes.append(as_decodes(shape) if plan.mode == "prebuilt" else shape)
    return shapes[0], shapes[1]


def as_decodes(shape: BatchShape) -> BatchShape:
    """Return the shape of a prebuilt batch, with rows of transferred KV as decode rows."""
    return replace(
        shape,
        extend_rows=0,
        extend_tokens=0,
        extend_context_tokens=0,
        extend_pairs=0,
        decode_rows=shape.decode_rows + shape.extend_rows,
        decode_context_tokens=shape.decode_context_tokens + shape.extend_context_tokens,
    )


def extend_shape_of(plan: BatchPlan) -> BatchShape:
    """Return the shape of a plan with extend rows and, in a mixed batch, decode rows after them.

    A row that computes a block is a decode row that verifies a draft at every further position of the block.
    """
    extending = plan.extend_rows
    tokens = context_tokens = pairs = 0
    for start, stop in zip(plan.starts[:extending].tolist(), plan.stops[:extending].tolist(), strict=True):
        new = stop - start
        tokens += new
        context_tokens += start
        pairs += new * start + new * (new + 1) // 2
    further = int((plan.stops - plan.starts - 1).sum()) if plan.blocks is not None else 0
    return BatchShape(
        extend_rows=extending,
        extend_tokens=tokens,
        extend_context_tokens=context_tokens,
        extend_pairs=pairs,
        decode_rows=len(plan.rows) - extending,
        decode_context_tokens=int(np.add.reduce(plan.starts[extending:])) if extending < len(plan.rows) else 0,
        sampled_rows=len(plan.sample_rows) + further,
        draft_tokens=further,
    )
