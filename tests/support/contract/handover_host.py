"""The product's two sides of a handover, with cores, over links in memory, under the machine of transfers.

`PrefillSide` and `DecodeSide` are the product's. The host around each is its loop without threads; pages are
copied when a test lets them, in the order in which that was ordered. Unlike in a fleet, each side finds out by itself
how a transfer ends, so the machine also has what a link that breaks leaves behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import (
    BatchPlan,
    CancelTransfer,
    FinishRequest,
    LaunchBatch,
    RejectRequest,
    StartTransfer,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    BatchFinished,
    LaneReady,
    Observed,
    ObservedEvent,
    RequestArrived,
    RequestCancelled,
    TokenIds,
    TransferAdvanced,
)
from lockstep.core.scheduler.engine import Engine
from lockstep.host.batches import BatchResult
from lockstep.host.handover import decode, prefill
from lockstep.host.handover.decode import DecodeSide
from lockstep.host.handover.kv import Fetch, PagesStaged
from lockstep.host.handover.prefill import PrefillSide
from lockstep.host.handover.results import PromptSink
from lockstep.host.handover.wire import LinkMessage, Outcome, PageLayout, StagingPlace
from lockstep.host.media.content import EncoderInput
from tests.support.contract.memory_links import MemoryLink, MemoryNetwork
from tests.support.contract.stepping import stepped
from tests.support.contract.transfer_machine import TransferBounds, TransferMachine, TransferState
from tests.support.contract.transfer_steps import TransferNames
from tests.support.driver.actions import Action
from tests.support.served import STOP_TOKEN, Asked

TURNS_MAX = 3_000
SLOTS = 3
LAYOUT = PageLayout("sum", 2, 16)


class _Copies:
    """A KvTransport, a KvSender and a KvReceiver: copies that end when a test lets them."""

    layout = LAYOUT
    pages_per_slot = 64
    beside_per_slot = ()
    places = (StagingPlace("memory", "here", SLOTS, 1024),)

    def __init__(self, copied: Callable[[str, int], None]) -> None:
        self.due: list[Callable[[], None]] = []
        self._copied = copied  # called with "stage" or "move", and the room

    def sender(self, peer: str) -> _Copies:
        return self

    def receiver(self, layout: PageLayout, places: tuple[StagingPlace, ...]) -> _Copies:
        return self

    def stage(self, slot: int, pages: Any, done: Any, block: int = 0) -> None:
        room = done.args[0].room

        def end() -> None:
            self._copied("read" if room.stopping else "stage", room.number)
            done(PagesStaged())

        self.due.append(end)

    def fetch(self, order: Fetch, cancelled: Callable[[], bool], done: Any) -> None:
        room = done.args[0]

        def end() -> None:
            if not cancelled():
                self._copied("move", room.number)
            done("")

        self.due.append(end)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class _Loop:
    """One engine and its host's loop."""

    side: str  # p or d
    engine: Engine
    copies: _Copies
    handover: Any = None
    inbox: list[Callable[[], None]] = field(default_factory=list)
    device: list[BatchPlan] = field(default_factory=list)
    sinks: dict[int, PromptSink] = field(default_factory=dict)
    rooms: list[int] = field(default_factory=list)  # by request id
    fold: Callable[[ObservedEvent], None] = lambda event: None

    def put_fact(self, make: Callable[[int], ObservedEvent]) -> None:
        self.inbox.append(lambda: self.fold(make(self.engine.now_us)))

    def submit(self, event: RequestArrived, *sinks: PromptSink, contents: Sequence[EncoderInput] = ()) -> int:
        number = len(self.rooms)
        assert event.transfer_room is not None
        self.rooms.append(event.transfer_room)
        self.sinks[number] = sinks[0] if sinks else PromptSink(lambda reason: None)
        arrived = msgspec.structs.replace(event, request_id=number, time_us=self.engine.now_us)
        self.inbox.append(lambda: self.fold(arrived))
        return number

    def cancel(self, number: int) -> None:
        self.inbox.append(lambda: self.fold(RequestCancelled(self.engine.now_us, number)))

    def extras_of(self, number: int) -> None:
        """No results beside tokens are requested."""

    def take_first_token(self, number: int, token: int, results: object) -> tuple[bool, bool]:
        """No stop texts are watched."""
        return False, False


