"""An inbox of one thread that any thread can fill: a queue whose reader can wait with a time limit.

`queue.SimpleQueue.get(timeout=...)` of CPython 3.11 may wait for ever. Its lock stays open after an item was taken
without waiting. The next `get` acquires the lock, finds no item, and waits again for the rest of the time. A rest below
zero, which is likely for a limit of microseconds, counts as no limit. `queue.Queue` has no such fault, but a signal
handler that puts an item while its own thread is in `put` would deadlock. Therefore the items are in a SimpleQueue, and
the reader waits on a bare lock, which keeps its time limit.
"""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue for one reading thread. Any thread and any signal handler may put items."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._bell = threading.Lock()  # open: an item was put since the last wait
        self._bell.acquire()

    def put(self, item: T) -> None:
        """Add an item, and wake the waiting thread."""
        self._items.put(item)
        try:
            self._bell.release()
        except RuntimeError:  # the lock is open already
            return

    def get_nowait(self) -> T:
        """Return the oldest item. Raises Empty."""
        return self._items.get_nowait()

    def wait(self) -> T:
        """Wait for the oldest item without a time limit and return it."""
        while True:
            try:
                return self._items.get_nowait()
            except Empty:
                self._bell.acquire()

    def get(self, timeout_s: float) -> T:
        """Wait up to `timeout_s` seconds for the oldest item and return it. Raises Empty."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._items.get_nowait()
            except Empty:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise
                self._bell.acquire(timeout=left_s)

    def empty(self) -> bool:
        """Whether the inbox was empty at the time of the call."""
        return self._items.empty()

    def qsize(self) -> int:
        """Return the number of items at the time of the call."""
        return self._items.qsize()
