"""PD multiplexing in the simulator: shares of a GPU, two streams in time, options, and whole runs."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.multiplexing import Division
from lockstep.core.journal.replay import fold, replay
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cli.simulate import simulate as command
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.calibration import UNCALIBRATED
from lockstep.sim.cost.model import decode_shape, extend_shape
from lockstep.sim.cost.multiplexing import MultiplexedModel, on_share, sms_of
from lockstep.sim.host.streams import StreamedBatch, followed, speeds_of
from lockstep.sim.results.batch_times import of_journal
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.fast_runs import unsupported_by
from lockstep.sim.run.multiplexing import divisions_of
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

LOAD = "gen:n=40,rate=8,input=lognormal:1500:0.8,output=fixed:60"
OPTIONS = ["--model", "qwen3-8b", "--gpu", "h100", "--engine", "none", "--workload", LOAD]


def scenario(**more: Any) -> Scenario:
    given = {"model": "qwen3-8b", "gpu": "h100", "engine": "none", "workload": LOAD, "pdmux": True}
    return Scenario(**{**given, **more})


def cost() -> MultiplexedModel:
    found = assemble(scenario()).cost
    assert isinstance(found, MultiplexedModel)
    return found


# ------------------------------------------------------------------------------------------------------ shares of a GPU


def test_a_prompt_slows_down_with_the_multiprocessors_it_gives_up_and_a_decode_hardly_does() -> None:
    model = cost()
    prompt, decodes = extend_shape(8192), decode_shape(16, 2000)
    whole = model.on_stream(prompt, None, None).alone_us
    assert model.on_stream(prompt, 72, None).alone_us == pytest.approx(132 / 72 * whole, rel=0.05)
    assert model.on_stream(decodes, 60, None).alone_us < 1.02 * model.on_stream(decodes, None, None).alone_us
    assert model.on_stream(decodes, 20, None).alone_us > 1.5 * model.on_stream(decodes, None, None).alone_us


def test_a_decode_demands_the_memory_and_a_prompt_leaves_it() -> None:
    model = cost()
    assert model.on_stream(decode_shape(16, 2000), None, None).demand > 0.7
    assert model.on_stream(extend_shape(8192), None, None).demand < 0.3
    for shape in (decode_shape(16, 2000), decode_shape(400, 9000), extend_shape(8), extend_shape(8192)):
        demands = [model.on_stream(shape, sms, None).demand for sms in (20, 60, None)]
        assert demands == sorted(demands), "fewer multiprocessors take longer, and demand less at a time"
        assert all(0.0 < demand <= 1.0 for demand in demands)


@pytest.mark.parametrize("sms", [None, 96])
def test_layers_sum_to_a_pass_and_only_the_last_ones_sample(sms: int | None) -> None:
    model, shape = cost(), extend_shape(3000)
    whole = model.on_stream(shape, sms, None).alone_us
    parts = [model.on_stream(shape, sms, layers).alone_us for layers in ((0, 12), (12, 24), (24, 36))]
    assert parts[0] == parts[1] < parts[2]
    fixed_us = model.on_stream(shape, sms, (0, 36)).alone_us - whole
    assert abs(fixed_us) < 1e-6
    assert whole < sum(parts) < whole + 3 * 20.0  # the fixed time of two more launches


def test_a_calibration_scales_every_share() -> None:
    model = cost()
    slower = UNCALIBRATED.cost_model(model, 1.5)
    assert isinstance(slower, MultiplexedModel)
    for sms, layers in ((None, None), (60, None), (96, (0, 12))):
        shape = extend_shape(3000)
        before, after = model.on_stream(shape, sms, layers), slower.on_stream(shape, sms, layers)
        assert after.alone_us == pytest.approx(1.5 * before.alone_us)
        assert after.demand == pytest.approx(before.demand)


def test_a_whole_share_is_the_gpu() -> None:
    gpu = load_gpu("h100")
    model = load_model("qwen3-8b")
    for shape in (extend_shape(1000), decode_shape(64, 1000)):
        expected = base_cost_model(model, gpu).batch_us(shape)
        assert base_cost_model(model, on_share(gpu, 1.0)).batch_us(shape) == expected
    assert sms_of(gpu) == (132, 9)
    with pytest.raises(ConfigError, match="how many MI300X has is not known here"):
        sms_of(load_gpu("mi300x"))


# ------------------------------------------------------------------------------------------------------------- in time


@pytest.mark.parametrize(
    ("demands", "speeds"),
    [
        ([], []),
        ([1.0], [1.0]),
        ([0.5, 0.5], [1.0, 1.0]),
        ([0.9, 0.3], [0.7 / 0.9, 1.0]),
        ([0.25, 1.0], [1.0, 0.75]),
        ([1.0, 0.8], [0.5, 0.5 / 0.8]),
    ],
    ids=str,
)
def test_what_both_demand_beyond_the_memory_is_divided_fairly(demands: list[float], speeds: list[float]) -> None:
    assert speeds_of(demands) == pytest.approx(speeds)


def streamed(number: int, ready_us: float, left_us: float, demand: float, sampled_us: float = 0.0) -> StreamedBatch:
    rows = np.arange(1, dtype=np.int32)
    ids = rows.astype(np.int64)
    plan = BatchPlan(batch_id=number, mode="decode", rows=rows, request_ids=ids, starts=rows, stops=rows)
    return StreamedBatch(plan, b"", ready_us, left_us, demand, sampled_us)


def test_ends_follow_from_what_runs_beside() -> None:
    # Alone to 100; from there both at half speed, since each demands all of the memory: 400 of the prompt are left.
    # The decodes take 200 each, to 300 and 500; the prompt has 200 left then, and has the memory alone.
    decodes = [streamed(1, 100, 100, 1.0), streamed(2, 100, 100, 1.0)]
    prompts = [streamed(0, 0, 500, 1.0)]
    ended = followed((decodes, prompts), 0.0, math.inf)
    assert [(one.batch_id, one.started_us, one.finished_us) for one in ended] == [
        (1, 100, 300),
        (2, 300, 500),
        (0, 0, 700),
    ]
    assert not decodes
    assert not prompts


def test_progress_in_steps_is_progress_at_once() -> None:
    def streams() -> tuple[list[StreamedBatch], list[StreamedBatch]]:
        decodes = [streamed(number, 37.0 * number, 55.5, 0.8) for number in (0, 2, 4, 6)]
        return decodes, [streamed(1, 10.0, 230.25, 0.5), streamed(3, 10.0, 100.0, 0.9)]

    at_once = followed(streams(), 0.0, math.inf)
    stepwise, found = streams(), []
    for us in range(0, 1000, 7):
        found += followed(stepwise, float(us), float(us + 7))
    assert found == at_once
    assert len(found) == 6


def test_a_batch_without_its_masks_keeps_its_stream_waiting_and_not_the_other() -> None:
    decodes = [streamed(0, 0, 50, 0.1, sampled_us=math.inf), streamed(2, 0, 50, 0.1)]
    streams = (decodes, [streamed(1, 0, 80, 0.1)])
    assert [one.batch_id for one in followed(streams, 0.0, 400.0)] == [1]
    decodes[0].sampled_us = 420.0
    assert [(one.batch_id, one.finished_us) for one in followed(streams, 400.0, math.inf)] == [(0, 420), (2, 470)]


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pdmux": False, "pdmux_sm_groups": 4}, "`pdmux_sm_groups` is `4`, but `pdmux` is off"),
        ({"pp": 2, "tp": 2}, "`pdmux` is on, but `pp` is 2"),
        ({"tp": 2, "attention_dp": 2}, "`pdmux` is on, but `attention_dp` is 2"),
        ({"gpu": "mi300x"}, "how many MI300X has is not known here"),
        ({"pdmux_divisions": "112:20"}, "`pdmux_divisions` has `112:20`, which is no PREFILL:DECODE:ROWS"),
        ({"pdmux_divisions": "112:40:0"}, "but both shares have at least one of the 132 SMs"),
        ({"pdmux_divisions": "112:20:0", "pdmux_sm_groups": 4}, "`pdmux_sm_groups` is 4, but `pdmux_divisions` are"),
        ({"pdmux_sm_groups": 2}, "got 132 SMs in 2 groups"),
        ({"pdmux_decode_divisor": 0}, "`pdmux_decode_divisor` must be at least 1, got `0`"),
        ({"pdmux_token_budget": 0}, "`multiplexing.token_budget` must be a whole number of at least 1, got `0`"),
        ({"settings": {"batching": "mixed"}}, "`multiplexing` is set and `batching` is mixed"),
        ({"model": "bge-m3"}, "`pdmux` is on, but bge-m3 decodes nothing"),
    ],
    ids=str,
)
def test_what_cannot_be_multiplexed_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        assemble(scenario(**options))
    assert message in str(refused.value)


def test_divisions_are_read_and_profiles_give_way() -> None:
    assert divisions_of("112:20:0, 96:36:10") == (Division(112, 20), Division(96, 36, 10))
    setup = assemble(scenario(pdmux_divisions="112:20:0,96:36:10", pdmux_token_budget=5000))
    assert setup.config.multiplexing.divisions == (Division(112, 20), Division(96, 36, 10))  # type: ignore[union-attr]
    assert setup.config.multiplexing.token_budget == 5000  # type: ignore[union-attr]
    assert setup.config.batching == "prefill_first"
    assert unsupported_by(setup) == "multiplexing"


# ----------------------------------------------------------------------------------------------------------------- runs


def test_a_run_overlaps_both_streams_and_replays(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [*OPTIONS, "--pdmux", "--check", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "split_prefill" in result.output
    assert replay(tmp_path).steps
    spans: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    of_prompts: dict[int, bool] = {}
    for event, step in fold(tmp_path):
        if (plan := step.launched()) is not None:
            of_prompts[plan.batch_id] = plan.layers is not None
        if (number := getattr(event, "batch_id", None)) is not None:
            spans[of_prompts[number]].append((event.started_us, event.finished_us))  # type: ignore[attr-defined]
    for stream in spans.values():
        assert stream
        assert all(stop <= start for (_, stop), (start, _) in pairwise(stream)), "one at a time"
    beside = [one for one in spans[False] for other in spans[True] if one[0] < other[1] and other[0] < one[1]]
    assert len(beside) > len(spans[False]) / 4


def test_batches_beside_another_stream_have_no_time_of_their_own(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [*OPTIONS, "--pdmux", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = of_journal(tmp_path)
    assert found.left_out > 100
    assert {one.mode for one in found.batches} == {"decode"}
    model = cost()
    for one in found.batches:  # alone on the whole device
        assert one.took_us == pytest.approx(model.batch_us(one.shape).mean_us, abs=1.5)


def test_stretches_of_decodes_change_no_time() -> None:
    def tpots(**more: Any) -> Any:
        return simulate(assemble(scenario(workload="gen:n=6,rate=2,input=fixed:3000,output=fixed:200", **more)))

    quick = tpots().data.summary
    watched = simulate(assemble(scenario(workload="gen:n=6,rate=2,input=fixed:3000,output=fixed:200")), check_every=1)
    assert quick["latency"] == watched.data.summary["latency"]


def test_decodes_wait_for_no_prompt() -> None:
    """Under a load of long prompts the gaps between tokens are those of decodes, at a loss of time to the first one."""
    runs = {
        name: simulate(assemble(scenario(**more))).data.summary["latency"]
        for name, more in {
            "multiplexed": {},
            "prefill first": {"pdmux": False, "settings": {"batching": "prefill_first"}},
        }.items()
    }
    assert runs["multiplexed"]["itl_us_p99"] < 0.4 * runs["prefill first"]["itl_us_p99"]
    assert runs["multiplexed"]["tpot_us_p99"] < runs["prefill first"]["tpot_us_p99"]
    assert runs["multiplexed"]["ttft_us_p50"] > runs["prefill first"]["ttft_us_p50"]


@pytest.mark.parametrize(
    "more",
    [
        {
            "workload": "gen:n=40,rate=20,input=fixed:1500,output=fixed:300",
            "settings": {"pages": 900, "reserve": "on_demand"},
        },
        {"settings": {"overlap_depth": 0, "decode_steps_per_launch": 3}},
        {"adapters": "3"},
        {"workload": LOAD + ",grammars=0.5x4"},
    ],
    ids=["few pages", "several steps", "adapters", "grammars"],
)
def test_other_features_run_beside(more: dict[str, Any]) -> None:
    summary = simulate(assemble(scenario(**more)), check_every=7).data.summary
    assert summary["requests"]["completed"] == 40
    assert (summary["scheduler"]["retractions"] > 0) == ("workload" in more and "settings" in more)


def test_the_same_shape_is_computed_once() -> None:
    model = cost()
    shape = replace(extend_shape(100), sampled_rows=0)
    assert model.on_stream(shape, 96, (0, 12)) is model.on_stream(shape, 96, (0, 12))
