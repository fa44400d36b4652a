"""Token counts of prompts and messages; a token that was streamed twice counts once."""

from __future__ import annotations

import numpy as np

from lockstep.core.contract.commands import (
    Int32s,
    Int64s,
)
from lockstep.core.contract.events import (
    Prompt,
    TokenIds,
    TokenRuns,
)
from lockstep.sim.metrics.columns import Bools, Rows


def is_first(rows: Rows) -> Bools:
    """Return where a new request begins in rows that are grouped by request."""
    return np.append(True, rows[1:] != rows[:-1])[: len(rows)]


def count_new_tokens(rows: Rows, offsets: Int32s, counts: Int32s, sent: Int64s) -> Int64s | Int32s:
    """Return how many tokens of each message are new to the client.

    After a restart a message may repeat offsets. A token is new if it is after all tokens sent before, in these
    messages or earlier.

    Args:
        rows, offsets, counts: [entries], by request and time.
        sent: [requests], tokens sent before these messages.
    """
    stops = offsets + counts
    firsts = is_first(rows)
    before = np.append(0, stops[:-1])[: len(stops)]
    before[firsts] = sent
    if np.array_equal(before, offsets):
        return counts
    # A request's row in the high bits restarts the running maximum at each request.
    high = rows.astype(np.int64) << 32
    before = np.maximum(np.append(0, np.maximum.accumulate(high | stops)[:-1]), high) - high
    before = np.maximum(before, sent[np.cumsum(firsts) - 1])
    new_tokens: Int64s = np.maximum(stops - np.maximum(before, offsets), 0)
    return new_tokens


def count_tokens(prompt: Prompt) -> int:
    """Return the length of a prompt in tokens."""
    if isinstance(prompt, TokenRuns):
        return sum(prompt.runs[1::2])
    if isinstance(prompt, TokenIds):
        return len(prompt.ids) // 4
    return prompt.tokens
