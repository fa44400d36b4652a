"""The scenario of a stored run, parsed from the command line in its folder.

requested_by_command("lockstep simulate --model qwen3-8b --gpu h200 --workload gen:n=500,rate=4 --replicas 2")
"""

from __future__ import annotations

import shlex

from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import take
from lockstep.sim.cli.requested import requested_of
from lockstep.sim.cli.run_options import RunOptions
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.scenario.scenario import Scenario


def requested_by_command(command: str) -> Scenario | ClusterScenario:
    """Return the scenario of a run from its stored command line. Raises ConfigError if it is another command's."""
    words = shlex.split(command)
    if words[:2] != ["lockstep", "simulate"]:
        raise ConfigError(f"the run was not made by `lockstep simulate`, but by `{' '.join(words[:2])}`")
    options = dict(simulate.make_context("lockstep simulate", words[2:]).params)
    take(RunOptions, options)
    return requested_of(options)
