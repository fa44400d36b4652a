"""Run folders of every kind of engine are read back: compared, and simulated again under other settings."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.results.compare import compare, read_runs
from lockstep.sim.results.stored_run import read_run
from lockstep.tools.replay import replay

DENSE = ["--model", "qwen3-0.6b"]
WORKLOAD = "gen:n=8,rate=40,input=fixed:64,output=fixed:8"

# Features that an engine may have in addition, and the group of metrics.json about them.
KINDS: dict[str, tuple[list[str], str]] = {
    "pp": ([*DENSE, "--pp", "2"], "device"),
    "pp_size": ([*DENSE, "--pp", "2", "--pp-size", "2"], "device"),
    "pp_of_a_cluster": ([*DENSE, "--pp", "2", "--pp-size", "2", "--replicas", "2"], "device"),
    "media": (["--model", "qwen2.5-vl-7b", "--media", "image=0.5:320x240/3"], "media"),
    "ranks": (["--model", "qwen3-30b-a3b", "--tp", "2", "--attention-dp", "2", "--rank-schedulers"], "ranks"),
    "media_of_ranks": (
        "--model qwen3-vl-30b-a3b --tp 2 --attention-dp 2 --rank-schedulers --media image=0.5:320x240/3".split(),
        "media",
    ),
    "media_of_stages": (
        ["--model", "qwen2.5-vl-7b", "--pp", "2", "--pp-size", "2", "--media", "image=0.5:320x240/3"],
        "media",
    ),
    "media_of_roles": (
        "--model qwen2.5-vl-7b --prefill-engines 1 --decode-engines 1 --media image=0.5:320x240/3".split(),
        "media",
    ),
    "tiers": ([*DENSE, "--host-cache-gb", "4", "--storage-gb", "8"], "cache"),
}


def simulated(options: list[str], folder: Path) -> Path:
    words = ["--gpu", "h100", "--workload", WORKLOAD, "--no-intervals", "--no-trace", "--no-report", *options]
    done = CliRunner().invoke(simulate, [*words, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_engine_is_compared_and_asked_what_if(kind: str, tmp_path: Path) -> None:
    options, group = KINDS[kind]
    folder = simulated(options, tmp_path / "run")
    written = json.loads((folder / "metrics.json").read_text())
    assert read_run(folder).metrics[group] == written[group], "and it is read as it was written"
    alike = compare(read_runs([folder, Path(shutil.copytree(folder, tmp_path / "copy"))]))
    assert {figure.changes[0].verdict for figure in alike.figures} == {"same"}
    asked = CliRunner().invoke(replay, [str(folder), "--what-if", "--policy", "lpm", "--json"])
    assert asked.exit_code == 0, asked.output
    settings = {row["name"]: row["values"] for row in json.loads(asked.stdout)["settings"]}
    assert settings["schedule_policy"] == ["fcfs", "lpm"]
    assert len(settings) == 1, "nothing else differs"


def test_stages_that_are_none_and_lists_elsewhere_are_damage(tmp_path: Path) -> None:
    folder = simulated(DENSE, tmp_path / "run")
    metrics = json.loads((folder / "metrics.json").read_text())
    texts = {"stages": 2, "stage_busy_us": [1, "x"], "stage_busy_share": None, "pipeline_bubble_us": 0}
    damage: list[tuple[dict[str, Any], str]] = [
        ({"pipeline": 7}, "Expected `object`, got `int` - at `$.device.pipeline`"),
        ({"pipeline": {"stages": 2}}, "missing required field `stage_busy_us` - at `$.device.pipeline`"),
        ({"pipeline": texts}, "Expected `float`, got `str` - at `$.device.pipeline.stage_busy_us[1]`"),
        ({"batches_by_mode": {"decode": [1]}}, "Expected `float`, got `array` - at `$.device"),
    ]
    for changed, problem in damage:
        damaged = {**metrics, "device": {**metrics["device"], **changed}}
        (folder / "metrics.json").write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match=re.escape(problem)):
            read_run(folder)
