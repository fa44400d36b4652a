"""Which arrivals are accepted, with which parts, and which are refused with which text: at the limits and beyond."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import Prompt, RequestArrived, SamplingParams, TokenDigest, TokenIds, TokenRuns
from lockstep.core.requests.table import BASE, Accepted, Extras, prompt_length
from lockstep.core.requests.validation import STOP_TOKENS_MAX, RequestRefused, accepted

LAST = 2**31 - 1  # the largest token id


def taken(prompt: Prompt = TokenRuns((1, 3)), *, max_new_tokens: int = 2, **fields: Any) -> Accepted:  # noqa: B008
    event = RequestArrived(0, request_id=0, prompt=prompt, max_new_tokens=max_new_tokens, **fields)
    return accepted(event, BASE, SchedConfig(page_size=4, pages=64))


def refusal(*prompt: Prompt, **fields: Any) -> str:
    with pytest.raises(RequestRefused) as refused:
        taken(*prompt, **fields)
    return f"{refused.value.reason}: {refused.value}"


@pytest.mark.parametrize(
    ("runs", "ids"),
    [
        ((0, 1), [0]),
        ((LAST, 1), [LAST]),
        ((LAST - 1, 2), [LAST - 1, LAST]),
        ((5, 2, 9, 3, 1, 1), [5, 6, 9, 10, 11, 1]),
    ],
)
def test_runs_of_ids_are_taken_up_to_the_last_id(runs: tuple[int, ...], ids: list[int]) -> None:
    assert np.frombuffer(taken(TokenRuns(runs)).tokens, np.int32).tolist() == ids
    assert prompt_length(TokenRuns(runs)) == len(ids)


@pytest.mark.parametrize(("first", "count"), [(5, 0), (5, -1), (-1, 1), (-1, 3), (LAST, 2), (LAST + 1, 1), (-1, 0)])
def test_a_run_with_an_id_that_is_none_or_without_ids_is_refused(first: int, count: int) -> None:
    text = f"a run of {count} ids from {first} on; ids are 0 to {LAST}, counts from 1"
    assert refusal(TokenRuns((1, 2, first, count))) == f"bad_request: `prompt` is malformed: {text}"


def test_a_prompt_that_is_no_list_of_ids_is_refused() -> None:
    text = "bad_request: `prompt` is malformed: "
    assert refusal(TokenRuns((1, 2, 3))) == f"{text}token runs must be pairs of first id and count, got 3 numbers"
    assert refusal(TokenIds(b"12345")) == f"{text}prompt ids must be packed int32, got 5 bytes"


def test_a_prompt_of_which_only_the_digest_was_kept_does_not_run() -> None:
    prompt = TokenDigest(3, b"d" * 32)
    assert refusal(prompt) == f"unsupported: `prompt` is {prompt!r}, which this engine does not support yet"


def test_any_token_may_end_a_request_and_so_many_may() -> None:
    taken(stop_token_ids=(0, 1, LAST), max_new_tokens=1)
    taken(stop_token_ids=tuple(range(STOP_TOKENS_MAX)))
    for token in (-1, LAST + 1):
        text = f"`stop_token_ids` holds {token}, which is no token id (0 to {LAST})"
        assert refusal(stop_token_ids=(5, token)) == f"bad_request: {text}"
    assert refusal(stop_token_ids=tuple(range(STOP_TOKENS_MAX + 1))) == (
        f"bad_request: `stop_token_ids` has {STOP_TOKENS_MAX + 1} ids, at most {STOP_TOKENS_MAX} are allowed"
    )


@pytest.mark.parametrize("samples", [2, 3, 128])
def test_several_samples_of_no_output_are_refused(samples: int) -> None:
    text = f"`parallel_samples` is {samples}, but `max_new_tokens` 0 leaves one answer"
    assert refusal(max_new_tokens=0, parallel_samples=samples) == f"bad_request: {text}"


@pytest.mark.parametrize("field", ["namespace", "tenant"])
def test_a_zero_character_in_a_name_is_refused(field: str) -> None:
    text = f"`{field}` holds a zero character, which separates namespaces from what the core adds"
    assert refusal(**{field: "a\0b"}) == f"bad_request: {text}"


@pytest.mark.parametrize(
    ("fields", "extras"),
    [
        ({}, None),
        ({"sampling": SamplingParams()}, None),
        ({"token_type_ids": b"\0\1\1"}, Extras(token_type_ids=b"\0\1\1")),
        ({"return_hidden_states": True}, Extras(hidden_from=0)),
        ({"sampling": SamplingParams(top_logprobs=1)}, Extras(logprobs=True)),
        ({"logprob_start": 1}, Extras(logprobs=True, logprobs_from=1)),
        ({"logprob_start": 2}, Extras(logprobs=True)),
    ],
)
def test_only_results_that_were_requested_are_kept_for_a_request(fields: dict[str, Any], extras: Extras | None) -> None:
    assert taken(**fields).extras == extras


@pytest.mark.parametrize(
    ("context", "limit"),
    [(7, "the context of 7 tokens"), (8, "the context of 8 tokens"), (9, "the KV pool of 8 tokens")],
)
def test_the_refusal_of_a_long_prompt_without_output_names_the_limit_that_it_exceeds(context: int, limit: str) -> None:
    config = SchedConfig(page_size=2, pages=4, context_tokens_max=context)
    event = RequestArrived(0, request_id=0, prompt=TokenRuns((1, 9)), max_new_tokens=0, kind="score")
    with pytest.raises(RequestRefused, match=f"the prompt has 9 tokens, more than {limit} holds"):
        accepted(event, BASE, config)
