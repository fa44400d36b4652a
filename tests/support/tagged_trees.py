"""The right path of a tree of drafts, on a tagged device."""

from __future__ import annotations

from lockstep.core.contract.commands import depths_of
from lockstep.core.requests.table import Int32s


def right_path(parents: Int32s, drafts: int, length: int, key: int) -> list[int]:
    """Return the numbers of `length` drafts of a tree on one path, among the first `drafts`; `key` chooses the path."""
    depths = depths_of(parents)
    ends = [number for number in range(drafts + 1) if depths[number] == length]
    number, path = ends[key % len(ends)], list[int]()
    while number:
        path.append(number)
        number = int(parents[number - 1])
    return path[::-1]
