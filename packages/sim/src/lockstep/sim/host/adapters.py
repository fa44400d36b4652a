"""Adapters (LoRA) of a simulated engine, in the words of the command line: who asks for which, room for them, loads.

    parse_adapters("0.8x40:zipf:1.2")        # of 0.8 of the sessions, one of 40 each, number k with weight 1 / k**1.2
    with_adapters(turns, spec, seed=7)       # the same turns, all of a session on one adapter
    AdapterLane(names, size, link)           # brings them to the device, one after the other, beside whatever runs

An engine knows all of a workload's adapters from its beginning, as with `lockstep serve --lora NAME=PATH`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lockstep.core.contract.commands import LoadAdapter
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import AdapterLoaded, ControlRequested, LoadAdapterControl
from lockstep.host.adapters import LORAS
from lockstep.sim.cost import GpuSpec
from lockstep.sim.cost.lora import LORA_RANK, LORA_RANK_MAX, TARGETS, LoraSpec
from lockstep.sim.host.cache_tiers import HOST_LINK_LATENCY_US, PCIE_SHARE
from lockstep.sim.host.links import Link
from lockstep.sim.workload.arrivals import random_stream
from lockstep.sim.workload.turns import Turns

if TYPE_CHECKING:
    from lockstep.sim.scenario.scenario import Scenario

TENANTS = "tenants"  # each on the adapter of its name
RECORDED = "recorded"  # as requests of a journal were
ALL_TARGETS = "all"
USUAL = {"adapters": None, "max_lora_rank": LORA_RANK, "lora_targets": ALL_TARGETS}
ADAPTERS_MAX = 100_000
EXAMPLE = "--adapters 0.8x40:zipf, or --adapters tenants; docs/workloads.md"
_SPEC = re.compile(r"(?:(?P<share>[0-9.eE-]+)x)?(?P<count>[0-9]+)(?::zipf(?::(?P<exponent>[0-9.]+))?)?")

# ---------------------------------------------------------------------------------------------------- what is asked for


class AdapterSpec(NamedTuple):
    """Which sessions run on which adapters."""

    share: float = 1.0  # of the sessions; the others run on the model alone
    adapters: int = 0  # different ones; 0: each tenant has its own
    exponent: float = 0.0  # adapter k (from 1) is asked for with weight 1 / k**exponent
    recorded: bool = False  # the workload says so


def parse_adapters(text: str) -> AdapterSpec:
    """Read `[SHAREx]COUNT[:zipf[:EXPONENT]]`, `tenants`, or `recorded`. Raises ConfigError."""
    if text in (TENANTS, RECORDED):
        return AdapterSpec(recorded=text == RECORDED)

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"`adapters` cannot be `{text}`: {problem}\nhint: such as {EXAMPLE}")

    found = _SPEC.fullmatch(text)
    if found is None:
        raise refuse("expected [SHAREx]COUNT[:zipf[:EXPONENT]], tenants, or recorded")
    try:
        share, count = float(found["share"] or 1.0), int(found["count"])
        exponent = float(found["exponent"] or 1.0) if ":zipf" in text else 0.0
    except ValueError as error:
        raise refuse(str(error)) from None
    if not 0.0 < share <= 1.0:
        raise refuse("the share of sessions is above 0 and at most 1")
    if not 1 <= count <= ADAPTERS_MAX:
        raise refuse(f"there are 1 to {ADAPTERS_MAX:,} adapters")
    if not 0.0 <= exponent <= 10.0:
        raise refuse("the exponent is at most 10")
    return AdapterSpec(share, count, exponent)


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


def check_adapters(scenario: Scenario) -> None:
    """Raise ConfigError for options that nobody looks at, or that are not simulated together."""
    if scenario.adapters is None:
        for name, usual in USUAL.items():
            if getattr(scenario, name) != usual:
                raise ConfigError(
                    f"`{name}` is about adapters, and there are none, got `{getattr(scenario, name)}`\n"
                    f"hint: {EXAMPLE.partition(',')[0]}, or leave it out"
                )
        return
    parse_adapters(scenario.adapters)
    parse_targets(scenario.lora_targets)
    if not 1 <= scenario.max_lora_rank <= LORA_RANK_MAX:
        raise ConfigError(f"`max_lora_rank` must be from 1 to {LORA_RANK_MAX}, got `{scenario.max_lora_rank}`")
    if not scenario.settings.get("max_loras", LORAS):
        raise ConfigError(
            f"`adapters` is `{scenario.adapters}`, but `max_loras` is {scenario.settings['max_loras'] or 'none'}: no "
            f"adapter has a place\nhint: --max-loras {LORAS}, or leave out one of the two"
        )
    if scenario.attention_dp > 1:
        raise ConfigError(
            f"`adapters` is `{scenario.adapters}`, but `attention_dp` is {scenario.attention_dp}: adapters of "
            "data-parallel attention are not simulated\nhint: leave out one of the two"
        )


def lora_of(scenario: Scenario, config: SchedConfig) -> LoraSpec | None:
    """Room for adapters on the device; None where no request has any, whatever `max_loras` is."""
    if scenario.adapters is None:
        return None
    assert config.max_loras is not None
    return LoraSpec(config.max_loras, scenario.max_lora_rank, parse_targets(scenario.lora_targets))


# --------------------------------------------------------------------------------------------------------- the workload


def with_adapters(turns: Turns, spec: AdapterSpec, *, seed: int) -> Turns:
    """The same turns, each on the adapter of its session. Which that is does not depend on the turns' lengths."""
    if spec.recorded:
        if turns.adapter is None:
            raise ConfigError(
                f"`adapters` is {RECORDED}, but this workload says of no request which it runs on\n"
                "hint: --adapters 40:zipf draws them"
            )
        return turns
    if not spec.adapters:
        if not any(turns.tenants):
            raise ConfigError(
                f"`adapters` is {TENANTS}, but no request of this workload has one\nhint: --adapters 40:zipf draws them"
            )
        return replace(turns, adapter=turns.tenant, adapters=turns.tenants)
    root = turns.root()
    has = random_stream(seed, "adapters/share").random_sample(len(turns)) < spec.share
    # Python's power, not numpy's: that may differ in the last digit between processors, and with it what is drawn.
    weights = np.cumsum(
        np.fromiter((k**-spec.exponent for k in range(1, spec.adapters + 1)), np.float64, spec.adapters)
    )
    draws = random_stream(seed, "adapters/which").random_sample(len(turns)) * weights[-1]
    drawn = np.where(has, np.searchsorted(weights, draws, side="right") + 1, 0)[root]
    used, codes = np.unique(np.append(drawn, 0), return_inverse=True)  # 0, the model alone, is the first name
    names = tuple(f"adapter{number}" if number else "" for number in used.tolist())
    return replace(turns, adapter=codes[:-1].astype(np.int32), adapters=names)


def adapters_in(turns: Turns) -> tuple[str, ...]:
    """Those that turns ask for, by name."""
    if turns.adapter is None:
        return ()
    return tuple(sorted({turns.adapters[code] for code in np.unique(turns.adapter).tolist()} - {""}))


def describe_adapters(turns: Turns) -> str:
    """One sentence for the notes of a workload."""
    assert turns.adapter is not None
    counts = np.bincount(turns.adapter, minlength=len(turns.adapters))
    on = {name: int(count) for name, count in zip(turns.adapters, counts.tolist(), strict=True) if name and count}
    most = max(on.values(), default=0)
    return (
        f"{sum(on.values()):,} of {len(turns):,} requests run on {len(on):,} different adapters, "
        f"the most popular of which has {most:,}"
    )


# ------------------------------------------------------------------------------------------------------------ the loads


class AdapterLane:
    """Brings adapters into slots, one after the other over the host's link, beside whatever runs.

    Args:
        names: of those that the engine knows from its beginning.
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
