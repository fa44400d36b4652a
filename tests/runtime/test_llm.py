"""Real models through the whole engine: their tokens equal those of transformers, one request at a time."""

from __future__ import annotations

import json
import random
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from click.testing import CliRunner  # noqa: E402

from lockstep.core.contract.commands import BatchPlan  # noqa: E402
from lockstep.core.contract.config import SchedConfig  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import (  # noqa: E402
    BatchFinished,
    GetState,
    RequestRetracted,
    Resume,
    SamplingParams,
)
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.host.loop import HostClock  # noqa: E402
from lockstep.host.text import Text  # noqa: E402
from lockstep.runtime import (  # noqa: E402
    LLM,
    Params,
    RequestOutput,
    assembly,
    attention,
    executor,
    trial_draws,
)
from lockstep.runtime.assembly import PassKernels, make_executor  # noqa: E402
from lockstep.runtime.errors import EngineStopped  # noqa: E402
from lockstep.runtime.generate import generate  # noqa: E402
from lockstep.runtime.memory import MemoryBudget  # noqa: E402
from lockstep.runtime.models import Decoder, build_model  # noqa: E402
from lockstep.runtime.overlap import CpuLane  # noqa: E402
from lockstep.runtime.params import sampling_of  # noqa: E402
from lockstep.runtime.sampling import Sampler, SamplingTable  # noqa: E402
from tests.support.small_llm import SMALL, VOCABULARY, run, write_model  # noqa: E402
from tests.support.small_runtime import SMALL_QWEN3  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's settings and a tokenizer, without weights."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder that transformers saved, with its model: random weights, large enough that tokens differ."""
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    torch.manual_seed(11)
    config = transformers.Qwen3Config(**SMALL_QWEN3, initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    path: Path = tmp_path_factory.mktemp("trained")
    model.save_pretrained(path)
    return path, model


def random_requests(count: int) -> list[tuple[list[int], int]]:
    """Prompts that begin alike, in groups, and lengths."""
    rng = random.Random(5)
    beginnings = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(24))] for _ in range(6)]
    return [
        (
            rng.choice(beginnings) + [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 20))],
            rng.randrange(1, 13),
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def expected(trained: tuple[Path, Any]) -> list[list[int]]:
    """The greedy answers of transformers for each request, one by one."""
    _, model = trained
    answers = []
    for prompt, count in random_requests(64):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            said = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        answers.append(said[0, len(prompt) :].tolist())
    return answers


ENGINES: dict[str, dict[str, Any]] = {
    "depth 0": {"overlap_depth": 0},
    "depth 1, retractions, shared in the same step": {
        "overlap_depth": 1,
        "retract_every": 3,
        "same_step_sharing": True,
    },
    "depth 2, mixed, retractions": {"overlap_depth": 2, "batching": "mixed", "retract_every": 4},
    "depth 2, several steps, short of pages": {
        "overlap_depth": 2,
        "decode_steps_per_launch": 3,
        "pages": 40,
        "reserve": "on_demand",
    },
}


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_are_those_of_transformers(
    trained: tuple[Path, Any], expected: list[list[int]], name: str, tmp_path: Path
) -> None:
    with LLM(trained[0], journal=tmp_path, debug=True, **{**SMALL, **ENGINES[name]}) as llm:
        requests = random_requests(64)
        params = [Params(max_new_tokens=count) for _, count in requests]
        answers = llm.generate([prompt for prompt, _ in requests], params)
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.finish_reason for answer in answers} <= {"length", "stop"}
    assert any(answer.cached_tokens for answer in answers)
    assert replay(tmp_path).digest
    retracted = [event for _, step in fold(tmp_path) for event in step.decided if isinstance(event, RequestRetracted)]
    assert bool(retracted) == ("retractions" in name or "short" in name)


def test_a_recorded_run_needs_no_scheduler(trained: tuple[Path, Any], tmp_path: Path) -> None:
    with LLM(trained[0], journal=tmp_path, overlap_depth=1, **SMALL) as llm:
        llm.generate([prompt for prompt, _ in random_requests(10)], Params(max_new_tokens=6))
        executor = make_executor(llm.model, llm.config, CpuLane(HostClock(), run_at="collection"))
    results, plans = {}, []
    for event, step in fold(tmp_path):
        plans += [plan] if (plan := step.launched()) is not None else []
        if isinstance(event, BatchFinished):
            results[event.batch_id] = event.tokens
    for plan in plans:
        executor.launch(plan)
        assert executor.collect().tokens.tobytes() == results[plan.batch_id]
    assert len(plans) > 5


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, random_weights=3, **SMALL) as made:
        yield made


def test_a_seed_draws_the_same_whatever_else_runs(llm: LLM) -> None:
    drawn = Params(max_new_tokens=12, temperature=1.0, top_p=0.95, seed=7, ignore_eos=True)
    (alone,) = llm.generate([[5, 6, 7]], drawn)
    others = [Params(max_new_tokens=9, temperature=0.7, ignore_eos=True) for _ in range(5)]
    answers = llm.generate([[5, 6, 7]] * 6, [*others, drawn])
    assert answers[-1].token_ids == alone.token_ids
    assert len({tuple(answer.token_ids[:9]) for answer in answers}) == 6


