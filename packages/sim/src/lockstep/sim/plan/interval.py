"""Intervals of a number, from replications of a simulation or, if nothing is drawn, from blocks of one run.

**Replications.** Another seed makes another generated workload. Latencies are positive and skewed, so the interval is
computed on their logarithms, with mean m and standard deviation s. The values of n replications have Student's
interval for their median, exp(m +- t s / sqrt(n)). If each replication also has its own draw of a calibration's
systematic error, the interval must cover the one real machine instead of the median. This is the interval for one more
value, exp(m +- t s sqrt(1 + 1/n)). It includes both sources, and does not shrink to zero with more replications. Both
cover as often as stated if the values are log-normal.

**Blocks.** A recorded trace is fixed. The variation between similar traces is estimated from blocks of consecutive
requests: as many blocks as there are are drawn again, with replacement. Neighbours share a burst and a queue, so they
stay together (Kuensch 1989, "The jackknife and the bootstrap for general stationary observations").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.metrics.columns import Requests
from lockstep.sim.metrics.latency import call_us, lasts_of_calls, per_request
from lockstep.sim.metrics.slo import Slo

Float64s = NDArray[np.float64]

RESAMPLES = 200
BLOCKS_MAX = 50
BLOCK_REQUESTS_MIN = 10


class Interval(NamedTuple):
    """A value and its interval; infinite if too many requests failed."""

    value: float
    low: float
    high: float


@lru_cache
def student_t(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t with this many degrees of freedom, for a probability above one half."""
    if not 0.5 < probability < 1.0 or freedom < 1:
        raise ValueError(f"student_t({probability}, {freedom}): a probability from 0.5 to 1, and freedom of at least 1")
    # Integrate the density over the angle, t = sqrt(freedom) tan(angle). The density is then cos(angle) ** (freedom -
    # 1).
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.append(0.0, np.cumsum((density[1:] + density[:-1]) / 2))
    angle = float(np.interp(2.0 * probability - 1.0, area / area[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


def interval_of(values: Sequence[float], confidence: float, *, systematic: bool) -> Interval:
    """Return the mean of one or more replications and its interval; the interval of a single one is unbounded.

    The logarithm of 0 has no bound, so the interval of values with a 0 is computed on the values themselves.

    Args:
        values: of the replications, at least 0, in any unit; infinite if too many requests failed.
        confidence: the share of intervals that cover, from 0 to 1.
        systematic: whether the interval is that of one more value.
    """
    if any(math.isinf(value) for value in values):
        return Interval(math.inf, min(values), math.inf)
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    if min(values) <= 0.0:
        low, high = _student_ends(values, confidence, systematic=systematic)
        return Interval(mean, max(low, 0.0), high)
    low, high = _student_ends([math.log(value) for value in values], confidence, systematic=systematic)
    return Interval(mean, min(math.exp(low), mean), max(math.exp(high), mean))


def _student_ends(values: Sequence[float], confidence: float, *, systematic: bool) -> tuple[float, float]:
    """Return both ends of Student's interval of two values or more."""
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = student_t((1.0 + confidence) / 2.0, n - 1) * spread * math.sqrt(1.0 / n + (1.0 if systematic else 0.0))
    return mean - half, mean + half


def block_samples(slo: Slo, requests: Requests, seed: int) -> list[float]:
    """Return the values of `slo` in RESAMPLES resampled runs, ascending; empty for gaps (ITL p...).

    A resampled run consists of blocks of this one. Percentiles of gaps hardly vary, because each request has many gaps
    of similar length.
    """
    if slo.metric == "itl" and slo.percentile is not None:
        return []
    if slo.metric == "call":
        values = np.where(lasts_of_calls(requests), call_us(requests), np.nan)
    else:
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
    """Return a percentile as the metrics do: interpolated between neighbours, infinite if the upper one is."""
    rank = (len(values) - 1) * percentile / 100
    low, high = math.floor(rank), math.ceil(rank)
    ordered = np.partition(values, (low, high))
    if math.isinf(ordered[high]):
        return math.inf
    return float(ordered[low] + (ordered[high] - ordered[low]) * (rank - low))


def interval_of_samples(value: float, samples: Sequence[float], confidence: float) -> Interval:
    """Return the central part of the samples as interval; unbounded without samples."""
    if not samples:
        return Interval(value, -math.inf, math.inf)
    tail = (1.0 - confidence) / 2.0
    last = len(samples) - 1
    low = samples[math.floor(tail * last)]
    high = samples[math.ceil((1.0 - tail) * last)]
    return Interval(value, min(low, value), max(high, value))
