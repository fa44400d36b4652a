"""Interfaces of a host: where requests come from, where events, measures and KV go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from simpy import Environment, Event

from lockstep.core.contract.commands import (
    CancelTransfer,
    ProposeBatch,
    StartTransfer,
    Step,
)
from lockstep.core.contract.events import (
    BatchId,
    ControlRequested,
    ObservedEvent,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    RequestId,
    TransferAdvanced,
)
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.workload.turns import Turn

if TYPE_CHECKING:
    pass

NEVER_US = 2**62


class MetricsSink(Protocol):
    """What the host tells whoever measures; see `metrics.MetricsFold`."""

    def observe(self, event: ObservedEvent, step: Step) -> None:
        """Take in one event and its Step."""

    def gauge(self, time_us: int, waiting: int, running: int, free_pages: int, cached_pages: int) -> None:
        """Take in how things stand after a LaneReady."""

    def cpu_interval(self, start_us: int, stop_us: int, what: str) -> None:
        """Take in what the CPU lane did."""


class Observer(Protocol):
    """Who sees each step and the engine behind it. Not told of uniform stretches of decodes, which decide nothing."""

    def observe(self, event: ObservedEvent, step: Step, engine: Engine) -> None:
        """Take in one event and its Step; change nothing."""


class RequestSource(Protocol):
    """Where a lane's requests come from: `Arrivals`, or what a router sends it."""

    next_us: int

    @property
    def open_turns(self) -> Mapping[RequestId, Turn]:
        """Those that arrived and have not ended."""

    def take(self, max_new_tokens: int | None) -> RequestArrived | RequestCancelled | ControlRequested:
        """The next fact, due at `next_us`."""

    @property
    def settled_until_us(self) -> int:
        """Before this moment no request comes but those known now and those that follow this lane's own answers."""

    def more(self, env: Environment) -> Event | None:
        """What to wait for when nothing is due any more; None: nothing will come."""

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """An answer ended."""

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """A request was rejected, or its client left."""


class TransferPort(Protocol):
    """What moves KV between this engine and others, on a clock that they share; see `handover.Port`."""

    next_us: int

    def take(self, now_us: int) -> TransferAdvanced:
        """The next fact, due at `next_us`."""

    def perform(self, command: StartTransfer | CancelTransfer, now_us: int) -> None:
        """Carry out an order."""

    def collected(self, batch_id: BatchId, step: Step, now_us: int) -> None:
        """The result of a batch was taken in."""

    def pause(self, next_us: int) -> Event:
        """What to wait for until `next_us`, or until something comes before."""


class RankExchange(Protocol):
    """What ranks that run every pass together say to each other; see `data_parallel.RankPort`."""

    next_us: int

    def take(self, now_us: int) -> RanksAgreed | None:
        """The next fact, due at `next_us`; None: the others wait for what this rank would run."""

    def propose(self, command: ProposeBatch, now_us: int) -> None:
        """Tell the others."""

    def pause(self, next_us: int) -> Event:
        """What to wait for until `next_us`, or until something comes before."""
