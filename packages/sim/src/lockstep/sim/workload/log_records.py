"""Records of request logs as they are exported: CSV of any separator, JSON, Parquet, spans, tables and logs as text.

A record is a dict from column to value; nested columns are joined by dots, `usage.prompt_tokens`. The kind of a file is
recognised by its content.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lockstep.sim.workload.log_fields import has_usual_name
from lockstep.sim.workload.trace_files import to_text
from lockstep.sim.workload.trace_formats import shorten
from lockstep.sim.workload.turns import WorkloadError

Record = dict[str, Any]
Lines = list[tuple[int, Record]]
"""Records with their lines in the file, from 1; in Parquet and in JSON arrays with the numbers of the rows."""

SEPARATORS = ",;\t|"
LINES_WITHOUT = 20  # of a log, before its first line with a JSON object
PROMPTS = ("input", "ids", "text")  # roles of columns that only requests have
KINDS = "CSV with a header, JSON, JSON lines, Parquet, an access log, or a request log of vLLM or SGLang"
LISTS = ("data", "results", "requests", "logs", "items", "observations", "rows")
"""Names under which exports in one JSON object have their records."""

_VLLM = re.compile(r"Received request (?P<id>[^\s:]+)")
_SGLANG = re.compile(r"(?P<kind>Receive|Finish): obj=GenerateReqInput\(")
_ACCESS = re.compile(
    r'^(?P<remote_addr>\S+) \S+ (?P<remote_user>\S+) \[(?P<time_local>[^\]]+)\] "(?P<request>[^"]*)" '
    r'(?P<status>\d{3}) (?P<body_bytes_sent>\d+|-)(?: "[^"]*" "[^"]*")?(?P<rest>.*)$'
)
_GIN = re.compile(
    r"\[GIN\] (?P<time>\S+ - \S+) \| *(?P<status>\d{3}) \| *(?P<took>\S+) \| *(?P<remote_addr>\S+) "
    r'\| *(?P<request>\S+ +"[^"]*")'
)
"""Access logs of programs in Go: Ollama, LocalAI."""
_RULE = re.compile(r"^[|+: -]*-{3,}[|+: -]*$")
"""The line below the header of a table as psql, MySQL and Markdown print it."""
_ROW_COUNT = re.compile(r"^\(?\d+ rows?\b.*$")
_IN_LINE = re.compile(r"^[^{\",;|]*?(\{.*\})\s*$")
"""A JSON object behind the prefix of a log line: a time, a stream, a level."""
_PREFIX_STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?|(?<!\d)\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?")


def read_records(path: Path, data: bytes) -> tuple[str, Lines]:
    """Return the kind of a file, in words, and its records. Raises: WorkloadError with the line."""
    if data.startswith(b"PAR1"):
        return "Parquet", _parquet(path, data)
    text = to_text(path, data)
    start = text.lstrip()[:1]
    if start == "[" and text.lstrip()[1:].lstrip()[:1] in ("{", "]"):
        return "a JSON array", _array(path, _decoded(path, text))
    if start == "{":
        return _json(path, text)
    first = next((line for line in text.splitlines() if line.strip()), "")
    if _ACCESS.match(first):
        return "an access log", _access(path, text)
    if _GIN.search(first):
        return "an access log of Gin", _gin(text)
    if (found := _in_lines(text)) is not None:
        return "JSON in lines of a log", found
    if _VLLM.search(text):
        return "a request log of vLLM", _vllm(text)
    if _SGLANG.search(text):
        return "a request log of SGLang", _sglang(text)
    return "CSV", _csv(path, text)


# --- kinds ------------------------------------------------------------------------------------------------------------


def _parquet(path: Path, data: bytes) -> Lines:
    import polars as pl

    try:
        frame = pl.read_parquet(io.BytesIO(data))
    except pl.exceptions.PolarsError as error:
        raise WorkloadError(str(path), f"not readable as Parquet: {error}", "is the file complete?") from None
    return [(row, _flat(record)) for row, record in enumerate(frame.iter_rows(named=True), 1)]


def _decoded(path: Path, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        at = re.search(r"byte (\d+)", str(error))
        line = text.encode()[: int(at[1])].count(b"\n") + 1 if at else text.count("\n") + 1
        raise WorkloadError(f"{path}, line {line}", f"not valid JSON: {error}", "is the file complete?") from None


def _json(path: Path, text: str) -> tuple[str, Lines]:
    """Return JSON lines or, if the first line is not a whole object, one object with a list of records."""
    decode = msgspec.json.Decoder().decode
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    try:
        first = decode(lines[0][1])
    except msgspec.DecodeError:
        whole = _decoded(path, text)
        return _listed(path, whole)
    if len(lines) == 1 and isinstance(first, dict) and _has_records(first):
        return _listed(path, first)
    records: Lines = []
    for number, line in lines:
        try:
            record = decode(line)
        except msgspec.DecodeError as error:
            raise WorkloadError(
                f"{path}, line {number}", f"expected a JSON object, got `{shorten(line)}` ({error})", "is it cut off?"
            ) from None
        if not isinstance(record, dict):
            raise WorkloadError(
                f"{path}, line {number}", f"expected a JSON object, got `{shorten(line)}`", "one per line"
            )
        if "resourceSpans" in record:
            records += [(number, span) for span in _spans(record)]
        else:
            records.append((number, _flat(record)))
    return "JSON lines", [record for one in records for record in _unpacked(*one)]


def _unpacked(number: int, record: Record) -> Lines:
    """Return the record that a container's log has as text under `log`, or the record itself."""
    text = record.get("log")
    if not isinstance(text, str) or "stream" not in record:
        return [(number, record)]
    try:
        inner = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return []  # a line of text beside those of requests
    return [(number, {"time": record.get("time")} | _flat(inner))] if isinstance(inner, dict) else []


