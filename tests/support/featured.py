"""Serves the same requests on one engine, on a prefill and a decode engine, or on ranks, with any features.

A request may require work of the host besides the device: encoders, grammars, adapters, copies between cache tiers,
sessions to open. An `Attendant` does that for each engine, each item by the next pass of the loop. All KV is tagged
and checked where it is read (`tagged_kv.py`), and optionally invariants after every event.

    place = Solo(config)         or Handover([prefill], [decode], ranks=False), or Abreast([config, config])
    play(place, timeline, later)
    place.answers[one.key]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import (
    CompileGrammar,
    EncodeMedia,
    FinishRequest,
    LaunchBatch,
    LoadAdapter,
    LoadFromHost,
    ProposeBatch,
    RejectRequest,
    StartTransfer,
    Step,
    StreamTokens,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    AdapterLoaded,
    Control,
    ControlRequested,
    GrammarReady,
    LaneReady,
    MediaEncoded,
    Observed,
    OpenSession,
    PrefillNegotiated,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestRetracted,
    TokenIds,
    TurnStarted,
)
from lockstep.core.scheduler.engine import Engine
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.wires import Member as FleetMember
from tests.support.rank_group import Member as RankMember
from tests.support.rank_group import RankGroup
from tests.support.served import STOP_TOKEN, Answer, Asked
from tests.support.tagged_kv import TaggedKv
from tests.support.tagged_tiers import TaggedTiers, number_of

ROUNDS_MAX = 3_000
SAMPLE_KEYS = 100  # sample n of request k has the key k + n x SAMPLE_KEYS


class RefusedAtEntry(Exception):
    """An engine rejects a request at its arrival; the message is the reason."""


@dataclass(frozen=True)
class Ask(Asked):
    """A request with the further fields of its arrival. The prompt of a later turn excludes the session's tokens."""

    grammar_ends: int | None = None  # outputs after which its grammar admits nothing more
    about: dict[str, Any] = field(default_factory=dict)  # further fields of RequestArrived

    @property
    def answer(self) -> Answer:
        """Return the answer that the client must get. Stop tokens are checked before a grammar's end and the length."""
        plain = super().answer
        ends = self.grammar_ends
        if ends is None or ends >= len(plain.tokens) + (plain.reason == "length"):
            return plain
        if ends == len(plain.tokens) and plain.reason == "stop":
            return plain
        return Answer("grammar", plain.tokens[:ends])

    @property
    def samples(self) -> list[Ask]:
        """One for each answer."""
        count = self.about.get("parallel_samples", 1)
        return [self if not n else _renamed(self, self.key + n * SAMPLE_KEYS) for n in range(count)]

    @property
    def root(self) -> int:
        """The key of the request that this one follows in the end."""
        return self.after.root if isinstance(self.after, Ask) else self.key


def _renamed(ask: Ask, key: int) -> Ask:
    return Ask(key, ask.prompt, ask.max_new, ask.min_new, ask.stops, ask.stream, None, ask.grammar_ends, ask.about)


def arrival(ask: Ask, request_id: int, time_us: int, **more: Any) -> RequestArrived:
    """Return the event with which the request arrives at an engine."""
    return RequestArrived(
        time_us=time_us,
        request_id=request_id,
        prompt=TokenIds(np.array(ask.prompt, np.int32).tobytes()),
        max_new_tokens=ask.max_new,
        min_new_tokens=ask.min_new,
        stop_token_ids=(STOP_TOKEN,) if ask.stops else (),
        stream=ask.stream,
        **ask.about,
        **more,
    )


class Attendant:
    """What one engine's host does beside running batches."""

    def __init__(self, kv: TaggedKv, tiers: TaggedTiers | None) -> None:
        self.kv, self.tiers = kv, tiers
        self.owed: list[Observed] = []

    def observe(self, step: Step) -> None:
        """Take in what was ordered. Raises RefusedAtEntry for a request that was not taken."""
        for command in step.commands:
            match command:
                case EncodeMedia(digest):
                    self.owed.append(MediaEncoded(0, digest, "", self.kv.generation))
                case CompileGrammar(grammar):
                    self.owed.append(GrammarReady(0, grammar.digest))
                case LoadAdapter(adapter, version):
                    self.owed.append(AdapterLoaded(0, adapter, version, "", self.kv.generation))
                case RejectRequest():
                    raise RefusedAtEntry(f"{command.reason}: {command.message}")

    def answers(self) -> Iterable[Observed]:
        """Everything that is done by now, in order; each must be folded before the next is taken."""
        owed, self.owed = self.owed, []
        yield from owed
        for move in list(self.tiers.moves.values()) if self.tiers is not None else ():
            if self.tiers is not None and number_of(move) in self.tiers.moves:
                yield self.tiers.answer(move, 0)


