"""Checked access to parsed JSON, and errors that name the file, the line or the key, the value and what is expected."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

from lockstep.sim.cost import CalibrationError

SHOWN = 60  # characters of a bad value in a message


class Fields:
    """An object of JSON with its place in a file.

    Args:
        where: the file, with the line if the file has one object per line.
        path: keys from the top of the file to this object, such as `benchmarks[2].requests`.
    """

    def __init__(self, value: Any, where: str, path: str = "") -> None:
        self.where = where
        self.path = path
        if not isinstance(value, dict):
            self.refuse("", value, "an object")
        self.value: dict[str, Any] = value

    def refuse(self, key: str, value: Any, expected: str, hint: str = "is the file complete?") -> NoReturn:
        """Raise CalibrationError for the value of a key."""
        name = ".".join(part for part in (self.path, key) if part)
        got = "nothing" if value is None else f"`{str(value)[:SHOWN]}`"
        raise CalibrationError(f"{self.where}: key `{name or 'top'}` must be {expected}, got {got}\nhint: {hint}")

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def number(self, key: str, *, least: float = 0.0, default: float | None = None) -> float:
        """Return a finite number of at least `least`; a missing one is `default`, or an error."""
        value = self.value.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            self.refuse(key, value, f"a number of at least {least:g}")
        return float(value)

    def text(self, key: str, default: str = "") -> str:
        """Return a text; a missing one, or a value of another type, is `default`."""
        value = self.value.get(key)
        return value if isinstance(value, str) else default

    def numbers(self, key: str, count: int | None = None) -> list[float]:
        """Return a list of finite numbers, of `count` items if it is given."""
        items = self.items(key, count)
        for index, item in enumerate(items):
            if isinstance(item, bool) or not isinstance(item, int | float) or not math.isfinite(item):
                self.refuse(f"{key}[{index}]", item, "a number")
        return [float(item) for item in items]

    def items(self, key: str, count: int | None = None) -> list[Any]:
        """Return a list, of `count` items if it is given."""
        value = self.value.get(key)
        if not isinstance(value, list):
            self.refuse(key, value, "a list")
        if count is not None and len(value) != count:
            self.refuse(key, f"{len(value)} items", f"a list of {count} items, one per request")
        return value

    def inner(self, key: str) -> Fields:
        """Return the object of a key."""
        return Fields(self.value.get(key), self.where, ".".join(part for part in (self.path, key) if part))

    def each(self, key: str) -> Iterator[Fields]:
        """Yield the objects of a list."""
        for index, item in enumerate(self.items(key)):
            yield Fields(item, self.where, ".".join(part for part in (self.path, f"{key}[{index}]") if part))


def parse_objects(where: str, text: str) -> list[Fields]:
    """Parse a JSON object, a list of objects, or JSON lines.

    Raises: CalibrationError with line and column of what is not JSON.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            _refuse_json(where, error, 0)
        return _parse_lines(where, text)
    if isinstance(value, list):
        return [Fields(item, where, f"[{index}]") for index, item in enumerate(value)]
    return [Fields(value, where)]


def _parse_lines(where: str, text: str) -> list[Fields]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(Fields(json.loads(line), f"{where}, line {number}"))
            except json.JSONDecodeError as error:
                _refuse_json(where, error, number - 1)
    return found


def _refuse_json(where: str, error: json.JSONDecodeError, lines_before: int) -> NoReturn:
    raise CalibrationError(
        f"{where}, line {error.lineno + lines_before}, column {error.colno}: not JSON: {error.msg}\n"
        "hint: expected one JSON object, or one per line; a run that was broken off leaves half a line"
    ) from error
