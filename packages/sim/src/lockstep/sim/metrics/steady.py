"""Rates of a service in its steady state: without the time in which it fills, and the time after the last arrival.

The makespan of a run ends with its longest answer. So completed requests divided by the makespan is below the rate of a
service that goes on, and the more so the shorter the run. Here the rates are those of the arrivals, times the share
that the service kept up with:

    rate = requests / (first to last arrival)  x  done within the window / arrived within the window

The window begins when the first answers are complete, and ends with the last arrival. The second factor is 1 where as
much ends as arrives, and less where a queue grows. As a ratio of two counts over the same window it hardly depends on
how many requests happen to arrive in the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.sim.metrics.columns import Bools, Float64s, Requests, Summary
from lockstep.sim.metrics.latency import meets_every
from lockstep.sim.metrics.slo import Slo

FILLING_PERCENTILE = 90  # of the times from arrival to end: the time after which the service counts as filled
FILLING_SHARE_MAX = 0.8  # of the time of the arrivals; a run that fills for longer has no steady state
REQUESTS_MIN = 10  # in the window; with fewer the ratio is mostly chance


def describe_steady(requests: Requests, slos: Sequence[Slo]) -> Summary:
    """Return rates per second in the steady state; empty without one: if all requests arrive at once, or too few after
    the service has filled.

    Returns: window_us, the length of the window, and requests_per_s, output_tokens_per_s, total_tokens_per_s of
        completed requests, and goodput_requests_per_s of those within every SLO's bound.
    """
    window = _window_us(requests)
    if window is None:
        return {}
    start_us, stop_us, span_us = window
    arrived = (requests.arrival_us >= start_us) & (requests.arrival_us < stop_us)
    ended = requests.completed & (requests.ended_us >= start_us) & (requests.ended_us < stop_us)
    if arrived.sum() < REQUESTS_MIN:
        return {}
    ones = np.ones(len(arrived))
    outputs = requests.output_tokens.astype(np.float64)
    tokens = outputs + requests.prompt_tokens
    share_in_window = _share_in_window(requests, start_us, stop_us)

    def per_s(weights: Float64s, within: Float64s | Bools, counted: Bools) -> float | None:
        """Return the rate of `weights`, of which the part `within` was done in the window."""
        offered = float((weights * (arrived & counted)).sum())
        done = float((weights * within * counted).sum())
        total = float((weights * counted).sum())
        return round(total / span_us * 1e6 * done / offered, 6) if offered else (0.0 if not done else None)

    done = requests.completed
    good = meets_every(slos, requests) if slos else None
    rates = {
        "window_us": stop_us - start_us,
        "requests_per_s": per_s(ones, ended, done),
        "output_tokens_per_s": per_s(outputs, share_in_window, done),
        "total_tokens_per_s": per_s(tokens, share_in_window, done),
        "goodput_requests_per_s": None if good is None else per_s(ones, ended, good),
    }
    return {name: rate for name, rate in rates.items() if rate is not None}


def _window_us(requests: Requests) -> tuple[int, int, float] | None:
    """Return start and stop of the window, and the time that the arrivals stand for; None without such a time."""
    done = requests.completed
    if len(requests.arrival_us) < REQUESTS_MIN or not done.any():
        return None
    first_us, last_us = int(requests.arrival_us.min()), int(requests.arrival_us.max())
    if last_us == first_us:
        return None
    filling_us = float(np.percentile(requests.ended_us[done] - requests.arrival_us[done], FILLING_PERCENTILE))
    if filling_us > FILLING_SHARE_MAX * (last_us - first_us):
        return None
    start_us = first_us + round(filling_us)
    count = len(requests.arrival_us)
    return start_us, last_us, (last_us - first_us) * count / (count - 1)  # n arrivals have n - 1 gaps


def _share_in_window(requests: Requests, start_us: int, stop_us: int) -> Float64s:
    """Return the share of each answer that was sent within the window, its tokens taken as evenly spread over time."""
    first_us = np.where(requests.ttft_us < 0, requests.ended_us, requests.arrival_us + requests.ttft_us)
    lasts_us = requests.ended_us - first_us
    inside_us = np.minimum(requests.ended_us, stop_us) - np.maximum(first_us, start_us)
    at_once = (requests.ended_us >= start_us) & (requests.ended_us < stop_us)
    spread = np.clip(inside_us / np.maximum(lasts_us, 1), 0.0, 1.0)
    shares: Float64s = np.where(lasts_us > 0, spread, at_once.astype(np.float64))
    return shares
