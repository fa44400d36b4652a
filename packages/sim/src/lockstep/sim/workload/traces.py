"""Recorded workloads: rows of a file, with every cell checked.

The format is detected from the first line, not from the file's name. An invalid row stops the reading with file, line,
column and value, before anything is simulated; `skip_bad_rows` leaves such rows out and counts them.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lockstep.sim.workload.log_fields import CACHED, TIME_WORDS, totals_in
from lockstep.sim.workload.logs import LogReading, LogRows, read_log
from lockstep.sim.workload.trace_files import to_text
from lockstep.sim.workload.trace_formats import ABSENT, FORMATS, BadCellError, TraceFormat, TraceRow, shorten
from lockstep.sim.workload.turns import WorkloadError

SKIPPED_EXAMPLES_MAX = 5
PARQUET = b"PAR1"  # first bytes of a Parquet file
USUAL_LOG = LogReading()

_SKIP_HINT = "correct the row, or leave such rows out with --skip-bad-rows"


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """Rows left out because of an invalid cell."""

    count: int = 0
    examples: tuple[str, ...] = ()  # messages of the first few


@dataclass(frozen=True, slots=True)
class Trace:
    format: TraceFormat
    rows: list[TraceRow]  # ascending by arrival, equal times in file order; sessions in file order
    has_clock: bool  # whether rows have arrival times
    skipped: SkippedRows
    notes: tuple[str, ...]  # changes to the rows that are not in their file


def read_trace(path: Path, data: bytes, *, skip_bad_rows: bool = False, log: LogReading = USUAL_LOG) -> Trace:
    """Read every row of a trace file, or of a request log; `data` is its decompressed content. Raises: WorkloadError.

    Args:
        log: how a log is read; with any of its options the file is read as one, whatever its columns.
    """
    text = "" if data.startswith(PARQUET) else to_text(path, data)
    detected = None if data.startswith(PARQUET) or log != USUAL_LOG else _detect(path, text)
    if detected is None:
        return _of_log(path, read_log(path, data, log, skip_bad_rows=skip_bad_rows))
    trace_format, header = detected
    rows: list[TraceRow] = []
    bad_rows = 0
    examples: list[str] = []
    is_json = _is_json(text)
    records = _json_records(text, trace_format) if is_json else _csv_records(text, trace_format, header)
    try:
        for line, cells in records:
            try:
                if isinstance(cells, BadCellError):
                    raise cells
                rows.append(trace_format.parse_row(line, *cells))
            except BadCellError as bad:
                where = f"{path}, line {line}, column `{bad.column}`"
                problem = f"expected {bad.expected}, got `{shorten(bad.value)}`"
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
    rows, notes = _sessions(rows) if trace_format.name == "plain" else (rows, ())
    has_clock = not trace_format.session_clock and any(row.arrival_us >= 0 for row in rows)
    if has_clock:
        _check_times(path, rows)
    if not any(row.session for row in rows):
        notes += _sort(rows)
    return Trace(trace_format, rows, has_clock, SkippedRows(bad_rows, tuple(examples)), notes)


def _of_log(path: Path, log: LogRows) -> Trace:
    rows = list(log.rows)
    has_clock = any(row.arrival_us >= 0 for row in rows)
    notes = log.notes
    if has_clock and not any(row.session for row in rows):
        notes += _sort(rows)
    return Trace(log.format, rows, has_clock, SkippedRows(log.bad_rows, log.examples), notes)


def _sessions(rows: list[TraceRow]) -> tuple[list[TraceRow], tuple[str, ...]]:
    """Treat sessions as closed loops if think times are given, and else as mere names."""
    if not any(row.session for row in rows) or any(row.think_us is not None for row in rows):
        return rows, ()
    note = "column `session` without think times (`think_s`): every row arrives by the clock"
    return [row._replace(session="") for row in rows], (note,)


def _check_times(path: Path, rows: list[TraceRow]) -> None:
    """Check that all rows have arrival times, except later turns of a session. Raises: WorkloadError."""
    open_sessions: set[str] = set()
    for row in rows:
        if row.arrival_us < 0 and row.session not in open_sessions:
            where = f"{path}, line {row.line}, column `arrival_s`"
            raise WorkloadError(
                where, "expected an arrival time, got nothing", "only later turns of a session have none"
            )
        if row.session:
            open_sessions.add(row.session)


def _sort(rows: list[TraceRow]) -> tuple[str, ...]:
    """Sort rows by arrival, in place. Logs written at completion are unordered by nature, so this is no error."""
    backwards = [later.line for row, later in itertools.pairwise(rows) if later.arrival_us < row.arrival_us]
    if not backwards:
        return ()
    rows.sort(key=lambda row: row.arrival_us)
    return (f"sorted by arrival: {len(backwards)} rows precede the row above them, the first in line {backwards[0]}",)


# --- which format -----------------------------------------------------------------------------------------------------


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] == "{"


def _detect(path: Path, text: str) -> tuple[TraceFormat, list[str]] | None:
    """Return the format whose columns are all in the first line, and the names in that line; None for a request log.

    Raises: WorkloadError if only some columns of a format are there, and for an empty file.
    """
    first_line = text.lstrip().split("\n", 1)[0].strip()
    if not first_line:
        raise WorkloadError(str(path), "the file is empty", f"known formats: {'; '.join(map(str, FORMATS))}")
    is_json = first_line.startswith("{")
    if is_json:
        try:
            header = list(msgspec.json.decode(first_line))
        except msgspec.DecodeError as error:
            if first_line[-1] in "{[,":  # an object over several lines
                return None
            raise WorkloadError(f"{path}, line 1", f"not a JSON object: {error}", "is the line cut off?") from None
    else:
        try:
            header = [name.strip() for name in next(csv.reader([first_line]))]
        except csv.Error:
            header = []  # such as a JSON array in one line: no format matches
    candidates = [known for known in FORMATS if ("json" if is_json else "csv") in known.kinds]
    for known in candidates:
        if set(known.columns) <= set(header):
            _check_header(path, known, header)
            return None if _is_other(known, header) else (known, header)
    for known in candidates:
        missing = [column for column in known.columns if column not in header]
        if 2 * len(missing) <= len(known.columns) and known.name != "plain":
            raise WorkloadError(
                f"{path}, line 1, column `{missing[0]}`",
                f"expected the columns {', '.join(known.columns)} of format {known.name}, got {shorten(header)}",
                "rename or add the column; both lengths are required for every request",
            )
    return None


def _is_other(known: TraceFormat, header: list[str]) -> bool:
    """Return whether a file with the lengths of plain rows has times, cached tokens or totals in other columns."""
    if known.name == "plain" and (set(CACHED) & set(header) or totals_in(header) is not None):
        return True
    times = ("arrival_s", "arrival_ms", "arrival_us", "arrival_ns")
    others = [name for name in header if name not in (*known.columns, *known.optional)]
    return known.name == "plain" and not set(times) & set(header) and any(map(TIME_WORDS.search, others))


def _check_header(path: Path, known: TraceFormat, header: list[str]) -> None:
    doubled = next((name for name in (*known.columns, *known.optional) if header.count(name) > 1), None)
    if doubled is not None:
        raise WorkloadError(f"{path}, line 1, column `{doubled}`", "occurs twice", "keep one of them")


# --- records ----------------------------------------------------------------------------------------------------------

_Record = tuple[int, "Sequence[object] | BadCellError"]  # line, and its cells or the error of the whole line


def _json_records(text: str, trace_format: TraceFormat) -> Iterator[_Record]:
    decode = msgspec.json.Decoder().decode
    columns, optional = trace_format.columns, trace_format.optional
    for line, record_text in enumerate(text.split("\n"), 1):
        if not record_text or record_text.isspace():
            continue
        try:
            record = decode(record_text)
            cells = [record[column] for column in columns]
            yield line, [*cells, *[record.get(column, ABSENT) for column in optional]] if optional else cells
        except msgspec.DecodeError as error:
            yield line, BadCellError("(all)", record_text, f"a JSON object ({error})")
        except KeyError as missing:
            yield line, BadCellError(str(missing.args[0]), record_text, "this column in every row")
        except TypeError:
            yield line, BadCellError("(all)", record_text, "a JSON object")


def _csv_records(text: str, trace_format: TraceFormat, header: list[str]) -> Iterator[_Record]:
    reader = csv.reader(io.StringIO(text))
    positions = [header.index(column) for column in trace_format.columns]
    positions += [header.index(column) if column in header else -1 for column in trace_format.optional]
    header_seen = False
    for cells in reader:
        if not cells or (len(cells) == 1 and not cells[0].strip()):
            continue
        if not header_seen:
            header_seen = True
        elif len(cells) != len(header):
            column = header[min(len(cells), len(header) - 1)]
            yield reader.line_num, BadCellError(column, ",".join(cells), f"{len(header)} values, as in the header")
        else:
            yield reader.line_num, [cells[position] if position >= 0 else ABSENT for position in positions]
