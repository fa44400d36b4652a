"""Pipeline microbatches: places in them, and preemption for a place."""

from __future__ import annotations

from collections import Counter

from lockstep.core.contract.commands import BatchPlan, Step
from lockstep.core.contract.events import LaneReady, Observed, RequestFinished, RequestRetracted
from tests.support.driver.piece import Piece, Subject


class MicrobatchPiece(Piece):
    """Several microbatches; with one of them nothing is checked."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.chunk_in = -1  # the microbatch that computed the newest chunk of the chunked request

    def before(self, event: Observed) -> None:
        """Keep which request has a place in which microbatch, and which requests end with what is in flight."""
        engine = self.engine
        self._several, self._chunked = engine.microbatches.several, None
        if self._several:
            self._members = dict(engine.microbatches.members)
            self._ending = [request.request_id for batch in engine.in_flight for request in batch.ending_requests()]
            self._chunked = engine.prefilling.request_id if engine.prefilling is not None else None

    def checked(self, event: Observed, step: Step) -> None:
        if not self._several:
            return
        if isinstance(event, LaneReady):
            self._check_places(step, event.microbatch)
        if (plan := step.launched()) is not None:
            self._mark_plan(plan)

    def _check_places(self, step: Step, at: int) -> None:
        """S27 of microbatches: a place that is free, or comes free, is taken before a request is preempted for one."""
        members, several = self._members, self.engine.microbatches
        victims = [one for one in step.decided if isinstance(one, RequestRetracted) and one.reason == "preempted"]
        victims = [one for one in victims if one.beneficiary not in members]  # the chunked request has a place
        if not victims:
            return
        for event in step.decided:  # a request that ended before freed its place
            if isinstance(event, RequestFinished):
                members.pop(event.request_id, None)
        taken = Counter(number for request_id, number in members.items() if request_id not in self._ending)
        free = [several.size - taken[number] for number in range(several.count)]
        if any(members[victim.request_id] != at for victim in victims):
            self.mark("preempted in another microbatch")
        if free[at] > 0:
            return
        assert max(free) <= 0, f"S27: {victims} for a place in microbatch {at}, and there are {free}"
        assert any(members[victim.request_id] == at for victim in victims), f"S27: {victims} have no place in {at}"
        self.mark("preempted for a place")

    def _mark_plan(self, plan: BatchPlan) -> None:
        flying = {batch.plan.microbatch for batch in self.engine.in_flight}
        if len(flying) == self.engine.config.microbatches:
            self.mark("every microbatch in flight")
        if plan.hybrid is not None and len(flying) > 1:
            if plan.hybrid.pages.size:
                self.mark("windows opened beside another microbatch")
            if plan.hybrid.checkpoint_slots.size:
                self.mark("checkpoint left beside another microbatch")
        if self._chunked is not None and self._chunked in plan.request_ids[: plan.extend_rows].tolist():
            if plan.microbatch != self.chunk_in:
                self.mark("chunk in another microbatch")
        if self.engine.prefilling is not None:
            self.chunk_in = plan.microbatch
