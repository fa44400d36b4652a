"""The engine of a scenario: its costs as a calibration, and the scheduler settings that it implies.

An engine that is named implies its scheduler settings, unless a profile is named. Where no engine is named, costs are
those of DEFAULT under the scheduler of Lockstep: those of `lockstep.vllm` in vLLM.
"""

from __future__ import annotations

from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.profiles import DEFAULT_PROFILE, profile_settings
from lockstep.sim.catalogue import load_calibration, load_engine
from lockstep.sim.cost import UNCALIBRATED, Calibration, GpuSpec, ModelSpec
from lockstep.sim.cost.engines import DEFAULT, LARGE_GPU_BYTES, NONE
from lockstep.sim.cost.models import checked_weights_dtype
from lockstep.sim.scenario.scenario import Scenario


def calibration_of(scenario: Scenario, model: ModelSpec, gpu: GpuSpec) -> Calibration:
    """Return the calibration of the scenario's times: that of its file, or the costs of its engine.

    Raises: CatalogueError for an unknown engine, CalibrationError for an unknown calibration, ConfigError if the
        calibration is of another engine than the named one.
    """
    if scenario.calibration is not None:
        calibration = load_calibration(scenario.calibration)
        named = (scenario.engine or calibration.engine).partition("@")[0]
        if named != calibration.engine:
            raise ConfigError(
                f"`engine` is `{scenario.engine}`, but `calibration` {scenario.calibration} has the costs of "
                f"{calibration.engine}\nhint: leave out --engine, or --calibration"
            )
        return calibration
    if scenario.engine == NONE:
        return UNCALIBRATED
    spec, release = load_engine(scenario.engine or DEFAULT)
    precision = checked_weights_dtype(model, scenario.weights_dtype)
    return spec.calibration(model, gpu.name, precision, release)


def profile_of(scenario: Scenario) -> str:
    """Return the name of the scenario's profile: the given one, else that of its engine if it is named."""
    if scenario.profile is not None:
        return scenario.profile
    if scenario.engine is None or scenario.engine == NONE:
        return DEFAULT_PROFILE
    return load_engine(scenario.engine)[0].profile


def scheduling(scenario: Scenario, gpu: GpuSpec) -> dict[str, Any]:
    """Return the scheduler settings that the profile and the engine imply; options of the scenario override them."""
    settings = profile_settings(profile_of(scenario))
    if scenario.engine is None or scenario.engine == NONE or scenario.profile is not None:
        return settings
    spec, _ = load_engine(scenario.engine)
    settings |= spec.settings
    if gpu.memory_bytes >= LARGE_GPU_BYTES:
        settings |= spec.large_gpu_settings
    return settings
