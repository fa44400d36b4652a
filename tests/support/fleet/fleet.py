"""Prefill and decode engines, each over a tagged KV pool, and a network between them that a test may disturb.

The hosts of a fleet do what docs/contract.md requires of hosts, and nothing more. Parts of a prompt move in order, each
once its batch has succeeded and the receiver has pages. Messages between hosts arrive in any order, late, or twice. A
link that goes down ends every transfer on it, on both sides. Each move copies prefix ids from cells to cells,
after checking that both engines keep the pages for just this transfer (S31). So a page that was freed too early is
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
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    AdapterLoaded,
    ChangeRole,
    ClockAdvanced,
    Control,
    ControlRequested,
    EngineRestarted,
    GrammarReady,
    LaneReady,
    MediaEncoded,
    Observed,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestRejected,
    RequestRetracted,
    TokenIds,
    TransferAdvanced,
    TransferMoved,
    TurnStarted,
    WeightsSwapped,
)
from lockstep.core.features.disaggregation import TOUCHED
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.exchange import Exchange, seen_by_device
from tests.support.fleet.wires import Member, Sent, Status, Told, Wire
from tests.support.served import STOP_TOKEN, Answer, Asked
from tests.support.tagged_kv import TaggedKv
from tests.support.tagged_tiers import TaggedTiers

ROUNDS_MAX = 5_000


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
        self.open: list[Wire] = []  # without a final fact
        self.told: list[Told] = []  # facts that hosts have not received yet
        self.stops: list[Wire] = []  # their writers were ordered to stop
        self.heard: list[tuple[str, TransferAdvanced]] = []  # facts that may be repeated
        self.sent: dict[int, list[int]] = {}  # by key: the tokens that the client got
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
        """Names of the engines that are prefill engines now."""
        return [name for name, member in self.members.items() if member.sends]

    @property
    def decodes(self) -> list[str]:
        """Names of the engines that are decode engines now."""
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
        """A request arrives at both its engines; at the one named `late` later, see `arrive_at`.

        `samples`: more of its prompt. A turn of a session arrives at its prefill engine when its prompt is known.
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
        """A request without output arrives at a prefill engine, and is not handed over."""
        member = self.members[name]
        wire = Wire(len(self.wires), asked, member, member, about=more, alone=True)
        wire.prompt_tokens, wire.group = len(asked.prompt), [wire]
        self.wires.append(wire)
        self.sent[asked.key] = []
        self.arrive_at(wire, name)
        return wire

    def arrive_at(self, wire: Wire, name: str) -> None:
        """One half of a request arrives, with all its samples; the host refuses it for a role that its engine lost."""
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
        """A half of a request will not arrive."""
        wire.dropped.add(member.name)
        self._end(wire, "failed")
        if member is wire.decode and wire.asked.key not in self.answers:
            self.answers[wire.asked.key] = Answer("transfer", ())

    def late_halves(self) -> list[tuple[Wire, str]]:
        """Halves that have not arrived yet, and may: a turn's prompt is its prefill engine's once it is known."""
        return [
            (wire, member.name)
            for wire in self.wires
            for member in (wire.prefill, wire.decode)
            if member.name not in wire.ids
            and member.name not in wire.dropped
            and (member is wire.decode or wire.turn is not None or "session" not in wire.about)
        ]

    def due_turns(self) -> list[Wire]:
        """Turns that have begun, with prompts that their prefill engines have not received yet."""
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
        """Cancel a request at one half; the other half is informed through the transfer."""
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
        """Offer a launch slot, once the orders of the host are done. Returns whether a batch was launched."""
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
        """Deliver the next agreement of all ranks to a rank. Returns False if there is none."""
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
        """Time passes, and every engine observes it."""
        self.now_us += us
        for member in self.members.values():
            self.fold(member, ClockAdvanced(self.now_us))

    def control(self, name: str, control: Control) -> ControlAnswered | None:
        """Submit a control to one engine; return the answer if it is immediate."""
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
        """Check that window pages and state slots of a transfer still belong to its pages, and are locked."""
        hybrid, beside = member.engine.memory.hybrid, command.hybrid
        if beside is None:
            return
        if hybrid.window is not None and beside.window_pages.size:
            pages = command.pages[-beside.window_pages.size :]
            assert hybrid.window.window_of[pages].tolist() == beside.window_pages.tolist(), "S31: windows were given up"
            assert (hybrid.window.locks[pages] > 0).all(), "S31: windows that a transfer touches may be evicted"
        if hybrid.states is not None and beside.state_slot >= 0:
            rows = [row for row, lent in member.engine.memory.deferred.lent.items() if lent.request_id == request_id]
            slots = [int(hybrid.states.slot_of[row]) for row in rows] + hybrid.states.incoming.get(request_id, [])[:1]
            assert slots == [beside.state_slot], f"S31: a transfer touches slot {beside.state_slot}, its own is {slots}"

    def stop(self, wire: Wire) -> None:
        """Deliver the cancel of a transfer to its sender, which ends it as failed."""
        self.stops.remove(wire)
        self._end(wire, "failed")

    def drop(self, wire: Wire) -> None:
        """One transfer is interrupted."""
        self._end(wire, "link_down")

    def link_down(self, prefill: str, decode: str) -> None:
        """Everything between two engines is interrupted."""
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
        """Deliver a fact to a host, which passes it to its engine. Facts about a request that has not arrived wait."""
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
        """With the first token, pass the prompt's other results to the decode engine's host, if its KV is valid."""
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
        """Deliver a fact to a host again."""
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
        """Return whether the final fact of a transfer was delivered."""
        return any(
            where == name and event.transfer_id == request_id and event.status in ("done", "failed", "link_down")
            for where, event in self.heard
        )

    # ------------------------------------------------------------------------------------------------------------ fold

    def fold(self, member: Member, event: Observed) -> Step:
        """Pass an event to an engine, carry out the commands, check everything."""
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
            invariants.check_wake(member.engine, step)
        if step.decided:
            self._turns(member, step)
        if member.config.hybrid is not msgspec.UNSET and member.config.radix_cache:
            self._check_owed(member, step)
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

    def _check_owed(self, member: Member, step: Step) -> None:
        """A request that goes on from a received state leaves a checkpoint at the end of the next page.

        The state itself is none if the prompt ends within a page. Without a slot there is no checkpoint. Which page a
        verified batch passes is known once its drafts are.
        """
        states, page_size = member.engine.memory.hybrid.states, member.config.page_size
        for decided in step.decided:
            match decided:
                case TransferMoved(request_id=one, state="ready", cause="done") if not member.sends:
                    prompt = member.by_id[one].prompt_tokens
                    if states is not None and prompt % page_size:
                        member.owing[one] = (prompt // page_size + 1) * page_size
                case TransferMoved(request_id=one, state="over", cause="abandoned"):  # it computes its prompt itself
                    member.owing.pop(one, None)
                case RequestRetracted(request_id=one) | RequestFinished(request_id=one):
                    member.owing.pop(one, None)
        plan = step.launched()
        if plan is None or plan.speculation is not None or not member.owing:
            return
        left = plan.hybrid.checkpoint_index.tolist() if plan.hybrid is not None else []
        for index, one in enumerate(plan.request_ids.tolist()):
            due = member.owing.get(one)
            if due is None or int(plan.stops[index]) < due:
                continue
            del member.owing[one]
            if int(plan.starts[index]) >= due:  # passed in a verified batch
                continue
            assert states is not None
            if states.pool.free_count or states.idle.size:
                self.marks["received state is followed by a checkpoint"] += 1
                assert index in left, f"r{one} of {member.name} passes {due} behind a received state: no checkpoint"

    def _turns(self, member: Member, step: Step) -> None:
        """Note the turns that start in this Step: their prompts are known now."""
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
        """KV of another version of the adapter cannot be used: the hosts do not begin the transfer."""
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
                continue  # its prefill engine reports it too
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
        """L11 for transfers, the joint operation of two engines: both receive its end, once, with the same outcome."""
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
        """Do one possible thing, drawn at random: a launch, a result, a move, a delivered fact."""
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
        """Do possible things, in order, until the condition holds. `stops`: also deliver cancels to senders.

        No grammar is compiled. Raises: AssertionError if nothing is possible before.
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
        """S28, S35: check that the events of each engine give equal digests again."""
        for member in self.members.values():
            engine = Engine(member.config)
            for event, digest in member.events:
                assert engine.step(event).digest == digest, f"{member.name} decides otherwise at {event}"

    def settle(self, rng: random.Random | None = None, *, clock_us: int = 0) -> None:
        """Do everything that is possible, until nothing is left; by L1, L7 and L9 that state is reached.

        `clock_us`: time that passes when nothing else is possible, for requests that wait for an engine that is down.
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
        """The live requests and transfers of each engine, for messages."""
        return "; ".join(
            f"{name}: {list(member.engine.requests)} live, transfers "
            f"{[(one.request_id, one.state) for one in member.engine.transfers.all.values()]}"
            for name, member in self.members.items()
            if member.engine.transfers.hands_over
        )
