"""Pools for sliding windows and linear attention of a simulated engine: how its memory is shared out, what copies cost.

    # 0 ....... weights, activations, runtime ....... | states ........ | full pages and window pages ...... usable
    #                                                 | m / (1 + m)     | window positions = r x full ones |

m is `mamba_full_memory_ratio`, r is `swa_full_tokens_ratio`: names and defaults are SGLang's. A model has only the
pools that its layers need. Without `hybrid_memory` every attention layer keeps every token, and the state of as many
requests as may run is set aside, with no checkpoints beside them and prefix hits wherever pages match.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.core.config import HybridMemory, SchedConfig
from lockstep.core.errors import ConfigError
from lockstep.sim.cost import GpuSpec, KvCapacity, KvDtype, ModelSpec
from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.hardware import achieved
from lockstep.sim.cost.models import KV_BYTES, Attention, checked_kv_dtype
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.host_tiers import HybridShares

SLOTS_BY_ROW = 2  # of state, for each request that may run, where the number of pages is given: its own, one checkpoint


def window_tokens_of(model: ModelSpec) -> int:
    """Positions that its sliding layers see; 0: it has none."""
    return model.attention.window if isinstance(model.attention, Attention) and model.sliding_layers else 0


def check_hybrid(model: ModelSpec, split: Parallelism) -> None:
    """Raise ConfigError for a model or a layout that separate pools are not for."""
    if not window_tokens_of(model) and model.delta is None:
        raise ConfigError(
            f"`hybrid_memory` is on, but all layers of {model.name} have full attention\n"
            "hint: leave out --hybrid-memory"
        )
    if split.pp > 1:
        raise ConfigError(
            f"`hybrid_memory` is on, but `pp` is {split.pp}: its pools are not shared out over stages yet\nhint: --pp 1"
        )


def shared_out(
    kv: KvCapacity, model: ModelSpec, split: Parallelism, kv_dtype: KvDtype, shares: HybridShares
) -> KvCapacity:
    """The memory that is left for KV and states, divided among the pools. `kv` is with nothing set aside for states.

    Raises: CapacityError if a pool would be empty.
    """
    each = model.kv_values_per_layer(split) * KV_BYTES[checked_kv_dtype(kv_dtype)]
    full, sliding = model.full_layers * each, model.sliding_layers * each
    state_bytes = model.state_bytes_per_request(split)
    left, slots = kv.kv_bytes, 0
    if state_bytes:
        ratio = shares.mamba_full_memory_ratio
        slots = int(left * ratio / (1.0 + ratio)) // state_bytes
        left -= slots * state_bytes
    page_bytes = kv.page_tokens * (full + sliding * (shares.swa_full_tokens_ratio if sliding else 0.0))
    pages = int(left / page_bytes)
    window_pages = int(pages * shares.swa_full_tokens_ratio) if sliding else 0
    if pages < 1 or (sliding and window_pages < 1) or (state_bytes and slots < SLOTS_BY_ROW):
        raise CapacityError(
            f"{model.name} leaves {kv.kv_bytes / 1e9:.1f} GB for KV and states: {pages} pages, {window_pages} window "
            f"pages and {slots} states of {state_bytes / 1e6:.1f} MB\n"
            "hint: raise --tp, or change --swa-full-tokens-ratio and --mamba-full-memory-ratio"
        )
    return replace(
        kv,
        pages=pages * kv.shards,
        tokens=pages * kv.page_tokens * kv.shards,
        kv_bytes=kv.page_tokens * (pages * full + window_pages * sliding),
        kv_bytes_per_token=full,
        state_bytes=slots * state_bytes,
        window_pages=window_pages * kv.shards,
        window_bytes_per_token=sliding,
        state_slots=slots * kv.shards,
        state_bytes_per_request=state_bytes,
    )


def hybrid_settings(model: ModelSpec, config: SchedConfig, shares: HybridShares, kv: KvCapacity | None) -> HybridMemory:
    """The scheduler's part of it. `kv`: None if the number of pages was given, to which the others then go."""
    window, states = window_tokens_of(model), model.delta is not None
    window_pages = kv.window_pages if kv is not None else int(config.pages * shares.swa_full_tokens_ratio)
    slots = kv.state_slots if kv is not None else SLOTS_BY_ROW * config.max_running_requests
    return HybridMemory(
        window_tokens=window,
        window_pages=window_pages if window else 0,
        state_slots=slots if states else 0,
        checkpoint_tokens=shares.mamba_track_interval,
    )


def state_copy_us(model: ModelSpec, gpu: GpuSpec, split: Parallelism) -> float:
    """Time to copy the state of one request on its GPUs, read and written at the rate at which weights are read."""
    return 2.0 * model.state_bytes_per_request(split) / (achieved(gpu, "weight_read_gbs").value * 1e3)
