"""Description of a workload: figures for JSON, and the same as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.results.results import show_us
from lockstep.sim.workload.fit import CAPACITY_SHARES, WINDOWS_S, burstiness, rank_correlation
from lockstep.sim.workload.reuse import hit_ratio
from lockstep.sim.workload.summary import sharing_ratio
from lockstep.sim.workload.turns import Turns
from lockstep.sim.workload.workload import Workload

COLUMNS = 80
TENANTS_SHOWN = 8
_SLICES = 12  # spans of time in the histogram of arrivals
_BAR = 40  # characters

Figures = dict[str, Any]


def describe(workload: Workload) -> Figures:
    """Return all figures: times in us, lengths in tokens, shares of one. None if a figure cannot be measured."""
    turns = workload.turns
    by_clock = turns.by_clock_rows
    return {
        "name": workload.name,
        "source": workload.source,
        "format": workload.format,
        "digest": workload.digest,
        "requests": len(turns),
        "skipped_rows": workload.skipped.count,
        "notes": list(workload.notes),
        "arrivals": _arrivals(turns),
        "prompt": _lengths(turns.prompt_tokens),
        "output": _lengths(turns.output_tokens),
        "prompt_only": int(np.count_nonzero(turns.output_tokens == 0)),
        "rank_correlation": rank_correlation(turns.prompt_tokens, turns.output_tokens),
        "sessions": _sessions(turns) if len(by_clock) < len(turns) else None,
        "sharing": _sharing(turns),
        "tenants": _tenants(turns),
        "memory_bytes": turns.nbytes,
    }


def _arrivals(turns: Turns) -> Figures:
    times_us = turns.arrival_us[turns.by_clock_rows]
    bursts = burstiness(times_us)
    span_us = int(times_us[-1] - times_us[0])
    edges = np.linspace(0, span_us, _SLICES + 1)
    return {
        "by_clock": len(times_us),
        "duration_us": span_us,
        "per_s": bursts.rate_per_s,
        "gap_cv": bursts.gap_cv,
        "dispersion": {f"{window_s}s": value for window_s, value in zip(WINDOWS_S, bursts.dispersion, strict=True)},
        "distinct_times": len(np.unique(times_us)),
        "longest_silence_us": int(np.diff(times_us).max()) if len(times_us) > 1 else 0,
        "most_in_a_second": int(np.bincount(np.unique(times_us // 10**6, return_inverse=True)[1]).max()),
        "over_time": np.histogram(times_us, edges)[0].tolist() if span_us else [],
    }


def _lengths(lengths: NDArray[np.int32]) -> Figures:
    percentiles = np.percentile(lengths, (10, 50, 90, 99), method="inverted_cdf").tolist()
    counts = np.bincount(np.log2(lengths[lengths > 0]).astype(int)).tolist()
    return {
        "mean": float(lengths.mean()),
        "min": int(lengths.min()),
        **{f"p{share}": int(value) for share, value in zip((10, 50, 90, 99), percentiles, strict=True)},
        "max": int(lengths.max()),
        "by_power_of_two": {str(2**power): count for power, count in enumerate(counts) if count},
    }


def _sessions(turns: Turns) -> Figures:
    sizes = np.bincount(turns.root(), minlength=len(turns))[turns.by_clock_rows]
    thinks = turns.think_us[turns.after >= 0]
    return {
        "sessions": len(sizes),
        "turns": {
            "mean": float(sizes.mean()),
            "p50": int(np.percentile(sizes, 50, method="inverted_cdf")),
            "p90": int(np.percentile(sizes, 90, method="inverted_cdf")),
            "max": int(sizes.max()),
        },
        "think_us": {
            **{f"p{share}": int(np.percentile(thinks, share, method="inverted_cdf")) for share in (10, 50, 90)},
            "max": int(thinks.max()),
        },
    }


def _sharing(turns: Turns) -> Figures:
    unbounded = sharing_ratio(turns)
    different = round((1 - unbounded) * int(turns.prompt_tokens.sum(dtype=np.int64)))
    capacities = [max(1, different // share) for share in CAPACITY_SHARES] if unbounded > 0 else []
    return {
        "hit_ratio_unbounded": unbounded,
        "different_prompt_tokens": different,
        "hit_ratio": [{"capacity_tokens": size, "hit_ratio": hit_ratio(turns, size)} for size in capacities],
    }


def _tenants(turns: Turns) -> list[Figures]:
    if turns.tenants == ("",):
        return []
    numbers = np.bincount(turns.tenant, minlength=len(turns.tenants))
    prompts = np.bincount(turns.tenant, turns.prompt_tokens, minlength=len(turns.tenants))
    outputs = np.bincount(turns.tenant, turns.output_tokens, minlength=len(turns.tenants))
    present = [code for code in np.argsort(-numbers, kind="stable").tolist() if numbers[code]]
    return [
        {
            "tenant": turns.tenants[code],
            "requests": int(numbers[code]),
            "prompt_mean": float(prompts[code] / numbers[code]),
            "output_mean": float(outputs[code] / numbers[code]),
        }
        for code in present
    ]


# --- text -------------------------------------------------------------------------------------------------------------


def description_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the figures as lines of at most 80 characters."""
    for line in _lines(figures):
        yield from _wrapped("", line) if len(line) > COLUMNS else (line,)


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from _wrapped("", f"{figures['name']} ({figures['format']}), digest {figures['digest']}")
    for note in figures["notes"]:
        yield from _wrapped("  ", note)
    if figures["skipped_rows"]:
        yield f"  {figures['skipped_rows']:,} bad rows left out"
    yield ""
    yield from _arrival_lines(figures)
    yield ""
    yield f"{'tokens':<10}{'mean':>9}{'min':>9}{'p10':>9}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>11}"
    for name in ("prompt", "output"):
        lengths = figures[name]
        cells = "".join(f"{lengths[key]:>9,}" for key in ("min", "p10", "p50", "p90", "p99"))
        yield f"{name:<10}{lengths['mean']:>9,.0f}{cells}{lengths['max']:>11,}"
    if figures["prompt_only"]:
        yield f"{figures['prompt_only']:,} requests without output: only their prompt is run"
    if (correlation := figures["rank_correlation"]) is not None:
        yield f"rank correlation of prompt and output {correlation:.2f}"
    yield ""
    yield from _sharing_lines(figures["sharing"])
    if figures["tenants"]:
        yield ""
        yield from _tenant_lines(figures["tenants"], figures["requests"])
    for name in ("prompt", "output"):
        yield ""
        yield f"{name} tokens"
        if not (counts := figures[name]["by_power_of_two"]):
            yield "           none"
            continue
        powers = range(min(map(int, counts)).bit_length() - 1, max(map(int, counts)).bit_length())
        yield from _bars([(f"{2**power:,}..", counts.get(str(2**power), 0)) for power in powers])
    if figures["arrivals"]["over_time"]:
        yield ""
        yield "arrivals over time"
        part_us = figures["arrivals"]["duration_us"] / _SLICES
        slices = enumerate(figures["arrivals"]["over_time"])
        yield from _bars([(f"from {show_us(round(n * part_us))}" if n else "from 0", count) for n, count in slices])


