"""An adapter in the format of PEFT: a folder with settings and tensors, converted for this rank's slots.

    adapter_config.json           r, lora_alpha, target_modules, ...
    adapter_model.safetensors     base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [r, inputs]
                                  base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [outputs, r]

All problems are found before any tensor is read, and reported in one error. Features that would change the answer and
are not supported are refused: DoRA, biases, whole modules saved beside, embeddings, experts. No code from a folder can
run: a pickle (`adapter_model.bin`) is refused. Source of the fields: huggingface/peft, `LoraConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lockstep.runtime.checkpoint import DTYPES, PICKLES, CheckpointError, TensorFile, read_json
from lockstep.runtime.lora.slots import LoraSlots, LoraTarget

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
PLAIN = re.compile(r"[\w.]+")
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # initialisations that keep the model's weights
OFF: dict[str, tuple[Any, ...]] = {  # unsupported fields, and their values without effect
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "alora_invocation_tokens": ([], None),
    "megatron_config": ({}, None),
}


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One rank's part of an adapter on the CPU, padded to the rank of the slots, so that one copy fills a slot."""

    parts: tuple[tuple[LoraSlots, Tensor, Tensor], ...]  # destination, down [parts * rank, inputs], up [outputs, rank]
    rank: int  # the largest rank of its matrices

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(down.nbytes + up.nbytes for _, down, up in self.parts)


def read_adapter(
    folder: Path,
    targets: Sequence[LoraTarget],
    rank_max: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    elsewhere: Callable[[str], bool] = lambda name: False,
) -> AdapterWeights:
    """Read this rank's part of an adapter.

    Args:
        targets: the matrices that adapters may change; rank_max: the rank of the slots.
        rank, ranks: this tensor-parallel rank, and their number.
        elsewhere: returns whether another pipeline stage has the matrix of a tensor, by its name in the model.
    Raises: CheckpointError with all problems of the folder.
    """
    if not folder.is_dir():
        raise CheckpointError(folder, ["there is no such folder"], f"name a folder with {CONFIG} and {TENSORS}")
    settings = read_json(folder, CONFIG)
    problems = list(_settings_problems(settings, rank_max))
    if not (folder / TENSORS).is_file():
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        problems += [
            f"{name} is a pickle, which may run code when it is read; only safetensors are read" for name in pickles
        ] or [f"{TENSORS} is missing"]
        raise CheckpointError(folder, problems, "PEFT's `save_pretrained` writes safetensors")
    with TensorFile(folder / TENSORS, str(folder)) as file:
        found = {_plain(name): name for name in file.stored}
        wanted = _compared(file, found, targets, settings, rank_max, problems, elsewhere)
        if problems:
            raise CheckpointError(folder, problems, "an adapter must be of the model that runs")
        with torch.no_grad():
            return _read(file, found, wanted, settings, rank, ranks)


def _plain(name: str) -> str:
    """Return a tensor's name in the model. Embedding models are saved without `model.` before their layers."""
    bare = name.removeprefix(PREFIX)
    return f"model.{bare}" if bare.startswith("layers.") else bare


def _settings_problems(settings: Mapping[str, Any], rank_max: int) -> Iterator[str]:
    """Yield the settings of adapter_config.json that are not supported."""
    if (kind := settings.get("peft_type")) != "LORA":
        yield f"{CONFIG}: `peft_type` must be LORA, got {kind!r}"
    rank = settings.get("r")
    if not _whole(rank):
        yield f"{CONFIG}: `r` must be a whole number of at least 1, got {rank!r}"
    elif rank > rank_max:
        yield f"{CONFIG}: `r` is {rank}, and slots have room for rank {rank_max} (`max_lora_rank`)"
    if not _number(alpha := settings.get("lora_alpha")):
        yield f"{CONFIG}: `lora_alpha` must be a number, got {alpha!r}"
    if not isinstance(settings.get("use_rslora", False), bool | None):
        yield f"{CONFIG}: `use_rslora` must be true or false, got {settings['use_rslora']!r}"
    for name, off in OFF.items():
        if settings.get(name) not in off:
            yield f"{CONFIG}: `{name}` is {_short(settings[name])}, which is not served"
    if (start := settings.get("init_lora_weights")) not in STARTS:
        yield f"{CONFIG}: `init_lora_weights` is {_short(start)}: it changed the model's own weights, too"
    for name, of in (("rank_pattern", "ranks"), ("alpha_pattern", "numbers")):
        pattern = settings.get(name) or {}
        right = _whole if name == "rank_pattern" else _number
        if not isinstance(pattern, dict) or not all(map(right, pattern.values())):
            yield f"{CONFIG}: `{name}` must be {of} by module, got {_short(pattern)}"
            continue
        for key, value in pattern.items():
            if not PLAIN.fullmatch(key):
                yield f"{CONFIG}: `{name}` has {_short(key)}; only plain names of modules are served"
            elif name == "rank_pattern" and value > rank_max:
                yield f"{CONFIG}: `{name}` has {value} for {key}, and slots have room for rank {rank_max}"


