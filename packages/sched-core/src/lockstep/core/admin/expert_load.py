"""The load of experts: when the host measures it, its sum since the engine began, and records of it.

    LaunchBatch ... LaunchBatch, MeasureExpertLoad ──> host: counts on the device since the last measurement
                                                         │
    loads += counts <────────── ExpertLoadMeasured ──────┘

The host is ordered to measure after every `expert_load_interval` launches, and when a control request needs the counts
up to now. A record is what was counted between its start and its stop, or until now:

    none --start--> recording --stop--> stopped          dump: the counts of the record, recording or stopped
                        ^---------start---'              start: drops the record before, and begins anew

Control requests are answered in their order, behind a measurement if a batch was launched since the last one. A restart
loses the counts that the device had not reported; the requests are then answered by the counts that were reported.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from lockstep.core.admin.expert_moves import ExpertPlacer
from lockstep.core.cluster.expert_placement import ExpertLoads
from lockstep.core.contract.commands import ControlAnswered, ExpertRecord, MeasureExpertLoad, Step
from lockstep.core.contract.events import ExpertLoadMeasured, RecordExpertLoad
from lockstep.core.features.view import AdminView
from lockstep.core.kv.component import Component, Restored

UNMEASURED = "the load of experts is not measured; set expert_load_interval"


class ExpertRecording(msgspec.Struct):
    """A record of the load of experts. `first` and `last` are the sums of all counts at its start and its stop."""

    started_us: int
    first: tuple[int, int, bytes] | None  # layers, reports, counts (ExpertLoads.image); None: nothing was counted yet
    launches: int  # of the engine before its start
    last: tuple[int, int, bytes] | None = None
    stopped_us: int = -1  # -1: it is recording
    launches_at_stop: int = 0


class ExpertImage(msgspec.Struct):
    """Measurements of the load of experts in a snapshot."""

    unmeasured: int  # launches since the newest order to measure
    ordered: bool
    recording: ExpertRecording | None = None
    asked: list[tuple[int, RecordExpertLoad]] = []


class ExpertPart(msgspec.Struct):
    """The load of experts as fields of a snapshot."""

    expert_loads: tuple[int, int, bytes] | UnsetType = UNSET  # layers, reports, counts
    expert_record: ExpertImage | UnsetType = UNSET  # unset: nothing is measured


class ExpertRecorder(Component):
    """Orders measurements of the load of experts, adds them up, and keeps one record of them.

    Attributes:
        loads: tokens routed to each expert since the engine began; None: nothing was reported.
    """

    PART = ExpertPart
    EMPTY_AT_REST = ()

    def __init__(self, scheduler: AdminView) -> None:
        interval = scheduler.config.expert_load_interval
        self._scheduler = scheduler
        self.placer = ExpertPlacer(scheduler)
        self.interval = 0 if isinstance(interval, UnsetType) else interval  # launches; 0: the load is not measured
        self.loads: ExpertLoads | None = None
        self._unmeasured = 0
        self._ordered = False
        self._recording: ExpertRecording | None = None
        self._asked: list[tuple[int, RecordExpertLoad]] = []

    def part(self) -> ExpertPart:
        """Return the state for a snapshot."""
        own: ExpertImage | UnsetType = UNSET
        if self.interval:
            own = ExpertImage(self._unmeasured, self._ordered, self._recording, list(self._asked))
        return ExpertPart(UNSET if self.loads is None else self.loads.image(), own)

    def load(self, part: ExpertPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        if not isinstance(part.expert_loads, UnsetType):
            self.loads = ExpertLoads.of_image(part.expert_loads)
        if not isinstance(part.expert_record, UnsetType):
            own = part.expert_record
            self._unmeasured, self._ordered = own.unmeasured, own.ordered
            self._recording, self._asked = own.recording, list(own.asked)

    # mechanism: expert-load (decided)
    def launched(self, step: Step) -> None:
        """Count a launch. Orders a measurement behind the last launch of an interval."""
        self._unmeasured += 1
        self.placer.launched(step)
        if self._unmeasured >= self.interval and not self._ordered:
            self._measure(step)

    def measured(self, event: ExpertLoadMeasured, step: Step) -> None:
        """Add a report to the sums, and answer the requests that waited for it.

        Raises: ContractError for a malformed report or one of another shape.
        """
        loads = ExpertLoads.folded(self.loads, event)
        self.placer.measured(loads, step)
        self.loads, self._ordered = loads, False
        self._answer_all(step)

    def ask(self, control_id: int, control: RecordExpertLoad, step: Step) -> str | None:
        """Carry out a request about the record. Returns the reason of a refusal, or None: it is answered by itself."""
        if not self.interval:
            return UNMEASURED
        self._asked.append((control_id, control))
        if self._unmeasured and not self._ordered:
            self._measure(step)
        if not self._ordered:
            self._answer_all(step)
        return None

    def restarted(self, step: Step) -> None:
        """Forget counts that the lost device has not reported, and answer the requests that waited for them."""
        self._unmeasured, self._ordered = 0, False
        self.placer.restarted()
        self._answer_all(step)

    def _measure(self, step: Step) -> None:
        self._unmeasured, self._ordered = 0, True
        step.commands.append(MeasureExpertLoad(self._scheduler.generation))

    def _answer_all(self, step: Step) -> None:
        asked, self._asked = self._asked, []
        for control_id, control in asked:
            step.commands.append(self._answer(control_id, control))

    def _answer(self, control_id: int, control: RecordExpertLoad) -> ControlAnswered:
        recording, now_us = self._recording, self._scheduler.now_us
        measured = self._scheduler.next_batch_id - self._unmeasured
        image = None if self.loads is None else self.loads.image()
        runs = recording is not None and recording.stopped_us < 0
        if control.action == "start":
            self._recording = ExpertRecording(now_us, image, measured)
            again = "; the record that was running is dropped" if runs else ""
            return ControlAnswered(control_id, True, f"the load of experts is recorded{again}")
        if recording is None or (control.action == "stop" and not runs):
            return ControlAnswered(control_id, False, "the load of experts is not being recorded; start a record first")
        if control.action == "stop":
            recording.last, recording.stopped_us = image, now_us
            recording.launches_at_stop = measured
            return ControlAnswered(control_id, True, "the record of the load of experts is stopped; dump returns it")
        last, stopped_us, launches = image, now_us, measured
        if not runs:
            last, stopped_us, launches = recording.last, recording.stopped_us, recording.launches_at_stop
        record = ExpertRecord(
            recording=runs,
            duration_us=stopped_us - recording.started_us,
            batches=launches - recording.launches,
            counts=_between(recording.first, last),
        )
        return ControlAnswered(control_id, True, "", experts=record)


def _between(first: tuple[int, int, bytes] | None, last: tuple[int, int, bytes] | None) -> Any:
    """Return the tokens routed to each expert between two moments: int64 [layers, experts]; [0, 0] if none were."""
    if last is None:
        return np.zeros((0, 0), np.int64)
    counts = ExpertLoads.of_image(last).counts
    return counts - (0 if first is None else ExpertLoads.of_image(first).counts)
