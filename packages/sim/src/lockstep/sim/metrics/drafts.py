"""Counts of verified drafts and of tokens that grammars force."""

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
        self._in_flight: dict[
            int, tuple[NDArray[np.bool_], Int32s]
        ] = {}  # by batch: rows that verify, and how many drafts
        self.batches = 0
        self.tokens = 0  # that rows got, drafts and the one behind them
        self.verifies = False  # any drafts
        self.forced = 0  # tokens that grammars forced, computed beside the newest one of a row
        self.jumps = 0  # of a row in a batch, each with some of these
        self._offered = np.zeros(0, np.int64)  # rows by how many drafts they verified, at the least
        self._right = np.zeros(0, np.int64)  # and by how many were right

    def launched(self, plan: BatchPlan, speculation: Speculation) -> Int32s:
        """Take in a launch. Returns where its rows start as far as metrics count tokens: each verifies one."""
        verifying, drafts = plan.sample_rows >= plan.extend_rows, speculation.draft_lengths
        if speculation.forced_lengths.size:  # what is right for certain is no draft
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
        """Take in a result."""
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
        """Add up the counts of several engines."""
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
        """`speculation` and `jump_forward` of metrics.json, where there was any."""
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
        offered = np.cumsum(self._offered[::-1])[::-1][1:].tolist()  # rows with a first draft, a second one, ...
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
