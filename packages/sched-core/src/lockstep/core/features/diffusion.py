"""Block diffusion: a model that answers in blocks of tokens instead of one token after the other.

A block starts as masks behind everything that is finished. Each pass computes the whole block: its positions attend to
each other in both directions, and to everything before them. The executor replaces masks by likely
tokens, at least one. When no mask is left, one more pass over the final tokens writes the KV that later blocks read,
because the KV of earlier passes is of masks. So a block with m masks takes 2 to m + 1 passes; its result is the only
one that shows how many (`BatchFinished.accepted`). Blocks begin at multiples of `block_tokens`, so the first one may
begin with the end of the prompt:

    prompt          | given  masks    |                 |            B = block_tokens
    0 ... B ... nB  |   P             | (n + 1)B        | (n + 2)B
                    first block        second block

`RunningState.positions` is where the newest block of a row ends, from its first pass on. `Diffuser.passes` is the
number of passes of it that were launched, or `FINISHED` when it has its tokens, so that the next pass begins another
block. A row therefore opens a page at most once per block, and needs none while its block goes on. Rows are
independent: each pass has a block of every member, whether it is the first pass of one and the last of another.

An extend computes all of a prompt. The KV of its last positions, if they do not fill a block, is overwritten by the
passes of the first block. A page holds whole blocks, so no page of the radix cache has KV that depends on tokens of
another page, and only pages of finished blocks with all of their tokens are published. Tokens of a block behind the end
of a request are dropped. A retracted request begins its block again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.core.contract.checks import fail
from lockstep.core.contract.commands import NO_DELTAS, NO_ROWS, BatchPlan, BlockPasses, PageDeltas, Step
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.delivery import step_numbers
from lockstep.core.requests.rules import ceil_to
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import ZERO, Int32s, Request, RequestState, RunningBatch

FINISHED = -1  # instead of a number of passes: the newest block of a row has all its tokens


class NextBlocks(NamedTuple):
    """The next pass over the blocks of a running batch. int32 [members] unless noted."""

    starts: Int32s
    stops: Int32s
    passes: Int32s  # of each block that were launched before
    given: Int32s  # leading tokens of each block that are given; 0 behind its first pass
    tokens: Int32s  # [sum of given], end to end
    deltas: PageDeltas


class DiffusionPart(Struct):
    """Passes of blocks in a snapshot, of an engine whose model answers in blocks."""

    block_passes: bytes | UnsetType = UNSET  # int32 by row


class Diffuser(Component):
    """Plans passes over blocks, and applies their results."""

    PART = DiffusionPart

    def __init__(self, scheduler: SchedulerView) -> None:
        self._scheduler = scheduler
        self.size = np.int32(scheduler.config.block_tokens)
        self.passes: Int32s = NO_ROWS  # by row

    def part(self) -> DiffusionPart:
        """Return the state for a snapshot."""
        return DiffusionPart(self.passes.tobytes() if self.size else UNSET)

    def load(self, part: DiffusionPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        if part.block_passes is not UNSET:
            self.passes = np.frombuffer(part.block_passes, np.int32).copy()

    def check_state(self, facts: Facts) -> None:
        """S39: blocks end at multiples of their size, begin before the end of their request, and take enough passes."""
        if not self.size:
            return
        members, positions = self._scheduler.all_running
        for request, stop in zip(members.requests, positions.tolist(), strict=True):
            passes, size = int(self.passes[request.row]), int(self.size)
            if stop % size or stop - size >= request.limit or (passes == FINISHED and stop >= request.limit):
                fail(f"S39: {request.name} decodes in a block that ends at {stop}, limit {request.limit}")
            if not FINISHED <= passes <= stop - max(stop - size, request.prompt_tokens) + 1:
                fail(f"S39: {request.name} has had {passes} passes of the block that ends at {stop}")

    # ------------------------------------------------------------------------------------------------------ the passes

    def begin(self, running: RunningState, prefilled: RunningBatch) -> None:
        """Add requests with a completely launched prompt: the next pass computes their first block."""
        stops = np.array([request.extend_stop for request in prefilled.requests], np.int32)
        table, ends = self._scheduler.memory.table, -(-stops // self.size) * self.size
        if self.passes.size < len(table.holders):
            more = np.full(len(table.holders) - self.passes.size, FINISHED, np.int32)
            self.passes = np.concatenate((self.passes, more))
        self.passes[prefilled.rows] = np.where(ends == stops, np.int32(FINISHED), ZERO)
        running.admit(prefilled, ends, table)

    def members_opening(self, members: RunningBatch, positions: Int32s) -> NDArray[np.intp]:
        """Return the members with a next pass that opens a page: it begins a block, and a page."""
        opens = (self.passes[members.rows] == FINISHED) & (positions % np.int32(self._scheduler.config.page_size) == 0)
        return np.flatnonzero(opens)

    # mechanism: block-diffusion (decided)
    def next_pass(self, running: RunningState, step: Step) -> NextBlocks:
        """Move members with a finished block on to the next one, and open its pages. The others compute theirs again.

        The pages are available.
        """
        members, positions, memory = running.batch, running.positions, self._scheduler.memory
        passes = self.passes[members.rows]
        stops: Int32s = positions + np.where(passes == FINISHED, self.size, ZERO)
        starts: Int32s = stops - self.size
        memory.table.reserve(int(stops.max()) // memory.table.page_size + 1, int((stops - members.prompts).max()) + 2)
        opening, deltas = self.members_opening(members, positions), NO_DELTAS
        if opening.size:
            index = positions[opening] // np.int32(memory.table.page_size)
            deltas = memory.open_pages(members.rows[opening], index, step)
        passes = np.maximum(passes, ZERO)
        given: Int32s = np.where(passes > 0, ZERO, np.clip(members.prompts - starts, ZERO, self.size))
        parts = [
            np.frombuffer(members.requests[i].tokens, np.int32, int(given[i]), 4 * int(starts[i]))
            for i in np.flatnonzero(given).tolist()
        ]
        self.passes[members.rows] = passes + np.int32(1)
        running.move_to(stops)
        return NextBlocks(starts, stops, passes, given, np.concatenate(parts) if parts else NO_ROWS, deltas)

    # ----------------------------------------------------------------------------------------------------- the results

    def settle(self, batch: InFlight, event: BatchFinished) -> Int32s:
        """Fold which blocks are finished. Returns their tokens, without those behind the lengths of their requests.

        Args:
            event: the batch's result, which `tokens_of_result` has checked.
        """
        samplers, counts = batch.samplers, counts_of(event, batch)
        self.passes[samplers.rows[counts > 0]] = FINISHED
        kept: Int32s = np.minimum(counts, samplers.limits - batch.sampled_at)
        batch.steps = kept
        tokens = np.frombuffer(event.tokens, np.int32)
        return tokens if (kept == counts).all() else tokens[step_numbers(counts) < kept.repeat(counts)]

    def outputs_of(self, request: Request) -> int:
        """Return the output tokens of a running request: those of its finished blocks."""
        if request.prefill_only:
            return request.outputs
        stop = self._scheduler.computed_of(request)
        finished = stop if self.passes[request.row] == FINISHED else stop - int(self.size)
        return max(finished - request.prompt_tokens, 0)

    def known_tokens(self, request: Request, outputs: int) -> int | None:
        """Return how many positions of a request have KV of its final tokens, in whole pages; None: all computed ones.

        A block that was cut has KV of tokens that were dropped. Its end is within a page, which is not counted.
        """
        if request.state is not RequestState.RUNNING or request.prefill_only:
            return None
        return request.prompt_tokens + outputs


def counts_of(event: BatchFinished, batch: InFlight) -> Int32s:
    """Return how many tokens each sampler got: those of its block if that is finished, otherwise 0. int32 [samplers]

    Raises: ContractError for other counts, and for a block that is not finished in time.
    """
    passes, size = batch.plan.blocks, batch.samplers.size
    assert passes is not None
    assert batch.steps is not None
    if event.accepted and len(event.accepted) != 4 * size:
        raise ContractError(
            f"batch {event.batch_id} has {len(event.accepted)} bytes of accepted counts, expected {4 * size}"
        )
    counts: Int32s = np.frombuffer(event.accepted, "<i4") if event.accepted else np.zeros(size, np.int32)
    wrong = np.flatnonzero((counts != 0) & (counts != batch.steps))
    if wrong.size:
        i = int(wrong[0])
        raise ContractError(
            f"batch {event.batch_id} reports {counts[i]} tokens of sampling row {i}: its block has {batch.steps[i]}, "
            "and 0 while masks are left"
        )
    late = np.flatnonzero((counts == 0) & (passes.numbers >= batch.steps))
    if late.size and not event.error:
        i = int(late[0])
        raise ContractError(
            f"batch {event.batch_id} leaves masks in the block of sampling row {i} after {passes.numbers[i] + 1} "
            f"passes: each pass replaces one of its {batch.steps[i]} masks at least"
        )
    return counts


def tokens_of_result(event: BatchFinished, batch: InFlight) -> int:
    """Return how many tokens the result of a pass over blocks must have. Raises ContractError like `counts_of`."""
    return int(counts_of(event, batch).sum())


def in_blocks(plan: BatchPlan, blocks: NextBlocks) -> BatchPlan:
    """Return the plan as a pass over blocks."""
    return replace(
        plan, mode="diffusion_extend", token_ids=blocks.tokens, blocks=BlockPasses(blocks.passes, blocks.given)
    )


def end_of(request: Request, size: int) -> int:
    """Return the most positions that are computed for a request: its last block is computed whole."""
    return ceil_to(max(request.limit, request.prompt_tokens), size)
