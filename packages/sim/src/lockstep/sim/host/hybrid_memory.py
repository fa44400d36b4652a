"""Pools for sliding windows and linear attention of a simulated engine: the division of its memory, the cost of copies.

    # 0 ....... weights, activations, runtime ....... | states ........ | full pages and window pages ...... usable
    #                                                 | m / (1 + m)     | window positions = r x full ones |

m is `mamba_full_memory_ratio`, r is `swa_full_tokens_ratio`: names and defaults are SGLang's. A model has only the
pools that its layers need. Without `hybrid_memory` every attention layer keeps every token. Memory for the states of
all requests that may run is then reserved, there are no checkpoints, and a prefix hits wherever its pages match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from msgspec import UNSET

from lockstep.core.contract.commands import StartTransfer
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.tier_options import bytes_with_blocks
from lockstep.sim.cost import GpuSpec, KvCapacity, KvDtype, ModelSpec
from lockstep.sim.cost.capacity import UNBOUNDED_PAGES
from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.hardware import achieved
from lockstep.sim.cost.models import KV_BYTES, AttentionShape, checked_kv_dtype
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.stages import stages_of
from lockstep.sim.host.page_bytes import PageBytes
from lockstep.sim.scenario.tier_options import HybridShares

SLOTS_BY_ROW = 2  # minimum of state slots: the state of one running request, and one checkpoint


def window_tokens_of(model: ModelSpec) -> int:
    """Return the window of a model's sliding layers in tokens; 0 if it has no sliding layers."""
    return model.attention.window if isinstance(model.attention, AttentionShape) and model.sliding_layers else 0


def check_hybrid(model: ModelSpec) -> None:
    """Raise ConfigError for a model without sliding-window or linear-attention layers."""
    if not window_tokens_of(model) and model.delta is None:
        raise ConfigError(
            f"`hybrid_memory` is on, but all layers of {model.name} have full attention\n"
            "hint: leave out --hybrid-memory"
        )


