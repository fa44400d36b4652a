"""CUDA devices that are not there: tensors report them, and are computed on the CPU.

    with FakeCuda() as gpu:          torch sees one H100; everything below is done for real, on the CPU
        ...                          gpu.waits: operations for which a CPU would have waited, and where

What a GPU would do wrongly or refuse is found here too: a mixture of devices, memory that is not pinned under a copy
that should not wait, a wait inside of a capture. With several devices also what depends on the current one, which is
cuda:0 in a new thread: a kernel of Triton that is launched on another device than that of its tensors, an event that is
recorded on two devices. A capture records its operations; a replay runs them again on the same
memory, so what Python computed at capture is as frozen as in a CUDA graph. Triton's kernels run in its interpreter, or
are only counted (`interpret=False`): memory that they would have written has zeros.

Not shown: order between streams (everything runs at once, in launch order), the kernels' machine code, libraries that
exist for GPUs only.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import c_int, c_ssize_t, c_void_p
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
MEMORY_BYTES = 80 << 30
SIZED_BY_VALUES = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave,
    aten.bincount,
}  # fmt: skip
"""Operations whose result has a shape that depends on values: a GPU's caller waits for it."""


EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


COMPOSED = {aten.to, aten.item, aten.is_nonzero}
"""Operations that consist of copies and reads of values. In inference mode torch dispatches them whole."""


class OnDevice(Tensor):
    """A tensor of the device. `inner` is its memory, a tensor of the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device = DEVICE) -> OnDevice:
        with torch.inference_mode(False):  # a view of a tensor from outside must not be one of inference
            made = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=device,
            )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.inner!r})"

    def data_ptr(self) -> int:
        """Return the address of the memory."""
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        """Return the memory, which reports the device."""
        return DeviceStorage(self.inner.untyped_storage(), self.device)

    def set_(self, source: Any, *more: Any) -> Any:  # type: ignore[override]
        """Return a tensor over memory of the device, of the dtype of this one."""
        assert isinstance(source, DeviceStorage)
        with torch._C._DisableTorchDispatch():
            return OnDevice(torch.empty(0, dtype=self.dtype).set_(source.inner, *more), source.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.tolist:
                gpu = _get_current_dispatch_mode()
                assert isinstance(gpu, FakeCuda)
                gpu.wait("a list for the CPU")
                return args[0].inner.tolist()
            if func in (Tensor.__int__, Tensor.__float__, Tensor.__index__):
                return func(torch.as_tensor(args[0].item()))
            if func is Tensor.numpy:
                raise TypeError(f"can't convert a tensor of {args[0].device} to numpy")
            if func is Tensor.copy_:
                return copied(*args, **(kwargs or {}))
            if func is Tensor.__getitem__:
                return indexed(*args)
            if func is Tensor.__setitem__:
                return put(*args)
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:  # torch needs the guard of the device, which one without CUDA lacks
                if "not linked with support" not in str(error):
                    raise
                return directly(func.__name__, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the fake device's `with`")


class DeviceStorage:
    """The memory of a tensor of the device. `inner` is a storage of the CPU."""

    def __init__(self, inner: torch.UntypedStorage, device: torch.device) -> None:
        self.inner, self.device = inner, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True, slots=True)
class Wait:
    """A point at which the CPU would have waited for the device."""

    what: str
    where: str  # innermost line of the runtime


@dataclass
class Capture:
    """Operations of a CUDA graph."""

    operations: list[Callable[[], None]] = field(default_factory=list)
    memory: list[Any] = field(default_factory=list)  # that no operation has written; the pool of a graph keeps it


class ThreadState(threading.local):
    """What CUDA and torch keep for each thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}  # the current one of a device; absent: the default stream
        self.capturing: Capture | None = None
        self.pool: Pool | None = None  # in which tensors are allocated; None: the device's own


