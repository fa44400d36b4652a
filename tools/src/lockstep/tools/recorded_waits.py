"""The waits of requests in a recorded run, by strict replays that run beside other work of this process.

    with RecordedWaits(Path("runs/chat")) as waits:
        ...                                     # a simulation, which takes as long
        waits.of([17, 400])[17].by_cause

Long journals are replayed to their end, from the start of the `with` block, each in a separate process: the requests of
interest are not determined by then. Short journals are replayed in this process on the first query, until the last of
the queried requests has ended, because a process would take longer to start. With one core this holds for all journals.
The results are the same.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType

import msgspec

from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import RequestId
from lockstep.host.router_journal import Route, engines_of, has_router, routes_of
from lockstep.sim.cluster.simulate import DECODE
from lockstep.sim.run.process_pool import end_processes, fresh_processes
from lockstep.sim.run.simulate import collecting_seldom
from lockstep.tools.runs import Walk, engine_runs
from lockstep.tools.waits import Waited, WaitFold

PROCESS_BYTES_MIN = 8 << 20  # bytes of journals: some seconds of replay, while a process takes one second to start

Waits = dict[RequestId, Waited]
_WAITS = msgspec.msgpack.Decoder(list[Waited])


class SimulatedWaits:
    """Waits and routes of the requests of a simulation, recorded while it ran."""

    def __init__(self, waits: Waits, routes: Mapping[RequestId, Route]) -> None:
        self._waits = waits
        self._routes = routes

    def of(self, ids: Collection[RequestId]) -> Waits:
        """Return the waits of these requests, as RecordedWaits."""
        return {request_id: self._waits[request_id] for request_id in ids if request_id in self._waits}

    def routes(self, ids: Collection[RequestId]) -> Mapping[RequestId, Route]:
        """Return the routes of these requests, as RecordedWaits."""
        return {request_id: self._routes[request_id] for request_id in ids if request_id in self._routes}


class RecordedWaits:
    """Waits and routes of the requests of a run folder, of one engine or a cluster.

    A context manager, whose exit ends the replays. With handover between engines there are no waits, because each
    engine has only a part of a wait.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool: ProcessPoolExecutor | None = None
        self._coming: dict[Path, Future[bytes]] = {}

    def __enter__(self) -> RecordedWaits:
        folders = [] if _hands_over(self._folder) else engine_runs(self._folder) or [self._folder]
        sizes = {folder: _journal_bytes(folder) for folder in folders}
        workers = min(len(folders), usable_cores())
        if usable_cores() > 1 and sum(sizes.values()) >= PROCESS_BYTES_MIN:
            self._pool = fresh_processes(workers)
            longest_first = sorted(folders, key=lambda folder: -sizes[folder])
            self._coming = {folder: self._pool.submit(_encoded, str(folder)) for folder in longest_first}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            end_processes(self._pool)

    def of(self, ids: Collection[RequestId]) -> Waits:
        """Return the waits of these requests, without requests that reached no engine. Raises as a strict replay."""
        if not ids or _hands_over(self._folder):
            return {}
        if not has_router(self._folder):
            return self._waits_in(self._folder, ids)
        found: Waits = {}
        for engine, names in sorted(engines_of(self._folder, ids).items()):
            noted = self._waits_in(self._folder / "engines" / str(engine), list(names))
            found |= {names[own]: one for own, one in noted.items()}
        return found

    def routes(self, ids: Collection[RequestId]) -> Mapping[RequestId, Route]:
        """Return the routes of these requests, without rejected ones; empty without a router."""
        is_routed = has_router(self._folder) and not _hands_over(self._folder)
        return routes_of(self._folder, ids) if is_routed and ids else {}

    def _waits_in(self, folder: Path, ids: Collection[RequestId]) -> Waits:
        coming = self._coming.get(folder)
        data = b""
        if coming is not None:
            try:
                data = coming.result()
            except BrokenProcessPool:  # the process was killed
                self._coming.clear()
        if not data:
            return waits_of(folder, ids)
        wanted = frozenset(ids)
        return {one.request_id: one for one in _WAITS.decode(data) if one.request_id in wanted}


def waits_of(folder: Path, ids: Collection[RequestId] | None = None) -> Waits:
    """Return the waits of the requests of one journal; with `ids` only of these, and replayed until they have ended."""
    fold, walk = WaitFold(), Walk(folder)
    wanted = None if ids is None else frozenset(ids)
    ended = 0
    with collecting_seldom():
        for _, event, step in walk:
            fold.observe(event, step, walk.engine)
            if wanted is not None and len(fold.done) > ended:
                ended = len(fold.done)
                if fold.done.keys() >= wanted:
                    break
    found = fold.close()
    return {request_id: found[request_id] for request_id in _known(wanted, found)}


def _known(wanted: Collection[RequestId] | None, found: Waits) -> Iterable[RequestId]:
    return list(found) if wanted is None else [request_id for request_id in wanted if request_id in found]


def _encoded(folder: str) -> bytes:
    """Return the encoded waits of a journal, in a pool process. Empty if the replay fails: the caller repeats it."""
    try:
        return msgspec.msgpack.encode(list(waits_of(Path(folder)).values()))
    except (LockstepError, OSError):
        return b""


def _hands_over(folder: Path) -> bool:
    return (folder / DECODE).is_dir()


def _journal_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "journal").glob("*"))


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
