"""Victims of preemption, and the exact number of freed pages, where a scenario would not show it as well."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from lockstep.core.contract.commands import NO_ROWS, Step
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.kv.radix import NO_MATCH
from lockstep.core.kv.resource import AdmissionView
from lockstep.core.requests.budget import PrefillBudget
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.preemption import Projection, fewest
from tests.support.driver.draw import pressed_actions
from tests.support.driver.driver import Driver


def test_fewest_takes_the_shortest_beginning_and_spares_all_others() -> None:
    gives = [1, 5, 2, 4]

    def enough(wanted: int, some: list[int]) -> bool:
        return sum(gives[i] for i in some) >= wanted

    assert fewest([0, 1, 2, 3], lambda some: enough(1, some)) == [0]
    assert fewest([0, 1, 2, 3], lambda some: enough(5, some)) == [1]
    assert fewest([0, 1, 2, 3], lambda some: enough(6, some)) == [0, 1]
    assert fewest([0, 1, 2, 3], lambda some: enough(8, some)) == [0, 1, 2]
    assert fewest([0, 1, 2, 3], lambda some: enough(9, some)) == [1, 3]
    assert fewest([0, 1, 2, 3], lambda some: enough(13, some)) == []
    assert fewest([], lambda some: enough(1, some)) == []


def test_fewest_is_minimal_and_a_beginning_whatever_each_gives() -> None:
    rng = random.Random(5)
    for _ in range(2_000):
        gives = [rng.randint(0, 6) for _ in range(rng.randint(1, 8))]
        wanted = rng.randint(1, 20)

        def enough(some: list[int], gives: list[int] = gives, wanted: int = wanted) -> bool:
            return sum(gives[i] for i in some) >= wanted

        ranked = list(range(len(gives)))
        chosen = fewest(ranked, enough)
        assert bool(chosen) == enough(ranked)
        if chosen:
            assert enough(chosen)
            assert not enough(ranked[: chosen[-1]]), "a request after the first that are enough was taken"
            assert not any(enough([other for other in chosen if other != one]) for one in chosen)


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
@pytest.mark.parametrize("radix_cache", [False, True])
def test_freed_memory_equals_the_projection(overlap_depth: int, radix_cache: bool) -> None:
    """Retract some members for real, collect all batches in flight, and count."""
    rng = random.Random(overlap_depth)
    looked = 0
    for seed in range(60):
        config = SchedConfig(
            page_size=2, pages=30, overlap_depth=overlap_depth, radix_cache=radix_cache, schedule_conservativeness=0.02
        )
        driver = Driver(config)
        for action in pressed_actions(random.Random(seed), 30):
            driver.do(action)
        engine = driver.engine
        if engine.running_batch.size < 2 or any(batch.plan.mode != "decode" for batch in engine.in_flight):
            continue  # an extend that is collected publishes its prompt, and may find it cached already
        leaving = rng.sample(range(engine.running_batch.size), rng.randint(0, engine.running_batch.size))
        members = [engine.running_batch.requests[i] for i in leaving]
        back = engine.memory.returning_once_delivered(
            [(m, int(engine.positions[i])) for m, i in zip(members, leaving, strict=True)], NO_MATCH
        )
        before = engine.memory.available_pages
        step = Step(time_us=driver.now_us)
        engine.leave_running(members)
        for member in members:
            engine.retract(member, "forced", step)
            driver.kv.leave(member.request_id)
        while driver.kv.stream:
            driver.engine.step(event := driver.kv.finished(driver.now_us))
            driver.kv.deliver(event.batch_id)
        assert engine.memory.available_pages == before + back.pages
        looked += 1
    assert looked > 10


@pytest.mark.parametrize(("overlap_depth", "steps"), [(0, 1), (0, 3), (1, 1), (1, 4), (2, 2)])
def test_members_that_stay_are_projected_where_they_are_once_batches_in_flight_are_delivered(
    overlap_depth: int, steps: int
) -> None:
    """Whenever one of these batches is delivered, a further decode of `steps` tokens is launched."""
    driver = Driver(SchedConfig(page_size=2, pages=400, overlap_depth=overlap_depth, decode_steps_per_launch=steps))
    engine = driver.engine
    for prompt_tokens in (5, 6, 9):
        driver.do(("arrive", 1, prompt_tokens, 200, {}))
    while not engine.running_batch.size or any(batch.plan.mode != "decode" for batch in engine.in_flight):
        driver.do(("ready",))
        driver.do(("finish",))
    while len(engine.in_flight) <= overlap_depth:
        driver.do(("ready",))
    projection = Projection(engine, NO_MATCH, [0])
    driver.do(("cancel", 0))
    for _ in range(len(engine.in_flight)):
        driver.do(("finish",))
        driver.do(("ready",))
    assert engine.positions.tolist() == projection.positions.tolist()


@pytest.mark.parametrize("overlap_depth", [0, 1])
@pytest.mark.parametrize("reserve", ["ratio", "full"])
def test_state_slots_and_window_pages_are_projected_as_admission_then_finds_them(
    overlap_depth: int, reserve: Literal["ratio", "full"]
) -> None:
    """Retract some members, deliver all batches in flight, and compare the projection with admission's resources."""
    rng = random.Random(overlap_depth)
    compared, scarce = 0, 0
    for seed in range(60):
        config = SchedConfig(
            page_size=2,
            pages=40,
            overlap_depth=overlap_depth,
            reserve=reserve,
            retracted_kv="free",
            hybrid=HybridMemory(window_tokens=5, window_pages=9, state_slots=3, checkpoint_tokens=4),
            chunked_prefill_size=8,
        )
        driver = Driver(config)
        for action in pressed_actions(random.Random(seed), 30):
            driver.do(action)
        engine = driver.engine
        if engine.running_batch.size < 2 or any(batch.plan.mode != "decode" for batch in engine.in_flight):
            continue  # an extend that is collected publishes its prompt, and may find it cached already
        if not engine.waiting or engine.prefilling is not None:
            continue
        request = engine.waiting[0]
        leaving = sorted(rng.sample(range(engine.running_batch.size), rng.randint(0, engine.running_batch.size)))
        members = [engine.running_batch.requests[i] for i in leaving]
        projection = Projection(engine, NO_MATCH, leaving)
        budget, take = PrefillBudget(config, 1000, 0), request.prompt_tokens

        def found(view: AdmissionView) -> tuple[bool, int]:
            room = view.window_room(request, 0, take, NO_ROWS, budget)  # noqa: B023
            return view.lacks_state(NO_ROWS), room

        foreseen = found(projection)
        step = Step(time_us=driver.now_us)
        engine.leave_running(members)
        for member in members:
            engine.retract(member, "forced", step)
            driver.kv.leave(member.request_id)
        while driver.kv.stream:
            driver.engine.step(event := driver.kv.finished(driver.now_us))
            driver.kv.deliver(event.batch_id)
        assert foreseen == found(engine), (seed, leaving)
        compared += 1
        scarce += foreseen[0] or foreseen[1] < take
    assert compared > 10, compared
    assert scarce, "no pool was ever short"


def test_preemption_needs_the_order_that_puts_victims_behind() -> None:
    with pytest.raises(ConfigError, match="enable_priority_preemption"):
        SchedConfig(enable_priority_preemption=True)
    with pytest.raises(ConfigError, match="retraction_policy"):
        SchedConfig(enable_priority_preemption=True, schedule_policy="priority")
    with pytest.raises(ConfigError, match="bypass_limit"):
        SchedConfig(
            enable_priority_preemption=True, schedule_policy="priority", retraction_policy="priority", bypass_limit=0
        )
    with pytest.raises(ConfigError, match="priority_preemption_threshold"):
        SchedConfig(priority_preemption_threshold=-1)
    assert Engine(
        SchedConfig(enable_priority_preemption=True, schedule_policy="priority", retraction_policy="priority")
    )
