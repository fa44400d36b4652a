"""The state of one scheduler, and the verbs that change it: requests arrive, wait, run, are retracted and end.

This module has no policy. Planners and features decide which request starts, is retracted or decodes next, and call
these verbs. `Engine` dispatches events and orders launches. `memory` has the rows and pages.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import chain, islice, repeat, takewhile

import msgspec
import numpy as np
from msgspec.structs import replace

from lockstep.core.admin.control import Controls
from lockstep.core.admin.expert_load import ExpertRecorder
from lockstep.core.admin.maintenance import Maintenance
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
from lockstep.core.features.diffusion import Diffuser
from lockstep.core.features.disaggregation import Transfers
from lockstep.core.features.grammars import Grammars
from lockstep.core.features.jump_forward import JumpForward
from lockstep.core.features.media import EncoderCache
from lockstep.core.features.multiplexing import Multiplexer
from lockstep.core.features.prerequisites import Prerequisites
from lockstep.core.features.sessions import Sessions
from lockstep.core.features.speculation import Speculator
from lockstep.core.features.view import RetractReason
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.memory import Memory
from lockstep.core.kv.no_tiers import NoTiers
from lockstep.core.kv.radix import TOKEN_BYTES, Match
from lockstep.core.kv.running_view import of_all_microbatches
from lockstep.core.requests import delivery, extras
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.budget import NewTokenRatio, PrefillBudget, reserve_by_ratio
from lockstep.core.requests.microbatches import Microbatches, RunningPart
from lockstep.core.requests.retraction import members_growing, pages_ahead, pages_to_come
from lockstep.core.requests.table import (
    NO_REQUEST,
    ONE,
    ZERO,
    Accepted,
    Int32s,
    Request,
    RequestState,
    RunningBatch,
    prompt_length,
)
from lockstep.core.requests.validation import (
    RequestRefused,
    accepted,
    stop_tokens_of,
)
from lockstep.core.scheduler.admission import Admission
from lockstep.core.scheduler.image import (
    SchedulerPart,
    batch_image,
    batch_of,
    image_of,
    part_of,
    request_image,
    request_of,
)
from lockstep.core.scheduler.latency import ExtendLatency
from lockstep.core.scheduler.ordering import Ordering

KV_STAYS_VALID: frozenset[RetractReason] = frozenset({"pages", "forced", "pause", "preempted"})
"""Reasons of retraction after which the KV is still valid, so that it may be cached for other requests."""


class SchedulerState:
    """Requests, memory and features of one engine, and every change of them that a decision can make."""

    def __init__(self, config: SchedConfig, *, digests: bool) -> None:
        self.config = config
        self.digests = digests
        self.now_us = 0
        self.generation = 0
        self.digest = EMPTY_DIGEST

        self.page_shift = np.array(config.page_size.bit_length() - 1, np.int32)  # positions >> page_shift: page indices
        self.page_mask = np.array(config.page_size - 1, np.int32)  # positions & page_mask: offsets within pages
        self.in_flight: deque[InFlight] = deque()
        self.memory = Memory(config, self.in_flight)
        self.microbatches = Microbatches(config)  # the running batches, and the places of requests in them

        self.requests: dict[RequestId, Request] = {}  # every request that has not ended
        self.ordering = Ordering(config)  # the waiting queue
        self.blocked: dict[RequestId, Request] = {}  # accepted, with prerequisites: not in the waiting queue yet
        self.prefilling: Request | None = None  # the chunked-prefill request, not launched to its end
        self.active = 0  # requests PREFILLING or RUNNING
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.latency = ExtendLatency()
        self.batch_is_full = False  # admission ran out of memory and pauses until something is freed
        self.ahead = max(config.decode_look_ahead, config.decode_steps_per_launch)  # decodes that must fit at once
        self.look_ahead_with_drafts = max(self.ahead, 1 + config.drafts_max)  # with drafts, which may be left out
        self.refreshed_at = 0  # number of the next plan at the last refresh of the cached prefixes of the queue
        self.launch_found_nothing = False  # the last step had a free slot and nothing to launch
        self.next_batch_id = 0
        self.last_request_id = -1
        self.timers: list[tuple[int, RequestId]] = []  # heap of deadlines

        self.media = EncoderCache(config.encoder_cache_tokens, config.encoder_budget)
        self.grammars = Grammars(self)
        self.jump_forward = JumpForward(self)
        self.speculation = Speculator(self, self.jump_forward)
        self.diffusion, self._in_blocks = Diffuser(self), config.block_tokens > 0
        self.computes_ahead = config.speculates or config.jumps  # computed KV may be of tokens that are never output
        self.prerequisites = Prerequisites(self, self.media)
        self.sessions = Sessions(self, self.prerequisites)
        self.transfers = Transfers(config, self, self.sessions, self.prerequisites)
        self.maintenance = Maintenance(self)
        self.experts = ExpertRecorder(self)
        self.controls = Controls(self, self.sessions, self.transfers, self.maintenance, self.experts)
        self.admission = Admission(self)
        self.multiplexer = Multiplexer(config, self)
        self.ranks: Rounds | None = None  # agreement with other data-parallel ranks, where there are any
        self.components: tuple[Component, ...] = (  # in the order in which a restored engine loads them
            self.memory,
            self.ordering,
            self.grammars,
            self.controls,
            self.maintenance,
            self.sessions,
            self.media,
            self.prerequisites,
            self.jump_forward,
            self.speculation,
            self.diffusion,
            self.transfers,
            self.admission,
            self.experts,
            self.experts.placer,
            self.multiplexer,
        )
        self.counts = Counts()
        self.tokens_discarded = 0  # sampled for dead rows

    # ---------------------------------------------------------------------------------------------------------- queries

    @property
    def waiting(self) -> list[Request]:
        """The waiting queue, in the order in which requests began to wait."""
        return self.ordering.waiting

    @property
    def paused(self) -> bool:
        """Whether an operator paused launches and admission."""
        return self.controls.paused

    @property
    def idle(self) -> bool:
        """Whether nothing is under way: no request, batch in flight, open transfer or move between cache tiers (S34).

        Drain, Flush and changes of the role wait for this or are refused. Jobs on the device and loads of adapters do
        not count: they are answered by themselves.
        """
        return not (self.requests or self.in_flight or self.transfers.all or self.memory.operations)

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
        paced = self.now_us < self.controls.pace.not_before_us
        return self.controls.paused or self.maintenance.still or paced

    @property
    def sending(self) -> int:
        """Active requests with a computed prompt that only has to be sent yet."""
        return self.transfers.sending

    @property
    def deferred(self) -> tuple[RequestId, DeferReason] | None:
        """The request and the reason of the shortage that was reported last."""
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
        """The next position of each member of `running_batch`, int32 [members]."""
        return self.microbatches.current.positions

    @property
    def all_running(self) -> tuple[RunningBatch, Int32s]:
        """All members of all running batches, and the next position of each, int32 [members]."""
        return self.microbatches.together()

    @property
    def available_pages(self) -> int:
        """Pages of the device that can be allocated: free ones, and cached ones without a lock."""
        return self.memory.available_pages

    def row_available(self) -> bool:
        """Whether a row of the request table is free."""
        return self.memory.table.row_available()

    def place_available(self) -> bool:
        """Whether the microbatch whose launch is planned has a free place."""
        return self.microbatches.has_place()

    def match(self, request: Request) -> Match:
        """Return the cached prefix of a waiting request, as far as the request may use it."""
        return self.memory.match(request)

    def lacks_state(self, path: Int32s) -> bool:
        """Whether no state slot is available for a request that starts behind the cached pages `path`."""
        return self.memory.hybrid.lacks_state(path)

    def window_room(self, request: Request, start: int, take: int, path: Int32s, budget: PrefillBudget) -> int:
        """Return how many of `take` tokens, from position `start` on, sliding windows have pages for."""
        return self.memory.hybrid.window_room(self, request, start, take, path, budget)

    def has_work(self, number: int) -> bool:
        """Whether a microbatch may have something to launch. A host need not offer slots of other microbatches."""
        decodes = self.microbatches.states[number].batch.size > 0
        return bool(decodes or self.waiting or self.prefilling or self.transfers.ready)

    def open_slots(self) -> list[int]:
        """Return the microbatches that have a free slot and may have something to launch, by ascending number."""
        taken = [0] * self.microbatches.count
        for batch in self.in_flight:
            taken[batch.plan.microbatch] += 1
        depth = self.config.overlap_depth
        return [number for number, launched in enumerate(taken) if launched <= depth and self.has_work(number)]

    def launches_to_refresh(self) -> int:
        """Return the launches until the next refresh of the cached prefixes of waiting requests."""
        return self.refreshed_at + self.config.waiting_prefix_refresh - self.next_batch_id

    def reserve_of(self, running_batch: RunningBatch, positions: Int32s) -> int:
        """Return the tokens that `reserve` keeps for a running batch at these positions, spare pages not counted."""
        config = self.config
        if not running_batch.size:
            return 0
        if config.reserve == "on_demand":
            return self.next_pages(running_batch, positions) * config.page_size
        spare = self.memory.table.spare_of(running_batch.rows) if config.keeps_draft_pages else None
        if config.reserve == "full":
            return pages_to_come(positions, running_batch.limits, config.page_size, spare) * config.page_size
        remaining = running_batch.limits - positions - ONE
        if spare is not None:
            remaining = np.maximum(remaining - spare * config.page_size, ZERO)
        if self._in_blocks:
            remaining = np.maximum(remaining, ZERO)  # a block may reach beyond the length
        return reserve_by_ratio(remaining, running_batch.ignores_eos, self.ratio.value)

    def set_aside(self, running_batch: RunningBatch, positions: Int32s) -> int:
        """Return the pages that the decodes of a running batch take before any prompt of the same pass."""
        return (
            self.next_pages(running_batch, positions)
            if self.config.batching == "running_first" and running_batch.size
            else 0
        )

    @property
    def tokens_per_decode(self) -> int:
        """The most new tokens that a pass computes for each member of the running batch."""
        return 1 + self.config.drafts_max

    @property
    def moves_by(self) -> int:
        """The most positions by which a launch advances each member of the running batch."""
        return self.config.decode_steps_per_launch * (1 + self.config.path_max)

    def next_pages(self, running_batch: RunningBatch, positions: Int32s) -> int:
        """Return the pages that the next decode of a running batch at these positions opens, drafts included."""
        if self._in_blocks:
            return self.diffusion.members_opening(running_batch, positions).size
        if self.look_ahead_with_drafts == 1:
            return members_growing(positions, self.page_mask).size
        spare = self.memory.table.spare_of(running_batch.rows)
        return pages_ahead(running_batch, positions, self.config.page_size, self.look_ahead_with_drafts, spare)

    def comes_by_transfer(self, request: Request) -> bool:
        """Whether a transfer decides if and when the prompt is computed here. No media are requested before that."""
        return self.transfers.holds(request)

    def waits_for_turn(self, request: Request) -> bool:
        """Whether the request is a turn of a session whose turn before it has not ended."""
        return self.sessions.waits_for_turn(request)

    def computed_of(self, request: Request) -> int:
        """Return the positions of a request with launched KV."""
        return self.microbatches.state_of(request).position_of(request) if request.decodes else request.computed

    def tokens_of(self, request: Request, outputs: int) -> bytes:
        """Return the prompt and that many output tokens of a request, packed int32."""
        return self.memory.table.first_tokens(
            request.row, request.tokens, request.prompt_tokens, request.prompt_tokens + outputs
        )

    def outputs_of(self, request: Request) -> int:
        """Return the delivered output tokens of a request. Tokens that are sampled in flight do not count."""
        if request.state is not RequestState.RUNNING:
            return request.outputs
        if self._in_blocks:
            return self.diffusion.outputs_of(request)
        return self.sampled_by(request) - sum(
            batch.tokens_of(request.row) for batch in self.in_flight if request.row not in batch.dead
        )

    def sampled_by(self, request: Request) -> int:
        """Return the output tokens that launched batches sample for a request, delivered or not."""
        if request.state is not RequestState.RUNNING or request.prefill_only:
            return request.outputs
        if self._in_blocks:
            return self.diffusion.outputs_of(request)
        return self.computed_of(request) + 1 - request.prompt_tokens

    # ------------------------------------------------------------------------------------------ arrivals and departures

    def enqueue(self, event: RequestArrived, step: Step) -> None:
        """Accept a request or all samples of it, or reject it if it can never run."""
        if event.request_id <= self.last_request_id:
            raise ContractError(f"request id {event.request_id} does not increase after {self.last_request_id}")
        samples = sample_count(event)
        self.last_request_id = event.request_id + samples - 1
        try:
            self._refuse_newcomers(event, samples)
            taken = accepted(event, self.memory.adapters.named(event.adapter), self.config)
            if event.session or event.session_start is not None or event.session_after:
                self.sessions.check(event)
            if self.transfers.hands_over:
                self.transfers.check(event, samples)
            if event.grammar is not None:
                self.grammars.refuse(event, samples, len(self.blocked), self.config.max_queued_requests)
        except RequestRefused as refused:
            for number in range(samples):
                if self.transfers.hands_over and event.transfer_room is not None:
                    # The other engine waits for this half.
                    step.commands.append(CancelTransfer(event.request_id + number))
                self.reject(event.request_id + number, refused.reason, refused.message, step)
            return
        if event.spans:
            taken = taken._replace(tokens=self.media.placeholders.laid(taken.tokens, event.spans))
        for number in range(samples):
            self._accept(sample_of(event, number), taken, event.request_id if number else NO_REQUEST, step)

    def _accept(self, event: RequestArrived, taken: Accepted, leader: RequestId, step: Step) -> None:
        """Queue an accepted request, or add its prerequisites. `leader`: the first sample of its prompt."""
        config = self.config
        every = config.stream_interval if event.stream else config.force_stream_interval
        request = Request(event, taken, stop_tokens_of(event, config), every, self.ordering.prefilled_tokens)
        request.namespace = self.memory.keyed(request.namespace)
        self.requests[request.request_id] = request
        if request.session:
            self.add_prerequisite(request)
            self.sessions.take_in(request)
        if request.grammar is not None and self.grammars.must_wait(request, config.grammar_timeout_us, step):
            self.add_prerequisite(request)
        queued = RequestQueued(
            self.now_us, request.request_id, request.prompt_tokens, request.max_new_tokens, taken.truncated_tokens
        )
        request.advance(queued)
        step.decided.append(queued)
        self._set_timers(request)
        if self.transfers.hands_over:
            self.transfers.take_in(request, event, step)
        if not self.prerequisites.hold(request, leader, step) and not request.open_prerequisites:
            self.waiting.append(request)

    def _refuse_newcomers(self, event: RequestArrived, samples: int) -> None:
        if self.controls.draining:
            raise RequestRefused("draining", "the engine is draining and takes no new requests")
        limit = self.config.max_queued_requests
        if limit is None:
            return
        waiting, held = len(self.waiting), len(self.blocked)
        held_first = event.session or event.spans or event.transfer_room is not None
        more = f", {samples} more are too many" if samples > 1 else ""
        too_many = held_first or samples > 1
        if waiting + samples <= limit and not (too_many and held + samples > limit):
            return
        try:
            starting = self._starting(prompt_length(event.prompt), 0 if held_first else samples)
        except ValueError:
            return  # `accepted` refuses a malformed prompt
        if waiting + samples - starting > limit:
            queued = max(waiting - starting, 0)
            raise RequestRefused("queue_full", f"{queued} requests wait already{more} (max_queued_requests {limit})")
        if too_many and held + samples - max(starting - waiting, 0) > limit:
            raise RequestRefused("queue_full", f"{held} requests are held already{more} (max_queued_requests {limit})")

    def _starting(self, prompt_tokens: int, samples: int) -> int:
        """Return how many waiting requests, and `samples` of a prompt behind them, are about to be admitted.

        The next extend has places and tokens for these requests, so they do not count as queued. It is an estimate:
        admission also reserves KV, and a request that it defers then waits beyond `max_queued_requests`. After a
        deferral for lack of memory or places no request is about to be admitted until something is freed.
        """
        if self.stands_still or not self.admits or self.batch_is_full or self.prefilling is not None:
            return 0
        config, table, hybrid = self.config, self.memory.table, self.memory.hybrid
        places = min(
            config.max_running_requests - (self.active - self.sending),
            table.rows_available,
            self.microbatches.places_available,
            hybrid.rows_available,
        )
        if config.prefill_max_requests is not None:
            places = min(places, config.prefill_max_requests)
        if places <= 0 or hybrid.full(of_all_microbatches(self)):
            return 0
        room = min(config.max_prefill_tokens, self.available_pages * config.page_size)
        if config.chunked_prefill_size is not None:
            room = min(room, config.chunked_prefill_size)
        waiting = (len(request.tokens) // TOKEN_BYTES for request in self.waiting if request.deferred is None)
        arriving = chain((prompt_tokens,), repeat(config.page_size))  # samples share the prompt's KV
        starting = 0
        for tokens in islice(chain(waiting, islice(arriving, samples)), places):
            if starting and tokens > room:
                break  # the first request of an extend may exceed its budget
            room -= tokens
            starting += 1
        return starting

    def reject(self, request_id: RequestId, reason: RejectReason, message: str, step: Step) -> None:
        """Reject a request id with an error, and end its request if it exists. The request has never run."""
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

    def add_prerequisite(self, request: Request) -> None:
        """Keep a request out of the waiting queue until this prerequisite is met, see `join_queue`."""
        request.open_prerequisites += 1
        self.blocked[request.request_id] = request

    def join_queue(self, request: Request) -> None:
        """Meet one prerequisite. After the last one the request joins the waiting queue, by its time of arrival."""
        self.meet_prerequisite(request)
        if request.open_prerequisites:
            return
        younger = (i for i, other in enumerate(self.waiting) if not other.ran and other.request_id > request.request_id)
        self.waiting.insert(next(younger, len(self.waiting)), request)
        self.ordering.joins(request)

    def meet_prerequisite(self, request: Request) -> None:
        """Meet one prerequisite of a request that takes a row without waiting in the queue."""
        request.open_prerequisites -= 1
        if not request.open_prerequisites:
            del self.blocked[request.request_id]

    def leave_queue(self, request: Request) -> None:
        """Take a request out of the waiting queue for a new prerequisite."""
        self.waiting.remove(request)

    def _leave_queue(self, request: Request) -> None:
        """Take an ending request out of the waiting queue. A request behind it may fit."""
        if self.blocked.pop(request.request_id, None) is None:
            self.waiting.remove(request)
            self.batch_is_full = False

    def cancel(self, event: RequestCancelled, step: Step) -> None:
        """End a request in any state. Cancellations of ended requests are ignored."""
        request = self.requests.get(event.request_id)
        if request is not None:
            self.finish(request, "cancelled", step)

    def finish(
        self, request: Request, reason: FinishReason, step: Step, *, flush: bool = False, outputs: int | None = None
    ) -> None:
        """End a request: free its resources, cache its computed KV, close its stream.

        Args:
            flush: send the tokens that its cadence has kept back first; for ends without a new token.
            outputs: output tokens that count, if not all delivered ones.
        """
        if outputs is None:
            outputs = self.outputs_of(request)
        if flush:
            self._flush_stream(request, outputs, step)
        if request.session:
            self.sessions.turn_ends(request, reason, outputs)
        if self.transfers.all:
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
        """Send the tokens that the cadence of a request has kept back."""
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
        """Free the pages of a running request, which waits again and keeps its delivered tokens.

        Args:
            reason: "preempted" requests are queued by `requeue` when the pass over the queue has ended.
            beneficiary: the request that it makes room for, if any.
            pages: the pages that a decode needed and those available, if it is retracted for pages.
        """
        if self.transfers.is_given(request):
            self.finish(request, "transfer", step)  # KV that was sent cannot be revoked
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
        self.leave(request, step, outputs, publish=self.config.retracted_kv == "cache" and reason in KV_STAYS_VALID)
        request.advance(retracted)
        request.namespace = self.memory.keyed(request.namespace)
        request.waiting_since_us = self.now_us
        request.matched = None
        step.decided.append(retracted)
        extras.kept(request)
        if reason != "preempted":
            self.requeue(request, step)

    def requeue(self, request: Request, step: Step) -> None:
        """Queue a retracted request where `retracted_requeue` places it, unless it must wait for media again."""
        if self.prerequisites.lost_media(request):
            self.prerequisites.await_media(request, step)
            return
        if self.config.retracted_requeue == "front":
            ahead = takewhile(lambda other: other.ran and other.request_id < request.request_id, self.waiting)
            self.waiting.insert(len(list(ahead)), request)
        else:
            self.waiting.append(request)

    def cancel_all(self, requests: list[Request], step: Step) -> None:
        """End these requests as cancelled, by order of their clients or of an operator."""
        self.leave_running(requests)
        for request in requests:
            self.finish(request, "cancelled", step, flush=True)

    def retract_all(self, reason: RetractReason, step: Step, *, by_layers: bool = False) -> None:
        """Retract all running requests; `by_layers`: only those with prompts computed to some layer."""
        running = [request for request in self.requests.values() if request.row >= 0]
        if by_layers:
            running = self.multiplexer.members()
        if self.transfers.all:
            self.transfers.give_up_all(step)
            running = [request for request in running if not self.transfers.is_sent(request)]
        self.leave_running(running)
        for request in running:
            self.retract(request, reason, step)

    def leave(self, request: Request, step: Step, outputs: int, *, publish: bool) -> None:
        """Take a request with that many outputs off its row, see `Memory.leave`."""
        if request.decodes:
            self.leave_running([request])
        if self.prefilling is request:
            self.prefilling = None
        self.active -= 1
        self.batch_is_full = False
        self.microbatches.give_place(request)
        if self.jump_forward.forced:
            self.jump_forward.forget(request)
        known = self.speculation.known_tokens(request, outputs) if self.computes_ahead else None
        if self.multiplexer.parts:
            known = self.multiplexer.leave(request)
        if self._in_blocks:
            known = self.diffusion.known_tokens(request, outputs)
        self.memory.leave(request, step, publish=publish, known=known)

    def leave_running(self, requests: list[Request]) -> None:
        """Take the decoding ones of these requests out of their running batches, and store the position of each."""
        leaving = [request.row for request in requests if request.decodes]
        if not leaving:
            return  # the usual case of an end by length: they left with their last launch
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
        """Try admission again: something was freed, or a limit has changed."""
        self.batch_is_full = False

    def admission_ended(self) -> None:
        """Pause admission, which ran out of memory or places, until something is freed."""
        self.batch_is_full = True

    def set_chunked_request(self, request: Request | None) -> None:
        """Set the chunked-prefill request; None: there is none."""
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
        """Count tokens that were sampled for dead rows."""
        self.tokens_discarded += tokens

    def begin_microbatch(self, number: int) -> None:
        """Make a microbatch the one whose launch is planned, with the state of its admission."""
        self.batch_is_full = self.microbatches.begin_launch(number, self.batch_is_full)

    def end_microbatch(self) -> None:
        """End the planning of that launch. Between launches `batch_is_full` means that any microbatch is full."""
        self.batch_is_full = self.microbatches.end_launch(self.batch_is_full)

    # ----------------------------------------------------------------------------------------------------------- timers

    def set_timer(self, due_us: int, request_id: RequestId) -> None:
        """Examine this request again at `due_us`."""
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
        """End overdue requests; drop the timers of requests that do not need them any more."""
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

    # ------------------------------------------------------------------------------------ changes by operators and host

    def turn_began(self, request: Request, step: Step) -> None:
        """Note that a turn of a session has its whole prompt."""
        self.transfers.turn_began(request, step)

    def reconfigure(self, config: SchedConfig) -> None:
        """Replace the settings."""
        self.config = config

    def reset_ratio(self) -> None:
        """Start the new-token ratio again, from the settings."""
        self.ratio = NewTokenRatio(self.config.schedule_conservativeness)

    def void_kv(self) -> None:
        """Drop the KV that sessions hold; their tokens stay."""
        self.sessions.lose_kv()

    def weights_changed(self, step: Step) -> None:
        """Drop what depends on replaced weights, so that it is computed again. Nothing is in flight."""
        for request in self.requests.values():
            if request.row < 0:
                request.namespace = self.memory.keyed(request.namespace)
                request.matched = None
        self.prerequisites.weights_changed(step)
        self.transfers.weights_changed(step)

    def restart(self, event: EngineRestarted, step: Step) -> None:
        """Begin a generation of the device: nothing is in flight or cached, and unfinished requests wait again, first.

        Delivered tokens are kept; tokens that were sampled in flight are drawn again. Results of older generations are
        void. A profile of the old device ends. Pause, drain, sessions and their tokens stay.
        """
        if event.generation <= self.generation:
            raise ContractError(f"restart into generation {event.generation}, but this is generation {self.generation}")
        self.generation = event.generation
        self.media.void()  # before requests end below, so that no lost output counts as present
        tiers, self.memory.tiers = self.memory.tiers, NoTiers(self.memory)  # pages that are freed below are not copied
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
        self.sessions.lose_kv()
        self.memory.void(step)
        self.memory.tiers = tiers
        self.maintenance.restarted()
        self.controls.pace.restarted()
        self.experts.restarted(step)
        self.grammars.ask_again(step)

    def stats(self) -> Stats:
        """Return the present state in numbers. The counts are a copy."""
        memory, counts = self.memory, self.counts
        cached = memory.radix.evictable_pages
        free, pages = memory.pool.free_count, self.config.pages
        prefilling = len(self.multiplexer.prefilling())
        looked_up = counts.cached_tokens + counts.new_tokens
        ended = sum(counts.finished.values()) + sum(counts.rejected.values())
        results = self.next_batch_id - len(self.in_flight)  # delivered, or lost in a restart
        return Stats(
            time_us=self.now_us,
            waiting=len(self.waiting),
            held=len(self.blocked),
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
        """Take over the result of a stretch of decodes without decisions (decode_run.py)."""
        self.next_batch_id, self.now_us, self.digest = next_batch_id, time_us, digest
        self.launch_found_nothing = False

    def image(self, version: int, host: bytes) -> msgspec.Struct:
        """Return the whole state for a snapshot, with what the host stores beside it."""
        own = SchedulerPart(
            format=version,
            config=self.config,
            now_us=self.now_us,
            generation=self.generation,
            digest=self.digest,
            requests=[request_image(self, request) for request in self.requests.values()],
            blocked=list(self.blocked),
            prefilling=self.prefilling.request_id if self.prefilling is not None else None,
            in_flight=[batch_image(batch) for batch in self.in_flight],
            ratio=self.ratio.value,
            latency=self.latency.sums,
            batch_is_full=self.batch_is_full,
            launch_found_nothing=self.launch_found_nothing,
            refreshed_at=self.refreshed_at,
            next_batch_id=self.next_batch_id,
            last_request_id=self.last_request_id,
            timers=list(self.timers),
            tokens_discarded=self.tokens_discarded,
            counts=self.counts,
            host=host,
        )
        return image_of((own, self.microbatches.part(), *(one.part() for one in self.components)))

    def load(self, image: msgspec.Struct) -> None:
        """Take over the state of a snapshot. Only for an engine that has just been built from the same settings."""
        own, restored = part_of(image, SchedulerPart), Restored(self.requests, self.blocked, {})
        memory, *others = self.components
        memory.load(part_of(image, memory.PART), restored)
        for one in own.requests:
            self.requests[one.request_id] = request_of(self, one, restored.nodes)
        self.blocked.update((request_id, self.requests[request_id]) for request_id in own.blocked)
        self.prefilling = self.requests[own.prefilling] if own.prefilling is not None else None
        self.microbatches.load(part_of(image, RunningPart), self.requests)
        self.active = sum(request.row >= 0 for request in self.requests.values())
        self.in_flight.extend(batch_of(self, batch) for batch in own.in_flight)
        self.ratio.value, self.latency.sums = own.ratio, own.latency
        self.now_us, self.generation, self.digest = own.now_us, own.generation, own.digest
        self.batch_is_full, self.launch_found_nothing = own.batch_is_full, own.launch_found_nothing
        self.refreshed_at, self.next_batch_id = own.refreshed_at, own.next_batch_id
        self.last_request_id, self.timers = own.last_request_id, own.timers
        self.counts, self.tokens_discarded = own.counts, own.tokens_discarded
        for component in others:
            component.load(part_of(image, component.PART), restored)
        if not self.microbatches.several:
            for request in self.requests.values():
                if request.row >= 0 and not self.transfers.is_sent(request):
                    self.microbatches.take_place(request)
