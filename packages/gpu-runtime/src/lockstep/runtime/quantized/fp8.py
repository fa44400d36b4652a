"""Weights in fp8, e4m3: a matrix [outputs, inputs] of bytes, and scales that they are multiplied with.

A scale is of a whole matrix, of an output, or of a block of 128 x 128. All three are kept as blocks, of a size that
fits into every border: those of the parts that lie side by side, and those of this rank's share, which need not be
borders of the checkpoint's blocks. A scale is then there more than once:

    checkpoint   | 0 . . . . . . 127 | 128 . . . . . . 255 |       two scales
    this rank            | 64 . . . . . . . . . 191 |              blocks of 64: [0, 1]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import gcd

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.host.quantization import WeightFormat
from lockstep.runtime.checkpoint import FP8_STD, RANDOM_STD, Wanted
from lockstep.runtime.quantized.matrices import Matrix, Quantized

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
STORED = ("F8_E4M3",)


class Fp8Matrices(Quantized):
    """Parameters: `weight` e4m3 [groups?, outputs, inputs], `scale` float32 [groups?, outputs / y, inputs / x]."""

    def __init__(
        self,
        parts: Sequence[Matrix],
        groups: int,
        rank: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: WeightFormat,
    ) -> None:
        super().__init__(parts, groups, rank, ranks, dtype, device)
        self.stored = stored
        # 0: one scale for all; every size divides it.
        self.each = stored.block or ((1, 0) if stored.by_output else (0, 0))
        down, across = self.each
        firsts = [part.first_output(rank, ranks) for part in parts] if down else []
        self.block = (
            gcd(down, *firsts, *self.firsts, *self.sizes),
            gcd(across, parts[0].first_input(rank, ranks) if across else 0, self.inputs),
        )
        self.weight = self.empty(self.outputs, self.inputs, dtype=FP8)
        self.scale = self.empty(self.outputs // self.block[0], self.inputs // self.block[1], dtype=torch.float32)

    def widened(self, dtype: torch.dtype, group: int = 0) -> Tensor:
        """q * scale, computed in float32."""
        weight, scale = self.of_group(self.weight, group), self.of_group(self.scale, group)
        blocks = weight.to(torch.float32).view(len(scale), self.block[0], scale.shape[1], self.block[1])
        return (blocks * scale[:, None, :, None]).view(self.outputs, self.inputs).to(dtype)

    def widened_fast(self, dtype: torch.dtype) -> Tensor:
        """The same bits without a copy in float32: e4m3 is exact in all dtypes of a model."""
        blocks = self.weight.to(dtype).view(len(self.scale), self.block[0], self.scale.shape[1], self.block[1])
        torch.mul(blocks, self.scale[:, None, :, None], out=blocks)
        return blocks.view(self.outputs, self.inputs)

    def kernel_fits(self, dtype: torch.dtype) -> bool:
        """The kernel's tiles lie within blocks of at least 16 inputs, or know one scale along all of them."""
        return self.scale.shape[-1] == 1 or self.block[1] % 16 == 0

    def kernel_linear(self, rows: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """See `kernels`."""
        from lockstep.runtime.quantized.kernels import fp8_linear

        return fp8_linear(rows, self.weight, self.scale, self.block, bias, ends)

    def part_tensors(self, prefix: str, number: int, group: int) -> Iterator[Wanted]:
        """The matrix, and its scales, which every rank reads whole and takes its own from."""
        part, first, size = self.parts[number], self.firsts[number], self.sizes[number]
        if part.rows.dim is not None and part.columns.dim is not None:
            raise ConfigError(f"`{prefix}` cannot be split along outputs and inputs at once")
        split = part.rows if part.rows.dim is not None else part.columns
        weight, scale = self.of_group(self.weight, group), self.of_group(self.scale, group)
        yield Wanted(
            f"{prefix}.weight", (part.outputs, part.inputs), weight[first : first + size], split, dtypes=STORED
        )
        down, across = self.each
        shape: tuple[int, ...] = (-(-part.outputs // down), -(-part.inputs // across) if across else 1) if down else ()
        yield Wanted(
            f"{prefix}.{self.stored.scale}",
            shape,
            scale[first // self.block[0] : (first + size) // self.block[0]],
            initial=RANDOM_STD / FP8_STD,
            also=() if down else (1,),
            convert=partial(self._spread, part=part, size=size),
        )

    def _spread(self, scale: Tensor, part: Matrix, size: int) -> Tensor:
        """Of a matrix's scales those of this rank's blocks."""
        scale = scale.to(torch.float32)
        if not bool((scale > 0).all()) or not bool(scale.isfinite().all()):
            raise ValueError("holds scales that are not above 0")
        steps = (self.each[0], part.first_output(self.rank, self.ranks), size, self.block[0])
        down = _blocks(*steps)
        across = _blocks(self.each[1], part.first_input(self.rank, self.ranks), self.inputs, self.block[1])
        return scale.reshape(-1, 1)[down] if scale.dim() < 2 else scale[down][:, across]


def _blocks(each: int, first: int, size: int, step: int) -> Tensor:
    """Which of a checkpoint's blocks of `each` those of `step` lie in, from `first` on. 0: there is one."""
    at = torch.arange(first, first + size, step)
    return torch.div(at, each, rounding_mode="floor") if each else torch.zeros_like(at)


def to_fp8(tensor: Tensor) -> Tensor:
    """Rounded to e4m3; what is larger than it has becomes the largest, not NaN."""
    return tensor.clamp(-FP8_MAX, FP8_MAX).to(FP8)
