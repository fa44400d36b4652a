"""The simulated host: arrivals, a CPU lane and a device, in virtual time. The only file with a SimPy process in it.

Virtual time is `env.now`, in whole microseconds. One engine is one SimPy process, `EngineHost.run`: its CPU lane.

    CPU    | arrival | results of 6 | plan 8 |      idle       | results of 7 | plan 9 | ...
    device | batch 6      |           batch 7                  | batch 8 ...                      overlap depth 1
                          ^ finished  ^ handed over

The device runs batches one after another, and the turns to come are known, so every fact has its time as soon as its
cause has happened: a batch's end is computed when it is handed over, a follow-up's arrival when the answer before it
ends. The lane therefore reads its facts from ordered lines, and keeps its own time: it sleeps only when another process
acts first. Alone it never needs to, which saves a few microseconds per batch; beside others it is never ahead of them.

Facts are folded in the order of their times. An arrival carries the time at which it came, a finished batch the time
at which the lane got round to it; both wait while the lane is busy, and older facts go first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from simpy import Environment, Event

from lockstep.core.contract.commands import (
    NO_ROWS,
    BatchPlan,
    CancelTransfer,
    Command,
    CompileGrammar,
    EncodeMedia,
    FinishRequest,
    Int32s,
    LaunchBatch,
    LoadAdapter,
    ProposeBatch,
    RejectRequest,
    RowTaken,
    SampleBatch,
    StartTransfer,
    Step,
    StreamTokens,
)
from lockstep.core.contract.commands import Speculation as PlannedSpeculation
from lockstep.core.contract.config import JUMP_FORWARD_TOKENS_MAX
from lockstep.core.contract.errors import ContractError, LockstepError
from lockstep.core.contract.events import (
    AdapterLoaded,
    AdmissionDeferred,
    BatchFinished,
    BatchId,
    ClockAdvanced,
    ControlRequested,
    Grammar,
    GrammarReady,
    LaneReady,
    ObservedEvent,
    PromptSpan,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RequestQueued,
    TokenRuns,
    TokensForced,
    TransferAdvanced,
)
from lockstep.core.kv.adapters import NO_SLOT
from lockstep.core.requests.delivery import step_numbers
from lockstep.core.requests.microbatches import Microbatches
from lockstep.core.scheduler.decode_run import DecodeRun
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.intake import ReceiveSkipper
from lockstep.sim.cost import BatchShape, CostModel, CpuModel
from lockstep.sim.host.adapters import AdapterLane
from lockstep.sim.host.cache_tiers import TierLinks
from lockstep.sim.host.encoder_lane import EncoderLane
from lockstep.sim.host.forcing import ForcedRuns, Forcing
from lockstep.sim.host.speculation import SpeculationModel
from lockstep.sim.workload.samples import OpenSamples, sample_first_token
from lockstep.sim.workload.server_sessions import Conversations, changes_holding
from lockstep.sim.workload.token_runs import TOKEN_IDS, runs_behind
from lockstep.sim.workload.turns import Turn, Turns

if TYPE_CHECKING:
    from lockstep.sim.host.pipeline import StageNotes, Stages

EOS_TOKEN_ID = TOKEN_IDS - 1
"""What a model says when it ends by itself. Workloads hand out ids from below, so no other token has this one."""

NEVER_US = 2**62
OTHER_LUCK = 2**40  # added to a turn's index for each further sample: its drafts are right by another draw
GRAMMAR_COMPILE_US = 50_000  # an estimate: JSON schemas of a few dozen fields, compiled beside the loop
ADAPTER_LOAD_US = 20_000  # an estimate: 200 MB from host memory to the device at an effective 10 GB/s over PCIe

OF_THE_DEVICE = frozenset((LaunchBatch, ProposeBatch, SampleBatch, StreamTokens))
"""Commands that `EngineHost._fold` leaves to whoever folds a launch or a result."""

RUN_WORTH_BATCHES = 4  # a stretch of decodes shorter than this costs more to begin than it saves


class JournalSink(Protocol):
    """What the host needs of a journal."""

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Record one event and the digest of its Step."""

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Record an event whose step raised."""


class MetricsSink(Protocol):
    """What the host tells whoever measures; see `metrics.MetricsFold`."""

    def observe(self, event: ObservedEvent, step: Step) -> None:
        """Take in one event and its Step."""

    def gauge(self, time_us: int, waiting: int, running: int, free_pages: int, cached_pages: int) -> None:
        """Take in how things stand after a LaneReady."""

    def cpu_interval(self, start_us: int, stop_us: int, what: str) -> None:
        """Take in what the CPU lane did."""


class Observer(Protocol):
    """Who sees each step and the engine behind it. Not told of uniform stretches of decodes, which decide nothing."""

    def observe(self, event: ObservedEvent, step: Step, engine: Engine) -> None:
        """Take in one event and its Step; change nothing."""


class RequestSource(Protocol):
    """Where a lane's requests come from: `Arrivals`, or what a router sends it."""

    next_us: int

    @property
    def open_turns(self) -> Mapping[RequestId, Turn]:
        """Those that arrived and have not ended."""

    def take(self, max_new_tokens: int | None) -> RequestArrived | RequestCancelled | ControlRequested:
        """The next fact, due at `next_us`."""

    @property
    def settled_until_us(self) -> int:
        """Before this moment no request comes but those known now and those that follow this lane's own answers."""

    def more(self, env: Environment) -> Event | None:
        """What to wait for when nothing is due any more; None: nothing will come."""

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """An answer ended."""

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """A request was rejected, or its client left."""


