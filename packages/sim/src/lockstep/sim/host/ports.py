"""Interfaces of a simulated host: sources of requests, sinks of events and measures, ports of KV and of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from simpy import Environment, Event

from lockstep.core.contract.commands import (
    CancelTransfer,
    Command,
    ProposeBatch,
    StartTransfer,
    Step,
)
from lockstep.core.contract.events import (
    BatchFinished,
    BatchId,
    ObservedEvent,
    RanksAgreed,
    RequestId,
    TransferAdvanced,
)
from lockstep.core.requests.batching import InFlight
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.host.device import Running
from lockstep.sim.workload.turns import Turn

NEVER_US = 2**62


class MetricsSink(Protocol):
    """Receives the measurements of a host; `MetricsFold` implements it."""

    def observe(self, event: ObservedEvent, step: Step) -> None:
        """Record one event and its Step."""

    def gauge(self, time_us: int, waiting: int, running: int, free_pages: int, cached_pages: int) -> None:
        """Record queue lengths and pages after a LaneReady."""

    def cpu_interval(self, start_us: int, stop_us: int, what: str) -> None:
        """Record an interval [start_us:stop_us) of work of the CPU lane."""


class Observer(Protocol):
    """Receives each step, and the engine after it, except uniform stretches of decodes, in which nothing is decided."""

    def observe(self, event: ObservedEvent, step: Step, engine: Engine) -> None:
        """Receive one event and its Step. The observer must not change the engine."""


class RequestSource(Protocol):
    """Source of the requests of a CPU lane: `Arrivals`, the requests that a router sends to it, or recorded ones."""

    @property
    def next_us(self) -> int:
        """Time of the next fact; NEVER_US: none is known."""

    @property
    def open_turns(self) -> Mapping[RequestId, Turn]:
        """Turns that arrived and have not ended, by request."""

    def take(self, max_new_tokens: int | None) -> ObservedEvent:
        """Return the next fact, due at `next_us`."""

    @property
    def settled_until_us(self) -> int:
        """Time before which no request comes except the known ones and follow-ups of this lane's own answers."""

    def more(self, env: Environment) -> Event | None:
        """Return the event to wait for when nothing more is due; None: there will be no more requests."""

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """Record the end of an answer. `now_us` is when its client's next request can reach the engine."""

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """Record the rejection or the cancel of a request."""


class HostRecord(Protocol):
    """Facts of a run that a host simulates again, in place of its models; `rerun.facts.RecordedFacts` implements it.

    The clock of such a host counts the events of the recorded run: at time n its lane folds event n.
    """

    @property
    def offered(self) -> int:
        """The microbatch that the recorded host had offered a slot before the first event; -1: none."""

    @property
    def free_us(self) -> int:
        """Time at which the lane folds its next event."""

    def dated(self, event: ObservedEvent) -> ObservedEvent:
        """Return the event that is folded now, with the time at which the recorded host folded the event of its place.

        Call it once for each event.
        """

    def wake_us(self, wake_at_us: int | None) -> int | None:
        """Return when the recorded host reported that `wake_at_us` had passed, by this clock; None: never."""

    def order(self, command: Command) -> bool:
        """Take a command that some other event than a batch's result answers. Returns whether there was such an event.

        The answer comes at its place from the source of requests, and not before the order.
        """

    def forced(self, batch_id: BatchId) -> tuple[tuple[RequestId, int, bytes], ...]:
        """Return the tokens that were known to be forced behind a batch: entries of `TokensForced`."""

    def result(self, batch: Running, in_flight: Iterable[InFlight], now_us: int) -> BatchFinished:
        """Return the result of a batch that the lane collects at `now_us`, with the tokens of the recorded run."""


class TransferPort(Protocol):
    """Moves KV between this engine and others on a shared clock; `cluster.handover.Port` implements it."""

    next_us: int

    def take(self, now_us: int) -> TransferAdvanced:
        """Return the next fact, due at `next_us`."""

    def perform(self, command: StartTransfer | CancelTransfer, now_us: int) -> None:
        """Carry out a command."""

    def collected(self, batch_id: BatchId, step: Step, now_us: int) -> None:
        """Report that the result of a batch was collected."""

    def pause(self, next_us: int) -> Event:
        """Return the event to wait for: `next_us`, or an earlier fact."""


class RankExchange(Protocol):
    """Exchange between ranks that run every pass together; `cluster.data_parallel.RankPort` implements it."""

    next_us: int

    def take(self, now_us: int) -> RanksAgreed | None:
        """Return the next fact, due at `next_us`; None: the other ranks wait for this rank's proposal."""

    def propose(self, command: ProposeBatch, now_us: int) -> None:
        """Send a proposal to the other ranks."""

    def pause(self, next_us: int) -> Event:
        """Return the event to wait for: `next_us`, or an earlier fact."""
