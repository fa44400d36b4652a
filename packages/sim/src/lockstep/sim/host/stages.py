"""Stages of a simulated pipeline: when each is free, its busy time, and the times of its batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.core.contract.commands import BatchPlan
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.host.hybrid_memory import state_copies_us
from lockstep.sim.metrics.stages import StageTimes


class Stages:
    """The stages of a pipeline: batches go through them in the order of their launches."""

    def __init__(self, cost: PipelineModel) -> None:
        self.cost = cost
        self.free_us = [0.0] * len(cost.stages)
        self.busy_us = [0.0] * len(cost.stages)
        self._copies_us = state_copies_us(cost.model, cost.gpu, cost.split)  # by stage: copy of one request's state

    def with_copies(self, times_us: Sequence[float], copies: float) -> Sequence[float]:
        """Return the time in each stage plus that of `copies` state copies; a stage copies the part of its layers."""
        if not copies:
            return times_us
        return [us + copies * each for us, each in zip(times_us, self._copies_us, strict=True)]

    def run(
        self, now_us: float, times_us: Sequence[float], send_us: float, held_us: float = 0.0
    ) -> tuple[float, float, list[int]]:
        """Run a batch through all stages.

        Args:
            now_us: earliest start in the first stage.
            times_us: time in each stage.
            send_us: time to send the batch from one stage to the next.
            held_us: earliest start in any stage.
        Returns: start in the first stage; end in the last; start and stop in each stage, alternating, rounded.
        """
        started_us, spans = -1.0, list[int]()
        for stage, took_us in enumerate(times_us):
            now_us = max(now_us + (send_us if stage else 0.0), self.free_us[stage], held_us)
            started_us = started_us if stage else now_us
            now_us += took_us
            self.free_us[stage] = now_us
            self.busy_us[stage] += took_us
            spans += (round(now_us - took_us), round(now_us))
        return started_us, now_us, spans

    def sampled(self, at_us: float, sampling_us: float) -> None:
        """Account for a deferred sampling of `sampling_us` that ended in the last stage at `at_us`."""
        self.free_us[-1] = at_us
        self.busy_us[-1] += sampling_us

    def describe(self, busy_us: int | None) -> dict[str, Any]:
        """Return the busy times and shares of the stages, for metrics.json.

        Args:
            busy_us: time in which at least one batch was in the pipeline.
        """
        used_us = sum(self.busy_us)  # a batch that waits between two stages occupies none
        there_us = len(self.busy_us) * (busy_us or 0)
        return {
            "stages": len(self.busy_us),
            "stage_busy_us": [round(us) for us in self.busy_us],
            "stage_busy_share": round(used_us / there_us, 6) if there_us else None,
            "pipeline_bubble_us": max(0, round(there_us - used_us)),
        }


class StageNotes:
    """Times of each batch in each stage, without waits for grammars before it samples."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._noted = array("q")  # per pass: batch, microbatch, us of a send, then start and stop of each stage

    def add(self, plan: BatchPlan, send_us: float, spans: Sequence[int]) -> None:
        """Store the times of a batch that went through all stages."""
        self._noted.extend((plan.batch_id, plan.microbatch, round(send_us), *spans))

    def times(self) -> StageTimes:
        """Return all stored times as columns."""
        noted = np.frombuffer(self._noted, np.int64).reshape(-1, 3 + 2 * self._stages)
        return StageTimes(noted[:, 0], noted[:, 1], noted[:, 2], noted[:, 3::2], noted[:, 4::2])
