"""Plans: the searched configurations, the confidence of an answer, and equal answers to equal questions."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lockstep.core.cluster.router import RouterConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.runtime_settings import refuse_in_runtime
from lockstep.host.options import options_of
from lockstep.sim.cli.plan import plan
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan import answer as answers
from lockstep.sim.plan import serve_command
from lockstep.sim.plan import trial as trial_module
from lockstep.sim.plan.ledger import TrialStore
from lockstep.sim.plan.question import (
    QUICK,
    Configuration,
    Length,
    Question,
    content_files,
    natural_load,
    parse_prices,
    parse_search,
)
from lockstep.sim.plan.search import (
    PRUNE_MARGIN,
    Candidate,
    Evaluation,
    Progress,
    Searcher,
    drive,
    judge,
    prepare,
    prune,
    pruned_too_early,
    run_plan,
    surely_missed,
)
from lockstep.sim.plan.trial import SloResult, Trial, TrialResult, run_trial
from lockstep.sim.plan.workers import Alone, check_joins, check_reachable, workers_of
from lockstep.sim.run.load import open_load
from lockstep.sim.scenario.scenario import Scenario

SLOS = (Slo.parse("ttft_p90=1s"), Slo.parse("tpot_p90=40ms"))
TINY = replace(QUICK, long=Length(40, 40, 0.0), short=Length(30, 30, 0.0), replications_min=2, replications_max=3)


def question(**changes: Any) -> Question:
    """A question about kernels alone: without an engine's error, replications differ by their seeds only."""
    asked: dict[str, Any] = {
        "common": {"engine": "none"},
        "model": "qwen3-8b",
        "gpus": ("h100",),
        "workload": "gen:input=uniform:200:2000,output=uniform:5:15",
        "slos": SLOS,
        "effort": TINY,
    }
    return Question(**asked | changes)


def planned(asked: Question, ledger: TrialStore | None = None) -> answers.PlanAnswer:
    candidates, _ = prepare(asked)
    run_plan(asked, candidates, Alone(), ledger or TrialStore(None))
    return answers.PlanAnswer(question=asked, candidates=candidates, workload_line="a workload")


# ----------------------------------------------------------------------------------------------------------- the search


def test_a_search_is_every_combination_in_the_order_given() -> None:
    search = parse_search(("tp=1,2", "chunked-prefill-size=512..4096", "policy=fcfs"))
    assert search == (("tp", (1, 2)), ("chunked_prefill_size", (512, 1024, 2048, 4096)), ("schedule_policy", ("fcfs",)))
    names = [one.name for one in question(gpus=("h100", "h200"), search=search).configurations()]
    assert len(names) == 16
    assert names[0] == "h100 tp=1 chunked_prefill_size=512 schedule_policy=fcfs"
    assert names[-1] == "h200 tp=2 chunked_prefill_size=4096 schedule_policy=fcfs"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", r"`search` has `tp`, expected NAME=VALUES\nhint: such as --search tp=1,2,4"),
        ("tp=", "`tp` has no values"),
        ("tp=0", "`tp` must be a whole number of at least 1, got `0`"),
        ("tp=4..1", r"`tp` cannot be `4..1`: LOW must be at least 1, and at most HIGH"),
        ("tp=1..x", "a range is LOW..HIGH of whole numbers"),
        ("tp=1,1", "`tp` has a value twice: 1,1"),
        ("chunk=1", r"unknown setting `chunk`\nhint: "),
        ("overlap_depth=deep", "`overlap_depth` cannot be `deep`"),
        ("router=best", "`router` must be one of"),
    ],
)
def test_a_search_that_cannot_be_read_reports_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_search((text,))


