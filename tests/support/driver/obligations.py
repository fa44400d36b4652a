"""Obligations: what must have happened after a command, or with a decision, beside the states that may follow.

The invariants of the core hold in each state, and would hold if a cancel were ignored, twice as many requests were
retracted, or the whole cache were evicted. One class here has the obligations of one feature:

    EndObligations         a cancelled request has ended in the same step, and no later plan names an ended request
    PauseObligations       a paused engine launches nothing; after `retract` no request has a row
    RetractionObligations  a decode retracts only for pages that are neither available nor coming back
    MatchObligations       the number by which matches are known to be old never falls
    EvictionObligations    an eviction frees what allocations lack, and less than one eviction step more
    PreemptionObligations  a more important request gets the place of a less important one
    PrefetchObligations    a prefetch for which no request waits is cancelled
    WaitObligations        a decode that is due and not launched for lack of pages is recorded, with their number

The numbers are computed from the state before the step, by other means than the engine's. `min_new_tokens` and the
precedence of ends are in `RequestPiece`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.core.contract.commands import LoadFromHost, Step
from lockstep.core.contract.events import (
    AdmissionDeferred,
    CancelAll,
    CancelMany,
    Control,
    ControlRequested,
    DecodeSkipped,
    LaneReady,
    Observed,
    PagesEvicted,
    Pause,
    RequestCancelled,
    RequestRetracted,
    UpdateWeights,
)
from lockstep.core.requests.retraction import importance
from lockstep.core.requests.rules import EVICT_AHEAD_SHARE
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import Request
from tests.support.driver.piece import Piece, Subject


def needed_pages(subject: Subject, running: RunningState) -> int:
    """Return the pages that the next decode cannot do without: for newest tokens, not for drafts."""
    engine, config = subject.engine, subject.engine.config
    if config.block_tokens:
        return _blocks_needed(subject, running)
    steps = max(config.decode_look_ahead, config.decode_steps_per_launch)
    spare = engine.memory.table.spare_of(running.batch.rows)
    spare = np.zeros(running.batch.size, np.int32) if spare is None else spare
    columns = running.positions.tolist(), running.batch.limits.tolist(), spare.tolist()
    return sum(
        max(-(-min(position + steps, limit - 1) // config.page_size) - -(-position // config.page_size) - kept, 0)
        for position, limit, kept in zip(*columns, strict=True)
    )


def _blocks_needed(subject: Subject, running: RunningState) -> int:
    """Return the members that begin a block in a new page: the block before it is finished, and so is its page."""
    found = 0
    for row, position in zip(running.batch.rows.tolist(), running.positions.tolist(), strict=True):
        on_device = subject.kv.rows[row]
        begins = not on_device.passes and on_device.reach == position
        found += begins and position % subject.engine.config.page_size == 0
    return found


class EndObligations(Piece):
    """Cancels, one or many, by clients or by an operator."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._ended: set[int] = set()  # requests that had ended before this step

    def before(self, event: Observed) -> None:
        """Keep the live requests that the event cancels."""
        live = self.engine.requests
        self._cancelled: list[int] = []
        match event:
            case RequestCancelled(request_id=one) if one in live:
                self._cancelled = [one]
            case ControlRequested(control=CancelMany(request_ids)):
                self._cancelled = [one for one in request_ids if one in live]
            case ControlRequested(control=CancelAll() | Pause(mode="cancel")):
                self._cancelled = list(live)

    def checked(self, event: Observed, step: Step) -> None:
        records, engine = self.subject.records, self.engine
        for one in self._cancelled:
            assert one not in engine.requests, f"r{one} was cancelled, and is {engine.requests[one].state.name}"
            assert records[one].ended, f"r{one} was cancelled, and its client was not told"
        if (plan := step.launched()) is not None:
            named = self._ended.intersection(plan.request_ids.tolist())
            assert not named, f"batch {plan.batch_id} names {sorted(named)}, which have ended before"
        for command in step.commands:
            ended = getattr(command, "request_id", None)
            if ended in records and records[ended].ended:
                self._ended.add(ended)


class MatchObligations(Piece):
    """Changes of the radix cache after which a match may be another one."""

    def before(self, event: Observed) -> None:
        self._epoch = self.engine.memory.radix.epoch

    def checked(self, event: Observed, step: Step) -> None:
        epoch = self.engine.memory.radix.epoch
        assert epoch >= self._epoch, f"the radix cache was at epoch {self._epoch}, and is at {epoch}"


