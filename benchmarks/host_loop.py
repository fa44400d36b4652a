"""What the runtime's host costs the CPU for each decode step, with a device that answers at once.

    step      Engine.step for the result and for the launch behind it
    record    both into a journal, digests included; `write` is the write() after each
    pack      the plan as one array for the device, tables.py
    deliver   tokens to each request's sink
    loop      everything else in host.py, and the bubble timer

R requests of 1,024 prompt tokens decode together, overlap depth 1, pages of 16; each streams, and every token goes into
its client's queue. Figures are CPU us per decode step of the host's thread, the median of several rounds. Nothing here
touches torch but the tables' constructor: kernel launches come on top, and are the same for one request and a thousand.

    python benchmarks/host_loop.py [--running 1 32 256 1024] [--rounds 5] [--json FILE] [--profile R]

`--profile R` prints cProfile's figures of R requests. Needs the runtime installed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its idle threads spin, and would be counted

import argparse
import cProfile
import gc
import json
import platform
import pstats
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from calibration import calibrate

from lockstep.core import SchedConfig
from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.events import RequestArrived, TokenIds
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host.batches import BatchResult
from lockstep.host.loop import HostClock, RuntimeHost
from lockstep.runtime.bubbles import BubbleTimer
from lockstep.runtime.outputs import PendingRequest, RequestOutput
from lockstep.runtime.tables import DeviceTables, PackedPlan

PROMPT_TOKENS = 1024
PAGE_SIZE = 16
CHUNK_TOKENS = 8192
WARM_STEPS = 50
STEPS = 300
PHASES = ("step", "record", "write", "pack", "deliver", "loop")


class Meter:
    """CPU time of the host's thread, by phase; phases do not nest."""

    def __init__(self) -> None:
        self.spent_ns = dict.fromkeys(PHASES, 0)
        self.began_ns = self.ended_ns = 0

    def of(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_ns[phase] += time.thread_time_ns() - began

        return timed

    def begin(self) -> None:
        self.spent_ns = dict.fromkeys(PHASES, 0)
        self.began_ns = time.thread_time_ns()

    def end(self) -> None:
        self.ended_ns = time.thread_time_ns()

    def us_per_step(self, steps: int) -> dict[str, float]:
        total_ns = self.ended_ns - self.began_ns
        self.spent_ns["loop"] = total_ns - sum(self.spent_ns[phase] for phase in PHASES if phase != "loop")
        return {phase: ns / steps / 1e3 for phase, ns in self.spent_ns.items()} | {"in_all": total_ns / steps / 1e3}


class InstantExecutor:
    """An executor with a device that has finished as soon as it is polled: every row draws the same token."""

    def __init__(self, config: SchedConfig, clock: HostClock, meter: Meter, on_decode: Callable[[int], None]) -> None:
        self.tables = DeviceTables(config.rows_max, config.pages, config.page_size, torch.device("cpu"))
        self._take_in: Callable[[BatchPlan], PackedPlan] = meter.of("pack", self.tables.take_in)
        self._queue: deque[BatchPlan] = deque()
        self._clock, self._on_decode = clock, on_decode
        self._decodes = 0

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def launch(self, plan: BatchPlan, *, deferred: bool, contexts: Any) -> None:
        self._take_in(plan)
        self._queue.append(plan)

    def ready(self) -> bool:
        return False  # as late as can be, so that the depth is used

    def pause_s(self) -> float:
        return 0.0  # the result is there

    def collect(self) -> BatchResult:
        plan = self._queue.popleft()
        if plan.mode == "decode":
            self._decodes += 1
            self._on_decode(self._decodes)
        now_us = self._clock()
        tokens = np.full(len(plan.sample_rows), 7, np.int32)
        return BatchResult(plan, tokens=tokens, started_us=now_us - 1, finished_us=now_us)


def measure(running: int, steps: int, profile: cProfile.Profile | None = None) -> dict[str, float]:
    """One run of so many requests: CPU us per decode step, by phase."""
    pages = running * -(-(PROMPT_TOKENS + WARM_STEPS + steps + 16) // PAGE_SIZE) + CHUNK_TOKENS // PAGE_SIZE
    config = SchedConfig(
        page_size=PAGE_SIZE,
        pages=pages,
        max_running_requests=running,
        chunked_prefill_size=CHUNK_TOKENS,
        overlap_depth=1,
        eos_token_ids=(2,),
    )
    meter, clock = Meter(), HostClock()

    def on_decode(number: int) -> None:
        if number == WARM_STEPS:
            meter.begin()
            if profile is not None:
                profile.enable()
        elif number == WARM_STEPS + steps:
            if profile is not None:
                profile.disable()
            meter.end()
            host.stop()

    with tempfile.TemporaryDirectory(prefix="lockstep-loop-") as folder:
        journal = JournalWriter.create(folder, JournalHeader(config=config))
        executor: Any = InstantExecutor(config, clock, meter, on_decode)
        engine = Engine(config)
        host = RuntimeHost(engine, executor, journal, clock, observe=BubbleTimer().fold)
        # Watched from outside: the measured code is unchanged.
        engine.step = meter.of("step", engine.step)  # type: ignore[method-assign]
        journal.append = meter.of("record", journal.append)  # type: ignore[method-assign]
        journal.flush = meter.of("write", journal.flush)  # type: ignore[method-assign]
        host._stream = meter.of("deliver", host._stream)  # type: ignore[method-assign]
        rng = np.random.default_rng(1)
        asked = []
        for _ in range(running):
            prompt = rng.integers(3, 30_000, PROMPT_TOKENS, dtype=np.int32).tobytes()
            request = RequestArrived(
                0, request_id=-1, prompt=TokenIds(prompt), max_new_tokens=WARM_STEPS + steps + 16, stream=True
            )
            asked.append(PendingRequest(RequestOutput(-1, []), None, (), SimpleQueue()))
            host.submit(request, asked[-1])
        gc.collect()
        gc.freeze()
        host.run()
        gc.unfreeze()
        journal.close()
    for one in asked:
        assert len(one.answer.token_ids) >= steps, "somebody did not decode in every step"
    return meter.us_per_step(steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256, 1024], metavar="R", help="requests")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"decode steps that count (default {STEPS})")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions; the median counts (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--profile", type=int, metavar="R", help="print where the time goes with R requests, and stop")
    arguments = parser.parse_args()
    if arguments.profile is not None:
        profile = cProfile.Profile()
        measure(arguments.profile, arguments.steps, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return 0
    machine = calibrate()
    print("calibration, CPU us")
    for name, us in machine.items():
        print(f"{name:21} {us:9,.2f}")
    print(f"\nCPU us per decode step, {arguments.steps} steps, median of {arguments.rounds} rounds")
    print(f"{'running':>8}" + "".join(f"{phase:>10}" for phase in (*PHASES, "in_all", "a token")))
    rows = []
    for running in arguments.running:
        rounds = [measure(running, arguments.steps) for _ in range(arguments.rounds)]
        row = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        rows.append({"running": running} | {name: round(us, 3) for name, us in row.items()})
        figures = [*(row[phase] for phase in (*PHASES, "in_all")), row["in_all"] / running]
        print(f"{running:8,}" + "".join(f"{us:10.1f}" for us in figures[:-1]) + f"{figures[-1]:10.2f}", flush=True)
    if arguments.json is not None:
        found = {
            "calibration_us": machine,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "steps": arguments.steps,
            "rounds": arguments.rounds,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
