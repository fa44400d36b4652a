"""Speed of another checkout and of this one, measured alternately in one run: before, after, ratio.

    scheduler    scheduler_speed.py: CPU time of every configuration of every workload, `in_all`; each row of w1 in a
                 process of its own, since large batches pay for the heap that earlier rows have left behind
    radix        radix_speed.py: CPU us per call
    simulation   simulation_speed.py: CPU us per simulated request, by machine code, by the core, with a journal
    instructions instructions per simulated request of that workload by the core, in thousands, counted by cachegrind:
                 the difference of runs of 300 and 100 requests; needs valgrind, one round is enough

Every checkout runs its own script with its own interpreter in a fresh process, because modules move between checkouts.
In each round both checkouts run each script once; the order changes from round to round. A row's figures are medians
over the rounds, and its ratio is the median of the ratios of each round, so that a machine that slows down changes
both sides alike. Rows that one of the checkouts lacks are listed and not compared. Run it on an otherwise idle machine.

    LOCKSTEP_PEERS=... python benchmarks/alternate.py OTHER_CHECKOUT [scheduler radix simulation ...] [--rounds 3]

OTHER_CHECKOUT is "before", the checkout of this script "after". The scripts do not judge their bars here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
DEARER = 1.05
"""Ratio above which a row is listed at the end."""
SETTINGS = (
    *("workload", "through", "page", "running", "groups", "concurrency", "requests", "overlap", "policy"),
    "conservativeness",
)
"""Fields of a row of scheduler_speed.py that tell it from the other rows."""

Costs = dict[str, float]
"""CPU time by row, in the unit of the row: lower is better."""


class Checkout(NamedTuple):
    """A checkout with the interpreter that runs its benchmarks."""

    root: Path
    python: Path

    def run(self, *arguments: str) -> str:
        """Run the interpreter in the checkout; return its output. Raises SystemExit where it fails, not by a bar."""
        command = [str(self.python), *arguments]
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env["DYNOSIM_PYTHON"] = "/nowhere"  # the other simulator is not measured
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or "Traceback" in done.stderr:  # 1: a bar is missed
            raise SystemExit(f"`{' '.join(command)}` failed with status {done.returncode}:\n{done.stderr.strip()}")
        return done.stdout


STEADY = """
import json, sys
from pathlib import Path

sys.path.insert(0, str(Path("benchmarks").resolve()))
import scheduler_speed as speed

sizes = speed.SMALL if sys.argv[1] == "small" else speed.Sizes()
page_size, place, runs = (int(given) for given in sys.argv[2:])
running = sizes.running[place]
prompts = [speed.packed(tokens) for tokens in speed.load_workloads().w1_prompts(running, sizes.context_tokens)]
config = speed.config(page_size, running * (sizes.context_tokens + 1024) + speed.CHUNK_TOKENS, running)
row = speed.median_of(1, config, lambda host: speed.steady_decode(host, prompts, sizes, runs=bool(runs)))
through = "DecodeRun" if runs else "Engine.step"
print(json.dumps({"workload": "w1", "through": through, "page": page_size, "running": running, **row}))
"""
"""A row of workload w1 of scheduler_speed.py: page size, place among the numbers running, whether by DecodeRun."""


def scheduler(checkout: Checkout, small: bool) -> Costs:
    """The rows of scheduler_speed.py, by their settings."""
    rows = []
    for runs in range(2):
        for page_size in (16, 1, 64):
            for place in range(2 if small else 4):
                wanted = ("small" if small else "full", page_size, place, runs)
                rows.append(json.loads(checkout.run("-c", STEADY, *map(str, wanted))))
    with tempfile.TemporaryDirectory(prefix="lockstep-alternate-") as folder:
        figures = Path(folder, "figures.json")
        options = ["--rounds", "1", "--json", str(figures), "--workload", "w2", "w3", "w6", "w7"]
        checkout.run("benchmarks/scheduler_speed.py", *options, *(["--small"] if small else []))
        rows += json.loads(figures.read_text(encoding="utf-8"))["rows"]
    return {" ".join(f"{name} {row[name]}" for name in SETTINGS if name in row): row["in_all"] for row in rows}


RADIX = """
import gc, json, statistics, sys
from pathlib import Path

