"""Rows and requests that the fast path measures itself and hands to a MetricsFold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lockstep.core.contract.commands import (
    Int32s,
    Int64s,
)
from lockstep.sim.metrics.columns import Float64s


class MeasuredRows(NamedTuple):
    """Rows that replace calls of `observe`, `gauge` and `cpu_interval` in a run on the fast path."""

    batches: Int64s  # [batches, len(BATCH_COLUMNS)], settled ones; modes are places in `modes`
    modes: tuple[str, ...]
    gauges: Int64s  # [gauges, 5], as `gauge` takes them
    cpu: Int64s  # [intervals, len(CPU_COLUMNS)]; works are places in `works`
    works: tuple[str, ...]
    messages: Int64s  # [messages, 2]: when, and how many tokens
    itl_us: Int64s  # [gaps], those of requests that completed


class MeasuredRequests(NamedTuple):
    """Requests of a run on the fast path, one row each in order of arrival, and counts known at the end."""

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
    open_batches: Mapping[str, Int64s]  # without a result yet, by name of the column; other columns are unknown
    modes: tuple[str, ...]  # of these
    evicted_pages: Mapping[str, int]  # by reason
    deferred: Mapping[str, int]  # by reason
    decodes_skipped: int
