"""Engines of models that compute prompts whole: encoders, cross-encoders and other models with a head of labels.

They have no KV, no decodes and no sessions; options about these are refused by name. Their scheduler settings are those
of the runtime (`lockstep.host.whole_prompts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestKind
from lockstep.host.options import option_of, options_of
from lockstep.host.whole_prompts import (
    CONTEXT_TOKENS_MAX,
    GPU_PREFILL_TOKENS,
    NEUTRAL,
    check_whole_prompts,
    whole_prompt_settings,
)
from lockstep.sim.cost import KvCapacity, ModelSpec
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.turns import Turns

OF_DECODERS = (
    "operators",
    "acceptance",
    "acceptance_spread",
    "draft_model",
    "grammar_forces",
    "diffusion_block",
    "diffusion_iterations",
    "media",
    "adapters",
    "samples",
    "server_sessions",
    "max_new_tokens",
)
"""Options of a simulation that have no meaning without KV, decodes or media."""


def request_kind(model: ModelSpec) -> RequestKind:
    """Return the result that requests without output have: labels or vectors of a model that computes prompts whole."""
    if model.whole is None:
        return "generate"
    return "score" if model.whole.labels else "embed"


def check_whole(scenario: Scenario, model: ModelSpec) -> None:
    """Raise ConfigError for an option without meaning for a model that computes prompts whole."""
    if model.whole is None:
        return
    check_whole_prompts({**scenario.settings, **scenario.tiers}, model.name)
    usual = {field.name: field.default for field in options_of(Scenario).values()}
    for name in OF_DECODERS:
        if (value := getattr(scenario, name)) != usual[name]:
            shown = "on" if value is True else value
            raise ConfigError(
                f"`{name}` is {shown}, but {model.name} computes prompts whole, without KV\n"
                f"hint: leave out {option_of(name)}"
            )
    if scenario.tiers.get("hybrid_memory") not in (None, "off"):
        raise ConfigError(
            f"`hybrid_memory` is {scenario.tiers['hybrid_memory']}, but {model.name} keeps no KV\nhint: leave it out"
        )
    for name, value, known in (
        ("weights_dtype", scenario.weights_dtype or model.checkpoint_dtype, "bf16"),
        ("kv_dtype", scenario.kv_dtype, "bf16"),
        ("fp8_activations", scenario.fp8_activations, usual["fp8_activations"]),
    ):
        if value != known:
            raise ConfigError(
                f"`{name}` is {value}, but {model.name} computes prompts whole, with weights in bf16 and no KV\n"
                f"hint: leave out {option_of(name)}"
            )
    for slo in scenario.slos:
        if slo.metric not in ("e2e", "call"):
            raise ConfigError(
                f"`slo` {slo}: requests to {model.name} have no tokens, so only their whole time can be bounded\n"
                f"hint: --slo {replace(slo, metric='e2e')}, or {replace(slo, metric='call')} for all of a call"
            )


def check_requests(turns: Turns, model: ModelSpec) -> None:
    """Raise ConfigError for requests that a model cannot serve because it computes prompts whole."""
    if model.whole is None:
        return
    with_output = int((turns.output_tokens > 0).sum())
    if with_output:
        kind = "labels" if model.whole.labels else "vectors"
        raise ConfigError(
            f"`workload` has {with_output:,} requests with output, but {model.name} gives {kind} of whole prompts\n"
            "hint: --workload gen:output=none,... or requests of 0 output tokens: docs/workloads.md"
        )
    if (turns.after >= 0).any():
        raise ConfigError(
            f"`workload` has sessions, but requests to {model.name} follow no answers\nhint: one turn per session"
        )


# mechanism: whole-prompts (simulated)
def whole_settings(model: ModelSpec, implied: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an engine whose model computes prompts whole.

    Args:
        implied: settings that follow from profile and engine.
        explicit: settings of the scenario.
    """
    usual = {
        "context_tokens_max": min(model.context_tokens_max, CONTEXT_TOKENS_MAX),
        "max_running_requests": SchedConfig().max_running_requests,
    }
    return whole_prompt_settings({**usual, **whole_implied(implied), **explicit}, GPU_PREFILL_TOKENS)


def whole_implied(implied: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a profile that have a meaning for whole prompts.

    Those about KV, chunks and decodes have none. The budget of an extend is chosen with the length of chunks.
    """
    return {name: value for name, value in implied.items() if name not in (*NEUTRAL, "max_prefill_tokens")}


def without_kv(kv: KvCapacity, config: SchedConfig) -> KvCapacity:
    """Return the memory of an engine whose pages count tokens and take no memory."""
    return replace(kv, pages=config.pages, tokens=config.pages * config.page_size, kv_bytes=0)
