"""`lockstep simulate` and `lockstep demo`: their output, their files, their refusals, and their ends."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import EndRecord
from lockstep.core.journal.replay import replay
from lockstep.sim.cli import demo as demo_module
from lockstep.sim.cli.demo import answer, demo
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.scenario.settings import SCHEDULER_OPTIONS

BASE = ["--model", "qwen3-0.6b", "--gpu", "h200"]
SMALL = [*BASE, "--workload", "gen:n=20,rate=50,input=fixed:64,output=fixed:8"]
FILES = {"journal", "metrics.json", "requests.parquet", "requests.csv", "trace.json.gz", "report.html"}


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(simulate, arguments, env=env)


def refused(*arguments: str, env: dict[str, str] | None = None) -> str:
    """The error message of an invalid command line."""
    result = run(*arguments, env=env)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def about(*arguments: str, env: dict[str, str] | None = None) -> dict[str, object]:
    result = run(*arguments, "--json", env=env)
    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)["about"]
    assert isinstance(described, dict)
    return described


# ------------------------------------------------------------------------------------------------------------- results


def test_a_run_folder_has_everything_and_its_journal_replays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(*SMALL, "--slo", "ttft_p99=500ms", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == FILES
    first = result.stderr.splitlines()[0]
    assert first.startswith("seed 7, lockstep ")
    assert str(out / "journal") in first
    assert "TTFT" in result.stdout
    assert "ttft_p99=500ms" in result.stdout
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["requests"]["completed"] == 20
    assert metrics["about"]["interrupted"] is False
    done = replay(out)
    assert done.batches == metrics["device"]["batches"]
    assert done.tail is not None
    assert done.tail.closed


def test_json_is_metrics_json_and_nothing_else_is_on_stdout(tmp_path: Path) -> None:
    result = run(*SMALL, "--json", "--out", str(tmp_path / "run"))
    assert json.loads(result.stdout) == json.loads((tmp_path / "run" / "metrics.json").read_text())


def test_without_out_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*SMALL).exit_code == 0
    assert not any(tmp_path.iterdir())


def test_files_that_are_not_wanted_are_not_written(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(*SMALL, "--out", str(out), "--no-report", "--no-trace", "--no-requests").exit_code == 0
    assert {path.name for path in out.iterdir()} == {"journal", "metrics.json"}


def test_equal_command_lines_give_equal_journals_and_metrics(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        assert run(*SMALL, "--out", str(folder)).exit_code == 0
    for name in ("journal/00000000.log", "metrics.json", "requests.csv", "trace.json.gz"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_a_workload_of_prompts_alone_is_measured_without_tokens(tmp_path: Path) -> None:
    trace = tmp_path / "embeddings.csv"
    rows = "".join(f"{i / 100},{64 + i},0\n" for i in range(50))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    out = tmp_path / "run"
    result = run(*BASE, "--workload", str(trace), "--slo", "e2e_p99=1s", "--slo", "ttft_p99=1s", "--out", str(out))
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "metrics.json").read_text())
    assert summary["requests"]["completed"] == 50
    assert summary["requests"]["by_finish_reason"] == {"computed": 50}
    assert summary["throughput"]["output_tokens"] == 0
    assert summary["throughput"]["total_tokens_per_s"] > 0
    assert summary["latency"]["ttft_us_p50"] is summary["latency"]["tpot_us_p50"] is None
    assert summary["latency"]["e2e_us_p50"] > 0
    assert [slo["met"] for slo in summary["slos"]] == [True, None]
    assert summary["device"]["batches_by_mode"].keys() == {"extend"}


def test_rejected_and_clamped_requests_are_counted_in_words() -> None:
    workload = "gen:n=40,rate=50,input=uniform:100:300,output=fixed:100"
    result = run(*BASE, "--workload", workload, "--context-tokens-max", "250")
    assert result.exit_code == 0
    assert "of 40 requests: too_long " in result.stdout
    assert "(context 250 tokens)" in result.stdout
    assert "clamped " in result.stdout


def test_the_recorded_command_runs_the_same_again() -> None:
    options = [
        *SMALL, "--rate", "30", "--limit", "10", "--seed", "3", "--tp", "2", "--max-new-tokens", "5",
        "--slo", "ttft=1s", "--chunked-prefill-size", "none", "--no-radix-cache", "--waiting-timeout", "3s",
        "--schedule-conservativeness", "0.5", "--eos-token-id", "7", "--eos-token-id", "8", "--pages", "500",
        "--grammar-compile", "20ms", "--grammar-timeout", "1s", "--receive-interval", "3",
    ]  # fmt: skip
    first = about(*options)
    command = shlex.split(str(first["command"]))
    assert command[:2] == ["lockstep", "simulate"]
    assert about(*command[2:]) == first


# ------------------------------------------------------------------------------------------------------------- settings


def test_every_scheduler_setting_has_an_option() -> None:
    fields = [field.name for field in msgspec.structs.fields(SchedConfig)]
    fields.remove("tiers")  # settings of its own, which have options of their own
    fields.remove("hybrid")  # likewise
    fields.remove("diffusion")  # likewise
    fields.remove("multiplexing")  # likewise
    fields.remove("experts")  # follows from --eplb and the model
    fields.remove("dp_ranks")  # follows from --attention-dp and --rank-schedulers
    fields.remove("dp_rank")
    fields.remove("tables_append_only")  # set by hosts for their executor
    fields.remove("base_beside_loras")  # likewise
    assert [field for field, _, _ in SCHEDULER_OPTIONS] == fields


def test_settings_reach_the_scheduler() -> None:
    options = [
        "--overlap-depth",
        "2",
        "--page-size",
        "32",
        "--running-timeout",
        "10min",
        "--chunked-prefill-size",
        "none",
    ]
    scheduler = about(*SMALL, *options)["scheduler"]
    assert isinstance(scheduler, dict)
    assert {name: scheduler[name] for name in ("overlap_depth", "page_size", "running_timeout_us")} == {
        "overlap_depth": 2,
        "page_size": 32,
        "running_timeout_us": 600_000_000,
    }
    assert scheduler["chunked_prefill_size"] is None
    assert scheduler["context_tokens_max"] == 40960  # the model's


@pytest.mark.parametrize("profile", ["sglang", "vllm"])
def test_a_profile_runs_with_its_settings(profile: str) -> None:
    described = about(*SMALL, "--profile", profile, "--pages", "2000", "--check", "every")
    scheduler = described["scheduler"]
    assert isinstance(scheduler, dict)
    settings = profile_settings(profile)
    assert {name: scheduler[name] for name in settings} == settings
    assert f"--profile {profile}" in str(described["command"])


@pytest.mark.parametrize(
    ("profile", "modes"), [("sglang", {"extend", "decode"}), ("vllm", {"extend", "mixed", "decode"})]
)
def test_a_profile_decides_which_batches_there_are(profile: str, modes: set[str]) -> None:
    result = run(
        *BASE, "--workload", "gen:n=20,rate=2000,input=fixed:600,output=fixed:9", "--profile", profile, "--json"
    )
    assert set(json.loads(result.stdout)["device"]["batches_by_mode"]) == modes


def test_an_option_overrides_the_value_of_a_profile() -> None:
    scheduler = about(*SMALL, "--profile", "vllm", "--retracted-requeue", "tail", "--page-size", "32")["scheduler"]
    assert isinstance(scheduler, dict)
    assert (scheduler["retracted_requeue"], scheduler["page_size"]) == ("tail", 32)
    assert (scheduler["batching"], scheduler["reserve"]) == ("running_first", "on_demand")


def test_environment_variables_override_settings() -> None:
    env = {"LOCKSTEP_OVERLAP": "0", "LOCKSTEP_RETRACT_EVERY": "5"}
    described = about(*SMALL, "--overlap-depth", "2", env=env)
    scheduler = described["scheduler"]
    assert isinstance(scheduler, dict)
    assert (scheduler["overlap_depth"], scheduler["retract_every"]) == (0, 5)
    assert "--overlap-depth 0" in str(described["command"])


def test_invariants_can_be_checked() -> None:
    for check in ("every", "64", "off"):
        assert run(*SMALL, "--check", check).exit_code == 0
    assert "--check" in refused(*SMALL, "--check", "0")


def test_a_policy_of_an_installed_package_runs_and_its_journal_replays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(*SMALL, "--schedule-policy", "fair", "--out", str(out)).exit_code == 0
    config = read_journal(out / "journal").header.config
    assert (config.schedule_policy, config.schedule_policy_version) == ("fair", "1.0")
    replay(out / "journal")
    assert "is required in version 2, but lockstep-fair 1.0 is installed" in refused(
        *SMALL, "--schedule-policy", "fair", "--schedule-policy-version", "2"
    )


def test_a_policy_that_fails_ends_the_run_with_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import lockstep_fair

    monkeypatch.setattr(lockstep_fair, "fair", lambda line: [0, 0])
    result = run(*SMALL, "--schedule-policy", "fair")
    assert result.exit_code == 1
    assert "PolicyError: policy `fair` 1.0 returned [0, 0] for " in result.stderr
    assert "Traceback" not in result.stderr


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen9", "--gpu", "h200", "--workload", "gen:n=3"], "CatalogueError: unknown model `qwen9`"),
        (["--model", "qwen3-8b", "--gpu", "h900", "--workload", "gen:n=3"], "CatalogueError: unknown GPU `h900`"),
        (
            ["--model", "llama-3.1-70b", "--gpu", "h100", "--workload", "gen:n=3"],
            "CapacityError: llama-3.1-70b does not",
        ),
        ([*BASE, "--workload", "gen:m=3"], "WorkloadError: gen:m=3: unknown key `m`"),
        ([*BASE, "--workload", "missing.csv"], "WorkloadError: missing.csv: "),
        ([*SMALL, "--slo", "ttft_p99=500"], "ConfigError: SLO `ttft_p99=500`: "),
        ([*SMALL, "--page-size", "24"], "ConfigError: `page_size` must be a power of two, got `24`"),
        ([*SMALL, "--profile", "orca"], "ConfigError: `profile` must be lockstep, sglang or vllm, got `orca`"),
        ([*SMALL, "--schedule-policy", "best"], "ConfigError: `schedule_policy` must be"),
        ([*SMALL, "--max-new-tokens", "0"], "ConfigError: `max_new_tokens` must be at least 1"),
        ([*SMALL, "--waiting-timeout", "30"], "Invalid value for '--waiting-timeout': expected durations with a unit"),
        ([*SMALL, "--pages", "many"], "Invalid value for '--pages'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_message(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


@pytest.mark.parametrize("variable", ["LOCKSTEP_OVERLAP", "LOCKSTEP_RETRACT_EVERY"])
@pytest.mark.parametrize("value", ["", "one", "-1", "1.5"])
def test_a_malformed_environment_variable_is_refused(variable: str, value: str) -> None:
    assert f"ConfigError: {variable} must be a whole number of at least 0, got `{value}`" in refused(
        *SMALL, env={variable: value}
    )


def test_an_override_by_the_environment_is_reported_and_bounded() -> None:
    assert "LOCKSTEP_OVERLAP must be 0, 1 or 2, got `3`" in refused(*SMALL, env={"LOCKSTEP_OVERLAP": "3"})
    assert "overlap_depth is 2, from the environment" in run(*SMALL, env={"LOCKSTEP_OVERLAP": "2"}).stderr


def test_a_seed_that_no_journal_can_hold_is_refused(tmp_path: Path) -> None:
    assert "`seed` must be a whole number" in refused(*SMALL, "--seed", str(2**64), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_settings_beyond_model_and_gpu_are_reported() -> None:
    shown = run(*SMALL, "--pages", "100000000", "--context-tokens-max", "1000000").stdout
    assert "KV pages do not fit this GPU" in shown
    assert "beyond the model's" in shown


def test_an_slo_with_nothing_measured_is_not_met() -> None:
    read = json.loads(run(*SMALL, "--pages", "1", "--slo", "ttft_p99=1ms", "--json").stdout)
    assert read["requests"]["completed"] == 0
    assert read["slos"] == [{"slo": "ttft_p99=1ms", "bound_us": 1000, "measured_us": None, "met": None}]
    assert "no data" in run(*SMALL, "--pages", "1", "--slo", "ttft_p99=1ms").stdout


def test_the_scheduler_can_be_watched(capfd: pytest.CaptureFixture[str]) -> None:
    assert "LOCKSTEP_DEBUG must be 0 to 4, got `loud`" in refused(*SMALL, env={"LOCKSTEP_DEBUG": "loud"})
    quiet = about(*SMALL)
    watched = run(*SMALL, env={"LOCKSTEP_DEBUG": "2"})
    assert watched.exit_code == 0
    shown = watched.stderr + capfd.readouterr().err
    assert "b0 extend" in shown
    assert "finished" in shown
    assert quiet["scheduler"]["overlap_depth"] == 1  # type: ignore[index]


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("the only copy")
    for more in ([], ["--overwrite"]):
        assert "is not a run folder" in refused(*SMALL, "--out", str(tmp_path), *more)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(*SMALL, "--out", str(out)).exit_code == 0
    (out / "notes.txt").write_text("mine")
    before = (out / "metrics.json").read_bytes()
    assert "--overwrite" in refused(*SMALL, "--seed", "8", "--out", str(out))
    assert (out / "metrics.json").read_bytes() == before
    result = run(*SMALL, "--seed", "8", "--out", str(out), "--overwrite", "--no-report")
    assert result.exit_code == 0
    assert {path.name for path in out.iterdir()} == (FILES - {"report.html"}) | {"notes.txt"}
    assert json.loads((out / "metrics.json").read_text())["about"]["seed"] == 8


# ------------------------------------------------------------------------------------------------------------- bad ends

PROGRAM = "from lockstep.sim.cli.simulate import simulate; simulate(prog_name='lockstep simulate')"
LONG = [*BASE, "--workload", "gen:n=20000,rate=20,input=fixed:300,output=fixed:200"]


def test_ctrl_c_leaves_a_whole_journal_and_marked_metrics(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *LONG, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = out / "journal" / "00000000.log"
    deadline_s = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size > 500_000) and process.poll() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "interrupted: " in stdout
    assert "Traceback" not in stderr
    assert [record.reason for record in read_journal(out).records() if isinstance(record, EndRecord)] == ["interrupted"]
    done = replay(out, until=2000)
    assert done.events == 2000
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["about"]["interrupted"] is True
    assert 0 < metrics["requests"]["completed"] < 20000


def test_a_full_disk_is_one_message_and_a_journal_up_to_its_last_whole_record(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def fill_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *LONG, "--limit", "2000", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=fill_disk,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    errors = done.stderr.splitlines()[2:]  # after the lines about the run to come
    assert errors[0].startswith("JournalError: cannot write ")
    assert "Traceback" not in done.stderr
    replayed = replay(out)
    assert replayed.events > 1000
    assert replayed.tail is not None
    assert not replayed.tail.closed


# ----------------------------------------------------------------------------------------------------------------- demo


def test_the_demo_prints_table_answer_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "RATES", (4, 60))
    monkeypatch.setattr(demo_module, "MINUTES", 1)
    out = tmp_path / "demo"
    for _ in range(2):  # a demo replaces the one before it
        result = CliRunner().invoke(demo, ["--out", str(out)])
        assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[-3].startswith("engine: vllm ")
    answered = "Meets the SLO up to 4 req/s (ttft_p99=500ms and tpot_p99=40ms)"
    assert lines[-2] == f"{answered}; 90 % interval 4 req/s"
    assert lines[-1] == f"report: {out / 'report.html'}"
    assert (out / "report.html").stat().st_size > 10_000
    for rate in ("04-per-s", "60-per-s"):
        assert replay(out / rate, until=100).events == 100
    assert result.stderr.startswith("seed 7, lockstep ")


def test_the_demo_leaves_other_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("the only copy")
    result = CliRunner().invoke(demo, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "does not hold a demo" in result.stderr


def test_the_answer_stops_at_the_first_rate_that_fails() -> None:
    class Fake:
        def __init__(self, met: bool) -> None:
            self.data = type("Data", (), {"summary": {"slos": [{"met": met}]}})
            self.setup = SimpleNamespace(is_tested=True)

    runs: Any = {1: Fake(True), 2: Fake(False), 4: Fake(True)}
    assert answer(runs, 1, 1).startswith("Meets the SLO up to 1 req/s")
    none: Any = {1: Fake(False)}
    assert answer(none, 0, 0).startswith("Does not meet the SLO for certain at 1 req/s")


def test_the_answer_is_the_lower_end_of_its_interval() -> None:
    run = SimpleNamespace(
        data=SimpleNamespace(summary={"slos": [{"met": True}]}), setup=SimpleNamespace(is_tested=True)
    )
    runs: Any = {16: run, 32: run}
    said = answer(runs, 16, 32)
    assert said.startswith("Meets the SLO up to 16 req/s (")
    assert said.endswith("; as predicted up to 32 req/s; 90 % interval 16 to 32 req/s")


@pytest.mark.parametrize(
    ("factors", "met_at_ends", "ends"),
    [
        ((1.03, 1.5), {(24, 1.5): False, (8, 1.5): True}, (8, 24)),
        ((1.03, 1.5), {(24, 1.5): True}, (24, 24)),
        ((1.03, 1.5), {(24, 1.5): False, (8, 1.5): False}, (0, 24)),
        ((0.8, 1.2), {(24, 1.2): True, (32, 0.8): True, (36, 0.8): False}, (24, 32)),
    ],
)
def test_the_demo_reports_between_what_its_answer_lies(
    monkeypatch: pytest.MonkeyPatch,
    factors: tuple[float, float],
    met_at_ends: dict[tuple[int, float], bool],
    ends: tuple[int, int],
) -> None:
    def run(met: bool) -> Any:
        calibration = SimpleNamespace(interval=lambda kind, coverage, model: factors)
        setup = SimpleNamespace(calibration=calibration, model=SimpleNamespace(name="m"), is_tested=True)
        return SimpleNamespace(data=SimpleNamespace(summary={"slos": [{"met": met}]}), setup=setup)

    runs = {rate: run(rate <= 24) for rate in (8, 24, 32, 36)}
    # Any other name is a KeyError: only options that can change the answer are simulated.
    monkeypatch.setattr(demo_module, "_meets_at", lambda runs, rate, factor: met_at_ends[rate, factor])
    assert demo_module._range_of_answers(runs) == ends


# --------------------------------------------------------------------------------------------------------------- weight


def test_help_imports_nothing_heavy() -> None:
    heavy = "numpy polars simpy rich torch"
    program = (
        "import sys, lockstep.sim.cli.simulate, lockstep.sim.cli.demo; "
        f"print([m for m in '{heavy}'.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_the_simulator_never_imports_torch() -> None:
    program = (
        "import sys, lockstep.sim.run.simulate, lockstep.sim.report, lockstep.sim.results.results; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
