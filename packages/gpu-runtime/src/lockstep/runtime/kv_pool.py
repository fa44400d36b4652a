"""The paged KV memory of one engine, or of one rank of it."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.runtime.forward import ForwardBatch


class KvPool:
    """Keys and values by layer, page and offset: [pages + 1, page_size, kv_heads, head_dim] each.

    Page numbers are those of the plans. The page behind the last one is scratch: what padding rows write goes there.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages, self.page_size, self.kv_heads, self.head_dim = pages, page_size, kv_heads, head_dim
        shape = (pages + 1, page_size, kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def release(self) -> None:
        """Give the memory back; what lay in it is gone."""
        for tensor in (*self.keys, *self.values):
            tensor.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Take memory again, of zeros."""
        for tensor in (*self.keys, *self.values):
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()

    @property
    def scratch_page(self) -> int:
        """The page that nobody reads."""
        return self.pages

    @staticmethod
    def bytes_per_page(layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one page takes in all layers."""
        return 2 * layers * page_size * kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, key: Tensor, value: Tensor, batch: ForwardBatch) -> None:
        """Keep the KV of a pass's new tokens, [tokens, kv_heads, head_dim] each, where `batch.slots` says."""
        flat = (-1, self.kv_heads, self.head_dim)
        self.keys[layer].view(flat).index_copy_(0, batch.slots, key.to(self.keys[layer].dtype))
        self.values[layer].view(flat).index_copy_(0, batch.slots, value.to(self.values[layer].dtype))
