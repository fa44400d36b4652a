"""Training of a head that drafts for the demo model (EAGLE-3): a few minutes on one CPU thread.

The head learns the model's distribution of the next token at each place of the model's training text, from the model's
hidden states. It is also run on its own features, as it will be when it drafts several tokens (the training-time test
of EAGLE-3, section 3.1; here each repetition attends to itself only). Equal Python, torch and machine give equal bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.checkpoint import fill_randomly, read_config
from lockstep.runtime.demo_model import demo_model_folder, replace_folder
from lockstep.runtime.demo_model.corpus import Passage, passages
from lockstep.runtime.demo_model.train import Recipe, WholeRows, training_tokens, warmth, whole_rows, windows_of
from lockstep.runtime.models import build_model
from lockstep.runtime.models.decoder import Decoder
from lockstep.runtime.models.draft_heads import EAGLE3, EagleHead

HEAD_RECIPE = replace(Recipe(), steps=200, peak_rate=2e-3)
REPETITIONS, FADE = (
    3,
    0.8,
)  # passes over its own features in training, and the weight of each relative to the one before


def train_head(
    folder: Path,
    recipe: Recipe = HEAD_RECIPE,
    *,
    model_folder: Path | None = None,
    texts: Sequence[Passage] | None = None,
    progress: Callable[[str], None] = print,
) -> float:
    """Train a head for the demo model on one thread, and write it as a folder for `draft_model`.

    Args:
        folder: absent or empty.
        recipe: of the training; sizes are those of the model.
        model_folder: the model, with its tokenizer; None: the demo model.
        texts: training passages; None: those of this Python.
        progress: receives a line every 50 steps.
    Returns: the mean loss of the last 50 steps, of the next token behind the model's own features.
    Raises: ConfigError if the folder holds anything.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"`{folder}` is not empty\nhint: give a folder that does not exist")
    source = model_folder or demo_model_folder()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokens = training_tokens(passages() if texts is None else texts, tokenizer, recipe.seed)
    model = build_model(source, torch.float32)
    assert isinstance(model, Decoder)
    layers = model.settings.layers
    config = {
        **read_config(source),
        "architectures": [EAGLE3],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1]},
    }
    head = EagleHead(config, model, own_embeddings=False, prefix="midlayer")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # fixes the order of additions
    try:
        loss = _train(head, model, tokens, recipe, progress)
    finally:
        torch.set_num_threads(threads)
    replace_folder(folder, lambda part: _write(part, config, head, loss))
    return loss


def _write(folder: Path, config: dict[str, Any], head: EagleHead, loss: float) -> None:
    made = {**config, "trained": {"loss": round(loss, 4), "torch": torch.__version__}}
    (folder / "config.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    tensors = {want.name: want.into.to(torch.bfloat16).contiguous() for want in head.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _train(
    head: EagleHead,
    model: Decoder,
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
    recipe: Recipe,
    progress: Callable[[str], None],
) -> float:
    """Train with AdamW over random windows.

    The head begins with the model's output projection, and with the inputs of one layer as features.
    """
    with torch.no_grad():
        fill_randomly(head.tensors(), recipe.seed)
        assert model.head is not None
        head.head.weight.copy_(model.head.weight)
        head.fc.zero_()[:, -head.features :].fill_diagonal_(1.0)  # the input of the last of the three layers
    head.train().requires_grad_(True)
    matrices = [parameter for parameter in head.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in head.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=True)
    attention, batch = WholeRows(recipe.window, model.scale), whole_rows(recipe.rows, recipe.window)
    draws, losses, began = windows_of(len(tokens), recipe), list[float](), time.monotonic()
    for step in range(recipe.steps):
        rows = np.stack([tokens[start : start + recipe.window] for start in next(draws)])
        batch.token_ids = torch.from_numpy(rows.reshape(-1))
        batch.taps = dict.fromkeys(head.taps)
        with torch.no_grad():
            hidden = model(batch, attention)
            wanted = model.logits(hidden).softmax(-1)
        for group in optimiser.param_groups:
            group["lr"] = recipe.peak_rate * warmth(step, recipe)
        features, parts = head.read(batch.taps, hidden), list[Tensor]()
        for _ in range(REPETITIONS):
            before = _shifted(features, recipe.window)
            features, normed = head(before, batch, attention)
            parts.append(F.cross_entropy(head.logits(normed), wanted))
        loss = torch.stack([FADE**number * part for number, part in enumerate(parts)]).sum()
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        losses.append(parts[0].item())
        if (step + 1) % 50 == 0 or step + 1 == recipe.steps:
            mean, passed = float(np.mean(losses[-50:])), time.monotonic() - began
            progress(f"step {step + 1:,} of {recipe.steps:,}: loss {mean:.3f}, {passed:.0f} s")
    head.requires_grad_(False).eval()
    return float(np.mean(losses[-50:]))


def _shifted(features: Tensor, window: int) -> Tensor:
    """Return the features of the token before each, [rows * window, features]; zeros before the first of a row."""
    rows = features.view(-1, window, features.shape[1])
    return torch.cat((torch.zeros_like(rows[:, :1]), rows[:, :-1]), 1).flatten(0, 1)
