"""The report on a divergence: the recorded decision, the decision of the replay, and the state of the engine before.

A journal stores a digest of each decision, not the decision. If the text was stored (`decisions.txt` in the run folder,
written by `lockstep replay --decisions`; every golden journal has it), both decisions are shown. Otherwise the report
has the next result of the device in the journal.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import BatchFinished
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import Divergence
from lockstep.tools.decision_text import Decision, decision_of, read_decisions
from lockstep.tools.diff import decision_lines
from lockstep.tools.drift import state_lines
from lockstep.tools.runs import Walk, walked

DECISIONS = "decisions.txt"


class DivergedStep(NamedTuple):
    """The first step whose decisions differ from the recorded ones."""

    recorded: Decision | None  # None if its text was not stored
    now: Decision | None  # None if the step raises
    raised: str
    next_result: str
    state: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the lines for a terminal after the message of the Divergence."""
        found = []
        if self.now is None:
            found.append(f"  now   raises {self.raised}")
            if self.recorded is not None:
                found += [f"  then  {line}" for line in self.recorded.lines or ("decided nothing",)]
        elif self.recorded is not None:
            found += decision_lines("then", self.recorded, "now", self.now)
        else:
            found += [f"  now   {line}" for line in self.now.lines or ("decides nothing",)]
            found.append(f"  then  only its digest is stored; the next result in the journal is {self.next_result}")
        return ["decisions", *found, "state before", *(f"  {line}" for line in self.state)]


def diverged_step(run: Path, divergence: Divergence, decisions: Path | None = None) -> DivergedStep | None:
    """Return the report on a divergence; None if the replay diverges at an earlier step, so for another engine.

    Raises: ConfigError if the file of decisions cannot be read.
    """
    number = divergence.step
    try:
        walk = walked(Walk(run, until=number))
    except Divergence:
        return None
    kept = decisions if decisions is not None else run / DECISIONS
    recorded = None
    if kept.is_file():
        recorded = read_decisions(kept).get(number, Decision(number, "", ()))
    state = state_lines(walk.engine, walk.names)
    following = [record.event for record in read_journal(walk.folder).events() if record.step >= number]
    results = (event for event in following[1:] if isinstance(event, BatchFinished))
    result = next(results, None)
    delivered = "none" if result is None else f"b{result.batch_id} with {len(result.tokens) // 4} tokens"
    walk.names.observe(divergence.event)
    try:
        step = walk.engine.step(divergence.event)
    except LockstepError as error:
        return DivergedStep(recorded, None, f"{type(error).__name__}: {error}", delivered, state)
    now = decision_of(number, divergence.event, step, walk.names)
    return DivergedStep(recorded, now, "", delivered, state)
