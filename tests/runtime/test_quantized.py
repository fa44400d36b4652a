"""Weights in fewer bits: every layout gives the answers of the same checkpoint that was widened before."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.quantization import INT4_GROUP, WEIGHT_BYTES, int4_bytes, read_weight_format  # noqa: E402
from lockstep.runtime.checkpoint import CheckpointError  # noqa: E402
from lockstep.runtime.models import Decoder, build_model  # noqa: E402
from tests.runtime.test_models import EXPERTS, SMALL, Ranks, some_tokens  # noqa: E402
from tests.support.model_passes import Passes  # noqa: E402
from tests.support.quantize import KINDS, write  # noqa: E402

QWEN3 = SMALL | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MOE = QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True, "mlp_only_layers": [0]} | EXPERTS
MOE |= {"moe_intermediate_size": 32}
PROMPT = some_tokens(19, 3)


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of random values, large enough that a wrong one shows."""
    path.mkdir()
    model = build_model(config, torch.float32, random_weights_seed=5)
    tensors = {tensor.name: tensor.into * (1.0 if tensor.initial else 12.0) for tensor in model.tensors()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("dense") / "model", QWEN3)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("mixture") / "model", MOE)


def logits(model: Decoder, prompt: list[int] = PROMPT) -> Any:
    passes = Passes(model)
    parts = [passes.run({1: prompt[:12]})[1], passes.run({1: prompt[12:13]}, extend_rows=0)[1]]
    return torch.cat([*parts, passes.run({1: prompt[13:]})[1]])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_widened_checkpoint(kind: str, dense: Path, tmp_path: Path) -> None:
    write(dense, kind, tmp_path / "stored", widened=tmp_path / "widened")
    stored, widened = (build_model(tmp_path / name, torch.float32) for name in ("stored", "widened"))
    found, expected = logits(stored), logits(widened)
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    unquantised = logits(build_model(dense, torch.float32))
    assert (unquantised - expected).abs().max() > 1e-3 * expected.abs().max()  # otherwise any values would agree
    assert stored.weight_bytes < (0.62 if "fp8" in kind or "tensors" in kind or kind == "modelopt" else 0.5) * (
        widened.weight_bytes
    )


