"""Expiry of a journal: the segments that are dropped by size and age, and the snapshots that a long one keeps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import LaneReady
from lockstep.core.journal.reader import opening_snapshot
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host import durable
from lockstep.host.durable import Content, DurableJournal, Retention

NOW_S = 2_000_000_000  # time of the clock, by which files have their ages
OLD_S = 1000  # age of a file that is not recent


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that a test sets. Files are recent for 60 s, and at most 5 old snapshots are all kept."""
    now_s = [NOW_S]
    monkeypatch.setattr(durable, "time", SimpleNamespace(time=lambda: now_s[0]))
    monkeypatch.setattr(durable, "RECENT_S", 60.0)
    monkeypatch.setattr(durable, "OLD_SNAPSHOTS_MAX", 5)
    return now_s


class Aged:
    """A journal with one event in each segment, whose files were written at given times before the clock's.

    Every segment but the first begins with a snapshot, unless the journal has no content.
    """

    def __init__(self, writer: JournalWriter, ages_s: Sequence[int]) -> None:
        engine = Engine(writer.header.config)
        self.journal = DurableJournal(writer, engine, Retention())
        self.folder = writer.folder
        for number in range(len(ages_s)):
            if number and self.journal.digests_only:
                writer.rotate(writer.header)
            elif number:
                self.journal.begin_segment(expire=False)
            event = LaneReady(number)
            self.journal.append(event, engine.step(event).digest)
        self.journal.flush()
        for path, age_s in zip(self.segments, ages_s, strict=True):
            os.utime(path, (NOW_S - age_s, NOW_S - age_s))

    @property
    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    @property
    def snapshots(self) -> list[int]:
        """Numbers of the segments whose snapshots exist."""
        there = {path.name for path in self.folder.glob("snapshot-*")}
        return [int(path.stem) for path in self.segments if opening_snapshot(path) in there]

    def kept(self, retention: Retention) -> list[int]:
        """Let files expire within these limits. Returns the numbers of the segments that are left."""
        self.journal.retention = retention
        self.journal.expire()
        return [int(path.stem) for path in self.segments]


@contextmanager
def aged(run: Path, ages_s: Sequence[int], content: Content = "full") -> Iterator[Aged]:
    with JournalWriter.create(run, JournalHeader(config=SchedConfig(pages=8), content=content)) as writer:
        yield Aged(writer, ages_s)


