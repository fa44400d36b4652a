"""The simulator: the scheduler of `lockstep.core` in virtual time, with cost models, workloads, metrics and reports.

from lockstep.sim.run.simulate import Scenario, assemble, simulate

setup = assemble(Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=500,rate=4"))
simulate(setup).data.summary["latency"]["ttft_us_p99"]
"""
