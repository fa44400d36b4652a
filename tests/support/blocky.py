"""Histories of an engine whose model answers in blocks."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from lockstep.core.contract.config import BlockDiffusion, SchedConfig
from tests.support.driver.actions import Action
from tests.support.driver.draw import pressed_actions, pressed_config, random_actions, random_config, without_halves

UNSUPPORTED = ("kind", "grammar", "grammar_ends", "stop_texts", "logprob_start", "return_hidden_states", "spans")


def in_blocks(rng: random.Random, config: SchedConfig) -> SchedConfig:
    """The settings with block diffusion, and without what does not go with it."""
    unset = msgspec.UNSET
    block = rng.choice([2, 4, 8])
    page_size = block * rng.choice([1, 1, 2, 4])
    tokens = config.pages * config.page_size
    return msgspec.structs.replace(
        without_halves(config),
        diffusion=BlockDiffusion(block),
        page_size=page_size,
        pages=max(-(-tokens // page_size), 2),
        context_tokens_max=max(config.context_tokens_max // block * block, 2 * block),
        chunked_prefill_size=None if config.chunked_prefill_size is None else page_size * rng.choice([1, 2, 4]),
        chunked_prefill_size_min=unset,
        max_prefill_tokens=max(config.max_prefill_tokens, page_size),
        truncation_align_size=None,
        chunk_unit="page",
        overlap_depth=0,
        request_rows=None,
        batching="prefill_first",
        reserve="ratio" if config.reserve == "full" else config.reserve,
        decode_look_ahead=1,
        decode_steps_per_launch=1,
        enable_priority_preemption=False,
        speculative_method=unset,
        num_speculative_tokens=unset,
        speculative_min_chance=unset,
        speculative_max_batch_size=unset,
        speculative_topk=unset,
        speculative_num_steps=unset,
        jump_forward_tokens=unset,
    )


def blocky_history(seed: int) -> tuple[SchedConfig, list[Action]]:
    """Settings and actions of one seed; few of its requests are of kinds that such a model does not serve."""
    rng = random.Random(f"blocks {seed}")
    if seed % 3 == 0:
        config, actions = pressed_config(rng), pressed_actions(rng, 300)
    else:
        config = random_config(rng)
        actions = random_actions(rng, rng.choice([100, 300]), adapters=config.max_loras is not None)
    return in_blocks(rng, config), [_served(rng, action) for action in actions]


def _served(rng: random.Random, action: Action) -> Action:
    if action[0] != "arrive" or rng.random() < 0.05:
        return action
    name, base, tokens, max_new, options = action
    kept: dict[str, Any] = {key: value for key, value in options.items() if key not in UNSUPPORTED}
    return name, base, tokens, max_new, kept
