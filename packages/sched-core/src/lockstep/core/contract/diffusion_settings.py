"""Settings of block diffusion: which go together. See features/diffusion.py."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from lockstep.core.contract.errors import ConfigError

BLOCK_TOKENS_MAX = 256


class BlockDiffusion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that answers in blocks: each starts as masks, and is computed again and again until none is left."""

    block_tokens: int  # positions of a block, a power of two; blocks begin at multiples of it


class DiffusionSettings(Protocol):
    """The settings that block diffusion is checked against."""

    @property
    def diffusion(self) -> BlockDiffusion | msgspec.UnsetType: ...
    @property
    def page_size(self) -> int: ...
    @property
    def split_tokens(self) -> int: ...
    @property
    def context_tokens_max(self) -> int: ...
    @property
    def overlap_depth(self) -> int: ...
    @property
    def decode_steps_per_launch(self) -> int: ...
    @property
    def decode_look_ahead(self) -> int: ...
    @property
    def batching(self) -> str: ...
    @property
    def reserve(self) -> str: ...
    @property
    def enable_priority_preemption(self) -> bool: ...
    @property
    def speculates(self) -> bool: ...
    @property
    def jumps(self) -> bool: ...
    @property
    def hands_over(self) -> bool: ...
    @property
    def shares_passes(self) -> bool: ...
    @property
    def pipelines(self) -> bool: ...
    @property
    def splits_batches(self) -> bool: ...
    @property
    def hybrid(self) -> Any: ...
    @property
    def tiers(self) -> Any: ...


def check_diffusion(config: DiffusionSettings) -> None:
    """Raise ConfigError for settings that do not go with a model that answers in blocks."""
    diffusion = config.diffusion
    if diffusion is msgspec.UNSET:
        return
    block = diffusion.block_tokens
    whole = isinstance(block, int) and not isinstance(block, bool)
    if not whole or not 2 <= block <= BLOCK_TOKENS_MAX or block & (block - 1):
        most = BLOCK_TOKENS_MAX
        raise ConfigError(f"`diffusion.block_tokens` must be a power of two from 2 to {most}, got `{block}`")
    for name, value, why in (
        ("page_size", config.page_size, "a cached page holds whole blocks"),
        ("truncation_align_size or chunk_unit", config.split_tokens, "prompts are split between two blocks"),
        ("context_tokens_max", config.context_tokens_max, "the last block is computed whole"),
    ):
        if value % block:
            raise ConfigError(
                f"`{name}` must be a multiple of `diffusion.block_tokens` {block}, got `{value}`: {why}"
                f"\nhint: take {max(block, value // block * block)}" + (", by chunk_unit page" * (" or " in name))
            )
    _refuse_beside(config)


def _refuse_beside(config: DiffusionSettings) -> None:
    """Raise ConfigError for features that do not go with blocks."""
    beside = {
        "overlap_depth": (config.overlap_depth > 0, "0", "which block is next follows from the result before it"),
        "batching": (config.batching != "prefill_first", "prefill_first", "prompts and blocks are passes of their own"),
        "reserve": (config.reserve == "full", "ratio or on_demand", "full promises pages by tokens that are fed back"),
        "decode_look_ahead": (config.decode_look_ahead > 1, "1", "a row needs the pages of its next block only"),
        "decode_steps_per_launch": (config.decode_steps_per_launch > 1, "1", "each pass computes a block"),
        "enable_priority_preemption": (
            config.enable_priority_preemption,
            "false",
            "room is made for one token of each request",
        ),
        "speculative_method": (config.speculates, "none", "each pass proposes all tokens of a block"),
        "jump_forward_tokens": (config.jumps, "0", "no grammar forces tokens of a block"),
        "role": (config.hands_over, "mixed", "the first token of a prompt is in a block"),
        "dp_ranks": (config.shares_passes, "1", "ranks agree on passes of prompts and of single tokens"),
        "pp_size": (config.pipelines, "1", "a block is on the device of one stage"),
        "two_batch_overlap": (config.splits_batches, "false", "a block is not divided"),
        "hybrid": (config.hybrid is not msgspec.UNSET, "unset", "states and windows run from left to right"),
        "tiers": (config.tiers is not msgspec.UNSET, "unset", "this is not supported yet"),
    }
    for name, (there, instead, why) in beside.items():
        if there:
            shown = "set" if name in ("hybrid", "tiers") else getattr(config, name)
            raise ConfigError(
                f"`{name}` is {shown}, but `diffusion` is set: {why}\nhint: take {name} {instead} for this model"
            )
