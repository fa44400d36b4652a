"""A public load generator drives the server; its figures equal those of `lockstep bench serve`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AIPERF = os.environ.get("LOCKSTEP_AIPERF") or shutil.which("aiperf")
"""The program: it requires 1.2 GB, so it has an environment of its own (benchmarks/load_generators.py)."""


@pytest.mark.skipif(AIPERF is None, reason="needs aiperf; LOCKSTEP_AIPERF may name the program")
def test_aiperf_and_bench_serve_agree() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "load_generators.py"), "--aiperf", str(AIPERF)]
    done = subprocess.run([*command, "--requests", "30"], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "farthest apart" in done.stdout
