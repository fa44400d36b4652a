"""Simulates a recorded run with its own facts, and compares every step with the journal.

outcome = rerun(Path("runs/served"))
outcome.difference          # None: every event, every decision and every command is the same
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from simpy import Environment

from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import BatchFinished, ObservedEvent
from lockstep.core.journal.replay import fold
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.cost import BatchShape, CpuModel, Duration
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.host_options import HostFeatures, HostLinks, HostOptions
from lockstep.sim.rerun.facts import RecordedDevice, RecordedFacts
from lockstep.sim.rerun.record import RecordedRun, read_run


class FoldedEvent(NamedTuple):
    """An event with its Step."""

    event: ObservedEvent
    step: Step


class StepDifference(NamedTuple):
    """The first step in which journal and simulation differ."""

    place: int  # events before it
    launches: int  # launches before it
    recorded: FoldedEvent | None  # None: the journal has ended
    simulated: FoldedEvent | None  # None: the simulated host does nothing more, or `refused`
    refused: str = ""  # why the simulation stopped


@dataclass(frozen=True)
class Rerun:
    """A recorded run that was simulated again."""

    run: RecordedRun
    launches: int
    given: Mapping[str, int]  # events from outside of scheduler and host, by type
    answers: Mapping[str, int]  # answers to orders, by type
    made: Mapping[str, int]  # other events of the simulated host, by type
    difference: StepDifference | None


def rerun(folder: Path) -> Rerun:
    """Simulate a recorded run with its own facts, up to its end or to the first difference.

    Raises: JournalError; Divergence; ConfigError for a journal whose events depend on another process.
    """
    run = read_run(folder)
    engine, facts = run.engine(), RecordedFacts(run)
    compared = _Compared(run, engine)
    env = Environment()
    host = EngineHost(
        env,
        engine,
        facts,
        _NoCost(),
        CpuModel(),
        NoJournal(),
        compared,
        HostOptions(
            decode_runs=False,
            links=HostLinks(device_type=partial(RecordedDevice, run, engine)),
            features=HostFeatures(record=facts),
        ),
    )
    env.process(host.run())
    difference = None
    try:
        env.run()
        if compared.place < run.steps:
            difference = compared.differs(None, "the simulated host waits, and no fact is due")
    except _Parted as parted:
        difference = parted.difference
    except LockstepError as error:
        difference = compared.differs(None, f"{type(error).__name__}: {error}")
    given = Counter(type(one.event).__name__ for one in run.given if one.answers is None)
    answers = Counter(type(one.event).__name__ for one in run.given if one.answers is not None)
    return Rerun(run, compared.launches, given, answers, compared.folded - given - answers, difference)


class _NoCost:
    """The cost model of batches whose times are recorded."""

    def batch_us(self, shape: BatchShape) -> Duration:
        """Return no time."""
        return Duration(0.0, 0.0)

    def describe(self) -> dict[str, Any]:
        """Return the kind."""
        return {"kind": "recorded"}


class _Parted(Exception):
    """The simulated step differs from the recorded one."""

    def __init__(self, difference: StepDifference) -> None:
        super().__init__(difference)
        self.difference = difference


class _Compared:
    """The metrics sink of the simulated host: compares each step with the recorded one."""

    def __init__(self, run: RecordedRun, engine: Engine) -> None:
        self._steps = fold(run.folder)
        self._run, self._engine = run, engine
        self.place = 0
        self.launches = 0
        self.folded: Counter[str] = Counter()

    def observe(self, event: ObservedEvent, step: Step) -> None:
        """Compare a step. A step behind the end of the journal is not compared. Raises _Parted."""
        if self.place == self._run.steps:
            return
        recorded = FoldedEvent(*next(self._steps))
        if not self._same_event(recorded.event, event) or not same(recorded.step, step):
            raise _Parted(StepDifference(self.place, self.launches, recorded, FoldedEvent(event, step)))
        self.place += 1
        self.launches += step.launched() is not None
        self.folded[type(event).__name__] += 1

    def differs(self, simulated: FoldedEvent | None, refused: str) -> StepDifference:
        """Return the difference at the next step, which was not simulated."""
        recorded = next(self._steps, None)
        return StepDifference(
            self.place, self.launches, None if recorded is None else FoldedEvent(*recorded), simulated, refused
        )

    def _same_event(self, recorded: ObservedEvent, simulated: ObservedEvent) -> bool:
        if isinstance(recorded, BatchFinished) and isinstance(simulated, BatchFinished):
            return decisive(recorded, self._engine.generation) == decisive(simulated, self._engine.generation)
        return recorded == simulated

    def gauge(self, time_us: int, waiting: int, running: int, free_pages: int, cached_pages: int) -> None:
        """Measure nothing."""

    def cpu_interval(self, start_us: int, stop_us: int, what: str) -> None:
        """Measure nothing."""


def decisive(result: BatchFinished, generation: int) -> BatchFinished:
    """Return a result without what the core does not read: logprobs, and all of a result that a restart made void."""
    if result.generation < generation:
        return BatchFinished(result.time_us, result.batch_id, generation=result.generation)
    return msgspec.structs.replace(
        result,
        logprobs=b"",
        top_ids=b"",
        top_logprobs=b"",
        invalid=tuple(sorted(result.invalid)),
        text_stops=tuple(sorted(result.text_stops)),
        grammar_ended=tuple(sorted(result.grammar_ended)),
        text_held=tuple(sorted(result.text_held)),
    )


def same(first: Any, other: Any) -> bool:
    """Return whether two values are equal: structs field by field, arrays entry by entry."""
    if type(first) is not type(other):
        return False
    if isinstance(first, msgspec.Struct):
        return all(same(getattr(first, name), getattr(other, name)) for name in first.__struct_fields__)
    if isinstance(first, np.ndarray):
        return first.dtype == other.dtype and np.array_equal(first, other)
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(same, first, other))
    return bool(first == other)