class PauseObligations(Piece):
    """Pauses, and new weights that retract or cancel what runs."""

    def before(self, event: Observed) -> None:
        self._paused, self._live = self.engine.controls.paused, list(self.engine.requests)

    def checked(self, event: Observed, step: Step) -> None:
        engine = self.engine
        if self._paused and engine.controls.paused:
            assert step.launched() is None, "the engine is paused, and launches"
        if not isinstance(event, ControlRequested):
            return
        match event.control:
            case Pause(mode):
                assert mode == "admission" or engine.controls.paused, f"Pause({mode}) does not pause"
                self._check_left(event.control, mode)
            case UpdateWeights(mode=mode) if self._begun(event):
                self._check_left(event.control, mode)

    def _begun(self, event: ControlRequested) -> bool:
        """Whether this control is the first job of maintenance, and not one behind others."""
        jobs = self.engine.maintenance.jobs
        return bool(jobs) and jobs[0].control_id == event.control_id

    def _check_left(self, control: Control, mode: str) -> None:
        requests = self.engine.requests
        if mode == "retract":
            held = [one.name for one in requests.values() if one.row >= 0]
            assert not held, f"after {control} {held} have rows"
            assert self.engine.prefilling is None, f"after {control} a prompt is still split"
        if mode == "cancel":
            left = [one for one in self._live if one in requests]
            assert not left, f"after {control} {left} have not ended"


