"""Every simulation that a test here writes to a folder is replayed strictly before the test continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.journal.replay import replay
from lockstep.sim.run import simulate as simulate_module


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate = simulate_module.simulate

    def simulate_and_replay(setup: Any, *, folder: Path | None = None, **options: Any) -> Any:
        run = simulate(setup, folder=folder, **options)
        if folder is not None:
            replay(folder)  # raises at the first decision that differs
        return run

    monkeypatch.setattr(simulate_module, "simulate", simulate_and_replay)


@pytest.fixture
def data() -> Path:
    """The folder of public traces and measurements."""
    folder = os.environ.get("LOCKSTEP_DATA")
    if not folder:
        pytest.skip("LOCKSTEP_DATA does not name the folder of public traces")
    return Path(folder)
