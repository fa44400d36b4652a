"""One engine of a cluster with its own clock, which advances only when its state matters to the rest of the cluster.

Engines interact at the router only: it sends requests, and it receives ends of answers. Between two of these an engine
needs no interleaving with the others. An `EngineLane` is not advanced until its state matters to another part, and then
catches up in one go:

    others   --------a-----------a-----a-----------------a------>   arrivals that were routed to other engines
    lane     ====================================|                  no answer could end before this time

`quiet_until_us` is a lower bound of the time at which the next answer of this engine ends. It follows from the known
ends of the batches in flight, from the launches that must pass before the shortest answer is done, and from the least
time of a launch. An arrival before the bound does not advance the lane. `tests/sim/test_cluster.py` compares this with
advancing every engine at every arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from simpy import Environment, Event

from lockstep.core.contract.events import ControlRequested, RequestArrived, RequestCancelled, RequestId
from lockstep.sim.cost import BatchShape, CostModel
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.cost.tables import unnoted
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.workload.turns import Turn

LEAST_SHARE = 0.5  # least time of a launch, as a share of the time of a decode of one row
LATER_SHARE = 0.9  # least time of a later decode of the same requests, as a share of the last: tables are not monotone

Sent = RequestArrived | RequestCancelled | ControlRequested

Ended = Callable[[int, RequestId, int, bool], None]
"""Callback for every request that ends: engine, request, time in us, and whether it was answered."""


class LaneClock(Environment):
    """A clock with a horizon for its processes: at `horizon_us` another part of the cluster acts."""

    horizon_us: float = 0

    def peek(self) -> float:
        """Return the next time at which another process of this clock or another part of the cluster acts."""
        own = super().peek()
        return own if own < self.horizon_us else self.horizon_us

    def next_own_us(self) -> float:
        """Return the next time at which a process of this clock acts; infinite if there is none."""
        return super().peek()


class Feed:
    """The requests that were sent to one engine: the counterpart of `arrivals.Arrivals` in a cluster."""

    def __init__(self, engine: int, open_turns: Mapping[RequestId, Turn], ended: Ended, clock: LaneClock) -> None:
        self.open_turns = open_turns  # open turns of the whole cluster
        self.next_us = NEVER_US
        self._engine = engine
        self._ended = ended
        self._clock = clock
        self._queue: deque[Sent] = deque()
        self._awaited: Event | None = None

    def add(self, event: Sent) -> None:
        """Queue a fact. Its time must not be before that of the last one."""
        self._queue.append(event)
        self.next_us = self._queue[0].time_us
        if self._awaited is not None:
            self._awaited.succeed()
            self._awaited = None

    def take(self, _max_new_tokens: int | None) -> Sent:
        """Return the next fact, due at `next_us`. The cluster has already applied the limit of new tokens."""
        event = self._queue.popleft()
        self.next_us = self._queue[0].time_us if self._queue else NEVER_US
        return event

    @property
    def settled_until_us(self) -> int:
        """Time from which on the router may send further requests."""
        return int(min(self._clock.horizon_us, NEVER_US))

    def more(self, env: Environment) -> Event | None:
        """Return an event that the next call of `add` triggers."""
        self._awaited = env.event()
        return self._awaited

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """Report the end of an answer to the cluster."""
        self._ended(self._engine, request_id, now_us, True)

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """Report the rejection or the cancel of a request to the cluster."""
        self._ended(self._engine, request_id, now_us, False)


class EngineLane:
    """One engine of a cluster.

    Args:
        host: host of the engine, on its own `LaneClock` and with a `Feed`.
        cost: cost model of the engine; with random durations the lower bounds are smaller.
        early_ends: whether answers may end before their length, so that any batch may end an answer.
    """

    def __init__(self, host: EngineHost, feed: Feed, clock: LaneClock, cost: CostModel, *, early_ends: bool) -> None:
        self.host = host
        self.feed = feed
        self.clock = clock
        self._early_ends = early_ends
        shape = BatchShape(decode_rows=1, decode_context_tokens=1)
        with unnoted(cost):
            one_row = cost.batch_us(shape)
            last_stage_us = cost.stage_us(shape)[-1] if isinstance(cost, PipelineModel) else one_row.mean_us
        self._draws = one_row.spread_us > 0
        self._overlaps = isinstance(cost, PipelineModel)
        self._least_us = LEAST_SHARE * last_stage_us  # in a pipeline, ends are at least a stage's time apart
        self.quiet_until_us: float = NEVER_US
        clock.process(host.run())
        clock.horizon_us = 0

    def send(self, event: Sent) -> None:
        """Send a request, a cancel or a control request to this engine."""
        self.feed.add(event)
        self.quiet_until_us = self._quiet_until_us()

    def advance(self, until_us: float) -> None:
        """Do all work that is due before `until_us`."""
        clock = self.clock
        clock.horizon_us = until_us
        while clock.next_own_us() < clock.horizon_us:  # the end of an answer may lower the horizon
            clock.step()
        self.quiet_until_us = self._quiet_until_us()

    def hold_at(self, until_us: float) -> None:
        """Set the horizon to `until_us`, where another part of the cluster acts."""
        if until_us < self.clock.horizon_us:
            self.clock.horizon_us = until_us

    def _quiet_until_us(self) -> float:
        """Return a time before which no request of this engine ends; see the module's docstring."""
        wakes_us = self.clock.next_own_us()
        if wakes_us > NEVER_US:
            return NEVER_US  # the engine is idle
        host = self.host
        end_us = min(self._earliest_end_us(wakes_us), self.feed.next_us)  # the next request may be rejected at once
        if host.wake_at_us is not None:
            end_us = min(end_us, host.wake_at_us)
        return max(end_us, wakes_us)

    def _earliest_end_us(self, now_us: float) -> float:
        """Return a lower bound of the time of the next result that ends an answer."""
        engine, queue = self.host.engine, self.host.device.queue
        if not engine.requests:
            return NEVER_US
        if self.host.device.untimed:
            return now_us
        for batch, running in zip(engine.in_flight, queue, strict=True):
            if batch.ending or batch.dead or batch.plan.extend_rows or self._early_ends:
                return running.finished_us
        known = len(queue)
        further = self._launches_without_end()  # after the batches in flight; the next launch may end an answer
        if self._draws:
            return queue[-1].finished_us if known else now_us
        launch_us = self._least_us
        if known and further and not self._overlaps and engine.in_flight[-1].samplers is engine.running_batch:
            launch_us = LATER_SHARE * (queue[-1].finished_us - queue[-1].started_us)  # later contexts are longer
        return (queue[-1].finished_us if known else now_us) + int((further + 1) * launch_us)

    def _launches_without_end(self) -> int:
        """Return a lower bound of the number of future launches that end no request."""
        engine = self.host.engine
        config, running_batch = engine.config, engine.running_batch
        alone = not engine.waiting or (engine.batch_is_full and not config.enable_priority_preemption)
        if (
            not alone
            or engine.blocked
            or engine.prefilling is not None
            or not running_batch.size
            or config.decode_steps_per_launch > 1
            or config.speculates
            or config.jumps
            or config.retract_every
            or engine.memory.adapters.present
            or engine.microbatches.several
        ):
            return 0
        # A retraction would change the running batch, so only launches that are sure to have pages count.
        fitting = (engine.memory.available_pages // running_batch.size - 1) * config.page_size
        return max(min(engine.microbatches.current.horizon, fitting) - 1, 0)
