"""Pictures in SVG that need no script: points with intervals, and steps over time. Text around them has the values.

A picture is an image with a name and a description for screen readers. Colours are those of page.css, by class, so the
picture follows the light and the dark scheme and prints; a shape or a dash always marks what a colour does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.sim.report.parts import escape

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 18, 46
TICKS = 5
LOG_RATIO = 15.0  # a wider range of values gets a logarithmic axis
PointKind = Literal["best", "front", "other"]


@dataclass(frozen=True)
class Axis:
    """An axis: its title, its range, and how a value is written."""

    title: str
    low: float
    high: float
    show: Callable[[float], str]
    is_log: bool = False
    steps: tuple[float, ...] = ()  # distances between labels to choose from; empty: round numbers

    @classmethod
    def of(cls, title: str, values: Sequence[float], show: Callable[[float], str]) -> Axis:
        """Return an axis that holds the values, from 0, or logarithmic if they differ by more than LOG_RATIO."""
        low, high = min(values), max(values)
        if low > 0 and high / low > LOG_RATIO:
            return cls(title, low / 1.3, high * 1.3, show, is_log=True)
        return cls(title, 0.0, high * 1.12 if high else 1.0, show)

    def share(self, value: float) -> float:
        """Return the place of a value from 0 to 1."""
        if self.is_log:
            return (math.log(max(value, self.low)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return values for labels: round ones, or powers and halves of ten on a logarithmic axis."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
            return [step for step in steps if self.low <= step <= self.high]
        raw = (self.high - self.low) / TICKS
        step = next((one for one in self.steps if one >= raw * 0.8), 0.0) or _round_step(raw)
        return [step * number for number in range(int(self.high / step) + 1)]


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)


@dataclass(frozen=True)
class Point:
    """A point with its interval on the vertical axis."""

    label: str
    x: float
    y: float
    low: float
    high: float
    kind: PointKind


def points_picture(
    name: str, about: str, x: Axis, y: Axis, points: Sequence[Point], limit: tuple[float, str] | None
) -> str:
    """Return points with bars of their intervals; points of the front are joined, the best one is labelled.

    Args:
        name: short name for screen readers; `about`: what the picture shows, in a sentence or two.
        limit: a bound on the vertical axis, and its label.
    """
    at = _Frame(x, y)
    parts = at.axes()
    if limit is not None and y.low <= limit[0] <= y.high:
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at.y(limit[0])}" y2="{at.y(limit[0])}"/>'
        )
        parts.append(
            f'<text class="limit" x="{WIDTH - RIGHT}" y="{at.y(limit[0]) - 5}" text-anchor="end">'
            f"{escape(limit[1])}</text>"
        )
    front = sorted((point for point in points if point.kind != "other"), key=lambda point: point.x)
    if len(front) > 1:
        joined = " ".join(f"{at.x(point.x)},{at.y(point.y)}" for point in front)
        parts.append(f'<polyline class="joined" points="{joined}"/>')
    for point in sorted(points, key=lambda point: point.kind == "best"):
        px, low, high = at.x(point.x), at.y(max(point.low, y.low)), at.y(min(point.high, y.high))
        parts.append(f'<line class="bar {point.kind}" x1="{px}" x2="{px}" y1="{low}" y2="{high}"/>')
        radius = 7 if point.kind == "best" else 5
        parts.append(f'<circle class="{point.kind}" cx="{px}" cy="{at.y(point.y)}" r="{radius}"/>')
        dx, dy = (0, high - at.y(point.y) - 8) if point.kind == "best" else (11, 4)
        anchor = "start" if dx or px < WIDTH * 0.35 else "end" if px > WIDTH * 0.65 else "middle"
        parts.append(
            f'<text class="{point.kind}" x="{px + dx}" y="{round(at.y(point.y) + dy, 1)}" text-anchor="{anchor}">'
            f"{escape(point.label)}</text>"
        )
    return _picture(name, about, parts)


def steps_picture(name: str, about: str, x: Axis, y: Axis, steps: Sequence[tuple[float, float]], end: float) -> str:
    """Return a level over time as steps: (time, level from then on), ascending, until `end`."""
    at = _Frame(x, y)
    corners = []
    for (start, level), stop in zip(steps, [*(time for time, _ in steps[1:]), end], strict=True):
        corners += [f"{at.x(start)},{at.y(level)}", f"{at.x(stop)},{at.y(level)}"]
    floor = at.y(0.0)
    area = f"{at.x(steps[0][0])},{floor} {' '.join(corners)} {at.x(end)},{floor}"
    parts = [
        *at.axes(),
        f'<polygon class="area" points="{area}"/>',
        f'<polyline class="steps" points="{" ".join(corners)}"/>',
    ]
    return _picture(name, about, parts)


class _Frame:
    """The place of values in a picture, and its axes."""

    def __init__(self, x: Axis, y: Axis) -> None:
        self._x, self._y = x, y

    def x(self, value: float) -> float:
        return round(LEFT + self._x.share(value) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - self._y.share(value) * (HEIGHT - TOP - BOTTOM), 1)

    def axes(self) -> list[str]:
        parts = []
        for value in self._y.ticks():
            at = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{escape(self._y.show(value))}</text>')
        for value in self._x.ticks():
            at = self.x(value)
            parts.append(
                f'<text x="{at}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(self._x.show(value))}</text>'
            )
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        )
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text class="title" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self._x.title)}</text>'
        )
        return parts


def _picture(name: str, about: str, parts: Sequence[str]) -> str:
    label = escape(f"{name}. {about}")
    return (
        f'<div class="picture"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg></div>"
    )


def picture_figure(title: str, unit: str, picture: str, caption: str, legend: str = "") -> str:
    """Return a figure: title, legend, unit of the vertical axis, picture, caption. Texts but the picture."""
    axis = f'<p class="axis-unit">{escape(unit)}</p>' if unit else ""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(title)}</h3>{legend}{axis}{picture}{words}</figure>"
