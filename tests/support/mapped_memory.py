"""Memory of this process as pages that come and go below fixed addresses, in place of a GPU's driver."""

from __future__ import annotations

import ctypes
import mmap
from ctypes import c_int, c_size_t, c_ssize_t, c_void_p

import numpy as np

from lockstep.runtime.memory_saver import Bytes

MAP_FIXED, PROT_NONE = 0x10, 0  # of Linux; the module mmap does not have them
FAILED = ctypes.c_void_p(-1).value


class MappedMemory:
    """`PageDriver` by mmap: a range without memory cannot be read or written, and new memory has other content.

    Args:
        room: bytes that may be in use at once.
    """

    granularity = mmap.PAGESIZE

    def __init__(self, room: int = 1 << 40) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_ssize_t)
        self._libc.mmap.restype = c_void_p
        self._libc.munmap.argtypes = (c_void_p, c_size_t)
        self.room, self.handles = room, 0
        self.reserved: dict[int, int] = {}  # sizes by address
        self.backed: dict[int, tuple[int, int]] = {}  # handles and sizes by address

    def _map(self, address: int | None, size: int, protection: int, flags: int = 0) -> int:
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        found = self._libc.mmap(address, size, protection, flags, -1, 0)
        assert found != FAILED, ctypes.get_errno()
        assert isinstance(found, int)
        return found

    def reserve(self, size: int) -> int:
        """Return the address of a new range without memory."""
        address = self._map(None, size, PROT_NONE)
        self.reserved[address] = size
        return address

    def back(self, address: int, size: int) -> int:
        """Map new memory to a whole range. Raises MemoryError."""
        assert self.reserved[address] == size
        assert address not in self.backed
        if sum(used for _, used in self.backed.values()) + size > self.room:
            raise MemoryError("no room")
        self._map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, MAP_FIXED)
        ctypes.memset(address, 0xA5, size)  # the content of new memory is undefined
        self.handles += 1
        self.backed[address] = self.handles, size
        return self.handles

    def unback(self, address: int, size: int, handle: int) -> None:
        """Unmap the memory of a range. The addresses stay reserved."""
        assert self.backed.pop(address) == (handle, size)
        self._map(address, size, PROT_NONE, MAP_FIXED)

    def unreserve(self, address: int, size: int) -> None:
        """Free a range without memory."""
        assert self.reserved.pop(address) == size
        assert address not in self.backed
        assert self._libc.munmap(address, size) == 0

    def read(self, address: int, size: int) -> Bytes:
        """Return a copy of the content of a range."""
        assert self.backed[address][1] == size
        return np.frombuffer(ctypes.string_at(address, size), np.uint8)

    def write(self, address: int, content: Bytes) -> None:
        """Copy content into a range."""
        assert self.backed[address][1] == content.size
        ctypes.memmove(address, content.ctypes.data, content.size)
