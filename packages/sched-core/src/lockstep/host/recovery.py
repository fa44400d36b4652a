"""Picks an engine up from its journal: what it had decided is decided again, and whose answers are open is known again.

    newest snapshot that is what was stored ──fold the events behind it──> the engine as it stood at its last record
                                                                           + what it said, to whom, and what ended

Tokens leave a process after the record that they follow from was written. So whatever a client has is in the journal;
what the journal has and the client has not is said again from here, and what neither has is computed. Whoever sent a
request tells what it has of it (`Recovered.find`); a request that the journal does not know was never answered.

**Who killed it.** An engine that died of itself may have died of a request. Those in flight when it did are suspects.
After the restart they are let in one at a time (`Probation`): each must get past the token that it stood at before the
next one joins. If it dies again, the one that was being tried is guilty, is not let in again, and the others are free.
An engine that somebody killed blames nobody, unless it had not completed a single batch: then it may have been the
kernel, for want of memory. Who was being tried is guilty when that happened for the fourth time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from lockstep.core.contract.commands import BatchPlan, FinishRequest, RejectRequest, Step, StreamTokens
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import BatchFinished, ObservedEvent, RequestArrived, RequestId, SetState
from lockstep.core.contract.samples import sample_count
from lockstep.core.journal import snapshot
from lockstep.core.journal.reader import Journal, opening_snapshot, read_journal
from lockstep.core.journal.records import (
    EventRecord,
    JournalError,
    JournalHeader,
    Snapshot,
    SnapshotRecord,
    UnsealedRecord,
)
from lockstep.core.journal.replay import Divergence, refuse_unreplayable
from lockstep.core.journal.segments import find_journal
from lockstep.core.requests.delivery import sent_to
from lockstep.core.requests.table import Request, prompt_length
from lockstep.core.scheduler.engine import Engine
from lockstep.host.batches import Float32s, Int32s
from lockstep.host.durable import HostImage, image_of, read_image, sender_and_number
from lockstep.host.loop import RuntimeHost, sampled_spans

log = logging.getLogger("lockstep.host")

Death = Literal["killed", "crashed"]
"""Somebody ended it, or it ended by itself: an error, a signal of its own making, or standing still."""

STRIKES_MAX = 2
KILLED_MAX = 4  # times that an engine was killed while the same request was being tried
Kept = tuple[float, Int32s | None, Float32s | None]
"""The logprob of a token, and the likeliest beside it."""


@dataclass(slots=True)
class RecoveredSample:
    """What there is of one sample's answer."""

    tokens: list[int]  # sent, or about to be when the engine died
    end: FinishRequest | RejectRequest | None = None
    logprobs: dict[int, Kept] = field(default_factory=dict)  # by output number, since the snapshot
    weights: tuple[tuple[int, int], ...] = ()  # (first output token, version), once it has ended


@dataclass(slots=True)
class Recovered:
    """An engine as it stood at the last whole record of its journal, before it is told that it was restarted."""

    engine: Engine
    journal: Journal
    header: JournalHeader
    image: HostImage
    said: dict[RequestId, RecoveredSample] = field(
        default_factory=dict
    )  # of all that were open at the snapshot or came later
    origins: dict[str, tuple[RequestId, int]] = field(default_factory=dict)
    in_flight: tuple[RequestId, ...] = ()
    steps: int = 0  # folded
    batches: int = 0  # that came back among them
    refused: tuple[str, ...] = ()  # why newer snapshots were not used
    lost_bytes: int = 0  # of a torn tail

    def find(self, origin: str, samples: Sequence[int]) -> RequestId | None:
        """The first id of the request that its sender calls so; None if the journal never had it.

        Args:
            samples: of which it is to be known what was said.
        Raises: JournalError where that is in a part of the journal that has expired.
        """
        found = self.origins.get(origin)
        if found is not None and all(found[0] + sample in self.said for sample in samples):
            return found[0]
        sender, number = sender_and_number(origin)
        if number > self.image.newest.get(sender, -1):
            return None
        return self._look_back(origin, samples)

    def _look_back(self, origin: str, samples: Sequence[int]) -> RequestId | None:
        """Find a request of which a sample ended before the snapshot, of which its sender did not hear. Rare."""
        arrived = _segment_of(self.journal, origin)
        if arrived is None:
            if read_journal(self.journal.folder).first_segment > 0:
                raise JournalError(f"what became of {origin} is in a part of the journal that has expired")
            return None
        for first in _starts(self.journal.folder, below=arrived + 1):
            past = _fold(read_journal(self.journal.folder, first_segment=first), stop=self.journal.first_step)
            if past is not None:
                first_id, _ = self.origins[origin] = past.origins[origin]
                for request_id in (first_id + sample for sample in samples):
                    self.said.setdefault(request_id, past.said[request_id])
                return first_id
        raise JournalError(f"what became of {origin} is behind snapshots that cannot be used")


