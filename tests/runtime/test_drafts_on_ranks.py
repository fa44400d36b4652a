"""A draft model beside pipeline stages, and beside data-parallel ranks: the tokens of one plain engine, drafts kept.

Wrong drafts change no token, so kept drafts are counted too. A drafter with the weights of the model is right wherever
it reads the tokens and the KV of its own prefix; one with other weights is right as often as beside one plain engine.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402

from lockstep.core.cluster.stage_layers import layers_of_stages  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import RequestRetracted  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.host.drafts import DraftCounts  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime import llm as llm_module  # noqa: E402
from lockstep.runtime.assembly import stage_of  # noqa: E402
from lockstep.runtime.draft_sources import layers_beside  # noqa: E402
from lockstep.runtime.models import weights_read  # noqa: E402
from lockstep.runtime.outputs import RequestOutput  # noqa: E402
from lockstep.runtime.pooling import Pooling  # noqa: E402
from lockstep.runtime.rank_wire import RankSettings  # noqa: E402
from lockstep.runtime.stages import RankPlace  # noqa: E402
from tests.support.feature_campaign import most_in_flight  # noqa: E402
from tests.support.model_engines import CPU, EXPERTS, answered_alike, ranks_of  # noqa: E402
from tests.support.small_llm import requests_with_shared_beginnings, write_weights  # noqa: E402
from tests.support.small_runtime import SMALL_QWEN3  # noqa: E402

MODEL: dict[str, Any] = {**SMALL_QWEN3, "num_hidden_layers": 4, "tie_word_embeddings": True}
PLAIN: dict[str, Any] = {
    **CPU, "page_size": 4, "chunked_prefill_size": 16, "max_running_requests": 12, "pages": 300,
}  # fmt: skip
SMALL: dict[str, Any] = {**PLAIN, "speculative_method": "draft_model", "num_speculative_tokens": 3}
SAME, OTHER = "the model's own weights", "other weights"
KINDS: list[dict[str, Any]] = [{}, {}, {"temperature": 1.0, "top_k": 20, "seed": 3, "repetition_penalty": 1.2}]
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "2 stages": (SAME, {"pp": 2, "overlap_depth": 1, "debug": True, "retract_every": 5}),
    "3 stages, mixed, short of pages": (
        OTHER,
        {"pp": 3, "overlap_depth": 2, "pp_async_batch_depth": 1, "batching": "mixed", "debug": True}
        | {"pages": 60, "reserve": "on_demand", "retract_every": 6},
    ),
}  # fmt: skip


def noisy_copy(model: Path, into: Path) -> Path:
    """Write a model of which the weights have noise, so that it is right now and then."""
    into.mkdir()
    draw = torch.Generator().manual_seed(3)
    noisy = {
        name: one + 0.03 * torch.empty_like(one).normal_(generator=draw)
        for name, one in load_file(model / "model.safetensors").items()
    }
    save_file(noisy, into / "model.safetensors")
    (into / "config.json").write_text((model / "config.json").read_text())
    return into


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and drafters."""
    model = write_weights(tmp_path_factory.mktemp("model"), MODEL)
    return {SAME: model, OTHER: noisy_copy(model, tmp_path_factory.mktemp("other") / "drafter")}


def asked_of(drafter: str) -> list[tuple[list[int], Params]]:
    """Requests: greedy ones for the drafter that must be right."""
    found = requests_with_shared_beginnings(50, [{}] if drafter == SAME else KINDS)
    rng = random.Random(2)
    return [(prompt, replace(params, max_new_tokens=rng.randrange(3, 20))) for prompt, params in found]


def kept(counts: DraftCounts) -> float:
    """Return the share of drafts that were right."""
    return counts.right / counts.drafts


