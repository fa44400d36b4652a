"""The GPU bubble timer: how long the device was idle while requests were open.

    requests   |  r1 arrives ........ r1 ends |        | r2 arrives .............. r2 ends |
    device          | b1 |  | b2 ||  b3  |                  |   b4   |   |   b5   |
    bubbles    |####|    |##|               ##|        |####|        |###|        |########|

A bubble is time in which the device ran nothing although a request had arrived and not ended. `bubble_share` is bubble
time over the time in which any request was open. docs/metrics.md defines both, and the simulator computes them over a
whole run. This module is a fold over events, which can be read at any moment. Its times are the device times in
BatchFinished.

On a GPU it is a lower bound. A batch begins there with an event in front of its kernels. That event happens as soon as
it is launched and the passes before it are done, while the CPU may still be packing and launching the kernels behind
it: time in which the GPU waits for those launches counts as busy. When launches are far ahead of the device, the two
agree. Only a profile shows how long no kernel ran at all (docs/runtime.md, "Profiling"); `gpu-check` reports that time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import BatchFinished, ObservedEvent, RequestArrived, RequestFinished, RequestRejected
from lockstep.core.contract.samples import sample_count


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """How the device's time was used so far."""

    work_us: int  # time with at least one open request
    busy_us: int  # time in which a batch ran
    bubble_us: int  # time with at least one open request and no batch running

    @property
    def bubble_share(self) -> float | None:
        """Return bubbles as a share of the time with open requests; None before the first request."""
        return self.bubble_us / self.work_us if self.work_us else None


class BubbleTimer:
    """A fold over events and Steps.

    `fold` is an `observe` of `RuntimeHost`. Batches must be reported in the order they ran.
    """

    def __init__(self) -> None:
        self.busy_us = 0
        self._open = 0  # requests that arrived and have not ended
        self._in_flight = 0
        self._newest_us = 0  # time of the newest event
        self._finished_us = 0  # up to this time it is recorded what ran
        self._past_us = 0  # open-request time of the spans that are no longer kept
        self._busy_at_work_us = 0
        self._spans: deque[list[int]] = deque()  # [start, stop) with open requests; stop is -1 while it is open

    def resume(self, requests: int, now_us: int) -> None:
        """Count requests that an earlier generation of the engine left open, from now on."""
        if requests:
            self._open += requests
            self._newest_us = now_us
            self._spans.append([now_us, -1])

    def fold(self, event: ObservedEvent, step: Step) -> None:
        """Fold one event and its Step."""
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
                if self._spans[-1][0] == event.time_us:  # an arrival that was rejected at once
                    self._spans.pop()
        if step.launched() is not None:
            self._in_flight += 1

    def read(self) -> DeviceTime:
        """Return the sums as of the newest event; while a batch is in flight, as of the end of the batch before it."""
        until_us = self._finished_us if self._in_flight else self._newest_us
        work_us = self._past_us
        for start_us, stop_us in list(self._spans):
            work_us += max(0, (until_us if stop_us < 0 else min(stop_us, until_us)) - start_us)
        return DeviceTime(work_us, self.busy_us, max(0, work_us - self._busy_at_work_us))

    def _ran(self, started_us: int, finished_us: int) -> None:
        """Add a batch that ran; the part of its time inside a span with open requests is no bubble."""
        started_us = max(started_us, self._finished_us)  # two stages or two clocks: no time counts twice
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
