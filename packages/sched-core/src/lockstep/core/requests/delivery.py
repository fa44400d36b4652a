"""What becomes of a batch's tokens: which requests end by them, and which tokens are sent now.

A request that watches its text for stop texts may have to hold back tokens that could be the beginning of one. So what
it was sent does not follow from what it has: `Request.sent` remembers. For all others it does, see `sent_by`.
"""

from __future__ import annotations

import numpy as np

from lockstep.core.contract.commands import StreamTokens
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished, FinishReason
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import ONE, Int32s, Request


def verdicts(event: BatchFinished, batch: InFlight, tokens: Int32s) -> dict[int, FinishReason]:
    """The requests that end with a batch of one token per sampler, and why, in order. Precedence: see
    events.FinishReason."""
    samplers = batch.samplers
    ends: dict[int, FinishReason] = dict.fromkeys(batch.ending, "length")
    for i in event.grammar_ended:
        if batch.sampled_at[i] + 1 - samplers.prompts[i] >= samplers.min_new[i]:
            ends[i] = "grammar"
    if samplers.stops.shape[1]:
        hits = tokens[:, None] == samplers.stops
        if hits.any():
            outputs = batch.sampled_at + 1 - samplers.prompts
            for i in np.flatnonzero(hits.any(axis=1) & (outputs >= samplers.min_new)).tolist():
                ends[i] = "stop"
    for i in event.text_stops:
        if batch.sampled_at[i] + 1 - samplers.prompts[i] >= samplers.min_new[i]:
            ends[i] = "text_stop"
    for i in dead_samplers(batch) if batch.dead else ():
        ends.pop(i, None)
    return dict(sorted(ends.items())) if len(ends) > 1 else ends


def step_verdicts(batch: InFlight, tokens: Int32s) -> tuple[dict[int, FinishReason], Int32s]:
    """Of a batch with several tokens per sampler, end to end: the ends, and how many tokens of each count.

    What a request sampled behind its end never was.
    """
    ends: dict[int, FinishReason] = dict.fromkeys(batch.ending, "length")
    stops, counts = stopped(batch, tokens)
    ends |= dict.fromkeys(stops, "stop")
    for i in dead_samplers(batch):
        ends.pop(i, None)
        counts[i] = 0
    return dict(sorted(ends.items())), counts


def stopped(batch: InFlight, tokens: Int32s) -> tuple[list[int], Int32s]:
    """Of a batch with several tokens per sampler: rows with a stop token, and how many tokens of each count."""
    samplers, steps = batch.samplers, batch.steps
    assert steps is not None
    counts, ends = steps.copy(), []
    if samplers.stops.shape[1]:
        members = samplers.everyone.repeat(steps)
        step = step_numbers(steps)
        outputs = (batch.sampled_at - samplers.prompts)[members] + step + ONE
        hits = (tokens[:, None] == samplers.stops[members]).any(axis=1) & (outputs >= samplers.min_new[members])
        for at in np.flatnonzero(hits)[::-1].tolist():  # the first of each member is the last to be seen
            i = int(members[at])
            ends.append(i)
            counts[i] = step[at] + ONE
    return ends, counts


def run_verdicts(event: BatchFinished, batch: InFlight, tokens: Int32s) -> tuple[dict[int, FinishReason], Int32s]:
    """Of a batch that verified drafts, its tokens end to end: the ends, and how many tokens of each count.

    The precedence holds token by token. Rows that are reported on by their place have one token: they had no drafts.
    """
    samplers, steps = batch.samplers, batch.steps
    assert steps is not None
    have = batch.sampled_at - samplers.prompts + steps
    room = samplers.limits - samplers.prompts
    ends: dict[int, FinishReason] = dict.fromkeys((have >= room).nonzero()[0].tolist(), "length")
    long_enough = have >= samplers.min_new
    ends |= dict.fromkeys([i for i in event.grammar_ended if long_enough[i]], "grammar")
    stops, counts = stopped(batch, tokens)
    ends |= dict.fromkeys(stops, "stop")
    ends |= dict.fromkeys([i for i in event.text_stops if long_enough[i]], "text_stop")
    for i in dead_samplers(batch) if batch.dead else ():
        ends.pop(i, None)
        counts[i] = 0
    return dict(sorted(ends.items())), counts


def step_numbers(steps: Int32s) -> Int32s:
    """0 .. steps[i] - 1 for each i, end to end."""
    firsts = steps.cumsum(dtype=np.int32) - steps
    return np.arange(int(steps.sum()), dtype=np.int32) - firsts.repeat(steps)


def dead_samplers(batch: InFlight) -> list[int]:
    """Samplers whose request left after the launch: what they sampled is dropped."""
    return [i for row in batch.dead for i in np.flatnonzero(batch.samplers.rows == row).tolist()]


def check_reports(event: BatchFinished, batch: InFlight, sampled: int) -> None:
    """Raise ContractError when a result names a row that did not sample, or says of it what cannot be of this row."""
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
    """What is sent now: every token of steady cohorts, otherwise at each request's own cadence and at its end.

    Args:
        tokens: int32, as delivered; before: int32 [samplers], outputs each had; ends: the verdicts on them.
        outputs: int32 [rows, width], the output table, `tokens` included.
        counts: int32 [samplers], how many tokens of each count, if not one.
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
    """What has been sent after this message and before it, where some rows watch their text. int32 [samplers] each.

    Those rows remember what they are sent; a row that ends, and so is sent the rest, does not ask again.
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
    """How many tokens a request is sent with its first one, which its text may hold back: 1, or 0 for later."""
    every = request.stream_every if request.streams else -request.stream_every
    return 0 if held else int(sent_by(np.array([1], np.int32), np.array([every], np.int32))[0])


def sent_to(request: Request, outputs: int) -> int:
    """Output tokens a request was sent by the time it has `outputs` of them."""
    if request.watches_text:
        return request.sent
    every = request.stream_every if request.streams else -request.stream_every
    return int(sent_by(np.array([outputs], np.int32), np.array([every], np.int32))[0])


def sent_by(outputs: Int32s, every: Int32s) -> Int32s:
    """Output tokens sent by the time there are `outputs` of them and more to come. int32 [n] both, and the result.

    A streaming request sends its first token at once and then every `every` tokens. One that does not stream
    (`every` negative) sends after every whole -`every`, to show that it lives.
    """
    interval = np.abs(every)
    first = np.where(every > 0, ONE, interval)
    sent: Int32s = np.where(outputs < first, 0, outputs - (outputs - first) % interval).astype(np.int32)
    return sent
