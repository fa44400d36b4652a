"""Restores an engine from its journal: recorded events are folded again, and open answers are restored.

    newest intact snapshot ──fold the events after it──> the engine at its last record
                                                         + tokens sent by request, and the requests that ended

Tokens leave a process only after the record from which they follow was written, so the journal has every token that a
client has. Tokens in the journal that the client has not received are sent again; later tokens are computed. The sender
of a request reports how many tokens of the answer it has (`Recovered.find`). No token of a request that is absent from
the journal was ever sent.

**Suspects.** A crash of an engine may be caused by a request. The requests in flight at that time are suspects. After
the restart they are admitted one at a time (`Probation`): each must get past the token that it had reached before the
next one is admitted. If the engine crashes again, the suspect on trial is guilty and fails, and the others are cleared.
An engine makes no suspects if it, or one of its ranks, was killed from outside, unless it had not completed a single
batch: then the kernel may have killed it for lack of memory. The suspect on trial is guilty when that happens for the
fourth time.
"""

from __future__ import annotations

import logging
import signal
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
from lockstep.core.requests.delivery import accepted_counts, sent_to
from lockstep.core.requests.table import Request, prompt_length
from lockstep.core.scheduler.engine import Engine
from lockstep.host.batches import Float32s, Int32s, sampled_spans
from lockstep.host.durable import HostImage, image_of, read_image, sender_and_number
from lockstep.host.loop import RuntimeHost

log = logging.getLogger("lockstep.host")

Death = Literal["killed", "crashed"]
"""Killed from outside, or crashed: by an error, a signal that it caused itself, or a stall."""

OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a process does not cause itself, except that the kernel sends SIGKILL when memory runs out."""

STRIKES_MAX = 2
KILLED_MAX = 4  # kills of an engine with the same single request on trial, after which the request fails
Kept = tuple[float, Int32s | None, Float32s | None]
"""The logprob of a token, and ids and logprobs of the likeliest tokens in its place."""


@dataclass(slots=True)
class RecoveredSample:
    """The recovered answer of one sample."""

    tokens: list[int]  # sent, or about to be sent when the engine died
    end: FinishRequest | RejectRequest | None = None
    logprobs: dict[int, Kept] = field(default_factory=dict)  # by output number, since the snapshot
    weights: tuple[tuple[int, int], ...] = ()  # (first output token, version), once it has ended


@dataclass(slots=True)
class Recovered:
    """An engine in its state at the last complete record of its journal, before EngineRestarted is folded."""

    engine: Engine
    journal: Journal
    header: JournalHeader
    image: HostImage
    answers: dict[RequestId, RecoveredSample] = field(
        default_factory=dict
    )  # of requests that were open at the snapshot or arrived later
    origins: dict[str, tuple[RequestId, int]] = field(default_factory=dict)
    in_flight: tuple[RequestId, ...] = ()
    steps: int = 0  # folded
    batches: int = 0  # results of batches among them
    refused: tuple[str, ...] = ()  # why newer snapshots were not used
    lost_bytes: int = 0  # bytes of a torn tail

    def find(self, origin: str, samples: Sequence[int]) -> RequestId | None:
        """Return the first id of the request with this origin; None if it is not in the journal.

        Args:
            samples: numbers of the samples whose answers must be available.
        Raises: JournalError if these are in an expired part of the journal.
        """
        found = self.origins.get(origin)
        if found is not None and all(found[0] + sample in self.answers for sample in samples):
            return found[0]
        sender, number = sender_and_number(origin)
        if number > self.image.newest.get(sender, -1):
            return None
        return self._look_back(origin, samples)

    def _look_back(self, origin: str, samples: Sequence[int]) -> RequestId | None:
        """Find a request with a sample that ended before the snapshot, while its sender has not received the end. Rare.

        Raises: JournalError if the answer is in an expired or damaged part of the journal.
        """
        arrived = _segment_of(self.journal, origin)
        if arrived is None:
            if read_journal(self.journal.folder).first_segment > 0:
                raise JournalError(f"the answer of {origin} is in a part of the journal that has expired")
            return None
        for first in _starts(self.journal.folder, below=arrived + 1):
            past = _fold(read_journal(self.journal.folder, first_segment=first), stop=self.journal.first_step)
            if past is not None:
                first_id, _ = self.origins[origin] = past.origins[origin]
                for request_id in (first_id + sample for sample in samples):
                    self.answers.setdefault(request_id, past.answers[request_id])
                return first_id
        raise JournalError(f"the answer of {origin} cannot be restored: the snapshots before it cannot be used")


def _segment_of(journal: Journal, origin: str) -> int | None:
    """Return the segment with the newest arrival of this origin, before the segments of this journal; None without."""
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
    """Restore an engine. A torn tail is cut off.

    Raises: JournalError if there is no journal, if none of its snapshots can be used and its beginning has expired, or
        if it was written under rules that this core does not support; JournalCorrupt; Divergence.
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
    """Yield the numbers of the segments at which a replay can begin, newest first."""
    for path in sorted(folder.glob("*.log"), reverse=True):
        number = int(path.stem)
        if (below is None or number < below) and (number == 0 or opening_snapshot(path) is not None):
            yield number


