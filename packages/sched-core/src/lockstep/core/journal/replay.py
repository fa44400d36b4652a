"""Replay: step an engine through the events of a journal and compare its decisions with the recorded ones.

A strict replay compares only digests, which the journal contains. A refactoring must replay every journal unchanged. A
change of behaviour has a named flag in the header, and a journal without the flag is replayed under the old rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import BEHAVIOUR_FLAGS
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import ObservedEvent
from lockstep.core.journal.reader import Journal, read_journal
from lockstep.core.journal.records import (
    CORE_VERSION,
    EventRecord,
    Folder,
    JournalError,
    JournalHeader,
    Snapshot,
    SnapshotFault,
    SnapshotRecord,
    Tail,
    UnsealedRecord,
)

if TYPE_CHECKING:
    from lockstep.core.scheduler.engine import Engine


class ReplayedEngine(Protocol):
    """The interface of an engine that replay uses."""

    def step(self, event: ObservedEvent, /) -> Step:
        """Take in one event; return the Step that follows."""


MakeEngine = Callable[[JournalHeader], ReplayedEngine]
RestoreEngine = Callable[[JournalHeader, bytes], ReplayedEngine]


class Divergence(LockstepError):
    """The replay's decisions differ from those of the journal, at this event for the first time."""

    def __init__(
        self, header: JournalHeader, record: EventRecord, got_digest: bytes | None, folder: Folder, cause: str = ""
    ) -> None:
        got = f"gave digest {got_digest.hex()}" if got_digest is not None else f"raised {cause}"
        super().__init__(
            f"step {record.step} (record {record.sequence}) {got}, the journal has {record.digest.hex()}\n"
            f"event: {event_line(record.event)}\n"
            f"behaviour flags: {', '.join(header.behaviour_flags) or 'none'}; "
            f"written by core {header.core_version}, replayed by core {CORE_VERSION}\n"
            f"hint: lockstep journal dump {folder} --from {max(0, record.step - 5)} --until {record.step + 1} "
            "shows the events before it"
        )
        self.step = record.step
        self.sequence = record.sequence
        self.event = record.event
        self.expected_digest = record.digest
        self.got_digest = got_digest
        self.flags = header.behaviour_flags


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a strict replay that found no difference."""

    header: JournalHeader
    events: int  # events in the journal, up to `until`
    steps: int  # replayed steps; fewer than the events if a snapshot replaced the first ones
    batches: int  # batches launched by these steps
    unsealed: int  # events whose recorded step raised; they are not replayed
    digest: bytes  # digest of the last step; empty if there was none
    tail: Tail | None  # None if the replay stopped at `until`
    snapshot: Snapshot | None = None  # the snapshot from which the replay started
    snapshot_faults: tuple[SnapshotFault, ...] = ()  # with `until` only those of another state than the replay's
    snapshot_refused: Snapshot | None = None  # the newest snapshot, if its file is missing or altered


def replay(
    folder: Folder,
    make_engine: MakeEngine | None = None,
    *,
    until: int | None = None,
    restore: RestoreEngine | None = None,
) -> Replay:
    """Replay steps [0:until) strictly and count them.

    Args:
        make_engine: builds an engine from the header; by default `Engine(header.config)`.
        until: stop before this step, counted from 0; None replays all. A torn tail ends at its last whole record.
        restore: builds an engine from the header and the bytes of a snapshot. With it, replay starts at the newest
            snapshot before `until`, or at the first event if that file is missing or altered.
    Raises: Divergence at the first difference; JournalError; JournalCorrupt at the damage, if the steps before it were
        equal.
    """
    journal = read_journal(folder)
    snapshot, refused, engine = None, None, None
    if restore is not None:
        snapshot = _newest_snapshot(journal, until)
        data = journal.load_snapshot(snapshot) if snapshot is not None else None
        if data is not None:
            engine = restore(journal.header, data)
        else:
            snapshot, refused = None, snapshot
    if engine is None:
        engine = _first_engine(journal, make_engine)

    first = snapshot.steps if snapshot is not None else journal.first_step
    events, steps, batches, unsealed, digest = 0, 0, 0, 0, b""
    whole, faults = True, list[SnapshotFault]()
    for record in journal.records():
        if isinstance(record, EventRecord):
            if until is not None and record.step >= until:
                whole = False
                break
            events += 1
            if record.step < first:
                digest = record.digest
                continue
            step = _step(engine, journal, record, strict=True)
            steps += 1
            batches += step.launched() is not None
            digest = step.digest
        elif isinstance(record, UnsealedRecord):
            unsealed += 1
        elif isinstance(record, SnapshotRecord) and steps:
            stored = record.snapshot
            if stored.state_digest != digest or stored.steps != journal.first_step + events:
                fault = SnapshotFault(file=stored.file, steps=stored.steps, fault="of another state", is_opening=False)
                faults.append(fault)
    return Replay(
        header=journal.header,
        events=events,
        steps=steps,
        batches=batches,
        unsealed=unsealed,
        digest=digest,
        tail=journal.tail if whole else None,
        snapshot=snapshot,
        snapshot_faults=(*journal.snapshot_faults(), *faults) if whole else tuple(faults),
        snapshot_refused=refused,
    )


def fold(
    folder: Folder,
    make_engine: MakeEngine | None = None,
    *,
    until: int | None = None,
    strict: bool = True,
) -> Iterator[tuple[ObservedEvent, Step]]:
    """Yield each event of a journal with its Step: the source of metrics and explanations.

    Args:
        strict: raise Divergence instead of yielding a Step that differs from the recorded one. If false, digests are
            ignored, so that an engine with other settings can step through the same events.
    """
    journal = read_journal(folder)
    engine = _first_engine(journal, make_engine)
    for record in journal.events():
        if until is not None and record.step >= until:
            return
        yield record.event, _step(engine, journal, record, strict=strict)


def _step(engine: ReplayedEngine, journal: Journal, record: EventRecord, *, strict: bool) -> Step:
    if not strict:
        return engine.step(record.event)
    try:
        step = engine.step(record.event)
    except LockstepError as error:
        raise Divergence(journal.header, record, None, journal.folder, f"{type(error).__name__}: {error}") from error
    if step.digest != record.digest:
        raise Divergence(journal.header, record, step.digest, journal.folder)
    return step


def engine_at_start(journal: Journal) -> Engine:
    """Return the engine before the first remaining event of a journal: a new one, or that of the first snapshot.

    Raises: JournalError if the beginning has expired and the snapshot behind it is missing or altered.
    """
    from lockstep.core.journal.snapshot import restore
    from lockstep.core.scheduler.engine import Engine  # imported here, so that reading a journal needs no engine

    refuse_unreplayable(journal.header)
    if not journal.first_step:
        return Engine(journal.header.config)
    opening = _opening(journal)
    data = journal.load_snapshot(opening) if opening is not None else None
    if opening is None or data is None:
        raise JournalError(
            f"{journal.segments[0]}: the segments before it have expired, and the snapshot at its beginning is missing "
            "or altered"
        )
    try:
        engine = restore(data)
    except ValueError as error:
        raise JournalError(f"{journal.folder / opening.file}: {error}") from error
    if engine.digest != opening.state_digest:
        raise JournalError(f"{journal.folder / opening.file} holds another state than the journal has recorded")
    return engine


def _opening(journal: Journal) -> Snapshot | None:
    """Return the snapshot of the record right behind a journal's first header; None if there is none."""
    records = journal.records()
    next(records)
    second = next(records, None)
    return second.snapshot if isinstance(second, SnapshotRecord) else None


