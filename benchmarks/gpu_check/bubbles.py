"""What overlap is worth: how long the GPU has nothing to do between two decodes, and what a step costs the CPU."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.decode import release
from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.served import Served, serve

IDLE_SHARE = 0.02  # the target, with overlap
ROWS = (64, 256)


def run(section: Section) -> None:
    """The same requests with overlap 0, 1 and 2; the largest batch also writes a journal to calibrate with."""
    model = shapes.model(section)
    backend = shapes.backends(section, model)[0]
    section.put("backend", backend)
    rows, prompt, output = ((3,), 12, 8) if section.small else (ROWS, 512, 96)
    for count in rows:
        for depth in (1, 0, 2):
            name = f"{count} requests, overlap {depth}"
            with section.trying(name):
                section.needs(14 if section.gpu else 0)
                journal = section.out / "journal" if depth == 0 and count == rows[-1] else None
                clear(journal)
                served = serve(
                    section,
                    model,
                    backend,
                    requests=count,
                    prompt_tokens=prompt,
                    output_tokens=output,
                    overlap_depth=depth,
                    journal=journal,
                    journal_model="qwen3-8b",
                )
                found = figures(served)
                section.put(f"runs.{count}.overlap {depth}", found)
                whole = served.output_tokens == count * output and not served.failures
                section.check(f"{name}: all tokens came", whole, f"{served.output_tokens} tokens; {served.failures}")
            release(section)
    targets(section, rows)


def clear(journal: Any) -> None:
    """Remove the journal of an earlier run."""
    if journal is not None and journal.is_dir():
        for path in sorted(journal.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()


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
        "host_us_per_batch": served.host_us,
    }


def targets(section: Section, rows: tuple[int, ...]) -> None:
    """Overlap 1 against the target, beside overlap 0 of the same run."""
    found: dict[str, Any] = {}
    for count in rows:
        runs = section.figures.get("runs", {}).get(str(count), {})
        shares = {name: run["idle_share"] for name, run in runs.items() if run["idle_share"] is not None}
        if "overlap 1" in shares:
            found[str(count)] = {**shares, "target": IDLE_SHARE, "met": shares["overlap 1"] < IDLE_SHARE}
    section.put("targets", found)
