"""How single batches vary around their fitted times: a standard deviation, and the part of it that lasts.

spread_of(ratios)                              -> share of the mean, of a log-normal distribution
lasting_spread(deviations(ratios, spread))     -> LastingSpread, or UNSET for batches that vary independently
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.draws import likeness
from lockstep.sim.cost.model import LastingSpread

Float64s = NDArray[np.float64]

SPREAD_MAX = 0.99  # a calibration allows less than 1
FARTHEST = 3.0  # standard deviations at which a deviation is cut off, so that stalls do not decide
LAGS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)  # distances of two batches whose correlation is fitted
PAIRS_MIN = 50  # pairs of batches at a distance, without which it does not count
LASTING = (2, 4, 8, 16, 32)  # values of `LastingSpread.batches` that are tried; longer ones would move a run's mean
SHARE_MIN = 0.1  # less may be chance


def spread_of(ratios: Float64s) -> float:
    """Return the standard deviation of a log-normal distribution as a share of its mean.

    Args:
        ratios: measured / predicted of single batches, above 0, without stalls.
    """
    deviation = float(np.log(ratios).std())
    return round(min(math.sqrt(math.expm1(deviation**2)), SPREAD_MAX), 5)


def deviations(ratios: Float64s, spread: float) -> Float64s:
    """Return the distances of logarithms from their mean in standard deviations, float64 [batches].

    Args:
        ratios: measured / predicted of single batches, above 0.
        spread: their `spread_of`; 0: all distances are 0.
    """
    deviation = math.sqrt(math.log1p(spread**2))
    logs = np.log(ratios)
    found: Float64s = (logs - logs.mean()) / deviation if deviation else np.zeros_like(logs)
    return found


def lasting_spread(varied: Float64s) -> LastingSpread | msgspec.UnsetType:
    """Return the part of a spread that batches have in common which follow each other; UNSET if there is none.

    It is fitted to the correlations of batches at the distances LAGS.

    Args:
        varied: `deviations` of batches in the order of launches.
    """
    cut = np.clip(varied, -FARTHEST, FARTHEST)
    cut = cut - cut.mean()
    variance = float((cut * cut).mean())
    lags = [lag for lag in LAGS if lag + PAIRS_MIN <= len(cut)]
    if not lags or not variance:
        return msgspec.UNSET
    found = np.array([(cut[:-lag] * cut[lag:]).mean() for lag in lags]) / variance
    best = None
    for batches in LASTING:
        expected = likeness(np.array(lags) / batches)
        share = float(np.clip(expected @ found / (expected @ expected), 0.0, 1.0))
        error = float(((found - share * expected) ** 2).sum())
        if best is None or error < best[0]:
            best = error, LastingSpread(share=round(share, 3), batches=batches)
    assert best is not None
    return best[1] if best[1].share >= SHARE_MIN else msgspec.UNSET
