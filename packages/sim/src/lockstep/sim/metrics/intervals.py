"""Intervals of the results of a run: from a run with faster batches to a run with slower batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.sim.metrics.columns import Summary

LATENCIES = tuple(
    f"{metric}_us_{statistic}"
    for metric in ("ttft", "tpot", "itl", "e2e")
    for statistic in ("mean", "p50", "p90", "p95", "p99")
)
RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "goodput_requests_per_s")
LEVERAGE = 1.5  # from this ratio of changes on, the load and not the error of batches makes an interval of TTFT wide
Answers = dict[str, tuple[float, float] | None]


@dataclass(frozen=True)
class Intervals:
    """Lower and upper ends of the intervals of a run."""

    calibration: str  # title of the calibration
    coverage: float
    factors: tuple[float, float]  # measured time / predicted time, at the two ends
    ttft_factors: tuple[float, float]
    answers: Answers
    ttft_at_ends: tuple[float, float] | None  # mean TTFT at both ends of `factors` by that of the run; None without one
    tested: bool = True  # the coverage was measured on predictions that were left out of the fit

    def describe(self) -> dict[str, Any]:
        """Return all fields, for metrics.json."""
        return {
            "calibration": self.calibration,
            "coverage": self.coverage,
            "tested": self.tested,
            "time_factors": list(self.factors),
            "ttft_factors": list(self.ttft_factors),
            "ttft_at_ends": None if self.ttft_at_ends is None else [round(end, 4) for end in self.ttft_at_ends],
            "answers": {name: None if ends is None else list(ends) for name, ends in self.answers.items()},
        }


def leverage_text(intervals: Mapping[str, Any]) -> str:
    """Return why the load makes stored intervals of TTFT wide, as a sentence; empty if it does not.

    It does where the mean TTFT of the runs at the ends grows or falls by LEVERAGE more than their batches.
    """
    at_ends = intervals.get("ttft_at_ends")
    if at_ends is None:
        return ""
    (fast, slow), (low, high) = intervals["time_factors"], at_ends
    if high < LEVERAGE * slow and low > fast / LEVERAGE:
        return ""
    return (
        f"intervals of TTFT are wide because of the load: with batches {fast:.2f} and {slow:.2f} times as long, the "
        f"mean TTFT is {low:.2f} and {high:.2f} times as long, since requests wait for each other near saturation"
    )


def intervals_title(intervals: Mapping[str, Any]) -> str:
    """Return the heading of stored intervals, such as `90 % intervals`."""
    return f"{coverage_text(intervals)} intervals" if intervals.get("tested", True) else "ranges, coverage not tested"


def coverage_text(intervals: Mapping[str, Any]) -> str:
    """Return the coverage of stored intervals, such as `90 %`, or that it was not tested."""
    return f"{100 * intervals['coverage']:g} %" if intervals.get("tested", True) else "range, coverage not tested"


def answers_of(summary: Summary) -> dict[str, float | None]:
    """Return the latencies and rates of a run that have an interval."""
    found = {name: summary["latency"][name] for name in LATENCIES}
    return found | {name: summary["throughput"][name] for name in RATES}
