"""Heads with random weights for the demo model, which draft and are hardly ever right."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lockstep.runtime.demo_model import demo_model_folder
from lockstep.runtime.models import Decoder, build_model
from lockstep.runtime.models.draft_heads import EAGLE3, EagleHead, MtpHead


def saved_head(folder: Path, seed: int, *, draft_vocab: int = 0) -> Path:
    """A head of EAGLE-3 for the demo model, with random weights."""
    source = demo_model_folder()
    config = json.loads((source / "config.json").read_text())
    own = {**config, "architectures": [EAGLE3], "num_hidden_layers": 1}
    own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    if draft_vocab:
        own["draft_vocab_size"] = draft_vocab
    model = build_model(source, torch.float32)
    assert isinstance(model, Decoder)
    head = EagleHead(own, model, own_embeddings=False, prefix="midlayer")
    folder.mkdir()
    torch.manual_seed(seed)
    tensors = {}
    for want in head.tensors():
        if want.name == "d2t":
            tensors[want.name] = torch.arange(draft_vocab)  # token 2 i of the model
        else:
            tensors[want.name] = torch.randn(want.shape) * 0.1 if want.initial is None else torch.ones(want.shape)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(own))
    return folder


def saved_with_mtp(folder: Path, seed: int) -> Path:
    """The demo model with a random MTP layer in its checkpoint."""
    source = demo_model_folder()
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    torch.manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    model = build_model(source, torch.float32)
    assert isinstance(model, Decoder)
    for want in MtpHead(model).tensors():
        one = torch.randn(want.shape) * 0.1 if want.initial is None else torch.ones(want.shape)
        tensors[want.name] = one.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return folder
