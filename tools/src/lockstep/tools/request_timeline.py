"""Timelines of requests: a fold over a replay that collects the core's decisions about selected requests.

    chronicle = Chronicle({17})
    for number, event, step in (walk := Walk(run)):
        chronicle.observe(number, event, step, walk.engine)
    chronicle.timelines[17].waits[0].spans

Nothing is guessed. After every step, the cause of a wait is read from the core's decisions (`AdmissionDeferred` of the
request or of the request that stops the queue) and from its state (prerequisites, pause, weights being replaced). The
computed positions are read from launched plans, the delivery of tokens from messages to the client. Times are
microseconds since the journal began.

    arrival             admission                       retraction    admission               finish
    |-- span -- span --| works: chunks, then decodes     |-- span ----| works: chunks, decodes |
    |----- wait -------|                                 |-- wait ----|
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lockstep.core.contract.commands import BatchPlan, EncodeMedia, FinishRequest, RejectRequest, Step, StreamTokens
from lockstep.core.contract.events import (
    AdmissionDeferred,
    BatchFinished,
    BatchId,
    MediaEncoded,
    Observed,
    PrefillCompleted,
    RequestAdmitted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
    TurnStarted,
)
from lockstep.core.contract.samples import sample_count, sample_label
from lockstep.core.features.disaggregation import HELD
from lockstep.core.requests.table import NO_REQUEST, RequestState
from lockstep.core.scheduler.engine import Engine


class Cause(NamedTuple):
    """The cause of a wait. `reason` is a DeferReason, the state of a transfer, or session, paused, closed or launch.

    `other` is the request that stops the queue or computes the shared prefix; NO_REQUEST for a cause of the request
    itself. The numbers are those of the AdmissionDeferred.
    """

    reason: str
    other: RequestId = NO_REQUEST
    needed_tokens: int = 0
    available_tokens: int = 0
    limit: int = 0


@dataclass
class Span:
    """A part of a wait with one cause."""

    start_us: int
    stop_us: int
    cause: Cause


class RunningRequestLeft(NamedTuple):
    """A request that left the running batch, which makes room for waiting requests."""

    time_us: int
    request_id: RequestId
    how: str  # a FinishReason, or "retracted"


@dataclass
class Wait:
    """The time from an arrival or a retraction to the admission, or to the request's end without admission."""

    start_us: int
    stop_us: int = -1
    spans: list[Span] = field(default_factory=list)
    admitted: RequestAdmitted | None = None
    admitted_step: int = -1
    bypassed: int = 0  # requests from behind it in the queue that were admitted before it
    made_room: list[RunningRequestLeft] = field(
        default_factory=list
    )  # requests that left during the last span, if its cause was a shortage

    @property
    def took_us(self) -> int:
        return self.stop_us - self.start_us


@dataclass
class Batch:
    """A launched batch: its prompts and rows and, after delivery, its times."""

    batch_id: BatchId
    step: int
    mode: str
    launched_us: int
    rows: int
    extend_ids: tuple[RequestId, ...]
    prefill_tokens: int
    layers: tuple[int, int] | None = None  # of a prompt that is computed some layers at a time
    started_us: int = -1
    finished_us: int = -1
    delivered_us: int = -1

    @property
    def took_us(self) -> int:
        """Time on the device; 0 if the host did not report it."""
        return max(self.finished_us - self.started_us, 0) if self.started_us >= 0 else 0

    @property
    def begins(self) -> bool:
        """Whether it computes the first layers of its prompts. Otherwise it goes on with them."""
        return self.layers is None or not self.layers[0]


@dataclass
class Work:
    """A request's part of a batch: positions [start:stop)."""

    batch: Batch
    stay: int  # index of the wait before it, from 0
    extends: bool
    start: int
    stop: int


class Message(NamedTuple):
    """Tokens sent to the client."""

    time_us: int
    offset: int
    tokens: int


@dataclass
class EncodingRecord:
    """The encoding of one content: times of the command and of its result."""

    digest: bytes
    asked_us: int
    done_us: int = -1


class Retraction(NamedTuple):
    """A retraction with its step, and the requests whose decodes open new pages in that step's plan."""

    event: RequestRetracted
    step: int
    gainers: tuple[RequestId, ...]


