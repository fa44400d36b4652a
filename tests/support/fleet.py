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

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from lockstep.core import invariants, snapshot
from lockstep.core.commands import (
    CancelTransfer,
    ControlAnswered,
    FinishRequest,
    RejectRequest,
    StartTransfer,
    Step,
    StreamTokens,
    SwapWeights,
)
from lockstep.core.config import CacheTiers, Role, SchedConfig, WritePolicy
from lockstep.core.disaggregation import TOUCHED
from lockstep.core.engine import Engine
from lockstep.core.events import (
    ClockAdvanced,
    Control,
    ControlRequested,
    EngineRestarted,
    LaneReady,
    Observed,
    Pause,
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
    UpdateWeights,
    WeightsSwapped,
)
from tests.support.driver import drafting
from tests.support.served import STOP_TOKEN, Answer, Asked
from tests.support.tagged_kv import TaggedKv
from tests.support.tagged_tiers import Move, TaggedTiers
from tests.support.tagged_tiers import answer_to as moved

Status = Literal["accepted", "offered", "done", "failed", "link_down"]
ROUNDS_MAX = 20_000


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
        check: bool = True,
        restores: bool = False,
    ) -> None:
        """`check`: all invariants after every event. `restores`: every engine is dumped and restored before each."""
        interned: dict[tuple[object, ...], int] = {}
        self.members: dict[str, Member] = {}
        for kind, configs in (("p", prefills), ("d", decodes)):
            for number, config in enumerate(configs):
                name = f"{kind}{number}"
                kv = TaggedKv(config, self._sampler(name), interned=interned)
                tiers = TaggedTiers(config.tiers, kv) if config.tiers is not msgspec.UNSET else None
                self.members[name] = Member(name, config, Engine(config), kv, tiers=tiers)
        self.prefills = [name for name in self.members if name[0] == "p"]
        self.decodes = [name for name in self.members if name[0] == "d"]
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
            asked = self.members[name].by_id[request_id].asked
            return asked.token(position - len(asked.prompt))

        return sample

    # --------------------------------------------------------------------------------------------------------- clients

    def arrive(self, asked: Asked, prefill: str = "p0", decode: str = "d0", *, late: str = "", **more: object) -> Wire:
        """A request comes to both its engines; to the one called `late` not yet, see `arrive_at`."""
        wire = Wire(len(self.wires), asked, self.members[prefill], self.members[decode], about=more)
        self.wires.append(wire)
        self.open.append(wire)
        self.sent[asked.key] = []
        for name in (prefill, decode):
            if name != late:
                self.arrive_at(wire, name)
        return wire

    def arrive_at(self, wire: Wire, name: str) -> None:
        """One half of a request comes."""
        member, asked = self.members[name], wire.asked
        wire.ids[name] = len(member.by_id)
        member.by_id.append(wire)
        event = RequestArrived(
            time_us=self.now_us,
            request_id=wire.ids[name],
            prompt=TokenIds(np.array(asked.prompt, np.int32).tobytes()),
            max_new_tokens=asked.max_new,
            min_new_tokens=asked.min_new,
            stop_token_ids=(STOP_TOKEN,) if asked.stops else (),
            stream=asked.stream,
            transfer_room=wire.room,
            **wire.about,
        )
        self.fold(member, event)

    def cancel(self, wire: Wire, name: str) -> None:
        """The client's leaving is told to one half; the other learns of it through the transfer."""
        wire.cancelled = True
        if name in wire.ids:
            request = self.members[name].engine.requests.get(wire.ids[name])
            self.marks[f"cancelled at {name[0]} while {self._stands(wire, name) if request else 'over'}"] += 1
            self.fold(self.members[name], RequestCancelled(self.now_us, wire.ids[name]))

    def _stands(self, wire: Wire, name: str) -> str:
        transfers = self.members[name].engine.transfers
        transfer = transfers.all.get(wire.ids[name]) if transfers is not None else None
        return transfer.state if transfer is not None else "running"

    # --------------------------------------------------------------------------------------------------------- devices

    def ready(self, name: str) -> bool:
        """Offer a launch slot, once what was ordered of the host is done. Returns whether a batch was launched."""
        member = self.members[name]
        while member.orders:
            answer = member.orders.pop(0)
            self.fold(member, msgspec.structs.replace(answer, time_us=self.now_us))
        return self.fold(self.members[name], LaneReady(self.now_us)).launched() is not None

    def finish(self, name: str, error: str = "") -> bool:
        """Deliver the oldest batch of an engine, if there is one."""
        member = self.members[name]
        if not member.kv.stream:
            return False
        batch_id = member.kv.stream[0].plan.batch_id
        step = self.fold(member, member.kv.finished(self.now_us, error=error))
        for wire in self.open:
            for part in wire.parts if wire.prefill is member else ():
                if part.command.after_batch == batch_id and not error:
                    part.ready = True
        for command in step.commands:
            if isinstance(command, StreamTokens) and name[0] == "p":
                for request_id, token in zip(command.request_ids.tolist(), command.tokens.tolist(), strict=True):
                    member.by_id[request_id].first_token = token
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
        self.fold(member, ControlRequested(self.now_us, number, control))
        return member.controls[number]

    def restart(self, name: str) -> None:
        """An engine's device is lost: every link of it goes down."""
        member = self.members[name]
        for wire in list(self.open):
            if member in (wire.prefill, wire.decode):
                self._end(wire, "link_down")
        self.told = [told for told in self.told if told.to != name or told.status in ("done", "failed", "link_down")]
        self.fold(member, EngineRestarted(self.now_us, member.engine.generation + 1))

    def move_tier(self, member: Member, rng: random.Random) -> None:
        """A copy between the tiers of an engine's cache ends, not necessarily the oldest."""
        assert member.tiers is not None
        move = rng.choice(member.tier_moves())
        self.marks[f"{member.name[0]} {type(move).__name__}"] += 1
        self.fold(member, moved(move, self.now_us, member.tiers.found(move)))

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
        self.marks["parts moved"] += 1
        if part.last:
            self._end(wire, "done")

    def _check_kept(self, wire: Wire) -> None:
        """S31: what is read and what is written belongs to this transfer, on both sides."""
        for member in (wire.prefill, wire.decode):
            transfers, request_id = member.engine.transfers, wire.ids[member.name]
            transfer = transfers.all.get(request_id) if transfers is not None else None
            state = transfer.state if transfer is not None else "over"
            assert state in TOUCHED, f"S31: room {wire.room} moves, but for {member.name} its transfer is {state}"
            assert transfer is not None
            if member is wire.decode:
                assert wire.receive is not None
                assert set(wire.receive.pages.tolist()) <= set(transfer.pages.tolist())
                assert wire.generation == member.engine.generation, "the device that gave the pages is gone"
                if transfer.state == "quarantined":
                    self.marks["written in quarantine"] += 1
            elif transfer.state == "quarantined":
                self.marks["read in quarantine"] += 1

    def stop(self, wire: Wire) -> None:
        """The sending host hears that it must stop, and does."""
        self.stops.remove(wire)
        self._end(wire, "failed")

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
        if told.to not in wire.ids:
            self.told.append(told)
            return
        if told.status == "done" and told.to[0] == "p" and wire.first_token is None:
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
            first_token=wire.first_token if told.status == "done" and told.to[0] == "d" else None,
            start_tokens=receive.start_tokens if told.status == "accepted" and receive is not None else 0,
            weights_version=last.weights_version if told.status == "done" and last is not None else 0,
            cached_tokens=last.cached_tokens if told.status == "done" and last is not None else 0,
        )
        self.heard.append((told.to, event))
        if told.status == "done" and member is wire.decode:
            self._pass_results(wire, event)
        self.fold(member, event)

    def _pass_results(self, wire: Wire, event: TransferAdvanced) -> None:
        """With the first token the decode engine's host gets what else came of the prompt, if the KV counts."""
        transfers, request_id = wire.decode.engine.transfers, wire.ids[wire.decode.name]
        transfer = transfers.all.get(request_id) if transfers is not None else None
        if transfer is None or transfer.state != "receiving" or transfer.weights != event.weights_version:
            return
        if wire.decode.engine.memory.weights_version == event.weights_version:
            computed = wire.prefill.kv.stories[wire.ids[wire.prefill.name]]
            here = wire.decode.kv.stories[request_id]
            here.logprobs, here.hidden = list(computed.logprobs), list(computed.hidden)
            self.marks["results passed on"] += bool(here.logprobs or here.hidden)

    def repeat(self, choice: int) -> None:
        """A host hears again what it heard before."""
        if self.heard:
            name, event = self.heard[choice % len(self.heard)]
            transfers = self.members[name].engine.transfers
            if transfers is None or (event.transfer_id in transfers.all and event.status in ("accepted", "offered")):
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
        step = member.engine.step(event)
        self.steps += 1
        member.steps += 1
        member.events.append((event, step.digest))
        if member.tiers is not None:
            member.tiers.before(event, step)
        member.kv.observe(event, step)
        if member.tiers is not None:
            member.tiers.observe(event, step)
        if self.check:
            invariants.check(member.engine)
        for command in step.commands:
            match command:
                case StreamTokens() if member.name[0] == "d":
                    self._streamed(member, command)
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
                case SwapWeights(version, _, generation):
                    member.orders.append(WeightsSwapped(self.now_us, version, "", generation))
        for decided in step.decided:
            match decided:
                case TransferMoved(state=state, cause=cause):
                    self.marks[f"{member.name[0]} {state} ({cause})"] += 1
                case RequestRetracted(reason=reason):
                    self.marks[f"{member.name[0]} retracted ({reason})"] += 1
                case RequestFinished(reason=reason) | RequestRejected(reason=reason):
                    self.marks[f"{member.name[0]} ended ({reason})"] += 1
        return step

    def _started(self, member: Member, command: StartTransfer) -> None:
        wire = member.by_id[command.transfer_id]
        assert wire.room == command.room
        if command.direction == "receive":
            assert wire.receive is None, f"room {wire.room} is given pages twice"
            wire.receive, wire.generation = command, member.engine.generation
            if wire.outcome is None:
                self.told.append(Told(wire, wire.prefill.name, "accepted"))
            return
        assert not wire.parts or wire.parts[-1].command.stop_tokens == command.start_tokens, "parts leave a gap"
        wire.parts.append(Sent(command))
        if command.last and wire.outcome is None:
            self.told.append(Told(wire, wire.decode.name, "offered"))

    def _streamed(self, member: Member, command: StreamTokens) -> None:
        at = 0
        columns = (command.request_ids.tolist(), command.offsets.tolist(), command.token_counts.tolist())
        for request_id, offset, count in zip(*columns, strict=True):
            got = self.sent[member.by_id[request_id].asked.key]
            assert offset == len(got), f"S20: r{request_id} of {member.name}: a gap or a double at output {offset}"
            got += command.tokens[at : at + count].tolist()
            at += count

    def _ended(self, member: Member, command: FinishRequest | RejectRequest) -> None:
        wire = member.by_id[command.request_id]
        if member is wire.decode:
            key = wire.asked.key
            assert key not in self.answers, f"S16: {key} ended twice"
            self.answers[key] = Answer(command.reason, tuple(self.sent[key]))
            if isinstance(command, FinishRequest):
                self.cached_tokens[key] = command.cached_tokens

    def check_agreed(self) -> None:
        """L11, of the one thing that two engines do together: both hear that a transfer ended, once, and alike."""
        ends: dict[tuple[str, int], list[str]] = {}
        for name, event in self.heard:
            if event.status in ("done", "failed", "link_down"):
                ends.setdefault((name, event.transfer_id), []).append(event.status)
        for wire in self.wires:
            heard = [ends.get((member.name, wire.ids[member.name])) for member in (wire.prefill, wire.decode)]
            assert heard == [[wire.outcome]] * 2, f"L11: room {wire.room} is {wire.outcome}, its engines heard {heard}"

    # ---------------------------------------------------------------------------------------------------------- settle

    @property
    def idle(self) -> bool:
        return all(invariants.is_idle(member.engine) for member in self.members.values())

    def do_something(self, rng: random.Random) -> None:
        """One thing that can happen, any one: a launch, a result, a move, a fact that is heard."""
        kinds = ["ready", "finish", "finish", *["tell"] * bool(self.told), *["stop"] * bool(self.stops)]
        movable = self.movable()
        kinds += ["move", "move"] * bool(movable)
        tiers = [member for member in self.members.values() if member.tier_moves()]
        kinds += ["tier", "tier"] * bool(tiers)
        match rng.choice(kinds):
            case "tier":
                self.move_tier(rng.choice(tiers), rng)
            case "ready":
                self.ready(rng.choice(list(self.members)))
            case "finish":
                self.finish(rng.choice(list(self.members)))
            case "tell":
                self.tell(rng.choice(self.told))
            case "stop":
                self.stop(rng.choice(self.stops))
            case "move":
                self.move(rng.choice(movable))

    def settle_until(self, reached: Callable[[], bool], *, stops: bool = True) -> None:
        """Let things happen, in order, until something has; it must come to that. `stops`: writers are told to stop."""
        for _ in range(ROUNDS_MAX):
            if reached():
                return
            for told in list(self.told):
                self.tell(told)
            if self.movable():
                self.move(self.movable()[0])
            elif stops and self.stops:
                self.stop(self.stops[0])
            for name in self.members:
                if not reached():
                    self.ready(name)
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
            launched = [self.ready(name) for name in self.members]
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
            if member.engine.transfers is not None
        )


