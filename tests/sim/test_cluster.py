"""Clusters: engines that run ahead on clocks of their own decide like engines that run side by side, event by event."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.core.cluster.router import ROUTER_POLICIES, EngineShare, RouterConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import EventRecord
from lockstep.core.journal.replay import replay
from lockstep.host.router_check import RouterDivergence, verify_router
from lockstep.host.router_journal import RouterJournal
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.run_folder import write_cluster_run
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup, parse_engines
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import BatchShape, CpuModel, Duration
from lockstep.sim.metrics.columns import BATCH_COLUMNS, CPU_COLUMNS, Batches, Columns
from lockstep.sim.metrics.packed import Packed
from lockstep.sim.metrics.packed_rows import PackedRows
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.settings import parse_setting
from tests.support.routed import as_old_file, facts

CHAT = "gen:n=120,rate=25,turns=uniform:1:4,think=lognormal:300ms:0.9,input=lognormal:300:0.9,output=lognormal:60:0.9"
BASE = Scenario(model="qwen3-8b", gpu="h100", workload=CHAT, slos=(Slo.parse("ttft_p99=500ms"),))


def run(scenario: Scenario = BASE, *, folder: Path | None = None, eager: bool = False, **cluster: Any) -> ClusterRun:
    return simulate_cluster(assemble_cluster(ClusterScenario(base=scenario, **cluster)), folder=folder, eager=eager)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------------------------------------- equivalences


def test_a_cluster_of_one_is_the_engine_alone() -> None:
    before = gc.get_threshold()
    alone = simulate(assemble(BASE))
    assert gc.get_threshold() == before  # garbage was collected seldom, and the interpreter's settings were restored
    together = run(replicas=1)
    assert together.data.summary == alone.data.summary
    for name, column in alone.data.requests.columns().items():
        assert np.array_equal(column, together.data.requests.columns()[name], equal_nan=column.dtype.kind == "f"), name


@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(
    policy=st.sampled_from(ROUTER_POLICIES),
    replicas=st.integers(1, 4),
    hop_us=st.sampled_from([0, 1, 700, 40_000]),
    think=st.sampled_from(["fixed:0us", "fixed:1us", "exponential:80ms"]),
    output=st.sampled_from(["fixed:1", "uniform:1:40", "lognormal:60:0.9"]),
    rate=st.sampled_from(["5", "60", "inf"]),
    scheduler=st.sampled_from(
        [
            {},
            {"overlap_depth": 0},
            {"batching": "mixed", "chunked_prefill_size": 128},
            {"pages": 90, "reserve": "on_demand", "context_tokens_max": 1024},  # running requests must be retracted
            {"max_running_requests": 3, "waiting_timeout_us": 400_000},
            {"decode_steps_per_launch": 4},
        ]
    ),
    seed=st.integers(0, 5),
    concurrency=st.sampled_from([None, None, 3, 20]),
)
@example(  # an idle lane missed an arrival that was caused by the answer of another lane
    policy="round_robin",
    replicas=2,
    hop_us=0,
    think="fixed:0us",
    output="fixed:1",
    rate="5",
    scheduler={},
    seed=1,
    concurrency=None,
)
def test_engines_that_run_ahead_do_what_they_do_side_by_side(
    tmp_path_factory: pytest.TempPathFactory,
    policy: str,
    replicas: int,
    hop_us: int,
    think: str,
    output: str,
    rate: str,
    scheduler: dict[str, Any],
    seed: int,
    concurrency: int | None,
) -> None:
    """Every journal, of engines and router, to the byte, compared with advancing every engine at every arrival."""
    spec = f"gen:n=50,rate={rate},turns=uniform:1:3,think={think},input=uniform:1:700,output={output}"
    closed = {} if concurrency is None else {"concurrency": concurrency, "limit": 50}
    scenario = replace(BASE, workload=spec, seed=seed, settings=scheduler, **closed)
    cluster = {"replicas": replicas, "router": RouterConfig(policy=policy), "hop_us": hop_us}  # type: ignore[arg-type]
    lazy, eager = tmp_path_factory.mktemp("lazy"), tmp_path_factory.mktemp("eager")
    first = run(scenario, folder=lazy, **cluster)
    second = run(scenario, folder=eager, eager=True, **cluster)
    assert files(lazy) == files(eager)
    assert first.data.summary == second.data.summary
    requests = first.data.summary["requests"]
    assert requests["arrived"] + first.never_sent == 50
    assert not requests["unfinished"]


def test_answers_that_may_end_at_any_token_and_durations_that_are_drawn_promise_nothing_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drawn:
        """Durations with a spread, so that no launch has a least time."""

        def __init__(self, base: Any) -> None:
            self.base = base

        def batch_us(self, shape: BatchShape) -> Duration:
            mean_us = self.base.batch_us(shape).mean_us
            return Duration(mean_us, 0.4 * mean_us)

        def describe(self) -> dict[str, Any]:
            return {"kind": "drawn"}

    scenario = replace(BASE, max_new_tokens=500)
    setup = assemble_cluster(ClusterScenario(base=scenario, replicas=3))
    setup = replace(setup, engines=tuple(replace(one, cost=Drawn(one.cost)) for one in setup.engines))
    simulate_cluster(setup, folder=tmp_path / "lazy")
    simulate_cluster(setup, folder=tmp_path / "eager", eager=True)
    assert files(tmp_path / "lazy") == files(tmp_path / "eager")


# ----------------------------------------------------------------------------------------------------- journals, replay


def test_every_engine_and_the_router_replay(tmp_path: Path) -> None:
    done = run(replicas=3, folder=tmp_path, router=RouterConfig(policy="prefix_affinity", load_floor=1))
    events = 0
    arrivals: dict[int, int] = {}
    for engine in range(3):
        folder = tmp_path / "engines" / str(engine)
        events += replay(folder).events
        for record in read_journal(folder).records():
            if isinstance(record, EventRecord) and type(record.event).__name__ == "RequestArrived":
                arrivals[record.event.request_id] = engine  # type: ignore[union-attr]
    assert events > 1_000
    assert verify_router(tmp_path)[:2] == (240, 120)
    routed = {one.routed.request_id: one.routed.engine for one in facts(tmp_path) if one.routed is not None}
    assert routed == arrivals
    assert sorted(routed) == list(range(120))
    assert sum(done.routed_by_reason.values()) == 120


def test_a_router_that_decided_otherwise_is_found_with_its_record(tmp_path: Path) -> None:
    run(replicas=2, folder=tmp_path / "run")
    shares, router = (EngineShare(), EngineShare()), RouterConfig()
    with RouterJournal(tmp_path, router, shares) as journal:
        for record in facts(tmp_path / "run"):
            routed = record.routed
            if routed is not None and routed.engine == 0:
                routed = msgspec.structs.replace(routed, engine=1)
            journal.append(record.fact, routed, bytes.fromhex(record.digest))
    with pytest.raises(RouterDivergence, match=r"00000000.log, record 1: recorded .*engine=1.* replayed .*engine=0"):
        verify_router(tmp_path)


def test_an_old_file_that_decided_otherwise_is_found_with_its_line(tmp_path: Path) -> None:
    run(replicas=2, folder=tmp_path)
    path = as_old_file(tmp_path)
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"engine":0', '"engine":1')
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RouterDivergence, match=r"router.jsonl, line 2: recorded .*engine=1.* replayed .*engine=0"):
        verify_router(tmp_path)


def test_the_journal_command_verifies_a_whole_cluster(tmp_path: Path) -> None:
    from lockstep.tools.journal import journal

    run(replicas=2, folder=tmp_path)
    shown = CliRunner().invoke(journal, ["verify", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert [line.split(":")[0] for line in shown.stdout.splitlines()] == ["engine 0", "engine 1", "router"]
    assert shown.stdout.count("equal") == 3


# ------------------------------------------------------------------------------------------------------------- effects


def test_affinity_finds_more_prefixes_than_a_router_that_does_not_look() -> None:
    """The turns of a session go to the engine that has their history."""
    hits = {
        policy: run(replicas=4, router=RouterConfig(policy=policy)).data.summary["cache"]["hit_ratio"]  # type: ignore[arg-type]
        for policy in ("round_robin", "prefix_affinity", "session_sticky")
    }
    assert hits["prefix_affinity"] > 1.5 * hits["round_robin"]
    assert hits["session_sticky"] > 1.5 * hits["round_robin"]


def test_a_hop_delays_the_first_token_by_two_and_each_gap_by_nothing() -> None:
    spec = "gen:n=1,input=fixed:100,output=fixed:9"
    near = run(replace(BASE, workload=spec)).data.requests
    far = run(replace(BASE, workload=spec), hop_us=3_000).data.requests
    assert far.arrival_us[0] == near.arrival_us[0]
    assert far.ttft_us[0] - near.ttft_us[0] == 6_000
    assert far.e2e_us[0] - near.e2e_us[0] == 6_000
    assert far.tpot_us[0] == near.tpot_us[0]


def test_a_stronger_engine_gets_more_unless_set_otherwise() -> None:
    groups = (EngineGroup(count=1, gpu="h100"), EngineGroup(count=1, gpu="h100", tp=4))
    scenario = replace(BASE, gpu="")
    setup = assemble_cluster(ClusterScenario(base=scenario, engines=groups))
    assert setup.shares[1].weight > 1.5 * setup.shares[0].weight
    told = (groups[0], replace(groups[1], weight=1.0))
    assert assemble_cluster(ClusterScenario(base=scenario, engines=told)).shares[1].weight == 1.0


def test_the_whole_adds_up_to_its_engines() -> None:
    done = run(replicas=3)
    parts = [one.data for one in done.engines]
    whole = done.data
    assert whole.summary["requests"]["completed"] == sum(part.summary["requests"]["completed"] for part in parts) == 120
    assert whole.requests.request_id.tolist() == list(range(120))
    gaps_us = np.sort(np.concatenate([part.itl_us.expand() for part in parts]))
    np.testing.assert_array_equal(whole.itl_us.expand(), gaps_us)
    tokens = sum(int(part.requests.output_tokens.sum()) for part in parts)
    assert whole.summary["throughput"]["output_tokens"] == tokens
    made = float((whole.series.output_tokens_per_s * np.diff([*whole.series.t_us, whole.span_us[1]])).sum() / 1e6)
    assert made == pytest.approx(tokens, rel=0.02)
    assert whole.summary["device"]["busy_us"] == sum(part.summary["device"]["busy_us"] for part in parts)
    gap_us = whole.summary["device"]["decode_gap_us_mean"]
    assert gap_us == pytest.approx(np.concatenate([idle_between_decodes_us(part.batches) for part in parts]).mean())


def test_an_engine_without_bubbles_lowers_the_bubble_share_of_the_whole() -> None:
    alone = replace(BASE, engine="none")  # with a CPU lane: the costs of a measured engine have its CPU time
    setup = assemble_cluster(ClusterScenario(base=alone, replicas=2, router=RouterConfig(policy="round_robin")))
    no_cpu = CpuModel(**dict.fromkeys((each.name for each in fields(CpuModel)), 0.0))
    setup = replace(setup, engines=(setup.engines[0], replace(setup.engines[1], cpu=no_cpu)))
    done = simulate_cluster(setup)
    parts = [one.data.summary["device"] for one in done.engines]
    assert parts[0]["bubble_us"] > 0 == parts[1]["bubble_us"]
    open_us = [time_with_an_open_request_us(one) for one in done.engines]
    whole = done.data.summary["device"]
    assert whole["bubble_us"] == parts[0]["bubble_us"]
    assert whole["bubble_share"] == round(parts[0]["bubble_us"] / sum(open_us), 6)
    assert whole["bubble_share"] < parts[0]["bubble_share"]


def time_with_an_open_request_us(one: Run) -> int:
    """Of one engine, moment by moment."""
    requests = one.data.requests
    moments = [(us, 1) for us in requests.arrival_us.tolist()] + [(us, -1) for us in requests.ended_us.tolist()]
    open_us, open_requests, before_us = 0, 0, 0
    for time_us, more in sorted(moments):
        open_us += (time_us - before_us) * (open_requests > 0)
        open_requests, before_us = open_requests + more, time_us
    return open_us


def idle_between_decodes_us(batches: Batches) -> NDArray[np.int64]:
    """Of one engine."""
    decodes = batches.mode == "decode"
    return (batches.started_us[1:] - batches.finished_us[:-1])[decodes[1:] & decodes[:-1]].clip(0)


def test_a_run_joins_the_batches_of_its_engines_only_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined, the batches of a day need more memory than the rest of its run."""
    join = Mock(wraps=Packed.join)
    monkeypatch.setattr(Packed, "join", join)
    data = run(BASE, replicas=2).data
    assert data.summary["requests"]["completed"]
    join.assert_not_called()
    assert len(data.batches.mode)
    join.assert_called_once()


