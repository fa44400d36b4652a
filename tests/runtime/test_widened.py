"""Published formats of quantised weights: which are multiplied as stored, widened when read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from safetensors.torch import save_file  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.quantization import FIELD, read_weight_format  # noqa: E402
from lockstep.runtime.checkpoint import CheckpointError, StoredTensor  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.quantized.widened import FP4, WidenedTensors, widened_format  # noqa: E402
from tests.support.small_runtime import SMALL_QWEN3  # noqa: E402

GROUP = {"targets": ["Linear"]}
CT: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16}

PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "fp8 in blocks": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "stored"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, "stored"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "stored"),
    "gptq, desc_act": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, "widened"),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 16, "desc_act": False}, "widened"),
    "gptq v2, 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "desc_act": True, "checkpoint_format": "gptq_v2"},
        "widened",
    ),
    "w4a16": (
        {**CT, "format": "pack-quantized",
         "config_groups": {"group_0": {**GROUP, "weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}},
        "widened",
    ),
    "w8a16": (
        {**CT, "format": "pack-quantized",
         "config_groups": {"group_0": {**GROUP, "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}},
        "widened",
    ),
    "w8a8": (
        {**CT, "format": "int-quantized",
         "config_groups": {"group_0": {**GROUP, "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                                       "input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}}},
        "widened",
    ),
    "nvfp4 of compressed-tensors": (
        {**CT, "format": "nvfp4-pack-quantized", "config_groups": {"group_0": {**GROUP, "weights": FLOAT4}}},
        "widened",
    ),
    "nvfp4 of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "widened"),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "widened"),
    "gptq, 3 bits": ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "`quantization_config.bits` must be 4"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "got `bitsandbytes`"),
    "torchao": ({"quant_method": "torchao", "quant_type": {}}, "got `torchao`"),
    "hqq": ({"quant_method": "hqq", "quant_config": {}}, "got `hqq`"),
    "quark": ({"quant_method": "quark"}, "got `quark`"),
    "auto-round": ({"quant_method": "auto-round", "bits": 4}, "got `auto-round`"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "got `fbgemm_fp8`"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_format_is_read_or_refused_by_name(name: str) -> None:
    quantization, expected = PUBLISHED[name]
    config = {**SMALL_QWEN3, FIELD: quantization}
    problems: list[str] = []
    stored = read_weight_format(config, problems)
    widened = widened_format(config)
    if expected == "stored":
        assert stored is not None
        assert widened is None
    elif expected == "widened":
        assert widened is not None
    else:
        assert widened is None
        with pytest.raises(ConfigError, match=expected):
            build_model(config, random_weights_seed=1)


# ---------------------------------------------------------------------------------------------------- matrices, packed


def packed(numbers: np.ndarray[Any, Any], bits: int, axis: int) -> Any:
    """Numbers in int32 along an axis, lowest first, one at a time."""
    numbers, per = np.moveaxis(numbers, axis, 0).astype(np.uint64), 32 // bits
    words = np.zeros((-(-len(numbers) // per), *numbers.shape[1:]), np.uint64)
    for place, number in enumerate(numbers):
        words[place // per] |= number << np.uint64(bits * (place % per))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, 0, axis)).astype(np.uint32).view(np.int32))


def nibbles(codes: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8))


def fp4(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = np.array(FP4)[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    return values


def matrix(name: str, rng: np.random.Generator, outputs: int, inputs: int) -> tuple[dict[str, Any], Any]:
    """The tensors of one matrix in a format, by suffix, and its weights."""
    quantization, groups = PUBLISHED[name][0], inputs // 16
    if name.startswith("gptq"):
        bits = quantization["bits"]
        numbers = rng.integers(0, 1 << bits, (inputs, outputs))
        zeros = rng.integers(1, 1 << bits, (groups, outputs))
        scales = rng.uniform(0.01, 0.02, (groups, outputs)).astype(np.float16)
        of_group = np.arange(inputs) // 16
        if quantization["desc_act"]:
            of_group = rng.permutation(of_group)
        stored_zeros = zeros if "v2" in name else zeros - 1
        tensors = {
            "qweight": packed(numbers, bits, 0), "qzeros": packed(stored_zeros, bits, 1),
            "scales": torch.from_numpy(scales), "g_idx": torch.from_numpy(of_group.astype(np.int32)),
        }  # fmt: skip
        return tensors, ((numbers - zeros[of_group]) * scales[of_group].astype(np.float64)).T
    if name in ("w4a16", "w8a16"):
        bits, parts = (4, groups) if name == "w4a16" else (8, 1)
        half = 1 << (bits - 1)
        numbers, zeros = rng.integers(-half, half, (outputs, inputs)), rng.integers(-half, half, (outputs, parts))
        scales = torch.from_numpy(rng.uniform(0.01, 0.02, (outputs, parts))).bfloat16()
        tensors = {
            "weight_packed": packed(numbers + half, bits, 1), "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]), "weight_zero_point": packed(zeros + half, bits, 0),
        }  # fmt: skip
        each = inputs // parts
        return tensors, (numbers - zeros.repeat(each, 1)) * scales.double().numpy().repeat(each, 1)
    if name == "w8a8":
        numbers = rng.integers(-128, 128, (outputs, inputs))
        scales = torch.from_numpy(rng.uniform(0.001, 0.002, (outputs, 1))).bfloat16()
        tensors = {"weight": torch.from_numpy(numbers.astype(np.int8)), "weight_scale": scales}
        return tensors, numbers * scales.double().numpy()
    codes = rng.integers(0, 16, (outputs, inputs))
    scales, factor = torch.from_numpy(rng.uniform(0.5, 4, (outputs, groups))).to(torch.float8_e4m3fn), 0.01
    wide = scales.float().numpy().astype(np.float64).repeat(16, 1)
    if name == "nvfp4 of ModelOpt":
        tensors = {"weight": nibbles(codes), "weight_scale": scales, "weight_scale_2": torch.tensor(factor)}
        return tensors | {"input_scale": torch.tensor(1.0)}, fp4(codes) * wide * np.float32(factor)
    tensors = {"weight_packed": nibbles(codes), "weight_scale": scales, "weight_global_scale": torch.tensor([64.0])}
    return tensors | {"input_global_scale": torch.tensor([2.0])}, fp4(codes) * wide / 64.0


@pytest.mark.parametrize("name", [one for one in PUBLISHED if PUBLISHED[one][1] == "widened" and one != "mxfp4"])
def test_a_widened_model_has_the_weights_of_the_format(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    plain = build_model(SMALL_QWEN3, random_weights_seed=1)
    tensors: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for want in plain.tensors():
        if want.name.endswith("_proj.weight"):
            parts, expected[want.name] = matrix(name, rng, *want.shape)
            tensors |= {want.name.removesuffix("weight") + suffix: one.contiguous() for suffix, one in parts.items()}
        else:
            tensors[want.name] = want.into.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**SMALL_QWEN3, FIELD: PUBLISHED[name][0]}))
    model = build_model(tmp_path, torch.float32)
    assert model.settings.quantization is None
    found = {want.name: want.into.double().numpy() for want in model.tensors()}
    for one, weights in expected.items():
        assert np.allclose(found[one], weights, rtol=1e-5, atol=1e-6), one
    lost = (
        next(one for one in tensors if one.endswith(("scales", "weight_scale_2", "weight_shape", "global_scale")))
        if name != "w8a8"
        else ""
    )
    if lost:
        save_file({one: tensor for one, tensor in tensors.items() if one != lost}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{lost}: missing"):
            build_model(tmp_path, torch.float32)


def test_experts_in_mxfp4_are_those_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(5)
    blocks = torch.from_numpy(rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8))
    scales = torch.from_numpy(rng.integers(120, 132, (2, 6, 3)).astype(np.uint8))

    class Source:
        folder = "gpt-oss"
        stored = {  # noqa: RUF012 - read only
            "experts.down_proj_blocks": StoredTensor("a", (2, 6, 3, 16), "U8"),
            "experts.down_proj_scales": StoredTensor("a", (2, 6, 3), "U8"),
            "norm.weight": StoredTensor("a", (4,), "BF16"),
        }

        def read(self, name: str, dim: int | None = None, part: slice | None = None) -> Any:
            return blocks if name.endswith("blocks") else scales

    kind = widened_format({FIELD: PUBLISHED["mxfp4"][0]})
    assert kind is not None
    widened = WidenedTensors(Source(), kind)
    assert sorted(widened.stored) == ["experts.down_proj", "norm.weight"]
    assert widened.stored["experts.down_proj"].shape == (2, 96, 6)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(widened.read("experts.down_proj"), expected)
    assert torch.equal(widened.read("experts.down_proj", 1, slice(3, 9)), expected[:, 3:9])
