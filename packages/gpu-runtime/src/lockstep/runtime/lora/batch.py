"""The new tokens of a pass on adapters, laid out by slot: tiles for the kernels, groups for the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]

NO_SLOT = -1
LOW_TILE, HIGH_TILE = 16, 64  # tokens per tile: a decode has a few per adapter, an extend many
LOW_TOKENS_MAX = 128  # of a pass of fixed size, up to which its tiles are low
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
    tiles = tiles_of(groups, tile)
    flat = upload(np.concatenate((order.astype(np.int32), tiles.ravel())))
    return AdapterBatch(flat[: len(order)].long(), flat[len(order) :].view(3, -1), groups, tile)


def tiles_of(groups: Sequence[tuple[int, int, int]], tile: int) -> Int32s:
    """Return first, stop and slot of runs of at most `tile` tokens of these groups, int32 [3, tiles]."""
    tiles = [(at, min(at + tile, stop), slot) for slot, first, stop in groups for at in range(first, stop, tile)]
    return np.array(tiles, np.int32).reshape(-1, 3).T


class FixedLayout:
    """Tokens on adapters in buffers of a fixed size, whatever adapters the tokens of a pass are on.

    Tiles without tokens have first and stop 0. Nothing is stored for them.

    Args:
        tokens: most new tokens of a pass. slots: of adapters.
    """

    def __init__(self, tokens: int, slots: int, device: torch.device) -> None:
        tile = LOW_TILE if tokens <= LOW_TOKENS_MAX else HIGH_TILE
        count = min(tokens, tokens // tile + slots)  # a group's last tile may be filled in part
        places = torch.zeros(tokens, dtype=torch.int64, device=device)
        tiles = torch.zeros((3, count), dtype=torch.int32, device=device)
        self.batch = AdapterBatch(places, tiles, (), tile)

    def filled(self, given: AdapterBatch, upload: Callable[[Int32s], Tensor]) -> AdapterBatch:
        """Copy the layout of a pass into the buffers, and return it in them."""
        kept = self.batch
        tiles: Int32s = np.zeros(tuple(kept.tiles.shape), np.int32)
        some = tiles_of(given.groups, kept.tile)
        tiles[:, : some.shape[1]] = some
        kept.tiles.copy_(upload(tiles))
        kept.tokens[: len(given.tokens)].copy_(given.tokens)
        return replace(kept, groups=given.groups)
