"""Journals for the tests of tools: a scenario's run, or a simulated one, written as a host would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.core.journal import JournalHeader, JournalWriter
from tests.support.scenario import Run, parse, play

SCENARIOS = Path(__file__).parents[1] / "scenarios"


def record_run(folder: Path, run: Run) -> Path:
    """Write what a scenario's run was told, and what it decided, as a journal."""
    header = JournalHeader(config=run.config, seed=0, host={"kind": "scenario"})
    with JournalWriter.create(folder, header) as journal:
        for event, digest in zip(run.events, run.digests, strict=True):
            journal.append(event, digest)  # type: ignore[arg-type]
    return folder


def record_story(folder: Path, text: str) -> Path:
    """Play a scenario's text and write it as a journal; what it prints is not looked at."""
    run = Run()
    play(parse(text), run)
    return record_run(folder, run)


def record_scenario(folder: Path, name: str) -> Path:
    """The same of a file in tests/scenarios, such as `admission/running_limit`."""
    return record_story(folder, (SCENARIOS / f"{name}.txt").read_text())


def record_simulation(folder: Path, workload: str, seed: int = 7, **settings: Any) -> Path:
    """Simulate a small model and write the run's journal."""
    from lockstep.sim.simulate import Scenario, assemble, simulate

    scenario = Scenario(model="qwen3-0.6b", gpu="h200", workload=workload, seed=seed, settings=settings)
    simulate(assemble(scenario, environ={}), folder=folder)
    return folder
