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
from lockstep.core.features.draft_trees import counts_by_rank
from lockstep.core.requests.delivery import right_drafts
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
        # trees: drafts in all; by depth and rank, those with a right path before them, and the right ones of these
        self._nodes = 0
        self._by_rank = np.zeros((2, 0, 0), np.int64)
        self._trees: dict[int, Speculation] = {}  # by batch id

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
        if speculation.parents.size:
            self._trees[plan.batch_id] = speculation
            self._nodes += int(drafts.sum())
            drafts = speculation.path_lengths()
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
        accepted = np.frombuffer(event.accepted, np.int32, len(verifying))[verifying]
        if (tree := self._trees.pop(event.batch_id, None)) is not None and tree.draft_lengths.any():
            right = right_drafts(event, len(verifying))
            self._by_rank = _added_tables(self._by_rank, np.stack(counts_by_rank(tree, accepted - 1, right)))
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
            whole._nodes += part._nodes
            whole._by_rank = _added_tables(whole._by_rank, part._by_rank)
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
        drafts, tree = sum(offered), {}
        if self._by_rank.size:
            drafts = self._nodes
            tree = {
                "acceptance_by_depth_and_rank": [
                    [ratio(of, all_of) for of, all_of in zip(*table, strict=True)]
                    for table in zip(self._by_rank[1].tolist(), self._by_rank[0].tolist(), strict=True)
                ]
            }
        return {
            "verify_batches": self.batches,
            "rows_verified": rows,
            "drafts": drafts,
            "drafts_accepted": sum(right),
            "acceptance_ratio": ratio(sum(right), drafts),
            "acceptance_by_position": [ratio(of, all_of) for of, all_of in zip(right, offered, strict=True)],
            **tree,
            "accepted_length_mean": ratio(self.tokens, rows),
            "drafts_mean": ratio(drafts, rows),
            "tokens_per_batch_mean": ratio(self.tokens, self.batches),
        }


def _added(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    longer = np.zeros(max(len(one), len(other)), np.int64)
    longer[: len(one)] += one
    longer[: len(other)] += other
    return longer


def _added_tables(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of two tables by depth and rank, each [2, depths, ranks], of which one may be larger."""
    larger = np.zeros((2, *np.maximum(one.shape[1:], other.shape[1:])), np.int64)
    for table in (one, other):
        larger[:, : table.shape[1], : table.shape[2]] += table
    return larger
