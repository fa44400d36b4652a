"""Delivery of a batch's tokens: which requests end by them, and which tokens are sent now.

Tokens of a request with stop texts are held back while they may be the beginning of a stop text. The number of its sent
tokens is therefore stored, in `Request.sent`. For all other requests it follows from their output, see `sent_by`.
"""

from __future__ import annotations

import numpy as np

from lockstep.core.contract.commands import StreamTokens
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished, FinishReason
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import ONE, Int32s, Request


def verdicts(event: BatchFinished, batch: InFlight, tokens: Int32s) -> dict[int, FinishReason]:
    """Return the finish reasons by sampler index, ascending, for a batch of one token per sampler.

    The precedence of reasons is that of events.FinishReason.
    """
    samplers = batch.samplers
    ends: dict[int, FinishReason] = dict.fromkeys(batch.ending, "length")
    for i in event.grammar_ended:
        ends[i] = "grammar"
    if samplers.stops.shape[1]:
        hits = tokens[:, None] == samplers.stops
        if np.count_nonzero(hits):  # a quarter of the time of `any`
            outputs = batch.sampled_at + 1 - samplers.prompts
            for i in np.flatnonzero(hits.any(axis=1) & (outputs >= samplers.min_new)).tolist():
                ends[i] = "stop"
    for i in event.text_stops:
        if batch.sampled_at[i] + 1 - samplers.prompts[i] >= samplers.min_new[i]:
            ends[i] = "text_stop"
    for i in dead_samplers(batch) if batch.dead else ():
        ends.pop(i, None)
    return dict(sorted(ends.items())) if len(ends) > 1 else ends


# mechanism: several-decodes (decided)
def step_verdicts(batch: InFlight, tokens: Int32s) -> tuple[dict[int, FinishReason], Int32s]:
    """Return finish reasons and token counts for a batch with several tokens per sampler.

    Tokens that were sampled behind the end of a request are dropped.

    Args:
        tokens: int32 [tokens], those of all samplers end to end.
    Returns: finish reasons by sampler index, ascending; int32 [samplers], the number of tokens that are kept.
    """
    ends: dict[int, FinishReason] = dict.fromkeys(batch.ending, "length")
    stops, counts = stopped(batch, tokens)
    ends |= dict.fromkeys(stops, "stop")
    for i in dead_samplers(batch):
        ends.pop(i, None)
        counts[i] = 0
    return dict(sorted(ends.items())), counts


def stopped(batch: InFlight, tokens: Int32s) -> tuple[list[int], Int32s]:
    """Return the samplers with a stop token, and how many tokens of each sampler are kept. int32 [samplers]

    For a batch with several tokens per sampler; `tokens` has them end to end.
    """
    samplers, steps = batch.samplers, batch.steps
    assert steps is not None
    counts, ends = steps.copy(), []
    if samplers.stops.shape[1]:
        members = samplers.everyone.repeat(steps)
        step = step_numbers(steps)
        outputs = (batch.sampled_at - samplers.prompts)[members] + step + ONE
        hits = (tokens[:, None] == samplers.stops[members]).any(axis=1) & (outputs >= samplers.min_new[members])
        for at in np.flatnonzero(hits)[::-1].tolist():  # in reverse, so that the first hit of each sampler remains
            i = int(members[at])
            ends.append(i)
            counts[i] = step[at] + ONE
    return ends, counts


def run_verdicts(event: BatchFinished, batch: InFlight, tokens: Int32s) -> tuple[dict[int, FinishReason], Int32s]:
    """Return finish reasons and token counts for a batch that verified drafts.

    The precedence of reasons holds token by token. Rows in `grammar_ended` and `text_stops` have one token each, since
    rows with a grammar or with stop texts have no drafts.

    Args:
        tokens: int32 [tokens], those of all samplers end to end.
    Returns: finish reasons by sampler index, ascending; int32 [samplers], the number of tokens that are kept.
    """
    samplers, steps = batch.samplers, batch.steps
    assert steps is not None
    have = batch.sampled_at - samplers.prompts + steps
    room = samplers.limits - samplers.prompts
    ends: dict[int, FinishReason] = dict.fromkeys((have >= room).nonzero()[0].tolist(), "length")
    long_enough = have >= samplers.min_new
    ends |= dict.fromkeys(event.grammar_ended, "grammar")
    stops, counts = stopped(batch, tokens)
    ends |= dict.fromkeys(stops, "stop")
    ends |= dict.fromkeys([i for i in event.text_stops if long_enough[i]], "text_stop")
    for i in dead_samplers(batch) if batch.dead else ():
        ends.pop(i, None)
        counts[i] = 0
    return dict(sorted(ends.items())), counts


def accepted_counts(event: BatchFinished, samplers: int) -> Int32s | None:
    """Return how many tokens each sampler of a verifying batch got, int32 [samplers]; None: one each."""
    return np.frombuffer(event.accepted, "<i4", samplers) if event.accepted else None


def right_drafts(event: BatchFinished, samplers: int) -> Int32s:
    """Return the numbers of the right drafts of trees, those of all samplers end to end; empty: chains, or no draft."""
    return np.frombuffer(event.accepted, "<i4")[samplers:]


