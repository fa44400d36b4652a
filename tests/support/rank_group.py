"""Data-parallel ranks, each over a tagged KV pool of its own, and the exchange between their hosts.

The hosts do what docs/contract.md requires of hosts, and nothing more. A proposal is sent to every rank; once all have
proposed a round, each receives the same RanksAgreed, at any later time. Batches are collectives: one ends only when
every rank has launched it, and then on all ranks, though each rank collects it at its own time. So a rank with a launch
that the others do not have waits without end, and `settle` reports it (L11).

    group = RankGroup([config of rank 0, config of rank 1])
    group.arrive(0, asked)                 at one rank
    group.settle()                         everything that can happen does, until nothing is left
    group.answers[asked.key]

After every event the invariants of its engine are checked; after every round, that all ranks have decided alike (S28).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import msgspec
import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import (
    BatchPlan,
    CompileGrammar,
    ControlAnswered,
    CopyToHost,
    FinishRequest,
    LaunchBatch,
    LoadFromHost,
    ProposeBatch,
    Ranks,
    RejectRequest,
    SampleBatch,
    Step,
    StreamTokens,
    SwapWeights,
)
from lockstep.core.contract.config import CacheTiers, SchedConfig, WritePolicy
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    AdmissionDeferred,
    BatchFinished,
    BlocksEvicted,
    ClockAdvanced,
    Control,
    ControlRequested,
    EngineRestarted,
    Grammar,
    GrammarReady,
    LaneReady,
    Observed,
    Pause,
    PrefillNegotiated,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestRejected,
    RequestRetracted,
    Resume,
    TokenIds,
    UpdateWeights,
    WeightsSwapped,
)
from lockstep.core.features.data_parallel import Rounds, draft_passes_of
from lockstep.core.features.two_batch import divided
from lockstep.core.journal import snapshot
from lockstep.core.requests.batching import InFlight
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.draw import drafting, in_halves, pipelined
from tests.support.exchange import seen_by_device
from tests.support.fleet.histories import random_asked
from tests.support.hybrids import hybrid
from tests.support.served import STOP_TOKEN, Answer, Asked
from tests.support.tagged_kv import TaggedKv
from tests.support.tagged_tiers import Move, TaggedTiers

ROUNDS_MAX = 20_000


@dataclass
class Member:
    """One rank, with its device and the records of its host."""

    rank: int
    config: SchedConfig
    engine: Engine
    kv: TaggedKv
    tiers: TaggedTiers | None = None
    asked: list[Asked] = field(default_factory=list)  # by request id
    launched: list[Ranks] = field(default_factory=list)  # of this generation, in order
    delivered: int = 0  # of these
    agreed: list[RanksAgreed] = field(default_factory=list)  # not received yet
    on_device: InFlight | None = None  # proposed, and on the tagged stream already
    controls: dict[int, ControlAnswered | None] = field(default_factory=dict)
    orders: list[WeightsSwapped] = field(default_factory=list)  # answers to come
    events: list[tuple[Observed, bytes]] = field(default_factory=list)
    compiling: list[Grammar] = field(default_factory=list)  # ordered and not answered
    grammars: dict[int, tuple[str, int | None]] = field(default_factory=dict)  # by request: its grammar, its end
    invalid: set[str] = field(default_factory=set)  # grammars that do not compile
    late_us: int = 0  # its clock is behind the others by this much

    @property
    def rounds(self) -> Rounds:
        assert self.engine.ranks is not None
        return self.engine.ranks

    def tier_moves(self) -> list[Move]:
        """Copies between the tiers of its cache that are under way."""
        return list(self.tiers.moves.values()) if self.tiers is not None else []


class RankGroup:
    """Ranks, devices and the exchange between them."""

    def __init__(self, configs: Sequence[SchedConfig], *, check: bool = True, restores: bool = False) -> None:
        """`check`: all invariants after every event. `restores`: every engine is dumped and restored before each."""
        self.members: list[Member] = []
        for rank, config in enumerate(configs):
            config = msgspec.structs.replace(config, dp_ranks=len(configs), dp_rank=rank)
            kv = TaggedKv(config, self._sampler(rank))
            tiers = TaggedTiers(config.tiers, kv) if config.tiers is not msgspec.UNSET else None
            self.members.append(Member(rank, config, Engine(config), kv, tiers))
        self.check, self.restores = check, restores
        self.now_us = 0
        self.generation = 0
        self.round = 0
        self.proposals: dict[int, ProposeBatch] = {}  # of this round, by rank
        self.digests: dict[tuple[int, int], bytes] = {}  # by generation and round: what all have decided by then
        self.passes: list[Ranks] = []  # of this generation: what every rank launches, in order
        self.microbatches: list[int] = []  # and in which microbatch
        self.in_halves: list[bool] = []  # and whether as two halves
        self.verdicts: dict[tuple[int, int], tuple[Any, ...]] = {}  # about prompts, by generation and round
        self.waits_since: dict[tuple[int, int, int], int] = {}  # by generation, rank, slot: the first wait of prompts
        self.sent: dict[int, list[int]] = {}
        self.answers: dict[int, Answer] = {}
        self.cancelled: set[int] = set()
        self.slow_results = False  # batches are launched behind one another more often than not
        self.marks: Counter[str] = Counter()
        self.steps = 0

    def _sampler(self, rank: int) -> Any:
        def sample(request_id: int, position: int) -> int:
            asked = self.members[rank].asked[request_id]
            return asked.token(position - len(asked.prompt))

        return sample

    # --------------------------------------------------------------------------------------------------------- clients

    def arrive(self, rank: int, asked: Asked, *, grammar: str = "", ends: int | None = None, **more: Any) -> int:
        """A request arrives at a rank. Returns its id there.

        `grammar`: its grammar, `ends`: the outputs after which that admits nothing.
        """
        member = self.members[rank]
        member.asked.append(asked)
        self.sent[asked.key] = []
        if grammar:
            more["grammar"] = Grammar("regex", grammar, grammar.encode())
            member.grammars[len(member.asked) - 1] = grammar, ends
        event = RequestArrived(
            time_us=self._now(member),
            request_id=len(member.asked) - 1,
            prompt=TokenIds(np.array(asked.prompt, np.int32).tobytes()),
            max_new_tokens=asked.max_new,
            min_new_tokens=asked.min_new,
            stop_token_ids=(STOP_TOKEN,) if asked.stops else (),
            stream=asked.stream,
            **more,
        )
        self.fold(member, event)
        if event.request_id in member.kv.stories:
            member.kv.stories[event.request_id].grammar_ends = ends
        return event.request_id

    def cancel(self, rank: int, request_id: int) -> None:
        """A request is cancelled."""
        member = self.members[rank]
        if request_id in member.engine.requests:
            self.cancelled.add(member.asked[request_id].key)
            self.marks["cancelled between proposal and launch"] += member.rounds.held is not None
        self.fold(member, RequestCancelled(self._now(member), request_id))

    def _now(self, member: Member) -> int:
        return max(self.now_us - member.late_us, member.engine.now_us)

    # ----------------------------------------------------------------------------------------------------------- hosts

    def ready(self, rank: int, further: int = 0) -> None:
        """Offer a launch slot, once the orders of the host are done.

        It is a slot of the microbatch of this round, or of one that is `ahead` further and not yet due.
        """
        member = self.members[rank]
        while member.orders:
            self.fold(member, msgspec.structs.replace(member.orders.pop(0), time_us=self._now(member)))
        number = (member.rounds.slot + further) % member.config.microbatches
        proposed = member.rounds.proposed
        step = self.fold(member, LaneReady(self._now(member), number))
        if number != member.rounds.slot:
            assert member.rounds.proposed == proposed, "L11: it was not the turn of this microbatch"
            assert not any(isinstance(one, ProposeBatch) for one in step.commands)
            self.marks["offered out of turn"] += 1

    def hear(self, rank: int) -> bool:
        """Deliver the next agreement of all ranks to a host. Returns False if there is none."""
        member = self.members[rank]
        if not member.agreed:
            return False
        event = member.agreed.pop(0)
        self.fold(member, msgspec.structs.replace(event, time_us=self._now(member)))
        return True

    def finish(self, rank: int, error: str = "") -> bool:
        """A host notices the end of its oldest batch, if all ranks have launched that."""
        member = self.members[rank]
        if member.delivered >= len(member.launched) or not self._is_done(member.delivered):
            return False
        event = member.kv.finished(self._now(member), error=error)
        member.delivered += 1
        held, launched = member.rounds.held, len(member.launched)
        step = self.fold(member, event)
        if (forced := member.kv.tell_forced(self._now(member))) is not None:
            self.marks["told what is forced between proposal and launch"] += held is not None
            self.fold(member, forced)
        assert len(member.launched) == launched, "a result launches nothing"
        self.marks["sampled once a result was there"] += any(isinstance(one, SampleBatch) for one in step.commands)
        return True

    def _is_done(self, number: int) -> bool:
        return all(len(member.launched) > number for member in self.members)

    def compiled(self, member: Member, choice: int = 0, error: str = "") -> None:
        """Report an outstanding grammar of a rank as compiled, or as failed."""
        grammar = member.compiling.pop(choice % len(member.compiling))
        if error and member.engine.grammars.known[grammar.digest].error is None:
            member.invalid.add(grammar.source)
            self.marks["grammar refused"] += 1
        self.fold(member, GrammarReady(self._now(member), grammar.digest, error))

    def clock(self, us: int) -> None:
        """Time passes, and every rank observes it."""
        self.now_us += us
        for member in self.members:
            self.fold(member, ClockAdvanced(self._now(member)))

    def control(self, rank: int, control: Control) -> None:
        """Submit a control to one engine."""
        member = self.members[rank]
        number = len(member.controls)
        member.controls[number] = None
        self.fold(member, ControlRequested(self._now(member), number, control))

    def restart(self) -> None:
        """Lose a rank, so that a collective may never end: all ranks restart. Messages in progress may still arrive."""
        self.generation += 1
        self.round, self.proposals, self.passes = 0, {}, []
        self.microbatches, self.in_halves = [], []
        for member in self.members:
            member.launched, member.delivered, member.on_device = [], 0, None
            member.orders = []
            self.fold(member, EngineRestarted(self._now(member), self.generation))

    def raises(self, rank: int) -> None:
        """Give a rank an impossible fact: its state is unchanged, and its host ends the group."""
        member = self.members[rank]
        before = snapshot.dump(member.engine)
        for impossible in (
            BatchFinished(self._now(member), 10**9, b"", generation=self.generation),
            RanksAgreed(self._now(member), 10**9, (), (), self.generation),
        ):
            try:
                member.engine.step(impossible)
            except ContractError:
                self.marks["raised"] += 1
            else:
                raise AssertionError(f"{impossible} was taken for possible")
        assert snapshot.dump(member.engine) == before, "S8: an impossible fact changed something"
        self.marks["raised with a round open"] += bool(self.proposals)
        self.restart()

    def move_tier(self, member: Member, rng: random.Random) -> None:
        """A copy between the tiers of a rank's cache ends, not necessarily the oldest."""
        assert member.tiers is not None
        move = rng.choice(member.tier_moves())
        self.marks["moved between tiers"] += 1
        self.fold(member, member.tiers.answer(move, self._now(member)))

    # ------------------------------------------------------------------------------------------------------------ fold

    def fold(self, member: Member, event: Observed) -> Step:
        """Pass an event to an engine, carry out the commands, check everything."""
        if self.restores:
            data = snapshot.dump(member.engine)
            member.engine = snapshot.restore(data)
            assert snapshot.dump(member.engine) == data
            if member.on_device is not None and member.rounds.held is not None:
                member.on_device = member.rounds.held
        step = member.engine.step(event)
        self.steps += 1
        member.events.append((event, step.digest))
        self._observe(member, event, step)
        if self.check:
            invariants.check(member.engine)
        for command in step.commands:
            match command:
                case StreamTokens():
                    self._streamed(member, command)
                case FinishRequest() | RejectRequest():
                    key = member.asked[command.request_id].key
                    assert key not in self.answers, f"S16: {key} ended twice"
                    self.answers[key] = Answer(command.reason, tuple(self.sent[key]))
                case ControlAnswered(control_id):
                    member.controls[control_id] = command
                case SwapWeights(version, _, generation):
                    member.orders.append(WeightsSwapped(self._now(member), version, "", generation))
                case ProposeBatch():
                    self._proposed(member, command)
                case CompileGrammar(grammar):
                    member.compiling.append(grammar)
                case CopyToHost(blocks=blocks) | LoadFromHost(blocks=blocks) if blocks:
                    self.marks[f"blocks moved ({type(command).__name__})"] += 1
                case LaunchBatch(plan):
                    assert plan.ranks is not None, "S29: a batch without an agreement"
                    if plan.speculation is not None and plan.speculation.forced_lengths.any():
                        self.marks[f"computed forced tokens ({plan.mode})"] += 1
                    self.marks["sampled in the step of its launch"] += command.sample == "deferred" and (
                        plan.sample_after is None
                    )
                    if plan.hybrid is not None:
                        self.marks["checkpoint left"] += bool(plan.hybrid.checkpoint_slots.size)
                        self.marks["started from a checkpoint"] += bool((plan.hybrid.state_sources >= 0).any())
                        self.marks["window page opened"] += bool(plan.hybrid.pages.size)
                    self._launched(member, plan)
                    self.marks[f"ran {plan.mode}{' along' if plan.ranks.extends else ''}"] += 1
                    self.marks[plan.ranks.padding] += 1
                    self.marks["replayed a graph"] += plan.ranks.use_graph
                    if plan.ranks.draft_passes is not msgspec.UNSET:
                        joined = plan.ranks.draft_passes > draft_passes_of(plan)
                        self.marks["ran passes of a drafter for others"] += joined
        for decided in step.decided:
            match decided:
                case PrefillNegotiated():
                    if isinstance(event, RanksAgreed):
                        self._check_wait(member, event, decided)
                    verdict = msgspec.structs.astuple(decided)[2:]
                    self._alike(self.verdicts, (self.generation, decided.round), verdict, "S28: verdicts")
                    self.marks[f"prompts {'went ahead' if decided.allowed else 'waited'} ({decided.situation})"] += 1
                case AdmissionDeferred(reason=reason):
                    self.marks[f"deferred ({reason})"] += 1
                case BlocksEvicted(kind=kind):
                    self.marks[f"evicted ({kind})"] += 1
                case RequestRetracted(reason=reason):
                    self.marks[f"retracted ({reason})"] += 1
                case RequestFinished(reason=reason) | RequestRejected(reason=reason):
                    self.marks[f"ended ({reason})"] += 1
        if isinstance(event, RanksAgreed) and event.generation == self.generation:
            rounds = member.rounds
            self._alike(self.digests, (self.generation, event.round), rounds.digest, "S28: digests of all decisions")
            self.marks["waited for results of an extend"] += rounds.awaits_results
        return step

    def _check_wait(self, member: Member, event: RanksAgreed, decided: PrefillNegotiated) -> None:
        """L5: the wait of prompts for other ranks counts from its first pass on, by the first rank's clock."""
        key, now_us = (event.generation, member.rank, member.rounds.slot), event.wishes[0].time_us
        if decided.passes == 1 and not decided.allowed:
            self.waits_since[key] = now_us
        elif decided.passes:
            expected_us = now_us - self.waits_since[key]
            waited_us = decided.waited_us
            assert waited_us == expected_us, f"L5: prompts wait for {expected_us} us, counted are {waited_us}"

    def _alike(self, known: dict[Any, Any], key: Any, value: Any, what: str) -> None:
        assert known.setdefault(key, value) == value, f"{what} differ in round {key}: {known[key]} and {value}"

    def _observe(self, member: Member, event: Observed, step: Step) -> None:
        seen = seen_by_device(member.kv, member.rounds, member.on_device, event, step)
        member.on_device = member.rounds.held
        if member.tiers is not None:
            member.tiers.before(event, seen)
        member.kv.observe(event, seen)
        if member.tiers is not None:
            member.tiers.observe(event, seen)

    def _proposed(self, member: Member, command: ProposeBatch) -> None:
        assert command.round == self.round, f"L11: rank {member.rank} proposes {command.round}, all are at {self.round}"
        assert member.rank not in self.proposals, f"rank {member.rank} proposes round {self.round} twice"
        self.proposals[member.rank] = command
        if len(self.proposals) < len(self.members):
            return
        proposals = [self.proposals[rank] for rank in range(len(self.members))]
        counts = tuple(one.counts for one in proposals)
        wishes = tuple(one.wish for one in proposals if one.wish is not None)
        self.round, self.proposals = self.round + 1, {}
        for other in self.members:
            other.agreed.append(RanksAgreed(self.now_us, command.round, counts, wishes, self.generation))

    def _launched(self, member: Member, plan: BatchPlan) -> None:
        ranks = plan.ranks
        assert ranks is not None, "S29: a batch without an agreement"
        number = len(member.launched)
        member.launched.append(ranks)
        if number == len(self.passes):
            self.passes.append(ranks)
            self.microbatches.append(plan.microbatch)
            self.in_halves.append(plan.halves is not None)
        assert self.passes[number] == ranks, f"S28: rank {member.rank} runs {ranks}, others {self.passes[number]}"
        where = self.microbatches[number]
        assert plan.microbatch == where, (
            f"S28: rank {member.rank} is in microbatch {plan.microbatch}, others in {where}"
        )
        assert self.in_halves[number] == (plan.halves is not None), f"S38: rank {member.rank} splits alone, or not"
        if plan.halves is not None:
            first, _ = divided(plan)
            tokens = int((first.stops - first.starts).sum())
            assert tokens == ranks.tokens[member.rank] // 2, f"S38: {tokens} tokens of {ranks} in the first half"
            self.marks[f"ran {plan.mode} in halves{' through a prompt' if plan.halves.cut else ''}"] += 1
        flying = {batch.plan.microbatch for batch in member.engine.in_flight}
        if len(flying) == member.config.microbatches > 1:
            self.marks["every microbatch in flight"] += 1
            self.marks["an idle batch among those of every microbatch"] += plan.mode == "idle"

    def _streamed(self, member: Member, command: StreamTokens) -> None:
        at = 0
        columns = (command.request_ids.tolist(), command.offsets.tolist(), command.token_counts.tolist())
        for request_id, offset, count in zip(*columns, strict=True):
            got = self.sent[member.asked[request_id].key]
            assert offset == len(got), f"S20: r{request_id} of rank {member.rank}: a gap or a double at {offset}"
            got += command.tokens[at : at + count].tolist()
            at += count

    # ---------------------------------------------------------------------------------------------------------- settle

    @property
    def idle(self) -> bool:
        return all(invariants.is_idle(member.engine) for member in self.members)

    def do_something(self, rng: random.Random) -> None:
        """One thing that can happen, any one, at any rank."""
        rank = rng.randrange(len(self.members))
        tiers = [member for member in self.members if member.tier_moves()]
        compiling = [member for member in self.members if member.compiling]
        more = [*["tier"] * bool(tiers), *["compiled"] * bool(compiling)]
        launching = ["ready", "ready", "hear", "hear"] * (3 if self.slow_results else 1)
        match rng.choice([*launching, "finish", "finish", *more]):
            case "compiled":
                self.compiled(rng.choice(compiling), rng.randrange(100))
            case "tier":
                self.move_tier(rng.choice(tiers), rng)
            case "ready":
                several = self.members[rank].config.microbatches
                self.ready(rank, rng.randrange(several) if several > 1 and rng.random() < 0.1 else 0)
            case "hear":
                self.hear(rank)
            case "finish":
                self.finish(rank)

    def turn(self) -> None:
        """Every host goes once round its loop, in order: all microbatches are offered a slot."""
        for _ in range(self.members[0].config.microbatches):
            for member in self.members:
                self.ready(member.rank)
            for member in self.members:
                while self.hear(member.rank):
                    pass
        for member in self.members:
            self.finish(member.rank)

    def settle(self, rng: random.Random | None = None) -> None:
        """Do everything that is possible, until nothing is left; by L1, L7, L9 and L11 that state is reached."""
        rng = rng or random.Random(0)
        for _ in range(ROUNDS_MAX):
            if self.idle:
                break
            for member in self.members:
                while member.tier_moves():
                    self.move_tier(member, rng)
                while member.compiling:
                    self.compiled(member)
            self.turn()
        else:
            raise AssertionError(f"L1, L11: not at rest after {ROUNDS_MAX} rounds: {self.describe()}")
        for member in self.members:
            invariants.check_quiescent(member.engine)
            member.kv.check_plans_unchanged()

    def replay(self) -> None:
        """S28, S35: check that the events of each rank give equal digests again, without any other rank."""
        for member in self.members:
            engine = Engine(member.config)
            for event, digest in member.events:
                assert engine.step(event).digest == digest, f"rank {member.rank} decides otherwise at {event}"

    def describe(self) -> str:
        """The live requests of each rank, for messages."""
        return "; ".join(
            f"rank {member.rank}: {list(member.engine.requests)} live, round {member.rounds.round}, "
            f"{len(member.launched)} launched, {member.delivered} delivered, {len(member.agreed)} not heard"
            for member in self.members
        )


