"""A small model of the same vocabulary as drafter: it drafts greedily, one token after the other.

Its KV is in a pool of its own with the same pages at the same positions. A prompt is computed for both models at the
same time, and pages are cached, shared and retracted for both. Drafts are deterministic, as `drafting` requires.

    draft       newest -> draft 1 -> ... -> draft d          d decodes; their KV is overwritten by
    saw         newest, draft 1, ..., draft d                the verifying pass, which this model runs too

The second also writes the KV of the last draft, which the next drafts read if all drafts were right.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.drafting import DraftingRows, Int32s
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.models import LanguageModel


class ModelDrafter:
    """A drafter that takes the greedy tokens of a model; see `drafting.Drafter`.

    Args:
        attention: over a pool of this model with the pages of the main model's pool; the last page is the scratch page.
    """

    reads_layers = False

    def __init__(self, model: LanguageModel, attention: AttentionBackend, pages: int) -> None:
        self.model, self.attention = model, attention
        self.page_size = attention.pool.page_size
        self.page_shift, self.scratch = self.page_size.bit_length() - 1, pages * self.page_size

    def observe_batch(self, batch: ForwardBatch) -> None:
        """Run this model over the batch, to write its KV."""
        self.attention.plan(batch)
        self.model.forward(batch, self.attention)

    def computed(self, batch: ForwardBatch, hidden: Tensor) -> None:
        """Do nothing: only tokens are read."""

    def moved(self, source: Tensor, target: Tensor) -> None:
        """Move KV of this model."""
        self.attention.pool.move(source, target)

    def draft(self, drafting: DraftingRows) -> Tensor:
        """Decode once per draft, up to the largest number of drafts; rows with fewer then write to the scratch page."""
        rows, stands, newest, page_table, drafts, reach, stands_host, _ = drafting
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
