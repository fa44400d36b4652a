"""Serving points: read as their file describes them, run in a closed loop, predicted in the right order."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.sim.calibrate.calibrate import PointTrials, calibration_of_points, fit_points
from lockstep.sim.calibrate.measured_points import write_points
from lockstep.sim.calibrate.serving_points import (
    CLIENTS,
    ENGINES,
    LoadGenerator,
    Played,
    ServingPoint,
    play,
    read_serving_points,
    turns_of,
)
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cost import UNCALIBRATED, Calibration, CalibrationError
from lockstep.sim.cost.calibration import Correction, Residuals

DATA = Path(os.environ.get("LOCKSTEP_DATA", "/nowhere")) / "published" / "serving_points.csv"
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "serving_points.json"
needs_data = pytest.mark.skipif(not DATA.is_file(), reason="LOCKSTEP_DATA has no published/serving_points.csv")

HEADER = "engine,engine_version,model,gpu,tp,dp,precision,isl,osl,length_dist,concurrency,ttft_ms,tpot_ms,suspect"
ROW = "vllm,1.0,Qwen/Qwen3-32B,H100,2,,bf16,1024,512,unknown,8,150,16.5,"
SHORT = LoadGenerator("short", 2, 0.0, "is only for tests")


def point(**fields: Any) -> ServingPoint:
    given: dict[str, Any] = {
        "row": 2,
        "engine": "vllm",
        "engine_version": "1.0",
        "model": load_model("llama-3.1-8b"),
        "gpu": load_gpu("h100"),
        "tp": 1,
        "weights_dtype": "bf16",
        "prompt_tokens": 512,
        "output_tokens": 48,
        "lengths_from": 1.0,
        "lengths_known": False,
        "concurrency": 4,
        "ttft_us": 60e3,
        "tpot_us": 8e3,
    }
    return ServingPoint(**(given | fields))


def fitted(engine: str) -> Calibration:
    """The correction from all published points of an engine."""
    correction = json.loads(RESULTS.read_text())["fits"][engine]["correction"]
    residuals = Residuals(
        metric="time", population="seen", method="none", count=3, probabilities=(0.1, 0.9), ratios=(0.9, 1.1)
    )
    return Calibration(
        engine=engine, gpu="H100-SXM", cpu="included", correction=Correction(**correction), residuals=(residuals,)
    )


# -------------------------------------------------------------------------------------------------------------- reading


def write(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "points.csv"
    path.write_text("\n".join((header, *rows)) + "\n")
    return path


def test_rows_are_read_and_those_left_out_are_counted_by_reason(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        ROW,
        ROW.replace(",8,150", ",16,180"),
        ROW,  # again
        ROW.replace(",8,150", ",32,180") + "odd",
        ROW.replace("Qwen/Qwen3-32B", "Nobody/Knows"),
        ROW.replace(",2,,bf16", ",2,4,bf16"),
        ROW.replace("Qwen/Qwen3-32B", "Qwen/Qwen3-235B-A22B-FP8").replace("bf16", "fp8"),
        ROW.replace("unknown", '"InferenceX campaigns: uniform [0.8N,N]"').replace(",8,150", ",64,180"),
    )
    points, left_out = read_serving_points(path)
    assert [p.row for p in points] == [2, 3, 8, 9]
    assert left_out == {
        "the same conditions again": [4],
        "marked suspect": [5],
        "unknown model `Nobody/Knows`": [6],
        "data parallel, which is not modelled": [7],
    }
    first, _, mixture, uniform = points
    assert (first.ttft_us, first.tpot_us, first.tp, first.concurrency) == (150e3, 16.5e3, 2, 8)
    assert (first.lengths_from, first.lengths_known) == (1.0, False)
    assert (mixture.model.name, mixture.weights_dtype) == ("qwen3-235b-a22b", "fp8")
    assert (uniform.lengths_from, uniform.lengths_known) == (0.8, True)
    points, left_out = read_serving_points(path, suspect=True)
    assert 5 in [p.row for p in points]
    assert "marked suspect" not in left_out


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW.replace("16.5", "soon"), "row 2: `tpot_ms` must be a number above 0, got `soon`"),
        (ROW.replace("vllm", "mine"), "row 2: `engine` must be one of vllm, sglang, trtllm, got `mine`"),
        (ROW.replace("bf16", "int3"), "row 2: `precision` must be one of"),
        (ROW.replace(",8,150", ",0,150"), "row 2: `concurrency` must be a number above 0"),
    ],
)
def test_a_row_that_cannot_be_read_is_one_error(tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(CalibrationError) as error:
        read_serving_points(write(tmp_path, row))
    assert said in str(error.value)


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="column `tpot_ms` is missing"):
        read_serving_points(write(tmp_path, header=HEADER.replace("tpot_ms,", "")))


def test_experts_and_kv_are_as_the_engine_has_them(tmp_path: Path) -> None:
    """Laid out by the column `ep` unless switched off; KV of TensorRT-LLM as wide as its weights."""
    header = HEADER.replace("tp,dp", "tp,ep,dp")
    qwen = ROW.replace("Qwen/Qwen3-32B,H100,2,", "Qwen/Qwen3-235B-A22B-FP8,H100,4,4,").replace("bf16", "fp8")
    path = write(tmp_path, qwen, qwen.replace("vllm", "trtllm"), header=header)
    (vllm, trtllm), left_out = read_serving_points(path)
    assert not left_out
    assert str(vllm.split) == str(trtllm.split) == "tp 4, ep 4"
    assert (vllm.kv_dtype, trtllm.kv_dtype) == ("bf16", "fp8")
    assert [str(p.split) for p in read_serving_points(path, experts=False)[0]] == ["tp 4"] * 2
    assert ENGINES["trtllm"]["reserve"] == "full"  # GUARANTEED_NO_EVICT


def test_narrower_kv_is_read_faster_and_admits_more() -> None:
    narrow, wide = (
        play(
            point(engine="trtllm", weights_dtype="fp8", kv_dtype=kv, concurrency=64, model=load_model("qwen3-32b")),
            SHORT,
        )
        for kv in ("fp8", "bf16")
    )
    assert narrow.tpot_us < 0.97 * wide.tpot_us


# -------------------------------------------------------------------------------------------------------------- playing


def test_users_send_one_request_after_another_of_the_lengths_that_are_known() -> None:
    uniform = point(lengths_from=0.8, lengths_known=True, prompt_tokens=1000, output_tokens=100, concurrency=50)
    turns = turns_of(uniform, CLIENTS["spread"], seed=7)
    assert len(turns) == 500
    assert [turn.after for turn in turns[:50]] == [None] * 50
    assert all(turn.after == turn.index - 50 for turn in turns[50:])
    prompts, outputs = np.array([(turn.prompt_tokens, turn.output_tokens) for turn in turns]).T
    assert (prompts.min() >= 800, prompts.max() <= 1000, outputs.min() >= 80, outputs.max() <= 100) == (True,) * 4
    assert prompts.mean() == pytest.approx(900, rel=0.02)
    fixed = turns_of(point(), CLIENTS["waves"], seed=7)
    assert {(turn.prompt_tokens, turn.output_tokens) for turn in fixed} == {(512, 48)}
    spread = turns_of(point(output_tokens=100, concurrency=50), CLIENTS["spread"], seed=7)
    assert {turn.prompt_tokens for turn in spread} == {512}
    assert {80, 120} <= {turn.output_tokens for turn in spread}
    firsts = [turn.prompt[0] for turn in spread]
    assert len(set(firsts)) == len(firsts)  # no prefix is shared


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_timing_a_schedule_anew_is_simulating_it_again(engine: str) -> None:
    p = point(engine=engine, tp=2, concurrency=6)
    calibration = fitted(engine)
    plain = play(p, SHORT)
    weights = np.array(UNCALIBRATED.correction.weights)
    assert plain.tpot_parts @ weights == pytest.approx(plain.tpot_us, rel=1e-3)
    assert plain.ttft_parts @ weights == pytest.approx(plain.ttft_us, rel=1e-3)
    again = play(p, SHORT, calibration)
    weights = np.array(calibration.correction.weights)
    assert plain.tpot_parts @ weights == pytest.approx(again.tpot_us, rel=0.01)
    assert plain.ttft_parts @ weights == pytest.approx(again.ttft_us, rel=0.05)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-32b", "gpt-oss-120b"])
def test_more_users_are_never_served_faster(engine: str, model: str) -> None:
    spec = load_model(model)
    played = [
        play(
            point(engine=engine, model=spec, weights_dtype=spec.checkpoint_dtype, tp=4, concurrency=c),
            SHORT,
            fitted(engine),
        )
        for c in (1, 2, 4, 8, 16, 32, 64, 128)
    ]
    tpot = [p.tpot_us for p in played]
    ttft = [p.ttft_us for p in played]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(tpot)), tpot
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(ttft)), ttft


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize(("model", "least"), [("llama-3.1-8b", 1), ("qwen3-32b", 2), ("llama-3.1-70b", 4)])
def test_more_gpus_never_serve_slower(engine: str, model: str, least: int) -> None:
    """True of these models on NVLink; a small enough model would lose more to collectives than it gains."""
    spec, calibration = load_model(model), fitted(engine)
    for concurrency in (1, 16, 128):
        played = [
            play(point(engine=engine, model=spec, tp=tp, concurrency=concurrency), SHORT, calibration)
            for tp in (1, 2, 4, 8)
            if tp >= least
        ]
        for metric in ("tpot_us", "ttft_us"):
            values = [getattr(p, metric) for p in played]
            assert all(a >= b for a, b in pairwise(values)), (concurrency, metric, values)


# -------------------------------------------------------------------------------------------------------------- fitting


def invented(noise: float) -> PointTrials:
    """Points of two models on an engine with the times of a planted correction, with noise."""
    rng = np.random.default_rng(7)
    weights = np.array([1.1, 1.5, 900.0, 25.0, 4.0])
    points, played = [], []
    for model in ("llama-3.1-8b", "qwen3-32b"):
        for tp in (2, 4, 8):
            for users in (4, 16, 64):
                tpot = np.array([rng.uniform(3e3, 3e4) / tp, rng.uniform(200, 1500), 1.0, users, 64.0])
                ttft = tpot * rng.uniform(3, 20)
                us, first_us = tpot @ weights, ttft @ weights + 40e3
                us, first_us = (value * float(np.exp(noise * rng.normal())) for value in (us, first_us))
                points.append(point(model=load_model(model), tp=tp, concurrency=users, tpot_us=us, ttft_us=first_us))
                played.append(Played(float(tpot[:2].sum()), float(ttft[:2].sum()), tpot, ttft, 1))
    worse = [Played(2 * p.tpot_us, 3 * p.ttft_us, 2 * p.tpot_parts, 3 * p.ttft_parts, 1) for p in played]
    return PointTrials(points, {"spread": worse, "waves": played})


def test_a_fit_finds_the_client_and_predicts_what_it_has_not_seen() -> None:
    trial = invented(noise=0.02)
    rows = trial.rows("vllm")
    fit = fit_points(trial, rows[::2])
    assert fit.client == "waves"
    errors = np.abs(fit.tpot_us(trial, rows[1::2]) / trial.measured_us("tpot_us", rows[1::2]) - 1.0)
    assert np.median(errors) < 0.05
    assert fit.correction.frontend_us == pytest.approx(40e3, rel=0.35)


def test_noisier_points_have_wider_intervals() -> None:
    calm, wild = (calibration_of_points(invented(noise), "vllm", date="2026-11-22") for noise in (0.01, 0.2))
    width = {
        name: np.log(c.interval("time", 0.9, "qwen3-32b")) @ [-1, 1] for name, c in (("calm", calm), ("wild", wild))
    }
    assert width["calm"] < 0.3 < width["wild"]
    assert calm.models == ("llama-3.1-8b", "qwen3-32b")
    assert calm.cpu == "included"
    with pytest.raises(CalibrationError, match="engine `sglang` has 0 points, a calibration needs 4"):
        calibration_of_points(invented(0.01), "sglang", date="2026-11-22")


@needs_data
def test_every_published_point_of_a_known_model_is_read() -> None:
    points, left_out = read_serving_points(DATA)
    figures = json.loads(RESULTS.read_text())
    assert len(points) == figures["points"] == 125
    expected = {row for rows in left_out.values() for row in rows}
    assert {row for rows in figures["left_out"].values() for row in rows} == expected
    assert not any("suspect" in why for why in left_out)  # the file marks none of them


@needs_data
def test_calibrate_from_published_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, client in list(CLIENTS.items()):
        monkeypatch.setitem(CLIENTS, name, replace(client, requests_per_user=2))  # a fifth, to be quick
    arguments = ["points", str(DATA), "--engine", "sglang", "--gpu", "h100", "--date", "2026-11-22"]
    result = CliRunner().invoke(calibrate, [*arguments, "--out", str(tmp_path / "c.json")])
    assert result.exit_code == 0, result.output
    found = Calibration.load(tmp_path / "c.json")
    assert 0.9 < found.correction.kernels < 1.1
    assert 100.0 < found.correction.step_us < 2000.0
    low, high = found.interval("time", 0.9, "qwen3-32b")
    assert 0.8 < low < 1.0 < high < 1.25
    [source] = found.sources
    assert (source.kind, source.rows_used, source.rows_left_out) == ("serving_points", 9, 6)
    assert found.gpu == "H100-SXM"
    assert "users stay in step" in found.notes[0]
    arguments[3] = "mine"
    result = CliRunner().invoke(calibrate, [*arguments, "--out", str(tmp_path / "c.json")])
    assert result.exit_code == 2
    assert "no rows of engine `mine` on `h100`; left out: " in result.stderr
    assert result.stderr.endswith("hint: give --engine sglang or trtllm or vllm\n")


def test_the_committed_figures_meet_the_bar() -> None:
    """Half of the points fitted, the other half predicted, one parameter set per engine."""
    figures = json.loads(RESULTS.read_text())
    assert len(figures["halves"]) >= 5
    for half in figures["halves"]:
        assert half["time"]["median"] <= 0.10, half["seed"]
        assert half["time"]["p90"] <= 0.25, half["seed"]
        assert half["time"]["covered"] >= 0.80, half["seed"]
        assert half["ttft"]["covered"] >= 0.80, half["seed"]


def test_settings_of_a_server_are_read_and_change_the_simulated_point(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    usual = point(engine="sglang", model=load_model("qwen3-32b"), tp=4, concurrency=8)
    rare = replace(usual, receive_interval=30, prefill_tokens=1024, overlaps=True)
    write_points(path, [usual, rare])
    again, left_out = read_serving_points(path)
    assert not left_out
    assert [(p.receive_interval, p.prefill_tokens, p.overlaps) for p in again] == [(1, 0, False), (30, 1024, True)]
    first, second = (play(p, CLIENTS["spread"]).ttft_us for p in again)
    assert second > 2 * first  # a request waits for up to 30 passes before the scheduler sees it


def test_a_user_beyond_the_rows_of_a_server_adds_the_time_of_an_answer_over_the_number_of_users(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    points = [point(output_tokens=tokens, extra_users=extra) for extra in (0, 1) for tokens in (48, 96)]
    write_points(path, points)
    again, _ = read_serving_points(path)
    assert [p.extra_users for p in again] == [0, 0, 1, 1]
    assert len({p.key for p in again}) == 4
    alone, twice, waits, waits_longer = (play(p, CLIENTS["spread"]) for p in again)
    assert twice.ttft_us == pytest.approx(alone.ttft_us, rel=0.3)
    for one, longer, tokens in ((alone, waits, 48), (twice, waits_longer, 96)):
        answer_us = one.ttft_us + tokens * one.tpot_us
        assert longer.ttft_us - one.ttft_us == pytest.approx(answer_us / 4, rel=0.4)
        assert longer.tpot_us == pytest.approx(one.tpot_us, rel=0.1)


@pytest.mark.parametrize("text", ["-1", "1.5", "one", "99999999"])
def test_a_number_of_further_users_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(f"{HEADER},extra_users\n{ROW},{text}\n")
    with pytest.raises(CalibrationError, match=f"row 2: `extra_users` must be a whole number from 0.*got `{text}`"):
        read_serving_points(path)
