"""Reading a journal: segments, checks of framing and chain, records in order, and the repair of a torn tail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from lockstep.core.contract.events import ObservedEvent
from lockstep.core.journal.records import (
    CORE_VERSION,
    CRC,
    DIGEST_BYTES,
    FORMAT_VERSION,
    HEAD,
    HEADER,
    HEADER_BYTES,
    KIND_END,
    KIND_EVENT,
    KIND_HEADER,
    KIND_NAMES,
    KIND_SNAPSHOT,
    KIND_UNSEALED,
    MAGIC,
    NO_CHAIN,
    PAYLOAD_BYTES_MAX,
    RECORD_BYTES_MIN,
    SNAPSHOTS_ALL_KEPT,
    SNAPSHOTS_KEPT,
    CorruptReason,
    EndRecord,
    EventRecord,
    Folder,
    Frame,
    HeaderRecord,
    JournalCorrupt,
    JournalEnd,
    JournalError,
    JournalHeader,
    OnlyVersion,
    Record,
    Snapshot,
    SnapshotFault,
    SnapshotRecord,
    Tail,
    UnsealedRecord,
    find_record,
)
from lockstep.core.journal.segments import SNAPSHOT_NAME, find_journal, list_segments, lock_folder, segment_name

HEAD_LOOK_BYTES = 256 << 10  # a header record and a snapshot record together are much shorter

_decode_event = msgspec.msgpack.Decoder(ObservedEvent).decode


def read_journal(folder: Folder, *, repair: bool = False, first_segment: int = 0) -> Journal:
    """Open a journal, given the run folder or its `journal` folder.

    Args:
        repair: cut off a torn tail before this returns. Corruption raises and is left as it is.
        first_segment: open only this segment and later ones.
    Raises: JournalError if there is no journal or its version is unknown; JournalCorrupt.
    """
    journal = Journal(find_journal(Path(folder)), first_segment)
    if repair and journal.tail.verdict == "torn":
        _cut_tail(journal)
        journal = Journal(journal.folder, journal.first_segment)
    return journal


class Journal:
    """A journal open for reading. Only the segment being read is in memory."""

    def __init__(self, folder: Path, first_segment: int = 0) -> None:
        """Read the list of segments and the first header. Segments before `first_segment` are ignored."""
        self.folder = folder
        self.segments = list_segments(folder, first_segment)
        self.first_segment = int(self.segments[0].stem)  # number of the first segment that has not expired
        self._tail: Tail | None = None
        self._snapshots: list[Snapshot] = []  # filled together with `_tail`
        self._start = start_of(self.segments[0]) if self.first_segment else START
        first = next(FrameScan(self.segments, self._start).frames(), None)
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
        """Number of events before the first segment: 0 if no segment has expired."""
        return self._start.steps

    @property
    def tail(self) -> Tail:
        """The end of the journal. The first use reads framing and chain of the whole journal. Raises JournalCorrupt."""
        if self._tail is None:
            scan = FrameScan(self.segments, self._start)
            snapshots: list[Snapshot] = []
            for frame in scan.frames():
                if frame.kind == KIND_HEADER:
                    self._check_segment(frame)
                elif frame.kind == KIND_SNAPSHOT:
                    snapshots.append(self._decode(frame, Snapshot))
            self._tail, self._snapshots = scan.tail(), snapshots
        return self._tail

    @property
    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots that the journal refers to, in order; the files of old ones may have been deleted."""
        _ = self.tail
        return list(self._snapshots)

    def snapshot_faults(self) -> list[SnapshotFault]:
        """Read the files of all snapshots; return those that were altered, and those that are missing and must not be.

        A file may be missing if its writer may have deleted it: `SNAPSHOTS_ALL_KEPT`.
        """
        faults = []
        snapshots = self.snapshots
        all_kept = int(self.segments[-1].stem) <= SNAPSHOTS_ALL_KEPT
        for number, snapshot in enumerate(snapshots):
            if self.load_snapshot(snapshot) is not None:
                continue
            is_there = bool(SNAPSHOT_NAME.fullmatch(snapshot.file)) and (self.folder / snapshot.file).exists()
            is_opening = bool(self._start.sequence) and number == 0
            if is_there or is_opening or all_kept or number >= len(snapshots) - SNAPSHOTS_KEPT:
                faults.append(
                    SnapshotFault(
                        file=snapshot.file,
                        steps=snapshot.steps,
                        fault="altered" if is_there else "missing",
                        is_opening=is_opening,
                    )
                )
        return faults

    def records(self) -> Iterator[Record]:
        """Yield every record in order, each checked before it is yielded; stop at a torn tail.

        Raises: JournalCorrupt at the damage; JournalError at a record that this version cannot read.
        """
        scan = FrameScan(self.segments, self._start)
        step, snapshots = self.first_step, list[Snapshot]()
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
                record = self._rare_record(frame)
                if isinstance(record, SnapshotRecord):
                    snapshots.append(record.snapshot)
                yield record
        self._tail, self._snapshots = scan.tail(), snapshots

    def events(self) -> Iterator[EventRecord]:
        """Return an iterator over the event records."""
        return (record for record in self.records() if isinstance(record, EventRecord))

    def load_snapshot(self, snapshot: Snapshot) -> bytes | None:
        """Return the bytes of a snapshot; None if the file is missing or altered. Replay then begins at the start."""
        if not SNAPSHOT_NAME.fullmatch(snapshot.file):
            return None
        try:
            data = (self.folder / snapshot.file).read_bytes()
        except OSError:
            return None
        return data if blake2b(data, digest_size=DIGEST_BYTES).digest() == snapshot.bytes_digest else None

    def _rare_record(self, frame: Frame) -> Record:
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

    def _decode(self, frame: Frame, kind: Any) -> Any:
        try:
            return msgspec.msgpack.decode(frame.payload, type=kind)
        except msgspec.DecodeError as error:
            raise self._unreadable(frame, error) from error

    def _unreadable(self, frame: Frame, why: object) -> JournalError:
        return JournalError(
            f"{self.segments[frame.segment]}: record at offset {frame.offset} is whole but not readable by this core "
            f"({why})\nwritten by core {self.header.core_version}, read by core {CORE_VERSION}"
        )

    def _check_segment(self, frame: Frame) -> JournalHeader:
        """Return the header of a segment. Raises JournalCorrupt unless its numbers and its run match the journal."""
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


