"""Build the documentation site; a broken link, an unknown anchor or a page that no menu has is an error.

    python3 dev.py site            into site/
    python3 dev.py site --serve    and serve it at http://127.0.0.1:8000 while pages are edited

MkDocs comes from PyPI into an environment of its own, as the clients of `tests/campaigns/clients.py` do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.campaigns.clients import Client, Servers, Skipped, install

ROOT = Path(__file__).resolve().parents[2]


def not_attempted(client: Client, servers: Servers) -> str:
    """Do nothing: MkDocs is no client of a server."""
    raise Skipped("it is run by tests.campaigns.site")


MKDOCS = Client("mkdocs", ("mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1", "ruff>=0.14"), not_attempted)


def main(arguments: list[str]) -> int:
    """Parse, build. Returns the exit status of MkDocs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="serve the site while pages are edited")
    given = parser.parse_args(arguments)
    try:
        install(MKDOCS)
    except Skipped as reason:
        print(f"the site is not built: MkDocs {reason}")
        return 0
    command = [MKDOCS.program("mkdocs"), *(["serve"] if given.serve else ["build", "--strict"])]
    return subprocess.call(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
