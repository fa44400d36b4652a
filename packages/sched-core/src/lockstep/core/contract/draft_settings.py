"""Settings of drafts: which go together, and their defaults. See features/speculation.py and draft_trees.py."""

from __future__ import annotations

from typing import Literal, Protocol, cast, get_args

import msgspec

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.setting import one_of

SpeculativeMethod = Literal["none", "ngram", "draft_model", "eagle", "mtp"]
DRAFT_SETTINGS = (
    "speculative_method",
    "num_speculative_tokens",
    "speculative_min_chance",
    "speculative_max_batch_size",
    "speculative_topk",
    "speculative_num_steps",
)
NUM_SPECULATIVE_TOKENS = 3  # SGLang's defaults for EAGLE are a chain of 3 to 5, by model
NUM_SPECULATIVE_TOKENS_MAX = 64
TREE_TOKENS, TREE_STEPS = 8, 4  # defaults of draft trees; SGLang's for EAGLE are 8 tokens of 4 alternatives in 5 steps
TOPK_MAX = 16


def _set(config: DraftSettings, name: str, value: object) -> None:
    msgspec.structs.force_setattr(cast(msgspec.Struct, config), name, value)


class DraftSettings(Protocol):
    """The settings of drafts in SchedConfig, and those that trees are checked against."""

    @property
    def speculative_method(self) -> SpeculativeMethod | msgspec.UnsetType: ...
    @property
    def num_speculative_tokens(self) -> int | msgspec.UnsetType: ...
    @property
    def speculative_min_chance(self) -> float | msgspec.UnsetType: ...
    @property
    def speculative_max_batch_size(self) -> int | msgspec.UnsetType: ...
    @property
    def speculative_topk(self) -> int | msgspec.UnsetType: ...
    @property
    def speculative_num_steps(self) -> int | msgspec.UnsetType: ...
    @property
    def jump_forward_tokens(self) -> int | msgspec.UnsetType: ...
    @property
    def drafts_max(self) -> int: ...
    @property
    def path_max(self) -> int: ...


def settle_drafts(config: DraftSettings) -> None:
    """Fill in the number of drafts if a method is set. Otherwise unset both, so that journals contain neither."""
    method, drafts = config.speculative_method, config.num_speculative_tokens
    if method == "none":
        method = msgspec.UNSET
        _set(config, "speculative_method", method)
    if method is msgspec.UNSET:
        for name in DRAFT_SETTINGS[1:]:
            value = getattr(config, name)
            if value is not msgspec.UNSET:
                raise ConfigError(
                    f"`{name}` is {value}, but there are no drafts: `speculative_method` is none\n"
                    "hint: take speculative_method ngram, draft_model, eagle or mtp"
                )
        return
    if method not in get_args(SpeculativeMethod):
        raise ConfigError(f"`speculative_method` must be {one_of(get_args(SpeculativeMethod))}, got `{method}`")
    trees = _settle_trees(config)
    if drafts is msgspec.UNSET:
        _set(config, "num_speculative_tokens", TREE_TOKENS if trees else NUM_SPECULATIVE_TOKENS)
    elif not isinstance(drafts, int) or isinstance(drafts, bool) or not 1 <= drafts <= NUM_SPECULATIVE_TOKENS_MAX:
        raise ConfigError(
            f"`num_speculative_tokens` must be a whole number from 1 to {NUM_SPECULATIVE_TOKENS_MAX}, got `{drafts}`"
        )
    chance, rows = config.speculative_min_chance, config.speculative_max_batch_size
    if chance is not msgspec.UNSET and not 0.0 < chance < 1.0:
        raise ConfigError(
            f"`speculative_min_chance` must be above 0 and below 1, got `{chance}`\nhint: leave it out to draft always"
        )
    if rows is not msgspec.UNSET and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise ConfigError(f"`speculative_max_batch_size` must be a whole number of at least 1, got `{rows}`")
    if trees and config.path_max > config.drafts_max:
        raise ConfigError(
            f"`speculative_num_steps` is {config.path_max}, but a tree has `num_speculative_tokens` "
            f"{config.drafts_max} in all\nhint: raise num_speculative_tokens"
        )


def _settle_trees(config: DraftSettings) -> bool:
    """Return whether drafts are trees. A `speculative_topk` of 1, for chains, becomes unset and is in no journal."""
    topk, steps = config.speculative_topk, config.speculative_num_steps
    for name, value, most in (
        ("speculative_topk", topk, TOPK_MAX),
        ("speculative_num_steps", steps, NUM_SPECULATIVE_TOKENS_MAX),
    ):
        if value is not msgspec.UNSET and (
            not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most
        ):
            raise ConfigError(f"`{name}` must be a whole number from 1 to {most}, got `{value}`")
    if topk is msgspec.UNSET or topk == 1:
        if steps is not msgspec.UNSET:
            raise ConfigError(
                f"`speculative_num_steps` is {steps}, but drafts are chains: `speculative_topk` is 1\n"
                "hint: num_speculative_tokens is the length of a chain"
            )
        _set(config, "speculative_topk", msgspec.UNSET)
        return False
    if config.speculative_method == "ngram":
        raise ConfigError(
            f"`speculative_topk` is {topk}, but n-grams propose one continuation of each text\n"
            "hint: trees need speculative_method eagle, mtp or draft_model"
        )
    if config.jump_forward_tokens is not msgspec.UNSET and config.jump_forward_tokens:
        raise ConfigError(
            f"`speculative_topk` is {topk} and `jump_forward_tokens` is {config.jump_forward_tokens}: trees of drafts "
            "beside forced tokens are not supported\nhint: drop one of the two"
        )
    if steps is msgspec.UNSET:
        drafts = config.num_speculative_tokens
        least = min(TREE_STEPS, drafts) if isinstance(drafts, int) else TREE_STEPS
        _set(config, "speculative_num_steps", max(least, 1))
    return True
