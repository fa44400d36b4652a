"""Training of the demo model: a few minutes on one CPU thread, on text that is part of Python.

The trained code is the served code (`models/`), with an attention backend that keeps no KV. Equal Python, torch and
machine give equal bytes. On other machines rounding differs, and so do the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.runtime.demo_model import MADE, check_folder, read_made, replace_folder
from lockstep.runtime.demo_model.corpus import Passage, passages
from lockstep.runtime.demo_model.tokenizer import (
    END_OF_TEXT,
    TURN_END,
    conversation,
    tokenizer_config,
    train_tokenizer,
)
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.models import build_model
from lockstep.runtime.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the weights, except the text."""

    seed: int = 7
    vocab: int = 2048
    context_tokens: int = 4096  # limit in config.json; training uses rows of `window` tokens
    hidden: int = 192
    intermediate: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64  # the smallest that all attention kernels support
    window: int = 256  # tokens per row
    rows: int = 4  # rows per step
    steps: int = 2400
    warmup_steps: int = 50
    peak_rate: float = 3e-3  # AdamW's learning rate after the warm-up, followed by a cosine down to a hundredth of it
    weight_decay: float = 0.1

    def config(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": tokenizer.token_to_id(TURN_END),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context_tokens,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocab,
        }


class WholeRows:
    """Causal attention over rows of equal length without cached tokens. It keeps no KV and has gradients."""

    name = "training"

    def __init__(self, window: int, scale: float) -> None:
        self.window, self.scale = window, scale

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: the backend keeps nothing per batch."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend within each row; query and result are [rows * window, heads, head_dim]."""
        query, key, value = (
            part.view(-1, self.window, *part.shape[1:]).transpose(1, 2) for part in (query, key, value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(0, 1)


def train_demo_model(
    folder: Path,
    recipe: Recipe | None = None,
    *,
    texts: Sequence[Passage] | None = None,
    progress: Callable[[str], None] = print,
) -> bool:
    """Train tokenizer and model on one thread and write them in the Hugging Face layout.

    Args:
        folder: absent, empty, or with a demo model, which is replaced.
        texts: training passages; None: those of this Python.
        progress: receives a line every 50 steps.
    Returns: False if the folder already holds the result of this recipe, text and software.
    Raises: ConfigError if the folder holds anything but a demo model.
    """
    recipe = recipe or Recipe()
    check_folder(folder)
    texts = passages() if texts is None else texts
    tokenizer = train_tokenizer((passage.text for passage in texts if passage.question is None), recipe.vocab)
    tokens = training_tokens(texts, tokenizer, recipe.seed)
    made = {
        "recipe": asdict(recipe),
        "passages": len(texts),
        "tokens": len(tokens),
        "tokens_digest": hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    there = read_made(folder) or {}
    if {name: value for name, value in there.items() if name != "loss"} == made:
        return False
    progress(f"{made['passages']:,} passages, {made['tokens']:,} tokens, digest {made['tokens_digest']}")
    config = recipe.config(tokenizer)
    model = build_model(config, torch.float32, random_weights_seed=recipe.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # fixes the order of additions
    try:
        made["loss"] = round(_train(model, tokens, recipe, progress), 4)
    finally:
        torch.set_num_threads(threads)
    replace_folder(folder, lambda part: _write(part, config, tokenizer, model, made))
    return True


def training_tokens(texts: Sequence[Passage], tokenizer: Tokenizer, seed: int) -> NDArray[np.int64]:
    """Return all passages in a random order, end to end, each preceded by END_OF_TEXT."""
    order = np.random.default_rng(seed).permutation(len(texts))
    end = tokenizer.token_to_id(END_OF_TEXT)
    written = [conversation(text.question, text.text) if text.question else text.text for text in texts]
    ids = [encoded.ids for encoded in tokenizer.encode_batch(written, add_special_tokens=False)]
    return np.concatenate([np.array([end, *ids[index]], np.int64) for index in order])


def _write(folder: Path, config: dict[str, Any], tokenizer: Tokenizer, model: Decoder, made: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    ends = [config["eos_token_id"], config["pad_token_id"]]
    for name, data in {
        "config.json": config,
        "generation_config.json": {"do_sample": False, "eos_token_id": ends, "pad_token_id": config["pad_token_id"]},
        "tokenizer_config.json": tokenizer_config(config["max_position_embeddings"]),
        MADE: made,
    }.items():
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    weights = {want.name: want.into.to(torch.bfloat16).contiguous() for want in model.tensors()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def _train(model: Decoder, tokens: NDArray[np.int64], recipe: Recipe, progress: Callable[[str], None]) -> float:
    """Train with AdamW over random windows, each used once before any is used again.

    Returns the mean loss of the last 50 steps.
    """
    model.train().requires_grad_(True)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=True)
    attention = WholeRows(recipe.window, model.scale)
    batch = whole_rows(recipe.rows, recipe.window)
    draws = windows_of(len(tokens), recipe)
    losses: list[float] = []
    began = time.monotonic()
    for step in range(recipe.steps):
        rows = np.stack([tokens[start : start + recipe.window + 1] for start in next(draws)])
        batch.token_ids = torch.from_numpy(rows[:, :-1].reshape(-1))
        for group in optimiser.param_groups:
            group["lr"] = recipe.peak_rate * warmth(step, recipe)
        logits = model.logits(model(batch, attention))
        loss = F.cross_entropy(logits, torch.from_numpy(rows[:, 1:].reshape(-1)))
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == recipe.steps:
            mean, passed = float(np.mean(losses[-50:])), time.monotonic() - began
            progress(f"step {step + 1:,} of {recipe.steps:,}: loss {mean:.3f}, {passed:.0f} s")
    model.requires_grad_(False).eval()
    return float(np.mean(losses[-50:]))


def windows_of(tokens: int, recipe: Recipe) -> Iterator[NDArray[np.int64]]:
    """Yield the starts of the rows of each step, int64 [rows]."""
    random = np.random.default_rng(recipe.seed)
    while True:
        offset = int(random.integers(recipe.window))
        starts = random.permutation(np.arange(offset, tokens - recipe.window - 1, recipe.window))
        for index in range(0, len(starts) - recipe.rows + 1, recipe.rows):
            yield starts[index : index + recipe.rows]


def warmth(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(recipe.steps - recipe.warmup_steps, 1)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def whole_rows(rows: int, window: int) -> ForwardBatch:
    """Return a pass over `rows` rows of `window` new tokens each, without slots in a pool."""
    none = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        token_ids=none,
        positions=torch.arange(window).repeat(rows),
        slots=none,
        rows=torch.arange(rows, dtype=torch.int32),
        indptr=torch.arange(rows + 1, dtype=torch.int32) * window,
        lengths=torch.full((rows,), window, dtype=torch.int32),
        page_table=torch.empty((rows, 0), dtype=torch.int32),
        logits_at=torch.arange(rows * window),
        extend_rows=rows,
        starts_host=np.zeros(rows, np.int32),
        lengths_host=np.full(rows, window, np.int32),
    )
