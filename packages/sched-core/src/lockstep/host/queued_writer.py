"""A bounded queue in front of a file: the scheduling thread appends, another thread writes.

Appending never waits and never raises. If the queue is full or the target raises, writing ends with one report, and
what was written up to there stays readable.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from lockstep.core.journal.records import JournalError

FLUSH_EVERY_S = 0.05  # the longest time that an item stays in memory; what a killed process loses

Item = TypeVar("Item")
Written = TypeVar("Written", contravariant=True)


class WriteTarget(Protocol[Written]):
    """What is written to. Each method may raise JournalError or OSError, which ends writing."""

    def write(self, item: Written) -> None:
        """Write an item, perhaps to a buffer."""

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""

    def close(self, failure: str) -> None:
        """Close the file. `failure`: why writing ended early; empty if it did not."""


class QueuedWriter(Generic[Item]):
    """Writes items to a target in the order of `append`, on a thread of its own."""

    def __init__(
        self, name: str, target: WriteTarget[Item], items_max: int, failed: Callable[[str], None], *, items: str
    ) -> None:
        """
        Args:
            name: of the thread.
            items: what the items are called in the report of a full queue, in the plural.
            items_max: the most items that wait to be written.
            failed: called once, from either thread, with the reason if writing ends early.
        """
        self.failure = ""  # why writing ended early
        self._target, self._failed, self._items = target, failed, items
        self._queue: queue.Queue[Item | None] = queue.Queue(items_max)
        self._flush_at = 0.0  # monotonic seconds; meaningful while `_dirty`
        self._dirty = False  # whether the target holds items that were not flushed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def append(self, item: Item) -> None:
        """Write an item soon. Never waits and never raises; does nothing once writing has ended."""
        if self.failure:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._fail(f"{self._queue.maxsize:,} {self._items} wait to be written")

    def close(self, seconds: float | None = None) -> None:
        """Write what is queued, and close the target.

        Args:
            seconds: how long to wait for that, at most; None: without a limit.
        """
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._queue.put(None, timeout=seconds)
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                self._target.write(item)
                if not self._dirty:
                    self._dirty, self._flush_at = True, time.monotonic() + FLUSH_EVERY_S
            self._target.close("")
        except Exception as error:  # also a fault of the target: its thread must not end in silence
            expected = isinstance(error, JournalError | OSError)
            self._fail(str(error) if expected else f"{type(error).__name__}: {error}")
            with suppress(Exception):  # the failure is reported already
                self._target.close(self.failure)

    def _next(self) -> Item | None:
        """Return the next item; None: no more follows. The target is flushed in time, whether items come or not."""
        while self._dirty:
            left_s = self._flush_at - time.monotonic()
            if left_s > 0:
                try:
                    return self._queue.get(timeout=left_s)
                except queue.Empty:
                    pass
            self._target.flush()
            self._dirty = False
        return self._queue.get()

    def _fail(self, why: str) -> None:
        if not self.failure:
            self.failure = why
            self._failed(why)
