"""The device of an engine with several pipeline stages: batches pass through the stages one after another.

    stage 1   | prefill 4 | prefill 5 |          | decode 7 ...        decode 7 waits for its newest token, which
    stage 2        . | prefill 4 | prefill 5 |...                      batch 5 samples in the last stage

A batch enters the first stage when that stage is free, and each further stage when it has been sent there and the stage
is free. A decode row needs the token that was sampled last for it. If a batch in flight samples this token, the decode
waits until the token is back at the first stage. So consecutive decodes of the same rows never overlap, while prefills
follow each other without a gap.

A head drafts in the last stage, after its sampling, for the next pass of its rows; drafts go back to the first stage
with the newest token. A draft model drafts in the first stage, before it runs a batch. Either lengthens the batch, as
it does with one stage.

The first stage encodes media, because it needs their embeddings: after the batches that have left it and before those
that come next, while the other stages continue.

The engine has `overlap_depth + 1` batches in flight and one running batch. With microbatches (`pp_size`) it has as many
batches in flight of each; they divide its rows and keep stages busier in decodes. The times of their batches in each
stage are stored for the timeline.

Each stage copies the linear-attention states of its own layers before it runs a batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from msgspec import structs

from lockstep.core.contract.commands import BatchPlan
from lockstep.sim.cost import BatchShape, CostModel
from lockstep.sim.cost.multiplexing import MultiplexedModel
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.host.batch_shapes import state_copies
from lockstep.sim.host.device import Device, Running, Untimed
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.stages import StageNotes, Stages
from lockstep.sim.host.streams import StreamsDevice
from lockstep.sim.metrics.run_data import RunData


def device_type_of(cost: CostModel) -> type[Device]:
    """Return the type of device that runs batches of this cost model."""
    if isinstance(cost, MultiplexedModel):
        return StreamsDevice
    return PipelinedDevice if isinstance(cost, PipelineModel) else Device


def with_stages(data: RunData, host: EngineHost) -> RunData:
    """Return the run with the busy times of the stages, and with microbatches the times of batches in the stages.

    A run with one stage is returned unchanged.
    """
    stages, notes, several = host.device.stages, host.device.notes, host.engine.microbatches
    if stages is None:
        return data
    device = data.summary["device"]
    device["pipeline"] = stages.describe(device["busy_us"])
    if not several.several or notes is None:
        return data
    times = notes.times()
    device["pipeline"]["microbatches"] = several.count
    device["pipeline"]["batches_by_microbatch"] = np.bincount(times.microbatch, minlength=several.count).tolist()
    device["pipeline"]["stage_bubble_us"] = [sum(stop - start for start, stop in gaps) for gaps in times.bubbles()]
    return replace(data, stages=times)


# mechanism: pipeline-stages (simulated)
class PipelinedDevice(Device):
    """A device of several stages. Batches pass through them in the order of launches, from the first to the last."""

    def __init__(self, cost: PipelineModel, rows_max: int, *, seed: int, name: str, early_eos: bool) -> None:
        super().__init__(cost, rows_max, seed=seed, name=name, early_eos=early_eos)
        self._pipeline = cost
        self.stages: Stages = Stages(cost)
        self.notes: StageNotes = StageNotes(len(cost.stages))
        self._token_back_us = np.zeros(rows_max, np.float64)  # by row: when its newest token is at the first stage
        self._last_us = 0  # end of the last batch handed over
        self._untimed_shapes: dict[int, BatchShape] = {}  # by batch

    def launch(self, plan: BatchPlan, shape: BatchShape, handed_over_us: int) -> None:
        """Run `plan` behind the batches launched before. Its tokens are drawn now, before its rows change requests."""
        tokens = self._sample(plan).tobytes()
        accepted = b"" if plan.speculation is None else self._accepted(plan)
        if plan.sample_after is not None or self.untimed:
            sampled_us = 0 if plan.sample_after is None else None
            self.untimed.append(Untimed(plan, handed_over_us, 0.0, 0.0, tokens, sampled_us, accepted))
            self._untimed_shapes[plan.batch_id] = shape
            return
        self._run(plan, shape, handed_over_us, tokens, accepted, 0)

    def hold_until(self, us: int) -> None:
        """Delay the start of batches handed over from now on to `us`, in every stage."""
        self.stages.free_us = [max(free_us, float(us)) for free_us in self.stages.free_us]

    @property
    def free_us(self) -> int:
        """Time at which all batches handed over will have run."""
        return self._last_us

    @property
    def encoder_free_us(self) -> int:
        """Time at which the first stage, which encodes, will have run all batches handed over."""
        return math.ceil(self.stages.free_us[0])

    def encode_until(self, us: int) -> None:
        """Delay batches in the first stage to `us`; the other stages continue."""
        self.stages.free_us[0] = max(self.stages.free_us[0], float(us))

    def sample(self, batch_id: int, at_us: int) -> None:
        """Let a deferred batch sample, because its matchers have moved, and time all batches that can be timed."""
        for _ in range(len(self.untimed)):
            batch = self.untimed.popleft()
            self.untimed.append(batch._replace(sampled_us=at_us) if batch.plan.batch_id == batch_id else batch)
        while self.untimed and self.untimed[0].sampled_us is not None:
            plan, handed_over_us, _, _, tokens, sampled_us, accepted = self.untimed.popleft()
            shape = self._untimed_shapes.pop(plan.batch_id)
            self._run(plan, shape, handed_over_us, tokens, accepted, sampled_us or 0)

    def _run(
        self, plan: BatchPlan, shape: BatchShape, handed_over_us: int, tokens: bytes, accepted: bytes, sampled_us: int
    ) -> None:
        """Compute the times of a batch in all stages and queue its result.

        Args:
            sampled_us: earliest time at which it samples; 0: it samples with its forward pass.
        """
        pipeline = self._pipeline
        draft_us = 0.0 if self.speculation is None else self.speculation.draft_us(plan, shape)
        send_us = pipeline.send_us(shape.extend_tokens + shape.decode_rows + shape.draft_tokens)
        back_us = pipeline.send_us(max(shape.sampled_rows, 1))
        decoding = plan.rows[plan.extend_rows :]
        now_us = max(float(handed_over_us), float(self._token_back_us[decoding].max()) if decoding.size else 0.0)
        begun_us = 0
        copies = state_copies(plan) if self.state_copy_us else 0.0
        for step in range(plan.steps):
            if step:
                shape = structs.replace(shape, decode_context_tokens=shape.decode_context_tokens + shape.decode_rows)
                now_us += back_us
            times_us, sampling_us = pipeline.stage_us(shape), 0.0
            if sampled_us:  # the forward pass of the last stage may run before `sampled_us`
                last = pipeline.stage_us(structs.replace(shape, sampled_rows=0))[-1]
                sampling_us, times_us[-1] = times_us[-1] - last, last
            if pipeline.split.drafts_first:
                times_us[0] += draft_us
            elif sampled_us:
                sampling_us += draft_us
            else:
                times_us[-1] += draft_us
            started_us, now_us, spans = self.stages.run(
                now_us, times_us if step else self.stages.with_copies(times_us, copies), send_us
            )
            begun_us = begun_us if step else round(started_us)
            if self.notes_times:
                self.notes.add(plan, send_us, spans)
            if sampled_us:
                now_us = max(now_us, float(sampled_us)) + sampling_us
                self.stages.sampled(now_us, sampling_us)
        self._last_us = finished_us = max(begun_us + 1, round(now_us), self._last_us)
        if plan.sample_rows.size:
            self._token_back_us[plan.rows[plan.sample_rows]] = finished_us + back_us
        self.queue.append(
            Running(plan.batch_id, plan.generation, len(plan.rows), begun_us, finished_us, tokens, accepted)
        )
