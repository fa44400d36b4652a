"""A run measured at the client of a server, by the metrics fold of simulations, and written like a simulated run.

    run = measure(sender, scenario, workload, url=..., interrupted=False, command=...)
    run.metrics["latency"]["ttft_us_p99"]
    write_run(Path("runs/real"), run)             # metrics.json, requests.parquet, requests.csv

A request's arrival is the time at which it was due. Its messages are those that the client received. Its end is
expressed in the terms of the core:

| end of the answer | counts as |
|---|---|
| the end of a stream, with any finish reason | `length` or `stop`: completed |
| no data within the timeout | `timeout`: failed |
| status 429 or 503 | rejected, `queue_full`: failed |
| another status from 400 on, below 500 | rejected, `bad_request`: an error of the client |
| a status from 500 on, a broken connection or stream | `error`: failed |
| Ctrl-C | still open |

Figures that only the engine has (queue, pages, batches) are null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lockstep.core.contract.commands import Step, StreamTokens
from lockstep.core.contract.events import (
    ClockAdvanced,
    Decided,
    FinishReason,
    RequestArrived,
    RequestFinished,
    RequestRejected,
    TokenRuns,
)
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.summary import describe
from lockstep.sim.results.code_version import code_commit, code_version
from lockstep.sim.results.results import (
    METRICS_FORMAT,
    METRICS_VERSION,
    latency_table,
    show_rate,
    show_share,
    show_us,
    slo_table,
    write_metrics_json,
    write_requests,
)
from lockstep.sim.run.load import describe_load
from lockstep.sim.run.run_folder import whole
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.workload import Workload
from lockstep.tools.live import Sender, Sent, TokenIdPrompts

LATE_SHARE = 0.05  # share of the median TTFT; a generator later than this and LATE_US distorts the figures
LATE_US = 5_000  # p99 of the generator's lateness
EMPTY = np.empty(0, np.int32)
EXAMPLES = 3


@dataclass(frozen=True)
class BenchRun:
    """A measured run."""

    data: RunData
    about: Mapping[str, Any]

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json."""
        return {"about": dict(self.about), **self.data.summary}

    @property
    def answered(self) -> int:
        """The number of completed requests, without those of the warm-up."""
        completed: int = self.data.summary["requests"]["completed"]
        return completed


def measure(
    sender: Sender, scenario: Scenario, workload: Workload, *, url: str, interrupted: bool, command: str
) -> BenchRun:
    """Fold the sent requests and their answers into a run."""
    sent = sorted(sender.sent, key=lambda one: one.request_id)
    fold = MetricsFold(warm_up=scenario.warm_up)
    for event, step in _events(sent):
        fold.observe(event, step)
    data = fold.result(scenario.slos)
    counted = [one for one in sent if one.request_id >= scenario.warm_up]
    cached = np.array([one.cached_tokens if not one.error else -1 for one in counted], np.int64)
    data = replace(data, requests=replace(data.requests, cached_tokens=cached))
    summary = data.summary
    summary["cache"] = dict.fromkeys(summary["cache"]) | _cache(counted)
    for group in ("scheduler", "device"):
        summary[group] = {name: {} if isinstance(value, dict) else None for name, value in summary[group].items()}
    summary["generator"] = _generator(sender, counted)
    summary["errors"] = _errors(counted)
    return BenchRun(data, _about(sender, scenario, workload, url, interrupted, command))


def _about(
    sender: Sender, scenario: Scenario, workload: Workload, url: str, interrupted: bool, command: str
) -> dict[str, Any]:
    asking = sender.asking
    return {
        "format": METRICS_FORMAT,
        "format_version": METRICS_VERSION,
        "command": command,
        "seed": scenario.seed,
        "version": code_version(),
        "commit": code_commit(),
        "model": sender.model,
        "workload": describe_load(scenario, workload),
        "calibration": {"title": "none: measured"},
        "measured": {
            "url": url,
            "endpoint": asking.path,
            "prompts": "ids" if isinstance(asking.prompts, TokenIdPrompts) else "words",
            "ignore_eos": asking.ignore_eos,
            "fields": dict(asking.fields),
        },
        "interrupted": interrupted,
        "not_sent": sender.arrivals.expected - len(sender.sent),
    }


