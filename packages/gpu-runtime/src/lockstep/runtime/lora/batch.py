"""The new tokens of a pass on adapters, laid out by slot: tiles for the kernels, groups for the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]

NO_SLOT = -1
LOW_TILE, HIGH_TILE = 16, 64  # tokens per tile: a decode has a few per adapter, an extend many
FEW_TOKENS = 32  # average tokens per adapter up to which tiles are low


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """The new tokens of a pass on adapters, by slot. Passes without such tokens have none."""

    tokens: Tensor  # int64 [tokens on adapters], indices of new tokens, by slot
    tiles: Tensor  # int32 [3, tiles]: first and stop in `tokens`, and slot
    groups: tuple[tuple[int, int, int], ...]  # (slot, first, stop) in `tokens`, on the CPU
    tile: int  # most tokens of a tile


def lay_out(slots: Int32s, counts: Int32s, upload: Callable[[Int32s], Tensor]) -> AdapterBatch:
    """Lay out the tokens of a pass by slot.

    Args:
        slots: [rows], slot of each row of the pass, NO_SLOT for the model alone; counts: [rows], new tokens.
        upload: copies an array to the device.
    """
    of_tokens = slots if (counts == 1).all() else np.repeat(slots, counts)
    order = np.argsort(of_tokens, kind="stable")
    order = order[np.searchsorted(of_tokens[order], 0) :]
    used, firsts = np.unique(of_tokens[order], return_index=True)
    stops = np.append(firsts[1:], len(order))
    groups = tuple(zip(used.tolist(), firsts.tolist(), stops.tolist(), strict=True))
    tile = LOW_TILE if len(order) <= FEW_TOKENS * len(used) else HIGH_TILE
    tiles = np.array(
        [(at, min(at + tile, stop), slot) for slot, first, stop in groups for at in range(first, stop, tile)], np.int32
    ).T
    flat = upload(np.concatenate((order.astype(np.int32), tiles.ravel())))
    return AdapterBatch(flat[: len(order)].long(), flat[len(order) :].view(3, -1), groups, tile)