@pytest.mark.parametrize("kind", ["fp8", "compressed-tensors", "awq", "gptq"])
def test_experts(kind: str, mixture: Path, tmp_path: Path) -> None:
    write(mixture, kind, tmp_path / "stored", widened=tmp_path / "widened")
    found, expected = (logits(build_model(tmp_path / name, torch.float32)) for name in ("stored", "widened"))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("of", "kind", "ranks"),
    [
        *(("dense", kind, 2) for kind in ("fp8", "fp8, small blocks", "compressed-tensors, channels", "awq", "gptq")),
        ("dense", "fp8, small blocks", 4),  # each of the two kv heads on two ranks
        ("mixture", "fp8", 2),
        ("mixture", "awq", 2),
    ],
)
def test_ranks_together_give_what_one_gives(
    of: str, kind: str, ranks: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    write(request.getfixturevalue(of), kind, tmp_path / "stored", widened=tmp_path / "widened")
    expected, meeting = logits(build_model(tmp_path / "widened", torch.float32)), Ranks(ranks)

    def run(rank: int) -> Any:
        return logits(build_model(tmp_path / "stored", torch.float32, parallel=meeting.parallel(rank)))

    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(run, range(ranks)):
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_ranks_that_cut_a_group_are_refused(dense: Path, tmp_path: Path) -> None:
    write(dense, "gptq, symmetric", tmp_path / "stored")  # groups of 32, and 64 / 4 inputs on a rank
    with pytest.raises(ConfigError, match=r"`tp` 4 cuts `o_proj`: .* `quantization_config.group_size` 32"):
        build_model(tmp_path / "stored", torch.float32, parallel=Ranks(4).parallel(0))


@pytest.mark.parametrize("kind", ["fp8", "compressed-tensors", "modelopt", "awq", "gptq"])
def test_modules_that_are_kept(kind: str, dense: Path, tmp_path: Path) -> None:
    kept = ("model.layers.0.self_attn", "mlp.down_proj")
    write(dense, kind, tmp_path / "stored", widened=tmp_path / "widened", kept=kept)
    model = build_model(tmp_path / "stored", torch.float32)
    expected = logits(build_model(tmp_path / "widened", torch.float32))
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max()
    layers = list(model.stack)
    assert isinstance(layers[0].attention.qkv.weight, torch.nn.Parameter)
    assert not isinstance(layers[1].attention.qkv.weight, torch.nn.Parameter)
    assert isinstance(layers[1].mlp.down.weight, torch.nn.Parameter)


def test_an_older_folder_of_modelopt_reports_it_in_a_file_of_its_own(dense: Path, tmp_path: Path) -> None:
    write(dense, "modelopt", tmp_path / "stored", widened=tmp_path / "widened", kept=("layers.1.mlp.down_proj",))
    config = json.loads((tmp_path / "stored" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "stored" / "config.json").write_text(json.dumps(config))
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.1.mlp.d*"]}
    (tmp_path / "stored" / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    expected = logits(build_model(tmp_path / "widened", torch.float32))
    found = logits(build_model(tmp_path / "stored", torch.float32))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_bias_of_zeros_that_autogptq_writes_is_passed_over_and_no_other(dense: Path, tmp_path: Path) -> None:
    name, folder = "model.layers.0.mlp.up_proj.bias", write(dense, "gptq", tmp_path / "stored")
    expected = logits(build_model(folder, torch.float32))
    assert torch.equal(logits(build_model(changed(folder, {name: torch.zeros(96)}), torch.float32)), expected)
    with pytest.raises(CheckpointError, match=f"{name}: the model has no such bias, and it is not zero"):
        build_model(changed(folder, {name: torch.ones(96)}), torch.float32)


def test_biases_that_a_model_has_are_its_own(tmp_path: Path) -> None:
    config = QWEN3 | {"architectures": ["LlamaForCausalLM"], "attention_bias": True}
    folder = folder_of(tmp_path / "model", config)
    write(folder, "gptq", tmp_path / "stored", widened=tmp_path / "widened")
    stored, expected = build_model(tmp_path / "stored", torch.float32), build_model(tmp_path / "widened", torch.float32)
    assert torch.equal(stored.stack[0].attention.qkv.bias, expected.stack[0].attention.qkv.bias)
    assert (logits(stored) - logits(expected)).abs().max() <= 1e-5 * logits(expected).abs().max()


def test_one_product_of_matrices_stored_in_two_ways_is_refused(dense: Path, tmp_path: Path) -> None:
    write(dense, "awq", tmp_path / "stored", kept=("layers.1.self_attn.k_proj",))
    with pytest.raises(ConfigError, match=r"keeps model.layers.1.self_attn.k_proj as it is, but not .*q_proj"):
        build_model(tmp_path / "stored", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8", "awq", "gptq"])
def test_in_half_precision_they_are_close(kind: str, dtype: Any, dense: Path, tmp_path: Path) -> None:
    write(dense, kind, tmp_path / "stored", widened=tmp_path / "widened")
    found = [build_model(tmp_path / "stored", dtype), build_model(tmp_path / "widened", dtype)]
    stored, widened = (one.stack[0].mlp.down for one in found)
    weight = stored.weight.widened(dtype)
    step = 2 ** (-8 if dtype == torch.bfloat16 else -11)
    bound = (2 if kind != "fp8" else 1) * step  # scales of 4 bits are rounded, too
    assert (weight.float() - widened.weight.float()).abs().max() <= bound * widened.weight.abs().max()


def test_random_weights_of_a_quantised_config_spread_like_others() -> None:
    for settings, _ in (KINDS["fp8"], KINDS["fp8, tensors"], KINDS["awq"], KINDS["gptq"]):
        first, again = (
            build_model(QWEN3 | {"quantization_config": settings}, torch.float32, random_weights_seed=7)
            for _ in range(2)
        )
        for layer, same in zip(first.stack, again.stack, strict=True):
            weight = layer.mlp.gate_up.weight.widened(torch.float32)
            assert torch.equal(weight, same.mlp.gate_up.weight.widened(torch.float32))
            assert 0.015 < weight.std() < 0.025
            assert abs(weight.mean()) < 0.003


# --------------------------------------------------------------------------------------------------------------- errors

COMPRESSED = KINDS["compressed-tensors"][0]
GROUP = COMPRESSED["config_groups"]["group_0"]


def compressed(**weights: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | weights}}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("fp8", "`quantization_config` must be an object, got `fp8`"),
        ({}, "`quantization_config.quant_method` must be one of fp8, .*, got `null`"),
        (
            {"quant_method": "bitsandbytes"},
            "quant_method` must be one of fp8, .*, got `bitsandbytes`; take a checkpoint",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "`quantization_config.fmt` must be e4m3 .*, got `e5m2`"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size` must be two .*, got `\[128\]`"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers` must be a list of module names"),
        ({"quant_method": "awq", "bits": 8}, "`quantization_config.bits` must be 4, got `8`; 8 bits are served as fp8"),
        ({"quant_method": "awq", "version": "gemv"}, "version` must be gemm, got `gemv`; AutoAWQ writes it with"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point` must be true, got `false`"),
        ({"quant_method": "awq", "group_size": 100}, "group_size` must be a power of two .*, got `100`"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format` must be gptq or gptq_v2"),
        ({"quant_method": "gptq", "dynamic": {"-:lm_head": {}}}, "dynamic` must be absent"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo` must be FP8, got `W4A8_AWQ`; ModelOpt is",
        ),
        (COMPRESSED | {"format": "pack-quantized"}, "format` must be float-quantized .*, got `pack-quantized`"),
        (COMPRESSED | {"ignore": ["re:.*[lm_head"]}, r"ignore` holds the pattern `re:.*\[lm_head`: unterminated"),
        (compressed(num_bits=4), "group_0.weights.num_bits` must be 8, got `4`"),
        (compressed(strategy="group"), "weights.strategy` must be tensor or channel or block, got `group`"),
        (COMPRESSED | {"transform_config": {"R1": {}}}, "transform_config` must be absent"),
    ],
)
def test_a_wrong_quantization_config_is_named(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_model(QWEN3 | {"quantization_config": settings}, torch.float32, random_weights_seed=1)


def changed(folder: Path, change: dict[str, Any]) -> Path:
    """The folder with other tensors under some names; None leaves them out."""
    tensors = {
        name: one for name, one in load_file(folder / "model.safetensors").items() if change.get(name, 0) is not None
    }
    save_file(tensors | {k: v for k, v in change.items() if v is not None}, folder / "model.safetensors")
    return folder


def test_tensors_that_do_not_fit_their_layout_are_named(dense: Path, tmp_path: Path) -> None:
    q, down = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    fp8 = write(dense, "fp8, small blocks", tmp_path / "fp8")
    change = {f"{q}.weight": torch.zeros(64, 64), f"{down}.weight_scale_inv": None}
    with pytest.raises(CheckpointError) as caught:
        build_model(changed(fp8, change), torch.float32)
    assert f"{q}.weight: expected [64, 64] F8_E4M3, found [64, 64] F32" in caught.value.problems
    assert f"{down}.weight_scale_inv: missing, expected [4, 3] BF16/F16/F32" in caught.value.problems
    gptq = write(dense, "gptq", tmp_path / "gptq")
    mixed = torch.arange(64, dtype=torch.int32) % 4
    with pytest.raises(CheckpointError, match=r"groups of 16 inputs are not in order: .*desc_act` must be false"):
        build_model(changed(gptq, {f"{q}.g_idx": mixed}), torch.float32)
    tensors = write(dense, "fp8, tensors", tmp_path / "tensors")
    with pytest.raises(CheckpointError, match="holds scales that are not above 0"):
        build_model(changed(tensors, {f"{q}.weight_scale": torch.tensor(float("nan"))}), torch.float32)


# ------------------------------------------------------------------------------------------------------------ one table


@pytest.mark.parametrize(("kind", "dtype"), [("fp8", "fp8"), ("awq", "int4"), ("gptq", "int4")])
def test_matrices_take_the_bytes_of_the_planners_table(kind: str, dtype: str) -> None:
    settings = KINDS[kind][0] | {"group_size": INT4_GROUP}
    config = QWEN3 | {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    config |= {"quantization_config": settings}
    model = build_model(config, torch.bfloat16, random_weights_seed=1)
    layer = next(iter(model.stack))
    for product in (layer.mlp.gate_up, layer.mlp.down):
        taken = sum(one.numel() * one.element_size() for one in product.weight.parameters())
        expected = WEIGHT_BYTES[dtype]["linear"] * product.weight.outputs * product.weight.inputs
        assert expected <= taken <= 1.0005 * expected
    assert int4_bytes(32) == (4 + 20 / 32) / 8


def test_the_planner_reads_the_same_configs() -> None:
    from lockstep.sim.cost.config_fields import ConfigFields
    from lockstep.sim.cost.families import _checkpoint_dtype

    for kind, (settings, _) in KINDS.items():
        problems: list[str] = []
        found = read_weight_format({"quantization_config": settings}, problems)
        assert found is not None
        assert problems == []
        priced = settings | ({"group_size": INT4_GROUP} if "group_size" in settings else {})
        row = _checkpoint_dtype(ConfigFields("config.json", {"quantization_config": priced}))
        assert row == ("fp8" if found.layout == "fp8" else "int4"), kind
