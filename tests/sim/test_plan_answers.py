"""What a plan and a simulation answer: rejected requests, rates that do not depend on the length, exit status."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.profiles import DEFAULT_PROFILE, PROFILES
from lockstep.host.options import OptionField, options_of
from lockstep.sim.cli import progress
from lockstep.sim.cli.plan import plan as plan_command
from lockstep.sim.cli.plan import usable_cores
from lockstep.sim.cli.progress import ProgressLines
from lockstep.sim.cli.run_output import progress_bar
from lockstep.sim.cli.simulate import simulate as simulate_command
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan import answer as answers
from lockstep.sim.plan.ledger import TrialStore
from lockstep.sim.plan.question import OWN_KEYS, QUICK, Length, Question, parse_search
from lockstep.sim.plan.search import Progress, prepare, run_plan, sample_line
from lockstep.sim.plan.solve import solve
from lockstep.sim.plan.workers import Alone
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.settings import SCHEDULER_OPTIONS
from lockstep.sim.scenario.tier_options import TIER_KEYS
from lockstep.sim.workload.sampling import spread_sample
from lockstep.sim.workload.workload import SourceReading, Workload, WorkloadError, open_workload

SLOS = (Slo.parse("ttft_p90=5s"), Slo.parse("tpot_p90=100ms"))
TINY = replace(QUICK, long=Length(60, 60, 0.0), short=Length(60, 60, 0.0), replications_min=2, replications_max=3)


def planned(**changes: Any) -> answers.PlanAnswer:
    asked: dict[str, Any] = {
        "common": {"engine": "none"},
        "model": "qwen3-8b",
        "gpus": ("h100",),
        "slos": SLOS,
        "effort": TINY,
    }
    question = Question(**asked | changes)
    candidates, _ = prepare(question)
    run_plan(question, candidates, Alone(), TrialStore(None))
    return answers.PlanAnswer(question=question, candidates=candidates, workload_line="a workload")


@pytest.fixture(scope="module")
def long_prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace in which every tenth prompt has 9,000 tokens, and the others 1,000."""
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [f"{number / 10},{9000 if number % 10 == 0 else 1000},10" for number in range(120)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")
    return str(path)


# ------------------------------------------------------------------------------------------------------------- rejected


def test_rejected_requests_are_in_the_headline_and_the_rows_and_do_not_count_as_served(long_prompts: str) -> None:
    answer = planned(workload=long_prompts, rate=4.0, settings={"context_tokens_max": 4096})
    winner = answer.winner
    assert winner is not None
    assert winner.best is not None
    assert winner.best.served == pytest.approx(3.6)
    assert answer.headline.startswith("3.6 of 4/s within ")
    assert "6 of 60 requests (10.0 %, with 50.0 % of the prompt tokens) are rejected as too long" in answer.headline
    assert "the context of 4,096 tokens" in answer.headline
    table = answer.table()
    assert [str(column.header) for column in table.columns][5:7] == ["rate/s", "rejected"]
    assert [next(iter(column.cells)) for column in table.columns][5:7] == ["3.6 of 4", "10.0 % (50.0 %)"]
    best = answer.describe()["configurations"][0]["best"]
    assert (best["served"], best["rejected_requests_share"], best["rejected_prompt_tokens_share"]) == (3.6, 0.1, 0.5)


def test_a_configuration_that_serves_the_whole_load_wins_over_a_cheaper_one_that_rejects(long_prompts: str) -> None:
    answer = planned(
        workload=long_prompts, rate=30.0, search=parse_search(("context_tokens_max=4096,16384",)),
        slos=(Slo.parse("ttft_p90=400ms"),),
    )  # fmt: skip
    winner = answer.winner
    assert winner is not None
    assert winner.configuration.chosen["context_tokens_max"] == 16384
    assert "rejected" not in answer.headline
    costs = [c.cost_per_hour(c.best.paid_replicas) for c in answer.candidates if c.best is not None]
    assert len(costs) == 2
    assert costs[0] <= costs[1]


def test_the_largest_rate_is_that_of_the_served_requests(long_prompts: str) -> None:
    answer = planned(workload=long_prompts, settings={"context_tokens_max": 4096})
    best = answer.candidates[0].best
    assert best is not None
    assert best.served == pytest.approx(0.9 * best.load)
    assert f"sustains {best.served:.3g}/s" in answer.headline


def test_without_rejections_there_is_no_column_about_them(long_prompts: str) -> None:
    answer = planned(workload=long_prompts, rate=4.0)
    assert "rejected" not in [str(column.header) for column in answer.table().columns]
    assert answer.headline.startswith("4/s within ")


# --------------------------------------------------------------------------------------------------- part of a trace


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace of pairs with a prompt of their own, 100 requests apart; prompts have 1,024 and later 3,072 tokens."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = []
    for number in range(400):
        pair = number % 100 + 100 * (number // 200)
        blocks = 2 if number < 200 else 6
        ids = [0, *range(1 + 10 * pair, 10 * pair + blocks)]
        rows.append({"timestamp": 100 * number, "input_length": 512 * blocks, "output_length": 5, "hash_ids": ids})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_spread_sample_has_the_lengths_and_the_sharing_of_the_whole(changing: str) -> None:
    def opened(limit: int | None, *, spread: bool) -> Workload:
        return open_workload(changing, seed=7, limit=limit, reading=SourceReading(spread=spread))

    whole, first, sample = opened(None, spread=False), opened(60, spread=False), opened(60, spread=True)
    assert len(sample.turns) == 60
    assert first.summary().prompt.mean == 1024
    assert sample.summary().prompt.mean == pytest.approx(whole.summary().prompt.mean, rel=0.1)
    assert sample.summary().sharing_ratio == pytest.approx(whole.summary().sharing_ratio, abs=0.03)
    assert first.summary().sharing_ratio < whole.summary().sharing_ratio - 0.03
    assert sample.summary().arrivals_per_s == pytest.approx(whole.summary().arrivals_per_s, rel=0.05)
    assert opened(60, spread=True).digest == sample.digest
    assert opened(400, spread=True).digest == whole.digest


def test_a_spread_sample_keeps_sessions_whole() -> None:
    turns = open_workload("gen:n=200,turns=fixed:4,rate=2", seed=3, digest=False).turns
    sample = spread_sample(turns, 50)
    assert len(sample) == 48
    assert len(sample.by_clock_rows) == 12


def test_a_generator_has_no_sample() -> None:
    with pytest.raises(WorkloadError, match="`sample` is spread, which is for recorded requests"):
        open_workload("gen:n=20", seed=7, limit=5, reading=SourceReading(spread=True))


def test_a_plan_says_which_part_of_a_trace_it_simulates_and_how_it_differs(changing: str) -> None:
    asked: dict[str, Any] = {"model": "qwen3-8b", "gpus": ("h100",), "slos": SLOS, "effort": TINY, "workload": changing}
    lines = []
    for common in ({}, {"sample": "spread"}, {"time_window": "20s..40s"}):
        question = Question(**asked, common=common)
        lines.append(sample_line(question, prepare(question)[1]))
    assert lines[0].startswith("Simulated are 60 or more of 400 recorded requests, the first ones: 1,024 tokens in")
    assert "in all of them 2,048, 5 and " in lines[0]
    assert "--sample spread" in lines[0]
    assert "a sample from the whole time: 1,980 tokens in and 5 out" in lines[1]
    assert "60 or more of 200 recorded requests of the window 20s..40s, the first ones: 3,072" in lines[2]
    drawn = Question(**asked | {"workload": "gen:rate=4"})
    assert sample_line(drawn, prepare(drawn)[1]) == ""


@pytest.mark.parametrize(("requests", "short"), [(30, True), (60, False), (400, False)])
def test_a_plan_says_that_its_requests_end_before_a_simulation_would(requests: int, short: bool) -> None:
    """The same lengths sustain 29.5 per second for 200 requests, and 19.9 for 800: the queue has no time to grow."""
    workload = f"gen:n={requests},input=fixed:100,output=fixed:5"
    question = Question(
        model="qwen3-8b", gpus=("h100",), slos=SLOS, effort=TINY, workload=workload, rate=4.0, common={"engine": "none"}
    )
    answer = solve(question, prepare(question), [], Alone(), TrialStore(None), Progress())
    remark = f"The workload ends after {requests:,} requests, {requests / 4:.2f} s at this load: a queue that grows"
    assert any(line.startswith(remark) for line in answer.remarks()) == short


# --------------------------------------------------------------------------------------------------------- steady state


def run_of(requests: int, rate: float = 20.0) -> dict[str, Any]:
    workload = f"gen:n={requests},rate={rate},input=fixed:500,output=uniform:150:250"
    run = simulate(assemble(Scenario(model="qwen3-8b", gpu="h100", workload=workload, engine="none", slos=SLOS)))
    throughput: dict[str, Any] = run.data.summary["throughput"]
    return throughput


def test_rates_in_the_steady_state_do_not_depend_on_the_number_of_requests() -> None:
    short, long = run_of(150), run_of(900)
    for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "goodput_requests_per_s"):
        assert short[name] < 0.93 * long[name]  # over the makespan, the drain counts as time
        assert short["steady"][name] == pytest.approx(long["steady"][name], rel=0.1), name
    assert long["steady"]["requests_per_s"] == pytest.approx(20.0, rel=0.05)


def test_the_rate_of_a_closed_loop_in_waves_does_not_depend_on_the_number_of_requests() -> None:
    """Answers of one length begin and end together, so a window of time has no whole number of them."""
    rates = []
    for requests in (24, 240):
        length = Length(requests, requests, 0.0)
        answer = planned(
            load="sessions",
            sessions=16,
            workload="gen:input=fixed:300,output=fixed:60",
            effort=replace(TINY, long=length, short=length, per_session=1),
        )
        assert answer.winner is not None
        best = answer.winner.best
        assert best is not None
        assert best.clients == 16
        rates.append((best.steady("requests_per_s"), best.steady("output_tokens_per_s")))
    assert rates[0] == pytest.approx(rates[1], rel=0.05)
    assert rates[0][1] == pytest.approx(60 * rates[0][0], rel=1e-3)


def test_a_growing_queue_lowers_the_rates_of_the_steady_state() -> None:
    overloaded = run_of(1000, rate=55.0)["steady"]
    assert overloaded["requests_per_s"] < 50.0  # not the rate of the arrivals


def test_arrivals_at_one_instant_have_no_steady_state() -> None:
    workload = "gen:n=30,rate=inf,input=fixed:50,output=fixed:5"
    run = simulate(assemble(Scenario(model="qwen3-8b", gpu="h100", workload=workload, engine="none")))
    assert run.data.summary["throughput"]["steady"] == {}


# ------------------------------------------------------------------------------------------------------ simulate's ends

RUN = ["--model", "qwen3-8b", "--gpu", "h100", "--workload", "gen:n=20,rate=5,input=fixed:100,output=fixed:5"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--slo", "ttft_p99=10s", "--fail-on-slo"], 0),
        (["--slo", "ttft_p99=1us", "--fail-on-slo"], 3),
        (["--slo", "ttft_p99=1us"], 0),
        (["--slo", "ttft_p99=1us", "--fail-on-slo", "--replicas", "2"], 3),
        (["--fail-on-slo"], 2),
    ],
)
def test_a_missed_slo_is_an_exit_status_on_request(arguments: list[str], status: int) -> None:
    result = CliRunner().invoke(simulate_command, [*RUN, "--no-intervals", *arguments])
    assert result.exit_code == status, result.output