class TransferPort(Protocol):
    """What moves KV between this engine and others, on a clock that they share; see `handover.Port`."""

    next_us: int

    def take(self, now_us: int) -> TransferAdvanced:
        """The next fact, due at `next_us`."""

    def perform(self, command: StartTransfer | CancelTransfer, now_us: int) -> None:
        """Carry out an order."""

    def collected(self, batch_id: BatchId, step: Step, now_us: int) -> None:
        """The result of a batch was taken in."""

    def pause(self, next_us: int) -> Event:
        """What to wait for until `next_us`, or until something comes before."""


class RankExchange(Protocol):
    """What ranks that run every pass together say to each other; see `data_parallel.RankPort`."""

    next_us: int

    def take(self, now_us: int) -> RanksAgreed | None:
        """The next fact, due at `next_us`; None: the others wait for what this rank would run."""

    def propose(self, command: ProposeBatch, now_us: int) -> None:
        """Tell the others."""

    def pause(self, next_us: int) -> Event:
        """What to wait for until `next_us`, or until something comes before."""


class Arrivals:
    """Turns to come. Those with a time of their own stand in a line; a follow-up joins when the answer before it ends.

    Of a columnar workload (`Turns`) only the turns that are open or thought about exist as objects.
    `cancel_after_us` says for turns, by index, how long after arrival their client leaves.
    """

    def __init__(self, turns: Sequence[Turn], cancel_after_us: Mapping[int, int] | None = None) -> None:
        self._turns = turns
        self.never_sent: int  # turns that wait for an answer; in the end, those whose session broke off before them
        self._by_clock: Iterator[Turn]
        self._follow_ups: Callable[[int], Sequence[int]]  # indices of the turns behind one
        if isinstance(turns, Turns):
            self._by_clock = turns.by_clock()
            self.never_sent = len(turns) - len(turns.by_clock_rows)
            self._follow_ups = turns.follow_ups
        else:
            self._by_clock = (turn for turn in turns if turn.after is None)
            behind: dict[int, list[int]] = {}
            for index, turn in enumerate(turns):
                if turn.after is not None:
                    behind.setdefault(turn.after, []).append(index)
            self.never_sent = sum(map(len, behind.values()))
            self._follow_ups = lambda index: behind.get(index, ())
        self._next_by_clock = next(self._by_clock, None)
        self._thinking: list[tuple[int, int, Turn]] = []  # heap: when, index
        self._cancel_after_us = cancel_after_us or {}
        self._cancels: list[tuple[int, RequestId]] = []  # heap
        self.expected = len(turns)
        self.arrived = 0  # each sample as one; also the next request id
        self.open_turns: dict[RequestId, Turn] = {}  # those that arrived and have not ended
        self.next_us = NEVER_US  # the next arrival or cancel
        self._look_ahead()

    settled_until_us = NEVER_US  # nobody else sends any

    def more(self, env: Environment) -> Event | None:
        """What to wait for when nothing is due any more; None: nothing will come."""
        return None

    def _look_ahead(self) -> None:
        next_us = self._next_by_clock.arrival_us if self._next_by_clock is not None else NEVER_US
        if self._thinking and self._thinking[0][0] < next_us:
            next_us = self._thinking[0][0]
        if self._cancels and self._cancels[0][0] < next_us:
            next_us = self._cancels[0][0]
        self.next_us = next_us

    def take(self, max_new_tokens: int | None) -> RequestArrived | RequestCancelled:
        """The next fact, due at `next_us`. At one instant cancels go first, then turns in the workload's order."""
        time_us = self.next_us
        if self._cancels and self._cancels[0][0] == time_us:
            _, request_id = heappop(self._cancels)
            self._look_ahead()
            return RequestCancelled(time_us, request_id)
        turn = self._next_by_clock
        if turn is not None and turn.arrival_us == time_us and not self._thinks_before(time_us, turn.index):
            self._next_by_clock = next(self._by_clock, None)
        else:
            turn = heappop(self._thinking)[2]
        request_id = self.arrived
        self.arrived += turn.samples
        self.open_turns[request_id] = turn
        if turn.index in self._cancel_after_us:
            heappush(self._cancels, (time_us + self._cancel_after_us[turn.index], request_id))
        self._look_ahead()
        return arrival_of(turn, time_us, request_id, max_new_tokens)

    def _thinks_before(self, time_us: int, index: int) -> bool:
        return bool(self._thinking) and self._thinking[0][:2] < (time_us, index)

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """An answer ended: its user begins to think about the next turn."""
        ended = self.open_turns.pop(request_id)
        if not self.never_sent:
            return
        for index in self._follow_ups(ended.index):
            turn = self._turns[index]
            heappush(self._thinking, (now_us + turn.think_us, turn.index, turn))
            self.never_sent -= 1
        self._look_ahead()

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """A request was rejected, or its client left: its session does not go on."""
        del self.open_turns[request_id]

    @property
    def awaits_answers(self) -> bool:
        """Whether turns to come wait for the end of an answer, or did when it broke off."""
        return self.never_sent > 0


class Running(Struct, frozen=True, gc=False):
    """A batch the device has, with its outcome."""

    batch_id: BatchId
    generation: int
    rows: int
    started_us: int
    finished_us: int
    tokens: bytes  # int32, one per sampling row, or as many as `accepted` says
    accepted: bytes = b""  # int32 per sampling row, of a batch that verifies drafts


class Untimed(NamedTuple):
    """A batch whose end is not known yet: it waits to be sampled, or stands behind one that does."""

    plan: BatchPlan
    handed_over_us: int
    forward_us: float
    sampling_us: float
    tokens: bytes
    sampled_us: int | None  # not before this time; None: not known yet
    accepted: bytes = b""


