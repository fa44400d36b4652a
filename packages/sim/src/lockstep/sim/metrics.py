"""What a run was like: a fold over observed events and their Steps. Definitions with reasons: docs/metrics.md.

    fold = MetricsFold(kv_pages=config.pages)
    step = engine.step(event)               # live in a host, or while replaying a journal: the numbers are the same
    fold.observe(event, step)
    ...
    run = fold.result([Slo.parse("ttft_p99=500ms")])

`observe` only remembers: it appends numbers and references to arrays that the core never writes again. All arithmetic
happens in `result`, on whole columns, so a run of millions of tokens costs the host about a microsecond per batch.

    arrival                first token                    last token, finish
    |-- queue --|-- prefill --|-- itl --|-- itl --|-- itl --|
    |---------- ttft ---------|----- (n - 1) x tpot --------|
    |------------------------- e2e -------------------------|
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.core.commands import Int32s, Int64s, LaunchBatch, Step, StreamTokens
from lockstep.core.errors import ConfigError, ContractError
from lockstep.core.events import (
    AdmissionDeferred,
    BatchFinished,
    DecidedEvent,
    DecodeSkipped,
    Observed,
    PagesEvicted,
    PrefillCompleted,
    Prompt,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
    TokenIds,
    TokenRuns,
)

Float64s = NDArray[np.float64]
Rows = NDArray[Any]  # unsigned integers: indices of requests
Bools = NDArray[np.bool_]
Strings = NDArray[np.str_]
Objects = NDArray[np.object_]
Summary = dict[str, Any]
"""Nested dicts of str, int, float, bool and None: ready for JSON, never NaN; None is "there was nothing to measure"."""

PERCENTILES = (50, 90, 95, 99)
BINS_MAX = 600  # of the series; a chart has no more pixels to tell them apart

COMPLETED = ("length", "stop", "text_stop", "grammar", "computed")
"""The request got its whole answer. Latencies and throughput are those of completed requests."""

FAILED = (
    "", "timeout", "out_of_kv", "error", "invalid", "rejected_queue_full", "rejected_draining", "rejected_deadline",
)  # fmt: skip
"""The service did not deliver; "" is a request still open at the end. Neither completed nor failed are those whose
client left (`cancelled`) or asked for what cannot be (`rejected_too_long`, `rejected_bad_request`, ...)."""

# ---------------------------------------------------------------------------------------------------------------- slo

SloMetric = Literal["ttft", "tpot", "itl", "e2e"]
SLO_METRICS: tuple[SloMetric, ...] = ("ttft", "tpot", "itl", "e2e")
SLO_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000}


@dataclass(frozen=True, slots=True)
class Slo:
    """An upper bound on a latency: of a percentile over the run, or, without one, of every request."""

    metric: SloMetric
    percentile: float | None  # 0 < percentile < 100
    bound_us: int

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft_p99=500ms` or `ttft=500ms`. Raises ConfigError naming the part that cannot be read."""

        def refuse(problem: str, hint: str) -> ConfigError:
            return ConfigError(f"SLO `{text}`: {problem}\nhint: {hint}")

        name, equals, duration = (part.strip() for part in text.partition("="))
        if not equals:
            raise refuse("there is no `=`", "write a metric and a bound, such as `ttft_p99=500ms`")
        metric, underscore, statistic = name.partition("_")
        if metric not in SLO_METRICS:
            raise refuse(f"unknown metric `{metric}`", f"one of {', '.join(SLO_METRICS)}")
        percentile = None
        if underscore:
            match = re.fullmatch(r"p([0-9]+(?:\.[0-9]+)?)", statistic)
            if match is None or not 0 < float(match[1]) < 100:
                raise refuse(f"unknown statistic `{statistic}`", "a percentile between 0 and 100, such as `p99`")
            percentile = float(match[1])
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([^0-9.\s]*)", duration)
        if match is None:
            raise refuse(f"`{duration}` is not a duration", "a number and a unit, such as `500ms`")
        number, unit = match.groups()
        if unit not in SLO_UNITS_US:
            problem = f"unknown unit `{unit}`" if unit else f"`{number}` has no unit"
            raise refuse(problem, f"one of {', '.join(SLO_UNITS_US)}")
        bound_us = round(float(number) * SLO_UNITS_US[unit])
        if bound_us < 1:
            raise refuse(f"`{duration}` is less than one microsecond", "the bound is what a request may take at most")
        return cls(metric, percentile, bound_us)

    def __str__(self) -> str:
        unit = next(unit for unit in ("s", "ms", "us") if self.bound_us % SLO_UNITS_US[unit] == 0)
        statistic = "" if self.percentile is None else f"_p{self.percentile:g}"
        return f"{self.metric}{statistic}={self.bound_us // SLO_UNITS_US[unit]}{unit}"


