"""The journal on disk: append-only segments of checksummed, chained records. docs/journal.md has the format in bytes.

    run/journal/00000000.log        segments in order; each begins with a header record
    run/journal/snapshot-...        what snapshot records refer to, trusted only if its digest matches

The first segments may have expired; then the first that is left begins with a snapshot, from which it can be replayed.

One record. The header has its own checksum, so that a damaged length is never believed; the chain makes a lost, doubled
or moved record visible; the last checksum covers header and payload.

    # 0     3      4        8          16               32           36         36 + length   40 + length
    # | magic | kind | length | sequence | chain of the | CRC-32 of  | payload  | CRC-32 of   |
    # |       |      |        |          | record before| [0:32)     |          | all but CRCs|

What a crash leaves is a *torn tail*: one bad stretch at the end of the last segment with no valid record behind it.
It is cut off, and nothing is lost that was ever promised. Anything else that does not fit is *corruption*: it is
reported with its place and never repaired. A payload is handed out only after every check on it has passed.

The writer fails stop. After a failed write or fsync nothing is retried, because the kernel may have dropped the pages
it could not write: every later call raises, and what is on disk stays a valid journal up to its last whole record.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import re
import struct
import threading
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar
from zlib import crc32

import msgspec

from lockstep.core.contract.config import BEHAVIOUR_FLAGS, SchedConfig
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import ObservedEvent

FORMAT_VERSION = 1
MAGIC = b"\xf5LJ"  # 0xf5 occurs nowhere in UTF-8, so no text in a payload looks like a record
SEGMENT_BYTES = 64 << 20
PAYLOAD_BYTES_MAX = 64 << 20  # longer lengths are not believed, whatever their checksum says
HEAD_LOOK_BYTES = 256 << 10  # a header and what follows it are much shorter
BUFFER_BYTES = 256 << 10  # the writer hands this much to the kernel at a time, unless asked earlier
DIGEST_BYTES = 16
NO_CHAIN = bytes(DIGEST_BYTES)  # the chain value before the first record
INTERVAL_MS = 50  # between two fsyncs with durability "interval"

_HEAD = struct.Struct("<3sBIQ16s")  # magic, kind, payload length, sequence, chain value of the record before
_CRC = struct.Struct("<I")
_fresh_chain = blake2b(digest_size=DIGEST_BYTES).copy  # a copy costs a third of the constructor
_HEADER = struct.Struct("<3sBIQ16sI")  # head and its CRC-32
HEADER_BYTES = _HEADER.size
RECORD_BYTES_MIN = HEADER_BYTES + _CRC.size

KIND_HEADER, KIND_EVENT, KIND_UNSEALED, KIND_SNAPSHOT, KIND_END = 1, 2, 3, 4, 5
KIND_NAMES = {
    KIND_HEADER: "header",
    KIND_EVENT: "event",
    KIND_UNSEALED: "unsealed",
    KIND_SNAPSHOT: "snapshot",
    KIND_END: "end",
}

Folder = Path | str
"""A run folder, or the `journal` folder in it."""

Durability = Literal["none", "interval", "group", "every"]
"""When records reach the disk. In every mode `flush` returns after write(), which survives the death of the process.

none      when the kernel likes
interval  a thread calls fsync at most every INTERVAL_MS
group     a thread calls fsync after each flush; flushes that come meanwhile share the next one
every     `append` itself returns after fsync
"""

CorruptReason = Literal[
    "header short",
    "header checksum",
    "length",
    "payload short",
    "payload checksum",
    "duplicate",
    "gap",
    "chain",
    "missing segment",
    "segment name",
    "segment header",
    "after end",
]


class JournalError(LockstepError):
    """The journal cannot be written or read. The message says which file, what was expected and what came."""


class JournalCorrupt(JournalError):
    """The journal was damaged after it was written; a torn tail is not that. Never repaired."""

    def __init__(self, segment: str, offset: int, reason: CorruptReason, detail: str) -> None:
        super().__init__(f"{segment} is corrupt at offset {offset}: {reason}: {detail}")
        self.segment = segment
        self.offset = offset
        self.reason = reason


# ------------------------------------------------------------------------------------------------------------- records


def _core_version() -> str:
    try:
        return importlib.metadata.version("lockstep-core")
    except importlib.metadata.PackageNotFoundError:
        return "source"


CORE_VERSION = _core_version()


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replay must know before the first event. The first record of every segment repeats it."""

    config: SchedConfig  # every field, defaults included
    seed: int = 0
    model_digest: str = ""
    tokenizer_digest: str = ""
    host: dict[str, str | int | float] = {}  # which host, cost model, workload: enough for a person; no secrets
    core_version: str = CORE_VERSION
    behaviour_flags: tuple[str, ...] = BEHAVIOUR_FLAGS
    format_version: int = FORMAT_VERSION
    segment: int = 0  # filled in by the writer, as are the next two
    first_sequence: int = 0  # of this very record
    previous_chain: bytes = NO_CHAIN
    first_step: int = 0  # events before this segment
    content: Literal["full", "digests"] = "full"  # whether prompts, outputs and the like were kept, or only lengths


