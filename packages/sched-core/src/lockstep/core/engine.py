"""The scheduler: `Engine.step` takes in one observed fact and returns what was decided and what the host must do now.

No clock, no I/O, no randomness: equal journals give equal Steps. All control flow of scheduling is in this file, in
reading order; the decisions themselves are pure functions in the files named for them (admission, ordering,
retraction). Facts fold; only LaneReady launches.

Who holds a page, at any moment exactly one of:

    the pool's free list | the radix cache | a row, private to its request | a fence, until work in flight is done

**Fences.** A launched plan may read and write the rows and pages it names until its result is delivered. Whoever
leaves a row while such a plan is in flight leaves a `Lease` behind: row, pages and lock stay taken until the last plan
that names the row has been collected. A plan's row whose request has left is *dead* in it: its results are dropped.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import takewhile
from typing import Literal, NamedTuple

import numpy as np

from lockstep.core import control
from lockstep.core.admission import NewTokenRatio, PrefillBudget, chunk_tokens, running_reserve, wanted_for_good
from lockstep.core.commands import (
    NO_DELTAS,
    NO_ROWS,
    BatchPlan,
    FinishRequest,
    LaunchBatch,
    Mode,
    PageDeltas,
    RejectRequest,
    RowTaken,
    Step,
    StreamTokens,
)
from lockstep.core.config import SchedConfig
from lockstep.core.digest import EMPTY_DIGEST, step_digest
from lockstep.core.errors import ContractError
from lockstep.core.events import (
    AdmissionDeferred,
    BatchFinished,
    BatchId,
    ClockAdvanced,
    ControlRequested,
    DecodeSkipped,
    DeferReason,
    EngineRestarted,
    FinishReason,
    HostTimeClamped,
    LaneReady,
    Observed,
    PagesEvicted,
    PrefillCompleted,
    RejectReason,
    RequestAdmitted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
)
from lockstep.core.ordering import ORDERS
from lockstep.core.pages import PagePool
from lockstep.core.radix import Match, RadixCache, RadixNode
from lockstep.core.requests import (
    EMPTY_COHORT,
    NO_ROW,
    Cohort,
    Int32s,
    Int64s,
    Request,
    RequestState,
    RequestTable,
)
from lockstep.core.retraction import choose_victim, members_growing
from lockstep.core.support import Refused, accepted_prompt

NO_FENCE: BatchId = -1
ONE = np.int32(1)
EVICT_AHEAD_SHARE = 256  # evict at least pages // this at once, so that not every decode of a full cache evicts

RetractReason = Literal["pages", "forced", "pause", "restart"]


class InFlight:
    """A launched batch whose result was not delivered yet."""

    __slots__ = ("dead", "ending", "plan", "requests", "sampled_at", "samplers")

    def __init__(self, plan: BatchPlan, requests: list[Request], samplers: Cohort, ending: list[int]) -> None:
        self.plan = plan
        self.requests = requests  # by position in the plan
        self.samplers = samplers  # the rows that sample, as columns
        self.sampled_at: Int32s = plan.stops if plan.mode == "decode" else plan.stops[plan.sample_rows]
        self.ending = ending  # samplers that end by length with this batch
        self.dead: list[int] = []  # rows whose request left after the launch


class Lease(NamedTuple):
    """What a request left behind in flight: its row, its pages and its lock, until batch `fence` is collected."""

    fence: BatchId
    row: int
    namespace: str
    tokens: bytes  # int32 ids it came to the row with
    prompt_tokens: int
    handle: RadixNode | None
    protected_pages: int
    computed: int  # positions whose KV is launched
    publish: bool  # keep the computed KV in the radix cache


class Part(NamedTuple):
    """One request's share of an extend: positions [start:stop)."""

    request: Request
    start: int
    stop: int


class Obstacle(NamedTuple):
    """Why a request could not be admitted, with the two numbers that were compared, in tokens, where there were any."""

    reason: DeferReason
    needed: int = 0
    available: int = 0


class Rewrite(NamedTuple):
    """Entries of a row's page table that changed outside a launch; the next plan tells the device."""

    row: int
    first: int  # page index
    pages: Int32s


