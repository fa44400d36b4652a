"""Reads the counts of tokens by expert: of one rank, or the sum over the ranks that count together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.runtime.errors import DeviceLost
from lockstep.runtime.expert_load import ExpertCounter
from lockstep.runtime.overlap import Download, StreamLane
from lockstep.runtime.rank_wire import MeasureExperts

if TYPE_CHECKING:
    from lockstep.runtime.ranks import RankGroup


class DeviceMeter:
    """Reads the counter of one rank: `lockstep.host.expert_load.ExpertMeter`."""

    def __init__(self, counter: ExpertCounter, lane: StreamLane) -> None:
        self._counter, self._lane = counter, lane
        self._download: Download | None = None

    def begin(self) -> None:
        """Start a copy of the counts behind all launched work. Raises DeviceLost."""
        with self._lane.stream(), torch.inference_mode():
            begun = self._lane.begin()
            self._download = self._lane.download({"counts": self._counter.take()}, begun)

    def ready(self) -> bool:
        """Return whether the copy has arrived."""
        return self._download is not None and (self._lane.device.type == "cpu" or self._download.ready())

    def read(self) -> NDArray[np.int64]:
        """Wait for the copy and return it: int64 [layers, experts]. Raises DeviceLost."""
        assert self._download is not None
        download, self._download = self._download, None
        counts: NDArray[np.int64] = download.wait()["counts"]
        return counts


class LeadMeter:
    """Reads the sum of the counters of all ranks."""

    def __init__(self, meter: DeviceMeter, group: RankGroup) -> None:
        self._meter, self._group = meter, group

    def begin(self) -> None:
        """Start a copy of the sum, in which every rank takes part. Raises RankLost, DeviceLost."""
        self._group.tell(MeasureExperts())
        try:
            self._meter.begin()
        except DeviceLost as error:
            raise self._group.explain(error) from error

    def ready(self) -> bool:
        """Return whether the copy has arrived."""
        return self._meter.ready()

    def read(self) -> NDArray[np.int64]:
        """Wait for the sum and return it: int64 [layers, experts]. Raises RankLost, DeviceLost."""
        try:
            return self._meter.read()
        except DeviceLost as error:
            raise self._group.explain(error) from error
