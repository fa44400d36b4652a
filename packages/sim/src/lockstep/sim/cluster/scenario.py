"""Options of a simulated cluster: engines by group, router, links, reports, scaling, admission; parsed and printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

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
from lockstep.sim.cluster.prices import PriceOfDay
from lockstep.sim.scenario.scenario import SIMULATE, Scenario, SimOption

Placement = Literal["apart", "packed", "mixed"]
PLACEMENTS: tuple[str, ...] = get_args(Placement)
USUAL_PLACEMENT: Placement = "apart"
LAYOUT = ("ep", "attention_dp", "pp")  # layout options of an engine besides `tp`
LINK_GBS, LINK_LATENCY_US = 40.0, 15  # equal to cost.hardware.NETWORK_GBS and NETWORK_LATENCY_US, which have sources
WEIGHTS = (1e-3, 1e3)  # range of the weight of an engine in `engines`


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """A number of equal engines, such as `4xh100:tp=2`. Missing options have the values of the base scenario."""

    count: int
    gpu: str
    tp: int | None = None  # None: that of the base scenario
    layout: Mapping[str, int] = field(default_factory=dict)  # values of options in LAYOUT
    weight: float | None = None  # weight of an engine at the router; None: estimated by the cost model
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
    """Parse text such as `4xh100:tp=2,2xh200:weight=1.5`.

    Args:
        parse_setting: function that parses name and value of a scheduler setting; returns field and value.
    Raises: ConfigError.
    """
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


DURATIONS = ("start", "interval", "window", "cooldown")  # settings of Scaling that are written with a unit of time


class Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The option of an autoscaling policy, before its maximum is set; see autoscale.ScalingConfig."""

    settings: dict[str, Any]  # fields of ScalingConfig except `maximum`

    def config(self, replicas: int) -> ScalingConfig:
        """Return the configuration for at most `replicas` replicas.

        Raises: ConfigError, with the option's own names of settings.
        """
        if (minimum := self.settings.get("minimum", 1)) > replicas:
            raise ConfigError(
                f"`autoscale`: `minimum` is {minimum}, but there are {replicas} replicas\n"
                "hint: raise --replicas, or lower minimum"
            )
        words = {"target": self.settings.get("policy", "target"), **{f"{name}_us": name for name in DURATIONS}}
        try:
            return ScalingConfig(maximum=replicas, **self.settings)
        except ConfigError as error:  # its message begins with a field of ScalingConfig
            problem = re.sub(r"^`(\w+)`", lambda field: f"`{words.get(field[1], field[1])}`", str(error))
            raise ConfigError(f"`autoscale`: {problem}") from error

    def within(self, replicas: int) -> Scaling:
        """Return the policy with `minimum` reduced to at most `replicas`."""
        if self.settings.get("minimum", 1) <= replicas:
            return self
        return Scaling(settings={**self.settings, "minimum": replicas})

    def __str__(self) -> str:
        """Return the text of the option, such as `open_requests=24,minimum=2,start=60000000us`."""
        left = dict(self.settings)
        words = [f"{left.pop('policy')}={number_word(float(left.pop('target')))}"]
        for name, value in left.items():
            is_time = name.removesuffix("_us") in DURATIONS
            words.append(f"{name.removesuffix('_us')}={value}{'us' if is_time else ''}")
        return ",".join(words)


def parse_scaling(text: str) -> Scaling:
    """Parse text such as `open_requests=24,minimum=2,start=60s`: a policy with its target, then settings.

    Raises: ConfigError.
    """
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
    """The options of a simulated cluster behind a router. Fields are in the order of the options of a command line.

    `base` has the load and the options of every engine.
    """

    base: Scenario
    replicas: Annotated[int, SimOption("engines behind a router", default="one, and no router", commands=SIMULATE)] = (
        1  # engines with the options of `base`; not used if `engines` is set
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
    placement: Annotated[
        Placement,
        SimOption(
            "prefill and decode engines in racks: apart (transfers over the network), packed, mixed: "
            "docs/distributed.md"
        ),
    ] = "apart"
    report_interval_us: Annotated[
        int,
        SimOption(
            "under total_requests and total_tokens: between two reports of an engine",
            flag="--router-report-interval",
            default="none",
            commands=SIMULATE,
        ),
    ] = 0  # 0: no reports, the router uses its own counts
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
    ] = None  # None: all replicas are always up
    price: Annotated[
        PriceOfDay | None,
        SimOption(
            "with --autoscale: USD per GPU-hour, or prices over the day: 0h=0.9,8h=2.1,20h=0.9",
            metavar="PRICE",
            default="of the catalogue",
            text=str,
            commands=SIMULATE,
        ),
    ] = None
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
        """Return the command line that repeats this run."""
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
