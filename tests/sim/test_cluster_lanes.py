"""Lanes of simulated engines: no answer ends before `quiet_until_us`, and an engine is advanced about once per end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from lockstep.core.cluster.router import IN_TURN, ROUTER_POLICIES, RouterConfig
from lockstep.core.contract.events import RequestId
from lockstep.core.journal.sinks import NoJournal
from lockstep.host.router_journal import NoRouterJournal
from lockstep.sim.cluster.lane import EngineLane
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.routed import Cluster
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import ClusterSetup, assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.scenario.scenario import Scenario

LOAD = "gen:n=60,rate=40,input=lognormal:500:0.9,output=lognormal:30:0.9"
TURNS = "gen:n=60,rate=20,turns=uniform:1:4,think=fixed:30ms,input=uniform:20:900,output=uniform:1:40"
BASE = Scenario(model="qwen3-8b", gpu="h100", workload=LOAD, engine="none")
PRIORITY = {"schedule_policy": "priority", "retraction_policy": "priority"}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "an engine of the catalogue": {"engine": "vllm"},
    "one batch in flight": {"settings": {"overlap_depth": 0}},
    "mixed batches in small chunks": {"settings": {"batching": "mixed", "chunked_prefill_size": 64}},
    "few running": {"settings": {"max_running_requests": 3}},
    "few pages": {"settings": {"pages": 120, "reserve": "on_demand", "context_tokens_max": 1024}},
    "priorities": {"settings": {**PRIORITY, "pages": 200, "enable_priority_preemption": True}},
    "timeouts": {"settings": {"max_running_requests": 2, "waiting_timeout_us": 200_000}},
    "a short queue": {"settings": {"max_running_requests": 2, "max_queued_requests": 1}},
    "several decodes in a launch": {"settings": {"decode_steps_per_launch": 4}},
    "short prompts only": {"settings": {"max_input_tokens": 500}},
    "answers cut by the context": {"settings": {"context_tokens_max": 600, "truncate_input": "left"}},
    "ends at any token": {"max_new_tokens": 300},
    "one token": {"workload": "gen:n=60,rate=80,input=uniform:1:900,output=fixed:1"},
    "no token": {"workload": "gen:n=60,rate=80,input=uniform:1:900,output=none"},
    "bursts": {"workload": "gen:n=80,rate=inf,input=uniform:1:900,output=uniform:1:40"},
    "turns": {"workload": TURNS},
    "a closed loop": {"workload": TURNS, "concurrency": 20, "limit": 60},
    "drafts": {"settings": {"speculative_method": "eagle", "num_speculative_tokens": 3}},
    "blocks": {"model": "qwen3-0.6b", "diffusion_block": 16},
    "samples": {"samples": "0.6x2..5"},
    "adapters": {"adapters": "6:zipf", "settings": {"max_loras": 3}},
    "a host tier": {"workload": TURNS, "settings": {"pages": 1200}, "tiers": {"host_cache_gb": 40.0}},
    "windows": {"model": "gpt-oss-120b", "tp": 2, "workload": TURNS, "tiers": {"hybrid_memory": "on"}},
    "states": {"model": "qwen3-next-80b-a3b", "tp": 4, "workload": TURNS, "tiers": {"hybrid_memory": "on"}},
    "stages": {"pp": 4},
    "two streams": {"pdmux": True},
}


class Watched:
    """The ends of a run, each compared with the promise of its lane, and the number of advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: Counter[bool] = Counter()  # by whether the end came before the promise
        self.advances = 0
        on_end, advance = Cluster._on_end, EngineLane.advance

        def ended(cluster: Cluster, engine: int, request_id: RequestId, now_us: int, answered: bool) -> None:
            self.ends[now_us < cluster.lanes[engine].quiet_until_us] += 1
            on_end(cluster, engine, request_id, now_us, answered)

        def advanced(lane: EngineLane, until_us: float) -> None:
            self.advances += 1
            advance(lane, until_us)

        monkeypatch.setattr(Cluster, "_on_end", ended)
        monkeypatch.setattr(EngineLane, "advance", advanced)


