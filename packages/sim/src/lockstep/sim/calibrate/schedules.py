"""Recorded schedules of serving points: the shapes of all batches, and the place of each request among them.

schedule = record(point, CLIENTS["spread"], cost)     # one simulation
schedule.tpot_us(batch_us), schedule.ttft_us(batch_us)  # means over requests, for any times of the batches

In a closed loop the order of events hardly depends on the times of batches (docs/validation.md, section 3), so a
schedule is recorded once and timed as often as a fit needs. TPOT and TTFT are linear in the times of batches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.calibrate.serving_points import LoadGenerator, ServingPoint, simulated
from lockstep.sim.cost.model import BatchShape, CostModel

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]

SHAPE_FIELDS = (
    "extend_rows", "extend_tokens", "extend_context_tokens", "extend_pairs", "decode_rows", "decode_context_tokens",
    "sampled_rows",
)  # fmt: skip
"""The columns of `Schedule.shapes`, fields of BatchShape."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The batches of a simulated point, and the requests' places among them."""

    shapes: Int64s  # [batches, 7], columns as in SHAPE_FIELDS
    arrived: Int64s  # [requests]: number of batches that had ended when the request arrived
    running: Int64s  # [requests]: the batch that ran then
    gone: Float64s  # [requests]: the share of that batch that had passed
    first: Int64s  # [requests]: number of batches up to and with the one of the first token
    last: Int64s  # [requests]: number of batches up to and with the one of the last token
    output_tokens: Int64s  # [requests]

    def batch_shapes(self) -> list[BatchShape]:
        """Return the shapes of all batches."""
        return [BatchShape(**dict(zip(SHAPE_FIELDS, row, strict=True))) for row in self.shapes.tolist()]

    def tpot(self, values: Float64s) -> Float64s:
        """Return the mean TPOT over requests.

        Args:
            values: float64 [batches, columns], times or other summands of each batch.
        Returns: float64 [columns].
        """
        until = np.vstack([np.zeros(values.shape[1]), np.cumsum(values, axis=0)])
        gaps = (self.output_tokens - 1)[:, None]
        mean: Float64s = ((until[self.last] - until[self.first]) / gaps).mean(axis=0)
        return mean

    def ttft(self, values: Float64s) -> Float64s:
        """Return the mean TTFT over requests, without time outside the engine; arguments as for `tpot`."""
        until = np.vstack([np.zeros(values.shape[1]), np.cumsum(values, axis=0)])
        rest = self.gone[:, None] * values[self.running]
        mean: Float64s = (until[self.first] - until[self.arrived] - rest).mean(axis=0)
        return mean

    def save(self, path: Path) -> None:
        """Write the schedule to a file that `load` reads."""
        np.savez_compressed(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Schedule:
        """Read a file of `save`."""
        with np.load(path, allow_pickle=False) as stored:
            return cls(**{field.name: stored[field.name] for field in fields(cls)})


def record(point: ServingPoint, client: LoadGenerator, cost: CostModel) -> Schedule:
    """Simulate a point with a cost model, and return its schedule.

    Raises: CalibrationError if a request does not end with its answer.
    """
    run, shapes = simulated(point, client, cost)
    requests, batches = run.requests, run.batches
    arrival_us = requests.arrival_us
    arrived = np.searchsorted(batches.finished_us, arrival_us, side="right")
    running = np.minimum(arrived, len(shapes) - 1)
    took_us = np.maximum(batches.finished_us - batches.started_us, 1)
    return Schedule(
        shapes=np.array([[getattr(shape, name) for name in SHAPE_FIELDS] for shape in shapes], np.int64),
        arrived=arrived,
        running=running,
        gone=np.clip((arrival_us - batches.started_us[running]) / took_us[running], 0.0, 1.0),
        first=np.searchsorted(batches.finished_us, arrival_us + requests.ttft_us, side="right"),
        last=np.searchsorted(batches.finished_us, arrival_us + requests.e2e_us, side="right"),
        output_tokens=np.asarray(requests.output_tokens, np.int64),
    )
