"""Results of NVIDIA's AIPerf and genai-perf: records of each request, or a summary.

AIPerf's profile_export.jsonl has one record per line: `metadata` with Unix nanoseconds, `metrics` with a value and a
unit each, `error`. Source: ai-dynamo/aiperf, docs/tutorials/working-with-profile-exports.md. genai-perf's
profile_export.json, written by Perf Analyzer, has `experiments` with `requests`: a `timestamp` in nanoseconds,
`response_timestamps` and `response_outputs`, messages of server-sent events. Source: triton-inference-server/client,
genai-perf/tests/test_llm_profile_data_parser.py at 384bdeee. Neither has token counts unless the server reports usage.
Both write a summary, profile_export_aiperf.json or profile_export_genai_perf.json: means by metric, and `input_config`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.sim.calibrate.importers.fields import Fields, parse_objects
from lockstep.sim.calibrate.load_runs import (
    AnsweredRequests,
    LoadRun,
    MeasuredPoint,
    Measurements,
    ServerFacts,
    closed_loop_of,
)

AIPERF, GENAI_PERF = "AIPerf", "genai-perf"
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0, "seconds": 1.0}
COLUMNS = ("sent_s", "ttft_s", "e2e_s", "prompt_tokens", "output_tokens")


def is_aiperf_record(found: Fields) -> bool:
    """Whether an object is a line of AIPerf's records."""
    return isinstance(found.value.get("metadata"), dict) and ("metrics" in found or "error" in found)


def is_profile(found: Fields) -> bool:
    """Whether an object is a profile of Perf Analyzer."""
    return isinstance(found.value.get("experiments"), list)


def is_summary(found: Fields) -> bool:
    """Whether an object is the summary of AIPerf or of genai-perf."""
    return isinstance(found.value.get("time_to_first_token"), dict) and "inter_token_latency" in found


def read_aiperf(records: list[Fields], name: str, path: Path) -> Measurements:
    """Read the records of one run. The concurrency is in the summary beside the file, or follows from the times."""
    columns: dict[str, list[float]] = {column: [] for column in COLUMNS}
    left_out: dict[str, int] = {}
    for record in records:
        metadata = record.inner("metadata")
        phase = metadata.text("benchmark_phase", "profiling")
        if "error" in record or metadata.value.get("was_cancelled") or phase != "profiling":
            reason = "failed" if phase == "profiling" else f"of the phase {phase}"
            left_out[reason] = left_out.get(reason, 0) + 1
            continue
        metrics = record.inner("metrics")
        columns["sent_s"].append(metadata.number("request_start_ns") / 1e9)
        columns["ttft_s"].append(_seconds(metrics.inner("time_to_first_token")))
        columns["e2e_s"].append(_seconds(metrics.inner("request_latency")))
        columns["prompt_tokens"].append(metrics.inner("input_sequence_length").number("value", least=1))
        columns["output_tokens"].append(metrics.inner("output_sequence_length").number("value", least=1))
    requests = AnsweredRequests.of(name, columns)
    summary = _beside(path, "profile_export_aiperf.json")
    concurrency = _concurrency(summary) if summary is not None else closed_loop_of(requests)
    facts = ServerFacts() if summary is None else _facts(summary)
    return Measurements(runs=(LoadRun(name, AIPERF, requests, concurrency, facts, left_out),))


def read_profile(found: Fields, name: str, path: Path, prompt_tokens: int | None) -> Measurements:
    """Read every experiment of a profile.

    Args:
        prompt_tokens: length of prompts for which the server reports no usage; None: the mean in the summary beside it.
    """
    summary = _beside(path, "profile_export_genai_perf.json")
    length: float | None = prompt_tokens
    if length is None and summary is not None and "input_sequence_length" in summary:
        length = summary.inner("input_sequence_length").number("avg", least=1)
    runs = []
    for number, experiment in enumerate(found.each("experiments")):
        load = experiment.inner("experiment")
        columns: dict[str, list[float]] = {column: [] for column in COLUMNS}
        empty = 0
        for row in experiment.each("requests"):
            sent = row.number("timestamp")
            stamps = row.numbers("response_timestamps")
            messages = _messages(row, len(stamps))
            with_text = [index for index, message in enumerate(messages) if message[0]]
            usage: dict[str, Any] = next((one for _, one in reversed(messages) if one), {})
            if not with_text:
                empty += 1
                continue
            prompt = usage.get("prompt_tokens", length)
            if prompt is None:
                row.refuse(
                    "response_outputs", None, "messages with `usage`, for the tokens of the prompt",
                    "give --prompt-tokens, or profile_export_genai_perf.json beside the file, or run with "
                    '--extra-inputs stream_options:{"include_usage":true}',
                )  # fmt: skip
            columns["sent_s"].append(sent / 1e9)
            columns["ttft_s"].append((stamps[with_text[0]] - sent) / 1e9)
            columns["e2e_s"].append((stamps[with_text[-1]] - sent) / 1e9)
            columns["prompt_tokens"].append(round(prompt))
            columns["output_tokens"].append(usage.get("completion_tokens", len(with_text)))
        is_closed = load.text("mode") == "concurrency"
        runs.append(
            LoadRun(
                f"{name}, experiment {number} ({load.text('mode')} {load.value.get('value')})",
                GENAI_PERF,
                AnsweredRequests.of(f"{found.where}: {experiment.path}", columns),
                int(load.number("value", least=1)) if is_closed else None,
                ServerFacts() if summary is None else _facts(summary),
                {"without text": empty} if empty else {},
            )
        )
    return Measurements(runs=tuple(runs))


