"""The engine process: an engine, its host's thread, and a mailbox. `python -m lockstep.api.engine_process FOLDER`.

    mailbox ──handler──> host.submit, cancel, ask ──> host's thread ──> outbox ──one message per worker and step──>

The main thread reads and dispatches, and waits for nothing else. It ends with status 0 when it is told to, and with 1
when the engine failed or somebody said what it does not understand. It also ends when its parent is gone.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from lockstep.api import children
from lockstep.api.engines import EngineUnit, both, build_engine
from lockstep.api.outbox import Outbox, SampleSink, Writers
from lockstep.api.sockets import engine_address, reader
from lockstep.api.wire import (
    PROTOCOL,
    Answered,
    Ask,
    Cancel,
    CancelLabel,
    EngineGone,
    EngineMessage,
    Hello,
    Stop,
    Submit,
    Trace,
    Welcome,
    WireError,
    WorkerGone,
    read_by_engine,
)
from lockstep.core.commands import ControlAnswered
from lockstep.core.errors import ConfigError, LockstepError
from lockstep.core.events import GetState
from lockstep.core.support import samples_asked
from lockstep.host.errors import EngineStopped

log = logging.getLogger("lockstep.engine")

LOOK_MS = 200  # how often to see whether the engine still runs


@dataclass(slots=True)
class _Open:
    """A ticket that has not ended."""

    samples: int
    label: str
    tenant: str
    first_id: int = -1  # the engine's id of its first sample


class EngineProcess:
    """Takes messages to an engine and sends its answers back.

    Args:
        folder: of the sockets.
    """

    def __init__(self, unit: EngineUnit, folder: Path) -> None:
        self.unit, self.host = unit, unit.host
        self.stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox = reader(self._context, engine_address(folder))
        self._writers = Writers(self._context, folder)  # of this thread; the outbox has those of the host's
        self.outbox = Outbox(Writers(self._context, folder), self.host.engine, self.cancel_all_of, unit.drift)
        self.host.observe = both(self.host.observe, self.outbox.times.observe)
        self._open: dict[tuple[int, int], _Open] = {}  # by worker and ticket; entries leave in the host's thread

    def run(self) -> None:
        """Serve until told to stop. Raises EngineStopped when the engine ends by itself; WireError."""
        self.host.performed = self.outbox.send
        self.unit.start()
        try:
            while not self.stopping:
                if self._mailbox.poll(LOOK_MS):
                    self.handle(read_by_engine(self._mailbox.recv()))
                if self.host.failure:
                    raise EngineStopped(self.host.failure)
        except LockstepError as error:
            for worker in self.outbox.workers:
                self._writers.send(EngineGone(worker, str(error)))
            raise
        finally:
            self.unit.close()
            self._writers.close()

    # ------------------------------------------------------------------------------------- one handler for each message

    def handle(self, message: EngineMessage) -> None:
        """Do what a message asks for."""
        HANDLERS[type(message)](self, message)

    def greet(self, message: Hello) -> None:
        """A worker is there."""
        if message.protocol != PROTOCOL:
            raise WireError(f"worker {message.worker} speaks protocol {message.protocol}, the engine {PROTOCOL}")
        self.outbox.workers.add(message.worker)
        self._writers.send(Welcome(message.worker, PROTOCOL, self.unit.about))

    def submit(self, message: Submit) -> None:
        """A request."""
        request, clock = message.request, self.host.clock
        if message.start_by_ns is not None:
            request = msgspec.structs.replace(request, deadline_us=max(0, clock.at(message.start_by_ns)))
        if message.finish_by_ns is not None:
            request = msgspec.structs.replace(request, finish_by_us=max(0, clock.at(message.finish_by_ns)))
        samples = samples_asked(request)
        key = (message.worker, message.ticket)
        ticket = self._open[key] = _Open(samples, request.label, request.tenant)
        left = [samples]

        def over() -> None:  # in the host's thread
            left[0] -= 1
            if not left[0]:
                self._open.pop(key, None)

        sinks = [SampleSink(self.outbox, message.worker, message.ticket, sample, over) for sample in range(samples)]
        ticket.first_id = self.host.submit(request, *sinks)

    def cancel(self, message: Cancel) -> None:
        """A client left."""
        self._cancel(message.worker, message.ticket)

    def cancel_label(self, message: CancelLabel) -> None:
        """Somebody wants the requests of this name to end."""
        for (worker, number), ticket in list(self._open.items()):
            if ticket.label == message.label and ticket.tenant == message.tenant:
                self._cancel(worker, number)

    def ask(self, message: Ask) -> None:
        """A control request; it is answered when the engine has an answer."""
        self.host.ask(message.control, partial(self._answer, message.worker, message.ticket))

    def trace(self, message: Trace) -> None:
        """A profile; in a thread of its own, since it waits for the engine."""
        threading.Thread(target=self._trace, args=(message,), daemon=True).start()

    def worker_gone(self, message: WorkerGone) -> None:
        """Nobody reads what this worker asked for."""
        self.outbox.workers.discard(message.worker)
        self.cancel_all_of(message.worker)

    def stop(self, message: Stop) -> None:
        """Time to go."""
        self.stopping = True

    # ------------------------------------------------------------------------------------------------------------------

    def cancel_all_of(self, worker: int) -> None:
        """Cancel what a worker has open. May be called in the host's thread."""
        for whose, ticket in list(self._open):
            if whose == worker:
                self._cancel(worker, ticket)

    def _cancel(self, worker: int, ticket: int) -> None:
        opened = self._open.get((worker, ticket))
        if opened is not None and opened.first_id >= 0:
            for sample in range(opened.samples):
                self.host.cancel(opened.first_id + sample)

    def _trace(self, message: Trace) -> None:
        try:
            if self.unit.trace is None:
                raise ConfigError("this engine has no device to look at")
            said, ok = self.unit.trace(message.options), True
        except LockstepError as error:
            said, ok = str(error).partition("\nhint: ")[0], False
        answer = Answered(message.worker, message.ticket, ok, said)
        with suppress(EngineStopped):  # then everybody is told so
            self.host.ask(GetState(), lambda _: self.outbox.answer(answer))  # in its thread, whose outbox it is

    def _answer(self, worker: int, ticket: int, future: Future[ControlAnswered]) -> None:
        """In the host's thread, whose sockets are those of the outbox."""
        if future.exception() is not None:
            self.outbox.answer(Answered(worker, ticket, False, str(future.exception())))
        else:
            said = future.result()
            self.outbox.answer(Answered(worker, ticket, said.ok, said.message, said.stats))


HANDLERS: dict[type[EngineMessage], Callable[[EngineProcess, Any], None]] = {
    Hello: EngineProcess.greet,
    Submit: EngineProcess.submit,
    Cancel: EngineProcess.cancel,
    CancelLabel: EngineProcess.cancel_label,
    Ask: EngineProcess.ask,
    Trace: EngineProcess.trace,
    WorkerGone: EngineProcess.worker_gone,
    Stop: EngineProcess.stop,
}


def main(folder: Path) -> int:
    """Build the engine of a folder's settings and serve it."""
    settings = children.begin(folder, "engine")
    # Where all processes of a service get it: workers end first, then comes Stop. SIG_IGN would be inherited by ranks.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        unit = build_engine(settings)
        log.info("%s on %s, ready\n%s", unit.about.model, unit.about.device, unit.memory)
        EngineProcess(unit, folder).run()
    except LockstepError as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
