"""Clusters of engines on one shared clock: arrivals, routes and ends of requests.

Engines that interact only at the router have a clock each (`lane.py`). Engines share a clock if they hand requests over
(`handover.py`) or run every pass together (`data_parallel.py`).
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from simpy import Environment, Event

from lockstep.core.cluster.router import LoadReported, RequestEnded, RequestOffered, Router, prefix_keys
from lockstep.core.contract.events import RequestArrived, RequestCancelled, RequestId, TokenRuns
from lockstep.sim.cluster.network import later
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.run.simulate import Run, arrivals_of
from lockstep.sim.workload.token_runs import prompt_ids
from lockstep.sim.workload.turns import Turn

if TYPE_CHECKING:
    from lockstep.core.scheduler.engine import Engine
    from lockstep.host.router_journal import NoRouterJournal, RouterJournal
    from lockstep.sim.cluster.result import ClusterRun
    from lockstep.sim.cluster.setup import ClusterSetup

GIVE_UP_EVERY = 32  # least number of requests between two calls of `give_up`

Cluster = TypeVar("Cluster")


class Routing:
    """A router with its journal.

    Args:
        engines: number in the cluster of each engine that the router chooses from, in the order of the router.
    """

    def __init__(self, router: Router, journal: RouterJournal | NoRouterJournal, engines: Sequence[int]) -> None:
        self.by_reason: Counter[str] = Counter()
        self._router, self._journal, self._engines = router, journal, engines
        self._sessions: dict[int, str] = {}

    def engine_for(self, event: RequestArrived, turn: Turn) -> int:
        """Return the engine of the cluster for a request that arrives now."""
        config = self._router.config
        prefix: tuple[int, ...] = ()
        if config.policy == "prefix_affinity":
            assert type(event.prompt) is TokenRuns
            prefix = prefix_keys(prompt_ids(event.prompt.runs), config.block_tokens, event.tenant)
        session = ""
        if config.policy == "session_sticky":
            session = turn.label if turn.after is None else self._sessions[turn.after]
            self._sessions[turn.index] = session
        offered = RequestOffered(
            time_us=event.time_us,
            request_id=event.request_id,
            prompt_tokens=turn.prompt_tokens,
            prefix=prefix,
            session=session,
        )
        routed = self._router.step(offered)
        assert routed is not None
        assert routed.engine is not None
        self._journal.append(offered, routed, self._router.digest)
        self.by_reason[routed.reason] += 1
        return self._engines[routed.engine]

    def tell_end(self, time_us: int, request_id: RequestId, output_tokens: int) -> None:
        """Report the end of a request to the router; the router's clock does not run backwards for a late report."""
        at_us = max(time_us, self._router.now_us)
        self.take_in(RequestEnded(time_us=at_us, request_id=request_id, output_tokens=output_tokens))

    def take_in(self, fact: RequestEnded | LoadReported) -> None:
        """Step the router with a fact that routes no request."""
        self._router.step(fact)
        self._journal.append(fact, None, self._router.digest)


def report_of(engine: int, core: Engine, measured_us: int, due_us: int) -> LoadReported:
    """Return the load report of an engine: open requests, KV that they hold, and prompts that wait for KV."""
    memory = core.memory
    cached = memory.radix.evictable_pages
    held = (core.config.pages - memory.pool.free_count - cached) * core.config.page_size
    waiting = sum(request.prompt_tokens for request in core.waiting)
    return LoadReported(
        time_us=due_us, engine=engine, measured_us=measured_us, requests=len(core.requests), tokens=held + waiting
    )


class SharedFeed:
    """The requests that were sent to one engine of a shared clock."""

    def __init__(self, env: Environment, ended: Callable[[RequestId, int, bool], None]) -> None:
        self.open_turns: dict[RequestId, Turn] = {}
        self.next_us = NEVER_US
        self._env = env
        self._ended = ended
        self._queue: deque[RequestArrived | RequestCancelled] = deque()
        self._awaited: Event | None = None

    def add(self, event: RequestArrived, turn: Turn) -> None:
        """Queue a request. Its time must not be before that of the last one."""
        self.open_turns[event.request_id] = turn
        self._queue.append(event)
        self.next_us = self._queue[0].time_us
        self.poke()

    def take(self, _max_new_tokens: int | None) -> RequestArrived | RequestCancelled:
        """Return the next fact, due at `next_us`."""
        event = self._queue.popleft()
        self.next_us = self._queue[0].time_us if self._queue else NEVER_US
        return event

    @property
    def settled_until_us(self) -> int:
        """Time of the next process: at least 1 us from now, because others may still act at the present time."""
        return int(min(max(self._env.peek(), self._env.now + 1), NEVER_US))

    def more(self, env: Environment) -> Event | None:
        """Return an event that the next call of `poke` triggers."""
        self._awaited = env.event()
        return self._awaited

    def pause(self, env: Environment, next_us: int) -> Event:
        """Return an event that a time or the next call of `poke` triggers."""
        awaited = self._awaited = env.event()
        later(env, next_us - int(env.now), lambda: succeed(awaited))
        return awaited

    def poke(self) -> None:
        """Wake the lane, because a fact came."""
        succeed(self._awaited)
        self._awaited = None

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """Record the end of an answer."""
        del self.open_turns[request_id]
        self._ended(request_id, now_us, True)

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """Record the rejection or the cancel of a request."""
        del self.open_turns[request_id]
        self._ended(request_id, now_us, False)


