"""Queue, prefill and decode times of a request equal those of the engine's own journal."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("zmq", reason="needs lockstep-api")

from lockstep.api.observability.request_times import EngineTimes, RequestTimes
from lockstep.api.processes.wire import ITERATION_TOKENS
from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    BatchFinished,
    LaneReady,
    ObservedEvent,
    RequestAdmitted,
    RequestArrived,
    TokenIds,
)
from lockstep.core.scheduler.engine import Engine


def test_times_go_from_arrival_to_admission_to_tokens() -> None:
    times = EngineTimes()
    engine = Engine(SchedConfig(pages=64, page_size=16, max_running_requests=1))
    prompt = TokenIds(np.arange(20, dtype=np.int32).tobytes())

    def fold(event: ObservedEvent) -> Step:
        step = engine.step(event)
        times.observe(event, step)
        return step

    for number in range(2):
        fold(RequestArrived(1_000 * number, request_id=number, prompt=prompt, max_new_tokens=1))
    for number in range(2):  # the second waits for the row of the first
        plan = fold(LaneReady(5_000 + 10_000 * number)).launched()
        assert plan is not None
        tokens = np.ones(1, np.int32)
        fold(BatchFinished(9_000 + 10_000 * number, batch_id=plan.batch_id, tokens=tokens.tobytes()))
    assert times.take(0, 9_000, 9_000) == RequestTimes(5_000, 4_000, 0)
    assert times.take(1, 19_000, 19_500) == RequestTimes(14_000, 4_000, 500)
    assert times.take(1, 1, 1) == RequestTimes()  # removed
    assert sum(times.batch_counts) == 2
    assert times.batch_tokens == 20 + 4  # the second finds a page of the first, and computes the rest
    assert times.batch_counts[ITERATION_TOKENS.index(32)] == 1


def test_a_request_that_was_never_admitted_has_no_times() -> None:
    times = EngineTimes()
    arrived = RequestArrived(5, request_id=3, prompt=TokenIds(b"\0\0\0\0"), max_new_tokens=1, parallel_samples=2)
    times.observe(arrived, Step())
    assert times.take(3, -1, -1) == RequestTimes()
    admitted = RequestAdmitted(9, request_id=4, row=0, cached_tokens=0, new_tokens=1, waited_us=4)
    times.observe(LaneReady(9), Step(decided=[admitted]))
    assert times.take(4, -1, -1) == RequestTimes(4)