# ----------------------------------------------------------------------------------------------------- random histories

TROUBLES = (
    *("cancel", "restart", "raise", "error", "clock", "late clock", "pause", "resume", "weights", "straggler"),
    "grammar",
)
"""What a history may have beside requests; each seed leaves some out, since they hide one another."""

EXPECTED_MARKS = (
    *(f"ended ({reason})" for reason in ("length", "stop", "cancelled", "error")),
    *(f"retracted ({reason})" for reason in ("pages", "forced", "pause", "restart", "weights")),
    *(f"prompts went ahead ({why})" for why in ("all", "along", "idle", "open", "spent", "starved")),
    *(f"prompts waited ({why})" for why in ("full", "mixed", "slots")),
    *("ran extend along", "ran decode", "ran mixed along", "ran idle", "ran idle along", "ran verify"),
    *("max_length", "sum_length", "replayed a graph"),
    *(f"computed forced tokens ({mode})" for mode in ("verify", "mixed")),
    "cancelled between proposal and launch",
    *("checkpoint left", "started from a checkpoint", "window page opened"),
    *(f"deferred ({reason})" for reason in ("state", "window")),
    *(f"evicted ({kind})" for kind in ("state", "window")),
    *(f"blocks moved ({how})" for how in ("CopyToHost", "LoadFromHost")),
    "grammar refused",
    "heard from before a restart",
    "moved between tiers",
    "raised with a round open",
    "sampled in the step of its launch",
    "sampled once a result was there",
    "told what is forced between proposal and launch",
    "waited for results of an extend",
    "every microbatch in flight",
    "an idle batch among those of every microbatch",
    "ran passes of a drafter for others",
)
"""Marks that a campaign must reach, or its histories are too tame."""


