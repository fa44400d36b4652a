"""Conversion of trace rows into turns: their times, and which of their tokens are equal.

Rows without a session arrive by the clock. The rows of a session are a closed loop: only its first row arrives by the
clock. Sessions follow one another, in order of their start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from random import Random

import numpy as np

from lockstep.sim.workload.arrivals import arrival_times_us
from lockstep.sim.workload.token_runs import TOKEN_IDS, FreshTokens, append_run, cut_runs
from lockstep.sim.workload.trace_formats import TraceRow
from lockstep.sim.workload.traces import Trace
from lockstep.sim.workload.turns import Int32s, TurnLabel, Turns, TurnsBuilder, TurnStart, WorkloadError

SHARED_IDS_MAX = TOKEN_IDS // 2  # recorded prompts use at most half of the ids; the rest is for new content

CLOCKLESS = "does not record when"  # in the note about a trace without a clock

_Prompt = Callable[[int, TraceRow, FreshTokens], Sequence[int]]  # (position of the row, row, fresh) -> runs


def turns_of_trace(source: str, trace: Trace, *, seed: int, rate: float | None) -> tuple[Turns, tuple[str, ...]]:
    """Return the turns of a trace in its own time, the first at 0, and notes on changes, one sentence each.

    Args:
        rate: session or row starts per second, for a trace without start times. They are drawn as a Poisson process
            from `seed`. Ignored for a trace with a clock, for which nothing is drawn.
    Raises: WorkloadError if a trace without start times has no rate.
    """
    rows = trace.rows
    starts_us, notes = _starts_us(source, trace, seed, rate)
    chains: dict[str | int, list[int]] = {}
    for position, row in enumerate(rows):
        chains.setdefault(row.session or position, []).append(position)
    ordered = sorted(chains.values(), key=lambda chain: starts_us[chain[0]])  # stable: equal times keep their order
    first_us = starts_us[ordered[0][0]]

    prompt_of, shared_stop, more_notes = _identity(trace)
    fresh = FreshTokens(shared_stop)
    turns = TurnsBuilder()
    for chain in ordered:
        before: TraceRow | None = None
        for position in chain:
            row = rows[position]
            prompt = prompt_of(position, row, fresh)
            if before is None:
                start = TurnStart(arrival_us=starts_us[position] - first_us)
            else:
                start = TurnStart(after=len(turns) - 1, think_us=_think_us(before, row))
            turns.append(
                start,
                TurnLabel("line{0}", row.line),
                prompt=prompt,
                prompt_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                output_first_token=fresh.take(row.output_tokens),
                tenant=row.tenant,
            )
            before = row
    return turns.build(), (*trace.notes, *notes, *more_notes)


def _think_us(before: TraceRow, row: TraceRow) -> int:
    if row.think_us is not None:
        return row.think_us
    return max(0, row.arrival_us - max(before.arrival_us, 0) - before.busy_us)


def _starts_us(source: str, trace: Trace, seed: int, rate: float | None) -> tuple[Sequence[int], tuple[str, ...]]:
    """Return the time of each row as if it arrived by the clock, in us, and notes."""
    rows = trace.rows
    if trace.has_clock:
        return [row.arrival_us for row in rows], ()
    if rate is None and not trace.format.session_clock:
        hint = (
            "give --rate, such as --rate 6.5 for that many a second as a Poisson process, or --rate inf for all at once"
        )
        raise WorkloadError(source, "it has lengths but no arrival times, and no `rate` was given", hint)
    groups: dict[str | int, int] = {}
    members = [groups.setdefault(row.scope or row.session or n, len(groups)) for n, row in enumerate(rows)]
    what = "sessions" if any(row.session for row in rows) else "requests"
    if rate is None or rate == math.inf:
        begins_us = [0] * len(groups)
        note = f"the file {CLOCKLESS} its {len(groups):,} {what} begin: all at once"
    else:
        drawn = arrival_times_us("poisson", rate, 1.0, Random(f"{seed}/arrivals"))
        begins_us = [next(drawn) for _ in groups]
        note = f"the file {CLOCKLESS} its {len(groups):,} {what} begin: drawn as a Poisson process"
    if not trace.format.session_clock:
        return [begins_us[member] for member in members], (note,)
    return [begins_us[member] + row.arrival_us for member, row in zip(members, rows, strict=True)], (note,)


# --- identity of tokens -----------------------------------------------------------------------------------------------


def _identity(trace: Trace) -> tuple[_Prompt, int, tuple[str, ...]]:
    """Return the function that makes a row's prompt, the first id that no prompt shares, and notes."""
    rows = trace.rows
    match trace.format.content:
        case "hash_ids":
            return _by_hash_ids(rows, trace.format.block_tokens)
        case "block_runs":
            return _by_block_runs(rows, trace.format.block_tokens)
        case "token_runs":
            return _by_token_runs(rows)
        case "token_ids" if any(row.content for row in rows):
            return _by_token_ids(rows)
    return _fresh_prompt, 0, ()


def _fresh_prompt(_position: int, row: TraceRow, fresh: FreshTokens) -> Sequence[int]:
    return fresh.take(row.input_tokens), row.input_tokens