def test_penalties_see_prompt_and_kept_output_over_retractions(folder: Path) -> None:
    """With a retraction every other decode, tokens are those of an engine without any."""
    params = Params(
        max_new_tokens=14, temperature=0.9, seed=1, frequency_penalty=1.5, repetition_penalty=1.7, ignore_eos=True
    )
    prompts = [[9, 9, 9, 10 + n] for n in range(5)]
    with LLM(folder, random_weights=3, overlap_depth=0, radix_cache=False, **SMALL) as llm:
        calm = llm.generate(prompts, params)
    with LLM(folder, random_weights=3, overlap_depth=2, retract_every=2, **SMALL) as llm:
        stirred = llm.generate(prompts, params)
    assert [answer.token_ids for answer in stirred] == [answer.token_ids for answer in calm]


def test_a_closed_engine_frees_its_pages() -> None:
    with LLM(device="cpu", pages=64) as llm:
        tensors = [weakref.ref(tensor) for tensor in llm._live.pool.keys]
    assert not any(tensor() is not None for tensor in tensors)  # at once, while the engine is still referred to


def test_a_stream_adds_up_to_the_answer(llm: LLM) -> None:
    params = Params(max_new_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    (whole,) = llm.generate("the quick", params)
    pieces = list(llm.stream("the quick", params))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert isinstance(pieces[-1].answer, RequestOutput)
    assert len(pieces) > 5
    assert whole.text


def test_an_end_token_that_the_model_does_not_have_fails_no_request(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, VOCABULARY + 5]}))
    with LLM(tmp_path, random_weights=1, **SMALL) as llm:
        assert llm.config.eos_token_ids == (2, 7)
        answers = llm.generate([[5, 6, 7], [8, 9]], [Params(max_new_tokens=4, min_new_tokens=4), Params()])
        assert [answer.error for answer in answers] == ["", ""]
    assert f"`eos_token_id` {VOCABULARY + 5} is passed over" in caplog.text
    with pytest.raises(ConfigError, match=f"`eos_token_ids` holds token 999, but the model has {VOCABULARY}"):
        LLM(folder, random_weights=1, eos_token_ids=(999,), **SMALL)


def test_several_answers_to_one_prompt_share_its_kv(folder: Path) -> None:
    """Each answer equals that of one request with its seed."""
    prompt = list(range(40, 61))
    drawn = Params(n=3, max_new_tokens=8, temperature=1.0, seed=7, ignore_eos=True, logprobs=0)
    with LLM(folder, random_weights=3, **SMALL) as llm:
        several, single = llm.generate([prompt, [5, 6]], [drawn, Params(max_new_tokens=2)])
        alone = [llm.generate([prompt], replace(drawn, n=1, seed=7 + number))[0] for number in range(3)]
        assert not single.others
        assert [one.token_ids for one in (several, *several.others)] == [one.token_ids for one in alone]
        assert [one.text for one in (several, *several.others)] == [one.text for one in alone]
        assert len({tuple(one.token_ids) for one in alone}) == 3
        assert [len(one.logprobs) for one in several.others] == [8, 8]
        assert several.others[1].request_id == several.request_id + 2
        assert [one.cached_tokens for one in several.others] == [20, 20], "the prompt's KV is shared"
        for wrong in (0, -1, 10**6):
            with pytest.raises(ConfigError, match=rf"^`n` must be 1 to \d+, got `{wrong}`"):
                llm.generate([prompt], Params(n=wrong))
        with pytest.raises(ConfigError, match="`n` is 2, but a stream is of one answer"):
            next(llm.stream(prompt, Params(n=2)))


def test_settings_that_only_the_sampler_finds_wrong_end_one_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder, random_weights=1, **SMALL) as llm:
        monkeypatch.setattr(llm.host, "_check_request", lambda request: None)
        wrong = Params(max_new_tokens=4, min_new_tokens=4, stop_token_ids=[VOCABULARY])
        asked = [llm.ask([5, 6, 7], one) for one in (Params(max_new_tokens=4, ignore_eos=True), wrong)]
        good, bad = [llm.wait(one) for one in asked]
    assert (good.error, len(good.token_ids)) == ("", 4)
    assert (bad.finish_reason, bad.token_ids) == ("invalid", [])


