"""A mixture of experts: each token passes through a few of many MLPs.

Pairs of (token, expert) are sorted by expert, so that the tokens of each expert are contiguous, and one grouped product
computes all experts:

    tokens     0 1 2 3          pairs by expert      0:[1 3] 1:[] 2:[0 1 2] 3:[0 2 3]
    experts    2 0 2 0          ends                    2      2       5         8
               3 2 3 3

The ends stay on the device. Ranks split the columns inside every expert, so that each rank has all experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.runtime.checkpoint import TensorSpec, TensorSplit
from lockstep.runtime.lora.batch import AdapterBatch
from lockstep.runtime.models.elementwise import silu_and_mul
from lockstep.runtime.models.grouped import grouped_linear
from lockstep.runtime.models.layers import Maker, Weight
from lockstep.runtime.models.settings import ExpertSettings
from lockstep.runtime.quantized.matrices import Quantized, StoredMatrix


class Experts(nn.Module):
    """Softmax over all experts, the most probable few per token, their MLPs, and the weighted sum."""

    def __init__(self, make: Maker, hidden: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings, self.hidden, self.parallel = settings, hidden, make.parallel
        self.router = make.empty(settings.experts, hidden)
        self.inner = TensorSplit(0, settings.intermediate)
        self.local = self.inner.local(settings.intermediate, make.parallel.ranks, "moe_intermediate_size")
        inner, count = settings.intermediate, settings.experts
        columns = [StoredMatrix(name, inner, hidden, self.inner) for name in ("gate_proj", "up_proj")]
        names = [f"experts.{expert}.{part.name}" for expert in range(count) for part in columns]
        self.gate_up = make.matrices(columns, names, count)
        rows = StoredMatrix("down_proj", hidden, inner, columns=TensorSplit(1, inner))
        self.down = make.matrices([rows], [f"experts.{expert}.down_proj" for expert in range(count)], count)

    def forward(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """Apply the experts, [tokens, hidden] to the same shape.

        Adapters have no effect: folders with experts are refused.
        """
        tokens, each = len(hidden), self.settings.per_token
        weights, experts = self.route(hidden)
        # A stable sort keeps tokens in order within an expert, so that the order of the sums below is fixed.
        sorted_experts, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_experts, self._numbers(experts), right=True).to(torch.int32)
        inner = silu_and_mul(_grouped(hidden[order // each], self.gate_up, ends))
        down = _grouped(inner, self.down, ends)
        pairs = torch.empty_like(down)
        pairs[order] = down
        mixed = (pairs.view(tokens, each, -1) * weights[..., None].to(down.dtype)).sum(dim=1)
        return self.parallel.all_reduce(mixed)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, float32, and indices of each token's experts, [tokens, per_token] each."""
        chances = F.linear(hidden, self.router).float().softmax(dim=-1)
        weights, experts = chances.topk(self.settings.per_token, dim=-1)
        if self.settings.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def _numbers(self, like: Tensor) -> Tensor:
        return torch.arange(self.settings.experts, device=like.device, dtype=like.dtype)

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill the experts: one for each matrix of each expert."""
        inner = self.settings.intermediate
        yield TensorSpec(f"{prefix}.gate.weight", tuple(self.router.shape), self.router.data)
        for expert in range(self.settings.experts):
            name = f"{prefix}.experts.{expert}"
            if isinstance(self.gate_up, Quantized):
                yield from self.gate_up.tensors([f"{name}.gate_proj", f"{name}.up_proj"], expert)
            else:
                gate, up = self.gate_up.data[expert].split_with_sizes([self.local, self.local])
                yield TensorSpec(f"{name}.gate_proj.weight", (inner, self.hidden), gate, self.inner)
                yield TensorSpec(f"{name}.up_proj.weight", (inner, self.hidden), up, self.inner)
            if isinstance(self.down, Quantized):
                yield from self.down.tensors([f"{name}.down_proj"], expert)
            else:
                yield TensorSpec(
                    f"{name}.down_proj.weight", (self.hidden, inner), self.down.data[expert], TensorSplit(1, inner)
                )


def _grouped(rows: Tensor, weights: Weight, ends: Tensor) -> Tensor:
    """Multiply each row with the matrix of its group."""
    return grouped_linear(rows, weights, ends) if isinstance(weights, Tensor) else weights.grouped(rows, ends)
