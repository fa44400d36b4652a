"""The tiers of an engine without any below the device, and the choice between both."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.kv.device_memory import DeviceMemory
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.radix import Match
from lockstep.core.kv.tiers import Tiers
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import Int32s


class NoTiers(Tiers):
    """The tiers of an engine without any: nothing is copied, loaded or fetched, and no request waits for it.

    Callers of what is not overridden here read `present` first.
    """

    present = False

    def __init__(self, device: DeviceMemory) -> None:
        self.device = device
        self.page_size = device.config.page_size
        self.operations = device.operations
        self.candidates = {}

    def used(self, match: Match) -> None:
        """Do nothing: uses are not counted."""

    def back_up(self, node: RadixNode, pages: int, step: Step) -> None:
        """Do nothing: no page is copied."""

    def evict(self, count: int, step: Step) -> Int32s:
        """Evict from the radix cache of the device."""
        return self.device.radix.evict(count)

    def forget(self, device_pages: Int32s) -> None:
        """Do nothing: pages have no marks."""

    def empty(self) -> None:
        """Do nothing: there is no host memory."""

    def void(self, generation: int, step: Step) -> None:
        """Do nothing: there is no host memory."""

    def dump(self) -> None:
        """Return None: a snapshot has no tiers."""

    def due_times(self) -> Iterator[tuple[int, str]]:
        """Yield nothing: no request waits for a tier."""
        yield from ()

    def check(self, facts: Facts) -> None:
        """Check nothing: there is no host memory."""


def tiers_of(config: SchedConfig, device: DeviceMemory) -> Tiers:
    """Return the tiers below the device that the settings name."""
    return NoTiers(device) if config.tiers is msgspec.UNSET else Tiers(config.tiers, device)
