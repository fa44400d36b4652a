"""One rank of an engine: copies pages of its pool into slots of staging memory, and slots of others into its pages.

A GPU copies on a stream of its own, beside the passes. Pages that are sent were computed by batches that have been
collected; pages that are filled are in no batch before the transfer is done. So no event orders them with the passes.

In a slot the pages of a part lie side by side, so each part is copied once, by the indices of its pages:

    slot with n pages    | keys 0: n pages | values 0: n pages | keys 1: n pages | ...
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from lockstep.host.engine_options import TransferTransport
from lockstep.host.handover.kv import Fetch, Int32s
from lockstep.host.handover.wire import LayoutPart, PageLayout, StagingPlace
from lockstep.runtime.stages import RankPlace
from lockstep.runtime.tiers.page_parts import WORDS, PageParts, words_of
from lockstep.runtime.transfer.slices import PartCopy, sources_of
from lockstep.runtime.transfer.transports import (
    SLOT_BYTES,
    SLOTS,
    Reader,
    Staging,
    TransferFailed,
    make_staging,
    open_reader,
)

BY_SIZE = {one.itemsize: one for one in WORDS}
OF_LAYER = re.compile(r"model (keys|values) ([0-9]+)")
"""Names of parts that `parts_of` gives to the KV of the model, by the number of the layer in this rank's pool."""


@dataclass(slots=True)
class _Opened:
    """The readers of one sender's ranks, and what this rank copies from each."""

    places: tuple[StagingPlace, ...]
    sources: dict[int, list[PartCopy]]
    readers: dict[int, Reader] = field(default_factory=dict)


class RankPages:
    """The pages of one rank, for transfers. Each staging memory, and each sender, is used by one thread at a time.

    Args:
        model: describes what the bytes of KV depend on; equal on engines that hand over to each other.
        place: of this rank in its engine.
        kv_heads: of the whole model.
        parts: of a page, with their names for other engines; None: the pages have all layers, and KV without scales.
    """

    def __init__(
        self,
        pages: PageParts,
        page_size: int,
        *,
        place: RankPlace,
        kv_heads: int,
        model: str,
        parts: tuple[LayoutPart, ...] | None = None,
        transport: TransferTransport = "shm",
        checksums: bool = False,
    ) -> None:
        self._pages, self._place = pages, place
        self._transport, self._checksums = transport, checksums
        self._device = pages.device
        self._stagings: dict[int, Staging] = {}
        self._senders: dict[int, _Opened] = {}
        named = parts_in(pages) if parts is None else parts
        self.layout = PageLayout(model, page_size, pages.size, place.tp, kv_heads, named)
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.pages_per_slot = max(1, SLOT_BYTES // pages.size)

    def open_staging(self, number: int) -> StagingPlace:
        """Allocate staging memory under a number, and return its place. Raises ConfigError."""
        size = self.pages_per_slot * self.layout.page_bytes
        staging = self._stagings[number] = make_staging(self._transport, SLOTS, size, self._device)
        return msgspec.structs.replace(staging.place, page_bytes=self.layout.page_bytes, parts=self.layout.parts)

    def stage(self, number: int, slot: int, pages: Int32s) -> int:
        """Copy pages into a slot, and wait for it. Returns the checksum of the bytes; 0 without checksums."""
        count = len(pages)
        into = self._stagings[number].slot(slot)[: count * self.layout.page_bytes]
        with self._copying(), torch.inference_mode():
            at = self._index(pages)
            direct = self._stream is None or into.is_cuda
            gathered = into if direct else torch.empty_like(into, device=self._device)
            for part in self._pages.parts:
                some = gathered[part.offset * count :][: part.size * count].view(part.words).view(count, -1)
                torch.index_select(part.on_device(), 0, at, out=some)
            if not direct:
                into.copy_(gathered, non_blocking=True)
            self._wait()
            return crc(into) if self._checksums else 0

    def open_sender(self, number: int, layout: PageLayout, places: tuple[StagingPlace, ...]) -> None:
        """Prepare to read a prefill engine under a number. Raises ConfigError."""
        sources = sources_of(layout, places, self.layout, self._place.column, all_layers=self._place.pp == 1)
        opened = self._senders[number] = _Opened(places, sources)
        for rank in sources:
            opened.readers[rank] = open_reader(places[rank], self._device)

    def fetch(self, number: int, order: Fetch) -> None:
        """Copy a slot into pages, and wait for it. Raises TransferFailed."""
        opened = self._senders[number]
        for rank, copies in opened.sources.items():
            got = opened.readers[rank].read(order.slot, order.pages * opened.places[rank].page_bytes)
            if order.checksums and crc(got) != order.checksums[rank]:
                raise TransferFailed(f"the bytes of rank {rank} have another checksum than those that were sent")
            with self._copying(), torch.inference_mode():
                given = got if self._stream is None else got.to(self._device, non_blocking=True)
                self._scatter(given, order, copies)
                self._wait()

    def _scatter(self, given: Tensor, order: Fetch, copies: list[PartCopy]) -> None:
        """Copy parts of the bytes of a slot, or some heads of them, into pages of this rank."""
        at = self._index(order.into)
        for copy in copies:
            theirs, tensor = copy.theirs, self._pages.parts[copy.number].tensor
            whole = given[theirs.offset * order.pages :][: theirs.size * order.pages].view(order.pages, -1)
            some = whole[order.first :]
            if copy.heads:
                words = BY_SIZE[tensor.element_size()]
                by_head = some.view(words).unflatten(1, (self.layout.page_size, theirs.heads, -1))
                heads = by_head[:, :, copy.first : copy.first + copy.heads]
                tensor.view(words)[:, :, copy.into : copy.into + copy.heads].index_copy_(0, at, heads)
            else:
                words = words_of(gcd(theirs.offset, theirs.size))
                tensor.flatten(1).view(torch.uint8).view(words).index_copy_(0, at, some.view(words))

    def close(self, number: int) -> None:
        """Release what a number stands for."""
        if (staging := self._stagings.pop(number, None)) is not None:
            staging.close()
        if (opened := self._senders.pop(number, None)) is not None:
            for reader in opened.readers.values():
                reader.close()

    def close_all(self) -> None:
        """Release everything."""
        for number in [*self._stagings, *self._senders]:
            self.close(number)

    def _copying(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _index(self, pages: Int32s) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._device)


def parts_in(
    pages: PageParts, first_layer: int = 0, scales: Sequence[tuple[float, float]] | None = None
) -> tuple[LayoutPart, ...]:
    """Return the parts of a page as a layout contains them. Tensors of KV are [pages, page size, heads, head size].

    Args:
        first_layer: number in the model of the first layer that the pages have.
        scales: of keys and values that are stored in fp8, by layer of the pages; None: KV is stored as it is.
    """
    found = []
    for one in pages.parts:
        heads = one.tensor.shape[2] if one.tensor.dim() == 4 else 0
        name, dtype = one.name, str(one.tensor.dtype)
        if (of_layer := OF_LAYER.fullmatch(name)) is not None:
            kind, layer = of_layer[1], int(of_layer[2])
            name = f"model {kind} {first_layer + layer}"
            if scales is not None:
                dtype += f" x {scales[layer][kind == 'values']!r}"
        found.append(LayoutPart(name, dtype, one.offset, one.size, heads))
    return tuple(found)


def crc(data: Tensor) -> int:
    """Return the CRC-32 of bytes."""
    return zlib.crc32(memoryview(data.cpu().numpy()))
