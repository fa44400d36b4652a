"""What pools beside full attention read of the engine: its running batches as they stand, or as they will stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import RequestId
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.budget import NewTokenRatio
from lockstep.core.requests.microbatches import Microbatches
from lockstep.core.requests.table import Int32s, Request, RunningBatch


class Runners(Protocol):
    """The active requests and their positions: of an engine with one running batch, or of a hypothetical state."""

    @property
    def running_batch(self) -> RunningBatch: ...
    @property
    def positions(self) -> Int32s: ...
    @property
    def page_mask(self) -> Int32s: ...
    @property
    def requests(self) -> Mapping[RequestId, Request]: ...
    @property
    def in_flight(self) -> Iterable[InFlight]: ...
    @property
    def ratio(self) -> NewTokenRatio: ...


class Stand(NamedTuple):
    """Decoding requests and their positions in a hypothetical state: see `all_running`, `Hybrid.would_start`."""

    running_batch: RunningBatch
    positions: Int32s
    page_mask: Int32s
    requests: Mapping[RequestId, Request]
    in_flight: Iterable[InFlight]
    ratio: NewTokenRatio
    apart: tuple[Runners, ...] = ()  # the same by microbatch, where there are several: each decodes in its turn


class EngineView(Runners, Protocol):
    """What hybrid pools read of the engine beside that: its settings, its memory and its microbatches."""

    @property
    def config(self) -> SchedConfig: ...
    @property
    def microbatches(self) -> Microbatches: ...
    @property
    def all_running(self) -> tuple[RunningBatch, Int32s]: ...


def all_running(engine: EngineView) -> Runners:
    """Those that decode, of all microbatches where there are several: what is left to one is not promised to others."""
    if not engine.microbatches.several:
        return engine
    running_batch, positions = engine.all_running
    stand = Stand(running_batch, positions, engine.page_mask, engine.requests, engine.in_flight, engine.ratio)
    return by_microbatch(engine, stand)


def by_microbatch(engine: EngineView, stand: Stand) -> Stand:
    if not engine.microbatches.several:
        return stand
    number_of = engine.microbatches.members
    numbers = np.array([number_of[one.request_id] for one in stand.running_batch.requests], np.int32)
    members = [(numbers == number).nonzero()[0] for number in np.unique(numbers)]
    parts = [
        stand._replace(running_batch=stand.running_batch.only(some), positions=stand.positions[some])
        for some in members
    ]
    return stand._replace(apart=tuple(parts))