@pytest.mark.parametrize("text", ["h100", "h100=free", "h100=-1", "=2"])
def test_a_price_that_cannot_be_read_reports_it(text: str) -> None:
    with pytest.raises(ConfigError, match="expected GPU=USD above 0"):
        parse_prices((text,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slos": ()}, "at least one SLO"),
        ({"gpus": ("h100", "h100")}, "`gpus` names one twice"),
        ({"gpus": ("h100", "")}, "`gpus` has an empty name: `h100,`"),
        ({"slos": SLOS[:1] * 2}, "`slo` is given twice: ttft_p90=1s, ttft_p90=1s"),
        ({"rate": 3.0, "gpus_max": 2}, "two questions"),
        ({"rate": 0.0}, "`rate` must be requests per second, at least 1e-6, got `0.0`"),
        ({"rate": math.nan}, "`rate` must be requests per second, at least 1e-6, got `nan`"),
        ({"gpus_max": 0}, "`max_gpus` must be at least 1, got `0`"),
        ({"load": "users"}, "`load` must be one of rate, sessions, got `users`"),
        ({"load": "sessions", "rate": 3.0}, "hint: leave out --rate, or add --load rate"),
        ({"sessions": 3}, "hint: leave out --sessions, or add --load sessions"),
        ({"load": "sessions", "sessions": 0}, "`sessions` must be from 1 to 1,000,000, got `0`"),
        ({"load": "sessions", "sessions": 3, "gpus_max": 2}, "`sessions` and `max_gpus` are two questions"),
        ({"common": {"tp": 0}}, "`tp` must be a whole number of at least 1, got `0`"),
        ({"common": {"mem_fraction": math.nan}}, "`mem_fraction` must be above 0 and at most 1, got `nan`"),
        ({"search": parse_search(("mem_fraction=0.9,2",))}, "`mem_fraction` must be above 0 and at most 1, got `2`"),
        ({"rate": -1.0}, "`rate` must be requests per second"),
        ({"confidence": 1.0}, "`confidence` must be from 0.5 to 0.999"),
        ({"prices": {"a100": 1.0}}, "`price` names `a100`, which is not among the GPUs h100"),
        ({"search": parse_search(("tp=1..512", "page_size=1..512", "max_running_requests=1..2097152"))}, "the most is"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        question(**changes)


# ------------------------------------------------------------------------------------------------------------ intervals


def slo_result(value: float) -> TrialResult:
    return TrialResult(slos=(SloResult(measured_us=value, failed=False),))


def test_a_rate_is_sustained_only_if_the_whole_interval_lies_within_the_bound() -> None:
    slos = (Slo.parse("ttft_p99=100us"),)
    sure = [slo_result(value) for value in (50.0, 51.0, 52.0)]
    unsure = [slo_result(value) for value in (60.0, 99.0, 80.0)]
    beyond = [slo_result(value) for value in (99.0, 101.0, 130.0)]
    assert judge(slos, sure, 0.95, systematic=False)[0] == "met"
    assert judge(slos, unsure, 0.95, systematic=False)[0] == "undecided"
    assert judge(slos, beyond, 0.95, systematic=False)[0] == "missed"
    gave_up = TrialResult(slos=sure[0].slos, gave_up=True)
    assert judge(slos, [gave_up], 0.95, systematic=False)[0] == "missed"


# --------------------------------------------------------------------------------------------------------------- trials


def trial(**changes: Any) -> Trial:
    described: dict[str, Any] = {
        "model": "qwen3-8b", "gpu": "h100", "workload": "gen:n=80,input=fixed:2000,output=fixed:40",
        "replicas": 1, "rate": 5.0, "limit": 80, "seed": 7, "slos": ("ttft_p90=1s",), "router": {},
    }  # fmt: skip
    return Trial.of_record(described | changes)


def test_giving_up_changes_no_verdict() -> None:
    """A run stops early exactly where the whole run misses the SLO."""
    verdicts = []
    for rate in (5.0, 25.0, 40.0):
        long = trial(rate=rate, workload="gen:n=300,input=fixed:2000,output=fixed:20", limit=300)
        whole, short = run_trial(long), run_trial(replace(long, give_up=True))
        missed = whole.slos[0].value > 1e6
        assert missed or not short.gave_up
        if not short.gave_up:
            assert short.slos == whole.slos
        verdicts.append((missed, short.gave_up))
    assert verdicts[0] == (False, False)
    assert verdicts[-1] == (True, True)


def test_equal_trials_have_equal_keys_and_anything_else_another() -> None:
    assert trial().key == trial().key
    keys = {trial(**change).key for change in ({}, {"seed": 8}, {"settings": {"overlap_depth": 0}}, {"content": "x"})}
    assert len(keys) == 4


def test_a_factor_makes_every_batch_longer() -> None:
    plain, slowed = run_trial(trial()), run_trial(trial(factor=1.5))
    assert slowed.summary["latency"]["tpot_us_p50"] > 1.3 * plain.summary["latency"]["tpot_us_p50"]


def test_a_damaged_result_is_run_again(tmp_path: Path) -> None:
    ledger = TrialStore(tmp_path / "plan")
    one = trial()
    ledger.add(one, run_trial(one))
    assert TrialStore(tmp_path / "plan").find(one) is not None
    next((tmp_path / "plan" / "simulations").iterdir()).write_bytes(b"{")
    assert TrialStore(tmp_path / "plan").find(one) is None


# ---------------------------------------------------------------------------------------------------------------- plans


def test_the_largest_rate_is_sustained_and_the_next_is_not() -> None:
    found = planned(question())
    (candidate,) = found.candidates
    assert candidate.best is not None
    assert candidate.missed is not None
    assert 1 < candidate.missed.load / candidate.best.load <= 1.15 * 1.01
    assert candidate.best.load < candidate.estimated_load  # the estimate is an upper bound
    for slo, interval in zip(SLOS, candidate.best.intervals, strict=True):
        assert interval.value <= interval.high <= slo.bound_us
    assert f"sustains {candidate.best.load:g}/s" in found.headline


def test_the_cheapest_for_a_rate_is_found_and_one_replica_less_does_not_do() -> None:
    found = planned(question(gpus=("h100", "h200"), rate=60.0, prices={"h100": 1.0, "h200": 10.0}, confirm_all=True))
    winner = found.winner
    assert winner is not None
    assert winner.configuration.gpu == "h100"
    assert winner.best is not None
    assert winner.best.replicas > 1
    fewest = math.ceil(60.0 / (winner.estimated_load * PRUNE_MARGIN))  # decided by the estimate alone
    assert winner.missed.replicas == winner.best.replicas - 1 if winner.missed else winner.best.replicas == fewest
    other = found.candidates[1].best
    assert other is not None
    assert found.candidates[1].cost_per_hour(other.replicas) > winner.cost_per_hour(winner.best.replicas)


def test_a_candidate_that_is_worse_under_any_long_runs_is_not_confirmed() -> None:
    asked = question(gpus=("h100", "h200"), rate=60.0, prices={"h100": 1.0, "h200": 10.0})
    found = planned(asked)
    assert found.candidates[1].pruned == "costs more than #1"
    assert "not confirmed: costs more than #1" in answers.why_not(found.candidates[1])
    assert not found.candidates[1].evaluations


def test_on_the_same_gpus_only_clearly_worse_settings_are_pruned() -> None:
    asked = question(search=(("overlap_depth", (0, 1, 2)),))
    made = [
        Candidate(configuration=one, question=asked, setup=object(), narrow_met=met, narrow_missed=missed)  # type: ignore[arg-type]
        for one, met, missed in zip(asked.configurations(), (10.0, 14.0, 15.0), (11.0, 16.0, 17.0), strict=True)
    ]
    prune(asked, made)
    assert [bool(candidate.pruned) for candidate in made] == [True, False, False]


def test_an_impossible_slo_reports_what_could_be_had() -> None:
    found = planned(question(slos=(Slo.parse("ttft_p90=1ms"),)))
    assert found.winner is None
    assert found.headline.startswith("No configuration meets ttft_p90=1ms. The best achievable, at ")
    assert "TTFT p90" in answers.why_not(found.candidates[0])


def test_what_does_not_fit_is_listed_with_its_numbers() -> None:
    found = planned(question(model="llama-3.1-70b", search=(("tp", (1, 4)),), gpus_max=4))
    assert "does not fit on 1 x H100-SXM: per GPU weights 141" in answers.why_not(found.candidates[0])
    assert found.candidates[1].best is not None
    assert found.winner is found.candidates[1]


def test_gpus_at_most_are_shared_among_replicas() -> None:
    found = planned(question(gpus_max=3, search=(("tp", (1, 2, 4)),)))
    assert [candidate.replicas for candidate in found.candidates[:2]] == [3, 1]
    assert answers.why_not(found.candidates[2]) == "needs 4 GPUs, of at most 3"


def test_the_front_holds_what_is_not_beaten_in_everything() -> None:
    asked = question(search=(("overlap_depth", (0, 1)),), prices={"h100": 2.0})
    found = planned(replace(asked, confirm_all=True))
    points = {}
    for candidate in found.candidates:
        assert candidate.best is not None
        cost = answers.usd_per_million(candidate)
        points[candidate.configuration.number] = (cost, *(interval.value for interval in candidate.best.intervals))
    front = answers.pareto_front(found.question, found.candidates)
    for number, point in points.items():
        beaten = any(p != point and all(a <= b for a, b in zip(p, point, strict=True)) for p in points.values())
        assert (number in front) != beaten


def test_rates_of_sessions_are_sessions_begun() -> None:
    found = planned(question(workload="gen:turns=fixed:4,think=fixed:100ms,input=fixed:200,output=fixed:30"))
    (candidate,) = found.candidates
    assert candidate.turns_per_arrival == 4
    assert candidate.best is not None
    assert found.remarks()[0].startswith("Rates are sessions begun per second.")


def test_the_winners_command_repeats_its_run() -> None:
    from lockstep.sim.cli.simulate import simulate as command

    found = planned(question())
    winner = found.winner
    assert winner is not None
    assert winner.best is not None
    arguments = shlex.split(serve_command.simulate_command(winner))[2:]
    shown = CliRunner().invoke(command, [*arguments, "--json", "--no-intervals"])
    assert shown.exit_code == 0, shown.output
    metrics = json.loads(shown.stdout)
    assert metrics["latency"] == winner.best.results[0].summary["latency"]


def test_a_plan_names_its_engine_and_draws_its_error() -> None:
    alone, named = planned(question()), planned(question(common={}))
    assert any(
        line.startswith("Times: engine: none: kernels without an engine, a lower bound.") for line in alone.remarks()
    )
    assert any(line.startswith("Times: engine: vllm ") for line in named.remarks())
    assert alone.describe()["question"]["engine"] == "none"
    assert {e.first_trial.factor for c in named.candidates for e in c.evaluations} != {1.0}
    assert {e.first_trial.factor for c in alone.candidates for e in c.evaluations} == {1.0}


def test_no_configuration_is_left_out_for_the_sake_of_itself() -> None:
    """Whatever its short runs found, a configuration that is the only one on its GPUs is confirmed."""
    for met, missed in ((10.0, 11.0), (10.0, None), (10.0, 2.0)):
        asked = question()
        (one,) = asked.configurations()
        made = [Candidate(configuration=one, question=asked, setup=object(), narrow_met=met, narrow_missed=missed)]  # type: ignore[arg-type]
        prune(asked, made)
        assert not made[0].pruned


def evaluation(load: float, replicas: int = 1) -> Evaluation:
    return Evaluation(load=load, replicas=replicas, status="met", intervals=(), results=(), first_trial=trial())


def test_a_candidate_left_out_for_more_than_the_other_one_confirms_is_confirmed_after_all() -> None:
    asked = question(search=(("overlap_depth", (0, 1)),))
    made = [
        Candidate(configuration=one, question=asked, setup=object(), narrow_met=met, narrow_missed=missed)  # type: ignore[arg-type]
        for one, met, missed in zip(asked.configurations(), (10.0, 20.0), (11.0, 21.0), strict=True)
    ]
    prune(asked, made)
    assert [bool(candidate.pruned) for candidate in made] == [True, False]
    made[1].best = evaluation(19.0)
    assert pruned_too_early(asked, made) == []
    made[1].best = evaluation(9.0)  # its long runs had a lower result than the short ones of the other
    assert pruned_too_early(asked, made) == [made[0]]
    assert not made[0].pruned
    made[0].pruned = "serves less than #2 on the same GPUs"
    made[1].best = None
    assert pruned_too_early(asked, made) == [made[0]]


# -------------------------------------------------------------------------------------------------------- closed loops

AGENTS = "gen:turns=fixed:4,think=uniform:200ms:1s,input=fixed:4000,output=fixed:6"


def closed(**changes: Any) -> Question:
    usual = {"load": "sessions", "workload": AGENTS, "slos": (Slo.parse("ttft_p90=300ms"),)}
    return question(**usual | changes)


def test_the_load_of_a_closed_loop_is_sessions_at_a_time() -> None:
    found = planned(closed())
    (candidate,) = found.candidates
    assert candidate.best is not None
    assert candidate.missed is not None
    assert candidate.best.load == int(candidate.best.load)
    assert candidate.missed.load == candidate.best.load + 1  # so few that no load lies between them
    assert candidate.best.first_trial.base.concurrency == candidate.best.load
    assert candidate.best.first_trial.base.rate is None
    assert len(candidate.best.results) >= 2  # other seeds, other orders of sessions
    assert f"sustains {candidate.best.load:,.0f} sessions within" in found.headline
    assert found.remarks()[0].startswith("The load is sessions in progress at a time")
    described = found.describe()
    assert described["question"]["load"] == "sessions"
    assert described["configurations"][0]["best"]["sessions"] == candidate.best.load


def test_so_many_sessions_take_so_many_replicas() -> None:
    most = planned(closed()).candidates[0].best
    assert most is not None
    found = planned(closed(sessions=round(most.load * 2.25), router=RouterConfig(policy="session_sticky")))
    best = found.candidates[0].best
    assert best is not None
    assert best.replicas == 3
    assert "sessions within" in found.headline
    assert "takes 3 GPUs" in found.headline
    assert not any("--router session_sticky" in line for line in found.remarks())
    candidate = found.candidates[0]
    assert candidate.trial is not None
    candidate.trial = replace(candidate.trial, router=RouterConfig(policy="round_robin"))
    assert any("--router session_sticky" in line for line in found.remarks())


def test_one_session_is_the_least_load() -> None:
    found = planned(closed(slos=(Slo.parse("tpot_p90=1ms"),)))
    assert found.winner is None
    assert "at 1 session, the lowest load tried" in found.headline


def test_a_closed_loop_is_given_up_when_too_many_were_late_though_few_ever_wait() -> None:
    long = trial(
        rate=None, concurrency=24, limit=600, slos=("ttft_p90=30ms",),
        workload="gen:n=600,turns=fixed:5,think=fixed:100ms,input=fixed:3000,output=fixed:20",
    )  # fmt: skip
    whole, short = run_trial(long), run_trial(replace(long, give_up=True))
    assert whole.slos[0].value > 30_000
    assert short.gave_up
    assert short.requests < whole.requests / 2


def test_what_load_a_workload_has_by_nature(tmp_path: Path) -> None:
    rows = [{"trace": "s", "agent": "", "t": t, "in": 64 * n, "out": 3, "hash_runs": [[1, n]], "think_time": 2.0}
            for n, t in enumerate((0.0, 5.0), 1)]  # fmt: skip
    agents = tmp_path / "agents.jsonl"
    agents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert natural_load(str(agents)) == "sessions"
    clocked = tmp_path / "clocked.csv"
    clocked.write_text("arrival_s,input_tokens,output_tokens\n0,500,20\n3,400,20\n")
    assert natural_load(str(clocked)) == "rate"
    assert natural_load(AGENTS) == "rate"


# ------------------------------------------------------------------------------------------------------------- workers


class ManyWorkers:
    """Runs all trials that it is given, the last one first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running: dict[str, Trial] = {}
        self.given: list[Trial] = []

    def submit(self, trial: Trial) -> None:
        self.running[trial.key] = trial
        self.given.append(trial)
        assert len(self.running) <= self.size

    def next_result(self) -> tuple[Trial, TrialResult]:
        key = list(self.running)[-1]
        trial = self.running.pop(key)
        return trial, run_trial(trial)

    def __enter__(self) -> ManyWorkers:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_recorded_trace_is_read_once_for_all_seeds_of_a_closed_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    monkeypatch.setattr(trial_module, "open_load", lambda given: opened.append(given.seed) or open_load(given))
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "40,5\n60,6\n" * 20, encoding="utf-8")

    def results(workload: str, **load: Any) -> list[TrialResult]:
        base = Scenario(model="qwen3-8b", gpu="h100", workload=workload, concurrency=3, limit=30, **load)
        trials = [Trial(base=replace(base, seed=seed), replicas=1, content=str(tmp_path)) for seed in (1, 2)]
        return [run_trial(one) for one in trials]

    first, second = results(str(path))
    assert opened == [1]
    assert first.prompt_tokens != second.prompt_tokens  # sessions in another order
    results(str(path), samples="0.5x2")
    results("gen:n=40,rate=5")
    assert opened == [1, 1, 2, 1, 2]  # their samples and requests are drawn


@pytest.mark.parametrize("asked", [question(), closed()])
def test_any_number_of_workers_in_any_order_gives_the_same_answer(asked: Question) -> None:
    alone = planned(asked).to_json()
    given = []
    for size in (3, 20):
        candidates, _ = prepare(asked)
        workers = ManyWorkers(size)
        run_plan(asked, candidates, workers, TrialStore(None))
        assert answers.PlanAnswer(question=asked, candidates=candidates, workload_line="a workload").to_json() == alone
        assert len({trial.key for trial in workers.given}) == len(workers.given)  # no trial twice
        given.append(len(workers.given))
    assert given == sorted(given)


def test_replications_that_change_nothing_are_not_run_by_one_hand() -> None:
    ledger = TrialStore(None)
    asked = question(slos=(Slo.parse("ttft_p90=60ms"),))
    candidates, _ = prepare(asked)
    candidates[0].narrow_met = candidates[0].estimated_load * 3
    drive([Searcher(asked, None).confirm_load(candidates[0])], Alone(), ledger, Progress(), "confirming")
    first, *_ = candidates[0].evaluations
    assert (first.status, len(first.results)) == ("missed", 1)
    assert all(len(one.results) >= TINY.replications_min for one in candidates[0].evaluations if one.met)
    assert ledger.run == sum(len(one.results) for one in candidates[0].evaluations)


def test_a_miss_is_sure_when_perfect_replications_could_not_mend_it() -> None:
    slos = (Slo.parse("ttft_p90=1s"),)
    assert surely_missed(slos, [slo_result(3.1e6)], 3)
    assert not surely_missed(slos, [slo_result(2.9e6)], 3)
    assert surely_missed(slos, [slo_result(2.9e6), slo_result(0.2e6)], 3)
    assert surely_missed(slos, [slo_result(math.inf)], 10)
    assert not surely_missed(slos, [], 3)


# --------------------------------------------------------------------------------------------------------- command line


ARGUMENTS = [
    *("--model", "qwen3-8b", "--gpus", "h100", "--workload", "gen:input=uniform:200:2000,output=uniform:5:15"),
    *("--slo", "ttft_p90=1s", "--slo", "tpot_p90=40ms", "--quick", "--requests", "40", "--search", "overlap_depth=0,1"),
]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(plan, [*ARGUMENTS, *arguments])


def outputs(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("plan.html", "plan.json")}


def test_a_plan_that_was_interrupted_goes_on_and_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = invoke("--jobs", "1", "--out", str(tmp_path / "whole"))
    assert whole.exit_code == 0, whole.output

    left = 7
    take = Alone.next_result

    def interrupted(self: Alone) -> tuple[Trial, TrialResult]:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return take(self)

    with monkeypatch.context() as patched:
        patched.setattr(Alone, "next_result", interrupted)
        first = invoke("--jobs", "1", "--out", str(tmp_path / "parts"))
    assert first.exit_code == 130
    assert "keeps 7 simulations\nhint: run the same command again to continue" in first.stderr
    assert not (tmp_path / "parts" / "plan.json").exists()

    second = invoke("--jobs", "1", "--out", str(tmp_path / "parts"))
    assert second.exit_code == 0, second.output
    assert "7 found from before" in second.stderr
    assert second.stdout == whole.stdout
    assert outputs(tmp_path / "parts") == outputs(tmp_path / "whole")
    page = (tmp_path / "whole" / "plan.html").read_text()
    assert "default-src 'none'" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.fixture(scope="module")
def simplest() -> Candidate:
    """A candidate that was confirmed, with one replica."""
    found = planned(question(rate=1.0)).winner
    assert found is not None
    return found


def test_lockstep_serve_takes_the_emulated_winner() -> None:
    """Each printed command line is valid: settings as that command reads them."""
    serve = pytest.importorskip("lockstep.api.serve", reason="the server is not installed").serve
    settings = {
        "schedule_policy": "lpm",
        "isolate_tenants": True,
        "eos_token_ids": (7,),
        "waiting_timeout_us": 30_000_000,
    }
    common = {"tp": 2, "profile": "vllm", "mem_fraction": 0.8, "calibration": "vllm-h100", "kv_dtype": "fp8"}
    common["fp8_activations"] = "off"
    common["tiers"] = {"host_cache_gb": 50.0}
    planned_one = planned(question(settings=settings, common=common, rate=200.0))
    assert planned_one.winner is not None
    served, emulated = serve_command.serve_commands(planned_one.winner)
    replicas = planned_one.winner.best.replicas if planned_one.winner.best is not None else 0
    assert replicas > 1
    assert emulated.lacks == ["host_cache_gb 50"]
    assert all(f"--dp {replicas} " in one.line for one in (emulated, served))
    assert "--kv-cache-dtype fp8_e4m3" in emulated.line
    assert "--kv-cache-dtype fp8_e4m3" in served.line
    assert all("--fp8-activations off" in one.line for one in (emulated, served))
    assert "--host-cache-gb 50 " in served.line
    assert "--tp 2" in served.line
    assert "--set batching=running_first" in served.line  # of the profile, which only an emulated server accepts
    words = shlex.split(emulated.line)
    assert words[:2] == ["lockstep", "serve"]
    shown = CliRunner().invoke(serve, [*words[2:], "--dry-run"])
    assert shown.exit_code == 0, shown.output
    lines = [line.strip() for line in shown.output.splitlines()]
    assert lines[0].endswith(f"qwen3-8b (emulated) on 2 x H100-SXM, emulated, {replicas} times")
    for line in ("schedule_policy = lpm", "isolate_tenants = True", "waiting_timeout_us = 30000000"):
        assert line in lines
    assert "batching = running_first" in lines


@pytest.mark.parametrize(
    ("settings", "more", "lacks"),
    [
        ({"pp_size": 2}, {"pp": 2}, ["pp 2", "pp_size 2"]),
        (
            {"pp_size": 2, "pp_async_batch_depth": 1, "pp_dynamic_chunking": False},
            {},
            ["pp_size 2", "pp_async_batch_depth 1"],
        ),
        ({"pp_size": 1}, {}, []),
        ({"encoder_budget_tokens": 9}, {"media": "image=1:64x64"}, ["media image=1:64x64", "encoder_budget_tokens 9"]),
        ({"encoder_cache_tokens": None}, {"mm_encoder_tp_mode": "data"}, ["mm_encoder_tp_mode data"]),
        ({"jump_forward_tokens": 8}, {}, ["jump_forward_tokens 8"]),
        ({"num_reserved_decode_tokens": 3}, {}, ["num_reserved_decode_tokens 3"]),
        ({"prefill_delayer": True, "prefill_full_skip_passes": 0}, {}, ["prefill_delayer yes"]),
    ],
)
def test_what_is_simulated_only_is_reported_and_not_in_the_line(
    settings: dict[str, Any], more: dict[str, Any], lacks: list[str], simplest: Candidate
) -> None:
    more = dict(more)
    serve = pytest.importorskip("lockstep.api.serve", reason="the server is not installed").serve
    assert simplest.trial is not None
    scenario = {name: more.pop(name) for name in list(more) if name in options_of(Scenario)}
    base = replace(simplest.trial.base, settings={"schedule_policy": "lpm", **settings}, **scenario)
    trial = replace(simplest.trial, base=base, **more)
    served, emulated = serve_command.serve_commands(replace(simplest, trial=trial))
    assert emulated.lacks == lacks
    words = shlex.split(emulated.line)
    assert words[words.index("--set") :] == ["--set", "schedule_policy=lpm"]
    shown = CliRunner().invoke(serve, [*words[2:], "--dry-run"])
    assert shown.exit_code == 0, shown.output
    for word in (word for word in shlex.split(served.line) if "=" in word):
        refuse_in_runtime(word.partition("=")[0])
    assert ("jump_forward_tokens=8" in served.line) == ("jump_forward_tokens" in settings)
    assert ("--pp 2 " in served.line) == ("--set pp_size=2" in served.line) == ("pp" in scenario)


def test_a_server_has_the_blocks_of_its_model_by_itself(simplest: Candidate) -> None:
    assert simplest.trial is not None
    base = replace(simplest.trial.base, diffusion_block=32, profile="lockstep")
    served, emulated = serve_command.serve_commands(replace(simplest, trial=replace(simplest.trial, base=base)))
    assert "batching" not in served.line  # the profile's is refused beside blocks
    assert "reserve=on_demand" in served.line
    assert "diffusion_block 32" not in served.lacks
    assert "diffusion_block 32" in emulated.lacks


def test_experts_of_the_winner_are_placed_by_the_server_too(simplest: Candidate) -> None:
    """Assumptions about their load are not; and with data-parallel attention the server places none."""
    assert simplest.trial is not None
    layout = {"tp": 4, "ep": 4, "moe_a2a": True, "eplb": True, "redundant_experts": 8, "expert_cv": 1.0}
    base = replace(simplest.trial.base, **layout)
    served, _ = serve_command.serve_commands(replace(simplest, trial=replace(simplest.trial, base=base)))
    assert "--tp 4 --ep 4 --moe-a2a --eplb --redundant-experts 8 " in served.line
    assert served.lacks == []
    base = replace(base, attention_dp=4, rank_schedulers=True)
    served, _ = serve_command.serve_commands(replace(simplest, trial=replace(simplest.trial, base=base)))
    assert "--eplb" not in served.line
    assert served.lacks == ["eplb yes", "redundant_experts 8"]


def test_more_processes_give_the_same_bytes(tmp_path: Path) -> None:
    alone = invoke("--jobs", "1", "--json", str(tmp_path / "alone.json"))
    many = invoke("--jobs", "2", "--json", str(tmp_path / "many.json"))
    assert alone.exit_code == many.exit_code == 0, many.output
    assert alone.stdout == many.stdout
    assert (tmp_path / "alone.json").read_bytes() == (tmp_path / "many.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "h999"], "unknown GPU `h999`"),
        (["--model", "nothing"], "unknown model `nothing`"),
        (["--slo", "latency=1s"], "unknown metric `latency`"),
        (["--search", "speed=1"], "unknown setting `speed`"),
        (["--jobs", "0"], "`jobs` must be at least 1, got `0`"),
        (["--requests", "1"], "`requests` must be at least 10, got `1`"),
        (["--price-kind", "free"], "`price_kind` must be one of"),
        (["--ray", "auto"], "`--ray` needs Ray, which is not installed\nhint: pip install 'lockstep-sim[ray]'"),
    ],
)
def test_what_cannot_be_planned_is_one_message(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    shown = invoke(*arguments)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "h100,H100-SXM"], "`gpus` names H100-SXM twice: `h100` and `H100-SXM`"),
        (["--search", "kv_dtype=bad"], "`kv_dtype` must be one of bf16, fp8, got `bad`"),
        (["--search", "chunked_prefill_size=8..2"], "`chunked_prefill_size` cannot be `8..2`"),
        (["--search", "tp=1", "--search", "tp=2"], "`search` names `tp` twice\nhint: put all its values into one"),
        (["--tp", "0"], "`tp` must be a whole number of at least 1, got `0`"),
        (["--mem-fraction", "nan"], "`mem_fraction` must be above 0 and at most 1, got `nan`"),
        (["--rate", "nan"], "`rate` must be requests per second, at least 1e-6, got `nan`"),
        (["--router-load-floor", "3"], "`router_load_floor` is a setting of prefix_affinity, got `3` under least_req"),
        (
            ["--router-load-floor", "3", "--search", "router=round_robin,session_sticky"],
            "got `3` under round_robin and session_sticky\nhint: --router prefix_affinity, or leave out --router-",
        ),
        (["--max-gpus", "0"], "`max_gpus` must be at least 1, got `0`"),
        (["--load", "users"], "`load` must be one of rate, sessions, got `users`"),
        (["--json", "FOLDER"], "`--json`: `FOLDER` is a folder, expected a file"),
        (
            ["--json", "FOLDER/file/plan.json"],
            "`--json`: `FOLDER/file/plan.json` cannot be written: `FOLDER/file` is a",
        ),
        (["--report", "FOLDER/file/plan.html"], "`--report`: `FOLDER/file/plan.html` cannot be written"),
        (["--json", "FOLDER/x", "--report", "FOLDER/x"], "--json and --report both name `FOLDER/x`\nhint: give each"),
        (["--out", "FOLDER/file/plan"], "`out` cannot be written to, `FOLDER/file/plan`: not a directory"),
        (["--out", "FOLDER/file"], "`FOLDER/file` exists and does not hold a plan"),
        (["--workload", "FOLDER/empty.csv"], "FOLDER/empty.csv: the file is empty"),
        (["--workload", "FOLDER/one.csv"], "FOLDER/one.csv: it has one arrival and so no rate"),
        (["--workload", "FOLDER/none.csv"], "FOLDER/none.csv: no such file"),
    ],
)
def test_what_cannot_be_planned_is_reported_before_anything_is_simulated(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty.csv").touch()
    (tmp_path / "one.csv").write_text("arrival_s,input_tokens,output_tokens\n0,500,20\n")
    # If the last of several values counts, this one does; options that may be repeated are not among ARGUMENTS' own.
    basic = [word for word in ARGUMENTS[:-2] if word != "--search"]
    shown = CliRunner().invoke(
        plan, [*basic, "--jobs", "1", *(word.replace("FOLDER", str(tmp_path)) for word in arguments)]
    )
    assert shown.exit_code == 2
    assert message.replace("FOLDER", str(tmp_path)) in shown.stderr
    assert "Traceback" not in shown.output
    assert shown.stdout == ""


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "`ray`: no Ray cluster at `127.0.0.1:1`: Connection refused\nhint: start it there with `ray"),
        ("ray://127.0.0.1:1", "no Ray cluster at `ray://127.0.0.1:1`: Connection refused"),
        ("head", "`ray` must be local, auto or HOST:PORT, got `head`\nhint: start it there"),
        ("head:99999", "`ray` must be local, auto or HOST:PORT, got `head:99999`"),
    ],
)
def test_a_ray_cluster_that_is_not_there_is_one_message_within_seconds(address: str, message: str) -> None:
    began_s = time.monotonic()
    shown = invoke("--ray", address)
    assert time.monotonic() - began_s < 120
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.output


def test_a_host_that_never_answers_is_given_up_after_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(address: tuple[str, int], timeout: float) -> None:
        assert (address, timeout) == (("10.0.0.1", 6379), 5.0)
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", silent)
    with pytest.raises(ConfigError, match=r"no Ray cluster at `10.0.0.1:6379`: no answer within 5 s\nhint: start it"):
        check_reachable("10.0.0.1:6379")


@pytest.mark.parametrize(
    ("greeting", "timeout_s", "message"),
    [
        (None, 0.3, "no answer within 0.3 s"),
        (b"", 120.0, "another program answers there"),
        (b"HTTP/1.1 400 Bad Request\r\n", 120.0, "another program answers there"),
        (b"\x00\x00\x06\x04\x00\x00\x00\x00\x00", 120.0, ""),  # as gRPC does
    ],
)
def test_a_listener_that_is_no_ray_is_found_out_before_ray_is_called(
    greeting: bytes | None, timeout_s: float, message: str
) -> None:
    """Ray itself would try for minutes. A socket that never answers still accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(64).startswith(b"PRI * HTTP/2.0")
                connection.sendall(greeting or b"")

        if greeting is not None:
            threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if not message:
            check_reachable(address, timeout_s)
            return
        with pytest.raises(ConfigError, match=f"no Ray cluster at `{address}`: {message}\nhint: start it"):
            check_reachable(address, timeout_s)


@pytest.mark.parametrize(
    ("program", "timeout_s", "message"),
    [
        ("import sys; print('first', 'reason', sep='\\n', file=sys.stderr); sys.exit(1)", 120.0, "reason"),
        ("import os; os.abort()", 120.0, "exit status -6"),
        ("import time; time.sleep(3600)", 1.0, "no process could join within 1 s"),
    ],
)
def test_a_cluster_that_no_worker_can_join_is_one_message(
    program: str, timeout_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends the process when it gives up, so another process tries."""
    monkeypatch.setattr("lockstep.sim.plan.workers.JOIN", program)
    with pytest.raises(ConfigError, match=f"no Ray cluster at `10.0.0.1:6379`: {message}\nhint: start it"):
        check_joins("10.0.0.1:6379", timeout_s)
    monkeypatch.setattr("lockstep.sim.plan.workers.JOIN", "")
    check_joins("10.0.0.1:6379", 120.0)


def test_what_a_process_reported_that_could_not_join_in_time_is_part_of_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "import sys, time; print('not yours', file=sys.stderr, flush=True); time.sleep(3600)"
    monkeypatch.setattr("lockstep.sim.plan.workers.JOIN", program)
    for timeout_s in (1, 5, 25, 125):  # until the time is enough for an interpreter to start and to print
        with pytest.raises(ConfigError, match=f"no process could join within {timeout_s} s") as raised:
            check_joins("10.0.0.1:6379", timeout_s)
        if "not yours" in str(raised.value):
            break
    assert f"no process could join within {timeout_s} s: not yours\nhint: start it" in str(raised.value)


def test_a_process_that_dies_is_one_message_and_not_a_wait_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the system's killer of processes with too much memory."""
    monkeypatch.setattr("lockstep.sim.plan.workers.run_encoded", die)
    shown = invoke("--jobs", "2")
    assert shown.exit_code == 1
    assert "OSError: a process that simulated h100 died; was it killed for lack of memory?\nhint: " in shown.stderr
    assert "Traceback" not in shown.output


def die(_: bytes) -> bytes:
    """In another process, as `run_encoded` is."""
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def test_whatever_decides_a_simulation_is_in_its_key(tmp_path: Path) -> None:
    """Contents of files, also of those in a folder or a mix: after an edit, a stored answer must not be used."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "model").mkdir()
    for name in ("tables/gemm.csv", "model/config.json", "a.csv", "b.csv"):
        (tmp_path / name).write_text(name)
    asked = question(
        model=str(tmp_path / "model"),
        workload=f"mix:a={tmp_path}/a.csv@3;b={tmp_path}/b.csv",
        common={"operators": str(tmp_path / "tables")},
    )
    names = {str(path.relative_to(tmp_path)) for path in content_files(asked)}
    assert names == {"tables/gemm.csv", "model/config.json", "a.csv", "b.csv"}


def test_ctrl_c_ends_a_plan_and_the_same_command_ends_as_if_it_had_not(tmp_path: Path) -> None:
    """A real process and a real signal, in a plan of several processes."""
    if os.name != "posix":
        pytest.skip("needs POSIX signals")
    whole = invoke("--jobs", "1", "--out", str(tmp_path / "whole"))
    of_all = len(list((tmp_path / "whole").glob("simulations/*.json")))
    words = [sys.executable, "-c", "from lockstep.sim.cli.plan import plan; plan()", *ARGUMENTS, "--jobs", "2"]
    folder = tmp_path / "parts"
    process = subprocess.Popen(
        [*words, "--out", str(folder)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 120
    while len(list(folder.glob("simulations/*.json"))) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)  # so that nothing runs while its progress is read
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    in_the_middle = len(list(folder.glob("simulations/*.json"))) < of_all
    if in_the_middle:
        process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    stdout, stderr = process.communicate(timeout=120)
    assert "Traceback" not in stderr
    assert process.returncode == (130 if in_the_middle else 0)
    if in_the_middle:
        assert stdout == ""
        assert "hint: run the same command again to continue" in stderr
    next(folder.glob("simulations/*.json")).write_bytes(b"not JSON")
    second = invoke("--jobs", "1", "--out", str(folder))
    assert second.exit_code == whole.exit_code == 0, second.output
    assert second.stdout == whole.stdout
    assert outputs(folder) == outputs(tmp_path / "whole")


def test_ctrl_c_while_the_page_is_made_leaves_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.sim.plan.page.render_plan", interrupted)
    shown = invoke("--jobs", "1", "--out", str(tmp_path / "plan"))
    assert shown.exit_code == 130
    assert not (tmp_path / "plan" / "plan.html").exists()


def test_a_plan_in_which_nothing_fits_or_nothing_meets_the_slo_ends_with_3() -> None:
    nothing_fits = invoke("--jobs", "1", "--model", "llama-3.1-70b")
    assert nothing_fits.exit_code == 3
    assert "does not fit on 1 x H100-SXM" in " ".join(nothing_fits.stdout.split())
    assert "No configuration can run." in nothing_fits.stdout
    nothing_meets = invoke("--jobs", "1", "--slo", "e2e_p99=1ms")
    assert nothing_meets.exit_code == 3
    assert "The best achievable, at" in nothing_meets.stdout


def test_a_closed_loop_gives_the_same_bytes_with_any_number_of_processes(tmp_path: Path) -> None:
    words = [
        *("--model", "qwen3-8b", "--gpus", "h100", "--workload", AGENTS, "--load", "sessions", "--quick"),
        *("--slo", "ttft_p90=300ms", "--requests", "30"),
    ]
    folders = [tmp_path / str(jobs) for jobs in (1, 3)]
    shown = [CliRunner().invoke(plan, [*words, "--jobs", folder.name, "--out", str(folder)]) for folder in folders]
    assert [one.exit_code for one in shown] == [0, 0], shown[0].output
    assert len({one.stdout for one in shown}) == 1
    assert outputs(folders[0]) == outputs(folders[1])


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    shown = invoke("--out", str(tmp_path))
    assert shown.exit_code == 2
    assert "exists and does not hold a plan" in shown.stderr


def test_worker_pools_are_chosen_by_the_options() -> None:
    assert isinstance(workers_of(1, None), Alone)


def test_progress_reports_stages_searches_and_simulations() -> None:
    told: list[str] = []
    asked = question()
    candidates, _ = prepare(asked)
    progress = Progress(
        stage=lambda name, searches: told.append(f"{name} {searches}"),
        trial=lambda: told.append("trial"),
        search=lambda: told.append("search"),
    )
    ledger = TrialStore(None)
    run_plan(asked, candidates, Alone(), ledger, progress)
    assert [word for word in told if word != "trial"] == ["narrowing down 1", "search", "confirming 1", "search"]
    assert told.count("trial") == ledger.run


def test_a_configurations_name_reports_what_was_chosen() -> None:
    chosen = {"tp": 2, "radix_cache": False, "chunked_prefill_size": None, "mem_fraction": 0.85}
    name = Configuration(number=1, gpu="h200", chosen=chosen).name
    assert name == "h200 tp=2 radix_cache=no chunked_prefill_size=none mem_fraction=0.85"


# ------------------------------------------------------------------------------------------ replicas added and removed


def test_a_plan_pays_for_replicas_that_come_and_go_only_while_they_are_there() -> None:
    scaling = "autoscale=none,open_requests:9/start:0s/interval:200ms/window:0s/cooldown:200ms"
    asked = question(rate=60.0, search=parse_search((scaling,)), slos=(Slo.parse("ttft_p90=5s"),))
    answer = planned(asked)
    fixed, scaled = answer.candidates
    assert fixed.best is not None
    assert scaled.best is not None
    assert fixed.best.paid_replicas == fixed.best.replicas
    assert 1.0 < scaled.best.paid_replicas < scaled.best.replicas == 2
    described = answer.describe()["configurations"]
    assert "replicas_mean" not in described[0]["best"]
    price = scaled.usd_per_hour(1)
    assert price is not None
    assert described[1]["usd_per_hour"] == pytest.approx(price * scaled.best.paid_replicas)
    assert "--autoscale open_requests=9,start=0us" in scaled.best.first_trial.scenario().command()
    assert scaled.best.first_trial.key != fixed.best.first_trial.key
    with pytest.raises(ConfigError, match="`autoscale` names no policy"):
        parse_search(("autoscale=minimum:2",))