def _fold(journal: Journal, stop: int | None = None) -> Recovered | None:
    """Fold a journal from its first segment on; None if the snapshot at its beginning is missing or altered.

    Args:
        stop: number of the first step that is not folded; None: fold all.
    Raises: ValueError for a snapshot in a format that this core does not support.
    """
    recovered: Recovered | None = None
    if not journal.first_segment:
        recovered = Recovered(Engine(journal.header.config), journal, journal.header, image_of(journal.header.config))
    for record in journal.records():
        if isinstance(record, SnapshotRecord) and recovered is None:
            recovered = _restored(journal, record.snapshot)
            if recovered is None:
                return None
        elif isinstance(record, EventRecord) and recovered is not None:
            if stop is not None and record.step >= stop:
                break
            _take(recovered, record)
        elif isinstance(record, UnsealedRecord) and recovered is not None and isinstance(record.event, RequestArrived):
            origin = record.event.origin
            recovered.image.strikes[origin] = recovered.image.strikes.get(origin, 0) + 1
    if recovered is not None:
        recovered.in_flight = tuple(
            dict.fromkeys(
                request_id for batch in recovered.engine.in_flight for request_id in batch.plan.request_ids.tolist()
            )
        )
    return recovered


def _restored(journal: Journal, stored: Snapshot) -> Recovered | None:
    data = journal.load_snapshot(stored)
    if data is None:
        return None
    engine, image = snapshot.restore(data), read_image(data)
    if image.adapters is msgspec.UNSET:
        image.adapters = image_of(engine.config).adapters
    if engine.digest != stored.state_digest:
        return None
    recovered = Recovered(engine, journal, journal.header, image, origins=dict(image.origins))
    for request in engine.requests.values():
        outputs = engine.outputs_of(request)
        recovered.answers[request.request_id] = RecoveredSample(
            outputs_now(engine, request)[: sent_to(request, outputs)]
        )
    return recovered


def _take(recovered: Recovered, record: EventRecord) -> None:
    """Fold one event, and store the tokens and ends that follow from it."""
    event, engine = record.event, recovered.engine
    if isinstance(event, RequestArrived):
        samples = sample_count(event)
        for request_id in range(event.request_id, event.request_id + samples):
            recovered.answers[request_id] = RecoveredSample([])
        if event.origin:
            recovered.origins[event.origin] = (event.request_id, samples)
            sender, number = sender_and_number(event.origin)
            recovered.image.newest[sender] = max(number, recovered.image.newest.get(sender, -1))
    elif isinstance(event, BatchFinished):
        recovered.batches += 1
        for batch in engine.in_flight if event.logprobs else ():
            if batch.plan.batch_id == event.batch_id:
                _keep_logprobs(recovered, batch.plan, event)
    try:
        step = engine.step(event)
    except LockstepError as error:
        raise Divergence(
            recovered.header, record, None, recovered.journal.folder, f"{type(error).__name__}: {error}"
        ) from error
    if step.digest != record.digest:
        raise Divergence(recovered.header, record, step.digest, recovered.journal.folder)
    recovered.steps += 1
    recovered.image.weights.fold(engine, event)
    if recovered.image.adapters is not msgspec.UNSET:
        recovered.image.adapters.fold(engine, event)
    for command in step.commands:
        if isinstance(command, StreamTokens):
            _note_tokens(recovered, command)
        elif isinstance(command, FinishRequest | RejectRequest) and (
            answer := recovered.answers.get(command.request_id)
        ):
            answer.end, answer.weights = command, recovered.image.weights.of(command.request_id)


def _note_tokens(recovered: Recovered, command: StreamTokens) -> None:
    first, tokens = 0, command.tokens.tolist()
    for request_id, offset, count in zip(
        command.request_ids.tolist(), command.offsets.tolist(), command.token_counts.tolist(), strict=True
    ):
        if (answer := recovered.answers.get(request_id)) is not None:
            answer.tokens[offset : offset + count] = tokens[first : first + count]
        first += count


