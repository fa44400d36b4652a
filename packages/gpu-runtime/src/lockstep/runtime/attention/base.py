"""What an attention backend is: planned once for a pass, then run in each of its layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool


class AttentionBackend(Protocol):
    """Causal attention of a pass's new tokens over the pages of their rows."""

    name: str
    pool: KvPool
    graphs: bool  # whether `run` may be captured in a CUDA graph
    exact_lengths: bool  # whether host twins must be exact where rows extend; else the most that they can be will do

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """Prepare for a pass: whatever depends on the batch and not on the layer. Outside of any CUDA graph.

        Args:
            graph: the pass is captured, or replayed, in a CUDA graph of `batch.count` rows that compute one token each.
                The tensors of `batch` then lie where they lay at capture; what `run` launches depends on the number of
                rows and on nothing else. Plan before every replay, and run once outside of a graph before the first
                capture: compiling a kernel is not allowed inside.
        """
        ...

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Keep the new keys and values in the pool, then attend.

        Args:
            query: [tokens, heads, head_dim], rope applied; key, value: [tokens, kv_heads, head_dim].
        Returns: [tokens, heads, head_dim], of the query's dtype. Token t of a row sees positions up to its own.
        """
        ...
