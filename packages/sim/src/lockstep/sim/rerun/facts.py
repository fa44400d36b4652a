"""The facts of a recorded run as parts of a simulated host: its source of requests, and its device.

The clock of such a host counts the events of the recorded run. At time n one fact is due, the recorded one of place n,
if the host has what it needs: an answer needs its order, a result its batch. If no fact is due, the host offers a slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace
from simpy import Environment, Event

from lockstep.core.contract.commands import BatchPlan, Command
from lockstep.core.contract.events import BatchFinished, BatchId, ObservedEvent, RequestId
from lockstep.core.requests.batching import InFlight
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.cost import BatchShape
from lockstep.sim.host.device import Device, Running, Untimed
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.rerun.record import BatchOutcome, OrderKey, RecordedPass, RecordedRun, order_of
from lockstep.sim.workload.turns import Turn

OF_RECORD = Turn(0, 0, (), 0, 0, 0, "")
EMPTY_SHAPE = BatchShape()


class _AnyTurn(Mapping[RequestId, Turn]):
    """A placeholder turn for every request: the tokens of recorded requests are in the passes."""

    def __getitem__(self, request_id: RequestId) -> Turn:
        return OF_RECORD

    def __iter__(self) -> Iterator[RequestId]:
        return iter(())

    def __len__(self) -> int:
        return 0


class RecordedFacts:
    """The source of requests of a simulated host, and its `HostRecord`."""

    settled_until_us = NEVER_US  # there is no other source of requests
    open_turns: Mapping[RequestId, Turn] = _AnyTurn()

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._at = 0  # the next one of `given`
        self._ordered: Counter[OrderKey] = Counter()
        self.folded = 0  # events of the host so far

    # ------------------------------------------------------------------------------------------- source of requests

    @property
    def next_us(self) -> int:
        """Place of the next fact; NEVER_US: there is none, or it answers an order that the host has not received."""
        if self._at == len(self._run.given):
            return NEVER_US
        place, _, key = self._run.given[self._at]
        return place if key is None or self._ordered[key] else NEVER_US

    def take(self, max_new_tokens: int | None) -> ObservedEvent:
        """Return the next fact."""
        _, event, key = self._run.given[self._at]
        self._at += 1
        if key is not None:
            self._ordered[key] -= 1
        return event

    def more(self, env: Environment) -> Event | None:
        """Return None: nothing comes behind the recorded facts."""
        return None

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """Do nothing: the next turn of a conversation is one of the recorded requests."""

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """Do nothing: the next turn of a conversation is one of the recorded requests."""

    # -------------------------------------------------------------------------------------------------- host's record

    @property
    def offered(self) -> int:
        """The microbatch that was offered a slot before the first event, such that the first recorded offer follows."""
        return self._run.offered

    @property
    def free_us(self) -> int:
        """Place of the event that the lane folds next."""
        return self.folded

    def dated(self, event: ObservedEvent) -> ObservedEvent:
        """Return the event with the recorded time of its place, or the last one behind the end of the record."""
        place, times_us = self.folded, self._run.times_us
        self.folded += 1
        return replace(event, time_us=times_us[min(place, len(times_us) - 1)]) if times_us else event

    def wake_us(self, wake_at_us: int | None) -> int | None:
        """Return the place of the next recorded ClockAdvanced, if it is due by then; None: there is none."""
        if wake_at_us is None:
            return None
        at = bisect_left(self._run.clocks, self.folded)
        if at == len(self._run.clocks) or self._run.times_us[self._run.clocks[at]] < wake_at_us:
            return None
        return self._run.clocks[at]

    def order(self, command: Command) -> bool:
        """Take a command. Returns whether it is an order that one event answers."""
        key = order_of(command)
        if key is None:
            return False
        self._ordered[key] += 1
        return True

    def forced(self, batch_id: BatchId) -> tuple[tuple[RequestId, int, bytes], ...]:
        """Return the tokens that were known to be forced behind a batch."""
        return self._run.forced.get(batch_id, ())

    def result(self, batch: Running, in_flight: Iterable[InFlight], now_us: int) -> BatchFinished:
        """Return the result of a batch: for each sampling row, what the next pass over its position drew.

        Raises: NotDrawnError.
        """
        outcome = self._run.results[batch.batch_id]
        bare = BatchFinished(
            now_us, batch.batch_id, b"", outcome.started_us, outcome.finished_us, batch.generation, error=outcome.error
        )
        found = next((one for one in in_flight if one.plan.batch_id == batch.batch_id), None)
        if outcome.error or found is None:  # lost with its device, so that its result is void
            return bare
        passes = self._passes_of(found)
        counts = [len(one.tokens) for one in passes] + [number for one in passes for number in one.right]
        return replace(
            bare,
            tokens=np.array([token for one in passes for token in one.tokens], "<i4").tobytes(),
            accepted=np.array(counts, "<i4").tobytes() if outcome.counted else b"",
            invalid=tuple([i for i, one in enumerate(passes) if one.invalid]),
            text_stops=tuple([i for i, one in enumerate(passes) if one.text_stop]),
            grammar_ended=tuple([i for i, one in enumerate(passes) if one.grammar_ended]),
            text_held=tuple([(i, one.text_held) for i, one in enumerate(passes) if one.text_held]),
        )

    def _passes_of(self, batch: InFlight) -> list[RecordedPass]:
        positions = zip(batch.samplers.requests, batch.sampled_at.tolist(), strict=True)
        return [self._run.passes.take(request.request_id, position) for request, position in positions]


class RecordedDevice(Device):
    """A device whose batches draw what the model drew at the same positions in the recorded run.

    A batch without a recorded result, lost with its device or in flight at the end, never ends.
    """

    def __init__(self, run: RecordedRun, engine: Engine, *arguments: Any, **options: Any) -> None:
        """Set up a device for the batches of `engine`; further arguments are those of `Device`."""
        super().__init__(*arguments, **options)
        self._run = run
        started = {batch.plan.batch_id for batch in engine.in_flight}  # of an engine from a snapshot
        for plan in (batch.plan for batch in engine.in_flight):
            if plan.sample_after is None or plan.sample_after in started:
                self.launch(plan, EMPTY_SHAPE, 0)
            elif plan.batch_id in run.results:  # its order to sample was before the snapshot
                self._end_at(run.results[plan.batch_id], plan)

    def take_row(self, row: int, turn: Turn, adapter_slot: int = -1, sample: int = 0) -> None:
        """Do nothing: what a row draws follows from its request and its position."""

    def shape_of(self, plan: BatchPlan) -> BatchShape:
        """Return an empty shape: when the batch ends is recorded."""
        return EMPTY_SHAPE

    def launch(self, plan: BatchPlan, shape: BatchShape, handed_over_us: int) -> None:
        """Run a plan up to the place of its result, or up to its sampling if that waits for an order."""
        outcome = self._run.results.get(plan.batch_id)
        if outcome is None:
            return
        if plan.sample_after is not None:
            self.untimed.append(Untimed(plan, handed_over_us, 0.0, 0.0, b"", None))
            return
        self._end_at(outcome, plan)

    def sample(self, batch_id: BatchId, at_us: int) -> None:
        """Let a deferred batch sample: it ends at the place of its result."""
        due = [one.plan for one in self.untimed if one.plan.batch_id == batch_id]
        self.untimed = deque(one for one in self.untimed if one.plan.batch_id != batch_id)
        for plan in due:
            self._end_at(self._run.results[batch_id], plan)

    def _end_at(self, outcome: BatchOutcome, plan: BatchPlan) -> None:
        batch = Running(plan.batch_id, plan.generation, len(plan.rows), outcome.started_us, outcome.place, b"")
        self.queue = deque(sorted((*self.queue, batch), key=lambda one: one.finished_us))