class Device:
    """The GPU lane: runs batches in the order of their launches, each as long as the cost model says."""

    def __init__(self, cost: CostModel, rows_max: int, *, seed: int, name: str, early_eos: bool) -> None:
        self._cost = cost
        self.speculation: SpeculationModel | None = None  # of an engine that verifies drafts
        self.state_copy_us = 0.0  # of one request's recurrent state, where checkpoints are kept
        self.stages: Stages | None = None  # of a pipeline
        self.notes: StageNotes | None = None  # when each batch was in each of these ...
        self.notes_times = False  # ... whether that is kept
        self._verified: tuple[Int32s, Int32s] = (NO_ROWS, NO_ROWS)  # by the plan launched last: starts, accepted
        self._seed = seed
        self._name = name
        self._early_eos = early_eos
        self._free_us = 0  # when the last batch handed over will have finished
        self.queue: deque[Running] = deque()
        self.untimed: deque[Untimed] = deque()  # behind those in the queue
        # By row: what to add to a position to get the token sampled there, and the position of the last one.
        self._token_base = np.zeros(rows_max, np.int32)
        self._last_position = np.zeros(rows_max, np.int32)
        # The last decode. The engine passes the same array of rows for as long as the same requests decode together.
        self._decode_rows = NO_ROWS
        self._decode_token_base = NO_ROWS
        self._decode_context_tokens = 0
        self._decode_adapters = (0, 0)  # of that decode: rows on adapters, and different adapters
        # By row, the slot of its adapter; None: of an engine without any.
        self.adapter_slots: Int32s | None = None

    def take_row(self, row: int, turn: Turn, adapter_slot: int = NO_SLOT, sample: int = 0) -> None:
        """A row now belongs to this answer of a turn, whose token i is sampled at position prompt_tokens + i."""
        if self.adapter_slots is not None:
            self.adapter_slots[row] = adapter_slot
        self._token_base[row] = sample_first_token(turn, sample) - turn.prompt_tokens
        self._last_position[row] = turn.prompt_tokens + turn.output_tokens - 1
        if self.speculation is not None:
            self.speculation.take_row(row, turn.index + sample * OTHER_LUCK)

    def shape_of(self, plan: BatchPlan) -> BatchShape:
        """What the cost of a plan depends on. To be asked once for each plan, in the order of launches."""
        if self.adapter_slots is None:
            return self._shape_of(plan)
        if plan.rows is self._decode_rows:
            on_adapters = self._decode_adapters
        else:
            on_adapters = adapters_of(plan, self.adapter_slots[plan.rows])
        shape = self._shape_of(plan)
        if plan.rows is self._decode_rows:
            self._decode_adapters = on_adapters
        tokens, adapters = on_adapters
        return replace(shape, adapter_tokens=tokens, adapters=adapters) if tokens else shape

    def _shape_of(self, plan: BatchPlan) -> BatchShape:
        """The same, whatever rows run on."""
        if self.speculation is not None:
            return self._verify(plan, self.speculation)
        if plan.speculation is not None:
            return self._jump(plan, plan.speculation)
        if plan.mode != "decode":
            if plan.extend_rows < len(plan.rows):
                self._decode_rows = NO_ROWS  # who decodes went on with it, uncounted
            return extend_shape_of(plan)
        rows = plan.rows
        if rows is self._decode_rows:
            self._decode_context_tokens += len(rows) * plan.steps  # each went so many positions further
        else:
            self._decode_rows = rows
            self._decode_token_base = self._token_base[rows]
            self._decode_context_tokens = int(np.add.reduce(plan.starts))
        return BatchShape(
            decode_rows=len(rows), decode_context_tokens=self._decode_context_tokens, sampled_rows=len(rows)
        )

    def launch(self, plan: BatchPlan, shape: BatchShape, handed_over_us: int) -> None:
        """Run `plan` behind what was launched before. Its tokens are drawn now, while its rows are whose they are."""
        expected = self._cost.batch_us(shape)
        took_us = expected_us = expected.mean_us if plan.steps == 1 else self._steps_us(plan, shape)
        if expected.spread_us > 0.0:
            took_us += expected.spread_us * standard_normal(f"{self._seed} {self._name} {plan.batch_id}")
        if self.state_copy_us:
            states_us = self.state_copy_us * state_copies(plan)
            took_us, expected_us = took_us + states_us, expected_us + states_us
        if self.speculation is not None:
            draft_us = self.speculation.draft_us(plan, shape)
            took_us, expected_us = took_us + draft_us, expected_us + draft_us
        tokens = self._sample(plan).tobytes()
        accepted = b"" if plan.speculation is None else self._accepted(plan)
        if plan.sample_after is not None or self.untimed:
            sampling_us = expected_us - self._cost.batch_us(replace(shape, sampled_rows=0)).mean_us
            sampled_us = 0 if plan.sample_after is None else None
            forward_us = took_us - sampling_us
            untimed = Untimed(plan, handed_over_us, forward_us, sampling_us, tokens, sampled_us, accepted)
            self.untimed.append(untimed)
            return
        started_us = self._free_us if self._free_us > handed_over_us else handed_over_us
        self._free_us = finished_us = started_us + max(1, round(took_us))
        self.queue.append(
            Running(plan.batch_id, plan.generation, len(plan.rows), started_us, finished_us, tokens, accepted)
        )

    def _steps_us(self, plan: BatchPlan, shape: BatchShape) -> float:
        """What a plan of several steps is expected to take: each one position on, with every row of the launch."""
        expected_us = 0.0
        for further in range(plan.steps):
            context_tokens = shape.decode_context_tokens + further * shape.decode_rows
            expected_us += self._cost.batch_us(replace(shape, decode_context_tokens=context_tokens)).mean_us
        return expected_us

    @property
    def free_us(self) -> int:
        """When all that was handed over will have run, as far as that is known."""
        return self._free_us

    def hold_until(self, us: int) -> None:
        """No batch that is handed over from now on begins before `us`."""
        self._free_us = max(self._free_us, us)

    @property
    def encoder_free_us(self) -> int:
        """When the GPUs that encode are through with what was handed over; NEVER_US: not known yet."""
        return self.free_us

    def encode_until(self, us: int) -> None:
        """The GPUs that encode do nothing else before `us`, of what is handed over from now on."""
        self.hold_until(us)

    def sample(self, batch_id: BatchId, at_us: int) -> None:
        """The matchers have moved: a deferred batch may sample once its forward has run. Time what can be timed."""
        untimed = [b._replace(sampled_us=at_us) if b.plan.batch_id == batch_id else b for b in self.untimed]
        self.untimed = deque(untimed)
        while self.untimed and self.untimed[0].sampled_us is not None:
            plan, handed_over_us, forward_us, sampling_us, tokens, sampled_us, accepted = self.untimed.popleft()
            started_us = max(self._free_us, handed_over_us)
            ready_us = max(started_us + forward_us, sampled_us or 0)
            self._free_us = finished_us = max(started_us + 1, round(ready_us + sampling_us))
            self.queue.append(
                Running(plan.batch_id, plan.generation, len(plan.rows), started_us, finished_us, tokens, accepted)
            )

    def _sample(self, plan: BatchPlan) -> Int32s:
        """The tokens of a plan's sampling rows."""
        if plan.speculation is not None:
            return self._sample_runs(plan)
        if plan.steps > 1:
            return self._sample_steps(plan)
        if not plan.sample_rows.size:
            return NO_ROWS
        stops = plan.stops
        if plan.rows is self._decode_rows:
            rows, tokens = plan.rows, self._decode_token_base + stops
        else:
            rows, stops = plan.rows[plan.sample_rows], stops[plan.sample_rows]
            tokens = self._token_base[rows] + stops
        if self._early_eos:
            tokens[stops == self._last_position[rows]] = EOS_TOKEN_ID
        return tokens

    def _verify(self, plan: BatchPlan, speculation: SpeculationModel) -> BatchShape:
        """The shape of a plan of an engine that verifies drafts, which is where its rows stand by then."""
        extending = plan.extend_rows
        speculation.extended(plan.rows[:extending], plan.stops[:extending])
        shape = extend_shape_of(plan)
        if plan.speculation is None:
            return shape
        drafts = plan.speculation.draft_lengths
        self._verified = speculation.verify(plan.rows[extending:], drafts, plan.speculation.forced_lengths)
        draft_tokens = int(drafts.sum())
        return replace(
            shape,
            decode_context_tokens=int(self._verified[0].sum()),
            sampled_rows=shape.sampled_rows + draft_tokens,
            draft_tokens=draft_tokens,
        )

    def _jump(self, plan: BatchPlan, jumps: PlannedSpeculation) -> BatchShape:
        """The shape of a plan that computes forced tokens, of an engine that verifies no drafts."""
        starts, forced = plan.starts[plan.extend_rows :], jumps.forced_lengths
        self._decode_rows = NO_ROWS  # who decodes went on with it, uncounted
        self._verified = (starts, forced + np.int32(1))
        shape, tokens = extend_shape_of(plan), int(forced.sum())
        return replace(
            shape,
            decode_context_tokens=int(starts.sum()),
            sampled_rows=shape.sampled_rows + tokens,
            draft_tokens=tokens,
        )

    def _accepted(self, plan: BatchPlan) -> bytes:
        """How many tokens each sampling row of a plan gets that verifies drafts, or forced tokens."""
        accepted = np.ones(len(plan.sample_rows), np.int32)
        accepted[plan.sample_rows >= plan.extend_rows] = self._verified[1]
        return accepted.tobytes()

    def _sample_runs(self, plan: BatchPlan) -> Int32s:
        """The tokens of a plan that verifies drafts: those of each row end to end."""
        counts = np.frombuffer(self._accepted(plan), np.int32)
        first = plan.stops[plan.sample_rows]
        first[plan.sample_rows >= plan.extend_rows] = self._verified[0] + np.int32(1)
        rows = plan.rows[plan.sample_rows].repeat(counts)
        stops = first.repeat(counts) + step_numbers(counts)
        tokens: Int32s = self._token_base[rows] + stops
        if self._early_eos:
            tokens[stops == self._last_position[rows]] = EOS_TOKEN_ID
        return tokens

    def tokens_of(self, row: int, start: int, stop: int) -> Int32s:
        """What a row will sample at these positions, but for its last token, which ends its answer."""
        stop = min(stop, int(self._last_position[row]))
        tokens: Int32s = self._token_base[row] + np.arange(start, max(stop, start), dtype=np.int32)
        return tokens

    def _sample_steps(self, plan: BatchPlan) -> Int32s:
        """The tokens of a plan that decodes several times: those of each row end to end."""
        counts = plan.stops - plan.starts
        rows = plan.rows.repeat(counts)
        stops = plan.starts.repeat(counts) + step_numbers(counts) + np.int32(1)
        tokens: Int32s = self._token_base[rows] + stops
        if self._early_eos:
            tokens[stops == self._last_position[rows]] = EOS_TOKEN_ID
        return tokens


