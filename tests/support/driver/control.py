"""Controls, and orders about weights and memory that the host answers later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lockstep.core.contract.commands import (
    ControlAnswered,
    CopyToHost,
    LaunchBatch,
    LoadFromHost,
    ReleaseDeviceMemory,
    ResumeDeviceMemory,
    Step,
    SwapWeights,
)
from lockstep.core.contract.events import Control, ControlRequested, Observed, UpdateWeights, WeightsSwapped
from tests.support.driver.actions import CONTROLS
from tests.support.driver.piece import Piece, Subject
from tests.support.scenario import Order, answer_to


class ControlPiece(Piece):
    """Controls of an operator; each is answered once."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.orders: list[Order] = []  # about weights and memory, not answered yet
        self.unanswered: dict[int, str] = {}  # by control id: the name of its type
        self.next_id = 0

    def actions(self) -> dict[str, Callable[..., None]]:
        return {"control": self.control, "order_done": self.order_done, "order_late": self.order_late}

    def control(self, index: int) -> None:
        """Request one of CONTROLS. Weights come in ever newer versions, at times in an old one."""
        control = CONTROLS[index]
        if isinstance(control, UpdateWeights):
            newest = self.engine.maintenance.newest_version()
            control = msgspec.structs.replace(control, version=newest + (self.next_id % 7 > 0))
        self.ask(control)

    def ask(self, control: Control) -> None:
        """Request a control under a new id."""
        self.unanswered[self.next_id] = type(control).__name__
        self.next_id += 1
        self.subject.fold(ControlRequested(self.subject.now_us, self.next_id - 1, control))

    def order_done(self, error: str = "") -> None:
        """The host answers the oldest order about weights or memory."""
        if self.orders:
            self.subject.fold(answer_to(self.orders.pop(0), self.subject.now_us, error))

    def order_late(self) -> None:
        """An order from before a restart is answered after all; the answer is void."""
        if self.engine.generation:
            self.mark("answer of an older generation ignored")
            self.subject.fold(WeightsSwapped(self.subject.now_us, 1, generation=self.engine.generation - 1))

    # ---------------------------------------------------------------------------------------------------------- checks

    def commands(self) -> dict[type, Callable[[Any], None]]:
        return {
            ControlAnswered: self._answered,
            SwapWeights: self.orders_append,
            ReleaseDeviceMemory: self.orders_append,
            ResumeDeviceMemory: self.orders_append,
            LaunchBatch: self._launched,
            CopyToHost: self._copied,
            LoadFromHost: self._copied,
        }

    def orders_append(self, order: Order) -> None:
        """The host begins to work on an order."""
        self.orders.append(order)

    def _answered(self, command: ControlAnswered) -> None:
        name = self.unanswered.pop(command.control_id, None)
        assert name, f"control {command.control_id} was answered twice"
        self.mark(f"{name} done" if command.ok else f"{name} refused")

    def _launched(self, command: LaunchBatch) -> None:
        assert not self.orders, f"launched while the host works on {self.orders}"

    def _copied(self, command: CopyToHost | LoadFromHost) -> None:
        assert not self.orders, f"{type(command).__name__} {command.copy_id} while the host works on {self.orders}"

    def checked(self, event: Observed, step: Step) -> None:
        memory = self.engine.memory
        if memory.weights_version:
            if any(r.row >= 0 and memory.is_stale(r.namespace) for r in self.engine.requests.values()):
                self.mark("running across a change of weights")

    def at_rest(self) -> None:
        assert not self.unanswered, f"L8: never answered: {self.unanswered}"
