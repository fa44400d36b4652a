"""Window and state blocks (hybrid.py) below the device: in host memory, each with one host page, and in storage, each
under a key derived from the key of its page.

    device    page p: window_of[p], checkpoint_of[p]     --write-->     host page h: `of[h]` in the pool of each kind
                                                         <--load---
    host      page h: `of[h]`                            --store-->     storage, under `block_key` of the page key
                                                       <--prefetch--

**Room.** The host has as many window blocks and state blocks per page as the device has, rounded up. Each pool evicts
by itself the blocks that were written or read longest ago, of one path the beginning before the end. An evicted host
page takes its blocks along.

**Writes.** Pages are written with their blocks, as far as there is room, the end of a path first. For pages that the
host already has, only the blocks are written that a request needs to continue from the end of the path: the window in
front of it, and the last checkpoint.

**Loads.** A request can start behind the last page from which every kind can continue with the blocks of device and
host together. A load brings what the device lacks for that: pages, window blocks in front of that end, the state block
at it. It may be blocks without any page.

**Storage** receives what the host receives. Its content is unknown before a query, so a prefetch names all blocks that
may be needed in the last part of a path, and has room for the blocks of one end. `in_storage` determines how far a
request could continue with the stored content, and the answer brings that: pages up to the end, window blocks in front
of it, the state block at it.

**While an operation runs**, a block that is written is locked on the device, unless its page is given up. A block that
a load or store reads, or that a prefetch counts on, is locked in the pool of the host. A block of the device that a
load counts on is locked there. Blocks on their way belong to the operation. They have arrived if the whole copy has,
or, of a prefetch, if the answer names them. Then each is attached to the page at its place in the tree, or freed if
that page has another one by now.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.checks import all_ids, fail, misowned
from lockstep.core.contract.commands import NO_ROWS, BlockFetch, PrefetchFromStorage, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BlocksEvicted, BlocksFound
from lockstep.core.contract.hybrid_memory import HybridMemory
from lockstep.core.kv.facts import pages_in
from lockstep.core.kv.hybrid import Hybrid
from lockstep.core.kv.operations import Kind, MovedBlocks, Operation
from lockstep.core.kv.pages import PagePool
from lockstep.core.kv.radix import RadixCache
from lockstep.core.kv.running_view import EngineView
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import Int32s

NONE = -1  # no block
HOST_KINDS: dict[Kind, Literal["host window", "host state"]] = {"window": "host window", "state": "host state"}


class NeededBlocks(NamedTuple):
    """The blocks of one kind that a load brings, and those of the device that it counts on."""

    kind: Kind
    lacking: Int32s  # indices of pages of the path whose block the device lacks
    there: Int32s  # indices of pages of the path whose block the device has


class HostPool:
    """Blocks of one kind in host memory."""

    def __init__(self, kind: Kind, total: int, host_pages: int) -> None:
        self.kind = kind
        self.pool = PagePool(total)
        self.of: Int32s = np.full(host_pages, NONE, np.int32)  # by host page
        self.locks: Int32s = np.zeros(host_pages, np.int32)  # by host page: operations that need its block
        self.used = np.zeros(host_pages, np.int64)  # by host page: time of the last write or read of its block
        self.stored = np.zeros(host_pages, np.bool_)  # by host page: whether its block is stored or being stored
        self.clock = 0

    @property
    def _idle(self) -> NDArray[np.intp]:
        idle: NDArray[np.bool_] = (self.of >= 0) & (self.locks == 0)
        return idle.nonzero()[0]

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free ones, and unlocked ones of host pages."""
        return self.pool.free_count + self._idle.size

    def has(self, count: int) -> bool:
        """Whether `count` blocks can be allocated now."""
        return self.pool.free_count >= count or self.available >= count

    def take(self, count: int, step: Step) -> Int32s:
        """Allocate `count` blocks, evicting the oldest ones. The caller checks `available`. Returns: int32 [count]"""
        missing = count - self.pool.free_count
        if missing > 0:
            idle = self._idle
            self.drop(idle[np.argsort(self.used[idle], kind="stable")[:missing]].astype(np.int32))
            step.decided.append(BlocksEvicted(step.time_us, HOST_KINDS[self.kind], missing))
        return self.pool.alloc(count)

    def touch(self, host_pages: Int32s) -> None:
        """Count the blocks of these pages as used now, the first one longest ago."""
        self.used[host_pages] = self.clock + np.arange(host_pages.size)
        self.clock += host_pages.size

    def attach(self, host_pages: Int32s, blocks: Int32s, *, stored: bool = False) -> None:
        """Attach blocks that have arrived. One is freed if its page has another by now. `stored`: storage has them."""
        lacks = self.of[host_pages] < 0
        self.of[host_pages[lacks]] = blocks[lacks]
        if stored:
            self.stored[host_pages] = True
        self.touch(host_pages)
        self.pool.free(blocks[~lacks])

    def drop(self, host_pages: Int32s) -> None:
        """Free the blocks of these pages."""
        with_one = host_pages[self.of[host_pages] >= 0]
        self.pool.free(self.of[with_one])
        self.of[with_one] = NONE
        self.stored[with_one] = False


