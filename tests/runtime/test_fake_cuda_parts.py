"""Parts of the runtime on a CUDA device that is not there: what copies, collectives and refusals do on a GPU only."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="the kernels need Triton")

from lockstep.core.contract.commands import BlockCopy  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.cache_moves import BlockKind, Move  # noqa: E402
from lockstep.host.handover.kv import Fetch  # noqa: E402
from lockstep.host.quantization import WeightFormat  # noqa: E402
from lockstep.runtime import memory_saver, triton_trial  # noqa: E402
from lockstep.runtime.assembly import choose_device, current, device_name  # noqa: E402
from lockstep.runtime.collectives import CollectiveFailed, Collectives  # noqa: E402
from lockstep.runtime.errors import DeviceLost  # noqa: E402
from lockstep.runtime.media_share import EncoderShare  # noqa: E402
from lockstep.runtime.memory import explained, free_bytes_of, size_pool  # noqa: E402
from lockstep.runtime.models.stage import StageLayers  # noqa: E402
from lockstep.runtime.overlap import CudaLane  # noqa: E402
from lockstep.runtime.quantized.fp8 import Fp8Matrices, RowRounding  # noqa: E402
from lockstep.runtime.quantized.matrices import FUSED_ROWS_MAX, StoredMatrix  # noqa: E402
from lockstep.runtime.ranks import rank_device  # noqa: E402
from lockstep.runtime.stages import RankPlace, StageLinks  # noqa: E402
from lockstep.runtime.tiers.identity import Identity  # noqa: E402
from lockstep.runtime.tiers.mover import HostMover  # noqa: E402
from lockstep.runtime.tiers.page_parts import PageParts  # noqa: E402
from lockstep.runtime.transfer.blocks import SentBlocks, parts_in  # noqa: E402
from lockstep.runtime.transfer.rank import RankPages  # noqa: E402
from lockstep.runtime.transfer.transports import TransferFailed, make_staging, open_reader  # noqa: E402
from lockstep.runtime.weights_group import WeightsGroup  # noqa: E402
from tests.support.fake_cuda import DEVICE, FakeCuda  # noqa: E402
from tests.support.fake_nccl import nccl_by_gloo  # noqa: E402
from tests.support.fake_nixl import nixl_in_process  # noqa: E402
from tests.support.mapped_memory import MappedMemory  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    with FakeCuda(interpret=False) as one:
        yield one


def clock() -> int:
    return 7


def pool_on_the_device(seed: int) -> tuple[PageParts, list[tuple[str, Any]]]:
    """Parts of 50 pages, one of a size that no wide word divides."""
    rng = np.random.default_rng(seed)
    shapes = {"wide": (50, 4, 2, 8), "odd": (50, 3)}
    tensors = [
        (name, torch.from_numpy(rng.integers(0, 250, shape).astype(np.uint8)).to(DEVICE))
        for name, shape in shapes.items()
    ]
    return PageParts(tensors), tensors


# --------------------------------------------------------------------------------------------------------- the device


def test_a_device_has_a_number_and_a_name(gpu: FakeCuda) -> None:
    assert choose_device("auto") == choose_device("cuda") == choose_device("cuda:0") == DEVICE
    assert device_name(DEVICE) == "fake H100"
    with pytest.raises(ConfigError, match="`device` is cuda:3, but torch sees 1 GPUs, from cuda:0 on"):
        choose_device("cuda:3")
    with current(DEVICE):
        assert free_bytes_of(DEVICE) == 78 * GIB


def test_ranks_have_the_gpus_behind_that_of_rank_0(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert [rank_device(torch.device("cuda", 1), rank, 2, 2).index for rank in range(4)] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="`tp` 4 from cuda:2 on needs 6 GPUs, but torch sees 5\nhint: a smaller tp,"):
        rank_device(torch.device("cuda", 2), 0, 4)
    with pytest.raises(ConfigError, match="`tp` 2 x `pp` 3 from cuda:0 on needs 6 GPUs"):
        rank_device(torch.device("cuda"), 0, 2, 3)


def test_arrays_that_cannot_be_written_are_uploaded(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a message are; torch would print a warning of undefined behaviour into the log of a worker."""
    given, from_numpy = np.frombuffer(np.arange(3, dtype="<i4").tobytes(), "<i4"), torch.from_numpy

    def writable(array: Any) -> Any:
        assert array.flags.writeable
        return from_numpy(array)

    monkeypatch.setattr(torch, "from_numpy", writable)
    assert CudaLane(DEVICE, clock).upload(given).tolist() == [0, 1, 2]


