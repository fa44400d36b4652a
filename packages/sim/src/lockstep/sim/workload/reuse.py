"""How much of the prompts a prefix cache of a given size would hit, whatever the scheduler does.

Requests are served in an instant, one after another: those that arrive by the clock at their time, a follow-up its
think time after the turn before it. Prompts are inserted, outputs are not. What has not been touched for longest is
evicted, leaves before what they hang on, token by token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from lockstep.sim.workload.turns import Int64s, Turns


def hit_ratio(turns: Turns, capacity_tokens: int) -> float:
    """Prompt tokens found in a cache of `capacity_tokens`, over all prompt tokens."""
    cached: OrderedDict[int, int] = OrderedDict()  # piece -> tokens of it in the cache, least recently touched first
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
                kept = min(held, capacity_tokens - used)  # its first tokens stay
                cached[piece] = kept
                cached.move_to_end(piece, last=False)
                used += kept
                break
    return hits / int(turns.prompt_tokens.sum(dtype=np.int64))


def service_order(turns: Turns) -> Int64s:
    """[n]: indices of the turns in the order in which they come if every answer takes no time."""
    times = turns.arrival_us.tolist()
    afters, thinks = turns.after.tolist(), turns.think_us.tolist()
    for index, after in enumerate(afters):
        if after >= 0:
            times[index] = times[after] + thinks[index]
    return np.argsort(np.array(times, np.int64), kind="stable")


def prompts_in_pieces(turns: Turns, order: Int64s) -> Iterator[tuple[list[int], list[int]]]:
    """The prompts of these turns as pieces, which every prompt has whole or not at all, and their lengths."""
    starts = turns.run_first_token.astype(np.int64)
    stops = starts + turns.run_tokens
    bounds = np.unique(np.concatenate((starts, stops)))
    lengths = np.diff(bounds).tolist()
    firsts, ends = np.searchsorted(bounds, starts).tolist(), np.searchsorted(bounds, stops).tolist()
    run_starts, run_stops = turns.run_starts.tolist(), turns.run_stops.tolist()
    for turn in order.tolist():
        pieces = [piece for run in range(run_starts[turn], run_stops[turn]) for piece in range(firsts[run], ends[run])]
        yield pieces, [lengths[piece] for piece in pieces]