@pytest.mark.parametrize(
    ("old", "snapshots"),
    [
        (5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (6, [1, 3, 5, 7, 8, 9, 10, 11]),
        (7, [1, 3, 5, 7, 8, 9, 10, 11, 12]),
    ],
)
def test_of_many_old_snapshots_every_second_one_stays(old: int, snapshots: list[int], tmp_path: Path) -> None:
    """The last of the old segments is as old as a recent one can be. All segments stay."""
    with aged(tmp_path, [*[OLD_S] * old, 60, *range(59, 54, -1)]) as journal:
        assert journal.kept(Retention()) == list(range(old + 6))
        assert journal.snapshots == snapshots


def test_the_newest_two_snapshots_stay_however_old_they_are(tmp_path: Path) -> None:
    """Segments 1, 3, 5 and 7 are those that would stay of the old ones."""
    with aged(tmp_path, [OLD_S] * 9) as journal:
        journal.kept(Retention())
        assert journal.snapshots == [1, 3, 5, 7, 8]


def test_the_snapshot_with_which_a_shortened_journal_begins_is_not_one_of_the_old_ones(tmp_path: Path) -> None:
    """The journal begins with segment 2 now, and of the old segments 3 to 8 every second one stays."""
    with aged(tmp_path, [800, 700, *[500] * 7, 10, 10]) as journal:
        assert journal.kept(Retention(age_s=600)) == list(range(2, 11))
        assert journal.snapshots == [2, 3, 5, 7, 9, 10]


def test_a_shortened_journal_begins_with_a_snapshot_that_is_left(tmp_path: Path) -> None:
    with aged(tmp_path, [OLD_S, *[500] * 8]) as journal:
        journal.kept(Retention())
        assert journal.snapshots == [1, 3, 5, 7, 8]
        total = sum(path.stat().st_size for path in journal.folder.iterdir())
        first = journal.segments[0].stat().st_size
        assert journal.kept(Retention(bytes_max=total - first - 1)) == [3, 4, 5, 6, 7, 8]
        assert journal.snapshots == [3, 5, 7, 8]


def test_segments_expire_by_the_age_of_their_ends(tmp_path: Path, clock: list[int]) -> None:
    """The end of segment 2 is within the limit. 100 s later it is beyond, and segment 3 is within."""
    with aged(tmp_path, [900, 501, 500, 400, 300, 100]) as journal:
        assert journal.kept(Retention()) == [0, 1, 2, 3, 4, 5]
        assert journal.kept(Retention(age_s=500)) == [2, 3, 4, 5]
        assert journal.snapshots == [2, 3, 4, 5]
        clock[0] += 100
        assert journal.kept(Retention(age_s=500)) == [3, 4, 5]
        assert journal.kept(Retention(age_s=5)) == [4, 5]


def test_a_segment_whose_end_is_recent_does_not_expire(tmp_path: Path) -> None:
    with aged(tmp_path, [OLD_S, 60, 59, 5, 4, 3]) as journal:
        assert journal.kept(Retention(age_s=1)) == [2, 3, 4, 5]
    with aged(tmp_path / "first", [60, 59, 5, 4, 3]) as journal:
        assert journal.kept(Retention(age_s=1)) == [1, 2, 3, 4]
    with aged(tmp_path / "none", [59, 5, 4, 3]) as journal:
        assert journal.kept(Retention(age_s=1)) == [0, 1, 2, 3]


def test_segments_stay_behind_one_that_does_not_expire(tmp_path: Path) -> None:
    """The clock was set back: files that were written later look older. Nothing expires behind the first young one."""
    with aged(tmp_path, [OLD_S, 70, OLD_S, OLD_S, OLD_S, 5]) as journal:
        assert journal.kept(Retention(age_s=100)) == [1, 2, 3, 4, 5]
    with aged(tmp_path / "recent", [59, *[OLD_S] * 9]) as journal:
        assert journal.kept(Retention(age_s=100)) == list(range(10))
        assert journal.snapshots == list(range(1, 10))


def test_segments_expire_while_all_files_are_larger_than_the_limit(tmp_path: Path) -> None:
    with aged(tmp_path, [OLD_S] * 6) as journal:
        total = sum(path.stat().st_size for path in journal.folder.iterdir())
        assert journal.kept(Retention(bytes_max=total)) == [0, 1, 2, 3, 4, 5]
        assert journal.kept(Retention(bytes_max=total - 1)) == [1, 2, 3, 4, 5]
        assert journal.snapshots == [1, 2, 3, 4, 5]
        assert journal.kept(Retention(bytes_max=0)) == [4, 5]
        assert journal.snapshots == [4, 5]


def test_a_journal_without_content_may_begin_with_any_segment(tmp_path: Path) -> None:
    with aged(tmp_path, [900, 600, 400, 300, 200, 100], "digests") as journal:
        assert journal.kept(Retention(age_s=500)) == [2, 3, 4, 5]
        assert not journal.snapshots


def test_snapshots_of_segments_that_expire_do_not_count_for_those_that_stay(tmp_path: Path) -> None:
    with aged(tmp_path, [OLD_S] * 6) as journal:
        for path in journal.folder.glob("snapshot-*"):
            path.write_bytes(bytes(100_000))
        sizes = sum(path.stat().st_size for path in journal.segments)
        assert journal.kept(Retention(bytes_max=4 * 100_000 + sizes)) == [2, 3, 4, 5]
