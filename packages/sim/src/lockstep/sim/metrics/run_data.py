"""A measured run: columns, packed rows, and the summary for metrics.json."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.core.contract.commands import (
    Int64s,
)
from lockstep.sim.metrics.blocks import BlockCounts
from lockstep.sim.metrics.columns import (
    BATCH_COLUMNS,
    CPU_COLUMNS,
    Batches,
    CpuIntervals,
    Requests,
    Series,
    Summary,
    objects,
)
from lockstep.sim.metrics.drafts import Drafts
from lockstep.sim.metrics.latency import measure_slo
from lockstep.sim.metrics.packed import JoinedPacked, Packed
from lockstep.sim.metrics.packed_rows import PackedRows
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.metrics.stages import StageTimes
from lockstep.sim.metrics.value_counts import ValueCounts


@dataclass(frozen=True, eq=False)
class RunData:
    """A measured run: columns for reports and analysis, and a summary ready for JSON."""

    requests: Requests
    series: Series
    itl_us: ValueCounts  # every gap of every completed request
    span_us: tuple[int, int]  # first arrival, last event
    summary: Summary
    packed: Packed | JoinedPacked  # source of `batches` and `cpu`
    drafts: Drafts | None = None  # of engines that verify drafts or compute forced tokens
    stages: StageTimes | None = None  # of an engine with microbatches
    encoder: Int64s | None = None  # [intervals, 4]: start and stop in us, contents, tokens; None: unknown
    decode_gaps: tuple[ValueCounts, int] | None = None  # see `device.decode_gaps_us`, which computes it if it is None
    blocks: BlockCounts | None = None  # of engines whose model answers in blocks

    @property
    def batches(self) -> Batches:
        """Every batch, 72 bytes each plus modes. Each access makes new arrays, so keep the result."""
        column, modes = self.packed.batches.column, objects(self.packed.modes)
        numbers = {name: column(name) for name in self.packed.batches.names if name != "mode"}
        return Batches(mode=modes[column("mode")], **numbers)

    @property
    def cpu(self) -> CpuIntervals:
        """Intervals of CPU work of the scheduler. Each access makes new arrays, like `batches`."""
        column, works = self.packed.cpu.column, objects(self.packed.works)
        start_us = column("start_us")
        return CpuIntervals(start_us, start_us + column("took_us"), works[column("work")])

    def without_batches(self) -> RunData:
        """Return the data without its long lists: batches and CPU intervals are empty."""
        packed = Packed(PackedRows(*BATCH_COLUMNS), (), PackedRows(*CPU_COLUMNS), ())
        return replace(self, packed=packed)

    def measured_us(self, slo: Slo) -> float | None:
        """Return the latency in us that `slo` bounds; infinite if too many requests failed, None without measurements.

        A failed request counts as infinitely late, because rejecting requests must not improve the latency.
        """
        return measure_slo(slo, self.requests, self.itl_us)

    def meets(self, slo: Slo) -> bool | None:
        """Return whether `slo` holds for the run; None if nothing was measured."""
        measured_us = self.measured_us(slo)
        return None if measured_us is None else measured_us <= slo.bound_us