# ------------------------------------------------------------------------------------------------------------ columns


class Columns:
    """Arrays of equal length, one per field: a row is what stands at one index."""

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, in order of declaration; nothing is copied."""
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}


@dataclass(frozen=True, eq=False)
class Requests(Columns):
    """One row per request, in order of arrival. What did not happen is -1 in integers and NaN in floats."""

    request_id: Int64s
    arrival_us: Int64s
    queue_us: Int64s  # arrival to first admission
    ttft_us: Int64s
    tpot_us: Float64s
    itl_us_max: Float64s  # the longest gap of this request
    e2e_us: Int64s  # of finished requests, whatever the reason; rejected ones have none
    ended_us: Int64s  # when it was finished or rejected
    prompt_tokens: Int64s
    cached_tokens: Int64s  # of the prompt, found in the radix cache at the first admission
    output_tokens: Int64s  # delivered to the client
    retractions: Int64s
    finish_reason: Strings  # a FinishReason; "rejected_" and a RejectReason; "" while unfinished
    label: Objects
    tenant: Objects

    @property
    def completed(self) -> Bools:
        """Requests that got their whole answer."""
        return np.isin(self.finish_reason, COMPLETED)

    @property
    def failed(self) -> Bools:
        """Requests that the service let down; see FAILED."""
        return np.isin(self.finish_reason, FAILED)


@dataclass(frozen=True, eq=False)
class Series(Columns):
    """At most BINS_MAX equal spans of time, the last one perhaps shorter. Levels are means over the span, by time."""

    t_us: Int64s  # where the span starts
    waiting: Float64s  # requests; NaN where the host reported no gauges, also in the next three
    running: Float64s
    kv_used_pages: Float64s  # held by requests; NaN also if the size of the pool was not given
    kv_cached_pages: Float64s  # held by the radix cache alone
    prefill_tokens: Int64s  # computed by batches that ended in the span
    decode_tokens: Int64s
    gpu_busy_fraction: Float64s
    output_tokens_per_s: Float64s  # delivered, to completed requests and others


@dataclass(frozen=True, eq=False)
class Batches(Columns):
    """One row per launched batch, in launch order. Times the host did not report, or not yet, are -1."""

    batch_id: Int64s
    mode: Strings
    launched_us: Int64s
    started_us: Int64s
    finished_us: Int64s
    rows: Int64s
    new_tokens: Int64s
    prefill_tokens: Int64s  # the part of new_tokens in rows that extend
    kv_tokens: Int64s  # context lengths added up: what attention reads


@dataclass(frozen=True, eq=False)
class CpuIntervals(Columns):
    """What the scheduler's CPU did, as told by the host."""

    start_us: Int64s
    stop_us: Int64s
    what: Strings


@dataclass(frozen=True, eq=False)
class RunData:
    """A run, measured: columns for reports and analysis, and a summary ready for JSON."""

    requests: Requests
    series: Series
    batches: Batches
    cpu: CpuIntervals
    itl_us: Float64s  # every gap of every completed request, by request and time
    span_us: tuple[int, int]  # first arrival, last event
    summary: Summary

    def measured_us(self, slo: Slo) -> float | None:
        """Return the latency that `slo` bounds; infinite if too many requests failed, None if nothing was measured.

        A failed request counts as infinitely late: refusing work must not look like doing it fast.
        """
        return _measure(slo, self.requests, self.itl_us)

    def meets(self, slo: Slo) -> bool | None:
        """Whether `slo` holds for the run; None, which is no yes, if nothing was measured."""
        measured_us = self.measured_us(slo)
        return None if measured_us is None else measured_us <= slo.bound_us


# -------------------------------------------------------------------------------------------------------- definitions


def ttft_us(arrival_us: Int64s, first_us: Int64s) -> Int64s:
    """Time to first token: from arrival to the first message with output. -1 where none came."""
    return np.where(first_us < 0, -1, first_us - arrival_us)


def tpot_us(first_us: Int64s, last_us: Int64s, output_tokens: Int64s) -> Float64s:
    """Time per output token: (last - first) / (n - 1). NaN for answers that came in one message: no time to divide."""
    tokens = np.where(last_us > first_us, output_tokens - 1, 0)
    tpot: Float64s = np.divide(last_us - first_us, tokens, out=np.full(len(tokens), np.nan), where=tokens > 0)
    return tpot


def gaps_us(message_us: Int64s, new_tokens: Int64s | Int32s, is_first: Bools) -> Float64s:
    """Inter-token latency, per message: the time since the request's previous message, shared by its new tokens.

    A message of n tokens after a wait of g gives n gaps of g / n. NaN for a request's first message.
    """
    gaps = np.empty(len(message_us))
    gaps[1:] = np.diff(message_us) / new_tokens[1:]
    gaps[is_first] = np.nan
    return gaps


