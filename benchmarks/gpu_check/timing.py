"""Clocks: of a GPU by events and graphs, of a CPU by the wall. Times are in microseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lockstep.runtime.overlap import CudaLane, StreamLane


def time_us(run: Callable[[], object], device: torch.device, *, repeats: int = 10, warm_ups: int = 3) -> float:
    """Median time of one call, by itself on the device: launches included where they are what takes the time."""
    for _ in range(warm_ups):
        run()
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            run()
            ended.record()
            ended.synchronize()
            taken.append(1e3 * begun.elapsed_time(ended))
        else:
            before = time.perf_counter()
            run()
            taken.append(1e6 * (time.perf_counter() - before))
    return float(statistics.median(taken))


def graph_time_us(run: Callable[[], object], device: torch.device, *, repeats: int = 10) -> float:
    """The same as a CUDA graph, without the cost of launching; on a CPU just the time."""
    if device.type != "cuda":
        return time_us(run, device, repeats=3, warm_ups=1)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # tables and indices are there before they are followed
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        return time_us(graph.replay, device, repeats=repeats)


class LaneTimes:
    """Watches a lane, and records when the device began and ended each batch.

    On a GPU by the events that the lane records itself; on a CPU by its clock.
    """

    def __init__(self, lane: StreamLane) -> None:
        self._spans: list[tuple[Any, Any]] = []
        self._gpu = isinstance(lane, CudaLane)
        inner = lane.download

        def download(tensors: Mapping[str, Tensor], begun: Any) -> Any:
            coming = inner(tensors, begun)
            watched: Any = coming  # the lane's own event, which no other reader needs
            self._spans.append((begun, watched._ended if self._gpu else watched.times_us()[1]))
            return coming

        lane.download = download  # type: ignore[method-assign]  # watched from outside

    def __len__(self) -> int:
        return len(self._spans)

    def forget(self) -> None:
        """Start anew."""
        self._spans.clear()

    def durations_us(self) -> list[float]:
        """From the begin to the end of each batch."""
        return [self._between(begun, ended) for begun, ended in self._spans]

    def periods_us(self) -> list[float]:
        """From the end of each batch to the end of the next."""
        ends = [ended for _, ended in self._spans]
        return [self._between(a, b) for a, b in pairwise(ends)]

    def gaps_us(self) -> list[float]:
        """From the end of each batch to the begin of the next: the device had nothing to do."""
        return [max(0.0, self._between(ended, begun)) for (_, ended), (begun, _) in pairwise(self._spans)]

    def _between(self, first: Any, second: Any) -> float:
        return 1e3 * float(first.elapsed_time(second)) if self._gpu else float(second - first)


class Meter:
    """How long calls of some methods of an object take on the CPU."""

    def __init__(self) -> None:
        self.taken_us: dict[str, list[float]] = {}

    def watch(self, owner: Any, name: str, label: str = "") -> None:
        """Replace a method of this one object by one that takes the time."""
        inner, taken = getattr(owner, name), self.taken_us.setdefault(label or name, [])

        def timed(*args: Any, **options: Any) -> Any:
            before = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                taken.append(1e6 * (time.perf_counter() - before))

        setattr(owner, name, timed)

    def per(self, batches: int) -> dict[str, float]:
        """Microseconds per batch, by method."""
        return {name: round(sum(taken) / max(batches, 1), 1) for name, taken in self.taken_us.items()}


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
