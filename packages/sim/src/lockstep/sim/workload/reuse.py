"""Hit ratio of a prefix cache of a given size over the prompts of a workload, independent of the scheduler.

Requests are served instantly, one after another: requests by the clock at their arrival, a follow-up its think time
after the previous turn. Prompts are inserted, outputs are not. Eviction takes the least recently used tokens first,
leaves before their parents, token by token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from lockstep.sim.workload.turns import Int64s, Turns


def hit_ratio(turns: Turns, capacity_tokens: int) -> float:
    """Return the prompt tokens found in a cache of `capacity_tokens`, over all prompt tokens."""
    cached: OrderedDict[int, int] = OrderedDict()  # piece -> its tokens in the cache, least recently used first
    used = hits = 0
    for pieces, lengths in prompts_in_pieces(turns, service_order(turns)):
        for piece, length in zip(pieces, lengths, strict=True):
            held = cached.get(piece, 0)
            hits += held
            if held < length:
                break
        for piece, length in zip(reversed(pieces), reversed(lengths), strict=True):
            used += length - cached.pop(piece, 0)
            cached[piece] = length
        while used > capacity_tokens:
            piece, held = cached.popitem(last=False)
            used -= held
            if used < capacity_tokens:
                kept = min(held, capacity_tokens - used)  # the first tokens of the piece stay
                cached[piece] = kept
                cached.move_to_end(piece, last=False)
                used += kept
                break
    return hits / int(turns.prompt_tokens.sum(dtype=np.int64))


def service_order(turns: Turns) -> Int64s:
    """Return the indices of the turns, [n], in order of their times if every answer takes no time."""
    times = turns.arrival_us.tolist()
    afters, thinks = turns.after.tolist(), turns.think_us.tolist()
    for index, after in enumerate(afters):
        if after >= 0:
            times[index] = times[after] + thinks[index]
    return np.argsort(np.array(times, np.int64), kind="stable")


def prompts_in_pieces(turns: Turns, order: Int64s) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each prompt as pieces and their lengths. A prompt contains a piece as a whole or not at all."""
    starts = turns.run_first_token.astype(np.int64)
    stops = starts + turns.run_tokens
    bounds = np.unique(np.concatenate((starts, stops)))
    lengths = np.diff(bounds).tolist()
    firsts, ends = np.searchsorted(bounds, starts).tolist(), np.searchsorted(bounds, stops).tolist()
    run_starts, run_stops = turns.run_starts.tolist(), turns.run_stops.tolist()
    for turn in order.tolist():
        pieces = [piece for run in range(run_starts[turn], run_stops[turn]) for piece in range(firsts[run], ends[run])]
        yield pieces, [lengths[piece] for piece in pieces]