def _in_lines(text: str) -> Lines | None:
    """Return the JSON objects behind the prefixes of log lines; None if the first lines have none."""
    records: Lines = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _IN_LINE.match(line)
        if match is None:
            if number > LINES_WITHOUT and not records:
                return None
            continue
        try:
            record = msgspec.json.decode(match[1])
        except msgspec.DecodeError:
            continue
        if isinstance(record, dict):
            stamp = _PREFIX_STAMP.match(line)
            records.append((number, ({"log_time": stamp[0]} if stamp else {}) | _flat(record)))
    return records or None


def _listed(path: Path, whole: Any) -> tuple[str, Lines]:
    if isinstance(whole, dict) and "resourceSpans" in whole:
        return "OpenTelemetry spans", [(number, span) for number, span in enumerate(_spans(whole), 1)]
    if isinstance(whole, dict) and (name := _list_name(whole)) is not None:
        rows = whole[name]
        if rows and all(isinstance(row, dict) and isinstance(row.get("results"), list) for row in rows):
            rows = [{**row, **one, "results": None} for row in rows for one in row["results"]]
        return f"a JSON object with `{name}`", _array(path, rows)
    if isinstance(whole, dict) and _is_by_name(whole):
        return "a JSON object of requests by name", _array(path, list(whole.values()))
    names = ", ".join(whole) if isinstance(whole, dict) else type(whole).__name__
    hint = f"a list of records under one of {', '.join(LISTS)}, an array, or one object per line"
    raise WorkloadError(f"{path}, line 1", f"one JSON object with {shorten(names)} has no list of requests", hint)


def _list_name(whole: Mapping[str, Any]) -> str | None:
    """Return the name under which an object has its records: a usual one, or that of a list of requests."""
    usual = (name for name in LISTS if isinstance(whole.get(name), list))
    if _is_request(whole):
        return next(usual, None)
    other = (name for name, rows in whole.items() if isinstance(rows, list) and rows and all(map(_is_request, rows)))
    return next(usual, None) or next(other, None)


def _has_records(whole: Mapping[str, Any]) -> bool:
    """Return whether an object has records rather than being one."""
    return "resourceSpans" in whole or _list_name(whole) is not None or _is_by_name(whole)


def _is_by_name(whole: Mapping[str, Any]) -> bool:
    """Return whether an object has requests as the values of their names: with a common column of prompts."""
    columns = [set(_flat(row)) if isinstance(row, dict) else set() for row in whole.values()]
    return bool(columns) and any(has_usual_name(name, PROMPTS) for name in set.intersection(*columns))


def _is_request(row: Any) -> bool:
    """Return whether an object has a prompt or its length under a usual name."""
    return isinstance(row, dict) and any(has_usual_name(name, PROMPTS) for name in _flat(row))


def _array(path: Path, rows: list[Any]) -> Lines:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise WorkloadError(
                f"{path}, record {number}", f"expected an object, got `{shorten(row)}`", "one per request"
            )
    return [(number, _flat(row)) for number, row in enumerate(rows, 1)]


