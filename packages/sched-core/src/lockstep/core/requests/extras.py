"""Parts of a plan for requests that need more than tokens: spans of media, prompt logprobs, hidden states.

All of them concern extends. The `Extras` of a request store how far its results were delivered. After a retraction, a
position with a delivered result is not requested again, and a position with a lost result is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from lockstep.core.contract.commands import HiddenSpan, LogprobSpan, MediaSpan, RowTaken
from lockstep.core.contract.events import PromptSpan
from lockstep.core.requests.batching import ExtendPart
from lockstep.core.requests.table import Extras, Request


class PlanExtras(NamedTuple):
    """The fields of a BatchPlan for media, prompt logprobs and hidden states of its rows."""

    media_spans: tuple[MediaSpan, ...] = ()
    logprob_spans: tuple[LogprobSpan, ...] = ()
    hidden_spans: tuple[HiddenSpan, ...] = ()


NO_EXTRAS = PlanExtras()


def plan_extras(parts: list[ExtendPart]) -> PlanExtras:
    """Return the media, logprob and hidden-state spans of an extend of these parts."""
    special = [(i, part) for i, part in enumerate(parts) if part.request.extras is not None]
    if not special:
        return NO_EXTRAS
    return PlanExtras(
        tuple(span for i, part in special for span in _media(i, part)),
        tuple(span for i, part in special for span in _logprobs(i, part)),
        tuple(span for i, part in special for span in _hidden(i, part)),
    )


def delivered(request: Request, stop: int) -> None:
    """Record that the results of the request's positions [0:stop) are delivered to the host."""
    extras = request.extras
    if extras is None:
        return
    if extras.logprobs_from is not None:
        extras.logprobs_from = max(extras.logprobs_from, stop)
        if extras.logprobs_from >= request.prompt_tokens - 1:
            extras.logprobs_from = None
    if extras.hidden_from is not None:
        extras.hidden_from = max(extras.hidden_from, stop)


def spans_within(spans: Iterable[PromptSpan], tokens: int) -> tuple[PromptSpan, ...]:
    """Return the spans within the first `tokens` tokens. A span that crosses this end is cut short."""
    return tuple(msgspec.structs.replace(span, stop=min(span.stop, tokens)) for span in spans if span.start < tokens)


def put_behind(request: Request, kept: int, spans: tuple[PromptSpan, ...]) -> None:
    """Move the extras of a turn's own prompt behind the `kept` tokens of its session, which have these spans."""
    before = spans_within(spans, kept)
    extras = request.extras
    if extras is None and before:
        extras = request.extras = Extras()
    if extras is None or not kept:
        return
    own = (msgspec.structs.replace(span, start=span.start + kept, stop=span.stop + kept) for span in extras.spans)
    extras.spans = (*before, *own)
    if extras.logprobs_from is not None:
        extras.logprobs_from += kept
    if extras.hidden_from is not None:
        extras.hidden_from += kept


def kept(request: Request) -> None:
    """Record that a retracted request keeps its output. The hidden states of its output tokens were delivered."""
    extras = request.extras
    if extras is not None and extras.hidden_from is not None and request.outputs:
        extras.hidden_from = request.prompt_tokens + request.outputs - 1


def wants_logprobs(request: Request) -> bool:
    """Return whether any logprobs of prompt or output are requested."""
    return request.extras is not None and request.extras.logprobs


def with_extras(taken: RowTaken, extras: Extras) -> RowTaken:
    """Return `taken` with the extras of the row's holder, which the executor stores as long as it has the row."""
    return msgspec.structs.replace(
        taken,
        logprobs=extras.logprobs,
        hidden_states=extras.hidden_from is not None,
        token_type_ids=extras.token_type_ids,
    )


def _media(i: int, part: ExtendPart) -> Iterator[MediaSpan]:
    extras = part.request.extras
    for span in extras.spans if extras is not None else ():
        start, stop = max(span.start, part.start), min(span.stop, part.stop)
        if start < stop:
            yield MediaSpan(i, start, stop, span.digest, start - span.start)


# mechanism: prompt-logprobs (decided)
def _logprobs(i: int, part: ExtendPart) -> Iterator[LogprobSpan]:
    request, extras = part.request, part.request.extras
    if extras is None or extras.logprobs_from is None:
        return
    start, stop = max(part.start, extras.logprobs_from), min(part.stop, request.prompt_tokens - 1)
    if start < stop:
        yield LogprobSpan(i, start, np.frombuffer(request.tokens, np.int32)[start + 1 : stop + 1])


def _hidden(i: int, part: ExtendPart) -> Iterator[HiddenSpan]:
    extras = part.request.extras
    if extras is not None and extras.hidden_from is not None and extras.hidden_from < part.stop:
        yield HiddenSpan(i, max(part.start, extras.hidden_from))
