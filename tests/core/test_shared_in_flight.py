"""KV that is shared while its batch is in flight, and what becomes of it if that batch, or one before it, fails."""

from __future__ import annotations

from lockstep.core.contract.config import SchedConfig
from tests.support.driver.actions import Action
from tests.support.driver.run import run_actions


def test_kv_behind_a_chunk_whose_batch_fails_is_lost_also_where_that_chunk_was_cached() -> None:
    """A request that returns hidden states computes a cached chunk again, and shares the next chunk in flight."""
    config = SchedConfig(
        page_size=1,
        pages=3,
        same_step_sharing=True,
        max_running_requests=4,
        context_tokens_max=60,
        chunked_prefill_size=1,
        overlap_depth=1,
    )
    actions: list[Action] = [("arrive", 1001, 3, 1, {"return_hidden_states": True})] * 3
    actions += [("ready",), ("finish",)] * 3  # the first request is computed, so its prompt is cached
    actions += [("ready",), ("ready",), ("finish", "error"), ("ready",), ("finish",), ("finish",)]
    run_actions(config, actions)
