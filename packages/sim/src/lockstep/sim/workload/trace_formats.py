"""The known trace formats: the columns of each, and the parser of a row, which checks every cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, TIME_US_MAX

HASH_BLOCK_TOKENS = 512  # tokens per hash id of Mooncake
AGENTIC_BLOCK_TOKENS = 64  # tokens per id of an agentic trace

Content = Literal["unknown", "hash_ids", "block_runs", "token_ids", "token_runs"]


class TraceRow(NamedTuple):
    """One recorded request."""

    line: int  # in the file, from 1
    arrival_us: int  # us by the trace's own clock; -1 if the row has no time
    input_tokens: int
    output_tokens: int
    content: Sequence[int] = ()  # recorded content of the prompt; see TraceFormat.content
    session: str = ""  # rows of one session are a closed loop: each is sent after the answer to the previous one
    scope: str = ""  # block ids denote the same content within one scope only
    think_us: int | None = None  # None in a session: computed as the time between the previous answer and this row
    busy_us: int = 0  # duration of the recorded answer, used if `think_us` must be computed
    tenant: str = ""


class BadCellError(Exception):
    """An invalid cell."""

    def __init__(self, column: str, value: object, expected: str) -> None:
        self.column = column
        self.value = value
        self.expected = expected


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Any = _Absent()
"""The cell of a column that is missing in a row."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format: its columns, and the parser of a row. Cells are str in CSV, JSON values in JSON lines."""

    name: str
    kinds: tuple[Literal["json", "csv"], ...]
    columns: tuple[str, ...]  # required
    parse_row: Callable[..., TraceRow]  # (line, *cells of columns and optional); raises BadCellError
    optional: tuple[str, ...] = ()  # ABSENT in rows without them
    content: Content = "unknown"  # meaning of TraceRow.content, if a row has any
    block_tokens: int = 1  # tokens per id of the content
    session_clock: bool = False  # times count from the start of the row's session, which is unknown

    def __str__(self) -> str:
        words = " or ".join({"json": "JSON lines", "csv": "CSV"}[kind] for kind in self.kinds)
        return f"{self.name} ({words} with {', '.join(self.columns)})"


# --- formats ----------------------------------------------------------------------------------------------------------


def _mooncake_row(line: int, timestamp: Any, input_length: Any, output_length: Any, hash_ids: Any) -> TraceRow:
    arrival_us = _time_us("timestamp", timestamp, 1_000, "milliseconds")
    input_tokens = _tokens("input_length", input_length)
    output_tokens = _output_tokens("output_length", output_length)
    if type(hash_ids) is not list or not set(map(type, hash_ids)) <= {int} or min(hash_ids, default=0) < 0:
        raise BadCellError("hash_ids", hash_ids, "a list of whole numbers, none negative")
    blocks = -(-input_tokens // HASH_BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise BadCellError(
            "hash_ids",
            f"{len(hash_ids)} ids: {shorten(hash_ids)}",
            f"{blocks} ids, one per {HASH_BLOCK_TOKENS} of the {input_tokens} tokens of `input_length`",
        )
    return TraceRow(line, arrival_us, input_tokens, output_tokens, hash_ids)


def _agentic_row(
    line: int, trace: Any, tokens_in: Any, out: Any, hash_runs: Any, think_time: Any, *optional: Any
) -> TraceRow:
    agent, t, api_time = optional
    if type(trace) is not str or not trace:
        raise BadCellError("trace", trace, "the name of the session")
    if agent is not ABSENT and type(agent) is not str:
        raise BadCellError("agent", agent, "a name, or an empty one for the main agent")
    input_tokens = _tokens("in", tokens_in)
    output_tokens = _output_tokens("out", out)
    runs = _block_runs(hash_runs)
    blocks = sum(runs[1::2])
    if blocks != input_tokens // AGENTIC_BLOCK_TOKENS:
        raise BadCellError(
            "hash_runs",
            f"{blocks} blocks: {shorten(hash_runs)}",
            f"runs of {input_tokens // AGENTIC_BLOCK_TOKENS} blocks, one per {AGENTIC_BLOCK_TOKENS} tokens of `in`, "
            "rounded down",
        )
    return TraceRow(
        line,
        0 if t is ABSENT else _time_us("t", t, 1_000_000, "seconds"),
        input_tokens,
        output_tokens,
        runs,
        session=f"{trace}/{'' if agent is ABSENT else agent}",
        scope=trace,
        think_us=None if think_time is None else _time_us("think_time", think_time, 1_000_000, "seconds"),
        busy_us=0 if api_time in (None, ABSENT) else _time_us("api_time", api_time, 1_000_000, "seconds"),
    )


