"""The simulated host of one engine: a CPU lane and a device, in virtual time.

Virtual time is `env.now`, in whole microseconds. One engine is one SimPy process, `EngineHost.run`: its CPU lane.

    CPU    | arrival | results of 6 | plan 8 |      idle       | results of 7 | plan 9 | ...
    device | batch 6      |           batch 7                  | batch 8 ...                      overlap depth 1
                          ^ finished  ^ handed over

The device runs batches one after another, and future turns are known. So the time of every fact is known as soon as its
cause has happened: the end of a batch is computed when it is handed over, the arrival of a follow-up turn when the
answer before it ends. The lane therefore reads its facts from ordered queues and keeps its own time. It yields to SimPy
only when another process acts first. A single lane never yields, which saves a few microseconds per batch; a lane among
other processes is never ahead of them.

Facts are folded in the order of their times. An arrival has the time at which it came, a finished batch the time at
which the lane collects it. Both wait while the lane is busy, and older facts go first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator

import numpy as np
from msgspec.structs import replace
from simpy import Environment, Event

from lockstep.core.contract.commands import (
    BatchPlan,
    CancelTransfer,
    Command,
    CompileGrammar,
    EncodeMedia,
    FinishRequest,
    LaunchBatch,
    LoadAdapter,
    MeasureExpertLoad,
    MoveExperts,
    ProposeBatch,
    RejectRequest,
    RowTaken,
    SampleBatch,
    StartTransfer,
    Step,
    StreamTokens,
)
from lockstep.core.contract.config import JUMP_FORWARD_TOKENS_MAX
from lockstep.core.contract.errors import ContractError, LockstepError
from lockstep.core.contract.events import (
    AdapterLoaded,
    AdmissionDeferred,
    BatchFinished,
    ClockAdvanced,
    EngineRestarted,
    GrammarReady,
    LaneReady,
    ObservedEvent,
    RequestArrived,
    RequestId,
    RequestQueued,
    TokensForced,
)
from lockstep.core.journal.sinks import JournalSink
from lockstep.core.kv.adapters import NO_SLOT
from lockstep.core.requests.microbatches import Microbatches
from lockstep.core.scheduler.decode_run import DecodeRun
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.intake import ReceiveSkipper
from lockstep.sim.cost import BatchShape, CostModel, CpuModel
from lockstep.sim.cost.terms import new_tokens
from lockstep.sim.host.device import EOS_TOKEN_ID, Device
from lockstep.sim.host.encoder_lane import EncoderLane
from lockstep.sim.host.expert_traffic import ExpertTraffic
from lockstep.sim.host.forcing import ForcedRuns
from lockstep.sim.host.host_options import HostFeatures, HostOptions
from lockstep.sim.host.ports import (
    NEVER_US,
    MetricsSink,
    RankExchange,
    RequestSource,
)
from lockstep.sim.host.sessions import changes_holding
from lockstep.sim.workload.samples import OpenSamples

OF_THE_DEVICE = frozenset((LaunchBatch, ProposeBatch, SampleBatch, StreamTokens))
"""Commands that the callers of `EngineHost._fold` carry out: they fold launches and results."""
RUN_WORTH_BATCHES = 4  # batches; to begin a shorter stretch of decodes costs more than it saves


class EngineHost:
    """One engine with its CPU lane and its device.

    Raises: ContractError if the engine's config needs a feature that `options` lacks, or `options` has a feature that
        the config does not use.
    """

    def __init__(
        self,
        env: Environment,
        engine: Engine,
        arrivals: RequestSource,
        cost: CostModel,
        cpu: CpuModel,
        journal: JournalSink,
        metrics: MetricsSink,
        options: HostOptions | None = None,
    ) -> None:
        options = options or HostOptions()
        watch, features, max_new_tokens = options.watch, options.features, options.max_new_tokens
        if features.record is None:
            check_models(engine, features)
        if max_new_tokens is not None and EOS_TOKEN_ID not in engine.config.eos_token_ids:
            raise ContractError(f"answers shorter than max_new_tokens need {EOS_TOKEN_ID} among the eos_token_ids")
        self.env = env
        self.engine = engine
        self.arrivals = arrivals
        self.port = options.links.port
        self.exchange = options.links.exchange
        self._planned: BatchPlan | None = None  # the plan that this rank has proposed
        self._planned_shape = BatchShape()
        self.cpu = cpu
        self.journal = journal
        self.metrics = metrics
        self.device = (options.links.device_type or Device)(
            cost, engine.config.rows_max, seed=options.seed, name=options.name, early_eos=max_new_tokens is not None
        )
        self.device.speculation = features.speculation
        self.device.blocks = features.blocks
        self.device.state_copy_us = features.state_copy_us
        self.device.notes_times = engine.microbatches.several
        if features.adapters is not None:
            self.device.adapter_slots = np.full(engine.config.rows_max, NO_SLOT, np.int32)
        self.stop_requested = False  # set from a signal handler: `run` returns before the next fact

        self.ended = 0  # requests finished or rejected
        self.batches = 0
        self.clamped = 0  # requests that may generate fewer tokens than they requested
        self.rejected: Counter[str] = Counter()

        self._max_new_tokens = max_new_tokens
        self._observer = watch.observer
        self._watched = watch.observer is not None or watch.check is not None
        self._check = watch.check
        self._check_every = watch.check_every
        self._until_check = watch.check_every
        self._on_finish = watch.on_finish
        self._decode_runs = options.decode_runs and watch.check is None
        self._frontend_us = options.frontend_us
        self._tenants_of_engines = options.tenants_of_engines
        self._grammar_compile_us = options.grammar_compile_us
        self._compiling: deque[tuple[int, bytes]] = deque()  # grammars being compiled: us when ready, digest
        self._adapter_load_us = options.adapter_load_us
        self._adapters = features.adapters
        self._loads: deque[AdapterLoaded] = deque()  # ends of loads, in the order of time
        self._record = features.record
        self._forcing = features.forcing if engine.config.jumps else None
        self._forced_runs: dict[int, tuple[int, ForcedRuns]] = {}  # by row: the request, and its forced runs
        self.tiers = features.tiers
        self.encoder = features.encoder
        self.experts = features.experts
        self._samples = OpenSamples()
        self._conversations = features.conversations
        self._awaiting: dict[RequestId, int] = {}  # requests that wait for media, with the start of the wait
        self._held = 0  # requests held by the engine when waits for media were last checked
        self.wake_at_us: int | None = None
        self._skipper = ReceiveSkipper(options.receive_interval) if options.receive_interval != 1 else None
        self._receives = True  # whether the lane receives arrivals before its next launch
        # No event was folded since the last LaneReady that launched nothing. Hosts in real time begin with an offer.
        self._nothing_new = features.record is None
        # The microbatch that was offered a slot last.
        self._offered = -1 if features.record is None else features.record.offered
        sources = (self.tiers, self.encoder, self.experts, self.port, self.exchange, self._conversations)
        self._has_features = any(one is not None for one in sources)  # whether these may have facts
        self._tried = 0  # microbatches that launched nothing since the last other event
        self._took_us = 0  # time at which the lane took in the last arrival
        self._awaited = False  # whether another rank waits for this rank's proposal
        self._woke_us = 0  # SimPy's time, which does not advance while the lane runs
        self._others_us: float = NEVER_US  # next time at which another process acts; read again after ends of requests

    def run(self) -> Generator[Event, None, None]:
        """Run the CPU lane, a SimPy process: fold pending facts, launch if there is a slot, wait for the next fact.

        Another process that is due at the time of the lane runs first, because it may add an arrival.
        """
        env, engine = self.env, self.engine
        slots = engine.config.launches_max
        now_us = self._wake()
        if self.experts is not None:
            self._place_experts(self.experts, now_us)
        for registered in self._adapters.registrations(now_us) if self._adapters is not None else ():
            self._fold(registered)
        while not self.stop_requested:
            if self._others_us > now_us or now_us == self._woke_us:
                now_us = self._take_in(now_us)
            if self._others_us <= now_us and now_us > self._woke_us:
                yield env.timeout(now_us - self._woke_us)
                self._wake()
                continue
            if self.encoder is not None and self.encoder.waiting:
                self._start_encoding(self.encoder, now_us)
            launched_us = None
            if len(engine.in_flight) == slots:
                launched_us = self._run_decodes(now_us)
            elif not self._nothing_new:
                launched_us = self._launch(now_us)
            elif len(engine.in_flight) == slots // 2 and engine.multiplexer.present:  # decodes alone
                launched_us = self._run_decodes(now_us)
            if launched_us is not None:
                now_us = launched_us
            else:
                next_us = self._next_fact_us()
                settled_us = self.arrivals.settled_until_us
                if next_us == NEVER_US:
                    more = self.arrivals.more(env)
                    if more is None:
                        break
                    yield more
                    self._wake()
                elif next_us < settled_us:
                    now_us = max(now_us, next_us)
                elif (others := self.port or self.exchange) is not None:
                    yield others.pause(next_us)
                    now_us = max(now_us, self._wake())
                else:  # a new request may come before `next_us`: the lane keeps its time and checks again
                    yield env.timeout(max(settled_us - self._woke_us, 0))
                    self._wake()
        if now_us > self._woke_us:
            yield env.timeout(now_us - self._woke_us)

    def _place_experts(self, experts: ExpertTraffic, now_us: int) -> None:
        """Let the engine place the experts by their load before the run, before its first batch."""
        if (before := experts.before()) is not None:
            self._fold(replace(before, time_us=now_us))
            while experts.due_us(now_us, self.device) <= now_us:
                self._fold(experts.take(now_us))
        experts.begin(self.device)

    def _wake(self) -> int:
        """Read SimPy's time and the next time of another process. Return SimPy's time."""
        self._woke_us = int(self.env.now)
        self._others_us = self.env.peek()
        return self._woke_us

    def _take_in(self, now_us: int) -> int:
        """Fold every fact that is due, also those that become due while the lane folds. Return the lane's time."""
        arrivals, finished, woke_us = self.arrivals, self.device.queue, self._woke_us
        while not self.stop_requested and (now_us < self._others_us or now_us == woke_us):
            if arrivals.next_us <= now_us and self._receives:
                now_us = self._arrive(now_us)
            elif finished and finished[0].finished_us <= now_us:
                now_us = self._collect(now_us)
            elif self._compiling and self._compiling[0][0] <= now_us:
                self._fold(GrammarReady(now_us, self._compiling.popleft()[1]))
            elif self._loads and self._loads[0].time_us <= now_us:
                self._fold(replace(self._loads.popleft(), time_us=now_us))
            elif self._has_features and (taken_us := self._take_of_feature(now_us)) is not None:
                now_us = taken_us
            elif self.wake_at_us is not None and self.wake_at_us <= now_us:
                self._fold(ClockAdvanced(now_us))
                now_us = self._spend(now_us, 0.0, "clock")
            else:
                break
        return now_us

    def _take_of_feature(self, now_us: int) -> int | None:
        """Fold a fact of a feature that is due. Return the lane's time then; None: no fact is due."""
        if self.tiers is not None and self.tiers.due and self.tiers.next_us <= now_us:
            self._fold(self.tiers.take(now_us))
        elif self.encoder is not None and self.encoder.next_us <= now_us:
            self._fold(self.encoder.take(now_us))
        elif self.experts is not None and self.experts.due_us(now_us, self.device) <= now_us:
            self._fold(self.experts.take(now_us))
        elif self.port is not None and self.port.next_us <= now_us:
            self._fold(self.port.take(now_us))
        elif self.exchange is not None and self.exchange.next_us <= now_us:
            return self._receive(self.exchange, now_us)
        elif self._conversations is not None and self._conversations.due:
            self._fold(self._conversations.closing(now_us))
        else:
            return None
        return now_us

    def _next_fact_us(self) -> int:
        if self._conversations is not None and self._conversations.due:
            return 0
        next_us = self.arrivals.next_us if self._receives else NEVER_US
        queue = self.device.queue
        if queue and queue[0].finished_us < next_us:
            next_us = queue[0].finished_us
        if self._compiling and self._compiling[0][0] < next_us:
            next_us = self._compiling[0][0]
        if self._loads and self._loads[0].time_us < next_us:
            next_us = self._loads[0].time_us
        if self._has_features:
            next_us = min(next_us, self._next_of_features_us())
        if self.wake_at_us is not None and self.wake_at_us < next_us:
            next_us = self.wake_at_us
        return next_us

    def _next_of_features_us(self) -> int:
        next_us = NEVER_US
        if self.tiers is not None and self.tiers.due:
            next_us = self.tiers.next_us
        if self.encoder is not None:
            next_us = min(next_us, self.encoder.next_us)
        if self.experts is not None:
            next_us = min(next_us, self.experts.due_us(self._woke_us, self.device))
        if self.port is not None:
            next_us = min(next_us, self.port.next_us)
        if self.exchange is not None:
            next_us = min(next_us, self.exchange.next_us)
        return next_us

    def _arrive(self, now_us: int) -> int:
        self._took_us = now_us
        event = self.arrivals.take(self._max_new_tokens)
        if type(event) is RequestArrived and event.parallel_samples > 1:
            self._samples.arrived(event.request_id, event.parallel_samples)
        if self._conversations is not None and type(event) is RequestArrived:
            opening = self._conversations.opening(self.arrivals.open_turns[event.request_id], event.time_us)
            if opening is not None:
                self._fold(opening if self._skipper is None else replace(opening, time_us=now_us))
        if self._skipper is None:
            step = self._fold(event)
        else:  # the engine receives it now; metrics count from the arrival
            step = self._fold(replace(event, time_us=now_us), came_us=event.time_us)
        if type(event) is RequestArrived:
            for decided in step.decided:
                if type(decided) is RequestQueued and decided.max_new_tokens < event.max_new_tokens:
                    self.clamped += 1
        elif type(event) is EngineRestarted:
            self._offered = -1  # another process is the host from here on
        return self._spend(now_us, self.cpu.arrival_us, "arrival")

    def _forced(self) -> tuple[tuple[RequestId, int, bytes], ...]:
        """Return the tokens that grammars force after the next result, as tuples (request, output offset, tokens)."""
        batch, found = self.engine.in_flight[0], []
        if self._forcing is None or not batch.samplers.constrained:
            return ()
        steps = batch.samplers.ones if batch.steps is None else batch.steps
        newest = (batch.sampled_at + steps - np.int32(1)).tolist()
        for i in np.flatnonzero(batch.samplers.has_grammar).tolist():
            request, row = batch.samplers.requests[i], int(batch.samplers.rows[i])
            if row in batch.dead:
                continue
            holder, runs = self._forced_runs.get(row, (-1, None))
            if runs is None or holder != request.request_id:
                runs = self._forcing.runs(request.request_id)
                self._forced_runs[row] = request.request_id, runs
            output = newest[i] - request.prompt_tokens
            stop = min(runs.stop_behind(output), output + 1 + JUMP_FORWARD_TOKENS_MAX)
            if stop > output + 1:
                tokens = self.device.tokens_of(row, newest[i] + 1, request.prompt_tokens + stop)
                if tokens.size:
                    found.append((request.request_id, output + 1, tokens.tobytes()))
        return tuple(found)

    def _collect(self, now_us: int) -> int:
        batch = self.device.queue.popleft()
        forced: tuple[tuple[RequestId, int, bytes], ...] = ()
        if self._record is not None:
            forced = self._record.forced(batch.batch_id)
            result = self._record.result(batch, self.engine.in_flight, now_us)
        else:
            if self._forcing is not None:
                forced = self._forced()
            started_us, finished_us = batch.started_us, batch.finished_us
            result = BatchFinished(
                now_us, batch.batch_id, batch.tokens, started_us, finished_us, batch.generation, batch.accepted
            )
        step = self._fold(result)
        if forced:
            forced = tuple([one for one in forced if one[0] in self.engine.requests])
        if forced:
            self._fold(TokensForced(now_us, batch.generation, forced))
        done_us = self._spend(now_us, self.cpu.result_us(batch.rows), "results")
        if self.device.untimed:
            for command in step.commands:
                if type(command) is SampleBatch:
                    self.device.sample(command.batch_id, done_us)
            self._others_us = self.env.peek()  # passes of other ranks may wait for this one
        if self.port is not None:
            self.port.collected(batch.batch_id, step, done_us)
            self._others_us = self.env.peek()
        return done_us

    def _launch(self, now_us: int) -> int | None:
        """Offer the slot to the engine. Return the time at which a batch was handed to the device; None: no batch."""
        engine = self.engine
        several, tried = engine.microbatches if engine.microbatches.several else None, self._tried
        if several is not None and engine.ranks is not None and not self._awaited and not self.engine.open_slots():
            self._nothing_new = (
                True  # the round keeps its microbatch until another rank waits: the next arrival may join this one
            )
            return None
        step = self._fold(LaneReady(now_us) if several is None else LaneReady(now_us, self._next_microbatch(several)))
        if self._record is not None:
            now_us = self._record.free_us
        if self._conversations is not None and self._conversations.is_stale:
            self._conversations.sink.sessions_held(now_us, engine.sessions.pages_held_alone())
            self._conversations.is_stale = bool(engine.sessions.unsettled)
        radix = engine.memory.radix
        cached_pages = radix.evictable_pages
        waiting = len(engine.ordering.waiting)
        self.metrics.gauge(now_us, waiting, engine.active, engine.memory.pool.free_count, cached_pages)
        if self.exchange is not None:
            self._nothing_new = True  # until the other ranks have answered
            return self._carry_on(self.exchange, step, now_us)
        plan = step.launched()
        if plan is None:
            if several is not None:
                self._tried = tried + 1
                if self._tried < len(self.engine.open_slots()):
                    return now_us  # another microbatch may have a launch
            self._nothing_new = self._receives = True  # a lane with nothing to launch receives arrivals again at once
            return None
        if self._skipper is not None:
            self._receives = self._skipper.due(plan.mode)
        for taken in plan.rows_taken:
            self._take_row(taken)
        shape = self.device.shape_of(plan)
        handed_over_us = self._spend(now_us, self.cpu.plan_us(shape), "plan")
        self._hand_over(plan, shape, handed_over_us)
        return handed_over_us

    def _hand_over(self, plan: BatchPlan, shape: BatchShape, now_us: int) -> None:
        """Launch a plan on the device."""
        self.device.launch(plan, shape, now_us)
        self.batches += 1
        if self.experts is not None:
            self.experts.routed(new_tokens(shape), self.device)

    def _next_microbatch(self, several: Microbatches) -> int:
        """Return the microbatch to offer a slot to: that of the ranks' round, or the next one that may launch."""
        if self.engine.ranks is not None:
            return self.engine.ranks.slot
        self._offered = several.next_slot(self.engine.open_slots(), self._offered)
        return self._offered

    # mechanism: receive-interval (simulated)
    def _receive(self, exchange: RankExchange, now_us: int) -> int:
        """Fold the agreement of all ranks and run the batch; or offer a slot, if other ranks wait for this rank."""
        event = exchange.take(now_us)
        if event is None:
            self._nothing_new, self._awaited = False, True
            return now_us
        step = self._fold(event)
        done_us = self._carry_on(exchange, step, now_us)
        if done_us is None:  # no rank has anything to run
            self._nothing_new = not (self.engine.waiting or self.engine.active)
            return now_us
        return done_us

    def _carry_on(self, exchange: RankExchange, step: Step, now_us: int) -> int | None:
        """Carry out the step of a round: send this rank's proposal, or launch the agreed batch.

        Returns: the time at which that is done; None if the step has neither command.
        """
        done_us = None
        for command in step.commands:
            if type(command) is ProposeBatch:
                self._awaited = False
                done_us = self._planned_by(now_us)
                exchange.propose(command, done_us)
            elif type(command) is LaunchBatch:
                self._hand_over(command.plan, self._planned_shape, now_us)
                self._planned, self._planned_shape = None, BatchShape()
                done_us = now_us
        self._others_us = self.env.peek()  # other ranks may act on the proposal
        return done_us

    def _planned_by(self, now_us: int) -> int:
        """Account once for the CPU time of planning this rank's proposal. Return the time at which it is planned."""
        held = self.engine.ranks.held if self.engine.ranks is not None else None
        if held is None or held.plan is self._planned:
            return now_us if held is not None else self._spend(now_us, self.cpu.plan_us(BatchShape()), "plan")
        self._planned = held.plan
        for taken in held.plan.rows_taken:
            self._take_row(taken)
        self._planned_shape = self.device.shape_of(held.plan)
        return self._spend(now_us, self.cpu.plan_us(self._planned_shape), "plan")

    def _run_decodes(self, now_us: int) -> int | None:
        """Simulate a uniform stretch of decodes in one go, with the same events as `_take_in` and `_launch`.

        The stretch ends before any fact other than a result is due.
        Returns: the time at which the lane is free; None if there was no stretch.
        """
        queue = self.device.queue
        if self._conversations is not None and self._conversations.due:
            return None
        if self.exchange is not None or self._record is not None:
            return None  # every launch needs the agreement of the other ranks, or has its place in a recorded run
        until_us: float = self.arrivals.next_us
        newest = queue[-1]
        worth_us = newest.finished_us + RUN_WORTH_BATCHES * (newest.finished_us - newest.started_us)
        if until_us < worth_us or not self._decode_runs:
            return None
        until_us = min(until_us, self._others_us)
        if self._compiling:
            until_us = min(until_us, self._compiling[0][0])
        if self._loads:
            until_us = min(until_us, self._loads[0].time_us)
        if self.tiers is not None and self.tiers.due:
            until_us = min(until_us, self.tiers.next_us)
        if self.encoder is not None:
            until_us = min(until_us, self.encoder.next_us)
        if self.port is not None:
            until_us = min(until_us, self.port.next_us)
        if until_us < worth_us:
            return None
        run = DecodeRun.begin(self.engine)
        if run is None:
            return None
        engine, device, journal, metrics = self.engine, self.device, self.journal, self.metrics
        waiting, active, free_pages = len(engine.waiting), engine.active, engine.memory.pool.free_count
        cached_pages = engine.memory.radix.evictable_pages
        result_us = round(self.cpu.result_us(newest.rows))  # constant, because the running batch does not change
        launched_us = None
        while run.left and not self.stop_requested:
            batch = queue[0]
            noticed_us = batch.finished_us if batch.finished_us > now_us else now_us
            ready_us = noticed_us + result_us
            if until_us <= ready_us or (len(queue) > 1 and queue[1].finished_us <= ready_us):
                break
            queue.popleft()
            result = BatchFinished(
                noticed_us, batch.batch_id, batch.tokens, batch.started_us, batch.finished_us, batch.generation
            )
            step = run.finished(result)
            journal.append(result, step.digest)
            metrics.observe(result, step)
            self._spend(noticed_us, result_us, "results")

            ready = LaneReady(ready_us)
            step = run.launched(ready)
            journal.append(ready, step.digest)
            metrics.observe(ready, step)
            plan = step.launched()
            assert plan is not None
            free_pages -= len(plan.deltas.pages)
            metrics.gauge(ready_us, waiting, active, free_pages, cached_pages)
            shape = device.shape_of(plan)
            launched_us = now_us = self._spend(ready_us, self.cpu.plan_us(shape), "plan")
            device.launch(plan, shape, now_us)
            self.batches += 1
            if self._skipper is not None:
                self._receives = self._skipper.due(plan.mode)
        run.close()
        return launched_us

    def _fold(self, event: ObservedEvent, came_us: int | None = None) -> Step:
        """Step the engine, write the journal, measure, and carry out all commands except OF_THE_DEVICE.

        Args:
            came_us: time of the event for the metrics, if the lane received it later; None: `event.time_us`.
        """
        record = self._record
        if record is not None:
            event = record.dated(event)
        try:
            step = self.engine.step(event)
        except LockstepError:
            self.journal.append_unsealed(event)
            raise
        self.journal.append(event, step.digest)
        self.metrics.observe(event if came_us is None else replace(event, time_us=came_us), step)
        self.wake_at_us = step.wake_at_us if record is None else record.wake_us(step.wake_at_us)
        self._nothing_new, self._tried = False, 0
        if self._conversations is not None and not self._conversations.is_stale:
            self._conversations.is_stale = changes_holding(step)
        for command in step.commands:
            if type(command) not in OF_THE_DEVICE:
                self._perform(command, event.time_us)
        if self.encoder is not None:
            self._note_media(self.encoder, step, event.time_us)
        if self._watched:
            self._show(event, step)
        return step

    def _start_encoding(self, encoder: EncoderLane, now_us: int) -> None:
        """Let the encoder start the ordered contents; on the engine's GPUs batches wait for it."""
        held_us = encoder.start(now_us, self.device.encoder_free_us)
        if held_us:
            self.device.encode_until(held_us)

    def _note_media(self, encoder: EncoderLane, step: Step, now_us: int) -> None:
        """Record requests that begin to wait for media, and report waits that have ended."""
        for decided in step.decided:
            if type(decided) is AdmissionDeferred and decided.reason == "media":
                self._awaiting.setdefault(decided.request_id, now_us)
        held = len(self.engine.blocked)
        if held == self._held:
            return
        self._held = held
        for request_id in list(self._awaiting):
            request = self.engine.requests.get(request_id)
            if request is None or request.extras is None or not request.extras.awaits_media:
                encoder.sink.media_wait(request_id, now_us - self._awaiting.pop(request_id))

    def _show(self, event: ObservedEvent, step: Step) -> None:
        """Call the observer, and the check if it is due."""
        if self._observer is not None:
            self._observer.observe(event, step, self.engine)
        if self._check is not None:
            self._until_check -= 1
            if self._until_check <= 0:
                self._until_check = self._check_every
                self._check(self.engine)

    def _perform(self, command: Command, now_us: int) -> None:
        """Carry out one command: an end or rejection, a compilation, a load, an encoding, a transfer, a tier's move."""
        if type(command) is FinishRequest:
            self._report_end(command.request_id, now_us, answered=command.reason != "cancelled")
            self._count_end()
        elif type(command) is RejectRequest:
            self._report_end(command.request_id, now_us, answered=False)
            self.rejected[command.reason] += 1
            self._count_end()
        elif self._record is not None and self._record.order(command):
            pass  # its answer comes when it came in the recorded run
        elif type(command) is CompileGrammar:
            self._compiling.append((now_us + self._grammar_compile_us, command.grammar.digest))
        elif type(command) is LoadAdapter:
            self._loads.append(self._load(command, now_us))
        elif type(command) is EncodeMedia:
            if self.encoder is None:
                raise ContractError("requests with media need an encoder, and this engine has none")
            self.encoder.begin(command)
        elif isinstance(command, MeasureExpertLoad | MoveExperts):
            assert self.experts is not None
            self.experts.order(command)
        elif isinstance(command, StartTransfer | CancelTransfer) and self.port is not None:
            self.port.perform(command, now_us)
            self._others_us = self.env.peek()
        elif self.tiers is not None:
            held_us = self.tiers.begin(command, now_us)
            if held_us is not None:
                self.device.hold_until(held_us)

    def _report_end(self, request_id: RequestId, now_us: int, *, answered: bool) -> None:
        """Report the end of a request to the source of requests; with samples, when the last sample has ended.

        The client receives the end after the engine, and its next request reaches the engine after it was sent: the
        front end takes `frontend_us` for both together. A request is rejected when the lane takes it in, even if it
        arrived before.
        """
        ended = self._samples.ended(request_id, answered=answered)
        if ended is None:
            return
        first, whole = ended
        turn = self.arrivals.open_turns[first]
        if self._conversations is not None:
            self._conversations.ended(turn, answered=whole)
        seen_us = max(now_us, self._took_us)
        if turn.tenant not in self._tenants_of_engines:
            seen_us += self._frontend_us
        if whole:
            self.arrivals.answered(first, seen_us)
        else:
            self.arrivals.broke_off(first, seen_us)

    def _take_row(self, taken: RowTaken) -> None:
        """Assign a row on the device to the turn of its request."""
        first = self._samples.first_of(taken.request_id)
        turn = self.arrivals.open_turns[first]
        self.device.take_row(taken.row, turn, taken.adapter_slot, taken.request_id - first)

    def _load(self, command: LoadAdapter, now_us: int) -> AdapterLoaded:
        """Begin to load an adapter to the device. Return the answer, dated with the end of the load."""
        generation = self.engine.generation
        if self._adapters is not None:
            return self._adapters.begin(command, now_us, generation)
        due_us = now_us + self._adapter_load_us
        return AdapterLoaded(due_us, command.adapter, command.version, generation=generation)

    def _count_end(self) -> None:
        self.ended += 1
        if self._on_finish is not None:
            self._on_finish(self.ended)
        self._others_us = self.env.peek()  # another process may react to the end

    def _spend(self, now_us: int, cost_us: float, what: str) -> int:
        """Account for `cost_us` of work of the CPU lane. Return the time at which it is free again."""
        if self._record is not None:
            return self._record.free_us
        stop_us = now_us + round(cost_us)
        if stop_us > now_us:
            self.metrics.cpu_interval(now_us, stop_us, what)
        return stop_us


def check_models(engine: Engine, features: HostFeatures) -> None:
    """Raise ContractError if an engine's config needs a model that `features` lack, or they have one without use."""
    if engine.config.speculates != (features.speculation is not None):
        raise ContractError(
            "a model of accepted drafts is needed for an engine that verifies drafts, and only for such an engine"
        )
    if (engine.config.block_tokens > 0) != (features.blocks is not None):
        raise ContractError("a model of the passes of blocks is needed for a model that answers in blocks only")
    if engine.config.jumps and features.forcing is None:
        raise ContractError("an engine that computes forced tokens together needs a model of what grammars force")
    if features.adapters is not None and not engine.memory.adapters.present:
        raise ContractError("adapters need slots on the device: set max_loras")
    if engine.memory.tiers.present and features.tiers is None:
        raise ContractError("an engine with cache tiers needs links to them")
    if engine.experts.interval and features.experts is None:
        raise ContractError("an engine that measures the load of experts needs a model of what is routed to them")