class Engine:
    """Decides what runs next, for one engine. Build it from a SchedConfig; feed it every observed event in order."""

    def __init__(self, config: SchedConfig) -> None:
        self.config = config
        self.now_us = 0
        self.generation = 0
        self.digest = EMPTY_DIGEST

        self.page_shift = config.page_size.bit_length() - 1  # positions >> page_shift: the page they lie in
        self.table = RequestTable(config.rows_max, config.page_size)
        self.pool = PagePool(config.pages)
        self.radix = RadixCache(config.page_size, config.radix_capacity_pages) if config.radix_cache else None

        self.requests: dict[RequestId, Request] = {}  # every request that has not ended
        self.waiting: list[Request] = []
        self.prefilling: Request | None = None  # the one whose prompt is split and not launched to its end
        self.cohort: Cohort = EMPTY_COHORT  # those that decode; the rest of RUNNING ends with a batch in flight
        self.positions: Int32s = NO_ROWS  # per member of the cohort: the next position to compute
        self.active = 0  # requests PREFILLING or RUNNING

        self.in_flight: deque[InFlight] = deque()
        self.leases: list[Lease] = []
        self.fenced_pages: list[tuple[BatchId, Int32s]] = []  # duplicates given up while a batch still reads them
        self.rewrites: list[Rewrite] = []
        self.rows_taken: list[RowTaken] = []

        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.batch_is_full = False  # admission ran out of memory; not tried again before somebody leaves
        self.decode_owed = False  # a retraction made room for a decode: it goes before any admission
        self.deferred: tuple[RequestId, DeferReason] | None = None  # what was last said about the head of the line
        self.horizon = 0  # decode launches until a member ends by length or outgrows the tables
        self.decode_launches = 0
        self.forced_at = -1  # decode launches when a retraction was last forced
        self.launch_found_nothing = False  # this step had a free slot and nothing to launch
        self.next_batch_id = 0
        self.last_request_id = -1
        self.timers: list[tuple[int, RequestId]] = []  # heap of deadlines

        self.paused = False
        self.draining = False
        self.drains: list[int] = []  # control ids waiting for everything to end

        self.tokens_discarded = 0  # sampled for rows that were dead by then

    # ------------------------------------------------------------------------------------------------------ the policy

    def step(self, event: Observed) -> Step:
        """Take in one fact; return what was decided and what the host must do now.

        Raises ContractError, with the state unchanged, for a fact that cannot be: time running backwards, a result
        nobody launched or of the wrong size, a request id that does not increase, an event of a feature not built yet.
        """
        if event.time_us < self.now_us:
            raise ContractError(f"time ran backwards: {event.time_us} us after {self.now_us} us; the host must clamp")
        found_nothing = False
        step = Step()
        match event:
            case BatchFinished():
                self._collect(event, step)
            case LaneReady():
                found_nothing = self._launch(event, step)
            case RequestArrived():
                self._enqueue(event, step)
            case RequestCancelled():
                self._cancel(event, step)
            case ControlRequested():
                self.now_us = event.time_us
                control.apply(self, event, step)
            case EngineRestarted():
                control.restart(self, event, step)
            case ClockAdvanced() | HostTimeClamped():
                self.now_us = event.time_us
            case _:
                raise ContractError(f"{type(event).__name__} belongs to a feature this engine does not have yet")
        self.launch_found_nothing = found_nothing
        if self.timers:
            self._expire(step)
            step.wake_at_us = self.timers[0][0] if self.timers else None
        if not self.requests:
            self._settle_idle(step)
        self.digest = step.digest = step_digest(self.digest, step)
        return step

    def _launch(self, event: LaneReady, step: Step) -> bool:
        """Prefill first, then decode; but a decode that others gave pages up for goes before any prefill.

        Returns: whether a slot was free and there was nothing to launch.
        """
        if event.microbatch:
            raise ContractError(f"LaneReady for microbatch {event.microbatch}: this engine has no pipeline stages")
        self.now_us = event.time_us
        self._expire(step)  # nobody is admitted past its deadline
        if self.paused or len(self.in_flight) > self.config.overlap_depth:
            return False
        if self.decode_owed and self.cohort.size:
            batch = self._plan_decode(step)
        else:
            batch = self._plan_extend(step) or self._plan_decode(step)
        if batch is None:
            return True
        self.in_flight.append(batch)
        step.commands.append(LaunchBatch(batch.plan))
        return False

    # ----------------------------------------------------------------------------------------- arrivals and departures

    def _enqueue(self, event: RequestArrived, step: Step) -> None:
        """Accept a request into the waiting line, or reject what can never run."""
        if event.request_id <= self.last_request_id:
            raise ContractError(f"request id {event.request_id} does not increase after {self.last_request_id}")
        self.now_us = event.time_us
        self.last_request_id = event.request_id
        config = self.config
        try:
            self._refuse_newcomers()
            tokens = accepted_prompt(event, config)
        except Refused as refused:
            self._reject(event.request_id, refused.reason, refused.message, step)
            return
        stops = event.stop_token_ids if event.ignore_eos else (*config.eos_token_ids, *event.stop_token_ids)
        most = config.request_tokens_max - len(tokens) // 4
        request = Request(event, tokens, min(event.max_new_tokens, most), stops)
        request.stream_every = config.stream_interval if event.stream else config.force_stream_interval
        self.requests[request.request_id] = request
        self.waiting.append(request)
        queued = RequestQueued(self.now_us, request.request_id, request.prompt_tokens, request.max_new_tokens)
        request.advance(queued)
        step.decided.append(queued)
        self._set_timers(request)

    def _refuse_newcomers(self) -> None:
        if self.draining:
            raise Refused("draining", "the engine is draining and takes no new requests")
        limit = self.config.max_queued_requests
        if limit is not None and len(self.waiting) >= limit:
            raise Refused("queue_full", f"{len(self.waiting)} requests wait already (max_queued_requests {limit})")

    def _reject(self, request_id: RequestId, reason: RejectReason, message: str, step: Step) -> None:
        rejected = RequestRejected(self.now_us, request_id, reason, message)
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.waiting.remove(request)
            self.batch_is_full = False  # whoever is behind it may fit
            request.advance(rejected)
        step.decided.append(rejected)
        step.commands.append(RejectRequest(request_id, reason, message))

    def _cancel(self, event: RequestCancelled, step: Step) -> None:
        """End a request wherever it is. Late echoes of requests that ended are ignored."""
        self.now_us = event.time_us
        request = self.requests.get(event.request_id)
        if request is not None:
            self.finish(request, "cancelled", step)

    def finish(self, request: Request, reason: FinishReason, step: Step, *, flush: bool = False) -> None:
        """End a request: free what it holds, keep its computed KV for others, close its stream.

        With `flush`, tokens that its cadence held back are sent first; for ends that come with no new token.
        """
        outputs = self.outputs_of(request)
        if flush:
            self._flush_stream(request, outputs, step)
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            self.batch_is_full = False  # whoever is behind it may fit
        else:
            self._leave(request, step, publish=reason not in ("invalid", "error"))
        del self.requests[request.request_id]
        cached = max(request.cached_tokens, 0)
        finished = RequestFinished(self.now_us, request.request_id, reason, outputs, cached)
        request.advance(finished)
        step.decided.append(finished)
        step.commands.append(FinishRequest(request.request_id, reason, request.prompt_tokens, outputs, cached))

    def _flush_stream(self, request: Request, outputs: int, step: Step) -> None:
        """Send what its cadence has held back so far."""
        every = request.stream_every if request.streams else -request.stream_every
        sent = int(sent_by(np.array([outputs], np.int32), np.array([every], np.int32))[0])
        if sent == outputs:
            return
        held_back = np.frombuffer(self._tokens(request, outputs), np.int32)[request.prompt_tokens + sent :]
        ids, offsets = np.array([request.request_id], np.int64), np.array([sent], np.int32)
        step.commands.append(StreamTokens(ids, offsets, np.array([held_back.size], np.int32), held_back))

    def retract(self, request: Request, reason: RetractReason, step: Step) -> None:
        """Take a running request's pages back. It waits again and keeps every token delivered so far."""
        outputs = self.outputs_of(request)
        running = request.state is RequestState.RUNNING
        sampled = self.computed_of(request) + 1 - request.prompt_tokens if running else outputs
        request.tokens = self._tokens(request, outputs)
        request.outputs = outputs
        pages = -(-self.computed_of(request) // self.config.page_size) - request.protected_pages
        retracted = RequestRetracted(self.now_us, request.request_id, outputs, pages, sampled - outputs, reason)
        self._leave(request, step, publish=False)
        request.advance(retracted)
        request.waiting_since_us = self.now_us
        request.matched = (-1, 0)
        if self.config.retracted_requeue == "front":
            ahead = takewhile(
                lambda other: other.cached_tokens >= 0 and other.request_id < request.request_id, self.waiting
            )
            self.waiting.insert(len(list(ahead)), request)
        else:
            self.waiting.append(request)
        step.decided.append(retracted)

    def _set_timers(self, request: Request) -> None:
        config = self.config
        if request.deadline_us is None and config.waiting_timeout_us is not None:
            request.deadline_us = request.arrived_us + config.waiting_timeout_us
        if request.finish_by_us is None and config.running_timeout_us is not None:
            request.finish_by_us = request.arrived_us + config.running_timeout_us
        for due in (request.deadline_us, request.finish_by_us):
            if due is not None:
                heappush(self.timers, (due, request.request_id))

    def _expire(self, step: Step) -> None:
        """End what is overdue; drop timers of requests that need them no more."""
        while self.timers:
            due, request_id = self.timers[0]
            request = self.requests.get(request_id)
            never_ran = request is not None and request.cached_tokens < 0
            relevant = request is not None and (
                due == request.finish_by_us or (due == request.deadline_us and never_ran)
            )
            if relevant and due > self.now_us:
                return
            heappop(self.timers)
            if not relevant or request is None:
                continue
            if never_ran:
                waited_us = self.now_us - request.arrived_us
                self._reject(request_id, "deadline", f"not admitted within {waited_us} us of its arrival", step)
            else:
                self.finish(request, "timeout", step, flush=True)

    def _settle_idle(self, step: Step) -> None:
        """Everything accepted has ended."""
        self.ratio.idle()
        self.decode_owed = False
        if self.drains and not self.in_flight:
            control.answer_drains(self, step, ok=True)

    # --------------------------------------------------------------------------------------------------------- prefill

    def _plan_extend(self, step: Step) -> InFlight | None:
        """The next chunk of the split prompt, then arrivals in the policy's order, as far as the budgets go."""
        if self.prefilling is None and (not self.waiting or self.batch_is_full):
            return None
        config = self.config
        reserve = 0
        if self.waiting and self.cohort.size:
            remaining = self.cohort.limits - self.positions - 1
            reserve = running_reserve(remaining, self.cohort.ignores_eos, self.ratio.value)
        available = self.available_pages * config.page_size
        budget = PrefillBudget(
            available, reserve, config.max_prefill_tokens, config.chunked_prefill_size, config.page_size
        )

        parts: list[Part] = []
        if self.prefilling is not None:
            self._continue_chunk(self.prefilling, budget, parts, step)
            if not parts:
                return None  # no page for it now; decodes go on and give pages back
        if self.waiting and not self.batch_is_full:
            admitted = 0
            for request in ORDERS[config.schedule_policy](self.waiting, self.radix):
                obstacle = self._try_admit(request, budget, parts, step)
                if obstacle is not None:
                    self._defer(request, obstacle, step)
                    break
                admitted += 1
            if admitted and config.schedule_policy == "fcfs":
                del self.waiting[:admitted]
            elif admitted:
                self.waiting = [request for request in self.waiting if request.state is RequestState.WAITING]
        return self._extend_batch(parts, step) if parts else None

    def _continue_chunk(self, request: Request, budget: PrefillBudget, parts: list[Part], step: Step) -> None:
        """The next chunk goes first and past the total budget, since its end frees memory; it needs only pages."""
        page_size = self.config.page_size
        start, whole = request.computed, extend_stop(request)
        take = chunk_tokens(whole - start, budget, first=True, may_split=True)
        if -(-take // page_size) > self.available_pages:
            take = self.available_pages * page_size
        if take > 0:
            self._extend_to(request, start + take, parts, step)
            budget.charge(take, request.max_new_tokens if start + take == whole else 0)

    def _try_admit(self, request: Request, budget: PrefillBudget, parts: list[Part], step: Step) -> Obstacle | None:
        """Admit one waiting request into this extend, or say why not, changing nothing."""
        config = self.config
        if self.active >= config.max_running_requests:
            return Obstacle("running_limit")
        if not self.table.row_available():
            return Obstacle("rows")
        verdict = budget.verdict()
        if verdict != "continue":
            return Obstacle("kv_budget" if verdict == "no_tokens" else "prefill_budget")

        page_size = config.page_size
        tokens = len(request.tokens) // 4
        match = self._match(request, (tokens - 1) // page_size)
        cached = match.pages * page_size if match is not None else 0
        locking = match.evictable_pages if match is not None else 0
        new_tokens = tokens - cached
        alone = not self.active  # then the pool is its own: what passed the entry check fits
        remaining = request.max_new_tokens - request.outputs
        wanted = wanted_for_good(new_tokens, remaining, page_size)
        left = budget.total - locking * page_size
        if not alone and wanted >= left:
            return Obstacle("kv_budget", wanted, left)
        take = chunk_tokens(new_tokens, budget, first=not parts, may_split=self.prefilling is None)
        if take <= 0:
            return Obstacle("prefill_budget", new_tokens, budget.input if budget.chunk is None else budget.chunk)
        if -(-take // page_size) > self.available_pages - locking:
            return Obstacle("pages", take, (self.available_pages - locking) * page_size)

        row = self.table.take_row(request)
        if self.radix is not None and match is not None:
            request.handle = self.radix.lock(match)
            request.protected_pages = match.pages
            self.table.pages[row, : match.pages] = self.radix.pages_of(request.handle)
        if request.cached_tokens < 0:
            request.cached_tokens = min(cached, request.prompt_tokens)
        request.computed = cached
        request.chunks = 0
        self.active += 1
        self.rows_taken.append(RowTaken(row, request.request_id, request.epoch, request.sampling))
        if match is not None and match.pages:
            self.rewrites.append(Rewrite(row, 0, self.table.pages[row, : match.pages].copy()))
        waited_us = self.now_us - request.waiting_since_us
        if self.deferred is not None and self.deferred[0] == request.request_id:
            self.deferred = None
        admitted = RequestAdmitted(self.now_us, request.request_id, row, cached, new_tokens, waited_us)
        request.advance(admitted)
        step.decided.append(admitted)
        budget.hold(locking * page_size)
        budget.charge(take, request.max_new_tokens if take == new_tokens else 0)
        self._extend_to(request, cached + take, parts, step)
        return None

    def _match(self, request: Request, most_pages: int) -> Match | None:
        return self.radix.match(request.namespace, request.tokens, most_pages) if self.radix is not None else None

    def _defer(self, request: Request, obstacle: Obstacle, step: Step) -> None:
        """Say why the head of the line waits, once; when it is for memory, do not ask again before somebody leaves."""
        reason, needed, available = obstacle
        if reason in ("kv_budget", "rows", "running_limit") and self.active:
            self.batch_is_full = True
        if self.deferred != (request.request_id, reason):
            self.deferred = (request.request_id, reason)
            deferred = AdmissionDeferred(self.now_us, request.request_id, reason, needed, max(available, 0))
            step.decided.append(deferred)

    def _extend_to(self, request: Request, stop: int, parts: list[Part], step: Step) -> None:
        """Give the request pages up to `stop` and make that its part of the extend."""
        page_size = self.config.page_size
        start = request.computed
        first, last = -(-start // page_size), -(-stop // page_size)
        self.table.reserve(last, 0)
        if last > first:
            pages = self._alloc(last - first, "admission", step)
            self.table.pages[request.row, first:last] = pages
            self.rewrites.append(Rewrite(request.row, first, pages))
        request.computed = stop
        request.chunks += 1
        parts.append(Part(request, start, stop))
        if stop < extend_stop(request):
            self.prefilling = request
            return
        if self.prefilling is request:
            self.prefilling = None
        completed = PrefillCompleted(self.now_us, request.request_id, request.chunks)
        request.advance(completed)
        step.decided.append(completed)

    def _extend_batch(self, parts: list[Part], step: Step) -> InFlight:
        requests = [part.request for part in parts]
        rows = np.array([request.row for request in requests], np.int32)
        starts = np.array([part.start for part in parts], np.int32)
        stops = np.array([part.stop for part in parts], np.int32)
        sampling = [i for i, request in enumerate(requests) if request.state is RequestState.RUNNING]
        samplers = Cohort.of([requests[i] for i in sampling]) if sampling else EMPTY_COHORT
        sample_rows = np.array(sampling, np.int32)
        plan = self._plan(
            "extend",
            rows=rows,
            request_ids=np.array([request.request_id for request in requests], np.int64),
            starts=starts,
            stops=stops,
            extend_rows=len(parts),
            token_ids=np.concatenate([np.frombuffer(p.request.tokens, np.int32)[p.start : p.stop] for p in parts]),
            sample_rows=sample_rows,
        )
        joining, positions = samplers, stops[sample_rows]
        ends = positions + 1 >= samplers.limits
        ending: list[int] = ends.nonzero()[0].tolist()
        if ending:
            joining, positions = samplers.only(~ends), positions[~ends]
        if joining.size:
            self._set_cohort(self.cohort.joined_by(joining), np.concatenate((self.positions, positions)))
        return InFlight(plan, requests, samplers, ending)

    # ---------------------------------------------------------------------------------------------------------- decode

    def _plan_decode(self, step: Step) -> InFlight | None:
        """One more token for the whole cohort, after retracting whom it takes to make that fit."""
        if not self.cohort.size:
            self.decode_owed = False
            return None
        config = self.config
        if self._forced_retraction_due() and self.cohort.size > 1:
            self.forced_at = self.decode_launches
            self.retract(self.cohort.requests[choose_victim(self.cohort, self.positions)], "forced", step)
        growing = members_growing(self.positions, config.page_size)
        made_room = growing.size > self.available_pages
        if made_room:
            if not self._make_room(step):
                return None if self.cohort.size else self._plan_extend(step)
            growing = members_growing(self.positions, config.page_size)
        self.decode_owed = False
        self.decode_launches += 1
        if not made_room:
            self.ratio.decoded()

        cohort, starts = self.cohort, self.positions
        deltas = NO_DELTAS
        if growing.size:
            rows, index = cohort.rows[growing], starts[growing] >> self.page_shift
            deltas = PageDeltas(rows, index, self._alloc(growing.size, "decode", step))
            self.table.pages[rows, index] = deltas.pages
        stops = starts + ONE
        plan = self._plan(
            "decode",
            rows=cohort.rows,
            request_ids=cohort.request_ids,
            starts=starts,
            stops=stops,
            sample_rows=cohort.everyone,
            deltas=deltas,
        )
        self.positions = stops
        self.horizon -= 1
        ending: list[int] = []
        if self.horizon <= 0:
            ending = self._end_of_horizon(cohort, stops)
        return InFlight(plan, cohort.requests, cohort, ending)

    def _forced_retraction_due(self) -> bool:
        """For testing: before every `retract_every`-th decode launch, once."""
        every = self.config.retract_every
        return every > 0 and (self.decode_launches + 1) % every == 0 and self.forced_at != self.decode_launches

    def _make_room(self, step: Step) -> bool:
        """Retract until the next decode fits. False when it has to wait for pages that work in flight gives back."""
        page_size = self.config.page_size
        retracted = 0
        while True:
            needed = members_growing(self.positions, page_size).size
            available, returning = self.available_pages, self._returning_pages()
            if needed <= available:
                break
            if needed <= available + returning:
                self.decode_owed = True
                step.decided.append(DecodeSkipped(self.now_us, needed - available, returning))
                break
            if self.cohort.size > 1:
                self.retract(self.cohort.requests[choose_victim(self.cohort, self.positions)], "pages", step)
            elif self.prefilling is not None:
                self.retract(self.prefilling, "pages", step)
            elif self.in_flight:
                self.decode_owed = True
                step.decided.append(DecodeSkipped(self.now_us, needed - available, returning))
                break
            else:
                self.finish(self.cohort.requests[0], "out_of_kv", step, flush=True)
                return False
            retracted += 1
            self.decode_owed = True
        if retracted:
            outputs = int((self.positions - self.cohort.prompts).sum()) + self.cohort.size
            max_new = int((self.cohort.limits - self.cohort.prompts).sum())
            self.ratio.retracted(outputs, max_new, self.cohort.size)
        return needed <= available

    def _returning_pages(self) -> int:
        """Pages that come back by themselves once everything in flight is delivered. An underestimate."""
        fenced = sum(pages.size for _, pages in self.fenced_pages)
        leased = sum(self._freed_by(lease.computed, lease.protected_pages, lease.handle) for lease in self.leases)
        ending = 0
        for batch in self.in_flight:
            for i in batch.ending:
                request, row = batch.samplers.requests[i], int(batch.samplers.rows[i])
                if request.row == row and row not in batch.dead:
                    ending += self._freed_by(request.computed, request.protected_pages, request.handle)
        return fenced + leased + ending

    def _freed_by(self, computed: int, protected_pages: int, handle: RadixNode | None) -> int:
        """Pages available once a row of `computed` positions is released: its own, and those only it locks."""
        return -(-computed // self.config.page_size) - protected_pages + pages_only_held_by(handle)

    def _end_of_horizon(self, cohort: Cohort, stops: Int32s) -> list[int]:
        """Members that end by length with this launch leave the cohort now: no forward is spent on them again."""
        ended = stops + 1 >= cohort.limits
        ending: list[int] = np.flatnonzero(ended).tolist()
        for i in ending:
            cohort.requests[i].computed = int(stops[i])
        self._set_cohort(cohort.only(~ended) if ending else cohort, stops[~ended])
        return ending

    def _set_cohort(self, cohort: Cohort, positions: Int32s) -> None:
        self.cohort = cohort
        self.positions = positions
        if not cohort.size:
            return
        table = self.table
        furthest, outputs = int(positions.max()), int((positions - cohort.prompts).max())
        table.reserve((furthest >> self.page_shift) + 1, outputs + 2)
        to_length = int((cohort.limits - positions).min()) - 1
        to_width = min(table.pages.shape[1] * self.config.page_size - furthest, table.outputs.shape[1] - 1 - outputs)
        self.horizon = min(to_length, to_width)

    # --------------------------------------------------------------------------------------------------------- results

    def _collect(self, event: BatchFinished, step: Step) -> None:
        """Take in a batch's tokens: record, stream, finish; publish prompts it completed; lift the fences it held."""
        if event.generation > self.generation:
            raise ContractError(f"a result of generation {event.generation}, but this is generation {self.generation}")
        if event.generation < self.generation:
            self.now_us = event.time_us  # from before a restart: void
            return
        batch = self._delivered(event)
        self.now_us = event.time_us
        plan, samplers = batch.plan, batch.samplers
        if event.error:
            self._fail(batch, step)
        for i in event.invalid:  # ends while the batch counts as in flight: its sample is no output
            if samplers.requests[i].row == samplers.rows[i]:
                self.finish(samplers.requests[i], "invalid", step, flush=True)
        self.in_flight.popleft()
        if samplers.size and not event.error:
            tokens = np.frombuffer(event.tokens, np.int32)
            self.table.outputs[samplers.rows, batch.sampled_at - samplers.prompts] = tokens
            verdicts = self._verdicts(event, batch, tokens)
            self._stream(batch, tokens, verdicts, step)
            self.break_ranks([samplers.requests[i] for i in verdicts])
            for i, reason in verdicts.items():
                self.finish(samplers.requests[i], reason, step)
        if plan.mode == "extend" and self.radix is not None:
            for request, row, stop in zip(batch.requests, plan.rows.tolist(), plan.stops.tolist(), strict=True):
                if request.row == row and row not in batch.dead:
                    self._publish(request, stop, step)
        if self.leases or self.fenced_pages:
            self._lift_fences(plan.batch_id, step)

    def _fail(self, batch: InFlight, step: Step) -> None:
        """The device could not run the batch: its requests end with an error, the others do not notice."""
        failed = batch.plan.rows.tolist()
        self.leases = [lease._replace(publish=lease.publish and lease.row not in failed) for lease in self.leases]
        for request, row in zip(batch.requests, batch.plan.rows.tolist(), strict=True):
            if request.row == row and row not in batch.dead:
                self.finish(request, "error", step, flush=True)

    def _delivered(self, event: BatchFinished) -> InFlight:
        """The batch in flight that a result is of. Raises ContractError, changing nothing, when they do not match."""
        if not self.in_flight or self.in_flight[0].plan.batch_id != event.batch_id:
            expected = f"batch {self.in_flight[0].plan.batch_id}" if self.in_flight else "nothing"
            raise ContractError(f"batch {event.batch_id} finished, but {expected} is next in flight")
        batch = self.in_flight[0]
        sampled = 0 if event.error else batch.samplers.size
        if len(event.tokens) != 4 * sampled:
            raise ContractError(
                f"batch {event.batch_id} has {len(event.tokens)} bytes of tokens, expected {4 * sampled}"
            )
        for i in (*event.invalid, *event.text_stops):
            if not 0 <= i < sampled:
                raise ContractError(f"batch {event.batch_id} names sampling row {i} of {sampled}")
        if event.accepted or event.grammar_ended or event.logprobs:
            raise ContractError(
                f"batch {event.batch_id} reports accepted counts, grammars or logprobs; none were asked for"
            )
        return batch

    def _verdicts(self, event: BatchFinished, batch: InFlight, tokens: Int32s) -> dict[int, FinishReason]:
        """Samplers that end with this batch, and why. Precedence per token: see events.FinishReason."""
        samplers = batch.samplers
        verdicts: dict[int, FinishReason] = dict.fromkeys(batch.ending, "length")
        if samplers.stops.shape[1]:
            outputs = batch.sampled_at + 1 - samplers.prompts
            stopped = (tokens[:, None] == samplers.stops).any(axis=1) & (outputs >= samplers.min_new)
            for i in np.flatnonzero(stopped).tolist():
                verdicts[i] = "stop"
        for i in event.text_stops:
            if batch.sampled_at[i] + 1 - samplers.prompts[i] >= samplers.min_new[i]:
                verdicts[i] = "text_stop"
        for row in batch.dead:
            for i in np.flatnonzero(samplers.rows == row).tolist():
                self.tokens_discarded += 1
                verdicts.pop(i, None)
        return dict(sorted(verdicts.items())) if len(verdicts) > 1 else verdicts

    def _stream(self, batch: InFlight, tokens: Int32s, verdicts: dict[int, FinishReason], step: Step) -> None:
        """Send what is due: every token of steady cohorts, otherwise at each request's own cadence and at its end."""
        samplers = batch.samplers
        last = batch.sampled_at - samplers.prompts  # number of the newest output
        if samplers.steady and not batch.dead:
            step.commands.append(StreamTokens(samplers.request_ids, last, samplers.ones, tokens))
            return
        sending = sent_by(last + ONE, samplers.every)
        ending = list(verdicts)
        sending[ending] = last[ending] + ONE
        offsets = sent_by(last, samplers.every)
        counts = sending - offsets
        if batch.dead:
            counts[np.isin(samplers.rows, batch.dead)] = 0
        due = counts.nonzero()[0]
        if not due.size:
            return
        counts, offsets = counts[due], offsets[due]
        starts = counts.cumsum(dtype=np.int32) - counts  # of each request's share in the message
        numbers = np.arange(int(counts.sum()), dtype=np.int32) + (offsets - starts).repeat(counts)
        sent = self.table.outputs[samplers.rows[due].repeat(counts), numbers]
        step.commands.append(StreamTokens(samplers.request_ids[due], offsets, counts, sent))

    # ---------------------------------------------------------------------------------------------------------- memory

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free ones, and cached ones nobody holds."""
        cached = self.radix.evictable_pages if self.radix is not None else 0
        return self.pool.free_count + cached

    def _alloc(self, pages: int, reason: Literal["admission", "decode"], step: Step) -> Int32s:
        """Take pages, evicting from the radix cache what the free list lacks. The caller checked `available_pages`."""
        missing = pages - self.pool.free_count
        if missing > 0 and self.radix is not None:
            evicted = self.radix.evict(max(missing, self.config.pages // EVICT_AHEAD_SHARE))
            self.pool.free(evicted)
            step.decided.append(PagesEvicted(self.now_us, evicted.size, reason))
        return self.pool.alloc(pages)

    def _plan(
        self,
        mode: Mode,
        *,
        rows: Int32s,
        request_ids: Int64s,
        starts: Int32s,
        stops: Int32s,
        sample_rows: Int32s,
        extend_rows: int = 0,
        token_ids: Int32s = NO_ROWS,
        deltas: PageDeltas = NO_DELTAS,
    ) -> BatchPlan:
        """Complete a plan: its number, and what changed about rows since the plan before it."""
        batch_id = self.next_batch_id
        self.next_batch_id += 1
        if self.rewrites:
            deltas = _merged(self.rewrites, deltas)
            self.rewrites = []
        taken: tuple[RowTaken, ...] = ()
        if self.rows_taken:
            taken = tuple(self.rows_taken)
            self.rows_taken = []
        return BatchPlan(
            batch_id=batch_id,
            mode=mode,
            rows=rows,
            request_ids=request_ids,
            starts=starts,
            stops=stops,
            extend_rows=extend_rows,
            token_ids=token_ids,
            sample_rows=sample_rows,
            rows_taken=taken,
            deltas=deltas,
            generation=self.generation,
        )

    def _leave(self, request: Request, step: Step, *, publish: bool) -> None:
        """Take a request off its row. What work in flight still uses stays behind as a Lease."""
        row, fence = request.row, None
        for batch in self.in_flight:
            if row not in batch.dead and (batch.plan.rows == row).any():
                batch.dead.append(row)
                fence = batch.plan.batch_id
        self.break_ranks([request])
        if self.prefilling is request:
            self.prefilling = None
        self.rewrites = [rewrite for rewrite in self.rewrites if rewrite.row != row]
        lease = Lease(
            fence if fence is not None else NO_FENCE,
            row,
            request.namespace,
            request.tokens,
            request.prompt_tokens,
            request.handle,
            request.protected_pages,
            request.computed,
            publish,
        )
        request.row = NO_ROW
        request.handle = None
        request.protected_pages = 0
        request.computed = 0
        request.epoch += 1
        self.active -= 1
        self.batch_is_full = False
        if fence is None:
            self.release(lease, step)
        else:
            self.leases.append(lease)

    def break_ranks(self, requests: list[Request]) -> None:
        """Take those of the requests that decode out of the cohort, all at once, noting where each stands."""
        if not requests or not self.cohort.size:
            return
        rows = self.cohort.rows
        members = (
            rows == requests[0].row if len(requests) == 1 else np.isin(rows, [request.row for request in requests])
        )
        going = members.nonzero()[0].tolist()
        for i in going:
            self.cohort.requests[i].computed = int(self.positions[i])
        if going:
            self._set_cohort(self.cohort.only(~members), self.positions[~members])

    def _lift_fences(self, batch_id: BatchId, step: Step) -> None:
        """Batch `batch_id` is collected: give back what waited for it."""
        for lease in [lease for lease in self.leases if lease.fence <= batch_id]:
            self.leases.remove(lease)
            self.release(lease, step)
        for fence, pages in self.fenced_pages:
            if fence <= batch_id:
                self.pool.free(pages)
        self.fenced_pages = [entry for entry in self.fenced_pages if entry[0] > batch_id]

    def release(self, lease: Lease, step: Step) -> None:
        """Nothing in flight uses the row any more: its pages go to the radix cache or back to the pool."""
        page_size = self.config.page_size
        row, kept = lease.row, lease.protected_pages
        held = -(-lease.computed // page_size)
        pages = self.table.pages[row]
        if self.radix is not None:
            if lease.publish and lease.computed // page_size > kept:
                whole = lease.computed // page_size
                tokens = self.table.first_tokens(row, lease.tokens, lease.prompt_tokens, whole * page_size)
                already = self.radix.insert(lease.namespace, tokens, pages[:whole]).already
                self.pool.free(pages[kept:already].copy())
                kept = whole
            if lease.handle is not None:
                self.radix.unlock(lease.handle)
        if held > kept:
            self.pool.free(pages[kept:held].copy())
        self._trim(step)
        self.table.free_row(row)
        self.batch_is_full = False

    def _publish(self, request: Request, computed: int, step: Step) -> None:
        """Share a prompt's completed KV: insert its whole pages; where the tree had them already, use the tree's."""
        radix, row = self.radix, request.row
        pages = computed // self.config.page_size
        if radix is None or pages <= request.protected_pages:
            return
        mine = self.table.pages[row, :pages]
        tokens = request.tokens[: 4 * pages * self.config.page_size]
        node, already = radix.insert(request.namespace, tokens, mine)
        if already > request.protected_pages:
            twice = slice(request.protected_pages, already)
            duplicates = mine[twice].copy()
            mine[twice] = radix.pages_of(node)[twice]
            self.rewrites.append(Rewrite(row, request.protected_pages, mine[twice].copy()))
            self._free_behind(row, duplicates)
        radix.lock_node(node)
        if request.handle is not None:
            radix.unlock(request.handle)
        request.handle = node
        request.protected_pages = pages
        self._trim(step)

    def _free_behind(self, row: int, pages: Int32s) -> None:
        """Free pages of a row once the last plan in flight that may read them is collected."""
        fences = [batch.plan.batch_id for batch in self.in_flight if (batch.plan.rows == row).any()]
        if fences:
            self.fenced_pages.append((fences[-1], pages))
        else:
            self.pool.free(pages)

    def _trim(self, step: Step) -> None:
        """Hold the radix cache to its cap."""
        if self.radix is not None and self.radix.capacity_pages is not None:
            trimmed = self.radix.trim()
            if trimmed.size:
                self.pool.free(trimmed)
                step.decided.append(PagesEvicted(self.now_us, trimmed.size, "capacity"))

    # ---------------------------------------------------------------------------------------------- where a request is

    def computed_of(self, request: Request) -> int:
        """Positions of the request whose KV is launched."""
        if request.state is RequestState.RUNNING:
            members = np.flatnonzero(self.cohort.rows == request.row)
            if members.size:
                return int(self.positions[members[0]])
        return request.computed

    def _tokens(self, request: Request, outputs: int) -> bytes:
        """Its prompt and so many of its outputs, packed int32."""
        return self.table.first_tokens(
            request.row, request.tokens, request.prompt_tokens, request.prompt_tokens + outputs
        )

    def outputs_of(self, request: Request) -> int:
        """Output tokens the request has for good: delivered, not merely sampled in flight."""
        if request.state is not RequestState.RUNNING:
            return request.outputs
        sampled = self.computed_of(request) + 1 - request.prompt_tokens
        return sampled - sum(
            request.row not in batch.dead and bool((batch.samplers.rows == request.row).any())
            for batch in self.in_flight
        )


def pages_only_held_by(handle: RadixNode | None) -> int:
    """Cached pages that nobody else locks: unlocking this handle makes them evictable."""
    pages = 0
    while handle is not None and handle.lock_count == 1:
        pages += len(handle.pages)
        handle = handle.parent
    return pages


def extend_stop(request: Request) -> int:
    """Positions an extend must compute before the request can decode: its prompt and the output it kept."""
    return request.prompt_tokens + request.outputs


def sent_by(outputs: Int32s, every: Int32s) -> Int32s:
    """Output tokens sent by the time there are `outputs` of them and more to come. int32 [n] both, and the result.

    A streaming request sends its first token at once and then every `every` tokens. One that does not stream
    (`every` negative) sends after every whole -`every`, to show that it lives.
    """
    interval = np.abs(every)
    first = np.where(every > 0, ONE, interval)
    sent: Int32s = np.where(outputs < first, 0, outputs - (outputs - first) % interval).astype(np.int32)
    return sent


def _merged(rewrites: list[Rewrite], deltas: PageDeltas) -> PageDeltas:
    """Rewrites in the order they were made, then the plan's own growth, as one list of page-table changes."""
    rows = np.array([rewrite.row for rewrite in rewrites], np.int32)
    sizes = [rewrite.pages.size for rewrite in rewrites]
    index = [np.arange(r.first, r.first + r.pages.size, dtype=np.int32) for r in rewrites]
    return PageDeltas(
        np.concatenate((rows.repeat(sizes), deltas.rows)),
        np.concatenate((*index, deltas.index)),
        np.concatenate((*(rewrite.pages for rewrite in rewrites), deltas.pages)),
    )
