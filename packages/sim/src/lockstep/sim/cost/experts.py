"""The imbalance of routed tokens over the ranks of an expert-parallel group, in which all ranks wait for the slowest.

    load       token-expert pairs ("assignments") that a rank computes
    touched    distinct experts of a rank with at least one assignment; the rank reads their weights

The popularity of experts is drawn from a symmetric Dirichlet distribution with the coefficient of variation `cv` (0:
all are equally popular), and assignments are drawn by popularity. Each rank holds the same number of experts, placed at
random. Then the loads of `ranks` ranks are Dirichlet-multinomial; with cv 0 they are multinomial. Independent negative
binomials (cv 0: Poissons) under the condition of a known sum have the same distribution, which gives the maximum:

    P(max <= m) = P(all X_i <= m and their sum is n) / P(sum is n)

For many assignments the condition on the sum has little effect and is dropped. Two effects are not modelled: the
experts of one token differ, which makes loads slightly more even, and load balancers place experts by their popularity.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]

EXACT_MAX = 64  # assignments up to which the sum is conditioned on
TAIL_DEVIATIONS = 12.0  # half-width of the range of a rank's load that is summed, in standard deviations


@cache
def expected_max_load(assignments: int, ranks: int, experts: int, cv: float = 0.0) -> float:
    """Return the expected assignments on the fullest of `ranks` ranks with `experts` experts each."""
    if ranks == 1 or not assignments:
        return float(assignments)
    mean = assignments / ranks
    shape = experts / cv**2 if cv else math.inf  # shape of the gamma distribution of a rank's popularity
    if assignments <= EXACT_MAX:
        found = _conditioned(_pmf(mean, shape, 0, assignments), assignments, ranks)
    else:
        deviation = math.sqrt(mean + mean**2 / shape)
        first = max(0, math.floor(mean - TAIL_DEVIATIONS * deviation))
        last = math.ceil(mean + TAIL_DEVIATIONS * deviation * (1.0 + deviation / mean)) + 8
        within = np.minimum(np.cumsum(_pmf(mean, shape, first, last)), 1.0)
        found = first + float((1.0 - within[:-1] ** ranks).sum())
    return float(min(max(found, mean), assignments))


def _pmf(mean: float, shape: float, first: int, last: int) -> Float64s:
    """Return the probabilities of the counts `first` to `last`, both included, float64 [last - first + 1].

    The distribution is Poisson for an infinite `shape`, else the negative binomial of a Poisson distribution whose rate
    is drawn from a gamma distribution with this shape.
    """
    counts = np.arange(first, last, dtype=np.float64)
    if math.isinf(shape):
        start = first * math.log(mean) - mean - math.lgamma(first + 1)
        ratios = mean / (counts + 1.0)
    else:
        more, none = mean / (shape + mean), -shape * math.log1p(mean / shape)
        start = math.lgamma(first + shape) - math.lgamma(shape) - math.lgamma(first + 1)
        start += none + first * math.log(more)
        ratios = (counts + shape) / (counts + 1.0) * more
    logs = start + np.append(0.0, np.cumsum(np.log(ratios)))
    return np.exp(logs)


def _conditioned(pmf: Float64s, assignments: int, ranks: int) -> float:
    """Return the expected maximum of `ranks` numbers distributed by `pmf`, given that their sum is `assignments`.

    `pmf` is float64 [assignments + 1].
    """
    all_sums = _power(pmf, ranks)[assignments]
    total = 0.0
    for most in range(assignments):
        within = np.where(np.arange(assignments + 1) <= most, pmf, 0.0)
        total += 1.0 - min(1.0, _power(within, ranks)[assignments] / all_sums)
    return total


def _power(pmf: Float64s, ranks: int) -> Float64s:
    """Return the distribution of the sum of `ranks` independent numbers, cut off at the length of `pmf`."""
    result = np.zeros_like(pmf)
    result[0] = 1.0
    square = pmf
    while ranks:
        if ranks & 1:
            result = np.convolve(result, square)[: len(pmf)]
        ranks >>= 1
        if ranks:
            square = np.convolve(square, square)[: len(pmf)]
    return result


def chosen_share(tokens: float, per_token: int, count: int, cv: float = 0.0) -> float:
    """Return the expected share of `count` experts that `tokens` tokens visit, if each token visits `per_token`."""
    if not cv:
        missed: float = (1.0 - per_token / count) ** tokens
        return 1.0 - missed
    if per_token == count:
        return 1.0 if tokens else 0.0
    shape = 1.0 / cv**2
    return 1.0 - math.exp(-shape * math.log1p(-tokens * math.log1p(-per_token / count) / shape))


@cache
def expected_max_touched(tokens: int, per_token: int, count: int, ranks: int, cv: float = 0.0) -> float:
    """Return the expected number of experts visited on the rank with the most; `ranks` share `count` experts evenly.

    Visits of different experts are assumed to be independent, so a rank's number is binomial.
    """
    share, own = chosen_share(tokens, per_token, count, cv), count // ranks
    if share >= 1.0 or ranks == 1:
        return own * share
    if share <= 0.0:
        return 0.0
    counts = np.arange(own, dtype=np.float64)
    ratios = (own - counts) / (counts + 1.0) * (share / (1.0 - share))
    logs = own * math.log1p(-share) + np.append(0.0, np.cumsum(np.log(ratios)))
    within = np.minimum(np.cumsum(np.exp(logs)), 1.0)
    return float((1.0 - within[:-1] ** ranks).sum())
