"""A prefill and a decode engine on a network, each of whose steps must be one that the machine of transfers allows."""

from __future__ import annotations

from typing import Any

from lockstep.core.contract.commands import (
    BatchPlan,
    CancelTransfer,
    FinishRequest,
    LaunchBatch,
    RejectRequest,
    StartTransfer,
    Step,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    BatchFinished,
    EngineRestarted,
    LaneReady,
    Observed,
    RequestArrived,
    RequestCancelled,
    TransferAdvanced,
)
from tests.support.contract.transfer_machine import TransferBounds, TransferMachine, TransferState
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
        self._names: dict[tuple[int, ...], int] = {}  # of prefixes that end with a page
        self._tables: dict[tuple[str, int], list[int]] = {}  # by engine and row
        self._holders: dict[tuple[str, int], int] = {}

    # --------------------------------------------------------------------------------------------------- what is done

    def arrive_in(self, asked: Asked) -> Wire:
        """A request arrives at both engines."""
        size, prompt = self.machine.bounds.page_tokens, asked.prompt
        chain = [self._names.setdefault(prompt[:end], len(self._names)) for end in range(size, len(prompt) + 1, size)]
        if len(prompt) % size:
            chain.append(self._names.setdefault((-1, *prompt), len(self._names)))
        self.follow(("room", tuple(chain), len(prompt)))
        return self.arrive(asked)

    def move(self, wire: Wire) -> None:
        """The next part moves."""
        part = wire.parts[wire.moved].command
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
        named = self._named(member, event)
        try:
            step = super().fold(member, event)
        except ContractError as error:
            self.machine.after(self.state, (member.name[0], named, ()))  # forbidden, too
            raise AssertionError(f"the core refuses {event}, which the contract allows: {error}") from error
        commands: list[Action] = []
        for command in step.commands:
            match command:
                case LaunchBatch(plan):
                    commands.append(("launch", plan.batch_id, self._rows(member, plan)))
                case StartTransfer():
                    commands.append(self._transfer(member, command))
                case CancelTransfer(transfer_id):
                    commands.append(("cancel_transfer", member.by_id[transfer_id].room))
                case FinishRequest(request_id=number, reason=reason) | RejectRequest(number, reason):
                    commands.append(("end", member.by_id[number].room, reason))
        self.follow((member.name[0], named, tuple(commands)))
        return step

    # ---------------------------------------------------------------------------------------------------- what it is

    def _named(self, member: Member, event: Observed) -> Action:
        match event:
            case RequestArrived(request_id=number):
                return "arrive", member.by_id[number].room
            case RequestCancelled(_, number):
                return "cancel", member.by_id[number].room
            case TransferAdvanced(transfer_id=number, status=status):
                return "told", member.by_id[number].room, status
            case BatchFinished(error=error) if member.sends:
                return "result", bool(error)
            case EngineRestarted():
                return ("restart",)
            case LaneReady():
                return ("slot",)
        return ("fact",)

    def _transfer(self, member: Member, command: StartTransfer) -> Action:
        room, pages = member.by_id[command.transfer_id].room, tuple(command.pages.tolist())
        if command.direction == "receive":
            return "receive", room, pages, command.start_tokens
        return "send", room, command.start_tokens, command.stop_tokens, pages, command.after_batch

    def _rows(self, member: Member, plan: BatchPlan) -> tuple[Any, ...]:
        name, size, rows = member.name, member.config.page_size, []
        for taken in plan.rows_taken:
            self._holders[name, taken.row], self._tables[name, taken.row] = taken.request_id, []
        deltas = (plan.deltas.rows, plan.deltas.index, plan.deltas.pages)
        for row, index, page in zip(*(one.tolist() for one in deltas), strict=True):
            self._tables[name, row][index : index + 1] = [page]
        columns = (plan.rows, plan.request_ids, plan.starts, plan.stops)
        for i, (row, number, start, stop) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
            pages = tuple(self._tables[name, row][: -(-stop // size)])
            room = member.by_id[number].room
            if member.sends:
                rows.append((room, start, stop, pages))
            else:
                rows.append((room, plan.mode == "prebuilt" and i < plan.extend_rows, pages[start // size :]))
        return tuple(rows)
