"""Jump-forward end to end: the same answers, token by token, in fewer passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("llguidance", reason="no grammar backend is installed")

from lockstep.core.contract.events import Grammar, TokensForced
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.replay import replay
from lockstep.core.journal.writer import JournalWriter
from lockstep.host.loop import HostClock
from lockstep.host.recorded import run_recorded
from lockstep.host.services import RequestServices
from lockstep.runtime import LLM, Params
from lockstep.runtime.llm import LlmStats
from lockstep.runtime.outputs import RequestOutput
from lockstep.runtime.overlap import CpuLane
from tests.runtime.test_tensor_parallel import Counting
from tests.support.small_runtime import VOCABULARY, SmallRuntime, make_executor, small_config

SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["approved", "rejected"]},
        "reviewer_name": {"enum": ["Alice Liddell", "Bob Stone"]},
        "comment": {"type": "string", "maxLength": 5},
    },
    "required": ["verdict", "reviewer_name", "comment"],
    "additionalProperties": False,
}
TIGHT: dict[str, Any] = {"page_size": 4, "pages": 60, "context_tokens_max": 128}
GRAMMAR = ("json_schema", json.dumps(SCHEMA))
ASKED = [
    Params(max_new_tokens=60, grammar=GRAMMAR, logprobs=2),
    Params(max_new_tokens=60, grammar=GRAMMAR, temperature=1.0, seed=3, n=2),
    Params(max_new_tokens=60, grammar=GRAMMAR, temperature=0.8, seed=4, presence_penalty=0.7, repetition_penalty=1.2),
    Params(max_new_tokens=60, grammar=GRAMMAR, temperature=1.0, seed=5, stop=("name",)),
    Params(max_new_tokens=17, grammar=("regex", "(yes|no), because of the number [0-9] alone"), seed=6),
    Params(max_new_tokens=25, temperature=0.9, seed=7, logprobs=0, hidden_states=True),
]


def said(journal: Path | None = None, **settings: Any) -> tuple[list[RequestOutput], LlmStats]:
    with LLM(device="cpu", random_weights=3, numerics="invariant", journal=journal, **settings) as llm:
        answers = llm.generate([f"Answer {number}: " for number in range(len(ASKED))], ASKED)
        return answers, llm.stats()


@pytest.fixture(scope="module")
def plain() -> tuple[list[RequestOutput], LlmStats]:
    return said(overlap_depth=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_depth": 0},
        {"overlap_depth": 1, "retract_every": 5, "speculative_method": "ngram", **TIGHT},
    ],
    ids=["one after another", "overlap, retractions, drafts, a tight pool"],
)
def test_answers_are_those_without(
    settings: dict[str, Any], plain: tuple[list[RequestOutput], LlmStats], tmp_path: Path
) -> None:
    expected, _ = plain
    found, stats = said(tmp_path / "run", jump_forward_tokens=16, **settings)
    for mine, other in zip(found, expected, strict=True):
        assert (mine.text, mine.finish_reason, mine.error) == (other.text, other.finish_reason, "")
        assert mine.token_ids == other.token_ids
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-3)  # of forced tokens too
        assert [list(tops) for tops in mine.top_logprobs] == [list(tops) for tops in other.top_logprobs]
    assert stats.drafts.forced > 40  # each of them saves a row
    if settings == {"overlap_depth": 0}:
        assert not stats.drafts.verifications
    events = [record.event for record in read_journal(tmp_path / "run").records() if hasattr(record, "event")]
    assert any(isinstance(event, TokensForced) for event in events)
    assert replay(tmp_path / "run").digest


def test_its_plans_run_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"jump_forward_tokens": 4, "overlap_depth": 0, "retract_every": 5}
    config, grammar = small_config(**settings), Grammar("regex", "alternating", b"digest of sixteen")
    with JournalWriter.create(tmp_path, JournalHeader(config=config, host={"kind": "runtime"})) as journal:
        services = RequestServices(compile_grammar=lambda command, answer: answer(""))
        runtime = SmallRuntime(journal=journal, matchers=Counting(), requests=services, **settings)
        for number in range(4):
            runtime.submit([number, 2, 3], 12, grammar=grammar)
        runtime.submit([9, 9], 12)
        runtime.run()
    assert replay(tmp_path).digest == runtime.engine.digest
    assert runtime.host.drafts.forced > 4
    executor = make_executor(config, CpuLane(HostClock()), matchers=Counting())
    for event, result in run_recorded(tmp_path, executor, VOCABULARY):
        assert result.tokens.tobytes() == event.tokens
