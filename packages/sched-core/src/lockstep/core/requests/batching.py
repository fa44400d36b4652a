"""Batches: what a plan is made of, and what is remembered of it until its result is delivered."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from lockstep.core.contract.commands import NO_ROWS, BatchPlan
from lockstep.core.requests.table import ONE, Int32s, Request, RunningBatch


class ExtendPart(Struct, frozen=True):
    """One request's share of an extend: positions [start:stop)."""

    request: Request
    start: int
    stop: int


class InFlight:
    """A launched batch whose result was not delivered yet."""

    __slots__ = (
        "dead",
        "ending",
        "forced",
        "plan",
        "requests",
        "sampled_at",
        "samplers",
        "steps",
        "tokens",
        "verifies",
    )

    def __init__(self, plan: BatchPlan, requests: list[Request], samplers: RunningBatch, ending: list[int]) -> None:
        self.plan = plan
        self.requests = requests  # by position in the plan
        self.samplers = samplers  # the rows that sample, as columns
        self.sampled_at: Int32s = NO_ROWS
        self.steps: Int32s | None = None  # tokens that each sampler samples, if not one
        self.tokens = samplers.size  # how many its result has; -1: that says so itself
        self.verifies = plan.speculation is not None  # only its result says where its rows stand then
        self.forced: Int32s | None = None  # per sampler: tokens that its grammar forces, if any does
        if plan.speculation is not None:
            self.steps = np.ones(samplers.size, np.int32)  # until it is delivered, the most
            verifying = plan.sample_rows >= plan.extend_rows
            self.steps[verifying] += plan.speculation.draft_lengths
            self.sampled_at = plan.stops.take(plan.sample_rows) - self.steps + ONE  # the most, for the first of them
            self.tokens = -1  # its result says
            if plan.speculation.forced_lengths.size:
                self.forced = np.zeros(samplers.size, np.int32)
                self.forced[verifying] = plan.speculation.forced_lengths
        elif plan.mode != "decode":
            if samplers.size:
                self.sampled_at = plan.stops.take(plan.sample_rows)
        elif plan.steps == 1:
            self.sampled_at = plan.stops
        else:
            self.steps = plan.stops - plan.starts
            self.sampled_at = plan.starts + ONE  # the first of them
            self.tokens = int(self.steps.sum())
        self.ending = ending  # samplers that end by length with this batch
        self.dead: list[int] = []  # rows whose request left after the launch

    @property
    def least(self) -> Int32s:
        """Tokens that each sampler gets at least: one, and those that are forced. int32 [samplers]"""
        return self.samplers.ones if self.forced is None else self.forced + ONE

    @property
    def starts(self) -> Int32s:
        """Where its rows start, the most that results leave open: exact for rows that are in no batch before it.
        [rows]"""
        if not self.verifies:
            return self.plan.starts
        starts = self.plan.starts.copy()
        verifying = self.plan.sample_rows >= self.plan.extend_rows
        starts[self.plan.sample_rows[verifying]] = self.sampled_at[verifying] - ONE
        return starts

    def forced_of(self, sampler: int) -> list[int]:
        """The tokens that are forced of a sampler."""
        if self.forced is None or not self.forced[sampler]:
            return []
        assert self.plan.speculation is not None
        return self.plan.speculation.forced_of(int(self.plan.sample_rows[sampler]) - self.plan.extend_rows)

    def tokens_of(self, row: int) -> int:
        """How many tokens it samples for this row, at most."""
        mine = self.samplers.rows == row
        return int(np.count_nonzero(mine)) if self.steps is None else int(self.steps[mine].sum())

    def alive(self) -> Iterator[tuple[int, Request]]:
        """Its rows whose request is still there: position in the plan, request."""
        for i, (request, row) in enumerate(zip(self.requests, self.plan.rows.tolist(), strict=True)):
            if request.row == row and row not in self.dead:
                yield i, request

    def ending_requests(self) -> Iterator[Request]:
        """The requests that this batch ends whatever it samples: by length, or because only the prompt was to be
        computed."""
        for i in self.ending:
            request, row = self.samplers.requests[i], int(self.samplers.rows[i])
            if request.row == row and row not in self.dead:
                yield request
        yield from self.computed_requests()

    def computed_requests(self) -> list[Request]:
        """The requests that end with this batch, with their prompts."""
        rows = [(self.requests[i], int(self.plan.rows[i])) for i in self.plan.pooled_rows.tolist()]
        return [request for request, row in rows if request.row == row and row not in self.dead]

    def names(self, row: int) -> bool:
        """Whether the plan reads or writes this row."""
        return bool(np.count_nonzero(self.plan.rows == row))


def new_tokens_of(parts: list[ExtendPart]) -> Int32s:
    """The ids that the parts compute, end to end."""
    ids = [np.frombuffer(p.request.tokens, np.int32, p.stop - p.start, 4 * p.start) for p in parts]
    return ids[0] if len(ids) == 1 else np.concatenate(ids)
