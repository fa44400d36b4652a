"""What becomes of a batch's tokens: who ends by them, and which of them are sent now."""

from __future__ import annotations

import numpy as np

from lockstep.core.batching import InFlight
from lockstep.core.commands import StreamTokens
from lockstep.core.events import BatchFinished, FinishReason
from lockstep.core.requests import Int32s

ONE = np.int32(1)


def verdicts(event: BatchFinished, batch: InFlight, tokens: Int32s) -> dict[int, FinishReason]:
    """Who ends with a batch of one token per sampler, and why, in their order. Precedence: see events.FinishReason."""
    samplers = batch.samplers
    ends: dict[int, FinishReason] = dict.fromkeys(batch.ending, "length")
    if samplers.stops.shape[1]:
        hits = tokens[:, None] == samplers.stops
        if hits.any():
            outputs = batch.sampled_at + 1 - samplers.prompts
            for i in np.flatnonzero(hits.any(axis=1) & (outputs >= samplers.min_new)).tolist():
                ends[i] = "stop"
    for i in event.text_stops:
        if batch.sampled_at[i] + 1 - samplers.prompts[i] >= samplers.min_new[i]:
            ends[i] = "text_stop"
    for i in dead_samplers(batch):
        ends.pop(i, None)
    return dict(sorted(ends.items())) if len(ends) > 1 else ends


def step_verdicts(batch: InFlight, tokens: Int32s) -> tuple[dict[int, FinishReason], Int32s]:
    """Of a batch with several tokens per sampler, end to end: who ends, and how many tokens of each count.

    What a request sampled behind its end never was.
    """
    samplers, steps = batch.samplers, batch.steps
    assert steps is not None
    ends: dict[int, FinishReason] = dict.fromkeys(batch.ending, "length")
    counts = steps.copy()
    if samplers.stops.shape[1]:
        members = samplers.everyone.repeat(steps)
        step = step_numbers(steps)
        outputs = (batch.sampled_at - samplers.prompts)[members] + step + ONE
        stopped = (tokens[:, None] == samplers.stops[members]).any(axis=1) & (outputs >= samplers.min_new[members])
        for at in np.flatnonzero(stopped)[::-1].tolist():  # the first of each member is the last to be seen
            i = int(members[at])
            ends[i], counts[i] = "stop", step[at] + ONE
    for i in dead_samplers(batch):
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


def message(
    batch: InFlight, tokens: Int32s, ends: dict[int, FinishReason], outputs: Int32s, counts: Int32s | None = None
) -> StreamTokens | None:
    """What is sent now: every token of steady cohorts, otherwise at each request's own cadence and at its end.

    Args:
        tokens: int32 [samplers], as delivered; ends: the verdicts on them.
        outputs: int32 [rows, width], the output table, `tokens` included.
        counts: int32 [samplers], how many tokens of each count, if not one.
    """
    samplers = batch.samplers
    before = batch.sampled_at - samplers.prompts  # outputs each had
    if samplers.steady and not batch.dead and counts is None:
        return StreamTokens(samplers.request_ids, before, samplers.ones, tokens, samplers.ids_digest)
    after = before + (ONE if counts is None else counts)
    sending = sent_by(after, samplers.every)
    ending = list(ends)
    sending[ending] = after[ending]
    offsets = sent_by(before, samplers.every)
    sizes = sending - offsets
    if batch.dead:
        sizes[np.isin(samplers.rows, batch.dead)] = 0
    due = sizes.nonzero()[0]
    if not due.size:
        return None
    sizes, offsets = sizes[due], offsets[due]
    sent = outputs[samplers.rows[due].repeat(sizes), offsets.repeat(sizes) + step_numbers(sizes)]
    return StreamTokens(samplers.request_ids[due], offsets, sizes, sent)


def sent_by(outputs: Int32s, every: Int32s) -> Int32s:
    """Output tokens sent by the time there are `outputs` of them and more to come. int32 [n] both, and the result.

    A streaming request sends its first token at once and then every `every` tokens. One that does not stream
    (`every` negative) sends after every whole -`every`, to show that it lives.
    """
    interval = np.abs(every)
    first = np.where(every > 0, ONE, interval)
    sent: Int32s = np.where(outputs < first, 0, outputs - (outputs - first) % interval).astype(np.int32)
    return sent
