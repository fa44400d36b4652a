"""Attention in plain torch, row by row: slow, on any device, and the reference of all other backends."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool


class ReferenceAttention:
    """Attention that gathers each row's pages into dense keys and values and sums in fp32, for fp64 queries in fp64."""

    name = "reference"
    graphs = False  # lengths of rows are shapes of its tensors
    exact_lengths = True

    def __init__(self, pool: KvPool, scale: float | None = None) -> None:
        """Args: scale: factor of the scores before the softmax; head_dim ** -0.5 unless given."""
        self.pool = pool
        self.scale = pool.head_dim**-0.5 if scale is None else scale

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """Do nothing: this backend needs no preparation.

        Raises: ValueError if `graph` is set.
        """
        if graph:
            raise ValueError("attention backend `reference` cannot run in a CUDA graph\nhint: use `triton`")

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the new keys and values to the pool, then attend; see `AttentionBackend.run`."""
        self.pool.write(layer, key, value, batch)
        tables = batch.page_table.index_select(0, batch.rows)
        out = torch.empty_like(query)
        first = 0
        for row, (start, length) in enumerate(
            zip(batch.starts_host.tolist(), batch.lengths_host.tolist(), strict=True)
        ):
            stop = first + length - start
            pages = tables[row, : -(-length // self.pool.page_size)].long()
            keys, values = self.pool.read(layer, pages)
            out[first:stop] = attend(query[first:stop], keys[:length], values[:length], self.scale)
            first = stop
        return out


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute the attention of one row's last `new` tokens over all of its positions.

    Args:
        query: [new, heads, head_dim], of the last `new` positions; key, value: [positions, kv_heads, head_dim].
    Returns: [new, heads, head_dim], of the query's dtype.
    """
    new, heads, head_dim = query.shape
    positions, kv_heads, _ = key.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    # Query head h reads KV head h // group: the heads of a group and the tokens are together the rows of one matrix.
    grouped = query.to(exact).view(new, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = (grouped @ key.to(exact).permute(1, 2, 0) * scale).view(kv_heads, -1, new, positions)
    if new > 1:
        at = torch.arange(positions, device=query.device)
        scores = scores.masked_fill(at > at[positions - new :, None], float("-inf"))
    out = scores.softmax(-1).view(kv_heads, -1, positions) @ value.to(exact).transpose(0, 1)
    return out.view(kv_heads, -1, new, head_dim).permute(2, 0, 1, 3).reshape(new, heads, head_dim).to(query.dtype)