class HostBlocks:
    """Window and state blocks in the host memory of one engine."""

    def __init__(self, config: SchedConfig, host_pages: int) -> None:
        self.host_pages = host_pages
        self.columns = COLUMNS if config.tiers is not msgspec.UNSET and config.tiers.storage else COLUMNS[:-1]
        self.pools: dict[Kind, HostPool] = {}
        settings = config.hybrid
        assert settings is not msgspec.UNSET
        for kind, size in host_block_counts(settings, config.pages, host_pages).items():
            self.pools[kind] = HostPool(kind, size, host_pages)

    # ---------------------------------------------------------------------------------------------------------- writes

    def begin_write(
        self, hybrid: Hybrid, path: Int32s, known: Int32s, start: int, busy: NDArray[np.bool_], step: Step
    ) -> list[MovedBlocks]:
        """Allocate host room for the blocks of a path that are to be written.

        Args:
            path: pages of the device, int32 [stop]; the pages from `start` on are written in the same operation.
            known: pages that the host has of the path, int32 [at most start].
            busy: bool, shape of `known`: pages with a write under way.
        """
        found = []
        for kind, pool in self.pools.items():
            blocks = hybrid.blocks_of(kind, path)
            there = blocks >= 0
            first = min(hybrid.needed_from(kind, blocks), known.size)
            on_host = pool.of[known[first:]] >= 0
            pool.touch(known[first:][on_host])
            there[:first] = False
            there[first : known.size] &= ~on_host & ~busy[first:]
            there[known.size : start] = False
            index = there.nonzero()[0].astype(np.int32)
            index = index[max(index.size - pool.available, 0) :]
            if index.size:
                found.append(MovedBlocks(kind, index, blocks[index], pool.take(index.size, step)))
        return found

    def arrived(self, moved: list[MovedBlocks], host_path: Int32s) -> None:
        """Attach the blocks of a finished write to the pages of a path."""
        for one in moved:
            self.pools[one.kind].attach(host_path[one.index], one.host)

    def lost(self, moved: list[MovedBlocks]) -> None:
        """Free the blocks of a failed write, or of one that no match could find."""
        for one in moved:
            self.pools[one.kind].pool.free(one.host)

    # ----------------------------------------------------------------------------------------------------------- loads

    def usable_pages(self, hybrid: Hybrid, device: Int32s, host: Int32s) -> int:
        """Return the pages behind which a request can start, with the blocks of device and host together.

        `device`, `host`: the pages that each has of the path.
        """
        length = max(device.size, host.size)
        usable = np.ones(length, np.bool_)
        for kind in self.pools:
            usable &= hybrid.can_continue(kind, self._there(hybrid, kind, device, host, length))
        ends = usable.nonzero()[0]
        return int(ends[-1]) + 1 if ends.size else 0

    def _there(self, hybrid: Hybrid, kind: Kind, device: Int32s, host: Int32s, pages: int) -> NDArray[np.bool_]:
        """Return for each page of a path whether the device or the host has its block, bool [pages]."""
        there = np.zeros(pages, np.bool_)
        device, host = device[:pages], host[:pages]
        there[: device.size] = hybrid.blocks_of(kind, device) >= 0
        there[: host.size] |= self.pools[kind].of[host] >= 0
        return there

    def blocks_to_load(self, hybrid: Hybrid, device: Int32s, pages: int) -> list[NeededBlocks]:
        """Return the blocks that a load must bring so that a request can start behind `pages` pages of a path.

        `device`: the pages that the device has of the path.
        """
        coming = []
        for kind in self.pools:
            seen = np.arange(hybrid.seen_from(kind, pages), pages, dtype=np.int32)
            there = np.zeros(seen.size, np.bool_)
            own = seen < device.size
            there[own] = hybrid.blocks_of(kind, device[seen[own]]) >= 0
            coming.append(NeededBlocks(kind, seen[~there], seen[there]))
        return coming

    def has_room(self, hybrid: Hybrid, coming: list[NeededBlocks], engine: EngineView) -> bool:
        """Whether the device has room for these blocks, and for a request behind them, beside the reserve."""
        return all(hybrid.has_room(one.kind, one.lacking.size, one.there.size, engine) for one in coming)

    def begin_read(self, coming: list[NeededBlocks], host: Int32s) -> None:
        """Lock the blocks that a load reads. `host`: the host pages of the path."""
        for kind, lacking, _ in coming:
            self.pools[kind].locks[host[lacking]] += 1
            self.pools[kind].touch(host[lacking])

    def read(self, hybrid: Hybrid, coming: list[NeededBlocks], host: Int32s, step: Step) -> list[MovedBlocks]:
        """Allocate room on the device for the blocks that a load reads. `host`: the host pages of the path."""
        return [
            MovedBlocks(kind, lacking, hybrid.room_for(kind, lacking.size, step), self.pools[kind].of[host[lacking]])
            for kind, lacking, _ in coming
            if lacking.size
        ]

    def end_read(self, moved: list[MovedBlocks], host: Int32s) -> None:
        """Unlock the blocks that an ended load or store has read."""
        for one in moved:
            self.pools[one.kind].locks[host[one.index]] -= 1

    # --------------------------------------------------------------------------------------------------------- storage

    def to_store(self, host: Int32s) -> list[MovedBlocks]:
        """Lock and return the blocks of these host pages that storage lacks, for a store."""
        found = []
        for kind, pool in self.pools.items():
            index = ((pool.of[host] >= 0) & ~pool.stored[host]).nonzero()[0].astype(np.int32)
            if index.size:
                pool.stored[host[index]] = True
                pool.locks[host[index]] += 1
                found.append(MovedBlocks(kind, index, NO_ROWS, pool.of[host[index]]))
        return found

    def not_stored(self, moved: list[MovedBlocks], host: Int32s) -> None:
        """Unmark the blocks of a failed store."""
        for one in moved:
            self.pools[one.kind].stored[host[one.index]] = False

    def may_fetch(self, hybrid: Hybrid, under_way: list[MovedBlocks], share: float) -> bool:
        """Whether one more prefetch may begin. All prefetches may fill a `share` of each pool at once.

        `under_way`: blocks of the prefetches under way.
        """
        for kind, pool in self.pools.items():
            taken = sum(one.host.size for one in under_way if one.kind == kind)
            wanted = min(hybrid.seen(kind), pool.pool.total)
            if (taken and taken + wanted > share * pool.pool.total) or not pool.has(wanted):
                return False
        return True

    def to_fetch(
        self, hybrid: Hybrid, device: Int32s, host: Int32s, reach: int, keys: list[bytes], step: Step
    ) -> tuple[list[MovedBlocks], tuple[BlockFetch, ...], int]:
        """Allocate room for the blocks that a prefetch may bring for any one end, and lock those that the host has.

        Args:
            device, host: the pages that each has of the path.
            reach: pages behind which a request could start without the prefetch.
            keys: keys of the pages of the path.
        Returns: the moved blocks; `blocks` and `reached` of the order.
        """
        first = min(host.size, *(hybrid.seen_from(kind, reach + 1) for kind in self.pools))
        index = np.arange(first, len(keys), dtype=np.int32)
        ends = np.arange(reach + 1, len(keys) + 1)
        moved, ordered = [], []
        for kind, pool in self.pools.items():
            there, seen = self._there(hybrid, kind, device, host, len(keys)), hybrid.seen(kind)
            counted = (pool.of[host] >= 0).nonzero()[0].astype(np.int32)
            counted = counted[counted >= min(first, hybrid.seen_from(kind, reach))]
            pool.locks[host[counted]] += 1
            pool.touch(host[counted])
            lacking = np.concatenate(([0], np.cumsum(~there)))
            most = int((lacking[ends] - lacking[np.maximum(ends - seen, 0)]).max())
            room = pool.take(min(most, pool.available), step)
            named = tuple(block_key(kind, key) for key in keys[first:])
            moved.append(MovedBlocks(kind, index, NO_ROWS, room, counted))
            ordered.append(BlockFetch(kind, named, tuple(there[first:].tolist()), seen, room))
        return moved, tuple(ordered), reach - first

    def end_prefetch(self, moved: list[MovedBlocks], host: Int32s) -> None:
        """Unlock the blocks that an ended prefetch has counted on."""
        for one in moved:
            self.pools[one.kind].locks[host[one.counted]] -= 1

    def check_fetched(self, asked: list[MovedBlocks], found: tuple[BlocksFound, ...], pages: int) -> None:
        """Raise ContractError for blocks that were not requested, or that belong to pages beyond the first `pages`.

        Missing blocks are no error: then no request continues at that end.
        """
        wanted = {one.kind: one for one in asked}
        for one in found:
            order = wanted.pop(one.kind, None)
            if order is None:
                raise ContractError(f"a prefetch brought {one.kind}s twice, or without a request")
            most = int(np.searchsorted(order.index, pages))
            rising = all(a < b for a, b in zip((-1, *one.indices), (*one.indices, most), strict=True))
            if not rising or len(one.indices) > order.host.size:
                raise ContractError(
                    f"a prefetch brought {one.kind}s at {list(one.indices)}: {order.host.size} had room, ascending, "
                    f"below {most}"
                )

    def fetched(self, asked: list[MovedBlocks], found: tuple[BlocksFound, ...], host_path: Int32s) -> None:
        """Attach the blocks that a prefetch has brought to the pages of a path, and free the unused room."""
        came = {one.kind: one.indices for one in found}
        for one in asked:
            index = one.index[list(came.get(one.kind, ()))]
            self.pools[one.kind].attach(host_path[index], one.host[: index.size], stored=True)
            self.pools[one.kind].pool.free(one.host[index.size :])

    # -------------------------------------------------------------------------------------------- eviction and snapshot

    def drop(self, host_pages: Int32s) -> None:
        """Free the blocks of host pages that are freed."""
        for pool in self.pools.values():
            pool.drop(host_pages)

    def void(self) -> None:
        """Free all blocks: host memory is lost."""
        self.pools = {kind: HostPool(kind, pool.pool.total, self.host_pages) for kind, pool in self.pools.items()}

    def dump(self) -> list[tuple[str, Any]]:
        """Return the state in builtins."""
        return [
            (
                kind,
                {
                    "pool": pool.pool.dump(),
                    "clock": pool.clock,
                    **{name: getattr(pool, name).tobytes() for name in self.columns},
                },
            )
            for kind, pool in self.pools.items()
        ]

    def load(self, image: list[tuple[Kind, Any]]) -> None:
        """Take over the state that `dump` returned."""
        for kind, of in image:
            pool = self.pools[kind]
            pool.pool, pool.clock = PagePool.load(of["pool"]), of["clock"]
            for name in self.columns:
                setattr(pool, name, np.frombuffer(of[name], getattr(pool, name).dtype).copy())

    def check(self, host: RadixCache, moves: list[Operation], nodes: list[RadixNode]) -> None:
        """S1, S5, S9, S33: each block is free, on its way, or of one cached host page; its readers lock it.

        Args:
            host: the radix cache of the host; `nodes` are all of its nodes.
            moves: operations under way.
        """
        cached = pages_in(nodes, self.host_pages)
        for kind, pool in self.pools.items():
            with_one = (pool.of >= 0).nonzero()[0]
            of_kind = [(one, moved) for one in moves for moved in one.blocks if moved.kind == kind]
            arriving = [moved.host for one, moved in of_kind if one.kind in ("write", "prefetch")]
            ids = np.sort(np.concatenate((pool.pool.free_ids(), pool.of[with_one], *arriving)))
            if ids.tobytes() != all_ids(pool.pool.total):
                owners = {"free": pool.pool.free_ids().tolist(), "of pages": pool.of[with_one].tolist()}
                owners |= {"on their way": [number for one in arriving for number in one.tolist()]}
                misowned(f"S1 {kind}s of the host", pool.pool.total, owners)
            if (stray := with_one[~cached[with_one]]).size:
                fail(f"S1: host pages {stray.tolist()} have a {kind}, but are not cached")
            locks = np.zeros_like(pool.locks)
            for one, moved in of_kind:
                if one.kind in ("load", "store"):
                    assert one.host_handle is not None
                    source = host.pages_of(one.host_handle)[moved.index]
                    np.add.at(locks, source, 1)
                    if pool.of[source].tolist() != moved.host.tolist():
                        fail(f"S5: {one.kind} {one.number} reads {kind}s {moved.host.tolist()}, its pages have others")
                if one.kind == "prefetch":
                    assert one.host_handle is not None
                    source = host.pages_of(one.host_handle)[moved.counted]
                    np.add.at(locks, source, 1)
                    if (pool.of[source] < 0).any():
                        fail(
                            f"S5: prefetch {one.number} needs {kind}s of host pages {source.tolist()}, some are missing"
                        )
            if locks.tobytes() != pool.locks.tobytes():
                fail(f"S9: {kind}s of the host are locked {pool.locks.tolist()}, operations need {locks.tolist()}")
            if (strays := (pool.stored & (pool.of < 0)).nonzero()[0]).size:
                fail(f"S33: host pages {strays.tolist()} have no {kind}, but it is marked as stored")


