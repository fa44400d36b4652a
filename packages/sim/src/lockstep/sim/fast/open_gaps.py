"""Gaps between the tokens of requests that are open at the end of a run: they were counted, but they do not count.

The kernel counts each gap when it delivers a token, as a length and how many requests have it. Only gaps of completed
requests count (docs/metrics.md). A request of the running batch gets a token from every batch with decodes, so its
tokens are known by the times of these batches:

    joined_us        decodes_us[joined]   ...   decodes_us[left - 1]       joined_us
    |--- gap ---|--- gap ---|--- gap ---|          retracted  |-- gap --|
    token of its extend                                       token of the next extend
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.fast.state import Array

Int64s = NDArray[np.int64]

KEPT_ROWS = 65_536  # times of an engine that are kept at least


class OpenGaps:
    """The times at which an engine delivered decodes, as far back as open requests reach, and its retractions."""

    def __init__(self) -> None:
        self._first = 0  # the number of the first kept time
        self._decodes_us = np.empty(0, np.int64)
        self._more: list[Int64s] = []
        self._rows = 0
        self._limit = KEPT_ROWS
        self._segments = np.empty((0, 4), np.int64)

    def add(self, decodes_us: Int64s, segments: Int64s) -> None:
        """Append times of decodes, and segments of retracted requests, as in `state.Arrays`."""
        self._more.append(decodes_us.copy())
        self._rows += len(decodes_us)
        if len(segments):
            self._segments = np.concatenate((self._segments, segments))

    @property
    def is_full(self) -> bool:
        """Return whether `forget` is due."""
        return self._rows > self._limit

    def forget(self, requests: Array, running: Int64s) -> None:
        """Drop what no open request needs.

        Args:
            running: numbers of the requests that are in a running batch or in flight.
        """
        self._segments = self._segments[requests["ended_us"][self._segments[:, 0]] < 0]
        joined = requests["joined"][running]
        least = np.concatenate((joined[joined >= 0], self._segments[:, 1]))
        whole = self._whole()
        kept = int(least.min(initial=self._first + len(whole)))
        self._decodes_us = whole[kept - self._first :].copy()
        self._first, self._rows = kept, len(self._decodes_us)
        self._limit = max(2 * self._rows, KEPT_ROWS)

    def gaps_us(self, requests: Array, running: Int64s) -> Int64s:
        """Return the measured gaps between tokens of the open requests, in us.

        Args:
            running: as for `forget`.
        """
        decodes_us, segments = self._whole(), self._segments
        last = self._first + len(decodes_us)
        found = [np.empty(0, np.int64)]
        numbers = np.unique(np.concatenate((running, segments[:, 0])))
        for number in numbers[(requests["ended_us"][numbers] < 0) & (requests["measured"][numbers] != 0)].tolist():
            own: list[list[int]] = segments[segments[:, 0] == number].tolist()
            joined = int(requests["joined"][number])
            if joined >= 0:
                own.append([number, joined, last, int(requests["joined_us"][number])])
            times = []
            for _, start, stop, start_us in own:
                times.append(np.append(start_us, decodes_us[start - self._first : stop - self._first]))
            if times:
                found.append(np.diff(np.concatenate(times)))
        return np.concatenate(found)

    def _whole(self) -> Int64s:
        self._decodes_us = np.concatenate((self._decodes_us, *self._more))
        self._more.clear()
        return self._decodes_us
