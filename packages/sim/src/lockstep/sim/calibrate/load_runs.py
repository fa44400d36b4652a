"""Measured runs of a server: the times of each request, or means over a run, and the facts that the source states.

A `LoadRun` has one row per answered request. Its arrivals are replayed: by the clock, or as a closed loop of
`concurrency` requests in progress. A `MeasuredPoint` has means only. `lockstep.sim.calibrate.importers` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost import CalibrationError
from lockstep.sim.workload.token_runs import FreshTokens, append_run, cut_runs
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, TurnLabel, Turns, TurnsBuilder, TurnStart

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

CLIENT_GAP_S = 0.05  # from an answer to the next request of a closed loop, at most: the client's own work
LOOP_SHARE = 0.9  # of the requests that start behind an answer, in a closed loop
SPAN_S_MAX = 1e9  # from the first to the last sending; longer is a time in another unit
IN_FLIGHT_SLACK = 1  # requests in flight may be one off when two events have nearly the same time


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a source states of the server that was measured; "" or 0 if it states nothing."""

    engine: str = ""  # vllm, sglang, trtllm, lockstep
    engine_version: str = ""
    model: str = ""  # catalogue or Hugging Face name
    gpu: str = ""
    tp: int = 0
    ep: int = 0
    weights_dtype: str = ""  # of lockstep.host.quantization
    kv_dtype: str = ""
    attention_backend: str = ""

    def over(self, other: ServerFacts) -> ServerFacts:
        """Return these facts, with those of `other` where these state nothing."""
        return replace(other, **{name.name: value for name in fields(self) if (value := getattr(self, name.name))})


