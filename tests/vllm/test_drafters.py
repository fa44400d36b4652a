"""Drafts of vLLM's drafters, verified as the core decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.features import MISSING, outcome_of

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize(
    ("case", "mode"),
    [("ngram", "sync"), ("draft_model", "sync"), ("draft_model", "async"), ("eagle", "sync"), ("eagle", "async")],
)
def test_answers_with_drafts_equal_those_of_vllm(case: str, mode: str, tmp_path: Path) -> None:
    """vLLM refuses n-gram drafts with asynchronous scheduling."""
    outcome = outcome_of(case, mode, tmp_path)
    assert outcome.requests == 120
    assert not outcome.differ, outcome
    assert outcome.retracted
    assert not outcome.running_at_end
    (_, drafts, right, *_), (_, our_drafts, ours_right, *_) = outcome.work
    assert ours_right / our_drafts > 0.85 * right / drafts
