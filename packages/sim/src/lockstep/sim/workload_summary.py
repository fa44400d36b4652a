"""A workload in a dozen numbers: how many, how fast, how long, how much of it is shared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.sim.arrivals import mean_rate
from lockstep.sim.turns import Turn


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Lengths in tokens. Percentiles are lengths that occur: the smallest that at least p % do not exceed."""

    mean: float
    min: int
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    turns: int
    follow_ups: int  # turns that wait for an earlier one (closed loop)
    duration_us: int  # first to last arrival by the clock; follow-ups come when they come
    arrivals_per_s: float  # of the turns that arrive by the clock; inf if all do at one instant
    prompt: LengthSummary
    output: LengthSummary
    sharing_ratio: float  # part of all prompt tokens that an unbounded prefix cache would have seen before


def summarize(turns: Sequence[Turn]) -> WorkloadSummary:
    """Measure a workload of at least one turn."""
    arrivals_us = [turn.arrival_us for turn in turns if turn.after is None]
    return WorkloadSummary(
        turns=len(turns),
        follow_ups=len(turns) - len(arrivals_us),
        duration_us=arrivals_us[-1] - arrivals_us[0],
        arrivals_per_s=mean_rate(arrivals_us),
        prompt=_summarize_lengths([turn.prompt_tokens for turn in turns]),
        output=_summarize_lengths([turn.output_tokens for turn in turns]),
        sharing_ratio=_sharing_ratio(turns),
    )


def _summarize_lengths(lengths: list[int]) -> LengthSummary:
    p50, p90, p99 = (int(value) for value in np.percentile(lengths, (50, 90, 99), method="inverted_cdf"))
    return LengthSummary(sum(lengths) / len(lengths), min(lengths), p50, p90, p99, max(lengths))


def _sharing_ratio(turns: Sequence[Turn]) -> float:
    """Prompt tokens seen before, over all prompt tokens.

    Ids are chained (see token_runs.py), so a token is new exactly when its id is: what must be computed once is every
    id in any prompt, less those the model produced itself.
    """
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    outputs = [number for turn in turns for number in (turn.output_first_token, turn.output_tokens)]
    prompts = [number for turn in turns for number in turn.prompt]
    new_tokens = _distinct_ids(prompts + outputs) - _distinct_ids(outputs)
    return 1 - new_tokens / prompt_tokens


def _distinct_ids(runs: Iterable[int]) -> int:
    """Count the ids that lie in at least one run: sorted by start, each run adds what reaches beyond the earlier."""
    firsts, counts = np.array(list(runs), dtype=np.int64).reshape(-1, 2).T
    order = np.argsort(firsts, kind="stable")
    firsts, stops = firsts[order], (firsts + counts)[order]
    covered_to = np.concatenate(([0], np.maximum.accumulate(stops)[:-1]))
    return int(np.maximum(stops - np.maximum(firsts, covered_to), 0).sum())
