"""Recorded workloads: three trace formats, read from text, .gz or .zst, every cell checked.

The format is found from the first line, never from the file's name. A row that cannot be right stops the reading with
file, line, column and value, before anything is simulated; `skip_bad_rows` leaves such rows out and counts them.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
import zstandard

from lockstep.sim.turns import LENGTH_TOKENS_MAX, TIME_US_MAX, WorkloadError

HASH_BLOCK_TOKENS = 512  # tokens behind one of Mooncake's hash ids
SKIPPED_EXAMPLES_MAX = 5

_SKIP_HINT = "correct the row, or leave such rows out with --skip-bad-rows"


class TraceRow(NamedTuple):
    """One request as recorded."""

    line: int  # in the file, from 1
    arrival_us: int  # by the trace's own clock
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] = ()  # one per HASH_BLOCK_TOKENS of the prompt, or none where the trace has no identity


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """Rows left out because a cell cannot be right."""

    count: int = 0
    examples: tuple[str, ...] = ()  # messages of the first few


@dataclass(frozen=True, slots=True)
class Trace:
    format: str
    rows: list[TraceRow]  # ascending by arrival; rows of one instant in the order of the file
    skipped: SkippedRows
    notes: tuple[str, ...]  # what was done to the rows that their file does not show


class _BadCellError(Exception):
    def __init__(self, column: str, value: object, expected: str) -> None:
        self.column = column
        self.value = value
        self.expected = expected


def read_trace(path: Path, *, skip_bad_rows: bool = False) -> Trace:
    """Read every row of a trace file. Raises: WorkloadError."""
    text = _read_text(path)
    trace_format, header = _detect(path, text)
    rows: list[TraceRow] = []
    bad_rows = 0
    examples: list[str] = []
    records = _json_records(text, trace_format) if trace_format.is_json else _csv_records(text, trace_format, header)
    try:
        for line, cells in records:
            try:
                if isinstance(cells, _BadCellError):
                    raise cells
                rows.append(trace_format.parse_row(line, *cells))
            except _BadCellError as bad:
                where = f"{path}, line {line}, column `{bad.column}`"
                problem = f"expected {bad.expected}, got `{_shorten(bad.value)}`"
                if not skip_bad_rows:
                    raise WorkloadError(where, problem, _SKIP_HINT) from None
                bad_rows += 1
                if len(examples) < SKIPPED_EXAMPLES_MAX:
                    examples.append(f"{where}: {problem}")
    except csv.Error as error:
        raise WorkloadError(str(path), f"not readable as CSV: {error}", "is a quotation mark left open?") from None
    if not rows:
        problem = f"no usable row: all {bad_rows} are bad, first: {examples[0]}" if bad_rows else "a header and no rows"
        raise WorkloadError(str(path), problem, "is this the right file?")
    return Trace(trace_format.name, rows, SkippedRows(bad_rows, tuple(examples)), _sort(rows))


def _sort(rows: list[TraceRow]) -> tuple[str, ...]:
    """Bring rows into order of arrival, in place. Logs written at completion are out of order by nature: no error."""
    backwards = [later.line for row, later in itertools.pairwise(rows) if later.arrival_us < row.arrival_us]
    if not backwards:
        return ()
    rows.sort(key=lambda row: row.arrival_us)
    return (f"sorted by arrival: {len(backwards)} rows precede the row above them, the first in line {backwards[0]}",)


# --- formats ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format is its columns and how one row of them is read; the cells are str in CSV, JSON values in JSON lines."""

    name: str
    is_json: bool
    columns: tuple[str, ...]
    parse_row: Callable[..., TraceRow]  # (line, *cells in the order of `columns`); raises _BadCellError

    def __str__(self) -> str:
        return f"{self.name} ({'JSON lines with' if self.is_json else 'CSV with'} {', '.join(self.columns)})"


