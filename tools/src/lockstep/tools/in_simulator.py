"""`lockstep replay RUN --in-simulator`: simulate a run with its own facts, and compare every step with the journal.

The simulation and the comparison are in `lockstep.sim.rerun`; this module parses the command line and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from lockstep.core.contract.render import Names
from lockstep.core.journal.replay import event_line
from lockstep.sim.rerun.rerun import Rerun, StepDifference, rerun
from lockstep.sim.results.text import duration
from lockstep.tools.decision_text import Decision, decision_of
from lockstep.tools.diff import decision_lines
from lockstep.tools.drift import state_lines
from lockstep.tools.journal import EXIT_NOT_CLOSED
from lockstep.tools.narration import clock
from lockstep.tools.runs import EXIT_DIVERGED, JSON, RUN, Walk, engine_journal, print_json, refusals, walked

JOURNAL, SIMULATOR = "journal", "simulator"


@click.command(context_settings={"max_content_width": 120})
@RUN
@JSON
def in_simulator(run: Path, as_json: bool) -> None:
    """Simulate a run with its own facts, and compare every step with the journal.

    The simulator's host has the requests of the journal, what the model drew at each position of a request, and the
    order in which the recorded host noticed its facts. It offers the slots, puts results together and answers orders
    itself. Every event, every decision and every command must be the recorded one. Exit status: 0 equal; 1 equal, but
    not closed; 2 unreadable; 3 different.

    \b
    lockstep replay runs/served --in-simulator
    """
    with refusals():
        done = rerun(engine_journal(run))
        if as_json:
            print_json(described(run, done))
        else:
            for line in lines_of(run, done):
                click.echo(line)
    if done.difference is not None:
        sys.exit(EXIT_DIVERGED)
    if not done.run.closed:
        sys.exit(EXIT_NOT_CLOSED)


def lines_of(run: Path, done: Rerun) -> Iterator[str]:
    """Yield the outcome as text."""
    if done.difference is not None:
        yield from _difference_lines(run, done, done.difference)
        return
    verdict = "equal" if done.run.closed else "equal so far"
    yield f"{verdict}: all {done.run.steps:,} steps, {_launches(done.launches)} among them, are the same"
    yield f"from the journal      {_counts(done.given)}; drawn tokens: {done.run.tokens:,}; the order of all events"
    if done.answers:
        yield f"answers to its orders {_counts(done.answers)}"
    yield f"by the simulator      {_counts(done.made)}"
    if done.run.slot_waited_us:
        behind = done.run.first_step + done.run.slot_waited_place
        waited = f"a free slot waited at most {duration(done.run.slot_waited_us)}, behind step {behind:,}"
        yield f"{waited}, while the recorded host worked and took in a fact"


def described(run: Path, done: Rerun) -> dict[str, Any]:
    """Return the outcome for --json."""
    found = done.difference
    return {
        "equal": found is None,
        "closed": done.run.closed,
        "steps": done.run.steps,
        "launches": done.launches,
        "given": dict(done.given),
        "answers": dict(done.answers),
        "made": dict(done.made),
        "drawn_tokens": done.run.tokens,
        "slot_waited_us": done.run.slot_waited_us,
        "difference": None if found is None else _described_difference(run, done, found),
    }


def _launches(number: int) -> str:
    return f"{number:,} {'launch' if number == 1 else 'launches'}"


def _counts(events: Mapping[str, int]) -> str:
    """Return numbers of events by type: `12 RequestArrived, 1 RequestCancelled`."""
    return ", ".join(f"{number:,} {name}" for name, number in sorted(events.items())) or "nothing"


def _both(number: int, found: StepDifference, names: Names) -> list[Decision | None]:
    """Return the recorded and the simulated decisions of a step; None where there is no step."""
    return [None if one is None else decision_of(number, *one, names) for one in (found.recorded, found.simulated)]


def _difference_lines(run: Path, done: Rerun, found: StepDifference) -> Iterator[str]:
    number = done.run.first_step + found.place
    walk = walked(Walk(run, until=number))
    where = "" if found.recorded is None else f" at {clock(found.recorded.event.time_us)}"
    yield f"the simulator differs from the journal in step {number:,}{where}, behind {_launches(found.launches)}"
    for name, folded in ((JOURNAL, found.recorded), (SIMULATOR, found.simulated)):
        if folded is not None:
            walk.names.observe(folded.event)
            yield f"  {name:<9} {event_line(folded.event)}"
        else:
            yield f"  {name:<9} {found.refused if name == SIMULATOR else ''}".rstrip()
    first, other = _both(number, found, walk.names)
    if first is not None and other is not None:
        yield "decisions"
        yield from decision_lines(JOURNAL, first, SIMULATOR, other)
    yield "state before"
    yield from (f"  {line}" for line in state_lines(walk.engine, walk.names))


def _described_difference(run: Path, done: Rerun, found: StepDifference) -> dict[str, Any]:
    number = done.run.first_step + found.place
    both = _both(number, found, walked(Walk(run, until=number)).names)
    return {
        "step": number,
        "launches_before": found.launches,
        "events": [None if one is None else one.event for one in both],
        "decisions": [None if one is None else list(one.lines) for one in both],
        "refused": found.refused,
    }
