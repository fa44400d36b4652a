"""Embeddings computed by vLLM, scheduled by the core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.features import MISSING, outcome_of

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("case", ["embed", "encoder"])
def test_embeddings_equal_those_of_vllm(case: str, mode: str, tmp_path: Path) -> None:
    """Of a decoder with prompts in several chunks, and of an encoder without KV cache."""
    outcome = outcome_of(case, mode, tmp_path)
    assert outcome.requests == 120
    assert not outcome.differ, outcome
    assert not outcome.running_at_end
