"""Trees of drafts: which drafts a verification contains if several alternatives may follow a token.

    newest -+- 1 -+- 3 --- 6        parents  0 0 1 1 3 3      draft 1 is the likeliest behind the newest token (rank 0),
            |     `- 4              number   1 2 3 4 5 6      draft 2 the second likeliest (rank 1), and so on
            `- 2    (3 -- 5: rank 0, 3 -- 6: rank 1)

The drafter decides which token stands at each place: the r-th likeliest behind its parent. The scheduler decides which
places there are. A draft counts only if all drafts on its path are right; alternatives exclude each other. So the
expected number of right drafts is the sum of the chances of all places, and the tree grows by the likeliest place next
to it (Sequoia, Chen et al. 2024, section 3.1, for chances that depend on depth and rank). A place is no likelier than
the place before it, so the tree of n drafts has the n largest chances, if those of ranks fall. A row with room for
fewer drafts takes the first ones, which are the best tree of their number.

Chances follow from the results so far: the share of right drafts by depth and rank, of those with a right path before
them. Until enough results are known, `PRIOR` holds. A chain is the tree with one alternative behind each token; it has
no need of ranks, and is decided in speculation.py.
"""

from __future__ import annotations

from heapq import heappop, heappush

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from lockstep.core.contract.commands import Int32s, Speculation, depths_of
from lockstep.core.contract.config import SchedConfig
from lockstep.core.requests.batching import InFlight

FADE = 0.98  # weight of a result relative to the next one
OFFERED_MIN = 4.0  # faded drafts from which on the share of a depth and rank is used
PRIOR, PRIOR_RANK = 0.6, 0.3  # share of right drafts before any result, and that of each further rank relative to it


class TreeChances(msgspec.Struct):
    """Shares of right drafts by depth behind the newest token and by rank. Older results fade."""

    offered: list[list[float]] = []  # by depth, from 1, and rank: faded drafts with a right path before them
    right: list[list[float]] = []  # the right ones among these

    def share(self, depth: int, rank: int) -> float:
        """Return the share of right drafts. A depth without enough results has the share of the depth before it."""
        for known in range(min(depth, len(self.offered)) - 1, -1, -1):
            offered = self.offered[known]
            if rank < len(offered) and offered[rank] >= OFFERED_MIN:
                return self.right[known][rank] / offered[rank]
        return PRIOR * PRIOR_RANK**rank


def best_parents(chances: TreeChances, drafts: int, topk: int, steps: int, least: float = 0.0) -> Int32s:
    """Return the tree with the most expected right drafts, as the number of the draft before each: int32 [drafts].

    Args:
        drafts: drafts in all.
        topk: alternatives behind each token, at most.
        steps: drafts on a path, at most.
        least: drafts with smaller chances are left out, except the first, so that there may be fewer.
    """
    parents: list[int] = []
    # (-chance, order, parent, depth, rank, chance of the parent): the places next to the tree
    places = [(-chances.share(1, 0), 0, 0, 1, 0, 1.0)]
    added = 0
    while places and len(parents) < drafts:
        negative, _, parent, depth, rank, before = heappop(places)
        if parents and -negative < least:
            break
        parents.append(parent)
        added += 2
        if rank + 1 < topk:
            heappush(places, (-before * chances.share(depth, rank + 1), added - 1, parent, depth, rank + 1, before))
        if depth < steps:
            heappush(places, (negative * chances.share(depth + 1, 0), added, len(parents), depth + 1, 0, -negative))
    return np.array(parents, np.int32)


def ranks_of(parents: Int32s) -> list[int]:
    """Return the rank of each draft among those behind the same token: by number, from 0."""
    seen: dict[int, int] = {}
    ranks = []
    for parent in parents.tolist():
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    return ranks


