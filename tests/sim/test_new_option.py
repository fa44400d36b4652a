"""An option of the simulator is one field of `Scenario`: all code that reads options then has it.

The field is added to a copy of the package, and the copy is run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

import lockstep.sim.run.simulate as simulate_module
from lockstep.host.options import options_of
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cli.stored_command import requested_by_command
from lockstep.sim.cluster.scenario import LINK_GBS, LINK_LATENCY_US, ClusterScenario
from lockstep.sim.cost.hardware import NETWORK_GBS, NETWORK_LATENCY_US
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.plan.trial import Trial
from lockstep.sim.scenario.scenario import Scenario, sim_options

PACKAGE = Path(simulate_module.__file__).parents[4]  # packages/sim
BEHIND = "    settings: Annotated["
FIELD = '    new_option: Annotated[int, SimOption("added by a test", searched=True)] = 3\n'
PROGRAM = """
import sys
from click.testing import CliRunner
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.stored_command import requested_by_command
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.plan.question import parse_search
from lockstep.sim.plan.trial import Trial

words = "--model qwen3-0.6b --gpu h100 --workload gen:n=2 --no-intervals --new-option 5 --out".split()
done = CliRunner().invoke(simulate, [*words, sys.argv[1]])
assert done.exit_code == 0, done.output
for command in (simulate, plan):
    assert "--new-option" in CliRunner().invoke(command, ["--help-all"]).output
command = "lockstep simulate --model m --gpu g --workload w --new-option 5 --seed 7"
scenario = requested_by_command(command)
assert scenario.new_option == 5 and requested_by_command(scenario.command()) == scenario
assert "--new-option 5" in scenario.command()
trial = Trial(base=scenario, replicas=1)
assert trial.record()["new_option"] == 5 and Trial.of_record(trial.record()) == trial
usual = Trial(base=requested_by_command(command.replace("--new-option 5 ", "")), replicas=1)
assert "new_option" not in usual.record() and usual.key != trial.key
assert parse_search(("new_option=1,2",)) == (("new_option", (1, 2)),)
"""


def test_an_option_that_is_one_field_is_everywhere(tmp_path: Path) -> None:
    copy = tmp_path / "src"
    shutil.copytree(PACKAGE / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / "lockstep/sim/scenario/scenario.py"
    text = source.read_text(encoding="utf-8")
    assert text.count(BEHIND) == 1
    source.write_text(text.replace(BEHIND, FIELD + BEHIND), encoding="utf-8")
    others = [path for path in sys.path if path and Path(path) != PACKAGE / "src"]
    run = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), *others])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    about = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["about"]
    assert "--new-option 5" in about["command"]


def other(field: Any) -> Any:
    """A value that is not the default."""
    if field.choices:
        return next(one for one in field.choices if one != field.default)
    values = {bool: not field.default, int: 12_345, float: 0.625, str: "a word"}
    return values.get(field.kind, {"page_size": 32} if field.name == "settings" else {"host_cache_gb": 1.5})


@pytest.mark.parametrize("field", [one for one in sim_options() if one.name != "slos"], ids=lambda one: one.name)
def test_no_consumer_leaves_an_option_out(field: Any) -> None:
    plain = Scenario(model="m", gpu="g", workload="w")
    changed = Scenario(**{one.name: getattr(plain, one.name) for one in fields(plain)} | {field.name: other(field)})
    assert changed != plain
    assert changed.command() != plain.command()
    requested = requested_by_command(changed.command())
    assert (requested if isinstance(requested, Scenario) else requested.base) == changed
    one, another = Trial(base=plain, replicas=1), Trial(base=changed, replicas=1)
    assert one.key != another.key
    assert Trial.of_record(another.record()) == another
    commands: dict[str, click.Command] = {"simulate": simulate, "plan": plan}
    for name, command in commands.items():
        parameters = {parameter.name for parameter in command.params}
        if field.takes(name) and field.kind is not dict:
            given = {"workload": "workloads", "gpu": "gpus"} if name == "plan" else {"workload": "workloads"}
            assert {field.name, given.get(field.name, field.name)} & parameters, name


def test_every_field_of_a_scenario_is_an_option() -> None:
    assert set(options_of(Scenario)) == {one.name for one in fields(Scenario)}
    assert {one.name for one in fields(ClusterScenario)} - set(options_of(ClusterScenario)) == {"base", "router"}


def test_defaults_are_those_of_what_they_stand_for() -> None:
    usual, scenario = Parallelism(), Scenario(model="m", gpu="g", workload="w")
    assert scenario.parallelism == usual
    assert NETWORK_GBS.value == LINK_GBS
    assert round(NETWORK_LATENCY_US.value) == LINK_LATENCY_US
