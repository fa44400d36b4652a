"""Return a driver to an earlier state: copies of what its pieces and tagged devices keep, and a snapshot of the engine.

The copy is shallow where values cannot change and deep where they can. Values that the driver shares on purpose stay
shared: the driver, its pieces and devices, functions, and everything of `lockstep`: its values are immutable once a
Step has returned them (the engine itself is stored as a snapshot). The prefix ids that the tagged devices have interned
are shared as well: they only grow, and are names of contents.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.core.journal import snapshot
from tests.support.driver.driver import Driver
from tests.support.driver.piece import Piece

Memo = dict[int, Any]
Copier = Callable[[Any, Memo], Any]
Attributes = dict[str, Any]

STATE_OF_DRIVER = ("now_us", "records")
SHARED = ("_interned", "marks", "launched")
"""Attributes that stay shared: names of contents, branches that any history has reached, and plans of the past."""


@dataclass(frozen=True)
class Saved:
    """A state of a driver; `restore` may return to it any number of times."""

    engine: bytes
    owners: tuple[Attributes, ...]  # in the order of `_owners`


def save(driver: Driver) -> Saved:
    """Return the state of a driver between two actions."""
    owners = _owners(driver)
    memo: Memo = {id(one): one for one in owners}
    return Saved(snapshot.dump(driver.engine), tuple(_copied_attributes(one, memo) for one in owners))


def restore(driver: Driver, saved: Saved) -> None:
    """Return the driver to a saved state."""
    owners = _owners(driver)
    memo: Memo = {id(one): one for one in owners}
    driver.engine = snapshot.restore(saved.engine)
    driver.events.clear()
    driver.kv.launched.clear()
    for owner, attributes in zip(owners, saved.owners, strict=True):
        vars(owner).update({name: copied(value, memo) for name, value in attributes.items()})


def _owners(driver: Driver) -> list[Any]:
    devices = [driver.kv] if driver.tiers is None else [driver.kv, driver.tiers]
    return [driver, *driver.pieces, *devices]


def _copied_attributes(owner: Any, memo: Memo) -> Attributes:
    attributes = vars(owner)
    if isinstance(owner, Driver):
        attributes = {name: attributes[name] for name in STATE_OF_DRIVER}
    return {name: copied(value, memo) for name, value in attributes.items() if name not in SHARED}


def copied(value: Any, memo: Memo) -> Any:
    """Return a copy of a value that later changes do not reach. Of an object that occurs twice there is one copy."""
    kind = value.__class__
    copier = _COPIERS.get(kind)
    if copier is None:
        copier = _COPIERS[kind] = _copier_of(kind)
    return copier(value, memo)


def _same(value: Any, memo: Memo) -> Any:
    return value


def _copied_list(value: list[Any], memo: Memo) -> list[Any]:
    return [copied(one, memo) for one in value]


def _copied_tuple(value: tuple[Any, ...], memo: Memo) -> tuple[Any, ...]:
    return tuple(copied(one, memo) for one in value)


def _copied_dict(value: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    return {key: copied(one, memo) for key, one in value.items()}


def _copied_deque(value: deque[Any], memo: Memo) -> deque[Any]:
    return deque(copied(one, memo) for one in value)


def _copied_default(value: defaultdict[Any, Any], memo: Memo) -> defaultdict[Any, Any]:
    return defaultdict(value.default_factory, _copied_dict(value, memo))


def _copied_object(value: Any, memo: Memo) -> Any:
    found = memo.get(id(value))
    if found is None:
        found = memo[id(value)] = object.__new__(value.__class__)
        found.__dict__.update(_copied_dict(vars(value), memo))
    return found


def _copier_of(kind: type) -> Copier:
    """The way to copy values of a type that was not seen before."""
    if issubclass(kind, (Piece, Driver, tuple)) or not kind.__module__.startswith("tests."):
        return _same
    return _copied_object if hasattr(kind, "__dict__") and not _is_frozen(kind) else _same


def _is_frozen(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


_COPIERS: dict[type, Copier] = {
    list: _copied_list,
    tuple: _copied_tuple,
    dict: _copied_dict,
    deque: _copied_deque,
    defaultdict: _copied_default,
    Counter: lambda value, memo: Counter(value),
    set: lambda value, memo: set(value),
    np.ndarray: lambda value, memo: value.copy(),
}


def copies_by(kind: type, copier: Copier) -> None:
    """Copy values of a type by a function of its own."""
    _COPIERS[kind] = copier
