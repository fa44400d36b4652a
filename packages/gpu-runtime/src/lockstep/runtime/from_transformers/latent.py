"""Latent attention (MLA) over a compressed cache: of each token one vector of all heads, in place of keys and values.

The library expands latents to keys and values of every head before it attends. Since the expansion is linear, a part of
it may be applied to queries instead, and the other to results (absorbed weights):

    latent c [rank]        key of head h   = [ K_h c | rotated part ]        value of head h = V_h c
    score                  q . K_h c       = (K_h^T q) . c
    result                 sum p V_h c     = V_h (sum p c)

So the cache holds [ c | rotated part ], and attention has one head of keys, whose first numbers are the values.
Source: DeepSeek-V2, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

EXPANDED = "lockstep_expand_kv"
"""Attribute of an attention module: the library's own expansion of latents."""
NEEDED = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
TOLERANCE = {torch.float32: 1e-4}
OTHER_TOLERANCE = 0.05  # of dtypes with fewer bits


def take_latents(model: nn.Module) -> Iterator[nn.Module]:
    """Let the layers of a model with latent attention pass latents to attention, and yield them."""
    for module in model.modules():
        if all(hasattr(module, name) for name in NEEDED) and getattr(module.kv_b_proj, "bias", 0) is None:
            setattr(module, EXPANDED, module.expand_kv)
            module.expand_kv = _latents
            yield module


def restore(modules: Iterable[nn.Module]) -> None:
    """Let layers expand their latents again."""
    for module in modules:
        module.expand_kv = getattr(module, EXPANDED)
        delattr(module, EXPANDED)


def is_latent(module: nn.Module) -> bool:
    """Return whether an attention module passes latents."""
    return hasattr(module, EXPANDED)


def _latents(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents as one head of keys, [1, 1, tokens, rank + rotated part], and of values, [1, 1, tokens, rank]."""
    return torch.cat((latent, rotated), -1), latent


def absorb(module: Any, query: Tensor) -> Tensor:
    """Return queries [1, heads, tokens, rank + rotated part] of queries [1, heads, tokens, head_dim]."""
    keys, _ = _parts(module)
    plain, rotated = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), -1)
    return torch.cat((torch.matmul(plain, keys), rotated), -1)


def expand(module: Any, out: Tensor) -> Tensor:
    """Return results [1, tokens, heads, value dim] of sums of latents [1, tokens, heads, rank]."""
    _, values = _parts(module)
    return torch.matmul(out.transpose(1, 2), values.transpose(1, 2)).transpose(1, 2)


def _parts(module: Any) -> tuple[Tensor, Tensor]:
    """Return the matrices of keys [heads, head_dim, rank] and of values [heads, value dim, rank] on this rank."""
    size = module.qk_nope_head_dim + module.v_head_dim
    both = module.kv_b_proj.weight.view(-1, size, module.kv_lora_rank)
    return both[:, : module.qk_nope_head_dim], both[:, module.qk_nope_head_dim :]


def absorbs(module: Any, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether absorbed weights give the scores and values of the library's expansion.

    Args: query: [1, heads, tokens, head_dim]; key, value: latents of the same tokens, as `_latents` returns them.
    """
    keys, values = getattr(module, EXPANDED)(value, key[..., module.kv_lora_rank :])
    strict = TOLERANCE.get(query.dtype, OTHER_TOLERANCE)
    pairs = (
        (query @ keys.transpose(-1, -2), absorb(module, query) @ key.transpose(-1, -2)),
        (values, expand(module, value.transpose(1, 2).expand(-1, -1, query.shape[1], -1)).transpose(1, 2)),
    )
    return all(
        bool((wanted.float() - found.float()).abs().max() <= strict * wanted.float().abs().max())
        for wanted, found in pairs
    )
