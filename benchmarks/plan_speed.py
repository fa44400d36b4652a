"""CPU time of whole `lockstep plan` processes on recorded traces, with their workers; beside another checkout if given.

    chat         one, two and four H200 for a chat service's hour, an open loop, found to 5 %: docs/planning.md
    chat at 4/s  the fewest GPUs of two kinds for four requests per second of it: the README's example
    agents       sessions of coding agents in a closed loop, --quick
    ratio        16 H200 as mixed engines, and as three prefill engines and one decode engine, --quick

The numbers are user and system time, and the number of simulations that the plan names. With `--other CHECKOUT`, which
has its own environment, each plan is run by both in turn, and what they print is compared, as text and as JSON.

    LOCKSTEP_DATA=... python benchmarks/plan_speed.py [--case agents] [--rounds 1] [--other ../before]
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from calibration import calibrate
from recorded_data import CACHE_TRACE, data_folder

AGENTIC_TRACE = "traces/agentic/agentic_developers.jsonl.gz"
HERE = Path(__file__).resolve().parents[1]
CHAT = ("--model", "qwen3-32b", "--search", "tp=1,2,4", "--slo", "ttft_p90=30s", "--slo", "tpot_p90=300ms")
NONE_FOUND = 3  # exit status of a plan without a winner
EQUAL = {True: "equal", False: "DIFFERS"}
SIMULATIONS = re.compile(r"(\d+) simulations in")


class TimedPlan(NamedTuple):
    """One plan: its name, its trace in the data folder, and its other options."""

    name: str
    trace: str
    options: tuple[str, ...]


PLANS = (
    TimedPlan("chat", CACHE_TRACE, (*CHAT, "--gpus", "h200", "--search", "batching=prefill_first,mixed")),
    TimedPlan("chat at 4/s", CACHE_TRACE, (*CHAT, "--gpus", "h100,h200", "--rate", "4")),
    TimedPlan(
        "agents",
        AGENTIC_TRACE,
        (
            *("--model", "qwen3-32b", "--gpus", "h200", "--search", "tp=1,2,4", "--context-tokens-max", "131072"),
            *("--quick", "--slo", "ttft_p90=5s", "--slo", "tpot_p90=50ms"),
        ),
    ),
    TimedPlan(
        "ratio",
        CACHE_TRACE,
        (
            *("--model", "llama-3.1-70b", "--gpus", "h200", "--max-gpus", "16", "--tp", "4", "--quick"),
            *("--search", "prefill_decode=mixed,3:1", "--router", "prefix_affinity"),
            *("--slo", "ttft_p90=30s", "--slo", "tpot_p90=100ms"),
        ),
    ),
)


class EndedProcess(NamedTuple):
    """A process that has ended."""

    cpu_s: float  # user and system time, with that of its workers
    printed: str
    written: str  # its answer in JSON
    simulations: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="repetitions; the median counts (default 1)")
    parser.add_argument("--case", default="", help="only plans with this in their name")
    parser.add_argument("--other", type=Path, help="another checkout with its .venv, whose plans are run as well")
    parser.add_argument("--keep", type=Path, help="folder for what the plans print")
    asked = parser.parse_args()
    data = data_folder(CACHE_TRACE)
    print("calibration, CPU us:", ", ".join(f"{name} {us:,.1f}" for name, us in calibrate().items()))
    differ = False
    for plan in PLANS:
        if asked.case in plan.name:
            differ |= report(plan, data, asked)
    return int(differ)


def report(plan: TimedPlan, data: Path, asked: argparse.Namespace) -> bool:
    """Run a plan, and print its times. Return whether the other checkout gives another answer."""
    other, kept = asked.other, asked.keep
    checkouts = {"this": HERE} if other is None else {"other": other.resolve(), "this": HERE}
    runs: dict[str, list[EndedProcess]] = {name: [] for name in checkouts}
    for _ in range(asked.rounds):
        for name, checkout in checkouts.items():
            runs[name].append(run(checkout, plan, data))
    for name, done in runs.items():
        median_s = statistics.median(one.cpu_s for one in done)
        print(f"{plan.name:11} {name:6} {median_s:8.1f} s of CPU, {done[0].simulations} simulations", flush=True)
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
            (kept / f"{plan.name.replace('/', '-')}.{name}.txt").write_text(done[0].printed)
            (kept / f"{plan.name.replace('/', '-')}.{name}.json").write_text(done[0].written)
    if other is None:
        return False
    mine, theirs = runs["this"][0], runs["other"][0]
    same = {"text": mine.printed == theirs.printed, "JSON": mine.written == theirs.written}
    print(f"{plan.name:11} {', '.join(f'{kind} {EQUAL[is_same]}' for kind, is_same in same.items())}", flush=True)
    return not all(same.values())


def run(checkout: Path, plan: TimedPlan, data: Path) -> EndedProcess:
    """Run a plan by the environment of a checkout, and wait for its end."""
    lockstep = str(checkout / ".venv/bin/lockstep")
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        answer = Path(folder) / "answer.json"
        command = [lockstep, "plan", "--workload", str(data / plan.trace), *plan.options, "--json", str(answer)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode not in (0, NONE_FOUND):
            sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        written = answer.read_text()
    found = SIMULATIONS.findall(done.stderr)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return EndedProcess(cpu_s, done.stdout, written, int(found[-1]))


if __name__ == "__main__":
    sys.exit(main())
