"""Experts placed by load: a smaller largest load, more weights, and moves of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.cluster.expert_placement import balance, gpu_loads
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import BatchShape, CapacityError
from lockstep.sim.cost.expert_balance import fullest_of_gammas, spread_of
from lockstep.sim.cost.experts import expected_max_load
from lockstep.sim.cost.models import check_split
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.roofline import roofline_model
from lockstep.sim.cost.stages import stages_of
from lockstep.sim.scenario.scenario import Scenario

MODEL, GPU = load_model("deepseek-v3"), load_gpu("h200")
PLAIN = Parallelism(tp=8, ep=8, expert_cv=1.0)
EPLB = replace(PLAIN, eplb=True, redundant_experts=32)
PREFILL = BatchShape(extend_rows=4, extend_tokens=8_192, extend_pairs=8_192 * 1_024, sampled_rows=4)


def test_the_fullest_of_gammas_is_what_the_formula_for_loads_tends_to() -> None:
    for cv in (0.3, 1.0, 2.0):
        assignments = 4_000_000
        tends_to = expected_max_load(assignments, 8, 32, cv) / (assignments / 8)
        assert fullest_of_gammas(32 / cv**2, 8) == pytest.approx(tends_to, rel=3e-3)
    assert fullest_of_gammas(0.3, 2) == pytest.approx(drawn_fullest(0.3, 2), rel=0.01)


def drawn_fullest(shape: float, ranks: int) -> float:
    drawn = np.random.Generator(np.random.Philox(1)).gamma(shape, size=(100_000, ranks))
    return float((drawn.max(1) / drawn.mean(1)).mean())


def test_the_load_of_the_fullest_rank_is_that_of_drawn_assignments_on_placed_experts() -> None:
    """Compared with drawing popularities, placing the experts and drawing every assignment."""
    experts = MODEL.experts
    assert experts is not None
    drift = 0.2
    spread = spread_of(experts, replace(EPLB, expert_drift=drift))
    random = np.random.Generator(np.random.Philox(11))
    assignments, layers = 16_384, 200
    first, again = random.gamma(1.0, size=(2, layers, 256))
    then = np.where(random.random((layers, 256)) < drift, again, first)
    shares = gpu_loads(then, balance(first, slots=288, gpus=8), 8) / then.sum(1, keepdims=True)
    drawn = np.array([random.multinomial(assignments, share).max() for share in shares])
    found = expected_max_load(assignments, 8, spread.slots // 8, spread.load_cv)
    assert found == pytest.approx(drawn.mean(), rel=0.02)
    assert 1.0 < spread.long_run < spread.unbalanced


def test_balanced_experts_are_faster_need_memory_and_moving_them_costs_time() -> None:
    plain, eplb, drifting = (roofline_model(MODEL, GPU, one) for one in (PLAIN, EPLB, replace(EPLB, expert_drift=0.3)))
    terms = [cost.terms_us(PREFILL) for cost in (plain, eplb, drifting)]
    even = roofline_model(MODEL, GPU, Parallelism(tp=8, ep=8)).terms_us(PREFILL)
    assert even["experts"] == pytest.approx(terms[1]["experts"], rel=0.01)
    assert terms[1]["experts"] < terms[2]["experts"] < terms[0]["experts"]
    for cost, parts in zip((plain, eplb, drifting), terms, strict=True):
        assert sum(parts.values()) == pytest.approx(cost.batch_us(PREFILL).mean_us)
    assert "expert_moves" not in terms[0] | terms[1]  # unchanged experts stay in place
    described = drifting.describe()["eplb"]
    bytes_us = drifting.constants["send_gbs"].value * 1e3
    assert terms[2]["expert_moves"] == pytest.approx(drifting.moved_bytes / bytes_us / 1_000)
    assert described["moved_bytes_per_gpu"] == round(drifting.moved_bytes)
    rarer = roofline_model(MODEL, GPU, replace(EPLB, expert_drift=0.3, eplb_interval=4_000)).terms_us(PREFILL)
    assert rarer["expert_moves"] == pytest.approx(terms[2]["expert_moves"] / 4)
    more = (MODEL.weights_bytes(None, EPLB) - MODEL.weights_bytes(None, PLAIN)) / (4 * MODEL.moe_layers)
    assert more == pytest.approx(eplb.expert_bytes)
    assert sum(stage.model.moe_layers for stage in stages_of(MODEL, replace(EPLB, pp=2))) == MODEL.moe_layers


def test_without_it_nothing_is_reported_of_it() -> None:
    assert "eplb" not in roofline_model(MODEL, GPU, PLAIN).describe()
    assert PLAIN.describe() == {"ep": 8, "expert_cv": 1.0}
    assert str(EPLB) == "tp 8, ep 8, expert_cv 1, eplb, redundant_experts 32"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"redundant_experts": 8}, "`redundant_experts` is for --eplb, got `8` without it"),
        ({"expert_drift": 0.5}, "`expert_drift` is for --eplb, got `0.5` without it"),
        ({"eplb": True, "expert_cv": 0.0}, "`eplb` has nothing to balance with ep 8 and expert_cv 0"),
        ({"eplb": True, "ep": 1}, "`eplb` has nothing to balance with ep 1"),
        ({"eplb": True, "redundant_experts": 12}, "`redundant_experts` must be a multiple of ep 8"),
        ({"eplb": True, "redundant_experts": -8}, "`redundant_experts` must be at least 0, got `-8`"),
        ({"eplb": True, "expert_drift": 1.5}, "`expert_drift` must be from 0 to 1, got `1.5`"),
        ({"eplb": True, "eplb_interval": 0}, "`eplb_interval` must be at least 1 pass, got `0`"),
    ],
)
def test_what_cannot_be_is_refused_by_name(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        check_split(MODEL, replace(PLAIN, **layout))


def test_the_command_line_has_it_and_reports_what_it_brings() -> None:
    from lockstep.sim.cli.simulate import simulate as command

    options = {"expert_cv": 1.0, "eplb": True, "redundant_experts": 32, "expert_drift": 0.1}
    scenario = Scenario(
        model="deepseek-v3", gpu="h200", workload="gen:n=4,rate=4,input=fixed:300,output=fixed:4", tp=8, ep=8, **options
    )
    words = scenario.command().split()[2:]
    assert words[words.index("--redundant-experts") + 1] == "32"
    shown = CliRunner().invoke(command, [*words, "--no-intervals"])
    assert shown.exit_code == 0, shown.output
    assert "eplb: experts are placed by the load measured in 1,000 passes" in shown.stdout
    assert "experts placed" in shown.stdout
    ranks = CliRunner().invoke(command, [*words, "--attention-dp", "8", "--rank-schedulers", "--no-intervals"])
    assert ranks.exit_code == 0, ranks.output
    assert "eplb: in the long run the fullest rank has 1.10 times its share, 1.27 times without" in ranks.stdout
