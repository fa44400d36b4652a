"""The setup of a simulated cluster: its engines, their shares at the router, and the checks of its options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from lockstep.core.cluster.dispatch import DispatchConfig
from lockstep.core.cluster.router import (
    EngineShare,
)
from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.records import JournalHeader
from lockstep.sim.cluster.capacity_estimate import estimate_capacity
from lockstep.sim.cluster.placement import PlacedEngine
from lockstep.sim.cluster.ranks import check_cluster_of_ranks
from lockstep.sim.cluster.scenario import PLACEMENTS, USUAL_PLACEMENT, ClusterScenario, EngineGroup
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.encoding import encoder_tp, encoder_tp_mode
from lockstep.sim.run.setup import Setup
from lockstep.sim.workload.workload import Workload

REPORTING = ("total_requests", "total_tokens")  # policies of a router that use the reports of engines
HOP_US_MAX = 60_000_000
COMMON = (
    *("format", "format_version", "command", "seed", "version", "commit", "model", "workload"),
    *("max_new_tokens", "grammar_compile_us", "receive_interval", "calibration"),
)  # entries of `Setup.about` that are equal for all engines
REPLICAS_MAX = 1024
TENANTS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class ClusterSetup:
    """A cluster scenario with everything that it names, loaded and checked."""

    scenario: ClusterScenario
    engines: tuple[Setup, ...]  # by engine, or by rank; engines of a group share one setup
    shares: tuple[EngineShare, ...]  # by engine, or by rank

    @property
    def workload(self) -> Workload:
        return self.engines[0].workload

    @property
    def gpus(self) -> int:
        return sum(setup.split.gpus for setup in self.whole_engines)

    @property
    def ranks(self) -> int:
        """Ranks per engine if ranks have schedulers (`engines` then has an entry per rank); else 1."""
        ranks = self.engines[0].config.dp_ranks
        return ranks if isinstance(ranks, int) else 1

    @property
    def whole_engines(self) -> list[Setup]:
        """One setup per engine: of an engine with ranks, that of its first rank."""
        return [setup for setup in self.engines if not setup.config.shares_passes or setup.config.dp_rank == 0]

    @property
    def encoders(self) -> list[int]:
        """By entry of `engines`, the number of the engine whose separate encoder GPUs it uses; ranks share them."""
        found: list[int] = []
        for setup in self.engines:
            follows = setup.config.shares_passes and setup.config.dp_rank != 0
            found.append(found[-1] if follows else len(found))
        return found

    @property
    def hands_over(self) -> bool:
        """Whether prefill engines hand requests over to decode engines."""
        return self.engines[0].config.hands_over

    @property
    def is_tested(self) -> bool:
        """Whether the coverage of intervals was counted on predictions like this one: never with handovers."""
        return not self.hands_over and all(setup.is_tested for setup in self.engines)

    @property
    def each_alone(self) -> bool:
        """Whether engines interact only at the router: no handovers, and no ranks."""
        return self.ranks == 1 and not self.hands_over

    def link_bytes_per_us(self, engine: Setup) -> float:
        """Return the bytes per us that an engine, or a rank, can send to others and receive."""
        ranks = engine.config.dp_ranks
        return self.scenario.link_gbs * 1e3 * engine.split.gpus / (ranks if isinstance(ranks, int) else 1)

    def placed(self) -> list[PlacedEngine]:
        """Return each engine, or rank of one, as it is placed in racks."""
        return [PlacedEngine(one.gpu, one.split.gpus, str(one.config.role), self.ranks) for one in self.engines]

    @property
    def title(self) -> str:
        kinds = Counter(kind_of(setup) for setup in self.whole_engines)
        on = " and ".join(f"{count} x ({kind})" if count > 1 else kind for kind, count in kinds.items())
        return f"{self.engines[0].model.name} on {on}, {self.scenario.router.policy}"

    def about(self) -> dict[str, Any]:
        """Return everything that is needed to repeat the run."""
        first = self.engines[0].about()
        return {
            **{name: first[name] for name in COMMON},
            **{name: first[name] for name in ("grammar_forces", "diffusion") if name in first},
            "command": self.scenario.command(),
            "router": msgspec.to_builtins(self.scenario.router),
            "hop_us": self.scenario.hop_us,
            **(
                {
                    "link_gbs": self.scenario.link_gbs,
                    "link_latency_us": self.scenario.link_latency_us,
                    **({} if self.scenario.placement == USUAL_PLACEMENT else {"placement": self.scenario.placement}),
                }
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
        """Return the shares of the engines of a role; without handovers, of all engines."""
        return tuple(
            share
            for share, engine in zip(self.shares, self.engines, strict=True)
            if not self.hands_over or engine.config.role == role
        )

    def _about_options(self) -> dict[str, Any]:
        """Return the provenance of options that are present only if given."""
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
        """Return a setup with the time of every batch multiplied by `factor`; routing weights are unchanged."""
        return replace(self, engines=tuple(setup.slowed(factor) for setup in self.engines))

    def header(self, engine: int) -> JournalHeader:
        """Return the header of one engine's journal."""
        return self.engines[engine].header(engine, len(self.engines))


def assemble_cluster(
    scenario: ClusterScenario, environ: Mapping[str, str] | None = None, *, workload: Workload | None = None
) -> ClusterSetup:
    """Load and check everything that the scenario names.

    Args:
        environ: environment, with variables that override settings; None: that of the process.
        workload: the scenario's workload if it is loaded already; None: it is read.
    Raises: ConfigError, CatalogueError, CapacityError, CalibrationError or WorkloadError, like `assemble`.
    """
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
    """Return a setup with an entry per rank: the router chooses among all ranks of all engines."""
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
    """Return the title of an engine: its hardware, and its role if it has one."""
    return f"{setup.config.role}: {setup.hardware}" if setup.config.hands_over else setup.hardware


def _check_roles(scenario: ClusterScenario, setups: list[Setup]) -> None:
    """Raise ConfigError if engines or workload do not allow handovers, or an option is not simulated with them."""
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
                f"`{name}` is for engines that all do the same, not yet for roles\nhint: leave out one of them"
            )
    model, turns = setups[0].model, setups[0].workload.turns
    if model.delta is not None and not hybrid:
        raise ConfigError(
            f"`role`: {model.name} has linear-attention state, which is handed over from and to slots of its own only\n"
            "hint: --hybrid-memory on"
        )
    if (turns.output_tokens == 0).any():
        raise ConfigError(
            "`workload` has requests without output: there is nothing to hand over\nhint: leave out the roles"
        )
    if scenario.placement not in PLACEMENTS:
        raise ConfigError(f"`placement` must be one of {', '.join(PLACEMENTS)}, got `{scenario.placement}`")
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
    """Raise ConfigError for the share of a tenant that has no request in the workload."""
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
    """Return the weight of each group: the given one, else the group's estimated capacity over the first group's.

    Estimated weights are rounded to 2 digits.
    """
    if len(groups) == 1:
        return [groups[0].weight or 1.0]
    summary = setups[0].workload.summary()
    rates = [estimate_capacity(setup.cost, setup.config, summary).requests_per_s for setup in setups]
    return [
        group.weight if group.weight is not None else float(f"{rate / rates[0]:.2g}")
        for group, rate in zip(groups, rates, strict=True)
    ]
