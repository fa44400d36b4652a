"""Golden journals: recorded decisions are decided again, or the first differing decision is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ConfigError, InvariantError
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import Divergence, replay
from lockstep.core.requests import microbatches
from lockstep.core.scheduler import ordering
from lockstep.tools.decision_text import decision_of, decisions_text, read_decisions
from lockstep.tools.journal import journal
from lockstep.tools.runs import Walk
from lockstep.tools.strict import DECISIONS, diverged_step
from tests.golden.record import FEATURES, FOLDER, record

NAMES = sorted(path.name for path in FOLDER.iterdir() if (path / "journal").is_dir())
BYTES_MAX = 1_600_000  # of all journals together

POLICY = """golden journal {name} is decided otherwise than when it was recorded:

{divergence}
{words}

Not wanted? Then this is the bug. Wanted? Then it needs a behaviour flag: docs/journal.md, "Changing it"."""


def difference(folder: Path) -> str:
    """Why a journal is not replayed as it was recorded; empty if it is."""
    try:
        replay(folder)
    except Divergence as error:
        found = diverged_step(folder, error)
        words = "\n".join(found.lines()) if found is not None else ""
        return POLICY.format(name=folder.name, divergence=error, words=words)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_is_decided_as_it_was_recorded(name: str) -> None:
    if found := difference(FOLDER / name):
        pytest.fail(found, pytrace=False)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_the_decisions(name: str) -> None:
    """If this fails and the test above does not, only the words changed: `record.py --words` writes them anew."""
    walk = Walk(FOLDER / name)
    text = decisions_text(decision_of(number, event, step, walk.names) for number, event, step in walk)
    assert text == (FOLDER / name / DECISIONS).read_text("utf-8")
    assert len(read_decisions(FOLDER / name / DECISIONS)) > 3


def test_there_is_one_for_every_feature_and_all_are_small() -> None:
    assert set(NAMES) == set(FEATURES)
    files = [path for name in NAMES for path in (FOLDER / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < BYTES_MAX


def test_features_are_different_runs() -> None:
    """A setting that changes no decision is no feature of its own."""
    finals: dict[bytes, list[str]] = {}
    for name in NAMES:
        *_, last = read_journal(FOLDER / name).events()
        finals.setdefault(last.digest, []).append(name)
    assert [names for names in finals.values() if len(names) > 1] == []


# ------------------------------------------------------------------------------------------------------ planted changes


def last_of_equals_first(keys: Sequence[float]) -> list[int]:
    """A policy with its tie-break reversed."""
    return sorted(range(len(keys)), key=lambda at: (keys[at], at), reverse=True)


def test_a_changed_tie_break_of_a_policy_is_named_at_its_first_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "_highest_first", last_of_equals_first)
    changed = [name for name in NAMES if difference(FOLDER / name)]
    assert changed == ["policy-hrrn", "policy-lof", "policy-lpm"]
    found = difference(FOLDER / "policy-lpm")
    assert "golden journal policy-lpm is decided otherwise" in found
    assert "step 49 (record 50)" in found
    assert "  both  admitted s2t0" in found
    assert "  then  deferred s3t0 (prefill_budget): this extend is full" in found
    assert "  now   deferred s5t0 (prefill_budget): this extend is full" in found
    assert "state before\n  pages 8/24 free, 16 cached\n  waiting s2t0 s3t0 s4t0 s5t0" in found
    assert "behaviour flags: none" in found


def test_a_changed_tie_break_of_retraction_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def the_other_one(config: object, running_batch: object, positions: object) -> int:
        victim = choose(config, running_batch, positions)
        return 0 if victim else 1

    choose: Callable[..., int] = microbatches.choose_victim
    monkeypatch.setattr(microbatches, "choose_victim", the_other_one)
    found = difference(FOLDER / "tight")
    assert "  then  retracted " in found
    assert "  now   retracted " in found


def test_verify_names_both_decisions_and_without_their_words_what_the_journal_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ordering, "_highest_first", last_of_equals_first)
    result = CliRunner().invoke(journal, ["verify", str(FOLDER / "policy-hrrn")])
    assert result.exit_code == 3
    assert "  then  deferred s2t0 (kv_budget)" in result.stderr
    assert "  now   admitted s3t0" in result.stderr
    bare = tmp_path / "run"
    shutil.copytree(FOLDER / "policy-hrrn" / "journal", bare / "journal")
    result = CliRunner().invoke(journal, ["verify", str(bare)])
    assert result.exit_code == 3
    assert "  now   admitted s3t0" in result.stderr
    assert "  then  only its digest is stored; the next result in the journal is b14 with 2 tokens" in result.stderr


def test_a_step_that_raises_now_is_reported_with_its_recorded_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> int:
        raise InvariantError("no victim")

    monkeypatch.setattr(microbatches, "choose_victim", refuses)
    found = difference(FOLDER / "tight")
    assert "  now   raises InvariantError: no victim" in found
    assert "  then  retracted " in found


def test_a_damaged_file_of_decisions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / DECISIONS
    path.write_text("step 4 LaneReady\n  admitted a\nstep x\n")
    with pytest.raises(ConfigError, match="line 3 must be"):
        read_decisions(path)


def test_recording_again_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A scenario's journal does not depend on when or where it is recorded."""
    monkeypatch.setattr("tests.golden.record.FOLDER", tmp_path)
    record("preemption")
    for name in ("journal/00000000.log", DECISIONS):
        assert (tmp_path / "preemption" / name).read_bytes() == (FOLDER / "preemption" / name).read_bytes()
