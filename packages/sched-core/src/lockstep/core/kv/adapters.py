"""Adapters (LoRA): which are registered, which are on the device, and which requests use them.

An adapter is a name and a version. Registered adapters lie in host memory. The device has `max_loras` *slots* for the
adapters in use. Requests without an adapter run on BASE, which needs no slot but counts as an adapter in use. With
`base_beside_loras` it does not count, and requests on BASE always have a place.

    slot   free --needed--> loading --AdapterLoaded--> loaded --needed by another, not in use--> loading
                              '--error--> free            '--withdrawn, restart--> free

**Use.** A row uses the adapter of its holder until the row is free, so work in flight counts. An adapter in use is
neither evicted nor withdrawn. At most `max_loras` adapters are in use.

**Loading.** After every event, available slots are loaded with pinned adapters and with the adapters of waiting
requests, in the order of the waiting queue. So a load does not depend on the request that caused it. The slot of an
adapter that an earlier request needs is never taken for a later one; otherwise the least recently used slot is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import msgspec

from lockstep.core.contract.checks import counts_of, fail, same
from lockstep.core.contract.commands import ControlAnswered, LoadAdapter, RowTaken, Step
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import AdapterEvicted, AdapterLoaded, LoadAdapterControl
from lockstep.core.kv.facts import Facts
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
        self.used = used  # time of the last use, as a count of uses; the lowest is evicted first


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
        self.versions: dict[str, int] = {}  # newest of every adapter ever registered: KV may still be cached
        self.withdrawals: dict[str, list[int]] = {}  # by name: control ids to answer when its last user has ended
        self.rows: dict[int, Adapter] = {}  # adapter of each row that is not free
        self.users: dict[Adapter, int] = {}  # rows of each adapter in use
        self.uses = 0

    # ---------------------------------------------------------------------------------------------------- registry

    def named(self, name: str) -> Adapter:
        """Return the newest version of the adapter with this name. Raises RequestRefused if there is none."""
        if not name:
            return BASE
        if name in self.withdrawals:
            raise RequestRefused("bad_request", f"`adapter` {name!r} is being unloaded")
        if name not in self.registered:
            raise RequestRefused("bad_request", f"`adapter` {name!r} is not loaded; load it first")
        return Adapter(name, self.registered[name].version)

    def register(self, control: LoadAdapterControl) -> str:
        """Register an adapter, a newer version of it, or a changed pin. Returns why not, or an empty text."""
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
        """Unregister an adapter once it is not in use, see `end_withdrawals`. Returns why not, or an empty text."""
        if name not in self.registered:
            return f"{name!r} is not loaded"
        self.withdrawals.setdefault(name, []).append(control_id)
        return ""

    # ----------------------------------------------------------------------------------------------------------- use

    # mechanism: adapters (decided)
    def has_place_for(self, adapter: Adapter) -> bool:
        """Whether a request on this adapter may start: it is on the device, and few enough adapters are in use."""
        if adapter == BASE and not self.base_counts:
            return True
        if adapter != BASE and self.slot_of(adapter) == NO_SLOT:
            return False
        return adapter in self.users or len(self.users) < len(self.slots)

    def slot_of(self, adapter: Adapter) -> int:
        """Return the slot with the loaded adapter; NO_SLOT for BASE and for an adapter that is not on the device."""
        for i, slot in enumerate(self.slots):
            if slot.adapter == adapter and not slot.loading:
                return i
        return NO_SLOT

    def described(self, taken: RowTaken, adapter: Adapter) -> RowTaken:
        """Return what the executor receives about a row that begins to use an adapter."""
        return msgspec.structs.replace(
            taken, adapter=adapter.name, adapter_version=adapter.version, adapter_slot=self.slot_of(adapter)
        )

    def take(self, row: int, adapter: Adapter) -> None:
        """Count a row as a user of an adapter."""
        self.rows[row] = adapter
        if self.counts(adapter):
            self.users[adapter] = self.users.get(adapter, 0) + 1

    def counts(self, adapter: Adapter) -> bool:
        """Whether a row on this adapter counts against the adapters that may be in use at once."""
        return self.base_counts or adapter != BASE

    def release(self, row: int) -> None:
        """End the use of an adapter by a row that is free."""
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
        """Mark an adapter as loaded and return it. A failed load frees the slot and removes the pin.

        With its pin the adapter would be loaded again after every event.

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
        raise ContractError(f"{adapter.name!r} version {adapter.version} was loaded, but no load was ordered")

    def load_for(self, needed: list[Adapter], step: Step) -> None:
        """Load adapters into available slots. `needed`: adapters of waiting requests, the head's first."""
        ahead: dict[Adapter, None] = {}
        for adapter in (*self._pinned(), *needed):
            if adapter == BASE or adapter in ahead:
                continue
            ahead[adapter] = None
            if any(slot.adapter == adapter for slot in self.slots):
                continue
            number = self._available_slot(ahead)
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
        """Complete and answer withdrawals of adapters that no request needs. `live`: adapters of all live requests."""
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

    def _available_slot(self, ahead: dict[Adapter, None]) -> int:
        """Return a free slot, else the least recently used slot with an adapter that is neither in use nor `ahead`.

        `ahead`: adapters that are needed earlier. NO_SLOT if no slot is available.
        """
        best = NO_SLOT
        for i, slot in enumerate(self.slots):
            if slot.adapter is None:
                return i
            idle = not slot.loading and slot.adapter not in self.users and slot.adapter not in ahead
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
        """Whether a load is under way."""
        return any(slot.loading for slot in self.slots)

    def void(self) -> None:
        """Free all slots: the memory of the device is lost."""
        self.slots = [Slot() for _ in self.slots]

    # -------------------------------------------------------------------------------------------------------- snapshot

    def dump(self) -> dict[str, Any] | None:
        """Return the state in builtins; None if LoRA is off."""
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
        """Return the adapters that `dump` described."""
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

    def check(self, facts: Facts, deferred_rows: list[int]) -> None:
        """S25, L8: adapters in use are on the device, and no more than fit; a withdrawal waits for a request."""
        live = {request.row: request.adapter for request in facts.holders}
        live |= {row: self.rows.get(row, BASE) for row in deferred_rows}
        same("S25 adapters by row", dict(sorted(self.rows.items())), dict(sorted(live.items())))
        counted = [adapter for adapter in live.values() if self.counts(adapter)]
        same("S25 users of adapters", self.users, counts_of(counted))
        if len(self.users) > len(self.slots):
            fail(f"S25: {list(self.users)} are in use, max_loras {len(self.slots)}")
        for adapter in self.users:
            if adapter != BASE and self.slot_of(adapter) == NO_SLOT:
                fail(f"S25: {adapter} is in use but on no slot of the device")
        held = [slot.adapter for slot in self.slots if slot.adapter is not None]
        same("S25 adapters on the device", len(set(held)), len(held))
        awaited = {request.adapter.name for request in facts.requests.values()}
        awaited |= {adapter.name for adapter in self.users}
        awaited |= {slot.adapter.name for slot in self.slots if slot.adapter is not None and slot.loading}
        for name in self.withdrawals:
            if name not in awaited:
                fail(f"L8: no request needs {name!r} any more, but its withdrawal was not answered")


class NoAdapters(Adapters):
    """Adapters of an engine without LoRA: every request runs on BASE, and rows use no slot."""

    present = False

    def __init__(self) -> None:
        super().__init__(0)

    def named(self, name: str) -> Adapter:
        """Return BASE. Validation refuses every other name."""
        return BASE

    def has_place_for(self, adapter: Adapter) -> bool:
        """Return True: BASE needs no slot."""
        return True

    def described(self, taken: RowTaken, adapter: Adapter) -> RowTaken:
        """Return the row unchanged."""
        return taken

    def end_withdrawals(self, live: Iterable[Adapter], step: Step) -> None:
        """Do nothing: no adapter is ever withdrawn."""

    def load_for(self, needed: list[Adapter], step: Step) -> None:
        """Do nothing: no adapter is ever loaded."""

    def dump(self) -> None:
        """Return None: a snapshot has no adapters."""

    def check(self, facts: Facts, deferred_rows: list[int]) -> None:
        """Check nothing: there are no slots."""


def adapters_of(state: dict[str, Any] | None) -> Adapters:
    """Return the adapters of a snapshot."""
    return NoAdapters() if state is None else Adapters.load(state)
