"""Why a step did what it did: the engine's state before it, its decisions, the requests left out and the reasons.

Reasons are read from the state before the step and from the step's decisions, in the order in which `Engine.step`
checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.contract.commands import BatchPlan, Command, ProposeBatch, Step, StreamTokens
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    AdmissionDeferred,
    DecodeSkipped,
    LaneReady,
    ObservedEvent,
    PagesEvicted,
    RanksAgreed,
    RequestAdmitted,
    RequestFinished,
    RequestId,
    RequestRejected,
    RequestRetracted,
)
from lockstep.core.contract.render import Names, command_line, decided_line, observed_line, plan_text
from lockstep.core.contract.text import runs
from lockstep.core.journal.replay import event_line
from lockstep.core.requests.table import NO_REQUEST, RequestState
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.state_text import pages_line
from lockstep.sim.results.text import count
from lockstep.tools.narration import DEFERRAL_TEXTS, cause_text, clock, named
from lockstep.tools.request_timeline import Cause, why_waits
from lockstep.tools.runs import Walk

SPANS_SHOWN = 6  # of a plan
LINE_SHOWN = 12  # requests of the waiting line


@dataclass(frozen=True)
class EngineBefore:
    """The engine just before the step, as far as it explains the step."""

    line: tuple[RequestId, ...]
    held: tuple[RequestId, ...]
    decoding: tuple[RequestId, ...]
    prefilling: RequestId
    available_pages: int
    pages: str
    in_flight: tuple[str, ...]
    paused: bool
    still: bool
    admits: bool
    decode_owed: bool
    pages_needed: int
    batch_is_full: bool
    since_extend: int
    slow_until_us: int

    @classmethod
    def of(cls, engine: Engine, names: Names) -> EngineBefore:
        running = engine.microbatches.current
        return cls(
            line=tuple(request.request_id for request in engine.waiting),
            held=tuple(engine.blocked),
            decoding=tuple(request.request_id for request in engine.running_batch.requests),
            prefilling=engine.prefilling.request_id if engine.prefilling is not None else NO_REQUEST,
            available_pages=engine.memory.available_pages,
            pages=pages_line(engine),
            in_flight=tuple(short_plan(batch.plan, names) for batch in engine.in_flight),
            paused=engine.paused,
            still=engine.maintenance.still,
            admits=engine.maintenance.admits,
            decode_owed=running.decode_owed,
            pages_needed=engine.next_pages(engine.running_batch, engine.positions) if engine.running_batch.size else 0,
            batch_is_full=engine.batch_is_full,
            since_extend=running.decode_launches - running.extended_at,
            slow_until_us=engine.controls.pace.not_before_us if engine.controls.pace.gap_us else 0,
        )


@dataclass(frozen=True)
class StepReason:
    """An explained step: a title, and lines under headings, in reading order."""

    number: int
    title: str
    parts: dict[str, list[str]]
    batch_id: int | None

    def describe(self) -> dict[str, Any]:
        """For machines."""
        return {"step": self.number, "title": self.title, "batch_id": self.batch_id, "parts": self.parts}


def why_step(run: Path, number: int) -> StepReason:
    """Explain step `number`. Raises ConfigError if the journal has fewer."""
    walk = Walk(run, until=number + 1)
    before = EngineBefore.of(walk.engine, walk.names)
    said: dict[RequestId, AdmissionDeferred] = {}
    seen = 0
    for at, event, step in walk:
        seen = at + 1
        for decided in step.decided:
            match decided:
                case AdmissionDeferred():
                    said[decided.request_id] = decided
                case RequestFinished() | RequestRejected():
                    said.pop(decided.request_id, None)
        if at == number - 1:
            before = EngineBefore.of(walk.engine, walk.names)
        if at == number:
            return _explained(number, event, step, before, walk, said)
    raise ConfigError(
        f"`--step` must be below the {seen:,} steps of the journal, got `{number}`\nhint: steps count from 0"
    )


def _explained(
    number: int,
    event: ObservedEvent,
    step: Step,
    before: EngineBefore,
    walk: Walk,
    said: dict[RequestId, AdmissionDeferred],
) -> StepReason:
    names, engine = walk.names, walk.engine
    plan = step.launched()
    what = f"launched b{plan.batch_id}" if plan is not None else "launched nothing"
    kind = f"{type(event).__name__}, {what}" if isinstance(event, LaneReady) else event_line(event)
    title = f"step {number:,} at {clock(event.time_us)}: {kind}"
    parts = {"before": _standing(before, names)}
    if not isinstance(event, LaneReady):
        takes_in = "only LaneReady launches; this step takes a fact in"
        if isinstance(event, RanksAgreed):
            takes_in = "what all ranks agreed on is launched here; a LaneReady of a rank only plans and proposes"
        parts["the fact"] = [observed_line(event, names), takes_in]
    parts["decided"] = [decided_line(decided, names) for decided in step.decided]
    if plan is not None:
        parts["launched"] = _launched(plan, engine, names)
    elif step.commands:
        parts["commands"] = [_command(command, names) for command in step.commands[:LINE_SHOWN]]
    if isinstance(event, LaneReady):
        parts["why"] = _why(event, step, plan, before, walk.header.config, names)
        parts["left out"] = _left_out(plan, before, engine, said, names)
    parts["fenced by work in flight"] = _deferred(engine)
    return StepReason(number, title, parts, plan.batch_id if plan is not None else None)


def _command(command: Command, names: Names) -> str:
    """A command in one line; tokens are counted, not shown."""
    if isinstance(command, StreamTokens):
        ids = command.request_ids.tolist()
        return f"stream {count(len(command.tokens), 'token')} to {named(ids, names)}"
    return command_line(command, names)


def short_plan(plan: BatchPlan, names: Names) -> str:
    """A plan in one line; of very many rows the first."""
    if len(plan.rows) <= SPANS_SHOWN:
        return plan_text(plan, names)
    extends = [names.request(r) for r in plan.request_ids[: plan.extend_rows].tolist()]
    prompts = f"prompts of {', '.join(extends[:SPANS_SHOWN])}" + (" and more" if len(extends) > SPANS_SHOWN else "")
    decodes = count(len(plan.rows) - plan.extend_rows, "decode")
    return f"b{plan.batch_id} {plan.mode} " + (f"{prompts} and {decodes}" if extends else decodes)


def _standing(before: EngineBefore, names: Names) -> list[str]:
    lines = [f"{len(before.line):,} waiting" + (f": {named(before.line, names)}" if before.line else "")]
    if before.held:
        lines.append(f"{len(before.held):,} held until something of theirs is there: {named(before.held, names)}")
    lines.append(
        f"{len(before.decoding):,} decoding" + (f": {named(before.decoding, names)}" if before.decoding else "")
    )
    if before.prefilling != NO_REQUEST:
        lines.append(f"the prompt of {names.request(before.prefilling)} is split and not computed to its end")
    lines.append(before.pages)
    lines += [f"in flight {text}" for text in before.in_flight] or ["nothing in flight"]
    return lines


def _launched(plan: BatchPlan, engine: Engine, names: Names) -> list[str]:
    lines = []
    for i in range(plan.extend_rows):
        request_id, start, stop = int(plan.request_ids[i]), int(plan.starts[i]), int(plan.stops[i])
        request = engine.requests.get(request_id)
        text = f"prompt of {names.request(request_id)}: {stop - start:,} tokens, {start:,} to {stop:,}"
        if request is not None and request is engine.prefilling:
            text += f"; {request.prompt_tokens + request.outputs - stop:,} are left for later chunks"
        lines.append(text)
    decodes = plan.request_ids[plan.extend_rows :].tolist()
    if decodes:
        each = "" if plan.steps == 1 else f", {plan.steps} tokens each at most"
        lines.append(f"{count(len(decodes), 'decode')}{each}: {named(decodes, names)}")
    if plan.deltas.pages.size:
        lines.append(f"{count(plan.deltas.pages.size, 'entry')} of page tables change".replace("entrys", "entries"))
    return lines


def _why(
    event: LaneReady, step: Step, plan: BatchPlan | None, before: EngineBefore, config: SchedConfig, names: Names
) -> list[str]:
    """The engine's questions in its order, as far as they decided this step."""
    lines = []
    if plan is None:
        lines.append(_why_nothing(event, step, before, config))
    elif not plan.extend_rows and (before.line or before.prefilling != NO_REQUEST):
        lines.append(_why_only_decode(step, before, config))
    for decided in step.decided:
        match decided:
            case RequestAdmitted():
                place = before.line.index(decided.request_id) + 1 if decided.request_id in before.line else 0
                passed = f", number {place} of the line (policy {config.schedule_policy})" if place > 1 else ""
                lines.append(
                    f"{names.request(decided.request_id)} was admitted{passed}: {decided.cached_tokens:,} tokens "
                    f"cached, {decided.new_tokens:,} to compute"
                )
            case RequestRetracted(reason="pages"):
                lines.append(
                    f"{names.request(decided.request_id)} gave {count(decided.pages_freed, 'page')} back: the next "
                    f"decodes need {decided.needed_pages:,} and {decided.available_pages:,} could be had "
                    f"(retraction_policy {config.retraction_policy})"
                )
            case RequestRetracted(reason="preempted"):
                lines.append(
                    f"{names.request(decided.request_id)} made room for {names.request(decided.beneficiary)}, "
                    "which is more important"
                )
            case DecodeSkipped():
                lines.append(
                    f"decodes sat out: {count(decided.needed_pages, 'page')} short, and {decided.returning_pages:,} "
                    "come back by themselves when what is in flight is delivered"
                )
            case PagesEvicted():
                lines.append(f"{count(decided.pages, 'cached page')} that nobody held went, for {decided.reason}")
    if plan is not None and plan.extend_rows and plan.mode == "extend" and before.decoding:
        if config.batching == "prefill_first":
            lines.append(f"prompts go before decodes (batching {config.batching}): {len(before.decoding):,} sat out")
        elif not any(isinstance(decided, DecodeSkipped) for decided in step.decided):
            lines.append("decodes sat out: more than KV is wanted of these prompts, so they share no batch")
    return lines


