"""The router of a server with several engines: `lockstep.core.router`, with a mailbox.

    worker ──Offer──> router ──Routed──> worker ──Submit──> the engine        tokens never pass here
    worker ──Over───> router                                                  so it counts exactly what is open
    engine ──EngineHere──> router <──EngineLost, WorkerLost── launcher

It is a thread of the launcher. All workers ask the same one, so what it counts is what there is, in one order, and its
journal replays to the same decisions (`lockstep journal verify`). Nobody has to restart it: it ends with the launcher,
and with that everything does.

An engine that died comes back with its requests, which its journal has: until then it is `recovering`, gets nothing
new, and its requests go on counting. Sessions are an engine's own: whoever has one open takes its turns, whatever the
policy says, and says which it has whenever it begins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import zmq

from lockstep.api.outbox import Writers
from lockstep.api.sockets import reader, router_address
from lockstep.api.wire import (
    Drained,
    EngineHere,
    EngineLost,
    Offer,
    Over,
    Routed,
    RouterMessage,
    SessionOver,
    StopRouter,
    WorkerLost,
    read_by_router,
)
from lockstep.core.router import (
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
from lockstep.host.router_journal import NoRouterJournal, RouterJournal, set_aside

JOURNAL_SHARE = 16
"""A router's file is begun anew when it has this part of the bytes that a journal may have."""


