"""The journal on disk: append-only segments of checksummed, chained records. docs/journal.md has the format in bytes.

    run/journal/00000000.log        segments in order; each begins with a header record
    run/journal/snapshot-...        what snapshot records refer to, trusted only if its digest matches

The first segments may have expired; then the first that is left begins with a snapshot, from which it can be replayed.

One record. The header has its own checksum, so that a damaged length is never used; the chain makes a lost, doubled
or moved record visible; the last checksum covers header and payload.

    # 0     3      4        8          16               32           36         36 + length   40 + length
    # | magic | kind | length | sequence | chain of the | CRC-32 of  | payload  | CRC-32 of   |
    # |       |      |        |          | record before| [0:32)     |          | all but CRCs|

A crash leaves a *torn tail*: one bad stretch at the end of the last segment with no valid record after it. It is cut
off; no durable record is lost by that. Any other mismatch is *corruption*: it is reported with its place and never
repaired. A reader gives a payload out only after every check on it has passed.
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

HEAD = struct.Struct("<3sBIQ16s")  # magic, kind, payload length, sequence, chain value of the record before
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
"""When records reach the disk. In every mode `flush` returns after write(), which survives the death of the process.

none      whenever the kernel writes them
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
    """The journal cannot be written or read. The message has the file, what was expected and what was found."""


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
    """All that a replay needs before the first event. The first record of every segment repeats it."""

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


class OnlyVersion(msgspec.Struct):
    """The version of a header, which is read before its other fields."""

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
    """The last record of a segment that its writer closed cleanly."""

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


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A record that passed every check of framing and chain; its payload is not decoded yet."""

    kind: int
    sequence: int
    segment: int
    offset: int
    payload: memoryview


def first_sequence(head: bytes) -> int:
    """The number of the record that begins with these HEADER_BYTES bytes. 0 if they are no head of one."""
    if len(head) < HEADER_BYTES:
        return 0
    sequence: int = HEADER.unpack(head)[3]
    return sequence


def find_record(data: bytes, offset: int) -> int | None:
    """The first offset at or after `offset`, at any byte, where a record with both checksums right begins."""
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
