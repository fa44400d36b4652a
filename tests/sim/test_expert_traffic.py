"""Experts of a simulated engine: what is routed to them, placements by the core, and the time of moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.commands import MoveExperts
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import ExpertLoadMeasured, ExpertsMoved, ExpertsPlaced
from lockstep.core.journal.replay import fold, replay
from lockstep.sim.cost.expert_balance import fullest_of_gammas
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

LAYOUT: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "h200", "tp": 4, "ep": 4, "attention_dp": 4, "moe_a2a": True}
LOAD = "gen:n=30,rate=60,input=fixed:400,output=fixed:60"
LAYERS, EXPERTS, PER_TOKEN = 48, 128, 8
PLAIN = Scenario(**LAYOUT, workload=LOAD, expert_cv=1.0)
EPLB = replace(PLAIN, eplb=True, redundant_experts=16, eplb_interval=20, expert_drift=0.3)


def steps_of(scenario: Scenario, folder: Path) -> list[Any]:
    simulate(assemble(scenario), folder=folder)
    assert replay(folder).steps
    return list(fold(folder))


def test_experts_are_placed_before_the_first_batch_and_anew_as_their_load_changes(tmp_path: Path) -> None:
    steps = steps_of(EPLB, tmp_path)
    placed = [one for _, step in steps for one in step.decided if isinstance(one, ExpertsPlaced)]
    assert placed[0].time_us == 0
    fullest = fullest_of_gammas(EXPERTS / 4, 4)  # of experts placed at random
    assert placed[0].before_permille == pytest.approx(1000 * fullest, abs=60)
    assert len(placed) > 2
    for one in placed:
        assert one.after_permille < one.before_permille
        assert one.after_permille <= 1010
    later = [one.before_permille for one in placed[1:]]
    assert 1050 < np.mean(later) < placed[0].before_permille  # 30 % of the experts have another popularity
    moves = [one for _, step in steps for one in step.commands if isinstance(one, MoveExperts)]
    assert len(moves[0].layers) == LAYERS  # all at once before the first batch, then a few behind each launch
    assert {len(one.layers) for one in moves[1:]} <= {1, 2, 3, 4}
    ends = [event.time_us for event, _ in steps if isinstance(event, ExpertsMoved)]
    assert len(ends) == len(moves)
    assert ends[0] == 0


def test_what_is_measured_is_what_was_routed(tmp_path: Path) -> None:
    scenario = replace(PLAIN, settings={"expert_load_interval": 10})
    steps = steps_of(scenario, tmp_path)
    reports = [one.counts for one, _ in steps if isinstance(one, ExpertLoadMeasured)]
    counted = sum(np.frombuffer(counts, np.int64).reshape(LAYERS, EXPERTS) for counts in reports)
    computed = 30 * (400 + 59)
    assert computed * PER_TOKEN * 0.7 < counted[0].sum() <= computed * PER_TOKEN  # the last batches are not measured
    assert counted.std(1).mean() / counted.mean() == pytest.approx(1.0, abs=0.15)
    assert not any(isinstance(one, MoveExperts) for _, step in steps for one in step.commands)


def test_moves_take_the_time_of_their_bytes_and_balanced_experts_save_it() -> None:
    def busy_us(scenario: Scenario) -> float:
        return float(simulate(assemble(scenario)).data.summary["device"]["busy_us"])

    prompts = "gen:n=20,rate=40,input=fixed:3000,output=fixed:4"
    plain = replace(PLAIN, workload=prompts)
    still = replace(plain, eplb=True, eplb_interval=20)
    assert busy_us(still) < 0.97 * busy_us(plain)
    assert busy_us(replace(plain, expert_cv=0.0)) == pytest.approx(busy_us(still), rel=0.01)
    assert simulate(assemble(still)).data.summary["experts"]["placed"][0]["imbalance_after"] <= 1.01
    summary = simulate(assemble(EPLB)).data.summary["experts"]
    assert summary["placements"] == len(summary["placed"]) > 2
    assert summary["moved"] == sum(one["moved"] for one in summary["placed"])
    assert summary["imbalance_after_mean"] < summary["imbalance_before_mean"]


def test_experts_stay_while_their_load_is_even_enough() -> None:
    summary = simulate(assemble(replace(EPLB, eplb_imbalance_min=1.5))).data.summary["experts"]
    assert summary["measurements"] > 2
    assert "placements" not in summary
    for wrong, why in (
        (replace(PLAIN, eplb_imbalance_min=1.5), "no scheduler places"),
        (replace(EPLB, eplb_imbalance_min=0.5), "at least 1"),
    ):
        with pytest.raises(ConfigError, match=f"`eplb_imbalance_min` .*{why}"):
            assemble(wrong)


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    measured = {"expert_load_interval": 10}
    with pytest.raises(ConfigError, match="`expert_load_interval` is 10, but qwen3-8b has no experts"):
        assemble(Scenario(model="qwen3-8b", gpu="h200", workload=LOAD, settings=measured))
    with pytest.raises(ConfigError, match="`expert_load_interval` is 10, but `pp` is 2"):
        assemble(Scenario(model="deepseek-v3", gpu="h200", workload=LOAD, tp=8, ep=8, pp=2, settings=measured))
