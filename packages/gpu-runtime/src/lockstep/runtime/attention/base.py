"""What an attention backend is: planned once for a pass, then run in each of its layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lockstep.runtime.forward import ForwardBatch


class AttentionBackend(Protocol):
    """Causal attention of a pass's new tokens over the pages of their rows."""

    name: str

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for a pass: whatever depends on the batch and not on the layer. Outside of any CUDA graph."""
        ...

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Keep the new keys and values in the pool, then attend.

        Args:
            query: [tokens, heads, head_dim], rope applied; key, value: [tokens, kv_heads, head_dim].
        Returns: [tokens, heads, head_dim], of the query's dtype. Token t of a row sees positions up to its own.
        """
        ...
