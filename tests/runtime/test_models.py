"""Our models against transformers: same random weights, same logits, with tokens split over passes in any way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime.models import Decoder, Parallel, build_model  # noqa: E402
from lockstep.runtime.models.config_reader import ConfigReader  # noqa: E402
from lockstep.runtime.models.rope import RopeSettings, read_rope  # noqa: E402
from tests.support.model_passes import Passes  # noqa: E402

TOLERANCE = 1e-4  # relative to the largest logit

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "initializer_range": 0.3,  # so that a wrong weight or position shows
    "eos_token_id": 1,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# For each model: the class of transformers' config, and its settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_theta": 500.0}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama, biases": ("LlamaConfig", {"attention_bias": True}),
    "llama 3.1 positions": ("LlamaConfig", {"rope_theta": 50_000.0, "rope_scaling": LLAMA3}),
    "llama, linear positions": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3, no groups": ("Qwen3Config", {"head_dim": 10, "num_key_value_heads": 4}),
    "qwen3, yarn": (
        "Qwen3Config",
        {
            "head_dim": 16,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, "norm_topk_prob": True, **EXPERTS}),
    "qwen3-moe, weights as they are": ("Qwen3MoeConfig", {"head_dim": 8, "norm_topk_prob": False, **EXPERTS}),
    "qwen3-moe, a dense layer": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0], **EXPERTS},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """A model of transformers with random weights, and ours, loaded from its saved folder."""
    folder = tmp_path_factory.mktemp("model")
    theirs = save_model(folder, request.param)
    return theirs, build_model(folder, torch.float32)


def save_model(folder: Path, case: str, shard_size: str = "1GB") -> Any:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    config_class, special = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**(SMALL | special))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # parameters that start at 0 or 1 would hide an error
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def expected(theirs: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return theirs(torch.tensor([tokens]), use_cache=False).logits[0].float()


def assert_close(ours: Any, theirs: Any) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    largest = theirs.abs().max().item()
    assert largest > 0.5, "logits this small would agree whatever they are"
    assert (ours - theirs).abs().max().item() <= TOLERANCE * largest


def some_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, SMALL["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_prefill(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    prompts = {2: some_tokens(13, 1), 0: some_tokens(1, 2), 3: some_tokens(24, 3)}
    for row, logits in Passes(ours).run(prompts).items():
        assert_close(logits, expected(theirs, prompts[row]))


def test_chunked_prefill(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    passes, prompt = Passes(ours), some_tokens(23, 4)
    chunks = [passes.run({1: prompt[start:stop]})[1] for start, stop in ((0, 7), (7, 8), (8, 21), (21, 23))]
    assert_close(torch.cat(chunks), expected(theirs, prompt))


def test_decode(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    passes = Passes(ours)
    texts = {row: some_tokens(12, 10 + row) for row in range(4)}
    first = passes.run({row: text[: 3 + row] for row, text in texts.items()})
    parts = {row: [logits] for row, logits in first.items()}
    for step in range(5):
        batch = {row: [text[3 + row + step]] for row, text in texts.items()}
        for row, logits in passes.run(batch, extend_rows=0).items():
            parts[row].append(logits)
    for row, text in texts.items():
        assert_close(torch.cat(parts[row]), expected(theirs, text[: 8 + row]))


def test_mixed_batch(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    passes = Passes(ours)
    texts = {row: some_tokens(20, 20 + row) for row in range(4)}
    before = passes.run({0: texts[0][:6], 1: texts[1][:9], 3: texts[3][:2]})
    mixed = passes.run({3: texts[3][2:11], 2: texts[2][:5], 0: texts[0][6:7], 1: texts[1][9:10]}, extend_rows=2)
    for row in (0, 1, 3):
        logits = torch.cat([before[row], mixed[row]])
        assert_close(logits, expected(theirs, texts[row][: len(logits)]))
    assert_close(mixed[2], expected(theirs, texts[2][:5]))


def test_a_prefix_on_shared_pages(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    passes, prefix = Passes(ours), some_tokens(8, 30)
    passes.run({0: prefix})
    passes.table[1, :2] = passes.table[0, :2]  # two full pages of four
    passes.lengths[1] = 8
    rest = some_tokens(6, 31)
    assert_close(passes.run({1: rest})[1], expected(theirs, prefix + rest)[8:])


# ------------------------------------------------------------------------------------------------------------- by ranks


class Ranks:
    """Ranks as threads that meet to sum or to join their results, in the order of the ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.parts = ranks, [torch.empty(0)] * ranks
        self.barrier = threading.Barrier(ranks, timeout=120)

    def parallel(self, rank: int) -> Parallel:
        def met(put: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
            def meet(tensor: Any) -> Any:
                self.parts[rank] = tensor
                self.barrier.wait()
                together = put(list(self.parts))
                self.barrier.wait()
                return together

            return meet

        return Parallel(
            rank, self.ranks, met(lambda parts: torch.stack(parts).sum(0)), met(lambda parts: torch.cat(parts, -1))
        )


@pytest.mark.parametrize("ranks", [2, 4])  # with 4 ranks, each of the two kv heads is on two of them
@pytest.mark.parametrize("case", ["llama, biases", "llama, tied", "qwen3", "qwen3-moe"])
def test_ranks_together_give_what_one_gives(case: str, ranks: int, tmp_path: Path) -> None:
    theirs = save_model(tmp_path, case)
    prompt, meeting = some_tokens(11, 40), Ranks(ranks)

    def run(rank: int) -> tuple[Decoder, Any]:
        model = build_model(tmp_path, torch.float32, parallel=meeting.parallel(rank))
        return model, Passes(model).run({0: prompt})[0]

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, range(ranks)))
    for model, logits in results:
        assert (model.heads, model.kv_heads) == (4 // ranks, max(2 // ranks, 1))
        assert_close(logits, expected(theirs, prompt))
        assert torch.equal(logits, results[0][1])


def test_random_weights_do_not_depend_on_the_ranks() -> None:
    config = SMALL | {"architectures": ["LlamaForCausalLM"]}
    whole = {tensor.name: tensor.into for tensor in build_model(config, random_weights_seed=3).tensors()}
    meeting = Ranks(2)
    for rank in range(2):
        part = build_model(config, random_weights_seed=3, parallel=meeting.parallel(rank))
        for tensor in part.tensors():
            full = whole[tensor.name]
            if tensor.split.dim is not None:
                kept = tensor.split.shard(tensor.shape[tensor.split.dim], rank, 2)
                full = full.narrow(tensor.split.dim, kept.start, kept.stop - kept.start)
            assert torch.equal(tensor.into[: full.shape[0]], full), tensor.name


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    config = SMALL | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ConfigError, match="the 4 units of `q_proj` cannot be split over 3 ranks"):
        build_model(config, random_weights_seed=0, parallel=Ranks(3).parallel(0))


