"""Load of the prefill and the decode side of a cluster with separate engines.

Before its first token a request waits for pages of the decode engine, for its turn on the prefill engine, for the
computation of its prompt, and for the link. These four times add up to its TTFT. The one with the largest mean limits
prompts.

    early               pages | queue | compute | link
    prefill_complete            queue | compute | pages | link
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.metrics.run_data import RunData

DEVICE_FULL = 0.9  # busy share of the devices from which they are the bottleneck
KV_FULL = 0.97  # peak share of the pool held by requests from which memory is the bottleneck


def sides_of(run: ClusterRun) -> dict[str, dict[str, Any]]:
    """Return `prefill`, `transfer` and `decode`, with times in us. Means are over requests that reached the phase."""
    makespan_us = run.data.summary["throughput"]["makespan_us"]
    datas = {role: [one.data for one in run.engines if one.setup.config.role == role] for role in ("prefill", "decode")}
    sides = {role: _work(found, makespan_us) for role, found in datas.items()}
    queue_us, computed_us = (_mean(datas["prefill"], name) for name in ("queue_us", "ttft_us"))
    ttft_us = _mean([run.data], "ttft_us")
    transfers = run.data.summary["transfers"]
    link_us = transfers["transfer_us_mean"] or 0.0
    if run.setup.engines[0].config.transfer_allocation == "early":
        pages_us = min(transfers["page_wait_us_mean"] or 0.0, queue_us)
        queue_us -= pages_us
        computed_us -= pages_us
    else:
        pages_us = max(ttft_us - computed_us - link_us, 0.0)
    sides["prefill"] |= {"queue_us_mean": round(queue_us, 3), "compute_us_mean": round(computed_us - queue_us, 3)}
    sides["decode"] |= {"page_wait_us_mean": round(pages_us, 3), "page_wait_us_p99": transfers["page_wait_us_p99"]}
    names = ("transfer_us_mean", "transfer_us_p99", "link_busy_share", "transferred_bytes", "transfers_failed")
    return {
        "prefill": sides["prefill"],
        "transfer": {name: transfers[name] for name in names},
        "decode": sides["decode"],
    }


def _work(datas: Sequence[RunData], makespan_us: int | None) -> dict[str, Any]:
    """Return the load of the engines of one role: the mean of busy shares, the greatest of peak values."""
    parts = [data.summary for data in datas]
    busy_us = sum(part["device"]["busy_us"] or 0 for part in parts)
    return {
        "engines": len(parts),
        "busy_share": round(min(busy_us / (makespan_us * len(parts)), 1.0), 6) if makespan_us else None,
        "kv_used_share_max": _greatest(part["kv"]["used_share_max"] for part in parts),
        "running_max": _greatest(part["scheduler"]["running_max"] for part in parts),
        "retractions": sum(part["scheduler"]["retractions"] for part in parts),
    }


def _greatest(values: Any) -> Any:
    return max((value for value in values if value is not None), default=None)


def _mean(datas: Sequence[RunData], name: str) -> float:
    columns: list[NDArray[np.int64]] = [getattr(data.requests, name) for data in datas]
    values = np.concatenate(columns)
    values = values[values >= 0]
    return float(values.mean()) if len(values) else 0.0


def limit_of_sides(
    sides: Mapping[str, Mapping[str, Any]], metric: str, latency: Mapping[str, float | None], rows_max: int
) -> str:
    """Return the side and the resource that are exhausted when an SLO on this metric is missed.

    Args:
        latency: part of the summary. A bound on `e2e` depends on prompts if TTFT is at least half of the mean.
        rows_max: `max_running_requests` of a decode engine.
    """
    e2e_us, ttft_us = latency["e2e_us_mean"] or 0.0, latency["ttft_us_mean"] or 0.0
    prefill, transfer, decode = sides["prefill"], sides["transfer"], sides["decode"]
    if metric == "ttft" or (metric == "e2e" and ttft_us >= e2e_us / 2):
        parts = {
            "decode: KV memory": decode["page_wait_us_mean"],
            "transfer": transfer["transfer_us_mean"] or 0.0,
            _prefill_limit(prefill): prefill["queue_us_mean"] + prefill["compute_us_mean"],
        }
        return max(parts, key=lambda name: parts[name])
    if (decode["kv_used_share_max"] or 0.0) >= KV_FULL or decode["retractions"]:
        return "decode: KV memory"
    if (decode["running_max"] or 0) >= rows_max:
        return "decode: max_running_requests"
    return "decode: bandwidth"


def _prefill_limit(prefill: Mapping[str, Any]) -> str:
    if (prefill["kv_used_share_max"] or 0.0) >= KV_FULL or prefill["retractions"]:
        return "prefill: KV memory"
    if (prefill["busy_share"] or 0.0) >= DEVICE_FULL or prefill["compute_us_mean"] >= prefill["queue_us_mean"]:
        return "prefill: compute"
    return "prefill: bursts, queue"
