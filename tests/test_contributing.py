"""CONTRIBUTING.md: the files that it names exist, and its additions work in a scratch copy of the packages.

A cost term is added by `tests/sim/test_cost_terms.py`, a decided event by `tests/core/test_declarations.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SOURCES = ("packages/sched-core/src/lockstep", "packages/sim/src/lockstep")
CORE, SIM = "core", "sim"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:packages|docs|tests)/[^`: ]+)|\]\(([^)#]+)\)", PAGE))))
def test_every_file_that_is_named_exists(path: tuple[str, str]) -> None:
    assert (ROOT / (path[0] or path[1])).exists()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages of the core and the simulator in a folder of their own."""
    for source in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / source, tmp_path / "lockstep", dirs_exist_ok=True, ignore=ignored)
    return tmp_path


def insert(path: Path, before: str, text: str) -> None:
    """Insert text in front of the one place where the file has `before`."""
    source = path.read_text()
    assert source.count(before) == 1, f"{path.name} has {before!r} {source.count(before)} times"
    path.write_text(source.replace(before, text + before))


def run(copy: Path, code: str) -> str:
    """Run Python code with the packages of the copy. Returns its output."""
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ADMITTED = """
from lockstep.core import Engine, SchedConfig
from lockstep.core.contract.events import LaneReady, RequestAdmitted, RequestArrived, TokenRuns
engine = Engine(SchedConfig(page_size=2, pages=64, schedule_policy="last"))
for number in range(3):
    engine.step(RequestArrived(time_us=0, request_id=number, prompt=TokenRuns((100 * number, 4)), max_new_tokens=4))
step = engine.step(LaneReady(1))
print([event.request_id for event in step.decided if isinstance(event, RequestAdmitted)])
"""


def test_a_policy_is_a_function_and_two_lines(copy: Path) -> None:
    core = copy / "lockstep" / CORE
    insert(
        core / "scheduler" / "ordering.py",
        "POLICIES: dict[str, Policy] = {\n",
        "def last_come(queue: WaitingQueue) -> list[int]:\n    return list(range(len(queue)))[::-1]\n\n\n",
    )
    insert(core / "scheduler" / "ordering.py", '    "hrrn": hrrn,\n', '    "last": last_come,\n')
    insert(core / "contract" / "config.py", '"hrrn", "spf")\n', '"last", ')
    assert run(copy, ADMITTED) == "[2, 1, 0]\n"


def test_a_policy_that_is_not_named_in_the_settings_is_refused(copy: Path) -> None:
    insert(copy / "lockstep" / CORE / "scheduler" / "ordering.py", '    "hrrn": hrrn,\n', '    "last": lof,\n')
    with pytest.raises(AssertionError, match="schedule_policy"):
        run(copy, ADMITTED)


def test_a_resource_is_a_class_and_a_line(copy: Path) -> None:
    """A resource that only the first request gets: the others wait, for the reason that it gives."""
    admission = copy / "lockstep" / CORE / "scheduler" / "admission.py"
    insert(
        admission,
        "RESOURCES: tuple[type[Resource], ...] = (\n",
        "class OnePermit(Resource):\n"
        "    def fits(self, share: ExtendShare) -> Deferral | None:\n"
        "        return Deferral('rows', 1, 0) if share.request.request_id else None\n\n\n",
    )
    insert(admission, "    RunningLimit,\n", "    OnePermit,\n")
    fcfs = ADMITTED.replace(', schedule_policy="last"', "")
    out = run(copy, fcfs + "print([event.reason for event in step.decided if hasattr(event, 'reason')])")
    assert out == "[0]\n['rows']\n"


def test_an_option_of_the_simulator_is_one_field(copy: Path) -> None:
    """It is a flag of the command line, and stands in the command that a run keeps."""
    insert(
        copy / "lockstep" / SIM / "scenario" / "scenario.py",
        "    ep: Annotated[\n        int,\n",
        '    spare_gpus: Annotated[int, SimOption("GPUs without work", configures=True)] = 0\n',
    )
    code = """
from click.testing import CliRunner
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario
print(CliRunner().invoke(simulate, ["--help"]).output)
print(Scenario(model="qwen3-8b", gpu="h200", workload="gen:rate=1", spare_gpus=3).command())
"""
    out = run(copy, code)
    assert out.count("--spare-gpus") >= 2
