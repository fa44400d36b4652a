"""Generated workloads: a spec, such as `gen:n=500,rate=4,input=lognormal:900:0.75`, and a seed determine a workload.

Each property (time, length, prefix, ...) has its own random stream, so changing one leaves the others unchanged: the
same prompts at twice the rate, or one more session after the same first hundred.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from random import Random
from typing import Any, NamedTuple

from lockstep.sim.workload.arrivals import PROCESSES, arrival_times_us
from lockstep.sim.workload.lengths import (
    Distribution,
    Fixed,
    LogNormal,
    draw_think_us,
    draw_tokens,
    parse_distribution,
    parse_duration_us,
    parse_rate,
    parse_tokens,
)
from lockstep.sim.workload.token_runs import TOKEN_IDS, FreshTokens, append_run
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, TurnLabel, Turns, TurnsBuilder, TurnStart, WorkloadError

PREFIX = "gen:"
_DRAWS_MAX = 1_000  # draws of the lengths of one request, until they fit `max_total`


class SharedPrefix(NamedTuple):
    tokens: int  # of each system prompt
    prompts: int  # number of different prompts


class GrammarSpec(NamedTuple):
    share: float  # of the turns, with output under a grammar
    grammars: int  # number of different grammars


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """Parameters of a generator, by their names in a spec; docs/workloads.md explains each."""

    n: int | None = None  # turns, at most; 100 if neither this nor `sessions` is given
    rate: float = 1.0  # session starts per second; a request without a session is a session of one turn
    arrivals: str = "poisson"
    cv: float = 1.0  # of the gaps, for arrivals=gamma
    input: Distribution = field(default=Fixed(512))  # new prompt tokens of a turn, after shared prefix and history
    output: Distribution | None = field(default=Fixed(128))  # None: only prompts are run: embeddings, scores, rerank
    items: Distribution = field(default=Fixed(1))  # requests of a call, which arrive together
    query: Distribution | None = None  # tokens with which all requests of a call begin
    shared_prefix: SharedPrefix | None = None
    prefix_choice: float = 0.0  # system prompt k (from 1) is chosen with weight 1 / k**prefix_choice
    sessions: int | None = None
    turns: Distribution = field(default=Fixed(1))
    think: Distribution = field(default=LogNormal(5_000_000, 1.0))  # us
    max_total: int = LENGTH_TOKENS_MAX  # prompt and output tokens of one turn together
    grammars: GrammarSpec | None = None


def parse_spec(text: str) -> GeneratorSpec:
    """Parse `gen:KEY=VALUE,...`. Raises: WorkloadError with key, value and a fix."""
    values: dict[str, Any] = {}
    for item in filter(None, text.removeprefix(PREFIX).split(",")):
        key, equals, value = item.partition("=")
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean `{close[0]}`? " if close else ""
            raise WorkloadError(text, f"unknown key `{key}`", f"{hint}known keys: {', '.join(_KEYS)}")
        if not equals:
            raise WorkloadError(text, f"`{key}` has no value", f"write {key}={_EXAMPLES[key]}")
        if key in values:
            raise WorkloadError(text, f"`{key}` is given twice", "keep one of them")
        try:
            values[key] = _KEYS[key](value)
        except ValueError as error:
            problem = f"`{key}` cannot be `{value}`: {error}"
            raise WorkloadError(text, problem, f"for example {key}={_EXAMPLES[key]}") from None
    _check_together(text, values)
    return GeneratorSpec(**values)


def _check_together(text: str, values: dict[str, Any]) -> None:
    for key, needed, value in (
        ("cv", "arrivals", "gamma"),
        ("prefix_choice", "shared_prefix", _EXAMPLES["shared_prefix"]),
        ("sessions", "turns", _EXAMPLES["turns"]),
        ("think", "turns", _EXAMPLES["turns"]),
        ("query", "items", _EXAMPLES["items"]),
    ):
        if key in values and (needed not in values or (key == "cv" and values["arrivals"] != "gamma")):
            raise WorkloadError(text, f"`{key}` has no effect without {needed}={value}", f"add it, or remove `{key}`")
    for key, other, why in (
        ("items", "turns", "the requests of a call arrive together, and turns follow each other"),
        ("grammars", "output", "a grammar is of an output"),
        ("turns", "output", "a turn follows the answer before it"),
    ):
        if key in values and other in values and (other == "turns" or values[other] is None):
            problem = f"`{key}` cannot be combined with `{other}`" + ("" if other == "turns" else " none")
            raise WorkloadError(text, f"{problem}: {why}", f"remove `{key}`")
    prefix_tokens = values["shared_prefix"].tokens if "shared_prefix" in values else 0
    if prefix_tokens + 2 > (max_total := values.get("max_total", LENGTH_TOKENS_MAX)):
        problem = f"`max_total` {max_total} leaves no room after a shared prefix of {prefix_tokens} tokens"
        raise WorkloadError(text, problem, f"at least {prefix_tokens + 2}: one more token in and one out")


# --- keys -------------------------------------------------------------------------------------------------------------


def _parse_arrivals(text: str) -> str:
    if text not in PROCESSES:
        raise ValueError(f"expected one of {', '.join(PROCESSES)}")
    return text


def _parse_cv(text: str) -> float:
    cv = _number(text)
    if not 0.05 <= cv <= 20:
        raise ValueError("expected a coefficient of variation from 0.05 to 20")
    return cv


def _parse_lengths(text: str) -> Distribution:
    return parse_distribution(text, parse_tokens)


def _parse_output(text: str) -> Distribution | None:
    return None if text == "none" else _parse_lengths(text)


def _parse_think(text: str) -> Distribution:
    return parse_distribution(text, parse_duration_us)


def _parse_shared_prefix(text: str) -> SharedPrefix:
    tokens, times, prompts = text.partition("x")
    if not times:
        raise ValueError("expected TOKENSxPROMPTS")
    shared = SharedPrefix(parse_tokens(tokens), parse_tokens(prompts))
    if shared.tokens * shared.prompts > TOKEN_IDS // 2:
        raise ValueError(f"expected at most {TOKEN_IDS // 2:,} tokens in all system prompts")
    return shared


def _parse_grammars(text: str) -> GrammarSpec:
    share, times, number = text.partition("x")
    if not times or not 0 < _number(share) <= 1:
        raise ValueError("expected SHARExGRAMMARS, the share of turns above 0 and at most 1")
    return GrammarSpec(_number(share), parse_tokens(number))


def _parse_prefix_choice(text: str) -> float:
    match text.split(":"):
        case ["uniform"]:
            return 0.0
        case ["zipf"]:
            return 1.0
        case ["zipf", exponent] if 0 < _number(exponent) <= 10:
            return _number(exponent)
    raise ValueError("expected uniform, zipf or zipf:EXPONENT, the exponent above 0 and at most 10")


def _number(text: str) -> float:
    """Return the number in a text, or NaN, which is in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


