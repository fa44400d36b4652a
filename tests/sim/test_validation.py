"""Simulated runs compared with a real one, request by request. docs/validation.md reports their errors."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from lockstep.sim.calibrate.request_fit import compass_search
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import CpuModel, roofline_model

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "rtx4090_truth.py"
FOLDER = Path(os.environ.get("LOCKSTEP_DATA", "/nowhere"), "published", "llmservingsim")


@pytest.fixture(scope="module")
def truth() -> ModuleType:
    """Imported like a script, with the modules beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module(SCRIPT.stem)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="LOCKSTEP_DATA has no published/llmservingsim")
def test_replay_of_an_overloaded_run_is_within_its_bar(truth: ModuleType) -> None:
    recording = truth.read_recording(FOLDER)
    replay = truth.simulate(recording, roofline_model(load_model("llama-3.1-8b"), load_gpu("rtx4090")), CpuModel())
    row = truth.compare("catalogue", recording.timeline, replay, np.ones(300, np.bool_), "all requests")
    assert row["e2e"]["mean_ms"][0] == pytest.approx(86_606, abs=1)
    assert abs(row["e2e"]["mean_error"]) < 0.05  # -2.9 %; the bar is 8.6 %
    assert row["e2e"]["per_request_error"] < 0.05
    series = truth.compare_series("catalogue", recording, replay)
    assert series["running"]["mean"] == pytest.approx([32.3, 31.6], abs=0.5)
    assert series["net_preemptions"][0] == 98


@pytest.mark.skipif(not FOLDER.is_dir(), reason="LOCKSTEP_DATA has no published/llmservingsim")
def test_a_replay_that_stops_early_is_the_beginning_of_the_whole_one(truth: ModuleType) -> None:
    recording = truth.read_recording(FOLDER)
    cost = roofline_model(load_model("llama-3.1-8b"), load_gpu("rtx4090"))
    whole = truth.simulate(recording, cost, CpuModel()).timeline
    part = truth.simulate(recording, cost, CpuModel(), until_s=10.0).timeline
    early = whole.first_token <= 10.0
    assert early.sum() > 20
    assert np.array_equal(part.first_token[early], whole.first_token[early])
    assert (part.first_token[~early] >= 10.0).all()


def test_the_compass_finds_a_lowest_point() -> None:
    kernels, step_us = compass_search(lambda k, s: (k - 0.93) ** 2 + ((s - 710.0) / 1e4) ** 2)
    assert kernels == pytest.approx(0.93, abs=0.01)
    assert step_us == pytest.approx(710.0, abs=80.0)


def test_missing_data_is_named() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env={name: value for name, value in os.environ.items() if name != "LOCKSTEP_DATA"},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = "LOCKSTEP_DATA is not set: it names the folder with published/llmservingsim\n"
    assert (done.returncode, done.stderr) == (1, expected)
