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
