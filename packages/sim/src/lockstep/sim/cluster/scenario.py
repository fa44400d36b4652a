"""Options of a simulated cluster: engines by group, router, links, reports, scaling, admission; parsed and printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.core.cluster.autoscale import SCALING_POLICIES, ScalingConfig
from lockstep.core.cluster.dispatch import DispatchConfig
from lockstep.core.cluster.router import (
    RouterConfig,
)
from lockstep.core.contract.errors import ConfigError
from lockstep.host.admission_options import admission_word, pairs
from lockstep.sim.cost.hardware import NETWORK_GBS, NETWORK_LATENCY_US
from lockstep.sim.cost.parallel import COUNTS
from lockstep.sim.scenario.scenario import Scenario, number_word, option_of
from lockstep.sim.workload.lengths import parse_duration_us

if TYPE_CHECKING:
    pass

LAYOUT = COUNTS[1:]  # of an engine, besides `tp`
WEIGHTS = (1e-3, 1e3)  # of an engine in `engines`


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """Equal engines: `4xh100:tp=2`."""

    count: int
    gpu: str
    tp: int | None = None  # None, and what is not in `layout` and `settings`: as the command line says for all
    layout: Mapping[str, int] = field(default_factory=dict)  # of LAYOUT
    weight: float | None = None  # at the router; None: what the cost model estimates
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of SchedConfig

    def __str__(self) -> str:
        words = [f"{self.count}x{self.gpu}"]
        words += [f"tp={self.tp}"] if self.tp is not None else []
        words += [f"{name}={value}" for name, value in self.layout.items()]
        words += [f"weight={number_word(self.weight)}"] if self.weight is not None else []
        words += [f"{name}={_word(value)}" for name, value in self.settings.items()]
        return ":".join(words)


def _word(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def parse_engines(text: str, parse_setting: Callable[[str, str], tuple[str, Any]]) -> tuple[EngineGroup, ...]:
    """Read `4xh100:tp=2,2xh200:weight=1.5`; `parse_setting` reads a scheduler setting. Raises ConfigError."""
    groups = []
    for item in text.split(","):
        head, *pairs = item.strip().split(":")
        count, times, gpu = head.partition("x")
        if not times or not count.isascii() or not count.isdigit() or not gpu or int(count) < 1:
            raise ConfigError(f"`engines` has `{item.strip()}`, expected COUNTxGPU\nhint: such as 4xh100:tp=2,2xh200")
        values: dict[str, Any] = {}
        layout: dict[str, int] = {}
        settings: dict[str, Any] = {}
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals or name in values or name in layout or name in settings:
                problem = "is given twice" if equals else "has no value"
                raise ConfigError(f"`engines`: `{name}` of `{head}` {problem}\nhint: write NAME=VALUE once for each")
            if name == "tp" or name in LAYOUT:
                if not value.isascii() or not value.isdigit() or int(value) < 1:
                    raise ConfigError(
                        f"`engines`: `{name}` of `{head}` must be a whole number of at least 1, got `{value}`"
                    )
                (values if name == "tp" else layout)[name] = int(value)
            elif name == "weight":
                values["weight"] = _parse_weight(head, value)
            else:
                field_name, parsed = parse_setting(name, value)
                settings[field_name] = parsed
        groups.append(EngineGroup(count=int(count), gpu=gpu, layout=layout, settings=settings, **values))
    return tuple(groups)


def _parse_weight(head: str, text: str) -> float:
    low, high = WEIGHTS
    try:
        if low <= (weight := float(text)) <= high:
            return weight
    except ValueError:
        pass
    raise ConfigError(f"`engines`: `weight` of `{head}` must be a number from {low:g} to {high:g}, got `{text}`")


DURATIONS = ("start", "interval", "window", "cooldown")  # of Scaling, in its spec with a unit


class Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An autoscaling policy as it is asked for; the replicas that there are bound it. See autoscale.ScalingConfig."""

    settings: dict[str, Any]  # of ScalingConfig, `maximum` aside

    def config(self, replicas: int) -> ScalingConfig:
        """For so many replicas at most. Raises ConfigError for what cannot work, in the words of the option."""
        if (minimum := self.settings.get("minimum", 1)) > replicas:
            raise ConfigError(
                f"`autoscale`: `minimum` is {minimum}, but there are {replicas} replicas\n"
                "hint: raise --replicas, or lower minimum"
            )
        words = {"target": self.settings.get("policy", "target"), **{f"{name}_us": name for name in DURATIONS}}
        try:
            return ScalingConfig(maximum=replicas, **self.settings)
        except ConfigError as error:  # which names fields of ScalingConfig first
            said = re.sub(r"^`(\w+)`", lambda field: f"`{words.get(field[1], field[1])}`", str(error))
            raise ConfigError(f"`autoscale`: {said}") from error

    def within(self, replicas: int) -> Scaling:
        """The same where there are so few replicas that the minimum would be beyond them."""
        if self.settings.get("minimum", 1) <= replicas:
            return self
        return Scaling(settings={**self.settings, "minimum": replicas})

    def __str__(self) -> str:
        """`open_requests=24,minimum=2,start=1min`."""
        left = dict(self.settings)
        words = [f"{left.pop('policy')}={number_word(float(left.pop('target')))}"]
        for name, value in left.items():
            is_time = name.removesuffix("_us") in DURATIONS
            words.append(f"{name.removesuffix('_us')}={value}{'us' if is_time else ''}")
        return ",".join(words)


