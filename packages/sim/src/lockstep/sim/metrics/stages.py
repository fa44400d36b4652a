"""Times of each batch in each pipeline stage, and the bubbles of each stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of each batch in each pipeline stage, in launch order. All int64, times in us."""

    batch_id: NDArray[np.int64]  # [batches]
    microbatch: NDArray[np.int64]
    send_us: NDArray[np.int64]  # time of the transfer between two stages
    start_us: NDArray[np.int64]  # [batches, stages]
    stop_us: NDArray[np.int64]

    def bubbles(self) -> list[list[tuple[int, int]]]:
        """Return for each stage the spans in which it was idle although a batch was in the pipeline, or on its way."""
        if not len(self.batch_id):
            return [[] for _ in range(self.start_us.shape[1])]
        there = merged(self.start_us[:, 0], self.stop_us[:, -1])
        return [_without(there, self.start_us[:, i], self.stop_us[:, i]) for i in range(self.start_us.shape[1])]


def merged(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the union of spans. They must be in ascending order of their starts."""
    out: list[tuple[int, int]] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def _without(
    spans: list[tuple[int, int]], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Return the parts of `spans` that no other span covers. Both lists are ascending; the others do not overlap."""
    out: list[tuple[int, int]] = []
    others, at = list(zip(starts.tolist(), stops.tolist(), strict=True)), 0
    for start, stop in spans:
        while at < len(others) and others[at][1] <= stop:
            if others[at][0] > start:
                out.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < stop:
            out.append((start, stop))
    return out
