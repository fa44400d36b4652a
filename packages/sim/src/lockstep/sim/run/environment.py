"""Settings of a simulation that LOCKSTEP_* variables override."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.contract.config import OVERLAP_DEPTH_MAX
from lockstep.core.contract.errors import ConfigError
from lockstep.sim.host.watch import LEVELS

ENVIRONMENT_SETTINGS = {"LOCKSTEP_OVERLAP": "overlap_depth", "LOCKSTEP_RETRACT_EVERY": "retract_every"}


def environment_settings(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the settings that LOCKSTEP_* variables override. Raises ConfigError for a value that is not valid."""
    settings = {}
    for variable, name in ENVIRONMENT_SETTINGS.items():
        text = environ.get(variable)
        if text is None:
            continue
        if not text.strip().isascii() or not text.strip().isdigit():
            raise ConfigError(f"{variable} must be a whole number of at least 0, got `{text}`\nhint: unset it")
        settings[name] = int(text)
        if name == "overlap_depth" and settings[name] > OVERLAP_DEPTH_MAX:
            raise ConfigError(f"{variable} must be 0, 1 or 2, got `{text}`\nhint: unset it")
    return settings


def debug_level(environ: Mapping[str, str]) -> int:
    """Return the level of LOCKSTEP_DEBUG, 0 to 4. Raises ConfigError for other values."""
    text = environ.get("LOCKSTEP_DEBUG", "0")
    if text not in map(str, LEVELS):
        raise ConfigError(f"LOCKSTEP_DEBUG must be 0 to {LEVELS[-1]}, got `{text}`\nhint: 1 prints a line per step")
    return int(text)
