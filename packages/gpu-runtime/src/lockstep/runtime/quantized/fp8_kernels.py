"""Products of fp8 by fp8 in Triton: rows are rounded to e4m3, then multiplied with e4m3 weights on fp8 tensor cores.

    codes [M, K], row_scale [M, K / RUN]  =  rows [M, K]                              rounded_rows
    out [M, N]  =  (codes * row_scale) x (weight * scale), for all rows or by groups  scaled_linear

A tile of products is BLOCK_M rows times BLOCK_N outputs. K is processed in steps of BLOCK_K, at most 128, none of which
crosses a border between scales. Each step is a separate product, summed up in float32, as in DeepSeek-V3's technical
report (section 3.3.2): a Hopper GPU sums fp8 products with some 14 bits, which would lose accuracy over thousands of
inputs.

    scales differ along K     total += (codes[:, k] x weight[k]) * row_scale[:, k] * scale[k]
    one for all of K          total +=  codes[:, k] x weight[k];      total * row_scale * scale at the end

Groups are those of `models.grouped_kernel`. Compute capability 8.9 or later.

Reference: `fp8.to_codes`, and of both together `Fp8Matrices.rounded_linear`.
"""

# Triton reads the source of these functions: constants are upper case, as in its own kernels.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.runtime.quantized.fp8_format import FP8, STEP_LEAST
from lockstep.runtime.quantized.kernels import _stored, _tile, step_of

FEW_ROWS, MORE_ROWS = 64, 256  # average rows per group up to which tiles are narrow, and not the largest
STEP_MAX = 128
NUMBERS_OF_PROGRAM = 2048  # numbers that a program rounds at once, unless more share a scale


