"""Results of vLLM's workers as events, and decisions as outputs for clients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from lockstep.core.contract.commands import BatchPlan, Speculation
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import FinishReason
from tests.vllm.support import HAVE_VLLM, needs_vllm

pytestmark = needs_vllm

if HAVE_VLLM:
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    from lockstep.vllm.requests import stop_reason
    from lockstep.vllm.results import STATUS, ClientOutputs, LaunchedBatch, batch_finished


def launched(*names: str, drafts: bool = False) -> Any:
    speculation = Speculation(2, np.array([2] * len(names), np.int32), "ngram") if drafts else None
    empty = np.zeros(0, np.int32)
    plan = BatchPlan(
        batch_id=7, mode="decode", rows=empty, request_ids=np.zeros(0, np.int64), starts=empty, stops=empty,
        generation=2, speculation=speculation,
    )  # fmt: skip
    return LaunchedBatch(plan, [SimpleNamespace(request=SimpleNamespace(request_id=name)) for name in names], 100)


def result(**tokens: list[int]) -> Any:
    index = {name: number for number, name in enumerate(tokens)}
    return ModelRunnerOutput(req_ids=list(tokens), req_id_to_index=index, sampled_token_ids=list(tokens.values()))


def test_tokens_are_in_the_order_of_the_sampling_rows() -> None:
    event, tokens = batch_finished(launched("a", "b"), result(b=[6], a=[5]), 110, 130)
    assert tokens == [[5], [6]]
    assert np.frombuffer(event.tokens, np.int32).tolist() == [5, 6]
    assert (event.batch_id, event.generation, event.accepted) == (7, 2, b"")
    assert (event.started_us, event.finished_us, event.time_us) == (110, 130, 130)


def test_a_pass_without_sampling_rows_has_no_tokens() -> None:
    event, tokens = batch_finished(launched(), result(), 0, 1)
    assert (event.tokens, tokens) == (b"", [])


def test_a_verification_counts_the_tokens_of_each_row() -> None:
    event, _ = batch_finished(launched("a", "b", drafts=True), result(a=[5, 6, 7], b=[8]), 0, 1)
    assert np.frombuffer(event.accepted, np.int32).tolist() == [3, 1]


@pytest.mark.parametrize(("drafts", "tokens"), [(False, []), (False, [1, 2]), (True, [])])
def test_a_wrong_number_of_tokens_is_refused(drafts: bool, tokens: list[int]) -> None:
    with pytest.raises(ContractError, match=f"request a: the workers returned {len(tokens)} tokens"):
        batch_finished(launched("a", drafts=drafts), result(a=tokens), 0, 1)


def test_every_reason_to_finish_has_a_status_of_vllm() -> None:
    assert set(STATUS) == set(get_args(getattr(FinishReason, "__value__", FinishReason)))
    assert all(RequestStatus.is_finished(status) for status in STATUS.values())


def test_the_end_token_is_no_stop_reason() -> None:
    params: Any = SimpleNamespace(eos_token_id=2)
    assert stop_reason(params, 2) is None
    assert stop_reason(params, 9) == 9
    assert stop_reason(None, 9) is None


def test_outputs_are_taken_once_and_by_client() -> None:
    outputs = ClientOutputs()
    for client, name in ((0, "a"), (1, "b"), (0, "c")):
        request = SimpleNamespace(
            client_index=client, events=[], prefill_stats=None, request_id=name, sampling_params=None,
            trace_headers=None,
        )  # fmt: skip
        outputs.add(SimpleNamespace(request=request), [3])  # type: ignore[arg-type]
    taken = outputs.take()
    assert {client: [one.request_id for one in found.outputs] for client, found in taken.items()} == {
        0: ["a", "c"],
        1: ["b"],
    }
    assert outputs.take() == {}
