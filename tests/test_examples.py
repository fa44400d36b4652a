"""The examples run as printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_minimal_host_writes_a_journal_that_verifies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, EXAMPLES / "minimal_host.py", run], capture_output=True, text=True, check=True
    )
    assert "finished third with 8 output tokens (length)" in done.stdout
    lockstep = [sys.executable, "-c", "from lockstep.core.command import main; main()"]
    verified = subprocess.run([*lockstep, "journal", "verify", run], capture_output=True, text=True, check=True)
    assert verified.stdout.startswith("equal:")


def test_a_trainer_and_an_engine_take_turns(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_and_serve.py", tmp_path], capture_output=True, text=True, check=True
    )
    steps = [line.partition(" by weights ")[::2] for line in done.stdout.splitlines()]
    assert [versions for _, versions in steps] == ["{0}", "{1}", "{2}"]
    assert len({said.partition("reward ")[2] for said, _ in steps}) > 1  # other weights, other answers