def _messages(row: Fields, count: int) -> list[tuple[bool, dict[str, Any]]]:
    """Return for each message whether it has text, and the usage that it reports."""
    found: list[tuple[bool, dict[str, Any]]] = []
    for item in row.items("response_outputs", count):
        raw = item if isinstance(item, dict) else {}
        text = raw.get("response", raw.get("text_output", ""))
        if "response" not in raw:
            found.append((bool(text), {}))
            continue
        has_text = False
        usage: dict[str, Any] = {}
        for line in str(text).splitlines():
            body = line.removeprefix("data:").strip()
            if not body or body == "[DONE]":
                continue
            try:
                chunk = json.loads(body)
            except json.JSONDecodeError:
                row.refuse("response_outputs", body, "messages of server-sent events with JSON")
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or []:
                delta = choice.get("delta") or {}
                has_text = has_text or bool(
                    delta.get("content") or delta.get("reasoning_content") or choice.get("text")
                )
        found.append((has_text, usage))
    return found


def read_summary(found: Fields, name: str) -> Measurements:
    """Read the means of a run."""
    form = AIPERF if "aiperf_version" in found or "request_count" in found else GENAI_PERF
    config = found.inner("input_config") if "input_config" in found else Fields({}, found.where)
    ttft_s, tpot_s = (_seconds(found.inner(key), "avg") for key in ("time_to_first_token", "inter_token_latency"))
    prompt, output = (
        found.inner(key).number("avg", least=1) for key in ("input_sequence_length", "output_sequence_length")
    )
    concurrency = _concurrency(found)
    throughput = found.inner("request_throughput").number("avg", least=1e-9)
    count = found.inner("request_count").number("avg") if "request_count" in found else 0.0
    return Measurements(
        points=(
            MeasuredPoint(
                name, form, prompt, output, float(concurrency or throughput * (ttft_s + (output - 1) * tpot_s)), ttft_s,
                tpot_s, int(count), concurrency is not None, _facts(found) if config.value else ServerFacts(),
                (f"{name} has means only: profile_export.json or .jsonl beside it has the times of each request",),
            ),
        )
    )  # fmt: skip


def _seconds(metric: Fields, key: str = "value") -> float:
    unit = metric.text("unit", "ms")
    if unit not in SECONDS:
        metric.refuse("unit", unit, f"one of {', '.join(SECONDS)}")
    return metric.number(key) * SECONDS[unit]


def _beside(path: Path, name: str) -> Fields | None:
    beside = path.with_name(name)
    return parse_objects(str(beside), beside.read_text("utf-8"))[0] if beside.is_file() else None


def _concurrency(summary: Fields) -> int | None:
    """Return the concurrency of the load; None if requests were sent at a rate."""
    config = summary.inner("input_config") if "input_config" in summary else Fields({}, summary.where)
    if "loadgen" in config:
        load = config.inner("loadgen")
        at_rate = "request_rate" in load
        return int(load.number("concurrency", least=1)) if "concurrency" in load and not at_rate else None
    stimulus = config.inner("perf_analyzer") if "perf_analyzer" in config else config
    if "stimulus" in stimulus:
        stimulus = stimulus.inner("stimulus")
    return int(stimulus.number("concurrency", least=1)) if "concurrency" in stimulus else None


def _facts(summary: Fields) -> ServerFacts:
    config = summary.inner("input_config") if "input_config" in summary else Fields({}, summary.where)
    endpoint = config.inner("endpoint") if "endpoint" in config else config
    names = endpoint.value.get("model_names") or config.value.get("model_names") or []
    return ServerFacts(model=str(names[0]) if isinstance(names, list) and names else "")
