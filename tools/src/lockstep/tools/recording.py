"""A recording of another engine's scheduler (`lockstep.host.recording`) in the terms of the tools.

Nothing is replayed: the plans are the other engine's, and a recording has no reasons. Its records become the events,
commands and decided events that measure a run. `convert` writes the files that other commands read:

| file | command |
|---|---|
| `metrics.json`, `requests.parquet`, `requests.csv` | `lockstep compare` |
| `batches.jsonl` | `lockstep calibrate --from` |
| `requests.jsonl`, a trace in Mooncake's format | `lockstep workload`, `lockstep simulate --workload` |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from lockstep.core.contract.commands import NO_ROWS, BatchPlan, LaunchBatch, Step, StreamTokens
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    BatchFinished,
    ClockAdvanced,
    FinishReason,
    LaneReady,
    Observed,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestRetracted,
    TokenRuns,
)
from lockstep.core.contract.text import count
from lockstep.host.recording import Arrived, Ended, PassFinished, Planned, RecordingHeader, read_recording
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.results.batch_times import BatchTimesHeader, Durations, batch_time, line_of
from lockstep.sim.results.code_version import code_commit, code_version
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

REASONS: dict[str, FinishReason] = {"length": "length", "stop": "stop", "abort": "cancelled", "repetition": "stop"}
TRACE_BLOCK_TOKENS = 512  # of a hash id in Mooncake's format


@dataclass
class Recorded:
    """A request of a recording. Times in us."""

    number: int
    arrived: Arrived
    passes: list[tuple[Planned, int, int]] = field(default_factory=list)  # plan, tokens with KV before, new tokens
    retracted_us: list[int] = field(default_factory=list)
    token_us: list[int] = field(default_factory=list)  # when each output token was on the host
    ended: Ended | None = None
    waits: bool = True  # for a place in a pass

    @property
    def known_tokens(self) -> int:
        """Prompt and delivered output."""
        return self.arrived.prompt_tokens + len(self.token_us)


class ReadRecording:
    """The requests of a recording, and what its records stand for, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header: RecordingHeader
        self.header, self._records = read_recording(folder)
        self.requests: list[Recorded] = []
        self.records = self.last_us = 0
        self.last_result: PassFinished | None = None
        self._running: dict[int, Planned] = {}

    def steps(self) -> Iterator[tuple[Observed, Step, BatchPlan | None]]:
        """Yield each record as an event and its Step, with the plan that a result belongs to. Only once."""
        plans: dict[int, BatchPlan] = {}
        for record in self._records:
            self.records, self.last_us = self.records + 1, record.time_us
            match record:
                case Arrived():
                    yield self._arrive(record), Step(), None
                case Planned():
                    step = self._plan(record)
                    launched = step.launched()
                    if launched is not None:
                        plans[record.batch], self._running[record.batch] = launched, record
                    yield LaneReady(record.time_us), step, None
                case PassFinished():
                    self._running.pop(record.batch, None)
                    self.last_result = record
                    yield self._collect(record, plans.get(record.batch))
                case Ended():
                    self.requests[record.request].ended = record
                    yield ClockAdvanced(record.time_us), Step(decided=[self._end(record)]), None

    @property
    def running_plans(self) -> list[Planned]:
        """Plans without a result, oldest first, once all records are read."""
        return list(self._running.values())

    def read(self) -> ReadRecording:
        """Read all records. Returns this recording."""
        for _ in self.steps():
            pass
        return self

    def _arrive(self, record: Arrived) -> RequestArrived:
        request = Recorded(len(self.requests), record)
        self.requests.append(request)
        return RequestArrived(
            time_us=record.time_us,
            request_id=request.number,
            prompt=TokenRuns((0, max(record.prompt_tokens, 1))),
            max_new_tokens=max(record.max_new_tokens, 1),
            label=record.name,
            priority=record.priority,
        )

    def _plan(self, record: Planned) -> Step:
        step = Step()
        for number in record.retracted:
            request = self.requests[number]
            request.waits = True
            request.retracted_us.append(record.time_us)
            step.decided.append(RequestRetracted(record.time_us, number, len(request.token_us), 0, 0))
        extends: list[tuple[int, int, int]] = []
        decodes: list[tuple[int, int, int]] = []
        for number, start, new, drafts in record.rows:
            request = self.requests[number]
            if request.waits:
                waited_us = record.time_us - (request.retracted_us or [request.arrived.time_us])[-1]
                left = max(request.known_tokens - start, 1)
                step.decided.append(RequestAdmitted(record.time_us, number, 0, start, left, waited_us))
                request.waits = False
            request.passes.append((record, start, new))
            decoding = start >= request.arrived.prompt_tokens and new == 1 + drafts
            (decodes if decoding else extends).append((number, start, new))
        rows = extends + decodes
        if rows:
            numbers, starts, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
            plan = BatchPlan(
                batch_id=record.batch,
                mode="decode" if not extends else "mixed" if decodes else "extend",
                rows=numbers.astype(np.int32),
                request_ids=numbers,
                starts=starts.astype(np.int32),
                stops=(starts + lengths).astype(np.int32),
                extend_rows=len(extends),
                sample_rows=np.arange(len(rows), dtype=np.int32),
            )
            step.commands.append(LaunchBatch(plan))
        return step

    def _collect(self, record: PassFinished, plan: BatchPlan | None) -> tuple[Observed, Step, BatchPlan | None]:
        step = Step()
        if record.tokens:
            numbers, counts = zip(*record.tokens, strict=True)
            offsets = [len(self.requests[number].token_us) for number in numbers]
            streamed = StreamTokens(
                np.array(numbers, np.int64), np.array(offsets, np.int32), np.array(counts, np.int32), NO_ROWS
            )
            step.commands.append(streamed)
            for number, new in record.tokens:
                self.requests[number].token_us += [record.time_us] * new
        event = BatchFinished(record.time_us, record.batch, started_us=record.started_us, finished_us=record.time_us)
        return event, step, plan

    def _end(self, record: Ended) -> RequestFinished:
        request = self.requests[record.request]
        cached = request.passes[0][1] if request.passes else 0
        reason = REASONS.get(record.reason, "error")
        return RequestFinished(record.time_us, record.request, reason, len(request.token_us), cached)

    def find(self, name: str) -> Recorded:
        """Return the request of this name: its number as 17 or r17, vLLM's id, or the client's id within it.

        Raises: ConfigError if there is none or several.
        """
        found = [one for one in self.requests if one.arrived.name == name]
        found = found or [one for one in self.requests if name in clients_ids(one.arrived.name)]
        digits = name.removeprefix("r")
        if not found and digits.isdigit() and int(digits) < len(self.requests):
            found = [self.requests[int(digits)]]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f"r{one.number}" for one in found[:8])
            raise ConfigError(f"`--request` {name} is the label of {len(found)} requests: {names}")
        raise ConfigError(
            f"`--request` must be a request of this recording, got `{name}`; it has {len(self.requests):,}"
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


def convert(folder: Path, *, model: str, gpu: str, tp: int = 1) -> dict[str, Any]:
    """Write the files that other commands read into the run folder. Returns the summary of metrics.json.

    Args:
        model, gpu: catalogue names, or a path, for the header of the batch times.
    """
    recording, fold, durations = ReadRecording(folder), MetricsFold(), Durations()
    header = BatchTimesHeader(
        model=model, gpu=gpu, tp=tp, engine=recording.header.engine, engine_version=recording.header.engine_version,
        plans=folder.name,
    )  # fmt: skip
    drafted: set[int] = set()
    with whole(folder / "batches.jsonl") as path, path.open("wb") as file:
        file.write(line_of(header))
        for event, step, plan in recording.steps():
            fold.observe(event, step)
            launched = step.launched()
            if launched is not None and np.any((launched.stops - launched.starts)[launched.extend_rows :] > 1):
                drafted.add(launched.batch_id)  # the time of drafting is unknown
            if plan is not None and isinstance(event, BatchFinished) and plan.batch_id not in drafted:
                took_us = durations.took_us(event.started_us, event.finished_us)
                if took_us > 0:
                    file.write(line_of(batch_time(plan, took_us)))
    data = fold.result()
    about = {
        "format": METRICS_FORMAT,
        "format_version": METRICS_VERSION,
        "command": f"lockstep journal convert {folder}",
        "seed": 0,
        "version": code_version(),
        "commit": code_commit(),
        "model": recording.header.model,
        "workload": {"name": f"recorded from {recording.header.engine} {recording.header.engine_version}"},
        "calibration": {"title": "none: measured"},
        "measured": {name: getattr(recording.header, name) for name in recording.header.__struct_fields__},
    }
    with whole(folder / "metrics.json") as path:
        write_metrics_json(path, data, about)
    with whole(folder / "requests.parquet") as parquet, whole(folder / "requests.csv") as csv:
        write_requests(data, parquet, csv)
    with whole(folder / "requests.jsonl") as path, path.open("w") as text:
        for row in trace_rows(recording):
            text.write(json.dumps(row) + "\n")
    summary: dict[str, Any] = data.summary
    return summary


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
        chosen = [recording.find(request_name)]
    else:
        assert longest is not None
        chosen = slowest(recording, *longest)
    for number, request in enumerate(chosen):
        if number:
            click.echo()
        for line in story(recording, request):
            click.echo(line)
