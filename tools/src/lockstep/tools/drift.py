"""Compares two journals: the first differing decision, then differences of requests, batches and times.

Two runs of the same inputs are compared step by step, by digest: the first digest that differs is the first differing
decision. As soon as an input differs (another GPU, another load, a consequence of another decision), steps no longer
correspond. Then launches are compared in order, by logical text, with requests matched by label or id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import LaneReady, ObservedEvent, RequestAdmitted, RequestId
from lockstep.core.contract.render import Names
from lockstep.core.journal.replay import event_line
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.state_text import in_flight_lines, pages_line, queue_line, table_lines
from lockstep.sim.metrics.columns import Requests
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.results.compare import match_requests
from lockstep.sim.results.compare_text import show_change
from lockstep.tools.decision_text import Decision, decision_of, logical_text
from lockstep.tools.runs import Walk, walked

TABLE_LINES = 12  # rows of the request table in the state before
TIMES = {"queue": "queue_us", "ttft": "ttft_us", "tpot": "tpot_us", "e2e": "e2e_us"}
SAME = 1e-3  # relative difference up to which a time counts as unchanged


class FirstDifference(NamedTuple):
    """The first decision that differs, with its step and text in each journal; None where a journal has ended."""

    by: str  # "digest" or "launch"
    launch: int  # equal launches before it
    first: Decision | None
    other: Decision | None
    first_us: int
    other_us: int
    states: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # state lines of both engines before it

    def describe(self) -> dict[str, Any]:
        """Return the content for --json."""
        both = (self.first, self.other)
        return {
            "by": self.by,
            "launches_before": self.launch,
            "steps": [at.number if at is not None else None for at in both],
            "times_us": [self.first_us, self.other_us],
            "decisions": [list(at.lines) if at is not None else None for at in both],
            "states_before": [list(state) for state in self.states],
        }


class Input(NamedTuple):
    """The first fact that differs; "" where a journal has ended."""

    number: int
    first: str
    other: str


@dataclass
class RequestLedger:
    """Facts about a run's requests by which two runs are compared."""

    metrics: MetricsFold = field(default_factory=MetricsFold)
    admitted: dict[RequestId, int] = field(default_factory=dict)  # position in the order of first admissions
    chunks: dict[RequestId, int] = field(default_factory=dict)  # number of extends
    batches: int = 0
    steps: int = 0

    def observe(self, event: ObservedEvent, step: Step) -> None:
        """Fold one step."""
        self.steps += 1
        self.metrics.observe(event, step)
        for decided in step.decided:
            if isinstance(decided, RequestAdmitted):
                self.admitted.setdefault(decided.request_id, len(self.admitted))
        plan = step.launched()
        if plan is not None:
            self.batches += 1
            for request_id in plan.request_ids[: plan.extend_rows].tolist():
                self.chunks[request_id] = self.chunks.get(request_id, 0) + 1


class FieldChange(NamedTuple):
    """The difference of one fact or time over the matched requests."""

    name: str
    changed: int  # requests with another value
    of: int  # requests with a value in both runs
    detail: str


@dataclass(frozen=True)
class Drift:
    """The differences between two journals."""

    folders: tuple[Path, Path]
    settings: Mapping[str, tuple[Any, Any]]
    flags: tuple[tuple[str, ...], tuple[str, ...]]
    steps: tuple[int, int]
    batches: tuple[int, int]
    input: Input | None
    first_difference: FirstDifference | None
    matched: int
    matched_by: str
    only: tuple[int, int]  # requests that only one of the runs has
    changes: tuple[FieldChange, ...]

    @property
    def equal(self) -> bool:
        """Whether every fact and every decision is the same."""
        return self.input is None and self.first_difference is None

    def describe(self) -> dict[str, Any]:
        """Return the content for --json."""
        return {
            "equal": self.equal,
            "journals": [str(folder) for folder in self.folders],
            "settings": {name: list(values) for name, values in self.settings.items()},
            "behaviour_flags": [list(flags) for flags in self.flags],
            "steps": list(self.steps),
            "batches": list(self.batches),
            "first_differing_input": self.input._asdict() if self.input is not None else None,
            "first_differing_decision": self.first_difference.describe() if self.first_difference is not None else None,
            "matched_requests": self.matched,
            "matched_by": self.matched_by,
            "requests_in_one_only": list(self.only),
            "changes": [change._asdict() for change in self.changes],
        }


