"""`lockstep export`: the decisions of a run as Parquet tables, for queries in SQL.

steps       one row per event: time, type, the launched batch, the state after it
decisions   one row per decided event; one column for every field of any decided event
batches     one row per launched batch, with its times on the device
parts       one row per request and batch: the positions that it computed
requests    one row per request: the latencies of docs/metrics.md, and the finish reason

`step`, `batch_id` and `request_id` join the tables. Times are microseconds since the journal began. Missing values are
null.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import click
import msgspec
import numpy as np

from lockstep.core.contract.commands import BatchPlan, Step
from lockstep.core.contract.events import BatchFinished, Decided, ObservedEvent, decided_types
from lockstep.core.contract.render import Names
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.run.out_paths import check_folder
from lockstep.tools.runs import RUN, Walk, print_json, refusals

TABLES = ("steps", "decisions", "batches", "parts", "requests")
COLUMNS = tuple(dict.fromkeys(field.name for type_ in decided_types() for field in msgspec.structs.fields(type_)))


def kinds() -> dict[str, str]:
    """Return the polars type of each column of `decisions` by name, derived from the types of the fields."""
    found: dict[str, str] = {}
    for type_ in decided_types():
        for name, hint in get_type_hints(type_).items():
            text = hint is str or get_origin(hint) in (Literal, tuple)  # tuples as JSON
            found.setdefault(name, "String" if text else "Boolean" if hint is bool else "Int64")
    return found


@click.command(context_settings={"max_content_width": 120})
@RUN
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder for the tables.")
@click.option("--overwrite", is_flag=True, help="Replace existing tables.")
@click.option("--json", "as_json", is_flag=True, help="Rows of each table as one JSON object.")
def export(run: Path, out: Path, overwrite: bool, as_json: bool) -> None:
    """Write the decisions of a run as Parquet tables, for queries in polars or DuckDB.

    \b
    lockstep export runs/chat --out tables
    """
    there = [name for name in TABLES if (out / f"{name}.parquet").exists()]
    if there and not overwrite:
        raise click.UsageError(f"{out} already has {', '.join(there)}\nhint: choose another folder, or add --overwrite")
    with refusals():
        check_folder(out)
        tables = ExportTables()
        walk = Walk(run)
        for number, event, step in walk:
            tables.observe(number, event, step, walk.engine)
        rows = tables.write(out, walk.names)
    if as_json:
        print_json(rows)
        return
    for name, count in rows.items():
        path = out / f"{name}.parquet"
        click.echo(f"{path}: {count:,} rows, {path.stat().st_size:,} bytes")


class ExportTables:
    """Collects the rows of all tables. `observe` must be called with every step of a replay, in order."""

    def __init__(self) -> None:
        self._steps: dict[str, Any] = {
            "time_us": array("q"), "event": [], "batch_id": [], "waiting": array("i"), "running": array("i"),
            "in_flight": array("i"), "free_pages": array("i"), "available_pages": array("i"),
        }  # fmt: skip
        self._decided: list[tuple[int, Decided]] = []
        self._plans: list[tuple[int, int, BatchPlan]] = []
        self._results: dict[int, tuple[int, int, int]] = {}
        self._metrics = MetricsFold()

    def observe(self, number: int, event: ObservedEvent, step: Step, engine: Engine) -> None:
        """Add step `number`. `engine` is in its state after the step."""
        plan = step.launched()
        steps = self._steps
        steps["time_us"].append(event.time_us)
        steps["event"].append(type(event).__name__)
        steps["batch_id"].append(plan.batch_id if plan is not None else None)
        steps["waiting"].append(len(engine.waiting))
        steps["running"].append(engine.active)
        steps["in_flight"].append(len(engine.in_flight))
        steps["free_pages"].append(engine.memory.pool.free_count)
        steps["available_pages"].append(engine.memory.available_pages)
        self._decided += [(number, decided) for decided in step.decided]
        if plan is not None:
            self._plans.append((number, event.time_us, plan))
        if isinstance(event, BatchFinished) and event.batch_id not in self._results:
            self._results[event.batch_id] = (event.started_us, event.finished_us, event.time_us)
        self._metrics.observe(event, step)

    def write(self, folder: Path, names: Names) -> dict[str, int]:
        """Write every table to `folder`; return the number of rows of each."""
        import polars as pl

        folder.mkdir(parents=True, exist_ok=True)
        frames = {
            "steps": self._step_frame(),
            "decisions": self._decision_frame(names),
            "batches": self._batch_frame(),
            "parts": self._part_frame(),
            "requests": self._request_frame(names),
        }
        for name, columns in frames.items():
            pl.DataFrame(columns).write_parquet(folder / f"{name}.parquet")
        return {name: len(next(iter(columns.values()))) for name, columns in frames.items()}

    def _step_frame(self) -> dict[str, Any]:
        columns = {
            name: np.array(values) if isinstance(values, array) else values for name, values in self._steps.items()
        }
        return {"step": np.arange(len(columns["event"])), **columns}

    def _decision_frame(self, names: Names) -> dict[str, Any]:
        import polars as pl

        kind_of = kinds()
        columns: dict[str, Any] = {
            "step": [number for number, _ in self._decided],
            "type": [type(decided).__name__ for _, decided in self._decided],
        }
        for name in COLUMNS:
            values = [getattr(decided, name, None) for _, decided in self._decided]
            if name in ("behind", "beneficiary"):
                values = [None if value == -1 else value for value in values]
            elif any(type(value) is tuple for value in values):
                values = [msgspec.json.encode(value).decode() if value else None for value in values]
            columns[name] = pl.Series(name, values, getattr(pl, kind_of[name]))
        columns["request"] = [None if r is None else names.request(r) for r in columns["request_id"].to_list()]
        return columns

    def _batch_frame(self) -> dict[str, Any]:
        import polars as pl

        plans = [plan for _, _, plan in self._plans]
        times = [self._results.get(plan.batch_id, (None, None, None)) for plan in plans]
        prompts = [int((plan.stops[: plan.extend_rows] - plan.starts[: plan.extend_rows]).sum()) for plan in plans]
        return {
            "batch_id": [plan.batch_id for plan in plans],
            "step": [number for number, _, _ in self._plans],
            "mode": pl.Series("mode", [plan.mode for plan in plans], pl.String),
            "rows": [len(plan.rows) for plan in plans],
            "extend_rows": [plan.extend_rows for plan in plans],
            "new_tokens": [int((plan.stops - plan.starts).sum()) for plan in plans],
            "prefill_tokens": prompts,
            "kv_tokens": [int(plan.stops.sum()) for plan in plans],
            "launched_us": [time_us for _, time_us, _ in self._plans],
            "started_us": pl.Series("started_us", [time[0] for time in times], pl.Int64),
            "finished_us": pl.Series("finished_us", [time[1] for time in times], pl.Int64),
            "delivered_us": pl.Series("delivered_us", [time[2] for time in times], pl.Int64),
        }

    def _part_frame(self) -> dict[str, Any]:
        plans = [plan for _, _, plan in self._plans]
        sizes = [len(plan.rows) for plan in plans]

        def joined(parts: list[Any]) -> Any:
            return np.concatenate(parts) if parts else np.empty(0, np.int64)

        return {
            "batch_id": np.repeat(np.array([plan.batch_id for plan in plans], np.int64), sizes),
            "request_id": joined([plan.request_ids for plan in plans]),
            "extends": joined([np.arange(len(plan.rows)) < plan.extend_rows for plan in plans]).astype(bool),
            "start": joined([plan.starts for plan in plans]),
            "stop": joined([plan.stops for plan in plans]),
        }

    def _request_frame(self, names: Names) -> dict[str, Any]:
        import polars as pl

        columns: dict[str, Any] = {}
        for name, values in self._metrics.result().requests.columns().items():
            if values.dtype.kind in "OUST":
                columns[name] = pl.Series(name, [str(value) or None for value in values], pl.String)
            elif values.dtype.kind == "f":
                columns[name] = pl.Series(name, values).fill_nan(None)
            else:
                columns[name] = pl.Series(name, [None if value < 0 else value for value in values.tolist()], pl.Int64)
        columns["request"] = [names.request(request_id) for request_id in columns["request_id"].to_list()]
        return columns


if __name__ == "__main__":
    export()
