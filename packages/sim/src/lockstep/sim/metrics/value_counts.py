"""A list of numbers without order, stored as distinct values and their counts.

Two hundred million gaps between tokens, in whole microseconds, have a few hundred thousand distinct values. Nothing is
lost: every statistic is that of the full list.
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

# Integers are counted, which is faster than sorting, if there are at least SORTED of them. Counted are the values
# within COUNTED times their number, or COUNTED_MIN, of the least one.
SORTED = 256
COUNTED, COUNTED_MIN = 4, 131_072
MERGE_ENTRIES_MIN = 65_536  # values that a builder collects before it merges them


@dataclass(frozen=True, eq=False)
class ValueCounts:
    """Distinct values in ascending order, and their counts, each at least 1."""

    values: Float64s
    counts: Int64s

    @classmethod
    def of(cls, values: NDArray[Any]) -> ValueCounts:
        """Return the counts of a list in any order, without NaN."""
        distinct, counts = np.unique(values, return_counts=True)
        return cls(distinct.astype(np.float64), counts)

    @classmethod
    def join(cls, parts: Sequence[ValueCounts]) -> ValueCounts:
        """Return the counts of several lists together."""
        builder = ValueCountsBuilder()
        for part in parts:
            builder.add(part.values, part.counts)
        return builder.build()

    @property
    def size(self) -> int:
        """Length of the list, equal numbers included."""
        return int(self._stops[-1]) if len(self._stops) else 0

    @cached_property
    def _stops(self) -> Int64s:
        return np.cumsum(self.counts)

    def at(self, ranks: NDArray[Any] | Sequence[int]) -> Float64s:
        """Return the values at these ranks of the sorted list; rank 0 is the least value."""
        return self.values[np.searchsorted(self._stops, ranks, side="right")]

    def expand(self) -> Float64s:
        """Return the sorted list."""
        return np.repeat(self.values, self.counts)

    def sum(self) -> float:
        """Return the sum of all numbers."""
        return float(self.values @ self.counts.astype(np.float64))

    def mean(self) -> float:
        """Return the arithmetic mean. The list must not be empty."""
        return self.sum() / self.size

    def percentile(self, percentile: float) -> float:
        """Return a percentile, interpolated as numpy's "linear". The list must not be empty."""
        rank = (self.size - 1) * (percentile / 100)
        low, high = self.at((math.floor(rank), math.ceil(rank))).tolist()
        share = rank - math.floor(rank)
        # The two forms differ by rounding only; numpy uses the one from the nearer neighbour.
        return float(low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share))


class ValueCountsBuilder:
    """Collects numbers a few at a time. They are merged in blocks, about as often as the whole has doubled."""

    def __init__(self) -> None:
        self._values: Float64s = np.empty(0)
        self._counts: Int64s = np.empty(0, np.int64)
        self._later: list[tuple[Float64s, Int64s]] = []
        self._later_entries = 0

    def add(self, values: NDArray[Any], counts: NDArray[Any] | None = None) -> None:
        """Add values, each `counts` times, or once. Many integers are the fastest case."""
        if values.dtype.kind == "i" and len(values) >= SORTED:
            values, counts = self._counted(values, counts)
        if len(values) == 0:
            return
        if counts is None:
            ordered = np.sort(np.asarray(values, np.float64))
            starts = _starts(ordered)
            self._keep(ordered[starts], np.diff(starts, append=len(ordered)))
        else:
            self._keep(*_merged(np.asarray(values, np.float64), counts))

    def remove(self, values: NDArray[Any]) -> None:
        """Remove values that were added before, each once."""
        if len(values):
            distinct, counts = np.unique(values, return_counts=True)
            self._keep(distinct.astype(np.float64), -counts)
            self._merge()
            kept = self._counts > 0
            self._values, self._counts = self._values[kept], self._counts[kept]

    def _counted(self, values: NDArray[Any], counts: NDArray[Any] | None) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Count the integers that are near to the least one. Returns the others, with their counts."""
        least = values.min()
        above = values - least
        near = above < max(COUNTED * len(values), COUNTED_MIN)
        if near.all():
            times = np.bincount(above, counts)
        else:
            times = np.bincount(above[near], None if counts is None else counts[near])
        found = np.flatnonzero(times != 0)  # of truth values, because that is several times as fast
        self._keep((found + least).astype(np.float64), times[found].astype(np.int64, copy=False))
        return values[~near], None if counts is None else counts[~near]

    def _keep(self, values: Float64s, counts: Int64s) -> None:
        """Add distinct values in ascending order, with their counts."""
        self._later.append((values, counts))
        self._later_entries += len(values)
        if self._later_entries >= max(MERGE_ENTRIES_MIN, len(self._values)):
            self._merge()

    def build(self) -> ValueCounts:
        """Return the counts so far. The builder remains usable."""
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
    """Merge equal values; the result is in ascending order."""
    order = np.argsort(values, kind="stable")
    values = values[order]
    starts = _starts(values)
    return values[starts], np.add.reduceat(counts[order], starts, dtype=np.int64)


def _starts(ordered: Float64s) -> Int64s:
    """Return the index at which each distinct value begins."""
    return np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
