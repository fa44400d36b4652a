"""Rows of integers that only grow, kept small: a run of a million requests has ten million batches.

    rows = PackedRows("time_us", "waiting")
    rows.recent.frombytes(rows.row(17, 3))  # one row; half the price of `extend`
    rows.pack()                             # now and then: what is recent becomes a part
    rows.column("time_us")                  # int64 [n], made anew
    for time_us, waiting in rows.parts(): ...

A part holds each column as its least value and the distances from it, in the smallest unsigned type that holds them:
times of four thousand batches take 4 bytes each, their modes 1, a column of equal values nothing. Types are chosen part
by part from the values themselves, so nothing can overflow.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

PART_ROWS = 4_096  # fewer are not worth their arrays' headers


class _Packed(NamedTuple):
    """One column of a part."""

    rows: int
    least: int
    above: NDArray[Any] | None  # unsigned, [rows]: distances from `least`; None: all are equal

    @classmethod
    def of(cls, values: Int64s) -> _Packed:
        least = int(values.min())
        reach = int(values.max()) - least
        above = (values - least).astype(np.min_scalar_type(reach)) if reach else None
        return cls(len(values), least, above)

    def unpack(self, out: Int64s) -> None:
        if self.above is None:
            out[:] = self.least
        else:
            np.add(self.above, self.least, out=out, dtype=np.int64, casting="unsafe")


class PackedRows:
    """Integers of 64 bits in named columns; a distance between two of one column must fit 63 bits."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.row: Callable[..., bytes] = Struct(f"{len(names)}q").pack
        self.recent = array("q")  # rows behind the parts, end to end: new rows are appended here
        self._parts: list[tuple[_Packed, ...]] = []
        self._packed_rows = 0

    def __len__(self) -> int:
        return self._packed_rows + len(self.recent) // len(self.names)

    @property
    def nbytes(self) -> int:
        """Memory of the values, headers left out."""
        packed = sum(c.above.nbytes for part in self._parts for c in part if c.above is not None)
        return packed + self.recent.itemsize * len(self.recent)

    def pack(self, rows_min: int = PART_ROWS) -> None:
        """Make a part of the recent rows, if they are so many."""
        rows = len(self.recent) // len(self.names)
        if rows and rows >= rows_min:
            self._parts.append(tuple(map(_Packed.of, self._recent_columns())))
            self._packed_rows += rows
            del self.recent[:]

    def add_columns(self, *columns: NDArray[Any]) -> None:
        """Add rows, given as columns of integers in the order of the names."""
        self.recent.frombytes(np.column_stack(columns).astype(np.int64, copy=False).tobytes())

    def snapshot(self) -> PackedRows:
        """The same rows, which later ones leave as they are. Parts are shared."""
        copy = PackedRows(*self.names)
        copy.recent = self.recent[:]
        copy._parts = self._parts[:]
        copy._packed_rows = self._packed_rows
        return copy

    def parts(self) -> Iterator[tuple[Int64s, ...]]:
        """All rows in order, some thousand at a time, as columns; none of them empty."""
        for part in self._parts:
            yield tuple(map(_unpacked, part))
        if self.recent:
            yield self._recent_columns()

    def column(self, name: str) -> Int64s:
        """One column of all rows."""
        place = self.names.index(name)
        out = np.empty(len(self), np.int64)
        start = 0
        for part in self._parts:
            stop = start + part[place].rows
            part[place].unpack(out[start:stop])
            start = stop
        out[start:] = self._recent_columns()[place]
        return out

    def amend(self, row: int, **values: int) -> None:
        """Write into a row that was added before. This packs its part again, so it is for what is rare."""
        places = {self.names.index(name): value for name, value in values.items()}
        if row >= self._packed_rows:
            for place, value in places.items():
                self.recent[(row - self._packed_rows) * len(self.names) + place] = value
            return
        for number, part in enumerate(self._parts):
            if row < part[0].rows:
                columns = [_unpacked(column) for column in part]
                for place, value in places.items():
                    columns[place][row] = value
                self._parts[number] = tuple(map(_Packed.of, columns))
                return
            row -= part[0].rows

    def _recent_columns(self) -> tuple[Int64s, ...]:
        """Return copies, because an array with an exported buffer cannot grow."""
        return tuple(np.array(self.recent, np.int64).reshape(-1, len(self.names)).T)


def _unpacked(column: _Packed) -> Int64s:
    out = np.empty(column.rows, np.int64)
    column.unpack(out)
    return out
