"""Names of the steps of a prefill or a decode engine, as the machine of transfers has them."""

from __future__ import annotations

from collections.abc import Sequence
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
from lockstep.core.contract.events import (
    BatchFinished,
    EngineRestarted,
    LaneReady,
    Observed,
    RequestArrived,
    RequestCancelled,
    TransferAdvanced,
)
from tests.support.driver.actions import Action


class TransferNames:
    """Folds the page tables of both engines from their plans, and names events and commands by rooms."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._prefixes: dict[tuple[int, ...], int] = {}  # that end with a page, or with their prompt
        self._tables: dict[tuple[str, int], list[int]] = {}  # by engine and row

    def chain(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return what each page of a prompt must contain, as numbers."""
        ends = range(self._page_tokens, len(prompt) + 1, self._page_tokens)
        chain = [self._prefixes.setdefault(prompt[:end], len(self._prefixes)) for end in ends]
        if len(prompt) % self._page_tokens:
            chain.append(self._prefixes.setdefault((-1, *prompt), len(self._prefixes)))
        return tuple(chain)

    def event(self, side: str, rooms: Sequence[int], event: Observed) -> Action:
        """Name an event. `rooms`: of the requests, by id."""
        match event:
            case RequestArrived(request_id=number):
                return "arrive", rooms[number]
            case RequestCancelled(_, number):
                return "cancel", rooms[number]
            case TransferAdvanced(transfer_id=number, status=status):
                return "told", rooms[number], status
            case BatchFinished(error=error) if side == "p":
                return "result", bool(error)
            case EngineRestarted():
                return ("restart",)
            case LaneReady():
                return ("slot",)
        return ("fact",)

    def commands(self, side: str, rooms: Sequence[int], step: Step) -> tuple[Action, ...]:
        """Name the commands of a Step."""
        commands: list[Action] = []
        for command in step.commands:
            match command:
                case LaunchBatch(plan):
                    commands.append(("launch", plan.batch_id, self._rows(side, rooms, plan)))
                case StartTransfer(transfer_id=number, direction=direction):
                    pages, start = tuple(command.pages.tolist()), command.start_tokens
                    part = (start, command.stop_tokens, pages, command.after_batch)
                    is_send = direction == "send"
                    named = ("send", rooms[number], *part) if is_send else ("receive", rooms[number], pages, start)
                    commands.append(named)
                case CancelTransfer(transfer_id):
                    commands.append(("cancel_transfer", rooms[transfer_id]))
                case FinishRequest(request_id=number, reason=reason) | RejectRequest(number, reason):
                    commands.append(("end", rooms[number], reason))
        return tuple(commands)

    def _rows(self, side: str, rooms: Sequence[int], plan: BatchPlan) -> tuple[Any, ...]:
        size, rows = self._page_tokens, []
        for taken in plan.rows_taken:
            self._tables[side, taken.row] = []
        deltas = (plan.deltas.rows, plan.deltas.index, plan.deltas.pages)
        for row, index, page in zip(*(one.tolist() for one in deltas), strict=True):
            self._tables[side, row][index : index + 1] = [page]
        columns = (plan.rows, plan.request_ids, plan.starts, plan.stops)
        for i, (row, number, start, stop) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
            pages = tuple(self._tables[side, row][: -(-stop // size)])
            if side == "p":
                rows.append((rooms[number], start, stop, pages))
            else:
                received = plan.mode == "prebuilt" and i < plan.extend_rows
                rows.append((rooms[number], received, pages[start // size :]))
        return tuple(rows)
