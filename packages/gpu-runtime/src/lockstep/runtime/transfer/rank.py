"""One rank of an engine: copies pages of its pool into slots of staging memory, and slots of others into its pages.

A GPU copies on a stream of its own, beside the passes. Pages that are sent were computed by batches that have been
collected; pages that are filled are in no batch before the transfer is done. So no event orders them with the passes.
The same holds for pages of windows and for states: the state of a row is sent behind the batch of the last chunk, and
no batch computes in its slot before the transfer has ended.

In a slot the pages of a part lie side by side, so each part is copied once, by the indices of its pages. Other blocks
have slots of their own:

    slot with n pages    | keys 0: n pages | values 0: n pages | keys 1: n pages | ...
"""

from __future__ import annotations

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
from lockstep.host.handover.wire import PageLayout, StagingPlace, blocks_in
from lockstep.runtime.stages import RankPlace
from lockstep.runtime.tiers.page_parts import WORDS, words_of
from lockstep.runtime.transfer.blocks import SentBlocks
from lockstep.runtime.transfer.slices import PartCopy, Sources, sources_of
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

    places: tuple[StagingPlace, ...]
    sources: Sources
    readers: dict[int, Reader] = field(default_factory=dict)


class RankPages:
    """The memory of one rank, for transfers. Each staging memory, and each sender, is used by one thread at a time.

    Args:
        blocks: of this rank's memory, full pages first.
        model: describes what the bytes of KV depend on; equal on engines that hand over to each other.
        place: of this rank in its engine.
        kv_heads: of the whole model.
        window_tokens: of layers whose pages are those of windows; 0: there are none.
    """

    def __init__(
        self,
        blocks: Sequence[SentBlocks],
        page_size: int,
        *,
        place: RankPlace,
        kv_heads: int,
        model: str,
        window_tokens: int = 0,
        transport: TransferTransport = "shm",
        checksums: bool = False,
    ) -> None:
        self._blocks, self._place = blocks, place
        pages = blocks[0].memory
        self._transport, self._checksums = transport, checksums
        self._device = pages.device
        self._stagings: dict[int, Staging] = {}
        self._senders: dict[int, _Opened] = {}
        beside = tuple(one.layout for one in blocks[1:])
        about = (place.tp, kv_heads, blocks[0].parts, beside, window_tokens)
        self.layout = PageLayout(model, page_size, pages.size, *about)
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.pages_per_slot = max(1, SLOT_BYTES // pages.size)

    def open_staging(self, number: int) -> StagingPlace:
        """Allocate staging memory under a number, and return its place. Raises ConfigError."""
        largest = max((one.block_bytes for one in self.layout.beside), default=0)
        size = max(self.pages_per_slot * self.layout.page_bytes, largest)
        staging = self._stagings[number] = make_staging(self._transport, SLOTS, size, self._device)
        of_rank = {name: getattr(self.layout, name) for name in ("page_bytes", "parts", "beside")}
        return msgspec.structs.replace(staging.place, **of_rank)

    def stage(self, number: int, slot: int, pages: Int32s, block: int = 0) -> int:
        """Copy pages, or blocks of another number, into a slot, and wait for it.

        Returns: the checksum of the bytes; 0 without checksums.
        """
        count, memory = len(pages), self._blocks[block].memory
        into = self._stagings[number].slot(slot)[: count * memory.size]
        with self._copying(), torch.inference_mode():
            at = self._index(pages)
            direct = self._stream is None or into.is_cuda
            gathered = into if direct else torch.empty_like(into, device=self._device)
            for part in memory.parts:
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
        for rank in sorted({rank for of_block in sources for rank in of_block}):
            opened.readers[rank] = open_reader(places[rank], self._device)

    def fetch(self, number: int, order: Fetch) -> None:
        """Copy a slot into pages or other blocks, and wait for it. Raises TransferFailed."""
        opened = self._senders[number]
        for rank, copies in opened.sources[order.block].items():
            block_bytes = blocks_in(opened.places[rank])[order.block].block_bytes
            got = opened.readers[rank].read(order.slot, order.pages * block_bytes)
            if order.checksums and crc(got) != order.checksums[rank]:
                raise TransferFailed(f"the bytes of rank {rank} have another checksum than those that were sent")
            with self._copying(), torch.inference_mode():
                given = got if self._stream is None else got.to(self._device, non_blocking=True)
                self._scatter(given, order, copies)
                self._wait()

    def _scatter(self, given: Tensor, order: Fetch, copies: Sequence[PartCopy]) -> None:
        """Copy parts of the bytes of a slot, or some heads of them, into pages of this rank."""
        at = self._index(order.into)
        for copy in copies:
            theirs, tensor = copy.theirs, self._blocks[copy.block].memory.parts[copy.number].tensor
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


def crc(data: Tensor) -> int:
    """Return the CRC-32 of bytes."""
    return zlib.crc32(memoryview(data.cpu().numpy()))
