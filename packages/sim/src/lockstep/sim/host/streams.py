"""The device of an engine with PD multiplexing: two streams that run at the same time and share the memory.

    prompts  | p layers 0-15        | p layers 16-31 ...         each stream runs its batches one after another
    decodes  | d | d | d | d | d | d | ...

The end of a batch depends on what runs beside it, so it is known only as far as batches are launched. Between two
changes (a launch, a start, an end) the oldest batch of each stream runs at a constant speed: 1, or less where both
together demand more of the memory than there is (`sim/cost/multiplexing.py`). `queue` has the ends as they are if
nothing more is launched. A later launch can only move ends that lie behind it, so an end that is due is final.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.events import BatchId
from lockstep.sim.cost import BatchShape
from lockstep.sim.cost.draws import drawn_factor
from lockstep.sim.cost.multiplexing import MultiplexedModel
from lockstep.sim.host.device import Device, Running, Untimed

ALMOST_DONE_US = 1e-6  # of rounding in sums of times


class StreamedBatch(Struct):
    """A batch on a stream, and how much of it is left."""

    plan: BatchPlan
    tokens: bytes
    ready_us: float  # it begins no earlier
    left_us: float  # at full speed
    demand: float  # share of the memory's rate at full speed
    sampled_us: float  # it ends no earlier: the time at which its matchers have moved
    started_us: float = math.inf

    def copy(self) -> StreamedBatch:
        """Return a copy, whose progress may be followed apart."""
        return StreamedBatch(
            self.plan, self.tokens, self.ready_us, self.left_us, self.demand, self.sampled_us, self.started_us
        )


class StreamsDevice(Device):
    """Two streams of one device."""

    def __init__(self, cost: MultiplexedModel, rows_max: int, *, seed: int, name: str, early_eos: bool) -> None:
        super().__init__(cost, rows_max, seed=seed, name=name, early_eos=early_eos)
        self._cost = cost
        self._streams: tuple[list[StreamedBatch], list[StreamedBatch]] = ([], [])  # of decodes, of prompts
        self._settled_us = 0.0  # time up to which the progress of the streams is followed
        self._held_us = 0  # no batch that is handed over from now on begins earlier
        self._ended: list[Running] = []  # batches that ended, up to that time
        self._shown: list[BatchId] = []  # batches in `queue` when it was made

    def launch(self, plan: BatchPlan, shape: BatchShape, handed_over_us: int) -> None:
        """Run `plan` behind the batches of its stream. Its tokens are drawn now, before its rows change requests."""
        on_stream = self._cost.on_stream(shape, plan.sms, plan.layers)
        us = on_stream.alone_us
        for step in range(1, plan.steps):
            further = replace(shape, decode_context_tokens=shape.decode_context_tokens + step * shape.decode_rows)
            us += self._cost.on_stream(further, plan.sms, None).alone_us
        us *= drawn_factor(self.cost.batch_us(shape), f"{self._seed} {self._name}", plan.batch_id)
        tokens = self._sample(plan).tobytes()
        waits = plan.sample_after is not None
        self._settle(handed_over_us)
        ready_us = float(max(handed_over_us, self._held_us))
        one = StreamedBatch(plan, tokens, ready_us, max(us, 1.0), on_stream.demand, math.inf if waits else 0.0)
        self._streams[plan.layers is not None].append(one)
        if waits:
            self.untimed.append(Untimed(plan, handed_over_us, us, 0.0, tokens, None))
        self._show()

    def sample(self, batch_id: BatchId, at_us: int) -> None:
        """Let a deferred batch sample, because its matchers have moved."""
        self._settle(at_us)
        for one in (*self._streams[0], *self._streams[1]):
            if one.plan.batch_id == batch_id:
                one.sampled_us = at_us
        waiting = [one for one in self.untimed if one.plan.batch_id != batch_id]
        self.untimed.clear()
        self.untimed.extend(waiting)
        self._show()

    @property
    def free_us(self) -> int:
        """Time at which all batches handed over will have run, as far as it is known."""
        return max([one.finished_us for one in self.queue], default=self._held_us)

    def hold_until(self, us: int) -> None:
        """Delay the start of batches handed over from now on to `us`."""
        self._held_us = max(self._held_us, us)

    def _settle(self, us: float) -> None:
        """Follow the progress of both streams up to `us`. Batches that have ended leave them."""
        there = [one.batch_id for one in self.queue]
        taken = [batch_id for batch_id in self._shown if batch_id not in there]
        self._ended += followed(self._streams, self._settled_us, us)
        self._ended = [one for one in self._ended if one.batch_id not in taken]
        self._settled_us = max(self._settled_us, us)

    def _show(self) -> None:
        """Set `queue` to the batches that were not taken from it, in the order in which they end."""
        ahead = ([one.copy() for one in self._streams[0]], [one.copy() for one in self._streams[1]])
        ended = [*self._ended, *followed(ahead, self._settled_us, math.inf)]
        self.queue.clear()
        self.queue.extend(sorted(ended, key=lambda one: (one.finished_us, one.batch_id)))
        self._shown = [one.batch_id for one in self.queue]


def followed(
    streams: tuple[list[StreamedBatch], list[StreamedBatch]], from_us: float, until_us: float
) -> list[Running]:
    """Advance both streams from one time to another, and take the batches that end off them. Return these batches.

    A batch that waits for its matchers without an end keeps its stream waiting.
    """
    now_us, ended = from_us, list[Running]()
    while True:
        heads = [stream[0] for stream in streams if stream]
        active = [one for one in heads if one.ready_us <= now_us and one.left_us > 0.0]
        for one in active:
            one.started_us = min(one.started_us, now_us)
        speeds = speeds_of([one.demand for one in active])
        changes = [now_us + one.left_us / speed for one, speed in zip(active, speeds, strict=True)]
        changes += [one.ready_us for one in heads if one.ready_us > now_us]
        changes += [one.sampled_us for one in heads if one.left_us <= 0.0 and one.sampled_us > now_us]
        next_us = min(changes, default=math.inf)
        if next_us > until_us or math.isinf(next_us):
            for one, speed in zip(active, speeds, strict=True):
                one.left_us -= (until_us - now_us) * speed
            return ended
        for one, speed in zip(active, speeds, strict=True):
            one.left_us -= (next_us - now_us) * speed
            if one.left_us <= ALMOST_DONE_US:
                one.left_us = 0.0
        now_us = next_us
        for stream in streams:
            if stream and stream[0].left_us <= 0.0 and stream[0].sampled_us <= now_us:
                ended.append(_running(stream.pop(0), now_us))


def speeds_of(demands: list[float]) -> list[float]:
    """Return the speed of each batch, given the share of the memory's rate that each would use alone.

    What both demand beyond 1 is divided by max-min fairness.
    """
    if sum(demands) <= 1.0:
        return [1.0] * len(demands)
    first, second = demands
    given = (first, 1.0 - first) if first <= 0.5 else (1.0 - second, second) if second <= 0.5 else (0.5, 0.5)
    return [given[0] / first, given[1] / second]


def _running(one: StreamedBatch, ended_us: float) -> Running:
    started_us = math.ceil(one.started_us - ALMOST_DONE_US)
    finished_us = max(started_us + 1, math.ceil(ended_us - ALMOST_DONE_US))
    return Running(one.plan.batch_id, one.plan.generation, len(one.plan.rows), started_us, finished_us, one.tokens)