@cache
def make_operators() -> None:
    """Make the Python object of every operator.

    Torch makes them at their first use and keeps a pointer without a reference. Two threads that use an operator first
    at the same time make two objects; one is freed, and torch may have kept the pointer to that one.
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        with suppress(AttributeError):
            getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


class FakeCuda(TorchDispatchMode):
    """The devices, while its `with` lasts.

    Args:
        interpret: whether Triton's kernels are interpreted; otherwise they are counted only.
        capability: compute capability.
        devices: number of devices.
    """

    def __init__(self, *, interpret: bool = True, capability: tuple[int, int] = (9, 0), devices: int = 1) -> None:
        super().__init__()
        self.interpret, self.capability, self.devices = interpret, capability, devices
        self.waits: list[Wait] = []
        self.launches: Counter[str] = Counter()
        self.operations = 0
        self.pinned: set[int] = set()
        self.registering = 0  # the result of cudaHostRegister; an error above 0
        self._defaults = [Stream(self, number) for number in range(devices)]
        self._here = ThreadState()
        self._patches = ExitStack()
        self._wrappers: dict[int, Any] = {}

    @property
    def capturing(self) -> Capture | None:
        """The capture of this thread."""
        return self._here.capturing

    @property
    def current(self) -> torch.device:
        """The current device of this thread."""
        return torch.device("cuda", self._here.device)

    def numbered(self, device: Any = None) -> int:
        """Return the number of a device; that of the current one for None or for no number."""
        if isinstance(device, int):
            number = device
        else:
            index = None if device is None else torch.device(device).index
            number = self._here.device if index is None else index
        if not 0 <= number < self.devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {number}")
        return number

    def stream_of(self, device: Any = None) -> Stream:
        """Return the current stream of a device."""
        number = self.numbered(device)
        return self._here.streams.get(number, self._defaults[number])

    # ------------------------------------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled() and func.overloadpacket in COMPOSED:
            TorchDispatchMode.__enter__(self)  # what it consists of comes here
            try:
                return func.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        flat, _ = tree_flatten((args, kwargs))
        ours = [one for one in flat if isinstance(one, OnDevice)]
        pinned = kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        asked = torch.device(device) if device is not None else None
        if asked is not None:
            kwargs["device"] = torch.device("cpu") if asked.type == "cuda" else asked
        to_device = asked.type == "cuda" if asked is not None else bool(ours)
        on = ours[0].device if asked is None and ours else torch.device("cuda", self.numbered(asked))
        if func.overloadpacket in (aten._to_copy, aten.copy_):
            self._copied(func, args, kwargs, asked)
        elif ours:
            self._checked(func, flat, ours)
        self.operations += 1
        given, named = tree_map(inner_of, (args, kwargs))
        result = computed(func, given, named)
        pool = self._here.pool
        if pool is not None and to_device and not any(one.alias_info for one in func._schema.returns):
            result = tree_map(pool.placed, result)
        if func.overloadpacket in EMPTY and not self.interpret:
            result.zero_()  # no kernel writes it
        if self.capturing is not None and to_device and func.overloadpacket in EMPTY:  # a replay allocates nothing
            self.capturing.memory.append(result)
        elif self.capturing is not None and to_device:
            self._record(func, given, named, result)
        if pinned:
            for one in tree_flatten(result)[0]:
                self.pinned.add(one.untyped_storage().data_ptr())
        if not to_device or func is aten._local_scalar_dense.default:
            return result
        known = {id(one.inner): one for one in ours}

        def wrapped(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            return known[id(one)] if id(one) in known else OnDevice(one, on)

        return tree_map(wrapped, result)

    def _pinned(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, OnDevice):
            raise RuntimeError(f"a tensor of {tensor.device} cannot be pinned")
        copy = tensor.clone()
        self.pinned.add(copy.untyped_storage().data_ptr())
        return copy

    def _copied(self, func: Any, args: Any, kwargs: Any, asked: torch.device | None) -> None:
        """Note a copy between the devices that waits."""
        if func.overloadpacket is aten._to_copy:
            source, lazily = args[0], bool(kwargs.get("non_blocking"))
            ends = (isinstance(source, OnDevice), asked.type == "cuda" if asked else isinstance(source, OnDevice))
            memory = source if not ends[0] else None
        else:
            target, source = args[0], args[1]
            lazily = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            ends = (isinstance(source, OnDevice), isinstance(target, OnDevice))
            memory = target if ends[0] else source
        if ends[0] == ends[1] or (not ends[0] and source.dim() == 0 and func.overloadpacket is aten.copy_):
            return
        direction = "to the CPU" if ends[0] else "to the device"
        if not lazily:
            self.wait(f"copy {direction}")
        elif memory is None or memory.untyped_storage().data_ptr() not in self.pinned:
            self.wait(f"copy {direction}, memory is pageable")

    def _checked(self, func: Any, flat: list[Any], ours: list[OnDevice]) -> None:
        """Raise what a GPU would raise, and note what it would wait for."""
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense:
            self.wait("a value read by the CPU")
        elif packet in SIZED_BY_VALUES and not (packet is aten.repeat_interleave and flat[-1] is not ours[-1]):
            self.wait(f"{packet} has a shape that depends on values")
        elif packet in (aten.index, aten.index_put, aten.index_put_) and any(
            one.dtype in (torch.bool, torch.uint8) for one in ours[1:]
        ):
            self.wait(f"{packet} by a mask")
        elif packet is aten.equal:
            self.wait("tensors are compared by the CPU")
        if len({one.device for one in ours}) > 1:
            raise RuntimeError(f"{func}: tensors of several devices, {[(str(one.device), *one.shape) for one in ours]}")
        others = [one for one in flat if isinstance(one, Tensor) and not isinstance(one, OnDevice) and one.dim()]
        if others and packet in (aten.index, aten.index_put, aten.index_put_):
            self.wait(f"{packet} by numbers of the CPU")
        elif others:
            shapes = [tuple(one.shape) for one in others]
            raise RuntimeError(f"{func}: tensors of {ours[0].device} and of the CPU, {shapes}")

    def wait(self, what: str) -> None:
        """Note that the CPU waits for the device. Raises RuntimeError inside of a capture."""
        self.waits.append(Wait(what, line_of_runtime()))
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    # ---------------------------------------------------------------------------------------------------- graphs

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keep an operation: views stand, results of others are computed again into the same memory."""
        assert self.capturing is not None
        aliases = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if (func.is_view or aliases) and memory_of(result) <= memory_of((args, kwargs)):
            return  # `reshape` and `contiguous` may copy, and then they are no views

        def again() -> None:
            new = computed(func, args, kwargs)
            for old, fresh in zip(tree_flatten(result)[0], tree_flatten(new)[0], strict=True):
                if isinstance(old, Tensor) and old is not fresh:
                    old.copy_(fresh)

        self.capturing.operations.append(again)

    def launch(self, name: str, run: Callable[[], None]) -> None:
        """Launch a kernel of Triton."""
        self.launches[name] += 1
        if self.interpret:
            self.run(run)

    def run(self, operation: Callable[[], None]) -> None:
        """Run what is no operation of torch, and at each replay of the capture of this thread, if there is one."""
        operation()
        if self.capturing is not None:
            self.capturing.operations.append(operation)

    # ---------------------------------------------------------------------------------------------- torch.cuda

    def __enter__(self) -> FakeCuda:
        gpu = self
        properties = SimpleNamespace(
            name="fake H100",
            multi_processor_count=132,
            regs_per_multiprocessor=65_536,
            shared_memory_per_multiprocessor=228 << 10,
            max_threads_per_multi_processor=2048,
            total_memory=MEMORY_BYTES,
            major=self.capability[0],
            minor=self.capability[1],
            L2_cache_size=50 << 20,
        )

        here = self._here

        @contextmanager
        def on_device(device: Any) -> Iterator[None]:
            before, here.device = here.device, self.numbered(device)
            try:
                yield
            finally:
                here.device = before

        def set_device(device: Any) -> None:
            here.device = self.numbered(device)

        @contextmanager
        def stream(one: Stream | None) -> Iterator[None]:
            if one is None:
                yield
                return
            with on_device(one.number):
                before = self.stream_of(one.number)
                here.streams[one.number] = one
                try:
                    yield
                finally:
                    here.streams[one.number] = before

        @contextmanager
        def graph(made: Graph, **_: Any) -> Iterator[None]:
            made.capture_begin()
            try:
                yield
            finally:
                made.capture_end()

        @contextmanager
        def pooled(pool: Pool, device: Any = None) -> Iterator[None]:
            here.pool, before = pool, here.pool
            try:
                yield
            finally:
                here.pool = before

        class StreamOf(Stream):  # classes, since annotations of libraries name them
            def __init__(self, device: Any = None, **_: Any) -> None:
                super().__init__(gpu, gpu.numbered(device))

        class EventOf(Event):
            def __init__(self, **options: Any) -> None:
                super().__init__(gpu, **options)

        class GraphOf(Graph):
            def __init__(self) -> None:
                super().__init__(gpu)

        changed: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: self.devices,
            "current_device": lambda: here.device,
            "set_device": set_device,
            "device": on_device,
            "_lazy_init": lambda: None,
            "is_initialized": lambda: True,
            "get_device_capability": lambda *_: self.capability,
            "get_device_name": lambda *_: properties.name,
            "get_device_properties": lambda *_: properties,
            "mem_get_info": lambda *_: (MEMORY_BYTES - (2 << 30), MEMORY_BYTES),
            "memory_allocated": lambda *_: 1 << 30,
            "memory_reserved": lambda *_: 1 << 30,
            "max_memory_allocated": lambda *_: (1 << 30) + (64 << 20),
            "reset_peak_memory_stats": lambda *_: None,
            "empty_cache": lambda: None,
            "synchronize": lambda *_: self.wait("the device is waited for"),
            "Stream": StreamOf,
            "Event": EventOf,
            "current_stream": self.stream_of,
            "default_stream": lambda device=None: self._defaults[self.numbered(device)],
            "stream": stream,
            "graph_pool_handle": lambda: (0, 1),
            "MemPool": Pool,
            "use_mem_pool": pooled,
            "CUDAGraph": GraphOf,
            "graph": graph,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister),
        }
        self._patches.enter_context(mock.patch.multiple(torch.cuda, **changed))
        pointers = mock.patch.object(torch._C, "_cuda_customAllocator", lambda *two: two, create=True)
        self._patches.enter_context(pointers)
        self._patches.enter_context(mock.patch.object(Tensor, "is_pinned", lambda one, *_: gpu._is_pinned(one)))
        self._patches.enter_context(mock.patch.object(Tensor, "pin_memory", lambda one, *_: gpu._pinned(one)))
        made = torch.tensor

        def tensor(data: Any, *, device: Any = None, **options: Any) -> Any:  # which has no dispatch to its device
            there = made(data, **options)
            if device is None or torch.device(device).type != "cuda":
                return there
            return there.to(torch.device("cuda", self.numbered(device)))

        viewed_as = torch.as_tensor

        def as_tensor(data: Any, *, device: Any = None, **options: Any) -> Any:
            if not hasattr(data, "__cuda_array_interface__"):
                return viewed_as(data, device=device, **options)
            return OnDevice(over_address(data.__cuda_array_interface__), torch.device("cuda", self.numbered(device)))

        self._patches.enter_context(mock.patch.object(torch, "tensor", tensor))
        self._patches.enter_context(mock.patch.object(torch, "as_tensor", as_tensor))
        plain = threading.Thread.run

        def in_thread(thread: threading.Thread) -> None:  # a dispatch mode is one of its thread
            TorchDispatchMode.__enter__(gpu)
            try:
                plain(thread)
            finally:
                TorchDispatchMode.__exit__(gpu, None, None, None)

        self._patches.enter_context(mock.patch.object(threading.Thread, "run", in_thread))
        if find_spec("triton") is not None:
            self._patches.enter_context(launches_of(self))
        make_operators()
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        self._patches.close()

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in self.pinned

    def _register(self, address: int, size: int, flags: int) -> int:
        if not self.registering:
            self.pinned.add(address)
        return self.registering

    def _unregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


