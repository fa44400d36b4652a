"""Tokens that grammars force, in a simulation: the same texts in fewer launches, and the refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.replay import replay
from lockstep.sim.host.forcing import Forcing
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

WORKLOAD = "gen:n=20,rate=100,input=uniform:20:60,output=uniform:20:60,grammars=0.7x2"


def run(folder: Path, scenario: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    asked = Scenario(model="qwen3-0.6b", gpu="h200", workload=WORKLOAD, seed=3, settings=settings, **(scenario or {}))
    found = simulate(assemble(asked, environ={}), folder=folder)
    assert replay(folder).batches == found.batches
    return found.metrics()


@pytest.mark.parametrize("settings", [{"overlap_depth": 0}, {"overlap_depth": 2, "speculative_method": "mtp"}])
def test_launches_are_saved_and_the_journal_replays(settings: dict[str, Any], tmp_path: Path) -> None:
    without = run(tmp_path / "a", **settings)
    forces = {"grammar_forces": "0.5x6"}
    found = run(tmp_path / "b", forces, jump_forward_tokens=16, **settings)
    assert found["jump_forward"]["forced_tokens"] > 3 * found["jump_forward"]["jumps"] > 0
    assert "jump_forward" not in without
    assert found["device"]["batches"] < without["device"]["batches"]
    for one in (found, without):
        assert one["requests"]["completed"] == 20


def test_engines_of_a_cluster_count_what_was_forced_together() -> None:
    from lockstep.sim.cluster.scenario import ClusterScenario
    from lockstep.sim.cluster.setup import assemble_cluster
    from lockstep.sim.cluster.simulate import simulate_cluster

    base = Scenario(
        model="qwen3-0.6b", gpu="h200", workload=WORKLOAD, settings={"jump_forward_tokens": 16}, grammar_forces="0.5x6"
    )
    found = simulate_cluster(assemble_cluster(ClusterScenario(base=base, replicas=2), {}))
    parts, whole = [one.data.summary["jump_forward"] for one in found.engines], found.metrics()["jump_forward"]
    assert whole["forced_tokens"] == sum(part["forced_tokens"] for part in parts) > parts[0]["forced_tokens"] > 0
    assert whole["tokens_per_jump_mean"] == pytest.approx(whole["forced_tokens"] / whole["jumps"], rel=1e-4)
    assert "speculation" not in found.metrics()


def test_how_often_is_read_and_kept_to() -> None:
    always = Forcing.of("1.0x3", seed=1).runs(5)
    assert [always.stop_behind(output) for output in range(8)] == [4, 4, 4, 4, 8, 8, 8, 8]
    never = Forcing.of("0x3", seed=1).runs(5)
    assert [never.stop_behind(output) for output in range(3)] == [1, 2, 3]
    found = Forcing.of("0.25x2", seed=1)
    stops = [found.runs(9).stop_behind(output) for output in range(300)]
    again = found.runs(9)
    assert [again.stop_behind(output) for output in range(300)] == stops  # whatever was queried before
    forced = sum(stop > output + 1 for output, stop in enumerate(stops))
    assert 60 < forced < 140  # 0.25 x 2 of 1 + 0.25 x 2 tokens


@pytest.mark.parametrize("text", ["", "0.5", "2x3", "0.5x0", "0.5x65", "ax3"])
def test_what_cannot_be_forced_is_one_error(text: str) -> None:
    with pytest.raises(ConfigError, match="`grammar_forces` must be CHANCExTOKENS"):
        Forcing.of(text, 1)


def test_options_that_are_never_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="but `jump_forward_tokens` is 0"):
        assemble(Scenario(model="qwen3-0.6b", gpu="h200", workload=WORKLOAD, grammar_forces="0.1x2"), environ={})
