"""Rows and requests that the fast path measures and passes to a MetricsFold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lockstep.core.contract.commands import (
    Int32s,
    Int64s,
)
from lockstep.sim.metrics.columns import Bools, Float64s


class MeasuredRows(NamedTuple):
    """Rows that replace calls of `observe`, `gauge` and `cpu_interval` in a run on the fast path."""

    batches: Int64s  # [batches, len(BATCH_COLUMNS)], settled batches; modes are indices into `modes`
    modes: tuple[str, ...]
    gauges: Int64s  # [gauges, 5], the arguments of `gauge`
    cpu: Int64s  # [intervals, len(CPU_COLUMNS)]; works are indices into `works`
    works: tuple[str, ...]
    messages: Int64s  # [messages, 2]: time in us, tokens
    itl_us: Int64s  # [lengths, 2]: gaps between tokens in us, and how many had this length


class MeasuredRequests(NamedTuple):
    """Requests of a run on the fast path, one row each in order of arrival, and counts at the end of the run."""

    request_id: Int64s
    arrival_us: Int64s
    prompt_tokens: Int32s
    cached_tokens: Int32s  # at the first admission; -1: not yet
    retractions: Int32s
    admitted_us: Int64s  # -1: not yet, as in all times below
    ended_us: Int64s  # ends by length, or rejection
    rejected: Bools  # whether the prompt was too long
    output_tokens: Int32s
    first_message_us: Int64s
    last_message_us: Int64s
    itl_us_max: Float64s  # NaN without a gap
    labels: Callable[[Int64s], list[str]]  # labels of some rows
    tenants: list[str]
    last_us: int  # time of the last event
    open_batches: Mapping[str, Int64s]  # batches without a result yet, by column; other columns are unknown
    modes: tuple[str, ...]  # modes of the open batches
    evicted_pages: Mapping[str, int]  # by reason
    deferred: Mapping[str, int]  # by reason
    decodes_skipped: int
    retracted: int  # retractions of all requests, for pages
    tokens_discarded: int  # sampled for requests that were retracted before the tokens were delivered
