"""Fixed addresses of memory that is released and resumed, as CUDA graphs need them.

    addresses   reserved once ------------------------------------------------------------------> freed with the tensor
    pages       created, mapped ---- release: content to the host, unmapped ---- resume: new ones, mapped, content back

A CUDA graph holds the addresses of weights and KV. torch's allocator cannot give back memory and keep its address, but
the driver can: it reserves ranges of addresses and maps pages into them (CUDA driver API, "Virtual Memory Management").
`MemorySaver` makes such memory for two memory pools of torch, by the tags `weights` and `kv_cache`.
While the memory of a tag is released, no kernel may use its tensors.

Ranges have whole pages of the driver, usually 2 MiB, and torch keeps several tensors in one. Memory that a model needed
only while it was loaded stays in its pool.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ssize_t, c_uint64, c_ushort, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.core.contract.errors import ConfigError

Bytes = NDArray[np.uint8]


class PageDriver(Protocol):
    """Reserves addresses, and maps memory into them. Sizes are multiples of `granularity`, in bytes."""

    granularity: int

    def reserve(self, size: int) -> int:
        """Return the address of a new range without memory. Raises MemoryError."""

    def back(self, address: int, size: int) -> int:
        """Map new memory, of any content, to a whole range. Return its handle. Raises MemoryError."""

    def unback(self, address: int, size: int, handle: int) -> None:
        """Unmap the memory of a range and free it. The addresses stay reserved."""

    def unreserve(self, address: int, size: int) -> None:
        """Free a range without memory."""

    def read(self, address: int, size: int) -> Bytes:
        """Return a copy of the content of a range, in memory of the host. Raises MemoryError."""

    def write(self, address: int, content: Bytes) -> None:
        """Copy content of the host into a range."""


@dataclass(slots=True)
class _Range:
    size: int
    handle: int | None = None  # of its memory; None: released
    content: Bytes | None = None  # while it is released


class FixedMemory:
    """Ranges of addresses that are released and resumed together."""

    def __init__(self, driver: PageDriver) -> None:
        self._driver = driver
        self._ranges: dict[int, _Range] = {}  # by address

    @property
    def bytes(self) -> int:
        """Bytes of memory in use."""
        return sum(one.size for one in self._ranges.values() if one.handle is not None)

    @property
    def is_released(self) -> bool:
        """Whether any range is without memory."""
        return any(one.handle is None for one in self._ranges.values())

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes of new memory. Raises MemoryError."""
        unit = self._driver.granularity
        made = _Range(-(-size // unit) * unit)
        address = self._driver.reserve(made.size)
        try:
            made.handle = self._driver.back(address, made.size)
        except MemoryError:
            self._driver.unreserve(address, made.size)
            raise
        self._ranges[address] = made
        return address

    def free(self, address: int) -> None:
        """Free memory, released or not, and its addresses."""
        one = self._ranges.pop(address)
        if one.handle is not None:
            self._driver.unback(address, one.size, one.handle)
        self._driver.unreserve(address, one.size)

    def release(self, *, keep: bool) -> None:
        """Free the memory of all ranges; their addresses stay.

        Args:
            keep: whether the content is copied to the host, and restored by `resume`.
        Raises: MemoryError, with nothing released, if the host has no room for the content.
        """
        used = {address: one for address, one in self._ranges.items() if one.handle is not None}
        kept = {address: self._driver.read(address, one.size) for address, one in used.items()} if keep else {}
        for address, one in used.items():
            assert one.handle is not None
            self._driver.unback(address, one.size, one.handle)
            one.handle, one.content = None, kept.get(address)

    def resume(self) -> None:
        """Map new memory to all released ranges, and restore the content that was kept.

        Raises: MemoryError, with everything still released, if there is too little memory.
        """
        backed: list[tuple[int, _Range]] = []
        try:
            for address, one in self._ranges.items():
                if one.handle is None:
                    one.handle = self._driver.back(address, one.size)
                    backed.append((address, one))
        except MemoryError:
            for address, one in backed:
                assert one.handle is not None
                self._driver.unback(address, one.size, one.handle)
                one.handle = None
            raise
        for address, one in backed:
            if one.content is not None:
                self._driver.write(address, one.content)
                one.content = None


ALLOCATE = ctypes.CFUNCTYPE(c_void_p, c_ssize_t, c_int, c_void_p)  # size, device, stream; 0: no memory
FREE = ctypes.CFUNCTYPE(None, c_void_p, c_ssize_t, c_int, c_void_p)  # address, size, device, stream


class MemorySaver:
    """Memory pools of torch, by tag: addresses of tensors stay while their memory is released."""

    TAGS: ClassVar = ("weights", "kv_cache")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        driver = CudaDriver(device.index)
        self.memory = {tag: FixedMemory(driver) for tag in self.TAGS}
        self._pools = {tag: _pool_of(memory) for tag, memory in self.memory.items()}

    @contextmanager
    def place(self, tag: str) -> Iterator[None]:
        """Let this thread allocate tensors of the device in the memory of a tag."""
        with torch.cuda.use_mem_pool(self._pools[tag], self._device):
            yield

    def release(self, tags: Sequence[str]) -> None:
        """Release the memory of these tags. The content of weights is kept.

        Raises: ConfigError, with nothing released, if the host has no room for the weights.
        """
        for tag in self.TAGS:  # weights first, since only they may fail
            if tag not in tags:
                continue
            try:
                self.memory[tag].release(keep=tag == "weights")
            except MemoryError as error:
                raise ConfigError(
                    f"the weights, {self.memory[tag].bytes:,} bytes, have no room in the memory of the host\n"
                    "hint: release kv_cache alone"
                ) from error

    def resume(self, tag: str) -> None:
        """Allocate the memory of a tag again, at the same addresses. Raises MemoryError."""
        self.memory[tag].resume()


def placed(saver: MemorySaver | None, tag: str) -> AbstractContextManager[None]:
    """Return the context of `MemorySaver.place`; an empty one without a saver."""
    return nullcontext() if saver is None else saver.place(tag)


def _pool_of(memory: FixedMemory) -> Any:
    """Return a memory pool of torch that allocates in `memory`."""

    def allocate(size: int, device: int, stream: int | None) -> int:
        try:
            return memory.allocate(size)
        except MemoryError:
            return 0  # torch raises OutOfMemoryError

    def free(address: int, size: int, device: int, stream: int | None) -> None:
        memory.free(address)

    functions = ALLOCATE(allocate), FREE(free)
    for one in functions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))  # torch may call them as long as the process lives
    addresses = [ctypes.cast(one, c_void_p).value for one in functions]
    return torch.cuda.MemPool(torch._C._cuda_customAllocator(*addresses))  # as torch's own pool for managed memory does


