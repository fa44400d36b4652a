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
from tests.support.mtp import TorchMtp, add_mtp
from tests.support.pictures import PAD, PIXELS, TEMPLATE

VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 64,
}  # fmt: skip
REPEATED = 61  # a token that the layer drafts behind itself
MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}  # fmt: skip


def save_scene(folder: Path) -> Any:
    """Save the model with random weights, and return it. Its drafting layer (MTP) is in the checkpoint only.

    The layer drafts `REPEATED` behind `REPEATED`, and otherwise at random.
    """
    from transformers import PreTrainedTokenizerFast, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    demo = demo_model_folder()
    known = json.loads((demo / "config.json").read_bytes())
    torch.manual_seed(7)
    text = {**SMALL, **DELTA, "vocab_size": known["vocab_size"] + len(MARKS), "max_position_embeddings": 2048}
    text |= {"eos_token_id": known["eos_token_id"], "mtp_num_hidden_layers": 1}
    marks = {name: known["vocab_size"] + place for place, name in enumerate(MARKS)}
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=VISION, **marks)).eval()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    layer = TorchMtp(model)
    layer.repeat(REPEATED, model)
    add_mtp(folder, layer, by_expert=True)
    shutil.copy(demo / "generation_config.json", folder / "generation_config.json")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo, extra_special_tokens=TOKENS)
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == marks["image_token_id"]
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", PAD), encoding="utf-8")
    Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=PIXELS).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}), encoding="utf-8")
    return model


if __name__ == "__main__":
    save_scene(Path(sys.argv[1]))
