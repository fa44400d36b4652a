"""Writing a journal: one `JournalWriter` appends records, rotates segments and syncs them to disk.

The writer is fail-stop. A failed write or fsync is never retried, because the kernel may have dropped the pages that it
could not write. Every later call raises, and the files on disk stay a valid journal up to the last whole record.
"""

from __future__ import annotations

import os
import threading
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from zlib import crc32

import msgspec

from lockstep.core.contract.events import ObservedEvent
from lockstep.core.journal.reader import Journal, read_journal
from lockstep.core.journal.records import (
    CORE_VERSION,
    CRC,
    DIGEST_BYTES,
    HEAD,
    KIND_END,
    KIND_EVENT,
    KIND_HEADER,
    KIND_SNAPSHOT,
    KIND_UNSEALED,
    MAGIC,
    NO_CHAIN,
    PAYLOAD_BYTES_MAX,
    Durability,
    Folder,
    JournalEnd,
    JournalError,
    JournalHeader,
    Snapshot,
)
from lockstep.core.journal.segments import lock_folder, segment_name, snapshot_name, sync_folder

SEGMENT_BYTES = 64 << 20
BUFFER_BYTES = 256 << 10  # buffered bytes at which the writer calls write(), unless it is flushed earlier
INTERVAL_MS = 50  # time between two fsyncs with durability "interval"

_fresh_chain = blake2b(digest_size=DIGEST_BYTES).copy  # a copy costs a third of the constructor
_pack_head, _pack_crc = HEAD.pack, CRC.pack  # Python binds a method of an imported name anew at each call


Event = TypeVar("Event", bound=msgspec.Struct)


class RecordWriter(Generic[Event]):
    """Appends records to the segments of one folder: of an engine's journal (`JournalWriter`), or of a router's.

    One thread appends; with "interval" and "group" a second thread only calls fsync.

        # appended ........ written ........ durable
        # | in the buffer   | write() returned | fsync returned        records; durable <= written <= appended

    A torn tail is legal only in the last segment, so a rotation syncs the old segment before it creates the next one.
    In these modes a caller waits for the disk only then, once per SEGMENT_BYTES.
    """

    # Tests replace these to simulate a failing disk.
    _os_write = staticmethod(os.write)
    _os_fsync = staticmethod(os.fsync)

    def __init__(
        self,
        folder: Path,
        header: Any,
        *,
        durability: Durability,
        segment_bytes: int,
        segment: int = 0,
        sequence: int = 0,
        steps: int = 0,
        chain: bytes = NO_CHAIN,
    ) -> None:
        """Open a new segment.

        Args:
            header: a struct with `segment`, `first_sequence`, `previous_chain` and `first_step`, which are filled in.
            segment, sequence, steps, chain: the end of the existing journal that is continued.
        """
        self.folder = folder
        self.header: Any = header
        self.durability: Durability = durability
        self._segment_bytes = segment_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._segment = segment
        self._sequence = sequence  # sequence of the next record
        self._not_events = sequence - steps  # number of records that are no events
        self._chain = chain
        self._buffer = bytearray()
        self._spill_bytes = 0  # size at which the buffer is written
        self._file = -1
        self._file_bytes = 0
        self._segment_began = 0  # sequence of the first record behind the segment's header
        self._written = sequence
        self._durable = sequence
        self._failure = ""  # the reason with which every call raises; empty: no failure
        self._closed = False
        self._file_lock = threading.Lock()  # held while the segment is synced or replaced
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._folder_file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            lock_folder(self._folder_file, folder)
            self._open_segment()
        except BaseException:
            self._release()
            raise
        if durability in ("interval", "group"):
            self._thread = threading.Thread(target=self._sync_behind, name="journal-fsync", daemon=True)
            self._thread.start()

    @property
    def records(self) -> int:
        """Number of records appended so far, of every kind, headers included."""
        return self._sequence

    @property
    def steps(self) -> int:
        """Number of events appended with a digest so far."""
        return self._sequence - self._not_events

    @property
    def records_written(self) -> int:
        """Number of records whose write() returned: they survive the end of this process."""
        return self._written

    @property
    def records_durable(self) -> int:
        """Number of records whose fsync returned: they survive a loss of power."""
        return self._durable

    def append(self, event: Event, digest: bytes) -> None:
        """Append one event and the 16-byte digest of its Step. The next `flush` writes it at the latest."""
        if self._failure:
            raise JournalError(self._failure)
        if len(digest) != DIGEST_BYTES:
            raise JournalError(f"a Step's digest has {DIGEST_BYTES} bytes, got {len(digest)}")
        self._put(KIND_EVENT, digest + self._encode(event))

    def flush(self) -> None:
        """Write all appended records. Durability "group" also requests an fsync, without waiting for it."""
        self._check()
        if self._buffer:
            self._write_buffer()

    def sync(self) -> None:
        """Return once every appended record is on disk, under any durability."""
        self.flush()
        self._sync()

    @property
    def segment(self) -> int:
        """Number of the current segment."""
        return self._segment

    @property
    def segment_bytes(self) -> int:
        """Written bytes of the current segment."""
        return self._file_bytes

    def rotate(self, header: Any) -> None:
        """Begin the next segment under another header."""
        self.flush()
        self.header = header
        self._rotate()

    def close(self, reason: str = "closed") -> None:
        """Write the end record and close the files. Closing a closed journal does nothing."""
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

    def __enter__(self) -> Self:
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
        # The hot path. The CRC of the header is the initial value of the last CRC, which then equals a CRC over [0:32)
        # and payload. A CRC over data that contains its own CRC would be constant and cover nothing.
        length = len(payload)
        if length > PAYLOAD_BYTES_MAX:
            raise JournalError(f"a record's payload has at most {PAYLOAD_BYTES_MAX} bytes, got {length}")
        head = _pack_head(MAGIC, kind, length, self._sequence, self._chain)
        head_crc = crc32(head)
        record = head + _pack_crc(head_crc) + payload
        chain = _fresh_chain()
        chain.update(record)
        self._chain = chain.digest()
        self._sequence += 1
        buffer = self._buffer
        buffer += record
        buffer += _pack_crc(crc32(payload, head_crc))
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
        encoded = self._encode(header)
        try:
            msgspec.msgpack.decode(encoded, type=type(header))
        except msgspec.DecodeError as error:  # a struct does not check the types of its fields when it is made
            raise JournalError(f"the header of {self._path()} could not be read again: {error}") from error
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            self._file = os.open(self._path(), flags, 0o600)
        except OSError as error:
            self._fail(f"cannot create {self._path()}", error)
        self._file_bytes = 0
        self._spill_bytes = BUFFER_BYTES + PAYLOAD_BYTES_MAX  # the header is written below, not by a spill
        self._put(KIND_HEADER, encoded)
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