def mark(marks: Counter[str], engine: Engine, kv: TaggedKv, step: Step) -> None:
    """Count what shows that a feature was at work."""
    microbatches = [batch.plan.microbatch for batch in engine.in_flight]
    marks["launched behind a batch in flight"] += len(microbatches) > len(set(microbatches))
    marks["several microbatches in flight"] += len(set(microbatches)) > 1
    for decided in step.decided:
        match decided:
            case RequestRetracted(reason=reason):
                marks[f"retracted ({reason})"] += 1
            case RequestAdmitted():
                marks["tokens cached"] += decided.cached_tokens
                marks["tokens from host memory"] += decided.host_tokens
            case TurnStarted():
                marks["turns behind others"] += decided.kept_tokens > 0
            case PrefillNegotiated():
                marks["prompts waited for other ranks"] += not decided.allowed
            case RequestFinished(reason=reason):
                marks[f"ended ({reason})"] += 1
    for command in step.commands:
        match command:
            case EncodeMedia():
                marks["media encoded"] += 1
            case LoadAdapter():
                marks["adapters loaded"] += 1
            case LoadFromHost():
                marks["loads from host memory"] += 1
            case StartTransfer(direction="send"):
                marks["parts sent"] += 1
            case ProposeBatch():
                marks["proposed"] += 1
            case LaunchBatch(plan):
                extends = plan.extend_rows
                marks["mixed batches"] += 0 < extends < len(plan.rows)
                marks["two halves"] += plan.halves is not None
                marks["later layers of prompts"] += bool(plan.layers and plan.layers[0])
                final = {*plan.sample_rows.tolist(), *plan.pooled_rows.tolist()}
                marks["prompts split"] += not final.issuperset(range(extends))
                marks["decodes of several steps"] += plan.steps > 1 and extends < len(plan.rows)
                marks["prompt logprobs"] += bool(plan.logprob_spans)
                if plan.speculation is not None:
                    marks["drafts"] += bool(plan.speculation.drafted().any())
                    marks["forced tokens"] += bool(plan.speculation.forced_lengths.any())
                if plan.hybrid is not None:
                    marks["window pages"] += plan.hybrid.pages.size
                    marks["states"] += plan.hybrid.state_rows.size
                    marks["started from a checkpoint"] += bool((plan.hybrid.state_sources >= 0).any())
                marks["read what a batch in flight writes"] += _reads_ahead(kv)