def test_batches_and_cpu_of_the_whole_are_those_of_its_engines_with_their_names() -> None:
    done = run(replace(BASE, workload="gen:n=40,rate=20,input=fixed:600,output=fixed:8"), replicas=3)
    parts, whole = [one.data for one in done.engines], done.data
    assert (np.diff(whole.batches.launched_us) >= 0).all()
    assert rows_of(whole.batches) == sorted(row for part in parts for row in rows_of(part.batches))
    assert rows_of(whole.cpu) == sorted(row for part in parts for row in rows_of(part.cpu))
    assert {"extend", "decode"} <= set(whole.batches.mode)


def rows_of(columns: Columns) -> list[tuple[object, ...]]:
    return sorted(zip(*(column.tolist() for column in columns.columns().values()), strict=True))


def test_packed_lists_join_though_their_codes_differ() -> None:
    def packed(modes: tuple[str, ...], launched_us: list[int], works: tuple[str, ...]) -> Packed:
        batches, cpu = PackedRows(*BATCH_COLUMNS), PackedRows(*CPU_COLUMNS)
        for place, time_us in enumerate(launched_us):
            row = dict.fromkeys(BATCH_COLUMNS, 1) | {"batch_id": place, "launched_us": time_us, "mode": place % 2}
            batches.recent.extend(row.values())
            cpu.recent.extend((time_us, 2, place % 2))
        return Packed(batches, modes, cpu, works)

    one = packed(("extend", "decode"), list(range(0, 20_000, 2)), ("plan", "results"))
    other = packed(("decode", "mixed"), list(range(1, 20_000, 2)), ("results", "arrival"))
    none = packed((), [], ())
    joined = Packed.join([one, none, other])
    assert joined.batches.column("launched_us").tolist() == list(range(20_000))
    names = np.array(joined.modes, np.object_)[joined.batches.column("mode")]
    assert names.tolist() == ["extend", "decode", "decode", "mixed"] * 5_000
    works = np.array(joined.works, np.object_)[joined.cpu.column("work")]
    assert works.tolist() == ["plan", "results"] * 5_000 + ["results", "arrival"] * 5_000
    nothing = Packed.join([none])
    assert (len(nothing.batches), len(nothing.cpu), nothing.modes) == (0, 0, ())