def step_numbers(steps: Int32s) -> Int32s:
    """Return 0 .. steps[i] - 1 for each i, end to end. int32 [sum of steps]"""
    firsts = steps.cumsum(dtype=np.int32) - steps
    return np.arange(int(steps.sum()), dtype=np.int32) - firsts.repeat(steps)


def dead_samplers(batch: InFlight) -> list[int]:
    """Return the indices of samplers that their request left after the launch. Their tokens are dropped."""
    return [i for row in batch.dead for i in np.flatnonzero(batch.samplers.rows == row).tolist()]


def check_reports(event: BatchFinished, batch: InFlight, sampled: int) -> None:
    """Raise ContractError if a result names a row that did not sample, or reports a fact that this row cannot have."""
    samplers = batch.samplers
    for i in (*event.invalid, *event.text_stops, *event.grammar_ended, *(i for i, _ in event.text_held)):
        if not 0 <= i < sampled:
            raise ContractError(f"batch {event.batch_id} names sampling row {i} of {sampled}")
    for i in event.grammar_ended:
        if not samplers.has_grammar[i]:
            raise ContractError(f"batch {event.batch_id}: the grammar of sampling row {i} ended, but it has none")
    for i in (*event.text_stops, *(i for i, _ in event.text_held)):
        if not samplers.watches_text[i]:
            raise ContractError(f"batch {event.batch_id} reports on the text of sampling row {i}, without stop texts")
    for i, held in event.text_held:
        outputs = int(batch.sampled_at[i] + 1 - samplers.prompts[i])
        if not 0 <= held <= outputs:
            raise ContractError(f"batch {event.batch_id} holds {held} of {outputs} tokens of sampling row {i} back")


def message(
    event: BatchFinished,
    batch: InFlight,
    tokens: Int32s,
    before: Int32s,
    ends: dict[int, FinishReason],
    outputs: Int32s,
    counts: Int32s | None = None,
) -> StreamTokens | None:
    """Return the message with the tokens that are sent now; None if there are none.

    A steady batch sends every token. Otherwise each request sends at its own interval and at its end.

    Args:
        tokens: int32 [tokens], as delivered.
        before: int32 [samplers], output tokens that each request had before.
        ends: finish reasons by sampler index.
        outputs: int32 [rows, width], the output table, `tokens` included.
        counts: int32 [samplers], the number of tokens that are kept of each sampler; None: one each.
    """
    samplers = batch.samplers
    if samplers.steady and not batch.dead and counts is None:
        return StreamTokens(samplers.request_ids, before, samplers.ones, tokens, samplers.ids_digest)
    after = before + (ONE if counts is None else counts)
    offsets = sent_by(before, samplers.every)
    if samplers.watched:
        sending, offsets = _watched(event, batch, after, offsets)
    else:
        sending = sent_by(after, samplers.every)
    ending = list(ends)
    sending[ending] = after[ending]
    sizes = sending - offsets
    if batch.dead:
        sizes[np.isin(samplers.rows, batch.dead)] = 0
    due = sizes.nonzero()[0]
    if not due.size:
        return None
    sizes, offsets = sizes[due], offsets[due]
    sent = outputs[samplers.rows[due].repeat(sizes), offsets.repeat(sizes) + step_numbers(sizes)]
    return StreamTokens(samplers.request_ids[due], offsets, sizes, sent)


def _watched(event: BatchFinished, batch: InFlight, have: Int32s, offsets: Int32s) -> tuple[Int32s, Int32s]:
    """Return the tokens sent after this message and before it, for a batch with stop texts. int32 [samplers] each.

    `Request.sent` of rows with stop texts is updated. A row that ends is sent its remaining tokens by the caller; its
    `sent` is not read again.
    """
    samplers = batch.samplers
    free = have.copy()
    for i, held in event.text_held:
        free[i] -= held
    sending = sent_by(free, samplers.every)
    for i in np.flatnonzero(samplers.watches_text).tolist():
        if samplers.rows[i] not in batch.dead:
            request = samplers.requests[i]
            offsets[i] = request.sent
            request.sent = sending[i] = max(request.sent, int(sending[i]))
    return sending, offsets


def first_sent(request: Request, held: bool) -> int:
    """Return how many tokens are sent when a request has its first one: 1, or 0 if it is `held` or not due yet."""
    every = request.stream_every if request.streams else -request.stream_every
    return 0 if held else int(sent_by(np.array([1], np.int32), np.array([every], np.int32))[0])


def sent_to(request: Request, outputs: int) -> int:
    """Return how many output tokens a request with `outputs` of them was sent."""
    if request.watches_text:
        return request.sent
    every = request.stream_every if request.streams else -request.stream_every
    return int(sent_by(np.array([outputs], np.int32), np.array([every], np.int32))[0])


# mechanism: messages (decided)
def sent_by(outputs: Int32s, every: Int32s) -> Int32s:
    """Return how many output tokens are sent of requests that have `outputs` of them and have not ended.

    A streaming request is sent its first token at once and then every `every` tokens. A request that does not stream
    (`every` negative) is sent tokens after every whole -`every`, as a sign of progress.

    Args:
        outputs, every: int32 [n].
    Returns: int32 [n].
    """
    interval = np.abs(every)
    first = np.where(every > 0, ONE, interval)
    sent: Int32s = np.where(outputs < first, 0, outputs - (outputs - first) % interval).astype(np.int32)
    return sent
