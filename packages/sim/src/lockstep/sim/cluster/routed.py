"""A cluster whose engines interact only at the router: routing, reports, scaling and waits at the router.

A request is routed when it reaches the router, and reaches its engine one hop later; a token takes one hop back. The
router counts exactly what has passed through it: the requests that it routed, and the ends that have reached it.

With autoscaling (`scaling`) every replica has a lane from the start. A replica that is off receives no requests, and
starts again with an empty cache. With a queue at the router (`dispatch`) the wait there is part of the latency, and
requests have numbers on engines in the order in which they were sent; `sent` maps these numbers to request ids.

If nothing before the end of the run depends on the end of a request, requests are routed ahead: an engine is advanced
once per SENT_AHEAD requests, and the router receives ends when they have been simulated, with a later time. That is so
for policies in IN_TURN without follow-up turns, if there is no journal of the router, which has facts in order of time.
Under the other policies an engine is advanced up to the first arrival that it may get (`lead.py`), likewise without
follow-up turns, and without scaling, reports and a queue at the router.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any

import msgspec

from lockstep.core.cluster.autoscale import Autoscaler, LoadObserved
from lockstep.core.cluster.dispatch import Dispatcher
from lockstep.core.cluster.router import (
    IN_TURN,
    EngineChanged,
    LoadReported,
    RequestEnded,
    RequestOffered,
    RequestRouted,
    Router,
    RouterFact,
    prefix_keys,
)
from lockstep.core.contract.events import ControlRequested, Flush, RequestArrived, RequestId, TokenRuns
from lockstep.core.journal.sinks import JournalSink
from lockstep.host.router_journal import NoRouterJournal, RouterJournal, label_key
from lockstep.sim.cluster.lane import EngineLane, Feed, LaneClock, Sent
from lockstep.sim.cluster.lead import Leads
from lockstep.sim.cluster.metrics import RefusedRequest, combine
from lockstep.sim.cluster.prices import PriceOfDay, cost_over_time
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.setup import ClusterSetup
from lockstep.sim.cluster.shared_clock import report_of
from lockstep.sim.cost.hardware import PRICE_KINDS
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.pipeline import with_stages
from lockstep.sim.host.ports import NEVER_US, Observer
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.run.simulate import Run, arrivals_of, host_of, watch_of
from lockstep.sim.workload.token_runs import prompt_ids
from lockstep.sim.workload.turns import Turn

GIVE_UP_EVERY = 32  # least number of requests between two calls of `give_up`
SENT_AHEAD = 32  # requests that an engine gets before it is advanced, if no decision depends on ends
GIVE_UP_SHARE = 16  # at least one n-th of the arrived requests lies between two calls of `give_up`


@dataclass(frozen=True, kw_only=True)
class ClusterWatch:
    """Callbacks of a cluster of engines that interact only at the router. None of them changes the cluster."""

    observers: Sequence[Observer] = ()  # one per engine, or empty; see `ports.Observer`
    on_route: Callable[[RequestRouted], None] | None = None  # called for every request that was sent or rejected

    @property
    def is_set(self) -> bool:
        """Whether there is a callback."""
        return bool(self.observers) or self.on_route is not None


NOT_WATCHED = ClusterWatch()


# mechanism: queue-at-the-router (simulated)
class Cluster:
    """A router and the lanes of its engines. The lanes interact only here."""

    def __init__(
        self,
        setup: ClusterSetup,
        journals: list[JournalSink],
        router_journal: RouterJournal | NoRouterJournal,
        *,
        check_every: int = 0,
        on_finish: Callable[[int], None] | None = None,
        eager: bool = False,
        watch: ClusterWatch = NOT_WATCHED,
    ) -> None:
        scenario = setup.scenario.base
        self.setup = setup
        self.now_us = 0
        self.arrivals = arrivals_of(setup.engines[0])
        dispatch = setup.scenario.dispatch
        self._dispatcher = None if dispatch is None else Dispatcher(dispatch, setup.scenario.router, setup.shares)
        self._by_priority = dispatch is not None and dispatch.order == "priority"
        if self._dispatcher is None:
            self.router = Router(setup.scenario.router, setup.shares)
        else:
            self.router = self._dispatcher.router
        self.lanes: list[EngineLane] = []
        self.metrics: list[MetricsFold] = []
        self.routed_by_reason: Counter[str] = Counter()
        self._journal = router_journal
        self._hop_us = setup.scenario.hop_us
        self._max_new_tokens = scenario.max_new_tokens
        self._by_prefix = setup.scenario.router.policy == "prefix_affinity"
        self._by_room = setup.scenario.router.policy == "follow_bootstrap_room"
        self._seed = scenario.seed
        self._by_session = setup.scenario.router.policy == "session_sticky"
        self._sessions: dict[int, str] = {}  # by turn index: label of the first turn of its session
        self._ended: list[
            tuple[int, int, RequestId, int]
        ] = []  # heap of ends: us at the router, engine, request, output tokens
        self._ended_count = 0
        self._on_finish = on_finish
        self._on_route = watch.on_route
        self._eager = eager
        self._stop_requested = False
        self._held: dict[RequestId, RequestArrived] = {}  # requests that wait at the router
        self.waited_us: dict[RequestId, int] = {}
        self.sent: list[RequestId] = []  # with a queue at the router: request ids by their numbers on engines
        self._sent_turns: dict[RequestId, Turn] = {}  # turns of the open requests in `sent`
        self.refused: list[RefusedRequest] = []
        self._report_interval_us = setup.scenario.report_interval_us
        self._report_us = self._report_interval_us or NEVER_US  # time of the next reports
        self._reports: deque[LoadReported] = deque()  # reports on their way to the router
        self._last_end_us = 0
        scaling = setup.scenario.scaling
        self._scaler = None if scaling is None else Autoscaler(scaling.config(len(setup.engines)))
        self._flushes = 0
        up = range(len(setup.engines)) if scaling is None else range(scaling.config(len(setup.engines)).minimum)
        self._started = set(up)  # engines that were up at any time
        self._turns_on: list[tuple[int, int]] = []  # us, and the number of paid replicas from then on
        turns = setup.workload.turns
        thinking = turns.think_us[turns.after >= 0]
        # In a closed loop the next session begins when one ends, without a think time.
        closed = scenario.concurrency is not None
        self._think_us_min = int(thinking.min()) if len(thinking) and not closed else 0
        in_turn = setup.scenario.router.policy in IN_TURN and dispatch is None and scaling is None
        in_time = bool(self._report_interval_us) or eager or watch.is_set
        in_time = in_time or closed or self.arrivals.awaits_answers or not isinstance(router_journal, NoRouterJournal)
        self._routes_ahead = in_turn and not in_time
        self._engines_lag = self._routes_ahead  # whether engines have not reached the requests that were sent to them
        self._leads: Leads | None = None
        by_load = setup.scenario.router.policy not in IN_TURN and not self._report_interval_us
        if by_load and dispatch is None and scaling is None and not (eager or watch.is_set):
            if isinstance(self.arrivals, Arrivals) and not self.arrivals.awaits_answers:
                self._leads = Leads(self.router, self.arrivals, turns.arrival_us, self._hop_us)
        for engine, (one, journal) in enumerate(zip(setup.engines, journals, strict=True)):
            clock = LaneClock()
            open_turns = self.arrivals.open_turns if self._dispatcher is None else self._sent_turns
            feed = Feed(engine, open_turns, self._on_end, clock)
            host, metrics = host_of(
                one,
                feed,
                journal,
                env=clock,
                name=f"engine{engine}",
                watch=watch_of(check_every, observer=watch.observers[engine] if watch.observers else None),
            )
            self.lanes.append(EngineLane(host, feed, clock, one.cost, early_ends=scenario.max_new_tokens is not None))
            self.metrics.append(metrics)
        self._quiet_us = [lane.quiet_until_us for lane in self.lanes]  # by engine
        if self._scaler is not None:
            for replica, state in enumerate(self._scaler.state):
                if state == "off":
                    self._decide(EngineChanged(time_us=0, engine=replica, state="down"))

    @property
    def client_metrics(self) -> list[MetricsFold]:
        """Metrics of the engines that stream to clients, which are all engines."""
        return self.metrics

    @property
    def stop_requested(self) -> bool:
        """Whether a signal handler requested the end of the run: every engine stops before its next fact."""
        return self._stop_requested

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self._stop_requested = value
        for lane in () if self._engines_lag else self.lanes:
            lane.host.stop_requested = value

    def run(self, give_up: Callable[[Cluster], bool] | None = None) -> bool:
        """Route every request and finish every answer. Return whether `give_up` stopped the arrivals early."""
        arrivals, lanes, hop_us = self.arrivals, self.lanes, self._hop_us
        leads, until_question, routed_us = self._leads, GIVE_UP_EVERY, 0
        while not self._stop_requested:
            now_us = self._next_us()
            if arrivals.awaits_answers or self._held:
                # The next follow-up turn is not known yet. It arrives after the first end of an answer and the least
                # think time. A request that waits at the router is sent as soon as another request ends.
                first_us = min(self._quiet_us)
                sure_us = first_us + hop_us + (0 if self._held else self._think_us_min)
                if sure_us < now_us or sure_us == now_us > first_us:  # what follows may come first at an equal time
                    self._advance(max(sure_us, first_us + 1))
                    continue
            if now_us == NEVER_US:
                break
            if leads is not None and give_up is not None:
                leads.before_question = until_question - 1  # then all engines must be at one time
            if self._eager:
                self._advance_all(now_us)
            elif not self._routes_ahead:
                self._catch_up(now_us)
            self._report_ends(now_us + 1 if self._held else now_us)
            self._look_after(now_us)
            while arrivals.next_us == now_us:
                self._route()
                until_question -= 1
            routed_us = now_us
            if give_up is not None and until_question <= 0:
                until_question = max(GIVE_UP_EVERY, arrivals.arrived // GIVE_UP_SHARE)
                # Advance all engines to one time. Requests that are sent later arrive later.
                self._advance_all(min(now_us + hop_us, self._report_us))
                if give_up(self):
                    return True
        if self._stop_requested and self._routes_ahead:
            self._advance_all(routed_us)  # the engines of an interrupted run are at the same time
        self._engines_lag = False
        self.stop_requested = self._stop_requested
        for lane in lanes:
            lane.advance(float("inf"))
        self._report_ends(NEVER_US)
        return False

    def _advance(self, until_us: float) -> None:
        """Advance every engine that may end an answer before `until_us` to that time, or to the next known arrival."""
        for engine in range(len(self.lanes)):
            until_us = min(until_us, self._next_us())
            if self._quiet_us[engine] < until_us or self._eager:
                self._advance_one(engine, until_us)

    def _advance_all(self, until_us: float) -> None:
        for engine in range(len(self.lanes)):
            self._advance_one(engine, until_us)

    def _advance_one(self, engine: int, until_us: float) -> None:
        lane = self.lanes[engine]
        lane.advance(until_us)
        self._quiet_us[engine] = lane.quiet_until_us

    def _catch_up(self, now_us: int) -> None:
        """Advance engines until every end that the router receives by `now_us` has happened.

        Engines may run ahead by one hop, because new requests arrive one hop later, but not past the next report.
        """
        seen_us, until_us = now_us - self._hop_us, min(now_us + self._hop_us, self._report_us)
        leads, quiet_us = self._leads, self._quiet_us
        while (first_us := min(quiet_us)) < seen_us:
            engine = quiet_us.index(first_us)
            self._advance_one(engine, until_us if leads is None else leads.until_us(engine))

    def _route(self) -> None:
        event = self.arrivals.take(self._max_new_tokens)
        assert type(event) is RequestArrived
        turn = self.arrivals.open_turns[event.request_id]
        prefix: tuple[int, ...] = ()
        if self._leads is not None:
            prefix = self._leads.take(turn)
        elif self._by_prefix:
            assert type(event.prompt) is TokenRuns
            ids = prompt_ids(event.prompt.runs)
            prefix = prefix_keys(ids, self.router.config.block_tokens, event.tenant)
        session = ""
        if self._by_session:
            session = turn.label if turn.after is None else self._sessions[turn.after]
            self._sessions[turn.index] = session
        offered = RequestOffered(
            time_us=event.time_us,
            request_id=event.request_id,
            prompt_tokens=turn.prompt_tokens,
            prefix=prefix,
            session=session,
            tenant=event.tenant if self._dispatcher is not None else "",
            priority=event.priority if self._by_priority else None,
            room=room_of(self._seed, event.request_id) if self._by_room else None,
        )
        self._held[event.request_id] = event
        self._decide(offered)

    def _decide(self, fact: RouterFact) -> None:
        """Step the router with a fact, write the router's journal, and carry out the decisions."""
        if self._dispatcher is None:
            routed = self.router.step(fact)
            self._journal.append(fact, routed, self.router.digest)
            if routed is not None:
                self._carry_out(routed, fact.time_us)
        else:
            decided = self._dispatcher.step(fact)
            label = ""
            if isinstance(fact, RequestOffered):
                label = label_key(self._held[fact.request_id].label, fact.tenant)
            self._journal.append_decided(fact, decided, self._dispatcher.digest, label)
            for each in decided:
                self._carry_out(each, fact.time_us)

    def _carry_out(self, routed: RequestRouted, now_us: int) -> None:
        """Send a request to its engine, or reject it; a request that waits at the router is left there."""
        if routed.reason == "waits":
            return
        event = self._held.pop(routed.request_id)
        self.routed_by_reason[routed.reason] += 1
        if self._on_route is not None:
            self._on_route(routed)
        waited_us = now_us - event.time_us
        if routed.engine is None:
            turn = self.arrivals.open_turns[event.request_id]
            self.refused.append(
                RefusedRequest(event.request_id, event.time_us, now_us, turn.prompt_tokens, turn.label, event.tenant)
            )
            self.arrivals.broke_off(event.request_id, now_us)
            return
        if waited_us:
            self.waited_us[event.request_id] = waited_us
        if self._dispatcher is not None:
            event = self._numbered(event)
        if waited_us or self._hop_us:
            event = msgspec.structs.replace(event, time_us=now_us + self._hop_us)
        if not self._routes_ahead:
            self._send(routed.engine, event)
            return
        feed = self.lanes[routed.engine].feed
        feed.add(event)
        if feed.size >= SENT_AHEAD:
            self._advance_one(routed.engine, event.time_us)

    def _send(self, engine: int, event: Sent) -> None:
        lane = self.lanes[engine]
        lane.send(event)
        self._quiet_us[engine] = lane.quiet_until_us

    def _numbered(self, event: RequestArrived) -> RequestArrived:
        """Return the request with a new number. Engines require numbers that increase in the order of sending."""
        number = len(self.sent)
        self.sent.append(event.request_id)
        self._sent_turns[number] = self.arrivals.open_turns[event.request_id]
        return msgspec.structs.replace(event, request_id=number)

    # ------------------------------------------------------------------------------------- ends, reports and scaling

    def _next_us(self) -> int:
        """Return the time of the router's next known fact; ends count only while requests wait at the router."""
        next_us = self.arrivals.next_us
        if self._held and self._ended:
            next_us = min(next_us, self._ended[0][0])
        if self._scaler is None and not self._report_interval_us:
            return next_us
        if next_us == NEVER_US and not self.router.open and not self._held:
            return NEVER_US
        if self._scaler is not None:
            next_us = min(next_us, self._scaler.next_us)
        if self._reports:
            next_us = min(next_us, self._reports[0].time_us)
        return min(next_us, self._report_us)

    def _look_after(self, now_us: int) -> None:
        """Handle due reports and changes of replicas, before requests that arrive at the same time."""
        if now_us == self._report_us:
            self._report_us += self._report_interval_us
            self._advance_all(now_us)  # so that reports contain all work before `now_us`
            self._report_ends(now_us)
            due_us = now_us + self.setup.scenario.report_delay_us
            self._reports.extend(
                report_of(engine, lane.host.engine, now_us, due_us)
                for engine, lane in enumerate(self.lanes)
                if self.router.state[engine] != "down"
            )
        while self._reports and self._reports[0].time_us <= now_us:
            self._decide(self._reports.popleft())
        if self._scaler is not None and self._scaler.next_us <= now_us:
            self._scale(self._scaler, now_us)

    # mechanism: autoscaling (simulated)
    def _scale(self, scaler: Autoscaler, now_us: int) -> None:
        """Step the autoscaler with the observed load, and carry out its changes."""
        router = self.router
        waiting = [event for event in self._held.values() if event.request_id not in router.open]
        observed = LoadObserved(
            time_us=now_us,
            open=tuple(router.open_requests),
            open_tokens=sum(router.open_tokens)
            + sum(self.arrivals.open_turns[event.request_id].prompt_tokens for event in waiting),
            arrived=self.arrivals.arrived,
            waiting=len(waiting),
        )
        for changed in scaler.step(observed):
            engine = changed.engine
            if changed.state == "up":
                self._started.add(engine)
            if changed.state == "up" and router.state[engine] == "down" and self.lanes[engine].host.ended:
                self._flushes += 1  # a replica that starts has an empty cache
                self._send(engine, ControlRequested(now_us, self._flushes, Flush()))
            self._decide(changed)
        paid = sum(state != "off" for state in scaler.state)
        if not self._turns_on or self._turns_on[-1][1] != paid:
            self._turns_on.append((now_us, paid))

    def _on_end(self, engine: int, request_id: RequestId, now_us: int, answered: bool) -> None:
        """Record the end of a request on a lane. The router and the client receive it one hop later."""
        seen_us = now_us + self._hop_us
        if self._dispatcher is not None:
            del self._sent_turns[request_id]
            request_id = self.sent[request_id]
        turn = self.arrivals.open_turns[request_id]  # read now, because it is removed below
        heappush(self._ended, (seen_us, engine, request_id, turn.samples * turn.output_tokens if answered else 0))
        if answered:
            self.arrivals.answered(request_id, seen_us)
        else:
            self.arrivals.broke_off(request_id, seen_us)
        if self._leads is not None:
            self.lanes[engine].hold_at(self._leads.ended(engine, seen_us))
        else:
            held_us = seen_us if self._held else NEVER_US  # the end lets a waiting request be sent
            self.lanes[engine].hold_at(min(self.arrivals.next_us, held_us) + self._hop_us)
        self._ended_count += 1
        if self._on_finish is not None:
            self._on_finish(self._ended_count)

    def _report_ends(self, before_us: int) -> None:
        """Step the router with the ends that reach it before `before_us`."""
        while self._ended and self._ended[0][0] < before_us:
            time_us, _, request_id, output_tokens = heappop(self._ended)
            if self._routes_ahead:
                time_us = max(time_us, self.router.now_us)
            at = self.router.open.get(request_id)
            self._last_end_us = time_us
            if self._leads is not None and at is not None:
                self._leads.received(at.engine)
            self._decide(RequestEnded(time_us=time_us, request_id=request_id, output_tokens=output_tokens))
            scaler = self._scaler
            if scaler is not None and at is not None and scaler.state[at.engine] == "draining":
                if not self.router.open_requests[at.engine]:
                    self._scale(scaler, time_us)

    def describe_scaling(self) -> dict[str, Any] | None:
        """Return the cost of replicas, paid from their start to their release or the last end; None without scaling."""
        scaler, setup = self._scaler, self.setup
        if scaler is None:
            return None
        until_us = max(self._last_end_us, scaler.now_us)
        paid_us, gpus = scaler.paid_us(until_us), setup.engines[0].split.gpus
        hour_us = 3_600e6
        return {
            "replica_hours": round(paid_us / hour_us, 6),
            "gpu_hours": round(paid_us / hour_us * gpus, 6),
            "replica_hours_fixed": round(until_us * len(setup.engines) / hour_us, 6),
            **self._cost(until_us, gpus),
            "replicas_mean": round(paid_us / until_us, 6) if until_us else float(scaler.config.minimum),
            "replicas_max": scaler.most,
            "replicas_given": len(setup.engines),
            "starts": scaler.starts,
            "replicas_by_time": [list(pair) for pair in self._turns_on],
        }

    def _cost(self, until_us: int, gpus: int) -> dict[str, Any]:
        """Return the dollars of the replicas until a time, together and over time; empty without a price."""
        setup, price, kind = self.setup, self.setup.scenario.price, "given"
        if price is None:
            known = setup.engines[0].gpu.usd_per_gpu_hour
            kind = next((kind for kind in PRICE_KINDS if kind in known), "")
            if not kind:
                return {}
            price = PriceOfDay(((0, known[kind].value),))
        fixed = price.usd(0, until_us) * gpus * len(setup.engines)
        cost = cost_over_time(price, self._turns_on, until_us, gpus)
        return {"price_kind": kind, "usd_fixed": round(fixed, 4), **cost}

    def describe_admission(self) -> dict[str, Any] | None:
        """Return the number of requests that waited at the router, and their waits; None without a queue there."""
        if self._dispatcher is None:
            return None
        waits_us = sorted(self.waited_us.values())
        return {
            "waited": len(waits_us),
            "refused": len(self.refused),
            "wait_us_max": waits_us[-1] if waits_us else 0,
            "wait_us_mean": round(sum(waits_us) / len(waits_us), 3) if waits_us else None,
        }

    def result(self, stopped_early: bool, began_s: float) -> ClusterRun:
        """Return the measured run."""
        slos = self.setup.scenario.base.slos
        datas = [
            with_stages(metrics.result(slos), lane.host) for metrics, lane in zip(self.metrics, self.lanes, strict=True)
        ]
        data = combine(
            datas,
            hop_us=self._hop_us,
            slos=slos,
            waited_us=self.waited_us,
            refused=self.refused,
            sent=self.sent,
            started=self._started,
        )
        cpu_s = time.process_time() - began_s
        return ClusterRun(
            setup=self.setup,
            engines=tuple(
                Run(
                    setup=one,
                    data=measured,
                    batches=lane.host.batches,
                    clamped=lane.host.clamped,
                    rejected=lane.host.rejected,
                    never_sent=0,
                    interrupted=self._stop_requested,
                    cpu_s=cpu_s / len(self.lanes),
                )
                for one, measured, lane in zip(self.setup.engines, datas, self.lanes, strict=True)
            ),
            data=data,
            routed_by_reason=dict(sorted(self.routed_by_reason.items())),
            never_sent=self.arrivals.never_sent,
            interrupted=self._stop_requested,
            stopped_early=stopped_early,
            cpu_s=cpu_s,
            autoscale=self.describe_scaling(),
            admission=self.describe_admission(),
            sent=self.sent,
        )


def room_of(seed: int, request_id: RequestId) -> int:
    """Return the random room of a request, 63 bits as in SGLang, for the policy `follow_bootstrap_room`."""
    return int.from_bytes(blake2b(f"{seed} {request_id}".encode(), digest_size=8).digest(), "big") >> 1