def _keep_logprobs(recovered: Recovered, plan: BatchPlan, event: BatchFinished) -> None:
    """Store logprobs by request and output number, as the host does until they are sent."""
    logprobs = np.frombuffer(event.logprobs, "<f4")
    tops = len(event.top_ids) // 4 // len(logprobs)
    top_ids = np.frombuffer(event.top_ids, "<i4").reshape(len(logprobs), tops)
    top_logprobs = np.frombuffer(event.top_logprobs, "<f4").reshape(len(logprobs), tops)
    accepted = accepted_counts(event, len(plan.sample_rows))
    positions, counts = sampled_spans(recovered.engine, plan, accepted)
    at = 0
    for number, position, count in zip(plan.sample_rows.tolist(), positions.tolist(), counts.tolist(), strict=True):
        request = recovered.engine.requests.get(int(plan.request_ids[number]))
        if request is not None and request.extras is not None and request.extras.logprobs:
            first = position - request.prompt_tokens
            most = request.sampling.logprobs_beside if request.sampling is not None else 0
            for j in range(count):
                beside = (top_ids[at + j, :most], top_logprobs[at + j, :most]) if most else (None, None)
                recovered.answers[request.request_id].logprobs[first + j] = (float(logprobs[at + j]), *beside)
        at += count


def may_go_on(recovered: Recovered, event: RequestArrived, first_id: RequestId, have: Sequence[int]) -> bool:
    """Whether all results of a request beside its tokens are available, so that it can continue after its last token.

    Otherwise it has to start again. Results of a prompt are sent at the end of a request, and are not in the journal.
    Logprobs of output are in the journal.

    Args:
        have: output tokens of each sample that the sender has; below 0 for a sample that has ended.
    """
    start = event.logprob_start
    if event.kind != "generate" or event.return_hidden_states:
        return False
    if start is not None and start < prompt_length(event.prompt) - 1:
        return False
    if start is None and (event.sampling is None or not event.sampling.logprobs_beside):
        return True
    for request_id, had in enumerate(have, first_id):
        if had < 0:
            continue
        request, answer = recovered.engine.requests.get(request_id), recovered.answers[request_id]
        outputs = len(answer.tokens) if request is None else recovered.engine.outputs_of(request)
        if not all(number in answer.logprobs for number in range(had, outputs)):
            return False
    return True


def outputs_now(engine: Engine, request: Request) -> list[int]:
    """Return the delivered output tokens of a request."""
    outputs = engine.outputs_of(request)
    tokens: list[int] = np.frombuffer(engine.tokens_of(request, outputs), np.int32).tolist()
    return tokens[request.prompt_tokens :]


# ------------------------------------------------------------------------------------------------------------- suspects


@dataclass(frozen=True, slots=True)
class Verdict:
    """The requests that are blamed or suspected for the end of an engine."""

    guilty: tuple[RequestId, ...] = ()  # these fail
    suspects: dict[RequestId, int] = field(default_factory=dict)  # admitted one at a time: output tokens of each


# mechanism: probation (decided)
def judge(recovered: Recovered, death: Death) -> Verdict:
    """Return the requests to fail and the suspects after the end of an engine. Call it before the restart is folded."""
    engine, image = recovered.engine, recovered.image
    in_flight = [engine.requests[request_id] for request_id in recovered.in_flight if request_id in engine.requests]
    on_trial = [request.request_id for request in in_flight if _not_past(engine, request, image.suspects)]
    still = {request_id: had for request_id, had in image.suspects.items() if request_id in engine.requests}
    if len(on_trial) == 1:
        times = image.alone.get(on_trial[0], 0) + 1
        if death == "crashed" or times == KILLED_MAX:
            return Verdict(guilty=tuple(on_trial))
        image.alone = {on_trial[0]: times}
        return Verdict(suspects=still)
    if not in_flight or (death == "killed" and (recovered.batches or on_trial)):
        return Verdict(suspects=still)
    tried: Iterable[Request] = [one for one in in_flight if one.request_id in on_trial] if on_trial else in_flight
    return Verdict(suspects={request.request_id: engine.outputs_of(request) for request in tried})


def _not_past(engine: Engine, request: Request, suspects: dict[RequestId, int]) -> bool:
    """Whether a suspect has not passed the tokens that were in flight when the engine died."""
    had = suspects.get(request.request_id)
    return had is not None and engine.outputs_of(request) <= had + engine.config.overlap_depth


# mechanism: probation (executed)
class Probation:
    """Admits suspects one at a time, by the number of requests that may run at once.

    The last suspect admitted must pass the token that it had reached before the next suspect is admitted. Other running
    requests have passed theirs or were never suspects, so only one suspect is on trial. At the end the limit is
    restored, also if an engine died meanwhile and all suspects have ended since.

    Args:
        image: stores the suspects and the running limit before probation. Suspects are removed when they are cleared.
    """

    def __init__(self, host: RuntimeHost, image: HostImage) -> None:
        self._host, self._image = host, image
        self._limit = 1
        if image.suspects:
            many = len(image.suspects)
            log.warning("%d requests were in flight when the engine died: they are admitted one at a time", many)
            self._allow(1)
        else:
            self._end()

    @property
    def over(self) -> bool:
        """Whether no suspect is left."""
        return self._image.running_max is None

    def fold(self, event: ObservedEvent, step: Step) -> None:
        """Fold one event and its Step; admit the next suspect if the last one is cleared."""
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
