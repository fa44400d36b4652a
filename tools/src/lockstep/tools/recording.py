"""A recording of another engine's scheduler (`lockstep.host.recording`) in the terms of the tools.

`lockstep.sim.results.recorded_engine` reads its records as events and Steps. `convert` writes the files that other
commands read:

| file | command |
|---|---|
| `metrics.json`, `requests.parquet`, `requests.csv` | `lockstep compare` |
| `batches.jsonl` | `lockstep calibrate --from`, which also reads the recording itself |
| `requests.jsonl`, a trace in Mooncake's format | tools for such traces; `--workload` also takes the recording itself |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.text import count
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import fold
from lockstep.host.host_header import VLLM, HostHeader
from lockstep.host.recording import Planned
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.results.batch_times import BatchFold, BatchTime, BatchTimesHeader, line_of
from lockstep.sim.results.code_version import code_commit, code_version
from lockstep.sim.results.recorded_engine import ReadRecording, Recorded
from lockstep.sim.results.results import METRICS_FORMAT, METRICS_VERSION, write_metrics_json, write_requests
from lockstep.sim.results.text import duration
from lockstep.sim.run.run_folder import whole
from lockstep.tools.narration import clock
from lockstep.tools.runs import clients_ids, print_json
from lockstep.tools.state_at import (
    DECODE,
    END,
    PREFILL,
    WAITING,
    EngineState,
    OpenRequest,
    UnfinishedBatch,
    lines_of,
)

TRACE_BLOCK_TOKENS = 512  # of a hash id in Mooncake's format


def find(recording: ReadRecording, name: str) -> Recorded:
    """Return the request of this name: its number as 17 or r17, vLLM's id, or the client's id within it.

    Raises: ConfigError if there is none or several.
    """
    found = [one for one in recording.requests if one.arrived.name == name]
    found = found or [one for one in recording.requests if name in clients_ids(one.arrived.name)]
    digits = name.removeprefix("r")
    if not found and digits.isdigit() and int(digits) < len(recording.requests):
        found = [recording.requests[int(digits)]]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"r{one.number}" for one in found[:8])
        raise ConfigError(f"`--request` {name} is the label of {len(found)} requests: {names}")
    raise ConfigError(
        f"`--request` must be a request of this recording, got `{name}`; it has {len(recording.requests):,}"
    )


def story(recording: ReadRecording, request: Recorded) -> Iterator[str]:
    """Yield the history of a request in lines. A recording holds what happened, and no reasons."""
    arrived = request.arrived
    yield (
        f"{arrived.name} (r{request.number}): {count(arrived.prompt_tokens, 'prompt token')}, "
        f"{count(len(request.token_us), 'output token')}; recorded from {recording.header.engine}, without reasons"
    )
    yield f"  {clock(arrived.time_us):>12}  arrived; at most {count(arrived.max_new_tokens, 'output token')}"
    waits_since, retractions = arrived.time_us, list(request.retracted_us)
    decodes = 0
    for plan, start, new in request.passes:
        while retractions and retractions[0] <= plan.time_us:
            yield from _decoded(decodes)
            decodes, waits_since = 0, retractions.pop(0)
            yield f"  {clock(waits_since):>12}  was preempted, {count(plan.waiting, 'request')} waiting"
        if waits_since >= 0:
            yield (
                f"  {clock(plan.time_us):>12}  was admitted after {duration(plan.time_us - waits_since)}, "
                f"{count(start, 'token')} cached; {plan.running} running, {plan.waiting} waiting, "
                f"{plan.kv_usage:.0%} of the pages in use"
            )
            waits_since = -1
        if start >= arrived.prompt_tokens:
            decodes += 1
            continue
        rows = count(len(plan.rows), "row")
        yield f"  {clock(plan.time_us):>12}  computed tokens {start} to {start + new} in a pass of {rows}"
    yield from _decoded(decodes)
    if request.token_us:
        first = request.token_us[0]
        yield f"  {clock(first):>12}  first token, TTFT {duration(first - arrived.time_us)}"
    if request.ended is None:
        yield f"  {clock(recording.last_us):>12}  was still open when the recording ends"
    else:
        yield f"  {clock(request.ended.time_us):>12}  ended: {request.ended.reason}"


def _decoded(passes: int) -> Iterator[str]:
    if passes:
        yield f"  {'':>12}  decoded in {count(passes, 'pass', 'passes')}"


def slowest(recording: ReadRecording, metric: str, most: int) -> list[Recorded]:
    """Return the requests with the longest ttft, tpot, e2e or itl, the longest first."""

    def value(one: Recorded) -> float:
        tokens, came = one.token_us, one.arrived.time_us
        if metric == "e2e":
            return one.ended.time_us - came if one.ended is not None else -1
        if metric == "ttft":
            return tokens[0] - came if tokens else -1
        if len(tokens) < 2:
            return -1
        gaps = np.diff(tokens)
        return float(gaps.max() if metric == "itl" else gaps.sum() / len(gaps))

    known = [one for one in recording.requests if value(one) >= 0]
    return sorted(known, key=value, reverse=True)[:most]


def convert(folder: Path, *, model: str | None = None, gpu: str | None = None, tp: int = 1) -> dict[str, Any]:
    """Write the files that other commands read into the run folder. Returns the summary of metrics.json.

    Args:
        model, gpu: catalogue names, or a path, for the header of batches.jsonl, which is written if both are given.
    """
    recording, metrics = ReadRecording(folder), MetricsFold()
    times = BatchFold()
    batches: list[BatchTime] = []
    for event, step, _ in recording.steps():
        metrics.observe(event, step)
        if (one := times.observe(event, step)) is not None:
            batches.append(one)
    recorded = recording.header
    if model is not None and gpu is not None:
        header = BatchTimesHeader(
            model=model, gpu=gpu, tp=tp, engine=recorded.engine, engine_version=recorded.engine_version,
            plans=folder.name,
        )  # fmt: skip
        with whole(folder / "batches.jsonl") as path:
            path.write_bytes(line_of(header) + b"".join(map(line_of, batches)))
    data = metrics.result()
    measured = {name: getattr(recorded, name) for name in recorded.__struct_fields__}
    about = _about(folder, recorded.model, f"{recorded.engine} {recorded.engine_version}", measured)
    _write_measured(folder, data, about)
    with whole(folder / "requests.jsonl") as path, path.open("w") as text:
        for row in trace_rows(recording):
            text.write(json.dumps(row) + "\n")
    summary: dict[str, Any] = data.summary
    return summary


def convert_journal(run: Path, out: Path) -> dict[str, Any]:
    """Write what was measured in a journal of the core as a run folder, which `lockstep compare` reads.

    Its times are the engine's: from an arrival at the engine to the results on the host.
    """
    header = read_journal(run).header
    host = HostHeader.of(header)
    metrics = MetricsFold(kv_pages=header.config.pages)
    for event, step in fold(run):
        metrics.observe(event, step)
    data = metrics.result()
    engine = f"vllm {host.vllm}" if host.kind == VLLM else f"lockstep {header.core_version}"
    out.mkdir(parents=True, exist_ok=True)
    _write_measured(out, data, _about(run, host.model or "", engine, host.entries()))
    summary: dict[str, Any] = data.summary
    return summary


def _about(run: Path, model: str, engine: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Return `about` of metrics.json for a run that was measured."""
    return {
        "format": METRICS_FORMAT,
        "format_version": METRICS_VERSION,
        "command": f"lockstep journal convert {run}",
        "seed": 0,
        "version": code_version(),
        "commit": code_commit(),
        "model": model,
        "workload": {"name": f"recorded from {engine}"},
        "calibration": {"title": "none: measured"},
        "measured": measured,
    }


