"""A worker's side of one engine: requests go out, and answers are dispatched to their tickets.

    handler ──submit──> a Ticket, with a Reply for each sample
    mailbox ──────────> one task fills the replies and sets `changed`; only a handler ever waits for a client

A reply keeps its tokens until its handler takes them. The handler of a slow client takes more tokens at a time; the
number of tokens that wait is bounded by the length of the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import zmq

from lockstep.api.processes.sockets import engine_address, read_all, reader, worker_address, writer
from lockstep.api.processes.wire import (
    OVER,
    PROTOCOL,
    AdaptersKnown,
    Answered,
    Ask,
    CallFunction,
    Cancel,
    CancelLabel,
    EngineGone,
    EngineInfo,
    EngineRestarting,
    Gauges,
    Hello,
    JoinGroup,
    LeaveGroup,
    LoadLora,
    ProfileRequest,
    ReadWeights,
    SampleEnded,
    Settled,
    StepAnswers,
    Submit,
    ToEngine,
    UnloadLora,
    Welcome,
    WireError,
    WorkerMessage,
    encode,
    read_by_worker,
)
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import Control, RequestArrived
from lockstep.core.requests.table import prompt_length
from lockstep.host.adapters import KnownAdapters
from lockstep.host.media.content import EncoderInput

log = logging.getLogger("lockstep.worker")


ARRIVALS_MAX = 256
"""Times of messages with tokens that a reply keeps while its client does not read: 130 bytes each."""


class EngineUnavailable(LockstepError):
    """Raised when no engine can take requests: it has not started, has ended, or is overloaded."""


class Reply:
    """The answer to one sample, as far as it was received.

    Args:
        changed: set whenever the reply changes; several replies may share it.
    """

    def __init__(self, changed: asyncio.Event) -> None:
        self.tokens: list[int] = []  # all received so far
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []  # the likeliest tokens at each position
        self.ended: SampleEnded | None = None
        self.differs = False  # whether repeated tokens differ from tokens already sent to the client
        self.arrivals: list[tuple[float, int]] = []  # (time.monotonic, tokens received so far); emptied by the metrics
        self.measure: Callable[[], object] | None = None  # empties `arrivals` where no handler takes the tokens
        self._changed = changed

    def put(self, offset: int, tokens: list[int], now_s: float) -> int:
        """Append tokens from output number `offset` on. Returns how many of them were received before."""
        repeats = len(self.tokens) - offset
        if repeats < 0:
            raise WireError(f"tokens from number {offset} on, but only {len(self.tokens)} were received before")
        if repeats and self.tokens[offset : offset + len(tokens)] != tokens[:repeats]:
            self.differs = True  # happens only where numerics depend on the batch
        self.tokens += tokens[repeats:]
        self.arrivals.append((now_s, len(self.tokens)))
        if len(self.arrivals) > ARRIVALS_MAX and self.measure is not None:
            self.measure()
        self._changed.set()
        return repeats

    def end(self, ended: SampleEnded) -> None:
        """Record the end of the sample."""
        self.ended = ended
        self._changed.set()


class Ticket:
    """A request that was sent, or waits to be sent, to an engine.

    Args:
        number: identifies the request to its engine; -1: it has no engine yet.
        submit: the message to the engine, with the number of output tokens already received.
        waiting_tokens: tokens of its prompt until the engine sends tokens or the end of it, then 0.
    """

    def __init__(self, number: int, submit: Submit, replies: list[Reply], waiting_tokens: int = 0) -> None:
        self.number, self.replies, self.waiting_tokens, self.submit = number, replies, waiting_tokens, submit
        self.sent = False  # whether it was sent to an engine, also to one that has ended
        self.engine = -1  # number of its engine
        self.session = ""  # key that keeps requests on one engine
        self.named: int | None = None  # engine that the client requests
        self.kept: str | None = None  # "" for a kept answer; or the name of its request at the engine, to take over
        self.stays = False  # whether it does not end with the server, since its answer is kept
        self.media_bytes = sum(content.size for content in submit.contents)
        self._placed: list[Callable[[], object]] = []

    @property
    def open(self) -> bool:
        """Whether an answer may still come."""
        return any(reply.ended is None for reply in self.replies)

    def when_placed(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the request has an engine."""
        if self.engine >= 0:
            callback()
        else:
            self._placed.append(callback)

    def placed(self, engine: int) -> None:
        """Record the engine that has the request."""
        self.engine = engine
        callback, self._placed = self._placed, []
        for one in callback:
            one()

    def cancelled(self) -> None:
        """End the replies, since the client left."""
        for sample, reply in enumerate(self.replies):
            if reply.ended is None:
                reply.end(SampleEnded(self.number, sample, "cancelled", output_tokens=len(reply.tokens)))

    def failed(self, message: str) -> None:
        """End the replies, since no engine will answer."""
        self.refused("engine", message)

    def refused(self, reason: str, message: str, *, rejected: bool = False) -> None:
        """End the replies with an error. `reason` is as in `SampleEnded`."""
        for sample, reply in enumerate(self.replies):
            if reply.ended is None:
                reply.end(SampleEnded(self.number, sample, reason, error=message, rejected=rejected))


