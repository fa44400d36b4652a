"""CPU time per simulated request on recorded traces with shared prefixes, beside NVIDIA's Rust simulator.

    mooncake   a chat service's hour (12,031 requests, 512-token blocks), eight engines behind a router: by round robin,
               and by prefix affinity; the peer's own router modes beside them, round robin and its KV router
    agentic    sessions of coding agents, a closed loop of 64 sessions on one engine

Every engine has 26,000 pages of 16, at most 128 running requests and 512 new tokens per extend, settings that both
simulators have; the time of a batch is each simulator's own. Ours counts user and system time of this process for the
replay with all metrics, by machine code; the peer's user time of its replay.

    LOCKSTEP_DATA=... DYNOSIM_PYTHON=... python benchmarks/trace_speed.py [--rounds 5] [--case mooncake]

DYNOSIM_PYTHON and what happens without it: see `simulation_speed.py`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its idle threads spin, and would be counted

import argparse
import gc
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from calibration import calibrate
from recorded_data import CACHE_TRACE, data_folder
from simulation_speed import SETTINGS, cpu_s, dynosim_python

from lockstep.core.cluster.router import RouterConfig, RouterPolicy
from lockstep.sim.cluster.fast import unsupported_by_cluster
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import ClusterSetup, assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.fast.machine_code import is_available
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.fast_runs import unsupported_by
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

MODEL, GPU = "llama-3.1-8b", "h100-sxm"
ENGINES = 8
SESSIONS = 64
AGENTIC_TRACE = "traces/agentic/agentic_developers.jsonl.gz"
AGENTIC_BLOCK_TOKENS = 64
REPLAY = Path(__file__).with_name("dynosim_replay.py")


class Case(NamedTuple):
    """One replay by both."""

    name: str
    ours: Callable[[], tuple[int, int]]  # returns requests and batches
    theirs: list[str]  # arguments of `dynosim_replay.py`


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="repetitions; the median counts (default 1)")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    asked = parser.parse_args()
    if not is_available():
        print("numba, which makes machine code, is not installed: pip install 'lockstep-sim[fast]'", file=sys.stderr)
        return 2
    data = data_folder(CACHE_TRACE)
    print("calibration, CPU us:", ", ".join(f"{name} {us:,.1f}" for name, us in calibrate().items()))
    python, reason = dynosim_python()
    if python is None:
        print(f"DynoSim skipped: {reason}")
    with tempfile.TemporaryDirectory(prefix="lockstep-speed-") as folder:
        for case in cases(data, Path(folder)):
            if asked.case in case.name:
                report(case, python, asked.rounds)
    return 0


def report(case: Case, python: Path | None, rounds: int) -> None:
    """Run a case by both in turn, and print the requests per CPU-second of each."""
    print(f"{case.name}: ", end="")
    case.ours()  # assembles the setup; loads machine code and the tables of the cost model
    ours, theirs, requests, batches = [], [], 0, 0
    failure = ""
    for _ in range(rounds):
        gc.collect()
        began_s = cpu_s()
        requests, batches = case.ours()
        ours.append(requests / (cpu_s() - began_s))
        if python is not None and not failure:
            done = subprocess.run([python, REPLAY, *case.theirs], capture_output=True, text=True)
            if done.returncode:
                failure = (done.stderr.strip().splitlines() or ["no message"])[-1]
            else:
                result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
                theirs.append(result["requests"] / result["user_s"])
    mine = statistics.median(ours)
    print(f"  {requests:,} requests, {batches:,} batches")
    print(f"  {mine:10,.0f} requests per CPU-second, {1e6 / mine * requests / batches:.1f} us per batch", flush=True)
    if theirs:
        peer = statistics.median(theirs)
        print(f"  {peer:10,.0f} DynoSim\n  {mine / peer:10.3f} lockstep / DynoSim", flush=True)
    elif failure:
        print(f"  DynoSim failed: {failure}", flush=True)


def cases(data: Path, folder: Path) -> list[Case]:
    """Return all cases; traces for the peer are written into the folder."""
    trace = folder / "mooncake.jsonl"
    with gzip.open(data / CACHE_TRACE) as packed:
        trace.write_bytes(packed.read())
    sessions = folder / "agentic.jsonl"
    write_sessions(data / AGENTIC_TRACE, sessions)
    of_mooncake = [str(trace), "--block-tokens", "512", "--workers", str(ENGINES), "--router"]
    of_sessions = [str(sessions), "--block-tokens", str(AGENTIC_BLOCK_TOKENS), "--concurrency", str(SESSIONS)]
    return [
        Case("mooncake, round robin", cluster(data / CACHE_TRACE, "round_robin"), [*of_mooncake, "round_robin"]),
        Case("mooncake, prefix affinity", cluster(data / CACHE_TRACE, "prefix_affinity"), [*of_mooncake, "kv_router"]),
        Case("agentic, closed loop", loop(data / AGENTIC_TRACE), of_sessions),
    ]


def cluster(trace: Path, policy: RouterPolicy) -> Callable[[], tuple[int, int]]:
    """Return a run of the trace on engines behind a router."""
    base = Scenario(model=MODEL, gpu=GPU, workload=str(trace), settings=SETTINGS, engine="none")
    scenario = ClusterScenario(base=base, replicas=ENGINES, router=RouterConfig(policy=policy))
    setups: list[ClusterSetup] = []

    def run() -> tuple[int, int]:
        if not setups:
            setups.append(assemble_cluster(scenario))
            print("left to the core: " + why if (why := unsupported_by_cluster(setups[0])) else "by machine code")
        made = simulate_cluster(setups[0], compiled=True)
        return made.data.summary["requests"]["completed"], sum(one.batches for one in made.engines)

    return run


def loop(trace: Path) -> Callable[[], tuple[int, int]]:
    """Return a closed loop of the trace's sessions on one engine."""
    base = Scenario(
        model=MODEL, gpu=GPU, workload=str(trace), settings=SETTINGS, engine="none", concurrency=SESSIONS, limit=21_000
    )
    setups: list[Setup] = []

    def run() -> tuple[int, int]:
        if not setups:
            setups.append(assemble(base))
            print("left to the core: " + why if (why := unsupported_by(setups[0])) else "by machine code")
        made = simulate(setups[0], compiled=True)
        return made.data.summary["requests"]["completed"], made.batches

    return run