_KEYS: dict[str, Callable[[str], object]] = {
    "n": parse_tokens,
    "rate": parse_rate,
    "arrivals": _parse_arrivals,
    "cv": _parse_cv,
    "input": _parse_lengths,
    "output": _parse_output,
    "items": _parse_lengths,
    "query": _parse_lengths,
    "shared_prefix": _parse_shared_prefix,
    "prefix_choice": _parse_prefix_choice,
    "sessions": parse_tokens,
    "turns": _parse_lengths,
    "think": _parse_think,
    "max_total": parse_tokens,
    "grammars": _parse_grammars,
}
_EXAMPLES = {
    "n": "500",
    "rate": "4",
    "arrivals": "poisson",
    "cv": "2",
    "input": "lognormal:900:0.75",
    "output": "uniform:100:300",
    "items": "uniform:10:50",
    "query": "fixed:32",
    "shared_prefix": "256x4",
    "prefix_choice": "zipf",
    "sessions": "100",
    "turns": "uniform:2:5",
    "think": "lognormal:5s:1",
    "max_total": "4096",
    "grammars": "0.2x4",
}


# --- turns ------------------------------------------------------------------------------------------------------------


def generate(spec: GeneratorSpec, *, seed: int, limit: int | None = None) -> Turns:
    """Draw the turns of a spec, session by session in order of their start; `limit` returns only the first ones.

    The tokens of a session are numbered consecutively, so a prompt is one run, or two with a system prompt:

        # | system prompt | user 1 | output 1 | user 2 | output 2 | ...
        # |--------- prompt of turn 1 ---------|                     turn k + 1 begins with all of turn k
    """
    streams = _Streams(seed)
    shared = spec.shared_prefix or SharedPrefix(0, 0)
    fresh = FreshTokens(shared.tokens * shared.prompts)
    choose_prefix = _prefix_chooser(spec, streams.prefix)
    arrivals = arrival_times_us(spec.arrivals, spec.rate, spec.cv, streams.arrivals)
    turns_max = min(_turns_max(spec), math.inf if limit is None else limit)
    label_form = "r{0}" if spec.turns == Fixed(1) else "s{0}t{1}"
    turns = TurnsBuilder()
    for session in count() if spec.sessions is None else range(spec.sessions):
        if len(turns) >= turns_max:
            break
        arrival_us = next(arrivals)
        prompt: list[int] = []
        if spec.shared_prefix is not None:
            append_run(prompt, choose_prefix() * shared.tokens, shared.tokens)
        history_tokens = shared.tokens
        if spec.items != Fixed(1) or spec.query is not None:
            _append_call(turns, spec, streams, fresh, (session, arrival_us), prompt, turns_max)
            continue
        session_turns = draw_tokens(spec.turns, streams.turns)
        for turn in range(session_turns):
            lengths = _draw_lengths(spec, history_tokens, streams, is_first=turn == 0)
            if lengths is None or len(turns) >= turns_max:
                break
            new_tokens, output_tokens = lengths
            append_run(prompt, fresh.take(new_tokens), new_tokens)
            output_first_token = fresh.take(output_tokens)
            start = (
                TurnStart(0, len(turns) - 1, draw_think_us(spec.think, streams.think))
                if turn
                else TurnStart(arrival_us)
            )
            turns.append(
                start,
                TurnLabel(label_form, session, turn),
                prompt=prompt,
                prompt_tokens=history_tokens + new_tokens,
                output_tokens=output_tokens,
                output_first_token=output_first_token,
                grammar=_draw_grammar(spec.grammars, streams.grammars) if spec.grammars is not None else "",
            )
            append_run(prompt, output_first_token, output_tokens)
            history_tokens += new_tokens + output_tokens
    return turns.build()


