"""`lockstep replay` decides a journal again: all of it, up to a step or a break, and by hand in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import AdmissionDeferred, RequestRetracted
from lockstep.core.journal import snapshot
from lockstep.core.journal.replay import fold
from lockstep.core.requests import microbatches
from lockstep.tools import stepping
from lockstep.tools.conditions import Condition
from lockstep.tools.decision_text import read_decisions
from lockstep.tools.replay import Hand, replay
from lockstep.tools.runs import Walk
from lockstep.tools.stepping import Stepper
from tests.support.recorded import record_simulation

WORKLOAD = "gen:n=40,rate=400,shared_prefix=64x2,input=lognormal:150:0.8,output=lognormal:40:0.8,max_total=700"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tight")
    return record_simulation(folder, WORKLOAD, pages=60, max_running_requests=8, chunked_prefill_size=128)


def run_replay(*arguments: object, typed: str = "") -> Result:
    return CliRunner().invoke(replay, [str(argument) for argument in arguments], input=typed)


def steps_with(run: Path, text: str) -> list[int]:
    """All steps in which a condition holds, found by `continue`."""
    stepper, found, condition = Stepper(run), [], Condition(text)
    while stepper.run(condition) is not None:
        assert stepper.last is not None
        found.append(stepper.last.number)
    return found


# ---------------------------------------------------------------------------------------------------------- conditions


def test_conditions_hold_where_the_decided_events_are(run: Path) -> None:
    decided = [(n, d) for n, (_, step) in enumerate(fold(run)) for d in step.decided]
    retracted = [n for n, d in decided if isinstance(d, RequestRetracted)]
    assert retracted
    assert steps_with(run, "RequestRetracted") == sorted(set(retracted))
    first = next(d for _, d in decided if isinstance(d, RequestRetracted))
    mine = sorted({n for n, d in decided if isinstance(d, RequestRetracted) and d.request_id == first.request_id})
    for name in (f"r{first.request_id}", first.request_id):
        assert steps_with(run, f"RequestRetracted and request == {name}") == mine
    assert steps_with(run, f"RequestRetracted and request != r{first.request_id}") == sorted(
        {n for n, d in decided if isinstance(d, RequestRetracted) and d.request_id != first.request_id}
    )
    deferred = [(n, d) for n, d in decided if isinstance(d, AdmissionDeferred)]
    large = {n for n, d in deferred if d.reason in ("kv_budget", "pages") and d.needed_tokens >= 200}
    text = "AdmissionDeferred and (reason == kv_budget or reason == pages) and needed_tokens >= 200"
    assert steps_with(run, text) == sorted(large)
    assert large
    assert steps_with(run, "not RequestRetracted and request == r1 or step == 0")[0] == 0
    launched = [n for n, (_, step) in enumerate(fold(run)) if (p := step.launched()) is not None and p.mode == "extend"]
    assert steps_with(run, "mode == extend") == launched
    assert steps_with(run, "event == RequestArrived and waiting > 20")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RequestRetrcted", "did you mean RequestRetracted"),
        ("RequestRetracted and", "expected the name of a decided event or of a field at `the end`"),
        ("reason", "expected a comparison at `the end`"),
        ("reason kv_budget 3", "expected ==, !=, <, <=, > or >= at `kv_budget 3`"),
        ("reason < kv_budget", "is not a number"),
        ("(waiting > 3", "expected `)` at `the end`"),
        ("waiting > 3 rows", "expected `and`, `or` or the end at `rows`"),
        ("__import__('os')", "where no name or value begins"),
        ("", "at `the end`"),
        ("(" * 60 + "waiting > 1" + ")" * 60, "at most 50"),
    ],
)
def test_what_is_no_condition_is_refused_at_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as error:
        Condition(text)
    assert message in str(error.value)


# -------------------------------------------------------------------------------------------------- forwards, backwards


def test_going_back_gives_the_very_state(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "SNAPSHOT_EVERY", 40)
    monkeypatch.setattr(stepping, "SNAPSHOTS_MAX", 4)  # so that some are removed
    stepper = Stepper(run)
    states = {}
    for position in (0, 1, 39, 40, 41, 155, 400):
        stepper.go_to(position)
        states[position] = snapshot.dump(stepper.engine)
    stepper.go_to(10**9)
    assert stepper.ended
    for position in (400, 41, 40, 155, 39, 1, 0):
        stepper.go_to(position)
        assert stepper.position == position
        assert snapshot.dump(stepper.engine) == states[position]
        assert (stepper.last is None) == (position == 0)
        assert stepper.last is None or stepper.last.number == position - 1
    assert len(stepper._snapshots) <= 5


def test_a_person_goes_through_a_run(run: Path) -> None:
    words = "table queue flight owners tree sessions adapters stats last plan".split()
    typed = "\n".join(["step 3", "", "break RequestRetracted", "c", "back 2", "step 2", "why", *words])
    typed += "\nclear 1\nc\nstep\nfoo\nbreak nonsense\nquit\nback 5\n"
    result = run_replay(run, "-i", typed=typed)
    assert result.exit_code == 0, result.output
    first = steps_with(run, "RequestRetracted")[0]
    steps = len(list(fold(run)))
    said = result.stdout
    assert "before step 3\n" in said
    assert "before step 6\n" in said  # an empty line repeats
    assert f"holds: RequestRetracted\nstep {first:,} at" in said
    assert said.count(f"\nstep {first:,} at") >= 2  # and again, from behind
    assert f"before step {first - 1:,}\n" in said
    assert said.count(f"at the end, {steps:,} steps") == 2
    assert "no command `foo`" in said
    assert "is not a name" in said
    assert f"before step {steps - 5:,}" not in said  # nothing is executed after `quit`


def test_hand_shows_what_the_engine_has(run: Path) -> None:
    hand = Hand(Stepper(run))
    hand.do("goto 200")
    walk = Walk(run, until=200)
    for _ in walk:
        pass
    assert snapshot.dump(hand.stepper.engine) == snapshot.dump(walk.engine)
    assert hand.do("clear 3") == ["there is no break `3`", "hint: `breaks` lists them"]
    assert hand.do("goto x")[0] == "expected a number of steps, got `x`"
    assert "step [N], back [N]" in hand.do("help")[0]


# ------------------------------------------------------------------------------------------------------------- the rest


def test_strict_replay_up_to_a_step_shows_the_state_there(run: Path) -> None:
    result = run_replay(run)
    assert result.exit_code == 0
    assert result.stdout.startswith("equal: ")
    result = run_replay(run, "--until", 100)
    assert "equal: 100 events" in result.stdout
    assert "\nwaiting " in result.stdout
    first = steps_with(run, "RequestRetracted")[0]
    result = run_replay(run, "--break", "RequestRetracted")
    assert f"step {first:,} at" in result.stdout
    assert f"before step {first + 1:,}\npages " in result.stdout
    assert (
        f"before step {first - 1:,}\npages "
        in run_replay(run, "--break", "RequestRetracted", "--until", first - 1).stdout
    )
    assert run_replay(run, "--break", "Nobody").exit_code == 2


def test_divergence_is_shown_with_both_decisions_once_decision_text_was_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tmp_path / "decisions.txt"
    result = run_replay(run, "--decisions", words)
    assert result.exit_code == 0
    assert run_replay(run, "--decisions", words).exit_code == 2  # it exists
    first = steps_with(run, "RequestRetracted")[0]
    assert any(line.startswith("retracted") for line in read_decisions(words)[first].lines)
    copied = tmp_path / "run"
    copied.mkdir()
    (copied / "journal").symlink_to(run / "journal")
    (copied / "decisions.txt").write_text(words.read_text())
    choose = microbatches.choose_victim
    monkeypatch.setattr(microbatches, "choose_victim", lambda *given: 0 if choose(*given) else 1)
    for arguments in ((), ("--break", "RequestFinished and request == r39")):
        result = run_replay(copied, *arguments)
        assert result.exit_code == 3
        assert f"step {first} (record" in result.stderr
        assert "behaviour flags: none" in result.stderr
        assert "  then  retracted " in result.stderr
        assert "  now   retracted " in result.stderr
        assert "state before" in result.stderr


def test_options_that_exclude_each_other_are_refused(run: Path) -> None:
    assert "goes with neither" in run_replay(run, "-i", "--json").stderr
    assert "goes with neither" in run_replay(run, "--break", "waiting > 1", "--json").stderr