@pytest.mark.parametrize("name", STAGES)
def test_a_draft_model_in_stages_changes_no_token(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    drafter, options = STAGES[name]
    asked = asked_of(drafter)
    expected, share = of_one_engine(folders[SAME], folders[drafter], asked)
    options = {**SMALL, **options, "draft_model": str(folders[drafter])}
    with LLM(folders[SAME], journal=tmp_path / "journal", rank_timeout_s=300, **options) as llm:
        check_answers([llm], asked, expected)
        drafts = llm.stats().drafts
        beside = layers_beside(settings_of(folders[SAME], folders[drafter]))
        divided = layers_of_stages(MODEL["num_hidden_layers"], options["pp"], beside, first=True)
        assert llm.model.first_layer == sum(divided[:-1])
    assert retracted_in(tmp_path / "journal", llm.host.engine.digest, llm.config.microbatches)
    check_kept(drafter, drafts, share)


@pytest.mark.parametrize("drafter", [SAME, OTHER])
def test_each_data_parallel_rank_has_the_draft_model(drafter: str, tmp_path: Path) -> None:
    """Experts of both ranks compute the drafts that each rank verifies; the ranks have different requests."""
    (tmp_path / "model").mkdir()
    folder, asked = write_weights(tmp_path / "model", EXPERTS), asked_of(drafter)[:30]
    drafts_from = folder if drafter == SAME else noisy_copy(folder, tmp_path / "drafter")
    expected, share = of_one_engine(folder, drafts_from, asked)
    of_engine = {"ep": 2, "debug": True, "draft_model": str(drafts_from)}
    sched = {"speculative_method": "draft_model", "num_speculative_tokens": 3, "overlap_depth": 1, "retract_every": 5}
    with ranks_of(folder, 2, tmp_path / "ranks", of_engine, sched) as llms:
        check_answers(llms, asked, expected)
        stats = [llm.stats().drafts for llm in llms]
    journals = [(tmp_path / "ranks" / f"rank{rank}", llm.host.engine.digest) for rank, llm in enumerate(llms)]
    retracted = [retracted_in(folder, digest) for folder, digest in journals]
    assert any(retracted)
    steps = fold(tmp_path / "ranks" / "rank0")
    assert any(plan.mode == "idle" for _, step in steps if (plan := step.launched()) is not None)
    drafts = DraftCounts(drafts=sum(one.drafts for one in stats), right=sum(one.right for one in stats))
    assert all(one.drafts for one in stats)
    check_kept(drafter, drafts, share)


def settings_of(model: Path, drafter: Path) -> RankSettings:
    """Return settings of a rank with a draft model."""
    return RankSettings(
        model=str(model), draft_model=str(drafter), random_weights_seed=None, pooling=Pooling(), debug=False, sched={}
    )


def of_one_engine(
    model: Path, drafter: Path, asked: list[tuple[list[int], Params]]
) -> tuple[list[RequestOutput], float]:
    """Return the answers of a plain engine, and the share of drafts that are right beside one engine."""
    given = [prompt for prompt, _ in asked], [params for _, params in asked]
    with LLM(model, **PLAIN) as plain:
        expected = plain.generate(*given)
    if drafter == model:
        return expected, 1.0
    with LLM(model, **SMALL, draft_model=str(drafter)) as single:
        single.generate(*given)
        return expected, kept(single.stats().drafts)


def check_answers(llms: list[LLM], asked: list[tuple[list[int], Params]], expected: list[RequestOutput]) -> None:
    """Send the requests, most of them to the last engine, cancel some, and compare the others with one plain engine."""
    rng = random.Random(3)
    used = [min(rng.randrange(2 * len(llms)), len(llms) - 1) for _ in asked]
    answered_alike(llms, used, asked, expected, rng)


def check_kept(drafter: str, drafts: DraftCounts, share: float) -> None:
    """Compare kept drafts with those beside one plain engine, of which `share` were right."""
    assert drafts.drafts > 100
    if drafter == SAME:
        assert kept(drafts) > 0.98, "the model's own drafts are right"
    else:
        assert 0.05 < share < 0.95, "some drafts are right"
        assert abs(kept(drafts) - share) < 0.08


def retracted_in(folder: Path, digest: bytes, microbatches: int = 1) -> int:
    """Replay a journal in which batches overlapped, and return the number of retractions."""
    steps = list(fold(folder))
    launched = [plan for _, step in steps if (plan := step.launched()) is not None]
    assert {plan.microbatch for plan in launched} == set(range(microbatches))
    assert most_in_flight(steps) > 1
    assert replay(folder).digest == digest
    return sum(isinstance(event, RequestRetracted) for _, step in steps for event in step.decided)


# ------------------------------------------------------------------------------------------------- layers beside drafts


def test_the_first_stage_has_fewer_layers_where_it_drafts(folders: dict[str, Path]) -> None:
    """With equal layers the stage that drafts would be the busiest, and limit the others."""
    settings = settings_of(folders[SAME], folders[OTHER])
    beside = layers_beside(settings)
    of_model = weights_read(folders[SAME])
    assert beside == pytest.approx(4 + of_model.logits / of_model.of_layer)
    found = []
    for rank in range(2):
        seat = SimpleNamespace(place=RankPlace(rank, pp=2))
        stages = [stage_of(one, seat) for one in (settings, msgspec.structs.replace(settings, draft_model=None))]
        found.append([list(stage.layers(4)) for stage in stages])
    assert found == [[[1, 2, 3], [2, 3]], [[0], [0, 1]]], "rank 0 is the last stage"


def test_a_draft_model_that_does_not_fit_is_refused_before_ranks_start(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(llm_module, "RankGroup", started)
    small = write_weights(tmp_path, {**MODEL, "vocab_size": 200})
    with pytest.raises(ConfigError, match="has 200 tokens, the model 300"):
        LLM(folders[SAME], pp=2, draft_model=str(small), **SMALL)
    short = tmp_path / "short"
    short.mkdir()
    write_weights(short, {**MODEL, "max_position_embeddings": 64})
    with pytest.raises(ConfigError, match="takes 64 tokens, but `context_tokens_max` is 128"):
        LLM(folders[SAME], pp=2, draft_model=str(short), **SMALL)
