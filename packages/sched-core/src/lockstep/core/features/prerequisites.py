"""Accepted requests that may not join the line yet, because something must happen first.

**Samples.** Of the samples of one prompt the first one *leads*: it computes the prompt, and the others follow it once
that is cached: when its batch was delivered, or with `same_step_sharing` when it was launched. A leader that ends
before hands the lead to the next one; a leader that is retracted still leads.

**Media.** A request waits until an encoder has seen its media, and again after a retraction or a restart that took what
the encoder had made. See `media`.

**Turns and grammars** hold a request as well: see `sessions` and `grammars`. Media of a turn are those of its session
and its own, so it requests them when its turn comes. The feature behind a prerequisite keeps the record of it, and
calls `Engine.join_line` once when that is over; after the last it waits in the line.

accepted --a leader computes its prompt--> held --delivered, or it leads now--> its media --all encoded--> the line
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.contract.checks import fail
from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import AdmissionDeferred, BatchId, MediaEncoded, RequestId
from lockstep.core.features.media import EncoderCache
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.component import Component, NoPart, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.requests import extras
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import NO_REQUEST, Extras, Request, RequestState


def has_media(request: Request) -> bool:
    """Whether an encoder must see any of its prompt."""
    return request.extras is not None and bool(request.extras.media)


class Prerequisites(Component):
    """Samples that wait for their leader's prompt, and requests that wait for an encoder."""

    EMPTY_AT_REST = ("waiting_samples",)

    def __init__(self, scheduler: SchedulerView, media: EncoderCache) -> None:
        self._scheduler = scheduler
        self.media = media
        self.waiting_samples: dict[RequestId, list[Request]] = {}  # samples, by the leader whose prompt they wait for

    def load(self, part: NoPart, restored: Restored) -> None:
        """Find the samples that wait for their leaders among the held requests."""
        for request in restored.blocked.values():
            if request.extras is not None and request.extras.leader != NO_REQUEST:
                self.waiting_samples.setdefault(request.extras.leader, []).append(request)

    def blocked_requests(self) -> list[RequestId]:
        """Return the samples that wait for their leaders, and the requests that wait for media."""
        samples_held = [request.request_id for samples in self.waiting_samples.values() for request in samples]
        return samples_held + self._awaiting_media(self._scheduler.requests)

    def _awaiting_media(self, requests: Mapping[RequestId, Request]) -> list[RequestId]:
        return [one.request_id for one in requests.values() if one.extras is not None and one.extras.awaits_media]

    def check_state(self, facts: Facts) -> None:
        """D11, L1, S15: requests held for media wait for them; samples follow a leader that is live."""
        for request_id in self._awaiting_media(facts.requests):
            if not self.media.knows(request_id) or self.media.has_all(request_id):
                fail(f"D11: r{request_id} is held for media, which it does not wait for")
        samples_held = [request.request_id for samples in self.waiting_samples.values() for request in samples]
        for leader, samples in self.waiting_samples.items():
            if leader not in facts.requests or leader in samples_held:
                fail(f"L1: {len(samples)} samples follow r{leader}, which has ended or follows itself")
            for request in samples:
                if request.extras is None or request.extras.leader != leader:
                    fail(f"S15: {request.name} does not name its leader r{leader}")

    def hold(self, request: Request, leader: RequestId, step: Step) -> bool:
        """Hold a new request, if it has to wait for the sample that leads or for its media; a turn's media come later.

        Returns whether it was held for that. It may be in the line by then.
        """
        if leader != NO_REQUEST and self._has_to_share(request):
            request.extras = request.extras or Extras()
            request.extras.leader = leader
            self._scheduler.add_prerequisite(request)
            self.waiting_samples.setdefault(leader, []).append(request)
            step.decided.append(AdmissionDeferred(self._scheduler.now_us, request.request_id, "sample"))
            return True
        if has_media(request) and not request.session and not self._scheduler.comes_by_transfer(request):
            self.await_media(request, step)
            return True
        return False

    def _has_to_share(self, request: Request) -> bool:
        """Whether it could use a page of another's prompt."""
        return self._scheduler.config.radix_cache and request.cacheable_tokens >= self._scheduler.config.page_size

    def release_samples(self, leader: Request, stop: int, step: Step) -> None:
        """What the leader has up to `stop` can be shared now: once that is its prompt, the others follow."""
        if stop >= leader.prompt_tokens:
            for sample in self.waiting_samples.pop(leader.request_id, ()):
                self._release_sample(sample, step)

    def computed(self, batch: InFlight, step: Step) -> None:
        """A batch's positions were computed: note what was delivered with them, let samples follow and media go."""
        for i, request in batch.alive():
            stop = int(batch.plan.stops[i])
            extras.delivered(request, stop)
            self.release_samples(request, stop, step)
            if stop >= request.prompt_tokens:
                self._release_media(request, step)

    def ended(self, request: Request, step: Step) -> None:
        """A request ended: what others waited for it goes on."""
        if request.request_id in self.waiting_samples:
            self._hand_over(request, step)
        if request.extras is not None and request.extras.leader != NO_REQUEST:
            others = self.waiting_samples[request.extras.leader]
            others.remove(request)
            if not others:
                del self.waiting_samples[request.extras.leader]
        self._release_media(request, step)

    def _hand_over(self, leader: Request, step: Step) -> None:
        first, *rest = self.waiting_samples.pop(leader.request_id)
        for request in rest:
            assert request.extras is not None
            request.extras.leader = first.request_id
        if rest:
            self.waiting_samples[first.request_id] = rest
        self._release_sample(first, step)

    def _release_sample(self, sample: Request, step: Step) -> None:
        assert sample.extras is not None
        sample.extras.leader = NO_REQUEST
        if sample.extras.media and not self._scheduler.comes_by_transfer(sample):
            self.await_media(sample, step)
        self._scheduler.join_queue(sample)

    # ------------------------------------------------------------------------------------------------------------ media

    def await_media(self, request: Request, step: Step) -> None:
        """Hold a request until an encoder has seen all its media; not at all if it has."""
        asked = request.extras
        assert asked is not None
        if not asked.awaits_media:
            asked.awaits_media = True
            self._scheduler.add_prerequisite(request)
        self.media.ask(request.request_id, asked.media)
        self._serve(step)
        if asked.awaits_media:
            step.decided.append(AdmissionDeferred(self._scheduler.now_us, request.request_id, "media"))

    def lost_media(self, request: Request) -> bool:
        """Whether it waits for its turn, and has media that are not kept for it."""
        has = request.extras
        if has is None or not has.media or has.leader != NO_REQUEST or request.state is not RequestState.WAITING:
            return False
        if self._scheduler.waits_for_turn(request):
            return False  # its media are requested when its turn comes
        return not self.media.knows(request.request_id)

    def encoded(self, event: MediaEncoded, step: Step) -> None:
        """An encoder is done with one digest: requests whose media are complete join the queue, or end if it failed.

        Raises ContractError, changing nothing, when nothing asked for it. An answer from before a restart is void.
        """
        if event.generation > self._scheduler.generation:
            raise ContractError(
                f"media of generation {event.generation}, but this is generation {self._scheduler.generation}"
            )
        current = event.generation == self._scheduler.generation
        if current and not self.media.is_encoding(event.digest):
            raise ContractError(f"media {event.digest.hex()} were encoded, but nothing asked for that")
        if not current:
            return
        if event.error:
            for request_id in self.media.failed(event.digest):
                self._refuse(self._scheduler.requests[request_id], event, step)
        else:
            for request_id in self.media.encoded(event.digest):
                self._ready(request_id)
        self._serve(step)

    def weights_changed(self, step: Step) -> None:
        """The encoder repeats its work of the weights before, for all waiting requests. Nothing is in flight."""
        self.media.outdate()
        waiting = [request for request in self._scheduler.requests.values() if request.row < 0]
        pinning = [request for request in waiting if request.request_id in self.media.pins]
        for request in pinning:
            self.media.release(request.request_id)
            if not request.open_prerequisites:
                self._scheduler.leave_queue(request)
        for request in pinning:
            self.await_media(request, step)

    def _refuse(self, request: Request, event: MediaEncoded, step: Step) -> None:
        """Its media cannot be encoded, and those of the samples that follow it are the same."""
        message = f"media {event.digest.hex()[:8]} cannot be encoded: {event.error}"
        for one in (*self.waiting_samples.get(request.request_id, ()), request):
            if one.ran:
                self._scheduler.finish(one, "error", step, flush=True)
            else:
                self._scheduler.reject(one.request_id, "media", message, step)

    def release_deferred(self, batch_id: BatchId, step: Step) -> None:
        """A batch was collected: output that only it read for requests that have left may go."""
        self.media.release_deferred(batch_id)
        self._serve(step)

    def _release_media(self, request: Request, step: Step) -> None:
        if not has_media(request):
            return
        reading = [
            batch.plan.batch_id
            for batch in self._scheduler.in_flight
            if batch.plan.media_spans and bool((batch.plan.request_ids == request.request_id).any())
        ]
        self.media.release(request.request_id, reading[-1] if reading else None)
        self._serve(step)

    def _serve(self, step: Step) -> None:
        for request_id in self.media.serve(step, self._scheduler.generation):
            self._ready(request_id)

    def _ready(self, request_id: RequestId) -> None:
        """All media of a request are there, and stay until it needs them no more."""
        request = self._scheduler.requests[request_id]
        assert request.extras is not None
        request.extras.awaits_media = False
        self._scheduler.join_queue(request)
