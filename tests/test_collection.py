"""Tests of the GPU runtime skip where it is not installed, instead of failing to be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parents[1]


def test_all_tests_are_found_without_the_runtime() -> None:
    command = (
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.support.no_runtime",
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run((sys.executable, *command), cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert "tests/runtime/test_drafting.py" in found.stdout  # skipped, with the reason
    assert "tests/runtime/test_drafting.py::" not in found.stdout
    assert "tests/test_collection.py::" in found.stdout


def test_the_longest_files_are_there() -> None:
    names = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONGEST) <= names
