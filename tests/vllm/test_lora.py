"""LoRA adapters of vLLM, scheduled by the core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.features import MISSING, outcome_of

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.long]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_answers_on_adapters_and_the_base_model_equal_those_of_vllm(mode: str, tmp_path: Path) -> None:
    outcome = outcome_of("lora_and_base", mode, tmp_path)
    assert outcome.requests == 120
    assert not outcome.differ, outcome
    assert outcome.retracted
    assert not outcome.running_at_end
