"""The function behind transformers' attention interface: a layer's queries, keys and values to the paged backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere
from transformers import AttentionInterface

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.from_transformers.latent import absorb, absorbs, expand, is_latent

NAME = "lockstep_paged"
"""Name in transformers' registry of attention functions."""

CURRENT = "lockstep_current_pass"
"""Attribute of an attention module: the pass that its model runs."""

IGNORED = frozenset(
    "dropout use_cache output_attentions output_hidden_states position_ids cache_position position_embeddings "
    "past_key_values output_router_logits return_dict logits_to_keep num_items_in_batch deterministic".split()
)
"""Arguments of the interface that change nothing here: positions are applied before, and nothing is dropped."""


@dataclass(slots=True)
class AttentionCall:
    """What one layer required of attention in a trial."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent: bool
    rules: LayerRules


@dataclass(slots=True)
class CurrentPass:
    """The pass that a model runs, for its attention modules. Without a batch the pass is a trial, which is recorded.

    Args:
        head_dim: of the pool; narrower heads are padded with zeros, which changes neither scores nor sums.
        places: by number of a layer that attends: its number in the pool, which has no KV of other layers.
    """

    batch: ForwardBatch | None = None
    attention: AttentionBackend | None = None
    head_dim: int = 0
    calls: list[AttentionCall] | None = None
    places: dict[int, int] = field(default_factory=dict)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend as `AttentionBackend.run` does.

    Args:
        query: [1, heads, tokens, head_dim], rope applied; key, value: [1, kv_heads, tokens, head_dim].
    Returns: [1, tokens, heads, value's head_dim].
    """
    current: CurrentPass = getattr(module, CURRENT)
    latent = is_latent(module)
    if latent:
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        if current.calls is not None and not absorbs(module, query, key, value):
            raise ConfigError(f"layer {module.layer_idx} has latents that its attention does not multiply linearly")
        query = absorb(module, query)
    if current.calls is not None:
        current.calls.append(_described(module, query, key, value, attention_mask, scaling, more))
        out = _by_token(query, key, value)
        return expand(module, out) if latent else out, None
    batch, attention = current.batch, current.attention
    assert batch is not None
    assert attention is not None
    turned, keys, values = (_padded(one[0].transpose(0, 1), current.head_dim) for one in (query, key, value))
    out = attention.run(current.places[module.layer_idx], turned, keys, keys if latent else values, batch)
    summed = out[None, :, :, : value.shape[-1]]
    return (expand(module, summed) if latent else summed).contiguous(), None


def _padded(states: Tensor, head_dim: int) -> Tensor:
    lacking = head_dim - states.shape[-1]
    return F.pad(states, (0, lacking)) if lacking else states


def _described(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    more: dict[str, Any],
) -> AttentionCall:
    """Return what a layer requires. Raises ConfigError for anything that paged attention does not compute."""
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ConfigError(f"{name} has no number of its layer, so that its KV has no place")
    if mask is not None:
        raise ConfigError(f"layer {layer} passes a mask or bias of its own to attention")
    if more.pop("is_causal", None) is False:
        raise ConfigError(f"layer {layer} attends to later tokens")
    window, cap, sinks = more.pop("sliding_window", None), more.pop("softcap", None), more.pop("s_aux", None)
    unknown = [one for one, given in more.items() if given is not None and one not in IGNORED]
    if unknown:
        raise ConfigError(f"layer {layer} passes {', '.join(f'`{one}`' for one in unknown)} to attention")
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    if heads % kv_heads or value.shape[1] != kv_heads or key.shape[3] != head_dim:
        raise ConfigError(f"layer {layer} has queries {[*query.shape]}, keys {[*key.shape]}, values {[*value.shape]}")
    rules = LayerRules(
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        window=None if window is None else int(window),
        cap=None if cap is None else float(cap),
        sinks=sinks,
    )
    return AttentionCall(layer, heads, kv_heads, head_dim, value.shape[3], is_latent(module), rules)


def _by_token(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return a stand-in for attention in a trial, in which no token depends on another one."""
    group = query.shape[1] // key.shape[1]
    ramp = torch.linspace(-1, 1, query.shape[3], dtype=query.dtype, device=query.device)  # shows how heads are turned
    turned = ((query + key.repeat_interleave(group, 1)) * ramp).mean(-1, keepdim=True)
    return (value.repeat_interleave(group, 1) * (1 + torch.tanh(turned))).transpose(1, 2).contiguous()


def register() -> None:
    """Add the function to transformers' registry."""
    AttentionInterface.register(NAME, paged_attention)
