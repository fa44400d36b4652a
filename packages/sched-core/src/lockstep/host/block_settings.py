"""Engines whose model answers in blocks (block diffusion): the settings of the scheduler that follow from the block.

The runtime and the simulator share this module, so both schedule alike. Options that are given are kept, and refused by
name by `SchedConfig` where they do not go with blocks.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from lockstep.core.contract.config import BlockDiffusion, SchedConfig

IN_BLOCKS: Mapping[str, Any] = {
    "overlap_depth": 0,
    "batching": "prefill_first",
    "chunk_unit": "page",
    "decode_look_ahead": 1,
}
"""Settings of an engine whose model answers in blocks, unless others are given."""


def block_settings(usual: Mapping[str, Any], given: Container[str], block_tokens: int) -> dict[str, Any]:
    """Return the settings of an engine whose model answers in blocks.

    Args:
        usual: settings of an engine with another model, those that are given included.
        given: names of the settings that an operator chose.
    """
    plain = SchedConfig()
    follows = dict(IN_BLOCKS)
    page_size = usual.get("page_size", plain.page_size)
    follows["page_size"] = max(page_size, block_tokens)
    context = usual.get("context_tokens_max", plain.context_tokens_max)
    follows["context_tokens_max"] = max(context // block_tokens, 1) * block_tokens
    if usual.get("reserve") == "full":
        follows["reserve"] = "on_demand"
    own = {name: value for name, value in follows.items() if name not in given}
    return {**usual, **own, "diffusion": BlockDiffusion(block_tokens)}
