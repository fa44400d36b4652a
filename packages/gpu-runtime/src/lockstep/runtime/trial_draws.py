"""Drafts and draws that are run once at start, to measure the memory that they take."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.core.contract.events import SamplingParams
from lockstep.runtime.drafting import DraftingRows, NgramDrafter
from lockstep.runtime.sampling import Sampler, SamplingTable

DEAREST_SAMPLING = SamplingParams(
    temperature=1.0,
    seed=1,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    allowed_token_ids=(0,),
    top_logprobs=1,
)
"""Parameters that use every step of sampling; a draw with them takes the most device memory."""


def seek_once(rows: int, context: int, page_size: int, drafts: int, device: torch.device) -> None:
    """Draft once for `rows` rows at the end of the context, all in one page, to measure the drafter's memory."""
    table = torch.zeros((rows, -(-context // page_size)), dtype=torch.int32, device=device)
    stands = torch.full((rows,), context - 1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        NgramDrafter(page_size, page_size, device).draft(
            DraftingRows(
                rows=torch.arange(rows, device=device),
                stands=stands,
                newest=stands,
                page_table=table,
                drafts=np.full(rows, drafts, np.int32),
                reach=stands,
                stands_host=np.full(rows, context - 1, np.int32),
            )
        )


def draw_once(logits: Tensor) -> None:
    """Draw for `logits` with every sampling step.

    Penalties count by token id, and logprobs need a second copy of the logits.
    """
    count, vocab = logits.shape
    table = SamplingTable(count, vocab, logits.device)
    for row in range(count):
        table.take_row(row, DEAREST_SAMPLING, logprobs=True)
    rows = torch.arange(count, dtype=torch.int32, device=logits.device)
    Sampler(table).sample(logits, rows, rows.long(), np.arange(count, dtype=np.int32))
