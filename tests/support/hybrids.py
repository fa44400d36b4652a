"""Random histories with pools beside full attention, of the smallest sizes that work and of roomy ones.

Used by the swarm, and by tests/properties/test_hybrid.py with seeds of its own.
"""

from __future__ import annotations

import random
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from lockstep.core.contract.config import HybridMemory, SchedConfig
from tests.support.driver.actions import Action
from tests.support.driver.draw import (
    crowded_actions,
    crowded_config,
    pipelined,
    pressed_actions,
    pressed_config,
    random_actions,
    random_config,
    with_chains,
)
from tests.support.tiered import returning

PIPELINED_SHARE = 0.25  # of these histories have microbatches
OFF: dict[str, dict[str, Any]] = {
    "preempts": {"enable_priority_preemption": False},
    "shares": {"same_step_sharing": False},
    "steps": {"decode_steps_per_launch": 1},
    "drafts": {
        "speculative_method": UNSET,
        "num_speculative_tokens": UNSET,
        "speculative_min_chance": UNSET,
        "speculative_max_batch_size": UNSET,
        "speculative_topk": UNSET,
        "speculative_num_steps": UNSET,
        "jump_forward_tokens": UNSET,
    },
}
"""By feature beside pools of their own: the setting that turns it off."""


def hybrid(rng: random.Random, config: SchedConfig, *, pairs: bool = True) -> SchedConfig:
    """Return the settings with sliding windows, linear attention or both; without `pairs`, other features are off."""
    own = random.Random()
    own.setstate(rng.getstate())  # beside the others, which stay the same
    pair = own.random()
    config = with_chains(splitting(config))
    for name, off in OFF.items():
        if not pairs or random.Random(f"{name} {pair}").random() >= 0.8:
            config = replace(config, **off)
    kind = rng.choice(["window", "state", "both"])
    tokens = rng.choice([1, 2, 5, 8, 17, 60]) if kind != "state" else 0
    return replace(config, hybrid=pools(rng, config, tokens, states=kind != "window"))


def splitting(config: SchedConfig) -> SchedConfig:
    """Return the settings with split prompts, without which no windows are freed."""
    chunk = config.chunked_prefill_size or max(config.page_size, 16)
    return replace(
        config,
        chunked_prefill_size=max(chunk, config.truncation_align_size or 0),
        max_prefill_tokens=max(config.max_prefill_tokens, config.page_size),
    )


def pools(rng: random.Random, config: SchedConfig, tokens: int, *, states: bool) -> HybridMemory:
    """Pools of the smallest sizes that work, or roomy ones. `tokens`: of a window, 0 for none."""
    sizes = HybridMemory(window_tokens=tokens, window_pages=1, state_slots=0) if tokens else None
    least = sizes.row_pages_max(config.page_size, config.positions_ahead) if sizes is not None else 0
    least += -(-config.split_tokens // config.page_size)
    return HybridMemory(
        window_tokens=tokens,
        window_pages=least + rng.choice([0, 1, rng.randint(0, 30), 200]) if tokens else 0,
        state_slots=rng.choice([2, 3, rng.randint(2, 12), 60]) * config.states_per_row if states else 0,
        checkpoint_tokens=(every := config.page_size * rng.choice([1, 1, 2, 4])),
        chunk_tokens_min=random.Random(f"{tokens} {every}").choice([UNSET, 1, tokens, 4 * tokens]) if tokens else UNSET,
    )


def hybrid_history(rng: random.Random, *, pairs: bool = True) -> tuple[SchedConfig, list[Action]]:
    """Settings and actions: prompts that come again or begin alike, requests that outgrow the pool, anything at all."""
    kind = rng.random()
    if pairs and kind >= 0.7 and random.Random(f"crowded {kind}").random() < 0.4:
        config, actions = crowded_config(rng), crowded_actions(rng, 200)
    elif kind < 0.4:
        config, actions = returning(rng)
    elif kind < 0.7:
        config, actions = pressed_config(rng), pressed_actions(rng, 300)
    else:
        config = random_config(rng)
        actions = random_actions(rng, rng.choice([100, 300]), adapters=config.max_loras is not None)
    stages = random.Random(f"stages {kind}")  # a generator of its own: all other draws stay the same
    if pairs and stages.random() < PIPELINED_SHARE:
        config = pipelined(stages, config)
    return hybrid(rng, config, pairs=pairs), actions
