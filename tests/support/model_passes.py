"""Passes of a model over a few rows whose pages lie anywhere, on the reference backend: for tests of models."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.runtime.attention import make
from lockstep.runtime.forward import ForwardBatch, Int32s
from lockstep.runtime.kv_pool import KvPool, LatentPool
from lockstep.runtime.models import LanguageModel
from lockstep.runtime.states.pool import StateTensors
from lockstep.runtime.states.view import StateGroup, StateView


class Passes:
    """Runs a model over rows that grow: row r holds the tokens given to it so far, on pages in random order."""

    def __init__(
        self, model: LanguageModel, *, rows: int = 4, pages_each: int = 8, page_size: int = 4, seed: int = 0
    ) -> None:
        self.model = model
        kind = LatentPool if model.shares_kv else KvPool
        self.pool = kind(
            model.layers, rows * pages_each, page_size, model.kv_heads, model.head_dim, model.dtype, model.device
        )
        self.states = StateTensors(model.states, rows, model.device) if model.states else None
        for kept in (*self.pool.keys, *self.pool.values):
            kept.fill_(float("nan"))  # unwritten slots must not be read
        pages = np.random.default_rng(seed).permutation(rows * pages_each).reshape(rows, pages_each)
        self.table = torch.from_numpy(pages.astype(np.int32))
        self.lengths = [0] * rows
        self.attention = make("reference", self.pool, model.heads, scale=model.scale, rules=model.rules)

    def batch(self, new: dict[int, list[int]], extend_rows: int) -> ForwardBatch:
        """A pass over new tokens by row, in the order given; all of them have their logits computed."""
        rows = np.array(list(new), np.int32)
        starts = np.array([self.lengths[row] for row in new], np.int32)
        counts = np.array([len(tokens) for tokens in new.values()], np.int32)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        by_row = np.repeat(rows, counts)
        size = self.pool.page_size
        slots = self.table.numpy()[by_row, positions // size].astype(np.int64) * size + positions % size
        for row, count in zip(new, counts, strict=True):
            self.lengths[row] += int(count)
        return ForwardBatch(
            token_ids=torch.tensor([token for tokens in new.values() for token in tokens], dtype=torch.int64),
            positions=torch.from_numpy(positions.astype(np.int64)),
            slots=torch.from_numpy(slots),
            rows=torch.from_numpy(rows),
            indptr=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            lengths=torch.from_numpy(starts + counts),
            page_table=self.table,
            logits_at=torch.arange(int(counts.sum())),
            extend_rows=extend_rows,
            starts_host=starts,
            lengths_host=starts + counts,
            states=None if self.states is None else self._in_slots(self.states, rows, counts),
        )

    def _in_slots(self, states: StateTensors, rows: Int32s, counts: Int32s) -> StateView:
        """The states of a pass: row r has slot r, which holds zeros before its first token."""
        slots = torch.from_numpy(rows.astype(np.int64))
        firsts = np.cumsum(counts) - counts
        groups = [
            StateGroup(int(count), torch.arange(first, first + count), slots[i : i + 1], slots[i : i + 1])
            for i, (first, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True))
        ]
        return StateView(states, slots, groups)

    def run(self, new: dict[int, list[int]], extend_rows: int | None = None) -> dict[int, Tensor]:
        """Logits of every new token by row, float32 [tokens, vocab] each."""
        batch = self.batch(new, len(new) if extend_rows is None else extend_rows)
        self.attention.plan(batch)
        with torch.no_grad():
            hidden = self.model(batch, self.attention)
            logits = self.model.logits(hidden[batch.logits_at])
        parts = logits.split([len(tokens) for tokens in new.values()])
        return dict(zip(new, parts, strict=True))
