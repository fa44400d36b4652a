"""A worker rank's side of transfers: carries out rank 0's orders, those of each number in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.rank_wire import (
    CloseTransfers,
    FetchPages,
    OpenSender,
    OpenStaging,
    StagePages,
    TransferDone,
    TransferOrder,
)
from lockstep.runtime.transfer.rank import RankPages
from lockstep.runtime.transfer.transports import TransferFailed


class TransferOrders:
    """The orders of one worker.

    Args:
        answer: sends rank 0 an answer; called from any thread.
        failed: called with any error that ends this rank.
    """

    def __init__(
        self,
        own: RankPages,
        rank: int,
        answer: Callable[[TransferDone], object],
        failed: Callable[[BaseException], object],
    ) -> None:
        self._own, self._rank, self._answer, self._failed = own, rank, answer, failed
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def begin(self, order: TransferOrder | CloseTransfers) -> None:
        """Begin an order behind the earlier ones of its number."""
        if isinstance(order, CloseTransfers):
            thread = self._threads.pop(order.number, None)
            if thread is not None:
                thread.submit(self._own.close, order.number)
                thread.shutdown(wait=False)
            return
        thread = self._threads.get(order.number)
        if thread is None:
            thread = self._threads[order.number] = ThreadPoolExecutor(1, f"lockstep-kv-{order.number}")
        thread.submit(self._run, order)

    def _run(self, order: TransferOrder) -> None:
        checksum, error, place = 0, "", None
        try:
            match order:
                case OpenStaging(_, number):
                    place = self._own.open_staging(number)
                case OpenSender(_, number, layout, places):
                    self._own.open_sender(number, layout, places)
                case StagePages(_, number, slot, pages, block):
                    checksum = self._own.stage(number, slot, pages, block)
                case FetchPages(_, number, fetch):
                    self._own.fetch(number, fetch)
        except (ConfigError, TransferFailed) as raised:
            error = str(raised)
        except BaseException as raised:
            self._failed(raised)
            return
        self._answer(TransferDone(order.ticket, self._rank, checksum, error, place))