PIPELINED_SHARE = 0.25  # of these histories have microbatches


def random_group(rng: random.Random, ranks: int = 4) -> RankGroup:
    """Ranks so small that every resource is short now and then."""
    page_size = rng.choice([1, 2, 4])
    delayer: dict[str, Any] = {}
    if rng.random() < 0.6:
        delayer = {
            "prefill_delayer": True,
            "prefill_delayer_max_delay_passes": rng.choice([1, 3, 30]),
            "prefill_delayer_max_delay_us": rng.choice([200, 5_000_000]),
            "prefill_delayer_token_usage_low_watermark": rng.choice([None, None, 0.3]),
        }
        own = random.Random()  # a generator of its own: all other draws stay the same
        own.setstate(rng.getstate())
        if own.random() < 0.5:
            delayer["prefill_delayer_slots"] = True
        if own.random() < 0.5:
            delayer["prefill_delayer_queue_min_ratio"] = own.choice([0.5, 1.0])
    config = SchedConfig(
        page_size=page_size,
        pages=rng.choice([24, 32, 64]) // page_size + 2,
        radix_cache=rng.random() < 0.7,
        schedule_policy=rng.choice(["fcfs", "fcfs", "priority"]),
        max_running_requests=rng.choice([1, 2, 4]),
        chunked_prefill_size=rng.choice([page_size, 3 * page_size, None]),
        overlap_depth=rng.choice([0, 1, 2]),
        overlap_consecutive_prefills=rng.random() < 0.7,
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        reserve=rng.choice(["ratio", "on_demand", "full"]),
        schedule_conservativeness=rng.choice([0.02, 1.0]),
        retract_every=rng.choice([0, 0, 3]),
        prefill_full_skip_passes=rng.choice([0, 0, 2, 5]),
        dp_ranks=ranks,
        **delayer,
    )
    if "prefill_delayer_queue_min_ratio" in delayer:  # a share of few requests is none
        config = msgspec.structs.replace(config, max_running_requests=6)
    config = drafting(rng, config, 0.2)
    if config.speculates and config.overlap_depth != 1:
        config = msgspec.structs.replace(config, speculative_method="mtp")
    stages = random.Random(f"stages {config!r}")  # a generator of its own: all other draws stay the same
    if stages.random() < PIPELINED_SHARE:
        config = pipelined(stages, config)
    if config.radix_cache and rng.random() < 0.5:
        config = msgspec.structs.replace(config, same_step_sharing=True)
    if config.radix_cache and rng.random() < 0.2:
        host_pages, policy = rng.choice([2, 16]), rng.choice(get_args(WritePolicy))
        tiers = CacheTiers(host_pages=host_pages, write_policy=policy, load_tokens_min=1)
        config = msgspec.structs.replace(config, tiers=tiers)
    pools = random.Random()  # a generator of its own, too
    pools.setstate(rng.getstate())
    if pools.random() < 0.4:
        config = hybrid(pools, config)
    return RankGroup([in_halves(random.Random(f"halves {config!r}"), config)] * ranks)


