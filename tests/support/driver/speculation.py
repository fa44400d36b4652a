"""Drafts and forced tokens: which kinds of verifying batches a history has reached."""

from __future__ import annotations

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import Observed
from tests.support.driver.piece import Piece


class SpeculationPiece(Piece):
    """Batches that verify drafts or run forced tokens."""

    def checked(self, event: Observed, step: Step) -> None:
        plan = step.launched()
        if plan is None or plan.speculation is None:
            return
        speculation = plan.speculation
        drafts, wanted = speculation.draft_lengths, speculation.draft_tokens
        self.mark(f"{plan.mode} batch with drafts" if drafts.any() else "drafts left out")
        if speculation.parents.size:
            self.mark(f"{plan.mode} batch with a tree" if drafts.any() else "tree left out")
            if (speculation.path_lengths() < drafts).any() and plan.starts_after:
                self.mark("start left open by a tree")
        if plan.starts_after:
            self.mark("start left open")
        if speculation.forced_lengths.any():
            self.mark(f"{plan.mode} batch with forced tokens")
            if speculation.drafted().any():
                self.mark("forced tokens beside drafts")
        flying = self.engine.in_flight
        if len({other.plan.microbatch for other in flying if other.verifies}) > 1:
            self.mark("drafts of several microbatches in flight")
        if len({other.plan.microbatch for other in flying}) > 1 and speculation.forced_lengths.any():
            self.mark("forced tokens beside another microbatch")
        if any(other.dead for other in flying if other.verifies):
            self.mark("dead row verified")
        if len(plan.rows) - plan.extend_rows < self.engine.running_batch.size:
            self.mark("sits out at its end")
        if drafts.size > 1 and 0 < drafts.min() < wanted:
            self.mark("fewer drafts")
