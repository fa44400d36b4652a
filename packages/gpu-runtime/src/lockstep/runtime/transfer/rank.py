"""One rank of an engine: copies pages of its pool into slots of staging memory, and slots of others into its pages.

A GPU copies on a stream of its own, beside the passes. Pages that are sent were computed by batches that have been
collected; pages that are filled are in no batch before the transfer is done. So no event orders them with the passes.

In a slot the pages of a part lie side by side, so each part is copied once, by the indices of its pages:

    slot with n pages    | keys 0: n pages | values 0: n pages | keys 1: n pages | ...
"""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import TransferTransport
from lockstep.host.handover.kv import Fetch, Int32s
from lockstep.host.handover.wire import LayoutPart, PageLayout, StagingPlace
from lockstep.runtime.stages import RankPlace
from lockstep.runtime.tiers.page_parts import WORDS, PageParts
from lockstep.runtime.transfer.slices import Source, sources_of
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


@dataclass(slots=True)
class _Opened:
    """The readers of one sender's ranks, and what this rank copies from each."""

    layout: PageLayout
    sources: list[Source]
    readers: dict[int, Reader] = field(default_factory=dict)


class RankPages:
    """The pages of one rank, for transfers. Each staging memory, and each sender, is used by one thread at a time.

    Args:
        model: describes what the bytes of KV depend on; equal on engines that hand over to each other.
        place: of this rank in its engine.
        kv_heads: of the whole model.
    """

    def __init__(
        self,
        pages: PageParts,
        page_size: int,
        *,
        place: RankPlace,
        kv_heads: int,
        model: str,
        transport: TransferTransport = "shm",
        checksums: bool = False,
    ) -> None:
        self._pages, self._place = pages, place
        self._transport, self._checksums = transport, checksums
        self._device = pages.device
        self._stagings: dict[int, Staging] = {}
        self._senders: dict[int, _Opened] = {}
        self.layout = PageLayout(model, page_size, pages.size, place.ranks, kv_heads, parts_in(pages))
        if place.pp > 1:
            self.layout = msgspec.structs.replace(self.layout, model=f"{model}, {place.pp} stages")
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.pages_per_slot = max(1, SLOT_BYTES // pages.size)

    def open_staging(self, number: int) -> StagingPlace:
        """Allocate staging memory under a number, and return its place. Raises ConfigError."""
        size = self.pages_per_slot * self.layout.page_bytes
        staging = self._stagings[number] = make_staging(self._transport, SLOTS, size, self._device)
        return staging.place

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
        if self._place.pp > 1:
            layout = self._of_stage(layout)
        opened = _Opened(layout, sources_of(layout, self.layout, self._place.rank))
        for source in opened.sources:
            opened.readers[source.rank] = open_reader(places[source.rank], self._device)
        self._senders[number] = opened

    def _of_stage(self, layout: PageLayout) -> PageLayout:
        """Return the layout of the rank of the sender that has this rank's layers. `layout` is that of its rank 0.

        Raises: ConfigError if the engines are not split alike.
        """
        for name in ("model", "page_size", "kv_heads", "ranks"):
            there, here = getattr(layout, name), getattr(self.layout, name)
            if there != here:
                raise ConfigError(
                    f"the prefill engine has `{name}` {there}, the decode engine {here}: engines with pipeline stages "
                    "hand over to engines that are split alike"
                )
        return self.layout

    def fetch(self, number: int, order: Fetch) -> None:
        """Copy a slot into pages, and wait for it. Raises TransferFailed."""
        opened = self._senders[number]
        layout = opened.layout
        for source in opened.sources:
            size = order.pages * layout.page_bytes
            got = opened.readers[source.rank].read(order.slot, size)
            if order.checksums and crc(got) != order.checksums[source.rank]:
                raise TransferFailed(f"the bytes of rank {source.rank} have another checksum than those that were sent")
            with self._copying(), torch.inference_mode():
                given = got if self._stream is None else got.to(self._device, non_blocking=True)
                self._scatter(given, order, layout, source)
                self._wait()

    def _scatter(self, given: Tensor, order: Fetch, layout: PageLayout, source: Source) -> None:
        """Copy the bytes of a slot, or some heads of them, into pages of this rank."""
        at = self._index(order.into)
        for theirs, ours in zip(layout.parts, self._pages.parts, strict=True):
            whole = given[theirs.offset * order.pages :][: theirs.size * order.pages].view(order.pages, -1)
            some = whole[order.first :]
            if source.whole:
                ours.on_device().index_copy_(0, at, some.view(ours.words))
            elif theirs.heads:
                tensor = ours.tensor
                words = BY_SIZE[tensor.element_size()]
                by_head = some.view(words).unflatten(1, (layout.page_size, theirs.heads, -1))
                heads = by_head[:, :, source.first : source.first + source.heads]
                tensor.view(words)[:, :, source.into : source.into + source.heads].index_copy_(0, at, heads)
            elif source.shared:
                ours.on_device().index_copy_(0, at, some.view(ours.words))

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


def parts_in(pages: PageParts) -> tuple[LayoutPart, ...]:
    """Return the parts of a page as a layout contains them. Tensors of KV are [pages, page size, heads, head size]."""
    found = []
    for one in pages.parts:
        heads = one.tensor.shape[2] if one.tensor.dim() == 4 else 0
        found.append(LayoutPart(one.name, str(one.tensor.dtype), one.offset, one.size, heads))
    return tuple(found)


def crc(data: Tensor) -> int:
    """Return the CRC-32 of bytes."""
    return zlib.crc32(memoryview(data.cpu().numpy()))
