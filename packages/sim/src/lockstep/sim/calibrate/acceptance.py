"""Acceptance of drafts in a run, measured from its journal and predicted by the simulator's model.

    seen = read_verifications(folder)          # each row of a journal that verified drafts, with its right drafts
    rates = fitted_rates(seen)                 # the chance of draft 1, 2, ..., each given that those before were right
    seen.accepted_length, predicted_length(seen, rates)
    halves(seen)                               # fitted to one half of the requests, compared with the other half

The model of `speculation.py` has one chance per position of a draft, equal for all requests and all parts of a text.
Real text is not so uniform. The error of the model is measured on halves: each is predicted by a fit of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import BatchPlan, LaunchBatch
from lockstep.core.contract.events import BatchFinished, EngineRestarted
from lockstep.core.journal.replay import fold
from lockstep.core.requests.delivery import accepted_counts
from lockstep.sim.cost import CalibrationError
from lockstep.sim.host.speculation import DEFAULT_RATES

Int64s = NDArray[np.int64]
ROWS_MIN = 50  # rows with drafts that a fit requires


@dataclass(frozen=True, eq=False)
class Verifications:
    """Verified rows, dead rows included; rows with tokens that a grammar forced are left out. Arrays: int64 [rows]."""

    method: str
    requests: Int64s
    drafts: Int64s  # number of drafts
    right: Int64s  # number of right drafts

    def only(self, rows: NDArray[np.bool_]) -> Verifications:
        """Return the rows that a mask selects."""
        return Verifications(self.method, self.requests[rows], self.drafts[rows], self.right[rows])

    @property
    def accepted_length(self) -> float:
        """Mean tokens of a row per verification: its right drafts and one more token."""
        return 1.0 + float(self.right.mean()) if len(self.right) else 1.0

    @property
    def by_position(self) -> list[float]:
        """For n = 1, 2, ...: the share of rows with the first n drafts right, among rows with at least n drafts."""
        shares = []
        for number in range(1, int(self.drafts.max(initial=0)) + 1):
            had = self.drafts >= number
            shares.append(float(np.count_nonzero(self.right[had] >= number) / np.count_nonzero(had)))
        return shares


def read_verifications(folder: str | Path) -> Verifications:
    """Return the verifications of a journal.

    Raises:
        CalibrationError: fewer than ROWS_MIN rows verified drafts.
        JournalError, Divergence: the journal cannot be replayed.
    """
    launched: dict[int, BatchPlan] = {}
    parts: list[Int64s] = []  # [3, rows] each: request, drafts, right
    method = ""
    for event, step in fold(folder):
        if isinstance(event, EngineRestarted):
            launched.clear()
        elif isinstance(event, BatchFinished) and (plan := launched.pop(event.batch_id, None)) is not None:
            speculation = plan.speculation
            if event.error or speculation is None:
                continue
            method = speculation.method
            verifying = plan.sample_rows >= plan.extend_rows
            found_counts = accepted_counts(event, len(verifying))
            accepted = found_counts if found_counts is not None else np.ones(len(verifying), np.int32)
            if speculation.parents.size:
                raise CalibrationError(
                    f"{folder}: its drafts are trees, a fit needs chains\nhint: the run's metrics.json has the "
                    "acceptance by depth and rank, for --acceptance 0.7/0.15,0.6/0.2"
                )
            free = np.ones(len(speculation.draft_lengths), np.bool_)
            if speculation.forced_lengths.size:
                free = speculation.forced_lengths == 0
            requests, drafts = plan.request_ids[plan.extend_rows :][free], speculation.draft_lengths[free]
            right = (accepted[verifying] - 1)[free]
            parts.append(np.stack([requests, drafts, right]).astype(np.int64))
        for command in step.commands:
            if isinstance(command, LaunchBatch) and command.plan.speculation is not None:
                if command.plan.speculation.method != "forced":
                    launched[command.plan.batch_id] = command.plan
    found = Verifications(method, *np.concatenate([np.empty((3, 0), np.int64), *parts], axis=1))
    if (rows := int(np.count_nonzero(found.drafts))) < ROWS_MIN:
        raise CalibrationError(
            f"{folder}: {rows} rows verified drafts, a fit needs {ROWS_MIN}\n"
            "hint: a journal of `lockstep serve --set speculative_method=ngram --journal DIR`, under load"
        )
    return found


def fitted_rates(seen: Verifications) -> tuple[float, ...]:
    """Return the chances of draft 1, 2, ..., given that those before it were right.

    The chances end before the first draft that was never verified behind right drafts.
    """
    rates = []
    for number in range(int(seen.drafts.max(initial=0))):
        had = (seen.drafts > number) & (seen.right >= number)
        if not had.any():
            break
        rates.append(float(np.count_nonzero(seen.right[had] > number) / np.count_nonzero(had)))
    return tuple(rates)


def predicted_by_position(seen: Verifications, rates: tuple[float, ...]) -> list[float]:
    """Return the model's prediction of `by_position` for the same drafts: the share of rows with the first n right."""
    most = int(seen.drafts.max(initial=0))
    shares: list[float] = np.cumprod([rates[min(number, len(rates) - 1)] for number in range(most)]).tolist()
    return shares


def predicted_length(seen: Verifications, rates: tuple[float, ...]) -> float:
    """Return the model's prediction of `accepted_length` for the same drafts."""
    reach = np.concatenate(([0.0], np.cumsum(predicted_by_position(seen, rates))))
    return 1.0 + float(reach[seen.drafts].mean())


def halves(seen: Verifications) -> list[tuple[float, float]]:
    """Return measured and predicted `accepted_length` of odd requests by rates of even requests, and vice versa."""
    even = seen.requests % 2 == 0
    found = []
    for fitting in (even, ~even):
        rates = fitted_rates(seen.only(fitting))
        held = seen.only(~fitting)
        if rates and len(held.right):
            found.append((held.accepted_length, predicted_length(held, rates)))
    return found


def describe(folder: str | Path) -> dict[str, Any]:
    """Return all measured and predicted figures of a journal, ready for JSON."""
    seen = read_verifications(folder)
    rates, usual = fitted_rates(seen), DEFAULT_RATES[seen.method]
    return {
        "method": seen.method,
        "rows": len(seen.right),
        "requests": len(np.unique(seen.requests)),
        "drafts": int(seen.drafts.sum()),
        "rates": [round(rate, 4) for rate in rates],
        "acceptance": ",".join(f"{rate:.3f}" for rate in rates),
        "by_position": seen.by_position,
        "by_position_predicted": predicted_by_position(seen, rates),
        "by_position_usual": predicted_by_position(seen, usual),
        "accepted_length": seen.accepted_length,
        "accepted_length_predicted": predicted_length(seen, rates),
        "accepted_length_usual": predicted_length(seen, usual),
        "held_out": [{"measured": measured, "predicted": predicted} for measured, predicted in halves(seen)],
    }
