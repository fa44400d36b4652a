"""The launcher: opens the sockets, starts the processes, and is told when one of them ends. It does nothing else.

    launcher ─┬─ nursery ── engine     a child ends when the launcher does: it holds the other end of the child's stdin
              ├─ API worker 0
              └─ API worker 1 ...

- A worker that ends takes its streams with it; the engine is told, so that it cancels what nobody reads, and another
  worker takes its place. One that ends as soon as it began is not tried again.
- When the engine ends, or gets nothing done for so long that it is ended, the nursery forks the next one, which begins
  where its journal stops; workers keep their streams open meanwhile.
- When that happens too often, or the engine cannot begin, workers are told; they end their streams with an error and
  answer 503, and the server stops with status 1.
- On SIGTERM or Ctrl-C workers stop first, with time for their answers, then the engine. A second one kills all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Literal

import zmq

from lockstep.api import children, lives
from lockstep.api.lives import Alive, Began, Begin, End, Over
from lockstep.api.metrics_folder import FOLDER as METRICS_FOLDER
from lockstep.api.outbox import Writers
from lockstep.api.settings import ServeSettings
from lockstep.api.sockets import engine_address, fresh_folder, writer
from lockstep.api.wire import EngineGone, EngineRestarting, Stop, ToEngine, WorkerGone, encode
from lockstep.core.errors import ConfigError
from lockstep.host.inbox import Inbox
from lockstep.host.recovery import Death

log = logging.getLogger("lockstep.serve")

YOUNG_S = 2.0  # a worker that ends so soon would do so again
GRACE_S = 5.0  # beyond the time that answers get, until a process that was told to end is killed
HEARING_S = 0.5  # what an engine said may take so long to be heard, by a launcher that was itself stopped for a while
BACKLOG = 2048
EXIT_INTERRUPTED = 130
OURS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that somebody sends


@dataclass(slots=True)
class Child:
    """A process of ours."""

    role: Literal["nursery", "worker"]
    number: int
    process: subprocess.Popen[bytes]
    began_s: float


@dataclass(slots=True)
class Life:
    """One life of the engine."""

    generation: int
    pid: int = 0
    ready: bool = False  # it said that it serves
    heard_s: float = 0.0
    hangs: bool = False  # and was ended for it


@dataclass(frozen=True, slots=True)
class Ended:
    """A child did."""

    child: Child


@dataclass(frozen=True, slots=True)
class Signalled:
    """Somebody wants the server to stop."""

    number: int


class Launcher:
    """One server, from its sockets to its end."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.children: list[Child] = []
        self._happened: Inbox[Ended | Signalled | lives.Report] = Inbox()
        self._next_worker = 0
        self._control: socket.socket | None = None  # to the nursery
        self.engine: Life | None = None
        self._generation = 0  # of the next engine
        self._restarts_s: list[float] = []  # when each was, within the window
        self._down_s = 0.0  # since when there is no engine
        self._listener = listen(settings.host, settings.port)
        self._admin = None if settings.admin_socket is None else listen_unix(Path(settings.admin_socket))
        self.folder = fresh_folder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._to_workers = Writers(self._context, self.folder)
        self._to_engine = writer(self._context, engine_address(self.folder))

    @property
    def url(self) -> str:
        """Where clients find it."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> int:
        """Serve until told to stop, or until that is not possible any more. Returns the exit status."""
        with self._signals():
            try:
                children.write_settings(self.folder, self.settings)
                self._start_nursery()
                self._begin_engine(None)
                for _ in range(self.settings.api_workers):
                    self._start_worker()
                while True:
                    status = self._next()
                    if status is not None:
                        return status
            finally:
                self._kill()
                self._clean()

    def _next(self) -> int | None:
        """Wait for something to happen, and do what follows. Returns the exit status when it is over."""
        match self._wait():
            case Signalled(number):
                self._stop()
                return EXIT_INTERRUPTED if number == signal.SIGINT else 0
            case Over(generation, status) if self.engine is not None and generation == self.engine.generation:
                return self.engine_ended(status)
            case Ended(child) if child.role == "nursery":
                return self._nursery_ended(child)
            case Ended(child):
                if not self._worker_ended(child):
                    self._stop()
                    return 1
            case Began() | Alive() as report:
                self._heard(report)
            case None:
                self._end_hanging()
            case _:  # of an engine that there is not any more
                pass
        return None

    def _wait(self) -> Ended | Signalled | lives.Report | None:
        """What happens next; None if the engine got nothing done for too long."""
        life, limit_s = self.engine, self.settings.batch_timeout_s
        if life is None or not life.ready or life.hangs or not limit_s:
            return self._happened.wait()
        try:
            return self._happened.get(max(0.0, life.heard_s + limit_s - time.monotonic()) + HEARING_S)
        except Empty:
            return None

    # ------------------------------------------------------------------------------------------------ what may happen

    def _heard(self, report: Began | Alive) -> None:
        """The engine began, or still gets on."""
        life = self.engine
        if life is None or report.generation != life.generation:
            return
        life.heard_s = time.monotonic()
        if isinstance(report, Began):
            life.pid = report.pid
        elif not life.ready:
            life.ready = True
            if life.generation:
                log.warning("engine %d serves %.3f s after the end of the one before", life.generation, self._gone_s())

    def _gone_s(self) -> float:
        return time.monotonic() - self._down_s

    def _end_hanging(self) -> None:
        assert self.engine is not None
        log.error("the engine got nothing done for %g s and is ended", self.settings.batch_timeout_s)
        self.engine.hangs = True
        self._tell_nursery(End(self.engine.generation))

    def engine_ended(self, status: int) -> int | None:
        """Start the next one, which recovers; or give up, and return the server's exit status."""
        life, settings = self.engine, self.settings
        assert life is not None
        self.engine, self._down_s = None, time.monotonic()
        message = f"the engine ended with {_status(status)}" if not life.hangs else "the engine stood still"
        log.error("%s", message)
        self._restarts_s = [at for at in self._restarts_s if self._down_s - at < settings.restart_window_s]
        if not settings.restarts or status == children.EXIT_FOR_GOOD or not (life.ready or life.generation):
            return self._give_up(message)
        if len(self._restarts_s) >= settings.restarts:
            most = f"{settings.restarts} restarts in {settings.restart_window_s:g} s are the most that there may be"
            return self._give_up(f"{message}, and {most}")
        self._restarts_s.append(self._down_s)
        for worker in self.workers:
            self._to_workers.send(EngineRestarting(worker.number, self._generation, message))
        self._begin_engine("killed" if -status in OURS and not life.hangs else "crashed")
        return None

    def _give_up(self, message: str) -> int:
        """Nothing will come any more: streams are ended, and the server."""
        for worker in self.workers:
            self._to_workers.send(EngineGone(worker.number, message))
        time.sleep(0.2)  # before they hear that it is time to stop
        self._stop()
        return 1

    def _nursery_ended(self, child: Child) -> int | None:
        """Nobody tells any more how the engine is: it is ended, and both begin again."""
        log.error("the nursery of the engine ended with %s", _status(child.process.returncode))
        self.children.remove(child)
        life = self.engine
        if time.monotonic() - child.began_s < YOUNG_S or life is None or not life.pid:
            return self._give_up("the nursery of the engine ended")
        _end_orphan(life.pid)
        self._start_nursery()
        return self.engine_ended(-signal.SIGKILL)

    def _worker_ended(self, child: Child) -> bool:
        """Whether another worker took its place."""
        log.error("worker %d ended with %s", child.number, _status(child.process.returncode))
        self.children.remove(child)
        self._tell_engine(WorkerGone(child.number))
        if time.monotonic() - child.began_s < YOUNG_S:
            return False
        self._start_worker()
        return True

    # -------------------------------------------------------------------------------------------------------- children

    @property
    def workers(self) -> list[Child]:
        """Those that run."""
        return [child for child in self.children if child.role == "worker"]

    def _start_nursery(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        number = theirs.fileno()
        self._start("nursery", 0, ["-m", "lockstep.api.nursery", str(self.folder), str(number)], (number,))
        theirs.close()
        if self._control is not None:
            self._control.close()
        self._control = ours
        threading.Thread(target=self._hear, args=(ours,), daemon=True).start()

    def _hear(self, control: socket.socket) -> None:
        """Pass on what the nursery and its engine say."""
        with contextlib.suppress(OSError):  # closed
            while frame := control.recv(lives.MESSAGE_BYTES_MAX):
                self._happened.put(lives.read_report(frame))

    def _begin_engine(self, death: Death | None) -> None:
        self.engine = Life(self._generation, heard_s=time.monotonic())
        self._tell_nursery(Begin(self._generation, death, tuple(worker.number for worker in self.workers)))
        self._generation += 1

    def _tell_nursery(self, command: lives.Command) -> None:
        assert self._control is not None
        with contextlib.suppress(OSError):  # it has ended, and we shall hear of it
            self._control.send(lives.encode(command))

    def _start_worker(self) -> None:
        """Start a worker under a number that no other had, so that no message for that one reaches it."""
        descriptors = [self._listener.fileno()]
        if self._admin is not None and not self.workers:
            descriptors.append(self._admin.fileno())
        number = self._next_worker
        self._next_worker += 1
        arguments = ["-m", "lockstep.api.worker", str(self.folder), str(number), *map(str, descriptors)]
        self._start("worker", number, arguments, tuple(descriptors))

    def _start(
        self, role: Literal["nursery", "worker"], number: int, arguments: list[str], descriptors: tuple[int, ...]
    ) -> None:
        environment = dict(os.environ)
        if role == "worker" and self.settings.api_workers > 1:
            shared = self.folder / "metrics"
            shared.mkdir(mode=0o700, exist_ok=True)
            environment[METRICS_FOLDER] = str(shared)
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,  # so Ctrl-C reaches the launcher alone, which stops them in order
        )
        child = Child(role, number, process, time.monotonic())
        self.children.append(child)
        threading.Thread(target=self._await, args=(child,), daemon=True).start()

    def _await(self, child: Child) -> None:
        child.process.wait()
        self._happened.put(Ended(child))

    # ------------------------------------------------------------------------------------------------------- the end

    def _stop(self) -> None:
        """Workers first, so that the engine can still end their answers; then the engine."""
        for child in self.workers:
            child.process.terminate()
        if self._wait_for("a worker", lambda: bool(self.workers), self.settings.shutdown_s + GRACE_S):
            self._tell_engine(Stop(0))
            self._wait_for("the engine", lambda: self.engine is not None, GRACE_S)

    def _wait_for(self, who: str, there: Callable[[], bool], seconds: float) -> bool:
        """Whether what was there ended in time, and nobody lost patience meanwhile."""
        until_s = time.monotonic() + seconds
        while there():
            try:
                happened = self._happened.get(until_s - time.monotonic())
            except Empty:
                log.error("%s does not end and is killed", who)
                return False
            match happened:
                case Signalled():
                    log.error("killing everything")
                    return False
                case Ended(child) if child in self.children:
                    self.children.remove(child)
                    if child.role == "nursery":
                        return False
                case Over(generation) if self.engine is not None and generation == self.engine.generation:
                    self.engine = None
        return True

    def _kill(self) -> None:
        if self.engine is not None:
            self._tell_nursery(End(self.engine.generation))
            self._wait_for("the engine", lambda: self.engine is not None, 1.0)
        if self.engine is not None and self.engine.pid:
            _end_orphan(self.engine.pid)
        for child in self.children:
            child.process.kill()
            child.process.wait()

    def _clean(self) -> None:
        self._to_workers.close()
        self._to_engine.close()
        self._context.term()
        if self._control is not None:
            self._control.close()
        self._listener.close()
        if self._admin is not None:
            Path(self._admin.getsockname()).unlink(missing_ok=True)
            self._admin.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell_engine(self, message: ToEngine) -> None:
        with contextlib.suppress(zmq.Again):  # it does not read any more; somebody will notice
            self._to_engine.send(encode(message), zmq.Flag.DONTWAIT)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM become something that happened."""
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, lambda number, _: self._happened.put(Signalled(number))) for one in wanted}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"`port`: {host}:{port} cannot be listened on: {error.strerror or error}\n"
            "hint: another server may be there; --port 0 takes a free one"
        ) from error
    return listener


def listen_unix(path: Path) -> socket.socket:
    """A Unix socket that only its owner can connect to. Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"`admin_socket`: {path} cannot be listened on: {error.strerror or error}\n"
            "hint: remove it if no server is there"
        ) from error
    finally:
        os.umask(before)
    return listener


def _end_orphan(pid: int) -> None:
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


def _status(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"status {code}"