def _append_call(
    turns: TurnsBuilder,
    spec: GeneratorSpec,
    streams: _Streams,
    fresh: FreshTokens,
    call: tuple[int, int],
    prefix: list[int],
    turns_max: float,
) -> None:
    """Append the requests of a call, which arrive together and begin with its query.

    Args:
        call: its number, and its arrival in us.
        prefix: runs of the system prompt.
    """
    number, arrival_us = call
    shared_tokens = sum(prefix[1::2])
    if spec.query is not None:
        query_tokens = draw_tokens(spec.query, streams.query)
        append_run(prefix, fresh.take(query_tokens), query_tokens)
        shared_tokens += query_tokens
    for item in range(draw_tokens(spec.items, streams.items)):
        lengths = _draw_lengths(spec, shared_tokens, streams, is_first=True)
        if lengths is None or len(turns) >= turns_max:
            return
        new_tokens, output_tokens = lengths
        prompt = prefix.copy()
        append_run(prompt, fresh.take(new_tokens), new_tokens)
        turns.append(
            TurnStart(arrival_us),
            TurnLabel("c{0}i{1}", number, item),
            prompt=prompt,
            prompt_tokens=shared_tokens + new_tokens,
            output_tokens=output_tokens,
            output_first_token=fresh.take(output_tokens),
            grammar=_draw_grammar(spec.grammars, streams.grammars) if spec.grammars is not None else "",
        )


class _Streams:
    """One random stream per property. Seeding with text hashes it with SHA-512, never with `hash()`."""

    def __init__(self, seed: int) -> None:
        self.arrivals = Random(f"{seed}/arrivals")
        self.input = Random(f"{seed}/input")
        self.output = Random(f"{seed}/output")
        self.prefix = Random(f"{seed}/prefix")
        self.turns = Random(f"{seed}/turns")
        self.think = Random(f"{seed}/think")
        self.grammars = Random(f"{seed}/grammars")
        self.items = Random(f"{seed}/items")
        self.query = Random(f"{seed}/query")


def _turns_max(spec: GeneratorSpec) -> float:
    if spec.n is not None:
        return spec.n
    return 100 if spec.sessions is None else math.inf


def _prefix_chooser(spec: GeneratorSpec, random: Random) -> Callable[[], int]:
    prompts = spec.shared_prefix.prompts if spec.shared_prefix else 0
    numbers = range(prompts)
    weights = list(accumulate((number + 1) ** -spec.prefix_choice for number in numbers))
    return lambda: random.choices(numbers, cum_weights=weights)[0]


def _draw_lengths(
    spec: GeneratorSpec, history_tokens: int, streams: _Streams, *, is_first: bool
) -> tuple[int, int] | None:
    """Draw new prompt tokens and output tokens of a turn.

    A first turn is drawn again until it fits `max_total`, which keeps the shape of the distributions below it. A later
    turn that does not fit is None, and its session ends.
    """
    room = spec.max_total - history_tokens
    for _ in range(_DRAWS_MAX if is_first else 1):
        new_tokens = draw_tokens(spec.input, streams.input)
        output_tokens = 0 if spec.output is None else draw_tokens(spec.output, streams.output)
        if new_tokens + output_tokens <= room:
            return new_tokens, output_tokens
    if not is_first:
        return None
    problem = f"none of {_DRAWS_MAX:,} draws of `input` and `output` fits `max_total` {spec.max_total}"
    raise WorkloadError(PREFIX, problem, "raise max_total, or shorten input and output")


def _draw_grammar(grammars: GrammarSpec, random: Random) -> str:
    number = random.randrange(grammars.grammars)
    return f"grammar{number}" if random.random() < grammars.share else ""


def with_rate(spec: GeneratorSpec, *, rate: float | None, rate_scale: float) -> GeneratorSpec:
    """Return the spec at another rate, if given, times `rate_scale`."""
    return replace(spec, rate=(spec.rate if rate is None else rate) * rate_scale)
