"""What a host and its executor tell each other beside plans. No torch: an executor may be anything that runs plans.

`lockstep.runtime.executor.Executor` runs them on a device. One that only takes as long as a device would serves for
trying out what stands in front of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import NO_ROWS as NONE
from lockstep.core.contract.commands import BatchPlan, RowTaken
from lockstep.core.contract.events import BatchId, RequestId, RequestKind

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the executor may want to know of a row's holder beyond the plan. All of it is in the journal."""

    tokens: Int32s = field(default_factory=lambda: NONE)  # the prompt, and output kept over a retraction
    prompt_tokens: int = 0  # of these
    kind: RequestKind = "generate"
    namespace: str = ""  # requests of different ones share no KV
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


ContextOf = Callable[[RowTaken], RowContext]
NO_CONTEXT = RowContext()


# ------------------------------------------------------------------------------------------------------ what comes back


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of a request's prompt: logprob i is that of the token at position start + i + 1, given those before it.

    The likeliest tokens in its place, where requested, have the shape [positions, number of them], likeliest first.
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
    """What a prompt came to: of kind embed the pooled vector [hidden], of kind score the last logits [vocabulary]."""

    request_id: RequestId
    kind: RequestKind
    values: Float32s


class MatchersAsked(Protocol):
    """The matchers' interface for the results of a batch; `lockstep.host.grammars.GrammarMatchers` implements it."""

    def ended(self, row: int, token: int) -> bool:
        """Whether the row's grammar admits nothing behind this token. The matcher is not moved."""

    def forced(self, row: int, token: int) -> list[int]:
        """Tokens that the row's grammar forces behind this one. The matcher is not moved."""


@dataclass(slots=True)
class BatchResult:
    """A batch that came back. Everything is on the CPU."""

    plan: BatchPlan
    error: str = ""
    tokens: Int32s = field(default_factory=lambda: NONE)  # by sampling row; if several, those of each row end to end
    logprobs: Float32s | None = None  # of these tokens, where any row requested logprobs
    top_ids: Int32s | None = None  # [tokens, largest number requested]
    top_logprobs: Float32s | None = None
    accepted: Int32s | None = None  # where drafts were verified: tokens of each sampling row
    invalid: tuple[int, ...] = ()  # sampling rows
    grammar_ended: tuple[int, ...] = ()  # sampling rows
    forced: tuple[tuple[int, bytes], ...] = ()  # sampling rows, and int32 ids that their grammars force next
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    hidden_states: list[HiddenStates] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    started_us: int = 0
    finished_us: int = 0

    def firsts(self) -> Int32s:
        """Which token is the first of each sampling row of a plan with one forward. int32 [sampling rows]"""
        if self.accepted is None:
            return np.arange(len(self.plan.sample_rows), dtype=np.int32)
        return np.cumsum(self.accepted, dtype=np.int32) - self.accepted

    def lasts(self) -> Int32s:
        """Which token is the newest of each sampling row of a plan with one forward. int32 [sampling rows]"""
        return self.firsts() if self.accepted is None else np.cumsum(self.accepted, dtype=np.int32) - np.int32(1)

    def look_at_grammars(self, rows: Sequence[int], matchers: MatchersAsked, *, jumps: bool) -> None:
        """Record the rows with a grammar that ended at the newest token and, with `jumps`, the tokens forced next.

        Args:
            rows: sampling rows under grammars, of a plan with one forward.
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
    """Runs one plan after another. What is launched comes back in launch order, each batch once."""

    @property
    def in_flight(self) -> int:
        """Batches launched and not collected."""

    def launch(self, plan: BatchPlan, *, deferred: bool = False, contexts: ContextOf | None = None) -> None:
        """Put a plan behind those launched before. Returns at once.

        With `deferred` it is sampled after `sample` was called for it. `contexts` gives the context of a row taken.
        Raises: LockstepError for what it cannot run, or when nothing will run any more.
        """

    def sample(self, batch_id: BatchId, advance: Sequence[tuple[RequestId, int, Sequence[int]]]) -> None:
        """Move the matchers, then let a deferred batch sample."""

    def ready(self) -> bool:
        """Whether the oldest batch's results are there."""

    def pause_s(self) -> float:
        """How long to wait before the oldest batch is looked at again; 0 where it is time to collect it."""

    def collect(self) -> BatchResult:
        """The oldest batch's results; waits for them."""
