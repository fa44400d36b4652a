"""Bounds on the quality of a history: lost work, and waits without a reason (`tests/support/quality.py`)."""

from __future__ import annotations

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import Observed
from tests.support.driver.piece import Piece, Subject
from tests.support.quality import Quality


class QualityPiece(Piece):
    """The measures of a history. Its end is out of bounds if one of them is."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.quality = Quality(subject.config)

    def before(self, event: Observed) -> None:
        self._before = self.quality.before(self.engine, event)

    def checked(self, event: Observed, step: Step) -> None:
        self.quality.observe(self.engine, event, step, self._before)

    def at_rest(self) -> None:
        broken = self.quality.broken()
        assert not broken, f"quality: {'; '.join(broken)}"
