"""The results of several passes of one batch, joined."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.runtime.sampling.sampler import Sampled


def reported_logprobs(sampled: Sampled) -> dict[str, Tensor]:
    """Return the logprobs of one pass.

    A pass without a requesting row gets placeholders, so that passes can be joined.
    """
    tokens = sampled.tokens
    logprobs, ids, tops = sampled.logprobs, sampled.top_ids, sampled.top_logprobs
    if logprobs is None:
        logprobs = torch.full(tokens.shape, torch.nan, device=tokens.device)
    if ids is None or tops is None:
        ids, tops = tokens.new_empty(len(tokens), 0), logprobs.new_empty(len(tokens), 0)
    return {"logprobs": logprobs, "top_ids": ids, "top_logprobs": tops}


def joined_passes(parts: list[Tensor]) -> Tensor:
    """Concatenate the results of several passes; narrower ones are padded with zeros."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].dim() > 1:
        widest = max(part.shape[1] for part in parts)
        parts = [torch.nn.functional.pad(part, (0, widest - part.shape[1])) for part in parts]
    return torch.cat(parts)
