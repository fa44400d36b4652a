"""The tiers below the radix cache: host memory, and storage below that.

    device    radix cache   --write-->   host     a second radix cache, over   --store-->     storage   by page hash;
              (`Memory`)    <--load---   memory   pages of host memory         <--prefetch--            the host's own

**The host cache** is a `RadixCache` like that of the device: exact tokens in a namespace, locks, eviction of the oldest
leaves. The two trees are independent. One match in each of them shows which pages of a prompt only the host has.

**Writes.** `write_through` copies the pages of a prompt to the host once they are computed. `write_through_selective`
copies those that were used often enough. `write_back` copies pages that are evicted from the device, with the pages
above them on their path. The first two policies lock the device pages until the answer. Pages that are written back are
given up at once: the copy is ordered before the batch that may overwrite them, so eviction frees pages at once under
every policy.

**Loads.** If the host has more of a prompt than the device when the request could start, the request waits for a load;
other requests may pass it. A load brings all of it or nothing: what does not fit is computed. When the load ends, its
pages belong to the radix cache and are not locked: a waiting request holds nothing (L6). A request waits for one load
each time it waits, so that it starts even if the loaded pages are evicted again.

**Storage.** A page is identified by a chain of SHA-256 over the namespace and the tokens from the root on. All pages of
the host are stored. Pages that the host lacks are prefetched for waiting requests. Placeholders of media are numbers of
one engine, so a prompt is stored and fetched only up to the first placeholder.

**Operations.** Every move is an `Operation`. It is recorded when it begins, locks both ends, and is ended exactly once
by its answer, whatever has become of its request. Until then

    a write    locks its device pages unless they are given up; owns its host pages; locks the prefix in front of them
    a load     owns its device pages; locks the prefix in front of them, and its host pages
    a prefetch owns its host pages, and room for blocks; locks the prefix in front of them
    a store    locks its host pages, and their blocks

A failed or shortened move keeps the pages that have arrived, which are a prefix; the rest is a miss and no error.
**Window and state blocks** (hybrid.py) are copied with their page, or alone: block_tiers.py.

Source: SGLang's HiCache (defaults, policies). The differences are explained in docs/tiers.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from lockstep.core.contract.checks import all_ids, fail, misowned
from lockstep.core.contract.commands import (
    NO_ROWS,
    BlockFetch,
    BlockStore,
    CancelPrefetch,
    CopyToHost,
    LoadFromHost,
    PrefetchFromStorage,
    Step,
    WriteToStorage,
)
from lockstep.core.contract.config import CacheTiers
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    BlocksFound,
    DeferReason,
    HostCopyFinished,
    HostPagesEvicted,
    PrefetchFinished,
    RequestId,
    StorageWritten,
    TierKind,
    TierOperationEnded,
    TierOperationStarted,
    TierOutcome,
)
from lockstep.core.kv.block_tiers import HostBlocks, NeededBlocks, block_key
from lockstep.core.kv.device_memory import DeviceMemory
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.operations import NO_OPERATION, MovedBlocks, Operation, operation_image, operation_of
from lockstep.core.kv.pages import PagePool
from lockstep.core.kv.radix import TOKEN_BYTES, Match, RadixCache
from lockstep.core.kv.running_view import EngineView
from lockstep.core.requests.budget import PrefillBudget
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import Int32s, Request, RequestState

NO_FETCH: tuple[BlockFetch, ...] = ()
LOOKAHEAD_REQUESTS = 64
"""Waiting requests, from the head of the queue, whose prefixes are looked up in storage ahead of their turn."""

Answer = HostCopyFinished | PrefetchFinished | StorageWritten

ANSWERED_BY: dict[TierKind, type[Answer]] = {
    "write": HostCopyFinished,
    "load": HostCopyFinished,
    "prefetch": PrefetchFinished,
    "store": StorageWritten,
}


class LoadPlan(NamedTuple):
    """The pages that a load would bring for a request."""

    pages: int  # pages that the request would not have to compute
    device: Match  # the part of the path that the device has
    found: Match  # the part of the path that the host has
    stop: int  # pages behind which the request then starts
    host_path: Int32s  # pages of `found`

    @property
    def host_pages(self) -> Int32s:
        """Host pages of the path that the device lacks."""
        return self.host_path[self.device.pages : self.stop]


class LoadCandidate(msgspec.Struct):
    """Loads and prefetches for a waiting request."""

    queried: bool = False  # its prefix was looked up in storage, or is too short for that
    loaded: bool = False  # it had its load, or its wait for one is over
    shared_load: bool = False  # it waited for the load of another request
    operation: int = NO_OPERATION  # the operation it waits for
    due_us: int | None = None  # the latest end of the wait
    prefetch: int = NO_OPERATION  # the prefetch that was begun for it
    since_us: int = -1  # begin of its first wait
    until_us: int = -1  # end of its last wait
    start: int = 0  # pages [start:stop) of its prefix were loaded for it ...
    from_storage: bytes = b""  # ... one byte for each: 1 if it came from storage


class Tiers:
    """Host memory and storage of one engine."""

    present: ClassVar[bool] = True  # False: there is nothing below the device

    def __init__(self, settings: CacheTiers, device: DeviceMemory) -> None:
        self.settings = settings
        self.device = device
        self.page_size = device.config.page_size
        self.generation = 0
        self.copies_blocked = False  # weights or memory of the device are being changed: nothing is copied from it
        self.pool = PagePool(settings.host_pages)
        self.host = RadixCache(self.page_size)
        self.operations = device.operations
        self.next_operation = 0
        self.candidates: dict[RequestId, LoadCandidate] = {}
        self.uses: Int32s = np.zeros(device.config.pages, np.int32)  # of each cached device page, without the first
        self.writing: Int32s = np.full(device.config.pages, NO_OPERATION, np.int32)  # by device page: its write
        self.loading: Int32s = np.full(settings.host_pages, NO_OPERATION, np.int32)  # by host page: the load under way
        self.fetching: dict[bytes, int] = {}  # by `_fetch_key`: the prefetch under way
        self.stored = np.zeros(settings.host_pages, np.bool_)  # host pages that are stored or being stored
        self.fetched = np.zeros(settings.host_pages, np.bool_)  # host pages from storage that were not used since
        config = device.config
        self.blocks = HostBlocks(config, settings.host_pages) if config.hybrid is not msgspec.UNSET else None

    # ---------------------------------------------------------------------------------------------------------- queries

    @property
    def awaited(self) -> bool:
        """Whether requests may wait for operations under way: for their pages, or for the pages that they lock."""
        return self.operations.device_busy or any(one.operation != NO_OPERATION for one in self.candidates.values())

    def deferral_reason(self, request: Request, now_us: int) -> DeferReason | None:
        """Return why a waiting request may not start yet; None if it waits for no operation."""
        candidate = self.candidates.get(request.request_id)
        if candidate is None or candidate.operation == NO_OPERATION:
            return None
        if candidate.due_us is not None and candidate.due_us <= now_us:
            return None
        return "load" if self.operations[candidate.operation].kind == "load" else "prefetch"

    # ------------------------------------------------------------------------------------------------------------ write

    def used(self, match: Match) -> None:
        """Count a use of these cached pages, behind which a request starts."""
        if match.node is not None and self.settings.uses_to_write > 1:
            self.uses[self.device.radix.pages_of(match.node)[: match.pages]] += 1

    def back_up(self, node: RadixNode, pages: int, step: Step) -> None:
        """Write the first `pages` of the path to `node`, which are cached, as far as the policy selects them.

        Only computed pages are written: with `same_step_sharing` a batch in flight may still compute some.
        """
        if self.settings.write_policy == "write_back" or node.invalidated or self.device.is_stale(node.namespace):
            return
        if self.copies_blocked:
            return
        device_pages = self.device.computed_of(self.device.radix.pages_of(node)[: min(pages, node.stop)])
        pages = device_pages.size
        if not pages:
            return
        tokens = path_tokens(node)[: pages * self.page_size * TOKEN_BYTES]
        if self.settings.uses_to_write > 1:
            often = self.uses[device_pages] + 1 >= self.settings.uses_to_write
            pages = pages if often.all() else int(often.argmin())
        self._write(node.namespace, tokens, device_pages, pages, step, node)

    def evict(self, count: int, step: Step) -> Int32s:
        """Evict pages of the device, and write back what the policy selects. Returns: see `RadixCache.evict`."""
        radix = self.device.radix
        if self.settings.write_policy == "write_back":
            radix.on_evict = lambda leaf: self._write_back(leaf, step)
        evicted = radix.evict(count)
        radix.on_evict = None
        self.forget(evicted)
        return evicted

    def forget(self, device_pages: Int32s) -> None:
        """Drop uses and marks of device pages that are no longer cached."""
        self.uses[device_pages] = 0
        self.writing[device_pages] = NO_OPERATION

    def _write_back(self, leaf: RadixNode, step: Step) -> None:
        """Copy the path of a leaf, whose last pages are evicted next, as far as the host lacks it."""
        if leaf.invalidated or self.device.is_stale(leaf.namespace):
            return
        device_pages = self.device.radix.pages_of(leaf)
        self._write(leaf.namespace, path_tokens(leaf), device_pages, leaf.stop, step, None)

    def _write(
        self, namespace: str, tokens: bytes, device_pages: Int32s, stop: int, step: Step, node: RadixNode | None
    ) -> None:
        """Begin to write the pages that the host lacks of the first `stop` pages of a path, as far as it has room.

        `node`: the end of the path or a node below it, which is locked; None: the pages are given up.
        """
        known = self.host.match(namespace, tokens, stop)
        fresh = self.writing[device_pages[known.pages : stop]] == NO_OPERATION
        if not fresh.any() and self.blocks is None:
            self.host.unlock(self.host.lock(known))  # counts as a use
            return
        start = known.pages + int(fresh.argmax()) if fresh.any() else stop
        under_way = ~fresh[start - known.pages :]
        stop = start + int(under_way.argmax()) if under_way.any() else stop
        if not fresh.any():
            start = stop = known.pages  # blocks alone
        handle = self.host.lock(known)
        stop = min(stop, start + self.pool.free_count + self.host.evictable_pages)
        if stop == start and self.blocks is None:
            self.host.unlock(handle)
            return
        moved, host_pages = device_pages[start:stop].copy(), self._take_host_pages(stop - start, step)
        blocks = self._begin_block_write(device_pages[:stop], start, handle, step)
        if stop == start and not blocks:
            self.host.unlock(handle)
            return
        if node is not None:
            self.device.lock_node(node)
        operation = Operation(
            self._number(),
            "write",
            namespace,
            tokens[: stop * self.page_size * TOKEN_BYTES],
            start,
            stop,
            moved,
            host_pages,
            node,
            handle,
            blocks=blocks,
        )
        self.writing[moved] = operation.number
        for one in blocks:
            self.writing[device_pages[one.index]] = operation.number
            if one.kind == "window":
                operation.windows_locked = device_pages[one.index]
            else:
                operation.slots_locked = one.device
        if node is None:
            operation.windows_locked = operation.slots_locked = NO_ROWS
        else:
            self.device.hybrid.lock_moving(operation.windows_locked, operation.slots_locked)
        self._begin(operation, step)
        copies = tuple(one.copy() for one in blocks)
        step.commands.append(CopyToHost(operation.number, moved, host_pages, node is None, self.generation, copies))

    def _begin_block_write(self, path: Int32s, start: int, known: RadixNode, step: Step) -> list[MovedBlocks]:
        """Allocate host room for the blocks of a path that are to be written, with its pages from `start` on.

        `known`: the end of the part that the host has.
        """
        if self.blocks is None:
            return []
        busy = self.writing[path[: known.stop]] != NO_OPERATION
        return self.blocks.begin_write(self.device.hybrid, path, self.host.pages_of(known), start, busy, step)

    def _take_host_pages(self, count: int, step: Step) -> Int32s:
        """Allocate host pages for an operation; the oldest unlocked ones are evicted. The caller checks the room."""
        missing = count - self.pool.free_count
        if missing > 0:
            self._free_host_pages(self.host.evict(missing))
            step.decided.append(HostPagesEvicted(step.time_us, missing))
        return self.pool.alloc(count)

    def _free_host_pages(self, host_pages: Int32s) -> None:
        self.stored[host_pages] = False
        self.fetched[host_pages] = False
        if self.blocks is not None:
            self.blocks.drop(host_pages)
        self.pool.free(host_pages)

    # ------------------------------------------------------------------------------------------------------------- load

    # mechanism: host-cache (decided)
    def begin_load(
        self, engine: EngineView, request: Request, device: Match, budget: PrefillBudget, step: Step
    ) -> bool:
        """Whether a request that could start should wait for a load of pages that only the host has.

        Begins that load, unless a load of these pages is under way.
        """
        candidate = self.candidates.setdefault(request.request_id, LoadCandidate())
        if candidate.loaded or candidate.operation != NO_OPERATION:
            return False
        wanted = self._wanted(request, device)
        if wanted is None or wanted.pages * self.page_size < self.settings.load_tokens_min:
            return False
        coming = self._blocks_to_load(wanted)
        number = self._load_under_way(wanted, coming)
        if number != NO_OPERATION:
            if candidate.shared_load:
                return False
            candidate.shared_load = True
        else:
            pages, locking = wanted.host_pages.size, wanted.device.evictable_pages
            most = self.settings.load_pages_max
            if most is not None and (loading := self.operations.loading_pages) and loading + pages > most:
                return self._wait(candidate, self._any_load(), step)
            room = self.device.available_pages - budget.set_aside - locking
            if pages > room or not self._has_room(coming, engine):
                return False
            budget.hold((pages + locking) * self.page_size)
            candidate.loaded = True
            candidate.start, candidate.from_storage = device.pages, bytes(wanted.pages)
            if self.settings.storage:
                brought = wanted.host_path[device.pages : wanted.stop]
                candidate.from_storage = self.fetched[brought].tobytes().ljust(wanted.pages, b"\0")
                self.fetched[brought] = False
            number = self._load(request, wanted, coming, step)
        return self._wait(candidate, number, step)

    def _wanted(self, request: Request, device: Match) -> LoadPlan | None:
        """Return what a load would bring beyond `device`, the match behind which the request could start."""
        most = request.cacheable_tokens // self.page_size
        found, stop = self.host.match(request.namespace, request.tokens, most), 0
        if self.blocks is None:
            stop = found.pages
        elif found.node is not None:
            stop = self.blocks.usable_pages(self.device.hybrid, *self._paths(request, found, most))
            found = self.host.match(request.namespace, request.tokens, stop)
        if stop <= device.pages or found.node is None:
            return None
        pages = stop - device.pages
        if self.device.hybrid.present:
            device = self.device.radix.match(request.namespace, request.tokens, stop)
        return LoadPlan(pages, device, found, stop, self.host.pages_of(found.node)[: found.pages])

    def _paths(self, request: Request, found: Match, most: int) -> tuple[Int32s, Int32s]:
        """Return the pages that the device and the host have of a prefix. `found`: the match of the host.

        `most`: pages of the prefix, at most.
        """
        whole = self.device.radix.match(request.namespace, request.tokens, most)
        host_path = self.host.pages_of(found.node)[: found.pages] if found.node is not None else NO_ROWS
        return self.device.path_of(whole), host_path

    def _blocks_to_load(self, wanted: LoadPlan) -> list[NeededBlocks]:
        """Return the blocks that a load would bring."""
        if self.blocks is None:
            return []
        return self.blocks.blocks_to_load(self.device.hybrid, self.device.path_of(wanted.device), wanted.stop)

    def _has_room(self, coming: list[NeededBlocks], engine: EngineView) -> bool:
        if self.blocks is None:
            return True
        return self.blocks.has_room(self.device.hybrid, coming, engine)

    def _load_under_way(self, wanted: LoadPlan, coming: list[NeededBlocks]) -> int:
        """Return a load under way that brings some of these pages or blocks; NO_OPERATION if there is none."""
        pages = np.concatenate((wanted.host_pages[:1], *(wanted.host_path[one.lacking] for one in coming)))
        under_way = self.loading[pages]
        return int(under_way.max())

    def _load(self, request: Request, wanted: LoadPlan, coming: list[NeededBlocks], step: Step) -> int:
        radix, device = self.device.radix, self.device
        host_pages = wanted.host_pages
        operation = Operation(
            self._number(),
            "load",
            request.namespace,
            request.tokens[: wanted.stop * self.page_size * TOKEN_BYTES],
            wanted.stop - host_pages.size,
            wanted.stop,
            NO_ROWS,
            host_pages,
            radix.lock(wanted.device),
            self.host.lock(wanted.found),
            request.request_id,
        )
        self.loading[host_pages] = operation.number
        if self.blocks is not None:
            path = device.path_of(wanted.device)
            for one in coming:
                self.loading[wanted.host_path[one.lacking]] = operation.number
                if one.kind == "window":
                    operation.windows_locked = path[one.there]
                else:
                    operation.slots_locked = device.hybrid.blocks_of(one.kind, path[one.there])
            device.hybrid.lock_moving(operation.windows_locked, operation.slots_locked)
            self.blocks.begin_read(coming, wanted.host_path)
        operation.device_pages = device.alloc(operation.pages, "admission", step)
        if self.blocks is not None:
            operation.blocks = self.blocks.read(device.hybrid, coming, wanted.host_path, step)
        self._begin(operation, step)
        copies = tuple(one.copy() for one in operation.blocks)
        load = LoadFromHost(operation.number, host_pages, operation.device_pages, self.generation, copies)
        step.commands.append(load)
        return operation.number

    def _any_load(self) -> int:
        """Return the oldest load under way."""
        return next(one.number for one in self.operations.values() if one.kind == "load")

    def _wait(self, candidate: LoadCandidate, number: int, step: Step) -> bool:
        """Let a request wait for the end of an operation, at most `load_timeout_us`. Returns True."""
        timeout = self.settings.load_timeout_us
        if candidate.since_us < 0:
            candidate.since_us = step.time_us
        candidate.operation = number
        candidate.due_us = None if timeout is None else step.time_us + timeout
        return True

    def loaded_for(self, request: Request, cached_tokens: int) -> tuple[int, int, int]:
        """Return how many of the cached tokens of a starting request came from the host, how many of these from
        storage, and how long it waited for them, us."""
        candidate = self.candidates.get(request.request_id)
        if candidate is None:
            return 0, 0, 0
        pages = max(min(cached_tokens // self.page_size - candidate.start, len(candidate.from_storage)), 0)
        stored = candidate.from_storage[:pages].count(1)
        waited_us = max(candidate.until_us - candidate.since_us, 0)
        return pages * self.page_size, stored * self.page_size, waited_us

    # ---------------------------------------------------------------------------------------------------------- storage

    def _look_ahead(self, waiting: Sequence[Request], step: Step) -> None:
        """Look up the pages that the host lacks of the prefixes of waiting requests in storage, once each, as far as
        `prefetch_share` allows."""
        most = int(self.settings.prefetch_share * self.settings.host_pages)
        for request in waiting[:LOOKAHEAD_REQUESTS]:
            candidate = self.candidates.setdefault(request.request_id, LoadCandidate())
            if candidate.queried:
                continue
            if self.operations.prefetching_pages >= most or not self._may_fetch_blocks():
                return
            candidate.queried = True
            self._prefetch(request, candidate, most - self.operations.prefetching_pages, step)

    def _may_fetch_blocks(self) -> bool:
        """Whether the host pools of window and state blocks have room for one more prefetch."""
        if self.blocks is None:
            return True
        fetches = (one for one in self.operations.values() if one.kind == "prefetch")
        under_way = [moved for one in fetches for moved in one.blocks]
        return self.blocks.may_fetch(self.device.hybrid, under_way, self.settings.prefetch_share)

    # mechanism: storage (decided)
    def _prefetch(self, request: Request, candidate: LoadCandidate, most: int, step: Step) -> None:
        """Begin to fetch the pages that the host lacks of a prefix, if there are enough; or join a fetch under way."""
        settings, page_size = self.settings, self.page_size
        tokens = request.tokens[: sharable_tokens(request.tokens) * TOKEN_BYTES]
        stop = min(request.cacheable_tokens, len(tokens) // TOKEN_BYTES) // page_size
        known = self.host.match(request.namespace, tokens, stop)
        if self.blocks is not None:
            reach = self.blocks.usable_pages(self.device.hybrid, *self._paths(request, known, stop))
        else:
            reach = max(known.pages, self.device.radix.match(request.namespace, request.tokens, stop).pages)
        if (stop - reach) * page_size < settings.prefetch_tokens_min:
            return
        keys = page_keys(request.namespace, tokens, stop, page_size)
        number = self.fetching.get(self._key_of_fetch(keys, known.pages, reach), NO_OPERATION)
        if number == NO_OPERATION:
            number = self._fetch(request, tokens, known, reach, keys, most, step)
            if number == NO_OPERATION:
                return
            stop = self.operations[number].stop
        candidate.prefetch = number
        if settings.prefetch_policy == "best_effort":
            return
        candidate.since_us, candidate.operation, candidate.due_us = step.time_us, number, None
        if settings.prefetch_policy == "timeout":
            asked = (stop - min(known.pages, reach)) * page_size
            longer_us = asked * settings.prefetch_timeout_us_per_ki_token // 1024
            candidate.due_us = step.time_us + settings.prefetch_timeout_us + longer_us

    def _key_of_fetch(self, keys: list[bytes], known: int, reach: int) -> bytes:
        """Return the key by which requests join a prefetch: of the first page that it lacks on the host.

        If layers differ and only blocks are lacking, of the first page behind `reach`, or of the last page.
        """
        first = known if self.blocks is None else max(known, reach)
        return keys[min(first, len(keys) - 1)]

    def _fetch(
        self, request: Request, tokens: bytes, known: Match, reach: int, keys: list[bytes], most: int, step: Step
    ) -> int:
        """Begin a prefetch. Returns its number; NO_OPERATION if there is no room for pages that would help.

        Args:
            known: the match of the host.
            reach: pages behind which the request could start without the prefetch.
            keys: keys of the pages of the path.
            most: pages to fetch, at most.
        """
        handle, start = self.host.lock(known), known.pages
        stop = min(len(keys), start + most, start + self.pool.free_count + self.host.evictable_pages)
        if stop <= reach:
            self.host.unlock(handle)
            return NO_OPERATION
        host_pages, moved, asked, reached = self._take_host_pages(stop - start, step), list[MovedBlocks](), NO_FETCH, 0
        if self.blocks is not None:
            paths = self._paths(request, known, stop)
            moved, asked, reached = self.blocks.to_fetch(self.device.hybrid, *paths, reach, keys[:stop], step)
        operation = Operation(
            self._number(),
            "prefetch",
            request.namespace,
            tokens[: stop * self.page_size * TOKEN_BYTES],
            start,
            stop,
            NO_ROWS,
            host_pages,
            None,
            handle,
            request.request_id,
            blocks=moved,
        )
        self.fetching[self._key_of_fetch(keys, start, reach)] = operation.number
        self._begin(operation, step)
        wanted = tuple(keys[start:stop])
        order = PrefetchFromStorage(operation.number, wanted, host_pages, self.generation, asked, reached)
        step.commands.append(order)
        return operation.number

    def _store(self, namespace: str, tokens: bytes, stop: int, step: Step) -> None:
        """Write the pages and blocks that storage lacks of a path that the host has."""
        stop = min(stop, sharable_tokens(tokens) // self.page_size)
        found = self.host.match(namespace, tokens, stop)
        if found.node is None or self.device.is_stale(namespace):
            return
        host_pages = self.host.pages_of(found.node)[: found.pages]
        missing = ~self.stored[host_pages]
        blocks = self.blocks.to_store(host_pages) if self.blocks is not None else []
        if not missing.any() and not blocks:
            return
        start, stop = int(missing.argmax()) if missing.any() else found.pages, found.pages
        keys = page_keys(namespace, tokens, stop, self.page_size)
        operation = Operation(
            self._number(),
            "store",
            namespace,
            tokens[: stop * self.page_size * TOKEN_BYTES],
            start,
            stop,
            NO_ROWS,
            host_pages[start:].copy(),
            None,
            self.host.lock(found),
            blocks=blocks,
        )
        self.stored[operation.host_pages] = True
        self._begin(operation, step)
        beside = tuple(
            BlockStore(one.kind, tuple(block_key(one.kind, keys[page]) for page in one.index.tolist()), one.host)
            for one in blocks
        )
        wanted, after = tuple(keys[start:]), keys[start - 1] if start else b""
        write = WriteToStorage(operation.number, wanted, operation.host_pages, self.generation, beside, after)
        step.commands.append(write)

    # --------------------------------------------------------------------------------------------- ends of operations

    def advance(
        self, requests: Mapping[RequestId, Request], waiting: Sequence[Request], step: Step, *, admits: bool
    ) -> bool:
        """End the waits that are over, drop requests that left the queue, and prefetch for new ones.

        Called after every event.

        Args:
            admits: whether requests may start; otherwise nothing is prefetched.
        Returns: whether a wait has ended, so that admission may be tried again.
        """
        freed = False
        for request_id, candidate in list(self.candidates.items()):
            request = requests.get(request_id)
            if request is None or request.state is not RequestState.WAITING:
                del self.candidates[request_id]
                self._give_up(candidate.prefetch, step)
            elif candidate.due_us is not None and candidate.due_us <= step.time_us:
                operation = self.operations[candidate.operation]
                candidate.loaded = candidate.loaded or operation.kind == "load"
                self._stop_waiting(candidate, step.time_us)
                freed = True
                self._give_up(candidate.prefetch, step)
        if self.settings.storage and admits:
            self._look_ahead(waiting, step)
        dues = [one.due_us for one in self.candidates.values() if one.due_us is not None]
        if dues:
            step.wake_by(min(dues))
        return freed

    def _stop_waiting(self, candidate: LoadCandidate, now_us: int) -> None:
        candidate.operation, candidate.due_us, candidate.until_us = NO_OPERATION, None, now_us

    def _give_up(self, number: int, step: Step) -> None:
        """Cancel a prefetch for which no request waits. The pages that it has brought by then are kept."""
        operation = self.operations.get(number)
        if operation is None or operation.cancelled:
            return
        if not any(number in (one.operation, one.prefetch) and self._may_use(one) for one in self.candidates.values()):
            operation.cancelled = True
            step.commands.append(CancelPrefetch(number))

    def _may_use(self, candidate: LoadCandidate) -> bool:
        """Whether a request may still start behind the pages that are fetched for it."""
        return candidate.operation != NO_OPERATION or self.settings.prefetch_policy == "best_effort"

    def answered(self, event: Answer, step: Step) -> None:
        """End an operation: keep what has arrived, free the rest.

        Raises ContractError, changing nothing, for an answer without an order, or for more than was ordered.
        """
        if isinstance(event, HostCopyFinished):
            number = event.copy_id
        else:
            number = event.prefetch_id if isinstance(event, PrefetchFinished) else event.write_id
        operation = self.operations.get(number)
        if operation is None or not isinstance(event, ANSWERED_BY[operation.kind]):
            raise ContractError(f"{type(event).__name__} of operation {number}, which is not under way")
        if not 0 <= event.pages_done <= operation.pages:
            raise ContractError(
                f"{type(event).__name__} of operation {number} has {event.pages_done} pages of {operation.pages}"
            )
        found: tuple[BlocksFound, ...] = ()
        if isinstance(event, PrefetchFinished) and (found := event.blocks):
            if self.blocks is None or event.error:
                why = f"an error ({event.error})" if event.error else "no windows and states to bring"
                raise ContractError(f"PrefetchFinished of operation {number} has blocks, and {why}")
            self.blocks.check_fetched(operation.blocks, found, operation.start + event.pages_done)
        del self.operations[number]
        done, complete = event.pages_done, event.pages_done == operation.pages and not event.error
        outcome: TierOutcome = "done" if done == operation.pages else "partial" if done or found else "failed"
        if operation.blocks and not operation.pages and not (found if operation.kind == "prefetch" else complete):
            outcome = "failed"
        if operation.cancelled and outcome != "done":
            outcome = "cancelled"
        kept = done
        if operation.kind != "store" and self.device.is_stale(operation.namespace):
            outcome, kept = "void", self._settle(operation, 0, complete=False)
        elif operation.kind == "store":
            self._settle_store(operation, done, complete=complete)
        elif (kept := self._settle(operation, done, complete=complete, found=found)) < 0:
            outcome, kept = "orphaned", 0
        self._release(operation)
        step.decided.append(TierOperationEnded(step.time_us, number, operation.kind, outcome, kept))
        for candidate in self.candidates.values():
            if candidate.operation == number:
                late = candidate.due_us is not None and candidate.due_us <= step.time_us
                candidate.loaded = candidate.loaded or (late and operation.kind == "load")
                self._stop_waiting(candidate, step.time_us)
        if operation.kind == "load":
            self.device.trim(step)
        elif operation.kind == "write" and self.settings.storage and (kept or outcome == "done"):
            self._store(operation.namespace, operation.tokens, operation.start + kept, step)

    def _settle_store(self, operation: Operation, done: int, *, complete: bool) -> None:
        """Unmark the pages and blocks that a store did not write."""
        self.stored[operation.host_pages[done:]] = False
        if self.blocks is not None and not complete:
            assert operation.host_handle is not None
            self.blocks.not_stored(operation.blocks, self.host.pages_of(operation.host_handle))

    def _settle(self, operation: Operation, done: int, *, complete: bool, found: tuple[BlocksFound, ...] = ()) -> int:
        """Insert the first `done` pages of an operation into the cache that they are for, and free the rest.

        Blocks are attached if the operation is `complete`; of a prefetch, the blocks `found`.

        Returns: pages kept; -1 for an orphan: the pages in front of it are gone, so all of it is freed.
        """
        if operation.kind == "load":
            assert operation.device_handle is not None
            radix, handle, pool, pages = (
                self.device.radix,
                operation.device_handle,
                self.device.pool,
                operation.device_pages,
            )
            orphan = handle.invalidated
        else:
            assert operation.host_handle is not None
            radix, pool, pages = self.host, self.pool, operation.host_pages
            handle = operation.host_handle
            orphan = radix.match(operation.namespace, operation.tokens, operation.start).pages < operation.start
        kept, already = 0 if orphan else done, 0
        if kept:
            path = np.zeros(operation.start + kept, np.int32)  # the tree has the pages before `start`
            path[operation.start :] = pages[:kept]
            tokens = operation.tokens[: len(path) * self.page_size * TOKEN_BYTES]
            inserted = radix.insert(operation.namespace, tokens, path, behind=handle)
            already, handle = inserted.already - operation.start, inserted.node
        if operation.kind == "prefetch" and kept:
            self.stored[pages[already:kept]] = self.fetched[pages[already:kept]] = True
        pool.free(pages[:already].copy())
        pool.free(pages[kept:].copy())
        if operation.kind == "prefetch":
            if self.blocks is not None:
                self.blocks.fetched(operation.blocks, () if orphan else found, radix.pages_of(handle))
            return -1 if orphan and (done or found) else kept
        if operation.blocks:
            self._settle_blocks(operation, radix.pages_of(handle), keep=complete and not orphan)
        return -1 if orphan and (done or (complete and operation.blocks)) else kept

    def _settle_blocks(self, operation: Operation, path: Int32s, *, keep: bool) -> None:
        """Attach the blocks of a write or load to the pages of `path`, if `keep`; free them otherwise."""
        assert self.blocks is not None
        if operation.kind == "write" and keep:
            self.blocks.arrived(operation.blocks, path)
        elif operation.kind == "write":
            self.blocks.lost(operation.blocks)
        for one in operation.blocks if operation.kind == "load" else ():
            if keep:
                self.device.hybrid.arrived(one.kind, path[one.index], one.device)
            else:
                self.device.hybrid.lost(one.kind, one.device)

    def _release(self, operation: Operation) -> None:
        """Release the locks and marks of an operation."""
        if self.blocks is not None:
            self.device.hybrid.unlock_moved(operation.windows_locked, operation.slots_locked)
            if operation.kind in ("load", "store") and operation.host_handle is not None:
                self.blocks.end_read(operation.blocks, self.host.pages_of(operation.host_handle))
            elif operation.kind == "prefetch" and operation.host_handle is not None:
                self.blocks.end_prefetch(operation.blocks, self.host.pages_of(operation.host_handle))
        if operation.device_handle is not None:
            self.device.unlock(operation.device_handle)
        if operation.host_handle is not None:
            self.host.unlock(operation.host_handle)
        if operation.kind == "write":
            own = operation.device_pages[self.writing[operation.device_pages] == operation.number]
            self.writing[own] = NO_OPERATION
            if operation.blocks:
                self.writing[self.writing == operation.number] = NO_OPERATION
        elif operation.kind == "load":
            own = operation.host_pages[self.loading[operation.host_pages] == operation.number]
            self.loading[own] = NO_OPERATION
            if operation.blocks:
                self.loading[self.loading == operation.number] = NO_OPERATION
        elif operation.kind == "prefetch":
            self.fetching = {key: number for key, number in self.fetching.items() if number != operation.number}

    def _number(self) -> int:
        self.next_operation += 1
        return self.next_operation - 1

    def _begin(self, operation: Operation, step: Step) -> None:
        self.operations[operation.number] = operation
        started = TierOperationStarted(
            step.time_us, operation.number, operation.kind, operation.pages, operation.request_id
        )
        step.decided.append(started)

    # ------------------------------------------------------------------------------------------------ flush and restart

    def empty(self) -> None:
        """Evict all pages of the host that no operation locks."""
        self._free_host_pages(self.host.reset())

    @property
    def timed(self) -> bool:
        """Whether a request has a limited wait for an operation."""
        return any(one.due_us is not None for one in self.candidates.values())

    def void(self, generation: int, step: Step) -> None:
        """End all operations: the memory of device and host is lost. Storage keeps its content."""
        for operation in self.operations.values():
            if operation.device_handle is not None:
                self.device.unlock(operation.device_handle)
            if operation.kind == "load":
                self.device.pool.free(operation.device_pages)
            self.device.hybrid.unlock_moved(operation.windows_locked, operation.slots_locked)
            for one in operation.blocks if operation.kind == "load" else ():
                self.device.hybrid.lost(one.kind, one.device)
            step.decided.append(TierOperationEnded(step.time_us, operation.number, operation.kind, "void", 0))
        self.operations.clear()
        self.generation, self.candidates = generation, {}
        self.fetching = {}
        self.pool, self.host = PagePool(self.settings.host_pages), RadixCache(self.page_size)
        if self.blocks is not None:
            self.blocks.void()
        self.uses[:], self.stored[:], self.fetched[:] = 0, False, False
        self.writing[:] = self.loading[:] = NO_OPERATION

    # --------------------------------------------------------------------------------------------------------- snapshot

    def dump(self) -> dict[str, Any] | None:
        """Return the state in builtins. Handles are stored as numbers of nodes. None: there are no tiers."""
        return {
            "generation": self.generation,
            "pool": self.pool.dump(),
            "host": self.host.dump(),
            "operations": [operation_image(one) for one in self.operations.values()],
            "next": self.next_operation,
            "candidates": [(number, msgspec.structs.astuple(one)) for number, one in self.candidates.items()],
            "uses": self.uses.tobytes(),
            "writing": self.writing.tobytes(),
            "loading": self.loading.tobytes(),
            "fetching": list(self.fetching.items()),
            "stored": self.stored.tobytes(),
            "fetched": self.fetched.tobytes(),
            **({"companions": self.blocks.dump()} if self.blocks is not None else {}),
        }

    def load(self, state: dict[str, Any], device_nodes: Mapping[int, RadixNode]) -> None:
        """Take over the state that `dump` returned. `device_nodes`: nodes of the device's radix cache by number."""
        self.generation = state["generation"]
        self.pool = PagePool.load(state["pool"])
        self.host = RadixCache.load(state["host"])
        host_nodes = {node.number: node for node in self.host.walk()}
        for image in state["operations"]:
            operation = operation_of(image, device_nodes, host_nodes)
            self.operations[operation.number] = operation
        self.next_operation = state["next"]
        self.candidates = {number: LoadCandidate(*values) for number, values in state["candidates"]}
        self.uses = np.frombuffer(state["uses"], np.int32).copy()
        self.writing = np.frombuffer(state["writing"], np.int32).copy()
        self.loading = np.frombuffer(state["loading"], np.int32).copy()
        self.fetching = dict(state["fetching"])
        self.stored = np.frombuffer(state["stored"], np.bool_).copy()
        self.fetched = np.frombuffer(state["fetched"], np.bool_).copy()
        if self.blocks is not None:
            self.blocks.load(state["companions"])

    # ------------------------------------------------------------------------------------------------------ invariants

    def due_times(self) -> Iterator[tuple[int, str]]:
        """Yield the ends of waits for a load or a prefetch."""
        for request_id, candidate in self.candidates.items():
            if candidate.due_us is not None:
                yield candidate.due_us, f"r{request_id} waits no longer for operation {candidate.operation}"
            elif candidate.operation != NO_OPERATION:
                kind, settings = self.operations[candidate.operation].kind, self.settings
                limited = settings.load_timeout_us is not None
                if kind == "prefetch":
                    limited = settings.prefetch_policy == "timeout"
                if limited:
                    fail(f"L7: r{request_id} waits for {kind} {candidate.operation} without a due time")

    def check(self, facts: Facts) -> None:
        """S1, S9, S32: each host page has one owner; locks and marks are those of the operations under way."""
        moves = list(self.operations.values())
        nodes, arriving = self.host.nodes(), [one for one in moves if one.kind in ("write", "prefetch")]
        owned = [self.pool.free_ids(), *(node.pages for node in nodes), *(one.host_pages for one in arriving)]
        ids = np.concatenate(owned, dtype=np.int32)
        ids.sort()
        if ids.tobytes() != all_ids(self.pool.total):
            names = ["free", *(f"the host's cache ({node})" for node in nodes)]
            names += [f"{one.kind} {one.number}" for one in arriving]
            misowned("S1 host pages", self.pool.total, dict(zip(names, (p.tolist() for p in owned), strict=True)))
        self.host.check([one.host_handle for one in moves if one.host_handle is not None], nodes)
        cached = facts.is_cached
        marked = {page: int(self.writing[page]) for page in (self.writing >= 0).nonzero()[0].tolist()}
        for one in moves:
            page_bytes = 4 * facts.config.page_size
            if len(one.tokens) != one.stop * page_bytes or len(one.host_pages) != one.pages:
                fail(f"S32: {one.kind} {one.number} has {len(one.tokens)} bytes of tokens for {one.stop} pages")
            if one.kind == "write" and one.device_handle is not None:
                for page in one.device_pages.tolist():
                    if marked.get(page) != one.number:
                        fail(f"S32: device page {page} is being written by {one.number}, marked {marked.get(page)}")
            if one.kind in ("load", "store"):
                assert one.host_handle is not None
                path = self.host.pages_of(one.host_handle)[one.start : one.stop]
                if path.tolist() != one.host_pages.tolist():
                    fail(f"S5: {one.kind} {one.number} reads host pages {one.host_pages.tolist()}, its path has {path}")
        for page, number in marked.items():
            if not cached[page] or number not in self.operations:
                fail(f"S32: device page {page} is marked as being written by {number}")
        if self.uses[~cached].any():
            fail(f"S33: device pages that are not cached have uses: {(self.uses * ~cached).nonzero()[0].tolist()}")
        for page in (self.loading >= 0).nonzero()[0].tolist():
            if not any(one.number == self.loading[page] and page in self._read_by(one) for one in moves):
                fail(f"S32: host page {page} is marked as being read by {self.loading[page]}")
        if self.blocks is not None:
            self.blocks.check(self.host, moves, nodes)
        for request_id, candidate in self.candidates.items():
            request = facts.requests.get(request_id)
            if request is None or request.state is not RequestState.WAITING:
                fail(f"S15: r{request_id} does not wait, but is a candidate of the tiers")
            if candidate.operation >= 0 and candidate.operation not in self.operations:
                fail(f"L7: r{request_id} waits for operation {candidate.operation}, which has ended")

    def _read_by(self, load: Operation) -> Int32s:
        """Return the host pages of which a load reads KV or blocks."""
        assert load.host_handle is not None
        path = self.host.pages_of(load.host_handle)
        return np.concatenate((load.host_pages, *(path[moved.index] for moved in load.blocks)))


def path_tokens(node: RadixNode) -> bytes:
    """Return the tokens from the root to the end of `node`, packed int32."""
    parts = [node.key]
    while (parent := node.parent) is not None:
        parts.append(parent.key)
        node = parent
    parts.reverse()
    return b"".join(parts)


def sharable_tokens(tokens: bytes) -> int:
    """Return the number of leading tokens that mean the same in every engine: up to the first media placeholder."""
    ids = np.frombuffer(tokens, np.int32)
    own = ids < 0
    return int(own.argmax()) if own.any() else len(ids)


def page_keys(namespace: str, tokens: bytes, pages: int, page_size: int) -> list[bytes]:
    """Return the keys of the first pages of a path.

    A key is the SHA-256 of the key before it and the tokens of its page, int32 little-endian. The key before the first
    one is the SHA-256 of the namespace, as UTF-8.
    """
    key, size = sha256(namespace.encode()).digest(), page_size * TOKEN_BYTES
    keys = []
    for page in range(pages):
        key = sha256(key + tokens[page * size : (page + 1) * size]).digest()
        keys.append(key)
    return keys
