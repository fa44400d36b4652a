"""Models that transformers' code runs on our pages: equal to transformers itself, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
transformers = pytest.importorskip("transformers", reason="this model backend is transformers' code")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.checkpoint import CheckpointError, read_config  # noqa: E402
from lockstep.runtime.from_transformers.decoder import TransformersDecoder  # noqa: E402
from lockstep.runtime.models import Decoder, build_model, read_settings  # noqa: E402
from tests.runtime.test_models import Ranks, ThreadPoolExecutor, assert_close, expected, some_tokens  # noqa: E402
from tests.support.adapters import write_for  # noqa: E402
from tests.support.architectures import (  # noqa: E402
    ARCHITECTURES,
    REFUSED,
    SMALL,
    greedy_answers,
    save_architecture,
    serve,
)
from tests.support.model_passes import Passes  # noqa: E402

SPLIT = (
    "Mistral", "Phi-3", "Gemma 2", "OLMo 2", "GLM-4 (2025)", "Granite", "Mixtral", "Qwen2 MoE",
    "StarCoder 2", "DeepSeek-V3",
)  # fmt: skip
"""Architectures with a plan for several ranks, of each style."""


class Reference(NamedTuple):
    """A saved model, and the greedy answers of transformers."""

    folder: Path
    model: Any
    answers: list[list[int]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("model")
    model = save_architecture(folder, request.param)
    answers = greedy_answers(model)
    assert len({token for answer in answers for token in answer}) > 4, "the model answers the same to every prompt"
    return Reference(folder, model, answers)


@pytest.mark.parametrize("depth", [0, 1])
def test_greedy_tokens_are_those_of_transformers(reference: Reference, depth: int) -> None:
    """With chunks of 32, cached prefixes, a request retracted every few decodes, and the canary."""
    served = serve(reference.folder, model_backend="transformers", overlap_depth=depth)
    assert served.answers == reference.answers
    assert served.cached_tokens
    assert served.retractions > 1


@pytest.mark.parametrize("name", SPLIT)
def test_ranks_together_give_what_one_gives(name: str, tmp_path: Path) -> None:
    theirs = save_architecture(tmp_path, name)
    prompt, meeting = some_tokens(21, 40), Ranks(2)

    def run(rank: int) -> Any:
        model = build_model(tmp_path, torch.float32, parallel=meeting.parallel(rank), backend="transformers")
        return model.weight_bytes, Passes(model).run({0: prompt})[0]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(2)))
    whole = build_model(tmp_path, torch.float32, backend="transformers").weight_bytes
    for weight_bytes, logits in results:
        assert weight_bytes < whole
        assert_close(logits, expected(theirs, prompt))
        assert torch.equal(logits, results[0][1])


def test_two_processes_answer_as_one(tmp_path: Path) -> None:
    answers = greedy_answers(save_architecture(tmp_path, "Mistral"))
    assert serve(tmp_path, model_backend="transformers", tp=2, device="cpu").answers == answers


@pytest.mark.parametrize(
    ("name", "ranks", "why"),
    [
        ("GPT-2", 2, "transformers has no plan to split GPT2LMHeadModel over ranks"),
        ("Mistral", 4, "`tp` is 4, which does not divide `num_key_value_heads` 2 of MistralForCausalLM"),
    ],
)
def test_a_model_that_ranks_cannot_split_is_refused(name: str, ranks: int, why: str, tmp_path: Path) -> None:
    save_architecture(tmp_path, name)
    with pytest.raises(ConfigError, match=why):
        read_settings(tmp_path, ranks, "transformers")


def refused(name: str, folder: Path) -> str:
    """The error for a model of REFUSED, whose weights are never needed."""
    config_class, special = REFUSED[name]
    config = getattr(transformers, config_class)(**(SMALL | special))
    config.save_pretrained(folder)
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    kind = mapping[type(config)].__name__ if type(config) in mapping else "T5ForConditionalGeneration"
    described = read_config(folder) | {"architectures": [kind]}
    with pytest.raises(ConfigError) as caught:
        build_model(described, random_weights_seed=0, backend="transformers")
    return str(caught.value)


REASONS = {
    "BLOOM": "its attention does not go through transformers' attention interface",
    "DiffLlama": "layers attend as [0, 0, 1, 1]; each of its 2 layers must attend once",
    "Falcon": "its attention does not go through transformers' attention interface",
    "Falcon-Mamba": "its code takes no positions of tokens",
    "Gemma 3 with pictures": "tokens of a picture attend to later ones of it",
    "GPT-J": "its attention does not go through transformers' attention interface",
    "Llama 4": "`layer_types` holds `chunked_attention`",
    "Llama with dynamic positions": "`rope_type` dynamic: its frequencies would depend on the batch",
    "Mamba": "its code takes no positions of tokens",
    "MPT": "its attention does not go through transformers' attention interface",
    "OLMo hybrid": "as linear_attn.q_conv1d.weight, linear_attn.k_conv1d.weight, linear_attn.v_conv1d.weight",
    "RecurrentGemma": "its layers keep a state beside KV",
    "T5": "must begin with a decoder of `t5`",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    assert REASONS[name] in refused(name, tmp_path)


# ---------------------------------------------------------------------------------------------------------- the choice


def test_the_backend_follows_the_architecture_and_the_option(tmp_path: Path) -> None:
    save_architecture(tmp_path / "llama", "Llama")
    save_architecture(tmp_path / "mistral", "Mistral")
    assert isinstance(build_model(tmp_path / "llama", torch.float32), Decoder)
    assert isinstance(build_model(tmp_path / "llama", torch.float32, backend="transformers"), TransformersDecoder)
    assert isinstance(build_model(tmp_path / "mistral", torch.float32), TransformersDecoder)
    with pytest.raises(ConfigError, match=r"got `MistralForCausalLM`\nhint: model_backend auto runs others"):
        build_model(tmp_path / "mistral", torch.float32, backend="native")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="`model_backend` must be auto or native or transformers, got `hf`"):
        LLM(model_backend="hf")


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    ours = {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    with pytest.raises(ConfigError, match=r"`model_type` of config.json is `own`, .*\nhint: code in a model's folder"):
        build_model(ours, random_weights_seed=0)


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    save_architecture(tmp_path, "Mistral")
    config = read_config(tmp_path) | {"quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ConfigError, match="weights quantised by `bitsandbytes` are not read by this model backend"):
        build_model(config, random_weights_seed=0)


def test_longrope_keeps_the_original_context() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    config = transformers.Phi3Config(**SMALL, rope_scaling=scaling, original_max_position_embeddings=32).to_dict()
    model = build_model(config | {"architectures": ["Phi3ForCausalLM"]}, random_weights_seed=0)
    assert model.settings.context_tokens == 32


# ------------------------------------------------------------------------------------------------------------- weights


def test_all_problems_of_a_checkpoint_are_in_one_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_architecture(tmp_path, "Mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    lost = tensors.pop("model.layers.0.block_sparse_moe.experts.3.w1.weight", None)
    assert lost is not None, "the library stores experts one by one"
    tensors["model.norm.weight"] = torch.zeros(7)
    tensors["model.layers.0.extra"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        build_model(tmp_path)
    assert len(caught.value.problems) == 3
    assert any("experts.3.w1.weight: missing" in problem for problem in caught.value.problems)


def test_random_weights_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    save_architecture(tmp_path, "Mixtral")
    config = read_config(tmp_path)
    whole = {want.name: want for want in build_model(config, random_weights_seed=3).tensors()}
    assert float(whole["model.norm.weight"].into.min()) == float(whole["model.norm.weight"].into.max()) == 1.0
    prompt, meeting = some_tokens(9, 4), Ranks(2)

    def run(rank: int) -> Any:
        return Passes(build_model(config, random_weights_seed=3, parallel=meeting.parallel(rank))).run({0: prompt})[0]

    alone = Passes(build_model(config, random_weights_seed=3)).run({0: prompt})[0]
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(run, range(2)):
            torch.testing.assert_close(logits, alone)


def test_weights_are_replaced_while_the_engine_runs(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_architecture(first, "Mixtral")
    changed = save_architecture(second, "Mixtral")
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    changed.save_pretrained(second)
    prompt = some_tokens(12, 5)
    with LLM(second) as llm:
        (want,) = llm.generate([prompt], Params(max_new_tokens=8))
    with LLM(first) as llm:
        (before,) = llm.generate([prompt], Params(max_new_tokens=8))
        llm.update_weights(second)
        (after,) = llm.generate([prompt], Params(max_new_tokens=8))
        described = json.loads((second / "config.json").read_text()) | {"rope_theta": 77.0, "rope_parameters": None}
        (second / "config.json").write_text(json.dumps(described))
        with pytest.raises(ConfigError, match="`rope_parameters` is "):
            llm.update_weights(second)
    assert after.token_ids == want.token_ids
    assert before.token_ids != after.token_ids


# ------------------------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("name", ["Mistral", "Phi-3"])
def test_adapters_change_the_linear_layers(name: str, tmp_path: Path) -> None:
    """An adapter equals a model into whose matrices it was added."""
    theirs = save_architecture(tmp_path / "model", name)
    linear = {key: one for key, one in theirs.named_modules() if isinstance(one, torch.nn.Linear) and key != "lm_head"}
    adapter = tmp_path / "adapter"
    merge = write_for(adapter, linear)
    prompt = some_tokens(12, 6)
    with LLM(tmp_path / "model", lora={"law": adapter}, model_backend="transformers") as llm:
        alone, adapted = llm.generate(
            [prompt, prompt], [Params(max_new_tokens=8), Params(max_new_tokens=8, adapter="law")]
        )
    merge()
    theirs.save_pretrained(tmp_path / "merged")
    with LLM(tmp_path / "merged", model_backend="transformers") as llm:
        (want,) = llm.generate([prompt], Params(max_new_tokens=8))
    assert adapted.token_ids == want.token_ids
    assert alone.token_ids != want.token_ids


# ------------------------------------------------------------------------------------------------------------- the rest


def test_fp8_kv_vectors_logprobs_and_drafts(tmp_path: Path) -> None:
    """Features of the engine that are independent of the code of the model."""
    answers = greedy_answers(save_architecture(tmp_path, "Gemma 2"))
    drafted = serve(tmp_path, speculative_method="ngram", num_speculative_tokens=3)
    assert drafted.answers == answers
    with LLM(tmp_path, kv_cache_dtype="fp8_e4m3") as llm:
        (answer,) = llm.generate([some_tokens(9, 1)], Params(max_new_tokens=4, logprobs=2, prompt_logprobs=1))
        assert len(answer.logprobs) == 4
        (vector,) = llm.embed([some_tokens(9, 1)])
        assert vector.vector.shape == (SMALL["hidden_size"],)


def test_padded_decodes_compute_the_same(tmp_path: Path) -> None:
    answers = greedy_answers(save_architecture(tmp_path, "OLMo 3"))
    assert serve(tmp_path, cuda_graphs="eager").answers == answers


def test_tokens_that_mix_outside_of_attention_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral.modeling_mistral import MistralMLP

    right = MistralMLP.forward
    monkeypatch.setattr(MistralMLP, "forward", lambda self, x: right(self, x + x.roll(1, dims=1)))
    save_architecture(tmp_path, "Mistral")
    with pytest.raises(ConfigError, match="the results of a token depend on the tokens beside it"):
        build_model(tmp_path)
