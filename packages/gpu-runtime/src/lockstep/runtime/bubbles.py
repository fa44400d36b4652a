"""The GPU bubble timer: how long the device was idle while a request waited for it.

    requests   |  r1 arrives ........ r1 ends |        | r2 arrives .............. r2 ends |
    device          | b1 |  | b2 ||  b3  |                  |   b4   |   |   b5   |
    bubbles    |####|    |##|               ##|        |####|        |###|        |########|

A bubble is time in which the device ran nothing although a request had arrived and not ended; `bubble_share` is that
over the time in which any was open. It is the definition of docs/metrics.md, which the simulator computes over a whole
run; here it is a fold over events as they come, to be read at any moment. Its times are those of the device that
BatchFinished carries.

On a GPU it is a lower bound. A batch begins there with an event in front of it, which happens as soon as it is launched
and all before it is done, while the CPU may still be packing and launching the kernels behind it: time in which the GPU
waits for that counts as busy. Where launches lie far ahead, the two agree. For how long no kernel ran at all, only a
profile shows (docs/runtime.md, "Profiling"); `gpu-check` states that one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import BatchFinished, ObservedEvent, RequestArrived, RequestFinished, RequestRejected
from lockstep.core.contract.samples import sample_count


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What became of the device's time so far."""

    work_us: int  # at least one request was open
    busy_us: int  # a batch ran
    bubble_us: int  # at least one request was open, and none ran

    @property
    def bubble_share(self) -> float | None:
        """Bubbles as a share of the time with work there; None before there was any."""
        return self.bubble_us / self.work_us if self.work_us else None


class BubbleTimer:
    """Folds events and Steps; `fold` is a `RuntimeHost`'s `observe`. Batches must be reported in the order they ran."""

    def __init__(self) -> None:
        self.busy_us = 0
        self._open = 0  # requests that arrived and have not ended
        self._in_flight = 0
        self._newest_us = 0  # time of the newest event
        self._finished_us = 0  # up to which it is known what ran
        self._past_us = 0  # work of the spans that are no longer kept
        self._busy_at_work_us = 0
        self._spans: deque[list[int]] = deque()  # with work [start, stop), the end of the last perhaps still to come

    def fold(self, event: ObservedEvent, step: Step) -> None:
        """Take in an event and what was decided."""
        self._newest_us = event.time_us
        if type(event) is BatchFinished:
            self._in_flight -= 1
            self._ran(event.started_us, event.finished_us)
        elif type(event) is RequestArrived:
            if not self._open:
                self._spans.append([event.time_us, -1])
            self._open += sample_count(event)
        ended = sum(type(one) is RequestFinished or type(one) is RequestRejected for one in step.decided)
        if ended:
            self._open -= ended
            if not self._open:
                self._spans[-1][1] = event.time_us
                if self._spans[-1][0] == event.time_us:  # a rejection
                    self._spans.pop()
        if step.launched() is not None:
            self._in_flight += 1

    def read(self) -> DeviceTime:
        """As of the newest event; while a batch is in flight, as of the end of the one before it."""
        until_us = self._finished_us if self._in_flight else self._newest_us
        work_us = self._past_us
        for start_us, stop_us in list(self._spans):
            work_us += max(0, (until_us if stop_us < 0 else min(stop_us, until_us)) - start_us)
        return DeviceTime(work_us, self.busy_us, max(0, work_us - self._busy_at_work_us))

    def _ran(self, started_us: int, finished_us: int) -> None:
        """A batch ran; what its time has in common with work is no bubble."""
        started_us = max(started_us, self._finished_us)  # two stages, or two clocks: no time counts twice
        if finished_us <= started_us:
            return
        self.busy_us += finished_us - started_us
        for start_us, stop_us in self._spans:
            last_us = finished_us if stop_us < 0 else min(stop_us, finished_us)
            self._busy_at_work_us += max(0, last_us - max(start_us, started_us))
        self._finished_us = finished_us
        while self._spans and 0 <= self._spans[0][1] <= finished_us:
            start_us, stop_us = self._spans.popleft()
            self._past_us += stop_us - start_us
