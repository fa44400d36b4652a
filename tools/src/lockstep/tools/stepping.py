"""Steps through a journal forwards and backwards, for `lockstep replay --interactive`.

The replay is strict at every step. At intervals the engine is dumped as a snapshot. A move backwards restores the
nearest earlier snapshot and steps forward from there, again with digests compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ConfigError, LockstepError
from lockstep.core.contract.events import ObservedEvent
from lockstep.core.contract.render import Names
from lockstep.core.journal import snapshot
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import EventRecord
from lockstep.core.journal.replay import Divergence
from lockstep.core.scheduler.engine import Engine
from lockstep.tools.conditions import Condition
from lockstep.tools.runs import engine_journal

SNAPSHOT_EVERY = 500  # steps between snapshots at first; at SNAPSHOTS_MAX every second is dropped and this is doubled
SNAPSHOTS_MAX = 64


class TakenStep(NamedTuple):
    """A step that was replayed."""

    number: int
    event: ObservedEvent
    step: Step


class Stepper:
    """A replay between two steps. `position` is the number of the next step."""

    def __init__(self, run: Path) -> None:
        """Open a journal. Raises JournalError if there is none, ConfigError if there are several or it has expired."""
        journal = read_journal(engine_journal(run))
        if journal.first_step:
            raise ConfigError(
                f"the first {journal.first_step} events of {journal.folder} have expired: it cannot be stepped through "
                "from the start\nhint: lockstep explain and lockstep journal verify accept the rest"
            )
        self.folder, self.header = journal.folder, journal.header
        self.engine = Engine(self.header.config)
        self.names = Names()
        self.position = 0
        self.last: TakenStep | None = None  # None at the beginning, and right after a snapshot was restored
        self.breaks: list[Condition] = []
        self._coming: Iterator[EventRecord] = journal.events()
        self._records: list[EventRecord] = []  # read so far
        self._snapshots: dict[int, bytes] = {0: snapshot.dump(self.engine)}
        self._every = SNAPSHOT_EVERY

    @property
    def ended(self) -> bool:
        """Whether the journal has no further step."""
        return self._record(self.position) is None

    def forward(self) -> TakenStep | None:
        """Replay one step; return None at the end. Raises Divergence if its decisions differ from the recorded ones."""
        record = self._record(self.position)
        if record is None:
            return None
        try:
            step = self.engine.step(record.event)
        except LockstepError as error:
            cause = f"{type(error).__name__}: {error}"
            raise Divergence(self.header, record, None, self.folder, cause) from error
        if step.digest != record.digest:
            raise Divergence(self.header, record, step.digest, self.folder)
        self.names.observe(record.event)
        self.last = TakenStep(self.position, record.event, step)
        self.position += 1
        if self.position % self._every == 0 and self.position not in self._snapshots:
            self._keep()
        return self.last

    def go_to(self, position: int) -> None:
        """Move before step `position`, forwards or backwards, or to the end if there are fewer steps."""
        position = max(position, 0)
        if position < self.position:
            starts = sorted(self._snapshots)
            # One step less, so that the step before `position` is replayed and can be shown.
            start = starts[bisect_right(starts, max(position - 1, 0)) - 1]
            self.engine = snapshot.restore(self._snapshots[start])
            self.position, self.last = start, None
        while self.position < position and self.forward() is not None:
            pass

    def run(self, until: Condition | None = None) -> Condition | None:
        """Step until a break or `until` holds; return this condition, or None at the end of the journal."""
        conditions = [*self.breaks, *([until] if until is not None else [])]
        while (done := self.forward()) is not None:
            for condition in conditions:
                if condition.holds(*done, self.engine, self.names):
                    return condition
        return None

    def _record(self, number: int) -> EventRecord | None:
        while len(self._records) <= number:
            record = next(self._coming, None)
            if record is None:
                return None
            self._records.append(record)
        return self._records[number]

    def _keep(self) -> None:
        self._snapshots[self.position] = snapshot.dump(self.engine)
        if len(self._snapshots) > SNAPSHOTS_MAX:
            self._every *= 2
            self._snapshots = {at: data for at, data in self._snapshots.items() if at % self._every == 0}
