"""A list of numbers whose order does not matter, kept as its distinct values and how often each came.

Of two hundred million gaps between tokens, in whole microseconds, a few hundred thousand are distinct. Nothing is lost:
every statistic is that of the full list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]

# Whole numbers are counted, which is faster than sorting: of at least so many, those as near to the least of them as
# COUNTED times their number, or COUNTED_MIN.
SORTED = 256
COUNTED, COUNTED_MIN = 4, 131_072
MERGE_ENTRIES_MIN = 65_536  # of a builder: values taken in since, before they are sorted among the others


@dataclass(frozen=True, eq=False)
class ValueCounts:
    """Distinct values in ascending order, and how often each came: at least once."""

    values: Float64s
    counts: Int64s

    @classmethod
    def of(cls, values: NDArray[Any]) -> ValueCounts:
        """That of a list, in any order, without NaN."""
        distinct, counts = np.unique(values, return_counts=True)
        return cls(distinct.astype(np.float64), counts)

    @classmethod
    def join(cls, parts: Sequence[ValueCounts]) -> ValueCounts:
        """That of several lists end to end."""
        builder = ValueCountsBuilder()
        for part in parts:
            builder.add(part.values, part.counts)
        return builder.build()

    @property
    def size(self) -> int:
        """How many numbers the list has, equal ones included."""
        return int(self._stops[-1]) if len(self._stops) else 0

    @cached_property
    def _stops(self) -> Int64s:
        return np.cumsum(self.counts)

    def at(self, ranks: NDArray[Any] | Sequence[int]) -> Float64s:
        """The values that stand at these places of the sorted list, from 0 for the least."""
        return self.values[np.searchsorted(self._stops, ranks, side="right")]

    def expand(self) -> Float64s:
        """The sorted list itself."""
        return np.repeat(self.values, self.counts)

    def sum(self) -> float:
        """All numbers added up."""
        return float(self.values @ self.counts.astype(np.float64))

    def mean(self) -> float:
        """Arithmetic mean; the list must not be empty."""
        return self.sum() / self.size

    def percentile(self, percentile: float) -> float:
        """As numpy's "linear" has it: between two neighbours where need be. The list must not be empty."""
        rank = (self.size - 1) * (percentile / 100)
        low, high = self.at((math.floor(rank), math.ceil(rank))).tolist()
        share = rank - math.floor(rank)
        # The two forms are equal but for rounding; numpy takes the one from the nearer neighbour.
        return float(low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share))


class ValueCountsBuilder:
    """Takes in numbers a few at a time; each is sorted among the others about as often as the whole has doubled."""

    def __init__(self) -> None:
        self._values: Float64s = np.empty(0)
        self._counts: Int64s = np.empty(0, np.int64)
        self._later: list[tuple[Float64s, Int64s]] = []
        self._later_entries = 0

    def add(self, values: NDArray[Any], counts: NDArray[Any] | None = None) -> None:
        """Take in values, each so many times, or once. Fastest are many whole ones, each once."""
        if counts is None and values.dtype.kind == "i" and len(values) >= SORTED:
            values = self._counted(values)
        if len(values) == 0:
            return
        if counts is None:
            ordered = np.sort(np.asarray(values, np.float64))
            starts = _starts(ordered)
            self._keep(ordered[starts], np.diff(starts, append=len(ordered)))
        else:
            self._keep(*_merged(np.asarray(values, np.float64), counts))

    def _counted(self, values: NDArray[Any]) -> NDArray[Any]:
        """Take in those of many whole numbers that are near to the least, by counting them. Returns the others."""
        least = values.min()
        above = values - least
        near = above < max(COUNTED * len(values), COUNTED_MIN)
        times = np.bincount(above[near])
        found = np.flatnonzero(times)
        self._keep((found + least).astype(np.float64), times[found])
        others: NDArray[Any] = values[~near]
        return others

    def _keep(self, values: Float64s, counts: Int64s) -> None:
        """Take in distinct values in ascending order, each so many times."""
        self._later.append((values, counts))
        self._later_entries += len(values)
        if self._later_entries >= max(MERGE_ENTRIES_MIN, len(self._values)):
            self._merge()

    def build(self) -> ValueCounts:
        """Everything so far; the builder may go on."""
        self._merge()
        return ValueCounts(self._values, self._counts)

    def _merge(self) -> None:
        if self._later:
            values = np.concatenate([self._values, *(values for values, _ in self._later)])
            counts = np.concatenate([self._counts, *(counts for _, counts in self._later)])
            self._later.clear()
            self._later_entries = 0
            self._values, self._counts = _merged(values, counts)


def _merged(values: Float64s, counts: NDArray[Any]) -> tuple[Float64s, Int64s]:
    """Equal values as one, in ascending order."""
    order = np.argsort(values, kind="stable")
    values = values[order]
    starts = _starts(values)
    return values[starts], np.add.reduceat(counts[order], starts, dtype=np.int64)


def _starts(ordered: Float64s) -> Int64s:
    """Where each distinct value begins."""
    return np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
