"""Fit a model to a workload, and measure how similar the model is.

    model = fit(open_workload("conversation_trace.jsonl.gz", seed=7))
    comparison = compare(workload.turns, draw_model(model, seed=7))

fitted.py explains the model and how it is sampled. The model of arrivals is found by trial: every candidate is drawn a
few times, and the simplest one with bursts as large as the trace's is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.sim.workload.arrivals import mean_rate
from lockstep.sim.workload.fitted import (
    KINDS,
    ArrivalModel,
    FollowUpModel,
    Quantiles,
    RequestModel,
    ThinkModel,
    WorkloadModel,
    arrival_times_s,
)
from lockstep.sim.workload.reuse import hit_ratio, prompts_in_pieces
from lockstep.sim.workload.summary import sharing_ratio
from lockstep.sim.workload.turns import Int64s, Turns

Floats = NDArray[np.float64]

ROWS_MAX = 8_192  # rows of each table of a model, at most
STRATA_MAX = 16_384
WINDOWS_S = (1, 10, 60)  # windows in which dispersion is measured
CAPACITY_SHARES = (64, 8, 2)  # caches of 1/64, 1/8 and half of all different prompt tokens

_GOOD_ENOUGH = 0.15  # mean difference of logarithms of the measures of burstiness: 15 %
_TRIALS = 3
_TRIALS_ARRIVALS_MAX = 50_000
_TICKS_BATCH = 2.0  # mean arrivals per instant above which arrivals form batches

_STANDARD = NormalDist()
_TAILS = 2.0 ** -np.arange(8, 17)  # probabilities beyond the grid of 1/128
_GRID = np.concatenate((_TAILS[::-1], np.linspace(1 / 128, 127 / 128, 127), 1 - _TAILS))


# --- measures ---------------------------------------------------------------------------------------------------------


class Burstiness(NamedTuple):
    """Measures of arrivals by the clock; None if there are too few, or all are simultaneous."""

    rate_per_s: float | None
    gap_cv: float | None  # coefficient of variation: 1 for Poisson
    dispersion: tuple[float | None, ...]  # variance over mean of the counts in each of WINDOWS_S: 1 for Poisson


def burstiness(arrivals_us: Int64s) -> Burstiness:
    """Measure ascending arrival times."""
    span_us = int(arrivals_us[-1] - arrivals_us[0])
    if not span_us:
        return Burstiness(None, None, (None,) * len(WINDOWS_S))
    if len(arrivals_us) == 2:
        return Burstiness(mean_rate(arrivals_us), None, (None,) * len(WINDOWS_S))
    gaps = np.diff(arrivals_us).astype(np.float64)
    dispersion: list[float | None] = []
    for window_s in WINDOWS_S:
        windows = span_us // (window_s * 10**6)
        if windows < 10:
            dispersion.append(None)
            continue
        counts = np.bincount((arrivals_us - arrivals_us[0]) // (window_s * 10**6), minlength=windows)[:windows]
        dispersion.append(float(counts.var() / counts.mean()) if counts.any() else None)
    return Burstiness(mean_rate(arrivals_us), float(gaps.std() / gaps.mean()), tuple(dispersion))


def rank_correlation(a: NDArray[np.int32], b: NDArray[np.int32]) -> float | None:
    """Return Spearman's coefficient; None if one column is constant."""
    ranks = _ranks(a), _ranks(b)
    if ranks[0].std() == 0 or ranks[1].std() == 0:
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: NDArray[Any]) -> Floats:
    """Return ranks from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison."""

    what: str
    trace: float | None
    generated: float | None
    kind: str  # "count", "number" or "share", for printing

    @property
    def off(self) -> float | None:
        """Error of the generated value: a difference of shares, or relative to the trace; None if unknown."""
        if self.trace is None or self.generated is None:
            return None
        if self.kind == "share":
            return self.generated - self.trace
        return self.generated / self.trace - 1 if self.trace else None


def compare(trace: Turns, generated: Turns) -> list[Row]:
    """Return every measure that a model reproduces, of trace and generated turns."""
    different = (1 - sharing_ratio(trace)) * int(trace.prompt_tokens.sum(dtype=np.int64))
    capacities = [max(1, int(different / share)) for share in CAPACITY_SHARES]
    both = [_measure(turns, capacities) for turns in (trace, generated)]
    return [Row(what, value, both[1][what][0], kind) for what, (value, kind) in both[0].items()]


