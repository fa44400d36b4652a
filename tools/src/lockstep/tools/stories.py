"""Stories of a few requests out of whole runs: each journal that has some is replayed once, several side by side.

A replay ends where the last request asked for has ended. Long journals are replayed in processes of their own, which
hand back the stories as bytes; short ones here, where a process would take longer to start than its work takes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lockstep.core.events import RequestId
from lockstep.host.router_journal import FILE as ROUTER_FILE
from lockstep.host.router_journal import engines_of
from lockstep.sim.aside import end_processes, fresh_processes
from lockstep.sim.simulate import collecting_seldom
from lockstep.tools.runs import Walk
from lockstep.tools.story import Chronicle, Story

ASIDE_BYTES_MIN = 8 << 20  # of journals: some seconds of replay; a process takes one to start

Stories = dict[RequestId, Story]
_STORIES = msgspec.msgpack.Decoder(Stories)


@dataclass(frozen=True)
class Asked:
    """Some requests of a run folder. `strict`: hold the replay against the digests of its journal."""

    folder: Path
    ids: Sequence[RequestId]
    strict: bool = True


def stories_of(runs: Sequence[Asked]) -> list[Stories]:
    """The stories of each run's requests, whichever engines of a cluster they went to. Raises as a replay does."""
    jobs = [(place, part) for place, run in enumerate(runs) for part in _by_engine(run)]
    hands = min(len(jobs), os.cpu_count() or 1)
    found: list[Stories] = [{} for _ in runs]
    if hands < 2 or sum(_journal_bytes(part.folder) for _, part in jobs) < ASIDE_BYTES_MIN:
        for place, part in jobs:
            found[place] |= _told(part)
        return found
    pool = fresh_processes(hands)
    try:
        longest_first = sorted(jobs, key=lambda job: -_journal_bytes(job[1].folder))
        told = [(place, pool.submit(_encoded, str(p.folder), list(p.ids), p.strict)) for place, p in longest_first]
        for place, future in told:
            found[place] |= _STORIES.decode(future.result())
    finally:
        end_processes(pool)
    return found


def _by_engine(run: Asked) -> list[Asked]:
    if not run.ids:
        return []
    if not (run.folder / ROUTER_FILE).is_file():
        return [run]
    engines = engines_of(run.folder, run.ids)
    return [Asked(run.folder / "engines" / str(engine), ids, run.strict) for engine, ids in sorted(engines.items())]


def _journal_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "journal").glob("*"))


def _encoded(folder: str, ids: list[RequestId], strict: bool) -> bytes:
    """In another process."""
    return msgspec.msgpack.encode(_told(Asked(Path(folder), ids, strict)))


def _told(asked: Asked) -> Stories:
    chronicle, walk = Chronicle(asked.ids), Walk(asked.folder, strict=asked.strict)
    with collecting_seldom():
        for number, event, step in walk:
            chronicle.observe(number, event, step, walk.engine)
            if chronicle.complete:
                break
    return chronicle.close().stories
