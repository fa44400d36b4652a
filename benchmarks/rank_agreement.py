"""Output tokens per second of two ranks with and without schedulers that agree on every pass.

    OMP_NUM_THREADS=1 python benchmarks/rank_agreement.py --out runs/agreement [--requests 96] [--rounds 3]

Servers of the demo model in turn, each with one thread for each of two ranks, under the same closed loop:

    agreed        --tp 2 --attention-dp 2 --rank-schedulers: two schedulers, which agree; MLPs over both ranks
    one scheduler --tp 2: one scheduler for both ranks, so no agreement; attention and MLPs over both ranks
    apart         --dp 2: two engines of one rank, without agreement and without collectives

For ranks that agree also: the time from a proposal to the agreement, in the journal of the first rank. It has the wait
for the other rank, which may still be busy with the pass before.

An idle machine is needed: the ranks use both cores of a machine that has two.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from live_server import serving
from served_features import lockstep

from lockstep.core.contract.commands import ProposeBatch
from lockstep.core.contract.events import RanksAgreed
from lockstep.core.journal.replay import fold
from lockstep.sim.results.stored_run import read_run

LOAD = "gen:n={n},rate=100,input=lognormal:200:0.4,output=lognormal:64:0.4"
WARM_UP = 4  # requests that are not measured
SERVERS = {
    "agreed": ("--tp", "2", "--attention-dp", "2", "--rank-schedulers"),
    "one scheduler": ("--tp", "2"),
    "apart": ("--dp", "2"),
}


def tokens_per_s(name: str, folder: Path, requests: int, concurrency: int) -> float:
    """Serve the load with the options of a name; return what a client measures."""
    shutil.rmtree(folder, ignore_errors=True)
    with serving(*SERVERS[name], "--journal", str(folder / "journal")) as (url, _):
        lockstep(
            "bench", "serve", "--to", url, "--workload", LOAD.format(n=requests), "--concurrency", str(concurrency),
            "--warm-up", str(WARM_UP), "--out", str(folder / "client"),
        )  # fmt: skip
    measured = read_run(folder / "client").metrics["throughput"]["output_tokens_per_s"]
    assert isinstance(measured, int | float)
    return float(measured)


def agreement_us(journal: Path) -> np.ndarray:
    """Return the time from each proposal of a rank to the agreement on it, in us."""
    proposed_us: dict[int, int] = {}
    took_us = []
    for event, step in fold(journal):
        if isinstance(event, RanksAgreed) and event.round in proposed_us:
            took_us.append(event.time_us - proposed_us.pop(event.round))
        for command in step.commands:
            if isinstance(command, ProposeBatch):
                proposed_us[command.round] = event.time_us
    return np.asarray(took_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if min(given.rounds, given.requests, given.concurrency) < 1:
        parser.error("--rounds, --requests and --concurrency must be at least 1")
    rates: dict[str, list[float]] = {name: [] for name in SERVERS}
    for number in range(given.rounds):
        for name, seen in rates.items():
            folder = given.out / f"{name.replace(' ', '-')}-{number}"
            seen.append(tokens_per_s(name, folder, given.requests, given.concurrency))
    agreed = float(np.median(rates["agreed"]))
    for name, seen in rates.items():
        each = " ".join(f"{rate:.0f}" for rate in seen)
        middle = float(np.median(seen))
        print(f"{name:14} {middle:7.0f} tokens/s ({each})  agreed is {agreed / middle:.2f} of it")
    took_us = agreement_us(given.out / f"agreed-{given.rounds - 1}" / "journal" / "engines" / "0")
    p50, p90 = np.percentile(took_us, (50, 90))
    print(f"from a proposal to the agreement: {p50:.0f} us in the median, p90 {p90:.0f} us, {len(took_us)} rounds")


if __name__ == "__main__":
    main()