def _reads_ahead(kv: TaggedKv) -> bool:
    """Whether the newest batch extends behind pages of a prompt that another batch in flight has yet to write."""
    if len(kv.stream) < 2:
        return False
    page_size, (*ahead, newest) = kv.config.page_size, kv.stream
    plan = newest.plan
    for row, start in zip(plan.rows[: plan.extend_rows].tolist(), plan.starts.tolist(), strict=False):
        read = set(newest.tables[row][: start // page_size])
        for launched in ahead:
            for other, begins in zip(launched.plan.rows.tolist(), launched.plan.starts.tolist(), strict=True):
                written = launched.pages[other] - set(launched.tables[other][: begins // page_size])
                if other != row and not written.isdisjoint(read):
                    return True
    return False


# --------------------------------------------------------------------------------------------------------- three places


class Place(Protocol):
    """Where requests are served."""

    answers: dict[int, Answer]
    marks: Counter[str]

    def ask(self, control: Control) -> None:
        """Submit a control to every engine."""

    def enter(self, ask: Ask) -> None:
        """A request arrives."""

    def turn(self) -> None:
        """Every host goes once round its loop."""

    @property
    def idle(self) -> bool: ...

    @property
    def engines(self) -> list[Engine]: ...

    @property
    def devices(self) -> list[TaggedKv]: ...


def play(place: Place, timeline: Sequence[Ask | None], later: Iterable[Ask], controls: Iterable[Control] = ()) -> None:
    """Submit controls and requests (None: a pass of the loop); later requests follow the end of those before them.

    Raises: RefusedAtEntry; KvError for a wrong cell or plan; AssertionError if the requests do not end.
    """
    for control in controls:
        place.ask(control)
    waiting = list(later)

    def turn() -> None:
        place.turn()
        due = [ask for ask in waiting if ask.after is not None and ask.after.key in place.answers]
        for ask in due:
            waiting.remove(ask)
            place.enter(ask)

    for moment in timeline:
        if moment is None:
            turn()
        else:
            place.enter(moment)
    for _ in range(ROUNDS_MAX):
        if place.idle and not waiting:
            break
        turn()
    else:
        live = [list(engine.requests) for engine in place.engines]
        raise AssertionError(f"L1: {live} have not ended, {len(waiting)} have not come, after {ROUNDS_MAX} rounds")
    for engine, kv in zip(place.engines, place.devices, strict=True):
        invariants.check_quiescent(engine)
        kv.check_plans_unchanged()


class Solo:
    """One engine."""

    def __init__(self, config: SchedConfig, *, check: bool = False) -> None:
        self.engine = Engine(config)
        self.kv = TaggedKv(config, self._sample)
        self.tiers = TaggedTiers(config.tiers, self.kv) if config.tiers is not msgspec.UNSET else None
        self.attendant = Attendant(self.kv, self.tiers)
        self.check = check
        self.asked: list[Ask] = []  # by request id
        self.sent: dict[int, list[int]] = {}
        self.answers: dict[int, Answer] = {}
        self.marks: Counter[str] = Counter()
        self.controls = 0

    def _sample(self, request_id: int, position: int) -> int:
        return self.asked[request_id].token(position - self.kv.stories[request_id].prompt_tokens)

    @property
    def engines(self) -> list[Engine]:
        return [self.engine]

    @property
    def devices(self) -> list[TaggedKv]:
        return [self.kv]

    @property
    def idle(self) -> bool:
        return invariants.is_idle(self.engine) and not (self.tiers is not None and self.tiers.moves)

    def ask(self, control: Control) -> None:
        self.controls += 1
        self.fold(ControlRequested(0, self.controls, control))

    def enter(self, ask: Ask) -> None:
        event = arrival(ask, len(self.asked), 0)
        self.asked += ask.samples
        self.sent |= {sample.key: [] for sample in ask.samples}
        self.fold(event)
        for number, sample in enumerate(ask.samples):
            self.kv.stories[event.request_id + number].grammar_ends = sample.grammar_ends

    def turn(self) -> None:
        for answer in self.attendant.answers():
            self.fold(answer)
        for number in range(self.engine.config.microbatches):
            while self.fold(LaneReady(0, number)).launched() is not None:
                pass
        if self.kv.stream:
            self.fold(self.kv.finished(0))
            if (forced := self.kv.tell_forced(0)) is not None:
                self.fold(forced)

    def fold(self, event: Observed) -> Step:
        step = self.engine.step(event)
        if self.tiers is not None:
            self.tiers.before(event, step)
        self.kv.observe(event, step)
        if self.tiers is not None:
            self.tiers.observe(event, step)
        self.attendant.observe(step)
        mark(self.marks, self.engine, self.kv, step)
        if self.check:
            invariants.check(self.engine)
        for command in step.commands:
            match command:
                case StreamTokens():
                    self._streamed(command)
                case FinishRequest():
                    key = self.asked[command.request_id].key
                    assert key not in self.answers, f"S16: {key} ended twice"
                    self.answers[key] = Answer(command.reason, tuple(self.sent[key]))
        return step

    def _streamed(self, command: StreamTokens) -> None:
        at = 0
        columns = (command.request_ids.tolist(), command.offsets.tolist(), command.token_counts.tolist())
        for request_id, offset, count in zip(*columns, strict=True):
            got = self.sent[self.asked[request_id].key]
            assert offset == len(got), f"S20: r{request_id}: a gap or a double at output {offset}"
            got += command.tokens[at : at + count].tolist()
            at += count


class Handover(Fleet):
    """Prefill and decode engines; requests that follow one another run on the same two engines."""

    def __init__(
        self, prefills: Sequence[SchedConfig], decodes: Sequence[SchedConfig], *, ranks: bool, check: bool = False
    ) -> None:
        super().__init__(prefills, decodes, ranks=ranks, check=check)

    @property
    def idle(self) -> bool:
        return super().idle and not any(member.tier_moves() for member in self.members.values())

    @property
    def engines(self) -> list[Engine]:
        return [member.engine for member in self.members.values()]

    @property
    def devices(self) -> list[TaggedKv]:
        return [member.kv for member in self.members.values()]

    def ask(self, control: Control) -> None:
        for name in self.decodes if isinstance(control, OpenSession) else self.members:
            self.control(name, control)

    def enter(self, ask: Ask) -> None:
        number = ask.root // 2 % len(self.prefills)
        about = {name: value for name, value in ask.about.items() if name != "parallel_samples"}
        places = self.prefills[number], self.decodes[number]
        self.arrive(ask, *places, samples=ask.samples[1:], grammar_ends=ask.grammar_ends, **about)

    def _ended(self, member: FleetMember, command: FinishRequest | RejectRequest) -> None:
        if isinstance(command, RejectRequest):
            raise RefusedAtEntry(f"{command.reason}: {command.message}")
        super()._ended(member, command)

    def turn(self) -> None:
        for wire in self.movable():
            self.move(wire)
        for told in list(self.told):
            self.tell(told)
        for wire in list(self.stops):
            self.stop(wire)
        for member in self.members.values():
            while due := member.answers_due():
                self.answer(member, due[0])
            for move in member.tier_moves():
                if member.tiers is not None and number_of(move) in member.tiers.moves:
                    self.fold(member, member.tiers.answer(move, 0))
        for wire in self.due_turns():
            self.arrive_at(wire, wire.prefill.name)
        for _ in range(1 + max(member.config.overlap_depth for member in self.members.values())):
            for name, member in self.members.items():
                while self.ready(name):
                    pass
                for number in range(1, member.config.microbatches):
                    while self.fold(member, LaneReady(self.now_us, number)).launched() is not None:
                        pass
            for name in [*self.exchanges] * 2:  # a second time the agreement that follows a verdict
                while self.hear(name):
                    pass
        for name in self.members:
            self.finish(name)

    def fold(self, member: FleetMember, event: Observed) -> Step:
        step = super().fold(member, event)
        mark(self.marks, member.engine, member.kv, step)
        return step


class Abreast(RankGroup):
    """Data-parallel ranks; requests that follow one another run on the same rank."""

    def __init__(self, configs: Sequence[SchedConfig], *, check: bool = False) -> None:
        super().__init__(configs, check=check)
        self.attendants = [Attendant(one.kv, one.tiers) for one in self.members]

    def _sampler(self, rank: int) -> Any:
        def sample(request_id: int, position: int) -> int:
            member = self.members[rank]
            return member.asked[request_id].token(position - member.kv.stories[request_id].prompt_tokens)

        return sample

    @property
    def engines(self) -> list[Engine]:
        return [member.engine for member in self.members]

    @property
    def devices(self) -> list[TaggedKv]:
        return [member.kv for member in self.members]

    @property
    def idle(self) -> bool:
        return super().idle and not any(member.tier_moves() for member in self.members)

    def ask(self, control: Control) -> None:
        for member in self.members:
            self.control(member.rank, control)

    def enter(self, ask: Ask) -> None:
        member = self.members[ask.root // 2 % len(self.members)]
        event = arrival(ask, len(member.asked), self._now(member))
        member.asked += ask.samples
        self.sent |= {sample.key: [] for sample in ask.samples}
        self.fold(member, event)
        for number, sample in enumerate(ask.samples):
            member.kv.stories[event.request_id + number].grammar_ends = sample.grammar_ends

    def turn(self) -> None:
        for member, attendant in zip(self.members, self.attendants, strict=True):
            for answer in attendant.answers():
                self.fold(member, answer)
        for _ in range(max(member.config.launches_max for member in self.members)):
            for member in self.members:
                self.ready(member.rank)
            for member in self.members * 2:  # a second time the agreement that follows a verdict
                while self.hear(member.rank):
                    pass
        for member in self.members:
            if self.finish(member.rank) and (forced := member.kv.tell_forced(self._now(member))) is not None:
                self.fold(member, forced)

    def fold(self, member: RankMember, event: Observed) -> Step:
        step = super().fold(member, event)
        self.attendants[member.rank].observe(step)
        mark(self.marks, member.engine, member.kv, step)
        return step
