"""Which requests decode next, with how many tokens, and which are retracted when that does not fit.

A decode advances every member of a running batch by one token; by several with `decode_steps_per_launch`, with drafts
and with tokens that grammars force. This module opens the pages of decodes. If pages are lacking, rows give back pages
of draft trees first, and sessions yield KV. Then the planner waits for pages that work in flight frees. Then requests
are retracted, one after another, until the next decode fits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from lockstep.core.contract.commands import NO_DELTAS, NO_ROWS, BatchPlan, PageDeltas, Step
from lockstep.core.contract.events import DecodeSkipped
from lockstep.core.features import diffusion, speculation
from lockstep.core.requests import rules
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.delivery import step_numbers
from lockstep.core.requests.retraction import choose_victim, goes_before, members_growing, pages_ahead
from lockstep.core.requests.rules import BATCHINGS
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import EMPTY_BATCH, ONE, Int32s, Request, RunningBatch
from lockstep.core.scheduler.state import SchedulerState


class Decodes(Struct, frozen=True):
    """The next decode of the members of a running batch, of one token each or of several."""

    running_batch: RunningBatch
    starts: Int32s
    stops: Int32s
    deltas: PageDeltas
    ending: list[int]  # members that end by length with this decode
    verifying: speculation.Verifying | None = None  # drafts and forced tokens to verify
    blocks: diffusion.NextBlocks | None = None  # the next pass over blocks


NO_DECODES = Decodes(EMPTY_BATCH, NO_ROWS, NO_ROWS, NO_DELTAS, [])


class DecodePlanner:
    """Plans the decodes of one engine."""

    def __init__(self, state: SchedulerState, diffuser: diffusion.Diffuser) -> None:
        self._state = state
        self._memory = state.memory
        self._microbatches = state.microbatches
        self._speculation = state.speculation
        self._jump_forward = state.jump_forward
        self._sessions = state.sessions
        self._transfers = state.transfers
        self._multiplexer = state.multiplexer
        self.page_shift, self.page_mask = state.page_shift, state.page_mask
        self._speculates = state.config.speculates
        self._diffusion, self._in_blocks = diffuser, state.config.block_tokens > 0

    def decodes_along(self, running: RunningState, extending: list[Request], step: Step) -> Decodes:
        """Plan the next decode of a running batch as part of an extend; NO_DECODES if it cannot be, or a page lacks.

        Rows that are left out decode in the next launch, so that a stream of prompts does not delay decodes.
        """
        if not running.batch.size:
            return NO_DECODES
        if any(request.needs_plain_extend for request in extending):
            running.decode_owed = True
            return NO_DECODES
        growing = members_growing(running.positions, self.page_mask)
        if self._short_of_pages(running, growing, step):
            running.decode_owed = True
            skipped = DecodeSkipped(self._state.now_us, self.pages_lacking(running), self._memory.returning_pages())
            step.decided.append(skipped)
            return NO_DECODES
        advanced = self._advance(running, growing, step)
        running.decode_launches += bool(advanced.running_batch.size)
        return advanced

    def plan(
        self, running: RunningState, step: Step, instead: Callable[[RunningState, Step], InFlight | None]
    ) -> InFlight | None:
        """Plan the next decode of a running batch, after the retractions that it needs. None: there is nothing to run.

        `instead`: plans an extend if the last member had to end.
        """
        if not running.batch.size:
            running.decode_owed = False
            return None
        state, memory = self._state, self._memory
        config = state.config
        if config.retract_every and self._forced_retraction_due(running) and running.batch.size > 1:
            running.forced_at = running.decode_launches
            victim = choose_victim(config, running.batch, running.positions)
            state.retract(running.batch.requests[victim], "forced", step)
        # In line, since every decode comes here.
        growing = self._growing(running) if self._in_blocks else members_growing(running.positions, self.page_mask)
        made_room = self._short_of_pages(running, growing, step)
        if made_room:
            if not self._make_room(running, step):
                return None if running.batch.size else instead(running, step)
            if not running.batch.size:
                return None  # all were retracted for other microbatches
            growing = self._growing(running)

        steps = config.decode_steps_per_launch
        if steps == 1:
            advanced = self._advance(running, growing, step)
        else:
            advanced = self._advance_by(running, steps, step)
        running_batch = advanced.running_batch
        if not running_batch.size:
            return None  # all may end with batches in flight
        running.decode_owed = False
        running.decode_launches += 1
        if not made_room:
            state.ratio.decoded()
        on_streams = self._multiplexer.present
        taken, deltas = memory.changes(advanced.deltas, running_batch.rows.tolist() if on_streams else None)
        plan = BatchPlan(
            batch_id=state.next_number(),
            mode="decode",
            rows=running_batch.rows,
            request_ids=running_batch.request_ids,
            starts=advanced.starts,
            stops=advanced.stops,
            sample_rows=running_batch.everyone,
            rows_taken=taken,
            deltas=deltas,
            generation=state.generation,
            steps=steps,
            ids_digest=running_batch.ids_digest,
        )
        if on_streams:
            force_setattr(
                plan, "sms", self._multiplexer.sms_of_decodes(running_batch.size)
            )  # it has not left the engine
        if advanced.verifying is not None:
            plan = speculation.verified(plan, advanced.verifying, config)
        elif advanced.blocks is not None:
            plan = diffusion.in_blocks(plan, advanced.blocks)
        if memory.hybrid.present:
            plan = memory.hybrid.completed(plan, step)
        return InFlight(plan, running_batch.requests, running_batch, advanced.ending)

    def _advance(self, running: RunningState, growing: NDArray[np.intp], step: Step) -> Decodes:
        """Advance the running batch by one position, or by drafts and forced tokens, opening a page for `growing`."""
        if self._speculates:
            verifying = self._speculation.verify_next(running, step)
            if verifying is None:
                return NO_DECODES
            return Decodes(verifying.running_batch, verifying.starts, verifying.stops, verifying.deltas, [], verifying)
        if self._in_blocks:
            blocks = self._diffusion.next_pass(running, step)
            return Decodes(running.batch, blocks.starts, blocks.stops, blocks.deltas, [], blocks=blocks)
        if self._jump_forward.forced and (jumped := self._speculation.jump_next(running, step)) is not None:
            verifying, ending = jumped
            return Decodes(
                verifying.running_batch, verifying.starts, verifying.stops, verifying.deltas, ending, verifying
            )
        batch, starts = running.batch, running.positions
        deltas = NO_DELTAS
        if growing.size:
            rows, at = batch.rows.take(growing), starts.take(growing)
            deltas = self._memory.open_pages(rows, at >> self.page_shift, step)
        stops = starts + ONE
        return Decodes(batch, starts, stops, deltas, running.advance(stops, self._memory.table))

    def begin_blocks(self, running: RunningState, requests: list[Request]) -> None:
        """Add requests with a completely launched prompt to a running batch that computes blocks."""
        self._diffusion.begin(running, RunningBatch.of(requests))

    def _growing(self, running: RunningState) -> NDArray[np.intp]:
        """Return the members whose next decode opens a page."""
        if self._in_blocks:
            return self._diffusion.members_opening(running.batch, running.positions)
        return members_growing(running.positions, self.page_mask)

    def _advance_by(self, running: RunningState, steps: int, step: Step) -> Decodes:
        """Advance every member by `steps` positions at once, or up to its length, opening the pages."""
        running_batch, starts, page_size = running.batch, running.positions, np.int32(self._state.config.page_size)
        stops: Int32s = np.minimum(starts + np.int32(steps), running_batch.limits - ONE)
        first = -(-starts // page_size)
        opening = -(-stops // page_size) - first
        self._memory.table.reserve(int((first + opening).max()), int((stops - running_batch.prompts).max()) + 2)
        deltas = NO_DELTAS
        if opening.any():
            index = first.repeat(opening) + step_numbers(opening)
            deltas = self._memory.open_pages(running_batch.rows.repeat(opening), index, step)
        ending = running.remove_ending(running_batch, stops, self._memory.table)
        return Decodes(running_batch, starts, stops, deltas, ending)

    def _short_of_pages(self, running: RunningState, growing: NDArray[np.intp], step: Step) -> bool:
        """Whether the next `decode_look_ahead` decodes do not fit, even after sessions have yielded KV."""
        memory = self._memory
        if memory.hybrid.present and memory.hybrid.short_for_decode(self._state):
            return True
        needed = growing.size if self._state.look_ahead_with_drafts == 1 else self._pages_needed(running)
        if needed <= memory.pool.free_count:
            return False
        lacking = needed - memory.available_pages
        if lacking > 0 and self._speculation.tree is not None:
            self._speculation.give_back_spare_pages(self._state.ahead)
            self._state.retry_admission()
            lacking = needed - memory.available_pages
        return lacking > 0 and self._sessions.make_room(memory, lacking, step) < lacking

    def pages_lacking(self, running: RunningState) -> int:
        """Return the pages that the next decode needs beyond the available ones; zero or less: it fits."""
        lacking = self._pages_needed(running) - self._memory.available_pages
        return (
            lacking if not self._memory.hybrid.present else max(lacking, self._memory.hybrid.decode_lacks(self._state))
        )

    def _pages_needed(self, running: RunningState) -> int:
        """Return the pages that the next decode needs."""
        if self._state.look_ahead_with_drafts == 1:
            return self._state.next_pages(running.batch, running.positions)
        spare = self._memory.table.spare_of(running.batch.rows)
        return pages_ahead(running.batch, running.positions, self._state.config.page_size, self._state.ahead, spare)

    def _forced_retraction_due(self, running: RunningState) -> bool:
        """Whether a test setting forces a retraction: once before every `retract_every`-th decode launch."""
        due = (running.decode_launches + 1) % self._state.config.retract_every == 0
        return due and running.forced_at != running.decode_launches

    def _make_room(self, running: RunningState, step: Step) -> bool:
        """Retract until the next decode fits. Returns False if it has to wait for pages that work in flight frees."""
        config = self._state.config
        retracted = False
        while True:
            needed = self._pages_needed(running)
            available, returning = self._memory.available_pages, self._memory.returning_pages()
            if self._memory.hybrid.present and needed <= available:
                needed, available, returning = self._memory.hybrid.decode_needs(self._state)
            if needed <= available:
                break
            if needed <= available + returning:
                running.decode_owed = True
                step.decided.append(DecodeSkipped(self._state.now_us, needed - available, returning))
                break
            split = self._state.prefilling
            running_batch, positions = self._state.all_running
            if running_batch.size > 1 and not (split is not None and goes_before(split, running_batch, config)):
                victim = self._microbatches.victim(config)
                self._state.retract(victim, "pages", step, pages=(needed, available))
            elif split is not None:
                self._state.retract(split, "pages", step, pages=(needed, available))
            elif self._multiplexer.parts:
                state = self._state
                state.retract(self._multiplexer.parts[-1].request, "pages", step, pages=(needed, available))
            elif self._transfers.ready:
                self._transfers.give_up(self._state.requests[self._transfers.ready[-1]], step)
            elif self._state.in_flight or self._transfers.holds_pages or self._memory.operations.device_busy:
                running.decode_owed = True
                step.decided.append(DecodeSkipped(self._state.now_us, needed - available, returning))
                break
            else:
                self._state.finish(running.batch.requests[0], "out_of_kv", step, flush=True)
                return False
            retracted = True
            running.decode_owed = True
        if retracted:
            running_batch, positions = self._state.all_running
            outputs = int((positions - running_batch.prompts).sum()) + running_batch.size
            max_new = int((running_batch.limits - running_batch.prompts).sum())
            self._state.ratio.retracted(outputs, max_new, running_batch.size)
        return needed <= available

    # mechanism: prefill-or-decode (decided)
    def decode_goes_first(self, running: RunningState) -> bool:
        """Whether the next launch is a decode: one is owed, `batching` requires it, or `prefill_decode_interval`."""
        config = self._state.config
        if self._microbatches.several and self._microbatches.owes_elsewhere():
            return True
        if not running.batch.size:
            return False
        lacking = self.pages_lacking(running) if config.batching == "running_first" and not running.decode_owed else 0
        since = running.decode_launches - running.extended_at
        return rules.decode_goes_first(
            running.decode_owed, BATCHINGS[config.batching], lacking, since, config.prefill_decode_interval
        )