class Stream:
    """A stream; everything runs at once."""

    def __init__(self, gpu: FakeCuda, number: int) -> None:
        self.gpu, self.number, self.cuda_stream = gpu, number, id(self)

    @property
    def device(self) -> torch.device:
        """Its device."""
        return torch.device("cuda", self.number)

    def synchronize(self) -> None:
        """Wait."""
        self.gpu.wait("a stream is waited for")

    def wait_stream(self, other: Stream) -> None:
        """Let the device wait, not the CPU."""

    def wait_event(self, event: Event) -> None:
        """Let the device wait, not the CPU."""
        if not event.recorded:
            raise AssertionError("a wait for an event that was not recorded orders nothing")

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event."""
        event = event or Event(self.gpu)
        event.record(self)
        return event


class Event:
    """An event, which has happened once it is recorded."""

    def __init__(self, gpu: FakeCuda, enable_timing: bool = False, **_: Any) -> None:
        self.gpu, self.timed = gpu, enable_timing
        self.number: int | None = None  # of the device on which it was recorded first, to which it belongs

    @property
    def recorded(self) -> bool:
        """Whether it was recorded."""
        return self.number is not None

    def record(self, stream: Stream | None = None) -> None:
        """Record it. Raises RuntimeError on another device than before."""
        number = (stream or self.gpu.stream_of()).number
        if self.number not in (None, number):
            raise RuntimeError(f"an event of cuda:{self.number} is recorded on a stream of cuda:{number}")
        self.number = number

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def synchronize(self) -> None:
        """Wait, unless nothing was recorded."""
        if self.recorded:
            self.gpu.wait("an event is waited for")

    def wait(self, stream: Stream | None = None) -> None:
        """Let the device wait, not the CPU."""

    def elapsed_time(self, other: Event) -> float:
        """Return a few microseconds in milliseconds."""
        if not (self.timed and other.timed):
            raise ValueError("both events must be made with enable_timing=True")
        if self.number != other.number or not self.recorded:
            raise RuntimeError(f"no time between events of devices {self.number} and {other.number}")
        return 0.005


class Pool:
    """A pool of memory that functions in C allocate and free: their addresses."""

    def __init__(self, functions: tuple[int, int]) -> None:
        allocate, free = functions
        self.allocate = ctypes.CFUNCTYPE(c_void_p, c_ssize_t, c_int, c_void_p)(allocate)
        self.free = ctypes.CFUNCTYPE(None, c_void_p, c_ssize_t, c_int, c_void_p)(free)

    def placed(self, tensor: Any) -> Any:
        """Return a tensor with the same content in memory of the pool."""
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return tensor
        size = tensor.untyped_storage().nbytes()
        address = self.allocate(size, 0, None)
        if not address:
            raise torch.OutOfMemoryError("CUDA out of memory")
        memory = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
        made = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        weakref.finalize(made.untyped_storage(), self.free, address, size, 0, None)
        return made.copy_(tensor)


class Graph:
    """A CUDA graph."""

    def __init__(self, gpu: FakeCuda) -> None:
        self.gpu, self.capture = gpu, Capture()

    def capture_begin(self, **_: Any) -> None:
        """Record the operations of this thread from now on. Raises RuntimeError on the default stream."""
        here = self.gpu._here
        if self.gpu.stream_of() is self.gpu._defaults[here.device]:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if here.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing: a second capture begins")
        here.capturing = self.capture

    def capture_end(self) -> None:
        """Record no more. Raises RuntimeError if nothing was captured here."""
        if self.gpu._here.capturing is not self.capture:
            raise RuntimeError("operation failed: the stream does not capture this graph")
        self.gpu._here.capturing = None

    def replay(self) -> None:
        """Run the captured operations again, on the same memory."""
        with torch._C._DisableTorchDispatch():
            for operation in self.capture.operations:
                operation()


def viewed(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Apply all of an index but its tensors, which are returned by dimension.

    Python's indexing of a tensor needs the guard of its device, which a torch without CUDA does not have.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(1 for one in parts if one is not None and one is not Ellipsis)
    at = [number for number, one in enumerate(parts) if one is Ellipsis]
    place = at[0] if at else len(parts)
    parts[place : place + 1] = [slice(None)] * (tensor.dim() - used)
    tensors: list[Tensor | None] = []
    for one in parts:
        dim = len(tensors)
        if one is None:
            tensor = aten.unsqueeze.default(tensor, dim)
            tensors.append(None)
        elif isinstance(one, slice):
            tensor = aten.slice.Tensor(tensor, dim, one.start, one.stop, one.step or 1)
            tensors.append(None)
        elif isinstance(one, Tensor):
            tensors.append(one)
        elif isinstance(one, bool) or not hasattr(one, "__index__"):
            raise TypeError(f"an index of {type(one).__name__} on {tensor.device}")
        else:
            tensor = aten.select.int(tensor, dim, one.__index__())
    return tensor, tensors


def indexed(tensor: Tensor, index: Any) -> Tensor:
    """Return tensor[index]."""
    if not isinstance(tensor, OnDevice):
        raise RuntimeError("a tensor of the CPU is indexed by one of a GPU")
    tensor, tensors = viewed(tensor, index)
    return tensor if all(one is None for one in tensors) else aten.index.Tensor(tensor, tensors)


def directly(name: str, args: Any, kwargs: Any) -> Any:
    """Call an operation by its name, below everything in which torch needs the guard of the device."""
    gpu = _get_current_dispatch_mode()
    assert isinstance(gpu, FakeCuda)
    name = {"__invert__": "bitwise_not"}.get(name, name)
    overload = torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs)
    with _disable_current_modes():
        return gpu.__torch_dispatch__(getattr(getattr(aten, name), overload), (), args, kwargs)


def copied(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Compute tensor.copy_(source)."""
    result: Tensor = directly("copy_", (tensor, source, non_blocking), {})
    return result


