"""A journal from which an engine can be restored: segments begin with snapshots, and old segments expire.

    segment 6  header | snapshot | events ...       `recovery` needs only the newest segment that begins with an intact
    segment 7  header | snapshot | events ...        snapshot and the segments after it
    segment 8  header | snapshot | events ... torn

A snapshot is taken between two events, at most every `Retention.snapshot_s` seconds, and so rarely that snapshots take
at most a hundredth of the time. Beside the engine's state it stores the origins of open requests, which recovery needs
(`HostImage`).

With content "digests" the journal leaves out prompts, outputs and other text. It then has no snapshots, because they
contain text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    BatchFinished,
    ObservedEvent,
    RequestArrived,
    RequestId,
    TokenDigest,
    TokensForced,
)
from lockstep.core.contract.samples import sample_count
from lockstep.core.journal import snapshot
from lockstep.core.journal.records import (
    DIGEST_BYTES,
    HEADER_BYTES,
    SNAPSHOTS_ALL_KEPT,
    SNAPSHOTS_KEPT,
    first_sequence,
)
from lockstep.core.journal.segments import snapshot_name
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.requests.table import prompt_bytes
from lockstep.core.scheduler.engine import Engine
from lockstep.host.adapters import AdaptersLog
from lockstep.host.weights import WeightsLog

Content = Literal["full", "digests"]
LOOK_EVERY = 64  # events between two reads of the clock
COST_SHARE = 0.01  # largest share of the time that snapshots take
RECENT_S = 60.0  # the end of a request may take this long to reach its client; younger segments do not expire
OLD_SNAPSHOTS_MAX = SNAPSHOTS_ALL_KEPT
"""Old snapshots, at which a shortened journal may begin; beyond, every second one is dropped."""


class HostImage(msgspec.Struct, forbid_unknown_fields=True):
    """State of a host beside the engine's state, stored in snapshots."""

    origins: dict[str, tuple[RequestId, int]] = {}  # of open requests: id of the first sample, samples
    newest: dict[str, int] = {}  # by sender: the highest number of an arrival in the journal
    suspects: dict[RequestId, int] = {}  # on probation, see recovery: output tokens each had when the engine died
    running_max: int | None = None  # max_running_requests before probation; None without suspects
    alone: dict[RequestId, int] = {}  # how often the engine was killed while only this suspect was on trial
    strikes: dict[str, int] = {}  # by origin: how often the step of its arrival raised
    weights: WeightsLog = msgspec.field(default_factory=WeightsLog)
    adapters: AdaptersLog | msgspec.UnsetType = msgspec.UNSET  # set for an engine with adapter slots


def image_of(config: SchedConfig) -> HostImage:
    """Return the image of the host of a new engine."""
    return HostImage(adapters=AdaptersLog()) if config.max_loras else HostImage()


_encode = msgspec.msgpack.Encoder().encode


def read_image(data: bytes) -> HostImage:
    """Decode the host's part of a snapshot. Raises ValueError if it cannot be decoded."""
    part = snapshot.host_part(data)
    if not part:
        return HostImage()
    try:
        return msgspec.msgpack.decode(part, type=HostImage)
    except msgspec.DecodeError as error:
        raise ValueError(f"the host's part of the snapshot cannot be decoded: {error}") from error


