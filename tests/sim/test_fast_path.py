"""A run on the fast path equals the core's run: launches, messages, gauges, intervals and ends of random runs.

Each test of equality runs the kernel interpreted, and as machine code if numba is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, currently_in_test_context, given, settings, target
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from lockstep.core.cluster.router import ROUTER_POLICIES, EngineShare, RouterConfig
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.profiles import PROFILES, profile_settings
from lockstep.core.requests.rules import LPM_FALLBACK_WAITING
from lockstep.core.scheduler.ordering import REFRESHED_REQUESTS
from lockstep.sim.cluster.fast import run_compiled, unsupported_by_cluster
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import ClusterSetup
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import BatchShape, CpuModel
from lockstep.sim.cost.calibration import Correction
from lockstep.sim.fast import fast_path, machine_code, state
from lockstep.sim.host import ports
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.run import fast_runs
from lockstep.sim.run import simulate as simulate_module
from lockstep.sim.run.fast_runs import fast_run_of
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.workload.turns import Turns
from tests.support.fast_path_cases import (
    CONTEXTS,
    LONG_CONTEXTS,
    Case,
    ClusterCase,
    Jittery,
    Load,
    base,
    cases,
    cluster_cases,
    differing,
    rare_events,
    turns_of,
)

WAYS = ("interpreted", "machine code") if find_spec("numba") is not None else ("interpreted",)
SHORT_CONTEXTS = st.sampled_from((40, 300))  # of runs by the interpreter if machine code has those of all lengths
CONTEXTS_OF = {"interpreted": SHORT_CONTEXTS if len(WAYS) > 1 else CONTEXTS, "machine code": CONTEXTS}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the kernel runs: by Python's interpreter, and as machine code if numba is installed."""
    if request.param == "interpreted":
        monkeypatch.setattr(machine_code, "is_available", lambda: False)
    name: str = request.param
    return name


def setup_of(turns: Turns, sched: Mapping[str, Any], **scenario: Any) -> Setup:
    setup = base()
    return replace(
        setup,
        scenario=replace(setup.scenario, **scenario),
        workload=replace(setup.workload, turns=turns),
        config=SchedConfig(**{"context_tokens_max": 1_000, **sched}),
    )


