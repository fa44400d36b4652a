"""Uniform stretches of decode: a stand-in for `Engine.step` while nothing is to be decided.

Between arrivals, finishes and shortages the engine does the same thing over and over: the oldest batch comes back, its
tokens are streamed, one more decode of the same cohort is launched. A `DecodeRun` takes those pairs of BatchFinished
and LaneReady, gives the very Steps that `Engine.step` would give, and leaves the engine in the very same state, at a
fraction of the cost: what cannot change is not asked again. `tests/lockstep/test_decode_runs.py` holds the two against
each other, down to the bytes of the journal.

    run = DecodeRun.begin(engine)           None: something may have to be decided; step, please
    while run.left and nothing else is due:
        run.finished(BatchFinished(...))    the oldest batch in flight
        run.launched(LaneReady(...))        one more
    run.close()                             the engine goes on from here

Until it is closed, the engine may be neither stepped nor looked at: only pages have been taken from it so far.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from lockstep.core.contract.commands import NO_DELTAS, NO_ROWS, BatchPlan, LaunchBatch, PageDeltas, Step, StreamTokens
from lockstep.core.contract.digest import step_digest
from lockstep.core.contract.events import BatchFinished, LaneReady
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.retraction import members_growing
from lockstep.core.requests.table import ONE, Int32s
from lockstep.core.scheduler.state import SchedulerState

RUN_LAUNCHES_MAX = 256


class DecodeRun:
    """Up to `left` more pairs of one result and one launch. Only `begin` makes one, and only `close` ends it."""

    def __init__(self, engine: SchedulerState, launches: int) -> None:
        self.left = launches
        self._engine = engine
        self._running = engine.microbatches.current
        self._running_batch = self._running.batch
        self._positions = self._running.positions
        self._sampled_at: Int32s = engine.in_flight[0].sampled_at
        self._digests = engine.digests
        self._digest = engine.digest
        self._next_batch_id = engine.next_batch_id
        self._time_us = engine.now_us
        self._tokens: list[Int32s] = []
        self._plans: deque[BatchPlan] = deque(maxlen=len(engine.in_flight))
        self._launches = 0
        self._look_ahead()

    @staticmethod
    def begin(engine: SchedulerState) -> DecodeRun | None:
        """A run from here, if at least one pair of result and launch needs no decision."""
        launches = _steady_launches(engine)
        if launches <= 0:
            return None
        run = DecodeRun(engine, launches)
        return run if run.left else None

    def finished(self, event: BatchFinished) -> Step:
        """The Step of the oldest batch's result: its tokens are streamed."""
        running_batch = self._running_batch
        tokens = np.frombuffer(event.tokens, np.int32)
        self._tokens.append(tokens)
        newest = self._sampled_at - running_batch.prompts
        self._sampled_at = self._sampled_at + ONE
        step = Step(
            commands=[
                StreamTokens(running_batch.request_ids, newest, running_batch.ones, tokens, running_batch.ids_digest)
            ],
            time_us=event.time_us,
        )
        if self._digests:
            self._digest = step.digest = step_digest(self._digest, step)
        return step

    def launched(self, event: LaneReady) -> Step:
        """The Step of a free slot: one more token for each member."""
        running_batch, starts = self._running_batch, self._positions
        step = Step(time_us=event.time_us)
        plan = BatchPlan(
            batch_id=self._next_batch_id,
            mode="decode",
            rows=running_batch.rows,
            request_ids=running_batch.request_ids,
            starts=starts,
            stops=starts + ONE,
            sample_rows=running_batch.everyone,
            deltas=self._open_pages(starts, step),
            ids_digest=running_batch.ids_digest,
            generation=self._engine.generation,
        )
        oldest = plan.batch_id - len(self._engine.in_flight) + 1
        plan = self._engine.memory.hybrid.completed_in_run(plan, oldest, step)
        self._plans.append(plan)
        self._positions = plan.stops
        self._next_batch_id += 1
        self._launches += 1
        self.left -= 1
        self._look_ahead()
        self._time_us = event.time_us
        step.commands.append(LaunchBatch(plan))
        if self._digests:
            self._digest = step.digest = step_digest(self._digest, step)
        return step

    def close(self) -> None:
        """Bring the engine to where it would stand. Ends the run; a result must have been followed by its launch."""
        engine, done = self._engine, self._launches
        if not done:
            return
        running_batch = self._running_batch
        first = engine.in_flight[0].sampled_at - running_batch.prompts
        numbers = np.arange(done, dtype=np.int32)[:, None] + first
        engine.memory.table.write_runs(running_batch.rows, numbers, np.array(self._tokens))
        for _ in range(done):
            engine.ratio.decoded()
        for plan in self._plans:
            engine.in_flight.popleft()
            engine.in_flight.append(InFlight(plan, running_batch.requests, running_batch, []))
        self._running.advanced_by(done, self._positions)
        engine.end_run(self._next_batch_id, self._time_us, self._digest)

    def _open_pages(self, starts: Int32s, step: Step) -> PageDeltas:
        """Pages for the members whose last one is full, from the free list, where `_look_ahead` saw enough."""
        engine, growing = self._engine, self._growing
        if not growing.size:
            return NO_DELTAS
        rows, at = self._running_batch.rows.take(growing), starts.take(growing)
        index = at >> engine.page_shift
        pages = engine.memory.pool.alloc(growing.size)
        engine.memory.table.write_pages(rows, index, pages)
        engine.memory.hybrid.open_in_run(self._running_batch, starts, pages, step)
        return PageDeltas(pages, NO_ROWS, rows, index)

    def _look_ahead(self) -> None:
        """Find the members that open a page with the next launch; the run is over if the free list does not have it."""
        self._growing = members_growing(self._positions, self._engine.page_mask)
        memory = self._engine.memory
        if self._growing.size > memory.pool.free_count:
            self.left = 0
        if not memory.hybrid.decodes_without_evicting(self._positions, self._growing.size):
            self.left = 0