class JournalWriter(RecordWriter[ObservedEvent]):
    """Appends to the journal of one engine: its events, and snapshots of its state."""

    header: JournalHeader

    @classmethod
    def create(
        cls,
        folder: Folder,
        header: JournalHeader,
        *,
        durability: Durability = "none",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> JournalWriter:
        """Start a journal in the run folder `folder`, which is created if missing.

        Raises: JournalError if the run already has a journal, or if the first segment cannot be written.
        """
        journal_folder = Path(folder) / "journal"
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            journal_folder.mkdir(mode=0o700, exist_ok=True)
            if any(journal_folder.glob("*.log")):
                raise JournalError(f"{journal_folder} already holds a journal\nhint: choose another run folder")
            if durability != "none":
                sync_folder(Path(folder))
        except OSError as error:
            raise JournalError(f"cannot make {journal_folder}: {error}") from error
        return cls(journal_folder, header, durability=durability, segment_bytes=segment_bytes)

    @classmethod
    def resume(
        cls, folder: Folder, *, durability: Durability = "none", segment_bytes: int = SEGMENT_BYTES
    ) -> JournalWriter:
        """Continue an existing journal in a new segment behind its last whole record. A torn tail is cut off.

        The header stays the same, except for the version of the core that writes the new segment.
        """
        return cls.go_on(read_journal(folder, repair=True), durability=durability, segment_bytes=segment_bytes)

    @classmethod
    def go_on(
        cls, journal: Journal, *, durability: Durability = "none", segment_bytes: int = SEGMENT_BYTES
    ) -> JournalWriter:
        """Continue a journal that was already read and repaired. Otherwise like `resume`."""
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

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Append an event whose step raised, for diagnosis, and flush."""
        self._check()
        self._put(KIND_UNSEALED, self._encode(event))
        self._not_events += 1
        self.flush()

    def snapshot(self, data: bytes, state_digest: bytes) -> Snapshot:
        """Store the engine's state after the last appended event in a file, and append a record that refers to it.

        The file is as durable as the journal.
        """
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

    def begin_segment(self, data: bytes, state_digest: bytes) -> Snapshot:
        """Begin a new segment with a snapshot, so that the segments before it may expire."""
        self.flush()
        if self._sequence != self._segment_began:
            self._rotate()
        return self.snapshot(data, state_digest)

    def drop_before(self, segment: int, snapshots: set[str]) -> None:
        """Delete the segments before `segment`, which must begin with a snapshot, and all other files of snapshots.

        The oldest segment is deleted first, so that the rest is a journal at every moment.

        Args:
            snapshots: names of the snapshot files to keep.
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
            self._fail(f"cannot delete the expired files in {self.folder}", error)
