"""`import lockstep`: the commands as functions, with frames and pages as results."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cost import CatalogueError

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
SMALL: dict[str, Any] = {"model": "qwen3-8b", "gpu": "h200", "workload": "gen:n=40,rate=8"}


@pytest.fixture(scope="module")
def run() -> lockstep.Run:
    return lockstep.simulate(**SMALL, slo="ttft_p99=500ms")


def test_a_run_has_frames_of_requests_and_figures(run: lockstep.Run) -> None:
    assert run.requests.height == 40
    p99 = run.figures.filter(name="ttft_us_p99").row(0, named=True)
    assert p99["value"] == run.figure("ttft_us_p99") == run.metrics["latency"]["ttft_us_p99"]
    assert p99["low"] < p99["value"] < p99["high"]
    assert run.meets_slos is True


def test_the_command_of_a_run_gives_the_same_figures(run: lockstep.Run, tmp_path: Path) -> None:
    subprocess.run(
        [LOCKSTEP, *shlex.split(run.command)[1:], "--out", str(tmp_path / "run")], check=True, capture_output=True
    )
    again = lockstep.open_run(tmp_path / "run")
    assert again.metrics["latency"] == run.metrics["latency"]
    assert again.name == "run"
    assert (tmp_path / "run" / "journal").is_dir()


def test_a_temporary_run_ends_with_its_object_and_a_saved_one_stays(tmp_path: Path) -> None:
    one = lockstep.simulate(**SMALL, intervals=False)
    folder = one.folder
    assert not (folder / "journal").exists()
    kept = one.save(tmp_path / "kept")
    del one
    assert not folder.exists()
    assert kept.requests.height == 40


def test_a_folder_is_written_as_by_the_command(tmp_path: Path) -> None:
    lockstep.simulate(**SMALL, out=tmp_path / "run", intervals=False, report=False)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "journal", "metrics.json", "requests.csv", "requests.parquet", "trace.json.gz",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="already holds a run"):
        lockstep.simulate(**SMALL, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"has no report\.html"):
        lockstep.open_run(tmp_path / "run").report()


def test_a_cluster_is_simulated_by_its_options() -> None:
    cluster = lockstep.simulate(**SMALL, replicas=2, router="round_robin", intervals=False)
    assert [engine.summary("requests", "arrived") for engine in cluster.stored.engines] == [20, 20]


def test_pages_and_tables_are_shown_inline(run: lockstep.Run) -> None:
    assert "TTFT p99" in run._repr_html_()
    page = run.report()
    assert page._repr_html_().startswith("<iframe ")
    assert "&lt;html" in page._repr_html_()
    assert "40 requests completed" in repr(run)


def test_runs_are_compared_under_given_names(run: lockstep.Run) -> None:
    other = lockstep.simulate(**{**SMALL, "gpu": "h100"}, intervals=False)
    found = lockstep.compare(run, h100=other)
    assert found.figures["run"].unique(maintain_order=True).to_list() == ["run 1", "h100"]
    assert found.settings.filter(name="gpu").row(0) == ("gpu", "H200-SXM", "H100-SXM")
    assert any("different GPUs" in warning for warning in found.warnings)
    assert "<html" in found.report().text
    with pytest.raises(ConfigError, match="at least two runs, got 1"):
        lockstep.compare(run)


def test_a_plan_is_that_of_the_command(tmp_path: Path) -> None:
    question: dict[str, Any] = {
        "model": "qwen3-8b", "gpus": "h100,h200", "workload": "gen:n=100", "rate": 10, "quick": True, "jobs": 1,
    }  # fmt: skip
    plan = lockstep.plan(**question, slo={"ttft_p99": "500ms"}, requests=60, price=["h100=2", "h200=3"])
    assert plan.found
    assert plan.configurations.filter(winner=True).height == 1
    assert plan.headline in str(plan)
    flags = [f"--{name}={value}" for name, value in question.items() if name != "quick"]
    command = [LOCKSTEP, "plan", *flags, "--quick", "--slo=ttft_p99=500ms"]
    command += ["--requests=60", "--price=h100=2", "--price=h200=3", f"--json={tmp_path / 'plan.json'}"]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads((tmp_path / "plan.json").read_text()) == plan.describe()


def test_a_script_without_a_guard_plans_in_several_processes(tmp_path: Path) -> None:
    script = tmp_path / "plan.py"
    script.write_text(
        "import lockstep\n"
        "plan = lockstep.plan(model='qwen3-8b', gpus='h100', workload='gen:n=60', slo='ttft_p99=500ms', rate=5,\n"
        "                     quick=True, requests=40, jobs=2)\n"
        "print(plan.found)\n"
    )
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"


def test_the_slowest_requests_are_explained(run: lockstep.Run) -> None:
    recorded = lockstep.simulate(**SMALL, journal=True, intervals=False)
    slow = lockstep.explain(recorded, slowest=("ttft", 2))
    assert "r" in slow.text
    assert slow.page is not None
    assert slow._repr_html_().startswith("<iframe ")
    assert lockstep.explain(recorded, request="r3").text == lockstep.explain(recorded, request=3).text
    assert lockstep.explain(recorded, at="end").page is None
    with pytest.raises(ConfigError, match="has no journal\nhint: simulate with journal=True"):
        lockstep.explain(run, request=3)
    with pytest.raises(ConfigError, match="Give one of --request"):
        lockstep.explain(recorded)
    with pytest.raises(ConfigError, match="r4000"):
        lockstep.explain(recorded, request="r4000")


def test_a_workload_is_a_frame() -> None:
    workload = lockstep.Workload("gen:n=30,rate=2", limit=20)
    assert len(workload) == workload.requests.height == 20
    assert workload.describe()["requests"] == 20
    assert "20 requests" in str(workload)


def test_an_opened_workload_is_simulated_with_the_options_it_was_opened_with() -> None:
    workload = lockstep.Workload("gen:n=30,rate=2", limit=20)
    run = lockstep.simulate(**{**SMALL, "workload": workload})
    assert run.requests.height == 20
    assert "--limit 20" in run.command
    assert lockstep.simulate(**{**SMALL, "workload": workload, "limit": 10}).requests.height == 10
    asked = {"model": "qwen3-8b", "gpus": "h100", "slo": "ttft_p99=1s", "rate": 4, "quick": True, "requests": 20}
    asked["gpus"] = ["h100", "h200"]
    found = lockstep.plan(**asked, workload=lockstep.Workload("gen:n=30,rate=2"))
    assert found.configurations["gpu"].to_list() == ["h100", "h200"]
    with pytest.raises(ConfigError, match=r"`limit` is no option of lockstep\.plan"):
        lockstep.plan(**asked, workload=workload)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"modle": "qwen3-8b"}, ConfigError, "`modle` is no option of lockstep.simulate\nhint: model"),
        ({"model": "qwen3-8b", "gpu": "h200"}, ConfigError, "Missing option '--workload'"),
        ({**SMALL, "gpu": "h20000"}, CatalogueError, "unknown GPU `h20000`"),
        ({**SMALL, "tp": [1, 2]}, ConfigError, "`tp` takes one value, got `[1, 2]`"),
        ({**SMALL, "tp": "two"}, ConfigError, "Invalid value for '--tp'"),
        ({**SMALL, "trace": "yes"}, ConfigError, "`trace` must be True or False, got `'yes'`"),
        ({**SMALL, "replicas": 2, "engines": "2xh200"}, ConfigError, "'--engines' sets the number"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        lockstep.simulate(**options)
    assert message in str(caught.value)


def test_an_unknown_figure_is_named(run: lockstep.Run) -> None:
    with pytest.raises(ConfigError, match=r"`ttft_p99` is no figure of the run\nhint: .*ttft_us_p99"):
        run.figure("ttft_p99")


def test_the_package_imports_nothing_until_a_name_is_used() -> None:
    code = "import sys, lockstep, lockstep.core; print(sorted(n for n in sys.modules if n.startswith('lockstep')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['lockstep', 'lockstep.core']"
    assert set(lockstep.__all__) <= set(dir(lockstep))
    with pytest.raises(AttributeError, match="no attribute `simulat`"):
        _ = lockstep.simulat
