"""A simulated cluster of prefill and decode engines: routes, transfers of KV, and their times.

These engines interact in the middle of a request, not only at the router, so they share one clock. A request is routed
twice at its arrival, to a prefill and to a decode engine. Its KV is sent part by part over `Links`, by commands of the
hosts:

    decode   | pages  ...........................................  done | decode | decode | ...
    prefill      accepted | chunk 1 | chunk 2 (last) |                  ^
    link                            | part 1 |       | part 2 + first token
             every message between hosts takes the latency of the way between them: placement.py

A part begins when the lane of the prefill engine has collected the result of its batch and both sides have pages. The
decode engines stream to the clients: the first token is streamed after the end of the transfer.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from simpy import Environment, Event

from lockstep.core.cluster.router import EngineShare, Router, RouterConfig
from lockstep.core.contract.commands import CancelTransfer, StartTransfer, Step, StreamTokens
from lockstep.core.contract.events import BatchId, RequestArrived, RequestId, TransferAdvanced
from lockstep.core.journal.sinks import JournalSink
from lockstep.sim.cluster.data_parallel import Ranked, summed
from lockstep.sim.cluster.metrics import combine_handover
from lockstep.sim.cluster.network import Flow, Links, later
from lockstep.sim.cluster.placement import Ways
from lockstep.sim.cluster.shared_clock import Routing, SharedClock, SharedFeed
from lockstep.sim.host.host_options import HostLinks
from lockstep.sim.host.hybrid_memory import PartSize, TransferBytes
from lockstep.sim.host.pipeline import with_stages
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.run.simulate import host_of, watch_of
from lockstep.sim.workload.turns import Turn

if TYPE_CHECKING:
    from lockstep.host.router_journal import NoRouterJournal, RouterJournal
    from lockstep.sim.cluster.result import ClusterRun
    from lockstep.sim.cluster.setup import ClusterSetup

DECODE_ROUTER = RouterConfig(policy="least_tokens")
"""Memory is the first limit of a decode engine, so requests go to the engine with the fewest tokens."""


@dataclass(eq=False)
class Room:
    """One transfer between two engines. Its id is the id of the request, on both sides."""

    request_id: RequestId
    prefill: int
    decode: int
    prompt_tokens: int
    arrived_us: int
    parts: deque[StartTransfer] = field(default_factory=deque)  # parts that are not sent yet
    ready: int = 0  # number of leading parts whose batches are collected
    receive: StartTransfer | None = None  # command of the decode engine; None: it has not allocated pages yet
    flow: Flow | None = None  # the part on its way
    first_token: int = 0
    over: bool = False  # done or failed: no part is sent any more
    given_us: int = 0  # when the decode engine allocated pages
    computed_us: int = 0  # when the last part was ready


class TransferTimes:
    """Times and sizes of transfers, for metrics.json."""

    def __init__(self) -> None:
        self.wait_us: list[int] = []  # from arrival to allocation of pages on the decode engine
        self.behind_us: list[int] = []  # from readiness of the last part, or allocation if later, to the end
        self.sent = PartSize(0, 0, 0)
        self.tokens_cached = 0  # prompt tokens that were cached on the decode engine
        self.failed = 0

    def describe(self, ways: Ways, sizes: TransferBytes, makespan_us: int | None, *, hybrid: bool) -> dict[str, Any]:
        """Return all figures; times in microseconds. `hybrid`: whether windows and states have separate pools."""
        beside = {
            "window_bytes_per_token": sizes.window_token,
            "transferred_window_tokens": self.sent.window_tokens,
            "state_bytes_per_request": sizes.state,
            "transferred_states": self.sent.states,
        }
        return {
            "transfers": len(self.behind_us),
            "transfers_failed": self.failed,
            "transferred_tokens": self.sent.tokens,
            "transferred_bytes": round(ways.sent_bytes),
            "tokens_not_sent": self.tokens_cached,
            "kv_bytes_per_token": sizes.token,
            **(beside if hybrid else {}),
            **_quantiles("page_wait", self.wait_us),
            **_quantiles("transfer", self.behind_us),
            **ways.describe(makespan_us),
        }


def _quantiles(name: str, values: Sequence[int]) -> dict[str, float | None]:
    if not values:
        return {f"{name}_us_{part}": None for part in ("mean", "p50", "p99")}
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {f"{name}_us_mean": round(float(np.mean(values)), 3), f"{name}_us_p50": p50, f"{name}_us_p99": p99}


class Fabric:
    """Carries out the transfer commands of the hosts, and delivers the outcomes to the hosts."""

    def __init__(self, env: Environment, ways: Ways, *, sizes: TransferBytes, page_tokens: int) -> None:
        self.env = env
        self.ways = ways
        self.times = TransferTimes()
        self.ports: list[Port] = []
        self.rooms: dict[RequestId, Room] = {}
        self._sizes = sizes
        self._page_tokens = page_tokens  # equal on all engines with hybrid memory
        self._behind: dict[
            tuple[int, BatchId | None], list[Room]
        ] = {}  # by engine and batch: rooms with a part of the batch

    def open(self, room: Room) -> None:
        """Open the room of a routed request."""
        self.rooms[room.request_id] = room

    def perform(self, engine: int, command: StartTransfer | CancelTransfer, now_us: int) -> None:
        """Carry out a command of one engine. Commands of transfers that are over are ignored."""
        room = self.rooms.get(command.transfer_id)
        if room is None or room.over:
            return
        if isinstance(command, CancelTransfer):
            heard_us = now_us if engine == room.prefill else now_us + self._latency_us(room)
            self._at(heard_us, lambda: self._stop(room))
        elif command.direction == "receive":
            room.given_us = now_us
            self.times.wait_us.append(now_us - room.arrived_us)
            self._at(now_us + self._latency_us(room), lambda: self._accept(room, command))
        else:
            room.parts.append(command)
            self._behind.setdefault((engine, command.after_batch), []).append(room)
            if command.last:
                self._at(now_us + self._latency_us(room), lambda: self._tell(room, room.decode, "offered"))

    def collected(self, engine: int, batch_id: BatchId, step: Step, now_us: int) -> None:
        """Release the parts of a collected batch at `now_us`."""
        rooms = self._behind.pop((engine, batch_id), ())
        if not rooms:
            return
        tokens = {
            request_id: token
            for command in step.commands
            if type(command) is StreamTokens
            for request_id, token in zip(command.request_ids.tolist(), command.tokens.tolist(), strict=True)
        }
        for room in rooms:
            room.first_token = tokens.get(room.request_id, room.first_token)
        self._at(now_us, lambda: self._release(rooms))

    def _release(self, rooms: Sequence[Room]) -> None:
        for room in rooms:
            room.ready += 1
            if room.ready == len(room.parts) and room.parts[-1].last:
                room.computed_us = int(self.env.now)
            self._move(room)

    def _accept(self, room: Room, command: StartTransfer) -> None:
        room.receive = command
        self._tell(room, room.prefill, "accepted", start_tokens=command.start_tokens)
        self._move(room)

    def _move(self, room: Room) -> None:
        """Send the next part, if it is ready, both sides have pages, and no other part is on its way."""
        if room.over or room.receive is None or room.flow is not None or not room.ready:
            return
        part = room.parts[0]
        start = max(part.start_tokens, room.receive.start_tokens)
        size, sent = self._sizes.of_part(part, start, self._page_tokens)
        self.times.sent = PartSize(*(one + more for one, more in zip(self.times.sent, sent, strict=True)))
        links, _ = self.ways.between(room.prefill, room.decode)
        room.flow = links.start(room.prefill, room.decode, size, lambda: self._moved(room, part))

    def _moved(self, room: Room, part: StartTransfer) -> None:
        room.flow = None
        room.parts.popleft()
        room.ready -= 1
        if not part.last:
            self._move(room)
            return
        room.over = True
        self._at(int(self.env.now) + self._latency_us(room), lambda: self._done(room, part))

    def _done(self, room: Room, part: StartTransfer) -> None:
        assert room.receive is not None
        self.times.behind_us.append(int(self.env.now) - max(room.computed_us, room.given_us))
        self.times.tokens_cached += room.receive.start_tokens
        about = {"weights_version": part.weights_version, "cached_tokens": part.cached_tokens}
        self._tell(room, room.prefill, "done", **about)
        self._tell(room, room.decode, "done", first_token=room.first_token, **about)
        del self.rooms[room.request_id]

    def _stop(self, room: Room) -> None:
        """End a transfer on the sender's side: nothing more is sent, and both hosts receive the outcome."""
        if room.over:
            return
        room.over = True
        self.times.failed += 1
        if room.flow is not None:
            self.ways.between(room.prefill, room.decode)[0].stop(room.flow)
        self._tell(room, room.prefill, "failed")
        self._at(int(self.env.now) + self._latency_us(room), lambda: self._tell(room, room.decode, "failed"))
        del self.rooms[room.request_id]

    def _latency_us(self, room: Room) -> int:
        return self.ways.between(room.prefill, room.decode)[1]

    def _tell(self, room: Room, engine: int, status: Any, **about: Any) -> None:
        source = f"engine{room.decode if engine == room.prefill else room.prefill}"
        self.ports[engine].deliver(TransferAdvanced(0, room.request_id, source, 0, 0, status, **about))

    def _at(self, time_us: int, act: Callable[[], None]) -> None:
        later(self.env, time_us - int(self.env.now), act)


