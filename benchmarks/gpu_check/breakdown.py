"""Where the time of a step goes on the device: kernels by name and kind, and what lies between them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the trace
KINDS = (  # the first one with its word in a kernel's name
    ("attention", ("attend_split", "decode", "merge", "divide", "extend", "flashinfer", "Batch", "attention")),
    ("KV write", ("write_kv", "index_copy")),
    ("between products", ("add_rms_norm", "norm_and_turn", "silu_and_mul")),
    ("products", ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitK")),
    ("sampling", ("_draw", "_pick", "_pivot", "_penalise", "_edit", "_mask")),
)
SHOWN = 12
READY_STEPS = 5  # decodes during which a profiler gets ready

Kernel = tuple[str, float, float]
"""Name, start and length in microseconds."""


def profile(run: Callable[[], object], trace: Path) -> list[Kernel]:
    """What ran on the device meanwhile, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    return kernels_of(json.loads(trace.read_text()))


class DecodeProfile:
    """A profile of so many decodes in the middle of a run; `launched` receives each batch.

    The profiler gets ready during the first of them, so that what it takes to begin is not in the trace. To write the
    trace takes long, in the middle of the run: no other figure of such a run means anything.
    """

    def __init__(
        self,
        trace: Path,
        steps: int,
        activity: torch.profiler.ProfilerActivity = torch.profiler.ProfilerActivity.CUDA,
    ) -> None:
        self.trace, self.steps = trace, steps
        self._profiler = torch.profiler.profile(
            activities=[activity],
            schedule=torch.profiler.schedule(wait=0, warmup=READY_STEPS, active=steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        )
        self._decodes = 0

    def launched(self, mode: str) -> None:
        """A batch of this mode is going to be launched; decodes count from the first on."""
        if mode != "decode":
            return
        self._decodes += 1
        if self._decodes == 1:
            self._profiler.start()
        else:
            self._profiler.step()

    def kernels(self) -> list[Kernel]:
        """What ran, once the run is over. Raises RuntimeError where there were too few decodes."""
        if self._decodes <= READY_STEPS + self.steps:
            if self._decodes:
                self._profiler.stop()
            raise RuntimeError(f"{self._decodes} decodes are too few to profile {self.steps} behind {READY_STEPS}")
        self._profiler.stop()
        return kernels_of(json.loads(self.trace.read_text()))


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """Those of a Chrome trace, in order."""
    events = [event for event in trace.get("traceEvents", []) if event.get("cat") in ON_DEVICE and "dur" in event]
    return sorted(((str(e["name"]), float(e["ts"]), float(e["dur"])) for e in events), key=lambda kernel: kernel[1])


def summary(kernels: Iterable[Kernel], steps: int) -> dict[str, Any]:
    """Per step: microseconds and launches by kind, the dearest kernels, and how long the device had nothing to do."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    by_name: dict[str, list[float]] = defaultdict(list)
    busy, until, first = 0.0, float("-inf"), float("inf")
    for name, start, length in kernels:
        by_kind[kind_of(name)].append(length)
        by_name[name].append(length)
        busy += max(0.0, start + length - max(start, until))
        until, first = max(until, start + length), min(first, start)
    if not by_name:
        raise RuntimeError("the profiler saw nothing on the device")
    span = until - first
    dearest = sorted(by_name, key=lambda name: -sum(by_name[name]))[:SHOWN]
    return {
        "us": round(span / steps, 1),
        "idle_share": round(1 - busy / span, 5) if span > 0 else None,
        "launches": round(sum(map(len, by_name.values())) / steps, 1),
        "kinds": {kind: each(lengths, steps) for kind, lengths in sorted(by_kind.items())},
        "dearest": {name[:100]: each(by_name[name], steps) for name in dearest},
    }


def each(lengths: list[float], steps: int) -> dict[str, float]:
    """Of one kind of kernel."""
    return {"us": round(sum(lengths) / steps, 1), "launches": round(len(lengths) / steps, 1)}


def kind_of(name: str) -> str:
    """The kind of a kernel of this name."""
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "other")
