"""Tiny models of random weights, one per family: `python -m tests.vllm.tiny_models FOLDER [FAMILY ...]`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

DEMO = Path(__file__).resolve().parents[2] / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"


def common(**changed: Any) -> dict[str, Any]:
    """Return settings that all families have."""
    return {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, **changed,
    }  # fmt: skip


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**common(head_dim=32)),
    "mixtral": lambda: hf.MixtralConfig(**common(head_dim=32), num_local_experts=4, num_experts_per_tok=2),
    "deepseek": lambda: hf.DeepseekV2Config(  # sizes of its latent KV are those that vLLM's CPU kernel has
        **common(num_key_value_heads=4), kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **common(head_dim=32), sliding_window=64, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "mistral": lambda: hf.MistralConfig(**common(head_dim=32), sliding_window=64),  # windows in every layer
}  # fmt: skip

MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
RECURRENT: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=2048, hidden_size=64, state_size=16, num_hidden_layers=3, num_heads=8, head_dim=16, n_groups=2,
        expand=2, chunk_size=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "granite": lambda: hf.GraniteMoeHybridConfig(
        **common(num_hidden_layers=4, hidden_size=128), **MAMBA, layer_types=["mamba", "attention"] * 2,
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64, position_embedding_type="rope",
    ),
    "falcon_h1": lambda: hf.FalconH1Config(**common(head_dim=32, hidden_size=128), **MAMBA, mamba_d_ssm=256),
}  # fmt: skip
"""Models with recurrent state."""


def save_model(config: Any, folder: Path, *, seed: int = 0, kind: Any = hf.AutoModelForCausalLM) -> None:
    """Save a model of random weights with the tokenizer of the demo model.

    The weights are drawn wide enough that the largest logit stands out: greedy answers then differ by request, and
    float rounding seldom changes them.
    """
    torch.manual_seed(seed)
    model = kind.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    model.save_pretrained(folder)
    for file in DEMO.glob("token*"):
        shutil.copy(file, folder / file.name)


def main() -> None:
    folder, families = Path(sys.argv[1]), sys.argv[2:] or list(FAMILIES)
    for family in families:
        save_model((FAMILIES | RECURRENT)[family](), folder / family)


if __name__ == "__main__":
    main()
