"""The queue in front of the router: one place per request, fair shares, requests of a lost engine are sent again."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from lockstep.core.cluster import dispatch
from lockstep.core.cluster.dispatch import DispatchConfig, Dispatcher, DispatchFact, ProbeAnswered
from lockstep.core.cluster.router import (
    ROUTER_POLICIES,
    EngineChanged,
    EngineShare,
    LoadReported,
    RequestEnded,
    RequestOffered,
    RequestRouted,
    RouterConfig,
)
from lockstep.core.contract.errors import ConfigError, ContractError

TENANTS = ("a", "b", "c")


class Told:
    """A dispatcher with short methods for its facts; ids and times count up."""

    def __init__(self, engines: int = 2, **config: object):
        shares = (EngineShare(),) * engines
        self.dispatcher = Dispatcher(DispatchConfig(**config), RouterConfig(), shares)  # type: ignore[arg-type]
        self.time_us = 0
        self.next_id = 0

    def step(self, kind: type, **values: object) -> list[tuple[int, int | None, str]]:
        self.time_us += 1
        routed = self.dispatcher.step(kind(time_us=self.time_us, **values))
        return [(each.request_id, each.engine, each.reason) for each in routed]

    def offer(self, tenant: str = "", tokens: int = 100, **more: object) -> list[tuple[int, int | None, str]]:
        self.next_id += 1
        return self.step(RequestOffered, request_id=self.next_id - 1, prompt_tokens=tokens, tenant=tenant, **more)

    def end(self, request_id: int, output_tokens: int = 10) -> list[tuple[int, int | None, str]]:
        return self.step(RequestEnded, request_id=request_id, output_tokens=output_tokens)

    def change(self, engine: int, state: str) -> list[tuple[int, int | None, str]]:
        return self.step(EngineChanged, engine=engine, state=state)

    def probe(self, engine: int, well: bool) -> list[tuple[int, int | None, str]]:
        return self.step(ProbeAnswered, engine=engine, well=well)


# ------------------------------------------------------------------------------------------------------------ examples


def test_without_a_limit_no_request_waits() -> None:
    told = Told()
    assert [told.offer() for _ in range(3)] == [[(0, 0, "policy")], [(1, 1, "policy")], [(2, 0, "policy")]]
    assert told.dispatcher.waiting == 0


def test_beyond_the_limit_requests_wait_and_go_as_soon_as_another_ends() -> None:
    told = Told(open_max=1)
    assert told.offer() + told.offer() == [(0, 0, "policy"), (1, 1, "policy")]
    assert told.offer() == [(2, None, "waits")]
    assert told.end(1) == [(2, 1, "policy")]
    assert told.end(2) == []


def test_a_tenant_that_floods_the_line_delays_itself() -> None:
    told = Told(engines=1, open_max=1)
    for _ in range(4):
        told.offer("flood")
    told.offer("polite")
    assert told.end(0) == [(4, 0, "policy")]  # `flood` had received the larger share


def test_shares_are_by_weight() -> None:
    told = Told(engines=1, open_max=1, tenant_weights={"heavy": 3.0})
    for _ in range(12):
        told.offer("heavy"), told.offer("light")
    going = []
    running = 0
    for _ in range(16):
        (sent,) = told.end(running, output_tokens=256)
        running = sent[0]
        going.append(running % 2 == 0)
    assert 11 <= sum(going) <= 13  # of 16, three quarters


def test_tenants_that_are_forgotten_change_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    def many_tenants() -> Dispatcher:
        told = Told(engines=1, open_max=1)
        told.offer("t0")
        running = 0
        for number in range(80):
            told.offer(f"t{number // 2}"), told.offer(f"t{number % 5}")
            for _ in range(1 + number % 3):
                ((running, _, _),) = told.end(running, output_tokens=256)  # as many as expected
        return told.dispatcher

    kept = many_tenants()
    monkeypatch.setattr(dispatch, "TENANTS_REMEMBERED", 1)
    forgetful = many_tenants()
    assert len(forgetful.given) < len(kept.given)
    assert forgetful.digest == kept.digest


def test_the_digest_covers_the_engine_that_was_chosen() -> None:
    digests = set()
    for engine in (0, 1):
        told = Told(engines=2)
        assert told.offer(named=engine) == [(0, engine, "named")]
        digests.add(told.dispatcher.digest)
    assert len(digests) == 2


def test_a_full_queue_drops_the_newest_of_the_tenant_with_the_most_waiting() -> None:
    told = Told(engines=1, open_max=1, waiting_max=2)
    told.offer("a"), told.offer("a"), told.offer("a")
    assert told.offer("b") == [(2, None, "line_full"), (3, None, "waits")]
    assert told.offer("b") == [(4, None, "line_full")]
    assert told.dispatcher.waiting == 2


def test_a_client_that_leaves_the_line_is_gone() -> None:
    told = Told(engines=1, open_max=1)
    told.offer(), told.offer(), told.offer()
    assert told.end(1) == []
    assert told.end(0) == [(2, 0, "policy")]


def test_by_priority_the_highest_of_a_tenant_goes_first_and_shares_do_not_change() -> None:
    told = Told(engines=1, open_max=1, order="priority", waiting_max=6)
    told.offer("a")
    for priority in (1, None, 5, 1, 5):
        told.offer("a", priority=priority)
    told.offer("b")  # a tenant that has received nothing yet
    assert told.offer("a", priority=0) == [(2, None, "line_full"), (7, None, "waits")]  # a tenant without one goes last
    order = [told.end(request)[0][0] for request in (0, 6, 3, 5, 1, 4)]
    assert order == [6, 3, 5, 1, 4, 7]


def test_what_an_engine_lost_is_sent_again_first_and_not_for_ever() -> None:
    told = Told(open_max=2, resends_max=1)
    for _ in range(5):
        told.offer()
    assert told.dispatcher.router.open_requests == [2, 2]
    assert told.change(0, "down") == [(0, None, "waits"), (2, None, "waits")]
    assert told.end(1) == [(0, 1, "policy")]
    assert told.change(1, "down") == [(0, None, "lost"), (3, None, "waits")]
    assert told.change(0, "up") == [(3, 0, "policy"), (2, 0, "policy")]
    assert told.dispatcher.waiting == 1


def test_no_tenant_pays_for_work_that_was_lost() -> None:
    told = Told(open_max=1)
    told.offer("unlucky", tokens=1_000)
    charged = dict(told.dispatcher.given)
    assert charged["unlucky"] > 1_000
    assert told.change(0, "down") == [(0, 1, "policy")]
    assert told.dispatcher.given == charged


def test_without_an_engine_up_requests_wait() -> None:
    told = Told(engines=1)
    told.change(0, "down")
    assert told.offer() == [(0, None, "waits")]
    assert told.change(0, "up") == [(0, 0, "policy")]


def test_probes_remove_and_restore_an_engine_unless_it_was_taken_down() -> None:
    told = Told(unhealthy_after=2, healthy_after=2)
    told.offer()
    assert told.probe(0, well=False) == []
    told.probe(0, well=True)  # successful probes in a row
    assert told.probe(0, well=False) == []
    assert told.probe(0, well=False) == [(0, 1, "policy")]
    assert told.dispatcher.router.state[0] == "down"
    told.probe(0, well=True), told.probe(0, well=True)
    assert told.dispatcher.router.state[0] == "up"
    told.change(0, "down")
    told.probe(0, well=True), told.probe(0, well=True)
    assert told.dispatcher.router.state[0] == "down"


def test_a_request_that_names_an_engine_that_cannot_take_it_is_over() -> None:
    told = Told()
    assert told.offer(named=7) == [(0, None, "unknown_engine")]
    told.change(1, "draining")
    assert told.offer(named=1) == [(1, None, "engine_not_up")]
    assert told.offer(named=0) == [(2, 0, "named")]
    assert told.dispatcher.waiting == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"open_max": 0}, "`open_max` must be a whole number of at least 1, got `0`"),
        ({"waiting_max": -1}, "`waiting_max` must be a whole number of at least 0"),
        ({"tenant_weights": {"a": 0.0}}, "`tenant_weights`: that of `a` must be above 0"),
        ({"healthy_after": 0}, "`healthy_after` must be a whole number"),
        ({"order": "lifo"}, "`order` must be fcfs or priority, got `lifo`"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DispatchConfig(**config)  # type: ignore[arg-type]


def test_facts_that_cannot_be_are_refused() -> None:
    told = Told()
    told.offer()
    for impossible in (
        RequestOffered(time_us=9, request_id=0, prompt_tokens=1),
        RequestOffered(time_us=0, request_id=1, prompt_tokens=1),
        RequestEnded(time_us=0, request_id=0),
        EngineChanged(time_us=9, engine=2, state="up"),
        EngineChanged(time_us=9, engine=-1, state="down"),
        ProbeAnswered(time_us=9, engine=2, well=True),
    ):
        with pytest.raises(ContractError):
            told.dispatcher.step(impossible)


# ----------------------------------------------------------------------------------------------------------- invariants


@st.composite
def histories(draw: st.DrawFn) -> tuple[DispatchConfig, RouterConfig, tuple[EngineShare, ...], list[tuple[int, int]]]:
    config = DispatchConfig(
        open_max=draw(st.sampled_from([None, 1, 2, 3])),
        waiting_max=draw(st.sampled_from([0, 3, 1000])),
        tenant_weights=draw(st.sampled_from([{}, {"a": 3.0}, {"a": 0.5, "b": 2.0}])),
        resends_max=draw(st.integers(0, 2)),
        unhealthy_after=1,
        order=draw(st.sampled_from([UNSET, "fcfs", "priority"])),
    )
    router = RouterConfig(policy=draw(st.sampled_from(ROUTER_POLICIES)), load_floor=1, block_tokens=1)
    shares = tuple(
        EngineShare(weight=w) for w in draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4))
    )
    kinds = st.tuples(st.sampled_from("ooooooeeeeercpl"), st.integers(0, 10**6))
    return config, router, shares, draw(st.lists(kinds, max_size=80))  # type: ignore[return-value]


@settings(max_examples=120, deadline=None)
@given(histories())
def test_every_request_is_in_one_place(
    history: tuple[DispatchConfig, RouterConfig, tuple[EngineShare, ...], list[tuple[str, int]]],
) -> None:
    """Each request is open on one engine that was up when it was sent, waits, or has ended.

    No request waits while there is room, the bounds hold, tries are counted, and equal facts give equal decisions.
    """
    config, router_config, shares, kinds = history
    dispatcher, again = (Dispatcher(config, router_config, shares) for _ in range(2))
    router = dispatcher.router
    where: dict[int, int | str] = {}  # by request: engine, "waits" or "over"
    sends: dict[int, int] = {}
    offered: dict[int, str] = {}
    for time_us, (kind, number) in enumerate(kinds, 1):
        fact = fact_of(kind, number, time_us, len(offered), len(shares), where)
        if fact is None:
            continue
        if isinstance(fact, RequestOffered):
            offered[fact.request_id] = fact.tenant
            where[fact.request_id] = "new"
        if isinstance(fact, RequestEnded) and where.get(fact.request_id) != "over":
            where[fact.request_id] = "over"
        lost = {request: place for request, place in where.items() if isinstance(place, int)}
        routed = dispatcher.step(fact)
        assert again.step(fact) == routed
        down = [engine for engine, state in enumerate(router.state) if state == "down"]
        for request, engine in lost.items():
            if engine in down:
                where[request] = "lost"
        for each in routed:
            follow(each, where, sends, router.state, config)
        assert "lost" not in where.values()
        assert "new" not in where.values()
        open_on = {request: place for request, place in where.items() if isinstance(place, int)}
        assert {request: at.engine for request, at in router.open.items()} == open_on
        waiting = sorted(request for request, place in where.items() if place == "waits")
        in_lines = [offer.request_id for line in dispatcher.queues.values() for offer in line]
        assert sorted(in_lines) == waiting
        assert dispatcher.waiting == len(waiting) <= config.waiting_max
        if waiting:
            assert dispatcher.room <= 0
        for tenant, line in dispatcher.queues.items():
            assert line
            assert all(offer.tenant == tenant for offer in line)
            if config.order == "priority":
                ranks = [-(10**9) if offer.priority is None else offer.priority for offer in line]
                assert ranks == sorted(ranks, reverse=True)
    assert dispatcher.digest == again.digest


def fact_of(
    kind: str, number: int, time_us: int, ids: int, engines: int, where: dict[int, int | str]
) -> DispatchFact | None:
    engine = number % engines
    match kind:
        case "o":
            named = [None, None, None, engine, engines][number % 5]
            return RequestOffered(
                time_us=time_us, request_id=ids, prompt_tokens=number % 90 + 1, tenant=TENANTS[number % 3],
                session=str(number % 4), prefix=(number % 3,), named=named, room=number,
                half=("", "prefill", "decode")[number % 3],  # type: ignore[arg-type]
                priority=(None, 0, 1, -1)[number // 3 % 4],
            )  # fmt: skip
        case "e":
            alive = [request for request, place in where.items() if place != "over"]
            return RequestEnded(time_us=time_us, request_id=alive[number % len(alive)] if alive else 0, output_tokens=9)
        case "r":
            return LoadReported(
                time_us=time_us,
                engine=engine,
                measured_us=time_us - number % 5,
                requests=number % 7,
                tokens=number % 99,
            )
        case "c":
            state = ("up", "draining", "down")[number // 7 % 3]
            return EngineChanged(time_us=time_us, engine=engine, state=state)  # type: ignore[arg-type]
        case "p":
            return ProbeAnswered(time_us=time_us, engine=engine, well=number % 3 > 0)
    return RequestEnded(time_us=time_us, request_id=number)  # unknown to the dispatcher


def follow(
    routed: RequestRouted, where: dict[int, int | str], sends: dict[int, int], state: list[str], config: DispatchConfig
) -> None:
    """Take in one decision: its request must be new or waiting."""
    request = routed.request_id
    assert where[request] in ("new", "lost", "waits"), routed
    if routed.engine is not None:
        assert state[routed.engine] == "up"
        where[request] = routed.engine
        sends[request] = sends.get(request, 0) + 1
        assert sends[request] <= config.resends_max + 1
    elif routed.reason == "waits":
        where[request] = "waits"
    else:
        assert routed.reason in ("line_full", "lost", "unknown_engine", "engine_not_up")
        if routed.reason == "lost":
            assert sends[request] == config.resends_max + 1
        where[request] = "over"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 500)), min_size=20, max_size=60),
    st.integers(1, 3),
    st.sampled_from([{}, {"a": 4.0}, {"a": 0.25, "b": 2.0}]),
    st.randoms(use_true_random=False),
)
def test_tenants_that_wait_all_the_time_are_given_alike(
    offers: list[tuple[str, int]], open_max: int, weights: dict[str, float], random: object
) -> None:
    """Over any time in which two tenants both wait, their shares per weight differ by at most one request of each."""
    dispatcher = Dispatcher(DispatchConfig(open_max=open_max, tenant_weights=weights), RouterConfig(), (EngineShare(),))
    router = dispatcher.router
    given_to = dict.fromkeys(TENANTS, 0.0)
    since: dict[tuple[str, str], tuple[float, float]] = {}  # shares of both at the time when both began to wait
    most = dict.fromkeys(TENANTS, 0.0)
    coming = iter(enumerate(offers))
    time_us = 0
    left = True
    while left or router.open:
        time_us += 1
        arrival = next(coming, None) if not router.open or random.random() < 0.6 else None  # type: ignore[attr-defined]
        left = arrival is not None or (left and bool(router.open))
        if arrival is not None:
            request, (tenant, tokens) = arrival
            fact: DispatchFact = RequestOffered(
                time_us=time_us, request_id=request, prompt_tokens=tokens, tenant=tenant
            )
        elif router.open:
            request = random.choice(sorted(router.open))  # type: ignore[attr-defined]
            expected = router.open[request].tokens - offers[request][1]
            fact = RequestEnded(time_us=time_us, request_id=request, output_tokens=expected)  # no error to correct
        else:
            break
        for routed in dispatcher.step(fact):
            if routed.engine is None:
                continue
            tenant = offers[routed.request_id][0]
            cost = router.open[routed.request_id].tokens / weights.get(tenant, 1.0)
            given_to[tenant] += cost
            most[tenant] = max(most[tenant], cost)
        for one, other in combinations(TENANTS, 2):
            if one in dispatcher.queues and other in dispatcher.queues:
                before = since.setdefault((one, other), (given_to[one], given_to[other]))
                apart = (given_to[one] - before[0]) - (given_to[other] - before[1])
                assert abs(apart) <= most[one] + most[other] + 1e-6
            else:
                since.pop((one, other), None)
