"""A corrupt journal: the hint at the start of an engine, and the copy of the records before the corruption."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalCorrupt, JournalError, SnapshotRecord
from lockstep.core.journal.replay import replay
from lockstep.core.journal.salvage import salvaged
from lockstep.core.journal.writer import JournalWriter
from lockstep.host.startup import Keeper

GOLDEN = Path(__file__).parents[1] / "golden" / "plain"


@pytest.fixture
def corrupt(tmp_path: Path) -> Path:
    """A run with a journal that has a changed bit behind its middle."""
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    segment = sorted((run / "journal").glob("*.log"))[-1]
    data = bytearray(segment.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    segment.write_bytes(bytes(data))
    return run


def test_everything_before_the_corruption_is_copied(corrupt: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalCorrupt):
        _ = read_journal(corrupt).tail
    before = sorted((corrupt / "journal").iterdir())
    out = tmp_path / "copy"
    kept = salvaged(corrupt, out)
    events = [record.event for record in read_journal(out).events()]
    whole = [record.event for record in read_journal(GOLDEN).events()]
    assert 0 < len(events) < len(whole)
    assert events == whole[: len(events)]
    assert kept.dropped_bytes > 0
    replay(out)
    assert sorted((corrupt / "journal").iterdir()) == before
    assert (out / "journal").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in (out / "journal").iterdir())


def test_snapshots_of_the_part_that_is_kept_are_copied(tmp_path: Path) -> None:
    whole = read_journal(GOLDEN)
    events = list(whole.events())
    run = tmp_path / "run"
    with JournalWriter.create(run, whole.header) as writer:
        for number, record in enumerate(events):
            if number in (2, len(events) - 2):
                writer.snapshot(b"state", bytes(16))
            writer.append(record.event, record.digest)
    (segment,) = (run / "journal").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 4
    segment.write_bytes(bytes(data))
    salvaged(run, tmp_path / "copy")
    kept = [one for one in read_journal(tmp_path / "copy").records() if isinstance(one, SnapshotRecord)]
    assert len(kept) == 1
    names = [path.name for path in (tmp_path / "copy/journal").glob("snapshot-*")]
    assert names == [kept[0].snapshot.file]


def test_an_engine_names_the_command(corrupt: Path) -> None:
    with pytest.raises(
        JournalError, match=rf"corrupt at offset \d+.*\nhint: `lockstep journal salvage {corrupt} --out"
    ):
        Keeper(corrupt)


def test_the_command_prints_what_is_kept(corrupt: Path, tmp_path: Path) -> None:
    from lockstep.tools.journal import journal

    done = CliRunner().invoke(journal, ["salvage", str(corrupt), "--out", str(tmp_path / "copy")])
    assert done.exit_code == 0, done.output
    assert "bytes are left out" in done.output
    again = CliRunner().invoke(journal, ["salvage", str(corrupt), "--out", str(tmp_path / "copy")])
    assert again.exit_code != 0
    assert "is not empty" in again.output


def test_stored_answers_are_copied(corrupt: Path, tmp_path: Path) -> None:
    from lockstep.tools.journal import journal

    kept = corrupt / "answers" / "kept" / "a"
    kept.mkdir(parents=True)
    (kept / "ans_1").write_bytes(b"an answer")
    with closing(sqlite3.connect(corrupt / "answers" / "responses.sqlite")) as base:
        base.execute("CREATE TABLE responses (tenant TEXT, body TEXT)")
        base.execute("INSERT INTO responses VALUES ('alice', 'hello')")
        base.commit()
    for run, out in ((corrupt, tmp_path / "copy"), (corrupt / "journal", tmp_path / "again")):
        done = CliRunner().invoke(journal, ["salvage", str(run), "--out", str(out)])
        assert done.exit_code == 0, done.output
        assert (out / "answers" / "kept" / "a" / "ans_1").read_bytes() == b"an answer"
        with closing(sqlite3.connect(out / "answers" / "responses.sqlite")) as base:
            assert base.execute("SELECT * FROM responses").fetchall() == [("alice", "hello")]
        assert all(one.stat().st_mode & 0o077 == 0 for one in (out / "answers").rglob("*"))


def test_an_intact_journal_is_not_salvaged(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is not corrupt"):
        salvaged(GOLDEN, tmp_path / "copy")