@dataclass(frozen=True, eq=False)
class AnsweredRequests:
    """One row per answered request, in the order of sending."""

    sent_s: Floats  # [n], seconds since the first request was sent; NaN if the source has no times of sending
    ttft_s: Floats  # [n], from sending to the first output token
    e2e_s: Floats  # [n], from sending to the last output token
    prompt_tokens: Counts  # [n]
    output_tokens: Counts  # [n], at least 1
    cached_tokens: Counts  # [n], prompt tokens found in the server's prefix cache; -1 if unknown

    def __len__(self) -> int:
        return len(self.ttft_s)

    @property
    def tpot_s(self) -> Floats:
        """Time per output token behind the first, seconds [n]; NaN for answers of one token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        tpot: Floats = (self.e2e_s - self.ttft_s) / gaps
        return tpot

    @property
    def has_clock(self) -> bool:
        """Whether the times of sending are known."""
        return not bool(np.isnan(self.sent_s).any())

    def take(self, rows: NDArray[np.int64] | slice) -> AnsweredRequests:
        """Return some rows, in the order given."""
        return AnsweredRequests(*(getattr(self, column.name)[rows] for column in fields(self)))

    @classmethod
    def of(cls, where: str, columns: Mapping[str, Sequence[float]]) -> AnsweredRequests:
        """Build the columns from rows in any order, sorted by the time of sending.

        Args:
            where: the source, for messages.
            columns: `ttft_s`, `e2e_s`, `prompt_tokens`, `output_tokens`, perhaps `sent_s`, `cached_tokens`.
        Raises: CalibrationError if there are no rows, or a value is impossible, with its row.
        """
        count = len(columns["ttft_s"])
        if count == 0:
            raise CalibrationError(
                f"{where}: no request with an answer and its times\nhint: give a file of a longer run"
            )
        sent = np.array(columns.get("sent_s", [np.nan] * count), np.float64)
        span = sent - (sent.min() if not np.isnan(sent).any() else 0.0)
        ttft, e2e = (np.array(columns[name], np.float64) for name in ("ttft_s", "e2e_s"))
        prompt, output = (np.array(columns[name], np.int64) for name in ("prompt_tokens", "output_tokens"))
        cached = np.array(columns.get("cached_tokens", [-1] * count), np.int64)
        tokens = f"a number from 1 to {LENGTH_TOKENS_MAX:,}"
        checks = (
            (
                "time of sending",
                span,
                np.isnan(span) | (span <= SPAN_S_MAX),
                f"at most {SPAN_S_MAX:g} s after that of the first request",
            ),
            ("time to the first token", ttft, (ttft > 0) & np.isfinite(ttft), "a time above 0"),
            (
                "end-to-end time",
                e2e,
                (e2e >= ttft * (1 - 1e-9)) & np.isfinite(e2e),
                "a time not before the first token",
            ),
            ("prompt tokens", prompt, (prompt > 0) & (prompt <= LENGTH_TOKENS_MAX), tokens),
            ("output tokens", output, (output > 0) & (output <= LENGTH_TOKENS_MAX), tokens),
        )
        for what, values, good, expected in checks:
            if not good.all():
                row = int(np.argmax(~good))
                raise CalibrationError(
                    f"{where}: {what} of request {row} must be {expected}, got `{values[row]:g}`\n"
                    "hint: leave the request out of the file"
                )
        if not np.isnan(sent).any():
            sent = sent - sent.min()
            order = np.argsort(sent, kind="stable")
        else:
            sent, order = np.full(count, np.nan), np.arange(count)
        return cls(sent[order], ttft[order], e2e[order], prompt[order], output[order], cached[order])


@dataclass(frozen=True, eq=False)
class LoadRun:
    """A run with the times of each request."""

    name: str  # file, and the part of it if it has several runs
    form: str  # name of the format
    requests: AnsweredRequests
    concurrency: int | None  # requests in progress of a closed loop; None: requests are sent by the clock
    facts: ServerFacts = ServerFacts()
    left_out: dict[str, int] = field(default_factory=dict)  # rows without a complete answer, by reason

    @property
    def gap_s(self) -> float:
        """Median time from an answer to the next request of a closed loop, in seconds; 0 without times of sending."""
        if self.concurrency is None or not self.requests.has_clock:
            return 0.0
        gaps = _gaps_behind_answers(self.requests)[self.concurrency :]
        gaps = gaps[gaps <= CLIENT_GAP_S]
        return float(np.median(gaps)) if len(gaps) else 0.0


@dataclass(frozen=True)
class MeasuredPoint:
    """Means over the requests of a run, or of a span of it."""

    name: str  # source and the part of it
    form: str
    prompt_tokens: float
    output_tokens: float
    in_progress: float  # requests in progress at the server, a mean over time
    ttft_s: float
    tpot_s: float
    requests: int  # that the means are over; 0 if unknown
    is_closed: bool  # `in_progress` was held fixed by the client
    facts: ServerFacts = ServerFacts()
    notes: tuple[str, ...] = ()
    lengths_from: float = 1.0  # lengths are uniform in [lengths_from * N, N]; 1.0: their distribution is unknown


@dataclass(frozen=True)
class Measurements:
    """Everything that was read from one source."""

    runs: tuple[LoadRun, ...] = ()
    points: tuple[MeasuredPoint, ...] = ()

    def __add__(self, other: Measurements) -> Measurements:
        return Measurements(self.runs + other.runs, self.points + other.points)


def closed_loop_of(requests: AnsweredRequests) -> int | None:
    """Return the concurrency of a closed loop, from the times alone; None if requests were sent by the clock.

    In a closed loop nearly every request, behind the first ones, is sent at the end of an answer, and the number in
    flight is then the same.
    """
    if not requests.has_clock or len(requests) < 3:
        return None
    stops = np.sort(requests.sent_s + requests.e2e_s)
    began = np.arange(len(requests))
    in_flight = began - np.searchsorted(stops, requests.sent_s, side="right")  # besides the request itself
    most = int(in_flight.max()) + 1
    if most >= len(requests):
        return None
    later = slice(most, None)
    full = in_flight[later] >= most - 1 - IN_FLIGHT_SLACK
    behind = _gaps_behind_answers(requests)[later] <= CLIENT_GAP_S
    return most if float((full & behind).mean()) >= LOOP_SHARE else None


def _gaps_behind_answers(requests: AnsweredRequests) -> Floats:
    """Return the time from the last answer before each request to the request, seconds [n]; infinite without one."""
    stops = np.sort(requests.sent_s + requests.e2e_s)
    before = np.searchsorted(stops, requests.sent_s, side="right")
    return np.where(before > 0, requests.sent_s - stops[np.maximum(before - 1, 0)], np.inf)


def turns_of_run(run: LoadRun, prompts: Turns | None = None) -> Turns:
    """Return the requests of a run as turns that arrive by the clock; in a closed loop all at once, in their order.

    A prompt shares nothing, unless cached tokens are known: so many tokens at its beginning are then those of a prefix
    common to all requests.
    Args:
        prompts: turns with the prompts of the same requests, in order, from which shared prefixes are taken.
    Raises: CalibrationError if `prompts` has another number of requests.
    """
    requests = run.requests
    if prompts is not None and len(prompts) != len(requests):
        raise CalibrationError(
            f"{run.name}: {len(requests):,} answered requests, but the workload has {len(prompts):,}\n"
            "hint: give the workload of this run, whose requests were all answered; or leave out --workload"
        )
    ids = FreshTokens(0 if prompts is None else _stop_of_ids(prompts))
    ids.take(max(int(requests.cached_tokens.max()), 0) + 1)  # the common prefix, and an id that ends it
    builder = TurnsBuilder()
    by_clock = run.concurrency is None and requests.has_clock
    shared = np.minimum(np.maximum(requests.cached_tokens, 0), requests.prompt_tokens - 1).tolist()
    for row, (prompt, output) in enumerate(
        zip(requests.prompt_tokens.tolist(), requests.output_tokens.tolist(), strict=True)
    ):
        runs: list[int] = []
        if prompts is not None:
            runs = cut_runs(prompts[row].prompt, prompt)
        elif shared[row]:
            append_run(runs, 0, shared[row])
        missing = prompt - sum(runs[1::2])
        if missing:
            append_run(runs, ids.take(missing), missing)
        builder.append(
            TurnStart(round(1e6 * requests.sent_s[row]) if by_clock else 0),
            TurnLabel("r{0}", row),
            prompt=runs,
            prompt_tokens=prompt,
            output_tokens=output,
            output_first_token=ids.take(output),
        )
    return builder.build()


def _stop_of_ids(turns: Turns) -> int:
    return int((turns.run_first_token.astype(np.int64) + turns.run_tokens).max(initial=1))
