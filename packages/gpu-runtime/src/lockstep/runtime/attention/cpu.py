"""Attention on a CPU: decodes of similar length together, prompts alone, over keys and values gathered from pages.

    decodes      lengths 310 305 300 | 64 60 60 | 17      groups of at least 3/4 of the longest
                 slots -> keys, values [rows, kv_heads, positions, head_dim], in a workspace
                 scores, softmax, sum: three batched products of oneDNN or MKL
    prompts      pages of one row -> keys, values; `scaled_dot_product_attention`, causal

`scaled_dot_product_attention` takes four times as long for decodes, whose few queries do not fill its blocks. Padding
behind a shorter row repeats its last position, so that nothing is read that was not written.

In bfloat16 a product rounds scores to 8 bits, which shows at large scores. A second product of the same matrices with
the first result subtracted returns what was rounded off: their sum is as exact as float32.

    s = round(q k)      r = round(q k - s)      s + r = q k, within 2 ** -16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.processor import multiplies_bfloat16

SIMILAR = 0.75  # rows with this share of the longest row's length join its group: padding costs as much as positions
PADDING = 1024  # positions of padding in a group that shorter rows may add, which cost less than another group
GROUP_NUMBERS = 1 << 21  # of keys in a group, at most: 4 MiB in bfloat16; larger workspaces gain nothing
SHORT = 256  # positions up to which one row is computed by one call instead of three products
QUERIES = 256  # of a prompt whose scores are computed at a time, with a cap or sinks


@dataclass(frozen=True, slots=True)
class _Group:
    """Decodes that are computed together.

    Args:
        tokens: their places among the new tokens of the pass, int64 [rows].
        cells: places of keys and values among the heads of all slots, int64 [rows * kv_heads * positions].
        bias: added to the scores, float32 [rows, 1, 1, positions]: -inf for padding.
    """

    tokens: Tensor
    cells: Tensor
    bias: Tensor
    positions: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A row with several new tokens.

    Args:
        tokens: its new tokens in the pass.
        pages: those that its new tokens attend to, int64.
        there: positions of these pages that are read.
        mask: which positions a token attends to, [new, positions]; None: causal, from position 0 on.
    """

    tokens: slice
    pages: Tensor
    there: slice
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    groups: tuple[_Group, ...]
    prompts: tuple[_Prompt, ...]


