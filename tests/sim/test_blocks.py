"""Models that answer in blocks, simulated: passes by the given distribution, whatever runs beside; refused options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.commands import BatchPlan, BlockPasses
from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.replay import replay
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost.model import BatchShape
from lockstep.sim.host.blocks import BlockPassModel
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.fast_runs import unsupported_by
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.tools.explain import explain

WORKLOAD = "gen:n=20,rate=100,input=uniform:20:60,output=fixed:64"


def asked(block: int | None = 16, iterations: str | None = None, **settings: Any) -> Scenario:
    return Scenario(
        model="qwen3-0.6b",
        gpu="h200",
        workload=WORKLOAD,
        seed=3,
        settings=settings,
        diffusion_block=block,
        diffusion_iterations=iterations,
    )


def setup(*given: Any, **settings: Any) -> Setup:
    return assemble(asked(*given, **settings), environ={})


def plan_of(starts: list[int], numbers: list[int], given: list[int] | None = None) -> BatchPlan:
    rows = np.arange(len(starts), dtype=np.int32)
    first = np.array(starts, np.int32)
    return BatchPlan(
        batch_id=0,
        mode="diffusion_extend",
        rows=rows,
        request_ids=rows.astype(np.int64),
        starts=first,
        stops=first + np.int32(16),
        sample_rows=rows,
        blocks=BlockPasses(np.array(numbers, np.int32), np.array(given or [0] * len(starts), np.int32)),
    )


def test_every_block_takes_the_given_number_of_passes_and_one_more(tmp_path: Path) -> None:
    found = simulate(setup(16, "16"), folder=tmp_path / "slow")
    assert replay(tmp_path / "slow").batches == found.batches
    blocks = found.metrics()["diffusion"]
    assert blocks["block_tokens"] == 16
    # The first block may begin with the end of the prompt: fewer masks, and proportionally fewer passes.
    assert 13 < blocks["passes_per_block"] <= 17
    once = simulate(setup(16, "1")).metrics()["diffusion"]
    assert once["passes_per_block"] == 2.0
    assert found.metrics()["requests"]["completed"] == 20


def test_more_masks_replaced_per_pass_are_faster_and_blocks_beat_single_tokens_when_few_run() -> None:
    runs = [simulate(setup(*given)).metrics() for given in ((16, "2"), (16, "8"), (None, None))]
    tpot = [run["latency"]["tpot_us_p50"] for run in runs]
    assert tpot[0] < tpot[1] < tpot[2]


def test_the_passes_of_a_request_do_not_depend_on_what_runs_beside_it() -> None:
    model = BlockPassModel.of("2..14", 16, seed=5)

    def passes(beside: int) -> list[int]:
        rows = model.for_rows(8)
        rows.take_row(0, 77)
        found = []
        for start in range(0, 160, 16):
            for number in range(18):
                rows.shape_of(plan_of([start, *[0] * beside], [number, *[0] * beside]))
                if rows.counts()[0]:
                    found.append(number)
                    break
        return found

    assert passes(0) == passes(5)
    assert len(set(passes(0))) > 3
    assert 2 <= min(passes(0)) <= max(passes(0)) <= 14


def test_a_pass_costs_what_verifying_a_draft_at_every_further_position_does() -> None:
    rows = BlockPassModel.of("1", 16, seed=5).for_rows(4)
    first = rows.shape_of(plan_of([32, 64], [0, 0], [4, 0]))
    assert first == BatchShape(decode_rows=2, decode_context_tokens=96, draft_tokens=30, sampled_rows=32)
    assert rows.counts().tolist() == [0, 0]
    last = rows.shape_of(plan_of([32, 64], [1, 1]))
    assert last == msgspec.structs.replace(first, sampled_rows=0)  # without logits
    assert rows.counts().tolist() == [12, 16]


def test_engines_of_a_cluster_count_their_blocks_together() -> None:
    found = simulate_cluster(assemble_cluster(ClusterScenario(base=asked(16, "4"), replicas=2), {}))
    parts, whole = [one.data.summary["diffusion"] for one in found.engines], found.metrics()["diffusion"]
    assert whole["blocks"] == sum(part["blocks"] for part in parts) > parts[0]["blocks"] > 0
    assert whole["passes_per_block"] == pytest.approx(whole["passes"] / whole["blocks"], rel=1e-3)


def test_a_request_is_explained_in_blocks_and_passes(tmp_path: Path) -> None:
    simulate(setup(16, "4"), folder=tmp_path / "run")
    found = CliRunner().invoke(explain, [str(tmp_path / "run"), "--request", "3"])
    assert found.exit_code == 0, found.output
    blocks = re.search(r"decoded: (\d+) blocks in (\d+) passes", found.output)
    assert blocks is not None, found.output
    assert 4 <= int(blocks[1]) <= 5  # of 64 tokens, the first of which may begin within a prompt
    assert 4 * int(blocks[1]) <= int(blocks[2]) <= 5 * int(blocks[1])


def test_settings_follow_from_the_block_and_given_ones_are_refused_by_name() -> None:
    found = setup(32).config
    assert (found.page_size, found.overlap_depth, found.batching) == (32, 0, "prefill_first")
    assert setup(8, None, page_size=64).config.page_size == 64
    assert unsupported_by(setup(16)) == "diffusion"  # the core simulates it
    with pytest.raises(ConfigError, match="`overlap_depth` is 1, but `diffusion` is set"):
        setup(16, None, overlap_depth=1)
    with pytest.raises(ConfigError, match="`page_size` must be a multiple of"):
        setup(32, None, page_size=16)


@pytest.mark.parametrize("text", ["", "0", "17", "3..2", "1..17", "a", "2.5"])
def test_iterations_that_no_block_can_take_are_one_error(text: str) -> None:
    with pytest.raises(ConfigError, match="`diffusion_iterations` must be a number of passes from 1 to 16"):
        setup(16, text)


def test_iterations_without_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="`diffusion_iterations` is `4`, but the model answers token by token"):
        setup(None, "4")
