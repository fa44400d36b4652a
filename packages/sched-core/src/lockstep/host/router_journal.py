"""The router's journal: every fact that the router received, and its decisions, framed as an engine's journal is.

    run/router/00000000.log     one segment per life of a router: its settings, then its facts
    run/router.jsonl            of earlier versions: JSON lines, without checksums, chain and end

An event record has the digest of all decisions so far, then a `RouterRecord`. With a waiting queue at the router the
header has `dispatch`, and records have `decided`, several decisions. `router_check.py` replays the journal.

A server begins a new life at each start, and when a segment has become large. Sequence and chain go on over all lives,
so a segment that is missing between two others is noticed. The oldest segments expire.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypedDict

import msgspec

from lockstep.core.cluster.dispatch import DispatchConfig, DispatchFact
from lockstep.core.cluster.router import (
    EngineShare,
    RequestEnded,
    RequestOffered,
    RequestRouted,
    RouterConfig,
    RouteReason,
)
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestId
from lockstep.core.journal.reader import FrameScan, cut_tail, scan_folder, start_of
from lockstep.core.journal.records import (
    CORE_VERSION,
    DIGEST_BYTES,
    FORMAT_VERSION,
    KIND_END,
    KIND_EVENT,
    KIND_HEADER,
    NO_CHAIN,
    Frame,
    JournalCorrupt,
    JournalEnd,
    JournalError,
    OnlyVersion,
    Tail,
)
from lockstep.core.journal.segments import segment_name
from lockstep.core.journal.writer import RecordWriter

FOLDER = "router"
OLD_FILE = "router.jsonl"
OLD_FORMAT = 1
SEGMENT_BYTES_MAX = 1 << 62  # segments do not rotate by size: each is the life of one router


class RouterHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings with which a router begins. It is the first line of an old file."""

    router: RouterConfig
    engines: tuple[EngineShare, ...]
    format: int = OLD_FORMAT
    dispatch: DispatchConfig | msgspec.UnsetType = msgspec.UNSET


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header record of a segment."""

    router: RouterConfig
    engines: tuple[EngineShare, ...]
    dispatch: DispatchConfig | msgspec.UnsetType = msgspec.UNSET
    journal_of: str = "router"  # read by `OnlyVersion`, as is the version
    format_version: int = FORMAT_VERSION
    core_version: str = CORE_VERSION
    segment: int = 0  # filled in by the writer, as are the next three
    first_sequence: int = 0
    previous_chain: bytes = NO_CHAIN
    first_step: int = 0


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fact and the decisions that follow from it."""

    fact: DispatchFact
    routed: RequestRouted | None = None
    decided: tuple[RequestRouted, ...] = ()  # by a Dispatcher
    digest: str = ""  # of all decisions so far; "" for a line of an old file without a decision
    label: str = ""  # `label_key` of a request offered to the waiting queue; if it ends there no engine journal has it


def label_key(label: str, tenant: str) -> str:
    """Return the key of a tenant's label. It can be computed from the label, but the label not from the key."""
    return session_key(f"{tenant}\0{label}") if label else ""


