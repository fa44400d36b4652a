"""Keeps one engine going: its nursery, and one life of it after the other. Used in the launcher's thread.

When the engine ends, or gets nothing done for so long that it is ended, the nursery forks the next one, which begins
where its journal stops; workers keep their streams open meanwhile. When that happens too often, or it cannot begin,
workers are told that it is gone.
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
from lockstep.host.recovery import Death

log = logging.getLogger("lockstep.serve")

YOUNG_S = 2.0  # a process that ends so soon would do so again
GRACE_S = 5.0  # beyond the time that answers get, until a process that was told to end is killed
OURS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that somebody sends


@dataclass(slots=True)
class Child:
    """A process of ours. Nurseries have their engine's number."""

    role: Literal["nursery", "worker"]
    number: int
    process: subprocess.Popen[bytes]
    began_s: float


@dataclass(slots=True)
class EngineGeneration:
    """One life of the engine."""

    generation: int
    pid: int = 0
    ready: bool = False  # it said that it serves
    heard_s: float = 0.0
    hangs: bool = False  # and was ended for it


@dataclass(frozen=True, slots=True)
class EngineReport:
    """A nursery or its engine said something."""

    engine: int
    report: engine_messages.Report


class Supervisor:
    """One engine of a server.

    Args:
        folder: of its sockets.
        start: starts a nursery: its arguments, and the descriptors that it inherits.
        workers: numbers of those that there are.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        settings: ServeSettings,
        *,
        start: Callable[[list[str], tuple[int, ...]], Child],
        happened: Callable[[EngineReport], object],
        workers: Callable[[], Iterable[int]],
    ) -> None:
        self.number, self.folder, self.settings = number, folder, settings
        self._start, self._happened, self._workers = start, happened, workers
        self.name = "the engine" if settings.dp == 1 else f"engine {number}"
        self.life: EngineGeneration | None = None
        self.gone = ""  # why there will be none any more
        self.next_generation = 0
        self.nursery: Child | None = None
        self._control: socket.socket | None = None  # to the nursery
        self._restarts_s: list[float] = []  # when each was, within the window
        self._down_s = 0.0  # since when there is no engine
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._to_workers = Writers(self._context, folder)
        self._to_engine = writer(self._context, engine_address(folder))

    def begin(self) -> None:
        """Start the nursery and the first engine."""
        self._start_nursery()
        self._begin_engine(None)

    @property
    def due_s(self) -> float | None:
        """When, by time.monotonic, the engine must have got something done; None: whenever."""
        life, limit_s = self.life, self.settings.batch_timeout_s
        if life is None or not life.ready or life.hangs or not limit_s:
            return None
        return life.heard_s + limit_s

    # ------------------------------------------------------------------------------------------------ what may happen

    def heard(self, report: Began | Alive) -> None:
        """The engine began, or still gets on."""
        life = self.life
        if life is None or report.generation != life.generation:
            return
        life.heard_s = time.monotonic()
        if isinstance(report, Began):
            life.pid = report.pid
        elif not life.ready:
            life.ready = True
            if life.generation:
                gone_s = time.monotonic() - self._down_s
                several = self.settings.dp > 1
                shown = f"{self.name}, life {life.generation}," if several else f"engine {life.generation}"
                log.warning("%s serves %.3f s after the end of the one before", shown, gone_s)

    def end_hanging(self) -> None:
        """It got nothing done for too long."""
        assert self.life is not None
        log.error("%s got nothing done for %g s and is ended", self.name, self.settings.batch_timeout_s)
        self.life.hangs = True
        self.tell_nursery(KillEngine(self.life.generation))

    def ended(self, status: int) -> bool:
        """Start the next one, which recovers; False if there will be none."""
        life, settings = self.life, self.settings
        assert life is not None
        self.life, self._down_s = None, time.monotonic()
        message = f"{self.name} ended with {status_text(status)}" if not life.hangs else f"{self.name} stood still"
        log.error("%s", message)
        self._restarts_s = [at for at in self._restarts_s if self._down_s - at < settings.restart_window_s]
        if not settings.restarts or status == children.EXIT_FOR_GOOD or not (life.ready or life.generation):
            return self._give_up(message)
        if len(self._restarts_s) >= settings.restarts:
            most = f"{settings.restarts} restarts in {settings.restart_window_s:g} s are the most that there may be"
            return self._give_up(f"{message}, and {most}")
        self._restarts_s.append(self._down_s)
        for worker in self._workers():
            self._to_workers.send(EngineRestarting(worker, self.next_generation, message))
        self._begin_engine("killed" if -status in OURS and not life.hangs else "crashed")
        return True

    def nursery_ended(self) -> bool:
        """Nobody tells any more how the engine is: it is ended, and both begin again; False if they do not."""
        nursery, life = self.nursery, self.life
        assert nursery is not None
        log.error("the nursery of %s ended with %s", self.name, status_text(nursery.process.returncode))
        if time.monotonic() - nursery.began_s < YOUNG_S or life is None or not life.pid:
            self.life = None
            return self._give_up(f"the nursery of {self.name} ended")
        end_orphan(life.pid)
        self._start_nursery()
        return self.ended(-signal.SIGKILL)

    def worker_began(self, worker: int) -> None:
        """Tell a worker what the others have heard already."""
        if self.gone:
            self._to_workers.send(EngineGone(worker, self.gone))
        elif self.life is not None and self.life.generation and not self.life.ready:
            message = f"{self.name} is on its way"
            self._to_workers.send(EngineRestarting(worker, self.life.generation, message))

    def _give_up(self, message: str) -> bool:
        """Nothing will come any more: streams are ended."""
        self.gone = message
        for worker in self._workers():
            self._to_workers.send(EngineGone(worker, message))
        return False

    # ------------------------------------------------------------------------------------------------------ processes

    def _start_nursery(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        number = theirs.fileno()
        arguments = ["-m", "lockstep.api.processes.fork_server", str(self.folder), str(number), str(self.number)]
        self.nursery = self._start(arguments, (number,))
        theirs.close()
        if self._control is not None:
            self._control.close()
        self._control = ours
        threading.Thread(target=self._hear, args=(ours,), daemon=True).start()

    def _hear(self, control: socket.socket) -> None:
        """Pass on what the nursery and its engine say."""
        with contextlib.suppress(OSError):  # closed
            while frame := control.recv(engine_messages.MESSAGE_BYTES_MAX):
                self._happened(EngineReport(self.number, engine_messages.read_report(frame)))

    def _begin_engine(self, death: Death | None) -> None:
        self.life = EngineGeneration(self.next_generation, heard_s=time.monotonic())
        self.tell_nursery(Begin(self.next_generation, death, tuple(self._workers())))
        self.next_generation += 1

    def tell_nursery(self, command: engine_messages.Command) -> None:
        """Begin a life, or end one."""
        assert self._control is not None
        with contextlib.suppress(OSError):  # it has ended, and we shall hear of it
            self._control.send(engine_messages.encode(command))

    def tell_engine(self, message: ToEngine) -> None:
        """Say something to the engine, if it listens."""
        with contextlib.suppress(zmq.Again):  # it does not read any more; somebody will notice
            self._to_engine.send(encode(message), zmq.Flag.DONTWAIT)

    def close(self) -> None:
        """Give the sockets up."""
        self._to_workers.close()
        self._to_engine.close()
        self._context.term()
        if self._control is not None:
            self._control.close()


def end_orphan(pid: int) -> None:
    """Kill an engine whose nursery is gone, and return when it is."""
    until_s = time.monotonic() + GRACE_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        while time.monotonic() < until_s:
            os.kill(pid, 0)
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # not on Linux, or gone
                state = ""
            if state == "Z":  # whoever inherited it has not looked yet; it holds nothing any more
                return
            time.sleep(0.005)


def status_text(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"status {code}"