def _compared(
    file: TensorFile,
    found: Mapping[str, str],
    targets: Sequence[LoraTarget],
    settings: Mapping[str, Any],
    rank_max: int,
    problems: list[str],
    elsewhere: Callable[[str], bool],
) -> list[LoraTarget]:
    """Return the matrices here that the folder changes; mismatches are added to `problems`."""
    wanted, known = [], set()
    for target in targets:
        down, up = target.name + DOWN, target.name + UP
        known |= {down, up}
        if down not in found and up not in found:
            continue
        wanted.append(target)
        rank = _of_module(settings, "rank_pattern", target.name, settings.get("r"))
        for name, shape in ((down, (rank, target.inputs)), (up, (target.outputs, rank))):
            stored = file.stored.get(found.get(name, ""))
            if stored is None:
                problems.append(f"{name}: missing, though {up if name == down else down} is there")
            elif stored.dtype not in DTYPES:
                problems.append(f"{name}: expected {'/'.join(DTYPES)}, found {stored}")
            elif stored.shape != shape and _whole(rank) and rank <= rank_max:
                problems.append(f"{name}: expected [{shape[0]}, {shape[1]}], found {stored}")
    problems += [
        f"{original}: not of a matrix that adapters may change here, found {file.stored[original]}"
        for name, original in sorted(found.items())
        if name not in known and not elsewhere(name)
    ]
    others = [name.removesuffix(DOWN) for name in found if name.endswith(DOWN) and elsewhere(name)]
    if not wanted and not others and not problems:
        problems.append(f"{TENSORS} holds no tensor")
    named = settings.get("target_modules")
    for module in named if isinstance(named, list) else ():
        if not any(_is_named(name, str(module)) for name in (*others, *(target.name for target in wanted))):
            problems.append(f"{CONFIG}: `target_modules` has {_short(module)}, of which there is no tensor")
    return wanted


def _read(
    file: TensorFile,
    found: Mapping[str, str],
    wanted: Sequence[LoraTarget],
    settings: Mapping[str, Any],
    rank: int,
    ranks: int,
) -> AdapterWeights:
    """Read this rank's part of all tensors.

    Raises CheckpointError for values that are not finite in the model's dtype.
    """
    placed: dict[int, tuple[LoraSlots, Tensor, Tensor]] = {}
    problems, largest = [], 0
    for target in wanted:
        into = target.into
        if id(into) not in placed:
            placed[id(into)] = (into, _empty(into.down), _empty(into.up))
        _, downs, ups = placed[id(into)]
        of_inputs = target.columns.shard(target.inputs, rank, ranks)
        of_outputs = target.rows.shard(target.outputs, rank, ranks)
        down = file.read(found[target.name + DOWN])[:, of_inputs]
        up = file.read(found[target.name + UP])[of_outputs].float() * scaling(settings, target.name)
        low, first = len(down), sum(into.sizes[: target.part])
        largest = max(largest, low)
        downs[target.part * into.rank : target.part * into.rank + low].copy_(down)
        ups[first : first + into.sizes[target.part], :low].copy_(up)
        for name, stored, source in ((DOWN, downs, down), (UP, ups, up)):
            if not bool(source.float().isfinite().all()):
                problems.append(f"{target.name}{name}: holds values that are no numbers")
            elif not bool(stored.isfinite().all()):
                problems.append(f"{target.name}{name}: holds values above {torch.finfo(stored.dtype).max:,.0f}")
    if problems:
        raise CheckpointError(file.folder, problems, "start the engine with bfloat16 or float32")
    return AdapterWeights(tuple(placed.values()), largest)


def scaling(settings: Mapping[str, Any], module: str) -> float:
    """Return the factor of `up (down x)` of a module."""
    rank = _of_module(settings, "rank_pattern", module, settings["r"])
    alpha = _of_module(settings, "alpha_pattern", module, settings["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _of_module(settings: Mapping[str, Any], pattern: str, module: str, otherwise: Any) -> Any:
    """Return the value of a pattern for a module; the first entry that names the module applies, as in PEFT."""
    given = settings.get(pattern) or {}
    if not isinstance(given, dict):
        return otherwise
    return next((value for name, value in given.items() if _is_named(module, name)), otherwise)


def _is_named(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _empty(like: Tensor) -> Tensor:
    """Return zeros of one slot in host memory, pinned if the slot is on a GPU."""
    return torch.zeros(like.shape[1:], dtype=like.dtype, pin_memory=like.device.type == "cuda")


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
