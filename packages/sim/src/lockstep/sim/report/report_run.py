"""A run to report: its facts, its measured data, its intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.sim.metrics.bottleneck import Bottleneck, bottleneck
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.results.slo_rows import SloRow, meets_all, offered_rate, slo_rows


@dataclass(frozen=True)
class ReportRun:
    """One run of a report.

    `facts` are shown as given, in order: model, gpu, tp, workload, rate, scheduler settings, seed, version, commit. The
    fact `command` is the command line that repeats the run. The SLOs are those that `data` was measured against.
    """

    name: str
    facts: Mapping[str, str]
    data: RunData
    rate_per_s: float | None = None  # offered requests per s; None: computed from the arrivals
    intervals: Mapping[str, Any] | None = None  # intervals as in metrics.json
    calibration: str = ""  # title of the calibration that corrected the times
    remarks: Sequence[str] = ()  # facts that affect the reading of the numbers

    @property
    def slos(self) -> list[SloRow]:
        return slo_rows(self.data.summary["slos"])

    @property
    def meets_slos(self) -> bool | None:
        """Whether all SLOs hold; None without SLOs, or if nothing was measured."""
        return meets_all(self.slos)

    @property
    def offered_per_s(self) -> float | None:
        """Requests per second that arrived; None if unknown."""
        return self.rate_per_s if self.rate_per_s is not None else offered_rate(self.data.requests.arrival_us)

    @property
    def bottleneck(self) -> Bottleneck:
        """The bottleneck of the run."""
        return bottleneck(self.data.summary)

    def summary(self, part: str, name: str) -> Any:
        """Return a number of the run's summary; None if nothing was measured."""
        return self.data.summary[part].get(name)

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return the interval of a figure; None without one."""
        ends = None if self.intervals is None else self.intervals["answers"].get(name)
        return None if ends is None else (ends[0], ends[1])
