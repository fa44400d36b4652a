"""The engine costs around batches in a calibration: the CPU lane, and the front end between engine and client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from simpy import Environment

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host.recording import Arrived, Ended, PassFinished, Planned, RecordingHeader, RecordingWriter
from lockstep.sim.calibrate.calibrate import with_client
from lockstep.sim.calibrate.engine_run import ClientRun, EngineRun, Twin, answers_of, paired
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cli.simulate import simulate as simulate_command
from lockstep.sim.cost import Calibration, CalibrationError, CpuModel, roofline_model
from lockstep.sim.cost.calibration import UNCALIBRATED, Correction
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.workload.journal_turns import label_parts
from lockstep.sim.workload.turns import TurnLabel, TurnsBuilder, TurnStart
from lockstep.sim.workload.workload import open_workload

LANE = CpuModel(plan_fixed_us=0.0, plan_row_us=0.0, result_fixed_us=300.0, result_row_us=20.0, arrival_us=150.0)
WORKLOAD = "gen:n=120,rate=25,input=uniform:20:400,output=uniform:5:40"
MODEL, GPU = "demo", "cpu"


def config(**changes: Any) -> SchedConfig:
    settings = {**profile_settings("vllm"), "pages": 4000, "overlap_depth": 0, "max_running_requests": 8, **changes}
    return SchedConfig(**settings)


def served(
    folder: Path, cpu: CpuModel = LANE, workload: str = WORKLOAD, **changes: Any
) -> dict[str, tuple[float, float, float]]:
    """Write the journal of an engine with this CPU lane. Returns its answers by label."""
    settings = config(**changes)
    cost = roofline_model(load_model(MODEL), load_gpu(GPU))
    metrics = MetricsFold(kv_pages=settings.pages)
    turns = open_workload(workload, seed=3).turns
    with JournalWriter.create(folder, JournalHeader(config=settings, host={"model": MODEL, "gpu": GPU})) as journal:
        host = EngineHost(Environment(), Engine(settings), Arrivals(turns), cost, cpu, journal, metrics)
        host.env.process(host.run())
        host.env.run()
        journal.close("closed")
    return answers_of(metrics.result())


def client_of(
    folder: Path, frontend_us: float, *, clock_us: int = 0, skipped: int = 0, workload: str = WORKLOAD
) -> ClientRun:
    """Return the client of a served run, with times `frontend_us` longer than the engine's."""
    turns, answers = open_workload(workload, seed=3).turns, EngineRun.read(folder).answers
    rows = np.arange(skipped, len(turns))
    values = np.array([answers[label] for label in turns.labels(rows)])
    return ClientRun(
        {
            "request_id": rows,
            "client": np.zeros(len(rows), np.int64),
            "arrival_us": turns.arrival_us[rows] + clock_us,
            "prompt_tokens": turns.prompt_tokens[rows],
            "output_tokens": turns.output_tokens[rows],
            "ttft_us": values[:, 0] + frontend_us,
            "tpot_us": values[:, 1],
            "e2e_us": values[:, 2] + frontend_us,
        }
    )


def test_the_lane_is_found_in_the_gaps_between_results_and_launches(tmp_path: Path) -> None:
    served(tmp_path)
    lane = EngineRun.read(tmp_path).lane()
    assert lane is not None
    assert lane.result_fixed_us == pytest.approx(300.0, rel=0.02)
    assert lane.result_row_us == pytest.approx(20.0, rel=0.05)
    assert lane.arrival_us == pytest.approx(150.0, rel=0.02)
    assert (lane.plan_fixed_us, lane.plan_row_us) == (0.0, 0.0)


def test_plans_are_timed_where_the_device_is_idle(tmp_path: Path) -> None:
    served(tmp_path, replace(LANE, plan_fixed_us=500.0, plan_row_us=30.0))
    lane = EngineRun.read(tmp_path).lane()
    assert lane is not None
    assert lane.plan_fixed_us == pytest.approx(500.0, rel=0.02)
    assert lane.plan_row_us == pytest.approx(30.0, rel=0.05)
    assert lane.result_fixed_us == pytest.approx(300.0, rel=0.02)


def test_a_time_of_another_process_is_no_time_of_the_lane(tmp_path: Path) -> None:
    served(tmp_path)
    run = EngineRun.read(tmp_path)
    run.gaps.us[::10] += 50_000.0
    lane = run.lane()
    assert lane is not None
    assert lane.result_fixed_us == pytest.approx(300.0, rel=0.05)


