"""schemathesis against /openapi.json of a live server: `make openapi`. Prints what does not hold.

    python -m tests.campaigns.openapi                  all phases, some 7,000 requests
    python -m tests.campaigns.openapi --short          examples and a few drawn requests of each route
    python -m tests.campaigns.openapi --seed 7         the same requests again

schemathesis comes from PyPI into an environment of its own, as the clients of `tests/campaigns/clients.py` do. Checked
are the statuses, media types, `Allow` headers, access and errors of all routes, and that invalid bodies are refused.
Not checked is that every body which the schemas allow is accepted: that a prompt fits, that fields go together and that
a model exists is no part of a schema. 501 of routes that are not served, and 504 after a timeout of a microsecond,
are right.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.campaigns.clients import Client, Servers, Skipped, install
from tests.support.live_server import EMULATED, LiveServer, serving

KEY = "sk-of-a-user-of-this-campaign"
CONFIG = """
[checks]
positive_data_acceptance.enabled = false
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 501, 504]
negative_data_rejection.expected-statuses = ["4xx", "5xx"]
"""
RUN_S = 3000.0


def not_attempted(client: Client, servers: Servers) -> str:
    """Do nothing: schemathesis runs in `described`."""
    raise Skipped("it is run by tests.campaigns.openapi")


SCHEMATHESIS = Client("schemathesis", ("schemathesis",), not_attempted)


def described(server: LiveServer, folder: Path, *, seed: int, short: bool) -> list[str]:
    """Run schemathesis on the description that the server serves. Returns the violations."""
    (folder / "schemathesis.toml").write_text(CONFIG)
    asked = [SCHEMATHESIS.program("schemathesis"), "--config-file", str(folder / "schemathesis.toml"), "run"]
    asked += [f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}", "--no-color"]
    asked += ["--request-timeout", "60", "--suppress-health-check", "all", "--seed", str(seed), "--continue-on-failure"]
    asked += ["--phases", "examples,fuzzing" if short else "examples,coverage,fuzzing"]
    asked += ["--max-examples", "2" if short else "10", "--workers", "2"]
    finished = subprocess.run(asked, capture_output=True, text=True, timeout=RUN_S, cwd=folder, check=False)
    if re.search(r"\d+ generated", finished.stdout) is None:
        return [f"schemathesis ended with status {finished.returncode}: {(finished.stderr or finished.stdout)[-2000:]}"]
    print(*finished.stdout.strip().splitlines()[-12:], sep="\n  ", flush=True)
    if finished.returncode == 0:
        return []
    return [finished.stdout[-20_000:]]


def openapi(folder: Path, *, seed: int, short: bool) -> list[str]:
    """Run it on a server of its own. Returns what does not hold. Raises Skipped."""
    install(SCHEMATHESIS)
    (folder / "keys.toml").write_text(f"[[keys]]\ntenant = 'user'\nkey = '{KEY}'\n")
    arguments = ("--api-keys", str(folder / "keys.toml"), "--answer-tokens", "8", "--speed", "1000")
    with serving(folder / "log", *EMULATED, *arguments, "--log-level", "warning") as server:
        problems = described(server, folder, seed=seed, short=short)
        if errors := [line for line in server.text().splitlines() if "Traceback" in line or " ERROR " in line]:
            problems.append(f"the log has {len(errors)} errors: {errors[0]}")
    return problems


def main(arguments: list[str]) -> int:
    """Parse, run, print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is printed")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="openapi-") as name:
        try:
            problems = openapi(Path(name), seed=seed, short=given.short)
        except Skipped as skipped:
            print(f"schemathesis {skipped}", file=sys.stderr)
            return 1
    print("\n".join(problems) if problems else "everything holds")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
