"""Speculative decoding: every decode verifies drafts, so that one forward samples several tokens of a request.

A drafter (n-grams of the text, a small model, layers trained for it) guesses the next tokens on the device. The model
computes the newest token and its drafts in one pass, and what it samples behind each of them says which were right: of
d drafts the first so many, a. Then a + 1 tokens are new, and where the row stands is known only with the result.

    delivered       base      least             most      limit - 1
    | ..known KV..   | in flight: 1 to d + 1 each |  next: 1 to d + 1  | the last token is never fed back

`Engine.positions` is the most a row can have reached with all that is in flight, and its pages reach as far. A launch
starts at `base` plus what the results in flight will say (`starts_after`), so its plan names the least and the most.
With a result the row is moved back by the drafts that were wrong, and so is its place in every batch behind; pages
that it can no longer reach go back at once, since no batch in flight can write them any more. Where tables cannot
shrink (`tables_append_only`) the row keeps them as spare pages, for its next positions.

A row that may have reached its length with what is in flight sits out until that is known: no row runs past its end.
Drafts are optional: no request is retracted, and no session yields, to make room for them. Where pages lack, fewer are
verified, down to none; the next decodes of other microbatches have theirs first. Rows under a grammar or with stop
texts have none, for their hosts must see each token before the next is drawn; but what a grammar forces is verified as
drafts are (jump_forward.py).

How many drafts are worth it follows from the results so far (`Chances`), if that is asked for: a draft counts only if
all before it are right, and past some length hardly any does.

The drafter's own KV, if it has any, lies in the same pages at the same positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.core.contract.commands import NO_DELTAS, NO_ROWS, AfterBatch, BatchPlan, PageDeltas, Speculation, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished
from lockstep.core.features.jump_forward import JumpForward
from lockstep.core.features.view import SchedulerView
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.delivery import step_numbers
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import (
    HAS_GRAMMAR,
    ONE,
    WATCHES_TEXT,
    ZERO,
    Int32s,
    Int64s,
    Request,
    RequestState,
    RunningBatch,
)

FADE = 0.98  # weight of a result relative to the one after it
OFFERED_MIN = 4.0  # rows, faded, before the share of a place is trusted
EXACT = -1  # no batch in flight leaves open where a row stands


class Chances(msgspec.Struct):
    """How often drafts were right, by their place behind the newest token, older results fading.

    A draft can only be right if all before it are; the chance of that is the product of these shares.
    """

    offered: list[float] = []  # rows whose drafts before this one were right, and that had it
    right: list[float] = []  # of these, rows of which it was right too

    def observe(self, drafts: Int32s, right: Int32s) -> None:
        """Take in a result: of each row how many drafts it had, and how many were right. int32 [rows] both."""
        most = max(int(drafts.max(initial=0)), len(self.offered))
        self.offered += [0.0] * (most - len(self.offered))
        self.right += [0.0] * (most - len(self.right))
        for j in range(most):
            had = (drafts > j) & (right >= j)
            self.offered[j] = self.offered[j] * FADE + int(np.count_nonzero(had))
            self.right[j] = self.right[j] * FADE + int(np.count_nonzero(had & (right > j)))

    def worth_drafting(self, config: SchedConfig, rows: int) -> int:
        """Drafts of each of so many rows: while one is at least as likely to count as was asked for, and one at least,
        or a recovery would go unnoticed. Places that were never tried count as the one before.
        """
        limit, least = config.speculative_max_batch_size, config.speculative_min_chance
        if limit is not UNSET and rows > limit:
            return 0
        if least is UNSET:
            return config.drafts_max
        chance = share = 1.0
        for j in range(config.drafts_max):
            if j < len(self.offered) and self.offered[j] >= OFFERED_MIN:
                share = self.right[j] / self.offered[j]
            chance *= share
            if chance < least:
                return max(j, 1)
        return config.drafts_max


class Verifying(NamedTuple):
    """Newest tokens and drafts to verify, of each member of a cohort. int32 [members], but `after`."""

    running_batch: RunningBatch
    starts: Int32s  # the least
    stops: Int32s  # the most
    drafts: Int32s
    after: Int64s  # the batch in flight that says where the row stands; EXACT: that is known
    deltas: PageDeltas
    forced: Int32s = NO_ROWS  # of the drafts, those that are given; empty where none is
    forced_tokens: Int32s = NO_ROWS  # end to end


class Speculator:
    """Which drafts and forced tokens the next decode of a running batch verifies, and what their results change."""

    def __init__(self, scheduler: SchedulerView, jump_forward: JumpForward) -> None:
        self._scheduler = scheduler
        self.jump_forward = jump_forward
        self.chances = Chances()

    def verify_next(self, running: RunningState, step: Step) -> Verifying | None:
        """Move the members that can go on by a token and the drafts that have room, opening pages. None if none can.

        The pages of one token of each are there.
        """
        running_batch, positions, page_size = (
            running.batch,
            running.positions,
            np.int32(self._scheduler.config.page_size),
        )
        going = (positions + ONE < running_batch.limits).nonzero()[0]
        if not going.size:
            return None
        members, most = running_batch, positions
        if going.size < running_batch.size:
            members, most = running_batch.only(going), positions.take(going)
        drafts = _draftable(members, most, self.chances.worth_drafting(self._scheduler.config, members.size))
        forced = NO_ROWS
        if self.jump_forward.forced:
            forced = self.jump_forward.counts_of(members, most)
            drafts += forced  # a row with forced tokens is under a grammar, and drafts nothing
        table = self._scheduler.memory.table
        keeps = self._scheduler.config.keeps_draft_pages
        held = -(-most // page_size)
        if keeps:
            held += table.spare[members.rows]
        available = self._pages_to_open()
        while (opening := self._opening(most + ONE + drafts, held)).sum() > available and drafts.any():
            drafts = drafts // np.int32(2)
            forced = forced // np.int32(2)
        stops: Int32s = most + ONE + drafts
        if keeps:
            table.spare[members.rows] = held + opening - -(-stops // page_size)
        table.reserve(int((held + opening).max()), int((stops - members.prompts).max()) + 2)
        deltas = NO_DELTAS
        if opening.any():
            deltas = self._scheduler.memory.open_pages(
                members.rows.repeat(opening), held.repeat(opening) + step_numbers(opening), step
            )
        slack, after = uncertainty(self._scheduler.in_flight, members.rows, len(table.holders))
        if members is running_batch:
            running.move_to(stops)
        else:
            moved = positions.copy()
            moved[going] = stops
            running.move_to(moved)
        if not forced.any():
            return Verifying(members, most - slack, stops, drafts, after, deltas)
        tokens = self.jump_forward.tokens_of(members, most, forced)
        return Verifying(members, most - slack, stops, drafts, after, deltas, forced, tokens)

    def _opening(self, stops: Int32s, held: Int32s) -> Int32s:
        """Pages that rows open to reach `stops`, beside those that they hold. int32 [rows] all three."""
        opening: Int32s = -(-stops // np.int32(self._scheduler.config.page_size)) - held
        return np.maximum(opening, ZERO) if self._scheduler.config.keeps_draft_pages else opening

    def jump_next(self, running: RunningState, step: Step) -> tuple[Verifying, list[int]] | None:
        """Move the running batch of an engine without drafts on, some members by several tokens.

        The pages of one token of each are there. Returns: also the members that end by length with it; None if no
        member has forced tokens to come.
        """
        running_batch, starts, page_size = running.batch, running.positions, np.int32(self._scheduler.config.page_size)
        counts = self.jump_forward.counts_of(running_batch, starts)
        held, available = -(-starts // page_size), self._pages_to_open()
        while (opening := -(-(starts + ONE + counts) // page_size) - held).sum() > available and counts.any():
            counts = counts // np.int32(2)
        if not counts.any():
            return None
        tokens = self.jump_forward.tokens_of(running_batch, starts, counts)
        stops: Int32s = starts + ONE + counts
        self._scheduler.memory.table.reserve(
            int((held + opening).max()), int((stops - running_batch.prompts).max()) + 2
        )
        deltas = NO_DELTAS
        if opening.any():
            deltas = self._scheduler.memory.open_pages(
                running_batch.rows.repeat(opening), held.repeat(opening) + step_numbers(opening), step
            )
        known = np.full(running_batch.size, EXACT, np.int64)
        verifying = Verifying(running_batch, starts, stops, counts, known, deltas, counts, tokens)
        return verifying, running.remove_ending(running_batch, stops, self._scheduler.memory.table)

    def _pages_to_open(self) -> int:
        """Pages that can be had for the newest tokens and what is computed beside them, in all pools."""
        memory, microbatches, config = self._scheduler.memory, self._scheduler.microbatches, self._scheduler.config
        available = memory.available_pages
        available = memory.hybrid.pages_for_drafts(available)
        return available - microbatches.pages_of_others(
            config.page_size, max(config.decode_look_ahead, config.decode_steps_per_launch)
        )

    def settle(self, running: RunningState, batch: InFlight, accepted: Int32s) -> None:
        """A verifying batch is delivered: where its rows stand is known, here and in every batch behind it.

        int32 [samplers], as `accepted_of` has it. Pages beyond reach go back.
        """
        assert batch.steps is not None
        wrong, drafts, batch.steps = batch.steps - accepted, batch.steps - batch.least, accepted
        if self._scheduler.config.speculative_min_chance is not UNSET:
            self.chances.observe(drafts, accepted - batch.least)
        if not wrong.any():
            return
        table, page_size = self._scheduler.memory.table, np.int32(self._scheduler.config.page_size)
        by_row = np.zeros(len(table.holders), np.int32)
        by_row[batch.samplers.rows] = wrong
        for behind in self._scheduler.in_flight:
            if behind.verifies:
                behind.sampled_at = behind.sampled_at - by_row[behind.samplers.rows]
        before = running.positions
        running.move_to(before - by_row[running.batch.rows])
        held = -(-running.positions // page_size)
        back: NDArray[np.int32] = -(-before // page_size) - held
        if not back.any():
            return
        if self._scheduler.config.keeps_draft_pages:
            table.spare[running.batch.rows] += back
        else:
            index = held.repeat(back) + step_numbers(back)
            self._scheduler.memory.pool.free(table.pages[running.batch.rows.repeat(back), index])

    def known_tokens(self, request: Request, outputs: int) -> int | None:
        """Positions of a request whose KV is that of its tokens, `outputs` of them output; None: all that is computed.

        What batches in flight verify may turn out wrong, and what lies behind its end never was.
        """
        if request.state is not RequestState.RUNNING:
            return None
        unsure = sum(batch.tokens_of(request.row) for batch in self._scheduler.in_flight if batch.verifies)
        return min(self._scheduler.computed_of(request) - unsure, request.prompt_tokens + outputs)


def _draftable(members: RunningBatch, most: Int32s, wanted: int) -> Int32s:
    """Drafts of each: all that are wanted, as long as none lies past its end; none where the host looks at every token.

    int32 [members], the most each can have reached, and the result.
    """
    drafts: Int32s = np.minimum(np.int32(wanted), members.limits - np.int32(2) - most)
    if members.constrained or members.watched:
        drafts[members.special & (HAS_GRAMMAR | WATCHES_TEXT) != ZERO] = 0
    return drafts


def uncertainty(in_flight: Iterable[InFlight], rows: Int32s, table_rows: int) -> tuple[Int32s, Int64s]:
    """How far short of the most each of these rows can be, and which batch is the last to say. [rows] both."""
    slack, after = np.zeros(table_rows, np.int32), np.full(table_rows, EXACT, np.int64)
    for batch in in_flight:
        if batch.verifies:
            assert batch.steps is not None
            sampling = batch.samplers.rows
            open_steps = batch.steps - batch.least
            slack[sampling] += open_steps
            after[sampling[open_steps > ZERO]] = batch.plan.batch_id
    return slack[rows], after[rows]


def starts_after(verifying: Verifying, first: int) -> tuple[AfterBatch, ...]:
    """Which rows of a plan start where a batch in flight leaves them. `first`: their place among the plan's rows."""
    unknown = np.flatnonzero(verifying.after != EXACT).tolist()
    after, rows = verifying.after.tolist(), verifying.running_batch.rows.tolist()
    return tuple(AfterBatch(first + i, after[i], rows[i]) for i in unknown)


