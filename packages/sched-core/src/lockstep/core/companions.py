"""Companions in host memory: window pages and states (hybrid.py) below the device, each of one page of the host's.

    device    page p: window_of[p], checkpoint_of[p]     --write-->     host page h: `of[h]` in the pool of each kind
                                                         <--load---

**Room.** The host has as many window pages and states for each of its pages as the device has, rounded up. Each pool by
itself evicts what was written or read longest ago, of one path the beginning before the end; a host page that goes
takes its companions along.

**Down.** Where pages are written, their companions go with them, as far as there is room; the end of a path goes first.
Of what the host has already, those are written that somebody needs who goes on from the end of the path: the window in
front of it, the last checkpoint.

**Up.** A path ends, for a request, where every kind can go on from the device and the host together. A load brings what
the device lacks of that: pages, of windows those in front of the end, of states the one behind it. It may be no page
at all.

**While it moves** a companion that is written is locked on the device, unless its page is given up; one that is read is
locked in the host's pool; and what a load counts on, because the device has it, is locked there. What is on its way
belongs to the operation. It has arrived if all of the copy has; then it goes to the page at its place in the tree, or,
if that has got one in the meantime, is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.commands import CompanionCopy, Step
from lockstep.core.config import SchedConfig
from lockstep.core.events import CompanionsEvicted
from lockstep.core.pages import PagePool
from lockstep.core.requests import Int32s

if TYPE_CHECKING:
    from lockstep.core.engine import Engine
    from lockstep.core.hybrid import Hybrid

NONE = -1  # no companion
Kind = Literal["window", "state"]
HOST_KINDS: dict[Kind, Literal["host window", "host state"]] = {"window": "host window", "state": "host state"}


class Moved(msgspec.Struct):
    """Companions of one kind on their way between device and host. int32 [n] all."""

    kind: Kind
    index: Int32s  # of the pages they belong to, on the operation's path
    device: Int32s  # window pages or slots of the device
    host: Int32s  # of the host's pool

    def copy(self) -> CompanionCopy:
        """What the device is told of it."""
        return CompanionCopy(self.kind, self.device, self.host)


class Needed(NamedTuple):
    """What a load brings of one kind, and what it counts on of what the device has."""

    kind: Kind
    lacking: Int32s  # indices of the path's pages whose companions the device lacks
    there: Int32s  # and of those whose it has


class HostPool:
    """Companions of one kind in host memory."""

    def __init__(self, kind: Kind, total: int, host_pages: int) -> None:
        self.kind = kind
        self.pool = PagePool(total)
        self.of: Int32s = np.full(host_pages, NONE, np.int32)  # by host page
        self.locks: Int32s = np.zeros(host_pages, np.int32)  # by host page: loads that read its companion
        self.used = np.zeros(host_pages, np.int64)  # by host page: when its companion was last written or read
        self.clock = 0

    @property
    def _idle(self) -> NDArray[np.intp]:
        idle: NDArray[np.bool_] = (self.of >= 0) & (self.locks == 0)
        return idle.nonzero()[0]

    @property
    def available(self) -> int:
        """Companions that can be had now."""
        return self.pool.free_count + self._idle.size

    def take(self, count: int, step: Step) -> Int32s:
        """Room for so many; the caller saw that there is."""
        missing = count - self.pool.free_count
        if missing > 0:
            idle = self._idle
            self.drop(idle[np.argsort(self.used[idle], kind="stable")[:missing]].astype(np.int32))
            step.decided.append(CompanionsEvicted(step.time_us, HOST_KINDS[self.kind], missing))
        return self.pool.alloc(count)

    def touch(self, host_pages: Int32s) -> None:
        """Companions of these pages were used just now, the first of them longest ago."""
        self.used[host_pages] = self.clock + np.arange(host_pages.size)
        self.clock += host_pages.size

    def attach(self, host_pages: Int32s, companions: Int32s) -> None:
        """These have arrived: each is its page's, unless that has one by now."""
        lacks = self.of[host_pages] < 0
        self.of[host_pages[lacks]] = companions[lacks]
        self.touch(host_pages)
        self.pool.free(companions[~lacks])

    def drop(self, host_pages: Int32s) -> None:
        """Companions of these pages are free."""
        with_one = host_pages[self.of[host_pages] >= 0]
        self.pool.free(self.of[with_one])
        self.of[with_one] = NONE


