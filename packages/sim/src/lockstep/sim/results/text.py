"""Numbers as text for people: three digits and a unit, and a dash for a missing value."""

from __future__ import annotations

import math

NOTHING = "–"  # noqa: RUF001  a dash that stands for "no value"


def digits(value: float | None, significant: int = 3) -> str:
    """Format a number with `significant` digits and thousands separators: 0.0123, 4.56, 789, 12,345."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (significant - 1):
        return f"{round(value):,}"
    decimals = significant - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(us: float | None) -> str:
    """Format a duration in us in a suitable unit. None, NaN and negative values are missing."""
    if us is None or not math.isfinite(us) or us < 0:
        return NOTHING
    for limit_us, unit_us, unit in (
        (999.5, 1, "µs"),
        (999.5e3, 1e3, "ms"),
        (119.95e6, 1e6, "s"),
        (119.95 * 60e6, 60e6, "min"),
    ):
        if us < limit_us:
            return f"{digits(us / unit_us)} {unit}"
    return f"{digits(us / 3600e6)} h"


def percent(fraction: float | None) -> str:
    """Format a share of one as a percentage."""
    if fraction is None or not math.isfinite(fraction):
        return NOTHING
    return f"{digits(100 * fraction)} %"


def count(number: float | None, noun: str = "") -> str:
    """Format an integer with its noun, in the plural unless the number is 1."""
    if number is None or not math.isfinite(number):
        return NOTHING
    text = f"{round(number):,}"
    return f"{text} {noun}{'' if round(number) == 1 else 's'}" if noun else text


def span(low: str, high: str) -> str:
    """Format two numbers with units as one range: `149 ms` and `370 ms` become `149 to 370 ms`."""
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if unit and unit == high.partition(" ")[2] else f"{low} to {high}"


def setting(value: object) -> str:
    """Format a setting as on a command line: `none`, `true`, `7,8`."""
    if value is None or value in ("", (), []):
        return "none"
    if isinstance(value, list | tuple):
        return ",".join(map(setting, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