def test_end_tokens_are_those_of_both_files(folder: Path, tmp_path: Path) -> None:
    """Chat models name the end of a turn in generation_config.json only."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [7, 2]}')
    with LLM(tmp_path, random_weights=3, **SMALL) as llm:
        assert llm.config.eos_token_ids == (2, 7)
    generation.write_text('{"eos_token_id": "end"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json .*\n.*`eos_token_id` must be token ids, got `end`"):
        LLM(tmp_path, random_weights=3, **SMALL)


def test_a_request_reports_which_tokens_may_be_drawn(trained: tuple[Path, Any], tmp_path: Path) -> None:
    """Over chunks and retractions, beside rows without such fields."""
    path, model = trained
    allowed, prompts = list(range(40, 60)), [[9, 8, 7, 10 + n] * 6 for n in range(4)]
    params = [Params(max_new_tokens=10, allowed_token_ids=allowed, ignore_eos=True), Params(max_new_tokens=10)] * 2
    with LLM(path, journal=tmp_path, overlap_depth=1, retract_every=3, **SMALL) as llm:
        answers = llm.generate(prompts, params)
        free = llm.generate(prompts[1], params[1])
    for prompt, answer in zip(prompts[::2], answers[::2], strict=True):
        tokens = list(prompt)
        for _ in range(10):
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(max(allowed, key=lambda token: float(logits[token])))
        assert answer.token_ids == tokens[len(prompt) :]
    assert answers[1].token_ids == free[0].token_ids
    assert not set(answers[1].token_ids) <= set(allowed)
    assert replay(tmp_path).digest


def test_tokens_that_cannot_be_allowed_are_refused(llm: LLM) -> None:
    asked = {
        "`allowed_token_ids token` must be in [0, 299], got `300`": Params(allowed_token_ids=[5, 300]),
        "`allowed_token_ids` has nothing but stop tokens, and `min_new_tokens` 2 bans these at first": Params(
            allowed_token_ids=[2, 9], stop_token_ids=[9], min_new_tokens=2
        ),
    }
    answers = llm.generate([[5, 6]] * 3, [*asked.values(), Params(allowed_token_ids=[2], max_new_tokens=4)])
    assert [answer.error for answer in answers] == [*asked, ""]
    assert answers[2].token_ids == [2]
    with pytest.raises(ConfigError, match="`allowed_token_ids` is empty"):
        llm.generate([[5]], Params(allowed_token_ids=[]))
    with pytest.raises(ConfigError, match="`allowed_token_ids` is"):
        llm.generate([[5]], Params(allowed_token_ids=["5"]))  # type: ignore[list-item]


def test_leaving_a_stream_early_cancels_its_request(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], Params(max_new_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.host.drain().result(timeout=120).ok
    assert llm.host.ask(Resume()).result(timeout=120).ok


def test_a_text_stop_ends_the_answer_in_front_of_it(llm: LLM) -> None:
    params = Params(max_new_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    (whole,) = llm.generate("over the", params)
    assert whole.text is not None
    stop = whole.text[8:11]
    (cut,) = llm.generate("over the", Params(**{**params.__dict__, "stop": [stop]}))
    assert cut.finish_reason == "text_stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    pieces = list(llm.stream("over the", Params(**{**params.__dict__, "stop": [stop]})))
    assert "".join(piece.text for piece in pieces) == cut.text


def test_logprobs_and_vectors_come_with_answers(llm: LLM) -> None:
    (answer,) = llm.generate([[5, 6, 7, 8]], Params(max_new_tokens=3, logprobs=2, prompt_logprobs=0))
    assert len(answer.logprobs) == len(answer.top_logprobs) == len(answer.token_ids)
    for token, logprob, tops in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
        assert tops[token] == max(tops.values()) == logprob
    assert sorted(answer.prompt_logprobs) == [1, 2, 3]
    (plain,) = llm.generate([[5, 6, 7, 8]], Params(max_new_tokens=3, logprobs=0))
    assert plain.logprobs == pytest.approx(answer.logprobs)
    assert not plain.prompt_logprobs
    (embedded,) = llm.embed([[5, 6, 7, 8]])
    assert embedded.vector.shape == (32,)


@pytest.mark.parametrize("settings", [{}, {"overlap_depth": 2, "retract_every": 2, "batching": "mixed"}])
def test_the_likeliest_in_place_of_each_prompt_token(
    trained: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The likeliest of the model's softmax, over chunks and retractions, beside rows with fewer or without them."""
    monkeypatch.setattr(executor, "JUDGED_AT_ONCE", 7)
    path, model = trained
    prompts = [[9, 8, 7, 11 + n] * (6 + n) + [20 + n] for n in range(4)]
    counts = (3, None, 0, 5)
    with LLM(path, **SMALL, **settings) as llm:
        llm.generate(prompts)  # the prompts are in the cache from here on
        params = [Params(max_new_tokens=8, prompt_logprobs=count, ignore_eos=True) for count in counts]
        answers = llm.generate(prompts, params)
        late = llm._request(prompts[3], params[3], "generate")
        behind = llm.wait(llm._send(msgspec.structs.replace(late, logprob_start=22), params[3]))
        again = llm.generate(prompts[1], params[1])[0]
    assert [bool(answer.cached_tokens) for answer in answers] == [False, True, False, False], "they are computed anew"
    assert 0 < behind.cached_tokens <= 22 < again.cached_tokens
    assert sorted(behind.prompt_top_logprobs) == list(range(23, len(prompts[3])))
    for prompt, count, answer in zip((*prompts, prompts[3]), (*counts, 5), (*answers, behind), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        asked = [] if count is None else range(23 if answer is behind else 1, len(prompt))
        assert list(answer.prompt_logprobs) == list(asked)
        assert list(answer.prompt_top_logprobs) == list(asked if count else [])
        for position, chosen in answer.prompt_logprobs.items():
            assert chosen == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)
        for position, tops in answer.prompt_top_logprobs.items():
            best = expected[position - 1].topk(count)
            assert list(tops) == best.indices.tolist()
            assert list(tops.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_numbers_of_prompt_logprobs_that_cannot_be_are_refused(llm: LLM) -> None:
    (answer,) = llm.generate([[5, 6]], Params(prompt_logprobs=301))
    assert answer.error == "`prompt_logprobs` must be in [0, 300], got `301`"
    with pytest.raises(ConfigError, match="`prompt_logprobs` is -1: expected `int` >= 0"):
        llm.generate([[5, 6]], Params(prompt_logprobs=-1))
    with pytest.raises(ConfigError, match="`prompt_logprobs` is True: expected `int"):
        llm.generate([[5, 6]], Params(prompt_logprobs=True))


POOLED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing said": ({}, {}),
    "chosen": ({}, {"pooling": "last", "normalize": True}),
    "of the folder": ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, {}),
    "of the folder, by its newer name": ({"pooling_mode": "lasttoken"}, {"normalize": False}),
    "the first position": ({"pooling_mode_cls_token": True}, {}),
    "another than the folder's": ({"pooling_mode_lasttoken": True}, {"pooling": "mean", "overlap_depth": 2}),
}


