"""Fit of a correction: nonnegative weights of a batch's parts, with a prior near no correction.

weights = fit_weights(features, measured_us)     # features float64 [n, 5], as in calibration.FEATURES
predicted_us = features @ weights

A point is a measured mean time (of a batch, or of a token gap in a serving run) with its features. The fit minimises
squared relative errors. Points with an error above HUBER typical errors have less weight, so that a wrong measurement
does not distort the fit (Huber loss). A weak prior keeps each weight near its value without a correction, within
physically likely bounds (PRIOR), so that few points change the weights little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.calibration import BATCH_FEATURES, FEATURES, KERNELS_MIN, Correction
from lockstep.sim.cost.errors import CalibrationError

Float64s = NDArray[np.float64]

# Per feature: the weight without a correction, and the standard deviation of weights around it.
PRIOR: dict[str, tuple[float, float]] = {
    "kernels": (1.0, 0.15),  # rates are medians over shapes; single shapes differ by tens of percent
    "collectives": (1.0, 0.5),  # measured back to back in a loop; between kernels, ranks also wait for each other
    "step_us": (0.0, 1500.0),  # engines' loops take 0.1 to 3 ms
    "row_us": (0.0, 20.0),  # 0.3 to 17 us a row were measured (docs/cost-models.md, section 4)
    "collective_us": (0.0, 10.0),  # a kernel's launch or two
    "prompt_us": (0.0, 1500.0),  # vLLM on a processor takes 1 to 2 ms for a new request besides its tokens
    "kv_token_us": (0.0, 0.2),  # besides the kernels' time to read it; 0.1 us for a tiny model on a processor
    "attention_prefill": (0.0, 0.05),  # narrow, since few loads distinguish it from `kernels` and `step_us`
}
POINT_ERROR = 0.06  # typical relative error of a point that the correction cannot explain
HUBER = 1.5  # typical errors beyond which a point counts less
ROUNDS = 8  # rounds of reweighting; weights converge in four or five


class Fitter(Protocol):
    """A function from features and measured times to weights."""

    def __call__(self, features: Float64s, measured_us: Float64s) -> Float64s:
        """Return the weights."""
        ...


def fit_weights(features: Float64s, measured_us: Float64s, names: Sequence[str] = FEATURES) -> Float64s:
    """Return the weights of FEATURES that explain `measured_us`.

    Args:
        features: float64 [n, names], the parts of each point, in microseconds and counts.
        names: FEATURES, or BATCH_FEATURES for single batches.
        measured_us: float64 [n], above 0.
    Raises: CalibrationError if there are no points, or values are not finite, or a time is not above 0.
    """
    if len(measured_us) == 0:
        raise CalibrationError("there is no point to fit")
    if not (np.isfinite(features).all() and np.isfinite(measured_us).all() and (measured_us > 0).all()):
        raise CalibrationError("points must be finite, and measured times above 0")
    means, deviations = np.array([PRIOR[name] for name in names]).T
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
    """Return a correction with these weights, rounded to 4 decimals, and `frontend_us`, rounded to 1."""
    names = FEATURES if len(weights) == len(FEATURES) else BATCH_FEATURES
    values: dict[str, Any] = {name: round(float(w), 4) for name, w in zip(names, weights, strict=True)}
    values["kernels"] = max(values["kernels"], KERNELS_MIN)
    return Correction(**values, frontend_us=round(frontend_us, 1))


def relative_shift(predicted_us: Float64s, measured_us: Float64s) -> float:
    """Return the constant, at least 0, that minimises the mean relative error if it is added to all predictions.

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
