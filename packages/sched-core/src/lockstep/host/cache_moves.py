"""Moves of KV pages, and of windows and states, between the device, host memory and storage: orders and answers.

CopyToHost, LoadFromHost, PrefetchFromStorage, WriteToStorage, CancelPrefetch
    │ `CacheMoves.begin`, in the host's thread, in the order of the Step
    v
Move ──> PageMover of the runtime: copies in threads or on streams of their own ──> MoveEnd, from any thread
                                                                                      │
HostCopyFinished, PrefetchFinished, StorageWritten  <── the host's inbox  <───────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Literal, Protocol

import msgspec

from lockstep.core.contract.commands import (
    NO_ROWS,
    BlockCopy,
    BlockFetch,
    BlockStore,
    CancelPrefetch,
    CopyToHost,
    LoadFromHost,
    PrefetchFromStorage,
    Step,
    WriteToStorage,
)
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    BlocksFound,
    HostCopyFinished,
    ObservedEvent,
    PrefetchFinished,
    RequestAdmitted,
    RequestArrived,
    StorageWritten,
    TierOperationEnded,
)
from lockstep.host.adapters import AdaptersLog
from lockstep.host.batches import Int32s
from lockstep.host.page_store import StoreCounts

TierCommand = CopyToHost | LoadFromHost | PrefetchFromStorage | WriteToStorage | CancelPrefetch
MoveKind = Literal["write", "load", "prefetch", "store", "cancel"]


BlockKind = Literal["page", "window", "state"]
"""Pages of layers that attend to all positions, pages of sliding windows, and slots of states: each in a pool."""


class Move(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order to move pages. Page i of the move is in `device_pages[i]`, `host_pages[i]`, and under `keys[i]`.

    Windows and states of hybrid models move with the pages, or alone.
    """

    kind: MoveKind  # cancel: of the prefetch with the same number
    number: int
    device_pages: Int32s = NO_ROWS
    host_pages: Int32s = NO_ROWS
    keys: tuple[bytes, ...] = ()
    after: bytes = b""  # of a store: key of the page in front of the first one
    given_up: bool = False  # of a write: later batches and loads may overwrite the device pages
    copies: tuple[BlockCopy, ...] = ()  # of a write or load: windows and states
    stores: tuple[BlockStore, ...] = ()  # of a store
    fetches: tuple[BlockFetch, ...] = ()  # of a prefetch
    reached: int = 0  # of a prefetch: see `PrefetchFromStorage.reached`

    def copied(self) -> list[tuple[BlockKind, Int32s, Int32s]]:
        """Return what a write or load copies, by kind: blocks of the device, and of the host."""
        pages: tuple[BlockKind, Int32s, Int32s] = ("page", self.device_pages, self.host_pages)
        return [one for one in (pages, *((it.kind, it.device, it.host) for it in self.copies)) if len(one[2])]


@dataclass(frozen=True, slots=True)
class MoveEnd:
    """The end of a move.

    Args:
        pages_done: the first pages of the move that have arrived.
        error: why the others have not; "" if they were not there, or were cancelled.
        failure: an error after which the content of the device is unknown, so that the engine must end.
        blocks: windows and states that a prefetch brought.
    """

    number: int
    pages_done: int
    error: str = ""
    failure: BaseException | None = None
    blocks: tuple[BlocksFound, ...] = ()


class PageMover(Protocol):
    """Carries out moves. On every rank of a tensor-parallel group each rank moves its part of a page."""

    @property
    def store_counts(self) -> StoreCounts | None:
        """Totals of the storage of this process; None without storage."""

    def begin(self, move: Move, done: Callable[[MoveEnd], None]) -> None:
        """Begin a move; `done` is called once, from any thread, except for a cancel.

        When it returns, a batch or a load that is launched afterwards may overwrite pages that the move gave up.
        """


