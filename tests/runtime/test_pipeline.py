"""One engine over several pipeline stages: the tokens of one stage, and an end with one sentence when a stage is lost.

Stages are processes on the CPU that send to each other over gloo. Starting them takes seconds, so engines are shared:
first the answers of each are compared with those of one plain engine, then each loses a stage.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from safetensors.torch import save_file  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import RequestRetracted  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.host.errors import killed_from_outside  # noqa: E402
from lockstep.host.startup import Keeper  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime import ranks as ranks_module  # noqa: E402
from lockstep.runtime.errors import EngineStopped  # noqa: E402
from lockstep.runtime.models import Parallel, build_model, read_settings  # noqa: E402
from lockstep.runtime.models.stage import StageLayers  # noqa: E402
from lockstep.runtime.processor import threads_of_rank  # noqa: E402
from lockstep.runtime.stages import RankPlace, check_stages  # noqa: E402
from lockstep.sim.rerun.rerun import rerun  # noqa: E402
from tests.support.adapters import write_adapter  # noqa: E402
from tests.support.feature_campaign import most_in_flight  # noqa: E402
from tests.support.live_server import until  # noqa: E402
from tests.support.small_llm import requests_with_shared_beginnings, write_weights  # noqa: E402
from tests.support.small_runtime import SMALL_QWEN3  # noqa: E402

MODEL: dict[str, Any] = {**SMALL_QWEN3, "num_hidden_layers": 5, "tie_word_embeddings": True}
SMALL: dict[str, Any] = {
    "device": "cpu",
    "grammar_backend": "none",
    "page_size": 4,
    "chunked_prefill_size": 16,
    "max_running_requests": 12,
    "pages": 300,
}
ENGINES: dict[str, dict[str, Any]] = {
    "2 stages": {"pp": 2, "overlap_depth": 1, "retract_every": 5, "debug": True},
    "2 stages of 2 ranks, drafts": {
        "pp": 2,
        "tp": 2,
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
        "retract_every": 7,
    },
    "4 stages, mixed, short of pages": {
        "pp": 4,
        "overlap_depth": 2,
        "pp_async_batch_depth": 1,
        "batching": "mixed",
        "pages": 60,
        "reserve": "on_demand",
        "retract_every": 6,
    },
}
KINDS: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 1.0, "top_k": 20, "seed": 3, "repetition_penalty": 1.2},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"hidden_states": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of five layers with tied weights, large enough that tokens differ."""
    return write_weights(tmp_path_factory.mktemp("model"), MODEL)


REQUESTS = requests_with_shared_beginnings(200, KINDS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    """The answers of one plain engine."""
    with LLM(folder, **SMALL) as llm:
        return llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])


