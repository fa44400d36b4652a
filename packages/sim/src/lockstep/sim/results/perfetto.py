"""A run as a Chrome trace: open the .json.gz in ui.perfetto.dev or chrome://tracing.

    process   | lane                    | contents
    engine    | CPU                     | work of the scheduler: the host's CPU intervals
              | GPU, GPU 2, ...         | batches, named by mode (the viewer colours by name), with rows and tokens
              | stage 1, link 1-2, ...  | with microbatches: batches in each stage and transfers on each link, named by
              |                         | microbatch; bubble: the stage is idle although a batch is in the pipeline
              | encoder                 | encoding of images, videos and sounds, if a run has any
              | counters                | waiting, running, KV pages, tokens per s: means over the bins of the series
    requests  | one group per request   | queue, prefill, decode

Format: "Trace Event Format" (JSON object, `traceEvents`); `ts` and `dur` are microseconds. Events are written one by
one, so a long trace needs no more memory.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.stages import StageTimes

REQUESTS_SHOWN = 2_000  # more requests make the viewer slow
ENGINE, REQUESTS = 1, 2  # process ids
CPU, GPU = 1, 2  # thread ids in ENGINE; overlapping batches take GPU + 1, ...
STAGE = 1_000  # thread id of the first stage; then the link after it, the second stage, ...
ENCODER = 2_000  # thread id of the first encoder lane; one more for each GPU that encodes in parallel

PHASES = ("queue", "prefill", "decode")
COUNTERS = {  # column of the series: displayed name
    "waiting": "waiting requests",
    "running": "running requests",
    "kv_used_pages": "KV pages held by requests",
    "kv_cached_pages": "KV pages held by the radix cache",
    "output_tokens_per_s": "output tokens per s",
}


def write_trace(
    path: Path, run: RunData, *, requests_shown: int = REQUESTS_SHOWN, about: Mapping[str, Any] | None = None
) -> None:
    """Write `run` as gzipped JSON, with the first `requests_shown` requests to arrive; the metadata has their number.

    Equal runs produce equal files: the gzip header contains neither time nor name.
    """
    arrived = len(run.requests.request_id)
    shown = min(requests_shown, arrived)
    metadata = {**(about or {}), "requests": f"{shown} of {arrived}, the first to arrive", "displayed": "Lockstep"}
    with (
        path.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=5, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="ascii", newline="\n") as out,
    ):
        out.write(f'{{"displayTimeUnit":"ms","otherData":{_json(metadata)},"traceEvents":[\n')
        separator = ""
        for event in _events(run, shown):
            out.write(separator + event)
            separator = ",\n"
        out.write("\n]}\n")


def _events(run: RunData, requests_shown: int) -> Iterator[str]:
    lanes = 1
    yield _named("process_name", ENGINE, 0, "engine")
    yield _named("process_name", REQUESTS, 0, f"requests (first {requests_shown})")
    yield _named("thread_name", ENGINE, CPU, "CPU")
    yield from _cpu_events(run)
    for lane, event in _batch_events(run):
        lanes = max(lanes, lane)
        yield event
    for lane in range(1, lanes + 1):
        yield _named("thread_name", ENGINE, GPU + lane - 1, "GPU" if lane == 1 else f"GPU {lane}")
    if run.stages is not None:
        yield from _stage_events(run.stages)
    yield from _encoder_events(run)
    yield from _counter_events(run)
    yield from _request_events(run, requests_shown)


def _cpu_events(run: RunData) -> Iterator[str]:
    cpu = run.cpu
    names = {what: _json(what) for what in set(cpu.what.tolist())}
    columns = (column.tolist() for column in (cpu.start_us, cpu.stop_us, cpu.what))
    for start_us, stop_us, what in zip(*columns, strict=True):
        yield f'{{"ph":"X","pid":{ENGINE},"tid":{CPU},"ts":{start_us},"dur":{stop_us - start_us},"name":{names[what]}}}'


def _batch_events(run: RunData) -> Iterator[tuple[int, str]]:
    """Yield the batches in order of start, each with its lane: the first free one, 1 unless batches overlap."""
    batches = run.batches
    measured = np.flatnonzero(batches.finished_us >= 0)
    order = measured[np.argsort(batches.started_us[measured], kind="stable")]
    columns = (
        column[order].tolist()
        for column in (
            batches.batch_id, batches.mode, batches.launched_us, batches.started_us, batches.finished_us,
            batches.rows, batches.new_tokens, batches.kv_tokens,
        )
    )  # fmt: skip
    free_us: list[int] = []
    for batch_id, mode, launched_us, started_us, finished_us, rows, new_tokens, kv_tokens in zip(*columns, strict=True):
        lane = next((i for i, until_us in enumerate(free_us) if until_us <= started_us), len(free_us))
        free_us[lane : lane + 1] = [finished_us]
        event = (
            f'{{"ph":"X","pid":{ENGINE},"tid":{GPU + lane},"ts":{started_us},"dur":{finished_us - started_us},'
            f'"name":"{mode}","args":{{"batch":{batch_id},"rows":{rows},"new_tokens":{new_tokens},'
            f'"kv_tokens":{kv_tokens},"launched_us":{launched_us}}}}}'
        )
        yield lane + 1, event


def _stage_events(times: StageTimes) -> Iterator[str]:
    """Yield a lane per stage, with its bubbles, and a lane per link."""
    stages = times.start_us.shape[1]
    for stage, gaps in enumerate(times.bubbles()):
        lane = STAGE + 2 * stage
        yield _named("thread_name", ENGINE, lane, f"stage {stage + 1}")
        if stage + 1 < stages:
            yield _named("thread_name", ENGINE, lane + 1, f"link {stage + 1}-{stage + 2}")
        columns = (times.batch_id, times.microbatch, times.send_us, times.start_us[:, stage], times.stop_us[:, stage])
        for batch_id, number, send_us, start_us, stop_us in zip(*(c.tolist() for c in columns), strict=True):
            args = f'"args":{{"batch":{batch_id}}}'
            at = f'"ts":{start_us},"dur":{stop_us - start_us}'
            yield f'{{"ph":"X","pid":{ENGINE},"tid":{lane},{at},"name":"m{number}",{args}}}'
            if stage + 1 < stages:
                at = f'"ts":{stop_us},"dur":{send_us}'
                yield f'{{"ph":"X","pid":{ENGINE},"tid":{lane + 1},{at},"name":"m{number}",{args}}}'
        for start_us, stop_us in gaps:
            yield f'{{"ph":"X","pid":{ENGINE},"tid":{lane},"ts":{start_us},"dur":{stop_us - start_us},"name":"bubble"}}'


def _encoder_events(run: RunData) -> Iterator[str]:
    """Yield the work of the encoder in order of start, each piece on the first free lane."""
    if run.encoder is None:
        return
    free_us: list[int] = []
    for start_us, stop_us, contents, tokens in run.encoder[np.argsort(run.encoder[:, 0], kind="stable")].tolist():
        lane = next((i for i, until_us in enumerate(free_us) if until_us <= start_us), len(free_us))
        free_us[lane : lane + 1] = [stop_us]
        yield (
            f'{{"ph":"X","pid":{ENGINE},"tid":{ENCODER + lane},"ts":{start_us},"dur":{stop_us - start_us},'
            f'"name":"encode","args":{{"contents":{contents},"tokens":{tokens}}}}}'
        )
    for lane in range(len(free_us)):
        yield _named("thread_name", ENGINE, ENCODER + lane, "encoder" if lane == 0 else f"encoder {lane + 1}")


def _counter_events(run: RunData) -> Iterator[str]:
    series = run.series.columns()
    times_us = run.series.t_us.tolist()
    for column, name in COUNTERS.items():
        for time_us, value in zip(times_us, series[column].tolist(), strict=True):
            if value == value:  # NaN where the host reported no gauges
                yield f'{{"ph":"C","pid":{ENGINE},"ts":{time_us},"name":"{name}","args":{{"value":{round(value, 3)}}}}}'


def _request_events(run: RunData, requests_shown: int) -> Iterator[str]:
    """Yield nested asynchronous slices: the request, and in it the phases queue, prefill and decode that it reached."""
    requests = run.requests
    for row in range(requests_shown):
        request_id = int(requests.request_id[row])
        arrival_us = int(requests.arrival_us[row])
        queue_us, ttft_us, ended_us = (int(c[row]) for c in (requests.queue_us, requests.ttft_us, requests.ended_us))
        stop_us = ended_us if ended_us >= 0 else run.span_us[1]
        args = {
            "label": str(requests.label[row]),
            "tenant": str(requests.tenant[row]),
            "finish_reason": str(requests.finish_reason[row]) or "unfinished",
            "prompt_tokens": int(requests.prompt_tokens[row]),
            "cached_tokens": max(int(requests.cached_tokens[row]), 0),
            "output_tokens": int(requests.output_tokens[row]),
            "retractions": int(requests.retractions[row]),
        }
        bounds_us = [arrival_us]  # start of each phase, and the end; an unfinished phase lasts to the end
        if queue_us >= 0:
            bounds_us.append(arrival_us + queue_us)
            if ttft_us >= 0:
                bounds_us.append(arrival_us + ttft_us)
        bounds_us.append(stop_us)
        yield _slice("b", request_id, arrival_us, f"r{request_id}", args)
        for phase, start_us, phase_stop_us in zip(PHASES, bounds_us, bounds_us[1:], strict=False):
            yield _slice("b", request_id, start_us, phase)
            yield _slice("e", request_id, phase_stop_us, phase)
        yield _slice("e", request_id, stop_us, f"r{request_id}")


def _slice(ph: str, request_id: int, time_us: int, name: str, args: Mapping[str, Any] | None = None) -> str:
    event: dict[str, Any] = {
        "ph": ph, "cat": "request", "id": request_id, "pid": REQUESTS, "tid": 0, "ts": time_us, "name": name,
    }  # fmt: skip
    return _json({**event, "args": args} if args else event)


def _named(what: str, pid: int, tid: int, name: str) -> str:
    return _json({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}})


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
