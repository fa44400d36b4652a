"""The router's journal: every fact that the router received, and its decisions, one JSON object per line.

    {"router":{...},"engines":[...],"format":1}
    {"fact":{"type":"RequestOffered",...},"routed":{...},"digest":"..."}

With a waiting queue at the router the first line has `dispatch`, and other lines have `decided`, several decisions.

`verify_router` replays the journal with a router made from the first line: equal facts result in equal decisions. A
request that was sent to an engine is also in the engine's journal: in a simulation under the same request id, in a
server under the request's origin.

A server begins a new file at each start, and when a file has become large. Earlier files are router-0.jsonl and so on.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, NamedTuple

import msgspec

from lockstep.core.cluster.dispatch import DispatchConfig, Dispatcher, DispatchFact, ProbeAnswered
from lockstep.core.cluster.router import (
    EngineShare,
    RequestEnded,
    RequestOffered,
    RequestRouted,
    Router,
    RouterConfig,
    RouteReason,
)
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import RequestId
from lockstep.core.journal.records import JournalError

FILE = "router.jsonl"
FORMAT = 1


class RouterHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a router's journal."""

    router: RouterConfig
    engines: tuple[EngineShare, ...]
    format: int = FORMAT
    dispatch: DispatchConfig | msgspec.UnsetType = msgspec.UNSET


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A line after the first: one fact and the decisions that follow from it."""

    fact: DispatchFact
    routed: RequestRouted | None = None
    decided: tuple[RequestRouted, ...] = ()  # by a Dispatcher
    digest: str = ""  # of all decisions so far; "" for a line without a decision
    label: str = ""  # `label_key` of a request offered to the waiting queue; if it ends there no engine journal has it


def label_key(label: str, tenant: str) -> str:
    """Return the key of a tenant's label. It can be computed from the label, but the label not from the key."""
    return session_key(f"{tenant}\0{label}") if label else ""


def session_key(name: str) -> str:
    """Return the router's name of a session, with which sessions are compared. It hides the client's name."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class NoRouterJournal:
    """A router journal that stores nothing, for runs that are only measured."""

    size_bytes = 0

    def append(self, fact: DispatchFact, routed: RequestRouted | None, digest: bytes) -> None:
        """Do nothing."""

    def append_decided(
        self, fact: DispatchFact, decided: tuple[RequestRouted, ...], digest: bytes, label: str = ""
    ) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class RouterJournal:
    """Writes `router.jsonl`. Raises JournalError if the folder has one.

    Args:
        live: write every line to the operating system at once, so that it survives the process.
        dispatch: settings of the router's waiting queue, if it has one.
    """

    def __init__(
        self,
        folder: Path,
        config: RouterConfig,
        engines: tuple[EngineShare, ...],
        dispatch: DispatchConfig | None = None,
        *,
        live: bool = False,
    ) -> None:
        self._encode = msgspec.json.Encoder().encode
        self.size_bytes = 0
        path = folder / FILE
        if path.exists():
            raise JournalError(f"{path} exists already\nhint: choose another run folder")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "wb", buffering=0 if live else -1)
        queue = msgspec.UNSET if dispatch is None else dispatch
        self._write(RouterHeader(router=config, engines=engines, dispatch=queue))

    def append(self, fact: DispatchFact, routed: RequestRouted | None, digest: bytes) -> None:
        """Record one fact and the decision of a Router, if there is one."""
        record = RouterRecord(fact=fact, routed=routed, digest=digest.hex() if routed is not None else "")
        self._write(record)

    def _write(self, line: msgspec.Struct) -> None:
        data = self._encode(line) + b"\n"
        self._file.write(data)
        self.size_bytes += len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def append_decided(
        self, fact: DispatchFact, decided: tuple[RequestRouted, ...], digest: bytes, label: str = ""
    ) -> None:
        """Record one fact and the decisions of a Dispatcher.

        Args:
            label: `label_key` of a request that is offered.
        """
        self._write(RouterRecord(fact=fact, decided=decided, digest=digest.hex() if decided else "", label=label))

    def __enter__(self) -> RouterJournal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


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
    decode = msgspec.json.Decoder(RouterRecord).decode
    path = folder / FILE
    sent = 0
    try:
        with path.open("rb") as file:
            next(file, None)
            for line in file:
                record = decode(line)
                for routed in record.decided if record.routed is None else (record.routed,):
                    if routed.engine is None:
                        continue
                    own = routed.request_id if record.routed is not None else sent
                    sent += 1
                    if routed.request_id in selected:
                        found[routed.request_id] = Route(routed.engine, routed.reason, own, routed.matched_tokens)
    except (OSError, msgspec.MsgspecError) as error:
        raise JournalError(f"{path} cannot be read: {error}") from error
    return found


def engines_of(folder: Path, requests: Collection[RequestId]) -> dict[int, dict[RequestId, RequestId]]:
    """Return by engine, and by request id on the engine, the router's request ids. Raises as `routes_of`."""
    found = dict[int, dict[RequestId, RequestId]]()
    for request_id, route in routes_of(folder, requests).items():
        found.setdefault(route.engine, {})[route.own_id] = request_id
    return found


