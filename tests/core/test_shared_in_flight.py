"""KV that is shared while its batch is in flight, and what becomes of it if that batch, or one before it, fails."""

from __future__ import annotations

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import DecodeSkipped
from tests.support.driver.actions import Action
from tests.support.driver.driver import Driver
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


def test_a_decode_waits_for_a_prefix_that_two_ending_requests_lock() -> None:
    """Each of them locks the prefix, so neither is expected to give it back; the record has the pages they do give."""
    driver = Driver(
        SchedConfig(page_size=1, pages=41, overlap_depth=1, decode_steps_per_launch=8, schedule_conservativeness=0.02)
    )
    driver.do(("arrive", 1, 24, 1, {}))  # caches the prefix
    for _ in range(3):
        driver.do(("ready",))
        driver.do(("finish",))
    driver.do(("arrive", 2, 4, 60, {}))
    driver.do(("ready",))
    driver.do(("finish",))
    for _ in range(2):
        driver.do(("arrive", 1, 24, 2, {}))
    for _ in range(2):
        driver.do(("ready",))
    driver.do(("finish",))
    driver.do(("ready",))
    running = driver.engine.running_batch.request_ids.tolist()
    assert running == [1]
    skipped = [one for one in driver.step.decided if isinstance(one, DecodeSkipped)]
    assert [(one.needed_pages, one.returning_pages) for one in skipped] == [(7, 4)]
    driver.do(("finish",))
    driver.do(("ready",))
    plan = driver.step.launched()
    assert plan is not None
    assert plan.request_ids.tolist() == running
