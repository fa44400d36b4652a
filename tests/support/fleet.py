"""Prefill and decode engines, each over a tagged KV pool, and a network between them that a test may make bad.

The hosts of a fleet do what docs/contract.md asks of hosts, and nothing more: parts of a prompt move in order, each
once its batch has succeeded and the receiver has pages; what one host tells another arrives in any order, late, or
twice; a link that goes down ends every transfer on it, on both sides. Each move copies prefix ids from cells to cells,
after checking that both engines keep the pages for just this transfer (S31). So a page that was given away too early is
found when it is written or, at the latest, when it is read.

    fleet = Fleet(prefills=[config], decodes=[config])
    fleet.arrive(asked)                    to both halves
    fleet.settle()                         everything that can happen does, in an order of its own
    fleet.answers[asked.key]
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import (
    CancelTransfer,
    CompileGrammar,
    ControlAnswered,
    EncodeMedia,
    FinishRequest,
    LaunchBatch,
    ProposeBatch,
    RejectRequest,
    StartTransfer,
    Step,
    StreamTokens,
    SwapWeights,
)
from lockstep.core.contract.config import CacheTiers, Role, SchedConfig, WritePolicy
from lockstep.core.contract.events import (
    AdapterLoaded,
    ChangeRole,
    ClockAdvanced,
    CloseSession,
    Control,
    ControlRequested,
    EngineRestarted,
    Grammar,
    GrammarReady,
    LaneReady,
    LoadAdapterControl,
    MediaEncoded,
    Observed,
    OpenSession,
    Pause,
    PromptSpan,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestRejected,
    RequestRetracted,
    Resume,
    SamplingParams,
    TokenIds,
    TransferAdvanced,
    TransferMoved,
    TurnStarted,
    UnloadAdapterControl,
    UpdateWeights,
    WeightsSwapped,
)
from lockstep.core.features.disaggregation import TOUCHED
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.driver import drafting, pipelined
from tests.support.exchange import Exchange, seen_by_device
from tests.support.hybrids import pools, splitting
from tests.support.served import STOP_TOKEN, Answer, Asked
from tests.support.tagged_kv import COMPLETED, TaggedKv
from tests.support.tagged_tiers import Move, TaggedTiers

Status = Literal["accepted", "offered", "done", "failed", "link_down"]
ROUNDS_MAX = 5_000


@dataclass
class Sent:
    """A part of a prompt, as its engine ordered it to be sent."""

    command: StartTransfer
    ready: bool = False  # its batch succeeded


@dataclass
class Wire:
    """One room, as the network sees it."""

    room: int
    asked: Asked
    prefill: Member
    decode: Member
    ids: dict[str, int] = field(default_factory=dict)  # by name of a member, its request's id
    parts: list[Sent] = field(default_factory=list)
    moved: int = 0  # parts
    receive: StartTransfer | None = None
    generation: int = 0  # of the decode engine when it gave pages
    outcome: Status | None = None  # the last word to both sides; from then on nobody writes
    first_token: int | None = None
    cancelled: bool = False  # its client left
    about: dict[str, Any] = field(default_factory=dict)  # what more its arrival says, on both engines
    group: list[Wire] = field(default_factory=list)  # the samples of its arrival, itself among them
    prompt_tokens: int = 0
    turn: TurnStarted | None = None  # of a session, which the prefill engine knows nothing of
    spans: tuple[PromptSpan, ...] = ()  # of that turn's whole prompt
    dropped: set[str] = field(default_factory=set)  # engines to which its half never comes
    alone: bool = False  # it ends with its prompt, and goes to a prefill engine only
    grammar_ends: int | None = None  # outputs after which its grammar admits nothing more

    @property
    def wanted(self) -> Answer:
        """What its client must get."""
        asked = self.asked
        if self.alone:
            return Answer("computed", ())
        if self.turn is not None:
            most = self.turn.max_new_tokens
            asked = dataclasses.replace(asked, max_new=most, min_new=min(asked.min_new, most))
        answer, ends = asked.answer, max(self.grammar_ends or 0, asked.min_new)
        count = len(answer.tokens)
        if self.grammar_ends is not None and (ends < count or (ends == count and answer.reason == "length")):
            return Answer("grammar", answer.tokens[:ends])
        return answer


@dataclass
class Member:
    """One engine of a fleet, with its device and its host's books."""

    name: str
    config: SchedConfig
    engine: Engine
    kv: TaggedKv
    by_id: list[Wire] = field(default_factory=list)  # by request id
    controls: dict[int, ControlAnswered | None] = field(default_factory=dict)
    orders: list[WeightsSwapped] = field(default_factory=list)  # answers to come
    steps: int = 0
    events: list[tuple[Observed, bytes]] = field(default_factory=list)
    tiers: TaggedTiers | None = None
    offered: int = -1  # the microbatch that was offered a slot last
    changing: dict[int, str] = field(default_factory=dict)  # by control id, the role it is to take
    compiling: list[CompileGrammar] = field(default_factory=list)  # not answered, as all that follow
    encoding: list[EncodeMedia] = field(default_factory=list)

    @property
    def sends(self) -> bool:
        """Whether it is a prefill engine now."""
        return self.engine.config.role == "prefill"

    @property
    def kind(self) -> str:
        """p or d: what it is now."""
        return "p" if self.sends else "d"

    def answers_due(self) -> list[Observed]:
        """What its host could be told by a compiler, an encoder or the device, each in its order."""
        due: list[Observed] = [GrammarReady(0, command.grammar.digest) for command in self.compiling[:1]]
        due += [MediaEncoded(0, command.digest, "", command.generation) for command in self.encoding[:1]]
        due += [AdapterLoaded(0, load.adapter, load.version, "", self.engine.generation) for load in self.kv.loads[:1]]
        return due

    def tier_moves(self) -> list[Move]:
        """Copies between the tiers of its cache that are under way."""
        return list(self.tiers.moves.values()) if self.tiers is not None else []


@dataclass(frozen=True)
class Told:
    """A fact on its way to a host."""

    wire: Wire
    to: str
    status: Status


