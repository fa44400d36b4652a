"""Random runs of engines and clusters by the fast path and by the core: every number of both is equal.

    python -m tests.campaigns.fast_path                         20,000 runs, machine code if numba is installed
    python -m tests.campaigns.fast_path --runs 500 --seed 7     other runs
    python -m tests.campaigns.fast_path --interpreted           the kernel interpreted
    python -m tests.campaigns.fast_path --results FILE          a campaign that goes on where it ended, part by part

Every fourth run is one of a cluster. Settings and sizes are those of `tests/sim/test_fast_path.py`. A run that differs
is printed as the case that repeats it. Exit status 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from lockstep.sim.cluster.fast import run_compiled, unsupported_by_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.fast import fast_path, machine_code
from lockstep.sim.run import fast_runs
from lockstep.sim.run import simulate as simulate_module
from tests.support.fast_path_cases import Case, ClusterCase, cases, cluster_cases, differing, rare_events

PART = 400  # runs that one seed draws
CLUSTERS = 100  # of these, runs of clusters


class Tally:
    """The outcome of the runs so far."""

    def __init__(self) -> None:
        self.runs = self.left_to_core = 0
        self.differing: list[str] = []
        self.having: Counter[str] = Counter()  # runs with each rare event

    def engine(self, case: Case) -> None:
        """Run a case of one engine both ways."""
        setup = case.setup()
        assert fast_runs.unsupported_by(setup) == "", case
        ours = simulate_module._run_compiled(setup, None, always=True)
        self.runs += 1
        self.having[f"policy {case.sched['schedule_policy']}"] += 1
        if ours is None:
            self.left_to_core += 1
            return
        theirs = simulate_module.simulate(setup, compiled=False)
        self.having.update(name for name, count in rare_events(theirs.data) if count)
        if why := differing(ours.data, theirs.data):
            self.differs(case, why)

    def cluster(self, case: ClusterCase) -> None:
        """Run a case of a cluster both ways."""
        setup = case.setup()
        assert unsupported_by_cluster(setup) == "", case
        ours = run_compiled(setup, None, None, always=True)
        self.runs += 1
        self.having[f"router {case.router.policy}"] += 1
        if ours is None:
            self.left_to_core += 1
            return
        theirs = simulate_cluster(setup, compiled=False)
        self.having.update(f"routed by {reason}" for reason in theirs.routed_by_reason)
        pairs = [
            (ours.data, theirs.data),
            *((a.data, b.data) for a, b in zip(ours.engines, theirs.engines, strict=True)),
        ]
        self.having["clusters in a closed loop"] += case.concurrency is not None
        self.having["clusters with rejections"] += any(one.rejected for one in theirs.engines)
        why = next(filter(None, (differing(*pair) for pair in pairs)), "")
        names = ("routed_by_reason", "never_sent")
        why = why or next((name for name in names if getattr(ours, name) != getattr(theirs, name)), "")
        for one, other in zip(ours.engines, theirs.engines, strict=True):
            names = ("batches", "clamped", "rejected")
            why = why or next((name for name in names if getattr(one, name) != getattr(other, name)), "")
        if why:
            self.differs(case, why)

    def add(self, part: Tally) -> None:
        """Add the outcome of a part."""
        self.runs += part.runs
        self.left_to_core += part.left_to_core
        self.differing += part.differing
        self.having.update(part.having)

    def differs(self, case: Case | ClusterCase, why: str) -> None:
        """Note and print a case whose runs differ."""
        self.differing.append(why)
        print(f"DIFFERS: {why}\n  {case!r}", flush=True)


def main(arguments: list[str]) -> int:
    """Run a campaign. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first part; each part has the next one")
    parser.add_argument("--interpreted", action="store_true", help="interpret the kernel although numba is installed")
    parser.add_argument("--results", type=Path, help="file with a line for each part; parts in it are not run again")
    told = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if told.interpreted:
        machine_code.is_available = lambda: False  # type: ignore[assignment]  # as if numba were missing
    fast_path.FLUSH_ROWS, fast_path.FLUSH_ROWS_MIN, fast_path.FLUSH_ROWS_ALL, fast_path.GAPS = 20, 5, 40, 1
    tally, began_s, number = Tally(), time.process_time(), told.seed
    done = _stored(told.results)
    while tally.runs < told.runs:
        left = min(told.runs - tally.runs, PART)
        part = done.get(number)
        if part is None or part.runs < left:
            part = Tally()
            _part(part, number, left)
            _store(told.results, number, part)
        tally.add(part)
        number += 1
        print(
            f"{tally.runs} runs to seed {number - 1}, {len(tally.differing)} differ, "
            f"{tally.left_to_core} left to the core, {time.process_time() - began_s:.0f} s of CPU",
            flush=True,
        )
    print(", ".join(f"{name} {count}" for name, count in sorted(tally.having.items())))
    return 1 if tally.differing else 0


def _stored(path: Path | None) -> dict[int, Tally]:
    """Return the parts in a file of results, by seed."""
    parts: dict[int, Tally] = {}
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            stored = json.loads(line)
            part = parts[stored["seed"]] = Tally()
            part.runs, part.left_to_core = stored["runs"], stored["left_to_core"]
            part.differing, part.having = stored["differing"], Counter(stored["having"])
    return parts


def _store(path: Path | None, number: int, part: Tally) -> None:
    """Append a part to the file of results."""
    if path is not None:
        line = {"seed": number, **vars(part)}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _part(tally: Tally, number: int, runs: int) -> None:
    clusters = max(runs * CLUSTERS // PART, 1)
    common = {
        "database": None,
        "phases": [Phase.generate],
        "suppress_health_check": list(HealthCheck),
        "deadline": None,
    }

    @seed(number)
    @settings(max_examples=max(runs - clusters, 1), **common)
    @given(cases())
    def engines(case: Case) -> None:
        tally.engine(case)

    @seed(number)
    @settings(max_examples=clusters, **common)
    @given(cluster_cases())
    def behind_routers(case: ClusterCase) -> None:
        tally.cluster(case)

    engines()
    behind_routers()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