def test_the_front_end_is_what_the_client_measured_beyond_the_engine(tmp_path: Path) -> None:
    served(tmp_path)
    run = EngineRun.read(tmp_path)
    cost = roofline_model(load_model(MODEL), load_gpu(GPU))
    twin = Twin.of(run, client_of(tmp_path, 4_000.0, clock_us=77, skipped=10), cost, LANE)
    assert twin.frontend_us == pytest.approx(4_000.0, rel=0.02)
    for metric, figure, measured_us, simulated_us in twin.table():
        assert simulated_us == pytest.approx(measured_us, rel=0.01), (metric, figure)
    found = with_client(msgspec.structs.replace(UNCALIBRATED, engine="lockstep"), twin)
    assert found.correction.frontend_us == pytest.approx(4_000.0, rel=0.02)
    low, high = found.interval("ttft")
    assert 0.98 < low < 1.02
    assert 0.98 < high < 1.02


def test_the_front_end_of_an_idle_engine_does_not_depend_on_predictions(tmp_path: Path) -> None:
    calm = WORKLOAD.replace("rate=25", "rate=5")
    served(tmp_path, workload=calm)
    run = EngineRun.read(tmp_path)
    assert sum(run.idle.values()) > len(run.idle) / 2
    cost = roofline_model(load_model(MODEL), load_gpu(GPU))
    fast = msgspec.structs.replace(UNCALIBRATED, engine="lockstep", correction=Correction(kernels=0.5))
    twin = Twin.of(run, client_of(tmp_path, 4_000.0, workload=calm), fast.cost_model(cost), LANE)
    assert twin.frontend_us == pytest.approx(4_000.0, abs=1.0)


def test_clients_that_ran_one_after_another_have_a_clock_each(tmp_path: Path) -> None:
    served(tmp_path)
    run, whole = EngineRun.read(tmp_path), client_of(tmp_path, 4_000.0)
    second = np.arange(whole.count) >= whole.count // 2
    clocks_us = np.where(second, -3_000_000, 77)
    parts = ClientRun({**whole.columns, "client": 1 * second, "arrival_us": whole.columns["arrival_us"] + clocks_us})
    cost = roofline_model(load_model(MODEL), load_gpu(GPU))
    one, two = (Twin.of(run, client, cost, LANE) for client in (whole, parts))
    assert two.frontend_us == one.frontend_us
    assert two.table() == one.table()


def test_the_requests_of_the_engine_alone_count_from_when_they_came(tmp_path: Path) -> None:
    """An engine that records arrivals between batches would seem faster than it is otherwise."""
    answers = served(tmp_path)
    twin = Twin.of_engine(EngineRun.read(tmp_path), roofline_model(load_model(MODEL), load_gpu(GPU)), LANE)
    assert twin.frontend_us == 0.0
    assert len(twin.measured["ttft"]) == len(answers)
    for metric, figure, measured_us, simulated_us in twin.table():
        assert simulated_us == pytest.approx(measured_us, rel=0.15), (metric, figure)


def test_requests_of_equal_lengths_are_paired_in_the_order_of_sending(tmp_path: Path) -> None:
    turns = open_workload("gen:n=12,rate=1,input=fixed:10,output=fixed:5", seed=1).turns
    rows = np.arange(4, 12)
    same = np.full(len(rows), 10), np.full(len(rows), 5)
    client = ClientRun({"request_id": rows, "prompt_tokens": same[0], "output_tokens": same[1]})
    assert paired(turns, client).tolist() == rows.tolist()


def test_a_client_of_another_run_is_refused(tmp_path: Path) -> None:
    served(tmp_path)
    run = EngineRun.read(tmp_path)
    client = client_of(tmp_path, 0.0)
    other = ClientRun({**client.columns, "prompt_tokens": client.columns["prompt_tokens"] + 1})
    with pytest.raises(CalibrationError, match="give the client that sent the requests of this run"):
        Twin.of(run, other, roofline_model(load_model(MODEL), load_gpu(GPU)), LANE)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_client_with_too_few_completed_requests_is_refused(left: int, tmp_path: Path) -> None:
    served(tmp_path)
    whole = client_of(tmp_path, 0.0)
    few = ClientRun({name: column[:left] for name, column in whole.columns.items()})
    with pytest.raises(CalibrationError, match=f"`--client` has {left} completed requests, the front end needs 3"):
        Twin.of(EngineRun.read(tmp_path), few, roofline_model(load_model(MODEL), load_gpu(GPU)), LANE)


# ------------------------------------------------------------------------------------------------------- recordings


