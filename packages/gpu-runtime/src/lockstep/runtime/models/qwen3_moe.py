"""Qwen3-MoE: Qwen3 with mixtures of experts in place of MLPs, except in layers that config.json makes dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.runtime.models.decoder import Decoder
from lockstep.runtime.models.layers import Maker
from lockstep.runtime.models.registry import architecture
from lockstep.runtime.models.settings import read_decoder


@architecture("Qwen3MoeForCausalLM")
def qwen3_moe(config: Mapping[str, Any], make: Maker) -> Decoder:
    """Build the model. Layers of `mlp_only_layers`, and those that `decoder_sparse_step` skips, are dense."""
    settings = read_decoder(config, architecture="Qwen3MoeForCausalLM", experts=True)
    return Decoder(make, settings, qk_norm=True)