def set_aside(folder: Path, bytes_max: int) -> None:
    """Make room for a new `router.jsonl`: number the present file, and delete the oldest files beyond `bytes_max`."""
    numbered = router_files(folder)[:-1]
    if (folder / FILE).exists():
        number = 1 + int(numbered[-1].stem.partition("-")[2]) if numbered else 0
        numbered.append((folder / FILE).rename(folder / f"router-{number}.jsonl"))
    while sum(path.stat().st_size for path in numbered) > bytes_max:
        numbered.pop(0).unlink()


def router_files(folder: Path) -> list[Path]:
    """Return the router's files in a run folder, oldest first. `router.jsonl` is last, even if it does not exist."""
    numbered = [path for path in folder.glob("router-*.jsonl") if path.stem.partition("-")[2].isdecimal()]
    return [*sorted(numbered, key=lambda path: int(path.stem.partition("-")[2])), folder / FILE]


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
    """Whether this run's router has a waiting queue. Raises JournalError for a file that is not a router's journal."""
    try:
        with (folder / FILE).open("rb") as file:
            return isinstance(msgspec.json.decode(next(file, b""), type=RouterHeader).dispatch, DispatchConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise JournalError(f"{folder / FILE} cannot be read: {error}") from error


def left_in_queue(folder: Path) -> list[LeftQueue]:
    """Return the requests that ended in the router's waiting queue, cancelled or refused, in the order of their ends.

    An incomplete last line of a file is ignored.
    Raises: JournalError for a file that is not a router's journal.
    """
    decode = msgspec.json.Decoder(RouterRecord).decode
    left: list[LeftQueue] = []
    for path in router_files(folder):
        try:
            with path.open("rb") as file:
                header = msgspec.json.decode(next(file, b""), type=RouterHeader)
                if isinstance(header.dispatch, msgspec.UnsetType):
                    continue
                waiting = dict[RequestId, RouterRecord]()
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    record = decode(line)
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
        except (OSError, msgspec.MsgspecError) as error:
            raise JournalError(f"{path} cannot be read: {error}") from error
    return left


def _left(offered: RouterRecord, left_us: int, reason: RouteReason | Literal["cancelled"]) -> LeftQueue:
    fact = offered.fact
    assert isinstance(fact, RequestOffered)
    return LeftQueue(fact.request_id, offered.label, fact.tenant, fact.prompt_tokens, fact.time_us, left_us, reason)


class RouterDivergence(LockstepError):
    """The replay of a router's journal made another decision than the recorded one."""


def verify_router(folder: Path) -> tuple[int, int]:
    """Replay the router of a run folder; return the numbers of facts and decisions.

    Raises: RouterDivergence with the first line that differs; JournalError for a file that cannot be read.
    """
    counts = [_verify_file(path) for path in router_files(folder)]
    return sum(facts for facts, _ in counts), sum(decisions for _, decisions in counts)


def _verify_file(path: Path) -> tuple[int, int]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error
    decode = msgspec.json.Decoder(RouterRecord).decode
    decisions = 0
    try:
        header = msgspec.json.decode(lines[0], type=RouterHeader)
        router = Router(header.router, header.engines)
        dispatcher = None
        if not isinstance(header.dispatch, msgspec.UnsetType):
            dispatcher = Dispatcher(header.dispatch, header.router, header.engines)
        for number, line in enumerate(lines[1:-1], 2):
            record = decode(line)
            if dispatcher is not None:
                decided = dispatcher.step(record.fact)
                if decided != record.decided or (decided and dispatcher.digest.hex() != record.digest):
                    raise RouterDivergence(f"{path}, line {number}: recorded {record.decided}, replayed {decided}")
                decisions += len(decided)
                continue
            if isinstance(record.fact, ProbeAnswered):
                raise JournalError(f"{path}, line {number}: a router without a waiting queue receives no probes")
            routed = router.step(record.fact)
            if routed != record.routed or (routed is not None and router.digest.hex() != record.digest):
                raise RouterDivergence(f"{path}, line {number}: recorded {record.routed}, replayed {routed}")
            decisions += routed is not None
    except msgspec.MsgspecError as error:
        raise JournalError(f"{path} is not the journal of a router: {error}") from error
    if lines[-1]:
        raise JournalError(f"{path}: the last line is cut off after {len(lines[-1])} bytes")
    return len(lines) - 2, decisions
