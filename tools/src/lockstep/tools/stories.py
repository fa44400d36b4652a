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
from lockstep.sim.cluster import DECODE
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


@dataclass(frozen=True)
class _Part:
    """Those on one engine: `ids` has the asked one by the one that the engine knows it by."""

    folder: Path
    ids: dict[RequestId, RequestId]
    strict: bool


def stories_of(runs: Sequence[Asked]) -> list[Stories]:
    """The stories of each run's requests, whichever engines of a cluster they went to. Raises as a replay does.

    None of engines that hand requests over to each other: each has but a part of a story.
    """
    jobs = [(place, part) for place, run in enumerate(runs) for part in _by_engine(run)]
    hands = min(len(jobs), os.cpu_count() or 1)
    found: list[Stories] = [{} for _ in runs]
    if hands < 2 or sum(_journal_bytes(part.folder) for _, part in jobs) < ASIDE_BYTES_MIN:
        for place, part in jobs:
            found[place] |= _named(part, _told(part.folder, list(part.ids), part.strict))
        return found
    pool = fresh_processes(hands)
    try:
        longest_first = sorted(jobs, key=lambda job: -_journal_bytes(job[1].folder))
        told = [(place, p, pool.submit(_encoded, str(p.folder), list(p.ids), p.strict)) for place, p in longest_first]
        for place, part, future in told:
            found[place] |= _named(part, _STORIES.decode(future.result()))
    finally:
        end_processes(pool)
    return found


def _by_engine(run: Asked) -> list[_Part]:
    if not run.ids or (run.folder / DECODE).is_dir():
        return []
    if not (run.folder / ROUTER_FILE).is_file():
        return [_Part(run.folder, {one: one for one in run.ids}, run.strict)]
    engines = engines_of(run.folder, run.ids)
    return [_Part(run.folder / "engines" / str(engine), ids, run.strict) for engine, ids in sorted(engines.items())]


def _named(part: _Part, stories: Stories) -> Stories:
    return {part.ids[own]: story for own, story in stories.items()}


def _journal_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "journal").glob("*"))


def _encoded(folder: str, ids: list[RequestId], strict: bool) -> bytes:
    """In another process."""
    return msgspec.msgpack.encode(_told(Path(folder), ids, strict))


def _told(folder: Path, ids: list[RequestId], strict: bool) -> Stories:
    chronicle, walk = Chronicle(ids), Walk(folder, strict=strict)
    with collecting_seldom():
        for number, event, step in walk:
            chronicle.observe(number, event, step, walk.engine)
            if chronicle.complete:
                break
    return chronicle.close().stories
