"""Weights in fp8, e4m3: a matrix [outputs, inputs] of bytes, and scales that multiply it.

A scale belongs to a whole matrix, an output, or a block of 128 x 128. All three are stored as blocks. Their size
divides every border: borders between the parts of a product, and borders of this rank's share, which need not be
borders of the checkpoint's blocks. A scale is then stored more than once:

    checkpoint           | 0 . . . . . . 127 | 128 . . . . . . 255 |       two scales
    this rank                    | 64 . . . . . . . . . 191 |              blocks of 64: [0, 1]

Rows keep the dtype of the model. They are rounded to fp8 as well if the checkpoint was made for that and the GPU
multiplies fp8 by fp8 (`activations.py`, `fp8_kernels.py`). Each run of a row that is multiplied with one column of
scales then has its own scale, which makes its largest number 448, or all have the checkpoint's `input_scale`.

    rows [M, K]          | 0 ... 127 | 128 ... 255 |       codes e4m3, one scale per run of 128 if weights have
                                                           blocks of 128 inputs; otherwise one per row
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.core.contract.errors import ConfigError
from lockstep.host.quantization import Activations, WeightFormat
from lockstep.runtime.checkpoint import FP8_STD, RANDOM_STD, TensorSpec
from lockstep.runtime.quantized.fp8_format import FP8, FP8_MAX, STEP_LEAST
from lockstep.runtime.quantized.matrices import Quantized, StoredMatrix

log = logging.getLogger("lockstep.runtime")

LEAST = 1e-10  # smallest largest number of a run; rows of smaller numbers, such as zeros, are scaled by it
STORED = ("F8_E4M3",)
RANDOM_INPUT_SCALE = 8 / FP8_MAX  # with random weights: numbers behind a norm are rarely above 8


@dataclass(frozen=True, slots=True)
class RowRounding:
    """How rows that meet fp8 weights are rounded to fp8.

    Args:
        activations: dynamic, static, or "" for not at all.
        required: raise an error if a GPU cannot round them; otherwise they are then not rounded.
    """

    activations: Activations = ""
    required: bool = False


NOT_ROUNDED = RowRounding()


class Fp8Matrices(Quantized):
    """Parameters: `weight` e4m3 [groups?, outputs, inputs], `scale` float32 [groups?, outputs / y, inputs / x].

    Args:
        rounding: of rows; static adds a parameter, `input_scale` float32 [groups?, parts]. Its largest value is the
            scale of every row, because parts and groups share their rows.
    Raises: ConfigError where rounding is required, and a GPU cannot round.
    """

    def __init__(
        self,
        parts: Sequence[StoredMatrix],
        groups: int,
        rank: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: WeightFormat,
        rounding: RowRounding = NOT_ROUNDED,
    ) -> None:
        super().__init__(parts, groups, rank, ranks, dtype, device)
        self.stored, self.activations = stored, rounding.activations
        # (outputs, inputs) per scale of the checkpoint. 0: one scale for all; every size divides it.
        self.each = stored.block or ((1, 0) if stored.by_output else (0, 0))
        down, across = self.each
        firsts = [part.first_output(rank, ranks) for part in parts] if down else []
        self.block = (
            gcd(down, *firsts, *self.firsts, *self.sizes),
            gcd(across, parts[0].first_input(rank, ranks) if across else 0, self.inputs),
        )
        self.weight = self.empty(self.outputs, self.inputs, dtype=FP8)
        self.scale = self.empty(self.outputs // self.block[0], self.inputs // self.block[1], dtype=torch.float32)
        self.activations = activations = self._gpu_rounds(rounding.required)
        self.run = self.block[1] if activations == "dynamic" else self.inputs  # numbers of a row that share a scale
        self.input_scale = self.empty(len(parts), dtype=torch.float32) if activations == "static" else None

    def _gpu_rounds(self, required: bool) -> Activations:
        """Return the requested rounding, or none if a step of the product would cross a border between scales."""
        if not self.activations or self.device.type != "cuda":
            return self.activations
        if self.block[1] == self.inputs or self.block[1] % STEP_LEAST == 0:
            return self.activations
        why = (
            f"on this rank {self.block[1]} inputs of `{self.parts[0].name}` share a scale, and a GPU multiplies fp8 by "
            f"multiples of {STEP_LEAST}"
        )
        if required:
            raise ConfigError(f"`fp8_activations` is on, but {why}\nhint: fewer ranks, or leave it out")
        log.info("rows that meet `%s` are not rounded to fp8: %s", self.parts[0].name, why)
        return ""

    def widened(self, dtype: torch.dtype, group: int = 0) -> Tensor:
        """Return q * scale, computed in float32."""
        weight, scale = self.of_group(self.weight, group), self.of_group(self.scale, group)
        blocks = weight.to(torch.float32).view(len(scale), self.block[0], scale.shape[1], self.block[1])
        return (blocks * scale[:, None, :, None]).view(self.outputs, self.inputs).to(dtype)

    def widened_fast(self, dtype: torch.dtype) -> Tensor:
        """Return the same bits without a copy in float32: e4m3 is exact in all dtypes of a model."""
        blocks = self.weight.to(dtype).view(len(self.scale), self.block[0], self.scale.shape[1], self.block[1])
        torch.mul(blocks, self.scale[:, None, :, None], out=blocks)
        return blocks.view(self.outputs, self.inputs)

    def kernel_fits(self, dtype: torch.dtype) -> bool:
        """Return whether tiles lie within blocks of at least 16 inputs, or have one scale along all inputs."""
        return self.scale.shape[-1] == 1 or self.block[1] % 16 == 0

    def kernel_linear(self, rows: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """Multiply in Triton; see `kernels`."""
        from lockstep.runtime.quantized.kernels import fp8_linear

        return fp8_linear(rows, self.weight, self.scale, self.block, bias, ends)

    # ------------------------------------------------------------------------------------------- rows in fp8 as well

    def linear(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply, [rows, inputs] to [rows, outputs]."""
        if not self.activations:
            return super().linear(rows, bias)
        return self.scaled(rows, bias, None) if self._in_triton(rows) else self.rounded_linear(rows, bias)

    def grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply grouped rows; see `models.grouped.grouped_linear`."""
        if not self.activations:
            return super().grouped(rows, ends)
        if self._in_triton(rows):
            return self.scaled(rows, None, ends)
        starts = [0, *ends.tolist()]
        out = rows.new_empty(len(rows), self.outputs)
        for group, (start, stop) in enumerate(pairwise(starts)):
            if start != stop:
                out[start:stop] = self.rounded_linear(rows[start:stop], None, group)
        return out

    def scaled(self, rows: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """Multiply fp8 by fp8 in Triton."""
        from lockstep.runtime.quantized.fp8_kernels import rounded_rows, scaled_linear

        codes, scale = rounded_rows(rows, self.run, self.input_scale)
        return scaled_linear(codes, scale, self.weight, self.scale, self.block, bias, ends, rows.dtype)

    def rounded_linear(self, rows: Tensor, bias: Tensor | None, group: int = 0) -> Tensor:
        """Compute the reference: rows rounded in the same way, and multiplied in float32."""
        codes, scale = to_codes(rows, self.run, self.input_scale)
        wide = codes.to(torch.float32).view(*scale.shape, self.run) * scale[..., None]
        weight = self.widened(torch.float32, group)
        return F.linear(wide.view(rows.shape), weight, None if bias is None else bias.float()).to(rows.dtype)

    def part_tensors(self, prefix: str, number: int, group: int) -> Iterator[TensorSpec]:
        """Yield the matrix, and its scales, which every rank reads whole before it selects its own."""
        part, first, size = self.parts[number], self.firsts[number], self.sizes[number]
        if part.rows.dim is not None and part.columns.dim is not None:
            raise ConfigError(f"`{prefix}` cannot be split along outputs and inputs at once")
        split = part.rows if part.rows.dim is not None else part.columns
        weight, scale = self.of_group(self.weight, group), self.of_group(self.scale, group)
        yield TensorSpec(
            f"{prefix}.weight", (part.outputs, part.inputs), weight[first : first + size], split, dtypes=STORED
        )
        down, across = self.each
        shape: tuple[int, ...] = (-(-part.outputs // down), -(-part.inputs // across) if across else 1) if down else ()
        yield TensorSpec(
            f"{prefix}.{self.stored.scale}",
            shape,
            scale[first // self.block[0] : (first + size) // self.block[0]],
            initial=RANDOM_STD / FP8_STD,
            also=() if down else (1,),
            convert=partial(self._spread, part=part, size=size),
        )
        if self.input_scale is not None:
            yield TensorSpec(
                f"{prefix}.input_scale",
                (),
                self.of_group(self.input_scale, group)[number],
                initial=RANDOM_INPUT_SCALE,
                also=(1,),
                convert=_of_rows,
            )

    def _spread(self, scale: Tensor, part: StoredMatrix, size: int) -> Tensor:
        """Return the scales of this rank's blocks."""
        scale = _checked(scale)
        steps = (self.each[0], part.first_output(self.rank, self.ranks), size, self.block[0])
        down = _blocks(*steps)
        across = _blocks(self.each[1], part.first_input(self.rank, self.ranks), self.inputs, self.block[1])
        return scale.reshape(-1, 1)[down] if scale.dim() < 2 else scale[down][:, across]