def _segment_of(journal: Journal, origin: str) -> int | None:
    """The segment before those of this journal in which the newest arrival of this name is."""
    for path in sorted(journal.folder.glob("*.log"), reverse=True):
        number, found = int(path.stem), False
        if number >= journal.first_segment:
            continue
        for record in read_journal(journal.folder, first_segment=number).records():
            if record.segment > number:
                break
            if isinstance(record, EventRecord) and isinstance(record.event, RequestArrived):
                found = found or record.event.origin == origin
        if found:
            return number
    return None


def recover(folder: Path) -> Recovered:
    """Pick an engine up. A torn tail is cut off.

    Raises: JournalError when there is no journal, none of its snapshots can be used and its beginning has expired, or
        it was written under rules that this core does not know; JournalCorrupt; Divergence.
    """
    journal_folder = find_journal(folder)
    refused: list[str] = []
    for first in _starts(journal_folder):
        journal = read_journal(journal_folder, first_segment=first)
        refuse_unreplayable(journal.header)
        lost_bytes = journal.tail.torn_bytes
        if journal.tail.verdict == "torn":
            journal = read_journal(journal_folder, repair=True, first_segment=first)
        try:
            found = _fold(journal)
        except ValueError as error:
            refused.append(f"segment {first}: {error}")
            continue
        if found is None:
            refused.append(f"segment {first}: its snapshot is missing or altered")
            continue
        found.image.origins = {}
        found.refused, found.lost_bytes = tuple(refused), lost_bytes
        return found
    raise JournalError(
        f"{journal_folder} holds nothing to begin with: {'; '.join(refused) or 'its beginning has expired'}\n"
        "hint: keep it for a post-mortem, and give another folder"
    )


def _starts(folder: Path, below: int | None = None) -> Iterator[int]:
    """Numbers of the segments at which a replay can begin, the newest first."""
    for path in sorted(folder.glob("*.log"), reverse=True):
        number = int(path.stem)
        if (below is None or number < below) and (number == 0 or opening_snapshot(path) is not None):
            yield number


def _fold(journal: Journal, stop: int | None = None) -> Recovered | None:
    """Everything from a journal's first segment on; None if that begins with a snapshot that is not what was stored.

    Raises: ValueError for a snapshot of a format this core does not know.
    """
    told: Recovered | None = None
    if not journal.first_segment:
        told = Recovered(Engine(journal.header.config), journal, journal.header, image_of(journal.header.config))
    for record in journal.records():
        if isinstance(record, SnapshotRecord) and told is None:
            told = _restored(journal, record.snapshot)
            if told is None:
                return None
        elif isinstance(record, EventRecord) and told is not None:
            if stop is not None and record.step >= stop:
                break
            _take(told, record)
        elif isinstance(record, UnsealedRecord) and told is not None and isinstance(record.event, RequestArrived):
            origin = record.event.origin
            told.image.strikes[origin] = told.image.strikes.get(origin, 0) + 1
    if told is not None:
        told.in_flight = tuple(
            dict.fromkeys(
                request_id for batch in told.engine.in_flight for request_id in batch.plan.request_ids.tolist()
            )
        )
    return told


