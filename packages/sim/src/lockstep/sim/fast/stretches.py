"""Stretches of the kernel of the fast path: decodes of the same requests, none of which ends.

Such a decode changes every row alike: one position, one token, the same gap to the token before. So the kernel counts
the decodes, and the rows have their effects at the end of the stretch, when a request joins, ends or is retracted.

    launched    moves 1, 2, 3 ...                 positions, and which of them open a page (`phases`)
    delivered   the first to each row             from then on the last token of every row is of `common_us`
                the others by number              outputs, the longest gap

A batch in flight that was launched within a stretch has the running batch as its samplers. They are written only when
the stretch ends.
"""

from __future__ import annotations

from lockstep.sim.fast.state import NONE, Arrays, Record


def begin_stretch(a: Arrays, s: Record, engine: int) -> None:
    """Prepare decodes of the running batch that take the same few steps however many requests there are."""
    phases, mask = a.phases[engine], s.page_size - 1
    for i in range(s.page_size):
        phases[i] = 0
    s.context_tokens = 0
    for i in range(s.decoding):
        position = a.requests[a.running_batch[engine, i]].position
        s.context_tokens += position
        phases[-position & mask] += 1
    s.stretch = 1
    s.moves = s.delivered = s.gap_us_max = 0
    s.common_us = NONE


def end_stretch(a: Arrays, s: Record, engine: int) -> None:
    """Give the running batch and the batches in flight what the decodes of a stretch have changed."""
    if not s.stretch:
        return
    s.stretch = 0
    running_batch, flights = a.running_batch[engine], a.flights[engine]
    for i in range(s.decoding):
        request = a.requests[running_batch[i]]
        request.position += s.moves
        if s.delivered:
            request.outputs += s.delivered
            request.last_us = s.common_us
            request.itl_us_max = max(request.itl_us_max, s.gap_us_max)
    for i in range(s.in_flight):
        slot = (s.oldest + i) % flights.size
        if flights[slot].in_stretch:
            flights[slot].in_stretch = 0
            for j in range(s.decoding):
                a.samplers[engine, slot, j] = running_batch[j]
