"""Adapters (LoRA): which are registered, which are on the device, and which requests use them.

An adapter is a name and a version. Registered ones lie in host memory; `max_loras` *slots* on the device hold those
that run. Requests without an adapter run on BASE, which needs no slot but counts as one of those that run together.

    slot   free --needed--> loading --AdapterLoaded--> loaded --needed by another, not in use--> loading
                              '--error--> free            '--withdrawn, restart--> free

**Use.** A row uses the adapter of its holder until it is free again, so work in flight counts. What is used is neither
evicted nor withdrawn, and never are there more than `max_loras` adapters in use.

**Loading.** Whatever happens, slots that can be had are given to pinned adapters and to those that the line waits for,
the first of the line first. So it does not matter whether the request that asked is still there when a load ends. A
slot that a request further ahead waits for is not taken for those behind; otherwise the least recently used one is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import msgspec

from lockstep.core.contract.commands import ControlAnswered, LoadAdapter, RowTaken, Step
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import AdapterEvicted, AdapterLoaded, LoadAdapterControl
from lockstep.core.requests.table import BASE, VERSION_MARK, Adapter
from lockstep.core.requests.validation import RequestRefused

LOOKAHEAD_REQUESTS = 64
"""Waiting requests, from the head of the queue, with adapters that are loaded ahead of their turn."""


NO_SLOT = -1


class Slot:
    """A place for one adapter on the device."""

    __slots__ = ("adapter", "loading", "used")

    def __init__(self, adapter: Adapter | None = None, loading: bool = False, used: int = 0) -> None:
        self.adapter = adapter  # None: the slot is free
        self.loading = loading
        self.used = used  # when it was last used, as a count of uses; lowest is evicted first


class Registered(NamedTuple):
    """The newest version of an adapter, and whether it stays on the device."""

    version: int
    pinned: bool


class Adapters:
    """The adapters of one engine."""

    present: ClassVar[bool] = True  # False: LoRA is off

    def __init__(self, slots: int, *, base_counts: bool = True) -> None:
        self.base_counts = base_counts  # whether BASE is one of the adapters in use that `slots` limits
        self.slots = [Slot() for _ in range(slots)]
        self.registered: dict[str, Registered] = {}
        self.versions: dict[str, int] = {}  # newest of every adapter that ever was: its KV may still be cached
        self.withdrawals: dict[str, list[int]] = {}  # by name: control ids that wait for its last user to end
        self.rows: dict[int, Adapter] = {}  # what each row runs on that is not free
        self.users: dict[Adapter, int] = {}  # rows of each adapter in use
        self.uses = 0

    # ------------------------------------------------------------------------------------------------- what is known

    def named(self, name: str) -> Adapter:
        """What a request that asks for this name runs on: the newest version. Raises Refused if there is none."""
        if not name:
            return BASE
        if name in self.withdrawals:
            raise RequestRefused("bad_request", f"`adapter` {name!r} is being unloaded")
        if name not in self.registered:
            raise RequestRefused("bad_request", f"`adapter` {name!r} is not loaded; load it first")
        return Adapter(name, self.registered[name].version)

    def register(self, control: LoadAdapterControl) -> str:
        """Make an adapter, a newer version of it, or another pin known. Returns why not, or nothing."""
        name, version = control.adapter, control.version
        if not name:
            return "`adapter` must have a name"
        if VERSION_MARK in name:
            return "`adapter` holds a zero character, which separates it from what the core adds"
        if name in self.withdrawals:
            return f"{name!r} is being unloaded; load it once that was answered"
        newest = self.versions.get(name, version)
        if version < newest or (version == newest and name in self.versions and name not in self.registered):
            return f"{name!r} was loaded in version {newest} before; versions rise, got {version}"
        pins, most = sum(one.pinned for other, one in self.registered.items() if other != name), len(self.slots) - 1
        if control.pinned and pins >= most:
            return f"{pins} of at most {most} adapters are pinned already (`max_loras` is {most + 1})"
        self.registered[name] = Registered(version, control.pinned)
        self.versions[name] = version
        return ""

    def withdraw(self, name: str, control_id: int) -> str:
        """Forget an adapter once it is not in use; `end_withdrawals` answers then. Returns why not, or nothing."""
        if name not in self.registered:
            return f"{name!r} is not loaded"
        self.withdrawals.setdefault(name, []).append(control_id)
        return ""

    # ----------------------------------------------------------------------------------------------------------- use

    def has_place_for(self, adapter: Adapter) -> bool:
        """Whether a request on this adapter may start: it is on the device, and not one too many."""
        if adapter == BASE and not self.base_counts:
            return True
        if adapter != BASE and self.slot_of(adapter) == NO_SLOT:
            return False
        return adapter in self.users or len(self.users) < len(self.slots)

    def slot_of(self, adapter: Adapter) -> int:
        """The slot in which the adapter is ready to run; NO_SLOT for BASE and for what is not on the device."""
        for i, slot in enumerate(self.slots):
            if slot.adapter == adapter and not slot.loading:
                return i
        return NO_SLOT

    def described(self, taken: RowTaken, adapter: Adapter) -> RowTaken:
        """What the executor receives about a row that begins to use an adapter."""
        return msgspec.structs.replace(
            taken, adapter=adapter.name, adapter_version=adapter.version, adapter_slot=self.slot_of(adapter)
        )

    def take(self, row: int, adapter: Adapter) -> None:
        """A row begins to use an adapter."""
        self.rows[row] = adapter
        if self.counts(adapter):
            self.users[adapter] = self.users.get(adapter, 0) + 1

    def counts(self, adapter: Adapter) -> bool:
        """Whether a row on this adapter counts against the adapters that may be in use at once."""
        return self.base_counts or adapter != BASE

    def give_back(self, row: int) -> None:
        """A row came free."""
        adapter = self.rows.pop(row)
        if not self.counts(adapter):
            return
        self.users[adapter] -= 1
        if self.users[adapter]:
            return
        del self.users[adapter]
        self.uses += 1
        for slot in self.slots:
            if slot.adapter == adapter:
                slot.used = self.uses

    # ------------------------------------------------------------------------------------------------------- the slots

    def loaded(self, event: AdapterLoaded) -> Adapter:
        """A load ended; one that failed costs the adapter its pin, or it would be tried for ever.

        Raises ContractError, changing nothing, for a load that was not ordered.
        """
        adapter = Adapter(event.adapter, event.version)
        for slot in self.slots:
            if slot.adapter == adapter and slot.loading:
                slot.loading = False
                if event.error:
                    slot.adapter = None
                    if self.registered[adapter.name] == (adapter.version, True):
                        self.registered[adapter.name] = Registered(adapter.version, False)
                return adapter
        raise ContractError(f"{adapter.name!r} version {adapter.version} was loaded, but no slot waits for it")

    def load_for(self, line: list[Adapter], step: Step) -> None:
        """Load what is wanted into slots that can be had. `line`: what requests wait for, first turn first."""
        wanted: dict[Adapter, None] = {}
        for adapter in (*self._pinned(), *line):
            if adapter == BASE or adapter in wanted:
                continue
            wanted[adapter] = None
            if any(slot.adapter == adapter for slot in self.slots):
                continue
            number = self._slot_to_be_had(wanted)
            if number == NO_SLOT:
                return
            self._load(adapter, number, step)

    def _pinned(self) -> list[Adapter]:
        return [
            Adapter(name, known.version)
            for name, known in self.registered.items()
            if known.pinned and name not in self.withdrawals
        ]

    def end_withdrawals(self, live: Iterable[Adapter], step: Step) -> None:
        """Answer withdrawals that no request delays any more. `live`: what any request that has not ended needs."""
        if not self.withdrawals:
            return
        in_use = {adapter.name for adapter in live} | {adapter.name for adapter in self.users}
        in_use |= {slot.adapter.name for slot in self.slots if slot.adapter is not None and slot.loading}
        for name in [name for name in self.withdrawals if name not in in_use]:
            del self.registered[name]
            for slot in self.slots:
                if slot.adapter is not None and slot.adapter.name == name:
                    slot.adapter = None
            for control_id in self.withdrawals.pop(name):
                step.commands.append(ControlAnswered(control_id, True))

    def _slot_to_be_had(self, wanted: dict[Adapter, None]) -> int:
        """A free slot, else the one used longest ago with an adapter that is not in use and not needed further
        ahead."""
        best = NO_SLOT
        for i, slot in enumerate(self.slots):
            if slot.adapter is None:
                return i
            idle = not slot.loading and slot.adapter not in self.users and slot.adapter not in wanted
            if idle and (best == NO_SLOT or slot.used < self.slots[best].used):
                best = i
        return best

    def _load(self, adapter: Adapter, number: int, step: Step) -> None:
        slot = self.slots[number]
        if slot.adapter is not None:
            step.decided.append(AdapterEvicted(step.time_us, slot.adapter.name, slot.adapter.version, number))
        self.uses += 1
        self.slots[number] = Slot(adapter, loading=True, used=self.uses)
        step.commands.append(LoadAdapter(adapter.name, adapter.version, number))

    @property
    def loading(self) -> bool:
        """Whether a load is awaited."""
        return any(slot.loading for slot in self.slots)

    def void(self) -> None:
        """The device's memory is gone."""
        self.slots = [Slot() for _ in self.slots]

    # -------------------------------------------------------------------------------------------------------- snapshot

    def dump(self) -> dict[str, Any] | None:
        """The state in builtins; None where LoRA is off."""
        state: dict[str, Any] = {
            "slots": [(slot.adapter, slot.loading, slot.used) for slot in self.slots],
            "registered": self.registered,
            "versions": self.versions,
            "withdrawals": self.withdrawals,
            "rows": list(self.rows.items()),
            "uses": self.uses,
        }
        return state if self.base_counts else state | {"base_counts": False}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Adapters:
        """The adapters that `dump` described."""
        adapters = cls(0, base_counts=state.get("base_counts", True))
        adapters.slots = [
            Slot(Adapter(*adapter) if adapter is not None else None, loading, used)
            for adapter, loading, used in state["slots"]
        ]
        adapters.registered = {name: Registered(*known) for name, known in state["registered"].items()}
        adapters.versions = state["versions"]
        adapters.withdrawals = state["withdrawals"]
        for row, adapter in state["rows"]:
            adapters.take(row, Adapter(*adapter))
        adapters.uses = state["uses"]
        return adapters


class NoAdapters(Adapters):
    """Adapters of an engine without LoRA: every request runs on BASE, and rows use nothing."""

    present = False

    def __init__(self) -> None:
        super().__init__(0)

    def named(self, name: str) -> Adapter:
        """BASE, whatever the name is: validation refuses the others."""
        return BASE

    def has_place_for(self, adapter: Adapter) -> bool:
        """True: BASE needs no slot."""
        return True

    def described(self, taken: RowTaken, adapter: Adapter) -> RowTaken:
        """The row as it is."""
        return taken

    def end_withdrawals(self, live: Iterable[Adapter], step: Step) -> None:
        """Nothing is ever withdrawn."""

    def load_for(self, line: list[Adapter], step: Step) -> None:
        """Nothing is ever loaded."""

    def dump(self) -> None:
        """No part of a snapshot."""


def adapters_of(state: dict[str, Any] | None) -> Adapters:
    """The adapters of a snapshot."""
    return NoAdapters() if state is None else Adapters.load(state)
