"""Loads of LoRA adapters to the device of a simulated engine, one after another over the link from the host.

    parse_adapters("0.8x40:zipf:1.2")        # of 0.8 of the sessions, one of 40 each, number k with weight 1 / k**1.2
    with_adapters(turns, spec, seed=7)       # the same turns, all of a session on one adapter
    AdapterLane(names, size, link)           # brings them to the device, one after the other, beside whatever runs

All adapters of a workload are registered from the beginning, as with `lockstep serve --lora NAME=PATH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.core.contract.commands import LoadAdapter
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import AdapterLoaded, ControlRequested, LoadAdapterControl
from lockstep.sim.cost import GpuSpec
from lockstep.sim.cost.lora import TARGETS
from lockstep.sim.host.cache_tiers import HOST_LINK_LATENCY_US, PCIE_SHARE
from lockstep.sim.host.links import Link

ALL_TARGETS = "all"


def parse_targets(text: str) -> tuple[str, ...]:
    """Read `all`, or some of TARGETS with commas, in the order of TARGETS. Raises ConfigError."""
    if text == ALL_TARGETS:
        return TARGETS
    given = text.split(",")
    for name in given:
        if name not in TARGETS or given.count(name) > 1:
            raise ConfigError(
                f"`lora_targets` cannot be `{text}`: `{name}` is {'twice there' if name in TARGETS else 'no target'}\n"
                f"hint: all, or some of {','.join(TARGETS)}"
            )
    return tuple(name for name in TARGETS if name in given)


class AdapterLane:
    """Brings adapters into slots, one after the other over the host's link, beside whatever runs.

    Args:
        names: of the adapters that are registered from the beginning.
        size: bytes of a slot on one GPU; each GPU loads its own part over a link of its own, at the same time.
        link: from the host, which loads of KV may go over as well.
    """

    def __init__(self, names: Sequence[str], size: int, link: Link) -> None:
        self.names, self.size, self._link = tuple(names), size, link

    def registrations(self, now_us: int) -> list[ControlRequested]:
        """What makes them known to an engine that begins."""
        return [ControlRequested(now_us, number, LoadAdapterControl(name, 1)) for number, name in enumerate(self.names)]

    def begin(self, command: LoadAdapter, now_us: int, generation: int) -> AdapterLoaded:
        """Begin a load behind those begun before; returns its answer, with the time at which it comes."""
        return AdapterLoaded(
            self._link.send(now_us, self.size), command.adapter, command.version, generation=generation
        )


def adapter_link(gpu: GpuSpec) -> Link:
    """A fresh link from the host, where no tiers below the device have one."""
    return Link(gpu.datasheet["pcie_gbs"].value * PCIE_SHARE, HOST_LINK_LATENCY_US)


def describe_loads(size: int, gpu: GpuSpec) -> dict[str, Any]:
    """What a load carries and over what, for metrics.json."""
    link = adapter_link(gpu)
    return {
        "slot_bytes": size,
        "link_gbs": link.bytes_per_us / 1e3,
        "link_latency_us": link.latency_us,
        "load_us": round(size / link.bytes_per_us + link.latency_us, 1),
    }
