"""Data of the page's charts: columns packed as numbers, latencies as curves, long timelines merged to a bound.

A run may have hundreds of thousands of batches, while a page must stay small enough to mail. Each column becomes
little-endian numbers of the smallest type that holds it, in base64. Times become distances from the previous one.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.metrics.columns import Batches, CpuIntervals
from lockstep.sim.metrics.value_counts import ValueCounts
from lockstep.sim.report.report_run import ReportRun
from lockstep.sim.results.slo_rows import METRIC_NAMES

Json = dict[str, Any]
Ints = NDArray[np.int64]

CURVE_POINTS = 300  # of a latency distribution, plus a third of that in its last percent
SCATTER_POINTS_MAX = 3000
RATE_BINS_MAX = 150  # bins of tokens per second: finer ones show single batches as a comb
CPU_LANES_MAX = 5
PAUSE_US = 50_000  # spans farther apart are merged only if nothing else suffices
MARKS = ("p50", "p90", "p99")
MODES = ("extend", "split_prefill", "mixed", "decode")  # lanes from top to bottom; further modes follow


def run_payload(run: ReportRun, spans_max: int) -> Json:
    """Return the data of all charts of one run; each timeline has at most `spans_max` spans."""
    data, done = run.data, run.data.requests.completed
    columns = {name: getattr(data.requests, f"{name}_us")[done] for name in METRIC_NAMES if name != "itl"}
    known = {name: ValueCounts.of(values[values >= 0]) for name, values in columns.items()}  # NaN compares false
    known["itl"] = data.itl_us
    slos = {slo.metric: {"limit_us": slo.bound_us, "label": slo.bound} for slo in reversed(run.slos)}
    latencies = {}
    for metric, name in METRIC_NAMES.items():
        marks = [[mark, run.summary("latency", f"{metric}_us_{mark}")] for mark in MARKS]
        latency = curve(known[metric], name, marks, slos.get(metric))
        if latency is not None:
            latencies[metric] = latency
    series = data.series.columns()
    rates = {name: series.pop(name) for name in ("prefill_tokens", "decode_tokens", "output_tokens_per_s")}
    t_us = data.series.t_us
    heads = np.arange(0, t_us.size, max(1, -(-t_us.size // RATE_BINS_MAX)))
    widths_us = np.maximum(np.diff(t_us, append=max(data.span_us[1], int(t_us[-1]) + 1) if t_us.size else 0), 1)
    rates["output_tokens_per_s"] = rates["output_tokens_per_s"] * widths_us / 1e6
    group_s = np.add.reduceat(widths_us, heads) / 1e6 if t_us.size else np.empty(0)
    per_s = {
        f"{name.partition('_')[0]}_per_s": pack(np.add.reduceat(values, heads) / group_s)
        for name, values in rates.items()
        if t_us.size
    }
    return {
        "span_us": list(data.span_us),
        "series": {name: pack(values, delta=name == "t_us") for name, values in series.items()},
        "rates": {"t_us": pack(t_us[heads], delta=True), **per_s},
        "kv_pages": run.summary("kv", "pages"),
        "latencies": latencies,
        "scatter": scatter(data.requests.prompt_tokens[done], data.requests.ttft_us[done]),
        "timeline": {"gpu": gpu_timeline(data.batches, spans_max), "cpu": cpu_timeline(data.cpu, spans_max)},
    }


# ------------------------------------------------------------------------------------------------------- columns


def pack(values: NDArray[Any], *, delta: bool = False) -> Json:
    """Pack one column as {"dtype", "b64"}. With `delta` (values never decrease) as distances, plus the first value."""
    values = np.asarray(values)
    column: Json = {}
    if values.dtype.kind == "f":
        packed = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).astype("<f4")
        column["dtype"] = "f4"
    else:
        numbers = values.astype(np.int64)
        if delta:
            column["first"] = int(numbers[0]) if numbers.size else 0
            numbers = np.diff(numbers, prepend=numbers[:1])
        column["dtype"] = _smallest_dtype(numbers)
        packed = numbers.astype("<" + column["dtype"])
    column["b64"] = base64.b64encode(packed.tobytes()).decode("ascii")
    return column


def _smallest_dtype(numbers: Ints) -> str:
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    if low >= 0:
        for name, bits in (("u1", 8), ("u2", 16), ("u4", 32)):
            if high < 1 << bits:
                return name
    elif low >= -(1 << 31) and high < 1 << 31:
        return "i4"
    return "f8"


# ------------------------------------------------------------------------------------------------------- latencies


def curve(known_us: ValueCounts, name: str, marks: list[list[Any]], slo: Json | None) -> Json | None:
    """Return the share of values at or below each latency, at a few hundred points; None without values."""
    n = known_us.size
    if n == 0:
        return None
    body, tail = np.linspace(0, n - 1, CURVE_POINTS), np.linspace(0.99 * (n - 1), n - 1, CURVE_POINTS // 3)
    at = np.unique(np.concatenate([body, tail]).astype(np.int64))
    x_us = np.round(known_us.at(at), 1)
    share = (at + 1) / n
    return {
        "name": name,
        "x_us": [float(x_us[0]), *x_us.tolist()],
        "share": [0.0, *np.round(share, 6).tolist()],
        "marks": marks,
        "slo": slo,
    }


def scatter(prompt_tokens: Ints, ttft_us: Ints) -> Json | None:
    """Return evenly chosen requests with a first token, at most SCATTER_POINTS_MAX; None for fewer than two."""
    rows = np.flatnonzero(ttft_us >= 0)
    if rows.size < 2:
        return None
    rows = rows[:: -(-rows.size // SCATTER_POINTS_MAX)]
    return {"prompt_tokens": pack(prompt_tokens[rows]), "ttft_us": pack(ttft_us[rows])}


# ------------------------------------------------------------------------------------------------------- timelines


class ChartSpans(NamedTuple):
    """Work of one processor: half-open spans [start:stop) in us, by start, each in the lane of its kind."""

    start_us: Ints
    stop_us: Ints
    lane: Ints  # index into `lanes`
    lanes: tuple[str, ...]


def gpu_timeline(batches: Batches, spans_max: int) -> Json | None:
    """Return batches by start, in a lane per mode; None if the host reported no device times."""
    measured = np.flatnonzero((batches.started_us >= 0) & (batches.finished_us >= batches.started_us))
    if measured.size == 0:
        return None
    order = measured[np.argsort(batches.started_us[measured], kind="stable")]
    start_us = batches.started_us[order]
    lane, lanes = lanes_of(batches.mode[order], MODES)
    spans = ChartSpans(start_us, np.maximum(batches.finished_us[order], start_us + 1), lane, lanes)
    facts = {
        "batch_id": (batches.batch_id[order], "first"),
        "waited": (np.maximum(start_us - batches.launched_us[order], 0), "mean"),
        "rows": (batches.rows[order], "mean"),
        "new_tokens": (batches.new_tokens[order], "sum"),
        "kv_tokens": (batches.kv_tokens[order], "max"),
    }
    return timeline(spans, facts, spans_max)


def cpu_timeline(cpu: CpuIntervals, spans_max: int) -> Json | None:
    """Return CPU work of the scheduler, in a lane per kind of work; None if the host reported none."""
    if cpu.start_us.size == 0:
        return None
    order = np.argsort(cpu.start_us, kind="stable")
    lane, lanes = lanes_of(cpu.what[order], most=CPU_LANES_MAX)
    start_us = cpu.start_us[order]
    return timeline(ChartSpans(start_us, np.maximum(cpu.stop_us[order], start_us + 1), lane, lanes), {}, spans_max)


def lanes_of(kinds: NDArray[Any], order: Sequence[str] = (), most: int = 99) -> tuple[Ints, tuple[str, ...]]:
    """Number the kinds: those in `order` first, then by frequency. With more than `most` lanes, the last is "other"."""
    names, inverse, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    rank = {name: place for place, name in enumerate(order)}
    by_rank = sorted(range(names.size), key=lambda i: (rank.get(str(names[i]), len(rank)), -int(counts[i]), i))
    lane_of = np.empty(names.size, np.int64)
    lane_of[by_rank] = np.minimum(np.arange(names.size), most - 1)
    lanes = [str(names[i]) for i in by_rank]
    if len(lanes) > most:
        lanes = [*lanes[: most - 1], "other"]
    return lane_of[inverse], tuple(lanes)


def heads_of_merged(start_us: Ints, stop_us: Ints, lane: Ints, most: int) -> Ints:
    """Return the first rows of groups of neighbours in one lane, about `most` groups.

    Neighbours join in groups of 2, 4, 8 and so on, never across a pause of more than PAUSE_US. If that is not enough,
    they join across pauses too. Rows must be sorted by lane, then by start.
    """
    n = start_us.size
    rows = np.arange(n, dtype=np.int64)
    if n <= most:
        return rows
    new_lane = np.ones(n, bool)
    new_lane[1:] = lane[1:] != lane[:-1]
    after_pause = new_lane.copy()
    after_pause[1:] |= start_us[1:] - stop_us[:-1] > PAUSE_US
    place = rows - np.maximum.accumulate(np.where(after_pause, rows, 0))
    for together in (2, 4, 8, 16, 32, 64):
        heads = np.flatnonzero(place % together == 0)
        if heads.size <= most:
            return heads
    place = rows - np.maximum.accumulate(np.where(new_lane, rows, 0))
    return np.flatnonzero(place % -(-n // most) == 0)


def timeline(spans: ChartSpans, facts: Mapping[str, tuple[NDArray[Any], str]], most: int) -> Json:
    """Return the spans and their facts as packed columns, merged to about `most` spans.

    Args:
        facts: column name -> (value per span, how to merge: "first", "mean", "sum" or "max").
    Returns: {"lanes", "spans" before merging, "shown" after it, "columns"}. Merged spans have two more columns: the
        number of spans in each ("count"), and the share of its time with work, of 255 ("busy").
    """
    n = spans.start_us.size
    if n <= most:
        start_us, length_us, lane = spans.start_us, spans.stop_us - spans.start_us, spans.lane
        columns = {name: values for name, (values, _) in facts.items()}
    else:
        by_lane = np.lexsort((spans.start_us, spans.lane))
        starts_us, stops_us = spans.start_us[by_lane], spans.stop_us[by_lane]
        heads = heads_of_merged(starts_us, stops_us, spans.lane[by_lane], most)
        counts = np.diff(heads, append=n)
        busy_us = np.add.reduceat(stops_us - starts_us, heads)
        by_start = np.argsort(starts_us[heads], kind="stable")
        start_us = starts_us[heads][by_start]
        length_us = np.maximum.reduceat(stops_us, heads)[by_start] - start_us
        lane = spans.lane[by_lane][heads][by_start]
        columns = {name: _merge(values[by_lane], heads, counts, how)[by_start] for name, (values, how) in facts.items()}
        columns["count"] = counts[by_start]
        columns["busy"] = np.clip(np.rint(255 * busy_us[by_start] / length_us), 1, 255).astype(np.int64)
    result: Json = {"lanes": list(spans.lanes), "spans": n, "shown": int(start_us.size)}
    result["columns"] = {
        "start": pack(start_us, delta=True),
        "length": pack(length_us),
        "lane": pack(lane),
        **{name: pack(values) for name, values in columns.items()},
    }
    return result


def _merge(values: NDArray[Any], heads: Ints, counts: Ints, how: str) -> NDArray[Any]:
    if how == "first":
        return values[heads]
    if how == "max":
        return np.asarray(np.maximum.reduceat(values, heads))
    sums = np.add.reduceat(values, heads)
    return np.asarray(sums if how == "sum" else sums / counts)
