"""The scheduler: `Engine.step` takes in one observed fact and returns what was decided and what the host must do now.

No clock, no I/O, no randomness: equal journals give equal Steps. All control flow of scheduling is in this file, in
reading order; the decisions themselves are pure functions in the files named for them (admission, ordering,
retraction, delivery), rows and pages are kept by `memory`. Facts fold; only LaneReady launches.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import takewhile
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from lockstep.core.admin import control
from lockstep.core.admin.control import Pace
from lockstep.core.admin.maintenance import Maintenance
from lockstep.core.admin.stats import Counts
from lockstep.core.cluster.expert_placement import ExpertLoads
from lockstep.core.contract.commands import (
    NO_DELTAS,
    NO_ROWS,
    BatchPlan,
    CancelTransfer,
    FinishRequest,
    LaunchBatch,
    Mode,
    PageDeltas,
    RejectRequest,
    Step,
    StreamTokens,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.digest import EMPTY_DIGEST, step_digest
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    AdapterLoaded,
    AdmissionDeferred,
    BatchFinished,
    ClockAdvanced,
    ControlRequested,
    DecodeSkipped,
    EngineRestarted,
    ExpertLoadMeasured,
    FinishReason,
    GrammarReady,
    HostCopyFinished,
    HostTimeClamped,
    LaneReady,
    MediaEncoded,
    MemorySwitched,
    Observed,
    PrefetchFinished,
    PrefillCompleted,
    RanksAgreed,
    RejectReason,
    RequestAdmitted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
    StorageWritten,
    TokensForced,
    TransferAdvanced,
    WeightsSwapped,
)
from lockstep.core.features import grammars, jump_forward, prerequisites, speculation
from lockstep.core.features.data_parallel import Rounds
from lockstep.core.features.disaggregation import Transfers
from lockstep.core.features.media import EncoderCache, Placeholders
from lockstep.core.features.microbatches import Microbatches
from lockstep.core.features.sessions import Sessions
from lockstep.core.kv.adapters import LOOKAHEAD_REQUESTS, Adapters
from lockstep.core.kv.memory import Memory
from lockstep.core.kv.resource import Deferral, ExtendShare
from lockstep.core.kv.tiers import Tiers
from lockstep.core.requests import delivery, extras
from lockstep.core.requests.batching import ExtendPart, InFlight, new_tokens_of
from lockstep.core.requests.budget import (
    NewTokenRatio,
    PrefillBudget,
    aligned,
    chunk_tokens,
    reserve_by_ratio,
)
from lockstep.core.requests.retraction import choose_victim, goes_before, members_growing, pages_ahead, pages_to_come
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import EMPTY_BATCH, NO_REQUEST, ONE, Int32s, Request, RequestState, RunningBatch
from lockstep.core.requests.validation import (
    Accepted,
    RequestRefused,
    accepted,
    sample_of,
    samples_asked,
    stop_tokens_of,
)
from lockstep.core.scheduler import preemption
from lockstep.core.scheduler.admission import Admission, TierMoves, within_windows
from lockstep.core.scheduler.latency import ExtendLatency
from lockstep.core.scheduler.ordering import Ordering, refresh_prefixes

RetractReason = Literal["pages", "forced", "pause", "restart", "prefix_failed", "weights", "preempted"]


KV_STAYS_GOOD: frozenset[RetractReason] = frozenset({"pages", "forced", "pause", "preempted"})
"""Reasons to retract that say nothing about the KV itself, so that it may be kept for whoever begins alike."""


class Decodes(Struct, frozen=True):
    """One more token for each member of a cohort."""

    running_batch: RunningBatch
    starts: Int32s
    stops: Int32s
    deltas: PageDeltas
    ending: list[int]  # members that end by length with it
    verifying: speculation.Verifying | None = None  # the same with drafts to verify


NO_DECODES = Decodes(EMPTY_BATCH, NO_ROWS, NO_ROWS, NO_DELTAS, [])


class Engine:
    """Decides what runs next, for one engine. Build it from a SchedConfig; feed it every observed event in order."""

    def __init__(self, config: SchedConfig, *, digests: bool = True) -> None:
        """Begin with nothing.

        `digests`: whether Steps carry their digest. Without it a run decides the same, but nothing can be held against
        it; for simulations that keep no journal.
        """
        self.config = config
        self.digests = digests
        self.now_us = 0
        self.generation = 0
        self.digest = EMPTY_DIGEST

        self.page_shift = np.array(config.page_size.bit_length() - 1, np.int32)  # positions >> page_shift: their pages
        self.page_mask = np.array(config.page_size - 1, np.int32)  # positions & page_mask: their places in these
        self.in_flight: deque[InFlight] = deque()
        self.memory = Memory(config, self.in_flight)
        self.media = EncoderCache(config.encoder_cache_tokens, config.encoder_budget)
        self.placeholders = Placeholders()

        self.requests: dict[RequestId, Request] = {}  # every request that has not ended
        self.waiting: list[Request] = []  # the line, in the order in which its members began to wait
        self.ordering = Ordering(config)
        self.held: dict[RequestId, Request] = {}  # accepted, but something must happen before they may join the line
        self.grammars = grammars.Grammars()  # which of them are compiled, and who waits for them
        self.expert_loads: ExpertLoads | None = None  # None: nobody reported any
        self.followers: dict[RequestId, list[Request]] = {}  # held samples, by the one whose prompt they wait for
        self.prefilling: Request | None = None  # the one whose prompt is split and not launched to its end
        self.active = 0  # requests PREFILLING or RUNNING
        self.transfers = Transfers(config) if config.hands_over else None
        self.ranks = Rounds(config) if config.shares_passes else None
        self.microbatches = Microbatches(config)  # the running batches, and which requests have places in them
        self.sending = 0  # of the active ones, those whose prompt is computed and only has to be sent yet

        self.latency = ExtendLatency()
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.batch_is_full = False  # admission ran out of memory; not tried again before somebody leaves
        self.ahead = max(config.decode_look_ahead, config.decode_steps_per_launch)  # decodes that must fit at once
        self.ahead_hoped = max(self.ahead, 1 + config.drafts_max)  # with drafts, which may be left out
        self.speculates = config.speculates
        self.computes_ahead = config.speculates or config.jumps  # KV may be that of tokens that never come
        self.chances = speculation.Chances()
        self.forced: dict[RequestId, jump_forward.Forced] = {}  # output to come that grammars force, of who decodes
        self.prefilled_tokens = 0  # new tokens of all extends; what waiting requests age by under policy hrrn
        self.refreshed_at = 0  # number of the next plan when prefixes of the line were last counted as used
        self.launch_found_nothing = False  # this step had a free slot and nothing to launch
        self.next_batch_id = 0
        self.last_request_id = -1
        self.timers: list[tuple[int, RequestId]] = []  # heap of deadlines

        self.paused = False
        self.draining = False
        self.drains: list[int] = []  # control ids waiting for everything to end
        self.maintenance = Maintenance()
        self.pace = Pace()
        self.sessions = Sessions()
        self.counts = Counts()

        self.tokens_discarded = 0  # sampled for rows that were dead by then
        self.admission = Admission(self)

    # ------------------------------------------------------------------------------------------------------ the policy

    def step(self, event: Observed) -> Step:
        """Take in one fact; return what was decided and what the host must do now.

        Raises ContractError, with the state unchanged, for a fact that cannot be: time running backwards, a result
        nobody launched or of the wrong size, a request id that does not increase, an event of a feature not built yet.
        """
        if event.time_us < self.now_us:
            raise ContractError(f"time ran backwards: {event.time_us} us after {self.now_us} us; the host must clamp")
        found_nothing = False
        step = Step(time_us=event.time_us)
        match event:
            case BatchFinished():
                self._collect(event, step)
            case LaneReady():
                self.microbatches.check(event)
                self.now_us = event.time_us
                found_nothing = (self._launch_microbatch if self.microbatches.several else self._launch)(event, step)
            case RequestArrived():
                self._enqueue(event, step)
            case RequestCancelled():
                self._cancel(event, step)
            case MediaEncoded():
                prerequisites.encoded(self, event, step)
            case ControlRequested():
                self.now_us = event.time_us
                control.apply(self, event, step)
            case EngineRestarted():
                control.restart(self, event, step)
            case WeightsSwapped():
                self.maintenance.swapped(self, event, step)
            case MemorySwitched():
                self.maintenance.switched(self, event, step)
            case GrammarReady():
                self.grammars.answered(self, event, step)
            case TokensForced():
                jump_forward.learn(self, event)
            case AdapterLoaded() if self.memory.adapters.present:
                self._adapter_loaded(event, self.memory.adapters, step)
            case TransferAdvanced() if self.transfers is not None:
                self.transfers.advanced(self, event, step)
            case RanksAgreed() if self.ranks is not None:
                found_nothing = self.ranks.agreed(self, event, step)
            case HostCopyFinished() | PrefetchFinished() | StorageWritten() if self.memory.tiers.present:
                self._tier_answered(event, self.memory.tiers, step)
            case ClockAdvanced() | HostTimeClamped():
                self.now_us = event.time_us
            case ExpertLoadMeasured():
                self.expert_loads = ExpertLoads.folded(self.expert_loads, event)
                self.now_us = event.time_us
            case _:
                raise ContractError(f"{type(event).__name__} belongs to a feature this engine does not have yet")
        self.launch_found_nothing = found_nothing
        if self.timers:
            self._expire(step)
            step.wake_at_us = self.timers[0][0] if self.timers else None
        if self.sessions.open or self.maintenance.jobs:
            self._tend(step)
            if self.sessions.due_us is not None:
                step.wake_by(self.sessions.due_us)
        if self.transfers is not None:
            self.transfers.settle(self, step)
        if self.pace.gap_us and self.requests and self.pace.not_before_us > self.now_us:
            step.wake_by(self.pace.not_before_us)
        if not self.requests:
            self._settle_idle(step)
        if self.memory.adapters.present:
            self._settle_adapters(self.memory.adapters, step)
        self.memory.tiers.tend(self, step)
        if step.decided:
            self.counts.fold(step.decided)
        if self.digests:
            self.digest = step.digest = step_digest(self.digest, step)
        return step

    def _launch(self, event: LaneReady, step: Step) -> bool:
        """Prefill first, then decode; but a decode that others gave pages up for goes before any prefill.

        Under `batching` running_first, who runs gets its pages before anybody is admitted beside it.
        Returns: whether a slot was free and there was nothing to launch.
        """
        running = self.microbatches.current
        if self.timers:
            self._expire(step)  # nobody is admitted past its deadline
        if self.sessions.open or self.maintenance.jobs:
            self._tend(step)
        several = self.microbatches.several
        in_flight = self.microbatches.in_flight(self.in_flight) if several else len(self.in_flight)
        if self.paused or self.maintenance.still or in_flight > self.config.overlap_depth:
            return self.ranks is not None and self.ranks.join_in(self, step)
        if self.pace.gap_us and self.now_us < self.pace.not_before_us:
            return self.ranks is not None and self.ranks.join_in(self, step)
        if self.config.enable_priority_preemption:
            self.batch_is_full = False  # whoever came since, and whoever grew, may change that
        if self.config.waiting_prefix_refresh and self.waiting and self.launches_to_refresh() <= 0:
            self.refreshed_at = self.next_batch_id
            refresh_prefixes(self.waiting, self.memory.radix)
        if self.ranks is not None:
            return self.ranks.take_part(self, step)
        if not self.config.overlap_consecutive_prefills and self._waits_for_prefill(running):
            return True
        batch = self._plan_pass(running, step)
        if batch is None:
            return True
        if batch.samplers.constrained:
            grammars.launch(batch, self.in_flight, self.memory.table.outputs, step)
        else:
            step.commands.append(LaunchBatch(batch.plan))
        self.in_flight.append(batch)
        if self.config.same_step_sharing:
            self._share(batch, step)
        if self.transfers is not None:
            self.transfers.give_parts(self, batch, step)
        if self.pace.watches:
            self.pace.launched(self.now_us, step)
        return False

    def _launch_microbatch(self, event: LaneReady, step: Step) -> bool:
        """The same with the running batch of one microbatch."""
        self.begin_microbatch(event.microbatch)
        found_nothing = self._launch(event, step)
        self.end_microbatch()
        return found_nothing

    def begin_microbatch(self, number: int) -> None:
        """Turn to a microbatch whose launch is to be planned, with what is known of its admission."""
        self.batch_is_full = self.microbatches.begin_launch(number, self.batch_is_full)

    def end_microbatch(self) -> None:
        """Its launch is planned: between launches `batch_is_full` means that any microbatch is full."""
        self.batch_is_full = self.microbatches.end_launch(self.batch_is_full)

    def has_work(self, number: int) -> bool:
        """Whether a launch of a microbatch could find anything: a host need not offer slots to others."""
        decodes = self.microbatches.states[number].batch.size > 0
        ready = self.transfers is not None and bool(self.transfers.ready)
        return decodes or bool(self.waiting) or self.prefilling is not None or ready

    @property
    def running_batch(self) -> RunningBatch:
        """The requests that decode together, in the microbatch whose launch is planned or was planned last."""
        return self.microbatches.current.batch

    @property
    def positions(self) -> Int32s:
        """Per member of `running_batch`: the next position to compute."""
        return self.microbatches.current.positions

    @property
    def everybody(self) -> tuple[RunningBatch, Int32s]:
        """Those that decode, of all microbatches where there are several, and the next position of each."""
        return self.microbatches.together()

    def plan_next(self, step: Step, *, extends: bool = True) -> InFlight | None:
        """The same for one of several ranks: what it runs next, in flight from here on, to be launched when all are.

        Without `extends` prompts wait. None: there is nothing to run.
        """
        batch = self._plan_pass(self.microbatches.current, step, extends=extends)
        if batch is None:
            return None
        self.in_flight.append(batch)
        if self.config.same_step_sharing:
            self._share(batch, step)
        return batch

    def _plan_pass(self, running: RunningState, step: Step, *, extends: bool = True) -> InFlight | None:
        """What a running batch computes next; without `extends` prompts wait. None: nothing."""
        batch = None
        if extends and not self.decode_goes_first(running):
            batch = self._plan_prebuilt(running, step) or self._plan_extend(running, step)
        batch = batch or self._plan_decode(running, step)
        if batch is None:
            return None
        if self.microbatches.several:
            force_setattr(batch.plan, "microbatch", self.microbatches.at)  # the plan has not left the engine yet
        if batch.plan.extend_rows:
            running.extended_at = running.decode_launches
        return batch

    def _share(self, batch: InFlight, step: Step) -> None:
        """Let whoever is launched behind a batch find the KV of the prompts that it is about to compute."""
        for request, stop in zip(batch.requests, batch.plan.stops[: batch.plan.extend_rows].tolist(), strict=False):
            self.memory.publish(request, stop, step, writer=batch.plan.batch_id)
            prerequisites.follow(self, request, stop, step)

    @property
    def kv_in_transfer(self) -> bool:
        """Whether transfers from another engine hold pages."""
        return self.transfers is not None and self.transfers.holds_pages

    @property
    def stands_still(self) -> bool:
        """Whether nothing is launched for now, by somebody's wish."""
        paced = self.pace.gap_us > 0 and self.now_us < self.pace.not_before_us
        return self.paused or self.maintenance.still or paced

    def launches_to_refresh(self) -> int:
        """Launches until cached prefixes of who waits are counted as used again."""
        return self.refreshed_at + self.config.waiting_prefix_refresh - self.next_batch_id

    def decode_goes_first(self, running: RunningState) -> bool:
        """Whether decodes go before any prefill: one was promised to, or `batching` says so, or the cadence."""
        config = self.config
        if self.microbatches.several and self.microbatches.owes_elsewhere():
            return True
        if not running.batch.size:
            return False
        return (
            running.decode_owed
            or (config.batching == "running_first" and self._pages_lacking(running) > 0)
            or running.decode_launches - running.extended_at < config.prefill_decode_interval
        )

    def _waits_for_prefill(self, running: RunningState) -> bool:
        """Whether overlap is off for this batch: it would be an extend right behind an extend in flight."""
        if not self.in_flight or not self.in_flight[-1].plan.extend_rows:
            return False
        return not self.decode_goes_first(running) and self.would_extend(running)

    # ----------------------------------------------------------------------------------------- arrivals and departures

    def _enqueue(self, event: RequestArrived, step: Step) -> None:
        """Accept a request, or all samples of one, or reject what can never run."""
        if event.request_id <= self.last_request_id:
            raise ContractError(f"request id {event.request_id} does not increase after {self.last_request_id}")
        self.now_us = event.time_us
        samples = samples_asked(event)
        self.last_request_id = event.request_id + samples - 1
        try:
            self._refuse_newcomers(event, samples)
            taken = accepted(event, self.memory.adapters.named(event.adapter), self.config)
            if event.session or event.session_start is not None:
                self.sessions.check(event)
            if self.transfers is not None:
                self.transfers.check(event, samples)
            if event.grammar is not None:
                self.grammars.refuse(event, samples, len(self.held), self.config.max_queued_requests)
        except RequestRefused as refused:
            for number in range(samples):
                if self.transfers is not None and event.transfer_room is not None:  # who waits for its other half ...
                    step.commands.append(CancelTransfer(event.request_id + number))  # ... must know
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
        request.prefilled_before = self.prefilled_tokens
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
        if self.transfers is not None:
            self.transfers.take_in(self, request, event, step)
        if not prerequisites.hold(self, request, leader, step) and not request.holds:
            self.waiting.append(request)

    def _refuse_newcomers(self, event: RequestArrived, samples: int) -> None:
        if self.draining:
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
                self.sessions.turn_ends(self, request, "rejected", 0)
            self._leave_line(request)
            self.grammars.ended(request)
            if self.transfers is not None:
                self.transfers.ended(self, request, step)
            request.advance(rejected)
        step.decided.append(rejected)
        step.commands.append(RejectRequest(request_id, reason, message))
        if request is not None:
            prerequisites.ended(self, request, step)

    def hold(self, request: Request) -> None:
        """Keep a request out of the line until `join_line` was called for it as often as this."""
        request.holds += 1
        self.held[request.request_id] = request

    def join_line(self, request: Request) -> None:
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

    def _leave_line(self, request: Request) -> None:
        """A request that waits ends. Whoever is behind it may fit."""
        if self.held.pop(request.request_id, None) is None:
            self.waiting.remove(request)
            self.batch_is_full = False

    def _adapter_loaded(self, event: AdapterLoaded, adapters: Adapters, step: Step) -> None:
        """Whoever waits for the adapter may start, or ends with an error if it could not be loaded."""
        if event.generation < self.generation:
            self.now_us = event.time_us  # from before a restart: void
            return
        if event.generation > self.generation:
            raise ContractError(f"a load of generation {event.generation}, but this is generation {self.generation}")
        adapter = adapters.loaded(event)
        self.now_us = event.time_us
        self.batch_is_full = False
        if event.error:
            while ending := [request for request in self.waiting if request.adapter == adapter]:
                for request in ending:  # other samples may follow it into the line
                    self.finish(request, "error", step, flush=True)
            for request in self.transfers.ready_on(self, adapter) if self.transfers is not None else ():
                self.finish(request, "error", step, flush=True)

    def _tier_answered(
        self, event: HostCopyFinished | PrefetchFinished | StorageWritten, tiers: Tiers, step: Step
    ) -> None:
        """Pages moved between cache tiers, or did not. Whoever waits for them or for room may start."""
        if event.generation > self.generation:
            raise ContractError(f"a move of generation {event.generation}, but this is generation {self.generation}")
        if event.generation == self.generation:  # otherwise it was void from the restart on
            tiers.answered(event, step)
            self.batch_is_full = False
        self.now_us = event.time_us

    def _settle_adapters(self, adapters: Adapters, step: Step) -> None:
        """See the end of adapters that were withdrawn; while anybody may start, load what the line waits for."""
        adapters.end_withdrawals((request.adapter for request in self.requests.values()), step)
        wanted = self.transfers.adapters_wanted(self) if self.transfers is not None else []
        if self.maintenance.admits:
            wanted += [request.adapter for request in self.ordering.first(self, LOOKAHEAD_REQUESTS)]
        if wanted or self.maintenance.admits:
            adapters.load_for(wanted, step)

    def _cancel(self, event: RequestCancelled, step: Step) -> None:
        """End a request wherever it is. Late echoes of requests that ended are ignored."""
        self.now_us = event.time_us
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
            self.sessions.turn_ends(self, request, reason, outputs)
        if self.transfers is not None:
            self.transfers.ended(self, request, step)
        if request.state is RequestState.WAITING:
            self._leave_line(request)
        else:
            self.leave(request, step, outputs, publish=reason not in ("invalid", "error"))
        del self.requests[request.request_id]
        self.grammars.ended(request)
        cached = max(request.cached_tokens, 0)
        finished = RequestFinished(self.now_us, request.request_id, reason, outputs, cached)
        request.advance(finished)
        step.decided.append(finished)
        step.commands.append(FinishRequest(request.request_id, reason, request.prompt_tokens, outputs, cached))
        prerequisites.ended(self, request, step)

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
        if self.transfers is not None and self.transfers.is_given(request):
            self.finish(request, "transfer", step)  # what was sent cannot be taken back
            return
        outputs = self.outputs_of(request)
        sampled = self._sampled_by(request)
        request.tokens = self.tokens_of(request, outputs)
        request.outputs = outputs
        freed = -(-self.computed_of(request) // self.config.page_size) - request.protected_pages
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
            self._requeue(request, step)

    def _requeue(self, request: Request, step: Step) -> None:
        """Put a retracted request where `retracted_requeue` wants it, or hold it for media that it needs again."""
        if prerequisites.lost_media(self, request):
            prerequisites.await_media(self, request, step)
            return
        if self.config.retracted_requeue == "front":
            ahead = takewhile(lambda other: other.ran and other.request_id < request.request_id, self.waiting)
            self.waiting.insert(len(list(ahead)), request)
        else:
            self.waiting.append(request)

    def cancel_all(self, requests: list[Request], step: Step) -> None:
        """End these requests at their clients' or an operator's wish."""
        self.break_ranks(requests)
        for request in requests:
            self.finish(request, "cancelled", step, flush=True)

    def retract_all(self, reason: RetractReason, step: Step) -> None:
        """Take the pages of everybody who runs back."""
        running = [request for request in self.requests.values() if request.row >= 0]
        if self.transfers is not None:
            self.transfers.give_up_all(self, step)
            running = [request for request in running if not self.transfers.is_sent(request)]
        self.break_ranks(running)
        for request in running:
            self.retract(request, reason, step)

    def _tend(self, step: Step) -> None:
        """See to what waits for requests to end: jobs on the device, the next turns of sessions, their time-outs."""
        sessions = self.sessions
        if self.maintenance.jobs:
            self.maintenance.advance(self, step)
        if sessions.due_us is not None and sessions.due_us <= self.now_us:
            sessions.expire(self, step)
        if sessions.free:
            sessions.start_turns(self, step)

    def _set_timers(self, request: Request) -> None:
        config = self.config
        if request.deadline_us is None and config.waiting_timeout_us is not None:
            request.deadline_us = request.arrived_us + config.waiting_timeout_us
        if request.finish_by_us is None and config.running_timeout_us is not None:
            request.finish_by_us = request.arrived_us + config.running_timeout_us
        for due in (request.deadline_us, request.finish_by_us, request.grammar_due_us):
            if due is not None:
                heappush(self.timers, (due, request.request_id))

    def _expire(self, step: Step) -> None:
        """End what is overdue; drop timers of requests that need them no more."""
        while self.timers:
            due, request_id = self.timers[0]
            request = self.requests.get(request_id)
            never_ran = request is not None and not request.ran
            of_transfer = self.transfers is not None and due == self.transfers.due_of(request_id)
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
            elif of_transfer and self.transfers is not None:
                self.transfers.expired(self, request, step)
            elif never_ran:
                self.reject(request_id, "deadline", f"not admitted within {waited_us} us of its arrival", step)
            else:
                self.finish(request, "timeout", step, flush=True)

    def _settle_idle(self, step: Step) -> None:
        """Everything accepted has ended."""
        self.ratio.idle()
        self.microbatches.current.decode_owed = False
        if self.drains and not self.in_flight:
            control.answer_drains(self, step, ok=True)

    # --------------------------------------------------------------------------------------------------------- prefill

    def _plan_extend(self, running: RunningState, step: Step) -> InFlight | None:
        """The next chunk of the split prompt, then arrivals in the policy's order, as far as the budgets go."""
        admitting = bool(self.waiting) and not self.batch_is_full and self.maintenance.admits
        if self.prefilling is None and not admitting:
            return None
        budget = self._prefill_budget(running)
        parts: list[ExtendPart] = []
        preempted: list[Request] = []
        if self.prefilling is not None:
            if not self.microbatches.has_place(self.prefilling):
                return None  # its next chunk goes with another microbatch
            self._continue_chunk(self.prefilling, budget, parts, step)
            while not parts and self.transfers is not None and self.transfers.makes_way(self, step):
                self._continue_chunk(self.prefilling, budget, parts, step)
            if not parts and self.memory.hybrid.present:
                take = self._chunk_in_full_pages(self.prefilling, budget)
                preempted = preemption.make_room_for_split(self, self.prefilling, take, budget, step)
                if preempted:
                    self._continue_chunk(self.prefilling, budget, parts, step)
            if not parts:
                admitting = False  # no page for it now; decodes go on and give pages back
        if admitting and not self.batch_is_full:
            for request in self.ordering.turn(self):
                if self.prefilling is not None and preemption.stays_behind(self, request):
                    self._defer(request, Deferral("window"), step)
                    break
                writer = self.ordering.writer_of_prefix(request, self)
                if writer is not None:
                    self._put_off(request, writer, step)
                    continue
                found = self.admission.examine(request, budget, len(parts), self.prefilling is None)
                while isinstance(found, Deferral) and self.sessions.give_way(self, request, found, budget, step):
                    found = self.admission.examine(request, budget, len(parts), self.prefilling is None)
                if isinstance(found, ExtendShare) and self._loads_first(request, found, budget, step):
                    continue
                if isinstance(found, Deferral):
                    victims = preemption.make_room(self, request, found.reason, budget, len(parts), step)
                    if victims:
                        preempted += victims
                        found = self.admission.examine(request, budget, len(parts), self.prefilling is None)
                if isinstance(found, ExtendShare):
                    self._admit(request, found, parts, step)
                    continue
                self._defer(request, found, step)
                if not found.own:
                    break
            self.ordering.close(self)
        for victim in preempted:
            self._requeue(victim, step)
        return self._extend_batch(running, parts, step) if parts else None

    def _plan_prebuilt(self, running: RunningState, step: Step) -> InFlight | None:
        """Whoever's KV has come from elsewhere goes on behind its first token, and the cohort with it."""
        if self.transfers is None or not self.transfers.ready:
            return None
        parts = self.transfers.take_rows(self, step)
        return self._extend_batch(running, parts, step, "prebuilt") if parts else None

    def _prefill_budget(self, running: RunningState) -> PrefillBudget:
        """What this extend may take, beside what the running requests will want and what decodes along with it."""
        config = self.config
        reserve = self._reserved() if self.waiting and (self.active or self.transfers is not None) else 0
        budget = PrefillBudget(config, self.memory.available_pages * config.page_size, reserve)
        decodes = running.batch.size * self.tokens_per_decode if config.batching != "prefill_first" else 0
        if decodes:
            budget.share_with(decodes, self.set_aside(running.batch, running.positions))
        if config.chunk_target_us is not None:
            context = self.prefilling.computed if self.prefilling is not None else 0
            beside = int(running.positions.sum()) if decodes else 0
            budget.shorten(self.latency.tokens_within(config.chunk_target_us, context, decodes, beside))
        if config.pp_dynamic_chunking is True and self.prefilling is not None and budget.chunk is not None:
            first = config.chunked_prefill_size or budget.chunk
            budget.shorten(self.latency.tokens_like_first(first, self.prefilling.computed))
        return budget

    def _reserved(self) -> int:
        """Tokens that are not for newcomers: what `reserve` leaves to those who are active."""
        reserved, split = self.reserve_of(*self.everybody), self.prefilling
        if split is not None and self.config.reserve == "full":
            page_size = self.config.page_size
            reserved += pages_to_come(np.array([split.computed]), np.array([split.reach + 1]), page_size) * page_size
        if self.transfers is not None and self.config.reserve == "full":
            reserved += self.transfers.promised_pages(self) * self.config.page_size
        return reserved

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

    def _continue_chunk(self, request: Request, budget: PrefillBudget, parts: list[ExtendPart], step: Step) -> None:
        """The next chunk of the split prompt, if there is a page for it."""
        take = self._next_chunk(request, budget)
        if self.sessions.open:
            wanted = chunk_tokens(request.computed, extend_stop(request) - request.computed, budget, True, True)
            lacking = -(-wanted // self.config.page_size) + budget.set_aside - self.memory.available_pages
            if lacking > 0 and self.sessions.make_room(self.memory, lacking, step):
                take = self._next_chunk(request, budget)
        if take > 0:
            self.microbatches.take_place(request)
            self._extend_to(request, request.computed + take, parts, step)
            budget.newcomers.append(request)
            budget.charge(take, request.max_new_tokens if request.computed == extend_stop(request) else 0)

    def _next_chunk(self, request: Request, budget: PrefillBudget) -> int:
        """Its tokens: it goes first and past the total budget, since its end frees memory; it needs only pages."""
        take = self._chunk_in_full_pages(request, budget)
        return within_windows(self, request, request.computed, take, NO_ROWS, budget, may_split=True)

    def _chunk_in_full_pages(self, request: Request, budget: PrefillBudget) -> int:
        page_size, start = self.config.page_size, request.computed
        take = chunk_tokens(start, extend_stop(request) - start, budget, first=True, may_split=True)
        room = (self.memory.available_pages - budget.set_aside) * page_size + -start % page_size  # and in its last page
        return take if take <= room else aligned(start, room, budget.align)

    def would_extend(self, running: RunningState) -> bool:
        """Whether an extend could be launched now. Changes nothing."""
        if self.prefilling is not None:
            if not self.microbatches.has_place(self.prefilling):
                return False
            return self._next_chunk(self.prefilling, self._prefill_budget(running)) > 0
        if not self.waiting or self.batch_is_full or not self.maintenance.admits:
            return False
        budget, answer = self._prefill_budget(running), False
        for request in self.ordering.turn(self):
            if self.ordering.writer_of_prefix(request, self) is None:
                found = self.admission.examine(request, budget, 0, self.prefilling is None)
                answer = isinstance(found, ExtendShare)
                if answer or (isinstance(found, Deferral) and not found.own):
                    break
        self.ordering.close(self)
        return answer

    def _loads_first(self, request: Request, fit: ExtendShare, budget: PrefillBudget, step: Step) -> bool:
        """Whether a request that may start waits, because a tier below has more of its prefix than the device."""
        tiers = self.memory.tiers
        if fit.match is None or not tiers.begin_load(self, request, fit.match, budget, step):
            return False
        self._defer(request, TierMoves.load, step)
        return True

    def _admit(self, request: Request, fit: ExtendShare, parts: list[ExtendPart], step: Step) -> None:
        """Give a waiting request its row and its first part of this extend."""
        row = self.memory.take_row(request, fit.match, step)
        if not request.ran:
            request.cached_tokens = min(fit.cached_tokens, request.prompt_tokens)
        request.chunks = 0
        request.bypassed = 0
        request.deferred = None
        self.active += 1
        self.microbatches.take_place(request)
        waited_us = self.now_us - request.waiting_since_us
        loaded = self.memory.tiers.loaded_for(request, fit.cached_tokens)
        admitted = RequestAdmitted(
            self.now_us, request.request_id, row, fit.cached_tokens, fit.new_tokens, waited_us, 0, *loaded
        )
        request.advance(admitted)
        step.decided.append(admitted)
        self.admission.reserve(fit)
        self._extend_to(request, fit.cached_tokens + fit.take, parts, step)

    def _defer(self, request: Request, deferral: Deferral, step: Step) -> None:
        """Report why a request waits; after a shortage that lasts, do not try admission again before a request leaves."""
        if deferral.lasts and self.active:
            self.batch_is_full = True
        self.admission.report(request, deferral, self.now_us, step)

    def put_off_line(self, step: Step) -> None:
        """Say that the head of the line waits for prompts of other ranks, once."""
        for request in self.ordering.first(self, 1):
            self._defer(request, Deferral("proposal_undone"), step)

    def _put_off(self, request: Request, writer: Request, step: Step) -> None:
        """Let a request wait alone until another has computed what it is about to need; say so once."""
        if request.behind != writer.request_id:
            request.behind = writer.request_id
            deferred = AdmissionDeferred(self.now_us, request.request_id, "prefix", behind=writer.request_id)
            step.decided.append(deferred)

    def _extend_to(self, request: Request, stop: int, parts: list[ExtendPart], step: Step) -> None:
        """Give the request pages up to `stop` and make that its part of the extend."""
        start = request.computed
        self.memory.reach(request, stop, step)
        request.computed = stop
        request.chunks += 1
        self.prefilled_tokens += stop - start
        parts.append(ExtendPart(request, start, stop))
        if stop < extend_stop(request):
            self.prefilling = request
            return
        if self.prefilling is request:
            self.prefilling = None
        completed = PrefillCompleted(self.now_us, request.request_id, request.chunks)
        request.advance(completed)
        step.decided.append(completed)

    def _extend_batch(
        self,
        running: RunningState,
        parts: list[ExtendPart],
        step: Step,
        kind: Literal["extend", "prebuilt"] = "extend",
    ) -> InFlight:
        """Launch the parts, and the cohort's next token with them if batches are mixed and its pages are there."""
        requests = [part.request for part in parts]
        request_ids = np.array([request.request_id for request in requests], np.int64)
        rows = np.array([request.row for request in requests], np.int32)
        starts = np.array([part.start for part in parts], np.int32)
        stops = np.array([part.stop for part in parts], np.int32)
        done = [i for i, request in enumerate(requests) if request.state is RequestState.RUNNING]
        pooled = [i for i in done if requests[i].prefill_only]
        sampling = [i for i in done if not requests[i].prefill_only] if pooled else done
        prefilled, sample_rows = EMPTY_BATCH, NO_ROWS
        if sampling:
            prefilled, sample_rows = RunningBatch.of([requests[i] for i in sampling]), np.array(sampling, np.int32)
        mixes = kind == "prebuilt" or self.config.batching != "prefill_first"
        decodes = self._decodes_along(running, requests, step, wanted=mixes)
        along = decodes.running_batch
        mode: Mode = "mixed" if along.size and kind == "extend" else kind
        if along.size:
            rows, request_ids = np.concatenate((rows, along.rows)), np.concatenate((request_ids, along.request_ids))
            starts, stops = np.concatenate((starts, decodes.starts)), np.concatenate((stops, decodes.stops))
            sample_rows = np.concatenate((sample_rows, along.everyone + np.int32(len(parts))))
        taken, deltas = self.memory.changes(decodes.deltas)
        special = extras.plan_extras(parts)
        plan = BatchPlan(
            batch_id=self.next_number(),
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
            generation=self.generation,
            pooled_rows=np.array(pooled, np.int32) if pooled else NO_ROWS,
            media_spans=special.media_spans,
            logprob_spans=special.logprob_spans,
            hidden_spans=special.hidden_spans,
        )
        if decodes.verifying is not None:
            plan = speculation.verified(plan, decodes.verifying, self.config)
        plan = self.memory.hybrid.completed(plan, step)
        ending = running.join(prefilled, stops[sampling], self.memory.table) if sampling else []
        if along.size:
            ending += [prefilled.size + i for i in decodes.ending]
            return InFlight(plan, requests + along.requests, prefilled.joined_by(along), ending)
        return InFlight(plan, requests, prefilled, ending)

    def _decodes_along(self, running: RunningState, extending: list[Request], step: Step, *, wanted: bool) -> Decodes:
        """The cohort's next token as part of an extend; of nobody, if they cannot be mixed or a page is missing.

        Who sits out goes next, so that prompts that keep coming do not hold up who decodes.
        """
        if not wanted or not running.batch.size:
            return NO_DECODES
        if any(request.needs_plain_extend for request in extending):
            running.decode_owed = True
            return NO_DECODES
        growing = members_growing(running.positions, self.page_mask)
        if self._short_of_pages(running, growing, step):
            running.decode_owed = True
            skipped = DecodeSkipped(self.now_us, self._pages_lacking(running), self.memory.returning_pages())
            step.decided.append(skipped)
            return NO_DECODES
        advanced = self._advance(running, growing, step)
        running.decode_launches += bool(advanced.running_batch.size)
        return advanced

    # ---------------------------------------------------------------------------------------------------------- decode

    def _plan_decode(self, running: RunningState, step: Step) -> InFlight | None:
        """One more token for the whole cohort, after retracting whom it takes to make that fit."""
        if not running.batch.size:
            running.decode_owed = False
            return None
        config = self.config
        if config.retract_every and self._forced_retraction_due(running) and running.batch.size > 1:
            running.forced_at = running.decode_launches
            victim = choose_victim(config, running.batch, running.positions)
            self.retract(running.batch.requests[victim], "forced", step)
        growing = members_growing(running.positions, self.page_mask)
        made_room = self._short_of_pages(running, growing, step)
        if made_room:
            if not self._make_room(running, step):
                return None if running.batch.size else self._plan_extend(running, step)
            if not running.batch.size:
                return None  # all gave way to those of other microbatches
            growing = members_growing(running.positions, self.page_mask)

        steps = config.decode_steps_per_launch
        if steps == 1:
            advanced = self._advance(running, growing, step)
        else:
            advanced = self._advance_by(running, steps, step)
        running_batch = advanced.running_batch
        if not running_batch.size:
            return None  # all may have ended with what is in flight
        running.decode_owed = False
        running.decode_launches += 1
        if not made_room:
            self.ratio.decoded()
        taken, deltas = self.memory.changes(advanced.deltas)
        plan = BatchPlan(
            batch_id=self.next_number(),
            mode="decode",
            rows=running_batch.rows,
            request_ids=running_batch.request_ids,
            starts=advanced.starts,
            stops=advanced.stops,
            sample_rows=running_batch.everyone,
            rows_taken=taken,
            deltas=deltas,
            generation=self.generation,
            steps=steps,
            ids_digest=running_batch.ids_digest,
        )
        if advanced.verifying is not None:
            plan = speculation.verified(plan, advanced.verifying, config)
        plan = self.memory.hybrid.completed(plan, step)
        return InFlight(plan, running_batch.requests, running_batch, advanced.ending)

    def _advance(self, running: RunningState, growing: NDArray[np.intp], step: Step) -> Decodes:
        """Move the whole cohort on by one position, opening a page for those `growing`; with drafts, as they say."""
        if self.speculates:
            verifying = speculation.verify_next(self, running, step)
            if verifying is None:
                return NO_DECODES
            return Decodes(verifying.running_batch, verifying.starts, verifying.stops, verifying.deltas, [], verifying)
        if self.forced and (jumped := speculation.jump_next(self, running, step)) is not None:
            verifying, ending = jumped
            return Decodes(
                verifying.running_batch, verifying.starts, verifying.stops, verifying.deltas, ending, verifying
            )
        batch, starts = running.batch, running.positions
        deltas = NO_DELTAS
        if growing.size:
            rows, at = batch.rows.take(growing), starts.take(growing)
            deltas = self.memory.open_pages(rows, at >> self.page_shift, step)
        stops = starts + ONE
        return Decodes(batch, starts, stops, deltas, running.advance(stops, self.memory.table))

    def _advance_by(self, running: RunningState, steps: int, step: Step) -> Decodes:
        """Move every member on by `steps` positions at once, or as far as its length goes, opening their pages."""
        running_batch, starts, page_size = running.batch, running.positions, np.int32(self.config.page_size)
        stops: Int32s = np.minimum(starts + np.int32(steps), running_batch.limits - ONE)
        first = -(-starts // page_size)
        opening = -(-stops // page_size) - first
        self.memory.table.reserve(int((first + opening).max()), int((stops - running_batch.prompts).max()) + 2)
        deltas = NO_DELTAS
        if opening.any():
            index = first.repeat(opening) + delivery.step_numbers(opening)
            deltas = self.memory.open_pages(running_batch.rows.repeat(opening), index, step)
        ending = running.remove_ending(running_batch, stops, self.memory.table)
        return Decodes(running_batch, starts, stops, deltas, ending)

    def _short_of_pages(self, running: RunningState, growing: NDArray[np.intp], step: Step) -> bool:
        """Whether the next decode, or as many as `decode_look_ahead` says, does not fit, whatever sessions yield."""
        if self.memory.hybrid.short_for_decode(self):
            return True
        needed = growing.size if self.ahead_hoped == 1 else self._pages_needed(running)
        if needed <= self.memory.pool.free_count:
            return False
        lacking = needed - self.memory.available_pages
        return lacking > 0 and self.sessions.make_room(self.memory, lacking, step) < lacking

    def _pages_lacking(self, running: RunningState) -> int:
        lacking = self._pages_needed(running) - self.memory.available_pages
        return max(lacking, self.memory.hybrid.decode_lacks(self))

    def _pages_needed(self, running: RunningState) -> int:
        """Pages without which the cohort does not decode."""
        if self.ahead_hoped == 1:
            return self.next_pages(running.batch, running.positions)
        return pages_ahead(running.batch, running.positions, self.config.page_size, self.ahead)

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
        return pages_ahead(running_batch, positions, self.config.page_size, self.ahead_hoped)

    def _forced_retraction_due(self, running: RunningState) -> bool:
        """For testing: before every `retract_every`-th decode launch, once."""
        due = (running.decode_launches + 1) % self.config.retract_every == 0
        return due and running.forced_at != running.decode_launches

    def _make_room(self, running: RunningState, step: Step) -> bool:
        """Retract until the next decode fits. False when it has to wait for pages that work in flight gives back."""
        config = self.config
        retracted = 0
        while True:
            needed = self._pages_needed(running)
            available, returning = self.memory.available_pages, self.memory.returning_pages()
            if self.memory.hybrid.present and needed <= available:
                needed, available, returning = self.memory.hybrid.decode_needs(self)
            if needed <= available:
                break
            if needed <= available + returning:
                running.decode_owed = True
                step.decided.append(DecodeSkipped(self.now_us, needed - available, returning))
                break
            split = self.prefilling
            running_batch, positions = self.everybody
            if running_batch.size > 1 and not (split is not None and goes_before(split, running_batch, config)):
                victim = self.microbatches.victim(config)
                self.retract(victim, "pages", step, pages=(needed, available))
            elif split is not None:
                self.retract(split, "pages", step, pages=(needed, available))
            elif self.transfers is not None and self.transfers.ready:
                self.transfers.give_up(self, self.requests[self.transfers.ready[-1]], step)
            elif self.in_flight or self.kv_in_transfer or self.memory.tiers.device_busy:
                running.decode_owed = True
                step.decided.append(DecodeSkipped(self.now_us, needed - available, returning))
                break
            else:
                self.finish(running.batch.requests[0], "out_of_kv", step, flush=True)
                return False
            retracted += 1
            running.decode_owed = True
        if retracted:
            running_batch, positions = self.everybody
            outputs = int((positions - running_batch.prompts).sum()) + running_batch.size
            max_new = int((running_batch.limits - running_batch.prompts).sum())
            self.ratio.retracted(outputs, max_new, running_batch.size)
        return needed <= available

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
        undisturbed = self.microbatches.ran_undisturbed(event)
        if event.error:
            self._fail(batch, step)
        elif plan.extend_rows and self.config.fits_latency and event.finished_us > event.started_us and undisturbed:
            self.latency.observe(plan, event.finished_us - event.started_us)
        for i in event.invalid:  # ends while the batch counts as in flight: its sample is no output
            if samplers.requests[i].row == samplers.rows[i]:
                self.finish(samplers.requests[i], "invalid", step, flush=True)
        self.in_flight.popleft()
        if batch.verifies and not event.error:
            running = self.microbatches.turn_to(plan.microbatch)
            speculation.settle(self, running, batch, speculation.accepted_of(event, batch))
            self.memory.hybrid.verified(batch)
        if plan.extend_rows and not event.error:
            if self.followers or any(request.extras is not None for request in batch.requests):
                prerequisites.computed(self, batch, step)
            for request in batch.computed_requests() if plan.pooled_rows.size else ():
                self.finish(request, "computed", step)
        if samplers.size and not event.error:
            self._take_tokens(event, batch, step)
            if self.forced:
                jump_forward.delivered(self, batch)
        if self.memory.pending:
            self.memory.computed(plan.batch_id)
        if plan.extend_rows and self.memory.radix.present:
            rows, stops = plan.rows[: plan.extend_rows].tolist(), plan.stops[: plan.extend_rows].tolist()
            for request, row, stop in zip(batch.requests, rows, stops, strict=False):
                if request.row == row and row not in batch.dead:
                    self.memory.publish(request, stop, step)
                    if not self.memory.hybrid.present:
                        self._back_up(request, stop, step)
        if plan.extend_rows and self.memory.hybrid.present and not event.error:
            self.memory.hybrid.collected(batch)
            self.batch_is_full = False
            for i, request in batch.alive():
                if i < plan.extend_rows:
                    self._back_up(request, int(plan.stops[i]), step)  # with what is their companions' from now on
        if (self.memory.deferred_frees or self.memory.deferred_pages) and self.memory.release_deferred(
            plan.batch_id, step
        ):
            self.batch_is_full = False
        if self.media.deferred:
            prerequisites.release_deferred(self, plan.batch_id, step)
        if self.sessions.unsettled:
            self.sessions.settle(self, plan.batch_id)
        if samplers.constrained:
            self._expire(step)  # who ends in this step moves no matcher
            grammars.collected(event, batch, self.in_flight, self.memory.table.outputs, step)

    def _back_up(self, request: Request, stop: int, step: Step) -> None:
        """A prompt is computed and cached up to `stop`: a tier below may want it."""
        if request.handle is not None:
            self.memory.tiers.back_up(request.handle, stop // self.config.page_size, step)

    def _take_tokens(self, event: BatchFinished, batch: InFlight, step: Step) -> None:
        """Record a batch's tokens, stream what is due, and end whom they end."""
        samplers, outputs = batch.samplers, self.memory.table.outputs
        tokens = np.frombuffer(event.tokens, np.int32)
        first = batch.sampled_at - samplers.prompts
        counts = None
        if batch.steps is None:
            self.memory.table.write_outputs(samplers.rows, first, tokens)
            if batch.dead:
                self.tokens_discarded += len(delivery.dead_samplers(batch))
            ends = delivery.verdicts(event, batch, tokens)
        else:
            numbers = first.repeat(batch.steps) + delivery.step_numbers(batch.steps)
            self.memory.table.write_outputs(samplers.rows.repeat(batch.steps), numbers, tokens)
            ends, counts = (
                delivery.run_verdicts(event, batch, tokens) if batch.verifies else delivery.step_verdicts(batch, tokens)
            )
            self.tokens_discarded += int((batch.steps - counts).sum())
        message = delivery.message(event, batch, tokens, first, ends, outputs, counts)
        if message is not None:
            step.commands.append(message)
        if ends:
            self.break_ranks([samplers.requests[i] for i in ends])
        for i, reason in ends.items():
            if self.transfers is not None and self.transfers.keeps(self, samplers.requests[i], reason):
                continue
            produced = int(first[i]) + (1 if counts is None else int(counts[i]))
            self.finish(samplers.requests[i], reason, step, outputs=produced)

    def _fail(self, batch: InFlight, step: Step) -> None:
        """The device could not run the batch: its requests end with an error, the others do not notice."""
        failed = batch.plan.rows.tolist()
        memory = self.memory
        memory.deferred_frees = [
            deferred._replace(publish=deferred.publish and deferred.row not in failed)
            for deferred in memory.deferred_frees
        ]
        memory.hybrid.failed(batch)
        for request, row in zip(batch.requests, batch.plan.rows.tolist(), strict=True):
            if request.row == row and row not in batch.dead:
                self.finish(request, "error", step, flush=True)
        invalidated = memory.invalidate_pending(batch.plan.batch_id)
        for request in list(self.requests.values()) if invalidated else []:
            if request.handle is not None and request.handle.number in invalidated:
                self.retract(request, "prefix_failed", step)

    def _delivered(self, event: BatchFinished) -> InFlight:
        """The batch in flight that a result is of. Raises ContractError, changing nothing, when they do not match."""
        if not self.in_flight or self.in_flight[0].plan.batch_id != event.batch_id:
            expected = f"batch {self.in_flight[0].plan.batch_id}" if self.in_flight else "nothing"
            raise ContractError(f"batch {event.batch_id} finished, but {expected} is next in flight")
        batch = self.in_flight[0]
        if self.ranks is not None and self.ranks.held is batch:
            raise ContractError(f"batch {event.batch_id} finished, but it is only proposed")
        tokens = speculation.tokens_of_result(event, batch) if batch.verifies else batch.tokens
        size = 0 if event.error else 4 * tokens
        if len(event.tokens) != size:
            raise ContractError(f"batch {event.batch_id} has {len(event.tokens)} bytes of tokens, expected {size}")
        if event.invalid or event.text_stops or event.text_held or event.grammar_ended:
            delivery.check_reports(event, batch, 0 if event.error else batch.samplers.size)
        if event.accepted and not batch.verifies:
            raise ContractError(f"batch {event.batch_id} reports accepted counts; none were asked for")
        if self.forced or batch.forced is not None:
            jump_forward.check(self, event, batch)
        if event.logprobs and not batch.dead and not any(extras.wants_logprobs(one) for one in batch.requests):
            raise ContractError(f"batch {event.batch_id} reports logprobs; none were asked for")
        return batch

    def next_number(self) -> int:
        """The number of the plan that is being made."""
        self.next_batch_id += 1
        return self.next_batch_id - 1

    def leave(self, request: Request, step: Step, outputs: int, *, publish: bool) -> None:
        """Take a request with so many outputs off its row. What work in flight still uses stays behind until then."""
        self.break_ranks([request])
        if self.prefilling is request:
            self.prefilling = None
        self.active -= 1
        self.batch_is_full = False
        self.microbatches.give_place(request)
        self.forced.pop(request.request_id, None)
        known = speculation.known_tokens(self, request, outputs) if self.computes_ahead else None
        self.memory.leave(request, step, publish=publish, known=known)

    def break_ranks(self, requests: list[Request]) -> None:
        """Take those of the requests that decode out of the cohort, all at once, noting where each stands."""
        leaving = [request.row for request in requests if request.decodes]
        if not leaving:
            return  # as always when they end by length: they left with their last launch
        for running in self.microbatches.states_of(requests):
            running.remove(leaving, self.memory.table)

    # ---------------------------------------------------------------------------------------------- where a request is

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
        return self._sampled_by(request) - sum(
            batch.tokens_of(request.row) for batch in self.in_flight if request.row not in batch.dead
        )

    def _sampled_by(self, request: Request) -> int:
        """Output tokens that its launched batches sample, delivered or not."""
        if request.state is not RequestState.RUNNING or request.prefill_only:
            return request.outputs
        return self.computed_of(request) + 1 - request.prompt_tokens


def extend_stop(request: Request) -> int:
    """Positions an extend must compute before the request can decode: its prompt and the output it kept."""
    return request.prompt_tokens + request.outputs
