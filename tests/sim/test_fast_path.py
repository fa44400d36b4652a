"""A plain run in machine code equals the core's run: launches, messages, gauges, intervals and ends of random runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from lockstep.core.cluster.router import ROUTER_POLICIES, EngineShare, RouterConfig
from lockstep.core.contract.config import SchedConfig
from lockstep.core.requests import budget
from lockstep.sim.cluster.fast import unsupported_by_cluster
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import ClusterSetup
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import BatchShape, CostModel, CpuModel, Duration
from lockstep.sim.cost.calibration import Correction
from lockstep.sim.fast import fast_path, kernel, machine_code
from lockstep.sim.host import ports
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.run import fast_runs
from lockstep.sim.run import simulate as simulate_module
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.fast_runs import fast_run_of
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.turns import TurnLabel, Turns, TurnsBuilder, TurnStart

pytest.importorskip("numba")

CONTEXT_TOKENS = 1_000


@cache
def base() -> Setup:
    scenario = Scenario(model="llama-3.1-8b", gpu="a100", workload="gen:rate=10", limit=1, settings={"pages": 64})
    return assemble(scenario, {})


def turns_of(arrival_us: np.ndarray, prompts: np.ndarray, outputs: np.ndarray) -> Turns:
    """Requests without shared prefixes."""
    builder = TurnsBuilder()
    for index, (at, prompt, output) in enumerate(
        zip(*(c.tolist() for c in (arrival_us, prompts, outputs)), strict=True)
    ):
        first = 2 * CONTEXT_TOKENS * index
        builder.append(
            TurnStart(at),
            TurnLabel("r{0}", index),
            prompt=(first, prompt),
            prompt_tokens=prompt,
            output_tokens=output,
            output_first_token=first + prompt,
            tenant=f"t{index % 3}",
        )
    return builder.build()


def setup_of(turns: Turns, sched: Mapping[str, Any], **scenario: Any) -> Setup:
    setup = base()
    return replace(
        setup,
        scenario=replace(setup.scenario, **scenario),
        workload=replace(setup.workload, turns=turns),
        config=SchedConfig(**sched),
    )


@st.composite
def schedulers(draw: st.DrawFn) -> dict[str, Any]:
    """Settings that plain runs follow, and some that have no effect on them."""
    page_size = draw(st.sampled_from((1, 4, 16)))
    radix_cache = draw(st.booleans())
    of_the_cache = {
        "same_step_sharing": draw(st.booleans()),
        "prefix_deduplication": draw(st.sampled_from(("off", "defer", "last"))),
        "waiting_prefix_refresh": draw(st.sampled_from((0, 3))),
    }
    return {
        "page_size": page_size,
        "pages": draw(st.integers(1_000, 12_000)) // page_size + 1,
        "radix_cache": radix_cache,
        "batching": draw(st.sampled_from(("prefill_first", "mixed", "running_first"))),
        "reserve": draw(st.sampled_from(("ratio", "on_demand", "full"))),
        "max_running_requests": draw(st.sampled_from((1, 3, 8, 64))),
        "chunked_prefill_size": draw(st.sampled_from((None, 32, 100, 512))),
        "max_prefill_tokens": draw(st.sampled_from((32, 200, 4_096))),
        "chunk_unit": draw(st.sampled_from(("page", "token"))),
        "overlap_depth": draw(st.integers(0, 2)),
        "prefill_max_requests": draw(st.sampled_from((None, 1, 3))),
        "prefill_decode_interval": draw(st.sampled_from((0, 0, 1, 5))),
        "schedule_conservativeness": draw(st.sampled_from((0.3, 1.0, 1.4))),
        "context_tokens_max": CONTEXT_TOKENS,
        **(of_the_cache if radix_cache else {}),
    }


class Load(NamedTuple):
    """Random requests, from idle to overloaded."""

    seed: int
    requests: int
    prompt_tokens_max: int
    output_tokens_max: int
    gap_us: float
    bursts: float  # the share that arrives together with the previous one
    round_to: int  # prompt lengths are multiples of this, so that decodes open pages together
    warm_up: int

    def setup(self, sched: Mapping[str, Any]) -> Setup:
        rng = np.random.default_rng(self.seed)
        prompts = rng.integers(1, self.prompt_tokens_max, self.requests, endpoint=True)
        prompts = -(-prompts // self.round_to) * self.round_to
        outputs = rng.integers(1, self.output_tokens_max, self.requests, endpoint=True)
        gaps = rng.exponential(self.gap_us, self.requests)
        gaps[rng.random(self.requests) < self.bursts] = 0.0
        turns = turns_of(np.cumsum(gaps).astype(np.int64), prompts, outputs)
        return setup_of(turns, sched, warm_up=self.warm_up)


LOADS = st.builds(
    Load,
    seed=st.integers(0, 2**32 - 1),
    requests=st.integers(1, 120),
    prompt_tokens_max=st.sampled_from((8, 100, 400)),
    output_tokens_max=st.sampled_from((1, 12, 150)),
    gap_us=st.sampled_from((1.0, 3e3, 3e4, 3e5)),
    bursts=st.sampled_from((0.0, 0.5, 0.95)),
    round_to=st.sampled_from((1, 16)),
    warm_up=st.sampled_from((0, 10)),
)


def assert_equal(ours: RunData, theirs: RunData) -> None:
    """All measures of two runs are equal."""
    assert ours.summary == theirs.summary
    for mine, other in ((ours.requests, theirs.requests), (ours.series, theirs.series)):
        for name, column in other.columns().items():
            np.testing.assert_array_equal(mine.columns()[name], column, name)
    for mine, other in ((ours.batches, theirs.batches), (ours.cpu, theirs.cpu)):
        for name, column in other.columns().items():
            np.testing.assert_array_equal(mine.columns()[name], column, name)
    np.testing.assert_array_equal(ours.itl_us.values, theirs.itl_us.values)
    np.testing.assert_array_equal(ours.itl_us.counts, theirs.itl_us.counts)
    assert ours.span_us == theirs.span_us


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures are taken over every few batches."""
    for name, rows in (("FLUSH_ROWS", 20), ("FLUSH_ROWS_MIN", 5), ("FLUSH_ROWS_ALL", 40), ("GAPS", 1)):
        monkeypatch.setattr(fast_path, name, rows)


