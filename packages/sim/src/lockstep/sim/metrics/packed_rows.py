"""Append-only rows of integers in compact form. A run of a million requests has ten million batches.

    rows = PackedRows("time_us", "waiting")
    rows.recent.frombytes(rows.row(17, 3))  # one row; half the cost of `extend`
    rows.pack()                             # from time to time: recent rows become a part
    rows.column("time_us")                  # int64 [n], a new array
    for time_us, waiting in rows.parts(): ...
    for (waiting,) in rows.parts("waiting"): ...

A part holds each column as values, as differences of neighbours or as differences of these, whichever takes least: as
distances from a base, of which 0, 8, 16, 32 or 64 bits are kept for each row, and the bits beyond these only for the
rows that have any. So equal values, consecutive numbers and levels that seldom change take next to nothing, and times
of decodes, each of which takes little longer than the one before, one byte. The form is chosen for each part from its
values; arithmetic is modulo 2**64, so nothing is lost by an overflow.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

PART_ROWS = 4_096  # in smaller parts array headers dominate
ORDERS = 3  # values, their differences, and the differences of these
WIDTHS = (0, 8, 16, 32, 64)  # bits of a distance that are kept for each row
FAR_BYTES = 6  # of a distance with further bits: its place and these bits
SAMPLE = np.random.default_rng(0).random(256)  # places, as shares of a part, of the values that choose its form
WORTH = 0.9  # of the bytes of a form: what one with more differences may take
SMALL_SHARE = 0.5  # bytes for each row; a form that takes no more is not compared with the next orders


class _PackedForm(NamedTuple):
    """One way to keep some integers as distances from a base."""

    nbytes: int  # about
    base: int
    width: int  # bits of a distance that are kept for each row
    is_exact: bool  # whether no distance has further bits

    @classmethod
    def of(cls, values: Int64s) -> _PackedForm:
        """Return the smallest form of at least one value."""
        least, greatest = int(values.min()), int(values.max())
        fits = next(width for width in WIDTHS if greatest - least < 1 << width)
        best = cls(len(values) * fits // 8, least, fits, True)
        if not fits:
            return best
        sample = np.sort(values[_sampled(len(values))])
        median = int(sample[len(sample) // 2])
        for width in WIDTHS[: WIDTHS.index(fits)]:
            base = _in_64_bits(median - (1 << width >> 1))
            far = int(np.count_nonzero((sample - base) >> width)) * len(values) // len(sample)
            nbytes = len(values) * width // 8 + far * FAR_BYTES
            if nbytes < best.nbytes:
                best = cls(nbytes, base, width, False)
        return best


class _Packed(NamedTuple):
    """One column of a part: its first values and differences, then the distances from the base that its form has."""

    rows: int
    firsts: tuple[int, ...]  # first value, first difference: one for each time that differences were taken
    form: _PackedForm
    close: NDArray[Any] | None  # unsigned: the distances, of which this type drops the higher bits; None: 0 bits
    far: NDArray[Any] | None = None  # unsigned: places of the distances with further bits
    far_above: NDArray[Any] | None = None  # signed: these bits

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.close, self.far, self.far_above) if one is not None)

    @classmethod
    def of(cls, values: Int64s) -> _Packed:
        form, left = _PackedForm.of(values), values
        firsts: tuple[int, ...] = ()
        differences, before = values, firsts
        while form.nbytes > SMALL_SHARE * len(values) and len(differences) > 1 and len(before) < ORDERS - 1:
            before, differences = (*before, int(differences[0])), np.diff(differences)
            other = _PackedForm.of(differences)
            if other.nbytes < WORTH * form.nbytes:
                form, firsts, left = other, before, differences
        distances = left - form.base
        close = distances.astype(f"u{form.width // 8}") if form.width else None
        if form.is_exact:
            return cls(len(values), firsts, form, close)
        far_above = distances >> form.width
        far = np.flatnonzero(far_above != 0)  # ten times faster than that of integers
        places, far_above = far.astype(np.min_scalar_type(len(left))), far_above[far]
        if (far_above == far_above.astype(np.int32)).all():
            far_above = far_above.astype(np.int32)
        return cls(len(values), firsts, form, close, places, far_above)

    def unpack(self, out: Int64s) -> None:
        left = out[len(self.firsts) :]
        if self.close is None:
            left[:] = self.form.base
        else:
            np.add(self.close, self.form.base, out=left, dtype=np.int64, casting="unsafe")
        if self.far is not None and self.far_above is not None:
            left[self.far] += self.far_above.astype(np.int64) << self.form.width
        for order in range(len(self.firsts) - 1, -1, -1):
            out[order] = self.firsts[order]
            np.cumsum(out[order:], out=out[order:])


@lru_cache
def _sampled(rows: int) -> Int64s:
    """Return the places of the sample in a part. Their distances are random, because many values are periodic."""
    return (SAMPLE * rows).astype(np.int64)


def _in_64_bits(value: int) -> int:
    """Return the int64 that is equal to a value modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63


class PackedRows:
    """Rows of int64 in named columns."""

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

    def parts(self, *names: str) -> Iterator[tuple[Int64s, ...]]:
        """Yield all rows in order as columns, some thousand rows at a time. No part is empty.

        Args:
            names: the columns; none: all of them.
        """
        places = [self.names.index(name) for name in names or self.names]
        for part in self._parts:
            yield tuple([_unpacked(part[place]) for place in places])
        if self.recent:
            recent = self._recent_columns()
            yield tuple([recent[place] for place in places])

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
        """Return copies, because an array with an exported buffer cannot grow; each column lies in one piece."""
        rows = np.frombuffer(self.recent, np.int64).reshape(-1, len(self.names))
        return tuple(np.array(rows.T, order="C"))


def _unpacked(column: _Packed) -> Int64s:
    out = np.empty(column.rows, np.int64)
    column.unpack(out)
    return out