def _mooncake_row(line: int, timestamp: Any, input_length: Any, output_length: Any, hash_ids: Any) -> TraceRow:
    arrival_us = _time_us("timestamp", timestamp, 1_000, "milliseconds")
    input_tokens = _tokens("input_length", input_length)
    output_tokens = _output_tokens("output_length", output_length)
    if type(hash_ids) is not list or not set(map(type, hash_ids)) <= {int} or min(hash_ids, default=0) < 0:
        raise _BadCellError("hash_ids", hash_ids, "a list of whole numbers, none negative")
    blocks = -(-input_tokens // HASH_BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise _BadCellError(
            "hash_ids",
            f"{len(hash_ids)} ids: {_shorten(hash_ids)}",
            f"{blocks} ids, one per {HASH_BLOCK_TOKENS} of the {input_tokens} tokens of `input_length`",
        )
    return TraceRow(line, arrival_us, input_tokens, output_tokens, hash_ids)


def _azure_row(line: int, timestamp: str, context_tokens: str, generated_tokens: str) -> TraceRow:
    try:
        moment = datetime.fromisoformat(timestamp)  # digits beyond microseconds are cut off
    except ValueError:
        raise _BadCellError("TIMESTAMP", timestamp, "a date and time such as 2023-11-16 18:17:03.9799600") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    arrival_us = (moment - _YEAR_1) // _MICROSECOND
    input_tokens = _tokens("ContextTokens", context_tokens)
    return TraceRow(line, arrival_us, input_tokens, _output_tokens("GeneratedTokens", generated_tokens))


def _vidur_row(line: int, arrived_at: str, num_prefill_tokens: str, num_decode_tokens: str) -> TraceRow:
    arrival_us = _time_us("arrived_at", arrived_at, 1_000_000, "seconds")
    input_tokens = _tokens("num_prefill_tokens", num_prefill_tokens)
    return TraceRow(line, arrival_us, input_tokens, _output_tokens("num_decode_tokens", num_decode_tokens))


FORMATS = (
    TraceFormat("mooncake", True, ("timestamp", "input_length", "output_length", "hash_ids"), _mooncake_row),
    TraceFormat("azure", False, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_row),
    TraceFormat("vidur", False, ("arrived_at", "num_prefill_tokens", "num_decode_tokens"), _vidur_row),
)

