"""Microbatches in the simulator: busier stages, the same answers, the timeline, clusters, refusals."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import LaneReady
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import replay
from lockstep.core.requests import microbatches
from lockstep.sim.cli.simulate import simulate as command
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.metrics.stages import StageTimes
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

DOC = Path(__file__).parents[2] / "docs" / "distributed.md"
LOAD = "gen:n=48,rate=inf,input=fixed:900,output=fixed:60"


def scenario(**settings: Any) -> Scenario:
    return Scenario(model="qwen3-8b", gpu="h100", workload=LOAD, pp=4, settings=settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One running batch; four; five."""
    asked = {"one": {}, "four": {"pp_size": 4}, "five": {"pp_size": 4, "pp_async_batch_depth": 1}}
    folder = tmp_path_factory.mktemp("runs")
    return {
        "folder": folder,
        **{name: simulate(assemble(scenario(**s)), folder=folder / name, check_every=20) for name, s in asked.items()},
    }


def test_the_docs_show_the_table_that_the_code_reads() -> None:
    shown = DOC.read_text("utf-8").split("<!-- MICROBATCH -->\n", 1)[1].split("\n\n", 1)[0]
    assert shown == microbatches.table_text()
    assert [*microbatches.OWN] == [*microbatches.RunningStateImage.__struct_fields__]


def test_stages_are_busier_and_answers_are_the_same(runs: dict[str, Any]) -> None:
    busy = {n: runs[n].data.summary["device"]["pipeline"]["stage_busy_share"] for n in ("one", "four", "five")}
    assert busy["one"] < 0.5
    assert busy["four"] > 1.8 * busy["one"]
    assert busy["five"] > 1.8 * busy["one"]
    outputs = [runs[name].data.requests.output_tokens.tolist() for name in ("one", "four", "five")]
    assert outputs == [[60] * 48] * 3


def test_journal_replays_and_reports_whose_slot_was_offered(runs: dict[str, Any]) -> None:
    assert replay(runs["folder"] / "five").events > 100
    events = [record.event for record in read_journal(runs["folder"] / "five").events()]
    offered = Counter(event.microbatch for event in events if isinstance(event, LaneReady))
    assert sorted(offered) == [0, 1, 2, 3, 4]


def test_every_stage_is_busy_or_has_a_bubble_while_a_batch_is_there(runs: dict[str, Any]) -> None:
    data = runs["four"].data
    told, times = data.summary["device"]["pipeline"], data.stages
    assert (told["stages"], told["microbatches"]) == (4, 4)
    assert sum(told["batches_by_microbatch"]) == runs["four"].batches
    assert min(told["batches_by_microbatch"]) > 0
    for stage, (busy_us, bubble_us) in enumerate(zip(told["stage_busy_us"], told["stage_bubble_us"], strict=True)):
        assert busy_us + bubble_us == pytest.approx(data.summary["device"]["busy_us"], rel=1e-3), stage
        starts, stops = times.start_us[:, stage], times.stop_us[:, stage]
        assert (starts[1:] >= stops[:-1] - 1).all(), "a stage runs batches one after the other"
    assert (times.start_us[:, 1:] >= times.stop_us[:, :-1]).all(), "a batch is in one stage at a time"


def test_bubbles_are_what_is_left_of_the_time_with_a_batch_in_the_pipeline() -> None:
    times = StageTimes(
        np.arange(3), np.array([0, 1, 0]), np.array([1, 1, 1]),
        np.array([[0, 11], [10, 21], [50, 61]]), np.array([[10, 20], [20, 30], [60, 70]]),
    )  # fmt: skip
    assert times.bubbles() == [[(20, 30), (60, 70)], [(0, 11), (20, 21), (50, 61)]]


def test_without_microbatches_everything_is_as_it_was(runs: dict[str, Any]) -> None:
    one = runs["one"].data
    assert one.stages is None
    assert "microbatches" not in one.summary["device"]["pipeline"]
    assert runs["one"].setup.config.overlap_depth == 1
    assert runs["four"].setup.config.overlap_depth == 0
    remarks = [
        line for line in runs["four"].remarks() if "overlap_depth" in line or "batches are in the pipeline" in line
    ]
    assert not remarks
    lazy = assemble(scenario(pp_size=4, overlap_depth=1))
    assert lazy.config.overlap_depth == 1
    assert any("with microbatches" in line for line in lazy.doubts())


