"""The scheduler: `Engine.step` folds one observed event and returns the decisions and the commands for the host.

It uses no clock, no I/O and no randomness: equal journals have equal Steps. This module dispatches events and orders
launches, in reading order. The state and its changes are in `state`, decisions in the modules named for them:
`prefill`, `decode`, `results`, `preemption`, and the features. Every event is folded; only LaneReady launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import force_setattr

from lockstep.core.contract.commands import LaunchBatch, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.digest import step_digest
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    AdapterLoaded,
    BatchFinished,
    ClockAdvanced,
    ControlRequested,
    EngineRestarted,
    ExpertLoadMeasured,
    ExpertsMoved,
    GrammarReady,
    HostCopyFinished,
    HostTimeClamped,
    LaneReady,
    MediaEncoded,
    MemorySwitched,
    Observed,
    PrefetchFinished,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    StorageWritten,
    TokensForced,
    TransferAdvanced,
    WeightsSwapped,
)
from lockstep.core.features import grammars, two_batch
from lockstep.core.features.data_parallel import Rounds
from lockstep.core.kv.adapters import LOOKAHEAD_REQUESTS
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.running import RunningState
from lockstep.core.scheduler.decode import DecodePlanner
from lockstep.core.scheduler.prefill import PrefillPlanner
from lockstep.core.scheduler.results import Results
from lockstep.core.scheduler.state import SchedulerState

Handler = Callable[[Any, Step], bool | None]
"""Folds one event. Returns true if a launch slot was free and there was nothing to launch."""


class Engine(SchedulerState):
    """The scheduler of one engine. It is built from a SchedConfig and takes every observed event in order."""

    def __init__(self, config: SchedConfig, *, digests: bool = True) -> None:
        """Create an engine without requests.

        `digests`: whether Steps have their digest. Without digests the decisions are the same, but cannot be compared;
        for simulations without a journal.
        """
        super().__init__(config, digests=digests)
        self.decoding = DecodePlanner(self, self.diffusion)
        self.prefills = PrefillPlanner(self, self.decoding)
        self.results = Results(self, self.diffusion)
        self._take_part, self._join_in = self.launch_now, self._launch_nothing
        self._plan_launch: Callable[[RunningState, Step], InFlight | None] = self._plan_pass
        if config.multiplexes:
            self._take_part, self._plan_launch = self._launch_on_streams, self._plan_on_streams
        if config.shares_passes:
            self.ranks = Rounds(config, self)
            self._take_part, self._join_in = self.ranks.take_part, self.ranks.join_in
            self.components = (*self.components, self.ranks)
        self._derive()

    # ------------------------------------------------------------------------------------------------------- the policy

    def _events_handled(self) -> dict[type, Handler]:
        """Return the handler of each event type. `step` refuses the events of absent features."""
        handlers: dict[type, Handler] = {
            BatchFinished: self.results.collect,
            LaneReady: self._launch_microbatch if self.microbatches.several else self._launch,
            RequestArrived: self.enqueue,
            RequestCancelled: self.cancel,
            MediaEncoded: self.prerequisites.encoded,
            GrammarReady: self.grammars.answered,
            TokensForced: self.jump_forward.learn,
            ControlRequested: self.controls.apply,
            EngineRestarted: self.restart,
            WeightsSwapped: self.maintenance.swapped,
            MemorySwitched: self.maintenance.switched,
            ClockAdvanced: self._let_time_pass,
            HostTimeClamped: self._let_time_pass,
            ExpertLoadMeasured: self.experts.measured,
            ExpertsMoved: self.experts.placer.moved,
        }
        if self.config.hands_over:
            handlers[TransferAdvanced] = self.transfers.advanced
        if self.config.shares_passes:
            handlers[RanksAgreed] = self._ranks_agreed
        if self.config.max_loras:
            handlers[AdapterLoaded] = self._adapter_loaded
        if self.memory.tiers.present:
            handlers |= dict.fromkeys((HostCopyFinished, PrefetchFinished, StorageWritten), self._tier_answered)
        return handlers

    def step(self, event: Observed) -> Step:
        """Fold one event; return what was decided, and the commands for the host.

        Raises ContractError, with the state unchanged, for an impossible event: time that runs backwards, a result of
        no launched batch or of the wrong size, a request id that does not increase, an event of an absent feature.
        """
        before_us = self.now_us
        if event.time_us < before_us:
            raise ContractError(f"time ran backwards: {event.time_us} us after {before_us} us; the host must clamp")
        handler = self._handlers.get(type(event))
        if handler is None:
            raise ContractError(f"{type(event).__name__} belongs to a feature this engine does not have yet")
        step = Step(time_us=event.time_us)
        self.now_us = event.time_us
        try:
            self.launch_found_nothing = handler(event, step) or False
        except ContractError:
            self.now_us = before_us
            raise
        # What may follow from any event, in this order; in line, since every step comes here.
        if self.timers:
            self.expire(step)
            step.wake_at_us = self.timers[0][0] if self.timers else None
        if self.sessions.open or self.maintenance.jobs:
            self._advance_jobs(step)
            if self.sessions.due_us is not None:
                step.wake_by(self.sessions.due_us)
        settles = self._settles
        if settles and self.transfers.hands_over:
            self.transfers.settle(step)
        pace = self.controls.pace
        if pace.gap_us and self.requests and pace.not_before_us > self.now_us:
            step.wake_by(pace.not_before_us)
        if not self.requests:
            self._settle_idle(step)
        if settles:
            if self.config.max_loras:
                self._settle_adapters(step)
            tiers = self.memory.tiers
            if tiers.present and tiers.advance(self.requests, self.waiting, step, admits=self.maintenance.admits):
                self.retry_admission()
        if step.decided:
            self.counts.fold(step.decided)
        if self.digests:
            self.digest = step.digest = step_digest(self.digest, step)
        return step

    def _advance_jobs(self, step: Step) -> None:
        """Advance jobs on the device, time-outs of sessions and next turns, which wait for requests to end."""
        sessions = self.sessions
        if self.maintenance.jobs:
            self.maintenance.advance(step)
        if sessions.due_us is not None and sessions.due_us <= self.now_us:
            sessions.expire(step)
        if sessions.free:
            sessions.start_turns(step)

    def _settle_idle(self, step: Step) -> None:
        """Reset the ratio, since all accepted requests have ended. Answer drains once the engine is idle."""
        self.ratio.idle()
        self.microbatches.current.decode_owed = False
        if self.controls.drains and self.idle:
            self.controls.answer_drains(step, ok=True)

    def _settle_adapters(self, step: Step) -> None:
        """Complete withdrawals of adapters; while requests may start, load the adapters of the first waiting ones."""
        adapters = self.memory.adapters
        adapters.end_withdrawals((request.adapter for request in self.requests.values()), step)
        needed = self.transfers.adapters_wanted()
        if self.maintenance.admits:
            needed += [request.adapter for request in self.ordering.first(self, LOOKAHEAD_REQUESTS)]
        if needed or self.maintenance.admits:
            adapters.load_for(needed, step)

    # ----------------------------------------------------------------------------------------------------- the launches

    def _launch(self, event: LaneReady, step: Step) -> bool:
        """Launch a prefill, else a decode; but a decode that is owed goes before any prefill.

        Under `batching` running_first, running requests get their pages before any request is admitted beside them.
        Returns: whether a slot was free and there was nothing to launch.
        """
        microbatches = self.microbatches
        if event.microbatch:
            microbatches.check(event)
        if self.timers:
            self.expire(step)  # no request is admitted past its deadline
        maintenance = self.maintenance
        if self.sessions.open or maintenance.jobs:
            self._advance_jobs(step)
        in_flight = microbatches.in_flight(self.in_flight) if microbatches.several else len(self.in_flight)
        config, controls = self.config, self.controls
        pace = controls.pace
        paced = pace.gap_us and event.time_us < pace.not_before_us
        if controls.paused or paced or maintenance.still or in_flight > self._depth:
            return self._join_in(step)
        if config.enable_priority_preemption:
            self.batch_is_full = False  # requests that have arrived and members that have grown may change that
        if config.waiting_prefix_refresh and self.waiting and self.launches_to_refresh() <= 0:
            self.refreshed_at = self.next_batch_id
            self.ordering.refresh(self.memory.radix)
        return self._take_part(step)

    def _launch_microbatch(self, event: LaneReady, step: Step) -> bool:
        """Launch from the running batch of one microbatch."""
        self.microbatches.check(event)
        self.begin_microbatch(event.microbatch)
        found_nothing = self._launch(event, step)
        self.end_microbatch()
        return found_nothing

    def launch_now(self, step: Step) -> bool:
        """Plan and launch the next batch. Returns: whether there was nothing to launch."""
        running, config = self.microbatches.current, self.config
        if not config.overlap_consecutive_prefills and self._waits_for_prefill(running):
            return True
        batch = self._plan_launch(running, step)
        if batch is None:
            return True
        if config.two_batch_overlap is True:
            force_setattr(batch.plan, "halves", two_batch.halves_of(config, batch.plan))
        self.in_flight.append(batch)
        if batch.samplers.constrained:
            self._order_constrained(batch, step)
        else:
            step.commands.append(LaunchBatch(batch.plan))
        if config.same_step_sharing:
            self._share(batch, step)
        pace = self.controls.pace
        if self._reports_launches or pace.profiling or pace.gap_us:
            self._launched(batch, step)
        return False

    def _launch_on_streams(self, step: Step) -> bool:
        """Launch the next batch if a stream has a slot. Returns: whether there was nothing to launch."""
        return any(self.multiplexer.slots()) and self.launch_now(step)

    def _plan_on_streams(self, running: RunningState, step: Step) -> InFlight | None:
        """Plan a decode, else layers of prompts, each if its stream has a slot. None: there is nothing to run.

        A decode goes first, since it is short and its requests hold their pages.
        """
        prefills, split = self.prefills, self.multiplexer
        for_decodes, for_prompts = split.slots()
        batch = self.decoding.plan(running, step, _plan_nothing) if for_decodes else None
        if batch is None and for_prompts:
            if split.parts:
                batch = prefills.plan_layers(running, step)
            elif (self.waiting or self.prefilling) and not self.decoding.decode_goes_first(running):
                batch = prefills.plan_extend(running, step)
        return batch

    def _launch_nothing(self, step: Step) -> bool:
        """Launch nothing: launches are paused or blocked, or all slots are taken."""
        return False

    def plan_next(self, step: Step, *, extends: bool = True) -> InFlight | None:
        """Plan the next batch. It counts as in flight from now on; `launch` orders its launch. None: there is none.

        `extends`: whether prompts may be computed.
        """
        batch = self._plan_pass(self.microbatches.current, step, extends=extends)
        if batch is None:
            return None
        self.in_flight.append(batch)
        if self.config.same_step_sharing:
            self._share(batch, step)
        return batch

    def _plan_pass(self, running: RunningState, step: Step, *, extends: bool = True) -> InFlight | None:
        """Plan what a running batch computes next; None: nothing. `extends`: whether prompts may be computed."""
        batch, prefills = None, self.prefills
        prompts = self.ordering.waiting or self.prefilling or self.transfers.ready
        if extends and prompts and not self.decoding.decode_goes_first(running):
            batch = prefills.plan_prebuilt(running, step) or prefills.plan_extend(running, step)
        batch = batch or self.decoding.plan(running, step, prefills.plan_extend)
        if batch is None:
            return None
        if self.microbatches.several:
            force_setattr(batch.plan, "microbatch", self.microbatches.at)  # the plan has not left the engine yet
        if batch.plan.extend_rows:
            running.extended_at = running.decode_launches
        return batch

    def launch(self, batch: InFlight, step: Step) -> None:
        """Order the launch of a batch that `plan_next` planned."""
        if batch.samplers.constrained:
            self._order_constrained(batch, step)
        else:
            step.commands.append(LaunchBatch(batch.plan))
        self._launched(batch, step)

    def _order_constrained(self, batch: InFlight, step: Step) -> None:
        """Order the launch of a batch with grammars; sampling is deferred if their masks are not computable yet."""
        ahead = [other for other in self.in_flight if other is not batch]
        grammars.launch(batch, ahead, self.memory.table.outputs, step)

    def _launched(self, batch: InFlight, step: Step) -> None:
        """Do what follows a launch: send its KV, begin the gap that an operator has set, measure the experts' load."""
        if self.transfers.hands_over:
            self.transfers.give_parts(batch, step)
        pace = self.controls.pace
        if pace.profiling or pace.gap_us:
            pace.launched(self.now_us, step)
        if self.experts.interval:
            self.experts.launched(step)

    def _share(self, batch: InFlight, step: Step) -> None:
        """Publish the prompts that a launched batch computes, for batches behind it."""
        for request, stop in zip(batch.requests, batch.plan.stops[: batch.plan.extend_rows].tolist(), strict=False):
            self.memory.publish(request, stop, step, writer=batch.plan.batch_id)
            self.prerequisites.release_samples(request, stop, step)

    def decode_goes_first(self, running: RunningState) -> bool:
        """Whether decodes go before any prefill."""
        return self.decoding.decode_goes_first(running)

    def would_extend(self, running: RunningState) -> bool:
        """Whether an extend could be launched now. Changes nothing."""
        return self.prefills.would_extend(running)

    def defer_first(self, step: Step) -> None:
        """Report, once, that the first request of the queue waits for prompts of other ranks."""
        self.prefills.defer_first(step)

    def _waits_for_prefill(self, running: RunningState) -> bool:
        """Whether the next batch must wait: it would be an extend right behind an extend in flight."""
        if not self.in_flight or not self.in_flight[-1].plan.extend_rows:
            return False
        return not self.decode_goes_first(running) and self.would_extend(running)

    # ------------------------------------------------------------------------------------------- other events, one each

    def _let_time_pass(self, event: ClockAdvanced | HostTimeClamped, step: Step) -> None:
        """Fold an event that only advances the time; `_settle` handles what is due."""

    def reconfigure(self, config: SchedConfig) -> None:
        """Replace the settings. The role may change with them, and so the events that are handled."""
        super().reconfigure(config)
        self._derive()

    def _derive(self) -> None:
        """Derive from the settings what every step reads."""
        config = self.config
        self._depth = _launches_ahead(config)
        self._reports_launches = config.hands_over or bool(self.experts.interval)
        self._settles = config.hands_over or bool(config.max_loras) or self.memory.tiers.present
        self._handlers = self._events_handled()

    def _ranks_agreed(self, event: RanksAgreed, step: Step) -> bool:
        """Run the round that all ranks have proposed."""
        assert self.ranks is not None
        return self.ranks.agreed(event, step)

    def _adapter_loaded(self, event: AdapterLoaded, step: Step) -> None:
        """Let requests that wait for an adapter start, or end them with an error if it could not be loaded."""
        if event.generation < self.generation:
            return  # from before a restart: void
        if event.generation > self.generation:
            raise ContractError(f"a load of generation {event.generation}, but this is generation {self.generation}")
        adapter = self.memory.adapters.loaded(event)
        self.retry_admission()
        if event.error:
            while ending := [request for request in self.waiting if request.adapter == adapter]:
                for request in ending:  # samples that follow one of these may join the queue
                    self.finish(request, "error", step, flush=True)
            for request in self.transfers.ready_on(adapter):
                self.finish(request, "error", step, flush=True)

    def _tier_answered(self, event: HostCopyFinished | PrefetchFinished | StorageWritten, step: Step) -> None:
        """End an operation between tiers. Requests that wait for its pages or for room may start."""
        if event.generation > self.generation:
            raise ContractError(f"a move of generation {event.generation}, but this is generation {self.generation}")
        if event.generation == self.generation:  # operations of older generations are void
            self.memory.tiers.answered(event, step)
            self.retry_admission()


def _launches_ahead(config: SchedConfig) -> int:
    """Return the most batches in flight behind which another may be launched; two streams check their own slots."""
    return 2 * (config.overlap_depth + 1) if config.multiplexes else config.overlap_depth


def _plan_nothing(running: RunningState, step: Step) -> None:
    """Plan nothing in place of a decode: prompts have a stream of their own."""
