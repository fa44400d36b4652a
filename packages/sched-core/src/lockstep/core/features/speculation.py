"""Speculative decoding: every decode verifies drafts, so that one forward samples several tokens of a request.

A drafter (n-grams of the text, a small model, layers trained for it) guesses the next tokens on the device. The model
computes the newest token and its d drafts in one pass. The token that it samples behind each of them shows whether the
next draft was right. If the first a drafts were right, a + 1 tokens are new. The position of the row is therefore known
only with the result.

    delivered       base      least             most      limit - 1
    | ..known KV..   | in flight: 1 to d + 1 each |  next: 1 to d + 1  | the last token is never fed back

`RunningState.positions` is an upper bound of the position of a row with all batches in flight, and its pages reach as
far. A launch starts at `base` plus the accepted tokens of the batches in flight (`starts_after`), so its plan contains
a lower and an upper bound. A result moves the row back by its wrong drafts, also in every batch behind. Pages that the
row can no longer reach are freed at once, since no batch in flight can write them any more. Where tables cannot shrink
(`tables_append_only`) the row keeps them as spare pages, for its next positions.

A row that may have reached its length with the batches in flight is not launched until their results are known. So no
row runs past its end. Drafts are optional: no request is retracted, and no session yields, to make room for them. If
pages are short, fewer drafts are verified, down to none; the next decodes of other microbatches take precedence. Rows
with a grammar or stop texts have no drafts, since the host must check each token before the next is drawn. Tokens that
a grammar forces are verified like drafts (jump_forward.py).

With `speculative_min_chance` the number of drafts follows from the results so far (`Chances`). A draft counts only if
all drafts before it are right, so beyond some length hardly any does.

With `speculative_topk` drafts are trees (draft_trees.py): some drafts are alternatives of each other. Of `d` drafts
then fewer than `d` can be right, as many as the longest path has. The bounds of a row follow from the path, its pages
from `d`: the pages behind its upper bound stay with the row as spare pages, for its next tree.

    base      upper bound        base + d + 1
    | newest   path at most |     further branches |      the right path moves to its positions when it is known

The KV of the drafter, if it has any, is in the same pages at the same positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.core.contract.checks import fail
from lockstep.core.contract.commands import NO_DELTAS, NO_ROWS, AfterBatch, BatchPlan, PageDeltas, Speculation, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished
from lockstep.core.features.draft_trees import DraftTree, TreeChances
from lockstep.core.features.jump_forward import JumpForward
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.delivery import accepted_counts, right_drafts, step_numbers
from lockstep.core.requests.rules import pages_between
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

FADE = 0.98  # weight of a result relative to the next one
OFFERED_MIN = 4.0  # faded rows from which on the share of a draft index is used
NO_ROOT = np.zeros(1, np.int32)
EXACT = -1  # no batch in flight leaves the position of a row open


class Chances(msgspec.Struct):
    """Shares of right drafts by index behind the newest token. Older results fade.

    A draft counts only if all drafts before it are right. Its chance is the product of the shares up to it.
    """

    offered: list[float] = []  # by draft index: faded rows that had this draft and all drafts before it right
    right: list[float] = []  # by draft index: the rows among these with this draft right

    def observe(self, drafts: Int32s, right: Int32s) -> None:
        """Take in a result: the number of drafts of each row, and the number of right ones. int32 [rows] both."""
        most = max(int(drafts.max(initial=0)), len(self.offered))
        self.offered += [0.0] * (most - len(self.offered))
        self.right += [0.0] * (most - len(self.right))
        for j in range(most):
            had = (drafts > j) & (right >= j)
            self.offered[j] = self.offered[j] * FADE + int(np.count_nonzero(had))
            self.right[j] = self.right[j] * FADE + int(np.count_nonzero(had & (right > j)))

    # mechanism: fewer-drafts (decided)
    def worth_drafting(self, config: SchedConfig, rows: int) -> int:
        """Return how many drafts each of `rows` rows should have.

        Drafts are added while their chance is at least `speculative_min_chance`. One is always tried, since otherwise
        an improvement would not be noticed. An index with too few results has the share of the index before it.
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
    """Newest tokens and drafts to verify, per member of a running batch. int32 [members] unless noted."""

    running_batch: RunningBatch
    starts: Int32s  # lower bounds
    stops: Int32s  # upper bounds
    drafts: Int32s  # number of drafts, forced tokens included
    after: Int64s  # int64: the batch in flight with a result that decides the position; EXACT: it is known
    deltas: PageDeltas
    forced: Int32s = NO_ROWS  # how many of the drafts are forced tokens; empty: none of any member
    forced_tokens: Int32s = NO_ROWS  # [sum of forced], end to end
    parents: Int32s = NO_ROWS  # of the drafts of a tree; empty: chains