COLUMNS = ("of", "locks", "used", "stored")  # arrays of a snapshot; the last one only with storage


def host_block_counts(settings: HybridMemory, pages: int, host_pages: int) -> dict[Kind, int]:
    """Return the blocks of each kind in host memory, where the device has `pages` and the host `host_pages` pages."""
    sizes: dict[Kind, int] = {"window": settings.window_pages, "state": settings.state_slots}
    return {kind: -(-host_pages * size // pages) for kind, size in sizes.items() if size}


def block_key(kind: Kind, key: bytes) -> bytes:
    """Return the key of the block of the page with this key."""
    return sha256(key + kind.encode()).digest()


def in_storage(order: PrefetchFromStorage, has: Callable[[bytes], bool]) -> tuple[int, tuple[BlocksFound, ...]]:
    """Return what a prefetch brings from a storage that `has` some keys: pages, and blocks by index into their keys.

    Every storage, simulated or not, uses this function. The result reaches to the last end up to which storage has all
    pages, and all blocks that the engine lacks at that end, as far as there is room for them. It is empty if that is no
    gain.
    """
    pages = next((index for index, key in enumerate(order.keys) if not has(key)), len(order.keys))
    if not order.blocks:
        return pages, ()
    known = len(order.blocks[0].keys) - len(order.keys)
    end = np.arange(1, known + pages + 1)
    usable, come = np.ones(end.size, np.bool_), []
    for one in order.blocks:
        there = np.array(one.there[: end.size], np.bool_)
        stored = np.array([has(key) for key in one.keys[: end.size]], np.bool_) & ~there
        lost = np.maximum.accumulate(np.where(there | stored, NONE, end - 1))
        first = np.maximum(end - one.seen, 0)
        count = np.concatenate(([0], np.cumsum(stored)))
        usable &= (lost < first) & (count[end] - count[first] <= one.host.size)
        come.append((one.kind, stored, first))
    ends = usable.nonzero()[0]
    last = int(ends[-1]) if ends.size else NONE
    if last < order.reached:
        return 0, ()
    found = [
        BlocksFound(kind, tuple((first[last] + stored[first[last] : last + 1].nonzero()[0]).tolist()))
        for kind, stored, first in come
    ]
    return max(last + 1 - known, 0), tuple(one for one in found if one.indices)
