"""The part of a handover that moves bytes. `lockstep.runtime.transfer` implements it for tensors.

A *block* is a full page, a window page or a slot of states; `block` numbers the kinds as `PagesReady` does.

The prefill engine copies pages into a slot of staging memory, one memory for each decode engine. The decode engine
reads the slot and copies it into its pages. So only the process of an engine writes its pages, and the end of all
writes is certain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import NO_ROWS, HybridTransfer, StartTransfer
from lockstep.host.cache_moves import BlockKind
from lockstep.host.handover.wire import PageLayout, StagingPlace, blocks_in

Int32s = NDArray[np.int32]


class PagesStaged(msgspec.Struct, frozen=True):
    """Pages are in a slot on every rank: the checksum of each rank's bytes, or no checksums."""

    checksums: tuple[int, ...] = ()


class Fetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order to copy a slot into pages.

    Args:
        slot: of the sender's staging memory, on every rank.
        pages: in the slot, or other blocks.
        first: the first of them that is copied.
        into: int32, pages of this engine for the pages [first:first + len(into)) of the slot.
        checksums: of each rank of the sender; empty: they are not compared.
        block: number of the kind of blocks in the sender's layout.
    """

    slot: int
    pages: int
    first: int
    into: Int32s
    checksums: tuple[int, ...] = ()
    block: int = 0


class KvSender(Protocol):
    """The staging memory for one decode engine, on all ranks of a prefill engine."""

    places: tuple[StagingPlace, ...]
    pages_per_slot: int
    beside_per_slot: tuple[int, ...]  # blocks of each layout in `PageLayout.beside` that fit into a slot

    def stage(
        self, slot: int, pages: Int32s, done: Callable[[PagesStaged | BaseException], None], block: int = 0
    ) -> None:
        """Begin to copy pages into a slot; `done` is called once, from any thread. An exception ends the engine."""

    def close(self) -> None:
        """Release the memory. Copies under way end first."""


class KvReceiver(Protocol):
    """Reads the staging memory of one prefill engine, on all ranks of a decode engine."""

    def fetch(self, order: Fetch, cancelled: Callable[[], bool], done: Callable[[str], None]) -> None:
        """Begin to copy a slot into pages. `done` is called once, from any thread, with the error or "".

        Args:
            cancelled: while it is true, nothing needs to be copied. Asked before anything is written.
        """

    def close(self) -> None:
        """End: orders that have not begun end with an error."""


class KvTransport(Protocol):
    """Moves the KV of one engine."""

    layout: PageLayout

    def sender(self, peer: str) -> KvSender:
        """Make staging memory for a decode engine. Raises ConfigError if there is no room."""

    def receiver(self, layout: PageLayout, places: tuple[StagingPlace, ...]) -> KvReceiver:
        """Prepare to read the staging memory of a prefill engine. Raises ConfigError if its pages do not fit."""

    def close(self) -> None:
        """Release what all links share."""


NO_BLOCKS = HybridTransfer()


def given_blocks(command: StartTransfer, kind: BlockKind, page_size: int) -> tuple[int, Int32s]:
    """Return the blocks of a kind that a part of a transfer reads or writes, int32 [n], behind the page of the first.

    Windows belong to the last pages of the part. The state has one block, as page 0.
    """
    first, hybrid = command.start_tokens // page_size, command.hybrid or NO_BLOCKS
    match kind:
        case "page":
            return first, command.pages
        case "window":
            return first + len(command.pages) - len(hybrid.window_pages), hybrid.window_pages
        case "state":
            return 0, NO_ROWS if hybrid.state_slot < 0 else np.array([hybrid.state_slot], np.int32)


def blocks_of(part: StartTransfer, layout: PageLayout, there: int) -> list[tuple[int, Int32s]]:
    """Return what is sent of a part, by number of the kind of blocks: the page of the first block, and the blocks.

    Args:
        there: the first pages of the prompt, which the receiver has.
    """
    found = []
    for one in blocks_in(layout):
        first, blocks = given_blocks(part, one.kind, layout.page_size)
        skipped = max(0, there - first) if one.kind != "state" else 0
        found.append((first + skipped, blocks[skipped:]))
    return found
