"""Fields of vLLM's requests, and the calls of its front end on a running scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.features import MISSING, outcome_of

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.long), "async"])
def test_answers_equal_those_of_vllm_for_any_fields_of_requests(mode: str, tmp_path: Path) -> None:
    """Priorities, several samples, repetition detection, stop tokens and strings, bad words, logit bias, aborts.

    Of a retracted request, asynchronous scheduling drops the sample in flight. vLLM's generators have moved on by then,
    so that a request drawn at random with a seed may get another answer than without the retraction.
    """
    outcome = outcome_of("sampling", mode, tmp_path)
    assert outcome.requests == 160
    assert not outcome.differ, outcome
    assert not outcome.redrawn or (mode == "async" and len(outcome.redrawn) <= outcome.retracted)
    assert outcome.retracted
    assert not outcome.running_at_end


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_pauses_and_resets_of_the_prefix_cache_do_as_in_vllm(mode: str, tmp_path: Path) -> None:
    outcome = outcome_of("pauses", mode, tmp_path)
    assert outcome.requests == 120
    assert not outcome.differ, outcome
    assert not outcome.running_at_end


@pytest.mark.long
def test_answers_of_two_tensor_parallel_workers_equal_those_of_vllm(tmp_path: Path) -> None:
    outcome = outcome_of("tensor_parallel", "sync", tmp_path)
    assert outcome.requests == 60
    assert not outcome.differ, outcome
    assert outcome.retracted
