"""The load of experts as an engine reports it: totals, and the imbalance of the newest measurements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.api.processes.wire import ExpertFigures, ExpertRecordMessage
from lockstep.core.cluster.expert_placement import ExpertLoads
from lockstep.core.contract.commands import ExpertRecord


def imbalance_of(counts: NDArray[np.int64]) -> list[float]:
    """Return the load of the fullest expert of each layer over the mean, 1 or more; 1 for a layer without tokens.

    Args:
        counts: [layers, experts].
    """
    most, mean = counts.max(1, initial=0), counts.mean(1)
    return [float(one) for one in np.where(mean > 0, most / np.maximum(mean, 1e-12), 1.0)]


class ExpertFold:
    """The figures of one engine, from the sums that it holds."""

    def __init__(self) -> None:
        self._seen: ExpertLoads | None = None
        self._imbalance = 1.0

    def figures(self, loads: ExpertLoads | None) -> ExpertFigures | None:
        """Return the figures. The imbalance is of the measurements since the call before, if there were any."""
        if loads is None:
            return None
        if self._seen is None or loads.reports != self._seen.reports:
            new = loads.counts if self._seen is None else loads.counts - self._seen.counts
            self._imbalance, self._seen = float(np.mean(imbalance_of(new))), loads
        return ExpertFigures(loads.reports, int(loads.counts.sum()), self._imbalance)


def record_message(record: ExpertRecord | None) -> ExpertRecordMessage | None:
    """Return a record as a message to a worker."""
    if record is None:
        return None
    counts = record.counts
    return ExpertRecordMessage(
        record.recording,
        record.duration_us,
        record.batches,
        len(counts),
        counts.astype("<i8", copy=False).tobytes(),
    )


def counts_of(record: ExpertRecordMessage) -> NDArray[np.int64]:
    """Return the tokens routed to each expert of a record, [layers, experts]."""
    return np.frombuffer(record.counts, "<i8").reshape(record.layers, -1) if record.layers else np.zeros((0, 0), int)
