"""The explanation of a step: the engine's state before it, its decisions, the requests left out and the reasons.

Reasons are read from the state before the step and from the step's decisions, in the order of the checks in
`Engine.step`.
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

SPANS_SHOWN = 6  # rows of a plan that are listed
LINE_SHOWN = 12  # commands, or requests that end, that are listed


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
        """Return the content for --json."""
        return {"step": self.number, "title": self.title, "batch_id": self.batch_id, "parts": self.parts}


def why_step(run: Path, number: int) -> StepReason:
    """Explain step `number`. Raises ConfigError if the journal has fewer."""
    walk = Walk(run, until=number + 1)
    before = EngineBefore.of(walk.engine, walk.names)
    deferrals: dict[RequestId, AdmissionDeferred] = {}
    seen = 0
    for at, event, step in walk:
        seen = at + 1
        for decided in step.decided:
            match decided:
                case AdmissionDeferred():
                    deferrals[decided.request_id] = decided
                case RequestFinished() | RequestRejected():
                    deferrals.pop(decided.request_id, None)
        if at == number - 1:
            before = EngineBefore.of(walk.engine, walk.names)
        if at == number:
            return _explained(number, event, step, before, walk, deferrals)
    raise ConfigError(
        f"`--step` must be below the {seen:,} steps of the journal, got `{number}`\nhint: steps count from 0"
    )


def _explained(
    number: int,
    event: ObservedEvent,
    step: Step,
    before: EngineBefore,
    walk: Walk,
    deferrals: dict[RequestId, AdmissionDeferred],
) -> StepReason:
    names, engine = walk.names, walk.engine
    plan = step.launched()
    what = f"launched b{plan.batch_id}" if plan is not None else "launched nothing"
    kind = f"{type(event).__name__}, {what}" if isinstance(event, LaneReady) else event_line(event)
    title = f"step {number:,} at {clock(event.time_us)}: {kind}"
    parts = {"before": _state_before(before, names)}
    if not isinstance(event, LaneReady):
        effect = "only LaneReady launches; this step folds a fact"
        if isinstance(event, RanksAgreed):
            effect = "this step launches the batch on which all ranks agreed; LaneReady of a rank plans and proposes"
        parts["the fact"] = [observed_line(event, names), effect]
    parts["decided"] = [decided_line(decided, names) for decided in step.decided]
    if plan is not None:
        parts["launched"] = _launched(plan, engine, names)
    elif step.commands:
        parts["commands"] = [_command(command, names) for command in step.commands[:LINE_SHOWN]]
    if isinstance(event, LaneReady):
        parts["why"] = _why(event, step, plan, before, walk.header.config, names)
        parts["left out"] = _left_out(plan, before, engine, deferrals, names)
    parts["fenced by work in flight"] = _deferred(engine)
    return StepReason(number, title, parts, plan.batch_id if plan is not None else None)


def _command(command: Command, names: Names) -> str:
    """Return a command in one line. Tokens are counted, not shown."""
    if isinstance(command, StreamTokens):
        ids = command.request_ids.tolist()
        return f"stream {count(len(command.tokens), 'token')} to {named(ids, names)}"
    return command_line(command, names)


def short_plan(plan: BatchPlan, names: Names) -> str:
    """Return a plan in one line, with at most SPANS_SHOWN rows in full."""
    if len(plan.rows) <= SPANS_SHOWN:
        return plan_text(plan, names)
    extends = [names.request(r) for r in plan.request_ids[: plan.extend_rows].tolist()]
    prompts = f"prompts of {', '.join(extends[:SPANS_SHOWN])}" + (" and more" if len(extends) > SPANS_SHOWN else "")
    decodes = count(len(plan.rows) - plan.extend_rows, "decode")
    return f"b{plan.batch_id} {plan.mode} " + (f"{prompts} and {decodes}" if extends else decodes)


def _state_before(before: EngineBefore, names: Names) -> list[str]:
    lines = [f"{len(before.line):,} waiting" + (f": {named(before.line, names)}" if before.line else "")]
    if before.held:
        lines.append(f"{len(before.held):,} waiting for prerequisites: {named(before.held, names)}")
    lines.append(
        f"{len(before.decoding):,} decoding" + (f": {named(before.decoding, names)}" if before.decoding else "")
    )
    if before.prefilling != NO_REQUEST:
        lines.append(f"the prompt of {names.request(before.prefilling)} is split and not completely computed")
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
    """Return the engine's reasons for this step, in the order of its checks."""
    lines = []
    if plan is None:
        lines.append(_why_nothing(event, step, before, config))
    elif not plan.extend_rows and (before.line or before.prefilling != NO_REQUEST):
        lines.append(_why_only_decode(step, before, config))
    for decided in step.decided:
        match decided:
            case RequestAdmitted():
                place = before.line.index(decided.request_id) + 1 if decided.request_id in before.line else 0
                passed = f", number {place} of the queue (policy {config.schedule_policy})" if place > 1 else ""
                lines.append(
                    f"{names.request(decided.request_id)} was admitted{passed}: {decided.cached_tokens:,} tokens "
                    f"cached, {decided.new_tokens:,} to compute"
                )
            case RequestRetracted(reason="pages"):
                lines.append(
                    f"{names.request(decided.request_id)} was retracted, which freed "
                    f"{count(decided.pages_freed, 'page')}: the next decodes need {decided.needed_pages:,} and "
                    f"{decided.available_pages:,} were available (retraction_policy {config.retraction_policy})"
                )
            case RequestRetracted(reason="preempted"):
                lines.append(
                    f"{names.request(decided.request_id)} was preempted by {names.request(decided.beneficiary)}, "
                    "which has a higher priority"
                )
            case DecodeSkipped():
                lines.append(
                    f"decodes were skipped: {count(decided.needed_pages, 'page')} short, and "
                    f"{decided.returning_pages:,} become free when batches in flight are delivered"
                )
            case PagesEvicted():
                of = ", ".join(f"{pages:,} of tenant {tenant}" for tenant, pages in decided.tenants)
                lines.append(
                    f"{count(decided.pages, 'cached page')} without a lock evicted, for {decided.reason}"
                    + (f": {of} (tenants above their guaranteed part first)" if of else "")
                )
    if plan is not None and plan.extend_rows and plan.mode == "extend" and before.decoding:
        if config.batching == "prefill_first":
            skipped = f"{len(before.decoding):,} were skipped"
            lines.append(f"prompts go before decodes (batching {config.batching}): {skipped}")
        elif not any(isinstance(decided, DecodeSkipped) for decided in step.decided):
            lines.append("decodes were skipped: these prompts require more than KV, so they share no batch")
    return lines


