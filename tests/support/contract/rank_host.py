"""Data-parallel ranks with the product's hub and agreements, over links whose messages a test delivers one by one.

Cores, `RankHub` and `RankAgreement` are the product's; the host around them is its loop without threads: it offers a
slot exactly when `RankAgreement` lets it. Each step must be one that the machine of rounds allows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from unittest.mock import patch

import msgspec
import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import BatchPlan, LaunchBatch, ProposeBatch, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    BatchFinished,
    EngineRestarted,
    LaneReady,
    ObservedEvent,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    TokenRuns,
)
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from lockstep.host import rank_agreement
from lockstep.host.rank_agreement import RankAgreement, RankHub
from tests.support.contract.memory_links import MemoryNetwork
from tests.support.contract.rank_machine import RankBounds, RankMachine, RanksState
from tests.support.contract.stepping import stepped
from tests.support.driver.actions import Action

TURNS_MAX = 2_000
JOIN_S = 3_600.0  # only ends a hang: the process may be stopped meanwhile


@dataclass
class _Seat:
    """One rank: its engine, and the state of its host's loop."""

    number: int
    engine: Engine
    agreement: RankAgreement | None = None
    facts: list[ObservedEvent] = field(default_factory=list)
    device: list[BatchPlan] = field(default_factory=list)
    nothing_new: bool = False

    def put_fact(self, make: Callable[[int], ObservedEvent]) -> None:
        self.facts.append(make(self.engine.now_us))

    def wake(self) -> None:
        """The loop looks by itself."""


