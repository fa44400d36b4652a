"""Shared by every test: the effort of Hypothesis, the `--update` option of golden files, and one header line."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain

import pytest
from hypothesis import HealthCheck, settings

from tests.support import guide

# No deadline, and examples may be slow to draw: a slow machine is not a bug. The blob in a failure reruns exactly that
# example.
settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("lockstep"), max_examples=2000)
settings.load_profile("lockstep")  # pytest --hypothesis-profile=thorough overrides it

LONGEST = (
    "test_swarm.py",
    "test_fast_path.py",
    "test_resumable.py",
    "test_documented_commands.py",
    "test_plan.py",
    "test_overload.py",
    "test_resumption.py",
    "test_dp.py",
    "test_handover.py",
    "test_handover_hybrid.py",
    "test_hybrid_tiers.py",
    "test_media_handover.py",
    "test_tree_kernels.py",
    "test_drafts_on_ranks.py",
    "test_tree_engines.py",
    "test_tiers.py",
    "test_gpu_check.py",
    "test_gguf.py",
    "test_recovery.py",
    "test_model_recovery.py",
    "test_notebooks.py",
    "test_media_distributed.py",
    "test_pipeline.py",
)
"""Files that take longest: processes take one file after another, so the last ones should be short."""

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
    parser.addoption("--longest-files", type=int, default=0, metavar="N", help="print the N files that take longest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)  # stable: the order within a file stays


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
