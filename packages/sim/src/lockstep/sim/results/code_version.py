"""Version and commit of the simulator that ran."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def code_version() -> str:
    """The version of the installed simulator."""
    try:
        return version("lockstep-sim")
    except PackageNotFoundError:
        return "source"


@cache
def code_commit() -> str | None:
    """The commit this file was checked out from, with `-dirty` if something changed since; None if it was installed."""
    root = Path(__file__).resolve().parents[5]
    if not (root / ".git").exists() or not (root / "packages" / "sim").is_dir():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
