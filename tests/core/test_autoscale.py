"""Replicas that are added and removed: the policy, and the invariants under any observed load."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.cluster.autoscale import SECOND_US, Autoscaler, LoadObserved, ScalingConfig, target_replicas
from lockstep.core.contract.errors import ConfigError, ContractError

PROMPT = {"target": 10.0, "maximum": 4, "interval_us": 10, "window_us": 0, "cooldown_us": 30, "start_us": 20}


class Told:
    def __init__(self, **more: Any):
        self.scaler = Autoscaler(ScalingConfig(**{**PROMPT, **more}))

    def at(self, time_us: int, *open_requests: int, **more: int) -> list[tuple[int, str]]:
        padded = tuple(open_requests) + (0,) * (len(self.scaler.state) - len(open_requests))
        observed = LoadObserved(time_us=time_us, open=padded, **{"open_tokens": 0, "arrived": 0, **more})
        return [(changed.engine, changed.state) for changed in self.scaler.step(observed)]


def test_the_policy_rounds_up_within_its_bounds_and_keeps_still_near_its_target() -> None:
    config = ScalingConfig(target=10.0, minimum=2, maximum=5)
    assert [target_replicas(config, load, 3) for load in (0, 19, 26, 30, 33, 34, 41, 90)] == [2, 2, 3, 3, 3, 4, 5, 5]


def test_a_replica_takes_requests_only_once_it_has_started_and_is_paid_for_from_the_decision_on() -> None:
    told = Told()
    assert told.at(5, 30) == []  # between two decisions
    assert told.at(10, 30) == []
    assert told.scaler.state == ["up", "starting", "starting", "off"]
    assert told.scaler.next_us == 20
    assert told.at(20, 30) == []
    assert told.at(30, 30) == [(1, "up"), (2, "up")]
    assert told.scaler.paid_us(30) == 30 + 20 + 20


def test_replicas_leave_late_the_emptiest_first_and_only_when_they_are_empty() -> None:
    told = Told(start_us=0)
    assert told.at(10, 30) == [(1, "up"), (2, "up")]
    for time_us in (20, 30, 40):
        assert told.at(time_us, 3, 2, 5) == []  # the cooldown looks back to the load before
    assert told.at(50, 3, 2, 5) == [(1, "draining"), (0, "draining")]
    assert told.at(52, 3, 0, 5) == [(1, "down")]
    assert told.at(60, 3, 0, 17) == [(0, "up")]  # needed again while it is still there
    assert told.scaler.paid_us(60) == 60 + 42 + 50


def test_one_that_is_not_needed_any_more_before_it_is_ready_is_given_back() -> None:
    told = Told(start_us=1_000, cooldown_us=0)
    told.at(10, 20)
    assert told.at(20, 3) == []  # the router has no record of it
    assert told.scaler.state == ["up", "off", "off", "off"]
    assert told.scaler.paid_us(100) == 100 + 10


def test_the_rate_is_that_of_the_window_and_tokens_are_counted() -> None:
    rate = Told(policy="arrival_rate", interval_us=SECOND_US, window_us=2 * SECOND_US, start_us=0, cooldown_us=0)
    assert rate.at(1 * SECOND_US, arrived=10) == []
    assert rate.at(2 * SECOND_US, arrived=50) == [(1, "up"), (2, "up")]  # 25 per second
    assert rate.at(3 * SECOND_US, arrived=50) == [(2, "down")]  # 20
    tokens = Told(policy="open_tokens", start_us=0)
    assert tokens.at(10, 1, open_tokens=31) == [(1, "up"), (2, "up"), (3, "up")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 0.0}, "`target` must be above 0 and finite, got `0.0`"),
        ({"minimum": 0}, "`minimum` must be a whole number from 1"),
        ({"minimum": 5}, "`maximum` must be a whole number from 5 to 1024, got `4`"),
        ({"policy": "mood"}, "`policy` must be one of open_requests"),
        ({"tolerance": 1.0}, "`tolerance` must be at least 0 and below 1"),
        ({"interval_us": 0}, "`interval_us` must be at least 1 us"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScalingConfig(**{**PROMPT, **settings})


def test_facts_that_cannot_be_are_refused() -> None:
    told = Told()
    told.at(10)
    with pytest.raises(ContractError, match="time ran backwards"):
        told.at(9)
    with pytest.raises(ContractError, match="load of 5 replicas, and there are 4"):
        told.at(11, 1, 1, 1, 1, 1)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 60), st.integers(0, 3)), max_size=40),
    st.integers(1, 3),
    st.sampled_from([0, 7, 25]),
    st.sampled_from([0, 30]),
)
def test_whatever_is_observed(
    moments: list[tuple[int, int, int]], minimum: int, start_us: int, cooldown_us: int
) -> None:
    """Bounds hold, no engine with requests is taken down, states follow each other as they may, time paid adds up."""
    config = ScalingConfig(**{**PROMPT, "minimum": minimum, "start_us": start_us, "cooldown_us": cooldown_us})
    scaler, again = Autoscaler(config), Autoscaler(config)
    seen = ["up" if replica < minimum else "down" for replica in range(4)]  # as a router sees them
    open_on = [0] * 4
    now_us, paid_us = 0, 0
    for wait_us, load, where in moments:
        paid_us += wait_us * sum(state != "off" for state in scaler.state)
        now_us += wait_us
        up = [replica for replica in range(4) if seen[replica] == "up"]
        open_on = [max(count - where, 0) for count in open_on]
        open_on[up[where % len(up)]] += load  # only an engine that is up is sent requests
        observed = LoadObserved(time_us=now_us, open=tuple(open_on), open_tokens=0, arrived=0)
        before = list(seen)
        changes = scaler.step(observed)
        assert again.step(observed) == changes
        for changed in changes:
            allowed = {"up": ("draining", "down"), "draining": ("up", "down"), "down": ("up",)}
            assert changed.state in allowed[seen[changed.engine]], (changed, before)
            if changed.state == "down":
                assert not open_on[changed.engine]
            seen[changed.engine] = changed.state
        names = {"off": "down", "starting": "down", "up": "up", "draining": "draining"}
        assert seen == [names[state] for state in scaler.state]
        assert minimum <= sum(state in ("up", "starting") for state in scaler.state) <= 4
        assert "up" in seen
        assert scaler.paid_us(now_us) == paid_us
        assert scaler.next_us > now_us
