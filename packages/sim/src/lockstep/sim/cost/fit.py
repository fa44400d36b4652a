"""Fitting a correction: weights of a batch's parts, never negative, pulled towards no correction.

weights = fit_weights(features, measured_us)     # features float64 [n, 5], as in calibration.FEATURES
predicted_us = features @ weights

A point is the mean time of something (a batch, a token gap of a serving run) with the parts it consists of. The fit
minimises squared relative errors; points further out than 1.5 typical errors count less, so that one that was measured
wrongly does not bend the rest (Huber). Few points decide little: a weak prior holds each weight near what it is without
a correction, within what is physically likely (PRIOR).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.calibration import FEATURES, Correction
from lockstep.sim.cost.errors import CalibrationError

Float64s = NDArray[np.float64]

# Per feature: the weight without a correction, and how far from it a weight may be expected (one standard deviation).
PRIOR: dict[str, tuple[float, float]] = {
    "kernels": (1.0, 0.15),  # medians of kernels against others' shapes: tens of percent
    "collectives": (1.0, 0.5),  # measured back to back in a loop; between kernels they wait
    "step_us": (0.0, 1500.0),  # engines' loops take 0.1 to 3 ms
    "row_us": (0.0, 20.0),  # 0.3 to 17 us a row were measured (docs/cost-models.md, section 4)
    "collective_us": (0.0, 10.0),  # a kernel's launch or two
}
POINT_ERROR = 0.06  # typical relative error of a point that the correction cannot explain
HUBER = 1.5  # typical errors beyond which a point counts less
ROUNDS = 8  # of reweighting; the weights settle in four or five


class Fitter(Protocol):
    """Anything that turns features and measured times into weights."""

    def __call__(self, features: Float64s, measured_us: Float64s) -> Float64s:
        """Return the weights."""
        ...


def fit_weights(features: Float64s, measured_us: Float64s) -> Float64s:
    """Return the weights of FEATURES that explain `measured_us`.

    Args:
        features: float64 [n, 5], what each point consists of, in microseconds and counts.
        measured_us: float64 [n], above 0.
    Raises: CalibrationError if there is no point, or one that is not a positive finite time.
    """
    if len(measured_us) == 0:
        raise CalibrationError("there is no point to fit")
    if not (np.isfinite(features).all() and np.isfinite(measured_us).all() and (measured_us > 0).all()):
        raise CalibrationError("points must be finite, and measured times above 0")
    means, deviations = np.array([PRIOR[name] for name in FEATURES]).T
    relative = features / measured_us[:, None] / POINT_ERROR
    counts = np.ones(len(measured_us))
    weights: Float64s = means
    for _ in range(ROUNDS):
        matrix = np.vstack([relative * counts[:, None], np.diag(1.0 / deviations)])
        target = np.concatenate([counts / POINT_ERROR, means / deviations])
        weights = nonnegative_least_squares(matrix, target)
        errors = np.abs(features @ weights / measured_us - 1.0) / POINT_ERROR
        counts = 1.0 / np.sqrt(np.maximum(1.0, errors / HUBER))
    return weights


def nonnegative_least_squares(matrix: Float64s, target: Float64s) -> Float64s:
    """Return x >= 0 that minimises |matrix x - target|: the active-set method of Lawson and Hanson (1974), chapter 23.

    Args:
        matrix: float64 [rows, columns] of full column rank.
    """
    columns = matrix.shape[1]
    gram, projected = matrix.T @ matrix, matrix.T @ target
    x = np.zeros(columns)
    free = np.zeros(columns, np.bool_)
    tolerance = 1e-10 * float(np.abs(projected).max(initial=0.0))
    for _ in range(3 * columns + 10):
        gradient = projected - gram @ x
        if free.all() or gradient[~free].max() <= tolerance:
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            trial = np.zeros(columns)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], projected[free])
            if (trial[free] > 0.0).all():
                break
            falling = free & (trial <= 0.0)
            share = float((x[falling] / (x[falling] - trial[falling])).min())
            x = x + share * (trial - x)
            free &= x > 1e-15
        x = trial
    return x


def correction_of(weights: Float64s, frontend_us: float = 0.0) -> Correction:
    """Return a correction with these weights, rounded to what they are worth."""
    values: dict[str, Any] = {name: round(float(w), 4) for name, w in zip(FEATURES, weights, strict=True)}
    return Correction(**values, frontend_us=round(frontend_us, 1))


def relative_shift(predicted_us: Float64s, measured_us: Float64s) -> float:
    """Return the constant, at least 0, that added to all predictions makes the mean relative error smallest.

    The best constant for the sum of |predicted + shift - measured| / measured is a weighted median of the differences.
    """
    order = np.argsort(measured_us - predicted_us, kind="stable")
    differences = (measured_us - predicted_us)[order]
    weights = np.cumsum(1.0 / measured_us[order])
    return max(0.0, float(differences[np.searchsorted(weights, weights[-1] / 2.0)]))


def left_out(groups: Sequence[object]) -> list[tuple[NDArray[np.bool_], object]]:
    """Return, for each distinct group in order of appearance, the mask of its members."""
    distinct = list(dict.fromkeys(groups))
    return [(np.array([g == group for g in groups]), group) for group in distinct]
