"""CPU time per simulated request of a cluster, beside that of one engine: eight replicas at eight times the rate.

The bar: at most 1.2 times per request. Peers slow down as replicas are added, because their engines take turns event by
event; ours meet at the router only. The same traffic per engine throughout: Poisson, about 1,080 tokens in and 216 out.
Counted is user and system time of this process for the replay and its metrics, journals not written: by machine code,
or with `--core` by the core, which plans fall back on.

    python benchmarks/cluster_speed.py [--replicas 8] [--requests 3000] [--rounds 3] [--core]
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its idle threads spin, and would be counted

import argparse
import gc
import statistics
import sys

from calibration import calibrate

from lockstep.core.cluster.router import ROUTER_POLICIES, RouterConfig
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.fast.machine_code import is_available
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

MODEL, GPU = "llama-3.1-8b", "a100"
SETTINGS = {"max_running_requests": 128, "chunked_prefill_size": 512, "max_prefill_tokens": 512, "pages": 26_000}
LENGTHS = "input=lognormal:800:0.75,output=lognormal:180:0.6"
RATE = 6.45  # per engine
BAR = 1.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--requests", type=int, default=3_000, help="per engine (default 3000)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; the median counts (default 3)")
    parser.add_argument("--core", action="store_true", help="by the core, which takes ten times as long")
    arguments = parser.parse_args()
    compiled = not arguments.core
    if compiled and not is_available():
        print("numba, which makes machine code, is not installed: pip install 'lockstep-sim[fast]'", file=sys.stderr)
        return 2
    print("calibration, CPU us:", ", ".join(f"{name} {us:,.1f}" for name, us in calibrate().items()))

    replicas, requests = arguments.replicas, arguments.requests
    base = scenario(requests, 1)
    setup = assemble(base)

    def of_one() -> float:
        gc.collect()
        return simulate(setup, compiled=compiled).cpu_s / requests

    def of_many(policy: str) -> float:
        many = scenario(requests * replicas, replicas)
        cluster = assemble_cluster(ClusterScenario(base=many, replicas=replicas, router=RouterConfig(policy=policy)))
        gc.collect()
        return simulate_cluster(cluster, compiled=compiled).cpu_s / (requests * replicas)

    of_one()  # makes or loads machine code
    alone: list[float] = [of_one()]
    together: dict[str, list[float]] = {policy: [] for policy in ROUTER_POLICIES}
    ratios: dict[str, list[float]] = {policy: [] for policy in ROUTER_POLICIES}
    for _ in range(arguments.rounds):
        for policy, measured in together.items():  # one engine before and after each: the machine's mood changes
            measured.append(of_many(policy))
            alone.append(of_one())
            ratios[policy].append(measured[-1] / statistics.mean(alone[-2:]))

    one_us = statistics.median(alone) * 1e6
    print(f"one engine at {RATE:g}/s: {one_us:,.0f} us per request")
    worst = 0.0
    for policy, measured in together.items():
        ratio = statistics.median(ratios[policy])
        worst = max(worst, ratio)
        us = statistics.median(measured) * 1e6
        print(f"{replicas} engines at {RATE * replicas:g}/s, {policy:16} {us:,.0f} us per request, {ratio:.2f} x one")
    print(f"the bar of {BAR} is {'reached' if worst <= BAR else 'not reached'}: at most {worst:.2f}")
    return int(worst > BAR)


def scenario(requests: int, engines: int) -> Scenario:
    workload = f"gen:n={requests},rate={RATE * engines:g},{LENGTHS}"
    return Scenario(model=MODEL, gpu=GPU, workload=workload, settings=SETTINGS, engine="none")


if __name__ == "__main__":
    sys.exit(main())
