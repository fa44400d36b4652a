"""The winner of a plan as command lines: `lockstep serve` with a model and emulated, and `lockstep simulate`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.core.cluster.router import RouterConfig, policy_settings
from lockstep.core.contract.config import (
    DELAYER_SETTINGS,
    DRAFT_SETTINGS,
    OF_RANKS,
    STAGES_ONLY,
    TRANSFER_SETTINGS,
    TRIGGER_SETTINGS,
)
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.contract.runtime_settings import runtime_refusal
from lockstep.host.block_settings import IN_BLOCKS
from lockstep.host.engine_options import RankOptions
from lockstep.host.options import option_of, options_of
from lockstep.sim.cluster.scenario import LINK_GBS, LINK_LATENCY_US, USUAL_PLACEMENT
from lockstep.sim.plan.question import shown
from lockstep.sim.plan.search import Candidate
from lockstep.sim.plan.trial import NO_SCALING, Trial
from lockstep.sim.plan.vllm_command import ServeCommand
from lockstep.sim.run.engine import profile_of
from lockstep.sim.run.whole_prompts import whole_implied
from lockstep.sim.scenario.scenario import Scenario, names_where, sim_options

CARRIED = ("kv_dtype", "fp8_activations")
"""Options of a configuration that `lockstep serve` has too."""

OF_MEDIA = ("media", "mm_encoder_tp_mode")
"""Options about media: the encoder of a server is that of its model."""

NOT_EMULATED = ("jump_forward_tokens", "encoder_cache_tokens", "encoder_budget_tokens", "expert_load_interval")
"""Settings that a real engine supports.

An emulated engine draws each token independently, takes no pictures, and routes nothing to experts.
"""

OF_DELAYER = (*DELAYER_SETTINGS, *TRIGGER_SETTINGS)
"""Settings of a prefill delayer, which a server without one refuses."""

SERVED_ENGINES_MAX = 256
"""Engines of one kind of a server, at most: AT_MOST["dp"] of the server's settings, which are of another package."""

EMULATED = ("tp", "engine", "profile")
"""Options that an emulated server takes."""


def simulate_command(candidate: Candidate) -> str:
    """Return the command line that repeats the winner's first long simulation."""
    assert candidate.best is not None
    scenario = candidate.best.first_trial.scenario()
    alone = candidate.best.replicas == 1 and not scenario.engines
    return scenario.base.command() if alone else scenario.command()


