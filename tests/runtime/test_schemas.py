"""Random JSON schemas through a whole engine: every answer validates. `make schema-campaign` tries 1,000 of them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("llguidance", reason="no grammar backend is installed")
pytest.importorskip("jsonschema", reason="what validates JSON is not installed")

from lockstep.runtime import LLM
from tests.support.schemas import draw_schemas, judge

TIGHT = {"page_size": 4, "pages": 48, "context_tokens_max": 128, "schedule_conservativeness": 0.1}


def test_every_answer_validates_against_its_schema() -> None:
    """Weights are random, batches overlap, and the pool is so small that some answers are retracted midway."""
    schemas = draw_schemas(24, seed=5)
    with LLM(device="cpu", random_weights=3, overlap_depth=1, **TIGHT) as llm:
        outcome = judge(llm, schemas, tokens=80, seed=1)
        retracted = llm.stats().engine.counts.retractions
    assert not outcome.faults, outcome.text()
    assert outcome.valid > len(schemas) // 2, outcome.text()
    assert retracted, "the pool was large enough"
