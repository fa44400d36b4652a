"""Serves requests on one engine over a tagged KV pool, and returns the answer that each client got.

The answer to a request is a pure function of its fields (`Asked.answer`): neither its neighbours nor any setting may
change it. So schedules are compared with that function, and the tagged KV reports a wrong cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import FinishRequest, RejectRequest, StreamTokens
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    LaneReady,
    Observed,
    PagesEvicted,
    RequestAdmitted,
    RequestArrived,
    RequestRetracted,
    TokenIds,
)
from lockstep.core.scheduler.engine import Engine
from tests.support.tagged_kv import TaggedKv

STOP_TOKEN = 7
ROUNDS_MAX = 5_000


class Answer(NamedTuple):
    reason: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """One request. `key` determines its tokens, under any request id."""

    key: int
    prompt: tuple[int, ...]
    max_new: int
    min_new: int = 0
    stops: tuple[int, ...] = ()  # numbers of the outputs that are STOP_TOKEN
    stream: bool = True
    after: Asked | None = None  # a later turn: it arrives when this one has ended

    def token(self, number: int) -> int:
        """Output `number`, counted from 0."""
        return STOP_TOKEN if number in self.stops else 1000 * (self.key + 1) + number

    @property
    def answer(self) -> Answer:
        """Return the answer that the client must get."""
        ends = [number for number in self.stops if self.min_new <= number + 1 <= self.max_new]
        count = min(ends) + 1 if ends else self.max_new
        return Answer("stop" if ends else "length", tuple(self.token(number) for number in range(count)))


Moment = Asked | None
"""A part of a timeline: a request arrives, or (None) one pass of the host's loop: launch a batch or collect one."""


@dataclass
class Served:
    """One run: the answer of each request by key, and counts of rare events."""

    answers: dict[int, Answer] = field(default_factory=dict)
    marks: Counter[str] = field(default_factory=Counter)


class _Host:
    def __init__(self, config: SchedConfig, later: Iterable[Asked], check: bool) -> None:
        self.engine = Engine(config)
        self.kv = TaggedKv(config, self._sample)
        self.later = list(later)
        self.check = check
        self.asked: list[Asked] = []  # by request id
        self.sent: list[list[int]] = []
        self.served = Served()

    def _sample(self, request_id: int, position: int) -> int:
        asked = self.asked[request_id]
        return asked.token(position - len(asked.prompt))

    def arrive(self, asked: Asked) -> None:
        prompt = TokenIds(np.array(asked.prompt, np.int32).tobytes())
        event = RequestArrived(
            time_us=0,
            request_id=len(self.asked),
            prompt=prompt,
            max_new_tokens=asked.max_new,
            min_new_tokens=asked.min_new,
            stop_token_ids=(STOP_TOKEN,) if asked.stops else (),
            stream=asked.stream,
        )
        self.asked.append(asked)
        self.sent.append([])
        self.fold(event)

    def fold(self, event: Observed) -> bool:
        """Pass one event to the engine. Returns whether it launched a batch."""
        step = self.engine.step(event)
        self.kv.observe(event, step)
        if self.check:
            invariants.check(self.engine)
        for command in step.commands:
            match command:
                case StreamTokens():
                    self._streamed(command)
                case FinishRequest() | RejectRequest():
                    asked = self.asked[command.request_id]
                    self.served.answers[asked.key] = Answer(command.reason, tuple(self.sent[command.request_id]))
        for decided in step.decided:
            match decided:
                case RequestRetracted():
                    self.served.marks[f"retracted ({decided.reason})"] += 1
                    self.served.marks["tokens discarded"] += decided.tokens_discarded
                case RequestAdmitted():
                    self.served.marks["tokens cached"] += decided.cached_tokens
                case PagesEvicted():
                    self.served.marks["pages evicted"] += decided.pages
        return step.launched() is not None

    def _streamed(self, command: StreamTokens) -> None:
        at = 0
        columns = (command.request_ids.tolist(), command.offsets.tolist(), command.token_counts.tolist())
        for request_id, offset, count in zip(*columns, strict=True):
            assert offset == len(self.sent[request_id]), f"r{request_id}: a gap or a double at output {offset}"
            self.sent[request_id] += command.tokens[at : at + count].tolist()
            at += count

    def turns(self) -> None:
        """Later turns of requests that have ended arrive."""
        due = [asked for asked in self.later if asked.after is not None and asked.after.key in self.served.answers]
        self.later = [asked for asked in self.later if asked not in due]
        for asked in due:
            self.arrive(asked)

    def offer(self) -> None:
        """Fill the launch slots; when nothing is launched any more, collect the oldest batch."""
        while self.fold(LaneReady(0)):
            pass
        if self.kv.stream:
            self.fold(self.kv.finished(0))
            if (forced := self.kv.tell_forced(0)) is not None:
                self.fold(forced)
            self.turns()


def serve(
    config: SchedConfig, timeline: Sequence[Moment], *, later: Iterable[Asked] = (), check: bool = False
) -> Served:
    """Play a timeline, then continue until every request, later turns too, has an answer.

    The tagged KV verifies every plan and cell; with `check`, all invariants are recomputed after every event.
    """
    host = _Host(config, later, check)
    for moment in timeline:
        if moment is None:
            host.offer()
        else:
            host.arrive(moment)
    for _ in range(ROUNDS_MAX):
        if invariants.is_idle(host.engine) and not host.later:
            break
        host.offer()
    invariants.check_quiescent(host.engine)
    host.kv.check_plans_unchanged()
    return host.served
