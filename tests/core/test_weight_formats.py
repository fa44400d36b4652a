"""Formats of quantised checkpoints, read from a config.json: what each field means, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.host.quantization import WeightFormat, int4_bytes, read_weight_format, rounds_rows

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8"}


def compressed(activations: Any = None, **weights: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {**group, "input_activations": activations}},
        "ignore": ["lm_head"],
    }


def fp8(**fields: Any) -> WeightFormat:
    return WeightFormat(**{"method": "fp8", "layout": "fp8", "scale": "weight_scale", **fields})


def of_compressed(**fields: Any) -> WeightFormat:
    return fp8(**{"method": "compressed-tensors", "kept": ("lm_head",), **fields})


FORMATS: list[tuple[dict[str, Any], WeightFormat, str]] = [
    ({"quant_method": "fp8"}, fp8(), "fp8 by tensors"),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "dynamic", "ignore": ["a", "b"]},
        fp8(scale="weight_scale_inv", block=(128, 64), kept=("a", "b"), activations="dynamic"),
        "fp8 by blocks of 128 x 64, activations dynamic",
    ),
    (
        {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "static", "weight_block_size": [1, 1]},
        fp8(scale="weight_scale_inv", block=(1, 1), activations="static"),
        "fp8 by blocks of 1 x 1, activations static",
    ),
    (compressed(), of_compressed(), "compressed-tensors by tensors"),
    (
        compressed({"dynamic": True}, strategy="channel", symmetric=True, dynamic=False),
        of_compressed(by_output=True, activations="dynamic"),
        "compressed-tensors by outputs, activations dynamic",
    ),
    (
        compressed({"num_bits": 8, "type": "float"}, strategy="block", block_structure=[128, 128]),
        of_compressed(block=(128, 128), activations="static"),
        "compressed-tensors by blocks of 128 x 128, activations static",
    ),
    (compressed({"num_bits": 4}), of_compressed(), "compressed-tensors by tensors"),
    (compressed({"type": "int"}), of_compressed(), "compressed-tensors by tensors"),
    (
        {**compressed(), "sparsity_config": {"format": "dense"}, "transform_config": {}},
        of_compressed(),
        "compressed-tensors by tensors",
    ),
    (
        {**MODELOPT, "exclude_modules": ["a"], "ignore": ["b"]},
        fp8(method="modelopt", kept=("b", "a"), activations="static"),
        "modelopt by tensors, activations static",
    ),
    (AWQ, WeightFormat(method="awq", layout="awq", group=64), "awq in groups of 64 inputs"),
    (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM", "modules_to_not_convert": ["a"]},
        WeightFormat(method="awq", layout="awq", kept=("a",)),
        "awq in groups of all inputs",
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 8, "q_group_size": 16},
        WeightFormat(method="awq", layout="awq", group=8),
        "awq in groups of 8 inputs",
    ),
    (GPTQ, WeightFormat(method="gptq", layout="gptq", group=128, zero_add=1), "gptq in groups of 128 inputs"),
    (
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "dynamic": {}, "desc_act": False},
        WeightFormat(method="gptq", layout="gptq", group=128),
        "gptq in groups of 128 inputs",
    ),
]
POWER = "must be a power of two from 8 on, or -1 for one group of all inputs"
REFUSED: list[tuple[Any, str]] = [
    ("fp8", "`quantization_config` must be an object, got `fp8`"),
    ({"quant_method": "bitsandbytes"}, "`quantization_config.quant_method` must be one of fp8, "),
    ({}, "`quantization_config.quant_method` must be one of fp8, "),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "`quantization_config.fmt` must be e4m3 or float8_e4m3fn, got `e5m2`"),
    ({"quant_method": "fp8", "activation_scheme": "other"}, "`quantization_config.activation_scheme` must be dynamic"),
    *[
        (
            {"quant_method": "fp8", "weight_block_size": size},
            "`quantization_config.weight_block_size` must be two whole",
        )
        for size in (128, [128], [128, 0], [128, True], [128, 128, 128], [0, 128])
    ],
    ({"quant_method": "fp8", "ignore": "lm_head"}, "`quantization_config.ignore` must be a list of module names"),
    ({"quant_method": "fp8", "ignore": ["a", 1]}, "`quantization_config.ignore` must be a list of module names"),
    ({"quant_method": "fp8", "ignore": ["re:("]}, "`quantization_config.ignore` holds the pattern `re:(`"),
    ({**compressed(), "format": "int-quantized"}, "`quantization_config.format` must be float-quantized or naive"),
    ({**compressed(), "config_groups": {}}, "`quantization_config.config_groups` must be one group for all linear"),
    ({**compressed(), "config_groups": {"a": 1}}, "`quantization_config.config_groups.a` must be an object, got `1`"),
    (
        {**compressed(), "config_groups": {"a": {"targets": ["Linear"]}}},
        "`quantization_config.config_groups.a.weights` must be an object, got `null`",
    ),
    (
        {**compressed(), "config_groups": {"a": {"targets": ["Conv"], "weights": {}}}},
        "`quantization_config.config_groups.a.targets` must be [Linear]",
    ),
    (compressed(num_bits=4), "`quantization_config.config_groups.group_0.weights.num_bits` must be 8, got `4`"),
    (compressed(num_bits=8.0), "`quantization_config.config_groups.group_0.weights.num_bits` must be 8, got `8.0`"),
    (compressed(type="int"), "`quantization_config.config_groups.group_0.weights.type` must be float, got `int`"),
    (compressed(symmetric=False), "`quantization_config.config_groups.group_0.weights.symmetric` must be true"),
    (compressed(dynamic=True), "`quantization_config.config_groups.group_0.weights.dynamic` must be false, got `true`"),
    (compressed(strategy="token"), "`quantization_config.config_groups.group_0.weights.strategy` must be tensor or"),
    (
        compressed(strategy="block"),
        "`quantization_config.config_groups.group_0.weights.block_structure` must be two whole numbers",
    ),
    ({**compressed(), "sparsity_config": {"format": "24"}}, "`quantization_config.sparsity_config` must be absent"),
    ({**compressed(), "transform_config": [1]}, "`quantization_config.transform_config` must be absent"),
    ({"quant_method": "modelopt"}, "`quantization_config.quant_algo` must be FP8, got `null`"),
    ({**MODELOPT, "quant_algo": "NVFP4"}, "`quantization_config.quant_algo` must be FP8, got `NVFP4`"),
    *[({**AWQ, "group_size": size}, f"`quantization_config.group_size` {POWER}") for size in (4, 96, 0, -2, True)],
    ({**AWQ, "bits": 8}, "`quantization_config.bits` must be 4, got `8`"),
    ({**AWQ, "zero_point": False}, "`quantization_config.zero_point` must be true, got `false`"),
    ({**AWQ, "version": "gemv"}, "`quantization_config.version` must be gemm, got `gemv`"),
    ({**GPTQ, "desc_act": True}, "`quantization_config.desc_act` must be false, got `true`"),
    ({**GPTQ, "lm_head": True}, "`quantization_config.lm_head` must be false, got `true`"),
    ({**GPTQ, "dynamic": {"a": {}}}, "`quantization_config.dynamic` must be absent"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "`quantization_config.checkpoint_format` must be gptq or gptq_v2"),
]


@pytest.mark.parametrize(("settings", "expected", "words"), FORMATS)
def test_a_format_is_read_from_its_settings(settings: dict[str, Any], expected: WeightFormat, words: str) -> None:
    problems: list[str] = []
    assert read_weight_format({"quantization_config": settings}, problems) == expected
    assert problems == []
    assert str(expected) == words


@pytest.mark.parametrize(("settings", "problem"), REFUSED)
def test_a_field_that_is_wrong_is_one_problem_by_name(settings: Any, problem: str) -> None:
    problems: list[str] = []
    assert read_weight_format({"quantization_config": settings}, problems) is None
    (found,) = problems
    assert found.startswith(problem), found


def test_a_checkpoint_without_the_field_is_not_quantised() -> None:
    problems: list[str] = []
    assert read_weight_format({}, problems) is None
    assert read_weight_format({"quantization_config": None}, problems) is None
    assert problems == []


def test_modules_that_are_kept_are_named_whole_by_parts_or_by_pattern() -> None:
    stored = fp8(kept=("lm_head", "model.layers.1", "re:.*gate$", "*.norm*", "layers.3.mlp"))
    kept = {
        "lm_head": True,
        "model.lm_head": True,
        "lm_heads": False,
        "model.layers.1.mlp.up": True,
        "model.layers.10.mlp.up": False,
        "model.layers.2.gate": True,
        "model.layers.2.gate_up": False,
        "model.layers.2.norm.weight": True,
        "model.layers.3.mlp": True,
        "model.layers.3.mlp.up": True,
        "other.layers.3.mlp": True,
        "model.layers.3": False,
    }
    assert {module: stored.keeps(module) for module in kept} == kept


def test_rows_are_rounded_as_set_or_as_stored_where_the_gpu_can() -> None:
    assert {one: [rounds_rows(one, stored, gpu) for stored in ("", "dynamic") for gpu in (False, True)]
            for one in ("auto", "on", "off")} == {  # type: ignore[arg-type]  # the loop's texts are literals
        "auto": [False, False, False, True],
        "on": [True, True, True, True],
        "off": [False, False, False, False],
    }  # fmt: skip
    assert int4_bytes(32) == (4 + 20 / 32) / 8
