"""`lockstep replay RUN --what-if` simulates the same requests under other settings and reports the changed ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import click
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from lockstep.core.command import main
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import BatchFinished, ObservedEvent, RequestArrived, TokenDigest, TokenIds
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.requests.table import prompt_bytes
from lockstep.core.scheduler.engine import Engine
from lockstep.host.admission_options import parse_admission
from lockstep.host.options import options_of
from lockstep.host.router_journal import engines_of
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.load import open_load
from lockstep.sim.run.run_folder import write_run
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.journal_turns import label_parts
from lockstep.sim.workload.turns import WorkloadError
from lockstep.sim.workload.workload import open_workload
from lockstep.tools import recorded_waits
from lockstep.tools.drift import drift
from lockstep.tools.explain import chronicle_of
from lockstep.tools.recorded import journal_workload
from lockstep.tools.recorded_waits import RecordedWaits
from lockstep.tools.replay import replay
from lockstep.tools.what_if import Base, changed_base, read_base, simulate_base
from tests.support.recorded import record_text, waited_by

WORKLOAD = (
    "gen:n=60,rate=200,turns=uniform:1:3,think=lognormal:50ms:1,shared_prefix=64x3,input=lognormal:120:0.8,"
    "output=lognormal:30:0.8,max_total=900"
)
SETTINGS = {"pages": 80, "max_running_requests": 8, "chunked_prefill_size": 128}


def scenario(**changes: object) -> Scenario:
    return Scenario(model="qwen3-0.6b", gpu="h200", workload=WORKLOAD, settings=SETTINGS, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as `lockstep simulate --out` writes it, without report and trace."""
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    write_run(folder, simulate(assemble(scenario(), environ={}), folder=folder), trace=False, report=False)
    return folder


