"""Executors and hosts over one model: decodes of any batch by hand, or requests through the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.breakdown import DecodeProfile
from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.shapes import PAGE_SIZE
from benchmarks.gpu_check.timing import LaneTimes, Meter
from lockstep.core.contract.commands import BatchPlan, FinishRequest, PageDeltas, RejectRequest, RowTaken, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import ObservedEvent, RequestArrived, TokenIds
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host.loop import HostClock, ResultExtras, RuntimeHost, TokenLogprobs
from lockstep.runtime.assembly import PassKernels, make_executor, stream_lane
from lockstep.runtime.bubbles import BubbleTimer
from lockstep.runtime.graphs import graph_sizes
from lockstep.runtime.models import Decoder


class Decodes:
    """Decodes of any number of rows from any context on, without prompts: KV is what lies in the pool.

    Args:
        rows: most at once.
        tokens: of each row, at most.
    """

    def __init__(
        self, model: Decoder, rows: Sequence[int], tokens: int, backend: str, graphs: bool, page_size: int = PAGE_SIZE
    ) -> None:
        self.page_size = page_size
        self.pages_each = -(-tokens // page_size)
        self.config = SchedConfig(
            page_size=page_size,
            pages=max(rows) * self.pages_each,
            max_running_requests=max(rows),
            context_tokens_max=tokens,
            overlap_depth=1,
        )
        self.executor = make_executor(
            model,
            self.config,
            stream_lane(model.device, HostClock()),
            kernels=PassKernels(backend, graph_sizes=tuple(rows) if graphs else ()),
        )
        for kept in (*self.pool.keys, *self.pool.values):
            kept.normal_()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        self.times = LaneTimes(self.executor.lane)
        self._batch = 0
        self._requests = 0
        self._order = np.random.default_rng(0).permutation(self.config.pages).astype(np.int32)

    @property
    def pool(self) -> Any:
        """The KV pool."""
        return self.executor.attention.pool  # type: ignore[attr-defined]  # every backend has one; the protocol asks for less

    def run(self, rows: int, context: int, steps: int, in_flight: int = 2) -> None:
        """So many decodes of so many rows; the first reads `context` positions, each further one reads one more."""
        everybody = np.arange(rows, dtype=np.int32)
        ids = np.arange(self._requests, self._requests + rows, dtype=np.int64)
        self._requests += rows
        runs = np.stack([everybody, np.zeros_like(everybody), np.full_like(everybody, self.pages_each)], axis=1)
        first: dict[str, Any] = {
            "rows_taken": tuple(RowTaken(row, int(ids[row]), 0) for row in range(rows)),
            "deltas": PageDeltas(self._order[: rows * self.pages_each], runs.ravel()),
        }
        for step in range(steps):
            stops = np.full(rows, context + step, np.int32)
            plan = BatchPlan(
                batch_id=self._batch,
                mode="decode",
                rows=everybody,
                request_ids=ids,
                starts=stops - np.int32(1),
                stops=stops,
                sample_rows=everybody,
                **(first if not step else {}),
            )
            self._batch += 1
            if self.executor.in_flight >= in_flight:
                self._collect()
            self.executor.launch(plan)
        while self.executor.in_flight:
            self._collect()

    def _collect(self) -> None:
        result = self.executor.collect()
        if result.error:
            raise RuntimeError(f"batch {result.plan.batch_id} failed: {result.error}")


@dataclass
class Served:
    """What came of a run through the engine."""

    seconds: float  # from the first arrival to the last token
    output_tokens: int
    input_tokens: int
    batches: int
    decode_gaps_us: list[float]  # between a decode and the decode behind it
    decode_us: list[float]  # their durations
    decode_periods_us: list[float]
    host_us: dict[str, float]  # CPU per batch, by what the host did
    bubble_share: float | None  # of the whole run, by the runtime's own timer
    failures: list[str]


class Counting:
    """A sink that counts."""

    def __init__(self) -> None:
        self.count = 0
        self.failure = ""

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """More."""
        self.count = offset + len(tokens)

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        """All."""

    def rejected(self, end: RejectRequest) -> None:
        """None."""
        self.failure = f"{end.reason}: {end.message}"

    def failed(self, message: str) -> None:
        """No more."""
        self.failure = message


def serve(
    section: Section,
    model: Decoder,
    backend: str,
    *,
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    overlap_depth: int,
    graphs: bool = True,
    journal: Path | None = None,
    journal_model: str = "",
    profile: DecodeProfile | None = None,
) -> Served:
    """Random prompts, all there at the start, through engine and host, to the last token.

    Args:
        prompt_tokens, output_tokens: of each request.
        profile: receives what is launched; not what compiles in front.
    """
    requests = len(prompt_tokens)
    tokens = max(prompt_tokens) + max(output_tokens)
    config = SchedConfig(
        page_size=PAGE_SIZE,
        pages=requests * -(-(tokens + 1) // PAGE_SIZE) + 16,
        max_running_requests=requests,
        context_tokens_max=tokens + 16,
        overlap_depth=overlap_depth,
        reserve="full",
    )
    clock = HostClock()
    # Outside of the journal a few sizes do: a start with all of them takes seconds.
    few = tuple(size for size in graph_sizes(requests) if size & (size - 1) == 0 or size == requests)
    sizes = () if not graphs else graph_sizes(requests) if journal is not None else few
    lane = stream_lane(model.device, clock)
    executor = make_executor(model, config, lane, kernels=PassKernels(backend, graph_sizes=sizes))
    times = LaneTimes(executor.lane)
    engine = Engine(config)
    modes: list[str] = []
    bubbles = BubbleTimer()
    measured = False

    def observe(event: ObservedEvent, step: Step) -> None:
        bubbles.fold(event, step)
        if (plan := step.launched()) is not None:
            modes.append(plan.mode)
            if measured and profile is not None:
                profile.launched(plan.mode)

    host_info: dict[str, str | int | float] = {
        "kind": "runtime",
        "model": journal_model,
        "gpu": gpu_name(section),
        "tp": 1,
    }
    writer = (
        JournalWriter.create(journal, JournalHeader(config=config, host=host_info)) if journal is not None else None
    )
    host = RuntimeHost(
        engine,
        executor,
        writer or NoJournal(),
        clock,
        observe=observe,
    )
    rng = np.random.default_rng(1)
    vocab = model.settings.vocab

    def ask(prompts: Sequence[int], outputs: Sequence[int]) -> list[Counting]:
        sinks = []
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = rng.integers(3, vocab, prompt).astype(np.int32)
            arrival = RequestArrived(
                0, request_id=-1, prompt=TokenIds(ids.tobytes()), max_new_tokens=output, ignore_eos=True
            )
            sinks.append(Counting())
            host.submit(arrival, sinks[-1])
        return sinks

    ask([min(8, max(prompt_tokens))] * 2, [3, 3])  # compiles what is not compiled yet
    host.run(until_idle=True)
    meter = Meter()
    meter.watch(engine, "step", "engine.step")
    meter.watch(executor, "launch", "executor.launch")
    meter.watch(executor, "collect", "executor.collect")
    meter.watch(host, "_fold", "fold, all it does")
    times.forget()
    modes.clear()
    measured = True
    sinks = ask(prompt_tokens, output_tokens)
    before = time.perf_counter()
    host.run(until_idle=True)
    seconds = time.perf_counter() - before
    if writer is not None:
        writer.close()
    decodes = [a == b == "decode" for a, b in pairwise(modes)]
    return Served(
        seconds=seconds,
        output_tokens=sum(sink.count for sink in sinks),
        input_tokens=sum(prompt_tokens),
        batches=len(times),
        decode_gaps_us=[gap for gap, both in zip(times.gaps_us(), decodes, strict=True) if both],
        decode_us=[took for took, mode in zip(times.durations_us(), modes, strict=True) if mode == "decode"],
        decode_periods_us=[took for took, both in zip(times.periods_us(), decodes, strict=True) if both],
        host_us=meter.per(len(times)),
        bubble_share=bubbles.read().bubble_share,
        failures=sorted({sink.failure for sink in sinks if sink.failure}),
    )


def gpu_name(section: Section) -> str:
    """As the catalogue of the simulator calls it."""
    if not section.gpu:
        return "h200"  # a try: figures mean nothing, but files must be readable
    words = torch.cuda.get_device_name(section.device).lower().replace("-", " ").split()
    known = ("h200", "h100", "a100", "b200", "l40s", "4090")
    found = next((name for name in known if name in words), words[-1])
    return {"4090": "rtx4090"}.get(found, found)
