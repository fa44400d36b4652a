"""Accepted requests that may not join the line yet, because something must happen first.

**Samples.** Of the samples of one prompt the first one *leads*: it computes the prompt, and the others follow it once
that is cached: when its batch was delivered, or with `same_step_sharing` when it was launched. A leader that ends
before hands the lead to the next one; a leader that is retracted still leads.

**Media.** A request waits until an encoder has seen its media, and again after a retraction or a restart that took what
the encoder had made. See `media`.

**Turns and grammars** hold a request as well: see `sessions` and `grammars`. Media of a turn are those of its session
and its own, so it asks for them when its turn comes. Whoever holds a request keeps the record of it, and calls
`Engine.join_line` once when that is over; after the last it waits in the line.

accepted --a leader computes its prompt--> held --delivered, or it leads now--> its media --all encoded--> the line
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import AdmissionDeferred, BatchId, MediaEncoded, RequestId
from lockstep.core.requests import extras
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import NO_REQUEST, Extras, Request, RequestState

if TYPE_CHECKING:
    from lockstep.core.scheduler.engine import Engine


def hold(engine: Engine, request: Request, leader: RequestId, step: Step) -> bool:
    """Hold a new request, if it has to wait for the sample that leads or for its media; a turn's media come later.

    Returns whether it was held for that. It may be in the line by then.
    """
    if leader != NO_REQUEST and _has_to_share(engine, request):
        request.extras = request.extras or Extras()
        request.extras.leader = leader
        engine.hold(request)
        engine.followers.setdefault(leader, []).append(request)
        step.decided.append(AdmissionDeferred(engine.now_us, request.request_id, "sample"))
        return True
    if has_media(request) and not request.session and not comes_by_transfer(engine, request):
        await_media(engine, request, step)
        return True
    return False


def comes_by_transfer(engine: Engine, request: Request) -> bool:
    """Whether its transfer says if its prompt is computed here, and when: so nobody is asked for its media yet."""
    return engine.transfers is not None and engine.transfers.holds(request)


def has_media(request: Request) -> bool:
    """Whether an encoder must see any of its prompt."""
    return request.extras is not None and bool(request.extras.media)


def _has_to_share(engine: Engine, request: Request) -> bool:
    """Whether it could use a page of another's prompt."""
    return engine.config.radix_cache and request.cacheable_tokens >= engine.config.page_size


def follow(engine: Engine, leader: Request, stop: int, step: Step) -> None:
    """What the leader has up to `stop` can be shared now: once that is its prompt, the others follow."""
    if stop >= leader.prompt_tokens:
        for follower in engine.followers.pop(leader.request_id, ()):
            _let_in(engine, follower, step)


def computed(engine: Engine, batch: InFlight, step: Step) -> None:
    """A batch's positions were computed: note what was delivered with them, let samples follow and media go."""
    for i, request in batch.alive():
        stop = int(batch.plan.stops[i])
        extras.delivered(request, stop)
        follow(engine, request, stop, step)
        if stop >= request.prompt_tokens:
            _let_media_go(engine, request, step)


def ended(engine: Engine, request: Request, step: Step) -> None:
    """A request ended: what others waited for it goes on."""
    if request.request_id in engine.followers:
        _hand_over(engine, request, step)
    if request.extras is not None and request.extras.leader != NO_REQUEST:
        others = engine.followers[request.extras.leader]
        others.remove(request)
        if not others:
            del engine.followers[request.extras.leader]
    _let_media_go(engine, request, step)


def _hand_over(engine: Engine, leader: Request, step: Step) -> None:
    first, *rest = engine.followers.pop(leader.request_id)
    for request in rest:
        assert request.extras is not None
        request.extras.leader = first.request_id
    if rest:
        engine.followers[first.request_id] = rest
    _let_in(engine, first, step)


def _let_in(engine: Engine, follower: Request, step: Step) -> None:
    assert follower.extras is not None
    follower.extras.leader = NO_REQUEST
    if follower.extras.media and not comes_by_transfer(engine, follower):
        await_media(engine, follower, step)
    engine.join_line(follower)


