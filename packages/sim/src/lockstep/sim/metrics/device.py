"""Busy time of the device of a run: busy spans, gaps between decodes, time with open requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.core.contract.commands import (
    Int64s,
)
from lockstep.sim.metrics.columns import Requests
from lockstep.sim.metrics.packed import JoinedPacked, Packed
from lockstep.sim.metrics.packed_rows import PackedRows
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.spans import Spans
from lockstep.sim.metrics.value_counts import ValueCounts, ValueCountsBuilder


@dataclass(frozen=True, slots=True, eq=False)
class DeviceUse:
    """Sums over the batches of a run: busy time of the device, gaps between decodes, batches by mode."""

    batches_by_mode: dict[str, int]
    busy: Spans
    decode_gaps_us: ValueCounts  # idle times between consecutive decode batches
    busy_after_decode_us: int  # duration of the second batch of each such pair, summed

    @classmethod
    def of(cls, packed: Packed | JoinedPacked) -> DeviceUse:
        mode_counts = np.zeros(len(packed.modes), np.int64)
        for (mode,) in packed.batches.parts("mode"):
            mode_counts += np.bincount(mode, minlength=len(packed.modes))
        decode = next(
            (i for i, mode in enumerate(packed.modes) if mode in ("decode", "verify", "diffusion_extend")), -1
        )
        gaps_us, busy_after_us = ValueCountsBuilder(), 0
        busy: list[Spans] = []
        # end and kind of the last batch of the previous part
        before_us, decoded = np.empty(0, np.int64), np.empty(0, np.bool_)
        for mode, started_us, finished_us in by_start(packed.batches):
            busy.append(Spans.union(started_us, finished_us))
            ends_us, decodes = np.append(before_us, finished_us), np.append(decoded, mode == decode)
            begins_us = started_us[1 - len(before_us) :]
            both = decodes[1:] & decodes[:-1]
            gaps_us.add(np.maximum(begins_us - ends_us[:-1], 0)[both])
            busy_after_us += int((finished_us - started_us)[1 - len(before_us) :][both].sum())
            before_us, decoded = ends_us[-1:], decodes[-1:]
        starts = [np.empty(0, np.int64), *(part.starts for part in busy)]
        stops = [np.empty(0, np.int64), *(part.stops for part in busy)]
        return cls(
            batches_by_mode=dict(sorted(zip(packed.modes, mode_counts.tolist(), strict=True))),
            busy=Spans.union(np.concatenate(starts), np.concatenate(stops)),
            decode_gaps_us=gaps_us.build(),
            busy_after_decode_us=busy_after_us,
        )


def at_work(requests: Requests, last_us: int) -> Spans:
    """Return the spans with at least one open request. A request that never ended is open until `last_us`."""
    return Spans.union(requests.arrival_us, np.where(requests.ended_us < 0, last_us, requests.ended_us))


def at_work_us(run: RunData) -> int:
    """Return the time with at least one open request."""
    return at_work(run.requests, run.span_us[1]).total_us()


def decode_gaps_us(run: RunData) -> tuple[ValueCounts, int]:
    """Return the idle times between consecutive decode batches, and the total time of the second batches, in us."""
    if run.decode_gaps is not None:
        return run.decode_gaps
    device = DeviceUse.of(run.packed)
    return device.decode_gaps_us, device.busy_after_decode_us


def by_start(batches: PackedRows) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """Yield mode, start and end of batches with known times, ordered by start.

    Parts that are already in that order are yielded one by one; otherwise all batches are sorted and yielded as one
    part.
    """

    def measured() -> Iterator[tuple[Int64s, Int64s, Int64s]]:
        for mode, started_us, finished_us in batches.parts("mode", "started_us", "finished_us"):
            known = finished_us >= 0
            if known.any():
                yield mode[known], started_us[known], finished_us[known]

    latest_us = -1
    for _, started_us, _ in measured():
        if started_us[0] < latest_us or (np.diff(started_us) < 0).any():
            break
        latest_us = int(started_us[-1])
    else:
        yield from measured()
        return
    mode, started_us, finished_us = (np.concatenate(column) for column in zip(*measured(), strict=True))
    order = np.argsort(started_us, kind="stable")
    yield mode[order], started_us[order], finished_us[order]
