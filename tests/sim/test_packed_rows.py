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
    assert [one for (b,) in rows.parts("b") for one in b.tolist()] == [b for _, b in told]
    assert [row for b, a in rows.parts("b", "a") for row in zip(a.tolist(), b.tolist(), strict=True)] == told
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


def test_each_part_takes_the_smallest_form() -> None:
    count = 4_096
    number = np.arange(count)
    joins = number % 64 == 0  # a batch with a prompt takes longer
    lasts = 25_000 + number // 3 + joins * 40_000
    columns = {
        "equal": np.full(count, -7),
        "numbers": 10**9 + 3 * number,
        "level": number // 512,  # changes 7 times
        "mode": number % 3,
        "prompts": joins * (1_000 + number),  # 0 but for 64 rows
        "clock": 10**15 + 60_000 * number + number % 7 * 40,
        "ends": np.cumsum(lasts),
        "far": np.where(number % 2, 0, 2**40 + number**3),
    }
    nbytes = {}
    for name, values in columns.items():
        rows = PackedRows(name)
        rows.add_columns(values)
        assert rows.nbytes == count * 8  # not packed yet
        rows.pack()
        nbytes[name] = rows.nbytes
        assert rows.column(name).tolist() == values.tolist()
    place = 2 + 4  # of a distance beyond the others, with its further bits
    assert nbytes == {
        "equal": 0,
        "numbers": 0,
        "level": 7 * place,
        "mode": count,
        "prompts": 64 * place,
        "clock": 585 * place,  # differences of 60,040, but for one in seven
        "ends": (count - 2) + 126 * place,  # differences of differences: a prompt makes two that are far
        "far": count // 2 * (2 + 8),  # bits beyond 32 take eight bytes
    }


def test_a_few_rows_of_a_part_may_be_as_far_as_63_bits_from_the_others() -> None:
    values = np.zeros(5_000, np.int64)
    values[[7, 4_999]] = 2**62, -(2**62)
    for column in (values, np.cumsum(values), np.arange(5_000) + values):
        rows = PackedRows("a")
        rows.add_columns(column)
        rows.pack()
        assert rows.nbytes < 100
        assert rows.column("a").tolist() == column.tolist()


@given(
    base=INT64S,
    steps=st.lists(st.tuples(st.integers(1, 400), st.integers(-3, 70_000), st.integers(-3, 3)), min_size=1, max_size=6),
    far=st.lists(st.tuples(st.integers(0, 2_399), INT64S), max_size=4),
)
def test_long_parts_of_any_shape_come_back(
    base: int, steps: list[tuple[int, int, int]], far: list[tuple[int, int]]
) -> None:
    lasts = np.concatenate([step + slope * np.arange(count, dtype=np.int64) for count, step, slope in steps])
    values = base // 2 + np.cumsum(lasts)
    for place, value in far:
        values[place % len(values)] = value
    rows = PackedRows("a", "b")
    rows.add_columns(values, lasts)
    rows.pack(rows_min=1)
    assert rows.column("a").tolist() == values.tolist()
    assert rows.column("b").tolist() == lasts.tolist()
