"""Wrong input to the commands of the simulator: one clear error on stderr, nothing on stdout, exit status 2."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.command import main
from lockstep.sim.cluster import intervals
from lockstep.sim.run.out_paths import check_file, check_folder

SIMULATE = ["simulate", "--model", "qwen3-0.6b", "--gpu", "h100", "--workload", "gen:n=2", "--no-intervals"]
POINTS_HEADER = "engine,model,gpu,tp,precision,isl,osl,concurrency,ttft_ms,tpot_ms"
POINT = "vllm,Qwen/Qwen3-8B,H100,1,bf16,64,8,1,20,6"
POINTS = ["--engine", "vllm", "--date", "2026-01-01", "--out", "c.json"]
OPERATORS = ["--model", "qwen3-8b", "--gpu", "h100", "--date", "2026-01-01", "--out", "c.json"]
GEMM = "gemm_dtype,m,n,k,latency\nbfloat16,16,64,64,0.01\n"


def bad(old: str, new: str) -> str:
    """A file with one serving point, in which one part was replaced."""
    return f"{POINTS_HEADER}\n{POINT.replace(old, new)}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with a file where the arguments expect a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """The error message of an invalid command."""
    assert main(list(arguments)) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("Error") == 1, said.err
    assert "Traceback" not in said.err
    return said.err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As with `| head -1`. The points are of one model on one GPU, which is the usual case."""
    points = [POINT.replace(",8,1,", f",8,{users},") for users in (1, 2, 3, 4)]
    Path("points.csv").write_text("\n".join([POINTS_HEADER, *points]))
    program = "import sys; from lockstep.core.command import main; sys.exit(main())"
    words = [sys.executable, "-c", program, "calibrate", "points", "points.csv", *POINTS]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == 141
    assert said == "simulating 4 points\n"
    assert Path("c.json").is_file()
    assert "one row left out" in Path("c.json").read_text()


# ------------------------------------------------------------------------------------------------------ output folders


@pytest.mark.parametrize("out", ["file/run", "file/a/b", "/proc/nobody/run"])
@pytest.mark.parametrize("more", [[], ["--replicas", "2"]])
def test_a_run_folder_that_cannot_be_written_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], out: str, more: list[str]
) -> None:
    said = refused(capsys, *SIMULATE, *more, "--out", out)
    assert said.startswith(f"ConfigError: `--out`: `{out}` cannot be written: ")
    assert said.endswith("hint: choose another place\n")
    assert ("`file` is a file" in said) == out.startswith("file")
    assert "seed" not in said  # the first line of a run