def _measure(turns: Turns, capacities: Sequence[int]) -> dict[str, tuple[float | None, str]]:
    by_clock = turns.by_clock_rows
    bursts = burstiness(turns.arrival_us[by_clock])
    rows: dict[str, tuple[float | None, str]] = {"turns": (len(turns), "count")}
    is_closed_loop = len(by_clock) < len(turns)
    if is_closed_loop:
        rows["sessions"] = (len(by_clock), "count")
        rows["turns per session"] = (len(turns) / len(by_clock), "number")
    rows["sessions/s" if is_closed_loop else "requests/s"] = (bursts.rate_per_s, "number")
    rows["gap cv"] = (bursts.gap_cv, "number")
    for window_s, dispersion in zip(WINDOWS_S, bursts.dispersion, strict=True):
        rows[f"dispersion {window_s} s"] = (dispersion, "number")
    for name, lengths in (("prompt", turns.prompt_tokens), ("output", turns.output_tokens)):
        rows[f"{name} mean"] = (float(lengths.mean()), "count")
        for share in (10, 50, 90, 99):
            rows[f"{name} p{share}"] = (float(np.percentile(lengths, share)), "count")
    rows["rank correlation"] = (rank_correlation(turns.prompt_tokens, turns.output_tokens), "share")
    if is_closed_loop:
        thinks_s = turns.think_us[turns.after >= 0] / 1e6
        for share in (50, 90):
            rows[f"think p{share} s"] = (float(np.percentile(thinks_s, share)), "number")
    rows["hit ratio, unbounded"] = (sharing_ratio(turns), "share")
    for capacity in capacities:
        rows[f"hit ratio, {_short(capacity)} tokens"] = (hit_ratio(turns, capacity), "share")
    return rows


def _short(tokens: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)


# --- the fit ----------------------------------------------------------------------------------------------------------


def fit(turns: Turns, provenance: Mapping[str, object]) -> WorkloadModel:
    """Fit a model to the turns of a workload. `provenance` describes the workload and is stored in the file."""
    by_clock = turns.by_clock_rows
    paces, think = _fit_think(turns)
    return WorkloadModel(
        provenance=dict(provenance),
        turns=len(turns),
        arrivals=_fit_arrivals(turns.arrival_us[by_clock]),
        requests=_fit_requests(turns, paces),
        follow_ups=_fit_follow_ups(turns),
        think=think,
    )


# --- arrivals


class _Candidate(NamedTuple):
    model: ArrivalModel
    error: float
    numbers: int  # parameters of the model

    def evidence(self) -> dict[str, float | str]:
        parts = f", {len(self.model.profile)} parts of {self.model.profile_part_s:g} s" if self.model.profile else ""
        shape = f" {self.model.shape:.3g}" if self.model.process == "weibull" else ""
        return {"tried": f"{self.model.process}{shape}{parts}", "error": round(self.error, 3), "numbers": self.numbers}


def _fit_arrivals(arrivals_us: Int64s) -> ArrivalModel:
    """Return the simplest candidate with a small error, or else the best candidate."""
    measured = burstiness(arrivals_us)
    if measured.gap_cv is None:  # too few arrivals for a shape
        return ArrivalModel(rate=measured.rate_per_s)
    instants_us, sizes = np.unique(arrivals_us, return_counts=True)
    has_batches = sizes.mean() >= _TICKS_BATCH and len(instants_us) > 2
    times_us = instants_us if has_batches else arrivals_us
    strata = min(STRATA_MAX, len(times_us) - 1)
    duration_s = int(arrivals_us[-1]) / 1e6
    candidates = []
    for part_s in (None, 600.0, 60.0, 15.0):
        if part_s is not None and not 2 <= duration_s / part_s <= 1_000:
            continue
        profile = _profile(arrivals_us, part_s)
        if has_batches:
            gaps = np.diff(times_us) / 1e6
            local = _local(profile, part_s, times_us)
            seen = local > 0
            batches = _quantiles(sizes[seen] / local[seen])
            if profile:  # rescale the batches, so that rounding and profile do not change the rate
                batches = Quantiles(
                    batches.at, tuple(value * float(sizes.mean()) / batches.mean() for value in batches.values)
                )
        else:
            gaps = np.diff(_operational(profile, part_s, times_us))
            batches = None
        for process in ("exponential", "weibull", "empirical"):
            model = ArrivalModel(
                rate=measured.rate_per_s,
                process=process,
                shape=_weibull_shape(gaps) if process == "weibull" else 1.0,
                gaps=_quantiles(gaps / gaps.mean()) if process == "empirical" else None,
                batches=batches,
                strata=strata,
                profile=profile,
                profile_part_s=part_s or 60.0,
            )
            numbers = {"exponential": 1, "weibull": 2, "empirical": 2 * len(_GRID)}[process] + len(profile)
            candidates.append(_Candidate(model, _error(model, measured, len(arrivals_us)), numbers))
    good = [candidate for candidate in candidates if candidate.error <= _GOOD_ENOUGH]
    chosen = min(good, key=lambda c: c.numbers) if good else min(candidates, key=lambda c: c.error)
    evidence = tuple(candidate.evidence() for candidate in candidates)
    return msgspec.structs.replace(chosen.model, evidence=evidence, chosen=str(chosen.evidence()["tried"]))


