"""LoRA adapters of the demo model as PEFT writes them, and the model with one of them merged into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.runtime.llm import demo_folder

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZE = 0.7  # of `down`, and of `up`: large enough that answers differ
PREFIX = "base_model.model."


def adapter_tensors(seed: int, rank: int, modules: Sequence[str] = ALL, model: Path | None = None) -> dict[str, Tensor]:
    """Random ones; the model's own names with PEFT's around them."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, weight in sorted(load_file((model or demo_folder()) / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            outputs, inputs = weight.shape
            down = SIZE * torch.randn(rank, inputs, generator=generator) / inputs**0.5
            up = SIZE * torch.randn(outputs, rank, generator=generator)
            found |= {f"{PREFIX}{module}.lora_A.weight": down, f"{PREFIX}{module}.lora_B.weight": up}
    return found


def write_adapter(
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8,
    modules: Sequence[str] = ALL,
    model: Path | None = None,
    **settings: Any,
) -> Path:
    """An adapter of the demo model, or of the model in a folder."""
    folder.mkdir(parents=True)
    save_file(
        adapter_tensors(seed, rank, modules, model), folder / "adapter_model.safetensors", metadata={"format": "pt"}
    )
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said | settings))
    return folder


def merged(folder: Path, adapter: Path, model: Path | None = None) -> Path:
    """The demo model with an adapter added to its matrices: W + alpha / r * up down, by torch alone."""
    shutil.copytree(model or demo_folder(), folder)
    said = json.loads((adapter / "adapter_config.json").read_text())
    scaling = said["lora_alpha"] / (said["r"] ** (0.5 if said.get("use_rslora") else 1))
    tensors = {name: one.float() for name, one in load_file(folder / "model.safetensors").items()}
    found = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in found if name.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        up = found[f"{module}.lora_B.weight"]
        tensors[f"{module.removeprefix(PREFIX)}.weight"] += scaling * (up.double() @ found[name].double()).float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_for(folder: Path, linear: Mapping[str, nn.Linear]) -> Callable[[], None]:
    """Write an adapter of rank 2 of these layers of a model. Returns what adds it to their matrices."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for key, module in linear.items():
        down = torch.randn(2, module.in_features, generator=generator) * 0.3
        up = torch.randn(module.out_features, 2, generator=generator) * 0.3
        tensors[f"{PREFIX}{key}.lora_A.weight"], tensors[f"{PREFIX}{key}.lora_B.weight"] = down, up
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    kinds = sorted({key.rsplit(".", 1)[-1] for key in linear})
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": kinds, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))

    def merge() -> None:
        with torch.no_grad():
            for key, module in linear.items():
                down, up = (tensors[f"{PREFIX}{key}.lora_{one}.weight"] for one in "AB")
                module.weight.add_(up @ down * 2.0)

    return merge