def _why_nothing(event: LaneReady, step: Step, before: EngineBefore, config: SchedConfig) -> str:
    if any(isinstance(command, ProposeBatch) for command in step.commands):
        return "nothing was launched: the plan is proposed, and launched once all ranks have agreed"
    if before.paused:
        return "nothing was launched: the engine is paused"
    if before.still:
        return "nothing was launched: weights or memory are being changed"
    slots = config.launches_max if config.multiplexes else config.overlap_depth + 1
    if len(before.in_flight) >= slots:
        return f"nothing was launched: {count(len(before.in_flight), 'batch')} in flight".replace(
            "batchs", "batches"
        ) + (f", and overlap_depth {config.overlap_depth} allows no more")
    if event.time_us < before.slow_until_us:
        return f"nothing was launched: a control request delays launches until {clock(before.slow_until_us)}"
    if any(isinstance(decided, DecodeSkipped) for decided in step.decided):
        return "nothing was launched: the decodes wait for pages that become free with batches in flight"
    if (
        not config.overlap_consecutive_prefills
        and before.in_flight
        and (before.line or before.prefilling != NO_REQUEST)
    ):
        return "nothing was launched: overlap_consecutive_prefills is off, and an extend is in flight"
    if before.line or before.prefilling != NO_REQUEST:
        return "nothing was launched: no waiting request could start (left out, below), and no request decodes"
    return "nothing was launched: no request waits, and all tokens of running requests are in flight"


def _why_only_decode(step: Step, before: EngineBefore, config: SchedConfig) -> str:
    if before.decode_owed:
        return "decodes went first: pages were released for them, or they were skipped before"
    if config.batching == "running_first" and before.pages_needed > before.available_pages:
        return "decodes went first: running requests get pages before admissions (batching running_first)"
    if before.since_extend < config.prefill_decode_interval:
        return (
            f"decodes went first: {before.since_extend} of prefill_decode_interval {config.prefill_decode_interval} "
            "launches since the last extend"
        )
    if not before.admits:
        return "only decodes: no request is admitted before a change of weights or memory"
    if before.batch_is_full:
        return "only decodes: admission failed for lack of room, and no request has left since, so it was not repeated"
    return "only decodes: no waiting request could start (left out, below)"


def _left_out(
    plan: BatchPlan | None,
    before: EngineBefore,
    engine: Engine,
    deferrals: dict[RequestId, AdmissionDeferred],
    names: Names,
) -> list[str]:
    """Return the requests that still wait, by cause, and decoding requests that are not in the batch."""
    by_cause: dict[Cause, list[RequestId]] = {}
    for request_id in (*before.line, *before.held):
        request = engine.requests.get(request_id)
        if request is not None and request.state is RequestState.WAITING:
            by_cause.setdefault(why_waits(engine, request_id, deferrals), []).append(request_id)
    lines = []
    for cause, ids in by_cause.items():
        text = cause_text(cause, names)
        if cause.other == NO_REQUEST and cause.reason in DEFERRAL_TEXTS:
            text = text.replace("first in the queue, but ", "first in the queue: ")
        elif cause.reason == "launch":
            text = "not examined in this step"
        lines.append(f"{named(ids, names)}: {text}")
    if plan is not None:
        absent = set(before.decoding) - set(plan.request_ids.tolist())
        still = [r for r in before.decoding if r in absent and r in engine.requests and engine.requests[r].row >= 0]
        if still:
            lines.append(f"{count(len(still), 'decode')} of {named(still, names)}: not in this batch")
    return lines


def _deferred(engine: Engine) -> list[str]:
    """Return lines about rows and pages that are not free yet, because batches in flight read or write them."""
    lines = []
    for deferred in engine.memory.deferred.rows:
        pages = -(-deferred.computed // engine.config.page_size) - deferred.protected_pages
        lines.append(
            f"row {deferred.row} and {count(pages, 'page')} of a request that left its row, "
            f"until b{deferred.free_after} is delivered"
        )
    for free_after, duplicates in engine.memory.deferred.pages:
        lines.append(
            f"pages {runs(sorted(duplicates.tolist()))}, duplicates of cached ones, until b{free_after} is delivered"
        )
    ending = [request.name for batch in engine.in_flight for request in batch.ending_requests()]
    if ending:
        lines.append(f"pages of {', '.join(ending[:LINE_SHOWN])}, which end with batches in flight")
    returning = engine.memory.returning_pages()
    if returning:
        lines.append(f"{count(returning, 'page')} become free once all batches in flight are delivered")
    return lines
