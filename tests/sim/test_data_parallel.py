"""Ranks with schedulers of their own in the simulator: one pass for all, its cost, run folders, plans, refusals."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from simpy import Environment

from lockstep.core.cluster.router import LoadReported, RouterConfig
from lockstep.core.contract.commands import BatchPlan, Ranks
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.rank_settings import settings_of_rank
from lockstep.core.journal.replay import replay
from lockstep.host.router_check import verify_router
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cluster.data_parallel import Share, SharedPass, SimulatedRanks, pass_shape
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.run_folder import write_cluster_run
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import BatchShape
from lockstep.sim.cost.model import decode_shape, extend_shape
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.roofline import roofline_model
from lockstep.sim.host.speculation import ModelDraftCost
from lockstep.sim.host.stages import Stages
from lockstep.sim.results.batch_times import of_journal
from lockstep.sim.run.ranks import config_of_engine
from lockstep.sim.scenario.scenario import Scenario
from lockstep.tools.journal import journal
from tests.support.routed import facts

DELAYING: dict[str, Any] = {"prefill_delayer": True}


def cluster(workload: str = "gen:n=60,rate=30,input=lognormal:400:0.5,output=lognormal:40:0.5", **more: Any) -> Any:
    of_cluster = ("replicas", "hop_us", "router", "report_interval_us", "report_delay_us")
    own = {name: more.pop(name) for name in of_cluster if name in more}
    base = {"model": "qwen3-30b-a3b", "gpu": "h200", "tp": 4, "ep": 4, "attention_dp": 4, "profile": "sglang"}
    return ClusterScenario(base=Scenario(workload=workload, rank_schedulers=True, **{**base, **more}), **own)


def run(scenario: ClusterScenario, folder: Path | None = None, check_every: int = 0) -> ClusterRun:
    return simulate_cluster(assemble_cluster(scenario), folder=folder, check_every=check_every)


@pytest.fixture(scope="module")
def plain() -> ClusterRun:
    return run(cluster())


# ------------------------------------------------------------------------------------------------------ settings, costs


def test_ranks_share_out_what_the_engine_has() -> None:
    given = {"max_running_requests": 250, "chunked_prefill_size": 8192, "page_size": 16, "pages": 1000}
    staged = SchedConfig(**settings_of_rank({**given, "pp_size": 2, "pp_max_micro_batch_size": 90}, 8))
    assert (staged.pp_max_micro_batch_size, config_of_engine(staged).pp_max_micro_batch_size) == (12, 96)
    share = settings_of_rank(given, 8)
    assert (share["max_running_requests"], share["chunked_prefill_size"], share["pages"]) == (32, 1024, 125)
    assert share["max_prefill_tokens"] == 2048
    assert settings_of_rank({"chunked_prefill_size": 64, "page_size": 16}, 8)["chunked_prefill_size"] == 16
    whole = config_of_engine(SchedConfig(**share))
    assert (whole.max_running_requests, whole.chunked_prefill_size, whole.pages) == (256, 8192, 1000)
    assert not whole.shares_passes


MODEL = roofline_model(load_model("deepseek-v3"), load_gpu("h200"), Parallelism(tp=8, ep=8, attention_dp=8))


def agreed(extends: bool = False, padding: Any = "max_length") -> Ranks:
    return Ranks(0, (), padding, not extends, (), extends)


def us(shapes: list[BatchShape], ranks: Ranks) -> float:
    return MODEL.batch_us(pass_shape(MODEL, shapes, ranks)).mean_us


def test_even_ranks_cost_what_one_scheduler_that_spreads_its_rows_evenly_does() -> None:
    shapes = [decode_shape(16, 1000)] * 8
    assert us(shapes, agreed()) == pytest.approx(MODEL.batch_us(decode_shape(128, 1000)).mean_us)


def test_all_wait_for_the_slowest_rank() -> None:
    even = [decode_shape(16, 4000)] * 8
    skewed = [decode_shape(16, 25_000), *[decode_shape(16, 1000)] * 7]
    assert sum(shape.decode_context_tokens for shape in skewed) == sum(shape.decode_context_tokens for shape in even)
    assert us(skewed, agreed()) > us(even, agreed())
    extend = [extend_shape(4096), *[decode_shape(16, 1000)] * 7]
    both = [extend_shape(4096)] * 2 + [decode_shape(16, 1000)] * 6
    one, two = (us(shapes, agreed(True, "sum_length")) for shapes in (extend, both))
    assert one < two < 2 * one, "the attention of a second prompt is for nothing, its experts are not"


def test_padding_is_computed_too() -> None:
    uneven = [decode_shape(64, 500), *[BatchShape()] * 7]
    assert us(uneven, agreed(padding="max_length")) > us(uneven, agreed(padding="sum_length"))


# -------------------------------------------------------------------------------------------------------------- the run


def test_every_request_is_answered_in_full(plain: ClusterRun) -> None:
    assert plain.data.summary["requests"]["completed"] == 60
    assert len(plain.engines) == 4
    assert plain.setup.gpus == 4
    together = plain.data.summary["ranks"]
    assert {one.batches for one in plain.engines} == {together["passes"]}, "all ranks run every pass"
    assert together["exchanges"] >= together["passes"]
    assert 0 < together["extending_rank_share"] <= 1
    assert plain.data.requests.output_tokens.sum() == plain.setup.workload.turns.output_tokens.sum()


def test_ranks_run_their_passes_at_the_same_time(plain: ClusterRun) -> None:
    first, *others = [one.data.batches for one in plain.engines]
    for other in others:
        assert other.started_us.tolist() == first.started_us.tolist()
        assert other.finished_us.tolist() == first.finished_us.tolist()


def test_equal_seeds_give_equal_runs(plain: ClusterRun) -> None:
    assert run(cluster()).data.summary == plain.data.summary


def test_delayer_gathers_prompts_and_reports_what_it_did(plain: ClusterRun) -> None:
    delaying = run(cluster(settings=DELAYING))
    before, after = plain.data.summary["ranks"], delaying.data.summary["ranks"]
    assert before["prompts_by_situation"] == {}
    assert after["prompts_by_situation"]["mixed"] == after["passes_prompts_waited"] > 0
    assert after["passes_extending"] < before["passes_extending"]
    assert after["extending_rank_share"] > before["extending_rank_share"]
    assert after["graph_share"] > before["graph_share"]
    assert after["release_wait_us_max"] > 0
    assert 0 < after["ranks_joined"] <= 3 * after["prompts_released"]
    assert delaying.data.summary["latency"]["ttft_us_mean"] > plain.data.summary["latency"]["ttft_us_mean"]


def test_run_folder_replays_and_reports_how_to_get_it_again(tmp_path: Path) -> None:
    scenario = cluster(
        "gen:n=24,rate=40,turns=uniform:1:2,think=lognormal:30ms:1,shared_prefix=64x2,input=lognormal:200:0.5,"
        "output=lognormal:12:0.5",
        settings=DELAYING,
        replicas=2,
        hop_us=200,
    )
    made = run(scenario, tmp_path)
    write_cluster_run(tmp_path, made)
    assert len(made.engines) == 8
    verify_router(tmp_path)
    for engine in range(8):
        report = replay(tmp_path / "engines" / str(engine) / "journal")
        assert not report.unsealed
    verified = CliRunner().invoke(journal, ["verify", str(tmp_path)])
    assert verified.exit_code == 0, verified.output
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["ranks"]["ranks"] == 4
    assert [one["rank"] for one in metrics["about"]["engines"]] == [0, 1, 2, 3] * 2
    words = shlex.split(metrics["about"]["command"])
    assert "--rank-schedulers" in words
    assert "--prefill-delayer" in words
    again = CliRunner().invoke(simulate, [*words[2:], "--json", "--no-intervals"])
    assert json.loads(again.stdout)["latency"] == metrics["latency"]


def test_table_reports_what_ranks_did() -> None:
    words = "--model qwen3-30b-a3b --gpu h200 --tp 2 --ep 2 --attention-dp 2 --rank-schedulers --prefill-delayer"
    words += " --workload gen:n=12,rate=40,input=lognormal:200:0.5,output=lognormal:20:0.5 --no-intervals"
    shown = CliRunner().invoke(simulate, words.split())
    assert shown.exit_code == 0, shown.output
    assert "Passes of all ranks together; prompts waited in" in shown.stdout
    assert "rank 1" in shown.stdout
    assert "a scheduler and a prefix cache per rank" in shown.stdout


def test_closed_loop_goes_on_behind_each_answer() -> None:
    made = run(cluster("gen:n=30,input=lognormal:200:0.5,output=lognormal:10:0.5", concurrency=6, limit=30))
    assert made.data.summary["requests"]["completed"] == 30


@pytest.mark.parametrize("depth", [0, 2])
def test_every_overlap_runs(depth: int) -> None:
    made = run(cluster("gen:n=8,rate=40,output=lognormal:10:0.5", settings={"overlap_depth": depth}))
    assert made.data.summary["requests"]["completed"] == 8


def test_drafts_are_verified_by_all_ranks() -> None:
    made = run(cluster("gen:n=16,rate=40,output=lognormal:30:0.5", settings={"speculative_method": "eagle"}))
    assert made.data.summary["requests"]["completed"] == 16
    together = made.data.summary["ranks"]
    assert together["draft_passes"] > 0
    assert 0 < together["draft_passes_joined_share"] < 1


def test_passes_of_a_drafter_cost_what_the_rows_of_all_do() -> None:
    """Its experts receive all rows: eight ranks with one rank's rows each cost more than one, less than eight alone."""
    drafter = ModelDraftCost(MODEL, layers=61)
    one = [decode_shape(32, 1000), *[BatchShape()] * 7]
    all_of_them = [decode_shape(32, 1000)] * 8
    single, together = (
        drafter.draft_us(pass_shape(MODEL, shapes, agreed(padding="sum_length")), 3) for shapes in (one, all_of_them)
    )
    assert single < together < 8 * single
    assert together == pytest.approx(drafter.draft_us(decode_shape(256, 1000), 3))