def _block_runs(hash_runs: Any) -> list[int]:
    """Flatten [[first, count], ...] and check every number."""
    runs: list[int] = []
    for pair in hash_runs if type(hash_runs) is list else (None,):
        if type(pair) is not list or len(pair) != 2 or not set(map(type, pair)) <= {int}:
            raise BadCellError("hash_runs", hash_runs, "a list of pairs [first id, count]")
        first, count = pair
        if first < 0 or not 1 <= count <= LENGTH_TOKENS_MAX:
            raise BadCellError(
                "hash_runs", pair, "pairs [first id, count] with an id of at least 0 and a count above 0"
            )
        runs += pair
    return runs


def _sharegpt_row(
    line: int, input_toks: Any, output_toks: Any, arrival_time_ns: Any, input_tok_ids: Any, output_tok_ids: Any
) -> TraceRow:
    arrival_us = _time_us("arrival_time_ns", arrival_time_ns, 1e-3, "nanoseconds")
    input_tokens = _tokens("input_toks", input_toks)
    output_tokens = _output_tokens("output_toks", output_toks)
    prompt = _token_ids("input_tok_ids", input_tok_ids, input_tokens, "input_toks")
    _token_ids("output_tok_ids", output_tok_ids, output_tokens, "output_toks")
    return TraceRow(line, arrival_us, input_tokens, output_tokens, prompt)


def _token_ids(column: str, ids: Any, tokens: int | None, of: str) -> Sequence[int]:
    """Check a list of token ids and its length; () if the row has none."""
    if ids is ABSENT:
        return ()
    if type(ids) is not list or not set(map(type, ids)) <= {int} or not 0 <= min(ids, default=0) <= max(ids, default=0):
        raise BadCellError(column, ids, "a list of token ids, whole numbers that are not negative")
    if max(ids, default=0) >= 2**31:
        raise BadCellError(column, max(ids), "token ids below 2**31")
    if tokens is not None and len(ids) != tokens:
        raise BadCellError(column, f"{len(ids)} ids", f"{tokens} ids, as in `{of}`")
    result: Sequence[int] = ids
    return result


def _azure_row(line: int, timestamp: str, context_tokens: str, generated_tokens: str) -> TraceRow:
    try:
        moment = datetime.fromisoformat(timestamp)  # digits beyond microseconds are dropped
    except ValueError:
        raise BadCellError("TIMESTAMP", timestamp, "a date and time such as 2023-11-16 18:17:03.9799600") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    arrival_us = (moment - _YEAR_1) // _MICROSECOND
    input_tokens = _tokens("ContextTokens", context_tokens)
    return TraceRow(line, arrival_us, input_tokens, _output_tokens("GeneratedTokens", generated_tokens))


def _vidur_row(line: int, num_prefill_tokens: str, num_decode_tokens: str, arrived_at: str) -> TraceRow:
    arrival_us = -1 if arrived_at is ABSENT else _time_us("arrived_at", arrived_at, 1_000_000, "seconds")
    input_tokens = _tokens("num_prefill_tokens", num_prefill_tokens)
    return TraceRow(line, arrival_us, input_tokens, _output_tokens("num_decode_tokens", num_decode_tokens))


_UNITS: tuple[tuple[str, float, str], ...] = (
    ("s", 1e6, "seconds"),
    ("ms", 1e3, "milliseconds"),
    ("us", 1, "microseconds"),
    ("ns", 1e-3, "nanoseconds"),
)
_ARRIVALS = tuple(f"arrival_{unit}" for unit, _, _ in _UNITS)
_THINKS = tuple(f"think_{unit}" for unit, _, _ in _UNITS)


def _plain_row(line: int, input_tokens: Any, output_tokens: Any, *optional: Any) -> TraceRow:
    arrivals, thinks, (session, tenant, prompt_token_ids) = optional[:4], optional[4:8], optional[8:]
    tokens = _tokens("input_tokens", input_tokens)
    arrival_us = _timed(_ARRIVALS, arrivals)
    think_us = _timed(_THINKS, thinks)
    session = _name("session", session)
    if think_us is not None and not session:
        raise BadCellError("session", "", "the name of a session in every row with a think time")
    return TraceRow(
        line,
        -1 if arrival_us is None else arrival_us,
        tokens,
        _output_tokens("output_tokens", output_tokens),
        _token_ids("prompt_token_ids", prompt_token_ids, tokens, "input_tokens"),
        session=session,
        think_us=think_us,
        tenant=_name("tenant", tenant),
    )


