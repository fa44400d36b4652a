"""The state of one scheduler, and the verbs that change it: requests arrive, wait, run, are retracted and end.

No policy is here. Which request starts, is retracted or decodes next is decided by the planners and the
features, which call these verbs; events are dispatched, and launches ordered, by `Engine`. `memory` keeps rows and
pages.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import takewhile

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from lockstep.core.admin.control import Controls
from lockstep.core.admin.maintenance import Maintenance
from lockstep.core.cluster.expert_placement import ExpertLoads
from lockstep.core.contract.commands import CancelTransfer, FinishRequest, RejectRequest, Step, StreamTokens
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.digest import EMPTY_DIGEST
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    DeferReason,
    EngineRestarted,
    FinishReason,
    RejectReason,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
)
from lockstep.core.contract.samples import sample_count, sample_of
from lockstep.core.contract.stats import Counts, Stats
from lockstep.core.features.data_parallel import Rounds
from lockstep.core.features.disaggregation import Transfers
from lockstep.core.features.grammars import GrammarEntry, Grammars
from lockstep.core.features.jump_forward import Forced, JumpForward
from lockstep.core.features.media import EncoderCache, Placeholders
from lockstep.core.features.prerequisites import Prerequisites
from lockstep.core.features.sessions import Sessions
from lockstep.core.features.speculation import Speculator
from lockstep.core.features.view import RetractReason
from lockstep.core.kv.adapters import adapters_of
from lockstep.core.kv.memory import DeferredFree, Lent, Memory, Pending, Rewrite
from lockstep.core.kv.no_tiers import NoTiers
from lockstep.core.kv.pages import PagePool
from lockstep.core.kv.radix import radix_cache_of
from lockstep.core.requests import delivery, extras
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.budget import NewTokenRatio, reserve_by_ratio
from lockstep.core.requests.microbatches import Microbatches
from lockstep.core.requests.retraction import members_growing, pages_ahead, pages_to_come
from lockstep.core.requests.table import (
    NO_REQUEST,
    ONE,
    Accepted,
    Int32s,
    Request,
    RequestState,
    RequestTable,
    RunningBatch,
)
from lockstep.core.requests.validation import (
    RequestRefused,
    accepted,
    stop_tokens_of,
)
from lockstep.core.scheduler.admission import Admission
from lockstep.core.scheduler.image import (
    GONE,
    EngineImage,
    batch_image,
    batch_of,
    deferred_free_image,
    expert_loads_image,
    lay_row,
    load_media,
    media_image,
    request_image,
    request_of,
)
from lockstep.core.scheduler.latency import ExtendLatency
from lockstep.core.scheduler.ordering import Ordering

KV_STAYS_GOOD: frozenset[RetractReason] = frozenset({"pages", "forced", "pause", "preempted"})
"""Reasons of retraction after which the KV is still that of its tokens, so that it may be kept for other requests."""


class SchedulerState:
    """Requests, memory and features of one engine, and every change of them that a decision can ask for."""

    def __init__(self, config: SchedConfig, *, digests: bool) -> None:
        self.config = config
        self.digests = digests
        self.now_us = 0
        self.generation = 0
        self.digest = EMPTY_DIGEST

        self.page_shift = np.array(config.page_size.bit_length() - 1, np.int32)  # positions >> page_shift: their pages
        self.page_mask = np.array(config.page_size - 1, np.int32)  # positions & page_mask: their places in these
        self.in_flight: deque[InFlight] = deque()
        self.memory = Memory(config, self.in_flight)
        self.microbatches = Microbatches(config)  # the running batches, and which requests have places in them

        self.requests: dict[RequestId, Request] = {}  # every request that has not ended
        self.ordering = Ordering(config)  # the waiting queue
        self.held: dict[RequestId, Request] = {}  # accepted, with prerequisites: not in the waiting queue yet
        self.prefilling: Request | None = None  # the chunked-prefill request, not launched to its end
        self.active = 0  # requests PREFILLING or RUNNING
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.latency = ExtendLatency()
        self.batch_is_full = False  # admission ran out of memory; not tried again before something comes free
        self.ahead = max(config.decode_look_ahead, config.decode_steps_per_launch)  # decodes that must fit at once
        self.ahead_hoped = max(self.ahead, 1 + config.drafts_max)  # with drafts, which may be left out
        self.refreshed_at = 0  # number of the next plan when cached prefixes of the queue were last counted as used
        self.launch_found_nothing = False  # this step had a free slot and nothing to launch
        self.next_batch_id = 0
        self.last_request_id = -1
        self.timers: list[tuple[int, RequestId]] = []  # heap of deadlines

        self.media = EncoderCache(config.encoder_cache_tokens, config.encoder_budget)
        self.placeholders = Placeholders()
        self.grammars = Grammars(self)
        self.jump_forward = JumpForward(self)
        self.speculation = Speculator(self, self.jump_forward)
        self.computes_ahead = config.speculates or config.jumps  # KV may be that of tokens that never come
        self.prerequisites = Prerequisites(self, self.media)
        self.sessions = Sessions(self, self.prerequisites)
        self.transfers = Transfers(config, self, self.sessions, self.prerequisites)
        self.maintenance = Maintenance(self)
        self.controls = Controls(self, self.sessions, self.transfers, self.maintenance)
        self.admission = Admission(self)
        self.ranks: Rounds | None = None  # agreement with other data-parallel ranks, where there are any
        self.expert_loads: ExpertLoads | None = None  # None: none were reported
        self.counts = Counts()
        self.tokens_discarded = 0  # sampled for rows that were dead by then

    # ------------------------------------------------------------------------------------------------------- what is so

    @property
    def waiting(self) -> list[Request]:
        """The waiting queue, in the order in which requests began to wait."""
        return self.ordering.waiting

    @property
    def paused(self) -> bool:
        """Whether an operator paused launches and admission."""
        return self.controls.paused

    @property
    def admits(self) -> bool:
        """Whether requests may start: no job on the device waits or runs, and no operator paused admission."""
        return self.maintenance.admits and self.controls.admits

    @property
    def launches_blocked(self) -> bool:
        """Whether a job on the device forbids launches."""
        return self.maintenance.still

    @property
    def stands_still(self) -> bool:
        """Whether nothing is launched for now: paused, blocked, or before the end of an operator's gap."""
        pace = self.controls.pace
        paced = pace.gap_us > 0 and self.now_us < pace.not_before_us
        return self.controls.paused or self.maintenance.still or paced

    @property
    def sending(self) -> int:
        """Of the active requests, those whose prompt is computed and only has to be sent yet."""
        return self.transfers.sending

    @property
    def deferred(self) -> tuple[RequestId, DeferReason] | None:
        """The request, and the reason, of the shortage that was reported last."""
        return self.admission.reported

    @property
    def transfers_hold_pages(self) -> bool:
        """Whether a transfer keeps pages beside the rows of running requests."""
        return self.transfers.holds_pages

    @property
    def running_batch(self) -> RunningBatch:
        """The requests that decode together, in the microbatch whose launch is planned or was planned last."""
        return self.microbatches.current.batch

    @property
    def positions(self) -> Int32s:
        """Per member of `running_batch`: the next position to compute."""
        return self.microbatches.current.positions

    @property
    def all_running(self) -> tuple[RunningBatch, Int32s]:
        """All members of all running batches, and the next position of each. int32 [members]"""
        return self.microbatches.together()

    def has_work(self, number: int) -> bool:
        """Whether a launch of a microbatch could find anything: a host need not offer slots to others."""
        decodes = self.microbatches.states[number].batch.size > 0
        return bool(decodes or self.waiting or self.prefilling or self.transfers.ready)

    def launches_to_refresh(self) -> int:
        """Launches until the cached prefixes of waiting requests are counted as used again."""
        return self.refreshed_at + self.config.waiting_prefix_refresh - self.next_batch_id

    def reserve_of(self, running_batch: RunningBatch, positions: Int32s) -> int:
        """Tokens that `reserve` leaves to a cohort at these positions."""
        config = self.config
        if not running_batch.size:
            return 0
        if config.reserve == "full":
            return pages_to_come(positions, running_batch.limits, config.page_size) * config.page_size
        if config.reserve == "on_demand":
            return self.next_pages(running_batch, positions) * config.page_size
        return reserve_by_ratio(running_batch.limits - positions - ONE, running_batch.ignores_eos, self.ratio.value)

    def set_aside(self, running_batch: RunningBatch, positions: Int32s) -> int:
        """Pages that the decodes of a cohort get before any prompt of the same pass does."""
        return (
            self.next_pages(running_batch, positions)
            if self.config.batching == "running_first" and running_batch.size
            else 0
        )

    @property
    def tokens_per_decode(self) -> int:
        """New tokens that a pass computes of each member of the cohort, at most."""
        return 1 + self.config.drafts_max

    @property
    def moves_by(self) -> int:
        """Positions by which a launch moves each member of the cohort, at most."""
        return self.config.decode_steps_per_launch * self.tokens_per_decode

    def next_pages(self, running_batch: RunningBatch, positions: Int32s) -> int:
        """Pages that a cohort at these positions decodes with, drafts included."""
        if self.ahead_hoped == 1:
            return members_growing(positions, self.page_mask).size
        spare = self.spare_of(running_batch)
        return pages_ahead(running_batch, positions, self.config.page_size, self.ahead_hoped, spare)

    def spare_of(self, running_batch: RunningBatch) -> Int32s | None:
        """Pages of each member behind those of its positions, int32 [members]; None where rows keep none."""
        return self.memory.table.spare[running_batch.rows] if self.config.keeps_draft_pages else None

    def comes_by_transfer(self, request: Request) -> bool:
        """Whether a transfer decides if the prompt is computed here, and when: no media are requested before that."""
        return self.transfers.holds(request)

    def waits_for_turn(self, request: Request) -> bool:
        """Whether the request is a turn of a session whose turn before it has not ended."""
        return self.sessions.waits_for_turn(request)

    def computed_of(self, request: Request) -> int:
        """Positions of the request whose KV is launched."""
        return self.microbatches.state_of(request).position_of(request) if request.decodes else request.computed

    def tokens_of(self, request: Request, outputs: int) -> bytes:
        """Its prompt and so many of its outputs, packed int32."""
        return self.memory.table.first_tokens(
            request.row, request.tokens, request.prompt_tokens, request.prompt_tokens + outputs
        )

    def outputs_of(self, request: Request) -> int:
        """Output tokens the request has for good: delivered, not merely sampled in flight."""
        if request.state is not RequestState.RUNNING:
            return request.outputs
        return self.sampled_by(request) - sum(
            batch.tokens_of(request.row) for batch in self.in_flight if request.row not in batch.dead
        )

    def sampled_by(self, request: Request) -> int:
        """Output tokens that its launched batches sample, delivered or not."""
        if request.state is not RequestState.RUNNING or request.prefill_only:
            return request.outputs
        return self.computed_of(request) + 1 - request.prompt_tokens

    # ------------------------------------------------------------------------------------------ arrivals and departures

    def enqueue(self, event: RequestArrived, step: Step) -> None:
        """Accept a request, or all samples of one, or reject what can never run."""
        if event.request_id <= self.last_request_id:
            raise ContractError(f"request id {event.request_id} does not increase after {self.last_request_id}")
        samples = sample_count(event)
        self.last_request_id = event.request_id + samples - 1
        try:
            self._refuse_newcomers(event, samples)
            taken = accepted(event, self.memory.adapters.named(event.adapter), self.config)
            if event.session or event.session_start is not None:
                self.sessions.check(event)
            if self.transfers.hands_over:
                self.transfers.check(event, samples)
            if event.grammar is not None:
                self.grammars.refuse(event, samples, len(self.held), self.config.max_queued_requests)
        except RequestRefused as refused:
            for number in range(samples):
                if self.transfers.hands_over and event.transfer_room is not None:  # the other side waits for its half
                    step.commands.append(CancelTransfer(event.request_id + number))
                self.reject(event.request_id + number, refused.reason, refused.message, step)
            return
        if event.spans:
            taken = taken._replace(tokens=self.placeholders.laid(taken.tokens, event.spans))
        for number in range(samples):
            self._accept(sample_of(event, number), taken, event.request_id if number else NO_REQUEST, step)

    def _accept(self, event: RequestArrived, taken: Accepted, leader: RequestId, step: Step) -> None:
        """Let an accepted request wait: in the line, or held first. `leader` is the first sample of its prompt."""
        config = self.config
        request = Request(event, taken, stop_tokens_of(event, config))
        request.stream_every = config.stream_interval if event.stream else config.force_stream_interval
        request.prefilled_before = self.ordering.prefilled_tokens
        request.namespace = self.memory.keyed(request.namespace)
        self.requests[request.request_id] = request
        if request.session:
            self.hold(request)
            self.sessions.take_in(request)
        if request.grammar is not None and self.grammars.must_wait(request, config.grammar_timeout_us, step):
            self.hold(request)
        queued = RequestQueued(
            self.now_us, request.request_id, request.prompt_tokens, request.max_new_tokens, taken.truncated_tokens
        )
        request.advance(queued)
        step.decided.append(queued)
        self._set_timers(request)
        if self.transfers.hands_over:
            self.transfers.take_in(request, event, step)
        if not self.prerequisites.hold(request, leader, step) and not request.holds:
            self.waiting.append(request)

    def _refuse_newcomers(self, event: RequestArrived, samples: int) -> None:
        if self.controls.draining:
            raise RequestRefused("draining", "the engine is draining and takes no new requests")
        limit = self.config.max_queued_requests
        if limit is None:
            return
        waiting, held = len(self.waiting), len(self.held)
        more = f", {samples} more are too many" if samples > 1 else ""
        if waiting + samples > limit:
            raise RequestRefused("queue_full", f"{waiting} requests wait already{more} (max_queued_requests {limit})")
        held_first = event.session or event.spans or event.transfer_room is not None
        if (held_first or samples > 1) and held + samples > limit:
            raise RequestRefused("queue_full", f"{held} requests are held already{more} (max_queued_requests {limit})")

    def reject(self, request_id: RequestId, reason: RejectReason, message: str, step: Step) -> None:
        """Answer an id with an error; end its request, if there is one already. It never ran."""
        rejected = RequestRejected(self.now_us, request_id, reason, message)
        request = self.requests.pop(request_id, None)
        if request is not None:
            if request.session:
                self.sessions.turn_ends(request, "rejected", 0)
            self._leave_queue(request)
            self.grammars.ended(request)
            self.transfers.ended(request, step)
            request.advance(rejected)
        step.decided.append(rejected)
        step.commands.append(RejectRequest(request_id, reason, message))
        if request is not None:
            self.prerequisites.ended(request, step)

    def hold(self, request: Request) -> None:
        """Keep a request out of the line until `join_line` was called for it as often as this."""
        request.holds += 1
        self.held[request.request_id] = request

    def join_queue(self, request: Request) -> None:
        """One of the things that held a request has come. After the last it waits, where its arrival puts it."""
        self.release_hold(request)
        if request.holds:
            return
        younger = (i for i, other in enumerate(self.waiting) if not other.ran and other.request_id > request.request_id)
        self.waiting.insert(next(younger, len(self.waiting)), request)
        self.ordering.joins(request)

    def release_hold(self, request: Request) -> None:
        """One of the things that held a request has come; after the last it is held no more."""
        request.holds -= 1
        if not request.holds:
            del self.held[request.request_id]

    def leave_queue(self, request: Request) -> None:
        """Take a request out of the waiting queue for a new prerequisite."""
        self.waiting.remove(request)

    def _leave_queue(self, request: Request) -> None:
        """A waiting request ends. A request behind it may fit."""
        if self.held.pop(request.request_id, None) is None:
            self.waiting.remove(request)
            self.batch_is_full = False

    def cancel(self, event: RequestCancelled, step: Step) -> None:
        """End a request wherever it is. Late echoes of requests that ended are ignored."""
        request = self.requests.get(event.request_id)
        if request is not None:
            self.finish(request, "cancelled", step)

    def finish(
        self, request: Request, reason: FinishReason, step: Step, *, flush: bool = False, outputs: int | None = None
    ) -> None:
        """End a request: free what it holds, keep its computed KV for others, close its stream.

        With `flush`, tokens that its cadence held back are sent first; for ends that come with no new token.
        `outputs`: how many tokens count, if not all that were delivered.
        """
        if outputs is None:
            outputs = self.outputs_of(request)
        if flush:
            self._flush_stream(request, outputs, step)
        if request.session:
            self.sessions.turn_ends(request, reason, outputs)
        self.transfers.ended(request, step)
        if request.state is RequestState.WAITING:
            self._leave_queue(request)
        else:
            self.leave(request, step, outputs, publish=reason not in ("invalid", "error"))
        del self.requests[request.request_id]
        self.grammars.ended(request)
        cached = max(request.cached_tokens, 0)
        finished = RequestFinished(self.now_us, request.request_id, reason, outputs, cached)
        request.advance(finished)
        step.decided.append(finished)
        step.commands.append(FinishRequest(request.request_id, reason, request.prompt_tokens, outputs, cached))
        self.prerequisites.ended(request, step)

    def _flush_stream(self, request: Request, outputs: int, step: Step) -> None:
        """Send what its cadence has held back so far."""
        sent = delivery.sent_to(request, outputs)
        if sent == outputs:
            return
        held_back = np.frombuffer(self.tokens_of(request, outputs), np.int32)[request.prompt_tokens + sent :]
        ids, offsets = np.array([request.request_id], np.int64), np.array([sent], np.int32)
        step.commands.append(StreamTokens(ids, offsets, np.array([held_back.size], np.int32), held_back))

    def retract(
        self,
        request: Request,
        reason: RetractReason,
        step: Step,
        *,
        beneficiary: RequestId = -1,
        pages: tuple[int, int] = (0, 0),
    ) -> None:
        """Take a running request's pages back. It waits again and keeps every token delivered so far.

        A victim of preemption joins the line when the pass over it has ended. `pages` that were wanted and to be had.
        """
        if self.transfers.is_given(request):
            self.finish(request, "transfer", step)  # what was sent cannot be taken back
            return
        outputs = self.outputs_of(request)
        sampled = self.sampled_by(request)
        request.tokens = self.tokens_of(request, outputs)
        request.outputs = outputs
        held = self.memory.table.held_pages(request.row, self.computed_of(request))
        freed = held - request.protected_pages
        retracted = RequestRetracted(
            self.now_us,
            request.request_id,
            outputs,
            freed,
            sampled - outputs,
            reason,
            beneficiary,
            *pages,
        )
        self.leave(request, step, outputs, publish=self.config.retracted_kv == "cache" and reason in KV_STAYS_GOOD)
        request.advance(retracted)
        request.namespace = self.memory.keyed(request.namespace)
        request.waiting_since_us = self.now_us
        request.matched = None
        step.decided.append(retracted)
        if request.extras is not None:
            extras.kept(request)
        if reason != "preempted":
            self.requeue(request, step)

    def requeue(self, request: Request, step: Step) -> None:
        """Put a retracted request where `retracted_requeue` places it, or make it wait for media that it needs
        again."""
        if self.prerequisites.lost_media(request):
            self.prerequisites.await_media(request, step)
            return
        if self.config.retracted_requeue == "front":
            ahead = takewhile(lambda other: other.ran and other.request_id < request.request_id, self.waiting)
            self.waiting.insert(len(list(ahead)), request)
        else:
            self.waiting.append(request)

    def cancel_all(self, requests: list[Request], step: Step) -> None:
        """End these requests on the order of their clients or of an operator."""
        self.leave_running(requests)
        for request in requests:
            self.finish(request, "cancelled", step, flush=True)

    def retract_all(self, reason: RetractReason, step: Step) -> None:
        """Take the pages of all running requests back."""
        running = [request for request in self.requests.values() if request.row >= 0]
        if self.transfers.all:
            self.transfers.give_up_all(step)
            running = [request for request in running if not self.transfers.is_sent(request)]
        self.leave_running(running)
        for request in running:
            self.retract(request, reason, step)

    def leave(self, request: Request, step: Step, outputs: int, *, publish: bool) -> None:
        """Take a request with so many outputs off its row. What work in flight still uses stays behind until then."""
        self.leave_running([request])
        if self.prefilling is request:
            self.prefilling = None
        self.active -= 1
        self.batch_is_full = False
        self.microbatches.give_place(request)
        self.jump_forward.forget(request)
        known = self.speculation.known_tokens(request, outputs) if self.computes_ahead else None
        self.memory.leave(request, step, publish=publish, known=known)

    def leave_running(self, requests: list[Request]) -> None:
        """Take those of the requests that decode out of the cohort, all at once, noting where each stands."""
        leaving = [request.row for request in requests if request.decodes]
        if not leaving:
            return  # as always when they end by length: they left with their last launch
        for running in self.microbatches.states_of(requests):
            running.remove(leaving, self.memory.table)

    def occupy(self, request: Request) -> None:
        """Count a request as active, with a place in the microbatch whose launch is planned."""
        self.active += 1
        self.microbatches.take_place(request)

    def give_place(self, request: Request) -> None:
        """Take back the place of a request that stays active only until its KV is sent."""
        self.batch_is_full = False
        self.microbatches.give_place(request)

    def retry_admission(self) -> None:
        """Something came free, or a limit moved: try admission again."""
        self.batch_is_full = False

    def admission_ended(self) -> None:
        """Admission ran out of memory or places: not tried again before something comes free."""
        self.batch_is_full = True

    def split(self, request: Request | None) -> None:
        """Make this the chunked-prefill request; None: there is none."""
        self.prefilling = request

    # ------------------------------------------------------------------------------------------------ batches in flight

    def next_number(self) -> int:
        """Take the number of the plan that is being made."""
        self.next_batch_id += 1
        return self.next_batch_id - 1

    def put_in_flight(self, batch: InFlight) -> None:
        """Count a batch as in flight."""
        self.in_flight.append(batch)

    def discarded(self, tokens: int) -> None:
        """Count tokens that were sampled for rows that were dead by then."""
        self.tokens_discarded += tokens

    def begin_microbatch(self, number: int) -> None:
        """Turn to a microbatch whose launch is to be planned, with what is known of its admission."""
        self.batch_is_full = self.microbatches.begin_launch(number, self.batch_is_full)

    def end_microbatch(self) -> None:
        """Its launch is planned: between launches `batch_is_full` means that any microbatch is full."""
        self.batch_is_full = self.microbatches.end_launch(self.batch_is_full)

    # ----------------------------------------------------------------------------------------------------------- timers

    def set_timer(self, due_us: int, request_id: RequestId) -> None:
        """Look at this request again at `due_us`."""
        heappush(self.timers, (due_us, request_id))

    def _set_timers(self, request: Request) -> None:
        config = self.config
        if request.deadline_us is None and config.waiting_timeout_us is not None:
            request.deadline_us = request.arrived_us + config.waiting_timeout_us
        if request.finish_by_us is None and config.running_timeout_us is not None:
            request.finish_by_us = request.arrived_us + config.running_timeout_us
        for due in (request.deadline_us, request.finish_by_us, request.grammar_due_us):
            if due is not None:
                heappush(self.timers, (due, request.request_id))

    def expire(self, step: Step) -> None:
        """End what is overdue; drop timers of requests that need them no more."""
        while self.timers:
            due, request_id = self.timers[0]
            request = self.requests.get(request_id)
            never_ran = request is not None and not request.ran
            of_transfer = due == self.transfers.due_of(request_id)
            relevant = request is not None and (
                due in (request.finish_by_us, request.grammar_due_us)
                or (due == request.deadline_us and never_ran)
                or of_transfer
            )
            if relevant and due > self.now_us:
                return
            heappop(self.timers)
            if not relevant or request is None:
                continue
            waited_us = self.now_us - request.arrived_us
            if due == request.grammar_due_us:
                self.reject(request_id, "grammar", f"its grammar did not compile within {waited_us} us", step)
            elif of_transfer:
                self.transfers.expired(request, step)
            elif never_ran:
                self.reject(request_id, "deadline", f"not admitted within {waited_us} us of its arrival", step)
            else:
                self.finish(request, "timeout", step, flush=True)

    # ---------------------------------------------------------------------------------- what operators and hosts change

    def turn_began(self, request: Request, step: Step) -> None:
        """A turn of a session has its whole prompt now."""
        self.transfers.turn_began(request, step)

    def reconfigure(self, config: SchedConfig) -> None:
        """Replace the settings."""
        self.config = config

    def reset_ratio(self) -> None:
        """Start the new-token ratio again, from the settings."""
        self.ratio = NewTokenRatio(self.config.schedule_conservativeness)

    def void_kv(self) -> None:
        """The KV that sessions hold is void; their tokens stay."""
        self.sessions.lose_kv()

    def weights_changed(self, step: Step) -> None:
        """New weights are in place, and nothing is in flight: what depends on those before is computed again."""
        for request in self.requests.values():
            if request.row < 0:
                request.namespace = self.memory.keyed(request.namespace)
                request.matched = None
        self.prerequisites.weights_changed(step)
        self.transfers.weights_changed(step)

    def restart(self, event: EngineRestarted, step: Step) -> None:
        """The device state is gone: nothing is in flight or cached, and unfinished requests wait again, first.

        Tokens delivered so far are kept; those sampled in flight are drawn again. Results of older generations are
        void. A profile ends with the device that took it. Pause, drain, sessions and their tokens stay.
        """
        if event.generation <= self.generation:
            raise ContractError(f"restart into generation {event.generation}, but this is generation {self.generation}")
        self.generation = event.generation
        self.media.void()  # before requests end below: what that requests of the encoder does not replace what is gone
        tiers, self.memory.tiers = self.memory.tiers, NoTiers(self.memory)  # what is freed below is worth no copy
        self.transfers.restarted(step)
        if self.ranks is not None:
            self.ranks.restarted(event.generation)
        queue = self.ordering.take_all()
        tiers.void(event.generation, step)
        self.retract_all("restart", step)
        self.in_flight.clear()
        queue = [request for request in queue if not self.prerequisites.lost_media(request)]
        self.ordering.waiting = sorted(self.waiting, key=lambda request: request.request_id) + queue
        for request in list(self.requests.values()):
            if self.prerequisites.lost_media(request):
                self.prerequisites.await_media(request, step)
        self.batch_is_full = False
        self.sessions.lose_kv()
        self.memory.void(step)
        self.memory.tiers = tiers
        self.maintenance.restarted()
        self.controls.pace.restarted()
        self.grammars.ask_again(step)

    def stats(self) -> Stats:
        """How the engine stands now. The counts are a copy."""
        memory, counts = self.memory, self.counts
        cached = memory.radix.evictable_pages
        free, pages = memory.pool.free_count, self.config.pages
        prefilling = int(self.prefilling is not None)
        looked_up = counts.cached_tokens + counts.new_tokens
        ended = sum(counts.finished.values()) + sum(counts.rejected.values())
        results = self.next_batch_id - len(self.in_flight)  # delivered, or lost in a restart
        return Stats(
            time_us=self.now_us,
            waiting=len(self.waiting),
            held=len(self.held),
            prefilling=prefilling,
            running=self.active - prefilling,
            in_flight=len(self.in_flight),
            pages=pages,
            pages_free=free,
            pages_cached=cached,
            pages_session_held=self.sessions.pages_held_alone(),
            token_usage=(pages - free - cached) / pages,
            cache_hit_ratio=counts.cached_tokens / looked_up if looked_up else 0.0,
            new_token_ratio=self.ratio.value,
            sessions=len(self.sessions.open),
            paused=self.controls.paused,
            draining=self.controls.draining,
            weights_version=memory.weights_version,
            memory_released=self.maintenance.released,
            idle=not self.requests and not self.in_flight,
            progress=self.next_batch_id + results + counts.admitted + counts.retractions + ended,
            launches=self.next_batch_id,
            decode_launches=self.microbatches.decode_launches,
            tokens_discarded=self.tokens_discarded,
            counts=replace(counts, finished=dict(counts.finished), rejected=dict(counts.rejected)),
        )

    # -------------------------------------------------------------------------------------------------------- snapshots

    def end_run(self, next_batch_id: int, time_us: int, digest: bytes) -> None:
        """Take over what a stretch of decodes without decisions has done (decode_run.py)."""
        self.next_batch_id, self.now_us, self.digest = next_batch_id, time_us, digest
        self.launch_found_nothing = False

    def image(self, version: int, host: bytes) -> EngineImage:
        """All of it, and beside it what the host stores."""
        memory, running = self.memory, self.microbatches.current
        return EngineImage(
            format=version,
            config=self.config,
            now_us=self.now_us,
            generation=self.generation,
            digest=self.digest,
            pool=memory.pool.dump(),
            radix=memory.radix.dump(),
            rows=len(memory.table.holders),
            free_rows=list(memory.table.free_rows),
            pages_width=memory.table.pages.shape[1],
            outputs_width=memory.table.outputs.shape[1],
            requests=[request_image(self, request) for request in self.requests.values()],
            waiting=[request.request_id for request in self.waiting],
            held=list(self.held),
            grammars=[
                (digest, known.error, known.users, list(known.waiting)) for digest, known in self.grammars.known.items()
            ],
            prefilling=self.prefilling.request_id if self.prefilling is not None else None,
            running_batch=[request.request_id for request in running.batch.requests],
            positions=running.positions.tobytes(),
            in_flight=[batch_image(batch) for batch in self.in_flight],
            deferred_frees=[deferred_free_image(self, deferred) for deferred in memory.deferred_frees],
            deferred_pages=[(free_after, pages.tobytes()) for free_after, pages in memory.deferred_pages],
            rewrites=[(rewrite.row, rewrite.first, rewrite.pages.tobytes()) for rewrite in memory.rewrites],
            pending=[(pending.batch_id, pending.node.number, pending.pages) for pending in memory.pending],
            ratio=self.ratio.value,
            latency=self.latency.sums,
            batch_is_full=self.batch_is_full,
            decode_owed=running.decode_owed,
            deferred=self.admission.reported,
            launch_found_nothing=self.launch_found_nothing,
            horizon=running.horizon,
            decode_launches=running.decode_launches,
            extended_at=running.extended_at,
            refreshed_at=self.refreshed_at,
            forced_at=running.forced_at,
            next_batch_id=self.next_batch_id,
            last_request_id=self.last_request_id,
            timers=list(self.timers),
            paused=self.controls.paused,
            draining=self.controls.draining,
            drains=list(self.controls.drains),
            tokens_discarded=self.tokens_discarded,
            prefilled_tokens=self.ordering.prefilled_tokens,
            weights_version=memory.weights_version,
            maintenance=self.maintenance.image(),
            pace=self.controls.pace,
            counts=self.counts,
            sessions=self.sessions.images(),
            session_uses=self.sessions.uses,
            sessions_unsettled=list(self.sessions.unsettled),
            media=media_image(self.media, self.placeholders),
            adapters=memory.adapters.dump(),
            chances=self.speculation.chances if self.speculation.chances.offered else UNSET,
            forced=[
                (request_id, one.first, one.tokens.tobytes()) for request_id, one in self.jump_forward.forced.items()
            ]
            or UNSET,
            admits=UNSET if self.controls.admits else False,
            spare=memory.table.spare.tobytes() if self.config.keeps_draft_pages else UNSET,
            host=host,
            transfers=self.transfers.image(memory.lent) if self.transfers.hands_over else None,
            tiers=memory.tiers.dump() or UNSET,
            expert_loads=expert_loads_image(self.expert_loads),
            hybrid=memory.hybrid.dump() or UNSET,
            ranks=self.ranks.image() if self.ranks is not None else UNSET,
            microbatches=self.microbatches.image() if self.microbatches.several else UNSET,
            resources={one.name: one.dump() for one in self.admission.resources if one.name} or UNSET,
        )

    def load(self, image: EngineImage) -> None:
        """Become what `image` stored. Only for an engine that has just been built from the same settings."""
        memory = self.memory
        memory.pool = PagePool.load(image.pool)
        memory.radix = radix_cache_of(image.radix)
        nodes = {node.number: node for node in memory.radix.walk()}

        memory.adapters = adapters_of(image.adapters)
        memory.table = RequestTable(image.config.rows_max, image.config.page_size)
        memory.table.resize(image.rows, image.pages_width, image.outputs_width)
        memory.table.free_rows = image.free_rows
        if image.spare is not UNSET:
            memory.table.spare = np.frombuffer(image.spare, np.int32).copy()
        for one in image.requests:
            self.requests[one.request_id] = request_of(self, one, nodes)
        for deferred in image.deferred_frees:
            lay_row(memory.table, deferred.row, deferred.row_pages, deferred.row_outputs)
            memory.table.holders[deferred.row] = GONE
            memory.deferred_frees.append(
                DeferredFree(
                    free_after=deferred.free_after,
                    row=deferred.row,
                    namespace=deferred.namespace,
                    tokens=deferred.tokens,
                    prompt_tokens=deferred.prompt_tokens,
                    handle=nodes[deferred.handle] if deferred.handle is not None else None,
                    protected_pages=deferred.protected_pages,
                    computed=deferred.computed,
                    publish=deferred.publish,
                    known=deferred.known,
                )
            )
        self.ordering.waiting = [self.requests[request_id] for request_id in image.waiting]
        self.held = {request_id: self.requests[request_id] for request_id in image.held}
        self.grammars.known = {
            digest: GrammarEntry(error, users, dict.fromkeys(waiting))
            for digest, error, users, waiting in image.grammars
        }
        self.prefilling = self.requests[image.prefilling] if image.prefilling is not None else None
        if image.microbatches is not UNSET:
            self.microbatches.load(image.microbatches, self.requests)
        else:
            numbers = (image.horizon, image.decode_owed, image.decode_launches, image.extended_at, image.forced_at)
            members = [self.requests[request_id] for request_id in image.running_batch]
            self.microbatches.current.load(members, image.positions, numbers)
        self.active = sum(request.row >= 0 for request in self.requests.values())
        self.in_flight.extend(batch_of(self, batch) for batch in image.in_flight)
        memory.deferred_pages = [
            (free_after, np.frombuffer(pages, np.int32)) for free_after, pages in image.deferred_pages
        ]
        memory.rewrites = [Rewrite(row, first, np.frombuffer(pages, np.int32)) for row, first, pages in image.rewrites]
        memory.pending = [Pending(batch_id, nodes[number], pages) for batch_id, number, pages in image.pending]
        self.ratio.value = image.ratio
        self.latency.sums = image.latency
        self.now_us, self.generation, self.digest = image.now_us, image.generation, image.digest
        self.batch_is_full, self.admission.reported = image.batch_is_full, image.deferred
        self.launch_found_nothing, self.refreshed_at = image.launch_found_nothing, image.refreshed_at
        self.next_batch_id, self.last_request_id = image.next_batch_id, image.last_request_id
        self.timers, self.counts, self.tokens_discarded = image.timers, image.counts, image.tokens_discarded
        self.ordering.prefilled_tokens = image.prefilled_tokens
        admits = image.admits is UNSET
        self.controls.load(image.paused, admits, image.draining, image.drains, image.pace)
        memory.weights_version = image.weights_version
        if image.tiers is not UNSET:
            memory.tiers.load(image.tiers, nodes)
        memory.hybrid.table = memory.table
        if image.hybrid is not UNSET:
            memory.hybrid.load(image.hybrid, memory.table)
            memory.pool = memory.hybrid.pool_of(memory.pool)
        if image.resources is not UNSET:
            for resource in self.admission.resources:
                if resource.name:
                    resource.load(image.resources[resource.name])
        if isinstance(image.expert_loads, tuple):
            layers, reports, counts = image.expert_loads
            self.expert_loads = ExpertLoads(np.frombuffer(counts, np.int64).reshape(layers, -1), reports)
        self.maintenance.load(image.maintenance)
        self.sessions.load(image.sessions, nodes)
        self.sessions.uses = image.session_uses
        self.sessions.unsettled = image.sessions_unsettled
        if image.chances is not UNSET:
            self.speculation.chances = image.chances
        if image.forced is not UNSET:
            self.jump_forward.forced = {
                request_id: Forced(first, np.frombuffer(ids, np.int32)) for request_id, first, ids in image.forced
            }
        if image.media is not None:
            load_media(image.media, self.media, self.placeholders, self.requests)
        if image.transfers is not None:
            self.transfers.load(image.transfers, nodes)
            for row, request_id, given_up in image.transfers.lent:
                memory.lent[row] = Lent(request_id, [np.frombuffer(pages, np.int32) for pages in given_up])
        if self.ranks is not None and image.ranks is not UNSET:
            self.ranks.load(image.ranks)
        if not self.microbatches.several:
            for request in self.requests.values():
                if request.row >= 0 and not self.transfers.is_sent(request):
                    self.microbatches.take_place(request)
        for request in self.held.values():
            if request.extras is not None and request.extras.leader != NO_REQUEST:
                self.prerequisites.followers.setdefault(request.extras.leader, []).append(request)
