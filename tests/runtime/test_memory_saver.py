"""Memory that is released below addresses that stay, without a GPU: by mmap, a driver that records, a fake device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_uint64
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params, memory_saver  # noqa: E402
from lockstep.runtime.memory_saver import (  # noqa: E402
    OUT_OF_MEMORY,
    SIGNATURES,
    AllocationProperties,
    CudaDriver,
    FixedMemory,
)
from tests.support.mapped_memory import MappedMemory  # noqa: E402

PAGE = MappedMemory.granularity


def content_of(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


@pytest.mark.parametrize("keep", [True, False])
def test_addresses_stay_and_content_comes_back_if_it_was_kept(keep: bool) -> None:
    driver = MappedMemory()
    memory = FixedMemory(driver)
    addresses = [memory.allocate(size) for size in (5, PAGE, 3 * PAGE + 1)]
    assert memory.bytes == 6 * PAGE
    for number, address in enumerate(addresses):
        ctypes.memset(address, number + 1, PAGE)
    memory.release(keep=keep)
    assert (memory.bytes, driver.backed, sorted(driver.reserved)) == (0, {}, sorted(addresses))
    memory.resume()
    assert memory.bytes == 6 * PAGE
    assert sorted(driver.backed) == sorted(addresses)
    for number, address in enumerate(addresses):
        assert (content_of(address, PAGE) == bytes([number + 1]) * PAGE) == keep
    memory.resume()  # nothing is released: nothing changes
    assert driver.handles == 6


def test_without_room_nothing_is_resumed_and_nothing_is_lost() -> None:
    driver = MappedMemory(room=3 * PAGE)
    memory = FixedMemory(driver)
    addresses = [memory.allocate(PAGE) for _ in range(3)]
    ctypes.memset(addresses[2], 7, PAGE)
    with pytest.raises(MemoryError):
        memory.allocate(1)
    assert len(driver.reserved) == 3  # of no failed allocation
    memory.release(keep=True)
    driver.room = 2 * PAGE
    with pytest.raises(MemoryError):
        memory.resume()
    assert driver.backed == {}
    driver.room = 3 * PAGE
    memory.resume()
    assert content_of(addresses[2], PAGE) == b"\7" * PAGE


def test_a_tensor_may_end_while_its_memory_is_released() -> None:
    driver = MappedMemory()
    memory = FixedMemory(driver)
    first, second = memory.allocate(PAGE), memory.allocate(PAGE)
    memory.release(keep=True)
    memory.free(first)
    memory.resume()
    memory.free(second)
    assert (driver.reserved, driver.backed, memory.bytes) == ({}, {}, 0)


class RecordingLibrary:
    """The part of libcuda.so.1 that is used: it records the calls; those in `fails` return an error."""

    class Function:
        """One function; ctypes sets the types of its arguments."""

        def __init__(self, library: RecordingLibrary, name: str) -> None:
            self.library, self.name, self.argtypes = library, name, ()

        def __call__(self, *arguments: Any) -> int:
            assert len(arguments) == len(self.argtypes) == len(SIGNATURES[self.name])
            return self.library.called(self.name, arguments)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        self._functions = {name: self.Function(self, name) for name in SIGNATURES}

    def __getattr__(self, name: str) -> Function:
        return self._functions[name]

    def called(self, name: str, arguments: tuple[Any, ...]) -> int:
        """Return the code of a call, and write its result."""
        if name == "cuGetErrorName":
            arguments[1]._obj.value = b"CUDA_ERROR_OF_A_TEST"
            return 0
        self.calls.append((name, *[one for one in arguments if isinstance(one, int)]))
        if name in self.fails:
            return self.fails[name]
        if name == "cuMemGetAllocationGranularity":
            arguments[0]._obj.value = 2 << 20
            properties = arguments[1]._obj
            assert (properties.type, properties.location.type, properties.location.id) == (1, 1, 3)
        elif name in ("cuMemAddressReserve", "cuMemCreate"):
            assert isinstance(arguments[0]._obj, c_uint64)
            arguments[0]._obj.value = 0x7F00_0000_0000 if name == "cuMemAddressReserve" else 77
        return 0


def test_the_driver_of_cuda_is_called_in_the_order_that_it_needs() -> None:
    library = RecordingLibrary()
    memory = FixedMemory(CudaDriver(3, library))
    at, size = 0x7F00_0000_0000, 2 << 20
    assert memory.allocate(100) == at
    made = [("cuMemCreate", size, 0), ("cuMemMap", at, size, 0, 77, 0), ("cuMemSetAccess", at, size, 1)]
    assert library.calls == [("cuMemGetAllocationGranularity", 0), ("cuMemAddressReserve", size, 0, 0, 0), *made]
    library.calls.clear()
    memory.release(keep=False)
    memory.resume()
    memory.free(at)
    unmapped = [("cuMemUnmap", at, size), ("cuMemRelease", 77)]
    assert library.calls == [*unmapped, *made, *unmapped, ("cuMemAddressFree", at, size)]


def test_contents_are_copied_before_anything_is_unmapped() -> None:
    library = RecordingLibrary()
    memory = FixedMemory(CudaDriver(3, library))
    memory.allocate(100)
    library.calls.clear()
    memory.release(keep=True)
    memory.resume()
    names = [call[0] for call in library.calls]
    assert names[:3] == ["cuMemcpyDtoH_v2", "cuMemUnmap", "cuMemRelease"]
    assert names[3:] == ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoD_v2"]


def test_an_error_of_the_driver_has_its_name() -> None:
    library = RecordingLibrary()
    memory = FixedMemory(CudaDriver(3, library))
    library.fails["cuMemCreate"] = OUT_OF_MEMORY
    with pytest.raises(MemoryError, match=r"cuMemCreate: CUDA_ERROR_OF_A_TEST \(2\)"):
        memory.allocate(1)
    assert library.calls[-1] == ("cuMemAddressFree", 0x7F00_0000_0000, 2 << 20)
    for failing, freed in (("cuMemMap", ["cuMemRelease"]), ("cuMemSetAccess", ["cuMemUnmap", "cuMemRelease"])):
        library.fails, library.calls = {failing: OUT_OF_MEMORY}, []
        with pytest.raises(MemoryError, match=failing):
            memory.allocate(1)
        names = [call[0] for call in library.calls]
        assert names[names.index(failing) + 1 :] == [*freed, "cuMemAddressFree"]
    library.fails = {"cuMemAddressReserve": 1}
    with pytest.raises(RuntimeError, match=r"cuMemAddressReserve: CUDA_ERROR_OF_A_TEST \(1\)"):
        memory.allocate(1)
    assert ctypes.sizeof(AllocationProperties) == 32  # as in cuda.h, on 64 bits


def test_a_cpu_has_no_fixed_memory() -> None:
    with pytest.raises(ConfigError, match="`memory_saver` is set, which needs a CUDA device, this is `cpu`"):
        LLM(device="cpu", memory_saver=True)


# ------------------------------------------------------------------------------------------------ a device that is fake


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("triton", reason="the kernels need Triton")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from lockstep.runtime import triton_trial
    from tests.support.fake_cuda import FakeCuda

    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    with FakeCuda(interpret=False) as one:
        yield one


SIZES: dict[str, Any] = {
    "pages": 64, "page_size": 16, "max_running_requests": 4, "context_tokens_max": 256, "cuda_graph_max_batch": 2,
    "dtype": "float32", "warm_up": False, "device": "cuda:0", "piecewise_graph_max_tokens": 8,
}  # fmt: skip
PROMPTS, PARAMS = [[5, 6, 7, 8, 5, 6], [9, 10, 11]], Params(max_new_tokens=4, ignore_eos=True)


def test_graphs_are_replayed_after_a_release_as_before(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay reads is at its old addresses, with its old content; in between there is nothing there."""
    driver = MappedMemory()
    monkeypatch.setattr(memory_saver, "CudaDriver", lambda number: driver)
    with LLM(**SIZES, memory_saver=True) as llm:
        pool, parameters = llm.host.executor.attention.pool, list(llm.model.parameters())
        stored = [*parameters, *pool.keys, *pool.values]
        addresses = [one.data_ptr() for one in stored]
        ranges = [(start, start + size) for start, (_, size) in driver.backed.items()]
        assert all(any(start <= at < stop for start, stop in ranges) for at in addresses)
        before = [one.inner.clone() for one in parameters]
        llm.generate(PROMPTS, PARAMS)
        replays, used = llm.host.executor.graphs.replays, dict(driver.backed)
        assert replays > 0

        llm.release_memory("kv_cache")
        assert 0 < len(driver.backed) < len(used)
        llm.resume_memory()
        llm.release_memory()
        assert driver.backed == {}
        with pytest.raises(ConfigError, match="the memory of the weights is released"):
            llm.weights("model.norm.weight", 1)
        llm.resume_memory()
        assert driver.backed.keys() == used.keys()
        assert [one.data_ptr() for one in stored] == addresses
        assert all(torch.equal(one.inner, old) for one, old in zip(parameters, before, strict=True))
        assert not any(np.any(one.inner.numpy()) for one in (*pool.keys, *pool.values))
        llm.generate(PROMPTS, PARAMS)
        assert llm.host.executor.graphs.replays == 2 * replays


def test_without_room_for_the_weights_the_memory_stays_released(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MappedMemory()
    monkeypatch.setattr(memory_saver, "CudaDriver", lambda number: driver)
    with LLM(**SIZES, memory_saver=True) as llm:
        llm.release_memory()
        driver.room = 1 << 20
        with pytest.raises(ConfigError, match="there is no memory for the weights now"):
            llm.resume_memory()
        assert driver.backed == {}
        driver.room = 1 << 40
        llm.resume_memory()
        assert [len(one.token_ids) for one in llm.generate(PROMPTS, PARAMS)] == [4, 4]


def test_without_it_graphs_refuse_a_release(gpu: Any) -> None:
    with LLM(**SIZES) as llm:
        with pytest.raises(ConfigError, match="as CUDA graphs hold its addresses"):
            llm.release_memory()
        assert [len(one.token_ids) for one in llm.generate(PROMPTS, PARAMS)] == [4, 4]
