"""An inbox for one thread, filled by others: a queue that can be waited for with a time limit.

`queue.SimpleQueue.get(timeout=...)` of CPython 3.11 may wait for ever. Its lock stays open behind an item that was
taken without waiting; the next `get` passes it, finds nothing, and waits again for what is left of the time. If that is
below zero by then, which microseconds soon are, it is taken for no limit. `queue.Queue` has no such fault, but a signal
handler that puts something while its own thread does the same would wait for itself. So: SimpleQueue for the items, and
a bare lock, which keeps its time limit, for the waiting.
"""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Any thread and any signal handler may put; one thread takes."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._bell = threading.Lock()  # open: something was put since the last wait
        self._bell.acquire()

    def put(self, item: T) -> None:
        """Add an item, and wake the waiting thread."""
        self._items.put(item)
        try:
            self._bell.release()
        except RuntimeError:  # rung already
            return

    def get_nowait(self) -> T:
        """The oldest item. Raises Empty."""
        return self._items.get_nowait()

    def wait(self) -> T:
        """The oldest item, whenever it comes."""
        while True:
            try:
                return self._items.get_nowait()
            except Empty:
                self._bell.acquire()

    def get(self, timeout_s: float) -> T:
        """The oldest item, if one comes within so many seconds. Raises Empty."""
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
        """Whether there was nothing a moment ago."""
        return self._items.empty()

    def qsize(self) -> int:
        """How many items there were a moment ago."""
        return self._items.qsize()
