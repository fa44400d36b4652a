"""Random histories of engines that share work, every invariant of all of them checked after every event.

    python tests/fleet_swarm.py --steps 1_000_000      two prefill and two decode engines, a bad network; on all cores
    python tests/fleet_swarm.py --ranks ...            four data-parallel ranks that are late, raise and restart
    python tests/fleet_swarm.py --seed 1234            one history again

A failure prints its seed and the line that runs it again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import count, islice, repeat
from os import cpu_count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support import rank_group
from tests.support.fleet import histories
from tests.support.fleet.fleet import Fleet

SEEDS_PER_TASK = 10
TAME_STEPS = 200_000  # from this number of steps on, a missing mark is an error: the histories are too tame


def _fleet_history(seed: int) -> Fleet:
    """The history of a seed: every third one is of data-parallel ranks, every fourth of the others has more pools."""
    return histories.run_history(seed, ranks=seed % 3 == 2, hybrid=seed % 3 != 2 and seed % 4 == 1)


def run_seeds(first: int, ranks: bool) -> tuple[int, Counter[str], tuple[int, str] | None]:
    """Run consecutive seeds. Returns steps, marks, and the first failing seed with its error."""
    steps, marks = 0, Counter[str]()
    for seed in range(first, first + SEEDS_PER_TASK):
        done, seen, failure = run_seed(seed, ranks)
        if failure:
            return steps, marks, failure
        steps += done
        marks.update(seen)
    return steps, marks, None


def run_seed(seed: int, ranks: bool) -> tuple[int, Counter[str], tuple[int, str] | None]:
    """Run one seed. Returns steps, marks, and the seed with its error if it fails."""
    run_history = rank_group.run_history if ranks else _fleet_history
    try:
        engines = run_history(seed)
        if seed % 20 == 0:
            engines.replay()
    except Exception as error:  # any exception is a finding
        return 0, Counter(), (seed, f"{type(error).__name__}: {error}")
    return engines.steps, engines.marks, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="calls of Engine.step, at least (default 100,000)")
    parser.add_argument("--ranks", action="store_true", help="data-parallel ranks, not prefill and decode engines")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--first", type=int, help="first seed of the campaign (default: fresh)")
    parser.add_argument("--processes", type=int, default=cpu_count() or 1)
    options = parser.parse_args()
    expected = rank_group.EXPECTED_MARKS if options.ranks else histories.EXPECTED_MARKS
    if options.seed is not None:
        one = rank_group.run_history if options.ranks else _fleet_history
        print(f"seed {options.seed}: {one(options.seed).steps:,} steps, all well")
        return 0
    first = options.first if options.first is not None else time.time_ns() % 10**12
    print(f"first seed {first}, {options.processes} processes", file=sys.stderr)
    steps, marks, start = 0, Counter[str](), time.monotonic()
    firsts = count(first, SEEDS_PER_TASK)
    with ProcessPoolExecutor(options.processes) as pool:
        while steps < options.steps:
            for done, seen, failure in pool.map(
                run_seeds, list(islice(firsts, 2 * options.processes)), repeat(options.ranks)
            ):
                if failure:
                    print(f"\nFAILED seed {failure[0]}: {failure[1]}")
                    print(f"again: python tests/fleet_swarm.py{' --ranks' * options.ranks} --seed {failure[0]}")
                    return 1
                steps, marks = steps + done, marks + seen
            elapsed = time.monotonic() - start
            print(f"{steps:,} steps, {elapsed:,.0f} s, {steps / elapsed:,.0f} steps/s", file=sys.stderr)
    print(f"{steps:,} steps, no invariant broken")
    for mark in sorted(marks.keys() | set(expected)):
        print(f"  {marks[mark]:>8,}  {mark}")
    missed = [mark for mark in expected if not marks[mark]]
    if missed and steps >= TAME_STEPS:
        print(f"too tame: never reached {', '.join(missed)}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