def session_key(name: str) -> str:
    """What a router calls a session: it needs to know whether two are the same, and not what clients call them."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class Dispatcher:
    """What the router is told by others, as facts for it, and what it decides, as answers for them.

    Args:
        engines: how many there are. Requests are answered once each of them was there.
        answer: tells a worker.
        run: where its journal goes; None: nowhere.
    """

    def __init__(
        self,
        engines: int,
        config: RouterConfig,
        answer: Callable[[Routed], object],
        *,
        run: Path | None = None,
        bytes_max: int = 2**30,
        clock_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000,
    ) -> None:
        self._config, self._answer, self._run, self._bytes_max = config, answer, run, bytes_max
        self._clock_us, self._began_us = clock_us, clock_us()
        self.router: Router | None = None  # once every engine was there
        self._here: dict[int, EngineHere] = {}  # by engine, its newest life
        self._next_life = dict.fromkeys(range(engines), 0)  # what is said by a life before this is passed over
        self._lost: set[int] = set()  # for good
        self._journal: RouterJournal | NoRouterJournal = NoRouterJournal()
        self._sessions: dict[str, int] = {}  # that are open, the one heard of last at the end
        self._pending: dict[tuple[int, int], Offer] = {}  # that nobody can take now, in the order they came
        self._open: dict[tuple[int, int], tuple[int, RequestOffered]] = {}  # by worker and number: whose, and as what
        self._next_id = 0

    def handle(self, message: RouterMessage) -> None:
        """Take a message in."""
        HANDLERS[type(message)](self, message)

    def close(self) -> None:
        """Nothing more comes."""
        self._journal.close()

    # ------------------------------------------------------------------------------------- one handler for each message

    def offer(self, message: Offer) -> None:
        """Say who takes a request, or a session."""
        known = self._sessions.pop(message.session, None) if message.session else None
        if known is not None:
            self._sessions[message.session] = known  # heard of now
        if message.what == "close":
            self._answer(Routed(message.worker, message.number, known or 0, known is None))
            return
        only = known if known is not None else self._sessions.get(message.parent, self._who_refuses())
        routed = self._route(message, only)
        if routed is None or routed.engine is None:
            self._pending[message.worker, message.number] = message
            return
        if message.what == "open":
            del self._open[message.worker, message.number]
            self._fact(RequestEnded(time_us=self._now_us(), request_id=routed.request_id))
            self._keep_session(message.session, routed.engine)
        self._answer(Routed(message.worker, message.number, routed.engine, known is None))

    def over(self, message: Over) -> None:
        """A request is none any more."""
        self._pending.pop((message.worker, message.number), None)
        opened = self._open.pop((message.worker, message.number), None)
        if opened is not None:
            request_id, output_tokens = opened[1].request_id, message.output_tokens
            self._fact(RequestEnded(time_us=self._now_us(), request_id=request_id, output_tokens=output_tokens))

    def session_over(self, message: SessionOver) -> None:
        """A session is open nowhere."""
        self._sessions.pop(message.session, None)

    def drained(self, message: Drained) -> None:
        """An operator wants an engine to get nothing new, or something again."""
        here = self._here.get(message.engine)
        if here is None or message.engine in self._lost or here.generation < self._next_life[message.engine]:
            return
        self._state(message.engine, "draining" if message.draining else "up")

    def engine_here(self, message: EngineHere) -> None:
        """An engine can take requests; it may have some already, and sessions."""
        engine = message.engine
        if engine in self._lost or message.generation < self._next_life[engine]:
            return
        self._here[engine] = message
        self._sessions = {key: whose for key, whose in self._sessions.items() if whose != engine}
        for session in message.sessions:
            self._keep_session(session, engine)
        if self.router is not None:
            self._state(engine, "draining" if message.draining else "up")
        else:
            self._begin_if_all_are_known()

    def engine_lost(self, message: EngineLost) -> None:
        """An engine ended. One that comes back has what it had; of another the workers know that it is gone."""
        if message.next_generation is not None:
            self._next_life[message.engine] = message.next_generation
            self._state(message.engine, "recovering")
            return
        self._lost.add(message.engine)
        self._sessions = {key: whose for key, whose in self._sessions.items() if whose != message.engine}
        self._open = {key: opened for key, opened in self._open.items() if opened[0] != message.engine}
        self._state(message.engine, "down")
        if self.router is None:
            self._begin_if_all_are_known()

    def worker_lost(self, message: WorkerLost) -> None:
        """A worker ended: nobody waits for what it had offered."""
        for key in [key for key in (*self._open, *self._pending) if key[0] == message.worker]:
            self.over(Over(*key, 0))

    # ------------------------------------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        now_us = self._clock_us() - self._began_us
        return now_us if self.router is None else max(now_us, self.router.now_us)

    def _begin_if_all_are_known(self) -> None:
        if all(engine in self._here or engine in self._lost for engine in self._next_life):
            self._begin([self._state_at_first(engine) for engine in self._next_life])

    def _state_at_first(self, engine: int) -> EngineState:
        if engine in self._lost:
            return "down"
        here = self._here[engine]
        if here.generation < self._next_life[engine]:
            return "recovering"
        return "draining" if here.draining else "up"

    def _begin(self, states: list[EngineState]) -> None:
        """Make a router, with what is open. What one before it remembered of prompts begins anew."""
        tokens = [here.cache_tokens if (here := self._here.get(engine)) else 0 for engine in self._next_life]
        shares = tuple(EngineShare(cache_tokens=one) for one in tokens)
        self.router = Router(self._config, shares)
        self._began_us = self._clock_us()
        if self._run is not None:
            self._journal.close()
            set_aside(self._run, self._bytes_max // 2)
            self._journal = RouterJournal(self._run, self._config, shares, live=True)
        for engine, state in enumerate(states):
            if state != "up":
                self._fact(EngineChanged(time_us=self._now_us(), engine=engine, state=state))
        for key, (engine, offered) in list(self._open.items()):
            again = RequestOffered(
                time_us=self._now_us(), request_id=self._id(), prompt_tokens=offered.prompt_tokens, only=engine
            )
            self._fact(again)
            self._open[key] = engine, again
        self._again()

    def _who_refuses(self) -> int | None:
        """Where everybody drains, one of those, who says so; there is nothing to wait for."""
        states = self.router.state if self.router is not None else []
        if "draining" in states and "up" not in states and "recovering" not in states:
            return states.index("draining")
        return None

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _route(self, message: Offer, only: int | None) -> RequestRouted | None:
        if self.router is None:
            return None
        offered = RequestOffered(
            time_us=self._now_us(),
            request_id=self._id(),
            prompt_tokens=message.prompt_tokens,
            prefix=message.prefix,
            session=message.session,
            only=only,
        )
        routed = self._fact(offered)
        assert routed is not None
        if routed.engine is not None:
            self._open[message.worker, message.number] = routed.engine, offered
        return routed

    def _fact(self, fact: RouterFact) -> RequestRouted | None:
        assert self.router is not None
        routed = self.router.step(fact)
        self._journal.append(fact, routed, self.router.digest)
        if self._journal.size_bytes > self._bytes_max // JOURNAL_SHARE and isinstance(fact, RequestEnded):
            self._begin(list(self.router.state))
        return routed

    def _state(self, engine: int, state: EngineState) -> None:
        if self.router is not None and self.router.state[engine] != state:
            self._fact(EngineChanged(time_us=self._now_us(), engine=engine, state=state))
            self._again()

    def _again(self) -> None:
        """Offer again what nobody could take."""
        pending, self._pending = self._pending, {}
        for message in pending.values():
            self.offer(message)

    def _keep_session(self, session: str, engine: int) -> None:
        self._sessions[session] = engine
        if len(self._sessions) > self._config.sessions_max:
            del self._sessions[next(iter(self._sessions))]


HANDLERS: dict[type[RouterMessage], Callable[[Dispatcher, Any], None]] = {
    Offer: Dispatcher.offer,
    Over: Dispatcher.over,
    SessionOver: Dispatcher.session_over,
    Drained: Dispatcher.drained,
    EngineHere: Dispatcher.engine_here,
    EngineLost: Dispatcher.engine_lost,
    WorkerLost: Dispatcher.worker_lost,
}


class RouterThread:
    """Reads what the router is told, until StopRouter.

    Args:
        folder: of the server's sockets.
        failed: told why it ended otherwise: a mistake of ours.
    """

    def __init__(self, folder: Path, make: Callable[[Callable[[Routed], object]], Dispatcher], failed: Any) -> None:
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
        """Wait until it has ended."""
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._context.destroy(linger=200)
