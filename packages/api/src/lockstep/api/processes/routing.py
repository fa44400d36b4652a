"""The router of a server with several engines: `lockstep.core.cluster.router`, with a mailbox.

    worker ──Offer────────> router ──Routed──> worker ──Submit──> the engine        tokens bypass the router
    worker ──OfferClosed──> router                                                  which counts their ends
    engine ──EngineHere───> router <──EngineLost, WorkerLost── launcher

The router is a thread of the launcher. All workers use the same router, so its counts cover all requests, in one
order, and its journal replays to the same decisions (`lockstep journal verify`). It is never restarted: it ends with
the launcher, and the whole server ends with both.

The next generation of an engine that died continues its requests from its journal. Until then the engine is
`recovering`: it receives no new requests, and its open requests still count. A session belongs to the engine that
opened it, and all of its turns run there under any policy. An engine reports its open sessions whenever it starts.

With `--admission` requests wait in a queue in front of the router, `lockstep.core.cluster.dispatch`; each decision of
the queue is sent to the worker that made the offer. A decision that was sent is never revoked: when an engine is lost,
its requests are not assigned again, since a client that had received tokens would receive different ones.

While an operator changes the weights of several engines, no request is assigned (InputBlocked): otherwise one engine
would answer by new weights while another still answers by old ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zmq

from lockstep.api.processes.outbox import Writers
from lockstep.api.processes.sockets import reader, router_address
from lockstep.api.processes.wire import (
    Drained,
    EngineHere,
    EngineLost,
    InputBlocked,
    InputReleased,
    Offer,
    OfferClosed,
    Routed,
    RouterMessage,
    SessionOver,
    StopRouter,
    Withdraw,
    WorkerLost,
    read_by_router,
)
from lockstep.core.cluster import dispatch
from lockstep.core.cluster.router import (
    EngineChanged,
    EngineShare,
    EngineState,
    RequestEnded,
    RequestOffered,
    RequestRouted,
    Router,
    RouterConfig,
    RouterFact,
)
from lockstep.core.scheduler.intake import InputBlocker
from lockstep.host.router_journal import NoRouterJournal, RouterJournal

JOURNAL_SHARE = 16
"""A router starts a new journal file when the current one has reached 1/16 of the bytes allowed for a journal."""


REFUSED = {"line_full": "queue_full"}
"""Reasons of the waiting queue for a refusal -> the same reasons in the terms of engines."""


@dataclass(slots=True)
class _Offered:
    """A request that has not ended."""

    message: Offer
    fact: RequestOffered
    fresh: bool  # whether the session was unknown to the router

    @property
    def key(self) -> tuple[int, int]:
        return self.message.worker, self.message.number


# mechanism: prefix-affinity (executed)
class RouterService:
    """Turns messages into facts for the router, and the router's decisions into answers.

    Args:
        engines: number of engines. Requests are answered once each of them has started.
        answer: sends a message to a worker.
        run: folder of the router's journal; None: no journal.
        admission: settings of the waiting queue in front of the router; None: requests do not wait.
    """

    def __init__(
        self,
        engines: int,
        config: RouterConfig,
        answer: Callable[[Routed], object],
        *,
        run: Path | None = None,
        bytes_max: int = 2**30,
        admission: dispatch.DispatchConfig | None = None,
        clock_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000,
    ) -> None:
        self._config, self._answer, self._run, self._bytes_max = config, answer, run, bytes_max
        self._clock_us, self._began_us = clock_us, clock_us()
        self._admission = admission
        self.queue: dispatch.Dispatcher | None = None  # in front of the router; None: requests do not wait
        self.router: Router | None = None  # None until every engine has started
        self._here: dict[int, EngineHere] = {}  # by engine, of its newest generation
        # by engine; messages of earlier generations are ignored
        self._next_generation = dict.fromkeys(range(engines), 0)
        self._lost: set[int] = set()  # engines that ended for good
        self._journal: RouterJournal | NoRouterJournal = NoRouterJournal()
        self._sessions: dict[str, int] = {}  # open sessions -> engine; the most recently used is last
        self._pending: dict[tuple[int, int], Offer] = {}  # offers that no engine can take now, in order of arrival
        # by worker and number: engine, and the offer that the router received
        self._open: dict[tuple[int, int], tuple[int, RequestOffered]] = {}
        self._waiting: dict[tuple[int, int], int] = {}  # by worker and number: id in the waiting queue
        self._offers: dict[int, _Offered] = {}  # by id, for the waiting queue and the router
        self._next_id = 0
        self._blocker = InputBlocker[tuple[int, int]]()  # of offers in `_pending`, while weights are changed
        self._blocks: set[tuple[int, int]] = set()  # worker and number of each block

    def handle(self, message: RouterMessage) -> None:
        """Handle a message."""
        HANDLERS[type(message)](self, message)
        if isinstance(message, OfferClosed) and self._journal.size_bytes > self._bytes_max // JOURNAL_SHARE:
            assert self.router is not None
            self._begin(list(self.router.state))

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    # ------------------------------------------------------------------------------------- one handler for each message

    def offer(self, message: Offer) -> None:
        """Assign a request or a session to an engine."""
        known = self._sessions.pop(message.session, None) if message.session else None
        if known is not None:
            self._sessions[message.session] = known  # moves to the end of the order
        if message.purpose == "close":
            self._answer(Routed(message.worker, message.number, known or 0, known is None))
            return
        if message.purpose == "request":
            key = message.worker, message.number
            self._pending[key] = message
            for one in self._blocker.take([key]):
                self._assign(self._pending.pop(one))
        else:
            self._assign(message)

    # mechanism: named-engine (executed)
    def _assign(self, message: Offer) -> None:
        """Assign a request, or a session that is opened, to an engine, or let it wait for one."""
        known = self._sessions.get(message.session)
        refusing = self._refusing_engine()
        only = known if known is not None else self._sessions.get(message.parent, refusing)
        named = message.named if only is None else None  # a session stays where its state is
        if named is not None and named in self._lost:
            self._answer(Routed(message.worker, message.number, -1, refused="draining"))
        elif self.router is None:
            self._pending[message.worker, message.number] = message
        elif (
            self.queue is not None and refusing is not None
        ):  # a draining engine refuses at once, so the request need not wait
            self._answer(Routed(message.worker, message.number, refusing if only is None else only, known is None))
        elif named is not None and self.router.state[named] == "draining":
            self._answer(Routed(message.worker, message.number, named, known is None))
        else:
            self._offer(message, only, fresh=known is None)

    # mechanism: input-block (executed)
    def block(self, message: InputBlocked) -> None:
        """Assign no request until this block and all others have ended."""
        self._blocks.add((message.worker, message.number))
        self._blocker.block()

    def release(self, message: InputReleased) -> None:
        """End a block. After the last one, the requests that arrived meanwhile are assigned in their order."""
        self._blocks.discard((message.worker, message.number))
        self._release()

    def _release(self) -> None:
        if not self._blocks:
            self._blocker.unblock()
        for key in self._blocker.ranks_agreed(not self._blocks):
            offer = self._pending.pop(key, None)  # None: its client left meanwhile
            if offer is not None:
                self._assign(offer)

    def over(self, message: OfferClosed) -> None:
        """Remove a request that has ended."""
        key = message.worker, message.number
        self._pending.pop(key, None)
        opened, waits = self._open.pop(key, None), self._waiting.pop(key, None)
        request_id = waits if opened is None else opened[1].request_id
        if request_id is not None:
            self._offers.pop(request_id, None)
            self._fact(RequestEnded(time_us=self._now_us(), request_id=request_id, output_tokens=message.output_tokens))

    def withdraw(self, message: Withdraw) -> None:
        """Remove the waiting requests with this label."""
        named = [key for key, offer in self._pending.items() if offer.label == message.label]
        named += [key for key, number in self._waiting.items() if self._offers[number].message.label == message.label]
        for key in named:
            self.over(OfferClosed(*key, 0))
            self._answer(Routed(*key, -1, refused="cancelled"))

    def session_over(self, message: SessionOver) -> None:
        """Remove a session that is not open, or no longer open."""
        self._sessions.pop(message.session, None)

    def drained(self, message: Drained) -> None:
        """Stop or resume the assignment of new requests to an engine."""
        here = self._here.get(message.engine)
        if here is None or message.engine in self._lost or here.generation < self._next_generation[message.engine]:
            return
        self._state(message.engine, "draining" if message.draining else "up")

    def engine_here(self, message: EngineHere) -> None:
        """Record that an engine can take requests, and which sessions it has open."""
        engine = message.engine
        if engine in self._lost or message.generation < self._next_generation[engine]:
            return
        self._here[engine] = message
        self._sessions = {key: owner for key, owner in self._sessions.items() if owner != engine}
        for session in message.sessions:
            self._keep_session(session, engine)
        if self.router is not None:
            self._state(engine, "draining" if message.draining else "up")
        else:
            self._begin_if_complete()

    def engine_lost(self, message: EngineLost) -> None:
        """Record the end of an engine. The next generation continues its requests; without one, workers end them."""
        if message.next_generation is not None:
            self._next_generation[message.engine] = message.next_generation
            self._state(message.engine, "recovering")
            return
        self._lost.add(message.engine)
        self._sessions = {key: owner for key, owner in self._sessions.items() if owner != message.engine}
        gone = [key for key, opened in self._open.items() if opened[0] == message.engine]
        if self.queue is not None:  # the workers end the requests of the engine, so the router sends none of them again
            self._state(message.engine, "recovering")
        for key in gone:
            if self.queue is not None:
                self.over(OfferClosed(*key, 0))
            else:
                del self._offers[self._open.pop(key)[1].request_id]
        self._state(message.engine, "down")
        if self.router is None:
            self._begin_if_complete()

    def worker_lost(self, message: WorkerLost) -> None:
        """Remove the offers of a worker that ended."""
        for key in [key for key in (*self._open, *self._pending, *self._waiting) if key[0] == message.worker]:
            self.over(OfferClosed(*key, 0))
        self._blocks = {block for block in self._blocks if block[0] != message.worker}
        self._release()

    # ------------------------------------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        now_us = self._clock_us() - self._began_us
        return now_us if self.router is None else max(now_us, self.router.now_us)

    def _begin_if_complete(self) -> None:
        if all(engine in self._here or engine in self._lost for engine in self._next_generation):
            self._begin([self._state_at_first(engine) for engine in self._next_generation])

    def _state_at_first(self, engine: int) -> EngineState:
        if engine in self._lost:
            return "down"
        here = self._here[engine]
        if here.generation < self._next_generation[engine]:
            return "recovering"
        return "draining" if here.draining else "up"

    def _begin(self, states: list[EngineState]) -> None:
        """Create a router, and offer it the open requests. The prompt history of an earlier router is dropped."""
        tokens = [here.cache_tokens if (here := self._here.get(engine)) else 0 for engine in self._next_generation]
        shares = tuple(EngineShare(cache_tokens=one) for one in tokens)
        if self._admission is None:
            self.router = Router(self._config, shares)
        else:
            self.queue = dispatch.Dispatcher(self._admission, self._config, shares)
            self.router = self.queue.router
        self._began_us = self._clock_us()
        if self._run is not None:
            if isinstance(self._journal, RouterJournal):
                self._journal.begin_life(self._config, shares, self._admission)
            else:
                self._journal = RouterJournal(
                    self._run, self._config, shares, self._admission, live=True, bytes_max=self._bytes_max // 2
                )
        for engine, state in enumerate(states):
            if state != "up":
                self._fact(EngineChanged(time_us=self._now_us(), engine=engine, state=state))
        offers, self._offers = self._offers, {}
        waiting, self._waiting = list(self._waiting.values()), {}
        for key, (engine, offered) in list(self._open.items()):
            again = RequestOffered(
                time_us=self._now_us(),
                request_id=self._id(),
                prompt_tokens=offered.prompt_tokens,
                only=engine,
                tenant=offered.tenant,
            )
            self._open[key] = engine, again
            self._offers[again.request_id] = _Offered(offers[offered.request_id].message, again, False)
            self._fact(again)
        for number in waiting:
            one = offers[number]
            self._offer(one.message, one.fact.only, fresh=one.fresh)
        self._again()

    def _refusing_engine(self) -> int | None:
        """Return a draining engine, which refuses requests at once, if no engine is up or recovering; else None."""
        states = self.router.state if self.router is not None else []
        if "draining" in states and "up" not in states and "recovering" not in states:
            return states.index("draining")
        return None

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _offer(self, message: Offer, only: int | None, *, fresh: bool) -> None:
        """Offer the router a request, or a session to be opened, and carry out its decisions."""
        queue = self.queue is not None
        offered = RequestOffered(
            time_us=self._now_us(),
            request_id=self._id(),
            prompt_tokens=message.prompt_tokens,
            prefix=message.prefix,
            session=message.session,
            only=only,
            tenant=message.tenant if queue else "",
            priority=message.priority if queue else None,
            named=message.named,
        )
        self._offers[offered.request_id] = _Offered(message, offered, fresh)
        self._fact(offered)

    def _fact(self, fact: RouterFact) -> None:
        """Pass a fact to the router, append it to the journal, and carry out the router's decisions."""
        assert self.router is not None
        if self.queue is not None:
            decided = self.queue.step(fact)
            label = self._offers[fact.request_id].message.label if isinstance(fact, RequestOffered) else ""
            self._journal.append_decided(fact, decided, self.queue.digest, label)
        else:
            routed = self.router.step(fact)
            self._journal.append(fact, routed, self.router.digest)
            decided = () if routed is None else (routed,)
        for one in decided:
            self._do(one)

    # mechanism: queue-at-the-router (executed)
    def _do(self, routed: RequestRouted) -> None:
        """Send a decision about a request to the worker that offered it."""
        one = self._offers.get(routed.request_id)
        if one is None or one.key in self._open:  # the request was already assigned by an earlier router
            return
        message, key = one.message, one.key
        if routed.reason == "waits":
            self._waiting[key] = routed.request_id
            return
        self._waiting.pop(key, None)
        if routed.engine is None:
            del self._offers[routed.request_id]
            if routed.reason in REFUSED:
                self._answer(Routed(*key, -1, refused=REFUSED[routed.reason]))
            else:
                self._pending[key] = message
            return
        self._open[key] = routed.engine, one.fact
        if message.purpose == "open":
            del self._open[key], self._offers[routed.request_id]
            self._fact(RequestEnded(time_us=self._now_us(), request_id=routed.request_id))
            self._keep_session(message.session, routed.engine)
        self._answer(Routed(*key, routed.engine, one.fresh))

    def _state(self, engine: int, state: EngineState) -> None:
        if self.router is not None and self.router.state[engine] != state:
            self._fact(EngineChanged(time_us=self._now_us(), engine=engine, state=state))
            self._again()
            refusing = self._refusing_engine() if self.queue is not None else None
            if refusing is not None:  # otherwise these offers would wait for an engine that never starts
                for key in list(self._waiting):
                    self.over(OfferClosed(*key, 0))
                    self._answer(Routed(*key, refusing))

    def _again(self) -> None:
        """Offer again the requests that no engine could take."""
        pending, self._pending = self._pending, {}
        for message in pending.values():
            self.offer(message)

    def _keep_session(self, session: str, engine: int) -> None:
        self._sessions[session] = engine
        if len(self._sessions) > self._config.sessions_max:
            del self._sessions[next(iter(self._sessions))]