def _profile(arrivals_us: Int64s, part_s: float | None) -> tuple[float, ...]:
    if part_s is None:
        return ()
    counts = np.bincount((arrivals_us / (part_s * 1e6)).astype(np.int64))
    return tuple(np.round(counts / counts.mean(), 4).tolist())


def _local(profile: tuple[float, ...], part_s: float | None, times_us: Int64s) -> Floats:
    """Return the profile at these times."""
    if not profile or part_s is None:
        return np.ones(len(times_us))
    return np.array(profile)[np.minimum((times_us / (part_s * 1e6)).astype(np.int64), len(profile) - 1)]


def _operational(profile: tuple[float, ...], part_s: float | None, times_us: Int64s) -> Floats:
    """Return times by the operational clock, which runs at the speed of the profile."""
    times_s: Floats = times_us / 1e6
    if not profile or part_s is None:
        return times_s
    begun = np.concatenate((np.zeros(1), np.cumsum(np.array(profile) * part_s)))
    operational: Floats = np.interp(times_s, np.arange(len(begun)) * part_s, begun)
    return operational


def _quantiles(values: Floats) -> Quantiles:
    """Return the quantiles of these values, on a grid that is finer in the tails."""
    least = 1 / len(values)  # no step of the distribution is smaller than one value
    grid = np.array([probability for probability in _GRID if least <= probability <= 1 - least])
    at = np.concatenate((np.zeros(1), grid, np.ones(1)))
    return Quantiles(tuple(at.tolist()), tuple(float(f"{value:.6g}") for value in np.quantile(values, at)))


def _weibull_shape(gaps: Floats) -> float:
    """Return the shape with the coefficient of variation of these gaps, by bisection."""
    square = 1 + float(gaps.var()) / float(gaps.mean()) ** 2
    low, high = 0.06, 20.0  # with smaller shapes half of all gaps are 0 microseconds
    for _ in range(60):
        shape = math.sqrt(low * high)
        if math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape) > math.log(square):
            low = shape
        else:
            high = shape
    return round(math.sqrt(low * high), 4)


def _error(model: ArrivalModel, measured: Burstiness, count: int) -> float:
    """Return the mean difference of the logarithms of rate, CV and dispersions, over a few seeds."""
    wanted = [measured.rate_per_s, measured.gap_cv, *measured.dispersion]
    count = min(count, _TRIALS_ARRIVALS_MAX)
    differences = []
    for seed in range(_TRIALS):
        times_us = np.rint(arrival_times_s(model, count, model.rate or 1.0, seed) * 1e6).astype(np.int64)
        drawn = burstiness(times_us)
        for one, other in zip(wanted, [drawn.rate_per_s, drawn.gap_cv, *drawn.dispersion], strict=True):
            if one is not None and other is not None:
                differences.append(abs(math.log(max(one, 1e-3)) - math.log(max(other, 1e-3))))
    return float(np.mean(differences)) if differences else math.inf


# --- lengths and sharing


def _fit_requests(turns: Turns, paces: Floats) -> RequestModel:
    by_clock = turns.by_clock_rows
    roots = turns.root()
    session_turns = np.bincount(roots, minlength=len(turns))[by_clock]
    shared, lag = _reuse(turns)
    rows = np.stack(
        (
            session_turns,
            shared,
            lag,
            turns.prompt_tokens[by_clock] - shared,
            turns.output_tokens[by_clock],
        ),
        axis=1,
    )
    kinds = _kinds(turns)[by_clock]
    order = np.lexsort((rows[:, 4], rows[:, 2], turns.prompt_tokens[by_clock]))
    picked = order[_spread(len(rows))]
    return RequestModel(*(tuple(column.tolist()) for column in (*rows[picked].T, paces[picked], kinds[picked])))


def _reuse(turns: Turns) -> tuple[Int64s, Int64s]:
    """Return for each first turn its shared tokens, and the number of first turns since the last use of their end."""
    by_clock = turns.by_clock_rows
    used: dict[int, int] = {}  # piece -> last first turn that contains it
    shared, lags = np.zeros(len(by_clock), np.int64), np.zeros(len(by_clock), np.int64)
    for opening, (pieces, lengths) in enumerate(prompts_in_pieces(turns, by_clock)):
        tokens, last = 0, opening
        is_shared = True
        for piece, length in zip(pieces, lengths, strict=True):
            if is_shared and piece in used:
                tokens += length
                last = used[piece]
            else:
                is_shared = False
            used[piece] = opening
        shared[opening], lags[opening] = tokens, opening - last
    return shared, lags


