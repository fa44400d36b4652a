"""Simulated requests per CPU-second on the anchor workload, beside NVIDIA's Rust simulator in the same run.

The anchor: 16,000 Poisson requests, about 1,080 tokens in and 216 out; 128 running, 512 new tokens per extend, 26,000
pages of 16. Ours counts user and system time of one process for the replay and nothing else, all metrics measured.
Start-up, loading machine code, reading the workload and the report are not in it; invariant checks are off. Three:

    machine code   no journal: what `lockstep plan` runs, and the scope of theirs, which counts user time of its replay
    core           the same by the core, which plans fall back on
    journal        by the core, every decision with its digest, the journal written to a file

All three make the same decisions, and measure the same: a difference is an error here.

    LOCKSTEP_PEERS=... python benchmarks/simulation_speed.py [--n 16000] [--rounds 1]

The peer needs a virtual environment of its own: the one with the interpreter that DYNOSIM_PYTHON names, or one that is
made in the folder for temporary files. Without either it is skipped, and the reason is printed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its idle threads spin, and would be counted

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from calibration import calibrate

from lockstep.sim.fast.machine_code import is_available
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

MODEL, GPU = "llama-3.1-8b", "a100"  # an 8B Llama on an A100: what Vidur's own example runs this workload on
SETTINGS = {
    "batching": "prefill_first",
    "reserve": "ratio",
    "max_running_requests": 128,
    "chunked_prefill_size": 512,
    "max_prefill_tokens": 512,
    "pages": 26_000,
    "page_size": 16,
}
VIDUR_PER_S = 1_130  # published for this class of trace, metrics off; with metrics 715 to 797
BAR_PER_S = 6_000  # the bar is DynoSim behind that
DYNOSIM_PACKAGES = (
    ("--no-deps", "ai-dynamo-runtime==1.6.1"),
    ("uvloop", "pydantic", "typing-extensions"),
)
SETUP_S_MAX = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=16_000, help="requests (default 16000)")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions; the median counts (default 1)")
    arguments = parser.parse_args()
    peers = os.environ.get("LOCKSTEP_PEERS")
    if peers is None:
        print("LOCKSTEP_PEERS is not set: it names the folder with make_workload.py", file=sys.stderr)
        return 2
    if not is_available():
        print("numba, which makes machine code, is not installed: pip install 'lockstep-sim[fast]'", file=sys.stderr)
        return 2
    print("calibration, CPU us:", ", ".join(f"{name} {us:,.1f}" for name, us in calibrate().items()))

    with tempfile.TemporaryDirectory(prefix="lockstep-speed-") as folder:
        workload = Path(folder, "anchor.csv")
        make = [sys.executable, str(Path(peers, "make_workload.py")), str(workload), "--n", str(arguments.n)]
        print(subprocess.run(make, check=True, capture_output=True, text=True).stdout.strip())
        setup = assemble(Scenario(model=MODEL, gpu=GPU, workload=str(workload), settings=SETTINGS, engine="none"))
        python, reason = dynosim_python()
        began_s = cpu_s()
        simulate(replace(setup, workload=replace(setup.workload, turns=setup.workload.turns.head(10))), compiled=True)
        print(f"making or loading machine code: {cpu_s() - began_s:.1f} s of CPU, not counted below")
        runs: dict[str, list[Measured]] = {"machine code": [], "core": [], "journal": []}
        theirs = []
        for number in range(arguments.rounds):
            runs["machine code"].append(replay(setup, None, compiled=True))
            runs["core"].append(replay(setup, None, compiled=False))
            runs["journal"].append(replay(setup, Path(folder, f"run{number}"), compiled=False))
            if python is not None:
                theirs.append(dynosim(python, Path(peers, "run_dynosim.py"), workload))

    print()
    first = runs["machine code"][0]
    assert all(run.summary == first.summary for run in chain(*runs.values())), "the three differ"
    print(f"lockstep on {setup.title}: {first.batches:,} batches, mean TPOT {first.tpot_us / 1e3:.2f} ms")
    per_s = {name: statistics.median(run.per_s for run in measured) for name, measured in runs.items()}
    for name, one in per_s.items():
        us = 1e6 / one * len(setup.workload.turns) / first.batches
        print(f"  {one:10,.0f} requests per CPU-second, {name}: {us:.1f} us per batch")
    kept = runs["journal"][0]
    print(f"             the journal has {kept.journal_mb:.0f} MB; at most {kept.memory_mb:,.0f} MB of memory")
    ours = per_s["machine code"]
    verdict = "reached" if ours >= BAR_PER_S else "not reached"
    print(f"  the bar of {BAR_PER_S:,} is {verdict}; {ours / VIDUR_PER_S:.1f} x Vidur ({VIDUR_PER_S:,}, published)")
    if theirs:
        peer = statistics.median(theirs)
        print(f"DynoSim, SGLang core, no journal\n  {peer:10,.0f} requests per CPU-second (user time)")
        for name, one in per_s.items():
            print(f"  {one / peer:10.3f} lockstep, {name} / DynoSim")
    else:
        print(f"DynoSim skipped: {reason}")
    return int(ours < BAR_PER_S)


class Measured(NamedTuple):
    """One replay."""

    per_s: float  # requests per CPU-second
    batches: int
    tpot_us: float
    journal_mb: float
    memory_mb: float  # at most, of the process so far
    summary: dict[str, Any]


def replay(setup: Setup, folder: Path | None, *, compiled: bool) -> Measured:
    """Run the setup once, metrics included, and with `folder` the journal."""
    gc.collect()
    began_s = cpu_s()
    run = simulate(setup, folder=folder, compiled=compiled)
    took_s = cpu_s() - began_s
    requests = run.data.summary["requests"]
    assert requests["completed"] == requests["arrived"] == len(setup.workload.turns), requests
    return Measured(
        requests["completed"] / took_s,
        run.batches,
        run.data.summary["latency"]["tpot_us_mean"],
        sum(path.stat().st_size for path in (folder / "journal").iterdir()) / 1e6 if folder else 0.0,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        run.data.summary,
    )


def cpu_s() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def dynosim(python: Path, program: Path, workload: Path) -> float:
    """Requests per CPU-second of the peer."""
    done = subprocess.run([python, program, workload], check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return float(result["requests"] / result["user_s"])


def dynosim_python() -> tuple[Path | None, str]:
    """The interpreter that has the peer, or why there is none."""
    named = os.environ.get("DYNOSIM_PYTHON")
    if named is not None:
        return (Path(named), "") if Path(named).exists() else (None, f"DYNOSIM_PYTHON names {named}, which is missing")
    folder = Path(tempfile.gettempdir(), "lockstep-dynosim")
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if ready.exists():
        return python, ""
    try:
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            *([*install, *packages] for packages in DYNOSIM_PACKAGES),
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SETUP_S_MAX)
    except subprocess.CalledProcessError as error:
        return None, f"`{' '.join(error.cmd)}` failed: {(error.stderr or error.stdout).strip().splitlines()[-1]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    ready.touch()
    return python, ""


if __name__ == "__main__":
    sys.exit(main())
