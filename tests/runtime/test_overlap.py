"""When a device's batches ended, by the clock of the host; with events that only look like CUDA's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.runtime.errors import DeviceLost  # noqa: E402
from lockstep.runtime.overlap import EventTimes, _Coming  # noqa: E402

HOURS_US = 3_600_000_000


class Host:
    """A clock, in whole microseconds."""

    now_us = 0

    def __call__(self) -> int:
        return self.now_us


class Event:
    """A moment, on a device whose clock is off by so much."""

    def __init__(self, happens_us: int, off: float, host: Host) -> None:
        self.happens_us, self._off, self._host = happens_us, off, host

    def elapsed_time(self, end_event: Event) -> float:
        return float(np.float32((end_event.happens_us - self.happens_us) * (1 + self._off) / 1000.0))

    def query(self) -> bool:
        return self._host.now_us >= self.happens_us


def served(off: float, *, looks_us: int | None, hours: int = 3) -> list[tuple[int, int, int, int]]:
    """Batches for hours, each collected once it is ready: begun and ended, in truth and as dated.

    Args:
        looks_us: how long before its end the host sees that a batch runs on; None: it comes too late for that.
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
def test_times_do_not_drift_though_nobody_ever_waits(off: float) -> None:
    for begun_us, ended_us, started_us, finished_us in served(off, looks_us=200):
        assert ended_us - 200 <= finished_us <= ended_us + 300
        assert abs((finished_us - started_us) - (ended_us - begun_us)) <= 3


@pytest.mark.parametrize("off", [50e-6, -50e-6])
def test_a_host_that_is_always_late_knows_when_it_launched(off: float) -> None:
    dates = served(off, looks_us=None)
    assert all(ended_us - 20_050 <= finished_us <= ended_us + 300 for _, ended_us, _, finished_us in dates)


def test_a_clock_that_is_right_is_believed() -> None:
    assert all(
        (begun_us, ended_us) == (started_us, finished_us)
        for begun_us, ended_us, started_us, finished_us in served(0.0, looks_us=200, hours=1)
    )


def test_a_device_that_is_lost_says_so_when_it_is_looked_at() -> None:
    class Broken(Event):
        def query(self) -> bool:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore of it")

    host = Host()
    broken = Broken(5, 0.0, host)
    coming: Any = _Coming(EventTimes(host, broken), {}, {}, broken, broken, broken, 0)  # type: ignore[arg-type]
    with pytest.raises(DeviceLost, match=r"does not work any more: CUDA error: unspecified launch failure$"):
        coming.ready()
