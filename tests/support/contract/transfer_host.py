"""A prefill and a decode engine on a network, each of whose steps must be one that the machine of transfers allows."""

from __future__ import annotations

from lockstep.core.contract.commands import (
    Step,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    Observed,
)
from tests.support.contract.transfer_machine import TransferBounds, TransferMachine, TransferState
from tests.support.contract.transfer_steps import TransferNames
from tests.support.driver.actions import Action
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.wires import Member, Wire
from tests.support.served import Asked

PREFILL, DECODE = "p0", "d0"


class TransferHost(Fleet):
    """The fleet of other tests, with the machine beside it."""

    def __init__(self, prefill: SchedConfig, decode: SchedConfig, *, check: bool = True) -> None:
        super().__init__([prefill], [decode], check=check)
        bounds = TransferBounds(
            page_tokens=prefill.page_size,
            pages=prefill.pages,
            depth=prefill.overlap_depth,
            allocates_first=prefill.transfer_allocation != "prefill_complete",
        )
        self.machine = TransferMachine(bounds)
        self.state: TransferState = self.machine.first()
        self.steps_done: list[Action] = []
        self._names = TransferNames(prefill.page_size)

    # --------------------------------------------------------------------------------------------------- what is done

    def arrive_in(self, asked: Asked) -> Wire:
        """A request arrives at both engines."""
        self.follow(("room", self._names.chain(asked.prompt), len(asked.prompt)))
        return self.arrive(asked)

    def move(self, wire: Wire) -> None:
        """The next part moves."""
        part = wire.parts[wire.moved].command
        self.follow(("stage", wire.room, wire.moved))
        self.follow(("move", wire.room, wire.moved))
        if part.last:
            self.follow(("done", wire.room))
        super().move(wire)

    def stop(self, wire: Wire) -> None:
        """A cancel reaches the writer."""
        self.follow(("stop", wire.room))
        super().stop(wire)

    def link_down(self, prefill: str, decode: str) -> None:
        """Everything between the engines is interrupted."""
        self.follow(("link_down",))
        super().link_down(prefill, decode)

    def restart(self, name: str) -> None:
        """The device of an engine is lost."""
        self.follow(("lose", name[0]))
        super().restart(name)

    def end_all(self) -> None:
        """Everything that is open ends, and every fact arrives."""
        self.settle()
        while self.stops or self.told:
            for wire in list(self.stops):
                self.stop(wire)
            for told in list(self.told):
                self.tell(told)
            self.settle()
        assert self.machine.is_idle(self.state), f"not at rest: {self.state}"
        wrong = self.machine.at_rest(self.state)
        assert not wrong, wrong

    def follow(self, action: Action) -> None:
        """Make the same step in the machine. Raises: Forbidden, Unsafe."""
        self.steps_done.append(action)
        self.state = self.machine.followed(self.state, action)

    def fold(self, member: Member, event: Observed) -> Step:
        """Pass an event to an engine; the machine must allow what comes of it."""
        side, rooms = member.name[0], [wire.room for wire in member.by_id]
        named = self._names.event(side, rooms, event)
        try:
            step = super().fold(member, event)
        except ContractError as error:
            self.machine.after(self.state, (side, named, ()))  # forbidden, too
            raise AssertionError(f"the core refuses {event}, which the contract allows: {error}") from error
        self.follow((side, named, self._names.commands(side, rooms, step)))
        return step