class RankHost:
    """A group of ranks under the machine of rounds."""

    def __init__(self, config: SchedConfig, *, check: bool = True) -> None:
        """`config`: of rank 0; `check`: all invariants of the cores after every event."""
        ranks, self.check = config.dp_ranks, check
        self.machine = RankMachine(RankBounds(ranks=ranks, depth=config.overlap_depth, work=0))
        self.state: RanksState = self.machine.first()
        self.steps: list[Action] = []
        self.marks: set[str] = set()
        self.seats = [_Seat(rank, Engine(msgspec.structs.replace(config, dp_rank=rank))) for rank in range(ranks)]
        self._meet()

    def _meet(self) -> None:
        """All ranks join a new hub."""
        self.network = network = MemoryNetwork()
        replaced = {"PeerLink": network.link, "Listener": network.listen, "connect": network.connect}
        with patch.multiple(rank_agreement, **replaced), ThreadPoolExecutor(len(self.seats)) as pool:
            self.hub = RankHub("memory", len(self.seats), lambda: "store")
            joining = [
                pool.submit(RankAgreement, "memory", seat.number, len(self.seats), JOIN_S) for seat in self.seats
            ]
            while not all(one.done() for one in joining):
                for link in list(network.links):
                    if link.inbox:
                        link.deliver()
        for seat, joined in zip(self.seats, joining, strict=True):
            seat.agreement = joined.result()
            seat.agreement.attach(seat, lambda seat=seat: seat.engine.generation)

    # ---------------------------------------------------------------------------------------------------------- inputs

    def arrive(self, rank: int, prompt: int, limit: int) -> None:
        """A request arrives at a rank."""
        engine = self.seats[rank].engine
        number = engine.last_request_id + 1
        runs = TokenRuns((1 + 100 * number, prompt))
        event = RequestArrived(time_us=engine.now_us, request_id=number, prompt=runs, max_new_tokens=limit)
        self.fold(rank, event, ("arrive", 0))

    def cancel(self, rank: int, choice: int) -> None:
        """A live request of a rank is cancelled."""
        engine = self.seats[rank].engine
        if engine.requests:
            live = list(engine.requests)
            self.fold(rank, RequestCancelled(engine.now_us, live[choice % len(live)]), ("fact",))
            self.marks.add("cancelled between proposal and launch" if self._waits(rank) else "cancelled")

    def _waits(self, rank: int) -> bool:
        return self.state.ranks[rank].proposed is not None

    def turn(self, rank: int) -> None:
        """A turn of a host's loop: it offers a slot, or waits."""
        seat = self.seats[rank]
        if self.may_offer(rank):
            step = self.fold(rank, LaneReady(seat.engine.now_us), ("slot",))
            seat.nothing_new = step.launched() is None
        elif not seat.facts and not any(link.inbox for link in self.network.links):  # nothing is on the way to it
            self.do(("fold", rank, ("sleep",), ()))
            self.marks.add("slept")

    def may_offer(self, rank: int) -> bool:
        """What the host's loop lets through."""
        seat = self.seats[rank]
        assert seat.agreement is not None
        if seat.agreement.pending or (seat.nothing_new and not seat.agreement.take_wanted()):
            return False
        return len(seat.engine.in_flight) <= seat.engine.config.overlap_depth

    def deliver(self, choice: int) -> bool:
        """A message arrives at the hub or at a rank; those of one link in order. Returns False if there is none."""
        due = [link for link in self.network.links if link.inbox]
        if due:
            due[choice % len(due)].deliver()
        return bool(due)

    def hear(self, rank: int) -> bool:
        """Fold what all ranks have agreed on. Returns False if nothing has arrived."""
        seat = self.seats[rank]
        if not seat.facts:
            return False
        event = seat.facts.pop(0)
        assert isinstance(event, RanksAgreed)
        counts = tuple(one[0] for one in event.counts)
        self.fold(rank, event, ("agreed", event.round, counts, event.generation))
        return True

    def finish(self, rank: int, *, error: bool = False) -> bool:
        """Deliver the oldest pass of a rank, if it has ended. Returns False otherwise."""
        seat, view = self.seats[rank], self.state.ranks[rank]
        if not seat.device or not all(len(other.passes) > view.delivered for other in self.state.ranks):
            return False
        plan = seat.device.pop(0)
        tokens = b"" if error else np.full(len(plan.sample_rows), 1_000_000, np.int32).tobytes()
        event = BatchFinished(seat.engine.now_us, plan.batch_id, tokens, generation=plan.generation)
        if error:
            event = BatchFinished(
                seat.engine.now_us, plan.batch_id, generation=plan.generation, error="the device failed"
            )
        self.fold(rank, event, ("result", error))
        return True

    def restart(self) -> None:
        """A rank is lost: all end, and meet again."""
        self.do(("lost",))
        self.marks.add("lost with a round open" if any(self._waits(seat.number) for seat in self.seats) else "lost")
        for seat in self.seats:
            seat.engine = snapshot.restore(snapshot.dump(seat.engine))
            seat.facts, seat.device, seat.nothing_new = [], [], False
        self._meet()
        for seat in self.seats:
            generation = seat.engine.generation + 1
            self.fold(seat.number, EngineRestarted(seat.engine.now_us, generation), ("restart", generation))

    # --------------------------------------------------------------------------------------------------------- a step

    def fold(self, rank: int, event: ObservedEvent, named: Action) -> Step:
        """Pass an event to a rank's engine. The machine must allow what comes of it."""
        seat = self.seats[rank]
        assert seat.agreement is not None
        in_machine = ("fold", rank, named, ())
        step = stepped(seat.engine, event, lambda: self.machine.after(self.state, in_machine))
        seat.nothing_new = seat.agreement.fold(event, step)
        commands: list[Action] = []
        for command in step.commands:
            match command:
                case LaunchBatch(plan):
                    assert plan.ranks is not None
                    commands.append(
                        ("launch", plan.ranks.round, int((plan.stops - plan.starts).sum()), plan.ranks.tokens)
                    )
                    seat.device.append(plan)
                    self.marks.add(f"launched {plan.mode}")
                case ProposeBatch(round=number, counts=counts):
                    commands.append(("propose", number, counts[0]))
        self.do(("fold", rank, named, tuple(commands)))
        for command in step.commands:
            if isinstance(command, ProposeBatch):
                seat.agreement.propose(command)
        if self.check:
            invariants.check(seat.engine)
        return step

    def do(self, action: Action) -> None:
        """Make the same step in the machine. Raises: Forbidden, Unsafe."""
        self.steps.append(action)
        self.state = self.machine.followed(self.state, action)

    def settle(self) -> None:
        """Everything that is open ends."""
        for number in range(TURNS_MAX):
            if self.machine.is_idle(self.state) and all(invariants.is_idle(seat.engine) for seat in self.seats):
                break
            while self.deliver(number):
                pass
            for rank in range(len(self.seats)):
                self.hear(rank)
                self.turn(rank)
                self.finish(rank)
        else:
            raise AssertionError(f"not at rest: {self.state}")
        for seat in self.seats:
            invariants.check_quiescent(seat.engine)
