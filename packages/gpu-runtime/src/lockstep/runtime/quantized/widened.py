"""Published formats that are widened when they are read: the model runs in its dtype, and takes as much memory.

    method, format                        tensors of a matrix [outputs, inputs]                   a weight is
    gptq: 8 bits, or desc_act             qweight int32 [inputs * bits / 32, outputs], qzeros,    (q - zero) * scale of
                                          scales [groups, outputs], g_idx [inputs]                group g_idx[input]
    compressed-tensors pack-quantized     weight_packed int32 [outputs, inputs * bits / 32],      (q - zero) * scale
                                          weight_scale [outputs, groups], weight_shape
    compressed-tensors int-quantized      weight int8, weight_scale [outputs, 1 or groups]        (q - zero) * scale
    compressed-tensors nvfp4-pack-...     weight_packed uint8 [outputs, inputs / 2],              q * scale / global
                                          weight_scale e4m3 [outputs, inputs / 16]
    modelopt NVFP4                        weight uint8, weight_scale e4m3, weight_scale_2 []      q * scale * scale_2
    mxfp4 (gpt-oss)                       X_blocks uint8 [experts, outputs, groups, 16],          q * 2 ** (scale - 127)
                                          X_scales uint8 [experts, outputs, groups]

Formats that `host/quantization.py` reads are multiplied as they are stored, and are not here. Rows are not rounded,
where a format would round them: results are closer to those of the model before it was quantised.

Sources: AutoGPTQ and GPTQModel (`checkpoint_format` v1 stores zero - 1); vllm-project/compressed-tensors,
`pack_to_int32` (numbers are stored plus 2 ** (bits - 1)); NVIDIA ModelOpt; openai/gpt-oss and transformers,
`convert_moe_packed_tensors` (the result has [experts, inputs, outputs]); OCP Microscaling Formats 1.0 (e2m1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.host.quantization import FIELD
from lockstep.runtime.checkpoint import CheckpointError, StoredTensor, Tensors

log = logging.getLogger("lockstep.runtime")

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, without the sign
BITS = (4, 8)

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Widened:
    """A format that is widened: the suffix that marks a quantised matrix, its other tensors, and what a weight is.

    Args:
        marks: suffix of the tensor that every quantised matrix has.
        others: suffixes of tensors that belong to it, or that describe rows, and are not read by themselves.
        result: suffix of the name of the widened tensor.
        shape: of the widened tensor, given the stored shape of the marking one.
        widen: returns the matrix, float32, given a function that reads a tensor by suffix, and which suffixes exist.
    """

    name: str
    marks: str
    others: tuple[str, ...]
    result: str
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    widen: Callable[[Read, frozenset[str]], Tensor]


def unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Return unsigned numbers of `bits` bits that lie in int32, lowest first, along `dim`: int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    wide = packed.unsqueeze(dim + 1) >> shifts.view(*(1,) * (dim + 1), -1, *(1,) * (packed.dim() - dim - 1))
    return (wide & ((1 << bits) - 1)).flatten(dim, dim + 1)


def fp4_values(packed: Tensor) -> Tensor:
    """Return the e2m1 numbers of bytes that hold two, the lower half first: float32, the last dimension doubled."""
    table = torch.tensor([*FP4, *(-one for one in FP4)], dtype=torch.float32)
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[halves.to(torch.int64)]


def _scaled(numbers: Tensor, scale: Tensor) -> Tensor:
    """Multiply [outputs, inputs] by scales [outputs, groups], each of which is of as many inputs."""
    outputs, inputs = numbers.shape
    wide = scale.to(torch.float32).view(outputs if scale.shape[0] == outputs else 1, -1)
    return (numbers.view(outputs, wide.shape[1], -1) * wide[:, :, None]).view(outputs, inputs)


def _gptq(bits: int, zero_add: int) -> Widened:
    def widen(read: Read, there: frozenset[str]) -> Tensor:
        numbers = unpacked(read("qweight"), bits, 0).to(torch.float32)
        zeros = (unpacked(read("qzeros"), bits, 1) + zero_add).to(torch.float32)
        scales, groups = read("scales").to(torch.float32), read("g_idx").to(torch.int64)
        return ((numbers - zeros[groups]) * scales[groups]).T

    per_word = 32 // bits
    others = ("qzeros", "scales", "g_idx")
    return Widened(
        f"gptq, {bits} bits", "qweight", others, "weight", lambda shape: (shape[1], shape[0] * per_word), widen
    )


def _packed(bits: int) -> Widened:
    half = 1 << (bits - 1)

    def widen(read: Read, there: frozenset[str]) -> Tensor:
        outputs, inputs = read("weight_shape").tolist()
        numbers = (unpacked(read("weight_packed"), bits, 1)[:, :inputs] - half).to(torch.float32)
        scale = read("weight_scale").to(torch.float32).view(outputs, -1)
        zeros = torch.zeros_like(scale)
        if "weight_zero_point" in there:
            zeros = (unpacked(read("weight_zero_point"), bits, 0)[:outputs] - half).to(torch.float32).view_as(scale)
        if "weight_g_idx" in there:
            groups = read("weight_g_idx").to(torch.int64)
            return (numbers - zeros[:, groups]) * scale[:, groups]
        each = inputs // scale.shape[1]
        return (numbers - zeros.repeat_interleave(each, 1)) * scale.repeat_interleave(each, 1)

    per_word = 32 // bits
    others = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    return Widened(
        f"compressed-tensors, {bits}-bit integers",
        "weight_packed",
        others,
        "weight",
        lambda shape: (shape[0], shape[1] * per_word),
        widen,
    )


def _int8() -> Widened:
    def widen(read: Read, there: frozenset[str]) -> Tensor:
        numbers, scale = read("weight").to(torch.float32), read("weight_scale")
        if "weight_zero_point" in there:
            zeros = read("weight_zero_point").to(torch.float32)
            numbers = numbers - _scaled(torch.ones_like(numbers), zeros)
        return _scaled(numbers, scale)

    others = ("weight", "weight_zero_point", "input_scale", "input_zero_point")
    return Widened("compressed-tensors, 8-bit integers", "weight_scale", others, "weight", lambda shape: shape, widen)


def _nvfp4(marks: str, whole: str, *, divides: bool) -> Widened:
    def widen(read: Read, there: frozenset[str]) -> Tensor:
        factor = read(whole).to(torch.float32).reshape(())
        scale = read("weight_scale").to(torch.float32)
        return _scaled(fp4_values(read(marks)), scale / factor if divides else scale * factor)

    others = ("weight_scale", whole, "input_scale", "input_global_scale", "k_scale", "v_scale")
    return Widened("nvfp4", marks, others, "weight", lambda shape: (shape[0], shape[1] * 2), widen)


def _mxfp4() -> Widened:
    def widen(read: Read, there: frozenset[str]) -> Tensor:
        exponents = read("scales").to(torch.int32) - 127
        numbers = torch.ldexp(fp4_values(read("blocks")), exponents[..., None])
        return numbers.flatten(2).transpose(1, 2)

    def shape(stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[0], stored[2] * stored[3] * 2, stored[1]

    return Widened("mxfp4", "blocks", ("scales",), "", shape, widen)


def widened_format(config: Mapping[str, Any]) -> Widened | None:
    """Return the format of a config.json that is widened when it is read; None for every other one."""
    found = config.get(FIELD)
    if not isinstance(found, Mapping):
        return None
    method, bits = found.get("quant_method"), found.get("bits")
    if method == "mxfp4":
        return _mxfp4()
    regular = not found.get("dynamic") and found.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2")
    if method == "gptq" and regular and bits in BITS and (bits == 8 or found.get("desc_act") is True):
        return _gptq(bits, 0 if found.get("checkpoint_format") == "gptq_v2" else 1)
    if method == "modelopt" and found.get("quant_algo") == "NVFP4":
        return _nvfp4("weight", "weight_scale_2", divides=False)
    if method == "compressed-tensors":
        return _of_compressed(found)
    return None


def _of_compressed(found: Mapping[str, Any]) -> Widened | None:
    groups = found.get("config_groups")
    weights = [
        one.get("weights")
        for one in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(one, Mapping)
    ]
    kinds = {(one.get("type"), one.get("num_bits")) for one in weights if isinstance(one, Mapping)}
    if any(found.get(name) for name in ("transform_config", "sparsity_config")):
        return None
    match found.get("format"):
        case "pack-quantized" if kinds in ({("int", 4)}, {("int", 8)}):
            return _packed(4 if ("int", 4) in kinds else 8)
        case "int-quantized" if kinds == {("int", 8)}:
            return _int8()
        case "nvfp4-pack-quantized" if kinds == {("float", 4)}:
            return _nvfp4("weight_packed", "weight_global_scale", divides=True)
    return None


class WidenedTensors:
    """A checkpoint with its quantised matrices widened, each when it is read: a source of `checkpoint.load`.

    Raises: CheckpointError for a matrix that lacks one of its tensors.
    """

    def __init__(self, source: Tensors, kind: Widened) -> None:
        self._source, self._kind = source, kind
        self._parts: dict[str, str] = {}  # by name of a widened tensor: what the names of its parts begin with
        self.stored: dict[str, StoredTensor] = {}
        joint = "." if kind.result else "_"
        hidden: set[str] = set()
        for name, stored in source.stored.items():
            if not name.endswith(f"{joint}{kind.marks}") or not self._is_quantised(stored, name, joint):
                continue
            begin = name.removesuffix(kind.marks)
            whole = f"{begin}{kind.result}" if kind.result else begin.removesuffix(joint)
            of_matrix = source.stored[f"{begin}weight"] if kind.marks == "weight_scale" else stored
            self._parts[whole] = begin
            self.stored[whole] = StoredTensor(stored.file, kind.shape(of_matrix.shape), "BF16")
            hidden |= {name, *(f"{begin}{other}" for other in kind.others)}
        for name, stored in source.stored.items():
            if name not in hidden and name not in self.stored:
                self.stored[name] = stored
        log.info("%d matrices of %s are widened as they are read", len(self._parts), kind.name)

    def _is_quantised(self, stored: StoredTensor, name: str, joint: str) -> bool:
        """Whether a tensor with the marking suffix is one of a quantised matrix, and not an ordinary weight."""
        if self._kind.marks == "weight":
            return stored.dtype == "U8"
        if self._kind.marks == "weight_scale":
            weight = self._source.stored.get(name.removesuffix("weight_scale") + "weight")
            return weight is not None and weight.dtype == "I8"
        return True

    @property
    def folder(self) -> Path | str:
        """The name of the source in errors."""
        return self._source.folder

    def read(self, name: str, dim: int | None = None, part: slice | None = None) -> Tensor:
        """Return a tensor, or `part` of it along `dim`. A widened one is float32."""
        if (begin := self._parts.get(name)) is None:
            return self._source.read(name, dim, part)
        names = (self._kind.marks, *self._kind.others)
        there = frozenset(one for one in names if f"{begin}{one}" in self._source.stored)

        def read(suffix: str) -> Tensor:
            if suffix not in there:
                raise CheckpointError(self.folder, [f"{begin}{suffix}: missing, of {self._kind.name}"])
            return self._source.read(f"{begin}{suffix}")

        whole = self._kind.widen(read, there)
        if tuple(whole.shape) != self.stored[name].shape:
            raise CheckpointError(
                self.folder, [f"{name}: {self._kind.name} yields {list(whole.shape)}, not {self.stored[name]}"]
            )
        return whole if dim is None else whole[(slice(None),) * dim + (part,)]
