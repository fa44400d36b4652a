"""KV pages of an engine: the GPU memory left by weights, activations, adapters, encoders and drafters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.sim.catalogue import load_model
from lockstep.sim.cost import (
    CapacityError,
    GpuSpec,
    KvCapacity,
    ModelSpec,
    kv_capacity,
)
from lockstep.sim.cost.capacity import MemoryNeeds, StageBytes
from lockstep.sim.cost.models import check_split, checked_weights_dtype
from lockstep.sim.cost.stages import Stage, stages_of
from lockstep.sim.host.hybrid_memory import (
    shared_out,
)
from lockstep.sim.run.adapters import lora_of
from lockstep.sim.run.encoding import beside_encoder
from lockstep.sim.run.layout import layout_of
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.tier_options import hybrid_shares


def _capacity(scenario: Scenario, model: ModelSpec, gpu: GpuSpec, config: SchedConfig) -> KvCapacity:
    """Return the KV capacity of an engine's GPUs. Raises CapacityError if the model does not fit."""
    shares = hybrid_shares(scenario.tiers)
    capacity = partial(
        kv_capacity,
        model,
        gpu,
        layout_of(scenario, model),
        mem_fraction=scenario.mem_fraction,
        page_tokens=config.page_size,
        kv_dtype=scenario.kv_dtype,
        weights_dtype=scenario.weights_dtype,
    )
    needs = MemoryNeeds(
        chunk_tokens=config.chunked_prefill_size or max(config.max_prefill_tokens, config.context_tokens_max),
        sampled_rows=config.max_running_requests,
        state_rows=0 if shares.on else config.max_running_requests,
        lora=lora_of(scenario, config),
    )
    drafts, several = _has_drafter(config), scenario.pp > 1
    layout = layout_of(scenario, model)
    drafter = _stage_drafter(scenario, model) if drafts and several else (0, 0)
    if drafts and several and not shares.on:
        drafting = StageBytes(drafter[0], kv_per_token=drafter[1])
        needs = needs._replace(first_stage=drafting) if layout.drafts_first else needs._replace(last_stage=drafting)
    if scenario.media is None:
        kv = capacity(needs=needs)
    else:

        def beside(room: StageBytes) -> KvCapacity:
            return capacity(needs=needs._replace(first_stage=needs.first_stage.plus(room)))

        kv = beside_encoder(beside, scenario, gpu, config)
    if shares.on:
        if drafts and not several:
            drafter = _drafter_bytes(kv.weights_bytes, kv.kv_bytes_per_token, scenario, model)
        return shared_out(kv, model, layout, scenario.kv_dtype, shares, drafter)
    return _beside_drafter(kv, scenario, model) if drafts and not several else kv


def _has_drafter(config: SchedConfig) -> bool:
    return config.speculative_method not in (msgspec.UNSET, "ngram")


def _drafter_bytes(weights: int, kv_per_token: int, scenario: Scenario, model: ModelSpec) -> tuple[int, int]:
    """Return the bytes of a drafter's weights and of its KV per token, on the GPUs of one stage.

    A head counts as an average layer of the model with `weights` bytes of weights and `kv_per_token` bytes of KV.
    """
    if scenario.draft_model is None:
        return weights // model.layers, kv_per_token // max(model.attention_layers, 1)
    split, small = replace(scenario.parallelism, pp=1), load_model(scenario.draft_model)
    check_split(small, split)
    weights = stages_of(small, split)[0].weights_bytes(checked_weights_dtype(small, None), split)
    return weights, small.kv_bytes_per_token(scenario.kv_dtype, split)


def _stage_drafter(scenario: Scenario, model: ModelSpec) -> tuple[int, int]:
    """Return `_drafter_bytes` for one of several stages: a draft model on the first one, or a head on the last one.

    A head needs an embedding of its own there, unless it is tied: only the first stage has an untied embedding.
    """
    split, dtype = replace(scenario.parallelism, pp=1), checked_weights_dtype(model, scenario.weights_dtype)
    whole = Stage(model, True, True).weights_bytes(dtype, split)
    drafter, kv_per_token = _drafter_bytes(whole, model.kv_bytes_per_token(scenario.kv_dtype, split), scenario, model)
    if scenario.draft_model is None:
        drafter += whole - Stage(model, False, True).weights_bytes(dtype, split)
    return drafter, kv_per_token


def _beside_drafter(kv: KvCapacity, scenario: Scenario, model: ModelSpec) -> KvCapacity:
    """Return the capacity beside a drafter, whose KV is in the same pages. Raises CapacityError if nothing is left."""
    weights, per_token = _drafter_bytes(kv.weights_bytes, kv.kv_bytes_per_token, scenario, model)
    kv_bytes = max(kv.kv_bytes - weights, 0)
    per_token += kv.kv_bytes_per_token
    pages = kv_bytes // (per_token * kv.page_tokens) * kv.shards
    if pages < 1:
        raise CapacityError(
            f"{model.name} leaves {kv.kv_bytes / 1e9:.1f} GB for KV; its drafter takes {weights / 1e9:.1f} GB of them\n"
            "hint: raise --tp, or choose a smaller --draft-model"
        )
    return replace(
        kv,
        pages=pages,
        tokens=pages * kv.page_tokens,
        weights_bytes=kv.weights_bytes + weights,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=per_token,
    )
