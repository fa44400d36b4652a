"""The grouped product of `grouped.py` in Triton: tiles of rows that lie within one group.

Groups have any length, so each program finds the group of its tile on the device, by counting the tiles of all groups:

    ends          3 3 5 9        BLOCK_M = 2
    tiles         2 0 1 2
    tiles so far  2 2 3 5        tile 2 is the first with 2 <= tile < 3: group c, its tile 0

The CPU launches the largest possible number of tiles: one for every BLOCK_M rows, and one more for each group that may
have rows. A program beyond the last tile finds no group and returns.

Reference: `grouped.grouped_linear_reference`.
"""

# Triton reads the source of this function: constants are upper case, as in its own kernels.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N, BLOCK_K = 64, 64
FEW_ROWS = 32  # average rows per group up to which tiles are low: a decode has a row or two per expert


@triton.jit
def grouped_linear_kernel(
    rows,  # [rows, K], contiguous
    weights,  # [GROUPS, N, K], contiguous
    ends,  # int32 [GROUPS]
    out,  # [rows, N], contiguous
    N,
    K,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply BLOCK_M rows of one group with BLOCK_N rows of its matrix, summed in float32. Program (tile, n)."""
    tile = tl.program_id(0)
    numbers = tl.arange(0, GROUPS_PADDED)
    real = numbers < GROUPS
    stops = tl.load(ends + numbers, mask=real, other=0)
    starts = tl.load(ends + numbers - 1, mask=real & (numbers > 0), other=0)
    tiles = tl.where(real, (stops - starts + BLOCK_M - 1) // BLOCK_M, 0)
    so_far = tl.cumsum(tiles, 0)
    group = tl.sum(tl.where(real & (so_far <= tile), 1, 0), 0)
    if group < GROUPS:
        before = tl.sum(tl.where(numbers < group, tiles, 0), 0)
        start = tl.sum(tl.where(numbers == group, starts, 0), 0)
        stop = tl.sum(tl.where(numbers == group, stops, 0), 0)
        row = start + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        row_at = rows + row.to(tl.int64)[:, None] * K
        weight_at = weights + group.to(tl.int64) * N * K + column.to(tl.int64)[None, :] * K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + inner
            left = tl.load(row_at + k[None, :], mask=(row < stop)[:, None] & (k < K)[None, :], other=0.0)
            right = tl.load(weight_at + k[:, None], mask=(column < N)[None, :] & (k < K)[:, None], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        out_at = out + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=(row < stop)[:, None] & (column < N)[None, :])


def grouped_linear_triton(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped.grouped_linear` in Triton. All tensors are contiguous, of one dtype, on one device."""
    (count, inputs), (groups, outputs, _) = rows.shape, weights.shape
    assert weights.shape[2] == inputs, f"rows have {inputs} inputs, weights {weights.shape[2]}"
    assert ends.shape == (groups,), f"{groups} groups, {tuple(ends.shape)} ends"
    assert ends.dtype == torch.int32
    assert rows.dtype == weights.dtype, f"{rows.dtype} rows, {weights.dtype} weights"
    assert rows.is_contiguous()
    assert weights.is_contiguous()
    assert rows.device == weights.device == ends.device
    out = torch.empty((count, outputs), dtype=rows.dtype, device=rows.device)
    if count:
        block_m = 16 if count <= FEW_ROWS * groups else 64
        grid = (count // block_m + min(count, groups), triton.cdiv(outputs, BLOCK_N))
        grouped_linear_kernel[grid](
            rows,
            weights,
            ends,
            out,
            outputs,
            inputs,
            GROUPS=groups,
            GROUPS_PADDED=triton.next_power_of_2(groups),
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
        )
    return out
