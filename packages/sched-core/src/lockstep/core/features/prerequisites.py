"""Prerequisites of accepted requests: what must come before they may join the waiting queue.

**Samples.** The first sample of a prompt *leads*: it computes the prompt, and the others follow once the prompt is
cached. That is when its batch was delivered, or with `same_step_sharing` when it was launched. If the leader ends
before, the next sample leads. A retracted leader still leads.

**Media.** A request waits until an encoder has encoded its media, and again after a retraction or a restart that lost
the encoder's output. See `media`.

**Turns and grammars** hold a request as well: see `sessions` and `grammars`. The media of a turn are those of its
session and its own, so they are requested when the turn starts. The feature of a prerequisite stores it, and calls
`join_queue` once when it is met. After its last prerequisite the request joins the waiting queue.

accepted --a leader computes its prompt--> held --delivered, or it leads now--> its media --all encoded--> waiting queue
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
    """Return whether any of its prompt needs an encoder."""
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
                    fail(f"S15: {request.name} follows r{leader}, but has another leader")

    def hold(self, request: Request, leader: RequestId, step: Step) -> bool:
        """Hold a new request that must wait for the leading sample or for its media. A turn's media are held later.

        Returns: whether it was held for one of these. If its media are encoded already, it is in the waiting queue.
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

    # mechanism: samples (decided)
    def _has_to_share(self, request: Request) -> bool:
        """Return whether the request could use a cached page of the leader's prompt."""
        return self._scheduler.config.radix_cache and request.cacheable_tokens >= self._scheduler.config.page_size

    def release_samples(self, leader: Request, stop: int, step: Step) -> None:
        """Release the samples of `leader` if its positions [0:stop), which can be shared now, contain its prompt."""
        if stop >= leader.prompt_tokens:
            for sample in self.waiting_samples.pop(leader.request_id, ()):
                self._release_sample(sample, step)

    def computed(self, batch: InFlight, step: Step) -> None:
        """Take in a computed batch: record delivered extras, release followers, and unpin media of complete prompts."""
        for i, request in batch.alive():
            stop = int(batch.plan.stops[i])
            extras.delivered(request, stop)
            self.release_samples(request, stop, step)
            if stop >= request.prompt_tokens:
                self._release_media(request, step)

    def ended(self, request: Request, step: Step) -> None:
        """Remove an ended request. If it led samples, the next one leads."""
        if request.request_id in self.waiting_samples:
            self._hand_over(request, step)
        if request.extras is not None and request.extras.leader != NO_REQUEST:
            others = self.waiting_samples[request.extras.leader]
            others.remove(request)
            if not others:
                del self.waiting_samples[request.extras.leader]
        if request.extras is not None:
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
        """Hold a request until all its media are encoded. It is not held if they are encoded already."""
        needs = request.extras
        assert needs is not None
        if not needs.awaits_media:
            needs.awaits_media = True
            self._scheduler.add_prerequisite(request)
        self._release_media(request, step)  # of replaced weights, if it holds any
        self.media.ask(request.request_id, needs.media)
        self._serve(step)
        if needs.awaits_media:
            step.decided.append(AdmissionDeferred(self._scheduler.now_us, request.request_id, "media"))

    def lost_media(self, request: Request) -> bool:
        """Return whether a waiting request needs its media encoded again.

        It has no room for them and does not wait for room, or holds output that was computed with replaced weights: it
        had begun before these were replaced, and begins again.
        """
        needs = request.extras
        if needs is None or not needs.media or needs.leader != NO_REQUEST or request.state is not RequestState.WAITING:
            return False
        if self._scheduler.waits_for_turn(request):
            return False  # its media are requested when its turn starts
        return not self.media.knows(request.request_id) or self.media.is_outdated(request.request_id)

    def encoded(self, event: MediaEncoded, step: Step) -> None:
        """Take in one encoded digest: requests with complete media join the queue; those of a failed digest end.

        An answer from before a restart is void.

        Raises: ContractError, changing nothing, for a digest that was not requested.
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
        """Request the media of all waiting requests again after a change of weights. Nothing is in flight."""
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
        """End a request with media that cannot be encoded, and the samples that follow it with the same media."""
        message = f"media {event.digest.hex()[:8]} cannot be encoded: {event.error}"
        for one in (*self.waiting_samples.get(request.request_id, ()), request):
            if one.ran:
                self._scheduler.finish(one, "error", step, flush=True)
            else:
                self._scheduler.reject(one.request_id, "media", message, step)

    def release_deferred(self, batch_id: BatchId, step: Step) -> None:
        """Free encoder output that was kept for this collected batch, for requests that have left."""
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
        """Let a request with complete media join the queue. Its media stay pinned until its prompt is computed."""
        request = self._scheduler.requests[request_id]
        assert request.extras is not None
        request.extras.awaits_media = False
        self._scheduler.join_queue(request)
