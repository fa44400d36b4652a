"""What an engine was doing at a step or at the end of its journal: for `lockstep explain RUN --at end`.

The journal is replayed up to there, and the state is that of the scheduler: open requests with their phase, tokens and
pages, batches that were launched and have no result, free pages. The end also has how the journal ends: closed, not
closed because its writer was killed, or with an event that the scheduler refused, whose error the replay repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import AdmissionDeferred, BatchFinished, ObservedEvent, RequestId
from lockstep.core.contract.render import Names, observed_line
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import EndRecord, Tail, UnsealedRecord
from lockstep.core.requests.delivery import sent_to
from lockstep.core.requests.table import Request, RequestState
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.state_text import pages_line
from lockstep.sim.results.text import count, duration
from lockstep.tools.narration import cause_text, clock
from lockstep.tools.request_timeline import why_waits
from lockstep.tools.runs import Walk
from lockstep.tools.why_step import short_plan

END = "end"
WAITING, PREFILL, DECODE = "waiting", "prefill", "decode"
PHASES = {DECODE: "in decode", PREFILL: "in prefill", WAITING: "waiting"}


@dataclass(frozen=True)
class OpenRequest:
    """A request that has arrived and not ended. Tokens and pages are counts."""

    request_id: RequestId
    label: str
    phase: str  # waiting, prefill or decode
    open_us: int  # since its arrival
    prompt_tokens: int
    computed_tokens: int  # positions with KV whose batch has a result
    in_flight_tokens: int  # positions of launched batches without a result
    emitted_tokens: int  # output tokens sent to the client
    max_new_tokens: int
    pages: int  # of its page table, shared ones included
    shared_pages: int  # of these, pages that the radix cache owns
    waits_for: str  # for a waiting request, the cause in words


@dataclass(frozen=True)
class UnfinishedBatch:
    """A batch without a result."""

    batch_id: int
    launched_us: int
    text: str


@dataclass(frozen=True)
class EngineState:
    """An engine between two steps."""

    title: str
    step: int  # the next one; of a recording, its records
    time_us: int  # of the last event
    ending: tuple[str, ...]  # how the journal ends, in sentences; empty in the middle of it
    requests: tuple[OpenRequest, ...]
    in_flight: tuple[UnfinishedBatch, ...]
    last_result: str  # the last batch with a result; empty: none
    pages: str

    def describe(self) -> dict[str, Any]:
        """Return the content for --json."""
        return asdict(self)


def state_at(run: Path, at: str) -> EngineState:
    """Return the state at the end of a journal, or before step `at`. Raises ConfigError for another text."""
    until = None if at == END else _number(at)
    walk = Walk(run, until=until)
    deferrals: dict[RequestId, AdmissionDeferred] = {}
    launched: dict[int, int] = {}  # when, by batch
    seen, time_us, last_result = walk.first_step, 0, ""
    for number, event, step in walk:
        seen, time_us = number + 1, event.time_us
        if isinstance(event, BatchFinished):
            launched.pop(event.batch_id, None)
            last_result = f"b{event.batch_id}, at {clock(event.time_us)}"
        for decided in step.decided:
            if isinstance(decided, AdmissionDeferred):
                deferrals[decided.request_id] = decided
        if (plan := step.launched()) is not None:
            launched[plan.batch_id] = event.time_us
    if until is not None and seen < until:
        raise ConfigError(
            f"`--at` must be at most {seen:,}, the steps of the journal, or {END}; got `{at}`\nhint: steps count from 0"
        )
    engine, names = walk.engine, walk.names
    batches = tuple(
        UnfinishedBatch(one.plan.batch_id, launched.get(one.plan.batch_id, -1), short_plan(one.plan, names))
        for one in engine.in_flight
    )
    open_requests = tuple(_open(engine, one, time_us, deferrals, names) for one in _in_order(engine))
    pages = pages_line(engine)
    ending = tuple(_ending(walk)) if until is None else ()  # last: it may step the engine
    where = "end of the journal" if until is None else f"before step {seen:,}"
    title = f"{where}: {count(seen, 'step')}, the last at {clock(time_us)}"
    return EngineState(title, seen, time_us, ending, open_requests, batches, last_result, pages)


def lines_of(state: EngineState, most: int) -> Iterator[str]:
    """Yield a state as text, with at most `most` requests in full."""
    yield state.title
    yield from (f"  {line}" for line in state.ending)
    yield ""
    phases = Counter(one.phase for one in state.requests)
    parts = [f"{phases[phase]:,} {text}" for phase, text in PHASES.items() if phases[phase]]
    yield count(len(state.requests), "open request") + (f": {', '.join(parts)}" if parts else "")
    if state.requests:
        heads = ("phase", "open for", "prompt", "computed", "in flight", "emitted", "at most", "pages")
        yield f"  {'request':<36}" + "".join(f"{head:>10}" for head in heads)
    for one in state.requests[:most]:
        cells = (
            one.phase, duration(one.open_us), one.prompt_tokens, one.computed_tokens, one.in_flight_tokens,
            one.emitted_tokens, one.max_new_tokens, one.pages,
        )  # fmt: skip
        yield f"  {one.label:<36.36}" + "".join(f"{cell:>10}" for cell in cells)
        if one.waits_for:
            yield f"      {one.waits_for}"
    if len(state.requests) > most:
        yield f"  and {len(state.requests) - most:,} more; --json has all"
    yield ""
    for batch in state.in_flight:
        when = f", launched at {clock(batch.launched_us)}" if batch.launched_us >= 0 else ""
        yield f"launched and without a result: {batch.text}{when}"
    if not state.in_flight:
        yield "no batch without a result"
    yield f"last result: {state.last_result or 'none'}"
    yield state.pages


def _number(at: str) -> int:
    if not (at.isascii() and at.isdigit()):
        raise ConfigError(f"`--at` must be {END} or the number of a step, got `{at}`\nhint: --at {END}")
    return int(at)


def _in_order(engine: Engine) -> list[Request]:
    return sorted(engine.requests.values(), key=lambda one: one.request_id)


def _open(
    engine: Engine,
    request: Request,
    time_us: int,
    deferrals: dict[RequestId, AdmissionDeferred],
    names: Names,
) -> OpenRequest:
    request_id, row = request.request_id, request.row
    has_row = request.state is not RequestState.WAITING
    launched = engine.computed_of(request) if has_row else 0
    starts = [
        start
        for batch in engine.in_flight
        if row not in batch.dead
        for own, start in zip(batch.plan.request_ids.tolist(), batch.plan.starts.tolist(), strict=True)
        if own == request_id
    ]
    computed = min(starts, default=launched)
    phase = WAITING if not has_row else DECODE if computed >= request.extend_stop else PREFILL
    return OpenRequest(
        request_id=request_id,
        label=names.request(request_id),
        phase=phase,
        open_us=time_us - request.arrived_us,
        prompt_tokens=request.prompt_tokens,
        computed_tokens=computed,
        in_flight_tokens=max(launched - computed, 0),
        emitted_tokens=sent_to(request, engine.outputs_of(request)),
        max_new_tokens=request.max_new_tokens,
        pages=engine.memory.table.held_pages(row, launched) if has_row else 0,
        shared_pages=request.protected_pages if has_row else 0,
        waits_for="" if has_row else cause_text(why_waits(engine, request_id, deferrals), names),
    )


def _ending(walk: Walk) -> Iterator[str]:
    """Yield how the journal ends."""
    journal = read_journal(walk.folder)
    refused: ObservedEvent | None = None
    reason = ""
    for record in journal.records():
        if isinstance(record, UnsealedRecord):
            refused = record.event
        elif isinstance(record, EndRecord):
            reason = record.reason
    yield tail_sentence(journal.tail, reason)
    if refused is None:
        return
    yield f"the scheduler refused the last event, and the engine stopped: {observed_line(refused, walk.names)}"
    try:
        walk.engine.step(refused)
    except Exception as error:  # any: what the engine raised then, it raises now
        yield f"{type(error).__name__}: {error}"
    else:
        yield "the replay accepts this event: what the engine raised is in its log"


def tail_sentence(tail: Tail, reason: str) -> str:
    """Return how a journal ends, in one sentence."""
    if tail.closed:
        return "it was closed" + (f": {reason}" if reason != "closed" else "")
    text = "not closed: its writer was killed, could not write, or is still writing"
    if tail.verdict == "torn":
        text += f"; it ends in the middle of a record: {tail.torn_bytes:,} bytes behind the last whole one are void"
    return text
