"""Profiles: scheduler settings of other engines, and the recommended ones, as named values."""

from __future__ import annotations

from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.setting import one_of

PROFILES: dict[str, dict[str, Any]] = {
    "lockstep": {  # one budget for prompts and decodes, so that a burst of prompts delays no decode: docs/profiles.md
        "batching": "mixed",
        "reserve": "on_demand",
        "chunked_prefill_size": 2048,
    },
    "sglang": {  # 0.5: prefill first, a reserve by ratio, retracted requests to the tail, duplicates behind the others
        "page_size": 1,
        "batching": "prefill_first",
        "reserve": "ratio",
        "retraction_policy": "length",
        "retracted_requeue": "tail",
        "prefix_deduplication": "last",
        "waiting_prefix_refresh": 32,
        "bypass_limit": None,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16384,
        "overlap_depth": 1,
    },
    "vllm": {  # V1 0.33: one token budget, running requests first; allocate on demand, preempt the newest, to the front
        "page_size": 16,
        "same_step_sharing": True,
        "prefix_deduplication": "defer",  # a request that shares a prefix reads it in the next launch, not in the same
        "batching": "running_first",
        "reserve": "on_demand",
        "retraction_policy": "newest",
        "retracted_requeue": "front",
        "retracted_kv": "cache",
        "chunk_unit": "token",
        "bypass_limit": None,
        "chunked_prefill_size": 2048,
        "max_prefill_tokens": 2048,
        "max_running_requests": 128,
        "overlap_depth": 1,
    },
}
"""Named families of settings. Settings that a profile does not contain have SchedConfig's default."""


DEFAULT_PROFILE = "lockstep"
"""The profile of a simulation in which neither a profile nor an engine is named."""


def profile_settings(name: str) -> dict[str, Any]:
    """Return the settings of a profile. Raises ConfigError for an unknown name."""
    if name not in PROFILES:
        raise ConfigError(f"`profile` must be {one_of(tuple(PROFILES))}, got `{name}`")
    return dict(PROFILES[name])
