"""The statistics of an engine, and the watchdog that reads them."""

from __future__ import annotations

import random

import msgspec

from lockstep.core.admin.stats import Watched, healthy, watch
from lockstep.core.contract.commands import ControlAnswered
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    BatchFinished,
    ClockAdvanced,
    ControlRequested,
    GetState,
    LaneReady,
    Observed,
    Pause,
    RequestAdmitted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestRejected,
    RequestRetracted,
    SetState,
    TokenRuns,
)
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.draw import pressed_actions, pressed_config
from tests.support.driver.driver import Driver

STALLED_US = 20_000_000
SECOND_US = 1_000_000


def arrived(request_id: int, prompt: int, time_us: int = 0, max_new: int = 1) -> RequestArrived:
    runs = TokenRuns((1 + 1000 * request_id, prompt))
    return RequestArrived(time_us=time_us, request_id=request_id, prompt=runs, max_new_tokens=max_new, label="long")


def test_a_long_prompt_in_chunks_of_a_second_is_well() -> None:
    """One prompt of 100 chunks emits nothing for 100 s, and is reported as healthy all the time (SG#22511)."""
    engine = Engine(SchedConfig(page_size=2, pages=200, chunked_prefill_size=2, overlap_depth=0))
    engine.step(arrived(0, 200))
    watched, now_us = watch(None, engine.stats(), 0), 0
    for batch_id in range(100):
        plan = engine.step(LaneReady(now_us)).launched()
        assert plan is not None
        now_us += SECOND_US
        engine.step(BatchFinished(now_us, batch_id, bytes(4 * len(plan.sample_rows))))
        watched = watch(watched, engine.stats(), now_us)
        assert healthy(watched, now_us, 3 * SECOND_US)
    assert engine.stats().idle


def test_a_device_that_does_not_answer_is_noticed_although_events_come() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=200, overlap_depth=0))
    engine.step(arrived(0, 3))
    engine.step(LaneReady(0))
    watched: Watched | None = None
    for second in range(30):
        now_us = second * SECOND_US
        engine.step(arrived(second + 1, 3, now_us))
        engine.step(ClockAdvanced(now_us))
        watched = watch(watched, engine.stats(), now_us)
        assert healthy(watched, now_us, STALLED_US) == (second <= 20)


def test_an_idle_or_paused_engine_is_healthy() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=200, overlap_depth=0))
    watched = watch(None, engine.stats(), 0)
    assert healthy(watch(watched, engine.stats(), 10**9), 10**9, STALLED_US)
    engine.step(arrived(0, 3))
    engine.step(ControlRequested(0, 1, Pause()))
    assert healthy(watch(watched, engine.stats(), 10**9), 10**9, STALLED_US)


def test_asking_for_the_state_answers_with_the_statistics() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=200))
    engine.step(arrived(0, 3))
    (answer,) = engine.step(ControlRequested(0, 1, GetState())).commands
    assert isinstance(answer, ControlAnswered)
    assert answer.stats == engine.stats()
    assert msgspec.json.decode(msgspec.json.encode(answer.stats))["waiting"] == 1


def test_counts_survive_a_snapshot_and_an_answer_is_not_changed_by_what_follows() -> None:
    driver = Driver(pressed_config(random.Random(3)), check=False)
    for action in pressed_actions(random.Random(3), 400):
        driver.do(action)
    before = driver.engine.stats()
    assert before.counts.admitted > 0
    assert snapshot.restore(snapshot.dump(driver.engine)).stats() == before
    finished = dict(before.counts.finished)
    driver.settle()
    assert before.counts.finished == finished
    after = driver.engine.stats()
    assert after.idle
    ended = sum(after.counts.finished.values()) + sum(after.counts.rejected.values())
    assert ended == len(driver.records)
    assert after.pages_free + after.pages_cached == after.pages


def test_progress_is_every_launch_result_admission_retraction_and_end() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=6, overlap_depth=0, reserve="on_demand", batching="mixed"))
    happened, kinds = 0, set[type]()
    counted = RequestAdmitted, RequestRetracted, RequestFinished, RequestRejected

    def fold(event: Observed) -> int:
        """Returns the number of the launched batch; -1: none."""
        nonlocal happened
        step = engine.step(event)
        decided = [type(one) for one in step.decided if isinstance(one, counted)]
        plan = step.launched()
        happened += len(decided) + (plan is not None) + isinstance(event, BatchFinished)
        kinds.update(decided)
        assert engine.stats().progress == happened
        return -1 if plan is None else plan.batch_id

    for event in (arrived(0, 4, max_new=6), arrived(1, 4, max_new=6), arrived(2, 100)):
        fold(event)
    while (batch_id := fold(LaneReady(0))) >= 0:
        fold(BatchFinished(0, batch_id, bytes(4 * engine.in_flight[0].tokens)))
    assert kinds == set(counted)
    assert engine.stats().idle


def test_a_split_prompt_is_prefilling_and_not_running() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=20, overlap_depth=0, chunked_prefill_size=4))
    for request_id, prompt in enumerate((2, 12, 4)):
        engine.step(arrived(request_id, prompt, max_new=9))
    engine.step(LaneReady(0))
    stats = engine.stats()
    assert (stats.running, stats.prefilling, stats.waiting, stats.idle) == (1, 1, 1, False)


def test_an_engine_is_idle_only_without_requests_and_batches_in_flight() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=20, overlap_depth=0))
    assert engine.stats().idle
    engine.step(arrived(0, 3))
    assert not engine.stats().idle
    engine.step(LaneReady(0))
    engine.step(RequestCancelled(0, 0))
    assert not engine.requests
    assert not engine.stats().idle
    engine.step(BatchFinished(0, 0, bytes(4)))
    assert engine.stats().idle


def test_the_new_token_ratio_begins_anew_when_all_requests_have_ended_or_its_setting_changes() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=20, overlap_depth=0))
    first = engine.stats().new_token_ratio
    engine.step(arrived(0, 3, max_new=4))
    while (plan := engine.step(LaneReady(0)).launched()) is not None:
        decays = engine.stats().new_token_ratio
        assert (decays < first) == (plan.mode == "decode")
        engine.step(BatchFinished(0, plan.batch_id, bytes(4)))
    assert engine.stats().new_token_ratio == first
    engine.step(ControlRequested(0, 1, SetState("schedule_conservativeness", 0.5)))
    assert engine.stats().new_token_ratio == first / 2
