"""Ends an engine whose oldest batch does not finish: a kernel that never ends raises nothing, and cannot be stopped.

A thread checks the engine from outside, because the engine's own thread may be in a call that does not return. Time
counts only while the thread checks, so that a process that was stopped, or a laptop that slept, does not count as late.
Groups of ranks have their own watchdog (`ranks`), which names the rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import BatchId

TIMEOUT_S = 300.0  # the first batch may compile kernels
LOOK_S = 0.5


class Watchdog:
    """Watches until it is closed, or has reported.

    Args:
        oldest: returns the batch that must finish next; None if none is in flight. Called in the watchdog's thread.
        report: receives one sentence about the failure, once.
        timeout_s: limit for one batch, from the time at which it is the oldest; 0: no limit.
    Raises: ConfigError for an invalid limit.
    """

    def __init__(
        self, oldest: Callable[[], BatchId | None], report: Callable[[str], None], timeout_s: float = TIMEOUT_S
    ) -> None:
        check_timeout(timeout_s)
        self.fired = False
        self._oldest, self._report, self._timeout_s = oldest, report, timeout_s
        self._look_s = min(LOOK_S, timeout_s / 4)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep-watchdog", daemon=True)
        if timeout_s:
            self._thread.start()

    def close(self) -> None:
        """Stop the watchdog."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        watched, waited_s, before = self._oldest(), 0.0, time.monotonic()
        while not self._closing.wait(self._look_s):
            now, oldest = time.monotonic(), self._oldest()
            passed, before = min(now - before, 5 * self._look_s), now
            waited_s = waited_s + passed if oldest == watched else 0.0
            watched = oldest
            if oldest is not None and waited_s > self._timeout_s:
                self.fired = True
                self._report(f"batch {oldest} did not come back in {self._timeout_s:g} s; a kernel may never end")
                return


def check_timeout(timeout_s: float) -> None:
    """Raise ConfigError unless the limit is 0 or a valid positive time."""
    if not 0 <= timeout_s < threading.TIMEOUT_MAX:
        raise ConfigError(
            f"`batch_timeout_s` must be 0 (never) or more, got `{timeout_s}`\nhint: {TIMEOUT_S:g} is the default"
        )