def verified(plan: BatchPlan, verifying: Verifying, config: SchedConfig) -> BatchPlan:
    """The plan, its rows behind those that extend verifying drafts."""
    method = config.speculative_method if config.speculative_method is not UNSET else "forced"
    assert method != "none"
    return replace(
        plan,
        mode=plan.mode if plan.extend_rows else "verify",
        starts_after=starts_after(verifying, plan.extend_rows),
        speculation=Speculation(
            config.beside_newest_max if verifying.forced.size else config.drafts_max,
            verifying.drafts,
            method,
            verifying.forced,
            verifying.forced_tokens,
        ),
    )


# --------------------------------------------------------------------------------------------------------- the results


def accepted_of(event: BatchFinished, batch: InFlight) -> Int32s:
    """How many tokens each sampler of a verifying batch got. int32 [samplers].

    Raises ContractError for counts that cannot be.
    """
    assert batch.steps is not None
    if not event.accepted:
        return batch.least  # none of the drafts was right
    if len(event.accepted) != 4 * batch.samplers.size:
        raise ContractError(
            f"batch {event.batch_id} has {len(event.accepted)} bytes of accepted counts, expected "
            f"{4 * batch.samplers.size}"
        )
    accepted = np.frombuffer(event.accepted, np.int32)
    wrong = ((accepted < batch.least) | (accepted > batch.steps)).nonzero()[0]
    if wrong.size:
        i = int(wrong[0])
        raise ContractError(
            f"batch {event.batch_id} reports {accepted[i]} tokens of sampling row {i}, which samples "
            f"{batch.least[i]} to {batch.steps[i]}"
        )
    return accepted


def tokens_of_result(event: BatchFinished, batch: InFlight) -> int:
    """How many tokens the result of a verifying batch must have. Raises ContractError as `accepted_of` does."""
    return int(accepted_of(event, batch).sum())


def stops_of(batch: InFlight) -> Int32s:
    """Where the rows of a verifying batch in flight stop, at most, as far as results say by now. int32 [rows]"""
    assert batch.steps is not None
    stops = batch.plan.stops.copy()
    stops[batch.plan.sample_rows] = batch.sampled_at + batch.steps - ONE
    return stops