# ----------------------------------------------------------------------------------------------------------- the facts


def _events(sent: list[Sent]) -> Iterator[tuple[RequestArrived | ClockAdvanced, Step]]:
    """Yield arrivals, messages and ends in the order of time, as events and Steps for the metrics fold."""
    messages = [_tokens_so_far(one) for one in sent]
    counts = np.array([len(tokens) for tokens in messages], np.int64)
    rows = np.arange(len(sent))
    time_us = np.concatenate(
        [
            np.array([one.due_us for one in sent], np.int64),
            *(np.array(one.message_us, np.int64) for one in sent),
            np.array([_end_us(one) for one in sent], np.int64),
        ]
    )
    who = np.concatenate([rows, np.repeat(rows, counts), rows])
    what = np.repeat(np.array([0, 1, 2]), [len(sent), int(counts.sum()), len(sent)])
    number = np.concatenate([rows * 0, *(np.arange(count) for count in counts), rows * 0]).astype(np.int64)
    order = np.lexsort((what, time_us))
    columns = (column[order].tolist() for column in (time_us, who, what, number))
    for at_us, row, kind, message in zip(*columns, strict=True):
        one = sent[row]
        if kind == 0:
            prompt = TokenRuns((0, one.prompt_tokens or one.turn_tokens))
            yield (
                RequestArrived(
                    at_us,
                    request_id=one.request_id,
                    prompt=prompt,
                    max_new_tokens=1,
                    label=one.label,
                    tenant=one.tenant,
                ),
                Step(),
            )
        elif kind == 1:
            stop = int(messages[row][message])
            start = int(messages[row][message - 1]) if message else 0
            streamed = StreamTokens(
                np.array([one.request_id]), np.array([start], np.int32), np.array([stop - start], np.int32), EMPTY
            )
            yield ClockAdvanced(at_us), Step(commands=[streamed])
        elif (end := _end(one, at_us)) is not None:
            yield ClockAdvanced(at_us), Step(decided=[end])


def _tokens_so_far(one: Sent) -> NDArray[np.int64]:
    """Return the output tokens after each message. If the server reports only the sum, it is divided evenly."""
    reported = np.array(one.message_tokens, np.int64)
    count = len(reported)
    if count and (reported < 0).any():
        reported = np.rint(np.arange(1, count + 1) * max(one.output_tokens, 1) / count).astype(np.int64)
    return np.maximum.accumulate(np.maximum(reported, 1)) if count else reported


def _end_us(one: Sent) -> int:
    """Return the time of a request's last event at the client."""
    return max(one.ended_us, one.last_us, one.sent_us, one.due_us)


def _end(one: Sent, at_us: int) -> Decided | None:
    """Return the end of a request as a decided event; None if it is still open."""
    if one.kind == "interrupted":
        return None
    if one.kind.startswith("status 4") and one.kind != "status 429":
        return RequestRejected(at_us, request_id=one.request_id, reason="bad_request", message=one.error)
    if one.kind in ("status 429", "status 503"):
        return RequestRejected(at_us, request_id=one.request_id, reason="queue_full", message=one.error)
    reason: FinishReason = "stop" if one.finish_reason == "stop" else "length"
    if one.error:
        reason = "timeout" if one.kind == "timeout" else "error"
    return RequestFinished(
        at_us,
        request_id=one.request_id,
        reason=reason,
        output_tokens=one.output_tokens,
        cached_tokens=max(one.cached_tokens, 0),
    )


# --------------------------------------------------------------------------------------------------------- the figures