# ----------------------------------------------------------------------------------------------------- random histories

TROUBLES = ("cancel", "repeat", "link_down", "restart", "error", "lose", "clock", "pause", "resume", "weights", "late")
"""What a history may have beside requests; each seed leaves some out, for they hide one another."""

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
    "results passed on",
    "p sending (part_given)",
    "read in quarantine",
    "repeated while it lives",
    "written in quarantine",
)
"""What a campaign must reach, or its histories are too tame."""

TIMEOUTS_US = (None, 1_000, 100_000)


def random_fleet(rng: random.Random) -> Fleet:
    """Two prefill and two decode engines, small enough that everything is short now and then."""
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
        )
        made = drafting(rng, made, 0.3)
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

    return Fleet([config("prefill") for _ in range(2)], [config("decode") for _ in range(2)])


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


def run_history(seed: int, steps: int = 400) -> Fleet:
    """One random history: first anything may happen, then faults stop and all must come to rest (L1, L9)."""
    rng = random.Random(seed)
    fleet = random_fleet(rng)
    troubles = [trouble for trouble in TROUBLES if rng.random() < 0.5]
    arrivals = rng.choice([0.05, 0.2])
    kinds = random.Random(f"{seed} kinds")  # of its own: what else happens is as it would be without
    for _ in range(steps):
        if rng.random() < arrivals:
            names = rng.choice(fleet.prefills), rng.choice(fleet.decodes)
            late = rng.choice(names) if "late" in troubles and rng.random() < 0.3 else ""
            priority = rng.choice([None, 0, 5, 9])
            asked = random_asked(rng, len(fleet.wires))
            fleet.arrive(asked, *names, late=late, priority=priority, **random_kind(kinds, len(asked.prompt)))
        elif troubles and rng.random() < 0.15:
            make_trouble(fleet, rng, rng.choice(troubles))
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
            fleet.link_down(rng.choice(fleet.prefills), rng.choice(fleet.decodes))
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
            version = 1 + fleet.members[name].engine.maintenance.newest_version(fleet.members[name].engine)
            fleet.control(name, UpdateWeights(version, "w", rng.choice(["wait", "retract", "in_place"])))
        case "late":
            waiting = [(wire, name) for wire in fleet.wires for name in (wire.prefill.name, wire.decode.name)
                       if name not in wire.ids]  # fmt: skip
            if waiting:
                fleet.arrive_at(*rng.choice(waiting))


