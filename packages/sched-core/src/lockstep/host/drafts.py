"""Counts of drafts: verified, right, and verifications whose first n drafts were right."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import SpeculativeMethod
from lockstep.host.batches import Int32s


def draft_method(folder: str | Path) -> SpeculativeMethod:
    """Return the method of a folder that drafts: eagle for a head of EAGLE-3, otherwise draft_model."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        names = found.get("architectures") or ["none"]
    except (OSError, ValueError, AttributeError):
        return "draft_model"  # its loader explains what is wrong
    return "eagle" if isinstance(names[0], str) and "Eagle3" in names[0] else "draft_model"


@dataclass(slots=True)
class DraftCounts:
    """Totals since the engine started, over all verifying rows with a result, dead rows included."""

    verifications: int = 0  # rows of batches that verified, rows without room for a draft included
    drafts: int = 0
    right: int = 0  # drafts
    forced: int = 0  # tokens forced by grammars and computed in a verification; not part of the counts above
    right_by_position: list[int] = field(default_factory=list)  # verifications with the first n drafts right, n from 1

    @property
    def accepted_length_mean(self) -> float:
        """Mean tokens per verification and row: the right drafts and one. 0 without verifications."""
        return 1 + self.right / self.verifications if self.verifications else 0.0

    @property
    def acceptance_ratio(self) -> float:
        """Right drafts over drafts; 0 without drafts."""
        return self.right / self.drafts if self.drafts else 0.0

    def fold(self, plan: BatchPlan, accepted: Int32s | None) -> None:
        """Count a batch that verified; `accepted` as in `BatchResult`."""
        assert plan.speculation is not None
        verifying = plan.sample_rows >= plan.extend_rows
        right = np.zeros(len(verifying), np.int32) if accepted is None else accepted - np.int32(1)
        right = right[verifying]
        if plan.speculation.forced_lengths.size:
            free = plan.speculation.forced_lengths == 0
            self.forced += int(plan.speculation.forced_lengths.sum())
            right = right[free]
        if plan.speculation.method == "forced":
            return
        self.verifications += len(right)
        self.drafts += int(plan.speculation.drafted().sum())
        self.right += int(right.sum())
        most = int(right.max(initial=0))
        self.right_by_position += [0] * (most - len(self.right_by_position))
        for position in range(most):
            self.right_by_position[position] += int(np.count_nonzero(right > position))