def arrival_of(turn: Turn, time_us: int, request_id: RequestId, max_new_tokens: int | None) -> RequestArrived:
    """The fact that a turn has come. `max_new_tokens` is the limit of every request that wants any output."""
    return RequestArrived(
        time_us=time_us,
        request_id=request_id,
        prompt=TokenRuns(tuple(runs_behind(turn.prompt, turn.session_kept)) if turn.session_kept else turn.prompt),
        max_new_tokens=max_new_tokens if max_new_tokens is not None and turn.output_tokens else turn.output_tokens,
        label=turn.label,
        tenant=turn.tenant,
        grammar=_grammar(turn.grammar) if turn.grammar else None,
        spans=tuple([PromptSpan(m.start, m.start + m.tokens, m.kind, m.digest, m.tokens) for m in turn.media]),
        adapter=turn.adapter,
        parallel_samples=turn.samples,
        session=turn.session,
        session_start=turn.session_kept if turn.session and turn.after is not None else None,
    )


def _grammar(name: str) -> Grammar:
    return Grammar("json_schema", name, blake2b(name.encode(), digest_size=16).digest())


def standard_normal(key: str) -> float:
    """A draw that depends on nothing but the key."""
    bits = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")
    return NormalDist().inv_cdf((bits + 0.5) / 2**64)


