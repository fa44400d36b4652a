"""Uniform stretches of decode: a replacement of `Engine.step` while nothing is to be decided.

Between arrivals, finishes and shortages the engine repeats one cycle: the oldest batch is collected, its tokens are
streamed, and one more decode of the same running batch is launched. A `DecodeRun` takes these pairs of BatchFinished
and LaneReady. It returns the same Steps as `Engine.step` and leaves the engine in the same state, at a fraction of the
cost: conditions that cannot change are not checked again. `tests/lockstep/test_decode_runs.py` compares the two, down
to the bytes of the journal.

    run = DecodeRun.begin(engine)           None: something may have to be decided, so call `Engine.step`
    while run.left and nothing else is due:
        run.finished(BatchFinished(...))    the oldest batch in flight
        run.launched(LaneReady(...))        one more
    run.close()                             the engine continues from here

Until the run is closed, the engine may be neither stepped nor read: so far only its pages have been taken.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from lockstep.core.contract.commands import NO_DELTAS, NO_ROWS, BatchPlan, LaunchBatch, PageDeltas, Step, StreamTokens
from lockstep.core.contract.digest import step_digest
from lockstep.core.contract.events import BatchFinished, LaneReady
from lockstep.core.features import two_batch
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.retraction import members_growing
from lockstep.core.requests.table import ONE, Int32s
from lockstep.core.scheduler.state import SchedulerState

RUN_LAUNCHES_MAX = 256


class DecodeRun:
    """Up to `left` more pairs of one result and one launch. Only `begin` creates a run, and only `close` ends it."""

    def __init__(self, engine: SchedulerState, launches: int) -> None:
        self.left = launches
        self._engine = engine
        self._memory = engine.memory
        self._hybrid = engine.memory.hybrid
        self._is_hybrid = self._hybrid.present
        self._running = engine.microbatches.current
        self._running_batch = self._running.batch
        self._positions = self._running.positions
        self._newest: Int32s = engine.in_flight[0].sampled_at - self._running_batch.prompts
        self._halves = two_batch.halves_of_decodes(engine.config, self._running_batch.size)
        self._digests = engine.digests
        self._digest = engine.digest
        self._next_batch_id = engine.next_batch_id
        self._tokens: list[Int32s] = []
        self._plans: deque[BatchPlan] = deque(maxlen=len(engine.in_flight))
        self._launches = 0
        self._look_ahead()

    @staticmethod
    def begin(engine: SchedulerState) -> DecodeRun | None:
        """Return a run that begins now; None if the next pair of result and launch may need a decision."""
        launches = _steady_launches(engine)
        if launches <= 0:
            return None
        run = DecodeRun(engine, launches)
        return run if run.left else None

    def finished(self, event: BatchFinished) -> Step:
        """Return the Step of the result of the oldest batch: its tokens are streamed."""
        running_batch = self._running_batch
        tokens = np.frombuffer(event.tokens, np.int32)
        self._tokens.append(tokens)
        newest = self._newest
        self._newest = newest + ONE
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
        """Return the Step of a free slot: one more token for each member is launched."""
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
            halves=self._halves,
        )
        if self._is_hybrid:
            oldest = plan.batch_id - len(self._engine.in_flight) + 1
            plan = self._hybrid.completed_in_run(plan, oldest, step)
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
        """End the run and update the engine. Every result must have been followed by its launch."""
        engine, done = self._engine, self._launches
        if not done:
            return
        running_batch = self._running_batch
        first = engine.in_flight[0].sampled_at - running_batch.prompts
        numbers = np.arange(done, dtype=np.int32)[:, None] + first
        engine.memory.table.write_runs(running_batch.rows, numbers, np.array(self._tokens))
        engine.ratio.decoded(done)
        for plan in self._plans:
            engine.in_flight.popleft()
            engine.in_flight.append(InFlight(plan, running_batch.requests, running_batch, []))
        self._running.advanced_by(done, self._positions)
        engine.end_run(self._next_batch_id, self._time_us, self._digest)

    def _open_pages(self, starts: Int32s, step: Step) -> PageDeltas:
        """Allocate pages for the members whose last page is full. `_look_ahead` has checked the free list."""
        engine, growing = self._engine, self._growing
        if not growing.size:
            return NO_DELTAS
        rows, at = self._running_batch.rows.take(growing), starts.take(growing)
        index = at >> engine.page_shift
        pages = engine.memory.pool.alloc(growing.size)
        engine.memory.table.write_pages(rows, index, pages)
        self._hybrid.open_in_run(self._running_batch, starts, pages, step)
        return PageDeltas(pages, NO_ROWS, rows, index)

    def _look_ahead(self) -> None:
        """Find the members that open a page with the next launch. The run ends if the free list has too few pages."""
        self._growing = members_growing(self._positions, self._engine.page_mask)
        if self._growing.size > self._memory.pool.free_count:
            self.left = 0
        if self._is_hybrid and not self._hybrid.decodes_without_evicting(self._positions, self._growing.size):
            self.left = 0


def _steady_launches(engine: SchedulerState) -> int:
    """Return the number of launches that may follow without a decision; 0 if the next launch may need one.

    All batches in flight must be decodes of the present running batch. No request may be admissible, end by length, end
    by a token, have a timer, or be leaving a row. Pages are checked launch by launch.
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
        or engine.controls.watch_launches
        or engine.sessions.due_us is not None
        or engine.sessions.unsettled
        or running.decode_owed
        or engine.timers
        or not engine.transfers.quiet
        or engine.ranks is not None
        or engine.microbatches.several
        or engine.multiplexer.parts
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
