"""Policies of the waiting line that installed packages bring: found by name, held to a version.

A package names its policy under the entry-point group `lockstep.policies`; `schedule_policy` picks it by that name.
Which one decided is part of a journal: SchedConfig, and so the header, keeps the name and the version of the package,
and an engine is built only with that very version. How to write one: docs/policies.md.

Looking at what is installed is I/O, which the core does nowhere else but in its command line. It happens when settings
are made and when an engine is built, never in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from lockstep.core.contract.errors import ConfigError

GROUP = "lockstep.policies"


def installed_version(name: str, own: Sequence[str]) -> str:
    """The version of the package that brings policy `name`, which is none of the core's `own`.

    Raises: ConfigError if no installed package brings it, or several do.
    """
    return _version(_entry(name, own=own))


def load(name: str, version: str) -> Callable[..., Any]:
    """The policy. Raises ConfigError if it is not installed in this version, or cannot be imported."""
    entry = _entry(name, version)
    if _version(entry) != version:
        raise ConfigError(
            f"`schedule_policy` {name} is asked for in version {version}, but {_giver(entry)} is installed\n"
            f"hint: what it decided can be repeated only by the same version: install {_package(entry)}=={version}"
        )
    try:
        policy = entry.load()
    except Exception as error:
        raise ConfigError(
            f"`schedule_policy` {name} of {_giver(entry)} cannot be loaded from {entry.value}: {error!r}"
        ) from error
    if not callable(policy):
        raise ConfigError(
            f"`schedule_policy` {name} of {_giver(entry)}: {entry.value} is no function but {type(policy).__name__}"
        )
    return cast("Callable[..., Any]", policy)


def _entry(name: str, version: str = "", own: Sequence[str] = ()) -> EntryPoint:
    found = entry_points(group=GROUP)
    givers = [entry for entry in found if entry.name == name]
    if not givers and version:
        raise ConfigError(
            f"`schedule_policy` {name} is asked for in version {version}, but no installed package brings it\n"
            f"hint: install the package that had it under the entry points {GROUP}"
        )
    if not givers:
        brought = sorted(entry.name for entry in found)
        known = ", ".join((*own, *brought))
        raise ConfigError(
            f"`schedule_policy` must be one of {known}, got `{name}`\n"
            f"hint: installed packages bring more, under the entry points {GROUP}; see docs/policies.md"
        )
    if len(givers) > 1:
        raise ConfigError(
            f"`schedule_policy` {name} is brought by {' and by '.join(sorted(map(_giver, givers)))}\n"
            "hint: uninstall one of them"
        )
    return givers[0]


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "its package"


def _version(entry: EntryPoint) -> str:
    return entry.dist.version if entry.dist is not None else "unknown"


def _giver(entry: EntryPoint) -> str:
    return f"{_package(entry)} {_version(entry)}"
