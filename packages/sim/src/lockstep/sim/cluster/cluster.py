"""Several engines behind a router, in one process: what was asked, what that amounts to, the run, the run folder.

    base = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=4000,rate=40")
    setup = assemble_cluster(ClusterScenario(base=base, replicas=8))
    run = simulate_cluster(setup, folder=Path("runs/0192"))

    runs/0192/router.jsonl        every fact the router was told, and what it decided
              engines/0/journal/  as of a run with one engine, one per engine; request ids are those of the cluster
              engines/0/metrics.json
              metrics.json        all engines together, then each

A request comes to the router, is routed at that instant, and reaches its engine one hop later; a token takes one hop
back. What the router knows at an instant are the requests it routed and the answers whose end has reached it by then:
exactly what passed through it.

Where replicas come and go (`scaling`), each has a lane from the beginning; while it is off nothing is sent to it, and
it begins again with an empty cache. Where requests wait at the router (`dispatch`), that wait is part of their latency,
and engines know them by the order in which they were sent: `sent` has their ids.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.core.cluster.autoscale import SCALING_POLICIES, Autoscaler, LoadObserved, ScalingConfig
from lockstep.core.cluster.dispatch import DispatchConfig, Dispatcher
from lockstep.core.cluster.router import (
    EngineChanged,
    EngineShare,
    LoadReported,
    RequestEnded,
    RequestOffered,
    RequestRouted,
    Router,
    RouterConfig,
    RouterFact,
    engine_of_room,
    prefix_keys,
)
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import ControlRequested, Flush, RequestArrived, RequestId, TokenRuns
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.host.admission_options import admission_word, pairs
from lockstep.host.router_journal import NoRouterJournal, RouterJournal, label_key
from lockstep.sim.cluster.data_parallel import RankCluster
from lockstep.sim.cluster.handover import DECODE_ROUTER, HandoverCluster
from lockstep.sim.cluster.lane import EngineLane, Feed, LaneClock
from lockstep.sim.cluster.metrics import RefusedRequest, balance, combine
from lockstep.sim.cluster.ranks import check_cluster_of_ranks
from lockstep.sim.cluster.shared_clock import report_of
from lockstep.sim.cost import Calibration
from lockstep.sim.cost.capacity_estimate import estimate_capacity
from lockstep.sim.cost.hardware import NETWORK_GBS, NETWORK_LATENCY_US
from lockstep.sim.cost.parallel import COUNTS
from lockstep.sim.fast.fast_path import FastRun, pays, unsupported_by
from lockstep.sim.fast.machine_code import is_available
from lockstep.sim.host.encoding import encoder_tp, encoder_tp_mode
from lockstep.sim.host.host import NEVER_US, JournalSink, Observer
from lockstep.sim.host.pipeline import with_stages
from lockstep.sim.metrics.metrics import MetricsFold, RunData
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import NoJournal, Run, arrivals_of, collecting_seldom, host_of, stopping_on_interrupt
from lockstep.sim.scenario.scenario import Scenario, number_word, option_of
from lockstep.sim.workload.lengths import parse_duration_us
from lockstep.sim.workload.token_runs import prompt_ids
from lockstep.sim.workload.turns import Turn
from lockstep.sim.workload.workload import Workload

if TYPE_CHECKING:
    from lockstep.sim.run.intervals import Intervals

DECODE = "decode"  # in a run folder, what the router of the decode engines decided
REPORTING = ("total_requests", "total_tokens")  # policies of a router that look at what engines report
LAYOUT = COUNTS[1:]  # of an engine, besides `tp`
HOP_US_MAX = 60_000_000
WEIGHTS = (1e-3, 1e3)  # of an engine in `engines`
COMMON = (
    *("format", "format_version", "command", "seed", "version", "commit", "model", "workload"),
    *("max_new_tokens", "grammar_compile_us", "receive_interval", "calibration"),
)  # of what is said of a run, what is the same for all engines
REPLICAS_MAX = 1024
TENANTS_SHOWN = 10
ENGINES_REPORTED = 16  # in report.html, which must stay small enough to open

# ------------------------------------------------------------------------------------------------------ what was asked


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


# ------------------------------------------------------------------------------------------------- what that amounts to


@dataclass(frozen=True, kw_only=True)
class ClusterSetup:
    """A scenario with everything it names loaded, checked and worked out."""

    scenario: ClusterScenario
    engines: tuple[Setup, ...]  # one per engine; those of a group share theirs
    shares: tuple[EngineShare, ...]

    @property
    def workload(self) -> Workload:
        return self.engines[0].workload

    @property
    def gpus(self) -> int:
        return sum(setup.split.gpus for setup in self.whole_engines)

    @property
    def ranks(self) -> int:
        """Of an engine that has schedulers per rank; these are listed one by one in `engines`."""
        ranks = self.engines[0].config.dp_ranks
        return ranks if isinstance(ranks, int) else 1

    @property
    def whole_engines(self) -> list[Setup]:
        """The engines, each once: of several ranks the first stands for all."""
        return [setup for setup in self.engines if not setup.config.shares_passes or setup.config.dp_rank == 0]

    @property
    def encoders(self) -> list[int]:
        """By engine, whose encoder GPUs it has, where encoders have their own: a rank has those of its engine."""
        found: list[int] = []
        for setup in self.engines:
            follows = setup.config.shares_passes and setup.config.dp_rank != 0
            found.append(found[-1] if follows else len(found))
        return found

    @property
    def hands_over(self) -> bool:
        """Whether prompts are computed by some engines and continued by others."""
        return self.engines[0].config.hands_over

    @property
    def each_alone(self) -> bool:
        """Whether every request stays with one engine, which decides by itself."""
        return self.ranks == 1 and not self.hands_over

    def link_bytes_per_us(self, engine: Setup) -> float:
        """What an engine can send to others at once, and receive."""
        ranks = engine.config.dp_ranks
        return self.scenario.link_gbs * 1e3 * engine.split.gpus / (ranks if isinstance(ranks, int) else 1)

    @property
    def title(self) -> str:
        kinds = Counter(kind_of(setup) for setup in self.whole_engines)
        on = " and ".join(f"{count} x ({kind})" if count > 1 else kind for kind, count in kinds.items())
        return f"{self.engines[0].model.name} on {on}, {self.scenario.router.policy}"

    def about(self) -> dict[str, Any]:
        """All that is needed to get the run again."""
        first = self.engines[0].about()
        return {
            **{name: first[name] for name in COMMON},
            **({"grammar_forces": first["grammar_forces"]} if "grammar_forces" in first else {}),
            "command": self.scenario.command(),
            "router": msgspec.to_builtins(self.scenario.router),
            "hop_us": self.scenario.hop_us,
            **(
                {"link_gbs": self.scenario.link_gbs, "link_latency_us": self.scenario.link_latency_us}
                if self.hands_over
                else {}
            ),
            **self._about_options(),
            "engines": [
                {
                    "gpu": setup.gpu.name,
                    **({"role": setup.config.role} if setup.config.hands_over else {}),
                    **({"rank": setup.config.dp_rank} if setup.config.shares_passes else {}),
                    "tp": setup.scenario.tp,
                    **setup.split.describe(),
                    "weight": share.weight,
                    "cache_tokens": share.cache_tokens,
                }
                for setup, share in zip(self.engines, self.shares, strict=True)
            ],
        }

    def shares_of(self, role: str) -> tuple[EngineShare, ...]:
        """Of the engines that a router chooses from: of this role, or all where none is handed over."""
        return tuple(
            share
            for share, engine in zip(self.shares, self.engines, strict=True)
            if not self.hands_over or engine.config.role == role
        )

    def _about_options(self) -> dict[str, Any]:
        """What is there only where it was asked for."""
        scenario = self.scenario
        found: dict[str, Any] = {}
        if scenario.report_interval_us:
            found["reports"] = {"interval_us": scenario.report_interval_us, "delay_us": scenario.report_delay_us}
        if scenario.scaling is not None:
            found["autoscale"] = msgspec.to_builtins(scenario.scaling.config(len(self.engines)))
        if scenario.dispatch is not None:
            found["admission"] = msgspec.to_builtins(scenario.dispatch)
        return found

    def slowed(self, factor: float) -> ClusterSetup:
        """The same with the time of every batch multiplied; routing weights stay what they were."""
        return replace(self, engines=tuple(setup.slowed(factor) for setup in self.engines))

    def header(self, engine: int) -> JournalHeader:
        """Of one engine's journal."""
        header = self.engines[engine].header()
        return msgspec.structs.replace(header, host={**header.host, "engine": engine, "engines": len(self.engines)})


