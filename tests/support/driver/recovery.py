"""Restarts of the device, results that come after them, and snapshots of the engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.events import BatchFinished, EngineRestarted
from lockstep.core.journal import snapshot
from tests.support.driver.adapters import AdapterPiece
from tests.support.driver.control import ControlPiece
from tests.support.driver.piece import Piece, Subject


class RecoveryPiece(Piece):
    """Losses of the device, and restored copies of the engine."""

    def __init__(self, subject: Subject, control: ControlPiece, adapters: AdapterPiece) -> None:
        super().__init__(subject)
        self.control, self.adapters = control, adapters
        self.voided: list[BatchPlan] = []  # in flight when the device was lost; their results may still come

    def actions(self) -> dict[str, Callable[..., None]]:
        return {"restart": self.restart, "late": self.late, "snapshot": self.snapshot}

    def restart(self) -> None:
        """The device and everything in flight on it are lost."""
        self.mark("restart with work in flight" if self.subject.kv.stream else "restart")
        self.voided += [launched.plan for launched in self.subject.kv.stream]
        self.control.orders.clear()
        self.adapters.lost()
        self.subject.fold(EngineRestarted(self.subject.now_us, self.engine.generation + 1))

    def late(self) -> None:
        """A result from before a restart arrives after all; it is void."""
        if self.voided:
            plan = self.voided.pop(0)
            tokens = np.zeros(len(plan.sample_rows), np.int32).tobytes()
            self.mark("result of an older generation ignored")
            self.subject.fold(BatchFinished(self.subject.now_us, plan.batch_id, tokens, generation=plan.generation))

    def snapshot(self) -> None:
        """Continue with a restored copy of the engine."""
        image = snapshot.dump(self.engine)
        self.subject.engine = snapshot.restore(image)
        assert snapshot.dump(self.engine) == image, "a restored engine dumps to other bytes"