class Fleet:
    """Engines, devices and the network between them, in one time."""

    def __init__(
        self,
        prefills: Sequence[SchedConfig],
        decodes: Sequence[SchedConfig],
        *,
        ranks: bool = False,
        check: bool = True,
        restores: bool = False,
    ) -> None:
        """`ranks`: all prefill engines are data-parallel ranks of one, and so are all decode engines.

        `check`: all invariants after every event. `restores`: every engine is dumped and restored before each.
        """
        interned: dict[tuple[object, ...], int] = {}
        self.members: dict[str, Member] = {}
        for kind, configs in (("p", prefills), ("d", decodes)):
            for number, config in enumerate(configs):
                name = f"{kind}{number}"
                if ranks:
                    config = msgspec.structs.replace(config, dp_ranks=len(configs), dp_rank=number)
                kv = TaggedKv(config, self._sampler(name), interned=interned)
                tiers = TaggedTiers(config.tiers, kv) if config.tiers is not msgspec.UNSET else None
                self.members[name] = Member(name, config, Engine(config), kv, tiers=tiers)
        self.exchanges: dict[str, Exchange] = {}  # by name of a rank
        for kind in ("p", "d") if ranks else ():
            names = [name for name in self.members if name[0] == kind]
            self.exchanges |= dict.fromkeys(names, Exchange(names))
        self.check, self.restores = check, restores
        self.now_us = 0
        self.wires: list[Wire] = []
        self.open: list[Wire] = []  # without a last word
        self.told: list[Told] = []  # facts that hosts have not heard yet
        self.stops: list[Wire] = []  # whose writer was asked to stop
        self.heard: list[tuple[str, TransferAdvanced]] = []  # facts that may be repeated
        self.sent: dict[int, list[int]] = {}  # by key: what the client got
        self.answers: dict[int, Answer] = {}  # by key
        self.cached_tokens: dict[int, int] = {}  # by key, of those that were not rejected
        self.marks: Counter[str] = Counter()
        self.steps = 0

    def _sampler(self, name: str) -> Callable[[int, int], int]:
        def sample(request_id: int, position: int) -> int:
            wire = self.members[name].by_id[request_id]
            return wire.asked.token(position - wire.prompt_tokens)

        return sample

    # --------------------------------------------------------------------------------------------------------- clients

    @property
    def prefills(self) -> list[str]:
        """Those that are prefill engines now."""
        return [name for name, member in self.members.items() if member.sends]

    @property
    def decodes(self) -> list[str]:
        """Those that are decode engines now."""
        return [name for name, member in self.members.items() if not member.sends]

    def arrive(
        self,
        asked: Asked,
        prefill: str = "p0",
        decode: str = "d0",
        *,
        late: str = "",
        samples: Sequence[Asked] = (),
        grammar_ends: int | None = None,
        **more: object,
    ) -> Wire:
        """A request comes to both its engines; to the one called `late` not yet, see `arrive_at`.

        `samples`: more of its prompt. A turn of a session comes to its prefill engine when its prompt is known.
        """
        group: list[Wire] = []
        for one in (asked, *samples):
            wire = Wire(len(self.wires), one, self.members[prefill], self.members[decode], about=more, group=group)
            wire.prompt_tokens, wire.grammar_ends = len(asked.prompt), grammar_ends
            group.append(wire)
            self.wires.append(wire)
            self.open.append(wire)
            self.sent[one.key] = []
        for name in (decode,) if "session" in more else (prefill, decode):
            if name != late:
                self.arrive_at(group[0], name)
        return group[0]

    def arrive_alone(self, asked: Asked, name: str, **more: object) -> Wire:
        """A request that wants no token comes to a prefill engine, and is handed to nobody."""
        member = self.members[name]
        wire = Wire(len(self.wires), asked, member, member, about=more, alone=True)
        wire.prompt_tokens, wire.group = len(asked.prompt), [wire]
        self.wires.append(wire)
        self.sent[asked.key] = []
        self.arrive_at(wire, name)
        return wire

    def arrive_at(self, wire: Wire, name: str) -> None:
        """One half of a request comes, with all its samples; the host refuses it for a role its engine has no more."""
        wire = wire.group[0]
        member, asked = self.members[name], wire.asked
        if member.sends != (member is wire.prefill):
            self.marks["came too late for the role"] += 1
            for one in wire.group:
                self._drop(one, member)
            return
        for one in wire.group:
            one.ids[name] = len(member.by_id)
            member.by_id.append(one)
        prompt, about = np.array(asked.prompt, np.int32), dict(wire.about)
        if wire.turn is not None and member is wire.prefill:
            composed = wire.decode.kv.stories[wire.ids[wire.decode.name]].tokens[: wire.prompt_tokens]
            prompt = np.array([token if isinstance(token, int) else 0 for token in composed], np.int32)
            for name_of in ("session", "session_start"):
                about.pop(name_of, None)
            if "logprob_start" in about:
                about["logprob_start"] += wire.turn.kept_tokens
            about["spans"] = wire.spans
        event = RequestArrived(
            time_us=self.now_us,
            request_id=wire.ids[name],
            prompt=TokenIds(prompt.tobytes()),
            max_new_tokens=0 if wire.alone else asked.max_new,
            min_new_tokens=0 if wire.alone else asked.min_new,
            stop_token_ids=(STOP_TOKEN,) if any(one.asked.stops for one in wire.group) else (),
            stream=asked.stream,
            transfer_room=None if wire.alone else wire.room,
            parallel_samples=len(wire.group),
            **about,
        )
        self.fold(member, event)
        for one in wire.group:
            if one.grammar_ends is not None and one.ids[name] in member.kv.stories:
                member.kv.stories[one.ids[name]].grammar_ends = one.grammar_ends

    def _drop(self, wire: Wire, member: Member) -> None:
        """A half of a request will not come."""
        wire.dropped.add(member.name)
        self._end(wire, "failed")
        if member is wire.decode and wire.asked.key not in self.answers:
            self.answers[wire.asked.key] = Answer("transfer", ())

    def late_halves(self) -> list[tuple[Wire, str]]:
        """Halves that have not come yet, and may: a turn's prompt is its prefill engine's once it is known."""
        return [
            (wire, member.name)
            for wire in self.wires
            for member in (wire.prefill, wire.decode)
            if member.name not in wire.ids
            and member.name not in wire.dropped
            and (member is wire.decode or wire.turn is not None or "session" not in wire.about)
        ]

    def due_turns(self) -> list[Wire]:
        """Turns that have begun, and whose prompts their prefill engines have not got yet."""
        return [
            wire
            for wire in self.wires
            if wire.turn is not None and wire.prefill.name not in wire.ids and wire.prefill.name not in wire.dropped
        ]

    def answer(self, member: Member, due: Observed, error: str = "") -> None:
        """A compiler, an encoder or the device answers what an engine's host was ordered."""
        match due:
            case GrammarReady():
                member.compiling.pop(0)
            case MediaEncoded(generation=generation):
                member.encoding.pop(0)
                if generation != member.engine.generation:
                    error = ""
                self.marks[f"encoded at {member.kind}"] += 1
            case AdapterLoaded():
                self.marks[f"adapter {'not ' * bool(error)}loaded at {member.kind}"] += 1
        self.fold(member, msgspec.structs.replace(due, time_us=self.now_us, error=error))

    def cancel(self, wire: Wire, name: str) -> None:
        """The client's leaving is told to one half; the other learns of it through the transfer."""
        wire.cancelled = True
        if name in wire.ids:
            request = self.members[name].engine.requests.get(wire.ids[name])
            kind = self.members[name].kind
            self.marks[f"cancelled at {kind} while {self._stands(wire, name) if request else 'over'}"] += 1
            self.fold(self.members[name], RequestCancelled(self.now_us, wire.ids[name]))

    def _stands(self, wire: Wire, name: str) -> str:
        transfers = self.members[name].engine.transfers
        transfer = transfers.all.get(wire.ids[name])
        return transfer.state if transfer is not None else "running"

    # --------------------------------------------------------------------------------------------------------- devices

    def ready(self, name: str) -> bool:
        """Offer a launch slot, once what was ordered of the host is done. Returns whether a batch was launched."""
        member = self.members[name]
        while member.orders:
            answer = member.orders.pop(0)
            self.fold(member, msgspec.structs.replace(answer, time_us=self.now_us))
        for _ in range(member.engine.config.microbatches):
            member.offered = (member.offered + 1) % member.engine.config.microbatches
            if self.fold(member, LaneReady(self.now_us, member.offered)).launched() is not None:
                return True
        return False

    def hear(self, name: str) -> bool:
        """A rank hears what all of its engine agreed on, if it has not yet."""
        agreed = self.exchanges[name].agreed[name] if name in self.exchanges else []
        if not agreed:
            return False
        self.fold(self.members[name], msgspec.structs.replace(agreed.pop(0), time_us=self.now_us))
        return True

    def finish(self, name: str, error: str = "") -> bool:
        """Deliver the oldest batch of an engine, if there is one; of ranks one that all have launched."""
        member = self.members[name]
        if not member.kv.stream or (name in self.exchanges and not self.exchanges[name].may_end(name)):
            return False
        if name in self.exchanges:
            self.exchanges[name].delivered[name] += 1
        batch_id, sends = member.kv.stream[0].plan.batch_id, member.sends
        step = self.fold(member, member.kv.finished(self.now_us, error=error))
        for wire in self.open:
            for part in wire.parts if wire.prefill is member else ():
                if part.command.after_batch == batch_id and not error:
                    part.ready = True
        for command in step.commands:
            if isinstance(command, StreamTokens) and sends:
                for request_id, token in zip(command.request_ids.tolist(), command.tokens.tolist(), strict=True):
                    member.by_id[request_id].first_token = token
        if (forced := member.kv.tell_forced(self.now_us)) is not None:
            self.fold(member, forced)
        return True

    def clock(self, us: int) -> None:
        """Time passes, and everybody notices."""
        self.now_us += us
        for member in self.members.values():
            self.fold(member, ClockAdvanced(self.now_us))

    def control(self, name: str, control: Control) -> ControlAnswered | None:
        """Ask one engine; the answer, if it came at once."""
        member = self.members[name]
        number = len(member.controls)
        member.controls[number] = None
        if isinstance(control, ChangeRole) and control.role != member.engine.config.role:
            member.changing[number] = control.role
        self.fold(member, ControlRequested(self.now_us, number, control))
        return member.controls[number]

    def restart(self, name: str) -> None:
        """An engine's device is lost, of ranks that of all: every link of it goes down."""
        if name in self.exchanges:
            self.exchanges[name].restart()
        for lost in self.exchanges[name].names if name in self.exchanges else [name]:
            member = self.members[lost]
            for wire in list(self.open):
                if member in (wire.prefill, wire.decode):
                    self._end(wire, "link_down")
            last = ("done", "failed", "link_down")
            self.told = [told for told in self.told if told.to != lost or told.status in last]
            self.fold(member, EngineRestarted(self.now_us, member.engine.generation + 1))

    def move_tier(self, member: Member, rng: random.Random) -> None:
        """A copy between the tiers of an engine's cache ends, not necessarily the oldest."""
        assert member.tiers is not None
        move = rng.choice(member.tier_moves())
        self.marks[f"{member.name[0]} {type(move).__name__}"] += 1
        self.fold(member, member.tiers.answer(move, self.now_us))

    # --------------------------------------------------------------------------------------------------------- network

    def movable(self) -> list[Wire]:
        """Rooms of which a part could move now."""
        return [
            wire
            for wire in self.open
            if wire.receive is not None
            and wire.moved < len(wire.parts)
            and wire.parts[wire.moved].ready
            and (not wire.parts[wire.moved].command.last or wire.first_token is not None)
        ]

    def move(self, wire: Wire) -> None:
        """The next part of a prompt moves, if both engines still keep its pages for it: they must."""
        part, receive = wire.parts[wire.moved].command, wire.receive
        assert receive is not None
        wire.moved += 1
        self._check_kept(wire)
        source, target = wire.prefill.kv, wire.decode.kv
        p, q = source.config.page_size, target.config.page_size
        for position in range(max(part.start_tokens, receive.start_tokens), part.stop_tokens):
            from_page = int(part.pages[position // p - part.start_tokens // p])
            to_page = int(receive.pages[position // q - receive.start_tokens // q])
            target.cells[to_page][position % q] = source.cells[from_page][position % p]
        if part.hybrid is not None:
            self._move_beside(part, receive, source, target)
        self.marks["parts moved"] += 1
        if part.last:
            self._end(wire, "done")

    def _move_beside(self, part: StartTransfer, receive: StartTransfer, source: TaggedKv, target: TaggedKv) -> None:
        """Windows of the part's last pages, and the state with the last part. Pages are equally large on both sides."""
        assert part.hybrid is not None
        assert receive.hybrid is not None
        assert source.hybrid is not None
        assert target.hybrid is not None
        size = source.config.page_size
        assert size == target.config.page_size
        from_pages, to_pages = part.hybrid.window_pages.tolist(), receive.hybrid.window_pages.tolist()
        first = part.start_tokens // size + len(part.pages) - len(from_pages)
        to_first = receive.start_tokens // size + len(receive.pages) - len(to_pages)
        for position in range(max(first * size, part.start_tokens, receive.start_tokens), part.stop_tokens):
            index, at = position // size, position % size
            assert index >= to_first, f"the window of page {index} is sent, {to_first} is the first to receive"
            target.hybrid.cells[to_pages[index - to_first]][at] = source.hybrid.cells[from_pages[index - first]][at]
            self.marks["positions of windows moved"] += 1
        if part.hybrid.state_slot >= 0:
            assert part.last
            target.hybrid.states[receive.hybrid.state_slot] = source.hybrid.states[part.hybrid.state_slot]
            self.marks["states moved"] += 1

    def _check_kept(self, wire: Wire) -> None:
        """S31: what is read and what is written belongs to this transfer, on both sides."""
        for member in (wire.prefill, wire.decode):
            transfers, request_id = member.engine.transfers, wire.ids[member.name]
            transfer = transfers.all.get(request_id)
            state = transfer.state if transfer is not None else "over"
            assert state in TOUCHED, f"S31: room {wire.room} moves, but for {member.name} its transfer is {state}"
            assert transfer is not None
            if member is wire.decode:
                assert wire.receive is not None
                assert set(wire.receive.pages.tolist()) <= set(transfer.pages.tolist())
                assert wire.generation == member.engine.generation, "the device that gave the pages is gone"
                self._check_beside(member, wire.receive, request_id)
                if transfer.state == "quarantined":
                    self.marks["written in quarantine"] += 1
                continue
            self._check_beside(member, wire.parts[wire.moved - 1].command, request_id)
            if transfer.state == "quarantined":
                self.marks["read in quarantine"] += 1

    def _check_beside(self, member: Member, command: StartTransfer, request_id: int) -> None:
        """The same of window pages and slots of state: they are still those of these pages, and locked."""
        hybrid, beside = member.engine.memory.hybrid, command.hybrid
        if beside is None:
            return
        if hybrid.window is not None and beside.window_pages.size:
            pages = command.pages[-beside.window_pages.size :]
            assert hybrid.window.window_of[pages].tolist() == beside.window_pages.tolist(), "S31: windows were given up"
            assert (hybrid.window.locks[pages] > 0).all(), "S31: windows that a transfer touches may be evicted"
        if hybrid.states is not None and beside.state_slot >= 0:
            rows = [row for row, lent in member.engine.memory.lent.items() if lent.request_id == request_id]
            slots = [int(hybrid.states.slot_of[row]) for row in rows] + hybrid.states.coming.get(request_id, [])[:1]
            assert slots == [beside.state_slot], f"S31: a transfer touches slot {beside.state_slot}, its own is {slots}"

    def stop(self, wire: Wire) -> None:
        """The sending host hears that it must stop, and does."""
        self.stops.remove(wire)
        self._end(wire, "failed")

    def drop(self, wire: Wire) -> None:
        """One transfer breaks off."""
        self._end(wire, "link_down")

    def link_down(self, prefill: str, decode: str) -> None:
        """Everything between two engines breaks off."""
        for wire in list(self.open):
            if wire.prefill.name == prefill and wire.decode.name == decode:
                self._end(wire, "link_down")

    def _end(self, wire: Wire, outcome: Status) -> None:
        if wire.outcome is not None:
            return
        wire.outcome = outcome
        self.open.remove(wire)
        for member in (wire.prefill, wire.decode):
            self.told.append(Told(wire, member.name, outcome))

    def tell(self, told: Told) -> None:
        """A host hears a fact, and gives it to its engine; one about a request that has not come yet waits."""
        self.told.remove(told)
        wire, member = told.wire, self.members[told.to]
        if told.to in wire.dropped:
            return
        if told.to not in wire.ids:
            self.told.append(told)
            return
        if told.status == "done" and member is wire.prefill and wire.first_token is None:
            self.told.append(told)
            return
        receive, last = wire.receive, wire.parts[-1].command if wire.parts else None
        event = TransferAdvanced(
            self.now_us,
            wire.ids[told.to],
            (wire.decode if member is wire.prefill else wire.prefill).name,
            0,
            self.steps,
            told.status,
            first_token=wire.first_token if told.status == "done" and member is wire.decode else None,
            start_tokens=receive.start_tokens if told.status == "accepted" and receive is not None else 0,
            weights_version=last.weights_version if told.status == "done" and last is not None else 0,
            cached_tokens=last.cached_tokens if told.status == "done" and last is not None else 0,
            grammar_ended=told.status == "done" and member is wire.decode and wire.grammar_ends == 1,
        )
        self.heard.append((told.to, event))
        if told.status == "done" and member is wire.decode:
            self._pass_results(wire, event)
        self.fold(member, event)

    def _pass_results(self, wire: Wire, event: TransferAdvanced) -> None:
        """With the first token the decode engine's host gets what else came of the prompt, if the KV counts."""
        transfers, request_id = wire.decode.engine.transfers, wire.ids[wire.decode.name]
        transfer = transfers.all.get(request_id)
        if transfer is None or transfer.state != "receiving" or transfer.weights != event.weights_version:
            return
        if wire.decode.engine.memory.weights_version == event.weights_version:
            computed = wire.prefill.kv.stories[wire.ids[wire.prefill.name]]
            here = wire.decode.kv.stories[request_id]
            here.logprobs = list(computed.logprobs)
            here.hidden = [position for position in computed.hidden if position >= here.hidden_from]
            self.marks["results passed on"] += bool(here.logprobs or here.hidden)

    def repeat(self, choice: int) -> None:
        """A host hears again what it heard before."""
        if self.heard:
            name, event = self.heard[choice % len(self.heard)]
            transfers = self.members[name].engine.transfers
            if not transfers.hands_over or (
                event.transfer_id in transfers.all and event.status in ("accepted", "offered")
            ):
                self.marks["repeated while it lives"] += 1
            again = TransferAdvanced(
                self.now_us, event.transfer_id, event.source, 0, event.seq, event.status, 0, event.first_token
            )
            if event.status in ("accepted", "offered") or self._is_over(name, event.transfer_id):
                self.fold(self.members[name], again)

    def _is_over(self, name: str, request_id: int) -> bool:
        """Whether its terminal fact was heard."""
        return any(
            where == name and event.transfer_id == request_id and event.status in ("done", "failed", "link_down")
            for where, event in self.heard
        )

    # ------------------------------------------------------------------------------------------------------------ fold

    def fold(self, member: Member, event: Observed) -> Step:
        """Give an engine one event, perform what follows, check everything."""
        if self.restores:
            data = snapshot.dump(member.engine)
            member.engine = snapshot.restore(data)
            assert snapshot.dump(member.engine) == data
            if member.engine.ranks is not None and self.exchanges[member.name].on_device[member.name] is not None:
                self.exchanges[member.name].on_device[member.name] = member.engine.ranks.held
        step = member.engine.step(event)
        self.steps += 1
        member.steps += 1
        member.events.append((event, step.digest))
        exchange, rounds, seen = self.exchanges.get(member.name), member.engine.ranks, step
        if exchange is not None and rounds is not None:
            seen = seen_by_device(member.kv, rounds, exchange.on_device[member.name], event, step)
            exchange.on_device[member.name] = rounds.held
            if isinstance(event, RanksAgreed):
                exchange.alike(event, rounds)
        if member.tiers is not None:
            member.tiers.before(event, seen)
        member.kv.observe(event, seen)
        if member.tiers is not None:
            member.tiers.observe(event, seen)
        if self.check:
            invariants.check(member.engine)
        if step.decided:
            self._turns(member, step)
        for command in step.commands:
            match command:
                case ProposeBatch() if exchange is not None:
                    exchange.proposed(member.name, command, self.now_us)
                case LaunchBatch(plan) if exchange is not None:
                    exchange.began(member.name, plan.ranks)
                    self.marks[f"{member.name[0]} ran {plan.mode} in a pass of all"] += 1
                case StreamTokens():
                    self._streamed(member, command)
                case CompileGrammar():
                    member.compiling.append(command)
                case EncodeMedia():
                    member.encoding.append(command)
                case FinishRequest() | RejectRequest():
                    self._ended(member, command)
                case StartTransfer():
                    self._started(member, command)
                case CancelTransfer(transfer_id):
                    wire = member.by_id[transfer_id]
                    if wire.outcome is None and wire not in self.stops:
                        self.stops.append(wire)
                case ControlAnswered(control_id):
                    member.controls[control_id] = command
                    if (role := member.changing.pop(control_id, None)) and command.ok:
                        self.marks[f"became {role}"] += 1
                        assert member.engine.config.role == role
                case SwapWeights(version, _, generation):
                    member.orders.append(WeightsSwapped(self.now_us, version, "", generation))
        for decided in step.decided:
            match decided:
                case TransferMoved(state=state, cause=cause):
                    self.marks[f"{member.kind} {state} ({cause})"] += 1
                case RequestRetracted(reason=reason):
                    self.marks[f"{member.kind} retracted ({reason})"] += 1
                case RequestFinished(reason=reason) | RequestRejected(reason=reason):
                    self.marks[f"{member.kind} ended ({reason})"] += 1
        return step

    def _turns(self, member: Member, step: Step) -> None:
        """Turns whose prompts are known now."""
        for decided in step.decided:
            if isinstance(decided, TurnStarted):
                wire = member.by_id[decided.request_id]
                wire.turn, wire.prompt_tokens = decided, decided.prompt_tokens
                request = member.engine.requests.get(decided.request_id)
                wire.spans = request.extras.spans if request is not None and request.extras is not None else ()
                self.marks["turn with kept tokens"] += bool(decided.kept_tokens)

    def _started(self, member: Member, command: StartTransfer) -> None:
        wire = member.by_id[command.transfer_id]
        assert wire.room == command.room
        if command.direction == "receive":
            assert wire.receive is None, f"room {wire.room} is given pages twice"
            wire.receive, wire.generation = command, member.engine.generation
            self.marks["samples that were sent less"] += wire is not wire.group[0] and command.start_tokens > 0
            if wire.outcome is None:
                self.told.append(Told(wire, wire.prefill.name, "accepted"))
            self._compare(wire)
            return
        assert not wire.parts or wire.parts[-1].command.stop_tokens == command.start_tokens, "parts leave a gap"
        wire.parts.append(Sent(command))
        self._compare(wire)
        if command.last and wire.outcome is None:
            self.told.append(Told(wire, wire.decode.name, "offered"))

    def _compare(self, wire: Wire) -> None:
        """KV of another version of the adapter is no good: the hosts do not even begin."""
        if wire.receive is not None and wire.parts:
            if wire.parts[0].command.adapter_version != wire.receive.adapter_version:
                self.marks["adapters differ"] += wire.outcome is None
                self._end(wire, "failed")

    def _streamed(self, member: Member, command: StreamTokens) -> None:
        at = 0
        columns = (command.request_ids.tolist(), command.offsets.tolist(), command.token_counts.tolist())
        for request_id, offset, count in zip(*columns, strict=True):
            if member.by_id[request_id].decode is not member:
                at += count
                continue  # its prefill engine says it too
            got = self.sent[member.by_id[request_id].asked.key]
            assert offset == len(got), f"S20: r{request_id} of {member.name}: a gap or a double at output {offset}"
            got += command.tokens[at : at + count].tolist()
            at += count

    def _ended(self, member: Member, command: FinishRequest | RejectRequest) -> None:
        wire = member.by_id[command.request_id]
        if "session" in wire.about and wire.turn is None:
            self._drop(wire, wire.prefill)
        if member is wire.decode:
            key = wire.asked.key
            assert key not in self.answers, f"S16: {key} ended twice"
            late = isinstance(command, RejectRequest) and command.reason == "grammar"
            self.answers[key] = Answer("grammar timeout" if late else command.reason, tuple(self.sent[key]))
            if isinstance(command, FinishRequest):
                self.cached_tokens[key] = command.cached_tokens

    def check_agreed(self) -> None:
        """L11, of the one thing that two engines do together: both hear that a transfer ended, once, and alike."""
        ends: dict[tuple[str, int], list[str]] = {}
        for name, event in self.heard:
            if event.status in ("done", "failed", "link_down"):
                ends.setdefault((name, event.transfer_id), []).append(event.status)
        for wire in self.wires:
            sides = [one for one in (wire.prefill, wire.decode) if one.name not in wire.dropped and not wire.alone]
            heard = [ends.get((member.name, wire.ids[member.name])) for member in sides]
            expected = [[wire.outcome]] * len(sides)
            assert heard == expected, f"L11: room {wire.room} is {wire.outcome}, its engines heard {heard}"

    # ---------------------------------------------------------------------------------------------------------- settle

    @property
    def idle(self) -> bool:
        return all(invariants.is_idle(member.engine) for member in self.members.values())

    def do_something(self, rng: random.Random) -> None:
        """One thing that can happen, any one: a launch, a result, a move, a fact that is heard."""
        kinds = [
            "ready",
            "finish",
            "finish",
            *["hear", "ready"] * bool(self.exchanges),
            *["tell"] * bool(self.told),
            *["stop"] * bool(self.stops),
        ]
        movable = self.movable()
        kinds += ["move", "move"] * bool(movable)
        tiers = [member for member in self.members.values() if member.tier_moves()]
        kinds += ["tier", "tier"] * bool(tiers)
        due = [(member, answer) for member in self.members.values() for answer in member.answers_due()]
        kinds += ["answer"] * bool(due)
        turns = self.due_turns()
        kinds += ["turn"] * bool(turns)
        match rng.choice(kinds):
            case "answer":
                self.answer(*rng.choice(due), error="no" if rng.random() < 0.1 else "")
            case "turn":
                wire = rng.choice(turns)
                self.arrive_at(wire, wire.prefill.name)
            case "tier":
                self.move_tier(rng.choice(tiers), rng)
            case "ready":
                self.ready(rng.choice(list(self.members)))
            case "hear":
                self.hear(rng.choice(list(self.members)))
            case "finish":
                self.finish(rng.choice(list(self.members)))
            case "tell":
                self.tell(rng.choice(self.told))
            case "stop":
                self.stop(rng.choice(self.stops))
            case "move":
                self.move(rng.choice(movable))

    def settle_until(self, reached: Callable[[], bool], *, stops: bool = True) -> None:
        """Let things happen, in order, until something has; it must come to that. `stops`: writers are told to stop.

        No grammar is compiled.
        """
        for _ in range(ROUNDS_MAX):
            if reached():
                return
            for told in list(self.told):
                self.tell(told)
            if self.movable():
                self.move(self.movable()[0])
            elif stops and self.stops:
                self.stop(self.stops[0])
            for member in self.members.values():
                for due in member.answers_due():
                    if not isinstance(due, GrammarReady) and not reached():
                        self.answer(member, due)
            for wire in self.due_turns():
                self.arrive_at(wire, wire.prefill.name)
            for name in self.members:
                if not reached():
                    self.ready(name)
                while not reached() and any(self.hear(other) for other in self.exchanges):
                    pass
                if not reached():
                    self.finish(name)
        raise AssertionError(f"it never came to that: {self.describe()}")

    def replay(self) -> None:
        """S28, S35: what each engine was told gives the same digests again."""
        for member in self.members.values():
            engine = Engine(member.config)
            for event, digest in member.events:
                assert engine.step(event).digest == digest, f"{member.name} decides otherwise at {event}"

    def settle(self, rng: random.Random | None = None, *, clock_us: int = 0) -> None:
        """Let everything happen that still can, until all is at rest; L1, L7 and L9 say that it comes to that.

        `clock_us`: whether time may pass when nothing else can happen, for those who wait for somebody who is gone.
        """
        rng = rng or random.Random(0)
        for _ in range(ROUNDS_MAX):
            if self.idle:
                break
            before = self.steps
            for wire in self.movable():
                self.move(wire)
            for told in list(self.told):
                self.tell(told)
            for wire in list(self.stops):
                self.stop(wire)
            for member in self.members.values():
                while member.tier_moves():
                    self.move_tier(member, rng)
                while due := member.answers_due():
                    self.answer(member, due[0])
            for wire in self.due_turns():
                self.arrive_at(wire, wire.prefill.name)
            launched = [self.ready(name) for name in self.members]
            while any(self.hear(name) for name in self.exchanges):
                launched.append(True)
            delivered = [self.finish(name) for name in self.members]
            if not any(launched) and not any(delivered) and not self.movable() and clock_us:
                self.clock(clock_us)
            assert self.steps > before
        else:
            raise AssertionError(f"L1: not at rest after {ROUNDS_MAX} rounds: {self.describe()}")
        for member in self.members.values():
            invariants.check_quiescent(member.engine)
            member.kv.check_plans_unchanged()

    def describe(self) -> str:
        """Who waits for what."""
        return "; ".join(
            f"{name}: {list(member.engine.requests)} live, transfers "
            f"{[(one.request_id, one.state) for one in member.engine.transfers.all.values()]}"
            for name, member in self.members.items()
            if member.engine.transfers.hands_over
        )


# ----------------------------------------------------------------------------------------------------- random histories

TROUBLES = ("cancel", "repeat", "link_down", "restart", "error", "lose", "clock", "pause", "resume", "weights", "late")
"""What a history may have beside requests; each seed leaves some out, for they hide one another."""

KIND_TROUBLES = ("adapter", "unload", "session", "close", "role", "role")
"""What histories may have that know requests of every kind."""

ADAPTERS = ("law", "med")
SESSIONS = ("s", "t")
ENDS = (
    "cancelled",
    "transfer",
    "error",
    "draining",
    "too_long",
    "bad_request",
    "session_closed",
    "media",
    "grammar timeout",
)
"""How a request may end that did not get all it wanted."""

EXPECTED_MARKS = (
    *(f"cancelled at p while {state}" for state in ("bootstrap", "accepted", "waiting", "sending", "in_flight")),
    *(f"cancelled at d while {state}" for state in ("awaited", "preallocating", "receiving", "ready", "running")),
    *(f"d ended ({reason})" for reason in ("length", "stop", "cancelled", "transfer", "error")),
    *(f"d retracted ({reason})" for reason in ("pages", "forced", "pause", "restart", "weights")),
    "d over (abandoned)",
    "d quarantined (abandoned)",
    "d over (done)",
    "lost (accepted)",
    "lost (offered)",
    "p quarantined (abandoned)",
    *(f"{kind} in a pass of all" for kind in ("d ran decode", "d ran idle", "d ran prebuilt", "p ran extend")),
    "results passed on",
    "p sending (part_given)",
    "read in quarantine",
    "repeated while it lives",
    "written in quarantine",
    "adapters differ",
    "adapter not loaded at d",
    "became decode",
    "became prefill",
    "came too late for the role",
    "d ended (grammar)",
    "encoded at d",
    "encoded at p",
    "p ended (computed)",
    "samples that were sent less",
    "turn with kept tokens",
    "positions of windows moved",
    "states moved",
)
"""What a campaign must reach, or its histories are too tame."""

TIMEOUTS_US = (None, 1_000, 100_000)
PREEMPTING = {
    "retraction_policy": "priority",
    "enable_priority_preemption": True,
    "priority_preemption_threshold": 1,
}


def random_fleet(
    rng: random.Random,
    kinds: random.Random | None = None,
    *,
    ranks: bool = False,
    beside: random.Random | None = None,
) -> Fleet:
    """Two prefill and two decode engines, small enough that everything is short now and then.

    `kinds`: draws what requests of every kind need, and nothing else differs by it. `ranks`: they are data-parallel
    ranks of one prefill and of one decode engine. `beside`: draws pools beside full attention, of one model for all.
    """
    more: dict[str, Any] = {}
    if kinds is not None:
        more = {
            "max_loras": kinds.choice([None, 1, 2]),
            "encoder_cache_tokens": kinds.choice([None, 8, 30]),
            "session_kv": kinds.choice(["hold", "evictable"]),
            "grammar_timeout_us": kinds.choice([None, 1_000]),
        }
    layers = beside.choice(["window", "state", "both"]) if beside is not None else ""
    window_tokens = beside.choice([1, 2, 4, 5, 8]) if beside is not None and layers != "state" else 0
    page_size = rng.choice([1, 2, 4])
    pages = rng.choice([24, 32, 64]) // page_size + 2
    common: dict[str, Any] = {
        "radix_cache": rng.random() < 0.7,
        "num_reserved_decode_tokens": rng.choice([0, 1, 4, 512]),
        "transfer_allocation": rng.choice(["early", "early", "prefill_complete"]),
        "transfer_failure": rng.choice(["fail", "recompute"]),
        "transfer_slots": rng.choice([None, 1, 2]),
        "bootstrap_timeout_us": rng.choice(TIMEOUTS_US),
        "transfer_timeout_us": rng.choice(TIMEOUTS_US),
        "schedule_policy": rng.choice(["fcfs", "fcfs", "priority"]),
    }

    if kinds is not None and common["radix_cache"]:
        more["retracted_kv"] = kinds.choice(["free", "cache"])

    def config(role: Role) -> SchedConfig:
        made = SchedConfig(
            role=role,
            page_size=page_size,
            pages=rng.choice([pages, pages, 2 * pages]),
            max_running_requests=rng.choice([1, 2, 4]),
            chunked_prefill_size=rng.choice([page_size, 3 * page_size, None]),
            overlap_depth=rng.choice([0, 1, 2]),
            batching=rng.choice(["prefill_first", "mixed", "running_first"]),
            reserve=rng.choice(["ratio", "on_demand", "full"]),
            schedule_conservativeness=rng.choice([0.02, 1.0]),
            retract_every=rng.choice([0, 0, 3]),
            **common,
            **more,
        )
        own = random.Random()
        own.setstate(rng.getstate())
        stages = random.Random(f"stages {own.random()}")  # of its own: what else is drawn is as it would be without
        made = drafting(rng, made, 0.3)
        if stages.random() < 0.25:
            made = pipelined(stages, made)
        if beside is not None:
            made = splitting(made)
            sharing = {"same_step_sharing": made.radix_cache and beside.random() < 0.4}
            preempting = made.schedule_policy == "priority" and beside.random() < 0.5
            made = msgspec.structs.replace(
                made,
                hybrid=pools(beside, made, window_tokens, states=layers != "window"),
                **(sharing | (PREEMPTING if preempting else {})),
            )
        if common["radix_cache"] and rng.random() < 0.3:
            host_pages, policy = rng.choice([2, 16]), rng.choice(get_args(WritePolicy))
            tiers = CacheTiers(
                host_pages=host_pages,
                write_policy=policy,
                storage=rng.random() < 0.5,
                load_tokens_min=rng.choice([1, 4]),
                prefetch_tokens_min=1,
            )
            made = msgspec.structs.replace(made, tiers=tiers)
        return made

    def engines(role: Role) -> list[SchedConfig]:
        if not ranks:
            return [config(role) for _ in range(2)]
        one = config(role)  # what all ranks agree on, all must judge alike
        overlaps = rng.random() < 0.7
        return [msgspec.structs.replace(one, overlap_consecutive_prefills=overlaps or one.pipelines)] * 2

    return Fleet(engines("prefill"), engines("decode"), ranks=ranks)


def random_asked(rng: random.Random, key: int) -> Asked:
    """A request that fits every engine of `random_fleet`."""
    base = 100 * rng.randint(1, 2)
    most = rng.choice([2, 6, 10])
    prompt = tuple(range(base, base + rng.randint(1, 12)))
    max_new = rng.randint(1, most)
    stops = tuple(rng.sample(range(most), rng.choice([0, 0, 0, 1, 2])))
    return Asked(key, prompt, max_new, rng.choice([0, 0, rng.randint(0, max_new)]), stops, rng.random() < 0.8)


def random_kind(rng: random.Random, prompt_tokens: int) -> dict[str, Any]:
    """What a request wants beside tokens: mostly nothing."""
    kind: dict[str, Any] = {}
    if rng.random() < 0.2:
        kind["logprob_start"] = rng.randint(0, prompt_tokens)
    if rng.random() < 0.15:
        kind["return_hidden_states"] = True
    if rng.random() < 0.2:
        kind["sampling"] = SamplingParams(top_logprobs=1)
    return kind


def random_arrival(fleet: Fleet, rng: random.Random, asked: Asked, names: tuple[str, str], **more: Any) -> None:
    """A request of any kind comes: of several samples, a turn, on an adapter, with media, under a grammar, alone."""
    drawn, length = rng.random(), len(asked.prompt)
    if rng.random() < 0.3 and fleet.members[names[0]].config.max_loras:
        more["adapter"] = rng.choice([*ADAPTERS, ""])
    if rng.random() < 0.25:
        more["spans"] = random_spans(rng, length)
    if rng.random() < 0.2:
        name = f"g{rng.randrange(4)}"
        more |= {"grammar": Grammar("regex", name, name.encode()), "grammar_ends": rng.choice([1, 2, 5, 20])}
    if drawn < 0.1:
        more.pop("grammar", None), more.pop("grammar_ends", None), more.pop("late", None)
        alone = dataclasses.replace(asked, min_new=0)
        fleet.arrive_alone(alone, names[0], **(more | {"kind": rng.choice(["generate", "embed", "score"])}))
        return
    if drawn < 0.25:
        samples = [
            dataclasses.replace(asked, key=len(fleet.wires) + number, stops=asked.stops if rng.random() < 0.5 else ())
            for number in range(1, rng.choice([2, 3]))
        ]
        fleet.arrive(asked, *names, samples=samples, **more)
        return
    open_there = list(fleet.members[names[1]].engine.sessions.open)
    if drawn < 0.65 and open_there:
        more["session"] = rng.choice(open_there)
        session = fleet.members[names[1]].engine.sessions.open[more["session"]]
        if rng.random() < 0.3:
            more["session_start"] = rng.randint(0, session.length)
        more["late"] = names[1] if more.pop("late", "") == names[1] else ""
    fleet.arrive(asked, *names, **more)


def random_spans(rng: random.Random, length: int) -> tuple[PromptSpan, ...]:
    """One or two of them, of a few contents; a small encoder cache cannot hold them all."""
    cuts = sorted(rng.sample(range(length + 1), min(2 * rng.choice([1, 2]), (length + 1) // 2 * 2)))
    spans = []
    for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
        content = rng.randrange(3)
        spans.append(PromptSpan(start, stop, "image", sha256(bytes([content])).digest(), content * 3))
    return tuple(spans)


def run_history(
    seed: int, steps: int = 400, *, ranks: bool = False, plain: bool = False, hybrid: bool = False
) -> Fleet:
    """One random history: first anything may happen, then faults stop and all must come to rest (L1, L9).

    `plain`: without requests of every kind, and roles that change; nothing else is drawn differently.
    `ranks`: of one prefill and one decode engine. `hybrid`: with pools beside full attention.
    """
    rng = random.Random(seed)
    kinds = random.Random(f"{seed} kinds")  # of its own: what else happens is as it would be without
    others = None if plain or seed % 4 == 0 else random.Random(f"{seed} others")
    fleet = random_fleet(rng, others, ranks=ranks, beside=random.Random(f"{seed} beside") if hybrid else None)
    troubles = [trouble for trouble in TROUBLES if rng.random() < 0.5]
    arrivals = rng.choice([0.05, 0.2])
    kind_troubles: list[str] = []
    if others is not None:
        kind_troubles = [trouble for trouble in KIND_TROUBLES if others.random() < 0.5]
        for name in ADAPTERS if fleet.members["p0"].config.max_loras else ():
            for member in fleet.members:
                fleet.control(member, LoadAdapterControl(name, 1))
    for _ in range(steps):
        if rng.random() < arrivals and fleet.prefills and fleet.decodes:
            names = rng.choice(fleet.prefills), rng.choice(fleet.decodes)
            late = rng.choice(names) if "late" in troubles and rng.random() < 0.3 else ""
            priority = rng.choice([None, 0, 5, 9])
            asked = random_asked(rng, len(fleet.wires))
            more: dict[str, Any] = {"late": late, "priority": priority, **random_kind(kinds, len(asked.prompt))}
            if others is None:
                fleet.arrive(asked, *names, **more)
            else:
                random_arrival(fleet, others, asked, names, **more)
        elif troubles and rng.random() < 0.15:
            make_trouble(fleet, rng, rng.choice(troubles))
        elif kind_troubles and others is not None and others.random() < 0.05:
            make_trouble(fleet, others, others.choice(kind_troubles))
        else:
            fleet.do_something(rng)
    come_to_rest(fleet, rng)
    return fleet


def make_trouble(fleet: Fleet, rng: random.Random, trouble: str) -> None:
    """One thing goes wrong, or is asked for, if it can be."""
    name = rng.choice(list(fleet.members))
    match trouble:
        case "cancel" if fleet.wires:
            wire = rng.choice(fleet.wires[-6:])
            fleet.cancel(wire, rng.choice([wire.prefill.name, wire.decode.name]))
        case "repeat":
            fleet.repeat(rng.randrange(1000))
        case "link_down" if rng.random() < 0.3:
            everybody = list(fleet.members)
            fleet.link_down(rng.choice(fleet.prefills or everybody), rng.choice(fleet.decodes or everybody))
        case "restart" if rng.random() < 0.2:
            fleet.restart(name)
        case "error":
            fleet.finish(name, error="the device says no")
        case "lose" if fleet.told:
            told = rng.choice(fleet.told)
            if told.status in ("accepted", "offered"):  # the last word is repeated until it is heard
                fleet.told.remove(told)
                fleet.marks[f"lost ({told.status})"] += 1
        case "clock":
            fleet.clock(rng.choice([1, 500, 2_000]))
        case "pause":
            fleet.control(name, Pause(rng.choice(["in_place", "retract"])))
        case "resume":
            fleet.control(name, Resume())
        case "weights":
            version = 1 + fleet.members[name].engine.maintenance.newest_version()
            fleet.control(name, UpdateWeights(version, "w", rng.choice(["wait", "retract", "in_place"])))
        case "late":
            if waiting := fleet.late_halves():
                fleet.arrive_at(*rng.choice(waiting))
        case "adapter":
            adapter = rng.choice(ADAPTERS)
            newest = max(member.kv.versions.get(adapter, 0) for member in fleet.members.values())
            for member in list(fleet.members) if rng.random() < 0.3 else [name]:
                fleet.control(member, LoadAdapterControl(adapter, newest + 1))
        case "unload" if rng.random() < 0.2:
            fleet.control(name, UnloadAdapterControl(rng.choice(ADAPTERS)))
        case "session" if fleet.decodes:
            parent = rng.choice(["", *SESSIONS])
            timeout = rng.choice([None, None, 5_000])
            fleet.control(rng.choice(fleet.decodes), OpenSession(rng.choice(SESSIONS), 100, timeout, parent))
        case "close" if rng.random() < 0.3:
            fleet.control(name, CloseSession(rng.choice(SESSIONS)))
        case "role" if rng.random() < 0.5:
            role: Role = rng.choice(["prefill", "decode"])
            fleet.control(name, ChangeRole(role, rng.choice([0, 1_000, 10_000_000])))


def come_to_rest(fleet: Fleet, rng: random.Random) -> None:
    """No more trouble: pauses end, every half has come, links that lost something go down; then all must end."""
    for name in fleet.members:
        fleet.control(name, Resume())
    while waiting := fleet.late_halves():
        fleet.arrive_at(*waiting[0])
    for mark in ("lost (accepted)", "lost (offered)"):
        if fleet.marks[mark]:
            for prefill in fleet.members:
                for decode in fleet.members:
                    fleet.link_down(prefill, decode)
    fleet.settle(rng)
    while fleet.told or fleet.stops:  # last words that nobody waits for any more
        for wire in list(fleet.stops):
            fleet.stop(wire)
        for told in list(fleet.told):
            fleet.tell(told)
    fleet.check_agreed()
    for wire in fleet.wires:
        got, wanted = fleet.answers[wire.asked.key], wire.wanted
        if got.reason in COMPLETED:
            assert got == wanted, f"room {wire.room} got {got}, wanted {wanted}"
        else:
            assert got.tokens == wanted.tokens[: len(got.tokens)], f"room {wire.room} got {got}, wanted {wanted}"
            assert got.reason in ENDS, got
            assert got.reason != "cancelled" or wire.cancelled