@dataclass
class RequestTimeline:
    """The timeline of one request. Fields for events that have not happened are -1, None or empty."""

    request_id: RequestId
    label: str
    tenant: str
    adapter: str
    session: str
    priority: int | None
    stream: bool
    arrived_us: int
    arrived_step: int
    waiting_then: int = 0  # other requests that waited at its arrival
    running_then: int = 0  # requests with a row at its arrival
    queued: RequestQueued | None = None
    turn: TurnStarted | None = None
    media: dict[bytes, tuple[str, int]] = field(default_factory=dict)  # kind and encoder tokens, by digest
    waits: list[Wait] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    completed: list[tuple[int, PrefillCompleted]] = field(default_factory=list)
    retractions: list[Retraction] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    cancelled_us: int = -1
    ended_us: int = -1
    ended_step: int = -1
    finished: RequestFinished | None = None
    rejected: RequestRejected | None = None
    last_us: int = -1  # end of the journal

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens; for a turn of a session, with the tokens that the session kept."""
        if self.turn is not None:
            return self.turn.prompt_tokens
        return self.queued.prompt_tokens if self.queued is not None else 0

    @property
    def stop_us(self) -> int:
        """End of the request, or of the journal for an open request."""
        return self.ended_us if self.ended_us >= 0 else self.last_us

    @property
    def first_token_us(self) -> int:
        return self.messages[0].time_us if self.messages else -1

    @property
    def queue_us(self) -> int:
        """Time from arrival to first admission; -1 without admission."""
        wait = self.waits[0] if self.waits else None
        return wait.took_us if wait is not None and wait.admitted is not None else -1

    @property
    def ttft_us(self) -> int:
        return self.first_token_us - self.arrived_us if self.messages else -1

    @property
    def e2e_us(self) -> int:
        return self.ended_us - self.arrived_us if self.finished is not None else -1

    @property
    def output_tokens(self) -> int:
        """Output tokens sent to the client."""
        return self.messages[-1].offset + self.messages[-1].tokens if self.messages else 0

    @property
    def tpot_us(self) -> float:
        """Time per output token after the first; -1 with fewer than two tokens."""
        tokens = self.output_tokens
        return (self.messages[-1].time_us - self.first_token_us) / (tokens - 1) if tokens > 1 else -1.0


class Chronicle:
    """Timelines of selected requests, and all batches of the run. `observe` must be called with every step in order."""

    def __init__(self, selected: Collection[RequestId]) -> None:
        self.selected = frozenset(selected)
        self.timelines: dict[RequestId, RequestTimeline] = {}
        self._open: dict[RequestId, RequestTimeline] = {}  # timelines of requests that have not ended
        self.batches: dict[BatchId, Batch] = {}
        self.delivered_us: list[int] = []  # delivery times of `delivered`
        self.delivered: list[Batch] = []  # in the order of delivery
        self.ends: list[RunningRequestLeft] = []
        self.encodings: dict[bytes, list[EncodingRecord]] = {}  # by digest of the content, in order
        self._deferrals: dict[RequestId, AdmissionDeferred] = {}  # the last deferral of each waiting request
        self._last_us = 0

    def observe(self, number: int, event: Observed, step: Step, engine: Engine) -> None:
        """Fold step `number`. `engine` is in its state after the step."""
        self._last_us = event.time_us
        match event:
            case RequestArrived():
                self._arrive(number, event, engine)
            case RequestCancelled() if event.request_id in self.timelines:
                timeline = self.timelines[event.request_id]
                if timeline.ended_us < 0:
                    timeline.cancelled_us = event.time_us
            case BatchFinished() if event.batch_id in self.batches:
                batch = self.batches[event.batch_id]
                if batch.delivered_us < 0:
                    batch.started_us, batch.finished_us = event.started_us, event.finished_us
                    batch.delivered_us = event.time_us
                    self.delivered_us.append(event.time_us)
                    self.delivered.append(batch)
            case MediaEncoded() if event.digest in self.encodings:
                self.encodings[event.digest][-1].done_us = event.time_us
        plan = step.launched()
        before = (
            dict(self._open) if step.decided else self._open
        )  # includes requests that end in this step, which still receive their last tokens
        for decided in step.decided:
            self._learn(number, decided, plan)
        if plan is not None:
            self._launch(number, event.time_us, plan)
        for command in step.commands:
            if type(command) is StreamTokens:
                self._send(event.time_us, command, before)
            elif type(command) is EncodeMedia:
                encoding = EncodingRecord(command.digest, event.time_us)
                self.encodings.setdefault(command.digest, []).append(encoding)
            elif isinstance(command, FinishRequest | RejectRequest) and command.request_id in self.timelines:
                self._end(number, event.time_us, self.timelines[command.request_id])
        if self._open:
            self._note_causes(event.time_us, engine)

    @property
    def complete(self) -> bool:
        """Whether all selected requests have arrived and ended."""
        return not self._open and len(self.timelines) == len(self.selected)

    def encodings_of(self, timeline: RequestTimeline, wait: Wait) -> list[tuple[str, int, EncodingRecord]]:
        """Return kind, tokens and encoding of each content of a wait: the newest encoding requested before its end."""
        found = []
        for digest, (kind, tokens) in timeline.media.items():
            asked = [one for one in self.encodings.get(digest, ()) if wait.stop_us < 0 or one.asked_us <= wait.stop_us]
            if asked:
                found.append((kind, tokens, asked[-1]))
        return found

    def close(self) -> Chronicle:
        """End open waits at the end of the journal. Returns the chronicle."""
        for timeline in self.timelines.values():
            timeline.last_us = self._last_us
            if timeline.ended_us < 0 and timeline.waits and timeline.waits[-1].stop_us < 0:
                self._close(timeline.waits[-1], self._last_us)
        return self

    def between(self, start_us: int, stop_us: int) -> list[Batch]:
        """Return the batches whose results were delivered in (start_us:stop_us]."""
        first, last = bisect_right(self.delivered_us, start_us), bisect_right(self.delivered_us, stop_us)
        return self.delivered[first:last]

    # -------------------------------------------------------------------------------------------------- decided facts

    def _arrive(self, number: int, event: RequestArrived, engine: Engine) -> None:
        for sample in range(sample_count(event)):
            request_id = event.request_id + sample
            if request_id in self.selected:
                self.timelines[request_id] = self._open[request_id] = RequestTimeline(
                    request_id=request_id,
                    label=sample_label(event.label, sample),
                    tenant=event.tenant,
                    adapter=event.adapter,
                    session=event.session,
                    priority=event.priority,
                    stream=event.stream,
                    arrived_us=event.time_us,
                    arrived_step=number,
                    media={s.digest: (s.kind, s.encoder_tokens) for s in event.spans if s.encoder_tokens},
                    waiting_then=sum(r.request_id < event.request_id for r in engine.waiting) + len(engine.blocked),
                    running_then=engine.active,
                )

    def _learn(self, number: int, decided: object, plan: BatchPlan | None) -> None:
        match decided:
            case AdmissionDeferred():
                self._deferrals[decided.request_id] = decided
            case RequestRetracted():
                self.ends.append(RunningRequestLeft(decided.time_us, decided.request_id, "retracted"))
            case RequestFinished():
                self.ends.append(RunningRequestLeft(decided.time_us, decided.request_id, decided.reason))
                self._deferrals.pop(decided.request_id, None)
            case RequestRejected():
                self._deferrals.pop(decided.request_id, None)
        timeline = self.timelines.get(getattr(decided, "request_id", NO_REQUEST))
        if timeline is None:
            return
        match decided:
            case RequestQueued():
                timeline.queued = decided
                timeline.waits.append(Wait(decided.time_us))
            case TurnStarted():
                timeline.turn = decided
            case RequestAdmitted():
                wait = timeline.waits[-1]
                wait.admitted, wait.admitted_step = decided, number
                self._close(wait, decided.time_us)
            case PrefillCompleted():
                timeline.completed.append((number, decided))
            case RequestRetracted():
                timeline.retractions.append(Retraction(decided, number, _gainers(plan)))
                timeline.waits.append(Wait(decided.time_us))
            case RequestFinished():
                timeline.finished = decided
                self._end(number, decided.time_us, timeline)
            case RequestRejected():
                timeline.rejected = decided
                self._end(number, decided.time_us, timeline)

    def _end(self, number: int, time_us: int, timeline: RequestTimeline) -> None:
        if timeline.ended_us >= 0:
            return
        timeline.ended_us, timeline.ended_step = time_us, number
        self._open.pop(timeline.request_id, None)
        if timeline.waits and timeline.waits[-1].stop_us < 0:
            self._close(timeline.waits[-1], time_us)

    def _close(self, wait: Wait, time_us: int) -> None:
        wait.stop_us = time_us
        if not wait.spans:
            return
        wait.spans[-1].stop_us = time_us
        wait.spans = [span for span in wait.spans if span.stop_us > span.start_us] or wait.spans[-1:]
        last = wait.spans[-1]
        if last.cause.reason in ("kv_budget", "pages", "rows", "running_limit", "microbatch", "adapter"):
            first = bisect_right(self.ends, last.start_us, key=lambda ended: ended.time_us)
            wait.made_room = [ended for ended in self.ends[first:] if ended.time_us <= time_us]

    def _note_causes(self, time_us: int, engine: Engine) -> None:
        """Record the cause of each open wait. Most requests wait for the same cause, which is determined once."""
        deferrals, requests, held = self._deferrals, engine.requests, engine.blocked
        common = line_cause(engine, NO_REQUEST, deferrals)
        for request_id, timeline in self._open.items():
            wait = timeline.waits[-1] if timeline.waits else None
            if wait is None or wait.stop_us >= 0:
                continue
            bypassed = requests[request_id].bypassed
            if bypassed > wait.bypassed:
                wait.bypassed = bypassed
            own = request_id in deferrals or request_id in held
            cause = why_waits(engine, request_id, deferrals) if own else common
            spans = wait.spans
            if not spans:
                spans.append(Span(wait.start_us, time_us, cause))
            elif spans[-1].cause is not cause and spans[-1].cause[:2] != cause[:2]:
                spans[-1].stop_us = time_us
                spans.append(Span(time_us, time_us, cause))

    # ----------------------------------------------------------------------------------------- launches and messages

    def _launch(self, number: int, time_us: int, plan: BatchPlan) -> None:
        extends, ids = plan.extend_rows, plan.request_ids
        prompts, new_tokens = (), 0
        if extends:
            prompts = tuple(ids[:extends].tolist())
            new_tokens = int((plan.stops[:extends] - plan.starts[:extends]).sum())
            if plan.layers is not None and plan.layers[0]:
                new_tokens = 0  # they count with their first layers
        batch = Batch(plan.batch_id, number, plan.mode, time_us, len(plan.rows), prompts, new_tokens, plan.layers)
        self.batches[plan.batch_id] = batch
        if not self._open:
            return
        starts, stops = plan.starts.tolist(), plan.stops.tolist()
        for i, request_id in enumerate(ids.tolist()):
            timeline = self._open.get(request_id)
            if timeline is not None and timeline.waits and timeline.waits[-1].admitted is not None:
                timeline.works.append(Work(batch, len(timeline.waits) - 1, i < extends, starts[i], stops[i]))

    def _send(self, time_us: int, sent: StreamTokens, ending: Mapping[RequestId, RequestTimeline]) -> None:
        offsets, counts = sent.offsets.tolist(), sent.token_counts.tolist()
        for i, request_id in enumerate(sent.request_ids.tolist() if self._open or ending else ()):
            timeline = self._open.get(request_id) or ending.get(request_id)
            if (
                timeline is not None and offsets[i] + counts[i] > timeline.output_tokens
            ):  # repeated tokens are dropped by the client
                timeline.messages.append(Message(time_us, offsets[i], counts[i]))


def why_waits(engine: Engine, request_id: RequestId, deferrals: Mapping[RequestId, AdmissionDeferred]) -> Cause:
    """Return the cause of a request's wait, by the engine's state and the last deferral of each request."""
    request = engine.requests[request_id]
    own = deferrals.get(request_id)
    if request_id in engine.blocked:
        session = engine.sessions.open.get(request.session)
        if session is not None and request_id in session.queue:
            return Cause("session", NO_REQUEST if session.turn is None else session.turn)
        transfer = engine.transfers.all.get(request_id)
        if (
            transfer is not None
            and transfer.state in HELD
            and not (transfer.state == "ready" and request.open_prerequisites > 1)
        ):
            return Cause(transfer.state)
        return Cause("grammar") if own is None else Cause(own.reason, own.behind)
    if own is not None and not engine.paused and engine.maintenance.admits:
        if own.reason == "prefix" and request.behind == own.behind and _computes_prompt(engine, own.behind):
            return Cause("prefix", own.behind)
        if own.reason == "adapter" and request.deferred == "adapter":
            return Cause("adapter")
        tiers = engine.memory.tiers
        if tiers.deferral_reason(request, engine.now_us) == own.reason:
            return Cause(own.reason)
    return line_cause(engine, request_id, deferrals)


def line_cause(engine: Engine, request_id: RequestId, deferrals: Mapping[RequestId, AdmissionDeferred]) -> Cause:
    """Return the cause for which the waiting queue stands, from the position of this request.

    It is the cause of all requests in the queue without a deferral of their own.
    """
    if engine.paused:
        return Cause("paused")
    if not engine.maintenance.admits:
        return Cause("closed")
    if engine.deferred is not None:
        first, reason = engine.deferred
        head = engine.requests.get(first)
        if head is not None and head.state is RequestState.WAITING:
            numbers = deferrals.get(first)
            other = NO_REQUEST if first == request_id else first
            if numbers is None:
                return Cause(reason, other)
            return Cause(reason, other, numbers.needed_tokens, numbers.available_tokens, numbers.limit)
    return Cause("launch")


def _computes_prompt(engine: Engine, request_id: RequestId) -> bool:
    """Whether a request's prompt is being computed: its last chunk is not launched, or not delivered."""
    request = engine.requests.get(request_id)
    if request is None:
        return False
    return request.state is RequestState.PREFILLING or any(
        request_id in batch.plan.request_ids[: batch.plan.extend_rows].tolist() for batch in engine.in_flight
    )


def _gainers(plan: BatchPlan | None) -> tuple[RequestId, ...]:
    """Return the requests whose decodes open a page in this plan."""
    if plan is None:
        return ()
    opened = np.isin(plan.rows, plan.deltas.opened_rows)
    return tuple(plan.request_ids[opened].tolist())