sys.path.insert(0, str(Path("benchmarks").resolve()))
import radix_speed as speed

prompts = [speed.packed(tokens) for tokens in speed.load_workloads().w4_sequences(int(sys.argv[1]))]
gc.collect()
gc.disable()
for page_tokens in speed.PAGE_TOKENS:
    rounds = [speed.measure(prompts, page_tokens) for _ in range(speed.ROUNDS)]
    print(json.dumps([page_tokens, {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}]))
"""
"""The figures of radix_speed.py with all their digits; it prints tenths of a microsecond."""


def radix(checkout: Checkout, small: bool) -> Costs:
    """The rows of radix_speed.py, by operation and page size."""
    lines = checkout.run("-c", RADIX, "60" if small else "2000").splitlines()
    costs: Costs = {}
    for page_tokens, row in map(json.loads, lines):
        costs |= {f"pages of {page_tokens}: {name}": us for name, us in row.items()}
    return costs


def simulation(checkout: Checkout, small: bool) -> Costs:
    """CPU us per request by the three ways of simulation_speed.py."""
    text = checkout.run("benchmarks/simulation_speed.py", "--rounds", "1", "--n", "200" if small else "16000")
    found = re.findall(r"^ +([\d,]+) requests per CPU-second, (.+?):", text, re.MULTILINE)
    return {name: 1e6 / float(per_s.replace(",", "")) for per_s, name in found}


ONE_RUN = """
import inspect, sys, tempfile
from pathlib import Path

sys.path.insert(0, str(Path("benchmarks").resolve()))
import simulation_speed as speed

workload, journal = sys.argv[1:]
plain = {"engine": "none"} if "engine" in inspect.signature(speed.Scenario).parameters else {}
setup = speed.assemble(
    speed.Scenario(model=speed.MODEL, gpu=speed.GPU, workload=workload, settings=speed.SETTINGS, **plain)
)
with tempfile.TemporaryDirectory() as folder:
    speed.simulate(setup, folder=Path(folder, "run") if journal == "journal" else None, compiled=False)
