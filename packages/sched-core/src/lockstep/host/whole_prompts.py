"""Engines whose model computes prompts whole, without KV: their sizes, and the options that have no meaning there.

Encoders attend in both directions, so no part of a prompt can be computed before the rest, and nothing of it can be
kept for another prompt. The scheduler puts whole prompts into one extend. Its pages take no memory; they count the
tokens of prompts in flight. The runtime and the simulator share this module, so both schedule alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError

GPU_PREFILL_TOKENS = 16384  # new tokens of one extend on a GPU; a longer prompt runs alone
CPU_PREFILL_TOKENS = 4096
CONTEXT_TOKENS_MAX = 32768  # longest prompt on a GPU, unless `context_tokens_max` is given

OFF: Mapping[str, Any] = {"radix_cache": False, "chunked_prefill_size": None}
"""Settings of the scheduler without which prompts are whole."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "chunked_prefill_size": (),
    "chunked_prefill_size_min": (),
    "chunk_target_us": (),
    "radix_cache": (),
    "same_step_sharing": (),
    "prefix_deduplication": ("off",),
    "cache_guarantee": (),
    "waiting_prefix_refresh": (),
    "retracted_kv": ("free",),
    "speculative_method": ("none",),
    "jump_forward_tokens": (),
    "decode_steps_per_launch": (1,),
    "prefill_decode_interval": (),
    "role": ("mixed",),
    "two_batch_overlap": (),
    "host_cache_gb": (),
    "draft_model": (),
}
"""Options about KV, chunks, decodes and transfers, with the values besides none, 0 and no that leave them off."""


def check_whole_prompts(given: Mapping[str, Any], model: str) -> None:
    """Raise ConfigError for the first option that needs KV, chunks or decodes.

    Args:
        given: options by name; those that are not in NEUTRAL are not looked at.
        model: name of the model, or of its architecture.
    """
    for name, neutral in NEUTRAL.items():
        value = given.get(name)
        if value is not msgspec.UNSET and value and value not in neutral:
            raise ConfigError(
                f"`{name}` is {value}, but {model} computes prompts whole, without KV\nhint: leave it out"
            )


# mechanism: whole-prompts (decided)
def whole_prompt_settings(given: Mapping[str, Any], prefill_tokens: int) -> dict[str, Any]:
    """Return the settings of an engine whose prompts are whole: one extend has as many prompts as its budgets allow.

    Args:
        given: settings of the scheduler, with `context_tokens_max` and `max_running_requests`.
        prefill_tokens: new tokens of one extend, unless they are given.
    """
    page_size = given.get("page_size", SchedConfig().page_size)
    pages = -(-given["context_tokens_max"] // page_size) * given["max_running_requests"]
    sizes = {"page_size": page_size, "pages": pages, "max_prefill_tokens": prefill_tokens}
    return {**sizes, **given, **OFF}
