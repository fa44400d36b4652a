"""Packed rows return the integers that were stored, in a fraction of the memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.sim.metrics.packed_rows import PackedRows

INT64S = st.one_of(st.integers(-1, 5), st.integers(0, 300), st.integers(2**31 - 2, 2**33), st.integers(-(2**62), 2**62))
ROWS = st.lists(st.tuples(INT64S, INT64S), max_size=12)


def pour(rows: PackedRows, values: list[tuple[int, int]]) -> None:
    for row in values:
        rows.recent.extend(row)


@given(blocks=st.lists(ROWS, max_size=5), by_columns=st.booleans())
def test_rows_come_back_however_they_were_packed(blocks: list[list[tuple[int, int]]], by_columns: bool) -> None:
    rows, told = PackedRows("a", "b"), [row for block in blocks for row in block]
    for block in blocks:
        if by_columns:
            rows.add_columns(*np.array(block, np.int64).reshape(-1, 2).T)
        else:
            pour(rows, block)
        rows.pack(rows_min=1)
    assert len(rows) == len(told)
    assert list(zip(rows.column("a").tolist(), rows.column("b").tolist(), strict=True)) == told
    assert [row for a, b in rows.parts() for row in zip(a.tolist(), b.tolist(), strict=True)] == told


@given(values=st.lists(st.tuples(INT64S, INT64S), min_size=1, max_size=12), data=st.data())
def test_a_row_may_be_amended_and_a_snapshot_stays(values: list[tuple[int, int]], data: st.DataObject) -> None:
    rows = PackedRows("a", "b")
    cut, row = data.draw(st.integers(0, len(values))), data.draw(st.integers(0, len(values) - 1))
    new = data.draw(INT64S)
    pour(rows, values[: cut // 2])
    rows.pack(rows_min=1)
    pour(rows, values[cut // 2 : cut])
    rows.pack(rows_min=1)
    pour(rows, values[cut:])
    before = rows.snapshot()
    rows.amend(row, b=new)
    pour(rows, [(1, 2)])
    assert before.column("b").tolist() == [b for _, b in values]
    assert rows.column("b").tolist() == [new if i == row else b for i, (_, b) in enumerate(values)] + [2]
    assert rows.column("a").tolist() == [a for a, _ in values] + [1]


def test_each_part_takes_the_smallest_types_that_hold_it() -> None:
    rows = PackedRows("time_us", "mode", "always", "number", "jumping", "pausing")
    pauses = [10**6 * (n // 100) for n in range(1000)]
    told = [
        (10**15 + 60 * n + n % 7, n % 3, -7, 10**9 + n, n % 2 * 70_000, 400 * n + n % 300 + pauses[n])
        for n in range(1000)
    ]
    for row in told:
        rows.recent.extend(row)
    rows.pack()
    assert rows.nbytes == 1000 * 6 * 8  # too few rows to save memory
    rows.pack(rows_min=1000)
    assert rows.nbytes == 999 * 1 + 1000 * 1 + 0 + 0 + 1000 * 4 + (999 * 2 + 9 * 6)  # differences but for two
    assert [tuple(int(column[n]) for column in part) for part in rows.parts() for n in range(1000)] == told
    rows.recent.extend((2**62, 0, 0, 0, 0, 0))
    rows.recent.extend((-1, 0, 0, 0, 0, 0))
    rows.pack(rows_min=1)
    assert rows.column("time_us")[-2:].tolist() == [2**62, -1]
