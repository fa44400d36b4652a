"""A head as drafter: chains or trees, from the hidden states that the model has computed (models/draft_heads.py).

The features of each token lie beside its KV, by slot, so that a prefix of the radix cache has them too. The head's own
KV of a token follows from the token and the features of the token before it: from nothing behind it. So pages with
equal prefixes have equal KV of the head, as of the model.

    model     pass over tokens ... newest, drafts        -> features by slot
    head      pass over the same tokens, each with the features of the token before: KV by slot
    draft     newest, with the model's features before it     -> likeliest next tokens, and its own features
              each draft that others follow, with the features of the draft before it -> likeliest next tokens, ...

Positions along time, height and width are those of the token with the features, so of the token before, as in engines
for which MTP layers are trained. Positions of text differ by one for all tokens, which rotary positions do not show.

In a tree, the token before a draft is its parent. The passes of `draft` write KV of the head that the pass behind them
overwrites, when the model has computed the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.draft_tree import TreeRows, TreeShape, chain_of
from lockstep.runtime.drafting import DraftingRows
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.models.draft_heads import DraftHead

Int64s = NDArray[np.int64]


class HeadDrafter:
    """A drafter that takes the likeliest tokens of a head; see `drafting.TreeDrafter`.

    Args:
        attention: over a pool of the head's layer with the pages of the model's pool.
        upload: copies an array to the device without a wait of the CPU; see `overlap.StreamLane.upload`.
    """

    reads_layers = True

    def __init__(self, head: DraftHead, attention: AttentionBackend, upload: Callable[[NDArray[Any]], Tensor]) -> None:
        self.head, self.attention, self._upload = head, attention, upload
        self.page_size = attention.pool.page_size
        self.page_shift = self.page_size.bit_length() - 1
        slots = (attention.pool.pages + 1) * self.page_size
        self.features = torch.zeros((slots, head.features), dtype=head.dtype, device=head.device)  # by slot

    @staticmethod
    def bytes_of(head: DraftHead, slots: int) -> int:
        """Return the bytes of device memory for the features of `slots` slots."""
        return head.features * head.dtype.itemsize * slots

    def observe_batch(self, batch: ForwardBatch) -> None:
        """Request the inputs of the layers that the head reads."""
        batch.taps = dict.fromkeys(self.head.taps)

    def computed(self, batch: ForwardBatch, hidden: Tensor) -> None:
        """Store the features of the pass's tokens, and compute the head's KV of these tokens."""
        assert batch.taps is not None
        self.features.index_copy_(0, batch.slots, self.head.read(batch.taps, hidden).to(self.features.dtype))
        batch.taps = None
        batch.rope_offsets = batch.rope_offsets_before
        before = batch.positions - 1
        if batch.tree is not None:
            tree = batch.tree
            numbers = self._upload(tree.numbers.astype(np.int64))
            parents = np.concatenate((np.array([-1]), tree.shape.parents)).astype(np.int64)
            behind = self._upload(parents - tree.shape.depths)
            first = len(before) - len(numbers)
            before = torch.cat((before[:first], batch.positions[first:] + behind[numbers]))
        counts = (batch.indptr[1:] - batch.indptr[:-1]).to(torch.int64)
        rows = batch.rows.to(torch.int64).repeat_interleave(counts, output_size=batch.tokens)
        self.attention.plan(batch)
        features = self._features_at(rows, before, batch.page_table)
        self.head(features, batch, self.attention)

    def moved(self, source: Tensor, target: Tensor) -> None:
        """Move features and KV of the head."""
        self.features.index_copy_(0, target, self.features.index_select(0, source))
        self.attention.pool.move(source, target)

    def _slots(self, rows: Tensor, positions: Tensor, page_table: Tensor) -> Tensor:
        pages = page_table[rows, positions >> self.page_shift].to(torch.int64)
        return (pages << self.page_shift) + (positions & (self.page_size - 1))

    def _features_at(self, rows: Tensor, positions: Tensor, page_table: Tensor) -> Tensor:
        """Return the model's features of tokens, [tokens, features]; zeros at position -1, before the first token."""
        found = self.features.index_select(0, self._slots(rows, positions.clamp(min=0), page_table))
        return found.masked_fill(positions[:, None] < 0, 0.0)

    def draft(self, drafting: DraftingRows) -> Tensor:
        """Draft a chain: the likeliest token behind each."""
        return self._grow(drafting, chain_of(int(drafting.drafts.max())), chain=True)

    def draft_tree(self, drafting: DraftingRows, shape: TreeShape) -> Tensor:
        """Draft a tree: the likeliest tokens behind each, as many as the tree has places."""
        return self._grow(drafting, shape, chain=False)

    def _grow(self, rows: DraftingRows, shape: TreeShape, *, chain: bool) -> Tensor:
        """Compute one depth after the other: of the drafts that others follow."""
        count, size, device = len(rows.drafts), len(shape.parents), rows.newest.device
        tokens = torch.zeros((count, 1 + size), dtype=torch.int64, device=device)
        tokens[:, 0] = rows.newest
        features = torch.zeros((count, 1 + size, self.head.features), dtype=self.features.dtype, device=device)
        behind: list[list[int]] = [[] for _ in range(1 + size)]
        for number, parent in enumerate(shape.parents.tolist(), 1):
            behind[parent].append(number)
        for depth in range(shape.deepest):
            at_depth = [number for number in np.flatnonzero(shape.depths == depth).tolist() if behind[number]]
            # each row computes those of its drafts that have a draft behind them
            firsts = np.array([behind[number][0] for number in at_depth], np.int64)
            members, places = np.nonzero(rows.drafts[:, None] >= firsts)
            if not len(members):
                break
            numbers = np.array(at_depth, np.int64)[places]
            of_rows, of_tree = self._upload(members), self._upload(numbers)
            batch = self._batch(tokens[of_rows, of_tree], rows, (members, numbers), shape, chain=chain)
            if depth:
                parents = self._upload(shape.parents[numbers - 1].astype(np.int64))
                before = features[of_rows, parents]
            else:
                positions = rows.stands.index_select(0, of_rows) - 1
                before = self._features_at(rows.rows.index_select(0, of_rows), positions, rows.page_table)
            self.attention.plan(batch)
            found, normed = self.head(before, batch, self.attention)
            features[of_rows, of_tree] = found.to(features.dtype)
            likeliest = self.head.likeliest(normed, max(len(behind[number]) for number in at_depth))
            pairs = [
                (pair, rank, int(member), draft)
                for pair, (member, number) in enumerate(zip(members.tolist(), numbers.tolist(), strict=True))
                for rank, draft in enumerate(behind[number])
            ]
            pair, rank, member, draft = self._upload(np.array(pairs, np.int64).T.copy())
            tokens[member, draft] = likeliest[pair, rank]
        return tokens[:, 1:]

    def _batch(
        self, token_ids: Tensor, rows: DraftingRows, places: tuple[Int64s, Int64s], shape: TreeShape, *, chain: bool
    ) -> ForwardBatch:
        """Return the pass over drafts of one depth; `places`: the row and the number of each, ascending by row."""
        members, numbers = places
        device = token_ids.device
        of_rows, firsts, counts = np.unique(members, return_index=True, return_counts=True)
        indptr = np.append(firsts, len(members)).astype(np.int32)
        of_members, of_tree = self._upload(members), self._upload(numbers)
        in_table, stands = rows.rows.index_select(0, of_members), rows.stands.index_select(0, of_members)
        last = numbers[indptr[1:] - 1].astype(np.int32)  # the slots up to it are read
        first_of_row = self._upload(firsts)
        standing = rows.stands_host[of_rows].astype(np.int32)
        lengths = standing + last + np.int32(1)
        device_lengths = stands.index_select(0, first_of_row) + self._upload(last.astype(np.int64)) + 1
        return ForwardBatch(
            token_ids=token_ids,
            positions=stands + int(shape.depths[numbers[0]]),
            slots=self._slots(in_table, stands + of_tree, rows.page_table),
            rows=in_table.index_select(0, first_of_row).to(torch.int32),
            indptr=self._upload(indptr),
            lengths=device_lengths.to(torch.int32),
            page_table=rows.page_table,
            logits_at=torch.arange(len(members), device=device),
            extend_rows=0 if chain else len(of_rows),
            starts_host=(lengths - counts).astype(np.int32),
            lengths_host=lengths,
            rope_offsets=None if rows.rope_offsets is None else rows.rope_offsets.index_select(1, of_members),
            tree=None if chain else TreeRows(0, standing, numbers.astype(np.int32), shape),
        )
