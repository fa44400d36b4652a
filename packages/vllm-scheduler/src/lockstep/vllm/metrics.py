"""`lockstep_journal_ended`: a metric that is 1 once an engine no longer writes its journal, by engine.

The engine core has a process of its own, and vLLM's /metrics has the metrics of other processes only if
PROMETHEUS_MULTIPROC_DIR names an empty folder when vLLM starts. vLLM sets it itself if there are several API servers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

NAME = "lockstep_journal_ended"


@cache
def _gauge() -> Any:
    """The gauge of this process; None without prometheus_client, which vLLM requires."""
    try:
        from prometheus_client import Gauge
    except ImportError:
        return None
    text = "1 if the journal of this engine ended early, such as by a full disk, and serving goes on"
    return Gauge(NAME, text, ["engine"], multiprocess_mode="max")


def reported(engine: int, report: Callable[[str], None]) -> Callable[[str], None]:
    """Set the metric of an engine to 0. Returns a function that reports why its journal ended, and sets it to 1."""
    gauge = _gauge()
    if gauge is None:
        return report
    mine = gauge.labels(str(engine))
    mine.set(0)

    def ended(why: str) -> None:
        report(why)
        mine.set(1)

    return ended
