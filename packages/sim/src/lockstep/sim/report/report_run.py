"""One run as a report takes it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.sim.metrics import RunData
from lockstep.sim.report.text import duration

METRIC_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between two tokens",
    "e2e": "end to end",
    "queue": "time in the waiting line",
}


@dataclass(frozen=True)
class SloRow:
    """One limit and how the run stood against it: an entry of `summary["slos"]`."""

    name: str  # ttft_p99; or ttft, when every request is held to it
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
        metric = METRIC_NAMES[self.metric] if self.metric == "e2e" else self.metric.upper()
        return f"{metric} {self.statistic}".strip()

    @property
    def bound(self) -> str:
        """What a chart writes beside the line: `p99 SLO 500 ms`."""
        return f"{self.statistic} SLO {duration(self.bound_us)}".strip()

    @property
    def measured(self) -> str:
        if self.measured_us is None:
            return "nothing measured" if self.met is None else "too many requests failed"
        return duration(self.measured_us)


@dataclass(frozen=True)
class ReportRun:
    """One run to report.

    `facts` are shown as given, in order: model, gpu, tp, workload, rate, scheduler settings, seed, version, commit. The
    one named `command` is the line that runs it again. The SLOs are those that `data` was measured against.
    """

    name: str
    facts: Mapping[str, str]
    data: RunData
    rate_per_s: float | None = None  # offered; None: taken from the arrivals

    @property
    def slos(self) -> list[SloRow]:
        return [
            SloRow(str(slo["slo"]).partition("=")[0], slo["bound_us"], slo["measured_us"], slo["met"])
            for slo in self.data.summary["slos"]
        ]

    @property
    def meets_slos(self) -> bool | None:
        """Whether all of them hold; None if there are none, or if nothing was measured."""
        if all(slo.met is None for slo in self.slos):
            return None
        return all(slo.met for slo in self.slos)

    @property
    def offered_per_s(self) -> float | None:
        """Requests per second that came in."""
        if self.rate_per_s is not None:
            return self.rate_per_s
        arrivals_us = self.data.requests.arrival_us
        span_us = int(arrivals_us.max() - arrivals_us.min()) if arrivals_us.size > 1 else 0
        return (arrivals_us.size - 1) / span_us * 1e6 if span_us else None

    def summary(self, part: str, name: str) -> Any:
        """A number of the run's summary; None where there was nothing to measure."""
        return self.data.summary[part].get(name)
