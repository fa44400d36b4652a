"""Metrics of several engines as one service: latencies of the router's clients, and the work of the engines.

Latencies are those of all requests together, with the hops between router and engine included. Counts and rates are
sums over engines. Mean levels (waiting, running, pages) are sums of means. A maximum is the greatest of any engine,
because the maxima of different engines need not occur at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.metrics.blocks import BlockCounts
from lockstep.sim.metrics.columns import Requests, Series, Summary
from lockstep.sim.metrics.device import at_work_us, decode_gaps_us
from lockstep.sim.metrics.drafts import Drafts
from lockstep.sim.metrics.packed import JoinedPacked
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.series import BINS_MAX
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.metrics.summary import (
    describe,
    describe_latency,
    describe_slo,
    describe_throughput,
    greatest,
    makespan,
    ratio,
)
from lockstep.sim.metrics.value_counts import ValueCounts

LEVELS = ("waiting", "running", "kv_used_pages", "kv_cached_pages")
AMOUNTS = ("prefill_tokens", "decode_tokens")


class RefusedRequest(NamedTuple):
    """A request that the router rejected."""

    request_id: int
    arrival_us: int
    ended_us: int
    prompt_tokens: int
    label: str
    tenant: str


NOT_REFUSED: Sequence[RefusedRequest] = ()


def combine(
    datas: Sequence[RunData],
    *,
    hop_us: int,
    slos: Sequence[Slo],
    waited_us: Mapping[int, int] | None = None,
    refused: Sequence[RefusedRequest] = NOT_REFUSED,
    sent: Sequence[int] = (),
    encoders: Sequence[int] = (),
    started: Collection[int] = (),
) -> RunData:
    """Combine the data of at least one engine. Batches are those of all engines, by start; their ids are not unique.

    Args:
        waited_us: waits at the router by request id; requests without a wait may be missing.
        refused: requests that were rejected at the router, and so are in no engine's data.
        sent: request ids by their numbers on engines, if these numbers differ from the ids; else empty.
        encoders: by engine, the number of the engine whose separate encoder GPUs it uses (ranks share them); empty:
            every engine has its own.
        started: numbers of the engines that were up at any time; only these have KV memory and a device. Empty: all.
    """
    up = [data for engine, data in enumerate(datas) if engine in started] if started else datas
    requests = _requests(datas, hop_us, waited_us or {}, refused, sent)
    itl_us = ValueCounts.join([data.itl_us for data in datas])
    begun = [data.span_us for data in datas if data.summary["requests"]["arrived"]]
    span_us = (min((s for s, _ in begun), default=0) - (hop_us if begun else 0), max((s for _, s in begun), default=0))
    summary: Summary = {
        "requests": _counts(datas, len(refused)),
        "latency": describe_latency(requests, itl_us),
        "throughput": describe_throughput(requests, slos),
        "cache": _cache(datas),
        "kv": _kv(up),
        "scheduler": _scheduler(datas),
        "device": _device(up, requests),
        "cpu": _cpu(datas),
        "slos": [describe_slo(slo, requests, itl_us) for slo in slos],
    }
    packed = JoinedPacked([data.packed for data in datas])
    verified = [data.drafts for data in datas if data.drafts is not None]
    drafts = Drafts.join(verified) if verified else None
    if drafts is not None:
        summary |= drafts.summary()
    in_blocks = [data.blocks for data in datas if data.blocks is not None]
    blocks = BlockCounts.join(in_blocks) if in_blocks else None
    if blocks is not None:
        summary["diffusion"] = blocks.describe()
    makespan_us = summary["throughput"]["makespan_us"]
    encoder = _encoder(datas)
    if any("media" in data.summary for data in datas):
        summary["media"] = _media(datas, makespan_us, encoders or range(len(datas)))
    if any("sessions" in data.summary for data in datas):
        summary["sessions"] = _sessions(datas)
    if any("samples" in data.summary for data in datas):
        summary["samples"] = _samples(datas)
    if any("adapters" in data.summary for data in datas):
        summary["adapters"] = _adapters(datas)
    return RunData(
        requests, _series(datas, span_us), itl_us, span_us, summary, packed, drafts, encoder=encoder, blocks=blocks
    )


def combine_handover(
    datas: Sequence[RunData],
    decodes: Sequence[int],
    *,
    hop_us: int,
    slos: Sequence[Slo],
    encoders: Sequence[int] = (),
) -> RunData:
    """Combine the data of prefill and decode engines.

    Latencies and requests are those of the decode engines, which stream to the clients. Cache hits are those of the
    prefill engines, where prompts are computed. Media are those of the prefill engines, and of decode engines that
    encoded some.
    Args:
        decodes: numbers of the decode engines.
    """
    whole = combine(datas, hop_us=hop_us, slos=slos)
    answers = combine([datas[engine] for engine in decodes], hop_us=hop_us, slos=slos)
    makers = [data for engine, data in enumerate(datas) if engine not in decodes]
    summary = {
        **whole.summary,
        **{name: answers.summary[name] for name in ("requests", "latency", "throughput", "slos")},
        "cache": _cache(makers),
        "device": _device(datas, answers.requests),
    }
    if "media" in summary:
        of = [engine for engine, data in enumerate(datas) if engine not in decodes or "media" in data.summary]
        places = encoders or range(len(datas))
        summary["media"] = _media(
            [datas[engine] for engine in of], summary["throughput"]["makespan_us"], [places[engine] for engine in of]
        )
    if "adapters" in summary:  # each request uses its adapter on two engines, and counts once
        summary["adapters"] = {**summary["adapters"], "requests": answers.summary["adapters"]["requests"]}
    streamed = _series([datas[engine] for engine in decodes], whole.span_us).output_tokens_per_s
    series = replace(whole.series, output_tokens_per_s=streamed)
    return RunData(
        answers.requests,
        series,
        answers.itl_us,
        whole.span_us,
        summary,
        whole.packed,
        whole.drafts,
        encoder=whole.encoder,
    )


def _counts(datas: Sequence[RunData], refused: int) -> Summary:
    out = _added([data.summary["requests"] for data in datas])
    if refused:
        for name in ("arrived", "failed", "rejected"):
            out[name] += refused
        out["by_reject_reason"] = dict(sorted((Counter(out["by_reject_reason"]) + Counter(queue_full=refused)).items()))
    return out


def _requests(
    datas: Sequence[RunData],
    hop_us: int,
    waited_us: Mapping[int, int],
    refused: Sequence[RefusedRequest],
    sent: Sequence[int],
) -> Requests:
    """Return all requests by id, which is the order of arrival."""
    parts = [data.requests.columns() for data in datas]
    columns: dict[str, NDArray[Any]] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if sent:
        columns["request_id"] = np.array(sent, np.int64)[columns["request_id"]]
    order = np.argsort(columns["request_id"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    if hop_us:
        columns["arrival_us"] = columns["arrival_us"] - hop_us
        for name, hops in (("queue_us", 1), ("ttft_us", 2), ("e2e_us", 2)):
            columns[name] = np.where(columns[name] < 0, columns[name], columns[name] + hops * hop_us)
        columns["ended_us"] = np.where(columns["ended_us"] < 0, columns["ended_us"], columns["ended_us"] + hop_us)
    if waited_us:
        longer_us = np.array([waited_us.get(request_id, 0) for request_id in columns["request_id"].tolist()], np.int64)
        columns["arrival_us"] = columns["arrival_us"] - longer_us
        for name in ("queue_us", "ttft_us", "e2e_us"):
            columns[name] = np.where(columns[name] < 0, columns[name], columns[name] + longer_us)
    if refused:
        columns = _with_refused(columns, refused)
    return Requests(**columns)


def _with_refused(columns: dict[str, NDArray[Any]], refused: Sequence[RefusedRequest]) -> dict[str, NDArray[Any]]:
    known: dict[str, list[Any]] = {name: [getattr(one, name) for one in refused] for name in RefusedRequest._fields}
    known["finish_reason"] = ["rejected_queue_full"] * len(refused)
    known["output_tokens"] = known["retractions"] = [0] * len(refused)
    out = {}
    for name, column in columns.items():
        missing = np.nan if column.dtype.kind == "f" else -1
        values = known.get(name, [missing] * len(refused))
        out[name] = np.concatenate([column, np.array(values, column.dtype)])
    order = np.argsort(out["request_id"], kind="stable")
    return {name: column[order] for name, column in out.items()}


def _series(datas: Sequence[RunData], span_us: tuple[int, int]) -> Series:
    """Return series with bins over the whole span; values of the engines' own bins are spread evenly over them."""
    start_us, stop_us = span_us[0], max(span_us[1], span_us[0] + 1)
    width_us = -(-(stop_us - start_us) // BINS_MAX)
    edges_us = np.append(np.arange(start_us, stop_us, width_us), stop_us).astype(np.int64)
    widths_us = np.diff(edges_us)
    totals = {
        name: np.zeros(len(widths_us)) for name in (*LEVELS, *AMOUNTS, "gpu_busy_fraction", "output_tokens_per_s")
    }
    for data in datas:
        if not data.summary["requests"]["arrived"]:
            continue
        own_us = np.append(data.series.t_us, max(data.span_us[1], int(data.series.t_us[-1]) + 1)).astype(np.float64)
        for name, total in totals.items():
            values = getattr(data.series, name).astype(np.float64)
            areas = values if name in AMOUNTS else values * np.diff(own_us)
            spread = np.diff(np.interp(edges_us, own_us, np.append(0.0, np.cumsum(areas))))
            total += spread if name in AMOUNTS else spread / widths_us
    totals["gpu_busy_fraction"] /= len(datas)
    columns: dict[str, Any] = {
        name: np.rint(t).astype(np.int64) if name in AMOUNTS else t for name, t in totals.items()
    }
    return Series(t_us=edges_us[:-1], **columns)


def _added(parts: Sequence[Summary]) -> Summary:
    """Add up each number, and each number of a dict by name. A part without a number adds nothing."""
    out: Summary = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        known = [part[name] for part in parts if part.get(name) is not None]
        if known and isinstance(known[0], dict):
            out[name] = dict(sorted(sum((Counter(one) for one in known), Counter()).items()))
        else:
            out[name] = sum(known) if known else None
    return out


def _cache(datas: Sequence[RunData]) -> Summary:
    out = _added([data.summary["cache"] for data in datas])
    return out | {"hit_ratio": ratio(out["prompt_tokens_cached"], out["prompt_tokens_admitted"])}


def _media(datas: Sequence[RunData], makespan_us: int | None, encoders: Sequence[int]) -> Summary:
    """Return counts of all engines, mean waits weighted by waiting requests, and the greatest of other figures."""
    parts = [data.summary["media"] for data in datas if "media" in data.summary]
    own = {
        at: data.summary["media"]["encoder_gpus"]
        for at, data in zip(encoders, datas, strict=True)
        if "media" in data.summary
    }
    waited = [part["requests_waited"] or 0 for part in parts]
    means = [part["wait_us_mean"] or 0.0 for part in parts]
    out = _added(parts)
    encoder_gpus = sum(own.values())
    gpus = encoder_gpus or len(datas)
    weighted = sum(count * mean for count, mean in zip(waited, means, strict=True))
    return out | {
        "encoder_gpus": encoder_gpus,
        "embedding_hit_ratio": ratio(out["reused"], out["contents"]),
        "encoder_busy_fraction": ratio(out["encoder_busy_us"], (makespan_us or 0) * gpus),
        "wait_us_mean": round(weighted / sum(waited), 1) if sum(waited) else None,
        **{name: greatest(parts, name) for name in ("wait_us_p50", "wait_us_p99", "wait_us_max")},
    }


def _sessions(datas: Sequence[RunData]) -> Summary:
    """Return counts and pages of all engines, the mean of mean shares, and the greatest share."""
    parts = [data.summary["sessions"] for data in datas if "sessions" in data.summary]
    out = _added(parts)
    held = [part["held_share_mean"] for part in parts if part["held_share_mean"] is not None]
    out["held_share_mean"] = round(sum(held) / len(datas), 6) if held else None
    return out | {"held_share_max": greatest(parts, "held_share_max")}


def _samples(datas: Sequence[RunData]) -> Summary:
    """Return counts of all engines, means weighted by completed requests, and the greatest percentiles."""
    parts = [data.summary["samples"] for data in datas if "samples" in data.summary]
    out = _added(parts)
    weighted = sum(part["requests_completed"] * (part["e2e_us_mean"] or 0.0) for part in parts)
    out["e2e_us_mean"] = round(weighted / out["requests_completed"], 1) if out["requests_completed"] else None
    return out | {name: greatest(parts, name) for name in out if "_us_p" in name}


def _adapters(datas: Sequence[RunData]) -> Summary:
    """Return counts of all engines, weighted means, and the greatest number of distinct adapters on an engine."""
    parts = [data.summary["adapters"] for data in datas if "adapters" in data.summary]
    out = _added(parts)
    for name, counted in (("load_us_mean", "loads"), ("wait_us_mean", "requests_waited")):
        weighted = sum(part[counted] * (part[name] or 0.0) for part in parts)
        out[name] = round(weighted / out[counted], 1) if out[counted] else None
    names = ("adapters", "load_us_max", "wait_us_p50", "wait_us_p99", "wait_us_max")
    return out | {name: greatest(parts, name) for name in names}


def _encoder(datas: Sequence[RunData]) -> NDArray[np.int64] | None:
    """Return the encoder tables of all engines, joined; None if there are none."""
    tables = [data.encoder for data in datas if data.encoder is not None]
    return np.concatenate(tables) if tables else None


def _kv(datas: Sequence[RunData]) -> Summary:
    parts = [data.summary["kv"] for data in datas]
    out = _added(parts)
    out |= {name: greatest(parts, name) for name in ("used_pages_max", "used_share_max", "cached_pages_max")}
    return out | {"used_share_mean": ratio(out["used_pages_mean"], out["pages"])}


def _scheduler(datas: Sequence[RunData]) -> Summary:
    parts = [data.summary["scheduler"] for data in datas]
    return _added(parts) | {name: greatest(parts, name) for name in ("waiting_max", "running_max")}


def _device(datas: Sequence[RunData], requests: Requests) -> Summary:
    parts = [data.summary["device"] for data in datas]
    out = _added(
        [{name: part[name] for name in ("batches", "batches_by_mode", "busy_us", "bubble_us")} for part in parts]
    )
    start_us, stop_us = makespan(requests) or (0, 0)
    work_us = sum(at_work_us(data) for data in datas if data.summary["device"]["bubble_us"] is not None)
    gaps = [decode_gaps_us(data) for data in datas]
    gap_us = sum(round(gap.sum()) for gap, _ in gaps)
    piped = [(part["pipeline"], part["busy_us"] or 0) for part in parts if "pipeline" in part]
    there_us = sum(pipeline["stages"] * busy_us for pipeline, busy_us in piped)
    used_us = sum(sum(pipeline["stage_busy_us"]) for pipeline, _ in piped)
    pipelines = {
        "stages": sum(pipeline["stages"] for pipeline, _ in piped),
        "stage_busy_us": [us for pipeline, _ in piped for us in pipeline["stage_busy_us"]],
        "stage_busy_share": ratio(used_us, there_us),
        "pipeline_bubble_us": sum(pipeline["pipeline_bubble_us"] for pipeline, _ in piped),
    }
    return {
        "batches": out["batches"],
        "batches_by_mode": out["batches_by_mode"],
        "busy_us": out["busy_us"],
        "busy_fraction": ratio(out["busy_us"], (stop_us - start_us) * len(datas)),
        "bubble_us": out["bubble_us"],
        "bubble_share": ratio(out["bubble_us"], work_us),
        **describe("decode_gap", ValueCounts.join([gap for gap, _ in gaps])),
        "decode_gap_share": ratio(gap_us, gap_us + sum(after for _, after in gaps)),
        **({"pipeline": pipelines} if piped else {}),
    }


def _cpu(datas: Sequence[RunData]) -> Summary:
    return _added([data.summary["cpu"] for data in datas])
