"""The interface of an executor, and the values beside plans that host and executor exchange. Imports no torch.

`lockstep.runtime.executor.Executor` runs plans on a device. `lockstep.api.emulate.EmulatedExecutor` runs none: it takes
the time of a cost model, for tests of the server around an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import NO_ROWS as NONE
from lockstep.core.contract.commands import BatchPlan, RowTaken
from lockstep.core.contract.events import BatchId, PromptSpan, RequestId, RequestKind
from lockstep.core.requests.table import Request
from lockstep.core.scheduler.engine import Engine

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowContext:
    """Facts about the request of a row that the executor may need beyond the plan. All of them are in the journal."""

    tokens: Int32s = field(default_factory=lambda: NONE)  # the prompt, and output kept over a retraction
    prompt_tokens: int = 0  # the first of `tokens` that are prompt
    kind: RequestKind = "generate"
    namespace: str = ""  # requests of different namespaces share no KV
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    spans: tuple[PromptSpan, ...] = ()  # media of the prompt, where `tokens` are placeholders


ContextOf = Callable[[RowTaken], RowContext]
NO_CONTEXT = RowContext()


def row_context(request: Request, kind: RequestKind) -> RowContext:
    """Return the context of a request that takes a row: its tokens with those of its session, after truncation."""
    return RowContext(
        tokens=np.frombuffer(request.tokens, np.int32),
        prompt_tokens=request.prompt_tokens,
        kind=kind,
        namespace=request.namespace,
        min_new_tokens=request.min_new_tokens,
        stop_token_ids=request.stop_token_ids,
        spans=() if request.extras is None else request.extras.spans,
    )


# ------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of a request's prompt: item i belongs to the token at position start + i + 1, given the tokens before.

    `top_ids` and `top_logprobs` have shape [positions, top_logprobs requested], likeliest first; None unless requested.
    """

    request_id: RequestId
    start: int
    logprobs: Float32s
    top_ids: Int32s | None = None
    top_logprobs: Float32s | None = None


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The last layer's hidden states of a request's positions from `start` on: float32 [positions, hidden]."""

    request_id: RequestId
    start: int
    states: Float32s


@dataclass(frozen=True, slots=True)
class Pooled:
    """Result of a prompt without output: for kind embed the pooled vector [hidden], for kind score the last logits
    [vocabulary]."""

    request_id: RequestId
    kind: RequestKind
    values: Float32s


class MatchersAsked(Protocol):
    """The matchers' interface for the results of a batch; `lockstep.host.grammars.GrammarMatchers` implements it."""

    def ended(self, row: int, token: int) -> bool:
        """Whether the row's grammar ends with this token. The matcher is not moved."""

    def forced(self, row: int, token: int) -> list[int]:
        """Return the tokens that the row's grammar forces after this token. The matcher is not moved."""


