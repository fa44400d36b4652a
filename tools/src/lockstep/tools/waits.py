"""The waits of each request before its first token, by cause: a fold that is fast enough to run during a simulation.

    waits = WaitFold()
    simulate(setup, observer=waits)                      # every step except those of uniform decodes
    waits.close()[17].by_cause                          # {"behind another: prefill budget": 2_743_000, ...}

It computes for every request the waits that a `RequestTimeline` has for a few, as far as they explain the TTFT, by the
same rules (`request_timeline.line_cause`, `why_waits`). The waiting queue may be long. Its requests wait for the same
cause, except its head and requests with a cause of their own. Therefore the fold counts the time by cause once for the
whole queue, and a request stores these counts when it joins. Only requests with a cause of their own are examined in
every step.
"""

from __future__ import annotations

import msgspec

from lockstep.core.contract.commands import Step, StreamTokens
from lockstep.core.contract.events import (
    AdmissionDeferred,
    Observed,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
)
from lockstep.core.contract.samples import sample_count
from lockstep.core.requests.table import NO_REQUEST
from lockstep.core.scheduler.engine import Engine
from lockstep.tools.narration import cause_key
from lockstep.tools.request_timeline import line_cause, why_waits

OWN_REASONS = ("prefix", "adapter")
"""Deferral reasons of single requests in the queue. They may end without an event, so `why_waits` checks them."""


class Waited(msgspec.Struct, frozen=True, array_like=True):
    """The waits of one request until its first token. Times are in microseconds; -1 for events that did not happen."""

    request_id: RequestId
    arrived_us: int
    waiting_then: int  # other requests that waited at its arrival
    queue_us: int  # from its arrival to its first admission
    first_token_us: int  # time of the first message with output
    cached_tokens: int  # at the first admission; 0 without one
    retractions: int
    bypassed: int  # requests from behind it in the queue that were admitted before it
    by_cause: dict[str, int]  # microseconds by narration.cause_key, longest first

    @property
    def ttft_us(self) -> int:
        return self.first_token_us - self.arrived_us if self.first_token_us >= 0 else -1

    @property
    def computed_us(self) -> int:
        """The part of the TTFT without waits; -1 without a first token."""
        return self.ttft_us - sum(self.by_cause.values()) if self.first_token_us >= 0 else -1


class _OpenWait:
    """A request that has not ended."""

    __slots__ = (
        *("arrived_us", "began_us", "by_cause", "bypassed", "cached_tokens", "cause", "first_token_us", "mark"),
        *("passed", "queue_us", "retractions", "since_us", "waiting_then"),
    )

    def __init__(self, arrived_us: int, waiting_then: int) -> None:
        self.arrived_us = arrived_us
        self.waiting_then = waiting_then
        self.queue_us = self.first_token_us = -1
        self.cached_tokens = self.retractions = 0
        self.bypassed = self.passed = 0  # bypasses in earlier waits; in the present wait
        self.began_us = -1  # start of the present wait
        self.by_cause: dict[str, int] = {}
        self.mark: dict[str, int] | None = None  # the queue's totals when it joined; None: it waits apart or not at all
        self.cause = ""  # present cause of a request that waits apart; "" otherwise
        self.since_us = -1  # start of `cause`

    def waited(self, cause: str, us: int) -> None:
        """Add `us` microseconds to a cause, before the first token."""
        if cause and us > 0 and self.first_token_us < 0:
            self.by_cause[cause] = self.by_cause.get(cause, 0) + us


class _WaitCause:
    """The time that the waiting queue has waited so far, by cause."""

    def __init__(self) -> None:
        self.cause = ""
        self._since_us = 0
        self._total_us: dict[str, int] = {}

    def turn(self, cause: str, now_us: int) -> None:
        """Change the cause of the queue at `now_us`."""
        self._total_us = self.totals_us(now_us)
        self._since_us, self.cause = now_us, cause

    def totals_us(self, now_us: int) -> dict[str, int]:
        """Return the microseconds up to `now_us`, by cause."""
        totals = dict(self._total_us)
        if self.cause:
            totals[self.cause] = totals.get(self.cause, 0) + now_us - self._since_us
        return totals