@pytest.mark.usefixtures("small_portions")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LOADS, schedulers())
def test_every_number_of_a_fast_path_run_is_the_cores(load: Load, sched: dict[str, Any]) -> None:
    setup = load.setup(sched)
    assert fast_runs.unsupported_by(setup) == ""
    theirs = simulate(setup, compiled=False)
    ours = simulate(setup, compiled=True)
    assert_equal(ours.data, theirs.data)
    assert (ours.batches, ours.metrics()["requests"]) == (theirs.batches, theirs.metrics()["requests"])


ROUTERS = st.builds(
    RouterConfig,
    policy=st.sampled_from(ROUTER_POLICIES),
    load_bound=st.sampled_from((1.0, 1.25, 3.0)),
    load_floor=st.sampled_from((0, 8)),
)
ENGINES = st.lists(st.tuples(schedulers(), st.sampled_from((1.0, 1.0, 0.3, 2.5))), min_size=1, max_size=5)
HOPS = st.sampled_from((0, 0, 700, 200_000))


@pytest.mark.usefixtures("small_portions")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LOADS, ENGINES, ROUTERS, HOPS, st.sampled_from((None, 0, 2, 10**9)))
def test_every_number_of_a_plain_cluster_is_the_cores(
    load: Load, engines: list[tuple[dict[str, Any], float]], router: RouterConfig, hop_us: int, patience: int | None
) -> None:
    setups = [load.setup(sched) for sched, _ in engines]
    scenario = ClusterScenario(base=setups[0].scenario, replicas=len(setups), router=router, hop_us=hop_us)
    shares = tuple(EngineShare(weight=weight) for _, weight in engines)
    setup = ClusterSetup(
        scenario=scenario,
        engines=tuple(replace(one, workload=setups[0].workload) for one in setups),
        shares=shares,
    )
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
        assert mine.batches == other.batches
    for name in ("routed_by_reason", "stopped_early", "never_sent", "interrupted"):
        assert getattr(ours, name) == getattr(theirs, name), name


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


