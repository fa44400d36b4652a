"""Operations: pages and blocks that move between the device, host memory and storage.

`Tiers` begins and ends operations. The pools of the device read which of their blocks an operation locks or fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from lockstep.core.contract.commands import NO_ROWS, BlockCopy
from lockstep.core.contract.events import RequestId, TierKind
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import Int32s

NO_OPERATION = -1
Kind = Literal["window", "state"]


class MovedBlocks(msgspec.Struct):
    """Blocks of one kind that an operation moves between two tiers. All columns are int32 [blocks]."""

    kind: Kind
    index: Int32s  # page indices on the path of the operation; of a prefetch, the pages that may be needed
    device: Int32s  # window pages or slots of the device; of a prefetch or store, none
    host: Int32s  # blocks of the host pool; of a prefetch, room for the blocks that arrive
    counted: Int32s = NO_ROWS  # of a prefetch: indices of pages whose blocks it counts on, since the host has them

    def copy(self) -> BlockCopy:
        """Return the copy that the device makes."""
        return BlockCopy(self.kind, self.device, self.host)


class Operation(msgspec.Struct):
    """A move of the pages [start:stop) of a path from one tier to another."""

    number: int
    kind: TierKind
    namespace: str
    tokens: bytes  # int32 ids of the path, from the root to page `stop`
    start: int
    stop: int
    device_pages: Int32s  # [stop - start]; of a prefetch or store, none
    host_pages: Int32s  # [stop - start]
    device_handle: RadixNode | None = None
    host_handle: RadixNode | None = None
    request_id: RequestId = NO_OPERATION
    cancelled: bool = False  # the host was ordered to stop it: no request waits for it
    blocks: list[MovedBlocks] = []
    windows_locked: Int32s = NO_ROWS  # device pages whose window blocks it reads or counts on
    slots_locked: Int32s = NO_ROWS  # checkpoints of the device that it reads or counts on

    @property
    def pages(self) -> int:
        """Pages that it moves."""
        return self.stop - self.start


class Operations(dict[int, Operation]):
    """The operations under way by number, in the order in which they began."""

    __slots__ = ()

    @property
    def device_busy(self) -> bool:
        """Whether an operation reads or writes memory of the device."""
        return any(one.kind in ("write", "load") for one in self.values())

    @property
    def loading_pages(self) -> int:
        """Device pages that loads are filling."""
        return sum(one.pages for one in self.values() if one.kind == "load")

    @property
    def prefetching_pages(self) -> int:
        """Host pages that prefetches are filling."""
        return sum(one.pages for one in self.values() if one.kind == "prefetch")

    def returning_pages(self) -> int:
        """Return the device pages that become available when all operations have ended. An underestimate."""
        return self.loading_pages + sum(
            _locked_alone(one.device_handle) for one in self.values() if one.device_handle is not None
        )

    @property
    def windows_loading(self) -> int:
        """Window pages of the device that loads are filling."""
        loads = [one for one in self.values() if one.kind == "load"]
        return sum(moved.index.size for one in loads for moved in one.blocks if moved.kind == "window")

    @property
    def slots_moving(self) -> int:
        """State slots of the device that operations read, lock or fill."""
        moves = self.values()
        filled = [moved.device for one in moves if one.kind == "load" for moved in one.blocks if moved.kind == "state"]
        return int(np.unique(np.concatenate((NO_ROWS, *filled, *(one.slots_locked for one in moves)))).size)

    def window_locks(self, pages: int) -> Int32s:
        """Return the number of operations that lock the window block of each device page, int32 [pages]."""
        locks = np.zeros(pages, np.int32)
        for one in self.values():
            locks[one.windows_locked] += 1
        return locks


def _locked_alone(handle: RadixNode) -> int:
    """Return the number of pages on the path to a handle that no other handle locks."""
    pages, node = 0, handle
    while node.lock_count == 1 and node.parent is not None:
        pages += len(node.pages)
        node = node.parent
    return pages


_HANDLES = ("device_handle", "host_handle")
_PAGES = ("device_pages", "host_pages")
_LOCKED = ("windows_locked", "slots_locked")
_MOVED = ("index", "device", "host", "counted")


def operation_image(operation: Operation) -> dict[str, Any]:
    image = msgspec.structs.asdict(operation)
    for name in _HANDLES:
        image[name] = image[name].number if image[name] is not None else None
    for name in _PAGES:
        image[name] = image[name].tobytes()
    locked = {name: image.pop(name).tobytes() for name in _LOCKED}
    blocks = [(one.kind, *(getattr(one, name).tobytes() for name in _MOVED)) for one in image.pop("blocks")]
    if blocks:
        image |= {"companions": blocks, **locked}
    return image


def operation_of(
    image: dict[str, Any], device_nodes: Mapping[int, RadixNode], host_nodes: Mapping[int, RadixNode]
) -> Operation:
    values = dict(image)
    for name, nodes in zip(_HANDLES, (device_nodes, host_nodes), strict=True):
        values[name] = nodes[values[name]] if values[name] is not None else None
    for name in (*_PAGES, *_LOCKED):
        values[name] = np.frombuffer(values.get(name, b""), np.int32)
    values["blocks"] = [
        MovedBlocks(kind, *(np.frombuffer(one, np.int32) for one in columns))
        for kind, *columns in values.pop("companions", ())
    ]
    return Operation(**values)
