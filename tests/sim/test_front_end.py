"""Closed loops: the next request is sent after the answer has arrived, front end included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import CpuModel
from lockstep.sim.cost.calibration import Correction
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

FRONTEND_US = 150_000
THINK_US = 400_000
ONE_TURN = "gen:n=12,input=fixed:300,output=fixed:20"
CHAT = "gen:n=12,turns=fixed:4,input=fixed:300,output=fixed:20,think=fixed:400ms"


def behind_front_end(setup: Setup) -> Setup:
    """Return a setup whose requests take FRONTEND_US outside of the engine."""
    correction = Correction(frontend_us=FRONTEND_US)
    calibration = replace_struct(setup.calibration, engine="vllm", correction=correction)
    return replace(setup, calibration=calibration, cpu=CpuModel())


def setup_of(workload: str, concurrency: int | None) -> Setup:
    scenario = Scenario(model="qwen3-8b", gpu="h100", engine="none", workload=workload, concurrency=concurrency)
    return behind_front_end(assemble(scenario, {}))


def idle_us(data: RunData) -> np.ndarray:
    """Return the time between the end of each answer, as its client receives it, and the next request of its client.

    The run has one client, so its requests follow one another.
    """
    requests = data.requests
    ended_us = requests.arrival_us + requests.e2e_us
    return requests.arrival_us[1:] - ended_us[:-1]


def test_one_client_has_one_request_at_a_time() -> None:
    data = simulate(setup_of(ONE_TURN, 1)).data
    assert (idle_us(data) >= 0).all()
    assert (idle_us(data) <= 1).all()


def test_think_time_begins_when_the_answer_has_reached_its_client() -> None:
    single = simulate(setup_of(CHAT.replace("n=12", "n=4"), None)).data
    assert len(single.requests.arrival_us) == 4
    np.testing.assert_allclose(idle_us(single), THINK_US, atol=1)


@pytest.mark.parametrize("layout", ["routed", "interleaved"])
def test_clients_of_a_cluster_wait_for_the_front_end(layout: str) -> None:
    base = Scenario(model="qwen3-8b", gpu="h100", engine="none", workload=ONE_TURN, concurrency=1)
    if layout == "routed":
        cluster = assemble_cluster(ClusterScenario(base=base, replicas=2, hop_us=70), {})
    else:
        roles = (EngineGroup(count=1, gpu="h100", settings={"role": role}) for role in ("prefill", "decode"))
        cluster = assemble_cluster(ClusterScenario(base=base, engines=tuple(roles), hop_us=70), {})
    engines = tuple(behind_front_end(one) for one in cluster.engines)
    data = simulate_cluster(replace(cluster, engines=engines)).data
    assert len(data.requests.arrival_us) == 12
    assert (idle_us(data) >= 0).all()
    assert (idle_us(data) <= 1).all()


def test_users_of_an_engine_are_never_more_than_its_clients() -> None:
    """As clients see them, at most 64 requests of 64 clients are in progress."""
    data = simulate(setup_of("gen:n=640,input=fixed:300,output=fixed:20", 64)).data
    requests = data.requests
    order = np.argsort(requests.arrival_us, kind="stable")
    begun, ended = requests.arrival_us[order], np.sort(requests.arrival_us + requests.e2e_us)
    in_progress = np.arange(1, len(begun) + 1) - np.searchsorted(ended, begun, side="right")
    assert in_progress.max() <= 64


@pytest.mark.parametrize("form", ["{journal}", "mix:chat={journal};other=gen:n=3,rate=1,input=fixed:20,output=fixed:2"])
def test_turns_of_a_journal_wait_for_the_front_end_once(form: str, tmp_path: Path) -> None:
    """Times between turns in a journal have the front end in them, also where the journal is one source of a mix."""
    simulate(setup_of(CHAT.replace("n=12", "n=4"), None), folder=tmp_path / "run")
    data = simulate(setup_of(form.format(journal=tmp_path / "run"), None)).data
    requests = data.requests
    chat = requests.tenant != "other"
    ended_us = (requests.arrival_us + requests.e2e_us)[chat]
    np.testing.assert_allclose(requests.arrival_us[chat][1:] - ended_us[:-1], THINK_US, atol=1)
