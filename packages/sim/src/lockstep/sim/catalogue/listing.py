"""Facts about models, GPUs and engines as plain values, for `lockstep catalogue`: one dict each, units in the names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.sim.catalogue import load_engine
from lockstep.sim.cost.capacity import kv_capacity
from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.hardware import GpuSpec, scale_up_gpus
from lockstep.sim.cost.models import LatentAttention, Mamba2, ModelSpec, WeightsDtype
from lockstep.sim.cost.parallel import Parallelism

SPLITS = (1, 2, 4, 8, 16)
"""Degrees of tensor parallelism that are tried, until a model fits."""


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """Return the figures of a model; bytes of KV and state are those of one GPU that has the whole model."""
    usual: tuple[WeightsDtype, ...] = (model.checkpoint_dtype, "bf16", "fp8", "nvfp4", "int4")
    dtypes = list(dict.fromkeys(usual))
    return {
        "name": model.name,
        "architecture": model.model_type,
        "source": model.source,
        "params": model.params,
        "active_params": model.active_params,
        "checkpoint_dtype": model.checkpoint_dtype,
        "weights_bytes": {dtype: model.weights_bytes(dtype) for dtype in dtypes},
        "kv_bytes_per_token": {"bf16": model.kv_bytes_per_token("bf16"), "fp8": model.kv_bytes_per_token("fp8")},
        "state_bytes_per_request": model.state_bytes_per_request(),
        "context_tokens_max": model.context_tokens_max,
        "layers": {
            "full_attention": model.full_layers,
            "sliding_window": model.sliding_layers,
            "state": model.linear_layers,
            "dense": model.dense_layers,
            "experts": model.moe_layers,
        },
        "modelled_as": modelled_as(model),
    }


def modelled_as(model: ModelSpec) -> list[str]:
    """Return which part of a model is modelled as what, one sentence each; approximations last."""
    a, lines = model.attention, []
    if isinstance(a, LatentAttention):
        lines.append(f"latent attention: {a.heads} heads share {a.kv_rank + a.rope_dim} cached values per layer")
        if a.index_heads:
            lines.append(
                f"sparse attention: the {a.index_topk:,} tokens that an indexer of {a.index_heads} heads scores highest"
            )
    elif model.attention_layers:
        kind = "multi-head" if a.kv_heads == a.heads else "multi-query" if a.kv_heads == 1 else "grouped-query"
        lines.append(f"{kind} attention: {a.heads} heads, {a.kv_heads} of KV, {a.head_dim} values each")
        if model.sliding_layers:
            lines.append(f"{model.sliding_layers} of {model.layers} layers read the last {a.window:,} tokens only")
    if model.whole is not None:
        w, sees = model.whole, "every token attends to all of its prompt" if model.whole.bidirectional else "causal"
        gives = f"{w.labels} label{'s' if w.labels > 1 else ''}" if w.labels else "vectors"
        lines.append(f"prompts are computed whole, without KV ({sees}); gives {gives}")
    if model.delta is not None:
        kind = "Mamba-2" if isinstance(model.delta, Mamba2) else "the gated delta rule"
        lines.append(f"{model.linear_layers} of {model.layers} layers keep a state by {kind} instead of KV")
    if model.experts is not None:
        e = model.experts
        shared = f" and a shared one of {e.shared_ffn:,} columns" if e.shared_ffn else ""
        lines.append(f"{model.moe_layers} layers of {e.count} experts, {e.per_token} per token{shared}")
    if model.dense_layers:
        kind = "gate, up and down" if model.gated_ffn else "up and down, no gate"
        lines.append(f"{model.dense_layers} dense layers of {model.ffn:,} columns: {kind}")
    return [*lines, *model.notes]


def room_on(model: ModelSpec, gpus: Iterable[GpuSpec]) -> list[dict[str, Any]]:
    """Return for each GPU the fewest that hold the model in its checkpoint's precision, and the KV beside it.

    `kv_tokens` is of all of them together in bf16. `tp` is None if the model does not fit on the largest split of one
    scale-up domain; `why` then has the numbers.
    """
    rows: list[dict[str, Any]] = []
    for gpu in gpus:
        row: dict[str, Any] = {"gpu": gpu.name, "tp": None, "kv_tokens": 0, "kv_bytes_per_gpu": 0}
        splits = SPLITS if model.whole is None else (1,)
        for tp in (tp for tp in splits if tp <= scale_up_gpus(gpu)):
            try:
                found = kv_capacity(model, gpu, Parallelism(tp=tp))
            except CapacityError as error:
                row["why"] = str(error).partition("\n")[0]
                continue
            row |= {"tp": tp}
            if model.whole is None:
                row |= {"kv_tokens": found.tokens, "kv_bytes_per_gpu": found.kv_bytes}
            row.pop("why", None)
            break
        rows.append(row)
    return rows


def gpu_facts(gpu: GpuSpec) -> dict[str, Any]:
    """Return the figures of a GPU with their sources; rates are dense and of the data sheet."""
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "architecture": gpu.arch,
        "aliases": list(gpu.aliases),
        "basis": "measured" if gpu.measured else "public figures",
        "datasheet": {name: {"value": one.value, "source": one.source} for name, one in gpu.datasheet.items()},
        "measured": {name: {"value": one.value, "source": one.source} for name, one in gpu.measured.items()},
        "usd_per_gpu_hour": {
            name: {"value": one.value, "source": one.source} for name, one in gpu.usd_per_gpu_hour.items()
        },
        "scale_up_gpus": scale_up_gpus(gpu),
        "notes": list(gpu.notes),
    }


def engine_facts(name: str) -> dict[str, Any]:
    """Return what is known of an engine of the catalogue: releases, what its costs were fitted to, and their errors."""
    engine, _ = load_engine(name)
    bounds = {bound for when in engine.when for bound in when.releases if bound}
    return {
        "name": engine.engine,
        "title": engine.title,
        "release": engine.release,
        "releases_with_own_costs": sorted(bounds, key=lambda text: [int(n) for n in text.split(".") if n.isdecimal()]),
        "fitted": [
            {"model": model, "gpu": gpu, "weights_dtype": weights_dtype} for model, gpu, weights_dtype in engine.fitted
        ],
        "date": engine.date,
        **engine.card,
        "gpus": [
            {"gpu": one.gpu, "fitted_on": one.fitted_on, "errors": one.errors, "not_for": one.not_for}
            for one in engine.gpus
        ],
    }


def is_file(name: str) -> bool:
    """Return whether a name is that of a file or folder, rather than of an entry of the catalogue."""
    return Path(name).expanduser().exists() or name.endswith(".json") or name.startswith(("./", "../", "/", "~"))