class Port:
    """One host's end of the fabric, with facts on their way to it."""

    def __init__(self, fabric: Fabric, engine: int, feed: SharedFeed) -> None:
        self._fabric = fabric
        self._engine = engine
        self._feed = feed
        self._inbox: deque[tuple[int, TransferAdvanced]] = deque()
        self._seq = 0
        self.next_us = NEVER_US
        fabric.ports.append(self)

    def deliver(self, event: TransferAdvanced) -> None:
        """Queue a fact for this host, dated with the present time."""
        now_us = int(self._fabric.env.now)
        self._inbox.append((now_us, msgspec.structs.replace(event, seq=self._seq)))
        self._seq += 1
        self.next_us = self._inbox[0][0]
        self._feed.poke()

    def take(self, now_us: int) -> TransferAdvanced:
        """Return the next fact, due at `next_us`."""
        _, event = self._inbox.popleft()
        self.next_us = self._inbox[0][0] if self._inbox else NEVER_US
        return msgspec.structs.replace(event, time_us=now_us)

    def pause(self, next_us: int) -> Event:
        """Return the event to wait for: `next_us`, or an earlier fact for this host."""
        return self._feed.pause(self._fabric.env, next_us)

    def perform(self, command: StartTransfer | CancelTransfer, now_us: int) -> None:
        """Pass a command to the fabric."""
        self._fabric.perform(self._engine, command, now_us)

    def collected(self, batch_id: BatchId, step: Step, now_us: int) -> None:
        """Report to the fabric that the result of a batch was collected."""
        self._fabric.collected(self._engine, batch_id, step, now_us)


