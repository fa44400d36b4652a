"""A tiny model with all parts of the default scene: gated delta rule, gated attention, experts, MTP, a vision tower.

python -m tests.support.scene DIR    writes it, with the tokenizer and chat template of the demo model
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from lockstep.runtime.demo_model import demo_model_folder
from tests.support.architectures import DELTA, SMALL

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 64,
}  # fmt: skip
MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def save_scene(folder: Path) -> Any:
    """Save the model with random weights, and return it. Its drafting layer (MTP) is in the checkpoint only."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    demo = demo_model_folder()
    known = json.loads((demo / "config.json").read_bytes())
    torch.manual_seed(7)
    text = {**SMALL, **DELTA, "vocab_size": known["vocab_size"], "max_position_embeddings": 2048}
    text["eos_token_id"] = known["eos_token_id"]
    marks = {name: known["vocab_size"] - 8 + place for place, name in enumerate(MARKS)}
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=VISION, **marks)).eval()
    folder.mkdir(parents=True, exist_ok=True)
    state = {**model.state_dict(), "mtp.fc.weight": torch.randn(32, 64)}
    model.save_pretrained(folder, state_dict=state)
    for name in TOKENIZER:
        shutil.copy(demo / name, folder / name)
    return model


if __name__ == "__main__":
    save_scene(Path(sys.argv[1]))
