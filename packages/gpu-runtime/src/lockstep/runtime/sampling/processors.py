"""Logit processors that installed packages bring, found by name. Never code from a client.

A package names a factory under the entry-point group `lockstep.logit_processors`:

    [project.entry-points."lockstep.logit_processors"]
    no-digits = "my_package:NoDigits"

The operator enables it by that name when the engine starts; a request can then ask for it by the same name. A processor
changes the logits as the model gave them, before bias, masks and penalties, so it cannot reopen what a mask forbids.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Protocol, cast

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError

GROUP = "lockstep.logit_processors"


class LogitProcessor(Protocol):
    """Changes logits of the rows that asked for it. Must not wait for the device, and must treat each row alone."""

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return logits, changed in place or new.

        Args:
            logits: float32 [chosen, vocab]; rows: int32 [chosen], of the request table; positions: int64 [chosen], of
            the tokens about to be drawn. All on the device.
        Returns: float32 [chosen, vocab].
        """
        ...


class LogitProcessorFactory(Protocol):
    """What an entry point names."""

    def __call__(self, vocab: int, device: torch.device) -> LogitProcessor:
        """Make the processor of one engine."""
        ...


def load(names: Iterable[str], vocab: int, device: torch.device) -> dict[str, LogitProcessor]:
    """The enabled processors by name, in the order given, which is the order in which they are applied.

    Raises: ConfigError if a name is given twice, is brought by no installed package or by two, or cannot be loaded.
    """
    found = list(entry_points(group=GROUP))
    processors: dict[str, LogitProcessor] = {}
    for name in names:
        givers = [entry for entry in found if entry.name == name]
        if name in processors:
            raise ConfigError(f"`logit_processors` names `{name}` twice\nhint: name each once")
        if not givers:
            known = ", ".join(sorted({entry.name for entry in found})) or "none"
            raise ConfigError(
                f"`logit_processors` must be brought by an installed package, got `{name}`; installed: {known}\n"
                f"hint: install the package that has it under the entry points {GROUP}"
            )
        if len(givers) > 1:
            raise ConfigError(
                f"`logit_processors`: `{name}` is brought by {' and by '.join(sorted(entry.value for entry in givers))}\n"
                "hint: uninstall one of them"
            )
        try:
            factory = cast("LogitProcessorFactory", givers[0].load())
            processors[name] = factory(vocab, device)
        except Exception as error:
            raise ConfigError(
                f"`logit_processors`: `{name}` cannot be made from {givers[0].value}: {error!r}\n"
                "hint: its package may be broken, or made for another version"
            ) from error
    return processors
