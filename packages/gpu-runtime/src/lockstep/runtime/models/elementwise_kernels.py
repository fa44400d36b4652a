"""The operations of `elementwise.py` in Triton: a program reads each input once, computes in float32, writes once.

The result of a row depends only on the row, so it has the same bits in every batch.
"""

# Triton reads the source of these functions: constants are upper case, as in its own kernels.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns of one program of silu_and_mul


@triton.jit
def add_rms_norm_kernel(
    residual,  # [rows, SIZE], contiguous, like all tensors here
    added,
    weight,  # [SIZE]
    summed,
    normed,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    """Add and norm one row per program.

    The sum is rounded before the norm, because the next layer reads the rounded sum.
    """
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    x = tl.load(residual + row + at, mask=inside, other=0.0)
    if ADD:
        more = tl.load(added + row + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + row + at, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    of_weight = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + at, (x * scale * of_weight).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def norm_and_turn_kernel(
    qkv,  # [tokens, (HEADS + 2 KV_HEADS) 2 HALF], contiguous, like all tensors here
    query_weight,  # [2 HALF]
    key_weight,
    cos,  # [tokens, HALF]
    sin,
    query,  # [tokens, HEADS, 2 HALF]
    key,  # [tokens, KV_HEADS, 2 HALF]
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm and rotate one head. Program (token, head): heads of the query, then of the key.

    [ first half | second half ] -> [ first cos - second sin | second cos + first sin ]
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    of_query = head < HEADS
    at = tl.arange(0, PADDED)
    inside = at < HALF
    source = qkv + token * (HEADS + 2 * KV_HEADS) * 2 * HALF + head * 2 * HALF + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        for_query, for_key = inside & of_query, inside & (head >= HEADS)
        low = tl.load(query_weight + at, mask=for_query, other=0.0) + tl.load(key_weight + at, mask=for_key, other=0.0)
        high = tl.load(query_weight + HALF + at, mask=for_query, other=0.0) + tl.load(
            key_weight + HALF + at, mask=for_key, other=0.0
        )
        first = first * scale * low.to(tl.float32)
        second = second * scale * high.to(tl.float32)
    c = tl.load(cos + token * HALF + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + at, mask=inside, other=0.0).to(tl.float32)
    low_turned = (first * c - second * s).to(query.dtype.element_ty)
    high_turned = (second * c + first * s).to(query.dtype.element_ty)
    to_query = query + (token * HEADS + head) * 2 * HALF + at
    tl.store(to_query, low_turned, mask=inside & of_query)
    tl.store(to_query + HALF, high_turned, mask=inside & of_query)
    to_key = key + (token * KV_HEADS + head - HEADS) * 2 * HALF + at
    tl.store(to_key, low_turned, mask=inside & (head >= HEADS))
    tl.store(to_key + HALF, high_turned, mask=inside & (head >= HEADS))


@triton.jit
def silu_and_mul_kernel(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of a row from its gate and up. Program (row, block)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INNER
    gate = tl.load(gate_up + row * 2 * INNER + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def add_rms_norm_triton(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `elementwise.add_rms_norm`."""
    size = weight.numel()
    assert residual.is_contiguous(), residual.stride()
    assert residual.shape[-1] == size, f"{residual.shape} residual, {size} weights"
    assert added is None or (added.is_contiguous() and added.shape == residual.shape)
    normed = torch.empty_like(residual)
    summed = residual if added is None else torch.empty_like(residual)
    rows = residual.numel() // size
    if rows:
        padded = triton.next_power_of_2(size)
        add_rms_norm_kernel[(rows,)](
            residual,
            residual if added is None else added,
            weight,
            summed,
            normed,
            eps,
            SIZE=size,
            PADDED=padded,
            ADD=added is not None,
            num_warps=max(1, min(16, padded // 512)),
        )
    return summed, normed


def norm_and_turn_triton(
    qkv: Tensor, heads: int, kv_heads: int, weights: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """See `elementwise.norm_and_turn`."""
    tokens, half = len(qkv), cos.shape[-1]
    assert qkv.is_contiguous(), qkv.stride()
    assert qkv.shape[1] == (heads + 2 * kv_heads) * 2 * half, f"{qkv.shape} for {heads} and {kv_heads} heads"
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    query = torch.empty((tokens, heads, 2 * half), dtype=qkv.dtype, device=qkv.device)
    key = torch.empty((tokens, kv_heads, 2 * half), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        query_weight, key_weight = (qkv, qkv) if weights is None else weights
        norm_and_turn_kernel[(tokens, heads + kv_heads)](
            qkv,
            query_weight,
            key_weight,
            cos,
            sin,
            query,
            key,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=half,
            PADDED=triton.next_power_of_2(half),
            NORM=weights is not None,
            num_warps=1,
        )
    return query, key


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """See `elementwise.silu_and_mul`."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), gate_up.stride()
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        silu_and_mul_kernel[(rows, triton.cdiv(inner, BLOCK))](gate_up, out, INNER=inner, BLOCK=BLOCK, num_warps=4)
    return out
