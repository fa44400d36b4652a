"""The examples run as printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