def _cache(sent: list[Sent]) -> dict[str, Any]:
    """Return prompt tokens, cached tokens and hit ratio of requests for which the server reports cached tokens."""
    known = [one for one in sent if one.cached_tokens >= 0 and not one.error]
    if not known:
        return {}
    prompt, cached = sum(one.prompt_tokens for one in known), sum(one.cached_tokens for one in known)
    ratio = round(cached / prompt, 6) if prompt else None
    return {"prompt_tokens_admitted": prompt, "prompt_tokens_cached": cached, "hit_ratio": ratio}


def _generator(sender: Sender, sent: list[Sent]) -> dict[str, Any]:
    """Return the delays of the generator: of sending, and of the wake-ups of its event loop."""
    late_us = np.array([one.late_us for one in sent if one.sent_us >= 0], np.int64)
    return {
        "sent": len(late_us),
        **describe("late", late_us),
        **describe("loop_lag", np.array(sender.lags_us, np.int64)),
    }


def _errors(sent: list[Sent]) -> dict[str, Any]:
    """Return errors by kind: their number, and up to EXAMPLES examples."""
    found: dict[str, Any] = {}
    for kind, count in sorted(Counter(one.kind for one in sent if one.error).items()):
        texts = dict.fromkeys(one.error for one in sent if one.kind == kind)
        found[kind] = {"count": count, "examples": list(texts)[:EXAMPLES]}
    return found


def generator_is_late(run: BenchRun) -> bool:
    """Whether the lateness of the generator distorts the latencies of the server."""
    late_us = run.data.summary["generator"]["late_us_p99"]
    ttft_us = run.data.summary["latency"]["ttft_us_p50"]
    return late_us is not None and ttft_us is not None and late_us > max(LATE_US, LATE_SHARE * ttft_us)


# ------------------------------------------------------------------------------------------------------------ terminal


def tables(run: BenchRun) -> Iterator[Table]:
    """Yield the tables of the simulator that a client can observe."""
    yield latency_table(run.data.summary)
    if run.data.summary["slos"]:
        yield slo_table(run.data.summary)


def report_lines(run: BenchRun) -> Iterator[str]:
    """Yield the lines below the tables."""
    summary = run.data.summary
    requests, throughput, generator = summary["requests"], summary["throughput"], summary["generator"]
    if run.about["interrupted"]:
        yield f"interrupted: the figures end there; {requests['unfinished']:,} requests were still open"
    took = show_us(throughput["makespan_us"])
    yield f"{requests['completed']:,} of {requests['arrived']:,} requests completed in {took}"
    for kind, errors in summary["errors"].items():
        yield f"  {errors['count']:,} {kind}: {errors['examples'][0]}"
    if run.about["not_sent"]:
        yield f"{run.about['not_sent']:,} were not sent"
    yield (
        f"{show_rate(throughput['requests_per_s'])} requests/s, {show_rate(throughput['output_tokens_per_s'])} output "
        f"tokens/s, {show_rate(throughput['total_tokens_per_s'])} tokens/s with prompts"
    )
    if throughput["good_requests"] is not None:
        share = show_share(throughput["goodput_share"])
        good = show_rate(throughput["goodput_requests_per_s"])
        yield f"goodput {good} requests/s that met every SLO, {share} of them"
    if summary["cache"]["hit_ratio"] is not None:
        yield f"{show_share(summary['cache']['hit_ratio'])} of the prompt tokens were cached, as the server reports"
    shown = {name: show_us(value) for name, value in generator.items() if name != "sent"}
    yield (
        f"generator: sent {shown['late_us_p50']} (p50), {shown['late_us_p99']} (p99) after it was due; its clock "
        f"woke {shown['loop_lag_us_p50']}, {shown['loop_lag_us_p99']} late"
    )
    if generator_is_late(run):
        yield "  that is not small beside the latencies: the sending machine is too busy, which distorts the latencies"


def write_run(folder: Path, run: BenchRun) -> None:
    """Write the run folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with whole(folder / "metrics.json") as path:
        write_metrics_json(path, run.data, run.about)
    with whole(folder / "requests.parquet") as parquet, whole(folder / "requests.csv") as csv:
        write_requests(run.data, parquet, csv)