def drift(first: Path, other: Path) -> Drift:
    """Compare two journals. Raises JournalError or Divergence if a journal cannot be replayed under its own header."""
    walks = Walk(first), Walk(other)
    ledgers = RequestLedger(), RequestLedger()
    differing: Input | None = None
    first_difference: FirstDifference | None = None
    for number, (a, b) in enumerate(zip_longest(*walks)):
        launched = ledgers[0].batches
        for ledger, at in zip(ledgers, (a, b), strict=True):
            if at is not None:
                ledger.observe(at[1], at[2])
        if differing is not None or first_difference is not None:
            continue
        if a is None or b is None or a[1] != b[1]:
            differing = Input(number, _fact(a), _fact(b))
        elif a[2].digest != b[2].digest:
            found = [decision_of(number, at[1], at[2], walk.names) for at, walk in zip((a, b), walks, strict=True)]
            first_difference = FirstDifference("digest", launched, found[0], found[1], a[1].time_us, b[1].time_us)
    if differing is not None:
        first_difference = _first_launch(first, other)
    if first_difference is not None:
        states = [_state(run, at) for run, at in ((first, first_difference.first), (other, first_difference.other))]
        first_difference = first_difference._replace(states=(states[0], states[1]))
    return _summed(walks, ledgers, differing, first_difference)


def _fact(at: tuple[int, ObservedEvent, Step] | None) -> str:
    return f"{at[1].time_us / 1e3:.3f} ms, {event_line(at[1])}" if at is not None else ""


def _first_launch(first: Path, other: Path) -> FirstDifference | None:
    """Return the first launch that differs, for journals whose steps do not correspond."""
    walks = Walk(first), Walk(other)
    for launch, (a, b) in enumerate(zip_longest(*map(_launches, walks))):
        both = zip((a, b), walks, strict=True)
        words = [logical_text(at[2], walk.names) if at is not None else None for at, walk in both]
        if words[0] != words[1]:
            found = [
                Decision(at[0], event_line(at[1]), lines) if at is not None and lines is not None else None
                for at, lines in zip((a, b), words, strict=True)
            ]
            times = [at[1].time_us if at is not None else -1 for at in (a, b)]
            return FirstDifference("launch", launch, found[0], found[1], times[0], times[1])
    return None


def _launches(walk: Walk) -> Iterator[tuple[int, ObservedEvent, Step]]:
    """Yield the LaneReady steps that decided or launched anything."""
    for number, event, step in walk:
        if isinstance(event, LaneReady) and (step.decided or step.launched() is not None):
            yield number, event, step


def _state(run: Path, at: Decision | None) -> tuple[str, ...]:
    """Return the state lines of a run's engine just before a decision."""
    if at is None:
        return ()
    walk = walked(Walk(run, until=at.number))
    return state_lines(walk.engine, walk.names)


def state_lines(engine: Engine, names: Names) -> tuple[str, ...]:
    """Return the state of an engine as text: pages, waiting queue, batches in flight, first rows of the table."""
    table = table_lines(engine, names)
    if len(table) > TABLE_LINES:
        table = [*table[:TABLE_LINES], f"and {len(table) - TABLE_LINES} more rows"]
    return (pages_line(engine), queue_line(engine, names), *in_flight_lines(engine, names), *table)