def _by_token_runs(rows: Sequence[TraceRow]) -> tuple[_Prompt, int, tuple[str, ...]]:
    """Take runs of tokens as they are."""
    stop = max(
        (first + count for row in rows for first, count in zip(row.content[::2], row.content[1::2], strict=True))
    )
    if stop > SHARED_IDS_MAX:
        problem = f"its prompts have token ids up to {stop:,}, the largest is {SHARED_IDS_MAX:,}"
        raise WorkloadError("prompt runs", problem, "import a part of the file: --limit")
    return lambda _position, row, _fresh: row.content, stop, ()


def _by_hash_ids(rows: Sequence[TraceRow], block_tokens: int) -> tuple[_Prompt, int, tuple[str, ...]]:
    """Map hash id h to the tokens [block_tokens * h, block_tokens * (h + 1)); too large ids are renumbered."""
    ids_max = SHARED_IDS_MAX // block_tokens
    stop = 1 + max((max(row.content, default=-1) for row in rows), default=-1)
    numbers: dict[int, int] = {}
    notes: tuple[str, ...] = ()
    if stop > ids_max:
        for row in rows:
            for hash_id in row.content:
                numbers.setdefault(hash_id, len(numbers))
        stop = min(len(numbers), ids_max)
        notes = (f"hash ids reach beyond {ids_max - 1:,}: numbered anew in order of appearance",)

    def prompt_of(_position: int, row: TraceRow, fresh: FreshTokens) -> Sequence[int]:
        if not row.content:
            return _fresh_prompt(_position, row, fresh)
        hash_ids = [numbers[h] % ids_max for h in row.content] if numbers else row.content
        return _prompt_of_hash_ids(hash_ids, row.input_tokens, block_tokens)

    return prompt_of, stop * block_tokens, notes


def _prompt_of_hash_ids(hash_ids: Sequence[int], input_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Return the runs of a prompt of ceil(input_tokens / block_tokens) ids; the last id may have fewer tokens."""
    runs: list[int] = []
    first = previous = hash_ids[0]
    tokens_left = input_tokens
    for hash_id in hash_ids[1:]:
        if hash_id != previous + 1:
            count = (previous + 1 - first) * block_tokens
            append_run(runs, first * block_tokens, count)
            tokens_left -= count
            first = hash_id
        previous = hash_id
    append_run(runs, first * block_tokens, tokens_left)
    return tuple(runs)


def _by_block_runs(rows: Sequence[TraceRow], block_tokens: int) -> tuple[_Prompt, int, tuple[str, ...]]:
    """Number the blocks of each scope separately. The tokens after a prompt's last whole block are unique to it."""
    stops: dict[str, int] = {}
    for row in rows:
        last = max((first + count for first, count in zip(row.content[::2], row.content[1::2], strict=True)), default=0)
        stops[row.scope] = max(stops.get(row.scope, 0), last)
    blocks = sum(stops.values())
    if blocks * block_tokens > SHARED_IDS_MAX:
        problem = f"its sessions have {blocks:,} blocks of {block_tokens} tokens, more than {SHARED_IDS_MAX:,} tokens"
        raise WorkloadError("block runs", problem, "number the blocks of each session from 0, without gaps")
    bases: dict[str, int] = {}
    base = 0
    for scope, stop in stops.items():
        bases[scope] = base
        base += stop

    def prompt_of(_position: int, row: TraceRow, fresh: FreshTokens) -> Sequence[int]:
        runs: list[int] = []
        for first, count in zip(row.content[::2], row.content[1::2], strict=True):
            append_run(runs, (bases[row.scope] + first) * block_tokens, count * block_tokens)
        rest = row.input_tokens - sum(row.content[1::2]) * block_tokens
        if rest:
            append_run(runs, fresh.take(rest), rest)
        return runs

    return prompt_of, base * block_tokens, ()


def _by_token_ids(rows: Sequence[TraceRow]) -> tuple[_Prompt, int, tuple[str, ...]]:
    """Make prompts share their common prefixes.

    In sorted order a prompt shares most with its neighbour, so each prompt consists of a prefix of the previous one and
    a run of unused ids.
    """
    prompts = {position: np.array(row.content, dtype=">u4") for position, row in enumerate(rows) if row.content}
    order = sorted(prompts, key=lambda position: prompts[position].tobytes())
    runs_of: dict[int, list[int]] = {}
    before: Int32s = np.empty(0, np.int32)
    runs: list[int] = []
    next_id = 0
    for _, same in groupby(order, key=lambda position: prompts[position].tobytes()):
        positions = list(same)
        prompt = prompts[positions[0]]
        shared = min(len(prompt), len(before))
        differs = np.flatnonzero(prompt[:shared] != before[:shared])
        shared = int(differs[0]) if len(differs) else shared
        runs = cut_runs(runs, shared)
        new = len(prompt) - shared
        if new:
            append_run(runs, next_id, new)
            next_id += new
        if next_id > SHARED_IDS_MAX:
            problem = f"its prompts have more than {SHARED_IDS_MAX:,} different tokens"
            raise WorkloadError("token ids", problem, "split the file")
        before = prompt
        for position in positions:
            runs_of[position] = runs

    def prompt_of(position: int, row: TraceRow, fresh: FreshTokens) -> Sequence[int]:
        return runs_of[position] if position in runs_of else _fresh_prompt(position, row, fresh)

    return prompt_of, next_id, ()