class EngineHost:
    """One engine with its CPU lane and its device.

    Args:
        check: called with the engine after every `check_every`-th event, e.g. `lockstep.core.invariants.self_check`.
        max_new_tokens: the limit of every request that wants any output; None is the turn's own length. With a limit,
            a turn whose length is below it ends with EOS_TOKEN_ID, which must be among the config's `eos_token_ids`.
        grammar_compile_us: how long it takes to compile a grammar, beside the lane.
        adapter_load_us: how long an adapter takes to get to the device; loads overlap with everything.
        adapters: those that the engine knows from its beginning, and what brings them there; then nothing takes
            `adapter_load_us`.
        on_finish: called with the number of requests that ended, after each.
        decode_runs: take uniform stretches of decodes in one go. It changes nothing but the time it takes. Without
            effect while `check` looks at the engine, which is not up to date inside such a stretch.
        device_type: what runs batches; see `pipeline.device_type_of`.
        receive_interval: how seldom the lane looks for arrivals while it launches; see `intake.ReceiveSkipper`.
        speculation: how many drafts are right, and what they cost, of an engine whose config has a method.
        forcing: what grammars force, of an engine that computes it together.
        tiers: what carries KV between the tiers below the device; an engine with such tiers needs it.
        state_copy_us: what a copy of one request's recurrent state takes.
        port: of a prefill or a decode engine, where its KV goes and comes from.
        exchange: of one of several data-parallel ranks, where the others are.
        witness: told of every step; see Witness.
        encoder: of an engine whose requests have media.
        conversations: of an engine whose turns are of sessions that it keeps.
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
        *,
        seed: int = 0,
        name: str = "engine0",
        max_new_tokens: int | None = None,
        grammar_compile_us: int = GRAMMAR_COMPILE_US,
        check: Callable[[Engine], object] | None = None,
        check_every: int = 1,
        on_finish: Callable[[int], None] | None = None,
        decode_runs: bool = True,
        adapter_load_us: int = ADAPTER_LOAD_US,
        device_type: type[Device] = Device,
        receive_interval: int = 1,
        speculation: SpeculationModel | None = None,
        forcing: Forcing | None = None,
        tiers: TierLinks | None = None,
        state_copy_us: float = 0.0,
        port: TransferPort | None = None,
        exchange: RankExchange | None = None,
        witness: Observer | None = None,
        encoder: EncoderLane | None = None,
        adapters: AdapterLane | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        if engine.config.speculates != (speculation is not None):
            raise ContractError("an engine that verifies drafts, and only such a one, needs to be told which are right")
        if engine.config.jumps and forcing is None:
            raise ContractError("an engine that computes forced tokens together needs to be told which are forced")
        if adapters is not None and not engine.memory.adapters.present:
            raise ContractError("adapters need slots on the device: set max_loras")
        if engine.memory.tiers.present and tiers is None:
            raise ContractError("an engine with cache tiers needs links to them")
        if max_new_tokens is not None and EOS_TOKEN_ID not in engine.config.eos_token_ids:
            raise ContractError(f"answers shorter than max_new_tokens need {EOS_TOKEN_ID} among the eos_token_ids")
        self.env = env
        self.engine = engine
        self.arrivals = arrivals
        self.port = port
        self.exchange = exchange
        self._planned: BatchPlan | None = None  # what a rank has proposed
        self._planned_shape = BatchShape()
        self.cpu = cpu
        self.journal = journal
        self.metrics = metrics
        self.device = device_type(
            cost, engine.config.rows_max, seed=seed, name=name, early_eos=max_new_tokens is not None
        )
        self.device.speculation = speculation
        self.device.state_copy_us = state_copy_us
        self.device.notes_times = engine.microbatches.several
        if adapters is not None:
            self.device.adapter_slots = np.full(engine.config.rows_max, NO_SLOT, np.int32)
        self.stop_requested = False  # set from a signal handler: `run` returns before the next fact

        self.ended = 0  # requests finished or rejected
        self.batches = 0
        self.clamped = 0  # requests that were granted fewer tokens than they asked for
        self.rejected: Counter[str] = Counter()

        self._max_new_tokens = max_new_tokens
        self._witness = witness
        self._watched = witness is not None or check is not None
        self._check = check
        self._check_every = check_every
        self._until_check = check_every
        self._on_finish = on_finish
        self._decode_runs = decode_runs and check is None
        self._grammar_compile_us = grammar_compile_us
        self._compiling: deque[tuple[int, bytes]] = deque()  # when each grammar is ready
        self._adapter_load_us = adapter_load_us
        self._adapters = adapters
        self._loads: deque[AdapterLoaded] = deque()  # to come, soonest first
        self._forcing = forcing if engine.config.jumps else None
        self._forced_runs: dict[int, tuple[int, ForcedRuns]] = {}  # by row: whose they are
        self.tiers = tiers
        self.encoder = encoder
        self._samples = OpenSamples()
        self._conversations = conversations
        self._awaiting: dict[RequestId, int] = {}  # media: since when
        self._held = 0  # requests that the engine held when it was looked at who still awaits any
        self.wake_at_us: int | None = None
        self._skipper = ReceiveSkipper(receive_interval) if receive_interval != 1 else None
        self._receives = True  # whether the lane looks for arrivals before its next launch
        self._nothing_new = True  # since the last LaneReady that launched nothing
        self._offered = -1  # the microbatch that launched last, or was offered a slot in vain
        self._tried = 0  # microbatches that launched nothing since there was anything new
        self._awaited = False  # whether another rank waits for what this one would run
        self._woke_us = 0  # the clock's time, which stands still while the lane runs
        self._others_us: float = NEVER_US  # when another process acts next: they plan only when one is told of an end

    def run(self) -> Generator[Event, None, None]:
        """The CPU lane, a SimPy process: take in what is pending, launch if there is a slot, wait until more comes.

        Whoever else acts by the time at which the lane stands goes first: it may bring another arrival.
        """
        env, engine = self.env, self.engine
        slots = engine.config.launches_max
        now_us = self._wake()
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
                else:  # something may come before: the lane stays where it is, free, and looks again
                    yield env.timeout(max(settled_us - self._woke_us, 0))
                    self._wake()
        if now_us > self._woke_us:
            yield env.timeout(now_us - self._woke_us)

    def _wake(self) -> int:
        """The lane goes on after others may have acted. Return the time."""
        self._woke_us = int(self.env.now)
        self._others_us = self.env.peek()
        return self._woke_us

    def _take_in(self, now_us: int) -> int:
        """Fold every fact up to `now_us`. Folding takes time, in which more may come; return when none is left."""
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
            elif self.tiers is not None and self.tiers.due and self.tiers.next_us <= now_us:
                self._fold(self.tiers.take(now_us))
            elif self.encoder is not None and self.encoder.next_us <= now_us:
                self._fold(self.encoder.take(now_us))
            elif self.port is not None and self.port.next_us <= now_us:
                self._fold(self.port.take(now_us))
            elif self.exchange is not None and self.exchange.next_us <= now_us:
                now_us = self._hear(self.exchange, now_us)
            elif self._conversations is not None and self._conversations.due:
                self._fold(self._conversations.closing(now_us))
            elif self.wake_at_us is not None and self.wake_at_us <= now_us:
                self._fold(ClockAdvanced(now_us))
            else:
                break
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
        if self.tiers is not None and self.tiers.due and self.tiers.next_us < next_us:
            next_us = self.tiers.next_us
        if self.encoder is not None and self.encoder.next_us < next_us:
            next_us = self.encoder.next_us
        if self.port is not None and self.port.next_us < next_us:
            next_us = self.port.next_us
        if self.exchange is not None and self.exchange.next_us < next_us:
            next_us = self.exchange.next_us
        if self.wake_at_us is not None and self.wake_at_us < next_us:
            next_us = self.wake_at_us
        return next_us

    def _arrive(self, now_us: int) -> int:
        event = self.arrivals.take(self._max_new_tokens)
        if type(event) is RequestArrived and event.parallel_samples > 1:
            self._samples.arrived(event.request_id, event.parallel_samples)
        if self._conversations is not None and type(event) is RequestArrived:
            opening = self._conversations.opening(self.arrivals.open_turns[event.request_id], event.time_us)
            if opening is not None:
                self._fold(opening if self._skipper is None else replace(opening, time_us=now_us))
        if self._skipper is None:
            step = self._fold(event)
        else:  # a fact when the lane has looked; its client has waited since it came
            step = self._fold(replace(event, time_us=now_us), came_us=event.time_us)
        if type(event) is RequestArrived:
            for decided in step.decided:
                if type(decided) is RequestQueued and decided.max_new_tokens < event.max_new_tokens:
                    self.clamped += 1
        return self._spend(now_us, self.cpu.arrival_us, "arrival")

    def _forced(self) -> tuple[tuple[RequestId, int, bytes], ...]:
        """What grammars force behind the result that comes next, by request."""
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
        forced = self._forced() if self._forcing is not None else ()
        step = self._fold(
            BatchFinished(
                now_us,
                batch.batch_id,
                batch.tokens,
                batch.started_us,
                batch.finished_us,
                batch.generation,
                batch.accepted,
            )
        )
        if forced:
            forced = tuple([one for one in forced if one[0] in self.engine.requests])
            self._fold(TokensForced(now_us, batch.generation, forced))
        done_us = self._spend(now_us, self.cpu.result_us(batch.rows), "results")
        if self.device.untimed:
            for command in step.commands:
                if type(command) is SampleBatch:
                    self.device.sample(command.batch_id, done_us)
            self._others_us = self.env.peek()  # other ranks' passes may be behind this one
        if self.port is not None:
            self.port.collected(batch.batch_id, step, done_us)
            self._others_us = self.env.peek()
        return done_us

    def _launch(self, now_us: int) -> int | None:
        """Offer the slot to the engine. Return when the batch was handed to the device, None if there was none."""
        engine = self.engine
        several, tried = engine.microbatches if engine.microbatches.several else None, self._tried
        if several is not None and engine.ranks is not None and not self._awaited and not self._able(several):
            self._nothing_new = True  # the turn is not passed on before anybody needs it: who comes may want it
            return None
        step = self._fold(LaneReady(now_us) if several is None else LaneReady(now_us, self._next_microbatch(several)))
        if self._conversations is not None and self._conversations.is_stale:
            self._conversations.told.sessions_held(now_us, engine.sessions.pages_held_alone())
            self._conversations.is_stale = bool(engine.sessions.unsettled)
        radix = engine.memory.radix
        cached_pages = radix.evictable_pages
        self.metrics.gauge(now_us, len(engine.waiting), engine.active, engine.memory.pool.free_count, cached_pages)
        if self.exchange is not None:
            self._nothing_new = True  # until the others have answered
            return self._carry_on(self.exchange, step, now_us)
        plan = step.launched()
        if plan is None:
            if several is not None:
                self._tried = tried + 1
                if self._tried < len(self._able(several)):
                    return now_us  # another one may have something
            self._nothing_new = self._receives = True  # a loop with nothing to launch looks again at once
            return None
        if self._skipper is not None:
            self._receives = self._skipper.due(plan.mode)
        for taken in plan.rows_taken:
            self._take_row(taken)
        shape = self.device.shape_of(plan)
        handed_over_us = self._spend(now_us, self.cpu.plan_us(shape), "plan")
        self.device.launch(plan, shape, handed_over_us)
        self.batches += 1
        return handed_over_us

    def _next_microbatch(self, several: Microbatches) -> int:
        """Whose turn it is: of those that may launch, the next one behind that which was offered a slot last; or the
        one that the round of all ranks is about.
        """
        if self.engine.ranks is not None:
            return self.engine.ranks.slot
        able = self._able(several)
        behind = [number for number in able if number > self._offered]
        self._offered = (behind or able or [several.at])[0]
        return self._offered

    def _able(self, several: Microbatches) -> list[int]:
        """Microbatches that have a slot free and may have something to launch."""
        engine = self.engine
        taken = [0] * several.count
        for batch in engine.in_flight:
            taken[batch.plan.microbatch] += 1
        depth = engine.config.overlap_depth
        return [number for number in range(several.count) if taken[number] <= depth and engine.has_work(number)]

    def _hear(self, exchange: RankExchange, now_us: int) -> int:
        """Take in what all ranks agreed on, and run that; or offer a slot, because they wait for this one."""
        event = exchange.take(now_us)
        if event is None:
            self._nothing_new, self._awaited = False, True
            return now_us
        step = self._fold(event)
        done_us = self._carry_on(exchange, step, now_us)
        if done_us is None:  # nobody had anything to run
            self._nothing_new = not (self.engine.waiting or self.engine.active)
            return now_us
        return done_us

    def _carry_on(self, exchange: RankExchange, step: Step, now_us: int) -> int | None:
        """Say what this rank would run, or run what all agreed on. Return when that is done; None: it is neither."""
        done_us = None
        for command in step.commands:
            if type(command) is ProposeBatch:
                self._awaited = False
                done_us = self._planned_by(now_us)
                exchange.propose(command, done_us)
            elif type(command) is LaunchBatch:
                self.device.launch(command.plan, self._planned_shape, now_us)
                self._planned, self._planned_shape = None, BatchShape()
                self.batches += 1
                done_us = now_us
        self._others_us = self.env.peek()  # whoever was told something acts upon it
        return done_us

    def _planned_by(self, now_us: int) -> int:
        """Look at what a rank proposes, once. Return when it has been planned."""
        held = self.engine.ranks.held if self.engine.ranks is not None else None
        if held is None or held.plan is self._planned:
            return now_us if held is not None else self._spend(now_us, self.cpu.plan_us(BatchShape()), "plan")
        self._planned = held.plan
        for taken in held.plan.rows_taken:
            self._take_row(taken)
        self._planned_shape = self.device.shape_of(held.plan)
        return self._spend(now_us, self.cpu.plan_us(self._planned_shape), "plan")

    def _run_decodes(self, now_us: int) -> int | None:
        """Take a uniform stretch of decodes in one go: what `_take_in` and `_launch` would do, event for event.

        It ends before anything but a result is due. Return when the lane is free; None if there was no such stretch.
        """
        queue = self.device.queue
        if self._conversations is not None and self._conversations.due:
            return None
        if self.exchange is not None:
            return None  # what is planned may wait for the others, and nothing is launched without them
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
        result_us = round(self.cpu.result_us(newest.rows))  # one cohort throughout, so one cost
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
        """Step the engine, record, measure, and perform the commands that are the host's own affair.

        `came_us` is when the event came to pass, for the metrics, if the lane noticed it later.
        """
        try:
            step = self.engine.step(event)
        except LockstepError:
            self.journal.append_unsealed(event)
            raise
        self.journal.append(event, step.digest)
        self.metrics.observe(event if came_us is None else replace(event, time_us=came_us), step)
        self.wake_at_us = step.wake_at_us
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
        """Let the encoder begin with what it was asked for; on the engine's GPUs batches wait for it."""
        held_us = encoder.start(now_us, self.device.encoder_free_us)
        if held_us:
            self.device.encode_until(held_us)

    def _note_media(self, encoder: EncoderLane, step: Step, now_us: int) -> None:
        """Note who begins to wait for media, and whose wait is over."""
        for decided in step.decided:
            if type(decided) is AdmissionDeferred and decided.reason == "media":
                self._awaiting.setdefault(decided.request_id, now_us)
        held = len(self.engine.held)
        if held == self._held:
            return
        self._held = held
        for request_id in list(self._awaiting):
            request = self.engine.requests.get(request_id)
            if request is None or request.extras is None or not request.extras.awaits_media:
                encoder.told.media_wait(request_id, now_us - self._awaiting.pop(request_id))

    def _show(self, event: ObservedEvent, step: Step) -> None:
        """Let those look at the engine who asked for it."""
        if self._witness is not None:
            self._witness.observe(event, step, self.engine)
        if self._check is not None:
            self._until_check -= 1
            if self._until_check <= 0:
                self._until_check = self._check_every
                self._check(self.engine)

    def _perform(self, command: Command, now_us: int) -> None:
        """Do what the host itself has to do: tell where requests come from of an end, compile, load."""
        if type(command) is FinishRequest:
            self._tell_end(command.request_id, now_us, answered=command.reason != "cancelled")
            self._count_end()
        elif type(command) is RejectRequest:
            self._tell_end(command.request_id, now_us, answered=False)
            self.rejected[command.reason] += 1
            self._count_end()
        elif type(command) is CompileGrammar:
            self._compiling.append((now_us + self._grammar_compile_us, command.grammar.digest))
        elif type(command) is LoadAdapter:
            self._loads.append(self._load(command, now_us))
        elif type(command) is EncodeMedia:
            if self.encoder is None:
                raise ContractError("requests with media need an encoder, and this engine has none")
            self.encoder.begin(command)
        elif isinstance(command, StartTransfer | CancelTransfer) and self.port is not None:
            self.port.perform(command, now_us)
            self._others_us = self.env.peek()
        elif self.tiers is not None:
            held_us = self.tiers.begin(command, now_us)
            if held_us is not None:
                self.device.hold_until(held_us)

    def _tell_end(self, request_id: RequestId, now_us: int, *, answered: bool) -> None:
        """Tell where a request came from of its end, which is that of its last sample."""
        ended = self._samples.ended(request_id, answered=answered)
        if ended is None:
            return
        first, whole = ended
        if self._conversations is not None:
            self._conversations.ended(self.arrivals.open_turns[first], answered=whole)
        if whole:
            self.arrivals.answered(first, now_us)
        else:
            self.arrivals.broke_off(first, now_us)

    def _take_row(self, taken: RowTaken) -> None:
        """Tell the device whose a row is now."""
        first = self._samples.first_of(taken.request_id)
        turn = self.arrivals.open_turns[first]
        self.device.take_row(taken.row, turn, taken.adapter_slot, taken.request_id - first)

    def _load(self, command: LoadAdapter, now_us: int) -> AdapterLoaded:
        """Begin to bring an adapter to the device; returns its answer, which comes later."""
        generation = self.engine.generation
        if self._adapters is not None:
            return self._adapters.begin(command, now_us, generation)
        due_us = now_us + self._adapter_load_us
        return AdapterLoaded(due_us, command.adapter, command.version, generation=generation)

    def _count_end(self) -> None:
        self.ended += 1
        if self._on_finish is not None:
            self._on_finish(self.ended)
        self._others_us = self.env.peek()  # somebody may act upon it

    def _spend(self, now_us: int, cost_us: float, what: str) -> int:
        """Keep the CPU lane busy; return when it is free again."""
        stop_us = now_us + round(cost_us)
        if stop_us > now_us:
            self.metrics.cpu_interval(now_us, stop_us, what)
        return stop_us