def assert_equal(ours: RunData, theirs: RunData) -> None:
    """All measures of two runs are equal."""
    assert differing(ours, theirs) == ""


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures are taken over every few batches."""
    for name, rows in (("FLUSH_ROWS", 20), ("FLUSH_ROWS_MIN", 5), ("FLUSH_ROWS_ALL", 40), ("GAPS", 1)):
        monkeypatch.setattr(fast_path, name, rows)


def compare(case: Case) -> None:
    """The fast path and the core simulate a case alike."""
    setup = case.setup()
    assert fast_runs.unsupported_by(setup) == ""
    theirs, ours = simulate(setup, compiled=False), simulate(setup, compiled=True)
    if currently_in_test_context():
        for name, count in rare_events(theirs.data):
            target(float(np.log1p(count)), label=name)
    assert_equal(ours.data, theirs.data)
    for name in ("batches", "clamped", "rejected", "never_sent"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.metrics()["requests"] == theirs.metrics()["requests"]


@pytest.mark.usefixtures("small_portions")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_number_of_a_fast_path_run_is_the_cores(way: str, data: st.DataObject) -> None:
    compare(data.draw(cases(CONTEXTS_OF[way])))


@pytest.mark.usefixtures("way")
def test_an_order_of_duplicates_is_made_again_after_a_refresh_of_their_prefixes() -> None:
    """Found by `make fast-path-campaign`, seed 7: the core kept an order although prefixes had changed."""
    sched = {"page_size": 32, "pages": 17, "batching": "running_first", "max_prefill_tokens": 32}
    sched |= {"schedule_conservativeness": 0.001, "context_tokens_max": 1_000, "prefix_deduplication": "last"}
    sched |= {"waiting_prefix_refresh": 1, "max_running_requests": 33, "prefill_decode_interval": 1}
    load = Load(999, 47, 568, 1, 1.0, 0.0, 16, 10, sharing="documents")
    compare(Case({**sched, "chunked_prefill_size": 578}, load))


@settings(max_examples=8)
@given(cases(LONG_CONTEXTS))
def test_every_number_of_a_run_with_long_outputs_is_the_cores(case: Case) -> None:
    """Outputs above CLIP_MAX_NEW_TOKENS, which the reserve by ratio clips to that many. By the fastest way there is."""
    compare(case)


@pytest.mark.parametrize("batching", ["prefill_first", "mixed", "running_first"])
@pytest.mark.parametrize("split", [False, True])
def test_long_outputs_are_reserved_as_the_limit_of_a_reserve(way: str, batching: str, split: bool) -> None:
    """Outputs of 5,000 to 7,000 tokens in a pool that holds them only if they are clipped at admission."""
    if way == "interpreted" and len(WAYS) > 1 and (batching != "mixed" or not split):
        pytest.skip("machine code, which takes a thirtieth of the time, runs this one")
    rng = np.random.default_rng(1)
    turns = turns_of(np.arange(6) * 40_000, np.full(6, 200), rng.integers(5_000, 7_000, 6))
    sched = {
        "pages": 12_000 // 16,
        "context_tokens_max": 16_384,
        "batching": batching,
        "chunked_prefill_size": 64 if split else 8_192,
        "schedule_conservativeness": 0.4,
    }
    setup = setup_of(turns, sched)
    theirs, ours = simulate(setup, compiled=False), simulate(setup, compiled=True)
    assert_equal(ours.data, theirs.data)


@pytest.mark.usefixtures("small_portions")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from((None, 0, 2, 10**9)))
def test_every_number_of_a_cluster_is_the_cores(way: str, data: st.DataObject, patience: int | None) -> None:
    short = len(WAYS) > 1 and way == "interpreted"
    setup = data.draw(cluster_cases(300 if short else 1_000)).setup()
    assert unsupported_by_cluster(setup) == ""
    slos = (Slo.parse("ttft_p50=30ms"), Slo.parse("e2e_p90=300ms"))

    def run(compiled: bool) -> ClusterRun:
        asked: list[list[int]] = []

        def give_up(cluster: Any) -> bool:
            asked.append([sum(counts) for counts in zip(*(f.late(slos) for f in cluster.client_metrics), strict=True)])
            return patience is not None and sum(asked[-1]) > patience

        made = simulate_cluster(setup, compiled=compiled, give_up=None if patience is None else give_up)
        questions.append(asked)
        return made

    questions: list[list[list[int]]] = []
    theirs, ours = run(compiled=False), run(compiled=True)
    assert questions[0] == questions[1][-len(questions[0]) :]  # after those of a run that was found not to be plain
    assert_equal(ours.data, theirs.data)
    for mine, other in zip(ours.engines, theirs.engines, strict=True):
        assert_equal(mine.data, other.data)
        for name in ("batches", "clamped", "rejected"):
            assert getattr(mine, name) == getattr(other, name), name
    for reason, count in theirs.routed_by_reason.items():
        target(float(np.log1p(count)), label=reason)
    for name in ("routed_by_reason", "stopped_early", "never_sent", "interrupted"):
        assert getattr(ours, name) == getattr(theirs, name), name


def cluster_of(setup: Setup, replicas: int = 1, **router: Any) -> ClusterSetup:
    scenario = ClusterScenario(base=setup.scenario, replicas=replicas, router=RouterConfig(**router))
    return ClusterSetup(scenario=scenario, engines=(setup,) * replicas, shares=(EngineShare(),) * replicas)


def chains(sessions: int, turns: int, **scenario: Any) -> Setup:
    """Sessions of several turns, each prompt of which goes on where the answer before it ended."""
    load = Load(11, sessions * turns, 300, 40, 20_000.0, 0.0, 1, 0, sharing="sessions")
    return setup_of(load.turns([SchedConfig(context_tokens_max=1_000)]), {"pages": 120}, **scenario)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("concurrency", [None, 9])
@pytest.mark.parametrize("policy", ROUTER_POLICIES)
def test_sessions_of_a_cluster_follow_every_policy(policy: str, concurrency: int | None) -> None:
    """Requests follow answers of any engine; with more of them than the workload has, its copies follow."""
    setup = chains(20, 4, concurrency=concurrency, limit=150 if concurrency else None)
    cluster = cluster_of(setup, 3, policy=policy, block_tokens=16, load_floor=2)
    assert unsupported_by_cluster(cluster) == ""
    theirs, ours = simulate_cluster(cluster, compiled=False), run_compiled(cluster, None, None, always=True)
    assert ours is not None
    assert ours.routed_by_reason == theirs.routed_by_reason
    if policy in ("prefix_affinity", "session_sticky"):
        assert len(theirs.routed_by_reason) > 1
    assert_equal(ours.data, theirs.data)
    for mine, other in zip(ours.engines, theirs.engines, strict=True):
        assert_equal(mine.data, other.data)


@pytest.mark.usefixtures("way")
def test_a_request_that_is_rejected_by_a_busy_lane_is_followed_once_the_lane_is_free() -> None:
    """The router's time ran backwards: the end had the time of the arrival, which the lane took in later."""
    cpu, sched = CpuModel(20_000.0, 50.0, 9_000.0, 20.0, 3_000.0), {"pages": 200, "context_tokens_max": 1_000}
    for seed in range(6):
        load = Load(seed, 80, 300, 20, 30_000.0, 0.0, 1, 0, sharing="sessions", oversized=0.4)
        engines = [({**sched, "chunked_prefill_size": 64}, EngineShare())]
        setup = ClusterCase(load, engines, RouterConfig(), 0, cpu, 1.0, 12, 120).setup()
        alone = simulate(setup.engines[0], compiled=False)
        assert alone.rejected.total() > 0
        for compiled in (False, True):
            np.testing.assert_array_equal(
                simulate_cluster(setup, compiled=compiled).data.requests.arrival_us, alone.data.requests.arrival_us
            )


