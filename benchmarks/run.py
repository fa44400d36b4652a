"""Run the benchmarks that can run here, one after another, and list those skipped with the reasons.

    LOCKSTEP_DATA=... LOCKSTEP_PEERS=... python benchmarks/run.py [NAME ...] [--list]

Each is a program of its own with options of its own; `python benchmarks/NAME.py --help` explains it. Exit status 1 if
one of them failed or missed its bar.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

# The benchmarks, and what each needs from outside: environment variables that name a folder, or a module.
NEEDS = {
    "radix_oracle": ("LOCKSTEP_DATA",),
    "radix_speed": ("LOCKSTEP_PEERS",),
    "scheduler_speed": ("LOCKSTEP_PEERS",),
    "policy_pass": ("LOCKSTEP_PEERS",),
    "host_loop": ("torch",),
    "overlap": (),
    "http_overhead": ("fastapi",),
    "load_generators": ("aiperf",),
    "simulation_speed": ("LOCKSTEP_PEERS",),
    "memory_growth": ("LOCKSTEP_PEERS",),
    "cluster_speed": (),
    "profiles": ("LOCKSTEP_DATA",),
    "rtx4090_truth": ("LOCKSTEP_DATA",),
    "vllm_steps": ("LOCKSTEP_PEERS",),
    "serving_points": ("LOCKSTEP_DATA",),
    "parallel_points": ("LOCKSTEP_DATA",),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all if none is named")
    parser.add_argument("--list", action="store_true", help="name them and what they need, and stop")
    arguments = parser.parse_args()
    if arguments.list:
        for name, needs in NEEDS.items():
            print(f"{name:20} {' '.join(needs)}".rstrip())
        return 0
    unknown = [name for name in arguments.names if name not in NEEDS]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(NEEDS)}", file=sys.stderr)
        return 2

    verdicts = {name: run(name, NEEDS[name]) for name in arguments.names or NEEDS}
    print("== summary")
    for name, verdict in verdicts.items():
        print(f"{name:20} {verdict}")
    return int(any(verdict.startswith("FAILED") for verdict in verdicts.values()))


def run(name: str, needs: tuple[str, ...]) -> str:
    """Run one, its output shown as it comes; print the outcome."""
    for need in needs:
        if need.isupper() and not Path(os.environ.get(need, "/nowhere")).is_dir():
            return f"skipped: {need} names no folder"
        if need.islower() and find_spec(need) is None:
            return f"skipped: {need} is not installed"
    print(f"== {name}", flush=True)
    began_s = time.monotonic()
    status = subprocess.call([sys.executable, str(FOLDER / f"{name}.py")])
    print(flush=True)
    took = f"in {time.monotonic() - began_s:.0f} s"
    return f"ran {took}" if status == 0 else f"FAILED with exit status {status} {took}"


if __name__ == "__main__":
    sys.exit(main())
