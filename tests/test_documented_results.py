"""`make docs-test`: results by case, a limit of time by case, and runs that go on where another one stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.campaigns.documented import ROOT, read_results

CASES = """
import os, time
import pytest

@pytest.mark.parametrize("name", ["good", "bad", "skipped", "hangs"])
def test_case(name):
    with open({ran!r}, "a") as file:
        file.write(name + " ")
    if name == "bad":
        assert os.path.exists({mended!r}), "not mended"
    if name == "skipped":
        pytest.skip("needs something")
    while name == "hangs" and not os.path.exists({mended!r}):
        time.sleep(0.01)
"""
START = (
    "import sys; from tests.campaigns import documented as d; d.FILES = sys.argv[1:2]; sys.exit(d.main(sys.argv[2:]))"
)


def test_a_second_run_has_only_the_cases_that_did_not_pass(tmp_path: Path) -> None:
    """A case over its limit fails by name and the next one runs; `--again` repeats what failed, and no other case."""
    ran, mended, results = tmp_path / "ran", tmp_path / "mended", tmp_path / "results.jsonl"
    file = tmp_path / "test_small.py"
    file.write_text(CASES.format(ran=str(ran), mended=str(mended)))

    def run(*arguments: str) -> tuple[str, int]:
        ran.write_text("")
        command = [sys.executable, "-c", START, str(file), "--results", str(results), "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout, done.returncode

    text, status = run("--limit", "0.2", "-k", "good or bad or hangs")
    assert (status, ran.read_text()) == (1, "good bad hangs ")
    assert "3 cases: 1 passed, 0 skipped, 2 failed, 0 not run" in text
    assert "Timeout (>0.2s)" in text
    with results.open("a") as stored:
        stored.write('{"case": "test_small.py::tes')  # a run was killed while it wrote
    mended.touch()
    text, status = run("--again")
    assert (status, ran.read_text()) == (0, "bad skipped hangs ")
    assert "4 cases: 3 passed, 1 skipped, 0 failed, 0 not run" in text
    found = read_results(results)
    assert sorted(found[case].outcome for case in found) == ["passed", "passed", "passed", "skipped"]
    assert len(found) == 4
    assert all(json.loads(line)["seconds"] >= 0 for line in results.read_text().splitlines())
