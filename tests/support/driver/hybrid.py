"""Pools beside full attention: window pages and slots of state."""

from __future__ import annotations

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import Observed
from tests.support.driver.piece import Piece


class HybridPiece(Piece):
    """Checkpoints of states that a history has reached, and pools that are free at rest."""

    def checked(self, event: Observed, step: Step) -> None:
        plan = step.launched()
        if plan is None or plan.hybrid is None:
            return
        if (plan.hybrid.state_sources >= 0).any():
            self.mark("started from a checkpoint")
        if plan.hybrid.checkpoint_slots.size:
            self.mark("checkpoint left")

    def at_rest(self) -> None:
        hybrid = self.engine.memory.hybrid
        if not self.subject.check or not hybrid.present:
            return
        if hybrid.window is not None:
            pool = hybrid.window.pool
            assert pool.free_count == pool.total, "L9: a flush leaves window pages behind"
        if hybrid.states is not None:
            slots = hybrid.states.pool
            assert slots.free_count == slots.total, "L9: a flush leaves slots of state behind"
