"""The launcher: opens the sockets, starts the processes, and reacts when one of them ends.

    launcher ─┬─ fork server ── engine     a child ends when the launcher does: the launcher holds the other end of
              ├─ fork server ── engine     the child's stdin; with --dp there is one of each per engine
              ├─ API worker 0
              └─ API worker 1 ...

- When a worker ends, its streams end. The engines receive WorkerGone and cancel its requests, and another worker
  is started. If workers end before they are connected to their engines, the next one is started after a delay that
  doubles, and after WORKER_TRIES such ends in a row the server stops. It stops at once if no worker was ever connected
  and the first one was not killed: the next one would end alike.
- An engine that ends is replaced: `supervisor`. When an engine is given up, the other engines continue. If it was the
  last engine, or its first generation never served, the server stops with status 1.
- With several engines the router is a thread of the launcher: `routing`.
- On SIGTERM or Ctrl-C the workers stop first, with time for their answers, then the engines. A second signal kills
  all processes.
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
from errno import EACCES, EADDRINUSE, EADDRNOTAVAIL, EPERM
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Literal

import zmq

from lockstep.api.observability.metrics_folder import FOLDER as METRICS_FOLDER
from lockstep.api.processes import children
from lockstep.api.processes.engine_messages import Alive, Began, EngineExited, KillEngine
from lockstep.api.processes.pair_routing import PairRouting
from lockstep.api.processes.routing import RouterService, RouterThread
from lockstep.api.processes.sockets import engine_folder, fresh_folder, router_address, writer
from lockstep.api.processes.supervisor import (
    GRACE_S,
    Child,
    EngineReport,
    Supervisor,
    end_orphan,
    status_text,
)
from lockstep.api.processes.wire import (
    EngineLost,
    Routed,
    StopEngine,
    StopRouter,
    ToRouter,
    WorkerGone,
    WorkerLost,
    encode,
)
from lockstep.api.settings import ServeSettings
from lockstep.core.contract.errors import ConfigError
from lockstep.host.inbox import Inbox
from lockstep.host.recovery import OUTSIDE_SIGNALS

log = logging.getLogger("lockstep.serve")

BACKLOG = 2048
LOOK_S = 0.05  # interval of checks, during the start, that all processes are ready
WORKER_TRIES = 5  # workers that may end in a row before they are ready
FIRST_DELAY_S = 0.1  # until the next worker is started after one that was not ready; it doubles with each of them
REPORT_DELAY_S = 0.5  # added to an engine's deadline, since the launcher may have been suspended, with unread reports
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A child process ended."""

    child: Child


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher received SIGINT or SIGTERM."""

    number: int


@dataclass(frozen=True, slots=True)
class RouterFailed:
    """The router's thread raised an exception."""

    error: Exception


LauncherEvent = ChildEnded | Signalled | EngineReport | RouterFailed


