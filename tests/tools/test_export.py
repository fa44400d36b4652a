"""`lockstep export` writes the decisions of a run as tables that can be joined, and that add up to the measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner, Result

from lockstep.core.journal.replay import fold
from lockstep.tools.explain import measured
from lockstep.tools.export import TABLES, export
from tests.support.recorded import SCENARIOS, record_scenario, record_simulation

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ask_a_run.py"


def run_export(*arguments: object) -> Result:
    return CliRunner().invoke(export, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_simulation(
        tmp_path_factory.mktemp("run"),
        "gen:n=40,rate=400,shared_prefix=64x2,input=lognormal:150:0.8,output=lognormal:40:0.8,max_total=700",
        pages=60, max_running_requests=8, chunked_prefill_size=128,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tables(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    result = run_export(run, "--out", folder)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == len(TABLES)
    return folder


def test_rows_are_those_of_the_journal(run: Path, tables: Path) -> None:
    steps = list(fold(run))
    frames = {name: pl.read_parquet(tables / f"{name}.parquet") for name in TABLES}
    assert len(frames["steps"]) == len(steps)
    assert frames["steps"]["event"].to_list() == [type(event).__name__ for event, _ in steps]
    decided = [each for _, step in steps for each in step.decided]
    assert frames["decisions"]["type"].to_list() == [type(each).__name__ for each in decided]
    plans = [plan for _, step in steps if (plan := step.launched()) is not None]
    assert frames["batches"]["batch_id"].to_list() == [plan.batch_id for plan in plans]
    assert len(frames["parts"]) == sum(len(plan.rows) for plan in plans)
    assert frames["parts"].filter(pl.col("extends"))["stop"].sum() == sum(
        int(plan.stops[: plan.extend_rows].sum()) for plan in plans
    )
    requests = measured(run)
    assert frames["requests"]["ttft_us"].to_list() == requests.ttft_us.tolist()
    assert frames["requests"]["retractions"].sum() == int(requests.retractions.sum()) > 0
    retracted = frames["decisions"].filter(pl.col("type") == "RequestRetracted")
    assert len(retracted) == int(requests.retractions.sum())
    assert retracted["beneficiary"].null_count() == len(retracted)
    launching = frames["steps"].filter(pl.col("batch_id").is_not_null())
    assert launching["step"].to_list() == frames["batches"]["step"].to_list()


def test_what_did_not_happen_is_null(tmp_path: Path) -> None:
    assert (SCENARIOS / "limits/input_limit.txt").is_file()
    run = record_scenario(tmp_path / "run", "limits/input_limit")
    assert run_export(run, "--out", tmp_path).exit_code == 0
    requests = pl.read_parquet(tmp_path / "requests.parquet")
    rejected = requests.filter(pl.col("finish_reason").str.starts_with("rejected"))
    assert len(rejected) > 0
    assert rejected["ttft_us"].null_count() == len(rejected)


@pytest.mark.parametrize(
    ("feature", "name", "kind"),
    [("data-parallel", "situation", pl.String), ("data-parallel", "allowed", pl.Boolean),
     ("handover-decode", "cause", pl.String), ("tiers", "outcome", pl.String)],
)  # fmt: skip
def test_columns_are_of_one_kind(feature: str, name: str, kind: type[pl.DataType], tmp_path: Path) -> None:
    done = run_export(SCENARIOS.parent / "golden" / feature, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    column = pl.read_parquet(tmp_path / "decisions.parquet")[name]
    assert column.dtype == kind
    assert column.null_count() < len(column)


def test_tables_are_not_replaced_unasked(run: Path, tables: Path) -> None:
    result = run_export(run, "--out", tables)
    assert result.exit_code == 2
    assert "already has steps" in result.stderr
    assert run_export(run, "--out", tables, "--overwrite").exit_code == 0


def test_a_folder_that_cannot_be_written_is_one_error(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run_export(run, "--out", tmp_path / "file" / "tables")
    assert result.exit_code == 2
    assert result.output.startswith("ConfigError: `--out`: `")
    assert "hint: choose another place" in result.output


def test_the_example_answers_its_questions(tables: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLE, tables], capture_output=True, text=True, check=True)
    for words in ("How much slower are batches", "mixed", "kv_budget", "tokens_again"):
        assert words in done.stdout
