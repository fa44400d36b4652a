"""A closed loop: a fixed number of sessions in progress. When a session ends, the next one begins.

The load is the number of sessions in progress, `concurrency`; arrival times of the workload are not used. A session is
in progress from its first turn to its last answer, think times included. A request without a session is a session of
one turn; the loop is then the usual loop with a fixed number of clients. A session that breaks off, for example because
its context exceeds the model's, is followed by another session, too.

**The beginning.** A service in its steady state is not at the first turns of all its sessions. So the first sessions
begin in the middle. The position of each is drawn uniformly from the total time of all sessions: their recorded think
times plus SERVICE_US per answer, up to the turn at which they would break off. Requests therefore arrive at the rate of
the steady state from the start. Only the cache is not in its steady state, because it is empty; `Scenario.warm_up`
excludes that phase.

**Repetition.** The order of sessions is drawn from the seed. When all sessions have been used, a copy of the workload
follows, with the same lengths, think times and shared prefixes. Copies share no prefixes with each other.

**The end.** After `requests` arrivals no more requests are sent, and the open requests finish.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, islice

import numpy as np
from simpy import Environment, Event

from lockstep.core.contract.events import RequestArrived, RequestId, RequestKind
from lockstep.sim.host.arrivals import arrival_of
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.workload.token_runs import TOKEN_IDS
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, Int64s, Turn, Turns, WorkloadError

SERVICE_US = 1_000_000  # assumed time of one answer, for the initial positions of sessions only
CONCURRENCY_MAX = 1_000_000


class ConcurrentSessions:
    """The future turns of a closed loop: the counterpart of `arrivals.Arrivals`.

    Args:
        concurrency: sessions in progress at any time.
        requests: number of requests that arrive in the run.
        seed: seed of the order of sessions and of their initial positions.
        prompt_tokens_max: longest prompt that the engine accepts. A session breaks off at a longer one; used for
            initial positions only.
    Raises: WorkloadError if several turns wait for the same answer, because a session must be a single line of turns.
    """

    settled_until_us = NEVER_US  # there is no other source of requests
    never_sent = 0  # turns that are not sent by the end do not count, because their sessions have not broken off

    kind: RequestKind = "generate"  # of all requests

    def __init__(
        self, turns: Turns, concurrency: int, requests: int, seed: int, prompt_tokens_max: int = LENGTH_TOKENS_MAX
    ) -> None:
        self.expected = requests
        self.arrived = 0  # arrived requests, each sample counted; also the next request id
        self._sent = 0
        self.open_turns: dict[RequestId, Turn] = {}
        self.next_us = NEVER_US
        self._turns = turns
        self._rows = _rows_by_session(turns)
        self._stride = _stop_of_tokens(turns)  # distance between the token ids of one copy and of the next
        self._copies = max((TOKEN_IDS - 1) // self._stride, 1)  # copies with distinct token ids
        self._to_come: list[tuple[int, int, Turn]] = []  # heap: arrival us, session, turn
        self._begins_us: list[int] = []  # heap of times at which sessions begin; the next session at the first of them
        self._session_of: dict[RequestId, tuple[int, int]] = {}  # number of the session, and of its copy
        self._copy_of: dict[int, int] = {}  # copy by number of a session in progress
        random = np.random.Generator(np.random.Philox(seed))
        self._numbers = count()
        first_copy = self._begin_under_way(concurrency, prompt_tokens_max, random)
        self._upcoming = self._sessions_without_end(first_copy, random)
        self._look_ahead()

    @property
    def rows_by_session(self) -> list[Int64s]:
        """The turns of each session of the workload, in order."""
        return self._rows

    def under_way(self) -> list[tuple[int, int, int, Int64s]]:
        """Return the sessions in progress at the start: time of the first request, number, copy, and turns from there.

        Call it before the first request is taken.
        """
        session_of, found = self._session_of_turn(), []
        for time_us, number, turn in sorted(self._to_come, key=lambda one: one[1]):
            copy, row = divmod(turn.index, len(self._turns))
            rows = self._rows[int(session_of[row])]
            found.append((time_us, number, copy, rows[int(np.flatnonzero(rows == row)[0]) :]))
        return found

    def upcoming(self, count: int) -> list[tuple[int, int]]:
        """Take the next `count` sessions that begin when others end, as pairs of copy and session of the workload."""
        return list(islice(self._upcoming, count))

    def shift_of(self, copy: Int64s) -> Int64s:
        """Return how far the token ids of copies of the workload lie behind those of the workload."""
        return copy % self._copies * self._stride

    def _begin_under_way(self, concurrency: int, prompt_tokens_max: int, random: np.random.Generator) -> int:
        """Begin the first sessions at their drawn positions. Return the first unused copy of the workload."""
        rows = np.concatenate([self._until_too_long(session, prompt_tokens_max) for session in self._rows])
        takes_us = self._turns.think_us[rows] * (self._turns.after[rows] >= 0) + SERVICE_US
        stops_us = np.cumsum(takes_us)
        session_of_row = self._session_of_turn()[rows]
        used = np.zeros(len(self._rows), np.int64)
        for moment_us in random.integers(0, int(stops_us[-1]), concurrency).tolist():
            place = int(np.searchsorted(stops_us, moment_us, side="right"))
            left_us = max(int(stops_us[place]) - SERVICE_US - moment_us, 0)  # rest of the think time before this turn
            session = int(session_of_row[place])
            self._send_later(left_us, next(self._numbers), int(used[session]), int(rows[place]), opens=True)
            used[session] += 1
        return int(used.max())

    def _until_too_long(self, rows: Int64s, prompt_tokens_max: int) -> Int64s:
        """Return the turns of a session up to the first that is too long. That turn is included: it is sent, too."""
        too_long = self._turns.prompt_tokens[rows] > prompt_tokens_max
        return rows[: int(np.argmax(too_long)) + 1] if too_long.any() else rows

    def _session_of_turn(self) -> Int64s:
        sessions = np.empty(len(self._turns), np.int64)
        for number, rows in enumerate(self._rows):
            sessions[rows] = number
        return sessions

    def _sessions_without_end(self, first_copy: int, random: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Yield pairs of copy and session of the workload, in the order in which the sessions begin."""
        for copy in count(first_copy):
            for session in random.permutation(len(self._rows)).tolist():
                yield copy, session

    def _send_later(self, time_us: int, number: int, copy: int, row: int, *, opens: bool) -> None:
        turn = self._turns[row]
        shift = copy % self._copies * self._stride
        if shift or copy or opens or turn.session:
            first_tokens = (token + shift for token in turn.prompt[::2])
            turn = replace(
                turn,
                index=turn.index + copy * len(self._turns),
                prompt=tuple(v for run in zip(first_tokens, turn.prompt[1::2], strict=True) for v in run),
                output_first_token=turn.output_first_token + shift,
                samples_first_token=turn.samples_first_token + shift,
                label=f"{turn.label}#{copy + 1}" if copy else turn.label,
                session=f"{turn.session}#{number}" if turn.session else "",
                session_kept=0 if opens else turn.session_kept,
                after=None if opens or turn.after is None else turn.after + copy * len(self._turns),
            )
        self._copy_of[number] = copy
        heappush(self._to_come, (time_us, number, turn))

    def _look_ahead(self) -> None:
        next_us = self._to_come[0][0] if self._to_come else NEVER_US
        if self._begins_us and self._begins_us[0] < next_us:
            next_us = self._begins_us[0]
        self.next_us = next_us if self.awaits_answers else NEVER_US

    def take(self, max_new_tokens: int | None) -> RequestArrived:
        """Return the next turn, due at `next_us`. At equal times, sessions that began earlier come first.

        A session is chosen when its first turn is taken. So sessions begin in the order of time, although the engines
        of a cluster report ends in the order in which they are simulated.
        """
        if self._begins_us and not (self._to_come and self._to_come[0][0] <= self._begins_us[0]):
            copy, session = next(self._upcoming)
            begins_us = heappop(self._begins_us)
            self._send_later(begins_us, next(self._numbers), copy, int(self._rows[session][0]), opens=True)
        time_us, number, turn = heappop(self._to_come)
        request_id = self.arrived
        self.arrived += turn.samples
        self._sent += 1
        self.open_turns[request_id] = turn
        self._session_of[request_id] = number, self._copy_of[number]
        self._look_ahead()
        return arrival_of(turn, time_us, request_id, max_new_tokens, self.kind)

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """Record the end of an answer: the think time of the session's next turn begins, or the next session."""
        turn = self.open_turns.pop(request_id)
        number, copy = self._session_of.pop(request_id)
        follow_ups = self._turns.follow_ups(turn.index - copy * len(self._turns))
        if follow_ups:
            row = follow_ups[0]
            self._send_later(now_us + int(self._turns.think_us[row]), number, copy, row, opens=False)
            self._look_ahead()
        else:
            self._begin_next(number, now_us)

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """Record the rejection of a request: its session ends, and the next session begins."""
        del self.open_turns[request_id]
        number, _ = self._session_of.pop(request_id)
        self._begin_next(number, now_us)

    def _begin_next(self, ended: int, now_us: int) -> None:
        del self._copy_of[ended]
        heappush(self._begins_us, now_us)
        self._look_ahead()

    @property
    def awaits_answers(self) -> bool:
        """Whether more turns will be sent."""
        return self._sent < self.expected

    def more(self, env: Environment) -> Event | None:
        """Return the event to wait for when nothing more is due; None: there will be no more requests."""
        return None


def _rows_by_session(turns: Turns) -> list[Int64s]:
    """Return for each session the rows of its turns, in order. Raises WorkloadError if turns share an answer."""
    waited_for = turns.after[turns.after >= 0]
    if len(np.unique(waited_for)) < len(waited_for):
        problem = "a closed loop needs sessions of one turn after another, and here several wait for the same answer"
        raise WorkloadError("concurrency", problem, "leave out --concurrency")
    root = turns.root()
    order = np.argsort(root, kind="stable")  # stable: a turn comes after the turn that it waits for
    return np.split(order, np.flatnonzero(np.diff(root[order])) + 1)


def _stop_of_tokens(turns: Turns) -> int:
    """Return one more than the largest token id of any prompt or answer."""
    prompts = int((turns.run_first_token.astype(np.int64) + turns.run_tokens).max(initial=1))
    answers = int((turns.output_first_token.astype(np.int64) + turns.output_tokens).max(initial=1))
    if turns.samples is not None and turns.samples_first_token is not None:
        further = (turns.samples.astype(np.int64) - 1) * turns.output_tokens
        answers = max(answers, int((turns.samples_first_token + further).max(initial=1)))
    return min(max(prompts, answers), TOKEN_IDS - 1)