# ------------------------------------------------------------------------------------------------- settings and weights


def test_random_weights_follow_from_the_seed() -> None:
    config = SMALL | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, **EXPERTS}
    first, again, other = (build_model(config, random_weights_seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embeddings.weight, other.embeddings.weight)
    assert not torch.equal(first.embeddings.weight, first.head.weight)
    assert all(parameter.isfinite().all() for parameter in first.parameters())


def test_a_model_in_bfloat16_gives_float32_logits() -> None:
    config = SMALL | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "dtype": "bfloat16", **EXPERTS}
    model = build_model(config, random_weights_seed=5)
    passes = Passes(model)
    batch = passes.batch({0: some_tokens(5, 1)}, extend_rows=1)
    with torch.no_grad():
        hidden = model(batch, passes.attention)
        logits = model.logits(hidden)
    assert (hidden.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    close = Passes(build_model(config, torch.float32, random_weights_seed=5)).run({0: some_tokens(5, 1)})[0]
    assert (logits - close).abs().max() <= 0.05 * close.abs().max()


def test_everything_wrong_with_a_config_is_reported_at_once() -> None:
    config = SMALL | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_act": "gelu",
        "num_key_value_heads": 3,
        "vocab_size": 0,
        "rms_norm_eps": "small",
        "use_sliding_window": True,
        "quantization_config": {"quant_method": "bitsandbytes"},
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    with pytest.raises(ConfigError) as caught:
        build_model(config, torch.float32, random_weights_seed=0)
    for name in (
        "hidden_act num_key_value_heads vocab_size rms_norm_eps use_sliding_window rope_scaling "
        "quantization_config.quant_method num_experts num_experts_per_tok moe_intermediate_size"
    ).split():
        assert f"`{name}`" in str(caught.value)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"one of LlamaForCausalLM, .*got `MambaForCausalLM`"):
        build_model({"architectures": ["MambaForCausalLM"]}, torch.float32, random_weights_seed=0)


def test_a_config_without_a_folder_needs_a_seed() -> None:
    with pytest.raises(ConfigError, match="random_weights_seed"):
        build_model(SMALL | {"architectures": ["LlamaForCausalLM"]}, torch.float32)


