"""Adapter slots on the device, and the product of their matrices: the reference in torch.

Slots have one size: each has room for every matrix that an adapter may change, at the largest rank. Matrices that an
adapter lacks, and unused rank, are zero, so nothing of the slot's previous adapter remains. The scaling is part of
`up`.

    down   [slots, parts * rank, inputs]     q, k and v read the same input: 3 parts, one product for all three
    up     [slots, outputs of the parts end to end, rank]

Tokens are laid out by slot, so that the tokens of one adapter are one product, wherever they are in the batch. Tokens
of the model alone are in no group and cost nothing:

    rows         a a b - c b          slots 0 0 1 -1 2 1
    tokens       by slot: [those of a, a | of b, b | of c]
    tiles        first, stop and slot of runs of tokens, for the kernels; made on the CPU
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.runtime import triton_trial
from lockstep.runtime.checkpoint import WHOLE, TensorSplit
from lockstep.runtime.lora.batch import FEW_TOKENS, AdapterBatch, Int32s, lay_out


# mechanism: adapters (executed)
class LoraSlots(nn.Module):
    """The adapters' part of one product of the model, which may consist of several matrices that read the same input.

    Args:
        inputs: inputs of this rank. sizes: outputs of each part, of this rank.
    """

    def __init__(
        self, inputs: int, sizes: Sequence[int], slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.rank, self.inputs, self.sizes = rank, inputs, tuple(sizes)
        # Parameters, although they are not trained: so they are counted, released and allocated again with the weights.
        self.down = nn.Parameter(
            torch.zeros(slots, len(sizes) * rank, inputs, dtype=dtype, device=device), requires_grad=False
        )
        self.up = nn.Parameter(torch.zeros(slots, sum(sizes), rank, dtype=dtype, device=device), requires_grad=False)

    def add_to(self, out: Tensor, hidden: Tensor, batch: AdapterBatch) -> Tensor:
        """Add the product of the adapters to `out`, in place.

        Args:
            out: [tokens, outputs], the model's product, contiguous; hidden: [tokens, inputs], its input.
        """
        device = out.device
        if device.type == "cuda" and triton_trial.unavailable_because(device) is None:
            from lockstep.runtime.lora.kernels import add_lora_triton

            return add_lora_triton(out, hidden, self.down, self.up, self.sizes, batch)
        return add_lora_reference(out, hidden, self.down, self.up, self.sizes, batch)


def add_lora_reference(
    out: Tensor, hidden: Tensor, down: Tensor, up: Tensor, sizes: Sequence[int], batch: AdapterBatch
) -> Tensor:
    """Add the product adapter by adapter, in place.

    Args:
        down: [slots, parts * rank, inputs]; up: [slots, outputs, rank].
    """
    for slot, first, stop in batch.groups:
        at = batch.tokens[first:stop]
        inner = F.linear(hidden.index_select(0, at), down[slot]).chunk(len(sizes), dim=1)
        parts = up[slot].split_with_sizes(list(sizes))
        out.index_add_(0, at, torch.cat([F.linear(*pair) for pair in zip(inner, parts, strict=True)], dim=1))
    return out


def run_once(targets: Sequence[LoraTarget], upload: Callable[[Int32s], Tensor]) -> int:
    """Run each kind of product for few tokens and for many, so that no request waits for a kernel's compilation.

    Returns: the number of products.
    """
    kinds = {(one.into.sizes, one.into.down.shape): one.into for one in targets}
    for into in kinds.values():
        for tokens in (1, FEW_TOKENS + 1):  # low tiles, high tiles
            batch = lay_out(np.zeros(1, np.int32), np.array([tokens], np.int32), upload)
            into.add_to(into.up.new_zeros(tokens, sum(into.sizes)), into.down.new_zeros(tokens, into.inputs), batch)
    return 2 * len(kinds)


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """One matrix of a checkpoint that adapters may change, and the place of its LoRA product on this rank.

    If the ranks split the matrix by rows, they split `up`; if they split it by columns, they split `down`, and partial
    results are summed together with the model's own.
    """

    name: str  # model.layers.0.self_attn.q_proj
    inputs: int  # of all ranks together
    outputs: int
    into: LoraSlots
    part: int  # index of the part in its product
    rows: TensorSplit = WHOLE  # split of `up`
    columns: TensorSplit = WHOLE  # split of `down`