class RetractionObligations(Piece):
    """S27: nothing is retracted for pages that work in flight frees, for drafts, or for pages that a row holds."""

    def before(self, event: Observed) -> None:
        self._needed = None
        if isinstance(event, LaneReady) and not self.engine.memory.hybrid.present:  # other pools may be short there
            running = self.engine.microbatches.states[event.microbatch]
            self._needed, self._returning = needed_pages(self.subject, running), self._returning_pages()

    def checked(self, event: Observed, step: Step) -> None:
        if self._needed is None:
            return
        victims = [one for one in step.decided if isinstance(one, RequestRetracted) and one.reason == "pages"]
        for victim in victims[:1]:  # later ones also wait for pages of the earlier ones
            available = victim.available_pages + self._returning
            assert self._needed > available, (
                f"S27: r{victim.request_id} was retracted for a decode of {self._needed} pages: "
                f"{victim.available_pages} are available, {self._returning} come back"
            )
            if self._returning:
                self.mark("retracted beside pages that come back")

    def _returning_pages(self) -> int:
        """Return the private pages that come back with the batches in flight."""
        memory, page_size = self.engine.memory, self.engine.config.page_size
        private = [(one.computed, one.protected_pages) for one in memory.deferred.rows]
        for batch in self.engine.in_flight:
            private += [(one.computed, one.protected_pages) for one in batch.ending_requests()]
        pages = sum(-(-computed // page_size) - protected for computed, protected in private)
        return pages + sum(each.size for _, each in memory.deferred.pages)


class EvictionObligations(Piece):
    """Evictions for an allocation."""

    def before(self, event: Observed) -> None:
        self._free = self.engine.memory.pool.free_count

    def checked(self, event: Observed, step: Step) -> None:
        evictions = [
            one for one in step.decided if isinstance(one, PagesEvicted) and one.reason in ("admission", "decode")
        ]
        if not evictions:
            return
        evicted = sum(one.pages for one in evictions)
        lacking = max(sum(self._opened(step)) - self._free, 0)
        ahead = len(evictions) * (self.engine.config.pages // EVICT_AHEAD_SHARE)
        assert evicted <= lacking + ahead, (
            f"{evicted} pages were evicted, {lacking} were lacking, and {ahead} may be evicted ahead"
        )

    def _opened(self, step: Step) -> Iterator[int]:
        """Yield the pages that the step allocates: for the positions of its plan, and for loads."""
        page_size, plan = self.engine.config.page_size, step.launched()
        if plan is not None:
            stops = plan.stops.copy()
            if plan.speculation is not None:  # all drafts of a tree have slots, also those on other paths
                drafts = plan.speculation.draft_lengths
                stops[len(stops) - len(drafts) :] += drafts - plan.speculation.path_lengths()
            for start, stop in zip(plan.starts.tolist(), stops.tolist(), strict=True):
                yield -(-stop // page_size) - -(-start // page_size)
        for command in step.commands:
            if isinstance(command, LoadFromHost):
                yield command.device_pages.size


class PreemptionObligations(Piece):
    """Preemption for a place of `max_running_requests`, where memory is plentiful and nothing comes back by itself."""

    def before(self, event: Observed) -> None:
        self._examines = isinstance(event, LaneReady) and self._settled()

    def _settled(self) -> bool:
        """Whether no request leaves without a decision, and only full pages are needed to start."""
        engine, config = self.engine, self.engine.config
        return (
            config.enable_priority_preemption
            and not engine.memory.deferred.rows
            and not any(batch.ending_requests() for batch in engine.in_flight)
            and not (engine.in_flight and engine.in_flight[-1].plan.extend_rows)
            and not engine.memory.hybrid.present
            and not engine.memory.tiers.present
            and not engine.microbatches.several
            and config.max_loras is None
            and engine.prefilling is None
        )

    def checked(self, event: Observed, step: Step) -> None:
        if not self._examines:
            return
        for deferred in step.decided:
            if isinstance(deferred, AdmissionDeferred) and deferred.reason in ("running_limit", "rows"):
                self._check(self.engine.requests[deferred.request_id], step)

    def _check(self, request: Request, step: Step) -> None:
        engine, config = self.engine, self.engine.config
        plan = step.launched()
        if plan is not None and plan.extend_rows:
            return  # the budgets of this extend may be used up
        least = importance(request, config) - config.priority_preemption_threshold
        members, positions = engine.all_running
        below = [one.name for one in members.requests if importance(one, config) < least]
        if not below:
            return
        self.mark("a place is refused to the less important only")
        wanted = len(request.tokens) // 4 + request.max_new_tokens
        wanted += int((members.limits - positions).sum()) + 2 * config.page_size * (members.size + 1)
        plentiful = wanted <= engine.memory.available_pages * config.page_size
        budget = min(config.max_prefill_tokens, config.chunked_prefill_size or config.max_prefill_tokens)
        fits = members.size + 2 * config.page_size < budget and len(request.tokens) // 4 + members.size < budget
        assert not (plentiful and fits), f"{request.name} waits for a place, and {below} are less important"


class PrefetchObligations(Piece):
    """`CancelPrefetch` when the last request that could use it has left."""

    def checked(self, event: Observed, step: Step) -> None:
        tagged, tiers = self.subject.tiers, self.engine.memory.tiers
        if tagged is None:
            return
        waiting = {one.request_id for one in self.engine.waiting}
        best_effort = self.engine.config.tiers.prefetch_policy == "best_effort"
        for number in [one.number for one in tiers.operations.values() if one.kind == "prefetch"]:
            users = [
                request_id
                for request_id, candidate in tiers.candidates.items()
                if request_id in waiting
                and (candidate.operation == number or (best_effort and candidate.prefetch == number))
            ]
            assert users or number in tagged.cancelled, f"no request waits for prefetch {number}, which goes on"


class WaitObligations(Piece):
    """The record of each decode that is due and not launched, `DecodeSkipped`, and its number of lacking pages."""

    def before(self, event: Observed) -> None:
        engine = self.engine
        free = len(engine.in_flight) < engine.config.launches_max and not engine.stands_still
        self._examines = isinstance(event, LaneReady) and free and not engine.microbatches.several and not engine.ranks

    def checked(self, event: Observed, step: Step) -> None:
        if not self._examines or step.launched() is not None or self.engine.stands_still:
            return
        running = self.engine.microbatches.current
        due = running.batch.size and bool((running.positions < running.batch.limits - 1).any())
        if running.decode_owed and due and not any(isinstance(one, RequestRetracted) for one in step.decided):
            self.mark("a decode that is owed has no pages")
            skipped = [one for one in step.decided if isinstance(one, DecodeSkipped)]
            assert skipped, "a decode was skipped without a record"
            if not self.engine.memory.hybrid.present:  # other pools may be short there
                lacking = needed_pages(self.subject, running) - self._available_pages()
                recorded = [one.needed_pages for one in skipped]
                assert recorded == [lacking], f"a decode lacks {lacking} pages, and {recorded} are recorded"

    def _available_pages(self) -> int:
        """Return the free pages and the cached ones without a lock, counted one by one."""
        memory = self.engine.memory
        unlocked = sum(len(node.pages) for node in memory.radix.nodes() if not node.lock_count)
        return len(memory.pool.free_ids()) + unlocked
