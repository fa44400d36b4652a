"""What the columns of a request log mean, by their usual names or as `--columns` names them; times of any notation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lockstep.sim.workload.turns import WorkloadError

USUAL: Mapping[str, tuple[str, ...]] = {
    "arrival": (
        "arrival_time", "arrived_at", "arrival", "start_time", "starttime", "startTimeUnixNano", "request_time",
        "received_at", "request_created_at", "timestamp", "time_local", "@timestamp", "ts", "time", "datetime",
        "created_at", "created", "date", "arrival_s", "arrival_ms", "arrival_us", "arrival_ns",
        "log_time",
    ),
    "end": ("end_time", "endtime", "endTimeUnixNano", "completed_at", "finished_at", "completion_time"),
    "duration": (
        "duration_ms", "duration_s", "latency_ms", "latency_s", "duration", "latency", "response_time", "elapsed",
    ),
    "input": (
        "prompt_tokens", "input_tokens", "usage.input", "usageDetails.input", "Request tokens", "num_prompt_tokens",
        "prompttokens", "inputtokens", "input_length", "prompt_len", "ContextTokens", "tokens_in", "in_tokens",
        "inputTokenCount", "promptTokenCount", "input_token_count", "prompt_token_count", "tokens_prompt",
    ),
    "output": (
        "completion_tokens", "output_tokens", "usage.output", "usageDetails.output", "Response tokens",
        "generated_tokens", "num_generation_tokens", "completiontokens", "outputtokens", "output_length", "output_len",
        "GeneratedTokens", "tokens_out", "out_tokens", "outputTokenCount", "candidatesTokenCount",
        "output_token_count", "completion_token_count", "tokens_completion",
    ),
    "limit": ("max_completion_tokens", "max_tokens", "max_new_tokens", "max_output_tokens"),
    "session": (
        "gen_ai.conversation.id", "conversation_id", "session_id", "sessionid", "thread_id", "chat_id", "session",
    ),
    "tenant": ("tenant", "team_id", "end_user", "user_id", "userid", "user", "customer", "organization"),
    "text": ("messages", "conversations", "prompt", "input", "query", "question", "text"),
    "answer": ("completion", "response", "output", "answer", "content"),
    "ids": ("prompt_token_ids", "input_token_ids", "input_tok_ids", "input_ids", "token_ids"),
}  # fmt: skip
"""Usual names of columns by role, the first found wins. A nested column is found by its last parts as well."""

CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""Tokens of a prompt that Anthropic's `input_tokens` beside them leaves out."""

TOTALS = ("num_model_requests", "num_requests", "request_count", "n_requests", "total_requests", "requests")
"""Numbers of requests in a row: the file has totals over time, not requests."""

NONE = "none"
"""In place of the column of arrivals: the file has none."""

ROLES = tuple(USUAL)
UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
TIME_WORDS = re.compile(r"time|date|stamp|created|arriv|^ts$|_ts$|_at$", re.IGNORECASE)


@dataclass(frozen=True)
class LogColumns:
    """The columns of a file by role.

    Args:
        names: column by role; a whole number in place of a name is the value of every row.
        unit: of arrival times that are numbers, if it was given: s, ms, us, ns.
        is_without_times: whether no column is a time of arrival, whatever their names: `arrival=none`.
    """

    names: Mapping[str, str]
    unit: str = ""
    is_without_times: bool = False

    def of(self, role: str) -> str | None:
        """Return the column with a role; None without one."""
        return self.names.get(role)


def parse_columns(text: str | None) -> LogColumns:
    """Parse `arrival=ts:ms,input=prompt_tokens,output=128`. Raises: WorkloadError."""
    names: dict[str, str] = {}
    unit = ""
    for pair in filter(None, (part.strip() for part in (text or "").split(","))):
        role, equals, name = (part.strip() for part in pair.partition("="))
        if not equals or not name or role not in ROLES or role in names:
            problem = f"has `{pair}`, expected ROLE=COLUMN, each role once"
            hint = f"roles are {', '.join(ROLES)}; such as --columns arrival=ts,input=prompt_tokens,output=512"
            raise WorkloadError("`columns`", problem, hint)
        if role == "arrival" and name.rpartition(":")[2] in UNITS and ":" in name:
            name, _, unit = name.rpartition(":")
        names[role] = name
    if names.get("arrival") == NONE:
        return LogColumns({role: name for role, name in names.items() if role != "arrival"}, is_without_times=True)
    return LogColumns(names, unit)


