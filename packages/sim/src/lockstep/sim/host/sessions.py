"""Control requests that open and close the sessions of one engine.

A session is opened when its first turn arrives. It is closed when its last turn has ended, or when it breaks off.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

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

FIRST_CONTROL = 1_000_000  # control ids of sessions are above this; those of adapter registrations are below


class HoldingSink(Protocol):
    """Receives the measurements of sessions; `MetricsFold` implements it."""

    def sessions_held(self, time_us: int, pages: int) -> None:
        """Record the pages that sessions hold and no request does, valid from `time_us` on."""


# mechanism: sessions (simulated)
class Conversations:
    """Control requests about the sessions of one engine."""

    def __init__(self, capacity_tokens: int, sink: HoldingSink) -> None:
        self._capacity_tokens = capacity_tokens
        self.sink = sink
        self.is_stale = False  # whether the pages that sessions hold may have changed since the last report
        self._control_id = FIRST_CONTROL
        self.due: deque[CloseSession] = deque()  # controls to be sent as soon as possible

    def opening(self, turn: Turn, time_us: int) -> ControlRequested | None:
        """Return the request that opens the session of a turn; None if the turn is not the first of a session."""
        if not turn.session or turn.after is not None:
            return None
        return self._request(time_us, OpenSession(turn.session, self._capacity_tokens))

    def ended(self, turn: Turn, *, answered: bool) -> None:
        """Record the end of a turn. Its session is due to be closed if the turn was its last or was not answered."""
        if turn.session and (turn.session_last or not answered):
            self.due.append(CloseSession(turn.session))

    def closing(self, time_us: int) -> ControlRequested:
        """Return the request that closes the next session that is due."""
        return self._request(time_us, self.due.popleft())

    def _request(self, time_us: int, control: OpenSession | CloseSession) -> ControlRequested:
        self._control_id += 1
        return ControlRequested(time_us, self._control_id, control)


CHANGES = frozenset((RequestAdmitted, RequestFinished, SessionYielded, SessionClosed))
"""Decided events that may change which pages are held by sessions alone."""


def changes_holding(step: Step) -> bool:
    """Return whether a step may have changed which pages are held by sessions alone."""
    return any(type(decided) in CHANGES for decided in step.decided)
