"""Conversations whose tokens and KV the server keeps (`/open_session`): a turn sends what is new, and no more.

    turns = with_server_sessions(turns)      # which turns are of a session, and how much of each the server has
    Conversations()                          # opens and closes them beside the requests of one engine

A conversation is opened when its first turn comes, and closed when its last one has ended, or when it breaks off. Each
turn names the session, says how much of what it keeps stays (all of it, unless a trace edits its history: then the turn
begins where the two part), and brings the tokens behind. A request without turns behind it has no session.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    CloseSession,
    ControlRequested,
    OpenSession,
    RequestAdmitted,
    RequestFinished,
    SessionClosed,
    SessionYielded,
    TurnStarted,
)
from lockstep.sim.workload.token_runs import append_run, common_tokens
from lockstep.sim.workload.turns import Turn, Turns

if TYPE_CHECKING:
    from lockstep.sim.scenario.scenario import Scenario

FIRST_CONTROL = 1_000_000  # controls of sessions are numbered behind those that make adapters known


def check_server_sessions(scenario: Scenario) -> None:
    """Raise ConfigError for what is not simulated with sessions of the server."""
    if not scenario.server_sessions:
        return
    role = scenario.settings.get("role", "mixed")
    others: dict[str, Any] = {
        "samples": scenario.samples,  # a turn of a session has one answer
        "media": scenario.media,
        "max_new_tokens": scenario.max_new_tokens,  # what an answer lacks, the next turn would take for kept
        "rank_schedulers": scenario.rank_schedulers or None,
        "role": None if role == "mixed" else role,
    }
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"`server_sessions` is on, and `{name}` is {'on' if value is True else f'`{value}`'}: the two are not "
                "simulated together\nhint: leave out one of them"
            )


def with_server_sessions(turns: Turns) -> Turns:
    """The same turns, each of a conversation with what the server keeps of it.

    Where several turns wait for one answer nobody can say which of them a session goes on with: those have none.
    """
    root = turns.root()
    after = turns.after.astype(np.int64)
    behind = np.bincount(after[after >= 0], minlength=len(turns))
    sizes, forks = np.bincount(root, minlength=len(turns)), np.zeros(len(turns), np.bool_)
    forks[root[behind > 1]] = True
    session = np.where((sizes[root] > 1) & ~forks[root], root, -1)
    kept = np.zeros(len(turns), np.int32)
    rows = np.flatnonzero((session >= 0) & (after >= 0))
    for row, before in zip(rows.tolist(), after[rows].tolist(), strict=True):
        history, own = (list(runs) for runs in turns.prompts(np.array([before, row])))
        append_run(history, int(turns.output_first_token[before]), int(turns.output_tokens[before]))
        kept[row] = min(common_tokens(history, own), int(turns.prompt_tokens[row]) - 1)
    return replace(turns, session=session.astype(np.int32), session_kept=kept, session_last=behind == 0)


def describe_server_sessions(turns: Turns) -> str:
    """One sentence for the notes of a workload."""
    assert turns.session is not None
    assert turns.session_kept is not None
    of_one = turns.session >= 0
    kept, whole = int(turns.session_kept[of_one].sum()), int(turns.prompt_tokens[of_one].sum())
    return (
        f"{int(of_one.sum()):,} of {len(turns):,} requests are turns of {len(np.unique(turns.session[of_one])):,} "
        f"sessions of the server, which keep {kept:,} of their {whole:,} prompt tokens"
    )


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


class SessionCounts:
    """What sessions of the server did to a run; docs/metrics.md. What they held, only a host that runs can say."""

    def __init__(self) -> None:
        self.turns = self._kept_tokens = self._prompt_tokens = 0
        self._closed = self._yields = self._yielded_pages = 0
        self._held = array("q")  # time in us, pages

    def learn(self, decided: TurnStarted | SessionYielded | SessionClosed) -> None:
        """Take in what the engine decided."""
        if isinstance(decided, TurnStarted):
            self.turns += 1
            self._kept_tokens += decided.kept_tokens
            self._prompt_tokens += decided.prompt_tokens
        elif isinstance(decided, SessionYielded):
            self._yields += 1
            self._yielded_pages += decided.pages
        else:
            self._closed += 1

    def held(self, time_us: int, pages: int) -> None:
        """So many pages are held by sessions alone from now on."""
        self._held.extend((time_us, pages))

    def describe(self, kv_pages: int | None) -> dict[str, Any]:
        """For `sessions` of metrics.json."""
        held = np.array(self._held, np.int64).reshape(-1, 2)
        times_us, pages = held[:, 0], held[:, 1]
        lasted_us = np.diff(times_us)
        mean = float((pages[:-1] * lasted_us).sum() / lasted_us.sum()) if lasted_us.sum() else None
        most = int(pages.max()) if len(pages) else None
        return {
            "turns": self.turns,
            "prompt_tokens": self._prompt_tokens,
            "kept_tokens": self._kept_tokens,
            "closed": self._closed,
            "yields": self._yields,
            "yielded_pages": self._yielded_pages,
            "held_pages_mean": None if mean is None else round(mean, 2),
            "held_pages_max": most,
            "held_share_mean": None if mean is None or not kv_pages else round(mean / kv_pages, 6),
            "held_share_max": None if most is None or not kv_pages else round(most / kv_pages, 6),
        }


CHANGES = frozenset((RequestAdmitted, RequestFinished, SessionYielded, SessionClosed))
"""What is decided where sessions begin or cease to hold pages that no request does."""


def changes_holding(step: Step) -> bool:
    """Whether a step may have changed what sessions hold between turns."""
    return any(type(decided) in CHANGES for decided in step.decided)
