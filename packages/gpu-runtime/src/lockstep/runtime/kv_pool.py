"""The paged KV memory of one engine, or of one rank of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.runtime.forward import ForwardBatch, WindowedPages, WindowView
from lockstep.runtime.quantized.fp8 import to_fp8
from lockstep.runtime.quantized.fp8_format import FP8
from lockstep.runtime.states.pool import StateTensors

KvScales = Sequence[tuple[float, float]]
"""Scales of keys and of values, by layer: the stored numbers are multiplied by them."""


class KvPool:
    """Keys and values by layer, page and offset: [pages + 1, page_size, kv_heads, head_dim] each.

    Page numbers are those of the plans. The page behind the last one is the scratch page, to which padding rows write.

    Args:
        dtype: dtype of keys and values that are written, and of the stored ones unless `scales` are given.
        scales: with scales, numbers are stored in fp8 (e4m3), divided by them; numbers above the range of fp8 are
            clamped to it.
    """

    shared: ClassVar[bool] = False  # values are the first numbers of keys, and are not stored

    def __init__(
        self,
        layers: int,
        pages: int | WindowedPages,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: KvScales | None = None,
    ) -> None:
        counted = pages if isinstance(pages, WindowedPages) else WindowedPages(pages)
        self.pages, self.page_size, self.kv_heads, self.head_dim = counted.full, page_size, kv_heads, head_dim
        self.dtype, self.fp8 = dtype, scales is not None
        self.states: StateTensors | None = None  # of layers that keep them; released and allocated with the pages
        self.scales: KvScales = scales or [(1.0, 1.0)] * layers
        assert len(self.scales) == layers, f"{layers} layers, scales of {len(self.scales)}"
        self.sliding, stored = counted.sliding, FP8 if self.fp8 else dtype
        counts = [(counted.windows if layer in self.sliding else counted.full) + 1 for layer in range(layers)]
        shapes = [(count, page_size, kv_heads, head_dim) for count in counts]
        self.keys = [torch.zeros(shape, dtype=stored, device=device) for shape in shapes]
        self.values = self.keys
        if not self.shared:
            self.values = [torch.zeros(shape, dtype=stored, device=device) for shape in shapes]

    def release(self) -> None:
        """Free the memory; its content is lost."""
        for tensor in self._stored():
            tensor.untyped_storage().resize_(0)
        if self.states is not None:
            self.states.release()

    def resume(self) -> None:
        """Allocate the memory again, filled with zeros."""
        for tensor in self._stored():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        if self.states is not None:
            self.states.resume()
        self.clear()

    def clear(self) -> None:
        """Fill the memory with zeros."""
        for tensor in self._stored():
            tensor.zero_()
        if self.states is not None:
            self.states.clear_all()

    def close(self) -> None:
        """Drop the memory for good, although other parts of a closed engine may refer to the pool for a while."""
        self.keys, self.values = [], []

    def _stored(self) -> list[Tensor]:
        return self.keys if self.shared else [*self.keys, *self.values]

    @property
    def scratch_page(self) -> int:
        """The page that is never read."""
        return self.pages

    @staticmethod
    def bytes_per_page(
        layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, shared: bool = False
    ) -> int:
        """Return the bytes that one page takes in all layers."""
        return (1 if shared else 2) * layers * page_size * kv_heads * head_dim * dtype.itemsize

    def view(self, layer: int, batch: ForwardBatch) -> WindowView:
        """Return the rows, page table and slots of a pass in the pages of this layer."""
        if layer not in self.sliding:
            return WindowView(batch.rows, batch.page_table, batch.slots)
        assert batch.windows is not None, "a pass without the pages of windows"
        return batch.windows

    def write(self, layer: int, key: Tensor, value: Tensor, batch: ForwardBatch) -> None:
        """Store the KV of a pass's new tokens, [tokens, kv_heads, head_dim] each, in their slots."""
        flat, slots = (-1, self.kv_heads, self.head_dim), self.view(layer, batch).slots
        if self.fp8:
            for kept, new, scale in zip((self.keys, self.values), (key, value), self.scales[layer], strict=True):
                bits = to_fp8(new.float() / scale).view(torch.uint8)  # not all copies of torch support fp8
                kept[layer].view(torch.uint8).view(flat).index_copy_(0, slots, bits)
            return
        self.keys[layer].view(flat).index_copy_(0, slots, key.to(self.keys[layer].dtype))
        if self.shared:
            return
        self.values[layer].view(flat).index_copy_(0, slots, value.to(self.values[layer].dtype))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the KV of slots, in all layers, to other slots: int64 [n] both; targets are distinct."""
        for stored in self._stored():
            flat = (stored.view(torch.uint8) if self.fp8 else stored).view(-1, self.kv_heads, self.head_dim)
            flat.index_copy_(0, target, flat.index_select(0, source))

    def read(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of pages, int64 [n]: [n * page_size, kv_heads, head_dim] each; fp8 as float32."""
        flat = (-1, self.kv_heads, self.head_dim)
        keys, values = self.keys[layer][pages].view(flat), self.values[layer][pages].view(flat)
        if not self.fp8:
            return keys, values
        key_scale, value_scale = self.scales[layer]
        return keys.float() * key_scale, values.float() * value_scale


class LatentPool(KvPool):
    """One vector of a token in a layer, in place of keys and values: see from_transformers/latent.py."""

    shared = True