def adapters_of(plan: BatchPlan, slots: Int32s) -> tuple[int, int]:
    """New tokens of a plan that run on adapters, of a plan of several steps those of one; and different adapters.

    Args:
        slots: of each row, NO_SLOT for the model alone.
    """
    on = slots >= 0
    if not on.any():
        return 0, 0
    counts = np.ones(len(slots), np.int64)
    extending = plan.extend_rows
    counts[:extending] = plan.stops[:extending] - plan.starts[:extending]
    if plan.speculation is not None:
        counts[extending:] += plan.speculation.draft_lengths
    return int(counts[on].sum()), len(np.unique(slots[on]))


class RowAdapters:
    """Which rows run on which adapters, by the plans that took them; for hosts that price plans as they come."""

    def __init__(self) -> None:
        self._slots = np.full(1, NO_SLOT, np.int32)  # by row, for as many as were ever taken

    def take_rows(self, plan: BatchPlan) -> None:
        """Note whose rows are taken with a plan; of every plan, in the order of launches."""
        for taken in plan.rows_taken:
            if taken.row >= len(self._slots):
                more = np.full(2 * taken.row + 1 - len(self._slots), NO_SLOT, np.int32)
                self._slots = np.concatenate((self._slots, more))
            self._slots[taken.row] = taken.adapter_slot

    def on(self, plan: BatchPlan, shape: BatchShape) -> BatchShape:
        """The shape of a plan, with what runs on adapters."""
        tokens, adapters = adapters_of(plan, self._slots[plan.rows])
        return replace(shape, adapter_tokens=tokens, adapters=adapters) if tokens else shape


