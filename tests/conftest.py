"""Shared by every test: the effort of Hypothesis, the `--update` option of golden files, and one header line."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import guide

# No deadline, and examples may be slow to draw: a slow machine is not a bug. The blob in a failure reruns exactly that
# example.
settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("lockstep"), max_examples=2000)
settings.load_profile("lockstep")  # pytest --hypothesis-profile=thorough overrides it

LONG_TESTS_FILE = Path(__file__).parent / "data/long_tests.txt"


def read_long_tests() -> dict[str, set[str]]:
    """Return the tests of `LONG_TESTS_FILE`, each with the parameters behind `except`."""
    lines = LONG_TESTS_FILE.read_text("utf-8").splitlines()
    parts = (line.partition(" except ") for line in lines if line and not line.startswith("#"))
    return {name: set(kept.split(" | ")) - {""} for name, _, kept in parts}


LONGEST = (
    "test_swarm.py",
    "test_from_transformers.py",
    "test_fast_path.py",
    "test_scenarios.py",
    "test_structure.py",
    "test_contract.py",
    "test_explore.py",
    "test_handover.py",
    "test_tensor_parallel.py",
    "test_no_executing_deserialiser.py",
    "test_state_machine.py",
    "test_affected.py",
)
"""Files that take longest, long tests aside: processes take one file after another, so the last should be short."""

LONG_TESTS = read_long_tests()
"""Tests with the mark `long`: their ids without brackets, each with the parameters that do not have it."""
LONG_FILES = sorted({test.partition("::")[0] for test in LONG_TESTS})

# A shell makes its background jobs ignore Ctrl-C, and their children too. Commands that tests interrupt must handle it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _policy_of_the_guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Policy `fair` of docs/policies.md is installed for every test."""
    folder = tmp_path_factory.mktemp("lockstep_fair")
    guide.install(folder)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write the expected part of golden files, to read as a diff")
    parser.addoption(
        "--long-until", type=float, metavar="TIME", help="long tests begin before this time, in seconds since 1970"
    )
    parser.addoption("--long-order", default="", metavar="SEED", help="a seed of the order of files of long tests")
    parser.addoption("--longest-files", type=int, default=0, metavar="N", help="print the N files that take longest")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark long tests ahead of the choice by `-m`; sort behind pytest's own order, by fixtures of modules."""
    tests = [item.nodeid for item in items]
    for item in items:
        if is_long(item.nodeid):
            item.add_marker("long")
    wrong = unknown_long_tests(tests)
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"{LONG_TESTS_FILE} names tests that are not there: {', '.join(wrong)}")
    yield
    places = {path: random.Random(f"{config.getoption('--long-order')} {path}").random() for path in LONG_FILES}

    def place(item: pytest.Item) -> tuple[bool, float, bool]:
        long = is_long(item.nodeid)
        return long, places[item.nodeid.partition("::")[0]] if long else 0.0, item.path.name not in LONGEST

    items.sort(key=place)  # stable: the order within a file stays


def is_long(test: str) -> bool:
    """Return whether the test of this id has the mark `long`."""
    name, _, parameters = test.partition("[")
    return name in LONG_TESTS and parameters.removesuffix("]") not in LONG_TESTS[name]


def unknown_long_tests(tests: Iterable[str], long_tests: Mapping[str, set[str]] = LONG_TESTS) -> list[str]:
    """Return the lines of `LONG_TESTS_FILE` that are wrong, of the files of these tests."""
    known = set(tests)
    names, files = {test.partition("[")[0] for test in known}, {test.partition("::")[0] for test in known}
    listed = [(name, kept) for name, kept in long_tests.items() if name.partition("::")[0] in files]
    wrong = [name for name, _ in listed if name not in names]
    ids = [f"{name}[{one}]" for name, kept in listed if name in names for one in sorted(kept)]
    return wrong + [one for one in ids if one not in known]


@pytest.hookimpl(tryfirst=True)  # ahead of the fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--long-until")
    if until is not None and item.get_closest_marker("long") and time.time() > until:
        pytest.skip("the time for long tests is over")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist=loadfile` the long tests of a file are given out apart from its other tests."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return f"{super()._split_scope(nodeid)}{' long' * is_long(nodeid)}"

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the files that take longest, in seconds of all their tests: `LONGEST` is kept by it."""
    seconds = defaultdict[str, float](float)
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    for name, took in sorted(seconds.items(), key=lambda one: -one[1])[: config.getoption("--longest-files")]:
        terminalreporter.write_line(f"{took:7.1f} s {name}")


def pytest_report_header() -> str:
    parts = []
    for name in ("core", "sim", "tools", "api", "runtime", "vllm"):
        try:
            parts.append(f"{name} {version(f'lockstep-{name}')}")
        except PackageNotFoundError:
            parts.append(f"{name} {'from its sources' if find_spec(f'lockstep.{name}') else 'not installed'}")
    folders = [f"{name}={os.environ.get(name) or 'unset'}" for name in ("LOCKSTEP_DATA", "LOCKSTEP_PEERS")]
    return f"lockstep: {', '.join(parts)}; {', '.join(folders)}"