def session_key(name: str) -> str:
    """Return the router's name of a session, with which sessions are compared. It hides the client's name."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


# -------------------------------------------------------------------------------------------------------------- writing


class NoRouterJournal:
    """A router journal that stores nothing, for runs that are only measured."""

    size_bytes = 0

    def append(self, fact: DispatchFact, routed: RequestRouted | None, digest: bytes) -> None:
        """Do nothing."""

    def append_decided(
        self, fact: DispatchFact, decided: tuple[RequestRouted, ...], digest: bytes, label: str = ""
    ) -> None:
        """Do nothing."""

    def close(self, reason: str = "closed") -> None:
        """Do nothing."""


class RouterJournal:
    """Writes the journal of a router.

    Args:
        live: write every record to the operating system at once, so that it survives the process.
        dispatch: settings of the router's waiting queue, if it has one.
        bytes_max: continue the journal in the folder; its oldest segments expire beyond this size. None: the folder
            must have no journal of a router.
    Raises: JournalError if there is a journal and must not be; JournalCorrupt if its last segment is.
    """

    def __init__(
        self,
        folder: Path,
        config: RouterConfig,
        engines: tuple[EngineShare, ...],
        dispatch: DispatchConfig | None = None,
        *,
        live: bool = False,
        bytes_max: int | None = None,
    ) -> None:
        self._folder, self._live, self._bytes_max = folder / FOLDER, live, bytes_max
        if bytes_max is None and has_router(folder):
            raise JournalError(f"{folder} already has the journal of a router\nhint: choose another run folder")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise JournalError(f"cannot make {self._folder}: {error}") from error
        end = _end_of(self._folder)
        self._expire()
        self._writer: RecordWriter[RouterRecord] = RecordWriter(
            self._folder,
            _header(config, engines, dispatch),
            durability="none",
            segment_bytes=SEGMENT_BYTES_MAX,
            **end,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of this router's segment that have been written."""
        return self._writer.segment_bytes

    def append(self, fact: DispatchFact, routed: RequestRouted | None, digest: bytes) -> None:
        """Record one fact and the decision of a Router, if there is one."""
        self._append(RouterRecord(fact=fact, routed=routed), digest)

    def append_decided(
        self, fact: DispatchFact, decided: tuple[RequestRouted, ...], digest: bytes, label: str = ""
    ) -> None:
        """Record one fact and the decisions of a Dispatcher.

        Args:
            label: `label_key` of a request that is offered.
        """
        self._append(RouterRecord(fact=fact, decided=decided, label=label), digest)

    def _append(self, record: RouterRecord, digest: bytes) -> None:
        self._writer.append(record, digest)
        if self._live:
            self._writer.flush()

    def begin_life(
        self, config: RouterConfig, engines: tuple[EngineShare, ...], dispatch: DispatchConfig | None = None
    ) -> None:
        """Begin the segment of another router."""
        self._writer.rotate(_header(config, engines, dispatch))
        self._expire(keep=1)

    def _expire(self, keep: int = 0) -> None:
        """Delete old files, then the oldest segments, beyond `bytes_max`; `keep` segments are not counted."""
        if self._bytes_max is None:
            return
        segments = sorted(self._folder.glob("*.log"))
        files = [path for path in old_files(self._folder.parent) if path.exists()] + segments[: len(segments) - keep]
        try:
            while files and sum(path.stat().st_size for path in files) > self._bytes_max:
                files.pop(0).unlink()
        except OSError as error:
            raise JournalError(f"cannot delete the oldest segments in {self._folder}: {error}") from error

    def close(self, reason: str = "closed") -> None:
        """Write the end record and close the file."""
        self._writer.close(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._writer.__exit__(kind, error, at)


def _header(config: RouterConfig, engines: tuple[EngineShare, ...], dispatch: DispatchConfig | None) -> SegmentHeader:
    return SegmentHeader(router=config, engines=engines, dispatch=msgspec.UNSET if dispatch is None else dispatch)


class _End(TypedDict, total=False):
    """The end of the journal that a writer continues."""

    segment: int
    sequence: int
    steps: int
    chain: bytes


def _end_of(folder: Path) -> _End:
    """Return the end of the journal in a folder, after cutting a torn tail off. Only the last segment is read."""
    while segments := sorted(folder.glob("*.log")):
        tail = _tail_of(segments[-1])
        if tail.verdict == "clean":
            number = int(segments[-1].stem) + 1
            return {"segment": number, "sequence": tail.records, "steps": tail.steps, "chain": tail.chain}
        cut_tail(folder, segments[-1], functools.partial(_tail_of, segments[-1]))
    return {}


def _tail_of(segment: Path) -> Tail:
    scan = FrameScan([segment], start_of(segment))
    for _ in scan.frames():
        pass
    return scan.tail()


# -------------------------------------------------------------------------------------------------------------- reading


class RouterEntry(NamedTuple):
    """A header, with which a new router begins, or one of the records after it."""

    place: str  # for messages
    content: RouterHeader | RouterRecord


class RouterReader:
    """Reads the journal of a router: old files first, then segments.

    Args:
        folder: the run folder; for the router of decode engines its `decode` folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.old_files = [path for path in old_files(folder) if path.exists()]
        self.cut = ""  # message about an old file's incomplete last line, once `entries` has reached it
        self.tail: Tail | None = None  # set at the end of `entries`; None if there are only old files
        self.has_expired = False  # whether the oldest segments were deleted

    def entries(self) -> Iterator[RouterEntry]:
        """Yield every header and record in order; stop at a torn tail.

        Raises: JournalCorrupt at the damage; JournalError for a file that is not a router's journal.
        """
        if not has_router(self.folder):
            raise JournalError(f"{self.folder} holds no journal of a router: expected {FOLDER}/{segment_name(0)} in it")
        for path in self.old_files:
            yield from self._old_entries(path)
        if any((self.folder / FOLDER).glob("*.log")):
            yield from self._framed_entries()

    def repair(self) -> None:
        """Cut a torn tail off. Raises JournalError if the journal is being written."""
        _end_of(self.folder / FOLDER)

    def _old_entries(self, path: Path) -> Iterator[RouterEntry]:
        decode = msgspec.json.Decoder(RouterRecord).decode
        try:
            with path.open("rb") as file:
                yield RouterEntry(f"{path}, line 1", msgspec.json.decode(next(file, b""), type=RouterHeader))
                for number, line in enumerate(file, 2):
                    if not line.endswith(b"\n"):
                        self.cut = f"{path}: the last line is cut off after {len(line)} bytes"
                        return
                    yield RouterEntry(f"{path}, line {number}", decode(line))
        except (OSError, msgspec.MsgspecError, ConfigError) as error:
            raise JournalError(f"{path} is not the journal of a router: {error}") from error

    def _framed_entries(self) -> Iterator[RouterEntry]:
        decode = msgspec.msgpack.Decoder(RouterRecord).decode
        scan = scan_folder(self.folder / FOLDER)
        self.has_expired = bool(scan.first_segment)
        for frame in scan.frames():
            path = scan.segments[frame.segment]
            place = f"{path}, record {frame.sequence}"
            try:
                if frame.kind == KIND_HEADER:
                    entry = RouterEntry(place, _read_header(frame, path, scan.first_segment + frame.segment))
                elif frame.kind == KIND_EVENT:
                    digest = bytes(frame.payload[:DIGEST_BYTES]).hex()
                    record = decode(frame.payload[DIGEST_BYTES:])
                    entry = RouterEntry(place, msgspec.structs.replace(record, digest=digest))
                elif frame.kind == KIND_END:
                    msgspec.msgpack.decode(frame.payload, type=JournalEnd)
                    continue
                else:
                    raise JournalError(f"{place} is of a kind that no router writes: {frame.kind}")
            except (msgspec.MsgspecError, ConfigError) as error:
                raise JournalError(f"{place} is not of a router's journal: {error}") from error
            yield entry
        self.tail = scan.tail()
        if not self.tail.records:
            raise JournalError(
                f"{scan.segments[0]} does not begin with a whole header record; nothing in it can be read"
            )


def _read_header(frame: Frame, path: Path, number: int) -> RouterHeader:
    version = msgspec.msgpack.decode(frame.payload, type=OnlyVersion)
    if version.journal_of != "router":
        raise JournalError(f"{path} is the journal of an engine, expected that of a router")
    if version.format_version != FORMAT_VERSION:
        raise JournalError(
            f"{path} has format version {version.format_version}, this core reads format version {FORMAT_VERSION}"
        )
    header = msgspec.msgpack.decode(frame.payload, type=SegmentHeader)
    if frame.offset or header.segment != number or header.first_sequence != frame.sequence:
        raise JournalCorrupt(str(path), frame.offset, "segment header", f"it is that of segment {header.segment}")
    return RouterHeader(router=header.router, engines=header.engines, dispatch=header.dispatch)


def has_router(folder: Path) -> bool:
    """Whether a run folder has the journal of a router."""
    return any((folder / FOLDER).glob("*.log")) or any(path.exists() for path in old_files(folder))


def is_router_folder(folder: Path) -> bool:
    """Whether this is the folder of a router's segments, within a run folder."""
    return folder.name == FOLDER and any(folder.glob("*.log"))


def router_parts(run: Path) -> list[Path]:
    """Return the folders of a cluster's run that hold the journal of a router; see `RouterReader`."""
    return [run, run / "decode"] if (run / "decode").is_dir() else [run]


def old_files(folder: Path) -> list[Path]:
    """Return a router's files of JSON lines in a run folder, oldest first. The last one need not exist."""
    numbered = [path for path in folder.glob("router-*.jsonl") if path.stem.partition("-")[2].isdecimal()]
    return [*sorted(numbered, key=lambda path: int(path.stem.partition("-")[2])), folder / OLD_FILE]


# --------------------------------------------------------------------------------------------------- routes of requests


class Route(NamedTuple):
    """The engine of a request, the reason, and the request's id on that engine.

    The first `matched_tokens` tokens of the prompt were sent to that engine before; 0 if the policy ignores prompts.
    """

    engine: int
    reason: RouteReason
    own_id: RequestId
    matched_tokens: int


def routes_of(folder: Path, requests: Collection[RequestId]) -> dict[RequestId, Route]:
    """Return the routes of requests in a simulated run, without rejected requests.

    With a waiting queue at the router, an engine's ids number the requests in the order in which they were sent.
    Otherwise they equal the router's ids.
    Raises: JournalError for a file that is not a router's journal.
    """
    selected, found = frozenset(requests), dict[RequestId, Route]()
    own_ids = OwnIds()
    for _, record in RouterReader(folder).entries():
        if isinstance(record, RouterRecord):
            for engine, own_id, routed in own_ids.sent_by(record):
                if routed.request_id in selected:
                    found[routed.request_id] = Route(engine, routed.reason, own_id, routed.matched_tokens)
    return found


class OwnIds:
    """Numbers the requests of a simulated run as its engines do."""

    def __init__(self) -> None:
        self._sent = 0

    def sent_by(self, record: RouterRecord) -> Iterator[tuple[int, RequestId, RequestRouted]]:
        """Yield the engine, the id there, and the decision, for every request that a record sends to an engine."""
        for routed in record.decided if record.routed is None else (record.routed,):
            if routed.engine is not None:
                yield routed.engine, self._sent if record.routed is None else routed.request_id, routed
                self._sent += 1


def engines_of(folder: Path, requests: Collection[RequestId]) -> dict[int, dict[RequestId, RequestId]]:
    """Return by engine, and by request id on the engine, the router's request ids. Raises as `routes_of`."""
    found = dict[int, dict[RequestId, RequestId]]()
    for request_id, route in routes_of(folder, requests).items():
        found.setdefault(route.engine, {})[route.own_id] = request_id
    return found


class LeftQueue(NamedTuple):
    """A request that ended in the router's waiting queue. No engine's journal has it."""

    request_id: RequestId  # the router's id
    label: str  # `label_key`; "" without a label, or in a journal from before labels were stored
    tenant: str
    prompt_tokens: int
    came_us: int
    left_us: int
    reason: RouteReason | Literal["cancelled"]


def has_queue(folder: Path) -> bool:
    """Whether this run's first router has a waiting queue. Raises JournalError for what is not a router's journal."""
    first = next(RouterReader(folder).entries()).content
    return isinstance(first, RouterHeader) and isinstance(first.dispatch, DispatchConfig)


def left_in_queue(folder: Path) -> list[LeftQueue]:
    """Return the requests that ended in the router's waiting queue, cancelled or refused, in the order of their ends.

    A torn tail, and an incomplete last line of an old file, are ignored.
    Raises: JournalError for a file that is not a router's journal.
    """
    left: list[LeftQueue] = []
    waiting = dict[RequestId, RouterRecord]()
    queue = False
    for _, record in RouterReader(folder).entries():
        if isinstance(record, RouterHeader):
            queue = isinstance(record.dispatch, DispatchConfig)
            waiting.clear()  # the next router is offered them again
            continue
        if not queue:
            continue
        fact = record.fact
        if isinstance(fact, RequestOffered):
            waiting[fact.request_id] = record
        elif isinstance(fact, RequestEnded) and fact.request_id in waiting:
            left.append(_left(waiting.pop(fact.request_id), fact.time_us, "cancelled"))
        for routed in record.decided:
            if routed.reason == "waits" or (offered := waiting.pop(routed.request_id, None)) is None:
                continue
            if routed.engine is None:  # refused
                left.append(_left(offered, fact.time_us, routed.reason))
    return left


def _left(offered: RouterRecord, left_us: int, reason: RouteReason | Literal["cancelled"]) -> LeftQueue:
    fact = offered.fact
    assert isinstance(fact, RequestOffered)
    return LeftQueue(fact.request_id, offered.label, fact.tenant, fact.prompt_tokens, fact.time_us, left_us, reason)
