"""A plan as vLLM's SchedulerOutput: block tables by deltas, requests that resume, drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.commands import BatchPlan, PageDeltas, RowTaken, Speculation
from lockstep.core.contract.errors import ContractError
from tests.vllm.support import HAVE_VLLM, needs_vllm

pytestmark = needs_vllm

if HAVE_VLLM:
    from lockstep.vllm.groups import KvGroups
    from lockstep.vllm.plans import OutputBuilder, empty_output, new_blocks


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def deltas(*runs: tuple[int, int, list[int]], opened: tuple[tuple[int, int, int], ...] = ()) -> PageDeltas:
    """Runs are (row, first index, pages); opened pages are (row, index, page)."""
    pages = [page for _, _, found in runs for page in found] + [page for _, _, page in opened]
    numbers = [number for row, first, found in runs for number in (row, first, len(found))]
    rows, index = [row for row, _, _ in opened], [index for _, index, _ in opened]
    return PageDeltas(ints(*pages), ints(*numbers), ints(*rows), ints(*index))


class Sent:
    """A builder of outputs, and the requests that it has: three prompt tokens each, blocks of two tokens."""

    def __init__(
        self, *, drafts_stay: bool = False, v2: bool = False, tokens_max: int = 64, sends_tokens: bool = False
    ) -> None:
        media: Any = SimpleNamespace(inputs_of=lambda *_: [])
        self.builder = OutputBuilder(
            tokens_max=tokens_max, context_tokens_max=32, groups=KvGroups(["full"], 64), drafts_stay=drafts_stay,
            v2_runner=v2, sends_tokens=sends_tokens, uses_mrope=False, media=media,
        )  # fmt: skip
        self.builder._new = self._new  # type: ignore[method-assign]
        self.tracked: dict[int, Any] = {}

    @staticmethod
    def _new(entry: Any, start: int) -> Any:
        return SimpleNamespace(req_id=entry.request.request_id, block_ids=list(entry.blocks), num_computed_tokens=start)

    def arrive(self, core_id: int) -> Any:
        request = SimpleNamespace(request_id=f"q{core_id}", mm_features=[])
        tokens = [7, 8, 9]
        entry = SimpleNamespace(
            request=request, blocks=[], windows=[], state=-1, prompt_tokens=3, sent=False, outputs=[], tokens=tokens
        )
        self.tracked[core_id] = entry
        return entry

    def build(self, *rows: tuple[int, int, int, int], extend_rows: int = 0, **changed: Any) -> Any:
        """Rows are (row, request, start, stop)."""
        table = np.array(rows, np.int64).reshape(-1, 4)
        plan = BatchPlan(
            batch_id=0, mode="mixed", rows=ints(*table[:, 0]), request_ids=table[:, 1].copy(),
            starts=ints(*table[:, 2]), stops=ints(*table[:, 3]), extend_rows=extend_rows, **changed,
        )  # fmt: skip
        output = empty_output()
        self.builder.build(plan, self.tracked, output)
        return output


def first_chunk(sent: Sent) -> Any:
    """Request 0 gets row 4 and pages 10 and 11 for its prompt."""
    taken = (RowTaken(4, 0, 0),)
    return sent.build((4, 0, 0, 3), extend_rows=1, rows_taken=taken, deltas=deltas((4, 0, [10, 11])))


def test_page_p_is_block_p_plus_1() -> None:
    assert new_blocks(deltas((2, 0, [0, 5]), (3, 1, [7]), opened=((2, 2, 9),))) == {2: (0, [1, 6, 10]), 3: (1, [8])}


def test_entries_of_a_table_that_are_not_consecutive_are_refused() -> None:
    with pytest.raises(ContractError, match=r"row 2: entries 0\+1 and 2"):
        new_blocks(deltas((2, 0, [5]), opened=((2, 2, 9),)))


def test_a_new_request_is_sent_whole() -> None:
    sent = Sent()
    sent.arrive(0)
    output = first_chunk(sent)
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.block_ids, new.num_computed_tokens) == ("q0", [11, 12], 0)
    assert output.num_scheduled_tokens == {"q0": 3}
    assert output.total_num_scheduled_tokens == 3
    assert output.scheduled_cached_reqs.req_ids == []


def test_a_decode_is_sent_as_what_it_adds() -> None:
    sent = Sent()
    entry = sent.arrive(0)
    first_chunk(sent)
    same = sent.build((4, 0, 3, 4)).scheduled_cached_reqs
    assert (same.req_ids, same.new_block_ids, same.num_computed_tokens) == (["q0"], [None], [3])
    assert same.num_output_tokens == [1]
    more = sent.build((4, 0, 4, 5), deltas=deltas(opened=((4, 2, 20),))).scheduled_cached_reqs
    assert more.new_block_ids == [([21],)]
    assert not more.resumed_req_ids
    assert more.all_token_ids == {}  # it ran in the step before
    assert entry.blocks == [11, 12, 21]


def test_a_request_that_did_not_run_in_the_step_before_is_sent_with_its_tokens() -> None:
    sent = Sent()
    sent.arrive(0)
    sent.arrive(1)
    first_chunk(sent)
    sent.build((5, 1, 0, 3), extend_rows=1, rows_taken=(RowTaken(5, 1, 0),), deltas=deltas((5, 0, [12, 13])))
    assert sent.build((4, 0, 3, 4)).scheduled_cached_reqs.all_token_ids == {"q0": [7, 8, 9]}
    sent.builder.forget_previous()  # an empty step
    assert sent.build((4, 0, 4, 5)).scheduled_cached_reqs.all_token_ids == {"q0": [7, 8, 9]}


@pytest.mark.parametrize("v2", [False, True], ids=["runner V1", "runner V2"])
def test_a_request_that_was_retracted_is_sent_with_its_whole_table(v2: bool) -> None:
    sent = Sent(v2=v2)
    sent.arrive(0)
    first_chunk(sent)
    taken = (RowTaken(1, 0, 1),)
    output = sent.build((1, 0, 2, 4), extend_rows=1, rows_taken=taken, deltas=deltas((1, 0, [30, 31])))
    if v2:
        (new,) = output.scheduled_new_reqs
        assert (new.block_ids, new.num_computed_tokens) == ([31, 32], 2)
        return
    cached = output.scheduled_cached_reqs
    assert cached.resumed_req_ids == {"q0"}
    assert (cached.new_block_ids, cached.num_computed_tokens) == ([([31, 32],)], [2])


def test_a_row_without_its_table_is_refused() -> None:
    sent = Sent()
    sent.arrive(0)
    with pytest.raises(ContractError, match="request q0: a row was taken without its whole block table"):
        sent.build((4, 0, 0, 3), extend_rows=1, rows_taken=(RowTaken(4, 0, 0),), deltas=deltas((4, 1, [10])))


def test_workers_only_append_to_a_table() -> None:
    sent = Sent()
    entry = sent.arrive(0)
    first_chunk(sent)
    with pytest.raises(ContractError, match="the plan changes entry 1 of a block table of 2"):
        sent.build((4, 0, 3, 4), deltas=deltas(opened=((4, 1, 20),)))
    with pytest.raises(ContractError, match="vLLM's workers only append"):
        sent.build((4, 0, 4, 5), deltas=deltas(opened=((4, 5, 20),)))
    assert entry.blocks == [11, 12]


def test_workers_of_earlier_stages_get_the_tokens_to_compute() -> None:
    sent = Sent(sends_tokens=True)
    entry = sent.arrive(0)
    first_chunk(sent)
    entry.tokens.append(50)  # the sampled token, which the last stage has
    assert sent.build((4, 0, 3, 4)).scheduled_cached_reqs.new_token_ids == [[50]]
    entry.tokens.append(51)
    assert Sent().build().scheduled_cached_reqs.new_token_ids == []
    again = sent.build((4, 0, 0, 5), extend_rows=1, rows_taken=(RowTaken(4, 0, 0),), deltas=deltas((4, 0, [1, 2, 3])))
    assert again.scheduled_cached_reqs.new_token_ids == [[7, 8, 9, 50, 51]]  # after a retraction: all of them


def test_as_many_drafts_as_the_plan_allows() -> None:
    sent = Sent()
    sent.arrive(0)
    first_chunk(sent)
    sent.builder.drafts["q0"] = [50, 51, 52]
    output = sent.build((4, 0, 3, 6), speculation=Speculation(3, ints(2), "ngram"))
    assert output.scheduled_spec_decode_tokens == {"q0": [50, 51]}
    assert output.num_scheduled_tokens == {"q0": 3}
    assert sent.builder.drafts == {}
    again = sent.build((4, 0, 5, 8), speculation=Speculation(3, ints(2), "ngram"))
    assert again.scheduled_spec_decode_tokens == {}  # none was proposed
    assert again.num_scheduled_tokens == {"q0": 1}


def test_drafts_that_stay_with_the_workers_are_placeholders() -> None:
    sent = Sent(drafts_stay=True)
    sent.arrive(0)
    first_chunk(sent)
    output = sent.build((4, 0, 3, 6), speculation=Speculation(3, ints(2), "ngram"))
    assert output.scheduled_spec_decode_tokens == {"q0": [-1, -1]}


def test_drafts_end_with_the_context() -> None:
    sent = Sent()
    sent.arrive(0)
    first_chunk(sent)
    sent.builder.drafts["q0"] = [50, 51, 52]
    output = sent.build((4, 0, 29, 33), speculation=Speculation(3, ints(3), "ngram"))
    assert output.scheduled_spec_decode_tokens == {"q0": [50]}  # context of 32: a draft, a sampled token


def test_a_pass_larger_than_the_workers_buffers_is_refused() -> None:
    sent = Sent(tokens_max=2)
    sent.arrive(0)
    with pytest.raises(ContractError, match="the plan has 3 tokens; vLLM's workers have buffers for 2"):
        first_chunk(sent)
