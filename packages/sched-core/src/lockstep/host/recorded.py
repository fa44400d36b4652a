"""Runs the plans of a journal on a device: plans decided earlier, in the simulator or on another machine.

The run makes no new decisions: the journal's events are folded to derive their plans, and each Step is checked by its
digest. Commands go to the executor in the order of the journal. A batch is collected at its result in the journal. The
device draws its own tokens. They replace the journal's tokens wherever these are computed again, which is after a
retraction and in a prompt that quotes an answer. So every request still computes one consistent text.

A simulator's ids identify equal tokens without any text, and exceed the vocabulary of any model. An id of an answer is
replaced by the token drawn in its place, every other id by its remainder modulo the model's vocabulary. A prompt may
quote an answer before its tokens are drawn (a trace with overlapping turns). Its batches run and take as long, but its
tokens have no meaning, and a canary reports its KV.

Moves between cache tiers are not carried out. Batches behind a load run and take as long, on KV of other tokens, so
that the text of their requests has no meaning.

Matchers of grammars move by the drawn tokens. A grammar without a source, such as a simulator's, admits every token.

Drafts are proposed and verified on the device. Where other drafts are right than in the journal, as with another model,
plans continue from the positions in the journal, and the text of that request has no meaning from there on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from lockstep.core.contract.commands import BatchPlan, LaunchBatch, RowTaken, SampleBatch
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import (
    BatchFinished,
    EngineRestarted,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestKind,
    RequestRejected,
)
from lockstep.core.contract.samples import sample_count, sample_of
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import fold
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.delivery import accepted_counts
from lockstep.core.scheduler.engine import Engine
from lockstep.host.batches import BatchExecutor, BatchResult, Int32s, RowContext, row_context
from lockstep.host.host_header import SIMULATOR, HostHeader


@dataclass(slots=True)
class RecordedAnswer:
    """The answer of a request in this run, with as many tokens as in the journal."""

    request_id: RequestId
    prompt: Int32s
    tokens: list[int]


@dataclass(slots=True)
class _Going:
    """A request that has not ended."""

    kind: RequestKind
    prompt_tokens: int = 0
    prompt: Int32s | None = None  # ids for the model; None before the request takes its first row
    drawn: list[int] = field(default_factory=list)
    recorded: list[int] = field(default_factory=list)  # the journal's tokens at the same positions


def run_recorded(
    folder: str | Path,
    executor: BatchExecutor,
    vocab: int,
    answered: Callable[[RecordedAnswer], None] | None = None,
) -> Iterator[tuple[BatchFinished, BatchResult]]:
    """Run a journal's plans; yield for each batch its recorded event and its result in this run.

    Args:
        executor: made for the settings in the journal's header, with no batch in flight.
        vocab: number of token ids of the model.
        answered: called with the answer of every request that took a row, whatever its finish reason.
    Raises: LockstepError for a batch that fails in this run only, or needs a feature that the executor does not have;
            or finished before one launched before it, on another stream; Divergence, JournalError.
    """
    header = read_journal(folder).header
    run = _Recorded(Engine(header.config), executor, vocab, simulated=HostHeader.of(header).kind == SIMULATOR)
    for event, step in fold(folder, lambda _: run.engine):
        match event:
            case RequestArrived():
                run.expect(event)
            case EngineRestarted():
                run.forget()
            case BatchFinished() if run.in_flight and run.in_flight[0].batch_id == event.batch_id:
                yield event, run.collect(event)
            case BatchFinished(batch_id=late) if any(plan.batch_id == late for plan in run.in_flight):
                raise LockstepError(
                    f"batch {late} of the journal finished before batch {run.in_flight[0].batch_id}, launched before "
                    "it: two streams ran side by side (multiplexing), and here batches run in the order of launches"
                )
        for command in step.commands:
            match command:
                case LaunchBatch(plan, sample):
                    run.launch(plan, deferred=sample == "deferred")
                case SampleBatch(batch_id, advance):
                    run.sample(batch_id, advance)
        for decided in step.decided:
            match decided:
                case RequestFinished() if (answer := run.ended(decided)) is not None and answered is not None:
                    answered(answer)
                case RequestRejected(_, request_id):
                    run.drop(request_id)
    run.forget()  # batches in flight at the end of an incomplete journal


class _Recorded:
    """The state of a recorded run."""

    def __init__(self, engine: Engine, executor: BatchExecutor, vocab: int, *, simulated: bool) -> None:
        self.engine, self.executor, self.vocab, self.simulated = engine, executor, vocab, simulated
        self.in_flight: deque[BatchPlan] = deque()
        self._unsampled: set[int] = set()
        self._verifying: dict[int, InFlight] = {}  # by batch in flight: the engine's record with the positions of rows
        self._going: dict[RequestId, _Going] = {}
        self._drawn: dict[int, int] = {}  # by id in a simulator's answers: the token drawn in its place

    def expect(self, event: RequestArrived) -> None:
        """Add a request that arrived, with all its samples."""
        for number in range(sample_count(event)):
            self._going[event.request_id + number] = _Going(sample_of(event, number).kind)

    def ended(self, end: RequestFinished) -> RecordedAnswer | None:
        """Remove a request that finished. Returns its answer, or None if it never took a row."""
        going = self._going.pop(end.request_id, None)
        if going is None or going.prompt is None:
            return None
        answer = RecordedAnswer(end.request_id, going.prompt, going.drawn[: end.output_tokens])
        if self.simulated:
            self._drawn.update(zip(going.recorded, answer.tokens, strict=False))
        return answer

    def drop(self, request_id: RequestId) -> None:
        """Remove a request that was rejected."""
        self._going.pop(request_id, None)

    def launch(self, plan: BatchPlan, *, deferred: bool) -> None:
        """Launch a plan, with token ids of the model."""
        for taken in plan.rows_taken:
            going, request = self._going[taken.request_id], self.engine.requests[taken.request_id]
            going.prompt_tokens = request.prompt_tokens
            if going.prompt is None:
                going.prompt = self._words(np.frombuffer(request.tokens, np.int32)[: request.prompt_tokens])
        if plan.blocks is not None:
            raise LockstepError(
                f"batch {plan.batch_id} of the journal computes blocks: when a block is finished follows from the "
                "model, so such a journal cannot be executed again"
            )
        if plan.token_ids.size:
            spans = [msgspec.structs.replace(span, targets=self._words(span.targets)) for span in plan.logprob_spans]
            plan = msgspec.structs.replace(plan, token_ids=self._new_tokens(plan), logprob_spans=tuple(spans))
        if plan.speculation is not None and plan.speculation.forced_tokens.size:
            forced = self._words(plan.speculation.forced_tokens)
            replaced = msgspec.structs.replace(plan.speculation, forced_tokens=forced)
            plan = msgspec.structs.replace(plan, speculation=replaced)
        self.executor.launch(plan, deferred=deferred, contexts=self._context)
        self.in_flight.append(plan)
        if plan.speculation is not None:
            self._verifying[plan.batch_id] = self.engine.in_flight[-1]
        if deferred:
            self._unsampled.add(plan.batch_id)

    def sample(self, batch_id: int, advance: tuple[tuple[RequestId, int, tuple[int, ...]], ...] = ()) -> None:
        """Sample a deferred batch. Matchers move by the drawn tokens in place of the journal's."""
        self.executor.sample(batch_id, [(one, epoch, self._drawn_for(one, tokens)) for one, epoch, tokens in advance])
        self._unsampled.discard(batch_id)

    def collect(self, event: BatchFinished) -> BatchResult:
        """Collect the oldest batch and store its drawn tokens."""
        plan = self.in_flight.popleft()
        verified = self._verifying.pop(plan.batch_id, None)
        if plan.batch_id in self._unsampled:  # in the journal it failed before it was sampled
            self.sample(plan.batch_id)
        result = self.executor.collect()
        if event.error:
            return result
        if result.error:
            raise LockstepError(f"batch {plan.batch_id} of the journal fails in this run: {result.error}")
        recorded = np.frombuffer(event.tokens, "<i4").tolist()
        rows = plan.sample_rows
        counts = plan.stops[rows] - plan.starts[rows] if plan.steps > 1 else np.ones(len(rows), np.int32)
        positions = plan.stops[rows] - counts + np.int32(1)
        tokens = result.tokens.tolist()
        if verified is not None:
            found = accepted_counts(event, len(rows))
            counts = found if found is not None else counts
            positions = verified.sampled_at
            tokens = _as_many(result, counts)
        at = 0
        for request_id, position, count in zip(
            plan.request_ids[rows].tolist(), positions.tolist(), counts.tolist(), strict=True
        ):
            if (going := self._going.get(request_id)) is not None:
                first = position - going.prompt_tokens
                going.drawn[first : first + count] = tokens[at : at + count]
                going.recorded[first : first + count] = recorded[at : at + count]
            at += count
        return result

    def _drawn_for(self, request_id: RequestId, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that were drawn in place of a request's newest tokens in the journal."""
        going = self._going.get(request_id)
        return tokens if going is None else tuple(going.drawn[len(going.drawn) - len(tokens) :])

    def forget(self) -> None:
        """Collect the batches in flight and drop their results."""
        while self.in_flight:
            plan = self.in_flight.popleft()
            self._verifying.pop(plan.batch_id, None)
            if plan.batch_id in self._unsampled:
                self.sample(plan.batch_id)
            self.executor.collect()

    def _new_tokens(self, plan: BatchPlan) -> Int32s:
        """Return the token ids of a plan's extend rows: of prompts, and of output kept over a retraction."""
        ids = self._words(plan.token_ids)
        first, extending = 0, slice(plan.extend_rows)
        for request_id, start, stop in zip(
            plan.request_ids[extending].tolist(),
            plan.starts[extending].tolist(),
            plan.stops[extending].tolist(),
            strict=True,
        ):
            going, behind = self._going[request_id], first + stop - start
            outputs = stop - max(start, going.prompt_tokens)
            if outputs > 0:
                ends = stop - going.prompt_tokens
                ids[behind - outputs : behind] = going.drawn[ends - outputs : ends]
            first = behind
        return ids

    def _context(self, taken: RowTaken) -> RowContext:
        """Return the context of a row as `RuntimeHost` does, with token ids of the model."""
        request, going = self.engine.requests[taken.request_id], self._going[taken.request_id]
        assert going.prompt is not None
        kept = np.array(going.drawn[: len(request.tokens) // 4 - going.prompt_tokens], np.int32)
        context = row_context(request, going.kind)
        return replace(
            context,
            tokens=np.concatenate((going.prompt, kept)),
            stop_token_ids=tuple(token for token in context.stop_token_ids if token < self.vocab),
        )

    def _words(self, ids: Int32s) -> Int32s:
        """Return token ids of the model for ids of the journal, as a copy."""
        words = ids % np.int32(self.vocab)
        if self._drawn:
            drawn_for = self._drawn.get
            for i, token in enumerate(ids.tolist()):
                if (drawn := drawn_for(token)) is not None:
                    words[i] = drawn
        return words


def _as_many(result: BatchResult, counts: Int32s) -> list[int]:
    """Return a verification's tokens, as many per row as in the journal: more are dropped, or the last is repeated."""
    tokens, firsts = result.tokens.tolist(), result.firsts().tolist()
    ends = [*firsts[1:], len(tokens)]
    return [
        tokens[min(first + j, end - 1)]
        for first, end, count in zip(firsts, ends, counts.tolist(), strict=True)
        for j in range(count)
    ]
