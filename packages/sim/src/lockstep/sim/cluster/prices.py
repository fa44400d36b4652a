"""The price of a GPU-hour over the day, such as that of spot machines, and the cost of replicas that come and go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import number_word

DAY_US, HOUR_US = 86_400_000_000, 3_600_000_000
HOURS_MAX = 400  # in a listing by hour; longer runs are listed by day


@dataclass(frozen=True)
class PriceOfDay:
    """Prices in USD per GPU-hour from times of the day on, ascending. The run begins at midnight."""

    steps: tuple[tuple[int, float], ...]  # us since midnight, USD; the first one is at midnight

    def __str__(self) -> str:
        if len(self.steps) == 1:
            return number_word(self.steps[0][1])
        return ",".join(f"{start_us}us={number_word(usd)}" for start_us, usd in self.steps)

    def usd(self, start_us: int, stop_us: int) -> float:
        """Return the cost of one GPU over a span of the run."""
        total, at = 0.0, start_us
        while at < stop_us:
            of_day = at % DAY_US
            number = max(place for place, (from_us, _) in enumerate(self.steps) if from_us <= of_day)
            next_us = self.steps[number + 1][0] if number + 1 < len(self.steps) else DAY_US
            until = min(stop_us, at - of_day + next_us)
            total += (until - at) / HOUR_US * self.steps[number][1]
            at = until
        return total

    @property
    def mean(self) -> float:
        """The mean over a day, in USD per GPU-hour."""
        return self.usd(0, DAY_US) / 24.0


def parse_price(text: str) -> PriceOfDay:
    """Parse `1.3`, or prices from times of the day on: `0h=0.9,8h=2.1,20h=0.9`. Raises ConfigError."""
    from lockstep.sim.workload.lengths import parse_duration_us  # imports numpy, which `--help` does not need

    steps: dict[int, float] = {}
    parts = text.split(",") if "=" in text else [f"0h={text}"]
    for part in parts:
        time, _, number = part.strip().partition("=")
        try:
            start_us, usd = parse_duration_us(time.strip()), float(number)
        except ValueError:
            raise _bad(text) from None
        if not 0 <= start_us < DAY_US or start_us in steps or not (math.isfinite(usd) and usd > 0):
            raise _bad(text)
        steps[start_us] = usd
    ordered = sorted(steps.items())
    if ordered[0][0] > 0:  # before the first time the last price of the day before holds
        ordered.insert(0, (0, ordered[-1][1]))
    return PriceOfDay(tuple(ordered))


def _bad(text: str) -> ConfigError:
    return ConfigError(
        f"`price` must be USD per GPU-hour above 0, or such prices from times of the day on, got `{text}`\n"
        "hint: --price 1.3, or --price 0h=0.9,8h=2.1,20h=0.9"
    )


def cost_over_time(
    price: PriceOfDay, replicas_by_time: Sequence[tuple[int, int]], until_us: int, gpus: int
) -> dict[str, Any]:
    """Return the cost of replicas that come and go, together and by hour, or by day for a long run.

    Args:
        replicas_by_time: time in us and the number of replicas from then on, ascending.
        gpus: GPUs of a replica.
    Returns: usd, usd_per_gpu_hour (the mean over a day), usd_by_time: start in us, mean number of replicas, USD.
    """
    width_us = HOUR_US if until_us <= HOURS_MAX * HOUR_US else DAY_US
    stops = [start for start, _ in replicas_by_time[1:]] + [until_us]
    spans = [(start, stop, count) for (start, count), stop in zip(replicas_by_time, stops, strict=True) if stop > start]
    rows: list[list[float]] = []
    for start_us in range(0, max(until_us, 1), width_us):
        end_us = min(start_us + width_us, until_us)
        inside = [(max(a, start_us), min(b, end_us), count) for a, b, count in spans if a < end_us and b > start_us]
        mean = sum(count * (b - a) for a, b, count in inside) / max(end_us - start_us, 1)
        usd = sum(count * gpus * price.usd(a, b) for a, b, count in inside)
        rows.append([start_us, round(mean, 4), round(usd, 6)])
    return {
        "usd_per_gpu_hour": round(price.mean, 6),
        "usd": round(sum(row[2] for row in rows), 4),
        "usd_by_time": rows,
    }
