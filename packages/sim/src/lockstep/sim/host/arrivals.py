"""Requests of an open-loop workload: turns by the clock, follow-up turns after answers, cancels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from heapq import heappop, heappush

from simpy import Environment, Event

from lockstep.core.contract.events import (
    Grammar,
    PromptSpan,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RequestKind,
    TokenRuns,
)
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.workload.token_runs import runs_behind
from lockstep.sim.workload.turns import Turn, Turns


class Arrivals:
    """The future turns in the order of time. A follow-up turn is added when the answer before it ends.

    For a columnar workload (`Turns`) only open turns, and turns within their think time, exist as objects.
    Args:
        cancel_after_us: by turn index, the time from arrival to cancel of the turns that are cancelled.
    """

    def __init__(self, turns: Sequence[Turn], cancel_after_us: Mapping[int, int] | None = None) -> None:
        self._turns = turns
        self.never_sent: int  # turns that wait for an answer; after the run, turns that were not sent
        self._by_clock: Iterator[Turn]
        self._follow_ups: Callable[[int], Sequence[int]]  # indices of the turns that follow the answer of a turn
        if isinstance(turns, Turns):
            self._by_clock = turns.by_clock()
            self.never_sent = len(turns) - len(turns.by_clock_rows)
            self._follow_ups = turns.follow_ups
        else:
            self._by_clock = (turn for turn in turns if turn.after is None)
            behind: dict[int, list[int]] = {}
            for index, turn in enumerate(turns):
                if turn.after is not None:
                    behind.setdefault(turn.after, []).append(index)
            self.never_sent = sum(map(len, behind.values()))
            self._follow_ups = lambda index: behind.get(index, ())
        self._next_by_clock = next(self._by_clock, None)
        self._read_ahead: deque[Turn] = deque()  # turns by the clock behind `_next_by_clock`
        self._thinking: list[tuple[int, int, Turn]] = []  # heap of turns within their think time: arrival us, index
        self._cancel_after_us = cancel_after_us or {}
        self._cancels: list[tuple[int, RequestId]] = []  # heap: us, request
        self.expected = len(turns)
        self.arrived = 0  # arrived requests, each sample counted; also the next request id
        self.open_turns: dict[RequestId, Turn] = {}  # turns that arrived and have not ended
        self.next_us = NEVER_US  # time of the next arrival or cancel
        self._look_ahead()

    settled_until_us = NEVER_US  # there is no other source of requests
    kind: RequestKind = "generate"  # of all requests

    def more(self, env: Environment) -> Event | None:
        """Return the event to wait for when nothing more is due; None: there will be no more requests."""
        return None

    def _look_ahead(self) -> None:
        next_us = self._next_by_clock.arrival_us if self._next_by_clock is not None else NEVER_US
        if self._thinking and self._thinking[0][0] < next_us:
            next_us = self._thinking[0][0]
        if self._cancels and self._cancels[0][0] < next_us:
            next_us = self._cancels[0][0]
        self.next_us = next_us

    def take(self, max_new_tokens: int | None) -> RequestArrived | RequestCancelled:
        """Return the next fact, due at `next_us`. At equal times cancels come first, then turns by index."""
        time_us = self.next_us
        if self._cancels and self._cancels[0][0] == time_us:
            _, request_id = heappop(self._cancels)
            self._look_ahead()
            return RequestCancelled(time_us, request_id)
        turn = self._next_by_clock
        if turn is not None and turn.arrival_us == time_us and not self._thinks_before(time_us, turn.index):
            self._next_by_clock = self._read_ahead.popleft() if self._read_ahead else next(self._by_clock, None)
        else:
            turn = heappop(self._thinking)[2]
        request_id = self.arrived
        self.arrived += turn.samples
        self.open_turns[request_id] = turn
        if turn.index in self._cancel_after_us:
            heappush(self._cancels, (time_us + self._cancel_after_us[turn.index], request_id))
        self._look_ahead()
        return arrival_of(turn, time_us, request_id, max_new_tokens, self.kind)

    def turn_ahead(self, place: int) -> Turn | None:
        """Return a turn that will arrive by the clock: `place` 0 is the next one. None: there are fewer turns."""
        if not place:
            return self._next_by_clock
        while len(self._read_ahead) < place:
            turn = next(self._by_clock, None)
            if turn is None:
                return None
            self._read_ahead.append(turn)
        return self._read_ahead[place - 1]

    def _thinks_before(self, time_us: int, index: int) -> bool:
        return bool(self._thinking) and self._thinking[0][:2] < (time_us, index)

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """Record the end of an answer; the think time of the turns that follow it begins."""
        ended = self.open_turns.pop(request_id)
        if not self.never_sent:
            return
        for index in self._follow_ups(ended.index):
            turn = self._turns[index]
            heappush(self._thinking, (now_us + turn.think_us, turn.index, turn))
            self.never_sent -= 1
        self._look_ahead()

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """Record a rejection or a cancel; the session ends."""
        del self.open_turns[request_id]

    @property
    def awaits_answers(self) -> bool:
        """Whether turns wait for the end of an answer, or were not sent because their session broke off."""
        return self.never_sent > 0


def arrival_of(
    turn: Turn, time_us: int, request_id: RequestId, max_new_tokens: int | None, kind: RequestKind = "generate"
) -> RequestArrived:
    """Return the arrival of a turn. `max_new_tokens` replaces the limit of a request with output, unless it is None."""
    return RequestArrived(
        time_us=time_us,
        request_id=request_id,
        prompt=TokenRuns(tuple(runs_behind(turn.prompt, turn.session_kept)) if turn.session_kept else turn.prompt),
        max_new_tokens=max_new_tokens if max_new_tokens is not None and turn.output_tokens else turn.output_tokens,
        label=turn.label,
        tenant=turn.tenant,
        kind=kind,
        grammar=_grammar(turn.grammar) if turn.grammar else None,
        spans=tuple([PromptSpan(m.start, m.start + m.tokens, m.kind, m.digest, m.tokens) for m in turn.media]),
        adapter=turn.adapter,
        parallel_samples=turn.samples,
        session=turn.session,
        session_start=turn.session_kept if turn.session and turn.after is not None else None,
    )


def _grammar(name: str) -> Grammar:
    return Grammar("json_schema", name, blake2b(name.encode(), digest_size=16).digest())
