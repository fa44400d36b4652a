"""Counts of media: contents encoded, contents found in the embedding cache, waits. See docs/metrics.md."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import EncodeMedia
from lockstep.core.contract.events import RequestArrived

PERCENTILES = (50, 99)


class MediaCounts:
    """Counts over all requests; waits only of requests after the warm-up."""

    def __init__(self) -> None:
        self.requests = 0
        self.contents = 0
        self.prompt_tokens = 0
        self.tokens = 0
        self.encoded = 0
        self.encoded_tokens = 0
        self.dropped = 0
        self.intervals = array("q")  # start, stop, contents, tokens
        self.gpus = 0
        self.waits_us = array("q")

    def arrived(self, event: RequestArrived) -> None:
        """Count the media of an accepted request."""
        needs = {span.digest: span.encoder_tokens for span in event.spans if span.encoder_tokens}
        if needs:
            self.requests += 1
            self.contents += len(needs)
            self.tokens += sum(needs.values())
            self.prompt_tokens += sum(span.stop - span.start for span in event.spans if span.encoder_tokens)

    def ordered(self, command: EncodeMedia, *, needed: bool) -> None:
        """Count an order to encode a content.

        Args:
            needed: count the content as needed too, because no earlier event did.
        """
        if needed:
            self.contents += 1
            self.tokens += command.encoder_tokens
        self.encoded += 1
        self.encoded_tokens += command.encoder_tokens
        self.dropped += len(command.drop)

    @property
    def table(self) -> NDArray[np.int64]:
        """Encoder work: int64 [intervals, 4], start and stop in us, contents, tokens."""
        return np.array(self.intervals, np.int64).reshape(-1, 4)

    def describe(self, makespan_us: int | None) -> dict[str, Any]:
        """Return the counts for `media` of metrics.json."""
        table = self.table
        busy_us = int((table[:, 1] - table[:, 0]).sum())
        lanes = max(self.gpus, 1)
        waits = np.array(self.waits_us, np.int64)
        share = busy_us / (makespan_us * lanes) if makespan_us and len(table) else None
        reused = max(self.contents - self.encoded, 0)
        return {
            "requests": self.requests,
            "contents": self.contents,
            "prompt_tokens": self.prompt_tokens,
            "encoded": self.encoded,
            "encoded_tokens": self.encoded_tokens,
            "reused": reused,
            "embedding_hit_ratio": round(reused / self.contents, 6) if self.contents else None,
            "embeddings_evicted": self.dropped,
            "encoder_gpus": self.gpus,
            "encoder_passes": len(table) or None,
            "encoder_busy_us": busy_us if len(table) else None,
            "encoder_busy_fraction": None if share is None else round(share, 6),
            "requests_waited": len(waits) if len(table) else None,
            "wait_us_mean": round(float(waits.mean()), 1) if len(waits) else None,
            **{f"wait_us_p{p}": round(float(np.percentile(waits, p)), 1) if len(waits) else None for p in PERCENTILES},
            "wait_us_max": int(waits.max()) if len(waits) else None,
        }