def test_requests_that_follow_answers_at_once_are_left_to_the_core() -> None:
    setup = chains(20, 4, concurrency=9, limit=150)
    calibration = replace_struct(setup.calibration, correction=Correction())
    setup = replace(setup, calibration=calibration)
    assert unsupported_by_cluster(cluster_of(setup)) == "answers without delay"
    scenario = replace(cluster_of(setup).scenario, hop_us=1)
    assert unsupported_by_cluster(replace(cluster_of(setup), scenario=scenario)) == ""


def test_blocks_of_more_copies_than_there_are_keys_are_left_to_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(chains(20, 4, concurrency=9, limit=300), 2, policy="prefix_affinity", block_tokens=16)
    assert run_compiled(cluster, None, None, always=True) is not None
    monkeypatch.setattr(fast_path, "BLOCK_KEYS_MAX", 1_000)
    assert run_compiled(cluster, None, None, always=True) is None


def test_sessions_that_a_router_may_forget_are_left_to_the_core() -> None:
    cluster = cluster_of(chains(20, 4), 2, policy="session_sticky", sessions_max=79)
    assert unsupported_by_cluster(cluster) == "sessions"


def test_prefixes_that_a_router_follows_are_left_to_the_core_if_equal_tokens_are_behind_different_ones() -> None:
    beginnings = [[200_000, 20], [300_000, 9, 200_000, 20]]
    turns = turns_of(np.array([0, 10]), np.array([40, 40]), np.array([3, 3]), beginnings)
    for sched in ({"pages": 64}, {"pages": 64, "radix_cache": False}):
        setup = setup_of(turns, sched)
        scenario = ClusterScenario(base=setup.scenario, replicas=1, router=RouterConfig(policy="prefix_affinity"))
        cluster = ClusterSetup(scenario=scenario, engines=(setup,), shares=(EngineShare(),))
        assert unsupported_by_cluster(cluster) == "prefixes at the router"


def steady(requests: int = 200, sched: Mapping[str, Any] = MappingProxyType({}), **scenario: Any) -> Setup:
    """Requests that keep an engine busy, and never lack pages."""
    rng = np.random.default_rng(7)
    arrival_us = np.cumsum(rng.exponential(20_000, requests)).astype(np.int64)
    turns = turns_of(arrival_us, rng.integers(1, 400, requests), rng.integers(1, 80, requests))
    return setup_of(turns, {"pages": 2_000, "max_running_requests": 64, **sched}, **scenario)