"""
"""A run of simulation_speed.py by the core, not measured. Checkouts before engines in scenarios lack that field."""


def instructions(checkout: Checkout, small: bool) -> Costs:
    """Thousands of instructions per simulated request, by the core and with a journal."""
    few, many = (10, 30) if small else (100, 300)
    costs = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-alternate-") as folder:
        for way in ("core", "journal"):
            few_counted, many_counted = (counted_run(checkout, Path(folder), way, requests) for requests in (few, many))
            costs[way] = (many_counted - few_counted) / (many - few) / 1_000
    return costs


def counted_run(checkout: Checkout, folder: Path, way: str, requests: int) -> int:
    """Instructions of a whole process that simulates so many requests."""
    workload = folder / f"{requests}.csv"
    make = [sys.executable, str(Path(os.environ["LOCKSTEP_PEERS"], "make_workload.py")), str(workload)]
    subprocess.run([*make, "--n", str(requests)], check=True, capture_output=True)
    counter = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [*counter, str(checkout.python), "-c", ONE_RUN, str(workload), way]
    env["PYTHONHASHSEED"] = "0"
    done = subprocess.run(command, cwd=checkout.root, env=env, capture_output=True, text=True, check=False)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(f"`{' '.join(command)}` failed with status {done.returncode}:\n{done.stderr.strip()}")
    return int(found[1].replace(",", ""))


BENCHMARKS: dict[str, Callable[[Checkout, bool], Costs]] = {
    "scheduler": scheduler,
    "radix": radix,
    "simulation": simulation,
    "instructions": instructions,
}


class Row(NamedTuple):
    """One row in both checkouts: medians over the rounds."""

    name: str
    before: float
    after: float
    ratio: float


def compared(before: list[Costs], after: list[Costs]) -> list[Row]:
    """Return the rows that both checkouts have in every round, in the order of the first round."""
    rows = []
    for name in before[0]:
        if all(name in costs and costs[name] > 0 for costs in (*before, *after)):
            pairs = [(one[name], other[name]) for one, other in zip(before, after, strict=True)]
            medians = (statistics.median(values) for values in zip(*pairs, strict=True))
            rows.append(Row(name, *medians, statistics.median(other / one for one, other in pairs)))
    return rows


def geometric_mean(ratios: list[float]) -> float:
    """The mean of ratios."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def show(benchmark: str, rows: list[Row], unpaired: list[str]) -> None:
    """Print the rows of one benchmark, and the names of those that are not compared."""
    print(f"== {benchmark}")
    print(f"{'row':64} {'before':>10} {'after':>10} {'ratio':>7}")
    for row in rows:
        print(f"{row.name:64} {row.before:10.2f} {row.after:10.2f} {row.ratio:7.3f}")
    if rows:
        print(f"geometric mean of {len(rows)} ratios: {geometric_mean([row.ratio for row in rows]):.3f}")
    for name in unpaired:
        print(f"not compared: {name}")
    print(flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT", help="the checkout to compare with")
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"{', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each script in each checkout (default 3)")
    parser.add_argument("--python-here", type=Path, metavar="PYTHON", help="of this checkout (default: its .venv)")
    parser.add_argument("--python-there", type=Path, metavar="PYTHON", help="of the other one (default: its .venv)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures of all rounds there")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    arguments = parser.parse_intermixed_args()
    unknown = [name for name in arguments.benchmarks if name not in BENCHMARKS]
    if unknown or arguments.rounds < 1:
        parser.error(f"no benchmark {', '.join(unknown)}" if unknown else "--rounds must be at least 1")
    sides = {
        "before": Checkout(arguments.other.resolve(), interpreter(arguments.other, arguments.python_there)),
        "after": Checkout(HERE, interpreter(HERE, arguments.python_here)),
    }
    if not Path(os.environ.get("LOCKSTEP_PEERS", ""), "workloads.py").is_file():
        raise SystemExit("LOCKSTEP_PEERS does not name the folder with workloads.py")
    has_valgrind = shutil.which("valgrind") is not None
    if "instructions" in arguments.benchmarks and not has_valgrind:
        parser.error("instructions are counted by valgrind, which is not installed")
    names = arguments.benchmarks or [name for name in BENCHMARKS if name != "instructions" or has_valgrind]
    costs: dict[str, dict[str, list[Costs]]] = {name: {side: [] for side in sides} for name in names}
    for number in range(arguments.rounds):
        for name in names:
            for side in list(sides) if number % 2 == 0 else reversed(list(sides)):
                print(f"round {number + 1} of {arguments.rounds}: {name}, {side}", file=sys.stderr, flush=True)
                found = BENCHMARKS[name](sides[side], arguments.small)
                if not found:
                    raise SystemExit(f"{sides[side].root}: the benchmark {name} printed no rows")
                costs[name][side].append(found)

    every: list[Row] = []
    for name in names:
        before, after = costs[name]["before"], costs[name]["after"]
        rows = compared(before, after)
        paired = {row.name for row in rows}
        show(name, rows, sorted({row for one in (*before, *after) for row in one} - paired))
        every += [row._replace(name=f"{name}: {row.name}") for row in rows]
    if not every:
        print("the checkouts have no row in common", file=sys.stderr)
        return 1
    dearer = [row for row in every if row.ratio > DEARER]
    print(f"all: geometric mean of {len(every)} ratios {geometric_mean([row.ratio for row in every]):.3f}")
    print(f"rows above {DEARER}: {len(dearer) or 'none'}")
    for row in dearer:
        print(f"  {row.ratio:.3f}  {row.name}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")
    return 0


def interpreter(root: Path, given: Path | None) -> Path:
    """The interpreter of a checkout. Raises SystemExit if there is none."""
    python = given if given is not None else root / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} is missing\nhint: install the checkout, or name its interpreter")
    return python.absolute()  # not resolved: the link is what makes it the virtual environment's


if __name__ == "__main__":
    sys.exit(main())
