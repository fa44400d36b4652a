"""Service-level objectives: upper bounds on latencies, as parsed and printed by `--slo`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lockstep.core.contract.errors import ConfigError

SloMetric = Literal["ttft", "tpot", "itl", "e2e", "call"]
SLO_METRICS: tuple[SloMetric, ...] = ("ttft", "tpot", "itl", "e2e", "call")
SLO_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000}


@dataclass(frozen=True, slots=True)
class Slo:
    """An upper bound on a latency: on a percentile over the run or, without one, on every request."""

    metric: SloMetric
    percentile: float | None  # 0 < percentile < 100
    bound_us: int

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse `ttft_p99=500ms` or `ttft=500ms`. Raises ConfigError that names the invalid part."""

        def refuse(problem: str, hint: str) -> ConfigError:
            return ConfigError(f"SLO `{text}`: {problem}\nhint: {hint}")

        name, equals, duration = (part.strip() for part in text.partition("="))
        if not equals:
            raise refuse("there is no `=`", "write a metric and a bound, such as `ttft_p99=500ms`")
        metric, underscore, statistic = name.partition("_")
        if metric not in SLO_METRICS:
            raise refuse(f"unknown metric `{metric}`", f"one of {', '.join(SLO_METRICS)}")
        percentile = None
        if underscore:
            match = re.fullmatch(r"p([0-9]+(?:\.[0-9]+)?)", statistic)
            if match is None or not 0 < float(match[1]) < 100:
                raise refuse(f"unknown statistic `{statistic}`", "a percentile between 0 and 100, such as `p99`")
            percentile = float(match[1])
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([^0-9.\s]*)", duration)
        if match is None:
            raise refuse(f"`{duration}` is not a duration", "a number and a unit, such as `500ms`")
        number, unit = match.groups()
        if unit not in SLO_UNITS_US:
            problem = f"unknown unit `{unit}`" if unit else f"`{number}` has no unit"
            raise refuse(problem, f"one of {', '.join(SLO_UNITS_US)}")
        bound_us = round(float(number) * SLO_UNITS_US[unit])
        if bound_us < 1:
            raise refuse(f"`{duration}` is less than one microsecond", "the bound is what a request may take at most")
        return cls(metric, percentile, bound_us)

    def __str__(self) -> str:
        unit = next(unit for unit in ("s", "ms", "us") if self.bound_us % SLO_UNITS_US[unit] == 0)
        statistic = "" if self.percentile is None else f"_p{self.percentile:g}"
        return f"{self.metric}{statistic}={self.bound_us // SLO_UNITS_US[unit]}{unit}"