def _spans(whole: Mapping[str, Any]) -> Iterator[Record]:
    """Yield the spans of an OTLP export that have attributes of GenAI usage."""
    for resource in whole.get("resourceSpans") or ():
        for scope in resource.get("scopeSpans") or ():
            for span in scope.get("spans") or ():
                flat = _flat({name: value for name, value in span.items() if name != "attributes"})
                flat |= {
                    str(one["key"]): next(iter(one["value"].values()), None) for one in span.get("attributes") or ()
                }
                if any(name.startswith("gen_ai.usage.") for name in flat):
                    yield flat


def _csv(path: Path, text: str) -> Lines:
    text = _without_rules(text)
    header_line = next((line for line in text.splitlines() if line.strip()), "")
    separator = max(SEPARATORS, key=header_line.count)
    if not header_line.count(separator):
        raise WorkloadError(f"{path}, line 1", f"unknown format, begins with `{shorten(header_line)}`", KINDS)
    reader = csv.reader(io.StringIO(text), delimiter=separator)
    header: list[str] = []
    records: Lines = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                continue
            if len(cells) != len(header):
                if not any(has_usual_name(name) for name in header):
                    raise WorkloadError(
                        f"{path}, line 1", f"unknown format, begins with `{shorten(header_line)}`", KINDS
                    )
                column = header[min(len(cells), len(header) - 1)]
                where = f"{path}, line {reader.line_num}, column `{column}`"
                problem = f"expected {len(header)} values, as in the header, got {len(cells)}"
                raise WorkloadError(where, problem, f"quote values that contain `{separator}`")
            records.append((reader.line_num, dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        raise WorkloadError(
            f"{path}, line {reader.line_num}", f"not readable as CSV: {error}", "an open quote?"
        ) from None
    return records


def _without_rules(text: str) -> str:
    """Return a table that a program printed without its rules and its count of rows; other texts as they are."""
    lines = text.splitlines()
    if not any(_RULE.match(line) for line in lines[:3]):
        return text
    kept = ["" if _RULE.match(line) or _ROW_COUNT.match(line) else line.strip() for line in lines]
    if all(line.startswith("|") and line.endswith("|") for line in kept if line):
        kept = [line[1:-1] for line in kept]
    return "\n".join(kept)


def _gin(text: str) -> Lines:
    return [
        (number, dict(match.groupdict()))
        for number, line in enumerate(text.splitlines(), 1)
        if (match := _GIN.search(line)) is not None
    ]


def _access(path: Path, text: str) -> Lines:
    records: Lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _ACCESS.match(line)
        if match is None:
            problem = f"expected an access log line, got `{shorten(line)}`"
            raise WorkloadError(f"{path}, line {number}", problem, "remove the line")
        found: Record = {name: value for name, value in match.groupdict().items() if name != "rest"}
        found |= dict(re.findall(r"(\w+)[=:]\"?([\w.+-]+)", match["rest"]))
        records.append((number, found))
    return records


def _vllm(text: str) -> Lines:
    records: Lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if _VLLM.search(line) is None:
            continue
        stamp = _STAMP.search(line)
        found: Record = {"time": stamp[0] if stamp else None}
        found |= _ids_of(line, r"prompt_token_ids: \[([\d, ]*)\]")
        limit = re.search(r"max_tokens=(\d+)", line)
        prompt = re.search(r"prompt: (['\"])(.*?)\1, params:", line)
        found |= {"max_tokens": limit[1]} if limit else {}
        found |= {"prompt": prompt[2]} if prompt and prompt[2] else {}
        records.append((number, found))
    return records


def _sglang(text: str) -> Lines:
    """Return one record per finished request, at the time when it was received if the log has it."""
    received: dict[str, str] = {}
    records: Lines = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _SGLANG.search(line)
        if match is None:
            continue
        stamp, rid = _STAMP.search(line), re.search(r"rid='?([\w-]+)", line)
        time, name = stamp[0] if stamp else None, rid[1] if rid else str(number)
        if match["kind"] == "Receive":
            if time is not None:
                received[name] = time
            continue
        found: Record = {"time": received.get(name, time), "end_time": time}
        for count in ("prompt_tokens", "completion_tokens"):
            value = re.search(rf"'{count}': (\d+)", line)
            found |= {count: value[1]} if value else {}
        records.append((number, found | _ids_of(line, r"input_ids=\[([\d, ]*)\]")))
    return records


def _ids_of(line: str, pattern: str) -> Record:
    ids = re.search(pattern, line)
    return (
        {"prompt_token_ids": [int(one) for one in ids[1].split(",") if one.strip()]} if ids and ids[1].strip() else {}
    )


def _flat(record: Mapping[str, Any], before: str = "") -> Record:
    """Return a record without nested objects: their columns are joined by dots. Lists stay as they are."""
    found: Record = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found