# ----------------------------------------------------------------------------------------------- spec and command line


def test_the_spec_of_engines_reads_back() -> None:
    text = "4xh100:tp=2:weight=1.5,2xh200:chunked_prefill_size=2048:schedule_policy=lpm"
    groups = parse_engines(text.replace("schedule_policy", "policy"), parse_setting)
    assert ",".join(map(str, groups)) == text
    assert groups[1].settings == {"chunked_prefill_size": 2048, "schedule_policy": "lpm"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", r"`engines` has `h100`, expected COUNTxGPU\nhint: such as 4xh100:tp=2,2xh200"),
        ("0xh100", "expected COUNTxGPU"),
        ("2xh100:tp=two", "`tp` of `2xh100` must be a whole number of at least 1, got `two`"),
        ("2xh100:weight=-1", "`weight` of `2xh100` must be a number from 0.001 to 1000, got `-1`"),
        ("2xh100:tp", "`tp` of `2xh100` has no value"),
        ("2xh100:tp=1:tp=2", "`tp` of `2xh100` is given twice"),
        ("2xh100:pagesize=16", "unknown setting `pagesize`\nhint: did you mean `page_size`"),
        ("2xh100:page_size=big", "`page_size` cannot be `big`"),
    ],
)
def test_a_spec_that_cannot_be_read_reports_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_engines(text, parse_setting)


