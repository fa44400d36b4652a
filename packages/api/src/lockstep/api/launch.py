"""The launcher: opens the sockets, starts the processes, and is told when one of them ends. It does nothing else.

    launcher ─┬─ engine            a child ends when the launcher does: it holds the other end of the child's stdin
              ├─ API worker 0
              └─ API worker 1 ...

- A worker that ends takes its streams with it; the engine is told, so that it cancels what nobody reads, and another
  worker takes its place. One that ends as soon as it began is not tried again.
- When the engine ends, workers are told; they end their streams with an error and answer 503, and the server stops with
  status 1. `engine_ended` is where somebody who can recover would start the next one instead.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Literal

import zmq

from lockstep.api import children
from lockstep.api.metrics_folder import FOLDER as METRICS_FOLDER
from lockstep.api.outbox import Writers
from lockstep.api.settings import ServeSettings
from lockstep.api.sockets import engine_address, fresh_folder, writer
from lockstep.api.wire import EngineGone, Stop, ToEngine, WorkerGone, encode
from lockstep.core.errors import ConfigError
from lockstep.host.inbox import Inbox

log = logging.getLogger("lockstep.serve")

YOUNG_S = 2.0  # a worker that ends so soon would do so again
GRACE_S = 5.0  # beyond the time that answers get, until a process that was told to end is killed
BACKLOG = 2048
EXIT_INTERRUPTED = 130


@dataclass(slots=True)
class Child:
    """A process of ours."""

    role: Literal["engine", "worker"]
    number: int
    process: subprocess.Popen[bytes]
    began_s: float


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
        self._happened: Inbox[Ended | Signalled] = Inbox()
        self._next_worker = 0
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
                self._start_engine()
                for _ in range(self.settings.api_workers):
                    self._start_worker()
                while True:
                    match self._happened.wait():
                        case Signalled(number):
                            self._stop()
                            return EXIT_INTERRUPTED if number == signal.SIGINT else 0
                        case Ended(child) if child.role == "engine":
                            return self.engine_ended(child)
                        case Ended(child):
                            if not self._worker_ended(child):
                                self._stop()
                                return 1
            finally:
                self._kill()
                self._clean()

    # ------------------------------------------------------------------------------------------------ what may happen

    def engine_ended(self, child: Child) -> int:
        """Nothing will come any more: streams are ended, and the server."""
        message = f"the engine ended with {_status(child.process.returncode)}"
        log.error("%s", message)
        self.children.remove(child)
        for worker in self.children:
            self._to_workers.send(EngineGone(worker.number, message))
        time.sleep(0.2)  # before they hear that it is time to stop
        self._stop()
        return 1

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

    def _start_engine(self) -> None:
        self._start("engine", 0, ["-m", "lockstep.api.engine_process", str(self.folder)], ())

    def _start_worker(self) -> None:
        """Start a worker under a number that no other had, so that no message for that one reaches it."""
        descriptors = [self._listener.fileno()]
        if self._admin is not None and not any(child.role == "worker" for child in self.children):
            descriptors.append(self._admin.fileno())
        number = self._next_worker
        self._next_worker += 1
        arguments = ["-m", "lockstep.api.worker", str(self.folder), str(number), *map(str, descriptors)]
        self._start("worker", number, arguments, tuple(descriptors))

    def _start(
        self, role: Literal["engine", "worker"], number: int, arguments: list[str], descriptors: tuple[int, ...]
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
        for child in self.children:
            if child.role == "worker":
                child.process.terminate()
        if self._wait_for("worker", self.settings.shutdown_s + GRACE_S):
            self._tell_engine(Stop(0))
            self._wait_for("engine", GRACE_S)

    def _wait_for(self, role: str, seconds: float) -> bool:
        """Whether all children of a kind ended in time, and nobody lost patience meanwhile."""
        until_s = time.monotonic() + seconds
        while any(child.role == role for child in self.children):
            try:
                happened = self._happened.get(until_s - time.monotonic())
            except Empty:
                log.error("a %s does not end and is killed", role)
                return False
            if isinstance(happened, Signalled):
                log.error("killing everything")
                return False
            if happened.child in self.children:
                self.children.remove(happened.child)
        return True

    def _kill(self) -> None:
        for child in self.children:
            child.process.kill()
            child.process.wait()

    def _clean(self) -> None:
        self._to_workers.close()
        self._to_engine.close()
        self._context.term()
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


def _status(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"status {code}"
