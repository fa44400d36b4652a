"""A workload: every request to come, in order, with the digest that says which workload it was.

    workload = open_workload("conversation_trace.jsonl.gz", seed=7, rate=6.5)
    workload = open_workload("gen:n=500,rate=4,input=lognormal:900:0.75", seed=7)

Traces are read by traces.py, specs by generate.py; both end as turns here, and nothing after knows the difference.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lockstep.sim.arrivals import RATE_MIN, mean_rate, stretch
from lockstep.sim.generate import PREFIX, generate, parse_spec, with_rate
from lockstep.sim.token_runs import TOKEN_IDS, FreshTokens, append_run, prompt_ids
from lockstep.sim.traces import HASH_BLOCK_TOKENS, SkippedRows, Trace, TraceRow, read_trace
from lockstep.sim.turns import TIME_US_MAX, Turn, WorkloadError
from lockstep.sim.workload_summary import LengthSummary, WorkloadSummary, summarize

__all__ = [
    "LengthSummary",
    "SkippedRows",
    "Turn",
    "Workload",
    "WorkloadError",
    "WorkloadSummary",
    "open_workload",
    "prompt_ids",
    "workload_digest",
]

_HASH_IDS_MAX = TOKEN_IDS // 2 // HASH_BLOCK_TOKENS  # prompts take at most half of the ids; outputs need the rest


@dataclass(frozen=True)
class Workload:
    name: str  # of the file, without endings; or "generated"
    source: str  # path or generator spec, as given
    format: str  # "mooncake", "azure", "vidur" or "generated"
    digest: str  # BLAKE2b-128 of the turns, hexadecimal: equal digests, equal workloads
    turns: Sequence[Turn]  # those that arrive by the clock in ascending order; a turn stands behind its `after`
    skipped: SkippedRows = field(default=SkippedRows())
    notes: tuple[str, ...] = ()  # what was done to a trace that its file does not show, one sentence each

    def summary(self) -> WorkloadSummary:
        """Counts, duration, lengths and sharing, computed afresh."""
        return summarize(self.turns)


def open_workload(
    spec: str,
    *,
    seed: int,
    rate_scale: float = 1.0,
    limit: int | None = None,
    skip_bad_rows: bool = False,
    rate: float | None = None,
) -> Workload:
    """Read a trace file, or generate from a spec that begins with `gen:`.

    Args:
        seed: of a generator. A trace is what it is: nothing about it is drawn.
        rate: arrivals per second. A trace is stretched to it as a whole, bursts and silences included; for a generator
            it replaces the spec's own. `math.inf` makes all arrive at once. Think times are never stretched.
        rate_scale: multiplies the rate, whichever it is: 2 halves every gap.
        limit: keep the first so many turns, by arrival. The whole file is checked all the same.
        skip_bad_rows: leave bad rows out, and say so in `Workload.skipped`, instead of raising.
    Raises: WorkloadError, before any of it is simulated.
    """
    _check_arguments(spec, rate_scale, limit, rate)
    if spec.startswith(PREFIX):
        generator = with_rate(parse_spec(spec), rate=rate, rate_scale=rate_scale)
        turns = generate(generator, seed=seed, limit=limit)
        _check_duration(spec, max(turn.arrival_us for turn in turns))
        return Workload("generated", spec, "generated", workload_digest(turns), turns)
    path = Path(spec)
    trace = read_trace(path, skip_bad_rows=skip_bad_rows)
    rows = trace.rows if limit is None else trace.rows[:limit]
    arrivals_us = _rescale(spec, [row.arrival_us - rows[0].arrival_us for row in rows], rate, rate_scale)
    _check_duration(spec, arrivals_us[-1])
    turns, notes = _turns_of_trace(trace, arrivals_us)
    digest = workload_digest(turns)
    return Workload(path.name.split(".")[0], spec, trace.format, digest, turns, trace.skipped, trace.notes + notes)


def workload_digest(turns: Sequence[Turn]) -> str:
    """BLAKE2b-128 over the msgpack form of every field of every turn in order: content alone, no file name."""
    content = [
        (
            turn.arrival_us,
            turn.prompt,
            turn.output_tokens,
            turn.output_first_token,
            turn.label,
            turn.tenant,
            turn.after,
            turn.think_us,
            *filter(None, (turn.grammar,)),
        )
        for turn in turns
    ]
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).hexdigest()


def _check_arguments(spec: str, rate_scale: float, limit: int | None, rate: float | None) -> None:
    if not 1e-6 <= rate_scale <= 1e6:
        raise WorkloadError(spec, f"`rate_scale` must be from 1e-6 to 1e6, got `{rate_scale}`", "2 halves every gap")
    if rate is not None and not rate >= RATE_MIN:
        hint = "arrivals per second, such as 6.5; inf makes all arrive at once"
        raise WorkloadError(spec, f"`rate` must be at least {RATE_MIN:g}, got `{rate}`", hint)
    if limit is not None and limit < 1:
        raise WorkloadError(spec, f"`limit` must be at least 1, got `{limit}`", "leave it out to keep every request")


def _check_duration(spec: str, last_arrival_us: int) -> None:
    if last_arrival_us > TIME_US_MAX:
        raise WorkloadError(spec, "lasts more than 285 years at this rate", "raise `rate` or `rate_scale`")


def _rescale(spec: str, arrivals_us: list[int], rate: float | None, rate_scale: float) -> list[int]:
    """Stretch recorded arrivals to `rate`, then by `rate_scale`."""
    if rate is None or rate == math.inf:
        return stretch(arrivals_us, 1 / rate_scale if rate is None else 0.0)
    if len(arrivals_us) == 1:
        return arrivals_us
    recorded = mean_rate(arrivals_us)
    if recorded == math.inf:
        problem = f"cannot be stretched to {rate:g} requests/s: all {len(arrivals_us)} arrive at one instant"
        raise WorkloadError(spec, problem, "leave out --rate, or raise --limit so that it reaches a second instant")
    return stretch(arrivals_us, recorded / (rate * rate_scale))


def _turns_of_trace(trace: Trace, arrivals_us: Sequence[int]) -> tuple[list[Turn], tuple[str, ...]]:
    """Give the first len(arrivals_us) rows their token ids: hash id h is [512 h, 512 (h + 1)), all else is new."""
    rows = trace.rows
    notes: tuple[str, ...] = ()
    hash_ids_stop = 1 + max((max(row.hash_ids, default=-1) for row in rows), default=-1)
    if hash_ids_stop > _HASH_IDS_MAX:
        rows, hash_ids_stop = _renumber(rows)
        notes = (f"hash ids reach beyond {_HASH_IDS_MAX - 1:,}: numbered anew in order of appearance",)
    fresh = FreshTokens(hash_ids_stop * HASH_BLOCK_TOKENS)
    turns = []
    for index, (row, arrival_us) in enumerate(zip(rows, arrivals_us, strict=False)):
        if row.hash_ids:
            prompt = _prompt_of_hash_ids(row.hash_ids, row.input_tokens)
        else:
            prompt = (fresh.take(row.input_tokens), row.input_tokens)
        output_first_token = fresh.take(row.output_tokens)
        label = f"line{row.line}"
        turns.append(Turn(index, arrival_us, prompt, row.input_tokens, row.output_tokens, output_first_token, label))
    return turns, notes


def _prompt_of_hash_ids(hash_ids: Sequence[int], input_tokens: int) -> tuple[int, ...]:
    """Runs of a prompt of ceil(input_tokens / 512) hash ids, the last of which may stand for fewer than 512 tokens."""
    runs: list[int] = []
    first = previous = hash_ids[0]
    tokens_left = input_tokens
    for hash_id in hash_ids[1:]:
        if hash_id != previous + 1:
            count = (previous + 1 - first) * HASH_BLOCK_TOKENS
            append_run(runs, first * HASH_BLOCK_TOKENS, count)
            tokens_left -= count
            first = hash_id
        previous = hash_id
    append_run(runs, first * HASH_BLOCK_TOKENS, tokens_left)
    return tuple(runs)


def _renumber(rows: Sequence[TraceRow]) -> tuple[list[TraceRow], int]:
    """Replace large hash ids by small ones; only past _HASH_IDS_MAX different ones do two of them coincide."""
    numbers: dict[int, int] = {}
    renumbered = [
        row._replace(hash_ids=[numbers.setdefault(h, len(numbers)) % _HASH_IDS_MAX for h in row.hash_ids])
        for row in rows
    ]
    return renumbered, min(len(numbers), _HASH_IDS_MAX)
