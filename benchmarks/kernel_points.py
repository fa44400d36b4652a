#!/usr/bin/env python3
"""Kernels of latent attention, linear attention and experts spread thin, against public tables of SGLang's.

    LOCKSTEP_DATA=... python benchmarks/kernel_points.py > benchmarks/results/kernel_points.txt

Predicted is the bare roofline, with the constants of the catalogue. Some of them are fitted to these tables, to one
half of the shapes, drawn by a checksum of the shape; parts 1 and 2 are of the other half. Repeated shapes count once,
with their median.

0. The fits, to check the catalogue by.
1. Multi-head latent attention: one layer over whole prompts, and one decode (`context_mla`, `generation_mla`). These
   kernels stay inside the latent, prompts too, as engines do not with whole prompts; and with KV in fp8 they first
   write all of it out in bf16. Both are predicted so, besides as the roofline has it. Then the same with projections
   in fp8 (`wideep_*_mla`), where prompts are expanded and are launched from Python.
2. The gated delta rule: convolution and recurrence of one layer (`gdn`), in Qwen3.5's shapes and a rank's part of them.
3. Experts of DeepSeek-V3 over 2 to 256 ranks, the fullest rank's (`wideep_*_moe`), even routing and uneven. Tables draw
   the popularity of experts from a power law of some exponent, between 1 and 0.8 of the tokens; predicted is a
   Dirichlet distribution with the coefficient of variation of that (`--expert-cv`).
"""

from __future__ import annotations

import csv
import gzip
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from recorded_data import data_folder

from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import KvDtype, roofline_model
from lockstep.sim.cost.hardware import GpuSpec, achieved
from lockstep.sim.cost.model import BatchShape, decode_shape
from lockstep.sim.cost.models import ACTIVATION_BYTES, DELTA_CHUNK, KV_BYTES, GatedDelta, LatentAttention
from lockstep.sim.cost.roofline import ATTENTION_SMALL_KERNELS, LATENT_EAGER_US, RooflineModel

GPUS = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s"}
PASS_TOKENS = 32_768  # more than one pass has: larger shapes are no part of a fit
CONVERTING_KERNELS = 4  # of KV in fp8 to bf16, before a kernel that takes bf16 only
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Rows:
    """Distinct shapes of a table, float64 [shapes] by column, their median times, and which of them fits may see."""

    columns: dict[str, Float64s]
    us: Float64s
    fitted: Bools

    def held_out(self) -> Rows:
        return self.where(~self.fitted)

    def where(self, mask: Bools) -> Rows:
        return Rows({name: values[mask] for name, values in self.columns.items()}, self.us[mask], self.fitted[mask])


def read_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()))


