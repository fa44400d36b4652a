"""Carries out the moves of one rank: copies between device and host memory, reads and writes of storage.

    device pages  <── copies ──>  host pages, uint8 [host pages, page bytes]  <── reader, writer ──>  storage

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
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.host.cache_moves import Move, MoveEnd
from lockstep.host.page_store import PageStore, StoreCounts, StoreError
from lockstep.runtime.memory import MIB, explained, free_bytes_of
from lockstep.runtime.overlap import CudaLane, StreamLane
from lockstep.runtime.tiers.identity import Identity
from lockstep.runtime.tiers.page_parts import PageParts

log = logging.getLogger("lockstep.runtime")

STAGING_BYTES = 64 * MIB  # of device memory, for each direction
RUNS_MAX = 16  # copies of a move that are always made one by one
END_S = 10.0  # longest wait of `close` for writes to storage that were ordered
Done = Callable[[MoveEnd], None]


# mechanism: host-cache (executed)
class HostMover:
    """Moves of one rank: `lockstep.host.cache_moves.PageMover`.

    Args:
        lane: of the passes.
        store: None: there is no storage.
        identity: of the pages in storage; replaced together with the weights.
    Raises: ConfigError if there is no room for the host pages.
    """

    def __init__(
        self, pages: PageParts, host_pages: int, lane: StreamLane, store: PageStore | None, identity: Identity
    ) -> None:
        self.pages, self.identity = pages, identity
        self._store = store
        self.host = make_host_pages(host_pages, pages.size, pinned=pages.device.type == "cuda")
        self._copies = CudaCopies(pages, self.host, lane) if isinstance(lane, CudaLane) else CpuCopies(pages, self.host)
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
            keys = [sha256(identity + key).digest() for key in move.keys]
            after = sha256(identity + move.after).digest() if move.after else b""
            if move.kind == "prefetch":
                with self._lock:
                    self._fetching.add(move.number)
                run = lambda: self._fetch(move, keys)  # noqa: E731
            else:
                run = lambda: self._store_pages(move, keys, after)  # noqa: E731
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

    def _fetch(self, move: Move, keys: list[bytes]) -> MoveEnd:
        """Read pages from storage, up to the first that is not there."""
        assert self._store is not None
        found, error = 0, ""
        for key, page in zip(keys, move.host_pages.tolist(), strict=True):
            if move.number in self._cancelled or self._closing.is_set():
                break
            try:
                there = self._store.read(key, self._bytes_of(page))
            except Exception as raised:  # of a store that keeps less than it promises: a miss
                there, error = False, f"{type(raised).__name__}: {raised}"
                log.exception("a page of storage cannot be read")
            if not there:
                break
            found += 1
        with self._lock:
            self._fetching.discard(move.number)
            self._cancelled.discard(move.number)
        self._store.use(keys[:found], b"")
        return MoveEnd(move.number, found, error)

    def _store_pages(self, move: Move, keys: list[bytes], after: bytes) -> MoveEnd:
        """Write pages to storage, up to the first that cannot be written."""
        assert self._store is not None
        written, error = 0, ""
        for key, page in zip(keys, move.host_pages.tolist(), strict=True):
            if self._closing.is_set():
                break
            try:
                self._store.write(key, self._bytes_of(page))
            except Exception as raised:
                error = str(raised) or type(raised).__name__
                if not isinstance(raised, StoreError):
                    log.exception("a page cannot be written to storage")
                break
            written += 1
        self._store.use(keys[:written], after)
        return MoveEnd(move.number, written, error)

    def _bytes_of(self, page: int) -> memoryview:
        return memoryview(self.host[page].numpy())


def _report(move: Move, run: Callable[[], MoveEnd], done: Done) -> None:
    """Run a move and report its end; an error that no move expects ends the engine."""
    try:
        end = run()
    except BaseException as error:
        end = MoveEnd(move.number, 0, failure=error)
    done(end)


# --------------------------------------------------------------------------------------------------------- host memory


def make_host_pages(pages: int, page_bytes: int, *, pinned: bool) -> Tensor:
    """Allocate host memory, uint8 [pages, page bytes]. Raises ConfigError if the memory is not there.

    Pinned memory is registered after its allocation, because torch's own allocator rounds sizes up to a power of two.
    """
    needed, cpu = pages * page_bytes, torch.device("cpu")
    free_bytes = free_bytes_of(cpu)
    if free_bytes is not None and needed > free_bytes:  # the system may overcommit
        raise ConfigError(
            f"`host_cache_gb` needs {needed / MIB:,.0f} MiB on this rank, but {free_bytes / MIB:,.0f} MiB of memory "
            "are free\nhint: lower --host-cache-gb"
        )
    with explained(f"{pages:,} host pages of {page_bytes:,} bytes", cpu, "lower --host-cache-gb"):
        made = torch.empty((pages, page_bytes), dtype=torch.uint8)
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

    def __init__(self, pages: PageParts, host: Tensor) -> None:
        self._pages, self._host = pages, host

    def start_write(self, move: Move) -> Callable[[], None]:
        """Copy device pages to host pages. Returns a function that waits for the end, which has come."""
        self._copy(move, to_host=True)
        return lambda: None

    def load(self, move: Move) -> None:
        """Copy host pages to device pages."""
        self._copy(move, to_host=False)

    def _copy(self, move: Move, *, to_host: bool) -> None:
        """Copy each run of pages that lie side by side at both ends at once; pages that lie apart by index."""
        pages, hosts = move.device_pages, move.host_pages
        steps = list(runs(pages, hosts))
        by_index = len(steps) > RUNS_MAX and len(steps) * 2 > len(pages)
        at, there = _index(pages), _index(hosts)
        with torch.inference_mode():
            for part in self._pages.parts:
                device, host = part.on_device(), part.of(self._host)
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

    def __init__(self, pages: PageParts, host: Tensor, lane: CudaLane) -> None:
        self._pages, self._host, self._lane = pages, host, lane
        self._down, self._up = torch.cuda.Stream(lane.device), torch.cuda.Stream(lane.device)
        self._launching = (
            threading.Lock()
        )  # a given-up write is launched in the host's thread, others in that of writes
        self._at_once = max(1, STAGING_BYTES // pages.size)

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
            for first, stop in self._chunks(move):
                staging = torch.empty((stop - first, self._pages.size), dtype=torch.uint8, device=self._lane.device)
                self._pages.gather(self._upload(move.device_pages[first:stop]), staging)
                if stop == len(move.device_pages):
                    read.record(self._down)
                for start, count in runs(move.host_pages[first:stop]):
                    page = int(move.host_pages[first + start])
                    self._host[page : page + count].copy_(staging[start : start + count], non_blocking=True)
            arrived.record(self._down)
        if move.given_up:
            self._lane.forward.wait_event(read)
            self._up.wait_event(read)
        return arrived.synchronize

    def load(self, move: Move) -> None:
        """Copy host pages to device pages, and wait for the end."""
        with torch.cuda.device(self._lane.device), torch.cuda.stream(self._up), torch.inference_mode():
            for first, stop in self._chunks(move):
                staging = torch.empty((stop - first, self._pages.size), dtype=torch.uint8, device=self._lane.device)
                for start, count in runs(move.host_pages[first:stop]):
                    page = int(move.host_pages[first + start])
                    staging[start : start + count].copy_(self._host[page : page + count], non_blocking=True)
                self._pages.scatter(self._upload(move.device_pages[first:stop]), staging)
            arrived = torch.cuda.Event()
            arrived.record(self._up)
            arrived.synchronize()

    def close(self) -> None:
        """Wait for the copies, then let the host's memory be freed."""
        self._down.synchronize()
        self._up.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())

    def _chunks(self, move: Move) -> Iterator[tuple[int, int]]:
        bounds = [*range(0, len(move.host_pages), self._at_once), len(move.host_pages)]
        yield from pairwise(bounds)

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
