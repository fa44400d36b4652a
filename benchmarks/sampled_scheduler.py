"""`lockstep.vllm.Scheduler` with samples of the memory of its process, for benchmarks/vllm_day.py.

    --scheduler-cls benchmarks.sampled_scheduler.SampledScheduler

It decides, records and answers as its base class does. Before a pass, at most every RSS_EVERY_S seconds, it appends a
line of JSON to the file that LOCKSTEP_SAMPLES names: the resident set of the process, and, every SIZES_EVERY_S seconds,
the bytes and the numbers of the scheduler's own objects.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec
import numpy as np

from lockstep.vllm.scheduler import Scheduler

RSS_EVERY_S = 5.0
SIZES_EVERY_S = 20.0
CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, FrameType)


class SampledScheduler(Scheduler):
    """Lockstep's scheduler for vLLM, sampled."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._samples_file = Path(os.environ["LOCKSTEP_SAMPLES"])
        self._rss_at_s = self._sizes_at_s = time.monotonic()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Plan the next pass, behind a sample if one is due."""
        now_s = time.monotonic()
        if now_s >= self._rss_at_s:
            self._rss_at_s = now_s + RSS_EVERY_S
            sample: dict[str, Any] = {"time_us": self._now_us(), "pid": os.getpid(), "rss_bytes": resident_bytes()}
            if now_s >= self._sizes_at_s:
                self._sizes_at_s = now_s + SIZES_EVERY_S
                sample |= self._sizes()
            with self._samples_file.open("a") as file:
                file.write(json.dumps(sample) + "\n")
        return super().schedule(throttle_prefills)

    def _sizes(self) -> dict[str, Any]:
        """Return bytes of the scheduler's structures, of the journal's part of them, and numbers of their entries."""
        engine, recording = self._engine, self._recording
        radix = engine.memory.radix
        return {
            "core_bytes": deep_bytes(engine),
            "host_bytes": deep_bytes(
                [self._tracked, self._core_ids, self._launched, self._output_builder, self._media, self._outputs,
                 self._adapters, self._grammars, self._cancelling, self._finished, self._preempted, self._answers]
            ),
            "recording_bytes": deep_bytes(vars(recording)),
            "requests": len(self.requests),
            "radix_nodes": sum(1 for _ in radix.walk()) if radix.present else 0,
            "cached_pages": radix.evictable_pages if radix.present else 0,
            "free_pages": engine.memory.pool.free_count,
            "objects": len(gc.get_objects()),
        }  # fmt: skip


def resident_bytes() -> int:
    """The resident set of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def deep_bytes(root: Any) -> int:
    """The bytes of an object and of all that it refers to, without code, threads and objects of vLLM and torch."""
    seen: set[int] = set()
    stack, total = [root], 0
    while stack:
        one = stack.pop()
        kind = type(one)
        if id(one) in seen or isinstance(one, CODE) or kind.__module__.split(".")[0] in ("vllm", "torch", "threading"):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, np.ndarray):
            if one.base is not None:
                stack.append(one.base)
        elif isinstance(one, msgspec.Struct):
            stack += [getattr(one, name, None) for name in one.__struct_fields__]
        else:
            stack += gc.get_referents(one)
    return total
