"""The functions of the kernels in plain torch: slow, on any device, with the same results to the bit. See kernels.py.

All functions take `rows` int32 [samples] and `positions` int64 [samples] on the device, and logits float32
[samples, vocab], contiguous. Functions with a trailing underscore change the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.runtime.sampling.numerics import gumbel, mass, share_of
from lockstep.runtime.sampling.philox import words_torch
from lockstep.runtime.sampling.table import (
    EDITS,
    FREQUENCY,
    IN_PROMPT,
    INVERSE_TEMPERATURE,
    KEY_HIGH,
    KEY_LOW,
    LOG_MIN_P,
    PRESENCE,
    REPETITION,
    SEEN,
    SHARE_ALL,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingColumns,
)

BANNED = -1e30
"""The logit of a token banned until min_new_tokens.

Not -inf, so that a mask that allows only banned tokens overrides it.
"""


def edit_(logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns) -> None:
    """Add biases; ban tokens at positions below their limit."""
    slots = columns.ints[rows.long(), EDITS]
    ids = columns.edit_ids[slots].long()
    before = logits.gather(1, ids)
    after = before + columns.edit_bias[slots]
    banned = positions[:, None] < columns.edit_until[slots]
    # Repeated entries behind a row's last one write the same value again.
    logits.scatter_(1, ids, torch.where(banned, after.clamp(max=BANNED), after))


def mask_(logits: Tensor, allowed: Tensor) -> None:
    """Set tokens with a cleared bit to -inf: token t is bit t % 32 of word t // 32 of int32 [samples, words]."""
    bits = (allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=allowed.device)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def penalise_(logits: Tensor, rows: Tensor, columns: SamplingColumns) -> None:
    """Penalise tokens of prompt and output by repetition, then output tokens by frequency and presence."""
    reals = columns.reals[rows.long()]
    slots = columns.ints[rows.long(), SEEN]
    seen = columns.seen[slots]
    produced = (seen & (IN_PROMPT - 1)).to(torch.float32)
    repetition = reals[:, REPETITION, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    after = torch.where(seen > 0, repeated, logits)
    after = after - produced * reals[:, FREQUENCY, None]
    after = after - torch.where(produced > 0, reals[:, PRESENCE, None], 0.0)
    logits.copy_(torch.where(slots[:, None] > 0, after, logits))


def count_(rows: Tensor, tokens: Tensor, columns: SamplingColumns) -> None:
    """Count drawn tokens, int32 [samples], for the penalties of their rows. Slot 0 takes the counts of rows without."""
    at = columns.ints[rows.long(), SEEN] * columns.seen.shape[1] + tokens
    columns.seen.view(-1).scatter_add_(0, at, torch.ones_like(tokens))


def scaled(logits: Tensor, reals: Tensor, maxima: Tensor) -> Tensor:
    """Return (logit - largest) / temperature, 0 for the largest even if infinite; a NaN counts as -inf."""
    clean = logits.masked_fill(logits.isnan(), -torch.inf)
    below = (clean - maxima[:, None]) * reals[:, INVERSE_TEMPERATURE, None]
    return torch.where(clean == maxima[:, None], 0.0, below)


def pivots(logits: Tensor, rows: Tensor, columns: SamplingColumns, maxima: Tensor) -> Tensor:
    """Return the smallest logit that top-k and top-p keep, float32 [samples]; -inf if they keep all.

    top-k keeps tokens with fewer than k larger ones. top-p then keeps a token if the larger ones that top-k kept sum up
    to less than top_p. So tokens that tie are kept or dropped together, and the largest is always kept.
    """
    ints, reals = columns.ints[rows.long()], columns.reals[rows.long()]
    vocab = logits.shape[1]
    ordered = logits.masked_fill(logits.isnan(), -torch.inf).sort(dim=1, descending=True).values
    at_k = ordered.gather(1, ints[:, TOP_K, None].clamp(max=vocab) - 1)
    largest = ordered[:, 0].clamp(min=torch.finfo(torch.float32).min)  # as `maxima`, but always a number
    masses = torch.where(ordered >= at_k, mass(scaled(ordered, reals, largest)), 0)
    upto = masses.cumsum(1)
    kept = (upto - masses < share_of(upto[:, -1], ints[:, TOP_P])[:, None]).sum(1, keepdim=True)
    at_p = ordered.gather(1, kept - 1)
    at_p = torch.where(ints[:, TOP_P, None] == SHARE_ALL, -torch.inf, at_p)
    at_k = torch.where(ints[:, TOP_K, None] >= vocab, -torch.inf, at_k)
    limited = reals[:, TEMPERATURE, None] > 0
    return torch.where(limited, torch.maximum(at_k, at_p), -torch.inf).squeeze(1)


def draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    maxima: Tensor,
    floor: Tensor | None,
    random: bool,
) -> Tensor:
    """Return the token of the largest logit, or of the largest scaled logit plus Gumbel noise: int32 [samples].

    Of several equal ones it is the lowest id. With Gumbel noise on log-weights z the argmax is token i with probability
    exp(z[i]) / sum(exp(z)), and needs no sum.

    Args:
        maxima: float32 [samples], the largest logit of each; if it is NaN or -inf, the token is 0.
        floor: float32 [samples], from `pivots`, or None if no row has top-k or top-p.
        random: False if all rows are greedy.
    """
    vocab = logits.shape[1]
    if not random:  # `argmax` returns the first of equal ones; a row with a NaN is invalid, whichever token it gets
        return torch.where(maxima > -torch.inf, logits.argmax(1), 0).to(torch.int32)
    reals, ints = columns.reals[rows.long()], columns.ints[rows.long()]
    score = logits.masked_fill(logits.isnan(), -torch.inf)
    z = scaled(logits, reals, maxima)
    kept = z >= reals[:, LOG_MIN_P, None]
    if floor is not None:
        kept &= score >= floor[:, None]
    noisy = z + gumbel(words_torch(ints[:, KEY_LOW], ints[:, KEY_HIGH], positions, vocab))
    noisy = torch.where(kept, noisy, -torch.inf)
    score = torch.where(reals[:, TEMPERATURE, None] > 0, noisy, score)
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    token = torch.where(score == score.amax(1, keepdim=True), ids, vocab).amin(1)
    return torch.where(maxima > -torch.inf, token, 0).to(torch.int32)
