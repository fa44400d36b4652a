"""A sample of a workload: groups of requests that share prompts, drawn from its whole time.

The first requests of a trace are not like the rest: caches are cold, and prompts differ from one hour to the next. A
sample of single requests would lose what they share. So requests that share more than a widely used beginning are one
group, sessions are kept whole, and groups are drawn evenly over their sizes and over time. The sample has the shares
and the lengths of the whole. Uses of a prefix come closer together, as fewer other requests are between them.
"""

from __future__ import annotations

import numpy as np

from lockstep.sim.workload.turns import Int64s, Turns

BLOCK_TOKENS = 512  # prompts are compared at the ends of blocks of this many tokens
WIDE_SHARE = 0.02  # a block that more of the requests have is a common beginning, such as a system prompt


def spread_sample(turns: Turns, count: int) -> Turns:
    """Return at most `count` turns in groups from the whole workload, at the rate of the whole. The first is at 0.

    Nothing is drawn at random: equal workloads have equal samples.
    """
    if count >= len(turns):
        return turns
    roots = turns.root()
    groups = _groups(turns)[roots]
    starts, sizes = _starts_and_sizes(groups)
    order = np.lexsort((starts, sizes))[_even_order(len(sizes))]
    chosen, left = np.zeros(len(sizes), bool), count
    for group in order.tolist():
        if sizes[group] <= left:
            chosen[group] = True
            left -= int(sizes[group])
            if not left:
                break
    rows = np.flatnonzero(chosen[groups]) if chosen.any() else np.arange(count)
    sample = turns.take(rows)
    first_us = int(sample.arrival_us[sample.by_clock_rows].min())
    return sample.at(((sample.arrival_us - first_us) * (len(rows) / len(turns))).astype(np.int64))


def _groups(turns: Turns) -> Int64s:
    """Return the group of each turn, numbered from 0 by first turn, [n].

    A token id of a prefix stands for all tokens before it. So prompts that share a block share every block before it,
    and the first block of a prompt that is not widely used names its group.
    """
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(turns.prompt_tokens, dtype=np.int64)))
    blocks = turns.prompt_tokens.astype(np.int64) // BLOCK_TOKENS
    stops = np.cumsum(blocks)
    row_of = np.repeat(np.arange(len(turns)), blocks)
    within = np.arange(stops[-1] if len(stops) else 0) - np.repeat(stops - blocks, blocks)
    positions = offsets[row_of] + (within + 1) * BLOCK_TOKENS - 1
    run_stops = np.cumsum(turns.run_tokens, dtype=np.int64)
    runs = np.searchsorted(run_stops, positions, side="right")
    ids = turns.run_first_token[runs] + (positions - (run_stops[runs] - turns.run_tokens[runs]))
    _, codes, uses = np.unique(ids, return_inverse=True, return_counts=True)
    narrow = uses[codes] <= max(WIDE_SHARE * len(turns), 1)
    rows, first = np.unique(row_of[narrow], return_index=True)
    names = -1 - np.arange(len(turns), dtype=np.int64)  # a turn without such a block is a group of its own
    names[rows] = codes[narrow][first]
    return _renumbered(names)


def _renumbered(names: Int64s) -> Int64s:
    _, first, codes = np.unique(names, return_index=True, return_inverse=True)
    places = np.empty(len(first), np.int64)
    places[np.argsort(first)] = np.arange(len(first))
    renumbered: Int64s = places[codes]
    return renumbered


def _starts_and_sizes(groups: Int64s) -> tuple[Int64s, Int64s]:
    """Return the first row of each group, and its number of rows."""
    _, starts, sizes = np.unique(groups, return_index=True, return_counts=True)
    full_starts = np.zeros(int(groups.max()) + 1, np.int64)
    full_sizes = np.zeros_like(full_starts)
    present = np.unique(groups)
    full_starts[present], full_sizes[present] = starts, sizes
    return full_starts, full_sizes


def _even_order(count: int) -> Int64s:
    """Return 0 to `count` in an order whose every beginning is spread evenly: numbers by their reversed bits."""
    bits = max(count - 1, 1).bit_length()
    numbers = np.arange(1 << bits, dtype=np.int64)
    reverse = np.zeros_like(numbers)
    for _ in range(bits):
        reverse = (reverse << 1) | (numbers & 1)
        numbers >>= 1
    return reverse[reverse < count]
