"""Ranks with schedulers of their own in the simulator: one pass for all, its cost, run folders, plans, refusals."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep.core.commands import Ranks
from lockstep.core.config import SchedConfig
from lockstep.core.replay import replay
from lockstep.host.router_journal import verify_router
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cli import simulate
from lockstep.sim.cluster import ClusterRun, ClusterScenario, assemble_cluster, simulate_cluster, write_cluster_run
from lockstep.sim.cost import BatchShape
from lockstep.sim.cost.model import decode_shape, extend_shape
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.roofline import roofline
from lockstep.sim.data_parallel import pass_shape
from lockstep.sim.plan.cli import plan
from lockstep.sim.ranks import config_of_engine, settings_of_rank
from lockstep.sim.simulate import Scenario
from lockstep.tools.journal import journal

DELAYING: dict[str, Any] = {"prefill_delayer": True}


def cluster(workload: str = "gen:n=60,rate=30,input=lognormal:400:0.5,output=lognormal:40:0.5", **more: Any) -> Any:
    own = {name: more.pop(name) for name in ("replicas", "hop_us") if name in more}
    base = {"model": "qwen3-30b-a3b", "gpu": "h200", "tp": 4, "ep": 4, "attention_dp": 4, "profile": "sglang"}
    return ClusterScenario(base=Scenario(workload=workload, rank_schedulers=True, **{**base, **more}), **own)


def run(scenario: ClusterScenario, folder: Path | None = None) -> ClusterRun:
    return simulate_cluster(assemble_cluster(scenario), folder=folder)


@pytest.fixture(scope="module")
def plain() -> ClusterRun:
    return run(cluster())


# ------------------------------------------------------------------------------------------------------ settings, costs


def test_ranks_share_out_what_the_engine_has() -> None:
    given = {"max_running_requests": 250, "chunked_prefill_size": 8192, "page_size": 16, "pages": 1000}
    share = settings_of_rank(given, 8)
    assert (share["max_running_requests"], share["chunked_prefill_size"], share["pages"]) == (32, 1024, 125)
    assert share["max_prefill_tokens"] == 2048
    assert settings_of_rank({"chunked_prefill_size": 64, "page_size": 16}, 8)["chunked_prefill_size"] == 16
    whole = config_of_engine(SchedConfig(**share))
    assert (whole.max_running_requests, whole.chunked_prefill_size, whole.pages) == (256, 8192, 1000)
    assert not whole.shares_passes


MODEL = roofline(load_model("deepseek-v3"), load_gpu("h200"), Parallelism(tp=8, ep=8, attention_dp=8))


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


def test_delayer_gathers_prompts_and_says_what_it_did(plain: ClusterRun) -> None:
    delaying = run(cluster(settings=DELAYING))
    before, after = plain.data.summary["ranks"], delaying.data.summary["ranks"]
    assert before["prompts_by_situation"] == {}
    assert after["prompts_by_situation"]["mixed"] == after["passes_prompts_waited"] > 0
    assert after["passes_extending"] < before["passes_extending"]
    assert after["extending_rank_share"] > before["extending_rank_share"]
    assert after["graph_share"] > before["graph_share"]
    assert after["release_wait_us_max"] > 0
    assert delaying.data.summary["latency"]["ttft_us_mean"] > plain.data.summary["latency"]["ttft_us_mean"]


def test_run_folder_replays_and_says_how_to_get_it_again(tmp_path: Path) -> None:
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


def test_table_says_what_ranks_did() -> None:
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


def test_drafts_are_verified_by_all_ranks() -> None:
    made = run(cluster("gen:n=16,rate=40,output=lognormal:30:0.5", settings={"speculative_method": "eagle"}))
    assert made.data.summary["requests"]["completed"] == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tp 4", "`attention_dp` is 1"),
        ("--tp 4 --attention-dp 4 --pp 2", "`pp` is 2"),
        ("--tp 4 --attention-dp 4 --host-cache-gb 8", "`host_cache_gb` is 8"),
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
    assert "prefill_delayer" not in serve
    assert "rank_schedulers" in found.stdout
