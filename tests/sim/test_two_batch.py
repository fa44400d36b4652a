"""Two-batch overlap in the simulator: what halves take, when they pay, and that breakdowns sum."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.replay import fold, replay
from lockstep.sim.catalogue import load_calibration, load_gpu, load_model
from lockstep.sim.cli.simulate import simulate as command
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.calibration import UNCALIBRATED
from lockstep.sim.cost.engines import EngineCosts, EngineModel
from lockstep.sim.cost.hardware import in_racks
from lockstep.sim.cost.model import BatchShape, decode_shape, extend_shape
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.terms import LAUNCH
from lockstep.sim.cost.two_batch import ONCE, OVERLAP_SHARE, TwoBatchModel, overlapped_us
from lockstep.sim.run.assemble import assemble
from lockstep.sim.scenario.scenario import Scenario

A2A = Parallelism(tp=16, ep=16, attention_dp=16, moe_a2a=True)
ENGINE = EngineCosts(step_us=900.0, row_layer_us=0.01, prefill_us=300.0, collective_us=4.0)


def cost_of(model: str, gpu: Any, split: Parallelism, *, engine: bool = False) -> TwoBatchModel:
    base = base_cost_model(load_model(model), load_gpu(gpu) if isinstance(gpu, str) else gpu, split)
    return TwoBatchModel(EngineModel(base, ENGINE, "test") if engine else base)  # type: ignore[arg-type]


def in_halves(shape: BatchShape) -> BatchShape:
    """A batch of equal decodes, or of one prompt, in two halves."""
    if shape.decode_rows:
        half = decode_shape(shape.decode_rows // 2, shape.decode_context_tokens // shape.decode_rows)
        return replace(shape, halves=(half, half))
    first = shape.extend_tokens // 2
    return replace(shape, halves=(extend_shape(first, 0, False), extend_shape(shape.extend_tokens - first, first)))


def gain(cost: TwoBatchModel, shape: BatchShape) -> float:
    """How many times faster the halves of a batch are."""
    return cost.batch_us(shape).mean_us / cost.batch_us(in_halves(shape)).mean_us


@pytest.mark.parametrize(
    ("computed", "communicated", "blocks", "expected"),
    [
        ([100.0, 100.0], [0.0, 0.0], 10, 200.0),
        ([0.0, 0.0], [100.0, 100.0], 10, 200.0),
        ([100.0, 100.0], [50.0, 50.0], 1, 250.0 + 50 * OVERLAP_SHARE.value),
        ([100.0, 100.0], [300.0, 300.0], 100, 604.0 - 1 * 3.0 + 0.0),
    ],
    ids=["no communication", "no computation", "one block", "mostly communication"],
)
def test_halves_take_turns(computed: list[float], communicated: list[float], blocks: int, expected: float) -> None:
    first, of_second = computed[0] / blocks, communicated[1] / blocks
    if blocks == 100:  # 1 | 100 x max(1, 3) | 99 x max(1, 3) | 3
        expected = first + 100 * 3.0 + 99 * 3.0 + of_second
    assert overlapped_us(computed, communicated, blocks) == pytest.approx(expected)


def test_many_tokens_over_slow_links_gain_and_small_decodes_lose() -> None:
    slow = in_racks(load_gpu("h200"), 4, 25.0, 5.0)
    experts = cost_of("deepseek-v3", slow, A2A)
    assert gain(experts, decode_shape(4096, 2000)) > 1.2
    assert gain(experts, decode_shape(64, 2000)) < 0.8, "weights are read twice"
    dense = cost_of("qwen3-32b", "l40s", Parallelism(tp=4))
    assert gain(dense, extend_shape(4096)) > 1.15
    fast = cost_of("qwen3-32b", "h200", Parallelism(tp=4))
    assert gain(dense, extend_shape(4096)) > gain(fast, extend_shape(4096))


@pytest.mark.parametrize("engine", [False, True], ids=["roofline", "engine"])
@pytest.mark.parametrize("shape", [decode_shape(512, 1000), decode_shape(8, 100), extend_shape(4096), extend_shape(8)])
def test_terms_sum_and_hide_no_computation(shape: BatchShape, engine: bool) -> None:
    cost = cost_of("qwen3-30b-a3b", "l40s", Parallelism(tp=4, ep=4, moe_a2a=True), engine=engine)
    for one in (cost, UNCALIBRATED.cost_model(cost, 1.5)):
        assert isinstance(one, TwoBatchModel)
        split = in_halves(shape)
        terms = one.terms_us(split)
        assert sum(terms.values()) == pytest.approx(one.batch_us(split).mean_us, rel=1e-12)
        assert min(terms.values()) >= 0.0
        whole = one.base.terms_us(shape)
        names = one.base.collective_names
        assert split.halves is not None
        halves = [one.base.terms_us(replace(half, sampled_rows=0)) for half in split.halves]
        for name, us in terms.items():
            if name in ONCE:
                assert us == pytest.approx(whole[name]), name
            elif name not in names and name not in (LAUNCH, "engine_waits"):
                assert us == pytest.approx(sum(half[name] for half in halves)), name
        shown = sum(us for name, us in terms.items() if name in names)
        assert 0.0 < shown < sum(half[name] for half in halves for name in names)
    assert UNCALIBRATED.cost_model(cost, 1.5).batch_us(split).mean_us == pytest.approx(
        1.5 * cost.batch_us(split).mean_us
    )


def test_a_batch_that_is_not_split_takes_what_it_took() -> None:
    cost = cost_of("qwen3-32b", "h200", Parallelism(tp=4))
    for shape in (decode_shape(512, 1000), extend_shape(100), BatchShape()):
        assert cost.batch_us(shape) == cost.base.batch_us(shape)
        assert cost.terms_us(shape) == cost.base.terms_us(shape)


def test_a_calibrated_cost_is_scaled_by_a_factor() -> None:
    """Intervals scale a cost model that may have been corrected before."""
    cost = load_calibration("vllm-h100").cost_model(cost_of("qwen3-8b", "h100", Parallelism(tp=4)))
    assert isinstance(cost, TwoBatchModel)
    slower = UNCALIBRATED.cost_model(cost, 1.3)
    for shape in (in_halves(decode_shape(512, 1000)), decode_shape(8, 100), extend_shape(100)):
        assert slower.batch_us(shape).mean_us == pytest.approx(1.3 * cost.batch_us(shape).mean_us)


def scenario_of(**more: Any) -> Scenario:
    settings = {"two_batch_overlap": True, "two_batch_decode_tokens": 8, "two_batch_prefill_tokens": 256}
    given = {"model": "qwen3-8b", "gpu": "l4", "tp": 4, "workload": "gen:n=5,rate=1"} | more
    return Scenario(**{**given, "settings": settings | given.pop("settings", {})})


def test_what_has_nothing_to_hide_is_refused() -> None:
    with pytest.raises(ConfigError, match="`tp` is 1: one GPU has no communication"):
        assemble(scenario_of(tp=1))
    with pytest.raises(ConfigError, match="`pp` is 2: batches of other stages"):
        assemble(scenario_of(pp=2, tp=2))


def run(args: list[str]) -> Any:
    result = CliRunner().invoke(command, args)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize(
    "options",
    [
        ["--tp", "4"],
        ["--tp", "4", "--attention-dp", "4", "--rank-schedulers"],
        ["--tp", "4", "--adapters", "4"],
    ],
    ids=["tensor parallel", "data-parallel ranks", "adapters"],
)
def test_runs_launch_halves_and_replay(options: list[str], tmp_path: Any) -> None:
    load = "gen:n=12,rate=30,input=lognormal:700:0.5,output=fixed:40"
    common = ["--model", "qwen3-8b", "--gpu", "l4", "--workload", load, *options]
    on = ["--two-batch-overlap", "--two-batch-decode-tokens", "4", "--two-batch-prefill-tokens", "256"]
    run([*common, *on, "--out", str(tmp_path / "on")])
    ranks = sorted((tmp_path / "on").glob("engines/*/journal")) or [tmp_path / "on" / "journal"]
    for journal in ranks:
        plans = [plan for _, step in fold(journal.parent) if (plan := step.launched()) is not None]
        assert any(plan.halves for plan in plans)
        assert replay(journal.parent).steps
