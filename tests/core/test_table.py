"""The table of rows grows with the running requests, and keeps all values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.errors import InvariantError
from lockstep.core.requests.table import FLAT_ROWS_MIN, RequestTable

PROMPT_TOKENS = 3


def request(number: int, outputs: int) -> Any:
    tokens = np.arange(PROMPT_TOKENS + outputs, dtype=np.int32) + 1000 * number
    return SimpleNamespace(prompt_tokens=PROMPT_TOKENS, outputs=outputs, tokens=tokens.tobytes(), row=-1)


@pytest.mark.parametrize("rows_max", [1, 63, 64, 65, 100, 128, 200])
def test_every_row_up_to_the_limit_can_be_taken_once(rows_max: int) -> None:
    table = RequestTable(rows_max, page_size=4)
    taken = []
    for number in range(rows_max):
        assert table.row_available()
        taken.append(table.take_row(request(number, 0)))
    assert taken == list(range(rows_max))  # the lowest free one first, of old rows and of new ones
    assert len(table.holders) == len(table.pages) == len(table.outputs) == len(table.spare) == rows_max
    assert not table.row_available()
    with pytest.raises(InvariantError, match=f"all {rows_max} rows are taken"):
        table.take_row(request(rows_max, 0))
    table.free_row(7 % rows_max)
    assert table.row_available()
    assert table.take_row(request(rows_max, 0)) == 7 % rows_max


def test_rows_keep_their_holders_outputs_and_pages_when_the_table_grows() -> None:
    table = RequestTable(1000, page_size=4)
    requests = [request(number, number % 90) for number in range(64)]
    for number, one in enumerate(requests):
        table.pages[table.take_row(one)] = number
    assert (len(table.holders), table.free_rows) == (64, [])
    for number in range(64, 300):
        table.take_row(request(number, 0))
    assert len(table.holders) == 512
    table.reserve(40, 200)
    assert (table.pages.shape, table.outputs.shape) == ((512, 64), (512, 256))
    for number, one in enumerate(requests):
        assert table.holders[one.row] is one
        assert table.outputs[one.row, : one.outputs].tolist() == [
            1000 * number + PROMPT_TOKENS + i for i in range(one.outputs)
        ]
        assert table.pages[one.row, :16].tolist() == [number] * 16


@pytest.mark.parametrize(("outputs", "width"), [(63, 64), (64, 128), (127, 128), (128, 256), (129, 256)])
def test_a_new_table_has_room_for_the_output_that_a_request_keeps(outputs: int, width: int) -> None:
    """After a restart requests come back with their output, and the table is as narrow as at first."""
    table, one = RequestTable(4, page_size=4), request(1, outputs)
    table.take_row(one)
    assert table.outputs[one.row, :outputs].tolist() == [1000 + PROMPT_TOKENS + i for i in range(outputs)]
    assert table.outputs.shape[1] == width, "there is room for the next token, and the width is doubled if it is not"


def test_a_table_that_is_restored_has_the_rows_and_the_widths_of_the_snapshot() -> None:
    table = RequestTable(200, page_size=4)
    table.resize(128, pages_width=32, outputs_width=256)
    last, pages, outputs = request(1, 0), np.arange(32, dtype=np.int32), np.arange(256, dtype=np.int32)
    table.load_row(127, last, pages.tobytes(), outputs.tobytes())
    assert table.holders[127] is last
    assert table.row_image(127, 32, 256) == (pages.tobytes(), outputs.tobytes())
    assert table.held_pages(127, 6) == 2


@pytest.mark.parametrize("count", [FLAT_ROWS_MIN - 1, FLAT_ROWS_MIN, FLAT_ROWS_MIN + 1])
def test_pages_and_outputs_of_few_and_of_many_rows_go_to_their_places_and_nowhere_else(count: int) -> None:
    """Tables of many rows are written by flat indices, which skip the unused entries behind each row."""
    table = RequestTable(2 * count, page_size=4)
    for number in range(2 * count):
        table.take_row(request(number, 0))
    table.pages[:], table.outputs[:] = -1, -1
    rows = np.arange(2 * count, dtype=np.int32)[::-2]  # every other one, from the last on
    places = rows // 2 % 16  # the first and the last column among them
    table.write_pages(rows, places, rows + np.int32(5000))
    table.write_outputs(rows, places, rows + np.int32(7000))
    for written, first in ((table.pages, 5000), (table.outputs, 7000)):
        expected = np.full(written.shape, -1, np.int32)
        for row in rows.tolist():
            expected[row, row // 2 % 16] = first + row
        assert written.tolist() == expected.tolist()
