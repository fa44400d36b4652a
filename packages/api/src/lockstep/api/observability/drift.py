"""Measured over predicted time of each batch while a server runs.

`DriftMeter.fold` is an observer of the host: the duration of a batch is predicted when it is launched, and compared
with its measured times when it is collected. The cost is a few microseconds per batch. The counts are sent to the
workers with the gauges, and exported by the workers to Prometheus (docs/serving.md, "Drift").
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from msgspec.structs import replace

from lockstep.api.processes.wire import RATIOS, BatchDrift
from lockstep.core.contract.commands import BatchPlan, Step
from lockstep.core.contract.events import BatchFinished, EngineRestarted, ObservedEvent
from lockstep.sim.cost import BatchShape, CostModel
from lockstep.sim.host.batch_shapes import RowAdapters, extend_shape_of
from lockstep.sim.results.batch_times import Durations


class DriftMeter:
    """Counts batches by kind (extend, decode, mixed) and by measured over predicted time.

    Args:
        speed: speed-up of an emulated engine, by which its predictions are divided.
        adapters: the adapters of the rows, for a cost model that prices them.
    """

    def __init__(self, cost: CostModel, speed: float = 1.0, adapters: RowAdapters | None = None) -> None:
        self._cost, self._speed, self._adapters = cost, speed, adapters
        # by batch in flight: its kind, and its predicted microseconds
        self._expected: dict[int, tuple[str, float]] = {}
        self._durations = Durations()
        self._kinds: dict[str, _Kind] = {}

    def fold(self, event: ObservedEvent, step: Step) -> None:
        """Predict the batch that a Step launches; count the batch that an event finishes."""
        if type(event) is BatchFinished:
            expected = self._expected.pop(event.batch_id, None)
            took_us = self._durations.took_us(event.started_us, event.finished_us)
            if expected is not None and took_us and not event.error:
                mode, predicted_us = expected
                kind = self._kinds.get(mode)
                if kind is None:
                    kind = self._kinds[mode] = _Kind()
                kind.add(took_us, predicted_us)
        elif type(event) is EngineRestarted:
            self._expected.clear()
        plan = step.launched()
        if plan is not None and self._adapters is not None:
            self._adapters.take_rows(plan)
        if plan is not None and plan.sample_after is None and len(plan.rows):
            self._expected[plan.batch_id] = plan.mode, self._predicted_us(plan) / self._speed

    def read(self) -> tuple[BatchDrift, ...]:
        """Return all counts so far."""
        return tuple(
            BatchDrift(mode, tuple(kind.counts), kind.ratios, kind.took_us / 1e6, kind.predicted_us / 1e6)
            for mode, kind in self._kinds.items()
        )

    def _predicted_us(self, plan: BatchPlan) -> float:
        if plan.extend_rows:
            shape = extend_shape_of(plan)
            context_tokens = shape.decode_context_tokens
        else:
            rows, context_tokens = len(plan.rows), int(np.add.reduce(plan.starts))
            shape = BatchShape(decode_rows=rows, decode_context_tokens=context_tokens, sampled_rows=rows)
        if plan.speculation is not None:
            drafts = int(plan.speculation.draft_lengths.sum())
            shape = replace(shape, sampled_rows=shape.sampled_rows + drafts, draft_tokens=drafts)
        if self._adapters is not None:
            shape = self._adapters.on(plan, shape)
        us = self._cost.batch_us(shape).mean_us
        for _ in range(1, plan.steps):  # each further step has all rows of the launch, one position later
            context_tokens += shape.decode_rows
            us += self._cost.batch_us(replace(shape, decode_context_tokens=context_tokens)).mean_us
        return us


class _Kind:
    """Counts of one kind of batch."""

    __slots__ = ("counts", "predicted_us", "ratios", "took_us")

    def __init__(self) -> None:
        self.counts = [0] * (len(RATIOS) + 1)
        self.ratios = self.took_us = self.predicted_us = 0.0

    def add(self, took_us: float, predicted_us: float) -> None:
        ratio = took_us / predicted_us
        self.counts[bisect_left(RATIOS, ratio)] += 1
        self.ratios += ratio
        self.took_us += took_us
        self.predicted_us += predicted_us
