"""Which requests start or continue their prompts in the next launch, and with how many tokens.

An extend takes the next chunk of the chunked-prefill request, then waiting requests in the policy's order, as far as
the budgets go (requests/budget.py). `Admission` decides whether one of them may start, or why not.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from msgspec import UNSET

from lockstep.core.contract.commands import NO_ROWS, BatchPlan, Mode, Step
from lockstep.core.contract.events import AdmissionDeferred, PrefillCompleted, RequestAdmitted
from lockstep.core.features import speculation
from lockstep.core.kv.resource import ExtendShare
from lockstep.core.requests import extras, rules
from lockstep.core.requests.batching import ExtendPart, InFlight, new_tokens_of
from lockstep.core.requests.budget import Deferral, PrefillBudget, chunk_tokens
from lockstep.core.requests.retraction import pages_to_come
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import EMPTY_BATCH, Request, RequestState, RunningBatch
from lockstep.core.scheduler import preemption
from lockstep.core.scheduler.admission import TierMoves, chunk_tokens_min, within_windows
from lockstep.core.scheduler.decode import NO_DECODES, DecodePlanner
from lockstep.core.scheduler.state import SchedulerState

FIRST_CHUNK_PER_NEXT = 4
"""`chunk_tokens_min` by the least size of later chunks, which hold window pages already (docs/decisions/0097)."""


NO_ENDS = np.empty(0, np.bool_)

NOT_LOADED = (0, 0, 0)
"""`Tiers.loaded_for` of an engine without tiers."""


class PrefillPlanner:
    """Plans the extends of one engine."""

    def __init__(self, state: SchedulerState, decoding: DecodePlanner) -> None:
        self._state = state
        self._memory = state.memory
        self._microbatches = state.microbatches
        self._ordering = state.ordering
        self._sessions = state.sessions
        self._transfers = state.transfers
        self._admission = state.admission
        self._multiplexer = state.multiplexer
        self._decoding = decoding
        self._in_blocks = state.config.block_tokens > 0

    def plan_extend(self, running: RunningState, step: Step) -> InFlight | None:
        """Plan the next chunk of the chunked request, then waiting requests in the order of the policy.

        None: there is nothing to extend, or no room for it.
        """
        state, waiting = self._state, self._ordering.waiting
        if not waiting and state.prefilling is None:
            return None  # the usual case of a decode
        admitting = bool(waiting) and not state.batch_is_full and state.admits
        if not admitting and state.prefilling is None:
            return None
        budget = self._prefill_budget(running)
        parts: list[ExtendPart] = []
        preempted: list[Request] = []
        if self._state.prefilling is not None:
            if not self._microbatches.has_place(self._state.prefilling):
                return None  # its next chunk is launched with another microbatch
            self._continue_chunk(self._state.prefilling, budget, running, parts, step)
            while not parts and self._transfers.ready and self._transfers.makes_way(budget, step):
                self._continue_chunk(self._state.prefilling, budget, running, parts, step)
            if not parts and self._memory.hybrid.present:
                take = self._chunk_in_full_pages(self._state.prefilling, budget)
                preempted = preemption.make_room_for_chunked(self._state, self._state.prefilling, take, budget, step)
                if preempted:
                    self._continue_chunk(self._state.prefilling, budget, running, parts, step)
            if not parts:
                admitting = False  # no page for it now; decodes continue and free pages
        if admitting and not self._state.batch_is_full:
            tiered = self._memory.tiers.present
            for request in self._ordering.turn(state):
                if state.prefilling is not None and preemption.waits_for_chunked(state, request):
                    self._defer(request, Deferral("window"), step)
                    break
                writer = self._ordering.writer_of_prefix(request, state)
                if writer is not None:
                    self._defer_behind(request, writer, step)
                    continue
                found = self._admission.examine(state, request, budget, len(parts), state.prefilling is None)
                while isinstance(found, Deferral) and self._sessions.give_way(request, found, budget, step):
                    found = self._examine(request, budget, len(parts))
                if isinstance(found, ExtendShare):
                    if tiered and self._loads_first(request, found, budget, step):
                        continue
                else:
                    victims = preemption.make_room(self._state, request, found.reason, budget, len(parts), step)
                    if victims:
                        preempted += victims
                        found = self._examine(request, budget, len(parts))
                if isinstance(found, ExtendShare):
                    self._admit(request, found, parts, step)
                    continue
                self._defer(request, found, step)
                if not found.own:
                    break
            if self._ordering.close():
                self._state.retry_admission()
        for victim in preempted:
            self._state.requeue(victim, step)
        if self._multiplexer.present:
            self._multiplexer.begin(parts)
            return self.plan_layers(running, step)
        return self._extend_batch(running, parts, step) if parts else None

    def plan_layers(self, running: RunningState, step: Step) -> InFlight | None:
        """Plan the next layers of the split prefill. None: there is none, or all its requests have left."""
        split = self._multiplexer
        if not split.parts:
            return None
        layers = split.next_layers()
        if layers[1] == split.layers:
            for part in split.parts:
                if part.stop == part.request.extend_stop:
                    self._complete(part.request, step)
        batch = self._extend_batch(running, split.parts, step, "split_prefill", layers)
        split.launched(batch.plan)
        return batch

    def plan_prebuilt(self, running: RunningState, step: Step) -> InFlight | None:
        """Plan a pass of requests whose KV was received, which start behind their first token, and of the running
        batch. None: no such request is ready."""
        if not self._transfers.ready:
            return None
        parts = self._transfers.take_rows(self._state.next_batch_id, step)
        return self._extend_batch(running, parts, step, "prebuilt") if parts else None

    def _prefill_budget(self, running: RunningState) -> PrefillBudget:
        """Return the budget of this extend, beside the reserve of running requests and the decodes of the same pass."""
        state = self._state
        config, prefilling = state.config, state.prefilling
        reserve = self._reserved() if self._ordering.waiting and (state.active or self._transfers.hands_over) else 0
        budget = PrefillBudget(config, self._memory.available_pages * config.page_size, reserve)
        decodes = self._decode_tokens(running) if config.batching != "prefill_first" else 0
        if decodes:
            budget.share_with(running.batch.size, decodes, state.set_aside(running.batch, running.positions))
        least, chunk = config.chunked_prefill_size_min, config.chunked_prefill_size
        if least is not UNSET and chunk is not None:
            most = min(config.max_running_requests, self._microbatches.size)
            budget.shorten(rules.chunk_by_load(chunk, least, running.batch.size, most))
        if config.chunk_target_us is not None:
            context = prefilling.computed if prefilling is not None else 0
            beside = int(running.positions.sum()) if decodes else 0
            budget.shorten(state.latency.tokens_within(config.chunk_target_us, context, decodes, beside))
        if config.pp_dynamic_chunking is True and prefilling is not None and chunk is not None:
            budget.shorten(state.latency.tokens_like_first(chunk, prefilling.computed))
        return budget

    def _decode_tokens(self, running: RunningState) -> int:
        """Return the most tokens that a pass computes for a running batch. No member has drafts behind its limit."""
        batch, most = running.batch, self._state.tokens_per_decode
        if most == 1:
            return batch.size
        return int(np.minimum(np.maximum(batch.limits - running.positions, 1), most).sum())

    def _reserved(self) -> int:
        """Return the tokens that `reserve` keeps for active requests."""
        state = self._state
        reserved = state.reserve_of(*state.all_running)
        if self._multiplexer.present:
            reserved += state.reserve_of(*self._multiplexer.joining())
        if state.config.reserve == "full":
            chunked, page_size = state.prefilling, state.config.page_size
            if chunked is not None:
                stop = chunked.reach + 1
                reserved += pages_to_come(np.array([chunked.computed]), np.array([stop]), page_size) * page_size
            if self._transfers.all:
                reserved += self._transfers.promised_pages() * page_size
        return reserved

    def _continue_chunk(
        self, request: Request, budget: PrefillBudget, running: RunningState, parts: list[ExtendPart], step: Step
    ) -> None:
        """Add the next chunk of the chunked request to the extend, if there is a page for it."""
        take = self._next_chunk(request, budget, running)
        if self._sessions.open:
            wanted = chunk_tokens(request.computed, request.extend_stop - request.computed, budget, True, True)
            lacking = -(-wanted // self._state.config.page_size) + budget.set_aside - self._memory.available_pages
            if lacking > 0 and (more := self._sessions.make_room(self._memory, lacking, step)):
                budget.gain(more)
                take = self._next_chunk(request, budget, running)
        if take > 0:
            self._microbatches.take_place(request)
            self._extend_to(request, request.computed + take, parts, step)
            budget.newcomers.append(request)
            budget.charge(take, request.max_new_tokens if request.computed == request.extend_stop else 0)

    def _next_chunk(self, request: Request, budget: PrefillBudget, running: RunningState) -> int:
        """Return the tokens of the next chunk of the chunked request.

        It is first in the extend and not limited by the total budget, since its end frees memory. It needs only pages.
        If window pages suffice for a small chunk only (`chunk_tokens_min`), it waits while the running batch decodes.
        """
        take = self._chunk_in_full_pages(request, budget)
        if not self._memory.hybrid.present:
            return take
        room = within_windows(self._state, request, request.computed, take, NO_ROWS, budget, may_split=True)
        least = chunk_tokens_min(self._state.config) // FIRST_CHUNK_PER_NEXT
        return 0 if room < min(take, least) and running.batch.size else room

    def _chunk_in_full_pages(self, request: Request, budget: PrefillBudget) -> int:
        page_size, start = self._state.config.page_size, request.computed
        take = chunk_tokens(start, request.extend_stop - start, budget, first=True, may_split=True)
        pages = self._memory.available_pages - budget.set_aside
        return rules.next_chunk(take, start, pages, page_size, budget.align)

    def would_extend(self, running: RunningState) -> bool:
        """Whether an extend could be launched now. Changes nothing."""
        if self._state.prefilling is not None:
            return self._next_chunk(self._state.prefilling, self._prefill_budget(running), running) > 0
        if not self._ordering.waiting or self._state.batch_is_full or not self._state.admits:
            return False
        budget, answer = self._prefill_budget(running), False
        for request in self._ordering.turn(self._state):
            if self._ordering.writer_of_prefix(request, self._state) is None:
                found = self._examine(request, budget, 0)
                answer = isinstance(found, ExtendShare)
                if answer or (isinstance(found, Deferral) and not found.own):
                    break
        self._ordering.close()
        return answer

    def _examine(self, request: Request, budget: PrefillBudget, parts: int) -> ExtendShare | Deferral:
        """Return the share with which a waiting request may join an extend, or why it may not. Changes nothing."""
        return self._admission.examine(self._state, request, budget, parts, self._state.prefilling is None)

    def _loads_first(self, request: Request, fit: ExtendShare, budget: PrefillBudget, step: Step) -> bool:
        """Whether a request that could start waits for a load, because the host has more of its prefix."""
        if fit.match is None or not self._memory.tiers.begin_load(self._state, request, fit.match, budget, step):
            return False
        self._defer(request, TierMoves.loading, step)
        return True

    def _admit(self, request: Request, fit: ExtendShare, parts: list[ExtendPart], step: Step) -> None:
        """Give a waiting request its row and its first part of this extend."""
        memory, now_us = self._memory, self._state.now_us
        row = memory.take_row(request, fit.match, step)
        if not request.ran:
            request.cached_tokens = min(fit.cached_tokens, request.prompt_tokens)
        request.chunks = 0
        request.bypassed = 0
        request.deferred = None
        self._state.occupy(request)
        waited_us = now_us - request.waiting_since_us
        loaded = memory.tiers.loaded_for(request, fit.cached_tokens) if memory.tiers.present else NOT_LOADED
        admitted = RequestAdmitted(
            now_us, request.request_id, row, fit.cached_tokens, fit.new_tokens, waited_us, 0, *loaded
        )
        request.advance(admitted)
        step.decided.append(admitted)
        self._admission.reserve(fit)
        self._extend_to(request, fit.cached_tokens + fit.take, parts, step)

    def _defer(self, request: Request, deferral: Deferral, step: Step) -> None:
        """Report why a request waits. After a lasting shortage admission pauses until something is freed."""
        if deferral.lasts and self._state.active:
            self._state.admission_ended()
        self._admission.report(request, deferral, self._state.now_us, step)

    def defer_first(self, step: Step) -> None:
        """Report once that the head of the queue waits for prompts of other ranks."""
        for request in self._ordering.first(self._state, 1):
            self._defer(request, Deferral("proposal_undone"), step)

    def _defer_behind(self, request: Request, writer: Request, step: Step) -> None:
        """Report once that a request waits until another one has computed the pages that it needs next."""
        if request.behind != writer.request_id:
            request.behind = writer.request_id
            deferred = AdmissionDeferred(self._state.now_us, request.request_id, "prefix", behind=writer.request_id)
            step.decided.append(deferred)

    def _extend_to(self, request: Request, stop: int, parts: list[ExtendPart], step: Step) -> None:
        """Allocate the pages of a request up to `stop`, and add that part to the extend."""
        start = request.computed
        self._memory.reach(request, stop, step)
        request.computed = stop
        request.chunks += 1
        self._ordering.prefilled(stop - start)
        parts.append(ExtendPart(request, start, stop))
        if stop < request.extend_stop:
            self._state.set_chunked_request(request)
            return
        if self._state.prefilling is request:
            self._state.set_chunked_request(None)
        if not self._multiplexer.present:  # otherwise its last layers complete it
            self._complete(request, step)

    def _complete(self, request: Request, step: Step) -> None:
        """Report that the last of a prompt is launched. The request samples its first token with it."""
        completed = PrefillCompleted(self._state.now_us, request.request_id, request.chunks)
        request.advance(completed)
        step.decided.append(completed)

    def _extend_batch(
        self,
        running: RunningState,
        parts: list[ExtendPart],
        step: Step,
        kind: Literal["extend", "prebuilt", "split_prefill"] = "extend",
        layers: tuple[int, int] | None = None,
    ) -> InFlight:
        """Build the batch of an extend, with the next decode of the running batch if batches are mixed and it fits.

        Args:
            layers: of a split prefill: the layers [start:stop) that the batch computes.
        """
        requests = [part.request for part in parts]
        request_ids = np.array([request.request_id for request in requests], np.int64)
        rows = np.array([request.row for request in requests], np.int32)
        starts = np.array([part.start for part in parts], np.int32)
        stops = np.array([part.stop for part in parts], np.int32)
        pooled: list[int] = []
        sampling: list[int] = []
        for i, request in enumerate(requests):
            if request.state is RequestState.RUNNING:
                (pooled if request.prefill_only else sampling).append(i)
        if self._in_blocks and sampling:
            self._decoding.begin_blocks(running, [requests[i] for i in sampling])
            sampling = []  # its tokens come with its blocks
        prefilled, sample_rows, reached = EMPTY_BATCH, NO_ROWS, NO_ROWS
        if sampling:
            prefilled, sample_rows = RunningBatch.of([requests[i] for i in sampling]), np.array(sampling, np.int32)
            reached = stops.take(sample_rows)
        mixes = kind == "prebuilt" or self._state.config.batching != "prefill_first"
        decodes = self._decoding.decodes_along(running, requests, step) if mixes else NO_DECODES
        along = decodes.running_batch
        mode: Mode = "mixed" if along.size and kind == "extend" else kind
        if along.size:
            rows, request_ids = np.concatenate((rows, along.rows)), np.concatenate((request_ids, along.request_ids))
            starts, stops = np.concatenate((starts, decodes.starts)), np.concatenate((stops, decodes.stops))
            sample_rows = np.concatenate((sample_rows, along.everyone + np.int32(len(parts))))
        taken, deltas = self._memory.changes(decodes.deltas, None if layers is None else rows.tolist())
        special = extras.plan_extras(parts)
        completes = layers is None or layers[1] == self._multiplexer.layers
        plan = BatchPlan(
            batch_id=self._state.next_number(),
            mode=mode,
            rows=rows,
            request_ids=request_ids,
            starts=starts,
            stops=stops,
            extend_rows=len(parts),
            token_ids=new_tokens_of(parts),
            sample_rows=sample_rows,
            rows_taken=taken,
            deltas=deltas,
            generation=self._state.generation,
            pooled_rows=np.array(pooled, np.int32) if pooled else NO_ROWS,
            media_spans=special.media_spans,
            logprob_spans=special.logprob_spans if completes else (),
            hidden_spans=special.hidden_spans if completes else (),
            layers=layers,
            sms=None if layers is None else self._multiplexer.sms_of_prompts(running.batch.size),
        )
        if decodes.verifying is not None:
            plan = speculation.verified(plan, decodes.verifying, self._state.config)
        if self._memory.hybrid.present:
            plan = self._memory.hybrid.completed(plan, step)
        if layers is not None:  # they join with the result
            ends = rules.ends_by_length(reached, prefilled.limits) if sampling else NO_ENDS
            return InFlight(plan, requests, prefilled, ends.nonzero()[0].tolist())
        ending = running.join(prefilled, reached, self._memory.table) if sampling else []
        if along.size:
            ending += [prefilled.size + i for i in decodes.ending]
            return InFlight(plan, requests + along.requests, prefilled.joined_by(along), ending)
        return InFlight(plan, requests, prefilled, ending)
