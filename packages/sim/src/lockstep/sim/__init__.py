"""The simulator: the scheduler of `lockstep.core` in virtual time, with cost models, workloads, metrics and reports.

from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate

setup = assemble(Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=500,rate=4"))
simulate(setup).data.summary["latency"]["ttft_us_p99"]
"""
