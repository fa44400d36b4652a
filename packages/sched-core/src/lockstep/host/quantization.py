"""Quantised weights and KV: bytes per number, and the weight format in a checkpoint's config.json.

Simulator and runtime share these tables: the simulator prices the formats that the runtime loads. Problems of a config
are collected, so that one error can report all of them.

    quant_method         tensors of a matrix [outputs, inputs]                         a weight is
    fp8                  weight F8_E4M3, weight_scale_inv [outputs / 128, inputs / 128]    q * scale, in blocks
                         weight F8_E4M3, weight_scale []                                   q * scale
    compressed-tensors   weight F8_E4M3, weight_scale [1], [outputs, 1] or blocks          q * scale
    modelopt             weight F8_E4M3, weight_scale []                                   q * scale
    awq                  qweight [inputs, outputs / 8], qzeros, scales                     (q - zero) * scale, in groups
    gptq                 qweight [inputs / 8, outputs], qzeros, scales, g_idx              (q - zero) * scale, in groups

Sources: DeepSeek-V3 and Qwen3-FP8 (`weight_block_size`); transformers, `FineGrainedFP8Config`, `AwqConfig` and
`GPTQConfig`; vllm-project/compressed-tensors; NVIDIA/TensorRT-Model-Optimizer; AutoAWQ; AutoGPTQ and GPTQModel
(`checkpoint_format`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

WeightsDtype = Literal["bf16", "fp8", "mxfp4", "nvfp4", "int4"]
KvDtype = Literal["bf16", "fp8"]
Layout = Literal["fp8", "awq", "gptq"]
Activations = Literal["", "dynamic", "static"]
"""Rounding of rows to fp8 before a product: none; by the largest number of each row; by a scale of the checkpoint."""
Fp8Activations = Literal["auto", "on", "off"]
"""The setting of `rounds_rows`."""

KV_BYTES: dict[str, int] = {"bf16": 2, "fp8": 1}
"""Bytes of one number of a token's keys or values."""

INT4_BITS, INT4_GROUP = 4, 128  # bits of a weight; inputs of the usual group, on which WEIGHT_BYTES is based


def int4_bytes(group: int) -> float:
    """Return the bytes of a weight in AWQ and GPTQ: 4 bits, and for each group a 16-bit scale and a 4-bit zero."""
    return (INT4_BITS + (16 + INT4_BITS) / group) / 8


# Bytes per weight, by dtype and kind of matrix. Scales: fp8 has one float32 per 128 x 128 weights, which is 0.02 % and
# left out; mxfp4 has one byte per 32 weights (4.25 bit), nvfp4 one per 16 (4.5 bit). Only experts are stored as mxfp4
# (gpt-oss, `modules_to_not_convert`), dense matrices as nvfp4, too. nvfp4 is simulated only: METHODS has none.
WEIGHT_BYTES: dict[str, dict[str, float]] = {
    "bf16": {"linear": 2.0, "expert": 2.0, "plain": 2.0},
    "fp8": {"linear": 1.0, "expert": 1.0, "plain": 2.0},
    "mxfp4": {"linear": 2.0, "expert": 4.25 / 8, "plain": 2.0},
    "nvfp4": {"linear": 4.5 / 8, "expert": 4.5 / 8, "plain": 2.0},
    "int4": {"linear": int4_bytes(INT4_GROUP), "expert": int4_bytes(INT4_GROUP), "plain": 2.0},
}

METHODS: dict[str, WeightsDtype] = {
    "fp8": "fp8",
    "compressed-tensors": "fp8",
    "modelopt": "fp8",
    "mxfp4": "mxfp4",
    "awq": "int4",
    "gptq": "int4",
}
"""Rows of `WEIGHT_BYTES` by `quant_method`."""

FP8_CAPABILITY = (8, 9)
"""Lowest compute capability of GPUs that multiply fp8 by fp8."""

SERVED = ("fp8", "compressed-tensors", "modelopt", "awq", "gptq")
FIELD = "quantization_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The storage of the matrices of a checkpoint's layers. Embeddings, norms, routers, `lm_head` stay unquantised."""

    method: str  # `quant_method` of config.json
    layout: Layout
    scale: str = ""  # fp8: the name of the tensors with scales
    block: tuple[int, int] | None = None  # fp8: outputs and inputs that share a scale; None: all of the matrix
    by_output: bool = False  # fp8: one scale for each output
    group: int = 0  # awq, gptq: inputs that share scale and zero; 0: all inputs
    zero_add: int = 0  # added to a stored zero: the first format of GPTQ stores zero - 1
    kept: tuple[str, ...] = ()  # modules that are not quantised; "re:" begins a pattern, "*" is any text
    activations: Activations = ""  # fp8: rounding of rows according to the checkpoint; "": not stated

    def __str__(self) -> str:
        """Return the format in words, for messages."""
        if self.layout != "fp8":
            return f"{self.method} in groups of {self.group or 'all'} inputs"
        by = "blocks of {} x {}".format(*self.block) if self.block else "outputs" if self.by_output else "tensors"
        return f"{self.method} by {by}" + (f", activations {self.activations}" if self.activations else "")

    def keeps(self, module: str) -> bool:
        """Whether a module, named as in the checkpoint, is not quantised."""
        bare = module.removeprefix("model.")
        return any(_names(one, module) or _names(one, bare) for one in self.kept)