def pooling_folder(path: Path, into: Path, config: dict[str, Any]) -> Path:
    """The model as sentence-transformers lays it out."""
    shutil.copytree(path, into, dirs_exist_ok=True)
    names = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": i, "path": at, "type": f"sentence_transformers.models.{kind}"} for i, (kind, at) in enumerate(names)
    ]
    (into / "modules.json").write_text(json.dumps(modules))
    (into / "1_Pooling").mkdir(exist_ok=True)
    (into / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **config}))
    return into


@pytest.mark.parametrize("name", POOLED)
def test_vectors_are_those_of_the_reference(trained: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    """Over chunks, beside decodes, and with the prompt's prefix in the cache."""
    config, options = POOLED[name]
    path, model = trained
    folder = pooling_folder(path, tmp_path, config) if config else path
    prompts = [[9, 8, 7, 6] * 9 + [10 + n] * (n + 1) for n in range(4)] + [[5]]
    with LLM(folder, **SMALL, **options) as llm:
        llm.generate(prompts)  # the prompts are in the cache from here on
        decoding = [llm.ask([4, 5, n], Params(max_new_tokens=20, ignore_eos=True)) for n in range(3)]
        answers = llm.embed(prompts)
        for one in decoding:
            llm.wait(one)
        assert llm.embed(prompts[2])[0].vector.tolist() == pytest.approx(answers[2].vector.tolist(), abs=1e-5)
    last = options.get("pooling", "last" if config else "mean") == "last"
    first = "pooling_mode_cls_token" in config
    unit = options.get("normalize", bool(config))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        expected = states[0] if first else states[-1] if last else states.mean(0)
        expected = expected / expected.norm() if unit else expected
        np.testing.assert_allclose(answer.vector, expected.numpy(), atol=1e-4)
        assert answer.cached_tokens == 0, "cached KV has no hidden states"


def test_pooling_that_cannot_be_done_is_refused(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder = pooling_folder(trained[0], tmp_path, {"pooling_mode_max_tokens": True})
    with pytest.raises(
        ConfigError, match=r"config\.json requires max_tokens; supported is one of mean, mean_tokens, lasttoken, "
    ):
        LLM(folder, **SMALL)
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}')
    with pytest.raises(ConfigError, match="requires mean_tokens and lasttoken"):
        LLM(folder, **SMALL)
    with pytest.raises(ConfigError, match="`pooling` must be mean or last or first, got `max`"):
        LLM(folder, pooling="max", **SMALL)  # type: ignore[arg-type]
    (folder / "modules.json").write_text('[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(ConfigError, match="has a module `Dense`, which is not supported here\nhint: give `pooling`"):
        LLM(folder, **SMALL)


@pytest.mark.parametrize("settings", [{}, {"overlap_depth": 2, "retract_every": 2}])
def test_labels_are_as_likely_as_the_reference_reports(trained: tuple[Path, Any], settings: dict[str, Any]) -> None:
    path, model = trained
    prompts = [[9, 8, 7, 6] * 8 + [10 + n] * (n + 1) for n in range(3)] + [[5]]
    labels: dict[str, Any] = {"of one token each": [[17], 30, 4], "some longer": [[17], [30, 31, 32], [4, 5]]}
    for given in labels.values():
        with LLM(path, **SMALL, **settings) as llm:
            running = [llm.ask([4, 5, n], Params(max_new_tokens=20, ignore_eos=True)) for n in range(3)]
            ended: list[int] = []
            found = llm.score(prompts, given, progress=ended.append)
            for one in running:
                llm.wait(one)
        longer = given is labels["some longer"]
        assert len(ended) == len(prompts) * (len(given) if longer else 1)
        for prompt, scored in zip(prompts, found, strict=True):
            assert (scored.prompt_token_ids, scored.error) == (prompt, "")
            for label, logprob, by_token in zip(given, scored.logprobs, scored.token_logprobs, strict=True):
                tokens = [label] if isinstance(label, int) else label
                with torch.inference_mode():
                    expected = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
                each = [float(expected[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]
                assert by_token == pytest.approx(each, abs=1e-4)
                assert logprob == pytest.approx(sum(each), abs=3e-4)


def test_labels_that_cannot_be_are_reported_by_name(llm: LLM) -> None:
    (text,) = llm.score("the quick", [" dog", "s"])
    assert llm.text is not None
    ids = [llm.text.encode(label, special=False) for label in (" dog", "s")]
    assert text.logprobs == llm.score("the quick", ids)[0].logprobs
    for labels, said in (
        ([], "`labels` is empty"),
        ([[]], r"`labels` holds \[\], which has no tokens"),
        ([300], "`labels` holds token 300, but the model has 300"),
        ([-1], "holds -1, which is no token id"),
    ):
        with pytest.raises(ConfigError, match=said):
            llm.score([[5, 6]], labels)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prompt 1 has no tokens"):
        llm.score([[5], []], [7])
    fine, long = llm.score([[5], [5] * 200], [[7, 8]])
    assert (len(fine.logprobs), long.logprobs) == (1, [])
    assert "context of 128 tokens" in long.error


@pytest.mark.parametrize("named", ["Qwen3Model", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_without_a_head_gives_vectors(tmp_path: Path, named: str, tied: bool) -> None:
    """As embedding models are saved: by transformers' base model, with any `architectures`."""
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    torch.manual_seed(4)
    config = transformers.Qwen3Config(**(SMALL_QWEN3 | {"tie_word_embeddings": tied}), initializer_range=0.3)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"architectures": [named]}))
    with LLM(tmp_path, pooling="last", **SMALL) as llm:
        (vector,) = llm.embed([[5, 6, 7, 8] * 6])
        with torch.inference_mode():
            states = model(torch.tensor([[5, 6, 7, 8] * 6])).last_hidden_state[0]
        np.testing.assert_allclose(vector.vector, states[-1].numpy(), atol=1e-4)
        (said,) = llm.generate([[5, 6]], Params(max_new_tokens=2, ignore_eos=True))
        (scored,) = llm.score([[5, 6]], [7])
        (judged,) = llm.generate([[5, 6]], Params(max_new_tokens=0, prompt_logprobs=1))
        if tied and named == "Qwen3ForCausalLM":
            assert len(said.token_ids) == 2, "the embeddings are its head"
            assert len(scored.logprobs) == 1
        else:
            lacks = "this model has no `lm_head`: it gives vectors (`embed`), but neither tokens nor logprobs"
            assert (said.error, scored.error, judged.error) == (lacks, lacks, lacks)


def test_logprobs_of_a_row_that_ends_before_the_last_step_of_a_launch(folder: Path) -> None:
    """The other rows, without logprobs, continue alone."""
    with LLM(folder, random_weights=1, decode_steps_per_launch=3, **SMALL) as llm:
        prompts: list[Any] = [[5, 6, 7], [8, 9]]
        asking, silent = Params(max_new_tokens=3, logprobs=2), Params(max_new_tokens=7, ignore_eos=True)
        both = llm.generate(prompts, [asking, silent])
        (alone,) = llm.generate([prompts[0]], asking)
    assert both[0].logprobs == pytest.approx(alone.logprobs)
    assert both[0].top_logprobs[0].keys() == alone.top_logprobs[0].keys()
    assert not both[1].logprobs


def test_what_cannot_be_is_reported_by_name(llm: LLM, folder: Path, tmp_path: Path) -> None:
    too_long, wrong, fine = llm.generate(
        [[5] * 200, [5], [5, 6]], [Params(), Params(top_p=2.0), Params(max_new_tokens=1)]
    )
    assert too_long.finish_reason == "too_long"
    assert "context of 128 tokens" in too_long.error
    assert wrong.error == "`top_p` must be in [0, 1], got `2.0`"
    assert fine.finish_reason in ("length", "stop")
    (unknown,) = llm.generate([[5, 300]])
    assert unknown.error == "`prompt` holds token 300, but the model has 300"
    with pytest.raises(ConfigError, match="`prompt` holds -1, which is no token id"):
        llm.generate([[-1]])
    with pytest.raises(ConfigError, match=r"`tiers` .* follow from options of the engine"):
        LLM(folder, random_weights=1, tiers=None)
    with pytest.raises(ConfigError, match="there is no setting `page_sise`\nhint: did you mean page_size"):
        LLM(folder, random_weights=1, page_sise=4)
    with pytest.raises(ConfigError, match="there is no setting `tensor_parallel`\nhint: did you mean tp"):
        LLM(folder, tensor_parallel=2)
    with pytest.raises(ConfigError, match="`context_tokens_max` 999 is more than the model's 128"):
        LLM(folder, random_weights=1, context_tokens_max=999)
    with pytest.raises(ConfigError, match="one for each of 2 prompts, got 1"):
        llm.generate([[5], [6]], [Params()])
    (tmp_path / "config.json").write_text(json.dumps(SMALL_QWEN3))
    with LLM(tmp_path, random_weights=1, **SMALL) as wordless:
        with pytest.raises(ConfigError, match=r"a text prompt needs a tokenizer\.json"):
            wordless.generate("text")
        (stops,) = wordless.generate([[5]], Params(stop=["x"]))
        assert "need a tokenizer" in stops.error


def test_an_engine_that_fails_ends_the_waiting_requests(folder: Path) -> None:
    llm = LLM(folder, random_weights=3, **SMALL)

    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    llm.host.executor.tables.take_in = fail  # type: ignore[assignment]
    with pytest.raises(EngineStopped, match="the engine failed: MemoryError: no more"):
        llm.generate([[5, 6]])
    with pytest.raises(EngineStopped, match="no more"):
        list(llm.stream([5, 6]))
    llm.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-host" and thread is llm._thread]


def admitted(llm: LLM) -> int:
    """Requests that the engine has accepted so far."""
    answered = llm.host.ask(GetState()).result(timeout=120)
    assert answered.stats is not None
    return answered.stats.counts.admitted


def test_nothing_is_sent_before_all_of_it_is_known_to_be_a_request(llm: LLM) -> None:
    before = admitted(llm)
    with pytest.raises(ConfigError, match="`prompt` holds -1"):
        llm.generate([[5, 6], [-1]])
    with pytest.raises(ConfigError, match=r"`prompt` holds 5\.5, which is no token id"):
        llm.embed([[5, 6], [5.5]])  # type: ignore[list-item]
    assert admitted(llm) == before
    assert llm.host.drain().result(timeout=120).ok
    assert llm.host.ask(Resume()).result(timeout=120).ok


def test_whole_numbers_among_the_parameters_are_read_back_as_they_were_written() -> None:
    """Ranks compare the bytes of plans, and 1 has other bytes than 1.0."""
    given = Params(temperature=1, top_p=1, repetition_penalty=2, logit_bias={3: 1})
    written = msgspec.msgpack.encode(sampling_of(given))
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(written, type=SamplingParams)) == written


def test_parameters_that_no_journal_can_hold_are_refused_and_the_engine_goes_on(folder: Path, tmp_path: Path) -> None:
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "seed": ({"seed": 2**70}, "`seed` is 1180591620717411303424: expected `int` <= 9223372036854775807"),
        "priority": (
            {"priority": -(2**70)},
            "`priority` is -1180591620717411303424: expected `int` >= -9223372036854775808",
        ),
        "a text": ({"max_new_tokens": "5"}, "`max_new_tokens` is '5': expected `int`, got `str`"),
        "one stop": ({"stop": "x"}, "`stop` is 'x': expected `array`, got `str`"),
        "a large id": ({"logit_bias": {2**70: 1.0}}, "`logit_bias` is {1180591620717411303424: 1.0}: "),
    }
    with LLM(folder, random_weights=3, journal=tmp_path, **SMALL) as llm:
        for given, said in wrong.values():
            with pytest.raises(ConfigError) as caught:
                llm.generate([[5, 6]], Params(**given))
            assert str(caught.value).startswith(said)
        (answer,) = llm.generate([np.array([5, 6])], Params(max_new_tokens=2, ignore_eos=True))  # type: ignore[list-item]
    assert len(answer.token_ids) == 2


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_numerics_and_backend_reach_every_pass(folder: Path, monkeypatch: pytest.MonkeyPatch, numerics: Any) -> None:
    """The pass that measures memory included: it must run what serving will run."""
    made: list[tuple[str, Any]] = []

    def recording(name: str, *args: Any, **kwargs: Any) -> Any:
        made.append((name, kwargs["numerics"]))
        return attention.make(name, *args, **kwargs)

    monkeypatch.setattr(assembly, "make", recording)
    monkeypatch.setattr(assembly, "size_pool", lambda *, largest_pass, **sizes: largest_pass() or memory(**sizes))
    options = ["--prompt", "the quick", "--max-new-tokens", "2", "--model", str(folder), "--random-weights", "3"]
    result = CliRunner().invoke(
        generate, [*options, "--numerics", numerics, "--attention-backend", "reference"], standalone_mode=False
    )
    assert result.exception is None
    assert made == [("reference", numerics)] * 2


def test_memory_is_measured_with_rows_that_use_every_step_of_sampling(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[SamplingTable] = []

    class Recording(Sampler):
        def sample(self, *args: Any, **kwargs: Any) -> Any:
            drawn.append(self.table)
            return super().sample(*args, **kwargs)

    monkeypatch.setattr(trial_draws, "Sampler", Recording)
    monkeypatch.setattr(assembly, "size_pool", lambda *, largest_pass, **sizes: largest_pass() or memory(**sizes))
    with LLM(folder, random_weights=3, **SMALL) as llm:
        running = llm.config.max_running_requests
    (table,) = drawn
    for asked in (table.sampled, table.limited, table.edited, table.penalised, table.masked, table.logprobs):
        assert int(asked.sum()) == running
    assert table.columns.seen.shape[0] >= running  # counts of all rows at once


def test_the_largest_pass_holds_several_prompts_or_a_whole_one_where_none_is_split() -> None:
    given: dict[str, Any] = {"context_tokens_max": 128, "page_size": 4, "pages": 160}
    for chunk, prefill, tokens in ((16, 48, 16), (64, 48, 48), (512, 1024, 512), (None, 48, 128), (None, 512, 512)):
        config = SchedConfig(chunked_prefill_size=chunk, max_prefill_tokens=prefill, **given)
        assert assembly.largest_pass_tokens(config) == tokens


@pytest.mark.parametrize(("chunk", "context", "lengths"), [(100, 128, [100]), (300, 128, [128, 128, 44])])
def test_memory_is_measured_with_as_many_prompts_as_a_pass_can_hold(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, context: int, lengths: list[int]
) -> None:
    seen: list[tuple[list[int], int]] = []
    forward = Decoder.forward

    def recording(self: Decoder, batch: Any, attention: Any) -> Any:
        seen.append((batch.lengths_host.tolist(), len(batch.logits_at)))
        return forward(self, batch, attention)

    monkeypatch.setattr(Decoder, "forward", recording)
    monkeypatch.setattr(assembly, "size_pool", lambda *, largest_pass, **sizes: largest_pass() or memory(**sizes))
    settings = {**SMALL, "chunked_prefill_size": chunk, "context_tokens_max": context, "max_prefill_tokens": 1024}
    with LLM(folder, random_weights=3, **settings) as llm:
        assert seen == [(lengths, llm.config.max_running_requests)]


def test_memory_is_accounted_for_with_pages_given_too(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", logger="lockstep.runtime"),
        LLM(folder, device="cpu", random_weights=3, **SMALL) as llm,
    ):
        assert llm.config.pages == llm.memory.pages == SMALL["pages"]
    table = next(message for message in caplog.messages if message.startswith("memory\n"))
    assert "\n160 pages of 2.0 KiB" in table


def memory(**sizes: Any) -> MemoryBudget:
    """Memory for the longest request."""
    return MemoryBudget(0, 0, 0, 0, 0, sizes["page_bytes"], sizes["pages_least"])


def test_an_engine_is_put_together_with_its_device_as_the_current_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several GPUs; kernels would be launched on the first one otherwise."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: made.append(device) or nullcontext())
    with assembly.current(torch.device("cuda", 1)), assembly.current(torch.device("cpu")):
        assert made == [torch.device("cuda", 1)]
    inside = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        inside.append(device.type)
        yield
        inside.append("left")

    right = assembly.make_executor
    monkeypatch.setattr(assembly, "current", current)
    monkeypatch.setattr(assembly, "make_executor", lambda *a, **b: inside.append("made") or right(*a, **b))
    with LLM(folder, device="cpu", random_weights=3, **SMALL):
        assert inside == ["cpu", "made", "left"]


def test_what_the_device_keeps_is_made_on_the_stream_that_uses_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is returned to the stream that allocated it: another stream may reuse it while this one reads it."""

    class Watched(CpuLane):
        inside = False

        @contextmanager
        def stream(self) -> Iterator[None]:
            outside, self.inside = self.inside, True
            yield
            self.inside = outside

    clock = HostClock()
    lane, found = Watched(clock), {}
    for name in ("make_pool", "make", "SamplingTable", "DeviceTables", "Canary", "DecodeGraphs"):
        right = getattr(assembly, name)

        def watched(*args: Any, name: str = name, right: Any = right, **options: Any) -> Any:
            found[name] = lane.inside
            return right(*args, **options)

        monkeypatch.setattr(assembly, name, watched)
    model = build_model(folder, None, torch.device("cpu"), random_weights_seed=3)
    config = SchedConfig(page_size=4, pages=40, context_tokens_max=64)
    executor = make_executor(model, config, lane, kernels=PassKernels(graph_sizes=(1, 2)), debug=True)
    assert set(found.values()) == {True}
    assert len(found) == 6
    assert not lane.inside
    spoiled: list[bool] = []
    assert executor.canary is not None
    monkeypatch.setattr(executor.canary, "spoil", lambda slots: spoiled.append(lane.inside))
    monkeypatch.setattr(executor, "_compute", lambda launched: 1 / 0)
    none = {name: np.zeros(0, np.int32) for name in ("rows", "starts", "stops", "sample_rows")}
    plan = BatchPlan(batch_id=0, mode="extend", request_ids=np.zeros(0, np.int64), **none)
    executor.launch(plan)
    assert executor.collect().error == "ZeroDivisionError: division by zero"
    assert spoiled == [True]


def test_text_is_written_by_the_waiting_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the engine's thread, where every other request would wait as well."""
    threads = set()
    stream = Text.stream

    def watched(self: Text, prompt_ids: Any) -> Any:
        step = stream(self, prompt_ids)
        return lambda token: threads.add(threading.current_thread().name) or step(token)

    monkeypatch.setattr(Text, "stream", watched)
    with LLM(folder, random_weights=3, **SMALL) as llm:
        llm.generate([[5, 6], [7]], Params(max_new_tokens=4, ignore_eos=True))
        list(llm.stream([5, 6], Params(max_new_tokens=4, ignore_eos=True)))
    assert threads == {threading.current_thread().name}


# ------------------------------------------------------------------------------------------------------------------ CLI


def test_a_wrong_line_is_named_and_the_others_go_on(folder: Path) -> None:
    lines = [
        json.dumps({"id": "a", "prompt": "the quick", "max_new_tokens": 3, "ignore_eos": True}),
        "{no json",
        "",
        json.dumps({"prompt": [5, 6], "colour": "red"}),
        json.dumps({"messages": [{"role": "user", "content": "dog"}], "logprobs": 1, "stop": "zzz"}),
        json.dumps({"prompt": [5, 999]}),
        json.dumps({"id": 7}),
        json.dumps({"messages": []}),
        json.dumps({"prompt": [5], "stop": ""}),
        json.dumps({"prompt": [5], "stop": ["a", ""]}),
        json.dumps({"prompt": [5], "grammar": ["regex", "do(g|t)"], "max_new_tokens": 9}),
    ]
    result = run(folder, "-", "--max-new-tokens", "2", "--show-token-ids", stdin="\n".join(lines))
    assert result.return_value == 1
    said = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["line"] for one in said] == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert said[0]["id"] == "a"
    assert said[0]["finish_reason"] == "length"
    assert said[0]["output_tokens"] == len(said[0]["token_ids"]) == 3
    assert "malformed" in said[1]["error"]
    assert said[2]["error"] == "Object contains unknown field `colour`"
    assert len(said[3]["logprobs"]) == said[3]["output_tokens"]
    assert said[4]["error"] == "`prompt` holds token 999, but the model has 300"
    assert said[5]["error"] == "give either `prompt` or `messages`"
    assert said[6]["error"].startswith("`messages` is empty\nhint: ")
    assert said[7]["error"] == said[8]["error"]
    assert said[7]["error"].startswith("`stop` holds an empty text")
    assert said[9]["text"] in ("dog", "dot")
    assert "7 of 10 lines have an `error`" in result.stderr


def test_a_line_for_several_answers_has_them_in_one_object(folder: Path) -> None:
    lines = [
        json.dumps({"prompt": [5, 6], "n": 3, "temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True}),
        json.dumps({"prompt": [5, 6], "n": 0}),
        json.dumps({"prompt": [5, 6], "n": 2, "max_new_tokens": 0}),
    ]
    result = run(folder, "-", "--show-token-ids", stdin="\n".join(lines))
    said = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(one["token_ids"]) for one in said[0]["answers"]] == [4, 4, 4]
    assert said[0].keys() == {"line", "answers"}
    assert said[1]["error"].startswith("`n` must be 1 to ")
    assert "leaves one answer" in said[2]["error"]
    assert len(said[2]["answers"]) == 2
    assert "2 of 3 lines have an `error`" in result.stderr
    assert "12 output tokens" in result.stderr


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("tp", 1.5, "float"),
        ("tp", "2", "str"),
        ("tp", True, "bool"),
        ("tp", None, "NoneType"),
        ("seed", "a", "str"),
        ("random_weights", 0.5, "float"),
        ("cuda_graph_max_batch", [8], "list"),
    ],
)
def test_what_is_no_whole_number_is_named_with_its_type(folder: Path, name: str, value: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^`{name}` must be a whole number.*, which is of type {kind}$"):
        LLM(folder, **{name: value})


def test_one_prompt_is_answered_as_text(folder: Path, tmp_path: Path) -> None:
    result = run(
        folder, "--prompt", "the dog", "--max-new-tokens", "8", "--ignore-eos", "--journal", str(tmp_path / "run")
    )
    assert result.return_value == 0, result.output
    with LLM(folder, random_weights=3, page_size=4, pages=64) as llm:
        (answer,) = llm.generate("the dog", Params(max_new_tokens=8, ignore_eos=True))
    assert result.stdout == f"{answer.text}\n"
    assert replay(tmp_path / "run").batches == 8


def test_an_answer_that_failed_reports_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that raises must not yield an empty answer with exit status 0."""

    def fail(self: Any, *_: Any) -> Any:
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setattr(Decoder, "logits", fail)
    result = run(folder, "--prompt", "the dog")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "RuntimeError: no such kernel"
    result = run(folder, "--prompt", "the dog", "--prompt", "the fox")
    assert result.return_value == 1
    assert [json.loads(line)["error"] for line in result.stdout.splitlines()] == ["RuntimeError: no such kernel"] * 2
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: torch.full((len(hidden), VOCABULARY), torch.nan))
    with LLM(folder, random_weights=3, **SMALL) as llm:
        (answer,) = llm.generate([[5, 6]])
    assert answer.error == "the model's logits were no numbers, or no token was allowed"


def test_a_journal_that_is_there_is_not_written_over(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    assert run(folder, "--prompt", "the dog", "--max-new-tokens", "1", "--journal", str(tmp_path)).return_value == 0
    monkeypatch.setattr(assembly, "build_model", lambda *_, **__: pytest.fail("a model is loaded in vain"))
    result = run(folder, "--prompt", "the dog", "--journal", str(tmp_path))
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"`journal`: {tmp_path} already holds a journal\nhint: choose another run folder"


def test_a_journal_that_cannot_be_written_is_reported_in_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(folder, "--prompt", "the dog", "--journal", str(tmp_path / "file"))
    assert result.return_value == 1
    assert result.stderr.splitlines()[-1].startswith(
        f"lockstep generate: cannot make {tmp_path / 'file' / 'journal'}: "
    )


def test_the_input_is_not_written_over(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "build_model", lambda *_, **__: pytest.fail("a model is loaded in vain"))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "the dog"}\n')
    same, nowhere, a_folder = (
        run(folder, str(lines), "--out", str(out)).exception
        for out in (tmp_path / "." / "lines.jsonl", tmp_path / "none" / "out.jsonl", tmp_path)
    )
    assert lines.read_text() == '{"prompt": "the dog"}\n'
    assert str(same) == f"`--out` {lines} is the input, which would be lost\nhint: name another file"
    assert "there is no folder" in str(nowhere)
    assert "is a folder" in str(a_folder)


def test_the_log_reports_what_runs_unless_it_shall_be_quiet(folder: Path) -> None:
    one = ("--prompt", "the dog", "--max-new-tokens", "1", "--warm-up", "--set", "chunked_prefill_size=16")
    assert run(folder, *one).stderr == "", "a text on a terminal"
    assert "warm-up: " in run(folder, *one, *one).stderr
    assert run(folder, *one, *one, "--quiet").stderr == ""
    said = run(folder, *one, "--verbose").stderr
    assert "\nKV pages" in said, "the memory table"
    assert "warm-up: " in said
    assert run(folder, *one, "--quiet", "--verbose").exception is not None


def test_a_pool_that_no_memory_holds_is_explained(folder: Path) -> None:
    error = run(folder, "--prompt", "the dog", "--set", "pages=1000000000").exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("`pages` 1,000,000,000 needs 1,953,125 MiB of KV, but ")
    assert " MiB of memory are free\nweights " in str(error)
