"""Lanes of simulated engines: no answer ends before `quiet_until_us`, and an engine is advanced about once per end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.core.cluster.router import IN_TURN, RouterConfig
from lockstep.core.contract.events import RequestId
from lockstep.core.journal.sinks import NoJournal
from lockstep.host.router_journal import NoRouterJournal
from lockstep.sim.cluster.lane import EngineLane
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.routed import Cluster
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import assemble_cluster
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
    assert watched.advances < 1.6 * 300


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
