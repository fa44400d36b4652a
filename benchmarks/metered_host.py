"""The smallest host with a journal, and a meter: CPU time of every fact it folds, by phase. Its device takes no time.

    arrival   RequestArrived made from packed tokens and folded: checks, queue
    plan      LaneReady folded: admission, plan, or nothing to launch
    result    BatchFinished made and folded: tokens, stream messages, ends, publication
    record    the record of each of them: encoded, chained, checksummed, appended to the journal's buffer
    write     write() of what was appended, after each result and before its tokens may be sent; no fsync
    runs      DecodeRun.begin and close, where they are used

The digest of each Step is made inside arrival, plan and result.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import numpy as np

from lockstep.core import Engine, JournalWriter, SchedConfig
from lockstep.core.contract.commands import BatchPlan, FinishRequest, Step, StreamTokens
from lockstep.core.contract.events import BatchFinished, LaneReady, Observed, RequestArrived, RequestRetracted, TokenIds
from lockstep.core.journal.records import JournalHeader
from lockstep.core.scheduler.decode_run import DecodeRun

PHASES = ("arrival", "plan", "result", "record", "write", "runs")
BATCH_US = 10_000  # by the host's own clock; no decision depends on it
SAMPLED = np.random.default_rng(5).integers(10, 31990, 8192, np.int32).tobytes()  # what the device answers; never EOS

clock = time.process_time_ns
CLOCK_NS = min(-clock() + clock() for _ in range(1000))


class MeteredHost:
    """One engine and its journal. The caller decides what is due; `spent_ns` has an entry for every fact and phase."""

    def __init__(self, config: SchedConfig, folder: Path) -> None:
        self.engine = Engine(config)
        self.journal = JournalWriter.create(folder, JournalHeader(config=config, host={"kind": "benchmark"}))
        self.in_flight: deque[BatchPlan] = deque()
        self.now_us = 0
        self.arrived = 0
        self.finished = 0
        self.streamed_tokens = 0
        self.launches = 0
        self.extends = 0
        self.retractions = 0
        self.peak_running = 0
        self.spent_ns: dict[str, list[int]] = {}
        self.reset_meter()
        self._run: DecodeRun | None = None

    def reset_meter(self) -> None:
        """Forget what was spent so far."""
        self.spent_ns = {phase: [] for phase in PHASES}

    def arrive(self, prompt: bytes, max_new_tokens: int, *, ignore_eos: bool = False) -> None:
        """A request enters."""
        began = clock()
        event = RequestArrived(
            time_us=self.now_us,
            request_id=self.arrived,
            prompt=TokenIds(prompt),
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
        )
        step = self.engine.step(event)
        self._meter("arrival", began)
        self.arrived += 1
        self._record(event, step)

    def launch(self) -> None:
        """Offer the free launch slot."""
        run = self._run
        began = clock()
        event = LaneReady(self.now_us)
        step = self.engine.step(event) if run is None else run.launched(event)
        self._meter("plan", began)
        self._record(event, step)
        plan = step.launched()
        if plan is not None:
            self.in_flight.append(plan)
            self.launches += 1
            self.extends += plan.mode == "extend"
        self.peak_running = max(self.peak_running, self.engine.active)
        self.retractions += sum(type(decided) is RequestRetracted for decided in step.decided)

    def collect(self) -> None:
        """The oldest batch in flight comes back."""
        plan, run = self.in_flight.popleft(), self._run
        self.now_us += BATCH_US
        tokens = SAMPLED[: 4 * len(plan.sample_rows)]
        began = clock()
        event = BatchFinished(self.now_us, plan.batch_id, tokens, self.now_us - BATCH_US, self.now_us)
        step = self.engine.step(event) if run is None else run.finished(event)
        self._meter("result", began)
        self._record(event, step)
        began = clock()
        self.journal.flush()
        self._meter("write", began)
        for command in step.commands:
            if type(command) is StreamTokens:
                self.streamed_tokens += len(command.tokens)
            elif type(command) is FinishRequest:
                self.finished += 1

    def next_batch(self) -> None:
        """One turn of the loop: offer the slot; when all are taken, or nothing is left to launch, take a result."""
        self.launch()
        if self.in_flight and (
            len(self.in_flight) > self.engine.config.overlap_depth or self.engine.launch_found_nothing
        ):
            self.collect()

    def finish_all(self) -> None:
        """Go on until no request is left."""
        while self.engine.requests or self.in_flight:
            self.next_batch()

    def steady_pair(self, *, runs: bool) -> None:
        """One result and one launch; with `runs`, through a DecodeRun wherever the engine grants one."""
        if runs:
            began = clock()
            if self._run is not None and not self._run.left:
                self.end_run()
            if self._run is None:
                self._run = DecodeRun.begin(self.engine)
            self._meter("runs", began)
        self.collect()
        self.launch()

    def end_run(self) -> None:
        """Go on with single steps."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def us(self, *phases: str) -> float:
        """CPU us spent in these phases altogether."""
        return sum(sum(self.spent_ns[phase]) for phase in phases) / 1e3

    def _meter(self, phase: str, began: int) -> None:
        self.spent_ns[phase].append(max(clock() - began - CLOCK_NS, 0))

    def _record(self, event: Observed, step: Step) -> None:
        began = clock()
        self.journal.append(event, step.digest)
        self._meter("record", began)
