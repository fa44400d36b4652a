"""Checks of what a user sets of Lockstep under vLLM: unknown names, wrong types, settings without an effect here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError

KINDS: dict[str, tuple[type, str]] = {
    "profile": (str, "a string"),
    "journal": (str, "a string, the name of a run folder"),
    "journal_tokens": (bool, "true or false"),
    "mean_request_tokens": (int, "a whole number of tokens, at least 0"),
    "scheduler": (dict, "a table of scheduler settings"),
}
"""The settings, and what each must be."""

CLUSTER = "it is for prefill and decode engines, and vLLM's connectors are refused"
RANKS = "it is for attention shared out over data-parallel ranks"
STAGES = "stages and microbatches follow from vLLM"
HALVES = "vLLM's workers split batches themselves (hint: --enable-dbo)"
TOKENS = "vLLM's front end decides when tokens are sent"

WITHOUT_EFFECT: dict[str, str] = {
    "role": CLUSTER,
    "transfer_allocation": CLUSTER,
    "transfer_failure": CLUSTER,
    "transfer_slots": CLUSTER,
    "transfer_timeout_us": CLUSTER,
    "bootstrap_timeout_us": CLUSTER,
    "num_reserved_decode_tokens": CLUSTER,
    "dp_ranks": RANKS,
    "dp_rank": RANKS,
    "prefill_delayer": RANKS,
    "prefill_delayer_max_delay_passes": RANKS,
    "prefill_delayer_max_delay_us": RANKS,
    "prefill_delayer_token_usage_low_watermark": RANKS,
    "prefill_delayer_slots": RANKS,
    "prefill_delayer_queue_min_ratio": RANKS,
    "prefill_full_skip_passes": RANKS,
    "pp_max_micro_batch_size": STAGES,
    "pp_dynamic_chunking": STAGES,
    "two_batch_overlap": HALVES,
    "two_batch_decode_tokens": HALVES,
    "two_batch_prefill_tokens": HALVES,
    "multiplexing": "vLLM's workers run all layers of a pass at once",
    "stream_interval": TOKENS,
    "force_stream_interval": TOKENS,
    "decode_steps_per_launch": "vLLM's workers decode one token in a pass",
    "expert_load_interval": "vLLM's workers do not report the load of experts to a scheduler",
    "jump_forward_tokens": "vLLM's grammars force no tokens",
    "eos_token_ids": "end tokens come with each request of vLLM",
    "truncate_input": "vLLM's front end cuts prompts, or refuses them",
    "session_kv": "vLLM's requests belong to no session",
    "max_sessions": "vLLM's requests belong to no session",
    "isolate_tenants": "vLLM's requests have no tenant (hint: cache_salt of a request)",
}
"""Fields of SchedConfig that vLLM's engine cannot carry out, or that would change nothing, with the reason."""


def check_values(values: object, source: str, of_vllm: Iterable[str]) -> None:
    """Raise ConfigError for the first value that cannot be set.

    Args:
        values: the settings as they were read.
        source: where they come from.
        of_vllm: fields of SchedConfig that follow from vLLM's own options.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source} must be a table of settings, got `{values}`\nhint: docs/vllm.md")
    for name, value in values.items():
        if name not in KINDS:
            raise ConfigError(f"{source}: `{name}` is no setting\nhint: {_nearest(name, KINDS, 'docs/vllm.md')}")
        kind, text = KINDS[name]
        negative = isinstance(value, int) and value < 0
        if not isinstance(value, kind) or negative or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{source}: `{name}` must be {text}, got `{value}`")
    if values.get("journal_tokens") and not values.get("journal"):
        raise ConfigError(f"{source}: `journal_tokens` is set, but there is no journal\nhint: set `journal`")
    _check_scheduler(values.get("scheduler", {}), source, frozenset(of_vllm))


def _check_scheduler(values: Mapping[str, Any], source: str, of_vllm: frozenset[str]) -> None:
    for name in values:
        if name in of_vllm:
            raise ConfigError(f"{source}: `scheduler.{name}` follows from vLLM's own options and cannot be set here")
        if name in WITHOUT_EFFECT:
            raise ConfigError(f"{source}: `scheduler.{name}` cannot be set under vLLM: {WITHOUT_EFFECT[name]}")
        if name not in SchedConfig.__struct_fields__:
            allowed = [one for one in SchedConfig.__struct_fields__ if one not in of_vllm | WITHOUT_EFFECT.keys()]
            raise ConfigError(
                f"{source}: `scheduler.{name}` is no scheduler setting\n"
                f"hint: {_nearest(name, allowed, 'docs/options.md')}"
            )


def _nearest(name: object, allowed: Iterable[str], page: str) -> str:
    """Return the most similar names, or the page that lists all."""
    found = get_close_matches(str(name), list(allowed), n=3)
    return f"{' or '.join(found)} ({page})" if found else f"{page} lists the settings"
