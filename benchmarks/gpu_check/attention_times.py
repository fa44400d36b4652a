"""Which attention backends work here, and how long one layer takes of each, over a pool of its own."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.shapes import PAGE_SIZE, Layer
from benchmarks.gpu_check.timing import graph_time_us, time_us
from lockstep.runtime.attention import Needs, choose, make
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.models import Decoder

COLD_BYTES = 256 << 20  # of KV that calls walk through before they come back: several times what caches hold
LAYERS_MAX = 36


def backends(section: Section, model: Decoder | Layer) -> list[str]:
    """Those that can run here and do, the fastest of the section `decode` first; each refusal is noted."""
    if not section.gpu:
        return ["reference"]
    found = []
    for name in ("flashinfer", "triton"):
        try:
            group = model.heads // model.kv_heads
            choose(name, Needs(section.device, model.dtype, model.head_dim, PAGE_SIZE, graphs=True, group=group))
            decode_us(model, name, 2, 20, PAGE_SIZE)
            extend_us(model, name, 2, 5, 20, PAGE_SIZE)
        except Exception as error:  # for instance a kernel that was not compiled ahead
            section.skip(name, f"{type(error).__name__}: {error}")
        else:
            found.append(name)
    if not found:
        raise RuntimeError("no attention backend works here")
    return sorted(found, key=lambda name: seen_us(section, name))


def seen_us(section: Section, name: str) -> float:
    """What the largest decode took with this backend, if that was measured in this run."""
    try:
        report = json.loads((section.out / "gpu_check.json").read_text())
        by_rows = report["sections"]["decode"]["figures"]["steps"][f"{name}, graphs on"]
        return float(by_rows[max(by_rows, key=int)]["step_us"])
    except (OSError, ValueError, KeyError):
        return 0.0


def decode_us(
    model: Decoder | Layer,
    name: str,
    rows: int,
    context: int,
    page_size: int,
    scales: tuple[float, float] | None = None,
) -> float:
    """Write and attend, one new token for each row behind `context` - 1 others; without the cost of launching.

    Args:
        scales: KV in fp8, with these.
    """
    layers = 1
    if model.device.type == "cuda":
        layers = max(1, min(LAYERS_MAX, COLD_BYTES // layer_bytes(model, rows * context)))
    backend, batch = planned(model, name, rows, context - 1, 1, page_size, layers, scales)
    backend.plan(batch, graph=backend.graphs)
    run = walk(model, backend, batch, layers)
    return graph_time_us(run, model.device) / layers


def extend_us(model: Decoder | Layer, name: str, rows: int, before: int, new: int, page_size: int) -> float:
    """The same for rows that extend by `new` tokens behind `before` others, launches included."""
    backend, batch = planned(model, name, rows, before, new, page_size, 2)
    backend.plan(batch)
    run = walk(model, backend, batch, 2)
    return time_us(run, model.device, repeats=7) / 2


def layer_bytes(model: Decoder | Layer, positions: int) -> int:
    """KV of so many positions in one layer."""
    return KvPool.bytes_per_page(1, positions, model.kv_heads, model.head_dim, model.dtype)


def planned(
    model: Decoder | Layer,
    name: str,
    rows: int,
    before: int,
    new: int,
    page_size: int,
    layers: int,
    scales: tuple[float, float] | None = None,
) -> tuple[AttentionBackend, ForwardBatch]:
    """A backend over a full pool with pages in random order, and a pass."""
    device, stop = model.device, before + new
    each = -(-stop // page_size)
    sizes = (layers, rows * each, page_size, model.kv_heads, model.head_dim)
    pool = KvPool(*sizes, model.dtype, device, None if scales is None else [scales] * layers)
    for kept in (*pool.keys, *pool.values):
        if scales is None:
            kept.normal_()
        else:
            kept.view(torch.uint8).random_(0, 0x40)  # e4m3 up to 2
    order = torch.from_numpy(np.random.default_rng(0).permutation(rows * each).astype(np.int32))
    table = order.view(rows, each).to(device)
    positions = torch.arange(before, stop, device=device).repeat(rows)
    of_row = torch.arange(rows, device=device).repeat_interleave(new)
    pages = table[of_row, positions // page_size].long()
    batch = ForwardBatch(
        token_ids=torch.zeros(rows * new, dtype=torch.int64, device=device),
        positions=positions,
        slots=pages * page_size + positions % page_size,
        rows=torch.arange(rows, dtype=torch.int32, device=device),
        indptr=torch.arange(rows + 1, dtype=torch.int32, device=device) * new,
        lengths=torch.full((rows,), stop, dtype=torch.int32, device=device),
        page_table=table,
        logits_at=torch.zeros(0, dtype=torch.int64, device=device),
        extend_rows=rows if new > 1 else 0,
        starts_host=np.full(rows, before, np.int32),
        lengths_host=np.full(rows, stop, np.int32),
    )
    return make(name, pool, model.heads, scale=model.scale, graph_rows=rows), batch


def walk(model: Decoder | Layer, backend: AttentionBackend, batch: ForwardBatch, layers: int) -> Callable[[], None]:
    """A call that runs each layer once."""
    shape = (batch.tokens, -1, model.head_dim)
    query = torch.randn(batch.tokens, model.heads * model.head_dim, device=model.device).to(model.dtype).view(shape)
    key, value = (
        torch.randn(batch.tokens, model.kv_heads * model.head_dim, device=model.device).to(model.dtype).view(shape)
        for _ in range(2)
    )

    def run() -> None:
        for layer in range(layers):
            backend.run(layer, query, key, value, batch)

    return run