def parse_scaling(text: str) -> Scaling:
    """Read `open_requests=24,minimum=2,start=60s`: the policy with its target, then settings. Raises ConfigError."""
    settings: dict[str, Any] = {}
    for name, value in pairs("autoscale", text):
        try:
            if name in SCALING_POLICIES and "policy" not in settings:
                settings |= {"policy": name, "target": float(value)}
            elif name in DURATIONS:
                settings[f"{name}_us"] = parse_duration_us(value)
            elif name == "minimum":
                settings[name] = int(value)
            elif name == "tolerance":
                settings[name] = float(value)
            else:
                known = ", ".join((*SCALING_POLICIES, "minimum", *DURATIONS, "tolerance"))
                raise ConfigError(f"`autoscale` has `{name}={value}`, expected one policy and any of {known}")
        except ValueError as error:
            raise ConfigError(f"`autoscale`: `{name}` cannot be `{value}`: {error}") from error
    if "policy" not in settings:
        raise ConfigError(
            f"`autoscale` names no policy, got `{text}`\nhint: one of {', '.join(SCALING_POLICIES)}, with what one "
            "replica should have: open_requests=24"
        )
    scaling = Scaling(settings=settings)
    scaling.config(max(settings.get("minimum", 1), 1))
    return scaling


@dataclass(frozen=True, kw_only=True)
class ClusterScenario:
    """What to simulate. `base` says what holds for every engine, and what comes; its `gpu` where no group names one."""

    base: Scenario
    replicas: int = 1  # of the base; without effect beside `engines`
    engines: tuple[EngineGroup, ...] = ()
    router: RouterConfig = field(default_factory=RouterConfig)
    hop_us: int = 0  # from the router to an engine, and as long back
    link_gbs: float = NETWORK_GBS.value  # of each GPU to other engines, each way; 1e9 bytes per second
    link_latency_us: int = round(NETWORK_LATENCY_US.value)  # from one host to another

    report_interval_us: int = 0  # between two reports of each engine; 0: none, the router counts itself
    report_delay_us: int = 0  # before the router has one
    scaling: Scaling | None = None  # None: all replicas are up all the time
    dispatch: DispatchConfig | None = None  # None: nobody waits at the router

    def groups(self) -> tuple[EngineGroup, ...]:
        return self.engines or (EngineGroup(count=self.replicas, gpu=self.base.gpu),)

    def command(self) -> str:
        """The command line that runs this again."""
        words = shlex.split(self.base.command())
        if self.engines:
            at = words.index("--gpu")
            words[at : at + 2] = ["--engines", ",".join(map(str, self.engines))]
        else:
            words += ["--replicas", str(self.replicas)]
        words += ["--router", self.router.policy]
        usual = RouterConfig()
        for name in ("load_bound", "load_floor", "block_tokens", "sessions_max"):
            value = getattr(self.router, name)
            if value != getattr(usual, name):
                words += [
                    f"--router-{option_of(name)[2:]}",
                    number_word(value) if isinstance(value, float) else str(value),
                ]
        if self.hop_us:
            words += ["--router-hop", f"{self.hop_us}us"]
        if self.link_gbs != NETWORK_GBS.value:
            words += ["--link-bandwidth", number_word(self.link_gbs)]
        if self.link_latency_us != round(NETWORK_LATENCY_US.value):
            words += ["--link-latency", f"{self.link_latency_us}us"]

        if self.report_interval_us:
            words += ["--router-report-interval", f"{self.report_interval_us}us"]
        if self.report_delay_us:
            words += ["--router-report-delay", f"{self.report_delay_us}us"]
        if self.scaling is not None:
            words += ["--autoscale", str(self.scaling)]
        if self.dispatch is not None:
            words += ["--admission", admission_word(self.dispatch)]
        return shlex.join(words)
