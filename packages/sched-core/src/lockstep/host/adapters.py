"""Adapters of an engine: the sources of their weights, and their loader.

An adapter name has versions, whose numbers rise. The source of a version is part of the control request that registered
it, and is therefore in the journal. A restarted engine reads the weights from this source.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from lockstep.core.contract.commands import ControlAnswered
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    Control,
    ControlRequested,
    LoadAdapterControl,
    ObservedEvent,
    UnloadAdapterControl,
)
from lockstep.core.scheduler.engine import Engine
from lockstep.host.weights import Folder, read_source, stamp_of_files, write_source

logger = logging.getLogger("lockstep.host")

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
LORAS = 8  # adapter slots where adapters are named and `max_loras` is not set
LORA_OFF = "LoRA is off\nhint: start with max_loras, the number of adapters on the device"


def source_of(folder: str | Path) -> str:
    """Return the source of a PEFT folder, as text for LoadAdapterControl. Raises ConfigError for any other folder."""
    whole = Path(folder).resolve()
    return write_source(Folder(str(whole), _stamp(whole)))


def path_of(source: str) -> str:
    """Return the path of a source, or the source itself where it has no path."""
    found = read_source(source)
    return found.path if isinstance(found, Folder) else source


def folder_of(source: str) -> Path:
    """Return the folder that a source names. Raises ConfigError where its files have changed since the load."""
    found = read_source(source)
    if not isinstance(found, Folder):
        raise ConfigError(f"an adapter comes from a folder, got {source}")
    folder = Path(found.path)
    if found.stamp and _stamp(folder) != found.stamp:
        raise ConfigError(
            f"the files in {folder} have changed since the adapter was loaded\n"
            "hint: write each version into a folder of its own"
        )
    return folder


def _stamp(folder: Path) -> str:
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"`{folder}` has no {CONFIG}\nhint: give a folder as PEFT writes it, with {TENSORS}")
    return stamp_of_files([path for name in (CONFIG, TENSORS) if (path := folder / name).is_file()])


def named_folders(settings: Sequence[str]) -> dict[str, str]:
    """Return paths by adapter name, from NAME=PATH settings of a command line. Raises ConfigError."""
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, path = setting.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"`lora` needs NAME=PATH, got `{setting}`")
        if name in found:
            raise ConfigError(f"`lora` has {name} twice")
        found[name] = path
    return found


class Entry(NamedTuple):
    """An adapter that requests may name."""

    name: str
    version: int
    path: str


class KnownAdapters(NamedTuple):
    """All adapters that requests may name. Of two values of one engine, the value with the higher revision is newer."""

    revision: int = 0
    entries: tuple[Entry, ...] = ()

    def next(self, log: AdaptersLog, gone: Sequence[str]) -> KnownAdapters:
        """Return the adapters after a change. Announced adapters that are still loading stay."""
        there = {one.name: one for one in self.entries if one.name not in gone}
        there |= {one.name: one for one in log.entries()}
        return KnownAdapters(self.revision + 1, tuple(there.values()))


class AdapterLoader(Protocol):
    """Loads adapters into slots of the device."""

    def place(self, name: str, version: int, slot: int, done: Callable[[BaseException | None], None]) -> None:
        """Copy an adapter into a slot that no batch uses, while batches run; then call `done`, from any thread.

        `done` receives None or the error. After a ConfigError the slot is free again, and requests that wait for the
        adapter end with this error. Any other error ends the engine.
        """

    def forget(self, name: str, version: int | None = None) -> None:
        """Drop a name, or one version of it. No request needs it any more."""


class AdaptersLog(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The sources of a host's adapters; part of its image in snapshots."""

    sources: dict[str, dict[int, str]] = {}  # by name and version: registered versions, and older ones in use

    def fold(self, engine: Engine, event: ObservedEvent) -> tuple[str, ...]:
        """Fold an event that the engine has stepped. Returns the names that no request needs any more."""
        adapters = engine.memory.adapters
        if not adapters.present:
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

    def newest(self) -> dict[str, tuple[int, str]]:
        """Return the newest version of each name, with its source."""
        return {name: (max(versions), versions[max(versions)]) for name, versions in self.sources.items() if versions}

    def entries(self) -> tuple[Entry, ...]:
        """Return the newest version of each name, as an Entry with its path."""
        return tuple(Entry(name, version, path_of(source)) for name, (version, source) in self.newest().items())


