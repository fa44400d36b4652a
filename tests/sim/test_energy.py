"""Energy and carbon: bounds that any run keeps, the parts that add up, and options that scale them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cost.power import SHARES, DevicePower, Energy, Site, WorkTime, describe_energy, energy_line

H100 = DevicePower(gpus=2, tdp_w=700.0, flops_per_token=1e9, flops_per_s=1e12)


def test_work_is_bounded_by_the_time_of_each_batch() -> None:
    work = WorkTime.of(H100, np.array([1_000_000, 1_000_000]), np.array([140, 10_000]))
    assert work.busy_s == pytest.approx(4.0)  # two GPUs, one second each, twice
    # 140 tokens need 0.14e12 FLOPs of 1.4e12 per second; 10,000 tokens more than the batch lasts
    assert work.computing_s == pytest.approx(2 * (0.1 + 1.0))
    staged = WorkTime.of(H100._replace(stages=2), np.array([1_000_000]), np.array([140]))
    assert staged.busy_s == pytest.approx(1.0)


def test_energy_lies_between_idle_and_the_tdp_of_gpus_and_node() -> None:
    for busy_s, computing_s in ((0.0, 0.0), (50.0, 0.0), (100.0, 100.0)):
        energy = Energy.of(700.0, WorkTime(busy_s, computing_s), paid_s=100.0)
        assert energy.low < energy.likely < energy.high
        assert energy.high <= 700 * 100 / 3.6e6 * (1.0 + SHARES["rest_of_node"].high)
        assert energy.low >= 700 * 100 / 3.6e6 * (SHARES["idle"].low + SHARES["rest_of_node"].low) - 1e-12
    idle, busy = (Energy.of(700.0, WorkTime(seconds, 0.0), 100.0).likely for seconds in (0.0, 100.0))
    assert busy > idle


def test_facility_and_grid_multiply() -> None:
    energy = Energy(0.5, 1.0, 2.0)
    described = describe_energy(energy, Site(pue=2.0, grid_gco2_per_kwh=100.0), 500_000, gpu_hours=4.0)
    assert described["likely"]["kwh"] == 2.0
    assert described["likely"]["kwh_per_million_output_tokens"] == 4.0
    assert described["high"]["gco2_per_million_output_tokens"] == 800.0
    assert described["likely"]["machine_w_per_gpu"] == 250.0
    assert "4 kWh per million output tokens (2 to 8" in energy_line(described)


@pytest.mark.parametrize("values", [{"pue": 0.9}, {"grid_gco2_per_kwh": -1.0}])
def test_impossible_sites_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        Site(**{"pue": 1.5, "grid_gco2_per_kwh": 400.0, **values})


@pytest.mark.parametrize("option", ["--pue", "--grid-gco2-per-kwh"])
def test_an_impossible_site_is_a_wrong_option_of_a_plan_and_of_a_run(option: str) -> None:
    load = ["--model", "qwen3-8b", "--workload", "gen:n=20", option, "-3"]
    for command, arguments in ((simulate, ["--gpu", "h100"]), (plan, ["--gpus", "h100", "--slo", "ttft_p99=2s"])):
        result = CliRunner().invoke(command, [*load, *arguments])
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith(f"ConfigError: `{option[2:].replace('-', '_')}` must be from")


def run(tmp_path: Path, *more: str, gpu: str = "h100") -> dict[str, Any]:
    arguments = ["--model", "qwen3-8b", "--gpu", gpu, "--workload", "gen:n=60,rate=20", "--no-intervals", *more]
    result = CliRunner().invoke(simulate, [*arguments, "--out", str(tmp_path / "run"), "--overwrite", "--no-trace"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads((tmp_path / "run" / "metrics.json").read_text())
    return found


def test_a_run_has_energy_and_several_engines_have_more(tmp_path: Path) -> None:
    one = run(tmp_path)["energy"]
    twice = run(tmp_path, "--pue", "3.12")["energy"]
    assert twice["likely"]["kwh"] == pytest.approx(2 * one["likely"]["kwh"], rel=1e-3)
    assert 100 < one["likely"]["machine_w_per_gpu"] < 700 * 1.4
    several = run(tmp_path, "--replicas", "3")["energy"]
    assert several["likely"]["kwh"] > 1.5 * one["likely"]["kwh"]  # mostly idle engines draw power, too


def test_a_card_of_unknown_power_has_no_energy(tmp_path: Path) -> None:
    assert "energy" not in run(tmp_path, gpu="tpu-v6e")


def test_a_plan_has_the_energy_of_each_configuration(tmp_path: Path) -> None:
    question = "--model qwen3-8b --gpus h100,l4 --workload gen:n=200 --slo ttft_p99=2s --rate 4 --quick --requests 20"
    path = tmp_path / "plan.json"
    result = CliRunner().invoke(plan, [*question.split(), "--jobs", "1", "--json", str(path), "--pue", "1"])
    assert result.exit_code == 0, result.output
    answer = json.loads(path.read_text())
    energies = [one["energy"] for one in answer["configurations"] if one["energy"] is not None]
    assert energies
    assert all(one["pue"] == 1.0 for one in energies)
    assert "kWh per million output tokens" in result.output
