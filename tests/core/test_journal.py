"""The journal: records are read back as they were written, and the writer stops at the first failure of a disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    BatchFinished,
    ClockAdvanced,
    ControlRequested,
    EngineRestarted,
    Grammar,
    GrammarReady,
    LaneReady,
    ObservedEvent,
    Pause,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    SamplingParams,
    TokenIds,
    TokenRuns,
    TransferAdvanced,
)
from lockstep.core.journal import segments
from lockstep.core.journal import writer as writer_module
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import (
    PAYLOAD_BYTES_MAX,
    EndRecord,
    EventRecord,
    HeaderRecord,
    JournalError,
    JournalHeader,
    Snapshot,
    SnapshotRecord,
    UnsealedRecord,
)
from lockstep.core.journal.replay import Divergence, event_line, fold, replay
from lockstep.core.journal.segments import segment_name
from lockstep.core.journal.writer import JournalWriter

HEADER = JournalHeader(
    config=SchedConfig(page_size=4, pages=64, chunked_prefill_size=8),
    seed=7,
    model_digest="sha256:abc",
    tokenizer_digest="sha256:def",
    host={"kind": "test", "rate": 6.5, "requests": 3},
)
SAMPLING = SamplingParams(temperature=0.5, logit_bias=((3, -1.5),))
GRAMMAR = Grammar(kind="regex", source="a+", digest=bytes(32))
EVENTS: list[ObservedEvent] = [
    RequestArrived(time_us=0, request_id=1, prompt=TokenRuns((0, 12)), max_new_tokens=4),
    RequestArrived(
        time_us=5, request_id=2, prompt=TokenIds(bytes(40)), max_new_tokens=4, sampling=SAMPLING, grammar=GRAMMAR
    ),
    LaneReady(5),
    BatchFinished(90, batch_id=0, tokens=bytes(8), started_us=6, finished_us=80, text_stops=(1,)),
    RequestCancelled(91, 2),
    GrammarReady(92, digest=bytes(32), error="no"),
    TransferAdvanced(93, 1, "prefill-0", 0, 3, "done", first_token=17),
    RanksAgreed(94, 3, ((1, 2, 0, 1), (0, 0, 0, 1))),
    ControlRequested(95, 1, Pause("retract")),
    EngineRestarted(96, 1),
    ClockAdvanced(97),
]


class ChainEngine:
    """The smallest deterministic engine: its digest is a chain over the events, its state is the chain."""

    def __init__(self, state: bytes = b"", salt: bytes = b"") -> None:
        self.state = state
        self.salt = salt

    def step(self, event: ObservedEvent, /) -> Step:
        self.state = blake2b(self.state + self.salt + msgspec.msgpack.encode(event), digest_size=16).digest()
        return Step(digest=self.state)


def make_engine(_: JournalHeader) -> ChainEngine:
    return ChainEngine()


def write(folder: Path, events: list[ObservedEvent], **options: object) -> None:
    engine = ChainEngine()
    with JournalWriter.create(folder, HEADER, **options) as writer:  # type: ignore[arg-type]
        for event in events:
            writer.append(event, engine.step(event).digest)


def events_of(folder: Path) -> list[ObservedEvent]:
    return [record.event for record in read_journal(folder).events()]


# ------------------------------------------------------------------------------------------------------ write and read


@pytest.mark.parametrize("durability", ["none", "interval", "group", "every"])
def test_appended_records_are_read_back(tmp_path: Path, durability: str) -> None:
    write(tmp_path, EVENTS, durability=durability)
    journal = read_journal(tmp_path)
    engine = ChainEngine()
    assert journal.header == HEADER
    assert journal.header.config == HEADER.config
    assert [(r.step, r.event, r.digest) for r in journal.events()] == [
        (step, event, engine.step(event).digest) for step, event in enumerate(EVENTS)
    ]
    assert [type(r) for r in journal.records()] == [HeaderRecord, *[EventRecord] * len(EVENTS), EndRecord]
    assert (journal.tail.verdict, journal.tail.closed, journal.tail.torn_bytes) == ("clean", True, 0)
    assert (journal.tail.records, journal.tail.steps) == (len(EVENTS) + 2, len(EVENTS))


def test_journal_folder_can_be_given_instead_of_run_folder(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    assert events_of(tmp_path / "journal") == EVENTS


def test_files_are_private(tmp_path: Path) -> None:
    with JournalWriter.create(tmp_path / "run", HEADER) as writer:
        writer.snapshot(b"state", bytes(16))
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run/journal").stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "run/journal").iterdir()}
    assert modes == {0o600}


def test_equal_runs_write_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, EVENTS)
    first, second = ((tmp_path / name / "journal/00000000.log").read_bytes() for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize("durability", ["none", "group"])
def test_segments_rotate_and_read_as_one(tmp_path: Path, durability: str) -> None:
    events = EVENTS * 20
    write(tmp_path, events, durability=durability, segment_bytes=4096)
    journal = read_journal(tmp_path)
    assert len(journal.segments) > 3
    assert all(path.stat().st_size < 4096 + 1024 for path in journal.segments)
    headers = [record for record in journal.records() if isinstance(record, HeaderRecord)]
    assert [record.header.segment for record in headers] == list(range(len(journal.segments)))
    assert [record.segment for record in headers] == list(range(len(journal.segments)))
    assert [record.header.first_sequence for record in headers] == [record.sequence for record in headers]
    assert [record.sequence for record in journal.records()] == list(range(journal.tail.records))
    assert events_of(tmp_path) == events


def test_segment_that_is_exactly_full_is_followed_by_the_next(tmp_path: Path) -> None:
    with JournalWriter.create(tmp_path / "probe", HEADER) as writer:
        writer.append(EVENTS[0], bytes(16))
        writer.flush()
        full = writer.segment_bytes
    for segment_bytes, segment in ((full, 1), (full + 1, 0)):
        with JournalWriter.create(tmp_path / str(segment_bytes), HEADER, segment_bytes=segment_bytes) as writer:
            writer.append(EVENTS[0], bytes(16))
            writer.flush()
            assert writer.segment == segment


def test_records_keep_their_places_in_a_journal_read_from_a_later_segment(tmp_path: Path) -> None:
    write(tmp_path, EVENTS * 20, segment_bytes=4096)
    whole, part = read_journal(tmp_path), read_journal(tmp_path, first_segment=2)
    assert list(part.records()) == [record for record in whole.records() if record.segment >= 2]


def test_flushed_records_are_in_the_file_before_close(tmp_path: Path) -> None:
    writer = JournalWriter.create(tmp_path, HEADER)
    writer.append(EVENTS[0], bytes(16))
    assert (events_of(tmp_path), writer.records_written) == ([], 1)
    writer.flush()
    assert (events_of(tmp_path), writer.records_written) == (EVENTS[:1], 2)
    assert not read_journal(tmp_path).tail.closed
    writer.close("enough")
    assert [r.reason for r in read_journal(tmp_path).records() if isinstance(r, EndRecord)] == ["enough"]


def test_buffer_is_written_when_it_is_large(tmp_path: Path) -> None:
    event = BatchFinished(1, 1, bytes(64 << 10))
    with JournalWriter.create(tmp_path, HEADER) as writer:
        for _ in range(5):
            writer.append(event, bytes(16))
        assert writer.records_written >= 5


def test_unsealed_event_is_kept_without_digest(tmp_path: Path) -> None:
    engine = ChainEngine()
    writer = JournalWriter.create(tmp_path, HEADER)
    writer.append(EVENTS[0], engine.step(EVENTS[0]).digest)
    writer.append_unsealed(EVENTS[2])
    writer.close("step raised")
    unsealed = [record.event for record in read_journal(tmp_path).records() if isinstance(record, UnsealedRecord)]
    assert unsealed == [EVENTS[2]]
    done = replay(tmp_path, make_engine)
    assert (done.steps, done.unsealed) == (1, 1)


def test_error_inside_with_is_the_reason_of_the_end(tmp_path: Path) -> None:
    def fail() -> None:
        with JournalWriter.create(tmp_path, HEADER):
            raise ValueError("the host broke")

    with pytest.raises(ValueError, match="the host broke"):
        fail()
    assert [r.reason for r in read_journal(tmp_path).records() if isinstance(r, EndRecord)] == ["failed: ValueError"]


def test_second_writer_and_second_journal_are_refused(tmp_path: Path) -> None:
    writer = JournalWriter.create(tmp_path, HEADER)
    with pytest.raises(JournalError, match="already holds a journal"):
        JournalWriter.create(tmp_path, HEADER)
    with pytest.raises(JournalError, match="being written by another process"):
        JournalWriter.resume(tmp_path)
    writer.close()
    with pytest.raises(JournalError, match="is closed"):
        writer.append(EVENTS[0], bytes(16))
    writer.close()


def test_digest_of_another_length_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with JournalWriter.create(tmp_path, HEADER) as writer, pytest.raises(JournalError, match="16 bytes, got 0"):
        writer.append(EVENTS[0], b"")
    assert read_journal(tmp_path).tail.steps == 0


def test_payload_over_the_bound_is_refused_and_the_journal_goes_on(tmp_path: Path) -> None:
    with JournalWriter.create(tmp_path, HEADER) as writer:
        with pytest.raises(JournalError, match="at most"):
            writer.append(BatchFinished(1, 1, bytes(PAYLOAD_BYTES_MAX)), bytes(16))
        writer.append(EVENTS[0], bytes(16))
    assert events_of(tmp_path) == EVENTS[:1]


def test_resumed_journal_is_one_journal(tmp_path: Path) -> None:
    engine = ChainEngine()
    writer = JournalWriter.create(tmp_path, HEADER)
    for event in EVENTS[:5]:
        writer.append(event, engine.step(event).digest)
    writer.close()
    first = tmp_path / "journal/00000000.log"
    with first.open("ab") as file:
        file.write(b"the remains of a record")
    writer = JournalWriter.resume(tmp_path)
    assert writer.steps == 5
    for event in EVENTS[5:]:
        writer.append(event, engine.step(event).digest)
    writer.close()
    journal = read_journal(tmp_path)
    assert [record.step for record in journal.events()] == list(range(len(EVENTS)))
    assert replay(tmp_path, make_engine).steps == len(EVENTS)


@given(
    st.lists(
        st.one_of(
            st.builds(LaneReady, st.integers(0, 2**60), st.integers(0, 9)),
            st.builds(BatchFinished, st.integers(0, 2**60), st.integers(0, 2**60), st.binary(max_size=600)),
            st.builds(RequestCancelled, st.integers(0, 2**60), st.integers(0, 2**60)),
        ),
        max_size=30,
    ),
    st.integers(400, 3000),
)
def test_any_events_come_back_for_any_segment_size(
    tmp_path_factory: pytest.TempPathFactory, events: list[ObservedEvent], segment_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder, events, segment_bytes=segment_bytes)
    assert events_of(folder) == events
    assert read_journal(folder).tail.verdict == "clean"


def test_header_with_a_switch_comes_back(tmp_path: Path) -> None:
    header = msgspec.structs.replace(HEADER, host={"kind": "simulator", "eplb": True})
    JournalWriter.create(tmp_path, header).close()
    assert read_journal(tmp_path).header.host["eplb"] is True


def test_header_that_no_reader_could_read_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    unreadable = msgspec.structs.replace(HEADER, host={"kind": ["a", "list"]})  # type: ignore[dict-item]
    with pytest.raises(JournalError, match=r"00000000.log could not be read again: .*host"):
        JournalWriter.create(tmp_path, unreadable)
    assert list((tmp_path / "journal").iterdir()) == []


# ---------------------------------------------------------------------------------------------------------- durability


def test_every_is_durable_when_append_returns(tmp_path: Path) -> None:
    with JournalWriter.create(tmp_path, HEADER, durability="every") as writer:
        writer.append(EVENTS[0], bytes(16))
        assert writer.records_durable == writer.records == 2


def test_none_never_syncs_unless_asked(tmp_path: Path) -> None:
    class Counting(JournalWriter):
        synced = 0

        @staticmethod
        def _os_fsync(file: int) -> None:
            Counting.synced += 1
            os.fsync(file)

    with Counting.create(tmp_path, HEADER, segment_bytes=2048) as writer:
        for event in EVENTS * 10:
            writer.append(event, bytes(16))
        writer.flush()
        assert Counting.synced == 0
        writer.sync()
        assert Counting.synced == 1
        assert writer.records_durable == writer.records


@pytest.mark.parametrize("durability", ["interval", "group"])
def test_slow_disk_does_not_hold_the_scheduler_up(tmp_path: Path, durability: str) -> None:
    disk = threading.Event()

    class SlowDisk(JournalWriter):
        slow = False

        @staticmethod
        def _os_fsync(file: int) -> None:
            if SlowDisk.slow:
                assert disk.wait(120)
            os.fsync(file)

    writer = SlowDisk.create(tmp_path, HEADER, durability=durability)  # type: ignore[arg-type]
    SlowDisk.slow = True
    for event in EVENTS * 100:
        writer.append(event, bytes(16))
        writer.flush()
    assert writer.records_written == writer.records == 1 + len(EVENTS) * 100
    assert writer.records_durable == 1
    disk.set()
    _wait_for(lambda: writer.records_durable == writer.records)
    writer.close()


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ----------------------------------------------------------------------------------------------------------- fail stop


class FullDisk(JournalWriter):
    """A disk with room for this number of bytes, which then accepts part of a write and refuses the rest."""

    room_bytes = 0

    @classmethod
    def _os_write(cls, file: int, data: memoryview) -> int:  # type: ignore[override]
        if not cls.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = os.write(file, data[: cls.room_bytes])
        cls.room_bytes -= taken
        return taken


def test_short_writes_are_completed(tmp_path: Path) -> None:
    class Halting(JournalWriter):
        @staticmethod
        def _os_write(file: int, data: memoryview) -> int:
            return os.write(file, data[:7])

    with Halting.create(tmp_path, HEADER) as writer:
        for event in EVENTS:
            writer.append(event, bytes(16))
    assert events_of(tmp_path) == EVENTS


@pytest.mark.parametrize("room_bytes", range(150, 1350, 37))  # after the header, and at first for fewer than two events
def test_full_disk_stops_the_journal_at_its_last_whole_record(tmp_path: Path, room_bytes: int) -> None:
    FullDisk.room_bytes = 1 << 20
    writer = FullDisk.create(tmp_path, HEADER)
    FullDisk.room_bytes = room_bytes
    _fill_until_it_fails(writer)
    FullDisk.room_bytes = 1 << 20
    _assert_stopped(writer)
    recovered = _assert_prefix_of_events(tmp_path)
    assert read_journal(tmp_path, repair=True).tail.verdict == "clean"
    assert _assert_prefix_of_events(tmp_path) == recovered


def _fill_until_it_fails(writer: JournalWriter, records: int = 1_000_000) -> None:
    engine = ChainEngine()
    with pytest.raises(JournalError, match="stopped at its last whole record"):  # noqa: PT012
        for number in range(records):
            event = EVENTS[number % len(EVENTS)]
            writer.append(event, engine.step(event).digest)
            writer.flush()


def _assert_stopped(writer: JournalWriter) -> None:
    for call in (
        lambda: writer.append(EVENTS[0], bytes(16)),
        lambda: writer.append_unsealed(EVENTS[0]),
        writer.flush,
        writer.sync,
        lambda: writer.snapshot(b"", bytes(16)),
        writer.close,
    ):
        with pytest.raises(JournalError, match="the journal stopped"):
            call()


def _assert_prefix_of_events(folder: Path) -> int:
    events = events_of(folder)
    assert events == [EVENTS[number % len(EVENTS)] for number in range(len(events))]
    assert replay(folder, make_engine).steps == len(events) > 0
    return len(events)


def test_real_full_disk_leaves_a_valid_journal(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a tmpfs; the next test needs none")
    try:
        writer = JournalWriter.create(disk / "run", HEADER)
        _fill_until_it_fails(writer)
        _assert_stopped(writer)
        assert "No space left" in writer._failure
        _assert_prefix_of_events(disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_file_size_limit_leaves_a_valid_journal(tmp_path: Path) -> None:
    program = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import LaneReady
from lockstep.core.journal.records import JournalError, JournalHeader
from lockstep.core.journal.writer import JournalWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # Python ignores SIGXFSZ, so write() fails with EFBIG
writer = JournalWriter.create({str(tmp_path)!r}, JournalHeader(config=SchedConfig()))
try:
    for number in range(1000):
        writer.append(LaneReady(number), bytes(16))
        writer.flush()
except JournalError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "File too large" in out
    journal = read_journal(tmp_path)
    assert (tmp_path / "journal/00000000.log").stat().st_size == 5000
    times_us = [record.event.time_us for record in journal.events()]
    assert times_us == list(range(len(times_us)))
    assert len(times_us) > 20
    assert journal.tail.verdict == "torn"


@pytest.mark.parametrize("durability", ["interval", "group", "every"])
def test_failed_fsync_is_not_retried(tmp_path: Path, durability: str) -> None:
    class BadDisk(JournalWriter):
        bad = False
        tried = 0

        @staticmethod
        def _os_fsync(_: int) -> None:
            if BadDisk.bad:
                BadDisk.tried += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = BadDisk.create(tmp_path, HEADER, durability=durability)  # type: ignore[arg-type]
    BadDisk.bad = True
    deadline = time.monotonic() + 120
    with pytest.raises(JournalError, match=r"cannot sync .*Input/output error"):  # noqa: PT012  it may come later
        while time.monotonic() < deadline:
            writer.append(EVENTS[0], bytes(16))
            writer.flush()
    BadDisk.bad = False
    _assert_stopped(writer)
    assert BadDisk.tried == 1


@pytest.mark.parametrize("durability", ["interval", "group"])
def test_failed_fsync_behind_the_last_flush_is_raised_at_the_end_of_the_with_block(
    tmp_path: Path, durability: str
) -> None:
    class BadDisk(JournalWriter):
        bad = False

        @staticmethod
        def _os_fsync(_: int) -> None:
            if BadDisk.bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write_and_leave(folder: Path, error: Exception | None = None) -> JournalWriter:
        BadDisk.bad = False
        with BadDisk.create(folder, HEADER, durability=durability) as writer:  # type: ignore[arg-type]
            writer.append(EVENTS[0], bytes(16))
            BadDisk.bad = True
            writer.flush()
            _wait_for(lambda: bool(writer._failure))  # no call of the writer follows
            BadDisk.bad = False  # a disk that works again does not make the lost record durable
            if error is not None:
                raise error
        return writer

    with pytest.raises(JournalError, match=r"cannot sync .*Input/output error"):
        write_and_leave(tmp_path / "a")
    assert not read_journal(tmp_path / "a").tail.closed
    with pytest.raises(ValueError, match="the host broke"):  # the error that came first
        write_and_leave(tmp_path / "b", ValueError("the host broke"))
    assert not read_journal(tmp_path / "b").tail.closed
    for name in ("a", "b"):
        JournalWriter.resume(tmp_path / name).close()  # the files and the lock were released


def test_fsync_that_failed_while_another_one_waited_is_not_tried_again(tmp_path: Path) -> None:
    lock, waits = threading.Lock(), threading.Event()

    class Lock:
        def __enter__(self) -> None:
            if threading.current_thread() is threading.main_thread():
                waits.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    class BadDisk(JournalWriter):
        tried = -1  # no fsync fails yet

        @staticmethod
        def _os_fsync(_: int) -> None:
            if BadDisk.tried >= 0:
                BadDisk.tried += 1
                assert waits.wait(120)
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = BadDisk.create(tmp_path, HEADER, durability="group")
    writer._file_lock = Lock()  # type: ignore[assignment]
    BadDisk.tried = 0
    writer.append(EVENTS[0], bytes(16))
    writer.flush()
    _wait_for(lambda: BadDisk.tried == 1)  # the thread is in its fsync, which fails once this thread waits
    with pytest.raises(JournalError, match="cannot sync"):
        writer.sync()
    assert BadDisk.tried == 1
    with pytest.raises(JournalError, match="cannot sync"):
        writer.close()


def test_nothing_is_written_behind_a_failed_fsync_not_even_the_end(tmp_path: Path) -> None:
    class BadDisk(JournalWriter):
        bad = False

        @staticmethod
        def _os_fsync(_: int) -> None:
            if BadDisk.bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write_on() -> None:
        with BadDisk.create(tmp_path, HEADER, durability="every") as writer:
            BadDisk.bad = True
            with pytest.raises(JournalError, match="cannot sync"):
                writer.append(EVENTS[0], bytes(16))
            BadDisk.bad = False

    with pytest.raises(JournalError, match="cannot sync"):
        write_on()
    tail = read_journal(tmp_path).tail
    assert (tail.records, tail.closed) == (2, False)


class WatchedDisk(JournalWriter):
    """Records every fsync: of the folder, with the names that are in it at that time, or of a file."""

    synced: ClassVar[list[set[str] | str]] = []

    @staticmethod
    def _os_fsync(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        WatchedDisk.synced.append({one.name for one in path.iterdir()} if path.is_dir() else path.name)
        os.fsync(file)


@pytest.mark.parametrize("durability", ["interval", "group", "every"])
def test_folder_is_synced_behind_every_file_that_is_new_in_it(tmp_path: Path, durability: str) -> None:
    def next_synced() -> list[set[str] | str]:
        found, WatchedDisk.synced = WatchedDisk.synced, []
        return found

    next_synced()
    with WatchedDisk.create(tmp_path, HEADER, durability=durability) as writer:  # type: ignore[arg-type]
        assert next_synced() == ["00000000.log", {"00000000.log"}]
        assert writer.records_durable == 1
        snapshot = writer.snapshot(b"state", bytes(16))
        synced = next_synced()
        assert [snapshot.file.replace("snapshot-", "") in str(one) for one in synced[:2]] == [True, True]
        assert isinstance(synced[0], str)
        assert synced[0].endswith(".tmp")
        assert synced[1] == {"00000000.log", snapshot.file}
        _wait_for(lambda: writer.records_durable == writer.records)
        next_synced()
        writer.rotate(HEADER)
        assert [one for one in next_synced() if one != "00000000.log"] == [
            "00000001.log",
            {"00000000.log", "00000001.log", snapshot.file},
        ]
    JournalWriter.resume(tmp_path).close()


def test_run_folder_is_synced_behind_the_new_journal_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, bool]] = []
    real = segments.sync_folder

    def note(folder: Path) -> None:
        synced.append((folder, (folder / "journal").is_dir()))
        real(folder)

    monkeypatch.setattr(writer_module, "sync_folder", note)
    JournalWriter.create(tmp_path / "a", HEADER, durability="group").close()
    assert synced == [(tmp_path / "a", True)]
    JournalWriter.create(tmp_path / "b", HEADER).close()
    assert len(synced) == 1  # "none" guarantees nothing


def test_repair_syncs_the_cut_file_and_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, EVENTS)
    path = tmp_path / "journal/00000000.log"
    path.write_bytes(path.read_bytes()[:-3])
    synced: list[str] = []
    real = os.fsync

    def note(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        real(file)

    monkeypatch.setattr(os, "fsync", note)
    assert read_journal(tmp_path, repair=True).tail.verdict == "clean"
    assert synced == ["00000000.log", "journal"]


def test_repair_leaves_no_file_open(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    path = tmp_path / "journal/00000000.log"
    path.write_bytes(path.read_bytes()[:-3])
    assert read_journal(tmp_path, repair=True).tail.verdict == "clean"
    still_open = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    assert [name for name in still_open if name.startswith(os.path.realpath(tmp_path))] == []


def test_failed_fsync_of_the_folder_stops_the_journal(tmp_path: Path) -> None:
    class BadFolder(JournalWriter):
        bad = False

        @staticmethod
        def _os_fsync(file: int) -> None:
            if BadFolder.bad and Path(f"/proc/self/fd/{file}").readlink().is_dir():
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    for act in ("snapshot", "rotate", "create"):
        folder = tmp_path / act
        BadFolder.bad = act == "create"
        if act == "create":
            with pytest.raises(JournalError, match=r"cannot sync .*00000000\.log"):
                BadFolder.create(folder, HEADER, durability="group")
            continue
        writer = BadFolder.create(folder, HEADER, durability="group")
        writer.append(EVENTS[0], bytes(16))
        BadFolder.bad = True
        with pytest.raises(JournalError, match=r"cannot (sync|write) .*Input/output error"):
            writer.snapshot(b"state", bytes(16)) if act == "snapshot" else writer.rotate(HEADER)
        BadFolder.bad = False
        _assert_stopped(writer)


def test_failed_fsync_on_rotation_stops_the_journal(tmp_path: Path) -> None:
    class BadDisk(JournalWriter):
        bad = False

        @staticmethod
        def _os_fsync(_: int) -> None:
            if BadDisk.bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = BadDisk.create(tmp_path, HEADER, durability="group", segment_bytes=2048)
    BadDisk.bad = True
    _fill_until_it_fails(writer)
    _assert_stopped(writer)
    assert [path.name for path in (tmp_path / "journal").iterdir()] == [segment_name(0)]


def test_killed_process_keeps_flushed_records(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import LaneReady
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
writer = JournalWriter.create({str(tmp_path)!r}, JournalHeader(config=SchedConfig()), durability="group")
for number in range(1000):
    writer.append(LaneReady(number), bytes(16))
    if number == 700:
        writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    assert [event.time_us for event in events_of(tmp_path)] == list(range(701))
    JournalWriter.resume(tmp_path).close()  # the lock of the dead writer is gone


# ------------------------------------------------------------------------------------------------------------- refusal


def test_missing_path_and_foreign_folder_and_file_have_different_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, message in [("none", "does not exist"), ("", "holds no journal"), ("file", "is a file")]:
        with pytest.raises(JournalError, match=message):
            read_journal(tmp_path / name)


def test_other_format_version_is_refused_naming_both(tmp_path: Path) -> None:
    JournalWriter.create(tmp_path, msgspec.structs.replace(HEADER, format_version=99)).close()
    with pytest.raises(JournalError, match="has format version 99, this core reads format version 1"):
        read_journal(tmp_path)


def test_header_from_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LaterHeader(JournalHeader, frozen=True, kw_only=True):
        invented_later: int = 1

    fields = {name: getattr(HEADER, name) for name in HEADER.__struct_fields__}
    JournalWriter.create(tmp_path, LaterHeader(**fields)).close()
    with pytest.raises(JournalError, match="invented_later"):
        read_journal(tmp_path)


def test_event_unknown_to_this_core_is_refused_not_skipped(tmp_path: Path) -> None:
    class MoonRose(LaneReady, frozen=True, gc=False):
        pass

    JournalWriter.create(tmp_path, HEADER).close()
    writer = JournalWriter.resume(tmp_path)
    writer.append(EVENTS[0], bytes(16))
    writer.append(MoonRose(1), bytes(16))
    writer.close()
    journal = read_journal(tmp_path)
    assert journal.tail.verdict == "clean"  # framing and chain are
    seen = []
    with pytest.raises(JournalError, match="MoonRose"):  # noqa: PT012  the record before must come first
        for record in journal.events():
            seen.append(record.event)
    assert seen == EVENTS[:1]


def test_unknown_behaviour_flag_is_refused(tmp_path: Path) -> None:
    JournalWriter.create(tmp_path, msgspec.structs.replace(HEADER, behaviour_flags=("retract_newest",))).close()
    with pytest.raises(JournalError, match="retract_newest"):
        replay(tmp_path, make_engine)


# -------------------------------------------------------------------------------------------------------------- replay


def test_replay_of_the_same_engine_is_equal(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    done = replay(tmp_path, make_engine)
    assert (done.events, done.steps, done.batches, done.unsealed) == (len(EVENTS), len(EVENTS), 0, 0)
    assert done.tail is not None
    engine = ChainEngine()
    assert done.digest == [engine.step(event).digest for event in EVENTS][-1]


def test_replay_until_stops_before_that_step(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    done = replay(tmp_path, make_engine, until=3)
    assert (done.events, done.steps, done.tail) == (3, 3, None)
    assert [event for event, _ in fold(tmp_path, make_engine, until=3)] == EVENTS[:3]


def test_first_difference_is_reported_with_everything_needed(tmp_path: Path) -> None:
    class Changed(ChainEngine):
        def step(self, event: ObservedEvent, /) -> Step:
            self.salt = b"new rule" if isinstance(event, BatchFinished) else b""
            return super().step(event)

    write(tmp_path, EVENTS)
    with pytest.raises(Divergence) as raised:
        replay(tmp_path, lambda _: Changed())
    error = raised.value
    assert (error.step, error.sequence, error.event, error.flags) == (3, 4, EVENTS[3], ())
    assert error.got_digest is not None
    assert error.got_digest != error.expected_digest
    text = str(error)
    assert text.startswith(f"step 3 (record 4) gave digest {error.got_digest.hex()}, the journal has ")
    assert "event: BatchFinished batch_id=0 tokens=<8 bytes> started_us=6 finished_us=80 text_stops=[1]" in text
    assert "behaviour flags: none" in text
    assert "--from 0 --until 4" in text
    seen = []
    with pytest.raises(Divergence):  # noqa: PT012  the steps before must come first
        for event, _ in fold(tmp_path, lambda _: Changed()):
            seen.append(event)
    assert seen == EVENTS[:3]
    assert len(list(fold(tmp_path, lambda _: Changed(), strict=False))) == len(EVENTS)


def test_engine_that_raises_where_the_journal_has_a_digest_diverges(tmp_path: Path) -> None:
    class Broken(ChainEngine):
        def step(self, event: ObservedEvent, /) -> Step:
            raise ContractError("that was never launched")

    write(tmp_path, EVENTS)
    with pytest.raises(Divergence, match=r"step 0 .* raised ContractError: that was never launched") as raised:
        replay(tmp_path, lambda _: Broken())
    assert raised.value.got_digest is None


def test_torn_tail_is_replayed_up_to_its_last_whole_record(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    path = tmp_path / "journal/00000000.log"
    path.write_bytes(path.read_bytes()[:-80])  # the end record and some of the one before
    done = replay(tmp_path, make_engine)
    assert done.tail is not None
    assert (done.steps, done.tail.verdict) == (len(EVENTS) - 1, "torn")


def test_event_line_counts_prompts_instead_of_showing_them() -> None:
    event = RequestArrived(
        time_us=1, request_id=2, prompt=TokenIds(bytes(4000)), max_new_tokens=9, stop_texts=("s" * 80,)
    )
    assert event_line(GrammarReady(1, digest=b"\xab" * 32)) == "GrammarReady digest=abababab"
    assert event_line(event) == (
        "RequestArrived request_id=2 prompt=(TokenIds ids=<4000 bytes>) max_new_tokens=9 stop_texts=[<80 characters>]"
    )


# ----------------------------------------------------------------------------------------------------------- snapshots


def write_with_snapshot(folder: Path, at: int) -> None:
    engine = ChainEngine()
    with JournalWriter.create(folder, HEADER) as writer:
        for step, event in enumerate(EVENTS):
            if step == at:
                writer.snapshot(engine.state, engine.state)
            writer.append(event, engine.step(event).digest)


def restore(_: JournalHeader, state: bytes) -> ChainEngine:
    return ChainEngine(state)


def test_replay_from_a_snapshot_steps_only_later_events(tmp_path: Path) -> None:
    write_with_snapshot(tmp_path, at=4)
    records = [record for record in read_journal(tmp_path).records() if isinstance(record, SnapshotRecord)]
    assert [record.snapshot.steps for record in records] == [4]
    done = replay(tmp_path, make_engine, restore=restore)
    assert (done.events, done.steps, done.snapshot) == (len(EVENTS), len(EVENTS) - 4, records[0].snapshot)
    assert done.digest == replay(tmp_path, make_engine).digest
    assert replay(tmp_path, make_engine, restore=restore, until=3).snapshot is None


@pytest.mark.parametrize("durability", ["none", "group"])
def test_snapshot_that_cannot_be_written_stops_the_journal(tmp_path: Path, durability: str) -> None:
    FullDisk.room_bytes = 1 << 20
    writer = FullDisk.create(tmp_path, HEADER, durability=durability)  # type: ignore[arg-type]
    engine = ChainEngine()
    writer.append(EVENTS[0], engine.step(EVENTS[0]).digest)
    writer.flush()
    FullDisk.room_bytes = 3
    with pytest.raises(JournalError, match=r"cannot write .*snapshot"):
        writer.snapshot(b"state", bytes(16))
    _assert_stopped(writer)
    _assert_prefix_of_events(tmp_path)


def test_snapshot_name_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    JournalWriter.create(tmp_path, HEADER).close()
    data = b"not yours"
    (tmp_path / "secret").write_bytes(data)
    digest = blake2b(data, digest_size=16).digest()
    outside = Snapshot(file="../secret", steps=0, bytes_digest=digest, state_digest=digest)
    assert read_journal(tmp_path).load_snapshot(outside) is None
