"""The bubble timer: by hand on a run small enough to draw, then against the simulator's metrics of one run."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lockstep.runtime", reason="the GPU runtime is not installed")

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import (
    BatchFinished,
    LaneReady,
    RequestArrived,
    RequestFinished,
    RequestRejected,
    TokenRuns,
)
from lockstep.runtime.bubbles import BubbleTimer, DeviceTime
from lockstep.sim.metrics.fold import MetricsFold


class Run:
    """Passes the events of a run to a timer."""

    def __init__(self) -> None:
        self.timer = BubbleTimer()

    def arrive(self, at_us: int, samples: int = 1) -> None:
        event = RequestArrived(
            at_us, request_id=0, prompt=TokenRuns((0, 4)), max_new_tokens=1, parallel_samples=samples
        )
        self.timer.fold(event, Step())

    def end(self, at_us: int) -> None:
        ended = RequestFinished(at_us, 0, "stop", 1, 0)
        self.timer.fold(LaneReady(at_us), Step(decided=[ended]))

    def ran(self, started_us: int, finished_us: int, noticed_us: int, *, ends: bool = False) -> None:
        decided: Any = [RequestFinished(noticed_us, 0, "stop", 1, 0)] if ends else []
        self.timer._in_flight += 1  # as a launch before
        self.timer.fold(BatchFinished(noticed_us, 0, b"", started_us, finished_us), Step(decided=decided))


def test_time_without_a_batch_while_a_request_waits_is_a_bubble() -> None:
    run = Run()
    run.arrive(100)  # 100 .. 150 and 200 .. 230 idle
    run.ran(150, 200, 205)
    run.ran(230, 300, 310, ends=True)  # and 10 more until its end was detected
    assert run.timer.read() == DeviceTime(work_us=210, busy_us=120, bubble_us=90)
    run.arrive(1000, samples=2)
    run.ran(1000, 1100, 1100)
    run.end(1100)
    assert run.timer.read().bubble_us == 90
    run.end(1150)
    assert run.timer.read() == DeviceTime(work_us=360, busy_us=220, bubble_us=140)
    assert run.timer.read().bubble_share == 140 / 360


def test_requests_that_an_earlier_generation_left_open_are_counted() -> None:
    """Their ends made the number of open requests negative, and two samples that followed ended the engine."""
    run = Run()
    run.timer.resume(1, 100)
    run.ran(150, 200, 205, ends=True)
    assert run.timer.read() == DeviceTime(work_us=105, busy_us=50, bubble_us=55)
    run.arrive(1000, samples=2)
    run.end(1010)
    run.end(1020)
    assert run.timer.read().work_us == 125


def test_a_batch_that_outlives_its_requests_is_busy_and_no_bubble() -> None:
    """Dead rows: launched before it was known that the request had ended."""
    run = Run()
    run.arrive(0)
    run.ran(0, 50, 50)
    run.end(60)
    run.ran(50, 100, 100)
    assert run.timer.read() == DeviceTime(work_us=60, busy_us=100, bubble_us=0)


def test_what_runs_is_no_bubble_before_it_is_known_how_long_it_ran() -> None:
    run = Run()
    run.arrive(0)
    run.ran(10, 50, 55)
    run.timer._in_flight += 1
    run.timer.fold(LaneReady(5_000), Step())
    assert run.timer.read() == DeviceTime(work_us=50, busy_us=40, bubble_us=10)


def test_nothing_but_rejections_is_no_work() -> None:
    timer = BubbleTimer()
    event = RequestArrived(7, request_id=0, prompt=TokenRuns((0, 4)), max_new_tokens=1)
    timer.fold(event, Step(decided=[RequestRejected(7, 0, "too_long", "")]))
    assert timer.read() == DeviceTime(0, 0, 0)
    assert timer.read().bubble_share is None


@pytest.mark.parametrize("overlap_depth", [0, 2])
def test_it_agrees_with_the_metrics(overlap_depth: int) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    from tests.support.small_runtime import SmallRuntime

    runtime = SmallRuntime(overlap_depth=overlap_depth, max_running_requests=3)
    for wave in range(4):
        for number in range(5):
            runtime.submit([wave, number, 3], 2 + 3 * number)
        runtime.run()
    timer, fold = BubbleTimer(), MetricsFold()
    for event, step in runtime.steps:
        timer.fold(event, step)
        fold.observe(event, step)
    device = fold.result().summary["device"]
    found = timer.read()
    assert found.busy_us == device["busy_us"] > 0
    assert found.bubble_us == device["bubble_us"] > 0
    assert found.bubble_share == pytest.approx(device["bubble_share"], abs=1e-6)
