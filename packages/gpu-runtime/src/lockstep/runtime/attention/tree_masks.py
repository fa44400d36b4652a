"""Trees of drafts for the kernels of GPUs: which slots a new token attends to, as bits, made once for each pass.

    slot of the tree      0   1   2   3   4           slot 0 has the row's newest token
    path of token 3       1   1   0   1   0           of our kernels: words of 64 bits for each token, slots of its tree
    mask of token 3   1 1 1   1   0   1   0           of FlashInfer: bits of all positions, token behind token

All numbers follow from the plan, except where a row's tree stands. Our kernels compute that from the length on the
device; FlashInfer's plans need exact lengths on the CPU in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.runtime.draft_tree import TreeRows
from lockstep.runtime.forward import ForwardBatch, Int32s

WORD = 64  # slots of a tree that one number has


def slots_read(tree: TreeRows, lengths: Int32s) -> Int32s:
    """Return how many slots of its tree each row reads, int32 [rows].

    Args: lengths: [rows of the pass]; with `tree.stands` exact, or both upper bounds.
    """
    return np.asarray(lengths[tree.first :] - tree.stands, np.int32)


def path_words(tree: TreeRows, window: int | None) -> NDArray[np.int64]:
    """Return depth and path of each new token of trees, int64 [new tokens, 1 + words].

    Slots are bits of the words, those of the first word first, the lowest bit first.

    Args: window: positions that a token attends to; slots outside of it are left out. None: all.
    """
    shape = tree.shape
    sees, depths = shape.sees, shape.depths
    if window is not None:
        sees = sees & (depths[None, :] > depths[:, None] - window)
    slots = len(depths)
    words = -(-slots // WORD)
    bits = np.zeros((slots, words * WORD), np.bool_)
    bits[:, :slots] = sees
    found = np.empty((slots, 1 + words), np.int64)
    found[:, 0] = depths
    found[:, 1:] = np.packbits(bits, axis=1, bitorder="little").view(np.dtype("<i8"))
    return found[tree.numbers]


@dataclass(frozen=True, slots=True)
class HiddenBits:
    """The bytes of a packed mask in which a bit is 0; all others are 255.

    Args:
        offsets: int32 [rows + 1], first byte of each row; a row begins with a byte of its own.
        at: int64 [bytes], ascending.
        values: uint8 [bytes].
    """

    offsets: Int32s
    at: NDArray[np.int64]
    values: NDArray[np.uint8]


def hidden_bits(tree: TreeRows, counts: Int32s, lengths: Int32s) -> HiddenBits:
    """Return the mask of rows with trees: new tokens times positions, token behind token, in bits, the lowest first.

    Args: counts, lengths: [rows with trees], new tokens and positions of each, both exact.
    """
    counts64, lengths64 = counts.astype(np.int64), lengths.astype(np.int64)
    ends = np.cumsum(counts64)
    offsets = np.concatenate(([0], np.cumsum(-(-counts64 * lengths64 // 8))))
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(row)) - (ends - counts64)[row]
    stands = tree.stands.astype(np.int64)
    first = offsets[row] * 8 + place * lengths64[row] + stands[row]  # bit of slot 0, of each token
    there = np.arange(len(tree.shape.depths)) < (lengths64 - stands)[row][:, None]
    token, slot = np.nonzero(~tree.shape.sees[tree.numbers] & there)
    bits = first[token] + slot
    at, inverse = np.unique(bits >> 3, return_inverse=True)
    missing = np.bincount(inverse, weights=1 << (bits & 7), minlength=len(at)).astype(np.int64)
    return HiddenBits(offsets.astype(np.int32), at, (255 - missing).astype(np.uint8))


@dataclass(frozen=True, slots=True)
class TreePaths:
    """Paths of a pass on the device, for our kernels.

    Args:
        first: the first row with a tree.
        words: numbers of 64 slots of each path.
        spans: int32 [rows with trees + 1], slots that the rows before read.
        by_window: by window, 0 for none: of `path_words`.
    """

    first: int
    words: int
    spans: Tensor
    by_window: dict[int, Tensor]


def paths_of(batch: ForwardBatch, windows: list[int]) -> TreePaths:
    """Copy the paths of a pass with trees to its device, without a wait. Args: windows: of the layers, 0 for none."""
    tree, device = batch.tree, batch.slots.device
    assert tree is not None
    spans = np.concatenate(([0], np.cumsum(slots_read(tree, batch.lengths_host)))).astype(np.int32)
    by_window = {window: path_words(tree, window or None) for window in windows}
    words = next(iter(by_window.values())).shape[1] - 1
    there = {window: uploaded(one, device) for window, one in by_window.items()}
    return TreePaths(tree.first, words, uploaded(spans, device), there)


def packed_mask(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Make the packed mask of the rows with trees of a pass on its device, without a wait.

    Returns: uint8 [bytes]; int32 [rows + 1], first byte of each row.
    """
    tree, device = batch.tree, batch.slots.device
    assert tree is not None
    lengths, starts = batch.lengths_host[tree.first :], batch.starts_host[tree.first :]
    hidden = hidden_bits(tree, lengths - starts, lengths)
    mask = torch.full((int(hidden.offsets[-1]),), 255, dtype=torch.uint8, device=device)
    if len(hidden.at):
        mask.index_copy_(0, uploaded(hidden.at, device), uploaded(hidden.values, device))
    return mask, uploaded(hidden.offsets, device)


def uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a copy on a device; a GPU copies it behind all earlier work, and the CPU does not wait."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy()).to(device)
    pinned = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
    pinned.copy_(torch.from_numpy(array))
    return pinned.to(device, non_blocking=True)
