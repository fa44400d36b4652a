"""Kill every process of a live server again and again, below clients that take up their streams again.

    python -m tests.campaigns.resumption                    1,000 kills of engine, worker, launcher and whole server
    python -m tests.campaigns.resumption --kills 100
    python -m tests.campaigns.resumption --only worker      one kind of process
    python -m tests.campaigns.resumption --dp 2             two engines behind a router
    python -m tests.campaigns.resumption --seed 7           the same requests and the same pauses again

The clients of `tests/campaigns/kills.py` keep their connections, so only engines are killed there. Here each answer is
kept (`Idempotency-Key`), and clients whose connection breaks come back with `GET /v1/streams/{id}` and
`Last-Event-ID`. The numbers of their events and every token are compared with what the answer must be. The server is
started again on the same journal and port after each end of the launcher. Exit status 1 after any fault.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from tests.support.returning import GAP_S, KINDS, WEIGHTS, Outcome, campaign, supervised


def main(arguments: list[str]) -> int:
    """Run a campaign. Returns the exit status."""
    return 1 if run(arguments).tally.faults else 0


def run(arguments: list[str]) -> Outcome:
    """Run a campaign; return its figures. It ends early only after a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=32, help="clients")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is printed")
    parser.add_argument("--speed", type=float, default=0.1, help="of the emulated GPU")
    parser.add_argument("--api-workers", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1, help="engines")
    parser.add_argument("--only", choices=KINDS, default=None, help="kind of process that is killed; default: all")
    parser.add_argument("--snapshot-s", type=float, default=2.0)
    parser.add_argument("--gap-s", type=float, nargs=2, default=GAP_S, help="between two kills")
    parser.add_argument("--logs", type=Path, default=None, help="copy the server's logs there")
    told = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if told.seed is None else told.seed
    again = shlex.join([*arguments, *(() if told.seed is not None else ("--seed", str(seed)))])
    print(f"seed {seed}: python -m tests.campaigns.resumption {again}", flush=True)
    with tempfile.TemporaryDirectory(prefix="resumption-") as name:
        server = supervised(
            Path(name), speed=told.speed, snapshot_s=told.snapshot_s, workers=told.api_workers, dp=told.dp
        )
        try:
            outcome = campaign(
                server,
                seed=seed,
                kills=told.kills,
                streams=told.streams,
                gap_s=tuple(told.gap_s),
                kinds=KINDS if told.only is None else (told.only,),
                weights=WEIGHTS if told.only is None else (1,),
                progress=lambda line: print(line, flush=True),
            )
        finally:
            server.server.end()
            if told.logs is not None:
                shutil.copytree(name, told.logs, ignore=shutil.ignore_patterns("run"), dirs_exist_ok=True)
        print(outcome.text())
        if outcome.tally.faults:
            print(server.server.text()[-3000:])
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