@dataclass(slots=True)
class MoveCounts:
    """Totals of the cache tiers since the engine started."""

    moves: Counter[tuple[str, str]] = field(default_factory=Counter)  # ended operations, by kind and outcome
    pages: Counter[str] = field(default_factory=Counter)  # pages that moves brought, by kind
    blocks: Counter[tuple[str, str]] = field(default_factory=Counter)  # windows and states, by kind of move and block
    host_tokens: int = 0  # prompt tokens that were loaded from host memory, those from storage included
    storage_tokens: int = 0

    def add_blocks(self, command: TierCommand, answer: ObservedEvent) -> None:
        """Count the windows and states that an ended move brought."""
        match command, answer:
            case PrefetchFromStorage(), PrefetchFinished(blocks=found):
                for one in found:
                    self.blocks["prefetch", one.kind] += len(one.indices)
            case CopyToHost() | LoadFromHost(), HostCopyFinished(pages_done=done, error=""):
                kind = "write" if isinstance(command, CopyToHost) else "load"
                for copy in command.blocks if done == len(command.host_pages) else ():
                    self.blocks[kind, copy.kind] += len(copy.host)
            case WriteToStorage(), StorageWritten(pages_done=done, error=""):
                for store in command.blocks if done == len(command.keys) else ():
                    self.blocks["store", store.kind] += len(store.keys)

    def fold(self, step: Step) -> None:
        """Count what a Step decided."""
        for event in step.decided:
            match event:
                case TierOperationEnded(kind=kind, outcome=outcome, pages_kept=pages):
                    self.moves[kind, outcome] += 1
                    self.pages[kind] += pages
                case RequestAdmitted(host_tokens=tokens, storage_tokens=stored) if tokens:
                    self.host_tokens += tokens
                    self.storage_tokens += stored


class CacheMoves:
    """The moves that the core has ordered, and the way of their answers into the host's inbox.

    Args:
        mover: None: the engine has no tiers, and orders none.
        put: sends a fact to the host, as a function of its time; called from any thread.
    """

    def __init__(self, mover: PageMover | None, put: Callable[[Callable[[int], ObservedEvent]], None]) -> None:
        self.mover, self._put = mover, put
        self.counts = MoveCounts()
        self.open = 0  # moves without an answer that the host has folded

    def begin(self, command: TierCommand) -> None:
        """Begin the move of a command. Raises ContractError if this host has no tiers."""
        if self.mover is None:
            raise ContractError(f"the engine ordered {type(command).__name__}, which this host does not support")
        if not isinstance(command, CancelPrefetch):
            self.open += 1
        self.mover.begin(move_of(command), partial(self._ended, command))

    def _ended(self, command: TierCommand, end: MoveEnd) -> None:
        self._put(partial(self._answer, command, end))

    def _answer(self, command: TierCommand, end: MoveEnd, now_us: int) -> ObservedEvent:
        """Return the answer to a command. Raises the failure of the move."""
        self.open -= 1
        if end.failure is not None:
            raise end.failure
        answer = _answer_of(command, end, now_us)
        self.counts.add_blocks(command, answer)
        return answer


def _answer_of(command: TierCommand, end: MoveEnd, now_us: int) -> ObservedEvent:
    match command:
        case CopyToHost() | LoadFromHost():
            return HostCopyFinished(now_us, end.number, end.pages_done, end.error, command.generation)
        case PrefetchFromStorage():
            return PrefetchFinished(now_us, end.number, end.pages_done, end.error, command.generation, end.blocks)
        case WriteToStorage():
            return StorageWritten(now_us, end.number, end.pages_done, end.error, command.generation)
        case CancelPrefetch():
            raise ContractError("a cancel has no answer")


def move_of(command: TierCommand) -> Move:
    """Return the move that a command orders."""
    match command:
        case CopyToHost(number, device_pages, host_pages, given_up):
            return Move("write", number, device_pages, host_pages, given_up=given_up, copies=command.blocks)
        case LoadFromHost(number, host_pages, device_pages):
            return Move("load", number, device_pages, host_pages, copies=command.blocks)
        case PrefetchFromStorage(number, keys, host_pages):
            fetches, reached = command.blocks, command.reached
            return Move("prefetch", number, host_pages=host_pages, keys=keys, fetches=fetches, reached=reached)
        case WriteToStorage(number, keys, host_pages):
            stores, after = command.blocks, command.after
            return Move("store", number, host_pages=host_pages, keys=keys, after=after, stores=stores)
        case CancelPrefetch(number):
            return Move("cancel", number)


def name_adapter(event: RequestArrived, log: AdaptersLog) -> RequestArrived:
    """Return an arrival whose namespace names the source of its adapter.

    The core's namespace has the name and the number of an adapter's version, which mean another adapter in another
    engine. Storage outlives an engine and is shared, so there the source (path, names, sizes and times of the files)
    must be part of the keys.
    """
    versions = log.sources.get(event.adapter)
    if not event.adapter or not versions:
        return event
    digest = blake2b(versions[max(versions)].encode(), digest_size=16).hexdigest()
    return msgspec.structs.replace(event, namespace=f"{event.namespace} adapter {digest}")