def test_rope_settings_are_read_in_both_forms() -> None:
    older = rope_of({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}})
    newer = rope_of({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2}})
    by_layer = {"full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2}, "sliding_attention": {}}
    assert older == newer == rope_of({"rope_parameters": by_layer}) == RopeSettings(theta=5e5, kind="linear", factor=2)
    reader = ConfigReader({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
    read_rope(reader)
    (problem,) = reader.problems
    assert problem.endswith("lacks `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`")


def rope_of(config: dict[str, Any]) -> RopeSettings:
    reader = ConfigReader(config)
    rope = read_rope(reader)
    reader.check()
    return rope


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("`rope_theta` must be a positive number, got `abc`", {"rope_theta": "abc"}),
    ("`rope_theta` must be a positive number, got `nan`", {"rope_theta": float("nan")}),
    ("`max_position_embeddings` must be a positive whole number, got `x`", {"max_position_embeddings": "x"}),
    ("`rope_scaling` must be an object, got `[3]`", {"rope_scaling": [3]}),
    ("`layer_types` must be a list of texts, got `5`", {"layer_types": 5}),
    ("`layer_types` may hold only `full_attention`", {"layer_types": ["sliding_attention"]}),
    ("`architectures` must be a list of texts, got `[['x']]`", {"architectures": [["x"]]}),
    ("`architectures` must be a list of texts, got `LlamaForCausalLM`", {"architectures": "LlamaForCausalLM"}),
    ("`dtype` must be bfloat16, float16, float32, got `['a']`", {"dtype": ["a"]}),
    ("`torch_dtype` must be bfloat16, float16, float32, got `int8`", {"torch_dtype": "int8"}),
    ("`mlp_only_layers` must be a list of whole numbers from 0 on, got `3`", {"mlp_only_layers": 3}),
    ("`eos_token_id` must be token ids, got `true`", {"eos_token_id": True}),
    ("`eos_token_id` must be token ids, got `</s>`", {"eos_token_id": "</s>"}),
    (
        "`rope_scaling.original_max_position_embeddings` must be a positive whole number, got `[3]`",
        {"rope_scaling": {**YARN, "original_max_position_embeddings": [3]}},
    ),
    ("`rope_scaling.factor` must be a number of at least 1, got `-1`", {"rope_scaling": {**YARN, "factor": -1}}),
    ("`rope_scaling.factor` must be a number of at least 1, got `true`", {"rope_scaling": {**YARN, "factor": True}}),
    (
        "`rope_scaling.factor` must be a number of at least 1, got `0`",
        {"rope_scaling": {"type": "linear", "factor": 0}},
    ),
    (
        "`rope_scaling.attention_factor` must be a positive number, got `1.0`",
        {"rope_scaling": {**YARN, "attention_factor": "1.0"}},
    ),
    ("`rope_scaling.mscale` must be a number of at least 0, got `x`", {"rope_scaling": {**YARN, "mscale": "x"}}),
    ("`rope_scaling.truncate` must be true or false, got `1`", {"rope_scaling": {**YARN, "truncate": 1}}),
    ("`rope_scaling.beta_fast` must be above `beta_slow`", {"rope_scaling": {**YARN, "beta_fast": 1.0}}),
    ("`rope_theta` must be above 1 with yarn, got 1", {"rope_theta": 1, "rope_scaling": YARN}),
    (
        "`rope_scaling.high_freq_factor` must be above `low_freq_factor`, which is 4, got `4.0`",
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
    ),
    ("`rope_scaling.partial_rotary_factor` must be", {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}),
    (
        "`rope_parameters` holds `sliding_attention`, where numbers are expected, or one object `full_attention`",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 50.0}}},
    ),
    (
        "`rope_parameters` holds `full_attention`, where numbers are expected",
        {"rope_parameters": {"rope_theta": 50.0, "full_attention": {"rope_theta": 60.0}}},
    ),
    (
        "`rope_parameters.full_attention.rope_theta` must be a positive number, got `x`",
        {"rope_parameters": {"full_attention": {"rope_theta": "x"}}},
    ),
    ("`vocab_size` must be a positive whole number", {"vocab_size": 10**30}),
]


@pytest.mark.parametrize(("problem", "settings"), BAD, ids=[problem for problem, _ in BAD])
def test_a_value_that_cannot_be_is_named_in_the_one_error(problem: str, settings: dict[str, Any]) -> None:
    config = SMALL | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, **EXPERTS, **settings}
    also = "hidden_act" if "architectures" not in settings else "architectures"
    with pytest.raises(ConfigError) as caught:
        build_model(config | {"hidden_act": "gelu"}, random_weights_seed=0)
    assert problem in str(caught.value)
    assert f"`{also}`" in str(caught.value)


def test_yarn_extends_the_context_that_the_folder_names() -> None:
    """Qwen's folders keep the original context in `max_position_embeddings`; users add `rope_scaling` by hand."""

    def context(**settings: Any) -> int:
        config = SMALL | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, **settings}
        return build_model(config, random_weights_seed=0).settings.context_tokens

    assert context(rope_scaling=YARN) == 4 * 64
    assert context(rope_scaling=YARN, max_position_embeddings=80) == 4 * 64
    assert context(rope_scaling=YARN, max_position_embeddings=300) == 300
    assert context(rope_scaling={"type": "yarn", "factor": 2.5}) == 160
    assert context(rope_scaling=LLAMA3) == 64


def test_end_tokens_that_the_model_does_not_have_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "eos_token_id": [1, 97, -1, 96]}
    with caplog.at_level("WARNING", "lockstep.runtime"):
        assert build_model(config, random_weights_seed=0).settings.end_tokens == (1, 96)
    assert "`eos_token_id` 97, -1 is passed over: the model has 97 tokens" in caplog.text
