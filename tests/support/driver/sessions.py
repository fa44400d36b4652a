"""Sessions: opened, branched, closed, and turns that start within them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import CloseSession, OpenSession, SessionClosed, SessionYielded, TurnStarted
from tests.support.driver.actions import SESSIONS
from tests.support.driver.control import ControlPiece
from tests.support.driver.piece import Piece, Subject


class SessionPiece(Piece):
    """Sessions of an engine, under a few names."""

    def __init__(self, subject: Subject, control: ControlPiece) -> None:
        super().__init__(subject)
        self.control = control

    def actions(self) -> dict[str, Callable[..., None]]:
        return {"session_open": self.session_open, "session_close": self.session_close}

    def session_open(self, choice: int, capacity: int, timeout: int | None, branch: bool) -> None:
        """Open a session; with `branch`, as a branch of an open one, if there is one."""
        sessions = self.engine.sessions.open
        parents = list(sessions) if branch else []
        parent = parents[choice % len(parents)] if parents else ""
        part = choice % (sessions[parent].length + 1) if parent and choice % 3 else None
        self.control.ask(OpenSession(SESSIONS[choice % len(SESSIONS)], capacity, timeout, parent, part))

    def session_close(self, choice: int) -> None:
        """Close a session, open or not."""
        self.control.ask(CloseSession(SESSIONS[choice % len(SESSIONS)]))

    def close_all(self) -> None:
        """Close every open session."""
        for name in list(self.engine.sessions.open):
            self.control.ask(CloseSession(name))

    def decided(self) -> dict[type, Callable[[Any, Step], None]]:
        return {
            SessionYielded: self._yielded,
            SessionClosed: lambda event, step: self.mark(f"session closed ({event.reason})"),
            TurnStarted: self._turn_started,
        }

    def _yielded(self, event: SessionYielded, step: Step) -> None:
        """An idle session yields before one with a turn, as no request needs its KV now."""
        self.mark("session yielded")
        sessions = self.engine.sessions.open
        if event.session in sessions and not sessions[event.session].idle:
            idle = [name for name, one in sessions.items() if one.idle and one.handle is not None]
            assert not idle, f"session {event.session} has a turn and yields, but {idle} are idle and hold KV"

    def _turn_started(self, event: TurnStarted, step: Step) -> None:
        self.mark("turn started")
        if event.kept_tokens and event.kept_tokens < self.engine.sessions.open[event.session].length:
            self.mark("turn rewound")
