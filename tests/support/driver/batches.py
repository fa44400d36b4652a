"""Launch slots, results of batches, time, and the limits that hold for every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lockstep.core.contract.commands import BatchPlan, LaunchBatch, SampleBatch, Step
from lockstep.core.contract.events import (
    AdmissionDeferred,
    BlocksEvicted,
    ClockAdvanced,
    DecodeSkipped,
    LaneReady,
    Observed,
    PagesEvicted,
    RequestAdmitted,
    RequestFinished,
    RequestRetracted,
)
from tests.support.driver.piece import Piece, Subject
from tests.support.tagged_layers import oldest


class BatchPiece(Piece):
    """What the host reports of its device: free slots, results, and the clock."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.offered = 0  # launch slots

    def actions(self) -> dict[str, Callable[..., None]]:
        return {"ready": self.ready, "lane": self.lane, "finish": self.finish, "clock": self.clock, "wait": self.wait}

    def ready(self, *, in_turn: bool = False) -> None:
        """A launch slot is free: of the next microbatch if `in_turn`, otherwise of one that the clock determines."""
        self.offered += 1
        further = 0 if in_turn else self.subject.now_us // 3
        microbatch = (self.offered + further) % self.engine.config.microbatches
        self.subject.fold(LaneReady(self.subject.now_us, microbatch))

    def lane(self, microbatch: int) -> None:
        """A launch slot of a microbatch is free."""
        self.subject.fold(LaneReady(self.subject.now_us, microbatch))

    def finish(self, trouble: str = "", choice: int = 0, stream: int | None = None) -> None:
        """Deliver the oldest batch in flight of a stream, by default one that the clock determines.

        `trouble`: "error" for a failed batch; "invalid" or "text_stop" for one of its rows, which `choice` selects.
        """
        kv, now_us = self.subject.kv, self.subject.now_us
        if not kv.stream:
            return
        due = oldest(kv.stream)
        plan = due[(now_us if stream is None else stream) % len(due)].plan
        if plan is not kv.stream[0].plan:
            self.mark("result before that of an earlier launch")
        sampled = plan.sample_rows
        samplers = list(zip(plan.request_ids[sampled].tolist(), plan.stops[sampled].tolist(), strict=True))
        rows = len(samplers)
        if trouble == "error":
            self.subject.fold(kv.finished(now_us, error="the device says no", batch_id=plan.batch_id))
            return
        odd = (choice % rows,) if rows and trouble else ()
        records = [self.subject.records[request_id] for request_id, _ in samplers]
        outputs = [stop + 1 - record.prompt_tokens for record, (_, stop) in zip(records, samplers, strict=True)]
        held = [record.held(have) for record, have in zip(records, outputs, strict=True)]
        event = kv.finished(now_us, batch_id=plan.batch_id)
        if any(held):
            text_held = tuple((i, count) for i, count in enumerate(held) if count)
            event = msgspec.structs.replace(event, text_held=text_held)
        if trouble == "invalid":
            event = msgspec.structs.replace(event, invalid=odd)
        elif trouble == "text_stop":
            event = msgspec.structs.replace(event, text_stops=tuple(i for i in odd if records[i].watches_text))
        sent = [len(record.sent) for record in records]
        self.subject.fold(event)
        if (forced := kv.tell_forced(now_us)) is not None:
            self.subject.fold(forced)
        for record, have, count, before in zip(records, outputs, held, sent, strict=True):
            if count and not record.ended:
                assert len(record.sent) <= max(before, have - count), f"{count} of {have} tokens were to be held back"
                if len(record.sent) == have - count:
                    self.mark("text held back")

    def clock(self, us: int) -> None:
        """Time passes, and the engine observes it."""
        self.subject.now_us += us
        self.subject.fold(ClockAdvanced(self.subject.now_us))

    def wait(self, us: int) -> None:
        """Time passes until the next event."""
        self.subject.now_us += us

    # ---------------------------------------------------------------------------------------------------------- checks

    def before(self, event: Observed) -> None:
        prefilling = self.engine.prefilling
        self._chunked = prefilling.request_id if prefilling is not None else None

    def commands(self) -> dict[type, Callable[[Any], None]]:
        return {LaunchBatch: self._launched, SampleBatch: self._sampled}

    def _launched(self, command: LaunchBatch) -> None:
        if command.sample == "deferred" and command.plan.sample_after is not None:
            self.mark("sampling deferred")

    def _sampled(self, command: SampleBatch) -> None:
        if any(batch.dead and batch.plan.batch_id == command.batch_id for batch in self.engine.in_flight):
            self.mark("dead row sampled")

    def decided(self) -> dict[type, Callable[[Any, Step], None]]:
        return {
            RequestRetracted: self._retracted,
            AdmissionDeferred: self._deferred,
            PagesEvicted: lambda event, step: self.mark(f"evicted ({event.reason})"),
            BlocksEvicted: lambda event, step: self.mark(f"evicted ({event.kind})"),
            DecodeSkipped: self._skipped,
        }

    def _retracted(self, event: RequestRetracted, step: Step) -> None:
        self.mark(f"retracted ({event.reason})")
        if event.tokens_discarded:
            self.mark(f"retraction with {event.tokens_discarded} tokens in flight")
        if event.request_id == self._chunked:
            self.mark("retraction of a chunked request")

    def _deferred(self, event: AdmissionDeferred, step: Step) -> None:
        if event.reason == "adapter":
            self.mark("deferred for its adapter")
        elif event.reason in ("prefix", "load", "prefetch", "microbatch", "window", "state"):
            self.mark(f"deferred ({event.reason})")

    def _skipped(self, event: DecodeSkipped, step: Step) -> None:
        if step.launched() is None:
            self.mark("decode waits for deferred frees")

    def checked(self, event: Observed, step: Step) -> None:
        plan = step.launched()
        if plan is not None and (plan.logprob_spans or plan.hidden_spans):
            for span in (*plan.logprob_spans, *plan.hidden_spans):
                if span.start > int(plan.starts[span.index]):
                    self.mark("results wanted from inside an extend")
        if self.engine.memory.deferred.rows:
            self.mark("row kept for work in flight")
        if self.engine.memory.deferred.pages:
            self.mark("duplicate pages freed later")

    def at_rest(self) -> None:
        if self.subject.check:
            free, pages = self.engine.memory.pool.free_count, self.engine.config.pages
            assert free == pages, "L9: a flush leaves pages behind"


