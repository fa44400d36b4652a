"""When requests come: drawn from a process, or stretched from recorded times.

Time 0 is the first arrival, everywhere. Gaps are drawn with mean 1 and divided by the rate, so that one seed gives the
same pattern at every rate, and two runs of a rate sweep differ by the rate alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

PROCESSES = ("poisson", "gamma", "constant")
RATE_MIN = 1e-6  # arrivals per second: one in eleven days


def arrival_times_us(process: str, rate: float, cv: float, random: Random) -> Iterator[int]:
    """Yield arrival times without end, never decreasing, the first at 0.

    Args:
        process: one of PROCESSES.
        rate: arrivals per second on average; `math.inf` puts all of them at 0.
        cv: coefficient of variation of the gaps, for gamma. 1 is Poisson, above 1 comes in bursts.
    """
    gap_us = 1e6 / rate
    gaps = 0.0
    while True:
        yield round(gaps * gap_us)
        gaps += _draw_gap(process, cv, random)


def _draw_gap(process: str, cv: float, random: Random) -> float:
    """Draw one gap; the mean is 1."""
    match process:
        case "poisson":
            return random.expovariate(1.0)
        case "gamma":
            return random.gammavariate(cv**-2, cv**2)  # shape 1 / cv**2 has this cv
        case "constant":
            return 1.0
    raise ValueError(f"expected one of {', '.join(PROCESSES)}, got `{process}`")


def mean_rate(arrivals_us: Sequence[int]) -> float:
    """Arrivals per second of ascending times: gaps / span; `math.inf` if all are at one instant."""
    span_us = arrivals_us[-1] - arrivals_us[0]
    return (len(arrivals_us) - 1) * 1e6 / span_us if span_us else math.inf


def stretch(arrivals_us: Sequence[int], factor: float) -> list[int]:
    """Multiply ascending times by `factor`, rounding half to even; equal times stay equal."""
    return list(arrivals_us) if factor == 1 else [round(arrival_us * factor) for arrival_us in arrivals_us]
