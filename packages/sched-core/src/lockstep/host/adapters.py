"""Adapters of an engine: where their weights came from, and who brings them to the device.

A name is loaded in versions, which rise. Where a version came from is part of the control that made it known, and so
stands in the journal: an engine that begins again reads what it names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from lockstep.core.engine import Engine
from lockstep.core.errors import ConfigError
from lockstep.core.events import ControlRequested, LoadAdapterControl, ObservedEvent
from lockstep.host.weights import Folder, read_source, stamp_of_files, write_source

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def source_of(folder: str | Path) -> str:
    """A PEFT folder as LoadAdapterControl has it. Raises ConfigError if it is none."""
    whole = Path(folder).resolve()
    return write_source(Folder(str(whole), _stamp(whole)))


def path_of(source: str) -> str:
    """What a source is called."""
    found = read_source(source)
    return found.path if isinstance(found, Folder) else source


def folder_of(source: str) -> Path:
    """The folder that a source names. Raises ConfigError where its files are not those of then."""
    found = read_source(source)
    if not isinstance(found, Folder):
        raise ConfigError(f"an adapter comes from a folder, got {source}")
    folder = Path(found.path)
    if found.stamp and _stamp(folder) != found.stamp:
        raise ConfigError(
            f"the files in {folder} are not those that were there when the adapter was loaded\n"
            "hint: write each version into a folder of its own"
        )
    return folder


def _stamp(folder: Path) -> str:
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"`{folder}` has no {CONFIG}\nhint: give a folder as PEFT writes it, with {TENSORS}")
    return stamp_of_files([path for name in (CONFIG, TENSORS) if (path := folder / name).is_file()])


class AdapterHands(Protocol):
    """What a host can do about adapters."""

    def place(self, name: str, version: int, slot: int, done: Callable[[BaseException | None], None]) -> None:
        """Copy into a slot that no batch uses, beside whatever runs; then call back, from any thread.

        With a ConfigError the slot is free again, and requests that wait end with it; another error ends the engine.
        """

    def forget(self, name: str, version: int | None = None) -> None:
        """Nobody needs this name, or this version of it, any more."""


class AdaptersLog(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a host knows of its adapters; part of what it keeps in snapshots."""

    sources: dict[str, dict[int, str]] = {}  # by name and version: those registered, and older ones that may be in use

    def fold(self, engine: Engine, event: ObservedEvent) -> tuple[str, ...]:
        """Follow an event that the engine has stepped. Returns names that nobody needs any more."""
        adapters = engine.memory.adapters
        if adapters is None:
            return ()
        if isinstance(event, ControlRequested) and isinstance(event.control, LoadAdapterControl):
            name, version = event.control.adapter, event.control.version
            known = adapters.registered.get(name)
            if known is not None and known.version == version and event.control.source:
                self.sources.setdefault(name, {}).setdefault(version, event.control.source)
        if len(self.sources) <= len(adapters.registered):
            return ()
        gone = tuple(name for name in self.sources if name not in adapters.registered)
        for name in gone:
            del self.sources[name]
        return gone

    def newest(self) -> dict[str, str]:
        """Where the newest version of each name came from."""
        return {name: versions[max(versions)] for name, versions in self.sources.items() if versions}