class ScanStart(msgspec.Struct, frozen=True):
    """The state of the chain before the first segment that is read."""

    sequence: int
    chain: bytes
    steps: int


START = ScanStart(0, NO_CHAIN, 0)


def start_of(path: Path) -> ScanStart:
    """Return the state of the chain before a segment, from its header."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error}") from error
    if find_record(data[: HEADER_BYTES + PAYLOAD_BYTES_MAX + CRC.size], 0) != 0:
        return START  # there is no whole header, which the caller reports
    _, _, length, sequence, chain, _ = HEADER.unpack_from(data, 0)
    payload = memoryview(data)[HEADER_BYTES : HEADER_BYTES + length]
    return ScanStart(sequence, chain, _first_step(payload, path))


def _first_step(payload: memoryview, path: Path) -> int:
    try:
        return msgspec.msgpack.decode(payload, type=_OnlyFirstStep).first_step
    except msgspec.DecodeError as error:
        raise JournalError(f"{path} begins with a record that is no header: {error}") from error


class _OnlyFirstStep(msgspec.Struct):
    """The number of events before a segment: of a header, all that the start of a scan needs."""

    first_step: int


def scan_folder(folder: Path) -> FrameScan:
    """Return a scan of all segments of a folder, by a reader that decodes the payloads itself."""
    segments = list_segments(folder, 0)
    return FrameScan(segments, start_of(segments[0]) if int(segments[0].stem) else START)


def _decode_header(frame: Frame, path: Path) -> JournalHeader:
    """Decode a header record. The version is read first, since a header of another version may have other fields."""
    if frame.kind != KIND_HEADER:
        raise JournalError(
            f"{path} begins with a record of kind {KIND_NAMES.get(frame.kind, frame.kind)}, which names no version; "
            f"expected a header record of format version {FORMAT_VERSION}"
        )
    try:
        first = msgspec.msgpack.decode(frame.payload, type=OnlyVersion)
        version = first.format_version
        if first.journal_of:
            raise JournalError(f"{path} is the journal of a {first.journal_of}, expected that of an engine")
        if version != FORMAT_VERSION:
            raise JournalError(f"{path} has format version {version}, this core reads format version {FORMAT_VERSION}")
        return msgspec.msgpack.decode(frame.payload, type=JournalHeader)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"{path}: the header is whole but not one that this core can read ({error})\n"
            f"hint: the journal is probably of a later version than this core, {CORE_VERSION}"
        ) from error


def opening_snapshot(path: Path) -> str | None:
    """Return the name of the snapshot file with which a segment begins; None if it begins with no whole one."""
    try:
        with path.open("rb") as file:
            data = file.read(HEAD_LOOK_BYTES)
    except OSError:
        return None
    if find_record(data, 0) != 0:
        return None
    second = RECORD_BYTES_MIN + HEADER.unpack_from(data, 0)[2]
    if data[second : second + 4] != MAGIC + bytes((KIND_SNAPSHOT,)) or find_record(data, second) != second:
        return None
    length = HEADER.unpack_from(data, second)[2]
    payload = data[second + HEADER_BYTES : second + HEADER_BYTES + length]
    try:
        return msgspec.msgpack.decode(payload, type=Snapshot).file
    except msgspec.DecodeError:
        return None


class FrameScan:
    """One pass over framing and chain. It applies the recovery table of docs/journal.md, in the order of its rows."""

    def __init__(self, segments: list[Path], start: ScanStart = START) -> None:
        self.segments = segments
        self.first_segment = int(segments[0].stem)  # number of the first of these segments
        self.sequence = start.sequence  # sequence of the next record
        self.chain = start.chain
        self.steps = start.steps
        self.offset = 0  # offset in the last segment behind its last whole record
        self.file_bytes = 0
        self.ended = False  # whether the last record of this segment was an end record
        self.torn = ""  # reason for a torn tail; empty if it is not torn

    def frames(self) -> Iterator[Frame]:
        """Yield every record that passes the checks, in order; stop at a torn tail. Raises JournalCorrupt."""
        for segment in range(len(self.segments)):
            yield from self._segment_frames(segment)

    def tail(self) -> Tail:
        """Return the end of the journal. To be called after `frames` is exhausted."""
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

    def _segment_frames(self, segment: int) -> Iterator[Frame]:
        data = self._read(segment)
        view = memoryview(data)
        size = len(data)
        head_bytes, crc_bytes = HEAD.size, CRC.size
        unpack_header, unpack_crc = HEADER.unpack_from, CRC.unpack_from
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
            frame = Frame(kind, sequence, segment, offset, view[start:stop])
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
        """Mark a torn tail. Raises JournalCorrupt if a valid record or another segment follows the bad record."""
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


def _cut_tail(journal: Journal) -> None:
    cut_tail(journal.folder, journal.segments[-1], lambda: Journal(journal.folder, journal.first_segment).tail)


def cut_tail(folder: Path, path: Path, read_tail: Callable[[], Tail]) -> None:
    """Cut the last segment off behind its last whole record; delete it if it has no whole header.

    Args:
        path: the last segment.
        read_tail: reads the tail, once no other process can write.
    """
    folder_file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_folder(folder_file, folder)
        tail = read_tail()
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
