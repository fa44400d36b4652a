"""Keeps one engine running: its fork server, and one engine generation after the other. Used in the launcher's thread.

When the engine ends, or is killed because it made no progress for too long, the fork server forks the next generation,
which continues where the journal stops; workers keep their streams open meanwhile. When restarts are too frequent, or
the engine cannot start, the workers receive EngineGone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zmq

from lockstep.api.processes import children, engine_messages
from lockstep.api.processes.engine_messages import Alive, Began, Begin, KillEngine
from lockstep.api.processes.outbox import Writers
from lockstep.api.processes.sockets import engine_address, writer
from lockstep.api.processes.wire import EngineGone, EngineRestarting, ToEngine, encode
from lockstep.api.settings import ServeSettings
from lockstep.host.recovery import OUTSIDE_SIGNALS, Death

log = logging.getLogger("lockstep.serve")

GRACE_S = 5.0  # from the end of `shutdown_s` until a process that has not ended is killed
# signals that come from outside, not from a fault of the engine itself


RETRY_MIN_S, RETRY_MAX_S = 0.5, 30.0
"""Seconds until the next try to start an engine whose journal cannot be written: doubled from try to try."""

ROOM_BYTES = 2 * 2**20
"""Room that the disk of a journal needs for a try."""


@dataclass(slots=True)
class Child:
    """A child process of the launcher. The number of a fork server is that of its engine."""

    role: Literal["fork_server", "worker"]
    number: int
    process: subprocess.Popen[bytes]


@dataclass(slots=True)
class EngineGeneration:
    """The state of one engine generation."""

    generation: int
    pid: int = 0
    ready: bool = False  # the engine has reported that it serves
    reported_s: float = 0.0
    hangs: bool = False  # the engine made no progress and is being killed


@dataclass(frozen=True, slots=True)
class EngineReport:
    """A report from the fork server of an engine, or from the engine itself."""

    engine: int
    report: engine_messages.Report


class Supervisor:
    """Keeps one engine of a server running.

    Args:
        folder: folder of the engine's sockets.
        start: starts a fork server, given its arguments and the descriptors that it inherits.
        workers: returns the numbers of the running workers.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        settings: ServeSettings,
        *,
        start: Callable[[list[str], tuple[int, ...]], Child],
        on_report: Callable[[EngineReport], object],
        workers: Callable[[], Iterable[int]],
    ) -> None:
        self.number, self.folder, self.settings = number, folder, settings
        self._start, self._on_report, self._workers = start, on_report, workers
        self.name = "the engine" if settings.engines == 1 else f"engine {number}"
        self.current: EngineGeneration | None = None
        self.gone = ""  # why the engine was given up; empty while it is not
        self.next_generation = 0
        self.fork_server: Child | None = None
        self._control: socket.socket | None = None  # to the fork server
        self._restarts_s: list[float] = []  # times of the restarts within the window
        self._down_s = 0.0  # when the last engine ended
        self.retry_s: float | None = None  # when to try again to start an engine whose journal could not be written
        self._blocked = ""  # why it could not
        self._retries = 0  # tries since an engine served for RETRY_MAX_S
        self._served_s = 0.0  # when the last engine began to serve
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._to_workers = Writers(self._context, folder)
        self._to_engine = writer(self._context, engine_address(folder))

    def begin(self) -> None:
        """Start the fork server and the first engine."""
        self._start_fork_server()
        self._begin_engine(None)

    @property
    def deadline_s(self) -> float | None:
        """Time (time.monotonic, seconds) by which the engine must report progress; None: no limit applies now."""
        current, limit_s = self.current, self.settings.batch_timeout_s
        if current is None or not current.ready or current.hangs or not limit_s:
            return None
        return current.reported_s + limit_s

    # -------------------------------------------------------------------------------------------- reports and deadlines

    def reported(self, report: Began | Alive) -> None:
        """Record the report that the engine started, or that it makes progress."""
        current = self.current
        if current is None or report.generation != current.generation:
            return
        current.reported_s = time.monotonic()
        if isinstance(report, Began):
            current.pid = report.pid
        elif not current.ready:
            current.ready = True
            self._blocked, self._served_s = "", time.monotonic()
            if current.generation:
                gone_s = time.monotonic() - self._down_s
                several = self.settings.engines > 1
                shown = f"{self.name}, generation {current.generation}," if several else f"engine {current.generation}"
                log.warning("%s serves %.3f s after the end of the previous generation", shown, gone_s)

    def end_hanging(self) -> None:
        """Kill the engine, which made no progress for too long."""
        assert self.current is not None
        log.error("%s made no progress for %g s and is killed", self.name, self.settings.batch_timeout_s)
        self.current.hangs = True
        self.send_to_fork_server(KillEngine(self.current.generation))

    def ended(self, status: int) -> bool:
        """Start the next generation, which recovers from the journal. Returns False if the engine is given up."""
        current, settings = self.current, self.settings
        assert current is not None
        self.current, self._down_s = None, time.monotonic()
        message = (
            f"{self.name} ended with {status_text(status)}" if not current.hangs else f"{self.name} made no progress"
        )
        log.error("%s", message)
        self._restarts_s = [at for at in self._restarts_s if self._down_s - at < settings.restart_window_s]
        if status == children.EXIT_UNWRITABLE and settings.restarts and (current.ready or current.generation):
            self._wait_for_journal(message)
            return True
        if not settings.restarts or status == children.EXIT_FOR_GOOD or not (current.ready or current.generation):
            return self._give_up(message)
        if len(self._restarts_s) >= settings.restarts:
            most = f"{settings.restarts} restarts in {settings.restart_window_s:g} s are the limit"
            return self._give_up(f"{message}, and {most}")
        self._restarts_s.append(self._down_s)
        for worker in self._workers():
            self._to_workers.send(EngineRestarting(worker, self.next_generation, message))
        from_outside = -status in OUTSIDE_SIGNALS or status == children.EXIT_RANK_KILLED
        self._begin_engine("killed" if from_outside and not current.hangs else "crashed")
        return True

    def _wait_for_journal(self, message: str) -> None:
        """Try again later, and keep open streams waiting. Such an end is no restart: the engine is not at fault."""
        self._blocked = "the server's journal cannot be written; its disk may be full"
        if time.monotonic() - self._served_s > RETRY_MAX_S:
            self._retries = 0
        self._retry_later()
        log.error("%s, since its journal cannot be written: the next try is in %.1f s", message, self._retry_delay_s)
        for worker in self._workers():
            self._to_workers.send(EngineRestarting(worker, self.next_generation, message, self._blocked))

    @property
    def _retry_delay_s(self) -> float:
        return min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(self._retries - 1, 16))

    def _retry_later(self) -> None:
        self._retries += 1
        self.retry_s = time.monotonic() + self._retry_delay_s

    def retry(self) -> None:
        """Start an engine whose journal could not be written, if there is room for the journal now."""
        folder = Path(self.settings.journal or self.folder)
        if _room_bytes(folder) < ROOM_BYTES:
            self._retry_later()
            log.warning("%s waits: %s has less than %d MiB of room", self.name, folder, ROOM_BYTES // 2**20)
            return
        self.retry_s = None
        self._begin_engine(None)

    def fork_server_ended(self) -> bool:
        """Restart fork server and engine, which cannot report without it.

        Returns: False if the engine is given up: the first fork server ended before it had forked an engine, so the
            next one would end alike, or `ended` gives up.
        """
        fork_server, current = self.fork_server, self.current
        assert fork_server is not None
        log.error("the fork server of %s ended with %s", self.name, status_text(fork_server.process.returncode))
        if current is None or not (current.pid or current.generation):
            self.current = None
            return self._give_up(f"the fork server of {self.name} ended")
        if current.pid:
            end_orphan(current.pid)
        self._start_fork_server()
        return self.ended(-signal.SIGKILL)

    def worker_started(self, worker: int) -> None:
        """Send a new worker the state of the engine that the other workers have received."""
        if self.gone:
            self._to_workers.send(EngineGone(worker, self.gone))
        elif self.retry_s is not None:
            message = f"{self.name} is starting"
            self._to_workers.send(EngineRestarting(worker, self.next_generation, message, self._blocked))
        elif self.current is not None and self.current.generation and not self.current.ready:
            message = f"{self.name} is starting"
            self._to_workers.send(EngineRestarting(worker, self.current.generation, message, self._blocked))

    def _give_up(self, message: str) -> bool:
        """Give the engine up: workers end their streams. Returns False."""
        self.gone = message
        for worker in self._workers():
            self._to_workers.send(EngineGone(worker, message))
        return False

    # ------------------------------------------------------------------------------------------------------ processes

    def _start_fork_server(self) -> None:
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        number = child_end.fileno()
        arguments = ["-m", "lockstep.api.processes.fork_server", str(self.folder), str(number), str(self.number)]
        self.fork_server = self._start(arguments, (number,))
        child_end.close()
        if self._control is not None:
            self._control.close()
        self._control = own_end
        threading.Thread(target=self._read_reports, args=(own_end,), daemon=True).start()

    def _read_reports(self, control: socket.socket) -> None:
        """Read the reports of the fork server and its engine until the socket closes. Runs in a thread of its own."""
        with contextlib.suppress(OSError):  # the socket was closed
            while frame := control.recv(engine_messages.MESSAGE_BYTES_MAX):
                self._on_report(EngineReport(self.number, engine_messages.read_report(frame)))

    def _begin_engine(self, death: Death | None) -> None:
        self.current = EngineGeneration(self.next_generation, reported_s=time.monotonic())
        self.send_to_fork_server(Begin(self.next_generation, death, tuple(self._workers())))
        self.next_generation += 1

    def send_to_fork_server(self, command: engine_messages.Command) -> None:
        """Send the fork server a command; without effect if it has ended."""
        assert self._control is not None
        with contextlib.suppress(OSError):  # the fork server has ended, which is reported separately
            self._control.send(engine_messages.encode(command))

    def send_to_engine(self, message: ToEngine) -> None:
        """Send the engine a message; dropped if the engine does not read."""
        with contextlib.suppress(zmq.Again):  # the engine no longer reads; its end or its deadline follows
            self._to_engine.send(encode(message), zmq.Flag.DONTWAIT)

    def close(self) -> None:
        """Close the sockets."""
        self._to_workers.close()
        self._to_engine.close()
        self._context.term()
        if self._control is not None:
            self._control.close()


def _room_bytes(folder: Path) -> int:
    """Return the bytes that can still be written to the disk of a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def end_orphan(pid: int) -> None:
    """Kill an engine without a fork server, and wait up to GRACE_S until it has ended."""
    until_s = time.monotonic() + GRACE_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        while time.monotonic() < until_s:
            os.kill(pid, 0)
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # not on Linux, or the process has ended
                state = ""
            if state == "Z":  # a zombie that its new parent has not reaped; it holds no resources
                return
            time.sleep(0.005)


def status_text(code: int) -> str:
    """Return how a process ended, as text for messages. A negative code is the number of a signal."""
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"status {code}"
