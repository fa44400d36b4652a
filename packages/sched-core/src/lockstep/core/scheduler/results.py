"""Results of batches: their tokens, and the requests, pages and prompts that depend on them."""

from __future__ import annotations

import numpy as np

from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished, BatchId
from lockstep.core.features import diffusion, grammars, multiplexing, speculation
from lockstep.core.requests import delivery, extras
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import Request
from lockstep.core.scheduler.state import SchedulerState


class Results:
    """Folds the results of the batches of one engine."""

    def __init__(self, state: SchedulerState, diffuser: diffusion.Diffuser) -> None:
        self._state = state
        self._memory = state.memory
        self._microbatches = state.microbatches
        self._speculation = state.speculation
        self._jump_forward = state.jump_forward
        self._diffusion = diffuser
        self._sessions = state.sessions
        self._transfers = state.transfers
        self._prerequisites = state.prerequisites
        self._media = state.media
        self._multiplexer = state.multiplexer

    def collect(self, event: BatchFinished, step: Step) -> None:
        """Fold the result of a batch: store and stream its tokens, end requests, publish prompts, free what waited."""
        state = self._state
        if event.generation > state.generation:
            raise ContractError(f"a result of generation {event.generation}, but this is generation {state.generation}")
        if event.generation < state.generation:
            return  # void since a restart
        batch = self._delivered(event)
        plan, samplers, memory = batch.plan, batch.samplers, self._memory
        extend_rows, by_layers = plan.extend_rows, plan.layers is not None  # rows with new KV
        if by_layers and self._multiplexer.is_partial(plan):
            extend_rows = 0  # the KV of the other layers is not computed yet
        undisturbed = not self._microbatches.several or self._microbatches.ran_undisturbed(event)
        if event.error:
            self._fail(batch, step)
        elif plan.extend_rows and state.config.fits_latency and event.finished_us > event.started_us and undisturbed:
            state.latency.observe(plan, event.finished_us - event.started_us)
        for i in event.invalid:  # they end while the batch counts as in flight, so that its sample is no output
            if samplers.requests[i].row == samplers.rows[i]:
                state.finish(samplers.requests[i], "invalid", step, flush=True)
        if state.in_flight[0] is batch:
            state.in_flight.popleft()
        else:  # a batch of the other stream was launched before it
            state.in_flight.remove(batch)
        if batch.verifies and not event.error:
            running = self._microbatches.turn_to(plan.microbatch)
            self._speculation.settle(running, batch, event)
            memory.hybrid.verified(batch)
        if extend_rows and not event.error:
            if self._prerequisites.waiting_samples or any(request.extras is not None for request in batch.requests):
                self._prerequisites.computed(batch, step)
            for request in batch.computed_requests() if plan.pooled_rows.size else ():
                state.finish(request, "computed", step)
        if samplers.size and not event.error:
            self._take_tokens(event, batch, step)
            if self._jump_forward.forced:
                self._jump_forward.delivered(batch)
        if by_layers and samplers.size:
            self._join(batch)
        if memory.pending:
            memory.computed(plan.batch_id)
        if extend_rows and memory.radix.present:
            is_hybrid = memory.hybrid.present
            rows, stops = plan.rows[:extend_rows].tolist(), plan.stops[:extend_rows].tolist()
            for request, row, stop in zip(batch.requests, rows, stops, strict=False):
                if request.row == row and row not in batch.dead:
                    if memory.publish(request, stop, step):
                        state.retry_admission()
                    if not is_hybrid and memory.tiers.present:
                        self._back_up(request, stop, step)
        if plan.extend_rows and memory.hybrid.present and not event.error:
            memory.hybrid.collected(batch)
            state.retry_admission()
            for i, request in batch.alive():
                if i < plan.extend_rows:
                    self._back_up(request, int(plan.stops[i]), step)  # with the blocks that were published just now
        deferred = memory.deferred
        if (deferred.rows or deferred.pages) and memory.release_deferred(step):
            state.retry_admission()
        if self._media.deferred:
            self._prerequisites.release_deferred(self._delivered_up_to(), step)
        if self._sessions.unsettled:
            self._sessions.settle(self._delivered_up_to())
        if samplers.constrained:
            state.expire(step)  # a request that ends in this step moves no matcher
            grammars.collected(event, batch, state.in_flight, self._memory.table.outputs, step)

    def _join(self, batch: InFlight) -> None:
        """Let the requests with a prompt that is complete now decode next."""
        going = multiplexing.joins(batch)
        self._microbatches.current.join(batch.samplers.only(going), batch.sampled_at[going], self._memory.table)

    def _delivered_up_to(self) -> BatchId:
        """Return the newest batch such that it and all batches before it are delivered."""
        in_flight = self._state.in_flight
        return (in_flight[0].plan.batch_id if in_flight else self._state.next_batch_id) - 1

    def _back_up(self, request: Request, stop: int, step: Step) -> None:
        """Let a tier below copy a prompt that is computed and cached up to `stop`."""
        if request.handle is not None:
            self._memory.tiers.back_up(request.handle, stop // self._state.config.page_size, step)

    def _take_tokens(self, event: BatchFinished, batch: InFlight, step: Step) -> None:
        """Store the tokens of a batch, stream those that are due, and end the requests that end by them."""
        samplers, outputs = batch.samplers, self._memory.table.outputs
        tokens = self._diffusion.settle(batch, event) if batch.blocks else np.frombuffer(event.tokens, np.int32)
        first = batch.sampled_at - samplers.prompts
        counts = None
        if batch.steps is None:
            self._memory.table.write_outputs(samplers.rows, first, tokens)
            if batch.dead:
                self._state.discarded(len(delivery.dead_samplers(batch)))
            ends = delivery.verdicts(event, batch, tokens)
        else:
            numbers = first.repeat(batch.steps) + delivery.step_numbers(batch.steps)
            self._memory.table.write_outputs(samplers.rows.repeat(batch.steps), numbers, tokens)
            ends, counts = (
                delivery.run_verdicts(event, batch, tokens)
                if batch.verifies or batch.blocks
                else delivery.step_verdicts(batch, tokens)
            )
            self._state.discarded(int((batch.steps - counts).sum()))
        message = delivery.message(event, batch, tokens, first, ends, outputs, counts)
        if message is not None:
            step.commands.append(message)
        if ends:
            self._state.leave_running([samplers.requests[i] for i in ends])
        for i, reason in ends.items():
            if self._transfers.all and self._transfers.keeps(samplers.requests[i], reason):
                continue
            produced = int(first[i]) + (1 if counts is None else int(counts[i]))
            self._state.finish(samplers.requests[i], reason, step, outputs=produced)

    def _fail(self, batch: InFlight, step: Step) -> None:
        """End the requests of a batch that the device could not run with an error. Other requests are not affected."""
        failed = batch.plan.rows.tolist()
        memory = self._memory
        memory.deferred.withhold(rows=failed)
        memory.hybrid.failed(batch)
        for request, row in zip(batch.requests, batch.plan.rows.tolist(), strict=True):
            if request.row == row and row not in batch.dead:
                self._state.finish(request, "error", step, flush=True)
        invalidated = memory.invalidate_pending(batch.plan.batch_id)
        for request in list(self._state.requests.values()) if invalidated else []:
            if request.handle is not None and request.handle.number in invalidated:
                self._state.retract(request, "prefix_failed", step)

    def _delivered(self, event: BatchFinished) -> InFlight:
        """Return the batch in flight of a result. Raises ContractError, changing nothing, if they do not match."""
        state, in_flight = self._state, self._state.in_flight
        batch = in_flight[0] if in_flight else None
        if batch is None or batch.plan.batch_id != event.batch_id:
            due = multiplexing.oldest_of_streams(in_flight)
            batch = next((one for one in due if one.plan.batch_id == event.batch_id), None)
            if batch is None:
                expected = " or ".join(f"batch {one.plan.batch_id}" for one in due) or "nothing"
                raise ContractError(f"batch {event.batch_id} finished, but {expected} is next in flight")
        if state.ranks is not None and state.ranks.held is batch:
            raise ContractError(f"batch {event.batch_id} finished, but it is only proposed")
        tokens = batch.tokens
        if batch.verifies:
            tokens = speculation.tokens_of_result(event, batch)
        elif batch.blocks:
            tokens = diffusion.tokens_of_result(event, batch)
        size = 0 if event.error else 4 * tokens
        if len(event.tokens) != size:
            raise ContractError(f"batch {event.batch_id} has {len(event.tokens)} bytes of tokens, expected {size}")
        if event.invalid or event.text_stops or event.text_held or event.grammar_ended:
            delivery.check_reports(event, batch, 0 if event.error else batch.samplers.size)
        if event.accepted and not (batch.verifies or batch.blocks):
            raise ContractError(f"batch {event.batch_id} reports accepted counts; none were asked for")
        if self._jump_forward.forced:
            self._jump_forward.check(event, batch)
        if event.logprobs and not batch.dead and not any(extras.wants_logprobs(one) for one in batch.requests):
            raise ContractError(f"batch {event.batch_id} reports logprobs; none were asked for")
        return batch