def meets_every(slos: Sequence[Slo], requests: Requests) -> Bools:
    """Which requests completed within every bound. A percentile's bound serves as each request's own.

    For ITL it is the request's longest gap that counts. What a request does not have, such as the TPOT of one token,
    misses no bound.
    """
    good = requests.completed
    for slo in slos:
        good &= ~(per_request(slo.metric, requests) > slo.bound_us)
    return good


def _measure(slo: Slo, requests: Requests, itl_us: Float64s) -> float | None:
    """See RunData.measured_us."""
    failures = int(requests.failed.sum())
    if slo.metric == "itl" and slo.percentile is not None:
        values, failures = itl_us, 0  # over gaps, not requests: a request that failed has none
    else:
        values = per_request(slo.metric, requests)[requests.completed]
        values = values[~np.isnan(values)]
    count = len(values) + failures
    if count == 0:
        return None
    percentile = 100.0 if slo.percentile is None else slo.percentile
    rank = (count - 1) * percentile / 100  # as in numpy's "linear"; the failures stand behind the last value
    if math.ceil(rank) >= len(values):
        return math.inf
    low, high = math.floor(rank), math.ceil(rank)
    ordered = np.partition(values, (low, high))
    return float(ordered[low] + (ordered[high] - ordered[low]) * (rank - low))


def per_request(metric: SloMetric, requests: Requests) -> Float64s:
    """One value per request, NaN where there is none."""
    if metric == "tpot":
        return requests.tpot_us
    if metric == "itl":
        return requests.itl_us_max
    column = requests.ttft_us if metric == "ttft" else requests.e2e_us
    return np.where(column < 0, np.nan, column)


# --------------------------------------------------------------------------------------------------------------- fold