STRUCTURED = "gen:n=12,rate=60,input=lognormal:200:0.5,output=uniform:20:40,grammars=1.0x3"


def test_ranks_sample_under_grammars(tmp_path: Path) -> None:
    made = run(cluster(STRUCTURED, settings={"pages": 40_000}), tmp_path, check_every=50)
    write_cluster_run(tmp_path, made)
    assert made.data.summary["requests"]["completed"] == 12
    assert made.data.requests.output_tokens.sum() == made.setup.workload.turns.output_tokens.sum()
    first, *others = [one.data.batches for one in made.engines]
    assert all(other.started_us.tolist() == first.started_us.tolist() for other in others), "passes begin together"
    ends = np.max([one.finished_us for one in (first, *others)], axis=0)
    assert (first.started_us[1:] >= ends[:-1]).all(), "no pass begins before all have sampled"
    verified = CliRunner().invoke(journal, ["verify", str(tmp_path)])
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize(("moved_us", "end_us"), [(None, None), (300, 1_500), (1_400, 1_500), (1_700, 1_800)])
def test_rank_that_waits_for_its_mask_ends_later(moved_us: int | None, end_us: int | None) -> None:
    """Of 500 us that begin at 1,000, 100 are sampling; a rank that waits for no mask has its tokens at 1,500."""

    def share(batch_id: int, after: int | None) -> Share:
        no = np.empty(0, np.int32)
        made = BatchPlan(
            batch_id=batch_id, mode="idle", rows=no, request_ids=no.astype(np.int64), starts=no, stops=no,
            sample_after=after,
        )  # fmt: skip
        return Share(made, BatchShape(), 900, 0.0, 0.0, b"", b"")

    one = SharedPass([share(7, None), share(4, 3)], took_us=500.0, sampling_us=100.0, started_us=1_000)
    assert one.end_us(0, {}) == 1_500
    assert one.end_us(1, {} if moved_us is None else {(1, 4): moved_us}) == end_us