@pytest.mark.parametrize(
    "arguments",
    [
        ["workload", "fit", "gen:n=2", "--overwrite", "-o"],
        ["calibrate", "points", "points.csv", "--engine", "vllm", "--date", "2026-01-01", "--out"],
        ["calibrate", "journal", "run", "--date", "2026-01-01", "--out"],
        ["calibrate", "operators", "tables", "--model", "qwen3-8b", "--gpu", "h100", "--date", "2026-01-01", "--out"],
        ["compare", "a", "b", "--overwrite", "--json"],
        ["compare", "a", "b", "--overwrite", "--html"],
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    option = arguments[-1].replace("-o", "--out") if arguments[-1] == "-o" else arguments[-1]
    said = refused(capsys, *arguments, "folder")
    assert f"ConfigError: `{option}`: `folder` is a folder, expected a file\nhint: name a file in it" in said
    said = refused(capsys, *arguments, "file/x")
    assert f"ConfigError: `{option}`: `file/x` cannot be written: `file` is a file\nhint: choose another place" in said


def test_trying_a_place_leaves_nothing_behind(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    check_folder(tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []
    check_file(tmp_path / "folder" / "x.json")
    assert list((tmp_path / "folder").iterdir()) == []
    check_file(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "in the way"


def test_two_outputs_in_one_file_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--json and --html both name x" in refused(capsys, "compare", "a", "b", "--json", "x", "--html", "./x")


# ------------------------------------------------------------------------------------------------------------ simulate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pages", "99999999999999"], "`pages` is simulated up to 268,435,456, got `99999999999999`\nhint: "),
        (["--request-rows", "99999999999"], "`request_rows` is simulated up to 1,048,576, got `99999999999`\nhint: "),
        (["--max-running-requests", "9999999"], "`max_running_requests` is simulated up to 1,048,576, got `9999999`"),
        (["--waiting-timeout", "soon"], "such as 5s or 250ms, got `soon`"),
        (["--router-hop", "-1ms"], "such as 5s or 250ms, got `-1ms`"),
        (
            ["--router-sessions-max", "5"],
            "is a setting of session_sticky, got `5` under least_requests\nhint: --router s",
        ),
        (
            ["--router", "session_sticky", "--router-load-bound", "2"],
            "`router_load_bound` is a setting of prefix_affin",
        ),
        (["--router-hop", "2min"], "`router_hop` must be from 0 to 60s, got `120s`"),
        (["--replicas", "2000"], "`replicas` must be from 1 to 1024, got `2000`"),
        (["--model", "./binary"], "binary: not readable as JSON: "),
        (["--model", "./list"], "list: expected a JSON object, got `list`\nhint: "),
        (["--gpu", "./binary"], "binary: not readable as JSON: "),
        (["--calibration", "binary"], "binary: not a calibration file: "),
        (["--calibration", "list"], "list: not a calibration file: Expected `object`, got `array`\nhint: "),
        (["--calibration", "folder"], "folder: Is a directory\nhint: "),
        (["--receive-interval", "0"], "`receive_interval` must be at least 1, got `0`\nhint: 1 looks every time"),
        (["--receive-interval", "-1"], "`receive_interval` must be at least 1, got `-1`\nhint: "),
        (["--warm-up", "-1"], "`warm_up` must be a number of requests of at least 0, got `-1`\nhint: 0 measures all"),
        (
            ["--warm-up", "2"],
            "`warm_up` must be less than the 2 requests of the workload, got `2`\nhint: nothing would",
        ),
        (["--concurrency", "0"], "`concurrency` must be from 1 to 1,000,000, got `0`\nhint: leave it out"),
        (["--concurrency", "1", "--warm-up", "2"], "less than the 2 requests of the workload, got `2`\nhint: nothing"),
        (
            ["--tp", "8", "--ep", "3"],
            "ep 3 does not divide tp 8, the GPUs over which experts are split\nhint: --ep 1, 2",
        ),
        (["--expert-cv", "-1"], "`expert_cv` must be from 0 to 8, got `-1.0`\nhint: 0 is even routing"),
        (["--pp", "0"], "`pp` must be at least 1, got `0`\nhint: leave out --pp"),
        (["--attention-dp", "-2"], "`attention_dp` must be at least 1, got `-2`\nhint: leave out --attention-dp"),
    ],
)
def test_values_that_cannot_be_simulated(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("binary").write_bytes(bytes(range(128, 256)))
    Path("list").write_text("[]")
    assert message in refused(capsys, *SIMULATE, *arguments, "--out", "run")
    assert not Path("run").exists()  # a folder left behind would refuse the corrected command


def test_steps_of_a_cluster_are_not_printed_and_that_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_DEBUG", "1")
    said = refused(capsys, *SIMULATE, "--replicas", "2")
    assert said.startswith("ConfigError: LOCKSTEP_DEBUG prints the steps of one engine, got `1` for a cluster\nhint: ")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("2000xh100", "`engines` must be from 1 to 1024, got `2000`"),
        ("1xh100:weight=1e308,1xh200:weight=1e-308", "must be a number from 0.001 to 1000, got `1e308`"),
        ("1xh100:weight=nan", "must be a number from 0.001 to 1000, got `nan`"),
        ("1xh100:weight=heavy", "must be a number from 0.001 to 1000, got `heavy`"),
    ],
)
def test_engines_that_cannot_be_simulated(capsys: pytest.CaptureFixture[str], spec: str, message: str) -> None:
    arguments = ["simulate", "--model", "qwen3-0.6b", "--workload", "gen:n=2", "--engines", spec]
    assert message in refused(capsys, *arguments)


def test_too_little_memory_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def assemble(*_: Any) -> None:
        raise MemoryError("Unable to allocate 1 TiB")

    monkeypatch.setattr("lockstep.sim.run.assemble.assemble", assemble)
    said = refused(capsys, *SIMULATE, status=1)
    assert said == "MemoryError: Unable to allocate 1 TiB\nhint: lower --limit, --pages or --request-rows\n"


@pytest.mark.parametrize("more", [[], ["--replicas", "2"]])
def test_an_interrupt_behind_the_run_keeps_the_run_and_reports_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setattr(intervals, "_summary_at", lambda setup, factor: None)  # as after a Ctrl-C
    arguments = [word for word in SIMULATE if word != "--no-intervals"]
    assert main([*arguments, *more, "--out", "run"]) == 130
    assert "interrupted while the intervals were worked out: the run is complete" in capsys.readouterr().err
    metrics = json.loads(Path("run", "metrics.json").read_text())
    assert metrics["requests"]["completed"] == 2
    assert "intervals" not in metrics


# Before that, Ctrl-C would reach an interpreter that does not run the command yet.
SAYS_WHEN_IT_IS_UP = """
import sys
from lockstep.core.command import main
from lockstep.sim.workload import workload
opened = workload.open_workload
def open_workload(*arguments, **options):
    print("up", flush=True)
    return opened(*arguments, **options)
workload.open_workload = open_workload
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--model", "qwen3-0.6b", "--gpu", "h100", "--workload", "gen:n=16000000,rate=40"],
        ["workload", "describe", "gen:n=16000000"],
        ["workload", "fit", "gen:n=16000000", "-o", "model.json"],
    ],
)
def test_ctrl_c_ends_a_command_with_130_and_no_message(arguments: list[str]) -> None:
    command = [sys.executable, "-c", SAYS_WHEN_IT_IS_UP, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGINT)
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


# ----------------------------------------------------------------------------------------------------------- workloads


def test_a_seed_that_is_none_is_refused_by_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["describe"], ["fit", "-o", "model.json"]):
        said = refused(capsys, "workload", *command, "gen:n=2", "--seed", "-1")
        assert "`seed` must be a whole number from 0 to 9223372036854775807, got `-1`" in said


# ------------------------------------------------------------------------------------------------------- serving points


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "points.csv: cannot be read: No such file or directory\nhint: docs/cost-models.md"),
        ("", "column `engine` is missing"),
        (POINTS_HEADER, "has no rows of engine `vllm`\nhint: give another file"),
        (f"{POINTS_HEADER}\n{POINT}", "has 1 points of engine `vllm`, a calibration needs 4\nhint: measure at more"),
        (bad("Qwen/Qwen3-8B", "Nobody-1"), "; left out: 1 (unknown model `Nobody-1`)"),
        (bad(",64,", ",1e30,"), "row 2: `isl` must be a whole number from 1 to 16,777,216"),
        (bad("H100,1,", "H100,0.5,"), "row 2: `tp` must be a whole number from 1 to 1,024"),
        (bad(",20,", ",nan,"), "row 2: `ttft_ms` must be a number above 0, got `nan`\nhint"),
        (bad(",20,", ",-3,"), "row 2: `ttft_ms` must be a number above 0, got `-3`\nhint"),
    ],
)  # fmt: skip
def test_serving_points_that_calibrate_nothing(
    capsys: pytest.CaptureFixture[str], rows: str | None, message: str
) -> None:
    if rows is not None:
        Path("points.csv").write_text(rows + "\n")
    said = refused(capsys, "calibrate", "points", "points.csv", *POINTS)
    assert message in said
    assert "simulating" not in said


def test_files_that_are_no_serving_points(capsys: pytest.CaptureFixture[str]) -> None:
    Path("binary").write_bytes(bytes(range(128, 256)))
    assert "binary: not a CSV file: " in refused(capsys, "calibrate", "points", "binary", *POINTS)
    assert "folder: cannot be read: Is a directory" in refused(capsys, "calibrate", "points", "folder", *POINTS)
    Path("points.csv").write_text(f"{POINTS_HEADER}\n{POINT}\n")
    said = refused(capsys, "calibrate", "points", "points.csv", *POINTS, "--engine", "sglang")
    assert "has no rows of engine `sglang`\nhint: give --engine vllm" in said
    said = refused(capsys, "calibrate", "points", "points.csv", *POINTS, "--gpu", "h200")
    assert "has no rows of engine `vllm` on `h200`\nhint: give another --gpu" in said
    said = refused(capsys, "calibrate", "points", "points.csv", *POINTS, "--date", "2026-13-41")
    assert "expected a day as YYYY-MM-DD, got `2026-13-41`" in said


# ------------------------------------------------------------------------------------------------------------- journals


def test_journals_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    to = ["--date", "2026-01-01", "--out", "c.json"]
    assert "nowhere does not exist\nhint: give a run folder" in refused(capsys, "calibrate", "journal", "nowhere", *to)
    assert "folder holds no journal" in refused(capsys, "calibrate", "journal", "folder", *to)
    assert main([*SIMULATE, "--replicas", "2", "--out", "cluster", "--no-report", "--no-trace"]) == 0
    capsys.readouterr()
    said = refused(capsys, "calibrate", "journal", "cluster", *to)
    assert "hint: give cluster/engines/0: it is a cluster" in said
    log = next(Path("cluster").glob("engines/1/journal/*.log"))
    log.write_bytes(log.read_bytes()[:50])
    assert "hint: give a run folder" in refused(capsys, "calibrate", "journal", "cluster/engines/1", *to)


# ------------------------------------------------------------------------------------------------------ operator tables


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "gemm.csv: is empty\nhint: docs/cost-models.md"),
        (GEMM.encode().splitlines()[0], "gemm.csv: a header and no rows\nhint: "),
        (bytes(range(128, 256)), "gemm.csv: not a CSV file, plain or gzipped: "),
        (GEMM.encode()[:-6], "gemm.csv, row 2: expected 5 columns, got 4\nhint: is it cut off?"),
        (GEMM.replace("0.01", "nan").encode(), "row 2: `latency` must be a number above 0, got `nan`\nhint: "),
        (GEMM.replace("0.01", "-1").encode(), "gemm.csv, row 2: `latency` must be a number above 0, got `-1`\nhint: "),
        (GEMM.replace(",16,", ",many,").encode(), "gemm.csv, row 2: `m` must be a number above 0, got `many`\nhint: "),
        (GEMM.replace(",16,", ",nan,").encode(), "gemm.csv, row 2: `m` must be a number above 0, got `nan`\nhint: "),
        (GEMM.replace(",16,", ",0,").encode(), "gemm.csv, row 2: `m` must be a number above 0, got `0`\nhint: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["calibrate", "simulate"])
def test_operator_tables_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], command: str, data: bytes, message: str
) -> None:
    Path("tables").mkdir()
    Path("tables", "gemm.csv").write_bytes(data)
    if command == "calibrate":
        said = refused(capsys, "calibrate", "operators", "tables", *OPERATORS)
    else:
        said = refused(capsys, *SIMULATE, "--operators", "tables")
    assert message in said


def test_operator_tables_that_are_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tables", "gemm.csv").mkdir(parents=True)
    said = refused(capsys, "calibrate", "operators", "tables", *OPERATORS)
    assert "gemm.csv: cannot be read: Is a directory" in said
    Path("tables", "gemm.csv").rmdir()
    packed = gzip.compress(GEMM.encode() * 50)
    Path("tables", "gemm.csv.gz").write_bytes(packed[:40])
    said = refused(capsys, "calibrate", "operators", "tables", *OPERATORS)
    assert "gemm.csv.gz: not a CSV file, plain or gzipped: " in said


# ---------------------------------------------------------------------------------------------------------- run folders


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main([*SIMULATE[:-1], "--slo", "ttft_p99=1s", "--no-report", "--no-trace", "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["latency"].update(ttft_us_p99="fast"), "at `$.latency[...]`"),
        (lambda m: m["latency"].update(ttft_us_p99=-5), "`float` >= 0.0"),
        (lambda m: m["latency"].update(ttft_us_p99=10**400), "is damaged: "),
        (lambda m: m["latency"].pop("ttft_us_p99"), "latency has no valid `ttft_us_p99`"),
        (lambda m: m["requests"].update(arrived=None), "requests has no valid `arrived`"),
        (lambda m: m["requests"].update(by_reject_reason=3), "requests has no valid `by_reject_reason`"),
        (lambda m: m.update(scheduler={}), "scheduler has no valid `waiting_mean`"),
        (lambda m: m.update(device={}), "device has no valid `busy_us`"),
        (lambda m: m.update(slos=[1]), "Expected `object`, got `int` - at `$.slos[0]`"),
        (lambda m: m["intervals"].update(answers=3), "Expected `object`, got `int` - at `$.intervals.answers`"),
        (lambda m: m["about"].update(workload=[]), "Expected `object`, got `array` - at `$.about.workload`"),
        (lambda m: m["about"].update(calibration="none"), "Expected `object`, got `str` - at `$.about.calibration`"),
        (lambda m: m["about"].update(scheduler=None), "Expected `object`, got `null` - at `$.about.scheduler`"),
        (lambda m: m["about"].pop("scheduler"), "about has no `scheduler`"),
        (lambda m: m["about"].pop("seed"), "Object missing required field `seed` - at `$.about`"),
    ],
)  # fmt: skip
def test_metrics_that_were_edited_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, run: Path, edit: Any, message: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    metrics = json.loads((copy / "metrics.json").read_text())
    edit(metrics)
    (copy / "metrics.json").write_text(json.dumps(metrics))
    said = refused(capsys, "compare", str(run), "copy")
    assert said.startswith("ConfigError: `copy/metrics.json` is damaged: ")
    assert message in said
    assert said.endswith("hint: run its about.command again\n")


def test_a_journal_that_is_cut_off_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, run: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    log = next((tmp_path / "copy" / "journal").glob("*.log"))
    log.write_bytes(log.read_bytes()[:100])
    said = refused(capsys, "compare", str(run), "copy")
    assert "the journal in `copy` cannot be read: " in said
    assert said.endswith("hint: simulate it again with --overwrite\n")
