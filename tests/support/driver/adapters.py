"""LoRA adapters: loads, unloads, and answers that come late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lockstep.core.contract.commands import LoadAdapter, Step
from lockstep.core.contract.events import (
    AdapterEvicted,
    AdapterLoaded,
    LoadAdapterControl,
    Observed,
    UnloadAdapterControl,
)
from tests.support.driver.actions import ADAPTERS
from tests.support.driver.control import ControlPiece
from tests.support.driver.piece import Piece, Subject


class AdapterPiece(Piece):
    """Adapters on the device and their loads."""

    def __init__(self, subject: Subject, control: ControlPiece) -> None:
        super().__init__(subject)
        self.control = control
        self.voided_loads: list[AdapterLoaded] = []  # answers to loads of a device that was lost
        self.evicted: set[tuple[str, int]] = set()  # names and versions

    def actions(self) -> dict[str, Callable[..., None]]:
        return {
            "load_adapter": self.load_adapter,
            "unload_adapter": self.unload_adapter,
            "adapter_loaded": self.adapter_loaded,
            "late_load": self.late_load,
        }

    def load_adapter(self, index: int, newer: int, pinned: bool) -> None:
        """Load an adapter: its version again (0), a newer one (1), or an older one (-1)."""
        name = ADAPTERS[index]
        self.control.ask(LoadAdapterControl(name, self.subject.kv.versions.get(name, 1) + newer, pinned))

    def unload_adapter(self, index: int) -> None:
        """Unload an adapter, perhaps while it is loaded."""
        if any(load.adapter == ADAPTERS[index] for load in self.subject.kv.loads):
            self.mark("adapter unloaded while loading")
        self.control.ask(UnloadAdapterControl(ADAPTERS[index]))

    def adapter_loaded(self, choice: int, error: str = "") -> None:
        """A load ends, not necessarily the oldest."""
        if loads := self.subject.kv.loads:
            load = loads[choice % len(loads)]
            self.mark("adapter load failed" if error else "adapter loaded")
            generation = self.engine.generation
            self.subject.fold(AdapterLoaded(self.subject.now_us, load.adapter, load.version, error, generation))

    def late_load(self) -> None:
        """A load from before a restart ends after all; the answer is void."""
        if self.voided_loads:
            self.mark("load of an older generation ignored")
            self.subject.fold(msgspec.structs.replace(self.voided_loads.pop(0), time_us=self.subject.now_us))

    def lost(self) -> None:
        """The device is lost, and every load that is under way."""
        self.voided_loads += [
            AdapterLoaded(0, load.adapter, load.version, generation=self.engine.generation)
            for load in self.subject.kv.loads
        ]

    # ---------------------------------------------------------------------------------------------------------- checks

    def _withdrawals(self) -> list[Any]:
        adapters = self.engine.memory.adapters
        return list(adapters.withdrawals)

    def before(self, event: Observed) -> None:
        self._unloading = self._withdrawals()

    def decided(self) -> dict[type, Callable[[Any, Step], None]]:
        return {AdapterEvicted: lambda event, step: self.evicted.add((event.adapter, event.version))}

    def commands(self) -> dict[type, Callable[[Any], None]]:
        return {LoadAdapter: self._loading}

    def _loading(self, command: LoadAdapter) -> None:
        if (command.adapter, command.version) in self.evicted:
            self.mark("adapter evicted between two uses")

    def checked(self, event: Observed, step: Step) -> None:
        if self._unloading and self._unloading != self._withdrawals():
            self.mark("unload waited for users")
