"""Host memory and storage below a `TaggedKv`: copies move prefix ids, so that a page loaded must be the page written.

A copy happens as late as it may: a write reads the device's pages when it is answered, unless they were given up, and a
load reads the host's pages at its answer. So a page that was reused too early is found as another prefix when a batch
reads it. Pages that a move did not bring, or is still to bring, hold an id that no request may read.

Storage is addressed by key alone. Two different pages under one key are an error: the key is incomplete.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.core.contract.commands import (
    CancelPrefetch,
    CopyToHost,
    LoadFromHost,
    PrefetchFromStorage,
    ReleaseDeviceMemory,
    Step,
    SwapWeights,
    WriteToStorage,
)
from lockstep.core.contract.config import CacheTiers
from lockstep.core.contract.events import (
    EngineRestarted,
    HostCopyFinished,
    Observed,
    PrefetchFinished,
    StorageWritten,
    TierOperationEnded,
    TierOperationStarted,
)
from lockstep.core.kv.block_tiers import in_storage
from tests.support.tagged_kv import GARBAGE, KvError, TaggedKv

Move = CopyToHost | LoadFromHost | PrefetchFromStorage | WriteToStorage
Answer = HostCopyFinished | PrefetchFinished | StorageWritten


def number_of(move: Move) -> int:
    """The number of the operation that an answer ends."""
    match move:
        case CopyToHost() | LoadFromHost():
            return move.copy_id
        case PrefetchFromStorage():
            return move.prefetch_id
        case WriteToStorage():
            return move.write_id


def _answer(move: Move, time_us: int, pages_done: int, error: str = "") -> Answer:
    match move:
        case CopyToHost() | LoadFromHost():
            return HostCopyFinished(time_us, move.copy_id, pages_done, error, move.generation)
        case PrefetchFromStorage():
            return PrefetchFinished(time_us, move.prefetch_id, pages_done, error, move.generation)
        case WriteToStorage():
            return StorageWritten(time_us, move.write_id, pages_done, error, move.generation)


class TaggedTiers:
    """The memory of a host and a storage. It must receive every observed event and its Step, around its `TaggedKv`."""

    def __init__(self, settings: CacheTiers, kv: TaggedKv) -> None:
        self.settings, self.kv = settings, kv
        self.page_size = kv.config.page_size
        self.host = [self._spoilt() for _ in range(settings.host_pages)]
        self.windows: dict[int, list[int]] = {}  # of host memory, by number: cells as of a window page
        self.states: dict[int, int] = {}  # likewise: the prefix id behind which a state stands
        self.storage: dict[bytes, Any] = {}  # cells of pages and window pages, prefix ids of states
        self.moves: dict[int, Move] = {}  # under way
        self.read: dict[int, list[list[int]]] = {}  # by write: pages that were given up, with their old content
        self.read_beside: dict[int, list[list[Any]]] = {}  # and their window and state blocks, by kind
        self.cancelled: set[int] = set()
        self.begun: set[int] = set()  # operations that the engine has accounted and not ended
        self.voided: list[Answer] = []  # answers to moves of an earlier generation

    def _spoilt(self) -> list[int]:
        return [GARBAGE] * self.page_size

    def found(self, move: Move) -> int:
        """Pages that a move can bring: of a prefetch those in storage, as far as a request could continue from them."""
        if not isinstance(move, PrefetchFromStorage):
            return len(move.host_pages)
        return in_storage(move, self.storage.__contains__)[0]

    def cut_short(self, move: Move) -> bool:
        """Whether a move is a prefetch that no request waits for any more."""
        return number_of(move) in self.cancelled

    def answer(
        self, move: Move, time_us: int, pages_done: int | None = None, error: str = "", *, cut: bool = False
    ) -> Answer:
        """Return the event that ends a move; by default the whole move is done.

        A prefetch then has blocks, too, unless it is `cut` after its pages.
        """
        found = self.found(move)
        answer = _answer(move, time_us, found if pages_done is None else pages_done, error)
        if isinstance(move, PrefetchFromStorage) and not error and not cut and answer.pages_done == found:
            return msgspec.structs.replace(answer, blocks=in_storage(move, self.storage.__contains__)[1])
        return answer

    def before(self, event: Observed, step: Step) -> None:
        """Carry out the moves of an answer, and read pages that are given up, before the `TaggedKv` runs."""
        match event:
            case (
                HostCopyFinished(copy_id=number)
                | PrefetchFinished(prefetch_id=number)
                | StorageWritten(write_id=number)
            ) if event.generation == self.kv.generation:
                move = self.moves.pop(number)
                self._moved(move, event.pages_done, whole=not event.error and event.pages_done == self.pages_of(move))
                if isinstance(event, PrefetchFinished) and isinstance(move, PrefetchFromStorage):
                    self._fetched(move, event)
        for command in step.commands:
            if isinstance(command, CopyToHost) and command.given_up:
                self.read[command.copy_id] = [list(self.kv.cells[page]) for page in command.device_pages.tolist()]
                self.read_beside[command.copy_id] = self._blocks(command)

    def pages_of(self, move: Move) -> int:
        """Full pages that a move was ordered for."""
        return len(move.keys) if isinstance(move, PrefetchFromStorage | WriteToStorage) else len(move.host_pages)

    def _blocks(self, write: CopyToHost) -> list[list[Any]]:
        """The blocks that a write reads beside its pages: cells of windows, states."""
        found: list[list[Any]] = []
        for one in write.blocks:
            assert self.kv.hybrid is not None
            if one.kind == "window":
                found.append([list(self.kv.hybrid.cells[number]) for number in one.device.tolist()])
            else:
                found.append([self.kv.hybrid.states[number] for number in one.device.tolist()])
        return found

    def observe(self, event: Observed, step: Step) -> None:
        """Begin the moves that the Step orders, and check the operations that it reports."""
        if isinstance(event, EngineRestarted):
            self.voided += [_answer(move, 0, 0) for move in self.moves.values()]
            self.moves, self.read, self.cancelled = {}, {}, set()
            self.read_beside, self.windows, self.states = {}, {}, {}
            self.host = [self._spoilt() for _ in self.host]
        for decided in step.decided:
            match decided:
                case TierOperationStarted(operation=number):
                    if number in self.begun:
                        raise KvError(f"S32: operation {number} is begun twice")
                    self.begun.add(number)
                case TierOperationEnded(operation=number):
                    if number not in self.begun:
                        raise KvError(f"S32: operation {number} ends without a beginning, or twice")
                    self.begun.remove(number)
        for command in step.commands:
            match command:
                case CancelPrefetch(number):
                    if number not in self.moves or number in self.cancelled:
                        raise KvError(f"prefetch {number} is cancelled, but is not under way, or was cancelled before")
                    self.cancelled.add(number)
                case CopyToHost() | LoadFromHost() | PrefetchFromStorage() | WriteToStorage():
                    self._begin(command)
        self._check_orders(step)
        if self.begun != self.moves.keys():
            raise KvError(f"S32: {sorted(self.begun)} are accounted, {sorted(self.moves)} are under way")

    def _check_orders(self, step: Step) -> None:
        """Nothing is copied from or to a device that changes, and prefetches keep to their share of the host."""
        changes = [one for one in step.commands if isinstance(one, SwapWeights | ReleaseDeviceMemory)]
        busy = [number for number, move in self.moves.items() if isinstance(move, CopyToHost | LoadFromHost)]
        if changes and busy:
            raise KvError(f"{changes[0]} is ordered, and moves {busy} are under way")
        prefetching = sum(len(move.host_pages) for move in self.moves.values() if isinstance(move, PrefetchFromStorage))
        most = int(self.settings.prefetch_share * self.settings.host_pages)
        if prefetching > most:
            raise KvError(f"prefetches have {prefetching} host pages, at most {most} (prefetch_share)")

    def _begin(self, move: Move) -> None:
        number = number_of(move)
        self.moves[number] = move
        if move.generation != self.kv.generation:
            raise KvError(f"move {number} is of generation {move.generation}, the device of {self.kv.generation}")
        if isinstance(move, CopyToHost | LoadFromHost) and (self.kv.ordered or "kv_cache" in self.kv.released):
            raise KvError(f"move {number} while weights or memory change, released {self.kv.released}")
        match move:
            case LoadFromHost():
                written = set(move.device_pages.tolist())
                for launched in self.kv.stream:
                    for row, pages in launched.pages.items():
                        if not written.isdisjoint(pages):
                            raise KvError(f"S5: load {number} fills pages of row {row} in flight")
                for page in written:
                    self.kv.cells[page] = self._spoilt()
                self._begin_blocks(move)
        if isinstance(move, CopyToHost | PrefetchFromStorage):
            for page in move.host_pages.tolist():
                self.host[page] = self._spoilt()
        for one in move.blocks if isinstance(move, CopyToHost | PrefetchFromStorage) else ():
            for number in one.host.tolist():
                self._beside(one.kind).pop(number, None)

    def _begin_blocks(self, load: LoadFromHost) -> None:
        """The blocks that a load brings have no owner yet: no batch in flight touches it, and it holds garbage."""
        for one in load.blocks:
            hybrid = self.kv.hybrid
            assert hybrid is not None
            for number in one.device.tolist():
                for launched in self.kv.stream:
                    placed = hybrid.placed[launched.plan.batch_id]
                    windows = {page for pages in placed.touched.values() for page in pages}
                    if number in (windows if one.kind == "window" else placed.slots_used):
                        raise KvError(f"S5: load {load.copy_id} fills the {one.kind} {number}, which is in flight")
                if one.kind == "window":
                    if number in hybrid.full_of:  # of a page that lost it: the returned block belongs to it from now on
                        del hybrid.window_of[hybrid.full_of.pop(number)]
                    hybrid.cells[number] = self._spoilt()
                else:
                    hybrid.states[number] = GARBAGE

    def _moved(self, move: Move, done: int, *, whole: bool) -> None:
        self.cancelled.discard(number_of(move))
        host_pages = move.host_pages.tolist()[:done]
        match move:
            case CopyToHost():
                now = [list(self.kv.cells[page]) for page in move.device_pages.tolist()]
                for page, cells in zip(host_pages, self.read.pop(move.copy_id, now), strict=False):
                    self.host[page] = cells
                beside = self.read_beside.pop(move.copy_id, None) or self._blocks(move)
                for one, found in zip(move.blocks if whole else (), beside, strict=False):
                    self._beside(one.kind).update(zip(one.host.tolist(), found, strict=True))
            case LoadFromHost():
                for page, device_page in zip(host_pages, move.device_pages.tolist(), strict=False):
                    self.kv.cells[device_page] = list(self.host[page])
                for one in move.blocks if whole else ():
                    assert self.kv.hybrid is not None
                    for source, target in zip(one.host.tolist(), one.device.tolist(), strict=True):
                        if one.kind == "window":
                            self.kv.hybrid.cells[target] = list(self.windows[source])
                        else:
                            self.kv.hybrid.states[target] = self.states[source]
            case PrefetchFromStorage():
                for page, key in zip(host_pages, move.keys, strict=False):
                    self.host[page] = list(self.storage[key])
            case WriteToStorage():
                for page, key in zip(host_pages, move.keys, strict=False):
                    self._store(f"page {page}", key, list(self.host[page]))
                for one in move.blocks if whole else ():
                    for place, key in zip(one.host.tolist(), one.keys, strict=True):
                        self._store(f"{one.kind} {place}", key, self._beside(one.kind)[place])

    def _store(self, name: str, key: bytes, what: Any) -> None:
        """S13: each key has one page, and none with content that may not be read."""
        if GARBAGE in (what if isinstance(what, list) else [what]) or self.storage.setdefault(key, what) != what:
            raise KvError(f"S13: {name} is stored as {what}, under its key is {self.storage.get(key)}")

    def _fetched(self, prefetch: PrefetchFromStorage, answer: PrefetchFinished) -> None:
        orders = {one.kind: one for one in prefetch.blocks}
        for found in answer.blocks:
            order = orders[found.kind]
            for place, index in zip(order.host.tolist(), found.indices, strict=False):
                self._beside(found.kind)[place] = self.storage[order.keys[index]]

    def _beside(self, kind: str) -> dict[int, Any]:
        """Window or state blocks of a kind in host memory."""
        return self.windows if kind == "window" else self.states
