"""A small journal with every kind of damage is read as the recovery table of docs/journal.md states.

Each test checks two things: the records that are read, and whether the damage is reported as a torn tail or as
corruption. The records must be a prefix of the written ones, so no wrong payload is ever returned. Damage that is
neither cut off nor reported is a failure.
"""

from __future__ import annotations

import itertools
import random
import struct
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    BatchFinished,
    GrammarReady,
    LaneReady,
    ObservedEvent,
    RequestArrived,
    RequestCancelled,
    TokenIds,
    TokenRuns,
)
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import (
    HEADER_BYTES,
    KIND_EVENT,
    MAGIC,
    PAYLOAD_BYTES_MAX,
    JournalCorrupt,
    JournalError,
    JournalHeader,
    Record,
    SnapshotRecord,
    Tail,
    find_record,
)
from lockstep.core.journal.replay import replay
from lockstep.core.journal.writer import JournalWriter

HEADER = JournalHeader(config=SchedConfig(), seed=3, host={"kind": "torture"})
EVENTS: list[ObservedEvent] = [
    RequestArrived(time_us=0, request_id=1, prompt=TokenIds(bytes(range(64))), max_new_tokens=3),
    RequestArrived(time_us=1, request_id=2, prompt=TokenRuns((5, 9)), max_new_tokens=3, label="zwei"),
    LaneReady(2),
    BatchFinished(30, batch_id=0, tokens=bytes(8), started_us=3, finished_us=29),
    LaneReady(31),
    RequestCancelled(32, 2),
    GrammarReady(33, digest=bytes(range(32))),
    BatchFinished(60, batch_id=1, tokens=bytes(range(1, 9)), started_us=32, finished_us=59),
]


class ChainEngine:
    """A deterministic engine whose digest is a chain over its events."""

    def __init__(self, state: bytes = b"") -> None:
        self.state = state

    def step(self, event: ObservedEvent, /) -> Step:
        self.state = blake2b(self.state + msgspec.msgpack.encode(event), digest_size=16).digest()
        return Step(digest=self.state)


@dataclass(frozen=True)
class Written:
    """A journal as written: its folder, its first segment, where each record of that begins, and all records."""

    folder: Path
    path: Path
    data: bytes
    bounds: list[int]  # of the first segment: one per record, and the end
    records: list[Record]

    def piece(self, number: int) -> bytes:
        return self.data[self.bounds[number] : self.bounds[number + 1]]

    @property
    def pieces(self) -> list[bytes]:
        return [self.piece(number) for number in range(len(self.bounds) - 1)]


@dataclass(frozen=True)
class Found:
    """The result of reading a damaged journal. Exactly one of tail, corrupt and refused is set."""

    records: list[Record]
    tail: Tail | None = None
    corrupt: JournalCorrupt | None = None
    refused: JournalError | None = None


def write(folder: Path, *, segment_bytes: int = 1 << 20, first_label: str = "eins") -> Written:
    """Twelve records: header, eight events with a snapshot and an unsealed one among them, end."""
    engine = ChainEngine()
    events = [msgspec.structs.replace(EVENTS[0], label=first_label), *EVENTS[1:]]  # type: ignore[type-var]
    with JournalWriter.create(folder, HEADER, segment_bytes=segment_bytes) as writer:
        for number, event in enumerate(events):
            writer.append(event, engine.step(event).digest)
            if number == 4:
                writer.snapshot(engine.state * 3, engine.state)
        writer.append_unsealed(LaneReady(61))
    path = folder / "journal/00000000.log"
    records = list(read_journal(folder).records())
    data = path.read_bytes()
    bounds = [record.offset for record in records if record.segment == 0]
    return Written(folder, path, data, [*bounds, len(data)], records)


def read(written: Written, data: bytes | None = None) -> Found:
    """Read the journal with `data` as its first segment, twice: record by record, and framing only. Both must agree."""
    if data is not None:
        put(written.path, data)
    records: list[Record] = []
    try:
        journal = read_journal(written.folder)
    except JournalError as error:
        return Found(records, **_kind(error))
    framing = whole = None
    try:
        records.extend(journal.records())
    except JournalError as error:
        whole = error
    try:
        tail = read_journal(written.folder).tail
    except JournalError as error:
        framing = error
    assert str(framing) == str(whole), "record by record and framing only, the journal reads differently"
    return Found(records, tail=tail) if whole is None else Found(records, **_kind(whole))