class HostCompanions:
    """Window pages and states in host memory, beside the host's pages of one engine."""

    def __init__(self, config: SchedConfig, host_pages: int) -> None:
        self.host_pages = host_pages
        self.pools: dict[Kind, HostPool] = {}
        settings = config.hybrid
        assert settings is not msgspec.UNSET
        sizes: dict[Kind, int] = {"window": settings.window_pages, "state": settings.state_slots}
        for kind, size in sizes.items():
            if size:
                self.pools[kind] = HostPool(kind, -(-host_pages * size // config.pages), host_pages)

    # ------------------------------------------------------------------------------------------------------------ down

    def going_down(
        self, hybrid: Hybrid, path: Int32s, known: Int32s, start: int, busy: NDArray[np.bool_], step: Step
    ) -> list[Moved]:
        """Take room for the companions that are to be written of a path's pages.

        Args:
            path: pages of the device, int32 [stop]; those from `start` on are being written with it.
            known: int32 [at most start], pages that the host has of them.
            busy: bool [as known], of these the ones of which something is being written already.
        """
        found = []
        for kind, pool in self.pools.items():
            companions = hybrid.written(kind, path)
            there = companions >= 0
            first = min(hybrid.needed_from(kind, companions), known.size)
            on_host = pool.of[known[first:]] >= 0
            pool.touch(known[first:][on_host])
            there[:first] = False
            there[first : known.size] &= ~on_host & ~busy[first:]
            there[known.size : start] = False
            index = there.nonzero()[0].astype(np.int32)
            index = index[max(index.size - pool.available, 0) :]
            if index.size:
                found.append(Moved(kind, index, companions[index], pool.take(index.size, step)))
        return found

    def arrived(self, moved: list[Moved], host_path: Int32s) -> None:
        """A write is done: its companions are those of these pages."""
        for one in moved:
            self.pools[one.kind].attach(host_path[one.index], one.host)

    def lost(self, moved: list[Moved]) -> None:
        """A write is not, or nobody could find it."""
        for one in moved:
            self.pools[one.kind].pool.free(one.host)

    # -------------------------------------------------------------------------------------------------------------- up

    def furthest(self, hybrid: Hybrid, device: Int32s, host: Int32s) -> int:
        """Pages behind which somebody can go on whose prefix the device and the host have to these pages."""
        length = max(device.size, host.size)
        usable = np.ones(length, np.bool_)
        for kind, pool in self.pools.items():
            there = np.zeros(length, np.bool_)
            there[: device.size] = hybrid.companions_of(kind, device) >= 0
            there[: host.size] |= pool.of[host] >= 0
            usable &= hybrid.goes_on(kind, there)
        ends = usable.nonzero()[0]
        return int(ends[-1]) + 1 if ends.size else 0

    def coming_up(self, hybrid: Hybrid, device: Int32s, pages: int) -> list[Needed]:
        """What a load must bring so that somebody can go on behind so many pages, the first of them on the device."""
        coming = []
        for kind in self.pools:
            seen = np.arange(hybrid.seen_from(kind, pages), pages, dtype=np.int32)
            there = np.zeros(seen.size, np.bool_)
            mine = seen < device.size
            there[mine] = hybrid.companions_of(kind, device[seen[mine]]) >= 0
            coming.append(Needed(kind, seen[~there], seen[there]))
        return coming

    def has_room(self, hybrid: Hybrid, coming: list[Needed], engine: Engine) -> bool:
        """Whether the device has room for that, and for whoever starts behind it beside what others will want."""
        return all(hybrid.has_room(one.kind, one.lacking.size, one.there.size, engine) for one in coming)

    def hold(self, coming: list[Needed], host: Int32s) -> None:
        """A load reads this from now on. `host`: pages of the host."""
        for kind, lacking, _ in coming:
            self.pools[kind].locks[host[lacking]] += 1
            self.pools[kind].touch(host[lacking])

    def read(self, hybrid: Hybrid, coming: list[Needed], host: Int32s, step: Step) -> list[Moved]:
        """Take room on the device for what a load brings of these pages of the host."""
        return [
            Moved(kind, lacking, hybrid.room_for(kind, lacking.size, step), self.pools[kind].of[host[lacking]])
            for kind, lacking, _ in coming
            if lacking.size
        ]

    def was_read(self, moved: list[Moved], host: Int32s) -> None:
        """A load has ended, one way or another."""
        for one in moved:
            self.pools[one.kind].locks[host[one.index]] -= 1

    # ------------------------------------------------------------------------------------------------------ everything

    def drop(self, host_pages: Int32s) -> None:
        """These pages of the host are free, or another path's."""
        for pool in self.pools.values():
            pool.drop(host_pages)

    def void(self) -> None:
        """Host memory is gone."""
        self.pools = {kind: HostPool(kind, pool.pool.total, self.host_pages) for kind, pool in self.pools.items()}

    def dump(self) -> list[tuple[str, Any]]:
        """The state in builtins."""
        return [
            (
                kind,
                {
                    "pool": pool.pool.dump(),
                    "clock": pool.clock,
                    **{name: getattr(pool, name).tobytes() for name in COLUMNS},
                },
            )
            for kind, pool in self.pools.items()
        ]

    def load(self, image: list[tuple[Kind, Any]]) -> None:
        """Become what `dump` described."""
        for kind, of in image:
            pool = self.pools[kind]
            pool.pool, pool.clock = PagePool.load(of["pool"]), of["clock"]
            for name in COLUMNS:
                setattr(pool, name, np.frombuffer(of[name], getattr(pool, name).dtype).copy())


COLUMNS = ("of", "locks", "used")