def test_help_shows_the_defaults_that_a_run_has() -> None:
    texts = {name: text for name, _, text in SCHEDULER_OPTIONS}
    for name, value in PROFILES[DEFAULT_PROFILE].items():
        assert f"[default: {value}" in texts[name]
    assert "sglang: prefill_first; vllm: running_first]" in texts["batching"]
    result = CliRunner().invoke(simulate_command, [*RUN, "--no-intervals", "--json"])
    scheduler = json.loads(result.stdout)["about"]["scheduler"]
    assert {name: scheduler[name] for name in PROFILES[DEFAULT_PROFILE]} == PROFILES[DEFAULT_PROFILE]


# ------------------------------------------------------------------------------------------------- progress and prices


def test_progress_is_a_line_now_and_then_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 3.0, 11.0, 12.0, 25.0])
    lines = ProgressLines(lambda: next(times))
    for done in range(4):
        lines.line(f"{done} done")
    assert capsys.readouterr().err.splitlines() == ["1 done, 11 s", "3 done, 25 s"]


def test_a_run_reports_progress_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress_bar(1000) as on_finish:
        on_finish(640)
    assert capsys.readouterr().err.startswith("640 of 1,000 requests have ended (64 %), ")


def test_a_search_over_cards_of_all_kinds_has_dollars_with_the_kind_of_each_price() -> None:
    question = Question(
        model="qwen3-8b", gpus=("h100", "l40s", "rtx4090", "a100"), workload="gen:rate=4", slos=SLOS, effort=TINY
    )
    candidates, _ = prepare(question)
    assert [c.usd_per_gpu_hour for c in candidates] == [1.3, 0.8, 0.34, 0.8]
    assert candidates[2].price_source.startswith("on_demand_low, for lack of rental_3yr: ")


