"""Models that differ from the demo model in their values alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.runtime.llm import demo_folder

NOISE = 0.02


def other_tensors(seed: int) -> dict[str, Tensor]:
    """The demo model's tensors and noise."""
    generator = torch.Generator().manual_seed(seed)
    found = load_file(demo_folder() / "model.safetensors")
    return {
        name: one + NOISE * torch.randn(one.shape, generator=generator).to(one.dtype) for name, one in found.items()
    }


def other_weights(folder: Path, seed: int) -> Path:
    """The demo model's folder with other values, as a training step would leave it."""
    shutil.copytree(demo_folder(), folder)
    save_file(other_tensors(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