def _write_measured(folder: Path, data: RunData, about: dict[str, Any]) -> None:
    with whole(folder / "metrics.json") as path:
        write_metrics_json(path, data, about)
    with whole(folder / "requests.parquet") as parquet, whole(folder / "requests.csv") as csv:
        write_requests(data, parquet, csv)


def trace_rows(recording: ReadRecording) -> Iterator[dict[str, Any]]:
    """Yield the answered requests as rows of a trace in Mooncake's format, with equal ids for equal prefixes."""
    page, ids = recording.header.page_size, dict[Any, int]()
    for one in recording.requests:
        if not one.token_us:
            continue
        tokens, blocks = one.arrived.prompt_tokens, one.arrived.blocks
        hashes: list[Any] = []
        for end in range(TRACE_BLOCK_TOKENS, tokens + TRACE_BLOCK_TOKENS, TRACE_BLOCK_TOKENS):
            pages = end // page if page and end % page == 0 and end <= tokens else 0
            hashes.append(blocks[pages - 1] if 0 < pages <= len(blocks) else (one.number, end))
        numbered = [ids.setdefault(one, len(ids)) for one in hashes]
        yield {
            "timestamp": one.arrived.time_us // 1000,
            "input_length": tokens,
            "output_length": len(one.token_us),
            "hash_ids": numbered,
        }