def _first_engine(journal: Journal, make_engine: MakeEngine | None) -> ReplayedEngine:
    if not journal.first_step:
        return _make_engine(journal.header, make_engine)
    engine = engine_at_start(journal)
    if make_engine is None:
        return engine
    made = _make_engine(journal.header, make_engine)
    if getattr(made, "digest", None) != engine.digest:
        raise JournalError(
            f"the first {journal.first_step} events of {journal.folder} have expired, so that it can only be replayed "
            "with its own settings, from the snapshot behind them\nhint: lockstep journal verify replays it"
        )
    return made


def refuse_unreplayable(header: JournalHeader) -> None:
    """Raise JournalError for a journal that cannot be replayed: with unknown behaviour flags, or without prompts."""
    if header.content != "full":
        raise JournalError("the journal has only digests of prompts and outputs, and cannot be replayed")
    unknown = [flag for flag in header.behaviour_flags if flag not in BEHAVIOUR_FLAGS]
    if unknown:
        raise JournalError(
            f"the journal was written under behaviour flags that this core does not have: {', '.join(unknown)}\n"
            f"written by core {header.core_version}, read by core {CORE_VERSION}"
        )


def _make_engine(header: JournalHeader, make_engine: MakeEngine | None) -> ReplayedEngine:
    refuse_unreplayable(header)
    if make_engine is not None:
        return make_engine(header)
    from lockstep.core.scheduler.engine import Engine  # imported here, so that reading a journal needs no engine

    return Engine(header.config)


def _newest_snapshot(journal: Journal, until: int | None) -> Snapshot | None:
    newest = None
    for record in journal.records():
        if isinstance(record, SnapshotRecord) and (until is None or record.snapshot.steps <= until):
            newest = record.snapshot
    return newest


# ------------------------------------------------------------------------------------------------------ events in text

_TEXT_MAX = 60  # characters
_ITEMS_MAX = 8


def event_line(event: ObservedEvent) -> str:
    """Return an event in one line of bounded length: its name and the fields without their default, except `time_us`.

    Bytes, long texts and long tuples are counted, not shown, so that no prompt gets into a log through an error.
    """
    return _struct_line(event, skip=("time_us",))


def _struct_line(value: msgspec.Struct, skip: tuple[str, ...] = ()) -> str:
    parts = [type(value).__name__]
    for field in msgspec.structs.fields(value):
        content = getattr(value, field.name)
        if field.name not in skip and content != field.default:
            text = content.hex()[:8] if field.name == "digest" else _value_text(content)
            parts.append(f"{field.name}={text}")
    return " ".join(parts)


def _value_text(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        return f"({_struct_line(value)})"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, str):
        return repr(value) if len(value) <= _TEXT_MAX else f"<{len(value)} characters>"
    if isinstance(value, tuple):
        if len(value) > _ITEMS_MAX:
            return f"<{len(value)} items>"
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value)
