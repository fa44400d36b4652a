"""Workloads from request logs and exports of other tools: their columns recognised, their prompts compared by blocks.

Nothing is guessed in silence: `Trace.notes` has the columns that were read, the unit of times, and every assumption. A
file whose times cannot be found is an error that names them; arrivals are drawn only for files without any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lockstep.sim.workload.log_fields import (
    TIME_WORDS,
    LogColumns,
    cached_beside,
    looks_like_epoch,
    parse_columns,
    recognise,
    time_us,
    totals_in,
    unit_of,
)
from lockstep.sim.workload.log_records import PROMPTS, Lines, Record, read_records
from lockstep.sim.workload.trace_formats import FORMATS, TraceFormat, TraceRow, shorten
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, WorkloadError

BLOCK_TOKENS = 16  # prompts given as text share whole blocks of this many tokens
SKIPPED_EXAMPLES_MAX = 5
FILE_COLUMN = "(all)"

Count = Callable[[str], int]


@dataclass(frozen=True)
class LogReading:
    """How a log is read where its content does not decide.

    Args:
        columns: columns by role, see `parse_columns`.
        tokenizer: folder with a tokenizer.json, to count the tokens of texts.
        chars_per_token: characters of a token, if texts are not counted by a tokenizer.
    """

    columns: str | None = None
    tokenizer: str | None = None
    chars_per_token: float | None = None


@dataclass(frozen=True)
class LogRows:
    """Rows of a log, in the order of the file."""

    format: TraceFormat
    rows: list[TraceRow]
    bad_rows: int
    examples: tuple[str, ...]
    notes: tuple[str, ...]


class _BadRowError(Exception):
    def __init__(self, column: str, value: Any, expected: str) -> None:
        self.column, self.value, self.expected = column, value, expected


def read_log(path: Path, data: bytes, reading: LogReading, *, skip_bad_rows: bool = False) -> LogRows:
    """Read a log of any kind of log_records.py. Raises: WorkloadError with file, line, column and expectation."""
    kind, records = read_records(path, data)
    if not records:
        raise WorkloadError(str(path), f"unknown format, {kind} without a request", "is this the right file?")
    given = parse_columns(reading.columns)
    present = [name for _, record in records for name in record]
    columns = recognise(f"{path}, line {records[0][0]}", present, given)
    if (name := columns.of("text")) is not None and name.endswith("conversations"):
        records = list(_conversations(records, name))
        columns = LogColumns({"text": "prompt", "answer": "answer", "session": "session"}, "")
    requests = _requests(records, columns)
    reader = _Reader(path, kind, columns, reading, requests)
    reader.check()
    rows: list[TraceRow] = []
    bad: list[str] = []
    for line, record in requests:
        try:
            rows.append(reader.row(line, record))
        except _BadRowError as error:
            where = f"{path}, line {line}, column `{error.column}`"
            problem = f"expected {error.expected}, got `{shorten(error.value)}`"
            if not skip_bad_rows:
                hint = "correct the row, leave such rows out with --skip-bad-rows, or name columns with --columns"
                raise WorkloadError(where, problem, hint) from None
            bad.append(f"{where}: {problem}")
    if not rows:
        raise WorkloadError(
            str(path), f"no usable row: all {len(bad)} are bad, first: {bad[0]}", "is this the right file?"
        )
    rows = reader.in_sessions(rows)
    notes = list(reader.notes())
    if others := len(records) - len(requests):
        notes.append(f"{others:,} records without a prompt or its length are no requests, and are left out")
    return LogRows(reader.format, rows, len(bad), tuple(bad[:SKIPPED_EXAMPLES_MAX]), tuple(notes))


def _requests(records: Lines, columns: LogColumns) -> Lines:
    """Return the records that have the columns of prompts: a log may have other events between its requests."""
    names = [name for role in PROMPTS if (name := columns.of(role)) is not None]
    if not names or any(name.isdecimal() for name in names):
        return records
    return [(line, record) for line, record in records if any(name in record for name in names)]


def _conversations(records: Lines, column: str) -> Iterator[tuple[int, Record]]:
    """Yield one record per answer of a ShareGPT conversation; the prompt is everything before it."""
    for line, record in records:
        before = ""
        for message in record[column] or ():
            speaker = str(message.get("from", message.get("role", "")))
            text = str(message.get("value", message.get("content", "")))
            if speaker in ("gpt", "assistant", "chatgpt", "bing") and before:
                yield line, {"prompt": before, "answer": text, "session": str(record.get("id", line))}
            before += f"{speaker}: {text}\n"


class _Reader:
    """Reads the rows of one log by its columns."""

    def __init__(self, path: Path, kind: str, columns: LogColumns, reading: LogReading, records: Lines) -> None:
        self._path, self._kind, self._columns, self._records = path, kind, columns, records
        arrival = columns.of("arrival")
        values = [record.get(arrival) for _, record in records] if arrival is not None else []
        self._unit = columns.unit or unit_of(arrival or "", values)
        self._is_number = any(isinstance(value, int | float) or _is_numeric(value) for value in values)
        self._tokenizer = None if reading.tokenizer is None else _tokenizer_of(Path(reading.tokenizer))
        self._chars = reading.chars_per_token
        if self._chars is not None and not 0.1 <= self._chars <= 100:
            raise WorkloadError(
                "`chars_per_token`", f"must be from 0.1 to 100, got `{self._chars}`", "4 is usual in English"
            )
        self._blocks: dict[bytes, int] = {}
        self._next_block = 0
        self._has_durations = columns.of("end") is not None or columns.of("duration") is not None
        self._limited = 0
        self._sessions = 0
        self._overlapping = 0  # requests of a session that arrived before the answer before them had ended
        self._present = list(dict.fromkeys(name for _, record in records for name in record))
        self._cached = cached_beside(columns.of("input") or "", self._present)
        by_ids = columns.of("ids") is not None or (self._tokenizer is not None and columns.of("text") is not None)
        content: Any = "token_ids" if by_ids else "hash_ids"
        self.format = TraceFormat("log", (), (), TraceRow, content=content, block_tokens=1 if by_ids else BLOCK_TOKENS)
        self._block_chars = max(round((self._chars or self._chars_of_counts()) * BLOCK_TOKENS), 1)

    def _chars_of_counts(self) -> float:
        """Return the characters per token of texts whose tokens were counted; 4 without any."""
        text, count = self._columns.of("text"), self._columns.of("input")
        if text is None or count is None or count.isdecimal():
            return 4.0
        chars = tokens = 0
        for _, record in self._records:
            number = _whole(record.get(count))
            if number and record.get(text):
                chars += len(_text_of(record[text]))
                tokens += number
        return chars / tokens if tokens else 4.0

    def check(self) -> None:
        """Raise WorkloadError if arrival times, prompts or lengths of answers cannot be found."""
        of, line = self._columns.of, self._records[0][0]
        shown = f"columns are {', '.join(self._present)}"
        where = f"{self._path}, line {line}"
        self._check_totals(where)
        timely = [name for name in self._present if name not in self._columns.names.values() and self._is_time(name)]
        if of("arrival") is None and timely and not self._columns.is_without_times:
            lengths = "".join(f",{role}=NAME" for role in ("input", "output") if of(role) is None)
            hint = f"--columns arrival={timely[0]}{lengths}, or arrival={timely[0]}:ms with a unit, or none; {shown}"
            raise WorkloadError(
                f"{where}, column `{timely[0]}`", "may be the time of arrival, and has an unusual name", hint
            )
        if of("input") is None and of("ids") is None:
            if of("text") is None:
                counts = [name for name in self._present if self._is_count(name)]
                likely = f"; columns of whole numbers are {', '.join(counts)}" if counts else ""
                traces = "; ".join(f"{known.name}: {', '.join(known.columns)}" for known in FORMATS)
                hint = (
                    f"--columns input=NAME,output=NAME (a number is a constant, input=512){likely}; all {shown}\n"
                    f"      columns of public traces: {traces}"
                )
                problem = f"unknown format, {self._kind}: no column has the tokens of prompts, nor their text"
                raise WorkloadError(where, problem, hint)
            self._check_countable("text")
        if of("output") is None and of("limit") is None:
            if of("answer") is None:
                hint = f"--columns output=NAME (or a constant, output=128); {shown}"
                raise WorkloadError(where, f"{self._kind}: no column has the tokens of answers, nor their text", hint)
            self._check_countable("answer")

    def _is_time(self, name: str) -> bool:
        """Return whether a column may have times: by its name, or because it has dates or epochs in the first rows."""
        values = [record.get(name) for _, record in self._records[:SKIPPED_EXAMPLES_MAX]]
        if TIME_WORDS.search(name) or all(map(looks_like_epoch, values)):
            return True
        texts = [value for value in values if isinstance(value, str) and not _is_numeric(value)]
        return bool(texts) and all(time_us(value, "s") is not None for value in texts)

    def _is_count(self, name: str) -> bool:
        values = [record.get(name) for _, record in self._records[:SKIPPED_EXAMPLES_MAX]]
        return all(_whole(value) is not None for value in values) and not self._is_time(name)

    def _check_totals(self, where: str) -> None:
        """Raise WorkloadError if rows are totals over time: their lengths are those of many requests together."""
        column = totals_in(self._present)
        if column is None or self._columns.of("text") is not None:
            return
        counts = [_whole(record.get(column)) or 0 for _, record in self._records]
        if max(counts) <= 1:
            return
        problem = f"has the number of requests of each row, {sum(counts):,} in all: rows are totals, not requests"
        hint = "export single requests, or generate some of the mean lengths: --workload gen:rate=R"
        for role in ("input", "output"):
            name = self._columns.of(role)
            tokens = sum(_whole(record.get(name)) or 0 for _, record in self._records) if name else 0
            hint += f",{role}=exponential:{max(round(tokens / sum(counts)), 1) if tokens else 'MEAN'}"
        raise WorkloadError(f"{where}, column `{column}`", problem, hint)

    def _check_countable(self, role: str) -> None:
        if self._tokenizer is None and self._chars is None:
            column = self._columns.of(role)
            assert column is not None
            line, record = self._records[0]
            where, problem = f"{self._path}, line {line}, column `{column}`", "is text"
            hint = "--tokenizer FOLDER counts them, --chars-per-token 4 estimates them"
            if _whole(record.get(column)) is not None:
                problem = f"has `{record[column]}`, but a column of this name is text"
                length = "input" if role == "text" else "output"
                hint = f"if it has numbers of tokens: --columns {length}={column}; of texts, {hint}"
            raise WorkloadError(where, f"{problem}, and no column has the number of its tokens", hint)

    def row(self, line: int, record: Record) -> TraceRow:
        """Return the row of a record. Raises _BadRowError."""
        arrival_us = self._arrival_us(record)
        prompt, ids = self._prompt(record)
        input_tokens = self._count("input", record)
        if input_tokens is None:
            input_tokens = len(ids) if ids else self._tokens(prompt)
        if not 1 <= input_tokens <= LENGTH_TOKENS_MAX:
            column = self._columns.of("input") or self._columns.of("text") or FILE_COLUMN
            raise _BadRowError(column, input_tokens, f"a whole number of tokens from 1 to {LENGTH_TOKENS_MAX:,}")
        session = self._name("session", record)
        return TraceRow(
            line,
            arrival_us,
            input_tokens,
            self._output(record),
            self._content(prompt, ids, input_tokens),
            session=session,
            busy_us=self._busy_us(record, arrival_us),
            tenant=self._name("tenant", record),
        )

    def _arrival_us(self, record: Record) -> int:
        column = self._columns.of("arrival")
        if column is None:
            return -1
        value = record.get(column)
        found = None if value in (None, "") else time_us(value, self._unit)
        if found is None or found < 0:
            raise _BadRowError(column, value, "a number or a date and time such as 2026-11-26T10:00:00Z")
        return found

    def _busy_us(self, record: Record, arrival_us: int) -> int:
        end, duration = self._columns.of("end"), self._columns.of("duration")
        if end is not None and record.get(end) not in (None, ""):
            found = time_us(record[end], self._unit)
            return max(found - arrival_us, 0) if found is not None and arrival_us >= 0 else 0
        if duration is not None and _is_numeric(record.get(duration)):
            return max(time_us(record[duration], unit_of(duration, ())) or 0, 0)
        return 0

    def _count(self, role: str, record: Record) -> int | None:
        """Return a count of tokens: the column's, or the constant given for it; None without the column."""
        column = self._columns.of(role)
        if column is None:
            return None
        value = column if column.isdecimal() and column not in record else record.get(column)
        if value in (None, "") and (role == "limit" or self._columns.of("text") is not None):
            return None
        number = _whole(value)
        if number is None or not 0 <= number <= LENGTH_TOKENS_MAX:
            raise _BadRowError(column, value, f"a whole number of tokens up to {LENGTH_TOKENS_MAX:,}")
        if role == "input":
            number += sum(_whole(record.get(name)) or 0 for name in self._cached)
        return number

    def _output(self, record: Record) -> int:
        counted = self._count("output", record)
        if counted is not None:
            return counted
        answer = self._columns.of("answer")
        if answer is not None and record.get(answer) not in (None, "") and (self._tokenizer or self._chars):
            return self._tokens(_text_of(record[answer]))
        limit = self._count("limit", record)
        if limit is None:
            column = self._columns.of("output") or answer or self._columns.of("limit") or FILE_COLUMN
            raise _BadRowError(column, record.get(column), "the tokens of the answer, its text, or a limit of tokens")
        self._limited += 1
        return limit

    def _prompt(self, record: Record) -> tuple[str, Sequence[int]]:
        """Return the text of the prompt and its token ids, as far as they are there."""
        column = self._columns.of("ids")
        ids = record.get(column) if column is not None else None
        if isinstance(ids, str) and ids.startswith("["):
            ids = json.loads(ids)
        if ids:
            if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
                raise _BadRowError(str(column), ids, "a list of token ids, whole numbers from 0 to 2**31 - 1")
            return "", ids
        column = self._columns.of("text")
        value = record.get(column) if column is not None else None
        text = "" if value is None else _text_of(value)
        return (text, self._tokenizer.encode(text).ids) if text and self._tokenizer is not None else (text, ())

    def _tokens(self, text: str) -> int:
        if self._tokenizer is not None:
            return len(self._tokenizer.encode(text).ids)
        return max(round(len(text) / (self._chars or 4.0)), 1) if text else 0

    def _content(self, prompt: str, ids: Sequence[int], input_tokens: int) -> Sequence[int]:
        """Return token ids of the prompt, or ids of its blocks of text: equal for equal beginnings."""
        if self.format.content == "token_ids":
            return list(ids) if len(ids) == input_tokens else ()
        if not prompt:
            return ()
        blocks, chain = [], b""
        whole = min(len(prompt) // self._block_chars, input_tokens // BLOCK_TOKENS)
        for block in range(whole):
            part = prompt[block * self._block_chars : (block + 1) * self._block_chars]
            chain = blake2b(chain + part.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if chain not in self._blocks:
                self._blocks[chain] = self._next_block
                self._next_block += 1
            blocks.append(self._blocks[chain])
        for _ in range(-(-input_tokens // BLOCK_TOKENS) - whole):
            blocks.append(self._next_block)
            self._next_block += 1
        return blocks

    def _name(self, role: str, record: Record) -> str:
        column = self._columns.of(role)
        value = record.get(column) if column is not None else None
        return str(value) if isinstance(value, str | int) and value != "" else ""

    def in_sessions(self, rows: list[TraceRow]) -> list[TraceRow]:
        """Return the rows with conversations of several requests as sessions, in order of their times."""
        sizes: dict[str, int] = {}
        for row in rows:
            sizes[row.session] = sizes.get(row.session, 0) + 1
        followers = overlapping = 0
        ends_us: dict[str, int] = {}
        for row in sorted(rows, key=lambda row: row.arrival_us) if self._has_durations else ():
            if row.session and row.session in ends_us:
                followers += 1
                overlapping += row.arrival_us < ends_us[row.session]
            ends_us[row.session] = max(row.arrival_us + row.busy_us, ends_us.get(row.session, 0))
        if 2 * overlapping > followers:
            self._overlapping = overlapping
            return [row._replace(session="") for row in rows]
        self._sessions = sum(1 for name, size in sizes.items() if name and size > 1)
        rows = [row if sizes[row.session] > 1 else row._replace(session="") for row in rows]
        return sorted(rows, key=lambda row: row.arrival_us) if self._sessions and rows[0].arrival_us >= 0 else rows

    def notes(self) -> Iterator[str]:
        """Yield what was understood, and every assumption, one sentence each."""
        read = ", ".join(f"{role}={name}" for role, name in self._columns.names.items())
        yield f"{self._kind}: {len(self._records):,} records, read as {read}"
        if self._columns.of("arrival") is not None and self._is_number:
            yield f"times are numbers, read as {self._unit}"
        if self._cached:
            yield f"a prompt is {self._columns.of('input')} and the cached tokens of {', '.join(self._cached)}"
        if self._overlapping:
            name = self._columns.of("session")
            yield (
                f"{self._overlapping:,} requests begin before the answer before them with the same {name} has ended:"
                f" {name} is not read as a conversation"
            )
        if self._limited:
            yield f"{self._limited:,} answers have the length of their limit, for lack of a count"
        if self._chars is not None and self._tokenizer is None:
            yield f"tokens of texts are estimated by {self._chars:g} characters per token, chat templates not included"
        if self._sessions:
            if self._columns.of("arrival") is None:
                how = "each turn follows the answer before it at once, for lack of times"
            elif self._has_durations:
                how = "the time between an answer and the next turn is kept"
            else:
                how = "without durations, the time of an answer counts as part of the time before the next turn"
            yield f"{self._sessions:,} conversations are sessions; {how}"


# --- cells ------------------------------------------------------------------------------------------------------------

_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")  # as spreadsheets show counts: 2,432


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str) and _THOUSANDS.fullmatch(value.strip()):
        value = value.replace(",", "")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None


def _is_numeric(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


def _text_of(value: Any) -> str:
    """Return a prompt as text: a text, a list of chat messages, or their JSON in a cell."""
    if isinstance(value, str) and value.startswith("[") and '"role"' in value:
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    if isinstance(value, list):
        return "".join(f"{_role(one)}: {_words(one)}\n" if isinstance(one, Mapping) else str(one) for one in value)
    return str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _role(message: Mapping[str, Any]) -> str:
    return str(message.get("role", message.get("from", "")))


def _words(message: Mapping[str, Any]) -> str:
    content = message.get("content", message.get("value", message.get("message", "")))
    if isinstance(content, list):  # parts of a message
        return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return _words(content) if isinstance(content, Mapping) else str(content or "")


def _tokenizer_of(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        hint = "pip install tokenizers, or estimate by --chars-per-token 4"
        raise WorkloadError("`tokenizer`", "counting tokens needs the package tokenizers", hint) from None
    path = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise WorkloadError(
            f"`tokenizer` {path}", f"cannot be read: {error}", "a folder with a tokenizer.json"
        ) from None
