"""Workloads drawn from a model that was fitted to a trace and stored in a JSON file.

The file contains distributions, not requests: of arrival times, lengths, shared prefixes and later turns of sessions.
`fit.py` writes it. Any number of requests can be drawn from it, at any rate; each seed makes another workload.

**Arrivals** are a renewal process of instants, in operational time if the rate varies (`profile`); each instant is a
batch of one or more arrivals. Gaps and batches are drawn in strata: of as many draws as the trace has, each equal part
of their distribution occurs exactly once. So a rare long silence occurs in every workload, and the drawn rate is the
given one.

**Requests** are drawn as whole rows (shared, new and output tokens, and the time since the shared part was last used),
so that lengths keep their joint distribution. A request that shares a prefix takes it from a request about `lag`
requests before, with a prompt that is long enough and a prefix that no request has used since:

    # | shared with an earlier prompt | new |       # the radix tree grows like the trace's, with other content

**Sessions** are Markov chains. What a follow-up keeps, adds and answers is drawn from the rows of the trace that
followed a prompt of about the same length, in a session of the same kind: of about the same length, in tokens and in
turns. Users differ in their pace, and a long think time is often followed by another one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from lockstep.sim.workload.arrivals import random_stream
from lockstep.sim.workload.lengths import parse_rate, parse_tokens
from lockstep.sim.workload.token_runs import FreshTokens, append_run, cut_runs
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, TurnLabel, Turns, TurnsBuilder, TurnStart, WorkloadError

MODEL_FORMAT = "lockstep-workload-model"
MODEL_VERSION = 1
_MODEL_HEAD_BYTES = 400  # a file with the format's name in its first bytes is a model

Floats = NDArray[np.float64]

KINDS = 8  # of sessions: quarters by their longest prompt, and halves of those by their number of turns

_Kind = Annotated[int, Meta(ge=0, lt=KINDS)]
_Tokens = Annotated[int, Meta(ge=0, le=LENGTH_TOKENS_MAX)]
_Some = Annotated[int, Meta(ge=1, le=LENGTH_TOKENS_MAX)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Positive = Annotated[float, Meta(gt=0)]
_NotNegative = Annotated[float, Meta(ge=0)]

_STANDARD = NormalDist()
_SEARCH_STEPS = 256  # requests tried before and after the one at `lag`
_STRATA_MAX = 65_536
_WAITING_MAX = 64  # rows skipped in search of one that fits
_GROUPS = 12  # groups of follow-ups of one kind, by length of the previous prompt


class Quantiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution as its values at some probabilities, linear in between."""

    at: Annotated[tuple[_Share, ...], Meta(min_length=2)]  # ascending, from 0 to 1
    values: Annotated[tuple[_NotNegative, ...], Meta(min_length=2)]  # ascending

    def mean(self) -> float:
        """Return the mean of the distribution."""
        at, values = np.array(self.at), np.array(self.values)
        return float(np.sum(np.diff(at) * (values[1:] + values[:-1])) / 2)

    def draw(self, uniform: Floats) -> Floats:
        """Return the values at these probabilities."""
        drawn: Floats = np.interp(uniform, self.at, self.values)
        return drawn


class ArrivalModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model of the start times of sessions; a request without a session is a session of one turn."""

    rate: _Positive | None  # mean arrivals per second; None: all at once
    process: Literal["exponential", "weibull", "empirical"] = "exponential"  # of the gaps between instants
    shape: _Positive = 1.0  # of weibull
    gaps: Quantiles | None = None  # of empirical, in units of their mean
    batches: Quantiles | None = None  # sessions per instant; None: one. Fractions are rounded up or down at random
    strata: Annotated[int, Meta(ge=1, le=_STRATA_MAX)] = 1_024
    profile: tuple[_NotNegative, ...] = ()  # rate in equal parts of a cycle, in units of its mean; (): constant
    profile_part_s: _Positive = 60.0
    chosen: str = ""  # the chosen entry of `evidence`
    evidence: tuple[dict[str, float | str], ...] = ()  # candidates that were tried, with their errors


class RequestModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First turns; one entry per row in each column."""

    turns: Annotated[tuple[_Some, ...], Meta(min_length=1)]  # turns of the session
    shared_tokens: tuple[_Tokens, ...]  # shared with the earlier prompt with the longest common prefix
    # first turns since the last use of the shared part; 0: nothing is shared
    lag: tuple[Annotated[int, Meta(ge=0)], ...]
    new_tokens: tuple[_Tokens, ...]
    output_tokens: tuple[_Tokens, ...]
    pace: tuple[float, ...]  # think time relative to other users, in standard deviations
    kind: tuple[_Kind, ...]  # of its session, by the longest prompt and the number of turns


class ThinkModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model of think times: the pace of a session, and a remainder that depends on the previous one."""

    seconds: Quantiles  # of all think times
    spread: Annotated[float, Meta(ge=0, le=10)] = 1.0  # of the remainder, in standard deviations of all
    memory: Annotated[float, Meta(gt=-1, lt=1)] = 0.0  # correlation of consecutive remainders


class FollowUpModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Later turns of sessions; one entry per row in each column, ordered by kind and `before_tokens`."""

    kind: tuple[_Kind, ...] = ()
    before_tokens: tuple[_Some, ...] = ()  # of the previous prompt
    lost_tokens: tuple[_Tokens, ...] = ()  # of that prompt and its answer, not in this prompt
    answer_tokens: tuple[_Tokens, ...] = ()  # of that answer
    new_tokens: tuple[_Tokens, ...] = ()
    output_tokens: tuple[_Tokens, ...] = ()


class WorkloadModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fitted model, as stored in its file."""

    format: Literal["lockstep-workload-model"] = "lockstep-workload-model"
    version: Literal[1] = 1
    provenance: dict[str, object]
    turns: Annotated[int, Meta(ge=1)]  # in the trace; the default number of drawn turns
    arrivals: ArrivalModel
    requests: RequestModel
    follow_ups: FollowUpModel = FollowUpModel()
    think: ThinkModel | None = None  # None without follow-ups


def write_model(path: Path, model: WorkloadModel) -> None:
    """Write a model file atomically. Raises: OSError."""
    part = path.with_name(f".part-{path.name}")
    try:
        part.write_bytes(msgspec.json.encode(model) + b"\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class FittedSpec(NamedTuple):
    """Parameters of `gen:file=FILE,n=500,rate=4`."""

    file: str
    turns: int | None
    rate: float | None


def parse_model_spec(text: str) -> FittedSpec | None:
    """Parse a spec that names a model file; None if it names none. Raises: WorkloadError."""
    items = [item.partition("=") for item in text.removeprefix("gen:").split(",") if item]
    if not any(key == "file" for key, _, _ in items):
        return None
    values: dict[str, str] = {}
    for key, _, value in items:
        if key not in ("file", "n", "rate"):
            hint = "known keys beside file: n, rate; lengths, sharing and bursts are the model's"
            raise WorkloadError(text, f"`{key}` has no meaning for a fitted model", hint)
        if key in values or not value:
            raise WorkloadError(text, f"`{key}` is given twice or has no value", "for example gen:file=chat.json,n=500")
        values[key] = value
    turns = rate = None
    try:
        turns = parse_tokens(values["n"]) if "n" in values else None
        rate = parse_rate(values["rate"]) if "rate" in values else None
    except ValueError as error:
        key = "n" if turns is None and "n" in values else "rate"
        raise WorkloadError(text, f"`{key}` cannot be `{values[key]}`: {error}", f"for example {key}=4") from None
    return FittedSpec(values["file"], turns, rate)


def is_model(data: bytes) -> bool:
    """Return whether the content of a file is a fitted model."""
    return MODEL_FORMAT.encode() in data[:_MODEL_HEAD_BYTES]


def parse_model(source: str, data: bytes) -> WorkloadModel:
    """Parse and check a model file. Raises: WorkloadError with the field."""
    hint = "write it again with `lockstep workload fit`"
    try:
        version = msgspec.json.decode(data, type=dict[str, object]).get("version")
        if version != MODEL_VERSION:
            problem = f"`version` is {version!r}, and this release reads {MODEL_VERSION}"
            raise WorkloadError(source, problem, hint)
        model = msgspec.json.decode(data, type=WorkloadModel)
    except msgspec.DecodeError as error:
        raise WorkloadError(source, f"not a fitted model: {error}", hint) from None
    for part in ("requests", "follow_ups"):
        columns = msgspec.structs.asdict(getattr(model, part))
        rows = len(next(iter(columns.values())))
        for name, column in columns.items():
            if len(column) != rows:
                raise WorkloadError(source, f"`{part}.{name}` has {len(column)} rows, the others {rows}", hint)
    for place in range(len(model.requests.turns)):
        if model.requests.shared_tokens[place] + model.requests.new_tokens[place] < 1:
            raise WorkloadError(source, f"`requests`, row {place}: a prompt of no tokens", hint)
    order = list(zip(model.follow_ups.kind, model.follow_ups.before_tokens, strict=True))
    if order != sorted(order):
        raise WorkloadError(source, "`follow_ups` does not ascend by `kind` and `before_tokens`", hint)
    kinds = set(model.follow_ups.kind)
    for place, (turns, kind) in enumerate(zip(model.requests.turns, model.requests.kind, strict=True)):
        if turns > 1 and kind not in kinds:
            raise WorkloadError(source, f"`requests`, row {place}: `follow_ups` has no row of kind {kind}", hint)
    if kinds and model.think is None:
        raise WorkloadError(source, "`think` is missing, which `follow_ups` need", hint)
    if model.think is not None:
        _check_quantiles(source, "think.seconds", model.think.seconds, hint)
    _check_arrivals(source, model.arrivals, hint)
    return model


def _check_arrivals(source: str, arrivals: ArrivalModel, hint: str) -> None:
    if arrivals.process == "empirical" and arrivals.gaps is None:
        raise WorkloadError(source, "`arrivals.gaps` is missing, which process empirical needs", hint)
    if not 0.05 <= arrivals.shape <= 100:
        raise WorkloadError(source, f"`arrivals.shape` must be from 0.05 to 100, got `{arrivals.shape}`", hint)
    for name, quantiles in (("gaps", arrivals.gaps), ("batches", arrivals.batches)):
        if quantiles is not None:
            _check_quantiles(source, f"arrivals.{name}", quantiles, hint)
            if not 0 < quantiles.mean() < math.inf:
                raise WorkloadError(source, f"`arrivals.{name}` is zero throughout", hint)
    if arrivals.profile and not 0 < sum(arrivals.profile) < math.inf:
        raise WorkloadError(source, "`arrivals.profile` is zero throughout", hint)


def _check_quantiles(source: str, name: str, quantiles: Quantiles, hint: str) -> None:
    at, values = quantiles.at, quantiles.values
    if len(at) != len(values) or list(at) != sorted(at) or list(values) != sorted(values) or (at[0], at[-1]) != (0, 1):
        raise WorkloadError(source, f"`{name}`: `at` must ascend from 0 to 1, and `values` beside it", hint)


# --- turns ------------------------------------------------------------------------------------------------------------


def draw_model(model: WorkloadModel, *, seed: int, turns: int | None = None, rate: float | None = None) -> Turns:
    """Draw `turns` turns at `rate` sessions per second; by default the number and the rate of the trace.

    A larger number of turns begins with the same turns. Another rate changes only their times.
    """
    count = model.turns if turns is None else turns
    rate = model.arrivals.rate if rate is None else rate
    requests = _Requests(model, seed)
    built = TurnsBuilder()
    openings: list[int] = []
    while len(built) < count:
        openings.append(len(built))
        requests.add_session(built, count)
    drawn = built.build()
    arrivals_us = np.zeros(len(drawn), np.int64)
    if rate is not None and rate != math.inf:
        times_s = arrival_times_s(model.arrivals, len(openings), rate, seed)
        arrivals_us[openings] = np.rint(np.minimum(times_s * 1e6, 2.0**62)).astype(np.int64)
    return drawn.at(arrivals_us)


def arrival_times_s(model: ArrivalModel, count: int, rate: float, seed: int) -> Floats:
    """Return `count` times in seconds, ascending, the first at 0."""
    parts: list[Floats] = []
    done, block = 0, 0
    start_s = 0.0  # at the model's own rate of 1 per second
    batch_mean = model.batches.mean() if model.batches is not None else 1.0
    while done < count:
        uniform = _strata(model.strata, random_stream(seed, f"fitted/gaps/{block}"))
        instants = start_s + np.concatenate((np.zeros(1), np.cumsum(_gaps(model, uniform)))) * batch_mean
        start_s = float(instants[-1])
        times = instants[:-1]
        if model.batches is not None:
            random = random_stream(seed, f"fitted/batches/{block}")
            sizes = model.batches.draw(_strata(model.strata, random))
            if model.profile:
                sizes = sizes * _profile_at(model, times)
            times = np.repeat(times, np.floor(sizes + random.random_sample(len(sizes))).astype(np.int64))
        parts.append(times)
        done += len(times)
        block += 1
    times = np.concatenate(parts)[:count]
    if model.profile and model.batches is None:
        times = _from_operational(model, times)
    times -= times[0]
    times /= rate
    return times


def _strata(count: int, random: np.random.RandomState) -> Floats:
    """Return `count` numbers, one from each of as many equal parts of [0, 1), in random order."""
    return (random.permutation(count) + random.random_sample(count)) / count


def _gaps(model: ArrivalModel, uniform: Floats) -> Floats:
    """Return gaps of mean 1."""
    if model.process == "empirical" and model.gaps is not None:
        drawn: Floats = model.gaps.draw(uniform) / model.gaps.mean()
        return drawn
    gaps: Floats = -np.log1p(-uniform)
    if model.process == "weibull":
        gaps = gaps ** (1 / model.shape) / math.gamma(1 + 1 / model.shape)
    return gaps


def _cycle(model: ArrivalModel) -> tuple[float, Floats]:
    """Return the length of a part at 1 session per second, and the sessions begun before each part and in total."""
    part = model.profile_part_s * (model.rate or 1.0)
    weights = np.array(model.profile) / np.mean(model.profile)
    return part, np.concatenate((np.zeros(1), np.cumsum(weights * part)))


def _profile_at(model: ArrivalModel, times: Floats) -> Floats:
    """Return the rate at these times, in units of its mean."""
    part, _ = _cycle(model)
    weights = np.array(model.profile) / np.mean(model.profile)
    picked: Floats = weights[np.floor(times / part).astype(np.int64) % len(weights)]
    return picked


def _from_operational(model: ArrivalModel, times: Floats) -> Floats:
    """Convert times of the operational clock, which runs at the speed of the profile."""
    part, begun = _cycle(model)
    cycles, within = np.divmod(times, begun[-1])
    place = np.minimum(np.searchsorted(begun, within, side="right") - 1, len(model.profile) - 1)
    weights = np.diff(begun) / part
    passed: Floats = cycles * begun[-1] + part * place + (within - begun[place]) / np.maximum(weights[place], 1e-300)
    return passed


class _Opening:
    """A first turn, as a node in the tree of first turns. It owns the tokens that it does not share with its parent.

    Its parent owns the last token that it shares. So it shares more than its parent did, and all paths are short.
    """

    __slots__ = ("number", "parent", "prompt", "shared_tokens", "tokens", "uses")

    def __init__(self, number: int, prompt: list[int], tokens: int, other: _Opening | None, shared_tokens: int) -> None:
        self.number = number
        self.prompt = prompt
        self.tokens = tokens
        self.parent = other.owner(shared_tokens) if other is not None else None
        self.shared_tokens = shared_tokens
        # (tokens, number): the first turn `number` begins with that many tokens of this one, and no later one with as
        # many.
        self.uses: list[tuple[int, int]] = [(tokens, number)]
        node = self
        while node.parent is not None:
            node.parent.use(node.shared_tokens, number)
            node = node.parent

    def owner(self, tokens: int) -> _Opening:
        """Return the first turn that owns the last of the first `tokens` tokens of this one."""
        node = self
        while node.parent is not None and tokens <= node.shared_tokens:
            node = node.parent
        return node

    def use(self, tokens: int, number: int) -> None:
        while self.uses and self.uses[-1][0] <= tokens:
            self.uses.pop()
        self.uses.append((tokens, number))

    def last_use(self, tokens: int) -> int:
        """Return the last first turn that begins with the first `tokens` of this one, possibly this one itself."""
        uses = self.owner(tokens).uses
        return next((number for used, number in reversed(uses) if used >= tokens), self.number)


class _Requests:
    """Draws sessions one after another."""

    def __init__(self, model: WorkloadModel, seed: int) -> None:
        requests = model.requests
        self._rows = list(
            zip(
                requests.turns,
                requests.shared_tokens,
                requests.lag,
                requests.new_tokens,
                requests.output_tokens,
                requests.pace,
                requests.kind,
                strict=True,
            )
        )
        self._left: list[int] = []  # rows not drawn yet in this round
        self._follow_ups = _FollowUps(model.follow_ups)
        self._label = "s{0}t{1}" if max(requests.turns) > 1 else "r{0}"
        self._lag_max = max(requests.lag) + _SEARCH_STEPS
        self._openings: list[_Opening] = []  # the most recent ones, oldest first
        self._sessions = 0
        self._fresh = FreshTokens(0)
        self._random = Random(f"{seed}/fitted/requests")
        self._choose_next = Random(f"{seed}/fitted/follow_ups").random
        self._think = _Thinking(model.think, seed) if model.think is not None else None

    def add_session(self, turns: TurnsBuilder, turns_max: int) -> None:
        """Draw a session and add its turns, up to `turns_max` turns in total."""
        session_turns, shared_tokens, lag, new_tokens, output_tokens, pace, kind = self._next_row()
        prompt: list[int] = []
        tokens = shared_tokens + new_tokens
        opening = self._find(shared_tokens, lag) if shared_tokens else None
        if opening is not None:
            shared_tokens = min(shared_tokens, opening.tokens, tokens)
            prompt = cut_runs(opening.prompt, shared_tokens)
        else:
            shared_tokens = 0
        if tokens > shared_tokens:
            append_run(prompt, self._fresh.take(tokens - shared_tokens), tokens - shared_tokens)
        self._remember(_Opening(self._sessions, list(prompt), tokens, opening, shared_tokens))
        think_us = output_first_token = 0
        think = self._think.session(pace) if self._think is not None else None
        for turn in range(session_turns):
            if turn:
                change = self._follow_ups.choose(kind, tokens, self._choose_next())
                kept = tokens + output_tokens - change.lost(tokens, output_tokens)
                history = [*prompt, output_first_token, output_tokens] if output_tokens else prompt
                prompt = cut_runs(history, kept)
                new_tokens = change.new_tokens or (0 if kept else 1)
                if kept + new_tokens > LENGTH_TOKENS_MAX:
                    return
                if new_tokens:
                    append_run(prompt, self._fresh.take(new_tokens), new_tokens)
                tokens, output_tokens = kept + new_tokens, change.output_tokens
                think_us = next(think) if think is not None else 0
            output_first_token = self._fresh.take(output_tokens)
            turns.append(
                TurnStart(after=len(turns) - 1 if turn else -1, think_us=think_us),
                TurnLabel(self._label, self._sessions, turn),
                prompt=prompt,
                prompt_tokens=tokens,
                output_tokens=output_tokens,
                output_first_token=output_first_token,
            )
            if len(turns) == turns_max:
                break
        self._sessions += 1

    def _next_row(self) -> tuple[int, int, int, int, int, float, int]:
        """Return the next row in random order. Every row occurs once per round, so rare rows stay as rare as in traces.

        A row with a lag beyond the existing first turns is postponed within the round.
        """
        if not self._left:
            self._left = list(range(len(self._rows)))
            self._random.shuffle(self._left)
        waiting: list[int] = []
        while self._rows[row := self._left.pop()][2] > self._sessions and self._left and len(waiting) < _WAITING_MAX:
            waiting.append(row)
        for other in waiting:
            self._left.insert(self._random.randrange(len(self._left) + 1), other)
        return self._rows[row]

    def _remember(self, opening: _Opening) -> None:
        self._openings.append(opening)
        if len(self._openings) > 2 * self._lag_max:
            del self._openings[: -self._lag_max]

    def _find(self, shared_tokens: int, lag: int) -> _Opening | None:
        """Return the first turn nearest to `lag` ago that is long enough and whose prefix was not used since."""
        openings = self._openings
        newest = len(openings) - 1
        wanted = max(0, newest + 1 - lag)
        longest: _Opening | None = None
        for step in range(_SEARCH_STEPS):
            for place in (wanted - step, wanted + step) if step else (wanted,):
                if 0 <= place <= newest:
                    opening = openings[place]
                    if opening.tokens >= shared_tokens and opening.last_use(shared_tokens) == opening.number:
                        return opening
                    if longest is None or opening.tokens > longest.tokens:
                        longest = opening
        return longest


@dataclass(frozen=True, slots=True)
class _Change:
    """Recorded change from one turn of a session to the next, in tokens."""

    before_tokens: int
    lost_tokens: int
    answer_tokens: int
    new_tokens: int
    output_tokens: int

    def lost(self, tokens: int, output_tokens: int) -> int:
        """Return the tokens that are dropped from a history of `tokens` and `output_tokens`.

        A turn that keeps most of its history drops tokens at its end, however long the rest. A turn that starts anew
        keeps the recorded number of tokens at the beginning.
        """
        recorded = self.before_tokens + self.answer_tokens
        if 2 * self.lost_tokens >= recorded:
            return max(0, tokens + output_tokens - (recorded - self.lost_tokens))
        if self.lost_tokens >= self.answer_tokens:  # the answer does not appear in the next prompt
            return min(tokens, self.lost_tokens - self.answer_tokens) + output_tokens
        return min(output_tokens, self.lost_tokens)


class _FollowUps:
    """Recorded changes by kind of session and length of the previous prompt."""

    def __init__(self, model: FollowUpModel) -> None:
        columns = (getattr(model, name) for name in model.__struct_fields__ if name != "kind")
        changes = [_Change(*row) for row in zip(*columns, strict=True)]
        self._groups: list[tuple[list[int], list[list[_Change]]]] = []  # by kind: bounds between lengths, and groups
        for kind in range(KINDS):
            rows = changes[bisect_left(model.kind, kind) : bisect_right(model.kind, kind)]
            bounds: list[int] = []
            groups: list[list[_Change]] = [[]]
            for place, change in enumerate(rows):
                is_full = place * _GROUPS >= len(rows) * len(groups)
                if is_full and change.before_tokens > rows[place - 1].before_tokens:
                    bounds.append(change.before_tokens)
                    groups.append([])
                groups[-1].append(change)
            self._groups.append((bounds, groups))

    def choose(self, kind: int, tokens: int, uniform: float) -> _Change:
        """Return a change in a session of this kind, after a prompt of about this many tokens."""
        bounds, groups = self._groups[kind]
        group = groups[bisect_right(bounds, tokens)]
        return group[int(uniform * len(group))]


class _Thinking:
    """Draws think times: normal scores that the quantiles convert to seconds."""

    def __init__(self, model: ThinkModel, seed: int) -> None:
        self._at, self._seconds = list(model.seconds.at), list(model.seconds.values)
        self._spread, self._memory = model.spread, model.memory
        self._normal = Random(f"{seed}/fitted/think").normalvariate

    def session(self, pace: float) -> Iterator[int]:
        """Yield think times of one session in us, without end."""
        fresh = math.sqrt(1 - self._memory**2)
        remainder = self._normal(0.0, 1.0)
        while True:
            probability = _STANDARD.cdf(pace + self._spread * remainder)
            yield round(1e6 * float(np.interp(probability, self._at, self._seconds)))
            remainder = self._memory * remainder + fresh * self._normal(0.0, 1.0)
