"""A small model of the same vocabulary as drafter: it gives the token it finds likeliest, one after the other.

Its KV lies in a pool of its own with the same pages at the same positions: a prompt is computed for both at the same
time, and what is cached, shared or retracted is so for both. Drafts are deterministic, as `drafting` requires.

    draft       newest -> draft 1 -> ... -> draft d          d decodes; what they write is overwritten by
    saw         newest, draft 1, ..., draft d                the pass that verifies, run by this model too

The second writes the KV of the last draft as well, which the next drafts read if all were right.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.drafting import Int32s
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.models import Decoder


class ModelDrafter:
    """Greedy tokens of a model. See `drafting.Drafter`.

    Args:
        attention: over a pool of this model's with the pages of the other one's, the scratch page behind the last.
    """

    def __init__(self, model: Decoder, attention: AttentionBackend, pages: int) -> None:
        self.model, self.attention = model, attention
        self.page_size = attention.pool.page_size
        self.page_shift, self.scratch = self.page_size.bit_length() - 1, pages * self.page_size

    def saw(self, batch: ForwardBatch) -> None:
        """Compute what the other model computes."""
        self.attention.plan(batch)
        self.model.forward(batch, self.attention)

    def draft(
        self,
        rows: Tensor,
        stands: Tensor,
        newest: Tensor,
        page_table: Tensor,
        drafts: Int32s,
        reach: Tensor,
        stands_host: Int32s,
    ) -> Tensor:
        """Decode as often as the most drafts of any row; rows that have fewer write to the scratch page from there."""
        count, tokens, found = len(drafts), newest, []
        ints = {"dtype": torch.int32, "device": rows.device}
        indptr, at = torch.arange(count + 1, **ints), torch.arange(count, device=rows.device)
        for number in range(int(drafts.max())):
            positions = torch.minimum(stands + number, reach)
            pages = page_table[rows, positions >> self.page_shift].to(torch.int64)
            slots = (pages << self.page_shift) + (positions & (self.page_size - 1))
            starts: Int32s = np.minimum(stands_host + np.int32(number), stands_host + drafts)
            batch = ForwardBatch(
                token_ids=tokens,
                positions=positions,
                slots=torch.where(stands + number <= reach, slots, self.scratch),
                rows=rows.to(torch.int32),
                indptr=indptr,
                lengths=(positions + 1).to(torch.int32),
                page_table=page_table,
                logits_at=at,
                extend_rows=0,
                starts_host=starts,
                lengths_host=starts + np.int32(1),
            )
            self.attention.plan(batch)
            tokens = self.model.logits(self.model.forward(batch, self.attention)).argmax(1)
            found.append(tokens)
        return torch.stack(found, 1)
