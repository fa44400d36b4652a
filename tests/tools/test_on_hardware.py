"""`lockstep replay PLANS --on-hardware` runs a journal's batches, and `lockstep calibrate` fits to their times."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from lockstep.core.contract.commands import BatchPlan, Mode
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import fold
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cost import BatchShape, Calibration, CalibrationError, decode_shape, roofline_model
from lockstep.sim.results.batch_times import (
    BatchTime,
    BatchTimesHeader,
    line_of,
    of_journal,
    outliers,
    predict,
    read_batch_times,
)
from lockstep.tools.replay import replay
from tests.support.recorded import record_simulation

WORKLOAD = (
    "gen:n={n},rate=40,turns=uniform:1:2,think=fixed:5ms,shared_prefix=24x2,input=uniform:4:200,output=uniform:2:9"
)
SETTINGS = {"pages": 400, "max_running_requests": 8, "chunked_prefill_size": 128, "batching": "mixed"}


def plans_of(folder: Path) -> list[BatchPlan]:
    return [plan for _, step in fold(folder) if (plan := step.launched()) is not None]


def on_hardware(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(replay, [words[0], "--on-hardware", *words[1:]])


def calibrated(*arguments: object) -> Result:
    return CliRunner().invoke(calibrate, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_simulation(tmp_path_factory.mktemp("runs") / "simulated", WORKLOAD.format(n=30), **SETTINGS)


# ------------------------------------------------------------------------------------------------------ with a runtime


@pytest.fixture(scope="module")
def measured(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A simulated run's plans, run on the CPU with the demo model."""
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    out = tmp_path_factory.mktemp("measured") / "measured.jsonl"
    return out, on_hardware(run, "--device", "cpu", "--out", out, "--json")


def test_every_batch_of_a_simulated_run_is_timed_on_the_demo_model(run: Path, measured: tuple[Path, Result]) -> None:
    out, result = measured
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    plans, times = plans_of(run), read_batch_times(out)
    assert len(plans) > 100
    assert [one.batch_id for one in times.batches] == [plan.batch_id for plan in plans]
    assert [one.mode for one in times.batches] == [plan.mode for plan in plans]
    assert said["batches"] == len(plans) == said["errors"][-1]["batches"]
    assert {row["mode"] for row in said["errors"]} == {"extend", "decode", "mixed", "all"}
    assert times.measured is not None
    assert (times.measured.model, times.measured.gpu, times.measured.device) == ("demo", "cpu-core", "cpu")
    cost = roofline_model(load_model("demo"), load_gpu("cpu"))
    assert np.allclose(predict(cost, times.batches), [one.predicted_us for one in times.batches], atol=0.1)


def all_held_out(made: Result) -> tuple[float, float]:
    """The median error before and after, in percent, that `calibrate` reports of all held-out batches."""
    words = made.stdout.splitlines()[-1].split()
    assert words[:2] == ["all", "median"]
    return float(words[2].rstrip("%")), float(words[4].rstrip("%"))


def test_what_was_measured_makes_predictions_better(run: Path, measured: tuple[Path, Result], tmp_path: Path) -> None:
    head, *lines = measured[0].read_text().splitlines()
    took = [(one := json.loads(line)) | {"took_us": 3 * one["predicted_us"] + 2000} for line in lines]
    out = tmp_path / "steady.jsonl"  # as on an otherwise idle device: its times follow from the work
    out.write_text("\n".join([head, *map(json.dumps, took)]) + "\n")
    made = calibrated("--from", out, "--date", "2026-11-22", "--out", tmp_path / "cpu.json")
    assert made.exit_code == 0, made.output
    before, after = all_held_out(made)
    assert after < before / 4
    calibration = Calibration.load(tmp_path / "cpu.json")
    assert (calibration.models, calibration.gpu) == (("demo",), "cpu-core")
    assert calibration.sources[0].kind == "batch_times"
    again = on_hardware(
        run, "--device", "cpu", "--calibration", tmp_path / "cpu.json", "--batches", 60, "--out", tmp_path / "again"
    )
    assert again.exit_code == 0, again.output
    batches = read_batch_times(tmp_path / "again").batches
    assert len(batches) == 60
    cost = calibration.cost_model(roofline_model(load_model("demo"), load_gpu("cpu")))
    assert np.allclose(predict(cost, batches), [one.predicted_us for one in batches], atol=0.1)


