"""Assembly of a setup from a scenario: load what the options name, check it, compute the scheduler's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.rank_settings import settings_of_rank
from lockstep.host.adapters import LORAS
from lockstep.host.options import option_of
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import (
    Calibration,
    CostModel,
    CpuModel,
    GpuSpec,
    KvCapacity,
    ModelSpec,
)
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.hardware import in_racks
from lockstep.sim.cost.lora import check_targets
from lockstep.sim.cost.models import check_split
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.cost.two_batch import SplitTerms, TwoBatchModel
from lockstep.sim.host.device import EOS_TOKEN_ID
from lockstep.sim.host.forcing import Forcing
from lockstep.sim.host.hybrid_memory import (
    block_bytes,
    check_hybrid,
    host_page_bytes,
    hybrid_settings,
)
from lockstep.sim.host.page_bytes import PageBytes
from lockstep.sim.host.speculation import Acceptance, Drafting, ModelDraftCost, NgramDraftCost, head_of
from lockstep.sim.run.adapters import check_adapters, lora_of
from lockstep.sim.run.capacity import _capacity
from lockstep.sim.run.diffusion import passes_of, with_blocks
from lockstep.sim.run.encoding import EncoderSetup, check_encoding
from lockstep.sim.run.energy import site_of
from lockstep.sim.run.engine import calibration_of, scheduling
from lockstep.sim.run.environment import debug_level, environment_settings
from lockstep.sim.run.experts import experts_of, with_experts
from lockstep.sim.run.layout import layout_of
from lockstep.sim.run.load import check_load, check_measured, check_samples, check_seed, open_load
from lockstep.sim.run.multiplexing import multiplexed_cost, multiplexing_of
from lockstep.sim.run.ranks import check_ranks, config_of_engine
from lockstep.sim.run.sessions import check_server_sessions
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.whole_prompts import check_requests, check_whole, whole_settings, without_kv
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.tier_options import host_tiers, hybrid_shares
from lockstep.sim.workload.workload import Workload

PAGES_MAX = 2**28  # this many pages take 3 GB of host memory
ROWS_MAX = 2**20


def gpu_of(scenario: Scenario) -> GpuSpec:
    """Return the GPU of a scenario, in its racks. Raises CatalogueError, or ConfigError for impossible racks."""
    gpu = load_gpu(scenario.gpu)
    return in_racks(gpu, scenario.scale_up_gpus, scenario.network_gbs, scenario.network_latency_us)


def assemble(scenario: Scenario, environ: Mapping[str, str] = os.environ, *, workload: Workload | None = None) -> Setup:
    """Load and check everything that the scenario names, cheap steps first.

    Args:
        environ: environment, with variables that override settings.
        workload: the scenario's workload if it is loaded already; None: it is read.
    Raises: ConfigError, CatalogueError, CapacityError, CalibrationError or WorkloadError, with a message for users.
    """
    check_seed(scenario.seed)
    overridden = environment_settings(environ)
    scenario = replace(scenario, settings={**scenario.settings, **overridden})
    model, gpu = load_model(scenario.model), gpu_of(scenario)
    check_encoding(scenario)
    check_adapters(scenario)
    check_samples(scenario)
    check_server_sessions(scenario)
    check_whole(scenario, model)
    site_of(scenario)
    config, kv = configure(scenario, model, gpu)
    check_load(scenario)
    if workload is None:
        workload = open_load(scenario)
    check_requests(workload.turns, model)
    check_measured(scenario, workload)
    calibration, split = calibration_of(scenario, model, gpu), layout_of(scenario, model)

    def cost_of(layout: Parallelism, on: GpuSpec = gpu) -> CostModel:
        cost = calibration.cost_model(
            base_cost_model(
                model,
                on,
                layout,
                weights_dtype=scenario.weights_dtype,
                kv_dtype=scenario.kv_dtype,
                fp8_activations=scenario.fp8_activations,
                operators=None if scenario.operators is None else Path(scenario.operators),
                lora=lora_of(scenario, config),
            )
        )
        return two_batch_cost(cost, scenario) if config.splits_batches else cost

    cost = cost_of(split)
    if config.multiplexing is not msgspec.UNSET:
        cost = multiplexed_cost(scenario, config, gpu, lambda one: cost_of(split, one))
    return Setup(
        scenario=scenario,
        model=model,
        gpu=gpu,
        workload=workload,
        cost=cost,
        cpu=calibration.cpu_model(CpuModel()),
        config=config,
        kv=kv,
        tiers=host_tiers(scenario.tiers),
        calibration=calibration,
        debug=debug_level(environ),
        overridden=tuple(overridden),
        drafting=_drafting(scenario, config, model, gpu, cost, calibration),
        forcing=Forcing.of(scenario.grammar_forces, scenario.seed) if config.jumps else None,
        blocks=passes_of(scenario),
        encoding=EncoderSetup.of(scenario, gpu, workload.turns) if scenario.media is not None else None,
        lora=lora_of(scenario, config),
        experts=experts_of(model, gpu, split, config, scenario.weights_dtype, cost_of),
    )


def two_batch_cost(cost: CostModel, scenario: Scenario) -> TwoBatchModel:
    """Return the cost model of an engine that splits batches. Raises ConfigError if there is nothing to hide."""
    if scenario.tp == 1:
        raise ConfigError(
            "`two_batch_overlap` is on, but `tp` is 1: one GPU has no communication that a half could hide\n"
            "hint: --tp N, or leave out --two-batch-overlap"
        )
    if isinstance(cost, PipelineModel):
        raise ConfigError(
            f"`two_batch_overlap` is on, but `pp` is {scenario.pp}: batches of other stages are computed meanwhile\n"
            "hint: leave out one of the two"
        )
    if not isinstance(cost, SplitTerms):
        raise ConfigError("`two_batch_overlap` is on, but this cost model does not tell what is communication")
    return TwoBatchModel(cost)


def check_drafting(scenario: Scenario, config: SchedConfig) -> None:
    """Raise ConfigError for options of drafts that have no effect, or that lack another option."""
    method = config.speculative_method or "none"
    given: dict[str, str | float | None] = {
        "acceptance": scenario.acceptance,
        "acceptance_spread": scenario.acceptance_spread or None,
        "draft_model": scenario.draft_model,
    }
    for name, value in given.items():
        if value is not None and (not config.speculates or (name == "draft_model" and method != "draft_model")):
            wanted = "draft_model" if name == "draft_model" else "ngram, draft_model, eagle or mtp"
            raise ConfigError(
                f"`{name}` is `{value}`, but `speculative_method` is {method}\n"
                f"hint: --speculative-method {wanted}, or leave out {option_of(name)}"
            )
    if method == "draft_model" and scenario.draft_model is None:
        raise ConfigError("`speculative_method` draft_model needs a `draft_model`\nhint: --draft-model qwen3-0.6b")
    if scenario.grammar_forces is not None and not config.jumps:
        raise ConfigError(
            f"`grammar_forces` is `{scenario.grammar_forces}`, but `jump_forward_tokens` is 0\n"
            "hint: --jump-forward-tokens 16, or leave out --grammar-forces"
        )


def _drafting(
    scenario: Scenario, config: SchedConfig, model: ModelSpec, gpu: GpuSpec, cost: CostModel, calibration: Calibration
) -> Drafting | None:
    """Return acceptance and cost of drafts; None if the engine verifies no drafts."""
    method = config.speculative_method
    if method is msgspec.UNSET:
        return None
    acceptance = Acceptance.of(method, scenario.acceptance, scenario.acceptance_spread, scenario.seed)
    if method == "ngram":
        return Drafting(acceptance, NgramDraftCost())
    if scenario.draft_model is None:
        return Drafting(acceptance, head_of(cost, model.layers))
    small = load_model(scenario.draft_model)
    if small.whole is not None:
        raise ConfigError(
            f"`draft_model` is {scenario.draft_model}, which predicts no tokens\nhint: --draft-model qwen3-0.6b"
        )
    base = base_cost_model(small, gpu, replace(scenario.parallelism, pp=1), kv_dtype=scenario.kv_dtype)
    return Drafting(acceptance, ModelDraftCost(calibration.cost_model(base), name=small.name))


def configure(scenario: Scenario, model: ModelSpec, gpu: GpuSpec) -> tuple[SchedConfig, KvCapacity | None]:
    """Return the scheduler's settings, and the KV capacity unless `pages` was given.

    Options of the scenario come first, then its profile. The context limit follows from the model, and the number of
    pages from the memory of the GPU.
    Raises: ConfigError, CatalogueError, CapacityError.
    """
    given = {"context_tokens_max": model.context_tokens_max, **scheduling(scenario, gpu), **scenario.settings}
    if model.whole is not None:
        given = whole_settings(model, scheduling(scenario, gpu), scenario.settings)
    if scenario.max_new_tokens is not None:
        if scenario.max_new_tokens < 1:
            raise ConfigError(f"`max_new_tokens` must be at least 1, got `{scenario.max_new_tokens}`")
        given["eos_token_ids"] = (*given.get("eos_token_ids", ()), EOS_TOKEN_ID)
    split = layout_of(scenario, model)
    tiers = host_tiers(scenario.tiers)
    if tiers.host_cache_gb:
        check_split(model, split)
        page_size = given.get("page_size", SchedConfig().page_size)
        given["tiers"] = tiers.settings(PageBytes.of(model, split, scenario.kv_dtype, page_size).on_host)
    shares = hybrid_shares(scenario.tiers)
    if shares.on:
        check_hybrid(model)
    if given.get("pp_size", 1) != 1 and "overlap_depth" not in scenario.settings:
        given["overlap_depth"] = 0  # microbatches overlap with each other
    if scenario.adapters is not None:
        given.setdefault("max_loras", LORAS)
    given |= multiplexing_of(scenario, model, gpu)
    if scenario.rank_schedulers:
        check_ranks(scenario)
        given = settings_of_rank(given, split.attention_dp)
    given = with_blocks(given, scenario)
    config = with_experts(SchedConfig(**given), scenario, model, split)
    check_stages(scenario, config)
    check_drafting(scenario, config)
    lora = lora_of(scenario, config)
    if lora is not None:
        check_targets(model, split, lora)
    check_split(model, split)
    for name, most in (("pages", PAGES_MAX), ("max_running_requests", ROWS_MAX), ("request_rows", ROWS_MAX)):
        value = getattr(config, name)
        if value is not None and value > most:
            raise ConfigError(f"`{name}` is simulated up to {most:,}, got `{value}`\nhint: no GPU holds so many")
    kv = None if "pages" in scenario.settings else _capacity(scenario, model, gpu, config_of_engine(config))
    if model.whole is not None:
        return config, None if kv is None else without_kv(kv, config)
    if shares.on:
        config = _with_pools(config, hybrid_settings(model, config, shares, kv), kv, scenario, model)
    if kv is None:
        return _within_a_shard(config, split, config.pages), None
    if config.shares_passes:
        own = kv.pages // split.attention_dp
        context = min(config.context_tokens_max, own * config.page_size)
        return msgspec.structs.replace(config, pages=own, context_tokens_max=context), kv
    return _within_a_shard(msgspec.structs.replace(config, pages=kv.pages), split, kv.pages), kv


def _with_pools(
    config: SchedConfig, hybrid: HybridMemory, kv: KvCapacity | None, scenario: Scenario, model: ModelSpec
) -> SchedConfig:
    """Return the settings with separate pools for windows and states, also in the host cache."""
    tiers, ranks = host_tiers(scenario.tiers), config.dp_ranks if isinstance(config.dp_ranks, int) else 1
    pages = config.pages if kv is None else kv.pages
    below: dict[str, Any] = {}
    if config.tiers is not msgspec.UNSET:
        page, beside = block_bytes(model, layout_of(scenario, model), scenario.kv_dtype, config.page_size)
        of_engine = tiers.settings(
            host_page_bytes(pages if kv is None else pages // ranks, hybrid, page, beside).on_host
        )
        assert of_engine is not msgspec.UNSET
        below["tiers"] = msgspec.structs.replace(of_engine, host_pages=max(of_engine.host_pages // ranks, 1))
    return msgspec.structs.replace(config, pages=pages, hybrid=hybrid, **below)


def check_stages(scenario: Scenario, config: SchedConfig) -> None:
    """Raise ConfigError if the engine has microbatches and their number is not the number of stages."""
    if config.pipelines and config.pp_size != scenario.pp:
        raise ConfigError(
            f"`pp_size` is {config.pp_size}, but `pp` is {scenario.pp}: an engine has microbatches for the stages it "
            f"has\nhint: --pp {config.pp_size} --pp-size {config.pp_size}, or leave out --pp-size"
        )


def _within_a_shard(config: SchedConfig, split: Parallelism, pages: int) -> SchedConfig:
    """Return the settings with the context limited to the tokens of one shard, which has the whole KV of a request."""
    if split.attention_dp == 1 or config.shares_passes:
        return config
    most = pages // split.attention_dp * config.page_size
    return msgspec.structs.replace(config, context_tokens_max=min(config.context_tokens_max, most))