def _names(pattern: str, module: str) -> bool:
    """Whether a pattern matches a module: its whole name, its first or last parts, or by pattern.

    Source: transformers and vLLM match alike.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatchcase(module, pattern)
    return module == pattern or module.startswith(pattern + ".") or module.endswith("." + pattern)


def rounds_rows(setting: Fp8Activations, stored: Activations, tensor_cores: bool) -> bool:
    """Whether rows are rounded to fp8 before a product with fp8 weights, which then runs at the GPU's rate for fp8.

    Otherwise weights are widened. Runtime and planner both call this function.

    Args:
        setting: auto follows the checkpoint, if the GPU supports it.
        stored: the activations according to the checkpoint.
        tensor_cores: whether the GPU multiplies fp8 by fp8, see `FP8_CAPABILITY`.
    """
    return setting == "on" or (setting == "auto" and stored != "" and tensor_cores)


def read_weight_format(config: Mapping[str, Any], problems: list[str]) -> WeightFormat | None:
    """Return the weight format in a config.json; None if weights are not quantised or the format has problems.

    Args:
        problems: receives a sentence for each field that is wrong or names a format that is not supported.
    """
    found = config.get(FIELD)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        problems.append(f"`{FIELD}` must be an object, got `{found}`")
        return None
    read = _JsonFields(found, problems)
    method = found.get("quant_method")
    if method not in SERVED:
        read.wrong("quant_method", f"one of {', '.join(SERVED)}", "take a checkpoint in one of these, or in bfloat16")
        return None
    before = len(problems)
    made = {
        "fp8": _fp8,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "awq": _awq,
        "gptq": _gptq,
    }[method](read)
    return made if len(problems) == before else None


class _JsonFields:
    """One object of JSON. Wrong fields add a sentence to `problems`."""

    def __init__(self, data: Mapping[str, Any], problems: list[str], inside: str = FIELD) -> None:
        self.data, self.problems, self.inside = data, problems, inside

    def wrong(self, name: str, must: str, fix: str = "") -> None:
        """Add a problem with the field, the allowed values, the value and a remedy."""
        value = self.data.get(name)
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        text = f"`{self.inside}.{name}` must be {must}, got `{shown[:80]}`"
        self.problems.append(f"{text}; {fix}" if fix else text)

    def only(self, name: str, *allowed: object, fix: str = "") -> Any:
        """Return a value, or the first allowed value if the field is absent. Another value is a problem."""
        value = self.data.get(name)
        value = allowed[0] if value is None else value
        if not any(value is one or (value == one and type(value) is type(one)) for one in allowed):
            shown = [str(one).lower() if isinstance(one, bool) else str(one) for one in allowed if one is not None]
            self.wrong(name, " or ".join(dict.fromkeys(shown)) or "absent", fix)
        return value

    def names(self, *fields: str) -> tuple[str, ...]:
        """Return the items of all given fields, each a list of module names."""
        found: list[str] = []
        for field in fields:
            value = self.data.get(field)
            if value is None:
                continue
            if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
                self.wrong(field, "a list of module names")
                continue
            for pattern in (one for one in value if one.startswith("re:")):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    self.problems.append(f"`{self.inside}.{field}` holds the pattern `{pattern[:80]}`: {error}")
            found += value
        return tuple(found)

    def sides(self, name: str) -> tuple[int, int] | None:
        """Return the two sizes of a block; None if the field is absent or wrong."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or len(value) != 2 or not all(_whole(one) and one >= 1 for one in value):
            self.wrong(name, "two whole numbers, such as [128, 128]")
            return None
        return value[0], value[1]

    def inner(self, name: str) -> _JsonFields | None:
        """Return an inner object; None if it is absent or wrong."""
        value = self.data.get(name)
        if not isinstance(value, Mapping):
            if value is not None:
                self.wrong(name, "an object")
            return None
        return _JsonFields(value, self.problems, f"{self.inside}.{name}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fp8(read: _JsonFields) -> WeightFormat:
    """Read the format that transformers and vLLM write."""
    read.only("fmt", "e4m3", "float8_e4m3fn")
    scheme = read.only("activation_scheme", "dynamic", "static")
    activations: Activations = "" if read.data.get("activation_scheme") is None else scheme
    block = read.sides("weight_block_size")
    kept = read.names("modules_to_not_convert", "ignored_layers", "ignore")
    scale = "weight_scale" if block is None else "weight_scale_inv"
    return WeightFormat(method="fp8", layout="fp8", scale=scale, block=block, kept=kept, activations=activations)


def _compressed(read: _JsonFields) -> WeightFormat:
    kept = read.names("ignore")
    only_fp8 = "compressed-tensors is supported with fp8 weights only; for 4 bits use AWQ or GPTQ"
    read.only("format", "float-quantized", "naive-quantized", fix=only_fp8)
    _no_transforms(read)
    groups = read.data.get("config_groups")
    block, by_output = None, False
    activations: Activations = ""
    if not isinstance(groups, Mapping) or len(groups) != 1:
        read.wrong("config_groups", "one group for all linear layers", only_fp8)
    else:
        name = next(iter(groups))
        around = _JsonFields(groups, read.problems, f"{FIELD}.config_groups")
        if (group := around.inner(str(name))) is not None:
            if group.data.get("targets") != ["Linear"]:
                group.wrong("targets", "[Linear]")
            weights = group.inner("weights")
            if weights is None:
                group.wrong("weights", "an object", only_fp8)
            else:
                weights.only("num_bits", 8, fix=only_fp8)
                weights.only("type", "float", fix=only_fp8)
                weights.only("symmetric", True)
                weights.only("dynamic", False)
                activations = _of_input_activations(group.data.get("input_activations"))
                strategy = weights.only("strategy", "tensor", "channel", "block")
                by_output = strategy == "channel"
                if strategy == "block":
                    block = weights.sides("block_structure")
                    if block is None:
                        weights.wrong("block_structure", "two whole numbers, such as [128, 128]")
    return WeightFormat(
        method="compressed-tensors",
        layout="fp8",
        scale="weight_scale",
        block=block,
        by_output=by_output,
        kept=kept,
        activations=activations,
    )


def _of_input_activations(found: Any) -> Activations:
    """Return the rounding in `input_activations` of compressed-tensors; "" if only weights are quantised."""
    if not isinstance(found, Mapping) or found.get("num_bits", 8) != 8 or found.get("type", "float") != "float":
        return ""
    return "dynamic" if found.get("dynamic") else "static"


def _no_transforms(read: _JsonFields) -> None:
    for name in ("sparsity_config", "transform_config"):
        value = read.data.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            read.wrong(name, "absent", "such transforms are not supported")


def _modelopt(read: _JsonFields) -> WeightFormat:
    read.only("quant_algo", "FP8", fix="ModelOpt is supported with FP8 and one scale for each matrix only")
    if read.data.get("quant_algo") is None:
        read.wrong("quant_algo", "FP8")
    kept = read.names("ignore", "exclude_modules")
    # ModelOpt's FP8 quantises weights and activations, both with a scale in the checkpoint.
    return WeightFormat(method="modelopt", layout="fp8", scale="weight_scale", kept=kept, activations="static")


def _group(read: _JsonFields, *names: str) -> int:
    name = next((one for one in names if read.data.get(one) is not None), names[0])
    value = read.data.get(name, INT4_GROUP)
    if not _whole(value) or (value != -1 and (value < 8 or value & (value - 1))):
        read.wrong(name, "a power of two from 8 on, or -1 for one group of all inputs")
        return INT4_GROUP
    return 0 if value == -1 else int(value)


def _awq(read: _JsonFields) -> WeightFormat:
    for name in ("bits", "w_bit"):
        read.only(name, INT4_BITS, fix="8 bits are served as fp8")
    read.only("zero_point", True)
    version = read.data.get("version")
    if version is not None and str(version).lower() != "gemm":
        read.wrong("version", "gemm", "AutoAWQ writes it with version=GEMM")
    kept = read.names("modules_to_not_convert")
    return WeightFormat(method="awq", layout="awq", group=_group(read, "group_size", "q_group_size"), kept=kept)


def _gptq(read: _JsonFields) -> WeightFormat:
    read.only("bits", INT4_BITS, fix="8 bits are served as fp8")
    read.only("desc_act", False, fix="a checkpoint quantised with desc_act=False has its groups in order")
    read.only("lm_head", False)
    if read.data.get("dynamic"):
        read.wrong("dynamic", "absent", "only one group size for all layers is supported")
    stored = read.only("checkpoint_format", "gptq", "gptq_v2", fix="GPTQModel writes gptq with format=gptq")
    kept = read.names("modules_to_not_convert")
    return WeightFormat(
        method="gptq", layout="gptq", group=_group(read, "group_size"), zero_add=int(stored == "gptq"), kept=kept
    )
