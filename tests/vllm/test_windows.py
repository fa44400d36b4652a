"""Models of vLLM with several KV cache groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.features import MISSING, outcome_of

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_answers_of_a_model_with_windows_equal_those_of_vllm(mode: str, tmp_path: Path) -> None:
    """One group of full attention and two with windows, whose blocks vLLM allocates from one pool."""
    outcome = outcome_of("windows", mode, tmp_path)
    assert outcome.requests == 200
    assert not outcome.differ, outcome
    assert outcome.retracted
    assert not outcome.running_at_end
    assert outcome.work[1][0] < 1.25 * outcome.work[0][0]
