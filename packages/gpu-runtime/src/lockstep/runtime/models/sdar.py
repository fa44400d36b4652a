"""SDAR: the layers of Qwen3, with attention by blocks. The model answers in blocks (arXiv 2510.06303).

A token attends to everything up to the end of its own block; the logits at a mask are of the token in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.models.config_reader import ConfigReader
from lockstep.runtime.models.decoder import Decoder
from lockstep.runtime.models.layers import Maker
from lockstep.runtime.models.registry import architecture
from lockstep.runtime.models.settings import BlockSettings, read_decoder


@architecture("SDARForCausalLM")
def sdar(config: Mapping[str, Any], make: Maker) -> Decoder:
    """Build the model. Raises ConfigError for a config without `block_size` or `mask_token_id`."""
    settings = read_decoder(config, architecture="SDARForCausalLM")
    read = ConfigReader(config)
    size, mask = read.count("block_size"), read.count("mask_token_id")
    if size & (size - 1) or size < 2:
        read.problems.append(f"`block_size` must be a power of two of at least 2, got {size}")
    if mask >= settings.vocab:
        read.problems.append(f"`mask_token_id` must be below `vocab_size` {settings.vocab}, got {mask}")
    read.check()
    model = Decoder(make, replace(settings, blocks=BlockSettings(size, mask)), qk_norm=True)
    model.rules = (LayerRules(model.scale, block=size),) * model.layers
    return model
