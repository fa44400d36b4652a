"""Simulated engines whose model answers in blocks: their scheduler settings, and the passes of their blocks."""

from __future__ import annotations

from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.host.block_settings import block_settings
from lockstep.sim.host.blocks import BlockPassModel
from lockstep.sim.scenario.scenario import Scenario


def with_blocks(given: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Return the settings of an engine, given those of its profile and options. Raises ConfigError."""
    block = scenario.diffusion_block
    if block is None:
        if scenario.diffusion_iterations is not None:
            raise ConfigError(
                f"`diffusion_iterations` is `{scenario.diffusion_iterations}`, but the model answers token by token\n"
                "hint: --diffusion-block 32, or leave out --diffusion-iterations"
            )
        return given
    return block_settings(given, scenario.settings, block)


def passes_of(scenario: Scenario) -> BlockPassModel | None:
    """Return the passes of blocks; None: the model answers token by token. Raises ConfigError."""
    if scenario.diffusion_block is None:
        return None
    return BlockPassModel.of(scenario.diffusion_iterations, scenario.diffusion_block, scenario.seed)
