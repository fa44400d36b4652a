"""What drafts beside which ranks, and counts of drafts: verified, right, and the first n of a verification right."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import SpeculativeMethod
from lockstep.core.contract.errors import ConfigError
from lockstep.host.batches import Int32s


def draft_method(folder: str | Path) -> SpeculativeMethod:
    """Return the method of a folder that drafts: eagle for a head of EAGLE-3, otherwise draft_model."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        names = found.get("architectures") or ["none"]
    except (OSError, ValueError, AttributeError):
        return "draft_model"  # its loader explains what is wrong
    return "eagle" if isinstance(names[0], str) and "Eagle3" in names[0] else "draft_model"


@dataclass(frozen=True, slots=True)
class DraftingRanks:
    """How many processes run the model that is drafted for.

    Args:
        split: ranks that split its layers; data-parallel ranks, of which each has all of the attention, count as one.
        stages: pipeline stages, of which the first has a draft model.
        shared: data-parallel ranks, of which each has the whole draft model for the requests of its own.
    """

    split: int = 1
    stages: int = 1
    shared: int = 1

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.split * self.stages * self.shared


def check_draft_model(folder: str | Path | None, method: object, ranks: DraftingRanks) -> None:
    """Raise ConfigError if the speculative method and the draft model do not fit together, or not these ranks."""
    if folder is None and method in ("draft_model", "eagle"):
        raise ConfigError(f"`speculative_method` is {method}, but no `draft_model` is given\nhint: give its folder")
    if method == "mtp" and ranks.processes > 1:
        raise ConfigError(
            f"`speculative_method` is mtp, but {ranks.processes} processes run the model: its layer is not split\n"
            "hint: speculative_method ngram needs no layer"
        )
    if folder is not None and method not in ("draft_model", "eagle"):
        raise ConfigError(f"`draft_model` is {folder}, but `speculative_method` is {method}\nhint: drop one of the two")
    if method == "eagle" and ranks.processes > 1:
        raise ConfigError(
            f"`draft_model` is a head, {folder}, but {ranks.processes} processes run the model, whose layers it reads\n"
            "hint: speculative_method ngram, or a draft model beside pp or attention_dp"
        )
    if folder is not None and ranks.split > 1:
        raise ConfigError(
            f"`draft_model` is {folder}, but `tp` is {ranks.split}: a draft model is not split\n"
            "hint: speculative_method ngram needs no model"
        )


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
