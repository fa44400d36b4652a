"""Randomness as a function of request seed, position and token id only.

Philox-4x32-10 is a block cipher of ten cheap rounds: a key and a counter yield four words of 32 bits, without
any state. Here

    key      = the request's seed, 64 bits: (low word, high word)
    counter  = (token id // 4, position low word, position high word, stream)
    word     = number token id % 4 of the four

so that any backend, at any row of any batch, computes the same word for the same token of the same draw.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants and
test vectors are those of their library Random123.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROUNDS = 10
MULTIPLIER_A, MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
WEYL_A, WEYL_B = 0x9E3779B9, 0xBB67AE85  # the golden ratio and sqrt(3) - 1, as fractions of 2**32
WORD = 0xFFFFFFFF

STREAM_TOKENS = 0
"""The counter's last word when a token is drawn. Other kinds of draws at the same position need another value."""

Words = NDArray[np.uint32]


def split_seed(seed: int) -> tuple[int, int]:
    """Return the low and high word of a seed; only the low 64 bits, in two's complement, of other integers count."""
    return seed & WORD, (seed >> 32) & WORD


def philox_numpy(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Return the four words of each counter.

    The plainest of the three implementations, and the reference of the others.
    """
    a, b, c, d = (np.asarray(word, np.uint64) for word in counter)
    key_a, key_b = key
    for _ in range(ROUNDS):
        product_a, product_c = a * np.uint64(MULTIPLIER_A), c * np.uint64(MULTIPLIER_B)
        high, low = np.uint64(32), np.uint64(WORD)
        a, b, c, d = (
            (product_c >> high) ^ b ^ np.uint64(key_a),
            product_c & low,
            (product_a >> high) ^ d ^ np.uint64(key_b),
            product_a & low,
        )
        key_a, key_b = (key_a + WEYL_A) & WORD, (key_b + WEYL_B) & WORD
    return a.astype(np.uint32), b.astype(np.uint32), c.astype(np.uint32), d.astype(np.uint32)


def words_numpy(seed: int, position: int, vocab: int) -> Words:
    """Return the word of each token id for one draw, uint32 [vocab]."""
    groups = np.arange((vocab + 3) // 4, dtype=np.uint32)
    same = np.ones_like(groups)
    low, high = position & WORD, position >> 32
    drawn = philox_numpy((groups, same * np.uint32(low), same * np.uint32(high), same * 0), split_seed(seed))
    return np.stack(drawn, axis=1).reshape(-1)[:vocab]


def philox_torch(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of each counter, as int64 tensors of values in [0:2**32); shapes broadcast.

    The product of two words may overflow int64; its 64 bits are right all the same.
    """
    a, b, c, d = counter
    key_a, key_b = key
    for _ in range(ROUNDS):
        product_a, product_c = a * MULTIPLIER_A, c * MULTIPLIER_B
        a, b, c, d = (
            ((product_c >> 32) & WORD) ^ b ^ key_a,
            product_c & WORD,
            ((product_a >> 32) & WORD) ^ d ^ key_b,
            product_a & WORD,
        )
        key_a, key_b = (key_a + WEYL_A) & WORD, (key_b + WEYL_B) & WORD
    return a, b, c, d


def words_torch(key_low: Tensor, key_high: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return the word of each token id, for each sample's draw: int64 [samples, vocab] of values in [0:2**32).

    Args:
        key_low, key_high: int64 [samples], the words of the seeds; positions: int64 [samples].
    """
    groups = torch.arange((vocab + 3) // 4, device=positions.device)[None, :]
    low, high = (positions & WORD)[:, None], (positions >> 32)[:, None]
    stream = torch.full_like(low, STREAM_TOKENS)
    drawn = philox_torch((groups, low, high, stream), (key_low[:, None], key_high[:, None]))
    return torch.stack(drawn, dim=-1).flatten(1)[:, :vocab]