HANDLERS: dict[type[RouterMessage], Callable[[RouterService, Any], None]] = {
    Offer: RouterService.offer,
    OfferClosed: RouterService.over,
    Withdraw: RouterService.withdraw,
    SessionOver: RouterService.session_over,
    Drained: RouterService.drained,
    InputBlocked: RouterService.block,
    InputReleased: RouterService.release,
    EngineHere: RouterService.engine_here,
    EngineLost: RouterService.engine_lost,
    WorkerLost: RouterService.worker_lost,
}


class Service(Protocol):
    """A router with its messages: `RouterService`, or `PairRouting`."""

    def handle(self, message: RouterMessage) -> None:
        """Handle a message."""

    def close(self) -> None:
        """Close the journal."""


class RouterThread:
    """The thread of the router, which handles messages until StopRouter.

    Args:
        folder: folder of the server's sockets.
        make: makes the service, given the function that sends a message to a worker.
        failed: called with the exception if the thread ends with one.
    """

    def __init__(self, folder: Path, make: Callable[[Callable[[Routed], object]], Service], failed: Any) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox = reader(self._context, router_address(folder))
        self._writers = Writers(self._context, folder)
        self._dispatcher, self._failed = make(self._writers.send), failed
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not isinstance(message := read_by_router(self._mailbox.recv()), StopRouter):
                self._dispatcher.handle(message)
        except Exception as error:
            self._failed(error)
        finally:
            self._dispatcher.close()
            self._writers.close()
            self._mailbox.close()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until the thread has ended."""
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._context.destroy(linger=200)