class LimitPiece(Piece):
    """Limits of each batch that no single state shows: budgets of extends, the decode that a retraction is owed."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.owed: set[int] = set()  # requests that a retraction made room for: they decode before any admission
        self.sat_out: set[int] = set()  # microbatches whose last batch was an extend without their running requests

    def checked(self, event: Observed, step: Step) -> None:
        config, made_room = self.engine.config, False
        for decided in step.decided:
            match decided:
                case RequestRetracted(_, request_id, reason="pages"):
                    assert config.reserve != "full", f"r{request_id} was retracted, but all it needed was reserved"
                    made_room = True
                case RequestAdmitted(_, request_id):
                    assert not made_room, f"r{request_id} was admitted in the step that made room for a decode"
                    assert not self.owed, f"r{request_id} was admitted before the decode of {self.owed}"
                    active, most = self.engine.active, config.max_running_requests
                    assert active <= most, f"S24: r{request_id} is admitted as one of {active}, at most {most} may run"
                case RequestRetracted(_, request_id):
                    self.owed.discard(request_id)
                case RequestFinished(_, request_id, reason):
                    assert reason != "out_of_kv", f"r{request_id} ended {reason}; it had to be rejected at entry"
                    self.owed.discard(request_id)
        plan = step.launched()
        if made_room:
            self.owed = {request.request_id for request in self.engine.running_batch.requests}
        if plan is None:
            return
        if plan.mode in ("decode", "verify", "diffusion_extend"):
            self.owed = set()
        if config.decode_look_ahead == config.decode_steps_per_launch == 1:
            self._check_last_victim(step)
        if config.batching != "prefill_first":
            self._check_sits_out_once(plan)
        if plan.extend_rows:
            self._check_budgets(plan)
        if plan.halves is not None:
            self._check_halves(plan)
        if config.multiplexes:
            self._check_streams(plan)

    def _check_halves(self, plan: BatchPlan) -> None:
        """S38: both halves have tokens, and only a prompt is cut."""
        assert plan.halves is not None
        rows, cut = plan.halves.rows, plan.halves.cut
        counts = (plan.stops - plan.starts).tolist()
        first = sum(counts[:rows]) + cut
        assert min(first, sum(counts) - first) * 3 >= sum(counts) - 1, f"S38: {plan.halves} of {counts}"
        if cut:
            assert rows < plan.extend_rows, f"S38: {plan.halves} of {counts}"
            assert cut < counts[rows], f"S38: {plan.halves} of {counts}"
        self.mark("halves through a prompt" if cut else "halves")

    def _check_streams(self, plan: BatchPlan) -> None:
        """S40: both shares of the device fit into it, and a plan has all of it only if the other stream is idle."""
        settings, engine = self.engine.config.multiplexing, self.engine
        assert settings is not msgspec.UNSET
        prompts = bool(engine.multiplexer.parts) or any(one.plan.layers for one in engine.in_flight)
        decodes = engine.running_batch.size if plan.layers is not None else len(plan.rows)
        beside = decodes if plan.layers is not None else prompts
        one = settings.division_for(decodes)
        assert (plan.sms is not None) == bool(beside and one), f"S40: {plan.sms} SMs beside {decodes} decodes"
        if plan.sms is not None and one is not None:
            assert plan.sms == (one.decode_sms if plan.layers is None else one.prefill_sms)
        if plan.layers is not None:
            if plan.layers[0]:
                self.mark("later layers of a prompt")
            if decodes:
                self.mark("layers of a prompt beside decodes")
            if (tokens := int((plan.stops - plan.starts).sum())) * (plan.layers[1] - plan.layers[0]) > tokens:
                assert tokens * (plan.layers[1] - plan.layers[0]) <= settings.token_budget, f"S40: {plan.layers}"

    def _check_budgets(self, plan: BatchPlan) -> None:
        """S24: new tokens of the extend within the budgets, in units of chunks, decodes counted; and its requests."""
        config = self.engine.config
        new_tokens = (plan.stops - plan.starts)[: plan.extend_rows].tolist()
        unit = config.chunk_unit_tokens
        charged = sum(-(-tokens // unit) * unit for tokens in new_tokens)
        decodes = len(plan.rows) - plan.extend_rows
        for limit in (config.chunked_prefill_size, config.max_prefill_tokens):
            alone = limit is config.max_prefill_tokens and config.chunked_prefill_size is None and len(new_tokens) == 1
            if limit is not None and not alone:
                assert charged <= max(limit - decodes, config.page_size), f"S24: {charged} new tokens"
        if config.prefill_max_requests is not None:
            assert plan.extend_rows <= config.prefill_max_requests
        if decodes:
            self.mark("mixed batch")

    def _check_last_victim(self, step: Step) -> None:
        """S27: no request is retracted in vain: with the last victim still there, the decode would not have fit."""
        if self.engine.memory.hybrid.present:
            return  # another pool may have been short
        victims = [event for event in step.decided if isinstance(event, RequestRetracted) and event.reason == "pages"]
        for victim in victims[-1:]:
            prompt_tokens = self.subject.records[victim.request_id].prompt_tokens
            tokens = prompt_tokens + victim.output_tokens + victim.tokens_discarded
            tokens += self.engine.config.block_tokens
            left, most = self.engine.memory.available_pages, -(-tokens // self.engine.config.page_size)
            assert left <= most, f"S27: {left} pages are left over, r{victim.request_id} gave back {most} at most"

    def _check_sits_out_once(self, plan: BatchPlan) -> None:
        """Check that every running request is in every mixed batch.

        It may miss one batch at a time: beside an extend that runs alone or, in batching `mixed`, for lack of pages.
        """
        going = self.engine.running_batch.request_ids
        if self.engine.config.speculates:  # a request that may be at its end waits for the result that decides it
            going = going[self.engine.positions + 1 < self.engine.running_batch.limits]
        left_out = set(going.tolist()) - set(plan.request_ids.tolist())
        if left_out:
            assert plan.microbatch not in self.sat_out, f"r{min(left_out)} sat out twice in a row"
            alone = any(request.needs_plain_extend for request in self.engine.in_flight[-1].requests)
            assert alone or self.engine.config.batching == "mixed", f"r{min(left_out)} runs first, but sits out"
            self.mark("decode sits out beside an extend")
        self.sat_out.discard(plan.microbatch)
        if left_out:
            self.sat_out.add(plan.microbatch)
