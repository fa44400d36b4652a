"""Counts of server sessions: turns, kept tokens, pages held between turns. See docs/metrics.md."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from lockstep.core.contract.events import (
    SessionClosed,
    SessionYielded,
    TurnStarted,
)


class SessionCounts:
    """Counts of server sessions. Only a live host reports the pages that sessions hold; a replayed journal does not."""

    def __init__(self) -> None:
        self.turns = self._kept_tokens = self._prompt_tokens = 0
        self._closed = self._yields = self._yielded_pages = 0
        self._held = array("q")  # time in us, pages

    def learn(self, decided: TurnStarted | SessionYielded | SessionClosed) -> None:
        """Count a decided event about a session."""
        if isinstance(decided, TurnStarted):
            self.turns += 1
            self._kept_tokens += decided.kept_tokens
            self._prompt_tokens += decided.prompt_tokens
        elif isinstance(decided, SessionYielded):
            self._yields += 1
            self._yielded_pages += decided.pages
        else:
            self._closed += 1

    def held(self, time_us: int, pages: int) -> None:
        """Record the pages that only sessions hold, from `time_us` on."""
        self._held.extend((time_us, pages))

    def describe(self, kv_pages: int | None) -> dict[str, Any]:
        """Return the counts for `sessions` of metrics.json."""
        held = np.array(self._held, np.int64).reshape(-1, 2)
        times_us, pages = held[:, 0], held[:, 1]
        lasted_us = np.diff(times_us)
        mean = float((pages[:-1] * lasted_us).sum() / lasted_us.sum()) if lasted_us.sum() else None
        most = int(pages.max()) if len(pages) else None
        return {
            "turns": self.turns,
            "prompt_tokens": self._prompt_tokens,
            "kept_tokens": self._kept_tokens,
            "closed": self._closed,
            "yields": self._yields,
            "yielded_pages": self._yielded_pages,
            "held_pages_mean": None if mean is None else round(mean, 2),
            "held_pages_max": most,
            "held_share_mean": None if mean is None or not kv_pages else round(mean / kv_pages, 6),
            "held_share_max": None if most is None or not kv_pages else round(most / kv_pages, 6),
        }