def shared_out(
    kv: KvCapacity,
    model: ModelSpec,
    split: Parallelism,
    kv_dtype: KvDtype,
    shares: HybridShares,
    drafter: tuple[int, int] = (0, 0),
) -> KvCapacity:
    """Divide the memory for KV and states among the pools, and return the capacity with all pools.

    With several stages, every stage has the numbers of pages and states that fit on the stage with the least room. The
    figures are those of that stage.
    Args:
        kv: capacity computed without memory for states.
        drafter: of the stage that drafts: bytes of its weights, and bytes of its KV per token in full pages.
    Raises: CapacityError if a pool would be empty.
    """
    each = model.kv_values_per_layer(split) * KV_BYTES[checked_kv_dtype(kv_dtype)]
    ratio, sliding_ratio = shares.mamba_full_memory_ratio, shares.swa_full_tokens_ratio
    stages = stages_of(model, split)
    drafting = 0 if split.drafts_first else len(stages) - 1
    rooms = [
        StageRoom(
            max(left - drafter[0] * (number == drafting), 0),
            stage.model.full_layers * each + drafter[1] * (number == drafting),
            stage.model.sliding_layers * each,
            stage.model.state_bytes_per_request(split),
        )
        for number, (stage, left) in enumerate(zip(stages, kv.stages_left_bytes or (kv.kv_bytes,), strict=True))
    ]
    slots = min(
        (int(one.left * ratio / (1.0 + ratio)) // one.state_bytes for one in rooms if one.state_bytes), default=0
    )
    pages, room = min(
        ((one.pages(slots, kv.page_tokens, sliding_ratio), one) for one in rooms), key=lambda found: found[0]
    )
    window_pages = int(pages * sliding_ratio) if model.sliding_layers else 0
    if pages < 1 or (model.sliding_layers and window_pages < 1) or (model.linear_layers and slots < SLOTS_BY_ROW):
        states = f" and {slots} states of {room.state_bytes / 1e6:.1f} MB" if model.linear_layers else ""
        raise CapacityError(
            f"{model.name} leaves {room.left / 1e9:.1f} GB for KV and states: {pages} pages, {window_pages} window "
            f"pages{states}\n"
            "hint: raise --tp, or change --swa-full-tokens-ratio and --mamba-full-memory-ratio"
        )
    return replace(
        kv,
        pages=pages * kv.shards,
        tokens=pages * kv.page_tokens * kv.shards,
        weights_bytes=kv.weights_bytes + drafter[0] * (room is rooms[drafting]),
        kv_bytes=kv.page_tokens * (pages * room.full + window_pages * room.sliding),
        kv_bytes_per_token=room.full,
        state_bytes=slots * room.state_bytes,
        window_pages=window_pages * kv.shards,
        window_bytes_per_token=room.sliding,
        state_slots=slots * kv.shards,
        state_bytes_per_request=room.state_bytes,
    )


class StageRoom(NamedTuple):
    """The room of one stage for KV and states, and the sizes of both, in bytes."""

    left: int  # memory for KV and states
    full: int  # KV of one token in full layers
    sliding: int  # KV of one token in sliding layers
    state_bytes: int  # state of one request

    def pages(self, slots: int, page_tokens: int, sliding_ratio: float) -> int:
        """Return the full pages that fit beside `slots` states, each with its share of window pages."""
        page_bytes = page_tokens * (self.full + self.sliding * (sliding_ratio if self.sliding else 0.0))
        return int((self.left - slots * self.state_bytes) / page_bytes) if page_bytes else UNBOUNDED_PAGES


class TransferBytes(NamedTuple):
    """Bytes sent from a prefill to a decode engine, all layers and GPUs of the model together."""

    token: int  # KV of a token in layers that keep every token
    window_token: int  # KV of a token in sliding layers with a separate pool; sent for the last window's tokens only
    state: int  # linear-attention state, once per request

    @staticmethod
    def of(model: ModelSpec, kv_dtype: KvDtype, *, hybrid: bool) -> TransferBytes:
        """Return the bytes of a model. `hybrid`: whether sliding windows and states have separate pools."""
        if not hybrid:
            return TransferBytes(model.kv_bytes_per_token(kv_dtype), 0, 0)
        each = model.kv_values_per_layer() * KV_BYTES[checked_kv_dtype(kv_dtype)]
        return TransferBytes(model.full_layers * each, model.sliding_layers * each, model.state_bytes_per_request())

    def of_prompt(self, tokens: float, window: int) -> float:
        """Return the bytes of a prompt of `tokens` tokens, with `window` tokens of sliding layers."""
        return tokens * self.token + min(tokens, window) * self.window_token + self.state

    def of_part(self, part: StartTransfer, start: int, page_tokens: int) -> tuple[int, PartSize]:
        """Return the bytes of a part that begins at position `start`, and what it consists of."""
        tokens, window_tokens, states = max(part.stop_tokens - start, 0), 0, 0
        if part.hybrid is not None:
            first = -(-part.stop_tokens // page_tokens) - len(part.hybrid.window_pages)
            window_tokens = min(max(part.stop_tokens - first * page_tokens, 0), tokens)
            states = int(part.hybrid.state_slot >= 0)
        size = tokens * self.token + window_tokens * self.window_token + states * self.state
        return size, PartSize(tokens, window_tokens, states)


class PartSize(NamedTuple):
    """The contents of one part of a transfer."""

    tokens: int
    window_tokens: int  # tokens among these that are sent with KV of sliding layers
    states: int


# mechanism: sliding-windows (simulated)
def hybrid_settings(model: ModelSpec, config: SchedConfig, shares: HybridShares, kv: KvCapacity | None) -> HybridMemory:
    """Return the scheduler's settings of the pools, per data-parallel rank.

    Args:
        kv: capacity of all shards together; None if the number of pages was given: window pages and state slots then
            follow from `config.pages` and `config.max_running_requests`.
    """
    window, states = window_tokens_of(model), model.delta is not None
    ranks = config.dp_ranks if isinstance(config.dp_ranks, int) else 1
    window_pages = kv.window_pages // ranks if kv is not None else int(config.pages * shares.swa_full_tokens_ratio)
    slots = kv.state_slots // ranks if kv is not None else (config.states_per_row + 1) * config.max_running_requests
    return HybridMemory(
        window_tokens=window,
        window_pages=window_pages if window else 0,
        state_slots=slots if states else 0,
        checkpoint_tokens=shares.mamba_track_interval,
        chunk_tokens_min=window or UNSET,
    )


def state_copies_us(model: ModelSpec, gpu: GpuSpec, split: Parallelism) -> tuple[float, ...]:
    """Return the time to copy the state of one request on each stage: read and written at the rate of weight reads."""
    bytes_per_us = achieved(gpu, "weight_read_gbs").value * 1e3
    stages = stages_of(model, split)
    return tuple(2.0 * stage.model.state_bytes_per_request(split) / bytes_per_us for stage in stages)


def block_bytes(
    model: ModelSpec, split: Parallelism, kv_dtype: KvDtype, page_size: int
) -> tuple[PageBytes, dict[str, PageBytes]]:
    """Return the bytes of a page of full layers, and by kind those of a window block and of a state block."""
    each = model.kv_values_per_layer(split) * KV_BYTES[checked_kv_dtype(kv_dtype)] * page_size
    state = model.state_bytes_per_request(split)
    beside = {"window": model.sliding_layers * each, "state": state}
    return PageBytes.of_rank(model.full_layers * each, split), {
        kind: PageBytes.of_rank(rank, split) for kind, rank in beside.items() if rank
    }


def host_page_bytes(pages: int, hybrid: HybridMemory, page: PageBytes, beside: Mapping[str, PageBytes]) -> PageBytes:
    """Return the bytes of a host page with its share of window and state blocks.

    The host has as many of these blocks per page as the device has for each of its `pages`.
    """
    blocks = {"window": hybrid.window_pages, "state": hybrid.state_slots}
    return PageBytes(
        *(
            bytes_with_blocks(page[where], pages, [(blocks[kind], one[where]) for kind, one in beside.items()])
            for where in (0, 1)
        )
    )


def state_copy_us(model: ModelSpec, gpu: GpuSpec, split: Parallelism) -> float:
    """Return the time to copy the state of one request on the stage where it takes longest."""
    return max(state_copies_us(model, gpu, split))