_YEAR_1 = datetime(1, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def _detect(path: Path, text: str) -> tuple[TraceFormat, list[str]]:
    """Return the format of which the first line has at least half of the columns, and that line's column names."""
    first_line = text.lstrip().split("\n", 1)[0].strip()
    if not first_line:
        raise WorkloadError(str(path), "the file is empty", f"known formats: {'; '.join(map(str, FORMATS))}")
    is_json = first_line.startswith("{")
    if is_json:
        try:
            header = list(msgspec.json.decode(first_line))
        except msgspec.DecodeError as error:
            raise WorkloadError(f"{path}, line 1", f"not a JSON object: {error}", "is the line cut off?") from None
    else:
        try:
            header = [name.strip() for name in next(csv.reader([first_line]))]
        except csv.Error:
            header = []  # such as a JSON array in one line: no format known here
    for known in FORMATS:
        missing = [column for column in known.columns if column not in header]
        if known.is_json == is_json and 2 * len(missing) <= len(known.columns):
            if missing:
                raise WorkloadError(
                    f"{path}, line 1, column `{missing[0]}`",
                    f"expected the columns {', '.join(known.columns)} of format {known.name}, got {_shorten(header)}",
                    "rename or add the column; arrival times and both lengths are needed of every request",
                )
            return known, header
    raise WorkloadError(
        f"{path}, line 1",
        f"unknown format: expected the columns of a known one, got `{_shorten(first_line)}`",
        f"known formats: {'; '.join(map(str, FORMATS))}",
    )


# --- records and cells ------------------------------------------------------------------------------------------------

_Record = tuple[int, "Sequence[object] | _BadCellError"]  # line, and its cells or what is wrong with all of it


def _json_records(text: str, trace_format: TraceFormat) -> Iterator[_Record]:
    decode = msgspec.json.Decoder().decode
    for line, record_text in enumerate(text.split("\n"), 1):
        if not record_text or record_text.isspace():
            continue
        try:
            record = decode(record_text)
            yield line, [record[column] for column in trace_format.columns]
        except msgspec.DecodeError as error:
            yield line, _BadCellError("(all)", record_text, f"a JSON object ({error})")
        except KeyError as missing:
            yield line, _BadCellError(str(missing.args[0]), record_text, "this column in every row")
        except TypeError:
            yield line, _BadCellError("(all)", record_text, "a JSON object")


def _csv_records(text: str, trace_format: TraceFormat, header: list[str]) -> Iterator[_Record]:
    reader = csv.reader(io.StringIO(text))
    positions = [header.index(column) for column in trace_format.columns]
    header_seen = False
    for cells in reader:
        if not cells or (len(cells) == 1 and not cells[0].strip()):
            continue
        if not header_seen:
            header_seen = True
        elif len(cells) != len(header):
            column = header[min(len(cells), len(header) - 1)]
            yield reader.line_num, _BadCellError(column, ",".join(cells), f"{len(header)} values, as in the header")
        else:
            yield reader.line_num, [cells[position] for position in positions]


def _tokens(column: str, value: object) -> int:
    count = value if type(value) is int else _whole(value)
    if count is None or not 1 <= count <= LENGTH_TOKENS_MAX:
        raise _BadCellError(column, value, f"a whole number of tokens from 1 to {LENGTH_TOKENS_MAX:,}")
    return count


def _output_tokens(column: str, value: object) -> int:
    return 0 if _whole(value) == 0 else _tokens(column, value)


def _whole(value: object) -> int | None:
    """The whole number a cell means, if it means one: 5, "5", and 5.0 as spreadsheets write it."""
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
    if type(value) in (int, float, str):
        try:
            return float(value)  # type: ignore[arg-type]  # one of the three types of the line above
        except (ValueError, OverflowError):
            pass
    return None


def _time_us(column: str, value: object, unit_us: int, unit: str) -> int:
    number = _number(value)
    if number is None or math.isnan(number) or not 0 <= number * unit_us < TIME_US_MAX:
        raise _BadCellError(column, value, f"a time in {unit}, finite and not negative")
    return round(number * unit_us)


def _shorten(value: object) -> str:
    text = value if type(value) is str else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- bytes ------------------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        hint = "check the path; a generated workload begins with gen:, such as gen:n=100,rate=2"
        raise WorkloadError(str(path), "no such file", hint) from None
    except OSError as error:
        raise WorkloadError(str(path), f"cannot be read: {error.strerror}", "name a trace file") from None
    try:
        return _decompress(path, data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"not text: byte {error.start} is not UTF-8"
        raise WorkloadError(str(path), problem, "only plain text, .gz and .zst are read") from None


def _decompress(path: Path, data: bytes) -> bytes:
    """Undo gzip or Zstandard, told by their first bytes; anything else is returned as it is."""
    try:
        if data.startswith(b"\x1f\x8b"):
            return gzip.decompress(data)
        if data.startswith(b"\x28\xb5\x2f\xfd"):
            return _decompress_zstd(data)
    except EOFError:
        _raise_broken(path, data, "the compressed data ends too early")
    except (OSError, zlib.error) as error:
        _raise_broken(path, data, f"the compressed data is damaged: {error}")
    return data


def _decompress_zstd(data: bytes) -> bytes:
    parts = []
    rest = data
    while rest:  # a file may hold several frames
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            parts.append(frame.decompress(rest))
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        if not frame.eof:
            raise EOFError
        rest = frame.unused_data
    return b"".join(parts)


def _raise_broken(path: Path, data: bytes, problem: str) -> NoReturn:
    raise WorkloadError(str(path), f"{problem} ({len(data):,} bytes)", "fetch or compress the file again") from None
