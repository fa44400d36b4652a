"""The router's journal: every fact it was told, and what it decided, one JSON object per line.

    {"router":{...},"engines":[...],"format":1}
    {"fact":{"type":"RequestOffered",...},"routed":{...},"digest":"..."}

`verify_router` replays it with a router made from the first line: equal facts give equal decisions. Facts that cross to
an engine are found in its own journal under the same request id, which is never used twice.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from lockstep.core.errors import LockstepError
from lockstep.core.events import RequestId
from lockstep.core.journal import JournalError
from lockstep.core.router import EngineShare, RequestRouted, Router, RouterConfig, RouterFact

FILE = "router.jsonl"
FORMAT = 1


class RouterHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line."""

    router: RouterConfig
    engines: tuple[EngineShare, ...]
    format: int = FORMAT


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Every other line."""

    fact: RouterFact
    routed: RequestRouted | None = None
    digest: str = ""  # of all decisions so far, where there is one


class NoRouterJournal:
    """For runs that are only measured."""

    def append(self, fact: RouterFact, routed: RequestRouted | None, digest: bytes) -> None:
        """Forget."""


class RouterJournal:
    """Writes `router.jsonl`. Raises JournalError if the folder has one."""

    def __init__(self, folder: Path, config: RouterConfig, engines: tuple[EngineShare, ...]) -> None:
        self._encode = msgspec.json.Encoder().encode
        path = folder / FILE
        if path.exists():
            raise JournalError(f"{path} is there already\nhint: choose another run folder")
        self._file: IO[bytes] = path.open("xb")
        self._file.write(self._encode(RouterHeader(router=config, engines=engines)) + b"\n")

    def append(self, fact: RouterFact, routed: RequestRouted | None, digest: bytes) -> None:
        """Record one fact and what followed."""
        record = RouterRecord(fact=fact, routed=routed, digest=digest.hex() if routed is not None else "")
        self._file.write(self._encode(record) + b"\n")

    def __enter__(self) -> RouterJournal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def engines_of(folder: Path, requests: Collection[RequestId]) -> dict[int, list[RequestId]]:
    """Where the router of a run folder sent these requests, by engine. Raises JournalError for what is no journal."""
    wanted, found = frozenset(requests), dict[int, list[RequestId]]()
    decode = msgspec.json.Decoder(RouterRecord).decode
    path = folder / FILE
    try:
        with path.open("rb") as file:
            next(file, None)
            for line in file:
                routed = decode(line).routed
                if routed is not None and routed.engine is not None and routed.request_id in wanted:
                    found.setdefault(routed.engine, []).append(routed.request_id)
    except (OSError, msgspec.MsgspecError) as error:
        raise JournalError(f"{path} cannot be read: {error}") from error
    return found


class RouterDivergence(LockstepError):
    """The replay decided something else."""


def verify_router(folder: Path) -> tuple[int, int]:
    """Replay the router of a run folder; return how many facts and decisions it has.

    Raises: RouterDivergence with the first line that differs; JournalError for a file that cannot be read.
    """
    path = folder / FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error
    decode = msgspec.json.Decoder(RouterRecord).decode
    decisions = 0
    try:
        header = msgspec.json.decode(lines[0], type=RouterHeader)
        router = Router(header.router, header.engines)
        for number, line in enumerate(lines[1:-1], 2):
            record = decode(line)
            routed = router.step(record.fact)
            if routed != record.routed or (routed is not None and router.digest.hex() != record.digest):
                raise RouterDivergence(f"{path}, line {number}: recorded {record.routed}, replayed {routed}")
            decisions += routed is not None
    except msgspec.MsgspecError as error:
        raise JournalError(f"{path} is no journal of a router: {error}") from error
    if lines[-1]:
        raise JournalError(f"{path}: the last line is cut off after {len(lines[-1])} bytes")
    return len(lines) - 2, decisions