class _OnlyVersion(msgspec.Struct):
    """What is read of a header before anything else is believed."""

    format_version: int


class Record(msgspec.Struct, frozen=True, gc=False):
    """Where a record lies. `sequence` counts records of every kind, from 0, across segments."""

    sequence: int
    segment: int
    offset: int


class HeaderRecord(Record, frozen=True, gc=False):
    """A segment begins."""

    header: JournalHeader


class EventRecord(Record, frozen=True, gc=False):
    """One observed event and the digest of the Step it produced. `step` counts event records, from 0."""

    step: int
    event: ObservedEvent
    digest: bytes


class UnsealedRecord(Record, frozen=True, gc=False):
    """An event whose step raised. It is kept for the post-mortem and has no digest."""

    event: ObservedEvent


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file beside the segments that holds the engine's state after the first `steps` events."""

    file: str
    steps: int
    bytes_digest: bytes  # BLAKE2b-128 of the file
    state_digest: bytes  # of the engine's state, as the host computed it


class SnapshotRecord(Record, frozen=True, gc=False):
    """A snapshot was taken here."""

    snapshot: Snapshot


class JournalEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The writer closed the journal."""

    reason: str


class EndRecord(Record, frozen=True, gc=False):
    """The last record of a segment whose writer closed cleanly."""

    reason: str


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """How a journal ends. "torn": [offset:file_bytes) of the last segment is the remains of a record that was lost."""

    verdict: Literal["clean", "torn"]
    closed: bool  # an end record is the last one; without it the writer died or is still writing
    segment: str
    offset: int  # where the last whole record ends
    file_bytes: int
    reason: str  # why the tail is torn; empty if it is not
    records: int
    steps: int
    chain: bytes  # of the last whole record

    @property
    def torn_bytes(self) -> int:
        """Bytes behind the last whole record."""
        return self.file_bytes - self.offset


class _Frame(msgspec.Struct, frozen=True, gc=False):
    """A record that passed every check of framing and chain; its payload is not decoded yet."""

    kind: int
    sequence: int
    segment: int
    offset: int
    payload: memoryview


# ------------------------------------------------------------------------------------------------------------- writing


class JournalWriter:
    """Appends to one journal. One thread appends; with "interval" and "group" a second one only calls fsync.

        # appended ........ written ........ durable
        # | in the buffer   | write() returned | fsync returned        records; durable <= written <= appended

    A torn tail is legal only in the last segment, so a rotation syncs the old segment before it creates the next: the
    one moment (every SEGMENT_BYTES) at which a caller may wait for a disk in these modes.
    """

    # Tests put a failing disk here.
    _os_write = staticmethod(os.write)
    _os_fsync = staticmethod(os.fsync)

    def __init__(
        self,
        folder: Path,
        header: JournalHeader,
        *,
        durability: Durability,
        segment_bytes: int,
        segment: int = 0,
        sequence: int = 0,
        steps: int = 0,
        chain: bytes = NO_CHAIN,
    ) -> None:
        """Use `create`, `resume` or `go_on`."""
        self.folder = folder
        self.header = header
        self.durability: Durability = durability
        self._segment_bytes = segment_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._segment = segment
        self._sequence = sequence  # of the next record
        self._not_events = sequence - steps
        self._chain = chain
        self._buffer = bytearray()
        self._spill_bytes = 0  # the buffer is written when it reaches this
        self._file = -1
        self._file_bytes = 0
        self._segment_began = 0  # the first sequence behind its header
        self._written = sequence
        self._durable = sequence
        self._failure = ""  # why every call raises
        self._closed = False
        self._file_lock = threading.Lock()  # held while the segment is synced or replaced
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._folder_file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(self._folder_file, folder)
            self._open_segment()
        except BaseException:
            self._release()
            raise
        if durability in ("interval", "group"):
            self._thread = threading.Thread(target=self._sync_behind, name="journal-fsync", daemon=True)
            self._thread.start()

    @classmethod
    def create(
        cls,
        folder: Folder,
        header: JournalHeader,
        *,
        durability: Durability = "none",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> JournalWriter:
        """Start a journal in the run folder `folder`, which is made if missing.

        Raises: JournalError if the run already has a journal, or if the first segment cannot be written.
        """
        journal_folder = Path(folder) / "journal"
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            journal_folder.mkdir(mode=0o700, exist_ok=True)
            if any(journal_folder.glob("*.log")):
                raise JournalError(f"{journal_folder} already holds a journal\nhint: choose another run folder")
            if durability != "none":
                _sync_folder(Path(folder))
        except OSError as error:
            raise JournalError(f"cannot make {journal_folder}: {error}") from error
        return cls(journal_folder, header, durability=durability, segment_bytes=segment_bytes)

    @classmethod
    def resume(
        cls, folder: Folder, *, durability: Durability = "none", segment_bytes: int = SEGMENT_BYTES
    ) -> JournalWriter:
        """Go on with an existing journal, in a new segment behind its last whole record; a torn tail is cut off.

        The header stays what it was, except for the version of the core that writes from here on.
        """
        return cls.go_on(read_journal(folder, repair=True), durability=durability, segment_bytes=segment_bytes)

    @classmethod
    def go_on(
        cls, journal: Journal, *, durability: Durability = "none", segment_bytes: int = SEGMENT_BYTES
    ) -> JournalWriter:
        """As `resume`, with a journal that was read, and repaired, already."""
        tail = journal.tail
        if tail.verdict == "torn":
            raise JournalError(f"{journal.folder} has a torn tail, which must be cut off first")
        return cls(
            journal.folder,
            msgspec.structs.replace(journal.header, core_version=CORE_VERSION),
            durability=durability,
            segment_bytes=segment_bytes,
            segment=journal.first_segment + len(journal.segments),
            sequence=tail.records,
            steps=tail.steps,
            chain=tail.chain,
        )

    @property
    def records(self) -> int:
        """Records appended so far, of every kind, headers included."""
        return self._sequence

    @property
    def steps(self) -> int:
        """Events appended with a digest so far."""
        return self._sequence - self._not_events

    @property
    def records_written(self) -> int:
        """Records whose write() returned: they survive the death of this process."""
        return self._written

    @property
    def records_durable(self) -> int:
        """Records whose fsync returned: they survive the loss of power."""
        return self._durable

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Write one event and the 16-byte digest of its Step. It leaves the process with the next `flush`."""
        if self._failure:
            raise JournalError(self._failure)
        if len(digest) != DIGEST_BYTES:
            raise JournalError(f"a Step's digest has {DIGEST_BYTES} bytes, got {len(digest)}")
        self._put(KIND_EVENT, digest + self._encode(event))

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Write an event whose step raised, so that the post-mortem has it, and flush."""
        self._check()
        self._put(KIND_UNSEALED, self._encode(event))
        self._not_events += 1
        self.flush()

    def flush(self) -> None:
        """Hand all appended records to the kernel. Durability "group" also asks for an fsync, without waiting."""
        self._check()
        if self._buffer:
            self._write_buffer()

    def sync(self) -> None:
        """Return once every appended record is on disk, whatever the durability."""
        self.flush()
        self._sync()

    def snapshot(self, data: bytes, state_digest: bytes) -> Snapshot:
        """Store the engine's state after the last appended event, and refer to it. Durable as the journal is."""
        self._check()
        snapshot = Snapshot(
            file=snapshot_name(self._sequence),
            steps=self.steps,
            bytes_digest=blake2b(data, digest_size=DIGEST_BYTES).digest(),
            state_digest=state_digest,
        )
        path = self.folder / snapshot.file
        unfinished = path.with_suffix(".tmp")
        try:
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                self._write_all(file, data)
                if self.durability != "none":
                    self._os_fsync(file)
            finally:
                os.close(file)
            unfinished.rename(path)
            if self.durability != "none":
                self._os_fsync(self._folder_file)
        except OSError as error:
            self._fail(f"cannot write {path}", error)
        self._put(KIND_SNAPSHOT, self._encode(snapshot))
        self._not_events += 1
        self.flush()
        return snapshot

    @property
    def segment(self) -> int:
        """Number of the segment that is written now."""
        return self._segment

    @property
    def segment_bytes(self) -> int:
        """How much of it has been written."""
        return self._file_bytes

    def begin_segment(self, data: bytes, state_digest: bytes) -> Snapshot:
        """Store a snapshot at the beginning of a segment of its own, so that those before it may expire."""
        self.flush()
        if self._sequence != self._segment_began:
            self._rotate()
        return self.snapshot(data, state_digest)

    def drop_before(self, segment: int, snapshots: set[str]) -> None:
        """Delete the segments below this one, which must begin with a snapshot, and all snapshots but these.

        The oldest goes first, so that what is left is a journal at every moment.
        """
        self._check()
        try:
            for path in sorted(self.folder.glob("*.log")):
                if int(path.stem) < min(segment, self._segment):
                    path.unlink()
            for path in self.folder.glob("snapshot-*"):
                if path.name not in snapshots:
                    path.unlink()
        except OSError as error:
            self._fail(f"cannot delete what has expired in {self.folder}", error)

    def close(self, reason: str = "closed") -> None:
        """Write the end record and let go of the files. Closing a closed journal does nothing."""
        if self._closed:
            return
        try:
            self._check()
            self._put(KIND_END, self._encode(JournalEnd(reason=reason)))
            self._not_events += 1
            self.flush()
            if self.durability != "none":
                self._sync()
        finally:
            self._closed = True
            self._failure = self._failure or f"{self.folder} is closed"
            self._release()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and self._failure:
            self._closed = True
            self._release()
        else:
            self.close("closed" if error is None else f"failed: {type(error).__name__}")

    def _check(self) -> None:
        if self._failure:
            raise JournalError(self._failure)

    def _put(self, kind: int, payload: bytes) -> None:
        # The hot path. The header's CRC seeds the last one: that equals a CRC over [0:32) and payload. A CRC over
        # data that includes the data's own CRC would be a constant, and cover nothing.
        length = len(payload)
        if length > PAYLOAD_BYTES_MAX:
            raise JournalError(f"a record's payload has at most {PAYLOAD_BYTES_MAX} bytes, got {length}")
        head = _HEAD.pack(MAGIC, kind, length, self._sequence, self._chain)
        head_crc = crc32(head)
        record = head + _CRC.pack(head_crc) + payload
        chain = _fresh_chain()
        chain.update(record)
        self._chain = chain.digest()
        self._sequence += 1
        buffer = self._buffer
        buffer += record
        buffer += _CRC.pack(crc32(payload, head_crc))
        if len(buffer) >= self._spill_bytes:
            self._spill()

    def _spill(self) -> None:
        self._write_buffer()
        if self._file_bytes >= self._segment_bytes:
            self._rotate()
        if self.durability == "every":
            self._sync()

    def _write_buffer(self) -> None:
        try:
            self._write_all(self._file, self._buffer)
        except OSError as error:
            self._fail(f"cannot write {self._path()}", error)
        self._file_bytes += len(self._buffer)
        self._buffer.clear()
        self._written = self._sequence
        self._spill_bytes = self._spill_at()
        if self._thread is not None:
            self._wake.set()

    def _write_all(self, file: int, data: bytes | bytearray) -> None:
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                wrote = self._os_write(file, view[done:])
                if wrote <= 0:
                    raise OSError(f"write() took {wrote} of {len(view) - done} bytes")
                done += wrote

    def _spill_at(self) -> int:
        if self.durability == "every":
            return 1
        return min(BUFFER_BYTES, max(1, self._segment_bytes - self._file_bytes))

    def _path(self) -> Path:
        return self.folder / segment_name(self._segment)

    def _open_segment(self) -> None:
        header = msgspec.structs.replace(
            self.header,
            segment=self._segment,
            first_sequence=self._sequence,
            previous_chain=self._chain,
            first_step=self.steps,
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            self._file = os.open(self._path(), flags, 0o600)
        except OSError as error:
            self._fail(f"cannot create {self._path()}", error)
        self._file_bytes = 0
        self._spill_bytes = BUFFER_BYTES + PAYLOAD_BYTES_MAX  # the header is written below, not by a spill
        self._put(KIND_HEADER, self._encode(header))
        self._not_events += 1
        self._segment_began = self._sequence
        self._write_buffer()
        if self.durability != "none":
            try:
                self._os_fsync(self._file)
                self._os_fsync(self._folder_file)
            except OSError as error:
                self._fail(f"cannot sync {self._path()}", error)
            self._durable = self._written

    def _rotate(self) -> None:
        if self.durability != "none":
            self._sync()
        with self._file_lock:
            os.close(self._file)
            self._file = -1
            self._segment += 1
            self._open_segment()

    def _sync(self) -> None:
        with self._file_lock:
            written = self._written
            if written == self._durable:
                return
            if self._failure:  # the other thread's fsync failed while this one waited
                raise JournalError(self._failure)
            try:
                self._os_fsync(self._file)
            except OSError as error:
                self._fail(f"cannot sync {self._path()}", error)
            self._durable = written

    def _sync_behind(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._sync()
            except JournalError:
                return  # the appending thread raises at its next call
            if self.durability == "interval":
                self._stop.wait(INTERVAL_MS / 1000)

    def _fail(self, what: str, error: OSError) -> None:
        self._failure = f"{what}: {error}; the journal stopped at its last whole record"
        raise JournalError(self._failure) from error

    def _release(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._wake.set()
            self._thread.join()
            self._thread = None
        for file in (self._file, self._folder_file):
            if file >= 0:
                os.close(file)
        self._file = self._folder_file = -1


def segment_name(segment: int) -> str:
    """The file name of segment number `segment`."""
    return f"{segment:08d}.log"


def snapshot_name(sequence: int) -> str:
    """The file name of the snapshot that record `sequence` refers to."""
    return f"snapshot-{sequence:012d}"


def first_sequence(head: bytes) -> int:
    """The number of the record that begins with these HEADER_BYTES bytes. 0 if they are no head of one."""
    if len(head) < HEADER_BYTES:
        return 0
    sequence: int = _HEADER.unpack(head)[3]
    return sequence


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _lock(folder_file: int, folder: Path) -> None:
    """Let one process at a time change a journal. The lock goes with the descriptor, so a dead writer holds none."""
    try:
        fcntl.flock(folder_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalError(f"{folder} is being written by another process") from error


# ------------------------------------------------------------------------------------------------------------- reading

_Payload = TypeVar("_Payload")
_SEGMENT_NAME = re.compile(r"\d{8}\.log")
_SNAPSHOT_NAME = re.compile(r"snapshot-\d{12,}")
_decode_event = msgspec.msgpack.Decoder(ObservedEvent).decode


def read_journal(folder: Folder, *, repair: bool = False, first_segment: int = 0) -> Journal:
    """Open a journal, given the run folder or its `journal` folder; with `first_segment` only from that one on.

    With `repair`, a torn tail is cut off before this returns; corruption raises and is left as it is.
    Raises: JournalError if there is no journal or its version is unknown; JournalCorrupt.
    """
    journal = Journal(find_journal(Path(folder)), first_segment)
    if repair and journal.tail.verdict == "torn":
        _cut_tail(journal)
        journal = Journal(journal.folder, journal.first_segment)
    return journal


def find_journal(folder: Path) -> Path:
    """The folder of segments of a run, given either of the two."""
    if not folder.exists():
        raise JournalError(f"{folder} does not exist")
    if not folder.is_dir():
        raise JournalError(f"{folder} is a file, expected a run folder or its journal folder")
    for candidate in (folder / "journal", folder):
        if candidate.is_dir() and any(candidate.glob("*.log")):
            return candidate
    raise JournalError(f"{folder} holds no journal: expected journal/{segment_name(0)} in it")


class Journal:
    """A journal open for reading. Nothing is kept in memory but the segment being read."""

    def __init__(self, folder: Path, first_segment: int = 0) -> None:
        """Read the list of segments and the first header. Segments before `first_segment` are not looked at."""
        self.folder = folder
        self.segments = _list_segments(folder, first_segment)
        self.first_segment = int(self.segments[0].stem)  # of those that are left
        self._tail: Tail | None = None
        self._start = _start_of(self.segments[0]) if self.first_segment else _START
        first = next(_Scan(self.segments, self._start).frames(), None)
        if first is None:
            raise JournalError(
                f"{self.segments[0]} does not begin with a whole header record of format version {FORMAT_VERSION}; "
                "nothing in it can be read"
            )
        self.header = _decode_header(first, self.segments[0])
        expired = self.first_segment and not first_segment
        if expired and self.header.content == "full" and opening_snapshot(self.segments[0]) is None:
            missing = folder / segment_name(self.first_segment - 1)
            raise JournalCorrupt(
                str(missing),
                0,
                "missing segment",
                f"{self.segments[0].name} follows, and does not begin with a snapshot",
            )

    @property
    def first_step(self) -> int:
        """Events before the first segment that is left: 0 where none has expired."""
        return self._start.steps

    @property
    def tail(self) -> Tail:
        """How the journal ends. Reads all of it once, framing and chain only; raises JournalCorrupt."""
        if self._tail is None:
            scan = _Scan(self.segments, self._start)
            for frame in scan.frames():
                if frame.kind == KIND_HEADER:
                    self._check_segment(frame)
            self._tail = scan.tail()
        return self._tail

    def records(self) -> Iterator[Record]:
        """Every record in order, each checked before it is handed out; stops at a torn tail.

        Raises: JournalCorrupt when it comes to the damage; JournalError at a record this version cannot read.
        """
        scan = _Scan(self.segments, self._start)
        step = self.first_step
        for frame in scan.frames():
            sequence, offset, payload = frame.sequence, frame.offset, frame.payload
            segment = self.first_segment + frame.segment
            if frame.kind == KIND_EVENT:
                digest = bytes(payload[:DIGEST_BYTES])
                try:
                    event = _decode_event(payload[DIGEST_BYTES:])
                except msgspec.DecodeError as error:
                    raise self._unreadable(frame, error) from error
                yield EventRecord(sequence, segment, offset, step, event, digest)
                step += 1
            else:
                yield self._rare_record(frame)
        self._tail = scan.tail()

    def events(self) -> Iterator[EventRecord]:
        """The event records alone."""
        return (record for record in self.records() if isinstance(record, EventRecord))

    def load_snapshot(self, snapshot: Snapshot) -> bytes | None:
        """The bytes of a snapshot, or None if they are missing or not those that were stored: then replay from 0."""
        if not _SNAPSHOT_NAME.fullmatch(snapshot.file):
            return None
        try:
            data = (self.folder / snapshot.file).read_bytes()
        except OSError:
            return None
        return data if blake2b(data, digest_size=DIGEST_BYTES).digest() == snapshot.bytes_digest else None

    def _rare_record(self, frame: _Frame) -> Record:
        place = (frame.sequence, self.first_segment + frame.segment, frame.offset)
        if frame.kind == KIND_HEADER:
            return HeaderRecord(*place, self._check_segment(frame))
        if frame.kind == KIND_UNSEALED:
            return UnsealedRecord(*place, self._decode(frame, ObservedEvent))
        if frame.kind == KIND_SNAPSHOT:
            return SnapshotRecord(*place, self._decode(frame, Snapshot))
        if frame.kind == KIND_END:
            return EndRecord(*place, self._decode(frame, JournalEnd).reason)
        raise self._unreadable(frame, f"unknown kind {frame.kind}")

    def _decode(self, frame: _Frame, kind: Any) -> Any:
        try:
            return msgspec.msgpack.decode(frame.payload, type=kind)
        except msgspec.DecodeError as error:
            raise self._unreadable(frame, error) from error

    def _unreadable(self, frame: _Frame, why: object) -> JournalError:
        return JournalError(
            f"{self.segments[frame.segment]}: the record at offset {frame.offset} is whole but not one this core knows "
            f"({why})\nwritten by core {self.header.core_version}, read by core {CORE_VERSION}"
        )

    def _check_segment(self, frame: _Frame) -> JournalHeader:
        """The header of a segment, which must be the one its place and the first header call for."""
        path = self.segments[frame.segment]
        header = _decode_header(frame, path)
        same_run = all(
            getattr(header, field) == getattr(self.header, field)
            for field in ("config", "behaviour_flags", "seed", "model_digest", "tokenizer_digest")
        )
        number = self.first_segment + frame.segment
        if frame.offset or header.segment != number or header.first_sequence != frame.sequence or not same_run:
            raise JournalCorrupt(
                str(path), frame.offset, "segment header", f"it is that of segment {header.segment} or of another run"
            )
        return header


def _list_segments(folder: Path, first_segment: int) -> list[Path]:
    names = sorted(path.name for path in folder.glob("*.log"))
    for name in names:
        if not _SEGMENT_NAME.fullmatch(name):
            raise JournalCorrupt(str(folder / name), 0, "segment name", f"expected one like {segment_name(0)}")
    names = [name for name in names if name >= segment_name(first_segment)]
    if not names:
        raise JournalError(f"{folder} has no segment {first_segment}")
    for segment, name in enumerate(names, int(names[0].removesuffix(".log"))):
        if name != segment_name(segment):
            raise JournalCorrupt(str(folder / segment_name(segment)), 0, "missing segment", f"the next one is {name}")
    return [folder / name for name in names]


class _Start(msgspec.Struct, frozen=True):
    """What stands before the first segment that is read."""

    sequence: int
    chain: bytes
    steps: int


_START = _Start(0, NO_CHAIN, 0)


def _start_of(path: Path) -> _Start:
    """Where a journal whose first segments have expired goes on, as its first segment's header says."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error}") from error
    if find_record(data[: HEADER_BYTES + PAYLOAD_BYTES_MAX + _CRC.size], 0) != 0:
        return _START  # no whole header: the caller says so
    _, _, length, sequence, chain, _ = _HEADER.unpack_from(data, 0)
    payload = memoryview(data)[HEADER_BYTES : HEADER_BYTES + length]
    return _Start(sequence, chain, _decode_header(_Frame(data[3], sequence, 0, 0, payload), path).first_step)


def _decode_header(frame: _Frame, path: Path) -> JournalHeader:
    """Decode a header record, its version first: a header of another version may have any other fields."""
    if frame.kind != KIND_HEADER:
        raise JournalError(
            f"{path} begins with a record of kind {KIND_NAMES.get(frame.kind, frame.kind)}, which names no version; "
            f"expected a header record of format version {FORMAT_VERSION}"
        )
    try:
        version = msgspec.msgpack.decode(frame.payload, type=_OnlyVersion).format_version
        if version != FORMAT_VERSION:
            raise JournalError(f"{path} has format version {version}, this core reads format version {FORMAT_VERSION}")
        return msgspec.msgpack.decode(frame.payload, type=JournalHeader)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"{path}: the header is whole but not one this core knows ({error})\n"
            f"hint: the journal is probably of a later version than this core, {CORE_VERSION}"
        ) from error


def opening_snapshot(path: Path) -> str | None:
    """The name of the snapshot file that a segment begins with; None where it begins with none that is whole."""
    try:
        with path.open("rb") as file:
            data = file.read(HEAD_LOOK_BYTES)
    except OSError:
        return None
    if find_record(data, 0) != 0:
        return None
    second = RECORD_BYTES_MIN + _HEADER.unpack_from(data, 0)[2]
    if data[second : second + 4] != MAGIC + bytes((KIND_SNAPSHOT,)) or find_record(data, second) != second:
        return None
    length = _HEADER.unpack_from(data, second)[2]
    payload = data[second + HEADER_BYTES : second + HEADER_BYTES + length]
    try:
        return msgspec.msgpack.decode(payload, type=Snapshot).file
    except msgspec.DecodeError:
        return None


class _Scan:
    """One pass over framing and chain: the recovery table of docs/journal.md, in its order."""

    def __init__(self, segments: list[Path], start: _Start = _START) -> None:
        self.segments = segments
        self.sequence = start.sequence  # expected next
        self.chain = start.chain
        self.steps = start.steps
        self.offset = 0  # where the last whole record of the last segment ends
        self.file_bytes = 0
        self.ended = False  # the last record of this segment was an end record
        self.torn = ""  # why the tail is torn

    def frames(self) -> Iterator[_Frame]:
        """Every record that passes, in order. Raises JournalCorrupt; ends at a torn tail."""
        for segment in range(len(self.segments)):
            yield from self._segment_frames(segment)

    def tail(self) -> Tail:
        """How the journal ends; call it when `frames` is used up."""
        return Tail(
            verdict="torn" if self.torn else "clean",
            closed=self.ended and not self.torn,
            segment=self.segments[-1].name,
            offset=self.offset,
            file_bytes=self.file_bytes,
            reason=self.torn,
            records=self.sequence,
            steps=self.steps,
            chain=self.chain,
        )

    def _segment_frames(self, segment: int) -> Iterator[_Frame]:
        data = self._read(segment)
        view = memoryview(data)
        size = len(data)
        head_bytes, crc_bytes = _HEAD.size, _CRC.size
        unpack_header, unpack_crc = _HEADER.unpack_from, _CRC.unpack_from
        offset, sequence, chain = 0, self.sequence, self.chain
        self.offset, self.file_bytes, self.ended = 0, size, False
        if not size:
            self._bad(segment, data, 0, "header short")
        while offset < size:
            start = offset + HEADER_BYTES
            if start > size:
                return self._bad(segment, data, offset, "header short")
            magic, kind, length, found_sequence, found_chain, head_crc = unpack_header(data, offset)
            if magic != MAGIC or crc32(view[offset : offset + head_bytes]) != head_crc:
                return self._bad(segment, data, offset, "header checksum")
            if length > PAYLOAD_BYTES_MAX:
                return self._bad(segment, data, offset, "length")
            stop = start + length
            if stop + crc_bytes > size:
                return self._bad(segment, data, offset, "payload short")
            if crc32(view[start:stop], head_crc) != unpack_crc(data, stop)[0]:
                return self._bad(segment, data, offset, "payload checksum")
            if found_sequence != sequence or found_chain != chain or self.ended:
                self._misplaced(segment, offset, found_sequence, found_chain)
            if not offset and segment and kind != KIND_HEADER:
                raise JournalCorrupt(str(self.segments[segment]), 0, "segment header", "the first record is not one")
            chain = self.chain = blake2b(view[offset:stop], digest_size=DIGEST_BYTES).digest()
            frame = _Frame(kind, sequence, segment, offset, view[start:stop])
            sequence += 1
            offset = stop + crc_bytes
            self.sequence, self.offset = sequence, offset
            if kind == KIND_EVENT:
                self.steps += 1
            elif kind == KIND_END:
                self.ended = True
            yield frame
        return None

    def _read(self, segment: int) -> bytes:
        try:
            return self.segments[segment].read_bytes()
        except OSError as error:
            raise JournalError(f"cannot read {self.segments[segment]}: {error}") from error

    def _bad(self, segment: int, data: bytes, offset: int, reason: CorruptReason) -> None:
        """Tell a torn tail from corruption: nothing valid may come later, here or in a later segment."""
        name = str(self.segments[segment])
        later = find_record(data, offset + 1)
        if later is not None:
            raise JournalCorrupt(name, offset, reason, f"and a valid record follows at offset {later}")
        if segment + 1 < len(self.segments):
            raise JournalCorrupt(name, offset, reason, f"and {self.segments[segment + 1].name} follows")
        self.torn = reason

    def _misplaced(self, segment: int, offset: int, found_sequence: int, found_chain: bytes) -> None:
        name = str(self.segments[segment])
        if found_sequence < self.sequence:
            raise JournalCorrupt(name, offset, "duplicate", f"expected record {self.sequence}, found {found_sequence}")
        if found_sequence > self.sequence:
            raise JournalCorrupt(name, offset, "gap", f"expected record {self.sequence}, found {found_sequence}")
        if found_chain != self.chain:
            raise JournalCorrupt(
                name, offset, "chain", f"record {self.sequence} does not follow the record before it in the file"
            )
        raise JournalCorrupt(name, offset, "after end", f"record {self.sequence} follows the end record")


def find_record(data: bytes, offset: int) -> int | None:
    """The first offset at or after `offset`, at any byte, where a record with both checksums right begins."""
    view = memoryview(data)
    last = len(data) - RECORD_BYTES_MIN
    offset = data.find(MAGIC, offset)
    while 0 <= offset <= last:
        _, _, length, _, _, head_crc = _HEADER.unpack_from(data, offset)
        start = offset + HEADER_BYTES
        stop = start + length
        if (
            length <= PAYLOAD_BYTES_MAX
            and stop + _CRC.size <= len(data)
            and crc32(view[offset : offset + _HEAD.size]) == head_crc
            and crc32(view[start:stop], head_crc) == _CRC.unpack_from(data, stop)[0]
        ):
            return offset
        offset = data.find(MAGIC, offset + 1)
    return None


def _cut_tail(journal: Journal) -> None:
    """Cut the last segment after its last whole record; a segment without even a header goes altogether."""
    path = journal.segments[-1]
    folder_file = os.open(journal.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(folder_file, journal.folder)
        tail = Journal(journal.folder, journal.first_segment).tail  # again, now that nobody else writes
        if tail.verdict == "torn":
            if tail.offset:
                file = os.open(path, os.O_WRONLY)
                try:
                    os.ftruncate(file, tail.offset)
                    os.fsync(file)
                finally:
                    os.close(file)
            else:
                path.unlink()
            os.fsync(folder_file)
    except OSError as error:
        raise JournalError(f"cannot repair {path}: {error}") from error
    finally:
        os.close(folder_file)
