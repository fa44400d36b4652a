"""Every command line of the documentation as long as it is printed; `make test` runs them cut short.

    python -m tests.campaigns.documented                  all cases, in about half an hour on an idle machine
    python -m tests.campaigns.documented --again          those that have not passed yet, after an interruption
    python -m tests.campaigns.documented --limit 900      seconds that one case may take
    python -m tests.campaigns.documented -k distributed   other arguments are pytest's

Results are stored by case, as soon as each ends, in runs/docs-test.jsonl (`--results FILE`). At the end the cases that
failed and the slowest ones are printed. Exit status 1 if a case failed, 2 if some have not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/test_documented_commands.py", "tests/test_documented_shell.py")
LIMIT_S = 600.0
SLOWEST = 10


class Outcome(NamedTuple):
    """How a case ended."""

    outcome: str  # passed, failed or skipped
    seconds: float
    message: str = ""


def read_results(path: Path) -> dict[str, Outcome]:
    """Return the last outcome of each case in a file of results; a line that was cut is left out."""
    found = {}
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
            found[str(entry["case"])] = Outcome(entry["outcome"], entry["seconds"], entry.get("message", ""))
        except (ValueError, KeyError, TypeError):
            continue
    return found


class StoredResults:
    """A plugin of pytest: stores the outcome of each case, and leaves out those that have passed."""

    def __init__(self, path: Path, again: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.results = read_results(path) if again else {}
        self.cases: set[str] = set()
        self._seconds = 0.0
        self._file: IO[str] = path.open("w", encoding="utf-8")
        for case, outcome in self.results.items():
            self._store(case, outcome)

    def _store(self, case: str, outcome: Outcome) -> None:
        self._file.write(json.dumps({"case": case, **outcome._asdict()}) + "\n")
        self._file.flush()

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the cases that have passed or were skipped."""
        self.cases = {item.nodeid for item in items}
        done = {case for case, found in self.results.items() if found.outcome != "failed"}
        left_out = [item for item in items if item.nodeid in done]
        items[:] = [item for item in items if item.nodeid not in done]
        if left_out:
            config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the outcome when a case ends: that of its call, or of a part around it that failed or was skipped."""
        self._seconds = report.duration + (self._seconds if report.when != "setup" else 0.0)
        if report.when != "call" and report.passed:
            return
        message = "" if report.passed else str(report.longrepr).strip().splitlines()[-1]
        self.results[report.nodeid] = Outcome(report.outcome, round(self._seconds, 1), message)
        self._store(report.nodeid, self.results[report.nodeid])

    def summary(self) -> tuple[str, int]:
        """Return the text at the end, and the exit status."""
        of_run = {case: found for case, found in self.results.items() if case in self.cases}
        failed = {case: found for case, found in of_run.items() if found.outcome == "failed"}
        skipped = sum(found.outcome == "skipped" for found in of_run.values())
        not_run = len(self.cases) - len(of_run)
        slowest = sorted(of_run.items(), key=lambda entry: -entry[1].seconds)[:SLOWEST]
        lines = [f"{found.seconds:8.1f} s  {case.partition('::')[2]}" for case, found in slowest]
        lines += [f"failed    {case.partition('::')[2]}\n          {found.message}" for case, found in failed.items()]
        passed = len(of_run) - len(failed) - skipped
        lines.append(
            f"{len(self.cases)} cases: {passed} passed, {skipped} skipped, {len(failed)} failed, {not_run} not run"
        )
        return "\n".join(lines), 1 if failed else 2 if not_run else 0


def main(arguments: Sequence[str]) -> int:
    """Run the cases, print what failed and what was slow, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make docs-test", description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="only the cases that have not passed yet")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a case may take (%(default)s)")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "runs" / "docs-test.jsonl", help="where results are stored"
    )
    options, others = parser.parse_known_args(arguments)
    os.environ["LOCKSTEP_DOCUMENTED"] = "whole"
    stored = StoredResults(options.results, options.again)
    limits = [f"--timeout={options.limit}", "--timeout-method=signal"]
    pytest.main(["-q", "--no-header", *limits, *FILES, *others], plugins=[stored])
    text, status = stored.summary()
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