def put(tensor: Tensor, index: Any, value: Any) -> None:
    """Compute tensor[index] = value."""
    tensor, tensors = viewed(tensor, index)
    if all(one is None for one in tensors):
        copied(tensor, value) if isinstance(value, Tensor) else tensor.fill_(value)
    else:
        given = value if isinstance(value, Tensor) else torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        aten.index_put_.default(tensor, tensors, given)


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on the CPU, for types, too, that it has on a GPU only."""
    if func.overloadpacket is aten.histc and not args[0].is_floating_point():
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def memory_of(tree: Any) -> set[int]:
    """Return the addresses of the memory of all tensors in a tree of arguments."""
    return {one.untyped_storage().data_ptr() for one in tree_flatten(tree)[0] if isinstance(one, Tensor)}


def inner_of(one: Any) -> Any:
    """Return the memory of a tensor of the device; anything else as it is."""
    return one.inner if isinstance(one, OnDevice) else one


def over_address(described: dict[str, Any]) -> Tensor:
    """Return a tensor of the CPU over memory that a `__cuda_array_interface__` describes, without owning it."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[int(described["typestr"][2:])]
    address, _ = described["data"]
    strides = [stride // kind.itemsize for stride in described["strides"]]
    ends = [(size - 1) * stride for size, stride in zip(described["shape"], strides, strict=True)]
    memory = (ctypes.c_ubyte * ((sum(ends) + 1) * kind.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=kind).as_strided(described["shape"], strides)


def line_of_runtime() -> str:
    """Return file and line of the innermost frame of the runtime, as `file.py:line`."""
    for frame in reversed(traceback.extract_stack(limit=60)):
        if "/lockstep/runtime/" in frame.filename:
            return f"{frame.filename.partition('/lockstep/runtime/')[2]}:{frame.lineno}"
    return "elsewhere"


@contextmanager
def launches_of(gpu: FakeCuda) -> Iterator[None]:
    """Let Triton's launches go to the fake device."""
    from triton.runtime.interpreter import InterpretedFunction

    plain = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return SimpleNamespace(
                _init_handles=lambda: None, n_regs=128, metadata=SimpleNamespace(shared=40 << 10, num_warps=4)
            )
        if not any(isinstance(one, OnDevice) for one in args):
            return plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        for place, one in enumerate(args):
            if isinstance(one, Tensor) and not isinstance(one, OnDevice):
                raise RuntimeError(f"{self.__name__}: argument {place} is a tensor of the CPU")
            if isinstance(one, OnDevice) and one.device != gpu.current:
                raise RuntimeError(f"{self.__name__} on {gpu.current}: argument {place} is a tensor of {one.device}")
        given = [inner_of(one) for one in args]

        def launched() -> None:
            with torch._C._DisableTorchDispatch():
                plain(self, *given, grid=grid, warmup=False, **kwargs)

        gpu.launch(self.__name__, launched)
        return None

    with mock.patch.object(InterpretedFunction, "run", run):
        yield
