"""A decode step against its floor: bytes that must move, over the bandwidth of a copy. Attention backends by shape."""

from __future__ import annotations

import gc
import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.attention_times import backends, decode_us, extend_us, layer_bytes
from benchmarks.gpu_check.breakdown import profile, summary
from benchmarks.gpu_check.machine import COPY_BYTES, copy_gbs
from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.served import Decodes
from benchmarks.gpu_check.shapes import PAGE_SIZE
from benchmarks.gpu_check.timing import percentile
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.models import Decoder

BATCHES = (1, 16, 64, 256)
CONTEXT = 1024
FLOOR_RATIO = 1.25  # the target, at the batches of TARGETS
TARGETS = (64, 256)
WARM_UPS, STEPS = 6, 30
PROFILED = 8  # steps


def run(section: Section) -> None:
    """Steps of every batch by every backend, with graphs and without; then attention alone."""
    batches: tuple[int, ...] = (1, 4) if section.small else BATCHES
    context = 24 if section.small else CONTEXT
    gbs = copy_gbs(section.device, 1 << 22 if section.small else COPY_BYTES)
    section.put("copy_gbs", round(gbs, 1))
    model = shapes.model(section)
    section.put("model", {"shape": "tiny" if section.small else "Qwen3-8B", "weight_bytes": model.weight_bytes})
    section.put("context", context)
    batches = those_that_fit(section, model, batches, context)
    names = backends(section, model)
    for name in names:
        for graphs in (True, False):
            label = f"{name}, graphs {'on' if graphs else 'off'}"
            with section.trying(label):
                section.needs(12 if section.gpu else 0)
                steps(section, model, name, graphs, batches, context, gbs)
            release(section)
    with section.trying("targets"):
        targets(section)
    for name in names:
        with section.trying(f"attention by shape, {name}"):
            attention(section, model, name)
        release(section)


def those_that_fit(section: Section, model: Decoder, batches: tuple[int, ...], context: int) -> tuple[int, ...]:
    """Batches that fit into the device's KV memory."""
    if not section.gpu:
        return batches
    free, _ = torch.cuda.mem_get_info(section.device)
    fitting = tuple(one for one in batches if one * (context + 64) * layer_bytes(model, 1) * model.layers < 0.85 * free)
    for batch in batches[len(fitting) :]:
        section.skip(f"{batch} rows", f"{free >> 30} GiB are free, which is too little for their KV")
    return fitting


def floor_us(model: Decoder, batch: int, context: int, gbs: float) -> float:
    """The time in which the bytes move that one decode must move.

    All weights but the table of embeddings, of which a row each is read (a tied one is read by the logits); and the KV
    of all positions, read once and the new one written.
    """
    weights = model.weight_bytes
    if model.head is not model.embeddings:
        weights -= model.embeddings.weight.numel() * model.dtype.itemsize
    kv = KvPool.bytes_per_page(model.layers, 1, model.kv_heads, model.head_dim, model.dtype)
    return (weights + batch * (context + 1) * kv) / gbs / 1e3


def steps(
    section: Section, model: Decoder, backend: str, graphs: bool, batches: tuple[int, ...], context: int, gbs: float
) -> None:
    """Time from the end of one decode to the end of the next, two in flight, sampling included."""
    warm_ups, count = (1, 3) if section.small else (WARM_UPS, STEPS)
    decodes = Decodes(model, batches, context + warm_ups + count + 2, backend, graphs)
    label = f"{backend}, graphs {'on' if graphs else 'off'}"
    if decodes.executor.graphs is not None:
        section.put(f"graph_bytes.{backend}", decodes.executor.graphs.bytes)
    for batch in batches:
        section.needs(2)
        decodes.run(batch, context - warm_ups, warm_ups)
        decodes.times.forget()
        decodes.run(batch, context, count)
        periods, durations = decodes.times.periods_us(), decodes.times.durations_us()
        step_us, least_us = statistics.median(periods), floor_us(model, batch, context + count // 2, gbs)
        found = {
            "step_us": round(step_us, 1),
            "step_us_p90": round(percentile(periods, 0.9), 1),
            "batch_us": round(statistics.median(durations), 1),
            "floor_us": round(least_us, 1),
            "ratio": round(step_us / least_us, 3),
            "tokens_per_s": round(batch / step_us * 1e6),
        }
        section.put(f"steps.{label}.{batch}", found)
        if section.gpu and graphs and batch in TARGETS:
            with section.trying(f"breakdown, {label}, {batch} rows"):
                section.needs(6)
                trace = section.part.with_suffix(".trace.json")
                kernels = profile(partial(decodes.run, batch, context, PROFILED), trace)
                section.put(f"breakdown.{label}.{batch}", summary(kernels, PROFILED))
        kinds = decodes.executor.graphs
        if kinds is not None:
            section.check(f"{label}, {batch} rows: replayed", kinds.replays > 0, f"{kinds.replays} replays")


def targets(section: Section) -> None:
    """The best backend at each batch, held against the target."""
    steps: dict[str, dict[str, Any]] = section.figures.get("steps", {})
    best: dict[str, Any] = {}
    for batch in TARGETS:
        found = {label: by_batch[str(batch)]["ratio"] for label, by_batch in steps.items() if str(batch) in by_batch}
        if found:
            label = min(found, key=lambda one: found[one])
            best[str(batch)] = {
                "ratio": found[label],
                "by": label,
                "target": FLOOR_RATIO,
                "met": found[label] <= FLOOR_RATIO,
            }
    section.put("targets", best)


def attention(section: Section, model: Decoder, name: str) -> None:
    """One layer's attention: decodes of several rows and contexts, extends of several prompts."""
    decode_shapes: tuple[tuple[int, int], ...] = (
        (1, 1024), (16, 1024), (64, 1024), (256, 1024), (16, 8192), (1, 32768)
    )  # fmt: skip
    extend_shapes: tuple[tuple[int, int, int], ...] = ((1, 0, 1024), (8, 0, 1024), (1, 0, 8192), (8, 2048, 512))
    if section.small:
        decode_shapes, extend_shapes = ((1, 16), (3, 24)), ((2, 4, 8),)
    for rows, context in decode_shapes:
        section.needs(3 if section.gpu else 0)
        us = decode_us(model, name, rows, context, PAGE_SIZE)
        kv = layer_bytes(model, rows * context)
        section.put(f"attention.decode.{rows} x {context}.{name}", {"us": round(us, 1), "gbs": round(kv / us / 1e3)})
    for rows, before, new in extend_shapes:
        section.needs(3 if section.gpu else 0)
        us = extend_us(model, name, rows, before, new, PAGE_SIZE)
        pairs = rows * (new * before + new * (new + 1) / 2)
        tflops = 4 * model.heads * model.head_dim * pairs / us / 1e6
        shape = f"{rows} x {new} behind {before}"
        section.put(f"attention.extend.{shape}.{name}", {"us": round(us, 1), "tflops": round(tflops, 1)})


def release(section: Section) -> None:
    """Give back what the last executor held."""
    gc.collect()
    if section.gpu:
        torch.cuda.empty_cache()
