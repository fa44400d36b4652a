"""The journal on disk: append-only segments of checksummed, chained records. docs/journal.md has the format in bytes.

    run/journal/00000000.log        segments in order; each begins with a header record
    run/journal/snapshot-...        files to which snapshot records refer; used only if their digest matches

The first segments may have expired. The first remaining one then begins with a snapshot, from which it can be replayed.

Layout of a record, with offsets in bytes. The header has its own checksum, so that a damaged length is never used. The
chain reveals a lost, doubled or moved record. The last checksum covers header and payload.

    # 0     3      4        8          16               32           36         36 + length   40 + length
    # | magic | kind | length | sequence | chain of the | CRC-32 of  | payload  | CRC-32 of   |
    # |       |      |        |          | record before| [0:32)     |          | all but CRCs|

A crash leaves a *torn tail*: an invalid range at the end of the last segment with no valid record after it. It is cut
off, which loses no durable record. Any other mismatch is *corruption*: it is reported with its position and never
repaired. A reader returns a payload only after every check of it has passed.
"""

from __future__ import annotations

import importlib.metadata
import struct
from pathlib import Path
from typing import Literal
from zlib import crc32

import msgspec

from lockstep.core.contract.config import BEHAVIOUR_FLAGS, SchedConfig
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import ObservedEvent

FORMAT_VERSION = 1
MAGIC = b"\xf5LJ"  # 0xf5 occurs nowhere in UTF-8, so no text in a payload looks like a record
PAYLOAD_BYTES_MAX = 64 << 20  # a greater length is corrupt, even with a correct checksum
DIGEST_BYTES = 16
NO_CHAIN = bytes(DIGEST_BYTES)  # the chain value before the first record

HEAD = struct.Struct("<3sBIQ16s")  # magic, kind, payload length, sequence, chain value of the previous record
CRC = struct.Struct("<I")
HEADER = struct.Struct("<3sBIQ16sI")  # head and its CRC-32
HEADER_BYTES = HEADER.size
RECORD_BYTES_MIN = HEADER_BYTES + CRC.size

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
"""When records reach the disk. In every mode `flush` returns after write(), so flushed records survive the process.

none      when the kernel writes them
interval  a thread calls fsync at most every INTERVAL_MS
group     a thread calls fsync after each flush; flushes during an fsync share the next one
every     `append` returns only after fsync
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
    "snapshot",
]


class JournalError(LockstepError):
    """The journal cannot be written or read. The message contains the file, the expected and the found content."""


class JournalCorrupt(JournalError):
    """The journal was damaged after it was written. It is never repaired. A torn tail is no corruption."""

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
    """The facts that a replay needs before the first event. The first record of every segment repeats them."""

    config: SchedConfig  # every field, defaults included
    seed: int = 0
    model_digest: str = ""
    tokenizer_digest: str = ""
    host: dict[str, str | int | float | bool] = {}  # host, cost model and workload, for display only; no secrets
    core_version: str = CORE_VERSION
    behaviour_flags: tuple[str, ...] = BEHAVIOUR_FLAGS
    format_version: int = FORMAT_VERSION
    segment: int = 0  # number of this segment; the writer fills in this field and the next three
    first_sequence: int = 0  # sequence of this record
    previous_chain: bytes = NO_CHAIN
    first_step: int = 0  # events before this segment
    content: Literal["full", "digests"] = "full"  # full: with prompts and outputs; digests: only lengths and digests


msgspec.msgpack.Decoder(JournalHeader)
"""A type is examined when it is first decoded. Two threads that do so at once would crash, so it is done at import."""


class OnlyVersion(msgspec.Struct):
    """The format version of a header, which is read before its other fields."""

    format_version: int
    journal_of: str = ""  # "router"; empty for an engine


class Record(msgspec.Struct, frozen=True, gc=False):
    """The position of a record. `sequence` counts records of every kind, from 0, across segments."""

    sequence: int
    segment: int
    offset: int


class HeaderRecord(Record, frozen=True, gc=False):
    """The first record of a segment."""

    header: JournalHeader


class EventRecord(Record, frozen=True, gc=False):
    """One observed event and the digest of the Step it produced. `step` counts event records, from 0."""

    step: int
    event: ObservedEvent
    digest: bytes


class UnsealedRecord(Record, frozen=True, gc=False):
    """An event whose step raised. It is stored for diagnosis and has no digest."""

    event: ObservedEvent


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file beside the segments that holds the engine's state after the first `steps` events."""

    file: str
    steps: int
    bytes_digest: bytes  # BLAKE2b-128 of the file
    state_digest: bytes  # digest of the engine at this event, from the host


SNAPSHOTS_ALL_KEPT = 32
"""A journal of at most so many segments after the first has all of its snapshots; of longer ones, single old snapshots
may have been deleted. The newest SNAPSHOTS_KEPT are never deleted."""
SNAPSHOTS_KEPT = 2


class SnapshotFault(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that its record refers to and that cannot be used."""

    file: str
    steps: int  # events before the snapshot
    fault: Literal["missing", "altered", "of another state"]
    is_opening: bool  # the events before it have expired, so the replay begins with it

    def __str__(self) -> str:
        more = "; the events before it have expired, so nothing can be replayed" if self.is_opening else ""
        return f"{self.file}, after {self.steps:,} events, is {self.fault}{more}"


class SnapshotRecord(Record, frozen=True, gc=False):
    """A record that refers to a snapshot of the state at this position."""

    snapshot: Snapshot


class JournalEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The writer closed the journal."""

    reason: str


class EndRecord(Record, frozen=True, gc=False):
    """The last record of a segment that its writer closed cleanly."""

    reason: str


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a journal. "torn": [offset:file_bytes) of the last segment is the rest of a record that was lost."""

    verdict: Literal["clean", "torn"]
    closed: bool  # whether the last record is an end record; if not, the writer crashed or is still writing
    segment: str
    offset: int  # end of the last whole record
    file_bytes: int
    reason: str  # reason for a torn tail; empty if it is not torn
    records: int
    steps: int
    chain: bytes  # chain value of the last whole record

    @property
    def torn_bytes(self) -> int:
        """Number of bytes behind the last whole record."""
        return self.file_bytes - self.offset


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A record that passed every check of framing and chain; its payload is not decoded yet."""

    kind: int
    sequence: int
    segment: int
    offset: int
    payload: memoryview


def first_sequence(head: bytes) -> int:
    """Return the sequence of the record that begins with these HEADER_BYTES bytes; 0 if there are fewer bytes."""
    if len(head) < HEADER_BYTES:
        return 0
    sequence: int = HEADER.unpack(head)[3]
    return sequence


def find_record(data: bytes, offset: int) -> int | None:
    """Return the first offset at or after `offset` of a record with two right checksums; None if there is none."""
    view = memoryview(data)
    last = len(data) - RECORD_BYTES_MIN
    offset = data.find(MAGIC, offset)
    while 0 <= offset <= last:
        _, _, length, _, _, head_crc = HEADER.unpack_from(data, offset)
        start = offset + HEADER_BYTES
        stop = start + length
        if (
            length <= PAYLOAD_BYTES_MAX
            and stop + CRC.size <= len(data)
            and crc32(view[offset : offset + HEAD.size]) == head_crc
            and crc32(view[start:stop], head_crc) == CRC.unpack_from(data, stop)[0]
        ):
            return offset
        offset = data.find(MAGIC, offset + 1)
    return None
