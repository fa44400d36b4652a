"""The accepted drafts of a model, in the journal, in the figures and in the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("lockstep.sim", reason="the simulator is not installed")

from lockstep.runtime import LLM, Params
from lockstep.sim.calibrate.acceptance import describe, read_verifications
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

DRAFTS = 3


def test_the_simulator_predicts_the_accepted_length_that_a_run_measures(tmp_path: Path) -> None:
    """Chances from a journal, given to `simulate --acceptance`, yield the length of that run on another schedule."""
    prompts = [f"page {n % 5} is free. page {n % 7} is free. page {n} is" for n in range(24)]
    params = [Params(max_new_tokens=32, temperature=0.3 * (n // 2 % 2), seed=n) for n in range(24)]
    with LLM(device="cpu", speculative_method="ngram", num_speculative_tokens=DRAFTS, journal=tmp_path / "run") as llm:
        llm.generate(prompts, params)
        counts = llm.stats().drafts
    seen = read_verifications(tmp_path / "run")
    assert (len(seen.right), int(seen.drafts.sum()), int(seen.right.sum())) == (
        counts.verifications,
        counts.drafts,
        counts.right,
    )
    assert seen.accepted_length == pytest.approx(counts.accepted_length_mean)
    found = describe(tmp_path / "run")
    assert found["accepted_length_predicted"] == pytest.approx(found["accepted_length"], rel=0.02)
    scenario = Scenario(
        model="qwen3-0.6b",
        gpu="h200",
        workload="gen:n=60,rate=20,input=fixed:20,output=fixed:32",
        settings={"speculative_method": "ngram", "num_speculative_tokens": DRAFTS},
        acceptance=found["acceptance"],
    )
    said = simulate(assemble(scenario, environ={})).metrics()["speculation"]
    assert said["accepted_length_mean"] == pytest.approx(counts.accepted_length_mean, rel=0.08)
