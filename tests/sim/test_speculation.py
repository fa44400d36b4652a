"""Drafts in the simulator: how many are right follows from the request alone, and costs what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.errors import ConfigError
from lockstep.core.replay import replay
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import BatchShape
from lockstep.sim.cost.roofline import roofline
from lockstep.sim.simulate import Run, Scenario, assemble, simulate
from lockstep.sim.speculation import Acceptance, ModelDrafter, NgramDrafter, expected_tokens, parse_rates

EAGLE = {"speculative_method": "eagle", "num_speculative_tokens": 3}


def run(settings: dict[str, Any], folder: Path | None = None, **scenario: Any) -> Run:
    asked = {"model": "qwen3-8b", "gpu": "h200", "workload": "gen:n=40,rate=20,output=fixed:64", **scenario}
    return simulate(assemble(Scenario(settings=settings, **asked), environ={}), folder=folder)


def test_answers_are_the_same_and_come_sooner(tmp_path: Path) -> None:
    """Every answer as long as without drafts, in a run that replays, and again byte for byte."""
    plain, first, again = run({}), run(EAGLE, tmp_path / "a"), run(EAGLE, tmp_path / "b")
    assert (plain.data.requests.output_tokens == first.data.requests.output_tokens).all()
    assert first.data.summary["latency"]["tpot_us_mean"] < 0.8 * plain.data.summary["latency"]["tpot_us_mean"]
    assert "speculation" not in plain.data.summary
    assert [path.read_bytes() for path in sorted((tmp_path / "a" / "journal").iterdir())] == [
        path.read_bytes() for path in sorted((tmp_path / "b" / "journal").iterdir())
    ]
    assert replay(tmp_path / "a").batches == first.batches == again.batches


def test_length_measured_is_the_length_the_rates_mean() -> None:
    summary = run(
        {**EAGLE, "overlap_depth": 0}, acceptance="0.8,0.6,0.5", workload="gen:n=40,rate=20,output=fixed:400"
    ).data.summary
    drafts = summary["speculation"]
    assert drafts["accepted_length_mean"] == pytest.approx(expected_tokens((0.8, 0.6, 0.5), 3), rel=0.03)
    assert drafts["acceptance_by_position"] == pytest.approx([0.8, 0.48, 0.24], abs=0.03)
    assert drafts["tokens_per_batch_mean"] > drafts["accepted_length_mean"]
    assert drafts["drafts"] > drafts["drafts_accepted"] > 0


def test_early_ends_and_clusters_work_with_drafts() -> None:
    from lockstep.sim.cluster import ClusterScenario, assemble_cluster, simulate_cluster

    ended = run(EAGLE, max_new_tokens=256)
    assert ended.data.summary["requests"]["by_finish_reason"] == {"stop": 40}
    base = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=40,rate=20,output=fixed:64", settings=EAGLE)
    both = simulate_cluster(assemble_cluster(ClusterScenario(base=base, replicas=2), {}))
    assert both.data.summary["requests"]["completed"] == 40
    parts, whole = [one.data.summary["speculation"] for one in both.engines], both.metrics()["speculation"]
    for name in ("rows_verified", "drafts", "drafts_accepted", "verify_batches"):
        assert whole[name] == sum(part[name] for part in parts) > max(part[name] for part in parts) > 0, name
    lengths = [part["accepted_length_mean"] for part in parts]
    assert min(lengths) <= whole["accepted_length_mean"] <= max(lengths)
    assert whole["acceptance_by_position"][0] > whole["acceptance_by_position"][2] > 0
    alone = simulate_cluster(assemble_cluster(ClusterScenario(base=base, replicas=1), {}))
    assert alone.metrics()["speculation"] == alone.engines[0].data.summary["speculation"]


def test_right_drafts_follow_from_request_and_position() -> None:
    acceptance = Acceptance.of("eagle", "0.7", 0.5, 7)
    requests, positions = np.arange(4000, dtype=np.uint64), np.arange(4000, dtype=np.int32) % 50
    chances = np.array([acceptance.chances(request, 3) for request in range(4000)])
    right = acceptance.right(requests, positions, chances, np.full(4000, 3, np.int32))
    order = np.random.Generator(np.random.Philox(1)).permutation(4000)
    shuffled = acceptance.right(requests[order], positions[order], chances[order], np.full(4000, 3, np.int32))
    assert (shuffled == right[order]).all()
    assert np.mean(right >= 1) == pytest.approx(chances[:, 0].mean(), abs=0.03)
    assert 0.08 < chances[:, 0].std() < 0.13  # 0.5 of log-odds around 0.7
    fewer = acceptance.right(requests, positions, chances, np.full(4000, 1, np.int32))
    assert (fewer == np.minimum(right, 1)).all()


def test_drafting_and_verifying_cost_what_they_run() -> None:
    cost = roofline(load_model("qwen3-8b"), load_gpu("h200"))
    plain = BatchShape(decode_rows=8, decode_context_tokens=8000, sampled_rows=8)
    verify = BatchShape(decode_rows=8, decode_context_tokens=8000, sampled_rows=32, draft_tokens=24)
    alone, drafted = cost.batch_us(plain).mean_us, cost.batch_us(verify).mean_us
    assert alone < drafted < 1.1 * alone  # eight rows wait for the weights, not for arithmetic
    crowd = BatchShape(decode_rows=512, decode_context_tokens=512_000, sampled_rows=2048, draft_tokens=1536)
    few = BatchShape(decode_rows=512, decode_context_tokens=512_000, sampled_rows=512)
    assert cost.batch_us(crowd).mean_us > 1.5 * cost.batch_us(few).mean_us  # five hundred do not
    assert sum(cost.terms_us(verify).values()) == pytest.approx(drafted)
    head = ModelDrafter(cost, 36)
    assert head.draft_us(verify, 0) == 0.0
    assert 2.5 < head.draft_us(verify, 3) / head.draft_us(verify, 1) < 3.1
    assert head.draft_us(verify, 3) < 0.5 * alone
    assert head.slowed(2.0).draft_us(verify, 3) == pytest.approx(2.0 * head.draft_us(verify, 3), rel=0.05)
    assert NgramDrafter().draft_us(verify, 3) < head.draft_us(verify, 1)


def test_a_drafter_takes_memory() -> None:
    def pages(**more: Any) -> int:
        settings = {"speculative_method": more.pop("method")}
        scenario = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=1", settings=settings, **more)
        return assemble(scenario, environ={}).config.pages

    assert pages(method="none") == pages(method="ngram") > pages(method="mtp")
    assert pages(method="mtp") > pages(method="draft_model", draft_model="qwen3-0.6b")


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({}, {"acceptance": "0.5"}, "`acceptance` is `0.5`, but `speculative_method` is none"),
        (EAGLE, {"draft_model": "qwen3-0.6b"}, "`draft_model` is `qwen3-0.6b`, but `speculative_method` is eagle"),
        ({"speculative_method": "draft_model"}, {}, "needs a `draft_model`"),
        (EAGLE, {"acceptance": "0.5,high"}, "`acceptance` must be chances from 0 to 1"),
        (EAGLE, {"acceptance": "1.5"}, "`acceptance` must be chances from 0 to 1"),
        (EAGLE, {"acceptance_spread": -1.0}, "`acceptance_spread` must be from 0"),
        (EAGLE, {"pp": 2}, "drafts are not simulated in pipelines"),
    ],
)
def test_what_cannot_be_is_one_clear_error(settings: dict[str, Any], more: dict[str, Any], said: str) -> None:
    scenario = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=1", settings=settings, **more)
    with pytest.raises(ConfigError, match=said):
        assemble(scenario, environ={})


def test_rates_are_read() -> None:
    assert parse_rates("0.85, 0.7") == (0.85, 0.7)


def test_a_plan_says_what_drafts_bring_and_that_nobody_serves_them_yet(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from lockstep.sim.plan.cli import plan

    words = "--model qwen3-8b --gpus h200 --workload gen:input=fixed:64,output=fixed:12 --load sessions --sessions 2"
    words += " --search speculative_method=none,mtp --acceptance 0.9 --slo tpot_p90=1s --quick --requests 10 --all"
    result = CliRunner().invoke(plan, [*words.split(), "--jobs", "1", "--json", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    assert "(h200 speculative_method=mtp)" in result.output
    assert "not carried out there yet: speculative_method mtp" in result.output
    assert "--set speculative_method" not in result.output
    assert "--speculative-method mtp --acceptance 0.9" in result.output or "--acceptance 0.9" in result.output
