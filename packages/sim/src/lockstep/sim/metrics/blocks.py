"""Counts of passes over blocks, of engines whose model answers in blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.events import BatchFinished


class BlockCounts:
    """Blocks and passes over all rows of all delivered batches."""

    def __init__(self) -> None:
        self.block_tokens = 0
        self.passes = 0  # rows of passes that were launched
        self.blocks = 0  # finished
        self.tokens = 0  # of finished blocks; those behind the end of a request included

    @classmethod
    def join(cls, several: Iterable[BlockCounts]) -> BlockCounts:
        """Return the counts of several engines together."""
        whole = cls()
        for one in several:
            whole.block_tokens = max(whole.block_tokens, one.block_tokens)
            whole.passes += one.passes
            whole.blocks += one.blocks
            whole.tokens += one.tokens
        return whole

    def launched(self, plan: BatchPlan) -> None:
        """Take in a launched pass over blocks."""
        self.block_tokens = int(plan.stops[0] - plan.starts[0])
        self.passes += len(plan.rows)

    def finished(self, event: BatchFinished) -> None:
        """Take in the result of a pass over blocks."""
        self.blocks += int(np.count_nonzero(np.frombuffer(event.accepted, "<i4")))
        self.tokens += len(event.tokens) // 4

    def describe(self) -> dict[str, Any]:
        """Return `diffusion` of metrics.json."""
        return {
            "block_tokens": self.block_tokens,
            "blocks": self.blocks,
            "passes": self.passes,
            "passes_per_block": self.passes / self.blocks if self.blocks else None,
            "tokens_per_pass": self.tokens / self.passes if self.passes else None,
        }