def sender_and_number(origin: str) -> tuple[str, int]:
    """Split an origin SENDER/NUMBER; the numbers of a sender rise. Returns (origin, 0) for any other text."""
    sender, _, number = origin.rpartition("/")
    return (sender, int(number)) if number.isdecimal() else (origin, 0)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The limits within which segments and snapshots of a journal are kept.

    Args:
        snapshot_s: least seconds between two snapshots.
        bytes_max: bytes of all segments and snapshots. The part that recovery needs stays, whatever its size.
        age_s: seconds after its end at which a segment expires; None: no segment expires by age.
    """

    snapshot_s: float = 30.0
    bytes_max: int = 1 << 30
    age_s: float | None = None


class DurableJournal:
    """The journal of a host, with snapshots and expiry. Used only in the host's thread.

    Args:
        engine: the engine that steps the events. At each call its state includes the newest appended event.
        image: state of the host before a restart.
    """

    def __init__(
        self,
        writer: JournalWriter,
        engine: Engine,
        retention: Retention,
        *,
        image: HostImage | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.writer, self.engine, self.retention = writer, engine, retention
        self.image = image or HostImage()
        self.digests_only = writer.header.content == "digests"
        self._now_s = now_s
        self._due_s = now_s() + retention.snapshot_s
        self._until_look = LOOK_EVERY
        self._openings: dict[Path, str] = {}  # by segment: the name of a snapshot at its beginning

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Record one event and the digest of its Step; take a snapshot after it if one is due."""
        if isinstance(event, RequestArrived) and event.origin:
            sender, number = sender_and_number(event.origin)
            self.image.origins[event.origin] = (event.request_id, sample_count(event))
            self.image.newest[sender] = max(number, self.image.newest.get(sender, -1))
        self.writer.append(_without_content(event) if self.digests_only else event, digest)
        self._until_look -= 1
        if not self._until_look:
            self._until_look = LOOK_EVERY
            if self._now_s() >= self._due_s:
                self.begin_segment()

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Record an event whose step raised."""
        self.writer.append_unsealed(_without_content(event) if self.digests_only else event)

    def flush(self) -> None:
        """Write buffered records to the operating system."""
        self.writer.flush()

    def begin_segment(self, *, expire: bool = True) -> None:
        """Take a snapshot, begin a segment with it, and drop expired segments and snapshots."""
        began_s = self._now_s()
        if not self.digests_only:
            self._forget_ended()
            data = snapshot.dump(self.engine, _encode(self.image))
            self.writer.begin_segment(data, self.engine.digest)
        if expire:
            self.expire()
        took_s = self._now_s() - began_s
        self._due_s = self._now_s() + max(self.retention.snapshot_s, took_s / COST_SHARE)

    def close(self) -> None:
        """Write the end record."""
        self.writer.close()

    def _forget_ended(self) -> None:
        requests, image = self.engine.requests, self.image
        image.origins = {
            origin: (first, samples)
            for origin, (first, samples) in image.origins.items()
            if any(first + sample in requests for sample in range(samples))
        }
        for request_id in [one for one in image.suspects if one not in requests]:
            del image.suspects[request_id]

    def expire(self) -> None:
        """Drop the oldest segments while they are older than `age_s`, or all segments exceed `bytes_max`."""
        folder = self.writer.folder
        segments = sorted(folder.glob("*.log"))
        if time.time() - segments[0].stat().st_mtime < RECENT_S:
            return
        openings = self._openings = {
            path: self._openings[path] if path in self._openings else _opening(path) for path in segments
        }
        there = {path.name for path in folder.glob("snapshot-*")}
        starts = segments if self.digests_only else [path for path in segments if openings[path] in there]
        needed = starts[-SNAPSHOTS_KEPT:]  # for recovery, also if the newest snapshot is damaged
        first = self._first_kept(segments, [*starts[:-SNAPSHOTS_KEPT], *needed[:1]])
        old = [path for path in starts if first < path and time.time() - path.stat().st_mtime >= RECENT_S]
        thinned = old[::2] if len(old) > OLD_SNAPSHOTS_MAX else old
        kept = [path for path in starts if path not in old or path in thinned]
        names = {openings[path] for path in (first, *kept, *needed)}
        self.writer.drop_before(int(first.stem), names)

    def _first_kept(self, segments: list[Path], starts: list[Path]) -> Path:
        """Return the segment with which the journal begins from now on, out of the possible ones in `starts`."""
        snapshots = {path.name: path.stat().st_size for path in self.writer.folder.glob("snapshot-*")}
        sizes = {path: path.stat().st_size + snapshots.get(self._openings[path], 0) for path in segments}
        first, now_s, age_s = segments[0], time.time(), self.retention.age_s
        for start in starts:
            if start <= first:
                continue
            kept = sum(size for path, size in sizes.items() if path >= first)
            ended_s = segments[segments.index(start) - 1].stat().st_mtime
            fits = kept <= self.retention.bytes_max and (age_s is None or now_s - ended_s <= age_s)
            if fits or now_s - ended_s < RECENT_S:
                break
            first = start
        return first


def _opening(path: Path) -> str:
    """Return the name that a snapshot at the beginning of a segment has: its sequence number follows the header's."""
    with path.open("rb") as file:
        return snapshot_name(first_sequence(file.read(HEADER_BYTES)) + 1)


def _without_content(event: ObservedEvent) -> ObservedEvent:
    """Return the event with lengths and digests in place of its content."""
    if isinstance(event, RequestArrived):
        try:
            tokens = prompt_bytes(event.prompt)
        except ValueError:
            tokens = b""
        prompt = TokenDigest(len(tokens) // 4, blake2b(tokens, digest_size=DIGEST_BYTES).digest())
        grammar = msgspec.structs.replace(event.grammar, source="") if event.grammar is not None else None
        return msgspec.structs.replace(event, prompt=prompt, stop_texts=(), stop_regexes=(), grammar=grammar, label="")
    if isinstance(event, BatchFinished):
        return msgspec.structs.replace(event, tokens=b"", logprobs=b"", top_ids=b"", top_logprobs=b"")
    if isinstance(event, TokensForced):
        forced = tuple([(request_id, first, bytes(len(ids))) for request_id, first, ids in event.forced])
        return msgspec.structs.replace(event, forced=forced)
    return event
