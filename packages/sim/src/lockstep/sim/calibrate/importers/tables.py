"""Tables with one request per row: of `lockstep bench serve`, of LLMServingSim, and any CSV with the same columns."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.sim.calibrate.load_runs import (
    AnsweredRequests,
    LoadRun,
    Measurements,
    ServerFacts,
    closed_loop_of,
)
from lockstep.sim.cost import CalibrationError
from lockstep.sim.metrics.columns import COMPLETED
from lockstep.sim.workload.trace_files import read_bytes, to_text

LOCKSTEP, LLMSERVINGSIM, PLAIN = "lockstep bench serve", "LLMServingSim", "CSV of requests"
PLAIN_COLUMNS = ("sent_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens")
LOCKSTEP_COLUMNS = ("arrival_us", "ttft_us", "e2e_us", "prompt_tokens", "output_tokens", "finish_reason")
LLMSERVINGSIM_COLUMNS = ("wall_arrival_s", "first_token_s", "last_token_s", "input_toks", "output_toks")
HINT = f"a CSV of requests has the columns {', '.join(PLAIN_COLUMNS)}; times are seconds by one clock"

Cells = Mapping[str, str]
Numbers = Callable[[str], float]


def read_table(text: str, name: str) -> Measurements:
    """Read a CSV. Raises: CalibrationError with the line and the column of what cannot be read."""
    reader = csv.DictReader(io.StringIO(text))
    header = tuple(reader.fieldnames or ())
    if not header:
        raise CalibrationError(f"{name}, line 1: the file is empty\nhint: {HINT}")
    for form, columns, read_row in _TABLES:
        if set(columns) <= set(header):
            return _rows(reader, name, form, read_row)
    missing = [column for column in PLAIN_COLUMNS if column not in header]
    raise CalibrationError(f"{name}, line 1: column `{missing[0]}` is missing\nhint: {HINT}")


def read_lockstep(folder: Path) -> Measurements:
    """Read the folder of `lockstep bench serve --out`."""
    table, metrics = folder / "requests.csv", folder / "metrics.json"
    if not table.is_file():
        raise CalibrationError(
            f"{folder}: no requests.csv\nhint: give a folder that `lockstep bench serve --out` wrote"
        )
    found = read_table(to_text(table, read_bytes(table)), str(table)).runs[0]
    try:
        about: dict[str, Any] = json.loads(metrics.read_text("utf-8"))["about"]
        workload: dict[str, Any] = about["workload"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(
            f"{metrics}: cannot be read: {error!r}\nhint: run `lockstep bench serve` again"
        ) from error
    facts = ServerFacts(
        model=str(about.get("model") or ""), gpu=str(about.get("gpu") or ""), tp=int(about.get("tp") or 0)
    )
    run = LoadRun(str(folder), LOCKSTEP, found.requests, workload.get("concurrency"), facts, found.left_out)
    return Measurements(runs=(run,))


def _rows(reader: csv.DictReader[str], name: str, form: str, read_row: Callable[[Cells, Numbers], Any]) -> Measurements:
    columns: dict[str, list[float]] = {
        column: [] for column in ("sent_s", "ttft_s", "e2e_s", "prompt_tokens", "output_tokens", "cached_tokens")
    }
    left_out = 0
    try:
        for cells in reader:
            line = reader.line_num

            def number(column: str, cells: Cells = cells, line: int = line) -> float:
                text = (cells.get(column) or "").strip()
                try:
                    value = float(text)
                except ValueError:
                    value = math.nan
                if not math.isfinite(value):
                    raise CalibrationError(
                        f"{name}, line {line}, column `{column}`: expected a number, got `{text[:40]}`\n"
                        "hint: leave the row out"
                    )
                return value

            row = read_row(cells, number)
            if row is None:
                left_out += 1
                continue
            for column, value in zip(columns, row, strict=True):
                columns[column].append(value)
    except csv.Error as error:
        raise CalibrationError(f"{name}, line {reader.line_num}: not CSV: {error}\nhint: {HINT}") from error
    requests = AnsweredRequests.of(name, columns)
    lost = {"not answered": left_out} if left_out else {}
    return Measurements(runs=(LoadRun(name, form, requests, closed_loop_of(requests), left_out=lost),))


def _lockstep_row(cells: Cells, number: Numbers) -> tuple[float, ...] | None:
    if cells["finish_reason"] not in COMPLETED or not cells["ttft_us"]:
        return None
    cached = number("cached_tokens") if (cells.get("cached_tokens") or "").strip() else -1
    return (
        number("arrival_us") / 1e6, number("ttft_us") / 1e6, number("e2e_us") / 1e6, number("prompt_tokens"),
        number("output_tokens"), cached,
    )  # fmt: skip


def _plain_row(cells: Cells, number: Numbers) -> tuple[float, ...]:
    sent = number("sent_s")
    cached = number("cached_tokens") if (cells.get("cached_tokens") or "").strip() else -1
    return (
        sent, number("first_token_s") - sent, number("last_token_s") - sent, number("prompt_tokens"),
        number("output_tokens"), cached,
    )  # fmt: skip


def _llmservingsim_row(cells: Cells, number: Numbers) -> tuple[float, ...]:
    sent = number("wall_arrival_s")
    return (
        sent, number("first_token_s") - sent, number("last_token_s") - sent, number("input_toks"),
        number("output_toks"), -1,
    )  # fmt: skip


_TABLES: tuple[tuple[str, tuple[str, ...], Callable[[Cells, Numbers], Any]], ...] = (
    (LOCKSTEP, LOCKSTEP_COLUMNS, _lockstep_row),
    (LLMSERVINGSIM, LLMSERVINGSIM_COLUMNS, _llmservingsim_row),
    (PLAIN, PLAIN_COLUMNS, _plain_row),
)