# -------------------------------------------------------------------------------------------------- loading, unloading


class AdapterCache(AdapterLoader, Protocol):
    """Adapters in host memory, with a loader to the device."""

    def read(self, name: str, version: int, source: str) -> None:
        """Read an adapter into host memory. Raises ConfigError with every mismatch."""

    def lack(self, name: str, version: int, why: str) -> None:
        """Record that an earlier adapter cannot be read again; requests for it end with this reason."""


class AdapterHost(Protocol):
    """The interface of an engine's host for the registry; `lockstep.host.loop.RuntimeHost` implements it."""

    adapters: KnownAdapters
    adapters_log: AdaptersLog

    @property
    def engine(self) -> Engine: ...

    def ask(
        self, control: Control, answered: Callable[[Future[ControlAnswered]], object] | None = None
    ) -> Future[ControlAnswered]:
        """Send a control request; the future receives its answer. Raises EngineStopped."""

    def fail(self, message: str) -> None:
        """Report a failure of the engine to all open sinks. From any thread."""


class AdapterRegistry:
    """Loads and unloads adapters of a running engine. All methods may be called from any thread.

    Args:
        source_of: returns the source of a folder, as text for LoadAdapterControl. Raises ConfigError.
    """

    def __init__(self, host: AdapterHost, cache: AdapterCache, source_of: Callable[[str | Path], str]) -> None:
        self._host, self._cache, self._source_of = host, cache, source_of
        self._lock = threading.Lock()  # versions rise in the order of the engine's inbox
        known = host.engine.memory.adapters
        if not known.present:
            raise ConfigError(LORA_OFF)
        self._known = known

    def load(self, name: str, folder: str | Path, *, pinned: bool = False) -> int:
        """Register an adapter, or a newer version of it. Returns its version. Raises ConfigError."""
        source = self._source_of(folder)
        with self._lock:
            version = self._next_version(name)
            self._cache.read(name, version, source)
            answered = self._host.ask(LoadAdapterControl(name, version, pinned, source)).result()
            if not answered.ok:
                self._cache.forget(name, version)
                raise ConfigError(answered.message)
        return version

    def unload(self, name: str) -> None:
        """Unload an adapter; return once no request uses it. Raises ConfigError for an unknown adapter."""
        answered = self._host.ask(UnloadAdapterControl(name)).result()
        if not answered.ok:
            raise ConfigError(answered.message)

    def begin(self, sources: Mapping[str, str], *, restarted: bool) -> None:
        """Read the adapters of the previous engine and the adapters named at the start. Call it before the engine runs.

        Args:
            sources: by name, the sources of the adapters named at the start.
            restarted: the server restarted the engine. Named adapters that the engine has had before are then skipped:
                they may have been unloaded since the server started.
        Raises: ConfigError for a named adapter that cannot be read.
        """
        log = self._host.adapters_log
        before = log.newest()
        for name, versions in log.sources.items():
            for version, source in versions.items():
                try:
                    self._cache.read(name, version, source)
                except ConfigError as error:  # requests for it are rejected; other adapters are not affected
                    why = "; ".join(line.strip() for line in str(error).partition("\nhint: ")[0].splitlines())
                    logger.error("adapter %s, version %d, cannot be read again: %s", name, version, why)
                    self._cache.lack(name, version, why)
        seen = {*self._known.versions, *log.sources}
        for name in [name for name in log.sources if name not in self._known.registered]:
            del log.sources[name]  # the journal has no content, so the adapter must be registered again
            if name in before:
                self._first(name, *before[name])
        for name, source in sources.items():
            newest, there = before.get(name, (0, ""))
            if (restarted and name in seen) or there == source:
                continue
            version = max(self._next_version(name), newest + 1)
            self._cache.read(name, version, source)
            self._first(name, version, source)

    def _next_version(self, name: str) -> int:
        return self._known.versions.get(name, 0) + 1

    def _first(self, name: str, version: int, source: str) -> None:
        """Register an adapter before any request arrives, and announce it."""
        host = self._host

        def answered(future: Future[ControlAnswered]) -> None:
            if future.exception() is None and not future.result().ok:
                host.fail(f"adapter {name!r} cannot be loaded: {future.result().message}")

        host.ask(LoadAdapterControl(name, version, False, source), answered)
        others = [one for one in host.adapters.entries if one.name != name]
        host.adapters = KnownAdapters(host.adapters.revision, (*others, Entry(name, version, path_of(source))))
