"""Results of a prompt on their way from a prefill to a decode engine: what is packed there is unpacked here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.host.handover.results import PromptSink, packed, unpacked
from lockstep.host.sinks import ResultExtras, TokenLogprobs

TOPS = TokenLogprobs(
    np.array([-0.5, -9.0], np.float32),
    np.array([[4, 70_000], [1, 2]], np.int32),
    np.array([[-0.5, -1.25], [0.0, 0.0]], np.float32),
)
EXTRAS = ResultExtras(
    prompt_logprobs={1: -0.25, 3: -2.0},
    prompt_top_logprobs={1: {5: -0.25, 6: -3.0}},
    hidden_states={9: np.array([1.5, -2.0, 0.25], np.float32), 2: np.array([0.5, 4.0, -8.0], np.float32)},
)


@pytest.mark.parametrize("extras", [None, ResultExtras(), EXTRAS])
def test_the_results_of_a_prompt_are_packed_and_unpacked(extras: ResultExtras | None) -> None:
    own = ResultExtras(prompt_logprobs={0: -7.0})
    assert unpacked(packed(None, extras), own) is None
    given = extras or ResultExtras()
    assert own.prompt_logprobs == {0: -7.0, **given.prompt_logprobs}
    assert own.prompt_top_logprobs == given.prompt_top_logprobs
    assert own.hidden_states.keys() == given.hidden_states.keys()
    for position, states in given.hidden_states.items():
        np.testing.assert_array_equal(own.hidden_states[position], states)


def test_logprobs_of_the_first_token_come_with_those_beside_it_if_there_are_any() -> None:
    found: Any = unpacked(packed(TOPS, None), ResultExtras())
    assert found[0] == -0.5
    np.testing.assert_array_equal(found[1], [4, 70_000])
    np.testing.assert_array_equal(found[2], np.array([-0.5, -1.25], np.float32))
    assert unpacked(packed(TokenLogprobs(TOPS.logprobs), None), ResultExtras()) == (-0.5, None, None)


def test_a_prompt_keeps_the_logprobs_of_its_first_token_and_reports_a_refusal() -> None:
    refused: list[str] = []
    sink = PromptSink(refused.append)
    assert sink.logprobs is None
    sink.tokens(0, [4], TOPS)
    sink.tokens(1, [5], None)
    sink.finished(FinishRequest(1, "length", 3, 1, 0), ResultExtras())
    sink.failed("the engine has ended")
    assert sink.logprobs is TOPS
    assert refused == []
    sink.rejected(RejectRequest(1, "too_long", "the prompt is too long"))
    sink.rejected(RejectRequest(1, "too_long", ""))
    assert refused == ["the prompt is too long", "too_long"]
