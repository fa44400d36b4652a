"""Logit processors from installed packages, found by name. Code from a client never runs.

A package names a factory under the entry-point group `lockstep.logit_processors`:

    [project.entry-points."lockstep.logit_processors"]
    no-digits = "my_package:NoDigits"

The operator enables it by that name when the engine starts. A request can then select it by the same name, with its own
arguments: a JSON object, which is part of the request and so of the journal. A processor changes the model's logits
before bias, masks and penalties, so it cannot allow a token that a mask forbids. docs/sampling.md has an example.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import SamplingParams

GROUP = "lockstep.logit_processors"

Arguments = Mapping[str, Any]
"""The arguments of a processor in a request: a JSON object."""


class LogitProcessor(Protocol):
    """Changes logits of the rows that selected it. Must not wait for the device, and must treat each row separately."""

    def check(self, arguments: Arguments) -> None:
        """Raise ValueError, with a sentence for the client, for invalid arguments. The request is then rejected."""

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor, arguments: Sequence[Arguments]) -> Tensor:
        """Return logits, changed in place or new. A row with a NaN in the result ends with reason "invalid".

        Args:
            logits: float32 [chosen, vocab]; rows: int32 [chosen], of the request table; positions: int64 [chosen], of
                the tokens about to be drawn. All on the device.
            arguments: of each chosen row, on the CPU; they passed `check`.
        Returns: float32 [chosen, vocab].
        """
        ...


class LogitProcessorFactory(Protocol):
    """The object that an entry point names."""

    def __call__(self, vocab: int, device: torch.device) -> LogitProcessor:
        """Make the processor of one engine."""
        ...


def load(names: Iterable[str], vocab: int, device: torch.device) -> dict[str, LogitProcessor]:
    """Return the enabled processors by name, in the given order, in which they are applied.

    Raises: ConfigError if a name is given twice, is in no installed package or in two, or cannot be loaded.
    """
    processors: dict[str, LogitProcessor] = {}
    for name in names:
        if name in processors:
            raise ConfigError(f"`logit_processors` names `{name}` twice\nhint: name each once")
        entry = _entry(name)
        try:
            factory = cast("LogitProcessorFactory", entry.load())
            processors[name] = factory(vocab, device)
        except Exception as error:
            raise ConfigError(
                f"`logit_processors`: `{name}` cannot be made from {entry.value}: {error!r}\n"
                "hint: its package may be broken, or made for another version"
            ) from error
    return processors


def versions(names: Iterable[str]) -> str:
    """Return the packages of these processors, for a journal's header: "name (package version), ...".

    Raises: ConfigError if a name is in no installed package, or in two.
    """
    return ", ".join(f"{name} ({_giver(_entry(name))})" for name in names)


def asked(sampling: SamplingParams | None) -> dict[str, Arguments]:
    """Return the processors that a request selects: arguments by name.

    Raises: ConfigError for arguments that are not a JSON object.
    """
    wanted: dict[str, Arguments] = {}
    for name, text in sampling.logit_processors if sampling is not None else ():
        try:
            arguments = json.loads(text or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ConfigError(f"`logit_processors`: the arguments of `{name}` must be a JSON object, got `{text}`")
        wanted[name] = arguments
    return wanted


def check_asked(sampling: SamplingParams | None, enabled: Mapping[str, LogitProcessor]) -> None:
    """Raise ConfigError if a request selects a processor that is not enabled, or one that refuses its arguments."""
    for name, arguments in asked(sampling).items():
        if name not in enabled:
            raise ConfigError(
                f"`logit_processors` names `{name}`, which is not enabled here; enabled: {', '.join(enabled) or 'none'}"
                "\nhint: the operator enables it when the engine starts"
            )
        try:
            enabled[name].check(arguments)
        except Exception as error:  # ValueError by contract; other errors of the package must not end the engine either
            raise ConfigError(f"`logit_processors`: `{name}` refuses its arguments: {error}") from error


def _entry(name: str) -> EntryPoint:
    found = list(entry_points(group=GROUP))
    givers = [entry for entry in found if entry.name == name]
    if not givers:
        known = ", ".join(sorted({entry.name for entry in found})) or "none"
        raise ConfigError(
            f"`logit_processors` must be brought by an installed package, got `{name}`; installed: {known}\n"
            f"hint: install the package that has it under the entry points {GROUP}"
        )
    if len(givers) > 1:
        both = " and by ".join(sorted(entry.value for entry in givers))
        raise ConfigError(f"`logit_processors`: `{name}` is brought by {both}\nhint: uninstall one of them")
    return givers[0]


def _giver(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"