def test_the_command_line_writes_a_run_folder_that_its_own_command_repeats(tmp_path: Path) -> None:
    from lockstep.sim.cli.simulate import simulate as command

    arguments = [
        *("--model", "qwen3-8b", "--engines", "2xh100,1xh200", "--router", "prefix_affinity"),
        *("--router-hop", "150us", "--router-load-floor", "2", "--workload", CHAT, "--no-trace", "--no-intervals"),
    ]
    shown = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path / "a")])
    assert shown.exit_code == 0, shown.output
    assert "Engines behind prefix_affinity" in shown.stdout
    metrics = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert [engine["gpu"] for engine in metrics["about"]["engines"]] == ["H100-SXM", "H100-SXM", "H200-SXM"]
    assert len(metrics["engines"]) == 3
    assert "GPU" in shown.stdout
    assert re.search(r"^  2: 1 x H200-SXM .* [0-9.]+ %\s*$", shown.stdout, re.MULTILINE)  # to its last column
    page = (tmp_path / "a" / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["first"] == 0  # of all engines
    assert data["compare"]["headings"] == ["all", "engine 0", "engine 1", "engine 2"]
    assert data["compare"]["x_label"] == "run"  # engines are not loads of a sweep
    assert "The whole and its parts" in page
    assert not re.search("up to engine|How load changes latency", page)

    import shlex

    again = shlex.split(metrics["about"]["command"])[2:]
    shown = CliRunner().invoke(command, [*again, "--no-trace", "--no-intervals", "--out", str(tmp_path / "b")])
    assert shown.exit_code == 0, shown.output
    assert {k: v for k, v in files(tmp_path / "a").items() if k.endswith((".log", ".jsonl"))} == {
        k: v for k, v in files(tmp_path / "b").items() if k.endswith((".log", ".jsonl"))
    }
    shown = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path / "a"), "--overwrite"])
    assert shown.exit_code == 0, shown.output


