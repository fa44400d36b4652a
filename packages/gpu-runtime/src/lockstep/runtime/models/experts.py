"""A mixture of experts: each token is seen by a few of many MLPs.

Pairs of (token, expert) are sorted by expert, so that every expert's tokens lie end to end, and one grouped product
does all experts:

    tokens     0 1 2 3          pairs by expert      0:[1 3] 1:[] 2:[0 1 2] 3:[0 2 3]
    experts    2 0 2 0          ends                    2      2       5         8
               3 2 3 3

The ends stay on the device. Ranks share the columns inside every expert, so that each has all experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.runtime.checkpoint import Split, Wanted
from lockstep.runtime.lora.slots import AdapterBatch
from lockstep.runtime.models.elementwise import silu_and_mul
from lockstep.runtime.models.grouped import grouped_linear
from lockstep.runtime.models.layers import Maker
from lockstep.runtime.models.settings import ExpertSettings


class Experts(nn.Module):
    """Softmax over all experts, the best few of each token, their MLPs, and the weighted sum."""

    def __init__(self, make: Maker, hidden: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings, self.hidden, self.parallel = settings, hidden, make.parallel
        self.router = make.empty(settings.experts, hidden)
        self.inner = Split(0, settings.intermediate)
        self.local = self.inner.local(settings.intermediate, make.parallel.ranks, "moe_intermediate_size")
        self.gate_up = make.empty(settings.experts, 2 * self.local, hidden)
        self.down = make.empty(settings.experts, hidden, self.local)

    def forward(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """[tokens, hidden] to the same shape. Adapters change nothing here: folders that would are refused."""
        tokens, each = len(hidden), self.settings.per_token
        weights, experts = self.route(hidden)
        # A stable sort keeps tokens in order within an expert: the sums below do not depend on how a sort breaks ties.
        sorted_experts, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_experts, self._numbers(experts), right=True).to(torch.int32)
        inner = silu_and_mul(grouped_linear(hidden[order // each], self.gate_up, ends))
        down = grouped_linear(inner, self.down, ends)
        pairs = torch.empty_like(down)
        pairs[order] = down
        mixed = (pairs.view(tokens, each, -1) * weights[..., None].to(down.dtype)).sum(dim=1)
        return self.parallel.all_reduce(mixed)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and numbers of each token's experts, [tokens, per_token] each."""
        chances = F.linear(hidden, self.router).float().softmax(dim=-1)
        weights, experts = chances.topk(self.settings.per_token, dim=-1)
        if self.settings.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def _numbers(self, like: Tensor) -> Tensor:
        return torch.arange(self.settings.experts, device=like.device, dtype=like.dtype)

    def tensors(self, prefix: str) -> Iterator[Wanted]:
        """What fills it: one tensor for each matrix of each expert."""
        inner = self.settings.intermediate
        yield Wanted(f"{prefix}.gate.weight", tuple(self.router.shape), self.router.data)
        for expert in range(self.settings.experts):
            gate, up = self.gate_up.data[expert].split_with_sizes([self.local, self.local])
            name = f"{prefix}.experts.{expert}"
            yield Wanted(f"{name}.gate_proj.weight", (inner, self.hidden), gate, self.inner)
            yield Wanted(f"{name}.up_proj.weight", (inner, self.hidden), up, self.inner)
            yield Wanted(f"{name}.down_proj.weight", (self.hidden, inner), self.down.data[expert], Split(1, inner))
