"""The end times of a device's batches on the clock of the host; and uploads with late copies.

With events, staging memory and copies that imitate those of CUDA, and once more on a GPU where there is one.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.runtime import overlap  # noqa: E402
from lockstep.runtime.errors import DeviceLost  # noqa: E402
from lockstep.runtime.overlap import CudaLane, EventTimes, _Coming  # noqa: E402

HOURS_US = 3_600_000_000


class Host:
    """A clock, in whole microseconds."""

    now_us = 0

    def __call__(self) -> int:
        return self.now_us


class Event:
    """A point in time on a device with a clock that is off by this much."""

    def __init__(self, happens_us: int, off: float, host: Host) -> None:
        self.happens_us, self._off, self._host = happens_us, off, host

    def elapsed_time(self, end_event: Event) -> float:
        return float(np.float32((end_event.happens_us - self.happens_us) * (1 + self._off) / 1000.0))

    def query(self) -> bool:
        return self._host.now_us >= self.happens_us


def served(off: float, *, looks_us: int | None, hours: int = 3) -> list[tuple[int, int, int, int]]:
    """Batches for hours, each collected once it is ready: true and dated times of their beginnings and ends.

    Args:
        looks_us: how long before its end the host sees that a batch runs on; None: the host is too late for that.
    """
    host, found = Host(), []
    times = EventTimes(host, Event(0, off, host))
    for number in range(hours * HOURS_US // 1_000_000):
        begun_us = number * 1_000_000 + 100
        ended_us = begun_us + 20_000
        host.now_us = begun_us - 50
        ended = Event(ended_us, off, host)
        coming: Any = _Coming(times, {}, {}, ended, Event(begun_us, off, host), ended, host.now_us)
        if looks_us is not None:
            host.now_us = ended_us - looks_us
            assert not coming.ready()
        host.now_us = ended_us + 300
        assert coming.ready()
        assert coming.wait() == {}
        found.append((begun_us, ended_us, *coming.times_us()))
    return found


@pytest.mark.parametrize("off", [50e-6, -50e-6])
def test_times_do_not_drift_though_there_is_no_wait(off: float) -> None:
    for begun_us, ended_us, started_us, finished_us in served(off, looks_us=200):
        assert ended_us - 200 <= finished_us <= ended_us + 300
        assert abs((finished_us - started_us) - (ended_us - begun_us)) <= 3


@pytest.mark.parametrize("off", [50e-6, -50e-6])
def test_launches_bound_the_times_of_a_host_that_is_always_late(off: float) -> None:
    dates = served(off, looks_us=None)
    assert all(ended_us - 20_050 <= finished_us <= ended_us + 300 for _, ended_us, _, finished_us in dates)


def test_a_clock_that_is_right_is_believed() -> None:
    assert all(
        (begun_us, ended_us) == (started_us, finished_us)
        for begun_us, ended_us, started_us, finished_us in served(0.0, looks_us=200, hours=1)
    )


def test_a_device_that_is_lost_reports_it_when_it_is_looked_at() -> None:
    class Broken(Event):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore of it")

    host = Host()
    broken = Broken(5, 0.0, host)
    coming: Any = _Coming(EventTimes(host, broken), {}, {}, broken, broken, broken, 0)  # type: ignore[arg-type]
    with pytest.raises(DeviceLost, match=r"does not work any more: CUDA error: unspecified launch failure$"):
        coming.ready()


# ------------------------------------------------------------------------------- C14: two launches and a slow copy


class SlowCopies:
    """Pinned memory in which copies to the device wait; it is given out again, newest first, when no copy waits in it.

    Torch's caching host allocator does the same with memory that is no longer referenced.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, Any]] = []  # block, and its target on the device
        self.free: list[Any] = []
        self.blocks = 0

    def empty(self, shape: Any, *, dtype: Any, pin_memory: bool) -> Staging:
        assert pin_memory, "a copy of pageable memory would wait for the stream"
        if not self.free:
            self.blocks += 1
            self.free.append(torch.empty(shape, dtype=dtype))
        return Staging(self, self.free.pop())

    def run(self) -> None:
        """The device carries out its copies."""
        for block, target in self.waiting:
            target.copy_(block)
            self.free.append(block)
        self.waiting.clear()


class Staging:
    """A tensor in pinned memory."""

    def __init__(self, copies: SlowCopies, block: Any) -> None:
        self.copies, self.block = copies, block

    def copy_(self, host: Any) -> None:
        self.block.copy_(host)

    def to(self, device: Any, *, non_blocking: bool) -> Any:
        assert non_blocking, "launches would wait for each other"
        self.copies.waiting.append((self.block, torch.full_like(self.block, -1)))
        return self.copies.waiting[-1][1]


def test_c14_uploads_back_to_back_have_staging_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """MS#103: the next launch wrote its numbers where the copy of the previous one had not read them yet."""
    copies = SlowCopies()
    monkeypatch.setattr(overlap, "torch", SimpleNamespace(from_numpy=torch.from_numpy, empty=copies.empty))
    lane = CudaLane.__new__(CudaLane)
    lane.device = torch.device("cpu")
    packed = np.zeros(1000, np.int32)
    for ahead in (2, 1, 5):
        arrived = []
        for number in range(ahead):
            packed[:] = number
            arrived.append(lane.upload(packed))
        packed[:] = 99
        copies.run()
        assert [sorted(set(one.tolist())) for one in arrived] == [[number] for number in range(ahead)]
    assert copies.blocks == 5, "memory of copies that are over is used again"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_c14_uploads_behind_a_busy_device_arrive_as_they_were() -> None:
    """On a GPU that is kept busy for some 50 ms before the copies."""
    lane = CudaLane(torch.device("cuda"), lambda: time.monotonic_ns() // 1000)
    packed = np.zeros(1_000_000, np.int32)
    for _ in range(3):
        with lane.stream():
            torch.cuda._sleep(100_000_000)
            arrived = []
            for number in range(1, 6):
                packed[:] = number
                arrived.append(lane.upload(packed))
            packed[:] = 99
            waited = not lane.forward.query()
        lane.check()
        assert waited, "the copies were over before the next array was packed: the sleep is too short to show anything"
        assert [one.unique().tolist() for one in arrived] == [[number] for number in range(1, 6)]
