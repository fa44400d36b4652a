"""All ranks of an engine: `lockstep.host.handover.kv.KvTransport`.

Each staging memory, and each prefill engine that is read, has a number, the same on every rank. Orders go over the
channel of the plans, so a worker copies pages after it has collected the batches that rank 0 had collected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

from lockstep.core.contract.errors import ConfigError
from lockstep.host.handover.kv import Fetch, Int32s, PagesStaged
from lockstep.host.handover.wire import PageLayout, StagingPlace, blocks_in
from lockstep.runtime.errors import RankLost
from lockstep.runtime.rank_wire import CloseTransfers, FetchPages, OpenSender, OpenStaging, StagePages, TransferDone
from lockstep.runtime.ranks import RankGroup
from lockstep.runtime.transfer.rank import RankPages
from lockstep.runtime.transfer.transports import TransferFailed

OPEN_S = 60.0  # for all ranks to allocate or to open staging memory


@dataclass(slots=True)
class _Order:
    """An order under way on all ranks."""

    done: Callable[[list[TransferDone]], None]
    waiting: int
    answers: list[TransferDone] = field(default_factory=list)


class EngineTransport:
    """Transfers of one engine.

    Args:
        own: pages of rank 0.
        group: the other ranks; None: there are none.
    """

    def __init__(self, own: RankPages, group: RankGroup | None = None) -> None:
        self._own, self._group = own, group
        self.layout = own.layout
        self._numbers, self._tickets = count(), count()
        self._orders: dict[int, _Order] = {}
        self._lock = threading.Lock()
        self._threads: dict[int, ThreadPoolExecutor] = {}
        if group is not None:
            group.on_transferred = self._answered

    def sender(self, peer: str) -> SlotSender:
        """See `KvTransport.sender`."""
        number = self._open(f"lockstep-kv-to-{peer}")
        answers = self._ordered_now(
            number, lambda ticket: OpenStaging(ticket, number), lambda: self._own.open_staging(number)
        )
        places = tuple(one.place for one in answers if one.place is not None)
        return SlotSender(self, number, places)

    def receiver(self, layout: PageLayout, places: tuple[StagingPlace, ...]) -> SlotReceiver:
        """See `KvTransport.receiver`."""
        number = self._open("lockstep-kv-in")

        def own() -> None:
            self._own.open_sender(number, layout, places)

        self._ordered_now(number, lambda ticket: OpenSender(ticket, number, layout, places), own)
        return SlotReceiver(self, number)

    def close(self) -> None:
        """See `KvTransport.close`."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)  # a copy that stalls ends with the process
        self._own.close_all()

    # ------------------------------------------------------------------------------------------------- for the links

    def stage(
        self, number: int, order: tuple[int, Int32s, int], done: Callable[[PagesStaged | BaseException], None]
    ) -> None:
        """Copy pages into a slot on every rank. `order`: slot, pages or other blocks, number of their kind."""

        def staged(answers: list[TransferDone]) -> None:
            error = next((one.error for one in answers if one.error), "")
            sums = tuple(one.checksum for one in answers)
            done(RankLost(error) if error else PagesStaged(sums if any(sums) else ()))

        def run() -> TransferDone:
            return TransferDone(0, 0, checksum=self._own.stage(number, *order))

        self._ordered(number, lambda ticket: StagePages(ticket, number, *order), run, staged)

    def fetch(self, number: int, order: Fetch, cancelled: Callable[[], bool], done: Callable[[str], None]) -> None:
        """Copy a slot into pages on every rank."""

        def fetched(answers: list[TransferDone]) -> None:
            done(next((one.error for one in answers if one.error), ""))

        def run() -> TransferDone:
            if not cancelled():
                self._own.fetch(number, order)
            return TransferDone(0, 0)

        self._ordered(number, lambda ticket: FetchPages(ticket, number, order), run, fetched)

    def release(self, number: int) -> None:
        """Release what a number stands for, behind the orders before."""
        if self._group is not None:
            try:
                self._group.tell(CloseTransfers(number))
            except RankLost:
                return  # the engine ends
        thread = self._threads.pop(number, None)
        if thread is None:
            return
        try:
            thread.submit(self._own.close, number)
        except RuntimeError:  # `close` has ended the thread and released everything
            return
        thread.shutdown(wait=False)

    # --------------------------------------------------------------------------------------------------------- orders

    def _open(self, name: str) -> int:
        number = next(self._numbers)
        self._threads[number] = ThreadPoolExecutor(1, name)
        return number

    def _ordered(
        self,
        number: int,
        message: Callable[[int], OpenStaging | OpenSender | StagePages | FetchPages],
        own: Callable[[], TransferDone],
        done: Callable[[list[TransferDone]], None],
    ) -> None:
        """Give an order to all ranks; `done` gets their answers by rank, from any thread."""
        ticket = next(self._tickets)
        with self._lock:
            self._orders[ticket] = _Order(done, 1 if self._group is None else self._group.ranks)

        def run() -> None:
            try:
                answer = own()
            except (ConfigError, TransferFailed) as error:
                answer = TransferDone(ticket, 0, error=str(error))
            except BaseException as error:
                answer = TransferDone(ticket, 0, error=f"{type(error).__name__}: {error}")
            self._answered(TransferDone(ticket, 0, answer.checksum, answer.error, answer.place))

        if self._group is not None:
            try:
                self._group.tell(message(ticket))
            except RankLost as error:
                with self._lock:
                    order = self._orders.pop(ticket)
                order.done([TransferDone(ticket, 0, error=str(error))])
                return
        try:
            self._threads[number].submit(run)
        except (KeyError, RuntimeError):  # closed
            with self._lock:
                order = self._orders.pop(ticket)
            order.done([TransferDone(ticket, 0, error="the transfers of this engine have ended")])

    def _ordered_now(
        self, number: int, message: Callable[[int], OpenStaging | OpenSender], own: Callable[[], StagingPlace | None]
    ) -> list[TransferDone]:
        """Give an order to all ranks and wait for them. Raises ConfigError."""
        over, answers = threading.Event(), list[TransferDone]()

        def done(given: list[TransferDone]) -> None:
            answers.extend(given)
            over.set()

        self._ordered(number, message, lambda: TransferDone(0, 0, place=own()), done)
        if not over.wait(OPEN_S):
            self.release(number)
            raise ConfigError(f"the ranks of this engine did not open their staging memory within {OPEN_S:g} s")
        if error := next((one.error for one in answers if one.error), ""):
            self.release(number)
            raise ConfigError(error)
        return answers

    def _answered(self, answer: TransferDone) -> None:
        """Take in the answer of a rank, from any thread."""
        with self._lock:
            order = self._orders.get(answer.ticket)
            if order is None:
                return
            order.answers.append(answer)
            order.waiting -= 1
            if order.waiting:
                return
            del self._orders[answer.ticket]
        order.done(sorted(order.answers, key=lambda one: one.rank))


