"""The load of experts as it was measured, and their placements by it: what moved, the imbalance before and after."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.cluster.expert_placement import counts_of
from lockstep.core.contract.events import ExpertLoadMeasured, ExpertsPlaced


class ExpertCounts:
    """A fold over the measurements and placements of one engine."""

    def __init__(self) -> None:
        self._measurements = 0
        self._load: NDArray[np.int64] | None = None
        self._placements: list[ExpertsPlaced] = []

    def measured(self, event: ExpertLoadMeasured) -> None:
        """Add a measurement."""
        counts = counts_of(event)
        self._measurements += 1
        self._load = counts if self._load is None else self._load + counts

    def placed(self, event: ExpertsPlaced) -> None:
        """Count a placement."""
        self._placements.append(event)

    def describe(self) -> dict[str, Any]:
        """Return the figures. Imbalances are loads over the mean: of the fullest expert, or of the fullest rank."""
        load = np.zeros((1, 1), np.int64) if self._load is None else self._load
        fullest = load.max(1) / np.maximum(load.mean(1), 1e-12)
        figures: dict[str, Any] = {
            "measurements": self._measurements,
            "tokens": int(load.sum()),
            "fullest_expert_mean": float(fullest.mean()),
        }
        if found := self._placements:
            figures |= {
                "placements": len(found),
                "moved": sum(one.moves for one in found),
                "imbalance_before_mean": sum(one.before_permille for one in found) / len(found) / 1000,
                "imbalance_after_mean": sum(one.after_permille for one in found) / len(found) / 1000,
                "placed": [
                    {
                        "time_us": one.time_us,
                        "layers": one.layers,
                        "moved": one.moves,
                        "imbalance_before": one.before_permille / 1000,
                        "imbalance_after": one.after_permille / 1000,
                    }
                    for one in found
                ],
            }
        return figures
