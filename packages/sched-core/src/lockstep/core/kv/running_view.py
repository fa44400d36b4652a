"""The lowest views of the scheduler: its running batches, now or in a projected state.

Views are a chain of protocols. Each one extends the one before and documents only what it adds:

    RunningView < EngineView < AdmissionView (resource.py) < SchedulerView < LaunchView, AdminView (features/view.py)

`SchedulerState` implements all of them. A `RunningProjection` implements the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import RequestId
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.budget import NewTokenRatio
from lockstep.core.requests.microbatches import Microbatches
from lockstep.core.requests.table import Int32s, Request, RunningBatch


class RunningView(Protocol):
    """The active requests, their positions and the batches in flight."""

    @property
    def running_batch(self) -> RunningBatch:
        """The requests that decode together, in the microbatch whose launch is planned or was planned last."""

    @property
    def positions(self) -> Int32s:
        """The next position of each member of `running_batch`, int32 [members]."""

    @property
    def page_mask(self) -> Int32s:
        """Page size minus one, int32 without dimensions: `positions & page_mask` are offsets within pages."""

    @property
    def requests(self) -> Mapping[RequestId, Request]:
        """Every request that has not ended."""

    @property
    def in_flight(self) -> Sequence[InFlight]:
        """Batches that are launched and not collected, oldest first."""

    @property
    def ratio(self) -> NewTokenRatio:
        """The new-token ratio, by which `reserve` scales the remaining output of running requests."""


class RunningProjection(NamedTuple):
    """The decoding requests in a projected state: of all microbatches, or with some requests gone."""

    running_batch: RunningBatch
    positions: Int32s
    page_mask: Int32s
    requests: Mapping[RequestId, Request]
    in_flight: Sequence[InFlight]
    ratio: NewTokenRatio
    apart: tuple[RunningView, ...] = ()  # one view per microbatch, if there are several: each decodes by itself


class EngineView(RunningView, Protocol):
    """The settings and the microbatches of the engine."""

    @property
    def config(self) -> SchedConfig:
        """The settings. Some of them may change while the engine runs."""

    @property
    def microbatches(self) -> Microbatches:
        """The running batches, and the microbatch in which each running request has its place."""

    @property
    def all_running(self) -> tuple[RunningBatch, Int32s]:
        """All members of all running batches, and the next position of each, int32 [members]."""


def of_all_microbatches(engine: EngineView) -> RunningView:
    """Return a view of the decoding requests of all microbatches, so that none reserves pages that another needs."""
    if not engine.microbatches.several:
        return engine
    running_batch, positions = engine.all_running
    return by_microbatch(
        engine,
        RunningProjection(running_batch, positions, engine.page_mask, engine.requests, engine.in_flight, engine.ratio),
    )


def by_microbatch(engine: EngineView, projection: RunningProjection) -> RunningProjection:
    """Return a projection with its members also set apart by microbatch. Without several, return it unchanged."""
    if not engine.microbatches.several:
        return projection
    number_of = engine.microbatches.members
    numbers = np.array([number_of[one.request_id] for one in projection.running_batch.requests], np.int32)
    members = [(numbers == number).nonzero()[0] for number in np.unique(numbers)]
    parts = [
        projection._replace(running_batch=projection.running_batch.only(some), positions=projection.positions[some])
        for some in members
    ]
    return projection._replace(apart=tuple(parts))
