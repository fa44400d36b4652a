"""How sure a number is: from replications of a simulation, or, where nothing was drawn, from blocks of one run.

**Replications.** A generated workload is another one under another seed. The values of n of them give Student's
interval for their mean, mean +- t s / sqrt(n). Where each replication also runs under its own draw of a calibration's
systematic error, the question is not the mean but what the one true machine will do: the interval for one more value,
mean +- t s sqrt(1 + 1/n), contains both and does not shrink to nothing as replications are added.

**Blocks.** A recorded trace is what it is. What another hour like it would have brought is estimated by cutting the run
into blocks of consecutive requests and drawing as many of them again, with replacement: neighbours share a burst and a
queue, so they stay together (Kuensch 1989, "The jackknife and the bootstrap for general stationary observations").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.metrics.columns import Requests
from lockstep.sim.metrics.latency import per_request
from lockstep.sim.metrics.slo import Slo

Float64s = NDArray[np.float64]

RESAMPLES = 200
BLOCKS_MAX = 50
BLOCK_REQUESTS_MIN = 10


class Interval(NamedTuple):
    """A value and what it lies between; infinite where too much failed to say."""

    value: float
    low: float
    high: float


@lru_cache
def student_t(probability: float, freedom: int) -> float:
    """The value that Student's t with so many degrees of freedom stays below with this probability, above one half."""
    if not 0.5 < probability < 1.0 or freedom < 1:
        raise ValueError(f"student_t({probability}, {freedom}): a probability from 0.5 to 1, and freedom of at least 1")
    # Integrate the density over the angle, t = sqrt(freedom) tan(angle): it is then cos(angle) ** (freedom - 1).
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.append(0.0, np.cumsum((density[1:] + density[:-1]) / 2))
    angle = float(np.interp(2.0 * probability - 1.0, area / area[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


def interval_of(values: Sequence[float], confidence: float, *, systematic: bool) -> Interval:
    """The interval of at least one replication; of a single one it is unbounded."""
    if any(math.isinf(value) for value in values):
        return Interval(math.inf, min(values), math.inf)
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = student_t((1.0 + confidence) / 2.0, n - 1) * spread * math.sqrt(1.0 / n + (1.0 if systematic else 0.0))
    return Interval(mean, max(mean - half, 0.0), mean + half)


def block_samples(slo: Slo, requests: Requests, seed: int) -> list[float]:
    """What `slo` would measure in RESAMPLES other runs made of this one's blocks, ascending; empty for gaps (ITL p...).

    Gaps between tokens are many to a request and close to each other: their percentiles hardly vary.
    """
    if slo.metric == "itl" and slo.percentile is not None:
        return []
    values = np.where(requests.completed, per_request(slo.metric, requests), np.nan)
    values = np.where(requests.failed, np.inf, values)
    blocks = min(BLOCKS_MAX, len(values) // BLOCK_REQUESTS_MIN)
    if blocks < 2:
        return []
    parts = [part[~np.isnan(part)] for part in np.array_split(values, blocks)]
    draws = np.random.Generator(np.random.Philox(seed)).integers(0, blocks, (RESAMPLES, blocks))
    percentile = 100.0 if slo.percentile is None else slo.percentile
    samples = []
    for draw in draws.tolist():
        drawn = np.concatenate([parts[block] for block in draw])
        if len(drawn):
            samples.append(_percentile(drawn, percentile))
    return sorted(samples)


def _percentile(values: Float64s, percentile: float) -> float:
    """As metrics measure it: between two neighbours where need be, infinite if one of them is."""
    rank = (len(values) - 1) * percentile / 100
    low, high = math.floor(rank), math.ceil(rank)
    ordered = np.partition(values, (low, high))
    if math.isinf(ordered[high]):
        return math.inf
    return float(ordered[low] + (ordered[high] - ordered[low]) * (rank - low))


def interval_of_samples(value: float, samples: Sequence[float], confidence: float) -> Interval:
    """The central part of what was drawn; unbounded without draws."""
    if not samples:
        return Interval(value, -math.inf, math.inf)
    tail = (1.0 - confidence) / 2.0
    last = len(samples) - 1
    low = samples[math.floor(tail * last)]
    high = samples[math.ceil((1.0 - tail) * last)]
    return Interval(value, min(low, value), max(high, value))