@pytest.fixture(scope="module")
def engines(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    journals = tmp_path_factory.mktemp("journals")
    made: dict[str, LLM] = {}

    class Made(dict[str, LLM]):
        def __missing__(self, name: str) -> LLM:
            options = {**SMALL, **ENGINES[name]}
            self[name] = LLM(folder, journal=journals / str(len(self)), rank_timeout_s=300, **options)
            return self[name]

    made = Made()
    yield made
    for llm in made.values():
        llm.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow for late reports about the loss of a rank."""
    monkeypatch.setattr(ranks_module, "CAUSE_S", 60.0)
    monkeypatch.setattr(ranks_module, "LAST_WORD_S", 60.0)


# ------------------------------------------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("name", ENGINES)
def test_two_hundred_requests_equal_one_stage(name: str, expected: list[Any], engines: dict[str, LLM]) -> None:
    llm = engines[name]
    pending = [llm.ask(prompt, params) for prompt, params in REQUESTS]
    cancelled = set(random.Random(3).sample(range(len(REQUESTS)), 20))
    for number in cancelled:
        llm.host.cancel(pending[number].answer.request_id)
    found = [llm.wait(one) for one in pending]
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if number in cancelled and ours.finish_reason == "cancelled":
            assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)], number
            continue
        assert (ours.finish_reason, ours.token_ids) == (theirs.finish_reason, theirs.token_ids), number
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-4)
        assert list(ours.prompt_logprobs) == list(theirs.prompt_logprobs)
        logprobs = [list(one.prompt_logprobs.values()) for one in (ours, theirs)]
        np.testing.assert_allclose(*logprobs, atol=2e-4)
        if theirs.hidden_states is not None:
            np.testing.assert_allclose(ours.hidden_states, theirs.hidden_states, atol=2e-3)
    assert len({tuple(answer.token_ids) for answer in found}) > 100, "of tokens that are all alike little is learnt"
    assert llm._journal is not None
    llm._journal.flush()
    steps = list(fold(llm._journal.folder.parent))
    assert any(isinstance(event, RequestRetracted) for _, step in steps for event in step.decided)
    launched = [plan for _, step in steps if (plan := step.launched()) is not None]
    assert {plan.microbatch for plan in launched} == set(range(llm.config.microbatches))
    assert most_in_flight(steps) > 1
    if llm.config.speculates:
        assert llm.stats().drafts.right > 0
    assert replay(llm._journal.folder.parent).digest == llm.host.engine.digest


def test_vectors_and_new_weights_are_those_of_one_stage(folder: Path, engines: dict[str, LLM], tmp_path: Path) -> None:
    llm, prompt = engines["2 stages"], REQUESTS[7][0]
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(MODEL))
    save_file(
        {one.name: one.into.clone() for one in build_model(MODEL, random_weights_seed=5).tensors()},
        other / "model.safetensors",
    )
    for weights in (folder, other, folder):
        with LLM(weights, **SMALL) as single:
            np.testing.assert_allclose(llm.embed([prompt])[0].vector, single.embed([prompt])[0].vector, atol=2e-4)
            scores = [one.score([prompt], [[7, 8], [9]])[0].logprobs for one in (llm, single)]
            np.testing.assert_allclose(*scores, atol=2e-4)
        llm.update_weights(other if weights is folder else folder)


def test_an_engine_of_stages_starts_again_from_its_journal(folder: Path, tmp_path: Path) -> None:
    """Settings in which nothing was set did not pass to other ranks, so no engine of several ranks came back."""
    prompts, params = [prompt for prompt, _ in REQUESTS[:6]], Params(max_new_tokens=6)
    answers = []
    for _ in range(2):
        with LLM(folder, pp=2, keeper=Keeper(tmp_path / "run"), **SMALL) as llm:
            answers.append([one.token_ids for one in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
    assert rerun(tmp_path / "run").difference is None  # the simulator's host begins again with the first microbatch


def test_adapters_and_grammars_are_split_like_layers(tmp_path: Path) -> None:
    """The demo model, which has a tokenizer."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    options = {"device": "cpu", "pages": 200, "page_size": 16, "max_loras": 2}
    options["lora"] = {"all": write_adapter(tmp_path / "all", 1)}
    asked = [
        ("def f(", Params(max_new_tokens=10, adapter="all")),
        ("import ", Params(max_new_tokens=10)),
        ("{", Params(max_new_tokens=20, grammar=("json_schema", json.dumps(schema)))),
    ] * 2
    answers = []
    for more in ({}, {"pp": 2, "overlap_depth": 1}):
        with LLM(**options, **more) as llm:
            answers.append(llm.generate([prompt for prompt, _ in asked], [params for _, params in asked]))
    assert [one.token_ids for one in answers[0]] == [one.token_ids for one in answers[1]]
    assert answers[0][0].token_ids != answers[0][1].token_ids


# ---------------------------------------------------------------------------------------------------- what a stage has


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_have_every_tensor_of_the_model_and_only_their_own(tied: bool, count: int) -> None:
    config = {**MODEL, "tie_word_embeddings": tied}
    whole = {one.name: one.into for one in build_model(config, random_weights_seed=3).tensors()}
    found: dict[str, int] = {}
    for number in range(count):
        model = build_model(config, random_weights_seed=3, parallel=Parallel(stage=StageLayers(number, count)))
        for one in model.tensors():
            assert torch.equal(one.into, whole[one.name])
            found[one.name] = found.get(one.name, 0) + 1
        mine = {one.name for one in model.tensors()}
        assert all(model.surplus(name) for name in whole.keys() - mine)
        assert not any(model.has_elsewhere(name) for name in mine)
        assert model.layers == len(StageLayers(number, count).layers(5))
    twice = {"model.embed_tokens.weight"} if tied and count > 1 else set()
    assert found == {name: 1 + (name in twice) for name in whole}


def test_a_tensor_of_no_layer_is_not_in_another_stage() -> None:
    assert not StageLayers(0, 2).lacks("model.layers.5.mlp.up_proj.weight", 5, tied=True)
    assert StageLayers(0, 2).lacks("model.layers.4.mlp.up_proj.weight", 5, tied=True)
    with pytest.raises(ValueError, match="`number` must be 0 to 1"):
        StageLayers(2, 2)


def test_the_first_ranks_are_the_last_stage() -> None:
    places = [RankPlace(rank, tp=2, pp=3) for rank in range(6)]
    assert [one.stage.number for one in places] == [2, 2, 1, 1, 0, 0]
    assert [one.column for one in places] == [0, 1] * 3


def test_models_that_stages_cannot_split_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="`pp` is 6, but Qwen3ForCausalLM has 5 layers"):
        check_stages(read_settings(folder), 6)
    with pytest.raises(ConfigError, match=r"`pp` is 2, but .* runs by transformers' code"):
        LLM(folder, pp=2, model_backend="transformers", **SMALL)


# ------------------------------------------------------------------------------------------------------ a stage is lost


@pytest.mark.parametrize(("idle", "name"), list(zip((True, False, False), ENGINES, strict=True)))
def test_a_killed_stage_ends_the_engine_with_one_sentence(name: str, idle: bool, engines: dict[str, LLM]) -> None:
    llm = engines[name]
    assert llm.group is not None
    worker = llm.group._workers[-1]
    if idle:
        until(lambda: not worker.launched, 120)
        os.kill(worker.process.pid, signal.SIGKILL)
        until(lambda: bool(llm.host.failure), 120)
    pending = [] if idle else [llm.ask([5, 6, 7], Params(max_new_tokens=200, ignore_eos=True)) for _ in range(8)]
    if not idle:
        until(lambda: any(one.answer.token_ids for one in pending), 120)
        os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(EngineStopped) as said:
        llm.generate([[5, 6, 7]], Params(max_new_tokens=200, ignore_eos=True))
    for one in pending:
        assert one.over.wait(120)
    where = f"rank {worker.rank}, stage 1 of {llm.config.pp_size} (process {worker.process.pid}) was ended by SIGKILL"
    assert where in str(said.value)
    assert killed_from_outside(llm.host.error), "requests are not suspects of such an end"
    llm.close()
    assert all(one.process.returncode is not None for one in llm.group._workers)


# ------------------------------------------------------------------------------------------ threads of the processor


@pytest.mark.parametrize(
    ("threads", "ranks", "given", "expected"), [(8, 4, None, 2), (2, 4, None, 1), (2, 1, None, 2), (8, 4, "8", 8)]
)
def test_ranks_share_the_threads_of_the_processor(
    threads: int, ranks: int, given: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks of two threads each on two cores waited for each other's threads most of the time."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_of_rank(ranks) == expected


def test_an_engine_gives_the_threads_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with LLM(folder, pp=2, **SMALL):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
