"""Parts of the summary of a run: statistics of latencies, throughput, CPU time, SLOs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.metrics.columns import Requests, Summary
from lockstep.sim.metrics.latency import measure_slo, meets_every
from lockstep.sim.metrics.packed import Packed
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.metrics.steady import describe_steady
from lockstep.sim.metrics.value_counts import ValueCounts

PERCENTILES = (50, 90, 95, 99)


def makespan(requests: Requests) -> tuple[int, int] | None:
    """Return first arrival and last finish, in us; None if nothing finished. A late rejection prolongs nothing."""
    finished = requests.e2e_us >= 0
    if not finished.any():
        return None
    return int(requests.arrival_us.min()), int(requests.ended_us[finished].max())


def describe(name: str, values: NDArray[Any] | ValueCounts) -> dict[str, float | None]:
    """Return mean, min, percentiles and max of times in us, under names such as `ttft_us_p99`; None without values.

    Percentiles are interpolated between two neighbours (numpy's "linear"), like those of benchmark tools.
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
    """Return the `latency` part of a summary, over completed requests."""
    done = requests.completed

    def known(column: NDArray[Any]) -> NDArray[Any]:
        return column[done & (column >= 0)]  # NaN compares false

    return {
        **describe("queue", known(requests.queue_us)),
        **describe("ttft", known(requests.ttft_us)),
        **describe("itl", itl_us),
        **describe("tpot", known(requests.tpot_us)),
        **describe("e2e", known(requests.e2e_us)),
    }


def describe_throughput(requests: Requests, slos: Sequence[Slo]) -> Summary:
    """Return the `throughput` part of a summary: completed requests and their tokens over the makespan.

    `steady` has the rates without filling and draining, which do not depend on the length of the run.
    """
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
        "goodput_share": None if good is None else ratio(good, int((done | requests.failed).sum())),
        "steady": describe_steady(requests, slos),
    }


def describe_cpu(packed: Packed) -> Summary:
    busy_us = [0] * len(packed.works)
    for _, took_us, work in packed.cpu.parts():
        for code in np.unique(work).tolist():
            busy_us[code] += int(took_us[work == code].sum())
    by_work = dict(sorted(zip(packed.works, busy_us, strict=True)))
    return {"busy_us": sum(busy_us) if by_work else None, "busy_us_by_work": by_work}


def describe_slo(slo: Slo, requests: Requests, itl_us: ValueCounts) -> Summary:
    """Return an entry of the `slos` part of a summary."""
    measured_us = measure_slo(slo, requests, itl_us)
    finite = measured_us is not None and math.isfinite(measured_us)
    return {
        "slo": str(slo),
        "bound_us": slo.bound_us,
        # None if failures reach into the percentile
        "measured_us": round(cast(float, measured_us), 3) if finite else None,
        "met": None if measured_us is None else measured_us <= slo.bound_us,
    }


def number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 6)


def ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(part / whole, 6)


def greatest(parts: Sequence[Summary], name: str) -> Any:
    """Return the greatest known value of a number over the same part of several summaries; None if none is known."""
    return max((part[name] for part in parts if part[name] is not None), default=None)


def is_rejection(reason: str) -> bool:
    return reason.startswith("rejected_")
