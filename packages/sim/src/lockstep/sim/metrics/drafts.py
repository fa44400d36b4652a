"""Counts of verified drafts and of tokens forced by grammars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import (
    BatchPlan,
    Int32s,
    Speculation,
)
from lockstep.core.contract.events import (
    BatchFinished,
)
from lockstep.sim.metrics.columns import Summary
from lockstep.sim.metrics.summary import ratio


class Drafts:
    """Counts of drafts over all rows of all verifying batches with a known result."""

    def __init__(self) -> None:
        # batch id -> rows that verify, and drafts of each
        self._in_flight: dict[int, tuple[NDArray[np.bool_], Int32s]] = {}
        self.batches = 0
        self.tokens = 0  # tokens from verifications: right drafts and the token after them
        self.verifies = False  # whether any batch verified drafts
        self.forced = 0  # tokens forced by grammars and computed with the newest token of a row
        self.jumps = 0  # rows of batches with forced tokens
        self._offered = np.zeros(0, np.int64)  # [n]: rows that verified n drafts
        self._right = np.zeros(0, np.int64)  # [n]: rows with n right drafts

    def launched(self, plan: BatchPlan, speculation: Speculation) -> Int32s:
        """Record a launch.

        Forced tokens are certain to be right, so they do not count as drafts.

        Returns: int32 [rows], where each row starts for counts of new tokens: a verifying row counts as one token.
        """
        verifying, drafts = plan.sample_rows >= plan.extend_rows, speculation.draft_lengths
        if speculation.forced_lengths.size:
            self.forced += int(speculation.forced_lengths.sum())
            self.jumps += int(np.count_nonzero(speculation.forced_lengths))
            free = speculation.forced_lengths == 0
            verifying, drafts = verifying.copy(), drafts[free]
            verifying[np.flatnonzero(verifying)[~free]] = False
        if speculation.method != "forced":
            self.verifies = True
            self._in_flight[plan.batch_id] = verifying, drafts
        starts = plan.starts.copy()
        starts[plan.extend_rows :] = plan.stops[plan.extend_rows :] - 1
        return starts

    def verified(self, event: BatchFinished) -> None:
        """Count the result of a batch."""
        found = self._in_flight.pop(event.batch_id, None)
        if found is None:
            return
        verifying, drafts = found
        accepted = np.frombuffer(event.accepted, np.int32)[verifying]
        self.batches += 1
        self.tokens += int(accepted.sum())
        self._offered = _added(self._offered, np.bincount(drafts))
        self._right = _added(self._right, np.bincount(accepted - 1))

    @classmethod
    def join(cls, parts: Sequence[Drafts]) -> Drafts:
        """Return the sum of the counts of several engines."""
        whole = cls()
        for part in parts:
            whole.batches += part.batches
            whole.tokens += part.tokens
            whole.verifies |= part.verifies
            whole.forced += part.forced
            whole.jumps += part.jumps
            whole._offered = _added(whole._offered, part._offered)
            whole._right = _added(whole._right, part._right)
        return whole

    def summary(self) -> Summary:
        """Return `speculation` and `jump_forward` of metrics.json, each only if it occurred."""
        forced = {
            "forced_tokens": self.forced,
            "jumps": self.jumps,
            "tokens_per_jump_mean": ratio(self.forced, self.jumps),
        }
        return {
            **({"speculation": self.describe()} if self.verifies else {}),
            **({"jump_forward": forced} if self.jumps else {}),
        }

    def describe(self) -> Summary:
        rows = int(self._offered.sum())
        offered = np.cumsum(self._offered[::-1])[::-1][1:].tolist()  # rows with at least 1, 2, ... drafts
        right = np.cumsum(self._right[::-1])[::-1][1:].tolist()
        right += [0] * (len(offered) - len(right))
        return {
            "verify_batches": self.batches,
            "rows_verified": rows,
            "drafts": sum(offered),
            "drafts_accepted": sum(right),
            "acceptance_ratio": ratio(sum(right), sum(offered)),
            "acceptance_by_position": [ratio(of, all_of) for of, all_of in zip(right, offered, strict=True)],
            "accepted_length_mean": ratio(self.tokens, rows),
            "drafts_mean": ratio(sum(offered), rows),
            "tokens_per_batch_mean": ratio(self.tokens, self.batches),
        }


def _added(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    longer = np.zeros(max(len(one), len(other)), np.int64)
    longer[: len(one)] += one
    longer[: len(other)] += other
    return longer
