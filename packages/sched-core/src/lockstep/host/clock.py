"""The clock of a host in real time."""

from __future__ import annotations

import time
from collections.abc import Callable


class HostClock:
    """Whole microseconds since the clock was made. The value never falls, even if `now_ns` does.

    Args:
        now_ns: a monotonic clock in nanoseconds.
        start_us: the first value, if the clock continues an earlier one.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns, start_us: int = 0) -> None:
        self._now_ns = now_ns
        self._zero_ns = now_ns() - 1000 * start_us
        self._newest_us = 0
        self._raw_us = 0
        self.stepped_back_us = 0  # by how much `now_ns` fell since the last call of `clamped`

    def __call__(self) -> int:
        raw_us = (self._now_ns() - self._zero_ns) // 1000
        if raw_us < self._raw_us:
            self.stepped_back_us += self._raw_us - raw_us
        self._raw_us = raw_us
        self._newest_us = max(self._newest_us, raw_us)
        return self._newest_us

    def at(self, now_ns: int) -> int:
        """Return the value of this clock at the moment when its `now_ns` clock shows `now_ns`. For any thread."""
        return (now_ns - self._zero_ns) // 1000

    def clamped(self) -> int:
        """Return by how much `now_ns` fell since the last call, in microseconds."""
        back_us, self.stepped_back_us = self.stepped_back_us, 0
        return back_us
