"""How evenly requests, tokens and time lie over the engines of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sim.metrics.columns import Summary
from lockstep.sim.metrics.summary import greatest, ratio


def balance(engines: Sequence[Summary], weights: Sequence[float], makespan_us: int | None) -> Summary:
    """How evenly the work lay, of each engine's summary and its weight at the router.

    An imbalance is the greatest load per weight of any engine over that of all together: 1 is even, and with all on one
    of equal engines it is their number. `makespan_us` is that of the whole; no engine need be busy from end to end.
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
