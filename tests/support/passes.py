"""Passes over a paged pool from a few numbers: page tables at random, and NaN where no read is allowed. Torch only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool

SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
RULES = {
    "plain": LayerRules(0.3),
    "window": LayerRules(0.25, window=7),
    "window of one": LayerRules(0.25, window=1),
    "cap": LayerRules(0.9, cap=1.5),
    "sinks": LayerRules(0.25, sinks=SINKS),
    "all": LayerRules(0.8, window=20, cap=2.0, sinks=SINKS),
}
"""Attention of a layer by what it shows, for passes of four query heads with a head dimension of any size."""

GARBAGE_PAGE = 1 << 24  # in page tables behind a row's last page: reading there is out of bounds


@dataclass(slots=True)
class Pass:
    """One layer's worth of a pass, with the dense keys and values of each row beside the pages."""

    pool: KvPool
    batch: ForwardBatch
    query: Tensor  # [tokens, heads, head_dim]
    key: Tensor  # [tokens, kv_heads, head_dim]
    value: Tensor
    dense_keys: list[Tensor]  # [positions, kv_heads, head_dim] of each row
    dense_values: list[Tensor]

    def spans(self) -> list[slice]:
        """The new tokens of each row."""
        ends = np.cumsum(self.batch.lengths_host - self.batch.starts_host).tolist()
        return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def make_pass(
    spans: Sequence[tuple[int, int]],
    *,
    extend_rows: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    only: Sequence[int] | None = None,
) -> Pass:
    """Make a pass whose row i computes positions [start:stop) of `spans[i]`.

    The pool holds the KV of earlier positions; unused pages, unwritten slots and the scratch page are NaN. With `only`,
    the rows keep their numbers, but just these rows run.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)

    dense_keys = [normal(stop, kv_heads, head_dim) for _, stop in spans]
    dense_values = [normal(stop, kv_heads, head_dim) for _, stop in spans]
    queries = [normal(stop - start, heads, head_dim) for start, stop in spans]

    pages_of = [-(-stop // page_size) for _, stop in spans]
    pages = sum(pages_of) + 4
    pool = KvPool(1, pages, page_size, kv_heads, head_dim, dtype, torch.device("cpu"))
    pool.keys[0].fill_(torch.nan)
    pool.values[0].fill_(torch.nan)
    order = 1 + rng.permutation(pages - 1)  # page 0, which masked reads of a table give, is never used
    table_rows = rng.permutation(len(spans) + 2)[: len(spans)]
    table = np.full((len(spans) + 2, max(pages_of, default=0) + 2), GARBAGE_PAGE, np.int32)
    slots_of = []
    for row, (table_row, count) in enumerate(zip(table_rows, pages_of, strict=True)):
        taken, order = order[:count], order[count:]
        table[table_row, :count] = taken
        start, stop = spans[row]
        at = np.arange(stop)
        slots = torch.from_numpy(taken[at // page_size] * page_size + at % page_size)
        pool.keys[0].view(-1, kv_heads, head_dim)[slots[:start]] = dense_keys[row][:start]
        pool.values[0].view(-1, kv_heads, head_dim)[slots[:start]] = dense_values[row][:start]
        slots_of.append(slots[start:])

    chosen = list(range(len(spans))) if only is None else list(only)
    starts = np.array([spans[row][0] for row in chosen], np.int32)
    lengths = np.array([spans[row][1] for row in chosen], np.int32)
    tokens = int((lengths - starts).sum())
    batch = ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.cat([torch.arange(*spans[row]) for row in chosen]),
        slots=torch.cat([slots_of[row] for row in chosen]),
        rows=torch.tensor([int(table_rows[row]) for row in chosen], dtype=torch.int32),
        indptr=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths - starts)]).astype(np.int32)),
        lengths=torch.from_numpy(lengths.copy()),
        page_table=torch.from_numpy(table),
        logits_at=torch.zeros(0, dtype=torch.int64),
        extend_rows=sum(row < extend_rows for row in chosen),
        starts_host=starts,
        lengths_host=lengths,
    )
    made = Pass(
        pool=pool,
        batch=batch,
        query=torch.cat([queries[row] for row in chosen]),
        key=torch.cat([dense_keys[row][spans[row][0] :] for row in chosen]),
        value=torch.cat([dense_values[row][spans[row][0] :] for row in chosen]),
        dense_keys=[dense_keys[row] for row in chosen],
        dense_values=[dense_values[row] for row in chosen],
    )
    return moved(made, device) if device != "cpu" else made


def moved(made: Pass, device: str) -> Pass:
    """Return the pass on another device."""
    made.pool.keys = [one.to(device) for one in made.pool.keys]
    made.pool.values = [one.to(device) for one in made.pool.values]
    for owner, names in (
        (made.batch, "token_ids positions slots rows indptr lengths page_table logits_at"),
        (made, "query key value"),
    ):
        for name in names.split():
            setattr(owner, name, getattr(owner, name).to(device))
    made.dense_keys = [one.to(device) for one in made.dense_keys]
    made.dense_values = [one.to(device) for one in made.dense_values]
    return made


def defined(made: Pass, rule: LayerRules) -> Tensor:
    """Return the attention of each token by itself, in float64."""
    heads, kv_heads = made.query.shape[1], made.pool.kv_heads
    out = []
    for row, span in enumerate(made.spans()):
        start, length = int(made.batch.starts_host[row]), int(made.batch.lengths_host[row])
        keys = made.dense_keys[row].double().repeat_interleave(heads // kv_heads, 1)
        values = made.dense_values[row].double().repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", made.query[span].double(), keys) * rule.scale
        if rule.cap is not None:
            scores = rule.cap * torch.tanh(scores / rule.cap)
        at, own = torch.arange(length), torch.arange(start, length)[:, None]
        hidden = at > own if rule.window is None else (at > own) | (at <= own - rule.window)
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if rule.sinks is not None:
            total = total + rule.sinks.double().exp()[:, None, None]
        out.append(torch.einsum("hqk,khd->qhd", weights / total, values))
    return torch.cat(out)


def forget_before(made: Pass, window: int) -> None:
    """Fill the slots that no token of the pass attends to with NaN, as if their pages were given to others."""
    size = made.pool.page_size
    for row, table_row in enumerate(made.batch.rows.tolist()):
        for position in range(max(0, int(made.batch.starts_host[row]) - window + 1)):
            page = int(made.batch.page_table[table_row, position // size])
            for kept in (made.pool.keys[0], made.pool.values[0]):
                kept[page, position % size] = torch.nan
