"""The attention of a layer beyond "all positions up to the own one": a window, a cap on scores, a sink, blocks.

    window = 4      positions  0 1 2 3 4 5 6 7
    token at 6                       x x x x        the newest 4, its own included
    cap c           score      c * tanh(score / c), behind the scale
    block = 4       token at 5   x x x x x x x x    all positions up to the end of its own block
    sink            one more score per head, which takes its share of the softmax and adds no value

Sources: Longformer (arXiv 2004.05150) for windows; Gemma 2 (arXiv 2408.00118), section 2, for the cap; attention sinks
as in gpt-oss (arXiv 2508.10925).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

BLOCKS = "blocks that attend in both directions"


@dataclass(frozen=True, slots=True, eq=False)
class LayerRules:
    """The attention of one layer.

    Args:
        scale: factor of the scores.
        window: positions that a token attends to, its own included; None: all.
        cap: bound of the scores; None: none.
        sinks: the sink's score by query head of this rank, [heads]; None: no sink.
        block: tokens that attend to each other in both directions, a power of two; they begin at its multiples. None: a
            token attends to those before it.
    """

    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    block: int | None = None

    def beyond(self, scale: float) -> bool:
        """Return whether a backend that has only `scale` computes something else."""
        return self.scale != scale or (self.window, self.cap, self.sinks, self.block) != (None,) * 4


def names_of(rules: Sequence[LayerRules]) -> tuple[str, ...]:
    """Return what a backend must support for these layers, for its reason if it cannot."""
    kinds = {
        "sliding windows": any(one.window is not None for one in rules),
        "a cap on scores": any(one.cap is not None for one in rules),
        "attention sinks": any(one.sinks is not None for one in rules),
        BLOCKS: any(one.block is not None for one in rules),
        "a scale by layer": len({one.scale for one in rules}) > 1,
    }
    return tuple(name for name, there in kinds.items() if there)
