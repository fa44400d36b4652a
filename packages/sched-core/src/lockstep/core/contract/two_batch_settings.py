"""Settings of two-batch overlap: which go together, and their defaults. See features/two_batch.py."""

from __future__ import annotations

from typing import Any, Protocol, cast

import msgspec

from lockstep.core.contract.errors import ConfigError

THRESHOLDS = {"two_batch_decode_tokens": 32, "two_batch_prefill_tokens": 512}
"""Defaults of the thresholds: vLLM's for its dual-batch overlap. Engines without the overlap have none."""


class TwoBatchSettings(Protocol):
    """The settings of two-batch overlap in SchedConfig, and those that it is checked against."""

    @property
    def two_batch_overlap(self) -> bool | msgspec.UnsetType: ...
    @property
    def decode_steps_per_launch(self) -> int: ...
    @property
    def speculates(self) -> bool: ...
    @property
    def jumps(self) -> bool: ...
    @property
    def pipelines(self) -> bool: ...
    @property
    def hybrid(self) -> Any: ...


def settle_two_batch(config: TwoBatchSettings) -> None:
    """Fill in the thresholds if batches are split. Otherwise unset all settings, so that journals contain none."""
    on = config.two_batch_overlap
    if on is not msgspec.UNSET and not isinstance(on, bool):
        raise ConfigError(f"`two_batch_overlap` must be true or false, got `{on}`")
    if not on:
        _set(config, "two_batch_overlap", msgspec.UNSET)
        for name in THRESHOLDS:
            if (value := getattr(config, name)) is not msgspec.UNSET:
                raise ConfigError(
                    f"`{name}` is {value}, but `two_batch_overlap` is off: no batch is split\n"
                    "hint: turn two_batch_overlap on, or drop it"
                )
        return
    for name, usual in THRESHOLDS.items():
        value = getattr(config, name)
        if value is msgspec.UNSET:
            _set(config, name, usual)
        elif not isinstance(value, int) or isinstance(value, bool) or value < 2:
            raise ConfigError(f"`{name}` must be a whole number of at least 2, a token in each half, got `{value}`")
    _refuse_beside(config)


def _refuse_beside(config: TwoBatchSettings) -> None:
    """Raise ConfigError for features with rows that a half cannot be laid out with."""
    beside = {
        "speculative_method": (config.speculates, "rows that verify drafts have several tokens, which belong together"),
        "jump_forward_tokens": (config.jumps, "rows with forced tokens have several tokens, which belong together"),
        "decode_steps_per_launch": (
            config.decode_steps_per_launch > 1,
            "the steps of one launch feed the tokens of both halves back",
        ),
        "pp_size": (config.pipelines, "microbatches keep the other stages busy already"),
        "hybrid": (
            config.hybrid is not msgspec.UNSET,
            "pages of windows and slots of states are laid out for whole batches",
        ),
    }
    for name, (there, why) in beside.items():
        if there:
            shown = "set" if name == "hybrid" else getattr(config, name)
            raise ConfigError(f"`two_batch_overlap` is on and `{name}` is {shown}: {why}\nhint: drop one of the two")


def _set(config: TwoBatchSettings, name: str, value: object) -> None:
    msgspec.structs.force_setattr(cast(msgspec.Struct, config), name, value)