def _why_nothing(event: LaneReady, step: Step, before: EngineBefore, config: SchedConfig) -> str:
    if any(isinstance(command, ProposeBatch) for command in step.commands):
        return "nothing was launched: it is proposed, and launched once all ranks have agreed"
    if before.paused:
        return "nothing was launched: the engine is paused"
    if before.still:
        return "nothing was launched: weights or memory are being changed"
    if len(before.in_flight) > config.overlap_depth:
        return f"nothing was launched: {count(len(before.in_flight), 'batch')} in flight".replace(
            "batchs", "batches"
        ) + (f", and overlap_depth {config.overlap_depth} allows no more")
    if event.time_us < before.slow_until_us:
        return f"nothing was launched: a control request slows launches down, until {clock(before.slow_until_us)}"
    if any(isinstance(decided, DecodeSkipped) for decided in step.decided):
        return "nothing was launched: the decodes wait for pages that come back with what is in flight"
    if (
        not config.overlap_consecutive_prefills
        and before.in_flight
        and (before.line or before.prefilling != NO_REQUEST)
    ):
        return "nothing was launched: overlap_consecutive_prefills is off, and an extend is in flight"
    if before.line or before.prefilling != NO_REQUEST:
        return "nothing was launched: nobody who waits could start (left out, below), and nobody decodes"
    return "nothing was launched: nobody waits, and whoever runs has all its tokens in flight"


