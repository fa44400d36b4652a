"""Layers with sliding windows whose KV is in pages of their own, given out and released by the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="models with windows run by transformers' code")

from lockstep.core.contract.commands import BatchPlan, HybridChanges  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.errors import PlanError  # noqa: E402
from lockstep.runtime.plan_checks import refuse_blocks  # noqa: E402
from lockstep.runtime.tables import last_windows  # noqa: E402
from tests.support.architectures import STIRRED, WINDOW_SHARE, greedy_answers, save_architecture, serve  # noqa: E402

NAMES = ("Gemma 3", "Gemma 2", "gpt-oss", "Cohere 2")


@pytest.fixture(scope="module", params=NAMES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, greedy_answers(save_architecture(folder, request.param))


@pytest.mark.parametrize(
    "options",
    [{"overlap_depth": 0}, {"overlap_depth": 2}, {"speculative_method": "ngram", "num_speculative_tokens": 2}],
    ids=["", "overlap", "drafts"],
)
def test_tokens_are_those_of_transformers(reference: tuple[Path, list[list[int]]], options: dict[str, Any]) -> None:
    """With chunks, cached prefixes, retractions, and the tags of all slots that are read in either pool."""
    folder, answers = reference
    served = serve(folder, swa_full_tokens_ratio=WINDOW_SHARE, **options)
    assert served.answers == answers
    assert served.cached_tokens
    assert served.retractions


def test_layers_with_windows_have_fewer_pages(tmp_path: Path) -> None:
    save_architecture(tmp_path, "Gemma 3")
    settings = {**STIRRED, "swa_full_tokens_ratio": WINDOW_SHARE}
    with LLM(tmp_path, **settings) as llm:
        pool = llm._live.pool
        assert len(pool.sliding) == 6  # of seven layers
        pages, windows = STIRRED["pages"], int(STIRRED["pages"] * WINDOW_SHARE)
        assert {len(pool.keys[layer]) for layer in pool.sliding} == {windows + 1}
        assert len(pool.keys[6 if 6 not in pool.sliding else 5]) == pages + 1
        assert llm.config.hybrid.window_pages == windows
        # One request is longer than all window pages together.
        (answer,) = llm.generate([[3 + token % 90 for token in range(60)]], Params(max_new_tokens=60, ignore_eos=True))
        assert len(answer.token_ids) == 60


def test_a_window_pool_that_is_too_small_shows_in_the_canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tags find window pages that are given to another page while they are read."""
    from lockstep.runtime import tables

    save_architecture(tmp_path, "Gemma 3")
    right = tables.last_windows
    monkeypatch.setattr(tables, "last_windows", lambda changes: (right(changes)[0], right(changes)[1] % 7))
    with pytest.raises(Exception, match="which is not its KV"):
        serve(tmp_path, swa_full_tokens_ratio=WINDOW_SHARE)


@pytest.mark.parametrize(
    ("name", "share", "why"),
    [
        ("Llama", 0.5, "`swa_full_tokens_ratio` is 0.5, but LlamaForCausalLM has no sliding windows"),
        ("Mistral", 0.5, "MistralForCausalLM has windows of 9 tokens in all of its layers"),
        ("Gemma 3", 1.5, "`swa_full_tokens_ratio` must be above 0 and at most 1, got `1.5`"),
    ],
)
def test_a_share_that_does_not_fit_the_model_is_refused(name: str, share: float, why: str, tmp_path: Path) -> None:
    save_architecture(tmp_path, name)
    with pytest.raises(ConfigError, match=why):
        LLM(tmp_path, swa_full_tokens_ratio=share)


def test_of_two_entries_for_a_page_the_later_applies() -> None:
    changes = HybridChanges(np.array([4, 2, 4], np.int32), np.array([0, 1, 3], np.int32))
    pages, windows = last_windows(changes)
    assert dict(zip(pages.tolist(), windows.tolist(), strict=True)) == {4: 3, 2: 1}


def test_plans_with_states_or_unknown_windows_are_refused() -> None:
    class Plan:
        batch_id = 3
        hybrid = HybridChanges(state_rows=np.zeros(1, np.int32))

    plan: BatchPlan = Plan()  # type: ignore[assignment]
    with pytest.raises(PlanError, match="batch 3 has states of layers, but the model here keeps none"):
        refuse_blocks(plan, windows=True, states=False)
    Plan.hybrid = HybridChanges(np.zeros(1, np.int32), np.zeros(1, np.int32))
    with pytest.raises(PlanError, match="batch 3 gives out window pages, but the model here has none"):
        refuse_blocks(plan, windows=False, states=True)
