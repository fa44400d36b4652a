"""A mixture of experts: each token passes through a few of many MLPs.

Pairs of (token, expert) are sorted by expert, so that the tokens of each expert are contiguous, and one grouped product
computes all experts:

    tokens     0 1 2 3          pairs by expert      0:[1 3] 1:[] 2:[0 1 2] 3:[0 2 3]
    experts    2 0 2 0          ends                    2      2       5         8
               3 2 3 3

The ends stay on the device. How ranks share the experts (`ExpertSplit`):

| `ep` | a rank has | a token is computed |
|---|---|---|
| 1 | some columns of every expert | on every rank, and the results are summed |
| as many as ranks | some experts, whole | for the rank's own experts on every rank, and the results are summed |
| the same, with `a2a` | some experts, whole | routed by one rank, sent to the ranks of its experts, and sent back |

With data-parallel attention (`Parallel.shared`) each rank has rows of its own. `a2a` sends these; otherwise the rows of
all ranks are gathered before and divided behind (`layers.SharedRows`).

Experts are placed in order, the same number on every rank (`core/cluster/expert_placement.py: unbalanced`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.core.cluster.expert_placement import unbalanced
from lockstep.runtime.checkpoint import TensorSpec, TensorSplit
from lockstep.runtime.lora.batch import AdapterBatch
from lockstep.runtime.models.elementwise import silu_and_mul
from lockstep.runtime.models.grouped import grouped_linear
from lockstep.runtime.models.layers import Maker, Parallel, Weight
from lockstep.runtime.models.settings import ExpertSettings
from lockstep.runtime.quantized.matrices import Quantized, StoredMatrix


class Experts(nn.Module):
    """Softmax over all experts, the most probable few per token, their MLPs, and the weighted sum."""

    def __init__(self, make: Maker, hidden: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings, self.hidden, self.parallel = settings, hidden, make.parallel
        self.router = make.empty(settings.experts, hidden)
        self.own, self.exchanges = range(settings.experts), make.parallel.experts.a2a
        self.rows_differ = make.parallel.shared is not None
        self.inner, self.outer = TensorSplit(0, settings.intermediate), TensorSplit(1, settings.intermediate)
        if make.parallel.experts.ep > 1:
            self.own = experts_of(settings.experts, make.parallel.rank, make.parallel.experts.ep)
            self.inner = self.outer = TensorSplit()
            make = replace(make, parallel=Parallel())
        self.local = self.inner.local(settings.intermediate, make.parallel.ranks, "moe_intermediate_size")
        inner, count = settings.intermediate, len(self.own)
        columns = [StoredMatrix(name, inner, hidden, self.inner) for name in ("gate_proj", "up_proj")]
        names = [f"experts.{expert}.{part.name}" for expert in self.own for part in columns]
        self.gate_up = make.matrices(columns, names, count)
        rows = StoredMatrix("down_proj", hidden, inner, columns=self.outer)
        self.down = make.matrices([rows], [f"experts.{expert}.down_proj" for expert in self.own], count)

    def forward(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """Apply the experts, [tokens, hidden] to the same shape.

        Adapters have no effect: folders with experts are refused.
        """
        if self.exchanges:
            return self._exchanged(hidden)
        each, whole = self.settings.per_token, len(self.own) < self.settings.experts
        weights, experts = self.route(hidden)
        if whole:  # pairs with experts of other ranks come last, and are not computed
            experts = experts - self.own.start
            experts = torch.where((experts >= 0) & (experts < len(self.own)), experts, len(self.own))
        # A stable sort keeps tokens in order within an expert, so that the order of the sums below is fixed.
        sorted_experts, order = experts.flatten().sort(stable=True)
        down = self._computed(hidden[order // each], sorted_experts)
        if whole:
            down = down.masked_fill((sorted_experts == len(self.own))[:, None], 0.0)
        return self.parallel.all_reduce(_mixed(down, order, weights))

    def _computed(self, rows: Tensor, sorted_experts: Tensor) -> Tensor:
        """Pass rows through their experts, [rows, hidden] to the same shape.

        Args:
            sorted_experts: [rows], places among the experts here; rows behind the last expert get any values.
        """
        numbers = torch.arange(len(self.own), device=rows.device, dtype=sorted_experts.dtype)
        ends = torch.searchsorted(sorted_experts, numbers, right=True).to(torch.int32)
        inner = silu_and_mul(_grouped(rows, self.gate_up, ends))
        return _grouped(inner, self.down, ends)

    def _exchanged(self, hidden: Tensor) -> Tensor:
        """Apply the experts to a share of the tokens on each rank, sent to the ranks of their experts and back.

        If the rows of ranks differ, the share of a rank is all of its rows, which may be none.
        """
        parallel, tokens = self.parallel, len(hidden)
        exchange = parallel.all_to_all
        if not tokens and not self.rows_differ:
            return hidden
        assert exchange is not None
        share = -(-tokens // parallel.ranks)
        mine = hidden if self.rows_differ else hidden[parallel.rank * share : (parallel.rank + 1) * share]
        weights, experts = self.route(mine)
        sorted_experts, order = experts.flatten().sort(stable=True)
        counts = torch.bincount(sorted_experts, minlength=self.settings.experts).view(parallel.ranks, -1)
        one_each = [1] * parallel.ranks
        theirs = exchange(counts, one_each, one_each)  # [ranks, experts here], from each rank
        sends, receives = counts.sum(1).tolist(), theirs.sum(1).tolist()
        rows = exchange(mine[order // self.settings.per_token], sends, receives)
        numbers = torch.arange(len(self.own), device=hidden.device).repeat(parallel.ranks)
        there, by_expert = numbers.repeat_interleave(theirs.flatten()).sort(stable=True)
        computed = torch.empty_like(rows)
        computed[by_expert] = self._computed(rows[by_expert], there)
        mixed = _mixed(exchange(computed, receives, sends), order, weights)
        if self.rows_differ:
            return mixed
        joined = parallel.all_gather(torch.nn.functional.pad(mixed, (0, 0, 0, share - len(mixed))))
        return joined.view(share, parallel.ranks, self.hidden).transpose(0, 1).reshape(-1, self.hidden)[:tokens]

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, float32, and indices of each token's experts, [tokens, per_token] each."""
        chances = F.linear(hidden, self.router).float().softmax(dim=-1)
        weights, experts = chances.topk(self.settings.per_token, dim=-1)
        if self.settings.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the experts here: one for each matrix of each expert."""
        inner = self.settings.intermediate
        yield TensorSpec(f"{prefix}.gate.weight", tuple(self.router.shape), self.router.data)
        for place, expert in enumerate(self.own):
            name = f"{prefix}.experts.{expert}"
            if isinstance(self.gate_up, Quantized):
                yield from self.gate_up.tensors([f"{name}.gate_proj", f"{name}.up_proj"], place)
            else:
                gate, up = self.gate_up.data[place].split_with_sizes([self.local, self.local])
                yield TensorSpec(f"{name}.gate_proj.weight", (inner, self.hidden), gate, self.inner)
                yield TensorSpec(f"{name}.up_proj.weight", (inner, self.hidden), up, self.inner)
            if isinstance(self.down, Quantized):
                yield from self.down.tensors([f"{name}.down_proj"], place)
            else:
                yield TensorSpec(f"{name}.down_proj.weight", (self.hidden, inner), self.down.data[place], self.outer)


def experts_of(experts: int, rank: int, ranks: int) -> range:
    """Return the experts of a rank. Raises ConfigError if they do not divide over the ranks."""
    placed = unbalanced(experts, slots=experts, gpus=ranks)[0].reshape(ranks, -1)[rank]
    return range(int(placed[0]), int(placed[-1]) + 1)


def _mixed(down: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [tokens, hidden].

    Args:
        down: [tokens * per token, hidden], results of pairs sorted by expert; order: the pair of each of them.
        weights: [tokens, per token].
    """
    pairs = torch.empty_like(down)
    pairs[order] = down
    return (pairs.view(*weights.shape, pairs.shape[-1]) * weights[..., None].to(down.dtype)).sum(dim=1)


def _grouped(rows: Tensor, weights: Weight, ends: Tensor) -> Tensor:
    """Multiply each row with the matrix of its group."""
    return grouped_linear(rows, weights, ends) if isinstance(weights, Tensor) else weights.grouped(rows, ends)
