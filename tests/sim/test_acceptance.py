"""Accepted length: measured in a run, beside the simulator's prediction for the same verifications."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.sim.calibrate import acceptance
from lockstep.sim.calibrate.acceptance import Verifications, fitted_rates, halves, predicted_length, read_verifications
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cost import CalibrationError
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

WORKLOAD = "gen:n=40,rate=50,input=uniform:20:60,output=uniform:30:90,grammars=0.3x2"


def test_a_simulated_run_is_measured_as_it_was_drawn(tmp_path: Path) -> None:
    """The rates that a run was given are found in its journal; forced tokens beside the drafts do not count."""
    settings = {"speculative_method": "mtp", "num_speculative_tokens": 3, "jump_forward_tokens": 8}
    scenario = Scenario(
        model="qwen3-0.6b",
        gpu="h200",
        workload=WORKLOAD,
        seed=5,
        settings=settings,
        acceptance="0.8,0.5",
        grammar_forces="0.4x3",
    )
    run = simulate(assemble(scenario, environ={}), folder=tmp_path)
    seen = read_verifications(tmp_path)
    said = run.metrics()["speculation"]
    assert len(seen.right) == said["rows_verified"]
    assert seen.accepted_length == pytest.approx(said["accepted_length_mean"])
    assert seen.by_position == pytest.approx(said["acceptance_by_position"], abs=1e-5)
    assert fitted_rates(seen) == pytest.approx((0.8, 0.5, 0.5), abs=0.06)
    assert predicted_length(seen, (0.8, 0.5, 0.5)) == pytest.approx(seen.accepted_length, rel=0.03)
    for measured, predicted in halves(seen):
        assert predicted == pytest.approx(measured, rel=0.05)


def test_the_model_is_off_where_requests_differ() -> None:
    """Half of the requests are always right and half never: the fit keeps the mean, not their differences."""
    requests = np.repeat(np.arange(40), 20)
    right = np.where(requests % 4 < 2, 3, 0)
    seen = Verifications("ngram", requests, np.full(800, 3), right)
    assert seen.by_position == [0.5, 0.5, 0.5]
    assert fitted_rates(seen) == (0.5, 1.0, 1.0)
    assert predicted_length(seen, fitted_rates(seen)) == seen.accepted_length == 2.5


def test_the_command_reports_it_to_people_and_machines(tmp_path: Path) -> None:
    settings = {"speculative_method": "ngram", "num_speculative_tokens": 2}
    scenario = Scenario(model="qwen3-0.6b", gpu="h200", workload=WORKLOAD, seed=6, settings=settings)
    simulate(assemble(scenario, environ={}), folder=tmp_path)
    told = CliRunner().invoke(calibrate, ["acceptance", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert "tokens per verification" in told.output
    found = json.loads(CliRunner().invoke(calibrate, ["acceptance", str(tmp_path), "--json"]).output)
    assert f"--speculative-method ngram --acceptance {found['acceptance']}" in told.output
    assert found["accepted_length_predicted"] == pytest.approx(found["accepted_length"], rel=0.01)
    assert found["accepted_length_usual"] == pytest.approx(found["accepted_length"], rel=0.1)  # the rates of the draws


def test_a_run_without_drafts_is_one_error(tmp_path: Path) -> None:
    simulate(assemble(Scenario(model="qwen3-0.6b", gpu="h200", workload="gen:n=2"), environ={}), folder=tmp_path)
    with pytest.raises(CalibrationError, match="0 rows verified drafts, a fit needs 50"):
        acceptance.describe(tmp_path)
