"""Batches in flight: the parts of an extend, and the facts of a launched plan that are needed until its result."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from lockstep.core.contract.commands import NO_ROWS, BatchPlan, Speculation
from lockstep.core.requests.table import ONE, Int32s, Request, RunningBatch

FEW_ROWS = 48
"""Rows up to which a search in a list costs less than a comparison of arrays."""


class ExtendPart(Struct, frozen=True):
    """The positions [start:stop) of one request in an extend."""

    request: Request
    start: int
    stop: int


class InFlight(Struct, eq=False):
    """A launched batch that is not collected yet. Everything but the first four fields follows from the plan."""

    plan: BatchPlan
    requests: list[Request]  # by position in the plan
    samplers: RunningBatch  # the rows that sample, as columns
    ending: list[int]  # samplers that end by length with this batch
    dead: list[int] = []  # rows that their request left after the launch
    sampled_at: Int32s = NO_ROWS  # per sampler: the position of its first sampled token
    steps: Int32s | None = None  # per sampler: the number of tokens it samples; None: one each
    tokens: int = -1  # tokens in the result of the batch; -1: known only from the result
    verifies: bool = False  # if true, the positions of its rows follow only from its result
    blocks: bool = False  # its rows compute blocks, and its result shows which of them are finished
    forced: Int32s | None = None  # per sampler: tokens that its grammar forces; None: no grammar forces any

    def __post_init__(self) -> None:
        """Derive what each sampler samples, and at which position."""
        plan, samplers = self.plan, self.samplers
        if plan.mode == "decode":
            if plan.steps == 1:
                self.tokens, self.sampled_at = samplers.size, plan.stops
            else:
                self.steps = plan.stops - plan.starts
                self.sampled_at = plan.starts + ONE
                self.tokens = int(self.steps.sum())
        elif plan.speculation is not None:
            self._verify(plan.speculation)
        elif plan.blocks is not None:
            self.blocks = True
            self.sampled_at = np.maximum(plan.starts, samplers.prompts)
            self.steps = plan.stops - self.sampled_at
        else:
            self.tokens = samplers.size
            if samplers.size:
                self.sampled_at = plan.stops.take(plan.sample_rows)

    def _verify(self, speculation: Speculation) -> None:
        """Derive upper bounds, which hold until the result is delivered."""
        plan, size = self.plan, self.samplers.size
        verifying = plan.sample_rows >= plan.extend_rows
        steps: Int32s = np.ones(size, np.int32)
        steps[verifying] += speculation.path_lengths()
        self.verifies, self.steps = True, steps
        self.sampled_at = plan.stops.take(plan.sample_rows) - steps + ONE
        if speculation.forced_lengths.size:
            self.forced = np.zeros(size, np.int32)
            self.forced[verifying] = speculation.forced_lengths

    @property
    def least(self) -> Int32s:
        """Lower bound of the tokens of each sampler: one plus its forced tokens. int32 [samplers]"""
        return self.samplers.ones if self.forced is None else self.forced + ONE

    @property
    def starts(self) -> Int32s:
        """Upper bounds of the positions at which its rows start. int32 [rows]

        They are exact for rows that are in no earlier batch in flight.
        """
        if not self.verifies:
            return self.plan.starts
        starts = self.plan.starts.copy()
        verifying = self.plan.sample_rows >= self.plan.extend_rows
        starts[self.plan.sample_rows[verifying]] = self.sampled_at[verifying] - ONE
        return starts

    def forced_of(self, sampler: int) -> list[int]:
        """Return the token ids that the grammar of a sampler forces in this batch."""
        if self.forced is None or not self.forced[sampler]:
            return []
        assert self.plan.speculation is not None
        return self.plan.speculation.forced_of(int(self.plan.sample_rows[sampler]) - self.plan.extend_rows)

    def tokens_of(self, row: int) -> int:
        """Return the largest number of tokens that the batch samples for this row."""
        rows = self.samplers.rows
        if self.steps is None and rows.size <= FEW_ROWS:
            return int(rows.tolist().count(row))
        of_row = rows == row
        return int(np.count_nonzero(of_row)) if self.steps is None else int(self.steps[of_row].sum())

    def alive(self) -> Iterator[tuple[int, Request]]:
        """Yield (index in the plan, request) of each row that its request still has."""
        for i, (request, row) in enumerate(zip(self.requests, self.plan.rows.tolist(), strict=True)):
            if request.row == row and row not in self.dead:
                yield i, request

    def ending_requests(self) -> Iterator[Request]:
        """Yield the requests that end with this batch whatever it samples: by length, or as prefill only."""
        for i in self.ending:
            request, row = self.samplers.requests[i], int(self.samplers.rows[i])
            if request.row == row and row not in self.dead:
                yield request
        yield from self.computed_requests()

    def computed_requests(self) -> list[Request]:
        """Return the prefill-only requests that end with this batch, which computes the last of their prompts."""
        rows = [(self.requests[i], int(self.plan.rows[i])) for i in self.plan.pooled_rows.tolist()]
        return [request for request, row in rows if request.row == row and row not in self.dead]

    def names(self, row: int) -> bool:
        """Whether the plan reads or writes this row."""
        rows = self.plan.rows
        return row in rows.tolist() if rows.size <= FEW_ROWS else bool(np.count_nonzero(rows == row))


def new_tokens_of(parts: list[ExtendPart]) -> Int32s:
    """Return the token ids that the parts compute, end to end. int32 [new tokens]"""
    ids = [np.frombuffer(p.request.tokens, np.int32, p.stop - p.start, 4 * p.start) for p in parts]
    return ids[0] if len(ids) == 1 else np.concatenate(ids)
