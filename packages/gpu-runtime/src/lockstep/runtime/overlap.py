"""Streams, events and pinned memory; and the same without any of them, on the CPU.

Everything that changes or reads what the device keeps runs on one stream, `forward`, in launch order. Results leave on
a second one, `copy`, so that the next pass does not stand behind a transfer. While it serves, the CPU waits in one
place only, `Download.wait`, and only for a batch that it is about to deliver. (At start it waits for captures and
measurements; after an error, in `StreamLane.check`; and in FlashInfer's ring of pinned plans, if more were in flight
than it holds.)

    CPU      | pack n | launch n |            | pack n+1 | launch n+1 |  wait n | deliver n | pack n+2 ...
    forward  |                   | fold n, pass n, sample n | fold n+1, pass n+1, sample n+1 |
    copy                                                    | tokens n |                      | tokens n+1 |

Hazards, and how each is closed:

1.  The upload of a plan still reads its staging memory when the next plan is packed. Each plan, and each mask, is
    packed into pinned memory of its own; torch's caching host allocator gives it out again only behind the copy.
2.  The page table changes while a pass still reads it. Changes are launches on `forward`, behind that pass.
3.  A wider page table replaces one that a pass still reads. Tables are made and replaced inside `StreamLane.stream`, so
    that the memory of the old one is given out again only to what comes behind on `forward`.
4.  A decode needs a token that is not sampled yet. It reads `Tables.newest` on the device; sampling wrote it before,
    on the same stream.
5.  A batch would run before the one in front of it is sampled (deferred sampling). The executor keeps it in its queue
    until the SampleBatch of the one before has come.
6.  The copy of results begins before they are computed. `copy` waits for an event recorded on `forward` behind them.
7.  Results are freed, and `forward` uses their memory again, while `copy` reads them. The download holds them until
    its event was seen.
8.  The CPU reads results that are not there yet. `Download.wait` waits for the event recorded behind the copy.
9.  A shape depends on a value on the device. Shapes come from the plan, which is on the CPU; `ForwardBatch` has twins.
10. The default stream runs beside ours. Weights are made on it, before the lane, which waits for them once; pool,
    tables and the inputs of graphs are made inside `StreamLane.stream`, and so is whatever changes them later.
11. The inputs of a CUDA graph are filled for batch n + 1 while n is replayed. They are filled by launches on `forward`,
    behind the replay; so is every copy that a backend's plan makes.
12. A replay overwrites what the one before computed. Logits are taken from its hidden states on `forward`, in front of
    the next replay, and whatever leaves on `copy` is a copy outside of the graphs' memory.
13. A batch fails before its changes are in the page table, and one behind writes KV to pages that its rows do not have
    any more. Such changes are folded, in launch order, before anything else runs (`Executor._unfolded`).
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
"""Whole microseconds since the journal began."""

WhenToRun = Literal["launch", "collection"]

POLL_S = 50e-6  # between two looks at whether a batch has come back
ANCHOR_US_MAX = 10_000_000  # events measure time in float32 milliseconds: not over longer stretches than this


class Download(Protocol):
    """Results on their way to the CPU."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> dict[str, NDArray[Any]]:
        """The results, by name. Raises DeviceLost when they will never come."""

    def times_us(self) -> tuple[int, int]:
        """When the device could begin the batch, with all before it done and `begin` called, and when it ended it; once
        `wait` returned. Launches that the device had to wait for lie between the two."""


