"""The check of an idle engine: when it is due, what it costs, and what it reports."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from lockstep.core import Engine, SchedConfig
from lockstep.core.contract.events import RequestArrived, TokenRuns
from lockstep.host.idle_check import DUTY, QUIET_S, IdleCheck


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def made(interval_s: float = 10.0, check: Callable[[Engine], None] | None = None) -> tuple[Clock, IdleCheck]:
    clock, engine = Clock(), Engine(SchedConfig(pages=8))
    return clock, IdleCheck(engine, interval_s, clock_s=clock, **({} if check is None else {"check": check}))


def looked(clock: Clock, idle: IdleCheck, seconds: float, events: int) -> int:
    """Look every quarter of a second, as the loop of a host does; return the checks so far."""
    until_s = clock.now_s + seconds
    while clock.now_s < until_s:
        idle.look(events)
        clock.now_s += 0.25
    return idle.counts.checks


def test_a_state_is_checked_once_it_is_quiet_and_not_again() -> None:
    clock, idle = made()
    idle.look(5)
    assert idle.counts.checks == 0
    assert looked(clock, idle, 2 * QUIET_S, 5) == 1
    assert looked(clock, idle, 1000.0, 5) == 1, "nothing has changed"
    assert looked(clock, idle, 2.0, 6) == 2


def test_an_engine_with_an_event_at_every_look_is_never_quiet() -> None:
    clock, idle = made()
    for events in range(100):
        idle.look(events)
        clock.now_s += QUIET_S / 2
    assert idle.counts.checks == 0


def test_checks_keep_their_interval() -> None:
    clock, idle = made(interval_s=30.0)
    counts = [looked(clock, idle, 10.0, events) for events in range(9)]
    assert counts == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_slow_check_is_followed_by_a_long_pause() -> None:
    clock, _ = made()

    def slow(engine: Engine) -> None:
        clock.now_s += 0.5

    idle = IdleCheck(Engine(SchedConfig(pages=8)), 1.0, clock_s=clock, check=slow)
    assert looked(clock, idle, 5.0, 1) == 1
    assert looked(clock, idle, 0.5 * DUTY - 10.0, 2) == 1
    assert looked(clock, idle, 20.0, 2) == 2
    assert idle.counts.seconds == 1.0


def test_a_broken_invariant_is_counted_and_logged_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    clock, engine = Clock(), Engine(SchedConfig(pages=8))
    idle, told = IdleCheck(engine, 10.0, clock_s=clock), list[int]()
    idle.checked = lambda: told.append(idle.counts.failures)
    assert looked(clock, idle, 1.0, 1) == 1
    engine.memory.pool.alloc(2)  # a leak
    with caplog.at_level(logging.ERROR, "lockstep.host"):
        assert looked(clock, idle, 20.0, 2) == 2
    assert (idle.counts.failures, told) == (1, [0, 1])
    assert "breaks an invariant" in caplog.text
    assert "journal verify" in caplog.text


def test_a_state_with_open_requests_can_be_checked_too() -> None:
    clock, engine = Clock(), Engine(SchedConfig(pages=8))
    engine.step(RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((1, 16)), max_new_tokens=4))
    idle = IdleCheck(engine, 10.0, clock_s=clock)
    assert looked(clock, idle, 1.0, 1) == 1
    assert idle.counts.failures == 0