def run_history(seed: int, steps: int = 600) -> RankGroup:
    """One random history: first anything may happen, then faults stop and all must come to rest (L1, L9, L11)."""
    rng = random.Random(seed)
    group = random_group(rng)
    troubles = [trouble for trouble in TROUBLES if rng.random() < 0.4]
    arrivals = rng.choice([0.02, 0.1])
    skewed = rng.random() < 0.3  # all requests arrive at one rank
    structured = random.Random(f"{seed} grammars")  # a generator of its own: everything else happens as without it
    share = structured.choice([0.0, 0.3, 1.0])
    group.slow_results = structured.random() < 0.5
    if group.members[0].config.ranks_tell_more and structured.random() < 0.7:
        arrivals, skewed = structured.choice([0.06, 0.3]), False  # so that all ranks have prompts now and then
    for key in range(steps):
        if rng.random() < arrivals:
            rank = 1 if skewed else rng.randrange(len(group.members))
            asked = random_asked(rng, key)
            under: dict[str, Any] = {}
            if structured.random() < share:
                asked = replace(asked, min_new=0)
                under = {"grammar": f"g{structured.randrange(6)}", "ends": structured.choice([None, 1, 3, 8])}
            group.arrive(rank, asked, priority=rng.choice([None, 0, 5, 9]), **under)
        elif troubles and rng.random() < 0.08:
            make_trouble(group, rng, rng.choice(troubles))
        else:
            group.do_something(rng)
    come_to_rest(group, rng)
    return group


