"""Workers of an engine as threads of this process instead of processes: each runs `worker.main` from its first line.

    with ranks_as_threads():         LLM(tp=2, ...)

Ranks share the modules of this process, so a fake device, or what a test plants, holds for all of them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lockstep.runtime import ranks, worker

LOST = -signal.SIGKILL
END_S = 60.0


class ThreadRank:
    """In place of `subprocess.Popen` of a worker. Its `stdout` is that of this process."""

    stdout = None

    def __init__(self, command: list[str], *, pass_fds: list[int], **_: Any) -> None:
        assert command[-2] == worker.__name__
        self._end = socket.socket(fileno=os.dup(pass_fds[0]))
        self.pid, self.status = os.getpid(), LOST
        self._thread = threading.Thread(target=self._run, args=(os.dup(pass_fds[0]),), name=f"worker {pass_fds[0]}")
        self._thread.daemon = True
        self._thread.start()

    def _run(self, end: int) -> None:
        try:
            worker.main([str(end)])
        except SystemExit as ended:
            self.status = int(str(ended.code))
        finally:
            self.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Return the status of the worker's end. Raises TimeoutExpired."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self.status

    def kill(self) -> None:
        """Close the channel, at which a worker ends once it waits for a message."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class EndedThreads:
    """The calls of `os` with which a worker ends its process: here a thread ends, and the worker's others with it."""

    def __init__(self) -> None:
        self.getppid = os.getppid

    def _exit(self, status: int) -> None:
        raise SystemExit(status)


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Let engines that are made meanwhile have workers in threads."""
    receive = worker.Orders._receive
    receivers: list[threading.Thread] = []

    def received(orders: Any) -> None:
        """Receive; at the end of the channel release the worker, whose process would have ended."""
        receivers.append(threading.current_thread())
        try:
            receive(orders)
        except SystemExit:
            orders.fail(SystemExit(worker.FAILED))
            orders.channel.close()

    with (
        mock.patch.object(ranks, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": ThreadRank})),
        mock.patch.object(worker, "os", EndedThreads()),
        mock.patch.object(worker, "signal", SimpleNamespace(signal=lambda *_: None, SIGINT=0, SIG_IGN=0)),
        mock.patch.object(worker.Orders, "_watch"),
        mock.patch.object(worker.Orders, "_receive", received),
    ):
        try:
            yield
        finally:
            for one in receivers:  # the last threads of the workers; without the patches they would end this process
                one.join(END_S)
                assert not one.is_alive(), "a worker does not end"