def recognise(where: str, present: Iterable[str], given: LogColumns) -> LogColumns:
    """Return the columns by role: the given ones, and the others by their usual names.

    Raises: WorkloadError if a given column is missing.
    """
    known = list(dict.fromkeys(present))
    found: dict[str, str] = {}
    for role in ROLES:
        if role == "arrival" and given.is_without_times:
            continue
        name = given.of(role)
        if name is None:
            name = next(filter(None, (_present(usual, known) for usual in USUAL[role])), None)
        elif name not in known and not name.isdecimal():
            problem = f"there is no column `{name}`, given for {role}"
            raise WorkloadError(where, problem, f"columns are {', '.join(known)}; a whole number is a constant")
        if name is not None and name not in found.values():
            found[role] = name
    return LogColumns(found, given.unit, given.is_without_times)


def cached_beside(name: str, present: Iterable[str]) -> list[str]:
    """Return the columns of cached tokens that the column of input tokens beside them leaves out."""
    ending = "input_tokens"
    if not name.endswith(ending):
        return []
    known = set(present)
    return [beside for one in CACHED if (beside := name.removesuffix(ending) + one) in known]


def has_usual_name(column: str, roles: Iterable[str] = USUAL) -> bool:
    """Return whether a column has the usual name of a role."""
    return any(_present(usual, [column]) for role in roles for usual in USUAL[role])


def totals_in(present: Iterable[str]) -> str | None:
    """Return the column with the number of requests of a row; None if a row is one request."""
    return next((name for name in present if _plain(name).rpartition(".")[2] in TOTALS), None)


def _present(usual: str, known: list[str]) -> str | None:
    """Return the column with this usual name: whole first, then as the end of a nested one, in any case."""
    wanted = _plain(usual)
    whole = (name for name in known if _plain(name) == wanted)
    nested = (name for name in known if _plain(name).endswith(f".{wanted}"))
    return next(whole, None) or next(nested, None)


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


# --- times ------------------------------------------------------------------------------------------------------------

_FORMS = (
    "%d/%b/%Y:%H:%M:%S %z", "%m-%d %H:%M:%S", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d - %H:%M:%S",
    "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M",
    "%m/%d/%Y %I:%M:%S %p", "%m/%d/%Y %I:%M %p", "%m/%d/%Y, %I:%M:%S %p",
)  # fmt: skip
_EPOCHS = ((1e8, 1e11, "s"), (1e11, 1e14, "ms"), (1e14, 1e17, "us"), (1e17, 1e20, "ns"))
"""Ranges of numbers that are times since 1970, from 1973 to 5138, and their units."""
_SINCE_2015, _UNTIL_2040, _SCALES = 1_420_070_400, 2_208_988_800, (1, 1e3, 1e6, 1e9)


def looks_like_epoch(value: Any) -> bool:
    """Return whether a number is a time from 2015 to 2040 in seconds since 1970, or in a thousandth part of them."""
    number = _number(value)
    return number is not None and any(_SINCE_2015 * scale <= number < _UNTIL_2040 * scale for scale in _SCALES)


def unit_of(column: str, values: Iterable[Any]) -> str:
    """Return the unit of times that are numbers: by the column's name, as an epoch by their size, else seconds."""
    ending = re.search(r"(?:_|\b)(s|sec|seconds|ms|millis|us|micros|ns|nanos)$", column.lower())
    if ending:
        return {"sec": "s", "seconds": "s", "millis": "ms", "micros": "us", "nanos": "ns"}.get(ending[1], ending[1])
    numbers = [number for number in map(_number, values) if number is not None]
    largest = max(numbers, default=0.0)
    return next((unit for low, high, unit in _EPOCHS if low <= largest < high), "s")


def time_us(value: Any, unit: str) -> int | None:
    """Return a time in microseconds: a number in `unit`, or a date and time; None if it cannot be read."""
    if isinstance(value, datetime):
        return _of_moment(value)
    number = _number(value)
    if number is not None:
        return round(number * UNITS[unit])
    text = str(value).strip()
    for candidate in (text, re.sub(r",(\d{1,6})$", r".\1", text)):
        try:
            return _of_moment(datetime.fromisoformat(candidate))
        except ValueError:
            continue
    for form in _FORMS:
        try:
            part = text if "," in form else text.partition(",")[0]
            moment = datetime.strptime(part, form)  # noqa: DTZ007 - a time without a zone is UTC
        except ValueError:
            continue
        return _of_moment(moment if moment.year > 1900 else moment.replace(year=2000))
    return None


def _of_moment(moment: datetime) -> int:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since = aware - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < 1e20 else None
