"""Intervals of a plan's latencies: how often they cover, and what they are of without draws."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan.interval import block_samples, interval_of, interval_of_samples, student_t
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.95, 4, 2.13185), (0.995, 9, 3.24984), (0.975, 1000, 1.96234)],
)
def test_student_t_is_that_of_the_tables(probability: float, freedom: int, value: float) -> None:
    assert student_t(probability, freedom) == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("replications", [2, 3, 5, 10])
@pytest.mark.parametrize("sigma", [0.05, 0.5, 1.2])
def test_intervals_cover_as_often_as_stated(sigma: float, replications: int) -> None:
    """Latencies with median 1 s, log-normal: 10,000 times, within three standard errors of 95 %."""
    draws = np.exp(np.random.Generator(np.random.Philox(3)).normal(0.0, sigma, (10_000, replications + 1))) * 1e6
    covered = predicted = 0
    for *values, another in draws.tolist():
        median = interval_of(values, 0.95, systematic=False)
        covered += median.low <= 1e6 <= median.high
        one_more = interval_of(values, 0.95, systematic=True)
        predicted += one_more.low <= another <= one_more.high
        assert 0.0 < one_more.low <= median.low <= median.value <= median.high <= one_more.high
    assert covered / 10_000 == pytest.approx(0.95, abs=0.0066)
    assert predicted / 10_000 == pytest.approx(0.95, abs=0.0066)


def test_an_interval_of_times_with_a_zero_starts_at_zero() -> None:
    zeros = interval_of([0.0, 0.0, 3.0], 0.9, systematic=False)
    assert (zeros.value, zeros.low) == (1.0, 0.0)
    assert zeros.high == pytest.approx(1.0 + 2.91999, rel=1e-4)  # t of two degrees of freedom; the standard error is 1
    assert interval_of([0.0, 0.0], 0.9, systematic=True) == (0.0, 0.0, 0.0)
    assert interval_of([5.0, 5.0], 0.9, systematic=True) == pytest.approx((5.0, 5.0, 5.0))


def test_failures_are_infinitely_late_in_every_interval() -> None:
    assert interval_of([1.0, math.inf], 0.9, systematic=False).high == math.inf
    assert interval_of_samples(5.0, [4.0, 5.0, math.inf], 0.9).high == math.inf
    assert interval_of_samples(5.0, [], 0.9).high == math.inf


def test_blocks_keep_neighbours_together() -> None:
    """Late requests in one burst make a wider interval than the same ones spread out."""
    run = simulate(assemble(Scenario(model="qwen3-8b", gpu="h100", workload="gen:n=400,rate=4,output=fixed:3")))
    requests = run.data.requests

    def width(late: list[int]) -> float:
        ttft_us = requests.ttft_us.copy() * 0 + 1_000
        ttft_us[late] = 1_000_000
        samples = block_samples(Slo.parse("ttft_p95=1s"), replace(requests, ttft_us=ttft_us), seed=1)
        return statistics.pstdev(samples)

    assert width(list(range(100, 118))) > width(list(range(0, 400, 23)))
