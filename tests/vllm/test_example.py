"""The example runs as printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.vllm.support import DEMO, needs_vllm

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm_journal.py"


@needs_vllm
def test_vllm_with_a_journal(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE, DEMO, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "24 answers, " in done.stdout
    assert "batches decided again, every digest equal" in done.stdout
