"""The engine process: an engine, the thread of its host, and a mailbox. The fork server forks it.

    mailbox ──handler──> RuntimeHost ──its thread──> outbox ──one message per worker and step──>

The main thread reads and dispatches messages, and waits for nothing else. The process ends with status 0 on StopEngine,
with 1 when the engine failed, and with EXIT_FOR_GOOD if the next generation would fail alike: impossible settings, a
journal that cannot be continued, an unreadable message. It also ends when its parent process ends.

A generation that follows a death first waits up to CLAIM_S for the workers to submit their open requests again. It
continues these requests, and cancels the rest, since their clients have left.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import zmq

from lockstep.api.engines import EngineUnit, Place, both, build_engine
from lockstep.api.processes import children, faults, rpc
from lockstep.api.processes.claims import FIRST, Claims, Lost, PriorState
from lockstep.api.processes.kept_requests import KeptRequests, KeptSink, KeptTicket, awaited_workers
from lockstep.api.processes.outbox import Outbox, SampleSink, Writers
from lockstep.api.processes.sockets import engine_address, reader, router_address, writer
from lockstep.api.processes.wire import (
    OVER,
    PROTOCOL,
    Answered,
    Ask,
    CallFunction,
    Cancel,
    CancelLabel,
    EngineHere,
    EngineMessage,
    Hello,
    JoinGroup,
    LeaveGroup,
    LoadLora,
    ProfileRequest,
    PromptOver,
    ReadWeights,
    SampleEnded,
    Settled,
    StepAnswers,
    StopEngine,
    Submit,
    UnloadLora,
    Welcome,
    WireError,
    WorkerGone,
    encode,
    read_by_engine,
)
from lockstep.core.contract.commands import CompileGrammar, ControlAnswered
from lockstep.core.contract.errors import ConfigError, LockstepError
from lockstep.core.contract.events import GetState, Grammar
from lockstep.core.contract.samples import sample_count
from lockstep.core.journal.records import JournalError
from lockstep.core.journal.replay import Divergence
from lockstep.host.errors import EngineStopped, killed_from_outside
from lockstep.host.handover.decode import DecodeSide
from lockstep.host.handover.prefill import PrefillSide
from lockstep.host.loop import Sink
from lockstep.host.router_journal import session_key

log = logging.getLogger("lockstep.engine")

Questions = ProfileRequest | ReadWeights | CallFunction | JoinGroup | LeaveGroup | LoadLora | UnloadLora
"""Messages that are answered in a thread of their own, beside the scheduler."""

LOOK_MS = 200  # interval between checks that the engine still runs
CLAIM_S = 2.0  # time for workers to submit open requests again; a worker that ended sends nothing
START_CLAIM_S = 20.0  # the same at the start of a server whose workers have answers of the server before it


@dataclass(slots=True)
class _OpenTicket:
    """A ticket that has not ended."""

    samples: int
    label: str
    tenant: str
    first_id: int = -1  # request id of its first sample; -1: it was not submitted yet
    cancelled: bool = False


class EngineProcess:
    """Passes messages to an engine and sends its answers back.

    Args:
        folder: folder of the sockets.
        generation: of this engine; the server's first is 0.
        before: the end of the previous generation, and the workers that it had.
        alive: called several times a second while the engine makes progress.
        number: number of the engine among several, reported to the router; None: the only engine, without a router.
        awaited: workers that may take over requests of an earlier server.
        functions: that operators may call, by name.
    """

    def __init__(
        self,
        unit: EngineUnit,
        folder: Path,
        generation: int = 0,
        before: PriorState = FIRST,
        alive: Callable[[], object] = lambda: None,
        number: int | None = None,
        awaited: Sequence[int] = (),
        functions: rpc.Functions = MappingProxyType({}),
    ) -> None:
        self.unit, self.host = unit, unit.host
        self._functions = functions
        self.generation, self._alive = generation, alive
        self.stopping = False
        self._claims = Claims(self.host, unit.keeper, folder.name, before.workers, awaited)
        self._claim_s = START_CLAIM_S if awaited else CLAIM_S
        self._kept = KeptRequests(self.host.cancel)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox = reader(self._context, engine_address(folder))
        self._number, self._folder = number, folder
        # for the main thread; the outbox has its own for the host's thread
        self._writers = Writers(self._context, folder)
        self.outbox = Outbox(
            Writers(self._context, folder), self.host.engine, self.cancel_all_of, unit.drift, unit.host
        )
        self.outbox.restarts, self.outbox.drafts = generation, self.host.drafts
        self.outbox.moves = self.host.moves
        if self.host.idle_check is not None:
            self.outbox.checks, self.host.idle_check.checked = self.host.idle_check.counts, self.outbox.send
        if isinstance(unit.handover, DecodeSide):
            self.outbox.transfers = unit.handover.counts
        self.host.observe = both(self.host.observe, self.outbox.times.observe)
        # kept open, since a closed socket lingers for half a second only
        self._to_router: zmq.Socket[bytes] | None = None
        # by worker and ticket; entries are removed in the host's thread
        self._open: dict[tuple[int, int], _OpenTicket] = {}

    def run(self) -> None:
        """Serve until StopEngine. Raises EngineStopped when the engine ends by itself; WireError."""
        try:
            self._await_claims()
            self.outbox.send()
            self.host.performed = self.outbox.send
            self._send_to_router()
            self.unit.start()
            self._alive()
            self._mailbox.set(zmq.SocketOption.RCVTIMEO, LOOK_MS)  # takes half the time of a poll before each message
            turns, reported_s, expired_s = -1, time.monotonic(), time.monotonic()
            while not self.stopping:
                with suppress(zmq.Again):  # nothing came within LOOK_MS
                    self.handle(read_by_engine(self._mailbox.recv()))
                if self.host.failure:
                    raise EngineStopped(self.host.failure) from self.host.error
                now_s = time.monotonic()
                if now_s - expired_s >= 1.0:
                    expired_s = now_s
                    self._kept.expire()
                if now_s - reported_s >= LOOK_MS / 1000 and self.host.turns != turns:
                    turns, reported_s = self.host.turns, now_s
                    self._alive()
        finally:
            try:
                self.unit.close()
            except JournalError:  # the journal cannot be written, which was logged; the next generation may be able to
                if not self.host.failure:
                    raise
            finally:
                self._context.destroy(linger=500)

    def _await_claims(self) -> None:
        """Wait for workers to submit their open requests again.

        The first generation counts as started meanwhile, so that its end is followed by another one: it has recovered
        its state, and its workers already accept requests.
        """
        until_s = time.monotonic() + self._claim_s
        if self._claims.workers:
            if not self.generation:
                self._alive()
            log.info("waiting up to %g s for open requests of %d workers", self._claim_s, len(self._claims.workers))
        while self._claims.workers and not self.stopping and (left_s := until_s - time.monotonic()) > 0:
            if not self.generation:
                self._alive()
            if self._mailbox.poll(min(LOOK_MS, max(1, round(left_s * 1000)))):
                self.handle(read_by_engine(self._mailbox.recv()))
        self._claims.close()

    def _send_to_router(self) -> None:
        """Send the router the engine's capacity and open sessions; called before the engine runs."""
        if self._number is None:
            return
        engine = self.host.engine
        here = EngineHere(
            self._number,
            self.generation,
            engine.config.pool_tokens if engine.config.radix_cache else 0,
            tuple(map(session_key, engine.sessions.open)),
            engine.controls.draining,
        )
        self._to_router = writer(self._context, router_address(self._folder.parent))
        self._to_router.send(encode(here))
        if isinstance(self.unit.handover, PrefillSide):
            # used under the lock of the side only, so by one thread at a time
            reports = writer(self._context, router_address(self._folder.parent))
            self.unit.handover.ended = lambda room: reports.send(encode(PromptOver(room)))

    # ------------------------------------------------------------------------------------- one handler for each message

    def handle(self, message: EngineMessage) -> None:
        """Handle a message."""
        HANDLERS[type(message)](self, message)

    def greet(self, message: Hello) -> None:
        """Answer a worker's Hello."""
        if message.protocol != PROTOCOL:
            raise WireError(f"worker {message.worker} uses protocol {message.protocol}, the engine {PROTOCOL}")
        self.outbox.workers.add(message.worker)
        info = msgspec.structs.replace(self.unit.info, weights_version=self.host.weights.version)
        gauges = self.outbox.newest
        self._writers.send(Welcome(message.worker, PROTOCOL, info, self.generation, self.host.adapters, gauges))

    def submit(self, message: Submit) -> None:
        """Submit a request, or continue an earlier one (`again`) after the tokens that the worker has."""
        if message.generation != self.generation:
            return
        request, clock = message.request, self.host.clock
        if message.start_by_ns is not None:
            request = msgspec.structs.replace(request, deadline_us=max(0, clock.at(message.start_by_ns)))
        if message.finish_by_ns is not None:
            request = msgspec.structs.replace(request, finish_by_us=max(0, clock.at(message.finish_by_ns)))
        samples = sample_count(request)
        key = (message.worker, message.ticket)
        ticket = self._open[key] = _OpenTicket(samples, request.label, request.tenant)
        left = [samples - message.have.count(OVER)]

        def over() -> None:  # called in the host's thread
            left[0] -= 1
            if not left[0]:
                self._open.pop(key, None)

        sinks: list[Sink]
        sinks = [SampleSink(self.outbox, message.worker, message.ticket, sample, over) for sample in range(samples)]
        have, kept = message.have, None
        if message.kept:
            earlier = self._kept.take_over(request.origin, samples) if message.again else None
            if earlier is not None:
                self._hand_over(earlier, key, ticket, sinks)
                return
            have = tuple(one if one == OVER else 0 for one in have)
            kept_sinks = [KeptSink(sink) for sink in sinks]
            kept, sinks = self._kept.add(request.origin, key, kept_sinks), [*kept_sinks]
        first_id: int | None = None
        if message.again:
            try:
                first_id = self._claims.take(request, have, sinks, message.contents)
            except Lost as error:
                # the request of a kept answer has the same seed again, so it may start anew
                if not message.kept or error.reason != "engine":
                    self._open.pop(key, None)
                    ended = (
                        SampleEnded(message.ticket, sample, error.reason, error=str(error)) for sample in range(samples)
                    )
                    self._writers.send(StepAnswers(message.worker, ended=tuple(ended)))
                    return

        def send() -> None:
            started = first_id
            if started is None:
                started = self.host.submit(request, *sinks, contents=message.contents)
            ticket.first_id = started
            if kept is not None:
                kept.first_id = ticket.first_id
            if ticket.cancelled:
                self._cancel(*key)

        if first_id is None:
            left[0] = samples
            if message.prefill >= 0 and request.transfer_room is not None:
                assert isinstance(self.unit.handover, DecodeSide)
                self.unit.handover.route(request.transfer_room, message.prefill)
            if request.grammar is not None and self._was_dropped(request.grammar):
                self._compile_first(request.grammar, send)
                return
        send()

    def _was_dropped(self, grammar: Grammar) -> bool:
        """Return whether a grammar was compiled and is kept no longer, so that the host's thread would compile it."""
        if self.unit.grammars is None:
            return False
        known = self.host.engine.grammars.known.get(grammar.digest)
        return known is not None and known.error == "" and grammar.digest not in self.unit.grammars.compiled

    def _compile_first(self, grammar: Grammar, send: Callable[[], None]) -> None:
        """Compile a grammar in another thread, which then calls `send`."""
        assert self.unit.grammars is not None

        def compiled(_: str) -> None:
            with suppress(EngineStopped):  # the worker submits the request again to the next generation
                send()

        self.unit.grammars(CompileGrammar(grammar), compiled)

    def _hand_over(self, kept: KeptTicket, key: tuple[int, int], ticket: _OpenTicket, sinks: Sequence[Sink]) -> None:
        """Give a request to the worker and ticket `key`, from its first token on."""
        if kept.owner != key:
            self._open.pop(kept.owner, None)
        kept.owner, ticket.first_id = key, kept.first_id

        def attach(_: object) -> None:  # in the host's thread, which owns the outbox
            for one, sink in zip(kept.sinks, sinks, strict=True):
                one.attach(sink)

        with suppress(EngineStopped):  # the worker submits it again to the next generation
            self.host.ask(GetState(), attach)

    def settled(self, message: Settled) -> None:
        """Record that a worker has submitted all of its open requests again."""
        if message.generation == self.generation:
            self._claims.workers.discard(message.worker)

    def cancel(self, message: Cancel) -> None:
        """Cancel a request after its client left."""
        self._cancel(message.worker, message.ticket)

    def cancel_label(self, message: CancelLabel) -> None:
        """Cancel the requests with this label."""
        for (worker, number), ticket in list(self._open.items()):
            if ticket.label == message.label and ticket.tenant == message.tenant:
                self._cancel(worker, number)

    def ask(self, message: Ask) -> None:
        """Pass a control request to the host; its answer is sent later."""
        self.host.ask(message.control, partial(self._answer, message.worker, message.ticket))

    def trace(self, message: ProfileRequest) -> None:
        """Begin or end a profile, in a thread of its own, since this waits for the engine."""
        threading.Thread(target=self._answer_aside, args=(message, self._traced), daemon=True).start()

    def read_weights(self, message: ReadWeights) -> None:
        """Read values of a tensor, in a thread of its own, since this waits while weights are loaded."""
        threading.Thread(target=self._answer_aside, args=(message, self._weights_read), daemon=True).start()

    def call_function(self, message: CallFunction) -> None:
        """Call a function of an installed package, in a thread of its own."""
        threading.Thread(target=self._answer_aside, args=(message, self._called), daemon=True).start()

    def group(self, message: JoinGroup | LeaveGroup) -> None:
        """Join or leave a trainer's group, in a thread of its own, since this waits for the other members."""
        threading.Thread(target=self._answer_aside, args=(message, self._grouped), daemon=True).start()

    def lora(self, message: LoadLora | UnloadLora) -> None:
        """Load or unload an adapter, in a thread of its own: this reads files, or waits for requests that use it."""
        threading.Thread(target=self._answer_aside, args=(message, self._adapted), daemon=True).start()

    def worker_gone(self, message: WorkerGone) -> None:
        """Cancel the requests of a worker that ended, except those of kept answers."""
        self.outbox.workers.discard(message.worker)
        self._claims.workers.discard(message.worker)
        for key in self._kept.detach(message.worker):
            self._open.pop(key, None)
        self.cancel_all_of(message.worker)

    def stop(self, message: StopEngine) -> None:
        """End the main loop."""
        self.stopping = True

    # ------------------------------------------------------------------------------------------------------------------

    def cancel_all_of(self, worker: int) -> None:
        """Cancel all open requests of a worker. May be called in the host's thread."""
        for owner, ticket in list(self._open):
            if owner == worker:
                self._cancel(worker, ticket)

    def _cancel(self, worker: int, ticket: int) -> None:
        opened = self._open.get((worker, ticket))
        if opened is not None:
            opened.cancelled = True  # before the look at its id, which another thread may set
        if opened is not None and opened.first_id >= 0:
            for sample in range(opened.samples):
                self.host.cancel(opened.first_id + sample)

    def _answer_aside(self, message: Questions, answer_to: Callable[[Any], Answered]) -> None:
        """Answer a message beside the scheduler. Runs in a thread of its own."""
        try:
            answer = answer_to(message)
        except LockstepError as error:
            answer = Answered(message.worker, message.ticket, False, str(error).partition("\nhint: ")[0])
        with suppress(EngineStopped):  # the workers receive EngineGone or EngineRestarting
            # sends the answer in the host's thread, which owns the outbox
            self.host.ask(GetState(), lambda _: self.outbox.answer(answer))

    def _traced(self, message: ProfileRequest) -> Answered:
        if self.unit.trace is None:
            raise ConfigError("this engine has no device to profile")
        return Answered(message.worker, message.ticket, True, self.unit.trace(message.options))

    def _weights_read(self, message: ReadWeights) -> Answered:
        if self.unit.read_weights is None:
            raise ConfigError("this engine has no weights")
        weights = self.unit.read_weights(message.name, message.rows)
        return Answered(message.worker, message.ticket, True, weights=weights)

    def _called(self, message: CallFunction) -> Answered:
        result = rpc.call(self._functions, message.name, message.arguments, self.unit)
        return Answered(message.worker, message.ticket, True, result)

    def _grouped(self, message: JoinGroup | LeaveGroup) -> Answered:
        if self.unit.group is None:
            raise ConfigError("this engine has no weights")
        self.unit.group(message)
        done = "joined" if isinstance(message, JoinGroup) else "left"
        return Answered(message.worker, message.ticket, True, f"{done} the group {message.name}")

    def _adapted(self, message: LoadLora | UnloadLora) -> Answered:
        registry = self.unit.adapters
        if registry is None:
            raise ConfigError("LoRA is off; start with --lora NAME=PATH, or --set max_loras=N for N on the device")
        if isinstance(message, UnloadLora):
            registry.unload(message.name)
            return Answered(message.worker, message.ticket, True, f"adapter {message.name} is unloaded")
        version = registry.load(message.name, message.path, pinned=message.pinned)
        return Answered(message.worker, message.ticket, True, f"adapter {message.name} is loaded, version {version}")

    def _answer(self, worker: int, ticket: int, future: Future[ControlAnswered]) -> None:
        """Send an answer. Called in the host's thread, which owns the sockets of the outbox."""
        if future.exception() is not None:
            self.outbox.answer(Answered(worker, ticket, False, str(future.exception())))
        else:
            result = future.result()
            self.outbox.answer(Answered(worker, ticket, result.ok, result.message, result.stats))