# -------------------------------------------------------------------------------------------------------- CUDA's driver

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: memory of a device that stays where it is
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class Location(Structure):
    """CUmemLocation."""

    _fields_: ClassVar = [("type", c_int), ("id", c_int)]


class AllocationFlags(Structure):
    """`allocFlags` of CUmemAllocationProp."""

    _fields_: ClassVar = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AllocationProperties(Structure):
    """CUmemAllocationProp."""

    _fields_: ClassVar = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("windows", c_void_p),
        ("flags", AllocationFlags),
    ]


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_: ClassVar = [("location", Location), ("flags", c_int)]


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
"""The functions of the driver that are used, with the types of their arguments (cuda.h of CUDA 12)."""


class CudaDriver:
    """Pages of one CUDA device.

    Args:
        device: its number.
        library: the driver's library; None: the installed one.
    """

    def __init__(self, device: int, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        for name, arguments in SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._properties = AllocationProperties(type=PINNED, location=Location(ON_DEVICE, device))
        self._access = Access(Location(ON_DEVICE, device), READ_WRITE)
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._properties), 0)
        self.granularity = size.value

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises MemoryError, or RuntimeError with the name of the error."""
        code = getattr(self._library, name)(*arguments)
        if not code:
            return
        text = c_char_p()
        self._library.cuGetErrorName(code, byref(text))
        message = f"{name}: {(text.value or b'unknown error').decode()} ({code})"
        raise MemoryError(message) if code == OUT_OF_MEMORY else RuntimeError(message)

    def reserve(self, size: int) -> int:
        """Return the address of a new range without memory. Raises MemoryError."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def back(self, address: int, size: int) -> int:
        """Map new memory, of any content, to a whole range. Return its handle. Raises MemoryError."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), size, byref(self._properties), 0)
        try:
            self._call("cuMemMap", address, size, 0, handle.value, 0)
        except (MemoryError, RuntimeError):
            self._call("cuMemRelease", handle.value)
            raise
        try:
            self._call("cuMemSetAccess", address, size, byref(self._access), 1)
        except (MemoryError, RuntimeError):
            self.unback(address, size, handle.value)
            raise
        return handle.value

    def unback(self, address: int, size: int, handle: int) -> None:
        """Unmap the memory of a range and free it. The addresses stay reserved."""
        self._call("cuMemUnmap", address, size)
        self._call("cuMemRelease", handle)

    def unreserve(self, address: int, size: int) -> None:
        """Free a range without memory."""
        self._call("cuMemAddressFree", address, size)

    def read(self, address: int, size: int) -> Bytes:
        """Return a copy of the content of a range, in memory of the host. Raises MemoryError."""
        content = np.empty(size, np.uint8)
        self._call("cuMemcpyDtoH_v2", content.ctypes.data, address, size)
        return content

    def write(self, address: int, content: Bytes) -> None:
        """Copy content of the host into a range."""
        self._call("cuMemcpyHtoD_v2", address, content.ctypes.data, content.size)


def check_memory_saver(wanted: bool, device: torch.device) -> None:
    """Raise ConfigError if `memory_saver` is set and the device is no GPU."""
    if wanted and device.type != "cuda":
        raise ConfigError(
            f"`memory_saver` is set, which needs a CUDA device, this is `{device}`\n"
            "hint: leave it out; without CUDA graphs a release needs no fixed addresses"
        )
