"""The bottleneck of a run, found from its summary: a name and the numbers that support it.

    found = bottleneck(metrics)
    found.name, found.evidence           # "KV memory", "142 retractions, 38 requests waiting on average"

Each rule is one line of `bottleneck`, and the first match wins. The thresholds only choose a description: nothing is
decided by them. If two resources are short, the one that is easier to observe is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WAITING_MANY = 1.0  # mean requests in the waiting queue, from which a queue exists
BUBBLE_SHARE = 0.10  # share of the time with work in which the GPU was idle
KV_FULL_SHARE = 0.95  # share of the pool held by requests

STAGES_BUSY_SHARE = 0.8
"""Busy share of the time with a batch in the pipeline, below which stages wait for tokens, not tokens for stages."""
KV_REASONS = ("kv_budget", "pages")
LIMIT_REASONS = ("running_limit", "rows", "microbatch")


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The bottleneck of a run and its evidence."""

    # "KV memory", "GPU compute", "limit on running requests", "pipeline bubbles", "CPU", "none"; "unknown" without
    # numbers
    name: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}" if self.evidence else self.name


def bottleneck(summary: Mapping[str, Any]) -> Bottleneck:
    """Return the bottleneck of a run. `summary` is that of RunData, or metrics.json."""
    scheduler, device = summary["scheduler"], summary["device"]
    waiting, busy, bubbles = scheduler["waiting_mean"], device["busy_fraction"], device["bubble_share"]
    kv_peak, retractions = summary["kv"]["used_share_max"], scheduler["retractions"]
    if busy is None or not summary["requests"]["arrived"]:
        return Bottleneck("unknown", "nothing was measured on the device")

    deferred = scheduler["admissions_deferred_by_reason"]
    for_kv, for_limit = (_count(deferred, reasons) for reasons in (KV_REASONS, LIMIT_REASONS))
    others = sum(deferred.values()) - for_kv - for_limit
    turned_away = _count(summary["requests"]["by_reject_reason"], ("queue_full", "deadline"))
    is_queue = (waiting is not None and waiting >= WAITING_MANY) or turned_away > 0
    line = f"{_number(waiting)} requests waiting on average" if waiting is not None else "requests wait"
    peak = f"KV pages at most {_percent(kv_peak)} held" if kv_peak is not None else ""
    is_full = kv_peak is not None and kv_peak >= KV_FULL_SHARE
    running = f"{scheduler['running_max']:,} running at most" if scheduler["running_max"] is not None else ""
    retracted = f"{retractions:,} retraction{'s' * (retractions != 1)}"

    if is_queue and (for_kv > max(for_limit, others) or (retractions and is_full)):
        return Bottleneck("KV memory", _listed(line, peak, retracted))
    if is_queue and for_limit >= max(others, 1):
        return Bottleneck("limit on running requests", _listed(line, running, f"GPU busy {_percent(busy)}"))
    stages_busy = device.get("pipeline", {}).get("stage_busy_share")
    if is_queue and stages_busy is not None and stages_busy < STAGES_BUSY_SHARE:
        return Bottleneck(
            "pipeline bubbles", _listed(line, f"stages busy {_percent(stages_busy)} of the time with work")
        )
    if is_queue:
        return Bottleneck("GPU compute", _listed(line, f"GPU busy {_percent(busy)}", peak))
    if retractions:
        return Bottleneck("KV memory", _listed(retracted, peak))
    if bubbles is not None and bubbles > BUBBLE_SHARE:
        return Bottleneck("CPU", f"the GPU was idle {_percent(bubbles)} of the time with work there")
    waits = "" if waiting is None else f"hardly any request waits ({_number(waiting)} on average)"
    return Bottleneck("none", _listed(waits, f"GPU busy {_percent(busy)}"))


def _count(counts: Mapping[str, int], names: tuple[str, ...]) -> int:
    return sum(counts.get(name, 0) for name in names)


def _listed(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