class SpeculationPart(Struct):
    """Chances of drafts in a snapshot, where any were verified."""

    chances: Chances | UnsetType = UNSET
    tree_chances: TreeChances | UnsetType = UNSET


class Speculator(Component):
    """Chooses the drafts and forced tokens that the next decode verifies, and applies the results."""

    PART = SpeculationPart

    def __init__(self, scheduler: SchedulerView, jump_forward: JumpForward) -> None:
        self._scheduler = scheduler
        self.jump_forward = jump_forward
        self.chances = Chances()
        self.tree = DraftTree(scheduler.config) if scheduler.config.drafts_trees else None

    def part(self) -> SpeculationPart:
        """Return the state for a snapshot."""
        return SpeculationPart(
            self.chances if self.chances.offered else UNSET,
            self.tree.chances if self.tree is not None and self.tree.chances.offered else UNSET,
        )

    def load(self, part: SpeculationPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        if part.chances is not UNSET:
            self.chances = part.chances
        if part.tree_chances is not UNSET:
            assert self.tree is not None
            self.tree.resume(part.tree_chances)

    def check_state(self, facts: Facts) -> None:
        """S7, S23: a row that may be at its end waits for a result; rows with grammars or stop texts have no drafts."""
        if not (facts.config.speculates or facts.config.jumps):
            return
        running_batch, positions = self._scheduler.all_running
        slack, _ = uncertainty(facts.in_flight, running_batch.rows, len(self._scheduler.memory.table.holders))
        for request, most, wrong in zip(running_batch.requests, positions.tolist(), slack.tolist(), strict=True):
            awaited = not facts.config.speculates or any(batch.names(request.row) for batch in facts.in_flight)
            if most + 1 >= request.limit and not awaited:
                fail(f"S7: {request.name} may be at its end {most}, limit {request.limit}, and still decodes")
            if most - wrong < request.prompt_tokens:
                fail(f"S7: {request.name} may be at {most - wrong}, within its prompt of {request.prompt_tokens}")
        for batch in facts.in_flight:
            if batch.verifies:
                assert batch.steps is not None
                drafts = (batch.steps - batch.least).tolist()
                for request, row, tokens in zip(
                    batch.samplers.requests, batch.samplers.rows.tolist(), drafts, strict=True
                ):
                    if tokens and request.row == row and (request.grammar is not None or request.watches_text):
                        fail(
                            f"S23: batch {batch.plan.batch_id} verifies drafts of {request.name}, which must have none"
                        )

    def verify_next(self, running: RunningState, step: Step) -> Verifying | None:
        """Move members on by one token and the drafts for which there is room, and open their pages.

        The pages for one token of each member are available. Members that may have reached their limit stay.

        Returns: what to verify; None if no member can go on.
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
        tree = self.tree
        if tree is None:
            drafts = _draftable(members, most, self.chances.worth_drafting(self._scheduler.config, members.size))
        else:
            drafts = _draftable(members, most, self._scheduler.config.path_max)
            drafts = tree.lengths(drafts, self._scheduler.config.context_tokens_max - ONE - most, members.size)
        forced = NO_ROWS
        if self.jump_forward.forced:
            forced = self.jump_forward.counts_of(members, most)
            drafts += forced  # a row with forced tokens has a grammar, and so no drafts
        table = self._scheduler.memory.table
        keeps = self._scheduler.config.keeps_draft_pages
        held = -(-most // page_size)
        if keeps:
            held += table.spare[members.rows]
        available = self._pages_to_open()
        while (opening := self._opening(most + ONE + drafts, held)).sum() > available and drafts.any():
            drafts = drafts // np.int32(2)
            forced = forced // np.int32(2)
        stops: Int32s = most + ONE + (drafts if tree is None else tree.path_lengths(drafts))
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
            verifying = Verifying(members, most - slack, stops, drafts, after, deltas)
            return verifying if tree is None else verifying._replace(parents=tree.parents)
        tokens = self.jump_forward.tokens_of(members, most, forced)
        return Verifying(members, most - slack, stops, drafts, after, deltas, forced, tokens)

    def _opening(self, stops: Int32s, held: Int32s) -> Int32s:
        """Return the pages that rows open to reach `stops`, beside those that they hold. int32 [rows] all three."""
        opening: Int32s = -(-stops // np.int32(self._scheduler.config.page_size)) - held
        return np.maximum(opening, ZERO) if self._scheduler.config.keeps_draft_pages else opening

    def jump_next(self, running: RunningState, step: Step) -> tuple[Verifying, list[int]] | None:
        """Move the running batch of an engine without drafts on, members with forced tokens by several positions.

        The pages for one token of each member are available.

        Returns: what to verify, and the members that end by length with it; None if no member has forced tokens.
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
        """Return the pages available in all pools for newest tokens and drafts, less those of other microbatches."""
        memory, microbatches, config = self._scheduler.memory, self._scheduler.microbatches, self._scheduler.config
        available = memory.available_pages
        available = memory.hybrid.pages_for_drafts(available)
        return available - microbatches.pages_of_others(
            config.page_size, max(config.decode_look_ahead, config.decode_steps_per_launch)
        )

    def settle(self, running: RunningState, batch: InFlight, event: BatchFinished) -> None:
        """Move the rows of a delivered verifying batch back by their wrong drafts, here and in every batch behind it.

        Pages that the rows can no longer reach are freed, or kept as spare pages where tables cannot shrink.

        Args:
            event: the batch's result, which `tokens_of_result` has checked.
        """
        assert batch.steps is not None
        accepted = accepted_of(event, batch)
        wrong, drafts, batch.steps = batch.steps - accepted, batch.steps - batch.least, accepted
        if self.tree is not None:
            self.tree.observe(batch, accepted, right_drafts(event, batch.samplers.size))
        elif self._scheduler.config.speculative_min_chance is not UNSET:
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

    def give_back_spare_pages(self, ahead: int) -> None:
        """Free the pages behind each row that held branches of trees, except those for its next `ahead` positions.

        The pages of a row in flight come back with the newest batch that names it, whose tree may be written there.
        Tables that cannot shrink keep them.
        """
        memory, config = self._scheduler.memory, self._scheduler.config
        table, page_size = memory.table, config.page_size
        if config.keeps_duplicates or not table.spare.any():
            return
        members, positions = self._scheduler.all_running
        spare = table.spare[members.rows]
        reach = np.minimum(positions + np.int32(ahead), members.limits - ONE)
        surplus = np.maximum(spare - pages_between(positions, reach, page_size), ZERO)
        for index in surplus.nonzero()[0].tolist():
            row, count = int(members.rows[index]), int(surplus[index])
            held = table.held_pages(row, int(positions[index]))
            pages = table.pages[row, held - count : held].copy()
            table.spare[row] -= count
            named = [batch.plan.batch_id for batch in self._scheduler.in_flight if batch.names(row)]
            if named:
                memory.deferred.pages.append((named[-1], pages))
            else:
                memory.pool.free(pages)

    def known_tokens(self, request: Request, outputs: int) -> int | None:
        """Return how many positions of a request have KV of its final tokens; None: all computed positions.

        Drafts in flight may be wrong, and positions behind the end of the request do not count.

        Args:
            outputs: output tokens of the request.
        """
        if request.state is not RequestState.RUNNING:
            return None
        unsure = sum(batch.tokens_of(request.row) for batch in self._scheduler.in_flight if batch.verifies)
        return min(self._scheduler.computed_of(request) - unsure, request.prompt_tokens + outputs)


# mechanism: drafts (decided)
def _draftable(members: RunningBatch, most: Int32s, drafts_max: int) -> Int32s:
    """Return the number of drafts of each member: `drafts_max`, but none past its end.

    Members with a grammar or stop texts have no drafts, since the host checks their tokens one by one.

    Args:
        most: int32 [members], upper bounds of their positions.
    Returns: int32 [members].
    """
    drafts: Int32s = np.minimum(np.int32(drafts_max), members.limits - np.int32(2) - most)
    if members.constrained or members.watched:
        drafts[members.special & (HAS_GRAMMAR | WATCHES_TEXT) != ZERO] = 0
    return drafts


def uncertainty(in_flight: Iterable[InFlight], rows: Int32s, table_rows: int) -> tuple[Int32s, Int64s]:
    """Return how far each row may be below its upper bound, and the last batch with a result that decides it.

    Args:
        rows: int32 [n].
        table_rows: rows of the request table.
    Returns: int32 [n]; int64 [n], EXACT for a row with a known position.
    """
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
    """Return the rows of a plan that start where a batch in flight leaves them.

    Args:
        first: index of the first verifying row in the plan.
    """
    unknown = np.flatnonzero(verifying.after != EXACT).tolist()
    after, rows = verifying.after.tolist(), verifying.running_batch.rows.tolist()
    return tuple(AfterBatch(first + i, after[i], rows[i]) for i in unknown)


def verified(plan: BatchPlan, verifying: Verifying, config: SchedConfig) -> BatchPlan:
    """Return the plan with verification for its rows behind the extend rows."""
    method = config.speculative_method if config.speculative_method is not UNSET else "forced"
    assert method != "none"
    return replace(
        plan,
        mode=plan.mode if plan.extend_rows else "verify",
        starts_after=starts_after(verifying, plan.extend_rows),
        speculation=Speculation(
            verifying.parents.size or (config.beside_newest_max if verifying.forced.size else config.drafts_max),
            verifying.drafts,
            method,
            verifying.forced,
            verifying.forced_tokens,
            verifying.parents,
        ),
    )


# --------------------------------------------------------------------------------------------------------- the results


def accepted_of(event: BatchFinished, batch: InFlight) -> Int32s:
    """Return how many tokens each sampler of a verifying batch got. int32 [samplers]

    Raises: ContractError for counts outside the bounds of the batch.
    """
    assert batch.steps is not None
    if not event.accepted:
        return batch.least  # no draft was right
    size = batch.samplers.size
    tree = batch.plan.speculation is not None and batch.plan.speculation.parents.size > 0
    if len(event.accepted) < 4 * size or (len(event.accepted) > 4 * size and not tree):
        raise ContractError(
            f"batch {event.batch_id} has {len(event.accepted)} bytes of accepted counts, expected {4 * size}"
        )
    accepted = accepted_counts(event, size)
    assert accepted is not None
    wrong = ((accepted < batch.least) | (accepted > batch.steps)).nonzero()[0]
    if wrong.size:
        i = int(wrong[0])
        raise ContractError(
            f"batch {event.batch_id} reports {accepted[i]} tokens of sampling row {i}, which samples "
            f"{batch.least[i]} to {batch.steps[i]}"
        )
    return accepted


def tokens_of_result(event: BatchFinished, batch: InFlight) -> int:
    """Return how many tokens the result of a verifying batch must have.

    Raises: ContractError like `accepted_of`, and for right drafts that are no path of the plan's tree.
    """
    accepted = accepted_of(event, batch)
    speculation = batch.plan.speculation
    if speculation is not None and speculation.parents.size and not event.error:
        _check_paths(event, batch, speculation, accepted)
    return int(accepted.sum())


def _check_paths(event: BatchFinished, batch: InFlight, speculation: Speculation, accepted: Int32s) -> None:
    """Raise ContractError unless the right drafts of each sampler are drafts of its own, one behind the other."""
    right, counts = right_drafts(event, batch.samplers.size), accepted - ONE
    if len(right) != int(counts.sum()) or len(event.accepted) % 4:
        raise ContractError(
            f"batch {event.batch_id} names {len(right)} right drafts of its tree, expected {int(counts.sum())}"
        )
    if not len(right):
        return
    verified = np.zeros(batch.samplers.size, np.int32)
    verified[batch.plan.sample_rows >= batch.plan.extend_rows] = speculation.draft_lengths
    before = np.where(step_numbers(counts) > 0, np.concatenate((NO_ROOT, right[:-1])), 0)
    known = (right >= 1) & (right <= verified.repeat(counts))
    wrong = np.flatnonzero(~known | (speculation.parents[np.where(known, right, 1) - 1] != before))
    if wrong.size:
        i = int(wrong[0])
        sampler = int(np.searchsorted(counts.cumsum(), i, side="right"))
        raise ContractError(
            f"batch {event.batch_id} says that draft {right[i]} of sampling row {sampler} is right behind draft "
            f"{before[i]}: the plan's tree has no such path"
        )


def stops_of(batch: InFlight) -> Int32s:
    """Return upper bounds of the stops of a verifying batch in flight, given the results so far. int32 [rows]"""
    assert batch.steps is not None
    stops = batch.plan.stops.copy()
    stops[batch.plan.sample_rows] = batch.sampled_at + batch.steps - ONE
    return stops
