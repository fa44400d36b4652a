"""Distributions of lengths, counts and times, as written in a generator spec.

    fixed:512    uniform:100:2000    lognormal:900:0.75    exponential:300

The same four apply to tokens, turns and think times, with parameters in the respective unit. A lognormal is given by
its median, because traces are described by medians; its mean is median * exp(sigma**2 / 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lockstep.sim.workload.arrivals import RATE_MIN
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX

SIGMA_MAX = 5.0  # exp(5) is a factor of 148 at one standard deviation; more is a typing error
THINK_US_MAX = 7 * 24 * 3600 * 10**6  # a week
_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000, "min": 60_000_000, "h": 3_600_000_000}


@dataclass(frozen=True, slots=True)
class Fixed:
    value: int

    def draw(self, _random: Random) -> int:
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int  # included

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    median: int
    sigma: float  # standard deviation of the logarithm

    def draw(self, random: Random) -> int:
        return round(self.median * math.exp(self.sigma * random.normalvariate(0.0, 1.0)))


@dataclass(frozen=True, slots=True)
class Exponential:
    mean: int

    def draw(self, random: Random) -> int:
        return round(self.mean * random.expovariate(1.0))


Distribution = Fixed | Uniform | LogNormal | Exponential

_FORMS = "fixed:N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or exponential:MEAN"


def parse_distribution(text: str, parse_value: Callable[[str], int]) -> Distribution:
    """Parse `fixed:N` and the other forms.

    Args:
        parse_value: parses one parameter in its unit.
    Raises: ValueError with what was expected.
    """
    match text.split(":"):
        case ["fixed", value]:
            return Fixed(parse_value(value))
        case ["uniform", low, high]:
            bounds = Uniform(parse_value(low), parse_value(high))
            if bounds.low > bounds.high:
                raise ValueError(f"expected LOW at most HIGH in uniform:LOW:HIGH; try uniform:{high}:{low}")
            return bounds
        case ["lognormal", median, sigma]:
            return LogNormal(parse_value(median), _parse_sigma(sigma))
        case ["exponential", mean]:
            return Exponential(parse_value(mean))
        case _:
            raise ValueError(f"expected {_FORMS}")


def draw_tokens(lengths: Distribution, random: Random) -> int:
    """Draw a length in tokens (or a number of turns), clamped to 1 .. LENGTH_TOKENS_MAX."""
    return min(max(1, lengths.draw(random)), LENGTH_TOKENS_MAX)


def draw_think_us(thinking: Distribution, random: Random) -> int:
    """Draw a think time in us, clamped to 0 .. one week."""
    return min(max(0, thinking.draw(random)), THINK_US_MAX)


def parse_tokens(text: str) -> int:
    """Parse a count: `512`."""
    if text.isascii() and text.isdigit() and 1 <= int(text) <= LENGTH_TOKENS_MAX:
        return int(text)
    raise ValueError(f"expected whole numbers from 1 to {LENGTH_TOKENS_MAX:,}, without separators")


def parse_duration_us(text: str) -> int:
    """Parse a duration with its unit: `5s`, `250ms`, `1.5min`."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit_us = _UNITS_US.get(text[len(number) :])
    try:
        if unit_us is not None and 0 <= (duration_us := float(number) * unit_us) <= THINK_US_MAX:
            return round(duration_us)
    except ValueError:
        pass
    raise ValueError("expected durations with a unit (us, ms, s, min, h), at most a week, such as 5s or 250ms")


def parse_rate(text: str) -> float:
    """Parse arrivals per second: above 0, `inf` for all at once."""
    try:
        if (rate := float(text)) >= RATE_MIN:
            return rate
    except ValueError:
        pass
    raise ValueError(f"expected arrivals per second, at least {RATE_MIN:g}, or inf")


def _parse_sigma(text: str) -> float:
    try:
        if 0 <= (sigma := float(text)) <= SIGMA_MAX:
            return sigma
    except ValueError:
        pass
    raise ValueError(f"expected SIGMA from 0 to {SIGMA_MAX:g} in lognormal:MEDIAN:SIGMA")
