"""Intervals of simulated results: the run is repeated with all batches at both ends of the calibration's error.

found = intervals_of(run)
found.answers["ttft_us_p99"]         # (low, high), or None if there was nothing to measure

The systematic error of a cost model multiplies all times by the same factor, and slower batches make latencies longer
and throughput lower. So the runs at the 5th and at the 95th percentile of (true time) / (predicted time) bound each
result with the same confidence. This includes queueing: at a high load ten percent more time per batch is more than ten
percent in TTFT. TTFT also contains time outside the engine; its interval is at least as wide as the residuals of TTFT.
"""

from __future__ import annotations

from lockstep.sim.cluster.fast import run_compiled
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.setup import ClusterSetup
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost.calibration import COVERAGE
from lockstep.sim.metrics.columns import Summary
from lockstep.sim.metrics.intervals import Answers, Intervals, answers_of
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import Run, simulate

MEAN_TTFT = "ttft_us_mean"


def intervals_of(run: Run | ClusterRun, coverage: float = COVERAGE) -> Intervals | None:
    """Simulate the run twice more, at both ends of the systematic error. Return None if a run is interrupted."""
    first = run.setup.engines[0] if isinstance(run.setup, ClusterSetup) else run.setup
    calibration, model = first.calibration, first.model.name
    factors = calibration.interval("time", coverage, model)
    ttft_factors = calibration.interval("ttft", coverage, model)
    found = {name: [] if value is None else [value] for name, value in answers_of(run.data.summary).items()}
    ttft = [run.data.summary["latency"][MEAN_TTFT]]
    for factor in factors:
        summary = _summary_at(run.setup, factor)
        if summary is None:
            return None
        ttft.append(summary["latency"][MEAN_TTFT])
        for name, value in answers_of(summary).items():
            if value is not None:
                found[name].append(value)
    answers: Answers = {}
    for name, values in found.items():
        # A measure without a value in one of the runs has no interval, because its ends are unknown.
        answers[name] = (min(values), max(values)) if len(values) == 1 + len(factors) else None
        ends = answers[name]
        if ends is not None and name.startswith("ttft"):
            nominal = values[0]
            answers[name] = min(ends[0], nominal * ttft_factors[0]), max(ends[1], nominal * ttft_factors[1])
    at_ends = None if None in ttft or not ttft[0] else (ttft[1] / ttft[0], ttft[2] / ttft[0])
    return Intervals(calibration.title, coverage, factors, ttft_factors, answers, at_ends, run.setup.is_tested)


def _summary_at(setup: Setup | ClusterSetup, factor: float) -> Summary | None:
    """Return the summary of the run with every batch time multiplied by `factor`; None if it is interrupted."""
    run: Run | ClusterRun
    if isinstance(setup, ClusterSetup):
        slowed = setup.slowed(factor)
        compiled = run_compiled(slowed, None, None, always=False, only_requests=True)
        run = compiled or simulate_cluster(slowed, compiled=False)
    else:
        run = simulate(setup.slowed(factor), only_requests=True)
    return None if run.interrupted else run.data.summary
