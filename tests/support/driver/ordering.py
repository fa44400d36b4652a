"""The order of the waiting queue, and which requests are preempted for which."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import (
    AdmissionDeferred,
    Observed,
    RequestAdmitted,
    RequestFinished,
    RequestRejected,
    RequestRetracted,
    TurnStarted,
)
from lockstep.core.requests.retraction import importance
from lockstep.core.requests.table import RequestState
from tests.support.driver.piece import Piece, Subject
from tests.support.driver.requests import SamplePiece


class QueuePiece(Piece):
    """L5, counted by other means than the engine's: no request is bypassed more than `bypass_limit` times a wait."""

    def __init__(self, subject: Subject, samples: SamplePiece) -> None:
        super().__init__(subject)
        self.samples = samples
        self.bypassed: Counter[int] = Counter()  # by request: admissions from behind it while it waits
        self.bypassed_before: dict[int, int] = {}  # by request that the last Step admitted, how often until then
        self.ran: set[int] = set()  # requests that were admitted at least once

    def before(self, event: Observed) -> None:
        self._queue, self._held = [request.request_id for request in self.engine.waiting], list(self.engine.blocked)

    def stepped(self, event: Observed, step: Step) -> None:
        """Follow the waiting queue through the decisions of a Step, in their order."""
        queue, limit = self._queue, self.engine.config.bypass_limit
        admitted = [one.request_id for one in step.decided if isinstance(one, RequestAdmitted)]
        self.bypassed_before = {request_id: self.bypassed.get(request_id, 0) for request_id in admitted}
        behind = self.samples.joined_behind(step)
        turns = [one.request_id for one in step.decided if isinstance(one, TurnStarted)]
        for request_id in self._held:  # those without open prerequisites joined before any request left the queue
            if request_id in behind or request_id in turns or request_id in self.engine.blocked:
                continue
            if request_id in self.engine.requests:
                self._join(queue, request_id)
        for decided in step.decided:
            match decided:
                case RequestRetracted(_, request_id) if decided.reason != "preempted":  # preempted: behind admission
                    front = self.engine.config.retracted_requeue == "front"
                    older = takewhile(lambda other, mine=request_id: other in self.ran and other < mine, queue)
                    queue.insert(len(list(older)) if front else len(queue), request_id)
                case AdmissionDeferred(_, request_id, "media") if request_id in queue:  # its encoder output was evicted
                    queue.remove(request_id)
                case TurnStarted(_, request_id):  # its prerequisites are met, and it joins the queue in this Step
                    self._join(queue, request_id)
                case RequestRejected(_, request_id) | RequestFinished(_, request_id) if request_id in queue:
                    queue.remove(request_id)
                case RequestAdmitted(_, request_id):
                    self.ran.add(request_id)
                    ahead = queue[: queue.index(request_id)]
                    queue.remove(request_id)
                    self.bypassed.pop(request_id, None)
                    self.bypassed.update(ahead)
                    if limit is not None and any(self.bypassed[other] >= limit > 0 for other in ahead):
                        self.mark("bypass limit reached")
        for request in self.engine.waiting:
            passed = self.bypassed.get(request.request_id, 0)
            assert limit is None or passed <= limit, f"L5: {request.name} was bypassed {passed} times"
            assert request.bypassed == passed, f"L5: {request.name} counts {request.bypassed}, it was {passed}"

    def _join(self, queue: list[int], request_id: int) -> None:
        """Put a request that is held no more where its arrival puts it."""
        younger = [i for i, other in enumerate(queue) if other not in self.ran and other > request_id]
        queue.insert(younger[0] if younger else len(queue), request_id)


class PreemptionPiece(Piece):
    """S27, B14: a victim is less important by more than the threshold, and returns only behind its beneficiary.

    So whenever a request is preempted again, a more important one has started or left in between.
    """

    def __init__(self, subject: Subject, queue: QueuePiece) -> None:
        super().__init__(subject)
        self.queue = queue
        self.made_room: dict[int, int] = {}  # by victim: the request it was last preempted for

    def before(self, event: Observed) -> None:
        self._idle, self._live = not self.engine.in_flight, dict(self.engine.requests)

    def checked(self, event: Observed, step: Step) -> None:
        engine, bypassed = self.engine, self.queue.bypassed_before
        admitted, limit = list(bypassed), engine.config.bypass_limit
        urgent = [one for one in admitted if limit is not None and bypassed[one] + len(admitted) > limit]
        for request_id in admitted:
            awaited = engine.requests.get(self.made_room.pop(request_id, -1))
            if awaited is not None and awaited.state is RequestState.WAITING:
                alone = (
                    awaited.deferred in ("adapter", "load", "prefetch")
                    or awaited.behind >= 0
                    or awaited.open_prerequisites
                )  # bypassed for a reason of its own
                assert alone or request_id in urgent, f"B14: r{request_id} is back before {awaited.name} started"
        if admitted and self.made_room:
            self.made_room = {victim: other for victim, other in self.made_room.items() if other not in admitted}
        for decided in step.decided:
            if isinstance(decided, RequestRetracted) and decided.reason == "preempted":
                self._check_victim(decided, admitted, step)
        self._mark_refusals(step)

    def _check_victim(self, event: RequestRetracted, admitted: list[int], step: Step) -> None:
        engine, victim, beneficiary = self.engine, event.request_id, event.beneficiary
        plan = step.launched()
        launched = [] if plan is None else plan.request_ids.tolist()
        above = importance(self._live[beneficiary], engine.config) - importance(self._live[victim], engine.config)
        assert above > engine.config.priority_preemption_threshold, f"S27: r{victim} for r{beneficiary}"
        assert victim not in admitted, f"S26: r{victim} started in the step that preempted it"
        goes_on = beneficiary in admitted or beneficiary in launched or self._writes_first()
        assert not self._idle or goes_on, f"S8: r{victim} was preempted for nothing"
        if beneficiary not in admitted:
            self.made_room[victim] = beneficiary
        self.mark("preemption across priorities")
        if beneficiary not in admitted:
            self.mark("pages of a preempted request awaited")

    def _mark_refusals(self, step: Step) -> None:
        """Note why no request was preempted for the one that was deferred."""
        engine, threshold = self.engine, self.engine.config.priority_preemption_threshold
        lacking = engine.requests.get(engine.deferred[0]) if engine.deferred is not None else None
        if lacking is not None and engine.config.enable_priority_preemption and step.launched() is not None:
            rank = importance(lacking, engine.config)
            below = [rank - importance(member, engine.config) for member in engine.all_running[0].requests]
            if below and 0 < max(below) <= threshold:
                self.mark("preemption refused by threshold")
            if below and max(below) > threshold:
                self.mark("preemption would not be enough")

    def _writes_first(self) -> bool:
        """Whether the KV of retracted requests, which the radix cache holds, is first written to host memory."""
        return self.engine.config.retracted_kv == "cache" and self.engine.memory.operations.device_busy
