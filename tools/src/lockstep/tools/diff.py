"""`lockstep diff`: argument parsing and printing only. The comparison is in drift.py."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.results.text import setting
from lockstep.tools.decision_text import Decision
from lockstep.tools.drift import Drift, FirstDifference, drift
from lockstep.tools.narration import clock
from lockstep.tools.runs import JSON, engine_runs, print_json, refusals

EXIT_DIFFERENT = 1
LINES_SHOWN = 24  # of one decision's text
COLUMNS = 118


@click.command(context_settings={"max_content_width": 120})
@click.argument("first", metavar="RUN_A", type=click.Path(path_type=Path))
@click.argument("other", metavar="RUN_B", type=click.Path(path_type=Path))
@JSON
def diff(first: Path, other: Path, as_json: bool) -> None:
    """Show the first decision in which two journals differ, and how requests and times differ from there.

    Each journal is replayed strictly under its own header. With the same inputs, steps are compared by digest;
    otherwise launches are compared in order, with requests matched by label or id.

    Exit status: 0 equal, 1 different, 2 unreadable, 3 the replay of a journal diverged.

    \b
    lockstep diff runs/before runs/after
    """
    equal, described = True, []
    with refusals():
        for name, pair in _pairs(first, other):
            found = drift(*pair)
            equal = equal and found.equal
            if as_json:
                described.append(({"engine": name} if name else {}) | found.describe())
                continue
            if name:
                click.echo(f"engine {name}")
            for line in drift_lines(found):
                click.echo(line)
    if as_json:
        print_json(described if engine_runs(first) else described[0])
    if not equal:
        sys.exit(EXIT_DIFFERENT)


def _pairs(first: Path, other: Path) -> list[tuple[str, tuple[Path, Path]]]:
    """Return the pairs to compare: two runs, or the engines of two clusters by number. Raises ConfigError."""
    mine, theirs = engine_runs(first), engine_runs(other)
    if not mine or not theirs:
        return [("", (first, other))]
    if len(mine) != len(theirs):
        raise ConfigError(
            f"`{first}` has {len(mine)} engines and `{other}` has {len(theirs)}\n"
            f"hint: name an engine of each, as in {mine[0]}"
        )
    return [(one.name, (one, two)) for one, two in zip(mine, theirs, strict=True)]


def drift_lines(found: Drift) -> Iterator[str]:
    """Yield the report: the runs, differing settings, the first differing decision, and differences by request."""
    for letter, folder, steps, batches in zip("AB", found.folders, found.steps, found.batches, strict=True):
        yield f"{letter} {folder}: {steps:,} steps, {batches:,} batches"
    for name, (mine, theirs) in found.settings.items():
        yield f"  {name:<28} A {setting(mine)}  B {setting(theirs)}"
    if found.flags[0] != found.flags[1]:
        mine, theirs = (", ".join(flags) or "none" for flags in found.flags)
        yield f"  {'behaviour flags':<28} A {mine}  B {theirs}"
    if found.equal:
        yield f"equal: {found.steps[0]:,} steps, every fact and every decision"
        return
    yield ""
    yield from _input_lines(found)
    if found.first_difference is not None:
        yield from first_difference_lines(found.first_difference)
    yield ""
    who = "request ids" if found.matched_by == "request_id" else "labels"
    yield f"how they drift: {found.matched:,} requests of both, matched by {who}"
    for count, letter in zip(found.only, "AB", strict=True):
        if count:
            yield f"  {count:,} in {letter} alone"
    if not found.matched:
        yield "  no request is in both, so requests cannot be compared"
        return
    for change in found.changes:
        head = f"  {change.name:<20}{change.changed:>7,} of {change.of:,} differ" if change.changed else None
        yield f"  {change.name:<20}{'the same':>14}" if head is None else f"{head}; {change.detail}"


def _input_lines(found: Drift) -> Iterator[str]:
    if found.input is None:
        yield "inputs are the same up to there"
        return
    number, *facts = found.input
    for letter, fact in zip("AB", facts, strict=True):
        if not fact:
            yield f"{letter} ends before step {number:,}; up to there every fact and decision is the same"
            return
    yield f"inputs differ from step {number:,} on; up to there every fact and decision is the same"
    for letter, fact in zip("AB", facts, strict=True):
        yield f"  {letter} {fact}"
    if found.first_difference is None:
        yield "all launches are the same, in the same order: only times differ"


def first_difference_lines(found: FirstDifference) -> Iterator[str]:
    """Yield the first differing decision: shared lines, lines of one run only, and the state before."""
    both = (
        ("A", found.first, found.first_us),
        ("B", found.other, found.other_us),
    )
    places = [f"step {at.number:,} of {letter} at {clock(us)}" for letter, at, us in both if at is not None]
    yield f"first differing decision, after {found.launch:,} launches that are the same: {', '.join(places)}"
    yield from decision_lines("A", found.first, "B", found.other)
    if found.states[0] == found.states[1]:
        yield "state before, of both"
        yield from (f"  {line}" for line in _shown(found.states[0]))
        return
    for letter, state in zip("AB", found.states, strict=True):
        if state:
            yield f"state before, of {letter}"
            yield from (f"  {line}" for line in _shown(state))


def decision_lines(first_name: str, first: Decision | None, other_name: str, other: Decision | None) -> Iterator[str]:
    """Yield the text of two decisions: lines of both, then lines of only one."""
    mine, theirs = (list(at.lines) if at is not None else [] for at in (first, other))
    if first is not None and other is not None and mine == theirs:
        yield "  both texts are equal; the difference is only in the digest: how they are sampled, or which media"
        yield from (f"  both  {line}" for line in _shown(tuple(mine)))
        return
    yield from (f"  both  {line}" for line in _shown(tuple(line for line in mine if line in theirs)))
    for name, at, lines, others in ((first_name, first, mine, theirs), (other_name, other, theirs, mine)):
        if at is None:
            yield f"  {name:<5} has ended"
            continue
        own = tuple(line for line in lines if line not in others)
        yield from (f"  {name:<5} {line}" for line in _shown(own or ("decides nothing else",)))


def _shown(lines: tuple[str, ...]) -> Iterator[str]:
    for line in lines[:LINES_SHOWN]:
        parts = textwrap.wrap(line, COLUMNS - 8, break_on_hyphens=False, subsequent_indent="    ") or [""]
        yield from parts[:4]
        if len(parts) > 4:
            yield f"    ... {len(parts) - 4} more lines"
    if len(lines) > LINES_SHOWN:
        yield f"and {len(lines) - LINES_SHOWN} more lines"


if __name__ == "__main__":
    diff()
