"""Functions of installed packages that operators call by name, with POST /collective_rpc.

A package names a function under the entry-point group `lockstep.rpc`:

    [project.entry-points."lockstep.rpc"]
    warm = "my_package:warm"

The operator enables it with `--rpc-function warm`. It is called in the engine process, in a thread of its own beside
the scheduler, with the EngineUnit and the arguments of the body; its result is sent as JSON. With --tp it runs in the
process of rank 0 only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from lockstep.core.contract.errors import ConfigError

log = logging.getLogger("lockstep.engine")

GROUP = "lockstep.rpc"
RESULT_BYTES_MAX = 16 * 2**20

Functions = Mapping[str, Callable[..., Any]]


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that no installed package provides, or several do."""
    for name in names:
        _entry(name)


def load(names: Iterable[str]) -> Functions:
    """Return the functions by name. Raises ConfigError for one that is not installed, or cannot be imported."""
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        entry = _entry(name)
        try:
            function = entry.load()
        except Exception as error:
            raise ConfigError(
                f"`rpc_functions`: `{name}` cannot be imported from {entry.value}: {error!r}\n"
                "hint: its package may be broken, or made for another version"
            ) from error
        if not callable(function):
            raise ConfigError(
                f"`rpc_functions`: `{name}` must name a function, got {entry.value}, a {type(function).__name__}\n"
                f"hint: correct the entry point in the group {GROUP}"
            )
        found[name] = function
    return found


# mechanism: rpc (decided)
def call(functions: Functions, name: str, arguments: bytes, unit: Any) -> str:
    """Call a function, and return its result as JSON.

    Args:
        arguments: JSON, a list with the list of positional arguments and the object of named ones.
        unit: the EngineUnit, its first argument.
    Raises: ConfigError if it is not enabled, fails, or its result is no JSON or too large.
    """
    if name not in functions:
        enabled = ", ".join(functions) or "none"
        raise ConfigError(f"`method` is {name[:60]!r}, which is not enabled here; enabled: {enabled}")
    positional, named = msgspec.json.decode(arguments)
    try:
        result = msgspec.json.encode(functions[name](unit, *positional, **named))
    except Exception as error:  # an error of the function ends this call only
        log.exception("the function `%s` of /collective_rpc failed", name)
        raise ConfigError(f"`{name}` failed: {type(error).__name__}: {error}") from error
    if len(result) > RESULT_BYTES_MAX:
        raise ConfigError(f"the result of `{name}` has {len(result)} bytes, at most {RESULT_BYTES_MAX} are sent")
    return result.decode()


def _entry(name: str) -> EntryPoint:
    found = entry_points(group=GROUP)
    matching = [entry for entry in found if entry.name == name]
    if not matching:
        known = ", ".join(sorted(entry.name for entry in found)) or "none"
        raise ConfigError(
            f"`rpc_functions` must be provided by an installed package, got `{name}`; installed: {known}\n"
            f"hint: install the package that names it in the entry-point group {GROUP}"
        )
    if len(matching) > 1:
        both = " and by ".join(sorted(entry.value for entry in matching))
        raise ConfigError(f"`rpc_functions`: `{name}` is provided by {both}\nhint: uninstall one of them")
    return matching[0]
