"""Qwen2 and Qwen2.5: q, k and v have a bias, the output product of attention has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.runtime.models.decoder import Decoder
from lockstep.runtime.models.layers import Maker
from lockstep.runtime.models.registry import architecture
from lockstep.runtime.models.settings import read_decoder


@architecture("Qwen2ForCausalLM")
def qwen2(config: Mapping[str, Any], make: Maker) -> Decoder:
    """Build the model. The bias is part of the architecture: config.json has no setting for it."""
    return Decoder(make, read_decoder(config, architecture="Qwen2ForCausalLM", qkv_bias=True))