@dataclass(slots=True)
class BatchResult:
    """The result of one batch. All arrays are on the CPU."""

    plan: BatchPlan
    error: str = ""
    tokens: Int32s = field(default_factory=lambda: NONE)  # of all sampling rows, end to end
    logprobs: Float32s | None = None  # [tokens], where any row requested logprobs
    top_ids: Int32s | None = None  # [tokens, largest `logprobs_beside` of a request]
    top_logprobs: Float32s | None = None
    accepted: Int32s | None = None  # [sampling rows] tokens of each row, where drafts were verified or blocks computed
    right_drafts: Int32s | None = None  # [sum of accepted - 1], of a tree: numbers of the right drafts, end to end
    invalid: tuple[int, ...] = ()  # indices of sampling rows
    grammar_ended: tuple[int, ...] = ()  # indices of sampling rows
    forced: tuple[tuple[int, bytes], ...] = ()  # sampling rows, and int32 ids that their grammars force next
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    hidden_states: list[HiddenStates] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    started_us: int = 0
    finished_us: int = 0

    def firsts(self) -> Int32s:
        """Return the index in `tokens` of each sampling row's first token, for a plan with one forward.

        Returns: int32 [sampling rows].
        """
        if self.accepted is None:
            return np.arange(len(self.plan.sample_rows), dtype=np.int32)
        return np.cumsum(self.accepted, dtype=np.int32) - self.accepted

    def accepted_bytes(self) -> bytes:
        """Return `BatchFinished.accepted`: the tokens of each row, and the numbers of the right drafts of trees."""
        if self.accepted is None:
            return b""
        counts = self.accepted.astype("<i4", copy=False).tobytes()
        return counts if self.right_drafts is None else counts + self.right_drafts.astype("<i4", copy=False).tobytes()

    def lasts(self) -> Int32s:
        """Return the index in `tokens` of each sampling row's newest token, for a plan with one forward.

        Returns: int32 [sampling rows].
        """
        return self.firsts() if self.accepted is None else np.cumsum(self.accepted, dtype=np.int32) - np.int32(1)

    def look_at_grammars(self, rows: Sequence[int], matchers: MatchersAsked, *, jumps: bool) -> None:
        """Record the rows with a grammar that ended at the newest token and, with `jumps`, the tokens forced next.

        Args:
            rows: indices of the sampling rows with a grammar, of a plan with one forward.
        """
        tables, lasts = self.plan.rows[self.plan.sample_rows], self.lasts()
        newest = [(i, int(tables[i]), int(self.tokens[lasts[i]])) for i in rows]
        self.grammar_ended = tuple([i for i, row, token in newest if matchers.ended(row, token)])
        if jumps:
            going = [one for one in newest if one[0] not in self.grammar_ended and one[0] not in self.invalid]
            found = [(i, matchers.forced(row, token)) for i, row, token in going]
            self.forced = tuple([(i, np.array(tokens, "<i4").tobytes()) for i, tokens in found if tokens])


# ------------------------------------------------------------------------------------------------------------- executor


class BatchExecutor(Protocol):
    """Runs one plan after another. Results are collected in launch order, once per batch."""

    @property
    def in_flight(self) -> int:
        """Batches launched and not collected."""

    def launch(self, plan: BatchPlan, *, deferred: bool = False, contexts: ContextOf | None = None) -> None:
        """Queue a plan after the plans launched before. Returns at once.

        Args:
            deferred: the batch is sampled once `sample` was called for it.
            contexts: returns the context of a row that the plan takes.
        Raises: LockstepError for a plan that the executor cannot run, or after the executor has failed.
        """

    def sample(self, batch_id: BatchId, advance: Sequence[tuple[RequestId, int, Sequence[int]]]) -> None:
        """Move the matchers, then let a deferred batch sample."""

    def ready(self) -> bool:
        """Whether the results of the oldest batch can be collected without waiting."""

    def pause_s(self) -> float:
        """Return the seconds to wait before the next check of the oldest batch; 0 if it should be collected now."""

    def collect(self) -> BatchResult:
        """Wait for the results of the oldest batch and return them."""


def sampled_spans(engine: Engine, plan: BatchPlan, accepted: Int32s | None) -> tuple[Int32s, Int32s]:
    """Return position of the first new token and number of new tokens of each sampling row of the oldest batch.

    Call it before the engine steps the result: until then the engine has the positions of verifying rows.

    Args:
        accepted: `BatchResult.accepted`: int32 [sampling rows], or None if no drafts were verified.
    Returns: positions and counts, both int32 [sampling rows].
    """
    rows = plan.sample_rows
    if plan.blocks is not None:
        return engine.in_flight[0].sampled_at, np.zeros(len(rows), np.int32) if accepted is None else accepted
    if plan.speculation is not None:
        positions: Int32s = engine.in_flight[0].sampled_at
        return positions, engine.in_flight[0].least if accepted is None else accepted
    counts = plan.stops[rows] - plan.starts[rows] if plan.steps > 1 else np.ones(len(rows), np.int32)
    return plan.stops[rows] - counts + np.int32(1), counts
