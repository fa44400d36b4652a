"""Streams, events and pinned memory of a GPU, and the same interface without them on the CPU.

All launches that change or read the device's state run on one stream, `forward`, in launch order. Results leave on a
second stream, `copy`, so that the next pass does not wait for a transfer. While serving, the CPU waits in one place
only, `Download.wait`, and only for a batch that it is about to deliver. (At start it waits for captures and
measurements; after an error, in `StreamLane.check`; in FlashInfer's ring of pinned plans, if more plans are in flight
than it holds; for the numbers of rows that experts on other ranks receive; and in encoders of media, since
transformers' code reads their sizes from the device, and ranks that divide contents read each other's notes.)

    CPU      | pack n | launch n |            | pack n+1 | launch n+1 |  wait n | deliver n | pack n+2 ...
    forward  |                   | fold n, pass n, sample n | fold n+1, pass n+1, sample n+1 |
    copy                                                    | tokens n |                      | tokens n+1 |

Hazards, and how each is closed:

1.  The upload of a plan still reads its staging memory when the next plan is packed. Each plan, and each mask, is
    packed into its own pinned memory; torch's caching host allocator reuses that only after the copy.
2.  The page table changes while a pass still reads it. Changes are launches on `forward`, behind that pass.
3.  A wider page table replaces one that a pass still reads. Tables are made and replaced inside `StreamLane.stream`, so
    the memory of the old one is reused only by launches that follow on `forward`.
4.  A decode needs a token that is not sampled yet. It reads `Tables.newest` on the device, which sampling wrote before,
    on the same stream.
5.  A batch would run before the batch in front of it is sampled (deferred sampling). The executor keeps it in its queue
    until the SampleBatch of that batch has arrived.
6.  The copy of results begins before they are computed. `copy` waits for an event recorded on `forward` behind them.
7.  Results are freed, and `forward` reuses their memory, while `copy` reads them. The download keeps a reference until
    its event has happened.
8.  The CPU reads results that have not arrived. `Download.wait` waits for the event recorded behind the copy.
9.  A shape depends on a value on the device. Shapes come from the plan, which is on the CPU; `ForwardBatch` has copies
    of such values on the host.
10. The default stream runs concurrently with `forward`. Weights are made on it before the lane, which waits for them
    once. Pool, tables and the inputs of graphs are made inside `StreamLane.stream`, and all later changes of them are
    launched inside it.
11. The inputs of a CUDA graph are filled for batch n + 1 while n is replayed. They are filled by launches on `forward`,
    behind the replay; every copy of a backend's plan is also launched there.
12. A replay overwrites the results of the previous one. Logits are computed from its hidden states on `forward`, before
    the next replay, and all results on `copy` are copies outside of the graphs' memory.
13. A batch fails before its changes are in the page table, and a later one writes KV to pages that its rows have lost.
    Such changes are folded, in launch order, before anything else runs (`Executor._unfolded`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.runtime.errors import DeviceLost

Clock = Callable[[], int]
"""Returns whole microseconds since the journal began."""

WhenToRun = Literal["launch", "collection"]

POLL_S = 50e-6  # interval of checks whether a batch has ended
ANCHOR_US_MAX = 10_000_000  # events measure time in float32 milliseconds, which are too coarse over longer stretches


class Download(Protocol):
    """Results that are being copied to the CPU."""

    def ready(self) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self) -> dict[str, NDArray[Any]]:
        """Wait for the results and return them by name. Raises DeviceLost if they cannot arrive."""

    def times_us(self) -> tuple[int, int]:
        """Return when the device began and ended the batch, in microseconds of the clock; valid after `wait`.

        The start is the time at which all earlier work was done and `begin` had been called. Time in which the device
        waited for launches of the batch is included.
        """


class StreamLane(Protocol):
    """The queue of a device's work, in order."""

    device: torch.device
    eager: bool  # work is done at launch; otherwise when its results are read

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context in which launches go to the stream of forward passes."""

    def begin(self) -> Any:
        """Mark the start of a batch. Returns a value for `download`."""

    def upload(self, array: NDArray[Any]) -> Tensor:
        """Copy an array to the device, behind all earlier work. The array may be changed at once."""

    def download(self, tensors: Mapping[str, Tensor], begun: Any) -> Download:
        """Start the copy of results to the CPU, behind all earlier work."""

    def check(self) -> None:
        """Raise DeviceLost if the device does not work any more. May wait for it; for use after an error."""


class CpuLane:
    """The CPU as a device: runs work when it is launched or, to expose mistakes of order, when it is collected.

    In both cases a result is not `ready` before `wait`. So batches are delivered as late as possible, and as many are
    in flight as the engine's overlap depth allows.
    """

    def __init__(self, clock: Clock, *, run_at: WhenToRun = "launch") -> None:
        self.device = torch.device("cpu")
        self.eager = run_at == "launch"
        self._clock = clock

    def stream(self) -> AbstractContextManager[Any]:
        """Return an empty context."""
        return nullcontext()

    def begin(self) -> int:
        """Return the time."""
        return self._clock()

    def upload(self, array: NDArray[Any]) -> Tensor:
        """Return a copy."""
        return torch.from_numpy(array.copy())

    def download(self, tensors: Mapping[str, Tensor], begun: Any) -> Download:
        """Copy the results at once."""
        return _Here({name: tensor.numpy().copy() for name, tensor in tensors.items()}, begun, self._clock())

    def check(self) -> None:
        """Do nothing: the CPU cannot be lost."""


class _Here:
    """Results that have arrived."""

    def __init__(self, arrays: dict[str, NDArray[Any]], started_us: int, finished_us: int) -> None:
        self._arrays = arrays
        self._times = (started_us, finished_us)

    def ready(self) -> bool:
        return False  # keeps batches in flight, see CpuLane

    def wait(self) -> dict[str, NDArray[Any]]:
        return self._arrays

    def times_us(self) -> tuple[int, int]:
        return self._times


class CudaLane:
    """One GPU: a stream for the work and one for the results.

    Everything that launches kernels must run inside `stream()`; the executor ensures that.
    """

    eager = True

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device = device
        self.forward = torch.cuda.Stream(device)
        self.copy = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # waits for tensors that were made on the default stream
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record(self.forward)
        anchor.synchronize()
        self.times = EventTimes(clock, anchor)

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context with the stream `forward`."""
        return torch.cuda.stream(self.forward)

    def begin(self) -> torch.cuda.Event:
        """Record an event in front of the batch."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.forward)
        return event

    def upload(self, array: NDArray[Any]) -> Tensor:
        """Copy an array through pinned memory, without waiting."""
        host = torch.from_numpy(array if array.flags.writeable else array.copy())  # those of a message are not
        pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        pinned.copy_(host)
        return pinned.to(self.device, non_blocking=True)

    def download(self, tensors: Mapping[str, Tensor], begun: Any) -> Download:
        """Start the copy of results to pinned memory, on the copy stream."""
        launched_us = self.times.clock()
        ended = torch.cuda.Event(enable_timing=True)
        ended.record(self.forward)
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self.copy):
            self.copy.wait_event(ended)
            pinned = {name: torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for name, one in tensors.items()}
            for name, tensor in tensors.items():
                pinned[name].copy_(tensor, non_blocking=True)
            arrived.record(self.copy)
        return _Coming(self.times, dict(tensors), pinned, arrived, begun, ended, launched_us)

    def check(self) -> None:
        """Wait for the device, which raises errors of its context."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise DeviceLost(f"{self.device} does not work any more: {_first_line(error)}") from error


