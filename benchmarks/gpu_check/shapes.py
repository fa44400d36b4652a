"""Models of known shape with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.section import Section
from lockstep.runtime.models import Decoder, build_model
from lockstep.runtime.models.config_reader import DTYPES

PAGE_SIZE = 16
QWEN3_8B: dict[str, Any] = {  # config.json of Qwen/Qwen3-8B, but for what no kernel sees
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TINY: dict[str, Any] = {
    **QWEN3_8B,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
    "vocab_size": 300,
}


@dataclass(frozen=True, slots=True)
class Layer:
    """What kernels see of a model's layers."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    products: tuple[tuple[int, int], ...]  # rows and columns of each matrix, that of the logits last

    @property
    def scale(self) -> float:
        """Of scores before the softmax."""
        return float(self.head_dim**-0.5)

    @classmethod
    def of(cls, section: Section) -> Layer:
        """Of the model that is measured."""
        c = config(section)
        heads, kv_heads, head_dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        products = (
            ((heads + 2 * kv_heads) * head_dim, hidden),
            (hidden, heads * head_dim),
            (2 * inner, hidden),
            (hidden, inner),
            (c["vocab_size"], hidden),
        )
        return cls(section.device, DTYPES[c["torch_dtype"]], heads, kv_heads, head_dim, products)


def config(section: Section) -> dict[str, Any]:
    """What is measured: Qwen3-8B's shape; a tiny one for a try."""
    return TINY if section.small else QWEN3_8B


def model_folder(section: Section) -> Path:
    """Make a folder beside the section's results with its config.json, and return it."""
    folder = section.part.with_suffix("") / "qwen3-8b"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(section)))
    return folder


def model(section: Section) -> Decoder:
    """It, with random weights."""
    return build_model(config(section), None, section.device, random_weights_seed=0)
