"""Prompts as runs of consecutive token ids.

A workload defines which tokens are equal, not their text. New content has ids that no other content has, so two prompts
share exactly the tokens with common ids, and a prompt of 100,000 tokens is a few numbers:

    (0, 512, 7168, 6246)      # tokens 0..511, which other prompts may begin with too, then 7168..13413

Ids in a workload are *chained*: all occurrences of an id have the same prefix before them. Recorded ids are chained by
the definition of the trace, generated ones because prompts share only prefixes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOKEN_IDS = 2**31  # ids are int32: 0 .. 2**31 - 1
_RUNS_FILLED_ONE_BY_ONE = 16  # above this many runs, one np.repeat is faster than one np.arange per run


def append_run(runs: list[int], first_token: int, count: int) -> None:
    """Append `count` tokens from `first_token` on; a run that continues the last one is merged with it."""
    if runs and runs[-2] + runs[-1] == first_token:
        runs[-1] += count
    else:
        runs += (first_token, count)


def cut_runs(runs: Sequence[int], tokens: int) -> list[int]:
    """Return the first `tokens` tokens of a prompt, as runs."""
    kept: list[int] = []
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        if tokens <= 0:
            break
        append_run(kept, first, min(count, tokens))
        tokens -= count
    return kept


def runs_behind(runs: Sequence[int], tokens: int) -> list[int]:
    """Return a prompt without its first `tokens` tokens, as runs."""
    left: list[int] = []
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        cut = min(tokens, count)
        tokens -= cut
        if count > cut:
            left += (first + cut, count - cut)
    return left


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two prompts in tokens. Runs must be maximal: see `append_run`."""
    common = 0
    pairs, others = zip(one[::2], one[1::2], strict=True), zip(other[::2], other[1::2], strict=True)
    for (first, count), (first_other, count_other) in zip(pairs, others, strict=False):
        if first != first_other:
            break
        common += min(count, count_other)
        if count != count_other:
            break
    return common


def prompt_ids(runs: Sequence[int]) -> NDArray[np.int32]:
    """Return the token ids of `runs` (first_token, count, ...): int32 [sum of the counts], newly allocated."""
    if len(runs) == 2:
        return np.arange(runs[0], runs[0] + runs[1], dtype=np.int32)
    if len(runs) <= 2 * _RUNS_FILLED_ONE_BY_ONE:
        ids = np.empty(sum(runs[1::2]), dtype=np.int32)
        stop = 0
        for first_token, count in zip(runs[::2], runs[1::2], strict=True):
            start, stop = stop, stop + count
            ids[start:stop] = np.arange(first_token, first_token + count, dtype=np.int32)
        return ids
    firsts, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    starts = np.cumsum(counts) - counts
    ids = np.arange(counts.sum(), dtype=np.int32)
    ids += np.repeat((firsts - starts).astype(np.int32), counts)
    return ids


class FreshTokens:
    """Assigns ids from `start` up, each once. After 2**31 it restarts at `start`; only then do ids repeat.

    No two assignments have the same first id, so prompts of fresh tokens have no common prefix even if ids repeat.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._next = start
        self._firsts = array("I")  # first ids of all assignments since the last restart
        self._earlier: set[int] = set()  # those before it

    def take(self, count: int) -> int:
        """Reserve `count` consecutive ids; return the first."""
        first_token = self._unused(self._next)
        if first_token + count > TOKEN_IDS:
            self._earlier.update(self._firsts)
            self._firsts = array("I")
            first_token = self._unused(self._start)
            if first_token + count > TOKEN_IDS:  # every id was the first of an assignment
                first_token = self._start
        self._firsts.append(first_token)
        self._next = first_token + count
        return first_token

    def took(self, firsts: NDArray[np.int64], stop: int) -> None:
        """Note assignments that were made without `take`: their first ids [n], and the id behind the last."""
        self._firsts.extend(firsts.tolist())
        self._next = stop

    def _unused(self, token: int) -> int:
        while token in self._earlier:
            token += 1
        return token


def fresh_tokens(start: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first id that `FreshTokens(start)` would assign for each of `counts`, [n]."""
    stops = start + np.cumsum(counts)
    firsts = stops - counts
    fitting = int(np.searchsorted(stops, TOKEN_IDS, side="right"))
    if fitting < len(counts):
        fresh = FreshTokens(start)
        fresh.took(firsts[:fitting], int(firsts[fitting]))
        firsts[fitting:] = [fresh.take(count) for count in counts[fitting:].tolist()]
    return firsts