def test_a_report_of_very_many_engines_shows_the_fullest_and_the_emptiest(tmp_path: Path) -> None:
    scenario = replace(BASE, workload="gen:n=200,rate=50,input=fixed:20,output=fixed:4")
    router = RouterConfig(policy="prefix_affinity", load_floor=30)
    done = run(scenario, replicas=40, router=router, folder=tmp_path)
    arrived = [one.data.summary["requests"]["arrived"] for one in done.engines]
    assert sum(count > 0 for count in arrived) > 16  # the premise of this test
    write_cluster_run(tmp_path, done, trace=False, requests=False)
    page = (tmp_path / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    shown = [int(name.removeprefix("engine ")) for name in data["compare"]["headings"][1:]]
    loads = sorted((count for count in arrived if count), reverse=True)
    assert sorted((arrived[engine] for engine in shown), reverse=True) == loads[:8] + loads[-8:]
    assert "Of 40 engines, 16 are shown" in page


def test_commands_report_numbers_that_options_take() -> None:
    router = RouterConfig(policy="session_sticky", sessions_max=1_000_000, load_bound=1.2345678)
    groups = (EngineGroup(count=2, gpu="h100", weight=1.2345678),)
    words = ClusterScenario(base=replace(BASE, gpu=""), engines=groups, router=router).command().split()
    assert words[words.index("--router-sessions-max") + 1] == "1000000"
    assert words[words.index("--router-load-bound") + 1] == "1.2345678"
    assert words[words.index("--engines") + 1] == "2xh100:weight=1.2345678"
    assert "--gpu" not in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100", "--replicas", "0"], "`replicas` must be from 1 to 1024, got `0`"),
        (["--gpu", "h100", "--router", "best"], "`router` must be one of"),
        (["--gpu", "h100", "--engines", "2xh100"], "leave out '--gpu' and '--replicas'"),
        ([], "Missing option '--gpu'"),
        (["--engines", "2xh999"], "unknown GPU `h999`"),
        (["--gpu", "h100", "--replicas", "2", "--router-hop", "2min"], "`router_hop` must be from 0 to 60s"),
    ],
)
def test_what_cannot_be_simulated_is_one_message(arguments: list[str], message: str) -> None:
    from lockstep.sim.cli.simulate import simulate as command

    shown = CliRunner().invoke(command, ["--model", "qwen3-8b", "--workload", "gen:n=2", *arguments])
    assert shown.exit_code == 2
    assert message in shown.output
    assert "Traceback" not in shown.output


def test_interrupted_runs_leave_journals_that_replay(tmp_path: Path) -> None:
    """The signal handler sets `stop_requested`; here the progress callback does, in the middle."""
    from lockstep.sim.cluster.routed import Cluster

    seen: list[Cluster] = []

    def give_up(cluster: Cluster) -> bool:
        seen.append(cluster)
        cluster.stop_requested = True
        return False

    setup = assemble_cluster(ClusterScenario(base=BASE, replicas=2))
    done = simulate_cluster(setup, folder=tmp_path, give_up=give_up)
    assert done.interrupted
    assert 0 < done.data.summary["requests"]["arrived"] < 120
    for engine in range(2):
        replay(tmp_path / "engines" / str(engine))
    verify_router(tmp_path)
    write_cluster_run(tmp_path, done, trace=False)
    assert json.loads((tmp_path / "metrics.json").read_text())["about"]["interrupted"] is True
