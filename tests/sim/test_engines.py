"""Engines: the costs that they add to kernels, their names, and the estimates of their errors."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.calibrate.engine_fit import (
    COSTS,
    LEFT_OUT,
    LEVELS,
    EngineFacts,
    EngineTrial,
    Fitted,
    engine_of,
    fit_trial,
    left_out,
    part_of,
    predicted_us,
    residuals_of,
    same_architecture,
    schedule_of,
    widened,
)
from lockstep.sim.calibrate.schedules import Schedule
from lockstep.sim.calibrate.serving_points import CLIENTS, ServingPoint, base_of, play
from lockstep.sim.catalogue import engine_names, load_engine, load_gpu, load_model
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cost import (
    BatchShape,
    CalibrationError,
    CatalogueError,
    WeightsDtype,
    decode_shape,
    extend_shape,
    roofline_model,
)
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.calibration import LOWER_BOUND, Case
from lockstep.sim.cost.engines import CostsWhen, EngineCosts, EngineModel, EngineSpec, expert_rows_us, release_key
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.metrics.intervals import leverage_text
from lockstep.sim.run.assemble import assemble
from lockstep.sim.scenario.scenario import Scenario

ALL = EngineCosts(
    dense=1.1, attention=1.2, experts=1.3, experts_prefill=0.5, collectives=1.4, collective_us=3.0, step_us=200.0,
    row_layer_us=0.25, prefill_us=900.0, moe_layer_us=13.0, frontend_layer_us=100.0,
)  # fmt: skip
MIXED = BatchShape(
    extend_rows=2, extend_tokens=600, extend_pairs=90_000, decode_rows=5, decode_context_tokens=4000, sampled_rows=7
)
SMALL = ["--model", "qwen3-8b", "--gpu", "h100", "--workload", "gen:n=30,rate=5,input=fixed:300,output=fixed:20"]


def model_of(name: str = "qwen3-30b-a3b", tp: int = 2, costs: EngineCosts = ALL) -> EngineModel:
    return EngineModel(roofline_model(load_model(name), load_gpu("h100"), tp), costs, "a test")


# ---------------------------------------------------------------------------------------------------------------- terms


def test_the_breakdown_of_an_engine_sums_to_its_batches() -> None:
    cost = model_of()
    for shape in (MIXED, decode_shape(9, 800), extend_shape(700), extend_shape(300, 900)):
        assert sum(cost.terms_us(shape).values()) == pytest.approx(cost.batch_us(shape).mean_us)


@pytest.mark.parametrize("name", EngineCosts.__struct_fields__)
def test_each_cost_adds_to_batches_as_documented(name: str) -> None:
    """Every cost changes its batches by the documented amount, and no cost is without effect."""
    usual = EngineCosts()
    cost, plain = model_of(costs=msgspec.structs.replace(usual, **{name: getattr(ALL, name)})), model_of(costs=usual)
    decode = decode_shape(8, 700)
    added = [cost.batch_us(shape).mean_us - plain.batch_us(shape).mean_us for shape in (MIXED, decode)]
    layers, collectives = 48, 96
    expected: dict[str, tuple[float, float]] = {
        "step_us": (200.0, 200.0),
        "row_layer_us": (7 * 0.25 * layers, 8 * 0.25 * layers),
        "prefill_us": (900.0, 0.0),
        "moe_layer_us": (13.0 * layers, 13.0 * layers),
        "collective_us": (3.0 * collectives, 3.0 * collectives),
        "frontend_layer_us": (0.0, 0.0),
    }
    if name in expected:
        assert added == pytest.approx(expected[name])
    elif name == "experts_prefill":
        assert added[0] > 0.0 == added[1]
    else:
        assert min(added) > 0.0
        terms, before = cost.terms_us(decode), plain.terms_us(decode)
        changed = {term for term, us in terms.items() if us != pytest.approx(before[term])}
        of = {"attention": {"attention_decode"}, "experts": {"experts"}, "collectives": {"all_reduce"}}
        assert changed == of.get(name, changed)
        assert name != "dense" or "attention_decode" not in changed


def test_a_row_costs_its_own_shard_only() -> None:
    """With shards of attention a rank writes the KV of its own rows."""
    split = Parallelism(tp=4, ep=4, attention_dp=4)
    base = base_cost_model(load_model("qwen3-30b-a3b"), load_gpu("h100"), split)
    terms = EngineModel(base, ALL, "a test").terms_us(decode_shape(32, 700))  # type: ignore[arg-type]
    assert terms["engine_rows"] == pytest.approx(8 * ALL.row_layer_us * 48)


def test_more_work_never_takes_less_time_under_any_engine() -> None:
    rng = random.Random(5)
    for name in engine_names():
        spec, _ = load_engine(name)
        for model in ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v3"):
            cost = EngineModel(roofline_model(load_model(model), load_gpu("h200"), 8), spec.costs_of("fp8"), spec.title)
            for _ in range(40):
                rows, context = rng.randint(1, 300), rng.randint(1, 9000)
                few, many = decode_shape(rows, context), decode_shape(rows + rng.randint(1, 40), context)
                assert cost.batch_us(few).mean_us <= cost.batch_us(many).mean_us
                tokens = rng.randint(1, 4000)
                assert cost.batch_us(extend_shape(tokens)).mean_us <= cost.batch_us(extend_shape(tokens + 64)).mean_us


def test_one_scheduler_serves_all_stages_of_a_pipeline() -> None:
    calibration = load_engine("vllm")[0].calibration(load_model("qwen3-32b"), "H100-SXM", "bf16")
    base = base_cost_model(load_model("qwen3-32b"), load_gpu("h100"), Parallelism(tp=2, pp=2))
    terms = calibration.cost_model(base).terms_us(decode_shape(4, 100))  # type: ignore[attr-defined]
    assert terms["engine_step"] == calibration.costs.step_us
    assert terms["engine_rows"] == pytest.approx(4 * calibration.costs.row_layer_us * base.model.layers)


def test_a_pass_under_a_factor_takes_the_factor_longer() -> None:
    calibration = load_engine("sglang")[0].calibration(load_model("qwen3-8b"), "H100-SXM", "bf16")
    base = roofline_model(load_model("qwen3-8b"), load_gpu("h100"))
    one, two = (calibration.cost_model(base, factor).batch_us(decode_shape(9, 400)).mean_us for factor in (1.0, 2.0))
    assert two == pytest.approx(2.0 * one)


# ------------------------------------------------------------------------------------------------------------ catalogue


@pytest.mark.parametrize("name", engine_names())
def test_every_engine_of_the_catalogue_has_a_card_and_errors_of_groups_left_out(name: str) -> None:
    spec, release = load_engine(name)
    assert release == ""
    assert set(spec.card) == {"fitted_on", "errors", "not_for"}
    calibration = spec.calibration(load_model("qwen3-8b"), "B200-SXM", "bf16")
    for metric in ("time", "ttft"):
        low, high = calibration.interval(metric)  # type: ignore[arg-type]
        assert 0.0 < low < 1.0 < high
    described = calibration.describe()
    assert described["costs"]["dense"] == spec.costs_of("bf16", model="qwen3-8b", gpu="B200-SXM").dense
    assert any("B200-SXM" in note for note in calibration.notes) == bool(spec.fitted)
    assert json.dumps(described)


def test_a_model_and_a_gpu_that_a_fit_lacked_have_the_errors_of_ones_left_out() -> None:
    spec, _ = load_engine("vllm")
    pairs = (("qwen3-32b", "H100-SXM"), ("qwen3-32b", "B200-SXM"), ("qwen3-8b", "H100-SXM"))
    assert [spec.unseen(*pair, "bf16") for pair in pairs] == ["points", "cell", "model"]
    assert spec.unseen("qwen3-32b", "A100-80G-SXM", "bf16") == "gpu"
    assert load_engine("lockstep")[0].unseen("qwen3-32b", "H100-SXM", "bf16") == "engine"
    widths = []
    for model, gpu in (("qwen3-32b", "H100-SXM"), ("qwen3-8b", "H100-SXM"), ("qwen3-8b", "A100-80G-SXM")):
        calibration = spec.calibration(load_model(model), gpu, "bf16")
        low, high = calibration.interval("time")
        widths.append(high / low)
        case = Case(model, gpu)
        assert bool(calibration.doubts(case, 1)) == (len(widths) > 1)
        assert calibration.covers(case) == (gpu == "H100-SXM")
    assert widths == sorted(widths)


def test_a_precision_that_a_fit_lacked_has_the_errors_of_models_left_out() -> None:
    spec, _ = load_engine("vllm")
    assert [spec.unseen("qwen3-32b", "H100-SXM", one) for one in ("fp8", "nvfp4", "int4")] == [
        "points",
        "cell",
        "model",
    ]
    model = load_model("qwen3-32b")
    widths = []
    for precision in ("fp8", "nvfp4", "int4"):
        calibration = spec.calibration(model, "H100-SXM", precision)
        low, high = calibration.interval("time")
        widths.append(high / low)
        said = calibration.doubts(Case(model.name, "H100-SXM"), 1)
        assert bool(said) == (precision != "fp8")
        assert not said or said[0].startswith(f"engine vllm was not measured with qwen3-32b in {precision}")
    assert widths == sorted(set(widths))


LONG = Case("qwen3-32b", "H100-SXM", prompt_tokens=30_000.0)
STAGES = Case("qwen3-32b", "H100-SXM", Parallelism(tp=2, pp=2))


@pytest.mark.parametrize(
    ("named", "case", "said"),
    [
        ("vllm", Case("qwen3-32b", "H100-SXM"), ""),
        ("vllm@0.12", Case("qwen3-32b", "H100-SXM"), ""),
        ("vllm@0.6", Case("qwen3-32b", "H100-SXM"), "release 0.6 of vllm was not measured"),
        ("vllm", STAGES, "engine vllm was measured without pp"),
        ("vllm", LONG, "engine vllm was measured with prompts of 1,024 to 8,192 tokens, these have 30,000 on average"),
    ],
)
def test_intervals_of_what_was_never_measured_are_not_called_ninety_percent(named: str, case: Case, said: str) -> None:
    spec, release = load_engine(named)
    calibration = spec.calibration(load_model("qwen3-32b"), "H100-SXM", "bf16", release)
    assert calibration.covers(case) == (not said)
    assert calibration.doubts(case, 1) == ([f"{said}; intervals do not cover that"] if said else [])
    assert calibration.doubts(case, 1, has_intervals=False) == ([said] if said else [])


def test_an_old_release_of_vllm_has_costs_of_its_own() -> None:
    spec, release = load_engine("vllm@0.12")
    assert release == "0.12"
    old, later = spec.costs_of("bf16", "0.12.0"), spec.costs_of("bf16", "0.14")
    assert old.moe_layer_us > later.moe_layer_us
    assert old.dense < later.dense
    assert spec.costs_of("bf16", "0.14") == spec.costs_of("bf16")
    assert [release_key(text) for text in ("0.18.0", "1.0.0rc3", "")] == [(0, 18, 0), (1, 0, 0, 3), ()]


def test_factors_of_conditions_multiply() -> None:
    spec, _ = load_engine("vllm")
    whens = (
        CostsWhen(gpus=("H200-SXM",), factors={"dense": 1.1}, why=""),
        CostsWhen(models=("qwen3-8b",), factors={"dense": 1.2, "row_layer_us": 0.5}, why=""),
        CostsWhen(releases=("2", ""), factors={"dense": 9.0}, why=""),
    )
    spec = msgspec.structs.replace(spec, costs=EngineCosts(row_layer_us=1.0), when=whens)
    assert spec.costs_of("bf16", model="qwen3-8b", gpu="H200-SXM") == EngineCosts(dense=1.32, row_layer_us=0.5)
    assert spec.costs_of("bf16", model="qwen3-8b", gpu="H100-SXM") == EngineCosts(dense=1.2, row_layer_us=0.5)
    assert spec.costs_of("bf16", gpu="H200-SXM") == EngineCosts(dense=1.1, row_layer_us=1.0)


@pytest.mark.parametrize("name", engine_names())
def test_the_front_end_of_an_engine_takes_as_long_on_every_gpu(name: str) -> None:
    """HTTP and tokenising run on the CPU: a faster GPU does not delay them."""
    spec, _ = load_engine(name)
    assert not [when.gpus for when in spec.when if when.gpus and "frontend_layer_us" in when.factors]
    models = {model for model, _, _ in spec.fitted} | {"qwen3-8b"}
    for model in models:
        for dtype in ("bf16", "fp8", "mxfp4", "nvfp4"):
            times = {
                spec.costs_of(dtype, model=model, gpu=gpu).frontend_layer_us
                for gpu in ("H100-SXM", "H200-SXM", "B200-SXM", "L40S")
            }
            assert len(times) == 1, (model, dtype)


def test_the_front_end_of_a_model_is_in_proportion_to_its_layers() -> None:
    small, large = load_model("qwen3-8b"), load_model("qwen3-32b")
    spec = msgspec.structs.replace(load_engine("vllm")[0], when=())
    times = [spec.calibration(one, "H100-SXM", "bf16").correction.frontend_us for one in (small, large)]
    assert times[1] / times[0] == pytest.approx(large.layers / small.layers, rel=1e-3)


def test_rows_of_experts_are_moved_as_fast_in_any_precision_and_for_experts_of_any_width() -> None:
    model, gpu = load_model("qwen3-235b-a22b"), load_gpu("h200")
    dtypes: tuple[WeightsDtype, ...] = ("bf16", "fp8")
    times = {expert_rows_us(roofline_model(model, gpu, tp, weights_dtype=dtype)) for tp in (4, 8) for dtype in dtypes}
    assert len(times) == 1
    [alone] = times
    shared = expert_rows_us(roofline_model(model, gpu, Parallelism(tp=8, ep=8)))
    assert shared == pytest.approx(alone / 8)
    expected_us = 94 * 8 * 4096 * 7.5 / 4002e3  # layers, experts of a token, columns, bytes a column by bytes a us
    assert alone == pytest.approx(expected_us)


def test_bad_names_and_files_are_refused_with_the_field() -> None:
    with pytest.raises(
        CatalogueError, match=r"`engine` must be an engine of the catalogue.*got `vlm`; known: lockstep"
    ):
        load_engine("vlm")
    with pytest.raises(CatalogueError, match="release `latest` has no number"):
        load_engine("vllm@latest")
    with pytest.raises(CalibrationError, match=r"`costs\.row_layer_us` must be at least 0 and finite, got `-1"):
        EngineCosts(row_layer_us=-1.0)
    with pytest.raises(CalibrationError, match="`speed`, which is not a cost of an engine"):
        CostsWhen(factors={"speed": 1.0}, why="")
    with pytest.raises(CalibrationError, match=r"`when\.factors\.dense` must be above 0 and finite, got `-1"):
        CostsWhen(factors={"dense": -1.0}, why="")
    with pytest.raises(CalibrationError, match=r"x\.json: not an engine of the catalogue"):
        EngineSpec.from_bytes(b"{}", "x.json")


# ------------------------------------------------------------------------------------------------------------- scenario


def scenario(**fields: Any) -> Scenario:
    return Scenario(model="qwen3-8b", gpu="h100", workload="gen:n=5,rate=5", **fields)


def test_without_an_engine_the_costs_are_those_of_vllm_and_the_scheduler_is_lockstep() -> None:
    usual, named = assemble(scenario(), {}), assemble(scenario(engine="vllm"), {})
    assert usual.calibration == named.calibration
    assert usual.calibration.engine == "vllm"
    assert usual.config == assemble(scenario(profile="lockstep"), {}).config
    assert (named.config.batching, named.config.chunked_prefill_size) == ("running_first", 8192)


def test_a_named_engine_implies_its_scheduler_and_a_profile_overrides_it() -> None:
    assert assemble(scenario(engine="sglang"), {}).config.batching == "prefill_first"
    assert assemble(scenario(engine="trtllm"), {}).config.reserve == "full"
    assert assemble(scenario(engine="sglang", profile="lockstep"), {}).config.batching == "mixed"
    assert (
        assemble(scenario(engine="vllm", settings={"chunked_prefill_size": 512}), {}).config.chunked_prefill_size == 512
    )
    assert assemble(replace(scenario(engine="vllm"), gpu="rtx4090"), {}).config.chunked_prefill_size == 2048


def test_a_calibration_replaces_the_costs_of_its_own_engine_only() -> None:
    assert assemble(scenario(calibration="vllm-h100"), {}).calibration.title.startswith("vllm 0.12.0")
    assert assemble(scenario(calibration="vllm-h100", engine="vllm"), {}).calibration.correction.row_us > 0
    with pytest.raises(ConfigError, match="`engine` is `sglang`, but `calibration` vllm-h100 has the costs of vllm"):
        assemble(scenario(calibration="vllm-h100", engine="sglang"), {})


def test_no_engine_is_called_a_lower_bound_in_every_output(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = CliRunner().invoke(simulate, [*SMALL, "--engine", "none", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"engine: {LOWER_BOUND}" in result.stdout
    assert LOWER_BOUND in (out / "report.html").read_text()
    assert json.loads((out / "metrics.json").read_text())["about"]["calibration"]["title"] == LOWER_BOUND
    named = CliRunner().invoke(simulate, SMALL)
    assert "engine: vllm " in named.stdout
    assert "lower bound" not in named.stdout


def test_ninety_percent_stands_only_at_intervals_that_were_tested() -> None:
    tested = CliRunner().invoke(simulate, SMALL).stdout
    assert "90 % intervals" in tested
    elsewhere = CliRunner().invoke(simulate, [word.replace("h100", "a100") for word in SMALL]).stdout
    assert "90 %" not in elsewhere
    assert "ranges, coverage not tested" in elsewhere
    for words in (
        ["--engine", "none"],  # 75 % of TPOT and 49 % of TTFT are inside
        ["--engine", "vllm@0.6"],
        ["--pp", "2"],
        ["--speculative-method", "ngram"],
        ["--prefill-engines", "1", "--decode-engines", "1"],
    ):
        beyond = CliRunner().invoke(simulate, [*SMALL, *words]).stdout
        assert "ranges, coverage not tested" in beyond, words
        assert "90 %" not in beyond, words
    assert "was never measured; intervals do not cover that" not in tested


def test_the_load_is_named_where_it_makes_intervals_of_first_tokens_wide() -> None:
    said = "intervals of TTFT are wide because of the load: with batches "
    loaded = [word.replace("n=30,rate=5", "n=400,rate=120") for word in SMALL]
    assert said in CliRunner().invoke(simulate, loaded).stdout
    assert said not in CliRunner().invoke(simulate, SMALL).stdout
    idle = {"time_factors": [0.8, 1.2], "ttft_at_ends": [0.7, 1.5]}
    assert leverage_text(idle) == leverage_text({**idle, "ttft_at_ends": None}) == leverage_text({}) == ""
    assert leverage_text({**idle, "ttft_at_ends": [0.7, 1.9]}).endswith("requests wait for each other near saturation")
    assert leverage_text({**idle, "ttft_at_ends": [0.5, 1.5]})


# ----------------------------------------------------------------------------------------------------------------- fits


def point(engine: str, model: str, tp: int, users: int, *, prompt: int = 64, output: int = 8) -> ServingPoint:
    return ServingPoint(
        row=1, engine=engine, engine_version="0.18.0", model=load_model(model), gpu=load_gpu("h100"), tp=tp,
        weights_dtype="bf16", prompt_tokens=prompt, output_tokens=output, lengths_from=1.0, lengths_known=True,
        concurrency=users, ttft_us=1.0, tpot_us=1.0,
    )  # fmt: skip


USUAL = np.array([cost.usual for cost in COSTS])
DENSE = [cost.name for cost in COSTS].index("dense")


def trial_of(weights: np.ndarray[Any, Any], noise: float = 0.0) -> EngineTrial:
    """Points that an engine with these weights would have."""
    points = [
        replace(point(engine, model, tp, users), gpu=load_gpu(gpu))
        for engine, gpu in (("vllm", "h100"), ("sglang", "h100"), ("sglang", "h200"))
        for model, tp in (("qwen3-8b", 1), ("qwen3-8b", 2), ("qwen3-30b-a3b", 2), ("llama-3.1-8b", 4))
        for users in (2, 8)
    ]
    found = EngineTrial.of(points)
    rng = np.random.Generator(np.random.Philox(3))
    measured = [
        replace(
            one,
            tpot_us=float(found.tpot_columns[i] @ weights * np.exp(noise * rng.normal())),
            ttft_us=float(found.ttft_columns[i] @ weights * np.exp(noise * rng.normal())),
        )
        for i, one in enumerate(points)
    ]
    return replace(found, points=measured)


def everything(trial: EngineTrial) -> np.ndarray[Any, Any]:
    return np.arange(len(trial.points))


def test_a_fit_predicts_the_engine_that_made_its_points() -> None:
    trial = trial_of(USUAL * np.array([1.3 if cost.name in ("step_us", "row_layer_us") else 1.0 for cost in COSTS]))
    rows = trial.rows("vllm")
    fit = fit_trial(trial, everything(trial))
    assert predicted_us(fit, trial, rows, "time") == pytest.approx(trial.measured_us("time", rows), rel=0.02)
    assert predicted_us(fit, trial, rows, "ttft") == pytest.approx(trial.measured_us("ttft", rows), rel=0.05)


def test_a_gpu_with_points_has_factors_of_its_own_and_one_without_is_at_its_parents() -> None:
    trial = trial_of(USUAL)
    slower = [one.gpu.name == "H200-SXM" for one in trial.points]
    trial = replace(
        trial,
        points=[
            replace(p, tpot_us=1.1 * p.tpot_us) if slow else p for p, slow in zip(trial.points, slower, strict=True)
        ],
    )
    fit = fit_trial(trial, everything(trial))
    there, here = (next(p for p in trial.points if p.gpu.name == name) for name in ("H200-SXM", "H100-SXM"))
    elsewhere = replace(there, gpu=load_gpu("b200"))
    slow, usual, unseen = (fit.weights([one])[0] for one in (there, here, elsewhere))
    assert slow[DENSE] > usual[DENSE]
    assert usual[DENSE] < unseen[DENSE] < slow[DENSE]
    common = fit.spreads(fit.rows(elsewhere))[DENSE]
    assert 0.0 < common <= COSTS[DENSE].deviation + 0.06


def test_a_gpu_without_points_has_the_factors_of_its_architecture() -> None:
    trial = trial_of(USUAL)
    points = [replace(p, gpu=load_gpu("b200") if p.engine == "vllm" else load_gpu("h100")) for p in trial.points]
    slow = [replace(p, tpot_us=1.2 * p.tpot_us) if p.gpu.name == "B200-SXM" else p for p in points]
    trial = replace(trial, points=slow)
    fit = fit_trial(trial, everything(trial))
    there = next(p for p in trial.points if p.gpu.name == "B200-SXM")

    def dense(gpu: str) -> float:
        return float(fit.weights([replace(there, gpu=load_gpu(gpu))])[0][DENSE])

    assert dense("b200") > dense("b300") > dense("l40s") > dense("h200")
    assert same_architecture("Hopper sm90") == ("H100-SXM", "H20", "H200-SXM")
    spec = engine_of(
        Fitted.of(trial), "vllm", EngineFacts(title="", profile="vllm", release="1"), date="2026-01-01", sources=[]
    )
    assert spec.costs_of("bf16", gpu="B300-SXM").dense > spec.costs_of("bf16", gpu="L40S").dense


def test_late_first_tokens_on_one_gpu_do_not_change_the_front_end_there() -> None:
    trial = trial_of(USUAL)
    late = [replace(p, ttft_us=p.ttft_us + 20e3 * (p.gpu.name == "H200-SXM")) for p in trial.points]
    fit = fit_trial(replace(trial, points=late), everything(trial))
    sglang = next(p for p in trial.points if p.gpu.name == "H200-SXM")
    front = [cost.name for cost in COSTS].index("frontend_layer_us")
    times = [fit.weights([replace(sglang, gpu=load_gpu(gpu))])[0][front] for gpu in ("h100", "h200", "b200")]
    assert times == pytest.approx([times[0]] * 3)
    vllm = next(p for p in trial.points if p.engine == "vllm")
    assert times[0] > fit.weights([vllm])[0][front]


FRONT = [cost.name for cost in COSTS].index("frontend_layer_us")


def apart_by(factor: float) -> EngineTrial:
    """Points of engines whose front ends differ by a factor, and are alike otherwise; points of both have one mean."""
    found = trial_of(USUAL)
    own = np.array([factor**0.5 if one.engine == "vllm" else factor**-0.5 for one in found.points])
    more_us = found.ttft_columns[:, FRONT] * USUAL[FRONT] * (own - 1.0)
    points = [replace(p, ttft_us=p.ttft_us + us) for p, us in zip(found.points, more_us, strict=True)]
    return replace(found, points=points)


def test_engines_whose_front_ends_differ_threefold_have_front_ends_of_their_own() -> None:
    """An engine that the fit lacks is between them, and less sure of its front end than of its dense products."""
    trial = apart_by(3.0)
    fit = fit_trial(trial, everything(trial))
    late, soon = (next(p for p in trial.points if p.engine == name) for name in ("vllm", "sglang"))
    slow, fast, unseen = (fit.weights([p])[0][FRONT] for p in (late, soon, replace(late, engine="trtllm")))
    assert 2.0 < slow / fast < 3.5
    assert fast < unseen < slow
    assert fit.spreads([0])[FRONT] > 2.0 * fit.spreads([0])[DENSE]


def test_groups_show_how_far_they_deviate() -> None:
    def shown(factor: float) -> float:
        trial = apart_by(factor)
        return fit_trial(trial, everything(trial)).shown_deviations("engine")["frontend_layer_us"]

    stated = next(level.deviations for level in LEVELS if level.name == "engine")["frontend_layer_us"]
    assert shown(1.0) < stated < shown(12.0)
    trial = trial_of(USUAL)
    none, cell = fit_trial(trial, everything(trial)[:0]), LEVELS[-1].deviations
    assert none.shown_deviations("cell") == {name: width for name, width in cell.items() if width}


def test_costs_are_positive_whatever_was_measured() -> None:
    trial = trial_of(USUAL)
    trial = replace(trial, points=[replace(p, ttft_us=p.ttft_us / 50) for p in trial.points])
    assert (fit_trial(trial, everything(trial)).weights(trial.points) > 0.0).all()


def test_a_fit_that_begins_at_another_one_ends_where_it_would_have() -> None:
    trial = trial_of(USUAL, noise=0.1)
    rows = everything(trial)[::2]
    alone, after = fit_trial(trial, rows), fit_trial(trial, rows, fit_trial(trial, everything(trial)))
    assert after.weights(trial.points) == pytest.approx(alone.weights(trial.points), rel=0.05)


def test_the_catalogues_entry_has_the_costs_of_the_fit() -> None:
    trial = trial_of(USUAL, noise=0.1)
    fitted = Fitted.of(trial)
    spec = engine_of(
        fitted, "vllm", EngineFacts(title="vLLM", profile="vllm", release="0.18.0"), date="2026-01-01", sources=[]
    )
    one = trial.points[trial.rows("vllm")[0]]
    costs = spec.costs_of(one.weights_dtype, one.engine_version, model=one.model.name, gpu=one.gpu.name)
    named = dict(zip([cost.name for cost in COSTS], fitted.fit.weights([one])[0], strict=True))
    assert msgspec.structs.asdict(costs) == pytest.approx(named, rel=0.01)
    assert set(spec.spreads) == set(named)
    assert all(when.spreads.keys() == when.factors.keys() for when in spec.when)
    assert EngineSpec.from_bytes(spec.to_json().encode(), "x") == spec


def test_features_times_costs_are_the_times_of_the_engine_model() -> None:
    """The features of a fit equal the terms of a simulation: one schedule, timed by columns and by an EngineModel."""
    one = point("vllm", "qwen3-30b-a3b", 2, 4)
    trial = EngineTrial.of([one])
    costs = EngineCosts(**{cost.name: cost.usual for cost in COSTS})
    schedule = schedule_of(one, None)
    cost = EngineModel(base_of(one), costs, "a test")
    batch_us = np.array([[cost.batch_us(shape).mean_us] for shape in schedule.batch_shapes()])
    assert schedule.tpot(batch_us)[0] == pytest.approx(float(trial.tpot_columns[0] @ USUAL), rel=3e-3)
    assert schedule.ttft(batch_us)[0] + 48 * costs.frontend_layer_us == pytest.approx(
        float(trial.ttft_columns[0] @ USUAL), rel=3e-3
    )


def test_a_schedule_timed_by_its_own_cost_model_is_the_simulated_point(tmp_path: Path) -> None:
    one = point("vllm", "qwen3-8b", 1, 4, prompt=300, output=30)
    schedule = schedule_of(one, tmp_path)
    [file] = tmp_path.iterdir()
    assert (Schedule.load(file).shapes == schedule.shapes).all()
    batch_us = np.array([[base_of(one).batch_us(shape).mean_us] for shape in schedule.batch_shapes()])
    played = play(one, CLIENTS["spread"])
    assert schedule.tpot(batch_us)[0] == pytest.approx(played.tpot_us, rel=0.01)
    assert schedule.ttft(batch_us)[0] == pytest.approx(played.ttft_us, rel=0.02)


def test_a_prediction_does_not_depend_on_the_points_of_its_own_group() -> None:
    trial = trial_of(USUAL, noise=0.1)
    whole = fit_trial(trial, everything(trial))
    method, group_of = LEFT_OUT["model"]
    assert method == "all points of one model left out"
    before = left_out(trial, group_of, whole)
    changed = replace(
        trial, points=[replace(p, tpot_us=3 * p.tpot_us) if p.model.name == "qwen3-8b" else p for p in trial.points]
    )
    after = left_out(changed, group_of, whole)
    for i, one in enumerate(trial.points):
        if one.model.name == "qwen3-8b":  # a third of the measured points changes; the prediction does not
            assert after["time"][i] == pytest.approx(3 * before["time"][i], rel=0.01)
    others = [i for i, one in enumerate(trial.points) if one.model.name != "qwen3-8b"]
    assert any(after["time"][i] != pytest.approx(before["time"][i]) for i in others)
    assert len(part_of(trial, np.array([0, 3])).points) == 2


def test_few_groups_give_wide_intervals() -> None:
    assert [widened(n) for n in (1, 2, 5)] == [1.17, 1.17, 1.17]
    assert widened(9) == pytest.approx(1.86 / 1.645)
    assert widened(6) > widened(9) > widened(30) > 1.0
    ratios = np.linspace(0.9, 1.12, 45)
    narrow, wide = (residuals_of(ratios, n, metric="time", method="") for n in (0, 3))
    low, high = ([one.at([p])[0] for one in (wide, narrow)] for p in (0.05, 0.95))
    assert low[0] < low[1]
    assert high[0] > high[1]


def test_errors_of_groups_have_both_signs() -> None:
    """Groups that were all predicted too slow are no evidence that the next one will be."""
    ratios = np.array([0.8, 0.82, 0.85, 0.9, 0.95])
    of_groups = residuals_of(ratios, 3, metric="time", method="")
    low, middle, high = of_groups.at([0.05, 0.5, 0.95])
    assert low * high == pytest.approx(1.0, rel=1e-3)
    assert middle == pytest.approx(1.0, rel=1e-3)
    assert of_groups.count == 5
    assert residuals_of(ratios, 0, metric="time", method="").at([0.95])[0] < 1.0