def show_end(folder: Path, at: str, *, as_json: bool, most: int) -> None:
    """Print what the engine was doing when the recording ends. Raises ConfigError for another place than the end."""
    if at != END:
        raise ConfigError(f"`{folder}` is a recording: it has no steps\nhint: --at {END}")
    state = state_at_end(ReadRecording(folder).read())
    if as_json:
        print_json(state.describe())
        return
    for line in lines_of(state, most):
        click.echo(line)


def state_at_end(recording: ReadRecording) -> EngineState:
    """Return what the engine was doing when the recording ends, once all records are read."""
    header, last = recording.header, recording.last_result
    running = {number: start for plan in reversed(recording.running_plans) for number, start, *_ in plan.rows}
    open_requests = []
    for one in recording.requests:
        if one.ended is not None:
            continue
        launched = one.passes[-1][1] + one.passes[-1][2] if one.passes and not one.waits else 0
        computed = running.get(one.number, launched)
        decodes = launched > 0 and computed >= one.arrived.prompt_tokens
        open_requests.append(
            OpenRequest(
                request_id=one.number,
                label=one.arrived.name,
                phase=WAITING if one.waits else DECODE if decodes else PREFILL,
                open_us=recording.last_us - one.arrived.time_us,
                prompt_tokens=one.arrived.prompt_tokens,
                computed_tokens=computed,
                in_flight_tokens=launched - computed,
                emitted_tokens=len(one.token_us),
                max_new_tokens=one.arrived.max_new_tokens,
                pages=-(-launched // header.page_size) if header.page_size else 0,
                shared_pages=0,
                waits_for="",
            )
        )
    batches = [UnfinishedBatch(one.batch, one.time_us, _plan_text(one)) for one in recording.running_plans]
    newest = [plan for one in recording.requests for plan, _, _ in one.passes[-1:]]
    usage = max(newest, key=lambda plan: plan.batch).kv_usage if newest else 0.0
    return EngineState(
        title=f"end of the recording: {count(recording.records, 'record')}, the last at {clock(recording.last_us)}",
        step=recording.records,
        time_us=recording.last_us,
        ending=(f"recorded from {header.engine} {header.engine_version}, whose decisions have no reasons",),
        requests=tuple(open_requests),
        in_flight=tuple(batches),
        last_result=f"b{last.batch}, at {clock(last.time_us)}" if last is not None else "",
        pages=f"{usage:.0%} of {header.pages:,} pages in use",
    )


def _plan_text(plan: Planned) -> str:
    tokens = sum(new for _, _, new, _ in plan.rows)
    return f"b{plan.batch} with {count(len(plan.rows), 'row')}, {count(tokens, 'token')}"


def show(folder: Path, request_name: str | None, longest: tuple[str, int] | None) -> None:
    """Print one request of a recording, or the slowest ones."""
    recording = ReadRecording(folder).read()
    if request_name is not None:
        chosen = [find(recording, request_name)]
    else:
        assert longest is not None
        chosen = slowest(recording, *longest)
    for number, request in enumerate(chosen):
        if number:
            click.echo()
        for line in story(recording, request):
            click.echo(line)
