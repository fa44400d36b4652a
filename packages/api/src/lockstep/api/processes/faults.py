"""Faults for tests of recovery: an engine dies at a point that a test cannot reach from outside the process.

LOCKSTEP_FAULT is one of

    written:N[:GENERATIONS[:EVENT]]
                        killed after the Nth write of records, before any command of that write is performed or
                        sent; with EVENT, only writes with an event of this type count
    recovered           killed in every second generation, after recovery and before anything was sent
    hang:N              hangs at the Nth launch of its first generation
    poison:TOKEN        aborts whenever a batch computes this token
    greedy:TOKEN        killed whenever a batch computes this token, as the operating system does when memory runs out
    arrival:TOKEN       the core raises whenever a prompt that begins with this token arrives

`written` kills the first GENERATIONS generations, by default one. Faults are set by the process environment only.
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
"""Least and greatest number of integers after each fault's name. `written` takes an event's name after its integers."""


def install(host: RuntimeHost, generation: int) -> None:
    """Install the fault in LOCKSTEP_FAULT. Raises ConfigError if the value is malformed."""
    given = os.environ.get(VARIABLE, "")
    if not given:
        return
    point, *texts = given.split(":")
    least, most = POINTS.get(point, (1, 0))
    kind = texts.pop() if point == "written" and len(texts) == 3 else ""
    if not least <= len(texts) <= most or not all(text.isdecimal() for text in texts):
        raise ConfigError(f"{VARIABLE} must be {', '.join(POINTS)} with their numbers, got `{given}`")
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
    """A journal that kills the process after the Nth write, counting writes with an event of the given kind."""

    def __init__(self, journal: JournalSink, writes: int, kind: str) -> None:
        self._journal, self._left, self._kind = journal, writes, kind
        self._found = not kind

    def append(self, event: ObservedEvent, digest: bytes) -> None:
        """Record one event."""
        self._found = self._found or type(event).__name__ == self._kind
        self._journal.append(event, digest)

    def append_unsealed(self, event: ObservedEvent) -> None:
        """Record an event with a step that raised."""
        self._journal.append_unsealed(event)

    def flush(self) -> None:
        """Write the records, then kill the process if this is the Nth counted write."""
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
        """Number of batches launched and not collected."""
        return self._executor.in_flight

    def launch(self, plan: BatchPlan, *, deferred: bool = False, contexts: ContextOf | None = None) -> None:
        """Launch a batch, or fail if the fault applies to it."""
        self._launches += 1
        while self._launches == self._hangs_at:
            time.sleep(1)
        if bool((plan.token_ids == self._poison).any()):
            self._end()
        self._executor.launch(plan, deferred=deferred, contexts=contexts)

    def sample(self, batch_id: BatchId, advance: Sequence[tuple[RequestId, int, Sequence[int]]]) -> None:
        """Sample a deferred batch."""
        self._executor.sample(batch_id, advance)

    def ready(self) -> bool:
        """Return whether the results of the oldest batch are available."""
        return self._executor.ready()

    def pause_s(self) -> float:
        """Return the seconds until the next check for the results of the oldest batch."""
        return self._executor.pause_s()

    def collect(self) -> BatchResult:
        """Return the results of the oldest batch."""
        return self._executor.collect()


def _raise_at_arrival(host: RuntimeHost, token: int) -> None:
    step = host.engine.step

    def faulty(event: ObservedEvent) -> Step:
        if isinstance(event, RequestArrived) and np.frombuffer(prompt_bytes(event.prompt), np.int32)[0] == token:
            raise RuntimeError("a planted fault in the core")
        return step(event)

    host.engine.step = faulty  # type: ignore[method-assign,assignment]  # a planted fault