def _arrival_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    arrivals, sessions = figures["arrivals"], figures["sessions"]
    kind = "sessions" if sessions else "requests"
    requests = f"{figures['requests']:,} request{'s' * (figures['requests'] != 1)}"
    yield requests + (f" in {sessions['sessions']:,} session{'s' * (sessions['sessions'] != 1)}" if sessions else "")
    if arrivals["per_s"] is None:
        yield f"all {arrivals['by_clock']:,} {kind} begin at once" if arrivals["by_clock"] > 1 else "one arrival"
    else:
        yield f"{kind} arrive over {show_us(arrivals['duration_us'])}, {arrivals['per_s']:.4g}/s on average"
        dispersion = ", ".join(
            f"{value:.3g} over {k}" for k, value in arrivals["dispersion"].items() if value is not None
        )
        if arrivals["gap_cv"] is not None:
            yield f"gaps have a coefficient of variation of {arrivals['gap_cv']:.3g} (Poisson: 1)"
        if dispersion:
            yield f"dispersion of counts: {dispersion} (Poisson: 1)"
        silence, busiest = show_us(arrivals["longest_silence_us"]), arrivals["most_in_a_second"]
        distinct = f"{arrivals['distinct_times']:,} distinct times"
        yield f"{distinct}, silent for up to {silence}, up to {busiest:,} in a second"
    if sessions:
        size, think = sessions["turns"], sessions["think_us"]
        percentiles = ", ".join(f"{name} {size[name]:,}" for name in ("p50", "p90", "max"))
        yield f"turns per session: mean {size['mean']:.1f}, {percentiles}"
        thinks = ", ".join(f"{name} {show_us(think[name])}" for name in ("p10", "p50", "p90", "max"))
        yield f"think time: {thinks}"


def _sharing_lines(sharing: Mapping[str, Any]) -> Iterator[str]:
    if not sharing["hit_ratio"]:
        yield "no two prompts are known to begin alike"
        return
    seen = f"{100 * sharing['hit_ratio_unbounded']:.1f} %"
    yield f"{seen} of prompt tokens were in an earlier prompt; an LRU cache would find"
    for row in reversed(sharing["hit_ratio"]):
        yield f"  {100 * row['hit_ratio']:5.1f} % with room for {row['capacity_tokens']:,} tokens"


def _tenant_lines(tenants: Sequence[Mapping[str, Any]], requests: int) -> Iterator[str]:
    yield f"{'tenant':<32}{'requests':>12}{'share':>9}{'prompt mean':>13}{'output mean':>13}"
    for tenant in tenants[:TENANTS_SHOWN]:
        name = textwrap.shorten(tenant["tenant"], 31, placeholder="...") or tenant["tenant"][:28] + "..."
        share = f"{100 * tenant['requests'] / requests:.1f} %"
        means = f"{tenant['prompt_mean']:>13,.0f}{tenant['output_mean']:>13,.0f}"
        yield f"{name[:31]:<32}{tenant['requests']:>12,}{share:>9}{means}"
    if len(tenants) > TENANTS_SHOWN:
        rest = sum(tenant["requests"] for tenant in tenants[TENANTS_SHOWN:])
        yield f"and {len(tenants) - TENANTS_SHOWN:,} more with {rest:,} requests"


def _bars(rows: Sequence[tuple[str, int]]) -> Iterator[str]:
    most = max(count for _, count in rows)
    for name, count in rows:
        bar = "#" * max(round(_BAR * count / most), 1 if count else 0)
        yield f"{name:>16} {count:>11,}  {bar}".rstrip()


def _wrapped(indent: str, text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False) or [""]
