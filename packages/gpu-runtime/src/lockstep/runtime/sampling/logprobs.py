"""Logprobs of given tokens and of the likeliest ones: of drawn tokens, and of prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Logprobs:
    """Natural logarithms of probabilities."""

    chosen: Tensor  # float32 [n]
    top_ids: Tensor | None  # int32 [n, k], likeliest first
    top: Tensor | None  # float32 [n, k]


def logprobs_of(logits: Tensor, tokens: Tensor, top: int = 0) -> Logprobs:
    """Return logprobs under softmax(logits) of `tokens`, and of the `top` likeliest tokens.

    For prompt tokens, logits are those at the positions of a `LogprobSpan`, and tokens its targets. Positions are
    independent, so that a caller may split them to save memory.

    Args:
        logits: float [n, vocab]; tokens: int [n]. A row with a NaN has NaN logprobs.
    """
    logits = logits.float()
    total = logits.logsumexp(1)
    chosen = logits.gather(1, tokens.long()[:, None]).squeeze(1) - total
    if not top:
        return Logprobs(chosen, None, None)
    values, ids = logits.topk(top, dim=1)
    return Logprobs(chosen, ids.to(torch.int32), values - total[:, None])


def with_listed(found: Logprobs, logits: Tensor, listed: Tensor) -> Logprobs:
    """Return logprobs with those of listed tokens among the columns of the likeliest ones.

    Args:
        found: of these logits.
        logits: float [n, vocab].
        listed: int64 [n, width], on the same device: the token of a column, or -1 where the column keeps what `found`
            has. `width` is at least the number of columns of each row that are read.
    """
    logits = logits.float()
    values = logits.gather(1, listed.clamp(min=0)) - logits.logsumexp(1)[:, None]
    ids, tops = torch.full_like(listed, -1, dtype=torch.int32), torch.full_like(values, torch.nan)
    if found.top_ids is not None and found.top is not None:
        both = min(listed.shape[1], found.top.shape[1])
        ids[:, :both], tops[:, :both] = found.top_ids[:, :both], found.top[:, :both]
        if found.top.shape[1] > both:  # a row without listed tokens has more columns than those with some
            rest = found.top.shape[1] - both
            listed = torch.nn.functional.pad(listed, (0, rest), value=-1)
            values = torch.nn.functional.pad(values, (0, rest))
            ids, tops = torch.cat((ids, found.top_ids[:, both:]), 1), torch.cat((tops, found.top[:, both:]), 1)
    named = listed >= 0
    return Logprobs(found.chosen, torch.where(named, listed.to(torch.int32), ids), torch.where(named, values, tops))
