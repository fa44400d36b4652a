"""Hierarchical fits of positive costs: a common value of each cost, and factors of groups that are shrunk towards 1.

fit = fit_levels(points, columns, measured_us, costs, levels)
fit.weights(points)      # float64 [points, costs], for points that the fit need not have seen

The logarithm of a cost at a point is the logarithm of the common value plus a deviation for the point's group in each
level: its engine, its GPU, both together, its model, and so on. Before any point a deviation is normally distributed
around 0, with a width that the level states for the cost. So a group of few points stays near its parents, a group that
the fit lacked is at them, and no cost is ever negative.

The fit minimises squared logarithms of predicted / measured, of TPOT and TTFT together, by Gauss-Newton steps with
weights of Student's t. Points of one layout share their errors, so each of n points counts 1 / (1 + (n - 1) SHARED).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.calibrate.serving_points import ServingPoint

Float64s = NDArray[np.float64]

ERRORS = (0.04, 0.18)  # typical relative errors of TPOT and TTFT that costs cannot explain
FREEDOM = 3.0  # degrees of freedom of the errors: Student's t, so that a wrong measurement has little weight
SHARED = 0.3  # the part of the variance of errors that points of one layout have in common
ROUNDS = 20
STEP_MAX = 0.7  # largest change of a logarithm in one round
DONE = 5e-3  # change of all logarithms at which a fit ends


class Cost(NamedTuple):
    """A cost, with what is known before any point: its usual value, and the standard deviation of its logarithm."""

    name: str
    usual: float
    deviation: float


class PointGroup(NamedTuple):
    """The points with these properties; an empty property is that of all points."""

    engine: str = ""
    gpu: str = ""
    model: str = ""
    precision: str = ""
    releases: tuple[str, str] = ("", "")  # from this release on, before that release
    gpus: tuple[str, ...] = ()  # all GPUs of one architecture


class Level(NamedTuple):
    """A way of grouping points, and how far the logarithm of a cost may deviate in a group."""

    name: str
    group_of: Callable[[ServingPoint], PointGroup | None]  # None: the level does not apply to the point
    deviations: Mapping[str, float]  # by cost; absent: the level does not change the cost


class Measured(NamedTuple):
    """Features and values of one measured quantity."""

    columns: Float64s  # float64 [points, costs], the quantity per unit of each cost
    us: Float64s  # float64 [points], as measured


@dataclass(frozen=True, eq=False)
class LevelFit:
    """Common values of costs and deviations of groups, as logarithms, with their standard deviations."""

    costs: Sequence[Cost]
    levels: Sequence[Level]
    groups: Mapping[tuple[str, PointGroup], int]  # row of a level's group
    logs: Float64s  # float64 [1 + groups, costs]; the first row is the common logarithm
    covariance: Float64s  # float64 [free, free], of the entries `free` of `logs`
    free: NDArray[np.int64]  # indices into the flattened `logs`

    def rows(self, point: ServingPoint) -> list[int]:
        """Return the rows of `logs` that add up for a point."""
        found = [0]
        for level in self.levels:
            group = level.group_of(point)
            row = None if group is None else self.groups.get((level.name, group))
            if row is not None:
                found.append(row)
        return found

    def weights(self, points: Sequence[ServingPoint]) -> Float64s:
        """Return the costs of points, float64 [points, costs]."""
        found: Float64s = np.exp(np.array([self.logs[self.rows(point)].sum(axis=0) for point in points]))
        return found.reshape(len(points), len(self.costs))

    def spreads(self, rows: Sequence[int]) -> Float64s:
        """Return the standard deviations of the logarithms of all costs for a sum of rows, float64 [costs]."""
        place = {int(entry): i for i, entry in enumerate(self.free)}
        variances = []
        for cost in range(len(self.costs)):
            entries = [place[entry] for row in rows if (entry := row * len(self.costs) + cost) in place]
            variances.append(float(self.covariance[np.ix_(entries, entries)].sum()))
        found: Float64s = np.sqrt(np.array(variances))
        return found

    def shown_deviations(self, level: str) -> dict[str, float]:
        """Return by cost how far the groups of a level deviate: root mean squares, with the uncertainty of each group.

        This is one step of expectation maximisation from the widths that the level states. A width that the points do
        not determine, or agree with, stays as it is.
        """
        stated = next(one.deviations for one in self.levels if one.name == level)
        rows = [row for (name, _), row in self.groups.items() if name == level]
        if not rows:
            return {name: width for name, width in stated.items() if width}
        squares = np.array([self.logs[row] ** 2 + self.spreads([row]) ** 2 for row in rows])
        found: Float64s = np.sqrt(squares.reshape(len(rows), len(self.costs)).mean(axis=0))
        places = {cost.name: i for i, cost in enumerate(self.costs)}
        return {name: float(found[places[name]]) for name, width in stated.items() if width}


def fit_levels(
    points: Sequence[ServingPoint],
    measured: Sequence[Measured],
    costs: Sequence[Cost],
    levels: Sequence[Level],
    start: LevelFit | None = None,
) -> LevelFit:
    """Fit costs to points. Without points, the result is what is known before.

    Args:
        measured: TPOT and TTFT, in the order of ERRORS.
        start: a fit to similar points, from which this one begins; the result is the same, sooner.
    """
    groups: dict[tuple[str, PointGroup], int] = {}
    for level in levels:
        for point in points:
            group = level.group_of(point)
            if group is not None:
                groups.setdefault((level.name, group), 1 + len(groups))
    deviations = np.zeros((1 + len(groups), len(costs)))
    deviations[0] = [cost.deviation for cost in costs]
    by_name = {level.name: level for level in levels}
    for (name, _), row in groups.items():
        deviations[row] = [by_name[name].deviations.get(cost.name, 0.0) for cost in costs]
    logs = np.zeros(deviations.shape)
    logs[0] = np.log([cost.usual for cost in costs])
    usual = logs.copy()
    free = np.flatnonzero(deviations.ravel() > 0.0)
    precision = 1.0 / deviations.ravel()[free] ** 2
    fit = LevelFit(costs, levels, groups, logs, np.diag(1.0 / precision), free)
    if not points:
        return fit
    if start is not None:
        logs[0] = start.logs[0]
        for key, row in groups.items():
            if key in start.groups:
                logs[row] = start.logs[start.groups[key]]
    member = np.zeros((len(points), 1 + len(groups)))
    for i, point in enumerate(points):
        member[i, fit.rows(point)] = 1.0
    shared, gram = _shares(points), np.diag(precision)
    for _ in range(ROUNDS):
        weights = np.exp(member @ logs)
        blocks, targets = [], []
        for (columns, us), error in zip(measured, ERRORS, strict=True):
            parts = columns * weights
            predicted = parts.sum(axis=1)
            missing = np.log(us / predicted)
            slopes = (member[:, :, None] * (parts / predicted[:, None])[:, None, :]).reshape(len(points), -1)[:, free]
            counts = shared / error / np.sqrt(1.0 + (missing / error) ** 2 / FREEDOM)
            blocks.append(slopes * counts[:, None])
            targets.append(missing * counts)
        matrix, target = np.vstack(blocks), np.concatenate(targets)
        gram = matrix.T @ matrix + np.diag(precision)
        pull = precision * (usual - logs).ravel()[free]
        change = np.clip(np.linalg.solve(gram, matrix.T @ target + pull), -STEP_MAX, STEP_MAX)
        flat = logs.ravel().copy()
        flat[free] += change
        logs = flat.reshape(logs.shape)
        if np.abs(change).max() < DONE:
            break
    covariance: Float64s = np.linalg.inv(gram).astype(np.float64)
    return LevelFit(costs, levels, groups, logs, covariance, free)


def layout_of(point: ServingPoint) -> Hashable:
    """Return what points of one layout have in common."""
    return point.engine, point.engine_version, point.gpu.name, point.model.name, point.weights_dtype, point.split


def _shares(points: Sequence[ServingPoint]) -> Float64s:
    """Return the square root of how much each point counts, float64 [points]."""
    sizes = Counter(layout_of(point) for point in points)
    counts = [1.0 + (sizes[layout_of(point)] - 1) * SHARED for point in points]
    return np.asarray(1.0 / np.sqrt(counts), np.float64)
