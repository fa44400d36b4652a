"""What a host needs of a device that counts the tokens routed to each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.events import ExpertLoadMeasured


class ExpertMeter(Protocol):
    """Reads the counters of a device. One reading at a time."""

    def begin(self) -> None:
        """Start a copy of the counters behind the batches launched so far; they begin again at 0. Returns at once."""

    def ready(self) -> bool:
        """Return whether `read` would return at once."""

    def read(self) -> NDArray[np.int64]:
        """Wait for the copy and return it: int64 [layers, experts]."""


class ExpertMover(Protocol):
    """Moves experts between the ranks of a device."""

    def move(self, layers: Sequence[int], placement: NDArray[np.int32]) -> None:
        """Start to move the experts of layers, behind the batches launched so far and in front of all later ones.

        Args:
            placement: int32 [layers, slots], the expert in each slot.
        """


class ExpertMeasuring:
    """The measurement that the engine ordered, until its event.

    Args:
        meter: None: this device counts nothing, and the engine orders no measurement.
    """

    def __init__(self, meter: ExpertMeter | None) -> None:
        self.meter = meter
        self.due = False  # whether a measurement was ordered and not reported

    def begin(self) -> None:
        """Start the ordered measurement."""
        assert self.meter is not None
        self.meter.begin()
        self.due = True

    @property
    def ready(self) -> bool:
        """Whether the ordered measurement can be reported without waiting."""
        return self.due and self.meter is not None and self.meter.ready()

    def event(self, now_us: int) -> ExpertLoadMeasured:
        """Wait for the measurement and return its event."""
        assert self.meter is not None
        self.due = False
        counts = self.meter.read()
        return ExpertLoadMeasured(now_us, len(counts), counts.astype("<i8", copy=False).tobytes())
