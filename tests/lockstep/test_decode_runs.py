"""A stretch of decodes taken by a DecodeRun equals, in digest and dumped bytes, the stretch taken step by step."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core import invariants
from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.events import BatchFinished, LaneReady, Observed, RequestArrived, TokenRuns
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.decode_run import DecodeRun
from lockstep.core.scheduler.engine import Engine

LAUNCHES = 400


class Run:
    """An engine under load. With `runs`, every stretch that allows it is taken by a DecodeRun of at most `longest`."""

    def __init__(self, config: SchedConfig, arrivals: dict[int, list[RequestArrived]], longest: int = 0) -> None:
        self.engine = Engine(config)
        self.arrivals = arrivals
        self.longest = longest
        self.plans: list[BatchPlan] = []  # in flight
        self.seen: list[tuple[Observed, bytes]] = []
        self.taken = 0  # launches that were taken by runs

    def launch_all(self) -> None:
        for launch in range(LAUNCHES):
            for arrival in self.arrivals.get(launch, ()):
                self.seen.append((arrival, self.engine.step(arrival).digest))
            self.launch(launch)

    def launch(self, time_us: int) -> None:
        if len(self.plans) > self.engine.config.overlap_depth:
            self.step(self.result(time_us))
        self.step(LaneReady(time_us))
        if self.engine.launch_found_nothing and self.plans:
            self.step(self.result(time_us))

    def result(self, time_us: int) -> BatchFinished:
        plan = self.plans.pop(0)
        ids = plan.request_ids[plan.sample_rows] * 1000 + plan.stops[plan.sample_rows]
        if plan.steps > 1:
            ids = ids.repeat(plan.stops - plan.starts)
        return BatchFinished(time_us, plan.batch_id, ids.astype(np.int32).tobytes())

    def step(self, event: Observed) -> None:
        step = self.engine.step(event)
        self.seen.append((event, step.digest))
        plan = step.launched()
        if plan is not None:
            self.plans.append(plan)


class RunInStretches(Run):
    """A run in which pairs of result and launch go to a DecodeRun whenever one may begin."""

    run: DecodeRun | None = None

    def launch(self, time_us: int) -> None:
        if self.run is None:
            self.run = DecodeRun.begin(self.engine)
        if self.run is None or time_us in self.arrivals:
            self.close()
            super().launch(time_us)
            return
        result = self.result(time_us)
        self.seen.append((result, self.run.finished(result).digest))
        ready = LaneReady(time_us)
        step = self.run.launched(ready)
        assert not step.decided, "a stretch has nothing to decide"
        self.seen.append((ready, step.digest))
        plan = step.launched()
        assert plan is not None
        self.plans.append(plan)
        self.taken += 1
        if not self.run.left or time_us % self.longest == 0 or time_us + 1 in self.arrivals:
            self.close()

    def close(self) -> None:
        if self.run is not None:
            self.run.close()
            self.run = None
            invariants.check(self.engine)


def load(seed: int) -> tuple[SchedConfig, dict[int, list[RequestArrived]]]:
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    preempts = rng.random() < 0.4
    config = SchedConfig(
        page_size=page_size,
        pages=rng.choice([40, 200, 2000]) if page_size == 1 else rng.choice([20, 200]),
        overlap_depth=rng.choice([0, 1, 2]),
        max_running_requests=rng.choice([2, 8]),
        chunked_prefill_size=rng.choice([None, 32]),
        radix_cache=rng.random() < 0.8,
        schedule_conservativeness=rng.choice([0.05, 1.0]),
        stream_interval=rng.choice([1, 1, 1, 3]),
        schedule_policy="priority" if preempts else "fcfs",
        enable_priority_preemption=preempts,
        retraction_policy="priority" if preempts else "length",
    )
    arrivals: dict[int, list[RequestArrived]] = {}
    for request_id, launch in enumerate(sorted(rng.sample(range(LAUNCHES), rng.randint(1, 12)))):
        arrivals[launch] = [
            RequestArrived(
                time_us=launch,
                request_id=request_id,
                prompt=TokenRuns((rng.choice([1, 500]), rng.randint(1, 30))),
                max_new_tokens=rng.randint(1, 120),
                ignore_eos=rng.random() < 0.2,
                priority=rng.choice([None, 0, 50]),
            )
        ]
    return config, arrivals


@given(seed=st.integers(min_value=0, max_value=2**32), longest=st.sampled_from([2, 7, 1000]))
def test_stretches_equal_single_steps(seed: int, longest: int) -> None:
    config, arrivals = load(seed)
    single, stretched = Run(config, arrivals), RunInStretches(config, arrivals, longest)
    single.launch_all()
    stretched.launch_all()
    stretched.close()
    assert stretched.seen == single.seen
    assert snapshot.dump(stretched.engine) == snapshot.dump(single.engine)


@pytest.mark.parametrize("seed", range(6))
def test_stretches_equal_single_steps_with_windows_and_states(seed: int) -> None:
    rng, (config, arrivals) = random.Random(seed), load(seed)
    page_size = config.page_size
    config = msgspec.structs.replace(
        config,
        chunked_prefill_size=32,
        schedule_policy="fcfs",
        enable_priority_preemption=False,
        hybrid=HybridMemory(
            window_tokens=rng.choice([1, 7, 20]),
            window_pages=(60 + rng.choice([0, 100, 1000])) // page_size + 4,
            state_slots=rng.choice([4, 12, 60]),
            checkpoint_tokens=page_size * rng.choice([1, 2, 8]),
        ),
    )
    single, stretched = Run(config, arrivals), RunInStretches(config, arrivals, 1000)
    single.launch_all()
    stretched.launch_all()
    stretched.close()
    assert stretched.seen == single.seen
    assert snapshot.dump(stretched.engine) == snapshot.dump(single.engine)


@pytest.mark.parametrize(
    ("settings", "stretches"),
    [
        ({"decode_look_ahead": 2, "reserve": "on_demand"}, False),
        ({"decode_steps_per_launch": 2}, False),
        ({"waiting_prefix_refresh": 5}, True),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_stretches_equal_single_steps_with_other_launches(seed: int, settings: dict[str, Any], stretches: bool) -> None:
    """Two requests run in a pool that is almost too small, and others with the same prompt wait."""
    config = SchedConfig(page_size=4, pages=40, overlap_depth=1, max_running_requests=2, **settings)
    arrivals = {
        launch: [
            RequestArrived(
                time_us=launch, request_id=launch, prompt=TokenRuns((1, 20 + launch)), max_new_tokens=60 + 10 * seed
            )
        ]
        for launch in range(5)
    }
    single, stretched = Run(config, arrivals), RunInStretches(config, arrivals, 1000)
    single.launch_all()
    stretched.launch_all()
    stretched.close()
    assert (stretched.taken > 0) == stretches
    assert stretched.seen == single.seen
    assert snapshot.dump(stretched.engine) == snapshot.dump(single.engine)


def test_most_of_a_decode_is_taken_in_stretches() -> None:
    arrivals = {0: [RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((1, 8)), max_new_tokens=LAUNCHES)]}
    hybrid = HybridMemory(window_tokens=9, window_pages=20, state_slots=9, checkpoint_tokens=8)
    for kinds in (msgspec.UNSET, hybrid):
        run = RunInStretches(SchedConfig(page_size=4, pages=2000, overlap_depth=1, hybrid=kinds), arrivals, 1000)
        run.launch_all()
        assert run.taken > LAUNCHES * 0.9


def test_decodes_are_taken_in_stretches_while_a_request_waits() -> None:
    arrivals = {0: [asked(0, LAUNCHES), asked(1, LAUNCHES)]}
    config = SchedConfig(page_size=4, pages=2000, overlap_depth=1, max_running_requests=1)
    run = RunInStretches(config, arrivals, 1000)
    run.launch_all()
    assert run.taken > LAUNCHES * 0.9


def asked(request_id: int, outputs: int) -> RequestArrived:
    prompt = TokenRuns((1 + request_id, 8))
    return RequestArrived(time_us=0, request_id=request_id, prompt=prompt, max_new_tokens=outputs)


def two_slots(checkpoint_tokens: int) -> SchedConfig:
    states = HybridMemory(state_slots=2, checkpoint_tokens=checkpoint_tokens)
    return SchedConfig(page_size=4, pages=2000, overlap_depth=1, hybrid=states)


def test_stretch_goes_on_without_a_free_slot_while_no_checkpoint_is_due() -> None:
    """Two requests have both slots, and the next multiple of `checkpoint_tokens` is behind their ends."""
    run = RunInStretches(two_slots(1000), {0: [asked(0, LAUNCHES), asked(1, LAUNCHES)]}, 1000)
    run.launch_all()
    assert run.taken > LAUNCHES * 0.9


def test_stretch_ends_where_a_checkpoint_takes_the_slot_of_a_cached_one() -> None:
    """The request has one of two slots. The checkpoint of its prompt has the other, and is evicted for the next one."""
    run = RunInStretches(two_slots(8), {0: [asked(0, 40)]}, 1000)
    run.launch_all()
    assert run.taken


def windows(pages: int, *, radix_cache: bool) -> SchedConfig:
    """A row of this window holds three pages, and a fourth for a batch in flight."""
    of_two_pages = HybridMemory(window_tokens=9, window_pages=pages)
    return SchedConfig(
        page_size=4, pages=2000, overlap_depth=1, radix_cache=radix_cache, chunked_prefill_size=8, hybrid=of_two_pages
    )


def test_stretch_goes_on_with_the_last_free_window_page() -> None:
    """The page that a decode opens is free, and there is no other. It unlocks one in turn."""
    run = RunInStretches(windows(5, radix_cache=False), {0: [asked(0, LAUNCHES)]}, 1000)
    run.launch_all()
    assert run.taken > LAUNCHES * 0.9


def test_stretch_ends_where_a_page_takes_the_window_of_a_cached_one() -> None:
    """The window pages of the prompt stay behind the decode until the last free one is taken. Then they are evicted."""
    run = RunInStretches(windows(5, radix_cache=True), {0: [asked(0, 40)]}, 1000)
    run.launch_all()
    assert run.taken


@pytest.mark.parametrize(
    "obstacle",
    [{"stop_token_ids": (7,)}, {"finish_by_us": 10_000}, {"stream": False}],
    ids=["may end by a token", "has a timer", "does not stream"],
)
def test_what_needs_a_decision_is_stepped(obstacle: dict[str, object]) -> None:
    arrival = RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((1, 8)), max_new_tokens=50, **obstacle)  # type: ignore[arg-type]
    run = RunInStretches(SchedConfig(page_size=4, pages=2000, overlap_depth=1), {0: [arrival]}, 1000)
    run.launch_all()
    assert run.taken == 0