def make_ticket(
    worker: int,
    request: RequestArrived,
    changed: asyncio.Event,
    start_by_s: float | None = None,
    finish_by_s: float | None = None,
    contents: tuple[EncoderInput, ...] = (),
) -> Ticket:
    """Return a ticket without an engine; `changed` is set whenever one of its replies changes."""
    submit = Submit(worker, -1, request, _ns(start_by_s), _ns(finish_by_s), contents=contents)
    replies = [Reply(changed) for _ in range(request.parallel_samples)]
    return Ticket(-1, submit, replies, prompt_length(request.prompt))


class Bridge:
    """One worker's connection to one engine. Made and used in the worker's event loop.

    Args:
        folder: folder of the engine's sockets.
        number: number of the engine among several.
    """

    def __init__(self, folder: Path, worker: int, number: int = 0) -> None:
        self.worker, self.number = worker, number
        self.info: EngineInfo | None = None  # None until the engine has sent Welcome
        self.gauges: Gauges | None = None  # received last
        self.known = KnownAdapters()  # adapters
        self._named: tuple[KnownAdapters, dict[str, str]] = (self.known, {})  # the same by name
        self.gone = ""  # why the engine ended for good; empty: it did not
        self.restarting = False  # new requests are accepted, and wait for the next generation
        self.blocked = ""  # why the next engine cannot start yet, and new requests are refused
        self.away = False  # the engine is starting, for the first time or again
        self.generation = -1  # of the engine that sent Welcome
        self._held = False  # whether Settled waits for `settle`
        self._origin = f"{folder.name}/{worker}"
        self.tickets: dict[int, Ticket] = {}  # open ones, by number
        self.open_answers = 0  # samples of the open tickets
        self.waiting_answers = 0  # samples without any answer yet
        self.waiting_tokens = 0  # prompt tokens of these
        self.last_message_s = time.monotonic()  # when the engine last sent a message or had no open request
        self.welcome: Callable[[EngineInfo], object] | None = None  # called when the engine can take requests
        self.on_change: Callable[[], object] | None = None  # called whenever the engine appears or ends
        self.over: Callable[[Ticket], object] | None = None  # called when a ticket has ended
        self._unanswered: dict[int, asyncio.Future[Answered]] = {}
        self._next_ticket = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox = reader(self._context, worker_address(folder, worker))
        self._address = engine_address(folder)
        self._engine = writer(self._context, self._address)

    @property
    def media_bytes(self) -> int:
        """Bytes of the media of open requests."""
        return sum(ticket.media_bytes for ticket in self.tickets.values())

    @property
    def engines(self) -> tuple[Bridge, ...]:
        """This bridge: the only engine. See `ClusterBridge.engines`."""
        return (self,)

    async def engine_to_open(self, session: str, parent: str = "") -> tuple[Bridge, Callable[[], object]]:
        """Return the engine that opens a session, and a callback for the case that opening fails."""
        return self, lambda: None

    async def engine_to_close(self, session: str) -> tuple[Bridge, Callable[[], object]]:
        """Return the engine of a session, and a callback for the time when the session is closed."""
        return self, lambda: None

    def drained(self, engine: Bridge, *, draining: bool) -> None:
        """Do nothing: a single engine has no router."""

    def input_blocked(self) -> AbstractContextManager[None]:
        """Do nothing: a single engine launches no batch while its weights are changed."""
        return nullcontext()

    async def run(self) -> None:
        """Read messages until cancelled. Raises WireError."""
        self._send(Hello(self.worker, PROTOCOL))
        await read_all(self._mailbox, self._handle)

    def _handle(self, frame: bytes) -> None:
        message = read_by_worker(frame, self.worker)
        self.last_message_s = time.monotonic()
        HANDLERS[type(message)](self, message)

    def close(self) -> None:
        """Close the sockets."""
        self._mailbox.close()
        self._engine.close()

    # --------------------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        request: RequestArrived,
        changed: asyncio.Event,
        start_by_s: float | None = None,
        finish_by_s: float | None = None,
        session: str = "",
        kept: str | None = None,
        contents: tuple[EncoderInput, ...] = (),
        engine: int | None = None,
    ) -> Ticket:
        """Send a request; `changed` is set whenever one of its replies changes.

        Args:
            kept: "": the answer is kept, so another worker may take the request over; the name of a request: it is
                taken over, or starts anew if the engine does not have it; None: neither.
            start_by_s, finish_by_s: time.monotonic by which the request must run, or must have ended; else it is
                cancelled.
            session, engine: not used with one engine.
            contents: of the request's spans.
        Raises: EngineUnavailable.
        """
        self._needs_engine()
        ticket = make_ticket(self.worker, request, changed, start_by_s, finish_by_s, contents)
        ticket.kept, ticket.stays = kept, kept is not None
        self.take_on(ticket)
        return ticket

    def take_on(self, ticket: Ticket) -> None:
        """Send a ticket that has no engine, or keep it for the next engine generation."""
        if not self.tickets:
            self.last_message_s = time.monotonic()
        number = self._next_ticket
        self._next_ticket += 1
        origin = ticket.kept or f"{self._origin}/{number}"
        request = msgspec.structs.replace(ticket.submit.request, origin=origin)
        ticket.number = number
        ticket.sent = ticket.sent or bool(ticket.kept)
        ticket.submit = msgspec.structs.replace(
            ticket.submit, ticket=number, request=request, kept=ticket.kept is not None
        )
        if self.info is not None and not self.restarting:
            self._submit(ticket)
        self.waiting_answers += len(ticket.replies)
        self.waiting_tokens += ticket.waiting_tokens
        self.tickets[number] = ticket
        self.open_answers += len(ticket.replies)
        ticket.placed(self.number)

    def cancel_label(self, label: str, tenant: str) -> None:
        """Cancel all requests of a tenant with this label, of all workers. Raises EngineUnavailable."""
        self._needs_engine(now=True)
        self._send(CancelLabel(self.worker, label, tenant))

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request after its client left, and end its replies."""
        if ticket.number not in self.tickets:
            return
        ticket.cancelled()
        self._forget(ticket)
        if not self.gone and not self.restarting:  # otherwise it is cancelled, since it is not submitted again
            self._send(Cancel(self.worker, ticket.number))

    def end_all(self, message: str) -> None:
        """End all open requests with this error message, except those whose answers are kept for the next server."""
        for ticket in list(self.tickets.values()):
            if not ticket.stays:
                ticket.failed(message)
                self.cancel(ticket)

    async def ask(self, control: Control) -> Answered:
        """Send a control request and wait for its answer. Raises EngineUnavailable."""
        return await self._answer(lambda number: Ask(self.worker, number, control))

    async def trace(self, options: dict[str, Any] | None) -> Answered:
        """Begin a profile of the device, or end it. Raises EngineUnavailable."""
        return await self._answer(lambda number: ProfileRequest(self.worker, number, options))

    async def read_weights(self, name: str, rows: int) -> Answered:
        """Read the first rows of a tensor. Raises EngineUnavailable."""
        return await self._answer(lambda number: ReadWeights(self.worker, number, name, rows))

    async def call_function(self, name: str, arguments: bytes) -> Answered:
        """Call a function that the operator enabled; `arguments` as in CallFunction. Raises EngineUnavailable."""
        return await self._answer(lambda number: CallFunction(self.worker, number, name, arguments))

    async def join_group(
        self, name: str, address: str, port: int, rank: int, ranks: int, backend: Literal["gloo", "nccl"] = "gloo"
    ) -> Answered:
        """Join the group of a trainer that will send weights. Raises EngineUnavailable."""
        place = (name, address, port, rank, ranks, backend)
        return await self._answer(lambda number: JoinGroup(self.worker, number, *place))

    async def leave_group(self, name: str) -> Answered:
        """Leave the group of a trainer. Raises EngineUnavailable."""
        return await self._answer(lambda number: LeaveGroup(self.worker, number, name))

    async def load_lora(self, name: str, path: str, *, pinned: bool) -> Answered:
        """Load an adapter. Raises EngineUnavailable."""
        return await self._answer(lambda number: LoadLora(self.worker, number, name, path, pinned))

    async def unload_lora(self, name: str) -> Answered:
        """Unload an adapter. Raises EngineUnavailable."""
        return await self._answer(lambda number: UnloadLora(self.worker, number, name))

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters that requests may name, with the path of each."""
        if self._named[0] is not self.known:
            self._named = (self.known, {one.name: one.path for one in self.known.entries})
        return self._named[1]

    @property
    def weights_version(self) -> int:
        """Version of the engine's weights, as last reported."""
        if self.gauges is not None:
            return self.gauges.weights_version
        return 0 if self.info is None else self.info.weights_version

    async def _answer(self, question: Callable[[int], ToEngine]) -> Answered:
        self._needs_engine(now=True)
        number = self._next_ticket
        self._next_ticket += 1
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._unanswered[number] = future
        self._send(question(number))
        return await future

    def stalled(self, after_s: float) -> bool:
        """Return whether requests are open and the engine has sent nothing for `after_s` seconds."""
        return bool(self.tickets) and time.monotonic() - self.last_message_s > after_s

    def _began(self, ticket: Ticket) -> None:
        if ticket.waiting_tokens:
            self.waiting_answers -= len(ticket.replies)
            self.waiting_tokens -= ticket.waiting_tokens
            ticket.waiting_tokens = 0

    def _forget(self, ticket: Ticket) -> None:
        self._began(ticket)
        del self.tickets[ticket.number]
        self.open_answers -= len(ticket.replies)
        if self.over is not None:
            self.over(ticket)

    def _needs_engine(self, *, now: bool = False) -> None:
        if self.gone:
            raise EngineUnavailable(self.gone)
        if self.info is None:
            raise EngineUnavailable("the engine is starting")
        if self.blocked:
            raise EngineUnavailable(self.blocked)
        if now and self.restarting:
            raise EngineUnavailable("the engine is starting again")

    def _submit(self, ticket: Ticket) -> None:
        have = tuple(len(reply.tokens) if reply.ended is None else OVER for reply in ticket.replies)
        self._send(msgspec.structs.replace(ticket.submit, generation=self.generation, again=ticket.sent, have=have))
        ticket.sent = True

    def _send(self, message: ToEngine) -> None:
        try:
            self._engine.send(encode(message), zmq.Flag.DONTWAIT)
        except zmq.Again:
            raise EngineUnavailable("the engine does not read its messages") from None

    # ---------------------------------------------------------------------------------------- one handler per message

    def welcomed(self, message: Welcome) -> None:
        """Store the properties of the engine, and submit open requests again."""
        if message.protocol != PROTOCOL:
            raise WireError(f"the engine uses protocol {message.protocol}, worker {self.worker} {PROTOCOL}")
        if message.generation <= self.generation:  # an answer to a second Hello
            return
        first = self.info is None
        self.known = max(self.known, message.adapters, key=attrgetter("revision"))
        self.info, self.generation, self.restarting, self.away = message.info, message.generation, False, False
        self.blocked = ""
        if self.gauges is None:  # otherwise newer gauges were received first
            self.gauges = message.gauges
        for ticket in self.tickets.values():
            self._submit(ticket)
        if not self._held:
            self._send(Settled(self.worker, self.generation))
        if first and self.welcome is not None:
            self.welcome(message.info)
        self._report_state()
        log.info("ready: %s on %s", message.info.model, message.info.device)

    def engine_restarting(self, message: EngineRestarting) -> None:
        """Prepare for the next engine generation. It will not receive messages sent so far."""
        if self.gone or message.generation <= self.generation:
            return
        self.restarting, self.away, self.blocked = self.info is not None, True, message.blocked
        self.gauges = None
        self.known = KnownAdapters(-1, self.known.entries)  # the next generation counts its revisions anew
        self._engine.close(0)
        self._engine = writer(self._context, self._address)
        self._send(Hello(self.worker, PROTOCOL, message.generation))
        self._fail_questions(message.message)
        self._report_state()

    def take(self, message: StepAnswers) -> None:
        """Pass the results of one engine step to their replies."""
        if message.gauges is not None:
            self.gauges = message.gauges
        if message.tickets:
            self._take_tokens(message)
        for ended in message.ended:
            ticket = self.tickets.get(ended.ticket)
            if ticket is not None:
                reply = ticket.replies[ended.sample]
                if reply.differs:
                    error = "the engine restarted, and its tokens differ from those sent before"
                    ended = msgspec.structs.replace(ended, reason="error", error=error)
                reply.end(ended)
                if not ticket.open:
                    self._forget(ticket)

    def _take_tokens(self, message: StepAnswers) -> None:
        tickets = np.frombuffer(message.tickets, "<i8").tolist()
        samples = np.frombuffer(message.samples, "<i4").tolist()
        offsets = np.frombuffer(message.offsets, "<i4").tolist()
        counts = np.frombuffer(message.counts, "<i4").tolist()
        tokens = np.frombuffer(message.tokens, "<i4").tolist()
        logprobs = {one.entry: one for one in message.logprobs}
        first = 0
        for entry, number in enumerate(tickets):
            count = counts[entry]
            ticket = self.tickets.get(number)
            if ticket is not None:
                self._began(ticket)
                reply = ticket.replies[samples[entry]]
                repeats = reply.put(offsets[entry], tokens[first : first + count], self.last_message_s)
                if entry in logprobs:
                    one = logprobs[entry]
                    reply.logprobs += np.frombuffer(one.logprobs, "<f4").tolist()[repeats:]
                    if one.top_ids:
                        ids = np.frombuffer(one.top_ids, "<i4").reshape(count, -1).tolist()
                        values = np.frombuffer(one.top_logprobs, "<f4").reshape(count, -1).tolist()
                        pairs = zip(ids, values, strict=True)
                        reply.tops += [list(zip(*pair, strict=True)) for pair in pairs][repeats:]
            first += count

    def answered(self, message: Answered) -> None:
        """Pass the answer to a control request to its future."""
        future = self._unanswered.pop(message.ticket, None)
        if future is not None and not future.done():
            future.set_result(message)

    def adapters_known(self, message: AdaptersKnown) -> None:
        """Store a changed set of adapters."""
        self.known = max(self.known, message.adapters, key=attrgetter("revision"))

    def engine_gone(self, message: EngineGone) -> None:
        """End all requests and control requests, since the engine ended for good."""
        if self.gone:
            return
        self.gone = message.message
        log.error("the engine ended for good: %s", message.message)
        for ticket in list(self.tickets.values()):
            ticket.failed(message.message)
            self._forget(ticket)
        self._fail_questions(message.message)
        self._report_state()

    def hold_settled(self) -> None:
        """Report no end of the submitted requests before `settle`, since those of earlier workers follow."""
        self._held = True

    def settle(self) -> None:
        """Report that all open requests were submitted."""
        self._held = False
        if self.info is not None and not self.away:
            self._send(Settled(self.worker, self.generation))

    def _report_state(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _fail_questions(self, message: str) -> None:
        for future in self._unanswered.values():
            if not future.done():
                future.set_exception(EngineUnavailable(message))
        self._unanswered.clear()


HANDLERS: dict[type[WorkerMessage], Callable[[Bridge, Any], None]] = {
    Welcome: Bridge.welcomed,
    StepAnswers: Bridge.take,
    Answered: Bridge.answered,
    AdaptersKnown: Bridge.adapters_known,
    EngineRestarting: Bridge.engine_restarting,
    EngineGone: Bridge.engine_gone,
}


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