def counts_by_rank(
    speculation: Speculation, counts: Int32s, right: Int32s
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many drafts of a result had a right path before them, and how many of these were right.

    Args:
        speculation: the drafts, a tree.
        counts: int32 [verifying rows], right drafts of each row.
        right: int32 [sum of counts], numbers of the right drafts, end to end.
    Returns: int64 [depths, ranks] both; depth 1, drafts behind the newest token, is first.
    """
    verified, parents = speculation.draft_lengths, speculation.parents
    depths, ranks = depths_of(parents)[1:].tolist(), ranks_of(parents)
    on_path = np.zeros((len(verified), 1 + parents.size), np.bool_)
    on_path[:, 0] = True
    on_path[np.arange(len(verified)).repeat(counts), right] = True
    offered = np.zeros((max(depths), max(ranks) + 1), np.int64)
    found = offered.copy()
    for number, (parent, depth, rank) in enumerate(zip(parents.tolist(), depths, ranks, strict=True), 1):
        had = on_path[:, parent] & (verified >= number)
        offered[depth - 1, rank] += np.count_nonzero(had)
        found[depth - 1, rank] += np.count_nonzero(had & on_path[:, number])
    return offered, found


class DraftTree:
    """The tree of the next verification, and the chances that it follows from."""

    def __init__(self, config: SchedConfig) -> None:
        assert config.speculative_topk is not UNSET
        self._config, self._topk = config, config.speculative_topk
        self.resume(TreeChances())

    def resume(self, chances: TreeChances) -> None:
        """Take over chances, those of a snapshot."""
        self.chances = chances
        self._plant()

    def _plant(self) -> None:
        config, least = self._config, self._config.speculative_min_chance
        self.parents = best_parents(
            self.chances, config.drafts_max, self._topk, config.path_max, 0.0 if least is UNSET else least
        )
        self._longest: Int32s = np.maximum.accumulate(depths_of(self.parents))  # path of the first n drafts, by n
        # by length of a path: the most first drafts with no longer path
        self._within: Int32s = np.searchsorted(self._longest, np.arange(config.path_max + 1), side="right").astype(
            np.int32
        ) - np.int32(1)

    def lengths(self, path: Int32s, slots: Int32s, rows: int) -> Int32s:
        """Return how many drafts each row verifies, int32 [rows].

        Args:
            path: int32 [rows], the longest path that a row has room for.
            slots: int32 [rows], positions up to the end of the context.
            rows: number of rows; with more than `speculative_max_batch_size` there are no drafts.
        """
        limit = self._config.speculative_max_batch_size
        if limit is not UNSET and rows > limit:
            return np.zeros(len(path), np.int32)
        return np.minimum(self._within[path], slots)

    def path_lengths(self, drafts: Int32s) -> Int32s:
        """Return the longest path of each row, given its number of drafts. int32 [rows]"""
        return self._longest[drafts]

    def observe(self, batch: InFlight, accepted: Int32s, right: Int32s) -> None:
        """Take in the result of a batch that verified a tree.

        Args:
            accepted: int32 [samplers], tokens of each.
            right: int32 [sum of accepted - 1], numbers of the right drafts, end to end.
        """
        speculation = batch.plan.speculation
        assert speculation is not None
        verifying = batch.plan.sample_rows >= batch.plan.extend_rows
        if not speculation.draft_lengths.any():
            return
        chances = self.chances
        offered, found = counts_by_rank(speculation, accepted[verifying] - np.int32(1), right)
        for depth, (of_depth, right_of_depth) in enumerate(zip(offered.tolist(), found.tolist(), strict=True)):
            if depth == len(chances.offered):
                chances.offered.append([0.0] * self._topk)
                chances.right.append([0.0] * self._topk)
            for rank, count in enumerate(of_depth):
                if count:
                    chances.offered[depth][rank] = chances.offered[depth][rank] * FADE + count
                    chances.right[depth][rank] = chances.right[depth][rank] * FADE + right_of_depth[rank]
        self._plant()
