"""Runs mutants under tests that were collected once: each mutant in a fork of the process that collected them.

`Measuring` records which test runs which line, and how long it takes. `Mutating` forks for each mutant; the child puts
it into effect and runs the tests of its lines, in the order of `Tests.of`, until one fails. A child is stopped if
a test uses much more processor time than it needed, or if the child waits without end: its mutant is found too.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Literal

import coverage
import pytest
from _pytest.runner import runtestprotocol
from coverage.numbits import num_in_numbits, numbits_to_nums

from tests.support.mutation.live import LiveFunctions, NoFunctionError
from tests.support.mutation.operators import Mutant

Verdict = Literal["killed", "timeout", "survived", "uncovered", "unbuilt"]
LINES_OF_FILE = """
    select context, numbits from line_bits join context on context_id = context.id join file on file_id = file.id
    where path = ?
"""  # the schema is documented: https://coverage.readthedocs.io/en/latest/dbschema.html
FURTHER = "further check"  # the name of `Mutating.further` as what found a mutant
TEST_S_MAX = 20.0  # tests that take longer are left out
CPU_MIN_S, SLOWER = 2.0, 4.0  # a test of a child may use this much, and this many times what it needed
WAITING_MIN_S, WAITING = 60.0, 20.0  # the same of elapsed time, on a busy machine
BUILT, UNBUILT, FAILED = 0, 3, 1  # exit statuses of a child


class Tests:
    """What `Measuring` found: seconds of each test that passed, and the tests of each line of a file."""

    def __init__(self, folder: Path) -> None:
        """Read what `Measuring` wrote to a folder, the lines of a file when they are asked for."""
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
        self._database = sqlite3.connect(folder / "coverage")
        self._lines: dict[Path, list[tuple[str, bytes, float]]] = {}  # by file: tests, their lines as bits, their costs
        self._digests: dict[str, str] = json.loads((folder / "sources.json").read_text())

    def of(self, mutant: Mutant) -> dict[str, float]:
        """Return the tests that run a line of the changed place, with their costs, the best first.

        The cost of a test is its seconds divided by the square of the number of lines of the file that it runs: a test
        that runs a constructor and nothing else of the file notices few mutants of the constructor.
        """
        if mutant.path not in self._lines:
            if self._digests.get(str(mutant.path)) not in (None, _digest(mutant.path)):
                raise ChangedError(f"{mutant.module} has changed since its lines were measured; run with --measure")
            found = self._database.execute(LINES_OF_FILE, (str(mutant.path),)).fetchall()
            self._lines[mutant.path] = [
                (name, bits, self.seconds[name] / len(numbits_to_nums(bits)) ** 2)
                for name, bits in found
                if self.seconds.get(name, inf) <= TEST_S_MAX
            ]
        first, last = mutant.lines
        lines = range(first, last + 1)
        found = [(cost, name) for name, bits, cost in self._lines[mutant.path] if any_in(lines, bits)]
        return {name: cost for cost, name in sorted(found)}


def any_in(lines: Iterable[int], bits: bytes) -> bool:
    """Return whether coverage's bits have one of these lines."""
    return any(num_in_numbits(line, bits) for line in lines)


class ChangedError(Exception):
    """A file has other lines than those that were measured."""


def _digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=8).hexdigest()


class Repeatable:
    """Plugin of pytest: random tests draw the same examples in every run."""

    def pytest_sessionstart(self) -> None:
        """Set the profile before tests are imported. Pytest rewrites Hypothesis, so it is not imported before that."""
        from hypothesis import HealthCheck, Phase, settings

        settings.register_profile(
            "repeatable",
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate, Phase.target],  # a failure is enough, it is not made smaller
        )
        settings.load_profile("repeatable")