def what_if(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(replay, [words[0], "--what-if", *words[1:]])


def rewritten(source: Path, folder: Path, change: object) -> Path:
    """The journal with each event changed and decided anew; header and folder contain nothing of the simulator."""
    journal = read_journal(source)
    engine = Engine(journal.header.config)
    header = JournalHeader(config=journal.header.config, seed=3, host={"kind": "runtime"})
    with JournalWriter.create(folder, header) as writer:
        for record in journal.events():
            event: ObservedEvent = change(record.event)  # type: ignore[operator]
            writer.append(event, engine.step(event).digest)
    return folder


def spelt_out(event: ObservedEvent) -> ObservedEvent:
    """Prompts as ids, and all ids replaced by a bijection, so that equal prefixes stay equal."""

    def other(data: bytes) -> bytes:
        ids = np.frombuffer(data, np.int32).astype(np.int64)
        return ((ids * 48271) % 2147483647).astype(np.int32).tobytes()

    if isinstance(event, RequestArrived):
        return msgspec.structs.replace(event, prompt=TokenIds(other(prompt_bytes(event.prompt))))
    if isinstance(event, BatchFinished):
        return msgspec.structs.replace(event, tokens=other(event.tokens))
    return event


# -------------------------------------------------------------------------------------------------- read from a journal


def test_requests_read_off_a_journal_are_those_that_were_sent(run: Path) -> None:
    turns = journal_workload(run).turns
    sent = open_workload(WORKLOAD, seed=7).turns
    ours = {turn.label: turn for turn in turns}
    frontend_us = round(assemble(scenario(), environ={}).calibration.correction.frontend_us)
    assert frontend_us > 0
    assert len(turns) == len(sent)
    for turn in sent:
        mine = ours[turn.label]
        assert (mine.prompt_tokens, mine.output_tokens, mine.prompt) == (
            turn.prompt_tokens,
            turn.output_tokens,
            turn.prompt,
        )
        assert (mine.after is None) == (turn.after is None)
        if turn.after is not None and mine.after is not None:
            assert turns[mine.after].label == sent[turn.after].label
            late_us = mine.think_us - turn.think_us - frontend_us
            assert 0 <= late_us < 10_000  # the lateness of the lane is part of it


@pytest.mark.parametrize("change", [lambda event: event, spelt_out], ids=["runs", "ids"])
def test_simulating_them_again_decides_the_same(run: Path, tmp_path: Path, change: object) -> None:
    folder = rewritten(run, tmp_path / "bare", change)
    again = tmp_path / "again"
    setup = assemble(scenario(), environ={}, workload=journal_workload(folder))
    simulate(setup, folder=again)
    found = drift(run, again)
    assert found.matched == 60
    changed = {each.name: each.changed for each in found.changes}
    assert {changed[name] for name in ("end", "output tokens")} == {0}
    assert changed["order of admission"] <= 4  # arrivals are known as the host noticed them, a few us late
    assert changed["cached tokens"] <= 4
    assert abs(found.batches[0] - found.batches[1]) < 0.02 * found.batches[0]


def test_a_journal_reports_which_adapters_its_requests_ran_on(tmp_path: Path) -> None:
    asked = replace(scenario(), adapters="0.7x3", settings={"max_loras": 2})
    setup = assemble(asked, {})
    simulate(setup, folder=tmp_path / "run")
    sent, read = setup.workload.turns, journal_workload(tmp_path / "run").turns
    assert {turn.label: turn.adapter for turn in read} == {turn.label: turn.adapter for turn in sent}
    base = read_base(tmp_path / "run", {})
    assert base.scenario.adapters == "recorded"
    again = simulate_base(changed_base(base, {}, {"max_loras": 3}), tmp_path / "again", base.workload)
    assert again is not None
    assert read_run(tmp_path / "again").summary("adapters", "loads") == 3


def test_prompts_that_were_not_kept_are_refused(run: Path, tmp_path: Path) -> None:
    header = JournalHeader(config=read_journal(run).header.config)
    event = RequestArrived(time_us=0, request_id=0, prompt=TokenDigest(5, bytes(32)), max_new_tokens=1)
    with JournalWriter.create(tmp_path, header) as writer:
        writer.append(event, Engine(header.config).step(event).digest)
    with pytest.raises(WorkloadError, match="only their digests"):
        journal_workload(tmp_path)


@pytest.mark.parametrize("label", ["line234", "s3t1", "r0", "a b", "{x}3", "07", "x", "s1t2u3", "s3t"])
def test_labels_come_back_as_they_were(label: str) -> None:
    form, number, part = label_parts(label)
    assert form.format(number, part) == label


# ---------------------------------------------------------------------------------------------------- the whole command


def test_nothing_changed_changes_nothing(run: Path, tmp_path: Path) -> None:
    result = what_if(run, "--out", tmp_path / "same", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["lost_most"] == found["won_most"] == []
    assert all(
        change["verdict"] == "same" for each in found["figures"] for change in each["changes"] if change["ratio"]
    )
    assert drift(run, tmp_path / "same").equal


def test_another_policy_lists_winners_and_losers_and_why(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "lpm.html"
    result = what_if(run, "--policy", "lpm", "--html", page, "--out", tmp_path / "lpm")
    assert result.exit_code == 0, result.output
    assert "schedule_policy               A fcfs  B lpm" in result.stdout
    assert "requests that lost most, and why" in result.stdout
    assert "requests that won most, and why" in result.stdout
    assert " in the queue behind another, which could not start: " in result.stdout
    assert f"B  {tmp_path / 'lpm'}" in result.stdout
    text = page.read_text()
    assert "<h2>Why?</h2>" in text
    assert "<h3>Requests that lost most</h3>" in text
    again = [what_if(run, "--policy", "lpm", "--json").stdout for _ in range(2)]
    assert again[0] == again[1]
    found = json.loads(again[0])
    for one in found["lost_most"]:
        assert one["ttft_us"][1] > one["ttft_us"][0]
        assert one["why"]
    changes = [one["ttft_us"][1] - one["ttft_us"][0] for one in found["lost_most"]]
    assert changes == sorted(changes, reverse=True)
    assert what_if(run, "--policy", "lpm", "--html", page).exit_code == 2


def test_more_engines_another_gpu_and_load(run: Path) -> None:
    result = what_if(run, "--replicas", 2, "--router", "prefix_affinity", "--json")
    assert result.exit_code == 0, result.output
    assert [len(each["engines"]) for each in json.loads(result.stdout)["runs"]] == [1, 2]
    assert json.loads(result.stdout)["warnings"] == []  # two engines were requested
    why = json.loads(result.stdout)["won_most"][0]["why"]
    assert any(line.startswith("the router of B sent it to engine ") for line in why)
    assert not any("router of A" in line for line in why)
    result = what_if(run, "--gpu", "b200", "--rate-scale", 0.5)
    assert result.exit_code == 0, result.output
    assert "gpu" in result.stdout


def test_a_journal_of_another_host_is_simulated_first(run: Path, tmp_path: Path) -> None:
    bare = rewritten(run, tmp_path / "served", spelt_out)
    result = what_if(bare, "--policy", "lpm")
    assert result.exit_code == 2
    assert "does not record its model\nhint: give --model" in result.stderr
    result = what_if(bare, "--model", "qwen3-0.6b", "--gpu", "h200", "--policy", "lpm")
    assert result.exit_code == 0, result.output
    assert "A is a simulation of it under its own settings" in result.stderr
    assert "requests continue an earlier answer" in result.stderr
    assert "schedule_policy               A fcfs  B lpm" in result.stdout
    assert "pages" not in result.stdout.partition("SLOs of A")[0].partition("settings that differ")[2]


def test_all_that_was_reported_of_drafts_goes_with_them() -> None:
    settings = {"speculative_method": "eagle", "num_speculative_tokens": 5}
    drafting = Scenario(model="qwen3-0.6b", gpu="h200", workload="gen:n=1", settings=settings, acceptance="0.8")
    base = Base(drafting, open_load(drafting), (), simulated=True)
    without = changed_base(base, {}, {"speculative_method": "none"}).scenario
    assert not assemble(without, environ={}).config.speculates
    fewer = changed_base(base, {}, {"num_speculative_tokens": 2}).scenario
    assert (fewer.acceptance, assemble(fewer, environ={}).config.drafts_max) == ("0.8", 2)


def test_settings_of_a_journal_are_kept_under_any_profile(run: Path, tmp_path: Path) -> None:
    """The simulator's own profile differs from the plain defaults; recorded settings stay."""
    timeline = record_text(
        tmp_path / "plain",
        "# Plain defaults.\nconfig page_size=2 pages=64 overlap_depth=0\n\nadd a prompt=1..4 max_new=2\nstep\nrun\n",
    )
    base = read_base(timeline, {"model": "qwen3-0.6b", "gpu": "h200"})
    same = assemble(base.scenario, environ={}, workload=base.workload)
    assert same.config == read_journal(timeline).header.config
    other = changed_base(base, {"profile": "vllm"}, {"decode_look_ahead": 2})
    config = assemble(other.scenario, environ={}, workload=base.workload).config
    assert (config.batching, config.page_size, config.decode_look_ahead) == ("running_first", 16, 2)
    assert config.overlap_depth == 1  # named by the profile
    fits = changed_base(base, {"gpu": "b200"}, {})
    assert assemble(fits.scenario, environ={}, workload=base.workload).config.pages > 1000


def test_a_cluster_and_a_closed_loop_can_be_asked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["simulate", "--model", "qwen3-0.6b", "--gpu", "h200", "--workload", WORKLOAD, "--no-intervals"]
    words += ["--no-report", "--no-trace", "--limit", "40", "--pages", "80", "--chunked-prefill-size", "128", "--out"]
    assert main([*words, str(tmp_path / "two"), "--replicas", "2"]) == 0
    result = what_if(tmp_path / "two", "--replicas", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [len(each["engines"]) for each in found["runs"]] == [2, 1]
    assert found["lost_most"][0]["why"]
    check_waits(tmp_path / "two", monkeypatch)
    assert main([*words, str(tmp_path / "line"), "--replicas", "2", "--admission", "open=3"]) == 0
    check_waits(tmp_path / "line", monkeypatch)
    check_kept(tmp_path / "line", tmp_path / "again")
    more = ["--autoscale", "open_requests=4,start=0s,interval=50ms", "--admission", "open=8"]
    more += ["--router", "total_requests", "--router-report-interval", "1s", "--router-report-delay", "5ms"]
    assert main([*words, str(tmp_path / "scaled"), "--replicas", "2", *more]) == 0
    result = what_if(tmp_path / "scaled", "--replicas", 3, "--out", tmp_path / "more", "--json")
    assert result.exit_code == 0, result.output
    abouts = [json.loads(path.read_text())["about"] for path in tmp_path.glob("more/**/metrics.json")]
    assert [about["autoscale"]["maximum"] for about in abouts if "autoscale" in about] == [3]
    assert [about["reports"]["delay_us"] for about in abouts if "reports" in about] == [5_000]
    assert main([*words, str(tmp_path / "loop"), "--concurrency", "6"]) == 0
    result = what_if(tmp_path / "loop", "--policy", "lpm", "--json")
    assert result.exit_code == 0, result.output


def simulated(folder: Path, words: str, *, model: str = "qwen3-0.6b", workload: str = "gen:n=40,rate=100") -> Path:
    """A run as the command line writes it."""
    common = ["--model", model, "--workload", workload, "--no-intervals", "--no-report", "--no-trace"]
    assert main(["simulate", *common, *words.split(), "--out", str(folder)]) == 0
    return folder


def differing(result: Result) -> set[str]:
    """The settings that differ between A and B."""
    assert result.exit_code == 0, result.output
    return {row["name"] for row in json.loads(result.stdout)["settings"]}


def test_links_between_prefill_and_decode_engines_stay_what_they_were(tmp_path: Path) -> None:
    words = "--gpu h200 --prefill-engines 1 --decode-engines 1 --link-bandwidth 0.5 --link-latency 3ms"
    run = simulated(tmp_path / "slow", words)
    same = what_if(run, "--out", tmp_path / "same", "--json")
    assert differing(same) == set()
    assert {change["verdict"] for each in json.loads(same.stdout)["figures"] for change in each["changes"]} <= {"same"}
    abouts = [json.loads((folder / "metrics.json").read_text())["about"] for folder in (run, tmp_path / "same")]
    assert abouts[0] == abouts[1]
    assert (abouts[1]["link_gbs"], abouts[1]["link_latency_us"]) == (0.5, 3_000)
    assert what_if(run, "--gpu", "b200", "--out", tmp_path / "other").exit_code == 0  # of all engines: they are equal
    about = json.loads((tmp_path / "other" / "metrics.json").read_text())["about"]
    assert [(each["role"], each["gpu"]) for each in about["engines"]] == [
        ("prefill", "B200-SXM"),
        ("decode", "B200-SXM"),
    ]
    result = what_if(run, "--replicas", 2)
    assert result.exit_code == 2
    assert "`--replicas` 2 needs one kind of engine, and the run has `1xh200:role=prefill,1xh200" in result.stderr
    assert "hint: choose the GPU with --gpu" in result.stderr
    result = what_if(run, "--replicas", 2, "--gpu", "h200", "--out", tmp_path / "two")
    assert result.exit_code == 0, result.output
    assert "note: link_gbs is left out of B: it applies to links between prefill and decode engines" in result.stderr
    assert "--link" not in json.loads((tmp_path / "two" / "metrics.json").read_text())["about"]["command"]


def test_engines_listed_one_by_one_are_changed_as_asked_or_it_is_refused(tmp_path: Path) -> None:
    run = simulated(tmp_path / "kinds", "--engines 1xh200:page_size=32,1xh100:tp=2")
    for words, said in (
        (["--gpu", "b200"], "`--gpu` b200 is one GPU, and the run has engines of several kinds: `1xh200:page_size=32,"),
        (["--page-size", "16"], "`page_size` 16 is for all engines, and the run sets it for single engines"),
        (["--tp", "4"], "`tp` 4 is for all engines, and the run sets it for single engines"),
    ):
        result = what_if(run, *words)
        assert (result.exit_code, said in result.stderr) == (2, True), result.output
        assert "hint: add --replicas N" in result.stderr
    assert "max_running_requests" in differing(what_if(run, "--max-running-requests", 8, "--json"))


def test_what_only_the_old_policy_of_a_router_looks_at_is_left_out_and_reported(tmp_path: Path) -> None:
    words = "--gpu h200 --replicas 2 --router total_requests --router-report-interval 1s --router-report-delay 5ms"
    run = simulated(tmp_path / "reports", words)
    result = what_if(run, "--router", "prefix_affinity", "--out", tmp_path / "affine")
    assert result.exit_code == 0, result.output
    assert "note: router_report_interval is left out of B: prefix_affinity does not use it" in result.stderr
    assert "note: router_report_delay is left out of B" in result.stderr
    result = what_if(run, "--router", "total_tokens")
    assert "left out" not in result.stderr
    words = "--gpu h200 --replicas 2 --router prefix_affinity --router-load-bound 1.5"
    run = simulated(tmp_path / "bound", words)
    result = what_if(run, "--router", "round_robin", "--out", tmp_path / "turns")
    assert "note: router_load_bound is left out of B: round_robin does not use it" in result.stderr
    command = json.loads((tmp_path / "turns" / "metrics.json").read_text())["about"]["command"]
    assert "--router round_robin" in command
    assert "load-bound" not in command


def test_what_is_kept_of_another_load_reports_how_to_get_it_again(run: Path, tmp_path: Path) -> None:
    result = what_if(run, "--rate-scale", "1.5", "--out", tmp_path / "faster")
    assert result.exit_code == 0, result.output
    assert "--rate-scale 1.5 " in json.loads((tmp_path / "faster" / "metrics.json").read_text())["about"]["command"]
    again = what_if(tmp_path / "faster", "--json")
    assert "note" not in again.stderr
    assert differing(again) == set()


def test_a_closed_loop_has_no_rate_to_change(tmp_path: Path) -> None:
    run = simulated(tmp_path / "loop", "--gpu h200 --concurrency 4")
    result = what_if(run, "--rate-scale", 2)
    assert result.exit_code == 2
    assert "`--rate-scale` 2 needs an open loop, and the run was a closed loop of 4 sessions" in result.stderr


def test_media_whose_workload_is_gone_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 50 * at, "input_length": 90, "output_length": 9, "hash_ids": [at]} for at in range(12)]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = "--gpu h200 --media image=0.5x1..2:640x480"
    run = simulated(tmp_path / "seen", words, model="qwen2.5-vl-7b", workload=str(trace))
    assert differing(what_if(run, "--json")) == set()
    trace.unlink()
    result = what_if(run)
    assert result.exit_code == 2, result.output
    assert "had its requests from" in result.stderr
    assert "requests with media cannot be read from journals\nhint: restore the workload" in result.stderr
    assert "Traceback" not in result.stderr


def test_one_engine_of_a_cluster_is_not_asked_what_all_would_do(tmp_path: Path) -> None:
    run = simulated(tmp_path / "two", "--gpu h200 --replicas 2")
    result = what_if(run / "engines" / "0", "--policy", "lpm")
    assert result.exit_code == 2, result.output
    assert "is one engine of a cluster, and has only the requests that the router sent to it" in result.stderr
    assert f"hint: use the whole run, {run}\n" in result.stderr


def test_the_run_that_is_queried_for_is_not_written_over(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    result = what_if(copy, "--policy", "lpm", "--out", tmp_path / "x" / ".." / "copy", "--overwrite")
    assert result.exit_code == 2, result.output
    assert "is the folder of A\nhint: choose another folder for B" in result.stderr
    assert drift(run, copy).equal


def test_journals_alone_report_how_their_engine_was_laid_out_or_why_it_cannot_be_known(tmp_path: Path) -> None:
    staged = simulated(tmp_path / "staged", "--gpu h200 --pp 2 --pp-size 2 --tp 2")
    base = journal_alone(staged)
    assert (base.scenario.tp, base.scenario.pp, base.scenario.settings["pp_size"]) == (2, 2, 2)
    setup = assemble(base.scenario, environ={}, workload=base.workload)
    assert setup.config == read_journal(staged).header.config
    for words, said in (
        ("--gpu h200 --host-cache-gb 20", "its `tiers` is set: host memory or storage below its cache"),
        ("--gpu h200 --prefill-engines 1 --decode-engines 1", "its `role` is set: an engine that hands requests over"),
        ("--gpu h200 --tp 2 --attention-dp 2 --rank-schedulers", "its `dp_ranks` is set: one of several ranks"),
    ):
        run = simulated(tmp_path / words.split()[2], words)
        with pytest.raises(ConfigError, match=said):
            journal_alone(run / "engines" / "0" if (run / "engines").is_dir() else run)


def journal_alone(run: Path) -> Base:
    (run / "metrics.json").unlink()
    return read_base(run, {})


def check_waits(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The causes of waits of some requests are the same from worker processes, from here, and by their timelines."""
    ids = list(range(0, 40, 5))
    with RecordedWaits(cluster) as waits:
        here = waits.of(ids)
        assert waits.of([]) == {}
    with monkeypatch.context() as patch:
        patch.setattr(recorded_waits, "PROCESS_BYTES_MIN", 0)
        patch.setattr(recorded_waits, "usable_cores", lambda: 2)
        with RecordedWaits(cluster) as waits:
            assert waits.of(ids) == here
            assert waits.of(ids[:2]) == {name: here[name] for name in ids[:2]}
    assert sorted(here) == ids
    requests = read_run(cluster).requests
    assert requests is not None
    engines = engines_of(cluster, ids)
    assert len(engines) == 2
    for engine, those in engines.items():
        chronicle, _ = chronicle_of(cluster / "engines" / str(engine), list(those))
        for own, name in those.items():
            assert waited_by(chronicle.timelines[own]) == msgspec.structs.replace(here[name], request_id=own)


def check_kept(run: Path, again: Path) -> None:
    """The causes recorded during a simulation equal those of its journals, also if its router rejects some requests."""
    base = read_base(run, {})
    assert base.cluster is not None
    base = replace(base, asked=replace(base.cluster, dispatch=parse_admission("open=2,waiting=3")))
    noted = simulate_base(base, again, base.workload, kept=True)
    ids = range(40)
    with RecordedWaits(again) as recorded:
        assert noted.of(ids) == recorded.of(ids)
        assert noted.routes(ids) == recorded.routes(ids)
    assert sorted(noted.of(ids)) == sorted(noted.routes(ids))
    assert 10 < len(noted.of(ids)) < 40
    assert any(route.own_id != name for name, route in noted.routes(ids).items())


@pytest.mark.parametrize("bytes_min", [0, 1 << 40], ids=["aside", "here"])
def test_a_recorded_run_that_is_decided_otherwise_is_reported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_min: int
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("journal"))
    journal = read_journal(run)
    with JournalWriter.create(other, journal.header) as writer:
        for record in journal.events():
            writer.append(record.event, record.digest if record.step != 100 else bytes(16))
    monkeypatch.setattr(recorded_waits, "PROCESS_BYTES_MIN", bytes_min)
    monkeypatch.setattr(recorded_waits, "usable_cores", lambda: 2)
    result = what_if(other, "--policy", "lpm")
    assert result.exit_code == 3, result.output
    assert "Divergence: step 100 " in result.stderr


def test_wrong_settings_are_refused_by_name(run: Path) -> None:
    assert "--router" in what_if(run, "--router", "round_robin").stderr
    assert "page_size" in what_if(run, "--page-size", 24).stderr
    assert "rate_scale" in what_if(run, "--rate-scale", 0).stderr
    assert what_if(run, "--no-such-option").exit_code == 2


def test_help_of_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--what-if" in CliRunner().invoke(replay, ["--help"]).stdout
    found = what_if("--help").stdout
    assert "--schedule-policy" in found
    assert "--replicas" in found
    assert "--interactive" not in found
    assert main(["--version"]) == 0
    capsys.readouterr()


def test_every_option_of_simulate_is_taken_or_refused_with_the_way_to_it() -> None:
    from lockstep.sim.cli.run_options import RunOptions
    from lockstep.sim.cli.simulate import simulate
    from lockstep.tools.what_if import what_if as command

    own = {field.flag for field in options_of(RunOptions).values()} | {"--save", "--help-all"}
    known = {flag for option in command.params for flag in option.opts}
    asked = {flag for option in simulate.params if isinstance(option, click.Option) for flag in option.opts}
    assert asked - own - known == set()


def test_precision_memory_and_slos_are_changed(run: Path, tmp_path: Path) -> None:
    changes = "--weights-dtype fp8 --kv-dtype fp8 --mem-fraction 0.8 --host-cache-gb 20 --slo ttft_p99=5s".split()
    result = what_if(run, *changes, "--out", tmp_path / "b")
    assert result.exit_code == 0, result.output
    about = json.loads((tmp_path / "b" / "metrics.json").read_text())["about"]
    for words in ("--weights-dtype fp8", "--kv-dtype fp8", "--mem-fraction 0.8", "--host-cache-gb 20"):
        assert words in about["command"]
    assert "--slo ttft_p99=5s" in about["command"]
    assert what_if(run, "--pp", 3, "--tp", 5).exit_code == 2  # the checks of simulate


@pytest.mark.parametrize("change", ["--rate 3", "--workload gen:n=3", "--autoscale open_requests=2", "--seed 3"])
def test_other_requests_and_roles_are_refused_with_the_way_to_them(run: Path, change: str) -> None:
    result = what_if(run, *change.split())
    assert result.exit_code == 2
    assert f"{change.split()[0]} is not for --what-if" in result.output
    assert "lockstep compare" in result.output
