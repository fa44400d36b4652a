"""Trees of drafts on the device: which tokens attend to which, which path is right, and where its KV belongs.

    number      0   1   2   3   4        0 is the newest token, 1 to 4 are drafts
    parent          0   0   1   3
    depth       0   1   1   2   3        positions are those of depths: two tokens may be at one position
    slot        s  s+1 s+2 s+3 s+4       each token has a slot of its own
    right path  0   1       3            then the KV of token 3 moves from slot s+3 to slot s+2

Every token is drawn as if its path were the text: by the row's seed and the token's position. A draft is right if it is
the token that was drawn behind its parent, and its parent is right. So the drawn tokens of the right path are those
without drafts, and at most one path is right: of equal drafts behind one token the first counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.commands import Int32s, depths_of
from lockstep.core.requests.delivery import step_numbers


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of a tree of drafts.

    Args:
        parents: int32 [drafts], the number of the token before each draft.
        depths: int32 [1 + drafts].
        sees: bool [1 + drafts, 1 + drafts], whether a token attends to another: to itself and those on its path.
    """

    parents: Int32s
    depths: Int32s
    sees: NDArray[np.bool_]

    @property
    def deepest(self) -> int:
        """Drafts on the longest path."""
        return int(self.depths.max())


def shape_of(parents: Int32s) -> TreeShape:
    """Return the shape of a tree with these parents, int32 [drafts]."""
    return _shape_of(parents.tobytes())


@lru_cache(maxsize=64)
def _shape_of(stored: bytes) -> TreeShape:
    parents = np.frombuffer(stored, np.int32)
    sees = np.eye(1 + len(parents), dtype=np.bool_)
    for number, parent in enumerate(parents.tolist(), 1):
        sees[number] |= sees[parent]
    return TreeShape(parents, depths_of(parents), sees)


def chain_of(drafts: int) -> TreeShape:
    """Return the tree whose drafts all lie on one path."""
    return shape_of(np.arange(drafts, dtype=np.int32))


def part_of(shape: TreeShape, most: int) -> tuple[NDArray[np.int64], int]:
    """Return the parents of the first `most - 1` drafts of a tree, int64, and the longest path of these."""
    return shape.parents[: most - 1].astype(np.int64), int(shape.depths[:most].max(initial=0))


@dataclass(slots=True)
class RightPaths:
    """The right path of each sampler of a pass.

    Args:
        path: int64 [samplers, longest path], numbers of the right drafts by depth; 0 behind the last one.
        accepted: int64 [samplers], tokens of each: one more than its right drafts.
        last: int64 [samplers], the sample behind the last right draft.
        order: int64 [samples], the samples with those of the right path first, sampler after sampler.
    """

    path: Tensor
    accepted: Tensor
    last: Tensor
    order: Tensor


def right_paths(
    parents: Tensor,
    deepest: int,
    tokens: Tensor,
    invalid: Tensor,
    fed: Tensor,
    places: Tensor,
    there: Tensor,
    real: Tensor,
) -> RightPaths:
    """Find the right path of each sampler; for `invalid`, `fed`, `places` and `there` see `drafting.right_ones`.

    Nothing of it waits for the device: all sizes follow from the plan.

    Args:
        parents: int64 [most - 1], of the drafts of the tree that any sampler has.
        deepest: drafts on the longest path of these.
        tokens: int32 [samples], drawn.
        real: int64 [samples], the places that are no padding, counted row by row.
    """
    samplers, most = places.shape
    device = tokens.device
    drawn = tokens.to(torch.int64)[places]
    right = (fed[places[:, 1:]] == drawn[:, parents]) & there[:, 1:] & ~invalid[places[:, 1:]]
    at = torch.zeros(samplers, dtype=torch.int64, device=device)
    going = torch.ones(samplers, dtype=torch.bool, device=device)
    rank = torch.full((samplers, most), most, dtype=torch.int64, device=device)  # places in the order of samples
    rank[:, 0] = 0
    steps = []
    for depth in range(1, deepest + 1):
        found = right & (parents == at[:, None])
        going = going & found.any(1)
        # the first of equal drafts: argmax of a bool is undefined among equals, so numbers are compared
        number = torch.where(found, torch.arange(1, most, device=device), most).amin(1).clamp(max=most - 1)
        at = torch.where(going, number, at)
        steps.append(torch.where(going, number, 0))
        rank.scatter_(1, at[:, None], torch.where(going, depth, rank.gather(1, at[:, None])[:, 0])[:, None])
    path = torch.stack(steps, 1) if steps else torch.zeros((samplers, 0), dtype=torch.int64, device=device)
    ordered = places.gather(1, torch.where(there, rank, most + 1).argsort(dim=1, stable=True))  # padding goes last
    order = ordered.reshape(-1).index_select(0, real)
    return RightPaths(path, 1 + (path > 0).sum(1), places.gather(1, at[:, None])[:, 0], order)


def moves_of(paths: RightPaths, places: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots from which and to which the KV of right drafts moves, int64 [samplers * longest path] both.

    Slots to which nothing moves keep their KV: they are their own source.

    Args:
        slots: int64 [samples], of the input token of each sample.
    """
    numbers = torch.arange(1, paths.path.shape[1] + 1, device=slots.device).expand_as(paths.path)
    target = slots[places.gather(1, numbers)]
    source = torch.where(paths.path > 0, slots[places.gather(1, paths.path)], target)
    return source.reshape(-1), target.reshape(-1)


@dataclass(slots=True)
class TreeRows:
    """Rows of a pass whose new tokens are of a tree: the last ones. Other rows attend causally.

    Args:
        first: the first of these rows.
        stands: int32 [rows], position of each row's newest token. Tokens attend to all positions before it.
        numbers: int32 [new tokens of these rows], numbers in the tree, ascending in each row.
        shape: of the tree.
    """

    first: int
    stands: Int32s
    numbers: Int32s
    shape: TreeShape

    def seen(self, row: int, new: slice, length: int, oldest: int, window: int | None) -> NDArray[np.bool_]:
        """Return which slots the new tokens of a row attend to, bool [new, length - oldest].

        Args:
            row: among these rows.
            new: its new tokens, among those of these rows.
            length: positions of the row with KV, the slots of the tree included.
            oldest: the first position that is read.
            window: positions that a token attends to at most; None: all.
        """
        stand, numbers = int(self.stands[row]), self.numbers[new]
        own = stand + self.shape.depths[numbers][:, None]
        before = np.arange(oldest, stand)
        behind = stand + self.shape.depths[: length - stand]
        seen = np.concatenate(
            (np.ones((len(numbers), len(before)), np.bool_), self.shape.sees[numbers][:, : length - stand]), 1
        )
        if window is not None:
            positions = np.concatenate((before, behind), dtype=np.int64)
            seen &= positions[None, :] > own.astype(np.int64) - window
        return seen


def tree_rows(first: int, stands: Int32s, counts: Int32s, shape: TreeShape) -> TreeRows:
    """Return rows that compute their newest token and the first `counts` - 1 drafts of a tree; int32 [rows] both."""
    return TreeRows(first, stands, step_numbers(counts), shape)
