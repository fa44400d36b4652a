"""Multimodal requests of vLLM, scheduled by the core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.features import MISSING, outcome_of

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_answers_about_audio_equal_those_of_vllm(mode: str, tmp_path: Path) -> None:
    """Items that several requests share, chunks that split items, and an encoder cache that does not hold all."""
    outcome = outcome_of("audio", mode, tmp_path)
    assert outcome.requests == 150
    assert not outcome.differ, outcome
    assert not outcome.running_at_end
    (*_, encoded, freed), (*_, ours_encoded, ours_freed) = outcome.work
    assert freed > 100
    assert ours_freed > 100
    assert ours_encoded < 1.1 * encoded