class Measuring(Repeatable):
    """Plugin of pytest: runs all tests once, with the lines that each one runs."""

    def __init__(self, folder: Path, sources: Iterable[Path]) -> None:
        self._folder = folder
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self._coverage = coverage.Coverage(
            data_file=str(folder / "coverage"), include=[f"{path}/*" for path in sources], config_file=False
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        """Measure around the whole loop."""
        self._coverage.erase()
        self._coverage.start()
        try:
            return (yield)
        finally:
            self._coverage.stop()
            self._coverage.save()
            passed = {name: took for name, took in self._seconds.items() if name not in self._failed}
            (self._folder / "seconds.json").write_text(json.dumps(passed))
            measured = self._coverage.get_data().measured_files()
            (self._folder / "sources.json").write_text(json.dumps({one: _digest(Path(one)) for one in measured}))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Name the lines after the test."""
        self._coverage.switch_context(item.nodeid)
        began_s = time.process_time()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = round(time.process_time() - began_s, 4)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Leave out tests that fail or are skipped."""
        if not report.passed:
            self._failed.add(report.nodeid)


@dataclass
class _Child:
    mutant: Mutant
    pipe: int
    began_s: float
    ends_by_s: float


class Mutating(Repeatable):
    """Plugin of pytest: instead of running the tests once, runs those of each mutant in a fork."""

    def __init__(
        self,
        tests: Tests,
        mutants: list[Mutant],
        report: Callable[[Mutant, Verdict, str, float], None],
        *,
        budget_s: float,
        jobs: int = 1,
        further: Callable[[Mutant], bool] | None = None,
        further_s: float = 0.0,
        cpu_min_s: float = CPU_MIN_S,
    ) -> None:
        """`report` takes each verdict; `budget_s` of tests a mutant; `further` looks for it if no test has found it.

        `further_s`: processor time that `further` is expected to use. `cpu_min_s`: what each test may use in any case.
        """
        self._cpu_min_s = cpu_min_s
        self._tests, self._mutants, self._report = tests, mutants, report
        self._budget_s, self._jobs, self._further, self._further_s = budget_s, jobs, further, further_s
        self._kills: dict[str, int] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all mutants. Returns that the tests have run."""
        items = {item.nodeid: item for item in session.items}
        functions = LiveFunctions({mutant.path for mutant in self._mutants})
        running: dict[int, _Child] = {}
        gc.collect()
        gc.freeze()  # children do not search the objects of their parent for garbage, which would copy their pages
        for mutant in self._mutants:
            costs = {name: cost for name, cost in self._tests.of(mutant).items() if name in items}
            if not costs:
                self._report(mutant, "uncovered", "", 0.0)
                continue
            while len(running) >= self._jobs:
                self._collect(running)
            chosen = self._chosen(costs)
            pid, child = self._fork(mutant, [items[name] for name in chosen], functions)
            running[pid] = child
        while running:
            self._collect(running)
        return True

    def _chosen(self, costs: dict[str, float]) -> list[str]:
        """Return the tests that the budget has room for, the best first. A mutant found counts as half the cost."""
        seconds, left_s = self._tests.seconds, self._budget_s
        chosen: list[str] = []
        for name in sorted(costs, key=lambda name: costs[name] / (1 + self._kills.get(name, 0))):
            if left_s < 0 and chosen:
                break
            left_s -= seconds[name]
            chosen.append(name)
        return chosen

    def _fork(self, mutant: Mutant, items: list[pytest.Item], functions: LiveFunctions) -> tuple[int, _Child]:
        expected_s = sum(self._tests.seconds[item.nodeid] for item in items)
        expected_s += self._further_s if self._further is not None else 0.0
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            os.setsid()
            self._run(mutant, items, functions, writes)
        os.close(writes)
        now_s = time.monotonic()
        return pid, _Child(mutant, reads, now_s, now_s + WAITING_MIN_S + WAITING * expected_s)

    def _run(self, mutant: Mutant, items: list[pytest.Item], functions: LiveFunctions, pipe: int) -> None:
        """Run the tests in the child, which ends here."""
        status = FAILED
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            try:
                functions.mutate(mutant)
            except (NoFunctionError, SyntaxError):
                status = UNBUILT
                return
            for item, following in zip(items, [*items[1:], None], strict=True):
                self._limit(self._tests.seconds[item.nodeid])
                if any(one.failed for one in runtestprotocol(item, log=False, nextitem=following)):
                    os.write(pipe, item.nodeid.encode())
                    return
            self._limit(self._further_s)
            if self._further is not None and self._further(mutant):
                os.write(pipe, FURTHER.encode())
                return
            status = BUILT
        finally:
            os._exit(status)

    def _limit(self, expected_s: float) -> None:
        """End this process by a signal once it has used much more processor time than is expected from now on."""
        signal.setitimer(signal.ITIMER_PROF, self._cpu_min_s + SLOWER * expected_s)

    def _collect(self, running: dict[int, _Child]) -> None:
        """Wait until a child has ended, or has run too long, and report its verdict."""
        while True:
            for pid, child in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                late = not ended and time.monotonic() > child.ends_by_s
                if not ended and not late:
                    continue
                with suppress(ProcessLookupError):  # what it has started ends with it
                    os.killpg(pid, signal.SIGKILL)
                if late:
                    os.waitpid(pid, 0)
                name = os.read(child.pipe, 65_536).decode()
                os.close(child.pipe)
                del running[pid]
                self._end(child, status, late, name)
                return
            time.sleep(0.005)

    def _end(self, child: _Child, status: int, late: bool, name: str) -> None:
        took_s = time.monotonic() - child.began_s
        verdict: Verdict = "killed"
        if late or os.WIFSIGNALED(status):
            verdict = "timeout"
        elif os.WEXITSTATUS(status) == BUILT:
            verdict = "survived"
        elif os.WEXITSTATUS(status) == UNBUILT:
            verdict = "unbuilt"
        if verdict == "killed":
            self._kills[name] = self._kills.get(name, 0) + 1
        self._report(child.mutant, verdict, name, took_s)


def run_pytest(plugin: object, arguments: Iterable[str]) -> int:
    """Run pytest in this process, with equal random choices in every run."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys"]
    status = pytest.main([*options, *arguments], plugins=[plugin])
    sys.stdout.flush()
    return int(status)
