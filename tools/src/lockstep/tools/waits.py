"""What each request waited for before its first token: a fold over a run, cheap enough to go along with a simulation.

    waits = WaitFold()
    simulate(setup, observer=waits)                      # every step but those of uniform decodes
    waits.close()[17].by_cause                          # {"behind another: prefill budget": 2_743_000, ...}

It reports of every request what a `RequestTimeline` has of a few, as far as it explains the TTFT, and by the same rules
(`story.line_cause`, `story.why_waits`). A line may be long, and all in it wait for the same thing but its head and
those that have a reason of their own. So how long the queue has waited for what is counted once, for all; a request
remembers these counts as of its joining. Only a request with a reason of its own is looked at in every step.
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
"""Of requests in the queue: `request_timeline.why_waits` checks for a request with one of these whether it still
holds."""


class Waited(msgspec.Struct, frozen=True, array_like=True):
    """What one request waited for until its first token. Times in microseconds; what has not happened is -1."""

    request_id: RequestId
    arrived_us: int
    waiting_then: int  # other requests
    queue_us: int  # from its arrival to its first admission
    first_token_us: int  # when the first message with output went out
    cached_tokens: int  # at the first admission; 0 without one
    retractions: int
    bypassed: int  # requests from behind it in the line that were admitted before it
    by_cause: dict[str, int]  # by telling.cause_key; longest first

    @property
    def ttft_us(self) -> int:
        return self.first_token_us - self.arrived_us if self.first_token_us >= 0 else -1

    @property
    def computed_us(self) -> int:
        """The part of its TTFT in which it did not wait; -1 without one."""
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
        self.bypassed = self.passed = 0  # in the waits before this one; in this one
        self.began_us = -1  # when it began to wait
        self.by_cause: dict[str, int] = {}
        self.mark: dict[str, int] | None = None  # what the line had waited for when it joined; None: not one of it
        self.cause = ""  # of one that waits for something of its own; "": it does not
        self.since_us = -1

    def waited(self, cause: str, us: int) -> None:
        """Add to what it waited for."""
        if cause and us > 0 and self.first_token_us < 0:
            self.by_cause[cause] = self.by_cause.get(cause, 0) + us


class _WaitCause:
    """How long the line has waited for what, so far."""

    def __init__(self) -> None:
        self.cause = ""
        self._since_us = 0
        self._total_us: dict[str, int] = {}

    def turn(self, cause: str, now_us: int) -> None:
        """From now on it waits for this."""
        self._total_us = self.totals_us(now_us)
        self._since_us, self.cause = now_us, cause

    def totals_us(self, now_us: int) -> dict[str, int]:
        """By cause."""
        totals = dict(self._total_us)
        if self.cause:
            totals[self.cause] = totals.get(self.cause, 0) + now_us - self._since_us
        return totals


class WaitFold:
    """Feed it every step in order, with the engine as it stands behind it. Uniform decodes may be left out."""

    def __init__(self) -> None:
        self.done: dict[RequestId, Waited] = {}  # those that have ended
        self._open: dict[RequestId, _OpenWait] = {}
        self._waiting: dict[RequestId, _OpenWait] = {}
        self._apart: dict[RequestId, _OpenWait] = {}  # of the waiting, those with a cause of their own
        self._asked: list[RequestId] = []  # requests with a place in the queue that may be another after this step
        self._silent: dict[RequestId, _OpenWait] = {}  # no token has gone out
        self._said: dict[RequestId, AdmissionDeferred] = {}  # the last of each request
        self._special: set[RequestId] = set()  # requests with one of OWN_REASONS
        self._line = _WaitCause()
        self._state: object = None  # when causes were noted last
        self._restless = False  # whether any request had a reason of its own then
        self._last_us = 0

    def observe(self, event: Observed, step: Step, engine: Engine) -> None:
        """Take in a step. Requests that came before the first one are left out."""
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
            # What the cause of the line is read from, beside what is decided; reasons of one's own may pass unsaid.
            state = engine.deferred, engine.paused, engine.maintenance.admits
            if step.decided or self._restless or state != self._state:
                self._state = state
                self._note_causes(now_us, engine)
        self._asked.clear()

    def close(self) -> dict[RequestId, Waited]:
        """Of all requests. The run is over, and so is what was still going on in it."""
        for request_id in list(self._open):
            self._end(request_id, self._last_us)
        return self.done

    # -------------------------------------------------------------------------------------------------- decided facts

    def _arrive(self, event: RequestArrived, engine: Engine) -> None:
        others = len(engine.waiting)
        while others and engine.waiting[others - 1].request_id >= event.request_id:
            others -= 1  # itself and its other samples stand at the end
        for sample in range(sample_count(event)):
            one = _OpenWait(event.time_us, others + len(engine.blocked))
            self._open[event.request_id + sample] = self._silent[event.request_id + sample] = one

    def _hear(self, now_us: int, sent: StreamTokens) -> None:
        ids = sent.request_ids.tolist()
        for request_id in self._silent.keys() & ids:
            at = ids.index(request_id)
            if sent.offsets[at] + sent.token_counts[at] > 0:
                one = self._silent.pop(request_id)
                self._settle(request_id, one, now_us)  # of a decode engine: it may wait for its place still
                one.bypassed += one.passed
                one.first_token_us, one.passed = now_us, 0

    def _learn(self, step: Step, engine: Engine) -> None:
        passed_by = False
        for decided in step.decided:
            match decided:
                case AdmissionDeferred():
                    self._said[decided.request_id] = decided
                    if decided.reason in OWN_REASONS or engine.memory.tiers.present:
                        self._special.add(decided.request_id)
                        self._asked.append(decided.request_id)
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
        self._asked.append(request_id)

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
        self._said.pop(request_id, None)
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

    # ------------------------------------------------------------------------------------------- what was waited for

    def _note_causes(self, now_us: int, engine: Engine) -> None:
        cause = cause_key(line_cause(engine, NO_REQUEST, self._said))
        if cause != self._line.cause:
            self._line.turn(cause, now_us)
        head = engine.deferred[0] if engine.deferred is not None else NO_REQUEST
        if self._apart:
            self._asked += [request_id for request_id in self._apart if not self._is_apart(request_id, head, engine)]
        if head not in self._apart:
            self._asked.append(head)
        if engine.blocked:
            self._asked += [request_id for request_id in engine.blocked if request_id not in self._apart]
        for request_id in self._asked:
            self._place(request_id, now_us, self._is_apart(request_id, head, engine))
        self._restless = bool(self._special or engine.blocked) and any(
            request_id in self._special or request_id in engine.blocked for request_id in self._apart
        )
        for request_id, one in self._apart.items():
            cause = cause_key(why_waits(engine, request_id, self._said))
            if cause != one.cause:
                one.waited(one.cause, now_us - one.since_us)
                one.cause, one.since_us = cause, now_us

    def _is_apart(self, request_id: RequestId, head: RequestId, engine: Engine) -> bool:
        """Whether a request that waits may wait for something else than all others in the line."""
        return request_id == head or request_id in self._special or request_id in engine.blocked

    def _place(self, request_id: RequestId, now_us: int, apart: bool) -> None:
        """Let a request that waits go to where it belongs, if it is not there."""
        one = self._waiting.get(request_id)
        if one is None or (request_id in self._apart if apart else one.mark is not None):
            return
        self._settle(request_id, one, now_us)
        if apart:
            self._apart[request_id] = one
        else:
            one.mark = self._line.totals_us(now_us)

    def _settle(self, request_id: RequestId, one: _OpenWait, now_us: int) -> None:
        """Add up what it has waited for where it is; then it is nowhere."""
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