def test_ranks_compute_what_grammars_force(tmp_path: Path) -> None:
    made = run(cluster(STRUCTURED, settings={"jump_forward_tokens": 8}, grammar_forces="0.3x4"), tmp_path)
    write_cluster_run(tmp_path, made)
    assert made.data.summary["requests"]["completed"] == 12
    plain = run(cluster(STRUCTURED))
    assert made.data.summary["ranks"]["passes"] < 0.9 * plain.data.summary["ranks"]["passes"]
    verified = CliRunner().invoke(journal, ["verify", str(tmp_path)])
    assert verified.exit_code == 0, verified.output


HYBRID = "gen:n=24,rate=40,turns=uniform:1:3,think=lognormal:30ms:1,input=lognormal:900:0.5,output=lognormal:40:0.5"


@pytest.mark.parametrize("model", ["gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_each_rank_has_its_part_of_the_pools_beside_full_attention(model: str, tmp_path: Path) -> None:
    plain = run(cluster(HYBRID, model=model))
    made = run(cluster(HYBRID, model=model, tiers={"hybrid_memory": "on"}), tmp_path)
    write_cluster_run(tmp_path, made)
    setup = made.setup.engines[0]
    kv, pools = setup.kv, setup.config.hybrid
    assert kv is not None
    assert 4 * pools.window_pages == kv.window_pages
    assert 4 * pools.state_slots == kv.state_slots
    whole = config_of_engine(setup.config).hybrid
    assert (whole.window_pages, whole.state_slots) == (kv.window_pages, kv.state_slots)
    ended = [sorted(each.data.requests.output_tokens.tolist()) for each in (made, plain)]  # ranks take others by load
    assert ended[0] == ended[1]
    verified = CliRunner().invoke(journal, ["verify", str(tmp_path)])
    assert verified.exit_code == 0, verified.output


def test_a_pass_waits_for_the_rank_that_copies_the_most_states(monkeypatch: pytest.MonkeyPatch) -> None:
    no = np.empty(0, np.int32)
    idle = BatchPlan(
        batch_id=0, mode="idle", rows=no, request_ids=no.astype(np.int64), starts=no, stops=no, ranks=agreed()
    )  # fmt: skip
    took_us = []
    port: Any = SimpleNamespace(device=SimpleNamespace(state_copy_us=100.0))
    for each in ((0.0, 0.0), (0.5, 5.0)):
        group = SimulatedRanks(Environment(), MODEL, 2, seed=0, name="ranks")
        group.ports = [port, port]
        monkeypatch.setattr(group, "_time", lambda: None)
        for rank, copies in enumerate(each):
            group.handed_over(rank, Share(idle, decode_shape(16, 1000), 0, 0.0, copies, b"", b""))
        took_us.append(group._passes[0].took_us)
    assert took_us[1] - took_us[0] == pytest.approx(500.0)


ROUTED = "gen:n=40,rate=60,input=lognormal:300:1,output=lognormal:20:0.8"


@pytest.mark.parametrize("policy", ["round_robin", "least_requests", "least_tokens", "total_tokens"])
def test_router_in_front_of_ranks_takes_every_policy(policy: Any) -> None:
    made = run(cluster(ROUTED, router=RouterConfig(policy=policy)))
    assert made.data.summary["requests"]["completed"] == 40
    sent = [one.data.summary["requests"]["arrived"] for one in made.engines]
    assert sum(sent) == 40
    assert (sent == [10] * 4) == (policy == "round_robin")


def test_router_may_see_only_older_reports_of_ranks(tmp_path: Path) -> None:
    policy = RouterConfig(policy="total_tokens")
    fresh = run(cluster(ROUTED, router=policy))
    stale = cluster(ROUTED, router=policy, report_interval_us=400_000, report_delay_us=20_000)
    made = run(stale, tmp_path)
    write_cluster_run(tmp_path, made)
    assert made.data.summary["requests"]["completed"] == 40
    sent, knowing = ([one.data.summary["requests"]["arrived"] for one in each.engines] for each in (made, fresh))
    assert sent != knowing, "the router goes by what it was told"
    reports = sum(isinstance(record.fact, LoadReported) for record in facts(tmp_path))
    assert reports % 4 == 0 < reports
    verify_router(tmp_path)


def test_ranks_have_host_memory_each_and_storage_together(tmp_path: Path) -> None:
    """A conversation that arrives at another rank finds in storage the pages that the first rank wrote."""
    tiers = {"host_cache_gb": 0.1, "storage_gb": 10.0, "prefetch_tokens_min": 16}
    workload = "gen:n=30,rate=20,turns=uniform:2:3,think=lognormal:200ms:1,input=lognormal:600:0.3,output=uniform:4:8"
    scenario = cluster(
        workload, tiers=tiers, settings={"pages": 6_000, "page_size": 16}, router=RouterConfig(policy="round_robin")
    )
    made = run(scenario, tmp_path)
    write_cluster_run(tmp_path, made)
    assert made.data.summary["requests"]["completed"] == made.data.summary["requests"]["arrived"]
    hosts = [one.setup.config.tiers.host_pages for one in made.engines]  # type: ignore[union-attr]
    whole = config_of_engine(made.engines[0].setup.config).tiers
    assert hosts == [hosts[0]] * 4
    assert whole.host_pages == 4 * hosts[0]  # type: ignore[union-attr]
    text = "".join(path.read_text() for path in tmp_path.glob("metrics.json"))
    assert json.loads(text)["cache"]["prompt_tokens_from_storage"] > 0
    verified = CliRunner().invoke(journal, ["verify", str(tmp_path)])
    assert verified.exit_code == 0, verified.output


def test_prefill_ranks_hand_over_to_decode_ranks(tmp_path: Path) -> None:
    """DeepSeek's way: prompts on ranks of one engine, decodes on ranks of another, each with rounds of its own."""
    group: dict[str, Any] = {"tp": 4, "layout": {"ep": 4, "attention_dp": 4}}
    engines = tuple(
        EngineGroup(count=1, gpu="h200", settings={"role": role}, **group) for role in ("prefill", "decode")
    )
    base = Scenario(
        model="qwen3-30b-a3b",
        gpu="h200",
        workload="gen:n=24,rate=60,input=lognormal:200:0.5,output=uniform:5:30",
        rank_schedulers=True,
        profile="sglang",
        attention_dp=4,
        tp=4,
        ep=4,
        settings={"pages": 40_000},
    )
    made = simulate_cluster(
        assemble_cluster(ClusterScenario(base=base, engines=engines)), folder=tmp_path, check_every=40
    )
    write_cluster_run(tmp_path, made)
    assert (len(made.engines), made.setup.gpus) == (8, 8)
    summary = made.data.summary
    assert summary["requests"]["completed"] == summary["transfers"]["transfers"] == 24
    assert made.data.requests.output_tokens.sum() == made.setup.workload.turns.output_tokens.sum()
    prefill, decode = summary["ranks_prefill"], summary["ranks_decode"]
    assert prefill["passes_extending"] == prefill["passes"]
    assert (decode["passes_extending"], decode["graph_share"]) == (0, 1.0), "a rank that only joins does not extend"
    verified = CliRunner().invoke(journal, ["verify", str(tmp_path)])
    assert verified.exit_code == 0, verified.output


@pytest.fixture
def tokens_in_time(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compares the start of every pass of ranks in stages with the sampling of the newest tokens of its decodes.

    Returns the number of rows that were compared, as it grows.
    """
    sampled: dict[tuple[int, int, int], int] = {}  # by group, rank and row
    held = [0]
    begin, left = SimulatedRanks._begin, SimulatedRanks._left

    def checked(self: SimulatedRanks, one: SharedPass) -> int:
        begun_us = begin(self, one)
        for rank, share in enumerate(one.shares):
            for row in share.plan.rows[share.plan.extend_rows :].tolist():
                held[0] += (id(self), rank, row) in sampled
                assert begun_us >= sampled.get((id(self), rank, row), 0), f"rank {rank}, {share.plan}"
        return begun_us

    def noted(self: SimulatedRanks, one: SharedPass, stages: Stages) -> None:
        left(self, one, stages)
        for rank, share in enumerate(one.shares):
            for row in share.plan.rows[share.plan.sample_rows].tolist():
                sampled[id(self), rank, row] = one.ends_us[rank]

    monkeypatch.setattr(SimulatedRanks, "_begin", checked)
    monkeypatch.setattr(SimulatedRanks, "_left", noted)
    return held


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_depth": 0},
        {"overlap_depth": 1},
        {"pp_size": 2},
        {"pp_size": 2, "overlap_depth": 1, **DELAYING},
        {"pp_size": 2, "pp_async_batch_depth": 1, "pp_max_micro_batch_size": 8},
    ],
    ids=str,
)
def test_passes_of_ranks_go_through_stages(
    settings: dict[str, Any], plain: ClusterRun, tokens_in_time: list[int], tmp_path: Path
) -> None:
    made = run(cluster(pp=2, settings={"pages": 40_000, **settings}), tmp_path, check_every=40)
    write_cluster_run(tmp_path, made)
    assert made.data.summary["requests"]["completed"] == 60
    assert made.data.requests.output_tokens.tolist() == plain.data.requests.output_tokens.tolist()
    assert tokens_in_time[0] > 1000
    passes = made.data.summary["ranks"]["passes"]
    assert {one.batches for one in made.engines} == {passes}
    first, *others = [one.data for one in made.engines]
    for other in others:
        assert other.batches.finished_us.tolist() == first.batches.finished_us.tolist()
    told = [one.data.summary["device"]["pipeline"] for one in made.engines]
    assert [one["stages"] for one in told] == [2] * 4
    assert len({tuple(one["stage_busy_us"]) for one in told}) == 1, "a stage has GPUs of every rank"
    if "pp_size" in settings:
        times = first.stages
        assert times is not None
        assert len(times.batch_id) == passes
        assert (times.start_us[1:] >= times.stop_us[:-1] - 1).all(), "a stage runs passes one after the other"
        assert (times.start_us[:, 1:] >= times.stop_us[:, :-1]).all(), "a pass is in one stage at a time"
        assert min(told[0]["batches_by_microbatch"]) > 0
    verified = CliRunner().invoke(journal, ["verify", str(tmp_path)])
    assert verified.exit_code == 0, verified.output


def test_ranks_with_microbatches_keep_stages_busier() -> None:
    workload = "gen:n=48,rate=inf,input=fixed:900,output=fixed:60"
    one, two = (run(cluster(workload, pp=2, settings=settings)).data.summary for settings in ({}, {"pp_size": 2}))
    assert two["device"]["pipeline"]["stage_busy_share"] > 1.4 * one["device"]["pipeline"]["stage_busy_share"]
    assert two["ranks"]["exchanges"] < 1.2 * two["ranks"]["passes"], "turns are seldom passed on for nothing"


def test_a_request_that_arrives_while_one_microbatch_is_in_flight_enters_the_other() -> None:
    """Its turn is not passed on while no rank needs that: the second request would wait for the first one's pass."""
    made = run(cluster("gen:n=2,rate=400,input=fixed:900,output=fixed:1", pp=2, settings={"pp_size": 2}))
    times = made.engines[0].data.stages
    assert times is not None
    assert times.microbatch.tolist() == [0, 1]
    assert times.stop_us[0, 0] < times.start_us[1, 0] < times.stop_us[0, 1]


def test_ranks_in_stages_sample_under_grammars(tokens_in_time: list[int], tmp_path: Path) -> None:
    """A pass waits in the last stage until every rank has sampled; the forwards behind it continue."""
    settings = {"pp_size": 2, "overlap_depth": 1, "pages": 40_000}
    made = run(cluster(STRUCTURED, pp=2, settings=settings), tmp_path, check_every=40)
    assert made.data.requests.output_tokens.sum() == made.setup.workload.turns.output_tokens.sum()
    assert tokens_in_time[0] > 100
    write_cluster_run(tmp_path, made)
    verified = CliRunner().invoke(journal, ["verify", str(tmp_path)])
    assert verified.exit_code == 0, verified.output


def test_triggers_of_the_delayer_wait_for_more_prompts() -> None:
    """Where every rank has prompts most of the time, but few: fewer extends, each with more of them."""
    workload = "gen:n=80,rate=200,input=lognormal:200:0.3,output=uniform:5:60"
    settings = {**DELAYING, "max_running_requests": 32}
    without = run(cluster(workload, settings=settings)).data.summary["ranks"]
    waiting = run(cluster(workload, settings={**settings, "prefill_delayer_slots": True})).data.summary["ranks"]
    assert waiting["prompts_by_situation"]["slots"] > 0
    assert waiting["passes_extending"] < without["passes_extending"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tp 4", "`attention_dp` is 1"),
        ("--tp 4 --attention-dp 4 --pp 2 --pp-size 3", "`pp_size` is 3, but `pp` is 2"),
        ("--tp 4 --attention-dp 4 --receive-interval 3", "`receive_interval` is 3"),
        ("--tp 4 --attention-dp 4 --autoscale open_requests=8", "`autoscale` is given"),
        ("--tp 4 --attention-dp 4 --decode-steps-per-launch 2", "ranks agree on every pass"),
        ("--tp 4 --attention-dp 4 --prefill-delayer-max-delay-passes 3", "nothing delays prompts"),
    ],
)
def test_wrong_input_is_refused_by_name(words: str, message: str) -> None:
    command = f"--model qwen3-30b-a3b --gpu h200 --workload gen:n=4 --rank-schedulers {words}"
    refused = CliRunner().invoke(simulate, command.split())
    assert refused.exit_code == 2
    assert message in str(refused.output) + str(refused.exception)


def test_delayer_without_ranks_is_refused() -> None:
    refused = CliRunner().invoke(simulate, "--model qwen3-8b --gpu h200 --workload gen:n=4 --prefill-delayer".split())
    assert refused.exit_code == 2
    assert "there is one rank" in refused.output


def test_plan_compares_ranks_with_and_without_the_delayer(tmp_path: Path) -> None:
    words = "--model qwen3-30b-a3b --gpus h200 --tp 4 --ep 4 --attention-dp 4 --rank-schedulers --profile sglang"
    words += " --search prefill_delayer=no,yes --prefill-delayer-max-delay-passes 5 --slo tpot_p99=30ms --max-gpus 4"
    words += " --workload gen:input=lognormal:300:0.5,output=lognormal:20:0.5 --quick --requests 40 --jobs 1"
    found = CliRunner().invoke(plan, [*words.split(), "--json", str(tmp_path / "plan.json")])
    assert found.exit_code == 0, found.output
    assert "prefill_delayer=yes" in found.stdout
    assert "--rank-schedulers" in found.stdout
    serve = next(line for line in found.stdout.splitlines() if line.startswith("serve:"))
    assert "--attention-dp 4 --rank-schedulers" in serve
    served = dict(word.split("=") for word in serve.split() if word.startswith("prefill_delayer"))
    delays = served.get("prefill_delayer") == "true"
    assert served.get("prefill_delayer_max_delay_passes") == ("5" if delays else None)
    emulated = next(line for line in found.stdout.splitlines() if "--emulate" in line)
    assert "prefill_delayer" not in emulated


def test_times_of_ranks_are_predicted_from_the_journal_of_one(tmp_path: Path) -> None:
    """A pass lasts as long as that of the slowest rank, with rows of all ranks in its MLPs."""
    run(cluster(engine="none", rate_scale=0.3), tmp_path)
    base = roofline_model(load_model("qwen3-30b-a3b"), load_gpu("h200"), Parallelism(tp=4, ep=4, attention_dp=4))
    times = of_journal(tmp_path / "engines" / "0")
    passes = len(times.batches) + times.left_out
    assert 0.2 < times.left_out / passes < 0.8, "passes in which another rank has more tokens"
    for mode, most in (("decode", 0.02), ("extend", 0.04)):
        some = [one for one in times.batches if one.mode == mode]
        assert len(some) >= 10
        predicted_us = sum(base.batch_us(one.shape).mean_us for one in some)
        assert predicted_us == pytest.approx(sum(one.took_us for one in some), rel=most), mode
