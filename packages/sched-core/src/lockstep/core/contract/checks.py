"""Failures of invariants: how an equation that does not hold is reported, with its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from lockstep.core.contract.errors import InvariantError


def fail(message: str) -> NoReturn:
    """Raise InvariantError."""
    raise InvariantError(message)


def same(what: str, got: object, expected: object) -> None:
    """Raise InvariantError unless both are equal."""
    if got != expected:
        fail(f"{what}: {got}, expected {expected}")


def misowned(what: str, total: int, owners: dict[str, list[int]]) -> NoReturn:
    """Raise InvariantError for ids below `total` that do not each have exactly one owner.

    The message names the first id with two owners, or the ids without one.
    """
    owned: dict[int, str] = {}
    for owner, ids in owners.items():
        for item in ids:
            if item in owned:
                fail(f"{what}: {item} belongs to {owned[item]} and to {owner}")
            if item not in range(total):
                fail(f"{what}: {owner} has {item}, which does not exist")
            owned[item] = owner
    counts = ", ".join(f"{owner} {len(ids)}" for owner, ids in owners.items())
    lost = [item for item in range(total) if item not in owned]
    fail(f"{what}: {counts} = {len(owned)}, expected {total}; without an owner {lost[:8]}")


def counts_of(items: Iterable[Any]) -> dict[Any, int]:
    """Return how often each item occurs. A Counter costs more than most of what is counted in checks."""
    counts: dict[Any, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


@lru_cache(maxsize=16)
def all_ids(total: int) -> bytes:
    """Return the ids 0 to `total` - 1, packed int32."""
    return np.arange(total, dtype=np.int32).tobytes()


def one_of(choices: tuple[str, ...]) -> str:
    """Return the choices as a message lists them: `a, b or c`."""
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