def compiled_run(setup: Setup) -> Run:
    run = simulate_module._run_compiled(setup, None, always=True)
    assert run is not None
    return run


def test_durations_that_are_drawn_are_drawn_alike() -> None:
    setup = steady()
    setup = replace(setup, cost=Jittery(setup.cost))
    assert_equal(compiled_run(setup).data, simulate(setup, compiled=False).data)
    cluster = ClusterSetup(
        scenario=ClusterScenario(base=setup.scenario, replicas=2), engines=(setup, setup), shares=(EngineShare(),) * 2
    )
    ours, theirs = (simulate_cluster(cluster, compiled=compiled) for compiled in (True, False))
    assert_equal(ours.data, theirs.data)


def test_a_front_end_and_a_lane_without_costs() -> None:
    setup = steady()
    calibration = replace_struct(setup.calibration, correction=Correction(frontend_us=1_500.4))
    for cpu in (CpuModel(), CpuModel(0.0, 0.0, 0.0, 0.0, 0.0), CpuModel(20_000.0, 3.3, 9_000.0, 2.7, 5_000.0)):
        one = replace(setup, calibration=calibration, cpu=cpu)
        assert_equal(compiled_run(one).data, simulate(one, compiled=False).data)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("policy", ["length", "newest"])
def test_a_run_that_lacks_pages(policy: str) -> None:
    kept = "cache" if policy == "newest" else "free"
    sched = {"pages": 60, "reserve": "on_demand", "context_tokens_max": 900, "retracted_kv": kept}
    setup = steady(sched={**sched, "retraction_policy": policy, "retracted_requeue": "front"})
    ours, theirs = (simulate(setup, compiled=compiled) for compiled in (True, False))
    assert theirs.data.summary["scheduler"]["retractions"] > 0
    assert_equal(ours.data, theirs.data)