def record(folder: Path, requests: int = 40) -> None:
    """Record an engine of another scheduler: requests one after another, equal first pages, 1 ms and 10 us a token."""
    header = RecordingHeader(
        engine="vllm", engine_version="0.32.0", model=MODEL, page_size=16, pages=500, context_tokens_max=512,
        max_running_requests=4, batch_tokens_max=256, gpu="cpu",
    )  # fmt: skip
    writer = RecordingWriter(folder, header, lambda why: pytest.fail(why))
    now_us, batch = 0, 0
    for number in range(requests):
        prompt = 40 + number
        name, blocks = f"cmpl-{number:08x}", (7, number)
        writer.append(Arrived(time_us=now_us, name=name, prompt_tokens=prompt, max_new_tokens=3, blocks=blocks))
        start = 0
        for new in (prompt, 1, 1):
            now_us += 200
            writer.append(Planned(time_us=now_us, batch=batch, rows=((number, start, new, 0),), running=1))
            took_us = 1_000 + 10 * new
            writer.append(PassFinished(time_us=now_us + took_us, batch=batch, started_us=now_us, tokens=((number, 1),)))
            now_us, batch, start = now_us + took_us, batch + 1, start + new
        writer.append(Ended(time_us=now_us, request=number, reason="length"))
        now_us += 5_000
    writer.close()


def run(command: Any, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_a_recording_is_calibrated_and_compared(tmp_path: Path) -> None:
    record(tmp_path / "own")
    out = tmp_path / "mine.json"
    result = run(calibrate, "--from", tmp_path / "own", "--date", "2026-11-26", "--out", out)
    assert result.exit_code == 0, result.output
    found = Calibration.load(out)
    assert (found.engine, found.engine_version, found.gpu) == ("vllm", "0.32.0", "cpu-core")
    assert found.sources[0].rows_used == 120
    assert isinstance(found.lane, CpuModel)
    assert found.lane.result_fixed_us == pytest.approx(200.0, rel=0.05)
    assert any("requests are simulated under the profile `vllm`" in note for note in found.notes)
    assert "the requests of this run, at the engine: measured, simulated with this calibration" in result.output
    (mean,) = [line for line in result.output.splitlines() if line.split()[:4] == ["end", "to", "end", "mean"]]
    assert abs(float(mean.split()[-1].rstrip("%"))) < 10.0


def test_a_recording_is_a_workload(tmp_path: Path) -> None:
    record(tmp_path / "own")
    workload = open_workload(str(tmp_path / "own"), seed=1)
    turns = workload.turns
    assert (workload.format, len(turns)) == ("journal", 40)
    assert turns.prompt_tokens.tolist() == [40 + number for number in range(40)]
    assert set(turns.output_tokens.tolist()) == {3}
    shared = [int(turns.run_first_token[start]) for start in turns.run_starts]
    assert len(set(shared)) == 1  # every prompt begins with the same page


def test_a_journal_is_a_workload_and_a_run_of_it_is_a_simulation(tmp_path: Path) -> None:
    served(tmp_path / "run")
    original = open_workload(WORKLOAD, seed=3).turns
    turns = open_workload(str(tmp_path / "run"), seed=9).turns
    assert turns.prompt_tokens.tolist() == original.prompt_tokens.tolist()
    assert turns.output_tokens.tolist() == original.output_tokens.tolist()
    words = ["--model", MODEL, "--gpu", GPU, "--workload", tmp_path / "run", "--limit", 20, "--no-intervals"]
    result = run(simulate_command, *words)
    assert result.exit_code == 0, result.output


def test_batches_far_faster_than_the_named_device_are_fitted_all_the_same(tmp_path: Path) -> None:
    """The least weight of kernels remains; the other terms cover the time."""
    record(tmp_path / "own")
    out = tmp_path / "mine.json"
    words = ("--from", tmp_path / "own", "--model", "llama-3.1-70b", "--date", "2026-11-26", "--out", out)
    result = run(calibrate, *words)
    assert result.exit_code == 0, result.output
    assert Calibration.load(out).correction.kernels == 0.01


def test_the_lane_of_a_calibration_is_simulated(tmp_path: Path) -> None:
    found = Calibration(**{name: getattr(UNCALIBRATED, name) for name in ("engine", "residuals")}, lane=LANE)
    assert found.cpu_model(CpuModel()) == LANE
    found.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == found
    assert '"lane"' not in UNCALIBRATED.to_json()
    with pytest.raises(CalibrationError, match="`lane` is given, but `cpu` is included"):
        Calibration(engine="x", residuals=UNCALIBRATED.residuals, cpu="included", lane=LANE, correction=Correction())


def test_a_journal_may_have_any_number_of_labels() -> None:
    """Request ids of vLLM have no common part that could be stored once; 40,000 are fewer than an hour has."""
    builder = TurnsBuilder()
    for number in range(40_000):
        label = TurnLabel(*label_parts(f"cmpl-{number:016x}"))
        builder.append(
            TurnStart(number), label, prompt=(number, 1), prompt_tokens=1, output_tokens=1, output_first_token=0
        )
    turns = builder.build()
    assert turns.labels(np.array([39_999])) == [f"cmpl-{39_999:016x}"]
