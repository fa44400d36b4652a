"""Definitions of the latencies, and of meeting an SLO by requests and by runs. Reasons: docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lockstep.core.contract.commands import (
    Int32s,
    Int64s,
)
from lockstep.sim.metrics.columns import Bools, Float64s, Requests
from lockstep.sim.metrics.slo import Slo, SloMetric
from lockstep.sim.metrics.value_counts import ValueCounts


def ttft_us(arrival_us: Int64s, first_us: Int64s) -> Int64s:
    """Return the time from arrival to the first message with output; -1 if there is none."""
    return np.where(first_us < 0, -1, first_us - arrival_us)


def tpot_us(first_us: Int64s, last_us: Int64s, output_tokens: Int64s) -> Float64s:
    """Return the time per output token, (last - first) / (n - 1). NaN if the answer came in one message."""
    tokens = np.where(last_us > first_us, output_tokens - 1, 0)
    tpot: Float64s = np.divide(last_us - first_us, tokens, out=np.full(len(tokens), np.nan), where=tokens > 0)
    return tpot


def gaps_us(message_us: Int64s, before_us: Int64s, new_tokens: Int64s | Int32s) -> Float64s:
    """Return the inter-token latency of each message: the time since the previous message over the new tokens.

    A message of n tokens after a wait of g stands for n gaps of g / n. NaN for the first message of a request, for
    which `before_us` is -1.
    """
    return np.where(before_us < 0, np.nan, (message_us - before_us) / new_tokens)


def meets_every(slos: Sequence[Slo], requests: Requests) -> Bools:
    """Return which requests completed within every bound. The bound of a percentile applies to each request.

    For ITL the longest gap of the request counts, for a call the end of its last request. A latency that a request does
    not have, such as the TPOT of one token, misses no bound.
    """
    good = requests.completed.copy()
    for slo in slos:
        good &= ~(per_request(slo.metric, requests) > slo.bound_us)
    return good


def measure_slo(slo: Slo, requests: Requests, itl_us: ValueCounts) -> float | None:
    """Return the latency that an SLO bounds, in us; see `RunData.measured_us`."""
    failures = int(requests.failed.sum())
    if slo.metric == "itl" and slo.percentile is not None:
        values, failures = itl_us, 0  # over gaps instead of requests: a failed request has none
    elif slo.metric == "call":
        of_calls = call_us(requests)[lasts_of_calls(requests)]
        failures = int(np.isinf(of_calls).sum())
        values = ValueCounts.of(of_calls[np.isfinite(of_calls)])
    else:
        known = per_request(slo.metric, requests)[requests.completed]
        values = ValueCounts.of(known[~np.isnan(known)])
    count = values.size + failures
    if count == 0:
        return None
    percentile = 100.0 if slo.percentile is None else slo.percentile
    rank = (count - 1) * percentile / 100  # as in numpy's "linear"; failures rank above the last value
    if math.ceil(rank) >= values.size:
        return math.inf
    low, high = values.at((math.floor(rank), math.ceil(rank))).tolist()
    return float(low + (high - low) * (rank - math.floor(rank)))


def _calls(requests: Requests) -> Int64s:
    """Return the call of each request, numbered from 0: requests of a tenant that arrive at the same moment are one."""
    tenants = np.unique(requests.tenant.astype(str), return_inverse=True)[1]
    both = np.stack((requests.arrival_us, tenants), axis=1)
    found: Int64s = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
    return found


def lasts_of_calls(requests: Requests) -> Bools:
    """Return one request of each call: its last, in the order of requests."""
    numbers = _calls(requests)
    last = np.zeros(len(numbers), np.int64)
    last[numbers] = np.arange(len(numbers))  # the last assignment stays
    chosen = np.zeros(len(numbers), np.bool_)
    chosen[last[numbers]] = True
    return chosen


def call_us(requests: Requests) -> Float64s:
    """Return the time of each request's call in us, from arrival to the end of its last request.

    Infinite if a request of the call failed or has not ended, NaN if none is complete.
    """
    numbers = _calls(requests)
    slowest = np.full(len(numbers), -1.0)
    np.maximum.at(slowest, numbers, np.where(requests.completed, requests.e2e_us, -1.0))
    slowest[slowest < 0] = np.nan
    slowest[numbers[requests.failed]] = np.inf
    values: Float64s = slowest[numbers]
    return values


def per_request(metric: SloMetric, requests: Requests) -> Float64s:
    """Return one value per request, in us; NaN if there is none."""
    if metric == "call":
        return call_us(requests)
    if metric == "tpot":
        return requests.tpot_us
    if metric == "itl":
        return requests.itl_us_max
    column = requests.ttft_us if metric == "ttft" else requests.e2e_us
    return np.where(column < 0, np.nan, column)