@pytest.mark.usefixtures("small_portions")
@pytest.mark.parametrize("pages", [2_000, 60])
def test_an_interrupted_run_reports_its_results_so_far(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps between tokens are those of completed requests, also where requests are retracted and still open."""
    monkeypatch.setattr("lockstep.sim.fast.open_gaps.KEPT_ROWS", 50)
    setup = steady(3_000, {"pages": pages, "reserve": "on_demand", "context_tokens_max": 900}, warm_up=20)
    metrics = MetricsFold(kv_pages=setup.config.pages, warm_up=20)
    plain = fast_run_of([setup], [metrics], on_finish=lambda ended: setattr(plain, "stop_requested", ended > 500))
    assert plain.run()
    data = metrics.result()
    counts = data.summary["requests"]
    assert 480 < counts["completed"] < 2_900
    assert counts["unfinished"] == counts["arrived"] - counts["completed"] > 0
    assert 1 <= (data.batches.finished_us < 0).sum() <= 2  # in flight
    whole = simulate(setup, compiled=False).data
    done = data.requests.finish_reason == "length"
    assert data.itl_us.size == (data.requests.output_tokens[done] - 1).sum()
    assert data.itl_us.values[-1] == data.requests.itl_us_max[done & (data.requests.output_tokens > 1)].max()
    seconds = done & (data.requests.output_tokens > 1)
    last_us = (data.requests.tpot_us * (data.requests.output_tokens - 1))[seconds]
    assert data.itl_us.sum() == pytest.approx(last_us.sum())
    assert (pages == 2_000) == (data.summary["scheduler"]["retractions"] == 0)
    for name, column in data.requests.columns().items():
        np.testing.assert_array_equal(column[done], whole.requests.columns()[name][: len(done)][done], name)


@pytest.mark.usefixtures("small_portions")
def test_engines_of_an_interrupted_run_are_at_the_same_time() -> None:
    """By round robin requests are routed ahead, and an engine runs before the others."""
    setup = steady(3_000)
    metrics = [MetricsFold(kv_pages=setup.config.pages) for _ in range(3)]
    fast = fast_run_of([setup] * 3, metrics, on_finish=lambda ended: setattr(fast, "stop_requested", ended > 300))
    fast.route(RouterConfig(policy="round_robin"), [EngineShare()] * 3, 0, ())
    assert fast.run()
    datas = [one.result() for one in metrics]
    assert 300 < sum(data.summary["requests"]["completed"] for data in datas) < 2_500
    ends_us = [data.span_us[1] for data in datas]
    assert max(ends_us) - min(ends_us) < 1_000_000 < min(ends_us)


def test_a_run_for_figures_of_requests_alone_has_equal_ones() -> None:
    setup = steady()
    cluster = ClusterSetup(
        scenario=ClusterScenario(base=setup.scenario, replicas=2), engines=(setup, setup), shares=(EngineShare(),) * 2
    )
    pairs = [
        [simulate(setup, compiled=True, only_requests=only) for only in (True, False)],
        [run_compiled(cluster, None, None, always=True, only_requests=only) for only in (True, False)],
    ]
    for short, whole in pairs:
        assert short is not None
        assert whole is not None
        for part in ("requests", "latency", "throughput"):
            assert short.data.summary[part] == whole.data.summary[part]
        assert short.batches == whole.batches == len(whole.data.batches.batch_id) > len(short.data.batches.batch_id)


def test_a_run_without_its_batches_has_the_same_figures() -> None:
    setup = steady()
    cluster = ClusterSetup(
        scenario=ClusterScenario(base=setup.scenario, replicas=2), engines=(setup, setup), shares=(EngineShare(),) * 2
    )
    for whole in (simulate(setup, compiled=True), simulate_cluster(cluster, compiled=True)):
        less = whole.without_batches()
        assert len(less.data.batches.batch_id) == len(less.data.cpu.start_us) == 0
        assert less.energy() is not None
        assert less.metrics() == whole.metrics()
        assert less.remarks() == whole.remarks()


def lost(plain: Any) -> None:
    """Let the fast path find at its 50th batch that only the core can simulate its run."""
    advance, calls = plain._advance, []

    def lost(took_us: float) -> int:
        calls.append(took_us)
        return state.LOST if len(calls) > 50 else int(advance(took_us))

    plain._advance = lost


def test_a_run_that_only_the_core_can_simulate_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = steady()
    made: list[Any] = []

    def fast_run(*given: Any) -> Any:
        made.append(fast_run_of(*given))
        lost(made[-1])
        return made[-1]

    monkeypatch.setattr(simulate_module, "fast_run_of", fast_run)
    ours = simulate(setup, compiled=True)
    assert len(made) == 1
    assert_equal(ours.data, simulate(setup, compiled=False).data)


def test_a_run_that_only_the_core_can_simulate_while_it_is_interrupted() -> None:
    setup = steady()
    metrics = MetricsFold(kv_pages=setup.config.pages)
    plain = fast_run_of([setup], [metrics])
    lost(plain)
    advance = plain._advance

    def asked_to_end(took_us: float) -> int:
        why = advance(took_us)
        plain.stop_requested |= why == state.LOST
        return why

    plain._advance = asked_to_end  # type: ignore[method-assign]
    assert plain.run()
    counts = metrics.result().summary["requests"]
    assert counts["unfinished"] == counts["arrived"] - counts["completed"] > 0


def test_decodes_that_sit_out_and_a_head_that_waits_for_pages() -> None:
    """Both are rare in random loads: here decodes open pages of a small pool together."""
    skipped = waits = 0
    for seed, batching in product(range(40), ("mixed", "running_first")):
        rng, requests, page_size = np.random.default_rng(seed), 60, 16
        arrival_us = np.repeat(np.cumsum(rng.exponential(40_000, requests // 5)), 5).astype(np.int64)
        turns = turns_of(arrival_us, np.full(requests, page_size), rng.integers(1, 6, requests))
        sched = {"page_size": page_size, "pages": 12, "batching": batching, "max_running_requests": 64}
        setup = setup_of(turns, {**sched, "schedule_conservativeness": 0.01, "chunked_prefill_size": 64})
        ours = simulate_module._run_compiled(setup, None, always=True)
        if ours is not None:
            scheduler = ours.data.summary["scheduler"]
            skipped += scheduler["decodes_skipped"]
            waits += scheduler["admissions_deferred_by_reason"].get("pages", 0)
            assert_equal(ours.data, simulate(setup, compiled=False).data)
    assert skipped > 0
    assert waits > 0


# One setting each that rules a plain run out.
NOT_FOLLOWED: dict[str, Any] = {
    "radix_capacity_pages": 100,
    "max_queued_requests": 10,
    "waiting_timeout_us": 10**9,
    "running_timeout_us": 10**9,
    "schedule_policy": "dfs-weight",
    "chunk_target_us": 10_000,
    "decode_look_ahead": 2,
    "retract_every": 5,
    "decode_steps_per_launch": 2,
    "overlap_consecutive_prefills": False,
    "stream_interval": 4,
    "eos_token_ids": (3,),
    "max_loras": 2,
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_other_settings_are_left_to_the_core(name: str) -> None:
    setup = steady(20, {name: NOT_FOLLOWED[name]})
    assert fast_runs.unsupported_by(setup) == name
    assert simulate(setup, compiled=True).data.summary["requests"]["completed"] == 20


def test_settings_are_distinguished() -> None:
    known = set(SchedConfig.__struct_fields__)
    assert known > fast_runs.FOLLOWED
    assert known > fast_runs.NEVER_READ
    assert not fast_runs.FOLLOWED & fast_runs.NEVER_READ


def test_shared_prefixes_that_are_isolated_by_tenant_are_left_to_the_core() -> None:
    turns = turns_of(np.array([0, 10]), np.array([40, 40]), np.array([3, 3]), [[500, 20]] * 2)
    assert fast_runs.unsupported_by(setup_of(turns, {"pages": 64})) == ""
    reason = "shared prefixes with isolate_tenants"
    assert fast_runs.unsupported_by(setup_of(turns, {"pages": 64, "isolate_tenants": True})) == reason


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_profile_is_followed_with_shared_prefixes(profile: str) -> None:
    """Two documents that many prompts begin with, and requests without output among the others."""
    load = Load(5, 60, 700, 40, 4_000.0, 0.5, 1, 0, sharing="documents", prompts_only=0.1)
    sched = {**profile_settings(profile), "context_tokens_max": 1_000}
    sched["pages"] = 3_000 // sched.get("page_size", 16)
    case = Case({**sched, "chunked_prefill_size": 256, "max_running_requests": 12}, load)
    assert fast_runs.unsupported_by(case.setup()) == ""
    theirs, ours = (
        simulate(case.setup(), compiled=False),
        simulate_module._run_compiled(case.setup(), None, always=True),
    )
    assert ours is not None
    summary = theirs.data.summary
    assert summary["requests"]["by_finish_reason"]["computed"] > 0
    assert summary["cache"]["prompt_tokens_cached"] > 0
    if profile == "vllm":
        assert summary["scheduler"]["admissions_deferred_by_reason"]["prefix"] > 0
    assert_equal(ours.data, theirs.data)


def test_prompts_with_equal_tokens_behind_different_ones_are_left_to_the_core() -> None:
    """The prefix tree takes equal token ids for equal prefixes, which is true of chained ids only."""

    def reason(*beginning: int) -> str:
        runs = [[200_000, 20], [200_000, 20, 300_000, 9], list(beginning)]
        turns = turns_of(np.array([0, 10, 20]), np.array([40, 40, 40]), np.array([3, 3, 3]), runs)
        return fast_runs.unsupported_by(setup_of(turns, {"pages": 64}))

    assert reason(200_000, 20, 300_000, 5, 400_000, 4) == ""
    assert reason(200_000, 10, 200_010, 10) == ""  # one run in two parts
    for beginning in ((300_000, 20), (200_000, 5, 300_000, 4), (200_007, 9), (400_000, 3, 200_003, 5)):
        assert reason(*beginning) == "prompts with equal tokens behind different ones"


def test_a_tenant_that_is_refused_is_left_to_the_core() -> None:
    setup = steady(20)
    turns = replace(setup.workload.turns, tenants=("t0", "a\0b", "t2"))
    setup = replace(setup, workload=replace(setup.workload, turns=turns))
    assert fast_runs.unsupported_by(setup) == "tenants"


def test_the_kernel_has_the_cores_constants() -> None:
    assert state.NEVER_US == ports.NEVER_US
    assert LPM_FALLBACK_WAITING <= REFRESHED_REQUESTS  # `scratch` has a place for each
    assert list(state.SHAPE.names)[:-2] == list(BatchShape.__struct_fields__)[:7]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("sched", "rejected", "clamped"),
    [
        ({"pages": 2_000, "context_tokens_max": 1_000}, 0, 1),
        ({"pages": 30}, 2, 0),
        ({"pages": 2_000, "max_input_tokens": 480}, 2, 0),
    ],
)
def test_prompts_that_are_too_long_are_rejected_and_outputs_end_with_the_context(
    sched: dict[str, Any], rejected: int, clamped: int
) -> None:
    """A prompt without output needs no room behind it: with 30 pages of 16 tokens one of 480 tokens fits exactly."""
    prompts, outputs = np.array([40, 600, 480, 481]), np.array([3, 500, 0, 0])
    setup = setup_of(turns_of(np.array([0, 10, 20, 30]), prompts, outputs), sched)
    assert fast_runs.unsupported_by(setup) == ""
    theirs, ours = simulate(setup, compiled=False), simulate(setup, compiled=True)
    assert_equal(ours.data, theirs.data)
    assert (ours.clamped, ours.rejected.total()) == (theirs.clamped, theirs.rejected.total()) == (clamped, rejected)


def test_prompts_that_are_cut_are_left_to_the_core() -> None:
    turns = turns_of(np.array([0, 10]), np.array([40, 600]), np.array([3, 3]))
    setup = setup_of(turns, {"pages": 2_000, "max_input_tokens": 500, "truncate_input": "left"})
    assert fast_runs.unsupported_by(setup) == "prompts that are cut"


def test_sessions_of_a_closed_loop_suffice_even_if_the_longest_ones_go_on() -> None:
    """Requests of 40 sessions, a tenth of which are a hundred times as long as the others and break off at the end."""
    rng = np.random.default_rng(3)
    lengths = np.where(rng.random(40) < 0.1, 60, 1)
    after = np.arange(-1, lengths.sum() - 1)
    after[np.cumsum(lengths) - lengths] = -1
    prompts = np.where(np.append(after[1:], -1) < 0, np.where(after < 0, 20, 1_005), 20)
    turns = turns_of(np.zeros(len(after), np.int64), prompts, np.full(len(after), 12), None, after, after * 0)
    setup = setup_of(turns, {"pages": 2_000}, concurrency=8, limit=500)
    theirs, ours = simulate(setup, compiled=False), simulate(setup, compiled=True)
    assert theirs.data.summary["requests"]["rejected"] > 0
    assert_equal(ours.data, theirs.data)
    loop = fast_runs.loop_of(setup)
    assert loop is not None
    assert len(loop.rows) < 4_000


def test_machine_code_is_loaded_once_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    plain = simulate_module.fast_run_of
    monkeypatch.setattr(fast_path, "_requests", 0)
    monkeypatch.setattr(fast_path.machine_code, "is_stored", lambda: True)
    monkeypatch.setattr(simulate_module, "fast_run_of", lambda *given: runs.append(len(runs)) or plain(*given))
    half = steady(fast_path.REQUESTS_MIN // 2)
    simulate(half)
    assert runs == []
    simulate(half)
    assert runs == [0]
    simulate(half, compiled=False)
    simulate(steady(sched={"stream_interval": 2}))
    assert runs == [0]
    simulate(steady(5))  # it is loaded now
    assert runs == [0, 1]


def test_machine_code_is_compiled_for_many_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "_requests", 0)
    monkeypatch.setattr(fast_path.machine_code, "is_stored", lambda: False)
    assert not fast_path.pays(fast_path.REQUESTS_MIN)
    assert fast_path.pays(fast_path.REQUESTS_MIN_NOT_STORED - fast_path.REQUESTS_MIN)
