"""A recording of another engine's scheduler (`lockstep.host.recording`) as events and Steps.

Nothing is replayed: the plans are the other engine's, and a recording has no reasons. Its records become the events,
commands and decided events that measure a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.core.contract.commands import NO_ROWS, BatchPlan, LaunchBatch, Step, StreamTokens
from lockstep.core.contract.events import (
    BatchFinished,
    ClockAdvanced,
    FinishReason,
    LaneReady,
    ObservedEvent,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestRetracted,
    TokenRuns,
)
from lockstep.host.recording import Arrived, Ended, PassFinished, Planned, RecordingHeader, read_recording

REASONS: dict[str, FinishReason] = {"length": "length", "stop": "stop", "abort": "cancelled", "repetition": "stop"}


@dataclass
class Recorded:
    """A request of a recording. Times in us."""

    number: int
    arrived: Arrived
    passes: list[tuple[Planned, int, int]] = field(default_factory=list)  # plan, tokens with KV before, new tokens
    retracted_us: list[int] = field(default_factory=list)
    token_us: list[int] = field(default_factory=list)  # when each output token was on the host
    ended: Ended | None = None
    waits: bool = True  # for a place in a pass

    @property
    def known_tokens(self) -> int:
        """Prompt and delivered output."""
        return self.arrived.prompt_tokens + len(self.token_us)


class ReadRecording:
    """The requests of a recording, and what its records stand for, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header: RecordingHeader
        self.header, self._records = read_recording(folder)
        self.requests: list[Recorded] = []
        self.records = self.last_us = 0
        self.last_result: PassFinished | None = None
        self._running: dict[int, Planned] = {}

    def steps(self) -> Iterator[tuple[ObservedEvent, Step, BatchPlan | None]]:
        """Yield each record as an event and its Step, with the plan that a result belongs to. Only once."""
        plans: dict[int, BatchPlan] = {}
        for record in self._records:
            self.records, self.last_us = self.records + 1, record.time_us
            match record:
                case Arrived():
                    yield self._arrive(record), Step(), None
                case Planned():
                    step = self._plan(record)
                    launched = step.launched()
                    if launched is not None:
                        plans[record.batch], self._running[record.batch] = launched, record
                    yield LaneReady(record.time_us), step, None
                case PassFinished():
                    self._running.pop(record.batch, None)
                    self.last_result = record
                    yield self._collect(record, plans.get(record.batch))
                case Ended():
                    self.requests[record.request].ended = record
                    yield ClockAdvanced(record.time_us), Step(decided=[self._end(record)]), None

    @property
    def running_plans(self) -> list[Planned]:
        """Plans without a result, oldest first, once all records are read."""
        return list(self._running.values())

    def read(self) -> ReadRecording:
        """Read all records. Returns this recording."""
        for _ in self.steps():
            pass
        return self

    def _arrive(self, record: Arrived) -> RequestArrived:
        request = Recorded(len(self.requests), record)
        self.requests.append(request)
        return RequestArrived(
            time_us=record.time_us,
            request_id=request.number,
            prompt=TokenRuns((0, max(record.prompt_tokens, 1))),
            max_new_tokens=max(record.max_new_tokens, 1),
            label=record.name,
            priority=record.priority,
        )

    def _plan(self, record: Planned) -> Step:
        step = Step()
        for number in record.retracted:
            request = self.requests[number]
            request.waits = True
            request.retracted_us.append(record.time_us)
            step.decided.append(RequestRetracted(record.time_us, number, len(request.token_us), 0, 0))
        extends: list[tuple[int, int, int]] = []
        decodes: list[tuple[int, int, int]] = []
        for number, start, new, drafts in record.rows:
            request = self.requests[number]
            if request.waits:
                waited_us = record.time_us - (request.retracted_us or [request.arrived.time_us])[-1]
                left = max(request.known_tokens - start, 1)
                step.decided.append(RequestAdmitted(record.time_us, number, 0, start, left, waited_us))
                request.waits = False
            request.passes.append((record, start, new))
            decoding = start >= request.arrived.prompt_tokens and new == 1 + drafts
            (decodes if decoding else extends).append((number, start, new))
        rows = extends + decodes
        if rows:
            numbers, starts, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
            known = np.array([self.requests[number].known_tokens for number in numbers.tolist()])
            plan = BatchPlan(
                batch_id=record.batch,
                mode="decode" if not extends else "mixed" if decodes else "extend",
                rows=numbers.astype(np.int32),
                request_ids=numbers,
                starts=starts.astype(np.int32),
                stops=(starts + lengths).astype(np.int32),
                extend_rows=len(extends),
                sample_rows=np.flatnonzero(starts + lengths >= known).astype(np.int32),
            )
            step.commands.append(LaunchBatch(plan))
        return step

    def _collect(self, record: PassFinished, plan: BatchPlan | None) -> tuple[ObservedEvent, Step, BatchPlan | None]:
        step = Step()
        if record.tokens:
            numbers, counts = zip(*record.tokens, strict=True)
            offsets = [len(self.requests[number].token_us) for number in numbers]
            streamed = StreamTokens(
                np.array(numbers, np.int64), np.array(offsets, np.int32), np.array(counts, np.int32), NO_ROWS
            )
            step.commands.append(streamed)
            for number, new in record.tokens:
                self.requests[number].token_us += [record.time_us] * new
        event = BatchFinished(record.time_us, record.batch, started_us=record.started_us, finished_us=record.time_us)
        return event, step, plan

    def _end(self, record: Ended) -> RequestFinished:
        request = self.requests[record.request]
        cached = request.passes[0][1] if request.passes else 0
        reason = REASONS.get(record.reason, "error")
        return RequestFinished(record.time_us, record.request, reason, len(request.token_us), cached)
