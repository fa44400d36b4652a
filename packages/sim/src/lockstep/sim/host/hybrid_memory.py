"""Pools for sliding windows and linear attention of a simulated engine: how its memory is shared out, what copies cost.

    # 0 ....... weights, activations, runtime ....... | states ........ | full pages and window pages ...... usable
    #                                                 | m / (1 + m)     | window positions = r x full ones |

m is `mamba_full_memory_ratio`, r is `swa_full_tokens_ratio`: names and defaults are SGLang's. A model has only the
pools that its layers need. Without `hybrid_memory` every attention layer keeps every token, and the state of as many
requests as may run is set aside, with no checkpoints beside them and prefix hits wherever pages match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from lockstep.core.contract.commands import StartTransfer
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cost import GpuSpec, KvCapacity, KvDtype, ModelSpec
from lockstep.sim.cost.capacity import UNBOUNDED_PAGES
from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.hardware import achieved
from lockstep.sim.cost.models import KV_BYTES, AttentionShape, checked_kv_dtype
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.stages import stages_of
from lockstep.sim.host.page_bytes import PageBytes
from lockstep.sim.scenario.tier_options import HybridShares

SLOTS_BY_ROW = 2  # of state, at least: what one request computes in, and a checkpoint


def window_tokens_of(model: ModelSpec) -> int:
    """Positions that its sliding layers see; 0: it has none."""
    return model.attention.window if isinstance(model.attention, AttentionShape) and model.sliding_layers else 0


def check_hybrid(model: ModelSpec) -> None:
    """Raise ConfigError for a model that separate pools are not for."""
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
    """The memory that is left for KV and states, divided among the pools. `kv` is with nothing set aside for states.

    Of several stages each has the pages and states of its layers, and as many as the one with the least room; the
    figures are that one's. `drafter`, on the last stage: bytes of its weights, and of its KV of a token, which lies in
    full pages.

    Raises: CapacityError if a pool would be empty.
    """
    each = model.kv_values_per_layer(split) * KV_BYTES[checked_kv_dtype(kv_dtype)]
    ratio, sliding_ratio = shares.mamba_full_memory_ratio, shares.swa_full_tokens_ratio
    rooms = [
        StageRoom(
            max(left - drafter[0] * stage.is_last, 0),
            stage.model.full_layers * each + drafter[1] * stage.is_last,
            stage.model.sliding_layers * each,
            stage.model.state_bytes_per_request(split),
        )
        for stage, left in zip(stages_of(model, split), kv.stages_left_bytes or (kv.kv_bytes,), strict=True)
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
        weights_bytes=kv.weights_bytes + drafter[0] * (room is rooms[-1]),
        kv_bytes=kv.page_tokens * (pages * room.full + window_pages * room.sliding),
        kv_bytes_per_token=room.full,
        state_bytes=slots * room.state_bytes,
        window_pages=window_pages * kv.shards,
        window_bytes_per_token=room.sliding,
        state_slots=slots * kv.shards,
        state_bytes_per_request=room.state_bytes,
    )


class StageRoom(NamedTuple):
    """Bytes of one stage: what it has left, what a token weighs in its full and sliding layers, and a state."""

    left: int
    full: int
    sliding: int
    state_bytes: int

    def pages(self, slots: int, page_tokens: int, sliding_ratio: float) -> int:
        """Full pages that fit beside so many states, with the window pages that go with them."""
        page_bytes = page_tokens * (self.full + self.sliding * (sliding_ratio if self.sliding else 0.0))
        return int((self.left - slots * self.state_bytes) / page_bytes) if page_bytes else UNBOUNDED_PAGES


class TransferBytes(NamedTuple):
    """What is sent from a prefill to a decode engine, of all layers and GPUs of the model together."""

    token: int  # KV of a token in layers that keep every token
    window_token: int  # in sliding layers with a pool of their own: of the last window's tokens only
    state: int  # of linear attention, once for each request

    @staticmethod
    def of(model: ModelSpec, kv_dtype: KvDtype, *, hybrid: bool) -> TransferBytes:
        """`hybrid`: whether sliding windows and states have pools of their own."""
        if not hybrid:
            return TransferBytes(model.kv_bytes_per_token(kv_dtype), 0, 0)
        each = model.kv_values_per_layer() * KV_BYTES[checked_kv_dtype(kv_dtype)]
        return TransferBytes(model.full_layers * each, model.sliding_layers * each, model.state_bytes_per_request())

    def of_prompt(self, tokens: float, window: int) -> float:
        """Bytes of a prompt of so many tokens."""
        return tokens * self.token + min(tokens, window) * self.window_token + self.state

    def of_part(self, part: StartTransfer, start: int, page_tokens: int) -> tuple[int, PartSize]:
        """Bytes of a part from position `start` on, and of what."""
        tokens, window_tokens, states = max(part.stop_tokens - start, 0), 0, 0
        if part.hybrid is not None:
            first = -(-part.stop_tokens // page_tokens) - len(part.hybrid.window_pages)
            window_tokens = min(max(part.stop_tokens - first * page_tokens, 0), tokens)
            states = int(part.hybrid.state_slot >= 0)
        size = tokens * self.token + window_tokens * self.window_token + states * self.state
        return size, PartSize(tokens, window_tokens, states)


class PartSize(NamedTuple):
    """What a part of a prompt has."""

    tokens: int
    window_tokens: int  # of these, whose KV of sliding layers is sent
    states: int


def hybrid_settings(model: ModelSpec, config: SchedConfig, shares: HybridShares, kv: KvCapacity | None) -> HybridMemory:
    """The scheduler's part of it, of each rank where there are several.

    `kv`: what all shards have together; None if the number of pages was given, to which the others then go.
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
    )


def state_copies_us(model: ModelSpec, gpu: GpuSpec, split: Parallelism) -> tuple[float, ...]:
    """By stage: time to copy the state of one request, read and written at the rate at which weights are read."""
    bytes_per_us = achieved(gpu, "weight_read_gbs").value * 1e3
    stages = stages_of(model, split)
    return tuple(2.0 * stage.model.state_bytes_per_request(split) / bytes_per_us for stage in stages)


def block_bytes(
    model: ModelSpec, split: Parallelism, kv_dtype: KvDtype, page_size: int
) -> tuple[PageBytes, dict[str, PageBytes]]:
    """What a page of full layers weighs in host memory and on a link to it, and a window page and a state beside it."""
    each = model.kv_values_per_layer(split) * KV_BYTES[checked_kv_dtype(kv_dtype)] * page_size
    state = model.state_bytes_per_request(split)
    beside = {"window": model.sliding_layers * each, "state": state}
    return PageBytes.of_rank(model.full_layers * each, split), {
        kind: PageBytes.of_rank(rank, split) for kind, rank in beside.items() if rank
    }


def host_page_bytes(pages: int, hybrid: HybridMemory, page: PageBytes, beside: Mapping[str, PageBytes]) -> PageBytes:
    """A page of host memory with its share of the host's windows and states: as many of them as the device has for
    each of its `pages`.
    """
    blocks = {"window": hybrid.window_pages, "state": hybrid.state_slots}
    in_all = [sum(blocks[kind] * one[where] for kind, one in beside.items()) for where in (0, 1)]
    return PageBytes(*(own + -(-shared // pages) for own, shared in zip(page, in_all, strict=True)))


def state_copy_us(model: ModelSpec, gpu: GpuSpec, split: Parallelism) -> float:
    """The same on the stage with most of it."""
    return max(state_copies_us(model, gpu, split))
