"""Cache tiers below the device: with any move, failure or delay, every token is that of an engine without them.

The driver compares every streamed token with a pure function of request and position, and every KV cell that a batch
reads with the prefix it must hold, wherever that was loaded from; invariants over both tiers are checked after each
event. So a history that ends well under tiers equals that of one plain engine.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.core import invariants
from lockstep.core.contract.commands import CopyToHost, LaunchBatch, LoadFromHost
from lockstep.core.contract.config import CacheTiers, HybridMemory, SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    BatchFinished,
    HostCopyFinished,
    LaneReady,
    Observed,
    PrefetchFinished,
    RequestAdmitted,
    RequestArrived,
    TokenRuns,
)
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.actions import Action
from tests.support.driver.draw import random_actions, random_config
from tests.support.driver.run import run_actions
from tests.support.tiered import moving, returning, tiered

SEEDS = 36
FAULTY = (
    "deferred (load)",
    "deferred (prefetch)",
    "load done",
    "load failed",
    "load partial",
    "load void",
    "move of an older generation ignored",
    "prefetch cancelled",
    "prefetch done",
    "prefetch partial",
    "started behind loaded pages",
    "store done",
    "store failed",
    "write done",
    "write orphaned",
    "write partial",
    "write void",
)


def history(seed: int) -> tuple[SchedConfig, list[Action]]:
    """Settings and actions of one seed: mostly repeated prompts, sometimes any actions of the swarm."""
    rng = random.Random(seed)
    if seed % 4:
        config, actions = returning(rng)
    else:
        config = random_config(rng)
        actions = random_actions(rng, 150, adapters=config.max_loras is not None)
    return tiered(rng, config), moving(rng, actions)


def test_tokens_cells_and_books_hold_over_tiers_whatever_fails() -> None:
    marks: Counter[str] = Counter()
    for seed in range(SEEDS):
        config, actions = history(seed)
        try:
            marks.update(run_actions(config, actions, replay=seed % 5 == 0).marks)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{config.tiers}") from error
    missed = [mark for mark in FAULTY if not marks[mark]]
    assert not missed, f"too tame: never reached {missed}, of {sorted(marks)}"


def test_hits_of_both_tiers_are_those_of_one_exact_lru_cache_as_large_as_the_host() -> None:
    """Prompts one at a time, written through: the device has the newest pages of the host, so the host decides."""
    rng = random.Random(5)
    for _ in range(2):
        host_pages, prompts = rng.randint(60, 150), [one_of_a_tree(rng) for _ in range(200)]
        settings = CacheTiers(host_pages=host_pages, load_tokens_min=0)
        engine = Engine(SchedConfig(page_size=1, pages=45, chunked_prefill_size=None, tiers=settings))
        lru, expected, found = list[tuple[int, ...]](), 0, 0
        for number, prompt in enumerate(prompts):
            arrived = RequestArrived(
                time_us=number,
                request_id=number,
                prompt=TokenRuns(tuple(chain(*((t, 1) for t in prompt)))),
                max_new_tokens=1,
            )
            admitted = served_at_once(engine, arrived)
            found += admitted.cached_tokens
            assert admitted.host_tokens <= admitted.cached_tokens
            prefixes = [prompt[:stop] for stop in range(1, len(prompt) + 1)]
            expected += sum(prefix in lru for prefix in prefixes[:-1])
            lru = [prefix for prefix in lru if prefix not in prefixes] + prefixes[::-1]
            lru = lru[-host_pages:]
            invariants.check_quiescent(engine)
        assert found == expected, f"{found} tokens were found, an exact cache of {host_pages} pages finds {expected}"
        assert expected > 0.2 * sum(map(len, prompts))


def one_of_a_tree(rng: random.Random) -> tuple[int, ...]:
    """A prompt of up to 40 tokens that begins like many others."""
    return tuple(rng.choice((1, 2)) if at % 8 == 0 else at + 10 for at in range(rng.randint(1, 40)))


def served_at_once(engine: Engine, arrived: RequestArrived) -> RequestAdmitted:
    """Serve one request with a host that completes every order at once. Returns its admission."""
    events: deque[Observed] = deque([arrived, LaneReady(arrived.time_us)])
    admitted: RequestAdmitted | None = None
    while events:
        step = engine.step(events.popleft())
        for decided in step.decided:
            admitted = decided if isinstance(decided, RequestAdmitted) else admitted
        for command in step.commands:
            if isinstance(command, LaunchBatch):
                tokens = np.full(len(command.plan.sample_rows), 9, np.int32).tobytes()
                events.append(BatchFinished(arrived.time_us, command.plan.batch_id, tokens))
            elif isinstance(command, CopyToHost | LoadFromHost):
                done = HostCopyFinished(arrived.time_us, command.copy_id, len(command.host_pages))
                events += [done, LaneReady(arrived.time_us)]
    assert admitted is not None
    return admitted


def test_an_answer_that_no_request_waits_for_changes_nothing() -> None:
    config = SchedConfig(page_size=1, pages=20, tiers=CacheTiers(host_pages=20))
    engine = Engine(config)
    arrived = RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((5, 8)), max_new_tokens=1)
    plan = [engine.step(event).launched() for event in (arrived, LaneReady(0))][1]
    assert plan is not None
    step = engine.step(BatchFinished(0, plan.batch_id, np.full(1, 9, np.int32).tobytes()))
    (copy,) = [command for command in step.commands if isinstance(command, CopyToHost)]
    before = snapshot.dump(engine)
    for wrong, why in (
        (HostCopyFinished(0, copy.copy_id + 1, 8), "not under way"),
        (PrefetchFinished(0, copy.copy_id, 8), "not under way"),
        (HostCopyFinished(0, copy.copy_id, 9), "9 pages of 8"),
        (HostCopyFinished(0, copy.copy_id, -1), "-1 pages of 8"),
        (HostCopyFinished(0, copy.copy_id, 8, generation=1), "generation 1"),
    ):
        with pytest.raises(ContractError, match=why):
            engine.step(wrong)
        assert snapshot.dump(engine) == before
    engine.step(HostCopyFinished(0, copy.copy_id, 8))
    with pytest.raises(ContractError, match="not under way"):
        engine.step(HostCopyFinished(0, copy.copy_id, 8))


def test_without_tiers_nothing_is_written_of_them() -> None:
    assert b"tiers" not in msgspec.msgpack.encode(SchedConfig())
    assert b"tiers" not in snapshot.dump(Engine(SchedConfig()))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SchedConfig()), type=SchedConfig) == SchedConfig()


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"host_pages": 0}, "`tiers.host_pages` must be a whole number of at least 1, got `0`"),
        ({"host_pages": 1, "write_policy": "lazy"}, "`tiers.write_policy` must be write_through, .* got `lazy`"),
        ({"host_pages": 1, "prefetch_share": 0.0}, "`tiers.prefetch_share` must be above 0"),
    ],
)
def test_a_setting_that_cannot_be_is_named(wrong: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        CacheTiers(**wrong)


def test_tiers_need_a_radix_cache_above_them() -> None:
    with pytest.raises(ConfigError, match="`tiers` lie below the radix cache"):
        SchedConfig(radix_cache=False, tiers=CacheTiers(host_pages=1))


def test_what_a_batch_in_flight_is_still_to_compute_is_written_no_sooner() -> None:
    """A completed prompt may take over another page for its place, of a request with a batch in flight."""
    config = SchedConfig(
        page_size=1,
        pages=89,
        same_step_sharing=True,
        radix_capacity_pages=10,
        max_running_requests=2,
        schedule_policy="priority",
        chunked_prefill_size=16,
        prefix_deduplication="defer",
        bypass_limit=2,
        tiers=CacheTiers(host_pages=31, load_tokens_min=10, load_pages_max=1, storage=True, prefetch_tokens_min=4),
        hybrid=HybridMemory(window_tokens=1, window_pages=4, state_slots=0, checkpoint_tokens=1),
    )
    arrivals = [
        (1001, 50, 25, 20),
        (2001, 3, 25, 5),
        (2001, 50, 1, 11),
        (2001, 27, 6, 11),
        (2001, 50, 1, 11),
        (1, 20, 6, 100),
        (3001, 31, 1, 20),
    ]
    actions: list[Action] = [
        ("arrive", first, tokens, outputs, {"priority": rank}) for first, tokens, outputs, rank in arrivals
    ]
    driver = run_actions(config, actions, replay=True)
    assert "blocks written" in driver.marks


def test_a_request_waits_for_no_second_load_after_one_that_ended_behind_its_time_limit() -> None:
    """The shared load ends with the event at which the wait was due to end: the request starts with what is there."""
    config = SchedConfig(
        page_size=4,
        pages=20,
        radix_capacity_pages=10,
        max_running_requests=1,
        schedule_policy="priority",
        chunked_prefill_size=16,
        batching="mixed",
        tiers=CacheTiers(
            host_pages=300, write_policy="write_back", load_tokens_min=0, load_pages_max=1, load_timeout_us=20
        ),
        hybrid=HybridMemory(window_tokens=8, window_pages=5, state_slots=0, checkpoint_tokens=4),
    )
    ready, finish = ("ready",), ("finish",)
    arrivals: list[Action] = [
        ("arrive", first, tokens, outputs, {"priority": rank})
        for first, tokens, outputs, rank in ((3001, 20, 25, None), (1, 50, 6, 5), (1, 50, 6, 3), (1, 50, 1, 3))
    ]
    actions: list[Action] = [
        *(arrivals[0], ready, arrivals[1], ("finish", "error"), arrivals[2], ready, finish, arrivals[3]),
        *(ready, finish, ready, finish, ready, finish, ready, ready, finish, finish, ready, ready, finish, ready),
        *(finish, finish, ("move", 44, 1.0, ""), ready, ("wait", 22), ("move", 0, 1.0, "")),
    ]
    driver = run_actions(config, actions, replay=True)
    assert "load lasted too long" in driver.marks