def _checked(scale: Tensor) -> Tensor:
    """Return scales in float32. Raises ValueError for invalid scales."""
    scale = scale.to(torch.float32)
    if not bool((scale > 0).all()) or not bool(scale.isfinite().all()):
        raise ValueError("holds scales that are not above 0")
    return scale


def _of_rows(scale: Tensor) -> Tensor:
    return _checked(scale).reshape(())


def _blocks(each: int, first: int, size: int, step: int) -> Tensor:
    """Return the checkpoint's block of `each` for every block of `step`, from `first` on. each = 0: only one block."""
    at = torch.arange(first, first + size, step)
    return torch.div(at, each, rounding_mode="floor") if each else torch.zeros_like(at)


def to_fp8(tensor: Tensor) -> Tensor:
    """Round to e4m3; numbers above its range become the largest, not NaN."""
    return tensor.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def to_codes(rows: Tensor, run: int, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round rows to fp8: the reference of `fp8_kernels.rounded_rows`.

    Args:
        rows: [M, K]. run: numbers that share a scale, a divisor of K.
        static: scales of which the largest is used for all; None: each run has a scale that makes its largest number
            448.
    Returns: e4m3 [M, K], float32 [M, K / run]: a number is code times scale.
    """
    runs = rows.to(torch.float32).view(len(rows), rows.shape[1] // run, run)
    if static is None:
        scale = runs.abs().amax(-1).clamp(min=LEAST) / FP8_MAX
    else:
        scale = static.max().expand(runs.shape[:2])
    return to_fp8(runs / scale[..., None]).view(rows.shape), scale
