"""Passes over a paged pool from a few numbers: page tables at random, and NaN where no read is allowed. Torch only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.draft_tree import TreeRows, TreeShape
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


def with_trees(made: Pass, first: int, shape: TreeShape, numbers: Sequence[Sequence[int]]) -> Pass:
    """Let the rows from `first` compute tokens of a tree, each those with these numbers; their spans have its slots.

    Rows must extend, up to the slot of their last number. The KV of the other slots of a tree is there already.
    """
    batch, spans = made.batch, made.spans()
    keep = list(range(spans[first].start))
    for row, chosen in enumerate(numbers, first):
        assert spans[row].start + chosen[-1] + 1 == spans[row].stop, (
            "the last slot of a span is that of the last number"
        )
        keep += [spans[row].start + number for number in chosen]
        for number in sorted(set(range(chosen[-1])) - set(chosen)):
            slot = batch.slots[spans[row].start + number]
            for kept, dense in ((made.pool.keys[0], made.dense_keys), (made.pool.values[0], made.dense_values)):
                kept.view(-1, *kept.shape[2:])[slot] = dense[row][int(batch.starts_host[row]) + number]
    stands, device = batch.starts_host[first:].copy(), batch.slots.device
    counts = np.array([len(one) for one in numbers], np.int32)
    batch.tree = TreeRows(first, stands, np.concatenate([np.array(one, np.int32) for one in numbers]), shape)
    batch.starts_host = np.concatenate((batch.starts_host[:first], batch.lengths_host[first:] - counts)).astype(
        np.int32
    )
    positions = np.concatenate([stand + shape.depths[list(one)] for stand, one in zip(stands, numbers, strict=True)])
    indptr = np.concatenate(([0], np.cumsum(batch.lengths_host - batch.starts_host))).astype(np.int32)
    of_trees = torch.from_numpy(positions.astype(np.int64)).to(device)
    batch.positions = torch.cat((batch.positions[: spans[first].start], of_trees))
    batch.slots, batch.token_ids = batch.slots[keep], batch.token_ids[keep]
    batch.indptr = torch.from_numpy(indptr).to(device)
    batch.extend_rows = batch.count
    made.query, made.key, made.value = made.query[keep], made.key[keep], made.value[keep]
    return made


def path_to(shape: TreeShape, number: int) -> list[int]:
    """Return the numbers of the tokens from the newest one to one of a tree."""
    path = [number]
    while path[0]:
        path.insert(0, int(shape.parents[path[0] - 1]))
    return path


def defined_in_trees(made: Pass, rule: LayerRules) -> Tensor:
    """Return the attention of each token of a pass with trees as if the tokens of its path were a row, in float64."""
    tree, heads, out = made.batch.tree, made.query.shape[1], []
    assert tree is not None
    of_trees = made.batch.tokens - len(tree.numbers)
    for row, span in enumerate(made.spans()):
        for token in range(span.start, span.stop):
            if row < tree.first:
                seen = list(range(int(made.batch.starts_host[row]) + token - span.start + 1))
            else:
                stand, number = int(tree.stands[row - tree.first]), int(tree.numbers[token - of_trees])
                seen = [*range(stand), *(stand + one for one in path_to(tree.shape, number))]
            seen = seen[-rule.window :] if rule.window is not None else seen
            keys, values = (
                one[row][seen].double().repeat_interleave(heads // made.pool.kv_heads, 1)
                for one in (made.dense_keys, made.dense_values)
            )
            scores = torch.einsum("hd,khd->hk", made.query[token].double(), keys) * rule.scale
            if rule.cap is not None:
                scores = rule.cap * torch.tanh(scores / rule.cap)
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True)
            if rule.sinks is not None:
                total = total + rule.sinks.double().exp()[:, None]
            out.append(torch.einsum("hk,khd->hd", weights / total, values))
    return torch.stack(out)


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