def make_trouble(group: RankGroup, rng: random.Random, trouble: str) -> None:
    """Cause one failure or submit one control, if that is possible."""
    member = rng.choice(group.members)
    match trouble:
        case "cancel" if member.asked:
            group.cancel(member.rank, rng.randrange(max(0, len(member.asked) - 4), len(member.asked)))
        case "restart" if rng.random() < 0.2:
            group.marks["heard from before a restart"] += any(other.agreed for other in group.members)
            group.restart()
        case "raise" if rng.random() < 0.2:
            group.raises(member.rank)
        case "error":
            group.finish(member.rank, error="the device says no")
        case "clock":
            group.clock(rng.choice([1, 150, 2_000]))
        case "late clock":
            member.late_us = rng.choice([0, 100, 1_000])
        case "pause":
            group.control(member.rank, Pause(rng.choice(["in_place", "retract"])))
        case "resume":
            group.control(member.rank, Resume())
        case "weights":
            version = 1 + member.engine.maintenance.newest_version()
            group.control(member.rank, UpdateWeights(version, "w", rng.choice(["wait", "retract", "in_place"])))
        case "grammar" if member.compiling:
            group.compiled(member, rng.randrange(100), "no such word")
        case "straggler":
            others = [other for other in group.members if other is not member]
            for _ in range(20):
                other = rng.choice(others)
                rng.choice([group.ready, group.hear, group.finish])(other.rank)


def come_to_rest(group: RankGroup, rng: random.Random) -> None:
    """Cause no more failures and end pauses; then every answer must arrive, equal to that of one plain engine."""
    for member in group.members:
        group.control(member.rank, Resume())
    group.settle(rng)
    for member in group.members:
        for number, one in enumerate(member.asked):
            got, wanted = group.answers[one.key], one.answer
            if got.reason == "bad_request":
                assert member.grammars[number][0] in member.invalid
                continue
            _, ends = member.grammars.get(number, ("", None))
            if ends is not None and (
                ends < len(wanted.tokens) or (ends, "length") == (len(wanted.tokens), wanted.reason)
            ):
                wanted = Answer("grammar", wanted.tokens[:ends])
            if got.reason in ("length", "stop", "grammar"):
                assert got == wanted, f"{one.key} got {got}, wanted {wanted}"
            else:
                assert got.tokens == wanted.tokens[: len(got.tokens)], f"{one.key} got {got}, wanted {wanted}"
                assert got.reason in ("cancelled", "error"), got
                assert got.reason != "cancelled" or one.key in group.cancelled
