"""What becomes of a batch's tokens: who ends by them, and which of them are sent now."""

from __future__ import annotations

import numpy as np

from lockstep.core.batching import InFlight
from lockstep.core.commands import StreamTokens
from lockstep.core.events import BatchFinished, FinishReason
from lockstep.core.requests import Int32s

ONE = np.int32(1)


def verdicts(event: BatchFinished, batch: InFlight, tokens: Int32s) -> dict[int, FinishReason]:
    """Samplers that end with this batch, and why, in their order. Precedence per token: see events.FinishReason."""
    samplers = batch.samplers
    ends: dict[int, FinishReason] = dict.fromkeys(batch.ending, "length")
    if samplers.stops.shape[1]:
        outputs = batch.sampled_at + 1 - samplers.prompts
        stopped = (tokens[:, None] == samplers.stops).any(axis=1) & (outputs >= samplers.min_new)
        for i in np.flatnonzero(stopped).tolist():
            ends[i] = "stop"
    for i in event.text_stops:
        if batch.sampled_at[i] + 1 - samplers.prompts[i] >= samplers.min_new[i]:
            ends[i] = "text_stop"
    for i in dead_samplers(batch):
        ends.pop(i, None)
    return dict(sorted(ends.items())) if len(ends) > 1 else ends


def dead_samplers(batch: InFlight) -> list[int]:
    """Samplers whose request left after the launch: what they sampled is dropped."""
    return [i for row in batch.dead for i in np.flatnonzero(batch.samplers.rows == row).tolist()]


def message(batch: InFlight, tokens: Int32s, ends: dict[int, FinishReason], outputs: Int32s) -> StreamTokens | None:
    """What is sent now: every token of steady cohorts, otherwise at each request's own cadence and at its end.

    Args:
        tokens: int32 [samplers], as delivered; ends: the verdicts on them.
        outputs: int32 [rows, width], the output table, `tokens` included.
    """
    samplers = batch.samplers
    last = batch.sampled_at - samplers.prompts  # number of the newest output
    if samplers.steady and not batch.dead:
        return StreamTokens(samplers.request_ids, last, samplers.ones, tokens)
    sending = sent_by(last + ONE, samplers.every)
    ending = list(ends)
    sending[ending] = last[ending] + ONE
    offsets = sent_by(last, samplers.every)
    counts = sending - offsets
    if batch.dead:
        counts[np.isin(samplers.rows, batch.dead)] = 0
    due = counts.nonzero()[0]
    if not due.size:
        return None
    counts, offsets = counts[due], offsets[due]
    starts = counts.cumsum(dtype=np.int32) - counts  # of each request's share in the message
    numbers = np.arange(int(counts.sum()), dtype=np.int32) + (offsets - starts).repeat(counts)
    sent = outputs[samplers.rows[due].repeat(counts), numbers]
    return StreamTokens(samplers.request_ids[due], offsets, counts, sent)


def sent_by(outputs: Int32s, every: Int32s) -> Int32s:
    """Output tokens sent by the time there are `outputs` of them and more to come. int32 [n] both, and the result.

    A streaming request sends its first token at once and then every `every` tokens. One that does not stream
    (`every` negative) sends after every whole -`every`, to show that it lives.
    """
    interval = np.abs(every)
    first = np.where(every > 0, ONE, interval)
    sent: Int32s = np.where(outputs < first, 0, outputs - (outputs - first) % interval).astype(np.int32)
    return sent
