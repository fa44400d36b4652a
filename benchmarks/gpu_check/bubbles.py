"""What overlap is worth: how long the GPU has nothing to do between two decodes, and what a step costs the CPU.

Two figures for the same thing, and the target is held against the second:

- `idle_share`, by the lane's events: from the end of a batch to the event in front of the next. That event happens as
  soon as it is launched, although the CPU may still be packing and launching what is behind it. While the device waits
  for that, it counts as busy: with overlap 0 this is far below the truth.
- `profiled`, by the profiler, in a run of its own: the time in which no kernel and no copy ran. Launches are slower
  under it, so it is rather above the truth.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.attention_times import backends
from benchmarks.gpu_check.breakdown import READY_STEPS, DecodeProfile, summary
from benchmarks.gpu_check.decode import release
from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.served import Served, serve
from lockstep.runtime.models import Decoder

JOURNAL = "run"  # the folder of the run with a journal
IDLE_SHARE = 0.02  # the target, with overlap
ROWS = (64, 256)
PROFILED = 24  # decodes


def run(section: Section) -> None:
    """The same requests with overlap 0, 1 and 2; then requests of all lengths, for a journal to calibrate with."""
    model = shapes.model(section)
    backend = backends(section, model)[0]
    section.put("backend", backend)
    rows, prompt, output = ((3,), 12, 8) if section.small else (ROWS, 512, 96)
    for count in rows:
        for depth in (1, 0, 2):
            name = f"{count} requests, overlap {depth}"
            with section.trying(name):
                section.needs(10 if section.gpu else 0)
                prompts, outputs = [prompt] * count, [output] * count
                served = serve(
                    section, model, backend, prompt_tokens=prompts, output_tokens=outputs, overlap_depth=depth
                )
                section.put(f"runs.{count}.overlap {depth}", figures(served))
                whole = served.output_tokens == count * output and not served.failures
                section.check(f"{name}: all tokens came", whole, f"{served.output_tokens} tokens; {served.failures}")
            release(section)
        for depth in (1, 0):
            with section.trying(f"{count} requests, overlap {depth}, by kernels"):
                section.needs(10 if section.gpu else 0)
                by_kernels(section, model, backend, count, prompt, depth)
            release(section)
        targets(section, rows)
    with section.trying("journal"):
        section.needs(8 if section.gpu else 0)
        journal(section, model, backend)


def by_kernels(section: Section, model: Decoder, backend: str, count: int, prompt: int, depth: int) -> None:
    """The idle share of decodes as the profiler sees it, in a run of its own."""
    name = f"{count} requests, overlap {depth}, by kernels"
    if not section.gpu:
        section.skip(name, "a CPU has no kernels")
        return
    profile = DecodeProfile(section.part.with_suffix(".trace.json"), PROFILED)
    tokens = [PROFILED + READY_STEPS + 8] * count
    prompts = [prompt] * count
    serve(
        section,
        model,
        backend,
        prompt_tokens=prompts,
        output_tokens=tokens,
        overlap_depth=depth,
        profile=profile,
    )
    found = summary(profile.kernels(), PROFILED)
    section.put(f"profiled.{count}.overlap {depth}", found)


def journal(section: Section, model: Decoder, backend: str) -> None:
    """Batches of all sizes: requests of many lengths, so that fewer and fewer decode. One batch at a time."""
    rng = np.random.default_rng(4)
    count, prompt, output = (8, 20, 64) if section.small else (192, 1500, 160)
    folder = section.out / JOURNAL
    clear(folder)
    served = serve(
        section,
        model,
        backend,
        prompt_tokens=rng.integers(prompt // 10, prompt, count).tolist(),
        output_tokens=np.linspace(2, output, count).astype(int).tolist(),
        overlap_depth=0,
        journal=folder,
        journal_model="qwen3-8b",
    )
    section.put("journal", {"batches": served.batches, "output_tokens": served.output_tokens, "folder": JOURNAL})


def clear(folder: Path) -> None:
    """Remove the journal of an earlier run, and nothing else."""
    for path in folder.glob("journal/*"):
        path.unlink()


def figures(served: Served) -> dict[str, Any]:
    """Of one run. The idle share is that of the time between the first decode's end and the last's."""
    gaps, periods = served.decode_gaps_us, served.decode_periods_us
    return {
        "output_tokens_per_s": round(served.output_tokens / served.seconds),
        "seconds": round(served.seconds, 3),
        "batches": served.batches,
        "decodes_in_a_row": len(gaps),
        "idle_share": round(sum(gaps) / sum(periods), 5) if periods and sum(periods) else None,
        "gap_us_median": round(statistics.median(gaps), 1) if gaps else None,
        "gap_us_max": round(max(gaps), 1) if gaps else None,
        "decode_us_median": round(statistics.median(served.decode_us), 1) if served.decode_us else None,
        "period_us_median": round(statistics.median(periods), 1) if periods else None,
        "bubble_share": None if served.bubble_share is None else round(served.bubble_share, 5),
        "host_us_per_batch": served.host_us,
    }


def targets(section: Section, rows: tuple[int, ...]) -> None:
    """Overlap 1 against the target, beside overlap 0 of the same run."""
    found: dict[str, Any] = {}
    for count in rows:
        for how, source in (("by kernels", "profiled"), ("by events", "runs")):
            runs = section.figures.get(source, {}).get(str(count), {})
            shares = {name: run["idle_share"] for name, run in runs.items() if run["idle_share"] is not None}
            if "overlap 1" in shares:
                met = shares["overlap 1"] < IDLE_SHARE
                found[str(count)] = {**shares, "target": IDLE_SHARE, "met": met, "how": how}
                break
    section.put("targets", found)