# ---------------------------------------------------------------------------------------------------------------- media


def await_media(engine: Engine, request: Request, step: Step) -> None:
    """Hold a request until an encoder has seen all its media; not at all if it has."""
    asked = request.extras
    assert asked is not None
    if not asked.awaits_media:
        asked.awaits_media = True
        engine.hold(request)
    engine.media.ask(request.request_id, asked.media)
    _serve(engine, step)
    if asked.awaits_media:
        step.decided.append(AdmissionDeferred(engine.now_us, request.request_id, "media"))


def lost_media(engine: Engine, request: Request) -> bool:
    """Whether it waits for its turn, and has media that nobody keeps for it."""
    has = request.extras
    if has is None or not has.media or has.leader != NO_REQUEST or request.state is not RequestState.WAITING:
        return False
    if request.session and engine.sessions.open[request.session].turn != request.request_id:
        return False  # it asks when its turn comes
    return not engine.media.knows(request.request_id)


def encoded(engine: Engine, event: MediaEncoded, step: Step) -> None:
    """An encoder is done with one digest: who waited for nothing else joins the line; what failed ends who needs it.

    Raises ContractError, changing nothing, when nothing asked for it. An answer from before a restart is void.
    """
    if event.generation > engine.generation:
        raise ContractError(f"media of generation {event.generation}, but this is generation {engine.generation}")
    current = event.generation == engine.generation
    if current and not engine.media.is_encoding(event.digest):
        raise ContractError(f"media {event.digest.hex()} were encoded, but nothing asked for that")
    engine.now_us = event.time_us
    if not current:
        return
    if event.error:
        for request_id in engine.media.failed(event.digest):
            _refuse(engine, engine.requests[request_id], event, step)
    else:
        for request_id in engine.media.encoded(event.digest):
            _ready(engine, request_id)
    _serve(engine, step)


def weights_changed(engine: Engine, step: Step) -> None:
    """The encoder sees again what it saw with the weights before, for all who wait. Nothing is in flight."""
    engine.media.outdate()
    waiting = [request for request in engine.requests.values() if request.row < 0]
    pinning = [request for request in waiting if request.request_id in engine.media.pins]
    for request in pinning:
        engine.media.let_go(request.request_id)
        if not request.holds:
            engine.waiting.remove(request)
    for request in pinning:
        await_media(engine, request, step)


def _refuse(engine: Engine, request: Request, event: MediaEncoded, step: Step) -> None:
    """Its media cannot be encoded, and those of the samples that follow it are the same."""
    message = f"media {event.digest.hex()[:8]} cannot be encoded: {event.error}"
    for one in (*engine.followers.get(request.request_id, ()), request):
        if one.ran:
            engine.finish(one, "error", step, flush=True)
        else:
            engine.reject(one.request_id, "media", message, step)


def release_deferred(engine: Engine, batch_id: BatchId, step: Step) -> None:
    """A batch was collected: what only it read for somebody who has left may go."""
    engine.media.release_deferred(batch_id)
    _serve(engine, step)


def _let_media_go(engine: Engine, request: Request, step: Step) -> None:
    if not has_media(request):
        return
    reading = [
        batch.plan.batch_id
        for batch in engine.in_flight
        if batch.plan.media_spans and bool((batch.plan.request_ids == request.request_id).any())
    ]
    engine.media.let_go(request.request_id, reading[-1] if reading else None)
    _serve(engine, step)


def _serve(engine: Engine, step: Step) -> None:
    for request_id in engine.media.serve(step, engine.generation):
        _ready(engine, request_id)


def _ready(engine: Engine, request_id: RequestId) -> None:
    """All media of a request are there, and stay until it needs them no more."""
    request = engine.requests[request_id]
    assert request.extras is not None
    request.extras.awaits_media = False
    engine.join_line(request)
