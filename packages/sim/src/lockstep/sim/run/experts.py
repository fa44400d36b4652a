"""The experts of a run: whether their load is measured, whether they are placed by it, and what moves cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from lockstep.core.contract.config import ExpertPlacing, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cost import CostModel
from lockstep.sim.cost.expert_balance import Spread
from lockstep.sim.cost.hardware import GpuSpec, achieved
from lockstep.sim.cost.models import ModelSpec, WeightsDtype
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.roofline import roofline_model
from lockstep.sim.host.expert_traffic import ExpertTraffic
from lockstep.sim.scenario.scenario import Scenario

LOAD_INTERVAL = 100  # batches between two measurements where experts are placed and no interval is given


def follows_events(scenario: Scenario, split: Parallelism) -> bool:
    """Return whether the experts are placed by the core, by measured load.

    Data-parallel ranks with schedulers of their own, and stages, take the long-run average of `cost/expert_balance.py`.
    """
    return split.eplb and split.pp == 1 and not scenario.rank_schedulers


def with_experts(config: SchedConfig, scenario: Scenario, model: ModelSpec, split: Parallelism) -> SchedConfig:
    """Return the settings with the placement of experts. Raises ConfigError for a model without experts."""
    interval = config.expert_load_interval
    if interval is not msgspec.UNSET and model.experts is None:
        raise ConfigError(f"`expert_load_interval` is {interval}, but {model.name} has no experts\nhint: leave it out")
    if interval is not msgspec.UNSET and split.pp > 1:
        raise ConfigError(
            f"`expert_load_interval` is {interval}, but `pp` is {split.pp}: the load of experts in several stages is "
            "not measured yet\nhint: drop one of the two"
        )
    least_imbalance = scenario.eplb_imbalance_min
    if not least_imbalance >= 1.0:
        raise ConfigError(f"`eplb_imbalance_min` must be at least 1 (the mean load), got `{least_imbalance}`")
    if model.experts is None or not follows_events(scenario, split):
        if least_imbalance != 1.0:
            raise ConfigError(
                f"`eplb_imbalance_min` is {least_imbalance}, but no scheduler places experts by their load here\n"
                "hint: --eplb, without --pp and --rank-schedulers; or leave it out"
            )
        return config
    placing = ExpertPlacing(
        layers=model.moe_layers,
        experts=model.experts.count,
        ranks=split.ep,
        slots=model.experts.count + split.redundant_experts,
        interval=split.eplb_interval,
        imbalance_min=least_imbalance,
    )
    least = min(LOAD_INTERVAL, split.eplb_interval) if interval is msgspec.UNSET else interval
    return msgspec.structs.replace(config, experts=placing, expert_load_interval=least)


def experts_of(
    model: ModelSpec,
    gpu: GpuSpec,
    split: Parallelism,
    config: SchedConfig,
    weights_dtype: WeightsDtype | None,
    build: Callable[[Parallelism], CostModel],
) -> ExpertSetup | None:
    """Return the experts of a run; None: their load is not measured."""
    if config.expert_load_interval is msgspec.UNSET:
        return None
    roofline = roofline_model(model, gpu, split, weights_dtype=weights_dtype)
    return ExpertSetup(model, split, config, roofline.expert_bytes / (achieved(gpu, "send_gbs").value * 1e3), build)


@dataclass(frozen=True, slots=True)
class ExpertSetup:
    """What the simulated experts of each engine of a run are made of.

    Args:
        fetch_us: time in which a rank fetches one expert of one layer.
        build: makes the cost model of a layout.
    """

    model: ModelSpec
    split: Parallelism
    config: SchedConfig
    fetch_us: float
    build: Callable[[Parallelism], CostModel]
    costs: dict[tuple[float, float], CostModel] = field(default_factory=dict)

    def traffic(self) -> ExpertTraffic:
        """Return the experts of one engine."""
        experts, placing = self.model.experts, self.config.experts
        assert experts is not None
        return ExpertTraffic(
            self.model.moe_layers,
            experts.count,
            experts.per_token,
            cv=self.split.expert_cv,
            drift=self.split.expert_drift,
            placing=None if placing is msgspec.UNSET else placing,
            fetch_us=lambda count: count * self.fetch_us,
            cost_of=self._cost_of,
        )

    def _cost_of(self, spread: Spread) -> CostModel:
        key = round(spread.load_cv, 4), round(spread.slot_cv, 4)
        if key not in self.costs:
            self.costs[key] = self.build(replace(self.split, measured=key))
        return self.costs[key]