def _fit_follow_ups(turns: Turns) -> FollowUpModel:
    rows = np.flatnonzero(turns.after >= 0)
    if not len(rows):
        return FollowUpModel()
    before = turns.after[rows].astype(np.int64)
    prompts = dict(zip(rows.tolist(), turns.prompts(rows), strict=True))
    prompts |= dict(zip(before.tolist(), turns.prompts(before), strict=True))
    histories = zip(
        before.tolist(), turns.output_first_token[before].tolist(), turns.output_tokens[before].tolist(), strict=True
    )
    kept = np.array(
        [
            _common_tokens((*prompts[earlier], first, count), prompts[row])
            for row, (earlier, first, count) in zip(rows.tolist(), histories, strict=True)
        ]
    )
    before_tokens = turns.prompt_tokens[before].astype(np.int64)
    answers = turns.output_tokens[before].astype(np.int64)
    columns = np.stack(
        (
            _kinds(turns)[rows],
            before_tokens,
            before_tokens + answers - kept,
            answers,
            turns.prompt_tokens[rows] - kept,
            turns.output_tokens[rows],
        ),
        axis=1,
    )
    order = np.lexsort((columns[:, 4], columns[:, 1], columns[:, 0]))
    picked = columns[order][_spread(len(columns))]
    return FollowUpModel(*(tuple(column.tolist()) for column in picked.T))


def _fit_think(turns: Turns) -> tuple[Floats, ThinkModel | None]:
    """Return the pace of each session, in the order of their first turns, and the model of think times around it."""
    later = np.flatnonzero(turns.after >= 0)
    if not len(later):
        return np.zeros(len(turns.by_clock_rows)), None
    ranks = _ranks(turns.think_us[later])
    scores = np.zeros(len(turns))
    scores[later] = [_STANDARD.inv_cdf(rank / (len(later) + 1)) for rank in ranks.tolist()]
    roots = turns.root()
    counts = np.bincount(roots[later], minlength=len(turns))
    paces = np.bincount(roots[later], scores[later], minlength=len(turns)) / np.maximum(counts, 1)
    rest = scores - paces[roots]
    degrees = len(later) - np.count_nonzero(counts)  # the pace of each session takes one degree of freedom
    spread = math.sqrt(float(np.sum(rest[later] ** 2)) / degrees) if degrees > 0 else 0.0
    in_a_row = later[turns.after[turns.after[later]] >= 0]
    behind = rest[turns.after[in_a_row]]
    memory = float(np.sum(rest[in_a_row] * behind) / np.sum(behind**2)) if np.any(behind) else 0.0
    seconds = _quantiles(turns.think_us[later] / 1e6)
    think = ThinkModel(seconds, round(min(spread, 10.0), 4), round(min(max(memory, -0.95), 0.95), 4))
    return np.round(paces[turns.by_clock_rows], 4), think


def _kinds(turns: Turns) -> Int64s:
    """Return the kind of each turn's session, [n]: its quarter by longest prompt, and within that its half by turns."""
    roots = turns.root()
    longest = np.zeros(len(turns), np.int64)
    np.maximum.at(longest, roots, turns.prompt_tokens)
    counts = np.bincount(roots, minlength=len(turns))
    sessions = np.unique(roots[turns.after >= 0])
    kinds = np.zeros(len(turns), np.int64)
    by_length = sessions[np.argsort(longest[sessions], kind="stable")]
    for quarter, part in enumerate(np.array_split(by_length, KINDS // 2)):
        by_turns = part[np.argsort(counts[part], kind="stable")]
        for half, rows in enumerate(np.array_split(by_turns, 2)):
            kinds[rows] = 2 * quarter + half
    return kinds[roots]


def _common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens at the start of both prompts, given as runs."""
    common = 0
    i = j = 0
    one_left, other_left = list(one), list(other)
    while i < len(one_left) and j < len(other_left):
        step = min(one_left[i + 1], other_left[j + 1])
        if one_left[i] != other_left[j]:
            if step:
                break
        common += step
        for runs, place in ((one_left, i), (other_left, j)):
            runs[place] += step
            runs[place + 1] -= step
        i += 2 * (one_left[i + 1] == 0)
        j += 2 * (other_left[j + 1] == 0)
    return common


def _spread(count: int) -> Int64s:
    """Return at most ROWS_MAX of `count` positions, evenly spread."""
    if count <= ROWS_MAX:
        return np.arange(count)
    return (2 * np.arange(ROWS_MAX) + 1) * count // (2 * ROWS_MAX)