def serve_commands(candidate: Candidate) -> tuple[ServeCommand, ...]:
    """Return `lockstep serve` commands for all replicas: with the model from FOLDER, and emulated.

    A model that computes prompts whole is not emulated: its answers are numbers that only the model gives.

    Replicas are `--dp`; prefill and decode engines are `--prefill-engines` and `--decode-engines` of all replicas.
    Assumptions about the workload, such as `expert_cv`, and limits of requests are not part of a server.
    """
    assert candidate.best is not None
    assert candidate.trial is not None
    base, split = candidate.trial.base, candidate.split
    usual = {field.name: field.default for field in sim_options()}
    unlike = [name for name in names_where("configures") if getattr(base, name) != usual[name]]
    if split is not None and split.names_tp and "tp" in unlike:
        unlike.remove("tp")  # each side has its own
    lacks = [f"{name} {shown(getattr(base, name))}" for name in unlike if name not in CARRIED]
    engines, engines_lack = _engines_of(candidate)
    lacks = [*engines_lack, *lacks]
    if base.settings.get("speculative_method", "none") != "none":
        lacks.append(f"speculative_method {base.settings['speculative_method']}")
    hands_over = split is not None
    lacks += [f"{name} {shown(value)}" for name, value in base.settings.items() if _is_missed(name, value, hands_over)]
    media = {name: getattr(base, name) for name in OF_MEDIA}
    lacks += [f"{name} {value}" for name, value in media.items() if value != usual[name]]
    if base.lora_targets != usual["lora_targets"]:
        lacks.append(f"lora_targets {base.lora_targets}")
    tiers = _tiers_served(base.tiers)
    if "hybrid_memory" in base.tiers:
        lacks += [f"{name} {shown(value)}" for name, value in base.tiers.items()]
    common = [*engines, *_common_words(base, usual)]
    profile = profile_of(base)
    settings = profile_settings(profile) | dict(base.settings)
    whole = candidate.setup is not None and candidate.setup.model.whole is not None
    if whole:
        settings = whole_implied(profile_settings(profile)) | dict(base.settings)
    layout = {name: getattr(base, name) for name in ("tp", "pp", "ep") if getattr(base, name) > 1}
    if layout.get("ep") != layout.get("tp"):
        layout.pop("ep", None)  # a server divides experts over all ranks of a stage, or not at all
    if split is not None and split.names_tp:
        layout.pop("tp", None)
    flags: list[str] = []
    alike = {None} if split is None else {side.tp for side in split.sides.values()}
    alone = candidate.best.replicas == 1 or split is not None  # engines of ranks are not replicated on a server
    if base.rank_schedulers and alone and alike == {None} and base.attention_dp == base.tp and base.pp == 1:
        layout["attention_dp"], flags = base.attention_dp, ["--rank-schedulers"]
        if not settings.get("prefill_delayer"):
            settings = {name: value for name, value in settings.items() if name not in OF_DELAYER}
    else:  # a server has a rank for each GPU
        lacks += [f"{name} {shown(settings[name])}" for name in OF_RANKS if settings.get(name)]
        settings = {name: value for name, value in settings.items() if name not in OF_RANKS}
    of_experts = _experts_served(base) if "ep" in layout else {}
    if base.pp == 1:
        settings = {name: value for name, value in settings.items() if name not in STAGES_ONLY}
    elif "pp_size" not in settings:
        settings["pp_size"] = 1  # one running batch; a server has one for each stage by itself
    served = [
        "--model",
        "FOLDER",
        *_option_words(layout),
        *flags,
        *_option_words(of_experts),
        *common,
        *_tier_words(tiers),
    ]
    if base.diffusion_block is not None:  # a server has these settings by itself, for a model that answers in blocks
        settings = {name: value for name, value in settings.items() if name not in IN_BLOCKS or name in base.settings}
    served += _set_words(settings, hands_over)
    if whole:
        return (ServeCommand(shlex.join(["lockstep", "serve", *served]), lacks),)
    emulated = ["--emulate", f"{base.model}@{base.gpu}", *common]
    for name in EMULATED:
        if name == "engine":
            emulated += ["--engine", base.engine] if base.engine is not None else []
        elif name == "profile":
            implied = profile_of(replace(base, profile=None))
            emulated += ["--profile", profile] if profile != implied else []
        elif name in unlike:
            emulated += [option_of(name), str(getattr(base, name))]
    if base.calibration is not None:
        emulated += ["--calibration", base.calibration]
    not_emulated = (*NOT_EMULATED, *STAGES_ONLY, *OF_RANKS)
    of_engine = {name: value for name, value in base.settings.items() if name not in not_emulated}
    emulated += _set_words(of_engine, hands_over)
    emulated_lacks = [one for one in lacks if one.partition(" ")[0] not in EMULATED]
    of_stages = [(name, value) for name, value in base.settings.items() if name in STAGES_ONLY and value]
    emulated_lacks += [f"{name} {shown(value)}" for name, value in of_stages if (name, value) != ("pp_size", 1)]
    if flags:
        emulated_lacks += [f"{name} {shown(base.settings[name])}" for name in OF_RANKS if base.settings.get(name)]
    there = (*layout, *of_experts, *(("rank_schedulers",) if flags else ()), "diffusion_block")  # follows from FOLDER
    lacks = [one for one in lacks if one.partition(" ")[0] not in there]
    emulated_lacks += [f"{name} {shown(value)}" for name, value in tiers.items()]
    emulated_lacks += [f"{name} {base.settings[name]}" for name in NOT_EMULATED if base.settings.get(name)]
    emulated_lacks += _links_missed(candidate.trial) if hands_over else []
    if base.adapters is not None:
        emulated_lacks.append("the time of what adapters add to products")
    return (
        ServeCommand(shlex.join(["lockstep", "serve", *served]), lacks),
        ServeCommand(shlex.join(["lockstep", "serve", *emulated]), emulated_lacks),
    )


def _experts_served(base: Scenario) -> dict[str, Any]:
    """Return the options of experts on ranks that `lockstep serve` has for this layout, with their values."""
    served: dict[str, Any] = {"moe_a2a": True} if base.moe_a2a else {}
    if base.eplb and base.attention_dp == 1 and base.pp == 1:
        names = ("redundant_experts", "eplb_interval", "eplb_imbalance_min")
        given = {name: getattr(base, name) for name in names}
        usual = {field.name: field.default for field in sim_options()}
        served |= {"eplb": True} | {name: value for name, value in given.items() if value != usual[name]}
    return served


