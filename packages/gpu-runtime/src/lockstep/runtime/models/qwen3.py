"""Qwen3, dense: query and key are normed by head before the rotation by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.runtime.models.decoder import Decoder
from lockstep.runtime.models.layers import Maker
from lockstep.runtime.models.registry import architecture
from lockstep.runtime.models.settings import read_decoder


@architecture("Qwen3ForCausalLM")
def qwen3(config: Mapping[str, Any], make: Maker) -> Decoder:
    """Build the model. `attention_bias` adds a bias to all four products of attention."""
    return Decoder(make, read_decoder(config, architecture="Qwen3ForCausalLM"), qk_norm=True)