def state_copies(plan: BatchPlan) -> float:
    """States that are copied with a plan: to start from, and to be left behind. What a transfer brought stays.

    Half of one for each draft, behind which a state is written, and none read.
    """
    copies, changes = 0.0, plan.hybrid
    if changes is not None:
        copied = (changes.state_sources >= 0) & (changes.state_sources != changes.state_slots)
        copies += int(np.count_nonzero(copied)) + len(changes.checkpoint_slots)
    if plan.speculation is not None:
        copies += int(plan.speculation.drafted().sum()) / 2.0
    return copies


def extend_shape_of(plan: BatchPlan) -> BatchShape:
    """The shape of a plan with rows that extend first, and perhaps rows that decode behind them."""
    extending = plan.extend_rows
    tokens = context_tokens = pairs = 0
    for start, stop in zip(plan.starts[:extending].tolist(), plan.stops[:extending].tolist(), strict=True):
        new = stop - start
        tokens += new
        context_tokens += start
        pairs += new * start + new * (new + 1) // 2
    return BatchShape(
        extend_rows=extending,
        extend_tokens=tokens,
        extend_context_tokens=context_tokens,
        extend_pairs=pairs,
        decode_rows=len(plan.rows) - extending,
        decode_context_tokens=int(np.add.reduce(plan.starts[extending:])) if extending < len(plan.rows) else 0,
        sampled_rows=len(plan.sample_rows),
    )