def _why_only_decode(step: Step, before: EngineBefore, config: SchedConfig) -> str:
    if before.decode_owed:
        return "decodes went first: pages were given up for them, or they sat out before"
    if config.batching == "running_first" and before.pages_needed > before.available_pages:
        return "decodes went first: who runs gets its pages before anybody is admitted (batching running_first)"
    if before.since_extend < config.prefill_decode_interval:
        return (
            f"decodes went first: {before.since_extend} of prefill_decode_interval {config.prefill_decode_interval} "
            "launches since the last extend"
        )
    if not before.admits:
        return "only decodes: weights or memory are to be changed, so nobody is admitted"
    if before.batch_is_full:
        return "only decodes: admission ran out of room before, and nobody has left since, so it was not tried again"
    return "only decodes: nobody who waits could start (left out, below)"


def _left_out(
    plan: BatchPlan | None, before: EngineBefore, engine: Engine, said: dict[RequestId, AdmissionDeferred], names: Names
) -> list[str]:
    """Requests that waited and still do, by reason; and decoding ones without a part in the batch."""
    by_cause: dict[Cause, list[RequestId]] = {}
    for request_id in (*before.line, *before.held):
        request = engine.requests.get(request_id)
        if request is not None and request.state is RequestState.WAITING:
            by_cause.setdefault(why_waits(engine, request_id, said), []).append(request_id)
    lines = []
    for cause, who in by_cause.items():
        text = cause_text(cause, names)
        if cause.other == NO_REQUEST and cause.reason in DEFERRAL_TEXTS:
            text = text.replace("first in line, but ", "first in line: ")
        elif cause.reason == "launch":
            text = "not asked in this step"
        lines.append(f"{named(who, names)}: {text}")
    if plan is not None:
        absent = set(before.decoding) - set(plan.request_ids.tolist())
        still = [r for r in before.decoding if r in absent and r in engine.requests and engine.requests[r].row >= 0]
        if still:
            lines.append(f"{count(len(still), 'decode')} of {named(still, names)}: not in this batch")
    return lines


def _deferred(engine: Engine) -> list[str]:
    """What batches in flight still read or write, and so is not free yet."""
    lines = []
    for deferred in engine.memory.deferred.rows:
        pages = -(-deferred.computed // engine.config.page_size) - deferred.protected_pages
        lines.append(
            f"row {deferred.row} and {count(pages, 'page')} of a request that left, "
            f"until b{deferred.free_after} is delivered"
        )
    for free_after, duplicates in engine.memory.deferred.pages:
        lines.append(
            f"pages {runs(sorted(duplicates.tolist()))}, duplicates of cached ones, until b{free_after} is delivered"
        )
    ending = [request.name for batch in engine.in_flight for request in batch.ending_requests()]
    if ending:
        lines.append(f"pages of {', '.join(ending[:LINE_SHOWN])}, which end with what is in flight")
    returning = engine.memory.returning_pages()
    if returning:
        lines.append(f"{count(returning, 'page')} come back once everything in flight is delivered")
    return lines
