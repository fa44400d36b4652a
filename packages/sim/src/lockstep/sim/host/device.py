"""The device lane: runs batches one after another and samples their tokens."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from lockstep.core.contract.commands import (
    NO_ROWS,
    BatchPlan,
    Int32s,
)
from lockstep.core.contract.commands import Speculation as PlannedSpeculation
from lockstep.core.contract.events import BatchId
from lockstep.core.kv.adapters import NO_SLOT
from lockstep.core.requests.delivery import step_numbers
from lockstep.sim.cost import BatchShape, CostModel
from lockstep.sim.cost.draws import drawn_factor
from lockstep.sim.host.batch_shapes import adapters_of, extend_shape_of, halves_of, state_copies
from lockstep.sim.host.blocks import BlockRows
from lockstep.sim.host.speculation import SpeculationModel
from lockstep.sim.workload.samples import sample_first_token
from lockstep.sim.workload.token_runs import TOKEN_IDS
from lockstep.sim.workload.turns import Turn

if TYPE_CHECKING:
    from lockstep.sim.host.stages import StageNotes, Stages

EOS_TOKEN_ID = TOKEN_IDS - 1
"""Token that ends an answer before its limit. Workloads use lower ids, so no other token has this id."""
SAMPLE_STRIDE = 2**40  # added to a turn's index for each further sample, so that its drafts are drawn independently


class Running(Struct, frozen=True, gc=False):
    """A batch on the device, with its outcome."""

    batch_id: BatchId
    generation: int
    rows: int
    started_us: int
    finished_us: int
    tokens: bytes  # int32; per sampling row one token, or with drafts as many as in `accepted`
    accepted: bytes = b""  # int32 [sampling rows], of a batch that verifies drafts or computes blocks; else empty


class Untimed(NamedTuple):
    """A batch with an unknown end time: its sampling is deferred, or it runs after a batch with deferred sampling."""

    plan: BatchPlan
    handed_over_us: int
    forward_us: float
    sampling_us: float
    tokens: bytes
    sampled_us: int | None  # earliest time of its sampling; None: not known yet
    accepted: bytes = b""


class Device:
    """The GPU lane: runs batches in the order of launches, each for the time of the cost model."""

    def __init__(self, cost: CostModel, rows_max: int, *, seed: int, name: str, early_eos: bool) -> None:
        self.cost = cost  # changes while experts move
        self.speculation: SpeculationModel | None = None  # None: the engine verifies no drafts
        self.blocks: BlockRows | None = None  # None: the model answers token by token
        self.state_copy_us = 0.0  # copy of one request's recurrent state, if checkpoints are kept
        self.stages: Stages | None = None  # None: not a pipeline
        self.notes: StageNotes | None = None  # times of each batch in each stage; None: not a pipeline
        self.notes_times = False  # whether `notes` are filled
        self._verified: tuple[Int32s, Int32s] = (NO_ROWS, NO_ROWS)  # plan of the last `shape_of`: starts, accepted
        self._right = NO_ROWS  # likewise: numbers of the right drafts of trees
        self._seed = seed
        self._name = name
        self._early_eos = early_eos
        self._free_us = 0  # end of the last batch handed over
        self.queue: deque[Running] = deque()
        self.untimed: deque[Untimed] = deque()  # run after the batches of `queue`
        # By row: the token sampled at a position is the position plus `_token_base`; `_last_position` is the answer's.
        self._token_base = np.zeros(rows_max, np.int32)
        self._last_position = np.zeros(rows_max, np.int32)
        # The last decode. The engine passes the same array of rows for as long as the same requests decode together.
        self._decode_rows = NO_ROWS
        self._decode_token_base = NO_ROWS
        self._decode_context_tokens = 0
        self._decode_adapters = (0, 0)  # rows on adapters, and distinct adapters, of the last decode
        # Adapter slot by row; None: the engine has no adapters.
        self.adapter_slots: Int32s | None = None

    def take_row(self, row: int, turn: Turn, adapter_slot: int = NO_SLOT, sample: int = 0) -> None:
        """Assign a row to an answer of a turn. Token i of the answer is sampled at position prompt_tokens + i."""
        if self.adapter_slots is not None:
            self.adapter_slots[row] = adapter_slot
        self._token_base[row] = sample_first_token(turn, sample) - turn.prompt_tokens
        self._last_position[row] = turn.prompt_tokens + turn.output_tokens - 1
        if self.speculation is not None:
            self.speculation.take_row(row, turn.index + sample * SAMPLE_STRIDE)
        if self.blocks is not None:
            self.blocks.take_row(row, turn.index + sample * SAMPLE_STRIDE)

    def shape_of(self, plan: BatchPlan) -> BatchShape:
        """Return the shape of a plan. Call it once for each plan, in the order of launches."""
        shape = (
            self._shape_of(plan) if self.adapter_slots is None else self._shape_on_adapters(plan, self.adapter_slots)
        )
        if plan.halves is None:
            return shape
        return replace(shape, halves=halves_of(plan, self._slots_of(plan)))

    def _slots_of(self, plan: BatchPlan) -> Int32s | None:
        """Return the adapter slot of each row of a plan; None: the engine has no adapters."""
        return None if self.adapter_slots is None else self.adapter_slots[plan.rows]

    def _shape_on_adapters(self, plan: BatchPlan, adapter_slots: Int32s) -> BatchShape:
        """Return the shape of a plan with its rows on adapters, without its halves."""
        if plan.rows is self._decode_rows:
            on_adapters = self._decode_adapters
        else:
            on_adapters = adapters_of(plan, adapter_slots[plan.rows])
        shape = self._shape_of(plan)
        if plan.rows is self._decode_rows:
            self._decode_adapters = on_adapters
        tokens, adapters = on_adapters
        return replace(shape, adapter_tokens=tokens, adapters=adapters) if tokens else shape

    def _shape_of(self, plan: BatchPlan) -> BatchShape:
        """Return the shape of a plan without its adapters."""
        if self.speculation is not None:
            return self._verify(plan, self.speculation)
        if plan.speculation is not None:
            return self._jump(plan, plan.speculation)
        if self.blocks is not None and plan.blocks is not None:
            return self.blocks.shape_of(plan)
        if plan.mode != "decode":
            if plan.extend_rows < len(plan.rows):
                self._decode_rows = NO_ROWS  # decode rows advance in this batch without `_decode_context_tokens`
            return extend_shape_of(plan)
        rows = plan.rows
        if rows is self._decode_rows:
            self._decode_context_tokens += len(rows) * plan.steps  # every row has advanced by `steps` positions
        else:
            self._decode_rows = rows
            self._decode_token_base = self._token_base.take(rows)
            self._decode_context_tokens = int(np.add.reduce(plan.starts))
        return BatchShape(
            decode_rows=len(rows), decode_context_tokens=self._decode_context_tokens, sampled_rows=len(rows)
        )

    def launch(self, plan: BatchPlan, shape: BatchShape, handed_over_us: int) -> None:
        """Run `plan` behind the batches launched before. Its tokens are drawn now, before its rows change requests."""
        expected = self.cost.batch_us(shape)
        took_us = expected_us = expected.mean_us if plan.steps == 1 else self._steps_us(plan, shape)
        if expected.spread_us > 0.0:
            took_us *= drawn_factor(expected, f"{self._seed} {self._name}", plan.batch_id)
        if self.state_copy_us:
            states_us = self.state_copy_us * state_copies(plan)
            took_us, expected_us = took_us + states_us, expected_us + states_us
        if self.speculation is not None:
            draft_us = self.speculation.draft_us(plan, shape)
            took_us, expected_us = took_us + draft_us, expected_us + draft_us
        tokens = self._sample(plan).tobytes()
        accepted = b"" if plan.speculation is None and plan.blocks is None else self._accepted(plan)
        if plan.sample_after is not None or self.untimed:
            sampling_us = expected_us - self.cost.batch_us(replace(shape, sampled_rows=0)).mean_us
            sampled_us = 0 if plan.sample_after is None else None
            forward_us = took_us - sampling_us
            untimed = Untimed(plan, handed_over_us, forward_us, sampling_us, tokens, sampled_us, accepted)
            self.untimed.append(untimed)
            return
        started_us = self._free_us if self._free_us > handed_over_us else handed_over_us
        self._free_us = finished_us = started_us + max(1, round(took_us))
        self.queue.append(
            Running(plan.batch_id, plan.generation, len(plan.rows), started_us, finished_us, tokens, accepted)
        )

    def _steps_us(self, plan: BatchPlan, shape: BatchShape) -> float:
        """Return the expected time of a plan of several steps. Every step has all rows, one position further."""
        expected_us = 0.0
        for further in range(plan.steps):
            context_tokens = shape.decode_context_tokens + further * shape.decode_rows
            expected_us += self.cost.batch_us(replace(shape, decode_context_tokens=context_tokens)).mean_us
        return expected_us

    @property
    def free_us(self) -> int:
        """Time at which all timed batches will have run."""
        return self._free_us

    def hold_until(self, us: int) -> None:
        """Delay the start of batches handed over from now on to `us`."""
        self._free_us = max(self._free_us, us)

    @property
    def encoder_free_us(self) -> int:
        """Time at which the GPUs that encode will have run all batches handed over; NEVER_US: not known yet."""
        return self.free_us

    def encode_until(self, us: int) -> None:
        """Delay batches handed over from now on, on the GPUs that encode, to `us`."""
        self.hold_until(us)

    def sample(self, batch_id: BatchId, at_us: int) -> None:
        """Let a deferred batch sample, because its matchers have moved, and time all batches that can be timed."""
        untimed = [b._replace(sampled_us=at_us) if b.plan.batch_id == batch_id else b for b in self.untimed]
        self.untimed = deque(untimed)
        while self.untimed and self.untimed[0].sampled_us is not None:
            plan, handed_over_us, forward_us, sampling_us, tokens, sampled_us, accepted = self.untimed.popleft()
            started_us = max(self._free_us, handed_over_us)
            ready_us = max(started_us + forward_us, sampled_us or 0)
            self._free_us = finished_us = max(started_us + 1, round(ready_us + sampling_us))
            self.queue.append(
                Running(plan.batch_id, plan.generation, len(plan.rows), started_us, finished_us, tokens, accepted)
            )

    def _sample(self, plan: BatchPlan) -> Int32s:
        """Return the tokens of a plan's sampling rows."""
        if plan.speculation is not None or plan.blocks is not None:
            return self._sample_runs(plan)
        if plan.steps > 1:
            return self._sample_steps(plan)
        if not plan.sample_rows.size:
            return NO_ROWS
        stops = plan.stops
        if plan.rows is self._decode_rows:
            rows, tokens = plan.rows, self._decode_token_base + stops
        else:
            rows, stops = plan.rows.take(plan.sample_rows), stops.take(plan.sample_rows)  # half the time of `[]`
            tokens = self._token_base.take(rows) + stops
        if self._early_eos:
            tokens[stops == self._last_position[rows]] = EOS_TOKEN_ID
        return tokens

    def _verify(self, plan: BatchPlan, speculation: SpeculationModel) -> BatchShape:
        """Return the shape of a plan of an engine that verifies drafts; its rows advance by what is accepted."""
        extending = plan.extend_rows
        speculation.extended(plan.rows[:extending], plan.stops[:extending])
        shape = extend_shape_of(plan)
        if plan.speculation is None:
            return shape
        drafts = plan.speculation.draft_lengths
        self._right = NO_ROWS
        if plan.speculation.parents.size:
            *verified, self._right = speculation.verify_tree(plan.rows[extending:], plan.speculation)
            self._verified = verified[0], verified[1]
        else:
            self._verified = speculation.verify(plan.rows[extending:], drafts, plan.speculation.forced_lengths)
        draft_tokens = int(drafts.sum())
        return replace(
            shape,
            decode_context_tokens=int(self._verified[0].sum()),
            sampled_rows=shape.sampled_rows + draft_tokens,
            draft_tokens=draft_tokens,
        )

    def _jump(self, plan: BatchPlan, jumps: PlannedSpeculation) -> BatchShape:
        """Return the shape of a plan that computes forced tokens, of an engine that verifies no drafts."""
        starts, forced = plan.starts[plan.extend_rows :], jumps.forced_lengths
        self._decode_rows = NO_ROWS  # decode rows advance in this batch without `_decode_context_tokens`
        self._verified = (starts, forced + np.int32(1))
        shape, tokens = extend_shape_of(plan), int(forced.sum())
        return replace(
            shape,
            decode_context_tokens=int(starts.sum()),
            sampled_rows=shape.sampled_rows + tokens,
            draft_tokens=tokens,
        )

    def _accepted(self, plan: BatchPlan) -> bytes:
        """Return `BatchFinished.accepted` of a plan that verifies drafts or forced tokens, or computes blocks."""
        return self._counts(plan).tobytes() + self._right.tobytes()

    def _counts(self, plan: BatchPlan) -> Int32s:
        """Return the number of tokens of each sampling row of a plan that verifies. int32 [sampling rows]"""
        if self.blocks is not None and plan.blocks is not None:
            return self.blocks.counts()
        accepted = np.ones(len(plan.sample_rows), np.int32)
        accepted[plan.sample_rows >= plan.extend_rows] = self._verified[1]
        return accepted

    def _sample_runs(self, plan: BatchPlan) -> Int32s:
        """Return the tokens of a plan that verifies drafts, or computes blocks: row after row, end to end."""
        counts = self._counts(plan)
        first = plan.stops[plan.sample_rows]
        if plan.blocks is not None:
            first -= counts
        else:
            first[plan.sample_rows >= plan.extend_rows] = self._verified[0] + np.int32(1)
        rows = plan.rows[plan.sample_rows].repeat(counts)
        stops = first.repeat(counts) + step_numbers(counts)
        tokens: Int32s = self._token_base[rows] + stops
        if self._early_eos:
            tokens[stops == self._last_position[rows]] = EOS_TOKEN_ID
        return tokens

    def tokens_of(self, row: int, start: int, stop: int) -> Int32s:
        """Return the tokens that a row samples at positions [start:stop), without the last token of its answer."""
        stop = min(stop, int(self._last_position[row]))
        tokens: Int32s = self._token_base[row] + np.arange(start, max(stop, start), dtype=np.int32)
        return tokens

    # mechanism: several-decodes (simulated)
    def _sample_steps(self, plan: BatchPlan) -> Int32s:
        """Return the tokens of a plan that decodes several times: row after row, end to end."""
        counts = plan.stops - plan.starts
        rows = plan.rows.repeat(counts)
        stops = plan.starts.repeat(counts) + step_numbers(counts) + np.int32(1)
        tokens: Int32s = self._token_base[rows] + stops
        if self._early_eos:
            tokens[stops == self._last_position[rows]] = EOS_TOKEN_ID
        return tokens