class WaitFold:
    """Folds the waits of all requests. `observe` must be called with every step in order, except uniform decodes."""

    def __init__(self) -> None:
        self.done: dict[RequestId, Waited] = {}  # requests that have ended
        self._open: dict[RequestId, _OpenWait] = {}
        self._waiting: dict[RequestId, _OpenWait] = {}
        self._apart: dict[RequestId, _OpenWait] = {}  # waiting requests with a cause of their own
        self._unplaced: list[RequestId] = []  # requests that may move into or out of `_apart` in this step
        self._silent: dict[RequestId, _OpenWait] = {}  # requests without a sent token
        self._deferrals: dict[RequestId, AdmissionDeferred] = {}  # the last deferral of each request
        self._special: set[RequestId] = set()  # requests with one of OWN_REASONS
        self._line = _WaitCause()
        self._state: object = None  # of the engine when causes were last recorded
        self._restless = False  # whether any request of `_apart` had a cause that may end without an event
        self._last_us = 0

    def observe(self, event: Observed, step: Step, engine: Engine) -> None:
        """Fold a step. `engine` is in its state after it. Requests that arrived before the first step are left out."""
        now_us = self._last_us = event.time_us
        if type(event) is RequestArrived:
            self._arrive(event, engine)
        if self._silent:
            for command in step.commands:
                if type(command) is StreamTokens:
                    self._hear(now_us, command)
        if step.decided:
            self._learn(step, engine)
        if self._waiting:
            # The state that determines the cause of the queue, beside decided events.
            state = engine.deferred, engine.paused, engine.maintenance.admits
            if step.decided or self._restless or state != self._state:
                self._state = state
                self._note_causes(now_us, engine)
        self._unplaced.clear()

    def close(self) -> dict[RequestId, Waited]:
        """End open waits at the end of the run; return the waits of all requests."""
        for request_id in list(self._open):
            self._end(request_id, self._last_us)
        return self.done

    # -------------------------------------------------------------------------------------------------- decided facts

    def _arrive(self, event: RequestArrived, engine: Engine) -> None:
        others = len(engine.waiting)
        while others and engine.waiting[others - 1].request_id >= event.request_id:
            others -= 1  # the request and its samples are at the end of the queue
        for sample in range(sample_count(event)):
            one = _OpenWait(event.time_us, others + len(engine.blocked))
            self._open[event.request_id + sample] = self._silent[event.request_id + sample] = one

    def _hear(self, now_us: int, sent: StreamTokens) -> None:
        ids = sent.request_ids.tolist()
        for request_id in self._silent.keys() & ids:
            at = ids.index(request_id)
            if sent.offsets[at] + sent.token_counts[at] > 0:
                one = self._silent.pop(request_id)
                self._settle(request_id, one, now_us)  # on a decode engine the request may still wait for a row
                one.bypassed += one.passed
                one.first_token_us, one.passed = now_us, 0

    def _learn(self, step: Step, engine: Engine) -> None:
        passed_by = False
        for decided in step.decided:
            match decided:
                case AdmissionDeferred():
                    self._deferrals[decided.request_id] = decided
                    if decided.reason in OWN_REASONS or engine.memory.tiers.present:
                        self._special.add(decided.request_id)
                        self._unplaced.append(decided.request_id)
                case RequestAdmitted():
                    self._admit(decided)
                    passed_by = True
                case RequestQueued():
                    self._wait(decided.request_id, decided.time_us)
                case RequestRetracted() if decided.request_id in self._open:
                    one = self._open[decided.request_id]
                    one.retractions += one.first_token_us < 0
                    self._wait(decided.request_id, decided.time_us)
                case RequestFinished() | RequestRejected():
                    self._end(decided.request_id, decided.time_us)
        for request in engine.waiting if passed_by else ():
            if request.bypassed and request.request_id in self._waiting:
                self._waiting[request.request_id].passed = request.bypassed

    def _wait(self, request_id: RequestId, now_us: int) -> None:
        one = self._waiting[request_id] = self._open[request_id]
        one.began_us = now_us
        self._unplaced.append(request_id)

    def _admit(self, decided: RequestAdmitted) -> None:
        one = self._open.get(decided.request_id)
        if one is None:
            return
        if one.queue_us < 0:
            one.queue_us = decided.time_us - one.began_us
            one.cached_tokens = decided.cached_tokens
        self._stop_waiting(decided.request_id, decided.time_us)

    def _end(self, request_id: RequestId, now_us: int) -> None:
        if request_id not in self._open:
            return
        self._stop_waiting(request_id, now_us)
        one = self._open.pop(request_id)
        self._silent.pop(request_id, None)
        self._deferrals.pop(request_id, None)
        self._special.discard(request_id)
        self.done[request_id] = Waited(
            request_id=request_id,
            arrived_us=one.arrived_us,
            waiting_then=one.waiting_then,
            queue_us=one.queue_us,
            first_token_us=one.first_token_us,
            cached_tokens=one.cached_tokens,
            retractions=one.retractions,
            bypassed=one.bypassed,
            by_cause=dict(sorted(one.by_cause.items(), key=lambda item: (-item[1], item[0]))),
        )

    # ---------------------------------------------------------------------------------------------------- causes

    def _note_causes(self, now_us: int, engine: Engine) -> None:
        cause = cause_key(line_cause(engine, NO_REQUEST, self._deferrals))
        if cause != self._line.cause:
            self._line.turn(cause, now_us)
        head = engine.deferred[0] if engine.deferred is not None else NO_REQUEST
        if self._apart:
            self._unplaced += [request_id for request_id in self._apart if not self._is_apart(request_id, head, engine)]
        if head not in self._apart:
            self._unplaced.append(head)
        if engine.blocked:
            self._unplaced += [request_id for request_id in engine.blocked if request_id not in self._apart]
        for request_id in self._unplaced:
            self._place(request_id, now_us, self._is_apart(request_id, head, engine))
        self._restless = bool(self._special or engine.blocked) and any(
            request_id in self._special or request_id in engine.blocked for request_id in self._apart
        )
        for request_id, one in self._apart.items():
            cause = cause_key(why_waits(engine, request_id, self._deferrals))
            if cause != one.cause:
                one.waited(one.cause, now_us - one.since_us)
                one.cause, one.since_us = cause, now_us

    def _is_apart(self, request_id: RequestId, head: RequestId, engine: Engine) -> bool:
        """Whether a waiting request may have another cause than the queue."""
        return request_id == head or request_id in self._special or request_id in engine.blocked

    def _place(self, request_id: RequestId, now_us: int, apart: bool) -> None:
        """Move a waiting request into or out of `_apart`, if it is not there yet."""
        one = self._waiting.get(request_id)
        if one is None or (request_id in self._apart if apart else one.mark is not None):
            return
        self._settle(request_id, one, now_us)
        if apart:
            self._apart[request_id] = one
        else:
            one.mark = self._line.totals_us(now_us)

    def _settle(self, request_id: RequestId, one: _OpenWait, now_us: int) -> None:
        """Add the time in the queue or apart to a request's causes, and remove it from both."""
        if self._apart.pop(request_id, None) is not None:
            one.waited(one.cause, now_us - one.since_us)
            one.cause = ""
        elif one.mark is not None:
            for cause, us in self._line.totals_us(now_us).items():
                one.waited(cause, us - one.mark.get(cause, 0))
            one.mark = None

    def _stop_waiting(self, request_id: RequestId, now_us: int) -> None:
        one = self._waiting.pop(request_id, None)
        if one is not None:
            self._settle(request_id, one, now_us)
            if one.first_token_us < 0:
                one.bypassed += one.passed
            one.passed = 0