def _engines_of(candidate: Candidate) -> tuple[list[str], list[str]]:
    """Return the options of `lockstep serve` for several engines and their router, and what a server lacks of them."""
    best, trial, split = candidate.best, candidate.trial, candidate.split
    assert best is not None
    assert trial is not None
    words: list[str] = []
    lacks: list[str] = []
    if split is not None:
        for group in split.groups(trial.base.gpu, best.replicas):
            role = str(group.settings["role"])
            words += [f"--{role}-engines", str(group.count)]
            if group.tp is not None:
                words += [f"--{role}-tp", str(group.tp)]
            if group.count > SERVED_ENGINES_MAX:
                lacks.append(f"more than {SERVED_ENGINES_MAX} {role} engines")
    elif best.replicas > 1:
        words += ["--dp", str(best.replicas)]
        if best.replicas > SERVED_ENGINES_MAX:
            lacks.append(f"more than {SERVED_ENGINES_MAX} engines")
    if not words:
        return words, lacks
    if trial.autoscale != NO_SCALING:
        lacks.append(f"autoscale {trial.autoscale}")
    usual = RouterConfig()
    if trial.router.policy != usual.policy:
        words += ["--router", trial.router.policy]
    for name in policy_settings():
        if (value := getattr(trial.router, name)) != getattr(usual, name):
            words += [option_of(f"router_{name}"), f"{value:g}" if isinstance(value, float) else str(value)]
    return words, lacks


def _common_words(base: Scenario, usual: Mapping[str, Any]) -> list[str]:
    """Return the options that a server takes with a model and emulated."""
    words = ["--mem-fraction", shown(base.mem_fraction)] if base.mem_fraction != usual["mem_fraction"] else []
    if base.kv_dtype == "fp8":
        words += ["--kv-cache-dtype", "fp8_e4m3"]
    if base.fp8_activations != usual["fp8_activations"]:
        words += ["--fp8-activations", base.fp8_activations]
    if base.adapters is not None:
        words += ["--lora", "NAME=ADAPTER_FOLDER"]
    if base.max_lora_rank != usual["max_lora_rank"]:
        words += ["--max-lora-rank", str(base.max_lora_rank)]
    return words


def _links_missed(trial: Trial) -> list[str]:
    """Return the links that an emulated server does not have: it has the usual ones."""
    links = {
        "link_gbs": (trial.link_gbs, LINK_GBS),
        "link_latency_us": (trial.link_latency_us, LINK_LATENCY_US),
        "placement": (trial.placement, USUAL_PLACEMENT),
    }
    return [f"{name} {shown(value)}" for name, (value, known) in links.items() if value not in (None, known)]


def _is_served(name: str, hands_over: bool) -> bool:
    """Return whether `lockstep serve` takes a setting of the scheduler. Its drafts follow from its own options.

    Settings of transfers are those of prefill and decode engines.
    """
    refused = DRAFT_SETTINGS if hands_over else (*DRAFT_SETTINGS, *TRANSFER_SETTINGS)
    return not runtime_refusal(name) and name not in refused


def _is_missed(name: str, value: Any, hands_over: bool) -> bool:
    """Return whether a setting has an effect that a server lacks. Off, none and one stage have no effect."""
    return name not in DRAFT_SETTINGS and not _is_served(name, hands_over) and bool(value)


def _tiers_served(tiers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of tiers that `lockstep serve` takes: without rates, and without tiers of separate pools."""
    if not tiers.get("host_cache_gb") or "hybrid_memory" in tiers:
        return {}
    known = options_of(RankOptions)
    return {name: value for name, value in tiers.items() if name in known}


def _tier_words(tiers: Mapping[str, Any]) -> list[str]:
    """Return the options of tiers as arguments of `lockstep serve`."""
    known = options_of(RankOptions)
    words = [word for name, value in tiers.items() for word in known[name].words(value)]
    return words + (["--storage", "KV_FOLDER"] if tiers.get("storage_gb") else [])


def _option_words(values: Mapping[str, Any]) -> list[str]:
    """Return options as arguments; an option that is on has no value."""
    words = [(option_of(name),) if value is True else (option_of(name), str(value)) for name, value in values.items()]
    return [word for one in words for word in one]


def _set_words(settings: Mapping[str, Any], hands_over: bool) -> list[str]:
    """Return the supported scheduler settings as arguments of `lockstep serve`: JSON, or text unchanged."""
    served = {name: value for name, value in settings.items() if _is_served(name, hands_over)}
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in served.items()}
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
