"""One engine of a cluster on a clock of its own, which runs ahead as far as no other part of the cluster can affect it.

Engines meet at the router only: it sends a request, and it receives the end of an answer. Between two of these an
engine needs no interleaving with the others. An `EngineLane` stands still until its state matters to another part, and
then catches up in one go:

    others   --------a-----------a-----a-----------------a------>   arrivals that went elsewhere
    lane     ====================================|                  no answer could end before: not advanced until here

`quiet_until_us` is a lower bound: no answer of this engine ends before. It follows from the known ends of the batches
in flight, from the launches that must pass before the shortest answer is done, and from the least time of a launch. An
arrival before the bound does not advance the lane. `tests/sim/test_cluster.py` compares this with advancing every
engine at every arrival.
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

LEAST_SHARE = 0.5  # of a decode of one row: no launch takes less
LATER_SHARE = 0.9  # of the last decode: no later one of the same requests takes less, tables being bumpy

Sent = RequestArrived | RequestCancelled | ControlRequested

Ended = Callable[[int, RequestId, int, bool], None]
"""Called for every request that ends: engine, request, time in us, and whether it was answered."""


class LaneClock(Environment):
    """A clock with a horizon for its processes: at `horizon_us` another part of the cluster acts."""

    horizon_us: float = 0

    def peek(self) -> float:
        """Return when anything but the running process acts next."""
        own = super().peek()
        return own if own < self.horizon_us else self.horizon_us

    def next_own_us(self) -> float:
        """Return when a process of this clock acts next; infinite if none will."""
        return super().peek()


class Feed:
    """The requests that were sent to one engine; what `host.Arrivals` is to an engine that stands alone."""

    def __init__(self, engine: int, open_turns: Mapping[RequestId, Turn], ended: Ended, clock: LaneClock) -> None:
        self.open_turns = open_turns  # of the whole cluster
        self.next_us = NEVER_US
        self._engine = engine
        self._ended = ended
        self._clock = clock
        self._queue: deque[Sent] = deque()
        self._awaited: Event | None = None

    def add(self, event: Sent) -> None:
        """Send one more, not earlier than the one before."""
        self._queue.append(event)
        self.next_us = self._queue[0].time_us
        if self._awaited is not None:
            self._awaited.succeed()
            self._awaited = None

    def take(self, _max_new_tokens: int | None) -> Sent:
        """The next fact, due at `next_us`; its limit was set where it came from."""
        event = self._queue.popleft()
        self.next_us = self._queue[0].time_us if self._queue else NEVER_US
        return event

    @property
    def settled_until_us(self) -> int:
        """The router may send another one from here on."""
        return int(min(self._clock.horizon_us, NEVER_US))

    def more(self, env: Environment) -> Event | None:
        """The router may always send another one."""
        self._awaited = env.event()
        return self._awaited

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """An answer ended."""
        self._ended(self._engine, request_id, now_us, True)

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """A request was rejected, or its client left."""
        self._ended(self._engine, request_id, now_us, False)


class EngineLane:
    """One engine of a cluster.

    Args:
        host: on a `LaneClock` of its own, with a `Feed`.
        cost: of its batches; a model that draws durations promises less.
        early_ends: whether answers may end before their length, so that any batch may end one.
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
        self._least_us = LEAST_SHARE * last_stage_us  # one launch may end a stage's time behind another
        self.quiet_until_us: float = NEVER_US
        clock.process(host.run())
        clock.horizon_us = 0

    def send(self, event: Sent) -> None:
        """Send a request, a cancel or a control request to this engine."""
        self.feed.add(event)
        self.quiet_until_us = self._quiet_until_us()

    def advance(self, until_us: float) -> None:
        """Do everything that is due before `until_us`."""
        clock = self.clock
        clock.horizon_us = until_us
        while clock.next_own_us() < clock.horizon_us:  # which an answer may bring nearer
            clock.step()
        self.quiet_until_us = self._quiet_until_us()

    def hold_at(self, until_us: float) -> None:
        """Set the horizon to `until_us`, where another part of the cluster acts."""
        if until_us < self.clock.horizon_us:
            self.clock.horizon_us = until_us

    def _quiet_until_us(self) -> float:
        """Return a time before which no request of this engine ends; see the module."""
        wakes_us = self.clock.next_own_us()
        if wakes_us > NEVER_US:
            return NEVER_US  # it has nothing to do
        host = self.host
        end_us = min(self._earliest_end_us(wakes_us), self.feed.next_us)  # the next request may be rejected at once
        if host.wake_at_us is not None:
            end_us = min(end_us, host.wake_at_us)
        return max(end_us, wakes_us)

    def _earliest_end_us(self, now_us: float) -> float:
        """Return the earliest time of a result that ends an answer."""
        engine, queue = self.host.engine, self.host.device.queue
        if not engine.requests:
            return NEVER_US
        if self.host.device.untimed:
            return now_us
        for batch, running in zip(engine.in_flight, queue, strict=True):
            if batch.ending or batch.dead or batch.plan.extend_rows or self._early_ends:
                return running.finished_us
        known = len(queue)
        further = self._launches_without_end()  # behind those in flight; the one after these may end an answer
        if self._draws:
            return queue[-1].finished_us if known else now_us
        launch_us = self._least_us
        if known and further and not self._overlaps and engine.in_flight[-1].samplers is engine.running_batch:
            launch_us = LATER_SHARE * (queue[-1].finished_us - queue[-1].started_us)  # later contexts are longer
        return (queue[-1].finished_us if known else now_us) + int((further + 1) * launch_us)

    def _launches_without_end(self) -> int:
        """Return a lower bound of launches to come that end no request; 0 if there is none."""
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
        # A retraction shrinks the running batch and admits others: count only launches with pages for certain.
        fitting = (engine.memory.available_pages // running_batch.size - 1) * config.page_size
        return max(min(engine.microbatches.current.horizon, fitting) - 1, 0)