def differing_settings(first: SchedConfig, other: SchedConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with both values."""
    names = [each.name for each in msgspec.structs.fields(SchedConfig)]
    values = {name: (getattr(first, name), getattr(other, name)) for name in names}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _summed(
    walks: tuple[Walk, Walk],
    ledgers: tuple[RequestLedger, RequestLedger],
    differing: Input | None,
    first_difference: FirstDifference | None,
) -> Drift:
    tables = tuple(ledger.metrics.result().requests for ledger in ledgers)
    columns = [table.columns() for table in tables]
    rows, others, matched_by = match_requests(columns[0], columns[1])
    only = tuple(len(table.request_id) - len(rows) for table in tables)
    return Drift(
        folders=(walks[0].folder, walks[1].folder),
        settings=differing_settings(walks[0].header.config, walks[1].header.config),
        flags=(walks[0].header.behaviour_flags, walks[1].header.behaviour_flags),
        steps=(ledgers[0].steps, ledgers[1].steps),
        batches=(ledgers[0].batches, ledgers[1].batches),
        input=differing,
        first_difference=first_difference,
        matched=len(rows),
        matched_by=matched_by,
        only=(only[0], only[1]),
        changes=tuple(_changes(ledgers, (tables[0], tables[1]), rows, others, walks[0].names)),
    )


def _changes(
    ledgers: tuple[RequestLedger, RequestLedger],
    tables: tuple[Requests, Requests],
    rows: NDArray[np.int64],
    others: NDArray[np.int64],
    names: Names,
) -> Iterator[FieldChange]:
    """Yield the differences of facts, then of times."""
    first, other = tables
    ids = first.request_id[rows].tolist(), other.request_id[others].tolist()

    def name_of(at: int) -> str:
        return names.request(ids[0][at])

    places = [_places(ledger.admitted, of) for ledger, of in zip(ledgers, ids, strict=True)]
    moved = np.flatnonzero(places[0] != places[1])
    detail = ""
    if moved.size:
        at = int(moved[np.argmin(np.where(places[0][moved] < 0, len(rows), places[0][moved]))])
        detail = f"first {name_of(at)}: {_place(places[0][at])} in A, {_place(places[1][at])} in B"
    yield FieldChange("order of admission", moved.size, len(rows), detail)

    chunks = [[ledger.chunks.get(i, 0) for i in of] for ledger, of in zip(ledgers, ids, strict=True)]
    facts: dict[str, tuple[list[Any], list[Any]]] = {
        "cached tokens": (first.cached_tokens[rows].tolist(), other.cached_tokens[others].tolist()),
        "chunks": (chunks[0], chunks[1]),
        "retractions": (first.retractions[rows].tolist(), other.retractions[others].tolist()),
        "end": (first.finish_reason[rows].tolist(), other.finish_reason[others].tolist()),
        "output tokens": (first.output_tokens[rows].tolist(), other.output_tokens[others].tolist()),
    }
    for name, (mine, theirs) in facts.items():
        differ = [at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
        detail = ""
        if differ:
            a, b = mine[differ[0]], theirs[differ[0]]
            detail = f"first {name_of(differ[0])}: {a or 'none'} in A, {b or 'none'} in B"
            if name in ("cached tokens", "chunks", "retractions"):
                detail += f"; together {sum(mine):,} in A, {sum(theirs):,} in B"
        yield FieldChange(name, len(differ), len(rows), detail)

    for name, column in TIMES.items():
        a, b = getattr(first, column)[rows].astype(float), getattr(other, column)[others].astype(float)
        both = np.flatnonzero((a >= 0) & (b >= 0))
        change = b[both] - a[both]
        differ_at = np.flatnonzero(np.abs(change) > SAME * a[both])
        detail = ""
        if differ_at.size:
            worst, best = int(np.argmax(change)), int(np.argmin(change))
            detail = (
                f"median {show_change(float(np.median(change)))}, worst {show_change(change[worst])} "
                f"({name_of(int(both[worst]))}), best {show_change(change[best])} ({name_of(int(both[best]))})"
            )
        yield FieldChange(name, differ_at.size, both.size, detail)


def _places(admitted: Mapping[RequestId, int], ids: Sequence[RequestId]) -> NDArray[np.int64]:
    """Return the rank of each request in the order of admission, from 0; -1 if it was never admitted."""
    order = np.array([admitted.get(request_id, -1) for request_id in ids], np.int64)
    places = np.full(len(ids), -1, np.int64)
    known = np.flatnonzero(order >= 0)
    places[known[np.argsort(order[known])]] = np.arange(known.size)
    return places


def _place(place: int) -> str:
    return f"number {place + 1:,}" if place >= 0 else "never"
