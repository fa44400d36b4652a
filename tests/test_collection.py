"""Tests of the GPU runtime skip where it is not installed, instead of failing to be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST, is_long, unknown_long_tests

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


def test_the_list_of_long_tests_is_checked_against_the_tests() -> None:
    listed = "tests/test_collection.py::test_all_tests_are_found_without_the_runtime"
    assert is_long(listed)
    assert unknown_long_tests([listed]) == []
    assert unknown_long_tests(["tests/test_collection.py::another"]) == [listed]
    kept, others = "tests/runtime/test_kernels.py::test_kernels[a]", "tests/runtime/test_kernels.py::test_kernels[b]"
    assert unknown_long_tests([kept], {kept.partition("[")[0]: {"a"}}) == []
    assert unknown_long_tests([others], {kept.partition("[")[0]: {"a"}}) == [kept]


def test_a_long_test_does_not_begin_after_its_time() -> None:
    long = "tests/api/test_drift.py::test_an_emulated_server_counts_its_batches"
    command = ("-m", "pytest", long, "-q", "-n0", "-p", "no:cacheprovider", "-rs", "--long-until=1")
    found = subprocess.run((sys.executable, *command), cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    assert "the time for long tests is over" in found.stdout
    assert "1 skipped" in found.stdout


def test_no_long_test_stands_ahead_of_a_short_one() -> None:
    """Their file shares a fixture of a module with parameters between both, by which pytest orders tests."""
    pytest.importorskip("transformers", reason="the file is skipped without it")
    command = ("-m", "pytest", "tests/runtime/test_latent.py", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider")
    found = subprocess.run((sys.executable, *command), cwd=ROOT, capture_output=True, text=True, check=False)
    long = [is_long(line) for line in found.stdout.splitlines() if "::" in line]
    assert len(set(long)) == 2
    assert long == sorted(long)
