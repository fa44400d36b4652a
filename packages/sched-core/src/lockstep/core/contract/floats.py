"""Fields of numbers that are stored as floats, however they are given.

`1` and `1.0` differ in MessagePack, and a decoder returns floats for these fields. If a field stored the int, a
snapshot would have other bytes after a restore.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


def store_floats(struct: msgspec.Struct, names: Iterable[str]) -> None:
    """Replace whole numbers in these fields of a struct by floats. Booleans stay, for the checks of the struct."""
    for name in names:
        value = getattr(struct, name)
        if type(value) is int:
            msgspec.structs.force_setattr(struct, name, float(value))
