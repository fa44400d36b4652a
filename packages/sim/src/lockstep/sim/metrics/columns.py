"""Columns of a measured run: requests, levels over time, batches, CPU intervals; one array per field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import (
    Int64s,
)

Float64s = NDArray[np.float64]
Rows = NDArray[Any]  # unsigned integers: indices of requests
Bools = NDArray[np.bool_]
Objects = NDArray[np.object_]  # references to texts; equal texts share one object
Texts = NDArray[Any]  # numpy's StringDType: 16 bytes for a short text; an element is a str
Summary = dict[str, Any]
"""Nested dicts of str, int, float, bool and None, ready for JSON without NaN. None means that nothing was measured."""
COMPLETED = ("length", "stop", "text_stop", "grammar", "computed")
"""Finish reasons of requests with a complete answer. Latencies and throughput are those of completed requests."""
FAILED = (
    "", "timeout", "out_of_kv", "error", "invalid", "rejected_queue_full", "rejected_draining", "rejected_deadline",
)  # fmt: skip
"""Finish and rejection reasons for which the service failed; "" is a request still open at the end.

Requests that the client cancelled (`cancelled`) and invalid requests (`rejected_too_long`, `rejected_bad_request`, ...)
are neither completed nor failed.
"""


class Columns:
    """Arrays of equal length, one per field. A row is the values at one index."""

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, in order of declaration, without copies."""
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}


@dataclass(frozen=True, eq=False)
class Requests(Columns):
    """One row per request, in order of arrival. Values of what did not happen are -1 in integers and NaN in floats."""

    request_id: Int64s
    arrival_us: Int64s
    queue_us: Int64s  # arrival to first admission
    ttft_us: Int64s
    tpot_us: Float64s
    itl_us_max: Float64s  # the longest gap of the request
    e2e_us: Int64s  # of finished requests with any reason; -1 for rejected ones
    ended_us: Int64s  # time of finish or rejection
    prompt_tokens: Int64s
    cached_tokens: Int64s  # prompt tokens found in the radix cache at the first admission
    output_tokens: Int64s  # tokens delivered to the client
    retractions: Int64s
    finish_reason: Objects  # a FinishReason, "rejected_" plus a RejectReason, or "" while unfinished
    label: Texts
    tenant: Objects

    @cached_property
    def completed(self) -> Bools:
        """Return which requests got their complete answer. Read-only."""
        return self._ended_by(COMPLETED)

    @cached_property
    def failed(self) -> Bools:
        """Return which requests the service failed to answer; see FAILED. Read-only."""
        return self._ended_by(FAILED)

    @cached_property
    def invalid(self) -> Bools:
        """Return which requests were rejected as invalid, such as prompts beyond the context. Read-only."""
        reasons = [reason for reason in set(self.finish_reason.tolist()) if reason.startswith("rejected_")]
        return self._ended_by([reason for reason in reasons if reason not in FAILED])

    def _ended_by(self, reasons: Sequence[str]) -> Bools:
        matches = np.isin(self.finish_reason, reasons)
        matches.flags.writeable = False
        return matches


@dataclass(frozen=True, eq=False)
class Series(Columns):
    """At most BINS_MAX equal spans of time; the last may be shorter. Levels are means over a span, weighted by time."""

    t_us: Int64s  # start of the span
    waiting: Float64s  # requests; like the next three columns NaN if the host reported no gauges
    running: Float64s
    kv_used_pages: Float64s  # held by requests; NaN also if the size of the pool is unknown
    kv_cached_pages: Float64s  # held by the radix cache alone
    prefill_tokens: Int64s  # computed by batches that ended in the span
    decode_tokens: Int64s
    gpu_busy_fraction: Float64s
    output_tokens_per_s: Float64s  # delivered tokens of completed and other requests


@dataclass(frozen=True, eq=False)
class Batches(Columns):
    """One row per launched batch, in launch order. Times that the host has not reported are -1."""

    batch_id: Int64s
    mode: Objects
    launched_us: Int64s
    started_us: Int64s
    finished_us: Int64s
    rows: Int64s
    new_tokens: Int64s
    prefill_tokens: Int64s  # part of new_tokens that belongs to extending rows
    kv_tokens: Int64s  # sum of the context lengths, which attention reads


BATCH_COLUMNS = tuple(field.name for field in fields(Batches))
BATCH_ID, MODE, LAUNCHED, STARTED, FINISHED = map(
    BATCH_COLUMNS.index, ("batch_id", "mode", "launched_us", "started_us", "finished_us")
)
CPU_COLUMNS = ("start_us", "took_us", "work")
WORK = CPU_COLUMNS.index("work")


@dataclass(frozen=True, eq=False)
class CpuIntervals(Columns):
    """Intervals of CPU work of the scheduler, as the host reported them."""

    start_us: Int64s
    stop_us: Int64s
    what: Objects


def objects(values: Sequence[str]) -> Objects:
    return np.array(values, np.object_)


def texts(values: Sequence[str]) -> Texts:
    return np.array(values, np.dtypes.StringDType())
