"""Parts of the text form: names that are safe to print, counts with their noun, runs of numbers, times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

RUNS_SHOWN = 8  # runs of consecutive numbers that `runs` writes out; the numbers of all further runs are counted

DIRECTIONS = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Control characters of Unicode's bidirectional algorithm, which could reverse the text around them."""

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *DIRECTIONS)
}
"""The escape of each control character: C0, DEL, C1, Unicode's line separators and DIRECTIONS."""


class RequestNames(Protocol):
    """The names under which requests are shown."""

    def request(self, request_id: int) -> str:
        """Return the label of a request, or "r" and its id."""


def shown(given: str) -> str:
    """Return a client's label or session name with control characters escaped as `\\x1b` or `\\u202e`."""
    return given if given.isprintable() else given.translate(CONTROLS)


def count(number: int, thing: str, things: str = "") -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number} {thing}" if number == 1 else f"{number} {things or thing + 's'}"


def milliseconds(us: int) -> str:
    """Return microseconds as text in milliseconds."""
    return f"{us / 1000:g} ms"


def runs(numbers: Iterable[int], shown: int = RUNS_SHOWN) -> str:
    """Return numbers as text, consecutive ones as `first..last`; numbers behind `shown` runs are only counted."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and parts[-1][1] + 1 == number:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    texts = [f"{first}" if first == last else f"{first}..{last}" for first, last in parts[:shown]]
    rest = sum(last - first + 1 for first, last in parts[shown:])
    return " ".join(texts) + (f" and {rest} more" if rest else "")
