"""Distribution of requests, tokens and busy time over the engines of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sim.metrics.columns import Summary
from lockstep.sim.metrics.summary import greatest, ratio


def balance(engines: Sequence[Summary], weights: Sequence[float], makespan_us: int | None) -> Summary:
    """Return how evenly the work was distributed.

    An imbalance is the greatest load per weight of any engine over the load per weight of all engines together. It is 1
    for an even distribution, and the number of engines if one of several equal engines has all the work.

    Args:
        engines: the summary of each engine.
        weights: the weight of each engine at the router.
        makespan_us: makespan of the whole run. An engine may be busy for a part of it only.
    """
    requests = [float(engine["requests"]["arrived"]) for engine in engines]
    tokens = [
        float(engine["throughput"]["prompt_tokens"] + engine["throughput"]["output_tokens"]) for engine in engines
    ]
    busy = [ratio(engine["device"]["busy_us"] or 0, makespan_us) for engine in engines]
    shares = [min(share, 1.0) for share in busy if share is not None]
    return {
        "requests_imbalance": _imbalance(requests, weights),
        "tokens_imbalance": _imbalance(tokens, weights),
        "busy_share_min": min(shares, default=None),
        "busy_share_max": max(shares, default=None),
        "ttft_us_p99_max": greatest([engine["latency"] for engine in engines], "ttft_us_p99"),
    }


def _imbalance(loads: Sequence[float], weights: Sequence[float]) -> float | None:
    most = max(load / weight for load, weight in zip(loads, weights, strict=True))
    return ratio(most, sum(loads) / sum(weights))
