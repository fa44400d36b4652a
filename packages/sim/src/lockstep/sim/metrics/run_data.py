"""A measured run: columns, packed rows, and the summary that metrics.json holds."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.contract.commands import (
    Int64s,
)
from lockstep.sim.metrics.columns import Batches, CpuIntervals, Requests, Series, Summary, objects
from lockstep.sim.metrics.drafts import Drafts
from lockstep.sim.metrics.latency import measure_slo
from lockstep.sim.metrics.packed import Packed
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.metrics.stages import StageTimes
from lockstep.sim.metrics.value_counts import ValueCounts


@dataclass(frozen=True, eq=False)
class RunData:
    """A run, measured: columns for reports and analysis, and a summary ready for JSON."""

    requests: Requests
    series: Series
    itl_us: ValueCounts  # every gap of every completed request
    span_us: tuple[int, int]  # first arrival, last event
    summary: Summary
    packed: Packed  # what `batches` and `cpu` are made from
    drafts: Drafts | None = None  # of engines that verify any, or compute what grammars force
    stages: StageTimes | None = None  # of an engine with microbatches
    encoder: Int64s | None = None  # [n, 4]: start and stop in us, contents, tokens of what it did; None: nothing known

    @property
    def batches(self) -> Batches:
        """Every batch, 72 bytes each and their modes. Each access makes new arrays: keep the result while reading."""
        column, modes = self.packed.batches.column, objects(self.packed.modes)
        numbers = {name: column(name) for name in self.packed.batches.names if name != "mode"}
        return Batches(mode=modes[column("mode")], **numbers)

    @property
    def cpu(self) -> CpuIntervals:
        """Intervals of work of the scheduler's CPU. Each access makes new arrays, like `batches`."""
        column, works = self.packed.cpu.column, objects(self.packed.works)
        start_us = column("start_us")
        return CpuIntervals(start_us, start_us + column("took_us"), works[column("work")])

    def measured_us(self, slo: Slo) -> float | None:
        """Return the latency that `slo` bounds; infinite if too many requests failed, None if nothing was measured.

        A failed request counts as infinitely late: refusing work must not look like doing it fast.
        """
        return measure_slo(slo, self.requests, self.itl_us)

    def meets(self, slo: Slo) -> bool | None:
        """Whether `slo` holds for the run; None, which is no yes, if nothing was measured."""
        measured_us = self.measured_us(slo)
        return None if measured_us is None else measured_us <= slo.bound_us