def come_to_rest(fleet: Fleet, rng: random.Random) -> None:
    """No more trouble: pauses end, every half has come, links that lost something go down; then all must end."""
    for name in fleet.members:
        fleet.control(name, Resume())
    for wire in fleet.wires:
        for name in (wire.prefill.name, wire.decode.name):
            if name not in wire.ids:
                fleet.arrive_at(wire, name)
    for mark in ("lost (accepted)", "lost (offered)"):
        if fleet.marks[mark]:
            for prefill in fleet.prefills:
                for decode in fleet.decodes:
                    fleet.link_down(prefill, decode)
    fleet.settle(rng)
    while fleet.told or fleet.stops:  # last words that nobody waits for any more
        for wire in list(fleet.stops):
            fleet.stop(wire)
        for told in list(fleet.told):
            fleet.tell(told)
    fleet.check_agreed()
    for wire in fleet.wires:
        got, wanted = fleet.answers[wire.asked.key], wire.asked.answer
        if got.reason in ("length", "stop"):
            assert got == wanted, f"room {wire.room} got {got}, wanted {wanted}"
        else:
            assert got.tokens == wanted.tokens[: len(got.tokens)], f"room {wire.room} got {got}, wanted {wanted}"
            assert got.reason in ("cancelled", "transfer", "error"), got
            assert got.reason != "cancelled" or wire.cancelled