class StreamLane(Protocol):
    """Where a device's work is put, in order."""

    device: torch.device
    eager: bool  # work is done at launch; otherwise when its results are read

    def stream(self) -> AbstractContextManager[Any]:
        """Inside of it, launches go to the stream of forward passes."""

    def begin(self) -> Any:
        """Mark the start of a batch. Returns what `download` needs of it."""

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A copy of an array on the device, behind what was put there before. The array may be changed at once."""

    def download(self, tensors: Mapping[str, Tensor], begun: Any) -> Download:
        """Bring results to the CPU, behind what was put there before."""

    def check(self) -> None:
        """Raise DeviceLost if the device does not work any more. May wait for it; for use after an error."""


class CpuLane:
    """The CPU as a device that runs work when it is launched or, to shake out mistakes of order, when it is collected.

    Either way a result is not `ready` before it is waited for: batches are delivered as late as can be, and as
    many are in flight as the engine's depth allows.
    """

    def __init__(self, clock: Clock, *, run_at: WhenToRun = "launch") -> None:
        self.device = torch.device("cpu")
        self.eager = run_at == "launch"
        self._clock = clock

    def stream(self) -> AbstractContextManager[Any]:
        """Nothing to choose."""
        return nullcontext()

    def begin(self) -> int:
        """The time."""
        return self._clock()

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A copy."""
        return torch.from_numpy(array.copy())

    def download(self, tensors: Mapping[str, Tensor], begun: Any) -> Download:
        """Copies, at once."""
        return _Here({name: tensor.numpy().copy() for name, tensor in tensors.items()}, begun, self._clock())

    def check(self) -> None:
        """The CPU works."""


class _Here:
    """Results that are there already."""

    def __init__(self, arrays: dict[str, NDArray[Any]], started_us: int, finished_us: int) -> None:
        self._arrays = arrays
        self._times = (started_us, finished_us)

    def ready(self) -> bool:
        return False  # see CpuLane

    def wait(self) -> dict[str, NDArray[Any]]:
        return self._arrays

    def times_us(self) -> tuple[int, int]:
        return self._times


class CudaLane:
    """One GPU: a stream for the work and one for what comes back.

    Everything that launches kernels must run inside `stream()`; the executor does.
    """

    eager = True

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device = device
        self.forward = torch.cuda.Stream(device)
        self.copy = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # what was made on the default stream is there
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record(self.forward)
        anchor.synchronize()
        self.times = EventTimes(clock, anchor)

    def stream(self) -> AbstractContextManager[Any]:
        """The stream `forward`."""
        return torch.cuda.stream(self.forward)

    def begin(self) -> torch.cuda.Event:
        """An event in front of the batch."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.forward)
        return event

    def upload(self, array: NDArray[Any]) -> Tensor:
        """By way of pinned memory, without waiting."""
        host = torch.from_numpy(array)
        pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        pinned.copy_(host)
        return pinned.to(self.device, non_blocking=True)

    def download(self, tensors: Mapping[str, Tensor], begun: Any) -> Download:
        """To pinned memory, on the copy stream."""
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
        """Wait for the device; an error that spoiled the context comes out here."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise DeviceLost(f"{self.device} does not work any more: {_first_line(error)}") from error


class TimedEvent(Protocol):
    """The part of a device's event from which its time follows."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to another."""


class EventTimes:
    """When events happened, by the host's clock, of which a device's runs off by some parts in a million.

    A moment known by both clocks, the anchor, dates the events behind it. What the host saw itself, that a batch was
    not over yet and later that it was, bounds the date: whatever lies outside is moved, and is the new anchor.
    """

    def __init__(self, clock: Clock, anchor: TimedEvent) -> None:
        self.clock = clock
        self._anchor, self._anchor_us = anchor, clock()  # the event has only just happened

    def times_us(self, begun: TimedEvent, ended: TimedEvent, not_before_us: int) -> tuple[int, int]:
        """When a batch began and ended, by two events that the host has seen completed.

        Args:
            not_before_us: at this moment the batch had not ended.
        """
        dated_us = self._anchor_us + round(1000.0 * self._anchor.elapsed_time(ended))
        finished_us = min(max(dated_us, not_before_us), self.clock())
        if finished_us != dated_us or finished_us - self._anchor_us > ANCHOR_US_MAX:
            self._anchor, self._anchor_us = ended, finished_us
        return finished_us - round(1000.0 * begun.elapsed_time(ended)), finished_us


class _Coming:
    """Results on their way through pinned memory."""

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
        self._not_before_us = launched_us  # the newest moment at which it had not ended

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
