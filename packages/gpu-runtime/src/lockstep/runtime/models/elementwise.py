"""Operations between the products of a layer, each in one launch on a GPU: torch references and kernel selection.

    residual + added, normed        instead of an addition and a norm
    query and key normed, rotated   instead of two norms and fourteen small operations
    silu(gate) * up                 instead of two

Without them a decode is a thousand small launches, each of about two microseconds of GPU time for very little work. On
a GPU with Triton `elementwise_kernels.py` computes them, elsewhere torch. Both compute in float32. The kernels round
once at the end, torch after each operation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.runtime import triton_trial


def add_rms_norm(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return residual + added, and its RMS norm x / rms(x) * weight over the last dimension.

    Args:
        residual, added: [tokens, hidden]; if `added` is None, the residual is normed.
    """
    if has_kernels(residual):
        from lockstep.runtime.models.elementwise_kernels import add_rms_norm_triton

        return add_rms_norm_triton(residual, added, weight, eps)
    return add_rms_norm_reference(residual, added, weight, eps)


def norm_and_turn(
    qkv: Tensor, heads: int, kv_heads: int, weights: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Return query and key from their product: normed by head if there are weights, then rotated by position.

    Args:
        qkv: [tokens, (heads + 2 kv_heads) head_dim]: heads of queries, of keys, of values.
        weights: of the norms of query and key, [head_dim] each.
        cos, sin: [tokens, 1, head_dim / 2]; the first half of a head is paired with the second.
    Returns: [tokens, heads, head_dim] and [tokens, kv_heads, head_dim].
    """
    if has_kernels(qkv):
        from lockstep.runtime.models.elementwise_kernels import norm_and_turn_triton

        return norm_and_turn_triton(qkv, heads, kv_heads, weights, eps, cos, sin)
    return norm_and_turn_reference(qkv, heads, kv_heads, weights, eps, cos, sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [rows, inner], of [rows, 2 inner], gate first."""
    if has_kernels(gate_up):
        from lockstep.runtime.models.elementwise_kernels import silu_and_mul_triton

        return silu_and_mul_triton(gate_up)
    return silu_and_mul_reference(gate_up)


def add_rms_norm_reference(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Torch reference of `add_rms_norm`."""
    summed = residual if added is None else residual + added
    return summed, F.rms_norm(summed, weight.shape, weight, eps)


def norm_and_turn_reference(
    qkv: Tensor, heads: int, kv_heads: int, weights: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Torch reference of `norm_and_turn`."""
    head_dim = 2 * cos.shape[-1]
    by_head = qkv.view(len(qkv), heads + 2 * kv_heads, head_dim)
    if weights is None:
        both = turn(by_head[:, : heads + kv_heads], cos, sin)
        return both[:, :heads], both[:, heads:]
    parts = by_head.split_with_sizes((heads, kv_heads, kv_heads), dim=1)[:2]
    query, key = (F.rms_norm(part, weight.shape, weight, eps) for part, weight in zip(parts, weights, strict=True))
    return turn(query, cos, sin), turn(key, cos, sin)


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads, [tokens, heads, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Torch reference of `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def has_kernels(tensor: Tensor) -> bool:
    """Return whether the Triton kernels support this tensor."""
    return (
        tensor.device.type == "cuda"
        and tensor.dtype != torch.float64
        and triton_trial.unavailable_because(tensor.device) is None
    )
