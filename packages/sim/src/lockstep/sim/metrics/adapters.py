"""Counts of LoRA adapters: requests that ran with an adapter, loads, waits for a load. See docs/metrics.md."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from lockstep.core.contract.commands import LoadAdapter
from lockstep.core.contract.events import AdapterLoaded, RequestId

PERCENTILES = (50, 99)


class AdapterCounts:
    """Counts over all requests; waits only of requests after the warm-up. Every journal contains what they need."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by adapter
        self.loads = 0
        self.loads_failed = 0
        self._loading: dict[tuple[str, int], int] = {}  # (adapter, version) -> start of the load, us
        self._load_us = array("q")
        self._waiting: dict[RequestId, int] = {}  # request -> start of the wait, us
        self._waits_us = array("q")

    def ordered(self, command: LoadAdapter, now_us: int) -> None:
        """Count the start of a load."""
        self.loads += 1
        self._loading[command.adapter, command.version] = now_us

    def loaded(self, event: AdapterLoaded) -> None:
        """Count the end of a load. The duration of a load that began before a restart is not recorded."""
        began_us = self._loading.pop((event.adapter, event.version), None)
        self.loads_failed += bool(event.error)
        if began_us is not None and not event.error:
            self._load_us.append(event.time_us - began_us)

    def deferred(self, request_id: RequestId, now_us: int) -> None:
        """Record that a request could have started, except that its adapter is not loaded."""
        self._waiting.setdefault(request_id, now_us)

    def went_on(self, request_id: RequestId, now_us: int, *, is_measured: bool) -> None:
        """Record that a request was admitted or ended, which ends its wait for an adapter."""
        since_us = self._waiting.pop(request_id, None)
        if since_us is not None and is_measured:
            self._waits_us.append(now_us - since_us)

    def describe(self, evictions: int) -> dict[str, Any]:
        """Return the counts for `adapters` of metrics.json."""
        load_us, waits_us = np.array(self._load_us, np.int64), np.array(self._waits_us, np.int64)
        return {
            "adapters": len(self.requests),
            "requests": self.requests.total(),
            "loads": self.loads,
            "loads_failed": self.loads_failed,
            "evictions": evictions,
            "load_us_mean": round(float(load_us.mean()), 1) if len(load_us) else None,
            "load_us_max": int(load_us.max()) if len(load_us) else None,
            "requests_waited": len(waits_us),
            "wait_us_mean": round(float(waits_us.mean()), 1) if len(waits_us) else None,
            **{
                f"wait_us_p{p}": round(float(np.percentile(waits_us, p)), 1) if len(waits_us) else None
                for p in PERCENTILES
            },
            "wait_us_max": int(waits_us.max()) if len(waits_us) else None,
        }
