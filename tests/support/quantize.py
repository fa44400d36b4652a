"""Checkpoints in fewer bits, in the layouts of other tools, and their values in float32: made from a folder, for tests.

The layouts are written from their definitions and not by code of the runtime, so that a mistake in reading them is not
repeated here. `write` makes two folders; the second holds in float32 the values that the first represents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Floats = NDArray[np.float32]
Stored = dict[str, Tensor]
LARGEST = 448.0  # of e4m3
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(source: Path, kind: str, to: Path, *, widened: Path | None = None, kept: tuple[str, ...] = ()) -> Path:
    """Write a folder in one of `KINDS`, and optionally the values that it represents in float32.

    Args:
        kept: modules that are not quantised, by parts of their names.
    Returns: `to`.
    """
    settings, quantise = KINDS[kind]
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    config = json.loads((source / "config.json").read_text())
    stored: Stored = {}
    plain: Stored = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        linear = name.endswith(".weight") and module.rsplit(".")[-1] in LINEAR
        if linear and not any(one in module for one in kept):
            found, back = quantise(tensor.numpy())
            stored |= {f"{module}.{end}": one for end, one in found.items()}
            plain[name] = torch.from_numpy(np.ascontiguousarray(back))
        else:
            stored[name] = plain[name] = tensor
    quantization = dict(settings)
    if kept:
        quantization["ignore" if "ignore" in quantization else "modules_to_not_convert"] = [*kept, "lm_head"]
    _folder(source, to, config | {"dtype": "float32", "quantization_config": quantization}, stored)
    if widened is not None:
        _folder(source, widened, config | {"dtype": "float32"}, plain)
    return to


def _folder(source: Path, to: Path, config: dict[str, Any], tensors: Stored) -> None:
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (to / "config.json").write_text(json.dumps(config))
    save_file({name: one.contiguous() for name, one in tensors.items()}, to / "model.safetensors")


# ----------------------------------------------------------------------------------------------------------------- fp8


def fp8(block: tuple[int, int] | None, name: str, shape: tuple[int, ...] | None = None) -> Any:
    """One scale for each block; None: for all, of this shape."""

    def quantise(weight: Floats) -> tuple[Stored, Floats]:
        outputs, inputs = weight.shape
        down, across = block or (outputs, inputs)
        down, across = down or outputs, across or inputs
        scale = np.zeros((-(-outputs // down), -(-inputs // across)), np.float32)
        codes = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn)
        back = np.zeros_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                where = np.s_[i * down : (i + 1) * down, j * across : (j + 1) * across]
                scale[i, j] = np.abs(weight[where]).max() / LARGEST
                codes[where] = torch.from_numpy(weight[where] / scale[i, j]).to(torch.float8_e4m3fn)
                back[where] = codes[where].float().numpy() * scale[i, j]
        scales = torch.from_numpy(scale)
        return {"weight": codes, name: scales if shape is None else scales.reshape(shape)}, back

    return quantise


def with_input_scale(quantise: Callable[[Floats], tuple[Stored, Floats]]) -> Any:
    """As checkpoints with static activations have one."""
    return lambda weight: (quantise(weight)[0] | {"input_scale": torch.tensor(0.25)}, quantise(weight)[1])


# -------------------------------------------------------------------------------------------------------------- 4 bits


def codes_of(weight: Floats, group: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Codes [inputs, outputs], zeros and scales [groups, outputs], so that (code - zero) * scale is near the weight."""
    down = weight.T.astype(np.float64)
    inputs, outputs = down.shape
    each = inputs if group == -1 else group
    zeros, scales = np.zeros((inputs // each, outputs), np.int64), np.zeros((inputs // each, outputs), np.float16)
    codes = np.zeros((inputs, outputs), np.int64)
    for g in range(inputs // each):
        rows = down[g * each : (g + 1) * each]
        low, high = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
        if symmetric:
            scales[g], zeros[g] = (np.maximum(-low, high) * 2 / 15).astype(np.float16), 8
        else:
            scales[g] = ((high - low) / 15).astype(np.float16)
            zeros[g] = np.clip(np.rint(-low / scales[g].astype(np.float64)), 0, 15)
        codes[g * each : (g + 1) * each] = np.clip(np.rint(rows / scales[g].astype(np.float64)) + zeros[g], 0, 15)
    return codes, zeros, scales


def widened_of(codes: Any, zeros: Any, scales: Any) -> Floats:
    each = len(codes) // len(zeros)
    steps = (codes - np.repeat(zeros, each, 0)).astype(np.float32)
    return (steps * np.repeat(scales, each, 0).astype(np.float32)).T


def words(codes: Any, axis: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Eight codes to a word along an axis: bits 4 i hold the one at `order[i]`."""
    moved = np.moveaxis(codes, axis, 0)
    packed = np.zeros((len(moved) // 8, *moved.shape[1:]), np.uint32)
    for word in range(len(packed)):
        for i, place in enumerate(order):
            packed[word] |= moved[8 * word + place].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, 0, axis)).view(np.int32))


def awq(group: int) -> Any:
    def quantise(weight: Floats) -> tuple[Stored, Floats]:
        codes, zeros, scales = codes_of(weight, group, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        found = {
            "qweight": words(codes, 1, order),
            "qzeros": words(zeros, 1, order),
            "scales": torch.from_numpy(scales),
        }
        return found, widened_of(codes, zeros, scales)

    return quantise


def gptq(group: int, *, symmetric: bool, less: int) -> Any:
    """Args: less: what a zero is stored less."""

    def quantise(weight: Floats) -> tuple[Stored, Floats]:
        codes, zeros, scales = codes_of(weight, group, symmetric)
        each = len(codes) if group == -1 else group
        found = {
            "qweight": words(codes, 0),
            "qzeros": words((zeros - less) % 16, 1),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.arange(len(codes), dtype=torch.int32) // each,
        }
        return found, widened_of(codes, zeros, scales)

    return quantise


def _compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "fp8": (FP8_BLOCK, fp8((128, 128), "weight_scale_inv")),
    "fp8, small blocks": (FP8_BLOCK | {"weight_block_size": [16, 32]}, fp8((16, 32), "weight_scale_inv")),
    "fp8, tensors": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        with_input_scale(fp8(None, "weight_scale", ())),
    ),
    "compressed-tensors": (_compressed("tensor"), fp8(None, "weight_scale", (1,))),
    "compressed-tensors, channels": (_compressed("channel"), fp8((1, 0), "weight_scale")),
    "compressed-tensors, blocks": (_compressed("block", block_structure=[16, 16]), fp8((16, 16), "weight_scale")),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        with_input_scale(fp8(None, "weight_scale", ())),
    ),
    "awq": (AWQ, awq(16)),
    "awq, one group": (AWQ | {"group_size": -1}, awq(-1)),
    "gptq": (GPTQ, gptq(16, symmetric=False, less=1)),
    "gptq, symmetric": (GPTQ | {"group_size": 32, "sym": True}, gptq(32, symmetric=True, less=1)),
    "gptq, second format": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(16, symmetric=False, less=0)),
}
