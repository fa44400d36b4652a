"""Running batches: their members and columns, the width of the tables behind them, and batches in flight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.commands import NO_ROWS, BatchPlan, PageDeltas
from lockstep.core.requests.batching import FEW_ROWS, InFlight
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import HAS_CADENCE, HAS_GRAMMAR, WATCHES_TEXT, RequestTable, RunningBatch

PROMPT_TOKENS = 3


def request(number: int, *, max_new: int = 1000, row: int | None = None, **fields: Any) -> Any:
    values = {
        "request_id": number,
        "row": number if row is None else row,
        "prompt_tokens": PROMPT_TOKENS,
        "limit": PROMPT_TOKENS + max_new,
        "min_new_tokens": 0,
        "stream_every": 1,
        "streams": True,
        "ignore_eos": False,
        "grammar": None,
        "watches_text": False,
        "stop_token_ids": (),
        "decodes": False,
        "computed": 0,
    }
    return SimpleNamespace(**(values | fields))


def running(table: RequestTable, *requests: Any) -> RunningState:
    """Return the state of a running batch of requests that have just computed their prompts."""
    state = RunningState(prefill_decode_interval=1)
    state.admit(RunningBatch.of(list(requests)), np.full(len(requests), PROMPT_TOKENS, np.int32), table)
    return state


def in_flight(requests: list[Any], rows: list[int], samplers: list[int], **fields: Any) -> InFlight:
    """Return a batch that computes one position of each row, and samples those of `samplers`."""
    held = np.array(rows, np.int32)
    plan = BatchPlan(
        batch_id=0,
        mode="extend",
        generation=0,
        extend_rows=len(rows),
        rows=held,
        request_ids=np.array([one.request_id for one in requests], np.int64),
        starts=np.zeros(len(rows), np.int32),
        stops=np.ones(len(rows), np.int32),
        token_ids=NO_ROWS,
        sample_rows=np.array(samplers, np.int32),
        deltas=PageDeltas(NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS),
        rows_taken=(),
        pooled_rows=np.array(fields.pop("pooled", []), np.int32),
    )
    batch = RunningBatch.of([requests[i] for i in samplers])
    batch.rows[:] = held[samplers]
    return InFlight(plan, requests, batch, **fields)


@pytest.mark.parametrize("members", [4095, 4096, 4097])
def test_every_member_of_a_batch_of_thousands_has_an_index_and_a_token(members: int) -> None:
    batch = RunningBatch.of([request(number) for number in range(members)])
    assert batch.everyone.tolist() == list(range(members))
    assert batch.ones.tolist() == [1] * members


def test_columns_of_stop_tokens_leave_with_the_last_request_that_has_so_many() -> None:
    """Each column is compared with every token of every step."""
    batch = RunningBatch.of([request(0, stop_token_ids=(7,)), request(1, stop_token_ids=(7, 8, 9)), request(2)])
    assert batch.stops.tolist() == [[7, -1, -1], [7, 8, 9], [-1, -1, -1]]
    assert batch.only(np.array([0, 2])).stops.tolist() == [[7], [-1]]
    assert batch.only(np.array([2])).stops.shape == (1, 0)
    assert RunningBatch.of([]).stops.shape == (0, 0)


def test_rare_features_of_the_members_are_those_of_the_batch() -> None:
    plain, grammar, text = request(0), request(1, grammar="g"), request(2, watches_text=True)
    seldom, at_end = request(3, stream_every=5), request(4, streams=False)
    both = request(5, grammar="g", watches_text=True)
    batch = RunningBatch.of([plain, grammar, text, seldom, at_end, both])
    assert batch.special.tolist() == [
        0,
        HAS_GRAMMAR,
        WATCHES_TEXT,
        HAS_CADENCE,
        HAS_CADENCE,
        HAS_GRAMMAR | WATCHES_TEXT,
    ]
    for members, constrained, watched, steady in (
        ([plain], False, False, True),
        ([plain, grammar], True, False, True),
        ([grammar, text], True, True, False),
        ([seldom, grammar], True, False, False),
        ([at_end], False, False, False),
    ):
        own = RunningBatch.of(members)
        assert (own.constrained, own.watched, own.steady) == (constrained, watched, steady)


@pytest.mark.parametrize("gone", [[2], [0, 3], [1, 2, 3]])
def test_removed_members_keep_their_positions_and_the_others_stay(gone: list[int]) -> None:
    table = RequestTable(8, page_size=4)
    members = [request(number) for number in range(4)]
    state = running(table, *members)
    state.move_to(np.array([10, 11, 12, 13], np.int32))
    state.remove(gone, table)
    stay = [number for number in range(4) if number not in gone]
    assert [one.request_id for one in state.batch.requests] == stay
    assert state.positions.tolist() == [10 + number for number in stay]
    assert [one.computed for one in members] == [10 + one.row if one.row in gone else 0 for one in members]
    assert [one.decodes for one in members] == [one.row not in gone for one in members]


@pytest.mark.parametrize(
    ("position", "pages", "outputs"), [(63, 16, 64), (64, 32, 64), (65, 32, 64), (66, 32, 128), (127, 32, 128)]
)
def test_tables_have_room_for_the_next_decode_of_a_member_that_joins(position: int, pages: int, outputs: int) -> None:
    table = RequestTable(2, page_size=4)
    state = RunningState(prefill_decode_interval=1)
    state.join(RunningBatch.of([request(0)]), np.array([position], np.int32), table)
    assert (table.pages.shape[1], table.outputs.shape[1]) == (pages, outputs)
    assert state.horizon >= 1, "the next decode fits"


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_tables_are_as_wide_as_the_next_decode_needs_and_grow_by_doubling(page_size: int) -> None:
    """The next decode writes the page of the next position, and the output token that it samples there."""
    table = RequestTable(2, page_size)
    ahead, behind = request(0, max_new=700), request(1, max_new=700)
    state = running(table, ahead)
    for position in range(PROMPT_TOKENS, 300):
        assert table.pages.shape[1] == _width(16, position // page_size + 1)
        assert table.outputs.shape[1] == _width(64, position - PROMPT_TOKENS + 2)
        assert state.advance(state.positions + np.int32(1), table) == []
    joined = np.array([PROMPT_TOKENS], np.int32)
    state.join(RunningBatch.of([behind]), joined, table)
    for position in range(300, 600):
        assert table.pages.shape[1] == _width(16, position // page_size + 1)
        assert table.outputs.shape[1] == _width(64, position - PROMPT_TOKENS + 2)
        state.advance(state.positions + np.int32(1), table)


def _width(first: int, wanted: int) -> int:
    while first < wanted:
        first *= 2
    return first


@pytest.mark.parametrize("rows", [FEW_ROWS - 1, FEW_ROWS, FEW_ROWS + 1])
def test_a_batch_of_any_size_names_its_rows_and_counts_the_tokens_of_each(rows: int) -> None:
    requests = [request(number, row=2 * number) for number in range(rows)]
    batch = in_flight(requests, [one.row for one in requests], list(range(1, rows)), ending=[])
    assert [batch.names(row) for row in range(2 * rows)] == [True, False] * rows
    assert [batch.tokens_of(row) for row in range(2 * rows)] == [0, 0, *[1, 0] * (rows - 1)]


def test_a_request_that_left_its_row_is_not_alive_in_a_batch_that_names_the_row() -> None:
    """Request 1 has another row by now. Request 2 came back to its row, which the batch holds for its earlier stay."""
    requests = [request(0), request(1, row=5), request(2), request(3)]
    batch = in_flight(requests, [0, 1, 2, 3], [], ending=[], dead=[1, 2])
    assert [(i, one.request_id) for i, one in batch.alive()] == [(0, 0), (3, 3)]


def test_a_request_that_left_its_row_does_not_end_with_a_batch_that_names_the_row() -> None:
    requests = [request(0), request(1, row=5), request(2), request(3), request(4), request(5, row=6), request(6)]
    requests[6].row = 6
    rows = [0, 1, 2, 3, 4, 5, 6]
    batch = in_flight(requests, rows, [0, 1, 2, 3], ending=[0, 1, 2], dead=[1, 2, 5, 6], pooled=[4, 5, 6])
    assert [one.request_id for one in batch.computed_requests()] == [4]
    assert [one.request_id for one in batch.ending_requests()] == [0, 4]
