"""The router's journal: every fact that the router took in, and its decisions, one JSON object per line.

    {"router":{...},"engines":[...],"format":1}
    {"fact":{"type":"RequestOffered",...},"routed":{...},"digest":"..."}

With a waiting queue at the router the first line has `dispatch`, and others have `decided`, several decisions.

`verify_router` replays it with a router made from the first line: equal facts give equal decisions. Facts that cross to
an engine are found in its own journal: of a simulation under the same request id, of a server by the request's origin.

A server begins a new file whenever it starts, and when one has become large; those before are router-0.jsonl and so on.
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
    """The first line."""

    router: RouterConfig
    engines: tuple[EngineShare, ...]
    format: int = FORMAT
    dispatch: DispatchConfig | msgspec.UnsetType = msgspec.UNSET


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Every other line."""

    fact: DispatchFact
    routed: RequestRouted | None = None
    decided: tuple[RequestRouted, ...] = ()  # by a Dispatcher
    digest: str = ""  # of all decisions so far, where there is one
    label: str = ""  # `label_key` of a request offered to the waiting queue: one that ends there is in no other journal


def label_key(label: str, tenant: str) -> str:
    """The key of a tenant's label: it can be found given the label, but the label cannot be read from it."""
    return session_key(f"{tenant}\0{label}") if label else ""


def session_key(name: str) -> str:
    """What a router calls a session: it needs to know whether two are the same, and not what clients call them."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class NoRouterJournal:
    """For runs that are only measured."""

    size_bytes = 0

    def append(self, fact: DispatchFact, routed: RequestRouted | None, digest: bytes) -> None:
        """Forget."""

    def append_decided(
        self, fact: DispatchFact, decided: tuple[RequestRouted, ...], digest: bytes, label: str = ""
    ) -> None:
        """Forget."""

    def close(self) -> None:
        """There is nothing to close."""


class RouterJournal:
    """Writes `router.jsonl`. Raises JournalError if the folder has one.

    Args:
        live: every line is written at once, so that it survives the process.
        dispatch: of the router's waiting queue, where there is one.
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
            raise JournalError(f"{path} is there already\nhint: choose another run folder")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "wb", buffering=0 if live else -1)
        queue = msgspec.UNSET if dispatch is None else dispatch
        self._write(RouterHeader(router=config, engines=engines, dispatch=queue))

    def append(self, fact: DispatchFact, routed: RequestRouted | None, digest: bytes) -> None:
        """Record one fact and what followed."""
        record = RouterRecord(fact=fact, routed=routed, digest=digest.hex() if routed is not None else "")
        self._write(record)

    def _write(self, line: msgspec.Struct) -> None:
        data = self._encode(line) + b"\n"
        self._file.write(data)
        self.size_bytes += len(data)

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()

    def append_decided(
        self, fact: DispatchFact, decided: tuple[RequestRouted, ...], digest: bytes, label: str = ""
    ) -> None:
        """Record one fact and what a Dispatcher decided; `label`: `label_key` of a request that is offered."""
        self._write(RouterRecord(fact=fact, decided=decided, digest=digest.hex() if decided else "", label=label))

    def __enter__(self) -> RouterJournal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


class Route(NamedTuple):
    """The engine of a request, the reason, and the request's id on that engine.

    `matched_tokens` of its beginning had been sent there before; 0 where the policy does not compare prompts.
    """

    engine: int
    reason: RouteReason
    own_id: RequestId
    matched_tokens: int


def routes_of(folder: Path, requests: Collection[RequestId]) -> dict[RequestId, Route]:
    """The routes of these requests in a simulated run; rejected ones are left out.

    With a waiting queue at the router, engines number requests in the order in which they were sent; otherwise they
    have the router's ids. Raises JournalError for a file that is no journal.
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
    """The same by engine: under which id there, and which it was. Raises JournalError for what is no journal."""
    found = dict[int, dict[RequestId, RequestId]]()
    for request_id, route in routes_of(folder, requests).items():
        found.setdefault(route.engine, {})[route.own_id] = request_id
    return found


def set_aside(folder: Path, bytes_max: int) -> None:
    """Make room for a new `router.jsonl`: the one there is gets a number, and the oldest go beyond so many bytes."""
    numbered = router_files(folder)[:-1]
    if (folder / FILE).exists():
        number = 1 + int(numbered[-1].stem.partition("-")[2]) if numbered else 0
        numbered.append((folder / FILE).rename(folder / f"router-{number}.jsonl"))
    while sum(path.stat().st_size for path in numbered) > bytes_max:
        numbered.pop(0).unlink()


def router_files(folder: Path) -> list[Path]:
    """The files of a router in a run folder, the oldest first, and `router.jsonl` at the end, be it there or not."""
    numbered = [path for path in folder.glob("router-*.jsonl") if path.stem.partition("-")[2].isdecimal()]
    return [*sorted(numbered, key=lambda path: int(path.stem.partition("-")[2])), folder / FILE]


class LeftQueue(NamedTuple):
    """A request that ended in the router's waiting queue: no engine's journal has it."""

    request_id: RequestId  # the router's number
    label: str  # `label_key`; empty where the client gave none, or the journal is of before they were kept
    tenant: str
    prompt_tokens: int
    came_us: int
    left_us: int
    reason: RouteReason | Literal["cancelled"]


def has_queue(folder: Path) -> bool:
    """Whether requests wait in front of this run's router. Raises JournalError for what is no journal."""
    try:
        with (folder / FILE).open("rb") as file:
            return isinstance(msgspec.json.decode(next(file, b""), type=RouterHeader).dispatch, DispatchConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise JournalError(f"{folder / FILE} cannot be read: {error}") from error


def left_in_queue(folder: Path) -> list[LeftQueue]:
    """Requests that ended in the router's waiting queue, cancelled or refused, in order; none without such a queue.

    An incomplete last line of a file is ignored. Raises JournalError for a file that is no journal.
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
    """The replay decided something else."""


def verify_router(folder: Path) -> tuple[int, int]:
    """Replay the router of a run folder; return how many facts and decisions it has.

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
        line_up = None
        if not isinstance(header.dispatch, msgspec.UnsetType):
            line_up = Dispatcher(header.dispatch, header.router, header.engines)
        for number, line in enumerate(lines[1:-1], 2):
            record = decode(line)
            if line_up is not None:
                decided = line_up.step(record.fact)
                if decided != record.decided or (decided and line_up.digest.hex() != record.digest):
                    raise RouterDivergence(f"{path}, line {number}: recorded {record.decided}, replayed {decided}")
                decisions += len(decided)
                continue
            if isinstance(record.fact, ProbeAnswered):
                raise JournalError(f"{path}, line {number}: a router without a waiting queue takes in no probes")
            routed = router.step(record.fact)
            if routed != record.routed or (routed is not None and router.digest.hex() != record.digest):
                raise RouterDivergence(f"{path}, line {number}: recorded {record.routed}, replayed {routed}")
            decisions += routed is not None
    except msgspec.MsgspecError as error:
        raise JournalError(f"{path} is no journal of a router: {error}") from error
    if lines[-1]:
        raise JournalError(f"{path}: the last line is cut off after {len(lines[-1])} bytes")
    return len(lines) - 2, decisions
