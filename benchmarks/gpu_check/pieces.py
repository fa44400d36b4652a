"""A pass in pieces of CUDA graphs beside the same pass launched whole: results, time, and time of the CPU."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.attention_times import backends
from benchmarks.gpu_check.decode import release
from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.shapes import PAGE_SIZE
from benchmarks.gpu_check.timing import time_us
from lockstep.host.loop import HostClock
from lockstep.runtime.assembly import make_pool, stream_lane
from lockstep.runtime.attention import make
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.graphs import CudaGraphs, EagerGraphs
from lockstep.runtime.models import Decoder
from lockstep.runtime.overlap import StreamLane
from lockstep.runtime.pieces import PieceGraphs, make_pieces, piece_sizes

TOKENS = (4, 24, 96, 200, 500)  # of passes, some of them padded
CONTEXT = 1024  # positions before the new tokens of a row
FAR = 0.02  # of the largest hidden state: products of another number of rows add in another order


def run(section: Section) -> None:
    """Mixed passes of every size by every backend."""
    model = shapes.model(section)
    tokens, context = ((3, 6), 12) if section.small else (TOKENS, CONTEXT)
    for name in backends(section, model):
        with section.trying(f"{name}, in pieces"):
            section.needs(10 if section.gpu else 0)
            passes(section, model, name, tokens, context)
        release(section)


def passes(section: Section, model: Decoder, name: str, tokens: tuple[int, ...], context: int) -> None:
    """Compare passes of these numbers of tokens."""
    lane = stream_lane(model.device, HostClock())
    with lane.stream(), torch.inference_mode():
        rows = max(tokens) // 2 + 1
        pool = make_pool(model, rows * -(-(context + max(tokens)) // PAGE_SIZE), PAGE_SIZE)
        for kept in (*pool.keys, *pool.values):
            kept.normal_()
        attention = make(name, pool, model.heads, scale=model.scale, plans_in_flight=64)
        began = time.perf_counter()
        recorder = CudaGraphs() if section.gpu else EagerGraphs()
        pieces = make_pieces(model, attention, piece_sizes(max(tokens)), recorder, lane, ())
        assert pieces is not None
        section.put(f"captures.{name}", {"s": round(time.perf_counter() - began, 2), "bytes": pieces.bytes})
        for count in tokens:
            section.needs(2)
            batch = mixed(model, pool.pages, count, context)
            figures = compared(section, model, attention, pieces, lane, batch)
            section.put(f"passes.{name}.{count}", figures)
            far = figures["far"]
            section.check(f"{name}: {count} tokens in pieces", far <= FAR, f"off by {far:.2g}, {FAR} allowed")


def compared(
    section: Section,
    model: Decoder,
    attention: AttentionBackend,
    pieces: PieceGraphs,
    lane: StreamLane,
    batch: ForwardBatch,
) -> dict[str, Any]:
    """Times in microseconds of one pass both ways, and how far apart their hidden states are."""

    def whole() -> Any:
        attention.plan(batch)
        return model.forward(batch, attention)

    def cut() -> Any:
        return pieces.run(batch)

    wanted, found = whole().float(), cut().float()
    far = float((found - wanted).abs().max() / wanted.abs().max())
    ways = {"whole": whole, "pieces": cut}
    figures: dict[str, Any] = {"far": far if np.isfinite(far) else 1e9}
    for way, one in ways.items():
        figures[f"{way}_us"] = round(time_us(one, model.device, repeats=3 if section.small else 15), 1)
        figures[f"{way}_cpu_us"] = round(cpu_us(one, lane), 1)
    return figures


def cpu_us(one: Any, lane: StreamLane, repeats: int = 5) -> float:
    """Median time in which the CPU launches one pass, while nothing else is on the device."""
    taken = []
    for _ in range(repeats):
        lane.check()
        before = time.perf_counter()
        one()
        taken.append(1e6 * (time.perf_counter() - before))
    lane.check()
    return float(np.median(taken))


def mixed(model: Decoder, pages: int, count: int, context: int) -> ForwardBatch:
    """A pass in which half of the tokens extend one row, and each of the others decodes a row of its own."""
    device, extending = model.device, count - count // 2
    starts = np.full(1 + count // 2, context, np.int32)
    stops = starts + 1
    stops[0] += extending - 1
    rows, width = len(starts), -(-(context + count) // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(pages)[: rows * width].reshape(rows, width)
    counts = stops - starts
    of_row = np.repeat(np.arange(rows), counts)
    positions = context + np.concatenate([np.arange(one) for one in counts])
    slots = table[of_row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def there(array: Any, dtype: torch.dtype) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

    return ForwardBatch(
        token_ids=there(np.arange(count) % 200 + 1, torch.int64),
        positions=there(positions, torch.int64),
        slots=there(slots, torch.int64),
        rows=there(np.arange(rows), torch.int32),
        indptr=there(np.append(0, np.cumsum(counts)), torch.int32),
        lengths=there(stops, torch.int32),
        page_table=there(table, torch.int32),
        logits_at=there(np.arange(rows), torch.int64),
        extend_rows=1,
        starts_host=starts,
        lengths_host=stops.astype(np.int32),
    )