def test_a_run_of_one_request_is_one(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    run = record_simulation(tmp_path / "one", WORKLOAD.format(n=1), **SETTINGS)
    result = on_hardware(run, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["batches"] == len(plans_of(run)) > 1


def test_the_table_names_kinds_sizes_and_what_ran(run: Path) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    result = on_hardware(run, "--device", "cpu", "--batches", 12)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["batches", "count", "measured", "predicted", "ratio", "error", "error", "p95"]
    assert any(line.startswith("extend ") for line in lines)
    assert lines[-2].startswith("ran     demo on cpu: float32, attention by cpu")
    assert lines[-1] == "by      demo on cpu-core, not calibrated"


def test_a_run_under_grammars_gives_the_same_again_and_so_does_one_with_kv_in_fp8(tmp_path: Path) -> None:
    """A journal of the runtime itself, with deferred sampling and drafts: greedy answers equal those of the run."""
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    pytest.importorskip("llguidance", reason="no library of grammars is installed")
    from lockstep.host.engine_options import RankOptions
    from lockstep.host.recorded import RecordedAnswer, run_recorded
    from lockstep.runtime import LLM, Params
    from lockstep.runtime.recorded import make_runner
    from lockstep.tools.on_hardware import _extent

    grammars = [("regex", r"[0-9]{3}-[0-9]{4}"), None, ("json_schema", '{"enum": ["yes", "no", "perhaps"]}')]
    each = [Params(max_new_tokens=12, ignore_eos=True, grammar=one) for one in grammars]
    settings = {"overlap_depth": 1, "chunked_prefill_size": 16, "kv_cache_dtype": "fp8_e4m3"}
    with LLM(device="cpu", journal=tmp_path / "run", **settings) as llm:
        said = [one.token_ids for one in llm.generate(["def f(", "The list is", "Return "], each)]
    result = on_hardware(tmp_path / "run", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert "KV in fp8" in json.loads(result.stdout)["notes"]
    config = read_journal(tmp_path / "run").header.config
    runner = make_runner(_extent(tmp_path / "run", None), config, RankOptions(kv_cache_dtype="fp8_e4m3"), device="cpu")
    found: list[RecordedAnswer] = []
    assert list(run_recorded(tmp_path / "run", runner.made.executor, runner.made.model.settings.vocab, found.append))
    assert [one.tokens for one in sorted(found, key=lambda one: one.request_id)] == said


def test_grammars_of_a_simulation_allow_everything(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    run = record_simulation(tmp_path, WORKLOAD.format(n=6) + ",grammars=0.7x2", **SETTINGS)
    result = on_hardware(run, "--device", "cpu", "--kv-cache-dtype", "fp8_e4m3", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["batches"] > 1
    assert "KV in fp8" in told["notes"]


def test_ctrl_c_ends_it_with_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    long = record_simulation(tmp_path / "long", WORKLOAD.format(n=2000), **SETTINGS)
    out = tmp_path / "out.jsonl"
    code = "import sys; from lockstep.tools.replay import replay; sys.exit(replay(standalone_mode=False))"
    words = [sys.executable, "-c", code, str(long), "--on-hardware", "--device", "cpu", "--out", str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until_s = time.monotonic() + 300
        while not (out.exists() and out.read_bytes().count(b"\n") > 20):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < until_s
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert stdout.startswith("interrupted: the figures end there\n")
    assert 20 <= len(read_batch_times(out).batches) < len(plans_of(long))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "nope"], "unknown GPU `nope`"),
        (["--calibration", "nope"], "unknown calibration `nope`"),
        (["--device", "cuda:99"], "`device` is cuda:99"),
        (["--calibration", "vllm-h100", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_is_one_sentence(run: Path, arguments: list[str], message: str) -> None:
    torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
    if "cuda:99" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU: torch itself names the device that it has not")
    result = on_hardware(run, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_requests_longer_than_the_model_are_refused_with_both_numbers(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    long = record_simulation(tmp_path, "gen:n=1,rate=1,input=fixed:5000,output=fixed:4", pages=400)
    result = on_hardware(long)
    assert result.exit_code == 2
    assert "`model` demo takes 4,096 tokens, but a request of this journal gets to 5,003" in result.stderr


def test_a_pool_that_does_not_fit_is_refused_with_both_sizes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    monkeypatch.setattr("lockstep.runtime.recorded.free_bytes_of", lambda _: 1 << 20)
    result = on_hardware(run, "--device", "cpu")
    assert result.exit_code == 2
    assert "pages of 16 tokens" in result.stderr
    assert "but cpu has 1 MiB free" in result.stderr


# --------------------------------------------------------------------------------------------------- and without one


def test_without_the_runtime_it_reports_what_is_missing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lockstep.runtime.recorded", None)
    result = on_hardware(run)
    assert result.exit_code == 2
    assert result.stderr.startswith("ConfigError: `--on-hardware` needs the package lockstep-runtime with torch")


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_no_run_folder_is_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no journal")
    result = on_hardware(tmp_path / name)
    assert result.exit_code == 2
    assert result.stderr.startswith(("JournalError: ", "ConfigError: "))
    assert len(result.stderr.splitlines()) <= 2


def test_a_journal_without_batches_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    from lockstep.core.contract.config import SchedConfig
    from lockstep.core.journal.records import JournalHeader
    from lockstep.core.journal.writer import JournalWriter

    JournalWriter.create(tmp_path, JournalHeader(config=SchedConfig(pages=8))).close()
    result = on_hardware(tmp_path)
    assert result.exit_code == 2
    assert "no batch was launched in the journal of" in result.stderr


# ------------------------------------------------------------------------------------------------- times and their file


def planted(path: Path, count: int = 200, *, slow: int = -1) -> list[BatchTime]:
    """A file of decodes and extends on a device that takes 1.5 times as long as predicted, and 300 us for each pass."""
    cost = roofline_model(load_model("demo"), load_gpu("cpu"))
    batches = []
    for number in range(count):
        rows, context = 1 + number % 8, 50 + 7 * number % 400
        shape = decode_shape(rows, context)
        mode: Mode = "decode"
        if number % 5 == 0:
            new = 20 + 13 * number % 300
            shape = BatchShape(extend_rows=1, extend_tokens=new, extend_pairs=new * (new + 1) // 2, sampled_rows=1)
            mode = "extend"
        took_us = 1.5 * cost.batch_us(shape).mean_us + 300.0
        took_us *= 4 if number == slow else 1
        batches.append(BatchTime(batch_id=number, mode=mode, shape=shape, took_us=took_us))
    path.write_bytes(line_of(BatchTimesHeader(model="demo", gpu="cpu-core")) + b"".join(map(line_of, batches)))
    return batches


def test_calibrating_from_a_file_finds_what_was_planted_and_reports_how_far_it_was_off(tmp_path: Path) -> None:
    planted(tmp_path / "measured.jsonl")
    made = calibrated("--from", tmp_path / "measured.jsonl", "--date", "2026-11-22", "--out", tmp_path / "c.json")
    assert made.exit_code == 0, made.output
    correction = Calibration.load(tmp_path / "c.json").correction
    assert correction.kernels == pytest.approx(1.5, rel=0.02)
    assert correction.step_us == pytest.approx(300.0, rel=0.05)
    before, after = all_held_out(made)
    assert before > 30.0
    assert after < 1.0


def test_held_out_batches_are_predicted_by_a_fit_that_did_not_see_them(tmp_path: Path) -> None:
    """One tenth takes ten times as long: if it were part of its own fit, the fit would approach it."""
    from lockstep.sim.calibrate.calibrate import held_out, timed_batches
    from lockstep.sim.cost.base_model import base_cost_model

    planted(tmp_path / "measured.jsonl")
    times = read_batch_times(tmp_path / "measured.jsonl")
    base = base_cost_model(load_model("demo"), load_gpu("cpu"))
    timed = timed_batches(times, base, tmp_path)
    timed.took_us[60:80] *= 10.0
    held = held_out(timed)
    assert held.ratios[3] == pytest.approx(10.0, rel=0.05)
    others = [ratio for at, ratio in enumerate(held.ratios) if at != 3]
    assert max(others) < 1.05


def test_calibrate_from_a_journal_is_calibrate_journal(run: Path, tmp_path: Path) -> None:
    for name, words in {"a": ["--from", run], "b": ["journal", run], "c": [f"--from={run}"]}.items():
        result = calibrated(*words, "--date", "2026-11-22", "--out", tmp_path / f"{name}.json")
        assert result.exit_code == 0, result.output
        assert "error of batches that the fit had not seen" in result.stdout
    a, b, c = ((tmp_path / f"{name}.json").read_bytes() for name in "abc")
    assert a == b == c
    assert json.loads(a)["sources"][0]["kind"] == "journal"


def test_the_slow_batch_is_the_outlier(tmp_path: Path) -> None:
    batches = planted(tmp_path / "measured.jsonl", slow=77)
    cost = roofline_model(load_model("demo"), load_gpu("cpu"))
    [found] = outliers(batches, predict(cost, batches))
    assert found.batch.batch_id == 77
    assert found.times == pytest.approx(4.0, rel=0.15)


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (1, b"{}", "line 1"),
        (1, b'{"format":"lockstep-batch-times","version":2,"model":"demo","gpu":"cpu-core"}', "`version` 2"),
        (3, b'{"batch_id":1', "line 3"),
        (3, b'{"batch_id":1,"mode":"decode","shape":{"decode_rows":1},"took_us":-1}', "line 3"),
        (3, b'{"batch_id":1,"mode":"decode","shape":{},"took_us":5}', "line 3"),
    ],
)
def test_a_damaged_file_is_refused_by_its_line(line: int, text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    planted(path)
    lines = path.read_bytes().splitlines()
    lines[line - 1] = text
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(CalibrationError, match=message):
        read_batch_times(path)


def test_a_batch_behind_another_begins_when_that_ends(run: Path) -> None:
    """With overlap the simulator launches early; batch times sum up to no more than the elapsed time."""
    times = of_journal(run)
    events = [event for event, _ in fold(run)]
    assert sum(one.took_us for one in times.batches) <= events[-1].time_us
    assert not times.left_out


def test_the_catalogue_has_the_demo_model_as_it_is() -> None:
    demo = pytest.importorskip("lockstep.runtime.demo_model", reason="the GPU runtime is not installed")
    known, real = load_model("demo"), load_model(str(demo.demo_model_folder()))
    for field in real.__slots__:
        if field not in ("name", "source"):
            assert getattr(known, field) == getattr(real, field), field
