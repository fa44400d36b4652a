"""Policies of the waiting queue from installed packages, found by name and bound to a version.

A package registers its policy in the entry-point group `lockstep.policies`; `schedule_policy` selects it by that name.
The policy of a run is part of its journal: SchedConfig, and so the header, contains its name and the version of its
package, and an engine is built only with exactly that version. docs/policies.md describes how to write a policy.

Searching the installed packages is I/O. The core does it only here and in its command line: when settings are created
and when an engine is built, never in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from lockstep.core.contract.errors import ConfigError

GROUP = "lockstep.policies"


def installed_version(name: str, own: Sequence[str]) -> str:
    """Return the version of the package that provides policy `name`, which is none of the core's `own`.

    Raises: ConfigError if no installed package provides it, or several do.
    """
    return _version(_entry(name, own=own))


def load(name: str, version: str) -> Callable[..., Any]:
    """Return the policy. Raises ConfigError if it is not installed in this version, or cannot be imported."""
    entry = _entry(name, version)
    if _version(entry) != version:
        raise ConfigError(
            f"`schedule_policy` {name} is required in version {version}, but {_provider(entry)} is installed\n"
            f"hint: only the same version repeats its decisions: install {_package(entry)}=={version}"
        )
    try:
        policy = entry.load()
    except Exception as error:
        raise ConfigError(
            f"`schedule_policy` {name} of {_provider(entry)} cannot be loaded from {entry.value}: {error!r}"
        ) from error
    if not callable(policy):
        raise ConfigError(
            f"`schedule_policy` {name} of {_provider(entry)}: {entry.value} is no function but {type(policy).__name__}"
        )
    return cast("Callable[..., Any]", policy)


def _entry(name: str, version: str = "", own: Sequence[str] = ()) -> EntryPoint:
    found = entry_points(group=GROUP)
    matching = [entry for entry in found if entry.name == name]
    if not matching and version:
        raise ConfigError(
            f"`schedule_policy` {name} is required in version {version}, but no installed package provides it\n"
            f"hint: install the package that provided it in the entry-point group {GROUP}"
        )
    if not matching:
        installed = sorted(entry.name for entry in found)
        known = ", ".join((*own, *installed))
        raise ConfigError(
            f"`schedule_policy` must be one of {known}, got `{name}`\n"
            f"hint: packages provide more in the entry-point group {GROUP}; see docs/policies.md"
        )
    if len(matching) > 1:
        raise ConfigError(
            f"`schedule_policy` {name} is provided by {' and by '.join(sorted(map(_provider, matching)))}\n"
            "hint: uninstall one of them"
        )
    return matching[0]


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "its package"


def _version(entry: EntryPoint) -> str:
    return entry.dist.version if entry.dist is not None else "unknown"


def _provider(entry: EntryPoint) -> str:
    return f"{_package(entry)} {_version(entry)}"
