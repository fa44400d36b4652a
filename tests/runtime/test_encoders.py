"""Encoders and cross-encoders: logits of labels and vectors of transformers, scheduled as whole prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the models run by transformers' code")

from lockstep.core.contract.commands import LaunchBatch  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.host.text import Text  # noqa: E402
from lockstep.runtime import LLM  # noqa: E402
from lockstep.runtime.from_transformers.encoder import groups  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.sim.run.assemble import assemble  # noqa: E402
from lockstep.sim.scenario.scenario import Scenario  # noqa: E402
from tests.support.encoders import FAMILIES, VECTORS, reference, save_encoder, some_pairs, tokenizer  # noqa: E402

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_of_pairs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model, pairs = save_encoder(tmp_path / "model", family), some_pairs()
    launched: list[int] = []
    with LLM(tmp_path / "model", **CPU, max_running_requests=7, debug=True, journal=tmp_path / "run") as llm:
        llm.host.observe = lambda _, step: launched.extend(
            len(one.plan.rows) for one in step.commands if isinstance(one, LaunchBatch)
        )
        found = llm.classify(pairs)
        vectors = llm.embed([first for first, _ in pairs[:4]])
    for pair, one in zip(pairs, found, strict=True):
        assert not one.error
        np.testing.assert_allclose(one.vector, reference(model, *pair).logits[0], atol=1e-5)
    for (first, _), one in zip(pairs, vectors, strict=False):
        expected = reference(model.base_model, first)[0][0].mean(0)
        np.testing.assert_allclose(one.vector, expected, atol=1e-5)
    assert len({round(float(one.vector[0]), 4) for one in found}) > 10
    assert max(launched) > 2  # several prompts in a batch
    replay(tmp_path / "run")


@pytest.mark.parametrize("family", VECTORS)
def test_vectors_of_an_encoder_without_labels(family: str, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, family, labels=False)
    texts = [second for _, second in some_pairs(6)]
    with LLM(tmp_path, **CPU, pooling="first", normalize=True) as llm:
        found = llm.embed(texts)
        with pytest.raises(ConfigError, match="has no head of labels"):
            llm.classify(texts)
    for text, one in zip(texts, found, strict=True):
        state = reference(model.base_model, text)[0][0, 0]
        np.testing.assert_allclose(one.vector, state / state.norm(), atol=1e-5)


def test_new_weights_change_the_labels(tmp_path: Path) -> None:
    save_encoder(tmp_path / "one", "Bert")
    other = save_encoder(tmp_path / "other", "Bert", initializer_range=0.5)
    with torch.no_grad():
        other.classifier.bias += 3.0
    other.save_pretrained(tmp_path / "other")
    pair = some_pairs(1)[0]
    settings = json.loads((tmp_path / "one" / "config.json").read_bytes())
    (tmp_path / "other" / "config.json").write_text(json.dumps(settings))
    with LLM(tmp_path / "one", **CPU) as llm:
        (before,) = llm.classify(pair)
        llm.update_weights(tmp_path / "other")
        (after,) = llm.classify(pair)
    assert after.vector == pytest.approx(before.vector + 3.0, abs=1e-4)


def test_what_an_encoder_cannot_do_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "Bert")
    for options, why in [
        ({"chunked_prefill_size": 32}, "`chunked_prefill_size` is 32, but BertForSequenceClassification computes"),
        ({"host_cache_gb": 1.0}, "`host_cache_gb` is 1.0"),
        ({"numerics": "invariant"}, "`numerics` is invariant"),
        ({"tp": 2}, "`tp` and `pp` must be 1"),
        ({"max_loras": 1}, "takes no adapters"),
    ]:
        with pytest.raises(ConfigError, match=why):
            LLM(tmp_path, **CPU, **options)
    settings = json.loads((tmp_path / "config.json").read_bytes())
    for changes, why in [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised by `bitsandbytes` are not read"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}, "supported are Sigmoid, Softmax and Identity"),
        ({"hidden_size": "wide"}, "cannot run by transformers' code here"),
    ]:
        with pytest.raises(ConfigError, match=why):
            build_model(settings | changes, random_weights_seed=1)
    with LLM(tmp_path, **CPU, context_tokens_max=64) as llm:
        (too_long,) = llm.classify([[5] * 65])
        assert "65 tokens" in too_long.error
        assert not llm.classify([[5] * 64])[0].error
        assert "no `lm_head`" in llm.generate([[5]])[0].error
        with pytest.raises(ConfigError, match="labels of its own"):
            llm.score(["a cat"], ["dog"])


@pytest.mark.parametrize("family", ["XLMRoberta", "ModernBert", "Qwen3"])
def test_a_simulation_has_the_scheduler_settings_of_the_runtime(family: str, tmp_path: Path) -> None:
    save_encoder(tmp_path, family)
    usual_on_a_cpu = {"max_running_requests": 7, "max_prefill_tokens": 512, "overlap_depth": 0}
    settings = {**usual_on_a_cpu, "batching": "mixed", "reserve": "on_demand"}  # as printed by a plan
    with LLM(tmp_path, **CPU, **settings) as llm:
        served = llm.host.engine.config
        found = llm.model.settings
    for profile in ("lockstep", "sglang", "vllm"):
        scenario = Scenario(model=str(tmp_path), gpu="l4", workload="gen:n=3,output=none", profile=profile)
        setup = assemble(replace(scenario, settings=usual_on_a_cpu), {})
        simulated = setup.config
        if profile == "lockstep":
            assert simulated == msgspec.structs.replace(served, eos_token_ids=())
        for name in ("pages", "context_tokens_max", "radix_cache", "chunked_prefill_size", "max_prefill_tokens"):
            if (name, profile) != ("pages", "sglang"):  # its pages have one token each
                assert getattr(simulated, name) == getattr(served, name), name
        assert setup.model.whole is not None
        assert (setup.model.whole.labels, setup.model.context_tokens_max) == (len(found.labels), found.context_tokens)


def test_types_are_refused_by_a_model_without_any(tmp_path: Path) -> None:
    save_encoder(tmp_path, "ModernBert")
    with LLM(tmp_path, **CPU) as llm:
        from lockstep.runtime import Params

        request = llm._request([5, 6], Params(max_new_tokens=0), "score")
        request = msgspec.structs.replace(request, token_type_ids=b"\0\1")
        (answer,) = llm._served([(request, Params(max_new_tokens=0))], None)
        assert "this model has no token types" in answer.error


def test_rows_of_similar_length_are_padded_together() -> None:
    lengths = np.array([10, 100, 90, 9, 40], np.int32)
    assert list(groups(lengths)) == [[1, 2], [4], [0, 3]]
    assert list(groups(lengths, at_once=False)) == [[1], [2], [4], [0], [3]]
    assert not list(groups(np.zeros(0, np.int32)))


@pytest.mark.parametrize("most", [8, 20, 55, 110])
def test_pairs_are_cut_as_the_library_cuts_them(most: int, tmp_path: Path) -> None:
    save_encoder(tmp_path, "Bert")
    text, library = Text(tmp_path), tokenizer()
    for pair in some_pairs():
        wanted = library(*pair, truncation="longest_first", max_length=most, return_token_type_ids=True)
        ids, types = text.encode_pair(*pair, most)
        assert (ids, types) == (wanted["input_ids"], wanted["token_type_ids"])
        assert text.encode_pair(*pair)[0] == library(*pair)["input_ids"]
