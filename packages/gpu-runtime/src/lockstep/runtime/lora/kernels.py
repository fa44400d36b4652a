"""The LoRA product in Triton: tiles of tokens on one adapter, laid out by `batch.lay_out`.

    shrink   inner[token, parts * rank] = down[slot] x          summed in float32, stored in the model's dtype
    expand   out[token, n]             += up[slot, n] inner     of n's part; one launch per part

A tile is the tokens [first:stop) of `tokens`, all of one slot. A token is in at most one tile, so no two programs add
to the same output at a time. Tiles and sizes are on the CPU: the device is not queried.

Reference: `slots.add_lora_reference`.
"""

# Triton reads the source of this function: constants are upper case, as in its own kernels.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.runtime.lora.batch import HIGH_TILE, AdapterBatch

BLOCK_N, BLOCK_K = 64, 64
LEAST = 16  # the smallest tile side that tensor cores support
REGISTERS = 128  # of a thread of `expand_kernel` with high tiles and ranks: with fewer it spills on B200


@triton.jit
def shrink_kernel(
    hidden,  # [tokens, K], rows `hidden_stride` apart
    down,  # [slots, N, K], contiguous
    tokens,  # int64 [tokens on adapters]
    tiles,  # int32 [3, tiles]
    inner,  # [tokens on adapters, N], contiguous
    hidden_stride,
    tile_count,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply the tokens of a tile with BLOCK_N rows of the slot's `down`. Program (tile, n)."""
    tile = tl.program_id(0)
    first = tl.load(tiles + tile)
    stop = tl.load(tiles + tile_count + tile)
    slot = tl.load(tiles + 2 * tile_count + tile).to(tl.int64)
    row = first + tl.arange(0, BLOCK_M)
    token = tl.load(tokens + row, mask=row < stop, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.arange(0, BLOCK_K)
    hidden_at = hidden + token[:, None] * hidden_stride
    down_at = down + slot * N * K + column.to(tl.int64)[None, :] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + inside
        left = tl.load(hidden_at + k[None, :], mask=(row < stop)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(down_at + k[:, None], mask=(column < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    inner_at = inner + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(inner_at, total.to(inner.dtype.element_ty), mask=(row < stop)[:, None] & (column < N)[None, :])


@triton.jit
def expand_kernel(
    inner,  # [tokens on adapters, PARTS * RANK], contiguous
    up,  # [slots, outputs, RANK], contiguous
    tokens,
    tiles,
    out,  # [tokens, outputs], rows `out_stride` apart; the result is added to it
    out_stride,
    tile_count,
    outputs,
    inner_width,
    inner_first,  # first column of this part in `inner`
    out_first,  # first output of this part in `out` and `up`
    N,  # outputs of this part
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply the tokens of a tile with BLOCK_N rows of one part of the slot's `up`. Program (tile, n).

    BLOCK_K of the rank at a time: the whole of a large rank would need more shared memory than some GPUs have.
    """
    tile = tl.program_id(0)
    first = tl.load(tiles + tile)
    stop = tl.load(tiles + tile_count + tile)
    slot = tl.load(tiles + 2 * tile_count + tile).to(tl.int64)
    row = first + tl.arange(0, BLOCK_M)
    token = tl.load(tokens + row, mask=row < stop, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    left_at = inner + row.to(tl.int64)[:, None] * inner_width + inner_first
    right_at = up + (slot * outputs + out_first + column)[None, :] * RANK
    added = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, RANK, BLOCK_K):
        r = start + tl.arange(0, BLOCK_K)
        left = tl.load(left_at + r[None, :], mask=(row < stop)[:, None] & (r < RANK)[None, :], other=0.0)
        right = tl.load(right_at + r[:, None], mask=(column < N)[None, :] & (r < RANK)[:, None], other=0.0)
        added = tl.dot(left, right, added, input_precision="ieee")
    out_at = out + token[:, None] * out_stride + out_first + column[None, :]
    mask = (row < stop)[:, None] & (column < N)[None, :]
    total = tl.load(out_at, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)


def add_lora_triton(
    out: Tensor, hidden: Tensor, down: Tensor, up: Tensor, sizes: Sequence[int], batch: AdapterBatch
) -> Tensor:
    """Add the LoRA product to `out`; see `slots.add_lora_reference`. All tensors share dtype and device."""
    (slots, width, inputs), (_, outputs, rank) = down.shape, up.shape
    assert hidden.shape[1] == inputs, f"tokens have {hidden.shape[1]} inputs, adapters {inputs}"
    assert out.shape == (len(hidden), outputs), f"{tuple(out.shape)} for {len(hidden)} tokens and {outputs} outputs"
    assert width == len(sizes) * rank
    assert sum(sizes) == outputs
    assert up.shape[0] == slots
    assert out.dtype == hidden.dtype == down.dtype == up.dtype
    assert out.device == hidden.device == down.device == up.device == batch.tokens.device
    assert hidden.stride(1) == out.stride(1) == 1
    assert down.is_contiguous()
    assert up.is_contiguous()
    count, tiles = len(batch.tokens), batch.tiles.shape[1]
    inner = torch.empty((count, width), dtype=hidden.dtype, device=hidden.device)
    block_n = min(BLOCK_N, max(LEAST, triton.next_power_of_2(width)))
    shrink_kernel[(tiles, triton.cdiv(width, block_n))](
        hidden,
        down,
        batch.tokens,
        batch.tiles,
        inner,
        hidden.stride(0),
        tiles,
        width,
        inputs,
        BLOCK_M=batch.tile,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
    )
    first = 0
    for part, size in enumerate(sizes):
        expand_kernel[(tiles, triton.cdiv(size, BLOCK_N))](
            inner,
            up,
            batch.tokens,
            batch.tiles,
            out,
            out.stride(0),
            tiles,
            outputs,
            width,
            part * rank,
            first,
            size,
            RANK=rank,
            BLOCK_M=batch.tile,
            BLOCK_N=BLOCK_N,
            BLOCK_K=min(BLOCK_K, max(LEAST, triton.next_power_of_2(rank))),
            num_warps=8 if out.dtype.itemsize > 2 else 4,  # products of float32 keep their operands in registers
            maxnreg=REGISTERS if rank > BLOCK_K and batch.tile == HIGH_TILE and out.dtype.itemsize <= 2 else None,
        )
        first += size
    return out
