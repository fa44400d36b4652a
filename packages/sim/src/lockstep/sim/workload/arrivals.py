"""Arrival times, drawn from a process or stretched from recorded times.

Time 0 is the first arrival. Gaps are drawn with mean 1 and divided by the rate, so one seed produces the same pattern
at every rate, and runs of a rate sweep differ in the rate only.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PROCESSES = ("poisson", "gamma", "constant")
RATE_MIN = 1e-6  # arrivals per second: one in eleven days


def arrival_times_us(process: str, rate: float, cv: float, random: Random) -> Iterator[int]:
    """Yield arrival times without end, in ascending order, the first at 0.

    Args:
        process: one of PROCESSES.
        rate: mean arrivals per second; `math.inf` puts all of them at 0.
        cv: coefficient of variation of the gaps, for gamma. 1 is Poisson, above 1 is bursty.
    """
    gap_us = 1e6 / rate
    gaps = 0.0
    while True:
        yield round(gaps * gap_us)
        gaps += _draw_gap(process, cv, random)


def _draw_gap(process: str, cv: float, random: Random) -> float:
    """Draw one gap with mean 1."""
    match process:
        case "poisson":
            return random.expovariate(1.0)
        case "gamma":
            return random.gammavariate(cv**-2, cv**2)  # shape 1 / cv**2 has this cv
        case "constant":
            return 1.0
    raise ValueError(f"expected one of {', '.join(PROCESSES)}, got `{process}`")


def mean_rate(arrivals_us: Sequence[int] | NDArray[np.int64]) -> float:
    """Return the arrivals per second of ascending times: gaps / span; `math.inf` if all are equal."""
    span_us = int(arrivals_us[-1] - arrivals_us[0])
    return (len(arrivals_us) - 1) * 1e6 / span_us if span_us else math.inf


def stretch(arrivals_us: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    """Multiply ascending times by `factor`, rounded half to even. Equal times stay equal."""
    return arrivals_us if factor == 1 else np.rint(arrivals_us * factor).astype(np.int64)


def random_stream(seed: int, stream: str) -> np.random.RandomState:
    """Return the random stream of one purpose. RandomState is used because numpy guarantees its draws."""
    words = np.frombuffer(hashlib.sha512(f"{seed}/{stream}".encode()).digest(), np.dtype("<u4"))
    return np.random.RandomState(words.astype(np.uint32))


# --- a window of time -------------------------------------------------------------------------------------------------

_UNITS_US = {
    "us": 1,
    "ms": 10**3,
    "s": 10**6,
    "m": 60 * 10**6,
    "min": 60 * 10**6,
    "h": 3600 * 10**6,
    "d": 86_400 * 10**6,
}
_TIME = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:us|ms|min|s|m|h|d)?")
_TIME_US_MAX = 100 * 365 * 86_400 * 10**6


class TimeWindow(NamedTuple):
    """Span [start_us:stop_us) of arrivals to keep, by a workload's own clock."""

    start_us: int
    stop_us: int | None  # None: to the end

    @classmethod
    def parse(cls, text: str) -> TimeWindow:
        """Parse `FROM..TO`: seconds, or times with units as in `10m..1h30m`; either side may be left out.

        Raises: ValueError with what was expected.
        """
        start, dots, stop = text.partition("..")
        if not dots:
            raise ValueError("expected FROM..TO, such as 600..1200, 10m..1h30m or ..30s")
        window = cls(_parse_time_us(start or "0"), _parse_time_us(stop) if stop else None)
        if window.stop_us is not None and window.stop_us <= window.start_us:
            raise ValueError("expected FROM before TO")
        return window

    def __str__(self) -> str:
        start, stop = (f"{us / 1e6:.6f}".rstrip("0").rstrip(".") for us in (self.start_us, self.stop_us or 0))
        return f"{start}..{stop if self.stop_us is not None else ''}"


def _parse_time_us(text: str) -> int:
    parts = _TIME.findall(text)
    if parts and "".join(parts) == text and (len(parts) == 1 or all(part[-1].isalpha() for part in parts)):
        numbers = [part.rstrip("adhimnsu") for part in parts]
        units = [_UNITS_US[part[len(number) :] or "s"] for part, number in zip(parts, numbers, strict=True)]
        time_us = round(sum(float(number) * unit for number, unit in zip(numbers, units, strict=True)))
        if time_us <= _TIME_US_MAX:
            return time_us
    raise ValueError(f"expected seconds or times such as 90s, 10m or 1h30m (us, ms, s, m, h, d), got `{text}`")