def assemble_cluster(
    scenario: ClusterScenario, environ: Mapping[str, str] | None = None, *, workload: Workload | None = None
) -> ClusterSetup:
    """Load and work out what the scenario names. Raises what `simulate.assemble` raises."""
    if not 0 <= scenario.hop_us <= HOP_US_MAX:
        hop = f"{scenario.hop_us / 1e6:g}s"
        raise ConfigError(f"`router_hop` must be from 0 to {HOP_US_MAX // 10**6}s, got `{hop}`")
    groups = scenario.groups()
    count = sum(group.count for group in groups)
    if not 1 <= count <= REPLICAS_MAX:
        name = "engines" if scenario.engines else "replicas"
        raise ConfigError(f"`{name}` must be from 1 to {REPLICAS_MAX}, got `{count}`")
    _check_options(scenario, groups, count)
    base = scenario.base
    sticky = scenario.router.policy == "session_sticky" and scenario.scaling is None
    if base.server_sessions and count > 1 and not sticky:
        raise ConfigError(
            f"`server_sessions` is on, and {count} engines are behind `{scenario.router.policy}`: a turn has to come "
            "where its session is\nhint: --router session_sticky without --autoscale, or one engine"
        )
    if base.samples is not None and scenario.dispatch is not None:
        raise ConfigError(
            f"`samples` is `{base.samples}`, but requests may wait at the router (`admission`): several answers of "
            "those are not simulated\nhint: leave out one of the two"
        )
    setups: list[Setup] = []
    ones = [
        replace(
            base,
            gpu=group.gpu,
            tp=base.tp if group.tp is None else group.tp,
            ep=group.layout.get("ep", base.ep),
            attention_dp=group.layout.get("attention_dp", base.attention_dp),
            pp=group.layout.get("pp", base.pp),
            settings={**base.settings, **group.settings},
        )
        for group in groups
    ]
    several = any(encoder_tp(one) > 1 for one in ones)
    for one in ones:
        if several:
            one = replace(one, mm_encoder_tp_mode=encoder_tp_mode(one))
        setup = assemble(one, workload=workload) if environ is None else assemble(one, environ, workload=workload)
        workload = setup.workload
        setups.append(setup)
    if scenario.dispatch is not None:
        _check_shares(scenario.dispatch, setups[0].workload)
    if any(setup.config.hands_over for setup in setups):
        _check_roles(scenario, setups)
    if base.rank_schedulers:
        return _of_ranks(scenario, groups, setups)
    weights = _weights(groups, setups)
    engines = [setup for group, setup in zip(groups, setups, strict=True) for _ in range(group.count)]
    shares = [
        EngineShare(weight=weight, cache_tokens=setup.config.pool_tokens if setup.config.radix_cache else 0)
        for group, setup, weight in zip(groups, setups, weights, strict=True)
        for _ in range(group.count)
    ]
    return ClusterSetup(scenario=scenario, engines=tuple(engines), shares=tuple(shares))


