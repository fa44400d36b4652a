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
Objects = NDArray[np.object_]  # references to texts, which equal ones share
Texts = NDArray[Any]  # of numpy's StringDType: 16 bytes for a short one; an element is a str
Summary = dict[str, Any]
"""Nested dicts of str, int, float, bool and None: ready for JSON, never NaN; None is "there was nothing to measure"."""
COMPLETED = ("length", "stop", "text_stop", "grammar", "computed")
"""The request got its whole answer. Latencies and throughput are those of completed requests."""
FAILED = (
    "", "timeout", "out_of_kv", "error", "invalid", "rejected_queue_full", "rejected_draining", "rejected_deadline",
)  # fmt: skip
"""The service did not deliver; "" is a request still open at the end. Neither completed nor failed are those whose
client left (`cancelled`) or asked for what cannot be (`rejected_too_long`, `rejected_bad_request`, ...)."""


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
        """Whether each request got its whole answer. Read-only."""
        return self._ended_by(COMPLETED)

    @cached_property
    def failed(self) -> Bools:
        """Whether the service failed each request; see FAILED. Read-only."""
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
BATCH_ID, MODE, LAUNCHED, STARTED, FINISHED = map(
    BATCH_COLUMNS.index, ("batch_id", "mode", "launched_us", "started_us", "finished_us")
)
CPU_COLUMNS = ("start_us", "took_us", "work")
WORK = CPU_COLUMNS.index("work")


@dataclass(frozen=True, eq=False)
class CpuIntervals(Columns):
    """Intervals of work of the scheduler's CPU, as the host reported them."""

    start_us: Int64s
    stop_us: Int64s
    what: Objects


def objects(values: Sequence[str]) -> Objects:
    return np.array(values, np.object_)


def texts(values: Sequence[str]) -> Texts:
    return np.array(values, np.dtypes.StringDType())
