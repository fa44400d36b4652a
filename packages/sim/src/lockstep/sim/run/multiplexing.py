"""PD multiplexing of a scenario: its settings, and the cost model of its shares of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.multiplexing import (
    DECODE_ROWS,
    GROUPS,
    TOKEN_BUDGET,
    Division,
    Multiplexing,
    even_divisions,
)
from lockstep.host.options import option_of
from lockstep.sim.cost import CostModel, GpuSpec, ModelSpec
from lockstep.sim.cost.multiplexing import MultiplexedModel, sms_of
from lockstep.sim.scenario.scenario import Scenario

USUAL: dict[str, Any] = {
    "pdmux_sm_groups": GROUPS,
    "pdmux_decode_divisor": DECODE_ROWS,
    "pdmux_divisions": None,
    "pdmux_token_budget": TOKEN_BUDGET,
}
"""The options that refine --pdmux, with their defaults."""
OF_PROFILE = ("batching", "same_step_sharing", "overlap_consecutive_prefills", "prefill_decode_interval")
"""Settings of profiles that multiplexing replaces by the scheduler's defaults, unless a command line has them."""


def multiplexing_of(scenario: Scenario, model: ModelSpec, gpu: GpuSpec) -> dict[str, Any]:
    """Return the scheduler settings that --pdmux implies; none without it.

    Raises: ConfigError for options that have no effect, and for a GPU or a layout that cannot be divided.
    """
    given = {name: getattr(scenario, name) for name, usual in USUAL.items() if getattr(scenario, name) != usual}
    if not scenario.pdmux:
        for name, value in given.items():
            raise ConfigError(
                f"`{name}` is `{value}`, but `pdmux` is off\nhint: --pdmux, or leave out {option_of(name)}"
            )
        return {}
    for name in ("pp", "attention_dp"):
        if getattr(scenario, name) > 1:
            raise ConfigError(
                f"`pdmux` is on, but `{name}` is {getattr(scenario, name)}: a device with all layers and all rows is "
                f"divided\nhint: leave out {option_of(name)}, or --pdmux"
            )
    for name in ("operators", "media"):
        if getattr(scenario, name) is not None:
            why = "kernels were measured on whole GPUs" if name == "operators" else "its encoder has no share"
            raise ConfigError(
                f"`pdmux` is on, but `{name}` is given: {why}\nhint: leave out {option_of(name)}, or --pdmux"
            )
    if model.whole is not None:
        raise ConfigError(f"`pdmux` is on, but {model.name} decodes nothing\nhint: leave out --pdmux")
    sms, major = sms_of(gpu)
    if scenario.pdmux_divisions is not None:
        for name in ("pdmux_sm_groups", "pdmux_decode_divisor"):
            if name in given:
                raise ConfigError(
                    f"`{name}` is {given[name]}, but `pdmux_divisions` are given\nhint: leave out {option_of(name)}"
                )
        divisions = divisions_of(scenario.pdmux_divisions)
    else:
        if scenario.pdmux_decode_divisor < 1:
            raise ConfigError(f"`pdmux_decode_divisor` must be at least 1, got `{scenario.pdmux_decode_divisor}`")
        divisions = even_divisions(sms, major, scenario.pdmux_sm_groups, scenario.pdmux_decode_divisor)
    settings = Multiplexing(layers=model.layers, sms=sms, divisions=divisions, token_budget=scenario.pdmux_token_budget)
    plain = SchedConfig()
    replaced = {name: getattr(plain, name) for name in OF_PROFILE if name not in scenario.settings}
    return {**replaced, "multiplexing": settings}


def divisions_of(text: str) -> tuple[Division, ...]:
    """Read divisions, as `112:20:0,96:36:10`. Raises ConfigError for anything else."""
    found = []
    for one in text.split(","):
        numbers = one.strip().split(":")
        if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
            raise ConfigError(
                f"`pdmux_divisions` has `{one}`, which is no PREFILL:DECODE:ROWS\n"
                "hint: 112:20:0,96:36:10 gives decodes 20 SMs, and 36 from 10 decode rows on"
            )
        found.append(Division(*map(int, numbers)))
    return tuple(found)


def multiplexed_cost(
    scenario: Scenario, config: SchedConfig, gpu: GpuSpec, build: Callable[[GpuSpec], CostModel]
) -> MultiplexedModel:
    """Return the cost model of the shares of a GPU. `build`: that of one share."""
    assert config.multiplexing is not UNSET
    return MultiplexedModel.of(config.multiplexing, gpu, build)
