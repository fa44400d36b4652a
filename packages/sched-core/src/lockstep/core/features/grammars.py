"""Structured output: requests that wait for a grammar, and the order of matcher moves and sampling.

The host compiles grammars and keeps the matchers, one per request and epoch. This module orders both by commands. It
holds digests and numbers, never masks or logits.

    unknown --first request--> compiling --GrammarReady--> ready | invalid
                                   |
    its requests are held ---------+--> join the waiting queue | are rejected
                                        `grammar_timeout_us`: are rejected, the compilation goes on

A mask depends on the output so far, so output n is sampled after the matcher has taken outputs [0:n).

    n = 0               the matcher is at its start                       sampled at once
    n > 0, an extend    the request was retracted; its output is kept     deferred, SampleBatch in the same Step
    n > 0, a decode     output n - 1 was delivered                        deferred, SampleBatch in the same Step
                        output n - 1 is sampled by a batch in flight      deferred until its result: `sample_after`

So each SampleBatch moves a matcher by the tokens that are new to it: all kept output behind an extend, one token behind
a decode. Rows that their request left after the launch move no matcher. Their batch is sampled nevertheless, since
every launched batch must have a result.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.checks import fail, same
from lockstep.core.contract.commands import CompileGrammar, LaunchBatch, SampleBatch, Step
from lockstep.core.contract.events import BatchFinished, GrammarReady, RequestArrived, RequestId
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import Int32s, Request
from lockstep.core.requests.validation import RequestRefused

GRAMMARS_REMEMBERED = 1024
"""The most digests that are kept, unless more are in use. The least recently requested unused ones are dropped."""

Advance = tuple[RequestId, int, tuple[int, ...]]  # request, epoch, tokens by which its matcher moves


class GrammarEntry(msgspec.Struct):
    """The compilation state of one digest, and the requests that need it."""

    error: str | None = None  # None: being compiled; "": compiled; else: why it did not compile
    users: int = 0  # requests with this grammar that have not ended
    waiting: dict[RequestId, None] = {}  # the held ones among them, in order of arrival


class GrammarsPart(msgspec.Struct):
    """Grammars in a snapshot: digest, error, users and held requests of each, least recently requested first."""

    grammars: list[tuple[bytes, str | None, int, list[int]]]


class Grammars(Component):
    """The grammars of an engine by digest, least recently requested first."""

    PART = GrammarsPart

    def __init__(self, scheduler: SchedulerView) -> None:
        self._scheduler = scheduler
        self.known: dict[bytes, GrammarEntry] = {}

    def part(self) -> GrammarsPart:
        """Return the state for a snapshot."""
        return GrammarsPart([(digest, one.error, one.users, list(one.waiting)) for digest, one in self.known.items()])

    def load(self, part: GrammarsPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        self.known = {
            digest: GrammarEntry(error, users, dict.fromkeys(waiting))
            for digest, error, users, waiting in part.grammars
        }

    def blocked_requests(self) -> list[RequestId]:
        """Return the requests that wait for their grammars."""
        return [request_id for known in self.known.values() for request_id in known.waiting]

    def check_state(self, facts: Facts) -> None:
        """S15, S23: a request without its compiled grammar is blocked, a running one has it.

        A deferred batch waits for an older batch.
        """
        known = self.known
        users: dict[bytes, int] = {}
        for request in facts.requests.values():
            grammar = request.grammar
            if grammar is not None:
                users[grammar.digest] = users.get(grammar.digest, 0) + 1
                if request.row >= 0 and known[grammar.digest].error != "":
                    fail(f"S23: {request.name} runs, but its grammar did not compile")
        if known or users:
            same("S15 requests per grammar", {digest: one.users for digest, one in known.items() if one.users}, users)
        for digest, one in known.items():
            if one.error is not None and one.waiting:
                fail(f"S15: {list(one.waiting)} wait for the grammar {digest.hex()}, which was answered")
            for request_id in one.waiting:
                held = facts.blocked.get(request_id)
                if held is None or held.grammar is None or held.grammar.digest != digest:
                    fail(f"S15: r{request_id} waits for the grammar {digest.hex()} but is not held for it")
        for batch in facts.in_flight:
            after = batch.plan.sample_after
            if after is not None and after >= batch.plan.batch_id:
                fail(f"S23: batch {batch.plan.batch_id} waits for batch {after}, which was not launched before it")

    def refuse(self, event: RequestArrived, samples: int, held: int, max_queued_requests: int | None) -> None:
        """Raise RequestRefused for a grammar that did not compile before, or if too many requests would be held.

        Args:
            held: requests that wait for their grammars already; max_queued_requests limits them. None: no limit.
        """
        if event.grammar is None:
            return
        known = self.known.get(event.grammar.digest)
        if known is not None and known.error:
            raise RequestRefused("bad_request", _invalid(known.error))
        compiled = known is not None and known.error == ""
        if not compiled and max_queued_requests is not None and held + samples > max_queued_requests:
            message = f"{held} requests wait for their grammars already (max_queued_requests {max_queued_requests})"
            raise RequestRefused("queue_full", message)

    # mechanism: grammar-compilation (decided)
    def must_wait(self, request: Request, timeout_us: int | None, step: Step) -> bool:
        """Register a new request with its grammar, and order the compilation if it is the first one.

        Returns: whether the request must wait, since its grammar is not compiled yet.
        """
        if request.grammar is None:
            return False
        digest = request.grammar.digest
        known = self.known.pop(digest, None)
        if known is None:
            known = GrammarEntry()
            step.commands.append(CompileGrammar(request.grammar))
        self.known[digest] = known  # last: most recently requested
        known.users += 1
        self._forget()
        if known.error is not None:
            return False
        known.waiting[request.request_id] = None
        if timeout_us is not None:
            request.grammar_due_us = request.arrived_us + timeout_us
        return True

    def answered(self, event: GrammarReady, step: Step) -> None:
        """Take in the result of a compilation: waiting requests join the queue or are rejected.

        Only the first result of a digest counts.
        """
        known = self.known.get(event.digest)
        if known is None or known.error is not None:
            return
        known.error = event.error
        waiting, known.waiting = [self._scheduler.requests[request_id] for request_id in known.waiting], {}
        for request in waiting:
            request.grammar_due_us = None
            if event.error:
                self._scheduler.reject(request.request_id, "bad_request", _invalid(event.error), step)
            else:
                self._scheduler.join_queue(request)

    def ended(self, request: Request) -> None:
        """Remove an ended request from its grammar. A running compilation goes on, for later requests."""
        if request.grammar is not None:
            known = self.known[request.grammar.digest]
            known.users -= 1
            known.waiting.pop(request.request_id, None)

    def ask_again(self, step: Step) -> None:
        """Order pending compilations again after a restart, which may have lost them.

        Only the first result counts, so a second order is harmless.
        """
        for known in self.known.values():
            for request_id in known.waiting:
                grammar = self._scheduler.requests[request_id].grammar
                assert grammar is not None
                step.commands.append(CompileGrammar(grammar))
                break

    def _forget(self) -> None:
        """Drop unused digests beyond GRAMMARS_REMEMBERED. A digest that a request uses is never dropped."""
        excess = len(self.known) - GRAMMARS_REMEMBERED
        if excess > 0:
            unused = (digest for digest, known in self.known.items() if not known.users)
            for digest in list(islice(unused, excess)):
                del self.known[digest]


def _invalid(error: str) -> str:
    return f"`grammar` did not compile: {error}"


# ------------------------------------------------------------------------------------------------------------ matchers


def launch(batch: InFlight, in_flight: Iterable[InFlight], outputs: Int32s, step: Step) -> None:
    """Launch a batch with grammars, and order its sampling now or after the result that its matchers need.

    Args:
        in_flight: the batches launched before it, oldest first.
        outputs: int32 [rows, width], the output table.
    """
    plan, samplers = batch.plan, batch.samplers
    behind_output = _behind_output(batch)
    if not behind_output.any():
        step.commands.append(LaunchBatch(plan))
        return
    decoding = samplers.rows[behind_output & (plan.sample_rows >= plan.extend_rows)]
    after = [other.plan.batch_id for other in in_flight if np.isin(other.samplers.rows, decoding).any()]
    batch.plan = msgspec.structs.replace(plan, sample_after=after[-1] if after else None)
    step.commands.append(LaunchBatch(batch.plan, "deferred"))
    if not after:
        step.commands.append(_sample(batch, outputs))


def collected(
    event: BatchFinished, batch: InFlight, in_flight: Iterable[InFlight], outputs: Int32s, step: Step
) -> None:
    """Record which grammars ended with a collected batch, and order the sampling of the batches that waited for it.

    These SampleBatch commands are put in front of all other commands of the step.

    Args:
        outputs: int32 [rows, width], the output table.
    """
    for i in event.grammar_ended:
        if batch.samplers.rows[i] not in batch.dead:
            request, number = batch.samplers.requests[i], int(batch.sampled_at[i] - batch.samplers.prompts[i])
            number += int(batch.least[i]) - 1  # the last of its forced tokens and the sampled one
            request.grammar_outputs = min(request.grammar_outputs, number + 1)
    waited = [other for other in in_flight if other.plan.sample_after == event.batch_id]
    step.commands[:0] = [_sample(other, outputs) for other in waited]


def _behind_output(batch: InFlight) -> NDArray[np.bool_]:
    """Return a mask of the samplers with a grammar and earlier output, which its matcher must take. bool [samplers]"""
    samplers = batch.samplers
    behind: NDArray[np.bool_] = samplers.has_grammar & (batch.sampled_at > samplers.prompts)
    return behind


def _sample(batch: InFlight, outputs: Int32s) -> SampleBatch:
    """Return the command to sample a deferred batch. All tokens before the sampled ones are delivered."""
    plan, samplers = batch.plan, batch.samplers
    advance: list[Advance] = []
    for i in np.flatnonzero(_behind_output(batch)).tolist():
        row = int(samplers.rows[i])
        if row in batch.dead:
            continue
        request, number = samplers.requests[i], int(batch.sampled_at[i] - samplers.prompts[i])
        first = number - 1 if plan.sample_rows[i] >= plan.extend_rows else 0
        tokens = tuple(outputs[row, first : min(number, request.grammar_outputs)].tolist())
        tokens += tuple(batch.forced_of(i))
        if tokens:
            advance.append((request.request_id, request.epoch, tokens))
    return SampleBatch(plan.batch_id, tuple(advance))
