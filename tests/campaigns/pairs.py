"""Greedy requests through every feature and every pair of features on tensors; answers are those of one plain engine.

    python -m tests.campaigns.pairs                       200 requests for each check
    python -m tests.campaigns.pairs --requests 20
    python -m tests.campaigns.pairs --only "adapters"     cases whose name has this text
    python -m tests.campaigns.pairs --list                names of all cases
    python -m tests.campaigns.pairs --seed 7              the same requests again

The cases are the rows of "Which pairs are tested on tensors" in docs/distributed.md, and each feature alone, with an
overlap of 1 and of 2. Prompts share beginnings, running requests are retracted by force, one request in ten is
cancelled at a random time, and the canary checks every KV slot before it is read. The journal of each engine is
replayed. The last column has what must have happened at least once; with fewer than 60 requests, loads from host memory
and storage may be missing. Pairs that engines refuse follow, with the first line of each error. Ctrl-C prints the
table so far. Exit status 1 after any fault.
"""

from __future__ import annotations

import argparse
import logging
import random
import shlex
import sys
import tempfile
from pathlib import Path

from tests.support.feature_campaign import CASES, Case, Models, Outcome, campaign, label, table
from tests.support.refused_pairs import REFUSED, Refused, refusal

LINES = 5  # faults of one check that are printed


def is_meant(case: Case, part: str) -> bool:
    """Return whether a part of a name means a case: a whole title means that case only."""
    return case.title == part if any(one.title == part for one in CASES) else part in case.title


def main(arguments: list[str]) -> int:
    """Run a campaign. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of each check")
    parser.add_argument("--only", action="append", default=[], help="a part of the names of cases; may be repeated")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is printed")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    given = parser.parse_args(arguments)
    if given.requests < 1:
        parser.error("--requests must be at least 1")
    names = [label(case, overlap) for case in CASES for overlap in case.overlaps]
    if given.list:
        print("\n".join(names))
        return 0
    cases = [case for case in CASES if not given.only or any(is_meant(case, part) for part in given.only)]
    if not cases and not any(part in one.name for part in given.only for one in REFUSED):
        parser.error(f"no case has a name with {' or '.join(given.only)}; see --list")
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    again = f"python -m tests.campaigns.pairs --seed {seed} --requests {given.requests}"
    print(f"seed {seed}: {again}{''.join(f' --only {shlex.quote(part)}' for part in given.only)}", flush=True)

    outcomes: list[Outcome] = []

    def progress(one: Outcome) -> None:
        outcomes.append(one)
        print(f"{'failed' if one.faults else 'right':6}  {one.seconds:6.1f} s  {one.name}", flush=True)
        if one.faults:
            lines = [*one.faults[:LINES], *([f"{len(one.faults) - LINES} more"] if len(one.faults) > LINES else [])]
            print("\n".join(f"    {line}" for line in lines))
            print(f"    again: {again} --only {shlex.quote(one.case.title)}", flush=True)

    with tempfile.TemporaryDirectory(prefix="pairs-") as name:
        place = Path(name)
        models = Models(place, seed=seed, requests=given.requests)
        try:
            campaign(cases, models, seed=seed, place=place, progress=progress)
        except KeyboardInterrupt:
            print(f"{table(outcomes)}\nstopped after {len(outcomes)} checks")
            return 130
        refused = [one for one in REFUSED if not given.only or any(part in one.name for part in given.only)]
        not_refused = [fault for number, one in enumerate(refused) if (fault := _try(one, place / f"refused {number}"))]
    print(table(outcomes))
    failed = [one for one in outcomes if one.faults]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} checks are right")
    if refused:
        print(f"{len(refused) - len(not_refused)} of {len(refused)} refusals are right", *not_refused, sep="\n")
    return 1 if failed or not_refused else 0


def _try(one: Refused, folder: Path) -> str:
    """Print the error of a refused pair. Returns what is wrong with it; empty if nothing is."""
    folder.mkdir()
    try:
        print(f"refused  {one.name}: {refusal(one, folder).splitlines()[0]}", flush=True)
    except AssertionError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