# mechanism: prefill-and-decode-engines (simulated)
class HandoverCluster:
    """Prefill and decode engines behind two routers, on one clock."""

    def __init__(
        self,
        setup: ClusterSetup,
        journals: list[JournalSink],
        router_journals: tuple[RouterJournal | NoRouterJournal, RouterJournal | NoRouterJournal],
        *,
        check_every: int = 0,
        on_finish: Callable[[int], None] | None = None,
    ) -> None:
        self.setup = setup
        self.clock: SharedClock[HandoverCluster] = SharedClock(setup, self._route, on_finish)
        self.env = self.clock.env
        roles = [str(one.config.role) for one in setup.engines]
        self.engines_of = {role: [i for i, own in enumerate(roles) if own == role] for role in ("prefill", "decode")}
        configs = {"prefill": setup.scenario.router, "decode": DECODE_ROUTER}
        self.routing = {
            role: Routing(Router(config, self._shares(role)), journal, self.engines_of[role])
            for (role, config), journal in zip(configs.items(), router_journals, strict=True)
        }
        self._hop_us = setup.scenario.hop_us
        speeds = [setup.link_bytes_per_us(one) for one in setup.engines]
        network = Links(self.env, speeds, speeds)
        scenario = setup.scenario
        ways = Ways(self.env, network, scenario.link_latency_us, setup.placed(), scenario.placement)
        first = setup.engines[0]
        self.hybrid = first.config.hybrid is not msgspec.UNSET
        self.sizes = TransferBytes.of(first.model, first.scenario.kv_dtype, hybrid=self.hybrid)
        self.fabric = Fabric(self.env, ways, sizes=self.sizes, page_tokens=first.config.page_size)
        self.ranks = Ranked(self.env)
        self.feeds: list[SharedFeed] = []
        self.metrics: list[MetricsFold] = []
        for engine, (one, journal) in enumerate(zip(setup.engines, journals, strict=True)):
            feed = SharedFeed(self.env, functools.partial(self._ended, roles[engine]))
            port, name = Port(self.fabric, engine, feed), f"engine{engine}"
            if one.config.shares_passes:
                host, metrics = self.ranks.host_of(one, feed, journal, name=name, check_every=check_every, port=port)
            else:
                watch, to = watch_of(check_every), HostLinks(port=port)
                host, metrics = host_of(one, feed, journal, env=self.env, name=name, watch=watch, links=to)
            self.feeds.append(feed)
            self.clock.hosts.append(host)
            self.metrics.append(metrics)

    def _shares(self, role: str) -> tuple[EngineShare, ...]:
        return tuple(self.setup.shares[engine] for engine in self.engines_of[role])

    @property
    def client_metrics(self) -> list[MetricsFold]:
        """Metrics of the engines that stream to clients."""
        return [self.metrics[engine] for engine in self.engines_of["decode"]]

    @property
    def stop_requested(self) -> bool:
        """Whether a signal handler requested the end of the run; see `SharedClock`."""
        return self.clock.stop_requested

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self.clock.stop_requested = value

    def run(self, give_up: Callable[[HandoverCluster], bool] | None = None) -> bool:
        """Route every request and finish every answer. Return whether `give_up` stopped the arrivals early."""
        return self.clock.run(self, give_up)

    def _route(self, event: RequestArrived, turn: Turn) -> None:
        prefill, decode = (self.routing[role].engine_for(event, turn) for role in ("prefill", "decode"))
        time_us = event.time_us + self._hop_us
        if turn.output_tokens:
            self.fabric.open(Room(event.request_id, prefill, decode, turn.prompt_tokens, time_us))
            event = msgspec.structs.replace(event, time_us=time_us, transfer_room=event.request_id)
        for engine in (prefill, decode):
            self.clock.at(time_us, functools.partial(self.feeds[engine].add, event, turn))

    def _ended(self, role: str, request_id: RequestId, now_us: int, answered: bool) -> None:
        """Record the end of a request on an engine of a role. One hop later its router receives the end.

        The client receives the end on a decode engine, also one hop later.
        """
        seen_us, decodes = now_us + self._hop_us, role == "decode"
        output_tokens = self.clock.output_tokens(request_id) if answered and decodes else 0
        self.clock.at(seen_us, functools.partial(self.routing[role].tell_end, seen_us, request_id, output_tokens))
        if decodes:
            self.clock.see_end(request_id, seen_us, answered)

    def result(self, stopped_early: bool, began_s: float) -> ClusterRun:
        """Return the measured run."""
        slos = self.setup.scenario.base.slos
        datas = [
            with_stages(metrics.result(slos), host)
            for metrics, host in zip(self.metrics, self.clock.hosts, strict=True)
        ]
        data = combine_handover(
            datas, self.engines_of["decode"], hop_us=self._hop_us, slos=slos, encoders=self.setup.encoders
        )
        makespan_us = data.summary["throughput"]["makespan_us"]
        times, ways = self.fabric.times, self.fabric.ways
        data.summary["transfers"] = times.describe(ways, self.sizes, makespan_us, hybrid=self.hybrid)
        for role in ("prefill", "decode") if self.ranks.groups else ():
            data.summary[f"ranks_{role}"] = summed([one.counts for one in self.ranks.groups if one.role == role])
        return self.clock.measured(data, datas, self.routing["prefill"].by_reason, stopped_early, began_s)
