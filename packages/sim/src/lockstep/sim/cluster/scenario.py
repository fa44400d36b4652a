"""Options of a simulated cluster: engines by group, router, links, reports, scaling, admission; parsed and printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from lockstep.core.cluster.autoscale import SCALING_POLICIES, ScalingConfig
from lockstep.core.cluster.dispatch import DispatchConfig
from lockstep.core.cluster.router import (
    RouterConfig,
    policy_settings,
)
from lockstep.core.contract.errors import ConfigError
from lockstep.host.admission_options import admission_word, pairs
from lockstep.host.options import changed_words, number_word, option_of, value_word
from lockstep.sim.scenario.scenario import SIMULATE, Scenario, SimOption

LAYOUT = ("ep", "attention_dp", "pp")  # of an engine, besides `tp`
LINK_GBS, LINK_LATENCY_US = 40.0, 15  # cost.hardware.NETWORK_GBS and NETWORK_LATENCY_US, which have the sources
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
    from lockstep.sim.workload.lengths import parse_duration_us

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
    """What to simulate on several engines behind a router. Fields are in the order in which a command line has them.

    `base` holds for every engine, and has the load; its `gpu` is that of groups that name none.
    """

    base: Scenario
    replicas: Annotated[int, SimOption("engines behind a router", default="one, and no router", commands=SIMULATE)] = (
        1  # of the base; without effect beside `engines`
    )
    engines: Annotated[
        tuple[EngineGroup, ...],
        SimOption(
            "engines of several kinds: 4xh100:tp=2,2xh200; docs/routing.md",
            metavar="SPEC",
            commands=SIMULATE,
            text=lambda groups: ",".join(map(str, groups)),
        ),
    ] = ()
    router: RouterConfig = field(default_factory=RouterConfig)
    hop_us: Annotated[int, SimOption("router to engine, and back", flag="--router-hop")] = 0
    link_gbs: Annotated[
        float,
        SimOption("between prefill and decode engines: GB/s per GPU, each way", flag="--link-bandwidth", default="40"),
    ] = LINK_GBS
    link_latency_us: Annotated[
        int, SimOption("between prefill and decode engines: from host to host", default="15us")
    ] = LINK_LATENCY_US
    report_interval_us: Annotated[
        int,
        SimOption(
            "under total_requests and total_tokens: between two reports of an engine",
            flag="--router-report-interval",
            default="none",
            commands=SIMULATE,
        ),
    ] = 0  # 0: no reports, the router counts by itself
    report_delay_us: Annotated[
        int,
        SimOption("age of a report when the router receives it", flag="--router-report-delay", commands=SIMULATE),
    ] = 0
    scaling: Annotated[
        Scaling | None,
        SimOption(
            "replicas come and go: open_requests=24,minimum=2; docs/routing.md",
            flag="--autoscale",
            metavar="SPEC",
            text=str,
            commands=SIMULATE,
        ),
    ] = None  # None: all replicas are up all the time
    dispatch: Annotated[
        DispatchConfig | None,
        SimOption(
            "requests wait at the router: open=64,share.a=2; docs/routing.md",
            flag="--admission",
            metavar="SPEC",
            text=admission_word,
            commands=SIMULATE,
        ),
    ] = None  # None: no request waits at the router

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
        for name in policy_settings():
            if (value := getattr(self.router, name)) != getattr(usual, name):
                words += [f"--router-{option_of(name)[2:]}", value_word(name, value)]
        return shlex.join(words + changed_words(self, leave_out=("replicas", "engines")))
