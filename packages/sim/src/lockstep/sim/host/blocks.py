"""The simulator's model of block diffusion: the passes of a block, and the shape of a pass over blocks.

    passes = BlockPassModel.of("4..12", block_tokens=32, seed=7)    # no mask is left after 4 to 12 passes

One more pass writes the KV of the finished block. A block that begins with the end of a prompt has fewer masks, and
proportionally fewer passes. A hash of seed, request and position decides, evenly between both bounds. So a run does not
depend on the order of its batches, and a retracted request takes as many passes when it runs again.

A pass computes the whole block of each row: to the cost model it is a row that verifies a draft at every further
position. The last pass of a block has no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from lockstep.core.contract.commands import BatchPlan, Int32s
from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cost import BatchShape
from lockstep.sim.host.batch_shapes import extend_shape_of
from lockstep.sim.host.speculation import mixed, uniform_of

TOKENS_PER_PASS = 4
ITERATIONS_SOURCE = (
    f"estimate: {TOKENS_PER_PASS} masks replaced in each pass; by model, text and threshold it is 1 to 10"
)


# mechanism: block-diffusion (simulated)
@dataclass(frozen=True)
class BlockPassModel:
    """The distribution of the passes after which a whole block of masks has none left."""

    block_tokens: int
    least: int
    most: int
    seed: int
    source: str

    @classmethod
    def of(cls, text: str | None, block_tokens: int, seed: int) -> BlockPassModel:
        """Parse `8` or `4..12`; None is a quarter of the block. Raises ConfigError."""
        usual = max(block_tokens // TOKENS_PER_PASS, 1)
        least, several, most = (str(usual) if text is None else text).partition("..")
        bounds = (least, most if several else least)
        if not all(bound.isdecimal() for bound in bounds) or not 1 <= int(bounds[0]) <= int(bounds[1]) <= block_tokens:
            raise ConfigError(
                f"`diffusion_iterations` must be a number of passes from 1 to {block_tokens}, or two as in 4..12, "
                f"got `{text}`\nhint: each pass replaces one mask at least; {usual} is usual for {block_tokens}"
            )
        return cls(
            block_tokens, int(bounds[0]), int(bounds[1]), seed, "given" if text is not None else ITERATIONS_SOURCE
        )

    def for_rows(self, rows_max: int) -> BlockRows:
        """Return the blocks of the rows of one engine."""
        return BlockRows(self, rows_max)

    def describe(self) -> dict[str, Any]:
        """Return block, bounds and source, for metrics.json."""
        passes = {"iterations_min": self.least, "iterations_max": self.most}
        return {"block_tokens": self.block_tokens, **passes, "source": self.source}


class BlockRows:
    """The newest block of each row of one engine."""

    def __init__(self, passes: BlockPassModel, rows_max: int) -> None:
        self._model = passes
        self._requests = np.zeros(rows_max, np.uint64)
        self._masks = np.zeros(rows_max, np.int32)  # with which the newest block of each row began
        self._counts: Int32s = np.zeros(0, np.int32)  # of the plan whose shape was asked for last

    def take_row(self, row: int, request: int) -> None:
        """Assign a row to a request, by its number in the workload."""
        self._requests[row] = request

    def shape_of(self, plan: BatchPlan) -> BatchShape:
        """Decide which blocks a pass finishes, and return its shape."""
        assert plan.blocks is not None
        size, rows = self._model.block_tokens, len(plan.rows)
        first = plan.blocks.numbers == 0
        self._masks[plan.rows[first]] = size - plan.blocks.given[first]
        masks = self._masks[plan.rows]
        keys = self._requests[plan.rows] * np.uint64(0x9E3779B97F4A7C15) + plan.starts.astype(np.uint64)
        spread = self._model.most - self._model.least + 1
        whole = self._model.least + (uniform_of(mixed(keys, self._model.seed + 3)) * spread).astype(np.int64)
        finished = plan.blocks.numbers >= -(-whole * masks // size)
        self._counts = np.where(finished, masks, np.int32(0)).astype(np.int32)
        return replace(extend_shape_of(plan), sampled_rows=size * (rows - int(np.count_nonzero(finished))))

    def counts(self) -> Int32s:
        """Return the tokens of each block that the last pass finished, 0 for the others. int32 [rows]"""
        return self._counts