def run(scenario: Scenario, replicas: int, policy: str = "least_requests") -> ClusterRun:
    cluster = ClusterScenario(base=scenario, replicas=replicas, router=RouterConfig(policy=policy))  # type: ignore[arg-type]
    return simulate_cluster(assemble_cluster(cluster, {}), compiled=False)


@pytest.mark.parametrize("feature", FEATURES)
def test_no_answer_ends_before_its_engine_may_end_one(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    done = run(replace(BASE, **FEATURES[feature]), replicas=3)
    requests = done.data.summary["requests"]
    assert requests["arrived"] >= 60
    assert not requests["unfinished"]
    assert watched.ends[True] == 0
    assert watched.ends[False] >= 60


@pytest.mark.parametrize("policy", ["round_robin", "least_tokens", "prefix_affinity"])
def test_an_engine_is_advanced_hardly_more_often_than_answers_end(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    workload = "gen:n=300,rate=100,input=lognormal:800:0.75,output=lognormal:60:0.6"
    done = run(replace(BASE, workload=workload), replicas=16, policy=policy)
    assert done.data.summary["requests"]["completed"] == 300
    assert watched.advances < 1.2 * 300


# ------------------------------------------------------------------------------------------------- ahead of the router


def with_labels(setup: ClusterSetup, sessions: int) -> ClusterSetup:
    """Give every n-th turn the same label, which is its session for a router."""
    turns = setup.workload.turns
    turns = replace(turns, label_number=turns.label_number % sessions)
    engines = tuple(replace(one, workload=replace(one.workload, turns=turns)) for one in setup.engines)
    return replace(setup, engines=engines)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes
)
@given(
    policy=st.sampled_from([policy for policy in ROUTER_POLICIES if policy not in IN_TURN]),
    engines=st.sampled_from([2, 5, 9]),
    hop_us=st.sampled_from([0, 1, 700, 40_000]),
    prefixes=st.sampled_from(["", "shared_prefix=300x4,", "shared_prefix=300x30,"]),
    output=st.sampled_from(["fixed:1", "uniform:1:40", "lognormal:60:0.9"]),
    rate=st.sampled_from(["20", "200", "inf"]),
    scheduler=st.sampled_from(
        [
            {},
            {"overlap_depth": 0},
            {"batching": "mixed", "chunked_prefill_size": 128},
            {"pages": 90, "reserve": "on_demand", "context_tokens_max": 1024},
            {"max_running_requests": 3, "waiting_timeout_us": 400_000},
            {"max_running_requests": 2, "max_queued_requests": 1},
        ]
    ),
    sessions=st.sampled_from([3, 40]),
    seed=st.integers(0, 5),
)
@example(  # an engine whose last end was on its way to the router was advanced past a request that it got
    policy="least_requests",
    engines=3,
    hop_us=40_000,
    prefixes="",
    output="lognormal:60:0.9",
    rate="20",
    scheduler={},
    sessions=40,
    seed=11,
)
def test_engines_that_are_ahead_of_the_router_do_what_they_do_beside_it(
    tmp_path_factory: pytest.TempPathFactory,
    policy: str,
    engines: int,
    hop_us: int,
    prefixes: str,
    output: str,
    rate: str,
    scheduler: dict[str, Any],
    sessions: int,
    seed: int,
) -> None:
    """Every journal, of engines and router, to the byte, compared with advancing every engine at every arrival."""
    workload = f"gen:n=80,rate={rate},{prefixes}input=uniform:1:600,output={output}"
    base = replace(BASE, workload=workload, seed=seed, settings=scheduler)
    router = RouterConfig(policy=policy, load_floor=2)  # type: ignore[arg-type]
    scenario = ClusterScenario(base=base, replicas=engines, router=router, hop_us=hop_us)
    setup = with_labels(assemble_cluster(scenario, {}), sessions)
    lazy, eager = tmp_path_factory.mktemp("lazy"), tmp_path_factory.mktemp("eager")
    first = simulate_cluster(setup, folder=lazy)
    second = simulate_cluster(setup, folder=eager, eager=True)
    assert files(lazy) == files(eager)
    assert first.data.summary == second.data.summary
    assert first.routed_by_reason == second.routed_by_reason


@pytest.mark.parametrize("policy", ["least_requests", "least_tokens", "session_sticky", "prefix_affinity"])
def test_ends_are_known_before_the_router_receives_them(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end is found once its engine can run there; other engines get the arrivals before."""
    ahead_us: list[int] = []
    ended = Cluster._on_end

    def watched(cluster: Cluster, engine: int, request_id: RequestId, now_us: int, answered: bool) -> None:
        ahead_us.append(now_us - cluster.arrivals.next_us)
        ended(cluster, engine, request_id, now_us, answered)

    monkeypatch.setattr(Cluster, "_on_end", watched)
    workload = "gen:n=300,rate=100,input=lognormal:800:0.75,output=lognormal:60:0.6"
    run(replace(BASE, workload=workload), replicas=16, policy=policy)
    assert sum(us > 0 for us in ahead_us) > 100


def test_all_engines_are_at_one_time_when_it_is_asked_whether_to_give_up() -> None:
    """The question sees no end of the future: it gets the same answers as without leads."""

    def asked(eager: bool) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        def give_up(cluster: Any) -> bool:
            ended = sum(lane.host.ended for lane in cluster.lanes)
            seen.append((cluster.arrivals.arrived, ended))
            return False

        workload = "gen:n=400,rate=100,input=lognormal:800:0.75,output=lognormal:60:0.6"
        scenario = ClusterScenario(base=replace(BASE, workload=workload), replicas=16, router=RouterConfig())
        simulate_cluster(assemble_cluster(scenario, {}), compiled=False, eager=eager, give_up=give_up)
        return seen

    assert len(asked(eager=False)) > 5
    assert asked(eager=False) == asked(eager=True)


@pytest.mark.parametrize("policy", IN_TURN)
@pytest.mark.parametrize("workload", [LOAD.replace("n=60", "n=300"), FEATURES["bursts"]["workload"]])
def test_requests_that_are_routed_ahead_take_what_they_take_in_order(policy: str, workload: str) -> None:
    setup = assemble_cluster(
        ClusterScenario(base=replace(BASE, workload=workload), replicas=3, router=RouterConfig(policy=policy)),  # type: ignore[arg-type]
        {},
    )
    ahead, in_order = simulate_cluster(setup, compiled=False), simulate_cluster(setup, eager=True)
    assert ahead.data.summary == in_order.data.summary
    assert ahead.routed_by_reason == in_order.routed_by_reason
    for one, other in zip(ahead.engines, in_order.engines, strict=True):
        assert (one.batches, one.data.summary) == (other.batches, other.data.summary)
        for name, column in one.data.requests.columns().items():
            expected = other.data.requests.columns()[name]
            assert np.array_equal(column, expected, equal_nan=column.dtype.kind == "f"), name


def test_engines_of_an_interrupted_run_that_was_routed_ahead_are_at_the_same_time() -> None:
    base = replace(BASE, workload=LOAD.replace("n=60", "n=400"))
    setup = assemble_cluster(ClusterScenario(base=base, replicas=3, router=RouterConfig(policy="round_robin")), {})
    cluster = Cluster(
        setup,
        [NoJournal()] * 3,
        NoRouterJournal(),
        on_finish=lambda ended: setattr(cluster, "stop_requested", cluster.stop_requested or ended > 100),
    )
    cluster.run()
    done = cluster.result(stopped_early=False, began_s=0.0)
    assert done.interrupted
    assert 100 < done.data.summary["requests"]["completed"] < 200
    ends_us = [one.data.span_us[1] for one in done.engines]
    assert max(ends_us) - min(ends_us) < 300_000 < min(ends_us)
