"""Plans over prefill and decode engines: the possible splits, the work of each side, and the splits not simulated."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lockstep.core.cluster.router import RouterConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan import answer as answers
from lockstep.sim.plan import serve_command
from lockstep.sim.plan.ledger import TrialStore
from lockstep.sim.plan.question import QUICK, Length, Question, parse_search
from lockstep.sim.plan.search import Candidate, candidates_to_narrow, hopeful, prepare, prune, run_plan
from lockstep.sim.plan.sides import limit_of_sides
from lockstep.sim.plan.split import RoleSplit, all_splits, parse_split
from lockstep.sim.plan.trial import Trial, TrialResult, run_trial
from lockstep.sim.plan.workers import Alone

TINY = replace(QUICK, long=Length(40, 40, 0.0), short=Length(30, 30, 0.0), replications_min=2, replications_max=3)
PROMPTS = "gen:input=uniform:1000:4000,output=uniform:5:15"  # outputs that give a decode engine little work


def question(*search: str, **changes: Any) -> Question:
    asked: dict[str, Any] = {
        "model": "qwen3-8b",
        "gpus": ("h100",),
        "workload": PROMPTS,
        "slos": (Slo.parse("ttft_p90=1s"), Slo.parse("tpot_p90=40ms")),
        "search": parse_search(search or ("prefill_decode=mixed,1:1",)),
        "effort": TINY,
    }
    return Question(**asked | changes)


def planned(asked: Question, ledger: TrialStore | None = None) -> answers.PlanAnswer:
    candidates, _ = prepare(asked)
    run_plan(asked, candidates, Alone(), ledger or TrialStore(None))
    return answers.PlanAnswer(question=asked, candidates=candidates, workload_line="a workload")


def words(splits: Any) -> list[str]:
    return [str(split) for split in splits]


# -------------------------------------------------------------------------------------------------------------- splits


def test_a_split_is_written_as_it_is_read() -> None:
    assert parse_split("mixed") is None
    for text, gpus in (("2:6", 32), ("1xtp8:2xtp4", 16), ("2:1xtp2", 10)):
        split = parse_split(text)
        assert split is not None
        assert str(split) == text
        assert split.gpus(tp=4, pp=1) == gpus
        assert split.gpus(tp=4, pp=2) == 2 * gpus


def test_every_way_to_share_out_gpus_is_there_once() -> None:
    assert words(all_splits(16, 4, (4,), 1)) == ["1:3", "2:2", "3:1"]
    assert words(all_splits(16, 4, (4, 8), 1)) == ["1:3", "2:2", "3:1", "2xtp4:1xtp8"]
    assert words(all_splits(16, 8, (4, 8), 1)) == ["1xtp8:2xtp4", "1:1"]
    assert words(all_splits(16, 2, (2,), 2)) == ["1:3", "2:2", "3:1"]
    assert words(all_splits(16, 3, (3,), 1)) == ["1:4", "2:3", "3:2", "4:1"]  # with one GPU left over
    assert not words(all_splits(4, 4, (4,), 1))


def test_auto_is_mixed_engines_and_every_split_of_the_gpus() -> None:
    found = question("tp=1,2", "prefill_decode=auto", gpus_max=4).configurations()
    names = [one.name.removeprefix("h100 ") for one in found]
    assert names == [
        "tp=1 prefill_decode=mixed",
        *("tp=1 prefill_decode=1:3", "tp=1 prefill_decode=2:2", "tp=1 prefill_decode=3:1"),
        "prefill_decode=2xtp1:1xtp2",
        "tp=2 prefill_decode=mixed",
        "prefill_decode=1xtp2:2xtp1",
        "tp=2 prefill_decode=1:1",
    ]
    assert [one.number for one in found] == list(range(1, 9))


def test_what_has_no_meaning_beside_the_rest_is_no_configuration_of_its_own() -> None:
    search = ("tp=1,2", "prefill_decode=mixed,1xtp2:1xtp1", "transfer_allocation=early,prefill_complete")
    names = [one.name for one in question(*search).configurations()]
    assert names == [
        "h100 tp=1 prefill_decode=mixed",
        "h100 prefill_decode=1xtp2:1xtp1 transfer_allocation=early",
        "h100 prefill_decode=1xtp2:1xtp1 transfer_allocation=prefill_complete",
        "h100 tp=2 prefill_decode=mixed",
    ]


@pytest.mark.parametrize("text", ["2", "2:", "a:b", "1:2:3", "0:1", "1xtp0:1", "1:2xep4", "-1:2", "9999:1"])
def test_a_split_that_cannot_be_reports_it(text: str) -> None:
    with pytest.raises(ConfigError, match=f"`prefill_decode` cannot be `{text}`: "):
        parse_search((f"prefill_decode={text}",))


@pytest.mark.parametrize(
    ("search", "changes", "message"),
    [
        ("prefill_decode=auto", {}, r"divides the GPUs of `max_gpus`, which is not given\nhint: --max-gpus 16"),
        ("tp=1,2", {"common": {"link_gbs": 40.0}}, "`link_gbs` applies to prefill and decode engines"),
        ("prefill_decode=1:1", {"settings": {"role": "decode"}}, "`role` follows from `prefill_decode`"),
        (
            "prefill_decode=mixed,1:1",
            {"common": {"autoscale": "open_requests=9"}},
            "`autoscale` supports engines with equal roles",
        ),
        ("role=decode", {"common": {"prefill_decode": "1:1"}}, "`role` follows from `prefill_decode`"),
    ],
)
def test_a_question_about_splits_that_makes_no_sense_is_refused(
    search: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        question(search, **changes)


def test_what_cannot_be_handed_over_is_refused_before_anything_is_simulated() -> None:
    with pytest.raises(ConfigError, match="has linear-attention state, which is handed over from and to"):
        prepare(question(model="qwen3-next-80b-a3b", common={"tp": 4}))


def test_a_plan_without_splits_has_the_trials_that_it_had() -> None:
    """Without splits nothing about them is written, so keys and with them stored simulations stay the same."""
    (candidate,), _ = prepare(question("tp=1"))
    assert candidate.trial is not None
    written = candidate.trial.record()
    assert not {"prefill_decode", "link_gbs", "link_latency_us"} & set(written)
    mixed, split = prepare(question(common={"link_gbs": 10.0}))[0]
    assert mixed.trial == candidate.trial
    assert split.trial is not None
    assert (split.trial.prefill_decode, split.trial.link_gbs) == ("1:1", 10.0)


# ------------------------------------------------------------------------------------------------------------- answers


def test_the_best_split_is_found_and_what_cannot_be_best_is_not_simulated(tmp_path: Path) -> None:
    slos = (Slo.parse("ttft_p90=2s"), Slo.parse("tpot_p90=40ms"))
    asked = question("prefill_decode=auto", gpus_max=3, slos=slos)
    ledger = TrialStore(tmp_path / "kept")
    found = planned(asked, ledger)
    mixed, one, two = found.candidates
    assert [answers.why_not(c).partition(",")[0] for c in (one,)] == ["not confirmed: at best less than #1"]
    simulated = [json.loads(path.read_bytes())["trial"] for path in (tmp_path / "kept" / "simulations").iterdir()]
    assert {trial.get("prefill_decode", "mixed") for trial in simulated} == {"mixed", "2:1"}

    confirmed = planned(replace(asked, confirm_all=True))
    assert confirmed.winner is not None
    assert found.winner is not None
    assert confirmed.winner.configuration == found.winner.configuration
    loads = {str(c.split): c.best.load for c in confirmed.candidates if c.best is not None}
    assert loads["1:2"] < loads["2:1"]
    for candidate in (mixed, two):
        assert candidate.best is not None
        assert candidate.best.load == confirmed.candidates[candidate.configuration.number - 1].best.load  # type: ignore[union-attr]


def test_a_looser_bound_is_never_met_by_less() -> None:
    loads = []
    for bound in ("300ms", "2s"):
        (candidate,) = planned(question("prefill_decode=1:1", slos=(Slo.parse(f"ttft_p90={bound}"),))).candidates
        assert candidate.best is not None
        loads.append(candidate.best.load)
    assert loads == sorted(loads)
    assert loads[0] < loads[-1]


def test_replicas_of_a_split_are_more_engines_of_each_side_behind_the_same_routers() -> None:
    found = planned(question("prefill_decode=2:1", rate=70.0))
    winner = found.winner
    assert winner is not None
    assert winner.best is not None
    replicas = winner.best.replicas
    assert replicas > 1
    scenario = winner.best.first_trial.scenario()
    assert [group.count for group in scenario.groups()] == [2 * replicas, replicas]
    assert winner.gpus == 3
    price = winner.usd_per_gpu_hour
    assert price is not None
    assert winner.usd_per_hour(replicas) == pytest.approx(price * 3 * replicas)


def test_the_line_to_serve_has_all_engines_of_both_kinds() -> None:
    serve = pytest.importorskip("lockstep.api.serve", reason="the server is not installed").serve
    common = {"tp": 2, "engine": "none"}
    winner = planned(question("prefill_decode=2xtp1:1xtp4", common=common, rate=1.0)).winner
    assert winner is not None
    assert winner.best is not None
    assert winner.trial is not None
    trial = replace(winner.trial, router=RouterConfig(policy="prefix_affinity", load_bound=1.5))
    trial = replace(trial, base=replace(trial.base, settings={"num_reserved_decode_tokens": 64}))
    of_three = replace(winner, best=replace(winner.best, replicas=3), trial=trial)
    for command in serve_command.serve_commands(of_three):
        assert command.lacks == []
        words = shlex.split(command.line)
        for flag, value in (
            ("--prefill-engines", "6"),
            ("--decode-engines", "3"),
            ("--prefill-tp", "1"),
            ("--decode-tp", "4"),
            ("--router", "prefix_affinity"),
            ("--router-load-bound", "1.5"),
        ):
            assert words[words.index(flag) + 1] == value
        assert "num_reserved_decode_tokens=64" in words
        assert "--tp" not in words  # each side has its own
    shown = CliRunner().invoke(serve, [*shlex.split(serve_command.serve_commands(of_three)[1].line)[2:], "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "6 prefill engines, 3 decode engines" in shown.output
    staged = replace(trial, base=replace(trial.base, pp=2))
    served = serve_command.serve_commands(replace(of_three, trial=staged))[0]
    assert served.lacks == []
    assert "--pp 2 " in served.line
    ranks = replace(trial, base=replace(trial.base, attention_dp=2, rank_schedulers=True))
    alike = planned(question("prefill_decode=2:1", common=common, rate=1.0)).winner
    assert alike is not None
    served = serve_command.serve_commands(replace(alike, trial=ranks))[0]
    assert served.lacks == []
    assert "--tp 2 --attention-dp 2 --rank-schedulers --prefill-engines 2 --decode-engines 1 " in served.line
    served = serve_command.serve_commands(replace(of_three, trial=ranks))[0]
    assert served.lacks == ["attention_dp 2", "rank_schedulers yes"]  # ranks of other numbers than `tp`
    most = replace(winner, best=replace(winner.best, replicas=200), trial=trial)
    assert serve_command.serve_commands(most)[0].lacks == ["more than 256 prefill engines"]
    assert pytest.importorskip("lockstep.api.settings").AT_MOST["dp"] == serve_command.SERVED_ENGINES_MAX


def test_the_winners_command_repeats_its_run() -> None:
    common = {
        "link_gbs": 10.0,
        "link_latency_us": 50,
        "engine": "none",
    }  # a run of a plan has a draw of an engine's error
    found = planned(question("prefill_decode=1xtp2:1xtp1", common=common))
    winner = found.winner
    assert winner is not None
    assert winner.best is not None
    arguments = shlex.split(serve_command.simulate_command(winner))[2:]
    assert "1xh100:tp=2:role=prefill,1xh100:tp=1:role=decode" in arguments
    shown = CliRunner().invoke(simulate, [*arguments, "--json", "--no-intervals"])
    assert shown.exit_code == 0, shown.output
    metrics = json.loads(shown.stdout)
    assert metrics["latency"] == winner.best.results[0].summary["latency"]
    served, emulated = serve_command.serve_commands(winner)
    assert served.lacks == []
    assert emulated.lacks == ["link_gbs 10", "link_latency_us 50"]  # an emulated server has the usual links
    assert any("10 GB/s per GPU and way, 50.0 us" in line for line in found.remarks())


# ------------------------------------------------------------------------------------------------------- the two sides


def trial(**more: Any) -> Trial:
    asked: dict[str, Any] = {
        "model": "qwen3-8b",
        "gpu": "h100",
        "workload": f"{PROMPTS},n=40",
        "replicas": 1,
        "rate": 10.0,
        "limit": 40,
        "seed": 7,
        "slos": ("ttft_p90=1s",),
        "prefill_decode": "1:1",
        "router": {},
    }
    return Trial.of_record(asked | more)


def limit(result: TrialResult, metric: str = "ttft") -> str:
    return limit_of_sides(result.sides, metric, result.summary["latency"], 1024)


@pytest.mark.parametrize("allocation", ["early", "prefill_complete"])
def test_what_requests_wait_for_adds_up_to_their_first_token(allocation: str) -> None:
    crowded = {"transfer_allocation": allocation, "pages": 600, "page_size": 16, "num_reserved_decode_tokens": 0}
    result = run_trial(trial(settings=crowded, rate=40.0, engine="none"))
    sides = result.sides
    parts = (
        *(sides["prefill"]["queue_us_mean"], sides["prefill"]["compute_us_mean"]),
        *(sides["transfer"]["transfer_us_mean"], sides["decode"]["page_wait_us_mean"]),
    )
    assert all(part >= 0 for part in parts)
    assert sides["decode"]["page_wait_us_mean"] > 0
    assert sum(parts) == pytest.approx(result.summary["latency"]["ttft_us_mean"], rel=0.02)


def test_each_side_and_the_link_can_be_what_limits() -> None:
    usual = run_trial(trial(rate=30.0))
    assert limit(usual) == "prefill: compute"
    assert usual.sides["prefill"]["busy_share"] > usual.sides["decode"]["busy_share"]
    assert limit(run_trial(trial(link_gbs=0.1))) == "transfer"
    crowded = {"pages": 600, "page_size": 16, "num_reserved_decode_tokens": 0}
    long = f"{PROMPTS.partition(',')[0]},output=fixed:400,n=40"
    crowded_result = run_trial(trial(workload=long, settings=crowded))
    assert limit(crowded_result) == "decode: KV memory"
    assert limit(usual, "tpot") == "decode: bandwidth"
    assert limit_of_sides(usual.sides, "tpot", usual.summary["latency"], 3) == "decode: max_running_requests"
    assert limit(usual, "e2e") == limit(usual, "ttft")


def test_estimates_of_splits_are_those_of_their_slower_side() -> None:
    asked = question("prefill_decode=1:1,2:1,3:1,1:3")
    even, two, three, few = (c.estimated_load for c in prepare(asked)[0])
    assert two == pytest.approx(2 * even, rel=0.01)
    assert three == pytest.approx(3 * even, rel=0.01)
    assert few == pytest.approx(even, rel=0.01), "decode engines add nothing where prompts are all there is to do"
    slow = prepare(question("prefill_decode=1:1", common={"link_gbs": 0.1}))[0][0].estimated_load
    assert slow < even / 2


def test_the_possible_winner_is_narrowed_down_first() -> None:
    asked = question("prefill_decode=auto", gpus_max=4)
    candidates, _ = prepare(asked)
    first = candidates_to_narrow(asked, candidates)
    assert [str(c.split) for c in first] == ["None", "3:1"]
    assert candidates_to_narrow(replace(asked, confirm_all=True), candidates) == candidates
    first[1].narrow_met = first[1].load_max
    assert [str(c.split) for c in hopeful(candidates, first)] == []
    for candidate in candidates:
        candidate.pruned = ""
    first[1].narrow_met = 1e-3
    assert [str(c.split) for c in hopeful(candidates, first)] == ["1:3", "2:2"]


def test_the_best_of_engines_that_do_both_is_confirmed_for_comparison() -> None:
    asked = question("tp=1,2", "prefill_decode=mixed,1:1", gpus_max=4)
    candidates, _ = prepare(asked)
    for candidate, met in zip(candidates, (1.0, 9.0, 1.2, 2.0), strict=True):
        candidate.narrow_met, candidate.narrow_missed = met, met * 1.1
    prune(asked, candidates)
    kept = [c.configuration.name.removeprefix("h100 ") for c in candidates if not c.pruned]
    assert kept == ["tp=1 prefill_decode=1:1", "tp=2 prefill_decode=mixed"]


# --------------------------------------------------------------------------------------------------------- command line


ARGUMENTS = [
    *("--model", "qwen3-8b", "--gpus", "h100", "--workload", PROMPTS, "--max-gpus", "2", "--quick", "--requests", "40"),
    *("--slo", "ttft_p90=1s", "--search", "prefill_decode=auto", "--all", "--jobs", "1"),
]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(plan, [*ARGUMENTS, *arguments])


def test_one_command_answers_and_gives_the_same_again(tmp_path: Path) -> None:
    one, two = invoke("--out", str(tmp_path / "one")), invoke("--out", str(tmp_path / "two"))
    assert one.exit_code == two.exit_code == 0, one.output
    assert one.stdout == two.stdout
    for name in ("plan.json", "plan.html"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    found = json.loads((tmp_path / "one" / "plan.json").read_text())
    mixed, split = found["configurations"]
    assert "sides" not in mixed
    assert set(split["sides"]) == {"prefill", "transfer", "decode"}
    assert split["limited_by"].startswith("TTFT p90: ")
    assert "The links between prefill and decode engines, as simulated: 40 GB/s" in one.stdout
    assert answers.SIDES_TITLE in one.stdout
    assert "Prefill and decode at the load" in (tmp_path / "one" / "plan.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill-decode", "2"], "`prefill_decode` cannot be `2`: expected mixed, auto, or PREFILL:DECODE"),
        (["--link-latency", "1s", "--search", "tp=1"], "which is not given"),
    ],
)
def test_what_cannot_be_planned_is_one_message(arguments: list[str], message: str) -> None:
    without = [word for word in ARGUMENTS if word not in ("--max-gpus", "2")] if "tp=1" in arguments else ARGUMENTS
    shown = CliRunner().invoke(plan, [*without, *arguments])
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.output


def test_a_candidate_has_the_gpus_of_its_split() -> None:
    asked = question("prefill_decode=1xtp8:2xtp4", common={"pp": 2})
    (configuration,) = asked.configurations()
    candidate = Candidate(configuration=configuration, question=asked)
    assert isinstance(candidate.split, RoleSplit)
    assert candidate.gpus == 32
