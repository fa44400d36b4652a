"""The interface of an attention backend: planned once per pass, then run in each layer."""

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
    exact_lengths: bool  # whether host lengths must be exact for rows that extend; otherwise upper bounds suffice

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """Prepare what depends on the batch and not on the layer. Called once per pass, outside of any CUDA graph.

        Args:
            graph: whether the pass is captured, or replayed, in a CUDA graph of `batch.count` rows that compute one
                token each. The tensors of `batch` must then have the same addresses as at capture, and the launches of
                `run` depend only on the number of rows. Call `plan` before every replay, and run once outside of a
                graph before the first capture: no kernel can be compiled during a capture.
        """
        ...

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the new keys and values to the pool, then attend.

        Args:
            query: [tokens, heads, head_dim], rope applied; key, value: [tokens, kv_heads, head_dim].
        Returns: [tokens, heads, head_dim], of the query's dtype. A token attends to positions up to its own.
        """
        ...
