"""Calibrations: files that describe themselves, corrections under which more work is never faster, fits."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from lockstep.core.contract.config import SchedConfig
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.sim.calibrate.calibrate import calibration_of_batches, held_out, timed_batches
from lockstep.sim.calibrate.measured_run import MeasuredRun, fit_base
from lockstep.sim.catalogue import calibration_names, load_calibration, load_gpu, load_model
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cost import (
    UNCALIBRATED,
    BatchShape,
    CalibratedModel,
    Calibration,
    CalibrationError,
    CpuModel,
    decode_shape,
    extend_shape,
    roofline_model,
)
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.calibration import (
    FEATURES,
    LOWER_BOUND,
    PROBABILITIES,
    UNSEEN_MODELS,
    CalibrationSource,
    Case,
    Correction,
    Residuals,
    batch_features,
)
from lockstep.sim.cost.fit import fit_weights, nonnegative_least_squares, relative_shift
from lockstep.sim.cost.model import LastingSpread
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.results.batch_times import of_journal
from tests.support.shapes import shapes

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "serving_points.json"
SMALL = ["--model", "qwen3-0.6b", "--gpu", "h200", "--workload", "gen:n=40,rate=20,input=fixed:200,output=fixed:20"]
PLANTED = Correction(kernels=1.25, collectives=2.0, step_us=400.0, row_us=30.0, collective_us=5.0, frontend_us=30_000.0)


def residuals(**fields: Any) -> Residuals:
    return msgspec.structs.replace(
        Residuals(
            metric="time",
            population="seen",
            method="invented",
            count=20,
            probabilities=(0.05, 0.5, 0.95),
            ratios=(0.9, 1.0, 1.2),
        ),
        **fields,
    )


def calibration(**fields: Any) -> Calibration:
    found = Calibration(
        engine="vllm",
        engine_version="0.12.0",
        gpu="H200-SXM",
        models=("qwen3-0.6b",),
        date="2026-11-22",
        correction=PLANTED,
        residuals=(residuals(),),
    )
    return msgspec.structs.replace(found, **fields)


def run(command: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


# --------------------------------------------------------------------------------------------------------------- files


def test_a_file_comes_back_as_it_was_and_equal_ones_are_equal_bytes(tmp_path: Path) -> None:
    source = CalibrationSource(kind="journal", file="run", sha256="0" * 64, rows_used=7)
    before = calibration(spread=0.03, sources=(source,), notes=("one",))
    before.save(tmp_path / "a.json")
    after = Calibration.load(tmp_path / "a.json")
    assert after == before
    after.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert before.digest == after.digest != calibration().digest
    assert before.title == f"vllm 0.12.0 on H200-SXM, 2026-11-22, {before.digest[:12]}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "`version` 2 is not one this release reads"),
        ({"format": "other"}, "`format` must be lockstep-calibration"),
        ({"spread": -0.1}, "`spread` must be at least 0"),
        ({"prompt_spread": 1.0}, "`prompt_spread` must be at least 0"),
        ({"residuals": []}, "`residuals` must have time of seen models"),
        ({"correction": {"row_us": -1.0}}, "`correction.row_us` must be at least 0"),
        ({"correction": {"kernels": 0.0}}, "`correction.kernels` must be at least 0.01"),
        ({"colour": "blue"}, "not a calibration file: Object contains unknown field `colour`"),
        ({"cpu": "maybe"}, "not a calibration file"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(json.loads(calibration().to_json()) | change))
    with pytest.raises(CalibrationError) as error:
        Calibration.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value)


def test_a_missing_or_broken_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="hint: `lockstep calibrate` makes"):
        Calibration.load(tmp_path / "nowhere.json")
    (tmp_path / "torn.json").write_text(calibration().to_json()[:200])
    with pytest.raises(CalibrationError, match="not a calibration file"):
        Calibration.load(tmp_path / "torn.json")
    result = run(simulate, *SMALL, "--calibration", str(tmp_path / "torn.json"))
    assert result.exit_code == 2
    assert result.stderr.startswith("CalibrationError: ")
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------------------------------------------------- corrections


corrections = st.builds(
    Correction,
    kernels=st.floats(0.01, 3.0),
    collectives=st.floats(0.0, 5.0),
    step_us=st.floats(0.0, 5000.0),
    row_us=st.floats(0.0, 100.0),
    collective_us=st.floats(0.0, 50.0),
    prompt_us=st.just(UNSET) | st.floats(0.0, 2000.0),
    kv_token_us=st.just(UNSET) | st.floats(0.0, 0.2),
    attention_prefill=st.just(UNSET) | st.floats(0.0, 1.0),
)
BASES = {
    (name, tp): roofline_model(load_model(name), load_gpu("h100"), tp, "fp8" if name == "qwen3-235b-a22b" else None)
    for name, tps in (("qwen3-8b", (1, 2, 8)), ("gpt-oss-120b", (2, 8)), ("qwen3-235b-a22b", (4,)))
    for tp in tps
}


@given(
    st.sampled_from(sorted(BASES)),
    corrections,
    shapes(extends_max=3, decodes_max=300, context_tokens_max=50_000),
    st.integers(1, 4000),
    st.integers(0, 50_000),
)
def test_more_work_is_never_faster_whatever_the_correction(
    key: tuple[str, int], correction: Correction, shape: BatchShape, new: int, context: int
) -> None:
    base = BASES[key]
    cost = calibration(correction=correction).cost_model(base)
    before = cost.batch_us(shape).mean_us
    assert before >= 0.0
    one_more_decode = replace(
        shape,
        decode_rows=shape.decode_rows + 1,
        decode_context_tokens=shape.decode_context_tokens + context,
        sampled_rows=shape.sampled_rows + 1,
    )
    one_more_extend = replace(
        shape,
        extend_rows=shape.extend_rows + 1,
        extend_tokens=shape.extend_tokens + new,
        extend_context_tokens=shape.extend_context_tokens + context,
        extend_pairs=shape.extend_pairs + new * context + new * (new + 1) // 2,
    )
    for more in (one_more_decode, one_more_extend):
        assert cost.batch_us(more).mean_us >= before * (1 - 1e-12)


def test_more_work_is_never_faster_while_launches_take_longest() -> None:
    """Collectives corrected to less than the kernels were taken off a time that does not grow with them: by 0.1 %."""
    cost = calibration(correction=Correction(kernels=1.0, collectives=0.0)).cost_model(BASES["gpt-oss-120b", 8])
    one = BatchShape(extend_rows=1, extend_tokens=1, extend_pairs=1, sampled_rows=1)
    assert cost.batch_us(replace(one, decode_rows=1)).mean_us >= cost.batch_us(one).mean_us


@given(
    st.sampled_from(sorted(BASES)),
    corrections,
    shapes(extends_max=3, decodes_max=300, context_tokens_max=50_000),
    st.floats(0.5, 2.0),
)
@example(
    ("gpt-oss-120b", 2),
    Correction(kernels=1.0, collectives=0.0, attention_prefill=1.0),
    BatchShape(extend_rows=1, extend_tokens=1, extend_pairs=1, sampled_rows=1),
    1.0,
)  # launches take longest: attention is added to them, in the terms as in their sum
def test_a_batch_is_the_weighted_sum_of_its_parts(
    key: tuple[str, int], correction: Correction, shape: BatchShape, factor: float
) -> None:
    base = BASES[key]
    cost = CalibratedModel(base, calibration(correction=correction), factor)
    if shape.extend_tokens + shape.decode_rows:
        kernels, collectives, *rest = np.multiply(correction.weights, batch_features(base, shape)).tolist()
        launching = correction.kernels * base.launched_us(shape, 0.0)
        prompts = max(shape.sampled_rows - shape.decode_rows - shape.draft_tokens, 0)
        attention_us = base.term("attention_prefill").us(shape, shape) if shape.extend_tokens else 0.0
        counts = {
            "prompt_us": prompts,
            "kv_token_us": shape.decode_context_tokens,
            "attention_prefill": attention_us,
        }
        of_batches = sum(correction.weight(name) * count for name, count in counts.items())
        expected = factor * (max(kernels + collectives, launching) + sum(rest) + of_batches)
        assert cost.batch_us(shape).mean_us == pytest.approx(expected, rel=1e-9)
        assert sum(cost.terms_us(shape).values()) == pytest.approx(expected, rel=1e-9)
    else:
        assert cost.batch_us(shape).mean_us == 0.0


@pytest.mark.parametrize("cpu", ["separate", "included"])
@pytest.mark.parametrize("pp", [2, 3])
@given(shape=shapes(extends_max=3, decodes_max=300, context_tokens_max=50_000))
def test_stages_share_a_correction_out(cpu: Literal["separate", "included"], pp: int, shape: BatchShape) -> None:
    """All stages together add what the correction adds; the CPU time of a scheduler is that of the first stage."""
    base = base_cost_model(load_model("qwen3-8b"), load_gpu("h200"), Parallelism(tp=2, pp=pp))
    added = Correction(step_us=400.0, row_us=30.0, collective_us=5.0, prompt_us=50.0, kv_token_us=0.01)
    cost = calibration(correction=added, cpu=cpu).cost_model(base)
    assert isinstance(base, PipelineModel)
    assert isinstance(cost, PipelineModel)
    if not shape.extend_tokens + shape.decode_rows:
        return
    expected = 400.0 + 5.0 * base.collectives + sum(added.of_rows_us(shape).values())
    assert sum(cost.stage_us(shape)) - sum(base.stage_us(shape)) == pytest.approx(expected, rel=1e-6, abs=1e-3)
    terms, stages = cost.terms_us(shape), [stage.terms_us(shape) for stage in cost.stages]
    assert sum(terms.values()) == pytest.approx(cost.batch_us(shape).mean_us, rel=1e-9)
    assert terms["step_us"] == pytest.approx(400.0)
    shares = [stage.model.layers / base.model.layers for stage in base.stages]
    steps = [1.0] + [0.0] * (pp - 1) if cpu == "included" else shares
    assert [stage.get("step_us", 0.0) for stage in stages] == pytest.approx([400.0 * share for share in steps])


def test_a_factor_scales_the_sends_between_stages_too() -> None:
    base = base_cost_model(load_model("qwen3-8b"), load_gpu("h200"), Parallelism(tp=2, pp=2))
    shape = decode_shape(8, 900)
    doubled = calibration(correction=Correction(kernels=2.0, collectives=2.0)).cost_model(base, 1.5)
    assert isinstance(doubled, PipelineModel)
    assert doubled.stage_us(shape) == pytest.approx([3.0 * us for us in base.stage_us(shape)])
    assert doubled.send_us(8) == pytest.approx(1.5 * base.send_us(8))


def test_no_correction_is_the_base_itself() -> None:
    base = BASES["qwen3-8b", 2]
    assert UNCALIBRATED.cost_model(base) is base
    assert UNCALIBRATED.cpu_model(CpuModel()) == CpuModel()
    doubled, shape = UNCALIBRATED.cost_model(base, 2.0), decode_shape(8, 900)
    assert doubled.batch_us(shape).mean_us == pytest.approx(2.0 * base.batch_us(shape).mean_us)


def test_the_base_must_be_what_was_calibrated() -> None:
    with pytest.raises(CalibrationError, match="corrects the cost model `measured`, got `roofline`"):
        calibration(base="measured").cost_model(BASES["qwen3-8b", 1])
    with pytest.raises(CalibrationError, match="`factor` must be above 0"):
        calibration().cost_model(BASES["qwen3-8b", 1], 0.0)


def test_prompts_may_have_a_spread_of_their_own() -> None:
    cost = calibration(spread=0.04, prompt_spread=0.01).cost_model(BASES["qwen3-8b", 1])
    prompt, decode = cost.batch_us(extend_shape(500)), cost.batch_us(decode_shape(8, 300))
    assert prompt.spread_us == pytest.approx(0.01 * prompt.mean_us)
    assert decode.spread_us == pytest.approx(0.04 * decode.mean_us)
    only_prompts = calibration(prompt_spread=0.01).cost_model(BASES["qwen3-8b", 1])
    assert only_prompts.batch_us(extend_shape(500)).spread_us > 0.0


def test_spread_is_that_of_single_batches() -> None:
    cost = calibration(spread=0.04).cost_model(BASES["qwen3-8b", 1])
    took = cost.batch_us(decode_shape(8, 900))
    assert took.spread_us == pytest.approx(0.04 * took.mean_us)


# ----------------------------------------------------------------------------------------------------------- residuals


def test_draws_are_stratified_and_depend_on_their_seed_alone() -> None:
    found = calibration()
    draws = found.factors(200, seed=7, model="qwen3-0.6b")
    assert np.array_equal(draws, found.factors(200, seed=7, model="qwen3-0.6b"))
    assert not np.array_equal(draws, found.factors(200, seed=8, model="qwen3-0.6b"))
    # One draw from each half percent: quantiles of the draws are those of the table, under any seed.
    for probability, ratio in ((0.05, 0.9), (0.5, 1.0), (0.95, 1.2)):
        assert np.quantile(draws, probability) == pytest.approx(ratio, rel=0.01)
    assert np.corrcoef(np.arange(200), draws)[0, 1] < 0.3  # in random order
    assert len(found.factors(1, seed=1)) == 1
    with pytest.raises(CalibrationError, match="`n` must be at least 1"):
        found.factors(0, seed=1)


def test_models_that_were_not_seen_have_residuals_of_their_own() -> None:
    found = calibration(residuals=(residuals(), residuals(metric="ttft", ratios=(0.7, 1.1, 2.0)), UNSEEN_MODELS[0]))
    assert found.interval("time", 0.9, "qwen3-0.6b") == pytest.approx((0.9, 1.2))
    assert found.interval("ttft", 0.9, "qwen3-0.6b") == pytest.approx((0.7, 2.0))
    unseen = found.interval("time", 0.9, "qwen3-32b")
    assert unseen[0] < 0.9
    assert found.interval("time", 0.9) == unseen  # no model given: like an unseen one
    assert found.interval("ttft", 0.9, "qwen3-32b") == pytest.approx((0.7, 2.0))  # points of seen models only
    without = calibration(residuals=(residuals(), *UNSEEN_MODELS))
    assert without.interval("ttft", 0.9, "qwen3-0.6b") == pytest.approx((0.9, 1.2))  # the time takes its place
    assert found.doubts(Case("qwen3-0.6b", "H200-SXM"), overlap_depth=0) == []
    assert len(found.doubts(Case("qwen3-32b", "H100-SXM"), overlap_depth=1)) == 2


POINTS = (CalibrationSource(kind="serving_points", file="p.csv", sha256="0" * 64, rows_used=9),)
SEEN = Case("qwen3-0.6b", "H200-SXM", Parallelism(tp=2), "bf16", "bf16")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (SEEN, ""),
        (dataclasses.replace(SEEN, gpu="H100-SXM"), "made on H200-SXM, this is H100-SXM"),
        (dataclasses.replace(SEEN, model="qwen3-32b"), "has not seen qwen3-32b; intervals are those of models"),
        (dataclasses.replace(SEEN, split=Parallelism(tp=4)), "made on tp 2, this is tp 4"),
        (dataclasses.replace(SEEN, split=Parallelism(tp=2, ep=2)), "made without ep"),
        (
            dataclasses.replace(SEEN, kv_dtype="fp8"),
            "made with bf16 weights and bf16 KV, this is bf16 weights and fp8 KV",
        ),
        (dataclasses.replace(SEEN, weights_dtype="fp8"), "made with bf16 weights and bf16 KV, this is fp8 weights"),
    ],
)
def test_a_calibration_states_what_it_does_not_hold_for(case: Case, said: str) -> None:
    found = calibration(sources=POINTS, layouts=("tp 2",), dtypes=(("bf16", "bf16"),))
    assert found.covers(case) == (not said)
    doubts = found.doubts(case, overlap_depth=0)
    assert len(doubts) == bool(said)
    assert not said or said in doubts[0]


def test_a_correction_is_that_of_an_engine() -> None:
    with pytest.raises(CalibrationError, match="`engine` is none, which is kernels without an engine"):
        calibration(engine="none")


def test_only_intervals_whose_coverage_was_counted_are_called_ninety_percent() -> None:
    case = Case("qwen3-0.6b", "H200-SXM")
    assert calibration(sources=POINTS).covers(case)
    assert not calibration().covers(case)  # no source
    journal = (msgspec.structs.replace(POINTS[0], kind="journal"),)
    assert not calibration(sources=journal).covers(case)  # batches of one run
    few = tuple(replace(one, population="seen") for one in UNSEEN_MODELS)
    assert not calibration(sources=POINTS, residuals=few).covers(case)  # errors of other engines' fits
    assert not UNCALIBRATED.covers(case)


def test_nothing_is_reported_of_intervals_where_there_are_none() -> None:
    found, split = calibration(cpu="included"), Parallelism(tp=2, ep=2)
    case = Case("qwen3-32b", "H100-SXM", split)
    said = [found.doubts(case, 0, has_intervals=both) for both in (True, False)]
    assert [len(lines) for lines in said] == [4, 4]  # parts without correction are reported too
    assert sum("interval" in line for line in said[0]) == 3
    assert not any("interval" in line for line in said[1])
    assert not any("  " in line or line.endswith(";") for line in said[1])
    for each in (*(load_calibration(name) for name in calibration_names()), UNCALIBRATED):
        assert not any("interval" in line for line in each.doubts(Case("none", "none", split), 0, has_intervals=False))


def test_overlap_cannot_be_judged_by_batches_that_have_the_cpu_in_them() -> None:
    found = calibration(cpu="included")
    assert found.doubts(Case("qwen3-0.6b", "H200-SXM"), overlap_depth=1) == []
    [doubt] = found.doubts(Case("qwen3-0.6b", "H200-SXM"), overlap_depth=0)
    assert "what overlap_depth 0 does is not seen" in doubt


def test_few_predictions_do_not_mean_narrow_intervals() -> None:
    few = Residuals.of([0.95, 1.0, 1.05], metric="time", population="seen", method="invented")
    assert few.ratios[0] < 0.95
    assert few.ratios[-1] > 1.05
    many = Residuals.of(np.linspace(0.9, 1.1, 999), metric="time", population="seen", method="invented")
    assert many.at([0.25, 0.5]) == pytest.approx([0.95, 1.0], abs=1e-3)
    with pytest.raises(CalibrationError, match="at least 3 predictions"):
        Residuals.of([1.0, 1.1], metric="time", population="seen", method="invented")


def test_what_holds_without_a_calibration_is_what_the_benchmark_measured() -> None:
    figures = json.loads(RESULTS.read_text())
    for metric in ("time", "ttft"):
        [found] = [r for r in UNCALIBRATED.residuals if r.metric == metric]
        measured = [figures["uncorrected"][metric]["ratios"][str(p)] for p in PROBABILITIES]
        assert found.ratios == pytest.approx(measured, rel=0.006)
        assert found.count == figures["uncorrected"][metric]["typical"]
        [unseen] = [r for r in UNSEEN_MODELS if r.metric == metric]
        left_out = [figures["models_left_out"]["ratios"][metric][str(p)] for p in PROBABILITIES]
        assert unseen.count == figures["models_left_out"]["typical"][metric]
        assert unseen.ratios == pytest.approx(left_out, rel=0.006)


# ---------------------------------------------------------------------------------------------------------------- fits


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 20))
def test_nonnegative_least_squares_is_optimal(seed: int, columns: int, more_rows: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(columns + more_rows, columns))
    target = rng.normal(size=columns + more_rows)
    x = nonnegative_least_squares(matrix, target)
    assert (x >= 0.0).all()
    gradient = matrix.T @ (matrix @ x - target)
    assert (gradient >= -1e-6).all()  # no improvement by more of any term,
    assert np.abs(gradient * x).max() <= 1e-6 * (1.0 + np.abs(x).max())  # nor by less


def grid_of_batches() -> list[BatchShape]:
    decodes = [decode_shape(rows, context) for rows in (1, 4, 16, 64, 256) for context in (200, 2000, 20_000)]
    return decodes + [extend_shape(tokens) for tokens in (64, 512, 2048, 8192)]


def test_a_fit_finds_what_was_planted_and_is_not_bent_by_one_wrong_point() -> None:
    batches = [(base, shape) for base in BASES.values() for shape in grid_of_batches()]
    features = np.array([batch_features(base, shape) for base, shape in batches])
    measured_us = features @ np.array(PLANTED.weights)
    weights = dict(zip(FEATURES, fit_weights(features, measured_us), strict=True))
    for name in FEATURES:
        assert weights[name] == pytest.approx(getattr(PLANTED, name), rel=0.05), name
    measured_us[3] *= 10.0
    bent = fit_weights(features, measured_us)
    assert np.median(np.abs(features @ bent / measured_us - 1.0)) < 0.01


def test_few_points_stay_near_no_correction() -> None:
    base = BASES["qwen3-8b", 1]
    features = np.array([batch_features(base, decode_shape(8, 1000))])
    kernels, collectives, *_ = fit_weights(features, features @ np.array([1.3, 1.0, 0.0, 0.0, 0.0]))
    assert 1.0 < kernels < 1.3  # the rest could also be the engine's own time
    assert collectives == pytest.approx(1.0)


def test_points_that_are_no_times_are_refused() -> None:
    with pytest.raises(CalibrationError, match="no point to fit"):
        fit_weights(np.empty((0, 5)), np.empty(0))
    with pytest.raises(CalibrationError, match="above 0"):
        fit_weights(np.ones((1, 5)), np.zeros(1))


@given(st.lists(st.tuples(st.floats(1e3, 1e6), st.floats(1e3, 1e6)), min_size=1, max_size=12))
def test_the_shift_is_the_best_constant(points: list[tuple[float, float]]) -> None:
    predicted, measured = np.array(points).T

    def error(shift: float) -> float:
        return float((np.abs(predicted + shift - measured) / measured).sum())

    shift = relative_shift(predicted, measured)
    assert shift >= 0.0
    others = [0.0, *np.maximum(0.0, measured - predicted), shift * 1.1 + 1.0, shift * 0.9]
    assert error(shift) <= min(map(error, others)) * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------------------ simulate


def metrics_of(*arguments: str) -> dict[str, Any]:
    result = run(simulate, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_result_names_its_calibration_and_what_its_answers_lie_between(tmp_path: Path) -> None:
    calibration().save(tmp_path / "c.json")
    found = metrics_of(*SMALL, "--calibration", str(tmp_path / "c.json"))
    assert found["about"]["calibration"]["digest"] == calibration().digest
    assert found["intervals"]["calibration"] == found["about"]["calibration"]["title"] == calibration().title
    assert found["intervals"]["time_factors"] == pytest.approx([0.9, 1.2])
    plain = metrics_of(*SMALL, "--engine", "none")
    assert plain["about"]["calibration"]["title"] == plain["intervals"]["calibration"] == LOWER_BOUND
    for metrics in (found, plain):
        answers = metrics["intervals"]["answers"]
        assert answers.pop("goodput_requests_per_s") is None  # there were no SLOs
        for name, (low, high) in answers.items():
            value = metrics["latency"].get(name, metrics["throughput"].get(name))
            assert low < high, name
            if metrics is found or not name.startswith("ttft"):
                assert low <= value <= high, name
    assert "intervals" not in metrics_of(*SMALL, "--no-intervals")


def test_tables_and_report_report_the_same(tmp_path: Path) -> None:
    found = calibration(sources=POINTS)
    found.save(tmp_path / "c.json")
    result = run(simulate, *SMALL, "--calibration", str(tmp_path / "c.json"), "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert f"calibration: {found.title}\n" in result.stdout
    assert "90 % intervals" in result.stdout
    report = (tmp_path / "run" / "report.html").read_text()
    assert found.title in report
    assert "intervals (90 %) stand below the answers" in report
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert written["intervals"]["coverage"] == 0.9
    assert f"--calibration {tmp_path / 'c.json'}" in written["about"]["command"]


def test_time_outside_the_engine_is_part_of_ttft_and_of_nothing_between_tokens(tmp_path: Path) -> None:
    calibration().save(tmp_path / "slow.json")
    quick = msgspec.structs.replace(PLANTED, frontend_us=0.0)
    calibration(correction=quick).save(tmp_path / "quick.json")
    slow, fast = (
        metrics_of(*SMALL, "--no-intervals", "--calibration", str(tmp_path / f"{name}.json"))["latency"]
        for name in ("slow", "quick")
    )
    assert slow["ttft_us_p50"] - fast["ttft_us_p50"] == pytest.approx(30_000)
    assert slow["e2e_us_p99"] - fast["e2e_us_p99"] == pytest.approx(30_000)
    assert slow["tpot_us_p99"] == fast["tpot_us_p99"]


def test_an_engine_whose_cpu_time_is_in_the_correction_has_a_free_lane(tmp_path: Path) -> None:
    calibration(cpu="included").save(tmp_path / "c.json")
    found = metrics_of(*SMALL, "--no-intervals", "--calibration", str(tmp_path / "c.json"))
    assert found["about"]["cpu_model"]["plan_fixed_us"] == 0.0
    assert found["about"]["calibration"]["cpu"] == "included"


def test_another_gpu_or_model_is_remarked_upon(tmp_path: Path) -> None:
    calibration(gpu="H100-SXM", models=("qwen3-32b",)).save(tmp_path / "c.json")
    result = run(simulate, *SMALL, "--no-intervals", "--calibration", str(tmp_path / "c.json"))
    assert "the calibration was made on H100-SXM, this is H200-SXM" in result.stdout
    assert "the calibration has not seen qwen3-0.6b" in result.stdout


def test_the_calibrations_that_are_shipped_are_those_the_benchmark_fitted() -> None:
    fits = json.loads(RESULTS.read_text())["fits"]
    assert calibration_names() == tuple(sorted(f"{engine}-h100" for engine in fits))
    for engine, fit in fits.items():
        found = load_calibration(f"{engine}-h100")
        assert found.engine == engine
        for name, value in fit["correction"].items():
            assert getattr(found.correction, name) == pytest.approx(value, rel=1e-3), name
        [source] = found.sources
        assert source.rows_used == fit["time"]["count"]
        if len(found.models) < 3:
            assert set(UNSEEN_MODELS) <= set(found.residuals)


def test_a_calibration_is_found_by_name() -> None:
    found = metrics_of(*SMALL, "--no-intervals", "--calibration", "sglang-h100")
    assert found["about"]["calibration"]["title"] == load_calibration("sglang-h100").title
    result = run(simulate, *SMALL, "--calibration", "sglang-h900")
    assert result.exit_code == 2
    assert "unknown calibration `sglang-h900`\nknown: sglang-h100, trtllm-h100, vllm-h100\nhint: " in result.stderr


# ------------------------------------------------------------------------------------------------------------ journals


def recorded(folder: Path, correction: Correction, prompt_tokens: int = 300, **spreads: Any) -> Path:
    """The run folder of a simulation with batch times that a correction gives."""
    calibration(correction=correction, **spreads).save(folder / "planted.json")
    workload = f"gen:n=60,rate=30,input=lognormal:{prompt_tokens}:0.8,output=uniform:20:80"
    arguments = ["--model", "qwen3-0.6b", "--gpu", "h200", "--workload", workload, "--no-intervals"]
    out = folder / "run"
    result = run(simulate, *arguments, "--calibration", str(folder / "planted.json"), "--out", str(out))
    assert result.exit_code == 0, result.output
    return out


def test_a_journal_gives_back_the_correction_that_made_it(tmp_path: Path) -> None:
    planted = Correction(kernels=1.3, step_us=500.0, row_us=20.0)
    out = recorded(tmp_path, planted)
    result = run(calibrate, "journal", str(out), "--date", "2026-11-22", "--out", str(tmp_path / "c.json"))
    assert result.exit_code == 0, result.output
    found = Calibration.load(tmp_path / "c.json")
    # The prior keeps `kernels` near 1: a row of a prompt, the tokens in it and their attention are nearly collinear.
    assert found.correction.kernels == pytest.approx(1.3, rel=0.03)
    assert found.correction.step_us == pytest.approx(500.0, rel=0.07)
    assert found.correction.row_us == pytest.approx(20.0, rel=0.05)
    assert found.correction.weight("prompt_us") < 25.0
    assert found.spread < 0.001
    assert (found.gpu, found.models, found.date, found.cpu) == ("H200-SXM", ("qwen3-0.6b",), "2026-11-22", "separate")
    [source] = found.sources
    assert source.rows_used > 100
    assert len(source.sha256) == 64
    low, high = found.interval("time", 0.9, "qwen3-0.6b")
    assert 0.98 < low <= high < 1.02


def test_a_journal_shows_attention_of_prompts_that_is_slower_than_other_kernels(tmp_path: Path) -> None:
    """One weight of all kernels makes prompts behind a cached prefix too fast, and short prompts too slow."""
    base = roofline_model(load_model("qwen3-0.6b"), load_gpu("h200"))
    planted = Correction(attention_prefill=0.5)
    run_folder = recorded(tmp_path, planted, prompt_tokens=3000)
    batches = timed_batches(of_journal(run_folder), base, run_folder)
    source = CalibrationSource(kind="journal", file="run", sha256="0" * 64, rows_used=1)
    found = calibration_of_batches(
        batches, held_out(batches), engine="lockstep", engine_version="", base=base, date="2026-11-22", source=source
    )
    behind_a_prefix = BatchShape(
        extend_rows=1, extend_tokens=400, extend_context_tokens=16_000, extend_pairs=6_480_200, sampled_rows=1
    )
    true_us = calibration(correction=planted).cost_model(base).batch_us(behind_a_prefix).mean_us
    assert true_us > 1.15 * base.batch_us(behind_a_prefix).mean_us
    assert found.cost_model(base).batch_us(behind_a_prefix).mean_us == pytest.approx(true_us, rel=0.05)


def test_a_journal_shows_the_spread_of_its_batches(tmp_path: Path) -> None:
    base = roofline_model(load_model("qwen3-0.6b"), load_gpu("h200"))
    run_folder = recorded(tmp_path, Correction(), spread=0.05)
    batches = timed_batches(of_journal(run_folder), base, run_folder)
    source = CalibrationSource(kind="journal", file="run", sha256="0" * 64, rows_used=1)
    found = calibration_of_batches(
        batches, held_out(batches), engine="lockstep", engine_version="", base=base, date="2026-11-22", source=source
    )
    assert found.spread == pytest.approx(0.05, rel=0.2)
    assert found.prompt_spread == pytest.approx(0.05, rel=0.3)
    assert found.lasting_spread is UNSET


def test_a_journal_shows_what_its_batches_have_in_common(tmp_path: Path) -> None:
    base, planted = roofline_model(load_model("qwen3-0.6b"), load_gpu("h200")), LastingSpread(share=0.7, batches=16)
    run_folder = recorded(tmp_path, Correction(), spread=0.2, lasting_spread=planted)
    batches = timed_batches(of_journal(run_folder), base, run_folder)
    source = CalibrationSource(kind="journal", file="run", sha256="0" * 64, rows_used=1)
    found = calibration_of_batches(
        batches, held_out(batches), engine="lockstep", engine_version="", base=base, date="2026-11-22", source=source
    )
    assert found.spread == pytest.approx(0.2, rel=0.3)
    assert isinstance(found.lasting_spread, LastingSpread)
    assert found.lasting_spread.share == pytest.approx(planted.share, abs=0.2)
    assert found.lasting_spread.batches in (8, 16, 32)


def test_decodes_that_vary_do_not_make_prompts_longer_or_more_varied(tmp_path: Path) -> None:
    """Ranks wait for each other in every decode: these have a skewed distribution, and prompts a narrow one."""
    base = roofline_model(load_model("qwen3-0.6b"), load_gpu("h200"))
    run_folder = recorded(tmp_path, Correction(step_us=500.0), spread=0.01)
    batches = timed_batches(of_journal(run_folder), base, run_folder)
    prompts = np.array([one.shape.extend_rows > 0 for one in batches.batches])
    skewed = np.where(np.arange(len(prompts)) % 5 == 0, 2.5, 1.0)
    took_us = batches.took_us * np.where(prompts, 1.0, skewed)
    varied = dataclasses.replace(batches, took_us=took_us)
    source = CalibrationSource(kind="journal", file="run", sha256="0" * 64, rows_used=1)
    found = calibration_of_batches(
        varied, held_out(varied), engine="lockstep", engine_version="", base=base, date="2026-11-22", source=source
    )
    cost = found.cost_model(base)
    expected = [cost.batch_us(one.shape) for one in varied.batches]
    mean_us = np.array([one.mean_us for one in expected])
    for kind in (prompts, ~prompts):
        assert mean_us[kind].sum() == pytest.approx(took_us[kind].sum(), rel=0.02)
    shares = np.array([one.spread_us for one in expected]) / mean_us
    assert shares[prompts].max() < 0.15  # the fit has one weight for the kernels of both
    assert shares[~prompts].min() > 0.3


def test_what_a_journal_does_not_report_must_be_given(tmp_path: Path) -> None:
    result = run(calibrate, "journal", str(tmp_path), "--date", "2026-11-22", "--out", str(tmp_path / "c.json"))
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    out = recorded(tmp_path, Correction())
    result = run(calibrate, "journal", str(out), "--date", "today", "--out", str(tmp_path / "c.json"))
    assert result.exit_code == 2
    assert "expected a day as YYYY-MM-DD, got `today`" in result.stderr


def test_times_that_an_emulation_sped_up_are_refused(tmp_path: Path) -> None:
    header = JournalHeader(config=SchedConfig(pages=8), host={"model": "qwen3-0.6b", "gpu": "h200", "speed": 10.0})
    JournalWriter.create(tmp_path / "run", header).close()
    result = run(calibrate, "--from", str(tmp_path / "run"), "--date", "2026-11-22", "--out", str(tmp_path / "c.json"))
    assert result.exit_code == 2
    assert "was emulated 10 times as fast as its cost model says" in result.stderr


def test_factors_of_an_interval_are_finite_for_every_probability() -> None:
    assert all(math.isfinite(f) and f > 0 for f in UNCALIBRATED.factors(1000, seed=3))


@pytest.mark.parametrize(("gpu", "threads"), [("h100", False), ("cpu", True)])
def test_a_run_of_stages_is_refused_and_on_a_processor_says_what_one_stage_needs(gpu: str, threads: bool) -> None:
    """Stages on a CPU share its cores, so a run on one stage must have the threads of one of them."""
    about = MeasuredRun(engine="lockstep", engine_version="0", entries={"model": "qwen3-0.6b", "gpu": gpu, "pp": 2})
    options = SimpleNamespace(model=None, gpu=None, weights_dtype=None, kv_dtype="bf16", operators=None)
    with pytest.raises(CalibrationError, match="batches of a run with pp 2 overlap") as refused:
        fit_base(Path("runs/stages"), about, options)
    assert ("OMP_NUM_THREADS" in str(refused.value)) == threads
