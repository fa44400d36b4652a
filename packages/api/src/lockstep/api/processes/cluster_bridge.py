"""A worker's side of several engines: a `Bridge` to each, and the router, which assigns requests to engines.

    handler ──submit──> a Ticket without engine ──Offer──> router ──Routed──> Bridge of that engine, which sends it

Handlers use `ClusterBridge` like one `Bridge`. Its figures are sums over all engines. Control requests are sent through
the bridges in `engines`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import zmq

from lockstep.api.processes.bridge import Bridge, EngineUnavailable, Ticket, make_ticket
from lockstep.api.processes.sockets import engine_folder, read_all, reader, router_address, worker_address, writer
from lockstep.api.processes.wire import (
    Drained,
    EngineInfo,
    InputBlocked,
    InputReleased,
    Offer,
    OfferClosed,
    Routed,
    SessionOver,
    ToRouter,
    Withdraw,
    encode,
    read_routed,
)
from lockstep.core.cluster.dispatch import DispatchConfig
from lockstep.core.cluster.router import RouterConfig, prefix_keys
from lockstep.core.contract.events import RequestArrived
from lockstep.core.requests.table import prompt_bytes
from lockstep.host.media.content import EncoderInput
from lockstep.host.router_journal import label_key, session_key

REFUSALS = {
    "queue_full": "the waiting queue of the router is full",
    "draining": "the engine of `data_parallel_rank` has ended",
}
"""Why the router refuses a request, by the reason that it gives."""


class ClusterBridge:
    """One worker's connection to all engines. Made and used in the worker's event loop.

    Args:
        folder: folder of the server's sockets.
        tenants_apart: whether tenants share no prefixes.
        admission: settings of the waiting queue of the router; None: requests do not wait there.
        hands_over: whether there are prefill and decode engines.
    """

    def __init__(
        self,
        folder: Path,
        worker: int,
        engines: int,
        router: RouterConfig,
        *,
        tenants_apart: bool = False,
        admission: DispatchConfig | None = None,
        hands_over: bool = False,
    ) -> None:
        self.worker = worker
        self.welcome: Callable[[EngineInfo], object] | None = None  # called when all engines can take requests
        folders = [engine_folder(folder, engine, engines) for engine in range(engines)]
        self.engines = tuple(Bridge(one, worker, engine) for engine, one in enumerate(folders))
        for one in self.engines:
            one.on_change, one.over = self._engine_changed, self._over
        self._router, self._tenants_apart, self._admission = router, tenants_apart, admission
        self._hands_over = hands_over
        self._unrouted: dict[int, Ticket] = {}  # by number of their offer
        self._numbers: dict[Ticket, int] = {}  # number of the offer of every open ticket
        # by number of the offer: timer that ends the ticket at its deadline
        self._late: dict[int, asyncio.TimerHandle] = {}
        self._unanswered: dict[int, asyncio.Future[Routed]] = {}  # offers of sessions, by number
        self._next_number = 0
        self._combined: list[EngineInfo] = []  # properties of the engines in `left`
        self._info: EngineInfo | None = None  # value of `info`, derived from `_combined`
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox = reader(self._context, worker_address(folder, worker))
        self._to_router = writer(self._context, router_address(folder))

    async def run(self) -> None:
        """Read messages until cancelled. Raises WireError."""
        readers = [asyncio.ensure_future(one.run()) for one in self.engines]
        routes = read_all(self._mailbox, lambda frame: self._routed(read_routed(frame, self.worker)))
        readers.append(asyncio.ensure_future(routes))
        try:
            await asyncio.gather(*readers)
        finally:
            for one in readers:
                one.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def close(self) -> None:
        """Close the sockets."""
        for one in self.engines:
            one.close()
        self._mailbox.close()
        self._to_router.close()

    # ------------------------------------------------------------------------------------------------------------ state

    @property
    def left(self) -> list[Bridge]:
        """Engines that have not ended for good."""
        return [one for one in self.engines if not one.gone]

    @property
    def gone(self) -> str:
        """Why the last engine ended for good; empty while an engine is left."""
        return "" if self.left else self.engines[-1].gone

    @property
    def info(self) -> EngineInfo | None:
        """Properties common to all engines; None until one has started, and each other has started or is restarting."""
        known = [one.info for one in self.left if one.info is not None]
        if not known or any(one.info is None and not one.away for one in self.left):
            return None
        if known == self._combined:
            return self._info
        self._combined, devices = known, list(dict.fromkeys(one.device for one in known))
        self._info = msgspec.structs.replace(
            known[0],
            request_tokens_max=min(one.request_tokens_max for one in known),
            prompt_tokens_max=min(one.prompt_tokens_max for one in known),
            device=f"{len(self.engines)} engines on {', '.join(devices)}",
        )
        return self._info

    @property
    def adapters(self) -> dict[str, str]:
        """Adapters that all engines have, with the path of each."""
        first, *others = [one.adapters for one in self.left] or [{}]
        return {name: path for name, path in first.items() if all(name in one for one in others)}

    @property
    def tickets(self) -> bool:
        """Whether any request is open."""
        return bool(self._unrouted) or any(one.tickets for one in self.engines)

    @property
    def open_answers(self) -> int:
        return self._sum(lambda one: one.open_answers, lambda ticket: len(ticket.replies))

    @property
    def waiting_answers(self) -> int:
        return self._sum(lambda one: one.waiting_answers, lambda ticket: len(ticket.replies))

    @property
    def waiting_tokens(self) -> int:
        return self._sum(lambda one: one.waiting_tokens, lambda ticket: ticket.waiting_tokens)

    @property
    def media_bytes(self) -> int:
        """Bytes of the media of open requests."""
        return self._sum(lambda one: one.media_bytes, lambda ticket: ticket.media_bytes)

    def _sum(self, of_engine: Callable[[Bridge], int], of_ticket: Callable[[Ticket], int]) -> int:
        return sum(map(of_engine, self.engines)) + sum(map(of_ticket, self._unrouted.values()))

    def stalled(self, after_s: float) -> bool:
        """Return whether an engine has open requests and has sent nothing for `after_s` seconds."""
        return any(one.stalled(after_s) for one in self.left)

    # ------------------------------------------------------------------------------------------------- control requests

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
        """Offer a request to the router; see `Bridge.submit`. The ticket has no engine until the router has answered.

        Args:
            session: key that keeps requests on one engine, if they are not turns of a session.
            kept: not used: the request of a kept answer starts anew after the end of its worker.
            engine: number of the engine that runs the request; None: the router chooses it.
        """
        if self.gone:
            raise EngineUnavailable(self.gone)
        if self.info is None:
            raise EngineUnavailable("the engine is starting")
        ticket = make_ticket(self.worker, request, changed, start_by_s, finish_by_s, contents)
        ticket.session, ticket.stays, ticket.named = request.session or session, kept is not None, engine
        self._offer(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request after its client left, and end its replies."""
        number = self._numbers.get(ticket)
        if number is None:
            return
        if self._taken(number) is not None:
            ticket.cancelled()
            self._over(ticket)
        else:
            self.engines[ticket.engine].cancel(ticket)

    def end_all(self, message: str) -> None:
        """End all open requests with this error message, except those whose answers are kept for the next server."""
        for ticket in list(self._numbers):
            if not ticket.stays:
                ticket.failed(message)
                self.cancel(ticket)

    def cancel_label(self, label: str, tenant: str) -> None:
        """Cancel all requests of a tenant with this label, at the router and on every engine.

        Raises: EngineUnavailable if an engine is unavailable, after all other engines have received the message.
        """
        for ticket in list(self._unrouted.values()):
            request = ticket.submit.request
            if (request.label, request.tenant) == (label, tenant):
                self.cancel(ticket)
        if self._admission is not None and label:
            self._send(Withdraw(label_key(label, tenant)))
        missed = ""
        for one in self.left:
            try:
                one.cancel_label(label, tenant)
            except EngineUnavailable as error:
                missed = f"engine {one.number}: {error}"
        if missed or self.gone:
            raise EngineUnavailable(missed or self.gone)

    async def engine_to_open(self, session: str, parent: str = "") -> tuple[Bridge, Callable[[], object]]:
        """Return the engine that opens a session, and a callback for a failure to open. Raises EngineUnavailable."""
        key, parent_key = session_key(session), session_key(parent) if parent else ""
        routed = await self._offer_session(lambda number: Offer(self.worker, number, 0, (), key, "open", parent_key))
        refused = partial(self._send, SessionOver(key)) if routed.fresh else lambda: None
        return self.engines[routed.engine], refused

    async def engine_to_close(self, session: str) -> tuple[Bridge, Callable[[], object]]:
        """Return the engine of a session, and a callback for its closing. Raises EngineUnavailable."""
        key = session_key(session)
        routed = await self._offer_session(lambda number: Offer(self.worker, number, 0, (), key, "close"))
        return self.engines[routed.engine], partial(self._send, SessionOver(key))

    def hold_settled(self) -> None:
        """Do nothing: requests of earlier workers start anew."""

    def settle(self) -> None:
        """Do nothing; see `hold_settled`."""

    def drained(self, engine: Bridge, *, draining: bool) -> None:
        """Report to the router that an engine is to receive no new requests, or requests again."""
        self._send(Drained(engine.number, draining))

    @contextmanager
    def input_blocked(self) -> Iterator[None]:
        """Let the router assign no request, from any worker, while the body of the `with` statement runs."""
        number = self._number()
        self._send(InputBlocked(self.worker, number))
        try:
            yield
        finally:
            with suppress(EngineUnavailable):  # a router that no longer reads has ended
                self._send(InputReleased(self.worker, number))

    async def _offer_session(self, offer: Callable[[int], Offer]) -> Routed:
        if self.gone:
            raise EngineUnavailable(self.gone)
        if self.info is None:
            raise EngineUnavailable("the engine is starting")
        number = self._number()
        future: asyncio.Future[Routed] = asyncio.get_running_loop().create_future()
        self._unanswered[number] = future
        self._send(offer(number))
        try:
            return await future
        finally:
            del self._unanswered[number]

    # ------------------------------------------------------------------------------------------------------ the router

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _offer(self, ticket: Ticket) -> None:
        number = self._number()
        request = ticket.submit.request
        prefix: tuple[int, ...] = ()
        if self._router.policy == "prefix_affinity":
            ids = np.frombuffer(prompt_bytes(request.prompt), np.int32)
            space = f"{request.tenant if self._tenants_apart else ''}\0{request.namespace}"
            if request.adapter:
                space += f"\0{request.adapter}"
            prefix = prefix_keys(ids, self._router.block_tokens, space)
        key = session_key(ticket.session) if ticket.session else ""
        offer = Offer(self.worker, number, ticket.waiting_tokens, prefix, key, named=ticket.named)
        if self._hands_over:
            output, samples = request.max_new_tokens > 0, len(ticket.replies)
            offer = msgspec.structs.replace(offer, output=output, samples=samples)
        if self._admission is not None:
            label = label_key(request.label, request.tenant)
            offer = msgspec.structs.replace(offer, tenant=request.tenant, label=label, priority=request.priority)
        self._send(offer)
        self._unrouted[number] = ticket
        self._numbers[ticket] = number
        due = [ns / 1e9 for ns in (ticket.submit.start_by_ns, ticket.submit.finish_by_ns) if ns is not None]
        if due:
            loop = asyncio.get_running_loop()
            self._late[number] = loop.call_later(max(0.0, min(due) - time.monotonic()), self._end_late, number)

    def _taken(self, number: int) -> Ticket | None:
        """Remove and return a ticket that waits for the router; None if there is no such ticket."""
        late = self._late.pop(number, None)
        if late is not None:
            late.cancel()
        return self._unrouted.pop(number, None)

    def _end_late(self, number: int) -> None:
        """End a request at its deadline, while it waits for the router."""
        ticket = self._taken(number)
        if ticket is not None:
            start_by_ns = ticket.submit.start_by_ns
            began = start_by_ns is None or time.monotonic() < start_by_ns / 1e9
            ticket.refused("timeout" if began else "deadline", "" if began else "not begun in time", rejected=not began)
            self._over(ticket)

    def _routed(self, message: Routed) -> None:
        """Pass a ticket to the engine that the router assigned, or end it as the router refused it."""
        requested = self._unanswered.get(message.number)
        if requested is not None:
            if not requested.done():
                requested.set_result(message)
            return
        ticket = self._taken(message.number)
        if ticket is None:  # its client left meanwhile; the router was sent OfferClosed
            return
        if message.engine < 0:
            del self._numbers[ticket]
            if message.refused == "cancelled":
                ticket.cancelled()
            else:
                ticket.refused(message.refused, REFUSALS[message.refused], rejected=True)
            return
        one = self.engines[message.engine]
        if one.gone:  # the router sent Routed before it received EngineLost
            self._send(OfferClosed(self.worker, self._numbers.pop(ticket), 0))
            if self.left:
                self._offer(ticket)
            else:
                ticket.failed(one.gone)
            return
        if message.room >= 0:
            request = msgspec.structs.replace(ticket.submit.request, transfer_room=message.room)
            ticket.submit = msgspec.structs.replace(ticket.submit, request=request, prefill=message.prefill)
        try:
            one.take_on(ticket)
        except EngineUnavailable as error:
            ticket.failed(str(error))
            self._over(ticket)

    def _over(self, ticket: Ticket) -> None:
        """Report to the router that a request has ended."""
        number = self._numbers.pop(ticket, None)
        if number is not None:
            with suppress(EngineUnavailable):  # the router no longer reads, and needs no counts
                self._send(OfferClosed(self.worker, number, sum(len(reply.tokens) for reply in ticket.replies)))

    def _engine_changed(self) -> None:
        """Call `welcome` once, when `info` is complete. Called whenever an engine starts or ends."""
        whole = self.info
        if whole is not None and self.welcome is not None:
            welcome, self.welcome = self.welcome, None
            welcome(whole)

    def _send(self, message: ToRouter) -> None:
        try:
            self._to_router.send(encode(message), zmq.Flag.DONTWAIT)
        except zmq.Again:
            raise EngineUnavailable("the router does not read its messages") from None


Engines = Bridge | ClusterBridge
"""The engines of a worker: one, or several behind a router."""