class MetricsFold:
    """Takes in events and Steps in order, remembers little, and makes a RunData of it when asked."""

    def __init__(self, *, kv_pages: int | None = None) -> None:
        """`kv_pages` is the size of the page pool; without it the pages held by requests stay unknown."""
        self._kv_pages = kv_pages
        self._first_us: int | None = None
        self._last_us = 0

        # One entry per request, in order of arrival.
        self._row_of: dict[RequestId, int] = {}
        self._arrival_us = array("q")
        self._prompt_tokens = array("q")
        self._labels: list[str] = []
        self._tenants: list[str] = []
        self._admitted_us = array("q")
        self._cached_tokens = array("q")
        self._retractions = array("q")
        self._ended_us = array("q")
        self._finish_reasons: list[str] = []

        # One entry per message, launch, result, gauge and CPU interval.
        self._message_us = array("q")
        self._message_ids: list[Int64s] = []
        self._message_offsets: list[Int32s] = []
        self._message_counts: list[Int32s] = []
        self._launches: list[tuple[int, int, str, int, Int32s, Int32s]] = []
        self._results = array("q")  # batch_id, started_us, finished_us
        self._gauges = array("q")  # time_us, waiting, running, free_pages, cached_pages
        self._cpu_us = array("q")  # start_us, stop_us
        self._cpu_whats: list[str] = []

        # Counts.
        self._tokens_discarded = 0
        self._decodes_skipped = 0
        self._retracted: Counter[str] = Counter()
        self._deferred: Counter[str] = Counter()
        self._evicted_pages: Counter[str] = Counter()

    def observe(self, event: Observed, step: Step) -> None:
        """Take in one event and the Step it gave. Raises ContractError for requests that never arrived."""
        time_us = self._last_us = event.time_us
        if type(event) is BatchFinished:
            self._results.extend((event.batch_id, event.started_us, event.finished_us))
        elif type(event) is RequestArrived:
            self._arrive(event)
        for command in step.commands:
            if type(command) is StreamTokens:
                self._message_us.append(time_us)
                self._message_ids.append(command.request_ids)
                self._message_offsets.append(command.offsets)
                self._message_counts.append(command.token_counts)
            elif type(command) is LaunchBatch:
                # Not the plan itself: it would keep the prompts' token ids alive.
                plan = command.plan
                self._launches.append((time_us, plan.batch_id, plan.mode, plan.extend_rows, plan.starts, plan.stops))
        for decided in step.decided:
            self._learn(decided)

    def gauge(self, time_us: int, waiting: int, running: int, free_pages: int, cached_pages: int) -> None:
        """Say how things stand after a LaneReady: requests waiting and running, pages free and cached."""
        self._gauges.extend((time_us, waiting, running, free_pages, cached_pages))

    def cpu_interval(self, start_us: int, stop_us: int, what: str) -> None:
        """Say what the scheduler's CPU did in [start_us:stop_us), such as "plan" or "results"."""
        self._cpu_us.extend((start_us, stop_us))
        self._cpu_whats.append(what)

    def result(self, slos: Sequence[Slo] = ()) -> RunData:
        """Measure everything observed so far. The fold may go on afterwards."""
        messages = self._messages()
        requests = self._requests(messages)
        batches = self._batches()
        cpu_us = np.array(self._cpu_us, np.int64).reshape(-1, 2)
        cpu = CpuIntervals(cpu_us[:, 0], cpu_us[:, 1], _strings(self._cpu_whats))

        of_completed = requests.completed[messages.rows] & ~messages.is_first
        itl_us = np.repeat(messages.gaps_us[of_completed], messages.new_tokens[of_completed])

        span_us = (self._first_us or 0, self._last_us)
        gauges = _Gauges.of(self._gauges, self._kv_pages, stop_us=self._last_us)
        device = _Intervals.union(batches.started_us, batches.finished_us)
        summary = {
            "requests": self._count_requests(requests),
            "latency": describe_latency(requests, itl_us),
            "throughput": describe_throughput(requests, slos),
            "cache": self._describe_cache(requests),
            "kv": gauges.describe_kv(self._kv_pages, span_us),
            "scheduler": self._describe_scheduler(requests, gauges, span_us),
            "device": self._describe_device(requests, batches, device),
            "cpu": _describe_cpu(cpu),
            "slos": [describe_slo(slo, requests, itl_us) for slo in slos],
        }
        series = _make_series(span_us, gauges, messages, batches, device)
        return RunData(requests, series, batches, cpu, itl_us, span_us, summary)

    # ------------------------------------------------------------------------------------------------- taking in

    def _arrive(self, event: RequestArrived) -> None:
        if self._first_us is None:
            self._first_us = event.time_us
        self._row_of[event.request_id] = len(self._labels)
        self._arrival_us.append(event.time_us)
        self._prompt_tokens.append(count_tokens(event.prompt))
        self._labels.append(event.label)
        self._tenants.append(event.tenant)
        self._admitted_us.append(-1)
        self._cached_tokens.append(-1)
        self._retractions.append(0)
        self._ended_us.append(-1)
        self._finish_reasons.append("")

    def _learn(self, decided: DecidedEvent) -> None:
        match decided:
            case RequestQueued() | PrefillCompleted():
                pass  # what they say is known from arrivals and messages
            case RequestAdmitted():
                row = self._row(decided.request_id)
                if self._admitted_us[row] < 0:  # later admissions follow a retraction
                    self._admitted_us[row] = decided.time_us
                    self._cached_tokens[row] = decided.cached_tokens
            case RequestFinished():
                self._end(decided.request_id, decided.time_us, decided.reason)
            case RequestRejected():
                self._end(decided.request_id, decided.time_us, f"rejected_{decided.reason}")
            case RequestRetracted():
                self._retractions[self._row(decided.request_id)] += 1
                self._retracted[decided.reason] += 1
                self._tokens_discarded += decided.tokens_discarded
            case PagesEvicted():
                self._evicted_pages[decided.reason] += decided.pages
            case AdmissionDeferred():
                self._deferred[decided.reason] += 1
            case DecodeSkipped():
                self._decodes_skipped += 1

    def _end(self, request_id: RequestId, time_us: int, reason: str) -> None:
        row = self._row(request_id)
        self._ended_us[row] = time_us
        self._finish_reasons[row] = reason

    def _row(self, request_id: RequestId) -> int:
        try:
            return self._row_of[request_id]
        except KeyError:
            raise ContractError(_never_arrived(request_id)) from None

    # -------------------------------------------------------------------------------------------------- measuring

    def _messages(self) -> _Messages:
        """Lay all messages out by request and time, without what a client saw twice."""
        sizes = np.fromiter(map(len, self._message_ids), np.int64, len(self._message_ids))
        rows = self._rows_of(_joined(self._message_ids, np.int64))
        order = np.argsort(rows, kind="stable")  # time never goes back, so this is by request, then time
        rows = rows[order]
        time_us = np.repeat(np.array(self._message_us, np.int64), sizes)[order]
        offsets = _joined(self._message_offsets, np.int32)[order]
        counts = _joined(self._message_counts, np.int32)[order]
        new_tokens = _new_tokens(rows, offsets, counts)
        if not new_tokens.all():
            kept = new_tokens > 0
            rows, time_us, new_tokens = rows[kept], time_us[kept], new_tokens[kept]
        is_first = _is_first(rows)
        return _Messages(rows, time_us, new_tokens, is_first, gaps_us(time_us, new_tokens, is_first))

    def _rows_of(self, request_ids: Int64s) -> Rows:
        """The row of each id, in the smallest type that holds them: numpy sorts 16-bit rows ten times faster."""
        known = np.array(list(self._row_of), np.int64)
        if len(known) == 0 and len(request_ids):
            raise ContractError(_never_arrived(int(request_ids[0])))
        order = np.argsort(known, kind="stable")
        found = np.searchsorted(known[order], request_ids)
        rows: Rows = order.astype(np.min_scalar_type(len(known))).take(found, mode="clip")
        strangers = request_ids[known[rows] != request_ids]
        if len(strangers):
            raise ContractError(_never_arrived(int(strangers[0])))
        return rows

    def _requests(self, messages: _Messages) -> Requests:
        count = len(self._labels)
        arrival_us = np.array(self._arrival_us, np.int64)
        admitted_us = np.array(self._admitted_us, np.int64)
        ended_us = np.array(self._ended_us, np.int64)
        finish_reason = _strings(self._finish_reasons)
        rejected = np.strings.startswith(finish_reason, "rejected_")

        first_us, last_us = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
        output_tokens = np.zeros(count, np.int64)
        itl_us_max = np.full(count, np.nan)
        starts = np.flatnonzero(messages.is_first)
        if len(starts):
            rows = messages.rows[starts]
            first_us[rows] = messages.time_us[starts]
            last_us[rows] = messages.time_us[np.append(starts[1:], len(messages.rows)) - 1]
            output_tokens[rows] = np.add.reduceat(messages.new_tokens, starts)
            itl_us_max[rows] = np.fmax.reduceat(messages.gaps_us, starts)  # fmax passes over NaN
        return Requests(
            request_id=np.array(list(self._row_of), np.int64),
            arrival_us=arrival_us,
            queue_us=np.where(admitted_us < 0, -1, admitted_us - arrival_us),
            ttft_us=ttft_us(arrival_us, first_us),
            tpot_us=tpot_us(first_us, last_us, output_tokens),
            itl_us_max=itl_us_max,
            e2e_us=np.where((ended_us < 0) | rejected, -1, ended_us - arrival_us),
            ended_us=ended_us,
            prompt_tokens=np.array(self._prompt_tokens, np.int64),
            cached_tokens=np.array(self._cached_tokens, np.int64),
            output_tokens=output_tokens,
            retractions=np.array(self._retractions, np.int64),
            finish_reason=finish_reason,
            label=_objects(self._labels),
            tenant=_objects(self._tenants),
        )

    def _batches(self) -> Batches:
        launches = self._launches
        batch_id = np.array([launch[1] for launch in launches], np.int64)
        mode = _strings([launch[2] for launch in launches])
        extend_rows = np.array([launch[3] for launch in launches], np.int64)
        rows = np.fromiter((len(launch[5]) for launch in launches), np.int64, len(launches))
        kv_tokens = _sums([launch[5] for launch in launches], rows)
        new_tokens = kv_tokens - _sums([launch[4] for launch in launches], rows)
        only_decodes = np.isin(mode, ("decode", "verify", "draft_extend", "idle"))

        started_us, finished_us = np.full(len(launches), -1, np.int64), np.full(len(launches), -1, np.int64)
        results = np.array(self._results, np.int64).reshape(-1, 3)
        results = results[results[:, 2] > 0]  # a host without a device clock reports 0
        index_of = {int(batch): index for index, batch in enumerate(batch_id)}
        indices = np.array([index_of.get(batch, -1) for batch in results[:, 0].tolist()], np.int64)
        results, indices = results[indices >= 0], indices[indices >= 0]
        started_us[indices], finished_us[indices] = results[:, 1], results[:, 2]
        return Batches(
            batch_id=batch_id,
            mode=mode,
            launched_us=np.array([launch[0] for launch in launches], np.int64),
            started_us=started_us,
            finished_us=finished_us,
            rows=rows,
            new_tokens=new_tokens,
            prefill_tokens=np.where(only_decodes, 0, new_tokens - (rows - extend_rows)),
            kv_tokens=kv_tokens,
        )

    # ------------------------------------------------------------------------------------------------ summarising

    def _count_requests(self, requests: Requests) -> Summary:
        reasons = Counter(requests.finish_reason.tolist())
        rejected = {reason.removeprefix("rejected_"): n for reason, n in reasons.items() if _is_rejection(reason)}
        finished = {reason: n for reason, n in reasons.items() if reason and not _is_rejection(reason)}
        return {
            "arrived": len(requests.request_id),
            "completed": int(requests.completed.sum()),
            "failed": int(requests.failed.sum()),
            "cancelled": finished.get("cancelled", 0),
            "rejected": sum(rejected.values()),
            "rejected_too_long": rejected.get("too_long", 0),
            "unfinished": reasons[""],
            "by_finish_reason": dict(sorted(finished.items())),
            "by_reject_reason": dict(sorted(rejected.items())),
        }

    def _describe_cache(self, requests: Requests) -> Summary:
        admitted = requests.cached_tokens >= 0
        prompt_tokens = int(requests.prompt_tokens[admitted].sum())
        cached_tokens = int(requests.cached_tokens[admitted].sum())
        return {
            "prompt_tokens_admitted": prompt_tokens,
            "prompt_tokens_cached": cached_tokens,
            "hit_ratio": _ratio(cached_tokens, prompt_tokens),
            "pages_evicted": self._evicted_pages.total(),
            "pages_evicted_by_reason": dict(sorted(self._evicted_pages.items())),
        }

    def _describe_scheduler(self, requests: Requests, gauges: _Gauges, span_us: tuple[int, int]) -> Summary:
        return {
            "retractions": self._retracted.total(),
            "retractions_by_reason": dict(sorted(self._retracted.items())),
            "requests_retracted": int(np.count_nonzero(requests.retractions)),
            "tokens_discarded": self._tokens_discarded,
            "decodes_skipped": self._decodes_skipped,
            "admissions_deferred": self._deferred.total(),
            "admissions_deferred_by_reason": dict(sorted(self._deferred.items())),
            "waiting_mean": gauges.mean(gauges.waiting, span_us),
            "waiting_max": gauges.max(gauges.waiting),
            "running_mean": gauges.mean(gauges.running, span_us),
            "running_max": gauges.max(gauges.running),
        }

    def _describe_device(self, requests: Requests, batches: Batches, device: _Intervals) -> Summary:
        """How busy the device was; None throughout for a host that reports no device times.

        A bubble is time in which the device was idle although a request had arrived and not ended.
        """
        modes = Counter(batches.mode.tolist())
        out: Summary = {"batches": len(batches.batch_id), "batches_by_mode": dict(sorted(modes.items()))}
        open_until_us = np.where(requests.ended_us < 0, self._last_us, requests.ended_us)
        at_work = _Intervals.union(requests.arrival_us, open_until_us)
        work_us = at_work.total_us()
        measured = len(device.starts) > 0
        busy_at_work_us = float(np.sum(device.covered_us(at_work.stops) - device.covered_us(at_work.starts)))
        bubble_us = round(work_us - busy_at_work_us) if measured else None
        start_us, stop_us = makespan(requests) or (0, 0)
        busy_us = np.diff(device.covered_us(np.array([start_us, stop_us])))[0]
        gaps, busy_after = decode_gaps_us(batches)
        return {
            **out,
            "busy_us": device.total_us() if measured else None,
            "busy_fraction": _ratio(float(busy_us), stop_us - start_us) if measured else None,
            "bubble_us": bubble_us,
            "bubble_share": _ratio(bubble_us, work_us) if bubble_us is not None else None,
            **describe("decode_gap", gaps),
            "decode_gap_share": _ratio(int(gaps.sum()), int(gaps.sum()) + busy_after),
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """New output tokens of one request in one StreamTokens, by request and time."""

    rows: Rows
    time_us: Int64s
    new_tokens: Int64s | Int32s
    is_first: Bools
    gaps_us: Float64s  # per token; NaN for a request's first message


def _is_first(rows: Rows) -> Bools:
    """Where a new request begins."""
    return np.append(True, rows[1:] != rows[:-1])[: len(rows)]


def _new_tokens(rows: Rows, offsets: Int32s, counts: Int32s) -> Int64s | Int32s:
    """How many of each message's tokens the client had not seen; messages by request and time.

    After a restart a message may repeat offsets. New is what lies behind everything sent before.
    """
    stops = offsets + counts
    before = np.append(0, stops[:-1])[: len(stops)]
    before[_is_first(rows)] = 0
    if np.array_equal(before, offsets):
        return counts
    # A request's row in the high bits makes one running maximum start afresh at each request.
    high = rows.astype(np.int64) << 32
    sent = np.append(0, np.maximum.accumulate(high | stops)[:-1])
    before = np.maximum(sent, high) - high
    new_tokens: Int64s = np.maximum(stops - np.maximum(before, offsets), 0)
    return new_tokens


def count_tokens(prompt: Prompt) -> int:
    """Length of a prompt in tokens."""
    if isinstance(prompt, TokenRuns):
        return sum(prompt.runs[1::2])
    if isinstance(prompt, TokenIds):
        return len(prompt.ids) // 4
    return prompt.tokens


def makespan(requests: Requests) -> tuple[int, int] | None:
    """First arrival and last finish; None if nothing finished. A late rejection does not prolong it."""
    finished = requests.e2e_us >= 0
    if not finished.any():
        return None
    return int(requests.arrival_us.min()), int(requests.ended_us[finished].max())


def describe(name: str, values: NDArray[Any]) -> dict[str, float | None]:
    """Mean, least, greatest and percentiles of microseconds, under names such as `ttft_us_p99`; None if there are none.

    Percentiles lie between two neighbours where need be (numpy's "linear"), like those of the benchmark tools.
    """
    names = ["mean", "min", *(f"p{p}" for p in PERCENTILES), "max"]
    if len(values) == 0:
        return {f"{name}_us_{statistic}": None for statistic in names}
    percentiles = np.percentile(values, PERCENTILES).tolist()
    numbers = [float(values.mean()), float(values.min()), *percentiles, float(values.max())]
    return {f"{name}_us_{statistic}": round(number, 3) for statistic, number in zip(names, numbers, strict=True)}


def describe_latency(requests: Requests, itl_us: Float64s) -> Summary:
    """The `latency` part of a summary: of completed requests."""
    done = requests.completed

    def known(column: NDArray[Any]) -> NDArray[Any]:
        return column[done & (column >= 0)]  # a NaN is not >= 0

    return {
        **describe("queue", known(requests.queue_us)),
        **describe("ttft", known(requests.ttft_us)),
        **describe("itl", itl_us),
        **describe("tpot", known(requests.tpot_us)),
        **describe("e2e", known(requests.e2e_us)),
    }


def describe_throughput(requests: Requests, slos: Sequence[Slo]) -> Summary:
    """The `throughput` part of a summary: completed requests and their tokens over the makespan."""
    done = requests.completed
    span = makespan(requests)
    makespan_us = span[1] - span[0] if span else None
    output_tokens = int(requests.output_tokens[done].sum())
    prompt_tokens = int(requests.prompt_tokens[done].sum())
    good = int(meets_every(slos, requests).sum()) if slos else None

    def per_s(count: int | None) -> float | None:
        return None if count is None or not makespan_us else round(count / makespan_us * 1e6, 6)

    return {
        "makespan_us": makespan_us,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": per_s(output_tokens),
        "total_tokens_per_s": per_s(prompt_tokens + output_tokens),
        "requests_per_s": per_s(int(done.sum())),
        "good_requests": good,
        "goodput_requests_per_s": per_s(good),
        "goodput_share": None if good is None else _ratio(good, int((done | requests.failed).sum())),
    }


def _describe_cpu(cpu: CpuIntervals) -> Summary:
    busy_us = {str(what): int((cpu.stop_us - cpu.start_us)[cpu.what == what].sum()) for what in np.unique(cpu.what)}
    return {"busy_us": sum(busy_us.values()) if busy_us else None, "busy_us_by_work": busy_us}


def describe_slo(slo: Slo, requests: Requests, itl_us: Float64s) -> Summary:
    """An entry of the `slos` part of a summary."""
    measured_us = _measure(slo, requests, itl_us)
    finite = measured_us is not None and math.isfinite(measured_us)
    return {
        "slo": str(slo),
        "bound_us": slo.bound_us,
        "measured_us": round(cast(float, measured_us), 3) if finite else None,  # None if failures fill the percentile
        "met": None if measured_us is None else measured_us <= slo.bound_us,
    }


def decode_gaps_us(batches: Batches) -> tuple[Int64s, int]:
    """Idle times of the device between two decode batches in a row, and the time that the second ones took."""
    measured = np.flatnonzero(batches.finished_us >= 0)
    order = measured[np.argsort(batches.started_us[measured], kind="stable")]
    started_us, finished_us = batches.started_us[order], batches.finished_us[order]
    decodes = batches.mode[order] == "decode"
    both = decodes[1:] & decodes[:-1]
    gaps = np.maximum(started_us[1:] - finished_us[:-1], 0)[both]
    return gaps, int((finished_us - started_us)[1:][both].sum())


# ------------------------------------------------------------------------------------------------ intervals and bins


@dataclass(frozen=True, slots=True, eq=False)
class _Intervals:
    """Half-open spans of time, apart from each other and in order."""

    starts: Int64s
    stops: Int64s

    @classmethod
    def union(cls, starts: Int64s, stops: Int64s) -> _Intervals:
        """Merge spans that touch; those that start at -1 or end where they start do not count."""
        real = (starts >= 0) & (stops > starts)
        order = np.argsort(starts[real], kind="stable")
        starts, stops = starts[real][order], np.maximum.accumulate(stops[real][order])
        apart = starts[1:] > stops[:-1]
        ends = np.ones(1 if len(starts) else 0, np.bool_)
        return cls(starts[np.concatenate((ends, apart))], stops[np.concatenate((apart, ends))])

    def total_us(self) -> int:
        return int((self.stops - self.starts).sum())

    def covered_us(self, at_us: Int64s) -> Float64s:
        """How much of these spans lies before each moment."""
        if len(self.starts) == 0:
            return np.zeros(len(at_us))
        lengths = np.cumsum(self.stops - self.starts)
        knots_us = np.column_stack((self.starts, self.stops)).ravel()
        covered = np.column_stack((np.append(0, lengths[:-1]), lengths)).ravel()
        before_us: Float64s = np.interp(at_us, knots_us, covered)
        return before_us


@dataclass(frozen=True, slots=True, eq=False)
class _Gauges:
    """Levels over time: each holds from its report to the next."""

    time_us: Int64s
    waiting: Float64s
    running: Float64s
    used_pages: Float64s
    cached_pages: Float64s
    stop_us: int

    @classmethod
    def of(cls, packed: array[int], kv_pages: int | None, stop_us: int) -> _Gauges:
        time_us, waiting, running, free_pages, cached_pages = np.array(packed, np.int64).reshape(-1, 5).T
        pages = np.nan if kv_pages is None else kv_pages
        used_pages = pages - free_pages.astype(np.float64) - cached_pages
        levels = (waiting.astype(np.float64), running.astype(np.float64), used_pages, cached_pages.astype(np.float64))
        return cls(time_us, *levels, max(stop_us, int(time_us[-1]) if len(time_us) else 0))

    def means(self, level: Float64s, edges_us: Int64s) -> Float64s:
        """Mean of a level between every two edges, by time; NaN without reports. Before the first it is 0."""
        if len(self.time_us) == 0:
            return np.full(len(edges_us) - 1, np.nan)
        knots_us = np.append(self.time_us, self.stop_us)
        area = np.append(0.0, np.cumsum(level * np.diff(knots_us)))
        means: Float64s = np.diff(np.interp(edges_us, knots_us, area)) / np.diff(edges_us)
        return means

    def mean(self, level: Float64s, span_us: tuple[int, int]) -> float | None:
        if span_us[1] <= span_us[0]:
            return None
        return _number(self.means(level, np.array(span_us))[0])

    def max(self, level: Float64s) -> int | None:
        return int(level.max()) if len(level) and not np.isnan(level[0]) else None

    def describe_kv(self, kv_pages: int | None, span_us: tuple[int, int]) -> Summary:
        peak, mean = self.max(self.used_pages), self.mean(self.used_pages, span_us)
        return {
            "pages": kv_pages,
            "used_pages_mean": mean,
            "used_pages_max": peak,
            "used_share_mean": _ratio(mean, kv_pages),
            "used_share_max": _ratio(peak, kv_pages),
            "cached_pages_mean": self.mean(self.cached_pages, span_us),
            "cached_pages_max": self.max(self.cached_pages),
        }


def _make_series(
    span_us: tuple[int, int], gauges: _Gauges, messages: _Messages, batches: Batches, device: _Intervals
) -> Series:
    start_us, stop_us = span_us[0], max(span_us[1], span_us[0] + 1)
    width_us = -(-(stop_us - start_us) // BINS_MAX)
    edges_us = np.append(np.arange(start_us, stop_us, width_us), stop_us).astype(np.int64)
    bins = len(edges_us) - 1

    def add_up(time_us: Int64s, amounts: Int64s | Int32s) -> Int64s:
        indices = np.clip((time_us - start_us) // width_us, 0, bins - 1)  # what happens at the very end is in the last
        return np.bincount(indices, weights=amounts, minlength=bins).astype(np.int64)

    ended_us = np.where(batches.finished_us >= 0, batches.finished_us, batches.launched_us)
    widths_us = np.diff(edges_us)
    return Series(
        t_us=edges_us[:-1],
        waiting=gauges.means(gauges.waiting, edges_us),
        running=gauges.means(gauges.running, edges_us),
        kv_used_pages=gauges.means(gauges.used_pages, edges_us),
        kv_cached_pages=gauges.means(gauges.cached_pages, edges_us),
        prefill_tokens=add_up(ended_us, batches.prefill_tokens),
        decode_tokens=add_up(ended_us, batches.new_tokens - batches.prefill_tokens),
        gpu_busy_fraction=np.diff(device.covered_us(edges_us)) / widths_us,
        output_tokens_per_s=add_up(messages.time_us, messages.new_tokens) / widths_us * 1e6,
    )


# ------------------------------------------------------------------------------------------------------ small arrays


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.integer[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _sums(parts: Sequence[Int32s], sizes: Int64s) -> Int64s:
    """The sum of each part, empty ones included."""
    totals = np.append(0, np.cumsum(_joined(parts, np.int32), dtype=np.int64))
    stops = np.cumsum(sizes)
    sums: Int64s = totals[stops] - totals[stops - sizes]
    return sums


def _strings(values: Sequence[str]) -> Strings:
    return np.array(values, np.str_) if values else np.empty(0, "<U1")


def _objects(values: Iterable[str]) -> Objects:
    """References to texts of any length; a column as wide as the longest label could be huge."""
    return np.array(list(values), np.object_)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 6)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(part / whole, 6)


def _is_rejection(reason: str) -> bool:
    return reason.startswith("rejected_")


def _never_arrived(request_id: RequestId) -> str:
    return f"request {request_id} acts but never arrived\nhint: fold a journal from its first record"
