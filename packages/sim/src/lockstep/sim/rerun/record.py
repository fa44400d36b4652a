"""The facts of a journal that a simulated host needs to run the same requests again.

    outside    requests, cancels, control requests, restarts, clocks set back, transfers: with their places
    answers    to orders of the engine (grammars, media, copies, weights, ...): with their places and outcomes
    passes     by request and position: the tokens that a pass drew, and what the host found in them
    results    by batch: the place and the times of its result, or its error
    clocks     places at which the host reported that time has passed

A *place* is the number of an event, from the first one that the journal still has.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.core.contract.commands import (
    Command,
    CompileGrammar,
    CopyToHost,
    EncodeMedia,
    LaunchBatch,
    LoadAdapter,
    LoadFromHost,
    MeasureExpertLoad,
    MoveExperts,
    PrefetchFromStorage,
    ReleaseDeviceMemory,
    ResumeDeviceMemory,
    SwapWeights,
    WriteToStorage,
)
from lockstep.core.contract.errors import ConfigError, LockstepError
from lockstep.core.contract.events import (
    AdapterLoaded,
    BatchFinished,
    BatchId,
    ClockAdvanced,
    EngineRestarted,
    ExpertLoadMeasured,
    ExpertsMoved,
    GrammarReady,
    HostCopyFinished,
    LaneReady,
    MediaEncoded,
    MemorySwitched,
    ObservedEvent,
    PrefetchFinished,
    RequestId,
    StorageWritten,
    TokensForced,
    WeightsSwapped,
)
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.replay import engine_at_start, fold
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.delivery import accepted_counts, right_drafts
from lockstep.core.scheduler.engine import Engine
from lockstep.host.host_header import VLLM, HostHeader

OrderKey = tuple[Any, ...]


def order_of(command: Command) -> OrderKey | None:
    """Return the key of an order that one event answers; None for other commands, and for batches."""
    match command:
        case CompileGrammar(grammar):
            return "grammar", grammar.digest
        case EncodeMedia(digest, _, generation):
            return "media", digest, generation
        case LoadAdapter(adapter, version):
            return "adapter", adapter, version
        case CopyToHost(copy_id) | LoadFromHost(copy_id):
            return "copy", copy_id
        case PrefetchFromStorage(prefetch_id):
            return "prefetch", prefetch_id
        case WriteToStorage(write_id):
            return "write", write_id
        case SwapWeights(version):
            return "weights", version
        case ReleaseDeviceMemory(tags) | ResumeDeviceMemory(tags):
            return "memory", tags, isinstance(command, ReleaseDeviceMemory)
        case MeasureExpertLoad():
            return ("expert load",)
        case MoveExperts(move_id):
            return "experts", move_id
    return None


def answered_by(event: ObservedEvent) -> OrderKey | None:
    """Return the key of the order that an event answers; None for other events, and for results of batches."""
    match event:
        case GrammarReady(_, digest):
            return "grammar", digest
        case MediaEncoded(_, digest, _, generation):
            return "media", digest, generation
        case AdapterLoaded(_, adapter, version):
            return "adapter", adapter, version
        case HostCopyFinished(_, copy_id):
            return "copy", copy_id
        case PrefetchFinished(_, prefetch_id):
            return "prefetch", prefetch_id
        case StorageWritten(_, write_id):
            return "write", write_id
        case WeightsSwapped(_, version):
            return "weights", version
        case MemorySwitched(_, tags, released):
            return "memory", tags, released
        case ExpertLoadMeasured():
            return ("expert load",)
        case ExpertsMoved(_, move_id):
            return "experts", move_id
    return None


class RecordedFact(NamedTuple):
    """An event that the simulated host receives as it was recorded."""

    place: int
    event: ObservedEvent
    answers: OrderKey | None  # the order that it answers; None: it comes from outside


class BatchOutcome(NamedTuple):
    """The recorded result of a batch, without its tokens."""

    place: int
    started_us: int
    finished_us: int
    error: str
    counted: bool  # whether it has the number of tokens of each row


class RecordedPass(NamedTuple):
    """What one pass drew behind a position of a request."""

    tokens: tuple[int, ...]
    right: tuple[int, ...] = ()  # numbers of the right drafts in the plan's tree
    invalid: bool = False
    text_stop: bool = False
    grammar_ended: bool = False
    text_held: int = 0  # newest tokens that may begin a stop text

    @property
    def is_plain(self) -> bool:
        """Whether it drew one token, in which nothing was found."""
        return len(self.tokens) == 1 and self == RecordedPass(self.tokens)


class NotDrawnError(LockstepError):
    """A simulated batch computes a position that no recorded batch has sampled, or not as often."""


@dataclass
class RecordedPasses:
    """The passes over all positions of all requests, in the order in which their results came.

    Most passes draw one token. Those are kept as one array for each request.
    """

    _first: dict[RequestId, int] = field(default_factory=dict)  # position of the first token in `_tokens`
    _tokens: dict[RequestId, array[int]] = field(default_factory=dict)  # -1: no plain pass over this position
    _others: dict[tuple[RequestId, int], deque[RecordedPass]] = field(default_factory=dict)

    def add(self, request_id: RequestId, position: int, done: RecordedPass) -> None:
        """Add a pass with its first token at a position, behind all passes over this position added before."""
        key = request_id, position
        tokens = self._tokens.setdefault(request_id, array("i"))
        at = position - self._first.setdefault(request_id, position)
        if key in self._others:
            self._others[key].append(done)
        elif 0 <= at < len(tokens) and tokens[at] >= 0:
            self._others[key] = deque((RecordedPass((tokens[at],)), done))
        elif at >= 0 and done.is_plain and done.tokens[0] >= 0:
            tokens.extend([-1] * (at + 1 - len(tokens)))
            tokens[at] = done.tokens[0]
        else:
            self._others[key] = deque((done,))

    def take(self, request_id: RequestId, position: int) -> RecordedPass:
        """Return the next pass over a position. Raises NotDrawnError."""
        key = request_id, position
        if key in self._others:
            if self._others[key]:
                return self._others[key].popleft()
        elif request_id in self._tokens:
            at, tokens = position - self._first[request_id], self._tokens[request_id]
            if 0 <= at < len(tokens) and tokens[at] >= 0:
                token, tokens[at] = tokens[at], -1
                return RecordedPass((token,))
        raise NotDrawnError(f"position {position} of r{request_id} was not sampled in the journal, or not as often")


@dataclass
class RecordedRun:
    """The facts of a journal. `passes` are consumed by a run."""

    folder: Path
    header: JournalHeader
    first_step: int  # number of its first event
    closed: bool
    times_us: array[int] = field(default_factory=lambda: array("q"))  # by place
    given: list[RecordedFact] = field(default_factory=list)
    results: dict[BatchId, BatchOutcome] = field(default_factory=dict)
    passes: RecordedPasses = field(default_factory=RecordedPasses)
    forced: dict[BatchId, tuple[tuple[RequestId, int, bytes], ...]] = field(default_factory=dict)
    clocks: array[int] = field(default_factory=lambda: array("q"))
    slot_waited_us: int = 0  # the longest time for which a slot was free while the host did something else ...
    slot_waited_place: int = -1  # ... and took in a further fact first; the event before that time
    tokens: int = 0  # in results
    offered: int = -1  # the microbatch that was offered a slot before the first event; -1: none, or the last one

    @property
    def steps(self) -> int:
        """Number of its events."""
        return len(self.times_us)

    def engine(self) -> Engine:
        """Return a new engine in its state before the first event."""
        return engine_at_start(read_journal(self.folder))


def read_run(folder: Path) -> RecordedRun:
    """Read the facts of a journal by a strict replay.

    Raises: JournalError; Divergence; ConfigError for a journal whose events depend on another process.
    """
    journal = read_journal(folder)
    config, kind = journal.header.config, HostHeader.of(journal.header).kind
    if config.shares_passes:
        raise ConfigError(
            f"`{folder}` is the journal of one of {config.dp_ranks} data-parallel ranks: which slots it offers depends "
            "on the other ranks\nhint: lockstep journal verify replays it"
        )
    if kind == VLLM:
        raise ConfigError(
            f"`{folder}` was written inside of vLLM, which offers slots by its own rules\n"
            "hint: lockstep journal verify replays it"
        )
    engine = engine_at_start(journal)
    reader = _FactReader(engine, RecordedRun(folder, journal.header, journal.first_step, journal.tail.closed))
    for event, step in fold(folder, lambda _: engine):
        reader.take(event)
        for command in step.commands:
            reader.note(command)
        reader.offered(event, launched=step.launched() is not None)
    return reader.run


class _FactReader:
    """Collects the facts of a journal during its replay."""

    def __init__(self, engine: Engine, run: RecordedRun) -> None:
        self.run = run
        self._engine = engine
        self._batches = {batch.plan.batch_id: batch for batch in engine.in_flight}
        self._ordered: Counter[OrderKey] = Counter()
        self._newest: BatchId = -1  # of the results
        self._offers = 0
        self._free = False  # whether a slot was free and something new behind the last event

    def take(self, event: ObservedEvent) -> None:
        """Take an event that the engine has stepped."""
        run, place = self.run, self.run.steps
        if self._free and not isinstance(event, LaneReady | EngineRestarted):
            waited_us = event.time_us - run.times_us[-1]
            if waited_us > run.slot_waited_us:
                run.slot_waited_us, run.slot_waited_place = waited_us, place - 1
        run.times_us.append(event.time_us)
        match event:
            case BatchFinished():
                self._take_result(place, event)
            case TokensForced():
                run.forced[self._newest] = event.forced
            case ClockAdvanced():
                run.clocks.append(place)
            case LaneReady(_, microbatch):
                if run.first_step and not self._offers:  # earlier offers have expired
                    run.offered = microbatch - 1
                self._offers += 1
            case _:
                if isinstance(event, EngineRestarted):
                    self._batches.clear()
                key = answered_by(event)
                if key is not None and self._ordered[key]:
                    self._ordered[key] -= 1
                else:
                    key = None  # it was ordered before the first event that is left, or twice answered
                run.given.append(RecordedFact(place, event, key))

    def note(self, command: Command) -> None:
        """Take a command of the last event's step."""
        if isinstance(command, LaunchBatch):
            self._batches |= {one.plan.batch_id: one for one in self._engine.in_flight if one.plan is command.plan}
        elif (key := order_of(command)) is not None:
            self._ordered[key] += 1

    def offered(self, event: ObservedEvent, *, launched: bool) -> None:
        """Note whether the host may offer a slot behind the last event."""
        engine = self._engine
        is_new = launched or not isinstance(event, LaneReady)
        self._free = is_new and len(engine.in_flight) < engine.config.launches_max

    def _take_result(self, place: int, event: BatchFinished) -> None:
        run, self._newest = self.run, event.batch_id
        outcome = BatchOutcome(place, event.started_us, event.finished_us, event.error, bool(event.accepted))
        run.results[event.batch_id] = outcome
        batch = self._batches.pop(event.batch_id, None)
        if batch is None or event.error:
            return
        tokens = np.frombuffer(event.tokens, "<i4").tolist()
        run.tokens += len(tokens)
        right = right_drafts(event, batch.samplers.size).tolist() if event.accepted else []
        held, first, drafts = dict(event.text_held), 0, 0
        for i, count in enumerate(_counts(batch, event)):
            numbers = tuple(right[drafts : drafts + count - 1]) if right else ()
            done = RecordedPass(
                tuple(tokens[first : first + count]),
                numbers,
                i in event.invalid,
                i in event.text_stops,
                i in event.grammar_ended,
                held.get(i, 0),
            )
            run.passes.add(batch.samplers.requests[i].request_id, int(batch.sampled_at[i]), done)
            first, drafts = first + count, drafts + len(numbers)


def _counts(batch: InFlight, event: BatchFinished) -> list[int]:
    """Return the number of tokens of each sampler of a result that the engine has stepped."""
    size = batch.samplers.size
    counts = accepted_counts(event, size)
    if counts is not None:
        found: list[int] = counts.tolist()
        return found
    if batch.blocks:
        return [0] * size
    return [1] * size if batch.steps is None else batch.steps.tolist()
