"""Bytes of a page of KV on one rank: in layers that attend to all positions, in layers with windows, of a drafter."""

from __future__ import annotations

import math

from lockstep.core.contract.config import SchedConfig
from lockstep.runtime.draft_sources import Draft
from lockstep.runtime.drafting import NgramDrafter
from lockstep.runtime.head_drafter import HeadDrafter
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.models import LanguageModel
from lockstep.runtime.models.draft_heads import DraftHead
from lockstep.runtime.quantized.fp8_format import FP8


def page_bytes_of(model: Draft, page_size: int, window_share: float | None = None) -> int:
    """Return the bytes of one page of a pool made by `make_pool`.

    Args:
        window_share: window pages for each page; None: layers with windows use the pages of all layers.
    """
    full, windows = layer_bytes_of(model, page_size, split=window_share is not None)
    return full + math.ceil(windows * (window_share or 0.0))


def layer_bytes_of(model: Draft, page_size: int, *, split: bool) -> tuple[int, int]:
    """Return the bytes of one page in the layers that attend to all positions, and in those with windows.

    Args:
        split: layers with windows have pages of their own; otherwise all bytes are of pages of all layers.
    """
    stored = model.dtype if model.kv_scales is None else FP8
    sliding = 0
    if split and isinstance(model, LanguageModel):
        sliding = len(sliding_layers(model))
    full, windows = (
        KvPool.bytes_per_page(layers, page_size, model.kv_heads, model.head_dim, stored, shared=model.shares_kv)
        for layers in (model.layers - sliding, sliding)
    )
    return full, windows


def drafting_bytes_of(draft: Draft | None, config: SchedConfig, *, elsewhere: bool) -> int:
    """Return the bytes that a drafter keeps of each page.

    Args:
        elsewhere: another pipeline stage has the draft model.
    """
    page_size = config.page_size
    if draft is None:
        return NgramDrafter.bytes_of(page_size) if config.speculates and not elsewhere else 0
    return page_bytes_of(draft, page_size) + (
        HeadDrafter.bytes_of(draft, page_size) if isinstance(draft, DraftHead) else 0
    )


def sliding_layers(model: LanguageModel) -> tuple[int, ...]:
    """Return the layers with sliding windows."""
    return tuple(layer for layer, rule in enumerate(model.rules) if rule.window is not None)
