"""What a run was like: a fold over observed events and their Steps. Definitions with reasons: docs/metrics.md.

    fold = MetricsFold(kv_pages=config.pages)
    step = engine.step(event)               # live in a host, or while replaying a journal: the numbers are the same
    fold.observe(event, step)
    ...
    run = fold.result([Slo.parse("ttft_p99=500ms")])

`observe` only remembers: it appends numbers and references to arrays that the core never writes again. Now and then
`compact` does the arithmetic on whole columns, and forgets what it has measured: a request that has ended is a row of
numbers, its gaps are counted among all gaps (value_counts.py), a batch is about 25 bytes (packed_rows.py). `result`
adds up.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from struct import Struct
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import (
    BatchPlan,
    CopyToHost,
    EncodeMedia,
    Int32s,
    Int64s,
    LaunchBatch,
    LoadAdapter,
    LoadFromHost,
    Speculation,
    Step,
    StreamTokens,
    WriteToStorage,
)
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    AdapterEvicted,
    AdapterLoaded,
    AdmissionDeferred,
    BatchFinished,
    BlocksEvicted,
    DecidedEvent,
    DecodeSkipped,
    HostPagesEvicted,
    Observed,
    PagesEvicted,
    PrefetchFinished,
    PrefillCompleted,
    Prompt,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
    SessionClosed,
    SessionYielded,
    TierOperationEnded,
    TokenIds,
    TokenRuns,
    TurnStarted,
)
from lockstep.core.requests.validation import sample_label, samples_asked
from lockstep.sim.metrics.adapters import AdapterCounts
from lockstep.sim.metrics.media import MediaCounts
from lockstep.sim.metrics.packed_rows import PART_ROWS, PackedRows
from lockstep.sim.metrics.value_counts import ValueCounts, ValueCountsBuilder
from lockstep.sim.workload.samples import measure_samples
from lockstep.sim.workload.server_sessions import SessionCounts

Float64s = NDArray[np.float64]
Rows = NDArray[Any]  # unsigned integers: indices of requests
Bools = NDArray[np.bool_]
Objects = NDArray[np.object_]  # references to texts, which equal ones share
Texts = NDArray[Any]  # of numpy's StringDType: 16 bytes for a short one; an element is a str
Summary = dict[str, Any]
"""Nested dicts of str, int, float, bool and None: ready for JSON, never NaN; None is "there was nothing to measure"."""

PERCENTILES = (50, 90, 95, 99)
BINS_MAX = 600  # of the series; a chart has no more pixels to tell them apart

COMPACT_ENTRIES = 2**18  # messages times their requests that `compact` lays out at a time: about 20 MB while it does
COMPACT_RESULTS_MIN, COMPACT_RESULTS_MAX = 64, 4_096  # batches between two times
_result = Struct("3q").pack  # batch_id, started_us, finished_us

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
    finish_reason: Objects  # a FinishReason; "rejected_" and a RejectReason; "" while unfinished
    label: Texts
    tenant: Objects

    @cached_property
    def completed(self) -> Bools:
        """Requests that got their whole answer. Read-only."""
        return self._ended_by(COMPLETED)

    @cached_property
    def failed(self) -> Bools:
        """Requests that the service let down; see FAILED. Read-only."""
        return self._ended_by(FAILED)

    def _ended_by(self, reasons: Sequence[str]) -> Bools:
        matches = np.isin(self.finish_reason, reasons)
        matches.flags.writeable = False
        return matches


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
    mode: Objects
    launched_us: Int64s
    started_us: Int64s
    finished_us: Int64s
    rows: Int64s
    new_tokens: Int64s
    prefill_tokens: Int64s  # the part of new_tokens in rows that extend
    kv_tokens: Int64s  # context lengths added up: what attention reads


BATCH_COLUMNS = tuple(field.name for field in fields(Batches))
_BATCH_ID, _MODE, _LAUNCHED, _STARTED, _FINISHED = map(
    BATCH_COLUMNS.index, ("batch_id", "mode", "launched_us", "started_us", "finished_us")
)
CPU_COLUMNS = ("start_us", "took_us", "work")
_WORK = CPU_COLUMNS.index("work")


@dataclass(frozen=True, eq=False)
class CpuIntervals(Columns):
    """What the scheduler's CPU did, as told by the host."""

    start_us: Int64s
    stop_us: Int64s
    what: Objects


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The long lists of a run: rows of integers, and the texts that codes among them stand for."""

    batches: PackedRows  # BATCH_COLUMNS
    modes: tuple[str, ...]
    cpu: PackedRows  # CPU_COLUMNS
    works: tuple[str, ...]

    @classmethod
    def join(cls, parts: Sequence[Packed]) -> Packed:
        """Those of several engines: batches by launch, CPU intervals engine by engine."""
        modes, works = _Codes(), _Codes()
        batches, cpu = PackedRows(*BATCH_COLUMNS), PackedRows(*CPU_COLUMNS)
        launched = [
            _recoded(columns, _MODE, np.array([modes[mode] for mode in part.modes], np.int64))
            for part in parts
            for columns in part.batches.parts()
        ]
        if launched:
            columns = [np.concatenate(column) for column in zip(*launched, strict=True)]
            order = np.argsort(columns[_LAUNCHED], kind="stable")
            for start in range(0, len(order), PART_ROWS):
                rows = order[start : start + PART_ROWS]
                batches.add_columns(*(column[rows] for column in columns))
                batches.pack()
        for part in parts:
            codes = np.array([works[work] for work in part.works], np.int64)
            for done in part.cpu.parts():
                cpu.add_columns(*_recoded(done, _WORK, codes))
                cpu.pack()
        return cls(batches, tuple(modes), cpu, tuple(works))


def _recoded(columns: tuple[Int64s, ...], place: int, codes: Int64s) -> tuple[Int64s, ...]:
    """The same columns with other numbers for the texts in one of them."""
    return *columns[:place], codes[columns[place]], *columns[place + 1 :]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """When each batch was in each stage of a pipeline, in the order of their launches. int64 all, us."""

    batch_id: NDArray[np.int64]  # [batches]
    microbatch: NDArray[np.int64]
    send_us: NDArray[np.int64]  # between two stages
    start_us: NDArray[np.int64]  # [batches, stages]
    stop_us: NDArray[np.int64]

    def bubbles(self) -> list[list[tuple[int, int]]]:
        """By stage: the spans in which it had nothing to do although a batch was in the pipeline, or on its way."""
        if not len(self.batch_id):
            return [[] for _ in range(self.start_us.shape[1])]
        there = merged(self.start_us[:, 0], self.stop_us[:, -1])
        return [_without(there, self.start_us[:, i], self.stop_us[:, i]) for i in range(self.start_us.shape[1])]


def merged(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The union of spans whose starts ascend."""
    out: list[tuple[int, int]] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def _without(
    spans: list[tuple[int, int]], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """What of `spans` is in none of the others. All ascend, and the others do not overlap."""
    out: list[tuple[int, int]] = []
    others, at = list(zip(starts.tolist(), stops.tolist(), strict=True)), 0
    for start, stop in spans:
        while at < len(others) and others[at][1] <= stop:
            if others[at][0] > start:
                out.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < stop:
            out.append((start, stop))
    return out


@dataclass(frozen=True, eq=False)
class RunData:
    """A run, measured: columns for reports and analysis, and a summary ready for JSON."""

    requests: Requests
    series: Series
    itl_us: ValueCounts  # every gap of every completed request
    span_us: tuple[int, int]  # first arrival, last event
    summary: Summary
    packed: Packed  # what `batches` and `cpu` are made from
    drafts: Drafts | None = None  # of engines that verify any, or compute what grammars force
    stages: StageTimes | None = None  # of an engine with microbatches
    encoder: Int64s | None = None  # [n, 4]: start and stop in us, contents, tokens of what it did; None: nothing known

    @property
    def batches(self) -> Batches:
        """Every batch, 72 bytes each and their modes. Made anew each time: keep it for as long as it is read."""
        column, modes = self.packed.batches.column, _objects(self.packed.modes)
        numbers = {name: column(name) for name in self.packed.batches.names if name != "mode"}
        return Batches(mode=modes[column("mode")], **numbers)

    @property
    def cpu(self) -> CpuIntervals:
        """What the scheduler's CPU did. Made anew each time, like `batches`."""
        column, works = self.packed.cpu.column, _objects(self.packed.works)
        start_us = column("start_us")
        return CpuIntervals(start_us, start_us + column("took_us"), works[column("work")])

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


def gaps_us(message_us: Int64s, before_us: Int64s, new_tokens: Int64s | Int32s) -> Float64s:
    """Inter-token latency, per message: the time since the request's previous message, shared by its new tokens.

    A message of n tokens after a wait of g gives n gaps of g / n. NaN for a request's first message, whose `before_us`
    is -1.
    """
    return np.where(before_us < 0, np.nan, (message_us - before_us) / new_tokens)


def meets_every(slos: Sequence[Slo], requests: Requests) -> Bools:
    """Which requests completed within every bound. A percentile's bound serves as each request's own.

    For ITL it is the request's longest gap that counts. What a request does not have, such as the TPOT of one token,
    misses no bound.
    """
    good = requests.completed.copy()
    for slo in slos:
        good &= ~(per_request(slo.metric, requests) > slo.bound_us)
    return good


def _measure(slo: Slo, requests: Requests, itl_us: ValueCounts) -> float | None:
    """See RunData.measured_us."""
    failures = int(requests.failed.sum())
    if slo.metric == "itl" and slo.percentile is not None:
        values, failures = itl_us, 0  # over gaps, not requests: a request that failed has none
    else:
        known = per_request(slo.metric, requests)[requests.completed]
        values = ValueCounts.of(known[~np.isnan(known)])
    count = values.size + failures
    if count == 0:
        return None
    percentile = 100.0 if slo.percentile is None else slo.percentile
    rank = (count - 1) * percentile / 100  # as in numpy's "linear"; the failures stand behind the last value
    if math.ceil(rank) >= values.size:
        return math.inf
    low, high = values.at((math.floor(rank), math.ceil(rank))).tolist()
    return float(low + (high - low) * (rank - math.floor(rank)))


def per_request(metric: SloMetric, requests: Requests) -> Float64s:
    """One value per request, NaN where there is none."""
    if metric == "tpot":
        return requests.tpot_us
    if metric == "itl":
        return requests.itl_us_max
    column = requests.ttft_us if metric == "ttft" else requests.e2e_us
    return np.where(column < 0, np.nan, column)


# --------------------------------------------------------------------------------------------------------------- fold


BLOCKS = {
    "window": "window_pages",
    "state": "checkpoints",
    "host window": "host_window_pages",
    "host state": "host_checkpoints",
}


BlockUse = CopyToHost | LoadFromHost | WriteToStorage


class TierCounts:
    """What the tiers below the device did: docs/metrics.md, "Cache tiers"."""

    def __init__(self, page_bytes: int, block_bytes: Mapping[str, int]) -> None:
        self._page_bytes, self._block_bytes = page_bytes, block_bytes
        self._beside: dict[int, int] = {}  # bytes of companions, by the move under way
        self._bytes_beside: Counter[str] = Counter()
        self._moves: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._host_tokens = 0
        self._storage_tokens = 0
        self._waited = 0
        self._wait_us = 0
        self._host_pages_evicted = 0

    def admitted(self, event: RequestAdmitted) -> None:
        """Take in a first admission."""
        self._host_tokens += event.host_tokens - event.storage_tokens
        self._storage_tokens += event.storage_tokens
        self._waited += event.load_wait_us > 0
        self._wait_us += event.load_wait_us

    def began(self, move: BlockUse) -> None:
        """Take in a move with companions."""
        number = move.write_id if isinstance(move, WriteToStorage) else move.copy_id
        self._beside[number] = sum(len(one.host) * self._block_bytes[one.kind] for one in move.blocks)

    def fetched(self, event: PrefetchFinished) -> None:
        """Take in what a prefetch brought."""
        beside = sum(len(one.indices) * self._block_bytes[one.kind] for one in event.blocks)
        self._beside[event.prefetch_id] = beside

    def learn(self, event: TierOperationEnded | HostPagesEvicted) -> None:
        """Take in what the tiers did."""
        if isinstance(event, HostPagesEvicted):
            self._host_pages_evicted += event.pages
            return
        self._moves[f"{event.kind} {event.outcome}"] += 1
        self._pages[event.kind] += event.pages_kept
        beside = self._beside.pop(event.operation, 0)
        came = event.outcome == "done" or (event.kind == "prefetch" and event.outcome not in ("void", "orphaned"))
        self._bytes_beside[event.kind] += beside if came else 0

    def describe(self) -> Summary:
        """For `cache` of metrics.json."""
        return {
            "prompt_tokens_from_host": self._host_tokens,
            "prompt_tokens_from_storage": self._storage_tokens,
            "moves": dict(sorted(self._moves.items())),
            "bytes_moved": {
                kind: pages * self._page_bytes + self._bytes_beside[kind] for kind, pages in sorted(self._pages.items())
            },
            "host_pages_evicted": self._host_pages_evicted,
            "requests_waited_for_tiers": self._waited,
            "tiers_wait_us": self._wait_us,
        }


class MeasuredRows(NamedTuple):
    """What `observe`, `gauge` and `cpu_interval` would have come to, of a run that somebody else measures."""

    batches: Int64s  # [batches, len(BATCH_COLUMNS)], settled ones; modes are places in `modes`
    modes: tuple[str, ...]
    gauges: Int64s  # [gauges, 5], as `gauge` takes them
    cpu: Int64s  # [intervals, len(CPU_COLUMNS)]; works are places in `works`
    works: tuple[str, ...]
    messages: Int64s  # [messages, 2]: when, and how many tokens
    itl_us: Int64s  # [gaps], those of requests that completed


class MeasuredRequests(NamedTuple):
    """The same of its requests, one row each in order of arrival, and of what is known in the end."""

    request_id: Int64s
    arrival_us: Int64s
    prompt_tokens: Int32s
    admitted_us: Int64s  # -1: not yet; so are the times below
    ended_us: Int64s  # by length
    output_tokens: Int32s
    first_message_us: Int64s
    last_message_us: Int64s
    itl_us_max: Float64s  # NaN: it has no gap
    labels: Callable[[Int64s], list[str]]  # of some rows
    tenants: list[str]
    last_us: int  # when the last event was
    open_batches: Mapping[str, Int64s]  # whose result has not come, by name of the column; others are unknown
    modes: tuple[str, ...]  # of these
    evicted_pages: Mapping[str, int]  # by reason
    deferred: Mapping[str, int]  # by reason
    decodes_skipped: int


class MetricsFold:
    """Takes in events and Steps in order, remembers little, and makes a RunData of it when asked."""

    def __init__(
        self,
        *,
        kv_pages: int | None = None,
        warm_up: int = 0,
        host_page_bytes: int | None = None,
        host_block_bytes: Mapping[str, int] | None = None,
        needs_media: bool = True,
    ) -> None:
        """Begin with nothing.

        Args:
            needs_media: whether requests need their media here from the beginning: not on a decode engine.
            kv_pages: the size of the page pool; without it the pages held by requests stay unknown.
            warm_up: requests with an id below this are not measured; what they do to batches, pages and others is.
            host_page_bytes: what a page of KV weighs on the host; None: nothing is kept there, and nothing is told.
            host_companion_bytes: what goes along with pages of hybrid models, by kind.
        """
        self._kv_pages = kv_pages
        self._warm_up = warm_up
        self._first_us: int | None = None
        self._last_us = 0

        # One entry per request, in order of arrival. Positions in a request fit 32 bits, as they do in a BatchPlan.
        self._request_ids = array("q")
        self._arrival_us = array("q")
        self._prompt_tokens = array("i")
        self._admitted_us = array("q")
        self._cached_tokens = array("i")
        self._retractions = array("i")
        self._ended_us = array("q")
        self._finish_codes = array("H")
        self._tenant_codes = array("I")
        self._labels: list[Texts] = []
        self._recent_labels: list[str] = []
        self._finish_reasons = _Codes({"": 0})
        self._tenants = _Codes()
        # And of what the client was sent, up to the last `compact`.
        self._sent = array("i")  # where the output that it has seen ends
        self._output_tokens = array("i")
        self._first_message_us = array("q")
        self._last_message_us = array("q")
        self._itl_us_max = array("d")

        # Who is open, and who ended since the last `compact`: the row, and the number of messages until then.
        self._row_of: dict[RequestId, int] = {}
        self._ended: dict[RequestId, tuple[int, int]] = {}

        # Since the last `compact`: one entry per message, launch and result.
        self._message_us = array("q")
        self._sent_messages: list[StreamTokens] = []
        self._launches: list[tuple[int, int, str, int, Int32s, Int32s]] = []
        self._results = array("q")  # batch_id, started_us, finished_us
        self._results_max = 3 * COMPACT_RESULTS_MIN  # numbers in there before the next `compact`

        # Measured, but not settled: gaps of open requests, and batches whose result has not come.
        self._open_gaps: tuple[Rows, Float64s, Int32s] = (np.empty(0, np.uint32), np.empty(0), np.empty(0, np.int32))
        self._open_batches: NDArray[np.int64] = np.empty((len(BATCH_COLUMNS), 0), np.int64)
        self._lost_batches: dict[int, int] = {}  # batch id -> row, of those nobody waits for any more

        # Settled.
        self._itl_us = ValueCountsBuilder()
        self._messages = PackedRows("time_us", "new_tokens")
        self._batches = PackedRows(*BATCH_COLUMNS)
        self._modes = _Codes()
        self._gauges = PackedRows("time_us", "waiting", "running", "free_pages", "cached_pages")
        self._cpu = PackedRows(*CPU_COLUMNS)
        self._works = _Codes()

        # Counts.
        self._tokens_discarded = 0
        self._decodes_skipped = 0
        self._retracted: Counter[str] = Counter()
        self._deferred: Counter[str] = Counter()
        self._evicted_pages: Counter[str] = Counter()
        self._drafts: Drafts | None = None  # of an engine that verifies any
        self._tiers = TierCounts(host_page_bytes, host_block_bytes or {}) if host_page_bytes is not None else None
        self._blocks_evicted = Counter[str]()  # by kind
        self._media: MediaCounts | None = None  # of a run in which any came
        self._needs_media = needs_media
        self._sessions: SessionCounts | None = None  # of a run with any of the server's
        self._sampled: list[tuple[int, int]] = []  # of requests with several samples: the first row, and how many
        self._adapters: AdapterCounts | None = None  # of a run in which a request ran on any

    def observe(self, event: Observed, step: Step) -> None:
        """Take in one event and the Step it gave. Raises ContractError for requests that are not open."""
        time_us = self._last_us = event.time_us
        if type(event) is BatchFinished:
            if len(self._results) >= self._results_max:
                self.compact()
            self._results.frombytes(_result(event.batch_id, event.started_us, event.finished_us))
            if event.accepted and self._drafts is not None:
                self._drafts.verified(event)
        elif type(event) is RequestArrived:
            if event.parallel_samples > 1 and event.request_id >= self._warm_up:
                self._sampled.append((len(self._request_ids), samples_asked(event)))
            for sample in range(samples_asked(event)):  # each is a request
                self._arrive(event, event.request_id + sample, sample_label(event.label, sample))
            if (
                event.spans
                and self._needs_media
                and not any(type(decided) is RequestRejected for decided in step.decided)
            ):
                self._media = self._media or MediaCounts()
                self._media.arrived(event)
            if event.adapter and not any(type(decided) is RequestRejected for decided in step.decided):
                self._adapters = self._adapters or AdapterCounts()
                self._adapters.requests[event.adapter] += samples_asked(event)
        elif type(event) is AdapterLoaded and self._adapters is not None:
            self._adapters.loaded(event)
        elif type(event) is PrefetchFinished and event.blocks and self._tiers is not None:
            self._tiers.fetched(event)
        for command in step.commands:
            if type(command) is StreamTokens:
                self._message_us.append(time_us)
                self._sent_messages.append(command)
            elif type(command) is LaunchBatch:
                # Not the plan itself: it would keep the prompts' token ids alive.
                plan = command.plan
                starts = plan.starts
                if plan.speculation is not None:
                    self._drafts = self._drafts or Drafts()
                    starts = self._drafts.launched(plan, plan.speculation)
                self._launches.append((time_us, plan.batch_id, plan.mode, plan.extend_rows, starts, plan.stops))
            elif type(command) is EncodeMedia:
                self._media = self._media or MediaCounts()
                self._media.ordered(command, needed=not self._needs_media)
            elif type(command) is LoadAdapter:
                self._adapters = self._adapters or AdapterCounts()
                self._adapters.ordered(command, step.time_us)
            elif self._tiers is not None and isinstance(command, BlockUse) and command.blocks:
                self._tiers.began(command)
        for decided in step.decided:
            self._learn(decided)

    def gauge(self, time_us: int, waiting: int, running: int, free_pages: int, cached_pages: int) -> None:
        """Say how things stand after a LaneReady: requests waiting and running, pages free and cached."""
        gauges = self._gauges
        gauges.recent.frombytes(gauges.row(time_us, waiting, running, free_pages, cached_pages))

    def cpu_interval(self, start_us: int, stop_us: int, what: str) -> None:
        """Say what the scheduler's CPU did in [start_us:stop_us), such as "plan" or "results"."""
        self._cpu.recent.frombytes(self._cpu.row(start_us, stop_us - start_us, self._works[what]))

    def encoder_interval(self, start_us: int, stop_us: int, contents: int, tokens: int, gpus: int) -> None:
        """Say what the encoder does in [start_us:stop_us), on GPUs of its own or, with 0, on those of the engine."""
        self._media = self._media or MediaCounts()
        self._media.intervals.extend((start_us, stop_us, contents, tokens))
        self._media.gpus = gpus

    def media_wait(self, request_id: RequestId, waited_us: int) -> None:
        """Say for how long a request was held for its media."""
        if self._media is not None and request_id >= self._warm_up:
            self._media.waits_us.append(waited_us)

    def sessions_held(self, time_us: int, pages: int) -> None:
        """Say how many pages sessions hold that no request does, from now on."""
        self._sessions = self._sessions or SessionCounts()
        self._sessions.held(time_us, pages)

    def take_measured(self, measured: MeasuredRows) -> None:
        """Take in rows that somebody else measured."""
        batches, cpu = measured.batches.copy(), measured.cpu.copy()
        batches[:, _MODE] = _coded(batches[:, _MODE], measured.modes, self._modes)
        cpu[:, _WORK] = _coded(cpu[:, _WORK], measured.works, self._works)
        self._itl_us.add(measured.itl_us)
        for rows, more in (
            (self._batches, batches),
            (self._gauges, measured.gauges),
            (self._cpu, cpu),
            (self._messages, measured.messages),
        ):
            rows.recent.frombytes(more.tobytes())
            rows.pack()

    def take_measured_requests(self, measured: MeasuredRequests) -> None:
        """Take in the requests of a run that somebody else measures, all of them anew, behind all rows until then."""
        requests = len(measured.request_id)
        if requests:
            self._first_us = int(measured.arrival_us[0])
        self._last_us = measured.last_us
        admitted = measured.admitted_us >= 0
        ended = self._finish_reasons["length"]
        for column, values in (
            (self._request_ids, measured.request_id),
            (self._arrival_us, measured.arrival_us),
            (self._prompt_tokens, measured.prompt_tokens),
            (self._admitted_us, measured.admitted_us),
            (self._cached_tokens, np.where(admitted, 0, -1)),
            (self._retractions, np.zeros(requests)),
            (self._ended_us, measured.ended_us),
            (self._finish_codes, np.where(measured.ended_us < 0, 0, ended)),
            (self._tenant_codes, [self._tenants[tenant] for tenant in measured.tenants]),
            (self._sent, measured.output_tokens),
            (self._output_tokens, measured.output_tokens),
            (self._first_message_us, measured.first_message_us),
            (self._last_message_us, measured.last_message_us),
            (self._itl_us_max, measured.itl_us_max),
        ):
            del column[:]
            column.frombytes(np.asarray(values).astype(column.typecode).tobytes())
        self._labels.clear()
        for start in range(0, requests, PART_ROWS):
            rows = measured.request_id[start : start + PART_ROWS]
            self._labels.append(_texts(measured.labels(rows)))
        still = np.full((len(BATCH_COLUMNS), len(measured.open_batches["batch_id"])), -1, np.int64)
        for name, values in measured.open_batches.items():
            still[BATCH_COLUMNS.index(name)] = values
        still[_MODE] = _coded(still[_MODE], measured.modes, self._modes)
        self._open_batches = still
        self._evicted_pages = Counter({reason: count for reason, count in measured.evicted_pages.items() if count})
        self._decodes_skipped = measured.decodes_skipped
        self._deferred = Counter({reason: count for reason, count in measured.deferred.items() if count})

    def compact(self, part_rows: int = PART_ROWS) -> None:
        """Measure what was taken in since the last time, and forget it. Changes no answer, and happens by itself.

        Args:
            part_rows: the long lists are packed when so many rows have come; fewer are not worth it.
        Raises: ContractError if a message went to a request that was not open.
        """
        self._settle_messages()
        self._settle_batches()
        for rows in (self._messages, self._batches, self._gauges, self._cpu):
            rows.pack(part_rows)
        if len(self._recent_labels) >= part_rows:
            self._labels.append(_texts(self._recent_labels))
            self._recent_labels.clear()

    def result(self, slos: Sequence[Slo] = ()) -> RunData:
        """Measure everything observed so far. The fold may go on afterwards."""
        self.compact()
        batches = self._batches.snapshot()
        batches.add_columns(*self._open_batches)
        packed = Packed(batches, tuple(self._modes), self._cpu.snapshot(), tuple(self._works))
        requests, itl_us = self._measured_requests(), self._itl_us.build()
        span_us = (self._first_us or 0, self._last_us)
        edges_us = _edges_us(span_us)
        gauges = _Gauges.of(self._gauges, self._kv_pages, edges_us, span_us)
        device = _Device.of(packed)
        summary: Summary = {
            "requests": self._count_requests(requests),
            "latency": describe_latency(requests, itl_us),
            "throughput": describe_throughput(requests, slos),
            "cache": self._describe_cache(requests),
            "kv": gauges.describe_kv(self._kv_pages),
            "scheduler": self._describe_scheduler(requests, gauges),
            "device": self._describe_device(requests, device),
            "cpu": _describe_cpu(packed),
            "slos": [describe_slo(slo, requests, itl_us) for slo in slos],
        }
        if self._drafts is not None:
            summary |= self._drafts.summary()
        encoder = None
        if self._media is not None and self._media.contents:
            summary["media"] = self._media.describe(summary["throughput"]["makespan_us"])
            encoder = self._media.table if len(self._media.intervals) else None
        if self._sessions is not None and self._sessions.turns:
            summary["sessions"] = self._sessions.describe(self._kv_pages)
        if self._sampled:
            summary["samples"] = self._describe_samples()
        if self._adapters is not None and self._adapters.requests:
            summary["adapters"] = self._adapters.describe()
        series = _make_series(edges_us, gauges, self._messages, packed.batches, device.busy)
        return RunData(requests, series, itl_us, span_us, summary, packed, self._drafts, encoder=encoder)

    # ------------------------------------------------------------------------------------------------- taking in

    def _arrive(self, event: RequestArrived, request_id: RequestId, label: str) -> None:
        if self._first_us is None:
            self._first_us = event.time_us
        if request_id in self._row_of:
            raise ContractError(f"request {request_id} arrived twice\nhint: fold each record of a journal once")
        if request_id in self._ended or len(self._ended) >= PART_ROWS:
            self.compact()  # an id may be used again; and requests may end without any batch
        self._row_of[request_id] = len(self._request_ids)
        self._request_ids.append(request_id)
        self._arrival_us.append(event.time_us)
        self._prompt_tokens.append(count_tokens(event.prompt))
        self._recent_labels.append(label)
        self._tenant_codes.append(self._tenants[event.tenant])
        self._admitted_us.append(-1)
        self._cached_tokens.append(-1)
        self._retractions.append(0)
        self._ended_us.append(-1)
        self._finish_codes.append(0)
        self._sent.append(0)
        self._output_tokens.append(0)
        self._first_message_us.append(-1)
        self._last_message_us.append(-1)
        self._itl_us_max.append(math.nan)

    def _learn(self, decided: DecidedEvent) -> None:
        match decided:
            case RequestQueued() | PrefillCompleted():
                pass  # what they say is known from arrivals and messages
            case RequestAdmitted():
                row = self._row(decided.request_id)
                self._went_on(decided.request_id, decided.time_us)
                if self._admitted_us[row] < 0:  # later admissions follow a retraction
                    self._admitted_us[row] = decided.time_us
                    self._cached_tokens[row] = decided.cached_tokens
                    if self._tiers is not None and decided.request_id >= self._warm_up:
                        self._tiers.admitted(decided)
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
                if decided.reason == "adapter" and self._adapters is not None:
                    self._adapters.deferred(decided.request_id, decided.time_us)
            case TurnStarted() | SessionYielded() | SessionClosed():
                self._sessions = self._sessions or SessionCounts()
                self._sessions.learn(decided)
                if isinstance(decided, TurnStarted):  # it arrived with its own tokens alone
                    self._prompt_tokens[self._row(decided.request_id)] = decided.prompt_tokens
            case DecodeSkipped():
                self._decodes_skipped += 1
            case TierOperationEnded() | HostPagesEvicted() if self._tiers is not None:
                self._tiers.learn(decided)
            case BlocksEvicted():
                self._blocks_evicted[decided.kind] += decided.count
            case AdapterEvicted() if self._adapters is not None:
                self._adapters.evictions += 1

    def _went_on(self, request_id: RequestId, time_us: int) -> None:
        if self._adapters is not None:
            self._adapters.went_on(request_id, time_us, is_measured=request_id >= self._warm_up)

    def _end(self, request_id: RequestId, time_us: int, reason: str) -> None:
        row = self._row(request_id)
        self._went_on(request_id, time_us)
        self._ended_us[row] = time_us
        self._finish_codes[row] = self._finish_reasons[reason]
        del self._row_of[request_id]
        self._ended[request_id] = row, len(self._message_us)

    def _row(self, request_id: RequestId) -> int:
        try:
            return self._row_of[request_id]
        except KeyError:
            raise ContractError(_unknown(request_id)) from None

    # -------------------------------------------------------------------------------------------------- settling

    def _settle_messages(self) -> None:
        """Measure the messages since the last time; then the gaps of those who ended."""
        gaps = [self._open_gaps]
        if self._sent_messages:
            gaps.append(self._measure_messages())
        rows, gaps_us, tokens = (np.concatenate(column) for column in zip(*gaps, strict=True))
        reasons = np.frombuffer(self._finish_codes, np.uint16)[rows]
        completed = np.array([reason in COMPLETED for reason in self._finish_reasons], np.bool_)[reasons]
        if self._warm_up:
            completed = completed & (np.frombuffer(self._request_ids, np.int64)[rows] >= self._warm_up)
        single, several = completed & (tokens == 1), completed & (tokens > 1)
        self._itl_us.add(gaps_us[single])  # nearly all; without counts they are sorted much faster
        self._itl_us.add(gaps_us[several], tokens[several])
        is_open = reasons == 0
        self._open_gaps = rows[is_open], gaps_us[is_open], tokens[is_open]
        self._ended.clear()

    def _measure_messages(self) -> tuple[Rows, Float64s, Int32s]:
        """Lay the messages out by request and time, measure them, and forget them.

        Returns: for each that has a gap the request's row, the gap per token, and the new tokens.
        """
        messages = len(self._sent_messages)
        rows, members, number = self._members()
        offsets = np.concatenate([message.offsets for message in self._sent_messages])
        counts = np.concatenate([message.token_counts for message in self._sent_messages])
        order = np.argsort(members, kind="stable")  # time never goes back, so this is by request, then time
        members, number, offsets, counts = members[order], number[order], offsets[order], counts[order]
        message_us = np.array(self._message_us, np.int64)
        self._results_max = 3 * min(
            max(messages * COMPACT_ENTRIES // len(order) if len(order) else 0, COMPACT_RESULTS_MIN), COMPACT_RESULTS_MAX
        )
        self._message_us = array("q")
        self._sent_messages.clear()

        # What a client saw twice does not count.
        starts = np.flatnonzero(_is_first(members))
        sent = np.frombuffer(self._sent, np.int32)
        who = rows[members[starts]]
        new_tokens = _new_tokens(members, offsets, counts, sent[who].astype(np.int64))
        if len(starts):
            sent[who] = np.maximum(sent[who], np.maximum.reduceat(offsets + counts, starts))
        if not new_tokens.all():
            kept = new_tokens > 0
            members, number, new_tokens = members[kept], number[kept], new_tokens[kept]
            starts = np.flatnonzero(_is_first(members))
            who = rows[members[starts]]

        sizes = np.bincount(number, new_tokens, messages).astype(np.int64)
        self._messages.add_columns(message_us[sizes > 0], sizes[sizes > 0])

        time_us = message_us[number]
        first_us = np.frombuffer(self._first_message_us, np.int64)
        last_us = np.frombuffer(self._last_message_us, np.int64)
        output_tokens, itl_us_max = np.frombuffer(self._output_tokens, np.int32), np.frombuffer(self._itl_us_max)
        before_us = np.append(0, time_us[:-1])[: len(time_us)]
        before_us[starts] = last_us[who]
        gaps = gaps_us(time_us, before_us, new_tokens)
        if len(starts):
            first_us[who] = np.where(first_us[who] < 0, time_us[starts], first_us[who])
            last_us[who] = time_us[np.append(starts[1:], len(time_us)) - 1]
            output_tokens[who] += np.add.reduceat(new_tokens, starts, dtype=np.int32)
            itl_us_max[who] = np.fmax(itl_us_max[who], np.fmax.reduceat(gaps, starts))  # fmax passes over NaN
        real = before_us >= 0
        return rows[members[real]].astype(np.uint32), gaps[real], new_tokens[real].astype(np.int32)

    def _members(self) -> tuple[Int64s, Rows, Int64s]:
        """Who the messages went to.

        Returns: the rows of those who were open since the last `compact`, by request id; for each entry of each message
            the index of its request in there, in the smallest type that holds it (numpy sorts 16 bits ten times
            faster); and the number of its message.
        """
        open_, ended = self._row_of, self._ended
        known = np.fromiter(chain(open_, ended), np.int64, len(open_) + len(ended))
        rows = np.fromiter(chain(open_.values(), (row for row, _ in ended.values())), np.int64, len(known))
        until = np.full(len(known), len(self._sent_messages), np.int64)  # who ended is sent nothing more
        until[len(open_) :] = [messages for _, messages in ended.values()]
        order = np.argsort(known)
        known, rows, until = known[order], rows[order], until[order]

        # Decodes in a row go to the same requests, in one and the same array.
        running_batches: list[Int64s] = []
        cohort_of: list[int] = []
        for message in self._sent_messages:
            if not running_batches or message.request_ids is not running_batches[-1]:
                running_batches.append(message.request_ids)
            cohort_of.append(len(running_batches) - 1)
        ids = np.concatenate(running_batches)
        found = np.searchsorted(known, ids).astype(np.min_scalar_type(len(known)))
        strangers = ids[np.append(known, -1)[found] != ids] if len(known) else ids
        if len(strangers):
            raise ContractError(_unknown(int(strangers[0])))
        parts = np.split(found, np.cumsum([len(running_batch) for running_batch in running_batches])[:-1])
        members = np.concatenate([parts[running_batch] for running_batch in cohort_of])
        number = np.repeat(np.arange(len(cohort_of)), [len(parts[running_batch]) for running_batch in cohort_of])
        late = np.flatnonzero(number >= until[members])
        if len(late):
            raise ContractError(_unknown(int(known[members[late[0]]])))
        return rows, members, number

    def _settle_batches(self) -> None:
        """Join launches and results. Batches are settled in the order of their launches, when their results are there.

        One for whose result more than COMPACT_RESULTS_MAX launches wait is taken for lost, until it comes after all.
        """
        batches = np.concatenate((self._open_batches, self._launched()), axis=1)
        results = np.array(self._results, np.int64).reshape(-1, 3)
        del self._results[:]
        has_come = np.zeros(batches.shape[1], np.bool_)
        started_us, finished_us = batches[_STARTED], batches[_FINISHED]
        if batches.shape[1]:
            order = np.argsort(batches[_BATCH_ID], kind="stable")
            place = np.searchsorted(batches[_BATCH_ID], results[:, 0], side="right", sorter=order) - 1
            index = order[place]  # of the newest launch of that name; -1 stands for any, and is not equal
            mine = batches[_BATCH_ID][index] == results[:, 0]
            has_come[index[mine]] = True
            timed = mine & (results[:, 2] > 0)  # a host without a device clock reports 0
            started_us[index[timed]], finished_us[index[timed]] = results[timed, 1], results[timed, 2]
            results = results[~mine]
        for batch_id, start_us, stop_us in results.tolist():
            if batch_id in self._lost_batches and stop_us > 0:
                self._batches.amend(self._lost_batches.pop(batch_id), started_us=start_us, finished_us=stop_us)
        waiting = np.flatnonzero(~has_come)
        settled = int(waiting[0]) if len(waiting) else len(has_come)
        if len(has_come) - settled > COMPACT_RESULTS_MAX:
            settled = len(has_come) - COMPACT_RESULTS_MAX
            for index in waiting[waiting < settled].tolist():
                self._lost_batches[int(batches[_BATCH_ID, index])] = len(self._batches) + index
        self._batches.add_columns(*batches[:, :settled])
        self._open_batches = batches[:, settled:].copy()

    def _launched(self) -> NDArray[np.int64]:
        """Launches since the last time, in BATCH_COLUMNS."""
        launches = self._launches
        columns = np.full((len(BATCH_COLUMNS), len(launches)), -1, np.int64)
        if not launches:
            return columns
        launched_us, batch_id, modes, extend_rows, starts, stops = zip(*launches, strict=True)
        rows = np.fromiter(map(len, stops), np.int64, len(launches))
        kv_tokens = _sums(stops, rows)
        new_tokens = kv_tokens - _sums(starts, rows)
        only_decodes = np.array([mode in ("decode", "verify", "draft_extend", "idle") for mode in modes], np.bool_)
        values: dict[str, Any] = {
            "batch_id": batch_id,
            "mode": [self._modes[mode] for mode in modes],
            "launched_us": launched_us,
            "rows": rows,
            "new_tokens": new_tokens,
            "prefill_tokens": np.where(only_decodes, 0, new_tokens - (rows - np.array(extend_rows, np.int64))),
            "kv_tokens": kv_tokens,
        }
        for name, column in values.items():
            columns[BATCH_COLUMNS.index(name)] = column
        launches.clear()
        return columns

    def late(self, slos: Sequence[Slo]) -> list[int]:
        """For each SLO the requests so far that stand beyond its bound whatever follows: late, or failed.

        Of gaps (`itl`) there are none: they are no requests.
        """
        self.compact()
        requests = self._measured_requests()
        is_open = requests.finish_reason == ""
        failed = int((requests.failed & ~is_open).sum())
        waited_us = self._last_us - requests.arrival_us
        counts = []
        for slo in slos:
            if slo.metric == "itl":
                counts.append(0)
                continue
            beyond = requests.completed & (per_request(slo.metric, requests) > slo.bound_us)
            if slo.metric == "ttft":
                beyond |= is_open & (np.where(requests.ttft_us < 0, waited_us, requests.ttft_us) > slo.bound_us)
            elif slo.metric == "e2e":
                beyond |= is_open & (waited_us > slo.bound_us)
            counts.append(int(beyond.sum()) + failed)
        return counts

    def _describe_samples(self) -> Summary:
        whole = self._requests()
        first_us = np.array(self._first_message_us, np.int64)
        return measure_samples(self._sampled, whole.arrival_us, first_us, whole.ended_us, whole.completed)

    def _measured_requests(self) -> Requests:
        """Those behind the warm-up."""
        requests = self._requests()
        if not self._warm_up:
            return requests
        counts = requests.request_id >= self._warm_up
        return Requests(**{name: column[counts] for name, column in requests.columns().items()})

    def _requests(self) -> Requests:
        arrival_us = np.array(self._arrival_us, np.int64)
        admitted_us = np.array(self._admitted_us, np.int64)
        ended_us = np.array(self._ended_us, np.int64)
        codes = np.array(self._finish_codes, np.uint16)
        rejected = np.array([_is_rejection(reason) for reason in self._finish_reasons], np.bool_)[codes]
        first_us, last_us = np.array(self._first_message_us, np.int64), np.array(self._last_message_us, np.int64)
        output_tokens = np.array(self._output_tokens, np.int64)
        return Requests(
            request_id=np.array(self._request_ids, np.int64),
            arrival_us=arrival_us,
            queue_us=np.where(admitted_us < 0, -1, admitted_us - arrival_us),
            ttft_us=ttft_us(arrival_us, first_us),
            tpot_us=tpot_us(first_us, last_us, output_tokens),
            itl_us_max=np.array(self._itl_us_max, np.float64),
            e2e_us=np.where((ended_us < 0) | rejected, -1, ended_us - arrival_us),
            ended_us=ended_us,
            prompt_tokens=np.array(self._prompt_tokens, np.int64),
            cached_tokens=np.array(self._cached_tokens, np.int64),
            output_tokens=output_tokens,
            retractions=np.array(self._retractions, np.int64),
            finish_reason=_objects(list(self._finish_reasons))[codes],
            label=np.concatenate([*self._labels, _texts(self._recent_labels)]),
            tenant=_objects(list(self._tenants))[np.array(self._tenant_codes, np.uint32)],
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
            **{f"{BLOCKS[kind]}_evicted": count for kind, count in sorted(self._blocks_evicted.items())},
            **(self._tiers.describe() if self._tiers is not None else {}),
        }

    def _describe_scheduler(self, requests: Requests, gauges: _Gauges) -> Summary:
        return {
            "retractions": self._retracted.total(),
            "retractions_by_reason": dict(sorted(self._retracted.items())),
            "requests_retracted": int(np.count_nonzero(requests.retractions)),
            "tokens_discarded": self._tokens_discarded,
            "decodes_skipped": self._decodes_skipped,
            "admissions_deferred": self._deferred.total(),
            "admissions_deferred_by_reason": dict(sorted(self._deferred.items())),
            "waiting_mean": gauges.mean("waiting"),
            "waiting_max": gauges.max("waiting"),
            "running_mean": gauges.mean("running"),
            "running_max": gauges.max("running"),
        }

    def _describe_device(self, requests: Requests, device: _Device) -> Summary:
        """How busy the device was; None throughout for a host that reports no device times.

        A bubble is time in which the device was idle although a request had arrived and not ended.
        """
        at_work = _at_work(requests, self._last_us)
        work_us, busy = at_work.total_us(), device.busy
        measured = len(busy.starts) > 0
        busy_at_work_us = float(np.sum(busy.covered_us(at_work.stops) - busy.covered_us(at_work.starts)))
        bubble_us = round(work_us - busy_at_work_us) if measured else None
        start_us, stop_us = makespan(requests) or (0, 0)
        busy_us = np.diff(busy.covered_us(np.array([start_us, stop_us])))[0]
        gaps_us = round(device.decode_gaps_us.sum())
        return {
            "batches": sum(device.batches_by_mode.values()),
            "batches_by_mode": device.batches_by_mode,
            "busy_us": busy.total_us() if measured else None,
            "busy_fraction": _ratio(float(busy_us), stop_us - start_us) if measured else None,
            "bubble_us": bubble_us,
            "bubble_share": _ratio(bubble_us, work_us) if bubble_us is not None else None,
            **describe("decode_gap", device.decode_gaps_us),
            "decode_gap_share": _ratio(gaps_us, gaps_us + device.busy_after_decode_us),
        }


class Drafts:
    """What became of drafts: counts over all rows of all verifying batches whose results are known."""

    def __init__(self) -> None:
        self._in_flight: dict[int, tuple[NDArray[np.bool_], Int32s]] = {}  # by batch: who verifies, and how many drafts
        self.batches = 0
        self.tokens = 0  # that rows got, drafts and the one behind them
        self.verifies = False  # any drafts
        self.forced = 0  # tokens that grammars forced, computed beside the newest one of a row
        self.jumps = 0  # of a row in a batch, each with some of these
        self._offered = np.zeros(0, np.int64)  # rows by how many drafts they verified, at the least
        self._right = np.zeros(0, np.int64)  # and by how many were right

    def launched(self, plan: BatchPlan, speculation: Speculation) -> Int32s:
        """Take in a launch. Returns where its rows start as far as metrics count tokens: each verifies one."""
        verifying, drafts = plan.sample_rows >= plan.extend_rows, speculation.draft_lengths
        if speculation.forced_lengths.size:  # what is right for certain is no draft
            self.forced += int(speculation.forced_lengths.sum())
            self.jumps += int(np.count_nonzero(speculation.forced_lengths))
            free = speculation.forced_lengths == 0
            verifying, drafts = verifying.copy(), drafts[free]
            verifying[np.flatnonzero(verifying)[~free]] = False
        if speculation.method != "forced":
            self.verifies = True
            self._in_flight[plan.batch_id] = verifying, drafts
        starts = plan.starts.copy()
        starts[plan.extend_rows :] = plan.stops[plan.extend_rows :] - 1
        return starts

    def verified(self, event: BatchFinished) -> None:
        """Take in a result."""
        found = self._in_flight.pop(event.batch_id, None)
        if found is None:
            return
        verifying, drafts = found
        accepted = np.frombuffer(event.accepted, np.int32)[verifying]
        self.batches += 1
        self.tokens += int(accepted.sum())
        self._offered = _added(self._offered, np.bincount(drafts))
        self._right = _added(self._right, np.bincount(accepted - 1))

    @classmethod
    def join(cls, parts: Sequence[Drafts]) -> Drafts:
        """Those of several engines together."""
        whole = cls()
        for part in parts:
            whole.batches += part.batches
            whole.tokens += part.tokens
            whole.verifies |= part.verifies
            whole.forced += part.forced
            whole.jumps += part.jumps
            whole._offered = _added(whole._offered, part._offered)
            whole._right = _added(whole._right, part._right)
        return whole

    def summary(self) -> Summary:
        """`speculation` and `jump_forward` of metrics.json, where there was any."""
        forced = {
            "forced_tokens": self.forced,
            "jumps": self.jumps,
            "tokens_per_jump_mean": _ratio(self.forced, self.jumps),
        }
        return {
            **({"speculation": self.describe()} if self.verifies else {}),
            **({"jump_forward": forced} if self.jumps else {}),
        }

    def describe(self) -> Summary:
        rows = int(self._offered.sum())
        offered = np.cumsum(self._offered[::-1])[::-1][1:].tolist()  # rows with a first draft, a second one, ...
        right = np.cumsum(self._right[::-1])[::-1][1:].tolist()
        right += [0] * (len(offered) - len(right))
        return {
            "verify_batches": self.batches,
            "rows_verified": rows,
            "drafts": sum(offered),
            "drafts_accepted": sum(right),
            "acceptance_ratio": _ratio(sum(right), sum(offered)),
            "acceptance_by_position": [_ratio(of, all_of) for of, all_of in zip(right, offered, strict=True)],
            "accepted_length_mean": _ratio(self.tokens, rows),
            "drafts_mean": _ratio(sum(offered), rows),
            "tokens_per_batch_mean": _ratio(self.tokens, self.batches),
        }


def _added(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    longer = np.zeros(max(len(one), len(other)), np.int64)
    longer[: len(one)] += one
    longer[: len(other)] += other
    return longer


def _is_first(rows: Rows) -> Bools:
    """Where a new request begins."""
    return np.append(True, rows[1:] != rows[:-1])[: len(rows)]


def _new_tokens(rows: Rows, offsets: Int32s, counts: Int32s, sent: Int64s) -> Int64s | Int32s:
    """How many of each message's tokens the client had not seen; messages by request and time.

    After a restart a message may repeat offsets. New is what lies behind everything sent before: within these messages,
    and before them, `sent`, one number for each request in order.
    """
    stops = offsets + counts
    is_first = _is_first(rows)
    before = np.append(0, stops[:-1])[: len(stops)]
    before[is_first] = sent
    if np.array_equal(before, offsets):
        return counts
    # A request's row in the high bits makes one running maximum start afresh at each request.
    high = rows.astype(np.int64) << 32
    before = np.maximum(np.append(0, np.maximum.accumulate(high | stops)[:-1]), high) - high
    before = np.maximum(before, sent[np.cumsum(is_first) - 1])
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


def describe(name: str, values: NDArray[Any] | ValueCounts) -> dict[str, float | None]:
    """Mean, least, greatest and percentiles of microseconds, under names such as `ttft_us_p99`; None if there are none.

    Percentiles lie between two neighbours where need be (numpy's "linear"), like those of the benchmark tools.
    """
    names = ["mean", "min", *(f"p{p}" for p in PERCENTILES), "max"]
    if (values.size if isinstance(values, ValueCounts) else len(values)) == 0:
        return {f"{name}_us_{statistic}": None for statistic in names}
    if isinstance(values, ValueCounts):
        percentiles = [values.percentile(percentile) for percentile in PERCENTILES]
        numbers = [values.mean(), float(values.values[0]), *percentiles, float(values.values[-1])]
    else:
        percentiles = np.percentile(values, PERCENTILES).tolist()
        numbers = [float(values.mean()), float(values.min()), *percentiles, float(values.max())]
    return {f"{name}_us_{statistic}": round(number, 3) for statistic, number in zip(names, numbers, strict=True)}


def describe_latency(requests: Requests, itl_us: ValueCounts) -> Summary:
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


def _describe_cpu(packed: Packed) -> Summary:
    busy_us = [0] * len(packed.works)
    for _, took_us, work in packed.cpu.parts():
        for code in np.unique(work).tolist():
            busy_us[code] += int(took_us[work == code].sum())
    by_work = dict(sorted(zip(packed.works, busy_us, strict=True)))
    return {"busy_us": sum(busy_us) if by_work else None, "busy_us_by_work": by_work}


def describe_slo(slo: Slo, requests: Requests, itl_us: ValueCounts) -> Summary:
    """An entry of the `slos` part of a summary."""
    measured_us = _measure(slo, requests, itl_us)
    finite = measured_us is not None and math.isfinite(measured_us)
    return {
        "slo": str(slo),
        "bound_us": slo.bound_us,
        "measured_us": round(cast(float, measured_us), 3) if finite else None,  # None if failures fill the percentile
        "met": None if measured_us is None else measured_us <= slo.bound_us,
    }


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
class _Device:
    """What the batches of a run did to the device, added up."""

    batches_by_mode: dict[str, int]
    busy: _Intervals
    decode_gaps_us: ValueCounts  # idle times between two decode batches in a row
    busy_after_decode_us: int  # what the second ones took

    @classmethod
    def of(cls, packed: Packed) -> _Device:
        mode_counts = np.zeros(len(packed.modes), np.int64)
        for columns in packed.batches.parts():
            mode_counts += np.bincount(columns[_MODE], minlength=len(packed.modes))
        decode = next((i for i, mode in enumerate(packed.modes) if mode in ("decode", "verify")), -1)
        gaps_us, busy_after_us = ValueCountsBuilder(), 0
        busy: list[_Intervals] = []
        before_us, decoded = np.empty(0, np.int64), np.empty(0, np.bool_)  # end and kind of the last batch before these
        for mode, started_us, finished_us in _by_start(packed.batches):
            busy.append(_Intervals.union(started_us, finished_us))
            ends_us, decodes = np.append(before_us, finished_us), np.append(decoded, mode == decode)
            begins_us = started_us[1 - len(before_us) :]
            both = decodes[1:] & decodes[:-1]
            gaps_us.add(np.maximum(begins_us - ends_us[:-1], 0)[both])
            busy_after_us += int((finished_us - started_us)[1 - len(before_us) :][both].sum())
            before_us, decoded = ends_us[-1:], decodes[-1:]
        starts = [np.empty(0, np.int64), *(part.starts for part in busy)]
        stops = [np.empty(0, np.int64), *(part.stops for part in busy)]
        return cls(
            batches_by_mode=dict(sorted(zip(packed.modes, mode_counts.tolist(), strict=True))),
            busy=_Intervals.union(np.concatenate(starts), np.concatenate(stops)),
            decode_gaps_us=gaps_us.build(),
            busy_after_decode_us=busy_after_us,
        )


def _at_work(requests: Requests, last_us: int) -> _Intervals:
    """When at least one request was open; those that never ended are so until `last_us`."""
    return _Intervals.union(requests.arrival_us, np.where(requests.ended_us < 0, last_us, requests.ended_us))


def at_work_us(run: RunData) -> int:
    """For how long at least one request was open."""
    return _at_work(run.requests, run.span_us[1]).total_us()


def decode_gaps_us(run: RunData) -> tuple[ValueCounts, int]:
    """Idle times of one device between two decode batches in a row, and the time that the second ones took."""
    device = _Device.of(run.packed)
    return device.decode_gaps_us, device.busy_after_decode_us


def _by_start(batches: PackedRows) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """Mode, start and end of the batches whose times are known, by start: part by part if that is their order."""

    def measured() -> Iterator[tuple[Int64s, Int64s, Int64s]]:
        for columns in batches.parts():
            mode, started_us, finished_us = columns[_MODE], columns[_STARTED], columns[_FINISHED]
            known = finished_us >= 0
            if known.any():
                yield mode[known], started_us[known], finished_us[known]

    latest_us = -1
    for _, started_us, _ in measured():
        if started_us[0] < latest_us or (np.diff(started_us) < 0).any():
            break
        latest_us = int(started_us[-1])
    else:
        yield from measured()
        return
    mode, started_us, finished_us = (np.concatenate(column) for column in zip(*measured(), strict=True))
    order = np.argsort(started_us, kind="stable")
    yield mode[order], started_us[order], finished_us[order]


LEVELS = ("waiting", "running", "used_pages", "cached_pages")


@dataclass(frozen=True, slots=True, eq=False)
class _Gauges:
    """Levels over time: each holds from its report to the next. Before the first it is 0; without one, unknown."""

    edges_us: Int64s  # moments that the series is cut at, from the beginning of the run to its end
    span_us: tuple[int, int]
    areas: dict[str, Float64s]  # of each level: level x time up to each edge
    maxima: dict[str, int | None]

    @classmethod
    def of(cls, reports: PackedRows, kv_pages: int | None, edges_us: Int64s, span_us: tuple[int, int]) -> _Gauges:
        known = [level for level in LEVELS if len(reports) and (kv_pages is not None or level != "used_pages")]
        areas = {
            level: np.zeros(len(edges_us)) if level in known else np.full(len(edges_us), np.nan) for level in LEVELS
        }
        maxima: dict[str, int | None] = dict.fromkeys(LEVELS)
        so_far = dict.fromkeys(known, 0.0)
        parts = reports.parts()
        part = next(parts, None)
        while part is not None:
            following = next(parts, None)
            time_us, waiting, running, free_pages, cached_pages = part
            until_us = int(following[0][0]) if following else max(span_us[1], int(time_us[-1]))
            levels = {"waiting": waiting, "running": running, "cached_pages": cached_pages}
            if kv_pages is not None:
                levels["used_pages"] = kv_pages - free_pages - cached_pages
            knots_us = np.append(time_us, until_us)
            first = np.searchsorted(edges_us, time_us[0])
            last = np.searchsorted(edges_us, until_us) if following else len(edges_us)
            for name in known:
                steps = levels[name].astype(np.float64) * np.diff(knots_us)
                area = np.cumsum(np.append(so_far[name], steps))
                so_far[name] = float(area[-1])
                areas[name][first:last] = np.interp(edges_us[first:last], knots_us, area)
                peak, before = int(levels[name].max()), maxima[name]
                maxima[name] = peak if before is None else max(peak, before)
            part = following
        return cls(edges_us, span_us, areas, maxima)

    def means(self, level: str) -> Float64s:
        """Mean of a level between every two edges, by time; NaN without reports."""
        means: Float64s = np.diff(self.areas[level]) / np.diff(self.edges_us)
        return means

    def mean(self, level: str) -> float | None:
        """Mean over the whole run."""
        start_us, stop_us = self.span_us
        if stop_us <= start_us:
            return None
        area = self.areas[level]
        return _number((area[-1] - area[0]) / (stop_us - start_us))

    def max(self, level: str) -> int | None:
        return self.maxima[level]

    def describe_kv(self, kv_pages: int | None) -> Summary:
        peak, mean = self.max("used_pages"), self.mean("used_pages")
        return {
            "pages": kv_pages,
            "used_pages_mean": mean,
            "used_pages_max": peak,
            "used_share_mean": _ratio(mean, kv_pages),
            "used_share_max": _ratio(peak, kv_pages),
            "cached_pages_mean": self.mean("cached_pages"),
            "cached_pages_max": self.max("cached_pages"),
        }


def _edges_us(span_us: tuple[int, int]) -> Int64s:
    """The moments at which the spans of the series begin, and the one at which the last ends."""
    start_us, stop_us = span_us[0], max(span_us[1], span_us[0] + 1)
    width_us = -(-(stop_us - start_us) // BINS_MAX)
    return np.append(np.arange(start_us, stop_us, width_us), stop_us).astype(np.int64)


def _make_series(
    edges_us: Int64s, gauges: _Gauges, messages: PackedRows, batches: PackedRows, busy: _Intervals
) -> Series:
    bins, widths_us = len(edges_us) - 1, np.diff(edges_us)

    def add_up(time_us: Int64s, amounts: Int64s) -> Int64s:
        indices = np.clip((time_us - edges_us[0]) // widths_us[0], 0, bins - 1)  # the very end belongs to the last one
        return np.bincount(indices, weights=amounts, minlength=bins).astype(np.int64)

    prefill_tokens, decode_tokens, output_tokens = (np.zeros(bins, np.int64) for _ in range(3))
    for columns in batches.parts():
        part = dict(zip(batches.names, columns, strict=True))
        ended_us = np.where(part["finished_us"] >= 0, part["finished_us"], part["launched_us"])
        prefill_tokens += add_up(ended_us, part["prefill_tokens"])
        decode_tokens += add_up(ended_us, part["new_tokens"] - part["prefill_tokens"])
    for time_us, new_tokens in messages.parts():
        output_tokens += add_up(time_us, new_tokens)
    return Series(
        t_us=edges_us[:-1],
        waiting=gauges.means("waiting"),
        running=gauges.means("running"),
        kv_used_pages=gauges.means("used_pages"),
        kv_cached_pages=gauges.means("cached_pages"),
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        gpu_busy_fraction=np.diff(busy.covered_us(edges_us)) / widths_us,
        output_tokens_per_s=output_tokens / widths_us * 1e6,
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


def _objects(values: Sequence[str]) -> Objects:
    return np.array(values, np.object_)


def _texts(values: Sequence[str]) -> Texts:
    return np.array(values, np.dtypes.StringDType())


class _Codes(dict[str, int]):
    """A number for every text, given out when it is first asked for."""

    def __missing__(self, text: str) -> int:
        self[text] = code = len(self)
        return code


def _coded(column: Int64s, names: Sequence[str], codes: _Codes) -> Int64s:
    """A column of places in `names` as one of `codes`, given out in the order in which they come."""
    _, first = np.unique(column, return_index=True)
    for at in np.sort(first).tolist():
        codes[names[column[at]]]
    return np.array([codes.get(name, -1) for name in names], np.int64)[column]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 6)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(part / whole, 6)


def _is_rejection(reason: str) -> bool:
    return reason.startswith("rejected_")


def _unknown(request_id: RequestId) -> str:
    return (
        f"request {request_id} acts but never arrived, or has ended\n"
        "hint: fold a journal from its first record, each record once"
    )
