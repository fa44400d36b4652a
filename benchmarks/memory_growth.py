"""How much memory a simulation takes for each request more: one workload at several lengths, each in a new process.

The workload is the anchor of simulation_speed.py, or that of `--workload` with the length in place of `{n}`. Memory
is the peak resident set of the process, which has everything in it: the workload read or generated, every decision with
its digest, the journal written to a file, all metrics measured; with `--compiled` no journal, and machine code. Growth
is the difference of the peaks of two lengths, divided by the difference of the requests that finished.

    LOCKSTEP_PEERS=... python benchmarks/memory_growth.py [--n 10000 20000 40000]
    python benchmarks/memory_growth.py --n 100000 300000 1000000 \
        --workload 'gen:n={n},rate=100,input=lognormal:128:0.75,output=lognormal:8:0.6'

The bar is 1 KB per finished request, between the shortest and the longest. Exit status 1: the bar was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from simulation_speed import GPU, MODEL, SETTINGS

from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

BAR_BYTES = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--n", type=int, nargs="+", default=[10_000, 20_000, 40_000], help="lengths (default 10000 20000 40000)"
    )
    parser.add_argument("--workload", metavar="TEXT", help="as for `lockstep simulate`, {n} being the length")
    parser.add_argument("--compiled", action="store_true", help="no journal, machine code")
    parser.add_argument("--measure", metavar="WORKLOAD", help="simulate this in this process, and print JSON")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, compiled=arguments.compiled)))
        return 0
    lengths = sorted(set(arguments.n))
    if len(lengths) < 2 or lengths[0] < 1:
        print(f"--n {' '.join(map(str, arguments.n))}: growth needs two different lengths above 0", file=sys.stderr)
        return 2
    text: str | None = arguments.workload
    if text is not None and "{n}" not in text:
        print(f"--workload {text}: it has no {{n}}, so all lengths would be one", file=sys.stderr)
        return 2
    peers = os.environ.get("LOCKSTEP_PEERS")
    if text is None and peers is None:
        print("LOCKSTEP_PEERS is not set: it names the folder with make_workload.py", file=sys.stderr)
        return 2
    print(f"{MODEL} on {GPU}; {'the anchor' if text is None else text}")
    figures: list[dict[str, Any]] = []
    print("  requests  finished   batches   workload read   peak      growth per finished request   CPU")
    with tempfile.TemporaryDirectory(prefix="lockstep-memory-") as folder:
        for n in lengths:
            workload = anchor(Path(folder), Path(peers or ""), n) if text is None else text.replace("{n}", str(n))
            one = [sys.executable, __file__, "--measure", workload, *(["--compiled"] if arguments.compiled else [])]
            figures.append(json.loads(subprocess.run(one, check=True, capture_output=True, text=True).stdout))
            now = figures[-1]
            more = f"{growth_bytes(*figures[-2:]):,.0f} bytes" if len(figures) > 1 else ""
            print(
                f"{n:10,} {now['finished']:9,} {now['batches']:9,} {now['read_bytes'] / 1e6:12,.1f} MB "
                f"{now['peak_bytes'] / 1e6:7,.1f} MB {more:>22} {now['cpu_s']:14,.0f} s",
                flush=True,
            )
    grown = growth_bytes(figures[0], figures[-1])
    verdict = "kept" if grown < BAR_BYTES else "missed"
    print(
        f"{grown:,.0f} bytes per finished request between {lengths[0]:,} and {lengths[-1]:,}; "
        f"the bar of {BAR_BYTES:,} is {verdict}"
    )
    return int(grown >= BAR_BYTES)


def anchor(folder: Path, peers: Path, n: int) -> str:
    """Write the anchor workload and return its path."""
    path = folder / f"anchor-{n}.csv"
    make = [sys.executable, str(peers / "make_workload.py"), str(path), "--n", str(n)]
    subprocess.run(make, check=True, capture_output=True)
    return str(path)


def growth_bytes(shorter: dict[str, Any], longer: dict[str, Any]) -> float:
    """Memory for each request more."""
    grown: float = longer["peak_bytes"] - shorter["peak_bytes"]
    return grown / (longer["finished"] - shorter["finished"])


def measure(workload: str, *, compiled: bool) -> dict[str, float]:
    """Simulate once, in this process."""
    setup = assemble(Scenario(model=MODEL, gpu=GPU, workload=workload, settings=SETTINGS, engine="none"))
    read_bytes, began_s = peak_bytes(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="lockstep-memory-") as folder:
        run = simulate(setup, compiled=True) if compiled else simulate(setup, folder=Path(folder))
    return {
        "finished": sum(run.data.summary["requests"]["by_finish_reason"].values()),
        "batches": run.batches,
        "read_bytes": read_bytes,
        "peak_bytes": peak_bytes(),
        "cpu_s": time.process_time() - began_s,
    }


def peak_bytes() -> int:
    """The most memory that this process has had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    sys.exit(main())