def _of_ranks(scenario: ClusterScenario, groups: tuple[EngineGroup, ...], setups: list[Setup]) -> ClusterSetup:
    """Every rank of every engine is something that the router chooses from."""
    check_cluster_of_ranks(scenario, setups)
    engines: list[Setup] = []
    shares: list[EngineShare] = []
    for group, setup, weight in zip(groups, setups, _weights(groups, setups), strict=True):
        ranks = setup.config.dp_ranks
        assert isinstance(ranks, int)
        share = EngineShare(weight=weight, cache_tokens=setup.config.pool_tokens if setup.config.radix_cache else 0)
        for _ in range(group.count):
            engines += [
                replace(setup, config=msgspec.structs.replace(setup.config, dp_rank=rank)) for rank in range(ranks)
            ]
            shares += [share] * ranks
    return ClusterSetup(scenario=scenario, engines=tuple(engines), shares=tuple(shares))


def kind_of(setup: Setup) -> str:
    """What an engine is called: its hardware, and its role if it has one."""
    return f"{setup.config.role}: {setup.hardware}" if setup.config.hands_over else setup.hardware


def _check_roles(scenario: ClusterScenario, setups: list[Setup]) -> None:
    """Raise ConfigError for engines that cannot hand requests over to each other, or for requests that they cannot."""
    roles = [str(setup.config.role) if setup.config.hands_over else "mixed" for setup in setups]
    if not set(roles) == {"prefill", "decode"}:
        raise ConfigError(
            f"`engines` has the roles {', '.join(sorted(set(roles)))}; prompts need prefill engines, and these need "
            "decode engines behind them\nhint: 2xh200:role=prefill,2xh200:role=decode"
        )
    hybrid = setups[0].config.hybrid is not msgspec.UNSET
    for name in ("transfer_allocation", *["page_size"] * hybrid):  # windows are sent page by page
        values = {getattr(setup.config, name) for setup in setups}
        if len(values) > 1:
            raise ConfigError(f"`{name}` must be the same for all engines, got {', '.join(sorted(map(str, values)))}")
    options = {
        "router_report_interval": scenario.report_interval_us,
        "autoscale": scenario.scaling,
        "admission": scenario.dispatch,
    }
    for name, value in options.items():
        if value:
            raise ConfigError(
                f"`{name}` is for engines that all do the same, not yet for roles\nhint: drop one of them"
            )
    model, turns = setups[0].model, setups[0].workload.turns
    if model.delta is not None and not hybrid:
        raise ConfigError(
            f"`role`: {model.name} has linear-attention state, which is handed over from and to slots of its own only\n"
            "hint: --hybrid-memory on"
        )
    if (turns.output_tokens == 0).any():
        raise ConfigError(
            "`workload` has requests that want no output: there is nothing to hand over\nhint: leave out the roles"
        )
    if not 0.001 <= scenario.link_gbs <= 1e6:
        raise ConfigError(f"`link_bandwidth` must be from 0.001 to 1,000,000 GB/s, got `{scenario.link_gbs:g}`")
    if not 0 <= scenario.link_latency_us <= HOP_US_MAX:
        raise ConfigError(
            f"`link_latency` must be from 0 to {HOP_US_MAX // 10**6}s, got `{scenario.link_latency_us}us`"
        )


def _check_options(scenario: ClusterScenario, groups: tuple[EngineGroup, ...], count: int) -> None:
    if scenario.report_interval_us < 0 or scenario.report_delay_us < 0:
        raise ConfigError("`router_report_interval` and `router_report_delay` must be at least 0")
    if scenario.report_interval_us and scenario.router.policy not in REPORTING:
        raise ConfigError(
            f"`router_report_interval` is a setting of {' and '.join(REPORTING)}, got one under "
            f"{scenario.router.policy}\nhint: --router total_requests, or leave it out"
        )
    if scenario.report_delay_us and not scenario.report_interval_us:
        raise ConfigError("`router_report_delay` needs reports\nhint: --router-report-interval 1s, or leave it out")
    if scenario.scaling is not None:
        if len(groups) > 1:
            raise ConfigError("`autoscale` is for equal engines, got several kinds\nhint: --gpu and --replicas")
        scenario.scaling.config(count)


def _check_shares(dispatch: DispatchConfig, workload: Workload) -> None:
    """Raise ConfigError for the share of a tenant whom no request is of."""
    known = sorted(tenant for tenant in workload.turns.tenants if tenant)
    for tenant in dispatch.tenant_weights:
        if tenant not in known:
            more = f" and {len(known) - TENANTS_SHOWN:,} more" if len(known) > TENANTS_SHOWN else ""
            there = f"its tenants are {', '.join(known[:TENANTS_SHOWN])}{more}" if known else "it has no tenants"
            raise ConfigError(
                f"`admission` has a share for `{tenant}`, but no request of the workload is of that tenant: {there}\n"
                "hint: leave it out, or name where requests come from: --workload NAME=gen:..."
            )