class Jittery:
    """A cost model with random batch times."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def batch_us(self, shape: BatchShape) -> Duration:
        mean_us = self.cost.batch_us(shape).mean_us
        return Duration(mean_us, 0.2 * mean_us)

    def describe(self) -> dict[str, Any]:
        return self.cost.describe()


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


def test_a_run_that_lacks_pages_is_left_to_the_core() -> None:
    setup = steady(sched={"pages": 60, "reserve": "on_demand", "context_tokens_max": 900})
    assert simulate_module._run_compiled(setup, None, always=True) is None
    ours, theirs = (simulate(setup, compiled=compiled) for compiled in (True, False))
    assert theirs.data.summary["scheduler"]["retractions"] > 0
    assert_equal(ours.data, theirs.data)


def test_an_interrupted_run_reports_its_results_so_far() -> None:
    setup = steady(3_000)
    metrics = MetricsFold(kv_pages=setup.config.pages)
    plain = fast_run_of([setup], [metrics], on_finish=lambda ended: setattr(plain, "stop_requested", ended > 500))
    assert plain.run()
    data = metrics.result()
    counts = data.summary["requests"]
    assert 500 < counts["completed"] < 3_000
    assert counts["unfinished"] == counts["arrived"] - counts["completed"] > 0
    assert 1 <= (data.batches.finished_us < 0).sum() <= 2  # in flight
    whole = simulate(setup, compiled=False).data
    done = data.requests.finish_reason == "length"
    for name, column in data.requests.columns().items():
        np.testing.assert_array_equal(column[done], whole.requests.columns()[name][: len(done)][done], name)


def test_a_run_that_turns_out_not_to_be_plain_while_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = steady(sched={"pages": 60, "reserve": "on_demand", "context_tokens_max": 900})
    metrics = MetricsFold(kv_pages=setup.config.pages)
    plain = fast_run_of([setup], [metrics])
    advance = machine_code.load()

    def asked_to_end(address: int, took_us: float) -> int:
        why = advance(address, took_us)
        plain.stop_requested |= why == kernel.LOST
        return why

    monkeypatch.setattr(machine_code, "load", lambda: asked_to_end)
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
    "schedule_policy": "lof",
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


def test_prompts_that_begin_alike_are_left_to_the_core() -> None:
    turns = turns_of(np.array([0, 10]), np.array([40, 40]), np.array([3, 3]))
    alike = replace(turns, run_first_token=np.zeros(2, np.int32))
    assert fast_runs.unsupported_by(setup_of(alike, {"pages": 64})) == "shared prefixes"
    assert fast_runs.unsupported_by(setup_of(alike, {"pages": 64, "radix_cache": False})) == ""
    assert fast_runs.unsupported_by(setup_of(turns, {"pages": 64})) == ""


def test_a_tenant_that_is_refused_is_left_to_the_core() -> None:
    setup = steady(20)
    turns = replace(setup.workload.turns, tenants=("t0", "a\0b", "t2"))
    setup = replace(setup, workload=replace(setup.workload, turns=turns))
    assert fast_runs.unsupported_by(setup) == "tenants"


def test_the_kernel_has_the_cores_constants() -> None:
    assert kernel.CLIP_MAX_NEW_TOKENS == budget.CLIP_MAX_NEW_TOKENS
    assert kernel.NEVER_US == ports.NEVER_US
    assert list(kernel.SHAPE.names)[:-2] == list(BatchShape.__struct_fields__)[:7]


def test_requests_that_are_turned_away_or_cut_are_left_to_the_core() -> None:
    turns = turns_of(np.array([0, 10]), np.array([40, 600]), np.array([3, 500]))
    for sched in (
        {"pages": 2_000, "context_tokens_max": 1_000},
        {"pages": 60},
        {"pages": 2_000, "max_input_tokens": 500},
    ):
        assert fast_runs.unsupported_by(setup_of(turns, sched)) == "prompts that do not fit"


def test_machine_code_is_loaded_once_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    plain = simulate_module.fast_run_of
    monkeypatch.setattr(fast_path, "_requests", 0)
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
