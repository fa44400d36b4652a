"""Figures whose values are collected, and added to those of prometheus_client many at a time.

A value takes prometheus_client 1 to 3 us, and a request has some twenty; here it takes an append to a list. `add_all`
adds what was collected.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Sequence

import numpy as np
from prometheus_client import Counter, Histogram


class ManyHistogram(Histogram):
    """A histogram that takes many values at once."""

    def observe_all(self, values: Sequence[float]) -> None:
        """Add values."""
        given = np.array(values)
        self._sum.inc(float(given.sum()))
        buckets = np.searchsorted(self._upper_bounds, given)  # the first bound that is not below the value
        for bucket, count in enumerate(np.bincount(buckets).tolist()):
            if count:
                self._buckets[bucket].inc(count)


class BatchedHistogram:
    """A histogram that collects its values.

    Attributes:
        observe, observe_many: collect a value, or several.
    """

    __slots__ = ("_histogram", "_values", "observe", "observe_many")

    def __init__(self, histogram: ManyHistogram) -> None:
        self._histogram = histogram
        self._values: list[float] = []
        self.observe, self.observe_many = self._values.append, self._values.extend

    def add_all(self) -> None:
        """Add the collected values."""
        if self._values:
            self._histogram.observe_all(self._values)
            self._values.clear()


class BatchedCounter:
    """A counter that collects its increments."""

    __slots__ = ("_counter", "_total")

    def __init__(self, counter: Counter) -> None:
        self._counter, self._total = counter, 0

    def inc(self, amount: int = 1) -> None:
        """Collect an increment."""
        self._total += amount

    def add_all(self) -> None:
        """Add the collected increments."""
        if self._total:
            self._counter.inc(self._total)
            self._total = 0


class BatchedLabels:
    """A counter with labels that collects its increments by 1."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._counts: Counts[tuple[str, ...]] = Counts()

    def inc(self, *labels: str) -> None:
        """Collect an increment."""
        self._counts[labels] += 1

    def add_all(self) -> None:
        """Add the collected increments."""
        for labels, count in self._counts.items():
            self._counter.labels(*labels).inc(count)
        self._counts.clear()
