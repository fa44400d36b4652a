"""Faults for tests of recovery: an engine that dies at a place that no test could hit from outside.

LOCKSTEP_FAULT is one of

    written:N[:LIVES[:EVENT]]
                        killed once records were written N times, with such an event among them where one is named, and
                        before anything of the last is performed or sent
    recovered           killed in every second life, when it has recovered and nothing was sent
    hang:N              stands still at its Nth launch, in its first life
    poison:TOKEN        aborts whenever a batch computes this token
    greedy:TOKEN        the same, but killed, as by a kernel that has no memory left
    arrival:TOKEN       the core raises whenever a prompt that begins with this token arrives

`written` dies in that many lives, or in one. Only the environment of the process can ask for them, no client.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

import numpy as np

from lockstep.core.contract.commands import BatchPlan, Step
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import BatchId, ObservedEvent, RequestArrived, RequestId
from lockstep.core.journal.sinks import JournalSink
from lockstep.core.requests.table import prompt_bytes
from lockstep.host.batches import BatchExecutor, BatchResult, ContextOf
from lockstep.host.loop import RuntimeHost

VARIABLE = "LOCKSTEP_FAULT"
POINTS = {"written": (1, 2), "recovered": (0, 0), "hang": (1, 1), "poison": (1, 1), "greedy": (1, 1), "arrival": (1, 1)}
"""How many numbers follow each, at least and at most. Behind both of `written` may be the name of an event."""


def install(host: RuntimeHost, generation: int) -> None:
    """Put in what the environment asks for. Raises ConfigError for what is no fault."""
    said = os.environ.get(VARIABLE, "")
    if not said:
        return
    point, *texts = said.split(":")
    least, most = POINTS.get(point, (1, 0))
    kind = texts.pop() if point == "written" and len(texts) == 3 else ""
    if not least <= len(texts) <= most or not all(text.isdecimal() for text in texts):
        raise ConfigError(f"{VARIABLE} must be {', '.join(POINTS)} with their numbers, got `{said}`")
    numbers = [int(text) for text in texts]
    match point:
        case "written":
            if generation < (numbers[1] if len(numbers) > 1 else 1):
                host.journal = _DiesBehindWrites(host.journal, numbers[0], kind)
        case "recovered":
            if generation % 2:
                _die()
        case "hang":
            if not generation:
                host.executor = _Faulty(host.executor, hangs_at=numbers[0])
        case "poison" | "greedy":
            host.executor = _Faulty(host.executor, poison=numbers[0], end=os.abort if point == "poison" else _die)
        case "arrival":
            _raise_at_arrival(host, numbers[0])


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _DiesBehindWrites:
    """A journal behind whose Nth write, of those with an event of this kind, the process dies."""

    def __init__(self, journal: JournalSink, writes: int, kind: str) -> None:
        self._journal, self._left, self._kind = journal, writes, kind
        self._found = not kind

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Record one event."""
        self._found = self._found or type(event).__name__ == self._kind
        self._journal.append(event, digest)

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Record an event whose step raised."""
        self._journal.append_unsealed(event)

    def flush(self) -> None:
        """Write, and perhaps die."""
        self._journal.flush()
        self._left -= self._found
        self._found = not self._kind
        if not self._left:
            _die()


class _Faulty:
    """An executor that fails at a launch."""

    def __init__(
        self, executor: BatchExecutor, *, hangs_at: int = 0, poison: int = -1, end: Callable[[], object] = os.abort
    ) -> None:
        self._executor, self._hangs_at, self._poison, self._end = executor, hangs_at, poison, end
        self._launches = 0

    @property
    def in_flight(self) -> int:
        """Batches launched and not collected."""
        return self._executor.in_flight

    def launch(self, plan: BatchPlan, *, deferred: bool = False, contexts: ContextOf | None = None) -> None:
        """Launch, or not."""
        self._launches += 1
        while self._launches == self._hangs_at:
            time.sleep(1)
        if bool((plan.token_ids == self._poison).any()):
            self._end()
        self._executor.launch(plan, deferred=deferred, contexts=contexts)

    def sample(self, batch_id: BatchId, advance: Sequence[tuple[RequestId, int, Sequence[int]]]) -> None:
        """Let a deferred batch sample."""
        self._executor.sample(batch_id, advance)

    def ready(self) -> bool:
        """Whether the oldest batch's results are there."""
        return self._executor.ready()

    def pause_s(self) -> float:
        """How long to wait before the oldest batch is looked at again."""
        return self._executor.pause_s()

    def collect(self) -> BatchResult:
        """The oldest batch's results."""
        return self._executor.collect()


def _raise_at_arrival(host: RuntimeHost, token: int) -> None:
    step = host.engine.step

    def faulty(event: ObservedEvent) -> Step:
        if isinstance(event, RequestArrived) and np.frombuffer(prompt_bytes(event.prompt), np.int32)[0] == token:
            raise RuntimeError("a mistake in the core")
        return step(event)

    host.engine.step = faulty  # type: ignore[method-assign,assignment]  # a planted fault