def _weights(groups: tuple[EngineGroup, ...], setups: list[Setup]) -> list[float]:
    """Of each group: what was given, else its estimated capacity beside the first group's, to two digits."""
    if len(groups) == 1:
        return [groups[0].weight or 1.0]
    summary = setups[0].workload.summary()
    rates = [estimate_capacity(setup.cost, setup.config, summary).requests_per_s for setup in setups]
    return [
        group.weight if group.weight is not None else float(f"{rate / rates[0]:.2g}")
        for group, rate in zip(groups, rates, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """A finished simulation of a cluster."""

    setup: ClusterSetup
    engines: tuple[Run, ...]
    data: RunData  # of all engines together, as a client of the router sees it
    routed_by_reason: Mapping[str, int]
    never_sent: int
    interrupted: bool
    stopped_early: bool  # by `give_up`
    cpu_s: float
    intervals: Intervals | None = None  # see intervals_of
    autoscale: Mapping[str, Any] | None = None  # see Cluster.describe_scaling
    admission: Mapping[str, Any] | None = None  # see Cluster.describe_admission
    sent: Sequence[RequestId] = ()  # see Cluster.sent

    @property
    def calibration(self) -> Calibration:
        return self.setup.engines[0].calibration

    @property
    def batches(self) -> int:
        return sum(run.batches for run in self.engines)

    def metrics(self) -> dict[str, Any]:
        """What metrics.json holds: all engines together, then each."""
        return {
            "about": self.about(),
            **self.data.summary,
            **({} if self.intervals is None else {"intervals": self.intervals.describe()}),
            "router": {"routed_by_reason": dict(self.routed_by_reason)},
            **({} if self.autoscale is None else {"autoscale": dict(self.autoscale)}),
            **({} if self.admission is None else {"admission": dict(self.admission)}),
            "balance": self.balance(),
            "engines": [run.data.summary for run in self.engines],
        }

    def balance(self) -> dict[str, Any]:
        """How evenly the work lay; see cluster_metrics.balance."""
        weights = [share.weight for share in self.setup.shares]
        makespan_us = self.data.summary["throughput"]["makespan_us"]
        return balance([run.data.summary for run in self.engines], weights, makespan_us)

    def about(self) -> dict[str, Any]:
        """See ClusterSetup.about; and what must be known to read the numbers."""
        return {
            **self.setup.about(),
            "interrupted": self.interrupted,
            "clamped_requests": sum(run.clamped for run in self.engines),
            "never_sent_turns": self.never_sent,
        }

    def remarks(self) -> list[str]:
        """What a reader of the table must know, one line each."""
        together = Run(
            setup=self.setup.engines[0],
            data=self.data,
            batches=self.batches,
            clamped=sum(run.clamped for run in self.engines),
            rejected=sum((run.rejected for run in self.engines), Counter()),
            never_sent=self.never_sent,
            interrupted=self.interrupted,
            cpu_s=self.cpu_s,
            intervals=self.intervals,
        )
        lines = together.remarks()
        if self.autoscale is not None:
            lines.append(
                "autoscale: {replica_hours:.2f} replica-hours ({gpu_hours:.2f} GPU-hours); all of them all the time "
                "would be {replica_hours_fixed:.2f}; {replicas_mean:.2f} replicas on average, at most {replicas_max}, "
                "{starts} started".format(**self.autoscale)
            )
        if self.admission is not None:
            lines.append(
                "admission: {waited} requests waited at the router, {refused} were refused".format(**self.admission)
            )
        return lines


def simulate_cluster(
    setup: ClusterSetup,
    *,
    folder: Path | None = None,
    check_every: int = 0,
    on_finish: Callable[[int], None] | None = None,
    give_up: Callable[[Any], bool] | None = None,
    eager: bool = False,
    witnesses: Sequence[Observer] = (),
    on_route: Callable[[RequestRouted], None] | None = None,
    compiled: bool | None = None,
) -> ClusterRun:
    """Run a cluster to its end, or until Ctrl-C. With `folder`, its journals are written there.

    Args:
        give_up: asked now and then while requests still come; once it says yes, no more of them do.
        eager: bring every engine up to every arrival. It changes nothing but the time it takes.
        witnesses: none, or one for each engine; see host.Witness. Only where `setup.each_alone`.
        on_route: told of every request that was sent or turned away; only there, either.
        compiled: whether a plain run without journals is one of machine code, see plain_run.py, which changes no
            result; None: once that is worth it.
    """
    if (witnesses or on_route is not None) and not setup.each_alone:
        raise ContractError("nobody is told of routes and steps where engines hand requests over, or are ranks")
    if witnesses and len(witnesses) != len(setup.engines):
        raise ContractError(f"{len(witnesses)} witnesses of {len(setup.engines)} engines")
    watched = folder is not None or check_every or eager or witnesses or on_route is not None
    if not watched and compiled is not False:
        run = _run_compiled(setup, on_finish, give_up, always=compiled is True)
        if run is not None:
            return run
    with ExitStack() as stack:
        journals: list[JournalSink] = []
        router_journal: RouterJournal | NoRouterJournal = NoRouterJournal()
        decode_router_journal: RouterJournal | NoRouterJournal = NoRouterJournal()
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for engine in range(len(setup.engines)):
                journal = JournalWriter.create(folder / "engines" / str(engine), setup.header(engine))
                journals.append(stack.enter_context(journal))
            scenario = setup.scenario
            router_journal = stack.enter_context(
                RouterJournal(folder, scenario.router, setup.shares_of("prefill"), scenario.dispatch)
            )
            if setup.hands_over:
                (folder / DECODE).mkdir(mode=0o700, exist_ok=True)
                decode_journal = RouterJournal(folder / DECODE, DECODE_ROUTER, setup.shares_of("decode"))
                decode_router_journal = stack.enter_context(decode_journal)
        else:
            journals = [NoJournal()] * len(setup.engines)
        cluster: Cluster | HandoverCluster | RankCluster
        if setup.hands_over:
            both = router_journal, decode_router_journal
            cluster = HandoverCluster(setup, journals, both, check_every=check_every, on_finish=on_finish)
        elif setup.ranks > 1:
            cluster = RankCluster(setup, journals, router_journal, check_every=check_every, on_finish=on_finish)
        else:
            cluster = Cluster(
                setup,
                journals,
                router_journal,
                check_every=check_every,
                on_finish=on_finish,
                eager=eager,
                witnesses=witnesses,
                on_route=on_route,
            )
        began_s = time.process_time()
        with stopping_on_interrupt(cluster), collecting_seldom():
            stopped_early = cluster.run(give_up)
        run = cluster.result(stopped_early, began_s)
        for sink in journals:
            if isinstance(sink, JournalWriter):
                sink.close("interrupted" if run.interrupted else "closed")
    return run


GIVE_UP_EVERY = 32  # requests between two questions whether to give up, at least ...
GIVE_UP_SHARE = 16  # ... and this part of those that have come


class Cluster:
    """Lanes behind a router. The only place where engines meet."""

    def __init__(
        self,
        setup: ClusterSetup,
        journals: list[JournalSink],
        router_journal: RouterJournal | NoRouterJournal,
        *,
        check_every: int = 0,
        on_finish: Callable[[int], None] | None = None,
        eager: bool = False,
        witnesses: Sequence[Observer] = (),
        on_route: Callable[[RequestRouted], None] | None = None,
    ) -> None:
        scenario = setup.scenario.base
        self.setup = setup
        self.now_us = 0
        self.arrivals = arrivals_of(setup.engines[0])
        line = setup.scenario.dispatch
        self._dispatcher = None if line is None else Dispatcher(line, setup.scenario.router, setup.shares)
        self._by_priority = line is not None and line.order == "priority"
        self.router = Router(setup.scenario.router, setup.shares) if line is None else self._line.router
        self.lanes: list[EngineLane] = []
        self.metrics: list[MetricsFold] = []
        self.routed_by_reason: Counter[str] = Counter()
        self._journal = router_journal
        self._hop_us = setup.scenario.hop_us
        self._max_new_tokens = scenario.max_new_tokens
        self._by_prefix = setup.scenario.router.policy == "prefix_affinity"
        self._by_room = setup.scenario.router.policy == "follow_bootstrap_room"
        self._seed = scenario.seed
        self._by_session = setup.scenario.router.policy == "session_sticky"
        self._sessions: dict[int, str] = {}  # by index of a turn: the label of the first of its session
        self._ended: list[
            tuple[int, int, RequestId, int]
        ] = []  # heap: when the router sees it, engine, request, output
        self._ended_count = 0
        self._on_finish = on_finish
        self._on_route = on_route
        self._eager = eager
        self._stop_requested = False
        self._held: dict[RequestId, RequestArrived] = {}  # those that wait at the router
        self.waited_us: dict[RequestId, int] = {}
        self.sent: list[RequestId] = []  # by the number under which an engine knows a request, where some may wait
        self._sent_turns: dict[RequestId, Turn] = {}  # the same of those that are open
        self.refused: list[RefusedRequest] = []
        self._report_interval_us = setup.scenario.report_interval_us
        self._report_us = self._report_interval_us or NEVER_US  # when engines report next
        self._reports: deque[LoadReported] = deque()  # on their way
        self._last_end_us = 0
        scaling = setup.scenario.scaling
        self._scaler = None if scaling is None else Autoscaler(scaling.config(len(setup.engines)))
        self._flushes = 0
        self._turns_on: list[tuple[int, int]] = []  # when, and how many replicas were paid for from then on
        turns = setup.workload.turns
        thinking = turns.think_us[turns.after >= 0]
        # In a closed loop the next session begins where one ends.
        closed = scenario.concurrency is not None
        self._think_us_min = int(thinking.min()) if len(thinking) and not closed else 0
        for engine, (one, journal) in enumerate(zip(setup.engines, journals, strict=True)):
            clock = LaneClock()
            open_turns = self.arrivals.open_turns if self._dispatcher is None else self._sent_turns
            feed = Feed(engine, open_turns, self._on_end, clock)
            host, metrics = host_of(
                one,
                feed,
                journal,
                env=clock,
                name=f"engine{engine}",
                check_every=check_every,
                witness=witnesses[engine] if witnesses else None,
            )
            self.lanes.append(EngineLane(host, feed, clock, one.cost, early_ends=scenario.max_new_tokens is not None))
            self.metrics.append(metrics)
        if self._scaler is not None:
            for replica, state in enumerate(self._scaler.state):
                if state == "off":
                    self._decide(EngineChanged(time_us=0, engine=replica, state="down"))

    @property
    def _line(self) -> Dispatcher:
        assert self._dispatcher is not None
        return self._dispatcher

    @property
    def client_metrics(self) -> list[MetricsFold]:
        """Of the engines that clients hear of: all."""
        return self.metrics

    @property
    def stop_requested(self) -> bool:
        """Set from a signal handler: every engine stops before its next fact."""
        return self._stop_requested

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self._stop_requested = value
        for lane in self.lanes:
            lane.host.stop_requested = value

    def run(self, give_up: Callable[[Cluster], bool] | None = None) -> bool:
        """Route every request and finish every answer. Return whether it was given up before all had come."""
        arrivals, lanes, hop_us = self.arrivals, self.lanes, self._hop_us
        until_question = GIVE_UP_EVERY
        while not self._stop_requested:
            now_us = self._next_us()
            if arrivals.awaits_answers or self._held:
                # A turn to come is not known yet: none comes before the first answer ends and its reader has thought.
                # And who waits at the router goes as soon as somebody ends.
                first_us = min(lane.quiet_until_us for lane in lanes)
                sure_us = first_us + hop_us + (0 if self._held else self._think_us_min)
                if sure_us < now_us:
                    self._advance(max(sure_us, first_us + 1))
                    continue
            if now_us == NEVER_US:
                break
            if self._eager:
                self._advance_all(now_us)
            else:
                self._catch_up(now_us)
            self._tell_ends(now_us + 1 if self._held else now_us)
            self._look_after(now_us)
            while arrivals.next_us == now_us:
                self._route()
                until_question -= 1
            if give_up is not None and until_question <= 0:
                until_question = max(GIVE_UP_EVERY, arrivals.arrived // GIVE_UP_SHARE)
                # Everybody to one moment, before which nothing that is sent from here on arrives.
                self._advance_all(min(now_us + hop_us, self._report_us))
                if give_up(self):
                    return True
        for lane in lanes:
            lane.advance(float("inf"))
        self._tell_ends(NEVER_US)
        return False

    def _advance(self, until_us: float) -> None:
        """Bring every engine that may have an answer to end before `until_us` there, or to the turn that follows."""
        for lane in self.lanes:
            until_us = min(until_us, self._next_us())
            if lane.quiet_until_us < until_us or self._eager:
                lane.advance(until_us)

    def _advance_all(self, until_us: float) -> None:
        for lane in self.lanes:
            lane.advance(until_us)

    def _catch_up(self, now_us: int) -> None:
        """Have every end happen that the router would have seen by now. What is sent now comes one hop later.

        Nobody runs past the moment of its next report.
        """
        seen_us, until_us = now_us - self._hop_us, min(now_us + self._hop_us, self._report_us)
        for lane in self.lanes:
            if lane.quiet_until_us < seen_us:
                lane.advance(until_us)

    def _route(self) -> None:
        event = self.arrivals.take(self._max_new_tokens)
        assert type(event) is RequestArrived
        turn = self.arrivals.open_turns[event.request_id]
        prefix: tuple[int, ...] = ()
        if self._by_prefix:
            assert type(event.prompt) is TokenRuns
            ids = prompt_ids(event.prompt.runs)
            prefix = prefix_keys(ids, self.router.config.block_tokens, event.tenant)
        session = ""
        if self._by_session:
            session = turn.label if turn.after is None else self._sessions[turn.after]
            self._sessions[turn.index] = session
        offered = RequestOffered(
            time_us=event.time_us,
            request_id=event.request_id,
            prompt_tokens=turn.prompt_tokens,
            prefix=prefix,
            session=session,
            tenant=event.tenant if self._dispatcher is not None else "",
            priority=event.priority if self._by_priority else None,
            room=room_of(self._seed, event.request_id) if self._by_room else None,
        )
        self._held[event.request_id] = event
        self._decide(offered)

    def _decide(self, fact: RouterFact) -> None:
        """Tell the router a fact, write it down, and do what it decided."""
        if self._dispatcher is None:
            routed = self.router.step(fact)
            self._journal.append(fact, routed, self.router.digest)
            if routed is not None:
                self._carry_out(routed, fact.time_us)
        else:
            decided = self._dispatcher.step(fact)
            label = ""
            if isinstance(fact, RequestOffered):
                label = label_key(self._held[fact.request_id].label, fact.tenant)
            self._journal.append_decided(fact, decided, self._dispatcher.digest, label)
            for each in decided:
                self._carry_out(each, fact.time_us)

    def _carry_out(self, routed: RequestRouted, now_us: int) -> None:
        """Send a request where it was routed, or turn it away; nothing if it waits."""
        if routed.reason == "waits":
            return
        event = self._held.pop(routed.request_id)
        self.routed_by_reason[routed.reason] += 1
        if self._on_route is not None:
            self._on_route(routed)
        waited_us = now_us - event.time_us
        if routed.engine is None:
            turn = self.arrivals.open_turns[event.request_id]
            self.refused.append(
                RefusedRequest(event.request_id, event.time_us, now_us, turn.prompt_tokens, turn.label, event.tenant)
            )
            self.arrivals.broke_off(event.request_id, now_us)
            return
        if waited_us:
            self.waited_us[event.request_id] = waited_us
        if self._dispatcher is not None:
            event = self._numbered(event)
        if waited_us or self._hop_us:
            event = msgspec.structs.replace(event, time_us=now_us + self._hop_us)
        self.lanes[routed.engine].send(event)

    def _numbered(self, event: RequestArrived) -> RequestArrived:
        """The request under a number that increases in the order of sending, as engines want it."""
        number = len(self.sent)
        self.sent.append(event.request_id)
        self._sent_turns[number] = self.arrivals.open_turns[event.request_id]
        return msgspec.structs.replace(event, request_id=number)

    # ------------------------------------------------------------------------------------ what happens beside arrivals

    def _next_us(self) -> int:
        """When the router is told something next, as far as is known: ends only where they make somebody go."""
        next_us = self.arrivals.next_us
        if self._held and self._ended:
            next_us = min(next_us, self._ended[0][0])
        if self._scaler is None and not self._report_interval_us:
            return next_us
        if next_us == NEVER_US and not self.router.open and not self._held:
            return NEVER_US
        if self._scaler is not None:
            next_us = min(next_us, self._scaler.next_us)
        if self._reports:
            next_us = min(next_us, self._reports[0].time_us)
        return min(next_us, self._report_us)

    def _look_after(self, now_us: int) -> None:
        """Reports and replicas that are due. Before any request that comes at the same instant."""
        if now_us == self._report_us:
            self._report_us += self._report_interval_us
            self._advance_all(now_us)  # what they have done by then, and nothing later
            self._tell_ends(now_us)
            due_us = now_us + self.setup.scenario.report_delay_us
            self._reports.extend(
                report_of(engine, lane.host.engine, now_us, due_us)
                for engine, lane in enumerate(self.lanes)
                if self.router.state[engine] != "down"
            )
        while self._reports and self._reports[0].time_us <= now_us:
            self._decide(self._reports.popleft())
        if self._scaler is not None and self._scaler.next_us <= now_us:
            self._scale(self._scaler, now_us)

    def _scale(self, scaler: Autoscaler, now_us: int) -> None:
        """Let the autoscaler look at the load, and do what it says."""
        router = self.router
        waiting = [event for event in self._held.values() if event.request_id not in router.open]
        observed = LoadObserved(
            time_us=now_us,
            open=tuple(router.open_requests),
            open_tokens=sum(router.open_tokens)
            + sum(self.arrivals.open_turns[event.request_id].prompt_tokens for event in waiting),
            arrived=self.arrivals.arrived,
            waiting=len(waiting),
        )
        for changed in scaler.step(observed):
            engine = changed.engine
            if changed.state == "up" and router.state[engine] == "down" and self.lanes[engine].host.ended:
                self._flushes += 1  # another machine, whose cache is empty
                self.lanes[engine].send(ControlRequested(now_us, self._flushes, Flush()))
            self._decide(changed)
        paid = sum(state != "off" for state in scaler.state)
        if not self._turns_on or self._turns_on[-1][1] != paid:
            self._turns_on.append((now_us, paid))

    def _on_end(self, engine: int, request_id: RequestId, now_us: int, answered: bool) -> None:
        """A lane says that a request ended. The router and the client learn of it one hop later."""
        seen_us = now_us + self._hop_us
        if self._dispatcher is not None:
            del self._sent_turns[request_id]
            request_id = self.sent[request_id]
        turn = self.arrivals.open_turns[request_id]  # which it leaves now
        heappush(self._ended, (seen_us, engine, request_id, turn.samples * turn.output_tokens if answered else 0))
        if answered:
            self.arrivals.answered(request_id, seen_us)
        else:
            self.arrivals.broke_off(request_id, seen_us)
        held_us = seen_us if self._held else NEVER_US  # somebody goes then
        self.lanes[engine].hold_at(min(self.arrivals.next_us, held_us) + self._hop_us)
        self._ended_count += 1
        if self._on_finish is not None:
            self._on_finish(self._ended_count)

    def _tell_ends(self, before_us: int) -> None:
        """Tell the router what it has seen end before a moment."""
        while self._ended and self._ended[0][0] < before_us:
            time_us, _, request_id, output_tokens = heappop(self._ended)
            at = self.router.open.get(request_id)
            self._last_end_us = time_us
            self._decide(RequestEnded(time_us=time_us, request_id=request_id, output_tokens=output_tokens))
            scaler = self._scaler
            if scaler is not None and at is not None and scaler.state[at.engine] == "draining":
                if not self.router.open_requests[at.engine]:
                    self._scale(scaler, time_us)

    def describe_scaling(self) -> dict[str, Any] | None:
        """What replicas cost: paid for from their start until they were given back, or until the last answer."""
        scaler, setup = self._scaler, self.setup
        if scaler is None:
            return None
        until_us = max(self._last_end_us, scaler.now_us)
        paid_us, gpus = scaler.paid_us(until_us), setup.engines[0].split.gpus
        hour_us = 3_600e6
        return {
            "replica_hours": round(paid_us / hour_us, 6),
            "gpu_hours": round(paid_us / hour_us * gpus, 6),
            "replica_hours_fixed": round(until_us * len(setup.engines) / hour_us, 6),
            "replicas_mean": round(paid_us / until_us, 6) if until_us else float(scaler.config.minimum),
            "replicas_max": scaler.most,
            "starts": scaler.starts,
            "replicas_by_time": [list(pair) for pair in self._turns_on],
        }

    def describe_admission(self) -> dict[str, Any] | None:
        """Who waited at the router, and for how long."""
        if self._dispatcher is None:
            return None
        waits_us = sorted(self.waited_us.values())
        return {
            "waited": len(waits_us),
            "refused": len(self.refused),
            "wait_us_max": waits_us[-1] if waits_us else 0,
            "wait_us_mean": round(sum(waits_us) / len(waits_us), 3) if waits_us else None,
        }

    def result(self, stopped_early: bool, began_s: float) -> ClusterRun:
        """Measure it."""
        slos = self.setup.scenario.base.slos
        datas = [
            with_stages(metrics.result(slos), lane.host) for metrics, lane in zip(self.metrics, self.lanes, strict=True)
        ]
        data = combine(
            datas, hop_us=self._hop_us, slos=slos, waited_us=self.waited_us, refused=self.refused, sent=self.sent
        )
        cpu_s = time.process_time() - began_s
        return ClusterRun(
            setup=self.setup,
            engines=tuple(
                Run(
                    setup=one,
                    data=measured,
                    batches=lane.host.batches,
                    clamped=lane.host.clamped,
                    rejected=lane.host.rejected,
                    never_sent=0,
                    interrupted=self._stop_requested,
                    cpu_s=cpu_s / len(self.lanes),
                )
                for one, measured, lane in zip(self.setup.engines, datas, self.lanes, strict=True)
            ),
            data=data,
            routed_by_reason=dict(sorted(self.routed_by_reason.items())),
            never_sent=self.arrivals.never_sent,
            interrupted=self._stop_requested,
            stopped_early=stopped_early,
            cpu_s=cpu_s,
            autoscale=self.describe_scaling(),
            admission=self.describe_admission(),
            sent=self.sent,
        )


class PlainCluster:
    """A cluster whose run is a plain one: the same as machine code."""

    def __init__(self, setup: ClusterSetup, on_finish: Callable[[int], None] | None) -> None:
        """From the beginning. `unsupported_by_cluster(setup)` was empty."""
        self.setup = setup
        self.metrics = [MetricsFold(kv_pages=one.config.pages, warm_up=one.scenario.warm_up) for one in setup.engines]
        router, turns, seed = setup.scenario.router, setup.workload.turns, setup.scenario.base.seed
        given = []
        if router.policy == "follow_bootstrap_room":
            given = [engine_of_room(room_of(seed, number), len(setup.engines)) for number in range(len(turns))]
        self.plain = FastRun(setup.engines, self.metrics, on_finish)
        self.plain.route(router, setup.shares, setup.scenario.hop_us, given)

    @property
    def client_metrics(self) -> list[MetricsFold]:
        """Of the engines that clients hear of: all, as they stand."""
        self.plain.hand_over()
        return self.metrics

    def run(self, give_up: Callable[[PlainCluster], bool] | None) -> ClusterRun | None:
        """Route every request and finish every answer, unless it is given up; None: only the core can do it."""
        stopped_early = False

        def ask(arrived: int) -> int:
            nonlocal stopped_early
            stopped_early = give_up is not None and give_up(self)
            return 0 if stopped_early else max(GIVE_UP_EVERY, arrived // GIVE_UP_SHARE)

        began_s = time.process_time()
        with stopping_on_interrupt(self.plain), collecting_seldom():
            if not self.plain.run(*(() if give_up is None else (GIVE_UP_EVERY, ask))):
                return None
        setup = self.setup
        datas = [fold.result(setup.scenario.base.slos) for fold in self.metrics]
        data = combine(datas, hop_us=setup.scenario.hop_us, slos=setup.scenario.base.slos)
        cpu_s = time.process_time() - began_s
        reason = "room" if setup.scenario.router.policy == "follow_bootstrap_room" else "policy"
        routed = self.plain.routed()
        return ClusterRun(
            setup=setup,
            engines=tuple(
                Run(
                    setup=one,
                    data=measured,
                    batches=self.plain.batches(engine),
                    clamped=0,
                    rejected=Counter(),
                    never_sent=0,
                    interrupted=self.plain.stop_requested,
                    cpu_s=cpu_s / len(datas),
                )
                for engine, (one, measured) in enumerate(zip(setup.engines, datas, strict=True))
            ),
            data=data,
            routed_by_reason={reason: routed} if routed else {},
            never_sent=0,
            interrupted=self.plain.stop_requested,
            stopped_early=stopped_early,
            cpu_s=cpu_s,
        )


def unsupported_by_cluster(setup: ClusterSetup) -> str:
    """What of a cluster only the core can do, in a word or two; empty: nothing that is known in advance."""
    scenario, turns = setup.scenario, setup.workload.turns
    beside = {
        "engines that meet": not setup.each_alone,
        "autoscaling": scenario.scaling is not None,
        "waiting at the router": scenario.dispatch is not None,
        "reports": bool(scenario.report_interval_us),
        "sessions": scenario.router.policy == "session_sticky" and not turns.labels_differ,
    }
    for name, is_there in beside.items():
        if is_there:
            return name
    different = {id(engine): engine for engine in setup.engines}  # those of a group share theirs
    return next(filter(None, map(unsupported_by, different.values())), "")


def _run_compiled(
    setup: ClusterSetup, on_finish: Callable[[int], None] | None, give_up: Callable[[Any], bool] | None, *, always: bool
) -> ClusterRun | None:
    """The same as machine code; None: it is none that may be, turned out to be none, or is not worth it."""
    if not is_available() or unsupported_by_cluster(setup) or not (always or pays(len(setup.workload.turns))):
        return None
    return PlainCluster(setup, on_finish).run(give_up)


def room_of(seed: int, request_id: RequestId) -> int:
    """The room a router in front of prefill and decode engines draws for a request: 63 bits, as in SGLang's."""
    return int.from_bytes(blake2b(f"{seed} {request_id}".encode(), digest_size=8).digest(), "big") >> 1


# ------------------------------------------------------------------------------------------------------- the run folder


def write_cluster_run(
    folder: Path, run: ClusterRun, *, requests: bool = True, trace: bool = True, report: bool = True
) -> None:
    """Write what was measured beside the journals; traces lie with their engines."""
    from lockstep.sim.report import ReportRun, write_report
    from lockstep.sim.results.perfetto import write_trace
    from lockstep.sim.results.results import write_metrics_json, write_requests
    from lockstep.sim.run.run_folder import interrupted_headline, report_run, whole, workload_line

    about = run.about()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with whole(folder / "metrics.json") as path:
        text = json.dumps(run.metrics(), indent=2, allow_nan=False, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
    for engine, one in enumerate(run.engines):
        (folder / "engines" / str(engine)).mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole(folder / "engines" / str(engine) / "metrics.json") as path:
            write_metrics_json(path, one.data, {**one.setup.about(), "command": about["command"], "engine": engine})
        if trace:
            with whole(folder / "engines" / str(engine) / "trace.json.gz") as path:
                write_trace(path, one.data, about={"seed": about["seed"], "command": about["command"]})
    if requests:
        with whole(folder / "requests.parquet") as parquet, whole(folder / "requests.csv") as csv:
            write_requests(run.data, parquet, csv)
    if report and run.data.summary["requests"]["arrived"]:
        facts = {"command": about["command"], "router": run.setup.scenario.router.policy}
        whole_run = ReportRun(
            "all",
            facts,
            run.data,
            intervals=None if run.intervals is None else run.intervals.describe(),
            calibration=run.calibration.title,
            remarks=run.remarks(),
        )
        runs = [whole_run]
        shown = _engines_to_report(run)
        runs += [report_run(run.engines[engine], f"engine {engine}") for engine in shown]
        parts = "All together are what clients of the router see; an engine saw only what was routed to it."
        if len(shown) < len(run.engines):
            parts += (
                f" Of {len(run.engines)} engines, {len(shown)} are shown: "
                "those with the most requests and those with the fewest, and none without any."
            )
        with whole(folder / "report.html") as path:
            write_report(
                path,
                runs,
                title=run.setup.title,
                subtitle=workload_line(run.setup.workload, closed=run.setup.scenario.base.concurrency is not None),
                headline=interrupted_headline(run) if run.interrupted else None,
                parts=parts,
            )


def _engines_to_report(run: ClusterRun) -> list[int]:
    """The engines that got requests; of very many those with the most and those with the fewest. By number."""
    arrived = [one.data.summary["requests"]["arrived"] for one in run.engines]
    busy = sorted((engine for engine, count in enumerate(arrived) if count), key=lambda engine: -arrived[engine])
    half = ENGINES_REPORTED // 2
    return sorted(busy if len(busy) <= ENGINES_REPORTED else busy[:half] + busy[-half:])
