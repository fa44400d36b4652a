"""The moves of a tensor-parallel group: every rank moves its part of a page, and a move ends with the last of them.

A prefetch has brought the pages that all ranks have, and windows and states if all ranks found the same ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core.contract.events import BlocksFound
from lockstep.host.cache_moves import Move, MoveEnd
from lockstep.host.page_store import StoreCounts
from lockstep.runtime.rank_wire import Moving
from lockstep.runtime.ranks import RankGroup
from lockstep.runtime.tiers.mover import HostMover


@dataclass(slots=True)
class _OpenMove:
    done: Callable[[MoveEnd], None]
    waiting: int  # ranks without an end
    pages: int  # moved on every rank that has ended
    error: str = ""
    blocks: tuple[BlocksFound, ...] | None = None  # of every rank that has ended; None: none has


class LeadMover:
    """Rank 0's mover, with every move repeated on the workers: `lockstep.host.cache_moves.PageMover`.

    Orders go over the channel of the plans, so a worker begins a move behind the batches that were launched before it,
    and reads given-up pages in front of those that are launched after it.
    """

    def __init__(self, own: HostMover, group: RankGroup) -> None:
        self.own, self.group = own, group
        self._open: dict[int, _OpenMove] = {}
        self._lock = threading.Lock()
        group.on_moved = self._ended

    @property
    def store_counts(self) -> StoreCounts | None:
        """Totals of rank 0's part of the storage; None without storage."""
        return self.own.store_counts

    def begin(self, move: Move, done: Callable[[MoveEnd], None]) -> None:
        """See `PageMover.begin`. Raises RankLost."""
        if move.kind != "cancel":
            with self._lock:
                self._open[move.number] = _OpenMove(done, self.group.ranks, len(move.host_pages))
        self.group.tell(Moving(move))
        self.own.begin(move, self._ended)

    def _ended(self, end: MoveEnd) -> None:
        """Take in the end of a move on one rank, from any thread."""
        with self._lock:
            move = self._open[end.number]
            move.waiting -= 1
            move.pages = min(move.pages, end.pages_done)
            move.error = move.error or end.error
            move.blocks = end.blocks if move.blocks in (None, end.blocks) else ()
            over = move.waiting == 0 or end.failure is not None
            if over:
                del self._open[end.number]
        if over:
            blocks = () if move.error else move.blocks or ()
            move.done(MoveEnd(end.number, move.pages, move.error, end.failure, blocks))
