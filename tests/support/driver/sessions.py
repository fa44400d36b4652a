"""Sessions: opened, branched, closed, and turns that start within them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.core.contract.commands import ControlAnswered, FinishRequest, Step
from lockstep.core.contract.events import (
    DROP_OUTPUT,
    CloseSession,
    ControlRequested,
    Observed,
    OpenSession,
    RequestArrived,
    SessionClosed,
    SessionYielded,
    TurnStarted,
)
from lockstep.core.contract.samples import sample_count
from lockstep.core.features.sessions import COMPLETED
from tests.support.driver.actions import SESSIONS
from tests.support.driver.control import ControlPiece
from tests.support.driver.piece import Piece, Subject


@dataclass
class SessionRecord:
    """One open session from outside: what its turns and its commands make of it."""

    used_us: int  # the newest step in which it was opened, had a turn, or lost its last one
    length: int = 0
    output_start: int = 0
    turn: TurnStarted | None = None


class SessionPiece(Piece):
    """Sessions of an engine, under a few names."""

    def __init__(self, subject: Subject, control: ControlPiece) -> None:
        super().__init__(subject)
        self.control = control
        self.records: dict[str, SessionRecord] = {}
        self.starts: dict[int, int | None] = {}  # by turn: how many tokens of the session it keeps

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
            SessionClosed: self._closed,
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
        session, record = self.engine.sessions.open[event.session], self.records[event.session]
        if event.kept_tokens and event.kept_tokens < session.length:
            self.mark("turn rewound")
        start = self.starts[event.request_id]
        kept = record.length if start is None else record.output_start if start == DROP_OUTPUT else start
        self.mark("turn drops the output" if start == DROP_OUTPUT else "turn continues")
        assert event.kept_tokens == kept, f"r{event.request_id} keeps {event.kept_tokens} tokens of its session: {kept}"
        most = event.prompt_tokens + event.max_new_tokens
        assert most <= session.capacity_tokens, (
            f"r{event.request_id} may have {most} tokens, the capacity of its session is {session.capacity_tokens}"
        )
        record.turn = event

    def _closed(self, event: SessionClosed, step: Step) -> None:
        """A session times out when it was idle for its whole time."""
        self.mark(f"session closed ({event.reason})")
        record = self.records.pop(event.session)
        if event.reason == "timeout":
            timeout_us = self._timeouts[event.session]
            assert timeout_us is not None, f"session {event.session} has no time-out"
            idle_us = event.time_us - record.used_us
            assert idle_us >= timeout_us, f"session {event.session} was idle for {idle_us} us, of {timeout_us}"

    def before(self, event: Observed) -> None:
        """Keep the sessions that have turns, and the start of a turn in its session."""
        sessions = self.engine.sessions.open
        self._timeouts = {name: one.timeout_us for name, one in sessions.items()}
        self._busy = [name for name, one in sessions.items() if not one.idle]
        if isinstance(event, RequestArrived) and event.session:
            for number in range(sample_count(event)):
                self.starts[event.request_id + number] = event.session_start

    def stepped(self, event: Observed, step: Step) -> None:
        """Take over the tokens of completed turns, which the next turn of this step may keep; then sessions opened."""
        for command in step.commands:
            if isinstance(command, FinishRequest):
                self._turn_ended(command)
        if isinstance(event, ControlRequested) and isinstance(event.control, OpenSession):
            control, answers = event.control, [one for one in step.commands if isinstance(one, ControlAnswered)]
            if any(one.control_id == event.control_id and one.ok for one in answers):
                self.records[control.session] = self._opened(control, event.time_us)

    def _turn_ended(self, command: FinishRequest) -> None:
        for record in self.records.values():
            turn = record.turn
            if turn is None or turn.request_id != command.request_id:
                continue
            if command.reason in COMPLETED:
                record.length, record.output_start = turn.prompt_tokens + command.output_tokens, turn.prompt_tokens
            record.turn = None

    def _opened(self, control: OpenSession, time_us: int) -> SessionRecord:
        record = SessionRecord(time_us)
        if control.parent:
            parent = self.records[control.parent]
            record.length = parent.length if control.parent_tokens is None else control.parent_tokens
            record.output_start = min(parent.output_start, record.length)
        return record

    def checked(self, event: Observed, step: Step) -> None:
        sessions = self.engine.sessions.open
        busy = {*self._busy, *(name for name, one in sessions.items() if not one.idle)}
        for name in busy & self.records.keys():
            self.records[name].used_us = event.time_us
