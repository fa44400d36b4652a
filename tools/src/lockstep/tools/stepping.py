"""Going through a journal forwards and backwards: the engine room of `lockstep replay --interactive`.

The replay is strict at every step. Now and then the engine is dumped as a snapshot, so that going back is restoring the
nearest one before and stepping forward from there; what comes out is compared by digest again.
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

SNAPSHOT_EVERY = 500  # steps at first; as the snapshots become many, every second is dropped and this is doubled
SNAPSHOTS_MAX = 64


class TakenStep(NamedTuple):
    """A step that was taken."""

    number: int
    event: ObservedEvent
    step: Step


class Stepper:
    """A replay that stands between two steps. `position` is the number of the next one."""

    def __init__(self, run: Path) -> None:
        """Raises JournalError if there is no journal to read, ConfigError if there are several."""
        journal = read_journal(engine_journal(run))
        if journal.first_step:
            raise ConfigError(
                f"the first {journal.first_step} events of {journal.folder} have expired: there is no beginning to "
                "step from\nhint: lockstep explain and lockstep journal verify take what is left"
            )
        self.folder, self.header = journal.folder, journal.header
        self.engine = Engine(self.header.config)
        self.names = Names()
        self.position = 0
        self.last: TakenStep | None = None  # None at the beginning, and where a step back was restored from a snapshot
        self.breaks: list[Condition] = []
        self._coming: Iterator[EventRecord] = journal.events()
        self._records: list[EventRecord] = []  # read so far
        self._snapshots: dict[int, bytes] = {0: snapshot.dump(self.engine)}
        self._every = SNAPSHOT_EVERY

    @property
    def ended(self) -> bool:
        """Whether the next step is beyond the journal."""
        return self._record(self.position) is None

    def forward(self) -> TakenStep | None:
        """Take one step; None at the end. Raises Divergence if it is decided otherwise than recorded."""
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
        """Stand before step `position`, or at the end if there are fewer; forwards or backwards."""
        position = max(position, 0)
        if position < self.position:
            starts = sorted(self._snapshots)
            # One step less, so that the step before is taken, and can be shown.
            start = starts[bisect_right(starts, max(position - 1, 0)) - 1]
            self.engine = snapshot.restore(self._snapshots[start])
            self.position, self.last = start, None
        while self.position < position and self.forward() is not None:
            pass

    def run(self, until: Condition | None = None) -> Condition | None:
        """Go on until a break, or `until`, holds; returns which did, None at the end."""
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
