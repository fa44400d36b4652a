"""Unions of half-open spans of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.core.contract.commands import (
    Int64s,
)
from lockstep.sim.metrics.columns import Float64s


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Disjoint half-open spans of time, in order, in us."""

    starts: Int64s
    stops: Int64s

    @classmethod
    def union(cls, starts: Int64s, stops: Int64s) -> Spans:
        """Merge spans that touch. Spans that start at -1 or are empty are dropped."""
        real = (starts >= 0) & (stops > starts)
        order = np.argsort(starts[real], kind="stable")
        starts, stops = starts[real][order], np.maximum.accumulate(stops[real][order])
        apart = starts[1:] > stops[:-1]
        ends = np.ones(1 if len(starts) else 0, np.bool_)
        return cls(starts[np.concatenate((ends, apart))], stops[np.concatenate((apart, ends))])

    def total_us(self) -> int:
        return int((self.stops - self.starts).sum())

    def covered_us(self, at_us: Int64s) -> Float64s:
        """Return for each time how much of the spans lies before it, in us."""
        if len(self.starts) == 0:
            return np.zeros(len(at_us))
        lengths = np.cumsum(self.stops - self.starts)
        knots_us = np.column_stack((self.starts, self.stops)).ravel()
        covered = np.column_stack((np.append(0, lengths[:-1]), lengths)).ravel()
        before_us: Float64s = np.interp(at_us, knots_us, covered)
        return before_us
