"""Checks of the options of LoRA adapters, and the room of adapters on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.adapters import LORAS
from lockstep.sim.cost.lora import LORA_RANK, LORA_RANK_MAX, LoraSpec
from lockstep.sim.host.adapters import ALL_TARGETS, parse_targets
from lockstep.sim.workload.adapters import EXAMPLE, parse_adapters

if TYPE_CHECKING:
    from lockstep.sim.scenario.scenario import Scenario

USUAL = {"adapters": None, "max_lora_rank": LORA_RANK, "lora_targets": ALL_TARGETS}


def check_adapters(scenario: Scenario) -> None:
    """Raise ConfigError for adapter options that have no effect, or are not simulated together."""
    if scenario.adapters is None:
        for name, usual in USUAL.items():
            if getattr(scenario, name) != usual:
                raise ConfigError(
                    f"`{name}` is about adapters, and there are none, got `{getattr(scenario, name)}`\n"
                    f"hint: {EXAMPLE.partition(',')[0]}, or leave it out"
                )
        return
    parse_adapters(scenario.adapters)
    parse_targets(scenario.lora_targets)
    if not 1 <= scenario.max_lora_rank <= LORA_RANK_MAX:
        raise ConfigError(f"`max_lora_rank` must be from 1 to {LORA_RANK_MAX}, got `{scenario.max_lora_rank}`")
    if not scenario.settings.get("max_loras", LORAS):
        raise ConfigError(
            f"`adapters` is `{scenario.adapters}`, but `max_loras` is {scenario.settings['max_loras'] or 'none'}: no "
            f"adapter has a place\nhint: --max-loras {LORAS}, or leave out one of the two"
        )
    if scenario.attention_dp > 1:
        raise ConfigError(
            f"`adapters` is `{scenario.adapters}`, but `attention_dp` is {scenario.attention_dp}: adapters of "
            "data-parallel attention are not simulated\nhint: leave out one of the two"
        )


def lora_of(scenario: Scenario, config: SchedConfig) -> LoraSpec | None:
    """Return the room for adapters on the device; None if no request uses an adapter, for any `max_loras`."""
    if scenario.adapters is None:
        return None
    assert config.max_loras is not None
    return LoraSpec(config.max_loras, scenario.max_lora_rank, parse_targets(scenario.lora_targets))
