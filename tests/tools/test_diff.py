"""`lockstep diff` names the first decision in which two journals differ, and counts how they drift."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import fold
from lockstep.core.journal.writer import JournalWriter
from lockstep.tools.diff import diff
from lockstep.tools.drift import drift
from tests.support.recorded import record_simulation, record_text

WORKLOAD = "gen:n=30,rate=400,shared_prefix=64x2,input=lognormal:150:0.8,output=lognormal:30:0.8,max_total=700"
TIGHT = {"pages": 60, "max_running_requests": 8, "chunked_prefill_size": 128}

STORY = """# {about}
config page_size=2 pages=64 overlap_depth=0 schedule_policy={policy}

add a prompt=1..4 max_new=2
add b prompt=11..14 max_new={b}
step
finish
run
"""


def run_diff(*arguments: object) -> Result:
    return CliRunner().invoke(diff, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same load: unchanged, under lpm, with a setting that decides nothing, on a clock that is a little later."""
    folder = tmp_path_factory.mktemp("runs")
    record_simulation(folder / "fcfs", WORKLOAD, **TIGHT)
    record_simulation(folder / "lpm", WORKLOAD, **TIGHT, schedule_policy="lpm")
    record_simulation(folder / "bypass", WORKLOAD, **TIGHT, bypass_limit=300)
    record_simulation(folder / "slower", WORKLOAD.replace("rate=400", "rate=399"), **TIGHT)
    return folder


def test_equal_runs_are_equal_whatever_settings_did_not_matter(runs: Path) -> None:
    for other in ("fcfs", "bypass"):
        result = run_diff(runs / "fcfs", runs / other)
        assert result.exit_code == 0
        assert "every fact and every decision" in result.stdout
    assert "bypass_limit                 A 256  B 300" in result.stdout


def test_first_differing_decision_is_the_first(runs: Path) -> None:
    found = drift(runs / "fcfs", runs / "lpm")
    assert found.input is None
    assert found.first_difference is not None
    assert found.first_difference.first is not None
    assert found.first_difference.other is not None
    assert found.first_difference.first.number == found.first_difference.other.number
    pairs = zip(fold(runs / "fcfs"), fold(runs / "lpm"), strict=False)
    differs = next(n for n, (a, b) in enumerate(pairs) if a[1].digest != b[1].digest)
    assert found.first_difference.first.number == differs
    assert found.first_difference.first.lines != found.first_difference.other.lines
    assert found.first_difference.states[0] == found.first_difference.states[1]
    assert found.settings == {"schedule_policy": ("fcfs", "lpm")}
    changed = {change.name: change.changed for change in found.changes}
    assert changed["order of admission"] > 0
    assert changed["ttft"] > 0
    assert changed["end"] == 0
    result = run_diff(runs / "fcfs", runs / "lpm")
    assert result.exit_code == 1
    assert f"step {differs:,} of A" in result.stdout
    assert "state before, of both" in result.stdout
    assert "how they drift: 30 requests of both, matched by labels" in result.stdout


def test_other_inputs_are_aligned_by_launch_and_request(runs: Path) -> None:
    found = drift(runs / "fcfs", runs / "slower")
    assert found.input is not None
    assert "RequestArrived" in found.input.first
    if found.first_difference is None:
        assert "only times differ" in run_diff(runs / "fcfs", runs / "slower").stdout
    else:
        assert found.first_difference.by == "launch"
    assert json.loads(run_diff(runs / "fcfs", runs / "slower", "--json").stdout)["first_differing_input"]["number"] > 0


def test_a_longer_request_is_where_inputs_differ_and_its_last_decode_where_launches_do(tmp_path: Path) -> None:
    first = record_text(tmp_path / "a", STORY.format(about="b wants 2.", policy="fcfs", b=2))
    other = record_text(tmp_path / "b", STORY.format(about="b wants 4.", policy="fcfs", b=4))
    found = drift(first, other)
    assert found.input is not None
    assert found.input.number == 1
    assert found.first_difference is not None
    assert (found.first_difference.by, found.first_difference.launch) == ("launch", 2)
    assert found.first_difference.first is None  # a and b have ended
    assert found.first_difference.other is not None
    assert found.first_difference.other.lines == ("launch b2 decode b[5:6]",)
    text = run_diff(first, other).stdout
    assert "  A     has ended" in text
    assert "  B     launch b2 decode b[5:6]" in text
    assert "output tokens             1 of 2 differ; first b: 2 in A, 4 in B" in text


def test_journal_that_ends_early_is_a_prefix(runs: Path, tmp_path: Path) -> None:
    source = read_journal(runs / "fcfs")
    with JournalWriter.create(tmp_path, source.header) as writer:
        for record in list(source.events())[:100]:
            writer.append(record.event, record.digest)
    result = run_diff(runs / "fcfs", tmp_path)
    assert result.exit_code == 1
    assert "B ends before step 100; up to there every fact and decision is the same" in result.stdout


def test_what_is_no_journal_is_refused(runs: Path, tmp_path: Path) -> None:
    result = run_diff(runs / "fcfs", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "JournalError" in result.stderr


def test_runs_of_other_requests_do_not_drift(runs: Path, tmp_path: Path) -> None:
    """Without common requests nothing is reported as the same."""
    other = WORKLOAD.replace("n=30", "n=20,turns=uniform:2:3")
    record_simulation(tmp_path / "other", other, **TIGHT)
    result = run_diff(runs / "fcfs", tmp_path / "other")
    assert result.exit_code == 1
    assert "how they drift: 0 requests of both" in result.stdout
    assert "no request is in both, so requests cannot be compared" in result.stdout
    assert "the same" not in result.stdout.partition("how they drift")[2]
