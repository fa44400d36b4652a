"""Loads of LoRA adapters to the device of a simulated engine, one after another over the link from the host.

    AdapterLane(names, size, link)           # loads adapters one after another while batches run

All adapters of a workload are registered at the start, as with `lockstep serve --lora NAME=PATH`.
`lockstep.sim.workload.adapters` assigns the adapters to the sessions of a workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.core.contract.commands import LoadAdapter
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import AdapterLoaded, ControlRequested, LoadAdapterControl
from lockstep.sim.cost import GpuSpec
from lockstep.sim.cost.lora import TARGETS
from lockstep.sim.host.cache_tiers import PCIE_SHARE
from lockstep.sim.host.links import Link
from lockstep.sim.scenario.tier_options import LINK_LATENCY_US

ALL_TARGETS = "all"


def parse_targets(text: str) -> tuple[str, ...]:
    """Parse `all`, or names of TARGETS with commas between them; return them in the order of TARGETS.

    Raises: ConfigError for an unknown name, or one that occurs twice.
    """
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
    """Loads adapters into slots, one after another over the link from the host, while batches run.

    Args:
        names: adapters that are registered at the start.
        size: bytes of a slot on one GPU; all GPUs load their parts at the same time, each over its own link.
        link: link from the host; loads of KV may share it.
    """

    def __init__(self, names: Sequence[str], size: int, link: Link) -> None:
        self.names, self.size, self._link = tuple(names), size, link

    def registrations(self, now_us: int) -> list[ControlRequested]:
        """Return the control requests that register all adapters with an engine."""
        return [ControlRequested(now_us, number, LoadAdapterControl(name, 1)) for number, name in enumerate(self.names)]

    def begin(self, command: LoadAdapter, now_us: int, generation: int) -> AdapterLoaded:
        """Begin a load after all loads begun before. Return its answer, dated with the end of the load."""
        return AdapterLoaded(
            self._link.send(now_us, self.size), command.adapter, command.version, generation=generation
        )


def adapter_link(gpu: GpuSpec) -> Link:
    """Return a new link from the host, for an engine without cache tiers."""
    return Link(gpu.datasheet["pcie_gbs"].value * PCIE_SHARE, float(LINK_LATENCY_US))


def describe_loads(size: int, gpu: GpuSpec) -> dict[str, Any]:
    """Return size and time of an adapter load, and the figures of its link, for metrics.json."""
    link = adapter_link(gpu)
    return {
        "slot_bytes": size,
        "link_gbs": link.bytes_per_us / 1e3,
        "link_latency_us": link.latency_us,
        "load_us": round(size / link.bytes_per_us + link.latency_us, 1),
    }