@triton.jit
def round_rows_kernel(
    rows,  # [M, K], rows `row_stride` apart
    static,  # float32 [STATICS], the largest is the scale of all
    codes,  # e4m3 [M, K]
    scale,  # float32 [M, K / RUN]
    K,
    row_stride,
    RUN: tl.constexpr,
    STATICS: tl.constexpr,
    STATICS_PADDED: tl.constexpr,
    RUNS: tl.constexpr,
    RUN_PADDED: tl.constexpr,
):
    """Round RUNS runs of a row. Program (row, part of its runs): tile [RUNS, RUN_PADDED]."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    inner = tl.arange(0, RUN_PADDED)
    real = number < K // RUN
    inside = real[:, None] & (inner < RUN)[None, :]
    at = number[:, None] * RUN + inner[None, :]
    wide = tl.load(rows + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    if STATICS == 0:
        by = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-10) / 448.0
    else:
        which = tl.arange(0, STATICS_PADDED)
        by = tl.max(tl.load(static + which, mask=which < STATICS, other=0.0), axis=0) + tl.zeros((RUNS,), tl.float32)
    tl.store(scale + row * (K // RUN) + number, by, mask=real)
    wide = wide / by[:, None]
    cut = tl.minimum(tl.maximum(wide, -448.0), 448.0)
    wide = tl.where(wide != wide, wide, cut)  # NaN stays NaN, so that its request ends as invalid
    tl.store(codes + row * K + at, wide.to(codes.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def scaled_linear_kernel(
    codes,  # e4m3 [M, K]
    row_scale,  # float32 [M, K / RUN]
    weight,  # e4m3 [groups, N, K]
    scale,  # float32 [groups, N / DOWN, K / ACROSS]
    bias,  # [N]
    ends,  # int32 [GROUPS]
    out,  # [M, N]
    M,
    N,
    K,
    RUN: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile.

    Program (tile of rows, tile of outputs). WHOLE: one scale of rows and one of weights for all of K.
    """
    group, first, stop = _tile(ends, M, GROUPS, GROUPS_PADDED, BLOCK_M)
    if first < stop:
        row = first + tl.arange(0, BLOCK_M)
        start = tl.program_id(1) * BLOCK_N
        column = start + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        code_at = codes + row.to(tl.int64)[:, None] * K
        row_scale_at = row_scale + row.to(tl.int64) * (K // RUN)
        weight_at = weight + group.to(tl.int64) * N * K + column.to(tl.int64)[None, :] * K
        of_group = group.to(tl.int64) * (N // DOWN)
        across = tl.cdiv(K, ACROSS)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            at = k + inner
            left = tl.load(code_at + at[None, :], mask=(row < stop)[:, None] & (at < K)[None, :], other=0.0)
            right = tl.load(weight_at + at[:, None], mask=(column < N)[None, :] & (at < K)[:, None], other=0.0)
            step = tl.dot(left, right)
            if WHOLE:
                total += step
            else:
                by_row = tl.load(row_scale_at + k // RUN, mask=row < stop, other=0.0)
                if DOWN % BLOCK_N == 0:  # one scale for all outputs of the tile
                    by = tl.load(scale + (of_group + start // DOWN) * across + k // ACROSS)
                    total += step * (by_row * by)[:, None]
                else:
                    by = tl.load(scale + (of_group + column // DOWN) * across + k // ACROSS, mask=column < N, other=0.0)
                    total += step * (by_row[:, None] * by[None, :])
        if WHOLE:
            by_row = tl.load(row_scale_at, mask=row < stop, other=0.0)
            by = tl.load(scale + of_group + column // DOWN, mask=column < N, other=0.0)
            total *= by_row[:, None] * by[None, :]
        _stored(out, total, bias, row, stop, column, N, BIAS)


def rounded_rows(rows: Tensor, run: int, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round rows; see `fp8.to_codes`. A number halfway between two codes may get the other one."""
    count, inputs = rows.shape
    assert inputs % run == 0, f"{inputs} inputs are no multiple of runs of {run}"
    assert rows.stride(1) == 1
    codes = torch.empty((count, inputs), dtype=FP8, device=rows.device)
    scale = torch.empty((count, inputs // run), dtype=torch.float32, device=rows.device)
    padded = triton.next_power_of_2(run)
    runs = max(1, min(NUMBERS_OF_PROGRAM // padded, triton.next_power_of_2(inputs // run)))
    statics = 0 if static is None else static.numel()
    if codes.numel():
        round_rows_kernel[count, triton.cdiv(inputs // run, runs)](
            rows,
            scale if static is None else static,
            codes,
            scale,
            inputs,
            rows.stride(0),
            RUN=run,
            STATICS=statics,
            STATICS_PADDED=triton.next_power_of_2(max(statics, 1)),
            RUNS=runs,
            RUN_PADDED=padded,
            num_warps=4 if runs * padded <= 4096 else 16,
        )
    return codes, scale


def scaled_linear(
    codes: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    bias: Tensor | None,
    ends: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply rows in e4m3 with e4m3 weights.

    Args:
        codes: e4m3 [M, K], contiguous. row_scale: float32 [M, K / run].
        weight: e4m3 [N, K], or [groups, N, K] with ends. scale: float32 [(groups,) N / y, K / x] of blocks (y, x).
        ends: int32 [groups] as in `grouped.grouped_linear`; None: one product.
    Returns: [M, N] in `dtype`.
    """
    outputs, inputs = weight.shape[-2:]
    run = inputs // max(row_scale.shape[1], 1)
    assert codes.dtype == weight.dtype == FP8
    assert row_scale.dtype == scale.dtype == torch.float32
    assert codes.shape[1] == inputs, f"rows have {codes.shape[1]} inputs, weights {inputs}"
    assert scale.shape[-2:] == (outputs // block[0], inputs // block[1]), f"{scale.shape} scales of {block}"
    assert all(one.is_contiguous() for one in (codes, row_scale, weight, scale))
    assert bias is None or bias.shape == (outputs,)
    assert ends is None or ends.dtype == torch.int32
    count, groups = len(codes), 0 if ends is None else len(ends)
    whole = run == inputs and block[1] == inputs
    tiling = tiling_of(count, max(groups, 1), STEP_MAX if whole else step_of(min(run, block[1]), STEP_MAX))
    assert tiling["BLOCK_K"] >= STEP_LEAST, f"{block[1]} inputs share a scale, which no step of {STEP_LEAST} divides"
    tiles = triton.cdiv(count, tiling["BLOCK_M"]) if ends is None else count // tiling["BLOCK_M"] + min(count, groups)
    out = torch.empty((count, outputs), dtype=dtype, device=codes.device)
    if out.numel():
        scaled_linear_kernel[tiles, triton.cdiv(outputs, tiling["BLOCK_N"])](
            codes,
            row_scale,
            weight,
            scale,
            out if bias is None else bias,
            out if ends is None else ends,
            out,
            count,
            outputs,
            inputs,
            RUN=run,
            DOWN=block[0],
            ACROSS=block[1],
            WHOLE=whole,
            BIAS=bias is not None,
            GROUPS=groups,
            GROUPS_PADDED=triton.next_power_of_2(max(groups, 1)),
            **tiling,
        )
    return out


def tiling_of(rows: int, groups: int, step: int) -> dict[str, int]:
    """Return tile sizes by rows per group: narrow tiles for few rows, large ones if weights are reused for many rows.

    No tile has fewer than 64 rows: below that Triton multiplies in float16 on Hopper. The rest is an estimate:
    `benchmarks.gpu_check --only quantized` measures each.
    """
    if rows <= FEW_ROWS * groups:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": step, "num_warps": 4, "num_stages": 4}
    if rows <= MORE_ROWS * groups:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": step, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": step, "num_warps": 8, "num_stages": 3}