class SlotSender:
    """`lockstep.host.handover.kv.KvSender`."""

    def __init__(self, transport: EngineTransport, number: int, places: tuple[StagingPlace, ...]) -> None:
        self._transport, self._number = transport, number
        self.places = places
        fit = [[one.slot_bytes // block.block_bytes for block in blocks_in(one)] for one in places]
        self.pages_per_slot, *beside = (min(some) for some in zip(*fit, strict=True))
        self.beside_per_slot = tuple(beside)

    def stage(
        self, slot: int, pages: Int32s, done: Callable[[PagesStaged | BaseException], None], block: int = 0
    ) -> None:
        """See `KvSender.stage`."""
        self._transport.stage(self._number, (slot, pages, block), done)

    def close(self) -> None:
        """See `KvSender.close`."""
        self._transport.release(self._number)


class SlotReceiver:
    """`lockstep.host.handover.kv.KvReceiver`."""

    def __init__(self, transport: EngineTransport, number: int) -> None:
        self._transport, self._number = transport, number

    def fetch(self, order: Fetch, cancelled: Callable[[], bool], done: Callable[[str], None]) -> None:
        """See `KvReceiver.fetch`."""
        self._transport.fetch(self._number, order, cancelled, done)

    def close(self) -> None:
        """See `KvReceiver.close`."""
        self._transport.release(self._number)