class CpuAttention:
    """Attention of a CPU, equal to `reference` within rounding."""

    name = "cpu"
    graphs = False  # lengths of rows are shapes of its tensors
    exact_lengths = True

    def __init__(self, pool: KvPool, scale: float | None = None, rules: Sequence[LayerRules] = ()) -> None:
        """Args:
        scale: factor of the scores before the softmax; head_dim ** -0.5 unless given.
        rules: attention of each layer, for a model with windows, caps or sinks.
        """
        self.pool = pool
        scale = pool.head_dim**-0.5 if scale is None else scale
        self.rules = tuple(rules) or (LayerRules(scale),) * len(pool.keys)
        if pool.dtype == torch.float64 or (pool.dtype == torch.bfloat16 and multiplies_bfloat16()):
            self.dtype = pool.dtype
        else:
            self.dtype = torch.float32
        stored = pool.keys[0].dtype
        self._gathered = [torch.empty(0, dtype=torch.uint8 if pool.fp8 else stored) for _ in range(2)]
        self._widened = [torch.empty(0, dtype=self.dtype) for _ in range(2)]
        self._plans: dict[
            tuple[bool, int | None, int | None], _Plan
        ] = {}  # by pool of pages, size of window, and block

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """Group the rows, and find their slots, once per pass, pool of pages and size of window.

        Raises: ValueError if `graph` is set.
        """
        if graph:
            raise ValueError("attention backend `cpu` cannot run in a CUDA graph\nhint: use `triton`")
        self._plans = {}
        for layer, rule in enumerate(self.rules):
            kind = (layer in self.pool.sliding, rule.window, rule.block)
            if kind not in self._plans:
                view = self.pool.view(layer, batch)
                tables = view.page_table.index_select(0, view.rows).long()
                self._plans[kind] = self._planned(batch, tables, rule)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the new keys and values to the pool, then attend; see `AttentionBackend.run`."""
        self.pool.write(layer, key, value, batch)
        rule = self.rules[layer]
        plan = self._plans[layer in self.pool.sliding, rule.window, rule.block]
        out = torch.empty_like(query)
        for group in plan.groups:
            self._decode(layer, rule, query, group, out)
        for prompt in plan.prompts:
            self._extend(layer, rule, query[prompt.tokens], prompt, out[prompt.tokens])
        return out

    # ------------------------------------------------------------------------------------------------------- planning

    def _planned(self, batch: ForwardBatch, tables: Tensor, rule: LayerRules) -> _Plan:
        window = rule.window
        starts, lengths = batch.starts_host.astype(np.int64), batch.lengths_host.astype(np.int64)
        firsts = np.cumsum(lengths - starts) - (lengths - starts)
        tree, reaches, alone = batch.tree, starts, lengths - starts == 1
        if tree is not None:
            reaches = np.concatenate((starts[: tree.first], tree.stands.astype(np.int64)))
            alone[tree.first :] = False
        oldest = np.zeros_like(starts) if window is None else np.maximum(reaches - window + 1, 0)
        decodes = np.flatnonzero(alone)
        decodes = decodes[np.argsort(oldest[decodes] - lengths[decodes], kind="stable")]  # the longest first
        groups, begin = [], 0
        counts = (lengths - oldest)[decodes]
        while begin < len(decodes):
            longest = int(counts[begin])
            most = max(1, GROUP_NUMBERS // (longest * self.pool.kv_heads * self.pool.head_dim))
            candidates = counts[begin : begin + most]
            padding = np.cumsum(longest - candidates)  # counts descend, so both conditions hold up to some row
            similar = int(np.count_nonzero((candidates >= SIMILAR * longest) | (padding <= PADDING)))
            rows = decodes[begin : begin + similar]
            groups.append(self._group(tables, rows, firsts[rows], oldest[rows], lengths[rows]))
            begin += similar
        prompts = [
            self._prompt(tables[row], int(firsts[row]), int(oldest[row]), int(starts[row]), int(lengths[row]), rule)
            for row in np.flatnonzero(~alone).tolist()
        ]
        if tree is not None:
            prompts = prompts[: len(prompts) - len(tree.stands)]
            others = batch.tokens - len(tree.numbers)
            for row in range(tree.first, batch.count):
                new = slice(int(firsts[row]), int(firsts[row] + lengths[row] - starts[row]))
                within = slice(new.start - others, new.stop - others)
                seen = tree.seen(row - tree.first, within, int(lengths[row]), int(oldest[row]), window)
                page = int(oldest[row]) // self.pool.page_size
                there = slice(
                    int(oldest[row]) - page * self.pool.page_size, int(lengths[row]) - page * self.pool.page_size
                )
                pages = tables[row][page : -(-int(lengths[row]) // self.pool.page_size)]
                prompts.append(_Prompt(new, pages, there, torch.from_numpy(seen)))
        return _Plan(tuple(groups), tuple(prompts))

    def _group(
        self,
        tables: Tensor,
        rows: np.ndarray[tuple[int], np.dtype[np.int64]],
        firsts: np.ndarray[tuple[int], np.dtype[np.int64]],
        oldest: np.ndarray[tuple[int], np.dtype[np.int64]],
        lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> _Group:
        positions = int((lengths - oldest).max())
        first, length = torch.from_numpy(oldest)[:, None], torch.from_numpy(lengths)[:, None]
        wanted = first + torch.arange(positions)
        at = torch.minimum(wanted, length - 1)
        size, heads = self.pool.page_size, self.pool.kv_heads
        pages = tables.index_select(0, torch.from_numpy(rows)).gather(1, at // size)
        cells = (pages * size + at % size)[:, None, :] * heads + torch.arange(heads)[:, None]
        bias = torch.zeros(wanted.shape, dtype=torch.float32).masked_fill_(wanted >= length, float("-inf"))
        return _Group(torch.from_numpy(firsts), cells.reshape(-1), bias[:, None, None, :], positions)

    def _prompt(self, table: Tensor, first: int, oldest: int, start: int, length: int, rule: LayerRules) -> _Prompt:
        size = self.pool.page_size
        page = oldest // size
        there = slice(oldest - page * size, length - page * size)
        window, block = rule.window, rule.block
        mask = None
        if start or block is not None or (window is not None and length > window):
            at, own = torch.arange(oldest, length), torch.arange(start, length)[:, None]
            mask = at <= (own if block is None else own | (block - 1))
            if window is not None:
                mask &= at > own - window
        return _Prompt(slice(first, first + length - start), table[page : -(-length // size)], there, mask)

    # ------------------------------------------------------------------------------------------------------ computing

    def _decode(self, layer: int, rule: LayerRules, query: Tensor, group: _Group, out: Tensor) -> None:
        heads, dim = self.pool.kv_heads, self.pool.head_dim
        keys, values = (
            one.view(-1, heads, group.positions, dim) for one in self._gather(layer, group.cells, (-1, dim))
        )
        whole = len(group.tokens) == len(query)  # then in order, if there is one row
        mine = query if whole and len(query) == 1 else query.index_select(0, group.tokens)
        grouped = mine.to(self.dtype).view(len(mine), heads, -1, dim)
        if len(mine) == 1 and group.positions <= SHORT and rule.cap is None and rule.sinks is None:
            found = self._fused(layer, rule, grouped, keys, values)
        else:
            found = self._attend(layer, rule, grouped, keys, values, group.bias)
        out.index_copy_(0, group.tokens, found.view(mine.shape).to(out.dtype))

    def _extend(self, layer: int, rule: LayerRules, query: Tensor, prompt: _Prompt, out: Tensor) -> None:
        heads, dim, size = self.pool.kv_heads, self.pool.head_dim, self.pool.page_size
        keys, values = (
            one.view(-1, heads, dim)[prompt.there].transpose(0, 1)[None]
            for one in self._gather(layer, prompt.pages, (-1, size * heads * dim))
        )
        queries = query.to(self.dtype)
        if rule.cap is None and rule.sinks is None:
            more = {"attn_mask": prompt.mask, "is_causal": prompt.mask is None, "enable_gqa": query.shape[1] != heads}
            out.copy_(self._fused(layer, rule, queries.transpose(0, 1)[None], keys, values, **more)[0].transpose(0, 1))
            return
        new, positions = len(query), keys.shape[2]
        mask = torch.ones((new, positions), dtype=torch.bool).tril_() if prompt.mask is None else prompt.mask
        bias = torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, float("-inf"))
        for first in range(0, new, QUERIES):
            part = queries[first : first + QUERIES]
            grouped = part.view(len(part), heads, -1, dim).permute(1, 2, 0, 3)  # [kv_heads, group, new, head_dim]
            members = grouped.shape[1]
            rows = bias[first : first + QUERIES].repeat(members, 1)[None, None]
            flat = grouped.reshape(1, heads, -1, dim)
            found = self._attend(layer, rule, flat, keys.contiguous(), values.contiguous(), rows)
            back = found.view(heads, members, len(part), dim).permute(2, 0, 1, 3).reshape(part.shape)
            out[first : first + QUERIES] = back

    def _fused(self, layer: int, rule: LayerRules, query: Tensor, keys: Tensor, values: Tensor, **more: Any) -> Tensor:
        """Attend by `scaled_dot_product_attention`: shapes as in `_attend`, or more query heads than KV heads."""
        key_scale, value_scale = self._scales(layer)
        found = F.scaled_dot_product_attention(query, keys, values, scale=rule.scale * key_scale, **more)
        return found if value_scale == 1.0 else found * value_scale

    def _attend(
        self, layer: int, rule: LayerRules, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor
    ) -> Tensor:
        """Attend from queries [rows, kv_heads, queries, head_dim]; keys, values: [rows, kv_heads, positions, head_dim].

        A query head's place among the queries of its KV head decides which sink it has: sinks are in the same order.
        """
        rows, heads, count, dim = query.shape
        key_scale, value_scale = self._scales(layer)
        scale, exact = rule.scale * key_scale, torch.promote_types(self.dtype, torch.float32)
        flat, turned = query.reshape(rows * heads, count, dim), keys.reshape(rows * heads, -1, dim).transpose(1, 2)
        product = torch.bmm(flat, turned)
        shape = (rows, heads, count, -1)
        bias = bias.to(exact)
        rest = None
        if self.dtype == torch.bfloat16:
            rest = torch.baddbmm(product, flat, turned, beta=-1.0).view(shape)
        if rule.cap is None:
            scores = torch.add(bias, product.view(shape), alpha=scale)
            if rest is not None:
                scores.add_(rest, alpha=scale)
        else:
            scores = product.view(shape).to(exact) if rest is None else product.view(shape).to(exact) + rest
            scores = (scores * (scale / rule.cap)).tanh_().mul_(rule.cap).add_(bias)
        if rule.sinks is None:
            weights = scores.softmax(-1)
        else:
            members = rule.sinks.numel() // heads
            sinks = rule.sinks.to(exact).view(1, heads, members, 1)
            sinks = sinks.repeat_interleave(count // members, 2).expand(rows, heads, count, 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        found = torch.bmm(
            weights.to(self.dtype).reshape(rows * heads, count, -1), values.reshape(rows * heads, -1, dim)
        )
        if value_scale != 1.0:
            found = found * value_scale
        return found.view(rows, heads, count, dim)

    def _scales(self, layer: int) -> tuple[float, float]:
        """Return the scales of keys and of values in fp8; 1 without."""
        return self.pool.scales[layer] if self.pool.fp8 else (1.0, 1.0)

    def _gather(self, layer: int, index: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return rows of keys and of values, seen as `shape`, in workspaces: the next call overwrites them.

        Without workspaces the system would map, and zero, new memory for every layer.
        """
        found = []
        for number, kept in enumerate((self.pool.keys[layer], self.pool.values[layer])):
            stored = (kept.view(torch.uint8) if self.pool.fp8 else kept).view(shape)  # torch cannot select fp8 numbers
            out = self._room(self._gathered, number, len(index) * stored.shape[1])
            rows = torch.index_select(stored, 0, index, out=out.view(len(index), -1))
            if kept.dtype != self.dtype:
                wide = self._room(self._widened, number, rows.numel())
                rows = wide.view(rows.shape).copy_(rows.view(kept.dtype))
            found.append(rows)
        return found[0], found[1]

    @staticmethod
    def _room(kept: list[Tensor], number: int, count: int) -> Tensor:
        """Return the first `count` numbers of a workspace, which grows."""
        if kept[number].numel() < count:
            kept[number] = torch.empty(count, dtype=kept[number].dtype)
        return kept[number][:count]
