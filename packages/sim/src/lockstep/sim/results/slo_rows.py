"""SLOs of a run, with measured values and whether the verdict is certain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.metrics.bottleneck import Bottleneck
from lockstep.sim.results.text import duration

METRIC_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between two tokens",
    "e2e": "end to end",
    "queue": "time in the waiting queue",
}


@dataclass(frozen=True)
class SloRow:
    """One bound and the measured value of a run: an entry of `summary["slos"]`."""

    name: str  # ttft_p99; or ttft, if the bound applies to every request
    bound_us: int
    measured_us: float | None
    met: bool | None  # None if nothing was measured

    @property
    def metric(self) -> str:
        return self.name.partition("_")[0]

    @property
    def statistic(self) -> str:
        return self.name.partition("_")[2]

    @property
    def title(self) -> str:
        plain = {"e2e": METRIC_NAMES["e2e"], "call": "call"}
        metric = plain.get(self.metric, self.metric.upper())
        return f"{metric} {self.statistic}".strip()

    @property
    def bound(self) -> str:
        """Label of the bound in a chart: `p99 SLO 500 ms`."""
        return f"{self.statistic} SLO {duration(self.bound_us)}".strip()

    @property
    def measured(self) -> str:
        if self.measured_us is None:
            return "nothing measured" if self.met is None else "too many requests failed"
        return duration(self.measured_us)


def slo_rows(slos: Iterable[Mapping[str, Any]]) -> list[SloRow]:
    """Return the entries of `summary["slos"]` as rows."""
    return [SloRow(str(slo["slo"]).partition("=")[0], slo["bound_us"], slo["measured_us"], slo["met"]) for slo in slos]


def meets_all(slos: Sequence[SloRow]) -> bool | None:
    """Return whether all SLOs hold; None without SLOs, or if nothing was measured."""
    return None if all(slo.met is None for slo in slos) else all(slo.met for slo in slos)


def offered_rate(arrival_us: NDArray[np.int64]) -> float | None:
    """Return the requests per second between the first and the last arrival; None if all arrive at once."""
    span_us = int(arrival_us.max() - arrival_us.min()) if arrival_us.size > 1 else 0
    return (arrival_us.size - 1) / span_us * 1e6 if span_us else None


class Compared(Protocol):
    """Fields of a run that a comparison reads, of a simulated run or a stored one."""

    @property
    def name(self) -> str: ...
    @property
    def slos(self) -> list[SloRow]: ...
    @property
    def meets_slos(self) -> bool | None: ...
    @property
    def offered_per_s(self) -> float | None: ...
    @property
    def bottleneck(self) -> Bottleneck: ...
    def summary(self, part: str, name: str) -> Any: ...
    def interval(self, name: str) -> tuple[float, float] | None: ...


def unsure(run: Compared, slo: SloRow) -> tuple[float, float] | None:
    """Return the interval of the bounded latency if it contains the bound, which makes the verdict uncertain."""
    ends = run.interval(f"{slo.metric}_us_{slo.statistic}")
    return ends if ends is not None and slo.measured_us is not None and ends[0] <= slo.bound_us < ends[1] else None