def _restored(journal: Journal, stored: Snapshot) -> Recovered | None:
    data = journal.load_snapshot(stored)
    if data is None:
        return None
    engine, image = snapshot.restore(data), read_image(data)
    if image.adapters is msgspec.UNSET:
        image.adapters = image_of(engine.config).adapters
    if engine.digest != stored.state_digest:
        return None
    told = Recovered(engine, journal, journal.header, image, origins=dict(image.origins))
    for request in engine.requests.values():
        outputs = engine.outputs_of(request)
        told.said[request.request_id] = RecoveredSample(outputs_now(engine, request)[: sent_to(request, outputs)])
    return told


def _take(told: Recovered, record: EventRecord) -> None:
    """Fold one event, and note what was said by it."""
    event, engine = record.event, told.engine
    if isinstance(event, RequestArrived):
        samples = sample_count(event)
        for request_id in range(event.request_id, event.request_id + samples):
            told.said[request_id] = RecoveredSample([])
        if event.origin:
            told.origins[event.origin] = (event.request_id, samples)
            sender, number = sender_and_number(event.origin)
            told.image.newest[sender] = max(number, told.image.newest.get(sender, -1))
    elif isinstance(event, BatchFinished):
        told.batches += 1
        if event.logprobs and engine.in_flight and engine.in_flight[0].plan.batch_id == event.batch_id:
            _keep_logprobs(told, engine.in_flight[0].plan, event)
    try:
        step = engine.step(event)
    except LockstepError as error:
        raise Divergence(told.header, record, None, told.journal.folder, f"{type(error).__name__}: {error}") from error
    if step.digest != record.digest:
        raise Divergence(told.header, record, step.digest, told.journal.folder)
    told.steps += 1
    told.image.weights.fold(engine, event)
    if told.image.adapters is not msgspec.UNSET:
        told.image.adapters.fold(engine, event)
    for command in step.commands:
        if isinstance(command, StreamTokens):
            _note_tokens(told, command)
        elif isinstance(command, FinishRequest | RejectRequest) and (said := told.said.get(command.request_id)):
            said.end, said.weights = command, told.image.weights.of(command.request_id)


def _note_tokens(told: Recovered, command: StreamTokens) -> None:
    first, tokens = 0, command.tokens.tolist()
    for request_id, offset, count in zip(
        command.request_ids.tolist(), command.offsets.tolist(), command.token_counts.tolist(), strict=True
    ):
        if (said := told.said.get(request_id)) is not None:
            said.tokens[offset : offset + count] = tokens[first : first + count]
        first += count


def _keep_logprobs(told: Recovered, plan: BatchPlan, event: BatchFinished) -> None:
    """Keep logprobs by request and output number, as the host does until they are sent."""
    logprobs = np.frombuffer(event.logprobs, "<f4")
    tops = len(event.top_ids) // 4 // len(logprobs)
    top_ids = np.frombuffer(event.top_ids, "<i4").reshape(len(logprobs), tops)
    top_logprobs = np.frombuffer(event.top_logprobs, "<f4").reshape(len(logprobs), tops)
    accepted = np.frombuffer(event.accepted, "<i4") if event.accepted else None
    positions, counts = sampled_spans(told.engine, plan, accepted)
    at = 0
    for number, position, count in zip(plan.sample_rows.tolist(), positions.tolist(), counts.tolist(), strict=True):
        request = told.engine.requests.get(int(plan.request_ids[number]))
        if request is not None and request.extras is not None and request.extras.logprobs:
            first = position - request.prompt_tokens
            most = request.sampling.top_logprobs if request.sampling is not None else 0
            for j in range(count):
                beside = (top_ids[at + j, :most], top_logprobs[at + j, :most]) if most else (None, None)
                told.said[request.request_id].logprobs[first + j] = (float(logprobs[at + j]), *beside)
        at += count


def may_go_on(told: Recovered, event: RequestArrived, first_id: RequestId, have: Sequence[int]) -> bool:
    """Whether what a request asks for beside tokens is all there, so that it can go on where it stood.

    Otherwise it has to begin again. What a prompt comes to is told at the end of a request, and the journal has none
    of it; logprobs of output it has.

    Args:
        have: output tokens of each sample that its sender has; below 0 for one that is over.
    """
    start = event.logprob_start
    if event.kind != "generate" or event.return_hidden_states:
        return False
    if start is not None and start < prompt_length(event.prompt) - 1:
        return False
    if start is None and (event.sampling is None or not event.sampling.top_logprobs):
        return True
    for request_id, had in enumerate(have, first_id):
        if had < 0:
            continue
        request, said = told.engine.requests.get(request_id), told.said[request_id]
        outputs = len(said.tokens) if request is None else told.engine.outputs_of(request)
        if not all(number in said.logprobs for number in range(had, outputs)):
            return False
    return True