class SharedClock(Generic[Cluster]):
    """The clock of a cluster, its arrivals, and the hosts of all engines.

    Args:
        route: function that sends a request to its engines; called at the time of its arrival.
        on_finish: called with the number of requests that ended, after each end.
    """

    def __init__(
        self,
        setup: ClusterSetup,
        route: Callable[[RequestArrived, Turn], None],
        on_finish: Callable[[int], None] | None,
    ) -> None:
        self.setup = setup
        self.env = Environment()
        self.arrivals = arrivals_of(setup.engines[0])
        self.hosts: list[EngineHost] = []  # the cluster adds them
        self._route = route
        self._on_finish = on_finish
        self._ended_count = 0
        self._stop_requested = False
        self._changed: Event | None = None  # triggered when the next known arrival may have changed

    @property
    def stop_requested(self) -> bool:
        """Whether a signal handler requested the end of the run: every engine stops before its next fact."""
        return self._stop_requested

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self._stop_requested = value
        for host in self.hosts:
            host.stop_requested = value

    @property
    def goes_on(self) -> bool:
        """Whether a request is open, or has a known time of arrival."""
        return bool(self.arrivals.open_turns) or self.arrivals.next_us < NEVER_US

    def at(self, time_us: int, act: Callable[[], None]) -> None:
        """Call a function at a time."""
        later(self.env, time_us - int(self.env.now), act)

    def run(self, cluster: Cluster, give_up: Callable[[Cluster], bool] | None) -> bool:
        """Route every request and finish every answer. Return whether `give_up` stopped the arrivals early."""
        stopped_early: list[bool] = []
        for host in self.hosts:
            self.env.process(host.run())
        asked = None if give_up is None else functools.partial(give_up, cluster)
        self.env.process(self._route_all(asked, stopped_early))
        self.env.run()
        return bool(stopped_early)

    def _route_all(self, give_up: Callable[[], bool] | None, stopped_early: list[bool]) -> Generator[Event, None, None]:
        env, arrivals = self.env, self.arrivals
        max_new_tokens = self.setup.scenario.base.max_new_tokens
        until_question = GIVE_UP_EVERY
        while not self._stop_requested:
            next_us = arrivals.next_us
            if next_us == NEVER_US and not arrivals.awaits_answers:
                return
            if next_us > env.now:
                changed = self._changed = env.event()
                if next_us < NEVER_US:
                    later(env, next_us - int(env.now), functools.partial(succeed, changed))
                yield changed
                continue
            event = arrivals.take(max_new_tokens)
            assert type(event) is RequestArrived
            self._route(event, arrivals.open_turns[event.request_id])
            until_question -= 1
            if give_up is not None and until_question <= 0:
                until_question = max(GIVE_UP_EVERY, arrivals.arrived // 16)
                if give_up():
                    stopped_early.append(True)
                    return

    def output_tokens(self, request_id: RequestId) -> int:
        """Return the output tokens of an open request's turn; 0 after its client has received the end."""
        turn = self.arrivals.open_turns.get(request_id)
        return turn.output_tokens if turn is not None else 0

    def see_end(self, request_id: RequestId, seen_us: int, answered: bool) -> None:
        """Record that the client of a request receives its end at `seen_us`."""
        if answered:
            self.arrivals.answered(request_id, seen_us)
        else:
            self.arrivals.broke_off(request_id, seen_us)
        succeed(self._changed)
        self._ended_count += 1
        if self._on_finish is not None:
            self._on_finish(self._ended_count)

    def measured(
        self, data: RunData, datas: Sequence[RunData], by_reason: Counter[str], stopped_early: bool, began_s: float
    ) -> ClusterRun:
        """Return the result of the run. Clamped requests count on the engines that stream to clients."""
        from lockstep.sim.cluster.result import ClusterRun

        cpu_s = time.process_time() - began_s
        engines = tuple(
            Run(
                setup=one,
                data=measured,
                batches=host.batches,
                clamped=host.clamped if one.config.role != "prefill" else 0,
                rejected=host.rejected,
                never_sent=0,
                interrupted=self._stop_requested,
                cpu_s=cpu_s / len(self.hosts),
            )
            for one, measured, host in zip(self.setup.engines, datas, self.hosts, strict=True)
        )
        return ClusterRun(
            setup=self.setup,
            engines=engines,
            data=data,
            routed_by_reason=dict(sorted(by_reason.items())),
            never_sent=self.arrivals.never_sent,
            interrupted=self._stop_requested,
            stopped_early=stopped_early,
            cpu_s=cpu_s,
        )


def succeed(event: Event | None) -> None:
    """Trigger an event that a process waits for, if there is one."""
    if event is not None and not event.triggered:
        event.succeed()