def test_a_device_that_is_lost_is_reported_by_the_lane_and_by_downloads(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = CudaLane(DEVICE, clock)
    lane.check()
    with lane.stream():
        begun = lane.begin()
        download = lane.download({"tokens": lane.upload(np.arange(3, dtype=np.int32))}, begun)
    assert download.ready()
    assert download.wait()["tokens"].tolist() == [0, 1, 2]
    assert download.times_us() == (2, 7)

    def lost(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setattr(download._arrived, "query", lost)  # type: ignore[attr-defined]
    with pytest.raises(DeviceLost, match="the device does not work any more: CUDA error: an illegal memory access"):
        download.ready()
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match="cuda:0 does not work any more: CUDA error: an illegal"):
        lane.check()


def test_results_that_have_not_arrived_are_looked_for_again(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(100, 200, 10))
    lane = CudaLane(DEVICE, lambda: next(times))
    download = lane.download({"some": torch.ones(2, device=DEVICE)}, lane.begin())
    answers = iter([False, False, True])
    monkeypatch.setattr(download._arrived, "query", lambda: next(answers))  # type: ignore[attr-defined]
    assert download.wait()["some"].tolist() == [1.0, 1.0]
    assert download.times_us() == (125, 130)  # not before it was looked for the last time in vain


# ------------------------------------------------------------------------------------------------------------- memory


def budget(**more: Any) -> Any:
    given: dict[str, Any] = {
        "page_bytes": 1 << 20, "weight_bytes": GIB, "device": DEVICE, "mem_fraction": 0.9, "largest_pass": lambda: None,
        "graphs": lambda: GIB, "pages_least": 10,
    }  # fmt: skip
    return size_pool(**given | more)


def test_pages_have_what_weights_passes_and_graphs_leave(gpu: FakeCuda) -> None:
    found = budget()
    assert (found.total, found.others, found.activations, found.graphs) == (80 * GIB, GIB, 64 << 20, GIB)
    assert found.pages == (int(80 * GIB * 0.9) - 2 * GIB - (64 << 20) - GIB) // (1 << 20) - 1
    assert "CUDA graphs" in found.table()
    assert budget(pages=20).pages == 20
    with pytest.raises(ConfigError, match=r"`mem_fraction` 0.03 of cuda:0 leaves 0 KV pages, but .* needs 10"):
        budget(mem_fraction=0.03)
    with pytest.raises(ConfigError, match=r"`pages` 90,000 do not fit on cuda:0: .* MiB are lacking"):
        budget(pages=90_000)


def test_a_lack_of_memory_is_reported_with_the_numbers_of_the_device(gpu: FakeCuda) -> None:
    def lacking() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    with pytest.raises(ConfigError) as caught:
        budget(largest_pass=lacking)
    assert str(caught.value) == (
        "there is no room for the largest pass: of 81,920 MiB of cuda:0, 1,024 were ours by then and 79,872 free; the "
        "rest is other processes' and kept by the allocator\nCUDA out of memory. Tried to allocate 2.00 GiB\n"
        "hint: a smaller chunked_prefill_size or max_running_requests"
    )
    with pytest.raises(RuntimeError, match="of another kind"), explained("weights", DEVICE, "none"):
        raise RuntimeError("of another kind")


# -------------------------------------------------------------------------------------------------------------- copies


def test_pages_go_to_pinned_memory_and_come_back(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several pieces; given-up pages are read before anything that is launched later writes to them."""
    from lockstep.runtime.tiers import mover as module

    parts, tensors = pool_on_the_device(3)
    monkeypatch.setattr(module, "STAGING_BYTES", 3 * parts.size)
    lane = CudaLane(DEVICE, clock)
    made = HostMover({"page": parts}, {"page": 60}, lane, None, Identity(b""))
    assert made.host["page"].is_pinned()
    rng = np.random.default_rng(5)
    device, there = rng.permutation(50)[:8].astype(np.int32), np.array([3, 4, 5, 9, 10, 40, 2, 1], np.int32)
    kept = [tensor.cpu() for _, tensor in tensors]
    ended: list[Any] = []
    for given_up in (False, True):
        arrived = threading.Event()

        def done(end: Any, arrived: threading.Event = arrived) -> None:
            ended.append(end)
            arrived.set()

        made.host["page"].zero_()
        started = len(gpu.waits)
        made.begin(Move("write", 0, device, there, given_up=given_up), done)
        assert arrived.wait(60)
        assert {one.what for one in gpu.waits[started:]} <= {"an event is waited for"}
        for _, tensor in tensors:
            tensor.fill_(255)
        arrived.clear()
        made.begin(Move("load", 1, device, there), done)
        assert arrived.wait(60)
        for (_, tensor), before in zip(tensors, kept, strict=True):
            assert torch.equal(tensor.cpu()[device], before[device])
            tensor.copy_(before)
    assert [(end.pages_done, end.failure) for end in ended] == [(8, None)] * 4
    made.close()
    assert not made.host["page"].is_pinned()


@pytest.mark.parametrize("pages", [0, 8])
def test_windows_and_states_go_to_pinned_memory_and_come_back(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """With pages or alone, in several pieces; what is given up is read before anything that is launched later."""
    from lockstep.runtime.tiers import mover as module

    kinds: tuple[BlockKind, ...] = ("page", "window", "state")
    pools = {kind: pool_on_the_device(seed) for seed, kind in enumerate(kinds)}
    parts = {kind: one for kind, (one, _) in pools.items()}
    monkeypatch.setattr(module, "STAGING_BYTES", 3 * parts["page"].size)
    made = HostMover(parts, {"page": 60, "window": 30, "state": 20}, CudaLane(DEVICE, clock), None, Identity(b""))
    assert all(one.is_pinned() for one in made.host.values())
    rng = np.random.default_rng(6)
    device = {kind: rng.permutation(50)[: 8 if kind != "page" else pages].astype(np.int32) for kind in kinds}
    there = {kind: rng.permutation(20)[: len(device[kind])].astype(np.int32) for kind in kinds}
    copies = (
        BlockCopy("window", device["window"], there["window"]), BlockCopy("state", device["state"], there["state"]),
    )  # fmt: skip
    kept = {kind: [tensor.cpu() for _, tensor in tensors] for kind, (_, tensors) in pools.items()}
    ended: list[Any] = []
    for given_up in (False, True):
        for kind in ("write", "load"):
            arrived = threading.Event()

            def done(end: Any, arrived: threading.Event = arrived) -> None:
                ended.append(end)
                arrived.set()

            given = given_up and kind == "write"
            made.begin(Move(kind, 0, device["page"], there["page"], given_up=given, copies=copies), done)
            assert arrived.wait(60)
            for _, tensors in pools.values():
                for _, tensor in tensors:
                    if kind == "write":
                        tensor.fill_(255)
        for name, (_, tensors) in pools.items():
            for (_, tensor), before in zip(tensors, kept[name], strict=True):
                assert torch.equal(tensor.cpu()[device[name]], before[device[name]])
                tensor.copy_(before)
    assert [(end.pages_done, end.failure) for end in ended] == [(pages, None)] * 4
    made.close()
    assert not any(one.is_pinned() for one in made.host.values())


def test_host_memory_that_cannot_be_pinned_is_refused(gpu: FakeCuda) -> None:
    gpu.registering = 2
    parts, _ = pool_on_the_device(3)
    with pytest.raises(ConfigError, match=r"host memory cannot be pinned \(CUDA error 2\)"):
        HostMover({"page": parts}, {"page": 60}, CudaLane(DEVICE, clock), None, Identity(b""))


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
@pytest.mark.parametrize("registers", [True, False])
def test_pages_go_from_gpu_to_gpu(gpu: FakeCuda, transport: Any, registers: bool) -> None:
    """By host memory, pinned or not, and by NIXL from the memory of one device to that of the other."""
    gpu.registering = 0 if registers else 1
    with nixl_in_process() as agents:
        (source, given), (target, taken) = pool_on_the_device(1), pool_on_the_device(2)
        before = [tensor.cpu() for _, tensor in taken]
        more: dict[str, Any] = {"place": RankPlace(0), "kv_heads": 2, "model": "m", "checksums": True}
        sender, receiver = (
            RankPages([SentBlocks("page", pages, parts_in(pages))], 4, transport=transport, **more)
            for pages in (source, target)
        )
        places = (sender.open_staging(0),)
        receiver.open_sender(1, sender.layout, places)
        for agent in agents.values():
            agent.polls = 3
        pages, into = np.array([3, 9, 4], np.int32), np.array([11, 2, 19], np.int32)
        started = len(gpu.waits)
        checksums = (sender.stage(0, 1, pages),)
        receiver.fetch(1, Fetch(1, 3, 0, into, checksums))
        assert {one.what for one in gpu.waits[started:] if one.where.startswith("transfer")} <= {
            "a stream is waited for", "copy to the device", "copy to the CPU", "copy to the device, memory is pageable",
            "copy to the CPU, memory is pageable",
        }  # fmt: skip
        for (_, there), (_, here), old in zip(given, taken, before, strict=True):
            assert torch.equal(here.cpu()[into], there.cpu()[pages])
            others = np.setdiff1d(np.arange(50), into)
            assert torch.equal(here.cpu()[others], old[others])
        with pytest.raises(TransferFailed, match="another checksum"):
            receiver.fetch(1, Fetch(1, 3, 0, into, (checksums[0] ^ 1,)))
        sender.close_all()
        receiver.close_all()
        assert all(not agent.registered and not agent.peers for agent in agents.values())
        assert len(agents) == (2 if transport == "nixl" else 0)


def test_nixl_reads_the_memory_of_a_device_or_reports_why_not(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.runtime.transfer import nixl as module

    with nixl_in_process() as agents:
        staging = make_staging("nixl", 2, 64, DEVICE)
        assert "|VRAM|0|" in staging.place.address
        reader = open_reader(staging.place, DEVICE)
        staging.slot(1)[:] = torch.arange(64, dtype=torch.uint8, device=DEVICE)
        assert reader.read(1, 40).cpu().tolist() == list(range(40))
        theirs, ours = agents.values()
        ours.fails = "ERR"
        with pytest.raises(TransferFailed, match="NIXL reports ERR"):
            reader.read(0, 8)
        ours.polls = 1 << 30
        monkeypatch.setattr(module, "STALL_S", 0.0)
        with pytest.raises(TransferFailed, match="the prefill engine sent nothing for 0 s"):
            reader.read(0, 8)
        theirs.registered.clear()
        with pytest.raises(TransferFailed, match="NIXL: RuntimeError: NIXL_ERR_NOT_FOUND"):
            reader.read(0, 8)
        del agents[theirs.name]
        with pytest.raises(ConfigError, match="the NIXL agent of the prefill engine cannot be reached"):
            open_reader(staging.place, DEVICE)


# --------------------------------------------------------------------------------------------------------- collectives


def on_two_ranks(run: Callable[[int], object]) -> list[object]:
    """Run a function for two ranks, each in a thread. Returns the results; raises the first error."""
    found: list[object] = [None, None]

    def rank(number: int) -> None:
        try:
            found[number] = run(number)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a collective does not end"
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def test_ranks_sum_join_and_exchange_over_nccl(gpu: FakeCuda, tmp_path: Path) -> None:
    def run(rank: int) -> object:
        one = Collectives(str(tmp_path / "store"), rank, 2, DEVICE, 30.0)
        mine = torch.arange(6.0, device=DEVICE).view(2, 3) + 10 * rank
        found = [
            one.all_reduce(mine.clone()),
            one.all_reduce(mine[:0]),
            one.all_gather(mine.t()),
            one.all_gather(mine[:0]),
            one.gather_rows(mine),
            one.all_to_all(mine, [rank, 2 - rank], [0, 1 + rank] if rank == 0 else [2, 1]),
        ]
        one.close()
        return [part.cpu().tolist() for part in found]

    with nccl_by_gloo(gpu):
        first, second = on_two_ranks(run)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[:5] == second[:5]
    assert first[0] == [[10, 12, 14], [16, 18, 20]]
    assert first[2] == [[0, 3, 10, 13], [1, 4, 11, 14], [2, 5, 12, 15]]
    assert first[4] == [[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15]]
    assert second[5] == [[0, 1, 2], [3, 4, 5], [13, 14, 15]]
    assert first[5] == [[10, 11, 12]]


def test_outputs_of_encoders_go_over_nccl(gpu: FakeCuda, tmp_path: Path) -> None:
    """Each from its rank, with features for deeper layers; and why one has failed."""
    owners = [0, 1, 1, 0]

    def output(number: int) -> tuple[Any, tuple[Any, ...]]:
        first = torch.full((number + 2, 3), float(number), device=DEVICE)
        return first, ((first + 10,) if number % 2 else ())

    def run(rank: int) -> object:
        group = Collectives(str(tmp_path / "store"), rank, 2, DEVICE, 30.0)
        share = EncoderShare(group.parallel(), CudaLane(DEVICE, lambda: 0), 3, torch.float32)
        own: dict[int, Any] = {i: output(i) for i, owner in enumerate(owners) if owner == rank}
        if rank == 1:
            own[2] = "no such picture"
        found = share.exchange([bytes([number]) * 32 for number in range(4)], owners, own)
        group.close()
        return [one if isinstance(one, str) else [part.cpu().tolist() for part in (one[0], *one[1])] for one in found]

    with nccl_by_gloo(gpu):
        first, second = on_two_ranks(run)
    assert isinstance(first, list)
    assert first == second
    assert first[0] == [[[0.0] * 3] * 2]
    assert first[1] == [[[1.0] * 3] * 3, [[11.0] * 3] * 3]
    assert first[2] == "no such picture"
    assert first[3] == [[[3.0] * 3] * 5, [[13.0] * 3] * 5]


def test_the_halves_of_a_batch_put_collectives_beside_each_other(gpu: FakeCuda, tmp_path: Path) -> None:
    """While halves take turns a collective runs on a stream of the group, and its result is waited for there."""

    def run(rank: int) -> object:
        one = Collectives(str(tmp_path / "store"), rank, 2, DEVICE, 30.0)
        seen = []
        for taken in (False, True, False):
            one.turns = SimpleNamespace(taken=taken, pass_on=lambda: None)  # type: ignore[assignment]
            one.all_reduce(torch.ones(2, device=DEVICE))
            seen.append([options.asyncOp for options in one._options])
        return seen

    with nccl_by_gloo(gpu):
        assert on_two_ranks(run) == [[[False] * 4, [True] * 4, [False] * 4]] * 2


def test_an_aborted_group_releases_its_rank_with_one_sentence(gpu: FakeCuda, tmp_path: Path) -> None:
    def run(rank: int) -> object:
        one = Collectives(str(tmp_path / "store"), rank, 2, DEVICE, 30.0)
        one.abort()
        with pytest.raises(CollectiveFailed, match=f"a sum of the 2 ranks failed on rank {rank}: NCCL communicator"):
            one.all_reduce(torch.ones(2, device=DEVICE))
        return None

    with nccl_by_gloo(gpu):
        on_two_ranks(run)


def test_stages_send_over_nccl(gpu: FakeCuda, tmp_path: Path) -> None:
    def run(number: int) -> object:
        one = StageLinks(str(tmp_path / "column"), StageLayers(number, 2), DEVICE, 30.0, "127.0.0.1")
        one.take_sizes(4, torch.float32)
        if number == 0:
            one.send_hidden(torch.arange(24.0, device=DEVICE).view(2, 3, 4))
            one.sent()
            found = one.expect_drawn(3)().cpu().tolist()
        else:
            found = one.expect_hidden(3)().cpu().flatten().tolist()
            one.send_drawn(torch.tensor([5, 6, 7], dtype=torch.int32).to(DEVICE))
        one.close()
        return found

    with nccl_by_gloo(gpu):
        assert on_two_ranks(run) == [[5, 6, 7], list(range(24))]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_weights_come_over_nccl(gpu: FakeCuda, address: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sent = [torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)]

    def run(rank: int) -> object:
        end = WeightsGroup(address, port, rank, 2, backend="nccl", device=DEVICE)
        for tensor in sent if rank == 0 else ():
            end.send(tensor)
        found = [end.receive(tuple(one.shape), one.dtype) for one in sent] if rank else sent
        end.close()
        return all(torch.equal(one, other) for one, other in zip(found, sent, strict=True))

    with nccl_by_gloo(gpu):
        assert on_two_ranks(run) == [True, True]


def test_a_torch_without_nccl_is_named(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"goes from GPU to GPU, but torch .* has none\nhint: gloo, at every end"):
        WeightsGroup("127.0.0.1", 1, 0, 2, backend="nccl", device=DEVICE)


# ------------------------------------------------------------------------------------------------------------- settings


def test_saved_memory_of_a_full_device_is_a_lack_of_memory(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """For torch by an allocation of no address, for a release by one sentence."""
    driver = MappedMemory()
    monkeypatch.setattr(memory_saver, "CudaDriver", lambda number: driver)
    saver = memory_saver.MemorySaver(DEVICE)
    with saver.place("weights"):
        kept = torch.ones(MappedMemory.granularity, dtype=torch.uint8, device=DEVICE)
    driver.room = driver.granularity
    with saver.place("kv_cache"), pytest.raises(torch.OutOfMemoryError):
        torch.ones(4, device=DEVICE)

    def full(address: int, size: int) -> Any:
        raise MemoryError("the host is full")

    monkeypatch.setattr(driver, "read", full)
    with pytest.raises(ConfigError, match=r"the weights, [0-9,]+ bytes, have no room in the memory of the host"):
        saver.release(("weights", "kv_cache"))
    assert kept.cpu().tolist() == [1] * MappedMemory.granularity


def test_rows_that_no_step_of_a_gpu_divides_are_widened_or_refused(gpu: FakeCuda) -> None:
    """A scale for each 24 inputs of a rank: tensor cores multiply fp8 by 32."""

    def made(*, required: bool) -> Fp8Matrices:
        stored = WeightFormat(method="fp8", layout="fp8", block=(16, 24))
        rounding = RowRounding("dynamic", required)
        return Fp8Matrices([StoredMatrix("part", 16, 48)], 0, 0, 1, torch.float32, DEVICE, stored, rounding)

    assert made(required=False).activations == ""
    with pytest.raises(ConfigError, match=r"on this rank 24 inputs of `part` share a scale, and a GPU multiplies"):
        made(required=True)


def test_products_of_many_rows_are_widened_first(gpu: FakeCuda) -> None:
    """Torch multiplies then; experts by their rows, in one launch."""
    stored = WeightFormat(method="fp8", layout="fp8", block=(16, 16))
    one = Fp8Matrices([StoredMatrix("part", 32, 64)], 0, 0, 1, torch.bfloat16, DEVICE, stored)
    one.weight.data.copy_(torch.ones(one.weight.shape))
    one.scale.data.fill_(0.5)
    rows = torch.ones(FUSED_ROWS_MAX + 1, 64, dtype=torch.bfloat16, device=DEVICE)
    assert one.linear(rows).cpu().unique().tolist() == [32.0]
    assert not gpu.launches
    assert one.linear(rows[:FUSED_ROWS_MAX]).shape == (FUSED_ROWS_MAX, 32)
    parts, dtype = [StoredMatrix("part", 32, 64)], torch.bfloat16
    narrow = Fp8Matrices(parts, 3, 0, 1, dtype, DEVICE, stored, RowRounding("dynamic"))
    assert narrow.activations == ""  # a step of fp8 by fp8 would cross a border between scales
    ends = torch.tensor([2, 2, 5], dtype=torch.int32).to(DEVICE)
    before = len(gpu.waits)
    plain = Fp8Matrices(parts, 3, 0, 1, dtype, DEVICE, stored)
    assert plain.grouped(rows[:5], ends).shape == (5, 32)
    wide = WeightFormat(method="fp8", layout="fp8", block=(32, 32))
    rounded = Fp8Matrices(parts, 3, 0, 1, dtype, DEVICE, wide, RowRounding("dynamic"))
    assert rounded.grouped(rows[:5], ends).shape == (5, 32)
    assert gpu.launches["fp8_linear_kernel"] == 2
    assert gpu.launches["scaled_linear_kernel"] == 1
    assert gpu.waits[before:] == []
