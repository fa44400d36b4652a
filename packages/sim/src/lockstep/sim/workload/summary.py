"""Summary of a workload: numbers of requests, rates, lengths, shared tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lockstep.sim.workload.arrivals import mean_rate
from lockstep.sim.workload.token_runs import TOKEN_IDS
from lockstep.sim.workload.turns import Int32s, Turns


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Lengths in tokens. A percentile is a length that occurs: the smallest one that at least p % do not exceed."""

    mean: float
    min: int
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    turns: int
    follow_ups: int  # turns after an earlier one (closed loop)
    duration_us: int  # first to last arrival by the clock, follow-ups excluded
    arrivals_per_s: float  # of the turns that arrive by the clock; inf if all are simultaneous
    prompt: LengthSummary
    output: LengthSummary
    sharing_ratio: float  # share of all prompt tokens that an unbounded prefix cache would contain


def summarize(turns: Turns) -> WorkloadSummary:
    """Summarize a workload of at least one turn."""
    arrivals_us = turns.arrival_us[turns.by_clock_rows]
    return WorkloadSummary(
        turns=len(turns),
        follow_ups=len(turns) - len(arrivals_us),
        duration_us=int(arrivals_us[-1] - arrivals_us[0]),
        arrivals_per_s=mean_rate(arrivals_us),
        prompt=_summarize_lengths(turns.prompt_tokens),
        output=_summarize_lengths(turns.output_tokens),
        sharing_ratio=sharing_ratio(turns),
    )


def _summarize_lengths(lengths: Int32s) -> LengthSummary:
    p50, p90, p99 = (int(value) for value in np.percentile(lengths, (50, 90, 99), method="inverted_cdf"))
    mean = int(lengths.sum(dtype=np.int64)) / len(lengths)
    return LengthSummary(mean, int(lengths.min()), p50, p90, p99, int(lengths.max()))


def sharing_ratio(turns: Turns) -> float:
    """Return the prompt tokens seen before, over all prompt tokens.

    Ids are chained (see token_runs.py), so a token is new exactly if its id is new. The tokens to compute are all ids
    in any prompt, except those that the model generated itself.
    """
    prompt_tokens = int(turns.prompt_tokens.sum(dtype=np.int64))
    new_tokens = 0
    for first, stop in _epochs(turns):
        runs = slice(int(turns.run_starts[first]), int(turns.run_stops[stop - 1]))
        prompts = turns.run_first_token[runs], turns.run_tokens[runs]
        outputs = turns.output_first_token[first:stop], turns.output_tokens[first:stop]
        both = np.concatenate((prompts[0], outputs[0])), np.concatenate((prompts[1], outputs[1]))
        new_tokens += _distinct_ids(*both) - _distinct_ids(*outputs)
    return 1 - new_tokens / prompt_tokens


def _epochs(turns: Turns) -> list[tuple[int, int]]:
    """Return spans of turns within which an id denotes one token: all turns, unless ids were reused.

    Output ids are assigned in ascending order, so they decrease only where numbering restarted. (Those of a mix
    decrease often, but never run out.)
    """
    tokens = int(turns.run_tokens.sum(dtype=np.int64) + turns.output_tokens.sum(dtype=np.int64))
    falls: list[int] = (np.flatnonzero(np.diff(turns.output_first_token) < 0) + 1).tolist()
    if not 0 < len(falls) <= tokens // (TOKEN_IDS // 2):
        return [(0, len(turns))]
    return list(pairwise([0, *falls, len(turns)]))


def _distinct_ids(firsts: Int32s, counts: Int32s) -> int:
    """Count the ids in at least one run: sorted by start, each run adds the part beyond the earlier ones."""
    order = np.argsort(firsts, kind="stable")
    starts = firsts[order].astype(np.int64)
    stops = starts + counts[order]
    covered_to = np.concatenate(([0], np.maximum.accumulate(stops)[:-1]))
    return int(np.maximum(stops - np.maximum(starts, covered_to), 0).sum())