def distinct(rows: Sequence[dict[str, str]], names: Sequence[str], parts: str = "") -> Rows:
    """Median times of each shape. With `parts`, the sum over the values of that column, of shapes that have both."""
    found: dict[tuple[int, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        shape = tuple(int(row[name]) for name in names)
        found[shape][row[parts] if parts else ""].append(float(row["latency"]) * 1e3)
    shapes = sorted(shape for shape, times in found.items() if len(times) == (2 if parts else 1))
    us = np.array([sum(float(np.median(times)) for times in found[shape].values()) for shape in shapes])
    fitted = np.array([crc32(repr(shape).encode()) % 2 == 0 for shape in shapes])
    columns = np.array(shapes, np.float64).reshape(-1, len(names)).T
    return Rows(dict(zip(names, columns, strict=True)), us, fitted)


def main() -> int:
    folder = data_folder("published/aic_ops") / "published/aic_ops"
    fits(folder)
    print("\npredicted / measured: shapes, quantiles 10 %, 50 %, 90 %")
    latent_attention(folder)
    latent_modules(folder)
    linear_attention(folder)
    spread_experts(folder)
    return 0


def line(label: str, ratios: Float64s) -> None:
    quantiles = " ".join(f"{value:5.2f}" for value in np.quantile(ratios, (0.1, 0.5, 0.9)))
    print(f"{label:66} {len(ratios):5}  {quantiles}")


def by_size(label: str, sizes: Float64s, ratios: Float64s, bounds: tuple[int, ...], unit: str) -> None:
    """A line for all, and one for each range of sizes."""
    if not len(ratios):
        return
    line(label, ratios)
    for low, high in zip((0, *bounds), (*bounds, math.inf), strict=True):
        mask = (sizes >= low) & (sizes < high)
        if mask.any():
            line(f"{label}, {low:,} to {high:,} {unit}".replace("to inf", "and more"), ratios[mask])


# --- fits -------------------------------------------------------------------------------------------------------------


def fits(folder: Path) -> None:
    """Part 0."""
    print("0. Fits to one half of the shapes: value (the catalogue's)")
    for name in GPUS:
        gpu = load_gpu(name)
        found: dict[str, float] = {}
        decodes = latent_rows(folder, name, "generation", "bfloat16")
        if decodes is not None:
            found |= fit_latent_decode(gpu, decodes.where(decodes.fitted))
        prompts = delta_rows(folder, name, "context")
        if prompts is not None:
            few = prompts.columns["num_tokens"] <= PASS_TOKENS
            found |= fit_delta(gpu, prompts.where(prompts.fitted & few))
        modules = module_rows(folder, name, "context")
        if modules is not None:
            few = modules.columns["batch_size"] * modules.columns["isl"] <= 64
            found["latent_eager_us"] = float(np.median(modules.us[modules.fitted & few]))
        for constant, value in found.items():
            known = LATENT_EAGER_US if constant == "latent_eager_us" else achieved(gpu, constant)
            print(f"{name:6} {constant:32} {value:9.4g} ({known.value:.4g})")


def fit_latent_decode(gpu: GpuSpec, rows: Rows) -> dict[str, float]:
    """The rate is a median, as that of other attention: 128 heads, where products decide, and much KV."""
    model = load_model("deepseek-v3")
    a = model.attention
    assert isinstance(a, LatentAttention)
    c = rows.columns
    tokens, heads = c["batch_size"] * (c["step"] + 1.0), c["num_heads"]
    flops = 2.0 * heads * (2 * a.kv_rank + a.rope_dim)
    rate = float(np.median((tokens * flops / rows.us)[(heads == 128) & (tokens >= 2**18)])) / 1e6
    read_us = achieved(gpu, "attention_decode_read_gbs").value * 1e3
    token_us = np.maximum((a.kv_rank + a.rope_dim) * KV_BYTES["bf16"] / read_us, flops / (rate * 1e6))
    (latency,) = least(lambda p: p[0] + tokens * token_us, rows.us, (10.0,))
    return {"latent_decode_tflops": rate, "latent_decode_latency_us": latency}


def fit_delta(gpu: GpuSpec, rows: Rows) -> dict[str, float]:
    c = rows.columns
    flops = shared_dims(rows).chunk_flops
    state_us = np.array([state_read_us(gpu, rows, i) for i in range(len(rows.us))])
    base = conv_us(gpu, rows) + c["batch_size"] * state_us
    chunks, work = np.maximum(1.0, c["seq_len"] / DELTA_CHUNK), c["num_tokens"] * c["num_v_heads"]

    def us(p: Float64s) -> Float64s:
        latency, chunk, rate, cached = p
        return base + latency + chunks * chunk + np.maximum(0.0, work - cached) * flops / (rate * 1e6)

    names = ("latency_us", "chunk_us", "tflops", "cached_token_heads")
    values = least(us, rows.us, (20.0, 1.0, 40.0, 10_000.0))
    values[-1] = values[-1] if values[-1] >= 1.0 else 0.0  # less than one token of one head is none
    return {f"delta_rule_{name}": value for name, value in zip(names, values, strict=True)}


def least(us: Callable[[Float64s], Float64s], measured: Float64s, start: Sequence[float]) -> list[float]:
    """Parameters with the least mean |log(predicted / measured)|, one at a time by ever smaller factors."""

    def error(logs: Float64s) -> float:
        return float(np.abs(np.log(us(np.exp(logs)) / measured)).mean())

    logs = np.log(np.array(start))
    best, step = error(logs), 0.5
    while step > 0.003:
        improved = False
        for i in range(len(logs)):
            for move in (step, -step):
                tried = logs.copy()
                tried[i] += move
                if (found := error(tried)) < best:
                    logs, best, improved = tried, found, True
        step = step if improved else step / 2.0
    return [float(value) for value in np.exp(logs)]


# --- latent attention -------------------------------------------------------------------------------------------------


def latent_rows(folder: Path, name: str, kind: str, kv_dtype: str) -> Rows | None:
    """The kernel alone, of prompts or decodes; None if there is no table."""
    paths = sorted(folder.glob(f"{GPUS[name]}__*__{kind}_mla_perf.csv.gz"))
    rows = [row for path in paths[-1:] for row in read_rows(path) if row["kv_cache_dtype"] == kv_dtype]
    return distinct(rows, ("batch_size", "isl" if kind == "context" else "step", "num_heads")) if rows else None


def module_rows(folder: Path, name: str, kind: str) -> Rows | None:
    """The whole module; its two attention kernels take about the same time, and count as one."""
    paths = sorted(folder.glob(f"{GPUS[name]}__*wideep_{kind}_mla_perf.csv.gz"))
    if not paths:
        return None
    return distinct(read_rows(paths[-1]), ("batch_size", "isl", "step", "num_heads"))


def converting_us(gpu: GpuSpec, tokens: Float64s, copied: bool) -> Float64s:
    """Writing KV in fp8 out as bf16; `copied`: latents and rotary parts are then copied apart."""
    a = load_model("deepseek-v3").attention
    assert isinstance(a, LatentAttention)
    values = a.kv_rank + a.rope_dim
    moved = values * (KV_BYTES["fp8"] + KV_BYTES["bf16"] + (2 * KV_BYTES["bf16"] if copied else 0))
    read = achieved(gpu, "weight_read_gbs").value * 1e3
    return CONVERTING_KERNELS * achieved(gpu, "small_kernel_us").value + tokens * moved / read


def latent_attention(folder: Path) -> None:
    """Part 1."""
    print("\n1. Latent attention, one layer")
    model = load_model("deepseek-v3")
    kinds: tuple[tuple[KvDtype, str], ...] = (("bf16", "bfloat16"), ("fp8", "fp8"))
    for name in GPUS:
        gpu = load_gpu(name)
        for kv_dtype, called in kinds:
            cost = roofline_model(model, gpu, 8, kv_dtype=kv_dtype)
            wide = roofline_model(model, gpu, 8)  # what runs after KV in fp8 has been written out
            table = latent_rows(folder, name, "context", called)
            if table is not None:
                held = table.held_out()
                batch, length, heads = held.columns.values()
                sizes, bounds = batch * length, (1_024, 16_384)
                label = f"prompts, {name}, KV {kv_dtype}"
                us = wide.one_layer_extend_us(batch, length, heads, expanded=False)
                if kv_dtype == "fp8":
                    us = us + converting_us(gpu, sizes, copied=False)
                by_size(f"{label}, in the latent", sizes, us / held.us, bounds, "tokens")
                line(f"{label}, as if expanded", cost.one_layer_extend_us(batch, length, heads) / held.us)
            table = latent_rows(folder, name, "generation", called)
            if table is not None:
                held = table.held_out()
                batch, step, heads = held.columns.values()
                sizes, bounds = batch * (step + 1.0), (16_384, 262_144)
                label, us = f"decode, {name}, KV {kv_dtype}", cost.one_layer_decode_us(sizes, heads)
                if kv_dtype == "fp8":
                    line(f"{label}, as if read in fp8", us / held.us)
                    us = wide.one_layer_decode_us(sizes, heads) + converting_us(gpu, sizes, copied=True)
                    label += ", written out"
                by_size(label, sizes, us / held.us, bounds, "tokens of KV")


def latent_modules(folder: Path) -> None:
    """The rest of part 1: projections in fp8; KV is called fp8, and is read at the pace of bf16."""
    model = load_model("deepseek-v3")
    a = model.attention
    assert isinstance(a, LatentAttention)
    for name in GPUS:
        gpu = load_gpu(name)
        small_us = (ATTENTION_SMALL_KERNELS + 1) * achieved(gpu, "small_kernel_us").value
        for kind in ("context", "generation"):
            table = module_rows(folder, name, kind)
            if table is None:
                continue
            held = table.held_out()
            batch, length, step, heads = held.columns.values()
            new = batch * length if kind == "context" else batch
            kv_dtypes: tuple[KvDtype, ...] = ("fp8",) if kind == "context" else ("bf16", "fp8")
            for kv_dtype in kv_dtypes:
                cost = roofline_model(model, gpu, 8, weights_dtype="fp8", kv_dtype=kv_dtype)
                us = np.full_like(new, small_us)
                hidden = np.full_like(new, model.hidden)
                for inputs, outputs in (
                    (hidden, np.full_like(new, a.q_rank + a.kv_rank + a.rope_dim)),
                    (np.full_like(new, a.q_rank), heads * (a.nope_dim + a.rope_dim)),
                    (np.full_like(new, a.kv_rank), heads * (a.nope_dim + a.value_dim)),
                    (heads * a.value_dim, hidden),
                ):
                    us += cost.gemm_us("fp8", new, inputs, outputs, 1.0)
                if kind == "context":
                    us = np.maximum(us + cost.one_layer_extend_us(batch, length, heads), LATENT_EAGER_US.value)
                    by_size(f"prompts, {name}, whole module", new, us / held.us, (1_024, 16_384), "tokens")
                    continue
                us += cost.one_layer_decode_us(batch * (length + step), heads)
                label, bounds = f"decode, {name}, whole module, KV {kv_dtype}", (16_384, 262_144)
                by_size(label, batch * (length + step), us / held.us, bounds, "tokens of KV")


# --- the gated delta rule ---------------------------------------------------------------------------------------------

DELTA_COLUMNS = (
    "batch_size",
    "seq_len",
    "num_tokens",
    "d_conv",
    "num_k_heads",
    "head_k_dim",
    "num_v_heads",
    "head_v_dim",
)


def delta_rows(folder: Path, name: str, phase: str) -> Rows | None:
    """Convolution and recurrence together; None if there is no table with both."""
    paths = sorted(folder.glob(f"{GPUS[name]}__*gdn_perf.csv.gz"))
    rows = [row for path in paths[-1:] for row in read_rows(path) if row["phase"] == phase]
    found = distinct(rows, DELTA_COLUMNS, parts="kernel_source")
    return found if len(found.us) else None


def delta_of(rows: Rows, i: int) -> GatedDelta:
    conv, key_heads, key_dim, value_heads, value_dim = (int(rows.columns[name][i]) for name in DELTA_COLUMNS[3:])
    return GatedDelta(
        key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_kernel=conv
    )


def shared_dims(rows: Rows) -> GatedDelta:
    """The first shape's layer; all have heads of the same sizes."""
    assert all(len(set(rows.columns[name])) == 1 for name in ("head_k_dim", "head_v_dim"))
    return delta_of(rows, 0)


def conv_us(gpu: GpuSpec, rows: Rows) -> Float64s:
    """What `small_kernels` charges: two launches, and the convolution's input and output."""
    channels = np.array([delta_of(rows, i).conv_channels for i in range(len(rows.us))])
    read = achieved(gpu, "weight_read_gbs").value * 1e3
    launches = 2 * achieved(gpu, "small_kernel_us").value
    return launches + 2 * rows.columns["num_tokens"] * channels * ACTIVATION_BYTES / read


def state_read_us(gpu: GpuSpec, rows: Rows, i: int) -> float:
    return 2 * delta_of(rows, i).state_bytes / (achieved(gpu, "weight_read_gbs").value * 1e3)


def linear_attention(folder: Path) -> None:
    """Part 2. Rows of the two kernels of one shape are added up."""
    print("\n2. The gated delta rule, one layer: convolution and recurrence")
    base = load_model("qwen3-next-80b-a3b")
    for name in GPUS:
        gpu = load_gpu(name)
        for phase in ("context", "generation"):
            table = delta_rows(folder, name, phase)
            if table is None:
                continue
            held = table.held_out() if phase == "context" else table  # nothing was fitted to decodes
            c, us = held.columns, conv_us(gpu, held)
            for i in range(len(us)):
                batch, tokens = int(c["batch_size"][i]), int(c["num_tokens"][i])
                pairs = tokens * (tokens // batch + 1) // 2
                prompts = BatchShape(extend_rows=batch, extend_tokens=tokens, extend_pairs=pairs)
                shape = prompts if phase == "context" else decode_shape(batch, 1)
                us[i] += (
                    roofline_model(replace(base, delta=delta_of(held, i)), gpu).delta_us(shape) / base.linear_layers
                )
            bounds, unit = ((17, 129), "rows") if phase == "generation" else ((1_024, 16_384), "tokens")
            label = "prompts" if phase == "context" else "decode"
            by_size(f"{label}, {name}", c["num_tokens"], us / held.us, bounds, unit)


# --- experts ----------------------------------------------------------------------------------------------------------


def popularity_cv(exponent: float, most: float) -> float:
    """The coefficient of variation of a power law between 1 and `most`."""

    def moment(order: float) -> float:
        power = order + 1.0 - exponent
        return math.log(most) if abs(power) < 1e-9 else (most**power - 1.0) / power

    mean = moment(1) / moment(0)
    return math.sqrt(moment(2) / moment(0) / mean**2 - 1.0)


def spread_experts(folder: Path) -> None:
    """Part 3."""
    print("\n3. Experts of DeepSeek-V3 in fp8, the fullest rank's")
    model = load_model("deepseek-v3")
    for name in ("h100", "h200"):
        cost = roofline_model(model, load_gpu(name), 8, weights_dtype="fp8")
        for kind in ("context", "generation"):
            (path,) = folder.glob(f"{GPUS[name]}__*wideep_{kind}_moe_perf.csv.gz")
            even: dict[tuple[int, int], tuple[float, float]] = {}
            ratios: dict[str, list[tuple[int, float]]] = defaultdict(list)
            slower: dict[str, list[tuple[float, float]]] = defaultdict(list)
            rows = list(csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()))
            for row in sorted(rows, key=lambda row: row["distribution"] != "uniform"):
                tokens, ep = int(row["num_tokens"]), int(row["moe_ep_size"])
                exponent = (
                    float(row["distribution"].removeprefix("power_law_")) if row["distribution"] != "uniform" else 0
                )
                cv = popularity_cv(exponent, 0.8 * tokens) if exponent else 0.0
                us = predicted_us(cost, row, cv)
                measured_us = float(row["latency"]) * 1e3
                ratios[row["distribution"]].append((ep, us / measured_us))
                if not exponent:
                    even[tokens, ep] = (us, measured_us)
                elif (tokens, ep) in even:
                    predicted_even, measured_even = even[tokens, ep]
                    slower[row["distribution"]].append((us / predicted_even, measured_us / measured_even))
            for low, high in ((2, 8), (16, 32), (64, 256)):
                line(f"{kind}, {name}, even, {low} to {high} ranks",
                     np.array([ratio for ep, ratio in ratios["uniform"] if low <= ep <= high]))  # fmt: skip
            for distribution, pairs in sorted(slower.items()):
                predicted, measured = np.median(np.array(pairs), axis=0)
                line(f"{kind}, {name}, {distribution}", np.array([ratio for _, ratio in ratios[distribution]]))
                print(f"    uneven over even, median: predicted {predicted:.2f}, measured {measured:.2f}")


def predicted_us(cost: RooflineModel, row: dict[str, str], cv: float) -> float:
    """The grouped GEMMs of the fullest rank."""
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
    tokens, hidden, ffn, topk, count = (np.array([float(row[name])]) for name in names)
    return float(cost.experts_us(tokens, hidden, ffn, topk, count, ep=int(row["moe_ep_size"]), cv=cv)[0])


if __name__ == "__main__":
    sys.exit(main())