def test_a_plan_answers_at_later_loads_too(tmp_path: Path) -> None:
    asked = "--model qwen3-8b --gpus h100 --workload gen:n=200 --slo ttft_p99=2s --quick --requests 20 --jobs 1".split()
    path = tmp_path / "plan.json"
    result = CliRunner().invoke(plan_command, [*asked, "--rate", "4", "--growth", "2,40", "--json", str(path)])
    assert result.exit_code == 0, result.output
    later = json.loads(path.read_text())["forecast"]
    assert [one["load"] for one in later] == [8.0, 160.0]
    assert later[1]["gpus"] > later[0]["gpus"] >= 1
    assert "at 40 times the load: " in result.output
    for growth, message in (("x", "must be factors above 0"), ("0", "must be factors above 0")):
        result = CliRunner().invoke(plan_command, [*asked, "--rate", "4", "--growth", growth])
        assert message in result.output
    assert "none is given" in CliRunner().invoke(plan_command, [*asked, "--growth", "2"]).output


@pytest.mark.parametrize(
    "field", [*options_of(Scenario).values(), *options_of(ClusterScenario).values()], ids=lambda one: one.name
)
def test_every_option_of_a_simulation_is_searched_or_refused_with_the_way_to_it(field: OptionField) -> None:
    if field.name in ("settings", "tiers"):
        return  # their fields are searched one by one
    words = {
        "tp": "2", "pp": "2", "mem_fraction": "0.8", "moe_a2a": "yes", "eplb": "yes", "rank_schedulers": "yes",
        "scaling": "open_requests:8", "placement": "mixed", "pdmux": "yes",
    }  # fmt: skip
    for spelling in (field.name, field.flag[2:]):
        text = f"{spelling}={words.get(field.name, '1')}"
        if {field.name, field.flag[2:].replace("-", "_")} & {*OWN_KEYS, *TIER_KEYS}:
            if spelling in OWN_KEYS:
                assert parse_search((text,))[0][0] == spelling
            continue
        with pytest.raises(ConfigError, match=r"a plan does not search it\nhint: "):
            parse_search((text,))


def test_a_container_has_as_many_processes_as_it_may_use_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    quota = tmp_path / "cpu.max"
    assert usable_cores(quota) == 64  # no such file
    for text, cores in (("max 100000\n", 64), ("150000 100000\n", 2), ("1000 100000\n", 1), ("9900000 100000\n", 64)):
        quota.write_text(text)
        assert usable_cores(quota) == cores
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert usable_cores(tmp_path / "none") == 10