def _timed(columns: Sequence[str], cells: Sequence[Any]) -> int | None:
    """Return the only time that is given, in us, by the unit of its column; None without one."""
    given = [position for position, cell in enumerate(cells) if cell is not ABSENT and cell is not None and cell != ""]
    if not given:
        return None
    if len(given) > 1:
        raise BadCellError(columns[given[1]], cells[given[1]], f"one time only, beside `{columns[given[0]]}`")
    _, unit_us, unit = _UNITS[given[0]]
    return _time_us(columns[given[0]], cells[given[0]], unit_us, unit)


def _name(column: str, cell: Any) -> str:
    if cell is ABSENT or cell is None:
        return ""
    if type(cell) not in (str, int):
        raise BadCellError(column, cell, "a name or a number")
    return str(cell)


def _imported_row(
    line: int, arrival_us: Any, input_tokens: Any, output_tokens: Any, prompt_runs: Any, *optional: Any
) -> TraceRow:
    session, think_us, tenant = optional
    tokens = _tokens("input_tokens", input_tokens)
    if (
        type(prompt_runs) is not list
        or not set(map(type, prompt_runs)) <= {int}
        or len(prompt_runs) % 2
        or min(prompt_runs, default=0) < 0
        or sum(prompt_runs[1::2]) != tokens
    ):
        raise BadCellError(
            "prompt_runs", prompt_runs, f"first ids and counts, [0, 16, 64, 8], of {tokens} tokens in all"
        )
    return TraceRow(
        line,
        -1 if arrival_us is None else _time_us("arrival_us", arrival_us, 1, "microseconds"),
        tokens,
        _output_tokens("output_tokens", output_tokens),
        prompt_runs,
        session=_name("session", session),
        think_us=None if think_us in (ABSENT, None) else _time_us("think_us", think_us, 1, "microseconds"),
        tenant=_name("tenant", tenant),
    )


FORMATS = (
    TraceFormat(
        "imported",
        ("json",),
        ("arrival_us", "input_tokens", "output_tokens", "prompt_runs"),
        _imported_row,
        optional=("session", "think_us", "tenant"),
        content="token_runs",
    ),
    TraceFormat(
        "mooncake",
        ("json",),
        ("timestamp", "input_length", "output_length", "hash_ids"),
        _mooncake_row,
        content="hash_ids",
        block_tokens=HASH_BLOCK_TOKENS,
    ),
    TraceFormat(
        "agentic",
        ("json",),
        ("trace", "in", "out", "hash_runs", "think_time"),
        _agentic_row,
        optional=("agent", "t", "api_time"),
        content="block_runs",
        block_tokens=AGENTIC_BLOCK_TOKENS,
        session_clock=True,
    ),
    TraceFormat(
        "sharegpt",
        ("json",),
        ("input_toks", "output_toks", "arrival_time_ns"),
        _sharegpt_row,
        optional=("input_tok_ids", "output_tok_ids"),
        content="token_ids",
    ),
    TraceFormat("azure", ("csv",), ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_row),
    TraceFormat(
        "vidur",
        ("csv",),
        ("num_prefill_tokens", "num_decode_tokens"),
        _vidur_row,
        optional=("arrived_at",),
    ),
    TraceFormat(
        "plain",
        ("json", "csv"),
        ("input_tokens", "output_tokens"),
        _plain_row,
        optional=(*_ARRIVALS, *_THINKS, "session", "tenant", "prompt_token_ids"),
        content="token_ids",
    ),
)

_YEAR_1 = datetime(1, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


# --- cells ------------------------------------------------------------------------------------------------------------


def _tokens(column: str, value: object) -> int:
    count = value if type(value) is int else _whole(value)
    if count is None or not 1 <= count <= LENGTH_TOKENS_MAX:
        raise BadCellError(column, value, f"a whole number of tokens from 1 to {LENGTH_TOKENS_MAX:,}")
    return count


def _output_tokens(column: str, value: object) -> int:
    return 0 if _whole(value) == 0 else _tokens(column, value)


def _whole(value: object) -> int | None:
    """Return the integer in a cell, if any: 5, "5", and 5.0 as spreadsheets write it."""
    if type(value) is int:
        return value
    try:
        if type(value) is str:
            return int(value)
    except ValueError:
        pass
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _number(value: object) -> float | None:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    return None


def _time_us(column: str, value: object, unit_us: float, unit: str) -> int:
    number = _number(value)
    if number is None or math.isnan(number) or not 0 <= number * unit_us < TIME_US_MAX:
        raise BadCellError(column, value, f"a time in {unit}, finite and not negative")
    return round(number * unit_us)


def shorten(value: object) -> str:
    """Return a cell as shown in a message: at most 80 characters."""
    text = value if type(value) is str else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
