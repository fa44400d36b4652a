"""Carries out the moves of one rank: copies between device and host memory, reads and writes of storage.

    device pages  <── copies ──>  host pages, uint8 [host pages, page bytes]  <── reader, writer ──>  storage
    windows       <── copies ──>  uint8 [windows, window bytes]               <── reader, writer ──>
    states        <── copies ──>  uint8 [states, state bytes]                 <── reader, writer ──>

Every kind of move has a thread of its own, in which its moves run in the order in which they were ordered: writes,
loads, prefetches, stores. No two moves under way use the same host page, and a page that a move reads or fills is in no
other use before the answer (docs/tiers.md), with one exception, pages that are *given up*. They may be overwritten by
whatever is launched next, so `begin` itself reads them:

- on a CPU it copies them before it returns;
- on a GPU it launches the copy of the pages into a staging area of the device. The streams of passes and of loads wait
  for that, on the device; the thread of writes then waits for the transfer to the host.

On a GPU each direction has a stream of its own, so copies run beside passes and beside each other. Pages go through a
staging area of at most STAGING_BYTES: gathered from all layers there, and transferred a page at a time, to or from
pinned memory. Everything that a write reads was computed by batches that have been collected, so no event is needed for
it; the same holds for the device pages of a load, whose last readers have been collected.

Windows and states of hybrid models move in the same moves, under the same rules, as blocks of kinds of their own. A
prefetch of such a model searches storage for the furthest end from which a request could continue
(`core.kv.block_tiers.in_storage`), and reads what belongs to it. If one of these turns out to be damaged, it searches
again without that one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.commands import PrefetchFromStorage
from lockstep.core.contract.errors import ConfigError
from lockstep.core.kv.block_tiers import in_storage
from lockstep.host.cache_moves import BlockKind, Move, MoveEnd
from lockstep.host.page_store import PageStore, SearchableStore, StoreCounts, StoreError
from lockstep.runtime.memory import MIB, explained, free_bytes_of
from lockstep.runtime.overlap import CudaLane, StreamLane
from lockstep.runtime.tiers.identity import Identity
from lockstep.runtime.tiers.page_parts import PageParts

log = logging.getLogger("lockstep.runtime")

STAGING_BYTES = 64 * MIB  # of device memory, for each direction
RUNS_MAX = 16  # copies of a move that are always made one by one
END_S = 10.0  # longest wait of `close` for writes to storage that were ordered
Done = Callable[[MoveEnd], None]
Named = Callable[[bytes], bytes]
"""Returns the name of a key of the core in the storage of this rank."""
Parts = Mapping[BlockKind, PageParts]
Memory = Mapping[BlockKind, Tensor]
"""Host memory by kind: uint8 [blocks, block bytes]."""


# mechanism: host-cache (executed)
class HostMover:
    """Moves of one rank: `lockstep.host.cache_moves.PageMover`.

    Args:
        parts: of a page, and of a window and a state if the model has pools of them.
        counts: blocks of each of these kinds in host memory.
        lane: of the passes.
        store: None: there is no storage. With windows or states it can be searched.
        identity: of the pages in storage; replaced together with the weights.
    Raises: ConfigError if there is no room for the host pages.
    """

    def __init__(
        self,
        parts: Parts,
        counts: Mapping[BlockKind, int],
        lane: StreamLane,
        store: PageStore | None,
        identity: Identity,
    ) -> None:
        self.parts, self.identity = parts, identity
        self._store = store
        self.host = make_host_memory({kind: (counts[kind], one.size) for kind, one in parts.items()}, lane.device)
        self._copies = CudaCopies(parts, self.host, lane) if isinstance(lane, CudaLane) else CpuCopies(parts, self.host)
        self._threads = {
            kind: ThreadPoolExecutor(1, f"lockstep-{kind}") for kind in ("write", "load", "prefetch", "store")
        }
        self._cancelled: set[int] = set()
        self._fetching: set[int] = set()
        self._lock = threading.Lock()  # guards the two sets
        self._closing = threading.Event()

    @property
    def store_counts(self) -> StoreCounts | None:
        """Totals of the storage; None without storage."""
        return None if self._store is None else self._store.counts

    def begin(self, move: Move, done: Done) -> None:
        """See `PageMover.begin`."""
        if move.kind == "cancel":
            with self._lock:
                if move.number in self._fetching:
                    self._cancelled.add(move.number)
            return
        run: Callable[[], MoveEnd]
        if move.kind == "write":
            started = self._copies.start_write(move) if move.given_up else None
            run = lambda: self._copied(move, started or (lambda: self._copies.start_write(move)()))  # noqa: E731
        elif move.kind == "load":
            run = lambda: self._copied(move, lambda: self._copies.load(move))  # noqa: E731
        else:
            identity = self.identity.digest()  # as of now: weights may be replaced while the move waits
            named: Named = lambda key: sha256(identity + key).digest()  # noqa: E731
            if move.kind == "prefetch":
                with self._lock:
                    self._fetching.add(move.number)
                run = lambda: self._fetch(move, named)  # noqa: E731
            else:
                run = lambda: self._store_blocks(move, named)  # noqa: E731
        self._threads[move.kind].submit(_report, move, run, done)

    def use_weights(self, weights: bytes) -> None:
        """Name stored pages by other weights from now on, by their digest."""
        self.identity = replace(self.identity, weights=weights)

    def close(self) -> None:
        """End: moves that have not begun are dropped, except writes to storage within END_S."""
        ended = threading.Thread(target=self._threads["store"].shutdown, name="lockstep-store-end", daemon=True)
        ended.start()
        ended.join(END_S)
        self._closing.set()
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        if self._store is not None and not ended.is_alive():
            self._store.close()
        self._copies.close()

    # ------------------------------------------------------------------------------------------- in their threads

    def _copied(self, move: Move, copy: Callable[[], None]) -> MoveEnd:
        copy()
        return MoveEnd(move.number, len(move.host_pages))

    def _fetch(self, move: Move, named: Named) -> MoveEnd:
        """Read from storage: pages up to the first that is not there, or all that belongs to an end."""
        end, used = self._fetch_to_an_end(move, named) if move.fetches else self._fetch_pages(move, named)
        with self._lock:
            self._fetching.discard(move.number)
            self._cancelled.discard(move.number)
        self._use(used[: end.pages_done], used[end.pages_done :])
        return end

    def _fetch_pages(self, move: Move, named: Named) -> tuple[MoveEnd, list[bytes]]:
        """Return the end of a prefetch of pages alone, and the names of what it has read."""
        used, error = list[bytes](), ""
        for key, page in zip(move.keys, move.host_pages.tolist(), strict=True):
            if self._stopped(move):
                break
            there, error = self._read(named(key), "page", page)
            if not there:
                break
            used.append(named(key))
        return MoveEnd(move.number, len(used), error), used

    def _fetch_to_an_end(self, move: Move, named: Named) -> tuple[MoveEnd, list[bytes]]:
        """Return the end of a prefetch of pages with windows or states, and the names of what it has read.

        One that is cancelled has brought the pages that it has read, and no windows or states.
        """
        store = self._store
        assert isinstance(store, SearchableStore)
        order = PrefetchFromStorage(move.number, move.keys, move.host_pages, 0, move.fetches, move.reached)
        lost, read, error = set[bytes](), 0, ""
        while True:
            pages, found = in_storage(order, lambda key: key not in lost and store.has(named(key)))
            wanted: list[tuple[bytes, BlockKind, int]] = [
                (move.keys[index], "page", int(move.host_pages[index])) for index in range(pages)
            ]
            fetches = {one.kind: one for one in move.fetches}
            for some in found:
                fetch = fetches[some.kind]
                places = fetch.host[: len(some.indices)].tolist()
                wanted += [(fetch.keys[i], some.kind, place) for i, place in zip(some.indices, places, strict=True)]
            names = [named(key) for key, _, _ in wanted]
            for number, (key, kind, place) in enumerate(wanted):
                if kind == "page" and number < read:  # by an earlier search
                    continue
                if self._stopped(move):
                    return MoveEnd(move.number, min(number, pages)), names[: min(number, pages)]
                there, why = self._read(names[number], kind, place)
                if not there:
                    lost.add(key)
                    error = error or why
                    break
                if kind == "page":
                    read = number + 1
            else:
                return MoveEnd(move.number, pages, "" if wanted else error, blocks=found), names

    def _read(self, name: bytes, kind: BlockKind, place: int) -> tuple[bool, str]:
        """Read a block from storage. Returns whether it was there, and an error of the store."""
        assert self._store is not None
        try:
            return self._store.read(name, self._bytes_of(kind, place)), ""
        except Exception as raised:  # of a store that keeps less than it promises: a miss
            log.exception("a page of storage cannot be read")
            return False, f"{type(raised).__name__}: {raised}"

    def _stopped(self, move: Move) -> bool:
        return move.number in self._cancelled or self._closing.is_set()

    def _use(self, pages: list[bytes], beside: list[bytes], after: bytes = b"") -> None:
        """Mark what a move has read or written as used: pages of a path, and windows and states beside them."""
        assert self._store is not None
        self._store.use(pages, after)
        for one in beside:
            self._store.use([one], b"")

    def _store_blocks(self, move: Move, named: Named) -> MoveEnd:
        """Write pages to storage, then windows and states, up to the first that cannot be written."""
        assert self._store is not None
        wanted: list[tuple[bytes, BlockKind, int]] = [
            (named(key), "page", page) for key, page in zip(move.keys, move.host_pages.tolist(), strict=True)
        ]
        pages = len(wanted)
        for one in move.stores:
            wanted += [(named(key), one.kind, place) for key, place in zip(one.keys, one.host.tolist(), strict=True)]
        written, error = 0, ""
        for name, kind, place in wanted:
            if self._closing.is_set():
                error = "the engine ends" if written >= pages else ""
                break
            try:
                self._store.write(name, self._bytes_of(kind, place))
            except Exception as raised:
                error = str(raised) or type(raised).__name__
                if not isinstance(raised, StoreError):
                    log.exception("a page cannot be written to storage")
                break
            written += 1
        names = [name for name, _, _ in wanted[:written]]
        self._use(names[:pages], names[pages:], named(move.after) if move.after else b"")
        return MoveEnd(move.number, min(written, pages), error)

    def _bytes_of(self, kind: BlockKind, place: int) -> memoryview:
        return memoryview(self.host[kind][place].numpy())


def _report(move: Move, run: Callable[[], MoveEnd], done: Done) -> None:
    """Run a move and report its end; an error that no move expects ends the engine."""
    try:
        end = run()
    except BaseException as error:
        end = MoveEnd(move.number, 0, failure=error)
    done(end)


# --------------------------------------------------------------------------------------------------------- host memory


def make_host_memory(sizes: Mapping[BlockKind, tuple[int, int]], device: torch.device) -> dict[BlockKind, Tensor]:
    """Allocate host memory for blocks, pinned beside a GPU: by kind uint8 [blocks, block bytes].

    Args:
        sizes: by kind, the number of blocks and the bytes of one.
    Raises: ConfigError if the memory is not there.
    """
    needed, cpu = sum(count * size for count, size in sizes.values()), torch.device("cpu")
    free_bytes = free_bytes_of(cpu)
    if free_bytes is not None and needed > free_bytes:  # the system may overcommit
        raise ConfigError(
            f"`host_cache_gb` needs {needed / MIB:,.0f} MiB on this rank, but {free_bytes / MIB:,.0f} MiB of memory "
            "are free\nhint: lower --host-cache-gb"
        )
    return {kind: make_host_blocks(*each, kind=kind, pinned=device.type == "cuda") for kind, each in sizes.items()}


def make_host_blocks(count: int, size: int, *, kind: BlockKind = "page", pinned: bool) -> Tensor:
    """Allocate host memory, uint8 [count, size]. Raises ConfigError if the memory is not there.

    Pinned memory is registered after its allocation, because torch's own allocator rounds sizes up to a power of two.
    """
    needed = count * size
    with explained(f"{count:,} host {kind}s of {size:,} bytes", torch.device("cpu"), "lower --host-cache-gb"):
        made = torch.empty((count, size), dtype=torch.uint8)
    if pinned:
        status = torch.cuda.cudart().cudaHostRegister(made.data_ptr(), needed, 0)
        if int(status):
            raise ConfigError(
                f"`host_cache_gb`: {needed / MIB:,.0f} MiB of host memory cannot be pinned (CUDA error {int(status)})\n"
                "hint: lower --host-cache-gb, or raise the limit of locked memory (ulimit -l)"
            )
    return made


# -------------------------------------------------------------------------------------------------------------- copies


class CpuCopies:
    """Copies between the pool of a CPU and host pages, which are memory of the same kind."""

    def __init__(self, parts: Parts, host: Memory) -> None:
        self._parts, self._host = parts, host

    def start_write(self, move: Move) -> Callable[[], None]:
        """Copy device pages to host pages. Returns a function that waits for the end, which has come."""
        self._copy(move, to_host=True)
        return lambda: None

    def load(self, move: Move) -> None:
        """Copy host pages to device pages."""
        self._copy(move, to_host=False)

    def _copy(self, move: Move, *, to_host: bool) -> None:
        for kind, pages, hosts in move.copied():
            self._copy_kind(kind, pages, hosts, to_host=to_host)

    def _copy_kind(self, kind: BlockKind, pages: NDArray[np.int32], hosts: NDArray[np.int32], *, to_host: bool) -> None:
        """Copy each run of pages that lie side by side at both ends at once; pages that lie apart by index."""
        steps = list(runs(pages, hosts))
        by_index = len(steps) > RUNS_MAX and len(steps) * 2 > len(pages)
        at, there = _index(pages), _index(hosts)
        with torch.inference_mode():
            for part in self._parts[kind].parts:
                device, host = part.on_device(), part.of(self._host[kind])
                if by_index and to_host:
                    host.index_copy_(0, there, device.index_select(0, at))
                elif by_index:
                    device.index_copy_(0, at, host.index_select(0, there))
                for first, count in () if by_index else steps:
                    here, beyond = int(pages[first]), int(hosts[first])
                    ours, theirs = device[here : here + count], host[beyond : beyond + count]
                    (theirs if to_host else ours).copy_(ours if to_host else theirs)

    def close(self) -> None:
        """Do nothing: the memory is freed with its last reader."""


class CudaCopies:
    """Copies between the pool of a GPU and pinned host pages, on a stream for each direction."""

    def __init__(self, parts: Parts, host: Memory, lane: CudaLane) -> None:
        self._parts, self._host, self._lane = parts, host, lane
        self._down, self._up = torch.cuda.Stream(lane.device), torch.cuda.Stream(lane.device)
        self._launching = (
            threading.Lock()
        )  # a given-up write is launched in the host's thread, others in that of writes

    def start_write(self, move: Move) -> Callable[[], None]:
        """Launch the copy of device pages to host pages. Returns a function that waits for its end.

        Passes and loads that are launched later wait, on the device, until given-up pages have been read.
        """
        read, arrived = torch.cuda.Event(), torch.cuda.Event()
        with (
            self._launching,
            torch.cuda.device(self._lane.device),
            torch.cuda.stream(self._down),
            torch.inference_mode(),
        ):
            chunks = [*self._chunks(move)]
            for number, (kind, pages, hosts) in enumerate(chunks, 1):
                parts, host = self._parts[kind], self._host[kind]
                staging = torch.empty((len(hosts), parts.size), dtype=torch.uint8, device=self._lane.device)
                parts.gather(self._upload(pages), staging)
                if number == len(chunks):
                    read.record(self._down)
                for start, count in runs(hosts):
                    page = int(hosts[start])
                    host[page : page + count].copy_(staging[start : start + count], non_blocking=True)
            arrived.record(self._down)
        if move.given_up:
            self._lane.forward.wait_event(read)
            self._up.wait_event(read)
        return arrived.synchronize

    def load(self, move: Move) -> None:
        """Copy host pages to device pages, and wait for the end."""
        with torch.cuda.device(self._lane.device), torch.cuda.stream(self._up), torch.inference_mode():
            for kind, pages, hosts in self._chunks(move):
                parts, host = self._parts[kind], self._host[kind]
                staging = torch.empty((len(hosts), parts.size), dtype=torch.uint8, device=self._lane.device)
                for start, count in runs(hosts):
                    page = int(hosts[start])
                    staging[start : start + count].copy_(host[page : page + count], non_blocking=True)
                parts.scatter(self._upload(pages), staging)
            arrived = torch.cuda.Event()
            arrived.record(self._up)
            arrived.synchronize()

    def close(self) -> None:
        """Wait for the copies, then let the host's memory be freed."""
        self._down.synchronize()
        self._up.synchronize()
        for host in self._host.values():
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())

    def _chunks(self, move: Move) -> Iterator[tuple[BlockKind, NDArray[np.int32], NDArray[np.int32]]]:
        """Yield what a write or load copies, by as many blocks as the staging area has room for."""
        for kind, pages, hosts in move.copied():
            at_once = max(1, STAGING_BYTES // self._parts[kind].size)
            for first, stop in pairwise([*range(0, len(hosts), at_once), len(hosts)]):
                yield kind, pages[first:stop], hosts[first:stop]

    def _upload(self, pages: NDArray[np.int32]) -> Tensor:
        pinned = torch.empty(len(pages), dtype=torch.int64, pin_memory=True)
        pinned.copy_(_index(pages))
        return pinned.to(self._lane.device, non_blocking=True)


def runs(*pages: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Yield runs of pages that are consecutive in each of these columns: index of the first one, and how many."""
    apart = np.zeros(max(len(pages[0]) - 1, 0), np.bool_)
    for column in pages:
        apart |= np.diff(column) != 1
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(pages[0])]
    for first, stop in pairwise(bounds):
        if stop > first:
            yield first, stop - first


def _index(pages: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(pages.astype(np.int64))
