"""Control requests that open and close the server sessions of one engine beside their turns.

A session is opened when its first turn comes. It is closed when its last turn has ended, or when it breaks off.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import (
    CloseSession,
    ControlRequested,
    OpenSession,
    RequestAdmitted,
    RequestFinished,
    SessionClosed,
    SessionYielded,
)
from lockstep.sim.workload.turns import Turn

if TYPE_CHECKING:
    pass

FIRST_CONTROL = 1_000_000  # controls of sessions are numbered behind those that make adapters known


class HoldingSink(Protocol):
    """What whoever measures is told of sessions; see `metrics.MetricsFold`."""

    def sessions_held(self, time_us: int, pages: int) -> None:
        """Take in how many pages sessions hold that no request does, from now on."""


class Conversations:
    """What is asked of one engine about sessions, beside their turns."""

    def __init__(self, capacity_tokens: int, told: HoldingSink) -> None:
        self._capacity_tokens = capacity_tokens
        self.told = told
        self.is_stale = False  # whether what sessions hold may have changed since somebody was told
        self._control_id = FIRST_CONTROL
        self.due: deque[CloseSession] = deque()  # to be asked for at once

    def opening(self, turn: Turn, time_us: int) -> ControlRequested | None:
        """What has to be asked before a turn: to open its session, if it is the first one to come."""
        if not turn.session or turn.after is not None:
            return None
        return self._asked(time_us, OpenSession(turn.session, self._capacity_tokens))

    def ended(self, turn: Turn, *, answered: bool) -> None:
        """A turn ended: nobody needs its session any more if it was the last one, or if it broke off."""
        if turn.session and (turn.session_last or not answered):
            self.due.append(CloseSession(turn.session))

    def closing(self, time_us: int) -> ControlRequested:
        """The next one to be closed."""
        return self._asked(time_us, self.due.popleft())

    def _asked(self, time_us: int, control: OpenSession | CloseSession) -> ControlRequested:
        self._control_id += 1
        return ControlRequested(time_us, self._control_id, control)


CHANGES = frozenset((RequestAdmitted, RequestFinished, SessionYielded, SessionClosed))
"""What is decided where sessions begin or cease to hold pages that no request does."""


def changes_holding(step: Step) -> bool:
    """Whether a step may have changed what sessions hold between turns."""
    return any(type(decided) in CHANGES for decided in step.decided)
