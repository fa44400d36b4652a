"""Matrices of a product in fewer bits: several of a checkpoint side by side, or one for each expert.

    checkpoint      q_proj [heads * d, hidden]    k_proj [...]    v_proj [...]        each with its own scales
    product         [ q outputs | k outputs | v outputs ]                             of this rank

On the CPU, and if Triton cannot run, weights are widened to the dtype of the rows and multiplied by torch: the result
has the same bits as that of a checkpoint widened before. On a GPU a kernel that widens tiles as it reads them
multiplies few rows, so that no more bytes are read than are stored. Many rows use torch, after a widened copy of the
one matrix, the cost of which is small beside the product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.runtime import triton_trial
from lockstep.runtime.checkpoint import WHOLE, TensorSpec, TensorSplit

FUSED_ROWS_MAX = 256
"""Rows up to which a kernel widens weights as it reads them. An estimate: larger products are bound by arithmetic."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One matrix of a checkpoint, of all ranks together, and the part of it on each rank."""

    name: str  # behind the product's prefix, without `.weight`
    outputs: int
    inputs: int
    rows: TensorSplit = WHOLE  # split of its outputs
    columns: TensorSplit = WHOLE  # split of its inputs

    def local_outputs(self, ranks: int) -> int:
        """Return the number of outputs on a rank."""
        return self.rows.local(self.outputs, ranks, self.name)

    def local_inputs(self, ranks: int) -> int:
        """Return the number of inputs on a rank."""
        return self.columns.local(self.inputs, ranks, self.name)

    def first_output(self, rank: int, ranks: int) -> int:
        """Return the index in the matrix of this rank's first output."""
        return self.rows.shard(self.outputs, rank, ranks).start

    def first_input(self, rank: int, ranks: int) -> int:
        """Return the index in the matrix of this rank's first input."""
        return self.columns.shard(self.inputs, rank, ranks).start


class Quantized(nn.Module, ABC):
    """Matrices of one product, or of one product per group of rows.

    Args:
        parts: matrices side by side in the product; the same for every group.
        groups: experts; 0: one product.
        dtype: dtype of the rows.
    """

    def __init__(
        self,
        parts: Sequence[StoredMatrix],
        groups: int,
        rank: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts, self.groups, self.rank, self.ranks = tuple(parts), groups, rank, ranks
        self.dtype, self.device = dtype, device
        self.sizes = [part.local_outputs(ranks) for part in parts]
        self.firsts = [sum(self.sizes[:number]) for number in range(len(parts))]
        self.outputs, self.inputs = sum(self.sizes), parts[0].local_inputs(ranks)

    def empty(self, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        """Make a parameter for every group, without values."""
        around = (self.groups,) if self.groups else ()
        return nn.Parameter(torch.empty((*around, *shape), dtype=dtype, device=self.device), requires_grad=False)

    def of_group(self, parameter: Tensor, group: int) -> Tensor:
        """Return one group's part of a parameter."""
        return parameter.data[group] if self.groups else parameter.data

    # ---------------------------------------------------------------------------------------------------------- formats

    @abstractmethod
    def widened(self, dtype: torch.dtype, group: int = 0) -> Tensor:
        """Return a group's matrices as [outputs, inputs]: the reference."""

    def widened_fast(self, dtype: torch.dtype) -> Tensor:
        """Return the only group's matrices on a GPU, as `widened` does, with little additional memory."""
        return self.widened(dtype)

    @abstractmethod
    def kernel_fits(self, dtype: torch.dtype) -> bool:
        """Return whether `kernel_linear` supports these sizes."""

    @abstractmethod
    def kernel_linear(self, rows: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """Compute the product in Triton."""

    @abstractmethod
    def part_tensors(self, prefix: str, number: int, group: int) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill one part."""

    # -------------------------------------------------------------------------------------------------------- products

    def linear(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply, [rows, inputs] to [rows, outputs]."""
        if self._in_triton(rows):
            if len(rows) <= FUSED_ROWS_MAX:
                return self.kernel_linear(rows, bias, None)
            return F.linear(rows, self.widened_fast(rows.dtype), bias)
        return F.linear(rows, self.widened(rows.dtype), bias)

    def grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply grouped rows; see `models.grouped.grouped_linear`."""
        if self._in_triton(rows):
            return self.kernel_linear(rows, None, ends)
        # Only groups with rows are widened: all experts at once might not fit.
        starts = [0, *ends.tolist()]
        out = rows.new_empty(len(rows), self.outputs)
        for group, (start, stop) in enumerate(pairwise(starts)):
            if start != stop:
                out[start:stop] = F.linear(rows[start:stop], self.widened(rows.dtype, group))
        return out

    def _in_triton(self, rows: Tensor) -> bool:
        on_gpu = rows.device.type == "cuda" and triton_trial.unavailable_because(rows.device) is None
        return on_gpu and self.kernel_fits(rows.dtype)

    def tensors(self, prefixes: Sequence[str], group: int = 0) -> Iterator[TensorSpec]:
        """Yield the tensors of a checkpoint that fill a group's parts.

        Args:
            prefixes: names of its matrices in a checkpoint, without `.weight`.
        """
        for number, prefix in enumerate(prefixes):
            yield from self.part_tensors(prefix, number, group)