class Launcher:
    """One server: opens the sockets, runs the processes, and removes the sockets at the end."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self._over = threading.Event()
        self.children: list[Child] = []
        self._events: Inbox[LauncherEvent] = Inbox()
        self._next_worker = 0
        self._failed_workers = 0  # workers in a row that ended before they were ready
        self._starts_s: list[float] = []  # times (time.monotonic, seconds) at which workers are to be started
        self._operator_worker = -1  # number of the worker that serves the routes for operators
        self._listener = listen(settings.host, settings.port)
        self._admin = None if settings.admin_socket is None else listen_unix(Path(settings.admin_socket))
        self.folder = fresh_folder()
        self.engines = [self._supervisor(number) for number in range(settings.engines)]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: RouterThread | None = None
        self._to_router: zmq.Socket[bytes] | None = None

    def _supervisor(self, number: int) -> Supervisor:
        folder = engine_folder(self.folder, number, self.settings.engines)
        folder.mkdir(mode=0o700, exist_ok=True)
        return Supervisor(
            number,
            folder,
            self.settings,
            start=partial(self._start, "fork_server", number),
            on_report=self._events.put,
            workers=lambda: [worker.number for worker in self.workers],
        )

    @property
    def url(self) -> str:
        """The address of the server for clients."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, ready: Callable[[], object] = lambda: None) -> int:
        """Serve until a signal arrives or the server cannot continue. Returns the exit status.

        Args:
            ready: called once, in a thread of its own, when all engines and API workers take requests.
        """
        with self._signals():
            try:
                children.write_settings(self.folder, self.settings)
                if len(self.engines) > 1:
                    self._begin_router()
                for engine in self.engines:
                    if engine.folder != self.folder:
                        children.write_settings(engine.folder, self.settings.of_engine(engine.number))
                    engine.begin()
                for _ in range(self.settings.api_workers):
                    self._start_worker()
                threading.Thread(target=self._await_ready, args=(ready,), name="ready", daemon=True).start()
                while True:
                    status = self._next()
                    if status is not None:
                        return status
            finally:
                self._over.set()
                self._kill()
                self._clean()

    def _await_ready(self, ready: Callable[[], object]) -> None:
        while not self._over.wait(LOOK_S):
            workers = [worker.number for worker in self.workers]
            if len(workers) == self.settings.api_workers and all(children.is_ready(self.folder, n) for n in workers):
                ready()
                return

    def _next(self) -> int | None:
        """Wait for the next event and handle it. Returns the exit status if the server ended; else None."""
        while self._starts_s and self._starts_s[0] <= time.monotonic():
            del self._starts_s[0]
            self._start_worker()
        match self._wait():
            case Signalled(number):
                self._stop()
                return EXIT_INTERRUPTED if number == signal.SIGINT else 0
            case EngineReport(number, EngineExited(generation, status)):
                engine = self.engines[number]
                if engine.current is not None and generation == engine.current.generation:
                    first = not generation and not engine.current.ready
                    return self._after(engine, engine.ended(status), first=first)
            case ChildEnded(child) if child.role == "fork_server":
                self.children.remove(child)
                engine = self.engines[child.number]
                if not engine.gone:
                    first = engine.current is not None and not engine.current.generation and not engine.current.ready
                    return self._after(engine, engine.fork_server_ended(), first=first)
            case ChildEnded(child):
                if not self._worker_ended(child):
                    self._stop()
                    return 1
            case EngineReport(number, (Began() | Alive()) as report):
                self.engines[number].reported(report)
            case RouterFailed(error):
                log.error("the router failed: %s: %s", type(error).__name__, error)
                self._stop()
                return 1
            case None:
                for engine in self.engines:
                    if engine.deadline_s is not None and engine.deadline_s + REPORT_DELAY_S <= time.monotonic():
                        engine.end_hanging()
                    if engine.retry_s is not None and engine.retry_s <= time.monotonic():
                        engine.retry()
            case _:  # a report of an earlier engine generation
                pass
        return None

    def _wait(self) -> LauncherEvent | None:
        """Wait for the next event and return it; None if a deadline, or a start of an engine or worker, comes first."""
        due = [engine.deadline_s + REPORT_DELAY_S for engine in self.engines if engine.deadline_s is not None]
        due += [engine.retry_s for engine in self.engines if engine.retry_s is not None]
        due += self._starts_s[:1]
        if not due:
            return self._events.wait()
        try:
            return self._events.get(max(0.0, min(due) - time.monotonic()))
        except Empty:
            return None

    def _after(self, engine: Supervisor, goes_on: bool, *, first: bool) -> int | None:
        """Handle the end of an engine that was replaced (`goes_on`) or given up.

        Args:
            first: the engine ended in its first generation before it served.
        Returns: the exit status if the server ended with the engine; else None.
        """
        coming = engine.next_generation - (engine.retry_s is None)
        self._send_to_router(EngineLost(engine.number, coming if goes_on else None))
        if goes_on:
            return None
        role = self.settings.role_of(engine.number)
        alike = [one for one in self.engines if self.settings.role_of(one.number) == role]
        if not first and not all(one.gone for one in alike):
            log.error("%s is not restarted, the other engines continue: %s", engine.name, engine.gone)
            return None
        time.sleep(0.2)  # so that workers receive EngineGone before SIGTERM
        self._stop()
        return 1

    def _worker_ended(self, child: Child) -> bool:
        """Handle the end of a worker. Returns whether another worker is started in its place."""
        log.error("worker %d ended with %s", child.number, status_text(child.process.returncode))
        self.children.remove(child)
        for engine in self.engines:
            engine.send_to_engine(WorkerGone(child.number))
        self._send_to_router(WorkerLost(child.number))
        if children.is_ready(self.folder, child.number):
            self._failed_workers = 0
            self._start_worker()
            return True
        killed = -child.process.returncode in OUTSIDE_SIGNALS
        if not killed and not any(children.is_ready(self.folder, number) for number in range(self._next_worker)):
            return False  # the next one would end alike
        self._failed_workers += 1
        if self._failed_workers >= WORKER_TRIES:
            log.error("%d workers in a row ended before they were ready, no other is started", self._failed_workers)
            return False
        delay_s = FIRST_DELAY_S * 2 ** (self._failed_workers - 1)
        log.warning("worker %d was not ready; another is started in %g s", child.number, delay_s)
        self._starts_s = sorted([*self._starts_s, time.monotonic() + delay_s])
        return True

    # ---------------------------------------------------------------------------------------------------------- router

    def _begin_router(self) -> None:
        settings = self.settings
        run = None if settings.journal is None else Path(settings.journal)
        if run is not None:
            run.mkdir(mode=0o700, parents=True, exist_ok=True)
        config, admission = settings.router_config(), settings.admission_config()

        def make(answer: Callable[[Routed], object]) -> RouterService | PairRouting:
            if settings.hands_over:
                sizes = (settings.prefill_processes, settings.engines - settings.prefill_processes)
                return PairRouting(*sizes, config, answer, run=run, bytes_max=settings.journal_bytes)
            return RouterService(
                settings.engines, config, answer, run=run, bytes_max=settings.journal_bytes, admission=admission
            )

        self._router = RouterThread(
            self.folder,
            make,
            lambda error: self._events.put(RouterFailed(error)),
        )
        self._to_router = writer(self._context, router_address(self.folder))

    def _send_to_router(self, message: ToRouter) -> None:
        if self._to_router is not None:
            with contextlib.suppress(zmq.Again):
                self._to_router.send(encode(message), zmq.Flag.DONTWAIT)

    # -------------------------------------------------------------------------------------------------------- children

    @property
    def workers(self) -> list[Child]:
        """The workers that run."""
        return [child for child in self.children if child.role == "worker"]

    def _start_worker(self) -> None:
        """Start a worker under a number never used before, so that it receives no message to an earlier worker."""
        descriptors = [self._listener.fileno()]
        number = self._next_worker
        self._next_worker += 1
        if self._admin is not None and self._operator_worker not in [worker.number for worker in self.workers]:
            self._operator_worker = number
            descriptors.append(self._admin.fileno())
        arguments = ["-m", "lockstep.api.worker", str(self.folder), str(number), *map(str, descriptors)]
        self._start("worker", number, arguments, tuple(descriptors))
        for engine in self.engines:
            engine.worker_started(number)

    def _start(
        self, role: Literal["fork_server", "worker"], number: int, arguments: list[str], descriptors: tuple[int, ...]
    ) -> Child:
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
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which stops the children in order
        )
        child = Child(role, number, process)
        self.children.append(child)
        threading.Thread(target=self._await, args=(child,), daemon=True).start()
        return child

    def _await(self, child: Child) -> None:
        child.process.wait()
        self._events.put(ChildEnded(child))

    # --------------------------------------------------------------------------------------------------------- shutdown

    def _engines_running(self) -> bool:
        return any(engine.current is not None for engine in self.engines)

    def _stop(self) -> None:
        """Stop the workers, so that the engines can still end their answers; then the engines."""
        self._over.set()
        for child in self.workers:
            child.process.terminate()
        ended = self._wait_for("a worker", lambda: bool(self.workers), self.settings.shutdown_s + GRACE_S)
        self._listener.close()  # new connections are refused at once; until here workers answered them
        if ended:
            for engine in self.engines:
                engine.send_to_engine(StopEngine(0))
            self._wait_for("an engine", self._engines_running, GRACE_S)

    def _wait_for(self, name: str, there: Callable[[], bool], seconds: float) -> bool:
        """Wait while `there()` is true.

        Returns: False after `seconds`, after a second signal, or if a fork server ended; else True.
        """
        until_s = time.monotonic() + seconds
        while there():
            try:
                event = self._events.get(until_s - time.monotonic())
            except Empty:
                log.error("%s did not end in time and is killed", name)
                return False
            match event:
                case Signalled():
                    log.error("second signal: all processes are killed")
                    return False
                case ChildEnded(child) if child in self.children:
                    self.children.remove(child)
                    if child.role == "fork_server":
                        return False
                case EngineReport(number, EngineExited(generation)):
                    engine = self.engines[number]
                    if engine.current is not None and generation == engine.current.generation:
                        engine.current = None
        return True

    def _kill(self) -> None:
        if self._engines_running():
            for engine in self.engines:
                if engine.current is not None:
                    engine.send_to_fork_server(KillEngine(engine.current.generation))
            self._wait_for("an engine", self._engines_running, 1.0)
        for engine in self.engines:
            if engine.current is not None and engine.current.pid:
                end_orphan(engine.current.pid)
        for child in self.children:
            child.process.kill()
            child.process.wait()

    def _clean(self) -> None:
        if self._router is not None and self._to_router is not None:
            self._send_to_router(StopRouter())
            self._router.join(GRACE_S)
            self._to_router.close()
        for engine in self.engines:
            engine.close()
        self._context.term()
        self._listener.close()
        if self._admin is not None:
            Path(self._admin.getsockname()).unlink(missing_ok=True)
            self._admin.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into events of the launcher."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, lambda number, _: self._events.put(Signalled(number))) for one in numbers}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a host name"
        raise ConfigError(
            f"`host`: {host} is not known: {why}\nhint: 127.0.0.1, or an address of this machine"
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "another server may listen there; --port 0 takes a free port"
        if error.errno == EADDRNOTAVAIL:
            hint = "the address must be one of this machine; 127.0.0.1 is"
        elif error.errno in (EACCES, EPERM):
            hint = "ports below 1024 are reserved for the system; --port 8000"
        raise ConfigError(
            f"`port`: {host}:{port} cannot be listened on: {error.strerror or error}\nhint: {hint}"
        ) from error
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket with mode 0600. It replaces a socket without a listener. Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        if error.errno == EADDRINUSE:
            why = "another server listens there" if path.is_socket() else "the file exists, and is not a socket"
        raise ConfigError(f"`admin_socket`: {path} cannot be listened on: {why}\nhint: choose another path") from error
    finally:
        os.umask(before)
    return listener


def _answers(path: Path) -> bool:
    """Return whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.settimeout(1.0)
        try:
            one.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # not a leftover of this server: keep it
            return True
    return True