def test_trace_has_a_lane_per_stage_and_per_link(tmp_path: Path) -> None:
    words = (
        f"--model qwen3-8b --gpu h100 --pp 2 --pp-size 2 --workload {LOAD.replace('48', '6')} --out {tmp_path / 'run'}"
    )
    found = CliRunner().invoke(command, words.split(), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert "microbatches" in found.output
    events = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert {"stage 1", "stage 2", "link 1-2"} < set(lanes)
    names = {
        lane: {event["name"] for event in events if event.get("tid") == tid and event["ph"] == "X"}
        for lane, tid in lanes.items()
    }
    assert {"m0", "m1", "bubble"} <= names["stage 2"]
    assert names["link 1-2"] == {"m0", "m1"}


def test_chunks_of_a_long_prompt_go_through_the_stages_behind_each_other() -> None:
    long = replace(scenario(chunked_prefill_size=2048), workload="gen:n=2,rate=0.1,input=fixed:24000,output=fixed:2")
    ttft = {}
    for name, more in {"one": {}, "four": {"pp_size": 4}}.items():
        data = simulate(assemble(replace(long, settings={**long.settings, **more}))).data
        ttft[name] = data.summary["latency"]["ttft_us_p50"]
    assert ttft["four"] < 0.75 * ttft["one"], "two batches in the pipeline, or four"


def test_what_grammars_force_is_computed_together_in_stages(tmp_path: Path) -> None:
    load = "gen:n=24,rate=inf,input=fixed:200,output=fixed:80,grammars=1x3"
    asked = replace(scenario(pp_size=2, max_running_requests=8), pp=2, workload=load)
    jumping = replace(asked, settings={**asked.settings, "jump_forward_tokens": 8}, grammar_forces="0.5x5")
    plain, jumped = simulate(assemble(asked)), simulate(assemble(jumping), folder=tmp_path / "jumped", check_every=10)
    assert (plain.data.requests.output_tokens == jumped.data.requests.output_tokens).all()
    told = jumped.data.summary
    assert told["jump_forward"]["jumps"] > 100
    assert told["latency"]["tpot_us_mean"] < 0.7 * plain.data.summary["latency"]["tpot_us_mean"]
    assert min(told["device"]["pipeline"]["batches_by_microbatch"]) > 0
    assert replay(tmp_path / "jumped").batches == jumped.batches


def test_dynamic_chunks_take_as_long_as_the_first() -> None:
    load = "gen:n=6,rate=0.05,input=uniform:30000:40000,output=fixed:2"
    spread = {}
    for dynamic in (False, True):
        asked = scenario(pp_size=4, chunked_prefill_size=4096, pp_dynamic_chunking=dynamic)
        data = simulate(assemble(replace(asked, workload=load))).data
        batches, times = data.batches, data.stages
        assert times is not None
        whole = batches.mode[times.batch_id] == "extend"
        took = (times.stop_us - times.start_us)[whole, 0][-8:-1]  # of the last prompt, all but its last chunk
        spread[dynamic] = took.max() / took.min()
    assert spread[False] > 1.5
    assert spread[True] < 1.1


def test_prefill_and_decode_engines_have_stages_each() -> None:
    groups = tuple(
        EngineGroup(count=1, gpu="h200", layout={"pp": 2}, settings={"role": role, "pp_size": 2, **more})
        for role, more in (("prefill", {"chunked_prefill_size": 512}), ("decode", {"pp_async_batch_depth": 1}))
    )
    base = Scenario(model="llama-3.1-8b", gpu="h200", workload="gen:n=30,rate=20,input=lognormal:900:0.5")
    run = simulate_cluster(assemble_cluster(ClusterScenario(base=base, engines=groups)), check_every=10)
    assert run.data.summary["requests"]["completed"] == 30
    told = [one.data.summary["device"]["pipeline"]["batches_by_microbatch"] for one in run.engines]
    assert [len(counts) for counts in told] == [2, 3]
    assert all(min(counts) > 0 for counts in told)


def test_running_ahead_in_a_cluster_changes_nothing(tmp_path: Path) -> None:
    load = "gen:n=30,rate=40,turns=uniform:1:3,think=exponential:80ms,input=uniform:1:700,output=uniform:1:40"
    base = replace(scenario(pp_size=4, batching="mixed", chunked_prefill_size=128), workload=load)
    setup = assemble_cluster(ClusterScenario(base=base, replicas=2))
    lazy, eager = (simulate_cluster(setup, folder=tmp_path / n, eager=n == "eager") for n in ("lazy", "eager"))
    assert lazy.data.summary == eager.data.summary
    for engine in "01":
        told = [sorted((tmp_path / n / "engines" / engine / "journal").glob("*.log")) for n in ("lazy", "eager")]
        assert [path.read_bytes() for path in told[0]] == [path.read_bytes() for path in told[1]]


@pytest.mark.parametrize(
    ("pp", "settings", "message"),
    [
        (4, {"pp_size": 2}, "`pp_size` is 2, but `pp` is 4"),
        (1, {"pp_size": 2}, "`pp_size` is 2, but `pp` is 1"),
        (4, {"pp_async_batch_depth": 1}, "`pp_async_batch_depth` is 1, but there is one stage"),
    ],
)
def test_microbatches_for_other_stages_than_there_are_are_refused(
    pp: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        assemble(replace(scenario(**settings), pp=pp))