def outputs_now(engine: Engine, request: Request) -> list[int]:
    """The output tokens that a request has for good."""
    outputs = engine.outputs_of(request)
    tokens: list[int] = np.frombuffer(engine.tokens_of(request, outputs), np.int32).tolist()
    return tokens[request.prompt_tokens :]


# -------------------------------------------------------------------------------------------------------- who killed it


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a death says of requests."""

    guilty: tuple[RequestId, ...] = ()  # to be failed alone
    suspects: dict[RequestId, int] = field(default_factory=dict)  # to be tried one at a time: tokens each had


def judge(told: Recovered, death: Death) -> Verdict:
    """Who is to be failed, and who to be tried, after an engine died so. Call it before the restart is folded."""
    engine, image = told.engine, told.image
    in_flight = [engine.requests[request_id] for request_id in told.in_flight if request_id in engine.requests]
    on_trial = [request.request_id for request in in_flight if _not_past(engine, request, image.suspects)]
    still = {request_id: had for request_id, had in image.suspects.items() if request_id in engine.requests}
    if len(on_trial) == 1:
        times = image.alone.get(on_trial[0], 0) + 1
        if death == "crashed" or times == KILLED_MAX:
            return Verdict(guilty=tuple(on_trial))
        image.alone = {on_trial[0]: times}
        return Verdict(suspects=still)
    if not in_flight or (death == "killed" and (told.batches or on_trial)):
        return Verdict(suspects=still)
    tried: Iterable[Request] = [one for one in in_flight if one.request_id in on_trial] if on_trial else in_flight
    return Verdict(suspects={request.request_id: engine.outputs_of(request) for request in tried})


def _not_past(engine: Engine, request: Request, suspects: dict[RequestId, int]) -> bool:
    """Whether a suspect has not got past the tokens that were on the way when the engine died."""
    had = suspects.get(request.request_id)
    return had is not None and engine.outputs_of(request) <= had + engine.config.overlap_depth


class Probation:
    """Lets suspects in one at a time, by the number of requests that may run at once.

    Whoever is let in last must get past where it stood before the next one is. Others that run already are past it, or
    were never suspected, so whoever is being tried is alone. At the end the number is what it was, also where an engine
    died in the middle and all suspects are gone since.

    Args:
        image: says who is suspected, and how many could run before that was so. Suspects are taken away as they are
            cleared.
    """

    def __init__(self, host: RuntimeHost, image: HostImage) -> None:
        self._host, self._image = host, image
        self._limit = 1
        if image.suspects:
            many = len(image.suspects)
            log.warning("%d requests were in flight when the engine died: they are let in one at a time", many)
            self._allow(1)
        else:
            self._end()

    @property
    def over(self) -> bool:
        """Whether there is nobody left to try."""
        return self._image.running_max is None

    def fold(self, event: ObservedEvent, step: Step) -> None:
        """Called behind each event."""
        if self._image.running_max is None or not isinstance(event, BatchFinished):
            return
        engine, suspects = self._host.engine, self._image.suspects
        for request_id in list(suspects):
            request = engine.requests.get(request_id)
            if request is None or not _not_past(engine, request, suspects):
                del suspects[request_id]
        if not suspects:
            self._end()
            return
        running = [request for request in engine.requests.values() if request.row >= 0]
        if not any(request.request_id in suspects for request in running) and len(running) >= self._limit:
            self._allow(min(len(running) + 1, self._image.running_max))

    def _end(self) -> None:
        if self._image.running_max is not None:
            self._allow(self._image.running_max)
            self._image.running_max = None

    def _allow(self, running: int) -> None:
        self._limit = running
        self._host.ask(SetState("max_running_requests", running))
