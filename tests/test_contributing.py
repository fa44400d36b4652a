"""CONTRIBUTING.md: the files that it names exist, and its additions work in a scratch copy of the packages.

Each addition is a few edits. With all of them the copy has the feature, and the tests of the repository pass on it;
with one of them left out a named test fails. A decided event is added by `tests/core/test_declarations.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SOURCES = ("packages/sched-core/src/lockstep", "packages/sim/src/lockstep")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:packages|docs|tests)/[^`: ]+)|\]\(([^)#]+)\)", PAGE))))
def test_every_file_that_is_named_exists(path: tuple[str, str]) -> None:
    assert (ROOT / (path[0] or path[1])).exists()


ORDERING, CONFIG = "core/scheduler/ordering.py", "core/contract/config.py"
ADMISSION = "core/scheduler/admission.py"
ROOFLINE, SCENARIO = "sim/cost/roofline.py", "sim/scenario/scenario.py"


class Edit(NamedTuple):
    """Text that is inserted in front of the one place where a file has `before`."""

    file: str
    before: str
    text: str


class Addition(NamedTuple):
    """A feature that is added to a copy of the packages.

    Args:
        edits: by what they add.
        code: Python code that prints `printed` where the copy has the feature.
        missed: the test that fails, by the edit that is left out; the others pass with all edits, too.
        wrong: edits that stand in for all others where something within an edit is left out, such as a declaration.
    """

    edits: dict[str, Edit]
    code: str
    printed: str
    missed: dict[str, str]
    wrong: dict[str, Edit] | None = None


ADMITTED = """
from lockstep.core import Engine, SchedConfig
from lockstep.core.contract.events import LaneReady, RequestAdmitted, RequestArrived, TokenRuns
engine = Engine(SchedConfig(page_size=2, pages=64, schedule_policy="%s"))
for number in range(3):
    engine.step(RequestArrived(time_us=0, request_id=number, prompt=TokenRuns((100 * number, 4)), max_new_tokens=4))
step = engine.step(LaneReady(1))
print([event.request_id for event in step.decided if isinstance(event, RequestAdmitted)])
print([event.reason for event in step.decided if hasattr(event, "reason")])
"""
EVERY_POLICY = "tests/core/test_ordering.py::test_there_is_a_function_for_every_name"
EVERY_RESOURCE = "tests/core/test_resources.py::test_every_resource_is_in_the_loop_of_admission"
EVERY_TERM = "tests/sim/test_cost_terms.py::test_every_builder_of_terms_is_listed"
EVERY_FIELD = "tests/sim/test_new_option.py::test_every_field_of_a_scenario_is_an_option"
ADDITIONS = {
    "policy": Addition(
        edits={
            "function": Edit(
                ORDERING,
                "POLICIES: dict[str, Policy] = {\n",
                "def last_come(queue: WaitingQueue) -> list[int]:\n"
                '    """The latest arrival first."""\n'
                "    return list(range(len(queue)))[::-1]\n\n\n",
            ),
            "line": Edit(ORDERING, '    "hrrn": hrrn,\n', '    "last": last_come,\n'),
            "name": Edit(CONFIG, '"hrrn", "spf")\n', '"last", '),
        },
        code=ADMITTED % "last",
        printed="[2, 1, 0]\n[]\n",
        missed={"line": EVERY_POLICY, "name": EVERY_POLICY},
    ),
    "resource": Addition(
        edits={
            "class": Edit(
                ADMISSION,
                "RESOURCES: tuple[type[Resource], ...] = (\n",
                "class OnePermit(Resource):\n"
                '    """Only the first request gets it."""\n\n'
                "    def fits(self, share: ExtendShare) -> Deferral | None:\n"
                "        return Deferral('rows', 1, 0) if share.request.request_id else None\n\n\n",
            ),
            "line": Edit(ADMISSION, "    RunningLimit,\n", "    OnePermit,\n"),
        },
        code=ADMITTED % "fcfs",
        printed="[0]\n['rows']\n",
        missed={"line": EVERY_RESOURCE},
    ),
    "cost term": Addition(
        edits={
            "builder": Edit(
                ROOFLINE,
                "TERMS: tuple[Callable[[RooflineModel], Iterable[CostTerm]], ...] = (\n",
                "def barrier_terms(model: RooflineModel) -> Iterator[CostTerm]:\n"
                '    """Wait for all GPUs once in a batch."""\n'
                '    yield CostTerm("barrier", "tokens", lambda batch, own: 700.0)\n\n\n',
            ),
            "line": Edit(ROOFLINE, "    RooflineModel.matrix_terms,\n", "    barrier_terms,\n"),
        },
        code="""
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import Parallelism, decode_shape, roofline_model
for split in (Parallelism(tp=8), Parallelism(tp=8, attention_dp=2)):
    cost, shape = roofline_model(load_model("qwen3-8b"), load_gpu("h200"), split), decode_shape(64, 1000)
    terms = cost.terms_us(shape)
    print(terms["barrier"], abs(sum(terms.values()) - cost.batch_us(shape).mean_us) < 1e-6)
