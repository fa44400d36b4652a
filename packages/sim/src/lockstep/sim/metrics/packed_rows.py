"""Append-only rows of integers in compact form. A run of a million requests has ten million batches.

    rows = PackedRows("time_us", "waiting")
    rows.recent.frombytes(rows.row(17, 3))  # one row; half the cost of `extend`
    rows.pack()                             # from time to time: recent rows become a part
    rows.column("time_us")                  # int64 [n], a new array
    for time_us, waiting in rows.parts(): ...

A part holds each column as its least value and the distances from it, in the smallest unsigned type that holds them, or
so the differences of neighbours if they are smaller; a few larger ones are kept apart. Times of four thousand batches
take 2 bytes each, their modes 1 byte, consecutive numbers and equal values nothing. Types are chosen for each part from
its values, so that nothing can overflow.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

PART_ROWS = 4_096  # in smaller parts array headers dominate
PART_ROWS_MAX = 65_536  # places in a part fit 16 bits
FAR_SHARE = 12  # at most one of so many differences may have more than 16 bits


class _Packed(NamedTuple):
    """One column of a part: its values above the least, or its first value and the differences of neighbours."""

    rows: int
    first: int  # of differences; else 0
    least: int  # of the differences, or of the values
    above: NDArray[Any] | None  # unsigned [rows - 1] or [rows]: distances from `least`; None: all are equal
    is_differences: bool
    far: NDArray[np.uint16] | None = None  # places of the distances of more than 16 bits, if these are few
    far_above: NDArray[np.uint32] | None = None  # and their bits beyond these

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.above, self.far, self.far_above) if one is not None)

    @classmethod
    def of(cls, values: Int64s) -> _Packed:
        least = int(values.min())
        reach = int(values.max()) - least
        if not reach:
            return cls(len(values), 0, least, None, False)
        kind = np.min_scalar_type(reach)
        if kind.itemsize == 1:
            return cls(len(values), 0, least, (values - least).astype(kind), False)
        steps = np.diff(values)
        least_step = int(steps.min())
        reach_of_steps = int(steps.max()) - least_step
        if not reach_of_steps:
            return cls(len(values), int(values[0]), least_step, None, True)
        kind_of_steps = np.min_scalar_type(reach_of_steps)
        above = steps - least_step
        if kind_of_steps.itemsize == 4 <= kind.itemsize and len(values) <= PART_ROWS_MAX:
            far = np.flatnonzero(above >> 16)
            if len(far) * FAR_SHARE < len(values):
                far_above = (above[far] >> 16).astype(np.uint32)
                close = above.astype(np.uint16)
                return cls(len(values), int(values[0]), least_step, close, True, far.astype(np.uint16), far_above)
        if kind_of_steps.itemsize < kind.itemsize:
            return cls(len(values), int(values[0]), least_step, above.astype(kind_of_steps), True)
        return cls(len(values), 0, least, (values - least).astype(kind), False)

    def unpack(self, out: Int64s) -> None:
        values = out[1:] if self.is_differences else out
        if self.above is None:
            values[:] = self.least
        else:
            np.add(self.above, self.least, out=values, dtype=np.int64, casting="unsafe")
        if self.far is not None and self.far_above is not None:
            values[self.far] += self.far_above.astype(np.int64) << 16
        if self.is_differences:
            out[0] = self.first
            np.cumsum(out, out=out)


class PackedRows:
    """Rows of int64 in named columns. The distance between two values of one column must fit 63 bits."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.row: Callable[..., bytes] = Struct(f"{len(names)}q").pack
        self.recent = array("q")  # rows that are in no part yet, end to end; new rows are appended here
        self._parts: list[tuple[_Packed, ...]] = []
        self._packed_rows = 0

    def __len__(self) -> int:
        return self._packed_rows + len(self.recent) // len(self.names)

    @property
    def nbytes(self) -> int:
        """Memory of the values in bytes, without headers."""
        packed = sum(column.nbytes for part in self._parts for column in part)
        return packed + self.recent.itemsize * len(self.recent)

    def pack(self, rows_min: int = PART_ROWS) -> None:
        """Make a part of the recent rows if there are at least `rows_min`."""
        rows = len(self.recent) // len(self.names)
        if rows and rows >= rows_min:
            self._parts.append(tuple(map(_Packed.of, self._recent_columns())))
            self._packed_rows += rows
            del self.recent[:]

    def add_columns(self, *columns: NDArray[Any]) -> None:
        """Append rows, given as columns of integers in the order of the names."""
        self.recent.frombytes(np.column_stack(columns).astype(np.int64, copy=False).tobytes())

    def snapshot(self) -> PackedRows:
        """Return a copy that later appends do not change. Parts are shared."""
        copy = PackedRows(*self.names)
        copy.recent = self.recent[:]
        copy._parts = self._parts[:]
        copy._packed_rows = self._packed_rows
        return copy

    def parts(self) -> Iterator[tuple[Int64s, ...]]:
        """Yield all rows in order as columns, some thousand rows at a time. No part is empty."""
        for part in self._parts:
            yield tuple(map(_unpacked, part))
        if self.recent:
            yield self._recent_columns()

    def column(self, name: str) -> Int64s:
        """Return one column of all rows."""
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
        """Overwrite values of an existing row. This packs its part again, so it must be rare."""
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