def _steady_launches(engine: SchedulerState) -> int:
    """How many launches may follow one another, from here, with nothing to decide but to go on.

    Everything in flight is a decode of today's running batch; no request can be admitted, ends by length, may end by a
    token, has a timer, or is leaving a row. Pages are looked after launch by launch.
    """
    running, config, adapters = engine.microbatches.current, engine.config, engine.memory.adapters
    running_batch = running.batch
    if (
        len(engine.in_flight) != config.overlap_depth + 1
        or engine.in_flight[0].samplers is not running_batch  # the most frequent reason
        or not running_batch.steady
        or running_batch.constrained
        or (engine.waiting and (not engine.batch_is_full or config.enable_priority_preemption or adapters.present))
        or engine.prefilling is not None
        or engine.controls.paused
        or engine.maintenance.jobs
        or engine.controls.pace.watches
        or engine.sessions.due_us is not None
        or engine.sessions.unsettled
        or running.decode_owed
        or engine.timers
        or not engine.transfers.quiet
        or engine.ranks is not None
        or engine.microbatches.several
        or engine.memory.deferred.rows
        or engine.memory.deferred.pages
        or engine.memory.rewrites
        or engine.memory.tiers.timed
        or not engine.memory.hybrid.by_one
        or running_batch.stops.shape[1]
        or config.retract_every
        or config.decode_look_ahead > 1
        or config.decode_steps_per_launch > 1
    ):
        return 0
    for batch in engine.in_flight:
        if batch.plan.mode != "decode" or batch.samplers is not running_batch or batch.ending or batch.dead:
            return 0
    launches = min(running.horizon - 1, RUN_LAUNCHES_MAX)
    if engine.waiting and config.waiting_prefix_refresh:
        launches = min(launches, engine.launches_to_refresh())
    return launches