def put(path: Path, data: bytes) -> None:
    """Overwrite in place: truncating first makes ext4 wait for the disk at every close, thousands of times here."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def _kind(error: JournalError) -> dict[str, JournalError]:
    return {"corrupt": error} if isinstance(error, JournalCorrupt) else {"refused": error}


def assert_prefix(found: Found, written: Written, count: int | None = None) -> None:
    """The records that were read are the first ones as they were written, `count` of them if it is given."""
    if not found.records and count is None:
        return
    expected = written.records[: len(found.records)]
    assert found.records == expected, "a wrong payload was returned"
    assert count is None or len(found.records) == count


def assert_torn(found: Found, written: Written, boundary: int) -> None:
    """All records before number `boundary` were read; the rest is a torn tail there, or the header itself is lost."""
    if boundary == 0:
        assert found.refused is not None, found
        assert "does not begin with a whole header record of format version 1" in str(found.refused)
        return
    assert found.tail is not None, found
    assert (found.tail.verdict, found.tail.offset, found.tail.closed) == ("torn", written.bounds[boundary], False)
    assert_prefix(found, written, boundary)


def assert_corrupt(found: Found, written: Written, offset: int, reasons: set[str]) -> None:
    assert found.corrupt is not None, found
    assert (found.corrupt.segment, found.corrupt.offset) == (str(written.path), offset)
    assert found.corrupt.reason in reasons
    assert f"at offset {offset}" in str(found.corrupt)
    assert_prefix(found, written)


def first_damaged(written: Written, data: bytes) -> int | None:
    """The number of the first record that `data` does not hold unchanged in its place; None if it holds them all."""
    for number in range(len(written.bounds) - 1):
        if data[written.bounds[number] : written.bounds[number + 1]] != written.piece(number):
            return number
    return None


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return write(tmp_path)


def test_undamaged_journal_is_clean(written: Written) -> None:
    found = read(written)
    assert len(found.records) == 12
    assert found.tail is not None
    assert (found.tail.verdict, found.tail.closed, found.tail.offset) == ("clean", True, len(written.data))


def test_truncation_at_every_offset(written: Written) -> None:
    for size in range(len(written.data)):
        found = read(written, written.data[:size])
        whole = sum(bound <= size for bound in written.bounds[1:])
        if size in written.bounds[1:]:
            assert found.tail is not None
            assert (found.tail.verdict, found.tail.closed) == ("clean", False)
            assert_prefix(found, written, whole)
        else:
            assert_torn(found, written, whole)


def test_repair_cuts_a_truncated_journal_at_its_last_whole_record(written: Written) -> None:
    for size in range(written.bounds[1], len(written.data), 17):
        put(written.path, written.data[:size])
        tail = read_journal(written.folder, repair=True).tail
        whole = sum(bound <= size for bound in written.bounds[1:])
        assert (tail.verdict, tail.records) == ("clean", whole)
        assert written.path.read_bytes() == written.data[: written.bounds[whole]]


@pytest.mark.parametrize("fill", ["zeros", "ones", "garbage"])
def test_filled_tail_from_every_offset(written: Written, fill: str) -> None:
    random_bytes = random.Random(1).randbytes(len(written.data))
    for offset in range(len(written.data)):
        size = len(written.data) - offset
        filler = {"zeros": bytes(size), "ones": b"\xff" * size, "garbage": random_bytes[:size]}[fill]
        data = written.data[:offset] + filler
        damaged = first_damaged(written, data)  # a record that ended in zeros survives a fill of zeros
        assert damaged is not None
        assert_torn(read(written, data), written, damaged)


@pytest.mark.parametrize("fill", [bytes(1), bytes(4096), MAGIC, MAGIC * 500, random.Random(2).randbytes(4096)])
def test_filling_behind_every_record(written: Written, fill: bytes) -> None:
    for number in range(len(written.bounds)):
        assert_torn(read(written, written.data[: written.bounds[number]] + fill), written, number)


def test_every_single_bit_flip(written: Written) -> None:
    last = len(written.bounds) - 2
    data = bytearray(written.data)
    for number in range(last + 1):
        start = written.bounds[number]
        for offset in range(start, written.bounds[number + 1]):
            reason = "header checksum" if offset < start + HEADER_BYTES else "payload checksum"
            for bit in range(8):
                data[offset] ^= 1 << bit
                found = read(written, bytes(data))
                data[offset] ^= 1 << bit
                if number < last:
                    assert_corrupt(found, written, start, {reason})
                else:
                    assert_torn(found, written, last)


def test_repair_leaves_corruption_as_it_is(written: Written) -> None:
    data = bytearray(written.data)
    data[written.bounds[3] + 50] ^= 4
    written.path.write_bytes(data)
    with pytest.raises(JournalCorrupt):
        read_journal(written.folder, repair=True)
    assert written.path.read_bytes() == bytes(data)


def test_every_dropped_record(written: Written) -> None:
    last = len(written.pieces) - 1
    for number in range(last + 1):
        pieces = written.pieces
        del pieces[number]
        found = read(written, b"".join(pieces))
        if number < last:
            assert_corrupt(found, written, written.bounds[number], {"gap"})
        else:  # indistinguishable from a writer that died before its end record
            assert found.tail is not None
            assert (found.tail.verdict, found.tail.closed) == ("clean", False)
            assert_prefix(found, written, last)


def test_every_record_doubled_at_every_place(written: Written) -> None:
    count = len(written.pieces)
    for number, place in itertools.product(range(count), range(count + 1)):
        pieces = written.pieces
        pieces.insert(place, written.piece(number))
        # Inserted right before or right after the original, the bytes are the same: the second one is the double.
        at = place + 1 if place == number else place
        reasons = {"duplicate"} if number < at else {"gap"}
        assert_corrupt(read(written, b"".join(pieces)), written, written.bounds[at], reasons)


def test_every_two_records_swapped(written: Written) -> None:
    for first, second in itertools.combinations(range(len(written.pieces)), 2):
        pieces = written.pieces
        pieces[first], pieces[second] = pieces[second], pieces[first]
        assert_corrupt(read(written, b"".join(pieces)), written, written.bounds[first], {"gap"})


def test_every_record_of_another_run_in_its_place(tmp_path: Path) -> None:
    written = write(tmp_path / "a")
    other = write(tmp_path / "b", first_label="one!")
    assert other.bounds == written.bounds
    for number in range(2, len(written.pieces)):  # from the second event on, the chain differs
        pieces = written.pieces
        pieces[number] = other.piece(number)
        assert_corrupt(read(written, b"".join(pieces)), written, written.bounds[number], {"chain"})


def test_bytes_inserted_between_records(written: Written) -> None:
    garbage = random.Random(3).randbytes(64)
    last = len(written.pieces)
    for number, size in itertools.product(range(last), range(1, 64, 7)):
        bound = written.bounds[number]
        data = written.data[:bound] + garbage[:size] + written.data[bound:]
        assert_corrupt(read(written, data), written, bound, {"header checksum"})


def record_with_length(written: Written, number: int, length: int) -> bytes:
    """Record `number` with a wrong length and a correct header checksum."""
    piece = written.piece(number)
    head = piece[:4] + struct.pack("<I", length) + piece[8 : HEADER_BYTES - 4]
    return head + struct.pack("<I", zlib.crc32(head)) + piece[HEADER_BYTES:]


@pytest.mark.parametrize("length", [PAYLOAD_BYTES_MAX + 1, 2**32 - 1])
def test_length_over_the_bound_is_not_believed(written: Written, length: int) -> None:
    last = len(written.pieces) - 1
    for number in range(last + 1):
        pieces = written.pieces
        pieces[number] = record_with_length(written, number, length)
        found = read(written, b"".join(pieces))
        if number < last:
            assert_corrupt(found, written, written.bounds[number], {"length"})
        else:
            assert_torn(found, written, last)
            assert found.tail is not None
            assert found.tail.reason == "length"


def test_length_within_the_bound_and_past_the_end(written: Written) -> None:
    pieces = written.pieces
    pieces[4] = record_with_length(written, 4, PAYLOAD_BYTES_MAX)
    assert_corrupt(read(written, b"".join(pieces)), written, written.bounds[4], {"payload short"})


def test_record_after_the_end_record(written: Written) -> None:
    chain = blake2b(written.pieces[-1][:-4], digest_size=16).digest()
    payload = bytes(16) + msgspec.msgpack.encode(LaneReady(99))
    head = struct.pack("<3sBIQ16s", MAGIC, KIND_EVENT, len(payload), 12, chain)
    head += struct.pack("<I", zlib.crc32(head))
    record = head + payload + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head[:-4])))
    assert find_record(record, 0) == 0
    assert_corrupt(read(written, written.data + record), written, len(written.data), {"after end"})


def test_last_checksum_is_over_header_and_payload(written: Written) -> None:
    for piece in written.pieces:
        covered = piece[: HEADER_BYTES - 4] + piece[HEADER_BYTES:-4]
        assert struct.unpack("<I", piece[-4:])[0] == zlib.crc32(covered)


def test_torn_record_that_contains_a_whole_one_is_reported_not_cut(tmp_path: Path) -> None:
    # It cannot be determined whether the inner record was ever a record of this file, so the safer verdict applies.
    inner = write(tmp_path / "inner").piece(3)
    with JournalWriter.create(tmp_path / "outer", HEADER) as writer:
        writer.append(BatchFinished(1, 0, logprobs=inner + bytes(100)), bytes(16))
    path = tmp_path / "outer/journal/00000000.log"
    assert len(list(read_journal(tmp_path / "outer").events())) == 1
    path.write_bytes(path.read_bytes()[:-70])
    with pytest.raises(JournalCorrupt, match="a valid record follows"):
        _ = read_journal(tmp_path / "outer").tail


# ------------------------------------------------------------------------------------------------- the first record


@pytest.mark.parametrize("number", range(1, 12))
def test_first_record_of_another_kind(written: Written, number: int) -> None:
    found = read(written, written.piece(number))
    assert found.corrupt is not None
    assert found.corrupt.reason == "gap"


def test_first_record_that_is_not_a_header_is_refused(written: Written) -> None:
    payload = bytes(16) + msgspec.msgpack.encode(LaneReady(1))
    head = struct.pack("<3sBIQ16s", MAGIC, KIND_EVENT, len(payload), 0, bytes(16))
    head += struct.pack("<I", zlib.crc32(head))
    record = head + payload + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head[:-4])))
    found = read(written, record)
    assert "record of kind event, which names no version; expected" in str(found.refused)


@pytest.mark.parametrize("version", [0, 2, 99])
def test_other_version_is_refused_whatever_else_the_header_holds(written: Written, version: int) -> None:
    payload = msgspec.msgpack.encode({"format_version": version, "unheard": ["of"]})
    head = struct.pack("<3sBIQ16s", MAGIC, 1, len(payload), 0, bytes(16))
    head += struct.pack("<I", zlib.crc32(head))
    record = head + payload + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head[:-4])))
    found = read(written, record)
    assert f"has format version {version}, this core reads format version 1" in str(found.refused)


# ------------------------------------------------------------------------------------------------------------ segments


@pytest.fixture
def segmented(tmp_path: Path) -> Written:
    written = write(tmp_path / "run", segment_bytes=small_segment(tmp_path))
    assert len(segments(written)) == 3
    return written


def small_segment(tmp_path: Path) -> int:
    """Bytes of a segment that holds its header, of any size, and a few events."""
    return write(tmp_path / "probe").bounds[1] + 380


def segments(written: Written) -> list[Path]:
    return sorted(written.path.parent.glob("*.log"))


def found_reason(written: Written) -> tuple[str, int, str]:
    found = read(written)
    assert_prefix(found, written)
    assert found.corrupt is not None, found
    return Path(found.corrupt.segment).name, found.corrupt.offset, found.corrupt.reason


@pytest.mark.parametrize("segment", [0, 1])
def test_missing_segment(segmented: Written, segment: int) -> None:
    segments(segmented)[segment].unlink()
    assert found_reason(segmented) == (f"0000000{segment}.log", 0, "missing segment")


def test_missing_last_segment_reads_as_a_journal_that_was_not_closed(segmented: Written) -> None:
    segments(segmented)[-1].unlink()
    found = read(segmented)
    assert_prefix(found, segmented)
    assert found.tail is not None
    assert (found.tail.verdict, found.tail.closed) == ("clean", False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("00000003.log", ("00000001.log", 0, "missing segment")),
        ("0000001.log", ("0000001.log", 0, "segment name")),
        ("copy.log", ("copy.log", 0, "segment name")),
    ],
)
def test_renamed_segment(segmented: Written, name: str, expected: tuple[str, int, str]) -> None:
    path = segments(segmented)[1]
    path.rename(path.with_name(name))
    assert found_reason(segmented) == expected


def test_swapped_segments(segmented: Written) -> None:
    contents = [path.read_bytes() for path in segments(segmented)]
    for first, second in itertools.combinations(range(3), 2):
        shuffled = contents.copy()
        shuffled[first], shuffled[second] = shuffled[second], shuffled[first]
        for path, data in zip(segments(segmented), shuffled, strict=True):
            put(path, data)
        assert found_reason(segmented) == (f"0000000{first}.log", 0, "gap")


def test_segment_of_another_run(tmp_path: Path) -> None:
    segment_bytes = small_segment(tmp_path)
    written = write(tmp_path / "a", segment_bytes=segment_bytes)
    other = write(tmp_path / "b", segment_bytes=segment_bytes, first_label="one!")
    segments(written)[1].write_bytes(segments(other)[1].read_bytes())
    assert found_reason(written) == ("00000001.log", 0, "chain")


@pytest.mark.parametrize("segment", [0, 1])
def test_truncation_of_a_segment_that_is_not_the_last(segmented: Written, segment: int) -> None:
    path = segments(segmented)[segment]
    data = path.read_bytes()
    bounds = [record.offset for record in segmented.records if record.segment == segment]
    for size in range(len(data)):
        put(path, data[:size])
        at_bound = size in bounds and size > 0
        name, offset, reason = found_reason(segmented)
        if at_bound:
            assert (name, offset, reason) == (f"0000000{segment + 1}.log", 0, "gap")
        else:
            assert (name, offset) == (path.name, max(bound for bound in bounds if bound <= size))
            assert reason in ("header short", "payload short")


def test_truncation_of_the_last_segment(segmented: Written) -> None:
    path = segments(segmented)[-1]
    data = path.read_bytes()
    bounds = [record.offset for record in segmented.records if record.segment == 2]
    before = sum(record.segment < 2 for record in segmented.records)
    for size in range(len(data)):
        put(path, data[:size])
        found = read(segmented)
        assert found.tail is not None
        assert found.tail.verdict == ("clean" if size in bounds[1:] else "torn")
        offset = max(bound for bound in bounds if bound <= size)
        assert found.tail.offset == offset
        assert_prefix(found, segmented, before + bounds.index(offset))


@pytest.mark.parametrize("size", [0, 20, 500])
def test_repair_of_a_segment_without_a_whole_header_removes_it(segmented: Written, size: int) -> None:
    path = segments(segmented)[-1]
    path.write_bytes(path.read_bytes()[:size])
    tail = read_journal(segmented.folder, repair=True).tail
    assert (tail.verdict, tail.segment) == ("clean", "00000001.log")
    assert not path.exists()


def test_bit_flips_in_a_segment_that_is_not_the_last(segmented: Written) -> None:
    path = segments(segmented)[1]
    data = bytearray(path.read_bytes())
    bounds = [record.offset for record in segmented.records if record.segment == 1]
    for offset in range(len(data)):
        data[offset] ^= 1 << offset % 8
        put(path, data)
        data[offset] ^= 1 << offset % 8
        name, at, reason = found_reason(segmented)
        assert (name, at) == (path.name, max(bound for bound in bounds if bound <= offset))
        assert reason in ("header checksum", "payload checksum")


# ----------------------------------------------------------------------------------------------------------- snapshots


def test_altered_snapshot_is_refused_and_replay_starts_from_the_start(written: Written) -> None:
    (record,) = [record for record in written.records if isinstance(record, SnapshotRecord)]
    path = written.path.parent / record.snapshot.file
    data = path.read_bytes()
    flips = [bytes(b ^ (1 << bit) * (i == at) for i, b in enumerate(data)) for at in range(len(data)) for bit in (0, 7)]
    cuts = [data[:size] for size in range(len(data))]

    def replayed() -> tuple[int, bool]:
        done = replay(written.folder, lambda _: ChainEngine(), restore=lambda _, state: ChainEngine(state[:16]))
        assert done.events == len(EVENTS)
        assert done.snapshot_refused in (None, record.snapshot)
        return done.steps, done.snapshot_refused is not None

    assert replayed() == (len(EVENTS) - 5, False)
    for altered in [*flips, *cuts, data + b"\0"]:
        put(path, altered)
        assert replayed() == (len(EVENTS), True)
    path.unlink()
    assert replayed() == (len(EVENTS), True)
