"""Products with weights in fewer bits, in Triton: a tile of weights is widened after its load, in registers.

    out [rows, N] = rows [rows, K] x weights, for all rows, or for each group of rows its own weights

A tile of products is BLOCK_M rows times BLOCK_N outputs. K is processed in steps of BLOCK_K, none of which crosses the
border of a block or group with one scale. The multiplied numbers are exact in the dtype of the rows: e4m3 values, and
codes minus their zero as whole numbers. Scales are applied to the sum of a step, in float32:

    total += (rows[:, k : k + BLOCK_K] x codes) * scale

e4m3 is widened by its bits, so that GPUs without fp8 read it too: shifted into a float16 it is 2 ** -8 of its value,
for subnormal numbers too. The 2 ** 8 is part of the scale.

    e4m3       s eeee mmm
    float16    s 0eeee mmm0000000

Groups are those of `models.grouped_kernel`: each program finds the group of its tile on the device.

Reference: `Quantized.widened` and torch's product.
"""

# Triton reads the source of these functions: constants are upper case, as in its own kernels.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 32  # average rows per group up to which tiles are low
STEP_MAX = 128  # BLOCK_K of low tiles; high ones have half
E4M3_SHIFT = 256.0
PER_WORD = 8


@triton.jit
def _tile(ends, M, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the group of this program's tile, and its rows [first:stop); empty beyond the last tile."""
    tile = tl.program_id(0)
    if GROUPS == 0:
        group = tile * 0
        first = tile * BLOCK_M
        stop = M
    else:
        numbers = tl.arange(0, GROUPS_PADDED)
        real = numbers < GROUPS
        stops = tl.load(ends + numbers, mask=real, other=0)
        starts = tl.load(ends + numbers - 1, mask=real & (numbers > 0), other=0)
        tiles = tl.where(real, (stops - starts + BLOCK_M - 1) // BLOCK_M, 0)
        so_far = tl.cumsum(tiles, 0)
        group = tl.sum(tl.where(real & (so_far <= tile), 1, 0), 0)
        before = tl.sum(tl.where(numbers < group, tiles, 0), 0)
        first = tl.sum(tl.where(numbers == group, starts, 0), 0) + (tile - before) * BLOCK_M
        stop = tl.sum(tl.where(numbers == group, stops, 0), 0)
    return group, first, stop


@triton.jit
def _stored(out, total, bias, row, stop, column, N, BIAS: tl.constexpr):
    """Add the bias and write a tile."""
    if BIAS:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    where = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(row < stop)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def fp8_linear_kernel(
    rows,  # [M, K], rows `row_stride` apart
    weight,  # uint8 [groups, N, K], bits of e4m3
    scale,  # float32 [groups, N / DOWN, K / ACROSS]
    bias,  # [N]
    ends,  # int32 [GROUPS]
    out,  # [M, N]
    M,
    N,
    K,
    row_stride,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile. Program (tile of rows, tile of outputs)."""
    group, first, stop = _tile(ends, M, GROUPS, GROUPS_PADDED, BLOCK_M)
    if first < stop:
        row = first + tl.arange(0, BLOCK_M)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        columns_of_scale = tl.cdiv(K, ACROSS)
        row_at = rows + row.to(tl.int64)[:, None] * row_stride
        weight_at = weight + group.to(tl.int64) * N * K + column.to(tl.int64)[None, :] * K
        scale_at = scale + (group.to(tl.int64) * (N // DOWN) + column // DOWN) * columns_of_scale
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            at = k + inner
            left = tl.load(row_at + at[None, :], mask=(row < stop)[:, None] & (at < K)[None, :], other=0.0)
            bits = tl.load(weight_at + at[:, None], mask=(column < N)[None, :] & (at < K)[:, None], other=0)
            wide = bits.to(tl.int16)
            half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
            step = tl.dot(left, half.to(left.dtype), input_precision="ieee")
            by = tl.load(scale_at + k // ACROSS, mask=column < N, other=0.0)
            total += step * (by * 256.0)[None, :]
        _stored(out, total, bias, row, stop, column, N, BIAS)


@triton.jit(do_not_specialize=["M"])
def int4_linear_kernel(
    rows,  # [M, K], rows `row_stride` apart
    qweight,  # int32 [groups, K / 8, N]
    zeros,  # int32 [groups, K / GROUP, N / 8]
    scales,  # [groups, K / GROUP, N]
    bias,  # [N]
    ends,  # int32 [GROUPS]
    out,  # [M, N]
    M,
    N,
    K,
    row_stride,
    GROUP: tl.constexpr,
    ZERO_ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile. Program (tile of rows, tile of outputs). BLOCK_K divides GROUP."""
    group, first, stop = _tile(ends, M, GROUPS, GROUPS_PADDED, BLOCK_M)
    if first < stop:
        row = first + tl.arange(0, BLOCK_M)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        word = tl.arange(0, BLOCK_K // 8)
        row_at = rows + row.to(tl.int64)[:, None] * row_stride
        word_at = qweight + group.to(tl.int64) * (K // 8) * N + column[None, :]
        of_group = group.to(tl.int64) * (K // GROUP)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            left = tl.load(row_at + (k + inner)[None, :], mask=(row < stop)[:, None], other=0.0)
            words = tl.load(word_at + (k // 8 + word).to(tl.int64)[:, None] * N, mask=(column < N)[None, :], other=0)
            codes = _unpacked(words, BLOCK_K, BLOCK_N)
            which = of_group + k // GROUP
            zero = tl.load(zeros + which * (N // 8) + column // 8, mask=column < N, other=0)
            zero = ((zero >> (column % 8) * 4) + ZERO_ADD) & 15
            step = tl.dot(left, (codes - zero[None, :]).to(left.dtype), input_precision="ieee")
            by = tl.load(scales + which * N + column, mask=column < N, other=0.0).to(tl.float32)
            total += step * by[None, :]
        _stored(out, total, bias, row, stop, column, N, BIAS)


@triton.jit
def _unpacked(words, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the codes, int32 [BLOCK_K, BLOCK_N], of words [BLOCK_K / 8, BLOCK_N] along the first dimension."""
    shift = tl.arange(0, 8) * 4
    codes = (words[:, None, :] >> shift[None, :, None]) & 15
    return tl.reshape(codes, (BLOCK_K, BLOCK_N))


@triton.jit
def int4_widen_kernel(
    qweight,  # int32 [K / 8, N]
    zeros,  # int32 [K / GROUP, N / 8]
    scales,  # [K / GROUP, N]
    out,  # [N, K]
    N,
    K,
    GROUP: tl.constexpr,
    ZERO_ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Widen a tile. Program (tile of outputs, tile of inputs)."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K
    word = k // 8 + tl.arange(0, BLOCK_K // 8)
    words = tl.load(qweight + word.to(tl.int64)[:, None] * N + column[None, :], mask=(column < N)[None, :], other=0)
    codes = _unpacked(words, BLOCK_K, BLOCK_N)
    which = (k // GROUP).to(tl.int64)
    zero = tl.load(zeros + which * (N // 8) + column // 8, mask=column < N, other=0)
    zero = ((zero >> (column % 8) * 4) + ZERO_ADD) & 15
    by = tl.load(scales + which * N + column, mask=column < N, other=0.0).to(tl.float32)
    wide = (codes - zero[None, :]).to(tl.float32) * by[None, :]
    where = out + column.to(tl.int64)[:, None] * K + (k + tl.arange(0, BLOCK_K))[None, :]
    tl.store(where, tl.trans(wide).to(out.dtype.element_ty), mask=(column < N)[:, None])


def step_of(shared: int, most: int) -> int:
    """Return the largest power of two, from 16 up to `most`, that divides a run of `shared` inputs with one scale."""
    step = most
    while shared % step:
        step //= 2
    assert step >= 16, f"{shared} inputs share a scale, which no tile of 16 divides"
    return step


def fp8_linear(
    rows: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None, ends: Tensor | None
) -> Tensor:
    """Multiply rows with e4m3 weights.

    Args:
        rows: [M, K], contiguous along K. weight: e4m3 [N, K], or [groups, N, K] with ends.
        scale: float32 [(groups,) N / y, K / x] of blocks (y, x).
        ends: int32 [groups] as in `grouped.grouped_linear`; None: one product.
    Returns: [M, N] of the rows' dtype.
    """
    outputs, inputs = weight.shape[-2:]
    assert weight.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert scale.shape[-2:] == (outputs // block[0], inputs // block[1]), f"{scale.shape} scales of {block}"
    assert weight.is_contiguous()
    assert scale.is_contiguous()
    out, grid, constants = _launch(rows, outputs, inputs, bias, ends)
    most = STEP_MAX if constants["BLOCK_M"] == 16 else STEP_MAX // 2
    step = most if block[1] == inputs else step_of(block[1], most)  # inputs behind the last are read as zeros
    if out.numel():
        fp8_linear_kernel[grid](
            rows,
            weight.view(torch.uint8),
            scale,
            out if bias is None else bias,
            out if ends is None else ends,
            out,
            len(rows),
            outputs,
            inputs,
            rows.stride(0),
            DOWN=block[0],
            ACROSS=block[1],
            BLOCK_K=step,
            **constants,
        )
    return out


def int4_linear(
    rows: Tensor,
    qweight: Tensor,
    zeros: Tensor,
    scales: Tensor,
    group: int,
    zero_add: int,
    bias: Tensor | None,
    ends: Tensor | None,
) -> Tensor:
    """Multiply rows with weights of 4 bits, in the layout of `int4`; other arguments are those of `fp8_linear`."""
    inputs, outputs = qweight.shape[-2] * PER_WORD, qweight.shape[-1]
    assert qweight.dtype == zeros.dtype == torch.int32
    assert scales.shape[-2:] == (inputs // group, outputs), f"{scales.shape} scales of groups of {group}"
    assert zeros.shape[-2:] == (inputs // group, outputs // PER_WORD)
    assert qweight.is_contiguous()
    assert zeros.is_contiguous()
    assert scales.is_contiguous()
    out, grid, constants = _launch(rows, outputs, inputs, bias, ends)
    if out.numel():
        int4_linear_kernel[grid](
            rows,
            qweight,
            zeros,
            scales,
            out if bias is None else bias,
            out if ends is None else ends,
            out,
            len(rows),
            outputs,
            inputs,
            rows.stride(0),
            GROUP=group,
            ZERO_ADD=zero_add,
            BLOCK_K=step_of(group, STEP_MAX if constants["BLOCK_M"] == 16 else STEP_MAX // 2),
            **constants,
        )
    return out


def _launch(
    rows: Tensor, outputs: int, inputs: int, bias: Tensor | None, ends: Tensor | None
) -> tuple[Tensor, tuple[int, int], dict[str, int | bool]]:
    """Return an empty result, the grid, and the constants that both kernels are compiled for."""
    assert rows.shape[1] == inputs, f"rows have {rows.shape[1]} inputs, weights {inputs}"
    assert rows.stride(1) == 1
    assert bias is None or bias.shape == (outputs,)
    assert ends is None or ends.dtype == torch.int32
    count, groups = len(rows), 0 if ends is None else len(ends)
    out = torch.empty((count, outputs), dtype=rows.dtype, device=rows.device)
    few = count <= FEW_ROWS * max(groups, 1)
    block_m = 16 if few else 64
    block_n = 32 if few else 64
    tiles = triton.cdiv(count, block_m) if ends is None else count // block_m + min(count, groups)
    constants = {
        "BIAS": bias is not None,
        "GROUPS": groups,
        "GROUPS_PADDED": triton.next_power_of_2(max(groups, 1)),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 4,
        "num_stages": 4 if few else 3,
    }
    return out, (tiles, triton.cdiv(outputs, block_n)), constants


def int4_widened(
    qweight: Tensor, zeros: Tensor, scales: Tensor, group: int, zero_add: int, dtype: torch.dtype
) -> Tensor:
    """Return (q - zero) * scale as [outputs, inputs] of `dtype`."""
    inputs, outputs = qweight.shape[0] * PER_WORD, qweight.shape[1]
    out = torch.empty((outputs, inputs), dtype=dtype, device=qweight.device)
    step = step_of(group, STEP_MAX)
    grid = (triton.cdiv(outputs, 32), inputs // step)
    int4_widen_kernel[grid](
        qweight, zeros, scales, out, outputs, inputs, GROUP=group, ZERO_ADD=zero_add, BLOCK_N=32, BLOCK_K=step
    )
    return out