HANDLERS: dict[type[EngineMessage], Callable[[EngineProcess, Any], None]] = {
    Hello: EngineProcess.greet,
    Submit: EngineProcess.submit,
    Settled: EngineProcess.settled,
    Cancel: EngineProcess.cancel,
    CancelLabel: EngineProcess.cancel_label,
    Ask: EngineProcess.ask,
    ProfileRequest: EngineProcess.trace,
    ReadWeights: EngineProcess.read_weights,
    CallFunction: EngineProcess.call_function,
    JoinGroup: EngineProcess.group,
    LeaveGroup: EngineProcess.group,
    LoadLora: EngineProcess.lora,
    UnloadLora: EngineProcess.lora,
    WorkerGone: EngineProcess.worker_gone,
    StopEngine: EngineProcess.stop,
}


def main(folder: Path, generation: int, before: PriorState, alive: Callable[[], object], number: int = 0) -> int:
    """Build the engine from the settings of a folder and serve it. Returns the exit status.

    Args:
        number: number of the engine among several.
    """
    several = children.read_settings(folder).engines > 1
    name, suffix = (f"engine {number}", f".{generation}") if several else ("engine", f" {generation}")
    settings = children.begin(folder, name + suffix * (generation > 0))
    # SIGTERM may be sent to all processes of a service. It is ignored here, since the engine ends after the workers, on
    # StopEngine. The handler is not SIG_IGN, which ranks would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        functions = rpc.load(settings.rpc_functions)
        unit = build_engine(settings, Place(folder, before.death, number))
        faults.install(unit.host, generation)
        # for a model the table was logged when the memory was divided
        memory = "" if unit.info.kind == "model" else f"\n{unit.memory}"
        log.info("%s on %s, ready%s", unit.info.model, unit.info.device, memory)
        awaited = awaited_workers(children.read_settings(folder), folder, generation)
        EngineProcess(*(unit, folder, generation, before, alive, number if several else None, awaited, functions)).run()
    except LockstepError as error:
        log.error("%s: %s", type(error).__name__, error)
        for_good = isinstance(error, ConfigError | JournalError | Divergence | WireError)
        # an error of the file system may be temporary, such as a full disk
        full = isinstance(error, JournalError) and isinstance(error.__cause__, OSError)
        if full:
            return children.EXIT_UNWRITABLE
        if killed_from_outside(error) or killed_from_outside(error.__cause__):
            return children.EXIT_RANK_KILLED
        return children.EXIT_FOR_GOOD if for_good else 1
    return 0