class HandoverHost:
    """A prefill and a decode engine with their handover."""

    def __init__(self, prefill_config: SchedConfig, decode_config: SchedConfig, *, check: bool = True) -> None:
        """`check`: all invariants of the cores after every event."""
        self.check = check
        self.machine = TransferMachine(
            TransferBounds(
                page_tokens=prefill_config.page_size,
                pages=prefill_config.pages,
                depth=prefill_config.overlap_depth,
                allocates_first=prefill_config.transfer_allocation != "prefill_complete",
            )
        )
        self.state: TransferState = self.machine.first()
        self.steps: list[Action] = []
        self.marks: set[str] = set()
        self.names = TransferNames(prefill_config.page_size)
        self.asked: list[Asked] = []  # by room
        self.network = MemoryNetwork()
        self.loops = {
            side: _Loop(side, Engine(config), _Copies(self._copied))
            for side, config in (("p", prefill_config), ("d", decode_config))
        }
        for loop in self.loops.values():
            loop.fold = partial(self.fold, loop)
        p, d = self.loops["p"], self.loops["d"]
        p.handover = PrefillSide(p.copies, number=0)
        d.handover = DecodeSide(d.copies, lambda number: "memory", number=1)
        for loop in (p, d):
            loop.handover.attach(loop)
        self.network.accept = p.handover.accept

    def _patched(self) -> Any:
        """The product's links are those in memory while this lasts."""
        return _Patched(self.network, self._sent)

    # ---------------------------------------------------------------------------------------------------------- inputs

    def arrive_in(self, asked: Asked) -> None:
        """A request arrives at the decode engine, which sends it to the prefill engine."""
        room, d = len(self.asked), self.loops["d"]
        self.asked.append(asked)
        self.do(("room", self.names.chain(asked.prompt), len(asked.prompt)))
        event = RequestArrived(
            time_us=0,
            request_id=-1,
            prompt=TokenIds(np.array(asked.prompt, np.int32).tobytes()),
            max_new_tokens=asked.max_new,
            stop_token_ids=(STOP_TOKEN,),
            transfer_room=room,
        )
        d.handover.route(room, 0)
        d.submit(event)
        self.take(d.side, all_of=True)

    def take(self, side: str, *, all_of: bool = False) -> bool:
        """A host takes the next item of its inbox, or all of them. Returns False if there is none."""
        loop, taken = self.loops[side], False
        with self._patched():
            while loop.inbox and (all_of or not taken):
                taken = True
                loop.inbox.pop(0)()
        return taken

    def cancel(self, side: str, choice: int) -> None:
        """A live request of an engine is cancelled."""
        live = list(self.loops[side].engine.requests)
        if live:
            self.loops[side].cancel(live[choice % len(live)])

    def slot(self, side: str) -> None:
        """Offer a launch slot."""
        loop = self.loops[side]
        if len(loop.engine.in_flight) <= loop.engine.config.overlap_depth:
            with self._patched():
                self.fold(loop, LaneReady(loop.engine.now_us))

    def result(self, side: str, *, error: bool = False) -> bool:
        """Deliver the oldest result of an engine. Returns False if there is none."""
        loop = self.loops[side]
        if not loop.device:
            return False
        plan = loop.device.pop(0)
        tokens = [] if error else [self._token(loop, plan, i) for i in plan.sample_rows.tolist()]
        column = np.array(tokens, np.int32)
        failed = "the device failed" if error else ""
        now_us = loop.engine.now_us
        event = BatchFinished(now_us, plan.batch_id, column.tobytes(), generation=plan.generation, error=failed)
        with self._patched():
            self.fold(loop, event)
            loop.handover.collected(BatchResult(plan, failed, column))
        return True

    def _token(self, loop: _Loop, plan: BatchPlan, at: int) -> int:
        asked = self.asked[loop.rooms[int(plan.request_ids[at])]]
        return asked.token(int(plan.stops[at]) - len(asked.prompt))

    def deliver(self, choice: int) -> bool:
        """A frame, or the loss of a link, arrives at one end. Returns False if nothing can."""
        due = [link for link in self.network.links if link.has_news]
        if not due:
            return False
        link = due[choice % len(due)]
        is_loss = not link.inbox
        peer = self.loops["d"].handover._peers.get(0)
        under = list(peer.rooms) if is_loss and peer is not None and peer.link is link else []
        for room in under:
            if not self.state.rooms[room].outcome:
                self.do(("lost", room))
        with self._patched():
            link.deliver()
        return True

    def copy(self, side: str) -> bool:
        """The oldest copy of an engine ends. Returns False if there is none."""
        due = self.loops[side].copies.due
        if due:
            with self._patched():
                due.pop(0)()
        return bool(due)

    def break_link(self, choice: int) -> None:
        """A link breaks; so many frames on the way to each end are lost."""
        for link in self.network.links:
            if not link.is_broken:
                del link.inbox[max(0, len(link.inbox) - choice) :]
                self.marks.add("link broken")
                link.close()

    # --------------------------------------------------------------------------------------------------------- a step

    def fold(self, loop: _Loop, event: Observed) -> None:
        """Pass an event to an engine, and carry out its commands. The machine must allow what comes of it."""
        named = self._named(loop, event)
        is_arrival = isinstance(event, RequestArrived)
        if is_arrival:
            loop.handover.arriving(event)
        step = stepped(loop.engine, event, lambda: self.machine.after(self.state, (loop.side, named, ())))
        self.do((loop.side, named, self.names.commands(loop.side, loop.rooms, step)))
        if self.check:
            invariants.check(loop.engine)
        loop.handover.decided(step)
        for command in step.commands:
            match command:
                case LaunchBatch(plan):
                    loop.device.append(plan)
                case StartTransfer() | CancelTransfer():
                    loop.handover.perform(command)
                case RejectRequest(request_id=number):
                    loop.sinks[number].rejected(command)
                case FinishRequest(reason=reason):
                    self.marks.add(f"{loop.side} ended ({reason})")
        if is_arrival:
            assert isinstance(event, RequestArrived)
            there = [event.request_id] if event.request_id in loop.engine.transfers.all else []
            loop.handover.arrived(event, there)

    def _named(self, loop: _Loop, event: Observed) -> Action:
        if isinstance(event, TransferAdvanced):
            fact = (loop.side, loop.rooms[event.transfer_id], event.status)
            if event.status == "link_down" and fact not in self.state.told:
                self.do(("cut", fact[1]))
                self.marks.add("link_down behind another end")
            self.marks.add(f"{loop.side} {event.status}")
        return self.names.event(loop.side, loop.rooms, event)

    def _sent(self, message: LinkMessage) -> None:
        """The decode engine's host has decided how a transfer ends."""
        if isinstance(message, Outcome):
            if message.status == "done":
                self._pass_over(message.room)
            self.do(("done" if message.status == "done" else "stop", message.room))

    def _copied(self, what: str, number: int) -> None:
        """The next part of a room was read or written, or read in vain."""
        if what == "read":
            self.do(("read", number))
            return
        self._pass_over(number)
        room = self.state.rooms[number]
        self.do((what, number, len(room.staged) if what == "stage" else room.moved))
        self.marks.add(f"part {what}d")

    def _pass_over(self, number: int) -> None:
        """Parts that the receiver has already are not sent."""
        size = self.machine.bounds.page_tokens
        while True:
            room = self.state.rooms[number]
            at = len(room.staged)
            if at == len(room.parts) or -(-room.parts[at].stop // size) > room.start // size or room.moved < at:
                return
            self.do(("stage", number, at))
            self.do(("move", number, at))
            self.marks.add("part passed over")

    def do(self, action: Action) -> None:
        """Make the same step in the machine. Raises: Forbidden, Unsafe."""
        self.steps.append(action)
        self.state = self.machine.followed(self.state, action)

    def do_something(self, rng: random.Random) -> None:
        """Do one possible thing, drawn at random."""
        side, kind = rng.choice("pd"), rng.randrange(5)
        match kind:
            case 0:
                self.slot(side)
            case 1:
                self.result(side)
            case 2:
                self.deliver(rng.randrange(9))
            case 3:
                self.copy(side)
            case 4:
                self.take(side)

    def settle(self) -> None:
        """Everything that is open ends."""
        for _ in range(TURNS_MAX):
            if self._is_over():
                break
            while self.deliver(0):
                pass
            for side in self.loops:
                while self.copy(side):
                    pass
                self.take(side, all_of=True)
                self.slot(side)
                self.result(side)
        else:
            raise AssertionError(f"not at rest: {self.state}")
        wrong = self.machine.at_rest(self.state)
        assert not wrong, wrong
        for loop in self.loops.values():
            invariants.check_quiescent(loop.engine)

    def _is_over(self) -> bool:
        waits = any(link.has_news for link in self.network.links)
        busy = any(
            loop.inbox or loop.device or loop.copies.due or loop.handover.busy or not invariants.is_idle(loop.engine)
            for loop in self.loops.values()
        )
        return not waits and not busy


class _Patched:
    """The product's links are those of a network in memory."""

    def __init__(self, network: MemoryNetwork, sent: Callable[[LinkMessage], None]) -> None:
        def link(*values: Any) -> MemoryLink:
            made = network.link(*values)
            made.sent = sent
            return made

        self._patches = [
            patch.multiple(prefill, PeerLink=link),
            patch.multiple(decode, PeerLink=link, connect=network.connect),
        ]

    def __enter__(self) -> None:
        for one in self._patches:
            one.start()

    def __exit__(self, *error: object) -> None:
        for one in self._patches:
            one.stop()
