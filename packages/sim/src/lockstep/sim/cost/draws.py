"""Random durations of batches around the mean of a cost model.

    took_us = expected.mean_us * drawn_factor(expected, f"{seed} {engine}", plan.batch_id)

A duration is log-normal, with the mean and the standard deviation of its `Duration`: other programs of a machine make
batches longer, never much shorter, so measured times are skewed. A draw depends on key and number of the batch alone,
so hosts that launch the same batches draw the same times in any order.

Measured batches that follow each other are alike, because a machine is busy for a while: batches have a part of the
spread in common (`LastingSpread`). It is one normal number for every `batches` batches, and between two of them the sum
of both by cosine and sine, whose variance is 1 everywhere.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.model import Duration

Float64s = NDArray[np.float64]
PHASES = 64  # positions of a batch between two common numbers, over which `likeness` averages


def drawn_factor(expected: Duration, key: str, number: int) -> float:
    """Return the random factor of the mean time of a batch. Its own mean is 1.

    Args:
        expected: mean and spread; without a spread the factor is 1.
        key: what the draws of a run depend on, such as seed and engine.
        number: of the batch.
    """
    if expected.spread_us <= 0.0 or expected.mean_us <= 0.0:
        return 1.0
    variance = math.log1p((expected.spread_us / expected.mean_us) ** 2)
    normal = standard_normal(f"{key} {number}")
    if (lasting := expected.lasting) is not None:
        common = _common_normal(key, number, lasting.batches)
        normal = math.sqrt(1.0 - lasting.share) * normal + math.sqrt(lasting.share) * common
    return math.exp(math.sqrt(variance) * normal - variance / 2.0)


def standard_normal(key: str) -> float:
    """Return a standard normal number that depends on the key alone."""
    bits = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")
    return NormalDist().inv_cdf((bits + 0.5) / 2**64)


def _common_normal(key: str, number: int, batches: int) -> float:
    """Return the standard normal number that batches near `number` have nearly in common."""
    group, behind = divmod(number, batches)
    angle = math.pi / 2 * behind / batches
    before, after = (standard_normal(f"{key} of {batches}: {one}") for one in (group, group + 1))
    return math.cos(angle) * before + math.sin(angle) * after


def likeness(apart: Float64s) -> Float64s:
    """Return the correlation of common numbers, float64 of the shape of `apart`.

    Args:
        apart: distances of two batches, as multiples of `LastingSpread.batches`.
    """
    phase = (np.arange(PHASES) + 0.5) / PHASES
    first, second = phase, apart[..., None] + phase
    same_group = np.cos(np.pi / 2 * (second - first)) * (second < 1)
    next_group = np.sin(np.pi / 2 * first) * np.cos(np.pi / 2 * (second - 1)) * ((second >= 1) & (second < 2))
    correlation: Float64s = (same_group + next_group).mean(axis=-1)
    return correlation
