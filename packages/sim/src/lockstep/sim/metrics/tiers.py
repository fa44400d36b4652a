"""Counts of the cache tiers below the device: tokens found there, bytes moved, waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lockstep.core.contract.commands import (
    CopyToHost,
    LoadFromHost,
    WriteToStorage,
)
from lockstep.core.contract.events import (
    PrefetchFinished,
    RequestAdmitted,
    TierOperationEnded,
)
from lockstep.sim.metrics.columns import Summary

BLOCKS = {
    "window": "window_pages",
    "state": "checkpoints",
    "host window": "host_window_pages",
    "host state": "host_checkpoints",
}
BlockUse = CopyToHost | LoadFromHost | WriteToStorage


class TierCounts:
    """Counts of the cache tiers below the device: docs/metrics.md, "Cache tiers"."""

    def __init__(self, page_bytes: int, block_bytes: Mapping[str, int]) -> None:
        self._page_bytes, self._block_bytes = page_bytes, block_bytes
        self._block_bytes_moving: dict[int, int] = {}  # operation -> bytes of its window and state blocks, in flight
        self._block_bytes_moved: Counter[str] = Counter()
        self._moves: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._host_tokens = 0
        self._storage_tokens = 0
        self._waited = 0
        self._wait_us = 0

    def admitted(self, event: RequestAdmitted) -> None:
        """Count a first admission."""
        self._host_tokens += event.host_tokens - event.storage_tokens
        self._storage_tokens += event.storage_tokens
        self._waited += event.load_wait_us > 0
        self._wait_us += event.load_wait_us

    def began(self, move: BlockUse) -> None:
        """Record an operation with window or state blocks."""
        number = move.write_id if isinstance(move, WriteToStorage) else move.copy_id
        self._block_bytes_moving[number] = sum(len(one.host) * self._block_bytes[one.kind] for one in move.blocks)

    def fetched(self, event: PrefetchFinished) -> None:
        """Record the window and state blocks that a prefetch brought."""
        beside = sum(len(one.indices) * self._block_bytes[one.kind] for one in event.blocks)
        self._block_bytes_moving[event.prefetch_id] = beside

    def learn(self, event: TierOperationEnded) -> None:
        """Count the end of an operation."""
        self._moves[f"{event.kind} {event.outcome}"] += 1
        self._pages[event.kind] += event.pages_kept
        beside = self._block_bytes_moving.pop(event.operation, 0)
        came = event.outcome == "done" or (event.kind == "prefetch" and event.outcome not in ("void", "orphaned"))
        self._block_bytes_moved[event.kind] += beside if came else 0

    def describe(self, host_pages_evicted: int) -> Summary:
        """Return the counts for `cache` of metrics.json."""
        return {
            "prompt_tokens_from_host": self._host_tokens,
            "prompt_tokens_from_storage": self._storage_tokens,
            "moves": dict(sorted(self._moves.items())),
            "bytes_moved": {
                kind: pages * self._page_bytes + self._block_bytes_moved[kind]
                for kind, pages in sorted(self._pages.items())
            },
            "host_pages_evicted": host_pages_evicted,
            "requests_waited_for_tiers": self._waited,
            "tiers_wait_us": self._wait_us,
        }