class TimedEvent(Protocol):
    """An event of a device from which times are computed."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to another."""


class EventTimes:
    """Converts events to times of the host's clock. The clocks drift apart by some parts in a million.

    One moment with its time on both clocks, the anchor, dates later events. The host's own checks bound the date: one
    before which the batch had not ended, and one after which it had. A date outside is moved to the bound and becomes
    the new anchor.
    """

    def __init__(self, clock: Clock, anchor: TimedEvent) -> None:
        self.clock = clock
        self._anchor, self._anchor_us = anchor, clock()  # the event has only just happened

    def times_us(self, begun: TimedEvent, ended: TimedEvent, not_before_us: int) -> tuple[int, int]:
        """Return when a batch began and ended, in microseconds, by two events that have happened.

        Args:
            not_before_us: a time at which the batch had not ended.
        """
        dated_us = self._anchor_us + round(1000.0 * self._anchor.elapsed_time(ended))
        finished_us = min(max(dated_us, not_before_us), self.clock())
        if finished_us != dated_us or finished_us - self._anchor_us > ANCHOR_US_MAX:
            self._anchor, self._anchor_us = ended, finished_us
        return finished_us - round(1000.0 * begun.elapsed_time(ended)), finished_us


class _Coming:
    """Results that are being copied through pinned memory."""

    def __init__(
        self,
        times: EventTimes,
        sources: dict[str, Tensor],
        pinned: dict[str, Tensor],
        arrived: torch.cuda.Event,
        begun: torch.cuda.Event,
        ended: torch.cuda.Event,
        launched_us: int,
    ) -> None:
        self._times = times
        self._sources = sources
        self._pinned = pinned
        self._arrived = arrived
        self._begun, self._ended = begun, ended
        self._not_before_us = launched_us  # latest time at which the batch had not ended

    def ready(self) -> bool:
        looked_us = self._times.clock()
        try:
            if self._arrived.query():
                return True
        except RuntimeError as error:
            raise DeviceLost(f"the device does not work any more: {_first_line(error)}") from error
        self._not_before_us = looked_us
        return False

    def wait(self) -> dict[str, NDArray[Any]]:
        while not self.ready():
            time.sleep(POLL_S)
        self._sources.clear()
        return {name: np.array(tensor.numpy()) for name, tensor in self._pinned.items()}

    def times_us(self) -> tuple[int, int]:
        return self._times.times_us(self._begun, self._ended, self._not_before_us)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
