"""Placements of experts by their load: how many there were, what moved, and the imbalance before and after."""

from __future__ import annotations

from typing import Any

from lockstep.core.contract.events import ExpertsPlaced


class ExpertCounts:
    """A fold over the placements of one engine."""

    def __init__(self) -> None:
        self._placements: list[ExpertsPlaced] = []

    def learn(self, event: ExpertsPlaced) -> None:
        """Count a placement."""
        self._placements.append(event)

    def describe(self) -> dict[str, Any]:
        """Return the figures. The imbalances are loads of the fullest rank over the mean, as means over layers."""
        found = self._placements
        return {
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
