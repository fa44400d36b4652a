"""Attention in plain torch, row by row: slow, on any device, and the reference of all other backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool


class ReferenceAttention:
    """Attention that gathers the pages of each row that its new tokens attend to, and sums in fp32.

    For fp64 queries it sums in fp64.
    """

    name = "reference"
    graphs = False  # lengths of rows are shapes of its tensors
    exact_lengths = True

    def __init__(self, pool: KvPool, scale: float | None = None, rules: Sequence[LayerRules] = ()) -> None:
        """Args:
        scale: factor of the scores before the softmax; head_dim ** -0.5 unless given.
        rules: attention of each layer, for a model with windows, caps or sinks.
        """
        self.pool = pool
        self.rules = tuple(rules) or (LayerRules(pool.head_dim**-0.5 if scale is None else scale),) * len(pool.keys)

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """Do nothing: this backend needs no preparation.

        Raises: ValueError if `graph` is set.
        """
        if graph:
            raise ValueError("attention backend `reference` cannot run in a CUDA graph\nhint: use `triton`")

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the new keys and values to the pool, then attend; see `AttentionBackend.run`."""
        self.pool.write(layer, key, value, batch)
        view = self.pool.view(layer, batch)
        tables = view.page_table.index_select(0, view.rows)
        out, rule, size = torch.empty_like(query), self.rules[layer], self.pool.page_size
        first = 0
        of_trees = 0 if batch.tree is None else batch.tokens - len(batch.tree.numbers)
        for row, (start, length) in enumerate(
            zip(batch.starts_host.tolist(), batch.lengths_host.tolist(), strict=True)
        ):
            stop = first + length - start
            seen = None
            if batch.tree is not None and row >= batch.tree.first:
                start = int(batch.tree.stands[row - batch.tree.first])
            oldest = 0 if rule.window is None else max(start - rule.window + 1, 0)
            if batch.tree is not None and row >= batch.tree.first:
                new = slice(first - of_trees, stop - of_trees)
                seen = batch.tree.seen(row - batch.tree.first, new, length, oldest, rule.window)
            page = oldest // size
            keys, values = self.pool.read(layer, tables[row, page : -(-length // size)].long())
            there = slice(oldest - page * size, length - page * size)
            hidden = None if seen is None else torch.from_numpy(~seen).to(query.device)
            out[first:stop] = attend(query[first:stop], keys[there], values[there], rule, hidden)
            first = stop
        return out


def attend(query: Tensor, key: Tensor, value: Tensor, rule: LayerRules, hidden: Tensor | None = None) -> Tensor:
    """Compute the attention of one row's last `new` tokens over its newest positions.

    Args:
        query: [new, heads, head_dim], of the last `new` positions; key, value: [positions, kv_heads, head_dim], at
            least as many as the first of the tokens attends to.
        hidden: bool [new, positions], positions that a token does not attend to; None: those behind it.
    Returns: [new, heads, head_dim], of the query's dtype.
    """
    new, heads, head_dim = query.shape
    positions, kv_heads, _ = key.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    # Query head h reads KV head h // group: the heads of a group and the tokens are together the rows of one matrix.
    grouped = query.to(exact).view(new, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = (grouped @ key.to(exact).permute(1, 2, 0) * rule.scale).view(kv_heads, -1, new, positions)
    if rule.cap is not None:
        scores = (scores / rule.cap).tanh() * rule.cap
    if hidden is None:
        at = torch.arange(positions, device=query.device)
        own = at[positions - new :, None]
        hidden = at > (own if rule.block is None else own | (rule.block - 1))
        if rule.window is not None:
            hidden = hidden | (at <= own - rule.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.to(exact).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = weights.reshape(kv_heads, -1, positions) @ value.to(exact).transpose(0, 1)
    return out.view(kv_heads, -1, new, head_dim).permute(2, 0, 1, 3).reshape(new, heads, head_dim).to(query.dtype)