""",
        printed="700.0 True\n" * 2,
        missed={"line": EVERY_TERM},
    ),
    "option": Addition(
        edits={
            "field": Edit(
                SCENARIO,
                "    ep: Annotated[\n        int,\n",
                '    spare_gpus: Annotated[int, SimOption("GPUs without work", configures=True)] = 0\n',
            )
        },
        code="""
from click.testing import CliRunner
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario
print(*("--spare-gpus" in CliRunner().invoke(one, ["--help-all"]).output for one in (simulate, plan)))
print(Scenario(model="qwen3-8b", gpu="h200", workload="gen:rate=1", spare_gpus=3).command())
""",
        printed="True True\n"
        "lockstep simulate --model qwen3-8b --gpu h200 --workload gen:rate=1 --spare-gpus 3 --seed 7\n",
        missed={"declaration": EVERY_FIELD, "page": "tests/test_options_page.py"},
        wrong={"declaration": Edit(SCENARIO, "    ep: Annotated[\n        int,\n", "    spare_gpus: int = 0\n")},
    ),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages of the core and the simulator in a folder of their own."""
    for source in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / source, tmp_path / "lockstep", dirs_exist_ok=True, ignore=ignored)
    return tmp_path


def insert(copy: Path, edits: Iterable[Edit]) -> None:
    """Carry out edits in the copy."""
    for edit in edits:
        path = copy / "lockstep" / edit.file
        source = path.read_text(encoding="utf-8")
        assert source.count(edit.before) == 1, f"{edit.file} has {edit.before!r} {source.count(edit.before)} times"
        path.write_text(source.replace(edit.before, edit.text + edit.before), encoding="utf-8")


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of the copy, in the folder of the repository."""
    env = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def run_tests(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of the repository on the packages of the copy."""
    return run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests)


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_is_there_with_its_edits(name: str, copy: Path) -> None:
    addition = ADDITIONS[name]
    insert(copy, addition.edits.values())
    done = run(copy, "-c", addition.code)
    assert (done.stdout, done.returncode) == (addition.printed, 0), done.stderr[-3000:]
    passing = {test for part, test in addition.missed.items() if part != "page"}
    done = run_tests(copy, *sorted(passing))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, addition in ADDITIONS.items() for part in addition.missed]
)
def test_a_part_that_is_left_out_is_noticed(name: str, part: str, copy: Path) -> None:
    addition = ADDITIONS[name]
    wrong = (addition.wrong or {}).get(part)
    insert(copy, [wrong] if wrong is not None else [edit for other, edit in addition.edits.items() if other != part])
    done = run_tests(copy, addition.missed[part])
    assert done.returncode == 1, done.stdout[-3000:]
    assert f"FAILED {addition.missed[part]}" in done.stdout


def test_a_policy_that_is_not_named_in_the_settings_is_refused(copy: Path) -> None:
    insert(copy, [edit for part, edit in ADDITIONS["policy"].edits.items() if part != "name"])
    done = run(copy, "-c", ADMITTED % "last")
    assert done.returncode != 0
    assert "schedule_policy" in done.stderr