def write_sessions(trace: Path, path: Path) -> None:
    """Write the sessions of an agentic trace as the peer reads them: block ids of the whole trace, delays in ms."""
    first: dict[str, int] = {}  # by session: where its block ids begin
    begun: set[str] = set()
    blocks = 0
    with gzip.open(trace, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    for row in rows:
        session = f"{row['trace']}/{row['agent']}"
        first.setdefault(session, -1)
        row["session"] = session
    most = dict.fromkeys(first, 0)
    for row in rows:
        most[row["session"]] = max([most[row["session"]], *(start + count for start, count in row["hash_runs"])])
    for session, count in most.items():
        first[session] = blocks
        blocks += count
    with path.open("w") as file:
        for row in rows:
            session = row["session"]
            ids = [first[session] + start + i for start, count in row["hash_runs"] for i in range(count)]
            tokens = min(row["in"], len(ids) * AGENTIC_BLOCK_TOKENS)
            if not tokens or not row["out"]:
                continue
            turn = {"session_id": session, "input_length": tokens, "output_length": row["out"], "hash_ids": ids}
            if session in begun:
                turn["delay"] = (row["think_time"] or 0.0) * 1_000
            else:
                turn["timestamp"] = 0.0
                begun.add(session)
            file.write(json.dumps(turn) + "\n")


if __name__ == "__main__":
    sys.exit(main())
