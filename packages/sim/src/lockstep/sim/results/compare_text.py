"""A comparison as text of at most 100 columns. Runs are called A, B, C, ... after a list of their names."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from string import ascii_uppercase

from lockstep.core.contract.text import shown
from lockstep.sim.results.compare import (
    ChangedRequest,
    Comparison,
    Figure,
    FigureChange,
    IntervalRow,
    Kind,
    Pairs,
    engine_rows,
    headline,
    routing,
    telling_rows,
)
from lockstep.sim.results.results import INTERVALS_SHOWN, NOTHING, show_rate, show_share, show_us
from lockstep.sim.results.slo_rows import unsure
from lockstep.sim.results.text import setting

COLUMNS = 100
OTHERS_PER_TABLE = 3  # per table, beside the first run
ENGINE_COLUMNS = (
    *(("requests", 10), ("of fair", 9), ("output/s", 10), ("TTFT p99", 11), ("TPOT p99", 11)),
    *(("hits", 9), ("GPU busy", 10)),
)
METRIC_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}


def comparison_lines(found: Comparison) -> Iterator[str]:
    """Yield the lines of a comparison: runs, warnings, settings, SLOs, figures, engines, intervals, pairs."""
    letters = letters_of(len(found.runs))
    yield from _wrapped("", headline(found))
    yield ""
    for letter, run in zip(letters, found.runs, strict=True):
        yield from _wrapped(f"{letter}  ", str(run.folder))
    for line in found.warnings:
        yield from _wrapped("not fair: ", line)
    for line in found.notes:
        yield from _wrapped("note: ", line)
    yield ""
    yield from _setting_lines(found, letters)
    yield ""
    yield from _slo_lines(found, letters)
    for letter, run in zip(letters, found.runs, strict=True):
        yield from _wrapped(f"bottleneck of {letter}  ", str(run.bottleneck))
    yield ""
    yield from _figure_lines(found, letters)
    yield ""
    if any(len(run.engines) > 1 for run in found.runs):
        yield from _engine_lines(found, letters)
        yield ""
    yield from _interval_lines(found, letters)
    for letter, pairs in zip(letters[1:], found.pairs, strict=True):
        if pairs is not None:
            yield ""
            yield from _pair_lines(pairs, letters[0], letter)


def letters_of(runs: int) -> list[str]:
    """Return a letter for each run: A, B, ..., Z, then numbers."""
    return [ascii_uppercase[k] if k < len(ascii_uppercase) else str(k + 1) for k in range(runs)]


def show(value: float | None, kind: Kind) -> str:
    """Return a figure with its unit."""
    if value is None:
        return NOTHING
    if kind == "us":
        return show_us(value)
    if kind == "share":
        return show_share(value)
    if kind == "times":
        return f"{show_rate(value)}x"
    return f"{value:,.0f}" if kind == "count" else show_rate(value)


def show_ratio(ratio: float | None) -> str:
    """Return other / first as text: `0.25x`."""
    if ratio is None:
        return NOTHING
    return f"{ratio:,.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x" if ratio >= 9.95 else f"{ratio:.2f}x"


def words(change: FigureChange) -> str:
    """Return a change with its verdict: `4.0x lower: better`."""
    return f"{change.words}: {change.verdict}" if change.verdict in ("better", "worse") else change.words


def _setting_lines(found: Comparison, letters: Sequence[str]) -> Iterator[str]:
    if not found.settings:
        yield "settings: all the same"
        return
    yield "settings that differ"
    for row in found.settings:
        values = [setting(value) for value in row.values]
        line = "  ".join(f"{letter} {value}" for letter, value in zip(letters, values, strict=True))
        if len(line) <= COLUMNS - 32:
            yield f"  {row.name:<28}  {line}"
            continue
        yield f"  {row.name}"
        for letter, value in zip(letters, values, strict=True):
            yield from _wrapped(f"    {letter} ", value)


def _slo_lines(found: Comparison, letters: Sequence[str]) -> Iterator[str]:
    for letter, run in zip(letters, found.runs, strict=True):
        if not run.slos:
            yield f"SLOs of {letter}  none were set"
            continue
        texts = []
        for slo, row in zip(run.slos, run.metrics["slos"], strict=True):
            verdict = {None: "no data", True: "met", False: "MISSED"}[slo.met]
            measured = show_us(slo.measured_us) if slo.measured_us is not None else slo.measured
            if ends := unsure(run, slo):
                measured += f", not sure: {show_us(ends[0])} to {show_us(ends[1])}"
            texts.append(f"{row['slo']} {verdict} ({measured})")
        yield from _wrapped(f"SLOs of {letter}  ", ", ".join(texts))


def _figure_lines(found: Comparison, letters: Sequence[str]) -> Iterator[str]:
    if len(found.runs) == 2:
        yield f"{'':<24}{letters[0]:>12}{letters[1]:>12}{'B/A':>9}  change from A to B"
        for figure, is_first in _grouped(found.figures):
            if is_first:
                yield figure.group
            cells = "".join(f"{show(value, figure.kind):>12}" for value in figure.values)
            moved = figure.changes[0]
            yield f"  {figure.title:<22.22}{cells}{show_ratio(moved.ratio):>9}  {words(moved)}".rstrip()
        return
    for start in range(1, len(found.runs), OTHERS_PER_TABLE):
        block = range(start, min(start + OTHERS_PER_TABLE, len(found.runs)))
        if start > 1:
            yield ""
        heads = "".join(f"{letters[k]:>12}{letters[k] + '/' + letters[0]:>9}" for k in block)
        yield f"{'':<24}{letters[0]:>12}{heads}"
        for figure, is_first in _grouped(found.figures):
            if is_first:
                yield figure.group
            cells = "".join(
                f"{show(figure.values[k], figure.kind):>12}{show_ratio(figure.changes[k - 1].ratio):>9}" for k in block
            )
            yield f"  {figure.title:<22.22}{show(figure.values[0], figure.kind):>12}{cells}"


def _grouped(figures: Sequence[Figure]) -> Iterator[tuple[Figure, bool]]:
    """Yield each figure, and whether it is the first of its group."""
    group = ""
    for figure in figures:
        yield figure, figure.group != group
        group = figure.group


def _engine_lines(found: Comparison, letters: Sequence[str]) -> Iterator[str]:
    """Yield the router and the engines of each cluster; of many engines the most and least loaded."""
    for letter, run in zip(letters, found.runs, strict=True):
        yield from _wrapped(f"router of {letter}  ", routing(run))
    heads = "".join(f"{head:>{width}}" for head, width in ENGINE_COLUMNS)
    yield f"  {'engine':<22}{heads}"
    for letter, run in zip(letters, found.runs, strict=True):
        rows = engine_rows(run)
        shown = telling_rows(rows)
        for row in shown:
            cells = (
                f"{row.requests:,}", show_ratio(row.fair_ratio), show_rate(row.output_tokens_per_s),
                show_us(row.ttft_us_p99), show_us(row.tpot_us_p99), show_share(row.hit_ratio),
                show_share(row.busy_share),
            )  # fmt: skip
            values = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, ENGINE_COLUMNS, strict=True))
            yield f"  {f'{letter} {row.number}: {row.kind}':<22.22}{values}"
        if len(shown) < len(rows):
            yield f"  {letter} has {len(rows) - len(shown):,} more, between these; all are in --json"


def _interval_lines(found: Comparison, letters: Sequence[str]) -> Iterator[str]:
    yield from _wrapped("", found.intervals_note)
    for k, letter in enumerate(letters[1:], start=1):
        rows = [row for row in found.intervals if row.name in INTERVALS_SHOWN.values()]
        rows = [row for row in rows if row.overlaps[k - 1] is not None]
        if not rows:
            continue
        at_ends = f"{letter}/{letters[0]} at the ends" if any(row.ratios_at_ends[k - 1] for row in rows) else ""
        yield f"  {'':<22}  {letters[0]:<20}  {letter:<20}  {'':<8}  {at_ends}".rstrip()
        for row in rows:
            verdict = "overlap" if row.overlaps[k - 1] else "apart"
            ends = row.ratios_at_ends[k - 1]
            ratios = "" if ends is None else f"{show_ratio(ends[0])} and {show_ratio(ends[1])}"
            first, other = (_show_interval(row, at) for at in (0, k))
            yield f"  {row.title:<22.22}  {first:<20}  {other:<20}  {verdict:<8}  {ratios}".rstrip()


def _show_interval(row: IntervalRow, at: int) -> str:
    ends = row.intervals[at]
    return NOTHING if ends is None else " to ".join(show(end, row.kind) for end in ends)


def _pair_lines(pairs: Pairs, first: str, other: str) -> Iterator[str]:
    name = "request ids" if pairs.matched_by == "request_id" else "labels"
    both = f"{pairs.completed_in_both:,} completed in both, matched by {name}"
    yield f"request by request, {other} against {first}: {both}"
    for count, letter in ((pairs.completed_in_first_only, first), (pairs.completed_in_other_only, other)):
        if count:
            yield f"  {count:,} completed in {letter} alone"
    if not pairs.metrics:
        return
    yield f"  {'':<11}{'faster':>9}{'slower':>9}{'same':>9}{'median':>12}{'worst':>12}{'best':>12}"
    for metric, row in pairs.metrics.items():
        shares = "".join(f"{show_share(share):>9}" for share in (row.faster_share, row.slower_share, row.same_share))
        changes = (row.change_us_median, row.worst.change_us, row.best.change_us)
        yield f"  {METRIC_TITLES[metric]:<11}{shares}{''.join(f'{show_change(us):>12}' for us in changes)}"
    metric, row = next(iter(pairs.metrics.items()))
    if row.most_changed:
        yield f"  most changed in {METRIC_TITLES[metric]}; ids are those of requests.csv and of the journal"
        for request in row.most_changed:
            yield f"    {_request_line(request, first, other)}"


def _request_line(request: ChangedRequest, first: str, other: str) -> str:
    name = shown(request.label) or f"id {request.request_ids[0]}"
    ids = f"{first} {request.request_ids[0]}, {other} {request.request_ids[1]}"
    size = f"{request.prompt_tokens:,} in, {request.output_tokens:,} out"
    moved = f"{show_us(request.first_us)} -> {show_us(request.other_us)}"
    return f"{name:<14.14} ({ids:<18}) {size:<22} {moved:<22} {show_change(request.change_us):>10}"


def show_change(us: float) -> str:
    """Return a change in time with its sign."""
    return "0" if us == 0 else f"{'+' if us > 0 else '-'}{show_us(abs(us))}"


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * len(head)
    return textwrap.wrap(text, COLUMNS, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False) or [head]
